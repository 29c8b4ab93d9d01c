//! The sender's part of a multipath message with two owners. Chunk by chunk, it fills pieces of staging in
//! pinned host memory and on other GPUs, as far as its receiver leaves them to it.
//!
//! The receiver can read this rank's buffer itself and needs none of this: a failure or a delay here costs
//! speed only. A put into the receiver's buffer differs in one thing: both sides wait until it writes nothing
//! any more.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::cuda::{ContextKey, Copy, Error, Export, InFlight, Mapping, Purpose};
use crate::node::staged_part::{Filled, Offer, StagedPartOf, STAGED_PARTS, STAGED_PART_ENTRIES};
use crate::node::{units_of, Asked, Part, Peer, StagedPartError, Taker, Way, Wide, UNIT_BYTES};
use crate::stats::{self, Counter};
use crate::trace;
use crate::transfer::fault::{self, Of, Path, Trouble};
use crate::transfer::gpu::Gpu;
use crate::transfer::relays::Reached;
use crate::transfer::story::Parts;
use crate::transfer::Env;

/// With so many launches in flight on a lane no chunk is added: enough that the engine does not run dry
/// between two looks, few enough that chunks which the receiver may claim back are not launched too early.
const LAUNCHED_MAX: usize = 3;
/// The same for each of two lanes that are used in turn.
const LAUNCHED_IN_TURN_MAX: usize = 2;

/// The reason, once a put has failed.
const NOT_PUT: &str = "a put between these ranks has failed before";
/// The lane of the put streams that few relays use.
pub(crate) const PUT_LANE: u64 = 3;

/// The staged parts of one message.
pub struct StagedParts {
    peer: Arc<Peer>,
    asked: Asked,
    /// The receiver's offer whose chunks must be claimed first.
    behind: Option<Asked>,
    context: ContextKey,
    source: u64,
    staged_parts: Vec<StagedPart>,
}

/// One staged part.
struct StagedPart {
    number: usize,
    part: Part,
    staging: Staging,
    /// Chunks claimed, and chunks put into the ring.
    claimed: u32,
    filled: u32,
    /// Pieces being filled, oldest first.
    filling: VecDeque<Filling>,
    /// Pieces in the ring, oldest first.
    held: VecDeque<Piece>,
    /// No more chunks are claimed.
    is_over: bool,
    /// It is given up: pieces being filled are only waited for, to give them back.
    is_left: bool,
    /// It will be given up once nothing writes to the receiver's buffer any more.
    is_failed: bool,
}

enum Staging {
    Host,
    Relay {
        owner: Arc<Peer>,
        row: u8,
        reached: Reached,
    },
    /// No staging: the receiver's buffer, and its address in this process.
    Put {
        mapping: Arc<Mapping>,
        to: u64,
    },
}

struct Filling {
    copy: InFlight,
    piece: Piece,
    entry: Filled,
}

enum Piece {
    Host(Wide),
    Relay { unit: u32, count: u32, taker: Taker },
    None,
}

impl StagedParts {
    /// Begins what a receiver has offered for a message of `length` bytes from `source` on.
    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    pub fn begin(
        env: &Env,
        gpu: &mut Gpu,
        peer: &Arc<Peer>,
        asked: Asked,
        context: ContextKey,
        source: u64,
        length: u64,
    ) -> StagedParts {
        let mut staged_parts = StagedParts {
            peer: Arc::clone(peer),
            asked,
            behind: offer_of(peer, asked).and_then(|offer| offer.behind(asked.tag)),
            context,
            source,
            staged_parts: Vec::new(),
        };
        for number in 0..STAGED_PARTS {
            let Some(staged_part) = staged_part_of(peer, asked, number) else {
                break;
            };
            let Ok(part) = staged_part.part() else { break };
            match StagedPart::begin(env, gpu, peer, asked, number, part, length, context) {
                Ok(staged_part) => staged_parts.staged_parts.push(staged_part),
                Err(_) if staged_part.is_closed() => {}
                Err(trouble) => {
                    // If this buffer cannot be mapped here, others may still be.
                    let is_of_buffer = matches!(trouble, Trouble::Driver(Error::AlreadyMapped));
                    if part.way == Way::Put && !is_of_buffer {
                        gpu.put_failed(peer.world_rank());
                    }
                    staged_part.give_up(0);
                    tell(peer, &trouble);
                }
            }
        }
        staged_parts
    }

    /// What the receiver has taken of this rank's staging. Call this once the receiver is through with the
    /// message.
    pub fn parts(&self) -> Parts {
        let mut parts = Parts::default();
        for staged_part in &self.staged_parts {
            // An offer that is about another message by now was taken to its end.
            let shared = staged_part_of(&self.peer, self.asked, staged_part.number);
            let emptied = shared.and_then(|shared| shared.emptied().ok());
            let taken = emptied
                .unwrap_or(staged_part.filled)
                .min(staged_part.filled);
            let (_, bytes) = staged_part.part.span(0, taken);
            match staged_part.staging {
                Staging::Host => parts.host += bytes,
                Staging::Relay { .. } => parts.relay += bytes,
                Staging::Put { .. } => {}
            }
        }
        parts
    }

    /// Fills what can be filled. True if anything moved. Trouble ends the staged part that it concerns.
    pub fn poll(&mut self, env: &Env, gpu: &mut Gpu) -> bool {
        let mut moved = self.each(gpu, |staged_part, _, peer, shared| {
            staged_part.settle(env, peer, shared)
        });
        // One chunk of each part in turn: no part waits at the beginning until another has launched all that
        // it may.
        self.behind.take_if(|behind| {
            offer_of(&self.peer, *behind).is_none_or(|offer| offer.is_claimed(behind.tag))
        });
        let (context, source) = (self.context, self.source);
        while self.behind.is_none()
            && self.each(gpu, |staged_part, gpu, peer, shared| {
                staged_part.add(env, gpu, peer, shared, context, source)
            })
        {
            moved = true;
        }
        moved
    }

    /// Does a step for each staged part. True if anything moved.
    fn each(
        &mut self,
        gpu: &mut Gpu,
        step: impl Fn(&mut StagedPart, &mut Gpu, &Peer, &StagedPartOf<'_>) -> Result<bool, Trouble>,
    ) -> bool {
        let mut moved = false;
        for staged_part in self
            .staged_parts
            .iter_mut()
            .filter(|staged_part| !staged_part.is_left)
        {
            let Some(shared) = staged_part_of(&self.peer, self.asked, staged_part.number) else {
                staged_part.is_left = true;
                continue;
            };
            match step(staged_part, gpu, &self.peer, &shared) {
                Ok(did) => moved |= did,
                // The receiver is through with the message.
                Err(Trouble::StagedPart(StagedPartError::Stale)) => staged_part.is_left = true,
                Err(trouble) => {
                    if let Staging::Put { .. } = staged_part.staging {
                        gpu.put_failed(self.peer.world_rank());
                        staged_part.is_failed = true;
                    } else {
                        staged_part.is_left = true;
                        shared.give_up(staged_part.filled);
                    }
                    if let Staging::Relay { owner, row, .. } = &staged_part.staging {
                        gpu.relays.blame(owner.world_rank(), *row);
                    }
                    tell(&self.peer, &trouble);
                    moved = true;
                }
            }
        }
        moved
    }

    /// Whether nothing more will be filled.
    pub fn is_over(&self) -> bool {
        let is_over = |staged_part: &StagedPart| {
            staged_part.is_left
                || (!staged_part.is_failed && staged_part.is_over && staged_part.filling.is_empty())
        };
        self.staged_parts.iter().all(is_over)
    }

    /// The message is over: gives every piece back. False while a copy into one is under way.
    pub fn release(&mut self, env: &Env) -> bool {
        for staged_part in &mut self.staged_parts {
            staged_part.is_left = true;
            for piece in std::mem::take(&mut staged_part.held) {
                staged_part.staging.give(env, &piece);
            }
            while let Some(filling) = staged_part.filling.front_mut() {
                if !filling.copy.is_over() {
                    return false;
                }
                staged_part.staging.give(env, &filling.piece);
                staged_part.filling.pop_front();
            }
        }
        true
    }
}

fn offer_of(peer: &Peer, asked: Asked) -> Option<&Offer> {
    peer.gpu_page()?.offer(asked.index)
}

fn staged_part_of(peer: &Peer, asked: Asked, number: usize) -> Option<StagedPartOf<'_>> {
    let offer = offer_of(peer, asked)?;
    let is_there = offer
        .len(asked.tag)
        .is_ok_and(|staged_parts| number < staged_parts);
    offer.staged_part(asked.tag, number).filter(|_| is_there)
}

fn tell(peer: &Peer, trouble: &Trouble) {
    stats::add(Counter::PathsAbandoned, 1);
    let of = Of::To(peer.world_rank());
    // Failures because the receiver has died are reported when its messages are given up.
    if peer.goes_on() {
        let remedy = "its part is left to the receiver";
        fault::survived(of, Path::Multipath, trouble, remedy);
    }
}

impl StagedPart {
    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    fn begin(
        env: &Env,
        gpu: &mut Gpu,
        peer: &Arc<Peer>,
        asked: Asked,
        number: usize,
        part: Part,
        length: u64,
        context: ContextKey,
    ) -> Result<StagedPart, Trouble> {
        if !part.is_sane(length) || u32::try_from(part.chunk_bytes).is_err() {
            return Err(StagedPartError::Corrupt.into());
        }
        let staging = match part.way {
            Way::Host => Staging::Host,
            Way::Put => Staging::target(gpu, peer, asked, number, length, context)?,
            Way::Relay { owner: rank, row } => {
                let Some(owner) = env.node.peer(rank) else {
                    return Err(Trouble::Told("the rank that has the staging is not there"));
                };
                match gpu.reach_relay(context, &owner, row) {
                    Ok(Some(reached)) => Staging::Relay {
                        owner,
                        row,
                        reached,
                    },
                    Ok(None) => return Err(Trouble::Told("there is no staging on that GPU")),
                    Err(error) => {
                        gpu.relays.blame(rank, row);
                        return Err(error.into());
                    }
                }
            }
        };
        Ok(StagedPart {
            number,
            part,
            staging,
            claimed: 0,
            filled: 0,
            filling: VecDeque::new(),
            held: VecDeque::new(),
            is_over: false,
            is_left: false,
            is_failed: false,
        })
    }

    /// Records what has ended, here and at the receiver. True if anything has.
    fn settle(
        &mut self,
        env: &Env,
        peer: &Peer,
        shared: &StagedPartOf<'_>,
    ) -> Result<bool, Trouble> {
        if self.is_failed {
            self.filling.retain_mut(|filling| !filling.copy.is_over());
            self.is_left = self.filling.is_empty();
            if self.is_left {
                shared.give_up(self.filled);
            }
            return Ok(self.is_left);
        }
        let mut moved = self.take_back(env, shared)?;
        while let Some(filling) = self.filling.front_mut() {
            match filling.copy.poll() {
                Ok(true) if shared.push(&mut self.filled, filling.entry)? => {}
                Ok(_) => break,
                Err(error) if filling.copy.is_lost() => return Err(error.into()),
                Err(error) => {
                    fault::tried_again(Of::To(peer.world_rank()), Path::Multipath, &error);
                    break;
                }
            }
            if let Some(filling) = self.filling.pop_front() {
                self.held.push_back(filling.piece);
            }
            moved = true;
        }
        Ok(moved)
    }

    /// Starts the copy of one more chunk, if there is room for it. True if it did.
    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    fn add(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        peer: &Peer,
        shared: &StagedPartOf<'_>,
        context: ContextKey,
        source: u64,
    ) -> Result<bool, Trouble> {
        let is_full = self.filling.len() + self.held.len() >= STAGED_PART_ENTRIES;
        if self.is_over || self.is_failed || is_full {
            return Ok(false);
        }
        let is_put = matches!(self.staging, Staging::Put { .. });
        if is_put && self.claimed < self.part.chunks() && !gpu.may_put(peer.world_rank()) {
            return Err(Trouble::Told(NOT_PUT));
        }
        let (purpose, affinity) = self.lane();
        let most = if self.part.in_turn {
            LAUNCHED_IN_TURN_MAX
        } else {
            LAUNCHED_MAX
        };
        if gpu.load(context, purpose, affinity)? >= most {
            return Ok(false);
        }
        self.start(env, gpu, shared, context, source)
    }

    /// The lane of the next copy.
    fn lane(&self) -> (Purpose, u64) {
        match self.staging {
            Staging::Host => (Purpose::DeviceToHost, 0),
            Staging::Relay { .. } => (Purpose::Put, self.part.lane(self.number, self.claimed)),
            Staging::Put { .. } => (Purpose::Put, PUT_LANE),
        }
    }

    /// Claims the next chunk and starts its copy. False if there is no chunk, or no piece for it.
    fn start(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        shared: &StagedPartOf<'_>,
        context: ContextKey,
        source: u64,
    ) -> Result<bool, Trouble> {
        if self.claimed >= self.part.chunks() {
            self.is_over = true;
            return Ok(false);
        }
        let (offset, bytes) = self.part.chunk(self.claimed);
        // The piece is taken first, since a chunk that is claimed must be launched.
        let taken = self.staging.take(env, gpu, context, (offset, bytes))?;
        let Some((piece, unit, to)) = taken else {
            return Ok(false);
        };
        let claimed = shared.claim(self.claimed);
        if claimed != Ok(true) {
            self.staging.give(env, &piece);
            self.is_over |= !claimed?;
            return Ok(false);
        }
        let (purpose, affinity) = self.lane();
        self.claimed += 1;
        let copy = Copy::Linear {
            dst: to,
            src: source + offset,
            bytes,
        };
        let mapping = self.staging.mapping();
        let _way = trace::via_relay(matches!(self.staging, Staging::Relay { .. }));
        match gpu.copy_on(context, purpose, affinity, copy, mapping) {
            Ok(copy) => self.filling.push_back(Filling {
                copy,
                piece,
                entry: Filled {
                    unit,
                    bytes: bytes as u32,
                },
            }),
            Err(error) => {
                self.staging.give(env, &piece);
                return Err(error.into());
            }
        }
        Ok(true)
    }

    /// Takes back the pieces that the receiver has emptied.
    fn take_back(&mut self, env: &Env, shared: &StagedPartOf<'_>) -> Result<bool, StagedPartError> {
        let emptied = shared.emptied()?;
        let in_ring = self
            .filled
            .checked_sub(emptied)
            .ok_or(StagedPartError::Corrupt)?;
        let mut moved = false;
        while self.held.len() > in_ring as usize {
            if let Some(piece) = self.held.pop_front() {
                self.staging.give(env, &piece);
                moved = true;
            }
        }
        Ok(moved)
    }
}

impl Staging {
    fn mapping(&self) -> Option<Arc<Mapping>> {
        match self {
            Staging::Host => None,
            Staging::Relay { reached, .. } => reached.mapping.clone(),
            Staging::Put { mapping, .. } => Some(Arc::clone(mapping)),
        }
    }

    /// The receiver's buffer, for a message of so many bytes.
    fn target(
        gpu: &mut Gpu,
        peer: &Peer,
        asked: Asked,
        number: usize,
        length: u64,
        context: ContextKey,
    ) -> Result<Staging, Trouble> {
        if !gpu.may_put(peer.world_rank()) {
            return Err(Trouble::Told(NOT_PUT));
        }
        let offer = offer_of(peer, asked);
        let target = offer.ok_or(StagedPartError::Stale)?.target(asked.tag)?;
        let export = Export::from(&target);
        if !export.holds(length) {
            return Err(StagedPartError::Corrupt.into());
        }
        let is_kept = || {
            staged_part_of(peer, asked, number).is_some_and(|staged_part| !staged_part.is_closed())
        };
        let mapping = gpu.map_while(context, peer, &export, is_kept)?;
        Ok(Staging::Put {
            to: mapping.address_of(target.offset),
            mapping,
        })
    }

    /// A piece, its first unit and its address. None if all are in use.
    fn take(
        &self,
        env: &Env,
        gpu: &mut Gpu,
        context: ContextKey,
        (offset, bytes): (u64, u64),
    ) -> Result<Option<(Piece, u32, u64)>, Trouble> {
        match self {
            Staging::Put { to, .. } => Ok(Some((Piece::None, 0, to + offset))),
            Staging::Host => {
                let own = env.node.own();
                let Some((wide, address)) = gpu.take_wide(context, own, bytes) else {
                    let is_possible = bytes <= u64::from(own.layout().wide_block_bytes);
                    return if is_possible {
                        Ok(None)
                    } else {
                        Err(Trouble::Told(
                            "no staging in host memory is as large as a chunk",
                        ))
                    };
                };
                let unit = wide.unit;
                Ok(Some((Piece::Host(wide), unit, address)))
            }
            Staging::Relay {
                owner,
                row,
                reached,
            } => {
                let gpus = owner.gpu_page().map(|gpu_page| gpu_page.gpus());
                let Some(listed) = gpus.and_then(|gpus| gpus.get(usize::from(*row))) else {
                    return Err(StagedPartError::Corrupt.into());
                };
                if listed.exported() != Some(reached.exported) {
                    return Err(Trouble::Told("staging on a GPU was withdrawn"));
                }
                let count = units_of(bytes);
                let taker = Taker {
                    rank: env.world_rank,
                    tag: gpu.relays.fresh_tag(),
                };
                let Some(unit) = listed.units(&reached.exported).take(count, taker) else {
                    return Ok(None);
                };
                let address = reached.base + u64::from(unit) * UNIT_BYTES;
                Ok(Some((Piece::Relay { unit, count, taker }, unit, address)))
            }
        }
    }

    fn give(&self, env: &Env, piece: &Piece) {
        match (self, piece) {
            (_, Piece::Host(wide)) => env.node.own().give_wide(wide),
            (
                Staging::Relay {
                    owner,
                    row,
                    reached,
                },
                Piece::Relay { unit, count, taker },
            ) => {
                let gpus = owner.gpu_page().map(|gpu_page| gpu_page.gpus());
                if let Some(gpu) = gpus.and_then(|gpus| gpus.get(usize::from(*row))) {
                    gpu.units(&reached.exported).give(*unit, *count, *taker);
                }
            }
            (_, Piece::None) | (Staging::Host | Staging::Put { .. }, Piece::Relay { .. }) => {}
        }
    }
}
