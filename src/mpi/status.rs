//! Storage for a status.

use std::ffi::c_void;

/// Storage for a status of any ABI (the largest has 32 bytes).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(8))]
pub struct Status([u64; 4]);

impl Status {
    /// An empty status, all bytes zero.
    #[inline]
    pub const fn new() -> Status {
        Status([0; 4])
    }

    #[cfg(test)]
    pub(super) const fn of(words: [u64; 4]) -> Status {
        Status(words)
    }

    /// To be passed where MPI writes a status.
    #[inline]
    pub(super) fn as_mut_ptr(&mut self) -> *mut c_void {
        self.0.as_mut_ptr().cast()
    }

    /// To be passed where MPI reads a status.
    #[inline]
    pub(super) fn as_ptr(&self) -> *const c_void {
        self.0.as_ptr().cast()
    }
}
