//! Sends and receives in one call.

use std::ffi::{c_int, c_void};

use super::receive::unwatched;
use crate::engine::sendrecv::{Pair, PairWay};
use crate::engine::{engine, lifecycle, Engine, Mode, NativeScope, RecvArgs, SendArgs};
use crate::mpi::{native, Function, Handle};

macro_rules! pairs {
    ($($sendrecv:ident $isendrecv:ident $replace:ident $ireplace:ident $count:ty;)*) => {$(
        /// `MPI_Sendrecv` (MPI 4.1 section 3.10).
        ///
        /// # Safety
        /// The arguments are those of the program's call.
        #[allow(clippy::too_many_arguments, clippy::useless_conversion, reason = "the parameters of MPI's own call")]
        pub unsafe fn $sendrecv(
            sendbuf: *const c_void, sendcount: $count, sendtype: Handle, dest: c_int, sendtag: c_int,
            recvbuf: *mut c_void, recvcount: $count, recvtype: Handle, source: c_int, recvtag: c_int,
            comm: Handle, status: *mut c_void,
        ) -> c_int {
            let natively = |status| {
                // SAFETY: passed on.
                unsafe {
                    native::$sendrecv(sendbuf, sendcount, sendtype, dest, sendtag, recvbuf, recvcount, recvtype, source, recvtag, comm, status)
                }
            };
            let Some(engine) = engine() else { return natively(status) };
            // Made where they are used: a call on host memory does not store them.
            let send = || SendArgs { mode: Mode::Standard, buffer: sendbuf, count: sendcount.into(), datatype: sendtype, dest, tag: sendtag, comm };
            let receive = || RecvArgs { buffer: recvbuf, count: recvcount.into(), datatype: recvtype, source, tag: recvtag, comm };
            // SAFETY: passed on.
            unsafe {
                if let Some(scope) = engine.early() {
                    if engine.is_host_pair(&send(), &receive()) {
                        return unwatched(engine, comm, status, scope, natively);
                    }
                }
                match engine.start_pair(&send(), &receive(), PairWay::Waits, false) {
                    Ok(None) => unwatched(engine, comm, status, NativeScope::enter(), natively),
                    Ok(Some(pair)) => engine.await_pair(pair, status),
                    Err(code) => code,
                }
            }
        }

        /// `MPI_Isendrecv` (MPI 4.1 section 3.10).
        ///
        /// # Safety
        /// The arguments are those of the program's call.
        #[allow(clippy::too_many_arguments, clippy::useless_conversion, reason = "the parameters of MPI's own call")]
        pub unsafe fn $isendrecv(
            sendbuf: *const c_void, sendcount: $count, sendtype: Handle, dest: c_int, sendtag: c_int,
            recvbuf: *mut c_void, recvcount: $count, recvtype: Handle, source: c_int, recvtag: c_int,
            comm: Handle, request: *mut Handle,
        ) -> c_int {
            let natively = || {
                // SAFETY: passed on.
                unsafe {
                    native::$isendrecv(sendbuf, sendcount, sendtype, dest, sendtag, recvbuf, recvcount, recvtype, source, recvtag, comm, request)
                }
            };
            let (engine, way) = match for_request(Function::Isendrecv) {
                Ok(Some(found)) => found,
                Ok(None) => return natively(),
                Err(code) => return code,
            };
            let send = SendArgs { mode: Mode::Standard, buffer: sendbuf, count: sendcount.into(), datatype: sendtype, dest, tag: sendtag, comm };
            let receive = RecvArgs { buffer: recvbuf, count: recvcount.into(), datatype: recvtype, source, tag: recvtag, comm };
            // SAFETY: passed on.
            unsafe { started(engine.start_pair(&send, &receive, way, false), request, natively) }
        }

        /// `MPI_Sendrecv_replace` (MPI 4.1 section 3.10).
        ///
        /// # Safety
        /// The arguments are those of the program's call.
        #[allow(clippy::too_many_arguments, clippy::useless_conversion, reason = "the parameters of MPI's own call")]
        pub unsafe fn $replace(
            buf: *mut c_void, count: $count, datatype: Handle, dest: c_int, sendtag: c_int, source: c_int,
            recvtag: c_int, comm: Handle, status: *mut c_void,
        ) -> c_int {
            let natively = |status| {
                // SAFETY: passed on.
                unsafe { native::$replace(buf, count, datatype, dest, sendtag, source, recvtag, comm, status) }
            };
            let Some(engine) = engine() else { return natively(status) };
            let send = SendArgs { mode: Mode::Standard, buffer: buf, count: count.into(), datatype, dest, tag: sendtag, comm };
            let receive = RecvArgs { buffer: buf, count: count.into(), datatype, source, tag: recvtag, comm };
            // SAFETY: passed on.
            unsafe {
                if let Some(scope) = engine.early() {
                    if engine.is_host_send(&send) && engine.is_host_receive(&receive) {
                        return unwatched(engine, comm, status, scope, natively);
                    }
                }
                match engine.start_pair(&send, &receive, PairWay::Waits, true) {
                    Ok(None) => unwatched(engine, comm, status, NativeScope::enter(), natively),
                    Ok(Some(pair)) => engine.await_pair(pair, status),
                    Err(code) => code,
                }
            }
        }

        /// `MPI_Isendrecv_replace` (MPI 4.1 section 3.10).
        ///
        /// # Safety
        /// The arguments are those of the program's call.
        #[allow(clippy::too_many_arguments, clippy::useless_conversion, reason = "the parameters of MPI's own call")]
        pub unsafe fn $ireplace(
            buf: *mut c_void, count: $count, datatype: Handle, dest: c_int, sendtag: c_int, source: c_int,
            recvtag: c_int, comm: Handle, request: *mut Handle,
        ) -> c_int {
            let natively = || {
                // SAFETY: passed on.
                unsafe { native::$ireplace(buf, count, datatype, dest, sendtag, source, recvtag, comm, request) }
            };
            let (engine, way) = match for_request(Function::IsendrecvReplace) {
                Ok(Some(found)) => found,
                Ok(None) => return natively(),
                Err(code) => return code,
            };
            let send = SendArgs { mode: Mode::Standard, buffer: buf, count: count.into(), datatype, dest, tag: sendtag, comm };
            let receive = RecvArgs { buffer: buf, count: count.into(), datatype, source, tag: recvtag, comm };
            // SAFETY: passed on.
            unsafe { started(engine.start_pair(&send, &receive, way, true), request, natively) }
        }
    )*};
}

pairs! {
    sendrecv isendrecv sendrecv_replace isendrecv_replace c_int;
    sendrecv_c isendrecv_c sendrecv_replace_c isendrecv_replace_c i64;
}

/// The engine for a pair under one request, and who makes it if no message of it is the engine's. `None`: the MPI library
/// alone.
fn for_request(function: Function) -> Result<Option<(&'static Engine, PairWay)>, c_int> {
    if function.available() {
        return Ok(engine().map(|engine| (engine, PairWay::Request)));
    }
    lifecycle::engine_for_requests().map(|engine| Some((engine, PairWay::OwnRequest)))
}

unsafe fn started(
    pair: Result<Option<Pair>, c_int>,
    request: *mut Handle,
    natively: impl FnOnce() -> c_int,
) -> c_int {
    match (pair, engine()) {
        // SAFETY: the program's request.
        (Ok(Some(pair)), Some(engine)) => unsafe { engine.hand_out_pair(pair, request) },
        (Ok(_), _) => natively(),
        (Err(code), _) => code,
    }
}
