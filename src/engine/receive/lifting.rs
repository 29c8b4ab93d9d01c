//! A value on its way from where it landed to device memory, in order with what else is received in its place.

use std::sync::Arc;

use crate::cuda::{overlap, Result};
use crate::engine::fetch::{Trail, TrailEnd, UnderWay};
use crate::engine::gpu::Gpu;
use crate::engine::lift::Lift;

/// No rank: which one has sent it need not be known.
const NOBODY: u32 = u32::MAX;

/// A value that is being lifted.
pub struct Lifting {
    lift: Lift,
    /// Where it is written, an address and a length.
    place: (u64, u64),
    /// What is written there before it.
    after: Vec<Arc<Trail>>,
    trail: TrailEnd,
    began: u64,
}

impl Lifting {
    /// To be lifted to a place once those that are written there are over, when this rank has taken so many descriptors.
    pub fn new(lift: Lift, place: (u64, u64), after: Vec<Arc<Trail>>, began: u64) -> Lifting {
        Lifting {
            lift,
            place,
            after,
            trail: TrailEnd::new(false),
            began,
        }
    }

    /// Moves it on; true when all of it is there. An error comes when nothing is in flight any more.
    pub fn poll(&mut self, gpu: &mut Gpu) -> Result<bool> {
        self.after.retain(|before| !before.is_over());
        if !self.after.is_empty() {
            return Ok(false);
        }
        self.lift.poll(gpu)
    }

    /// What one that is lifted to its place waits for; None where all of it is on the lane of such copies already, in order.
    pub fn end(&self, place: (u64, u64)) -> Option<Arc<Trail>> {
        let is_in_order = self.after.is_empty() && self.lift.is_issued();
        (!is_in_order && overlap(self.place, place)).then(|| Arc::clone(self.trail.trail()))
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
