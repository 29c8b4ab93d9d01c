//! How a message leaves its sender.

#[cfg(any(test, feature = "golden"))]
use serde::{Deserialize, Serialize};

use super::facts;
use crate::stats::Reason;

/// Where the bytes of a message lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub enum Lies {
    /// In host memory.
    Host,
    /// In one allocation of a device.
    Device,
    /// In several places.
    Several,
}

/// Who makes a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub enum Maker {
    /// The MPI library.
    Native,
    /// The MPI library; it is as long as an RTS, and counted.
    Counted,
    /// The engine, from a device.
    Device,
    /// The engine, packed.
    Parts,
    /// The engine, from host memory, as its receiver wishes.
    Host,
}

facts! {
    /// What decides who makes a send.
    trait MakerFacts {
        /// Nothing is sent, or to nobody.
        fn is_nothing() -> bool;
        /// The datatype can be looked at.
        fn is_type_known() -> bool;
        /// Where its bytes lie.
        fn lies() -> Lies;
        /// Its receiver would rather fetch it.
        fn is_wished_for() -> bool;
        /// It is as long as an RTS, and its stream is known.
        fn is_like_rts() -> bool;
    }
}

/// Who makes a send.
pub fn maker(facts: &mut impl MakerFacts) -> Maker {
    if facts.is_nothing() || !facts.is_type_known() {
        return Maker::Native;
    }
    match facts.lies() {
        Lies::Device => Maker::Device,
        Lies::Several => Maker::Parts,
        Lies::Host if facts.is_wished_for() => Maker::Host,
        Lies::Host if facts.is_like_rts() => Maker::Counted,
        Lies::Host => Maker::Native,
    }
}

/// What is known of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub enum Comm {
    /// It has an identity, and the rank is in it.
    Known,
    /// It is an intercommunicator.
    Inter,
    /// Nothing.
    Unknown,
}

/// Where another rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub enum Whereabouts {
    /// On this node.
    Here,
    /// On another.
    Elsewhere,
    /// It has not registered.
    Unregistered,
}

facts! {
    /// What decides whether a message goes by RTS.
    trait RtsFacts {
        /// The send is a buffered one.
        fn is_buffered() -> bool;
        /// It is shorter than the user wants such messages to be.
        fn is_below_threshold() -> bool;
        /// Its bytes lie in one run.
        fn is_dense() -> bool;
        /// This rank has staging, by which a receiver is served that cannot map the buffer.
        fn has_staging() -> bool;
        /// The helper runs.
        fn has_helper() -> bool;
        /// Streams are counted.
        fn is_counting() -> bool;
        /// What is known of its communicator.
        fn comm() -> Comm;
        /// Where its receiver is, if its communicator has such a rank.
        fn peer() -> Option<Whereabouts>;
        /// Its receiver recognizes an RTS in whatever receive it lands.
        fn is_ready() -> bool;
    }
}

/// Why a message does not go by RTS, if it does not.
pub fn rts(facts: &mut impl RtsFacts) -> Result<(), Reason> {
    if facts.is_buffered() {
        return Err(Reason::Buffered);
    }
    if facts.is_below_threshold() {
        return Err(Reason::TooSmall);
    }
    if !facts.is_dense() {
        return Err(Reason::NonContiguous);
    }
    if !facts.has_staging() {
        return Err(Reason::OutOfMemory);
    }
    if !facts.has_helper() {
        return Err(Reason::HelperOff);
    }
    if !facts.is_counting() {
        return Err(Reason::UnknownComm);
    }
    match facts.comm() {
        Comm::Known => {}
        Comm::Inter => return Err(Reason::Intercomm),
        Comm::Unknown => return Err(Reason::UnknownComm),
    }
    match facts.peer() {
        Some(Whereabouts::Here) => {}
        Some(Whereabouts::Elsewhere) => return Err(Reason::NotOnNode),
        Some(Whereabouts::Unregistered) => return Err(Reason::NotRegistered),
        None => return Err(Reason::UnknownComm),
    }
    match facts.is_ready() {
        true => Ok(()),
        false => Err(Reason::NotReady),
    }
}
