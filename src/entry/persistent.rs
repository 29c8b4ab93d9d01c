//! Persistent requests.

use std::ffi::{c_int, c_void};

use crate::engine::{
    engine, native_recv_init, native_send_init, Mode, Plan, RecvArgs, SendArgs, Watch,
};
use crate::mpi::{native, Handle};

unsafe fn send_request(args: SendArgs, request: *mut Handle) -> c_int {
    // SAFETY: the program's arguments.
    unsafe {
        match engine().and_then(|engine| engine.send_init(&args, request)) {
            Some(code) => code,
            None => native_send_init(&args, request),
        }
    }
}

macro_rules! send_inits {
    ($($mode:ident $name:ident $count:ty;)*) => {$(
        #[doc = concat!("`MPI_", stringify!($name), "` (MPI 4.1 section 3.9), name in snake case.\n\n# Safety\nThe arguments are those of the program's call.")]
        #[allow(clippy::too_many_arguments, reason = "the parameters of MPI's own call")]
        pub unsafe fn $name(buf: *const c_void, count: $count, datatype: Handle, dest: c_int, tag: c_int, comm: Handle, request: *mut Handle) -> c_int {
            #[allow(clippy::useless_conversion)]
            let args = SendArgs { mode: Mode::$mode, buffer: buf, count: count.into(), datatype, dest, tag, comm };
            // SAFETY: passed on.
            unsafe { send_request(args, request) }
        }
    )*};
}

send_inits! {
    Standard send_init c_int;
    Standard send_init_c i64;
    Buffered bsend_init c_int;
    Buffered bsend_init_c i64;
    Synchronous ssend_init c_int;
    Synchronous ssend_init_c i64;
    Ready rsend_init c_int;
    Ready rsend_init_c i64;
}

unsafe fn receive_request(
    args: RecvArgs,
    request: *mut Handle,
    natively: impl FnOnce() -> c_int,
) -> c_int {
    let Some(engine) = engine() else {
        return natively();
    };
    // SAFETY: the program's arguments.
    unsafe {
        let prepared = match engine.plan_receive(&args, Watch::Lasting) {
            Ok(Plan::Native) => return natively(),
            Ok(Plan::Watched(prepared)) => prepared.persistent(),
            Err(code) => return code,
        };
        let posted = engine.post_receive(prepared, |to, request| {
            native_recv_init(&to.args(&args), request)
        });
        match posted {
            Ok(receive) => engine.hand_out_receive(receive, request),
            Err(code) => code,
        }
    }
}

/// `MPI_Recv_init` (MPI 4.1 section 3.9).
///
/// # Safety
/// The arguments are those of the program's call, here and below.
#[allow(
    clippy::too_many_arguments,
    reason = "the parameters of MPI's own call"
)]
pub unsafe fn recv_init(
    buf: *mut c_void,
    count: c_int,
    datatype: Handle,
    source: c_int,
    tag: c_int,
    comm: Handle,
    request: *mut Handle,
) -> c_int {
    let args = RecvArgs {
        buffer: buf,
        count: count.into(),
        datatype,
        source,
        tag,
        comm,
    };
    // SAFETY: passed on.
    unsafe {
        receive_request(args, request, || {
            native::recv_init(buf, count, datatype, source, tag, comm, request)
        })
    }
}

/// `MPI_Recv_init_c`.
///
/// # Safety
/// As [`recv_init`].
#[allow(
    clippy::too_many_arguments,
    reason = "the parameters of MPI's own call"
)]
pub unsafe fn recv_init_c(
    buf: *mut c_void,
    count: i64,
    datatype: Handle,
    source: c_int,
    tag: c_int,
    comm: Handle,
    request: *mut Handle,
) -> c_int {
    let args = RecvArgs {
        buffer: buf,
        count,
        datatype,
        source,
        tag,
        comm,
    };
    // SAFETY: passed on.
    unsafe {
        receive_request(args, request, || {
            native::recv_init_c(buf, count, datatype, source, tag, comm, request)
        })
    }
}

/// `MPI_Start`.
///
/// # Safety
/// As [`recv_init`].
pub unsafe fn start(request: *mut Handle) -> c_int {
    // SAFETY: passed on.
    unsafe {
        match engine() {
            Some(engine) => engine.start(request),
            None => native::start(request),
        }
    }
}

/// `MPI_Startall`.
///
/// # Safety
/// As [`recv_init`].
pub unsafe fn startall(count: c_int, array_of_requests: *mut c_void) -> c_int {
    // SAFETY: passed on.
    unsafe {
        match engine() {
            Some(engine) => engine.start_all(count, array_of_requests),
            None => native::startall(count, array_of_requests),
        }
    }
}
