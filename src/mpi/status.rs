//! Storage for a status.

use std::ffi::c_void;

/// Storage for a status of any ABI (the largest has 32 bytes).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(8))]
pub struct Status([u64; 4]);

impl Status {
    /// An empty status, all bytes zero.
    #[inline]
    pub const fn new() -> Status {
        Status([0; 4])
    }

    /// To be passed where MPI writes a status.
    #[inline]
    pub fn as_mut_ptr(&mut self) -> *mut c_void {
        self.0.as_mut_ptr().cast()
    }

    /// To be passed where MPI reads a status.
    #[inline]
    pub fn as_ptr(&self) -> *const c_void {
        self.0.as_ptr().cast()
    }
}
