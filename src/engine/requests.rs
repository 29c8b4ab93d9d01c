//! Generalized requests (MPI 4.1 section 13.2): the handles that the program holds of the engine's sends.

use std::ffi::{c_int, c_void};

use crate::mpi::{native, Abi, Handle};

/// Idle requests that are kept for later sends: mostly a program's window.
const KEPT_MAX: usize = 256;

/// The generalized requests of sends. A request whose send is over is given out again instead of being ended:
/// to start, complete and free one takes the MPI library longer than the engine takes for the rest of a send.
#[derive(Debug, Default)]
pub struct Pool {
    idle: Vec<Handle>,
}

impl Pool {
    /// A request for a send.
    ///
    /// # Safety
    /// MPI may be called, here and below.
    pub unsafe fn take(&mut self, abi: &Abi) -> Result<Handle, c_int> {
        match self.idle.pop() {
            Some(handle) => Ok(handle),
            // SAFETY: passed on.
            None => unsafe { start_generalized(abi) },
        }
    }

    /// Takes back a request whose send is over and that the program no longer holds; fills the status.
    ///
    /// # Safety
    /// As [`Pool::take`]; `status` is the program's, if it wants one.
    pub unsafe fn finish(&mut self, abi: &Abi, handle: Handle, status: *mut c_void) {
        if !abi.ignores_status(status) {
            // SAFETY: passed on.
            unsafe { fill(abi, status) };
        }
        if self.idle.len() < KEPT_MAX {
            self.idle.push(handle);
        } else {
            // SAFETY: a request of ours that nobody knows any more.
            unsafe { drop_request(abi, handle) };
        }
    }

    /// Ends the requests that are kept. Called before MPI is finalized.
    ///
    /// # Safety
    /// As [`Pool::take`].
    pub unsafe fn close(&mut self, abi: &Abi) {
        for handle in self.idle.drain(..) {
            // SAFETY: as in `finish`.
            unsafe { drop_request(abi, handle) };
        }
    }
}

/// The status of a send: it was not cancelled, and nothing else is defined (MPI 4.1 section 3.7.3).
unsafe fn fill(abi: &Abi, status: *mut c_void) {
    // SAFETY: a status of this ABI, to be filled.
    unsafe {
        native::status_set_elements(status, abi.byte, 0);
        native::status_set_cancelled(status, 0);
        abi.set_status_source(status, abi.undefined);
        abi.set_status_tag(status, abi.undefined);
    }
}

extern "C" fn on_query(_extra: *mut c_void, status: *mut c_void) -> c_int {
    let Some(abi) = crate::mpi::abi() else {
        return 0;
    };
    // SAFETY: MPI passes a status to fill (MPI 4.1 section 13.2).
    unsafe { fill(abi, status) };
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

/// A persistent request to MPI_PROC_NULL that stands for an engine request. It is never started, and its
/// handle is unique.
///
/// # Safety
/// MPI may be called; `comm` is the program's.
pub unsafe fn standing_request(abi: &Abi, comm: Handle) -> Result<Handle, c_int> {
    let mut handle = abi.request_null;
    let nothing: *const c_void = std::ptr::null();
    let (byte, nobody) = (abi.byte, abi.proc_null);
    // SAFETY: a live local; a send to MPI_PROC_NULL touches no buffer.
    let code = unsafe { native::send_init(nothing, 0, byte, nobody, 0, comm, &raw mut handle) };
    if code == abi.success {
        Ok(abi.normalize(handle))
    } else {
        Err(code)
    }
}

/// Ends a generalized request whose status nobody wants. `MPI_Wait` makes no progress in MPICH where the
/// request is complete; `MPI_Request_free` does, and must not be called in `MPI_Finalize`. UCX moves long
/// messages of MPICH 4.0.2 by TCP where the kernel refuses CMA, as in containers. There each rank flushes in
/// `MPI_Finalize`, then waits in the launcher's barrier and answers no more. A rank that makes progress after
/// its peer has entered `MPI_Finalize` answers the peer's flush; the peer goes on to the barrier, and the
/// rank's own flush is never answered. Without the library 5 of 5 runs hang after such an `MPI_Iprobe`, 6 of
/// 6 after an `MPI_Test` or an `MPI_Request_free` of a complete request, none of 6 after an `MPI_Wait`.
///
/// # Safety
/// `handle` is a generalized request of ours whose operation is over.
pub unsafe fn drop_request(abi: &Abi, handle: Handle) {
    let mut handle = handle;
    // SAFETY: passed on.
    unsafe {
        native::grequest_complete(handle);
        native::wait(&raw mut handle, abi.no_status());
    }
}
