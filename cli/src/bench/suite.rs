//! Many measurements in one launch, for `anabranch compare`: starting ranks and CUDA takes seconds, a row milliseconds.
//! The list of rows comes from a file; rank 0 writes one line of JSON for each, with what the library counted meanwhile.

mod row;

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anabranch_engine::config::Config;
use anyhow::Context;
use clap::Args;
use serde::{Deserialize, Serialize};

use super::buffer::{self, Buffer, Place};
use super::check;
use super::counters::{Counters, Values};
use super::exchange::{Pair, ACK_BYTES};
use super::memory::Memory;
use super::mpi::{Mpi, Requests};
use super::{report, Clock, Device, Kind};
use crate::{complain, Failure};
use row::{Done, Part, Row, Turns};

/// Payload of one iteration that is verified, unless one message is larger.
const VERIFIED: usize = 32 << 20;
/// Host memory in which the messages of a window arrive.
const ARRIVAL: usize = 1 << 30;
/// The same in the memory of a simulated device, whose checker reports what two messages write to one place.
const SIMULATED_ARRIVAL: usize = 256 << 20;
/// Device memory comes in whole pages, as from the allocators of frameworks, or from programs whose buffers are powers of two. A
/// driver puts other allocations into small pages, in which copies are slower that write over a link.
const PAGE: usize = 2 << 20;

/// Arguments of `anabranch suite`.
#[derive(Args)]
pub struct Arguments {
    /// A plan, as `anabranch compare` writes it
    plan: PathBuf,
}

/// What one launch measures.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// The rows, in their order.
    pub rows: Vec<Ask>,
    /// What device memory the buffers lie in.
    #[serde(default)]
    pub memory: Memory,
    /// Seed of the data.
    pub seed: u64,
    /// About how long a row's blocks shall take together, by the clock of the node.
    pub row_ms: f64,
    /// Blocks of a row; its value is the median of theirs.
    pub blocks: usize,
    /// Iterations of a block, instead of as many as fit in its time.
    pub iterations: Option<u32>,
    /// On a simulated node, a block in which programs have acted late by more than this part of its time is void.
    pub late_max: f64,
    /// What the library does in each row, turn by turn, over and over. Empty: always the same, or it is not there.
    #[serde(default)]
    pub turns: Vec<Turn>,
    /// Verify every row too.
    pub verify: bool,
    /// Variables that must have reached the ranks.
    pub variables: BTreeMap<String, String>,
    /// Where rank 0 writes.
    pub out: PathBuf,
}

/// What the library does in a turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Turn {
    /// It stands aside.
    Aside,
    /// It takes messages, over these paths only, or over those that it was started with.
    Taking(Option<String>),
}

/// One row to measure.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ask {
    /// The number by which the row is known.
    pub row: usize,
    /// The pattern.
    pub kind: Kind,
    /// Buffers of the first and the second of a pair.
    pub buffers: [Place; 2],
    /// Size of a message.
    pub bytes: usize,
    /// Messages under way at once.
    pub window: usize,
    /// By persistent requests.
    #[serde(default)]
    pub persistent: bool,
    /// So many iterations and no others, as a user's benchmark has them: the first messages of a size are
    /// among them.
    #[serde(default)]
    pub fixed: Option<Fixed>,
}

/// Iterations of a row whose first messages count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Fixed {
    /// Before those that are timed.
    pub warmup: u32,
    /// Those that are.
    pub iterations: u32,
}

impl Plan {
    /// Whether a rank has buffers of this kind in any row.
    fn needs(&self, place: Place, rank: c_int, size: c_int) -> bool {
        let mut places = self.rows.iter().map(|ask| ask.place(rank, size));
        places.any(|needed| needed == Some(place))
    }
}

impl Ask {
    /// Where the buffers of a rank lie, if it takes part.
    fn place(&self, rank: c_int, size: c_int) -> Option<Place> {
        let (role, _) = self.kind.role(rank, size)?;
        self.buffers.get(usize::try_from(role).ok()?).copied()
    }

    /// Whether they differ in the size of messages only.
    pub fn is_of_one_sweep(&self, other: &Ask) -> bool {
        let key = |ask: &Ask| (ask.kind, ask.buffers, ask.window, ask.persistent);
        key(self) == key(other)
    }

    /// Whether the messages of a window fit where they arrive.
    pub fn fits(&self) -> bool {
        let one_way = self.kind.is_one_way();
        let on_host = self.buffers[1] == Place::H || (!one_way && self.buffers[0] == Place::H);
        !on_host || self.window == 1 || self.window * self.stride() <= ARRIVAL
    }

    /// From one message that arrives in host memory to the next. Each has a place of its own: that OSU receives a whole
    /// window in one is against the rules of MPI, and RTSs that land there would overwrite each other.
    fn stride(&self) -> usize {
        self.bytes.next_multiple_of(64)
    }
}

/// The circumstances of a launch: the first line that it writes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Circumstances {
    /// The MPI library.
    pub mpi: String,
    /// Number of ranks.
    pub ranks: c_int,
    /// The GPU of rank 0.
    pub gpu: Option<String>,
    /// Whether times are those of a simulated node.
    pub simulated: bool,
    /// Version of the library, if it is preloaded.
    pub library: Option<String>,
}

/// One row measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measured {
    /// The row's number.
    pub row: usize,
    /// Which of the plan's turns this is; 0 without.
    pub turn: usize,
    /// The value of each block; empty where no time passes, as for host memory on a simulated node.
    pub values: Vec<f64>,
    /// Iterations of a block.
    pub iterations: u32,
    /// By which part of its time programs have acted late on the simulated node, in the worst block that counts.
    pub late: Option<f64>,
    /// Of a row of fixed iterations, those timed that took more than one and a half times their median and
    /// 200 us more.
    #[serde(default)]
    pub slow: Option<u64>,
    /// Messages with wrong data, if the row was verified.
    pub errors: Option<u64>,
    /// What all ranks counted in turns like this one, warm-up and verification included; none without the library.
    pub counters: Option<BTreeMap<String, u64>>,
    /// What they should have counted.
    pub expected: Expected,
}

/// What the library should have seen of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected {
    /// Sends from device buffers, acknowledgements included.
    pub device_sends: u64,
    /// Sends that must go by RTS, where that is known.
    pub taken: Option<u64>,
    /// Sends so short that they may go either way: it depends on what the peer has pending.
    pub short: u64,
    /// Messages from host memory into device buffers.
    pub raised: u64,
    /// The memory may have no IPC handle, so messages may come through staging.
    #[serde(default)]
    pub may_stage: bool,
}

/// Runs on every rank.
///
/// # Errors
/// The plan, MPI, the driver or the memory is missing. After MPI_Init such an error ends all ranks.
pub fn main(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let name = arguments.plan.display();
    let text =
        std::fs::read_to_string(&arguments.plan).with_context(|| format!("cannot read {name}"))?;
    let plan: Plan = serde_json::from_str(&text).with_context(|| format!("{name} is no plan"))?;
    for (name, value) in &plan.variables {
        let found = std::env::var(name).unwrap_or_default();
        if found != *value {
            let text = format!(
                "{name} is {found:?} in this rank, not {value:?}: the launcher did not hand it on"
            );
            return Err(Failure::new(2, text).into());
        }
    }
    // A context before MPI_Init, as some CUDA-aware MPIs want it.
    let early = match (super::rank_by_launcher(), super::size_by_launcher()) {
        (Some(rank), Some(size)) if plan.needs(Place::D, rank, size) => {
            Device::open(Place::D, None)
        }
        _ => Ok(None),
    };
    let mpi = Mpi::start(None)?;
    match early.and_then(|device| measure(&plan, &mpi, device)) {
        Ok(()) => {
            mpi.barrier();
            mpi.finish();
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => {
            complain(&format!("rank {}: {error:#}", mpi.rank));
            mpi.abort(1);
            Ok(ExitCode::FAILURE)
        }
    }
}

#[allow(
    clippy::too_many_lines,
    reason = "one benchmark after the other, each a few lines"
)]
fn measure(plan: &Plan, mpi: &Mpi, early: Option<Device>) -> anyhow::Result<()> {
    if plan
        .rows
        .iter()
        .any(|ask| ask.kind.role(1, mpi.size).is_none())
    {
        let text = format!(
            "MPI_COMM_WORLD has {} rank: the launcher belongs to another MPI than {}",
            mpi.size,
            mpi.version()
        );
        return Err(Failure::new(2, text).into());
    }
    let needs = |place| plan.needs(place, mpi.rank, mpi.size);
    let device = match early {
        None if needs(Place::D) => Device::open(Place::D, Some(mpi.rank))?,
        opened => opened,
    };
    let clock = Clock::new(device.as_ref().map(|device| device.driver.as_ref()));
    let own_clock = u64::from(clock.simulated.is_some());
    let simulated = mpi
        .gather(own_clock)
        .into_iter()
        .fold(own_clock, |a, b| a | b)
        != 0;
    let simulated = mpi.tell(u64::from(simulated)) != 0;
    let counters = Counters::find();
    let mut out = if mpi.rank == 0 {
        let name = plan.out.display();
        Some(File::create(&plan.out).with_context(|| format!("cannot write {name}"))?)
    } else {
        None
    };
    let circumstances = Circumstances {
        mpi: mpi.version(),
        ranks: mpi.size,
        gpu: device
            .as_ref()
            .and_then(|device| device.driver.device_name(device.ordinal).ok()),
        simulated,
        library: counters.as_ref().map(|counters| counters.version.clone()),
    };
    write_line(out.as_mut(), &circumstances)?;
    let largest = |of: &dyn Fn(&Ask) -> usize| plan.rows.iter().map(of).max().unwrap_or(0).max(64);
    let legs = |ask: &Ask| ask.kind.legs(0, mpi.size)[0].len().max(1);
    let once = largest(&|ask| legs(ask) * ask.bytes.max(check::region(ask.bytes) * verified(ask)));
    let window = largest(&|ask| legs(ask) * ask.window * ask.stride()).min(ARRIVAL);
    let pair = |place: Place| -> anyhow::Result<Option<Pair<'_>>> {
        if !needs(place) {
            return Ok(None);
        }
        let device = device.as_ref().filter(|_| place == Place::D);
        let buffer = |bytes: usize| {
            let bytes = match device {
                Some(_) if bytes > PAGE / 2 => bytes.next_multiple_of(PAGE),
                _ => bytes,
            };
            Buffer::new(device, plan.memory, bytes).with_context(|| buffer::too_large(bytes))
        };
        let arrival = match (place, simulated) {
            (Place::H, _) => once.max(window),
            (Place::D, true) => once.max(window.min(SIMULATED_ARRIVAL)),
            (Place::D, false) => once,
        };
        let pair = Pair {
            mpi,
            kind: Kind::Bw,
            role: 0,
            peer: 0,
            send: buffer(once)?,
            receive: buffer(arrival)?,
            window: None,
        };
        check::fill_random(&pair.send, plan.seed)?;
        check::fill_random(&pair.receive, !plan.seed)?;
        Ok(Some(pair))
    };
    let (on_device, on_host) = (pair(Place::D)?, pair(Place::H)?);
    let most = plan.rows.iter().map(|ask| ask.window).max().unwrap_or(1);
    let mut suite = Suite {
        plan,
        clock,
        simulated,
        counters,
        requests: Requests::new(2 * most * usize::try_from(mpi.size).unwrap_or(1)),
        on_device,
        on_host,
    };
    // So that no message of the first row is sent to a rank that does not take part yet. Ranks without a device buffer do
    // at their next call after the others.
    if plan.rows.iter().all(|ask| ask.fixed.is_none()) {
        if let Some(pair) = &suite.on_device {
            pair.try_out(&mut suite.requests);
        }
        mpi.barrier();
        mpi.barrier();
    }
    for ask in &plan.rows {
        let place = ask.place(mpi.rank, mpi.size);
        for measured in suite.row(mpi, ask, place)? {
            write_line(out.as_mut(), &measured)?;
        }
    }
    Ok(())
}

fn write_line(out: Option<&mut File>, value: &impl Serialize) -> anyhow::Result<()> {
    let Some(out) = out else { return Ok(()) };
    let line = serde_json::to_string(value)? + "\n";
    out.write_all(line.as_bytes())
        .context("cannot write the results")
}

/// Messages under way at once in the iteration that is verified.
fn verified(ask: &Ask) -> usize {
    ask.window.min(VERIFIED / check::region(ask.bytes)).max(1)
}

/// One of the ranks.
struct Suite<'a> {
    plan: &'a Plan,
    clock: Clock,
    simulated: bool,
    counters: Option<Counters>,
    requests: Requests,
    on_device: Option<Pair<'a>>,
    on_host: Option<Pair<'a>>,
}

impl Suite<'_> {
    /// Measures one row, in each of its turns; every rank calls it, and what rank 0 returns holds for all.
    fn row(&mut self, mpi: &Mpi, ask: &Ask, place: Option<Place>) -> anyhow::Result<Vec<Measured>> {
        let before = self.read();
        let turns = Turns::of(self.plan);
        let pair = match place {
            Some(Place::D) => self.on_device.as_mut(),
            Some(Place::H) => self.on_host.as_mut(),
            None => None,
        };
        let done = match (pair.zip(place), ask.kind.role(mpi.rank, mpi.size)) {
            (Some((pair, place)), Some((role, peer))) => {
                (pair.kind, pair.role, pair.peer) = (ask.kind, role, peer);
                Row {
                    plan: self.plan,
                    library: self.counters.as_ref(),
                    clock: &self.clock,
                    simulated: self.simulated,
                    requests: &mut self.requests,
                    pair,
                    place,
                    ask,
                    prepared: None,
                }
                .measure(&turns)?
            }
            _ => Done::default(),
        };
        let mut parts = done.parts;
        if parts.is_empty() {
            // What a rank counts that takes no part is to be seen all the same.
            parts.resize_with(turns.kinds.len(), Part::default);
            parts[0].count(&before, &self.read());
        }
        for part in &mut parts {
            part.counted.resize(before.len(), 0);
            part.counted = mpi.sum(&part.counted);
            part.errors = mpi.gather(part.errors).into_iter().sum();
        }
        let mut blocks: Vec<f64> = Vec::new();
        for block in 0..mpi.tell(done.blocks.len() as u64) {
            let mine = usize::try_from(block)
                .ok()
                .and_then(|block| done.blocks.get(block));
            let all = mpi.gather(mine.copied().unwrap_or(0.0).to_bits());
            // As OSU does, the time of the slowest pair; seconds of a second are zero but on a node
            // whose clock the first does not see.
            blocks.push(all.into_iter().map(f64::from_bits).fold(0.0, f64::max));
        }
        let pairs = f64::from(ask.kind.pairs(mpi.size));
        let value = |seconds: f64| {
            report::value(ask.kind, ask.bytes, ask.window, done.iterations, seconds)
                .map(|value| value * pairs)
        };
        let config = Config::from_env().0;
        let of_turn = |(turn, kind): (usize, &usize)| {
            let part = &parts[*kind];
            let counters = self.counters.as_ref();
            Measured {
                row: ask.row,
                turn,
                values: (blocks.iter().skip(turn).step_by(turns.order.len()))
                    .filter_map(|seconds| value(*seconds))
                    .collect(),
                iterations: done.iterations,
                late: self.simulated.then_some(done.late),
                slow: done.slow,
                errors: self.plan.verify.then_some(part.errors),
                counters: counters.map(|counters| counters.named(&part.counted)),
                expected: Expected {
                    may_stage: self.plan.memory != Memory::Plain,
                    ..expected(ask, part, &config, ask.kind.pairs(mpi.size))
                },
            }
        };
        Ok(turns.order.iter().enumerate().map(of_turn).collect())
    }

    fn read(&self) -> Values {
        self.counters
            .as_ref()
            .map(Counters::read)
            .unwrap_or_default()
    }
}

/// What the library should count for a row on all ranks together, from the pattern alone.
fn expected(ask: &Ask, part: &Part, config: &Config, pairs: c_int) -> Expected {
    if !config.enabled {
        return Expected {
            taken: Some(0),
            ..Expected::default()
        };
    }
    let pairs = u64::from(pairs.unsigned_abs());
    let one_way = ask.kind.is_one_way();
    let on = |place: Place| u64::from(place == Place::D);
    let [first, second] = ask.buffers.map(on);
    // Messages that leave a device, acknowledgements aside: from the first, and from the second.
    let back = if one_way || ask.kind.is_round() {
        0
    } else {
        part.messages
    };
    let (data, acknowledgements) = (
        first * part.messages + second * back,
        if one_way {
            second * part.acknowledgements
        } else {
            0
        },
    );
    // In a round all buffers are of one kind.
    let both = u64::from(!ask.kind.is_round());
    let allowed = |bytes: usize| bytes as u64 >= config.threshold;
    let (long, short) = match ask.bytes {
        bytes if !allowed(bytes) => (0, 0),
        bytes if bytes > DESCRIPTOR => (data, 0),
        _ => (0, data),
    };
    let answers = if allowed(ACK_BYTES) {
        acknowledgements
    } else {
        0
    };
    // Who begins with its first message does not know yet whether its peer takes part.
    let from_the_first = ask.fixed.is_some();
    Expected {
        device_sends: pairs * (data + acknowledgements),
        taken: (!from_the_first).then_some(pairs * long),
        short: match from_the_first {
            true => pairs * (data + acknowledgements),
            false => pairs * (short + answers),
        },
        raised: both * pairs * ((1 - first) * second * part.messages + (1 - second) * first * back)
            + pairs
                * if one_way && ACK_BYTES > 0 {
                    first * (1 - second) * part.acknowledgements
                } else {
                    0
                },
        may_stage: false,
    }
}

/// Length of an RTS: messages up to it are short.
const DESCRIPTOR: usize = 61;

#[cfg(test)]
mod tests {
    use super::*;

    fn of(kind: Kind, buffers: [Place; 2], bytes: usize) -> Expected {
        let ask = Ask {
            row: 0,
            kind,
            buffers,
            bytes,
            window: 16,
            persistent: false,
            fixed: None,
        };
        let part = Part {
            messages: 48,
            acknowledgements: 3,
            ..Part::default()
        };
        expected(&ask, &part, &Config::default(), kind.pairs(4))
    }

    #[test]
    fn the_pattern_says_what_is_to_be_counted() {
        use Place::{D, H};
        let is = |device_sends, taken, short, raised| Expected {
            device_sends,
            taken: Some(taken),
            short,
            raised,
            may_stage: false,
        };
        // 3 windows of 16 messages, each acknowledged from the second's device buffer by 4 bytes.
        assert_eq!(of(Kind::Bw, [D, D], 4096), is(51, 48, 3, 0));
        assert_eq!(of(Kind::Bw, [D, D], 61), is(51, 0, 51, 0));
        assert_eq!(of(Kind::Bw, [D, H], 4096), is(48, 48, 0, 3));
        assert_eq!(of(Kind::Bw, [H, D], 4096), is(3, 0, 3, 48));
        assert_eq!(of(Kind::Bibw, [D, D], 4096), is(96, 96, 0, 0));
        assert_eq!(of(Kind::Latency, [D, H], 4096), is(48, 48, 0, 48));
        // Two pairs of four ranks.
        assert_eq!(of(Kind::MbwMr, [D, D], 4096), is(102, 96, 6, 0));
        assert_eq!(of(Kind::Bibw, [H, H], 4096), is(0, 0, 0, 0));
        // Four ranks to one other each, and to three.
        assert_eq!(of(Kind::Ring, [D, D], 4096), is(192, 192, 0, 0));
        assert_eq!(of(Kind::AllToAll, [D, D], 4096), is(576, 576, 0, 0));
        assert_eq!(of(Kind::AllByNumber, [D, D], 4096), is(576, 576, 0, 0));
    }

    #[test]
    fn ranks_pair_up_as_in_the_osu_benchmarks() {
        assert_eq!(Kind::Bw.role(1, 4), Some((1, 0)));
        assert_eq!(Kind::Bw.role(2, 4), None);
        assert_eq!(Kind::MbwMr.role(1, 4), Some((0, 3)));
        assert_eq!(Kind::MbwMr.role(2, 4), Some((1, 0)));
        assert_eq!(Kind::MbwMr.role(4, 5), None);
    }

    #[test]
    fn each_to_all_begins_with_the_next_rank_or_by_number() {
        let legs = |kind: Kind| kind.legs(2, 4);
        assert_eq!(legs(Kind::AllToAll), [vec![3, 0, 1], vec![1, 0, 3]]);
        assert_eq!(legs(Kind::AllByNumber), [[0, 1, 3], [0, 1, 3]]);
    }

    #[test]
    fn what_one_sends_another_receives() {
        for kind in [Kind::Ring, Kind::AllToAll, Kind::AllByNumber] {
            for size in 2..6 {
                let mut sent = Vec::new();
                let mut received = Vec::new();
                for rank in 0..size {
                    let [to, from] = kind.legs(rank, size);
                    assert!(!to.contains(&rank) && to.len() == from.len());
                    sent.extend(to.into_iter().map(|other| (rank, other)));
                    received.extend(from.into_iter().map(|other| (other, rank)));
                }
                assert_eq!(sent.len() as c_int, kind.pairs(size));
                sent.sort_unstable();
                sent.dedup();
                received.sort_unstable();
                assert_eq!(sent, received);
            }
        }
    }
}
