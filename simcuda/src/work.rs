//! What an operation does when its time has come, and what it costs.

use crate::checker::Access;
use crate::clock::{Engine, Machine, Route};
use crate::errors::{ILLEGAL_ADDRESS, INVALID_VALUE, MISALIGNED_ADDRESS};
use crate::event::Event;
use crate::memory::Place;
use crate::shared::{NO_ENGINE, NO_GPU};
use crate::topology::Topology;
use crate::types::{CUhostFn, CUresult, CUstream, CUstreamCallback};
use anabranch_kernels::{AccessKind, Launch, Params, Twin};
use core::ffi::c_void;
use std::sync::Arc;

/// A copy of `height` rows of `width` bytes.
#[derive(Clone)]
pub struct Copy {
    /// Destination.
    pub dst: Place,
    /// Source.
    pub src: Place,
    /// Bytes a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// Distance of rows at the destination.
    pub dst_pitch: usize,
    /// Distance of rows at the source.
    pub src_pitch: usize,
    /// The source as it was when the call was made: pageable memory is staged before the call returns.
    pub staged: Option<Arc<Vec<u8>>>,
    /// Offset of a byte that is to be written wrong.
    pub flip: Option<usize>,
    /// Its stream was not idle when the call was made.
    pub is_behind: bool,
}

/// A fill.
#[derive(Clone)]
pub struct Fill {
    /// Destination.
    pub dst: Place,
    /// Bytes of one element: 1, 2 or 4.
    pub element: usize,
    /// The element.
    pub value: u32,
    /// Elements a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// Distance of rows in bytes.
    pub pitch: usize,
}

/// A kernel launch.
#[derive(Clone)]
pub struct KernelLaunch {
    /// The host twin.
    pub twin: &'static Twin,
    /// Arguments, copied.
    pub params: Params,
    /// Shape.
    pub launch: Launch,
    /// Device ranges the arguments name, resolved when the call was made: (access, place).
    pub ranges: Vec<(anabranch_kernels::Access, Place)>,
    /// Physical GPU.
    pub gpu: usize,
}

/// One stream memory operation.
#[derive(Clone)]
pub struct MemOp {
    /// Where.
    pub place: Place,
    /// 4 or 8 bytes.
    pub bytes: usize,
    /// Operand.
    pub value: u64,
    /// `None` writes, else waits with these flags.
    pub wait: Option<u32>,
}

/// Pointer that the program handed over for its own callback.
#[derive(Clone, Copy)]
pub struct UserData(pub *mut c_void);
// SAFETY: never dereferenced here, only handed back.
unsafe impl Send for UserData {}
// SAFETY: as above.
unsafe impl Sync for UserData {}

/// Host code in a stream.
#[derive(Clone, Copy)]
pub enum HostCode {
    /// cuLaunchHostFunc.
    Function(CUhostFn, UserData),
    /// cuStreamAddCallback.
    Callback(CUstreamCallback, CUstream, UserData),
}

/// An operation's content.
#[derive(Clone)]
pub enum Work {
    /// Orders only.
    Empty,
    /// Waits for an event of another GPU.
    Await,
    /// Copies over one route, back to back.
    Copy(Vec<Copy>),
    /// A fill.
    Fill(Fill),
    /// A kernel.
    Kernel(KernelLaunch),
    /// Host code.
    Host(HostCode),
    /// Stream memory operations, in order.
    MemOps(Vec<MemOp>),
    /// Pool memory comes into being or ceases to be: to the checker a write of all of it, so that a use that is not
    /// ordered behind its allocation, or a free not ordered behind its uses, is found.
    Claim {
        /// The memory.
        place: Place,
        /// Bytes.
        bytes: u64,
        /// It ceases to be.
        frees: bool,
    },
    /// Records an event (its local state is set when it is issued).
    Record(Arc<Event>),
    /// Waits for a shared event's record of that number.
    SharedWait {
        /// Row in the node's table.
        row: usize,
        /// Identity in that row.
        id: u64,
        /// Record to wait for.
        number: u64,
    },
}

/// What an operation needs of the machine.
#[derive(Clone, Copy)]
pub struct Demand {
    /// Engine or [`NO_ENGINE`].
    pub engine: u16,
    /// Segments.
    pub route: Route,
    /// GPU from which it copies to another one, or [`NO_GPU`].
    pub source: u16,
    /// GPU beside whose copies to others it takes longer, or [`NO_GPU`].
    pub beside: u16,
    /// Before bytes move.
    pub setup_ns: u64,
    /// Bytes.
    pub bytes: f64,
    /// Bytes a nanosecond at most.
    pub cap: f64,
}

fn ns(us: f64) -> u64 {
    (us * 1000.0).round() as u64
}

impl Demand {
    /// So much time, and nothing else.
    fn of_time(us: f64) -> Demand {
        Demand {
            engine: NO_ENGINE,
            route: Route::default(),
            source: NO_GPU,
            beside: NO_GPU,
            setup_ns: ns(us),
            bytes: 0.0,
            cap: 1.0,
        }
    }
}

impl Copy {
    /// Bytes moved.
    pub fn bytes(&self) -> u64 {
        (self.width * self.height) as u64
    }

    /// Bytes from the first to behind the last.
    pub fn span(width: usize, height: usize, pitch: usize) -> u64 {
        if width == 0 || height == 0 {
            return 0;
        }
        ((height - 1) * pitch + width) as u64
    }

    /// Engine, route, cap and setup, for a stream on GPU `initiator`.
    pub fn way(&self, t: &Topology, m: &Machine, initiator: usize) -> (u16, Route, f64, u64) {
        let host_setup = ns(t.copy.host_setup_us);
        let pageable =
            matches!(self.src, Place::Pageable(_)) || matches!(self.dst, Place::Pageable(_));
        let cap = if pageable {
            t.host.pageable_gb_s
        } else {
            t.copy.engine_gb_s
        };
        match (self.src.gpu(), self.dst.gpu()) {
            (Some(from), Some(to)) if from == to => (
                Machine::engine(initiator, Engine::Peer),
                m.between(t, from, to),
                t.gpu.memory_gb_s,
                ns(t.copy.setup_us),
            ),
            (Some(from), Some(to)) => {
                // A pull within a process goes where pushes of that memory go, not to the stream's own GPU (pushes wait for
                // it), so between it and the rest of its stream one GPU waits for the other. Imported memory has no other
                // context here.
                let is_ordered = self.is_behind && self.src.import_row().is_none();
                let pull = match (initiator == from, is_ordered) {
                    (true, _) => 0.0,
                    (false, false) => t.copy.pull_extra_us,
                    (false, true) => t.copy.pull_extra_us + t.copy.pull_behind_us,
                };
                // A copy's first bytes move at a lower rate: that much longer than at the full one.
                let first = (self.bytes() as f64).min(t.copy.ramp_kib * 1024.0);
                let ramp = (first / t.copy.ramp_gb_s - first / cap).max(0.0);
                let is_apart = t.copy.outward_engines.is_some() && self.src.import_row().is_none();
                let engine = match is_apart {
                    true => Machine::engine(from, Engine::Outward),
                    false => Machine::engine(initiator, Engine::Peer),
                };
                (
                    engine,
                    m.between(t, from, to),
                    cap,
                    ns(t.copy.setup_us + pull) + ramp as u64,
                )
            }
            (Some(from), None) => (
                Machine::engine(from, Engine::ToHost),
                m.to_host(t, from),
                cap,
                host_setup,
            ),
            (None, Some(to)) => (
                Machine::engine(to, Engine::ToDevice),
                m.to_device(t, to),
                cap,
                host_setup,
            ),
            (None, None) => (
                NO_ENGINE,
                Route::default(),
                t.host.pageable_gb_s,
                ns(t.copy.setup_us),
            ),
        }
    }

    /// Moves `bytes` of a row from `from` on.
    fn run_part(&self, row: usize, from: usize, bytes: usize) {
        let dst = self.dst.pointer();
        let (src, src_pitch) = match &self.staged {
            Some(staged) => (staged.as_ptr(), self.width),
            None => (self.src.pointer().cast_const(), self.src_pitch),
        };
        // SAFETY: both ranges were checked against their allocations when the call was made, which the
        // places keep alive; host ranges are the program's promise. They may overlap, hence `copy`.
        unsafe {
            core::ptr::copy(
                src.add(row * src_pitch + from),
                dst.add(row * self.dst_pitch + from),
                bytes,
            )
        };
    }

    /// Moves everything but the pieces that have landed, which are in order and apart.
    fn run(&self, landed: &[Piece]) {
        let mut landed = landed.iter().peekable();
        for row in 0..self.height {
            let mut at = 0;
            while let Some(piece) = landed.next_if(|p| p.row == row) {
                self.run_part(row, at, piece.from - at);
                at = piece.from + piece.bytes;
            }
            self.run_part(row, at, self.width - at);
        }
        if let Some(at) = self.flip.filter(|at| *at < self.width * self.height) {
            let place = (at / self.width) * self.dst_pitch + at % self.width;
            // SAFETY: inside the range written above.
            unsafe { *self.dst.pointer().add(place) ^= 0x10 };
        }
    }

    /// Pieces that may go before the others; none of what is short, which lands as a whole, or overlaps itself.
    fn pieces(&self, seed: u64) -> Vec<Piece> {
        const WHOLE: usize = 64;
        const MOST: usize = 4096;
        let (a, b) = (self.src.pointer() as usize, self.dst.pointer() as usize);
        let span = |pitch| Copy::span(self.width, self.height, pitch) as usize;
        let apart = a + span(self.src_pitch) <= b || b + span(self.dst_pitch) <= a;
        if !apart || self.width <= WHOLE {
            return Vec::new();
        }
        let mut pieces: Vec<Piece> = (0..4)
            .map(|k| {
                let random = crate::topology::fnv1a(&(seed * 4 + k).to_le_bytes()) as usize;
                let bytes = (random >> 20) % (self.width / 2).min(MOST) + 1;
                Piece {
                    row: (random >> 4) % self.height,
                    from: (random >> 8) % (self.width - bytes),
                    bytes,
                }
            })
            .collect();
        pieces.sort_by_key(|p| (p.row, p.from));
        pieces.dedup_by(|later, first| {
            later.row == first.row && later.from < first.from + first.bytes
        });
        pieces
    }
}

/// Part of a row of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    row: usize,
    from: usize,
    bytes: usize,
}

impl Fill {
    fn run(&self) {
        let element = self.value.to_le_bytes();
        for row in 0..self.height {
            // SAFETY: the range was checked against its allocation when the call was made.
            let dst = unsafe { self.dst.pointer().add(row * self.pitch) };
            if self.element == 1 {
                // SAFETY: as above.
                unsafe { core::ptr::write_bytes(dst, element[0], self.width) };
                continue;
            }
            for i in 0..self.width {
                // SAFETY: as above; unaligned rows are allowed for.
                unsafe {
                    core::ptr::copy_nonoverlapping(
                        element.as_ptr(),
                        dst.add(i * self.element),
                        self.element,
                    )
                };
            }
        }
    }
}

impl KernelLaunch {
    fn run(&self) -> Result<(), CUresult> {
        let translate = |address: u64, bytes: u64| -> *mut u8 {
            for (access, place) in &self.ranges {
                let Place::Device(a, _) = place else {
                    let inside = address >= access.address
                        && address + bytes <= access.address + access.span_bytes();
                    if inside {
                        return address as usize as *mut u8;
                    }
                    continue;
                };
                if address >= a.address && address.saturating_add(bytes) <= a.address + a.size {
                    // SAFETY: inside the allocation, by the line above.
                    return unsafe { a.shadow.add((address - a.address) as usize) };
                }
            }
            core::ptr::null_mut()
        };
        // SAFETY: the translation gives pointers into allocations that `ranges` keeps alive.
        let outcome = unsafe { self.twin.run(&self.params, self.launch, &translate) };
        outcome.map_err(|fault| match fault {
            anabranch_kernels::Fault::IllegalAddress(_) => ILLEGAL_ADDRESS,
            anabranch_kernels::Fault::Misaligned(_) => MISALIGNED_ADDRESS,
            anabranch_kernels::Fault::InvalidLaunch => INVALID_VALUE,
        })
    }
}

impl MemOp {
    /// True when the awaited condition holds.
    pub fn satisfied(&self) -> bool {
        let Some(flags) = self.wait else { return true };
        let (current, mask) = self.load();
        let value = self.value & mask;
        match flags & 3 {
            // The signed difference modulo the width decides "greater or equal", as the driver has it.
            0 if self.bytes == 4 => (current.wrapping_sub(value) as u32 as i32) >= 0,
            0 => (current.wrapping_sub(value) as i64) >= 0,
            1 => current == value,
            2 => current & value != 0,
            _ => !(current | value) & mask != 0,
        }
    }

    fn load(&self) -> (u64, u64) {
        use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Acquire};
        let p = self.place.pointer();
        // SAFETY: alignment and range were checked when the call was made; others write it atomically.
        unsafe {
            match self.bytes {
                4 => (
                    u64::from(AtomicU32::from_ptr(p.cast()).load(Acquire)),
                    u64::from(u32::MAX),
                ),
                _ => (AtomicU64::from_ptr(p.cast()).load(Acquire), u64::MAX),
            }
        }
    }

    fn store(&self) {
        use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Release};
        let p = self.place.pointer();
        // SAFETY: as in `load`.
        unsafe {
            match self.bytes {
                4 => AtomicU32::from_ptr(p.cast()).store(self.value as u32, Release),
                _ => AtomicU64::from_ptr(p.cast()).store(self.value, Release),
            }
        }
    }
}

impl Work {
    /// What it takes of the machine; `None` for what takes no time of its own.
    pub fn demand(&self, t: &Topology, m: &Machine, initiator: usize) -> Option<Demand> {
        match self {
            Work::Copy(copies) => {
                let first = copies.first()?;
                let (engine, route, cap, setup_ns) = first.way(t, m, initiator);
                let more = ns(t.copy.batch_setup_us) * (copies.len() as u64 - 1);
                let bytes = copies.iter().map(Copy::bytes).sum::<u64>() as f64;
                let (source, beside) = match (first.src.gpu(), first.dst.gpu()) {
                    (Some(from), Some(to)) if from != to => (from as u16, NO_GPU),
                    (Some(gpu), None) | (None, Some(gpu)) => (NO_GPU, gpu as u16),
                    _ => (NO_GPU, NO_GPU),
                };
                Some(Demand {
                    engine,
                    route,
                    source,
                    beside,
                    setup_ns: setup_ns + more,
                    bytes,
                    cap,
                })
            }
            Work::Fill(fill) => {
                let bytes = (fill.width * fill.height * fill.element) as f64;
                let route = fill.dst.gpu().map_or_else(Route::default, |g| m.memory(g));
                Some(Demand {
                    route,
                    bytes,
                    cap: t.gpu.memory_gb_s,
                    ..Demand::of_time(t.kernel.setup_us)
                })
            }
            Work::Kernel(k) => {
                let bytes = k.twin.bytes_touched(&k.params, k.launch) as f64;
                let route = m.memory(k.gpu);
                Some(Demand {
                    route,
                    bytes,
                    cap: t.gpu.memory_gb_s,
                    ..Demand::of_time(t.kernel.setup_us)
                })
            }
            Work::Await if t.calls.event_wait_us > 0.0 => {
                Some(Demand::of_time(t.calls.event_wait_us))
            }
            Work::MemOps(_) => Some(Demand {
                beside: initiator as u16,
                ..Demand::of_time(t.calls.memop_us)
            }),
            _ => None,
        }
    }

    /// Whether processes take turns on the GPU that does it: seen with kernels and fills, copies within it and copies up.
    /// Copies down run beside other processes' work.
    pub fn takes_turn(&self) -> bool {
        match self {
            Work::Copy(copies) => copies.first().is_some_and(|copy| {
                let (from, to) = (copy.src.gpu(), copy.dst.gpu());
                to.is_some() && (from.is_none() || from == to)
            }),
            Work::Fill(_) | Work::Kernel(_) => true,
            _ => false,
        }
    }

    /// What the checker sees.
    pub fn accesses(&self) -> Vec<Access> {
        match self {
            Work::Copy(copies) => {
                let of = |c: &Copy| {
                    let one = |p: &Place, pitch: usize, write| {
                        p.accesses(c.width as u64, pitch as u64, c.height as u64, write)
                    };
                    let mut both = one(&c.dst, c.dst_pitch, true);
                    if c.staged.is_none() {
                        both.extend(one(&c.src, c.src_pitch, false));
                    }
                    both
                };
                copies.iter().flat_map(of).collect()
            }
            Work::Fill(f) => {
                let width = (f.width * f.element) as u64;
                f.dst.accesses(width, f.pitch as u64, f.height as u64, true)
            }
            Work::Kernel(k) => {
                let of = |(a, place): &(anabranch_kernels::Access, Place)| {
                    let mut accesses =
                        place.accesses(a.row_bytes, a.pitch_bytes, a.rows, a.writes());
                    for access in &mut accesses {
                        access.atomic = a.kind == AccessKind::Atomic;
                    }
                    accesses
                };
                k.ranges.iter().flat_map(of).collect()
            }
            // Flags are polled while they are written: atomic by nature.
            Work::MemOps(ops) => {
                let of = |op: &MemOp| {
                    let bytes = op.bytes as u64;
                    let mut accesses = op.place.accesses(bytes, bytes, 1, op.wait.is_none());
                    for access in &mut accesses {
                        access.atomic = true;
                    }
                    accesses
                };
                ops.iter().flat_map(of).collect()
            }
            Work::Claim { place, bytes, .. } => place.accesses(*bytes, *bytes, 1, true),
            _ => Vec::new(),
        }
    }

    /// Index into the checker's kinds.
    pub fn kind(&self) -> u8 {
        match self {
            Work::Copy(_) => 0,
            Work::Fill(_) => 1,
            Work::Kernel(_) => 2,
            Work::Claim { frees: true, .. } => 4,
            Work::Claim { .. } => 5,
            _ => 3,
        }
    }

    /// Places in memory that another process owns: (export row, buffer).
    pub fn imports(&self) -> Vec<(u32, u64)> {
        let places: Vec<&Place> = match self {
            Work::Copy(copies) => copies.iter().flat_map(|c| [&c.src, &c.dst]).collect(),
            Work::Fill(f) => vec![&f.dst],
            Work::Kernel(k) => k.ranges.iter().map(|(_, p)| p).collect(),
            Work::MemOps(ops) => ops.iter().map(|o| &o.place).collect(),
            _ => Vec::new(),
        };
        places.into_iter().filter_map(Place::import_row).collect()
    }

    /// True when its completion shows to hosts by itself: a flag written by the stream, or a copy
    /// of at most eight bytes to host memory, which programs poll like one.
    pub fn announces(&self) -> bool {
        match self {
            Work::MemOps(ops) => ops.iter().any(|o| o.wait.is_none()),
            Work::Host(_) => true,
            Work::Copy(copies) => copies
                .iter()
                .any(|c| c.dst.gpu().is_none() && c.bytes() <= 8),
            _ => false,
        }
    }

    /// A copy or fill of more than a flag or a few values.
    pub fn bulky(&self) -> bool {
        const FEW: u64 = 4096;
        match self {
            Work::Copy(copies) => copies.iter().all(|c| c.bytes() > FEW),
            Work::Fill(f) => (f.width * f.height * f.element) as u64 > FEW,
            _ => false,
        }
    }

    /// Moves a few pieces of a copy when it starts; they are left out when it ends.
    pub fn land_early(&self, seed: u64) -> Vec<Piece> {
        let Work::Copy(copies) = self else {
            return Vec::new();
        };
        let [copy] = copies.as_slice() else {
            return Vec::new();
        };
        let pieces = copy.pieces(seed);
        for p in &pieces {
            copy.run_part(p.row, p.from, p.bytes);
        }
        pieces
    }

    /// Moves the bytes but those that have landed. Called without locks, once, when the operation's virtual time is over.
    pub fn run(&self, landed: &[Piece]) -> Result<(), CUresult> {
        match self {
            Work::Copy(copies) => copies.iter().for_each(|c| c.run(landed)),
            Work::Fill(fill) => fill.run(),
            Work::Kernel(kernel) => return kernel.run(),
            Work::MemOps(ops) => ops
                .iter()
                .filter(|o| o.wait.is_none())
                .for_each(MemOp::store),
            _ => {}
        }
        Ok(())
    }
}
