//! This process's objects: contexts, streams, events, modules, graphs.

use crate::errors::{Res, INVALID_CONTEXT, INVALID_HANDLE};
use crate::event::Event;
use crate::graph::{Exec, Graph};
use crate::memory::Memory;
use crate::module::{Function, Module};
use crate::sched::{OpState, Sched};
use crate::types::{CUcontext, CUresult, CUstream, Handle, STREAM_LEGACY, STREAM_PER_THREAD};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::thread::ThreadId;

/// CU_STREAM_NON_BLOCKING.
pub const NON_BLOCKING: u32 = 1;

/// A context.
pub struct Context {
    /// Ordinal as the process sees it.
    pub ordinal: usize,
    /// Physical GPU.
    pub gpu: usize,
    /// Primary context of its device.
    pub primary: bool,
    /// Flags.
    pub flags: u32,
    /// Identity.
    pub id: u64,
    /// Its legacy default stream.
    pub legacy: CUstream,
    /// Streams made in it so far.
    pub streams_made: u64,
    /// Per-thread default streams.
    pub per_thread: HashMap<ThreadId, CUstream>,
    /// Contexts it may reach.
    pub peers: HashSet<CUcontext>,
    /// Limits that the program has set.
    pub limits: HashMap<u32, usize>,
    /// Error that sticks after a fault on the device.
    pub error: CUresult,
}

/// A stream.
pub struct Stream {
    /// Context.
    pub context: CUcontext,
    /// Physical GPU.
    pub gpu: usize,
    /// Flags.
    pub flags: u32,
    /// Priority.
    pub priority: i32,
    /// The legacy default stream of its context.
    pub legacy: bool,
    /// Identity for the checker.
    pub uid: u64,
    /// Its number among the streams of its context, which decides what it shares a hardware queue with.
    pub ordinal: u64,
    /// Operations so far.
    pub position: u64,
    /// Last operation.
    pub tail: Option<Arc<OpState>>,
    /// The capture it takes part in.
    pub capture: Option<crate::capture::Part>,
}

/// The primary context of a device.
#[derive(Default, Clone, Copy)]
pub struct Primary {
    /// Handle, once made; it stays the same after a reset.
    pub context: CUcontext,
    /// Retains less releases.
    pub references: u32,
    /// It was reset since: there is no context until it is retained again.
    pub was_reset: bool,
    /// Flags.
    pub flags: u32,
}

/// Everything.
#[derive(Default)]
pub struct State {
    next_handle: usize,
    /// Contexts.
    pub contexts: HashMap<CUcontext, Context>,
    /// Devices of all contexts that there are or were.
    pub devices: HashMap<CUcontext, usize>,
    /// Primary contexts by visible ordinal.
    pub primaries: Vec<Primary>,
    /// Streams.
    pub streams: HashMap<CUstream, Stream>,
    /// Events.
    pub events: HashMap<Handle, Arc<Event>>,
    /// Modules and libraries.
    pub modules: HashMap<Handle, Module>,
    /// Functions and kernels.
    pub functions: HashMap<Handle, Function>,
    /// Graphs.
    pub graphs: HashMap<Handle, Graph>,
    /// Graph of each node.
    pub node_graph: HashMap<Handle, Handle>,
    /// Executable graphs.
    pub execs: HashMap<Handle, Exec>,
    /// Captures under way.
    pub captures: HashMap<u64, crate::capture::Capture>,
    /// Memory.
    pub memory: Memory,
    /// Operations.
    pub sched: Sched,
    /// Last operations of streams that are destroyed, while they are pending.
    pub orphans: Vec<(CUcontext, Arc<OpState>)>,
}

thread_local! {
    static CURRENT: RefCell<Vec<CUcontext>> = const { RefCell::new(Vec::new()) };
    static PER_THREAD_DEFAULT: Cell<u32> = const { Cell::new(0) };
}

/// While it lives, stream 0 means the per-thread default stream in this thread.
pub struct PerThreadDefault(());

impl PerThreadDefault {
    /// Enters the scope.
    pub fn enter() -> PerThreadDefault {
        PER_THREAD_DEFAULT.with(|c| c.set(c.get() + 1));
        PerThreadDefault(())
    }
}

impl Drop for PerThreadDefault {
    fn drop(&mut self) {
        PER_THREAD_DEFAULT.with(|c| c.set(c.get() - 1));
    }
}

/// The calling thread's current context, 0 for none.
pub fn current() -> CUcontext {
    CURRENT.with(|c| c.borrow().last().copied().unwrap_or(0))
}

/// Replaces the top of the calling thread's stack (0 removes it).
pub fn set_current(context: CUcontext) {
    CURRENT.with(|c| {
        let mut stack = c.borrow_mut();
        stack.pop();
        if context != 0 {
            stack.push(context);
        }
    });
}

/// Pushes a context.
pub fn push_current(context: CUcontext) {
    CURRENT.with(|c| c.borrow_mut().push(context));
}

/// Pops the top.
pub fn pop_current() -> Option<CUcontext> {
    CURRENT.with(|c| c.borrow_mut().pop())
}

impl State {
    /// A handle that no other object of this process has or had.
    pub fn handle(&mut self) -> Handle {
        self.next_handle += 1;
        0x00c0_0000_0000 + (self.next_handle << 4)
    }

    /// The current context, which must exist.
    pub fn context(&self) -> Res<(CUcontext, &Context)> {
        let handle = current();
        match self.contexts.get(&handle) {
            Some(context) if context.error != 0 => Err(context.error),
            Some(context) => Ok((handle, context)),
            None if handle == 0 => Err(INVALID_CONTEXT),
            None => Err(crate::errors::CONTEXT_IS_DESTROYED),
        }
    }

    /// The error that sticks to the current context, if there is one.
    pub fn sticky(&self) -> Res {
        match self.contexts.get(&current()) {
            Some(context) if context.error != 0 => Err(context.error),
            _ => Ok(()),
        }
    }

    /// A context by handle, 0 meaning the current one.
    pub fn context_or_current(&self, handle: CUcontext) -> Res<(CUcontext, &Context)> {
        if handle == 0 {
            return self.context();
        }
        self.contexts
            .get(&handle)
            .map(|c| (handle, c))
            .ok_or(INVALID_CONTEXT)
    }

    /// Makes a stream.
    #[allow(
        clippy::too_many_arguments,
        reason = "the parameters of the driver's own call"
    )]
    pub fn make_stream(
        &mut self,
        d: &crate::driver::Driver,
        context: CUcontext,
        gpu: usize,
        flags: u32,
        priority: i32,
        legacy: bool,
    ) -> CUstream {
        let handle = self.handle();
        let uid = d.new_stream_uid();
        let ordinal = self.contexts.get_mut(&context).map_or(0, |c| {
            c.streams_made += 1;
            c.streams_made - 1
        });
        let stream = Stream {
            context,
            gpu,
            flags,
            priority,
            legacy,
            uid,
            ordinal,
            position: 0,
            tail: None,
            capture: None,
        };
        self.streams.insert(handle, stream);
        handle
    }

    /// The stream that `handle` means in the calling thread.
    pub fn stream_handle(&mut self, d: &crate::driver::Driver, handle: CUstream) -> Res<CUstream> {
        let per_thread =
            handle == STREAM_PER_THREAD || (handle == 0 && PER_THREAD_DEFAULT.with(Cell::get) > 0);
        if per_thread {
            let (context, c) = self.context()?;
            let thread = std::thread::current().id();
            if let Some(stream) = c.per_thread.get(&thread) {
                return Ok(*stream);
            }
            let gpu = c.gpu;
            let stream = self.make_stream(d, context, gpu, 0, 0, false);
            if let Some(c) = self.contexts.get_mut(&context) {
                c.per_thread.insert(thread, stream);
            }
            return Ok(stream);
        }
        if handle == 0 || handle == STREAM_LEGACY {
            return Ok(self.context()?.1.legacy);
        }
        let stream = self.streams.get(&handle).ok_or(INVALID_HANDLE)?;
        match self.contexts.get(&stream.context) {
            Some(c) if c.error != 0 => Err(c.error),
            Some(_) => Ok(handle),
            None => Err(INVALID_HANDLE),
        }
    }

    /// What an operation in `stream` follows: the stream's order, and the legacy stream's rules.
    pub fn stream_deps(&self, stream: CUstream) -> Vec<Arc<OpState>> {
        let Some(s) = self.streams.get(&stream) else {
            return Vec::new();
        };
        let mut deps: Vec<Arc<OpState>> = s.tail.iter().cloned().collect();
        if s.legacy {
            let blocking =
                |o: &&Stream| o.context == s.context && o.flags & NON_BLOCKING == 0 && !o.legacy;
            deps.extend(
                self.streams
                    .values()
                    .filter(blocking)
                    .filter_map(|o| o.tail.clone()),
            );
        } else if s.flags & NON_BLOCKING == 0 {
            let legacy = self
                .contexts
                .get(&s.context)
                .and_then(|c| self.streams.get(&c.legacy));
            deps.extend(legacy.and_then(|l| l.tail.clone()));
        }
        deps
    }

    /// What a query or synchronize of a stream covers: its last operation, and for the legacy stream those it waits for.
    pub fn stream_deps_for_sync(&self, stream: CUstream) -> Vec<Arc<OpState>> {
        match self.streams.get(&stream) {
            Some(s) if s.legacy => self.stream_deps(stream),
            Some(s) => s.tail.iter().cloned().collect(),
            None => Vec::new(),
        }
    }

    /// Last operations of all streams of a context.
    pub fn context_tails(&self, context: CUcontext) -> Vec<Arc<OpState>> {
        let orphans = self
            .orphans
            .iter()
            .filter(|(c, _)| *c == context)
            .map(|(_, op)| op.clone());
        let streams = self.streams.values().filter(|s| s.context == context);
        streams
            .filter_map(|s| s.tail.clone())
            .chain(orphans)
            .collect()
    }

    /// Last operations of all streams of the process.
    pub fn all_tails(&self) -> Vec<Arc<OpState>> {
        let orphans = self.orphans.iter().map(|(_, op)| op.clone());
        self.streams
            .values()
            .filter_map(|s| s.tail.clone())
            .chain(orphans)
            .collect()
    }

    /// A fault on a device: every context there is lost, as on hardware.
    pub fn fail(&mut self, gpu: usize, code: CUresult) {
        for context in self.contexts.values_mut().filter(|c| c.gpu == gpu) {
            context.error = code;
        }
    }
}
