//! The functions, with the types of ucp/api/ucp.h.

use std::ffi::{c_uint, c_void};

use anabranch_engine::trace::ucp;

use crate::real::Function;
use crate::told::{tell, About, Returned};

type Any = *mut c_void;
type Buffer = *const c_void;
/// `ucs_status_ptr_t`.
type StatusPointer = *mut c_void;
/// `ucs_status_t`.
type Status = i32;

/// `ucp_request_param_t`, as far as it is looked at.
#[repr(C)]
pub struct Parameters {
    mask: u32,
    flags: u32,
    request: Any,
    callback: Any,
    datatype: u64,
}

/// A byte, as `ucp_dt_make_contig(1)` says it.
const BYTE: u64 = 1 << 3;

/// The datatype that parameters name.
fn datatype(parameters: *const Parameters) -> u64 {
    const HAS_DATATYPE: u32 = 1 << 3;
    // SAFETY: null, or the parameters of the call that is under way.
    match unsafe { parameters.as_ref() } {
        Some(parameters) if parameters.mask & HAS_DATATYPE != 0 => parameters.datatype,
        _ => BYTE,
    }
}

/// `ucp_dt_iov_t`.
#[repr(C)]
struct Piece {
    buffer: Any,
    length: usize,
}

/// Bytes of so many elements: [`u64::MAX`] of a datatype of the MPI library's own.
fn bytes(buffer: Buffer, count: usize, datatype: u64) -> u64 {
    match datatype & 7 {
        0 => (count as u64).saturating_mul(datatype >> 3),
        2 if !buffer.is_null() => {
            // SAFETY: with this datatype the buffer has so many pieces.
            let pieces = unsafe { std::slice::from_raw_parts(buffer.cast::<Piece>(), count) };
            let lengths = pieces.iter().map(|piece| piece.length as u64);
            lengths.fold(0, u64::saturating_add)
        }
        _ => u64::MAX,
    }
}

/// Exports functions that tell of a call and pass it on: endpoint, bytes and tag are those to tell.
macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),*) -> $returned:ty = ($endpoint:expr, $bytes:expr, $tag:expr);)*) => {$(
        /// See ucp/api/ucp.h.
        ///
        /// # Safety
        /// That of UCX's function.
        #[no_mangle]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $returned {
            const NAME: &std::ffi::CStr = match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!(),
            };
            const NUMBER: u32 = ucp::number(NAME);
            static REAL: Function = Function::of_ucx(NAME);
            let address = REAL.address();
            if address.is_null() {
                return Returned::missing();
            }
            // SAFETY: UCX's function of this name, which is of this type.
            let real: unsafe extern "C" fn($($type),*) -> $returned = unsafe { std::mem::transmute(address) };
            let about = || About { function: NUMBER, endpoint: $endpoint, bytes: $bytes, tag: $tag };
            // SAFETY: as the caller says.
            tell(about, || unsafe { real($($argument),*) })
        }
    )*};
}

/// No endpoint is named.
const NONE: Any = std::ptr::null_mut();

functions! {
    ucp_tag_send_nb(endpoint: Any, buffer: Buffer, count: usize, kind: u64, tag: u64, callback: Any) -> StatusPointer
        = (endpoint, bytes(buffer, count, kind), tag);
    ucp_tag_send_nbr(endpoint: Any, buffer: Buffer, count: usize, kind: u64, tag: u64, request: Any) -> Status
        = (endpoint, bytes(buffer, count, kind), tag);
    ucp_tag_send_nbx(endpoint: Any, buffer: Buffer, count: usize, tag: u64, parameters: *const Parameters) -> StatusPointer
        = (endpoint, bytes(buffer, count, datatype(parameters)), tag);
    ucp_tag_send_sync_nb(endpoint: Any, buffer: Buffer, count: usize, kind: u64, tag: u64, callback: Any) -> StatusPointer
        = (endpoint, bytes(buffer, count, kind), tag);
    ucp_tag_send_sync_nbx(endpoint: Any, buffer: Buffer, count: usize, tag: u64, parameters: *const Parameters) -> StatusPointer
        = (endpoint, bytes(buffer, count, datatype(parameters)), tag);
    ucp_tag_recv_nb(worker: Any, buffer: Any, count: usize, kind: u64, tag: u64, mask: u64, callback: Any) -> StatusPointer
        = (NONE, bytes(buffer, count, kind), tag);
    ucp_tag_recv_nbr(worker: Any, buffer: Any, count: usize, kind: u64, tag: u64, mask: u64, request: Any) -> Status
        = (NONE, bytes(buffer, count, kind), tag);
    ucp_tag_recv_nbx(worker: Any, buffer: Any, count: usize, tag: u64, mask: u64, parameters: *const Parameters) -> StatusPointer
        = (NONE, bytes(buffer, count, datatype(parameters)), tag);
    ucp_tag_msg_recv_nb(worker: Any, buffer: Any, count: usize, kind: u64, message: Any, callback: Any) -> StatusPointer
        = (NONE, bytes(buffer, count, kind), 0);
    ucp_tag_msg_recv_nbx(worker: Any, buffer: Any, count: usize, message: Any, parameters: *const Parameters) -> StatusPointer
        = (NONE, bytes(buffer, count, datatype(parameters)), 0);
    ucp_am_send_nb(endpoint: Any, id: u16, buffer: Buffer, count: usize, kind: u64, callback: Any, flags: c_uint) -> StatusPointer
        = (endpoint, bytes(buffer, count, kind), u64::from(id));
    ucp_am_send_nbx(endpoint: Any, id: c_uint, header: Buffer, header_length: usize, buffer: Buffer, count: usize, parameters: *const Parameters) -> StatusPointer
        = (endpoint, bytes(buffer, count, datatype(parameters)), u64::from(id));
    ucp_am_recv_data_nbx(worker: Any, data: Any, buffer: Any, count: usize, parameters: *const Parameters) -> StatusPointer
        = (NONE, bytes(buffer, count, datatype(parameters)), 0);
    ucp_put(endpoint: Any, buffer: Buffer, length: usize, address: u64, key: Any) -> Status
        = (endpoint, length as u64, address);
    ucp_put_nb(endpoint: Any, buffer: Buffer, length: usize, address: u64, key: Any, callback: Any) -> StatusPointer
        = (endpoint, length as u64, address);
    ucp_put_nbi(endpoint: Any, buffer: Buffer, length: usize, address: u64, key: Any) -> Status
        = (endpoint, length as u64, address);
    ucp_put_nbx(endpoint: Any, buffer: Buffer, count: usize, address: u64, key: Any, parameters: *const Parameters) -> StatusPointer
        = (endpoint, bytes(buffer, count, datatype(parameters)), address);
    ucp_get(endpoint: Any, buffer: Any, length: usize, address: u64, key: Any) -> Status
        = (endpoint, length as u64, address);
    ucp_get_nb(endpoint: Any, buffer: Any, length: usize, address: u64, key: Any, callback: Any) -> StatusPointer
        = (endpoint, length as u64, address);
    ucp_get_nbi(endpoint: Any, buffer: Any, length: usize, address: u64, key: Any) -> Status
        = (endpoint, length as u64, address);
    ucp_get_nbx(endpoint: Any, buffer: Any, count: usize, address: u64, key: Any, parameters: *const Parameters) -> StatusPointer
        = (endpoint, bytes(buffer, count, datatype(parameters)), address);
    ucp_atomic_post(endpoint: Any, operation: c_uint, value: u64, size: usize, address: u64, key: Any) -> Status
        = (endpoint, size as u64, address);
    ucp_atomic_fetch_nb(endpoint: Any, operation: c_uint, value: u64, result: Any, size: usize, address: u64, key: Any, callback: Any) -> StatusPointer
        = (endpoint, size as u64, address);
    ucp_atomic_op_nbx(endpoint: Any, operation: c_uint, buffer: Buffer, count: usize, address: u64, key: Any, parameters: *const Parameters) -> StatusPointer
        = (endpoint, bytes(buffer, count, datatype(parameters)), address);
    ucp_ep_flush(endpoint: Any) -> Status = (endpoint, u64::MAX, 0);
    ucp_ep_flush_nb(endpoint: Any, flags: c_uint, callback: Any) -> StatusPointer = (endpoint, u64::MAX, 0);
    ucp_ep_flush_nbx(endpoint: Any, parameters: *const Parameters) -> StatusPointer = (endpoint, u64::MAX, 0);
    ucp_worker_flush(worker: Any) -> Status = (NONE, u64::MAX, 0);
    ucp_worker_flush_nb(worker: Any, flags: c_uint, callback: Any) -> StatusPointer = (NONE, u64::MAX, 0);
    ucp_worker_flush_nbx(worker: Any, parameters: *const Parameters) -> StatusPointer = (NONE, u64::MAX, 0);
    ucp_worker_fence(worker: Any) -> Status = (NONE, u64::MAX, 0);
}
