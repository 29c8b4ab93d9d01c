//! The order of consecutive multipath messages from one sender.
//!
//! An offer names the offer before it. The sender claims the chunks of that one first, so that pieces of
//! staging go to the older message, and puts are in order on the sender's lane. If both messages are received
//! in the same place (bandwidth tests do so), they are split alike: a staged part writes on one lane, in the
//! order of the messages. If a part must be brought another way after all, it is not brought to where the
//! next message may have been written already: in the end only that message is left there.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;

use crate::node::{Asked, Part, Way};

/// How far a message is, for the message behind it.
#[derive(Debug)]
pub struct OrderToken {
    /// How it is split.
    pub parts: Vec<Part>,
    /// Its offer, if it has one.
    pub asked: Option<Asked>,
    /// The message behind it may be offered.
    is_offered: AtomicBool,
    /// Staged parts, as bits, of which every copy has been launched on the part's own lanes.
    launched: AtomicU32,
    /// Another message is received in the same place.
    has_follower: AtomicBool,
    is_over: AtomicBool,
    /// Some of it is written in another way than its parts say.
    is_out_of_order: AtomicBool,
    /// It is one copy, on the lane of its sender.
    is_direct: bool,
    /// The plan under way that makes all of its copies; 0 if there is none (yet).
    drive: AtomicU64,
}

impl OrderToken {
    /// For a message that begins.
    pub fn new(parts: Vec<Part>, asked: Option<Asked>) -> OrderToken {
        OrderToken {
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

    /// For a message that is not split: what is behind it waits for its end, except other such messages from
    /// its sender.
    pub fn undivided(is_direct: bool) -> OrderToken {
        let token = OrderToken {
            is_direct,
            ..OrderToken::new(Vec::new(), None)
        };
        token.set_offered();
        token
    }

    /// Whether it is one copy, on the lane of its sender, where such copies stay in order.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// This rank has launched all of its copies, as the plan with this number; with 0 it launches no more.
    pub fn set_drive(&self, number: u64) {
        self.drive.store(number, Ordering::Release);
    }

    /// The plan that makes all of its copies, if that is launched. What is received in its place may be
    /// ordered behind that plan.
    pub fn drive(&self) -> Option<u64> {
        Some(self.drive.load(Ordering::Acquire)).filter(|number| *number != 0)
    }

    /// Its sender knows of it, or need not know.
    pub fn set_offered(&self) {
        self.is_offered.store(true, Ordering::Release);
    }

    /// Whether the next message may be offered.
    pub fn is_offered(&self) -> bool {
        self.is_offered.load(Ordering::Acquire) || self.is_over()
    }

    /// Every copy of a staged part is launched.
    pub fn set_launched(&self, staged_part: usize) {
        self.launched.fetch_or(1 << staged_part, Ordering::AcqRel);
    }

    /// Whether the next message may launch copies of this staged part.
    pub fn is_launched(&self, staged_part: usize) -> bool {
        self.launched.load(Ordering::Acquire) & 1 << staged_part != 0 || self.is_over()
    }

    /// Whether its sender puts a part of it.
    pub fn is_put(&self) -> bool {
        self.parts.iter().any(|part| part.way == Way::Put)
    }

    /// Some of it is written in another way: later messages that are received in its place wait for its end.
    pub fn set_out_of_order(&self) {
        self.is_out_of_order.store(true, Ordering::Release);
    }

    /// Whether it stays on its lanes.
    pub fn is_in_order(&self) -> bool {
        !self.is_out_of_order.load(Ordering::Acquire)
    }

    /// Another message will be written over all of this one: this one stays on its lanes.
    pub fn follow(&self) {
        self.has_follower.store(true, Ordering::Release);
    }

    /// Whether another message will be written over all of this one.
    pub fn has_follower(&self) -> bool {
        self.has_follower.load(Ordering::Acquire)
    }

    /// Whether nothing of it is written any more.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }
}

/// How many order tokens of this process are not over.
static LEFT: AtomicUsize = AtomicUsize::new(0);

/// Whether any message of this process has an order token. Most have none, and need not look which others are
/// under way.
pub fn are_left() -> bool {
    LEFT.load(Ordering::Acquire) > 0
}

/// Ends an order token when dropped.
#[derive(Debug)]
pub struct OrderTokenEnd(Arc<OrderToken>);

impl OrderTokenEnd {
    /// Ends this order token.
    pub fn of(token: &Arc<OrderToken>) -> OrderTokenEnd {
        LEFT.fetch_add(1, Ordering::AcqRel);
        OrderTokenEnd(Arc::clone(token))
    }

    /// For a message that is not split: see [`OrderToken::undivided`].
    pub fn new(is_direct: bool) -> OrderTokenEnd {
        OrderTokenEnd::of(&Arc::new(OrderToken::undivided(is_direct)))
    }

    /// The order token that it ends.
    pub fn token(&self) -> &Arc<OrderToken> {
        &self.0
    }
}

impl Drop for OrderTokenEnd {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Release);
        LEFT.fetch_sub(1, Ordering::AcqRel);
    }
}
