//! The exported driver API. Contracts are those of the vendor's reference manual.
#![allow(
    missing_docs,
    non_snake_case,
    clippy::missing_safety_doc,
    clippy::too_many_arguments
)]

use crate::driver::driver;
use crate::errors::{Res, INVALID_VALUE, NOT_SUPPORTED, UNKNOWN};
use crate::types::*;
use core::ffi::c_void;
use std::panic::{catch_unwind, AssertUnwindSafe};

/// Defines exported functions. The body is what happens between the C boundary's checks; build.rs
/// reads the signatures from the sources, so each starts with `fn cu` after four spaces.
macro_rules! driver {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        #[no_mangle]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> $crate::types::CUresult {
            $crate::api::boundary(stringify!($name), || -> $crate::errors::Res {
                // SAFETY: pointers are the C caller's, valid as the driver API's contract says.
                #[allow(unused_unsafe)]
                unsafe { $body }
            })
        }
    )*};
}

pub mod capture;
pub mod context;
pub mod copy;
pub mod device;
pub mod event;
pub mod exec;
pub mod fill;
pub mod graph;
pub mod ipc;
pub mod launch;
pub mod memop;
pub mod memory;
pub mod misc;
pub mod module;
pub mod pointer;
pub mod pool;
pub mod stream;
pub mod virt;

pub(crate) use crate::state::PerThreadDefault;

/// A name and where it is.
pub(crate) struct Symbol {
    pub name: &'static str,
    pub address: *const c_void,
}
// SAFETY: addresses of functions, never written.
unsafe impl Sync for Symbol {}

/// Generated stubs, aliases and the table of all names.
pub(crate) mod generated {
    use super::Symbol;
    use crate::types::*;
    use core::ffi::{c_char, c_int, c_uint, c_void};
    include!(concat!(env!("OUT_DIR"), "/symbols.rs"));
}

/// Runs the body of an exported function: planned errors first, and no panic gets out.
pub(crate) fn boundary(name: &'static str, body: impl FnOnce() -> Res) -> CUresult {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let driver = driver().ok();
        let _inside = driver.map(|d| d.inside());
        if let Some(code) = driver.and_then(|d| d.fault(name)) {
            return Err(code);
        }
        body()
    }));
    match outcome {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code,
        Err(_) => {
            crate::report::complain(&format!("{name} failed inside the simulated driver"));
            UNKNOWN
        }
    }
}

/// A function of the driver API that this driver does not have.
pub(crate) fn unsupported(name: &'static str) -> CUresult {
    boundary(name, || Err(NOT_SUPPORTED))
}

/// Writes a result through the caller's pointer, which must not be null.
///
/// # Safety
/// `to` is null or may be written.
pub(crate) unsafe fn out<T>(to: *mut T, value: T) -> Res {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, and the caller's contract. Unaligned is tolerated as the driver does.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Writes an optional result.
///
/// # Safety
/// As for [`out`].
pub(crate) unsafe fn maybe<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: as in `out`.
        unsafe { to.write_unaligned(value) };
    }
}

/// A caller's array, empty when the count is 0.
///
/// # Safety
/// `from` is null or holds `count` elements.
pub(crate) unsafe fn array<T: Clone>(from: *const T, count: usize) -> Res<Vec<T>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if from.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, and the caller's contract.
    Ok(unsafe { core::slice::from_raw_parts(from, count) }.to_vec())
}

/// A caller's struct.
///
/// # Safety
/// `from` is null or holds a `T`.
pub(crate) unsafe fn load<T: Copy>(from: *const T) -> Res<T> {
    if from.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, and the caller's contract.
    Ok(unsafe { from.read_unaligned() })
}

/// A caller's string.
///
/// # Safety
/// `from` is null or NUL-terminated.
pub(crate) unsafe fn text(from: CString) -> Res<String> {
    if from.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, and the caller's contract.
    Ok(unsafe { core::ffi::CStr::from_ptr(from) }
        .to_string_lossy()
        .into_owned())
}
