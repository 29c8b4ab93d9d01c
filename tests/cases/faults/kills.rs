//! Ranks that are killed while messages are under way: the job ends, and leaves a page at most.

use super::{
    disturbed, lines, pushed_traffic, setting, several_traffic, stop_in_several, stop_when,
    PATIENCE,
};
use crate::support::{is_long, job, model, on, on_every_mpi, over_an_mpi_that_knows_cuda};
use anabranch_tests::ranks::{self, Random, Rank};
use anabranch_tests::{needs_simulator, on_real_gpus, Job, Outcome};
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
    let runs = setting("FAULT_RUNS", MOMENTS);
    for run in seed.. {
        // On a busy machine the moments may all be alike: then there are more of them.
        let is_enough = seen.iter().all(|count| *count > 0) || run >= seed + 8 * runs;
        if run >= seed + runs && is_enough {
            break;
        }
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
        leaves_a_page(&files, &format!("seed {run}\n{outcome}"));
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

/// All ranks of a job have one directory in /dev/shm, which is a page.
fn leaves_a_page(files: &BTreeSet<PathBuf>, of: &str) {
    assert_eq!(files.len(), 1, "{files:?}, {of}");
    for file in files {
        let left = std::fs::metadata(file).map_or(0, |about| about.len());
        assert!(left <= 4096, "{left} bytes in {}, {of}", file.display());
    }
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

/// A rank is killed while a message over several paths is unfinished, of its own or over its GPU.
fn killed_in_several(mpi: &Mpi, moments: u64, traffic: impl Fn(&[&str]) -> Job) {
    let seed = setting("FAULT_SEED", 1);
    for run in seed..seed + setting("FAULT_RUNS", if is_long() { moments } else { moments / 3 }) {
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

/// Where a sender stops that writes a message to a receive of which it was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StopsAt {
    /// In the call that launches the copy: it has taken the invitation, and its descriptor is not out.
    Launch,
    /// When it asks for the first time whether the copy has ended. It is told from then on that it has not.
    Question,
}

impl StopsAt {
    fn plan(self) -> &'static str {
        match self {
            StopsAt::Launch => "cuMemcpyAsync:1=SIGSTOP",
            StopsAt::Question => "cuStreamQuery:1=SIGSTOP,cuStreamQuery:1+=CUDA_ERROR_NOT_READY",
        }
    }
}

/// What it writes so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writes {
    /// All of the message.
    Whole,
    /// What host memory is not to bring.
    Split,
}

impl Writes {
    fn job(self, job: Job) -> Job {
        match self {
            Writes::Whole => job.env("BYTES", "300001"),
            Writes::Split => job
                .env("SIMCUDA_TOPOLOGY", "beluga")
                .env("ANABRANCH_MODEL", &model("beluga").display().to_string())
                .env("ANABRANCH_PATHS", "direct,host")
                .env("ALLOCATION", "1048576")
                .env("BYTES", "8388621"),
        }
    }
}

/// What was seen when a rank was killed while rank 0 wrote to a receive of rank 1's.
#[derive(Debug)]
struct Written {
    /// Receives that are written to at once: what is left of each, bytes.
    taken: Vec<u64>,
    /// Messages of the sender's whose descriptor is out.
    out: usize,
    /// What they had in /dev/shm.
    files: BTreeSet<PathBuf>,
    /// Processor time of the survivor's helper in `PAUSE`, from some time after the kill on, as long as it lives.
    helper: Option<Duration>,
}

const PAUSE: Duration = Duration::from_millis(1000);

/// Two ranks send in turns. The sender stops in the middle of a message that it writes before it is matched, and then one of the two
/// is killed. `lives`: the launcher lets the other one go on.
fn killed_while_written(
    mpi: &Mpi,
    (writes, at): (Writes, StopsAt),
    victim: usize,
    lives: bool,
) -> (Outcome, Written) {
    needs_simulator("a rank that stops in a call of the driver's");
    let launcher: &[&str] = if lives { &["--enable-recovery"] } else { &[] };
    let job = writes
        .job(job(mpi, 2, "traffic"))
        .args(&["turns", at.plan()])
        .launcher_args(launcher)
        .limit_seconds(120);
    let (outcome, written) = disturbed(job, move |ranks| {
        let deadline = Instant::now() + PATIENCE;
        while !ranks[0].waits_stopped() {
            if Instant::now() > deadline {
                return None;
            }
        }
        let [sender, receiver] = [&ranks[0], &ranks[1]].map(Rank::segment);
        let (sender, receiver) = (sender?, receiver?);
        // The descriptor of a message that is on its way is matched before anybody dies.
        while at == StopsAt::Question && sender.unfinished()[1] == 0 && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(2));
        }
        let mut written = Written {
            taken: receiver.written_at_once(),
            out: sender.unfinished().iter().sum(),
            files: ranks.iter().flat_map(Rank::shared_files).collect(),
            helper: None,
        };
        ranks[victim].signal(libc::SIGKILL);
        ranks[0].signal(libc::SIGCONT);
        if lives {
            // Until it has looked whether its peer is alive.
            thread::sleep(Duration::from_millis(500));
            let survivor = &ranks[1 - victim];
            let before = survivor.helper_time();
            thread::sleep(PAUSE);
            let after = survivor.helper_time();
            written.helper = before.zip(after).map(|(before, after)| after - before);
        }
        Some(written)
    });
    let written = written.flatten().unwrap_or_else(|| {
        panic!("{at:?}: rank 0 never wrote to a receive that it was told of\n{outcome}")
    });
    assert_eq!(written.taken.len(), 1, "{at:?}\n{outcome}");
    assert_eq!(
        written.out,
        usize::from(at == StopsAt::Question),
        "{at:?}\n{outcome}"
    );
    let is_not_invited = outcome.finished.stdout.contains("rank 0: 0 invited");
    assert!(writes == Writes::Split || !is_not_invited, "{outcome}");
    assert!(
        outcome.finished.code.is_some(),
        "{at:?}: it never ended\n{outcome}"
    );
    assert_eq!(outcome.finished.left_behind, 0, "{at:?}\n{outcome}");
    leaves_a_page(&written.files, &format!("{at:?}\n{outcome}"));
    (outcome, written)
}

/// A rank is killed while one writes to a receive of the other's that it was told of: the job ends as the launcher has it.
fn killed_while_writing_at_once(mpi: &Mpi) {
    for (at, victim) in [
        (StopsAt::Launch, 0),
        (StopsAt::Question, 0),
        (StopsAt::Question, 1),
    ] {
        let what = (Writes::Whole, at);
        let (outcome, _) = killed_while_written(mpi, what, victim, false);
        let code = outcome.finished.code;
        assert!(
            code.is_some_and(|code| code != 0),
            "{at:?}, {victim}\n{outcome}"
        );
    }
    leftovers_are_reclaimed(mpi);
}

on_every_mpi!(killed_while_writing_at_once);

/// The same where the launcher lets the other one live: what its program was told.
fn survives_one_that_was_written_to(what: (Writes, StopsAt), victim: usize, expected: &str) {
    on("openmpi", |mpi| {
        // Again, where the receiver was so slow that it was taken to compute, and its messages left out host memory.
        let mut tries = (0..3).map(|_| killed_while_written(mpi, what, victim, true));
        let is_it = |written: &Written| (what.0 == Writes::Split) == (written.taken[0] > 0);
        let found = tries.find(|(_, written)| is_it(written));
        let (outcome, written) = found.expect("the sender writes what it is to write");
        let told = format!("survived: {expected}");
        assert!(outcome.finished.stdout.contains(&told), "{outcome}");
        // Said once, by the survivor.
        let said = lines(&outcome);
        let is_of_the_dead = |line: &&&str| line.contains("er has died");
        assert_eq!(said.iter().filter(is_of_the_dead).count(), 1, "{outcome}");
        assert_eq!(said.len(), 1, "{outcome}");
        if let Some(taken) = written.helper {
            assert!(taken < PAUSE / 5, "{taken:?} of {PAUSE:?}\n{outcome}");
        }
        leftovers_are_reclaimed(mpi);
    });
}

/// What was on its way is read from the memory of the dead, as it is mapped.
#[test]
fn a_sender_that_dies_while_it_writes_to_a_receive() {
    survives_one_that_was_written_to(
        (Writes::Whole, StopsAt::Question),
        0,
        "message 12 was the last that came, 0 cancelled, 1 of 1 errors in the library's words, 12 sent",
    );
}

/// Of a message that never was nothing comes, as natively. Its receive can be cancelled. (What the survivor sends next may still
/// be written to a receive of the dead rank's, whose memory it has mapped.)
#[test]
fn a_sender_that_dies_before_its_descriptor_is_out() {
    survives_one_that_was_written_to(
        (Writes::Whole, StopsAt::Launch),
        0,
        "message 11 was the last that came, 1 cancelled, 1 of 1 errors in the library's words",
    );
}

/// The sender's copy comes to its end, but its message has no receiver any more.
#[test]
fn a_receiver_that_dies_while_its_sender_writes_to_it() {
    survives_one_that_was_written_to(
        (Writes::Whole, StopsAt::Question),
        1,
        "message 11 was the last that came, 0 cancelled, 1 of 1 errors in the library's words, 12 sent",
    );
}

/// The same where host memory was to bring a part of the message: that is read as well.
#[test]
fn a_sender_that_dies_while_it_writes_the_most_of_a_message() {
    survives_one_that_was_written_to(
        (Writes::Split, StopsAt::Question),
        0,
        "message 12 was the last that came, 0 cancelled, 1 of 1 errors in the library's words, 12 sent",
    );
}

#[test]
fn a_receiver_that_dies_while_its_sender_writes_the_most_of_a_message() {
    survives_one_that_was_written_to(
        (Writes::Split, StopsAt::Question),
        1,
        "message 11 was the last that came, 0 cancelled, 1 of 1 errors in the library's words, 12 sent",
    );
}
