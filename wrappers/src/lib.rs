//! `libanabranch.so`: nothing but exported symbols. MPI functions are generated from the table of the engine, the rest
//! is the C interface of `include/anabranch.h`; what they do is the engine's.
//!
//! **Architecture invariant:** the library runs no code when it is loaded and links no MPI and no CUDA symbol, so that it
//! is inert in a program without MPI.

mod boundary;
mod generated;
mod interface;
#[cfg(native_entries)]
mod native_entries;
mod ucx;
