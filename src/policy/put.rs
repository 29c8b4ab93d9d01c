//! Who writes a message: its sender (put), or its receiver by reading it (get).

use super::facts;

facts! {
    /// The facts that decide whether a message that goes both ways is put.
    trait ExchangeFacts {
        /// It is long enough to be put.
        fn is_long() -> bool;
        /// It is one of those that go both ways between its sender and this rank, and between no others.
        fn is_exchange() -> bool;
        /// All messages under way to this rank are from its sender.
        fn is_alone() -> bool;
        /// Messages may take the direct path.
        fn may_be_direct() -> bool;
        /// No put from its sender has failed.
        fn may_put() -> bool;
    }
}

/// Whether a message that goes both ways is put, as a GPU that reads and is read is slower.
pub fn by_exchange(facts: &mut impl ExchangeFacts) -> bool {
    facts.is_long()
        && facts.is_exchange()
        && facts.is_alone()
        && facts.may_be_direct()
        && facts.may_put()
}

facts! {
    /// The facts that decide whether the sender makes all copies between two ranks.
    trait OneSideFacts {
        /// The sender has the lower rank.
        fn is_lower() -> bool;
        /// Both buffers are on one GPU, on which processes take turns.
        fn is_turned() -> bool;
        /// Messages may be put.
        fn are_put() -> bool;
        /// Messages may take the direct path.
        fn may_be_direct() -> bool;
        /// No put from the sender has failed.
        fn may_put() -> bool;
    }
}

/// Whether the sender makes the copies between the two: then one process waits for its turn on the GPU, not
/// both.
pub fn is_for_sender(facts: &mut impl OneSideFacts) -> bool {
    facts.is_lower()
        && facts.is_turned()
        && facts.are_put()
        && facts.may_be_direct()
        && facts.may_put()
}
