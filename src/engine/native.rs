//! Native calls whose count may be large, and errors raised natively.

use std::ffi::c_int;

use crate::engine::args::{Mode, RecvArgs, RecvFields, SendArgs, SendFields};
use crate::mpi::{codes, guard, native, Abi, Comm, Message, Request, Slot, StatusOut};

/// Calls a native function whose first arguments are a buffer and a count. The variant with a large count is
/// called for large counts only: not every library has it, and one that lacks it takes a longer way to a
/// replacement. The arguments are those of a [`SendArgs`] or a [`RecvArgs`].
macro_rules! by_count {
    ($plain:ident or $large:ident: $buffer:expr, $count:expr, $($argument:expr),+) => {
        // SAFETY: buffer, count and datatype belong together, and the buffer is lent for as long as the operation
        // takes: invariants of the types that they come from.
        unsafe {
            match c_int::try_from($count) {
                Ok(count) => native::$plain($buffer, count, $($argument),+),
                Err(_) => native::$large($buffer, $count, $($argument),+),
            }
        }
    };
}

/// Calls the native function of a send's mode, named in the order standard, buffered, synchronous, ready.
macro_rules! send_by_mode {
    ($args:expr, [$s:ident $s_c:ident, $b:ident $b_c:ident, $y:ident $y_c:ident, $r:ident $r_c:ident] $(, $request:expr)?) => {{
        let SendFields { mode, buffer, count, datatype, dest, tag, comm } = **$args;
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
        let RecvFields { buffer, count, datatype, source, tag, comm } = **$args;
        by_count!($plain or $large: buffer, count, datatype, source, tag, comm, $last)
    }};
}

/// A native blocking send in the mode of the arguments.
#[inline(always)]
pub fn native_send(args: &SendArgs) -> c_int {
    send_by_mode!(args, [send send_c, bsend bsend_c, ssend ssend_c, rsend rsend_c])
}

/// A native non-blocking send in the mode of the arguments.
#[inline(always)]
pub fn native_isend(args: &SendArgs, request: Slot<'_, Request>) -> c_int {
    send_by_mode!(args, [isend isend_c, ibsend ibsend_c, issend issend_c, irsend irsend_c], request)
}

/// A native persistent send in the mode of the arguments.
pub fn native_send_init(args: &SendArgs, request: Slot<'_, Request>) -> c_int {
    send_by_mode!(
        args,
        [send_init send_init_c, bsend_init bsend_init_c, ssend_init ssend_init_c, rsend_init rsend_init_c],
        request
    )
}

/// A native blocking receive.
#[inline(always)]
pub fn native_recv(args: &RecvArgs, status: StatusOut<'_>) -> c_int {
    receive!(recv or recv_c, args, status)
}

/// A native non-blocking receive.
#[inline(always)]
pub fn native_irecv(args: &RecvArgs, request: Slot<'_, Request>) -> c_int {
    receive!(irecv or irecv_c, args, request)
}

/// A native persistent receive.
pub fn native_recv_init(args: &RecvArgs, request: Slot<'_, Request>) -> c_int {
    receive!(recv_init or recv_init_c, args, request)
}

/// A native blocking receive of the message of a matched probe: of the arguments, buffer, count and datatype count.
pub fn native_mrecv(args: &RecvArgs, message: Slot<'_, Message>, status: StatusOut<'_>) -> c_int {
    by_count!(mrecv or mrecv_c: args.buffer, args.count, args.datatype, message, status)
}

/// A native non-blocking receive of the message of a matched probe, likewise.
pub fn native_imrecv(
    args: &RecvArgs,
    message: Slot<'_, Message>,
    request: Slot<'_, Request>,
) -> c_int {
    by_count!(imrecv or imrecv_c: args.buffer, args.count, args.datatype, message, request)
}

/// Has the communicator's error handler called at the end of the program's call, as MPI does for its own
/// errors (MPI 4.1 section 9.3). Returns the code.
pub fn raise(comm: Comm, code: c_int) -> c_int {
    guard::raise_on_leaving(comm, code);
    code
}

/// As [`raise`], with a code that says which message it is about, and why.
pub fn raise_told(abi: &Abi, comm: Comm, why: &str) -> c_int {
    raise(comm, codes::code_of(abi, abi.err_other, why))
}
