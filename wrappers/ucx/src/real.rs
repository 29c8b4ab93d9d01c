//! UCX's own functions.

use std::ffi::{c_void, CStr};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The address of a function, looked up when it is first called.
pub struct Function {
    name: &'static CStr,
    find: fn(&CStr) -> *mut c_void,
    address: AtomicPtr<c_void>,
}

impl Function {
    /// One of UCX's.
    pub const fn of_ucx(name: &'static CStr) -> Function {
        Function::new(name, in_ucx)
    }

    /// One of `libanabranch.so`'s.
    pub const fn of_anabranch(name: &'static CStr) -> Function {
        Function::new(name, anywhere)
    }

    const fn new(name: &'static CStr, find: fn(&CStr) -> *mut c_void) -> Function {
        Function {
            name,
            find,
            address: AtomicPtr::new(null_mut()),
        }
    }

    /// Null if there is no such function.
    #[inline]
    pub fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        let found = (self.find)(self.name);
        self.address.store(found, Ordering::Relaxed);
        found
    }
}

#[cold]
fn anywhere(name: &CStr) -> *mut c_void {
    // SAFETY: a C string.
    unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
}

/// An MPI library may have loaded UCX for itself alone, where the search behind this library does not look.
#[cold]
fn in_ucx(name: &CStr) -> *mut c_void {
    // SAFETY: a C string.
    let next = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if !next.is_null() {
        return next;
    }
    // SAFETY: a C string; nothing is loaded that is not.
    let ucx = unsafe { libc::dlopen(c"libucp.so.0".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    match ucx.is_null() {
        true => null_mut(),
        // SAFETY: the library is loaded, and stays so as the handle is kept.
        false => unsafe { libc::dlsym(ucx, name.as_ptr()) },
    }
}
