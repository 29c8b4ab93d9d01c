//! `libanabranch_ucx.so`: UCX's functions that move data, told to `libanabranch.so` while that records a trace, and
//! passed on. It is preloaded beside it where `ANABRANCH_TRACE` is set, and otherwise not at all.
//!
//! **Architecture invariant:** a call reaches UCX as it was made, whatever becomes of the record.

mod calls;
mod endpoint;
mod real;
mod told;
