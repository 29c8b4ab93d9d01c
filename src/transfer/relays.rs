//! Staging memory on GPUs: what this rank exports to its peers, and how it reaches theirs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::HashMap;

use crate::cuda::{
    reach, Buffer, ContextKey, Error, Export, IpcHandle, Mapping, Result, StagedMemory, Uuid,
};
use crate::node::{
    units_of, Exported, GpuPage, GpuRow, OnGpu, Peer, Segment, Taker, RELAY_BYTES_MAX, UNIT_BYTES,
};
use crate::stats::{self, Counter};
use crate::transfer::gpu::{is_for_now, Gpu};
use crate::transfer::route::SURVEY_BYTES;
use crate::transfer::Env;

/// The most staging on one GPU, bytes: together with what the rank uses to measure its links, 64 MiB.
const EXPORTED_BYTES_MAX: u64 = RELAY_BYTES_MAX - SURVEY_BYTES;
/// How often staging on one GPU is tried to be allocated, at most.
const ATTEMPTS: u32 = 3;
/// The time between one wish for staging on a GPU and the next, and how often that time doubles while no wish
/// is granted.
const WISH_AGAIN: Duration = Duration::from_millis(10);
const WISH_DOUBLINGS_MAX: u32 = 10;
/// How long peers have to unmap staging that is given back.
const LET_GO_WAIT: Duration = Duration::from_secs(1);
/// How many troubles are remembered at most.
const TROUBLES_MAX: usize = 4096;

/// How many pieces of this rank's own messages fit into its staging at a time, at least.
const PIECES_MIN: u64 = 4;

/// What this rank knows of staging on GPUs, its own and its peers'.
#[derive(Default)]
pub struct Relays {
    /// One for each row of this rank's list.
    held: Vec<Held>,
    /// How many wishes of peers this rank has seen.
    wishes: u32,
    generation: u64,
    tag: u32,
    /// How often the staging of a rank on one of its GPUs could not be used.
    troubles: HashMap<(u32, u8), u32>,
    /// How often this rank has asked for that staging, and when it may ask again.
    wished: HashMap<(u32, u8), (u32, Instant)>,
    /// Ranks that have pieces and were dead at the last look.
    dead: Vec<u32>,
}

/// A GPU that a message may be relayed over.
#[derive(Clone, Copy, Debug)]
pub struct Relay {
    /// Its identity.
    pub uuid: Uuid,
    /// World rank of the rank that exports staging there, or would.
    pub owner: u32,
    /// Which of the owner's GPUs it is.
    pub row: u8,
    /// Bytes of staging that are exported; 0 before that.
    pub bytes: u64,
}

#[derive(Default)]
struct Held {
    /// A context of the program on the GPU, if the program is known to have one.
    context: Option<ContextKey>,
    memory: Option<StagedMemory>,
    failures: u32,
    /// It is being given back: nobody may take pieces any more.
    is_closing: bool,
    /// Since when it is not announced to peers any more.
    withdrawn: Option<Instant>,
}

/// A piece of this rank's staging on the GPU of its own buffers.
#[derive(Debug)]
pub struct PieceOnGpu {
    /// Its place, as peers know it.
    pub place: OnGpu,
    /// Its address in this process.
    pub address: u64,
    /// The length for which it was taken.
    pub bytes: u64,
    exported: Exported,
    count: u32,
    taker: Taker,
}

impl PieceOnGpu {
    /// Gives it back.
    pub fn give(&self, own: &Segment) {
        let gpus = own.gpu_page().map_or(&[][..], |gpu_page| gpu_page.gpus());
        if let Some(gpu) = gpus.get(usize::from(self.place.row)) {
            let units = gpu.units(&self.exported);
            units.give(self.place.unit, self.count, self.taker);
        }
    }
}

/// Staging memory that copies of this process can use.
#[derive(Clone)]
pub struct Reached {
    /// What its owner has published of it.
    pub exported: Exported,
    /// Its address in this process.
    pub base: u64,
    /// Kept open while in use. None if the staging is this process's own.
    pub mapping: Option<Arc<Mapping>>,
}

impl Relays {
    /// The program has used a buffer: its GPU is one that this rank uses.
    pub fn note(&mut self, env: &Env, buffer: &Buffer, context: ContextKey) {
        let is_known = |held: &Held| held.context.is_some_and(|known| known == context);
        if self.held.iter().any(is_known) || !env.node.own().prepare_gpu_page() {
            return;
        }
        let uuids: Vec<Uuid> = reach::devices().iter().map(|device| device.uuid).collect();
        env.node.own().list_gpus(&uuids, &buffer.uuid);
        self.held.resize_with(uuids.len(), Held::default);
        if let Some(row) = uuids.iter().position(|uuid| *uuid == buffer.uuid) {
            self.held[row].context = Some(context);
        }
    }

    /// Whether peers have asked for staging since it was last allocated.
    pub fn are_wished(&self, env: &Env) -> bool {
        let gpu_page = env.node.own().gpu_page();
        gpu_page.is_some_and(|gpu_page| gpu_page.wishes() != self.wishes)
    }

    /// Allocates what peers have asked for. True if anything was done.
    pub fn serve(&mut self, env: &Env) -> bool {
        let Some(gpu_page) = env.node.own().gpu_page() else {
            return false;
        };
        let wishes = gpu_page.wishes();
        if wishes == self.wishes {
            return false;
        }
        self.wishes = wishes;
        let wished = gpu_page.gpus().iter().enumerate();
        for (row, _) in wished.filter(|(_, gpu)| gpu.take_wish()) {
            if !is_exported_by_another(env, row) {
                self.grant(env, row);
            }
        }
        true
    }

    fn grant(&mut self, env: &Env, row: usize) {
        let Some(held) = self.held.get_mut(row) else {
            return;
        };
        if held.memory.is_some() || held.failures >= ATTEMPTS {
            return;
        }
        let bytes = env.config.relay_staging.min(EXPORTED_BYTES_MAX);
        let context = held.context.filter(ContextKey::is_alive);
        let memory = match context {
            Some(context) => StagedMemory::allocate(context, bytes),
            None => StagedMemory::allocate_on(row as i32, bytes),
        };
        match memory {
            Ok(memory) => {
                self.generation += 1;
                let exported = Exported {
                    base: memory.address(),
                    bytes: memory.bytes(),
                    buffer_id: self.generation,
                    handle: memory.handle().0,
                };
                held.memory = Some(memory);
                env.node.own().publish_relay(row, Some(&exported));
            }
            Err(error) => {
                stats::add(Counter::StagingRefused, 1);
                log::debug!("no staging on GPU {row}: {error}");
                if !is_for_now(&error) {
                    held.failures += 1;
                    if held.failures == 1 {
                        log::warn!(
                            "GPU {row}: {error}; no staging there, messages take fewer paths"
                        );
                    }
                }
            }
        }
    }

    /// Allocates staging on the GPU of one of the program's contexts, for messages of this rank that peers
    /// cannot read in place.
    pub fn stage_own(&mut self, env: &Env, context: ContextKey) {
        if let Some(row) = self.row_of(context) {
            self.grant(env, row);
        }
    }

    fn row_of(&self, context: ContextKey) -> Option<usize> {
        let is_there = |held: &Held| held.context == Some(context);
        self.held.iter().position(is_there)
    }

    /// Staging in one of the program's contexts that is not being given back: its row in this rank's list,
    /// and its address.
    fn own(&self, context: ContextKey) -> Option<(usize, u64)> {
        let row = self.row_of(context)?;
        let held = &self.held[row];
        let memory = held.memory.as_ref().filter(|_| !held.is_closing)?;
        // The program may have destroyed the context that the staging was allocated in.
        (memory.context() == context).then(|| (row, memory.address()))
    }

    /// Whether this rank has staging in one of the program's contexts, and may go on using it.
    pub fn has_own(&self, context: ContextKey) -> bool {
        self.own(context).is_some()
    }

    /// Takes a piece of this staging for so many bytes, or for fewer if there is little staging. None if
    /// there is no staging, or all is in use.
    pub fn take_own(
        &mut self,
        own: &Segment,
        context: ContextKey,
        bytes: u64,
    ) -> Option<PieceOnGpu> {
        let (row, base) = self.own(context)?;
        let gpu = own.gpu_page()?.gpus().get(row)?;
        let exported = gpu.exported().filter(|exported| exported.base == base)?;
        // Several pieces must fit.
        let bytes = bytes.min((exported.bytes / PIECES_MIN).max(UNIT_BYTES));
        let count = units_of(bytes);
        let taker = Taker {
            rank: own.world_rank(),
            tag: self.fresh_tag(),
        };
        let unit = gpu.units(&exported).take(count, taker)?;
        Some(PieceOnGpu {
            place: OnGpu {
                row: row as u8,
                unit,
            },
            address: base + u64::from(unit) * UNIT_BYTES,
            bytes,
            exported,
            count,
            taker,
        })
    }

    /// The GPUs that a message from `sender` may be relayed over. Staging on a GPU comes from a rank that
    /// uses the GPU, otherwise from the first rank that sees it.
    pub fn candidates(&self, env: &Env, sender: u32) -> Vec<Relay> {
        let mut found: Vec<(Relay, bool)> = Vec::new();
        // While one rank is asked, no other is asked, or a GPU would have staging twice.
        let mut asked: Vec<Uuid> = Vec::new();
        for peer in env.node.peers() {
            let owner = peer.world_rank();
            let is_end = owner == env.world_rank || owner == sender;
            let rows = peer.gpu_page().map_or(&[][..], |gpu_page| gpu_page.gpus());
            for (row, gpu) in (0_u8..).zip(rows) {
                let is_used = gpu.is_used();
                let bytes = gpu.exported().map_or(0, |exported| exported.bytes);
                // The GPU of an end's own buffers, or another GPU where that end's program has a context.
                let is_not = is_end && is_used;
                if is_not || self.is_bad(owner, row) {
                    continue;
                }
                if bytes == 0 && self.has_wished(owner, row) {
                    if self.wishes_of(owner, row) < ATTEMPTS {
                        asked.push(gpu.uuid());
                    }
                    continue;
                }
                let relay = Relay {
                    uuid: gpu.uuid(),
                    owner,
                    row,
                    bytes,
                };
                let rank = |relay: &Relay, is_used: bool| (relay.bytes > 0, is_used);
                match found.iter_mut().find(|(known, _)| known.uuid == relay.uuid) {
                    Some(known) if rank(&known.0, known.1) < rank(&relay, is_used) => {
                        *known = (relay, is_used);
                    }
                    Some(_) => {}
                    None => found.push((relay, is_used)),
                }
            }
        }
        let relays = found.into_iter().map(|(relay, _)| relay);
        relays
            .filter(|relay| relay.bytes > 0 || !asked.contains(&relay.uuid))
            .collect()
    }

    /// Asks for staging on a GPU that it would pay to relay messages over.
    pub fn wish(&mut self, env: &Env, relay: &Relay) {
        let key = (relay.owner, relay.row);
        if self.wished.len() >= TROUBLES_MAX {
            return;
        }
        let now = Instant::now();
        let (often, again) = self.wished.entry(key).or_insert((0, now));
        *again = now + WISH_AGAIN * (1 << *often);
        *often = (*often + 1).min(WISH_DOUBLINGS_MAX);
        if let Some(owner) = env.node.peer(relay.owner) {
            owner.wish_for(usize::from(relay.row));
        }
    }

    /// How often this rank has asked for staging on a GPU.
    fn wishes_of(&self, owner: u32, row: u8) -> u32 {
        self.wished
            .get(&(owner, row))
            .map_or(0, |(often, _)| *often)
    }

    /// Whether this rank has asked for staging on a GPU recently.
    fn has_wished(&self, owner: u32, row: u8) -> bool {
        let wished = self.wished.get(&(owner, row));
        wished.is_some_and(|(_, again)| Instant::now() < *again)
    }

    /// A number for a piece that this rank is about to take.
    pub fn fresh_tag(&mut self) -> u32 {
        self.tag = self.tag.wrapping_add(1);
        self.tag
    }

    /// Staging of a rank has failed where it should not have. After several failures, that path is not taken
    /// any more.
    pub fn blame(&mut self, owner: u32, row: u8) {
        if self.troubles.len() < TROUBLES_MAX {
            *self.troubles.entry((owner, row)).or_default() += 1;
        }
    }

    /// Whether staging of a rank has failed too often.
    pub fn is_bad(&self, owner: u32, row: u8) -> bool {
        let troubles = self.troubles.get(&(owner, row));
        troubles.is_some_and(|troubles| *troubles >= ATTEMPTS)
    }

    /// Whether peers may have pieces of this rank's staging.
    pub fn are_lent(&self) -> bool {
        self.held.iter().any(|held| held.memory.is_some())
    }

    /// Takes back the pieces of ranks that were dead at the last look, too. By now their receivers have
    /// noticed that, or else they will find that the pieces belong to another rank.
    pub fn reclaim(&mut self, env: &Env) {
        let Some(gpu_page) = env.node.own().gpu_page() else {
            return;
        };
        let before = std::mem::take(&mut self.dead);
        for (gpu, held) in gpu_page.gpus().iter().zip(&self.held) {
            let Some(exported) = gpu.exported().filter(|_| held.memory.is_some()) else {
                continue;
            };
            let units = gpu.units(&exported);
            let mut takers: Vec<u32> = units.takers().collect();
            takers.sort_unstable();
            takers.dedup();
            for rank in takers {
                if env.node.peer(rank).is_none_or(|taker| !taker.alive()) {
                    if before.contains(&rank) {
                        stats::add(Counter::UnitsReclaimed, units.reclaim(rank));
                    } else {
                        self.dead.push(rank);
                    }
                }
            }
        }
    }

    /// Lets no peer take pieces any more, and takes back the pieces of dead ones. True once nobody has a
    /// piece.
    pub fn close(&mut self, env: &Env) -> bool {
        let Some(gpu_page) = env.node.own().gpu_page() else {
            return true;
        };
        let held = gpu_page.gpus().iter().zip(&self.held);
        let mine = held.filter(|(_, held)| held.memory.is_some());
        mine.fold(true, |is_closed, (gpu, _)| close(env, gpu) & is_closed)
    }

    /// Gives back staging on GPUs that are short of memory, once nobody has a piece and peers have had time
    /// to unmap it. Peers may ask for it again.
    pub fn mind_memory(&mut self, env: &Env) {
        let Some(gpu_page) = env.node.own().gpu_page() else {
            return;
        };
        for (row, (gpu, held)) in gpu_page.gpus().iter().zip(&mut self.held).enumerate() {
            let Some(memory) = &held.memory else { continue };
            held.is_closing = held.is_closing || memory.is_in_the_way();
            if !held.is_closing {
                continue;
            }
            if let Some(withdrawn) = held.withdrawn {
                if withdrawn.elapsed() > LET_GO_WAIT {
                    (held.memory, held.withdrawn, held.is_closing) = (None, None, false);
                    stats::add(Counter::RelaysReturned, 1);
                    log::info!("GPU {row} is short of memory: staging on it was given back");
                }
            } else if close(env, gpu) {
                if let Some(exported) = gpu.exported() {
                    env.node.own().publish_relay(row, None);
                    env.node.own().retire(exported.base, exported.buffer_id);
                }
                held.withdrawn = Some(Instant::now());
            }
        }
    }

    /// Gives all staging back, once it is closed. Staging that peers still use stays until the process ends.
    pub fn free(&mut self, env: &Env, is_closed: bool) {
        for (row, held) in self.held.iter_mut().enumerate() {
            if let Some(memory) = held.memory.take() {
                env.node.own().publish_relay(row, None);
                if !is_closed {
                    std::mem::forget(memory);
                }
            }
        }
    }
}

/// Whether this rank and another use the same GPU.
pub fn share_a_gpu(env: &Env, peer: &Peer) -> bool {
    let own = env.node.own().gpu_page().map_or(&[][..], GpuPage::gpus);
    let others = peer.gpu_page().map_or(&[][..], GpuPage::gpus);
    let mut used = own.iter().filter(|gpu| gpu.is_used());
    used.any(|gpu| {
        let is_same = |other: &GpuRow| other.is_used() && other.uuid() == gpu.uuid();
        others.iter().any(is_same)
    })
}

/// Whether another rank that sees one of this rank's GPUs has staging there already.
fn is_exported_by_another(env: &Env, row: usize) -> bool {
    let own = env
        .node
        .own()
        .gpu_page()
        .and_then(|gpu_page| gpu_page.gpus().get(row));
    let Some(uuid) = own.map(GpuRow::uuid) else {
        return false;
    };
    let peers = env.node.peers();
    let mut others = peers
        .iter()
        .filter(|peer| peer.world_rank() != env.world_rank && peer.alive());
    others.any(|peer| {
        let rows = peer.gpu_page().map_or(&[][..], |gpu_page| gpu_page.gpus());
        let is_there = |gpu: &GpuRow| gpu.uuid() == uuid && gpu.exported().is_some();
        rows.iter().any(is_there)
    })
}

/// Lets nobody take pieces of what is exported on a GPU, and takes back those of dead ranks. True once nobody
/// has a piece.
fn close(env: &Env, gpu: &GpuRow) -> bool {
    let Some(exported) = gpu.exported() else {
        return true;
    };
    let units = gpu.units(&exported);
    if units.close() {
        return true;
    }
    let mut takers: Vec<u32> = units.takers().collect();
    takers.dedup();
    let is_dead = |rank: &u32| env.node.peer(*rank).is_none_or(|taker| !taker.alive());
    takers
        .into_iter()
        .filter(is_dead)
        .for_each(|rank| stats::add(Counter::UnitsReclaimed, units.reclaim(rank)));
    false
}

impl Gpu {
    /// Staging that a rank exports on one of its GPUs, for copies in a context of this process. None if
    /// nothing is exported yet.
    pub fn reach_relay(
        &mut self,
        context: ContextKey,
        owner: &Peer,
        row: u8,
    ) -> Result<Option<Reached>> {
        let gpu = owner
            .gpu_page()
            .and_then(|gpu_page| gpu_page.gpus().get(usize::from(row)));
        let Some((uuid, exported)) = gpu.and_then(|gpu| Some((gpu.uuid(), gpu.exported()?))) else {
            return Ok(None);
        };
        if owner.pid() == std::process::id() {
            let held = self.relays.held.get_mut(usize::from(row));
            let memory = held.and_then(|held| held.memory.as_mut());
            let Some(memory) = memory.filter(|memory| memory.address() == exported.base) else {
                return Ok(None);
            };
            if !memory.is_own_context() {
                // Only the program may turn on peer access between two of its contexts.
                return Err(Error::AlreadyMapped);
            }
            memory.reach_from(context)?;
            return Ok(Some(Reached {
                base: exported.base,
                exported,
                mapping: None,
            }));
        }
        let export = Export {
            handle: IpcHandle(exported.handle),
            base: exported.base,
            size: exported.bytes,
            offset: 0,
            buffer_id: exported.buffer_id,
            uuid,
        };
        let mapping = self.map(context, owner, &export)?;
        Ok(Some(Reached {
            exported,
            base: mapping.address_of(0),
            mapping: Some(mapping),
        }))
    }
}
