//! Start and end of MPI.

use std::ffi::{c_int, c_void};

use crate::engine::lifecycle;
use crate::mpi::{calls, native, Comm, Function, Out};

/// A tool behind the library has returned from a call of the program's.
#[inline(always)]
pub fn after_tool(function: Function) {
    if matches!(function, Function::Init | Function::InitThread) {
        lifecycle::after_init_of_tool();
    }
}

fn initialize(natively: impl FnOnce() -> c_int) -> c_int {
    lifecycle::note_init();
    let code = natively();
    if code == 0 {
        lifecycle::arm();
    }
    code
}

calls! {
    /// `MPI_Init` (MPI 4.1 section 11.2).
    init(argc: *mut c_int, argv: *mut c_void) { initialize(|| native::init(argc, argv)) }

    /// `MPI_Init_thread` (MPI 4.1 section 11.2).
    init_thread(argc: *mut c_int, argv: *mut c_void, required: c_int, provided: Out<'_, c_int>) {
        initialize(|| native::init_thread(argc, argv, required, provided))
    }

    /// `MPI_Finalize` (MPI 4.1 section 11.2).
    finalize() { lifecycle::finalize() }
}

/// `MPI_Abort` (MPI 4.1 section 9.5).
pub fn abort(comm: Comm, errorcode: c_int) -> c_int {
    crate::engine::tracing::end(false);
    native::abort(comm, errorcode)
}
