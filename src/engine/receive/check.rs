//! The last step of a receive with `ANABRANCH_VERIFY`: is the payload what was sent?

use std::ffi::c_int;
use std::sync::Arc;

use super::{Receive, Target, Work};
use crate::cuda::{overlap, Result};
use crate::engine::core::Core;
use crate::engine::lift::{Lift, Shape};
use crate::engine::place::HostRuns;
use crate::engine::verify::{About, Checking, HostReading, Reading};
use crate::engine::Env;
use crate::transfer::fault::Of;
use crate::transfer::fetch::{self, Fetch, OrderToken, OrderTokenEnd};
use crate::transfer::gpu::Gpu;

/// What a payload should be once it has arrived where it belongs.
pub(super) struct ToCheck {
    expected: Reading,
    about: About,
}

/// Keeps a place from being written to until what was received there is checked. Bandwidth tests post windows
/// of receives in one place, and a message that the next one has partly overwritten would look wrong.
pub(super) struct Guard {
    place: (u64, u64),
    end: OrderTokenEnd,
}

impl Guard {
    fn of(place: (u64, u64)) -> Guard {
        Guard {
            place,
            end: OrderTokenEnd::new(false),
        }
    }

    /// Whether it guards some of these bytes.
    pub(super) fn is_at(&self, place: (u64, u64)) -> bool {
        overlap(self.place, place)
    }

    /// The token that is over once these bytes may be written to, if it guards some of them.
    fn end(&self, place: (u64, u64)) -> Option<Arc<OrderToken>> {
        self.is_at(place).then(|| Arc::clone(self.end.token()))
    }
}

impl ToCheck {
    /// For a message that came by RTS with checksums.
    pub(super) fn of_fetch(env: &Env, fetch: &Fetch) -> Option<Box<ToCheck>> {
        let message = fetch.message();
        Some(Box::new(ToCheck {
            expected: Reading::Known(fetch.sums()?),
            about: About {
                of: Of::From(message.source),
                own: env.world_rank,
                tag: message.tag,
                length: message.length,
                path: fetch.life().path(),
            },
        }))
    }
}

impl Core {
    /// Checksums of the message have come: it will be checked once it has arrived.
    pub(super) fn expect_check(&mut self, id: usize, to_check: Option<Box<ToCheck>>) {
        let receive = &mut self.receives[id];
        receive.guard = to_check
            .as_ref()
            .map(|to_check| Guard::of(receive.written(to_check.about.length)));
        receive.to_check = to_check;
    }

    /// The checks of other receives that must end before some of these bytes may be written to.
    pub(super) fn checks_at(&self, id: usize, place: (u64, u64)) -> Vec<Arc<OrderToken>> {
        if !fetch::are_left() {
            return Vec::new();
        }
        let others = self.moving.iter().filter(|other| **other != id);
        others
            .filter_map(|other| self.receives[*other].guard.as_ref()?.end(place))
            .collect()
    }

    /// The message is checked, or will not be. What is received in its place need not wait any more.
    pub(super) fn drop_check(&mut self, id: usize) {
        let receive = &mut self.receives[id];
        (receive.to_check, receive.guard) = (None, None);
    }

    /// A receive is posted. Where messages are checked, no sender may put to its place by an RTR meanwhile,
    /// as nobody here could hold that sender back. So such RTRs are withdrawn.
    pub(super) fn keep_apart(&mut self, env: &Env, id: usize) {
        if !env.config.verify {
            return;
        }
        let receive = &self.receives[id];
        let place = receive.written(receive.capacity);
        let are_told = self.receives.iter().filter(|(other, receive)| {
            *other != id
                && receive.rtr.is_some()
                && overlap(receive.written(receive.capacity), place)
        });
        let are_told: Vec<usize> = are_told.map(|(other, _)| other).collect();
        for other in are_told {
            self.withdraw(env, other);
        }
    }

    /// Whether messages are checked here and another receive has some of these bytes.
    pub(super) fn is_shared(&self, env: &Env, me: Option<usize>, place: (u64, u64)) -> bool {
        let is_there = |receive: &Receive| {
            !receive.life.is_prepared()
                && !receive.is_placed()
                && overlap(receive.written(receive.capacity), place)
        };
        let mut others = self.receives.iter();
        env.config.verify && others.any(|(id, receive)| Some(id) != me && is_there(receive))
    }

    /// Has a bcopy payload compared with what has landed, if it is brought elsewhere from there.
    pub(super) fn check_value(
        &mut self,
        env: &Env,
        id: usize,
        bytes: u64,
        source: c_int,
        tag: c_int,
    ) {
        let receive = &self.receives[id];
        let has_landed = matches!(receive.target, Target::Device { .. } | Target::HostRuns(_));
        let is_whole = receive.code == 0 && bytes > 0 && bytes <= receive.capacity;
        if !env.config.verify || !has_landed || !is_whole {
            return;
        }
        let of = self.sender(env, id, source);
        let receive = &mut self.receives[id];
        let landed = HostReading::new(HostRuns::of(receive.landed.part(0, bytes)), bytes);
        let to_check = Some(Box::new(ToCheck {
            expected: Reading::Host(landed),
            about: About {
                of,
                own: env.world_rank,
                tag,
                length: bytes,
                path: receive.life.path(),
            },
        }));
        self.expect_check(id, to_check);
        if self.receives[id].is_placed() && self.begin_check(id) {
            self.set_moving(id);
        }
    }

    /// The payload is where it belongs. Returns true if it is to be checked now.
    pub(super) fn begin_check(&mut self, id: usize) -> bool {
        let receive = &mut self.receives[id];
        let Some(to_check) = receive.to_check.take().filter(|_| receive.code == 0) else {
            self.drop_check(id);
            return false;
        };
        let ToCheck {
            expected,
            mut about,
        } = *to_check;
        about.path = receive.life.path();
        match receive.reading(&mut self.gpu, about.length) {
            Ok(found) => {
                receive.work = Work::Check(Box::new(Checking {
                    expected,
                    found,
                    about,
                }));
                true
            }
            Err(error) => {
                log::warn!("verify: a device buffer cannot be read: {error}");
                self.drop_check(id);
                false
            }
        }
    }

    /// Moves a check on, like [`Core::advance_receive`].
    pub(super) fn advance_check(&mut self, env: &Env, id: usize) -> (bool, bool) {
        let receive = &mut self.receives[id];
        let Work::Check(checking) = &mut receive.work else {
            return (false, true);
        };
        match checking.poll(&mut self.gpu) {
            Ok(None) => return (false, false),
            Ok(Some(None)) => {}
            Ok(Some(Some(why))) => receive.lose(env.abi, why),
            Err(error) => log::warn!("verify: a device buffer cannot be read: {error}"),
        }
        receive.work = Work::Nothing;
        self.drop_check(id);
        (true, true)
    }
}

impl Receive {
    /// The range that encloses everything that a message of this length writes: an address and a length.
    pub(super) fn written(&self, bytes: u64) -> (u64, u64) {
        match &self.target {
            Target::InPlace | Target::Unseen | Target::LeftToMpi => {
                (self.landed.address() as u64, bytes)
            }
            Target::Device { shape, .. } => shape.place(bytes),
            Target::HostRuns(runs) => runs.place(bytes),
            Target::Several(runs) => runs.place(bytes),
        }
    }

    /// Reads the payload from where the program finds it.
    fn reading(&self, gpu: &mut Gpu, length: u64) -> Result<Reading> {
        let host = |runs| Reading::Host(HostReading::new(runs, length));
        Ok(match &self.target {
            Target::HostRuns(runs) => host(runs.clone()),
            // A buffer in several places is not read again: what has landed is checked.
            Target::InPlace | Target::Unseen | Target::LeftToMpi | Target::Several(_) => {
                host(HostRuns::of(self.landed.part(0, length)))
            }
            Target::Device { buffer, shape } => {
                let context = gpu.prepare(buffer)?;
                let shape: Shape = shape.clone();
                Reading::Device(Lift::summing(context, shape, length, self.of()))
            }
        })
    }
}
