//! A peer's reservation, as far as messages have needed it: the same range of addresses in this process, with
//! the peer's chunks mapped at their offsets.

use super::chunks::Chunk;
use super::error::{Error, Result};
use super::state::{ContextKey, Entered};
use super::types::{Device, MemAccess, HANDLE_TYPE_FILE};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Addresses with chunks mapped in them. They are unmapped when this is dropped.
#[derive(Debug)]
pub struct Mirror {
    context: ContextKey,
    device: Device,
    address: u64,
    size: u64,
    /// Bytes of the chunks that are there, by their beginnings.
    chunks: Mutex<BTreeMap<u64, u64>>,
}

impl Mirror {
    /// Addresses for a reservation of so many bytes, for copies in a context.
    pub fn reserve(context: ContextKey, size: u64) -> Result<Mirror> {
        let entered = Entered::enter_same(context)?;
        let bytes = usize::try_from(size).map_err(|_| Error::Exhausted("address space"))?;
        let (mut device, mut address) = (0, 0);
        entered.driver().ctx_get_device(&mut device)?;
        entered
            .driver()
            .mem_address_reserve(&mut address, bytes, 0, 0, 0)?;
        Ok(Mirror {
            context,
            device,
            address,
            size,
            chunks: Mutex::default(),
        })
    }

    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Whether all of a range is there.
    pub fn holds(&self, (first, end): (u64, u64)) -> bool {
        let chunks = self.chunks.lock();
        let mut at = first;
        while at < end {
            match chunks.range(..=at).next_back() {
                Some((offset, bytes)) if at < offset + bytes => at = offset + bytes,
                _ => return false,
            }
        }
        true
    }

    /// Maps a chunk that a file leads to.
    pub fn take(&self, chunk: &Chunk, file: BorrowedFd<'_>) -> Result<()> {
        let mut chunks = self.chunks.lock();
        let end = chunk.offset + chunk.bytes;
        let before = chunks.range(..end).next_back();
        if end > self.size || before.is_some_and(|(offset, bytes)| offset + bytes > chunk.offset) {
            return Err(Error::AlreadyMapped);
        }
        let entered = Entered::enter_same(self.context)?;
        let driver = entered.driver();
        let bytes = usize::try_from(chunk.bytes).map_err(|_| Error::Exhausted("address space"))?;
        let number = std::ptr::without_provenance_mut::<c_void>(file.as_raw_fd() as usize);
        let at = self.address + chunk.offset;
        let mut handle = 0;
        // SAFETY: the handle is written, and given back once: what is mapped is kept without it. The range is
        // a part of this reservation in which nothing is mapped.
        let mapped = unsafe {
            driver.mem_import_from_shareable_handle(&raw mut handle, number, HANDLE_TYPE_FILE)?;
            let mapped = driver.mem_map(at, bytes, 0, handle, 0);
            if let Err(error) = driver.mem_release(handle) {
                log::debug!("giving a handle back: {error}");
            }
            mapped
        };
        mapped?;
        let access = MemAccess::read_write(self.device);
        // SAFETY: one description, of what was mapped just now.
        if let Err(error) = unsafe { driver.mem_set_access(at, bytes, &raw const access, 1) } {
            // SAFETY: nobody has used it.
            let unmapped = unsafe { driver.mem_unmap(at, bytes) };
            log::debug!("unmapping what may not be reached: {unmapped:?}");
            return Err(error);
        }
        chunks.insert(chunk.offset, chunk.bytes);
        Ok(())
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        // None of this needs the context, which may be gone.
        let Ok(entered) = Entered::enter_same(self.context).or_else(|_| Entered::relaxed()) else {
            return;
        };
        let driver = entered.driver();
        for (offset, bytes) in std::mem::take(self.chunks.get_mut()) {
            // SAFETY: mapped by `take`, and no transfer holds it.
            if let Err(error) = unsafe { driver.mem_unmap(self.address + offset, bytes as usize) } {
                log::debug!("unmapping a chunk of a peer's: {error}");
            }
        }
        // SAFETY: reserved by `reserve`, and nothing is mapped there any more.
        if let Err(error) = unsafe { driver.mem_address_free(self.address, self.size as usize) } {
            log::debug!("giving addresses back: {error}");
        }
    }
}
