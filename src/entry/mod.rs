//! What each intercepted MPI call does: one function for each taken one, with the C parameters.
//!
//! These functions only translate. Decisions are the engine's.

mod collective;
mod communicator;
mod completion;
mod errors;
mod lifecycle;
mod persistent;
#[rustfmt::skip]
#[allow(unused_mut, unused_variables)]
mod persistent_collectives;
mod probe;
mod receive;
mod send;
mod sendrecv;

pub use communicator::*;
pub use completion::*;
pub use errors::*;
pub use lifecycle::*;
pub use persistent::*;
pub use persistent_collectives::*;
pub use probe::*;
pub use receive::*;
pub use send::*;
pub use sendrecv::*;

use std::ffi::c_void;

use crate::engine::{engine, NativeScope};
use crate::mpi::Function;

/// Whether the engine is to make a function of others: neither it nor the form with plain counts is in the MPI library.
#[cold]
pub fn is_lacking(function: Function) -> bool {
    let plain = match function {
        Function::IsendrecvC => Function::Isendrecv,
        Function::IsendrecvReplaceC => Function::IsendrecvReplace,
        other => other,
    };
    !plain.available()
}

/// Around a watched call: the helper serves meanwhile.
#[inline]
pub fn blocking(function: Function, buffers: &[*const c_void]) -> NativeScope {
    look_at(function, buffers);
    NativeScope::enter()
}

/// Before a call that the MPI library makes with these buffers.
#[inline]
pub fn look_at(function: Function, buffers: &[*const c_void]) {
    if let Some(engine) = engine() {
        engine.look_at_buffers(function, buffers);
    }
}
