//! Transfers: bytes from one rank's memory to another's. Nothing here knows MPI.
//!
//! A sender offers a transfer in a slot of its segment; whoever is told of the slot (an RTS) can claim it and
//! bring the bytes to where they belong. `engine` makes transfers of the messages that MPI matches.

pub mod export;
pub mod fault;
pub mod fetch;
pub mod garbage;
pub mod gpu;
pub mod history;
pub mod life;
pub mod memory;
pub mod pages;
pub mod paths;
pub mod put;
pub mod relays;
pub mod route;
pub mod send;
pub mod serve;
pub mod story;
pub mod stream;
pub mod thread;
pub mod transfers;

use crate::config::Config;
use crate::node::{Node, Options, CELLS_BYTES, CELLS_MAX, CELLS_MIN};
use crate::transfer::paths::Allowed;

/// From so many bytes on, a GPU had better not write to a peer's memory and read it at once, in either order:
/// for a process that has it mapped, one is made after the other (two H200s, 16 MiB each way: 99 us, and 55
/// if both write; `docs/decisions/no-read-beside-write.md`).
pub const ONE_WAY_FROM: u64 = 256 << 10;

/// What does not change while this process has transfers.
pub struct Env {
    /// The options.
    pub config: Config,
    /// This rank among the ranks of the node.
    pub node: Node,
    /// This rank, as its peers name it.
    pub world_rank: u32,
    /// Which paths transfers may take.
    pub allowed: Allowed,
    /// What a peer is told of a transfer that cannot be had.
    pub failed: i32,
}

impl Env {
    /// An environment in which nothing was transferred yet. `failed`: see [`Env::failed`].
    pub fn new(config: Config, node: Node, failed: i32) -> Env {
        Env {
            allowed: Allowed::new(config.paths),
            world_rank: node.world_rank(),
            config,
            node,
            failed,
        }
    }

    /// The processes of this node's ranks that run with the library.
    pub fn processes(&self) -> Vec<u32> {
        let peers = self.node.peers();
        peers.iter().map(|peer| peer.pid()).collect()
    }
}

/// Largest cell for the payload of an eager message, bytes.
const CELL_BYTES_MAX: u64 = 64 << 10;

/// Sizes of this rank's segment.
#[must_use]
pub fn node_options(config: &Config) -> Options {
    // Larger eager messages go by bcopy.
    let cell_bytes = config.eager.min(CELL_BYTES_MAX) as u32;
    Options {
        slots: config.slots.max(1),
        staging_bytes: config.staging,
        chunk_bytes: u32::try_from(config.chunk).unwrap_or(1 << 20),
        cell_bytes,
        cells: (CELLS_BYTES / cell_bytes.max(1)).clamp(CELLS_MIN, CELLS_MAX),
        sheets: config.verify,
        wide_bytes: config.multipath_staging,
        ..Options::default()
    }
}
