//! What the build of the project looks like on disk: where things are laid out, which MPI libraries are there to
//! build against, and whether what lies in the layout was built from the sources that are there now.
//!
//! A library, because the end-to-end tests build what they load through the very same code.

pub mod build;
pub mod commit;
pub mod fingerprint;
pub mod flow;
pub mod layout;
pub mod lock;
pub mod mpi;
