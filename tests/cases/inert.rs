//! Where the library has nothing to do, it does nothing and says nothing.

use crate::support::{job, knows_cuda, natively, on, on_every_mpi};
use anabranch_engine::mpi::{Class, Function};
use anabranch_tests::{built, run_bounded, scratch_folder, Finished, Stats};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use xtask::mpi::Mpi;

on_every_mpi!(
    switched_off,
    without_a_driver,
    without_a_device_buffer,
    launcher_preloaded,
    a_panic_stays_inside,
    a_panic_leaves_a_collective_alone,
);

fn run(command: &mut Command) -> Finished {
    let folder = scratch_folder("inert");
    let finished = run_bounded(command, &folder, Duration::from_secs(60));
    let _ = std::fs::remove_dir_all(folder);
    finished
}

fn preloaded(program: &str, arguments: &[&str]) -> Finished {
    run(Command::new(program)
        .args(arguments)
        .env("LD_PRELOAD", &built().library)
        .env_remove("LD_LIBRARY_PATH"))
}

#[track_caller]
fn silent(finished: &Finished, stdout: &str) {
    assert_eq!(
        (finished.code, finished.stderr.as_str()),
        (Some(0), ""),
        "{finished:?}"
    );
    assert_eq!(finished.stdout, stdout);
}

#[test]
fn programs_without_mpi() {
    silent(&preloaded("/bin/true", &[]), "");
    silent(
        &preloaded(
            "/bin/bash",
            &["-c", "x=$(echo a | cat); echo $x; (exit 3); echo $?"],
        ),
        "a\n3\n",
    );
    assert_eq!(preloaded("/bin/false", &[]).code, Some(1));
    let python = preloaded(
        "/usr/bin/env",
        &[
            "python3",
            "-c",
            "import os; r = os.fork(); os.waitpid(r, 0) if r else None; print(1)",
        ],
    );
    assert_eq!(python.code, Some(0), "{python:?}");
    assert_eq!(python.stderr, "");
}

/// No folder of shared memory, no file: a program without MPI leaves nothing behind.
#[test]
fn programs_without_mpi_leave_nothing() {
    let ours = || -> Vec<String> {
        let entries = std::fs::read_dir("/dev/shm")
            .into_iter()
            .flatten()
            .flatten();
        entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| name.contains("anabranch"))
            .collect()
    };
    let folder = scratch_folder("nothing");
    let summary = folder.join("stats.json");
    let before = ours();
    let finished = run(Command::new("/bin/true")
        .env("LD_PRELOAD", &built().library)
        .env("ANABRANCH_STATS", &summary));
    silent(&finished, "");
    assert!(!summary.exists());
    let new: Vec<_> = ours()
        .into_iter()
        .filter(|name| !before.contains(name))
        .collect();
    // Tests beside this one run jobs of their own, whose names end with them: what stays is what this one left.
    std::thread::sleep(Duration::from_millis(50));
    assert!(
        new.is_empty()
            || new
                .iter()
                .all(|name| !Path::new("/dev/shm").join(name).exists())
            || other_jobs_run(),
        "{new:?}"
    );
}

fn other_jobs_run() -> bool {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter(|entry| {
            std::fs::read_to_string(entry.path().join("maps"))
                .is_ok_and(|maps| maps.contains("libanabranch.so"))
        })
        .count()
        > 0
}

/// The launcher itself runs under the preload, as with `LD_PRELOAD=... mpirun ...`.
fn launcher_preloaded(mpi: &Mpi) {
    let mut command = Command::new(&mpi.mpirun);
    command.arg("--version").env("LD_PRELOAD", &built().library);
    let finished = run(&mut command);
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert_eq!(finished.stderr, "", "{finished:?}");
    let mut command = Command::new(&mpi.mpirun);
    command.env("LD_PRELOAD", &built().library);
    for name in ["OMPI", "PRTE"] {
        command
            .env(format!("{name}_ALLOW_RUN_AS_ROOT"), "1")
            .env(format!("{name}_ALLOW_RUN_AS_ROOT_CONFIRM"), "1");
    }
    command.args(["-np", "1", "/bin/echo", "hello"]);
    let finished = run(&mut command);
    assert_eq!(
        (finished.code, finished.stdout.as_str()),
        (Some(0), "hello\n"),
        "{finished:?}"
    );
}

fn switched_off(mpi: &Mpi) {
    let outcome = job(mpi, 2, "p2p")
        .args(&["small", "large"])
        .roles("H")
        .env("ANABRANCH", "off")
        .passes();
    assert!(
        outcome.stats.as_ref().is_none_or(Stats::is_idle),
        "{outcome}"
    );
    if !knows_cuda(mpi) {
        return;
    }
    let device = natively(mpi, 2, "p2p", &["large", "pieces"]).expect("one of them");
    let device = device
        .env("ANABRANCH", "off")
        .env("WITH_PRELOAD", "0")
        .passes();
    assert!(device.stats.as_ref().is_none_or(Stats::is_idle), "{device}");
    assert!(!device.finished.stderr.contains("anabranch"), "{device}");
}

fn without_a_driver(mpi: &Mpi) {
    let outcome = job(mpi, 2, "p2p")
        .args(&["small", "large", "both_ways"])
        .without_driver()
        .passes();
    assert!(!outcome.finished.stderr.contains("anabranch"), "{outcome}");
    assert!(
        outcome.stats.as_ref().is_none_or(Stats::is_idle),
        "{outcome}"
    );
}

/// A driver is there, but the program uses host memory only: nothing is taken, and nobody makes a context.
fn without_a_device_buffer(mpi: &Mpi) {
    for name in ["p2p", "requests", "probe"] {
        let outcome = job(mpi, 2, name).roles("H").passes();
        assert!(
            outcome.stats.as_ref().is_none_or(Stats::is_idle),
            "{outcome}"
        );
    }
}

/// Names and values that are none: a line for each, of each rank, and the program runs.
#[test]
fn unknown_options() {
    on("openmpi", |mpi| {
        let outcome = job(mpi, 2, "p2p")
            .args(&["pieces"])
            .env("ANABRANCH_EAGRE", "1")
            .env("ANABRANCH_CHUNK", "many")
            .env("ANABRANCH_LOG", "warn")
            .passes();
        let said = outcome.finished.stderr.lines();
        let mut lines: Vec<&str> = said.filter(|line| line.contains("anabranch")).collect();
        lines.sort_unstable();
        let value = "anabranch: warn: ANABRANCH_CHUNK=many is not understood: it takes a size from 4K to 1G \
                     (K, M, G, T are powers of 1024); using 1M";
        let name =
            "anabranch: warn: ANABRANCH_EAGRE is not an option: did you mean ANABRANCH_EAGER? \
                    (`anabranch config` lists all)";
        // Once, not by each rank.
        assert_eq!(lines, [value, name], "{outcome}");
    });
}

/// A panic inside an exported call becomes an MPI error; it never unwinds into the program.
fn a_panic_stays_inside(mpi: &Mpi) {
    // What is written right before MPI_Abort does not always come through a launcher.
    let folder = scratch_folder("panic");
    let said = folder.join("stderr");
    let to_file = format!("exec \"$@\" 2>> {}", said.display());
    let outcome = job(mpi, 2, "p2p")
        .args(&["medium"])
        .env("ANABRANCH_INJECT_PANIC", "MPI_Send")
        .ranks_under(&["sh", "-c", &to_file, "sh"])
        .run();
    let said = std::fs::read_to_string(said).expect("what the ranks said");
    // The program sees that MPI_Send failed and says so, then ends by MPI_Abort with this code.
    assert_eq!(outcome.finished.code, Some(3), "{said}\n{outcome}");
    // The library says so in one line of its own.
    for part in ["MPI_Send(", "FAILED rank 0", "internal error in MPI_Send"] {
        assert!(said.contains(part), "{part}:\n{said}\n{outcome}");
    }
    assert!(!outcome.finished.stderr.contains("SIGSEGV"), "{outcome}");
    let _ = std::fs::remove_dir_all(folder);
}

/// One around a call in which other ranks wait leaves the call as it is.
fn a_panic_leaves_a_collective_alone(mpi: &Mpi) {
    let job = job(mpi, 2, "p2p").args(&["pieces"]);
    let outcome = job.env("ANABRANCH_INJECT_PANIC", "MPI_Barrier").passes();
    for rank in 0..2 {
        let said = format!("anabranch[{rank}]: error: internal error around MPI_Barrier: ");
        assert!(outcome.finished.stderr.contains(&said), "{outcome}");
    }
}

/// An MPI library as far as the program below needs one, which says that it is VERSION.
const UNKNOWN_MPI: &str = r#"
#include <string.h>
int PMPI_Init(int *argc, char ***argv) { return 0; }
int MPI_Init(int *argc, char ***argv) { return PMPI_Init(argc, argv); }
int PMPI_Send(const void *p, int n, long type, int to, int tag, long comm) { return 42; }
int MPI_Send(const void *p, int n, long type, int to, int tag, long comm) { return PMPI_Send(p, n, type, to, tag, comm); }
int PMPI_Finalize(void) { return 0; }
int MPI_Finalize(void) { return PMPI_Finalize(); }
int PMPI_Get_library_version(char *version, int *length) {
    strcpy(version, VERSION);
    *length = strlen(version);
    return 0;
}
"#;

const ITS_PROGRAM: &str = r#"
int MPI_Init(int *, char ***);
int MPI_Send(const void *, int, long, int, int, long);
int MPI_Finalize(void);
int main(void) {
    int x = 1;
    if (MPI_Init(0, 0)) return 1;
    if (MPI_Send(&x, 1, 0, 0, 0, 0) != 42) return 2;
    return MPI_Finalize();
}
"#;

/// An MPI library that is none of the known ones: native, no crash, and one line that says why.
#[test]
fn an_unknown_mpi() {
    let folder = scratch_folder("unknown-mpi");
    std::fs::write(folder.join("fake.c"), UNKNOWN_MPI).unwrap();
    std::fs::write(folder.join("main.c"), ITS_PROGRAM).unwrap();
    let cc = |arguments: &[&str]| {
        let finished = run(Command::new("cc").current_dir(&folder).args(arguments));
        assert_eq!(finished.code, Some(0), "{finished:?}");
    };
    for (number, (soname, version, why)) in [
        ("libmpi.so.99", "Other MPI 1.0", "soname libmpi.so.99"),
        (
            "libmpi.so.12",
            "Open MPI v4.1.4",
            "soname libmpi.so.12 is that of Mpich, the version string is not",
        ),
        (
            "libmpi.so.40",
            "MPICH Version: 4.0.2",
            "soname libmpi.so.40 is that of OpenMpi, the version string is not",
        ),
        (
            "libmpi.so.40",
            "Open MPI v4.1.4",
            "soname of Open MPI, but no symbol",
        ),
        (
            "libmpi_abi.so.1",
            "Other MPI 5.0",
            "soname of the standard ABI, but no MPI_Abi_get_version",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let place = folder.join(number.to_string());
        std::fs::create_dir(&place).unwrap();
        let library = place.join(soname).display().to_string();
        let is = format!("-DVERSION=\"{version}\"");
        let named = format!("-Wl,-soname,{soname}");
        cc(&["-shared", "-fPIC", &is, &named, "-o", &library, "fake.c"]);
        cc(&["-o", "program", "main.c", &library]);
        let finished = run(Command::new(folder.join("program"))
            .env("LD_LIBRARY_PATH", &place)
            .env("LD_PRELOAD", &built().library));
        let silenced = run(Command::new(folder.join("program"))
            .env("LD_LIBRARY_PATH", &place)
            .env("ANABRANCH", "off")
            .env("LD_PRELOAD", &built().library));
        assert_eq!(finished.code, Some(0), "{finished:?}");
        assert_eq!(finished.stdout, "", "{finished:?}");
        let said =
            format!("anabranch: warn: MPI library {library} ({version}) is not a known one: {why}");
        let lines: Vec<&str> = finished.stderr.lines().collect();
        assert_eq!(lines.len(), 1, "{finished:?}");
        assert!(lines[0].starts_with(&said), "{said}: {finished:?}");
        assert!(
            lines[0].contains("; every message stays native. "),
            "{finished:?}"
        );
        silent(&silenced, "");
    }
    let _ = std::fs::remove_dir_all(folder);
}

fn symbols(arguments: &[&str]) -> Vec<String> {
    let library = built().library.display().to_string();
    let finished = run(Command::new("nm").args(["-D"]).args(arguments).arg(library));
    assert_eq!(finished.code, Some(0), "{finished:?}");
    let name = |line: &str| {
        line.split_whitespace()
            .last()
            .map(|word| word.split('@').next().unwrap_or(word).to_owned())
    };
    finished.stdout.lines().filter_map(name).collect()
}

/// What the other parts of a build ask of the library; no program is to call it.
const OWN: [&str; 4] = [
    "anabranch_release",
    "anabranch_ucp_begin",
    "anabranch_ucp_end",
    "anabranch_ucp_lane",
];

/// The library defines the MPI functions of the table, each under both names, its own small interface, and what other parts of
/// it call, nothing else.
#[test]
fn defined_symbols() {
    let exported = Function::ALL.iter();
    let exported = exported.filter(|function| function.class() != Class::Native);
    let both =
        exported.flat_map(|function| [function.name().to_owned(), format!("P{}", function.name())]);
    let header = xtask::layout::repository_root().join("include/anabranch.h");
    let header = std::fs::read_to_string(header).expect("the header");
    // A declaration begins its line; all else that names a function stands in a comment or a macro.
    let declared = header
        .lines()
        .filter(|line| line.starts_with(char::is_alphabetic));
    let declared = declared.filter_map(|line| {
        let (name, _) = line.split_once('(')?;
        name.rsplit([' ', '*']).next().map(str::to_owned)
    });
    let own = OWN.iter().map(|name| (*name).to_owned());
    let expected: BTreeSet<String> = both.chain(declared).chain(own).collect();
    assert!(expected.contains("MPI_Send") && expected.contains("anabranch_last"));
    let defined: BTreeSet<String> = symbols(&["--defined-only"]).into_iter().collect();
    let missing: Vec<_> = expected.difference(&defined).collect();
    let others: Vec<_> = defined.difference(&expected).collect();
    assert!(
        missing.is_empty() && others.is_empty(),
        "missing {missing:?}, too many {others:?}"
    );
}

/// It needs no MPI and no CUDA library: their functions are looked up at run time.
#[test]
fn undefined_symbols() {
    let bad = |name: &&String| {
        let driver = name
            .strip_prefix("cu")
            .and_then(|rest| rest.chars().next())
            .is_some_and(char::is_uppercase);
        name.starts_with("MPI_")
            || name.starts_with("PMPI_")
            || name.starts_with("ompi_")
            || name.starts_with("cuda")
            || name.starts_with("nvml")
            || driver
    };
    let undefined = symbols(&["--undefined-only"]);
    let others: Vec<_> = undefined.iter().filter(bad).collect();
    assert!(others.is_empty(), "{others:?}");
}
