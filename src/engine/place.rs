//! Where the bytes of a message are: in host memory, in one allocation of a device, or in several places at
//! once.
//!
//! A message of a contiguous type lies where its first byte is. One of another type may reach from one
//! allocation into the next (a struct of absolute addresses may name a field in host memory and one on a
//! device). So the driver is asked about each part that could lie elsewhere than its neighbours
//! ([`runs::probes_of`](super::types::runs::probes_of)).

use std::ffi::c_void;
use std::sync::Arc;

use crate::cuda::{self, Allocation, Buffer, Kind};
use crate::engine::layout::{Layout, Piece};
use crate::engine::types::runs::Run;
use crate::engine::types::{self, TypeInfo};
use crate::mpi::{Abi, Handle};

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
    ///
    /// # Safety
    /// `datatype` is a handle that the program passed to MPI, described by `info`.
    #[inline(always)]
    pub unsafe fn of(
        abi: &Abi,
        buffer: *const c_void,
        count: i64,
        datatype: Handle,
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
        // SAFETY: passed on.
        unsafe { Place::of_parts(abi, buffer, count, datatype, info) }
    }

    /// The place of a message that is not one run of bytes.
    ///
    /// # Safety
    /// As [`Place::of`].
    #[cold]
    #[inline(never)]
    pub unsafe fn of_parts(
        abi: &Abi,
        buffer: *const c_void,
        count: i64,
        datatype: Handle,
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
        // SAFETY: passed on.
        let Some(probes) = (unsafe { types::probes(abi, datatype) }) else {
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
        // SAFETY: passed on.
        unsafe { types::layout(abi, datatype) }.map_or(whole, Place::Several)
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
    ///
    /// # Safety
    /// `packed` holds the whole message.
    pub unsafe fn gathered(&self, packed: *const u8) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(usize::try_from(self.bytes).unwrap_or(usize::MAX));
        for (at, length) in &self.packed {
            // SAFETY: a piece of the message, which the caller vouches for.
            let piece =
                unsafe { std::slice::from_raw_parts(packed.add(*at as usize), *length as usize) };
            bytes.extend_from_slice(piece);
        }
        bytes
    }
}

/// A message in several places, taken apart.
#[derive(Debug, Default)]
pub struct Parts {
    /// Pieces in host memory, relative to the buffer address.
    pub host: Vec<Piece>,
    /// The others, by allocation.
    pub device: Vec<DevicePart>,
}

/// Host and device memory never lie in the same 64 KiB: the driver maps device memory by larger pages.
const PAGE_BYTES: u64 = 64 << 10;

impl Parts {
    /// Takes apart the first `bytes` bytes of a message at `base`. Asks about every run.
    pub fn of(base: *const u8, layout: &Layout, bytes: u64) -> Parts {
        let mut parts = Parts::default();
        let mut runs: Vec<Vec<Run>> = Vec::new();
        let mut latest: Option<(u64, Option<usize>)> = None;
        for piece in layout.pieces(0, bytes) {
            let address = base.wrapping_offset(piece.offset as isize);
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
                None => parts.host.push(piece),
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
