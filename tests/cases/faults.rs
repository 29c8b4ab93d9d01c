//! What breaks: driver calls that fail, ranks that are stopped and killed, shared memory that somebody writes over.
//!
//! `FAULT_SEED=N` picks other random moments (each failure names its seed), `FAULT_RUNS=N` their number.

use crate::support::{job, model, on, on_every_mpi, over_an_mpi_that_knows_cuda, SENDER_IS_LATE};
use anabranch_tests::ranks::{self, Random, Rank, Segment};
use anabranch_tests::{needs_simulator, on_real_gpus, Job, Outcome};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use xtask::mpi::Mpi;

/// Lines of the library's own on stderr.
fn lines(outcome: &Outcome) -> Vec<&str> {
    outcome
        .finished
        .stderr
        .lines()
        .filter(|line| line.starts_with("anabranch["))
        .collect()
}

/// What is said of a message.
#[derive(Debug, PartialEq, Eq)]
struct Told<'a> {
    is_sent: bool,
    /// Its other end.
    peer: u32,
    path: &'a str,
    reason: &'a str,
    end: &'a str,
}

/// The paths, as the user reads them.
const PATH_NAMES: [&str; 6] = [
    "direct",
    "several paths",
    "host ring",
    "eager cell",
    "by value",
    "descriptor",
];

impl Told<'_> {
    /// `message to rank 1, direct path: cuMemcpyAsync failed; tried again`
    fn parse(text: &str) -> Option<Told<'_>> {
        let text = text.strip_prefix("message ")?;
        let (is_sent, text) = match text.strip_prefix("to rank ") {
            Some(text) => (true, text),
            None => (false, text.strip_prefix("from rank ")?),
        };
        let (peer, text) = text.split_once(", ")?;
        let (path, text) = text.split_once(" path: ")?;
        let (reason, end) = text.rsplit_once("; ")?;
        let is_whole = PATH_NAMES.contains(&path) && reason.len() > 8 && !end.is_empty();
        is_whole.then_some(Told {
            is_sent,
            peer: peer.parse().ok()?,
            path,
            reason,
            end,
        })
    }

    /// All messages of `faults` go from rank 0 to rank 1.
    fn is_by(&self, rank: u32) -> bool {
        self.is_sent == (rank == 0) && self.peer == 1 - rank
    }
}

/// A line of a rank's: who says it, and what.
fn said(line: &str) -> Option<(u32, &str)> {
    let (rank, text) = line.strip_prefix("anabranch[")?.split_once("]: ")?;
    let text = text
        .strip_prefix("warn: ")
        .or(text.strip_prefix("error: "))?;
    Some((rank.parse().ok()?, text))
}

/// Each fault is told once: in a line that names the rank, the message's other end, its path and the reason.
#[track_caller]
fn each_told_once(outcome: &Outcome) {
    let lines = lines(outcome);
    assert!(!lines.is_empty(), "nothing was said:\n{outcome}");
    let distinct: BTreeSet<_> = lines.iter().collect();
    assert_eq!(distinct.len(), lines.len(), "said twice:\n{outcome}");
    for line in lines {
        let (rank, text) = said(line).unwrap_or_else(|| panic!("{line}\n{outcome}"));
        // Staging is allocated on a GPU for no message in particular.
        if text.starts_with("GPU ") && text.contains("no staging there") {
            continue;
        }
        let told = Told::parse(text).unwrap_or_else(|| panic!("{line}\n{outcome}"));
        assert!(rank < 2 && told.is_by(rank), "{line}\n{outcome}");
    }
}

/// What the error handlers of `faults` have found as the texts of their codes.
fn handlers_were_told(outcome: &Outcome) -> Vec<(u32, Told<'_>)> {
    let lines = outcome.finished.stderr.lines();
    let texts = lines.filter_map(|line| line.strip_prefix("rank ")?.split_once(" is told: "));
    texts
        .map(|(rank, text)| {
            let told = text.strip_prefix("anabranch: ").and_then(Told::parse);
            let told = told.unwrap_or_else(|| panic!("{text}\n{outcome}"));
            (rank.parse().expect("a rank"), told)
        })
        .collect()
}

/// What `faults` says of itself: positions, messages that arrived, messages lost.
fn tally(outcome: &Outcome, rank: u32) -> (u64, u64, u64) {
    let start = format!("rank {rank}: ");
    let line = outcome
        .finished
        .stderr
        .lines()
        .find(|line| line.starts_with(&start) && line.contains("positions"));
    let numbers: Vec<u64> = line.unwrap_or_else(|| panic!("no tally:\n{outcome}"))[start.len()..]
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|word| word.parse().ok())
        .collect();
    (numbers[0], numbers[1], numbers[2])
}

const PATHS: [&str; 7] = [
    "direct",
    "host_ring",
    "device_to_host",
    "host_to_device",
    "value",
    "eager",
    "eager_late",
];

/// The program itself tells the driver which calls shall fail.
fn faults(mpi: &Mpi, arguments: &[&str]) -> Job {
    needs_simulator("driver calls that fail");
    job(mpi, 2, "faults")
        .args(arguments)
        .args(&PATHS)
        // Several pieces a message.
        .env("ANABRANCH_CHUNK", "64K")
        .limit_seconds(600)
}

/// Any one driver call fails, once: no message is lost.
fn each_call_fails_once(mpi: &Mpi, code: &str) {
    let outcome = faults(mpi, &["once", code]).passes();
    let stats = outcome.stats();
    for rank in 0..2 {
        let (positions, _, lost) = tally(&outcome, rank);
        assert!(positions > 300, "{positions} positions:\n{outcome}");
        assert_eq!(lost, 0, "{outcome}");
    }
    stats.check_complete();
    for counter in ["retries", "driver_retries"] {
        for rank in 0..2 {
            assert!(stats.of_rank(rank, counter) > 0, "{counter}:\n{outcome}");
        }
    }
    assert!(stats.fallback("mapping_failed") > 0, "{outcome}");
    each_told_once(&outcome);
}

#[test]
fn each_call_fails_once_with_mpich() {
    on("mpich", |mpi| each_call_fails_once(mpi, "999"));
}

#[test]
fn each_call_fails_once_with_openmpi() {
    on("openmpi", |mpi| each_call_fails_once(mpi, "2"));
}

/// One function fails for good: what has another path takes it, all else ends in an error on the rank that cannot go on.
#[test]
fn one_function_fails_for_good() {
    on("mpich", |mpi| {
        let outcome = faults(mpi, &["lasting", "2"]).passes();
        let (positions, _, lost_by_sender) = tally(&outcome, 0);
        let (_, arrived, lost_by_receiver) = tally(&outcome, 1);
        assert!(positions > 30, "{outcome}");
        assert!(arrived > 90, "{outcome}");
        assert!(lost_by_sender > 0 && lost_by_receiver > 0, "{outcome}");
        // Every error that the handlers were told of was counted.
        let errors = outcome.stats().total("errors");
        assert_eq!(errors, lost_by_sender + lost_by_receiver, "{outcome}");
        each_told_once(&outcome);
    });
}

/// An error handler finds in its code which message is lost, and why, and that it is of class MPI_ERR_OTHER.
fn error_handlers_are_told(mpi: &Mpi) {
    needs_simulator("driver calls that fail");
    let outcome = job(mpi, 2, "faults")
        .args(&["lasting", "2", "direct", "host_ring", "value"])
        .env("ANABRANCH_CHUNK", "64K")
        .limit_seconds(600)
        .passes();
    let told = handlers_were_told(&outcome);
    let lost = [0, 1].map(|rank| tally(&outcome, rank).2);
    assert_eq!(told.len() as u64, lost.iter().sum::<u64>(), "{outcome}");
    assert!(lost.iter().all(|lost| *lost > 0), "{outcome}");
    for (rank, told) in &told {
        assert!(told.is_by(*rank), "{told:?} on rank {rank}\n{outcome}");
        assert_eq!(told.end, "the message is lost", "{outcome}");
    }
    // The sender's copy down to host memory fails for good, which has no other way.
    let is_value = |(rank, told): &(u32, Told)| *rank == 0 && told.path == "by value";
    let reason = |(_, told): &(u32, Told)| told.reason.contains("CUDA_ERROR_OUT_OF_MEMORY");
    assert!(
        told.iter().any(|told| is_value(told) && reason(told)),
        "{outcome}"
    );
    each_told_once(&outcome);
}

on_every_mpi!(error_handlers_are_told);

/// An error handler that waits for a rank that waits for this one: it is called when the helper may serve.
#[test]
fn an_error_handler_that_waits() {
    for name in ["mpich", "openmpi"] {
        on(name, |mpi| {
            needs_simulator("driver calls that fail");
            let outcome = job(mpi, 2, "faults")
                .args(&["handler", "2"])
                .limit_seconds(150)
                .passes();
            assert_eq!(outcome.stats().total("errors"), 1, "{outcome}");
            assert!(outcome.stats().total("helper_served") > 0, "{outcome}");
        });
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .ok()
        .and_then(|value| value.parse().ok())
        .unwrap_or(default)
}

const PATIENCE: Duration = Duration::from_secs(120);

/// Runs `traffic` while `disturb` does something to its ranks.
fn disturbed<T: Send>(job: Job, disturb: impl FnOnce(&[Rank]) -> T + Send) -> (Outcome, Option<T>) {
    let (folder, count) = (job.folder().to_path_buf(), job.ranks());
    thread::scope(|scope| {
        let disturber = scope.spawn(move || {
            let ranks = all(&folder, count)?;
            Some(disturb(&ranks))
        });
        let outcome = job.run();
        (outcome, disturber.join().expect("no panic"))
    })
}

/// The ranks of the job, once messages of the library's have been between the first two.
fn all(folder: &Path, count: usize) -> Option<Vec<Rank>> {
    let find = |rank| ranks::find(folder, "traffic", rank as u32, PATIENCE);
    let found: Vec<Rank> = (0..count).map(find).collect::<Option<_>>()?;
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        let has_slots = |rank: &Rank| {
            rank.segment()
                .is_some_and(|segment| segment.slot_count() > 0)
        };
        if found[..2].iter().all(has_slots) {
            return Some(found);
        }
        thread::sleep(Duration::from_millis(2));
    }
    None
}

/// Stops a rank at a random moment at which a message between the two is unfinished. None if the job ended before.
fn stop_in_transfer(ranks: &[Rank], victim: usize, random: &mut Random) -> Option<[usize; 4]> {
    let segments: Vec<Segment> = ranks[..2].iter().filter_map(Rank::segment).collect();
    stop_when(&ranks[victim], random, || {
        let mut unfinished = [0; 4];
        for segment in &segments {
            for (sum, count) in unfinished.iter_mut().zip(segment.unfinished()) {
                *sum += count;
            }
        }
        (unfinished.iter().sum::<usize>() > 0).then_some(unfinished)
    })
}

/// The same with a message over several paths, sent by the rank if it is one of the first two: how many there are.
fn stop_in_several(ranks: &[Rank], victim: usize, random: &mut Random) -> Option<usize> {
    let senders = if victim < 2 {
        &ranks[victim..=victim]
    } else {
        &ranks[..2]
    };
    let segments: Vec<Segment> = senders.iter().filter_map(Rank::segment).collect();
    stop_when(&ranks[victim], random, || {
        let open = segments.iter().map(Segment::count_over_several).sum();
        (open > 0).then_some(open)
    })
}

/// Stops a rank at random moments until `look` finds what it is to find. None if the job ended before.
fn stop_when<T>(victim: &Rank, random: &mut Random, look: impl Fn() -> Option<T>) -> Option<T> {
    for _ in 0..1000 {
        thread::sleep(Duration::from_micros(random.below(20_000)));
        victim.signal(libc::SIGSTOP);
        if !victim.waits_stopped() {
            return None;
        }
        let found = look();
        if found.is_some() {
            return found;
        }
        victim.signal(libc::SIGCONT);
    }
    None
}

/// How long the launcher itself takes for a job of which a rank is killed, without the library: the longest of three times.
fn time_without_the_library(mpi: &Mpi) -> Duration {
    let times = (0..3).map(|run| {
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

/// A rank is killed while messages are unfinished: the job ends, about as soon as without the library, no process is left,
/// and at most a page in /dev/shm.
fn killed(mpi: &Mpi, moments: u64) {
    // A busy machine counts for both. On real GPUs not every MPI library sends such messages by itself.
    let bound = if on_real_gpus() {
        Duration::from_secs(120)
    } else {
        10 * time_without_the_library(mpi) + Duration::from_secs(20)
    };
    let seed = setting("FAULT_SEED", 1);
    let mut seen = [0; 4];
    for run in seed..seed + setting("FAULT_RUNS", moments) {
        let mut random = Random::new(run);
        let victim = random.below(2) as usize;
        let job = job(mpi, 2, "traffic").args(&["endless"]).limit_seconds(300);
        let (outcome, seen_then) = disturbed(job, move |ranks| {
            let moment = stop_in_transfer(ranks, victim, &mut random);
            let files: BTreeSet<PathBuf> = ranks.iter().flat_map(Rank::shared_files).collect();
            ranks[victim].signal(libc::SIGKILL);
            moment.map(|moment| (moment, files, Instant::now()))
        });
        let (moment, files, at) = seen_then
            .flatten()
            .unwrap_or_else(|| panic!("seed {run}: never in a transfer\n{outcome}"));
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
    // Messages were met in each of the states that last.
    assert!(seen[0] > 0 && seen[1] + seen[2] > 0, "{seen:?}");
    leftovers_are_reclaimed(mpi);
}

#[test]
fn killed_with_mpich() {
    on("mpich", |mpi| killed(mpi, 25));
}

#[test]
fn killed_with_openmpi() {
    on("openmpi", |mpi| killed(mpi, 25));
}

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

/// A rank whose peer is killed, and which the launcher lets live, is told so by its error handler. (Hydra, MPICH's
/// launcher, ends all of them at once.)
#[test]
fn the_survivor_is_told() {
    on("openmpi", |mpi| {
        let seed = setting("FAULT_SEED", 1);
        for run in seed..seed + 6 {
            let mut random = Random::new(run);
            let job = job(mpi, 2, "traffic")
                .args(&["survivor"])
                .launcher_args(&["--enable-recovery"])
                .limit_seconds(300);
            let victim = (run % 2) as usize;
            let (outcome, _) = disturbed(job, move |ranks| {
                let moment = stop_in_transfer(ranks, victim, &mut random);
                ranks[victim].signal(libc::SIGKILL);
                moment
            });
            let finished = &outcome.finished;
            assert!(finished.code.is_some(), "seed {run}\n{outcome}");
            assert!(
                finished.stdout.contains("survived: the handler was called"),
                "seed {run}\n{outcome}"
            );
            assert_eq!(finished.left_behind, 0, "seed {run}\n{outcome}");
            let told = lines(&outcome)
                .iter()
                .filter(|line| line.contains("has died"))
                .count();
            // Once for the rank, whatever was under way with it. On a real node UCX may see it first, and raise the error itself.
            let least = usize::from(!on_real_gpus());
            assert!(
                (least..=1).contains(&told),
                "seed {run}: {told} lines\n{outcome}"
            );
            assert_eq!(lines(&outcome).len(), told, "seed {run}\n{outcome}");
            let words = finished.stdout.contains("times, 0 of them");
            assert!(on_real_gpus() || !words, "seed {run}\n{outcome}");
        }
    });
}

/// Stops one rank after the other by `stop`, for a while each, until a moment for it is not found. How often that was.
fn stop_for(
    ranks: &[Rank],
    victims: &[usize],
    pause: Duration,
    mut stop: impl FnMut(usize) -> bool,
) -> usize {
    let mut stops = 0;
    for victim in victims {
        if !stop(*victim) {
            break;
        }
        thread::sleep(pause);
        ranks[*victim].signal(libc::SIGCONT);
        stops += 1;
    }
    stops
}

/// Ranks that are stopped for seconds go on as if nothing had been, and their peers do not spin meanwhile.
#[test]
fn stopped_for_seconds() {
    const PAUSE: Duration = Duration::from_millis(1500);
    on("mpich", |mpi| {
        let seed = setting("FAULT_SEED", 1);
        let mut random = Random::new(seed);
        let job = job(mpi, 2, "traffic").args(&["rounds", "60"]);
        let (outcome, stops) = disturbed(job, move |ranks| {
            let mut stops = Vec::new();
            for victim in [0, 1, 0] {
                if stop_in_transfer(ranks, victim, &mut random).is_none() {
                    break;
                }
                let before = ranks[1 - victim].helper_time();
                thread::sleep(PAUSE);
                let after = ranks[1 - victim].helper_time();
                ranks[victim].signal(libc::SIGCONT);
                stops.push(after.zip(before).map(|(after, before)| after - before));
            }
            stops
        });
        outcome.check_passed();
        outcome.stats().check_complete();
        let stops = stops.expect("messages of the library's");
        assert!(!stops.is_empty(), "{outcome}");
        // The program's thread waits as it does for MPI; the helper of a rank whose peer does nothing sleeps.
        for taken in stops {
            let taken = taken.expect("a helper thread");
            assert!(taken < PAUSE / 5, "{taken:?} of {PAUSE:?}\n{outcome}");
        }
        assert!(lines(&outcome).is_empty(), "{outcome}");
    });
}

/// What somebody writes over in a segment. Staging is left alone: no check can tell its payload from another.
fn scribble(segment: &Segment, random: &mut Random) {
    let slots = segment.slot_count().clamp(1, 64);
    let slot = segment.slot_at(random.below(slots));
    let noise = |random: &mut Random| random.below(u64::MAX).to_le_bytes();
    match random.below(8) {
        // The state of a message, its nonce kept.
        0 => segment.write(slot, &[random.below(10) as u8]),
        // Any word of a slot.
        1 | 2 => {
            let word = noise(random);
            segment.write(slot + random.below(32) * 8, &word);
        }
        // Head, tail or an entry of its ring: a count is moved, or all of it is noise.
        3 => {
            let at = slot + 184 + random.below(6) * 8;
            if random.below(2) == 0 {
                let low = segment.read::<1>(at)[0].wrapping_add(1 + random.below(4) as u8);
                segment.write(at, &[low]);
            } else {
                segment.write(at, &noise(random));
            }
        }
        // Where in its allocation a message starts, for all that nobody has claimed: data, but not the message's.
        5 | 6 => {
            for slot in 0..slots {
                let at = segment.slot_at(slot);
                if segment.read::<1>(at) == [1] {
                    let offset = u64::from_le_bytes(segment.read(at + 96));
                    segment.write(at + 96, &(offset ^ 8).to_le_bytes());
                }
            }
        }
        // A word of the header.
        4 => {
            let word = noise(random);
            segment.write(random.below(40) * 8, &word);
        }
        // A whole slot.
        _ => {
            for word in 0..32 {
                let value = noise(random);
                segment.write(slot + word * 8, &value);
            }
        }
    }
}

/// Somebody writes into the segments of the ranks: each message arrives as it was sent, or ends in an error.
#[test]
fn segments_written_over() {
    on("mpich", |mpi| {
        let seed = setting("FAULT_SEED", 1);
        let mut corrupt = 0;
        for run in seed..seed + setting("FAULT_RUNS", 8) {
            let mut random = Random::new(run);
            let job = job(mpi, 2, "traffic")
                .args(&["tolerant", "40"])
                .limit_seconds(300);
            let (outcome, _) = disturbed(job, move |ranks| {
                let segments: Vec<Segment> = ranks.iter().filter_map(Rank::segment).collect();
                for _ in 0..40 {
                    thread::sleep(Duration::from_micros(random.below(10_000)));
                    for segment in &segments {
                        scribble(segment, &mut random);
                    }
                }
            });
            let finished = &outcome.finished;
            assert_eq!(finished.code, Some(0), "seed {run}\n{outcome}");
            assert_eq!(finished.left_behind, 0, "seed {run}\n{outcome}");
            assert_eq!(outcome.stats().total("panics"), 0, "seed {run}\n{outcome}");
            corrupt += outcome.stats().total("corrupt");
        }
        assert!(corrupt > 0, "nothing was ever noticed");
    });
}

/// A job on a node on which long messages take several paths.
fn on_several(mpi: &Mpi, ranks: usize, program: &str) -> Job {
    job(mpi, ranks, program)
        .env("SIMCUDA_TOPOLOGY", "beluga")
        .env("ANABRANCH_MODEL", &model("beluga").display().to_string())
        .limit_seconds(600)
}

/// Messages of 8 MiB both ways between ranks 0 and 1; rank 2 has staging on its GPU, and one of the two on the fourth.
fn several_traffic(mpi: &Mpi, arguments: &[&str]) -> Job {
    on_several(mpi, 3, "traffic")
        .args(arguments)
        .env("BYTES", "8388621")
        .limit_seconds(300)
}

/// The same, one message at a time, so that each is written by its sender.
fn pushed_traffic(mpi: &Mpi, arguments: &[&str]) -> Job {
    several_traffic(mpi, arguments)
        .env("WINDOW", "1")
        .env("ANABRANCH_PUSH", "1M")
        .env("ALLOCATION", "1048576")
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

/// Stops a rank in the middle of messages, for seconds each time. (Simulated time, too, stands still for a tenth of one at
/// each step, as long as a process does not run.)
fn stopped(job: Job, victim: usize, seed: u64, times: usize) -> Outcome {
    let mut random = Random::new(seed);
    let (outcome, stops) = disturbed(job, move |ranks| {
        let pause = Duration::from_secs(5);
        stop_for(ranks, &vec![victim; times], pause, |victim| {
            stop_in_several(ranks, victim, &mut random).is_some()
        })
    });
    outcome.check_passed();
    outcome.stats().check_complete();
    assert!(stops > Some(0), "{outcome}");
    let relayed = outcome.stats().total("several_relay_bytes");
    assert!(relayed > 0, "{outcome}");
    outcome
}

/// Stops the sender of a message over several paths when it has begun with chunks and not brought them, and lets it go on
/// when the message is over. How often one was over by then: the simulated node stands still as a whole where the process was
/// stopped with its lock, or before it has done what was due in its own memory.
fn over_while_stopped(ranks: &[Rank], random: &mut Random, times: usize) -> usize {
    let [sender, receiver] = [&ranks[0], &ranks[1]].map(Rank::segment);
    let (Some(sender), Some(receiver)) = (sender, receiver) else {
        return 0;
    };
    let mut over = 0;
    for _ in 0..times {
        let owed = stop_when(&ranks[0], random, || {
            let message = sender.owed_to(&receiver)?;
            // The process counts as stopped before the last of its threads is.
            thread::sleep(Duration::from_millis(5));
            sender.owed_to(&receiver).filter(|now| *now == message)
        });
        let Some(message) = owed else { break };
        let deadline = Instant::now() + Duration::from_secs(10);
        while sender.is_claimed(message) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
        over += usize::from(!sender.is_claimed(message));
        ranks[0].signal(libc::SIGCONT);
    }
    over
}

/// A sender that is stopped costs speed: its receiver takes over what it has not begun with and, after a while, what it has.
/// So a message ends while its sender stands still.
#[test]
fn a_sender_stopped_in_several() {
    on("mpich", |mpi| {
        let seed = setting("FAULT_SEED", 1);
        let (mut claimed_back, mut over) = (0, 0);
        for run in seed..seed + 8 {
            let mut random = Random::new(run);
            let job = several_traffic(mpi, &["rounds", "25"]);
            let (outcome, stopped) =
                disturbed(job, move |ranks| over_while_stopped(ranks, &mut random, 3));
            outcome.check_passed();
            let stats = outcome.stats();
            stats.check_complete();
            let stopped = stopped.expect("messages of the library's");
            let retired = stats.of_rank(1, "tracks_retired");
            assert!(
                retired >= stopped as u64,
                "seed {run}: {retired} paths left, {stopped} messages over\n{outcome}"
            );
            for line in lines(&outcome) {
                // The simulated node's time slows down meanwhile, so that the other one may seem to do nothing, too.
                assert!(line.contains(SENDER_IS_LATE), "{outcome}");
            }
            over += stopped;
            // It may have begun with all that there was.
            claimed_back += stats.of_rank(1, "chunks_claimed_back");
            if claimed_back > 0 && over > 0 {
                return;
            }
        }
        panic!("{claimed_back} chunks claimed back, {over} messages over while their sender stood still");
    });
}

/// One that is stopped while it writes to its receiver's buffer is waited for: what it has claimed it may still write.
#[test]
fn a_sender_stopped_while_pushing() {
    on("openmpi", |mpi| {
        let job = pushed_traffic(mpi, &["rounds", "40"]);
        let outcome = stopped(job, 0, setting("FAULT_SEED", 1), 3);
        let pushed = outcome.stats().of_rank(1, "several_pushed_bytes");
        assert!(pushed > 0, "{outcome}");
    });
}

/// Of the rank that has the staging nothing is asked while messages lead over its GPU. (The simulated node's time slows down
/// when it is stopped, so that a sender may seem to do nothing.)
#[test]
fn the_owner_of_a_relay_stopped() {
    on("mpich", |mpi| {
        let outcome = stopped(
            several_traffic(mpi, &["rounds", "25"]),
            2,
            setting("FAULT_SEED", 1),
            2,
        );
        for line in lines(&outcome) {
            assert!(line.contains(SENDER_IS_LATE), "{outcome}");
        }
    });
}

/// The rank that has the staging dies, and the launcher lets the others live: their messages go on, right to the last byte.
#[test]
fn messages_outlive_the_owner_of_their_relay() {
    on("openmpi", |mpi| {
        let seed = setting("FAULT_SEED", 1);
        for run in seed..seed + 4 {
            let mut random = Random::new(run);
            let job =
                several_traffic(mpi, &["outlived", "25"]).launcher_args(&["--enable-recovery"]);
            let (outcome, open) = disturbed(job, move |ranks| {
                let open = stop_in_several(ranks, 2, &mut random);
                ranks[2].signal(libc::SIGKILL);
                open
            });
            assert!(open.flatten().is_some(), "seed {run}\n{outcome}");
            for rank in 0..2 {
                let said = format!("rank {rank}: outlived");
                assert!(
                    outcome.finished.stdout.contains(&said),
                    "seed {run}\n{outcome}"
                );
            }
            assert_eq!(outcome.finished.left_behind, 0, "seed {run}\n{outcome}");
        }
    });
}

/// A sender dies with pieces of staging on the GPU of a rank that takes no part: that rank takes them back.
#[test]
fn staging_of_the_dead_is_taken_back() {
    on("openmpi", |mpi| {
        let seed = setting("FAULT_SEED", 1);
        let mut last = String::new();
        for run in seed..seed + 4 {
            let mut random = Random::new(run);
            let job = several_traffic(mpi, &["survivor"]).launcher_args(&["--enable-recovery"]);
            let (outcome, open) = disturbed(job, move |ranks| {
                // By then there is staging on its GPU.
                thread::sleep(Duration::from_secs(3));
                let open = stop_in_several(ranks, 0, &mut random);
                ranks[0].signal(libc::SIGKILL);
                open
            });
            assert!(open.flatten().is_some(), "seed {run}\n{outcome}");
            let said = outcome.finished.stdout.split_once("rank 2: ");
            let units = said.and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
            let reclaimed: u64 = units.unwrap_or(0);
            last = outcome.to_string();
            assert_eq!(outcome.finished.left_behind, 0, "seed {run}\n{outcome}");
            // It may have had none at that moment.
            if reclaimed > 0 {
                return;
            }
        }
        panic!("no unit was ever taken back:\n{last}");
    });
}

/// Any one driver call fails, once, in messages over several paths: none is lost, what was given up or made again is counted,
/// and each sort of trouble is told once. Every second call, as a message makes
/// hundreds; `FAULT_STEP=1` takes them all.
fn each_call_of_several(mpi: &Mpi, paths: &str) {
    let step = setting("FAULT_STEP", 2);
    let first = 1 + setting("FAULT_SEED", 1) % step;
    let job = || {
        on_several(mpi, 2, "faults")
            .args(&["once", "999", "several"])
            .env("ANABRANCH_PATHS", paths)
    };
    let outcome = job()
        .env("STEP", &step.to_string())
        .env("FIRST", &first.to_string())
        // Behind these a message only asks whether its copies are done.
        .env("LAST", "450")
        .passes();
    let stats = outcome.stats();
    stats.check_complete();
    let (hit, _, lost) = tally(&outcome, 1);
    assert!(hit > 200 / step, "{hit} positions:\n{outcome}");
    assert_eq!(lost, 0, "{outcome}");
    // Messages of this kind they were, but for those of which the direct path was lost as well.
    let several = stats.total("receives_several");
    assert!(several * 10 > hit * 9, "{several} of {hit}:\n{outcome}");
    for path in paths.split(',') {
        let bytes = stats.total(&format!("several_{path}_bytes"));
        assert!(bytes > 0, "{path}:\n{outcome}");
    }
    // At most a path, or a few, for each call that was hit. Most that fail are made again.
    let retired = stats.total("tracks_retired");
    assert!(retired <= 4 * hit, "{retired} of {hit}:\n{outcome}");
    assert!(stats.total("retries") > 0, "{outcome}");
    assert!(stats.total("driver_retries") > 0, "{outcome}");
    // What is done without where the driver refuses it, or gives back what an earlier message had.
    let harmless = [
        "cuPointerGetAttributes",
        "cuPointerSetAttribute",
        "cuMemHostRegister",
        "cuMemHostUnregister",
        "cuIpcCloseMemHandle",
        "cuStreamDestroy",
        "cuEventDestroy",
        "cuCtxGetDevice",
    ];
    let uncounted = outcome.finished.stderr.lines();
    let uncounted = uncounted.filter(|line| line.starts_with("uncounted: "));
    let is_harmless = |line: &&str| harmless.iter().any(|name| line.contains(name));
    let (_, bad): (Vec<_>, Vec<_>) = uncounted.partition(is_harmless);
    // The same with the calls around those.
    let is_around = |line: &&str| line.contains("cuCtx") || line.contains("cuThreadExchange");
    assert!(bad.iter().all(is_around), "{bad:?}\n{outcome}");
    assert!(bad.len() as u64 <= 3 + hit / 20, "{bad:?}\n{outcome}");
    each_told_once(&outcome);
    let is_upset = |outcome: &Outcome| outcome.finished.stderr.contains("written over");
    assert!(!is_upset(&outcome), "{outcome}");
    // Where the copy to a path's staging fails, the path is left. On busy cores a sender may get to none in time: all that
    // goes by itself then is taken over, and no such copy fails.
    let is_left = (0..5).any(|_| {
        let outcome = job()
            .env("FUNCTION", "cuMemcpyAsync")
            .env("SIMCUDA_QUIET_US", "30000")
            .passes();
        let stats = outcome.stats();
        stats.check_complete();
        let (hit, _, lost) = tally(&outcome, 1);
        let retired = stats.total("tracks_retired");
        assert!(
            lost == 0 && retired <= 2 * hit,
            "{retired} of {hit}:\n{outcome}"
        );
        assert!(!is_upset(&outcome), "{outcome}");
        retired > 0
    });
    assert!(is_left, "no path was ever left");
}

#[test]
fn each_call_of_messages_over_relays_fails_once() {
    on("openmpi", |mpi| each_call_of_several(mpi, "direct,relay"));
}

#[test]
fn each_call_of_messages_over_host_memory_fails_once() {
    on("mpich", |mpi| each_call_of_several(mpi, "direct,host"));
}
