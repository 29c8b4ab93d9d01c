//! Generalized requests (MPI 4.1 section 13.2): the handles that the program holds of the engine's sends.

use std::ffi::{c_int, c_void};

use crate::mpi::owned::OwnRequest;
use crate::mpi::{native, Abi, Comm, StatusAt, StatusOut};

/// Idle requests that are kept for later sends: mostly a program's window.
const KEPT_MAX: usize = 256;

/// The generalized requests of sends. A request whose send is over is given out again instead of being ended:
/// to start, complete and free one takes the MPI library longer than the engine takes for the rest of a send.
#[derive(Debug, Default)]
pub struct Pool {
    idle: Vec<OwnRequest>,
}

impl Pool {
    /// A request for a send.
    pub fn take(&mut self, abi: &Abi) -> Result<OwnRequest, c_int> {
        match self.idle.pop() {
            Some(handle) => Ok(handle),
            None => start_generalized(abi),
        }
    }

    /// Takes back a request whose send is over and that the program no longer holds; fills the status.
    pub fn finish(&mut self, abi: &Abi, handle: OwnRequest, status: StatusOut<'_>) {
        if let Some(status) = status.at(abi) {
            fill(abi, status);
        }
        if self.idle.len() < KEPT_MAX {
            self.idle.push(handle);
        } else {
            drop_request(abi, handle);
        }
    }

    /// Ends the requests that are kept. Called before MPI is finalized.
    pub fn close(&mut self, abi: &Abi) {
        for handle in self.idle.drain(..) {
            drop_request(abi, handle);
        }
    }
}

/// The status of a send: it was not cancelled, and nothing else is defined (MPI 4.1 section 3.7.3).
fn fill(abi: &Abi, status: StatusAt<'_>) {
    native::status_set_elements(status, abi.byte, 0);
    native::status_set_cancelled(status, 0);
    abi.set_status_source(status, abi.undefined);
    abi.set_status_tag(status, abi.undefined);
}

extern "C" fn on_query(_extra: *mut c_void, status: StatusAt<'_>) -> c_int {
    let Some(abi) = crate::mpi::abi() else {
        return 0;
    };
    fill(abi, status);
    abi.success
}

extern "C" fn on_free(_extra: *mut c_void) -> c_int {
    0
}

extern "C" fn on_cancel(_extra: *mut c_void, _complete: c_int) -> c_int {
    0
}

/// A generalized request (MPI 4.1 section 13.2).
pub fn start_generalized(abi: &Abi) -> Result<OwnRequest, c_int> {
    let (query, free) = (on_query as *mut c_void, on_free as *mut c_void);
    let (cancel, nothing) = (on_cancel as *mut c_void, std::ptr::null_mut());
    // SAFETY: the callbacks have the C signatures of MPI 4.1 section 13.2.
    OwnRequest::made(abi, |request| unsafe {
        native::grequest_start(query, free, cancel, nothing, request)
    })
}

/// A persistent request to MPI_PROC_NULL that stands for an engine request. It is never started, and its
/// handle is unique.
pub fn standing_request(abi: &Abi, comm: Comm) -> Result<OwnRequest, c_int> {
    let nothing: *const c_void = std::ptr::null();
    let (byte, nobody) = (abi.byte, abi.proc_null);
    // SAFETY: a send to MPI_PROC_NULL touches no buffer.
    OwnRequest::made(abi, |request| unsafe {
        native::send_init(nothing, 0, byte, nobody, 0, comm, request)
    })
}

/// Ends a generalized request whose status nobody wants. `MPI_Wait` makes no progress in MPICH where the
/// request is complete; `MPI_Request_free` does, and must not be called in `MPI_Finalize`. UCX moves long
/// messages of MPICH 4.0.2 by TCP where the kernel refuses CMA, as in containers. There each rank flushes in
/// `MPI_Finalize`, then waits in the launcher's barrier and answers no more. A rank that makes progress after
/// its peer has entered `MPI_Finalize` answers the peer's flush; the peer goes on to the barrier, and the
/// rank's own flush is never answered. Without the library 5 of 5 runs hang after such an `MPI_Iprobe`, 6 of
/// 6 after an `MPI_Test` or an `MPI_Request_free` of a complete request, none of 6 after an `MPI_Wait`.
pub fn drop_request(abi: &Abi, mut handle: OwnRequest) {
    handle.complete();
    handle.wait(abi.no_status());
}
