//! Probes.

use std::ffi::c_int;

use crate::engine::engine;
use crate::engine::probe::ProbeArgs;
use crate::mpi::{native, Comm, Message, Out, Slot, StatusOut};

/// `MPI_Probe` (MPI 4.1 section 3.8.1).
pub fn probe(source: c_int, tag: c_int, comm: Comm, status: StatusOut<'_>) -> c_int {
    match engine() {
        Some(engine) => engine.probe(ProbeArgs { source, tag, comm }, None, status),
        None => native::probe(source, tag, comm, status),
    }
}

/// `MPI_Iprobe` (MPI 4.1 section 3.8.1).
pub fn iprobe(
    source: c_int,
    tag: c_int,
    comm: Comm,
    flag: Out<'_, c_int>,
    status: StatusOut<'_>,
) -> c_int {
    match engine() {
        Some(engine) if engine.live() => {
            engine.iprobe(ProbeArgs { source, tag, comm }, flag, None, status)
        }
        _ => native::iprobe(source, tag, comm, flag, status),
    }
}

/// `MPI_Mprobe` (MPI 4.1 section 3.8.2).
pub fn mprobe(
    source: c_int,
    tag: c_int,
    comm: Comm,
    message: Slot<'_, Message>,
    status: StatusOut<'_>,
) -> c_int {
    match engine() {
        Some(engine) => engine.probe(ProbeArgs { source, tag, comm }, Some(message), status),
        None => native::mprobe(source, tag, comm, message, status),
    }
}

/// `MPI_Improbe` (MPI 4.1 section 3.8.2).
pub fn improbe(
    source: c_int,
    tag: c_int,
    comm: Comm,
    flag: Out<'_, c_int>,
    message: Slot<'_, Message>,
    status: StatusOut<'_>,
) -> c_int {
    match engine() {
        Some(engine) => engine.iprobe(ProbeArgs { source, tag, comm }, flag, Some(message), status),
        None => native::improbe(source, tag, comm, flag, message, status),
    }
}
