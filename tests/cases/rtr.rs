//! Receives of which their sender is told before it sends: what it writes is what belongs there, whatever else the two send,
//! and nothing of the kind is done where nobody could be sure.

use crate::support::{job, model, on, on_every_mpi, some, troubles};
use anabranch_tests::{built, needs_simulator, Job, Outcome};
use xtask::mpi::Mpi;

fn rtr(mpi: &Mpi, cases: &[&str]) -> Job {
    job(mpi, 2, "rtr").args(cases)
}

/// Exchanges of 1 MiB and a little, in large pages.
fn long_exchanges(mpi: &Mpi, steps: u32) -> Job {
    rtr(mpi, &["steady"])
        .env("LENGTH", "5")
        .env("ALLOCATION", "65536")
        .env("STEPS", &steps.to_string())
}

fn complete(job: Job) -> Outcome {
    let outcome = job.passes();
    let stats = outcome.stats();
    stats.check_complete();
    for counter in ["corrupt", "errors", "retries", "driver_retries"] {
        assert_eq!(stats.total(counter), 0, "{counter}:\n{outcome}");
    }
    outcome
}

on_every_mpi!(
    exchanges,
    scripts,
    matched_early,
    a_second_thread,
    what_is_split_is_begun_by_its_sender
);

/// `THREADS` for MPI_THREAD_MULTIPLE.
const MULTIPLE: &str = "1";

/// Two ranks that send to each other again and again: each message is written before it is matched, also where several threads might
/// call MPI and one does.
fn exchanges(mpi: &Mpi) {
    let steps = 200;
    for threads in ["0", MULTIPLE] {
        let job = rtr(mpi, &["steady"]).env("STEPS", &steps.to_string());
        let outcome = complete(job.env("MEET", "1").env("THREADS", threads));
        let stats = outcome.stats();
        // All but the first one of each rank, by which it is known, and the two that show that there is no window.
        let early = stats.total("receives_put_early");
        assert_eq!(early, 2 * (steps - 3), "{outcome}");
        assert_eq!(stats.total("rtrs_sent"), early, "{outcome}");
        let pushed = stats.total("receives_put_bytes");
        assert_eq!(pushed, early * 65537, "{outcome}");
    }
    complete(rtr(mpi, &["exchange", "each"]));
}

/// A second thread begins to send in the same stream while receives of the first are told of.
fn a_second_thread(mpi: &Mpi) {
    let mut early = 0;
    for seed in 1..=3 {
        let job = rtr(mpi, &["joined"]).env("SEED", &seed.to_string());
        let outcome = complete(job.env("STEPS", "120").env("THREADS", MULTIPLE));
        // Only of those that the first had posted before the second's first call was over: about a third.
        let posted = outcome.finished.stdout.lines();
        let posted = posted.filter_map(|line| line.strip_prefix("posted alone: "));
        let posted: Vec<u64> = posted.filter_map(|count| count.parse().ok()).collect();
        assert_eq!(posted.len(), 2, "{outcome}");
        let of_both = outcome.stats().total("receives_put_early");
        assert!(of_both <= posted.iter().sum(), "{outcome}");
        early += of_both;
    }
    assert!(early > 0, "nothing was written before it was matched");
}

/// Exchanges between which the two send in all the ways in which another message may come first.
fn scripts(mpi: &Mpi) {
    let mut early = 0;
    for seed in 1..=6 {
        let outcome = complete(
            rtr(mpi, &["script"])
                .env("SEED", &seed.to_string())
                .env("STEPS", "150"),
        );
        early += outcome.stats().total("receives_put_early");
    }
    assert!(early > 0, "nothing was written before it was matched");
}

/// The same with checksums, and where both are on one GPU, which one of the two makes all copies for.
#[test]
fn scripts_with_checksums_and_on_one_gpu() {
    for (name, option, value) in [
        ("openmpi", "ANABRANCH_VERIFY", "1"),
        ("mpich", "ANABRANCH_VERIFY", "1"),
        ("mpich", "GPUS", "1"),
    ] {
        on(name, |mpi| {
            for seed in 11..=13 {
                let outcome = complete(
                    rtr(mpi, &["script", "steady"])
                        .env("SEED", &seed.to_string())
                        .env("STEPS", "120")
                        .env(option, value),
                );
                let stats = outcome.stats();
                let early = stats.total("receives_put_early");
                match option {
                    "GPUS" => assert_eq!(stats.total("rtrs_sent"), 0, "{outcome}"),
                    _ => {
                        assert!(early > 0, "{outcome}");
                        let (checked, wrong) =
                            (stats.total("verified"), stats.total("verify_mismatches"));
                        assert!(checked > early && wrong == 0, "{outcome}");
                    }
                }
            }
        });
    }
}

/// Nobody is told of a receive where a second thread has called MPI, or where that is switched off.
#[test]
fn no_rtr_is_sent_where_it_is_not_sure() {
    on("openmpi", |mpi| {
        for (option, value) in [
            ("SECOND", "1"),
            ("ANABRANCH_RTR", "off"),
            ("ANABRANCH_PUT", "0"),
        ] {
            let job = rtr(mpi, &["steady", "script"]);
            let job = job.env("STEPS", "40").env("THREADS", MULTIPLE);
            let outcome = complete(job.env(option, value));
            let stats = outcome.stats();
            assert_eq!(stats.total("rtrs_sent"), 0, "{option}:\n{outcome}");
            assert!(stats.total("sends_rts") > 0, "{outcome}");
        }
    });
}

/// Where nobody is told of a receive, its message is claimed as soon as its slot has it, whatever else the two send: it is the one
/// that the receive takes. Nothing of the kind where that is switched off, or a second thread has called MPI.
fn matched_early(mpi: &Mpi) {
    let not_told = |cases: &[&str]| rtr(mpi, cases).env("ANABRANCH_RTR", "off");
    let steps = 200;
    let outcome = complete(not_told(&["steady"]).env("STEPS", &steps.to_string()));
    let claimed = outcome.stats().total("matched_early");
    // A message may be brought before its receiver looks, on a machine with few processors.
    assert!((steps / 10..=2 * steps).contains(&claimed), "{outcome}");
    let outcome = complete(not_told(&["exchange", "each"]));
    assert!(outcome.stats().total("matched_early") > 0, "{outcome}");
    for seed in 1..=6 {
        let job = not_told(&["script"]).env("SEED", &seed.to_string());
        let outcome = complete(job.env("STEPS", "150"));
        assert!(outcome.stats().total("matched_early") > 0, "{outcome}");
        assert_eq!(outcome.stats().total("rtrs_sent"), 0, "{outcome}");
    }
    for (option, value) in [("ANABRANCH_EARLY_MATCH", "off"), ("SECOND", "1")] {
        let job = not_told(&["steady", "script"]).env("STEPS", "40");
        let outcome = complete(job.env(option, value).env("THREADS", MULTIPLE));
        let stats = outcome.stats();
        assert_eq!(stats.total("matched_early"), 0, "{option}:\n{outcome}");
        assert!(stats.total("sends_rts") > 0, "{outcome}");
    }
    for seed in 1..=2 {
        let job = not_told(&["joined"]).env("SEED", &seed.to_string());
        complete(job.env("STEPS", "120").env("THREADS", MULTIPLE));
    }
}

/// A rank that deals with several foresees their messages, and they are what they should be.
#[test]
fn messages_of_several_are_matched_early() {
    on("openmpi", |mpi| {
        for (kind, ranks) in [("ring", 3), ("all-to-all", 4), ("all-by-number", 4)] {
            let outcome = Job::new(mpi, ranks, &built().command)
                .args(&["bench", kind, "--check", "--sizes", "1K,100001"])
                .args(&["--window", "1", "--iterations", "40", "--mpi", "openmpi"])
                .run();
            let stats = outcome.check_benched(2);
            let (all, ahead) = (stats.total("sends_rts"), stats.total("matched_early"));
            assert!(ahead > all / 10, "{kind}: {ahead} of {all}\n{outcome}");
        }
    });
}

/// Two ranks that deal with each other only tell of their receives, whoever else there is. One that deals with two does not: what
/// is written to one and what is read from another are made one after the other.
#[test]
fn no_rtr_is_sent_by_who_deals_with_two() {
    on("openmpi", |mpi| {
        for (kind, ranks, may_send) in [("mbw-mr", 4, true), ("ring", 3, false)] {
            let outcome = Job::new(mpi, ranks, &built().command)
                .args(&["bench", kind, "--check", "--sizes", "1K,100001"])
                .args(&["--window", "1", "--iterations", "40", "--mpi", "openmpi"])
                .run();
            let stats = outcome.check_benched(2);
            let (all, early) = (stats.total("sends_rts"), stats.total("rtrs_sent"));
            // On a machine with few processors a receive may come after its message each time; of those that are told of in vain, it is
            // 3 and then none for 32. Before the first message has come a rank in a ring knows of one other only.
            let is_right = if may_send {
                early > all / 20
            } else {
                early <= 3
            };
            assert!(
                is_right,
                "{kind}: {early} of {all} receives told of\n{outcome}"
            );
        }
    });
}

/// What a rank sends from one of its GPUs to another is its own to copy.
#[test]
fn a_rank_does_not_invite_itself() {
    needs_simulator("two GPUs a rank");
    on("mpich", |mpi| {
        let outcome = complete(rtr(mpi, &["own"]));
        let stats = outcome.stats();
        assert_eq!(stats.total("rtrs_sent"), 0, "{outcome}");
        assert_eq!(stats.total("receives_self"), 2 * 8, "{outcome}");
    });
}

/// Two messages of which one is written and the other read by the same rank would be made one after the other: the second is
/// written, too, where it is long.
#[test]
fn what_goes_both_ways_is_written_by_both() {
    needs_simulator("a node on which one rank is late");
    on("openmpi", |mpi| {
        let outcome = complete(long_exchanges(mpi, 200));
        let stats = outcome.stats();
        let early = stats.total("receives_put_early");
        let bytes = (1 << 20) + 24;
        let pushed = stats.total("receives_put_bytes") / bytes;
        assert!(
            pushed >= early && early > 0,
            "{pushed} of {early}:\n{outcome}"
        );
    });
}

/// Of a fast link messages of a few MiB do not tell the rate, so that nothing is planned for them; what goes in one copy anyway, its
/// sender is early to write.
#[test]
fn what_tells_no_rate_is_written_by_its_sender() {
    needs_simulator("a node that nobody has measured");
    on("mpich", |mpi| {
        let outcome = complete(long_exchanges(mpi, 40).env("ANABRANCH_MULTIPATH", "1M"));
        let stats = outcome.stats();
        assert_eq!(stats.total("receives_multipath"), 0, "{outcome}");
        // Not those that are timed, of each rank.
        let early = stats.total("receives_put_early");
        assert!(early > 2 * 10, "{outcome}");
    });
}

/// Exchanges of single messages that are split over the direct path and host memory: 8 MiB and a little, in large pages.
fn split_exchanges(mpi: &Mpi) -> Job {
    let model = model("beluga").display().to_string();
    rtr(mpi, &["longest"])
        .env("SIMCUDA_TOPOLOGY", "beluga")
        .env("ANABRANCH_MODEL", &model)
        .env("ANABRANCH_PATHS", "direct,host")
        .env("ALLOCATION", "1048576")
        .env("BYTES", "8388621")
        .env("STEPS", "40")
}

/// Of a message that is split with host memory its sender writes the direct part at once, and brings the rest as it is asked for: by all
/// ways to send, also where the buffer changes as soon as the send is over. Each byte comes once. Not where nobody is early.
fn what_is_split_is_begun_by_its_sender(mpi: &Mpi) {
    needs_simulator("a node whose links are known");
    for (invites, least, most) in [("1", 20, 80), ("0", 0, 0)] {
        let outcome = complete(split_exchanges(mpi).env("ANABRANCH_RTR", invites));
        let total = |name| outcome.stats().total(name);
        let early = total("receives_put_early");
        assert!((least..=most).contains(&early), "{early}: {outcome}");
        let [direct, pushed, host] = [
            "multipath_direct_bytes",
            "multipath_put_bytes",
            "multipath_host_bytes",
        ]
        .map(total);
        let all = total("receives_multipath_bytes");
        assert_eq!(all, 8388621 * total("receives_multipath"), "{outcome}");
        assert_eq!(all, direct + pushed + host, "{outcome}");
        assert!(host > all / 20, "{outcome}");
        let by_invitation = pushed / 8388621;
        assert!(by_invitation >= early * 6 / 10, "{outcome}");
    }
}

/// Whatever fails of it, at either end: what has not come is read.
#[test]
fn what_its_sender_could_not_begin_is_read() {
    needs_simulator("calls of the driver's that fail");
    on("openmpi", |mpi| {
        let (mut troubled, mut early) = (0, 0);
        for function in [
            "cuMemcpyAsync@0",
            "cuMemcpyAsync@1",
            "cuMemcpyBatchAsync@0",
            "cuEventRecord@0",
            "cuEventQuery@1",
            "cuStreamQuery@0",
            "cuStreamWriteValue32@1",
            "cuIpcOpenMemHandle@0",
            "cuIpcGetMemHandle@1",
        ] {
            for call in some(&[3, 8, 21, 34], 2) {
                let plan = format!("{function}:{call}=CUDA_ERROR_UNKNOWN");
                let outcome = split_exchanges(mpi).env("SIMCUDA_FAULT", &plan).run();
                let Some(met) = troubles(&plan, &outcome) else {
                    continue;
                };
                early += outcome.stats().total("receives_put_early");
                troubled += met;
            }
        }
        assert!(
            troubled > 3 && early > 100,
            "{troubled} faults were met, {early}"
        );
    });
}
