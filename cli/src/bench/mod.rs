//! `anabranch bench`: bandwidth and latency between ranks 0 and 1, or of all pairs of ranks at once, measured and printed
//! as the OSU micro-benchmarks do, with data that is random and can be checked.

pub mod away;
pub mod buffer;
mod check;
mod counters;
pub mod cuda;
pub mod exchange;
pub mod memory;
mod mpi;
mod progress;
mod raw;
pub mod report;
pub mod sizes;
pub mod suite;
mod transfer;

use std::ffi::c_int;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Instant;

use anyhow::Context;
use clap::{Args, ValueEnum};

use crate::json::Json;
use crate::{complain, Failure};
use away::{Away, Pause};
use buffer::{Buffer, Place};
use check::Checker;
use cuda::Driver;
use exchange::{Pair, Spot};
use memory::Memory;
use mpi::{Mpi, Requests};
use progress::Progress;
use raw::Raw;
use report::{Report, Row};

/// What is measured.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Rank 0 sends a window of messages, rank 1 acknowledges it with 4 bytes
    Bw,
    /// Both ranks send a window of messages at once
    Bibw,
    /// Half the time of a round trip
    Latency,
    /// As bw, by all pairs of ranks at once: rank i of the first half sends to rank i of the second
    MbwMr,
    /// Every rank sends a window of messages to the next one, and receives one from the one before
    Ring,
    /// Every rank sends a window of messages to every other, to the next one first
    AllToAll,
    /// The same by number: every rank receives from rank 0 first, and sends to it first, as a plain loop over the ranks does
    AllByNumber,
    /// Both ranks exchange messages by two blocking MPI_Sendrecv, as halos are, after each has been away
    /// (--away): the time in MPI, median and percentiles
    Exchange,
    /// Rank 0 writes a window of messages into the memory of rank 1 (MPI_Put), ended by MPI_Win_fence. The MPI library alone
    /// moves them, whether Anabranch is there or not
    Put,
}

impl Kind {
    /// What a rank does among `size` of them: whether it is the first (0) or the second (1) of a
    /// pair, and the rank of the other; `None` if it takes no part.
    fn role(self, rank: c_int, size: c_int) -> Option<(c_int, c_int)> {
        let half = if self == Kind::MbwMr { size / 2 } else { 1 };
        match rank {
            _ if self.is_round() => Some((0, (rank + 1) % size)),
            _ if rank < half => Some((0, rank + half)),
            _ if rank < 2 * half => Some((1, rank - half)),
            _ => None,
        }
    }

    /// How many pairs of `size` ranks measure at once.
    fn pairs(self, size: c_int) -> c_int {
        match self {
            Kind::MbwMr => size / 2,
            Kind::Ring => size,
            Kind::AllToAll | Kind::AllByNumber => size * (size - 1),
            _ => 1,
        }
    }

    /// All ranks do the same, with buffers of one kind.
    pub fn is_round(self) -> bool {
        matches!(self, Kind::Ring | Kind::AllToAll | Kind::AllByNumber)
    }

    /// More than two ranks measure at once.
    pub fn is_of_all(self) -> bool {
        self == Kind::MbwMr || self.is_round()
    }

    /// Messages go one way only.
    fn is_one_way(self) -> bool {
        matches!(self, Kind::Bw | Kind::MbwMr | Kind::Put)
    }

    /// The ranks to which one of `size` sends, and those from which it receives; a window each.
    fn legs(self, rank: c_int, size: c_int) -> [Vec<c_int>; 2] {
        match self {
            Kind::Ring => [vec![(rank + 1) % size], vec![(rank + size - 1) % size]],
            Kind::AllToAll => [1, size - 1].map(|step| {
                let nth = |at: c_int| (rank + at * step) % size;
                (1..size).map(nth).collect()
            }),
            Kind::AllByNumber => {
                let others: Vec<c_int> = (0..size).filter(|other| *other != rank).collect();
                [others.clone(), others]
            }
            _ => {
                let peer = self.role(rank, size).map(|(_, peer)| peer);
                [peer.into_iter().collect(), peer.into_iter().collect()]
            }
        }
    }
}

/// Arguments of `anabranch bench`.
#[derive(Args)]
pub struct Arguments {
    kind: Kind,
    /// Buffers of rank 0: in device (D) or host (H) memory
    #[arg(default_value = "D")]
    first: Place,
    /// Buffers of rank 1
    #[arg(default_value = "D")]
    second: Place,
    /// Message sizes: powers of two from MIN to MAX, or a list; K, M, G are powers of 1024. Up to 32G; from 2G on in whole
    /// multiples of 64 bytes
    #[arg(long, short = 'm', default_value = "1:4M", value_name = "MIN:MAX|A,B,...", value_parser = sizes::parse)]
    sizes: sizes::Sizes,
    /// What device memory the buffers lie in
    #[arg(long, value_enum, default_value_t = Memory::Plain)]
    memory: Memory,
    /// Messages under way at once from one rank to another (all but latency)
    #[arg(long, short = 'W', default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65536))]
    window: u32,
    /// Iterations measured for each size [default: as OSU, fewer above 8K]
    #[arg(long, short = 'i', value_parser = clap::value_parser!(u32).range(1..))]
    iterations: Option<u32>,
    /// Iterations before those [default: as OSU]
    #[arg(long, short = 'x')]
    warmup: Option<u32>,
    /// Verify the data: every message at a place of its own, at odd addresses and in odd sizes too
    #[arg(long, short = 'c')]
    check: bool,
    /// Persistent requests, made once for each size and started in each iteration (not put)
    #[arg(long, short = 'p')]
    persistent: bool,
    /// What the ranks of exchange do before each exchange: cpu:TIME computes, kernel:TIME has the GPU compute
    /// and waits for an event behind it; ns, us, ms and s are units [default: nothing]
    #[arg(long, value_name = "cpu:TIME|kernel:TIME", value_parser = away::parse)]
    away: Option<Away>,
    /// Measure the driver's own copy between the two GPUs too, and print the ratio
    #[arg(long)]
    raw: bool,
    /// Measure the library's own transfers between the two buffers too, without MPI (latency, bw, bibw)
    #[arg(long)]
    transfer: bool,
    /// The MPI library to load: openmpi, mpich, abi, or a file [default: by the launcher]
    #[arg(long, value_name = "NAME|FILE")]
    mpi: Option<String>,
    #[command(flatten)]
    json: Json,
    /// Seed of the random data [default: another one each time]
    #[arg(long)]
    seed: Option<u64>,
}

impl Arguments {
    /// Warm-up and measured iterations for a size; OSU's own numbers where none are given.
    fn iterations(&self, bytes: usize) -> (u32, u32) {
        const LARGE: usize = 8192;
        let (warmup, iterations) = match (self.kind, bytes > LARGE, self.check) {
            // Random data is made and compared on the host for every message.
            (_, _, true) => (2, 4),
            (Kind::Exchange, ..) => (50, 1000),
            (Kind::Latency, false, _) => (100, 10000),
            (Kind::Latency, true, _) => (10, 1000),
            (_, false, _) => (10, 100),
            (_, true, _) => (2, 20),
        };
        (
            self.warmup.unwrap_or(warmup),
            self.iterations.unwrap_or(iterations),
        )
    }

    /// Messages under way at once.
    fn window(&self, bytes: usize) -> usize {
        match self.kind {
            Kind::Latency => 1,
            // Two calls, one after the other.
            Kind::Exchange => 2,
            _ if self.check => check::window(self.window as usize, bytes),
            _ => self.window as usize,
        }
    }

    /// Where the buffers of a rank lie that is the first (0) or the second (1) of its pair.
    fn place(&self, role: c_int) -> Place {
        if role == 0 {
            self.first
        } else {
            self.second
        }
    }
}

/// Runs on every rank.
///
/// # Errors
/// MPI, the driver or the memory is missing. After MPI_Init such an error ends all ranks.
pub fn main(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.raw && (arguments.first, arguments.second) != (Place::D, Place::D) {
        return Err(Failure::new(2, "--raw needs both buffers in device memory: D D").into());
    }
    let has_raw = !matches!(arguments.kind, Kind::Put | Kind::Exchange);
    if arguments.raw && (arguments.kind.is_of_all() || !has_raw) {
        let text = format!(
            "--raw measures the messages of one pair: not with {}",
            report::name(arguments.kind)
        );
        return Err(Failure::new(2, text).into());
    }
    if arguments.transfer && !matches!(arguments.kind, Kind::Latency | Kind::Bw | Kind::Bibw) {
        let name = report::name(arguments.kind);
        let text = format!("--transfer measures latency, bw and bibw: not {name}");
        return Err(Failure::new(2, text).into());
    }
    let is_deep = |size: &usize| arguments.window(*size) > transfer::ROOM;
    if arguments.transfer && arguments.sizes.0.iter().any(is_deep) {
        let text = format!("--transfer takes windows of up to {}", transfer::ROOM);
        return Err(Failure::new(2, text).into());
    }
    if arguments.transfer && arguments.check {
        let text = "--check compares what messages bring, not what transfers do: leave one of --check and --transfer out";
        return Err(Failure::new(2, text).into());
    }
    if arguments.persistent && matches!(arguments.kind, Kind::Put | Kind::Exchange) {
        let name = report::name(arguments.kind);
        let text = format!("{name} has no persistent requests: leave --persistent out");
        return Err(Failure::new(2, text).into());
    }
    if arguments.away.is_some() && arguments.kind != Kind::Exchange {
        return Err(Failure::new(2, "--away is for exchange").into());
    }
    if arguments.kind.is_round() && arguments.first != arguments.second {
        let text = format!(
            "all ranks of {} do the same: D D or H H",
            report::name(arguments.kind)
        );
        return Err(Failure::new(2, text).into());
    }
    // A context before MPI_Init, where the rank is known: some CUDA-aware MPIs want it. If there
    // is none, the other rank may be waiting in MPI_Init already, and is told from there.
    let early = match role_by_launcher(arguments.kind) {
        Some(role) => Device::open(arguments.place(role), None),
        None => Ok(None),
    };
    let mpi = Mpi::start(arguments.mpi.as_deref())?;
    if arguments.kind == Kind::Put {
        // All ranks find the same, so none needs to end the others.
        if let Err(refused) = may_put(arguments, &mpi) {
            mpi.finish();
            return Err(refused.into());
        }
    }
    let result = early.and_then(|device| measure_on(arguments, &mpi, device));
    match result {
        Ok(clean) => {
            mpi.barrier();
            mpi.finish();
            Ok(if clean {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            })
        }
        Err(error) => {
            complain(&format!("rank {}: {error:#}", mpi.rank));
            mpi.abort(1);
            Ok(ExitCode::FAILURE)
        }
    }
}

fn measure_on(arguments: &Arguments, mpi: &Mpi, device: Option<Device>) -> anyhow::Result<bool> {
    if mpi.size < 2 {
        let text = format!(
            "MPI_COMM_WORLD has {} rank: start 2 or more, and if you did, the launcher belongs to another MPI than {} (use --mpi)",
            mpi.size,
            mpi.version()
        );
        return Err(Failure::new(2, text).into());
    }
    if arguments.kind == Kind::MbwMr && mpi.size % 2 != 0 {
        let text = format!("mbw-mr needs an even number of ranks, not {}", mpi.size);
        return Err(Failure::new(2, text).into());
    }
    let Some((role, _)) = arguments.kind.role(mpi.rank, mpi.size) else {
        return Ok(true);
    };
    let device = match device {
        None => Device::open(arguments.place(role), Some(mpi.rank))?,
        opened => opened,
    };
    let session = Session::new(arguments, mpi, device.as_ref())?;
    session.run()
}

/// Whether one-sided messages can be measured: by the MPI library alone, which must take the memory, and whose windows are
/// made by all ranks.
fn may_put(arguments: &Arguments, mpi: &Mpi) -> Result<(), Failure> {
    if mpi.size != 2 {
        let text = format!("put needs 2 ranks, not {}", mpi.size);
        return Err(Failure::new(2, text));
    }
    let on_device = [arguments.first, arguments.second].contains(&Place::D);
    if on_device && !mpi.is_cuda_aware() {
        let text = format!(
            "put goes by the MPI library alone, and {} does not take device memory: use put H H, or an MPI library built with CUDA",
            mpi.version()
        );
        return Err(Failure::new(2, text));
    }
    Ok(())
}

/// Whether this process will be the first or the second of a pair, by what a launcher says.
fn role_by_launcher(kind: Kind) -> Option<c_int> {
    let rank = rank_by_launcher()?;
    let size = match kind {
        kind if kind.is_of_all() => size_by_launcher()?,
        _ => 2,
    };
    kind.role(rank, size).map(|(role, _)| role)
}

/// The rank that a launcher says this process will have.
fn rank_by_launcher() -> Option<c_int> {
    number_in(&[
        "OMPI_COMM_WORLD_RANK",
        "PMI_RANK",
        "PMIX_RANK",
        "SLURM_PROCID",
    ])
}

/// The number of ranks by what a launcher says.
fn size_by_launcher() -> Option<c_int> {
    number_in(&["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"])
}

fn number_in<T: std::str::FromStr>(names: &[&str]) -> Option<T> {
    names
        .iter()
        .find_map(|name| std::env::var(name).ok()?.parse().ok())
}

/// The GPU of this rank.
pub struct Device {
    driver: Rc<Driver>,
    context: cuda::DeviceContext,
    ordinal: u32,
}

impl Device {
    /// Opens the GPU of a rank whose buffers lie in device memory: by its number on its node, or by
    /// its rank, which only MPI knows where no launcher says it.
    fn open(place: Place, rank: Option<c_int>) -> anyhow::Result<Option<Device>> {
        if place == Place::H {
            return Ok(None);
        }
        let driver = Driver::load()?;
        let count = driver.device_count()?;
        if count == 0 {
            return Err(Failure::new(
                2,
                "the CUDA driver reports no GPU: look at CUDA_VISIBLE_DEVICES, or use H H",
            )
            .into());
        }
        let local: Option<u32> = number_in(&[
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "MPI_LOCALRANKID",
            "PMI_LOCAL_RANK",
            "PALS_LOCAL_RANKID",
            "SLURM_LOCALID",
        ]);
        let rank = rank.or_else(rank_by_launcher).unwrap_or(0);
        let ordinal = local.unwrap_or(rank.unsigned_abs()) % count;
        let context = driver.enter(ordinal)?;
        Ok(Some(Device {
            driver: Rc::new(driver),
            context,
            ordinal,
        }))
    }
}

/// Reads the time in seconds: of the machine, or of the simulated node.
pub struct Clock {
    simulated: Option<unsafe extern "C" fn() -> u64>,
    lateness: Option<unsafe extern "C" fn() -> u64>,
    start: Instant,
}

impl Clock {
    fn new(driver: Option<&Driver>) -> Clock {
        Clock {
            simulated: driver.and_then(Driver::simulated_clock),
            lateness: driver.and_then(Driver::simulated_lateness),
            start: Instant::now(),
        }
    }

    fn seconds(&self) -> f64 {
        match self.simulated {
            #[allow(clippy::cast_precision_loss)]
            // SAFETY: the simulated driver is loaded for as long as the process runs.
            Some(clock) => unsafe { clock() as f64 * 1e-9 },
            None => self.start.elapsed().as_secs_f64(),
        }
    }

    /// By how many seconds programs on the simulated node have acted later than they could have, since it began: they had
    /// to wait for a processor. None on real hardware.
    fn late_seconds(&self) -> Option<f64> {
        // SAFETY: the simulated driver is loaded for as long as the process runs.
        #[allow(clippy::cast_precision_loss)]
        self.lateness.map(|late| unsafe { late() as f64 * 1e-9 })
    }
}

/// One of the ranks that measure.
struct Session<'a> {
    arguments: &'a Arguments,
    pair: Pair<'a>,
    clock: Clock,
    /// Whether times are those of a simulated node.
    simulated: bool,
    checker: Checker,
    raw: Option<Raw>,
    transfer: Option<transfer::Bench>,
    device: Option<&'a Device>,
    requests: Requests,
    /// Of the latest measurement, seconds.
    late: Option<f64>,
    /// Where ranks are away between exchanges.
    pause: Option<Pause<'a>>,
    /// The time of each iteration of the latest measurement of exchanges, seconds, the shortest first.
    each: Vec<f64>,
}

impl<'a> Session<'a> {
    fn new(
        arguments: &'a Arguments,
        mpi: &'a Mpi,
        device: Option<&'a Device>,
    ) -> anyhow::Result<Session<'a>> {
        let driver = device.map(|device| &device.driver);
        let (role, peer) = (arguments.kind.role(mpi.rank, mpi.size))
            .context("this rank is the last of an odd number")?;
        let largest = arguments.sizes.0.iter().copied().max().unwrap_or(0);
        let legs = arguments.kind.legs(mpi.rank, mpi.size);
        let bytes = if arguments.check {
            arguments
                .sizes
                .0
                .iter()
                .map(|size| check::region(*size) * arguments.window(*size))
                .max()
                .unwrap_or(0)
        } else {
            largest
        };
        let bytes = bytes * legs[0].len();
        let memory = arguments.memory;
        let buffer =
            || Buffer::new(device, memory, bytes.max(64)).with_context(|| buffer::too_large(bytes));
        let (send, receive) = (buffer()?, buffer()?);
        let own = arguments.seed.unwrap_or_else(check::fresh_seed);
        let seed = match role {
            _ if arguments.kind.is_round() => mpi.tell(own),
            0 => {
                mpi.swap(peer, own);
                own
            }
            _ => mpi.swap(peer, own),
        };
        let checker = Checker::new(seed);
        let raw = if arguments.raw {
            Raw::prepare(arguments, mpi, device, largest)?
        } else {
            None
        };
        let transfer = arguments.transfer;
        let transfer = transfer.then(|| transfer::Bench::prepare(mpi, role as usize, peer));
        let transfer = transfer.transpose()?;
        let clock = Clock::new(driver.map(Rc::as_ref));
        let own_clock = u64::from(clock.simulated.is_some());
        let is_simulated = if arguments.kind.is_round() {
            own_clock != 0
        } else {
            (own_clock | mpi.swap(peer, own_clock)) != 0
        };
        let pause = arguments.away.map(|away| Pause::prepare(away, device));
        let pause = pause.transpose()?;
        let window = if arguments.kind == Kind::Put {
            // SAFETY: the buffer is that long, outlives the window, and lies in memory that the library takes (`may_put`).
            Some(unsafe { mpi.window(receive.at(0), bytes.max(64)) }?)
        } else {
            None
        };
        let pair = Pair {
            mpi,
            kind: arguments.kind,
            role,
            peer,
            send,
            receive,
            window,
        };
        let requests = Requests::new(2 * arguments.window as usize * legs[0].len());
        Ok(Session {
            arguments,
            pair,
            clock,
            simulated: is_simulated,
            checker,
            raw,
            transfer,
            device,
            requests,
            late: None,
            pause,
            each: Vec::new(),
        })
    }

    /// Measures every size; false if data was wrong.
    fn run(mut self) -> anyhow::Result<bool> {
        if !self.arguments.check {
            check::fill_random(&self.pair.send, self.checker.seed())?;
            check::fill_random(&self.pair.receive, !self.checker.seed())?;
        }
        let mut report = Report::new(
            self.arguments,
            self.pair.mpi,
            self.device,
            self.simulated,
            self.checker.seed(),
        );
        report.raw = self.raw.as_ref().map(Raw::describe);
        let first = self.pair.mpi.rank == 0;
        if first {
            report.head()?;
        }
        let mut clean = true;
        let sizes = self.arguments.sizes.0.clone();
        let progress = first.then(|| Progress::begin(sizes.len()));
        for (number, bytes) in sizes.into_iter().enumerate() {
            if let Some(progress) = &progress {
                progress.row(number, bytes);
            }
            let row = self.measure(bytes)?;
            clean &= row.errors.unwrap_or(0) == 0;
            if first {
                report.row(row)?;
            }
        }
        drop(progress);
        if let Some(raw) = &mut self.raw {
            raw.unmap()?;
            // Memory that a peer has mapped must not be freed.
            self.pair.mpi.meet(self.pair.peer);
            raw.free()?;
        }
        if let Some(transfer) = self.transfer.take() {
            self.pair.mpi.meet(self.pair.peer);
            drop(transfer);
            // Memory that a peer has mapped must not be freed.
            self.pair.mpi.meet(self.pair.peer);
        }
        if let Some(window) = self.pair.window.take() {
            self.pair.mpi.free_window(window);
        }
        if first {
            report.end()?;
        }
        Ok(clean)
    }

    fn measure(&mut self, bytes: usize) -> anyhow::Result<Row> {
        let (warmup, iterations) = self.arguments.iterations(bytes);
        let window = self.arguments.window(bytes);
        let (seconds, errors) = if self.arguments.check {
            let (seconds, errors) = self.checked(bytes, window, warmup, iterations)?;
            (seconds, Some(errors))
        } else if self.arguments.kind == Kind::Exchange {
            (self.exchanges(bytes, window, warmup, iterations)?, None)
        } else {
            (self.timed(bytes, window, warmup, iterations), None)
        };
        let mpi = self.pair.mpi;
        let seconds = self.agreed(seconds);
        let (seconds, errors) = match self.arguments.kind {
            kind if kind.is_of_all() => (
                // As OSU does: the time of the slowest pair.
                (mpi.gather(seconds.to_bits())
                    .into_iter()
                    .map(f64::from_bits))
                .fold(0.0, f64::max),
                errors.map(|errors| mpi.gather(errors).iter().sum()),
            ),
            _ => (seconds, errors),
        };
        let pairs = f64::from(self.arguments.kind.pairs(mpi.size));
        let value = |seconds: f64| {
            report::value(self.arguments.kind, bytes, window, iterations, seconds)
                .map(|value| value * pairs)
        };
        let raw = match &self.raw {
            Some(raw) if bytes > 0 => {
                self.pair.mpi.meet(self.pair.peer);
                let seconds = raw.measure(bytes, window, warmup, iterations, &self.clock)?;
                self.pair.mpi.meet(self.pair.peer);
                seconds.and_then(|seconds| match self.arguments.kind {
                    // A copy is one way already.
                    Kind::Latency => value(2.0 * seconds),
                    _ => value(seconds),
                })
            }
            _ => None,
        };
        let mut path = None;
        let transfer = match &mut self.transfer {
            Some(transfer) if bytes > 0 => {
                let memory = (self.pair.send.at(0).cast_const(), self.pair.receive.at(0));
                self.pair.mpi.meet(self.pair.peer);
                // SAFETY: both buffers hold a message of this size, and nothing else is under way.
                let seconds =
                    unsafe { transfer.measure(self.arguments, bytes, memory, &self.clock) };
                let seconds = seconds?;
                self.pair.mpi.meet(self.pair.peer);
                path = Some(transfer.path().name());
                value(self.agreed(seconds))
            }
            _ => None,
        };
        Ok(Row {
            bytes,
            window,
            iterations,
            value: value(seconds),
            raw,
            transfer,
            path,
            errors,
            percentiles: (!self.each.is_empty()).then(|| self.percentiles()),
            late: self.late.map(|late| late / seconds),
        })
    }

    /// The time to report: this rank's, but the peer's where only that one sees the clock of the
    /// simulated node, because only its buffers are in device memory.
    fn agreed(&self, seconds: f64) -> f64 {
        if self.arguments.kind.is_round() {
            return seconds;
        }
        let theirs = f64::from_bits(self.pair.mpi.swap(self.pair.peer, seconds.to_bits()));
        if self.simulated && self.clock.simulated.is_none() {
            theirs
        } else {
            seconds
        }
    }

    /// The loop of the OSU benchmarks: every message of a window in one place.
    fn timed(&mut self, bytes: usize, window: usize, warmup: u32, iterations: u32) -> f64 {
        // All of a window in one place, and each window in its own.
        let legs = self.pair.legs()[0].len();
        let spots: Vec<Spot> = (0..window * legs)
            .map(|message| Spot {
                offset: message / window * bytes,
                bytes,
            })
            .collect();
        let persistent = self.arguments.persistent;
        let mut prepared = persistent.then(|| self.pair.prepare(&spots, &spots));
        self.pair.meet();
        let now = |clock: &Clock| (clock.seconds(), clock.late_seconds());
        let mut start = now(&self.clock);
        for iteration in 0..warmup + iterations {
            if iteration == warmup {
                start = now(&self.clock);
            }
            match &mut prepared {
                Some(prepared) => self.pair.exchange_again(prepared),
                None => self.pair.exchange(&spots, &spots, &mut self.requests),
            }
        }
        let end = now(&self.clock);
        if let Some(prepared) = prepared {
            self.pair.discard(prepared);
        }
        self.late = end.1.zip(start.1).map(|(end, start)| end - start);
        end.0 - start.0
    }

    /// Exchanges after being away: as many times the median of an exchange as there are iterations.
    fn exchanges(
        &mut self,
        bytes: usize,
        window: usize,
        warmup: u32,
        iterations: u32,
    ) -> anyhow::Result<f64> {
        let spots: Vec<Spot> = (0..window).map(|_| Spot { offset: 0, bytes }).collect();
        self.each.clear();
        self.pair.meet();
        for iteration in 0..warmup + iterations {
            if let Some(pause) = &self.pause {
                pause.take()?;
            }
            let start = self.clock.seconds();
            self.pair.exchange(&spots, &spots, &mut self.requests);
            if iteration >= warmup {
                self.each.push(self.clock.seconds() - start);
            }
        }
        self.each.sort_by(f64::total_cmp);
        Ok(self.each[self.each.len() / 2] * f64::from(iterations))
    }

    /// Of which nine tenths of the exchanges, and all but a hundredth, take no more, us.
    fn percentiles(&self) -> [f64; 2] {
        let last = self.each.len() - 1;
        [last * 9 / 10, last * 99 / 100].map(|at| 1e6 * self.each[at])
    }

    /// The same with fresh data and a place for every message, compared after every iteration.
    fn checked(
        &mut self,
        bytes: usize,
        window: usize,
        warmup: u32,
        iterations: u32,
    ) -> anyhow::Result<(f64, u64)> {
        let (mut seconds, mut errors) = (0.0, 0);
        for iteration in 0..warmup + iterations {
            let timed = iteration >= warmup;
            // Odd lengths too, in the iterations that are not timed.
            let bytes = if timed || iteration % 2 == 0 {
                bytes
            } else {
                sizes::odd(bytes)
            };
            let plan = self.checker.plan(&self.pair, bytes, window, iteration);
            self.checker.prepare(&self.pair, &plan)?;
            // One-sided messages go where the peer expects them.
            let is_put = self.arguments.kind == Kind::Put;
            let there = is_put.then(|| self.checker.there(&self.pair, bytes, window, iteration));
            let into = there.as_ref().unwrap_or(&plan.into);
            let persistent = self.arguments.persistent;
            let mut prepared = persistent.then(|| self.pair.prepare(&plan.out, into));
            self.pair.meet();
            let start = self.clock.seconds();
            match &mut prepared {
                Some(prepared) => self.pair.exchange_again(prepared),
                None => self.pair.exchange(&plan.out, into, &mut self.requests),
            }
            if timed {
                seconds += self.clock.seconds() - start;
            }
            if let Some(prepared) = prepared {
                self.pair.discard(prepared);
            }
            errors += self.checker.compare(&self.pair, &plan)?;
        }
        if self.arguments.kind.is_round() {
            return Ok((seconds, errors));
        }
        let theirs = self.pair.mpi.swap(self.pair.peer, errors);
        Ok((seconds, errors + theirs))
    }
}
