//! One staged part of a multipath message, at its receiver: the sender brings this part of the message by
//! staging, or puts it.

use std::collections::VecDeque;
use std::sync::Arc;

use super::multipath::Direct;
use crate::cuda::{Copy, InFlight, Mapping, Purpose};
use crate::node::staged_part::{StagedPartOf, STAGED_PART_CHUNKS_MAX};
use crate::node::{Part, Peer, StagedPartError, Taker, Way, UNIT_BYTES};
use crate::plan::CHUNKS_MOST;
use crate::stats::{self, Counter};
use crate::trace;
use crate::transfer::fault::{self, Of, Path, Trouble};
use crate::transfer::gpu::{is_for_now, Gpu};
use crate::transfer::relays::Reached;
use crate::transfer::Env;

/// No plan has more chunks than an offer can name.
const _: () = assert!(CHUNKS_MOST <= STAGED_PART_CHUNKS_MAX);

/// A staged part, and how far it is.
pub(super) struct StagedPart {
    /// Its number in the offer.
    pub(super) number: usize,
    pub(super) part: Part,
    pub(super) staging: Staging,
    /// Chunks from this one on are no longer the sender's.
    pub(super) end: u32,
    /// How many chunks have had their copies out of staging launched, and how many of these have arrived.
    pub(super) launched: u32,
    pub(super) emptied: u32,
    pub(super) flying: VecDeque<Flying>,
    /// It is not used any more, except for what is in flight.
    pub(super) is_retired: bool,
    /// Some of its chunks were claimed back.
    pub(super) is_cut: bool,
    /// Bytes that have arrived.
    pub(super) arrived: u64,
}

/// What the part goes through.
pub(super) enum Staging {
    Host,
    Relay {
        owner: Arc<Peer>,
        row: u8,
        reached: Reached,
    },
    /// No staging: the sender writes to the receiver's buffer.
    Put,
}

/// A copy out of staging.
pub(super) struct Flying {
    pub(super) copy: InFlight,
    bytes: u64,
    /// Who had the piece when the copy was launched. It must be the sender, until the copy ends.
    taker: Option<(u32, Taker)>,
}

/// Why a staged part is not used any more: its sender said so, or its staging was taken away.
const GIVEN_UP: Trouble = Trouble::Told("its sender could not go on with a path");
const RECLAIMED: Trouble = Trouble::Told("staging was taken from its sender");

impl StagedPart {
    pub(super) fn new(number: usize, part: Part, staging: Staging) -> StagedPart {
        StagedPart {
            number,
            part,
            staging,
            end: part.chunks(),
            launched: 0,
            emptied: 0,
            flying: VecDeque::new(),
            is_retired: false,
            is_cut: false,
            arrived: 0,
        }
    }

    pub(super) fn is_host(&self) -> bool {
        matches!(self.staging, Staging::Host)
    }

    pub(super) fn is_put(&self) -> bool {
        matches!(self.staging, Staging::Put)
    }

    pub(super) fn is_done(&self) -> bool {
        self.emptied == self.end && self.flying.is_empty()
    }

    /// The lane of the next copy. A chunk has the same lane in all messages that are split alike.
    fn lane(&self) -> (Purpose, u64) {
        match self.staging {
            // The lane is the sender's.
            Staging::Put => (Purpose::Put, 0),
            Staging::Host => (Purpose::HostToDevice, 0),
            Staging::Relay { .. } => (
                Purpose::GetStaged,
                self.part.lane(self.number, self.launched),
            ),
        }
    }

    pub(super) fn blame(&self, gpu: &mut Gpu) {
        if let Staging::Relay { owner, row, .. } = &self.staging {
            gpu.relays.blame(owner.world_rank(), *row);
        }
    }

    /// Empties the pieces that are filled. True if anything moved.
    pub(super) fn poll(
        &mut self,
        gpu: &mut Gpu,
        shared: &StagedPartOf<'_>,
        peer: &Peer,
        direct: &Direct,
        may_launch: bool,
    ) -> Result<bool, Trouble> {
        let mut moved = false;
        while let Some(flying) = self.flying.front_mut() {
            match flying.copy.poll() {
                Ok(false) => break,
                Ok(true) => {}
                Err(error) if flying.copy.is_lost() => {
                    self.flying.pop_front();
                    return Err(Trouble::Driver(error));
                }
                Err(error) => {
                    fault::tried_again(Of::From(peer.world_rank()), Path::Multipath, &error);
                    break;
                }
            }
            let flying = self.flying.pop_front();
            moved = true;
            if self.is_retired {
                continue;
            }
            if let Some(flying) = flying {
                // A piece that another rank has by now may have been written while it was read.
                if flying.taker.is_some() && self.staging.taker(flying.taker) != flying.taker {
                    return Err(RECLAIMED);
                }
                shared.pop(&mut self.emptied)?;
                self.arrived += flying.bytes;
                peer.ring_doorbell();
            }
        }
        if self.is_retired {
            return Ok(moved);
        }
        let (filled, is_over) = shared.filled()?;
        if filled > self.end || filled < self.launched {
            return Err(StagedPartError::Corrupt.into());
        }
        while self.is_put() && self.launched < filled {
            let (_, bytes) = self.part.chunk(self.launched);
            if u64::from(shared.entry_of(self.launched).bytes) != bytes {
                return Err(StagedPartError::Corrupt.into());
            }
            self.launched += 1;
            shared.pop(&mut self.emptied)?;
            self.arrived += bytes;
            moved = true;
        }
        while may_launch && self.launched < filled {
            match self.launch(gpu, shared, peer, direct) {
                Ok(()) => moved = true,
                Err(Trouble::Driver(error)) if is_for_now(&error) => return Ok(moved),
                Err(trouble) => return Err(trouble),
            }
        }
        if is_over && self.flying.is_empty() && self.emptied < self.end {
            return Err(GIVEN_UP);
        }
        Ok(moved)
    }

    /// Starts the copy of the next chunk out of its piece.
    fn launch(
        &mut self,
        gpu: &mut Gpu,
        shared: &StagedPartOf<'_>,
        peer: &Peer,
        direct: &Direct,
    ) -> Result<(), Trouble> {
        let entry = shared.entry_of(self.launched);
        let (offset, bytes) = self.part.chunk(self.launched);
        if u64::from(entry.bytes) != bytes {
            return Err(StagedPartError::Corrupt.into());
        }
        let context = direct.context;
        let corrupt = || Trouble::StagedPart(StagedPartError::Corrupt);
        let (src, taker) = match &self.staging {
            Staging::Put => return Err(corrupt()),
            Staging::Host => {
                let address = peer.wide(entry.unit, bytes).ok_or_else(corrupt)?;
                gpu.pin_wide(context, peer, entry.unit);
                (address.as_ptr().expose_provenance() as u64, None)
            }
            Staging::Relay { reached, .. } => {
                let offset = u64::from(entry.unit) * UNIT_BYTES;
                let taker = self
                    .staging
                    .taker(Some((entry.unit, Taker { rank: 0, tag: 0 })));
                let is_senders = taker.is_some_and(|(_, taker)| taker.rank == peer.world_rank());
                if offset + bytes > reached.exported.bytes || !is_senders {
                    return Err(corrupt());
                }
                (reached.base + offset, taker)
            }
        };
        let (purpose, affinity) = self.lane();
        let mapping = self.staging.mapping();
        let copy = Copy::Linear {
            dst: direct.to + offset,
            src,
            bytes,
        };
        let _way = trace::via_relay(matches!(self.staging, Staging::Relay { .. }));
        let copy = gpu.copy_on(context, purpose, affinity, copy, mapping)?;
        self.launched += 1;
        self.flying.push_back(Flying { copy, bytes, taker });
        Ok(())
    }
}

impl Staging {
    /// How this rank reaches the staging of a part; None if there is none (yet).
    pub(super) fn reach(
        env: &Env,
        gpu: &mut Gpu,
        direct: &Direct,
        peer: &Peer,
        part: &Part,
    ) -> Option<Staging> {
        match part.way {
            Way::Host => (peer.layout().wide_blocks > 0).then_some(Staging::Host),
            Way::Put => direct.put.as_ref().map(|_| Staging::Put),
            Way::Relay { owner: rank, row } => {
                let owner = env.node.peer(rank)?;
                match gpu.reach_relay(direct.context, &owner, row) {
                    Ok(Some(reached)) => Some(Staging::Relay {
                        owner,
                        row,
                        reached,
                    }),
                    Ok(None) => None,
                    Err(error) => {
                        gpu.relays.blame(rank, row);
                        stats::add(Counter::PathsAbandoned, 1);
                        let of = Of::From(peer.world_rank());
                        fault::survived(of, Path::Multipath, &error, "over fewer paths");
                        None
                    }
                }
            }
        }
    }

    fn mapping(&self) -> Option<Arc<Mapping>> {
        match self {
            Staging::Host | Staging::Put => None,
            Staging::Relay { reached, .. } => reached.mapping.clone(),
        }
    }

    /// Who has the unit now.
    fn taker(&self, of: Option<(u32, Taker)>) -> Option<(u32, Taker)> {
        let (
            Staging::Relay {
                owner,
                row,
                reached,
            },
            Some((unit, _)),
        ) = (self, of)
        else {
            return None;
        };
        let row = owner.gpu_page()?.gpus().get(usize::from(*row))?;
        Some((unit, row.units(&reached.exported).taker(unit)?))
    }
}
