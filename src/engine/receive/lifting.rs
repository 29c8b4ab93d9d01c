//! A bcopy payload on its way from where it landed to device memory, in order with what else is received in
//! its place.

use std::sync::Arc;

use crate::cuda::{overlap, Error, Result};
use crate::engine::lift::Lift;
use crate::transfer::fetch::{OrderToken, OrderTokenEnd, Staged, UnderWay};
use crate::transfer::gpu::Gpu;

/// No rank: nobody needs to know which rank has sent it.
const NOBODY: u32 = u32::MAX;

/// A payload that is being lifted.
pub struct Lifting {
    /// The copies, one for each allocation in which it ends.
    lifts: Vec<Lift>,
    /// The range that encloses everything it writes: an address and a length.
    place: (u64, u64),
    /// What is written there before it.
    after: Vec<Arc<OrderToken>>,
    token: OrderTokenEnd,
    began: u64,
    /// One of the copies has failed. The others are waited for.
    failed: Option<Error>,
}

impl Lifting {
    /// Will be lifted to `place` once everything in `after` is over. `began` is the number of RTSs that this
    /// rank has taken so far.
    pub fn new(
        lifts: Vec<Lift>,
        place: (u64, u64),
        after: Vec<Arc<OrderToken>>,
        began: u64,
    ) -> Lifting {
        Lifting {
            lifts,
            place,
            after,
            token: OrderTokenEnd::new(false),
            began,
            failed: None,
        }
    }

    /// Moves it on. Returns true when all of it has arrived. Returns an error only when nothing is in flight
    /// any more.
    pub fn poll(&mut self, gpu: &mut Gpu) -> Result<bool> {
        self.after.retain(|before| !before.is_over());
        if !self.after.is_empty() {
            return Ok(false);
        }
        let mut is_done = true;
        for lift in &mut self.lifts {
            match lift.poll(gpu) {
                Ok(done) => is_done &= done,
                Err(error) => self.failed = Some(error),
            }
        }
        self.lifts.retain(|lift| !lift.is_over());
        match self.failed {
            Some(error) if self.lifts.is_empty() => Err(error),
            failed => Ok(is_done && failed.is_none()),
        }
    }

    /// What a payload lifted to the same place waits for. None if all copies of this one are on the lane of
    /// such copies already, which keeps their order.
    pub fn end(&self, place: (u64, u64)) -> Option<Arc<OrderToken>> {
        let is_in_order = self.after.is_empty() && self.lifts.iter().all(Lift::is_issued);
        (!is_in_order && overlap(self.place, place)).then(|| Arc::clone(self.token.token()))
    }

    /// What a message waits for that comes through staging to the same place and was claimed after this
    /// payload landed.
    pub fn end_before(&self, next: &Staged) -> Option<Arc<OrderToken>> {
        next.is_behind(self.began, self.place)
            .then(|| Arc::clone(self.token.token()))
    }

    /// What messages that are fetched meanwhile have to know of it.
    pub fn under_way(&self) -> UnderWay {
        UnderWay {
            began: self.began,
            source: NOBODY,
            to: self.place,
            token: Some(Arc::clone(self.token.token())),
        }
    }
}
