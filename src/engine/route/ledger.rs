//! What messages use of the links, until they are over.

use std::sync::Arc;

use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::cuda::Uuid;
use crate::model::BYTES_PER_US;
use crate::plan::{Occupancy, Plan, MAX_HOPS, MAX_PATHS};
use crate::topology::{Place, Topology};

/// The two ends of a hop, in one word: what names a GPU to all ranks, whatever number each gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Ends(u64);

impl Ends {
    fn new(uuids: &[Uuid], from: Place, to: Place) -> Ends {
        let half = |place: Place| match place {
            Place::Gpu(gpu) => uuids.get(usize::from(gpu)).map_or(0, name),
            Place::Host => 0,
        };
        Ends(u64::from(half(from)) << 32 | u64::from(half(to)))
    }
}

/// A GPU's identity in 32 bits, never 0, which is the host (FNV-1a).
fn name(uuid: &Uuid) -> u32 {
    let hash = uuid.iter().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    });
    hash.max(1)
}

/// What one pair of GPUs uses of a hop.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Use {
    ends: Ends,
    gb_s: f64,
}

/// The messages of one pair of GPUs. They follow each other over the same links, so that several use as much as one: what
/// the latest plan says.
#[derive(Debug, Default)]
struct Pair {
    messages: u32,
    uses: Vec<Use>,
}

/// What the messages that this rank leads use of the links.
#[derive(Debug, Default)]
pub struct Ledger {
    pairs: Mutex<HashMap<(u8, u8), Pair>>,
}

/// A message's part of the ledger, until this is dropped.
#[derive(Debug)]
#[must_use = "the links count as free again when this is dropped"]
pub struct Reservation {
    ledger: Arc<Ledger>,
    pair: (u8, u8),
}

impl Ledger {
    /// Enters what a plan uses.
    pub(super) fn reserve(
        self: &Arc<Ledger>,
        topology: &Topology,
        uuids: &[Uuid],
        plan: &Plan,
    ) -> Reservation {
        let pair = (plan.message.from, plan.message.to);
        let mut pairs = self.pairs.lock();
        let entry = pairs.entry(pair).or_default();
        entry.messages += 1;
        entry.uses = uses(topology, uuids, plan);
        drop(pairs);
        Reservation {
            ledger: Arc::clone(self),
            pair,
        }
    }

    /// What all messages but those of the reservation's pair use.
    pub(super) fn others(
        &self,
        reservation: &Reservation,
        topology: &Topology,
        uuids: &[Uuid],
    ) -> Occupancy {
        let mut occupancy = Occupancy::free();
        let pairs = self.pairs.lock();
        let others = pairs.iter().filter(|(pair, _)| **pair != reservation.pair);
        let used: Vec<Use> = others
            .flat_map(|(_, pair)| pair.uses.iter().copied())
            .collect();
        drop(pairs);
        if used.is_empty() {
            return occupancy;
        }
        for (from, to, hop) in topology.hops() {
            let ends = Ends::new(uuids, from, to);
            for used in used.iter().filter(|used| used.ends == ends) {
                occupancy.add(hop.segments(), used.gb_s);
            }
        }
        occupancy
    }
}

impl Reservation {
    /// Another plan has been made for the message.
    pub(super) fn change(&mut self, topology: &Topology, uuids: &[Uuid], plan: &Plan) {
        if let Some(pair) = self.ledger.pairs.lock().get_mut(&self.pair) {
            pair.uses = uses(topology, uuids, plan);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut pairs = self.ledger.pairs.lock();
        if let Some(pair) = pairs.get_mut(&self.pair) {
            pair.messages -= 1;
            if pair.messages == 0 {
                pairs.remove(&self.pair);
            }
        }
    }
}

/// What a plan uses of each hop while its messages move.
fn uses(topology: &Topology, uuids: &[Uuid], plan: &Plan) -> Vec<Use> {
    let mut uses = Vec::with_capacity(MAX_PATHS * MAX_HOPS);
    for path in plan.paths() {
        let bytes = path.bytes as f64 * f64::from(plan.message.window);
        let gb_s = bytes / (plan.predicted_us * BYTES_PER_US);
        for ends in path.path.places().windows(2) {
            if topology.hop(ends[0], ends[1]).is_some() {
                let ends = Ends::new(uuids, ends[0], ends[1]);
                uses.push(Use { ends, gb_s });
            }
        }
    }
    uses
}
