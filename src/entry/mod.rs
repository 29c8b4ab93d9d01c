//! What each intercepted MPI call does: one function for each taken one, with the C parameters.
//!
//! These functions only translate. Decisions are the engine's.

mod communicator;
mod completion;
mod errors;
mod lifecycle;
mod persistent;
mod probe;
mod receive;
mod send;
mod sendrecv;

pub use communicator::*;
pub use completion::*;
pub use errors::*;
pub use lifecycle::*;
pub use persistent::*;
pub use probe::*;
pub use receive::*;
pub use send::*;
pub use sendrecv::*;

use crate::engine::NativeScope;
use crate::mpi::Function;

/// Around a watched call: the helper serves meanwhile.
#[inline]
pub fn blocking(_function: Function) -> NativeScope {
    NativeScope::enter()
}
