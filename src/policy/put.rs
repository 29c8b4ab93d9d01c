//! Who writes a message: its sender (put), or its receiver by reading it (get).

use super::facts;

facts! {
    /// What decides who writes a message.
    trait PutFacts {
        /// It is as long as messages are that are put.
        fn is_long() -> bool;
        /// It is one of those that go both ways between its sender and this rank, and between no others.
        fn is_exchange() -> bool;
        /// All messages under way to this rank are from its sender.
        fn is_alone() -> bool;
        /// Its sender has the lower rank.
        fn is_lower() -> bool;
        /// Both buffers are on one GPU, on which processes take turns.
        fn is_turned() -> bool;
        /// Messages may be put.
        fn are_put() -> bool;
        /// Messages may take the direct path.
        fn may_be_direct() -> bool;
        /// No put from its sender has failed.
        fn may_put() -> bool;
    }
}

/// Whether a message that goes both ways is put, as a GPU that reads and is read is slower.
pub fn by_exchange(facts: &mut impl PutFacts) -> bool {
    facts.is_long()
        && facts.is_exchange()
        && facts.is_alone()
        && facts.may_be_direct()
        && facts.may_put()
}

/// Whether the sender makes all copies between the two ranks: one process on a GPU waits for its turn there, not
/// both.
pub fn is_for_sender(facts: &mut impl PutFacts) -> bool {
    facts.is_lower()
        && facts.is_turned()
        && facts.are_put()
        && facts.may_be_direct()
        && facts.may_put()
}
