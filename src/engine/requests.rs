//! Generalized requests (MPI 4.1 section 13.2): what the program holds of a send of the engine's.

use std::ffi::{c_int, c_void};

use crate::engine::Env;
use crate::mpi::{native, Abi, Handle, Status};

extern "C" fn on_query(_extra: *mut c_void, status: *mut c_void) -> c_int {
    let Some(abi) = crate::mpi::abi() else {
        return 0;
    };
    // SAFETY: MPI passes a status to fill (MPI 4.1 section 13.2).
    unsafe {
        native::status_set_elements(status, abi.byte, 0);
        native::status_set_cancelled(status, 0);
        abi.set_status_source(status, abi.undefined);
        abi.set_status_tag(status, abi.undefined);
    }
    abi.success
}

extern "C" fn on_free(_extra: *mut c_void) -> c_int {
    0
}

extern "C" fn on_cancel(_extra: *mut c_void, _complete: c_int) -> c_int {
    0
}

/// A generalized request (MPI 4.1 section 13.2).
///
/// # Safety
/// MPI may be called.
pub unsafe fn start_generalized(abi: &Abi) -> Result<Handle, c_int> {
    let mut handle = abi.request_null;
    // SAFETY: the callbacks have the C signatures of MPI 4.1 section 13.2.
    let code = unsafe {
        native::grequest_start(
            on_query as *mut c_void,
            on_free as *mut c_void,
            on_cancel as *mut c_void,
            std::ptr::null_mut(),
            &raw mut handle,
        )
    };
    if code == abi.success {
        Ok(abi.normalize(handle))
    } else {
        Err(code)
    }
}

/// Ends a generalized request whose status nobody wants.
///
/// # Safety
/// `handle` is a generalized request of ours whose operation is over.
pub unsafe fn drop_request(handle: Handle) {
    let mut handle = handle;
    // SAFETY: passed on.
    unsafe {
        native::grequest_complete(handle);
        native::request_free(&raw mut handle);
    }
}

/// Completes a generalized request and has MPI free it, filling the status.
///
/// # Safety
/// `handle` is a generalized request of ours whose operation is over.
pub unsafe fn finish_request(env: &Env, handle: Handle, status: *mut c_void) -> c_int {
    let mut handle = handle;
    let mut own = Status::new();
    let status = if env.abi.ignores_status(status) {
        own.as_mut_ptr()
    } else {
        status
    };
    // SAFETY: passed on; the status is the program's or a local.
    unsafe {
        native::grequest_complete(handle);
        native::wait(&raw mut handle, status)
    }
}
