//! The engine of Anabranch.

pub mod config;
pub mod cuda;
pub mod engine;
pub mod entry;
pub mod exec;
#[cfg(test)]
mod fuzz;
pub mod logging;
pub mod model;
pub mod mpi;
pub mod node;
pub mod plan;
pub mod policy;
pub mod stats;
pub mod topology;
pub mod trace;
pub mod transfer;
