//! Completion of requests.

use std::ffi::{c_int, c_void};

use crate::engine::{engine, lifecycle, Engine};
use crate::mpi::{
    calls, native, several, Function, Out, Outs, Request, Slot, Slots, StatusOut, StatusRef,
    Statuses,
};

/// `MPI_Wait` (MPI 4.1 section 3.7.3).
pub fn wait(request: Slot<'_, Request>, status: StatusOut<'_>) -> c_int {
    match engine() {
        Some(engine) => engine.wait(request, status),
        None => native::wait(request, status),
    }
}

/// `MPI_Test` (MPI 4.1 section 3.7.3).
pub fn test(request: Slot<'_, Request>, flag: Out<'_, c_int>, status: StatusOut<'_>) -> c_int {
    match engine() {
        Some(engine) => engine.test(request, flag, status),
        None => native::test(request, flag, status),
    }
}

/// `MPI_Request_free` (MPI 4.1 section 3.7.3).
pub fn request_free(request: Slot<'_, Request>) -> c_int {
    match engine() {
        Some(engine) => engine.free(request),
        None => native::request_free(request),
    }
}

/// `MPI_Cancel` (MPI 4.1 section 3.8.4).
pub fn cancel(request: Slot<'_, Request>) -> c_int {
    match engine() {
        Some(engine) => engine.cancel(request),
        None => native::cancel(request),
    }
}

/// `MPI_Test_cancelled` (MPI 4.1 section 3.8.4): statuses are genuine, so MPI's own answer is right.
pub fn test_cancelled(status: StatusRef<'_>, flag: Out<'_, c_int>) -> c_int {
    native::test_cancelled(status, flag)
}

/// Declares calls on arrays of requests. `natively` is what is called where there is no engine.
macro_rules! completions {
    ($($(#[$doc:meta])* $name:ident($count:ident, $array:ident $(, $argument:ident: $type:ty)*) |$engine:ident, $requests:ident| $taken:expr;)*) => { calls! {$(
        $(#[$doc])*
        $name($count: c_int, $array: *mut c_void $(, $argument: $type)*) {
            match engine() {
                Some($engine) => {
                    let $requests = Slots::new($array, $count);
                    $taken
                }
                None => native::$name($count, $array $(, $argument)*),
            }
        }
    )*} };
}

completions! {
    /// `MPI_Waitall` (MPI 4.1 section 3.7.5).
    waitall(count, array, statuses: *mut c_void) |engine, requests|
        engine.all(requests, None, Statuses::new(statuses, count));
    /// `MPI_Testall` (MPI 4.1 section 3.7.5).
    testall(count, array, flag: Out<'_, c_int>, statuses: *mut c_void) |engine, requests|
        engine.all(requests, Some(flag), Statuses::new(statuses, count));
    /// `MPI_Waitany` (MPI 4.1 section 3.7.5).
    waitany(count, array, index: Out<'_, c_int>, status: StatusOut<'_>) |engine, requests|
        engine.any(requests, index, None, status);
    /// `MPI_Testany` (MPI 4.1 section 3.7.5).
    testany(count, array, index: Out<'_, c_int>, flag: Out<'_, c_int>, status: StatusOut<'_>) |engine, requests|
        engine.any(requests, index, Some(flag), status);
    /// `MPI_Waitsome` (MPI 4.1 section 3.7.5).
    waitsome(count, array, outcount: Out<'_, c_int>, indices: *mut c_int, statuses: *mut c_void) |engine, requests|
        engine.some(requests, outcount, Outs::new(indices, count), Statuses::new(statuses, count), true);
    /// `MPI_Testsome` (MPI 4.1 section 3.7.5).
    testsome(count, array, outcount: Out<'_, c_int>, indices: *mut c_int, statuses: *mut c_void) |engine, requests|
        engine.some(requests, outcount, Outs::new(indices, count), Statuses::new(statuses, count), false);
}

/// Calls a function about several requests, which a library may lack: then the engine asks about one by one.
fn about(
    function: Function,
    natively: impl FnOnce() -> c_int,
    taken: impl FnOnce(&Engine) -> c_int,
) -> c_int {
    let found = match engine() {
        Some(engine) => Ok(engine),
        None if function.available() => return natively(),
        None => lifecycle::engine_for_requests(),
    };
    match found {
        Ok(engine) => taken(engine),
        Err(code) => code,
    }
}

calls! {
    /// `MPI_Request_get_status` (MPI 4.1 section 3.7.6).
    request_get_status(request: Request, flag: Out<'_, c_int>, status: StatusOut<'_>) {
        let natively = || native::request_get_status(request, flag, status);
        match engine() {
            Some(engine) => engine.get_status(request, flag, status, natively),
            None => natively(),
        }
    }

    /// `MPI_Request_get_status_any` (MPI 4.1 section 3.7.6).
    request_get_status_any(count: c_int, array: *const c_void, index: Out<'_, c_int>, flag: Out<'_, c_int>, status: StatusOut<'_>) {
        let requests = Slots::new(array.cast_mut(), count);
        let natively = || several::request_get_status_any(requests, index, flag, status);
        about(Function::RequestGetStatusAny, natively, |engine| engine.get_status_any(requests, index, flag, status))
    }

    /// `MPI_Request_get_status_all` (MPI 4.1 section 3.7.6).
    request_get_status_all(count: c_int, array: *const c_void, flag: Out<'_, c_int>, statuses: *mut c_void) {
        let natively = || native::request_get_status_all(count, array, flag, statuses);
        let requests = Slots::new(array.cast_mut(), count);
        let statuses = Statuses::new(statuses, count);
        about(Function::RequestGetStatusAll, natively, |engine| engine.get_status_all(requests, flag, statuses))
    }

    /// `MPI_Request_get_status_some` (MPI 4.1 section 3.7.6).
    request_get_status_some(count: c_int, array: *const c_void, outcount: Out<'_, c_int>, indices: *mut c_int, statuses: *mut c_void) {
        let requests = Slots::new(array.cast_mut(), count);
        let (indices, statuses) = (Outs::new(indices, count), Statuses::new(statuses, count));
        let natively = || several::request_get_status_some(requests, outcount, indices, statuses);
        about(Function::RequestGetStatusSome, natively, |engine| engine.get_status_some(requests, outcount, indices, statuses))
    }
}
