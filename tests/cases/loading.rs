//! How MPI gets into a process, and what stands between the program and this library.

use crate::support::{job, on_every_mpi};
use anabranch_tests::{built, needs_simulator, program, scratch_folder, Job, Outcome};
use std::path::{Path, PathBuf};
use std::process::Command;
use xtask::layout::repository_root;
use xtask::mpi::Mpi;

on_every_mpi!(
    plugin,
    tool,
    tools_see_the_same_calls,
    tools_that_bypass,
    loaded_twice,
);

/// Compiles into the folder of a run.
fn compile(compiler: &Path, arguments: &[&str], folder: &Path, name: &str) -> PathBuf {
    needs_simulator("a compiler");
    let made = folder.join(name);
    let mut command = Command::new(compiler);
    command
        .args(["-w", "-O1", "-g", "-o"])
        .arg(&made)
        .args(arguments);
    let output = command.arg("-ldl").output().expect("the compiler runs");
    assert!(output.status.success(), "{command:?}: {output:?}");
    made
}

fn source(name: &str) -> String {
    let file = repository_root().join("tests/programs").join(name);
    file.display().to_string()
}

/// Messages on device memory, which are taken.
fn ring_and_pieces(job: Job) -> Outcome {
    let outcome = job.args(&["ring", "pieces"]).passes();
    let stats = outcome.stats();
    stats.check_complete();
    assert_eq!(stats.total("sends_device"), 2 * 20 + 64, "{outcome}");
    // The first ones may find a peer that is not ready.
    assert!(stats.total("sends_bcopy") <= 2, "{outcome}");
    outcome
}

/// A program that knows nothing of MPI, and a plugin that brings it in for itself alone.
const HOST_OF_PLUGINS: &str = r#"
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char **argv) {
    void *plugin = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    int (*run)(int, char **) = plugin ? (int (*)(int, char **))dlsym(plugin, "run") : 0;
    if (run) return run(argc - 1, argv + 1);
    fprintf(stderr, "%s\n", dlerror());
    return 1;
}
"#;

/// MPI comes late, and no look-up in the global scope finds it. Calls are logged, of every kind.
fn plugin(mpi: &Mpi) {
    let scratch = scratch_folder("plugin");
    let main = scratch.join("main.c");
    std::fs::write(&main, HOST_OF_PLUGINS).expect("source");
    let host = compile(
        Path::new("cc"),
        &[&main.display().to_string()],
        &scratch,
        "host",
    );
    let arguments = ["-shared", "-fPIC", "-Dmain=run", &source("p2p.c")];
    let plugin = compile(&mpi.mpicc, &arguments, &scratch, "plugin.so");
    let job = Job::new(mpi, 2, &host)
        .args(&[&plugin.display().to_string()])
        .env("ANABRANCH_LOG", "trace");
    let outcome = ring_and_pieces(job);
    for call in ["Sendrecv", "Waitall", "Barrier", "Finalize"] {
        for rank in 0..2 {
            let line = format!("anabranch[{rank}]: trace: call of MPI_{call}\n");
            assert!(outcome.finished.stderr.contains(&line), "{line}{outcome}");
        }
    }
    let _ = std::fs::remove_dir_all(scratch);
}

/// A tool in the executable calls this library by PMPI_ names.
fn tool(mpi: &Mpi) {
    ring_and_pieces(job(mpi, 2, "tool"));
}

/// The tracing tool as a shared library.
fn tracer(mpi: &Mpi, folder: &Path, name: &str, flags: &[&str]) -> String {
    let source = source("tracer.inc");
    let mut arguments = vec!["-shared", "-fPIC", "-x", "c", &source];
    arguments.extend(flags);
    let made = compile(&mpi.mpicc, &arguments, folder, name);
    made.display().to_string()
}

/// What the tool has noted of each rank's calls.
fn traces(folder: &Path, ranks: usize) -> Vec<String> {
    (0..ranks)
        .map(|rank| {
            let file = folder.join(rank.to_string());
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            let _ = std::fs::remove_file(file);
            text
        })
        .collect()
}

/// A tool notes the same calls with the same arguments in the same order without the library and with it, wherever it
/// stands, also where it sends messages of its own.
#[allow(
    clippy::too_many_lines,
    reason = "a table of tools and where they stand"
)]
fn tools_see_the_same_calls(mpi: &Mpi) {
    let scratch = scratch_folder("tools");
    let tool = tracer(mpi, &scratch, "libtracer.so", &[]);
    let library = built().library.display().to_string();
    let unlinked = program(mpi, "traced").expect("it compiles");
    let folder = scratch.display().to_string();
    let (path, origin) = (format!("-L{folder}"), format!("-Wl,-rpath,{folder}"));
    let linked = compile(
        &mpi.mpicc,
        &[
            "-Wl,--no-as-needed",
            &path,
            &origin,
            "-ltracer",
            &source("traced.c"),
        ],
        &scratch,
        "linked",
    );
    let with = |job: Job, piggyback: bool| {
        let job = job.env("TRACES", &folder);
        if piggyback {
            job.env("PIGGYBACK", "1")
        } else {
            job
        }
    };
    for piggyback in [false, true] {
        let alone = Job::new(mpi, 2, &unlinked).without_preload().roles("H");
        with(alone, piggyback).env("LD_PRELOAD", &tool).passes();
        let expected = traces(&scratch, 2);
        for trace in &expected {
            assert!(trace.lines().count() > 80, "{trace}");
            // What it asks while MPI is not up, and after.
            for answer in [
                "loaded: up 0 0, down 0 0",
                "before: up 0 0, down 0 0",
                "after: up 1 1, down 1 1",
            ] {
                assert_eq!(trace.matches(answer).count(), 1, "{answer}: {trace}");
            }
        }
        let exec = || {
            let path = unlinked.display().to_string();
            Job::new(mpi, 2, &built().command)
                .without_preload()
                .args(&["exec", &path])
                .env("LD_PRELOAD", &tool)
        };
        let places: [(&str, &dyn Fn() -> Job); 4] = [
            ("in front", &|| {
                let both = format!("{tool}:{library}");
                Job::new(mpi, 2, &unlinked).env("LD_PRELOAD", &both)
            }),
            ("behind", &|| {
                let both = format!("{library}:{tool}");
                Job::new(mpi, 2, &unlinked).env("LD_PRELOAD", &both)
            }),
            ("linked", &|| Job::new(mpi, 2, &linked)),
            ("exec", &exec),
        ];
        for (place, job) in places {
            for roles in ["H", "D"] {
                let job = with(job().roles(roles), piggyback).env("ANABRANCH_LOG", "info");
                let outcome = job.passes();
                let found = traces(&scratch, 2);
                for rank in 0..2 {
                    assert_eq!(found[rank], expected[rank], "{place} {roles} {outcome}");
                }
                assert!(
                    outcome.finished.stderr.contains("libtracer.so"),
                    "{place} {outcome}"
                );
                if roles == "D" {
                    let stats = outcome.stats();
                    stats.check_complete();
                    assert!(stats.total("sends_rts") > 20, "{place} {outcome}");
                }
                assert!(
                    !outcome.finished.stderr.contains("warn"),
                    "{place} {outcome}"
                );
            }
        }
    }
    let _ = std::fs::remove_dir_all(scratch);
}

/// A tool that goes on by the next `MPI_X` instead of PMPI works in front. Behind, the rank stays native, and says so once.
fn tools_that_bypass(mpi: &Mpi) {
    let scratch = scratch_folder("bypass");
    // It calls no PMPI at all, or MPI_Init alone by the next definition.
    let source = scratch.join("bypass.c");
    let text = r#"
#define _GNU_SOURCE
#include <mpi.h>
#include <dlfcn.h>
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
int MPI_Init_thread(int *c, char ***v, int wanted, int *got) { return NEXT(MPI_Init_thread)(c, v, wanted, got); }
int MPI_Recv(void *p, int n, MPI_Datatype t, int from, int tag, MPI_Comm comm, MPI_Status *s) { return NEXT(MPI_Recv)(p, n, t, from, tag, comm, s); }
#ifdef SOME_PMPI
int MPI_Barrier(MPI_Comm comm) { return PMPI_Barrier(comm); }
#endif
"#;
    std::fs::write(&source, text).expect("source");
    let source = source.display().to_string();
    let library = built().library.display().to_string();
    let traced = program(mpi, "traced").expect("it compiles");
    for flags in [&[][..], &["-DSOME_PMPI"][..]] {
        let mut arguments = vec!["-shared", "-fPIC", &source];
        arguments.extend(flags);
        let tool = compile(&mpi.mpicc, &arguments, &scratch, "bypass.so");
        let tool = tool.display().to_string();
        let behind = format!("{library}:{tool}");
        let outcome = Job::new(mpi, 2, &traced)
            .roles("H")
            .env("LD_PRELOAD", &behind)
            .passes();
        let warning =
            "bypass the library: every message of this rank stays native; put the tool in front";
        assert_eq!(
            outcome.finished.stderr.matches(warning).count(),
            2,
            "{outcome}"
        );
        assert!(outcome.stats.is_none(), "{outcome}");
        let in_front = format!("{tool}:{library}");
        let outcome = Job::new(mpi, 2, &traced)
            .env("LD_PRELOAD", &in_front)
            .passes();
        outcome.stats().check_complete();
        assert!(outcome.stats().total("sends_rts") > 20, "{outcome}");
        assert!(!outcome.finished.stderr.contains("warn"), "{outcome}");
    }
    let _ = std::fs::remove_dir_all(scratch);
}

/// The library is named twice, as one file or as two, and so is a tool: messages are taken once, and a tool sees the calls
/// that it sees without the library.
fn loaded_twice(mpi: &Mpi) {
    let scratch = scratch_folder("twice");
    let tool = tracer(mpi, &scratch, "libtracer.so", &[]);
    let library = built().library.display().to_string();
    let copy = |of: &str, name: &str| {
        let path = scratch.join(name);
        std::fs::copy(of, &path).expect("a copy");
        path.display().to_string()
    };
    let second = copy(&library, "libanabranch-copy.so");
    let other_tool = copy(&tool, "libtracer-copy.so");
    let link = scratch.join("link.so");
    std::os::unix::fs::symlink(&library, &link).expect("a link");
    let link = link.display().to_string();
    let traced = program(mpi, "traced").expect("it compiles");
    let folder = scratch.display().to_string();
    let run = |preload: &[&str], has_library: bool| {
        let mut job = Job::new(mpi, 2, &traced);
        if !has_library {
            job = job.without_preload().roles("H");
        }
        let preload = preload.join(":");
        let job = job.env("TRACES", &folder).env("ANABRANCH_LOG", "info");
        let outcome = job.env("LD_PRELOAD", &preload).passes();
        (traces(&scratch, 2), outcome)
    };
    let (l, l2, t, t2) = (&*library, &*second, &*tool, &*other_tool);
    for with in [
        &[l, l][..],
        &[l, &link],
        &[l, l2],
        &[t, l, t],
        &[t, l, t2],
        &[l, t, t2],
        &[t, l, l2],
        &[l, t, l2],
        &[l, l2, t],
    ] {
        // Without the library, the tools stand as they do with it.
        let tools: Vec<&str> = with
            .iter()
            .copied()
            .filter(|o| [t, t2].contains(o))
            .collect();
        let expected = match tools.is_empty() {
            true => vec![String::new(); 2],
            false => run(&tools, false).0,
        };
        let (found, outcome) = run(with, true);
        assert_eq!(found, expected, "{with:?} {outcome}");
        let stats = outcome.stats();
        stats.check_complete();
        assert_eq!(stats.ranks(), 2, "{with:?} {outcome}");
        assert!(stats.total("sends_rts") > 20, "{with:?} {outcome}");
        assert!(
            !outcome.finished.stderr.contains("warn"),
            "{with:?} {outcome}"
        );
    }
    let _ = std::fs::remove_dir_all(scratch);
}
