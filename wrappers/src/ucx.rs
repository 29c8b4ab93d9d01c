//! What `libanabranch_ucx.so` calls to have UCX's functions recorded. It is no public interface.

use anabranch_engine::trace::ucp::{self, Told};
use std::ffi::{c_char, c_uint, CStr};
use std::panic::catch_unwind;

/// See [`ucp::begin`].
#[no_mangle]
pub extern "C" fn anabranch_ucp_begin() -> u64 {
    catch_unwind(ucp::begin).unwrap_or(0)
}

/// See [`ucp::end`].
///
/// # Safety
/// `told` is null or points to what is told.
#[no_mangle]
pub unsafe extern "C" fn anabranch_ucp_end(told: *const Told) {
    // SAFETY: as the caller says.
    if let Some(told) = unsafe { told.as_ref() } {
        let _ = catch_unwind(|| ucp::end(told));
    }
}

/// See [`ucp::lane`].
///
/// # Safety
/// `name` is null or a C string.
#[no_mangle]
pub unsafe extern "C" fn anabranch_ucp_lane(
    endpoint: c_uint,
    lane: c_uint,
    lanes: c_uint,
    name: *const c_char,
) {
    if name.is_null() {
        return;
    }
    // SAFETY: not null, so a C string, as the caller says.
    let name = unsafe { CStr::from_ptr(name) };
    let _ = catch_unwind(|| ucp::lane(endpoint, (lane, lanes), name));
}
