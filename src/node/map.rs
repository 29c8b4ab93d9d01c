//! A shared mapping of a whole file.

use super::sys;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::{madvise, mmap, munmap, Advice, MapFlags, ProtFlags};

/// Has the processor bring the first cache line of something in shared memory that will soon be written,
/// while other work is done. A line that another core has written last takes a tenth of a microsecond.
pub(super) fn will_write<T>(object: &T) {
    will_write_at(std::ptr::from_ref(object).addr());
}

/// Does the same for the line at an address, whether or not anything is still there.
pub(super) fn will_write_at(_address: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which changes no memory and no register, and does nothing at an address that is not
    // mapped; nor on processors without it.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) _address, options(nostack, preserves_flags, readonly));
    }
}

/// Has the processor also bring the other lines of something that will soon be read.
pub(super) fn will_read_rest<T>(object: &T) {
    let start = std::ptr::from_ref(object).addr();
    for _address in (start..start + size_of::<T>()).step_by(LINE_BYTES).skip(1) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        unsafe {
            std::arch::asm!("prefetcht0 [{}]", in(reg) _address, options(nostack, preserves_flags, readonly));
        }
    }
}

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// A read-write MAP_SHARED mapping, of the file's size at the time. Not part of core dumps.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

/// What may lie in memory that other processes write to at any time.
///
/// # Safety
/// It is made of atomics only, so that any bits are valid.
pub unsafe trait Shared {}

/// Declares types that are made of atomics only.
macro_rules! shared {
    ($($type:ty),*) => {$(
        // SAFETY: atomics and arrays of them, in structs of the C layout.
        unsafe impl $crate::node::map::Shared for $type {}
    )*};
}
pub(super) use shared;

/// As a fresh segment holds it.
#[cfg(test)]
pub(super) fn fresh<T: Shared>() -> Box<T> {
    // SAFETY: any bits are valid, and so are zeros.
    Box::new(unsafe { std::mem::zeroed() })
}

// SAFETY: the mapping is only handed out as raw pointers and as references to types made of atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps all of `fd`, which must not shrink below `bytes` while mapped.
    pub fn new(fd: BorrowedFd<'_>, bytes: u64) -> io::Result<Self> {
        let bytes =
            usize::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
        if bytes == 0 || sys::file_stat(fd.as_raw_fd())?.size < bytes as u64 {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let address = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            let flags = MapFlags::SHARED | MapFlags::NORESERVE;
            mmap(std::ptr::null_mut(), bytes, protection, flags, fd, 0)
        }?;
        // SAFETY: the range was just mapped; failing only means larger core dumps.
        let _ = unsafe { madvise(address, bytes, Advice::LinuxDontDump) };
        let base = NonNull::new(address.cast())
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Self { base, bytes })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Address of `length` bytes from `offset` on, if they lie within the mapping.
    pub fn range(&self, offset: usize, length: usize) -> Option<NonNull<u8>> {
        let end = offset.checked_add(length)?;
        if end > self.bytes {
            return None;
        }
        // SAFETY: offset <= end <= bytes, so the address lies within the mapping or one past it.
        Some(unsafe { self.base.add(offset) })
    }

    /// A reference to a `T` at `offset`, if it lies within the mapping and is aligned.
    pub fn object<T: Shared>(&self, offset: usize) -> Option<&T> {
        let address = self.range(offset, size_of::<T>())?.cast::<T>();
        if !address.is_aligned() {
            return None;
        }
        // SAFETY: in range and aligned; the mapping lives as long as self; `T` is made of atomics.
        Some(unsafe { address.as_ref() })
    }

    /// Has the pages of a range present. If the kernel cannot provide one, this is an error here and not a
    /// SIGBUS later. Kernels before 5.14 cannot tell and always say yes.
    pub fn populate(&self, offset: usize, length: usize) -> bool {
        const PAGE: usize = 4096;
        let start = offset & !(PAGE - 1);
        let Some(address) = self.range(start, length + (offset - start)) else {
            return false;
        };
        let bytes = length + (offset - start);
        // SAFETY: the range lies within our mapping; populating changes no contents.
        let result = unsafe { madvise(address.as_ptr().cast(), bytes, Advice::LinuxPopulateRead) };
        matches!(result, Ok(()) | Err(Errno::INVAL))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is ours, and every reference into it borrows self.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
