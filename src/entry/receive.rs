//! Receives.

use std::ffi::{c_int, c_void};

use crate::engine::{
    engine, native_imrecv, native_irecv, native_mrecv, native_recv, Engine, NativeScope, Plan,
    Prepared, RecvArgs, Watch,
};
use crate::mpi::{Handle, Status};

/// A native blocking receive that nobody watches: only its length is looked at.
#[inline(always)]
pub(super) unsafe fn unwatched(
    engine: &Engine,
    comm: Handle,
    status: *mut c_void,
    _scope: NativeScope,
    natively: impl FnOnce(*mut c_void) -> c_int,
) -> c_int {
    let mut own = Status::new();
    let status = if engine.env.abi.ignores_status(status) {
        own.as_mut_ptr()
    } else {
        status
    };
    let code = natively(status);
    // SAFETY: filled by the receive.
    unsafe { engine.count_received(comm, status, code) };
    code
}

/// `args` makes the arguments where they are used: a call on host memory does not store them.
#[inline(always)]
unsafe fn blocking(
    args: impl Fn() -> RecvArgs,
    status: *mut c_void,
    natively: impl Fn(*mut c_void) -> c_int,
) -> c_int {
    let Some(engine) = engine() else {
        return natively(status);
    };
    // SAFETY: the program's arguments.
    unsafe {
        if let Some(scope) = engine.early() {
            if engine.is_host_receive(&args()) {
                return unwatched(engine, args().comm, status, scope, natively);
            }
        }
        let args = args();
        match engine.plan_receive(&args, Watch::IfLive) {
            Ok(Plan::Native) => {
                unwatched(engine, args.comm, status, NativeScope::enter(), natively)
            }
            Ok(Plan::Watched(prepared)) => match engine.post_irecv(&args, prepared) {
                Ok(receive) => engine.await_receive(receive, status),
                Err(code) => code,
            },
            Err(code) => code,
        }
    }
}

/// As [`blocking`].
#[inline(always)]
unsafe fn immediate(
    args: impl Fn() -> RecvArgs,
    request: *mut Handle,
    natively: impl Fn() -> c_int,
) -> c_int {
    let Some(engine) = engine() else {
        return natively();
    };
    // SAFETY: the program's arguments.
    unsafe {
        if let Some(code) = engine.irecv_early(&args(), request, &natively) {
            return code;
        }
        let args = args();
        match engine.plan_receive(&args, Watch::Always) {
            Ok(Plan::Native) => natively(),
            Ok(Plan::Watched(prepared)) => engine.irecv(&args, prepared, request),
            Err(code) => code,
        }
    }
}

macro_rules! receives {
    ($($recv:ident $irecv:ident $mrecv:ident $imrecv:ident $count:ty;)*) => {$(
        /// `MPI_Recv` (MPI 4.1 section 3.2.4).
        ///
        /// # Safety
        /// The arguments are those of the program's call.
        #[allow(clippy::too_many_arguments, reason = "the parameters of MPI's own call")]
        pub unsafe fn $recv(buf: *mut c_void, count: $count, datatype: Handle, source: c_int, tag: c_int, comm: Handle, status: *mut c_void) -> c_int {
            #[allow(clippy::useless_conversion)]
            let args = || RecvArgs { buffer: buf, count: count.into(), datatype, source, tag, comm };
            // SAFETY: passed on.
            unsafe { blocking(args, status, |status| native_recv(&args(), status)) }
        }

        /// `MPI_Irecv` (MPI 4.1 section 3.7.2).
        ///
        /// # Safety
        /// The arguments are those of the program's call.
        #[allow(clippy::too_many_arguments, reason = "the parameters of MPI's own call")]
        pub unsafe fn $irecv(buf: *mut c_void, count: $count, datatype: Handle, source: c_int, tag: c_int, comm: Handle, request: *mut Handle) -> c_int {
            #[allow(clippy::useless_conversion)]
            let args = || RecvArgs { buffer: buf, count: count.into(), datatype, source, tag, comm };
            // SAFETY: passed on.
            unsafe { immediate(args, request, || native_irecv(&args(), request)) }
        }

        /// `MPI_Mrecv` (MPI 4.1 section 3.8.3).
        ///
        /// # Safety
        /// The arguments are those of the program's call.
        pub unsafe fn $mrecv(buf: *mut c_void, count: $count, datatype: Handle, message: *mut Handle, status: *mut c_void) -> c_int {
            #[allow(clippy::useless_conversion)]
            let count = count.into();
            // SAFETY: passed on.
            unsafe {
                match plan_matched(buf, count, datatype, message) {
                    Matched::Native => native_mrecv(buf, count, datatype, message, status),
                    Matched::Watched(engine, prepared) => match post_matched(engine, message, prepared) {
                        Ok(receive) => engine.await_receive(receive, status),
                        Err(code) => code,
                    },
                    Matched::Failed(code) => code,
                }
            }
        }

        /// `MPI_Imrecv` (MPI 4.1 section 3.8.3).
        ///
        /// # Safety
        /// The arguments are those of the program's call.
        pub unsafe fn $imrecv(buf: *mut c_void, count: $count, datatype: Handle, message: *mut Handle, request: *mut Handle) -> c_int {
            #[allow(clippy::useless_conversion)]
            let count = count.into();
            // SAFETY: passed on.
            unsafe {
                match plan_matched(buf, count, datatype, message) {
                    Matched::Native => native_imrecv(buf, count, datatype, message, request),
                    Matched::Watched(engine, prepared) => match post_matched(engine, message, prepared) {
                        Ok(receive) => engine.hand_out_receive(receive, request),
                        Err(code) => code,
                    },
                    Matched::Failed(code) => code,
                }
            }
        }
    )*};
}

receives! {
    recv irecv mrecv imrecv c_int;
    recv_c irecv_c mrecv_c imrecv_c i64;
}

enum Matched {
    Native,
    Watched(&'static Engine, Box<Prepared>),
    Failed(c_int),
}

/// Plans the receive of a message that a matched probe has taken.
unsafe fn plan_matched(
    buffer: *mut c_void,
    count: i64,
    datatype: Handle,
    message: *mut Handle,
) -> Matched {
    let Some(engine) = engine() else {
        return Matched::Native;
    };
    let abi = engine.env.abi;
    // SAFETY: the program's message.
    let handle = unsafe { abi.read(message) };
    if handle == abi.normalize(abi.message_no_proc) {
        return Matched::Native;
    }
    let noted = engine.take_matched(handle);
    // A message says not on which communicator it came: errors go to MPI_COMM_WORLD's handler.
    let args = RecvArgs {
        buffer,
        count,
        datatype,
        source: abi.any_source,
        tag: abi.any_tag,
        comm: abi.comm_world,
    };
    // SAFETY: the program's arguments.
    match unsafe { engine.plan_receive(&args, Watch::Always) } {
        Ok(Plan::Native) => Matched::Native,
        Ok(Plan::Watched(prepared)) => Matched::Watched(engine, prepared.matched(noted)),
        Err(code) => Matched::Failed(code),
    }
}

unsafe fn post_matched(
    engine: &Engine,
    message: *mut Handle,
    prepared: Box<Prepared>,
) -> Result<usize, c_int> {
    // SAFETY: the program's message; a landing range or its buffer.
    unsafe {
        engine.post_receive(prepared, |to, request| {
            native_imrecv(to.buffer, to.count, to.datatype, message, request)
        })
    }
}
