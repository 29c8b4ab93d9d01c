//! Entry points that call the MPI library and nothing else, to measure and test the boundary without the engine.
//! `ANABRANCH_LOG=trace` shows every exported call; `ANABRANCH=off` leaves the library unarmed.

pub(crate) use anabranch_engine::mpi::native::*;

use anabranch_engine::mpi::{abi, guard, Function, Out};
use std::ffi::{c_int, c_void};

fn arm() {
    let (config, _) = anabranch_engine::config::Config::from_env();
    anabranch_engine::logging::set_up(&config);
    if std::env::var_os("ANABRANCH").is_some_and(|value| value == "off") || abi().is_none() {
        return;
    }
    guard::trace_calls_if_logged();
    if let Some(function) = std::env::var("ANABRANCH_INJECT_PANIC")
        .ok()
        .and_then(|name| Function::by_name(&name))
    {
        guard::inject_panic(function);
    }
    guard::set_armed(true);
}

pub(crate) unsafe fn init(argc: *mut c_int, argv: *mut c_void) -> c_int {
    arm();
    // SAFETY: the arguments are the program's.
    unsafe { anabranch_engine::mpi::native::init(argc, argv) }
}

pub(crate) unsafe fn init_thread(
    argc: *mut c_int,
    argv: *mut c_void,
    required: c_int,
    provided: Out<'_, c_int>,
) -> c_int {
    arm();
    // SAFETY: the arguments are the program's.
    unsafe { anabranch_engine::mpi::native::init_thread(argc, argv, required, provided) }
}

pub(crate) fn blocking(_: Function, _: &[*const c_void]) {}

pub(crate) fn look_at(_: Function, _: &[*const c_void]) {}

pub(crate) fn after_tool(_: Function) {}

pub(crate) fn is_lacking(_: Function) -> bool {
    false
}
