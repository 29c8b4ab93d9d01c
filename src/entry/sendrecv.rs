//! Sends and receives in one call.

use std::ffi::{c_int, c_void};

use super::receive::unwatched;
use crate::engine::sendrecv::PairWay;
use crate::engine::{
    engine, lifecycle, Engine, Mode, NativeScope, RecvArgs, RecvFields, SendArgs, SendFields,
};
use crate::mpi::{calls, native, Comm, Datatype, Function, Request, Slot, StatusOut};

macro_rules! pairs {
    ($($sendrecv:ident $isendrecv:ident $replace:ident $ireplace:ident $count:ty;)*) => { calls! {$(
        /// `MPI_Sendrecv` (MPI 4.1 section 3.10).
        $sendrecv(
            sendbuf: *const c_void, sendcount: $count, sendtype: Datatype, dest: c_int, sendtag: c_int,
            recvbuf: *mut c_void, recvcount: $count, recvtype: Datatype, source: c_int, recvtag: c_int,
            comm: Comm, status: StatusOut<'_>,
        ) {
            let natively = |status: StatusOut<'_>| native::$sendrecv(sendbuf, sendcount, sendtype, dest, sendtag, recvbuf, recvcount, recvtype, source, recvtag, comm, status);
            // Made where they are used: a call on host memory does not store them.
            let send = || SendArgs::new(SendFields { mode: Mode::Standard, buffer: sendbuf, count: sendcount.into(), datatype: sendtype, dest, tag: sendtag, comm });
            let receive = || RecvArgs::new(RecvFields { buffer: recvbuf, count: recvcount.into(), datatype: recvtype, source, tag: recvtag, comm });
            exchange(send, receive, false, status, natively)
        }

        /// `MPI_Isendrecv` (MPI 4.1 section 3.10).
        $isendrecv(
            sendbuf: *const c_void, sendcount: $count, sendtype: Datatype, dest: c_int, sendtag: c_int,
            recvbuf: *mut c_void, recvcount: $count, recvtype: Datatype, source: c_int, recvtag: c_int,
            comm: Comm, request: Slot<'_, Request>,
        ) {
            let natively = || native::$isendrecv(sendbuf, sendcount, sendtype, dest, sendtag, recvbuf, recvcount, recvtype, source, recvtag, comm, request);
            let send = SendArgs::new(SendFields { mode: Mode::Standard, buffer: sendbuf, count: sendcount.into(), datatype: sendtype, dest, tag: sendtag, comm });
            let receive = RecvArgs::new(RecvFields { buffer: recvbuf, count: recvcount.into(), datatype: recvtype, source, tag: recvtag, comm });
            start(Function::Isendrecv, (&send, &receive), request, natively)
        }

        /// `MPI_Sendrecv_replace` (MPI 4.1 section 3.10).
        $replace(
            buf: *mut c_void, count: $count, datatype: Datatype, dest: c_int, sendtag: c_int, source: c_int,
            recvtag: c_int, comm: Comm, status: StatusOut<'_>,
        ) {
            let natively = |status: StatusOut<'_>| native::$replace(buf, count, datatype, dest, sendtag, source, recvtag, comm, status);
            let send = SendArgs::new(SendFields { mode: Mode::Standard, buffer: buf, count: count.into(), datatype, dest, tag: sendtag, comm });
            let receive = RecvArgs::new(RecvFields { buffer: buf, count: count.into(), datatype, source, tag: recvtag, comm });
            exchange(|| send, || receive, true, status, natively)
        }

        /// `MPI_Isendrecv_replace` (MPI 4.1 section 3.10).
        $ireplace(
            buf: *mut c_void, count: $count, datatype: Datatype, dest: c_int, sendtag: c_int, source: c_int,
            recvtag: c_int, comm: Comm, request: Slot<'_, Request>,
        ) {
            let natively = || native::$ireplace(buf, count, datatype, dest, sendtag, source, recvtag, comm, request);
            let send = SendArgs::new(SendFields { mode: Mode::Standard, buffer: buf, count: count.into(), datatype, dest, tag: sendtag, comm });
            let receive = RecvArgs::new(RecvFields { buffer: buf, count: count.into(), datatype, source, tag: recvtag, comm });
            start(Function::IsendrecvReplace, (&send, &receive), request, natively)
        }
    )*} };
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

/// Starts a pair under one request. `function` also says whether the buffers are one.
fn start(
    function: Function,
    (send, receive): (&SendArgs, &RecvArgs),
    request: Slot<'_, Request>,
    natively: impl FnOnce() -> c_int,
) -> c_int {
    let (engine, way) = match for_request(function) {
        Ok(Some(found)) => found,
        Ok(None) => return natively(),
        Err(code) => return code,
    };
    let replaces = function == Function::IsendrecvReplace;
    match engine.start_pair(send, receive, way, replaces) {
        Ok(Some(pair)) => engine.hand_out_pair(pair, request),
        Ok(None) => natively(),
        Err(code) => code,
    }
}

/// A pair that the call waits for; `replaces`: the buffers are one.
#[inline(always)]
fn exchange(
    send: impl Fn() -> SendArgs,
    receive: impl Fn() -> RecvArgs,
    replaces: bool,
    status: StatusOut<'_>,
    natively: impl Fn(StatusOut<'_>) -> c_int,
) -> c_int {
    let Some(engine) = engine() else {
        return natively(status);
    };
    if let Some(scope) = engine.early() {
        if engine.is_host_pair(&send(), &receive()) {
            return unwatched(engine, receive().comm, status, scope, natively);
        }
    }
    let (send, receive) = (send(), receive());
    match engine.start_pair(&send, &receive, PairWay::Waits, replaces) {
        Ok(None) => unwatched(engine, receive.comm, status, NativeScope::enter(), natively),
        Ok(Some(pair)) => engine.await_pair(pair, status),
        Err(code) => code,
    }
}
