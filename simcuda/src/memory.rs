//! Device allocations and pinned host regions of this process.

use crate::checker::Access;
use crate::errors::{Res, INVALID_VALUE, OUT_OF_MEMORY};
use crate::types::Handle;
use crate::vm::Import;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::Arc;

/// Alignment of device allocations; the driver promises at least 256.
pub const ALIGN: u64 = 512;
/// Freed ranges kept to tell a use after free from a wild pointer.
const FREED_MAX: usize = 1024;
/// Marks the checker's spaces that are host memory.
pub const HOST_SPACE: u64 = 1 << 63;

/// Device memory as a pointer of this process reaches it.
pub struct Allocation {
    /// Device pointer.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// The same bytes, accessible to the driver.
    pub shadow: *mut u8,
    /// Physical GPU.
    pub gpu: usize,
    /// Context it was made or opened in.
    pub context: Handle,
    /// Identity, never reused, the same in all processes.
    pub buffer: u64,
    /// Offset in this process's memory file (own allocations).
    pub offset: u64,
    /// The mapping, when another process owns the memory.
    pub import: Option<Import>,
    /// Row in the node's table of exports, `u32::MAX` before the first export.
    pub export_row: AtomicU32,
    /// Freed or closed.
    pub freed: AtomicBool,
    /// CU_POINTER_ATTRIBUTE_SYNC_MEMOPS.
    pub sync_memops: AtomicBool,
}

// SAFETY: `shadow` points into a mapping that lives as long as the allocation or the process.
unsafe impl Send for Allocation {}
// SAFETY: as above; races on the bytes are the simulated program's own.
unsafe impl Sync for Allocation {}

/// Page-locked host memory.
pub struct HostRegion {
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Flags of cuMemHostAlloc or cuMemHostRegister.
    pub flags: u32,
    /// Allocated by the driver, not registered.
    pub owned: bool,
    /// Context.
    pub context: Handle,
    /// Identity.
    pub buffer: u64,
    /// Where the bytes live, so that two processes' views of one shared segment agree.
    pub space: u64,
    /// Offset of the first byte in that space.
    pub space_start: u64,
}

/// Where a copy's end is.
#[derive(Clone)]
pub enum Place {
    /// Device memory, at an offset.
    Device(Arc<Allocation>, u64),
    /// Pinned host memory, at an address.
    Pinned(Arc<HostRegion>, u64),
    /// Any other host memory.
    Pageable(u64),
}

impl Place {
    /// Pointer the driver may use.
    pub fn pointer(&self) -> *mut u8 {
        match self {
            // SAFETY: `resolve` checked that the offset is inside the allocation.
            Place::Device(a, offset) => unsafe { a.shadow.add(*offset as usize) },
            Place::Pinned(_, address) | Place::Pageable(address) => *address as usize as *mut u8,
        }
    }

    /// Physical GPU of device memory.
    pub fn gpu(&self) -> Option<usize> {
        match self {
            Place::Device(a, _) => Some(a.gpu),
            _ => None,
        }
    }

    /// Pointer as the program knows it.
    pub fn address(&self) -> u64 {
        match self {
            Place::Device(a, offset) => a.address + offset,
            Place::Pinned(_, address) | Place::Pageable(address) => *address,
        }
    }

    /// What the checker sees of `rows` rows of `width` bytes, `pitch` apart; nothing for pageable memory.
    pub fn access(&self, width: u64, pitch: u64, rows: u64, write: bool) -> Option<Access> {
        let (space, start) = match self {
            Place::Device(a, offset) => (a.buffer, *offset),
            Place::Pinned(r, address) => (r.space, r.space_start + (address - r.address)),
            Place::Pageable(_) => return None,
        };
        Some(Access {
            space,
            start,
            width,
            pitch,
            rows,
            write,
            atomic: false,
            address: self.address(),
        })
    }

    /// Row in the export table when another process owns the memory.
    pub fn import_row(&self) -> Option<(u32, u64)> {
        match self {
            Place::Device(a, _) if a.import.is_some() => {
                Some((a.export_row.load(Relaxed), a.buffer))
            }
            _ => None,
        }
    }
}

/// Free space of one GPU's part of the memory file.
pub struct FreeList {
    holes: BTreeMap<u64, u64>,
}

impl FreeList {
    /// All of `size` bytes from `start` on.
    pub fn new(start: u64, size: u64) -> FreeList {
        FreeList {
            holes: BTreeMap::from([(start, size)]),
        }
    }

    /// Takes `size` bytes at the lowest place where they fit.
    pub fn take(&mut self, size: u64) -> Option<u64> {
        let (&start, &length) = self.holes.iter().find(|(_, length)| **length >= size)?;
        self.holes.remove(&start);
        if length > size {
            self.holes.insert(start + size, length - size);
        }
        Some(start)
    }

    /// Gives a range back, joined with its neighbours.
    pub fn give(&mut self, mut start: u64, mut size: u64) {
        if let Some((&s, &l)) = self.holes.range(..start).next_back() {
            assert!(s + l <= start, "a range is given back once");
            if s + l == start {
                self.holes.remove(&s);
                start = s;
                size += l;
            }
        }
        if let Some(l) = self.holes.remove(&(start + size)) {
            size += l;
        }
        self.holes.insert(start, size);
    }
}

/// Everything a pointer of this process can mean.
#[derive(Default)]
pub struct Memory {
    /// Device allocations and mappings by address.
    pub device: BTreeMap<u64, Arc<Allocation>>,
    /// Pinned regions by address.
    pub host: BTreeMap<u64, Arc<HostRegion>>,
    /// Free space by physical GPU.
    pub free: Vec<FreeList>,
    /// Freed while another process still maps them: (export row, buffer, offset, size, gpu).
    pub zombies: Vec<(u32, u64, u64, u64, usize)>,
    freed: VecDeque<(u64, u64)>,
}

/// The range is or was device memory of this process.
pub enum Found {
    /// Lives.
    Live(Place),
    /// Was freed.
    Freed,
}

impl Memory {
    /// The allocation that holds `address`.
    pub fn device_at(&self, address: u64) -> Option<&Arc<Allocation>> {
        let (_, a) = self.device.range(..=address).next_back()?;
        (address < a.address + a.size).then_some(a)
    }

    /// The pinned region that holds `address`.
    pub fn host_at(&self, address: u64) -> Option<&Arc<HostRegion>> {
        let (_, r) = self.host.range(..=address).next_back()?;
        (address < r.address + r.size).then_some(r)
    }

    /// Where `span` bytes at `address` are. `window` tells whether an address can only be device memory.
    pub fn resolve(&self, address: u64, span: u64, window: impl Fn(u64) -> bool) -> Res<Found> {
        if let Some(a) = self.device_at(address) {
            let offset = address - a.address;
            if span > a.size - offset {
                return Err(INVALID_VALUE);
            }
            return Ok(Found::Live(Place::Device(a.clone(), offset)));
        }
        if self
            .freed
            .iter()
            .any(|(start, end)| (*start..*end).contains(&address))
            && window(address)
        {
            return Ok(Found::Freed);
        }
        if address == 0 || window(address) {
            return Err(INVALID_VALUE);
        }
        let end = address.checked_add(span).ok_or(INVALID_VALUE)?;
        Ok(Found::Live(match self.host_at(address) {
            Some(r) if end <= r.address + r.size => Place::Pinned(r.clone(), address),
            _ => Place::Pageable(address),
        }))
    }

    /// Takes space on a GPU.
    pub fn take(&mut self, gpu: usize, size: u64) -> Res<u64> {
        self.free[gpu].take(size).ok_or(OUT_OF_MEMORY)
    }

    /// Remembers that a range was freed.
    pub fn remember_freed(&mut self, start: u64, size: u64) {
        if self.freed.len() == FREED_MAX {
            self.freed.pop_front();
        }
        self.freed.push_back((start, start + size));
    }

    /// Forgets freed ranges that a new allocation covers.
    pub fn forget_freed(&mut self, start: u64, size: u64) {
        self.freed
            .retain(|(s, e)| *e <= start || *s >= start + size);
    }
}

/// Space and offset of host memory for the checker: the file behind a shared mapping, else this process.
pub fn host_space(address: u64, process: u64) -> (u64, u64) {
    let own = (HOST_SPACE | process, address);
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else {
        return own;
    };
    for line in maps.lines() {
        let mut fields = line.split_ascii_whitespace();
        let (Some(range), Some(mode), Some(offset), Some(device), Some(inode)) = (
            fields.next(),
            fields.next(),
            fields.next(),
            fields.next(),
            fields.next(),
        ) else {
            continue;
        };
        let Some((start, end)) = range.split_once('-') else {
            continue;
        };
        let parse = |s: &str| u64::from_str_radix(s, 16).unwrap_or(0);
        if !(parse(start)..parse(end)).contains(&address) {
            continue;
        }
        if inode == "0" || !mode.ends_with('s') {
            return own;
        }
        let file = crate::topology::fnv1a(format!("{device} {inode}").as_bytes());
        return (HOST_SPACE | file, parse(offset) + (address - parse(start)));
    }
    own
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_ranges_join() {
        let mut list = FreeList::new(0, 4096);
        let a = list.take(1024).unwrap();
        let b = list.take(1024).unwrap();
        let c = list.take(2048).unwrap();
        assert_eq!((a, b, c), (0, 1024, 2048));
        assert!(list.take(1).is_none());
        list.give(b, 1024);
        list.give(a, 1024);
        list.give(c, 2048);
        assert_eq!(list.take(4096), Some(0));
    }
}
