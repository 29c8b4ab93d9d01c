//! Driver calls that fail, one after the other, on each side of a message: it arrives, or its error handler is told.
//!
//! All positions are gone through on the MPI libraries that the tests name, a random sample of them on every one; `FAULT_SEED=N`
//! picks others.

use super::{lines, on_several, setting};
use crate::support::{is_long, job, on, on_every_mpi};
use anabranch_tests::{needs_simulator, Job, Outcome};
use std::collections::BTreeSet;
use xtask::mpi::Mpi;

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
const PATH_NAMES: [&str; 8] = [
    "direct",
    "multipath",
    "host pipeline",
    "GPU pipeline",
    "eager cell",
    "bcopy",
    "RTS",
    "checksums",
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

    fn is_by(&self, rank: u32, between: Between) -> bool {
        let is_to_other = self.peer == 1 - rank;
        match between {
            Between::OneWay => {
                (self.is_sent == (rank == 0) && is_to_other) || (rank, self.peer) == (0, 0)
            }
            Between::BothWays => is_to_other,
        }
    }
}

/// Which messages there are.
#[derive(Clone, Copy)]
enum Between {
    /// From rank 0 to rank 1, or to itself.
    OneWay,
    /// From each of the two to the other.
    BothWays,
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
    each_told(outcome, Between::OneWay);
}

#[track_caller]
fn each_told(outcome: &Outcome, between: Between) {
    let lines = lines(outcome);
    let distinct: BTreeSet<_> = lines.iter().collect();
    assert_eq!(distinct.len(), lines.len(), "said twice:\n{outcome}");
    for line in lines {
        let (rank, text) = said(line).unwrap_or_else(|| panic!("{line}\n{outcome}"));
        // Staging is allocated on a GPU, and host memory pinned, for no message in particular.
        let is_staging = text.starts_with("GPU ") && text.contains("no staging there");
        if is_staging || text.contains(" bytes of host memory cannot be pinned: ") {
            continue;
        }
        let told = Told::parse(text).unwrap_or_else(|| panic!("{line}\n{outcome}"));
        assert!(rank < 2 && told.is_by(rank, between), "{line}\n{outcome}");
    }
}

/// Lines of `faults` about a call that failed.
fn noted<'a>(outcome: &'a Outcome, what: &str) -> Vec<&'a str> {
    let lines = outcome.finished.stderr.lines();
    lines.filter_map(|line| line.strip_prefix(what)).collect()
}

/// What is done without where the driver refuses it, or gives back what an earlier message had.
const HARMLESS: [&str; 8] = [
    "cuPointerGetAttributes",
    "cuPointerSetAttribute",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuIpcCloseMemHandle",
    "cuStreamDestroy",
    "cuEventDestroy",
    "cuCtxGetDevice",
];

/// Calls failed once, each in a message of its own: all have arrived, and what failed was counted, and told where the message
/// took another way or another attempt.
#[track_caller]
fn none_is_lost(outcome: &Outcome, between: Between) {
    outcome.stats().check_complete();
    for rank in 0..2 {
        assert_eq!(tally(outcome, rank).2, 0, "{outcome}");
    }
    let uncounted = noted(outcome, "uncounted: ");
    let is_harmless = |line: &&str| HARMLESS.iter().any(|name| line.contains(name));
    let (_, bad): (Vec<_>, Vec<_>) = uncounted.into_iter().partition(is_harmless);
    // The same with the calls around those.
    let is_around = |line: &&str| line.contains("cuCtx") || line.contains("cuThreadExchange");
    // A sender that finds its message over when it reaches for what it was to fill says nothing of it, and what the driver
    // gives no handle for is not pushed to.
    let calls = ["cuCtxEnablePeerAccess", "cuIpcOpenMemHandle"];
    let is_quiet = |line: &&str| {
        let is_divided = line.ends_with(" on several") || line.ends_with(" on push");
        let is_late = is_divided && calls.iter().any(|call| line.contains(call));
        is_late || *line == "cuIpcGetMemHandle on push"
    };
    let (quiet, around): (Vec<_>, Vec<_>) = bad.into_iter().partition(is_quiet);
    assert!(quiet.len() <= 3, "{quiet:?}\n{outcome}");
    assert!(around.iter().all(is_around), "{around:?}\n{outcome}");
    let places: BTreeSet<_> = around
        .iter()
        .filter_map(|line| line.split(" on ").nth(1))
        .collect();
    assert!(around.len() <= 20 * places.len(), "{around:?}\n{outcome}");
    for line in noted(outcome, "to be told: ") {
        let function = line.split(' ').next().unwrap_or(line);
        let is_told = lines(outcome).iter().any(|line| line.contains(function));
        assert!(is_told, "{line}\n{outcome}");
    }
    each_told(outcome, between);
}

/// Which of the calls of a message fail.
#[derive(Clone, Copy)]
enum Calls {
    /// One after the other, of those that ask again and again for the same a part.
    All,
    /// One in so many of them.
    OneIn(u64),
}

impl Calls {
    /// All of them in long tests, else one in so many.
    fn all_or(count: u64) -> Calls {
        match is_long() {
            true => Calls::All,
            false => Calls::OneIn(count),
        }
    }

    fn of(self, mpi: &Mpi, job: Job) -> Job {
        match self {
            Calls::All => job,
            Calls::OneIn(count) => {
                // Others with each library.
                let seed = setting("FAULT_SEED", 1) + mpi.name.bytes().map(u64::from).sum::<u64>();
                eprintln!("{}: calls by seed {seed}", mpi.name);
                job.env("SAMPLE", &count.to_string())
                    .env("SEED", &seed.to_string())
            }
        }
    }

    /// All of those that do something, where not a sample of them (`FAULT_FUNCTION=*`: all).
    fn that_act(self, job: Job) -> Job {
        if !self.are_all() {
            return job;
        }
        let function = std::env::var("FAULT_FUNCTION");
        job.env("FUNCTION", function.as_deref().unwrap_or("*!"))
    }

    fn are_all(self) -> bool {
        matches!(self, Calls::All)
    }
}

/// Runs a program until its last call has failed: where a path is given up for good, the rest is for the next process.
fn to_the_end(mpi: &Mpi, calls: Calls, sides: &[&str], job: impl Fn() -> Job) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    if !calls.are_all() {
        return vec![calls.of(mpi, job()).passes()];
    }
    for side in sides {
        let mut first = 1;
        loop {
            let job = job().env("SIDE", side).env("FIRST", &first.to_string());
            let outcome = job.passes();
            let next = noted(&outcome, "go on with call ");
            let next: Option<u64> = next.first().and_then(|call| call.parse().ok());
            assert!(next.is_none_or(|next| next > first), "{outcome}");
            outcomes.push(outcome);
            let Some(next) = next else { break };
            first = next;
        }
    }
    outcomes
}

/// A counter of all runs.
fn sum(outcomes: &[Outcome], counter: &str) -> u64 {
    let values = outcomes
        .iter()
        .map(|outcome| outcome.stats().total(counter));
    values.sum()
}

/// Calls that failed in all runs.
fn hits(outcomes: &[Outcome]) -> u64 {
    outcomes.iter().map(|outcome| tally(outcome, 1).0).sum()
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

const PATHS: [&str; 10] = [
    "direct",
    "host_ring",
    "device_to_host",
    "host_to_device",
    "value",
    "eager",
    "eager_late",
    "eager_to_host",
    "hosted",
    "self",
];

/// The program itself tells the driver which calls shall fail.
fn faults(mpi: &Mpi, arguments: &[&str]) -> Job {
    needs_simulator("driver calls that fail");
    job(mpi, 2, "faults")
        .args(arguments)
        .args(&PATHS)
        .env("ANABRANCH_GPU_PIPELINE", "off")
        // Several pieces a message.
        .env("ANABRANCH_CHUNK", "64K")
        .limit_seconds(600)
}

/// Any one driver call fails, once: no message is lost.
fn each_call_fails_once(mpi: &Mpi, code: &str) {
    // One in four where not everything is gone through.
    let (sample, least) = if is_long() { ("1", 900) } else { ("4", 200) };
    let outcome = faults(mpi, &["once", code]).env("SAMPLE", sample).passes();
    let stats = outcome.stats();
    none_is_lost(&outcome, Between::OneWay);
    let (positions, ..) = tally(&outcome, 0);
    assert!(positions > least, "{positions} positions:\n{outcome}");
    for counter in ["retries", "driver_retries"] {
        for rank in 0..2 {
            assert!(stats.of_rank(rank, counter) > 0, "{counter}:\n{outcome}");
        }
    }
    assert!(stats.fallback("mapping_failed") > 0, "{outcome}");
    for path in ["direct", "host_pipeline", "eager", "self", "bcopy"] {
        let received = stats.total(&format!("receives_{path}"));
        assert!(received > 0, "{path}:\n{outcome}");
    }
}

#[test]
fn each_call_fails_once_with_mpich() {
    on("mpich", |mpi| each_call_fails_once(mpi, "999"));
}

#[test]
fn each_call_fails_once_with_openmpi() {
    on("openmpi", |mpi| each_call_fails_once(mpi, "2"));
}

/// Any one call fails, once, in messages through memory of their sender's GPU.
fn each_call_of_the_gpu_ring(mpi: &Mpi) {
    needs_simulator("driver calls that fail");
    let outcome = job(mpi, 2, "faults")
        .args(&["once", "999", "gpu_ring"])
        .limit_seconds(600)
        .passes();
    none_is_lost(&outcome, Between::OneWay);
    let (positions, ..) = tally(&outcome, 0);
    assert!(positions > 50, "{positions} positions:\n{outcome}");
    assert!(
        outcome.stats().total("receives_gpu_pipeline") > 0,
        "{outcome}"
    );
}

#[test]
fn each_call_of_the_gpu_ring_fails_once() {
    for name in ["mpich", "openmpi5"] {
        on(name, each_call_of_the_gpu_ring);
    }
}

/// One function fails for good meanwhile: what can go on in host memory does so.
#[test]
fn one_function_of_the_gpu_ring_fails_for_good() {
    on("openmpi", |mpi| {
        needs_simulator("driver calls that fail");
        let outcome = job(mpi, 2, "faults")
            .args(&["lasting", "2", "gpu_ring"])
            .limit_seconds(600)
            .passes();
        let (_, arrived, _) = tally(&outcome, 1);
        assert!(arrived > 5, "{outcome}");
        assert!(
            outcome.stats().total("receives_host_pipeline") > 0,
            "{outcome}"
        );
        each_told_once(&outcome);
    });
}

/// The same with checksums, which take copies of their own on both sides: none is wrong, and most messages have them.
fn each_call_with_checksums(mpi: &Mpi) {
    needs_simulator("driver calls that fail");
    let job = job(mpi, 2, "faults")
        .args(&["once", "999", "direct", "value", "eager", "self"])
        .env("SAMPLE", if is_long() { "1" } else { "4" })
        .env("ANABRANCH_VERIFY", "1")
        .limit_seconds(600);
    let outcome = job.passes();
    none_is_lost(&outcome, Between::OneWay);
    let (hit, ..) = tally(&outcome, 0);
    let stats = outcome.stats();
    let verified = stats.total("verified");
    assert_eq!(stats.total("verify_mismatches"), 0, "{outcome}");
    assert!(verified * 10 > hit * 9, "{verified} of {hit}\n{outcome}");
}

#[test]
fn each_call_with_checksums_fails_once() {
    on("mpich5", each_call_with_checksums);
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
        .env("ANABRANCH_GPU_PIPELINE", "off")
        .env("ANABRANCH_CHUNK", "64K")
        .limit_seconds(600)
        .passes();
    let told = handlers_were_told(&outcome);
    let lost = [0, 1].map(|rank| tally(&outcome, rank).2);
    assert_eq!(told.len() as u64, lost.iter().sum::<u64>(), "{outcome}");
    assert!(lost.iter().all(|lost| *lost > 0), "{outcome}");
    for (rank, told) in &told {
        assert!(
            told.is_by(*rank, Between::OneWay),
            "{told:?} on rank {rank}\n{outcome}"
        );
        assert_eq!(told.end, "the message is lost", "{outcome}");
    }
    // The sender's copy down to host memory fails for good, which has no other way.
    let is_value = |(rank, told): &(u32, Told)| *rank == 0 && told.path == "bcopy";
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

/// Any one driver call fails, once, in messages over several paths: none is lost, what was given up or made again is counted,
/// and each sort of trouble is told once.
fn each_call_of_several(mpi: &Mpi, calls: Calls, paths: &str) {
    let job = || {
        on_several(mpi, 2, "faults")
            .args(&["once", "999", "several"])
            .env("ANABRANCH_PATHS", paths)
    };
    let outcomes = to_the_end(mpi, calls, &["0", "1"], job);
    let hit = hits(&outcomes);
    let is_upset = |outcome: &Outcome| outcome.finished.stderr.contains("written over");
    for outcome in &outcomes {
        none_is_lost(outcome, Between::OneWay);
        assert!(!is_upset(outcome), "{outcome}");
    }
    let last = outcomes.last().expect("a run");
    // How often a message asks for the end of its copies depends on how busy the cores are: 146 were seen on idle ones.
    assert!(!calls.are_all() || hit > 100, "{hit} positions:\n{last}");
    // Messages of this kind they were, but for those of which the direct path was lost as well.
    let several = sum(&outcomes, "receives_multipath");
    assert!(several * 10 > hit * 9, "{several} of {hit}:\n{last}");
    for path in paths.split(',') {
        let bytes = sum(&outcomes, &format!("multipath_{path}_bytes"));
        assert!(bytes > 0, "{path}:\n{last}");
    }
    // At most a path, or a few, for each call that was hit. Most that fail are made again.
    let retired = sum(&outcomes, "paths_abandoned");
    assert!(retired <= 4 * hit, "{retired} of {hit}:\n{last}");
    if !calls.are_all() {
        return;
    }
    assert!(sum(&outcomes, "driver_retries") > 0, "{last}");
    assert!(sum(&outcomes, "retries") > 0, "{last}");
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
        let retired = stats.total("paths_abandoned");
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
    on("openmpi", |mpi| {
        each_call_of_several(mpi, Calls::all_or(8), "direct,relay");
    });
}

#[test]
fn each_call_of_messages_over_host_memory_fails_once() {
    on("mpich", |mpi| {
        each_call_of_several(mpi, Calls::all_or(8), "direct,host");
    });
}

/// Two ranks that send to each other, each of which writes to the other's buffer. After a push has failed there is no other
/// between the two, so that the next call is for another job: one after the other only of calls that do something
/// (`FAULT_FUNCTION=*`: of all).
fn each_call_of_pushes(mpi: &Mpi, calls: Calls) {
    let job = || {
        let job = on_several(mpi, 2, "faults").args(&["once", "999", "push"]);
        calls.that_act(job.env("ANABRANCH_PUT", "1M"))
    };
    let outcomes = to_the_end(mpi, calls, &["0"], job);
    for outcome in &outcomes {
        none_is_lost(outcome, Between::BothWays);
        let pushed = outcome.stats().of_rank(1, "multipath_put_bytes");
        assert!(pushed > 0, "{outcome}");
    }
    let last = outcomes.last().expect("a run");
    // On busy cores a sender may be late to push, so that it is not by a push that fails that the next job begins.
    let counts = [hits(&outcomes), sum(&outcomes, "paths_abandoned")];
    let is_enough = counts[0] >= 20 && counts[1] > 0;
    assert!(!calls.are_all() || is_enough, "{counts:?}\n{last}");
}

#[test]
fn each_call_of_pushes_fails_once() {
    on("openmpi", |mpi| each_call_of_pushes(mpi, Calls::all_or(4)));
}

/// The same of messages that are written to a receive of which their sender was told.
fn each_call_of_invited(mpi: &Mpi, calls: Calls) {
    needs_simulator("driver calls that fail");
    let job = || calls.that_act(job(mpi, 2, "faults").args(&["once", "999", "invited"]));
    let outcomes = to_the_end(mpi, calls, &["0"], job);
    for outcome in &outcomes {
        none_is_lost(outcome, Between::BothWays);
        let invited = outcome.stats().total("receives_put_early");
        assert!(invited > 0, "{outcome}");
    }
    let last = outcomes.last().expect("a run");
    let hit = hits(&outcomes);
    let retries = sum(&outcomes, "driver_retries");
    let is_enough = hit >= 5 && retries > 0;
    assert!(!calls.are_all() || is_enough, "{hit} and {retries}\n{last}");
}

#[test]
fn each_call_of_invited_messages_fails_once() {
    on("mpich", |mpi| each_call_of_invited(mpi, Calls::all_or(3)));
}

/// Messages whose copies are all the receiver's: what fails costs a detour, and the next messages are driven again.
fn each_call_of_one(mpi: &Mpi, calls: Calls, executor: &str) {
    let job = on_several(mpi, 2, "faults")
        .args(&["once", "999", "one"])
        .env("ANABRANCH_OWNER", "one")
        .env("ANABRANCH_EXECUTOR", executor);
    let outcome = calls.of(mpi, job).passes();
    none_is_lost(&outcome, Between::OneWay);
    let stats = outcome.stats();
    let (hit, arrived, _) = tally(&outcome, 1);
    let driven = stats.total(&format!("one_owner_by_{executor}"));
    assert!(
        driven * 10 > arrived * 6,
        "{driven} of {arrived}\n{outcome}"
    );
    assert_eq!(stats.total("places_retired"), 0, "{outcome}");
    if calls.are_all() {
        let failed = stats.total("one_owner_failed");
        assert!(hit > 100 && failed > 20, "{failed} of {hit}:\n{outcome}");
    }
}

#[test]
fn each_call_of_messages_driven_by_one_rank_fails_once() {
    on("openmpi", |mpi| {
        each_call_of_one(mpi, Calls::all_or(6), "streams")
    });
}

/// All of these with a few of the calls, with checksums where there is one path.
fn a_sample_of_calls(mpi: &Mpi) {
    let job = faults(mpi, &["once", "999"]).env("ANABRANCH_VERIFY", "1");
    let times = if is_long() { 1 } else { 2 };
    let outcome = Calls::OneIn(16 * times).of(mpi, job).passes();
    none_is_lost(&outcome, Between::OneWay);
    assert!(outcome.stats().total("verified") > 50 / times, "{outcome}");
    assert_eq!(outcome.stats().total("verify_mismatches"), 0, "{outcome}");
    // The others are gone through as a whole on one of these.
    let is_mpich = mpi.name.starts_with("mpich");
    let paths = if is_mpich {
        "direct,relay"
    } else {
        "direct,host"
    };
    each_call_of_several(mpi, Calls::OneIn(40 * times), paths);
    each_call_of_pushes(mpi, Calls::OneIn(24 * times));
    each_call_of_invited(mpi, Calls::OneIn(12 * times));
    each_call_of_one(mpi, Calls::OneIn(24 * times), "graph");
}

on_every_mpi!(a_sample_of_calls);
