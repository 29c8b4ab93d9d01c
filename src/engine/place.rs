//! Where the bytes of a message are: in host memory, in one allocation of a device, or in several places at
//! once.
//!
//! A message of a contiguous type lies where its first byte is. One of another type may reach from one
//! allocation into the next (a struct of absolute addresses may name a field in host memory and one on a
//! device). So the driver is asked about each part that could lie elsewhere than its neighbours
//! ([`runs::probes_of`](super::types::runs::probes_of)).

use std::ffi::c_void;
use std::sync::Arc;

use crate::cuda::{self, Allocation, Buffer, Kind, Lent, Start};
use crate::engine::layout::{Layout, Piece};
use crate::engine::types::runs::Run;
use crate::engine::types::{self, TypeInfo};
use crate::mpi::{Abi, Datatype};

/// Where the bytes of a message are.
#[derive(Clone, Debug)]
pub enum Place {
    /// In host memory, from this address on, or there are none.
    Host(*const c_void),
    /// In one allocation of device memory. The buffer begins with the first byte.
    Device(Buffer),
    /// On a device, and elsewhere too: in host memory, or in other allocations.
    Several(Arc<Layout>),
}

impl Place {
    /// The place of `count` items at `buffer`.
    #[inline(always)]
    pub fn of(
        abi: &Abi,
        buffer: *const c_void,
        count: i64,
        datatype: Datatype,
        info: &TypeInfo,
    ) -> Place {
        let first = buffer.wrapping_byte_offset(info.first(count) as isize);
        if info.bytes(count) == 0 {
            return Place::Host(first);
        }
        if info.dense(count) {
            return match cuda::classify(first) {
                Kind::Device(found) => Place::Device(found),
                _ => Place::Host(first),
            };
        }
        Place::of_parts(abi, buffer, count, datatype, info)
    }

    /// The place of a message that is not one run of bytes.
    #[cold]
    #[inline(never)]
    pub fn of_parts(
        abi: &Abi,
        buffer: *const c_void,
        count: i64,
        datatype: Datatype,
        info: &TypeInfo,
    ) -> Place {
        let (offset, length) = info.span(count);
        let first = buffer.wrapping_byte_offset(offset as isize);
        if !cuda::driver_in_use() {
            return Place::Host(first);
        }
        let whole = match cuda::classify(first) {
            Kind::Device(found) if found.remaining() >= length => return Place::Device(found),
            Kind::Device(found) => Place::Device(found),
            _ => Place::Host(first),
        };
        let Some(probes) = types::probes(abi, datatype) else {
            return whole;
        };
        let last = info.extent.wrapping_mul(count - 1);
        let items = [0, last];
        let items = if count > 1 { &items[..] } else { &items[..1] };
        let are_alike = items.iter().all(|item| {
            probes.iter().all(|probe| {
                let address = buffer.wrapping_byte_offset(item.wrapping_add(*probe) as isize);
                match (&whole, cuda::classify(address)) {
                    (Place::Device(one), Kind::Device(other)) => are_one(one, &other),
                    (Place::Device(_), _) | (_, Kind::Device(_)) => false,
                    _ => true,
                }
            })
        });
        if are_alike {
            return whole;
        }
        types::layout(abi, datatype).map_or(whole, Place::Several)
    }
}

/// Whether one copy may cover both buffers. A range of virtual memory is mapped in many pieces.
fn are_one(one: &Buffer, other: &Buffer) -> bool {
    let are_mapped = [one, other].map(|buffer| buffer.allocation == Allocation::Virtual);
    match are_mapped {
        [true, true] => one.ordinal == other.ordinal && one.context == other.context,
        _ => one.base == other.base && one.buffer_id == other.buffer_id,
    }
}

/// The part of a message in one allocation of device memory.
#[derive(Debug)]
pub struct DevicePart {
    /// Its allocation, from the first address on that the message has in it.
    pub buffer: Buffer,
    /// Its runs, relative to that address.
    pub layout: Arc<Layout>,
    /// Bytes.
    pub bytes: u64,
    /// Where they lie among the packed bytes of the message: position and length, in order.
    pub packed: Vec<(u64, u64)>,
}

impl DevicePart {
    /// Picks its bytes out of the packed message, one after the other.
    pub fn gathered(&self, packed: Lent) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(usize::try_from(self.bytes).unwrap_or(usize::MAX));
        for (at, length) in &self.packed {
            packed.part(*at, *length).append_to(&mut bytes);
        }
        bytes
    }
}

/// The memory of a message that need not be one run, wherever it is.
///
/// Invariant: its first bytes, as the layout has them from the base address on, are lent to an operation.
#[derive(Clone, Debug)]
pub struct LentRuns {
    base: Start,
    layout: Arc<Layout>,
    bytes: u64,
}

impl LentRuns {
    /// So many bytes of a layout.
    ///
    /// # Safety
    /// They are as the type's invariant has them.
    pub unsafe fn new(base: *const c_void, layout: Arc<Layout>, bytes: u64) -> LentRuns {
        let base = Start::of(base.cast_mut().cast());
        LentRuns {
            base,
            layout,
            bytes,
        }
    }

    /// The address that offsets are counted from.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// The range that encloses its first bytes: an address and a length.
    pub fn place(&self, bytes: u64) -> (u64, u64) {
        let (first, end) = self.layout.bounds(bytes);
        let start = self.base().wrapping_offset(first as isize).addr() as u64;
        (start, (end - first) as u64)
    }

    fn piece(&self, piece: &Piece) -> Lent {
        let start = self.base().wrapping_offset(piece.offset as isize);
        // SAFETY: a run of the layout, among the first bytes.
        unsafe { Lent::new(start, piece.length) }
    }
}

/// As [`LentRuns`], in host memory.
#[derive(Clone, Debug)]
pub struct HostRuns(LentRuns);

impl HostRuns {
    /// Runs that were found to be in host memory.
    ///
    /// # Safety
    /// They are.
    pub unsafe fn new(runs: LentRuns) -> HostRuns {
        HostRuns(runs)
    }

    /// One run.
    pub fn of(run: Lent) -> HostRuns {
        HostRuns(LentRuns {
            base: Start::of(run.as_ptr()),
            layout: Arc::new(Layout::dense(run.bytes())),
            bytes: run.bytes(),
        })
    }

    /// See [`LentRuns::place`].
    pub fn place(&self, bytes: u64) -> (u64, u64) {
        self.0.place(bytes)
    }

    /// The runs of packed bytes `from..to`, in order, with their places among the packed bytes.
    pub fn pieces(&self, from: u64, to: u64) -> impl Iterator<Item = (u64, Lent)> + '_ {
        let pieces = self.0.layout.pieces(from, to.min(self.0.bytes));
        pieces.map(|piece| (piece.packed, self.0.piece(&piece)))
    }

    /// Where it lies, if it is one run after all.
    pub fn one_run(&self) -> Option<*mut u8> {
        let offset = self.0.layout.one_run()?;
        Some(self.0.base().wrapping_offset(offset as isize))
    }

    /// The packed bytes.
    pub fn gathered(&self) -> Vec<u8> {
        let mut packed = Vec::with_capacity(usize::try_from(self.0.bytes).unwrap_or(usize::MAX));
        for (_, run) in self.pieces(0, self.0.bytes) {
            run.append_to(&mut packed);
        }
        packed
    }
}

/// Copies packed bytes to where they belong in host memory.
pub fn scatter(packed: Lent, runs: impl Iterator<Item = (u64, Lent)>) {
    for (at, run) in runs {
        run.copy_from(packed.part(at, run.bytes()));
    }
}

/// A message in several places, taken apart.
#[derive(Debug, Default)]
pub struct Parts {
    /// Runs in host memory, with their places among the packed bytes.
    pub host: Vec<(u64, Lent)>,
    /// The others, by allocation.
    pub device: Vec<DevicePart>,
}

/// Host and device memory never lie in the same 64 KiB: the driver maps device memory by larger pages.
const PAGE_BYTES: u64 = 64 << 10;

impl Parts {
    /// Takes apart the first `bytes` bytes of a message. Asks about every run.
    pub fn of(message: &LentRuns, bytes: u64) -> Parts {
        let layout = &message.layout;
        let mut parts = Parts::default();
        let mut runs: Vec<Vec<Run>> = Vec::new();
        let mut latest: Option<(u64, Option<usize>)> = None;
        for piece in layout.pieces(0, bytes.min(message.bytes)) {
            let address = message.base().wrapping_offset(piece.offset as isize);
            let page = address.addr() as u64 / PAGE_BYTES;
            let found = match latest {
                Some((known, part @ None)) if known == page => part,
                _ => match cuda::classify(address.cast()) {
                    Kind::Device(buffer) => Some(parts.part_for(&buffer, &mut runs)),
                    _ => None,
                },
            };
            latest = Some((page, found));
            match found {
                None => parts.host.push((piece.packed, message.piece(&piece))),
                Some(at) => {
                    let part = &mut parts.device[at];
                    runs[at].push(Run {
                        offset: address.addr() as i64 - part.buffer.address as i64,
                        length: piece.length,
                    });
                    part.bytes += piece.length;
                    part.packed.push((piece.packed, piece.length));
                }
            }
        }
        for (part, runs) in parts.device.iter_mut().zip(runs) {
            part.layout = Arc::new(Layout::new(runs, 0));
        }
        parts
    }

    /// The number of the part in this allocation.
    fn part_for(&mut self, buffer: &Buffer, runs: &mut Vec<Vec<Run>>) -> usize {
        let mut known = self.device.iter();
        if let Some(at) = known.position(|part| are_one(&part.buffer, buffer)) {
            return at;
        }
        self.device.push(DevicePart {
            buffer: *buffer,
            layout: Arc::new(Layout::dense(0)),
            bytes: 0,
            packed: Vec::new(),
        });
        runs.push(Vec::new());
        self.device.len() - 1
    }
}
