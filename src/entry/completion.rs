//! Completion of requests.

use std::ffi::{c_int, c_void};

use crate::engine::completion::{Requests, Statuses};
use crate::engine::{engine, lifecycle};
use crate::mpi::{native, Function, Handle};

macro_rules! completions {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) |$engine:ident| $taken:expr;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// The arguments are those of the program's call.
        pub unsafe fn $name($($argument: $type),*) -> c_int {
            // SAFETY: passed on.
            unsafe {
                match engine() {
                    Some($engine) => $taken,
                    None => native::$name($($argument),*),
                }
            }
        }
    )*};
}

completions! {
    /// `MPI_Wait` (MPI 4.1 section 3.7.3).
    wait(request: *mut Handle, status: *mut c_void) |engine| engine.wait(request, status);
    /// `MPI_Test` (MPI 4.1 section 3.7.3).
    test(request: *mut Handle, flag: *mut c_int, status: *mut c_void) |engine| engine.test(request, flag, status);
    /// `MPI_Waitall` (MPI 4.1 section 3.7.5).
    waitall(count: c_int, array_of_requests: *mut c_void, array_of_statuses: *mut c_void)
        |engine| engine.all(Requests::new(array_of_requests, count), None, Statuses(array_of_statuses));
    /// `MPI_Testall` (MPI 4.1 section 3.7.5).
    testall(count: c_int, array_of_requests: *mut c_void, flag: *mut c_int, array_of_statuses: *mut c_void)
        |engine| engine.all(Requests::new(array_of_requests, count), Some(flag), Statuses(array_of_statuses));
    /// `MPI_Waitany` (MPI 4.1 section 3.7.5).
    waitany(count: c_int, array_of_requests: *mut c_void, indx: *mut c_int, status: *mut c_void)
        |engine| engine.any(Requests::new(array_of_requests, count), indx, None, status);
    /// `MPI_Testany` (MPI 4.1 section 3.7.5).
    testany(count: c_int, array_of_requests: *mut c_void, indx: *mut c_int, flag: *mut c_int, status: *mut c_void)
        |engine| engine.any(Requests::new(array_of_requests, count), indx, Some(flag), status);
    /// `MPI_Waitsome` (MPI 4.1 section 3.7.5).
    waitsome(incount: c_int, array_of_requests: *mut c_void, outcount: *mut c_int, array_of_indices: *mut c_int, array_of_statuses: *mut c_void)
        |engine| engine.some(Requests::new(array_of_requests, incount), outcount, array_of_indices, Statuses(array_of_statuses), true);
    /// `MPI_Testsome` (MPI 4.1 section 3.7.5).
    testsome(incount: c_int, array_of_requests: *mut c_void, outcount: *mut c_int, array_of_indices: *mut c_int, array_of_statuses: *mut c_void)
        |engine| engine.some(Requests::new(array_of_requests, incount), outcount, array_of_indices, Statuses(array_of_statuses), false);
    /// `MPI_Request_free` (MPI 4.1 section 3.7.3).
    request_free(request: *mut Handle) |engine| engine.free(request);
    /// `MPI_Cancel` (MPI 4.1 section 3.8.4).
    cancel(request: *mut Handle) |engine| engine.cancel(request);
    /// `MPI_Request_get_status` (MPI 4.1 section 3.7.6).
    request_get_status(request: Handle, flag: *mut c_int, status: *mut c_void) |engine| engine.get_status(request, flag, status);
    /// `MPI_Test_cancelled` (MPI 4.1 section 3.8.4): statuses are genuine, so MPI's own answer is right.
    test_cancelled(status: *const c_void, flag: *mut c_int) |_engine| native::test_cancelled(status, flag);
}

/// The functions about several requests, which a library may lack: then the engine asks about one by one.
macro_rules! several {
    ($($(#[$doc:meta])* $function:ident $name:ident($($argument:ident: $type:ty),*) |$engine:ident| $taken:expr;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// The arguments are those of the program's call.
        pub unsafe fn $name($($argument: $type),*) -> c_int {
            let found = match engine() {
                Some(engine) => Ok(engine),
                // SAFETY: passed on.
                None if Function::$function.available() => return unsafe { native::$name($($argument),*) },
                None => lifecycle::engine_for_requests(),
            };
            match found {
                // SAFETY: passed on.
                Ok($engine) => unsafe { $taken },
                Err(code) => code,
            }
        }
    )*};
}

several! {
    /// `MPI_Request_get_status_any` (MPI 4.1 section 3.7.6).
    RequestGetStatusAny request_get_status_any(count: c_int, array_of_requests: *const c_void, indx: *mut c_int, flag: *mut c_int, status: *mut c_void)
        |engine| engine.get_status_any(Requests::new(array_of_requests.cast_mut(), count), indx, flag, status);
    /// `MPI_Request_get_status_all` (MPI 4.1 section 3.7.6).
    RequestGetStatusAll request_get_status_all(count: c_int, array_of_requests: *const c_void, flag: *mut c_int, array_of_statuses: *mut c_void)
        |engine| engine.get_status_all(Requests::new(array_of_requests.cast_mut(), count), flag, Statuses(array_of_statuses));
    /// `MPI_Request_get_status_some` (MPI 4.1 section 3.7.6).
    RequestGetStatusSome request_get_status_some(incount: c_int, array_of_requests: *const c_void, outcount: *mut c_int, array_of_indices: *mut c_int, array_of_statuses: *mut c_void)
        |engine| engine.get_status_some(Requests::new(array_of_requests.cast_mut(), incount), outcount, array_of_indices, Statuses(array_of_statuses));
}
