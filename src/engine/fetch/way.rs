//! Which paths a message takes that is received.

use crate::config::Assign;
use crate::cuda::Uuid;
use crate::engine::gpu::Gpu;
use crate::engine::relays::Relay;
use crate::engine::route::{RouteUse, Routed, Router};
use crate::engine::Env;
use crate::node::track::{TRACKS, TRACK_CHUNKS_MAX};
use crate::node::{Message, Part, Peer, Way, UNIT_BYTES};
use crate::plan::PathKind;
use crate::topology::Place;

/// What is asked before a message is fetched.
pub struct Ways<'a> {
    /// Who knows the node.
    pub router: &'a mut Router,
    /// The GPU of the receiver's buffer; None where that is no device memory.
    pub to: Option<Uuid>,
    /// World ranks of the senders of messages under way.
    pub under_way: &'a [u32],
}

/// The way of one message.
pub struct Chosen {
    /// What the plan uses of the links counts as used until this is dropped.
    pub routed: Routed,
    /// The parts that go over staging.
    pub parts: Vec<Part>,
    /// Whether the rest is more than what must be.
    pub has_direct: bool,
}

impl Ways<'_> {
    /// Chooses. `None`: one copy, and nobody needs to know.
    pub fn choose(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        peer: &Peer,
        message: &Message,
    ) -> Option<Chosen> {
        let to = self.to?;
        let bytes = message.length;
        if bytes < env.config.multipath || env.config.paths.is_direct_only() {
            return None;
        }
        let same = self
            .under_way
            .iter()
            .filter(|rank| **rank == message.source);
        let in_flight = 1 + same.count() as u32;
        let relays = if env.config.paths.relay {
            gpu.relays.candidates(env, message.source)
        } else {
            Vec::new()
        };
        let host = peer.layout().wide_blocks > 0;
        let mut plan = |relay: &dyn Fn(&Uuid) -> bool| {
            let usable = RouteUse {
                relay,
                host,
                may_push: false,
                assign: Assign::Own,
            };
            self.router
                .plan(env, message.device, to, bytes, in_flight, usable)
        };
        let find = |uuid: &Uuid| relays.iter().find(|relay| relay.uuid == *uuid);
        let mut routed = plan(&|uuid| find(uuid).is_some())?;
        let over: Vec<Relay> = self.relays_of(&routed, &relays);
        if over.iter().any(|relay| relay.bytes == 0) {
            for relay in over.iter().filter(|relay| relay.bytes == 0) {
                gpu.relays.wish(env, relay);
            }
            let mut plan = |relay: &dyn Fn(&Uuid) -> bool| {
                let usable = RouteUse {
                    relay,
                    host,
                    may_push: false,
                    assign: Assign::Own,
                };
                self.router
                    .plan(env, message.device, to, bytes, in_flight, usable)
            };
            drop(routed);
            routed = plan(&|uuid| find(uuid).is_some_and(|relay| relay.bytes > 0))?;
        }
        let parts = self.parts(&routed, &relays, peer);
        let kinds = routed.plan.paths().iter().map(|path| path.path.kind());
        let has_direct = kinds.into_iter().any(|kind| kind == PathKind::Direct);
        Some(Chosen {
            parts,
            has_direct,
            routed,
        })
    }

    fn relays_of(&self, routed: &Routed, relays: &[Relay]) -> Vec<Relay> {
        let places = routed.plan.paths().iter().flat_map(|path| path.path.via());
        let uuids = places.filter_map(|place| self.router.uuid(*place));
        uuids
            .filter_map(|uuid| relays.iter().find(|relay| relay.uuid == uuid).copied())
            .collect()
    }

    /// The parts of a plan that go over staging. What is left out is direct.
    fn parts(&self, routed: &Routed, relays: &[Relay], peer: &Peer) -> Vec<Part> {
        let part = |path: &crate::plan::PathPlan| {
            let (way, room) = match path.path.via() {
                [Place::Host] => (Way::Host, u64::from(peer.layout().wide_block_bytes)),
                [place @ Place::Gpu(_)] => {
                    let uuid = self.router.uuid(*place)?;
                    let relay = relays.iter().find(|relay| relay.uuid == uuid)?;
                    let way = Way::Relay {
                        owner: relay.owner,
                        row: relay.row,
                    };
                    (way, relay.bytes)
                }
                _ => return None,
            };
            // Room for a piece that is filled, one that is emptied, and one that is handed over.
            let most = (room / 3 / UNIT_BYTES * UNIT_BYTES).max(UNIT_BYTES);
            let least = path.bytes.div_ceil(u64::from(TRACK_CHUNKS_MAX));
            Some(Part {
                way,
                offset: path.offset,
                bytes: path.bytes,
                chunk_bytes: path.chunk_bytes.min(most).max(least).max(1),
            })
        };
        let parts = routed.plan.paths().iter().filter(|path| path.bytes > 0);
        parts.filter_map(part).take(TRACKS).collect()
    }
}
