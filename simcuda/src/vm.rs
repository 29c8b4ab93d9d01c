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

/// A reservation of device addresses, and the place beside it where copies find what is mapped there.
pub struct Span {
    /// First address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    shadow: *mut u8,
    host_access: bool,
}

// SAFETY: as for `Vm`.
unsafe impl Send for Span {}
// SAFETY: as for `Vm`.
unsafe impl Sync for Span {}

impl Vm {
    /// Lets host code touch a range of the window in whole pages (managed memory), or takes that away again.
    pub fn expose(&self, memory: &OwnedFd, offset: u64, size: u64, on: bool) -> io::Result<()> {
        assert!(offset + size <= self.length && offset % PAGE == 0 && size % PAGE == 0);
        if self.host_access {
            return Ok(());
        }
        let backing = on.then_some((memory.as_raw_fd(), offset));
        // SAFETY: the range lies in this process's own window, by the assertion, and holds nothing but pages that
        // nobody may touch or, before it is taken away, the managed allocation that is being freed.
        unsafe { overlay(self.base + offset, size, backing, libc::PROT_NONE) }
    }

    /// Reserves `size` bytes of addresses at a multiple of `align`, at `hint` if that is free.
    pub fn reserve(&self, size: u64, align: u64, hint: u64) -> io::Result<Span> {
        let align = align.max(PAGE);
        let room = size
            .checked_add(align)
            .and_then(|r| usize::try_from(r).ok())
            .ok_or(io::ErrorKind::OutOfMemory)?;
        let wanted = (hint != 0 && hint % align == 0).then_some(hint as usize);
        let shadow = window(None, size as usize, None)?.cast::<u8>();
        let release = || {
            // SAFETY: just mapped with this length, and nothing refers to it.
            unsafe { libc::munmap(shadow.cast(), size as usize) };
        };
        let address = match wanted.and_then(|at| exactly(at, size as usize)) {
            Some(address) => address,
            None => {
                let start = window(None, room, None).inspect_err(|_| release())? as u64;
                let address = start.next_multiple_of(align);
                trim(start, address - start);
                trim(address + size, align - (address - start));
                address
            }
        };
        Ok(Span {
            address,
            size,
            shadow,
            host_access: self.host_access,
        })
    }
}

/// Gives a part of a fresh mapping back.
fn trim(address: u64, length: u64) {
    if length > 0 {
        // SAFETY: a part of a mapping that the caller has just made and does not use.
        unsafe { libc::munmap(address as *mut libc::c_void, length as usize) };
    }
}

/// Reserves the place asked for, or nothing.
fn exactly(at: usize, size: usize) -> Option<u64> {
    let p = window(Some(at), size, None).ok()?;
    if p as usize == at {
        return Some(at as u64);
    }
    trim(p as u64, size as u64);
    None
}

/// Replaces pages: by a part of a file, else by anonymous ones.
///
/// # Safety
/// The range belongs to the caller, who has no use for what is mapped there.
unsafe fn overlay(
    address: u64,
    size: u64,
    backing: Option<(i32, u64)>,
    without: libc::c_int,
) -> io::Result<()> {
    let (protection, flags, fd, offset) = match backing {
        Some((fd, offset)) => (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            fd,
            offset,
        ),
        None => (without, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0),
    };
    // SAFETY: the caller's promise.
    let p = unsafe {
        libc::mmap(
            address as *mut libc::c_void,
            size as usize,
            protection,
            flags | libc::MAP_FIXED | libc::MAP_NORESERVE,
            fd,
            offset as libc::off_t,
        )
    };
    if p == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    no_dump(p, size as usize);
    Ok(())
}

impl Span {
    /// True for an address in it.
    pub fn contains(&self, address: u64) -> bool {
        address.wrapping_sub(self.address) < self.size
    }

    /// Where copies find the byte at `address`.
    pub fn shadow(&self, address: u64) -> *mut u8 {
        assert!(self.contains(address), "address inside the reservation");
        // SAFETY: inside the mapping, by the assertion.
        unsafe { self.shadow.add((address - self.address) as usize) }
    }

    /// Maps `size` bytes of the file from `offset` on at `address`.
    pub fn map(&self, address: u64, size: u64, memory: &OwnedFd, offset: u64) -> io::Result<()> {
        self.put(address, size, Some((memory.as_raw_fd(), offset)))
    }

    /// Takes a mapping away. What is still under way there goes to pages that nobody looks at, so that a program
    /// that unmaps too early is told so by a report and not by a crash inside this driver.
    pub fn unmap(&self, address: u64, size: u64) -> io::Result<()> {
        self.put(address, size, None)
    }

    fn put(&self, address: u64, size: u64, backing: Option<(i32, u64)>) -> io::Result<()> {
        assert!(self.contains(address) && size <= self.address + self.size - address);
        let scratch = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: both ranges lie in this reservation, by the assertion, and the caller knows that nothing is mapped
        // there or that what is goes away.
        unsafe {
            overlay(self.shadow(address) as u64, size, backing, scratch)?;
            if self.host_access {
                overlay(address, size, backing, libc::PROT_NONE)?;
            }
        }
        Ok(())
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        // SAFETY: both were mapped with this length; operations hold the mappings that hold this reservation.
        unsafe {
            libc::munmap(self.shadow.cast(), self.size as usize);
            libc::munmap(self.address as *mut libc::c_void, self.size as usize);
        }
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
