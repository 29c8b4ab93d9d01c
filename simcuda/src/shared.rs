//! Layout of the state that all processes of a simulated node share.
//!
//! The file is mapped by every process at some address; nothing in it is a pointer. The header's
//! atomics are read without the lock; [`Body`] is only touched by the holder of the node's lock.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, AtomicU64};

/// Marks an initialised file; changes with every change of the layout.
pub const MAGIC: u64 = 0x5349_4d43_5544_4138;
/// Processes a node may have at once.
pub const MAX_PROCS: usize = 64;
/// Operations in flight on a node at once.
pub const MAX_FLOWS: usize = 2048;
/// Allocations exported over IPC at once.
pub const MAX_EXPORTS: usize = 8192;
/// Events exported over IPC at once.
pub const MAX_EVENTS: usize = 2048;
/// Accesses that the checker remembers; the oldest go first.
pub const MAX_RECORDS: usize = 8192;
/// Streams that an exported event's history can name.
pub const MAX_HISTORY: usize = 48;

/// The whole file.
#[repr(C)]
pub struct Shared {
    /// [`MAGIC`] once initialised.
    pub magic: AtomicU64,
    /// Fingerprint of the topology all processes must agree on.
    pub topology: AtomicU64,
    /// Virtual time in nanoseconds.
    pub clock: AtomicU64,
    /// Next allocation identity; never reused.
    pub next_buffer: AtomicU64,
    /// Next stream identity for the checker; never reused.
    pub next_stream: AtomicU64,
    /// Order of host observations in real time (see `checker`).
    pub observations: AtomicU64,
    /// Counts calls that issued or took up work, of all processes: what one has learned it may tell the others.
    pub turn: AtomicU64,
    /// Latest virtual time of which the host code of some process knows.
    pub known: AtomicU64,
    /// Virtual nanoseconds by which host code has reacted later than it could have, of all processes.
    pub late: AtomicU64,
    /// Bytes that the host could back of the GPUs' memory when the node began.
    pub host_bytes: AtomicU64,
    /// CLOCK_MONOTONIC nanoseconds until which some process has promised to look whether time may move.
    pub watch_until: AtomicU64,
    /// Robust process-shared mutex.
    pub lock: UnsafeCell<libc::pthread_mutex_t>,
    /// One row a process.
    pub procs: [Proc; MAX_PROCS],
    /// Under the lock.
    pub body: UnsafeCell<Body>,
}

/// A process of the node. Read by others without the lock.
#[repr(C, align(64))]
pub struct Proc {
    /// Process id, 0 when the row is free.
    pub pid: AtomicU32,
    /// Futex word: changes when the process has something to take up.
    pub word: AtomicU32,
    /// Threads inside a call of the driver.
    pub inside: AtomicU32,
    /// Threads inside a blocking call.
    pub parked: AtomicU32,
    /// Queries since the last call that changed anything, all answered "not ready".
    pub idle_polls: AtomicU32,
    /// Finished operations whose effects the process has still to apply.
    pub unapplied: AtomicU32,
    /// CLOCK_MONOTONIC nanoseconds since which there have been some.
    pub unapplied_at: AtomicU64,
    /// It has taken up finished operations, and its host code has not looked since.
    pub awake: AtomicU32,
    /// Futex word of the background thread, which runs when no thread is parked.
    pub worker_word: AtomicU32,
    /// Start time of the process in clock ticks, to tell a recycled pid.
    pub started: AtomicU64,
    /// Its pid namespace (inode number): pids mean something to the processes of one only.
    pub namespace: AtomicU64,
    /// Identity, never reused.
    pub uid: AtomicU64,
    /// CLOCK_MONOTONIC nanoseconds of the last call that issued or took up work.
    pub active_at: AtomicU64,
    /// CPU time that the process had used by then, its background thread apart, in nanoseconds.
    pub active_cpu: AtomicU64,
    /// CPU time of its background thread, in nanoseconds, which says nothing about the program.
    pub worker_cpu: AtomicU64,
    /// Thread that made that call.
    pub active_thread: AtomicU32,
    /// The node's turn (see `Shared::turn`) in which it has polled last, and how often in vain in that turn.
    pub polled_turn: AtomicU64,
    /// See there.
    pub turn_polls: AtomicU32,
    /// It has done something of which it may still be about to tell others.
    pub told: AtomicU32,
    /// CPU time that it had used after its latest poll.
    pub polled_cpu: AtomicU64,
    /// The turn in which its CPU time was looked at, what that was, and when.
    pub base_turn: AtomicU64,
    /// See there.
    pub base_cpu: AtomicU64,
    /// See there.
    pub base_at: AtomicU64,
    /// Virtual time of the process's host code.
    pub host_time: AtomicU64,
    /// Descriptor number of the process's device memory, for others to open.
    pub memory_fd: AtomicU32,
    /// Bytes allocated on each physical GPU.
    pub used: [AtomicU64; crate::topology::MAX_GPUS],
    /// Physical GPUs on which the process has a context, one bit each.
    pub contexts: AtomicU32,
    /// Oldest observation count that an issued, unstarted operation of this process relies on.
    pub oldest_known: AtomicU64,
}

/// Stage of an operation on an engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Stage {
    /// Row unused.
    Free,
    /// Waits for its time or its engine.
    Queued,
    /// Occupies its engine, bytes not yet moving.
    Setup,
    /// Bytes move.
    Moving,
    /// Over; its process has to apply the effect.
    Done,
}

/// Segments one operation can load: of a copy between two GPUs over PCIe the memory and the link of both, what one may send to
/// others, and the switches above both.
pub const MAX_SEGMENTS: usize = 5 + 2 * crate::topology::MAX_SWITCHES_ABOVE;

/// An operation that takes virtual time.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Flow {
    /// Stage.
    pub stage: Stage,
    /// Valid entries of `segments`.
    pub segment_count: u8,
    /// Row of the owning process.
    pub proc: u16,
    /// Engine, or [`NO_ENGINE`].
    pub engine: u16,
    /// GPU on which processes take turns with it, or [`NO_TURN`].
    pub turn: u16,
    /// GPU from which it copies to another one, or [`NO_GPU`].
    pub source: u16,
    /// GPU beside whose copies to others it takes longer, or [`NO_GPU`].
    pub beside: u16,
    /// Segments loaded, with how often each byte passes.
    pub segments: [(u16, f32); MAX_SEGMENTS],
    /// Owner's name for it.
    pub token: u64,
    /// Submission order, breaks ties.
    pub order: u64,
    /// Earliest start.
    pub ready_at: u64,
    /// End of setup.
    pub setup_until: u64,
    /// Setup time.
    pub setup_ns: u64,
    /// Bytes still to move.
    pub remaining: f64,
    /// Bytes a nanosecond at most.
    pub cap: f64,
    /// When it ended.
    pub end: u64,
}

/// An operation that needs no engine.
pub const NO_ENGINE: u16 = u16::MAX;

/// An operation for which processes take no turns.
pub const NO_TURN: u16 = u16::MAX;

/// No GPU.
pub const NO_GPU: u16 = u16::MAX;

/// An allocation that its owner has exported.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Export {
    /// Allocation identity, 0 when free.
    pub buffer: u64,
    /// Owner's identity.
    pub owner: u64,
    /// Offset in the owner's memory file.
    pub offset: u64,
    /// Length in bytes.
    pub size: u64,
    /// Physical GPU.
    pub gpu: u32,
    /// Mappings in each other process.
    pub mappers: [u8; MAX_PROCS],
    /// The owner has freed it.
    pub freed: bool,
}

impl Export {
    /// True while some process has it mapped.
    pub fn mapped(&self) -> bool {
        self.mappers.iter().any(|n| *n > 0)
    }
}

/// An event that can be opened by other processes.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct SharedEvent {
    /// Identity, 0 when free.
    pub id: u64,
    /// Number of the last record call.
    pub recorded: u64,
    /// Number of the last record that has completed.
    pub completed: u64,
    /// Virtual time of that completion.
    pub time: u64,
    /// What the completed record knows.
    pub known: u64,
    /// Handles in all processes.
    pub references: u32,
    /// Valid entries of `history`; above [`MAX_HISTORY`] when it did not fit.
    pub history_len: u32,
    /// What the last record was ordered after: (stream, position).
    pub history: [(u64, u64); MAX_HISTORY],
}

/// A started access, for the checker.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Record {
    /// Allocation identity or pinned region.
    pub space: u64,
    /// First byte within it.
    pub start: u64,
    /// Bytes a row.
    pub width: u64,
    /// Distance of rows.
    pub pitch: u64,
    /// Rows.
    pub rows: u64,
    /// Stream identity.
    pub stream: u64,
    /// Position in the stream.
    pub position: u64,
    /// Observation count when a host saw it complete; `u64::MAX` before.
    pub observed: u64,
    /// Insertion order.
    pub order: u64,
    /// Row of the process.
    pub proc: u16,
    /// Index of the operation's kind.
    pub kind: u8,
    /// Writes.
    pub write: bool,
    /// By atomic operations only; two of those do not conflict.
    pub atomic: bool,
    /// The operation has completed.
    pub done: bool,
    /// Process id, for messages.
    pub pid: u32,
    /// Address in that process, for messages.
    pub address: u64,
}

/// Everything under the lock.
#[repr(C)]
pub struct Body {
    /// Rows of operations.
    pub flows: [Flow; MAX_FLOWS],
    /// Indices of rows that are not free, in submission order.
    pub active: [u16; MAX_FLOWS],
    /// Valid entries of `active`.
    pub active_len: u32,
    /// Submissions so far.
    pub flow_order: u64,
    /// Of each GPU the process whose turn it is, as the number of its row and 1; 0 before there was one.
    pub holders: [u16; crate::topology::MAX_GPUS],
    /// Exported allocations.
    pub exports: [Export; MAX_EXPORTS],
    /// Rows of `exports` ever used.
    pub exports_high: u32,
    /// Exported events.
    pub events: [SharedEvent; MAX_EVENTS],
    /// Records of the checker.
    pub records: [Record; MAX_RECORDS],
    /// Valid entries of `records`.
    pub records_len: u32,
    /// Records so far.
    pub record_order: u64,
    /// Next process or event identity.
    pub next_uid: u64,
}
