//! Operations of this process: a graph of dependencies, worked off as virtual time allows.
//!
//! Stream order, events, graph edges and the legacy stream's rules all become edges here. An
//! operation whose predecessors are complete starts; what takes time becomes a flow of the node's
//! clock, and its effect is applied when that flow has ended, without any lock held.

use crate::checker::{self, Actor, History};
use crate::driver::Driver;
use crate::job::real_ns;
use crate::shared::{Flow, Stage, NO_TURN};
use crate::state::State;
use crate::types::CUresult;
use crate::work::{Piece, Work};
use parking_lot::MutexGuard;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::*};
use std::sync::Arc;

/// What stays of an operation for those that refer to it.
pub struct OpState {
    /// Number.
    pub id: u64,
    /// Complete, effects applied.
    pub done: AtomicBool,
    /// Virtual time of completion.
    pub end: AtomicU64,
    /// Observations that whatever follows may rely on.
    pub known: AtomicU64,
    /// What it is ordered after, itself included.
    pub history: History,
    /// Error, or 0.
    pub error: AtomicI32,
    /// A host has seen it complete.
    pub observed: AtomicBool,
}

/// Place of an operation in a stream, for the checker.
#[derive(Clone, Copy)]
pub struct Position {
    /// Stream identity.
    pub stream: u64,
    /// Position.
    pub index: u64,
    /// Physical GPU whose engines it uses.
    pub gpu: usize,
    /// Hardware queue in which it stands, 0 for none.
    pub queue: u64,
}

struct Op {
    state: Arc<OpState>,
    work: Work,
    position: Position,
    unmet: usize,
    successors: Vec<u64>,
    ready_at: u64,
    /// Pieces of a copy that were moved before its time was over.
    landed: Vec<Piece>,
}

/// All unfinished operations.
#[derive(Default)]
pub struct Sched {
    ops: BTreeMap<u64, Op>,
    ready: Vec<u64>,
    polling: Vec<u64>,
    backlog: Vec<u64>,
    queues: HashMap<u64, VecDeque<u64>>,
    held: HashSet<u64>,
    next: u64,
    observed: HashMap<u64, u64>,
}

impl Sched {
    /// True when nothing is under way.
    pub fn idle(&self) -> bool {
        self.ops.is_empty()
    }

    /// True when an operation waits for a value or an event of another process.
    pub fn polls(&self) -> bool {
        !self.polling.is_empty()
    }

    /// Enters an operation after `deps`.
    #[allow(clippy::too_many_arguments, reason = "what an operation is, each once")]
    pub fn add(
        &mut self,
        issued: u64,
        known: u64,
        work: Work,
        position: Position,
        deps: &[Arc<OpState>],
        more: &[(u64, u64)],
    ) -> Arc<OpState> {
        let mut history = Vec::new();
        for dep in deps {
            if history.is_empty() {
                history.clone_from(&dep.history);
            } else {
                checker::join(&mut history, &dep.history);
            }
        }
        checker::join(&mut history, more);
        // What a host has already seen is covered by `known`.
        history.retain(|(s, p)| self.observed.get(s).is_none_or(|o| o < p));
        checker::join(&mut history, &[(position.stream, position.index)]);
        self.next += 1;
        let id = self.next;
        let state = Arc::new(OpState {
            id,
            done: AtomicBool::new(false),
            end: AtomicU64::new(0),
            known: AtomicU64::new(known),
            history: Arc::new(history),
            error: AtomicI32::new(0),
            observed: AtomicBool::new(false),
        });
        let mut op = Op {
            state: state.clone(),
            work,
            position,
            unmet: 0,
            successors: Vec::new(),
            ready_at: issued,
            landed: Vec::new(),
        };
        for dep in deps {
            match self.ops.get_mut(&dep.id) {
                Some(before) => {
                    before.successors.push(id);
                    op.unmet += 1;
                }
                None => op.follow(&dep.state_view()),
            }
        }
        if op.unmet == 0 {
            self.ready.push(id);
        }
        if position.queue != 0 {
            self.queues.entry(position.queue).or_default().push_back(id);
        }
        self.ops.insert(id, op);
        state
    }

    /// An unfinished operation on the checker's `space`, by the name of its kind and its stream.
    pub fn under_way_on(&self, space: u64) -> Option<(&'static str, u64)> {
        let touches = |op: &&Op| op.work.accesses().iter().any(|a| a.space == space);
        let op = self.ops.values().find(touches)?;
        Some((
            checker::KINDS[usize::from(op.work.kind())],
            op.position.stream,
        ))
    }

    /// True when an operation is at the head of its hardware queue; else it starts when it gets there.
    fn at_head(&mut self, id: u64, queue: u64) -> bool {
        let first = queue == 0 || self.queues.get(&queue).and_then(|q| q.front()) == Some(&id);
        if !first {
            self.held.insert(id);
        }
        first
    }

    /// The head of a hardware queue gives way to the next at `time`.
    fn leave_queue(&mut self, id: u64, queue: u64, time: u64) {
        let Some(waiting) = self.queues.get_mut(&queue) else {
            return;
        };
        if waiting.front() != Some(&id) {
            return;
        }
        waiting.pop_front();
        match waiting.front().copied() {
            None => {
                self.queues.remove(&queue);
            }
            Some(next) => {
                if let Some(op) = self.ops.get_mut(&next) {
                    op.ready_at = op.ready_at.max(time);
                }
                if self.held.remove(&next) {
                    self.ready.push(next);
                }
            }
        }
    }

    fn complete(&mut self, id: u64, end: u64) -> Option<Op> {
        let op = self.ops.remove(&id)?;
        self.leave_queue(id, op.position.queue, end);
        op.state.end.store(end, Relaxed);
        op.state.done.store(true, Release);
        let view = op.state.state_view();
        for next in &op.successors {
            if let Some(after) = self.ops.get_mut(next) {
                after.follow(&view);
                after.unmet -= 1;
                if after.unmet == 0 {
                    self.ready.push(*next);
                }
            }
        }
        Some(op)
    }

    /// Remembers that a host has seen everything in `history`.
    pub fn note_observed(&mut self, history: &[(u64, u64)]) {
        for &(stream, position) in history {
            let seen = self.observed.entry(stream).or_insert(0);
            *seen = (*seen).max(position);
        }
    }

    fn oldest_known(&self) -> u64 {
        self.ops
            .values()
            .next()
            .map_or(u64::MAX, |op| op.state.known.load(Relaxed))
    }
}

struct View {
    end: u64,
    known: u64,
    error: CUresult,
}

impl OpState {
    fn state_view(&self) -> View {
        View {
            end: self.end.load(Relaxed),
            known: self.known.load(Relaxed),
            error: self.error.load(Relaxed),
        }
    }
}

impl Op {
    /// A copy reads and writes at any time between its start and its end: some pieces, chosen by its number, go at
    /// the start.
    fn land_early(&mut self) {
        if self.state.error.load(Relaxed) == 0 {
            self.landed = self.work.land_early(self.state.id);
        }
    }

    fn follow(&mut self, before: &View) {
        self.ready_at = self.ready_at.max(before.end);
        self.state.known.fetch_max(before.known, Relaxed);
        if before.error != 0 {
            self.state.error.store(before.error, Relaxed);
        }
    }
}

/// Takes up what has ended and starts what may start, until nothing more moves. True when something did.
pub fn pump(d: &'static Driver, st: &mut MutexGuard<'_, State>) -> bool {
    let mut moved = false;
    loop {
        if d.closed.load(Acquire) {
            return false;
        }
        let taken = take_ended(d);
        let applied = taken.len() as u32;
        let begun = if applied > 0 { real_ns() } else { 0 };
        for (id, end) in taken {
            apply(d, st, id, end);
        }
        let started = start_ready(d, st);
        if applied > 0 {
            d.wake(real_ns() - begun);
            d.job.me().unapplied.fetch_sub(applied, AcqRel);
            d.notify(d.job.slot);
        }
        if applied == 0 && !started {
            return moved;
        }
        moved = true;
    }
}

fn take_ended(d: &Driver) -> Vec<(u64, u64)> {
    if d.job.me().unapplied.load(Acquire) == 0 {
        return Vec::new();
    }
    let mut ended = Vec::new();
    let slot = d.job.slot;
    let mut body = d.job.lock();
    crate::clock::remove(&mut body, |f| {
        let mine = f.stage == Stage::Done && usize::from(f.proc) == slot;
        if mine {
            ended.push((f.order, f.token, f.end));
        }
        mine
    });
    ended.sort_unstable();
    ended
        .into_iter()
        .map(|(_, token, end)| (token, end))
        .collect()
}

/// Applies the effect of an operation whose time is over, and completes it.
fn apply(d: &'static Driver, st: &mut MutexGuard<'_, State>, id: u64, end: u64) {
    let Some(op) = st.sched.ops.get(&id) else {
        return;
    };
    if let Work::MemOps(ops) = &op.work {
        if !ops.iter().all(crate::work::MemOp::satisfied) {
            if let Some(op) = st.sched.ops.get_mut(&id) {
                op.ready_at = end;
            }
            st.sched.polling.push(id);
            return;
        }
    }
    let (work, state, landed) = (op.work.clone(), op.state.clone(), op.landed.clone());
    if state.error.load(Relaxed) == 0 {
        if work.announces() {
            // Before the bytes show: whoever sees them may rely on everything before.
            observe_in(d, st, &state);
        }
        let skipped = d.timing_only && work.bulky();
        let outcome = MutexGuard::unlocked(st, || if skipped { Ok(()) } else { work.run(&landed) });
        if let Err(code) = outcome {
            state.error.store(code, Relaxed);
            let gpu = state_gpu(st, id);
            st.fail(gpu, code);
        }
        d.report.moved(&work);
    }
    if let Some(op) = st.sched.complete(id, end) {
        finish(d, &op, end);
    }
}

fn state_gpu(st: &State, id: u64) -> usize {
    st.sched.ops.get(&id).map_or(0, |op| op.position.gpu)
}

/// What others may learn from a completed operation.
fn finish(d: &Driver, op: &Op, end: u64) {
    if let Work::Record(event) = &op.work {
        let shared = *event.shared.lock();
        if let Some((row, id)) = shared {
            crate::ipc::event_completed(d, row, id, &op.state, end);
        }
    }
    if d.checking
        && matches!(
            op.work,
            Work::Copy(_) | Work::Fill(_) | Work::Kernel(_) | Work::MemOps(_) | Work::Claim { .. }
        )
    {
        d.job
            .lock()
            .complete_accesses(op.position.stream, op.position.index);
    }
}

/// Starts every operation whose predecessors are complete, and looks at those that wait for a value.
fn start_ready(d: &'static Driver, st: &mut MutexGuard<'_, State>) -> bool {
    let mut moved = false;
    let polling = std::mem::take(&mut st.sched.polling);
    for id in polling {
        moved |= poll_one(d, st, id);
    }
    let mut ready = std::mem::take(&mut st.sched.backlog);
    let waiting = ready.len();
    ready.append(&mut st.sched.ready);
    if ready.len() > waiting {
        moved = true;
    }
    for (i, id) in ready.into_iter().enumerate() {
        start_one(d, st, id, i < waiting);
    }
    d.job
        .me()
        .oldest_known
        .store(st.sched.oldest_known(), Relaxed);
    moved
}

fn poll_one(d: &'static Driver, st: &mut MutexGuard<'_, State>, id: u64) -> bool {
    let Some(op) = st.sched.ops.get(&id) else {
        return false;
    };
    let at = op.ready_at.max(d.job.now());
    match &op.work {
        Work::MemOps(ops) if ops.iter().all(crate::work::MemOp::satisfied) => {
            op.state.known.fetch_max(d.observations(), Relaxed);
            apply(d, st, id, at);
            true
        }
        Work::SharedWait {
            row,
            id: event,
            number,
        } => {
            let Some((time, known)) = crate::ipc::event_reached(d, *row, *event, *number) else {
                st.sched.polling.push(id);
                return false;
            };
            op.state.known.fetch_max(known, Relaxed);
            let end = op.ready_at.max(time);
            if let Some(op) = st.sched.complete(id, end) {
                finish(d, &op, end);
            }
            true
        }
        _ => {
            st.sched.polling.push(id);
            false
        }
    }
}

fn start_one(d: &'static Driver, st: &mut MutexGuard<'_, State>, id: u64, again: bool) {
    let Some(op) = st.sched.ops.get(&id) else {
        return;
    };
    if let Work::SharedWait { .. } = op.work {
        st.sched.polling.push(id);
        return;
    }
    if let Work::Host(code) = op.work {
        let state = op.state.clone();
        observe_in(d, st, &state);
        d.host_code(id, code, state.error.load(Relaxed));
        return;
    }
    let queue = op.position.queue;
    if !st.sched.at_head(id, queue) {
        return;
    }
    let Some(op) = st.sched.ops.get(&id) else {
        return;
    };
    let demand = op.work.demand(&d.topology, &d.machine, op.position.gpu);
    let Some(demand) = demand else {
        let end = op.ready_at;
        if d.checking && matches!(op.work, Work::Claim { .. }) {
            check_start(d, op, &mut d.job.lock());
        }
        if let Some(op) = st.sched.complete(id, end) {
            finish(d, &op, end);
        }
        return;
    };
    // A wait stands in the way until it is over, everything else until its engine has it.
    let waits = matches!(op.work, Work::MemOps(_));
    let ready_at = op.ready_at;
    let takes_turn = !d.mps && op.work.takes_turn();
    let flow = Flow {
        stage: Stage::Queued,
        segment_count: demand.route.count,
        proc: d.job.slot as u16,
        engine: demand.engine,
        turn: if takes_turn {
            op.position.gpu as u16
        } else {
            NO_TURN
        },
        source: demand.source,
        beside: demand.beside,
        segments: demand.route.segments,
        token: id,
        order: 0,
        ready_at: op.ready_at,
        setup_until: 0,
        setup_ns: demand.setup_ns,
        remaining: demand.bytes,
        cap: demand.cap,
        end: 0,
    };
    let mut body = d.job.lock();
    if !again && d.checking {
        check_start(d, op, &mut body);
    }
    drop(body);
    if !again && !d.timing_only {
        if let Some(op) = st.sched.ops.get_mut(&id) {
            op.land_early();
        }
    }
    let mut body = d.job.lock();
    let submitted = crate::clock::submit(&mut body, flow);
    drop(body);
    if !submitted {
        st.sched.backlog.push(id);
    } else if !waits {
        st.sched.leave_queue(id, queue, ready_at);
    }
}

fn check_start(d: &Driver, op: &Op, body: &mut crate::job::Locked<'_>) {
    let pid = std::process::id();
    for (row, buffer) in op.work.imports() {
        let export = &body.exports[row as usize];
        if export.buffer != buffer || export.freed {
            d.report.freed_in_use(&format!(
                "use after free: {} in process {pid} stream {} on memory that its owner has freed (mapping still open)",
                checker::KINDS[usize::from(op.work.kind())],
                op.position.stream
            ));
        }
    }
    let accesses = op.work.accesses();
    if accesses.is_empty() {
        return;
    }
    let actor = Actor {
        kind: op.work.kind(),
        stream: op.position.stream,
        position: op.position.index,
        history: &op.state.history,
        known: op.state.known.load(Relaxed),
        proc: d.job.slot as u16,
        pid,
    };
    let oldest = d
        .job
        .shared()
        .procs
        .iter()
        .filter(|p| p.pid.load(Relaxed) != 0);
    let oldest = oldest
        .map(|p| p.oldest_known.load(Relaxed))
        .min()
        .unwrap_or(0);
    for race in body.start_accesses(actor, &accesses, oldest) {
        d.report.race(&race);
    }
}

/// Completes an operation of host code after it has run.
pub fn host_code_done(d: &'static Driver, id: u64) {
    let mut st = d.state.lock();
    let end = st
        .sched
        .ops
        .get(&id)
        .map_or(0, |op| op.ready_at)
        .max(d.job.now());
    if let Some(op) = st.sched.complete(id, end) {
        finish(d, &op, end);
    }
    pump(d, &mut st);
    drop(st);
    d.notify(d.job.slot);
}

/// A host has seen `state` complete, or is about to.
pub fn observe_in(d: &Driver, st: &mut State, state: &OpState) {
    if state.observed.swap(true, Relaxed) {
        return;
    }
    st.sched.note_observed(&state.history);
    // Counted and marked under one lock: whoever knows the number finds the marks.
    let mut body = d.job.lock();
    let at = d.job.shared().observations.fetch_add(1, SeqCst) + 1;
    if d.checking {
        body.observe(&state.history, at);
    }
}
