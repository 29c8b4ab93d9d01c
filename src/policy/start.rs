//! How a message that its receiver has claimed begins: by one copy, over several paths, written by its
//! sender, or behind another message.

#[cfg(any(test, feature = "golden"))]
use serde::{Deserialize, Serialize};

use super::facts;

/// What became of a plan whose copies this rank makes alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub enum OneOwner {
    /// It is under way.
    Begun,
    /// The plan is one copy.
    Direct,
    /// There is no plan.
    No,
}

/// How a message begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub enum Start {
    /// It is under way; its receiver makes all copies.
    OneOwner,
    /// It is under way over several paths, each end making copies.
    Multipath,
    /// It is under way, written by its sender as a whole.
    Put,
    /// It is under way by one copy, and planned meanwhile.
    GetPlanned,
    /// By one copy.
    Get,
    /// By one copy, in order with others that are received in its place.
    GetInOrder,
    /// Through its sender's staging.
    Pipeline,
    /// Once those are over that are received in its place.
    QueuedInPlace,
    /// Once the message before it in its place is over.
    QueuedBehind,
}

facts! {
    /// The facts that decide how a message begins. Each is asked once at most, except
    /// [`StartFacts::is_below`].
    trait StartFacts {
        /// It goes to device memory.
        fn is_to_device() -> bool;
        /// This rank cannot map the memory that holds it.
        fn is_staged() -> bool;
        /// All of it can be read from another rank's device memory.
        fn may_be_split() -> bool;
        /// How deep its window is, if messages of its length are split.
        fn window() -> Option<u32>;
        /// Tries to make all copies of the message, if this rank is to make them.
        fn one_owner() -> OneOwner;
        /// Each message that is received in its place comes by one copy.
        fn are_all_direct() -> bool;
        /// Some message under way has an order token.
        fn has_tokens() -> bool;
        /// Another message is received in its place.
        fn is_below() -> bool;
        /// It takes one copy without a plan, as those before it did.
        fn is_unplanned() -> bool;
        /// It is timed, because the rate of its pair of GPUs is not known well; then it takes one copy.
        fn is_timed() -> bool;
        /// Its sender makes all copies between the two, which share a GPU.
        fn is_for_sender() -> bool;
        /// This rank writes to a receive of the sender's.
        fn is_putting() -> bool;
        /// All messages that are received in its place come from its sender, lie at the same address, and are
        /// in order.
        fn are_alike() -> bool;
        /// Some message that is received in its place has an order token.
        fn is_behind_any() -> bool;
        /// Another message of its sender's is before it: one in its place, if it is below one.
        fn has_before() -> bool;
        /// Tries to have the sender write it in its turn.
        fn begins_put_in_turn() -> bool;
        /// It is so long that a GPU should not read it while it writes another.
        fn is_long() -> bool;
        /// Tries to have the sender write it, as this rank writes to the sender.
        fn begins_put() -> bool;
        /// The sender is to write the direct part.
        fn is_put() -> bool;
        /// It is likely to take one copy, and need not be planned first.
        fn begins_directly() -> bool;
        /// Plans it, and begins if the plan has several paths or parts.
        fn begins_multipath() -> bool;
    }
}

/// How a message begins.
pub fn start(facts: &mut impl StartFacts) -> Start {
    if !facts.is_to_device() {
        return Start::Get;
    }
    if facts.is_staged() {
        // The engine puts it in order when it asks the sender for it.
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
    // A message that is received in the place of another goes as that one does.
    let has_tokens = facts.has_tokens();
    let is_planned = window.is_some() && {
        let is_below = has_tokens && facts.is_below();
        let is_unplanned = !is_below && facts.is_unplanned();
        if is_unplanned {
            // Whether or not it is timed, it takes one copy.
            facts.is_timed();
        }
        !is_unplanned
    };
    let is_for_sender = may_split && facts.is_for_sender();
    if !is_planned && !has_tokens && !is_for_sender && !facts.is_putting() {
        // It goes on the stream of its sender, and nothing else is under way that goes in another way.
        return Start::Get;
    }
    let is_below = (has_tokens || window.is_some()) && facts.is_below();
    // A message that goes one way, too, waits only for those that are received in its place.
    if is_below && !facts.are_alike() {
        // Copies of one stream stay in order; messages over several paths use several streams.
        return match facts.is_behind_any() {
            true => Start::QueuedInPlace,
            false => Start::Get,
        };
    }
    let has_before = facts.has_before();
    let is_held = is_below && has_before;
    if is_for_sender {
        // Nothing else of the sender's is in the way. It is offered at once, unless another is received in
        // the same place.
        if facts.begins_put_in_turn() {
            return Start::Put;
        }
        if !is_held {
            // A message that is put in its place is on no stream of this rank's.
            return Start::GetInOrder;
        }
    } else if may_split && facts.is_putting() && facts.is_long() && !is_held {
        // Both ranks write, because a GPU that also reads does one after the other.
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
