//! The order of messages over several paths that follow each other from one sender.
//!
//! An offer names the one before it, whose chunks its sender claims first, so that pieces of staging go to the older
//! message, and what is pushed is in order on the sender's lane. Where both are received in the same place (bandwidth tests
//! do so), they are split alike: what one track writes it writes on one lane, in the order of the messages. What has to be
//! brought another way after all is not brought where the next message may have been written there already: that one is all
//! that is left in the end.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;

use crate::node::{Asked, Part, Way};

/// How far a message has got, for the one behind it.
#[derive(Debug)]
pub struct Trail {
    /// How it is split.
    pub parts: Vec<Part>,
    /// Its offer, if it has one.
    pub asked: Option<Asked>,
    /// The one behind it may be offered.
    is_offered: AtomicBool,
    /// Tracks, as bits, of which every copy has been launched on the track's own lanes.
    launched: AtomicU32,
    /// Another message is received in the same place.
    has_follower: AtomicBool,
    is_over: AtomicBool,
    /// Some of it is written another way than it says.
    is_out_of_order: AtomicBool,
    /// It is one copy, on the lane of its sender.
    is_direct: bool,
    /// The plan under way of which all of its copies are, 0 where there is none (yet).
    drive: AtomicU64,
}

impl Trail {
    /// At its beginning.
    pub fn new(parts: Vec<Part>, asked: Option<Asked>) -> Trail {
        Trail {
            parts,
            asked,
            is_offered: AtomicBool::new(false),
            launched: AtomicU32::new(0),
            has_follower: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            is_out_of_order: AtomicBool::new(false),
            is_direct: false,
            drive: AtomicU64::new(0),
        }
    }

    /// Of a message that is not split: what is behind it waits for its end, but for other such ones from its sender.
    pub fn undivided(is_direct: bool) -> Trail {
        let trail = Trail {
            is_direct,
            ..Trail::new(Vec::new(), None)
        };
        trail.set_offered();
        trail
    }

    /// Whether it is one copy, on the lane of its sender, where such copies stay in order.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// All of its copies are launched, by this rank, as the plan with this number; with 0 no more are.
    pub fn set_drive(&self, number: u64) {
        self.drive.store(number, Ordering::Release);
    }

    /// The plan that is all of it, if it is launched: what is received in its place may be ordered behind that.
    pub fn drive(&self) -> Option<u64> {
        Some(self.drive.load(Ordering::Acquire)).filter(|number| *number != 0)
    }

    /// Its sender knows of it, or need not.
    pub fn set_offered(&self) {
        self.is_offered.store(true, Ordering::Release);
    }

    /// Whether the next message may be offered.
    pub fn is_offered(&self) -> bool {
        self.is_offered.load(Ordering::Acquire) || self.is_over()
    }

    /// Every copy of a track is launched.
    pub fn set_launched(&self, track: usize) {
        self.launched.fetch_or(1 << track, Ordering::AcqRel);
    }

    /// Whether the next message may launch copies of this track.
    pub fn is_launched(&self, track: usize) -> bool {
        self.launched.load(Ordering::Acquire) & 1 << track != 0 || self.is_over()
    }

    /// Whether its sender pushes a part of it.
    pub fn is_pushed(&self) -> bool {
        self.parts.iter().any(|part| part.way == Way::Push)
    }

    /// Some of it is written another way: what is received in its place from now on waits for its end.
    pub fn set_out_of_order(&self) {
        self.is_out_of_order.store(true, Ordering::Release);
    }

    /// Whether it stays on its lanes.
    pub fn is_in_order(&self) -> bool {
        !self.is_out_of_order.load(Ordering::Acquire)
    }

    /// Another message is to be written over all of this one: it stays on its lanes.
    pub fn follow(&self) {
        self.has_follower.store(true, Ordering::Release);
    }

    /// Whether one is.
    pub fn has_follower(&self) -> bool {
        self.has_follower.load(Ordering::Acquire)
    }

    /// Whether nothing of it is written any more.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }
}

/// How many trails of this process are not over.
static LEFT: AtomicUsize = AtomicUsize::new(0);

/// Whether any message of this process has a trail. Most have none, and need not look who else is under way.
pub fn are_left() -> bool {
    LEFT.load(Ordering::Acquire) > 0
}

/// Ends a trail when dropped.
#[derive(Debug)]
pub struct TrailEnd(Arc<Trail>);

impl TrailEnd {
    /// Of a message with this trail.
    pub fn of(trail: &Arc<Trail>) -> TrailEnd {
        LEFT.fetch_add(1, Ordering::AcqRel);
        TrailEnd(Arc::clone(trail))
    }

    /// Of a message that is not split: see [`Trail::undivided`].
    pub fn new(is_direct: bool) -> TrailEnd {
        TrailEnd::of(&Arc::new(Trail::undivided(is_direct)))
    }

    /// What it ends.
    pub fn trail(&self) -> &Arc<Trail> {
        &self.0
    }
}

impl Drop for TrailEnd {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Release);
        LEFT.fetch_sub(1, Ordering::AcqRel);
    }
}
