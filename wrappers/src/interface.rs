//! The functions of `include/anabranch.h`.

use anabranch_engine::stats;
use std::ffi::{c_char, c_uint, CStr};
use std::panic::catch_unwind;
use std::ptr::null;

/// What `anabranch_counter` gives for a name that no counter has.
const NO_SUCH_COUNTER: u64 = u64::MAX;

/// Version of the library, as in "0.1.0".
#[no_mangle]
pub extern "C" fn anabranch_version() -> *const c_char {
    stats::version().as_ptr()
}

/// Present value of a counter of this process, or UINT64_MAX if no counter has this name.
///
/// # Safety
/// `name` is null or a C string.
#[no_mangle]
pub unsafe extern "C" fn anabranch_counter(name: *const c_char) -> u64 {
    if name.is_null() {
        return NO_SUCH_COUNTER;
    }
    // SAFETY: not null, so a C string, as the caller says.
    let name = unsafe { CStr::from_ptr(name) };
    let value = catch_unwind(|| name.to_str().ok().and_then(stats::counter_by_name));
    value.ok().flatten().unwrap_or(NO_SUCH_COUNTER)
}

/// Name of counter number `index`; null past the last one.
#[no_mangle]
pub extern "C" fn anabranch_counter_name(index: c_uint) -> *const c_char {
    let name = catch_unwind(|| usize::try_from(index).ok().and_then(stats::name_by_index));
    name.ok().flatten().map_or(null(), CStr::as_ptr)
}
