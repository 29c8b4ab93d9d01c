//! The sender's part in a message that comes over several paths: chunk by chunk it fills pieces of staging, in pinned host
//! memory and on other GPUs, as far as its receiver leaves them to it.
//!
//! The receiver reads this rank's buffer itself and needs none of this: what goes wrong here, or does not go on, costs
//! speed only. What is pushed into the receiver's buffer is different in one thing: it is waited for, here and there, until
//! nothing of it is written any more.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::cuda::{ContextKey, Copy, Error, Export, InFlight, Mapping, Purpose};
use crate::engine::fault::{self, Of, Path, Trouble};
use crate::engine::gpu::Gpu;
use crate::engine::relays::Reached;
use crate::engine::story::Parts;
use crate::engine::Env;
use crate::node::track::{Filled, Offer, TrackOf, TRACKS, TRACK_ENTRIES};
use crate::node::{units_of, Asked, Part, Peer, Taker, TrackError, Way, Wide, UNIT_BYTES};
use crate::stats::{self, Counter};

/// Launches in flight on a lane beyond which no chunk is added: enough that the engine does not run dry between two looks,
/// few enough that what the receiver may claim back is not launched too early.
const LAUNCHED_MAX: usize = 3;
/// The same on each of two lanes that are used in turn.
const LAUNCHED_IN_TURN_MAX: usize = 2;

/// Once a push has failed.
const NOT_PUSHED: &str = "a push between these ranks has failed before";
/// Of the lanes for pushes the one that few relays use.
pub(in crate::engine) const PUSH_LANE: u64 = 3;

/// The tracks of one message.
pub struct Tracks {
    peer: Arc<Peer>,
    asked: Asked,
    /// The receiver's offer whose chunks are to be claimed first.
    behind: Option<Asked>,
    context: ContextKey,
    source: u64,
    tracks: Vec<Track>,
}

/// One track.
struct Track {
    number: usize,
    part: Part,
    staging: Staging,
    /// Chunks claimed, and those put into the ring.
    claimed: u32,
    filled: u32,
    /// Pieces being filled, oldest first.
    filling: VecDeque<Filling>,
    /// Pieces in the ring, oldest first.
    held: VecDeque<Piece>,
    /// No chunk more is claimed.
    is_over: bool,
    /// It was given up: what is being filled only waits to be given back.
    is_left: bool,
    /// It will be, once nothing is written to the receiver's buffer any more.
    is_failed: bool,
}

enum Staging {
    Host,
    Relay {
        owner: Arc<Peer>,
        row: u8,
        reached: Reached,
    },
    /// None: the receiver's buffer, and where it begins here.
    Push {
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

impl Tracks {
    /// What a receiver has offered for a message of `length` bytes from `source` on.
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
    ) -> Tracks {
        let mut tracks = Tracks {
            peer: Arc::clone(peer),
            asked,
            behind: offer_of(peer, asked).and_then(|offer| offer.behind(asked.tag)),
            context,
            source,
            tracks: Vec::new(),
        };
        for number in 0..TRACKS {
            let Some(track) = track_of(peer, asked, number) else {
                break;
            };
            let Ok(part) = track.part() else { break };
            match Track::begin(env, gpu, peer, asked, number, part, length, context) {
                Ok(track) => tracks.tracks.push(track),
                Err(_) if track.is_closed() => {}
                Err(trouble) => {
                    // That this buffer cannot be mapped here says nothing of others.
                    let is_of_buffer = matches!(trouble, Trouble::Driver(Error::AlreadyMapped));
                    if part.way == Way::Push && !is_of_buffer {
                        gpu.push_failed(peer.world_rank());
                    }
                    track.give_up(0);
                    tracks.told(&trouble);
                }
            }
        }
        tracks
    }

    /// Whether all that this rank is to bring it pushes into the receiver's buffer.
    pub fn is_direct(&self) -> bool {
        let is_push = |track: &Track| track.part.way == Way::Push;
        self.tracks.iter().all(is_push)
    }

    /// What its receiver has taken of this rank's staging, once it is through with the message.
    pub fn parts(&self) -> Parts {
        let mut parts = Parts::default();
        for track in &self.tracks {
            // An offer that is about another message by now was taken to its end.
            let shared = track_of(&self.peer, self.asked, track.number);
            let emptied = shared.and_then(|shared| shared.emptied().ok());
            let taken = emptied.unwrap_or(track.filled).min(track.filled);
            let (_, bytes) = track.part.span(0, taken);
            match track.staging {
                Staging::Host => parts.host += bytes,
                Staging::Relay { .. } => parts.relay += bytes,
                Staging::Push { .. } => {}
            }
        }
        parts
    }

    fn told(&self, trouble: &Trouble) {
        tell(&self.peer, trouble);
    }

    /// Fills what can be filled. True if anything moved. What is in the way ends the track that it concerns.
    pub fn poll(&mut self, env: &Env, gpu: &mut Gpu) -> bool {
        let mut moved = self.each(gpu, |track, _, peer, shared| {
            track.settle(env, peer, shared)
        });
        // A chunk of each in turn: none waits at the beginning until another has all that may be launched.
        self.behind.take_if(|behind| {
            offer_of(&self.peer, *behind).is_none_or(|offer| offer.is_claimed(behind.tag))
        });
        let (context, source) = (self.context, self.source);
        while self.behind.is_none()
            && self.each(gpu, |track, gpu, peer, shared| {
                track.add(env, gpu, peer, shared, context, source)
            })
        {
            moved = true;
        }
        moved
    }

    /// Does a step of each track. True if anything moved.
    fn each(
        &mut self,
        gpu: &mut Gpu,
        step: impl Fn(&mut Track, &mut Gpu, &Peer, &TrackOf<'_>) -> Result<bool, Trouble>,
    ) -> bool {
        let mut moved = false;
        for track in self.tracks.iter_mut().filter(|track| !track.is_left) {
            let Some(shared) = track_of(&self.peer, self.asked, track.number) else {
                track.is_left = true;
                continue;
            };
            match step(track, gpu, &self.peer, &shared) {
                Ok(did) => moved |= did,
                // The receiver is through with it.
                Err(Trouble::Track(TrackError::Stale)) => track.is_left = true,
                Err(trouble) => {
                    if let Staging::Push { .. } = track.staging {
                        gpu.push_failed(self.peer.world_rank());
                        track.is_failed = true;
                    } else {
                        track.is_left = true;
                        shared.give_up(track.filled);
                    }
                    if let Staging::Relay { owner, row, .. } = &track.staging {
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
        let is_over = |track: &Track| {
            track.is_left || (!track.is_failed && track.is_over && track.filling.is_empty())
        };
        self.tracks.iter().all(is_over)
    }

    /// The message is over: gives every piece back. False while a copy into one is under way.
    pub fn release(&mut self, env: &Env) -> bool {
        for track in &mut self.tracks {
            track.is_left = true;
            for piece in std::mem::take(&mut track.held) {
                track.staging.give(env, &piece);
            }
            while let Some(filling) = track.filling.front_mut() {
                if !filling.copy.is_over() {
                    return false;
                }
                track.staging.give(env, &filling.piece);
                track.filling.pop_front();
            }
        }
        true
    }
}

fn offer_of(peer: &Peer, asked: Asked) -> Option<&Offer> {
    peer.board()?.offer(asked.index)
}

fn track_of(peer: &Peer, asked: Asked, number: usize) -> Option<TrackOf<'_>> {
    let offer = offer_of(peer, asked)?;
    let is_there = offer.len(asked.tag).is_ok_and(|tracks| number < tracks);
    offer.track(asked.tag, number).filter(|_| is_there)
}

fn tell(peer: &Peer, trouble: &Trouble) {
    stats::add(Counter::TracksRetired, 1);
    let of = Of::To(peer.world_rank());
    // What fails because the receiver has died is told when its messages are given up.
    if peer.goes_on() {
        let remedy = "its part is left to the receiver";
        fault::survived(of, Path::Several, trouble, remedy);
    }
}

impl Track {
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
    ) -> Result<Track, Trouble> {
        if !part.is_sane(length) || u32::try_from(part.chunk_bytes).is_err() {
            return Err(TrackError::Corrupt.into());
        }
        let staging = match part.way {
            Way::Host => Staging::Host,
            Way::Push => Staging::target(gpu, peer, asked, number, length, context)?,
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
        Ok(Track {
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

    /// Takes note of what has ended, here and at the receiver. True if anything has.
    fn settle(&mut self, env: &Env, peer: &Peer, shared: &TrackOf<'_>) -> Result<bool, Trouble> {
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
                    fault::tried_again(Of::To(peer.world_rank()), Path::Several, &error);
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

    /// Starts the copy of one chunk more, if there is room for it. True if it did.
    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    fn add(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        peer: &Peer,
        shared: &TrackOf<'_>,
        context: ContextKey,
        source: u64,
    ) -> Result<bool, Trouble> {
        let is_full = self.filling.len() + self.held.len() >= TRACK_ENTRIES;
        if self.is_over || self.is_failed || is_full {
            return Ok(false);
        }
        let is_push = matches!(self.staging, Staging::Push { .. });
        if is_push && self.claimed < self.part.chunks() && !gpu.may_push(peer.world_rank()) {
            return Err(Trouble::Told(NOT_PUSHED));
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

    /// On which lane the next copy runs.
    fn lane(&self) -> (Purpose, u64) {
        match self.staging {
            Staging::Host => (Purpose::DeviceToHost, 0),
            Staging::Relay { .. } => (Purpose::Push, self.part.lane(self.number, self.claimed)),
            Staging::Push { .. } => (Purpose::Push, PUSH_LANE),
        }
    }

    /// Claims the next chunk and starts its copy. False where there is none, or no piece for it.
    fn start(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        shared: &TrackOf<'_>,
        context: ContextKey,
        source: u64,
    ) -> Result<bool, Trouble> {
        if self.claimed >= self.part.chunks() {
            self.is_over = true;
            return Ok(false);
        }
        let (offset, bytes) = self.part.chunk(self.claimed);
        // The piece first: a chunk that is claimed is launched.
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
    fn take_back(&mut self, env: &Env, shared: &TrackOf<'_>) -> Result<bool, TrackError> {
        let emptied = shared.emptied()?;
        let in_ring = self
            .filled
            .checked_sub(emptied)
            .ok_or(TrackError::Corrupt)?;
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
            Staging::Push { mapping, .. } => Some(Arc::clone(mapping)),
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
        if !gpu.may_push(peer.world_rank()) {
            return Err(Trouble::Told(NOT_PUSHED));
        }
        let offer = offer_of(peer, asked);
        let target = offer.ok_or(TrackError::Stale)?.target(asked.tag)?;
        let export = Export::from(&target);
        if !export.holds(length) {
            return Err(TrackError::Corrupt.into());
        }
        let is_kept = || track_of(peer, asked, number).is_some_and(|track| !track.is_closed());
        let mapping = gpu.map_while(context, peer, &export, is_kept)?;
        Ok(Staging::Push {
            to: mapping.address_of(target.offset),
            mapping,
        })
    }

    /// A piece, its first unit and its address. None where all are in use.
    fn take(
        &self,
        env: &Env,
        gpu: &mut Gpu,
        context: ContextKey,
        (offset, bytes): (u64, u64),
    ) -> Result<Option<(Piece, u32, u64)>, Trouble> {
        match self {
            Staging::Push { to, .. } => Ok(Some((Piece::None, 0, to + offset))),
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
                let gpus = owner.board().map(|board| board.gpus());
                let Some(listed) = gpus.and_then(|gpus| gpus.get(usize::from(*row))) else {
                    return Err(TrackError::Corrupt.into());
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
                let gpus = owner.board().map(|board| board.gpus());
                if let Some(gpu) = gpus.and_then(|gpus| gpus.get(usize::from(*row))) {
                    gpu.units(&reached.exported).give(*unit, *count, *taker);
                }
            }
            (_, Piece::None) | (Staging::Host | Staging::Push { .. }, Piece::Relay { .. }) => {}
        }
    }
}
