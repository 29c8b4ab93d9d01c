//! Staging memory on GPUs, for messages between other GPUs: who sees which GPU, and what is exported there.
//!
//! Each rank that uses a device lists the GPUs that it sees. A peer that wants to send over one of them raises a wish in
//! its row and rings; the owner allocates staging memory there, exports it and writes down the handle. From then on senders
//! take pieces of it by compare-and-swap, without the owner.

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

/// A GPU that the owner of the segment sees.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct GpuRow {
    uuid: [AtomicU64; 2],
    is_used: AtomicU32,
    /// Peers that want staging there raise it.
    wished: AtomicU32,
    /// Odd while staging memory is exported.
    generation: AtomicU64,
    base: AtomicU64,
    bytes: AtomicU64,
    buffer_id: AtomicU64,
    handle: [AtomicU64; 8],
    units: [AtomicU64; RELAY_UNITS],
}

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

    /// The units of what is exported there.
    pub fn units(&self, exported: &Exported) -> Units<'_> {
        let count = (exported.bytes / UNIT_BYTES).min(RELAY_UNITS as u64) as usize;
        Units::new(&self.units[..count], count.max(1) as u32)
    }

    /// Peer: asks for staging there. True if nobody had asked; the owner is then to be told.
    pub(super) fn wish(&self) -> bool {
        self.wished.swap(1, Ordering::AcqRel) == 0
    }

    /// Owner: whether a peer has asked, since this was last asked.
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

    /// Owner: it is there no longer.
    pub(super) fn withdraw(&self) {
        let generation = self.generation.load(Ordering::Relaxed);
        if generation % 2 != 0 {
            self.generation
                .store(generation.wrapping_add(1), Ordering::Release);
        }
        fence(Ordering::Release);
    }
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
