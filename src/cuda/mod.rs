//! The CUDA part: the driver of the process, what an address points to, and copies that leave no trace.
//!
//! **Nothing is linked and nothing is assumed**: the driver is looked for when the engine is armed ([`arm`]),
//! and each of its functions may be absent. Until the program itself has initialized it, the only question
//! asked is "is it initialized?".
//!
//! **The user's state stays as it was**: every call enters the context it needs and leaves it again
//! ([`state`]), copies run on streams of the engine's own ([`lanes`]), and no context is made unasked.
//!
//! **Every object here may outlive its context.** A context is known by its handle and identity
//! ([`ContextKey`]). Objects of a context that is gone answer with an error. In a forked child the driver is
//! gone as well.
//!
//! All state is in owned objects that any thread may hold, behind the engine's lock. [`driver`] and [`reach`]
//! have process-wide state of their own, which any thread may use at any time.

pub mod chunks;
pub mod copy;
mod driver;
mod error;
pub mod export;
mod forecast;
mod host_range;
pub mod lanes;
mod lent;
pub mod mapping;
mod measure;
mod mirror;
pub mod nvml;
pub mod pinned;
pub mod pointer;
pub mod queue;
pub mod reach;
mod staged;
pub mod state;
pub mod types;

#[cfg(test)]
pub(crate) mod tests;

pub use chunks::Chunks;
pub use copy::{overlap, Copy};
pub use driver::{
    arm, clock_ns, driver, is_simulated, look_again, pci_address, simulated_ns, stay_away, version,
    Driver,
};
pub use error::{Error, NotExportable, Result};
pub use export::{Export, Exports};
pub use lanes::{Lanes, Purpose};
pub use lent::{Lent, Start};
pub use mapping::{Limits, Mapping, MappingStats, Mappings};
pub use measure::Timed;
pub use pinned::{Budget, PinnedBuffer, PinnedPool, Registrations};
pub use pointer::{
    classify, driver_in_use, gpu_seen, is_device, Allocation, Buffer, HostMemory, Kind,
};
pub use queue::{Gathered, InFlight};
pub use staged::{free_bytes, is_short, StagedMemory, RESERVE};
pub use state::{ContextKey, Entered, Stay};
pub use types::{uuid_text, Context, IpcHandle, Uuid};
