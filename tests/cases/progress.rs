//! Nothing that works natively deadlocks. Each program says by itself which case hangs; a run is bounded besides.
//!
//! That nothing hangs shows something only where the messages were the library's, so each test knows from what its program
//! sends how many there are, and of which kind, and holds the counters against it.

use crate::support::{in_one_of_several, is_long, job, on, on_every_mpi, some};
use anabranch_tests::{built, needs_simulator, Job, Outcome};
use xtask::mpi::Mpi;

/// The cases of `deadlock` but those with many messages.
const CASES: [&str; 8] = [
    "pending_barrier",
    "pending_allreduce",
    "pending_comm_dup",
    "pending_win_fence",
    "pending_write_all",
    "head_to_head",
    "busy",
    "everyone",
];

/// Up to this size a standard send completes without its receiver: the default of ANABRANCH_EAGER.
const EAGER: u64 = 16 << 10;
/// Messages from host memory below that are left to the MPI library.
const HOST_BYTES_MIN: u64 = 8 << 10;
/// Cells for payloads of such sends that a rank has.
const CELLS: u64 = 256;

/// Ranks that compute between exchanges: neither wakes the other's helper, as each will come by itself.
/// Before, half of all messages did.
#[test]
fn helpers_are_left_asleep_between_exchanges() {
    for (name, library) in [("openmpi5", "openmpi"), ("mpich", "mpich")] {
        on(name, |mpi| {
            let exchanges = 400;
            let run = || {
                let outcome = Job::new(mpi, 2, &built().command)
                    .args(&["bench", "exchange", "--away", "cpu:300us", "--sizes", "8K"])
                    .args(&["--warmup", "0", "--iterations", &exchanges.to_string()])
                    .args(&["--mpi", library])
                    .run();
                assert_eq!(outcome.finished.code, Some(0), "{outcome}");
                let stats = outcome.stats();
                let (sent, woken) = (stats.total("sends_rts"), stats.total("helper_wakeups"));
                assert!(sent > 3 * exchanges, "{outcome}");
                (woken * 5 < sent, outcome.to_string())
            };
            in_one_of_several(run);
        });
    }
}

on_every_mpi!(
    pending,
    pending_host_only_receiver,
    pending_host_only_sender,
    reverse_tags,
    unreceived_host,
    unreceived_device,
    finalize_with_unmatched_traffic,
    finalize_long_after_a_peer,
);

/// Messages of one size and kind that a program sends.
#[derive(Clone, Copy)]
struct Sent {
    count: u64,
    bytes: u64,
    from_device: bool,
    to_device: bool,
    /// Their mode is standard.
    standard: bool,
}

/// What the ranks' memory is, as `buf_new` has it: a rank of role H has no device.
struct Ranks<'a> {
    count: u64,
    roles: &'a str,
}

impl Ranks<'_> {
    fn has_device(&self, rank: u64) -> bool {
        let roles = self.roles.as_bytes();
        roles[rank as usize % roles.len()] == b'D'
    }

    /// The even and the odd rank of each pair.
    fn pairs(&self) -> impl Iterator<Item = (u64, u64)> {
        (0..self.count / 2).map(|pair| (2 * pair, 2 * pair + 1))
    }

    fn sent(&self, (from, from_device): (u64, bool), (to, to_device): (u64, bool)) -> Sent {
        Sent {
            count: 1,
            bytes: 0,
            from_device: from_device && self.has_device(from),
            to_device: to_device && self.has_device(to),
            standard: true,
        }
    }

    /// The kinds of memory of `FOR_ENDS`: of both ends, where each has both; otherwise those that differ.
    fn ends(&self, (even, odd): (u64, u64)) -> impl Iterator<Item = Sent> + '_ {
        let kinds = |rank| match self.has_device(rank) {
            true => vec![false, true],
            false => vec![false],
        };
        let of_odd = kinds(odd);
        let both = kinds(even).into_iter();
        both.flat_map(move |from| of_odd.clone().into_iter().map(move |to| (from, to)))
            .map(move |(from, to)| self.sent((even, from), (odd, to)))
    }

    /// What a case of `deadlock` sends.
    fn of_case(&self, case: &str) -> Vec<Sent> {
        match case {
            "head_to_head" => self.head_to_head(),
            "everyone" => self.everyone(),
            "busy" => self.pairwise(&[61, 70_000, 4 << 20], 2, 0),
            // Six patterns, of which two are synchronous sends.
            _ => self.pairwise(&[100, 61, 70_000, 4 << 20], 4, 2),
        }
    }

    /// From the even ranks to the odd ones, of each size so many standard and synchronous sends.
    fn pairwise(&self, sizes: &[u64], standard: u64, synchronous: u64) -> Vec<Sent> {
        let ends = self.pairs().flat_map(|pair| self.ends(pair));
        let of_sizes = ends.flat_map(|sent| sizes.iter().map(move |bytes| (sent, *bytes)));
        let of_modes = of_sizes.flat_map(|(sent, bytes)| {
            let of = |count, standard| Sent {
                count,
                bytes,
                standard,
                ..sent
            };
            [of(standard, true), of(synchronous, false)]
        });
        of_modes.collect()
    }

    /// Twenty each way, of each pair of kinds: those of more than 2048 bytes from what is a device's to ranks that have one.
    fn head_to_head(&self) -> Vec<Sent> {
        const SIZES: [u64; 8] = [1, 61, 1000, 2048, 4000, 4096, EAGER - 1, EAGER];
        let both_ways = self
            .pairs()
            .flat_map(|(even, odd)| [(even, odd), (odd, even)]);
        let kinds = [(false, false), (true, false), (false, true), (true, true)];
        let of_kinds = both_ways.flat_map(|ranks| kinds.map(|kinds| (ranks, kinds)));
        let of_sizes = of_kinds.flat_map(|of| SIZES.map(|bytes| (of, bytes)));
        let is_sent =
            |(_, (from_device, _)): &(_, (bool, bool)), bytes: u64| bytes <= 2048 || *from_device;
        of_sizes
            .filter(|(of, bytes)| is_sent(of, *bytes))
            .map(|(((from, to), (from_device, to_device)), bytes)| Sent {
                count: 20,
                bytes,
                ..self.sent((from, from_device), (to, to_device))
            })
            .collect()
    }

    /// Each to all, itself included, in five rounds.
    fn everyone(&self) -> Vec<Sent> {
        let all = (0..5).flat_map(|round| (0..self.count).map(move |from| (round, from)));
        let all = all.flat_map(|(round, from)| (0..self.count).map(move |to| (round, from, to)));
        all.map(|(round, from, to)| Sent {
            bytes: 200_000,
            ..self.sent(
                (from, (from + to + round) % 2 == 1),
                (to, (3 * to + from) % 2 == 1),
            )
        })
        .collect()
    }
}

/// How many of these messages are so.
fn count(all: &[Sent], is_so: impl Fn(&Sent) -> bool) -> u64 {
    let those = all.iter().filter(|sent| is_so(sent));
    those.map(|sent| sent.count).sum()
}

/// Their bytes.
fn size(all: &[Sent], is_so: impl Fn(&Sent) -> bool) -> u64 {
    let those = all.iter().filter(|sent| is_so(sent));
    those.map(|sent| sent.count * sent.bytes).sum()
}

/// Nothing is too small for a descriptor.
const NO_THRESHOLD: u64 = 0;

/// A run in which the ranks knew of each other's devices before these messages were sent: all that were sent from device
/// memory went by descriptor, but for those below the threshold, and came by the path of their kind. `met` messages before
/// them have introduced the ranks, from host to device memory.
fn check_carried(outcome: &Outcome, all: &[Sent], threshold: u64, met: u64) {
    let stats = outcome.stats();
    stats.check_complete();
    let total = |counter: &str| stats.total(counter);
    let by_descriptor = |s: &Sent| s.from_device && s.bytes >= threshold;
    let by_value = |s: &Sent| s.from_device && s.bytes < threshold;
    for (way, went) in [
        ("sends_rts", &by_descriptor as &dyn Fn(&Sent) -> bool),
        ("sends_bcopy", &by_value),
        ("sends_device", &|s| s.from_device),
    ] {
        let bytes = format!("{way}_bytes");
        assert_eq!(total(way), count(all, went), "{way}:\n{outcome}");
        assert_eq!(total(&bytes), size(all, went), "{bytes}:\n{outcome}");
    }
    let within = |what: &str, least, most| {
        let value = total(what);
        assert!(
            (least..=most).contains(&value),
            "{what}: {value}, not {least} to {most}\n{outcome}"
        );
    };
    // A small standard send is claimed by its receiver, or completes before that and is taken from its cell: a race.
    let is_alone = |s: &Sent| s.standard && s.bytes <= EAGER;
    let to_device = |s: &Sent| by_descriptor(s) && s.to_device;
    let to_host = |s: &Sent| by_descriptor(s) && !s.to_device;
    let straight = total("receives_direct") + total("receives_multipath");
    let expected = count(all, |s| to_device(s) && !is_alone(s))..=count(all, to_device);
    assert!(
        expected.contains(&straight),
        "{straight}, not {expected:?} from device to device:\n{outcome}"
    );
    // Long messages from host memory go by descriptor, too, where the one before was brought to a device, which the sender
    // may learn one message late.
    let is_long = |s: &Sent| !s.from_device && s.bytes >= HOST_BYTES_MIN;
    let from_host = total("sends_host_rts");
    within("sends_host_rts", 0, count(all, is_long));
    let least = count(all, |s| to_host(s) && !is_alone(s));
    within(
        "receives_host_pipeline",
        least,
        count(all, to_host) + from_host,
    );
    let may_be_hosted = |s: &Sent| is_alone(s) && (by_descriptor(s) || is_long(s));
    within("receives_eager", 0, count(all, may_be_hosted));
    within("sends_eager", 0, total("receives_eager"));
    // What was sent from host to device memory has come by value, or by those descriptors that did not meet host memory.
    let met_host = total("receives_host_fetched");
    assert!(met_host >= count(all, to_host), "{outcome}");
    let brought_up = total("receives_bcopy") + from_host + count(all, to_host) - met_host;
    let from_value = |s: &Sent| s.to_device && !by_descriptor(s);
    let expected = met + count(all, from_value);
    assert_eq!(
        brought_up, expected,
        "to devices, but not from there:\n{outcome}"
    );
}

/// Runs these cases of `deadlock`, and checks all that they send.
fn carried(job: Job, roles: &str, cases: &[&str], threshold: u64) -> Outcome {
    let ranks = Ranks {
        count: job.ranks() as u64,
        roles,
    };
    let job = job.args(&["acquainted"]).args(cases).roles(roles);
    let outcome = job
        .env("ANABRANCH_THRESHOLD", &threshold.to_string())
        .passes();
    let all = cases.iter().flat_map(|case| ranks.of_case(case));
    let all: Vec<Sent> = all.filter(|sent| sent.count > 0).collect();
    let paired = ranks.pairs().flat_map(|(even, odd)| [even, odd]);
    let met = paired.filter(|rank| ranks.has_device(*rank)).count() as u64;
    check_carried(&outcome, &all, threshold, met);
    // In each pending case twelve long messages go from the host to the device, one after the other. The first goes by
    // value, and the second may.
    let pending = cases.iter().filter(|case| case.starts_with("pending_"));
    let odd = ranks.pairs().filter(|(_, odd)| ranks.has_device(*odd));
    let least = (10 * pending.count() * odd.count()) as u64;
    let from_host = outcome.stats().total("sends_host_rts");
    assert!(from_host >= least, "{from_host} < {least}:\n{outcome}");
    outcome
}

fn pending(mpi: &Mpi) {
    let outcome = carried(job(mpi, 2, "deadlock"), "D", &CASES, NO_THRESHOLD);
    // Of two sends head to head one at least completes without its receiver: from its cell.
    let ranks = Ranks {
        count: 2,
        roles: "D",
    };
    let head_to_head = ranks.of_case("head_to_head");
    let least = count(&head_to_head, |s| s.from_device) / 2;
    let least_bytes = size(&head_to_head, |s| s.from_device) / 2;
    let total = |counter| outcome.stats().total(counter);
    assert!(total("sends_eager") >= least, "{outcome}");
    assert!(total("receives_eager_bytes") >= least_bytes, "{outcome}");
}

fn pending_host_only_receiver(mpi: &Mpi) {
    carried(job(mpi, 2, "deadlock"), "DH", &CASES, NO_THRESHOLD);
}

fn pending_host_only_sender(mpi: &Mpi) {
    carried(job(mpi, 2, "deadlock"), "HD", &CASES, NO_THRESHOLD);
}

/// A third rank that is in none of the transfers, and more ranks than cores.
#[test]
fn pending_among_others() {
    for (ranks, cases) in [
        (3, &["pending_barrier", "pending_comm_dup", "everyone"][..]),
        (8, &["pending_barrier", "everyone"]),
    ] {
        on("openmpi", |mpi| {
            let job = job(mpi, ranks, "deadlock").limit_seconds(300);
            carried(job, "D", cases, NO_THRESHOLD);
        });
    }
}

/// Small messages by value, as between ranks of which one is not ready.
#[test]
fn pending_small_by_value() {
    for name in ["openmpi", "mpich"] {
        on(name, |mpi| {
            let job = job(mpi, 2, "deadlock");
            let outcome = carried(job, "D", &CASES, EAGER + 1);
            assert_eq!(outcome.stats().total("sends_eager"), 0, "{outcome}");
        });
    }
}

fn reverse_tags(mpi: &Mpi) {
    for roles in ["D", "DH", "HD"] {
        let ranks = Ranks { count: 2, roles };
        // Of eight buffers that are sent from in turn one is in host memory; of two that are received into in turn, three
        // messages each, the second is in device memory. Each has a tag of its own, so none from the host goes by descriptor.
        let all: Vec<Sent> = (0..1000)
            .map(|i| Sent {
                bytes: 1 << 20,
                standard: true,
                ..ranks.sent((0, i % 8 != 3), (1, i / 3 % 2 == 1))
            })
            .collect();
        let job = job(mpi, 2, "deadlock").args(&["acquainted", "reverse_tags"]);
        let outcome = job.roles(roles).passes();
        let met = [0, 1]
            .iter()
            .filter(|rank| ranks.has_device(**rank))
            .count() as u64;
        check_carried(&outcome, &all, NO_THRESHOLD, met);
        let from_host = outcome.stats().total("sends_host_rts");
        assert_eq!(from_host, 0, "{outcome}");
    }
}

/// What is in host memory is the MPI library's, though this one takes part: it has brought what introduced the ranks.
fn unreceived_host(mpi: &Mpi) {
    let job = job(mpi, 2, "deadlock").args(&["acquainted", "unreceived_host"]);
    let outcome = job.passes();
    check_carried(&outcome, &[], NO_THRESHOLD, 2);
}

/// As many go by descriptor as there are cells, which nobody empties before their sender receives; all others by value.
fn unreceived_device(mpi: &Mpi) {
    // Both ways with one MPI library: it takes a quarter of a minute.
    let both_ways = mpi.name == "mpich" || (is_long() && mpi.name == "openmpi5");
    // With room in cells of 16 KiB for so many of them.
    let cases = [
        (
            "unreceived_device",
            if both_ways { "D" } else { "DH" },
            70_000,
            1024,
            16 * CELLS,
        ),
        ("unreceived_bytes", "DH", 34_000, 2000, 8 * CELLS),
    ];
    let few = if both_ways { cases.len() } else { 1 };
    for (case, roles, messages, bytes, fit) in some(&cases, few) {
        let ranks = Ranks { count: 2, roles };
        let job = job(mpi, 2, "deadlock").args(&["acquainted", case]);
        let outcome = job.roles(roles).limit_seconds(300).passes();
        let stats = outcome.stats();
        stats.check_complete();
        let senders: Vec<u64> = [0, 1]
            .into_iter()
            .filter(|rank| ranks.has_device(*rank))
            .collect();
        for rank in &senders {
            let total = |counter| stats.of_rank(*rank, counter);
            assert_eq!(total("sends_device"), messages, "{outcome}");
            assert_eq!(total("sends_device_bytes"), messages * bytes, "{outcome}");
            assert_eq!(total("sends_native"), 0, "{outcome}");
            assert!(total("sends_rts") >= fit, "{outcome}");
            assert!(total("sends_eager") >= fit, "{outcome}");
        }
        let by_value = stats.total("sends_bcopy");
        assert_eq!(stats.fallback("no_cell"), by_value, "{outcome}");
        // Each rank sends all before it receives any. So the one that was through first had no cell back until then.
        if roles == "D" {
            let of = |rank| stats.of_rank(rank, "sends_rts");
            assert_eq!(of(0).min(of(1)), fit, "{outcome}");
        }
        let brought_up = stats.total("receives_bcopy");
        let to_devices = if roles == "D" { by_value } else { messages };
        assert_eq!(brought_up, to_devices + senders.len() as u64, "{outcome}");
    }
    // Short ones share cells: none of these goes by value for want of one.
    let job = job(mpi, 2, "deadlock").args(&["acquainted", "unreceived_short"]);
    let outcome = job.roles("D").limit_seconds(300).passes();
    let stats = outcome.stats();
    stats.check_complete();
    assert_eq!(stats.fallback("no_cell"), 0, "{outcome}");
    let sent = stats.total("sends_eager");
    assert!(sent > 10_000, "{outcome}");
    // Of thousands that are not received yet, each pass looks at a few.
    let looks = stats.total("looks_at_sends");
    assert!(looks < 1000 * sent, "{looks} looks at {sent}: {outcome}");
}

fn finalize_with_unmatched_traffic(mpi: &Mpi) {
    let modes = ["eager", "isend", "both", "late"];
    let of_kind = |kind| modes.map(|mode| (mode, kind, "D"));
    let mixed = [
        ("both", "device", "DH"),
        ("late", "device", "DH"),
        ("late", "device", "HD"),
    ];
    for (mode, kind, roles) in of_kind("device")
        .into_iter()
        .chain(of_kind("host"))
        .chain(mixed)
    {
        // MPICH 4.0 over UCX 1.13 does not always end by itself while it holds a long send that nobody received: without
        // the library in 13 of 77 runs on busy cores.
        let is_native = kind == "host" || roles != "D";
        let is_native_rendezvous = is_native && matches!(mode, "isend" | "both");
        if mpi.name == "mpich" && is_native_rendezvous {
            continue;
        }
        let outcome = job(mpi, 2, "finalize")
            .args(&[mode, kind])
            .roles(roles)
            .passes();
        check_finalized(&outcome, mode, kind, roles);
    }
}

/// Where the kernel refuses CMA, as in containers, UCX moves MPICH's long messages by TCP. Both ranks then
/// answer each other in `MPI_Finalize`. MPICH 4.0 hangs if one of them makes progress after its peer has
/// entered `MPI_Finalize` and before it enters it itself.
fn finalize_long_after_a_peer(mpi: &Mpi) {
    for roles in ["D", "DH", "HD"] {
        let outcome = job(mpi, 2, "finalize")
            .args(&["apart", "device"])
            .roles(roles)
            .env("UCX_TLS", "^cma")
            .passes();
        let stats = outcome.stats();
        stats.check_sane();
        let of_device = roles.matches('D').count() as u64;
        let direct = if roles == "D" { 8 } else { 0 };
        let found = stats.total("receives_direct") + stats.total("receives_multipath");
        assert_eq!(found, direct, "{roles}:\n{outcome}");
        assert!(stats.total("sends_device") >= 4 * of_device, "{outcome}");
    }
}

/// Every message of `finalize` from device memory went by descriptor, and all but those that are late were never received.
fn check_finalized(outcome: &Outcome, mode: &str, kind: &str, roles: &str) {
    let ranks = Ranks { count: 2, roles };
    let has_device = |rank| kind == "device" && ranks.has_device(rank);
    let (small, large) = ((10, 1024), (1, 4 << 20));
    let sent: &[(u64, u64)] = match mode {
        "eager" => &[small],
        "both" => &[small, large],
        _ => &[large],
    };
    let senders = if mode == "both" { 0..2 } else { 0..1 };
    let senders = senders.filter(|rank| has_device(*rank)).count() as u64;
    let messages = senders * sent.iter().map(|(count, _)| count).sum::<u64>();
    let bytes = senders * sent.iter().map(|(count, bytes)| count * bytes).sum::<u64>();
    // Before that each sends and receives in one buffer.
    let replaced = (0..2).filter(|rank| has_device(*rank)).count() as u64;
    let alone = if sent[0] == small { senders * 10 } else { 0 };
    let is_late = mode == "late";
    let from_host_to_device = u64::from(is_late && !has_device(0) && has_device(1));
    let (to_device, to_host) = match is_late && has_device(0) {
        true => (u64::from(has_device(1)), u64::from(!has_device(1))),
        false => (0, 0),
    };
    let stats = outcome.stats();
    stats.check_sane();
    let straight = stats.total("receives_direct") + stats.total("receives_multipath");
    assert_eq!(straight, to_device, "{mode} {kind} {roles}:\n{outcome}");
    for (counter, value) in [
        ("sends_device", messages + replaced),
        ("sends_rts", messages),
        ("sends_rts_bytes", bytes),
        ("sends_bcopy", replaced),
        ("sends_host_rts", 0),
        ("sends_eager", alone),
        ("receives_eager", 0),
        ("receives_host_pipeline", to_host),
        ("receives_bcopy", replaced + from_host_to_device),
        ("finalize_unmatched", if is_late { 0 } else { messages }),
    ] {
        let found = stats.total(counter);
        assert_eq!(found, value, "{mode} {kind} {roles} {counter}:\n{outcome}");
    }
    assert_eq!(stats.fallback("replace"), replaced, "{outcome}");
}

/// Windows of messages that two ranks send to each other and verify.
const WINDOWS: u64 = 20;

fn windows_both_ways(mpi: &Mpi, name: &str, size: &str, window: u32) -> Outcome {
    let outcome = Job::new(mpi, 2, &built().command)
        .args(&["bench", "bibw", "--check", "--sizes", size])
        .args(&["--window", &window.to_string(), "--warmup", "0"])
        .args(&["--iterations", &WINDOWS.to_string(), "--mpi", name])
        .run();
    outcome.check_benched(1);
    outcome
}

/// Of windows that go both ways the first message that a rank receives is begun with while its program still sends: the links are idle
/// until then.
#[test]
fn a_window_is_begun_with_while_the_program_sends() {
    for name in ["openmpi", "mpich"] {
        on(name, |mpi| {
            let outcome = windows_both_ways(mpi, name, "2M", 4);
            // Of all windows of both, and of what is verified besides.
            let begun = outcome.stats().total("begun_between");
            assert!(
                begun > WINDOWS / 2,
                "{begun} in {WINDOWS} windows\n{outcome}"
            );
        });
    }
}

/// Messages that are short, or many and not long, are begun with together.
#[test]
fn short_messages_are_begun_with_together() {
    on("openmpi", |mpi| {
        for (window, size) in [(4, "512K"), (16, "2M")] {
            let outcome = windows_both_ways(mpi, "openmpi", size, window);
            assert_eq!(outcome.stats().total("begun_between"), 0, "{outcome}");
        }
    });
}

/// While a rank claims the messages of a window, it does what its own receivers ask of it: these wait for its part.
#[test]
fn receivers_are_served_between_two_claims() {
    needs_simulator("a node on which long messages go without their bytes");
    on("openmpi", |mpi| {
        let windows = 40;
        let run = || {
            let outcome = Job::new(mpi, 2, &built().command)
                .args(&["bench", "bibw", "--sizes", "64M", "--window", "16"])
                .args(&["--warmup", "0", "--mpi", "openmpi"])
                .args(&["--iterations", &windows.to_string()])
                .env("SIMCUDA_DATA", "0")
                .env("SIMCUDA_CHECK", "0")
                .run();
            let stats = outcome.stats();
            let sent = stats.total("sends_rts");
            assert_eq!(sent, 2 * 16 * windows, "{outcome}");
            let served = stats.total("served_between");
            (served > windows / 4, outcome.to_string())
        };
        in_one_of_several(run);
    });
}

/// The helper leaves the core that its rank is bound to for one that no rank is bound to, if there is one.
/// Beside a rank that is bound to no core it runs anywhere.
#[test]
fn a_helper_leaves_its_ranks_core_alone() {
    needs_simulator(
        "which processors there are, but not how many of them a GPU machine lets a job have",
    );
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    if processors < 2 {
        return;
    }
    on("mpich", |mpi| {
        // Debian's MPICH binds no rank by itself.
        let run = |wrapper: &str| -> Vec<(String, String)> {
            let outcome = job(mpi, 2, "bound")
                .ranks_under(&["sh", "-c", wrapper, "sh"])
                .passes();
            let lines = outcome.finished.stdout.lines();
            let told =
                lines.filter_map(|line| line.strip_prefix("rank ")?.split_once(": processors "));
            let told = told.filter_map(|(_, lists)| lists.split_once(", helper "));
            let told: Vec<_> = told
                .map(|(own, helper)| (own.to_owned(), helper.to_owned()))
                .collect();
            assert_eq!(told.len(), 2, "{outcome}");
            told
        };
        for (own, helper) in run("exec taskset -c 0 \"$@\"") {
            assert_eq!(own, "0");
            let first = helper.split([',', '-']).next();
            assert!(
                first.is_some_and(|first| !["", "0"].contains(&first)),
                "{helper}"
            );
        }
        for (own, helper) in run("exec \"$@\"") {
            assert_eq!(own, helper);
        }
        for (rank, (own, helper)) in run("exec taskset -c $PMI_RANK \"$@\"").iter().enumerate() {
            let is_home = helper == own;
            assert_eq!(is_home, processors == 2, "rank {rank} on {own}: {helper}");
        }
    });
}
