//! Wrong input of every kind: a line that says what to do, or a fallback; never a crash or a wrong result.

use crate::support::{self, job, on, on_every_mpi};
use anabranch_tests::{built, run_bounded, scratch_folder, solver, Finished};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use xtask::mpi::Mpi;

on_every_mpi!(forged_descriptors);

/// What looks like a descriptor and is none is the user's data.
fn forged_descriptors(mpi: &Mpi) {
    for roles in ["D", "DH", "HD"] {
        let outcome = job(mpi, 2, "forged").roles(roles).passes();
        assert!(outcome.stats().total("bad_descriptors") > 0, "{outcome}");
        assert_eq!(outcome.stats().total("panics"), 0, "{outcome}");
    }
}

fn anabranch(arguments: &[&str], environment: &[(&str, &str)]) -> Finished {
    let folder = scratch_folder("command");
    let mut command = Command::new(&built().command);
    command
        .args(arguments)
        .envs(environment.iter().copied())
        .env_remove("LD_PRELOAD");
    let finished = run_bounded(&mut command, &folder, Duration::from_secs(60));
    let _ = fs::remove_dir_all(folder);
    finished
}

/// It failed, and said why in one line that names the culprit.
#[track_caller]
fn refused(finished: &Finished, culprit: &str) {
    assert!(finished.code.is_some_and(|code| code != 0), "{finished:?}");
    let lines: Vec<&str> = finished
        .stderr
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    assert_eq!(lines.len(), 1, "{finished:?}");
    assert!(lines[0].contains(culprit), "{finished:?}");
    assert_eq!(finished.stdout, "", "{finished:?}");
}

#[test]
fn more_ranks_than_simulated_gpus() {
    on("openmpi", |_| {
        let finished = anabranch(
            &[
                "run",
                "--sim",
                "narval",
                "--mpi",
                "openmpi",
                "-np",
                "5",
                "--",
                "/bin/true",
            ],
            &[],
        );
        refused(&finished, "5");
        assert!(finished.stderr.contains('4'), "{finished:?}");
    });
}

/// Counters that cannot be written cost the program nothing, and a line names the file.
#[test]
fn statistics_that_cannot_be_written() {
    on("openmpi", |mpi| {
        let file = "/no/such/folder/stats.json";
        let outcome = job(mpi, 2, "p2p").env("ANABRANCH_STATS", file).run();
        outcome.check_passed();
        let lines = outcome
            .finished
            .stderr
            .lines()
            .filter(|line| line.contains(file));
        let lines: Vec<&str> = lines.collect();
        assert_eq!(lines.len(), 1, "{outcome}");
        assert!(
            lines[0].contains("name a file that can be written"),
            "{outcome}"
        );
    });
}

/// The launcher of another MPI starts each process as a world of its own. One whose MPI does not know CUDA is not given device
/// addresses for that.
#[test]
fn the_launcher_of_another_mpi() {
    on("openmpi", |program_of| {
        on("mpich", |launcher_of| {
            let folder = scratch_folder("launcher");
            let mut command = Command::new(&launcher_of.mpirun);
            command
                .args(["-np", "2"])
                .args([&built().command, Path::new("exec"), &solver(program_of)])
                .args(["--size", "128x128", "--iterations", "5"])
                .env("LD_LIBRARY_PATH", &built().simcuda)
                .env("SIMCUDA_TOPOLOGY", "narval")
                .env("ANABRANCH_LOG", "info")
                .env_remove("LD_PRELOAD");
            let finished = run_bounded(&mut command, &folder, Duration::from_secs(120));
            assert_eq!(finished.code, Some(0), "{finished:?}");
            let fields = finished.stdout.matches("5 done").count();
            assert_eq!(fields, 2, "{finished:?}");
            let said = "rank 0 of its world, but rank 1 of the launcher's; all device buffers";
            assert!(finished.stderr.contains(said), "{finished:?}");
            let _ = fs::remove_dir_all(folder);
        });
    });
}

#[test]
fn topology_files_that_are_wrong() {
    on("openmpi", |_| {
        let folder = scratch_folder("topology");
        let good = fs::read_to_string(
            xtask::layout::repository_root().join("simcuda/topologies/narval.toml"),
        )
        .expect("narval");
        let cases = [
            ("negative.toml", negative_figure(&good)),
            ("missing.toml", missing_figure(&good)),
            ("unlinked.toml", missing_link(&good)),
            ("cut.toml", good[..good.len() / 2].to_owned() + "\n[["),
            ("empty.toml", String::new()),
        ];
        for (name, text) in cases {
            let file = folder.join(name).display().to_string();
            fs::write(&file, text).expect("topology");
            let finished = anabranch(
                &[
                    "run",
                    "--sim",
                    &file,
                    "--mpi",
                    "openmpi",
                    "-np",
                    "2",
                    "--",
                    "/bin/true",
                ],
                &[],
            );
            refused(&finished, name);
            assert!(!finished.stderr.contains("lacks"), "{finished:?}");
            let is_about_link = name == "unlinked.toml";
            let why = "link between GPU 0 and 2 is missing";
            assert_eq!(finished.stderr.contains(why), is_about_link, "{finished:?}");
        }
        let finished = anabranch(
            &[
                "run",
                "--sim",
                "atlantis",
                "--mpi",
                "openmpi",
                "-np",
                "2",
                "--",
                "/bin/true",
            ],
            &[],
        );
        refused(&finished, "atlantis");
        let _ = fs::remove_dir_all(folder);
    });
}

/// The first link's bandwidth, made negative.
fn negative_figure(text: &str) -> String {
    let (before, links) = text.split_once("[[link]]").expect("a topology with links");
    format!(
        "{before}[[link]]{}",
        links.replacen("gb_s = ", "gb_s = -", 1)
    )
}

/// The first link without its bandwidth.
fn missing_figure(text: &str) -> String {
    let (before, links) = text.split_once("[[link]]").expect("a topology with links");
    format!(
        "{before}[[link]]{}",
        links.replacen("gb_s = ", "# gb_s = ", 1)
    )
}

/// Without the second link.
fn missing_link(text: &str) -> String {
    let mut sections = text.split("[[link]]");
    let kept = sections.by_ref().take(2).collect::<Vec<_>>();
    let rest = sections.skip(1).collect::<Vec<_>>();
    [kept, rest].concat().join("[[link]]")
}

#[test]
fn a_library_that_does_not_exist() {
    let finished = anabranch(
        &["exec", "/bin/true"],
        &[("ANABRANCH_LIBRARY", "/no/such/libanabranch.so")],
    );
    refused(&finished, "/no/such/libanabranch.so");
}

#[test]
fn a_command_that_does_not_exist() {
    let finished = anabranch(&["exec", "/no/such/program"], &[]);
    assert_eq!(finished.code, Some(127), "{finished:?}");
    refused(&finished, "/no/such/program");
}

/// Directories of jobs in /dev/shm that no process has mapped. Those of jobs that begin while this looks are not meant: a file
/// is there a moment before its job has mapped it.
pub(crate) fn abandoned() -> BTreeSet<PathBuf> {
    let before = unmapped();
    std::thread::sleep(Duration::from_millis(500));
    unmapped().intersection(&before).cloned().collect()
}

fn unmapped() -> BTreeSet<PathBuf> {
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy());
        name.is_some_and(|name| name.starts_with("anabranch-"))
    };
    let paths = |folder| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path())
    };
    // Listed before processes are looked at: a job that begins in between is not among them.
    let mut ours: BTreeSet<PathBuf> = paths("/dev/shm").filter(is_ours).collect();
    for process in paths("/proc") {
        if let Ok(maps) = fs::read_to_string(process.join("maps")) {
            ours.retain(|path| !maps.contains(&path.display().to_string()));
        }
    }
    ours
}

/// Ranks that are killed leave at most a page in /dev/shm, and the next job takes it away.
#[test]
fn a_dead_job_leaves_nothing_to_the_next() {
    on("mpich", |mpi| {
        // Killed in the middle: the case computes for seconds, and the limit is short.
        let dead = job(mpi, 2, "deadlock")
            .args(&["reverse_tags", "busy"])
            .limit_seconds(1)
            .env("WATCHDOG", "60")
            .run();
        assert_eq!(dead.finished.code, None, "{dead}");
        let left = abandoned();
        job(mpi, 2, "p2p")
            .args(&["medium", "pieces"])
            .passes()
            .stats()
            .check_complete();
        let still: Vec<_> = left
            .iter()
            .filter(|path| Path::new(path).exists())
            .collect();
        assert!(still.is_empty(), "{still:?}");
    });
}

/// A C library that refuses memory for the segments of ranks in pieces of more than $ROOM bytes.
const SCARCE_MEMORY: &str = r#"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
int posix_fallocate(int file, off_t offset, off_t bytes) {
    char link[40], name[40] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    int is_segment = readlink(link, name, sizeof name - 1) > 0 && strstr(name, "memfd:anabranch");
    if (is_segment && bytes > atoll(getenv("ROOM"))) return ENOSPC;
    return syscall(SYS_fallocate, file, 0, offset, bytes) ? errno : 0;
}
"#;

/// Memory to share runs out: less staging or values, said in a line, and never a SIGBUS.
#[test]
fn no_room_in_shared_memory() {
    on("mpich", |mpi| {
        let folder = scratch_folder("scarce");
        let scarce = support::shared_object(&folder, "scarce", SCARCE_MEMORY);
        let preload = format!("{scarce}:{}", built().library.display());
        let with_room = |room: u64| {
            job(mpi, 2, "p2p")
                .args(&["medium"])
                .env("LD_PRELOAD", &preload)
                .env("ROOM", &room.to_string())
                .env("ANABRANCH_STAGING", "16G")
                .passes()
        };
        let scarce = with_room(64 << 20);
        scarce.stats().check_complete();
        assert!(scarce.stats().total("receives_host_ring") > 0, "{scarce}");
        // Of the rank that sends: the other one needs no staging.
        for part in [
            "anabranch[0]: warn: no memory for staging of 16384 chunks",
            ": 64 of them are used",
        ] {
            assert!(scarce.finished.stderr.contains(part), "{part}: {scarce}");
        }
        let none = with_room(16 << 10);
        none.stats().check_complete();
        assert_eq!(none.stats().total("sends_descriptor"), 0, "{none}");
        assert!(none.stats().fallback("out_of_memory") > 0, "{none}");
        let said = "no memory for staging (No space left on device";
        assert!(none.finished.stderr.contains(said), "{none}");
        let _ = fs::remove_dir_all(folder);
    });
}
