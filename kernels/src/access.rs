//! Device memory as twins see it: what a launch touches, and pointers into it.

use crate::real::Element;

/// Turns a device address and a length in bytes into a host pointer; null where that range is not mapped.
pub type Translate<'a> = &'a dyn Fn(u64, u64) -> *mut u8;

/// What a launch does with a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessKind {
    /// Reads it.
    Read,
    /// Writes it (some or all of its bytes) with plain stores.
    Write,
    /// Reads and writes it with atomic operations.
    Atomic,
}

/// A range of device memory that a launch touches: `rows` runs of `row_bytes` bytes, `pitch_bytes` apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Device address of the first byte.
    pub address: u64,
    /// Length of each run in bytes.
    pub row_bytes: u64,
    /// Distance from the start of one run to that of the next, in bytes.
    pub pitch_bytes: u64,
    /// Number of runs.
    pub rows: u64,
    /// Read, written, or updated atomically.
    pub kind: AccessKind,
}

impl Access {
    /// One contiguous run.
    pub fn run(address: u64, bytes: u64, kind: AccessKind) -> Access {
        Access {
            address,
            row_bytes: bytes,
            pitch_bytes: bytes,
            rows: 1,
            kind,
        }
    }

    /// Bytes touched.
    pub fn bytes(&self) -> u64 {
        self.row_bytes.saturating_mul(self.rows)
    }

    /// Bytes from the first to behind the last byte touched.
    pub fn span_bytes(&self) -> u64 {
        if self.rows == 0 || self.row_bytes == 0 {
            return 0;
        }
        (self.rows - 1)
            .saturating_mul(self.pitch_bytes)
            .saturating_add(self.row_bytes)
    }

    /// Whether it writes.
    pub fn writes(&self) -> bool {
        self.kind != AccessKind::Read
    }

    /// Whether it reads.
    pub fn reads(&self) -> bool {
        self.kind != AccessKind::Write
    }
}

/// Why a launch failed, as a GPU would say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Touched memory that is not mapped (`CUDA_ERROR_ILLEGAL_ADDRESS`). Holds the address.
    IllegalAddress(u64),
    /// A pointer to elements that is not aligned to them (`CUDA_ERROR_MISALIGNED_ADDRESS`). Holds the address.
    Misaligned(u64),
    /// A launch shape that the kernel does not work with (`CUDA_ERROR_INVALID_VALUE`).
    InvalidLaunch,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fault::IllegalAddress(a) => write!(f, "illegal address {a:#x}"),
            Fault::Misaligned(a) => write!(f, "misaligned address {a:#x}"),
            Fault::InvalidLaunch => write!(f, "launch shape not supported by the kernel"),
        }
    }
}

impl std::error::Error for Fault {}

/// A translated range of elements. Other processes may map the same bytes, so no reference is ever formed over them.
#[derive(Clone, Copy)]
pub struct Memory<T> {
    first: *mut T,
    elements: u64,
}

impl<T: Element> Memory<T> {
    /// Translates `elements` elements from `address` on.
    ///
    /// # Safety
    /// `translate` must return null or a pointer to memory that is readable and writable for the length asked for,
    /// for as long as the result is used.
    pub unsafe fn new(
        translate: Translate<'_>,
        address: u64,
        elements: u64,
    ) -> Result<Memory<T>, Fault> {
        let size = std::mem::size_of::<T>() as u64;
        if address % size != 0 {
            return Err(Fault::Misaligned(address));
        }
        if elements == 0 {
            return Ok(Memory {
                first: std::ptr::null_mut(),
                elements,
            });
        }
        let bytes = elements
            .checked_mul(size)
            .ok_or(Fault::IllegalAddress(address))?;
        let first = translate(address, bytes);
        if first.is_null() {
            return Err(Fault::IllegalAddress(address));
        }
        Ok(Memory {
            first: first.cast(),
            elements,
        })
    }

    /// Element `i`.
    #[inline(always)]
    pub fn get(&self, i: u64) -> T {
        debug_assert!(i < self.elements, "element {i} of {}", self.elements);
        // SAFETY: `new` was promised that this many elements are readable; `i` is below that. The host pointer may
        // be aligned less than T where the simulator maps a buffer at an odd place, hence unaligned.
        unsafe { self.first.add(i as usize).read_unaligned() }
    }

    /// Sets element `i`.
    #[inline(always)]
    pub fn set(&self, i: u64, value: T) {
        debug_assert!(i < self.elements, "element {i} of {}", self.elements);
        // SAFETY: as in `get`, and writable.
        unsafe { self.first.add(i as usize).write_unaligned(value) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_ends_behind_the_last_run() {
        let a = Access {
            address: 64,
            row_bytes: 4,
            pitch_bytes: 100,
            rows: 3,
            kind: AccessKind::Read,
        };
        assert_eq!((a.bytes(), a.span_bytes()), (12, 204));
        assert_eq!(Access { rows: 0, ..a }.span_bytes(), 0);
    }

    #[test]
    fn faults_name_the_address() {
        let none = |_: u64, _: u64| std::ptr::null_mut();
        // SAFETY: the translation always returns null.
        let (mapped, odd) = unsafe {
            (
                Memory::<u32>::new(&none, 8, 1).err(),
                Memory::<u32>::new(&none, 9, 1).err(),
            )
        };
        assert_eq!(mapped, Some(Fault::IllegalAddress(8)));
        assert_eq!(odd, Some(Fault::Misaligned(9)));
    }
}
