//! Persistent requests.

use std::ffi::{c_int, c_void};

use crate::engine::{
    engine, native_recv_init, native_send_init, Mode, Plan, RecvArgs, RecvFields, SendArgs,
    SendFields, Watch,
};
use crate::mpi::{calls, native, several, Comm, Datatype, Request, Slot, Slots};

fn send_request(args: &SendArgs, request: Slot<'_, Request>) -> c_int {
    match engine().and_then(|engine| engine.send_init(args, request)) {
        Some(code) => code,
        None => native_send_init(args, request),
    }
}

fn receive_request(args: &RecvArgs, request: Slot<'_, Request>) -> c_int {
    let Some(engine) = engine() else {
        return native_recv_init(args, request);
    };
    let prepared = match engine.plan_receive(args, Watch::Lasting) {
        Ok(Plan::Native) => return native_recv_init(args, request),
        Ok(Plan::Watched(prepared)) => prepared.persistent(),
        Err(code) => return code,
    };
    match engine.post_receive(prepared, native_recv_init) {
        Ok(receive) => engine.hand_out_receive(receive, request),
        Err(code) => code,
    }
}

macro_rules! inits {
    (sends { $($mode:ident $name:ident $count:ty;)* } receives { $($receive:ident $of:ty;)* }) => { calls! {
        $(
            #[doc = concat!("`MPI_", stringify!($name), "` (MPI 4.1 section 3.9), name in snake case.")]
            $name(buf: *const c_void, count: $count, datatype: Datatype, dest: c_int, tag: c_int, comm: Comm, request: Slot<'_, Request>) {
                let fields = SendFields { mode: Mode::$mode, buffer: buf, count: count.into(), datatype, dest, tag, comm };
                send_request(&SendArgs::new(fields), request)
            }
        )*
        $(
            #[doc = concat!("`MPI_", stringify!($receive), "` (MPI 4.1 section 3.9), name in snake case.")]
            $receive(buf: *mut c_void, count: $of, datatype: Datatype, source: c_int, tag: c_int, comm: Comm, request: Slot<'_, Request>) {
                let fields = RecvFields { buffer: buf, count: count.into(), datatype, source, tag, comm };
                receive_request(&RecvArgs::new(fields), request)
            }
        )*
    } };
}

inits! {
    sends {
        Standard send_init c_int;
        Standard send_init_c i64;
        Buffered bsend_init c_int;
        Buffered bsend_init_c i64;
        Synchronous ssend_init c_int;
        Synchronous ssend_init_c i64;
        Ready rsend_init c_int;
        Ready rsend_init_c i64;
    }
    receives {
        recv_init c_int;
        recv_init_c i64;
    }
}

/// `MPI_Start` (MPI 4.1 section 3.9).
pub fn start(request: Slot<'_, Request>) -> c_int {
    match engine() {
        Some(engine) => engine.start(request),
        None => native::start(request),
    }
}

calls! {
    /// `MPI_Startall` (MPI 4.1 section 3.9).
    startall(count: c_int, array_of_requests: *mut c_void) {
        let requests = Slots::new(array_of_requests, count);
        match engine() {
            Some(engine) => engine.start_all(requests),
            None => several::startall(requests),
        }
    }
}
