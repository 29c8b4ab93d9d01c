//! Native calls whose count may be large, and errors raised natively.

use std::ffi::{c_int, c_void};

use crate::engine::receive::RecvArgs;
use crate::engine::send::{Mode, SendArgs};
use crate::mpi::{codes, guard, native, Abi, Handle};

/// Calls a native function whose first arguments are a buffer and a count. The variant with a large count is
/// called for large counts only: not every library has it, and one that lacks it takes a longer way to a
/// replacement.
macro_rules! by_count {
    ($plain:ident or $large:ident: $buffer:expr, $count:expr, $($argument:expr),+) => {
        match c_int::try_from($count) {
            Ok(count) => native::$plain($buffer, count, $($argument),+),
            Err(_) => native::$large($buffer, $count, $($argument),+),
        }
    };
}

/// Calls the native function of a send's mode, named in the order standard, buffered, synchronous, ready.
macro_rules! send_by_mode {
    ($args:expr, [$s:ident $s_c:ident, $b:ident $b_c:ident, $y:ident $y_c:ident, $r:ident $r_c:ident] $(, $request:expr)?) => {{
        let SendArgs { mode, buffer, count, datatype, dest, tag, comm } = *$args;
        match mode {
            Mode::Standard => by_count!($s or $s_c: buffer, count, datatype, dest, tag, comm $(, $request)?),
            Mode::Buffered => by_count!($b or $b_c: buffer, count, datatype, dest, tag, comm $(, $request)?),
            Mode::Synchronous => by_count!($y or $y_c: buffer, count, datatype, dest, tag, comm $(, $request)?),
            Mode::Ready => by_count!($r or $r_c: buffer, count, datatype, dest, tag, comm $(, $request)?),
        }
    }};
}

/// Calls a native receive.
macro_rules! receive {
    ($plain:ident or $large:ident, $args:expr, $last:expr) => {{
        let RecvArgs { buffer, count, datatype, source, tag, comm } = *$args;
        by_count!($plain or $large: buffer, count, datatype, source, tag, comm, $last)
    }};
}

/// A native blocking send in the mode of the arguments.
///
/// # Safety
/// The arguments are valid for MPI.
#[inline(always)]
pub unsafe fn native_send(args: &SendArgs) -> c_int {
    // SAFETY: passed on.
    unsafe { send_by_mode!(args, [send send_c, bsend bsend_c, ssend ssend_c, rsend rsend_c]) }
}

/// A native non-blocking send in the mode of the arguments.
///
/// # Safety
/// The arguments are valid for MPI, and the buffer until the request completes.
#[inline(always)]
pub unsafe fn native_isend(args: &SendArgs, request: *mut Handle) -> c_int {
    // SAFETY: passed on.
    unsafe {
        send_by_mode!(args, [isend isend_c, ibsend ibsend_c, issend issend_c, irsend irsend_c], request)
    }
}

/// A native persistent send in the mode of the arguments.
///
/// # Safety
/// The arguments are those of the program's call.
pub unsafe fn native_send_init(args: &SendArgs, request: *mut Handle) -> c_int {
    // SAFETY: passed on.
    unsafe {
        send_by_mode!(
            args,
            [send_init send_init_c, bsend_init bsend_init_c, ssend_init ssend_init_c, rsend_init rsend_init_c],
            request
        )
    }
}

/// A native blocking receive.
///
/// # Safety
/// The arguments are valid for MPI.
#[inline(always)]
pub unsafe fn native_recv(args: &RecvArgs, status: *mut c_void) -> c_int {
    // SAFETY: passed on.
    unsafe { receive!(recv or recv_c, args, status) }
}

/// A native non-blocking receive.
///
/// # Safety
/// The arguments are valid for MPI, and the buffer until the request completes.
#[inline(always)]
pub unsafe fn native_irecv(args: &RecvArgs, request: *mut Handle) -> c_int {
    // SAFETY: passed on.
    unsafe { receive!(irecv or irecv_c, args, request) }
}

/// A native persistent receive.
///
/// # Safety
/// The arguments are valid for MPI, and the buffer until the request is freed.
pub unsafe fn native_recv_init(args: &RecvArgs, request: *mut Handle) -> c_int {
    // SAFETY: passed on.
    unsafe { receive!(recv_init or recv_init_c, args, request) }
}

/// A native blocking receive of the message of a matched probe.
///
/// # Safety
/// The arguments are valid for MPI.
pub unsafe fn native_mrecv(
    buffer: *mut c_void,
    count: i64,
    datatype: Handle,
    message: *mut Handle,
    status: *mut c_void,
) -> c_int {
    // SAFETY: passed on.
    unsafe { by_count!(mrecv or mrecv_c: buffer, count, datatype, message, status) }
}

/// A native non-blocking receive of the message of a matched probe.
///
/// # Safety
/// The arguments are valid for MPI, and the buffer until the request completes.
pub unsafe fn native_imrecv(
    buffer: *mut c_void,
    count: i64,
    datatype: Handle,
    message: *mut Handle,
    request: *mut Handle,
) -> c_int {
    // SAFETY: passed on.
    unsafe { by_count!(imrecv or imrecv_c: buffer, count, datatype, message, request) }
}

/// Has the communicator's error handler called at the end of the program's call, as MPI does for its own
/// errors (MPI 4.1 section 9.3). Returns the code.
///
/// # Safety
/// `comm` is the program's.
pub unsafe fn raise(comm: Handle, code: c_int) -> c_int {
    // SAFETY: passed on.
    unsafe { guard::raise_on_leaving(comm, code) };
    code
}

/// As [`raise`], with a code that says which message it is about, and why.
///
/// # Safety
/// `comm` is the program's; MPI may be called.
pub unsafe fn raise_told(abi: &Abi, comm: Handle, why: &str) -> c_int {
    // SAFETY: passed on.
    unsafe { raise(comm, codes::code_of(abi, abi.err_other, why)) }
}
