//! What breaks: driver calls that fail, ranks that are stopped and killed, shared memory that somebody writes over.
//!
//! `FAULT_SEED=N` picks other random moments (each failure names its seed), `FAULT_RUNS=N` their number.

mod calls;
mod kills;

use crate::support::{job, model, on};
use anabranch_engine::node::SlotState;
use anabranch_tests::ranks::{self, Random, Rank, Segment};
use anabranch_tests::{built, needs_simulator, on_real_gpus, Job, Outcome};
use std::path::Path;
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
    // The ranks are looked for as long as they can take to start, not to be built.
    built();
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
            // A rank starts its helper with its first message, which its peer may be ahead of.
            for _ in 0..2000 {
                if ranks.iter().all(|rank| rank.helper_time().is_some()) {
                    break;
                }
                thread::sleep(Duration::from_millis(1));
            }
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

/// A message that is sent eagerly is complete at its sender. Whatever somebody then writes to its slot, nothing is
/// read of the buffer, which is the program's again: the message arrives as it was sent, or is lost.
#[test]
fn a_slot_that_asks_for_what_is_sent() {
    needs_simulator("a segment that is written over");
    on("mpich", |mpi| {
        for (state, came) in [
            (SlotState::Posted, None),
            (SlotState::Claimed, None),
            (SlotState::WantHost, None),
            (SlotState::WantGpu, None),
            (SlotState::Free, Some(0)),
            (SlotState::Eager, Some(1)),
        ] {
            let job = job(mpi, 2, "traffic")
                .args(&["again"])
                .env("BYTES", "1500")
                .limit_seconds(120);
            let (sent, written) = (job.folder().join("sent"), job.folder().join("written"));
            let (outcome, found) = disturbed(job, |ranks| {
                let segment = ranks[0].segment()?;
                let deadline = Instant::now() + PATIENCE;
                while Instant::now() < deadline {
                    for slot in (0..segment.slot_count()).filter(|_| sent.exists()) {
                        let at = segment.slot_at(slot);
                        if segment.read::<1>(at) == [SlotState::Eager as u8] {
                            segment.write(at, &[state as u8]);
                            // The helper looks at it meanwhile.
                            thread::sleep(Duration::from_millis(200));
                            std::fs::write(&written, "").ok()?;
                            return Some(());
                        }
                    }
                    thread::sleep(Duration::from_millis(1));
                }
                None
            });
            assert!(
                found.flatten().is_some(),
                "{state:?}: not written\n{outcome}"
            );
            assert_eq!(outcome.finished.code, Some(0), "{state:?}\n{outcome}");
            assert_eq!(outcome.stats().total("panics"), 0, "{state:?}\n{outcome}");
            let said = |came: u32| format!("rank 1: {came} came, {} errors", 1 - came);
            let is_said = |came| outcome.finished.stdout.contains(&said(came));
            match came {
                Some(came) => assert!(is_said(came), "{state:?}\n{outcome}"),
                None => assert!(is_said(0) || is_said(1), "{state:?}\n{outcome}"),
            }
        }
    });
}

/// Writes into a slot of a rank's what its next message would be, which it does not send. False where the message before that
/// was not seen to be over.
fn forge_next(segment: &Segment, last: u64) -> bool {
    /// Where a slot has the sequence number of its message.
    const SEQUENCE_AT: u64 = 32;
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        for slot in 0..segment.slot_count() {
            let at = segment.slot_at(slot);
            let word = |offset: u64| u64::from_le_bytes(segment.read(at + offset));
            let is_free = word(0) == 0 && word(8) != 0;
            if is_free && word(SEQUENCE_AT) == last {
                segment.write(at + SEQUENCE_AT, &(last + 1).to_le_bytes());
                let posted = 0x1234_5678_9abc_de00_u64 | SlotState::Posted as u64;
                segment.write(at, &posted.to_le_bytes());
                return true;
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
    false
}

/// A message that is fetched as its sender's slot says that it is there, and that its sender never sends, as somebody else has written
/// that: the receive ends in an error when another message comes, or when the sender has died.
#[test]
fn a_message_that_is_matched_early_and_never_sent() {
    needs_simulator("a segment that is written over");
    on("openmpi", |mpi| {
        for (then, counted) in [("send", "corrupt"), ("kill", "dead_peers")] {
            let job = job(mpi, 2, "traffic")
                .args(&["forged", then])
                .launcher_args(&["--enable-recovery"])
                .env("BYTES", "70001")
                .env("ANABRANCH_RTR", "off")
                .limit_seconds(300);
            let (outcome, forged) = disturbed(job, |ranks| {
                let segment = ranks[0].segment()?;
                forge_next(&segment, 7).then_some(())
            });
            assert!(forged.flatten().is_some(), "{then}: not forged\n{outcome}");
            let out = &outcome.finished.stdout;
            let came = if then == "send" { 9 } else { 8 };
            let said = format!("rank 1: {came} came, 1 errors, 1 in the library's words");
            assert!(out.contains(&said), "{then}\n{outcome}");
            assert_eq!(outcome.finished.left_behind, 0, "{then}\n{outcome}");
            if then == "send" {
                assert_eq!(outcome.finished.code, Some(0), "{outcome}");
                assert!(out.contains("rank 0: 9 came, 1 errors"), "{outcome}");
                let stats = outcome.stats();
                assert_eq!(stats.total(counted), 1, "{outcome}");
                assert!(stats.total("matched_early") >= 2, "{outcome}");
            } else {
                let told = lines(&outcome);
                let told = told.iter().filter(|line| line.contains("has died"));
                assert_eq!(told.count(), 1, "{outcome}");
            }
        }
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
        .env("ANABRANCH_PUT", "1M")
        .env("ALLOCATION", "1048576")
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
    let relayed = outcome.stats().total("multipath_relay_bytes");
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
            let retired = stats.of_rank(1, "paths_abandoned");
            assert!(
                retired >= stopped as u64,
                "seed {run}: {retired} paths left, {stopped} messages over\n{outcome}"
            );
            // A sender that is late is no fault.
            assert_eq!(stats.of_rank(1, "senders_late"), retired, "{outcome}");
            assert!(lines(&outcome).is_empty(), "{outcome}");
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
        let pushed = outcome.stats().of_rank(1, "multipath_put_bytes");
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
        assert!(lines(&outcome).is_empty(), "{outcome}");
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
