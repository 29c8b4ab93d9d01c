//! Peers' allocations mapped into this process.
//!
//! A mapping lives as long as somebody holds it: an [`Arc`] in the cache, one in every transfer that uses it.
//! Opening costs 14–30 ms for the first allocation of a peer and 27 µs for each one after that, whatever its
//! size.
//!
//! The program, or another library in it, may have the same allocation open. Driver 580 counts: in the same
//! context it is opened again and lies at the same address, and each user closes it separately. In another
//! context of the same device it is refused (`INVALID_HANDLE`). Drivers may also answer `ALREADY_MAPPED`.
//! Allocations that are refused come through host memory.

use super::chunks::{self, Chunk};
use super::error::{Error, Result};
use super::export::Export;
use super::mirror::Mirror;
use super::state::{ContextKey, Entered};
use super::types::{code, Uuid, IPC_LAZY_ENABLE_PEER_ACCESS};
use super::{driver::Driver, pointer, reach};
use crate::stats::{self, Counter};
use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// The key of a mapping. A peer's address alone is not enough: after the allocation is freed, another one may
/// have it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Key {
    peer: u64,
    uuid: Uuid,
    base: u64,
    buffer_id: u64,
    context: ContextKey,
}

/// A peer's allocation in this process. Closed when the last holder drops it.
#[derive(Debug)]
pub struct Mapping {
    key: Key,
    size: u64,
    address: u64,
    /// Set if it is mapped chunk by chunk; otherwise the driver has opened it as a whole.
    mirror: Option<Mirror>,
    open_bytes: Arc<AtomicU64>,
}

impl Mapping {
    /// Whether everything that a message needs is mapped.
    fn serves(&self, export: &Export) -> bool {
        match (&self.mirror, chunks::needs(export)) {
            (Some(mirror), Some(range)) => mirror.holds(range),
            // The peer may say another length each time.
            (None, None) => export.size <= self.size,
            _ => false,
        }
    }

    /// Bytes that count: almost nothing of a reservation may be mapped.
    fn counted(&self) -> u64 {
        if self.mirror.is_some() {
            0
        } else {
            self.size
        }
    }

    /// Address, in this process, of a byte of the allocation.
    #[must_use]
    pub fn address_of(&self, offset: u64) -> u64 {
        debug_assert!(
            offset <= self.size,
            "offset {offset} beyond a mapping of {} bytes",
            self.size
        );
        self.address + offset
    }

    /// Bytes of the allocation.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The GPU that it is on.
    pub(super) fn gpu(&self) -> Uuid {
        self.key.uuid
    }

    /// The context in which it was opened. Copies from and to it run on lanes of this context.
    #[must_use]
    pub fn context(&self) -> ContextKey {
        self.key.context
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.open_bytes.fetch_sub(self.counted(), Ordering::Relaxed);
        if self.mirror.is_some() {
            return;
        }
        // If the context is gone, so is the mapping.
        let Ok(entered) = Entered::enter_same(self.key.context) else {
            return;
        };
        // SAFETY: opened by `open_in`, closed only here, and no transfer holds it.
        if let Err(error) = unsafe { entered.driver().ipc_close_mem_handle(self.address) } {
            log::debug!("closing a mapping: {error}");
        }
    }
}

/// Bounds of the cache.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Mappings that may be open. No more are opened.
    pub count_max: usize,
    /// Bytes of peers' allocations that may stay open unused. What transfers hold at one time may go beyond
    /// that.
    pub bytes_max: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            count_max: 1024,
            bytes_max: 16 << 40,
        }
    }
}

/// Two devices, one of them a peer's: memory of the peer is opened in a context of the other.
type Pair = (u64, Uuid, ContextKey);

/// Attempts to open memory of a pair that has never worked, before the pair is left alone. The driver's
/// answer may have been about that one handle.
const UNSURE_ATTEMPTS: u32 = 2;

/// What attempts have shown of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    Works,
    /// Refused so many times, for reasons that may pass.
    Unsure(u32),
    /// Its messages go through host memory.
    Refused,
}

impl Shown {
    /// After one more attempt.
    fn after(before: Option<Shown>, result: &Result<u64>) -> Option<Shown> {
        match (before, result) {
            (_, Ok(_)) => Some(Shown::Works),
            (Some(Shown::Works | Shown::Refused), Err(_)) => before,
            // It is open here already, so it can be opened.
            (_, Err(Error::AlreadyMapped)) => before,
            (_, Err(error)) if error.is_refusal() => Some(Shown::Refused),
            (_, Err(error)) if error.code().is_none() || error.context_is_gone() => before,
            (Some(Shown::Unsure(refusals)), Err(_)) if refusals + 1 >= UNSURE_ATTEMPTS => {
                Some(Shown::Refused)
            }
            (Some(Shown::Unsure(refusals)), Err(_)) => Some(Shown::Unsure(refusals + 1)),
            (None, Err(_)) => Some(Shown::Unsure(1)),
        }
    }
}

/// Pairs that are remembered. Ranks times devices of a node are far fewer.
const PAIRS_MAX: usize = 4096;

struct Row {
    mapping: Arc<Mapping>,
    used: u64,
}

impl Row {
    fn in_use(&self) -> bool {
        Arc::strong_count(&self.mapping) > 1
    }
}

/// Counts of what the cache has done.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct MappingStats {
    /// Handles opened.
    pub opened: u64,
    /// Requests answered by an open mapping.
    pub hits: u64,
    /// Mappings dropped for the bounds.
    pub evicted: u64,
    /// Mappings dropped because their allocation was gone.
    pub stale: u64,
    /// Handles that were open in this process, and could not be opened once more.
    pub already_mapped: u64,
    /// Handles that the driver did not open.
    pub refused: u64,
    /// Chunks mapped by their files.
    pub chunks: u64,
}

/// The open mappings of this process.
pub struct Mappings {
    rows: HashMap<Key, Row, FxBuildHasher>,
    limits: Limits,
    clock: u64,
    open_bytes: Arc<AtomicU64>,
    stats: MappingStats,
    pairs: HashMap<Pair, Shown>,
    /// Files of chunks that peers have sent and no message has needed yet: by process, base and number.
    files: HashMap<(u64, u64, u64), Vec<(Chunk, OwnedFd)>>,
}

/// The most files that are kept. A peer whose files are not kept sends them again.
const FILES_MAX: usize = 256;

impl Mappings {
    /// An empty cache.
    #[must_use]
    pub fn new(limits: Limits) -> Mappings {
        Mappings {
            rows: HashMap::default(),
            limits,
            clock: 0,
            open_bytes: Arc::new(AtomicU64::new(0)),
            stats: MappingStats::default(),
            pairs: HashMap::new(),
            files: HashMap::new(),
        }
    }

    /// A mapping of a peer's allocation for use in a context of this process.
    ///
    /// `peer` names the exporting process, and is never used for another one. The result keeps the mapping
    /// open; hold it until the copies are complete. [`Error::AlreadyMapped`]: the allocation is open in this
    /// process, by the program or in another context, and the driver does not open it again.
    /// [`Error::PairRefused`]: attempts have shown that memory of the peer's device cannot be opened here,
    /// and no further attempt was made.
    pub fn open(
        &mut self,
        context: ContextKey,
        peer: u64,
        export: &Export,
    ) -> Result<Arc<Mapping>> {
        self.open_while(context, peer, export, || true)
    }

    /// The same for an allocation that its owner may free meanwhile. If the open fails and it is not certain
    /// that the allocation was kept, the failure shows nothing of the peer's other allocations.
    pub fn open_while(
        &mut self,
        context: ContextKey,
        peer: u64,
        export: &Export,
        is_kept: impl FnOnce() -> bool,
    ) -> Result<Arc<Mapping>> {
        let key = Key {
            peer,
            uuid: export.uuid,
            base: export.base,
            buffer_id: export.buffer_id,
            context,
        };
        self.clock += 1;
        if let Some(row) = self.rows.get_mut(&key) {
            if context.is_alive() {
                row.used = self.clock;
                let mapping = Arc::clone(&row.mapping);
                if !mapping.serves(export) {
                    self.fill(&key, &mapping)?;
                    if !mapping.serves(export) {
                        return Err(match mapping.mirror {
                            Some(_) => Error::Exhausted("chunks that have come"),
                            None => Error::Shorter,
                        });
                    }
                }
                self.stats.hits += 1;
                return Ok(mapping);
            }
            self.rows.remove(&key);
            return Err(Error::ContextLost);
        }
        if self.pairs.get(&pair_of(&key)) == Some(&Shown::Refused) {
            return Err(Error::PairRefused);
        }
        self.drop_stale(&key, export);
        let is_whole = chunks::needs(export).is_none();
        self.make_room(if is_whole { export.size } else { 1 });
        if self.rows.len() >= self.limits.count_max {
            return Err(Error::Exhausted("open mappings"));
        }
        let mapping = Arc::new(self.open_handle(key, export, is_kept)?);
        self.rows.insert(
            key,
            Row {
                mapping: Arc::clone(&mapping),
                used: self.clock,
            },
        );
        Ok(mapping)
    }

    /// A process has sent files of chunks of a reservation: its base, and the number by which messages name
    /// it.
    pub fn bring(&mut self, peer: u64, [base, number]: [u64; 2], came: Vec<(Chunk, OwnedFd)>) {
        let kept: usize = self.files.values().map(Vec::len).sum();
        if kept + came.len() > FILES_MAX {
            self.files.clear();
        }
        if came.len() <= FILES_MAX {
            self.files
                .entry((peer, base, number))
                .or_default()
                .extend(came);
        }
    }

    /// Maps the chunks whose files have come.
    fn fill(&mut self, key: &Key, mapping: &Mapping) -> Result<()> {
        let files = self.files.remove(&(key.peer, key.base, key.buffer_id));
        let Some(mirror) = &mapping.mirror else {
            return Ok(());
        };
        for (chunk, file) in files.into_iter().flatten() {
            match mirror.take(&chunk, file.as_fd()) {
                Ok(()) => self.stats.chunks += 1,
                // The file was sent twice.
                Err(Error::AlreadyMapped) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Drops every mapping of a peer: it has left, or is dead. Those in use close when their transfers end.
    pub fn forget_peer(&mut self, peer: u64) {
        self.files.retain(|(whose, ..), _| *whose != peer);
        self.rows.retain(|key, _| key.peer != peer);
        self.pairs.retain(|pair, _| pair.0 != peer);
    }

    /// Drops the mappings of an allocation that its exporter has freed.
    pub fn forget_allocation(&mut self, peer: u64, base: u64, buffer_id: u64) {
        self.files.remove(&(peer, base, buffer_id));
        let before = self.rows.len();
        self.rows
            .retain(|key, _| (key.peer, key.base, key.buffer_id) != (peer, base, buffer_id));
        self.stats.stale += (before - self.rows.len()) as u64;
    }

    /// Drops the mappings of a peer that nobody uses, because some of its allocations are gone.
    pub fn forget_unused_of(&mut self, peer: u64) {
        let before = self.rows.len();
        self.rows
            .retain(|key, row| key.peer != peer || row.in_use());
        self.stats.stale += (before - self.rows.len()) as u64;
    }

    /// Closes all that is not in use.
    pub fn clear(&mut self) {
        self.rows.clear();
    }

    /// Closes unused mappings beyond the bounds, the least recently used first. Call it when transfers end.
    pub fn trim(&mut self) {
        self.make_room(0);
    }

    /// Mappings in the cache.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether none is open.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Bytes open, those in the cache and those that only transfers hold.
    #[must_use]
    pub fn open_bytes(&self) -> u64 {
        self.open_bytes.load(Ordering::Relaxed)
    }

    /// What the cache has done so far.
    #[must_use]
    pub fn stats(&self) -> MappingStats {
        self.stats
    }

    fn open_handle(
        &mut self,
        key: Key,
        export: &Export,
        is_kept: impl FnOnce() -> bool,
    ) -> Result<Mapping> {
        if chunks::needs(export).is_some() {
            return self.open_mirror(key, export);
        }
        let opened = open_in(key.context, export);
        let opened = opened.map_err(|error| told(error, || self.is_open_elsewhere(&key)));
        let is_long = opened.as_ref().is_ok_and(|(_, is_long)| *is_long);
        let opened = opened.map(|(address, _)| address);
        if opened.is_ok() || is_kept() {
            self.learn(&key, &opened);
        }
        match opened {
            Ok(address) => {
                self.stats.opened += 1;
                self.open_bytes.fetch_add(export.size, Ordering::Relaxed);
                let mapping = Mapping {
                    key,
                    size: export.size,
                    address,
                    mirror: None,
                    open_bytes: Arc::clone(&self.open_bytes),
                };
                match is_long {
                    true => Ok(mapping),
                    false => Err(Error::Shorter),
                }
            }
            Err(Error::AlreadyMapped) => {
                self.stats.already_mapped += 1;
                Err(Error::AlreadyMapped)
            }
            Err(error) => {
                self.stats.refused += u64::from(error.code().is_some());
                Err(error)
            }
        }
    }

    /// Addresses for a peer's reservation, with the chunks that have come.
    fn open_mirror(&mut self, key: Key, export: &Export) -> Result<Mapping> {
        if !self
            .files
            .contains_key(&(key.peer, key.base, key.buffer_id))
        {
            return Err(Error::Exhausted("chunks that have come"));
        }
        let mirror = Mirror::reserve(key.context, export.size)?;
        let mapping = Mapping {
            key,
            size: export.size,
            address: mirror.address(),
            mirror: Some(mirror),
            open_bytes: Arc::clone(&self.open_bytes),
        };
        let filled = self.fill(&key, &mapping).map(|()| mapping.address);
        self.stats.refused += u64::from(filled.is_err_and(|error| error.code().is_some()));
        filled?;
        if !mapping.serves(export) {
            return Err(Error::Exhausted("chunks that have come"));
        }
        self.stats.opened += 1;
        Ok(mapping)
    }

    /// Whether the allocation is in the cache for another context.
    fn is_open_elsewhere(&self, key: &Key) -> bool {
        let here = |other: &Key| Key {
            context: key.context,
            ..*other
        };
        self.rows.keys().any(|other| here(other) == *key)
    }

    /// Remembers the outcome of an attempt, so that a pair that does not work is not tried with every
    /// message.
    fn learn(&mut self, key: &Key, opened: &Result<u64>) {
        let pair = pair_of(key);
        let before = self.pairs.get(&pair).copied();
        let Some(after) = Shown::after(before, opened) else {
            return;
        };
        if before.is_some() || self.pairs.len() < PAIRS_MAX {
            self.pairs.insert(pair, after);
        }
        if let (Shown::Refused, Err(error)) = (after, opened) {
            log::info!(
                "device memory of process {} cannot be mapped here: {error}; its messages come through host memory",
                key.peer
            );
        }
    }

    /// Drops what the new export proves gone: allocations of the same peer and device that overlap its range,
    /// and mappings whose context is gone. They keep freed memory alive, and are never asked for again.
    fn drop_stale(&mut self, new: &Key, export: &Export) {
        let end = export.base.saturating_add(export.size);
        let before = self.rows.len();
        self.rows.retain(|key, row| {
            let same_memory = key.peer == new.peer && key.uuid == new.uuid;
            let overlaps =
                key.base < end && export.base < key.base.saturating_add(row.mapping.size);
            let same_allocation = (key.base, key.buffer_id) == (export.base, export.buffer_id);
            let same_handle_other_context =
                key.context.handle == new.context.handle && key.context != new.context;
            let gone = same_memory && overlaps && !same_allocation;
            !(gone || same_handle_other_context)
        });
        self.stats.stale += (before - self.rows.len()) as u64;
    }

    /// Closes least recently used mappings that nobody holds, until another one of `bytes` fits, or none is
    /// left. A mapping that a transfer holds must not be closed under its copies, and no message is kept
    /// waiting for it. In that case the open mappings exceed the bound in bytes, by no more than the messages
    /// under way need.
    fn make_room(&mut self, bytes: u64) {
        let count_max = self.limits.count_max.saturating_sub(usize::from(bytes > 0));
        while self.rows.len() > count_max
            || self.open_bytes().saturating_add(bytes) > self.limits.bytes_max
        {
            let oldest = self
                .rows
                .iter()
                .filter(|(_, row)| !row.in_use())
                .min_by_key(|(_, row)| row.used);
            let Some(key) = oldest.map(|(key, _)| *key) else {
                return;
            };
            self.rows.remove(&key);
            self.stats.evicted += 1;
        }
    }
}

/// What an answer of the driver's means for an allocation that may be open already, by the program or in
/// another context of the same device. In that case nothing is wrong with the handle or with the two devices.
fn told(error: Error, is_open_elsewhere: impl FnOnce() -> bool) -> Error {
    if error.is(code::ALREADY_MAPPED) || (error.is(code::INVALID_HANDLE) && is_open_elsewhere()) {
        Error::AlreadyMapped
    } else {
        error
    }
}

fn pair_of(key: &Key) -> Pair {
    (key.peer, key.uuid, key.context)
}

/// The address, and whether as much is mapped there as the peer says.
fn open_in(context: ContextKey, export: &Export) -> Result<(u64, bool)> {
    let entered = Entered::enter_same(context)?;
    let mut address = 0;
    let opened = entered.driver().ipc_open_mem_handle(
        &mut address,
        export.handle,
        IPC_LAZY_ENABLE_PEER_ACCESS,
    );
    remember(&entered, &export.uuid, &opened);
    opened.map(|()| (address, is_mapped(entered.driver(), address, export.size)))
}

/// Whether so many bytes are mapped from an address on. On an H200 (driver 13.0) the driver gives the exporter's own length, to
/// the byte. If it does not answer when it is asked again, the peer is believed.
fn is_mapped(driver: &Driver, address: u64, size: u64) -> bool {
    let asked = pointer::address_range(driver, address).or_else(|_| {
        stats::add(Counter::DriverRetries, 1);
        pointer::address_range(driver, address)
    });
    asked.map_or(true, |(base, bytes)| {
        address.checked_add(size) <= Some(base.saturating_add(bytes)) && size <= bytes
    })
}

/// Remembers whether the pair of devices works, so that one that does not is tried only once.
fn remember(entered: &Entered, other: &Uuid, opened: &Result<()>) {
    let mut device = 0;
    if entered.driver().ctx_get_device(&mut device).is_err() {
        return;
    }
    let Some(own) = reach::devices().iter().find(|info| info.device == device) else {
        return;
    };
    match opened {
        Ok(()) => reach::record_attempt(&own.uuid, other, true),
        Err(error)
            if [code::PEER_ACCESS_UNSUPPORTED, code::NOT_SUPPORTED]
                .iter()
                .any(|code| error.is(*code)) =>
        {
            reach::record_attempt(&own.uuid, other, false);
        }
        // Anything else may be the fault of this one handle.
        Err(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(code: i32) -> Result<u64> {
        Err(Error::Driver {
            function: "cuIpcOpenMemHandle",
            code,
        })
    }

    fn after(results: &[Result<u64>]) -> Option<Shown> {
        results.iter().fold(None, Shown::after)
    }

    #[test]
    fn a_pair_that_cannot_be_is_tried_once() {
        // Invalid device, no peer access, not permitted, not supported.
        for code in [101, 217, 800, 801] {
            assert_eq!(after(&[refused(code)]), Some(Shown::Refused), "{code}");
        }
    }

    #[test]
    fn what_may_pass_is_tried_again_and_not_for_ever() {
        let unknown = refused(code::UNKNOWN);
        assert_eq!(after(&[unknown]), Some(Shown::Unsure(1)));
        assert_eq!(after(&[unknown, Ok(1)]), Some(Shown::Works));
        assert_eq!(after(&[unknown, unknown]), Some(Shown::Refused));
        let told =
            |result: Result<u64>, elsewhere| result.map_err(|error| told(error, || elsewhere));
        assert_eq!(after(&[told(refused(code::ALREADY_MAPPED), false)]), None);
        assert_eq!(after(&[told(refused(code::INVALID_HANDLE), true)]), None);
        let wrong = told(refused(code::INVALID_HANDLE), false);
        assert_eq!(wrong, refused(code::INVALID_HANDLE));
        assert_eq!(after(&[Err(Error::AlreadyMapped)]), None);
        assert_eq!(after(&[Err(Error::ContextLost)]), None);
    }

    #[test]
    fn a_pair_that_has_worked_is_never_given_up() {
        let lasting = [Ok(1), refused(217), refused(2), refused(2), refused(2)];
        assert_eq!(after(&lasting), Some(Shown::Works));
    }
}
