//! How MPI gets into a process, and what stands between the program and this library.

use crate::support::{job, on_every_mpi};
use anabranch_tests::{needs_simulator, scratch_folder, Job, Outcome};
use std::path::{Path, PathBuf};
use std::process::Command;
use xtask::layout::repository_root;
use xtask::mpi::Mpi;

on_every_mpi!(plugin, tool);

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
    assert!(stats.total("sends_value") <= 2, "{outcome}");
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
