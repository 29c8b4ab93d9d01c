//! Persistent collectives that the MPI library lacks.

use std::ffi::c_int;

pub(super) use crate::engine::Lent;
use crate::engine::{engine, lifecycle, Held, Start};
use crate::mpi::large::Kept;
use crate::mpi::{Family, Function, Handle};

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
    ///
    /// # Safety
    /// The arguments are those of the program's call; `make` uses what the program has lent for as long as the request lives.
    pub(super) unsafe fn make(
        comm: Handle,
        request: *mut Handle,
        kept: Kept,
        make: impl FnOnce(&mut Held) -> Result<Start, c_int>,
    ) -> c_int {
        match lifecycle::engine_for_requests() {
            // SAFETY: passed on.
            Ok(engine) => unsafe { engine.make_collective(comm, request, kept, make) },
            Err(code) => code,
        }
    }
}
