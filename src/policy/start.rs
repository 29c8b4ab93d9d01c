//! How a message sets out that its receiver has claimed: by one copy, over several paths, written by its sender, or behind
//! another message.

#[cfg(any(test, feature = "golden"))]
use serde::{Deserialize, Serialize};

use super::facts;

/// What became of a plan of which this rank makes all copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub enum OneOwner {
    /// It is under way.
    Begun,
    /// The plan is one copy.
    Direct,
    /// There is none.
    No,
}

/// How a message sets out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub enum Start {
    /// It is under way; all copies are its receiver's.
    OneOwner,
    /// It is under way over several paths, each end making copies.
    Multipath,
    /// It is under way, written by its sender as a whole.
    Put,
    /// It is under way by one copy, and planned meanwhile.
    GetPlanned,
    /// By one copy.
    Get,
    /// By one copy, in order with others received in its place.
    GetInOrder,
    /// Through its sender's staging.
    Pipeline,
    /// Once those are over that are received in its place.
    QueuedInPlace,
    /// Once the one before it in its place is over.
    QueuedBehind,
}

facts! {
    /// What decides how a message sets out. Each is asked once at most, but for [`StartFacts::is_below`].
    trait StartFacts {
        /// It goes to device memory.
        fn is_to_device() -> bool;
        /// This rank cannot map the memory that it lies in.
        fn is_staged() -> bool;
        /// All of it can be read from another rank's device memory.
        fn may_be_split() -> bool;
        /// How deep its window is, if messages of its length are split.
        fn window() -> Option<u32>;
        /// Tries to make all copies of it, if this rank is to.
        fn one_owner() -> OneOwner;
        /// What is received in its place comes by one copy each.
        fn are_all_direct() -> bool;
        /// Any message under way is in an order of its own.
        fn has_trails() -> bool;
        /// Another is received in its place.
        fn is_below() -> bool;
        /// It takes one copy without a plan, as those before it did.
        fn is_unplanned() -> bool;
        /// It is timed, as its pair's rate is not known well; then it takes one copy.
        fn is_timed() -> bool;
        /// Its sender makes all copies between the two, which share a GPU.
        fn is_for_sender() -> bool;
        /// This rank writes to a receive of its sender's.
        fn is_putting() -> bool;
        /// All that is received in its place is of its sender, at the same place, and in order.
        fn are_alike() -> bool;
        /// Something received in its place is in an order of its own.
        fn is_behind_any() -> bool;
        /// It is behind another message of its sender's. In its place, if it is below one.
        fn has_before() -> bool;
        /// Tries to have its sender write it in its turn.
        fn begins_put_in_turn() -> bool;
        /// It is so long that a GPU had better not read it and write another.
        fn is_long() -> bool;
        /// Tries to have its sender write it, as this rank writes to that.
        fn begins_put() -> bool;
        /// Its sender is to write the direct part.
        fn is_put() -> bool;
        /// It is likely to take one copy, and need not be planned before.
        fn begins_directly() -> bool;
        /// Plans it, and begins if the plan has several paths or parts.
        fn begins_multipath() -> bool;
    }
}

/// How a message sets out.
pub fn start(facts: &mut impl StartFacts) -> Start {
    if !facts.is_to_device() {
        return Start::Get;
    }
    if facts.is_staged() {
        // It finds its place in the order when its sender is asked for it.
        return Start::Pipeline;
    }
    let may_split = facts.may_be_split();
    let window = if may_split { facts.window() } else { None };
    if may_split {
        match facts.one_owner() {
            OneOwner::Begun => return Start::OneOwner,
            OneOwner::Direct if facts.are_all_direct() => return Start::GetInOrder,
            OneOwner::Direct => return Start::QueuedInPlace,
            OneOwner::No => {}
        }
    }
    // What is received in the place of another goes as that does.
    let has_trails = facts.has_trails();
    let is_planned = window.is_some() && {
        let is_below = has_trails && facts.is_below();
        let is_unplanned = !is_below && facts.is_unplanned();
        if is_unplanned {
            // Whether or not it is timed, it takes one copy.
            facts.is_timed();
        }
        !is_unplanned
    };
    let is_for_sender = may_split && facts.is_for_sender();
    if !is_planned && !has_trails && !is_for_sender && !facts.is_putting() {
        // On the stream of its sender, and nothing is under way that goes in another way.
        return Start::Get;
    }
    let is_below = (has_trails || window.is_some()) && facts.is_below();
    // Also what goes one way only waits for those that are received in its place.
    if is_below && !facts.are_alike() {
        // Copies of one stream stay in order; those of messages over several paths have several.
        return match facts.is_behind_any() {
            true => Start::QueuedInPlace,
            false => Start::Get,
        };
    }
    let has_before = facts.has_before();
    let is_held = is_below && has_before;
    if is_for_sender {
        // Nothing else of the sender's is in the way: it is offered at once, unless it is received in the same place.
        if facts.begins_put_in_turn() {
            return Start::Put;
        }
        if !is_held {
            // What is put in its place is on no stream of this rank's.
            return Start::GetInOrder;
        }
    } else if may_split && facts.is_putting() && facts.is_long() && !is_held {
        // Both write, as one that also reads does one after the other.
        if facts.begins_put() {
            return Start::Put;
        }
    } else if is_planned {
        let is_put = facts.is_put();
        if !has_before && !is_put {
            if facts.is_timed() {
                return Start::Get;
            }
            if facts.begins_directly() {
                return Start::GetPlanned;
            }
        }
        if facts.begins_multipath() {
            return Start::Multipath;
        }
    }
    match is_held {
        true => Start::QueuedBehind,
        false => Start::Get,
    }
}
