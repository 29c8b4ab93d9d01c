//! Ranks that are killed while messages are under way: the job ends, and leaves a page at most.

use super::{
    disturbed, pushed_traffic, setting, several_traffic, stop_in_several, stop_when, PATIENCE,
};
use crate::support::{job, on, on_every_mpi, over_an_mpi_that_knows_cuda};
use anabranch_tests::ranks::{self, Random, Rank};
use anabranch_tests::{on_real_gpus, Job};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};
use xtask::mpi::Mpi;

/// How long the launcher itself takes for a job of which a rank is killed, without the library: the longer of two times.
fn time_without_the_library(mpi: &Mpi) -> Duration {
    let times = (0..2).map(|run| {
        let job = job(mpi, 2, "traffic").args(&["endless"]).limit_seconds(120);
        let job = over_an_mpi_that_knows_cuda(job).without_preload();
        let folder = job.folder().to_path_buf();
        let (outcome, at) = thread::scope(|scope| {
            let killer = scope.spawn(move || {
                let ranks: Vec<Rank> = (0..2)
                    .filter_map(|rank| ranks::find(&folder, "traffic", rank, PATIENCE))
                    .collect();
                // By then they have met.
                thread::sleep(Duration::from_secs(1));
                ranks[run % 2].signal(libc::SIGKILL);
                Instant::now()
            });
            (job.run(), killer.join().expect("no panic"))
        });
        assert!(outcome.finished.code.is_some(), "{outcome}");
        at.elapsed()
    });
    times.max().unwrap_or_default()
}

/// Moments on each MPI library: fifty on the five of them.
const MOMENTS: u64 = 10;

/// Stops a rank at a random moment at which messages are under way that cannot end without it: how many of the other's it has
/// claimed, and for how many that it is to bring through host memory. None if the job ended before.
fn stop_under_way(ranks: &[Rank], victim: usize, random: &mut Random) -> Option<[usize; 2]> {
    let [own, other] = [&ranks[victim], &ranks[1 - victim]].map(Rank::segment);
    let (own, other) = (own?, other?);
    stop_when(&ranks[victim], random, || {
        let look = || {
            let ([_, claimed, wanted, _], [_, _, owed, _]) = (other.unfinished(), own.unfinished());
            [claimed + wanted, owed]
        };
        let is_any = |under_way: &[usize; 2]| under_way.iter().sum::<usize>() > 0;
        if !is_any(&look()) {
            return None;
        }
        // The process counts as stopped before the last of its threads is.
        thread::sleep(Duration::from_millis(5));
        Some(look()).filter(is_any)
    })
}

/// A rank is killed while messages are under way: the job ends, about as soon as without the library, no process is left,
/// and at most a page in /dev/shm.
fn killed(mpi: &Mpi) {
    // A busy machine counts for both. On real GPUs not every MPI library sends such messages by itself.
    let bound = if on_real_gpus() {
        Duration::from_secs(120)
    } else {
        10 * time_without_the_library(mpi) + Duration::from_secs(20)
    };
    // Other moments with each library.
    let seed = setting("FAULT_SEED", 1) + mpi.name.bytes().map(u64::from).sum::<u64>();
    let mut seen = [0; 2];
    for run in seed..seed + setting("FAULT_RUNS", MOMENTS) {
        let mut random = Random::new(run);
        let victim = (run % 2) as usize;
        let job = job(mpi, 2, "traffic").args(&["endless"]).limit_seconds(300);
        let (outcome, seen_then) = disturbed(job, move |ranks| {
            let moment = stop_under_way(ranks, victim, &mut random);
            let files: BTreeSet<PathBuf> = ranks.iter().flat_map(Rank::shared_files).collect();
            ranks[victim].signal(libc::SIGKILL);
            moment.map(|moment| (moment, files, Instant::now()))
        });
        let (moment, files, at) = seen_then
            .flatten()
            .unwrap_or_else(|| panic!("seed {run}: nothing was ever under way\n{outcome}"));
        let took = at.elapsed();
        assert!(took < bound, "seed {run}: {took:?} of {bound:?}\n{outcome}");
        // All ranks of the job have one directory, which is a page.
        assert_eq!(files.len(), 1, "seed {run}: {files:?}\n{outcome}");
        for file in &files {
            let left = std::fs::metadata(file).map_or(0, |about| about.len());
            assert!(
                left <= 4096,
                "seed {run}: {left} bytes in {}",
                file.display()
            );
        }
        for (sum, count) in seen.iter_mut().zip(moment) {
            *sum += count;
        }
        // The launcher ends with an error, within its own time, and takes all with it.
        let finished = &outcome.finished;
        assert!(
            finished.code.is_some_and(|code| code != 0),
            "seed {run}: {moment:?}\n{outcome}"
        );
        assert_eq!(finished.left_behind, 0, "seed {run}\n{outcome}");
    }
    // Messages that the rank was to receive, and such that it was to bring.
    assert!(seen.iter().all(|count| *count > 0), "{seen:?}");
    leftovers_are_reclaimed(mpi);
}

on_every_mpi!(killed);

/// What killed jobs leave is a page each, and the next job takes it away.
fn leftovers_are_reclaimed(mpi: &Mpi) {
    let left = crate::bad_input::abandoned();
    for path in &left {
        let bytes = std::fs::metadata(path).map_or(0, |about| about.len());
        assert!(bytes <= 4096, "{} has {bytes} bytes", path.display());
    }
    job(mpi, 2, "traffic").args(&["rounds", "3"]).passes();
    let still: Vec<_> = left.iter().filter(|path| path.exists()).collect();
    assert!(still.is_empty(), "{still:?}");
}

/// A rank is killed while a message over several paths is unfinished, of its own or over its GPU.
fn killed_in_several(mpi: &Mpi, moments: u64, traffic: impl Fn(&[&str]) -> Job) {
    let seed = setting("FAULT_SEED", 1);
    for run in seed..seed + setting("FAULT_RUNS", moments) {
        let mut random = Random::new(run);
        let victim = (run % 3) as usize;
        let job = traffic(&["endless"]);
        let (outcome, open) = disturbed(job, move |ranks| {
            let open = stop_in_several(ranks, victim, &mut random);
            ranks[victim].signal(libc::SIGKILL);
            open
        });
        let finished = &outcome.finished;
        assert!(
            open.flatten().is_some(),
            "seed {run}: never in such a message\n{outcome}"
        );
        assert!(
            finished.code.is_some_and(|code| code != 0),
            "seed {run}: {open:?}\n{outcome}"
        );
        assert_eq!(finished.left_behind, 0, "seed {run}\n{outcome}");
    }
    leftovers_are_reclaimed(mpi);
}

#[test]
fn killed_in_several_with_mpich() {
    on("mpich", |mpi| {
        killed_in_several(mpi, 15, |mode| several_traffic(mpi, mode))
    });
}

#[test]
fn killed_in_several_with_openmpi() {
    on("openmpi", |mpi| {
        killed_in_several(mpi, 15, |mode| several_traffic(mpi, mode))
    });
}

#[test]
fn killed_while_pushing() {
    on("openmpi", |mpi| {
        killed_in_several(mpi, 9, |mode| pushed_traffic(mpi, mode))
    });
}
