//! Persistent collectives that the MPI library lacks.

use std::ffi::c_int;

pub(super) use crate::engine::Pointers;
use crate::engine::{engine, lifecycle, Held, Start};
use crate::mpi::large::Kept;
use crate::mpi::{Comm, Family, Function, Request, Slot};

/// Makes them.
pub(super) struct Persistent;

impl Persistent {
    /// Whether the MPI library makes it. `MPI_Testall` of MPICH (4.0.2 and 5.0.2) ends in an error where one of its own is
    /// not complete, and a wait for requests of the engine's beside it is made of such tests.
    pub(super) fn is_native(function: Function) -> bool {
        let is_tested = engine().is_some_and(|engine| engine.env.abi.family != Family::OpenMpi);
        function.available() && !is_tested
    }

    /// One on this communicator.
    pub(super) fn make(
        comm: Comm,
        request: Slot<'_, Request>,
        kept: Kept,
        make: impl FnOnce(&mut Held) -> Result<Start, c_int>,
    ) -> c_int {
        match lifecycle::engine_for_requests() {
            Ok(engine) => engine.make_collective(comm, request, kept, make),
            Err(code) => code,
        }
    }
}
