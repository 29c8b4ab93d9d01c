//! Long messages over several paths, every copy of which the receiver makes (`ANABRANCH_OWNER=one`).

use crate::support::{job, model, on};
use anabranch_tests::{Job, Outcome};
use std::path::Path;
use xtask::mpi::Mpi;

fn one_owner(mpi: &Mpi, node: &str, ranks: usize, case: &str, model: &Path) -> Job {
    job(mpi, ranks, "one_owner")
        .args(&[case])
        .env("SIMCUDA_TOPOLOGY", node)
        .env("ANABRANCH_MODEL", &model.display().to_string())
        .env("ANABRANCH_OWNER", "one")
}

/// All bytes of messages over several paths are counted on one of them.
#[track_caller]
fn bytes_by_path(outcome: &Outcome) -> [u64; 3] {
    let stats = outcome.stats();
    stats.check_complete();
    let by_path = ["direct", "relay", "host"];
    let bytes = by_path.map(|path| stats.total(&format!("multipath_{path}_bytes")));
    assert_eq!(
        bytes.iter().sum::<u64>(),
        stats.total("receives_multipath_bytes"),
        "{outcome}"
    );
    bytes
}

/// Messages driven by streams, by batches and by graphs.
pub fn launches(outcome: &Outcome) -> [u64; 3] {
    let stats = outcome.stats();
    ["streams", "batch", "graph"].map(|how| stats.total(&format!("one_owner_by_{how}")))
}

/// Two ranks on a node of four GPUs: the messages lead over the two GPUs that no rank has touched.
#[test]
fn two_ranks_relay_over_gpus_that_nobody_has_touched() {
    on("openmpi", |mpi| {
        for node in ["beluga", "narval"] {
            let model = model(node);
            for (at, how) in ["streams", "batch", "graph"].into_iter().enumerate() {
                let outcome = one_owner(mpi, node, 2, "both_ways", &model)
                    .env("ANABRANCH_EXECUTOR", how)
                    .passes();
                let [direct, relay, _] = bytes_by_path(&outcome);
                assert!(direct > 0 && relay > direct / 2, "{node}, {how}: {outcome}");
                let stats = outcome.stats();
                // Of thirty; the first ones go by value, until both ranks have used a device and said so.
                let descriptors = stats.total("sends_rts");
                assert!(descriptors >= 20, "{node}, {how}: {outcome}");
                assert_eq!(
                    stats.total("receives_multipath"),
                    descriptors,
                    "{node}, {how}: {outcome}"
                );
                assert_eq!(
                    launches(&outcome).iter().sum::<u64>(),
                    descriptors,
                    "{outcome}"
                );
                assert!(launches(&outcome)[at] > 0, "{node}, {how}: {outcome}");
                assert_eq!(stats.total("one_owner_failed"), 0, "{outcome}");
                assert_eq!(stats.total("graphs_built") > 0, how == "graph", "{outcome}");
            }
        }
    });
}

/// Options by their former names work, and one rank says so, once.
#[test]
fn options_by_their_former_names() {
    on("openmpi", |mpi| {
        let model = model("beluga");
        let outcome = job(mpi, 4, "one_owner")
            .args(&["both_ways"])
            .env("SIMCUDA_TOPOLOGY", "beluga")
            .env("ANABRANCH_MODEL", &model.display().to_string())
            .env("ANABRANCH_ASSIGN", "one")
            .env("ANABRANCH_INVITE", "off")
            .passes();
        let stderr = &outcome.finished.stderr;
        assert_eq!(stderr.matches("is now").count(), 2, "{outcome}");
        assert_eq!(
            stderr
                .lines()
                .filter(|line| line.contains("is now"))
                .count(),
            1,
            "{outcome}"
        );
        let stats = outcome.stats();
        assert!(launches(&outcome).iter().sum::<u64>() > 0, "{outcome}");
        assert_eq!(stats.total("rtrs_sent"), 0, "{outcome}");
        // Counters have both names.
        assert_eq!(
            stats.total("sends_descriptor"),
            stats.total("sends_rts"),
            "{outcome}"
        );
    });
}

#[test]
fn every_mpi_library_and_four_ranks_at_once() {
    for name in ["mpich", "openmpi5", "mpich5", "mpich5-abi"] {
        on(name, |mpi| {
            let model = model("beluga");
            let outcome = one_owner(mpi, "beluga", 4, "both_ways", &model).passes();
            bytes_by_path(&outcome);
            assert!(outcome.stats().total("receives_multipath") > 0, "{outcome}");
        });
    }
}

/// GPUs 0 and 5 of the cube mesh have no link: everything leads over others.
#[test]
fn a_pair_without_a_link_goes_over_other_gpus() {
    on("openmpi", |mpi| {
        let model = model("dgx1-v100");
        let outcome = one_owner(mpi, "dgx1-v100", 2, "both_ways", &model)
            .env("CUDA_VISIBLE_DEVICES", "0,5,1,2,3,4,6,7")
            .passes();
        let [direct, relay, host] = bytes_by_path(&outcome);
        assert!(relay > 4 * (direct + host), "{outcome}");
    });
}

/// A graph is built once, launched again as it is, and changed in place for another buffer.
#[test]
fn graphs_are_built_once_and_changed_in_place() {
    on("openmpi", |mpi| {
        let model = model("beluga");
        let outcome = one_owner(mpi, "beluga", 2, "again", &model)
            .env("ANABRANCH_EXECUTOR", "graph")
            .passes();
        bytes_by_path(&outcome);
        let stats = outcome.stats();
        // Twelve times one buffer, then the other and it in turn, eight times.
        let built = stats.total("graphs_built");
        let kept = ["graphs_relaunched", "graphs_updated"].map(|name| stats.total(name));
        assert_eq!((built, kept), (1, [12, 7]), "{outcome}");
        assert_eq!(launches(&outcome), [0, 0, 20], "{outcome}");
    });
}

/// Left to itself, a rank tries all ways but those that would lose if they cost nothing, and settles.
#[test]
fn the_executor_is_chosen_after_a_trial_of_each() {
    on("openmpi", |mpi| {
        let model = model("beluga");
        let outcome = one_owner(mpi, "beluga", 2, "again", &model).passes();
        bytes_by_path(&outcome);
        let launches = launches(&outcome);
        assert_eq!(launches.iter().sum::<u64>(), 20, "{outcome}");
        let [streams, batch, graph] = launches;
        assert!(streams >= 2 && graph >= 2, "{outcome}");
        assert!(batch == 0 || batch >= 2, "{outcome}");
        assert!(launches.iter().any(|count| *count >= 14), "{outcome}");
    });
}

/// Where one path is wanted, nothing is driven: the other tests count what they should.
#[test]
fn with_one_path_there_is_no_such_plan() {
    on("openmpi", |mpi| {
        let model = model("beluga");
        let outcome = one_owner(mpi, "beluga", 2, "again", &model)
            .env("ANABRANCH_PATHS", "direct")
            .passes();
        assert_eq!(launches(&outcome), [0, 0, 0], "{outcome}");
        assert_eq!(outcome.stats().total("receives_multipath"), 0, "{outcome}");
    });
}

/// Windows of messages that are received in one place.
fn in_one_place(mpi: &Mpi, model: &Path, bytes: &str) -> Job {
    job(mpi, 2, "paths")
        .args(&["one_place"])
        .env("SIMCUDA_TOPOLOGY", "beluga")
        .env("ANABRANCH_MODEL", &model.display().to_string())
        .env("ANABRANCH_OWNER", "one")
        .env("BYTES", bytes)
}

/// Messages of a window that are received in one place, as bandwidth tests do: no two copies to one byte are unordered, whatever
/// executes them.
#[test]
fn windows_in_one_place() {
    on("openmpi", |mpi| {
        let model = model("beluga");
        for (executor, bytes) in [
            ("auto", "33554432"),
            ("streams", "8388608"),
            ("batch", "8388608"),
            ("graph", "8388608"),
        ] {
            let outcome = in_one_place(mpi, &model, bytes)
                .env("ANABRANCH_EXECUTOR", executor)
                .passes();
            let driven: u64 = launches(&outcome).iter().sum();
            assert_eq!(driven, 15, "{executor} {bytes}: {outcome}");
            let behind = outcome.stats().total("one_owner_behind");
            assert!(
                behind > 0,
                "{executor} {bytes}: none waits for another in the driver: {outcome}"
            );
            let [_, relay, _] = bytes_by_path(&outcome);
            assert!(relay > 0, "{executor} {bytes}: {outcome}");
        }
    });
}

/// One of a window in one place that fails is not brought again over those behind it, which may be there already.
#[test]
fn one_that_fails_in_a_window_in_one_place() {
    on("openmpi", |mpi| {
        let model = model("beluga");
        let mut overtaken = 0;
        for call in [12, 17, 24, 31] {
            let fault = format!("cuMemcpyAsync@1:{call}=CUDA_ERROR_UNKNOWN");
            let outcome = in_one_place(mpi, &model, "8388608")
                .env("SIMCUDA_FAULT", &fault)
                .run();
            outcome.check_passed();
            let stats = outcome.stats();
            stats.check_complete();
            assert_eq!(stats.total("errors"), 0, "{outcome}");
            assert_eq!(stats.total("one_owner_failed"), 1, "{outcome}");
            overtaken += stats.total("multipath_overtaken_bytes");
        }
        assert!(overtaken > 0, "none was followed by another");
    });
}

/// A driver call that fails, wherever it is: the bytes are right, and it is told and counted.
#[test]
fn a_call_that_fails_costs_a_detour_and_no_byte() {
    on("openmpi", |mpi| {
        let model = model("beluga");
        let cases = [
            (
                "streams",
                "cuDevicePrimaryCtxRetain@1:4+=CUDA_ERROR_OUT_OF_MEMORY",
            ),
            (
                "streams",
                "cuCtxEnablePeerAccess@1:2=CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
            ),
            ("streams", "cuMemAlloc@1:3=CUDA_ERROR_OUT_OF_MEMORY"),
            ("streams", "cuStreamWaitEvent@1:5=CUDA_ERROR_UNKNOWN"),
            ("streams", "cuMemcpyAsync@1:40=CUDA_ERROR_UNKNOWN"),
            (
                "graph",
                "cuGraphInstantiateWithFlags@1:1=CUDA_ERROR_OUT_OF_MEMORY",
            ),
            ("graph", "cuGraphLaunch@1:2=CUDA_ERROR_UNKNOWN"),
            (
                "graph",
                "cuGraphExecMemcpyNodeSetParams@1:3=CUDA_ERROR_INVALID_VALUE",
            ),
        ];
        for (how, fault) in cases {
            let outcome = one_owner(mpi, "beluga", 2, "again", &model)
                .env("ANABRANCH_EXECUTOR", how)
                .env("SIMCUDA_FAULT", fault)
                .passes();
            let stats = outcome.stats();
            let noted = ["one_owner_failed", "graphs_failed"].map(|name| stats.total(name));
            let rebuilt = stats.total("graphs_built") > 1;
            assert!(
                noted.iter().sum::<u64>() > 0 || rebuilt,
                "{how}, {fault}: nothing failed: {outcome}"
            );
            let failures = stats.total("one_owner_failed");
            let expected = if how == "graph" { 0 } else { 1 };
            // Of each of two relays one is the last.
            assert!(failures >= expected && failures <= 4, "{fault}: {outcome}");
            assert!(
                stats.total("receives_multipath") >= 16 || fault.contains('+'),
                "{fault}: {outcome}"
            );
        }
    });
}

/// Twenty messages of which some fail, by a fault on the rank that drives them.
fn with_lasting_fault(mpi: &Mpi, model: &Path, paths: &str, fault: &str) -> Outcome {
    let outcome = one_owner(mpi, "beluga", 2, "again", model)
        .env("ANABRANCH_EXECUTOR", "streams")
        .env("ANABRANCH_PATHS", paths)
        .env("SIMCUDA_FAULT", fault)
        .passes();
    outcome.stats().check_complete();
    outcome
}

/// How often something is said.
fn times(outcome: &Outcome, what: &str) -> usize {
    let lines = outcome.finished.stderr.lines();
    let own = lines.filter(|line| line.starts_with("anabranch["));
    own.filter(|line| line.contains(what)).count()
}

/// A GPU on which staging cannot be had, or from which copies cannot be made, is left after two messages, which is said once;
/// the others go over what is left.
#[test]
fn a_relay_that_fails_twice_is_left() {
    on("openmpi", |mpi| {
        let model = model("beluga");
        let outcome = one_owner(mpi, "beluga", 2, "again", &model)
            .env("ANABRANCH_PATHS", "direct,relay")
            .env("ANABRANCH_RELAYS", "1")
            .passes();
        let [direct_with_one, over_one, _] = bytes_by_path(&outcome);
        let faults = [
            "cuMemAlloc@1#2:1+=CUDA_ERROR_OUT_OF_MEMORY",
            "cuMemcpyAsync@1#2:1+=CUDA_ERROR_UNKNOWN",
        ];
        for fault in faults {
            let outcome = with_lasting_fault(mpi, &model, "direct,relay", fault);
            let stats = outcome.stats();
            let counted = ["one_owner_failed", "places_retired"].map(|name| stats.total(name));
            assert_eq!(counted, [2, 1], "{fault}: {outcome}");
            // As with one relay from the first of the twenty on.
            let [direct, relay, _] = bytes_by_path(&outcome);
            let expected = over_one * direct / direct_with_one;
            assert!(
                relay * 100 > expected * 85 && relay * 100 < expected * 115,
                "{relay} bytes of {expected} over relays: {outcome}"
            );
            let left = "message from rank 0, multipath path: over GPU 2: cuMem";
            let last = "and none is led over GPU 2 any more";
            let said = [left, last, "anabranch["].map(|what| times(&outcome, what));
            assert_eq!(said, [2, 1, 2], "{outcome}");
        }
    });
}

/// The same of host memory: then there is one path.
#[test]
fn host_memory_that_cannot_be_pinned_twice_is_left() {
    on("mpich", |mpi| {
        let model = model("beluga");
        let fault = "cuMemHostRegister@1:1+=CUDA_ERROR_OUT_OF_MEMORY";
        let outcome = with_lasting_fault(mpi, &model, "direct,host", fault);
        let stats = outcome.stats();
        let counted = ["one_owner_failed", "places_retired"].map(|name| stats.total(name));
        assert_eq!(counted, [2, 1], "{outcome}");
        // The first two may come through the sender's.
        assert!(stats.total("receives_direct") >= 18, "{outcome}");
        let last = "and none is led over host memory any more";
        assert_eq!(times(&outcome, last), 1, "{outcome}");
    });
}

/// What no relay has to do with ends driving at the third message, which is said once; the messages go on by both ranks.
#[test]
fn a_rank_that_cannot_drive_says_so_once() {
    on("mpich", |mpi| {
        let model = model("beluga");
        // Those of the library's own lanes are made before.
        let fault = "cuStreamCreate@1#1:15+=CUDA_ERROR_OUT_OF_MEMORY";
        let outcome = with_lasting_fault(mpi, &model, "direct,relay", fault);
        let stats = outcome.stats();
        let counted = ["one_owner_failed", "places_retired"].map(|name| stats.total(name));
        assert_eq!(counted, [3, 0], "{outcome}");
        assert_eq!(launches(&outcome), [0, 0, 0], "{outcome}");
        let last = "and this rank drives no message alone any more";
        assert_eq!(times(&outcome, last), 1, "{outcome}");
        // By both ends' engines they take several paths all the same.
        assert!(stats.total("receives_multipath") > 10, "{outcome}");
    });
}

/// What each option of plans does, by what the library has counted.
#[test]
fn options_of_plans_do_what_they_say() {
    on("openmpi", |mpi| {
        let model = model("beluga");
        let counted = |options: &[(&str, &str)]| {
            let job = one_owner(mpi, "beluga", 2, "again", &model);
            let job = options
                .iter()
                .fold(job, |job, (name, value)| job.env(name, value));
            let outcome = job.passes();
            let bytes = bytes_by_path(&outcome);
            assert!(!outcome.finished.stderr.contains("warn"), "{outcome}");
            (bytes, launches(&outcome), outcome)
        };
        let ([_, relayed, _], _, usual) = counted(&[("ANABRANCH_PATHS", "direct,relay")]);
        let options = [
            ("ANABRANCH_PATHS", "direct,relay"),
            ("ANABRANCH_RELAYS", "1"),
        ];
        let ([direct, over_one, _], ..) = counted(&options);
        // Two relays carry two thirds of a message, one half of it.
        assert!(
            over_one > 0 && over_one < relayed && over_one <= direct * 11 / 10,
            "{usual}"
        );
        // As the simulated driver has counted them.
        let copies = |outcome: &Outcome| -> u64 {
            let count =
                |line: &serde_json::Value| line["copies"]["between_devices"]["count"].as_u64();
            outcome.report.exits().filter_map(count).sum()
        };
        let options = [
            ("ANABRANCH_PATHS", "direct,relay"),
            ("ANABRANCH_CHUNKS", "1"),
        ];
        let (_, _, whole) = counted(&options);
        assert!(
            copies(&whole) > 20 && 2 * copies(&whole) < copies(&usual),
            "{whole}"
        );
        let ([_, over_none, _], _, outcome) = counted(&[("ANABRANCH_RELAYS", "0")]);
        assert_eq!(over_none, 0, "{outcome}");
        let (_, [streams, batch, graph], outcome) = counted(&[("ANABRANCH_GRAPHS", "0")]);
        assert!(graph == 0 && streams + batch == 20, "{outcome}");
        assert_eq!(outcome.stats().total("graphs_built"), 0, "{outcome}");
    });
}
