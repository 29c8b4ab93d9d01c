//! Device allocations and pinned host regions of this process.

use crate::checker::Access;
use crate::errors::{Res, INVALID_VALUE, OUT_OF_MEMORY};
use crate::pool::Pools;
use crate::types::Handle;
use crate::virt::{Mapped, Virtual};
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

/// How device memory was made.
pub enum Kind {
    /// cuMemAlloc and its kin, or a mapping of another process's such memory.
    Plain,
    /// cuMemAllocManaged: host code may touch it.
    Managed,
    /// From a memory pool.
    Pool(Handle),
    /// Physical memory mapped into a reservation.
    Mapped(Mapped),
}

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
    /// Context it was made or opened in, 0 for pool memory and mappings.
    pub context: Handle,
    /// Identity, never reused, the same in all processes.
    pub buffer: u64,
    /// What the checker calls these bytes: the same for all pointers to them, one after another or at once.
    pub space: u64,
    /// How it was made.
    pub kind: Kind,
    /// The neighbouring mappings that a range across their seams stands for; empty for all else.
    pub parts: Vec<Arc<Allocation>>,
    /// Offset in this process's memory file (own allocations).
    pub offset: u64,
    /// The mapping, when another process owns the memory.
    pub import: Option<Import>,
    /// How often that is open: it takes as many calls to close it.
    pub opened: AtomicU32,
    /// Row in the node's table of exports, `u32::MAX` before the first export.
    pub export_row: AtomicU32,
    /// Freed or closed.
    pub freed: AtomicBool,
    /// CU_POINTER_ATTRIBUTE_SYNC_MEMOPS.
    pub sync_memops: AtomicBool,
}

// SAFETY: `shadow` points into a mapping that lives as long as the allocation, what it holds, or the process.
unsafe impl Send for Allocation {}
// SAFETY: as above; races on the bytes are the simulated program's own.
unsafe impl Sync for Allocation {}

impl Allocation {
    /// Memory of this process, at `offset` in its file.
    pub fn own(address: u64, size: u64, shadow: *mut u8, gpu: usize, offset: u64) -> Allocation {
        Allocation {
            address,
            size,
            shadow,
            gpu,
            context: 0,
            buffer: 0,
            space: 0,
            kind: Kind::Plain,
            parts: Vec::new(),
            offset,
            import: None,
            opened: AtomicU32::new(0),
            export_row: AtomicU32::new(u32::MAX),
            freed: AtomicBool::new(false),
            sync_memops: AtomicBool::new(false),
        }
    }

    /// Whether memsets and copies called as synchronous are: those of pool memory never.
    pub fn drains(&self) -> bool {
        self.sync_memops.load(Relaxed) && !matches!(self.kind, Kind::Pool(_))
    }

    /// One range over neighbouring mappings, at least two, whose shadows lie side by side like their addresses.
    fn joined(parts: Vec<Arc<Allocation>>) -> Allocation {
        let first = &parts[0];
        let mut whole = Allocation::own(
            first.address,
            parts.iter().map(|p| p.size).sum(),
            first.shadow,
            first.gpu,
            first.offset,
        );
        (whole.buffer, whole.space) = (first.buffer, first.space);
        whole.parts = parts;
        whole
    }

    /// What `rows` rows of `width` bytes from `offset` on are to the checker: (space, start, width, rows) for each
    /// run of rows that lies in one part.
    fn pieces(&self, offset: u64, width: u64, pitch: u64, rows: u64) -> Vec<(u64, u64, u64, u64)> {
        if self.parts.is_empty() {
            return vec![(self.space, offset, width, rows)];
        }
        let mut pieces: Vec<(u64, u64, u64, u64)> = Vec::new();
        for part in &self.parts {
            let base = part.address - self.address;
            for row in 0..rows {
                let start = (offset + row * pitch).max(base);
                let end = (offset + row * pitch + width).min(base + part.size);
                if start >= end {
                    continue;
                }
                let (at, bytes) = (start - base, end - start);
                match pieces.last_mut() {
                    Some((space, first, w, n))
                        if *space == part.space && *w == bytes && *first + *n * pitch == at =>
                    {
                        *n += 1;
                    }
                    _ => pieces.push((part.space, at, bytes, 1)),
                }
            }
        }
        pieces
    }
}

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
    pub fn accesses(&self, width: u64, pitch: u64, rows: u64, write: bool) -> Vec<Access> {
        let pieces = match self {
            Place::Device(a, offset) => a.pieces(*offset, width, pitch, rows),
            Place::Pinned(r, address) => {
                vec![(r.space, r.space_start + (address - r.address), width, rows)]
            }
            Place::Pageable(_) => return Vec::new(),
        };
        let access = |(space, start, width, rows)| Access {
            space,
            start,
            width,
            pitch,
            rows,
            write,
            atomic: false,
            address: self.address(),
        };
        pieces.into_iter().map(access).collect()
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

    /// Takes `size` bytes at the lowest multiple of `align` where they fit.
    pub fn take(&mut self, size: u64, align: u64) -> Option<u64> {
        let fits = |(start, length): (&u64, &u64)| {
            let at = start.next_multiple_of(align);
            (at + size <= start + length).then_some((*start, *length, at))
        };
        let (start, length, at) = self.holes.iter().find_map(fits)?;
        self.holes.remove(&start);
        if at > start {
            self.holes.insert(start, at - start);
        }
        if start + length > at + size {
            self.holes.insert(at + size, start + length - (at + size));
        }
        Some(at)
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
    /// Memory pools.
    pub pools: Pools,
    /// Reservations of addresses and physical memory.
    pub virt: Virtual,
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
            if !accessible(a) {
                return Err(INVALID_VALUE);
            }
            if span <= a.size - offset {
                return Ok(Found::Live(Place::Device(a.clone(), offset)));
            }
            let whole = self.across(a, address + span)?;
            return Ok(Found::Live(Place::Device(Arc::new(whole), offset)));
        }
        let window = |address| window(address) || self.virt.reserved(address);
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

    /// The mappings from `first` on that lie side by side up to `end`, as one range. Other memory ends with its
    /// allocation, whatever lies behind it.
    fn across(&self, first: &Arc<Allocation>, end: u64) -> Res<Allocation> {
        let mut parts = Vec::new();
        let mut next = first.address;
        while next < end {
            let part = self.device.get(&next).ok_or(INVALID_VALUE)?;
            if !matches!(part.kind, Kind::Mapped(_)) || !accessible(part) {
                return Err(INVALID_VALUE);
            }
            next += part.size;
            parts.push(part.clone());
        }
        if parts.len() < 2 {
            return Err(INVALID_VALUE);
        }
        Ok(Allocation::joined(parts))
    }

    /// Takes space on a GPU.
    pub fn take(&mut self, gpu: usize, size: u64, align: u64) -> Res<u64> {
        self.free[gpu].take(size, align).ok_or(OUT_OF_MEMORY)
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

/// Mapped memory is out of reach until cuMemSetAccess has said otherwise.
///
/// Which error the vendor's driver gives a copy of such an address is not documented; this one refuses the call.
/// It asks whether any device may access the memory, not which device the copy runs on.
fn accessible(a: &Allocation) -> bool {
    match &a.kind {
        Kind::Mapped(m) => m.accessible(),
        _ => true,
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

/// Whether all pages of a range of this process's addresses may be read, and written where that is wanted.
pub fn is_mapped(start: u64, end: u64, writable: bool) -> bool {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else {
        return true;
    };
    let mut next = start;
    for line in maps.lines() {
        let mut words = line.split(' ');
        let bounds = words.next().and_then(|range| range.split_once('-'));
        let Some((from, to)) = bounds else { continue };
        let number = |text| u64::from_str_radix(text, 16).unwrap_or(0);
        let (from, to) = (number(from), number(to));
        let flags = words.next().unwrap_or("").as_bytes();
        let allowed = flags.first() == Some(&b'r') && (!writable || flags.get(1) == Some(&b'w'));
        if from <= next && next < to && allowed {
            next = to;
        }
        if next >= end {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_ranges_join() {
        let mut list = FreeList::new(0, 4096);
        let a = list.take(1024, 512).unwrap();
        let b = list.take(1024, 512).unwrap();
        let c = list.take(2048, 512).unwrap();
        assert_eq!((a, b, c), (0, 1024, 2048));
        assert!(list.take(1, 512).is_none());
        list.give(b, 1024);
        list.give(a, 1024);
        list.give(c, 2048);
        assert_eq!(list.take(4096, 512), Some(0));
    }

    #[test]
    fn aligned_ranges_leave_what_lies_around_them() {
        let mut list = FreeList::new(0, 4 * 4096);
        assert_eq!(list.take(512, 512), Some(0));
        assert_eq!(list.take(4096, 4096), Some(4096));
        assert_eq!(list.take(512, 512), Some(512), "the hole below");
        assert_eq!(list.take(3 * 4096, 4096), None);
        assert_eq!(list.take(2 * 4096, 4096), Some(2 * 4096));
    }

    /// Two mappings of 100 bytes side by side, and three rows of which the second crosses the seam.
    #[test]
    fn ranges_across_a_seam_come_apart_for_the_checker() {
        let part = |address, space| {
            let mut a = Allocation::own(address, 100, std::ptr::null_mut(), 0, 0);
            a.space = space;
            Arc::new(a)
        };
        let whole = Allocation::joined(vec![part(1000, 7), part(1100, 8)]);
        assert_eq!((whole.address, whole.size), (1000, 200));
        assert_eq!(
            whole.pieces(60, 30, 30, 3),
            [
                (7, 60, 30, 1),
                (7, 90, 10, 1),
                (8, 0, 20, 1),
                (8, 20, 30, 1)
            ]
        );
        assert_eq!(whole.pieces(10, 10, 20, 3), [(7, 10, 10, 3)]);
    }
}
