//! Every message arrives whole, where and in the order in which MPI says.

use crate::support::{
    self, anabranch, is_long, job, on, on_every_mpi, over_an_mpi_that_knows_cuda, some,
};
use anabranch_tests::{
    cannot_be_made_here, needs_simulator, on_real_gpus, program, solver, Job, Outcome,
};
use xtask::mpi::{Family, Mpi};

/// Programs in which every message is received whole, with the number of ranks they want.
const PROGRAMS: [(&str, usize); 6] = [
    ("p2p", 2),
    ("requests", 2),
    ("probe", 2),
    ("types", 2),
    ("comms", 4),
    ("threads", 2),
];

on_every_mpi!(
    p2p,
    from_host,
    from_host_persistent,
    requests,
    probe,
    order,
    types,
    comms,
    threads,
    stress,
    small_by_value,
    host_only_sender,
    host_only_receiver,
    taking_part,
    sessions,
    spawned,
    memory_kinds,
    mixed,
    ranks_share_a_gpu,
);

fn complete(job: Job) -> Outcome {
    let outcome = job.passes();
    let stats = outcome.stats();
    stats.check_complete();
    assert!(
        stats.total("sends_rts") > 0,
        "no message was taken:\n{outcome}"
    );
    outcome
}

fn p2p(mpi: &Mpi) {
    let outcome = complete(job(mpi, 2, "p2p").chooses_transport());
    // Both ranks, from the device to either kind of memory: five sizes by each call, four by those with large counts. Open
    // MPI 4 has none that do not block.
    let calls = if mpi.family == Family::OpenMpi4 { 1 } else { 2 };
    let replaced = outcome.stats().fallback("replace");
    assert_eq!(replaced, 2 * 2 * (5 + 4) * calls, "{outcome}");
}

/// Long messages from host memory go by descriptor once their receiver was seen to bring them to a device.
fn from_host(mpi: &Mpi) {
    for verify in ["off", "on"] {
        let outcome = job(mpi, 2, "p2p")
            .args(&["from_host"])
            .env("ANABRANCH_VERIFY", verify)
            .passes();
        let stats = outcome.stats();
        stats.check_complete();
        let total = |name: &str| stats.total(name);
        // Of each of seven streams the program says which. Below the eager limit all but the one by MPI_Ssend, of the sixth
        // stream, lie in host memory before their receiver hears of them.
        assert_eq!(total("sends_host_rts"), 35, "{outcome}");
        let lengths = [65536, 70001, (1 << 20) + 1, (5 << 20) + 7, 300_000];
        let by_ring = 5 * lengths.iter().sum::<u64>() + 8192;
        let eager = 4 * 8192 + 5 * 16383;
        assert_eq!(total("sends_host_rts_bytes"), by_ring + eager, "{outcome}");
        assert_eq!(total("receives_host_pipeline"), 26, "{outcome}");
        assert_eq!(total("receives_host_pipeline_bytes"), by_ring, "{outcome}");
        assert_eq!(total("sends_eager"), 9, "{outcome}");
        assert_eq!(total("receives_eager"), 9, "{outcome}");
        assert_eq!(total("receives_eager_bytes"), eager, "{outcome}");
        assert_eq!(total("receives_bcopy"), 21, "{outcome}");
        assert_eq!(total("verified") > 0, verify == "on", "{outcome}");
    }
}

/// The same by persistent requests: two at once, of four streams.
fn from_host_persistent(mpi: &Mpi) {
    for verify in ["off", "on"] {
        let outcome = job(mpi, 2, "p2p")
            .args(&["from_host_persistent"])
            .env("ANABRANCH_VERIFY", verify)
            .passes();
        let stats = outcome.stats();
        stats.check_complete();
        // The program says which: 5 of 9, and 6 of 10 where the last one is by descriptor, too.
        let bytes = 6 * 8192 + 5 * 65536 + 6 * 300_001 + 5 * ((5 << 20) + 7);
        assert_eq!(
            stats.total("sends_host_rts"),
            2 * (6 + 5 + 6 + 5),
            "{outcome}"
        );
        assert_eq!(stats.total("sends_host_rts_bytes"), 2 * bytes, "{outcome}");
    }
}

fn requests(mpi: &Mpi) {
    complete(job(mpi, 2, "requests"));
    for roles in ["D", "DH", "HD"] {
        // Looks at a buffer until a receive whose request was freed has filled it: unordered by nature.
        job(mpi, 2, "requests")
            .args(&["freed"])
            .roles(roles)
            .env("SIMCUDA_CHECK", "0")
            .passes()
            .stats()
            .check_complete();
    }
}

fn probe(mpi: &Mpi) {
    complete(job(mpi, 2, "probe"));
}

fn order(mpi: &Mpi) {
    let outcome = job(mpi, 4, "order").passes();
    assert!(
        outcome.stats().total("truncated") > 0,
        "no truncated message was served:\n{outcome}"
    );
    for counter in ["panics", "dead_peers", "bad_rts"] {
        assert_eq!(outcome.stats().total(counter), 0, "{counter}:\n{outcome}");
    }
}

fn types(mpi: &Mpi) {
    complete(job(mpi, 2, "types"));
}

fn comms(mpi: &Mpi) {
    complete(job(mpi, 4, "comms"));
}

fn threads(mpi: &Mpi) {
    complete(job(mpi, 2, "threads"));
}

fn stress(mpi: &Mpi) {
    complete(job(mpi, 4, "stress").args(&["1", "10"]));
}

/// The sessions model without MPI_Init may stay native: it must work as it does without the library.
fn sessions(mpi: &Mpi) {
    if on_real_gpus() {
        // Open MPI over UCX has no sessions, and nothing else knows CUDA: without device buffers, then.
        let job = job(mpi, 2, "sessions").roles("H");
        job.env("OMPI_MCA_pml", "ob1").passes();
        return;
    }
    let mut job = over_an_mpi_that_knows_cuda(job(mpi, 2, "sessions"));
    if mpi.family == Family::OpenMpi4 {
        // It has no sessions, and the program does nothing.
        job = job.without_device();
    }
    job.passes();
}

/// Spawned worlds stay native, or go by host memory.
fn spawned(mpi: &Mpi) {
    if mpi.name == "mpich" {
        return cannot_be_made_here(
            "no spawned worlds",
            "Debian's MPICH 4.0.2 cannot spawn at all",
        );
    }
    over_an_mpi_that_knows_cuda(job(mpi, 2, "spawn").through_launcher()).passes();
    // Of an MPI library that must see no device memory the new world goes by host memory.
    let outcome = job(mpi, 2, "spawn").through_launcher().passes();
    let stats = outcome.stats();
    stats.check_complete();
    assert!(stats.total("sends_bcopy") > 0, "{outcome}");
    // `anabranch run` hands the library, and its simulated driver, to spawned processes, too.
    if on_real_gpus() {
        return;
    }
    let program = program(mpi, "spawn").unwrap_or_else(|error| panic!("{}", error.0));
    let program = program.display().to_string();
    let launcher = mpi.mpirun.display().to_string();
    let mut command = vec!["run", "--sim", "hgx-h200", "-np", "2", "--mpi", &launcher];
    command.extend(["--", &program]);
    let finished = anabranch(&command, &[]);
    assert_eq!(finished.code, Some(0), "{finished:?}");
}

/// Small messages by value, as between ranks of which one is not ready, beside large ones by descriptor.
fn small_by_value(mpi: &Mpi) {
    for (name, ranks) in [("p2p", 2), ("probe", 2), ("requests", 2)] {
        complete(job(mpi, ranks, name).env("ANABRANCH_THRESHOLD", "16K"));
    }
    complete(
        job(mpi, 4, "stress")
            .args(&["100", "6"])
            .env("ANABRANCH_THRESHOLD", "16K"),
    );
}

/// A rank that never touches CUDA sends to one that does: nobody makes a context for it (the programs check).
fn host_only_sender(mpi: &Mpi) {
    for (name, ranks) in PROGRAMS {
        job(mpi, ranks, name)
            .roles("HD")
            .passes()
            .stats()
            .check_complete();
    }
}

/// A rank that never touches CUDA receives from one that does.
fn host_only_receiver(mpi: &Mpi) {
    for (name, ranks) in PROGRAMS {
        complete(job(mpi, ranks, name).roles("DH"));
    }
}

/// Receives that were posted before their rank takes part, and are complete by then: while a thread is on its way out of the
/// call that has completed them, or beside requests of another kind.
fn taking_part(mpi: &Mpi) {
    for case in ["same_stream", "another_stream", "beside_persistent"] {
        let outcome = job(mpi, 2, "taking_part")
            .args(&[case])
            .roles("HD")
            .passes();
        let stats = outcome.stats();
        stats.check_complete();
        // All that its peer sends once it is ready, and nothing before.
        assert_eq!(stats.total("sends_rts"), 20, "{outcome}");
        assert_eq!(stats.total("probes_rts"), 20, "{outcome}");
    }
}

/// The programs are right by themselves: they pass on the plain library, with device memory that the host may read.
mod natively {
    use super::*;

    fn passes(mpi: &str, programs: &[(&str, usize)]) {
        on(mpi, |mpi| {
            for (name, ranks) in programs {
                if !support::knows_cuda(mpi) {
                    needs_simulator("an MPI library that knows CUDA");
                }
                let Some(job) = support::natively(mpi, *ranks, name, &[]) else {
                    continue;
                };
                let outcome = job.without_preload().passes();
                assert!(outcome.stats.is_none(), "no library, no summary");
            }
        });
    }

    #[test]
    fn openmpi() {
        passes("openmpi", &PROGRAMS);
        passes("openmpi", &[("order", 4), ("stress", 4)]);
    }

    #[test]
    fn mpich() {
        passes("mpich", &PROGRAMS);
        passes("mpich", &[("order", 4), ("stress", 4)]);
    }

    #[test]
    fn without_deadlock() {
        passes("openmpi", &[("deadlock", 2)]);
    }
}

/// The same device buffers, of a test program and of the solver, crash the plain MPICH, which proves that device addresses
/// fault under host code.
#[test]
fn device_buffers_crash_without_the_library() {
    needs_simulator("an MPI library that does not know CUDA");
    for name in ["mpich", "mpich5"] {
        on(name, |mpi| {
            let small = job(mpi, 2, "p2p").args(&["small"]);
            let solver = Job::new(mpi, 2, &solver(mpi));
            for job in [
                small,
                solver.args(&["--size", "64x64", "--iterations", "1"]),
            ] {
                let outcome = job.without_preload().run();
                let finished = &outcome.finished;
                assert!(finished.code.is_some_and(|code| code != 0), "{outcome}");
                let said = finished.stdout.lines();
                let mut said = said.filter(|line| line.contains("THE EXIT STRING"));
                let by_signal = |line: &str| line.contains("(signal 11)");
                assert!(said.any(by_signal), "{outcome}");
            }
        });
    }
}

/// Two ranks, and then four, share a GPU, or two of them each. They say nothing.
fn ranks_share_a_gpu(mpi: &Mpi) {
    let cases = ["medium", "both_ways", "ring"];
    for job in [
        job(mpi, 2, "p2p").args(&cases).env("GPUS", "1"),
        job(mpi, 4, "stress").args(&["300", "2"]).env("GPUS", "1"),
        job(mpi, 4, "stress").args(&["310", "1"]).env("GPUS", "2"),
    ] {
        let outcome = complete(job);
        let said = outcome.finished.stderr.lines();
        let mut said = said.filter(|line| line.starts_with("anabranch["));
        // A real MPI library may have a buffer open itself, in a context of its own, which then cannot be pushed to.
        let is_open = |line: &str| {
            on_real_gpus()
                && (line.contains("the handle is already open in this process")
                    || line.contains("its sender could not go on with a path"))
        };
        assert!(said.all(is_open), "{outcome}");
    }
}

/// A rank without the library beside ranks that have it gets messages that it understands.
#[test]
fn a_rank_without_the_library() {
    for name in ["openmpi", "mpich", "openmpi5", "mpich5"] {
        on(name, |mpi| {
            for (without, roles) in [(1, "DH"), (0, "HD")] {
                let outcome = job(mpi, 2, "p2p")
                    .without_preload_on(without)
                    .roles(roles)
                    .passes();
                // What goes by descriptor is what the one rank sends to itself.
                let (sent, own) = (
                    outcome.stats().total("sends_rts"),
                    outcome.stats().total("receives_self")
                        + outcome.stats().total("receives_host_pipeline")
                        + outcome.stats().total("receives_eager"),
                );
                assert_eq!(sent, own, "{outcome}");
                assert_eq!(outcome.stats().ranks(), 1, "{outcome}");
            }
        });
    }
}

/// Bounded resources run out: messages go by value, and arrive.
#[test]
fn few_resources() {
    on("mpich", |mpi| {
        for settings in [
            [("ANABRANCH_SLOTS", "0"), ("ANABRANCH_EAGER", "16K")],
            [("ANABRANCH_SLOTS", "8"), ("ANABRANCH_STAGING", "2M")],
            [("ANABRANCH_STAGING", "0"), ("ANABRANCH_THRESHOLD", "16K")],
            [("ANABRANCH_MAPPING_COUNT", "1"), ("ANABRANCH_CHUNK", "64K")],
            [("ANABRANCH_EAGER", "0"), ("ANABRANCH_LANDING", "0")],
        ] {
            let mut stress = job(mpi, 4, "stress").args(&["500", "4"]);
            for (name, value) in settings {
                stress = stress.env(name, value);
            }
            stress.passes().stats().check_complete();
        }
    });
}

/// Without its helper thread a rank gets no descriptors, and everything still arrives.
#[test]
fn helper_off() {
    on("openmpi", |mpi| {
        let outcome = job(mpi, 4, "stress")
            .args(&["600", "4"])
            .env("ANABRANCH_HELPER", "off")
            .passes();
        outcome.stats().check_complete();
        assert!(outcome.stats().fallback("helper_off") > 0, "{outcome}");
    });
}

/// The messages of one case of `memory_kinds`: four kinds of memory at the receiver (three of them the device's), six
/// sizes (two of them large enough for a descriptor), three ways.
const KINDS: u64 = 4;
const DEVICE_KINDS: u64 = 3;
const LARGE: [u64; 2] = [100_001, (4 << 20) + 3];
const WAYS: u64 = 3;

/// One message in host and device memory at once, by every way to send and to receive it.
fn mixed(mpi: &Mpi) {
    let seed = std::process::id().to_string();
    for verify in ["off", "on"] {
        let outcome = job(mpi, 2, "mixed")
            .env("SEED", &seed)
            .env("ANABRANCH_VERIFY", verify)
            .passes();
        let stats = outcome.stats();
        stats.check_complete();
        let output = &outcome.finished.stdout;
        let told = output
            .lines()
            .find_map(|line| line.strip_prefix("sent in parts: "));
        let told: u64 = told.and_then(|n| n.parse().ok()).expect("told");
        assert!(told > 50, "seed {seed}:\n{outcome}");
        assert_eq!(stats.fallback("mixed"), told, "seed {seed}:\n{outcome}");
        assert!(
            stats.total("receives_host_pipeline") > 0,
            "seed {seed}:\n{outcome}"
        );
    }
}

/// Memory of every kind is sent and received: by descriptor from all that is the device's, straight from
/// where it is if legacy IPC covers it, else through memory of the sender's GPU, or of the host where it goes
/// to that. Managed memory is the host's to MPI.
fn memory_kinds(mpi: &Mpi) {
    // Which small message is read directly and which from a cell is a race, so the numbers are those of large ones.
    let run = |case: &str| {
        let job = job(mpi, 2, "memory_kinds").args(&[case]);
        job.env("ANABRANCH_THRESHOLD", "16K").passes()
    };
    let large = KINDS * LARGE.len() as u64 * WAYS;
    let large_bytes = KINDS * LARGE.iter().sum::<u64>() * WAYS;
    for (case, exportable) in [
        ("from_plain", true),
        ("from_pool", false),
        ("from_mapped", false),
    ] {
        let outcome = run(case);
        let stats = outcome.stats();
        stats.check_complete();
        let total = |counter| stats.total(counter);
        assert_eq!(total("sends_rts"), large, "{case}:\n{outcome}");
        assert_eq!(total("sends_rts_bytes"), large_bytes, "{case}:\n{outcome}");
        let to_device = large / KINDS * DEVICE_KINDS;
        let (direct, by_gpu_ring) = match exportable {
            true => (to_device, 0),
            false => (0, to_device),
        };
        assert_eq!(total("receives_direct"), direct, "{case}:\n{outcome}");
        assert_eq!(
            total("receives_gpu_pipeline"),
            by_gpu_ring,
            "{case}:\n{outcome}"
        );
        assert_eq!(
            total("receives_gpu_pipeline_bytes"),
            by_gpu_ring / LARGE.len() as u64 * LARGE.iter().sum::<u64>(),
            "{case}:\n{outcome}"
        );
        assert_eq!(
            total("receives_host_pipeline"),
            large - to_device,
            "{case}:\n{outcome}"
        );
        let refused = if exportable { 0 } else { large };
        assert_eq!(
            stats.fallback("not_exportable"),
            refused,
            "{case}:\n{outcome}"
        );
        assert_eq!(stats.fallback("mapping_failed"), 0, "{case}:\n{outcome}");
        assert_eq!(stats.fallback("driver_error"), 0, "{case}:\n{outcome}");
    }
    let outcome = run("from_managed");
    outcome.stats().check_complete();
    assert_eq!(outcome.stats().total("sends_device"), 0, "{outcome}");
    // What the program has mapped itself is mapped once more.
    held_by_program(&run("held_by_program"), false);
    complete(job(mpi, 2, "memory_kinds"));
    if !is_long() && mpi.family != Family::OpenMpi4 {
        return;
    }
    let shared = complete(job(mpi, 2, "memory_kinds").env("GPUS", "1"));
    // Ranks that share a GPU take its memory for messages of 16 MiB and more only.
    let by_path = |path: &str| shared.stats().total(&format!("receives_{path}_pipeline"));
    assert!(by_path("gpu") == 0 && by_path("host") > 0, "{shared}");
}

/// Memory that the program has mapped itself and allocated for file descriptors is read where it is: chunk by
/// chunk, each sent once to each peer, and anew once one of them was unmapped. The expected bytes are the
/// program's.
#[test]
fn mapped_memory_is_read_where_it_is() {
    const MESSAGES: u64 = 24;
    for (name, ranks) in some(&[("mpich5", 4), ("openmpi", 2)], 1) {
        on(name, |mpi| {
            let run = |case: &str, vmm: &str, files: &str| {
                let outcome = job(mpi, ranks, "memory_kinds")
                    .args(&[case])
                    .env("SEED", &std::process::id().to_string())
                    .env("HANDLE_TYPES", files)
                    .env("ANABRANCH_VMM", vmm)
                    .passes();
                outcome.stats().check_complete();
                outcome
            };
            let pairs = u64::from(ranks as u32) / 2;
            let outcome = run("segment", "on", "1");
            let total = |name: &str| outcome.stats().total(name);
            // The first messages of a job may go by value.
            let ready = MESSAGES * pairs - outcome.stats().fallback("not_ready");
            let read = total("receives_direct") + total("receives_multipath");
            assert_eq!(
                (read, total("receives_gpu_pipeline")),
                (ready, 0),
                "{outcome}"
            );
            // Each rank sends from three chunks, and from one more before it finds that one has changed; then
            // from five others.
            let sent = total("chunks_sent");
            assert!((2 * 4 * pairs..=2 * 9 * pairs).contains(&sent), "{outcome}");
            assert_eq!(total("chunks_mapped"), sent, "{outcome}");
            assert!(total("allocations_retired") >= 2 * pairs, "{outcome}");
            assert_eq!(outcome.stats().fallback("mapping_failed"), 0, "{outcome}");
            // Of 40 short messages from each of two chunks 16 come through the cells of their sender, before the
            // chunk is sent.
            let outcome = run("short_ones", "on", "1");
            let total = |name: &str| outcome.stats().total(name);
            assert_eq!(total("chunks_mapped"), 2 * pairs, "{outcome}");
            let unshared = outcome.stats().fallback("not_exportable");
            assert_eq!(unshared, 2 * 16 * pairs, "{outcome}");
            for (vmm, files) in [("off", "1"), ("on", "0")] {
                let outcome = run("segment", vmm, files);
                assert_eq!(outcome.stats().total("chunks_sent"), 0, "{outcome}");
                assert!(
                    outcome.stats().total("receives_gpu_pipeline") > 0,
                    "{outcome}"
                );
            }
            if ranks > 2 {
                return;
            }
            for case in ["from_mapped", "both_ways", "grown", "windows"] {
                let outcome = run(case, "on", "1");
                let mapped = outcome.stats().total("chunks_mapped");
                assert!(mapped > 0, "{case}: {outcome}");
            }
            // What the program's memsets still write is copied behind them, by its own process.
            for case in ["unfinished", "to_self"] {
                let outcome = run(case, "on", "1");
                let sent = outcome.stats().total("chunks_sent");
                assert_eq!(sent, 0, "{case}: {outcome}");
            }
        });
    }
}

/// A driver that does not export chunks, or does not import them: each message comes another way, and of what
/// lasts one line is said.
#[test]
fn chunks_that_the_driver_refuses() {
    needs_simulator("driver calls that fail");
    on("openmpi", |mpi| {
        for (fault, lasts) in [
            (
                "cuMemExportToShareableHandle:1+=CUDA_ERROR_NOT_SUPPORTED",
                true,
            ),
            (
                "cuMemImportFromShareableHandle:1+=CUDA_ERROR_INVALID_VALUE",
                true,
            ),
            (
                "cuMemExportToShareableHandle:2=CUDA_ERROR_OUT_OF_MEMORY",
                false,
            ),
            ("cuMemRetainAllocationHandle:1=CUDA_ERROR_UNKNOWN", false),
            ("cuMemImportFromShareableHandle:2=CUDA_ERROR_UNKNOWN", false),
        ] {
            let outcome = job(mpi, 2, "memory_kinds")
                .args(&["segment"])
                .env("SEED", &std::process::id().to_string())
                .env("HANDLE_TYPES", "1")
                .env("ANABRANCH_VMM", "on")
                .env("SIMCUDA_FAULT", fault)
                .passes();
            outcome.stats().check_complete();
            let total = |name: &str| outcome.stats().total(name);
            let staged = total("receives_gpu_pipeline") + total("receives_host_pipeline");
            assert!(staged > 0, "{fault}: {outcome}");
            assert_eq!(total("chunks_mapped") == 0, lasts, "{fault}: {outcome}");
            let said = outcome.finished.stderr.matches("does not find memory");
            assert_eq!(
                said.count(),
                if lasts { 2 } else { 0 },
                "{fault}: {outcome}"
            );
        }
    });
}

/// Windows of messages that cannot be read where they are, where staging on the GPU holds few of them, and
/// where there is none.
#[test]
fn windows_of_what_cannot_be_exported() {
    for (name, ranks) in some(&[("mpich", 2), ("mpich5", 2), ("openmpi5", 4)], 1) {
        on(name, |mpi| {
            for (option, value) in [
                ("ANABRANCH_RELAY_STAGING", "64M"),
                ("ANABRANCH_RELAY_STAGING", "1M"),
                ("ANABRANCH_GPU_PIPELINE", "off"),
            ] {
                let outcome = job(mpi, ranks, "memory_kinds")
                    .args(&["windows"])
                    .env("SEED", &std::process::id().to_string())
                    .env(option, value)
                    .passes();
                let stats = outcome.stats();
                stats.check_complete();
                let lines = outcome.finished.stdout.lines();
                let long = lines.filter_map(|line| line.strip_prefix("long: ")).next();
                let long: u64 = long.and_then(|n| n.parse().ok()).expect("told");
                // The first messages of a job may go by value.
                let on_gpu = match option {
                    "ANABRANCH_GPU_PIPELINE" => 0..=0,
                    _ => long - stats.fallback("not_ready")..=long,
                };
                let by_gpu_ring = stats.total("receives_gpu_pipeline");
                assert!(on_gpu.contains(&by_gpu_ring), "{outcome}");
                assert_eq!(stats.total("driver_retries"), 0, "{outcome}");
            }
        });
    }
}

/// The program has the buffer of all messages open for the first half of them, and the driver opens it once more, or refuses to.
fn held_by_program(outcome: &Outcome, is_refused: bool) {
    outcome.stats().check_complete();
    let total = |counter| outcome.stats().total(counter);
    // The first messages of a program go by value, until both ranks have used a device and said so.
    let descriptors = total("sends_rts");
    assert!((7..=8).contains(&descriptors), "{outcome}");
    let refused = if is_refused { descriptors - 4 } else { 0 };
    assert_eq!(total("receives_direct"), descriptors - refused, "{outcome}");
    assert_eq!(total("receives_host_pipeline"), refused, "{outcome}");
    let failed = outcome.stats().fallback("mapping_failed");
    assert_eq!(failed, refused, "{outcome}");
}

/// A driver that opens an allocation once in a process: what the program has open comes through host memory, and is asked
/// for anew each time.
#[test]
fn mapped_by_the_program_alone() {
    for name in ["openmpi", "mpich"] {
        on(name, |mpi| {
            let outcome = job(mpi, 2, "memory_kinds")
                .args(&["held_by_program"])
                .env("ANABRANCH_THRESHOLD", "16K")
                .env("SIMCUDA_IPC_ONCE", "1")
                .passes();
            held_by_program(&outcome, true);
        });
    }
}
