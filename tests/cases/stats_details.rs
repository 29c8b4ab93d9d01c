//! Statistics by call, size class and pair of ranks: as the programs know them, and as the counters add up.

use crate::support::{job, on, on_every_mpi};
use crate::tracing::RECEIVED;
use anabranch_tests::{scratch_folder, Outcome};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use xtask::mpi::Mpi;

on_every_mpi!(counted_as_sent, sums_are_the_counters);

/// Messages and bytes.
type Sum = (u64, u64);

/// Runs a program, and reads what its ranks have counted.
pub fn counted(
    mpi: &Mpi,
    ranks: usize,
    (program, cases): (&str, &[&str]),
    file: &Path,
) -> (Outcome, Value) {
    let outcome = job(mpi, ranks, program)
        .args(cases)
        .env("ANABRANCH_STATS", &file.display().to_string())
        // The clocks of a simulated node stand still while a rank waits.
        .env("ANABRANCH_TRACE_BY_MACHINE", "on")
        .passes();
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{error}\n{outcome}"));
    let value = serde_json::from_str(&text).expect("JSON");
    (outcome, value)
}

pub fn ranks(stats: &Value) -> &Vec<Value> {
    stats["ranks"].as_array().expect("ranks")
}

pub fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("{value} is no number"))
}

fn sum_of(value: &Value) -> Sum {
    (number(&value["messages"]), number(&value["bytes"]))
}

fn add(sums: impl Iterator<Item = Sum>) -> Sum {
    sums.fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1))
}

/// What a rank has received from another, or sent to it, by any way.
fn with(rank: &Value, other: u64, side: &str) -> Sum {
    let pairs = rank["pairs"].as_array().expect("pairs");
    let pair = pairs.iter().find(|pair| pair["rank"] == other);
    let by = pair.and_then(|pair| pair[side].as_object());
    add(by.into_iter().flatten().map(|(_, sum)| sum_of(sum)))
}

/// What the program has sent to whom is what both ends have counted, also in a communicator of other ranks.
fn counted_as_sent(mpi: &Mpi) {
    const RANKS: u64 = 4;
    let folder = scratch_folder("stats");
    let (outcome, stats) = counted(
        mpi,
        RANKS as usize,
        ("counted", &["ring"]),
        &folder.join("r"),
    );
    assert_eq!(stats["size"], RANKS, "{outcome}");
    for (me, rank) in (0..RANKS).zip(ranks(&stats)) {
        assert_eq!(rank["rank"], me);
        for other in 0..RANKS {
            let sent = match other == (me + 1) % RANKS {
                true => (6, 6 * (me + 1) * 40_000),
                false => (0, 0),
            };
            assert_eq!(with(rank, other, "sent"), sent, "{me} to {other}\n{rank:#}");
            let received = match me == (other + 1) % RANKS {
                true => (6, 6 * (other + 1) * 40_000),
                false => (0, 0),
            };
            assert_eq!(
                with(rank, other, "received"),
                received,
                "{me} from {other}\n{rank:#}"
            );
        }
        let calls = &rank["time_in_calls"];
        assert_eq!(calls["MPI_Send"]["calls"], 6, "{calls}");
        assert_eq!(calls["MPI_Recv"]["calls"], 6, "{calls}");
    }
    let (_, stats) = counted(
        mpi,
        RANKS as usize,
        ("counted", &["fan"]),
        &folder.join("f"),
    );
    // Sizes that the program sends, by the power of two that they are not below.
    let sizes = [
        (1, 1),
        (512, 1000),
        (1024, 1024),
        (32_768, 65_535),
        (65_536, 65_536),
        (1 << 18, 300_000),
        (1 << 22, 5_000_000),
    ];
    let bytes: u64 = sizes.iter().map(|(_, size)| size).sum();
    for (me, rank) in (0..RANKS).zip(ranks(&stats)) {
        let times = 1 << me;
        let mut classes: BTreeMap<u64, Sum> = BTreeMap::new();
        for rate in rates(rank).flat_map(|(_, rates)| rates) {
            let class = classes.entry(number(&rate["from_bytes"])).or_default();
            *class = add([*class, sum_of(rate)].into_iter());
        }
        let expected: BTreeMap<u64, Sum> = match me {
            0 => BTreeMap::new(),
            _ => sizes
                .map(|(from, size)| (from, (times, times * size)))
                .into(),
        };
        assert_eq!(classes, expected, "rank {me}\n{rank:#}");
        let of_me = if me == 0 {
            (0, 0)
        } else {
            (7 * times, times * bytes)
        };
        assert_eq!(with(rank, 0, "received"), of_me, "rank {me}\n{rank:#}");
        assert_eq!(with(&ranks(&stats)[0], me, "sent"), of_me, "rank {me}");
    }
    let _ = fs::remove_dir_all(folder);
}

/// Rates of a rank by protocol.
fn rates(rank: &Value) -> impl Iterator<Item = (&String, &Vec<Value>)> {
    let rates = rank["rates"].as_object().expect("rates").iter();
    rates.map(|(name, rates)| (name, rates.as_array().expect("classes")))
}

/// Counters of sends, by the ways that they count.
const SENT: [(&str, &str); 3] = [
    ("sends_rts", "rts"),
    ("sends_host_rts", "host_rts"),
    ("sends_bcopy", "bcopy"),
];

fn counter(rank: &Value, name: &str) -> Sum {
    let counters = &rank["counters"];
    (
        number(&counters[name]),
        number(&counters[&format!("{name}_bytes")]),
    )
}

/// All that a rank has received or sent by these protocols or ways, whoever was at the other end.
fn over_pairs(rank: &Value, side: &str, names: &[&str]) -> Sum {
    let pairs = rank["pairs"].as_array().expect("pairs").iter();
    let pairs = pairs.chain([&rank["pairs_unknown"], &rank["pairs_others"]]);
    let of = |pair: &Value| {
        let by = names.iter().filter_map(|name| pair[side].get(name));
        add(by.map(sum_of))
    };
    add(pairs.map(of))
}

/// Programs with wildcards, probes, cancellation, persistent requests, threads and communicators: pairs and size classes add
/// up to the counters, rank by rank, and times are in order.
fn sums_are_the_counters(mpi: &Mpi) {
    let folder = scratch_folder("stats");
    for (program, number_of_ranks) in [
        ("p2p", 2),
        ("requests", 2),
        ("probe", 2),
        ("threads", 2),
        ("comms", 4),
    ] {
        let file = folder.join(program);
        let (outcome, stats) = counted(mpi, number_of_ranks, (program, &[]), &file);
        let mut timed = 0;
        for rank in ranks(&stats) {
            for (name, protocols) in RECEIVED {
                let total = counter(rank, name);
                let of_classes =
                    rates(rank).filter(|(protocol, _)| protocols.contains(&protocol.as_str()));
                let of_classes = add(of_classes.flat_map(|(_, rates)| rates).map(sum_of));
                assert_eq!(of_classes, total, "{program}: classes of {name}\n{outcome}");
                let of_pairs = over_pairs(rank, "received", protocols);
                assert_eq!(of_pairs, total, "{program}: pairs of {name}\n{outcome}");
            }
            for (name, way) in SENT {
                let of_pairs = over_pairs(rank, "sent", &[way]);
                assert_eq!(
                    of_pairs,
                    counter(rank, name),
                    "{program}: {name}\n{outcome}"
                );
            }
            for rate in rates(rank).flat_map(|(_, rates)| rates) {
                let of = |name: &str| number(&rate[name]);
                timed += of("timed");
                assert!(
                    of("timed") <= of("messages") && of("timed_bytes") <= of("bytes"),
                    "{rate}"
                );
                assert!(of("min_ns") <= of("max_ns"), "{rate}");
                // Each was rounded by itself.
                assert!(of("max_ns") <= of("ns") + 1, "{rate}");
            }
            let in_calls = rank["time_in_calls"].as_object().expect("calls").values();
            let longest = in_calls.map(|calls| number(&calls["ns"])).max();
            let threads = if program == "threads" { 16 } else { 1 };
            let run = number(&rank["run_ns"]);
            assert!(
                longest.is_some_and(|ns| ns <= threads * run),
                "{program}: {longest:?} of {run} ns"
            );
        }
        assert!(timed > 0, "{program}: no message was timed\n{outcome}");
    }
    let _ = fs::remove_dir_all(folder);
}

/// Each call of the program is counted once, by the function that it called, and the time in it is that for which it waited.
#[test]
fn calls_are_those_of_the_program() {
    on("openmpi", |mpi| {
        let folder = scratch_folder("stats");
        let (outcome, stats) = counted(mpi, 2, ("counted", &["calls"]), &folder.join("c"));
        for rank in ranks(&stats) {
            let calls = rank["time_in_calls"].as_object().expect("calls");
            for (function, times) in [
                ("MPI_Allreduce", 3),
                ("MPI_Iprobe", 5),
                ("MPI_Irecv", 7),
                ("MPI_Isend", 7),
                ("MPI_Waitall", 7),
                ("MPI_Sendrecv", 11),
                ("MPI_Bcast", 13),
                // Before and after the case, and at the end.
                ("MPI_Barrier", 3),
            ] {
                let counted = calls.get(function).map(|calls| number(&calls["calls"]));
                assert_eq!(counted, Some(times), "{function}\n{rank:#}\n{outcome}");
            }
            assert!(
                !calls.contains_key("MPI_Send") && !calls.contains_key("MPI_Wait"),
                "{rank:#}"
            );
        }
        let (outcome, stats) = counted(mpi, 2, ("counted", &["late"]), &folder.join("l"));
        let in_recv = &ranks(&stats)[0]["time_in_calls"]["MPI_Recv"];
        assert_eq!(in_recv["calls"], 1, "{outcome}");
        // Its sender slept for 0.3 s, and this rank may have come a little late.
        let ns = number(&in_recv["ns"]);
        assert!(
            ns > 100_000_000 && ns < number(&ranks(&stats)[0]["run_ns"]),
            "{ns} ns\n{outcome}"
        );
        let _ = fs::remove_dir_all(folder);
    });
}
