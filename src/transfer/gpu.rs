//! The CUDA objects that transfers share.

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use crate::config::{Config, ExecutorChoice};
use crate::cuda::{
    chunks, Allocation, Budget, Buffer, Chunks, ContextKey, Copy, Error, Export, Exports, Gathered,
    InFlight, Lanes, Limits, Mapping, MappingStats, Mappings, PinnedBuffer, PinnedPool, Purpose,
    Registrations, Result, Timed, Uuid,
};
use crate::exec::{Exec, ExecutorName, Settings};
use crate::node::{Gone, Parcel, Parcels, Peer, Segment, View, Wide, FILES_MAX, UNIT_BYTES};
use crate::stats::{self, Counter};
use crate::transfer::fault;
use crate::transfer::fetch::protocol::one_owner::Troubles;
use crate::transfer::fetch::Turns;
use crate::transfer::garbage::Garbage;
use crate::transfer::pages::Pages;
use crate::transfer::relays::Relays;
use crate::transfer::route::Survey;
use crate::transfer::Env;

/// A rank's bounce memory for copies that cannot use shared staging, bytes. With all that the options allow
/// by default, cells for eager payloads included, a rank pins 32 MiB, or 64 if one rank owns all copies of a
/// message.
const BOUNCE_BYTES_MAX: usize = 4 << 20;
/// How many allocations' exports are remembered.
const EXPORTS_MAX: usize = 4096;
/// How often a rank may fail to find what it was sent.
const NOT_FOUND_MAX: u32 = 8;
/// How many parcels are taken at a time.
const PARCELS_MAX: usize = 64;
/// How many chunks of each reservation are checked in one go.
const CHUNKS_LOOKED_AT: usize = 64;
/// How many exported allocations are checked in one go for having been freed by the program.
const LOOKED_AT: usize = 32;

/// Lanes, mappings, exports and pinned memory of this rank.
pub struct Gpu {
    lanes: Lanes,
    /// For each GPU: from which sender long messages are read first.
    pub turns: HashMap<Uuid, Turns>,
    mappings: Mappings,
    exports: Exports,
    pinned: PinnedPool,
    /// The budget of pinned memory for multipath messages: this rank's wide staging, and its one-owner plans.
    for_paths: Budget,
    registrations: Registrations,
    /// How many freed allocations each rank had reported at the last look.
    retired: HashMap<u32, u64>,
    /// Ranks with which a put, in either direction, has failed.
    not_put: HashSet<u32>,
    /// Staging on GPUs.
    pub relays: Relays,
    /// Memory that the program has mapped itself, as peers know it.
    chunks: Chunks,
    /// Sends and receives files of such memory, once this rank has met a device buffer.
    parcels: Option<Parcels>,
    /// Nothing that the program considers over still writes to the buffer that was prepared last.
    is_settled: bool,
    /// How often each rank has not found such memory by the files that it was sent.
    not_found: HashMap<u32, u32>,
    /// Measurements while the program runs.
    pub survey: Survey,
    /// Memory for the beginning of this rank's wide staging.
    pub pages: Pages,
    /// This rank's one-owner plans.
    pub exec: Exec,
    /// The failures of these plans.
    pub one_owner: Troubles,
    pub(super) garbage: Garbage,
}

impl Gpu {
    /// Allocates nothing before it is needed.
    pub fn new(config: &Config) -> Gpu {
        let limits = Limits {
            count_max: config.mapping_count as usize,
            bytes_max: config.mappings,
        };
        let for_paths =
            Budget::new(usize::try_from(config.multipath_staging).unwrap_or(usize::MAX));
        Gpu {
            lanes: Lanes::new(),
            turns: HashMap::new(),
            mappings: Mappings::new(limits),
            exports: Exports::new(EXPORTS_MAX),
            pinned: PinnedPool::new(Budget::new(BOUNCE_BYTES_MAX)),
            registrations: Registrations::new(),
            retired: HashMap::new(),
            not_put: HashSet::new(),
            relays: Relays::default(),
            chunks: Chunks::default(),
            parcels: None,
            is_settled: false,
            not_found: HashMap::new(),
            survey: Survey::default(),
            pages: Pages::default(),
            exec: Exec::new(Settings {
                gpu_bytes_max: config.relay_staging,
                host_budget: for_paths.clone(),
                graphs_max: config.graphs as usize,
                forced: match config.executor {
                    ExecutorChoice::Auto => None,
                    ExecutorChoice::Streams => Some(ExecutorName::Streams),
                    ExecutorChoice::Batch => Some(ExecutorName::Batch),
                    ExecutorChoice::Graph => Some(ExecutorName::Graph),
                },
            }),
            for_paths,
            one_owner: Troubles::default(),
            garbage: Garbage::default(),
        }
    }

    /// Makes a buffer of the program ready for copies by the engine, and returns its context. A failure is
    /// tried again: without this, the receiver has no path left.
    pub fn prepare(&mut self, buffer: &Buffer) -> Result<ContextKey> {
        for _ in 1..fault::ATTEMPTS {
            match self.prepare_once(buffer) {
                Err(error) if error.code().is_some() && !error.context_is_gone() => {
                    log::debug!("device buffer {:#x}: {error}", buffer.address);
                    stats::add(Counter::DriverRetries, 1);
                }
                result => return result,
            }
        }
        self.prepare_once(buffer)
    }

    fn prepare_once(&mut self, buffer: &Buffer) -> Result<ContextKey> {
        let key = buffer.context_key()?;
        self.lanes.open(key)?;
        self.is_settled = self.exports.prepare(buffer)? || self.lanes.after_default_streams(key)?;
        Ok(key)
    }

    /// What a peer needs to read the buffer. Also reports freed allocations, since a program that sends from
    /// one new allocation after another frees them, too.
    pub fn export(&mut self, env: &Env, buffer: &Buffer) -> Result<Export> {
        let before = self.exports.exported();
        let export = self.exports.export(buffer);
        if self.exports.exported() != before {
            self.tell_freed(env);
        }
        export
    }

    /// Opens the socket for files that come and go.
    pub fn open_parcels(&mut self, env: &Env) {
        if !env.config.vmm || self.parcels.is_some() {
            return;
        }
        match Parcels::open(env.node.launch().hash, std::process::id()) {
            Ok(parcels) => self.parcels = Some(parcels),
            Err(error) => log::info!(
                "no socket for files of memory that the program maps itself ({error}): such memory is not mapped by peers"
            ),
        }
    }

    /// What a peer needs to read `bytes` from a buffer that the program has mapped itself. Sends the peer the
    /// files of that memory.
    pub fn share(&mut self, env: &Env, peer: &Peer, buffer: &Buffer, bytes: u64) -> Option<Export> {
        let rank = peer.world_rank();
        let is_given_up = self.not_found.get(&rank) >= Some(&NOT_FOUND_MAX);
        let is_virtual = buffer.allocation == Allocation::Virtual;
        // This rank's own copies are launched behind what is under way; a peer's copies are not.
        if !is_virtual || is_given_up || rank == env.world_rank || !self.is_settled {
            return None;
        }
        let parcels = self.parcels.as_ref()?;
        let shared = self.chunks.share(buffer, bytes, rank).ok()?;
        let missing = &shared.missing;
        if missing.is_empty() {
            return Some(shared.export);
        }
        if missing.len() > FILES_MAX || !self.chunks.is_due(buffer.base, rank, bytes) {
            return None;
        }
        let files = missing.iter().map(|chunk| chunks::file_of(buffer, chunk));
        let files = match files.collect::<Result<Vec<OwnedFd>>>() {
            Ok(files) => files,
            Err(error) => {
                log::debug!(
                    "device buffer {:#x}: no files of it: {error}",
                    buffer.address
                );
                self.not_found(rank);
                return None;
            }
        };
        let lent: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        let words = chunks::words(&shared.export, missing);
        let to = (env.node.launch().hash, peer.pid());
        match parcels.send(to, &words, &lent) {
            Ok(()) => {
                stats::add(Counter::ChunksSent, missing.len() as u64);
                self.chunks.sent(buffer.base, rank, missing);
                Some(shared.export)
            }
            // Its queue is full, or it has no socket yet.
            Err(error) => {
                log::debug!("files for rank {rank}: {error}");
                None
            }
        }
    }

    /// A rank has not found memory that the program has mapped itself by the files that it was sent. All
    /// files are sent to it again, up to a limit.
    pub fn not_found(&mut self, rank: u32) {
        let times = self.not_found.entry(rank).or_default();
        *times += 1;
        if *times == NOT_FOUND_MAX {
            log::warn!(
                "rank {rank} does not find memory that this program has mapped itself by the files that it was \
                 sent: messages from there are copied once more on their way"
            );
        }
        self.chunks.lost(rank);
    }

    /// Takes the files that have come.
    fn take_parcels(&mut self) {
        let Some(parcels) = &mut self.parcels else {
            return;
        };
        for _ in 0..PARCELS_MAX {
            match parcels.receive() {
                Ok(Some(Parcel { pid, words, files })) => {
                    let Some((of, chunks)) = chunks::told(&words, files.len()) else {
                        log::debug!("files that nothing is said of, from process {pid}");
                        continue;
                    };
                    let came = chunks.into_iter().zip(files).collect();
                    self.mappings.bring(u64::from(pid), of, came);
                }
                Ok(None) => break,
                Err(error) => {
                    log::debug!("files of peers': {error}");
                    break;
                }
            }
        }
    }

    /// Tells peers which of the allocations that they may have mapped have been freed by the program.
    pub fn tell_freed(&mut self, env: &Env) {
        for (base, number) in self.exports.freed(LOOKED_AT) {
            stats::add(Counter::AllocationsRetired, 1);
            env.node.own().retire(base, number);
        }
    }

    /// Tells peers which reservations are no longer as they were sent. Call this while no message is under
    /// way: a message may lie in chunks that have not changed.
    pub fn tell_changed(&mut self, env: &Env) {
        for (base, number) in self.chunks.gone(CHUNKS_LOOKED_AT) {
            stats::add(Counter::AllocationsRetired, 1);
            env.node.own().retire(base, number);
        }
    }

    /// Unmaps what a peer has freed.
    pub fn let_go(&mut self, peer: &Peer) {
        let Some(gpu_page) = peer.gpu_page() else {
            return;
        };
        let seen = self.retired.entry(peer.world_rank()).or_default();
        let Some(gone) = gpu_page.retired().since(seen) else {
            return;
        };
        let pid = u64::from(peer.pid());
        self.counting(|gpu| match gone {
            Gone::Many => gpu.mappings.forget_unused_of(pid),
            Gone::These(rows) => {
                for (base, number) in rows {
                    gpu.mappings.forget_allocation(pid, base, number);
                }
            }
        });
    }

    /// A put to or from a rank has failed: there will be no more puts. (A later put would not be in order
    /// with a message that is read instead.)
    pub fn put_failed(&mut self, rank: u32) {
        self.not_put.insert(rank);
    }

    /// Whether messages to and from a rank may be put.
    pub fn may_put(&self, rank: u32) -> bool {
        !self.not_put.contains(&rank)
    }

    /// Maps an allocation of a peer.
    pub fn map(
        &mut self,
        context: ContextKey,
        peer: &Peer,
        export: &Export,
    ) -> Result<Arc<Mapping>> {
        self.map_while(context, peer, export, || true)
    }

    /// The same for an allocation that the peer may free meanwhile, see [`Mappings::open_while`].
    pub fn map_while(
        &mut self,
        context: ContextKey,
        peer: &Peer,
        export: &Export,
        is_kept: impl FnOnce() -> bool,
    ) -> Result<Arc<Mapping>> {
        self.let_go(peer);
        let pid = u64::from(peer.pid());
        if chunks::needs(export).is_some() {
            self.take_parcels();
        }
        self.counting(|gpu| gpu.mappings.open_while(context, pid, export, is_kept))
    }

    /// Does something with the mappings, and counts what it did.
    fn counting<T>(&mut self, act: impl FnOnce(&mut Gpu) -> T) -> T {
        let before = self.mappings.stats();
        let result = act(self);
        let after = self.mappings.stats();
        // Usually the mapping is open already.
        let hit = MappingStats {
            hits: after.hits,
            ..before
        };
        if after == hit {
            return result;
        }
        stats::add(Counter::MappingsOpened, after.opened - before.opened);
        stats::add(Counter::MappingsEvicted, after.evicted - before.evicted);
        stats::add(Counter::MappingsRefused, after.refused - before.refused);
        stats::add(Counter::ChunksMapped, after.chunks - before.chunks);
        stats::add(
            Counter::MappingsClosed,
            (after.evicted - before.evicted) + (after.stale - before.stale),
        );
        result
    }

    /// Queues a copy into this rank's memory; [`Gpu::launch`] starts it together with others. The mapping is
    /// kept open until the copy is done. `peer` spreads the copies of different peers over the lanes.
    pub fn pull(
        &mut self,
        context: ContextKey,
        peer: u32,
        copy: Copy,
        mapping: Option<Arc<Mapping>>,
    ) -> Result<InFlight> {
        self.queue_on(context, Purpose::Get, u64::from(peer), copy, mapping)
    }

    /// Queues a copy between pinned and device memory; [`Gpu::launch`] starts it together with others.
    pub fn queue(&mut self, context: ContextKey, purpose: Purpose, copy: Copy) -> Result<InFlight> {
        self.queue_on(context, purpose, 0, copy, None)
    }

    /// As [`Gpu::queue`], on one of the lanes of the purpose, with a mapping that is kept open until it is
    /// done.
    pub fn queue_on(
        &mut self,
        context: ContextKey,
        purpose: Purpose,
        affinity: u64,
        copy: Copy,
        mapping: Option<Arc<Mapping>>,
    ) -> Result<InFlight> {
        self.lanes.add(context, purpose, affinity, copy, mapping)
    }

    /// The next read from a peer must come after the reads from others, see [`Lanes::follow_others`].
    pub fn follow_others(&mut self, context: ContextKey, peer: u32) -> Result<()> {
        self.lanes.follow_others(context, u64::from(peer))
    }

    /// Starts what [`Gpu::pull`] and [`Gpu::queue`] have queued. Whoever queues calls it before giving the
    /// engine's lock back.
    pub fn launch(&mut self) {
        self.lanes.launch();
    }

    /// What [`Gpu::launch`] would start, if these are only gets that others may join, and no more than
    /// `behind` launches are in flight.
    pub fn gathered(&self, behind: usize) -> Option<Gathered> {
        self.lanes.gathered(behind)
    }

    /// Starts what is worth a launch by itself, while more is being queued.
    pub fn launch_ahead(&self) {
        self.lanes.launch_ahead();
    }

    /// Starts one contiguous copy at once.
    pub fn copy(
        &mut self,
        context: ContextKey,
        purpose: Purpose,
        dst: u64,
        src: u64,
        bytes: u64,
    ) -> Result<InFlight> {
        self.copies(context, purpose, &[Copy::Linear { dst, src, bytes }])
    }

    /// Starts a copy between pinned and device memory, together with others if several come one after the
    /// other. This is for the messages of a window, whose order does not matter.
    pub fn copy_soon(
        &mut self,
        context: ContextKey,
        purpose: Purpose,
        copy: Copy,
    ) -> Result<InFlight> {
        self.lanes.submit_soon(context, purpose, copy)
    }

    /// Starts copies at once, one after the other.
    pub fn copies(
        &mut self,
        context: ContextKey,
        purpose: Purpose,
        copies: &[Copy],
    ) -> Result<InFlight> {
        self.lanes.submit(context, purpose, copies)
    }

    /// As [`Gpu::copy`], on one of the lanes of the purpose, with a mapping that is kept open until it is
    /// done.
    pub fn copy_on(
        &mut self,
        context: ContextKey,
        purpose: Purpose,
        affinity: u64,
        copy: Copy,
        mapping: Option<Arc<Mapping>>,
    ) -> Result<InFlight> {
        self.lanes
            .submit_on(context, purpose, affinity, &[copy], mapping)
    }

    /// Starts copies at once, one after the other, and times each on the device.
    pub fn timed(
        &mut self,
        context: ContextKey,
        purpose: Purpose,
        affinity: u64,
        copies: &[Copy],
        mapping: Option<Arc<Mapping>>,
    ) -> Result<(InFlight, Timed)> {
        self.lanes
            .submit_timed(context, purpose, affinity, copies, mapping)
    }

    /// How many launches a lane still has to do.
    pub fn load(&mut self, context: ContextKey, purpose: Purpose, affinity: u64) -> Result<usize> {
        self.lanes.load(context, purpose, affinity)
    }

    /// Pins the block of a rank's wide staging in which a unit lies; as [`Gpu::pin`].
    pub fn pin_wide(&mut self, context: ContextKey, of: &View, unit: u32) {
        if let Some((start, bytes)) = of.wide_block(unit) {
            // SAFETY: segments stay mapped while the node is registered; pins are dropped before that, at
            // finalize.
            unsafe { self.pin(context, start.as_ptr(), bytes) };
        }
    }

    /// Takes a piece of this rank's wide staging, pinned if that works, and returns it with its address.
    /// `None` if all is in use.
    pub fn take_wide(
        &mut self,
        context: ContextKey,
        own: &Segment,
        bytes: u64,
    ) -> Option<(Wide, u64)> {
        let piece = own.take_wide(bytes, |more| self.may_widen(more))?;
        let Some(address) = own.wide(piece.unit, bytes) else {
            own.give_wide(&piece);
            return None;
        };
        self.pin_wide(context, own, piece.unit);
        Some((piece, address.as_ptr().expose_provenance() as u64))
    }

    /// Whether a range of host memory is pinned.
    #[must_use]
    pub fn is_pinned(&self, address: u64, bytes: u64) -> bool {
        let start = std::ptr::without_provenance(address as usize);
        self.registrations.is_registered(start, bytes as usize)
    }

    /// Pins the beginning of this rank's wide staging before a message needs it. Usually, shorter messages
    /// have had memory found for it already.
    pub fn prepare_wide(&mut self, context: ContextKey, own: &Segment) {
        if own.wide_block(0).is_none() && self.pages.wait() {
            if let Some((piece, _)) = self.take_wide(context, own, UNIT_BYTES) {
                own.give_wide(&piece);
            }
        }
    }

    /// Whether this rank's wide staging may have so many more bytes. It keeps them.
    pub fn may_widen(&mut self, bytes: u64) -> bool {
        let Ok(bytes) = usize::try_from(bytes) else {
            return false;
        };
        if self.for_paths.take(bytes) {
            return true;
        }
        self.exec.free_idle_host();
        self.for_paths.take(bytes)
    }

    /// A bounce buffer. `Exhausted` means that there will be one later, when copies have ended.
    pub fn bounce(&self, context: ContextKey, bytes: usize) -> Result<PinnedBuffer> {
        self.pinned.take(context, bytes)
    }

    /// Pins a range of shared staging memory. If that fails, the range works all the same, but slower.
    ///
    /// # Safety
    /// The range stays mapped until [`Gpu::close`].
    pub unsafe fn pin(&mut self, context: ContextKey, start: *mut u8, bytes: usize) {
        // SAFETY: it stays mapped until `close`, which unpins it.
        match unsafe {
            self.registrations
                .register(context, start.cast::<c_void>(), bytes)
        } {
            Ok(()) => {}
            Err(error) => log::debug!("pinning {bytes} bytes of staging: {error}"),
        }
    }

    /// Drops everything that belongs to a peer that has left.
    pub fn forget_peer(&mut self, peer: u64) {
        self.mappings.forget_peer(peer);
    }

    /// Gives everything back, at finalize.
    pub fn close(&mut self) {
        self.exec.close();
        self.lanes.close();
        self.survey.close();
        self.pages.wait();
        self.mappings.clear();
        self.exports.clear();
        self.pinned.clear();
        self.registrations.clear();
        // Some mappings are closed in contexts that only plans have made.
        self.exec.release();
    }
}

/// Whether an error only means that a limit is reached for now.
pub fn is_for_now(error: &Error) -> bool {
    matches!(error, Error::Exhausted(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::node_options;

    #[test]
    fn a_rank_pins_64_mib_by_default() {
        let config = Config::default();
        let segment = node_options(&config);
        let cells = u64::from(segment.cells) * u64::from(segment.cell_bytes);
        let gpu = Gpu::new(&config);
        // Wide staging and this rank's plans share one budget.
        let for_paths = gpu.for_paths.left() as u64;
        assert!(segment.wide_bytes <= for_paths);
        assert_eq!(gpu.exec.staging_in_host_max(), for_paths);
        let sum = cells + segment.staging_bytes + for_paths + BOUNCE_BYTES_MAX as u64;
        assert!(sum <= 64 << 20, "{sum}");
    }

    #[test]
    fn wide_staging_and_plans_share_what_the_option_allows() {
        let config = Config {
            multipath_staging: 32 << 20,
            ..Config::default()
        };
        let mut gpu = Gpu::new(&config);
        assert!(gpu.may_widen(16 << 20));
        assert_eq!(gpu.exec.staging_in_host_max(), 16 << 20);
        assert!(!gpu.may_widen(17 << 20));
        assert!(gpu.may_widen(16 << 20));
        assert_eq!(gpu.exec.staging_in_host_max(), 0);
    }
}
