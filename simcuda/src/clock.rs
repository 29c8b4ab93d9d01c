//! The virtual clock: operations on engines and links, fluid rates, and when time moves.

use crate::shared::{Body, Flow, Stage, MAX_FLOWS, MAX_SEGMENTS, NO_ENGINE, NO_GPU, NO_TURN};
use crate::topology::{FabricKind, Topology, MAX_GPUS};

/// Capacities of a topology, indexed as flows name them.
pub struct Machine {
    /// Bytes a nanosecond of each shared segment.
    pub segments: Vec<f64>,
    /// Operations that each engine runs at once.
    pub engines: Vec<usize>,
    /// What it costs a process to follow another on a GPU, where they take turns.
    pub turn_ns: u64,
    /// What copies to and from the host and stream memory operations of a GPU take longer beside its copies to other GPUs.
    pub beside_ns: u64,
    per_gpu: usize,
    links: usize,
    host: usize,
    /// Of each PCIe switch the link to the host, then that from it.
    pcie: usize,
    switch: bool,
}

/// Engines of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// Copies to the host.
    ToHost,
    /// Copies from the host.
    ToDevice,
    /// Copies between GPUs and within one.
    Peer,
    /// Copies to other GPUs, where the topology has them apart.
    Outward,
}

/// Route of a copy or the memory traffic of a kernel.
#[derive(Clone, Copy, Default, Debug)]
pub struct Route {
    /// Segments with how often each byte passes.
    pub segments: [(u16, f32); MAX_SEGMENTS],
    /// Valid entries.
    pub count: u8,
}

impl Route {
    fn add(mut self, segment: usize, weight: f32) -> Route {
        let i = usize::from(self.count);
        assert!(
            i < MAX_SEGMENTS,
            "a route loads at most {MAX_SEGMENTS} segments"
        );
        self.segments[i] = (segment as u16, weight);
        self.count += 1;
        self
    }
}

const SEGMENTS_PER_GPU: usize = 6;
const OUT: usize = 0;
const IN: usize = 1;
const PCIE_UP: usize = 2;
const PCIE_DOWN: usize = 3;
const MEMORY: usize = 4;
const PCIE_PEER: usize = 5;

impl Machine {
    /// Capacities of `topology`.
    pub fn new(topology: &Topology) -> Machine {
        let n = topology.gpu.count;
        let mut segments = Vec::new();
        for _ in 0..n {
            let port = topology
                .fabric
                .port_gb_s
                .unwrap_or(topology.copy.engine_gb_s);
            let (up, down) = (topology.pcie.to_host_gb_s, topology.pcie.to_device_gb_s);
            segments.extend([
                port,
                port,
                up,
                down,
                topology.gpu.memory_gb_s,
                topology.pcie.peer_gb_s,
            ]);
        }
        let links = segments.len();
        for link in &topology.link {
            segments.extend([link.gb_s, link.gb_s]);
        }
        let host = segments.len();
        segments.extend([topology.host.write_gb_s, topology.host.read_gb_s]);
        let pcie = segments.len();
        for switch in &topology.pcie.switch {
            let gpu = [topology.pcie.to_host_gb_s, topology.pcie.to_device_gb_s];
            segments.extend(gpu.map(|gpu| switch.gb_s.unwrap_or(gpu)));
        }
        let engines = (0..n)
            .flat_map(|_| {
                [
                    topology.copy.host_engines,
                    topology.copy.host_engines,
                    topology.copy.peer_engines,
                    topology.copy.outward_engines.unwrap_or(1),
                ]
            })
            .collect();
        let switch = topology.fabric.kind == FabricKind::Switch;
        Machine {
            segments,
            engines,
            turn_ns: (topology.gpu.turn_us * 1000.0).round() as u64,
            beside_ns: (topology.copy.beside_us * 1000.0).round() as u64,
            per_gpu: SEGMENTS_PER_GPU,
            links,
            host,
            pcie,
            switch,
        }
    }

    /// Index of an engine.
    pub fn engine(gpu: usize, engine: Engine) -> u16 {
        (gpu * 4 + engine as usize) as u16
    }

    fn of(&self, gpu: usize, which: usize) -> usize {
        gpu * self.per_gpu + which
    }

    /// Device to pinned host memory.
    pub fn to_host(&self, topology: &Topology, gpu: usize) -> Route {
        let route = Route::default()
            .add(self.of(gpu, PCIE_UP), 1.0)
            .add(self.host, 1.0)
            .add(self.of(gpu, MEMORY), 1.0);
        self.up(route, topology.above(gpu))
    }

    /// Host memory to device.
    pub fn to_device(&self, topology: &Topology, gpu: usize) -> Route {
        let route = Route::default()
            .add(self.of(gpu, PCIE_DOWN), 1.0)
            .add(self.host + 1, 1.0)
            .add(self.of(gpu, MEMORY), 1.0);
        self.down(route, topology.above(gpu))
    }

    /// Through the links of PCIe switches, towards the host.
    fn up(&self, route: Route, switches: impl Iterator<Item = usize>) -> Route {
        switches.fold(route, |route, switch| {
            route.add(self.pcie + 2 * switch, 1.0)
        })
    }

    /// The same, from the host.
    fn down(&self, route: Route, switches: impl Iterator<Item = usize>) -> Route {
        switches.fold(route, |route, switch| {
            route.add(self.pcie + 2 * switch + 1, 1.0)
        })
    }

    /// Between two GPUs, or within one (read and written: twice over its memory).
    pub fn between(&self, topology: &Topology, from: usize, to: usize) -> Route {
        if from == to {
            return Route::default().add(self.of(from, MEMORY), 2.0);
        }
        let ends = Route::default()
            .add(self.of(from, MEMORY), 1.0)
            .add(self.of(to, MEMORY), 1.0);
        if self.switch {
            return ends.add(self.of(from, OUT), 1.0).add(self.of(to, IN), 1.0);
        }
        match topology.link_of(from, to) {
            Some((link, forward)) => ends.add(self.links + 2 * link + usize::from(!forward), 1.0),
            None => {
                let route = ends
                    .add(self.of(from, PCIE_UP), 1.0)
                    .add(self.of(to, PCIE_DOWN), 1.0)
                    .add(self.of(from, PCIE_PEER), 1.0);
                // Up to the nearest switch that both are under, or to the host, and down again.
                let passed = |gpu: usize, other: usize| {
                    let common = move |switch: &usize| topology.above(other).any(|s| s == *switch);
                    topology.above(gpu).filter(move |switch| !common(switch))
                };
                self.down(self.up(route, passed(from, to)), passed(to, from))
            }
        }
    }

    /// A kernel's or memset's traffic to its own memory.
    pub fn memory(&self, gpu: usize) -> Route {
        Route::default().add(self.of(gpu, MEMORY), 1.0)
    }

    /// Max-min fair rates for `flows`, each at most its own cap.
    pub fn rates(&self, flows: &[&Flow]) -> Vec<f64> {
        let mut rates = vec![0.0; flows.len()];
        let mut open: Vec<usize> = (0..flows.len()).collect();
        let mut left = self.segments.clone();
        while !open.is_empty() {
            let mut weights = vec![0.0; left.len()];
            for &f in &open {
                for (segment, weight) in flow_segments(flows[f]) {
                    weights[segment] += weight;
                }
            }
            let share = |f: &Flow| {
                flow_segments(f)
                    .map(|(s, _)| left[s].max(0.0) / weights[s])
                    .fold(f.cap, f64::min)
            };
            // The flow with the least share is limited by its cap or its tightest segment, and so are its equals.
            let least = open
                .iter()
                .map(|&f| share(flows[f]))
                .fold(f64::INFINITY, f64::min);
            let (fixed, rest): (Vec<usize>, Vec<usize>) = open
                .iter()
                .copied()
                .partition(|&f| share(flows[f]) <= least * (1.0 + 1e-9));
            for &f in &fixed {
                rates[f] = least;
                for (segment, weight) in flow_segments(flows[f]) {
                    left[segment] -= least * weight;
                }
            }
            open = rest;
        }
        rates
    }
}

fn flow_segments(flow: &Flow) -> impl Iterator<Item = (usize, f64)> + '_ {
    flow.segments[..usize::from(flow.segment_count)]
        .iter()
        .map(|(s, w)| (usize::from(*s), f64::from(*w)))
}

/// Puts an operation in the table; false when the table is full.
pub fn submit(body: &mut Body, mut flow: Flow) -> bool {
    if body.active_len as usize >= MAX_FLOWS {
        return false;
    }
    let Some(row) = body.flows.iter().position(|f| f.stage == Stage::Free) else {
        return false;
    };
    body.flow_order += 1;
    flow.order = body.flow_order;
    flow.stage = Stage::Queued;
    body.flows[row] = flow;
    body.active[body.active_len as usize] = row as u16;
    body.active_len += 1;
    true
}

/// Frees the rows that `gone` selects.
pub fn remove(body: &mut Body, mut gone: impl FnMut(&Flow) -> bool) {
    let len = body.active_len as usize;
    let mut kept = 0;
    for i in 0..len {
        let row = usize::from(body.active[i]);
        if gone(&body.flows[row]) {
            body.flows[row].stage = Stage::Free;
        } else {
            body.active[kept] = row as u16;
            kept += 1;
        }
    }
    body.active_len = kept as u32;
}

/// Whose turn it is on each GPU. A turn lasts until another process has something to start and nothing of the first runs any
/// more. (A real one ends after some milliseconds, too, in the middle of a kernel.)
struct Turns<'a> {
    holders: &'a mut [u16; MAX_GPUS],
    is_running: [bool; MAX_GPUS],
    is_awaited: [bool; MAX_GPUS],
    turn_ns: u64,
}

impl Turns<'_> {
    /// Something runs already.
    fn runs(&mut self, flow: &Flow) {
        if flow.turn != NO_TURN {
            self.is_running[usize::from(flow.turn)] = true;
        }
    }

    /// Lets an operation start, if its process has its turn or can have it now: what that takes. To be asked in the order
    /// in which they became ready.
    fn take(&mut self, flow: &Flow) -> Option<u64> {
        if flow.turn == NO_TURN {
            return Some(0);
        }
        let (gpu, process) = (usize::from(flow.turn), flow.proc + 1);
        let is_other = self.holders[gpu] != process && self.holders[gpu] != 0;
        if self.is_awaited[gpu] || (is_other && self.is_running[gpu]) {
            self.is_awaited[gpu] = true;
            return None;
        }
        self.holders[gpu] = process;
        self.is_running[gpu] = true;
        Some(if is_other { self.turn_ns } else { 0 })
    }
}

/// Notes the GPU from which `flow` copies to another.
fn note_source(is_source: &mut [bool; MAX_GPUS], flow: &Flow) {
    if flow.source != NO_GPU {
        is_source[usize::from(flow.source)] = true;
    }
}

/// Starts whatever may start at `now`.
fn start(machine: &Machine, body: &mut Body, now: u64) {
    let active = body.active[..body.active_len as usize].to_vec();
    let mut busy = vec![0usize; machine.engines.len()];
    let mut is_source = [false; MAX_GPUS];
    let mut turns = Turns {
        holders: &mut body.holders,
        is_running: [false; MAX_GPUS],
        is_awaited: [false; MAX_GPUS],
        turn_ns: machine.turn_ns,
    };
    for &row in &active {
        let f = &body.flows[usize::from(row)];
        if matches!(f.stage, Stage::Setup | Stage::Moving) {
            turns.runs(f);
            note_source(&mut is_source, f);
            if f.engine != NO_ENGINE {
                busy[usize::from(f.engine)] += 1;
            }
        }
    }
    let mut queued: Vec<u16> = active
        .into_iter()
        .filter(|&r| {
            body.flows[usize::from(r)].stage == Stage::Queued
                && body.flows[usize::from(r)].ready_at <= now
        })
        .collect();
    queued.sort_by_key(|&r| {
        (
            body.flows[usize::from(r)].ready_at,
            body.flows[usize::from(r)].order,
        )
    });
    for row in queued {
        let f = &mut body.flows[usize::from(row)];
        let engine = usize::from(f.engine);
        if f.engine != NO_ENGINE && busy[engine] >= machine.engines[engine] {
            continue;
        }
        let Some(turn_ns) = turns.take(f) else {
            continue;
        };
        if f.engine != NO_ENGINE {
            busy[engine] += 1;
        }
        note_source(&mut is_source, f);
        let is_slowed = f.beside != NO_GPU && is_source[usize::from(f.beside)];
        let beside_ns = if is_slowed { machine.beside_ns } else { 0 };
        f.stage = Stage::Setup;
        f.setup_until = now + turn_ns + f.setup_ns + beside_ns;
    }
}

/// Moves time from `now` to the next end of an operation, but not beyond `limit`.
///
/// Returns the new time; operations that ended are `Done` with `end` set to it.
pub fn advance(machine: &Machine, body: &mut Body, mut now: u64, limit: u64) -> u64 {
    loop {
        start(machine, body, now);
        let rows: Vec<usize> = body.active[..body.active_len as usize]
            .iter()
            .map(|r| usize::from(*r))
            .collect();
        let mut ended = false;
        for &row in &rows {
            let f = &mut body.flows[row];
            if f.stage == Stage::Setup && f.setup_until <= now {
                f.stage = Stage::Moving;
            }
            if f.stage == Stage::Moving && f.remaining < 0.5 {
                f.stage = Stage::Done;
                f.end = now;
                ended = true;
            }
        }
        if ended || now >= limit {
            return now;
        }
        let moving: Vec<usize> = rows
            .iter()
            .copied()
            .filter(|r| body.flows[*r].stage == Stage::Moving)
            .collect();
        let flows: Vec<&Flow> = moving.iter().map(|r| &body.flows[*r]).collect();
        let rates = machine.rates(&flows);
        let mut next = u64::MAX;
        for &row in &rows {
            let f = &body.flows[row];
            match f.stage {
                Stage::Queued if f.ready_at > now => next = next.min(f.ready_at),
                Stage::Setup => next = next.min(f.setup_until),
                _ => {}
            }
        }
        for (f, rate) in flows.iter().zip(&rates) {
            next = next.min(now + (f.remaining / rate).ceil().max(1.0) as u64);
        }
        if next == u64::MAX {
            return now;
        }
        let next = next.min(limit);
        let step = (next - now) as f64;
        for (row, rate) in moving.iter().zip(&rates) {
            let f = &mut body.flows[*row];
            f.remaining = (f.remaining - rate * step).max(0.0);
        }
        now = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> (Topology, Machine) {
        let topology = Topology::load("beluga", None).unwrap().0;
        let machine = Machine::new(&topology);
        (topology, machine)
    }

    fn flow(route: Route, engine: u16, bytes: f64, ready_at: u64) -> Flow {
        Flow {
            stage: Stage::Queued,
            segment_count: route.count,
            proc: 0,
            engine,
            turn: NO_TURN,
            source: NO_GPU,
            beside: NO_GPU,
            segments: route.segments,
            token: 0,
            order: 0,
            ready_at,
            setup_until: 0,
            setup_ns: 1000,
            remaining: bytes,
            cap: 1e3,
            end: 0,
        }
    }

    fn body() -> Box<Body> {
        // SAFETY: all-zero bytes are a valid Body: integers, false, and Stage::Free.
        unsafe { Box::<Body>::new_zeroed().assume_init() }
    }

    #[test]
    fn two_copies_on_a_link_share_it_and_another_link_is_free() {
        let (t, m) = machine();
        let a = flow(m.between(&t, 0, 1), NO_ENGINE, 1.0, 0);
        let b = flow(m.between(&t, 0, 2), NO_ENGINE, 1.0, 0);
        assert_eq!(m.rates(&[&a, &a, &b]), vec![24.0, 24.0, 48.0]);
        // The other direction has its own capacity.
        let back = flow(m.between(&t, 1, 0), NO_ENGINE, 1.0, 0);
        assert_eq!(m.rates(&[&a, &back]), vec![48.0, 48.0]);
    }

    #[test]
    fn a_capped_flow_leaves_its_share_to_the_others() {
        let (t, m) = machine();
        let mut a = flow(m.between(&t, 0, 1), NO_ENGINE, 1.0, 0);
        let b = a;
        a.cap = 8.0;
        assert_eq!(m.rates(&[&a, &b]), vec![8.0, 40.0]);
    }

    #[test]
    fn a_copy_takes_setup_plus_bytes_over_rate() {
        let (t, m) = machine();
        let mut body = body();
        assert!(submit(
            &mut body,
            flow(m.between(&t, 0, 1), 2, 48_000.0, 500)
        ));
        // 500 ns until ready, 1000 ns setup, 48,000 B at 48 B/ns.
        assert_eq!(advance(&m, &mut body, 0, u64::MAX), 2500);
        assert_eq!(body.flows[0].stage, Stage::Done);
    }

    #[test]
    fn processes_take_turns_on_a_gpu() {
        let (_, m) = machine();
        let turn = m.turn_ns;
        let of = |proc, turn, ready_at| Flow {
            proc,
            turn,
            ..flow(Route::default(), NO_ENGINE, 0.0, ready_at)
        };
        let ends = |flows: &[Flow]| {
            let mut body = body();
            let mut now = 0;
            flows.iter().for_each(|flow| {
                submit(&mut body, *flow);
            });
            let ends = |body: &Body| {
                let rows = body.flows[..flows.len()].iter();
                rows.map(|flow| flow.end).collect::<Vec<u64>>()
            };
            while ends(&body).contains(&0) {
                now = advance(&m, &mut body, now, u64::MAX);
            }
            ends(&body)
        };
        // The first of all waits for nobody, and the same process goes on at once.
        assert_eq!(ends(&[of(4, 0, 0), of(4, 0, 2000)]), [1000, 3000]);
        // Another waits until that is over, and then for its turn; so does who comes behind it, whoever that is.
        let rows = [of(4, 0, 0), of(5, 0, 10), of(4, 0, 20)];
        assert_eq!(ends(&rows), [1000, 2000 + turn, 3000 + 2 * turn]);
        // Not on another GPU, and not what needs no turn.
        let rows = [of(4, 0, 0), of(5, 1, 10), of(5, NO_TURN, 10)];
        assert_eq!(ends(&rows), [1000, 1010, 1010]);
    }

    /// Chunks on their way to the host, and the flags behind them, beside a long copy from the same GPU to another.
    #[test]
    fn what_goes_on_beside_a_copy_to_another_gpu_takes_longer() {
        let topology = Topology::load("hgx-h200", None).unwrap().0;
        let m = Machine::new(&topology);
        let long = Flow {
            source: 0,
            ..flow(m.between(&topology, 0, 1), NO_ENGINE, 396e6, 0)
        };
        let beside = |beside, ready_at| Flow {
            beside,
            ..flow(Route::default(), NO_ENGINE, 0.0, ready_at)
        };
        let first_end = |flows: &[Flow]| {
            let mut body = body();
            flows.iter().for_each(|flow| {
                submit(&mut body, *flow);
            });
            advance(&m, &mut body, 0, u64::MAX)
        };
        // 4.4 us more at the GPU that the copy reads, if it has begun; none at the one that it writes to, or elsewhere.
        assert_eq!(first_end(&[long, beside(0, 10)]), 1010 + 4400);
        assert_eq!(first_end(&[long, beside(1, 10)]), 1010);
        assert_eq!(first_end(&[long, beside(NO_GPU, 10)]), 1010);
        assert_eq!(
            first_end(&[
                Flow {
                    ready_at: 20,
                    ..long
                },
                beside(0, 10)
            ]),
            1010
        );
    }

    #[test]
    fn an_engine_runs_its_copies_one_after_the_other() {
        let (t, m) = machine();
        let mut body = body();
        let engine = Machine::engine(0, Engine::ToHost);
        submit(&mut body, flow(m.to_host(&t, 0), engine, 12_300.0, 0));
        submit(&mut body, flow(m.to_host(&t, 0), engine, 12_300.0, 0));
        assert_eq!(advance(&m, &mut body, 0, u64::MAX), 2000);
        remove(&mut body, |f| f.stage == Stage::Done);
        assert_eq!(advance(&m, &mut body, 2000, u64::MAX), 4000);
    }

    /// One link of 16 lanes for the two GPUs of a switch of DGX-1, each direction by itself; the next switch has its own.
    #[test]
    fn gpus_under_one_switch_share_its_link() {
        let topology = Topology::load("dgx1-v100", None).unwrap().0;
        let m = Machine::new(&topology);
        let up = |gpu| flow(m.to_host(&topology, gpu), NO_ENGINE, 1.0, 0);
        let down = |gpu| flow(m.to_device(&topology, gpu), NO_ENGINE, 1.0, 0);
        let rates = |flows: &[Flow]| m.rates(&flows.iter().collect::<Vec<_>>());
        assert_eq!(
            rates(&[up(0), up(1), down(0), up(2)]),
            [6.15, 6.15, 12.3, 12.3]
        );
        assert_eq!(rates(&[down(6), down(7), down(4)]), [6.15, 6.15, 12.3]);
        // GPU 0 to 5 has no NVLink: it goes up by the one switch and down by the other.
        let peer = flow(m.between(&topology, 0, 5), NO_ENGINE, 1.0, 0);
        assert_eq!(
            rates(&[peer, up(1), down(4), up(4)]),
            [6.15, 6.15, 6.15, 12.3]
        );
    }

    #[test]
    fn time_stops_at_the_limit() {
        let (t, m) = machine();
        let mut body = body();
        submit(&mut body, flow(m.between(&t, 0, 1), 2, 48_000.0, 0));
        assert_eq!(advance(&m, &mut body, 0, 1500), 1500);
        assert_eq!(body.flows[0].stage, Stage::Moving);
        assert_eq!(advance(&m, &mut body, 1500, u64::MAX), 2000);
    }
}
