//! Probes.

use std::ffi::{c_int, c_void};

use crate::engine::engine;
use crate::engine::probe::ProbeArgs;
use crate::mpi::{native, Handle};

/// `MPI_Probe` (MPI 4.1 section 3.8.1).
///
/// # Safety
/// The arguments are those of the program's call, here and below.
pub unsafe fn probe(source: c_int, tag: c_int, comm: Handle, status: *mut c_void) -> c_int {
    // SAFETY: passed on, here and below.
    unsafe {
        match engine() {
            Some(engine) => engine.probe(ProbeArgs { source, tag, comm }, None, status),
            None => native::probe(source, tag, comm, status),
        }
    }
}

/// `MPI_Iprobe` (MPI 4.1 section 3.8.1).
///
/// # Safety
/// As [`probe`].
pub unsafe fn iprobe(
    source: c_int,
    tag: c_int,
    comm: Handle,
    flag: *mut c_int,
    status: *mut c_void,
) -> c_int {
    // SAFETY: passed on.
    unsafe {
        match engine() {
            Some(engine) if engine.live() => {
                engine.iprobe(ProbeArgs { source, tag, comm }, flag, None, status)
            }
            _ => native::iprobe(source, tag, comm, flag, status),
        }
    }
}

/// `MPI_Mprobe` (MPI 4.1 section 3.8.2).
///
/// # Safety
/// As [`probe`].
pub unsafe fn mprobe(
    source: c_int,
    tag: c_int,
    comm: Handle,
    message: *mut Handle,
    status: *mut c_void,
) -> c_int {
    // SAFETY: passed on.
    unsafe {
        match engine() {
            Some(engine) => engine.probe(ProbeArgs { source, tag, comm }, Some(message), status),
            None => native::mprobe(source, tag, comm, message, status),
        }
    }
}

/// `MPI_Improbe` (MPI 4.1 section 3.8.2).
///
/// # Safety
/// As [`probe`].
pub unsafe fn improbe(
    source: c_int,
    tag: c_int,
    comm: Handle,
    flag: *mut c_int,
    message: *mut Handle,
    status: *mut c_void,
) -> c_int {
    // SAFETY: passed on.
    unsafe {
        match engine() {
            Some(engine) => {
                engine.iprobe(ProbeArgs { source, tag, comm }, flag, Some(message), status)
            }
            None => native::improbe(source, tag, comm, flag, message, status),
        }
    }
}
