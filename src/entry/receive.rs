//! Receives.

use std::ffi::{c_int, c_void};

use crate::engine::{
    engine, native_imrecv, native_irecv, native_mrecv, native_recv, Engine, NativeScope, Plan,
    RecvArgs, RecvFields, Watch,
};
use crate::mpi::{abi, calls, Abi, Comm, Datatype, Message, Request, Slot, Status, StatusOut};

/// A native blocking receive that nobody watches: only its length is looked at.
#[inline(always)]
pub(super) fn unwatched(
    engine: &Engine,
    comm: Comm,
    status: StatusOut<'_>,
    _scope: NativeScope,
    natively: impl FnOnce(StatusOut<'_>) -> c_int,
) -> c_int {
    let mut own = Status::new();
    let status = status.or(engine.env.abi, &mut own);
    let code = natively(status.out());
    engine.count_received(comm, status.seen(), code);
    code
}

/// `args` makes the arguments where they are used: a call on host memory does not store them.
#[inline(always)]
fn blocking(
    args: impl Fn() -> RecvArgs,
    status: StatusOut<'_>,
    natively: impl Fn(StatusOut<'_>) -> c_int,
) -> c_int {
    let Some(engine) = engine() else {
        return natively(status);
    };
    if let Some(scope) = engine.early() {
        if engine.is_host_receive(&args()) {
            return unwatched(engine, args().comm, status, scope, natively);
        }
    }
    let args = args();
    match engine.plan_receive(&args, Watch::IfLive) {
        Ok(Plan::Native) => unwatched(engine, args.comm, status, NativeScope::enter(), natively),
        Ok(Plan::Watched(prepared)) => match engine.post_irecv(prepared) {
            Ok(receive) => engine.await_receive(receive, status),
            Err(code) => code,
        },
        Err(code) => code,
    }
}

/// As [`blocking`].
#[inline(always)]
fn immediate(
    args: impl Fn() -> RecvArgs,
    request: Slot<'_, Request>,
    natively: impl Fn() -> c_int,
) -> c_int {
    let Some(engine) = engine() else {
        return natively();
    };
    if let Some(code) = engine.irecv_early(&args(), request, &natively) {
        return code;
    }
    match engine.plan_receive(&args(), Watch::Always) {
        Ok(Plan::Native) => natively(),
        Ok(Plan::Watched(prepared)) => engine.irecv(prepared, request),
        Err(code) => code,
    }
}

macro_rules! receives {
    ($($recv:ident $irecv:ident $mrecv:ident $imrecv:ident $count:ty;)*) => { calls! {$(
        /// `MPI_Recv` (MPI 4.1 section 3.2.4).
        $recv(buf: *mut c_void, count: $count, datatype: Datatype, source: c_int, tag: c_int, comm: Comm, status: StatusOut<'_>) {
            let args = || RecvArgs::new(RecvFields { buffer: buf, count: count.into(), datatype, source, tag, comm });
            blocking(args, status, |status| native_recv(&args(), status))
        }

        /// `MPI_Irecv` (MPI 4.1 section 3.7.2).
        $irecv(buf: *mut c_void, count: $count, datatype: Datatype, source: c_int, tag: c_int, comm: Comm, request: Slot<'_, Request>) {
            let args = || RecvArgs::new(RecvFields { buffer: buf, count: count.into(), datatype, source, tag, comm });
            immediate(args, request, || native_irecv(&args(), request))
        }

        /// `MPI_Mrecv` (MPI 4.1 section 3.8.3).
        $mrecv(buf: *mut c_void, count: $count, datatype: Datatype, message: Slot<'_, Message>, status: StatusOut<'_>) {
            let args = RecvArgs::new(of_message(buf, count.into(), datatype));
            received(&args, message, |args| native_mrecv(args, message, status), |engine, receive| engine.await_receive(receive, status))
        }

        /// `MPI_Imrecv` (MPI 4.1 section 3.8.3).
        $imrecv(buf: *mut c_void, count: $count, datatype: Datatype, message: Slot<'_, Message>, request: Slot<'_, Request>) {
            let args = RecvArgs::new(of_message(buf, count.into(), datatype));
            received(&args, message, |args| native_imrecv(args, message, request), |engine, receive| engine.hand_out_receive(receive, request))
        }
    )*} };
}

receives! {
    recv irecv mrecv imrecv c_int;
    recv_c irecv_c mrecv_c imrecv_c i64;
}

/// The arguments of a receive of a message that a matched probe has taken. The message says not on which communicator it
/// came: errors go to MPI_COMM_WORLD's handler.
fn of_message(buffer: *mut c_void, count: i64, datatype: Datatype) -> RecvFields {
    // Without an ABI there is no engine, and they are passed on as they are.
    let abi = abi().unwrap_or(Abi::any());
    RecvFields {
        buffer,
        count,
        datatype,
        source: abi.any_source,
        tag: abi.any_tag,
        comm: abi.comm_world,
    }
}

/// Makes such a receive, and ends the call by `end`.
fn received(
    args: &RecvArgs,
    message: Slot<'_, Message>,
    natively: impl FnOnce(&RecvArgs) -> c_int,
    end: impl FnOnce(&Engine, usize) -> c_int,
) -> c_int {
    let Some(engine) = engine() else {
        return natively(args);
    };
    let abi = engine.env.abi;
    let handle = message.read(abi);
    if handle == abi.normalize(abi.message_no_proc) {
        return natively(args);
    }
    let noted = engine.take_matched(handle);
    let prepared = match engine.plan_receive(args, Watch::Always) {
        Ok(Plan::Native) => return natively(args),
        Ok(Plan::Watched(prepared)) => prepared.matched(noted),
        Err(code) => return code,
    };
    let post = |to: &RecvArgs, request: Slot<'_, Request>| native_imrecv(to, message, request);
    match engine.post_receive(prepared, post) {
        Ok(receive) => end(engine, receive),
        Err(code) => code,
    }
}
