//! The MPI library in this process: which one it is, its ABI, and its functions behind their `PMPI_` names.
//!
//! **Architecture invariant:** no MPI symbol is linked. A function is looked up by name when it is first called, and an
//! absent one is an error code, never a crash.
//!
//! **Architecture invariant:** the engine calls the MPI library's own functions only. What tools are called for are the
//! program's calls, by [`tools`].
//!
//! **API boundary:** `functions.txt` is the one list of MPI functions; `generated.rs` follows from it.

mod abi;
#[cfg(test)]
mod abi_test;
pub mod attributes;
mod calls;
pub mod codes;
mod composed;
mod constants;
mod detect;
pub mod guard;
pub mod handles;
pub mod large;
mod library;
pub mod owned;
mod resolve;
pub mod several;
mod status;
pub mod tools;

mod generated;

pub(crate) use calls::calls;
pub use constants::{Abi, Family};
pub use detect::{abi, known_soname, library_version};
pub use generated::{native, Function};
pub use handles::*;
pub use resolve::{prefer_exported, Class};
pub use status::Status;

/// Whether another job has spawned this one.
pub fn is_spawned(abi: &Abi) -> bool {
    let mut parent = abi.comm_null;
    if Function::CommGetParent.available() {
        native::comm_get_parent(Slot::of(&mut parent));
    }
    !abi.are_same(parent, abi.comm_null)
}
