//! Start and end of MPI.

use std::ffi::{c_int, c_void};

use crate::engine::lifecycle;
use crate::mpi::{native, Function, Handle};

/// `MPI_Init` (MPI 4.1 section 11.2).
///
/// # Safety
/// The arguments are those of the program's call, here and in the whole module tree.
pub unsafe fn init(argc: *mut c_int, argv: *mut c_void) -> c_int {
    lifecycle::note_init();
    // SAFETY: passed on.
    let code = unsafe { native::init(argc, argv) };
    if code == 0 {
        lifecycle::arm();
    }
    code
}

/// A tool behind the library has returned from a call of the program's.
#[inline(always)]
pub fn after_tool(function: Function) {
    if matches!(function, Function::Init | Function::InitThread) {
        lifecycle::after_init_of_tool();
    }
}

/// `MPI_Init_thread`.
///
/// # Safety
/// As [`init`].
pub unsafe fn init_thread(
    argc: *mut c_int,
    argv: *mut c_void,
    required: c_int,
    provided: *mut c_int,
) -> c_int {
    lifecycle::note_init();
    // SAFETY: passed on.
    let code = unsafe { native::init_thread(argc, argv, required, provided) };
    if code == 0 {
        lifecycle::arm();
    }
    code
}

/// `MPI_Finalize`.
///
/// # Safety
/// As [`init`].
pub unsafe fn finalize() -> c_int {
    // SAFETY: passed on.
    unsafe { lifecycle::finalize() }
}

/// `MPI_Abort`.
///
/// # Safety
/// As [`init`].
pub unsafe fn abort(comm: Handle, errorcode: c_int) -> c_int {
    crate::trace::flush();
    // SAFETY: passed on.
    unsafe { native::abort(comm, errorcode) }
}
