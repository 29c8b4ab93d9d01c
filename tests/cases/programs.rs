//! The programs that come with the project, on simulated nodes.

use crate::support::{is_long, on, on_every_mpi, some};
use anabranch_tests::{
    built, cannot_be_made_here, needs_simulator, scratch_folder, solver, Job, Outcome,
};
use serde_json::Value;
use std::fs;
use xtask::mpi::{Family, Mpi};

on_every_mpi!(jacobi, bench, put);

/// A job of the solver, and its own report.
fn solve(
    mpi: &Mpi,
    ranks: usize,
    arguments: &[&str],
    adjust: impl FnOnce(Job) -> Job,
) -> (Value, Outcome) {
    let job = Job::new(mpi, ranks, &solver(mpi)).args(arguments);
    let file = job.folder().with_extension("json");
    let outcome = adjust(job.args(&["--json", &file.display().to_string()])).run();
    assert_eq!(outcome.finished.code, Some(0), "{outcome}");
    outcome.check_watched();
    let text = fs::read_to_string(&file).expect("the solver's report");
    let _ = fs::remove_file(&file);
    (serde_json::from_str(&text).expect("JSON"), outcome)
}

fn number(report: &Value, name: &str) -> u64 {
    report[name]
        .as_u64()
        .unwrap_or_else(|| panic!("no {name} in {report:#}"))
}

/// Four ranks with the library, four without, and one alone compute the same field, bit for bit, stop after as many
/// iterations, find the same norm and draw the same picture; and each message of the solver is accounted for in the
/// library's counters.
#[allow(
    clippy::too_many_lines,
    reason = "one solver, three variants, three ways to run each"
)]
fn jacobi(mpi: &Mpi) {
    if !mpi.has_solver() {
        return cannot_be_made_here("no solver", "its MPI binding does not know the MPI 5 ABI");
    }
    let pictures = scratch_folder("pictures");
    let picture = |of: &str| pictures.join(of).display().to_string();
    let (small, large) = (picture("alone.png"), picture("carried.png"));
    // The split is for four ranks: one alone has the whole domain. The rest is for one alone and for those with the library.
    type Words<'a> = &'a [&'a str];
    let variants: [(Words<'_>, Words<'_>, Words<'_>, Words<'_>); 3] = [
        (
            &["--size", "512x8200", "--tolerance", "0.07"],
            &[],
            &[],
            &[],
        ),
        (
            &[
                "--size",
                "300x9001",
                "--type",
                "double",
                "--exchange",
                "concurrent",
            ],
            &[],
            &["--norm", "l2"],
            &["--norm", "l2"],
        ),
        (
            &["--size", "1030x777", "--boundary", "torus"],
            &["--dims", "2x2"],
            &["--png", &small],
            &["--png", &large],
        ),
    ];
    // All with one MPI library, one of them with each other.
    let few = match mpi.name.as_str() {
        "openmpi" => variants.to_vec(),
        "mpich" => some(&variants[..1], 1),
        "mpich5" => some(&variants[1..2], 1),
        _ => some(&variants[2..], 1),
    };
    let variants = if is_long() { variants.to_vec() } else { few };
    let is_drawn = variants.iter().any(|(words, ..)| words.contains(&"torus"));
    for (variant, split, for_one, for_carried) in variants {
        let mut arguments = vec![
            "--iterations",
            "40",
            "--norm-every",
            "10",
            "--warmup",
            "3",
            "--check",
        ];
        arguments.extend(variant);
        let native = |job: Job| {
            job.without_preload()
                .env("SIMCUDA_HOST_ACCESS", "1")
                .env("SIMCUDA_CHECK", "0")
        };
        let (alone, _) = solve(mpi, 1, &arguments, |job| native(job.args(for_one)));
        arguments.extend(split);
        let (plain, _) = solve(mpi, 4, &arguments, native);
        let (carried, outcome) = solve(mpi, 4, &arguments, |job| job.args(for_carried));
        let converges = variant.contains(&"--tolerance");
        for report in [&alone, &plain, &carried] {
            assert_eq!(report["check"]["equal"], true, "{report:#}");
            assert_eq!(report["hash"], alone["hash"]);
            assert_eq!(report["converged"], converges, "{report:#}");
            let iterations = if converges { 20 } else { 40 };
            assert_eq!(report["iterations"], iterations, "{report:#}");
        }
        check_norms(&alone, &plain, &carried);
        let stats = outcome.stats();
        stats.check_complete();
        assert_eq!(
            stats.total("sends_device"),
            number(&carried, "messages"),
            "{outcome}"
        );
        assert_eq!(
            stats.total("sends_device_bytes"),
            number(&carried, "message_bytes"),
            "{outcome}"
        );
        // A rank that has not met its peer's helper yet sends by value; all else is taken.
        let taken = stats.total("sends_rts");
        assert!(taken + 64 >= stats.total("sends_device"), "{outcome}");
        let (off, outcome) = solve(mpi, 4, &arguments, |job| {
            job.env("ANABRANCH", "off")
                .env("SIMCUDA_HOST_ACCESS", "1")
                .env("SIMCUDA_CHECK", "0")
        });
        assert_eq!(off["hash"], alone["hash"]);
        assert!(
            outcome.stats.is_none_or(|stats| stats.is_idle()),
            "switched off"
        );
    }
    if is_drawn {
        let drawn = [small, large].map(|file| fs::read(file).expect("a picture"));
        assert!(drawn[0] == drawn[1], "the pictures differ");
        // A PNG begins with its signature and a chunk that has its width and height: the longest side is 1024.
        assert_eq!(drawn[0][..8], *b"\x89PNG\r\n\x1a\n");
        let side = |at: usize| u32::from_be_bytes(drawn[0][at..at + 4].try_into().expect("four"));
        assert_eq!((side(16), side(20)), (777 * 1024 / 1030, 1024));
        assert!(drawn[0].len() > 100_000, "noise: {} bytes", drawn[0].len());
    }
    let _ = fs::remove_dir_all(pictures);
}

/// The largest change is the same for any number of ranks. The square root of the sum of all squares is rounded otherwise,
/// and lies between the largest change and that of as many cells as there are.
fn check_norms(alone: &Value, plain: &Value, carried: &Value) {
    let [one, most, found] = [alone, plain, carried].map(|report| {
        let norm = report["norm"].as_f64();
        norm.unwrap_or_else(|| panic!("no norm in {report:#}"))
    });
    assert!(most > 0.0, "{plain:#}");
    assert_eq!(plain["norm_kind"], "max");
    if carried["norm_kind"] == "max" {
        assert_eq!((one, found), (most, most));
        return;
    }
    assert_eq!(carried["norm_kind"], "l2");
    assert!((found - one).abs() <= 1e-12 * one, "{found} and {one}");
    let cells: f64 = [0, 1]
        .map(|at| carried["size"][at].as_f64().expect("a size"))
        .iter()
        .product();
    assert!(
        most < found && found < most * cells.sqrt(),
        "{most}, {found}"
    );
}

/// A domain that is larger than the memory of the GPU that two ranks share: said by one, in a line.
#[test]
fn a_domain_that_does_not_fit() {
    on("mpich", |mpi| {
        let outcome = Job::new(mpi, 2, &solver(mpi))
            .args(&["--size", "160000x160000"])
            .env("CUDA_VISIBLE_DEVICES", "0")
            .run();
        assert_eq!(outcome.finished.code, Some(2), "{outcome}");
        let lines: Vec<&str> = outcome.finished.stderr.lines().collect();
        assert_eq!(lines.len(), 1, "{outcome}");
        let words: Vec<&str> = lines[0].split_whitespace().collect();
        // Two buffers of four bytes a cell, and a little for edges.
        let needed: u64 = words[4].parse().expect("MiB");
        assert_eq!(
            needed / 1000,
            ((160_000 * 160_000 * 8) >> 20) / 1000,
            "{outcome}"
        );
        for part in [
            "jacobi: the domain needs ",
            " MiB on the 2 ranks on ",
            ": use more GPUs or a smaller --size",
        ] {
            assert!(lines[0].contains(part), "{part}: {outcome}");
        }
    });
}

/// What a rank allocates of a domain of 2048 x 2048 is 17 MiB (two buffers of 1026 rows of 2080 cells of 4 bytes): the GPUs have
/// room for a thousand of them, the host's memory is said to have room for one. With room for both it is solved.
#[test]
fn a_domain_that_the_host_cannot_back() {
    on("mpich", |mpi| {
        needs_simulator("less memory of the host than it has");
        let with_memory = |mib: &str| {
            Job::new(mpi, 2, &solver(mpi))
                .args(&["--size", "2Kx2K", "--iterations", "2", "--warmup", "0"])
                .env("SIMCUDA_HOST_MIB", mib)
                .run()
        };
        let outcome = with_memory("32");
        assert_eq!(outcome.finished.code, Some(2), "{outcome}");
        let lines: Vec<&str> = outcome.finished.stderr.lines().collect();
        assert_eq!(lines.len(), 1, "{outcome}");
        assert!(
            lines[0].starts_with("jacobi: the domain needs 17 MiB on ")
                && lines[0].contains(", 16 of "),
            "{outcome}"
        );
        let outcome = with_memory("40");
        assert_eq!(outcome.finished.code, Some(0), "{outcome}");
    });
}

/// What the library must count of `bench` below, by hand: of each size but the empty one 6 iterations of windows of 8 each
/// way, or of one message; with bw each window, the empty ones too, is acknowledged by 4 bytes.
fn check_counts(kind: &str, pair: (&str, &str), outcome: &Outcome) {
    let stats = outcome.stats();
    stats.check_complete();
    let total = |name| stats.total(name);
    let window = if kind == "latency" { 1 } else { 8 };
    // Ranks that send their messages from a device, and those that send them from the host to one; then acknowledgements.
    let (from_device, to_device, acks, acks_to_device) = match (kind, pair) {
        (_, ("H", "H")) => (0, 0, 0, 0),
        ("bw", ("D", "D")) => (1, 0, 36, 0),
        ("bw", ("D", "H")) => (1, 0, 0, 36),
        ("bw", _) => (0, 1, 36, 0),
        (_, ("D", "D")) => (2, 0, 0, 0),
        _ => (1, 1, 0, 0),
    };
    let messages = 6 * window * from_device;
    let sent = 5 * messages + acks;
    assert_eq!(total("sends_device"), sent, "{outcome}");
    // The second iteration of the warm-up has odd lengths: of two sizes a byte less.
    let odd = 2 * window * from_device;
    let payload = (1 + 61 + 4096 + 100_001 + 4_194_304) * messages - odd + 4 * acks;
    assert_eq!(total("sends_device_bytes"), payload, "{outcome}");
    // Until the ranks have met: the first window of each sender, and the first acknowledgement.
    let first_ones = window * from_device + acks.min(1);
    let by_value = total("sends_bcopy");
    assert!(by_value <= first_ones, "not {first_ones}:\n{outcome}");
    assert_eq!(stats.fallback("not_ready"), by_value, "{outcome}");
    assert_eq!(total("sends_rts"), sent - by_value, "{outcome}");
    // From the host to a device by value or, long ones, by descriptor; from device to device by value those first ones.
    let lifted = total("receives_bcopy") + total("sends_host_rts");
    let between_devices = if pair == ("D", "D") { by_value } else { 0 };
    let expected = 5 * 6 * window * to_device + acks_to_device + between_devices;
    assert_eq!(lifted, expected, "{outcome}");
}

/// Bandwidth and latency over all pairs of buffers, every byte verified.
fn bench(mpi: &Mpi) {
    let library = match mpi.family {
        Family::OpenMpi4 | Family::OpenMpi5 => "openmpi",
        Family::Mpich => "mpich",
        Family::StandardAbi => "abi",
    };
    for kind in ["bw", "bibw", "latency"] {
        for (first, second) in [("D", "D"), ("D", "H"), ("H", "D"), ("H", "H")] {
            let job = Job::new(mpi, 2, &built().command);
            let file = job.folder().with_extension("json");
            let path = file.display().to_string();
            let outcome = job
                .args(&[
                    "bench",
                    kind,
                    first,
                    second,
                    "--check",
                    "--sizes",
                    "0,1,61,4K,100001,4M",
                    "--window",
                    "8",
                ])
                .args(&["--warmup", "2", "--iterations", "4"])
                .args(&["--mpi", library, &format!("--json={path}")])
                .roles(&format!("{first}{second}"))
                .run();
            assert_eq!(outcome.finished.code, Some(0), "{outcome}");
            outcome.check_watched();
            let report: Value =
                serde_json::from_str(&fs::read_to_string(&file).expect("report")).expect("JSON");
            let _ = fs::remove_file(&file);
            let rows = report["rows"].as_array().expect("rows");
            assert_eq!(rows.len(), 6, "{report:#}");
            assert!(rows.iter().all(|row| row["unit"].is_string()), "{report:#}");
            assert!(
                rows.iter().all(|row| row["bytes"] == 0
                    || row["value"].as_f64().is_some_and(|value| value > 0.0)),
                "{report:#}"
            );
            check_counts(kind, (first, second), &outcome);
        }
    }
    bench_otherwise(mpi, library);
}

/// Transfers without MPI stand beside messages, from and to either memory.
#[test]
fn transfers_beside_messages() {
    for name in ["openmpi", "mpich5-abi"] {
        on(name, |mpi| {
            for (kind, first, second) in [
                ("latency", "D", "D"),
                ("bw", "D", "D"),
                ("bibw", "D", "D"),
                ("bw", "H", "D"),
                ("latency", "D", "H"),
            ] {
                let job = Job::new(mpi, 2, &built().command);
                let file = job.folder().with_extension("json");
                let path = file.display().to_string();
                let outcome = job
                    .args(&["bench", kind, first, second, "--transfer"])
                    .args(&[&format!("--json={path}")])
                    .args(&["--sizes", "8,4099,300001,4M", "--window", "8"])
                    .args(&["--warmup", "2", "--iterations", "4"])
                    .roles(&format!("{first}{second}"))
                    .run();
                assert_eq!(outcome.finished.code, Some(0), "{outcome}");
                outcome.check_watched();
                outcome.stats().check_complete();
                let report: Value =
                    serde_json::from_str(&fs::read_to_string(&file).expect("report"))
                        .expect("JSON");
                let _ = fs::remove_file(&file);
                let rows = report["rows"].as_array().expect("rows");
                assert_eq!(rows.len(), 4, "{report:#}");
                for row in rows {
                    let transfer = row["transfer"].as_f64();
                    assert!(transfer.is_some_and(|value| value > 0.0), "{report:#}");
                    let path = match (first, second) {
                        ("D", "D") => "direct",
                        _ => "host_pipeline",
                    };
                    assert_eq!(row["transfer_path"], path, "{report:#}");
                }
            }
        });
    }
}

/// Persistent requests, and exchanges of ranks that were away before.
fn bench_otherwise(mpi: &Mpi, library: &str) {
    let exchange: &[&str] = &["exchange", "--away", "cpu:20us"];
    let checked: [&[&str]; 5] = [
        &["latency", "--persistent", "--check"],
        &["bw", "--persistent", "--check"],
        &["bibw", "--persistent", "--check"],
        &["exchange", "--check"],
        &["exchange", "--away", "kernel:20us"],
    ];
    for arguments in checked.into_iter().chain([exchange]) {
        let outcome = Job::new(mpi, 2, &built().command)
            .args(&["bench"])
            .args(arguments)
            .args(&["--sizes", "61,100001", "--window", "8", "--mpi", library])
            .args(&["--warmup", "2", "--iterations", "4"])
            .run();
        assert_eq!(outcome.finished.code, Some(0), "{outcome}");
        outcome.check_watched();
        let stats = outcome.stats();
        let messages = match arguments[0] {
            "latency" => 2,
            // And an acknowledgement.
            "bw" => 9,
            "bibw" => 16,
            _ => 4,
        };
        assert_eq!(stats.total("sends_device"), 2 * 6 * messages, "{outcome}");
        let passed = outcome.finished.stdout.matches("Pass").count();
        let is_checked = arguments.contains(&"--check");
        assert_eq!(passed, if is_checked { 2 } else { 0 }, "{outcome}");
    }
}

/// Messages of this length between two GPUs: what came of them, and how many bytes rank 0 sent by descriptor.
fn beyond_a_count_of_bytes(mpi: &Mpi, arguments: &[&str], change: impl Fn(Job) -> Job) -> Outcome {
    let job = Job::new(mpi, 2, &built().command)
        .args(&["bench", "bw", "D", "D", "--window", "1", "--mpi", "mpich"])
        .args(arguments)
        .limit_seconds(600);
    change(job).run()
}

/// A message that is too long for a count of bytes is a count of a longer datatype, which the library takes as well. (No byte is
/// moved here: `a_message_beyond_a_count_of_bytes_arrives` moves them.)
#[test]
fn messages_beyond_a_count_of_bytes() {
    needs_simulator("copies that take no memory");
    on("mpich", |mpi| {
        let sizes = [
            "--sizes",
            "2G,2147483712",
            "--iterations",
            "1",
            "--warmup",
            "1",
        ];
        let without_data = |job: Job| job.env("SIMCUDA_DATA", "0");
        let outcome = beyond_a_count_of_bytes(mpi, &sizes, without_data);
        assert_eq!(outcome.finished.code, Some(0), "{outcome}");
        let rows: Vec<&str> = (outcome.finished.stdout.lines())
            .filter(|line| line.starts_with(|c: char| c.is_ascii_digit()))
            .collect();
        assert_eq!(rows.len(), 2, "{outcome}");
        for (row, bytes) in rows.iter().zip(["2147483648", "2147483712"]) {
            // OSU's widths, which these have outgrown by nothing. On a busy machine a mark may follow.
            let (measured, _) = row.split_once("  late ").unwrap_or((row, ""));
            let figure = measured.strip_prefix(bytes).map(str::trim);
            let is_figure = figure.is_some_and(|figure| figure.parse::<f64>().is_ok());
            assert!(measured.len() == 30 && is_figure, "{outcome}");
        }
        let stats = outcome.stats();
        stats.check_complete();
        // Two of each, and an acknowledgement of 4 bytes for each; all but what was sent before the ranks had met.
        let sent = 2 * (2_147_483_648 + 2_147_483_712) + 4 * 4;
        assert_eq!(stats.total("sends_device_bytes"), sent, "{outcome}");
        assert!(
            stats.total("sends_rts_bytes") >= sent - 2_147_483_648,
            "{outcome}"
        );
        // Where there is no memory for them, one line says so.
        let scarce = |job: Job| job.env("SIMCUDA_HOST_MIB", "1024");
        let outcome = beyond_a_count_of_bytes(mpi, &["--sizes", "16G"], scarce);
        assert_eq!(outcome.finished.code, Some(1), "{outcome}");
        let said = "the two buffers of 17179869184 bytes do not fit: use smaller --sizes";
        assert!(outcome.finished.stderr.contains(said), "{outcome}");
    });
}

/// The same with every byte verified. Of the 8 GiB that must be there half is touched:
/// `cargo nextest run -p anabranch-tests --run-ignored only -E 'test(beyond_a_count)'`.
#[test]
#[ignore = "takes 8 GiB of memory"]
fn a_message_beyond_a_count_of_bytes_arrives() {
    on("mpich", |mpi| {
        let sizes = [
            "--check",
            "--sizes",
            "2147483712",
            "--iterations",
            "1",
            "--warmup",
            "2",
        ];
        let outcome = beyond_a_count_of_bytes(mpi, &sizes, |job| job);
        assert_eq!(outcome.finished.code, Some(0), "{outcome}");
        assert_eq!(
            outcome.finished.stdout.matches("Pass").count(),
            1,
            "{outcome}"
        );
        let stats = outcome.stats();
        // The second one is a block shorter.
        let sent = 3 * 2_147_483_712 - 64 + 3 * 4;
        assert_eq!(stats.total("sends_device_bytes"), sent, "{outcome}");
        assert!(
            stats.total("sends_rts_bytes") >= sent - 2_147_483_712,
            "{outcome}"
        );
    });
}

/// Values that land while the device brings others up are brought up in one batch: from host memory, a window of small
/// messages.
#[test]
fn values_of_a_window_are_lifted_together() {
    on("openmpi", |mpi| {
        let outcome = Job::new(mpi, 2, &built().command)
            .args(&["bench", "bw", "H", "D", "--check", "--sizes", "4K"])
            .args(&["--window", "16", "--iterations", "20", "--warmup", "5"])
            .args(&["--mpi", "openmpi"])
            .roles("HD")
            .run();
        let stats = outcome.check_benched(1);
        let values = stats.total("receives_bcopy");
        assert!(values >= 25 * 16, "{outcome}");
        assert!(2 * stats.total("copies_batched") > values, "{outcome}");
    });
}

/// So are the copies by which their sender brings them to host memory.
#[test]
fn short_messages_of_a_window_to_the_host_are_brought_down_together() {
    on("openmpi", |mpi| {
        for size in ["64", "4K", "32K"] {
            let outcome = Job::new(mpi, 2, &built().command)
                .args(&["bench", "bw", "D", "H", "--check", "--sizes", size])
                .args(&["--window", "16", "--iterations", "20", "--warmup", "5"])
                .args(&["--mpi", "openmpi"])
                .roles("DH")
                .run();
            let stats = outcome.check_benched(1);
            let sent = stats.of_rank(0, "sends_rts");
            // The first may find that their receiver is not set up yet.
            assert!(sent >= 20 * 16, "{size}: {outcome}");
            let batched = stats.of_rank(0, "copies_batched");
            assert!(2 * batched > sent, "{size}: {batched} of {sent}\n{outcome}");
        }
    });
}

/// Short messages that come from several ranks at once are pulled in one batch.
#[test]
fn pulls_from_several_ranks_go_together() {
    on("openmpi", |mpi| {
        let outcome = Job::new(mpi, 4, &built().command)
            .args(&["bench", "all-to-all", "--check", "--sizes", "64K"])
            .args(&["--window", "1", "--iterations", "100", "--warmup", "5"])
            .args(&["--mpi", "openmpi"])
            .run();
        let stats = outcome.check_benched(1);
        let direct = stats.total("receives_direct");
        assert!(direct >= 12 * 100, "{outcome}");
        // The simulator's time stands still while processors of this machine are waited for; how many there are tells how often.
        assert!(8 * stats.total("copies_batched") > direct, "{outcome}");
    });
}

/// Three ranks in a ring, and each to all: every byte verified, and every message counted.
#[test]
fn bench_of_all_ranks() {
    on("mpich", |mpi| {
        for (kind, legs) in [("ring", 1), ("all-to-all", 2), ("all-by-number", 2)] {
            let outcome = Job::new(mpi, 3, &built().command)
                .args(&["bench", kind, "--check", "--sizes", "100001,3M"])
                .args(&["--window", "4", "--mpi", "mpich"])
                .run();
            assert_eq!(outcome.finished.code, Some(0), "{outcome}");
            let passed = outcome.finished.stdout.matches("Pass").count();
            assert_eq!(passed, 2, "{outcome}");
            // Two sizes, six iterations, windows of four.
            let messages = 2 * 6 * 4 * legs * 3;
            let stats = outcome.stats();
            stats.check_complete();
            assert_eq!(stats.total("sends_device"), messages, "{outcome}");
            let first_by_value = stats.total("sends_bcopy");
            assert!(first_by_value <= 4 * legs * 3, "{outcome}");
        }
        let uneven = Job::new(mpi, 2, &built().command)
            .args(&["bench", "ring", "D", "H", "--mpi", "mpich"])
            .run();
        assert_eq!(uneven.finished.code, Some(2), "{uneven}");
        let said = "all ranks of ring do the same: D D or H H";
        assert!(uneven.finished.stderr.contains(said), "{uneven}");
    });
}

/// One-sided messages go by the MPI library, which moves those between host buffers; one that does not know CUDA is not
/// handed device memory. The library counts none of them.
fn put(mpi: &Mpi) {
    let library = match mpi.family {
        Family::OpenMpi4 | Family::OpenMpi5 => "openmpi",
        Family::Mpich => "mpich",
        Family::StandardAbi => "abi",
    };
    let sizes = ["--check", "--sizes", "1,61,100001,1M", "--window", "4"];
    let job = |ranks, first, second| {
        Job::new(mpi, ranks, &built().command)
            .args(&["bench", "put", first, second, "--mpi", library])
            .args(&sizes)
    };
    let outcome = job(2, "H", "H").run();
    assert_eq!(outcome.finished.code, Some(0), "{outcome}");
    let rows = outcome.finished.stdout.lines();
    let rows = rows.filter(|line| line.starts_with(|c: char| c.is_ascii_digit()));
    let passed = rows.filter(|line| line.ends_with("Pass")).count();
    assert_eq!(passed, 4, "{outcome}");
    assert_eq!(outcome.stats().total("sends_rts"), 0, "{outcome}");
    // None of the libraries that the tests run on knows CUDA.
    for (ranks, first, why) in [(2, "D", "does not take device memory"), (3, "H", "2 ranks")] {
        let outcome = job(ranks, first, "H").run();
        assert_ne!(outcome.finished.code, Some(0), "{outcome}");
        assert!(outcome.finished.stderr.contains(why), "{outcome}");
    }
}
