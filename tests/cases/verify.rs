//! `ANABRANCH_VERIFY`: a wrong byte on any path is noticed, named and counted; without it nobody notices.

use crate::support::{job, model, on, on_every_mpi, some};
use anabranch_tests::{Job, Outcome};
use xtask::mpi::Mpi;

on_every_mpi!(wrong_bytes, every_message);

/// One message of `verify.c` and one copy of it that goes wrong.
struct Fault {
    case: &'static str,
    /// Which copy, and where: counted with checksums on and off.
    copies: [&'static str; 2],
    /// The byte of the message that is wrong then.
    byte: u64,
    /// Offset of its block: messages have up to 62 blocks of whole pages of 4096 bytes.
    block: u64,
    by: &'static str,
    path: &'static str,
    /// Ranks of the message.
    ranks: (u32, u32),
    /// Messages that are compared, here and at the other end.
    verified: u64,
}

/// The first messages of a rank, those that make it ready: four values of one byte, each compared where it is copied down
/// and where it is copied up.
const WARM_UP: u64 = 8;
/// Copies of each kind that they make: one down for the checksums and one for the value, one up and one down again.
const WARM_DOWN_ON: u64 = 6;
const WARM_DOWN_OFF: u64 = 2;
const WARM_UP_COPIES: u64 = 2;

// 4 MiB + 3 in 62 blocks: 67,651 bytes and more, 17 pages, 69,632.
const FAULTS: [Fault; 8] = [
    Fault {
        case: "direct",
        copies: ["1:DtoD:1:3000000"; 2],
        byte: 3_000_000,
        block: 43 * 69_632,
        by: "receiver",
        path: "direct",
        ranks: (0, 1),
        verified: 1,
    },
    Fault {
        case: "value",
        copies: ["0:DtoH:+2:50000", "0:DtoH:+1:50000"],
        byte: 50_000,
        block: 49_152,
        by: "sender",
        path: "bcopy",
        ranks: (0, 1),
        verified: 2,
    },
    Fault {
        case: "value",
        copies: ["1:HtoD:+1:0"; 2],
        byte: 0,
        block: 0,
        by: "receiver",
        path: "bcopy",
        ranks: (0, 1),
        verified: 2,
    },
    Fault {
        case: "self",
        copies: ["1:DtoD:1:4194306"; 2],
        byte: 4_194_306,
        block: 60 * 69_632,
        by: "receiver",
        path: "self",
        ranks: (1, 1),
        verified: 2,
    },
    // The sender's second megabyte of the ring, after five pieces for the checksums.
    Fault {
        case: "to_host",
        copies: ["0:DtoH:+7:100", "0:DtoH:+2:100"],
        byte: (1 << 20) + 100,
        block: 15 * 69_632,
        by: "receiver",
        path: "host_pipeline",
        ranks: (0, 1),
        verified: 1,
    },
    Fault {
        case: "eager",
        copies: ["1:HtoD:+1:4999"; 2],
        byte: 4999,
        block: 4096,
        by: "receiver",
        path: "eager",
        ranks: (0, 1),
        verified: 1,
    },
    // Rows of 1000 bytes: the byte lies in the last one.
    Fault {
        case: "scattered",
        copies: ["1:HtoD:+1:99999"; 2],
        byte: 99_999,
        block: 24 * 4096,
        by: "receiver",
        path: "host_pipeline",
        ranks: (0, 1),
        verified: 1,
    },
    Fault {
        case: "to_host",
        copies: ["0:DtoH:+6:0", "0:DtoH:+1:0"],
        byte: 0,
        block: 0,
        by: "receiver",
        path: "host_pipeline",
        ranks: (0, 1),
        verified: 1,
    },
];

/// `+N` counts from behind the copies of the warm-up.
fn corruption(plan: &str, is_on: bool) -> String {
    let Some((before, after)) = plan.split_once('+') else {
        return plan.to_owned();
    };
    let (number, offset) = after.split_once(':').expect("an offset");
    let number: u64 = number.parse().expect("a number");
    let warm = match (plan.contains("DtoH"), is_on) {
        (true, true) => WARM_DOWN_ON,
        (true, false) => WARM_DOWN_OFF,
        (false, _) => WARM_UP_COPIES,
    };
    format!("{before}{}:{offset}", warm + number)
}

fn reports(outcome: &Outcome) -> Vec<&str> {
    let lines = outcome.finished.stderr.lines();
    lines.filter(|line| line.contains("verify: ")).collect()
}

fn wrong_bytes(mpi: &Mpi) {
    // All of them with one library: what differs between libraries is how a call ends.
    let faults = if mpi.name == "openmpi" {
        &FAULTS[..]
    } else {
        &FAULTS[..3]
    };
    for fault in faults {
        let run = |plan: &str, is_on: bool| {
            job(mpi, 2, "verify")
                .args(&[fault.case])
                .env("SIMCUDA_CORRUPT", &corruption(plan, is_on))
                .env("WRONG", &fault.byte.to_string())
                // Copies are counted: long messages shall not be cut for measuring.
                .env("ANABRANCH_PATHS", "direct")
        };
        let seen = run(fault.copies[0], true)
            .env("ANABRANCH_VERIFY", "1")
            .env("SEEN", fault.by)
            .passes();
        let lines = reports(&seen);
        assert_eq!(lines.len(), 1, "{seen}");
        let (from, to) = fault.ranks;
        let reporter = if fault.by == "sender" { from } else { to };
        for part in [
            format!("anabranch[{reporter}]: error: "),
            format!("from rank {from} to rank {to} with tag 77"),
            format!("path {},", fault.path),
            format!("from offset {} on", fault.block),
        ] {
            assert!(lines[0].contains(&part), "{part}:\n{seen}");
        }
        let stats = seen.stats();
        assert_eq!(stats.total("verify_mismatches"), 1, "{seen}");
        assert_eq!(stats.total("errors"), 1, "{seen}");
        assert_eq!(stats.total("verified"), WARM_UP + fault.verified, "{seen}");

        // The same byte goes wrong, and nobody notices.
        let unseen = run(fault.copies[1], false).passes();
        assert!(reports(&unseen).is_empty(), "{unseen}");
        for counter in ["verified", "verify_mismatches", "errors"] {
            assert_eq!(unseen.stats().total(counter), 0, "{unseen}");
        }
    }
}

/// A piece of a message over several paths: wherever it belongs, the block with the wrong byte is named.
#[test]
fn wrong_bytes_of_several_paths() {
    on("openmpi", |mpi| {
        let model = model("beluga");
        let run = || {
            job(mpi, 2, "verify")
                .args(&["several"])
                .env("SIMCUDA_TOPOLOGY", "beluga")
                .env("ANABRANCH_MODEL", &model.display().to_string())
                // Nothing is pulled straight, however slow the sender is.
                .env("ANABRANCH_PATHS", "host")
        };
        // Of the third piece that comes through the host's memory; two copies up are of the warm-up.
        let outcome = run()
            .env("SIMCUDA_CORRUPT", "1:HtoD:5:1000")
            .env("WRONG", "-2")
            .env("SEEN", "receiver")
            .env("ANABRANCH_VERIFY", "1")
            .passes();
        let stats = outcome.stats();
        assert_eq!(stats.total("receives_multipath"), 1, "{outcome}");
        assert!(stats.total("multipath_host_bytes") > 0, "{outcome}");
        assert_eq!(stats.total("verify_mismatches"), 1, "{outcome}");
        let lines = reports(&outcome);
        assert!(
            lines.len() == 1 && lines[0].contains("path multipath,"),
            "{outcome}"
        );
        let number_after = |text: &str, before: &str| -> u64 {
            let (_, after) = text.split_once(before).expect(before);
            let digits = after.find(|c: char| !c.is_ascii_digit());
            after[..digits.unwrap_or(after.len())]
                .parse()
                .expect("a number")
        };
        let wrong = number_after(&outcome.finished.stdout, "wrong byte ");
        let block = number_after(lines[0], "from offset ");
        // 62 blocks of whole pages.
        assert!(
            block <= wrong && wrong < block + 102 * 4096,
            "{wrong}, {block}: {outcome}"
        );
        let right = right(run().env("ANABRANCH_VERIFY", "1"));
        assert_eq!(right.stats().total("receives_multipath"), 1, "{right}");
        assert_eq!(right.stats().total("verified"), WARM_UP + 1, "{right}");
    });
}

/// Every message that arrives is compared and found right, and completes as it does without checksums.
fn every_message(mpi: &Mpi) {
    for (name, cases) in [("p2p", &["medium", "pieces"][..]), ("types", &[])] {
        let outcome = job(mpi, 2, name)
            .args(cases)
            .env("ANABRANCH_VERIFY", "1")
            .passes();
        let stats = outcome.stats();
        stats.check_complete();
        // A value is compared on each side.
        let total = |counter| stats.total(counter);
        let least = total("sends_rts") + total("sends_bcopy") + total("receives_bcopy");
        assert!(total("sends_rts") > 0, "{outcome}");
        assert!(total("verified") >= least, "{outcome}");
        assert_eq!(total("verify_mismatches"), 0, "{outcome}");
    }
}

fn right(job: Job) -> Outcome {
    let outcome = job.passes();
    assert_eq!(outcome.stats().total("verify_mismatches"), 0, "{outcome}");
    assert!(reports(&outcome).is_empty(), "{outcome}");
    outcome
}

/// Truncated messages, probes, threads, and calls that block while others are owed something.
#[test]
fn other_habits() {
    let programs: [(&str, &str, usize, &[&str]); 5] = [
        ("mpich", "order", 4, &[]),
        ("openmpi", "threads", 2, &["by_tag"]),
        ("mpich", "probe", 2, &[]),
        ("openmpi", "memory_kinds", 2, &["from_pool"]),
        (
            "mpich",
            "deadlock",
            2,
            &["pending_barrier", "head_to_head", "everyone"],
        ),
    ];
    for (mpi, name, ranks, cases) in programs {
        on(mpi, |mpi| {
            let job = job(mpi, ranks, name).args(cases);
            let outcome = right(job.env("ANABRANCH_VERIFY", "1"));
            assert!(outcome.stats().total("verified") > 0, "{outcome}");
            // Head-to-head sends of small buffers still complete by themselves.
            let hosted = outcome.stats().total("sends_eager");
            assert!(hosted > 0 || name != "deadlock", "{outcome}");
        });
    }
}

/// One rank has it on and the other has not: its messages carry checksums, and are compared by whoever receives them.
#[test]
fn on_at_one_end() {
    for name in ["openmpi", "mpich"] {
        on(name, |mpi| {
            let fault = |rank: &str| {
                job(mpi, 2, "verify")
                    .args(&["direct"])
                    .env("SIMCUDA_CORRUPT", FAULTS[0].copies[0])
                    .env("WRONG", "3000000")
                    .env("ANABRANCH_PATHS", "direct")
                    .env("VERIFY_ON", rank)
            };
            let outcome = fault("0").env("SEEN", "receiver").passes();
            assert_eq!(
                outcome.stats().of_rank(1, "verify_mismatches"),
                1,
                "{outcome}"
            );
            let outcome = right(fault("1"));
            let values = outcome.stats().total("verified");
            assert_eq!(values, WARM_UP / 2, "{outcome}");
        });
    }
}

/// Windows of messages that are received in one place, as bandwidth tests do: each is read back before the next is written there.
#[test]
fn windows_in_one_place() {
    let all = ["one_place", "one_place_by_tag", "one_place_in_host"];
    let nodes = [
        ("openmpi", "beluga", "25165824", "two"),
        ("mpich", "hgx-h200", "67108864", "two"),
        ("mpich5", "beluga", "25165824", "one"),
        ("openmpi", "narval", "1048576", "two"),
        ("mpich", "beluga", "3000", "two"),
    ];
    for (name, topology, bytes, assign) in some(&nodes, 3) {
        on(name, |mpi| {
            let model = model(topology);
            let run = |cases: &[&str]| {
                job(mpi, 2, "verify")
                    .args(cases)
                    .env("BYTES", bytes)
                    .env("SIMCUDA_TOPOLOGY", topology)
                    .env("ANABRANCH_MODEL", &model.display().to_string())
                    .env("ANABRANCH_OWNER", assign)
                    .env("ANABRANCH_VERIFY", "1")
            };
            let outcome = right(run(&all));
            let stats = outcome.stats();
            // Three windows of six messages by each case; values are compared on both sides.
            assert!(stats.total("verified") >= 3 * 18, "{outcome}");
            let is_long = bytes.len() > 7;
            assert_eq!(stats.total("receives_multipath") > 0, is_long, "{outcome}");
            if is_long && topology == "beluga" {
                for counter in ["multipath_relay_bytes", "multipath_host_bytes"] {
                    assert!(stats.total(counter) > 0, "{counter}: {outcome}");
                }
            }
        });
    }
}

/// Of such a window the one message that is wrong is found, and no other is taken for wrong.
#[test]
fn a_wrong_byte_in_a_window_in_one_place() {
    on("mpich", |mpi| {
        let model = model("beluga");
        for case in ["one_place", "one_place_by_tag"] {
            let outcome = job(mpi, 2, "verify")
                .args(&[case])
                .env("BYTES", "1048576")
                .env("SIMCUDA_TOPOLOGY", "beluga")
                .env("ANABRANCH_MODEL", &model.display().to_string())
                .env("ANABRANCH_PATHS", "direct")
                .env("ANABRANCH_RTR", "off")
                .env("ANABRANCH_VERIFY", "1")
                // Not the last of a window, which is looked at.
                .env("SIMCUDA_CORRUPT", "1:DtoD:3:500000")
                .env("WRONG_MESSAGES", "1")
                .passes();
            assert_eq!(outcome.stats().total("verify_mismatches"), 1, "{outcome}");
            assert_eq!(reports(&outcome).len(), 1, "{outcome}");
        }
    });
}
