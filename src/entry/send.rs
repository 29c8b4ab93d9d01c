//! Sends.

use std::ffi::{c_int, c_void};

use crate::engine::{
    engine, native_isend, native_send, Mode, NativeScope, SendArgs, SendFields, Sorted,
};
use crate::mpi::{calls, Comm, Datatype, Request, Slot};

/// `args` makes the arguments where they are used: a call on host memory does not store them.
#[inline(always)]
fn blocking(args: impl Fn() -> SendArgs, natively: impl Fn() -> c_int) -> c_int {
    let Some(engine) = engine() else {
        return natively();
    };
    if let Some(_scope) = engine.early() {
        if engine.is_host_send(&args()) {
            return natively();
        }
    }
    let args = args();
    let sorted = engine.sort_send(&args);
    if let Sorted::Native = sorted {
        let _scope = NativeScope::enter();
        return natively();
    }
    match engine.start_sorted(&args, &sorted) {
        Ok(send) => engine.await_send(send),
        Err(code) => code,
    }
}

/// As [`blocking`].
#[inline(always)]
fn immediate(
    args: impl Fn() -> SendArgs,
    request: Slot<'_, Request>,
    natively: impl Fn() -> c_int,
) -> c_int {
    let Some(engine) = engine() else {
        return natively();
    };
    if !engine.live() && engine.is_host_send(&args()) {
        return natively();
    }
    let args = args();
    match engine.sort_send(&args) {
        Sorted::Native => {
            engine.live();
            natively()
        }
        Sorted::Counted(stream) => engine.send_counted(&args, stream, request),
        sorted => match engine.start_sorted(&args, &sorted) {
            Ok(send) => engine.hand_out_send(send, request),
            Err(code) => code,
        },
    }
}

macro_rules! sends {
    ($($mode:ident $blocking:ident $blocking_c:ident $immediate:ident $immediate_c:ident;)*) => {$(
        sends!(@blocking $mode $blocking c_int);
        sends!(@blocking $mode $blocking_c i64);
        sends!(@immediate $mode $immediate c_int);
        sends!(@immediate $mode $immediate_c i64);
    )*};
    (@blocking $mode:ident $name:ident $count:ty) => { calls! {
        #[doc = concat!("`MPI_", stringify!($name), "` (MPI 4.1 section 3.4), name in snake case.")]
        $name(buf: *const c_void, count: $count, datatype: Datatype, dest: c_int, tag: c_int, comm: Comm) {
            let args = || SendArgs::new(SendFields { mode: Mode::$mode, buffer: buf, count: count.into(), datatype, dest, tag, comm });
            blocking(args, || native_send(&args()))
        }
    } };
    (@immediate $mode:ident $name:ident $count:ty) => { calls! {
        #[doc = concat!("`MPI_", stringify!($name), "` (MPI 4.1 section 3.7.2), name in snake case.")]
        $name(buf: *const c_void, count: $count, datatype: Datatype, dest: c_int, tag: c_int, comm: Comm, request: Slot<'_, Request>) {
            let args = || SendArgs::new(SendFields { mode: Mode::$mode, buffer: buf, count: count.into(), datatype, dest, tag, comm });
            immediate(args, request, || native_isend(&args(), request))
        }
    } };
}

sends! {
    Standard send send_c isend isend_c;
    Buffered bsend bsend_c ibsend ibsend_c;
    Synchronous ssend ssend_c issend issend_c;
    Ready rsend rsend_c irsend irsend_c;
}
