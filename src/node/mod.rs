//! The ranks of one job on one node: who they are, and the shared memory through which they meet.
//!
//! A rank registers inside MPI_Init, with no communicating MPI call. It finds out its job from the launcher
//! ([`Launch`]), creates its own segment (a memfd, no name anywhere), and enters itself in the job's
//! directory, one page in `/dev/shm`. Peers open each other's segments through `/proc/<pid>/fd/<n>`, verify
//! them, and from then on need no file any more.
//!
//! **Invariant:** nothing read from shared memory is believed. Words are atomics, indices are checked against
//! a layout that was verified when the segment was mapped, files are sealed or allocated in full. A peer that
//! fails a check is not there: messages to it go natively.

mod cells;
pub mod cpus;
pub mod details;
pub mod directory;
#[cfg(test)]
mod fuzz;
pub mod gpu_page;
pub mod launch;
mod map;
#[cfg(test)]
mod other_user;
mod parcels;
pub mod peer;
mod pool;
pub mod proc;
pub mod relay;
pub mod retired;
pub mod ring;
pub mod rtr;
pub mod rts;
pub mod segment;
pub mod sheet;
pub mod slot;
pub mod staged_part;
pub mod sys;
pub mod traffic;
pub mod units;
pub mod view;
pub mod wait;

pub use gpu_page::{GpuPage, Wide};
pub use launch::Launch;
pub use parcels::{Parcel, Parcels, FILES_MAX};
pub use peer::{Peer, PeerError};
pub use relay::{Exported, GpuRow, Wiring, RELAY_BYTES_MAX};
pub use retired::Gone;
pub use ring::{Entry, OnGpu, Ring, RingError, RING_ENTRIES};
pub use rtr::{RtrId, RtrState, Waiting};
pub use rts::{Corruption, Rejection, Rts, RTS_BYTES};
pub use segment::Segment;
pub use sheet::{Sums, BLOCKS};
pub use slot::{Message, Refused, Slot, SlotState};
pub use staged_part::{Asked, Part, StagedPartError, Target, Way};
pub use units::{units_of, Taker, UNIT_BYTES};
pub use view::{Layout, Owner, Readiness, View, COUNTERS, FIRST_CELL, FIRST_ON_GPU, SLOTS_MAX};
pub use wait::Backoff;

use directory::{Directory, Row};
use parking_lot::RwLock;
use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::Arc;
use thiserror::Error;

/// Version of everything that ranks share: directory, segments, RTS.
pub const PROTOCOL_VERSION: u16 = 26;

/// Why a rank cannot register.
#[derive(Debug, Error)]
pub enum NodeError {
    /// The directory cannot be opened or created.
    #[error("{path}: {error}; check that /dev/shm is writable and not full")]
    Directory {
        /// Its path.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The directory's name leads to a file of another user's, one that others can open, or no file at all.
    #[error("{0} is not a private file of this user; remove it, or have its owner do so")]
    Untrusted(PathBuf),
    /// The directory is in use by something that speaks another protocol, or is corrupt.
    #[error("{0} is in use by another version of the library: preload the same version into all ranks, or, if no job runs, remove it")]
    Foreign(PathBuf),
    /// The directory has no row left.
    #[error("more than {} ranks of this job on this node", directory::ROWS)]
    Full,
    /// A living process has this rank.
    #[error("rank {world_rank} is already registered by process {pid}")]
    RankTaken {
        /// The rank.
        world_rank: u32,
        /// Who has it.
        pid: u32,
    },
    /// The launcher gave this process another rank: this is a spawned or nested world, or the launcher
    /// belongs to another MPI.
    #[error(
        "this process is rank {world_rank} of its world, but rank {launched} of the launcher's"
    )]
    RankDiffers {
        /// Rank in MPI_COMM_WORLD.
        world_rank: u32,
        /// The launcher's rank for it.
        launched: u32,
    },
    /// The segment cannot be created.
    #[error("no shared memory for messages: {0}")]
    Segment(#[source] io::Error),
}

impl NodeError {
    /// Whether only the meeting place of the ranks is missing, or belongs to another world. This rank can
    /// then still be [`Node::alone`].
    pub fn leaves_alone(&self) -> bool {
        matches!(
            self,
            Self::Directory { .. }
                | Self::Untrusted(_)
                | Self::Foreign(_)
                | Self::Full
                | Self::RankDiffers { .. }
        )
    }

    fn directory(path: &Path, error: io::Error) -> Self {
        Self::Directory {
            path: path.to_owned(),
            error,
        }
    }
}

/// Sizes of this rank's segment, and where the directory is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Folder of the directory.
    pub folder: PathBuf,
    /// Slots, 1 to [`SLOTS_MAX`]; memory is taken as they are used.
    pub slots: u32,
    /// Size of the staging chunks together, bytes.
    pub staging_bytes: u64,
    /// Size of a staging chunk, bytes; rounded up to pages.
    pub chunk_bytes: u32,
    /// Size of a cell for an eager payload, bytes; rounded up to a cache line.
    pub cell_bytes: u32,
    /// Cells.
    pub cells: u32,
    /// Every slot has a sheet for the checksums of its message.
    pub sheets: bool,
    /// Staging for messages over several paths, bytes; memory is taken as it is used.
    pub wide_bytes: u64,
}

/// Least number of cells.
pub const CELLS_MIN: u32 = 64;
/// Most cells, if they are small. With each of eight ranks sending to every other in windows of 16, a rank
/// has 112 messages on their way, and those of the window before, whose end it has not seen yet.
pub const CELLS_MAX: u32 = 256;
/// Beyond [`CELLS_MIN`] no more memory is taken for cells than this.
pub const CELLS_BYTES: u32 = 4 << 20;

impl Default for Options {
    fn default() -> Self {
        Self {
            folder: PathBuf::from("/dev/shm"),
            slots: SLOTS_MAX,
            staging_bytes: 8 << 20,
            chunk_bytes: 1 << 20,
            cell_bytes: 16 << 10,
            cells: CELLS_MIN,
            sheets: false,
            wide_bytes: 48 << 20,
        }
    }
}

impl Options {
    fn layout(&self) -> Layout {
        let chunk_bytes = self.chunk_bytes.clamp(4096, 1 << 30).next_multiple_of(4096);
        let chunks = (self.staging_bytes / u64::from(chunk_bytes)).min(1 << 20) as u32;
        let slots = self.slots.clamp(1, SLOTS_MAX);
        let (wide_block_bytes, wide_blocks) = gpu_page::blocks_of(self.wide_bytes);
        Layout {
            slots,
            chunk_bytes,
            chunks,
            cell_bytes: self.cell_bytes.clamp(64, 1 << 30).next_multiple_of(64),
            cells: self.cells.min(1 << 16),
            sheets: if self.sheets { slots } else { 0 },
            wide_block_bytes,
            wide_blocks,
        }
    }
}

/// This rank among the ranks of its job on this node.
#[derive(Debug)]
pub struct Node {
    launch: Launch,
    directory: Directory,
    own: Arc<Segment>,
    row: Row,
    is_registered: AtomicBool,
    /// Generation of the directory from which on others see this rank.
    entered: u32,
    scanned: AtomicU32,
    known: RwLock<Known>,
}

/// What scans of the directory have found so far.
#[derive(Debug, Default)]
struct Known {
    /// In the order of their ranks: every message looks one up, and they are few.
    peers: Vec<Arc<Peer>>,
    /// All ranks ever seen registered here, ourselves included, reachable or not.
    ranks: HashSet<u32>,
    /// Those of them whose segments could not be opened.
    refused: HashSet<u32>,
}

impl Known {
    fn place(&self, world_rank: u32) -> Result<usize, usize> {
        self.peers
            .binary_search_by_key(&world_rank, |peer| peer.world_rank())
    }

    fn peer(&self, world_rank: u32) -> Option<&Arc<Peer>> {
        self.place(world_rank).ok().map(|place| &self.peers[place])
    }
}

impl Node {
    /// Creates this rank's segment and enters it in the directory of its job. Makes no MPI call.
    pub fn register(
        launch: &Launch,
        world_rank: u32,
        options: &Options,
    ) -> Result<Self, NodeError> {
        if let Some(launched) = launch.world_rank.filter(|&launched| launched != world_rank) {
            return Err(NodeError::RankDiffers {
                world_rank,
                launched,
            });
        }
        let open = || Directory::open(&options.folder, launch.hash);
        Self::enter(launch, world_rank, options, open)
    }

    /// A rank that meets no other one, not even of its own node. To each it looks as if it were on a node of
    /// its own, and it knows of no other rank where that is.
    pub fn alone(launch: &Launch, world_rank: u32, options: &Options) -> Result<Self, NodeError> {
        let launch = Launch {
            // None of those that the launcher has counted here will be seen.
            local_size: None,
            ..launch.clone()
        };
        let open = || Directory::alone(launch.hash);
        Self::enter(&launch, world_rank, options, open)
    }

    fn enter(
        launch: &Launch,
        world_rank: u32,
        options: &Options,
        open: impl FnOnce() -> Result<Directory, NodeError>,
    ) -> Result<Self, NodeError> {
        let (pid, start) = proc::own_identity();
        let owner = Owner {
            job: launch.hash,
            world_rank,
            pid,
            start,
        };
        let own = Segment::create(owner, options).map_err(NodeError::Segment)?;
        let number = u16::try_from(own.file_number());
        let memfd =
            number.map_err(|_| NodeError::Segment(io::Error::from_raw_os_error(libc::EMFILE)))?;
        let row = Row {
            pid,
            world_rank,
            start_low: proc::low32(start),
            memfd,
            version: PROTOCOL_VERSION,
        };
        let directory = open()?;
        let entered = directory.register(row).inspect_err(|_| directory.leave())?;
        let node = Self {
            launch: launch.clone(),
            scanned: AtomicU32::new(directory.generation().wrapping_sub(1)),
            directory,
            own: Arc::new(own),
            row,
            entered,
            is_registered: AtomicBool::new(true),
            known: RwLock::default(),
        };
        if node.all_local_known() {
            node.directory.remove_name();
        }
        Ok(node)
    }

    /// The job.
    pub fn launch(&self) -> &Launch {
        &self.launch
    }

    /// Rank of this process in MPI_COMM_WORLD.
    pub fn world_rank(&self) -> u32 {
        self.row.world_rank
    }

    /// This rank's own segment.
    pub fn own(&self) -> &Segment {
        &self.own
    }

    /// This rank's own segment, for uses that outlive a call.
    pub fn own_shared(&self) -> Arc<Segment> {
        Arc::clone(&self.own)
    }

    /// Takes the turn to measure from `holder` (0: nobody). One rank of the node has it at a time. `Err`: who
    /// has it.
    pub fn take_turn(&self, holder: u32) -> Result<(), u32> {
        let own = self.row.world_rank.wrapping_add(1);
        match self.directory.pass_turn(holder, own) {
            now if now == own => Ok(()),
            other => Err(other),
        }
    }

    /// Gives the turn back.
    pub fn give_turn(&self) {
        self.directory
            .pass_turn(self.row.world_rank.wrapping_add(1), 0);
    }

    /// A rank of this node's job has used device memory. One relaxed load.
    pub fn device_in_use(&self) -> bool {
        self.directory.device_in_use()
    }

    /// Says that this rank uses device memory.
    pub fn announce_device_use(&self) {
        self.own.set_device_user();
        self.directory.set_device_in_use();
    }

    /// Another rank of this node (or this one, as its peers see it), if it is registered and its segment is
    /// sound. A known peer costs a look-up; an unknown one a look at the directory, if that has changed.
    pub fn peer(&self, world_rank: u32) -> Option<Arc<Peer>> {
        if let Some(peer) = self.known.read().peer(world_rank) {
            return Some(Arc::clone(peer));
        }
        // Looks also if it has not changed: another thread may have looked meanwhile.
        self.meet();
        self.known.read().peer(world_rank).map(Arc::clone)
    }

    /// The same, if that rank has not said that it cannot open this one's segment. Ask this before a message is
    /// sent, and [`peer`](Self::peer) while it is under way: what a peer writes later must not end the message.
    pub fn destination(&self, world_rank: u32) -> Option<Arc<Peer>> {
        self.peer(world_rank).filter(|peer| self.is_mutual(peer))
    }

    /// All reachable ranks of this node, in the order of their ranks, this one included.
    pub fn peers(&self) -> Vec<Arc<Peer>> {
        self.meet();
        self.known.read().peers.clone()
    }

    /// Whether a rank whose segment this one has open has this one's open, or will.
    pub fn is_mutual(&self, peer: &Peer) -> bool {
        !peer.refuses(self.row.world_rank)
    }

    /// Whether a rank has tried to open this one's segment. Before it has, it may be ready for RTS of others, and
    /// would take one of this rank's for a message that is lost.
    pub fn is_met_by(&self, peer: &Peer) -> bool {
        peer.has_met(self.entered)
    }

    /// Ranks of this node that were ever seen registered, this one included.
    pub fn local_size(&self) -> usize {
        self.meet();
        self.known.read().ranks.len()
    }

    /// True if the launcher's count proves that the rank is on another node: all ranks of this node have
    /// registered, and it was not among them.
    pub fn proves_off_node(&self, world_rank: u32) -> bool {
        self.all_local_known() && !self.known.read().ranks.contains(&world_rank)
    }

    /// How many ranks of this node the launcher has started, or have registered, and how many of them can be
    /// reached, this one included. `None` if all can.
    pub fn out_of_reach(&self) -> Option<(usize, usize)> {
        self.meet();
        let known = self.known.read();
        let launched = self.launch.local_size.map_or(0, |size| size as usize);
        let here = launched.max(known.ranks.len());
        let met = known.peers.iter().filter(|peer| self.is_mutual(peer));
        let met = met.count();
        (met < here).then_some((here, met))
    }

    fn all_local_known(&self) -> bool {
        self.meet();
        let known = self.known.read().ranks.len();
        self.launch
            .local_size
            .is_some_and(|size| known >= size as usize)
    }

    /// If the directory has changed since the last look, opens the segments of all ranks that are there, and lets
    /// them know, also those whose segments cannot be opened. Call it before this rank says that it is ready, and
    /// while it is: ranks that come later send it no RTS until then.
    pub fn meet(&self) {
        let generation = self.directory.generation();
        if generation == self.scanned.load(Ordering::Acquire) {
            return;
        }
        let mut known = self.known.write();
        for row in self.directory.rows() {
            self.take_in(&mut known, row);
        }
        self.own.set_met(generation, known.refused.iter().copied());
        self.scanned.store(generation, Ordering::Release);
    }

    fn take_in(&self, known: &mut Known, row: Row) {
        known.ranks.insert(row.world_rank);
        let is_known = |peer: &Arc<Peer>| {
            let owner = peer.owner();
            owner.pid == row.pid && proc::low32(owner.start) == row.start_low
        };
        if row.version != PROTOCOL_VERSION || known.peer(row.world_rank).is_some_and(is_known) {
            return;
        }
        match Peer::open(
            self.launch.hash,
            row.world_rank,
            row.pid,
            row.start_low,
            row.memfd,
        ) {
            Ok(peer) => {
                // A rank that is ready already need not look for new ones by itself, and gets no RTS until it has.
                if !self.is_met_by(&peer) {
                    peer.ring_doorbell();
                }
                known.refused.remove(&row.world_rank);
                match known.place(row.world_rank) {
                    Ok(place) => known.peers[place] = Arc::new(peer),
                    Err(place) => known.peers.insert(place, Arc::new(peer)),
                }
            }
            Err(error) => {
                let rank = row.world_rank;
                if known.refused.insert(rank) {
                    log::info!("rank {rank} is left to the MPI library: {error}");
                }
            }
        }
    }

    /// Leaves the directory; the last rank removes it. Peers that have this rank's segment mapped keep seeing
    /// it. A second call does nothing, and neither does one in a child that was forked.
    pub fn unregister(&self) {
        let is_ours = std::process::id() == self.row.pid;
        if !is_ours || !self.is_registered.swap(false, Ordering::AcqRel) {
            return;
        }
        self.own.set_finalizing();
        self.directory.unregister(self.row);
        self.directory.leave();
        self.own.ring_doorbell();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.unregister();
    }
}

/// SplitMix64's finalizer (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators"): a
/// bijection.
const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// A digest of words, 64 bits. It does not protect against an adversary, but against what is half written, or
/// written over.
///
/// Both sides of a message wait for it. So words are multiplied in pairs, each pair with keys of its place,
/// and a processor does them all at once (a chain of steps over the words took three times as long).
fn digest<const N: usize>(words: &[u64; N]) -> u64 {
    const { assert!(N % 2 == 0 && N <= DIGEST_WORDS) };
    let mut sum = 0_u64;
    for at in (0..N).step_by(2) {
        let pair = (
            words[at] ^ DIGEST_KEYS[at],
            words[at + 1] ^ DIGEST_KEYS[at + 1],
        );
        let product = u128::from(pair.0) * u128::from(pair.1);
        sum = sum.wrapping_add((product >> 64) as u64 ^ product as u64);
    }
    mix(sum)
}

/// As many words as a message has: the most of which a digest is made.
const DIGEST_WORDS: usize = 22;

/// A key for each word, without a pattern.
const DIGEST_KEYS: [u64; DIGEST_WORDS] = {
    let mut keys = [0; DIGEST_WORDS];
    let mut at = 0;
    while at < DIGEST_WORDS {
        keys[at] = mix((at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        at += 1;
    }
    keys
};

/// The inverse of [`mix`].
const fn unmix(value: u64) -> u64 {
    let value = (value ^ (value >> 31) ^ (value >> 62)).wrapping_mul(0x3196_42b2_d24d_8ec3);
    let value = (value ^ (value >> 27) ^ (value >> 54)).wrapping_mul(0x96de_1b17_3f11_9089);
    value ^ (value >> 30) ^ (value >> 60)
}

#[cfg(test)]
#[path = "node_tests.rs"]
mod tests;
