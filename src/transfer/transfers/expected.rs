//! Transfers that their receiver expects: an RTR tells the sender where they go, and the sender writes them at
//! once.

use std::sync::Arc;

use super::{prepare, Descriptor, LentMemory, Receiving, Transfers};
use crate::cuda::{self, overlap, Buffer, ContextKey, Kind};
use crate::node::{Peer, RtrId, RtrState, Target, Waiting};
use crate::stats::{self, Counter};
use crate::transfer::fetch::{Landed, NotTaken};
use crate::transfer::gpu::Gpu;
use crate::transfer::put::{Attempt, Put};
use crate::transfer::Env;

/// A transfer that a peer was told of by an RTR.
#[derive(Clone, Copy)]
pub(super) struct Announced {
    pub(super) told: RtrId,
    pub(super) from: u32,
    /// Where it goes.
    to: Buffer,
    bytes: u64,
}

impl Announced {
    /// Where in device memory it goes: address and length.
    fn place(&self) -> (u64, u64) {
        (self.to.address, self.bytes)
    }
}

/// Names a transfer that a peer was told of by an RTR, and is to offer. Give it to
/// [`Transfers::take_expected`] with the offer, or to [`Transfers::forget`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the peer may write to its memory until it is taken or forgotten"]
pub struct Expected(usize);

impl Transfers {
    /// Tells a peer (by an RTR) that its transfer with this number goes to `to`, and is as long. If the
    /// peer offers it after that, it writes the bytes at once. None if that is of no use, and the transfer is
    /// taken as any other: the memory is no device memory that the peer could map, the transfer is so long
    /// that it may be split, others go to the same place, too many are expected, or RTRs are switched off.
    ///
    /// A number may be used again once its transfer was taken or forgotten.
    pub fn expect(&mut self, from: u32, number: u64, to: LentMemory) -> Option<Expected> {
        let LentMemory { start: to, bytes } = to;
        let Kind::Device(to) = cuda::classify(to) else {
            return None;
        };
        let Transfers { env, gpu, .. } = self;
        let may_be_put = env.are_rtrs_on()
            && to.ipc
            && from != env.world_rank
            && bytes > 0
            && !env.may_split(bytes)
            && gpu.may_put(from);
        if !may_be_put {
            return None;
        }
        let place = (to.address, bytes);
        let mut moving = self.moving.iter();
        let is_used = (self.expected.iter()).any(|(_, other)| overlap(other.place(), place))
            || moving.any(|id| {
                let row = self.receives[*id].fetch.under_way();
                row.is_some_and(|row| row.overlaps(place))
            });
        if is_used {
            return None;
        }
        prepare(env, gpu, &to).ok()?;
        let target = Target::from(&gpu.export(env, &to).ok()?);
        let waiting = Waiting {
            offset: target.offset,
            buffer_id: target.buffer_id,
            ..waiting(from, number, bytes)
        };
        let told = env.node.own().open_rtr(&waiting, &target)?;
        stats::add(Counter::RtrsSent, 1);
        let announced = Announced {
            told,
            from,
            to,
            bytes,
        };
        Some(Expected(self.expected.insert(announced)))
    }

    /// Nobody waits for a transfer any more that was expected: nothing is written to its memory from now on.
    /// True if its peer had not begun, and its offer can be taken as any other; otherwise the offer is lost.
    /// `Err` while the peer writes.
    pub fn forget(&mut self, expected: Expected) -> Result<bool, Expected> {
        let own = self.env.node.own();
        let Announced { told, from, .. } = self.expected[expected.0];
        let state = own.rtr_state(told);
        let is_begun = !own.withdraw(told) || state == Some(RtrState::Refused);
        let sender = self.env.node.peer(from);
        // The dead write no more.
        let is_alive = || sender.is_some_and(|sender| sender.alive());
        if is_begun && own.rtr_state(told) == Some(RtrState::Taken) && is_alive() {
            return Err(expected);
        }
        if is_begun {
            own.close_rtr(told);
        }
        self.expected.remove(expected.0);
        Ok(!is_begun)
    }

    /// Takes what a peer has offered, and was expected. If that fails, it is still expected.
    pub fn take_expected(
        &mut self,
        descriptor: &Descriptor,
        expected: Expected,
    ) -> Result<Receiving, (NotTaken, Expected)> {
        let Announced {
            told,
            from,
            to,
            bytes,
        } = self.expected[expected.0];
        let begun = match Landed::read(&self.env, descriptor) {
            // Of another peer: that one can still be taken.
            Ok(landed) if landed.rts().sender != from => Err(NotTaken::Value),
            Ok(landed) => self.begin(landed, Ok(to), bytes, Some(told)),
            Err(why) => Err(why),
        };
        match begun {
            Ok(receiving) => {
                self.expected.remove(expected.0);
                Ok(receiving)
            }
            Err(why) => Err((why, expected)),
        }
    }

    /// Whether a peer writes a transfer that was expected. Withdraws what none has begun.
    pub(super) fn is_written_to(&self) -> bool {
        let own = self.env.node.own();
        let mut expected = self.expected.iter();
        expected.any(|(_, one)| {
            !own.withdraw(one.told) && own.rtr_state(one.told) == Some(RtrState::Taken)
        })
    }
}

/// The communicator of RTRs of transfers. The MPI library has none with this identity.
const TRANSFERS: u64 = u64::from_be_bytes(*b"transfer");
/// So many transfers of a peer can be expected in lines of their own.
const LINES: u64 = 32;

/// The RTR of a transfer, as far as its sender knows it.
pub(super) fn waiting(source: u32, number: u64, bytes: u64) -> Waiting {
    Waiting {
        communicator: TRANSFERS,
        source,
        tag: (number % LINES) as i32,
        after: number,
        bytes,
        offset: 0,
        rest: 0,
        buffer_id: 0,
    }
}

/// Begins to write a transfer to the peer's buffer, if there is an RTR for it.
pub(super) fn put(
    env: &Env,
    gpu: &mut Gpu,
    peer: &Arc<Peer>,
    expected: &Waiting,
    (context, from): (ContextKey, &Buffer),
) -> Option<Put> {
    let may_put = env.are_rtrs_on() && gpu.may_put(peer.world_rank()) && !peer.finalizing();
    if !may_put || peer.world_rank() == env.world_rank || expected.bytes == 0 {
        return None;
    }
    let line = expected.line();
    let rtr = peer.rtr(line)?;
    let mut attempt = Attempt::new(peer, line, rtr.find(expected)?)?;
    let mut is_kept = || rtr.find(expected).is_some();
    // Two processes on one GPU take turns there: one of them makes all copies.
    let begins = !attempt.is_on(&from.uuid)
        && attempt.holds(expected.bytes)
        && attempt.map(gpu, context, &mut is_kept)
        && attempt.take();
    if !begins {
        return None;
    }
    let put = attempt.launch(gpu, (context, from.address), expected.bytes)?;
    gpu.launch();
    Some(put)
}
