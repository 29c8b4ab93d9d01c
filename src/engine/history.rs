//! What this rank has learnt of its peers at run time, and of the streams of messages between them.
//!
//! Two more records are elsewhere, because they are read by others than the holder of the core's lock: what a
//! receiver would prefer is in its segment, where its senders read it (`Wish`), and what the engine does not
//! see is counted by any thread (`Env::unseen`).

use super::rtr::{Received, Sent};
use crate::policy::history::Depths;
use crate::policy::peers::{Exchanges, PeerMix};

/// See the module.
#[derive(Default)]
pub struct PeerHistory {
    /// Which ranks this rank deals with.
    pub mix: PeerMix,
    /// Which ranks it has recently sent long messages to.
    pub exchanges: Exchanges,
    /// How deep the windows of its peers are, and how plans for their messages turned out.
    pub windows: Depths,
    /// The last message of each stream that this rank sends.
    pub sent: Sent,
    /// The last message of each stream that it receives, and how its receives have fared.
    pub received: Received,
}
