//! A value on its way from where it landed to device memory, in order with what else is received in its place.

use std::sync::Arc;

use crate::cuda::{overlap, Error, Result};
use crate::engine::fetch::{Staged, Trail, TrailEnd, UnderWay};
use crate::engine::gpu::Gpu;
use crate::engine::lift::Lift;

/// No rank: which one has sent it need not be known.
const NOBODY: u32 = u32::MAX;

/// A value that is being lifted.
pub struct Lifting {
    /// To each allocation in which it ends.
    lifts: Vec<Lift>,
    /// What encloses all that is written, an address and a length.
    place: (u64, u64),
    /// What is written there before it.
    after: Vec<Arc<Trail>>,
    trail: TrailEnd,
    began: u64,
    /// One of them could not be done; the others are waited for.
    failed: Option<Error>,
}

impl Lifting {
    /// To be lifted to a place once those that are written there are over, when this rank has taken so many descriptors.
    pub fn new(lifts: Vec<Lift>, place: (u64, u64), after: Vec<Arc<Trail>>, began: u64) -> Lifting {
        Lifting {
            lifts,
            place,
            after,
            trail: TrailEnd::new(false),
            began,
            failed: None,
        }
    }

    /// Moves it on; true when all of it is there. An error comes when nothing is in flight any more.
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

    /// What one that is lifted to its place waits for; None where all of it is on the lane of such copies already, in order.
    pub fn end(&self, place: (u64, u64)) -> Option<Arc<Trail>> {
        let is_in_order = self.after.is_empty() && self.lifts.iter().all(Lift::is_issued);
        (!is_in_order && overlap(self.place, place)).then(|| Arc::clone(self.trail.trail()))
    }

    /// What a message waits for that comes through staging to its place, and was claimed after this value had landed.
    pub fn end_before(&self, next: &Staged) -> Option<Arc<Trail>> {
        next.is_behind(self.began, self.place)
            .then(|| Arc::clone(self.trail.trail()))
    }

    /// What messages have to know of it that are fetched meanwhile.
    pub fn under_way(&self) -> UnderWay {
        UnderWay {
            began: self.began,
            source: NOBODY,
            to: self.place,
            trail: Some(Arc::clone(self.trail.trail())),
        }
    }
}
