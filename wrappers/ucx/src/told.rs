//! What is told to `libanabranch.so`, through functions that it exports for this library alone.

use std::ffi::{c_char, c_void};

use anabranch_engine::trace::ucp::Told;

use crate::endpoint;
use crate::real::Function;

static BEGIN: Function = Function::of_anabranch(c"anabranch_ucp_begin");
static END: Function = Function::of_anabranch(c"anabranch_ucp_end");
static LANE: Function = Function::of_anabranch(c"anabranch_ucp_lane");

/// What is known of a call before it is made.
#[derive(Clone, Copy)]
pub struct About {
    pub function: u32,
    pub endpoint: *mut c_void,
    pub bytes: u64,
    pub tag: u64,
}

/// What UCX's functions return.
pub trait Returned {
    /// UCX has no such function.
    fn missing() -> Self;
    /// 0: done, 1: under way, 2: an error.
    fn outcome(&self) -> u32;
}

/// A status: 0 is done, 1 under way, and errors are negative.
impl Returned for i32 {
    fn missing() -> i32 {
        const UNSUPPORTED: i32 = -22;
        UNSUPPORTED
    }

    fn outcome(&self) -> u32 {
        match *self {
            0 => 0,
            1.. => 1,
            _ => 2,
        }
    }
}

/// A status in a pointer, or the request: errors are the last hundred addresses.
impl Returned for *mut c_void {
    fn missing() -> *mut c_void {
        i32::missing() as isize as *mut c_void
    }

    fn outcome(&self) -> u32 {
        const ERRORS: isize = -100;
        match *self as isize {
            0 => 0,
            ERRORS..0 => 2,
            _ => 1,
        }
    }
}

/// Makes a call, and tells of it. `about` is asked only where somebody records.
#[inline]
pub fn tell<R: Returned>(about: impl FnOnce() -> About, call: impl FnOnce() -> R) -> R {
    let begin = begin();
    if begin == 0 {
        return call();
    }
    let about = about();
    let returned = call();
    let told = Told {
        schema: Told::SCHEMA,
        function: about.function,
        begin,
        bytes: about.bytes,
        tag: about.tag,
        endpoint: endpoint::number(about.endpoint),
        outcome: returned.outcome(),
    };
    end(&told);
    returned
}

fn begin() -> u64 {
    let address = BEGIN.address();
    if address.is_null() {
        return 0;
    }
    // SAFETY: libanabranch.so's function, which is of this type.
    let begin: extern "C" fn() -> u64 = unsafe { std::mem::transmute(address) };
    begin()
}

fn end(told: &Told) {
    let address = END.address();
    if address.is_null() {
        return;
    }
    // SAFETY: libanabranch.so's function, which is of this type.
    let end: unsafe extern "C" fn(*const Told) = unsafe { std::mem::transmute(address) };
    // SAFETY: what is told is there.
    unsafe { end(told) };
}

/// Tells of a lane of an endpoint: its number, how many there are, and `TRANSPORT/DEVICE`.
pub fn lane(endpoint: u32, (number, of): (u32, u32), name: &std::ffi::CStr) {
    let address = LANE.address();
    if address.is_null() {
        return;
    }
    // SAFETY: libanabranch.so's function, which is of this type.
    let lane: unsafe extern "C" fn(u32, u32, u32, *const c_char) =
        unsafe { std::mem::transmute(address) };
    // SAFETY: a C string.
    unsafe { lane(endpoint, number, of, name.as_ptr()) };
}
