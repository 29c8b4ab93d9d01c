//! Addresses: device pointers that fault under host code, and the private mappings that copies use.

use crate::job::map_shared;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// Where device pointers of every process start, if the place is free: as on a real machine,
/// two processes then see the same address for different memory.
const PREFERRED_BASE: usize = 0x0a00_0000_0000;
/// Host page.
pub const PAGE: u64 = 4096;

/// This process's device address space.
pub struct Vm {
    /// Address of GPU 0's first byte.
    pub base: u64,
    /// Distance between GPUs.
    pub stride: u64,
    /// The same bytes, accessible.
    shadow: *mut u8,
    /// Length of the whole window.
    pub length: u64,
    host_access: bool,
}

// SAFETY: the mappings stay for the life of the process; what is read and written through them
// is device memory, whose races are the simulated program's own.
unsafe impl Send for Vm {}
// SAFETY: as above.
unsafe impl Sync for Vm {}

/// One mapping of another process's allocation.
pub struct Import {
    /// Device pointer to the first byte of the allocation.
    pub address: u64,
    shadow: *mut u8,
    window: *mut u8,
    mapped: usize,
    skip: u64,
}

// SAFETY: as for `Vm`.
unsafe impl Send for Import {}
// SAFETY: as for `Vm`.
unsafe impl Sync for Import {}

impl Vm {
    /// Reserves the window for `gpus` of `bytes` each over `memory`.
    pub fn new(memory: &OwnedFd, gpus: usize, bytes: u64, host_access: bool) -> io::Result<Vm> {
        let stride = stride(bytes);
        let length = stride * gpus as u64;
        // SAFETY: the file has this length.
        let shadow = unsafe { map_shared(memory.as_raw_fd(), 0, length as usize) }?;
        no_dump(shadow.cast(), length as usize);
        let base = window(
            Some(PREFERRED_BASE),
            length as usize,
            host_access.then_some((memory.as_raw_fd(), 0)),
        )?;
        Ok(Vm {
            base: base as u64,
            stride,
            shadow,
            length,
            host_access,
        })
    }

    /// True for an address in this process's own device window.
    pub fn contains(&self, address: u64) -> bool {
        address.wrapping_sub(self.base) < self.length
    }

    /// Accessible address of an offset in the memory file.
    pub fn shadow(&self, offset: u64) -> *mut u8 {
        assert!(offset < self.length, "offset inside the device window");
        // SAFETY: inside the mapping, by the assertion.
        unsafe { self.shadow.add(offset as usize) }
    }

    /// Maps `size` bytes at `offset` of another process's memory.
    pub fn import(&self, memory: &OwnedFd, offset: u64, size: u64) -> io::Result<Import> {
        let first = offset / PAGE * PAGE;
        let skip = offset - first;
        let mapped = (skip + size).div_ceil(PAGE) * PAGE;
        // SAFETY: the exporter's file covers its allocations in whole pages.
        let shadow = unsafe { map_shared(memory.as_raw_fd(), first, mapped as usize) }?;
        let backing = self.host_access.then_some((memory.as_raw_fd(), first));
        let window = window(None, mapped as usize, backing)?.cast::<u8>();
        Ok(Import {
            address: window as u64 + skip,
            shadow,
            window,
            mapped: mapped as usize,
            skip,
        })
    }
}

/// Distance between two GPUs' windows: their memory, rounded up to a GiB, and a GiB that belongs to nobody.
pub fn stride(bytes: u64) -> u64 {
    (bytes.div_ceil(1 << 30) + 1) << 30
}

fn window(
    at: Option<usize>,
    length: usize,
    backing: Option<(i32, u64)>,
) -> io::Result<*mut libc::c_void> {
    let (protection, mut flags, fd, offset) = match backing {
        Some((fd, offset)) => (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            fd,
            offset,
        ),
        None => (
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        ),
    };
    flags |= libc::MAP_NORESERVE;
    for (address, extra) in at
        .map(|a| (a, libc::MAP_FIXED_NOREPLACE))
        .into_iter()
        .chain([(0, 0)])
    {
        // SAFETY: never replaces an existing mapping.
        let p = unsafe {
            libc::mmap(
                address as *mut libc::c_void,
                length,
                protection,
                flags | extra,
                fd,
                offset as libc::off_t,
            )
        };
        if p != libc::MAP_FAILED {
            no_dump(p, length);
            return Ok(p);
        }
    }
    Err(io::Error::last_os_error())
}

/// Keeps a simulated GPU's memory out of core files.
fn no_dump(p: *mut libc::c_void, length: usize) {
    // SAFETY: only advice, on a mapping just made.
    unsafe { libc::madvise(p, length, libc::MADV_DONTDUMP) };
}

impl Import {
    /// Accessible address of the allocation's first byte.
    pub fn shadow(&self) -> *mut u8 {
        // SAFETY: `skip` is below a page, inside the mapping.
        unsafe { self.shadow.add(self.skip as usize) }
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        // SAFETY: both were mapped with this length and nothing refers to them any more: operations
        // hold the allocation that owns this mapping.
        unsafe {
            libc::munmap(self.shadow.cast(), self.mapped);
            libc::munmap(self.window.cast(), self.mapped);
        }
    }
}

/// Gives the pages that lie wholly in the range back to the system.
pub fn punch(memory: &OwnedFd, offset: u64, size: u64) {
    let first = offset.div_ceil(PAGE) * PAGE;
    let end = (offset + size) / PAGE * PAGE;
    if end > first {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: plain system call on our own file.
        unsafe {
            libc::fallocate(
                memory.as_raw_fd(),
                mode,
                first as libc::off_t,
                (end - first) as libc::off_t,
            )
        };
    }
}
