//! Staging memory on GPUs, for messages between other GPUs: who sees which GPU, and what is exported there.
//!
//! Each rank that uses a device lists the GPUs that it sees. A peer that wants to send over one of them
//! raises a wish in its row and rings the doorbell. The owner allocates staging memory there, exports it and
//! writes down the handle. From then on senders take pieces of it by compare-and-swap, without the owner.

use super::units::{Units, UNIT_BYTES};
use std::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};

/// GPUs that one rank lists.
pub const GPUS_MAX: usize = 16;
/// Units of staging on one GPU at most.
pub const RELAY_UNITS: usize = 256;
/// Staging on one GPU at most, bytes.
pub const RELAY_BYTES_MAX: u64 = RELAY_UNITS as u64 * UNIT_BYTES;

/// What a peer needs to map the staging memory on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exported {
    /// Address in the owner.
    pub base: u64,
    /// Bytes.
    pub bytes: u64,
    /// The driver's number of the allocation.
    pub buffer_id: u64,
    /// IPC handle.
    pub handle: [u8; 64],
}

/// The NVLinks of a GPU and its place in the PCIe tree, as the system reports them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wiring {
    /// The GPU's PCI address, `domain << 16 | bus << 8 | device << 3 | function`.
    pub pci: u64,
    /// Links lead to a switch.
    pub is_switched: bool,
    /// What one link of its generation carries in a direction, GB/s; 0 if that is not known.
    pub link_gb_s: f32,
    /// PCI addresses of the GPUs to which links lead, and how many to each.
    pub to: Vec<(u64, u32)>,
    /// PCI addresses of other GPUs, including those that the owner does not use, and how far each is apart by
    /// PCIe (`nvmlGpuTopologyLevel_t`).
    pub apart: Vec<(u64, u32)>,
}

/// The most GPUs to which one GPU has links, and of which it is told how far they are apart.
const NEIGHBOURS: usize = 16;
/// Bits of a PCI address.
const PCI_BITS: u32 = 48;
/// A link of NVLink 1 to 5 has 20 to 50.
const LINK_GB_S_MAX: f32 = 1000.0;

#[derive(Debug)]
#[repr(C)]
struct WiringCells {
    pci: AtomicU64,
    /// A link's rate, whether links lead to a switch, and whether all of this is written.
    known: AtomicU64,
    /// An address and a count each; 0 behind the last.
    to: [AtomicU64; NEIGHBOURS],
    /// An address and one more than a level each; 0 behind the last.
    apart: [AtomicU64; NEIGHBOURS],
}

const WRITTEN: u64 = 1;
const SWITCHED: u64 = 2;

/// A GPU that the owner of the segment sees.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct GpuRow {
    uuid: [AtomicU64; 2],
    wiring: WiringCells,
    is_used: AtomicU32,
    /// Set by peers that want staging there.
    wished: AtomicU32,
    /// Odd while staging memory is exported.
    generation: AtomicU64,
    base: AtomicU64,
    bytes: AtomicU64,
    buffer_id: AtomicU64,
    handle: [AtomicU64; 8],
    units: [AtomicU64; RELAY_UNITS],
}

super::map::shared!(GpuRow);

impl GpuRow {
    /// Identity of the GPU.
    pub fn uuid(&self) -> [u8; 16] {
        let mut uuid = [0; 16];
        load_bytes(&self.uuid, &mut uuid);
        uuid
    }

    /// The owner keeps buffers of messages there.
    pub fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Relaxed) != 0
    }

    /// What is exported there, if anything is.
    pub fn exported(&self) -> Option<Exported> {
        let generation = self.generation.load(Ordering::Acquire);
        if generation % 2 == 0 {
            return None;
        }
        let mut exported = Exported {
            base: self.base.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            buffer_id: self.buffer_id.load(Ordering::Relaxed),
            handle: [0; 64],
        };
        load_bytes(&self.handle, &mut exported.handle);
        fence(Ordering::Acquire);
        let is_whole = self.generation.load(Ordering::Relaxed) == generation;
        (is_whole && exported.bytes <= RELAY_BYTES_MAX).then_some(exported)
    }

    /// The GPU's links, if the owner could find them out.
    pub fn wiring(&self) -> Option<Wiring> {
        let cells = &self.wiring;
        let known = cells.known.load(Ordering::Acquire);
        let link_gb_s = f32::from_bits((known >> 32) as u32);
        if known & WRITTEN == 0 || !(0.0..=LINK_GB_S_MAX).contains(&link_gb_s) {
            return None;
        }
        let apart = pairs(&cells.apart);
        Some(Wiring {
            pci: cells.pci.load(Ordering::Relaxed),
            is_switched: known & SWITCHED != 0,
            link_gb_s,
            to: pairs(&cells.to).collect(),
            apart: apart
                .map(|(pci, more)| (pci, more.saturating_sub(1)))
                .collect(),
        })
    }

    /// Owner: publishes once which links the GPU has and what it is near to. If there are more than fit, it
    /// counts as unknown.
    pub(super) fn wire(&self, wiring: &Wiring) {
        let cells = &self.wiring;
        let is_written = cells.known.load(Ordering::Relaxed) != 0;
        let fits = |&(pci, number): &(u64, u32)| {
            pci >> PCI_BITS == 0 && (1..1 << (u64::BITS - PCI_BITS)).contains(&number)
        };
        let fit = |pairs: &[(u64, u32)]| pairs.len() <= NEIGHBOURS && pairs.iter().all(fits);
        if is_written || !fit(&wiring.to) {
            return;
        }
        let apart = wiring.apart.iter();
        let apart: Vec<_> = apart
            .map(|(pci, level)| (*pci, level.saturating_add(1)))
            .collect();
        cells.pci.store(wiring.pci, Ordering::Relaxed);
        store_pairs(&cells.to, &wiring.to);
        if fit(&apart) {
            store_pairs(&cells.apart, &apart);
        }
        let flags = WRITTEN | if wiring.is_switched { SWITCHED } else { 0 };
        let known = u64::from(wiring.link_gb_s.to_bits()) << 32 | flags;
        cells.known.store(known, Ordering::Release);
    }

    /// The units of what is exported there.
    pub fn units(&self, exported: &Exported) -> Units<'_> {
        let count = (exported.bytes / UNIT_BYTES).min(RELAY_UNITS as u64) as usize;
        Units::new(&self.units[..count], count.max(1) as u32)
    }

    /// Peer: asks for staging there. True if nobody had asked; the caller then tells the owner.
    pub(super) fn wish(&self) -> bool {
        self.wished.swap(1, Ordering::AcqRel) == 0
    }

    /// Owner: whether a peer has asked since the last call.
    pub fn take_wish(&self) -> bool {
        self.wished.swap(0, Ordering::AcqRel) != 0
    }

    pub(super) fn list(&self, uuid: &[u8; 16]) {
        store_bytes(&self.uuid, uuid);
    }

    pub(super) fn set_used(&self) {
        self.is_used.store(1, Ordering::Relaxed);
    }

    /// Owner: staging memory is there.
    pub(super) fn publish(&self, exported: &Exported) {
        self.withdraw();
        let relaxed = Ordering::Relaxed;
        self.base.store(exported.base, relaxed);
        self.bytes.store(exported.bytes, relaxed);
        self.buffer_id.store(exported.buffer_id, relaxed);
        store_bytes(&self.handle, &exported.handle);
        self.units(exported).open();
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Owner: staging memory is no longer there.
    pub(super) fn withdraw(&self) {
        let generation = self.generation.load(Ordering::Relaxed);
        if generation % 2 != 0 {
            self.generation
                .store(generation.wrapping_add(1), Ordering::Release);
        }
        fence(Ordering::Release);
    }
}

/// Addresses and numbers that are not 0.
fn store_pairs(words: &[AtomicU64], pairs: &[(u64, u32)]) {
    for (word, (pci, number)) in words.iter().zip(pairs) {
        word.store(pci | u64::from(*number) << PCI_BITS, Ordering::Relaxed);
    }
}

fn pairs(words: &[AtomicU64]) -> impl Iterator<Item = (u64, u32)> + '_ {
    let words = words.iter().map(|word| word.load(Ordering::Relaxed));
    let words = words.take_while(|word| *word != 0);
    words.map(|word| (word & ((1 << PCI_BITS) - 1), (word >> PCI_BITS) as u32))
}

fn store_bytes(words: &[AtomicU64], bytes: &[u8]) {
    for (word, chunk) in words.iter().zip(bytes.chunks_exact(8)) {
        let mut value = [0; 8];
        value.copy_from_slice(chunk);
        word.store(u64::from_ne_bytes(value), Ordering::Relaxed);
    }
}

fn load_bytes(words: &[AtomicU64], bytes: &mut [u8]) {
    for (word, chunk) in words.iter().zip(bytes.chunks_exact_mut(8)) {
        chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Box<GpuRow> {
        crate::node::map::fresh()
    }

    #[test]
    fn links_that_are_told_are_read() {
        let wiring = Wiring {
            pci: 0xffff_ffff_0018 << 8 & ((1 << PCI_BITS) - 1),
            is_switched: false,
            link_gb_s: 25.0,
            to: (1..=NEIGHBOURS as u32)
                .map(|n| (u64::from(n) << 8, n))
                .collect(),
            // The first level is 0, and an address may be 0, too.
            apart: (0..NEIGHBOURS as u32)
                .map(|n| (u64::from(n) << 8, 10 * (n % 6)))
                .collect(),
        };
        let row = row();
        assert_eq!(row.wiring(), None);
        row.wire(&wiring);
        assert_eq!(row.wiring(), Some(wiring.clone()));
        let mut other = Wiring {
            is_switched: true,
            to: Vec::new(),
            ..wiring.clone()
        };
        row.wire(&other);
        assert_eq!(row.wiring(), Some(wiring.clone()), "said once");
        let second = self::row();
        other.apart.push((88, 10));
        second.wire(&other);
        other.apart.clear();
        assert_eq!(second.wiring(), Some(other), "no room, so nobody knows");
        let mut too_many = wiring;
        too_many.to.push((77, 1));
        let third = self::row();
        third.wire(&too_many);
        assert_eq!(third.wiring(), None);
    }

    #[test]
    fn links_that_make_no_sense_are_passed_over() {
        let row = row();
        for rate in [f32::NAN, -1.0, f32::INFINITY] {
            let known = u64::from(rate.to_bits()) << 32 | WRITTEN;
            row.wiring.known.store(known, Ordering::Relaxed);
            assert_eq!(row.wiring(), None, "{rate}");
        }
    }
}
