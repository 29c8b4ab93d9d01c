//! Long messages over several paths: what arrives is right whatever fails, every byte is counted on its path, staging
//! that is too small for all holds nobody up, and it is faster.

use crate::one_owner::launches;
use crate::support::{job, model, model_of_this_machine, on, some, troubles};
use anabranch_tests::{built, needs_simulator, on_real_gpus, scratch_folder, Job, Outcome};
use std::collections::BTreeSet;
use std::process::Command;
use xtask::flow::{Over, Rates};
use xtask::layout::repository_root;
use xtask::mpi::Mpi;

fn on_node(mpi: &Mpi, topology: &str, ranks: usize, cases: &[&str]) -> Job {
    on_node_running(mpi, topology, ranks, "paths").args(cases)
}

fn on_node_running(mpi: &Mpi, topology: &str, ranks: usize, program: &str) -> Job {
    job(mpi, ranks, program)
        .env("SIMCUDA_TOPOLOGY", topology)
        .env("ANABRANCH_MODEL", &model(topology).display().to_string())
}

/// The same by messages of so many bytes, or on two GPUs of this machine, where they are real, by messages for which the
/// host path is worth while.
fn on_any_node(mpi: &Mpi, topology: &str, bytes: &str, cases: &[&str]) -> Job {
    if !on_real_gpus() {
        return on_node(mpi, topology, 2, cases).env("BYTES", bytes);
    }
    let model = model_of_this_machine();
    job(mpi, 2, "paths")
        .args(cases)
        .env("BYTES", "134217728")
        .env("ANABRANCH_MODEL", &model.display().to_string())
}

/// On real GPUs the host path is the one that is there besides the direct one: each has carried its part.
fn check_host_path(outcome: &Outcome) {
    let total = |name| outcome.stats().total(name);
    if on_real_gpus() {
        assert!(total("multipath_host_bytes") > 0, "{outcome}");
        assert!(
            total("multipath_direct_bytes") > total("multipath_host_bytes"),
            "{outcome}"
        );
        assert_eq!(total("paths_abandoned"), 0, "{outcome}");
    }
}

/// The bytes of messages over several paths are those of their paths.
fn check_bytes(outcome: &Outcome) {
    check_bytes_in_one_place(outcome);
    let overtaken = outcome.stats().total("multipath_overtaken_bytes");
    assert_eq!(overtaken, 0, "{outcome}");
}

/// The same, but that of a message what its sender is late with need not come if another is received in its place.
fn check_bytes_in_one_place(outcome: &Outcome) {
    let stats = outcome.stats();
    stats.check_complete();
    let parts = ["direct", "put", "relay", "host", "overtaken"]
        .map(|path| stats.total(&format!("multipath_{path}_bytes")));
    assert_eq!(
        parts.iter().sum::<u64>(),
        stats.total("receives_multipath_bytes"),
        "{outcome}"
    );
    assert!(stats.total("receives_multipath") > 0, "{outcome}");
}

/// Of all paths of all messages none was left, but where a busy machine kept a sender from its core for half a second.
fn check_none_is_left(outcome: &Outcome, told: &str) {
    let total = |name| outcome.stats().total(name);
    // For that a busy machine is enough.
    let late = if on_real_gpus() {
        0
    } else {
        total("senders_late")
    };
    assert_eq!(total("paths_abandoned"), late, "{told}: {outcome}");
    let mut said = outcome.finished.stderr.lines();
    assert!(
        !said.any(|line| line.contains("multipath path:")),
        "{outcome}"
    );
}

#[test]
fn odd_sizes_on_every_node() {
    on("openmpi", |mpi| {
        let nodes = [
            ("narval", true),
            ("beluga", true),
            ("dgx1-v100", true),
            ("hgx-h200", false),
        ];
        for (topology, over_relays) in some(&nodes, 2) {
            let cases = ["odd_sizes", "window"];
            let outcome = on_node(mpi, topology, 2, &cases)
                .env("BYTES", if over_relays { "25165824" } else { "67108864" })
                .passes();
            check_bytes(&outcome);
            let stats = outcome.stats();
            let relayed = stats.total("multipath_relay_bytes") > 0;
            assert_eq!(relayed, over_relays, "{topology}: {outcome}");
            check_none_is_left(&outcome, topology);
            assert!(
                over_relays || stats.total("multipath_host_bytes") > 0,
                "{outcome}"
            );
        }
    });
}

/// A receive that is too small takes nothing, and the next message comes as ever.
#[test]
fn truncated_messages() {
    on("openmpi", |mpi| {
        let outcome = on_any_node(mpi, "beluga", "25165824", &["truncated"]).passes();
        assert_eq!(outcome.stats().total("truncated"), 1, "{outcome}");
        assert_eq!(outcome.stats().total("receives_multipath"), 2, "{outcome}");
        check_host_path(&outcome);
    });
}

/// Paths that are not allowed carry nothing.
#[test]
fn options_choose_the_paths() {
    on("mpich", |mpi| {
        for (paths, carries) in [
            ("direct", [false, false]),
            ("direct,relay", [true, false]),
            ("direct,host", [false, true]),
            ("relay", [true, false]),
        ] {
            if on_real_gpus() && paths.contains("relay") {
                continue; // relays are for more than two GPUs, and lose behind a switch
            }
            let outcome = on_any_node(mpi, "beluga", "25165824", &["odd_sizes"])
                .env("ANABRANCH_PATHS", paths)
                .passes();
            let total = |name| outcome.stats().total(name);
            let carried =
                ["multipath_relay_bytes", "multipath_host_bytes"].map(|name| total(name) > 0);
            assert_eq!(carried, carries, "{paths}: {outcome}");
            if carries[1] {
                check_host_path(&outcome);
            }
        }
    });
}

/// In however few pieces a path's part is to move, it is no shorter for that.
#[test]
fn few_chunks_keep_no_path_from_its_share() {
    on("mpich", |mpi| {
        needs_simulator("relays");
        for chunks in some(&["4", "2", "1"], 1) {
            let outcome = on_node(mpi, "beluga", 2, &["window"])
                .env("ANABRANCH_CHUNKS", chunks)
                .env("BYTES", "134217728")
                // The receiver takes over what is late, as much is of a node that waits for a processor.
                .env("SIMCUDA_QUIET_US", "30000")
                .passes();
            check_bytes(&outcome);
            let stats = outcome.stats();
            let [all, direct, relay, host] = [
                "receives_multipath",
                "several_direct",
                "several_relay",
                "several_host",
            ]
            .map(|counter| stats.total(&format!("{counter}_bytes")));
            // Two relays of the rate of the direct copy, and a little by the host. The receiver takes over what a busy machine keeps
            // the sender from.
            assert!(
                3 * direct < 2 * all && 3 * relay > all,
                "{chunks}: {outcome}"
            );
            assert!(host > 0, "{chunks}: {outcome}");
        }
    });
}

/// The first message of a window in one place goes by value, as its receiver is not ready yet: what comes by descriptors is
/// not written there while that is.
#[test]
fn a_value_before_descriptors_in_one_place() {
    for (name, paths, bytes) in [
        ("mpich", "direct,relay,host", "16777216"),
        ("mpich", "direct", "1000000"),
        ("openmpi", "direct,relay,host", "8388608"),
    ] {
        on(name, |mpi| {
            let outcome = on_any_node(mpi, "narval", bytes, &["one_place_early"])
                .env("ANABRANCH_PATHS", paths)
                .env("BYTES", bytes)
                .passes();
            let stats = outcome.stats();
            stats.check_complete();
            for counter in ["receives_bcopy", "sends_rts"] {
                assert!(stats.total(counter) > 0, "{name}, {counter}:\n{outcome}");
            }
        });
    }
}

/// Messages of a window that are received in one place, as bandwidth tests do: no two copies to one byte are unordered.
#[test]
fn windows_in_one_place() {
    on("openmpi", |mpi| {
        for topology in ["beluga", "hgx-h200"] {
            let outcome = on_any_node(mpi, topology, "67108864", &["one_place"]).passes();
            check_bytes(&outcome);
            check_host_path(&outcome);
        }
    });
}

/// Messages that go both ways at once are written by their senders, on the direct path; in one direction, in allocations of odd
/// sizes, and where that is switched off, nothing is.
#[test]
fn what_goes_both_ways_is_pushed() {
    for name in ["openmpi", "mpich"] {
        on(name, |mpi| {
            let turns = [
                ("beluga", "4M", "1048576", "exchange", true),
                ("hgx-h200", "4M", "1048576", "exchange", true),
                ("beluga", "4M", "1048576", "exchange_windows", true),
                ("hgx-h200", "4M", "1048576", "exchange_windows", true),
                ("beluga", "4M", "1048576", "odd_sizes", false),
                ("beluga", "4M", "4096", "exchange", false),
                ("beluga", "0", "1048576", "exchange", false),
                ("beluga", "1G", "1048576", "exchange_windows", false),
            ];
            let few = if name == "openmpi" { turns.len() } else { 4 };
            for (topology, push, allocation, case, pushes) in some(&turns, few) {
                // Real messages are long, and take their time to be checked.
                if on_real_gpus() && topology != "hgx-h200" && allocation != "4096" {
                    continue;
                }
                let outcome = on_any_node(mpi, topology, "8388608", &[case])
                    .env("ANABRANCH_PUT", push)
                    .env("ALLOCATION", allocation)
                    // Which is another reason to push.
                    .env("ANABRANCH_RTR", "off")
                    .passes();
                let stats = outcome.stats();
                stats.check_complete();
                // What is pushed as a whole counts as direct, what other paths have a part of does not.
                let both = |of_several, of_direct| stats.total(of_several) + stats.total(of_direct);
                let pushed = both("multipath_put_bytes", "receives_put_bytes");
                let told = format!("{topology} {push} {allocation} {case}");
                assert_eq!(pushed > 0, pushes, "{told}: {outcome}");
                if pushes {
                    // The first message comes before anything is sent.
                    let received = both("receives_multipath", "receives_direct");
                    assert!(received > 30, "{told}: {outcome}");
                }
                if pushes && topology == "beluga" {
                    check_bytes_in_one_place(&outcome);
                }
                check_none_is_left(&outcome, &told);
            }
        });
    }
}

/// Of two ranks on a GPU on which processes take turns the lower makes all copies between them: what goes to the other is
/// pushed there, whatever its length.
#[test]
fn ranks_on_one_gpu_need_not_take_turns() {
    on_one_gpu("openmpi", "exchange", [("SIMCUDA_MPS", "0")], true);
    on_one_gpu("mpich", "exchange", [("SIMCUDA_MPS", "0")], true);
    on_one_gpu("openmpi", "exchange_windows", [("SIMCUDA_MPS", "0")], true);
    on_one_gpu("openmpi", "one_place", [("SIMCUDA_MPS", "0")], true);
    on_one_gpu("openmpi", "exchange", [("SIMCUDA_MPS", "1")], false);
    on_one_gpu("openmpi", "exchange", [("ANABRANCH_PUT", "0")], false);
}

fn on_one_gpu(name: &str, case: &str, [(option, value)]: [(&str, &str); 1], is_pushed: bool) {
    if on_real_gpus() && option == "SIMCUDA_MPS" && value == "1" {
        return;
    }
    on(name, |mpi| {
        for bytes in ["100003", "5000000"] {
            let outcome = job(mpi, 2, "paths")
                .args(&[case])
                .env("GPUS", "1")
                .env("BYTES", bytes)
                .env(option, value)
                .passes();
            let stats = outcome.stats();
            stats.check_complete();
            let pushed = |rank| stats.of_rank(rank, "receives_put_bytes");
            let told = format!("{case}, {bytes} bytes, {option}={value}: {outcome}");
            assert_eq!(pushed(0), 0, "{told}");
            assert_eq!(pushed(1) > 0, is_pushed, "{told}");
            if is_pushed {
                // But for messages at the beginning, which may come by value, and what a busy machine is late with.
                let received = stats.of_rank(1, "receives_direct_bytes");
                assert!(2 * pushed(1) > received, "{told}");
            }
        }
    });
}

/// What a receiver pulls itself, because its sender seems to do nothing, is never written over a message behind it that is received in
/// the same place, and its own copies, which take as long, are no reason for it.
#[test]
fn what_is_pulled_instead_of_waiting_stays_in_order() {
    on("openmpi", |mpi| {
        for (paths, push, case) in [
            ("relay", "0", "one_place"),
            ("direct,host,relay", "0", "one_place"),
            ("direct,host,relay", "4M", "exchange_windows"),
        ] {
            // A sender that is stopped for a while in the launch of each copy is late with what it brings, but where its
            // receiver is kept from its processor, too.
            let (mut retired, mut relayed) = (0, 0);
            for patience in ["0", "10", "100"].repeat(4) {
                if retired > 0 && relayed > 0 && patience == "0" {
                    break;
                }
                let outcome = on_node(mpi, "beluga", 2, &[case])
                    .env("BYTES", "8388608")
                    .env("ALLOCATION", "1048576")
                    .env("LATE_US", "5000")
                    .env("SIMCUDA_FAULT", "cuMemcpyAsync@0:12+=SIGSTOP")
                    .env("ANABRANCH_PATHS", paths)
                    .env("ANABRANCH_PUT", push)
                    .env("ANABRANCH_PATIENCE_US", patience)
                    .env("ANABRANCH_LOG", "error")
                    .passes();
                let stats = outcome.stats();
                stats.check_complete();
                retired += stats.total("paths_abandoned");
                relayed += stats.total("multipath_relay_bytes");
            }
            assert!(retired > 0, "{paths}: no sender was ever late");
            assert!(relayed > 0, "{paths}: nothing came over relays");
        }
    });
}

/// Whatever fails of a push, at either end, the receiver pulls what has not come, once nothing is written any more.
#[test]
fn a_push_that_fails_is_left() {
    on("openmpi", |mpi| {
        let faults = [
            ("exchange", "cuMemcpyAsync@0", &[3, 4, 6, 9, 14][..]),
            ("exchange", "cuMemcpyAsync@1", &[3, 5, 8]),
            ("exchange", "cuIpcOpenMemHandle@0", &[1, 2, 3]),
            ("exchange", "cuIpcGetMemHandle@1", &[1, 2]),
            ("exchange", "cuEventRecord@0", &[3, 4, 11]),
            ("exchange", "cuEventQuery@0", &[7, 30]),
            (
                "exchange_windows",
                "cuMemcpyAsync@0",
                &[20, 33, 50, 54, 58, 66, 71],
            ),
            ("exchange_windows", "cuIpcOpenMemHandle@1", &[4, 7]),
            ("exchange_windows", "cuEventRecord@1", &[40]),
        ];
        let (mut troubled, mut pushed) = (0, 0);
        for (case, function, calls) in faults {
            for call in some(calls, 2) {
                let plan = format!("{function}:{call}=CUDA_ERROR_UNKNOWN");
                let outcome = on_node(mpi, "beluga", 2, &[case])
                    .env("SIMCUDA_FAULT", &plan)
                    .env("ANABRANCH_PUT", "4M")
                    .env("ALLOCATION", "1048576")
                    .env("BYTES", "8388608")
                    .run();
                let Some(met) = troubles(&plan, &outcome) else {
                    continue;
                };
                pushed += outcome.stats().total("multipath_put_bytes");
                troubled += met;
            }
        }
        assert!(troubled > 5 && pushed > 0, "{troubled} faults were met");
    });
}

/// A rank that cannot map its receiver's memory is asked once, and what it should have pushed is pulled.
#[test]
fn a_rank_that_cannot_push_is_not_asked_again() {
    on("mpich", |mpi| {
        let outcome = on_node(mpi, "beluga", 2, &["exchange"])
            .env(
                "SIMCUDA_FAULT",
                "cuIpcOpenMemHandle@0:1+=CUDA_ERROR_UNKNOWN",
            )
            .env("ANABRANCH_PUT", "4M")
            .env("ALLOCATION", "1048576")
            .env("BYTES", "8388608")
            .passes();
        let of = |rank, name| outcome.stats().of_rank(rank, name);
        assert_eq!(of(1, "multipath_put_bytes"), 0, "{outcome}");
        assert!(of(1, "multipath_direct_bytes") > 0, "{outcome}");
        let left = of(1, "paths_abandoned") - of(1, "senders_late");
        assert_eq!(left, 1, "{outcome}");
        assert_eq!(outcome.stats().total("errors"), 0, "{outcome}");
    });
}

/// A single message of this length goes directly, a window of them over host memory, too. The first message of a window is
/// planned like the rest, also where all of the window before went directly.
#[test]
fn windows_are_planned_as_deep_as_the_one_before() {
    on("openmpi", |mpi| {
        let job = on_node(mpi, "hgx-h200", 2, &["one_place"]).env("BYTES", "16777216");
        let outcome = job.passes();
        check_bytes(&outcome);
        assert!(
            outcome.stats().total("receives_multipath") >= 5,
            "{outcome}"
        );
    });
}

/// Of deep windows of messages that go directly most go without a plan; but not of those that do so only as links are not known yet,
/// or for want of staging.
#[test]
fn deep_windows_are_split_as_soon_as_they_can_be() {
    needs_simulator("SIMCUDA_TOPOLOGY=beluga");
    on("openmpi", |mpi| {
        let outcome = job(mpi, 2, "paths")
            .args(&["deep_windows"])
            .env("SIMCUDA_TOPOLOGY", "beluga")
            .env("BYTES", "2097152")
            .passes();
        check_bytes_in_one_place(&outcome);
        let split = outcome.stats().total("receives_multipath");
        assert!(split >= 28 * 16, "{split}\n{outcome}");
    });
}

/// A message that cannot be exported, in the place of others that take several paths: it is written in its turn.
#[test]
fn memory_from_a_pool_in_the_place_of_others() {
    for name in ["openmpi", "mpich"] {
        on(name, |mpi| {
            for bytes in ["70000", "1048576", "4194304", "8388608"] {
                let outcome = on_any_node(mpi, "beluga", bytes, &["pool_in_between"]).passes();
                outcome.stats().check_complete();
                // Nine rounds of three and one, and two before.
                assert!(outcome.stats().fallback("not_exportable") >= 7, "{outcome}");
                if bytes == "8388608" {
                    check_bytes(&outcome);
                    check_host_path(&outcome);
                    assert!(
                        outcome.stats().total("receives_multipath") >= 6,
                        "{outcome}"
                    );
                }
            }
        });
    }
}

/// The same from host memory: by value at first, then through its sender's staging.
#[test]
fn host_memory_in_the_place_of_others() {
    for name in ["openmpi", "mpich"] {
        on(name, |mpi| {
            for bytes in ["20000", "70000", "1048576", "4194304"] {
                let outcome = on_any_node(mpi, "beluga", bytes, &["host_in_between"]).passes();
                let stats = outcome.stats();
                stats.check_complete();
                assert!(stats.total("sends_host_rts") >= 9, "{outcome}");
                assert!(stats.total("receives_direct") >= 15, "{outcome}");
            }
        });
    }
}

/// Memory for staging cannot be had, or not be pinned: messages take the paths that are left.
#[test]
fn without_memory_for_staging() {
    on("openmpi", |mpi| {
        let under = |plan: &str| {
            let outcome = on_node(mpi, "beluga", 2, &["pressure"])
                .env("PLAN", plan)
                .env("BYTES", "67108864")
                .passes();
            outcome.stats().check_complete();
            let lines = outcome.finished.stderr.lines();
            let lines = lines.filter(|line| line.contains("no staging there"));
            let lines: Vec<String> = lines.map(str::to_owned).collect();
            let [relay, host, refused] = [
                "multipath_relay_bytes",
                "multipath_host_bytes",
                "staging_refused",
            ]
            .map(|name| outcome.stats().total(name));
            (relay, host, refused, lines, outcome)
        };
        // None on either of the two GPUs that nobody uses: told once for each by the rank that is asked for it, and by the other
        // where the program runs for so long that it is asked instead.
        let (relay, host, refused, lines, outcome) = under("cuMemAlloc:1+=2");
        assert!(relay == 0 && host > 0 && refused >= 2, "{outcome}");
        let once: BTreeSet<&String> = lines.iter().collect();
        assert_eq!(once.len(), lines.len(), "{outcome}");
        let gpus = ["GPU 2:", "GPU 3:"];
        let is_told = |gpu: &&str| lines.iter().any(|line| line.contains(gpu));
        let is_of_these = |line: &String| gpus.iter().any(|gpu| line.contains(gpu));
        assert!(gpus.iter().all(is_told), "{outcome}");
        assert!(lines.iter().all(is_of_these), "{outcome}");
        // One attempt fails, in each message anew: the other GPU is used.
        let (relay, _, refused, lines, outcome) = under("cuMemAlloc:1=2");
        assert!(relay > 0 && refused >= 1, "{outcome}");
        assert!(!lines.is_empty(), "{outcome}");
        // What cannot be pinned is used all the same.
        let (relay, host, refused, _, outcome) = under("cuMemHostRegister:1+=2");
        assert!(relay > 0 && host > 0 && refused == 0, "{outcome}");
    });
}

/// Every rank sends to every other, with staging for a chunk or two: pieces are held by copies only that wait for nobody.
/// Nothing helps out, as no rank takes back what another has not begun with: what waits for ever is seen.
#[test]
fn everyone_through_minimal_staging() {
    const FOR_EVER: &str = "2000000000";
    let paths = [
        ("openmpi", "host", &["multipath_host_bytes"][..]),
        ("mpich", "relay", &["multipath_relay_bytes"]),
        (
            "openmpi",
            "relay,host",
            &["multipath_host_bytes", "multipath_relay_bytes"],
        ),
    ];
    for (name, paths, counters) in some(&paths, 1) {
        on(name, |mpi| {
            let outcome = on_node(mpi, "beluga", 4, &["everyone"])
                .env("ANABRANCH_PATHS", paths)
                .env("ANABRANCH_RELAY_STAGING", "1M")
                .env("ANABRANCH_MULTIPATH_STAGING", "512K")
                .env("ANABRANCH_PATIENCE_US", FOR_EVER)
                .env("BYTES", "8388608")
                .passes();
            let stats = outcome.stats();
            stats.check_complete();
            for counter in counters {
                assert!(stats.total(counter) > 0, "{paths}, {counter}:\n{outcome}");
            }
            for counter in ["chunks_claimed_back", "paths_abandoned"] {
                assert_eq!(stats.total(counter), 0, "{paths}, {counter}:\n{outcome}");
            }
        });
    }
    on("mpich", |mpi| {
        let outcome = on_node(mpi, "beluga", 4, &["everyone"]).passes();
        outcome.stats().check_complete();
    });
}

/// Random traffic among four ranks, near half of it long: every way of completing messages over several paths beside every
/// way of posting them.
#[test]
fn random_traffic() {
    const STAGING: &str = "ANABRANCH_RELAY_STAGING=1M ANABRANCH_MULTIPATH_STAGING=512K";
    const TURNS: [(&str, &str, &str); 4] = [
        ("openmpi", "beluga", "ANABRANCH_PUT=1M"),
        ("mpich", "narval", "ANABRANCH_OWNER=one"),
        ("openmpi", "dgx1-v100", "ANABRANCH_OWNER=one"),
        ("mpich", "beluga", STAGING),
    ];
    if on_real_gpus() {
        needs_simulator("nodes with links of their own between GPUs");
    }
    let turns = some(&[0, 1, 2, 3], 2).into_iter();
    for (turn, (name, topology, settings)) in turns.map(|turn| (turn, TURNS[turn])) {
        on(name, |mpi| {
            let mut job = on_node_running(mpi, topology, 4, "stress")
                .args(&[&(2000 + 10 * turn).to_string(), "2"])
                .env("LONG", "40");
            for (option, value) in settings.split(' ').filter_map(|it| it.split_once('=')) {
                job = job.env(option, value);
            }
            let outcome = job.passes();
            let stats = outcome.stats();
            stats.check_complete();
            for counter in ["multipath_direct_bytes", "multipath_relay_bytes"] {
                assert!(
                    stats.total(counter) > 0,
                    "{topology}, {counter}:\n{outcome}"
                );
            }
            let is_driven = settings.contains("OWNER=one");
            assert_eq!(launches(&outcome) != [0; 3], is_driven, "{outcome}");
        });
    }
}

/// Driver calls of a plan fail one after the other, at either end.
#[test]
fn a_path_that_fails_is_left() {
    on("openmpi", |mpi| {
        // (function, which calls, whether a path is given up for good by it)
        let faults = [
            ("cuMemcpyAsync@0", &[3, 9, 17][..]),
            ("cuMemcpyAsync@1", &[3, 9, 17]),
            ("cuIpcOpenMemHandle@1", &[1, 2, 3]),
            ("cuIpcOpenMemHandle@0", &[1]),
            ("cuEventRecord@0", &[4, 11]),
            ("cuEventQuery@1", &[7]),
            ("cuMemAlloc@0", &[20]),
        ];
        let mut troubled = 0;
        for (function, calls) in faults {
            for call in calls {
                let plan = format!("{function}:{call}=CUDA_ERROR_UNKNOWN");
                let outcome = on_node(mpi, "beluga", 2, &["window"])
                    .env("SIMCUDA_FAULT", &plan)
                    .env("BYTES", "16777216")
                    .run();
                troubled += troubles(&plan, &outcome).unwrap_or(0);
            }
        }
        assert!(troubled > 5, "{troubled} faults were met");
    });
}

/// What a sender has launched cannot be followed any more: each of its tracks is left, once, with the pieces that it fills.
#[test]
fn tracks_whose_copies_are_lost_are_left_once() {
    on("openmpi", |mpi| {
        let broken = ["cuEventQuery", "cuStreamSynchronize"]
            .map(|call| format!("{call}@0:1+=CUDA_ERROR_UNKNOWN"))
            .join(",");
        let outcome = on_node(mpi, "beluga", 2, &["window"])
            .env("SIMCUDA_FAULT", &broken)
            .passes();
        let stats = outcome.stats();
        let [messages, left] =
            ["receives_multipath", "paths_abandoned"].map(|name| stats.total(name));
        // At most two relays and the host, at both ends.
        assert!((1..=6 * messages).contains(&left), "{outcome}");
    });
}

/// Bandwidth of the bench at one size, MB/s of simulated time: the best of some runs, as a process that is kept from its
/// core reacts late.
fn bandwidth(topology: &str, paths: &str, size: &str, window: &str) -> f64 {
    let runs = (0..2).map(|_| bandwidth_once(topology, paths, size, window));
    runs.fold(0.0, f64::max)
}

/// The bench between two ranks of a simulated node.
fn bench(topology: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(&built().command);
    command
        .args([
            "run", "--sim", topology, "--mpi", "openmpi", "-np", "2", "--",
        ])
        .arg(&built().command)
        .arg("bench")
        .args(arguments);
    command
}

/// What ranks say of their counters when they have ended, as they should.
fn counters_of(mut command: Command) -> String {
    let output = command
        .env("ANABRANCH_STATS", "1")
        .output()
        .expect("the command runs");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    text
}

/// A counter of these, with one value; 0 where it is not there.
fn counter(text: &str, name: &str) -> u64 {
    let line = text.lines().find(|line| line.contains(name));
    let value = line.and_then(|line| line.split_whitespace().last()?.parse().ok());
    value.unwrap_or(0)
}

/// Short messages of a window in one place, both ways: some are read from device memory, some from where their sender has put
/// them in host memory, and no two of the two kinds are written at once.
#[test]
fn short_windows_in_one_place_both_ways() {
    on("openmpi", |_| {
        let arguments = [
            "bibw", "D", "D", "-m", "8", "-W", "64", "-i", "100", "-x", "0",
        ];
        // Again, where receivers were quick enough to read all of it from device memory, or none.
        let mut seen = Vec::new();
        let are_both = (0..8).any(|_| {
            let told = counters_of(bench("hgx-h200", &arguments));
            let is_there = |kind: &str| {
                let mut lines = told.lines().map(str::trim_start);
                lines.any(|line| {
                    line.strip_prefix(kind)
                        .is_some_and(|rest| rest.starts_with(' '))
                })
            };
            let are_both = is_there("direct") && is_there("eager");
            seen.push(told);
            are_both
        });
        assert!(are_both, "{seen:#?}");
    });
}

fn bandwidth_once(topology: &str, paths: &str, size: &str, window: &str) -> f64 {
    let arguments = [
        "bw", "D", "D", "-m", size, "-W", window, "-i", "4", "-x", "3",
    ];
    let output = bench(topology, &arguments)
        .env("ANABRANCH_PATHS", paths)
        .env("ANABRANCH_MODEL", model(topology))
        // Time waits for processes that are kept from their cores.
        .env("SIMCUDA_QUIET_US", "30000")
        .env("SIMCUDA_LOOKS", "32")
        .output()
        .expect("the command runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let mb_s = mb_s(&text);
    let file = repository_root().join(format!("simcuda/topologies/{topology}.toml"));
    let rates = Rates::read(&file).expect("a topology");
    let max_flow = rates.max_flow(&[(0, 1)], Over::parse(paths).expect("paths"));
    assert!(
        mb_s * 1e-3 <= max_flow,
        "{topology}, {paths}, {size}: {mb_s} MB/s, above the max-flow of {max_flow} GB/s"
    );
    mb_s
}

/// The figure of the last row of a bench.
fn mb_s(text: &str) -> f64 {
    let row = text
        .lines()
        .rfind(|line| line.starts_with(|c: char| c.is_ascii_digit()));
    let figure = row.and_then(|row| row.split_whitespace().nth(1)?.parse().ok());
    figure.unwrap_or_else(|| panic!("{text}"))
}

/// Host memory must bring a single message more than an offer costs; one that it does not is left to one direct copy. That of both is
/// written before it is matched.
#[test]
fn single_messages_are_split_where_that_gains_enough() {
    on("openmpi", |_| {
        let counted = |size: &str, paths: &str| {
            let arguments = ["bibw", "D", "D", "-m", size, "-W", "1", "-i", "12"];
            let mut command = bench("hgx-h200", &arguments);
            command.env("ANABRANCH_PATHS", paths);
            command.env("ANABRANCH_MODEL", model("hgx-h200"));
            let text = counters_of(command);
            let of = |name| counter(&text, name);
            let [split, early] = ["multipath_host_bytes", "written before matched"].map(of);
            (split > 0, early > 8, text)
        };
        for (size, paths, is_split, is_early) in [
            ("32M", "direct,host", false, true),
            ("96M", "direct,host", true, true),
            ("96M", "direct", false, true),
        ] {
            let (split, early, text) = counted(size, paths);
            assert_eq!(
                (split, early),
                (is_split, is_early),
                "{size} {paths}:\n{text}"
            );
        }
    });
}

/// Without a measurement of the node it is not known what the host's memory carries for two messages at once. They find out:
/// this node's carries 100 GB/s, one GPU's link 55. A message alone has nothing to find out.
#[test]
fn what_the_host_carries_is_found_out() {
    on("openmpi", |_| {
        let counted = |kind: &str| -> String {
            let mut command = bench("hgx-h200", &[kind, "-m", "256M", "-W", "1", "-i", "30"]);
            command
                .env("HOME", "/nonexistent")
                .env_remove("XDG_CACHE_HOME")
                // What ranks measure of a node that waits for a processor is not what it is.
                .env("SIMCUDA_QUIET_US", "30000")
                .env("SIMCUDA_LOOKS", "32");
            counters_of(command)
        };
        // Again, where they were kept from their cores all the same.
        let mut seen = Vec::new();
        let is_found = (0..3).any(|_| {
            let (alone, both) = (counted("bw"), counted("bibw"));
            assert_eq!(counter(&alone, "host_share_raised"), 0, "{alone}");
            let is_found = counter(&alone, "multipath_host_bytes") > 0
                && counter(&both, "host_share_raised") > 2;
            seen.push((alone, both));
            is_found
        });
        assert!(is_found, "{seen:#?}");
    });
}

/// The host's memory carries less than was measured, as it may at times: with what the measurement says of it messages would be slower
/// than by one path (64 MiB in windows of 4 0.93 of it, single ones of 256 MiB 0.92).
#[test]
fn host_memory_that_is_slower_than_it_was_is_used_less() {
    on("openmpi", |_| {
        let measured = model("hgx-h200");
        let text = std::fs::read_to_string(&measured).expect("the measurement");
        let mut file: serde_json::Value = serde_json::from_str(&text).expect("the measurement");
        let hops = file["model"]["hops"].as_array_mut().expect("hops");
        for hop in hops.iter_mut() {
            let is_host = |end: &str| hop[end].as_str() == Some("host");
            if !is_host("from") && !is_host("to") {
                continue;
            }
            for side in ["push", "pull"] {
                if let Some(gb_s) = hop[side]["gb_s"].as_f64() {
                    hop[side]["gb_s"] = (1.6 * gb_s).into();
                }
            }
        }
        let faster = scratch_folder("host-was-faster").join("model.json");
        std::fs::write(&faster, file.to_string()).expect("written");
        let messages = [("256M", "1", "60", 1.01), ("64M", "4", "30", 1.01)];
        for (size, window, rounds, least) in some(&messages, 1) {
            let run = |paths: &str| {
                let arguments = ["bw", "D", "D", "-m", size, "-W", window, "-i", rounds];
                let mut command = bench("hgx-h200", &arguments);
                command
                    .env("ANABRANCH_STATS", "1")
                    .env("ANABRANCH_PATHS", paths)
                    .env("ANABRANCH_MODEL", &faster)
                    .env("SIMCUDA_QUIET_US", "30000")
                    .env("SIMCUDA_LOOKS", "32");
                let output = command.output().expect("the command runs");
                let counters = String::from_utf8_lossy(&output.stderr).into_owned();
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                assert!(output.status.success(), "{text}\n{counters}");
                (mb_s(&text), counters)
            };
            // Again, where all runs of one side were kept from their cores.
            let mut seen = Vec::new();
            let is_met = (0..3).any(|_| {
                let ((direct, _), (all, counters)) = (run("direct"), run("direct,host"));
                let is_lowered = counter(&counters, "host_rate_lowered") >= 2;
                let is_split = counter(&counters, "multipath_host_bytes") > 0;
                seen.push((all / direct, counters));
                is_split && is_lowered && all >= least * direct
            });
            assert!(is_met, "{size}, windows of {window}: {seen:#?}");
        }
    });
}

/// Simulated time only. The bars are below what was seen, for a run whose processes were kept from their cores.
#[test]
fn several_paths_are_faster_than_one() {
    on("openmpi", |_| {
        let nodes = [
            ("beluga", "direct,relay", "256M", 2.5),
            ("beluga", "direct,relay,host", "256M", 2.65),
            ("narval", "direct,relay,host", "256M", 2.5),
            ("hgx-h200", "direct,host", "512M", 1.03),
        ];
        for (topology, paths, size, least) in some(&nodes, 2) {
            // Again, where all runs of one side were kept from their cores.
            let mut seen: Vec<f64> = Vec::new();
            while seen.len() < 3 && seen.last().is_none_or(|ratio| *ratio < least) {
                let direct = bandwidth(topology, "direct", size, "1");
                seen.push(bandwidth(topology, paths, size, "1") / direct);
            }
            let is_met = seen.iter().any(|ratio| *ratio >= least);
            assert!(is_met, "{topology}, {paths}, {size}: {seen:.3?}");
        }
    });
}
