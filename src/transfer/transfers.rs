//! Transfers that no MPI message carries: a process offers bytes, tells a peer of the offer in a way of its
//! own, and the peer brings them to where they belong. Collectives, benches and tests use them.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slab::Slab;

use crate::config::Config;
use crate::cuda::{self, Buffer, Error, Kind};
use crate::node::{Backoff, Message, Node, RTS_BYTES};
use crate::transfer::export::describe;
use crate::transfer::fetch::{
    flag, uses_host, Destination, Fetch, Landed, NotTaken, Others, RouteContext, Rows, Step,
};
use crate::transfer::gpu::Gpu;
use crate::transfer::history::PeerHistory;
use crate::transfer::route::Router;
use crate::transfer::send::{Offer, Outgoing, Taking};
use crate::transfer::serve::Source;
use crate::transfer::story::Path;
use crate::transfer::Env;

/// How long peers may use staging of this process after it has ended.
const RELAYS_WAIT: Duration = Duration::from_secs(5);

/// What is under way of this process.
pub struct Transfers {
    env: Env,
    gpu: Gpu,
    router: Router,
    history: PeerHistory,
    sends: Slab<Outgoing>,
    receives: Slab<Box<Fetch>>,
    /// Number given to the latest transfer that was taken.
    taken: u64,
    /// When one of those that this process sends was last seen to be taken.
    taken_at: Option<Instant>,
}

/// A transfer that this process sends.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "its memory is in use until it has ended"]
pub struct Sending(usize);

/// A transfer that this process receives.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "its memory is in use until it has ended"]
pub struct Receiving(usize);

/// What a peer is told of an offer: an RTS, as it travels.
pub type Told = [u8; RTS_BYTES];

/// Why nothing was offered.
#[derive(Debug, thiserror::Error)]
pub enum NotOffered {
    /// There is no such process on this node, or it does not run with the library.
    #[error("rank {0} is not reachable on this node")]
    NoPeer(u32),
    /// As many transfers are under way as there are slots.
    #[error("all slots are in use")]
    NoSlot,
    /// The memory cannot be used.
    #[error(transparent)]
    Driver(#[from] Error),
}

/// How a transfer has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The bytes are there; by this path.
    Complete(Path),
    /// They are lost; the text says why.
    Failed(Box<str>),
}

impl Transfers {
    /// For a process that is registered on its node. `failed`: what a peer's error code is of a transfer that
    /// cannot be had.
    pub fn new(config: Config, node: Node, failed: i32) -> Transfers {
        node.announce_device_use();
        let env = Env::new(config, node, failed);
        let mut gpu = Gpu::new(&env.config);
        gpu.open_parcels(&env);
        Transfers {
            router: Router::new(&env.config),
            gpu,
            env,
            history: PeerHistory::default(),
            sends: Slab::new(),
            receives: Slab::new(),
            taken: 0,
            taken_at: None,
        }
    }

    /// The node that this process is on.
    pub fn node(&self) -> &Node {
        &self.env.node
    }

    /// Offers the first `bytes` from `from` on, in device or host memory, to a process of this node.
    ///
    /// # Safety
    /// The memory is valid for reading, and does not change, until the transfer has ended.
    pub unsafe fn offer(
        &mut self,
        to: u32,
        from: *const c_void,
        bytes: u64,
    ) -> Result<(Sending, Told), NotOffered> {
        let Transfers { env, gpu, .. } = self;
        let peer = env.node.peer(to).ok_or(NotOffered::NoPeer(to))?;
        let mut message = Message {
            source: env.world_rank,
            destination: to,
            length: bytes,
            ..Message::default()
        };
        let source = match cuda::classify(from) {
            Kind::Device(buffer) => {
                let context = prepare(env, gpu, &buffer)?;
                if uses_host(env, bytes) {
                    gpu.prepare_wide(context, env.node.own());
                }
                describe(env, gpu, &peer, &buffer, &mut message);
                let address = buffer.address;
                Source::Device { context, address }
            }
            _ => {
                message.flags |= flag::HOST;
                Source::Host(from.cast())
            }
        };
        let slot = env.node.own().alloc(None).ok_or(NotOffered::NoSlot)?;
        let offer = Offer {
            peer: Arc::clone(&peer),
            source,
            message,
            sums: None,
            slot,
            cell: None,
            pushed: None,
        };
        let (outgoing, rts) = Outgoing::offer(env, gpu, offer).ok_or(NotOffered::NoSlot)?;
        peer.will_ring();
        let id = self.sends.insert(outgoing);
        Ok((Sending(id), rts.encode()))
    }

    /// Takes what a peer has offered, and begins to bring it to `to`, where there is room for `capacity`
    /// bytes. Of more than that, nothing comes.
    ///
    /// # Safety
    /// The memory is valid for writing until the transfer has ended, and nobody else uses it.
    pub unsafe fn take(
        &mut self,
        told: &Told,
        to: *mut c_void,
        capacity: u64,
    ) -> Result<Receiving, NotTaken> {
        let landed = Landed::read(&self.env, told)?;
        let (mut place, mut kept) = (Destination::Host(to.cast()), None);
        if let Kind::Device(buffer) = cuda::classify(to) {
            let address = buffer.address;
            match prepare(&self.env, &mut self.gpu, &buffer) {
                Ok(context) => place = Destination::Device { context, address },
                Err(error) => {
                    log::debug!("device buffer {address:#x}: {error}");
                    landed.turn_down(&self.env);
                    return Err(NotTaken::Lost);
                }
            }
            kept = Some(buffer);
        }
        let receives = &self.receives;
        let find = || -> Rows {
            let mut rows: Rows = receives
                .iter()
                .filter_map(|(_, one)| one.under_way())
                .collect();
            rows.sort_by_key(|row| row.began);
            rows
        };
        let others = Others::new(&find);
        let sender = landed.rts().sender;
        let sends_to = self
            .sends
            .iter()
            .any(|(_, one)| one.peer().world_rank() == sender);
        let are_several = self.history.mix.are_several();
        let routes = RouteContext {
            router: &mut self.router,
            buffer: kept.as_ref(),
            others: &others,
            checks: Vec::new(),
            history: &mut self.history,
            sends_to,
            is_putting: false,
            computes: false,
            are_several,
        };
        let gpu = &mut self.gpu;
        let mut fetch = Fetch::begin(&self.env, gpu, landed, place, capacity, routes, None)?;
        self.taken += 1;
        fetch.set_began(self.taken);
        if fetch.wants_order() {
            // Others that come through staging to the same place are waited for.
            let staged = fetch.staged();
            let before = self.receives.iter_mut();
            let before = before.filter_map(|(_, one)| one.end_before(staged.as_ref()?));
            let before = before.collect();
            fetch.set_order(gpu, before);
        }
        gpu.launch();
        Ok(Receiving(self.receives.insert(fetch)))
    }

    /// Moves on what this process sends: its peers take most by themselves, but not what lies in memory that
    /// they cannot map, nor what is split. True if anything moved.
    pub fn serve(&mut self) -> bool {
        let mut moved = false;
        let mut taking = Taking {
            under_way: self.sends.len(),
            at: self.taken_at,
        };
        for (_, outgoing) in &mut self.sends {
            if outgoing.is_open() {
                moved |= outgoing
                    .advance(&self.env, &mut self.gpu, &mut taking)
                    .moved;
            }
        }
        self.taken_at = taking.at;
        moved |= self.gpu.relays.are_wished(&self.env) && self.gpu.relays.serve(&self.env);
        self.gpu.launch();
        moved
    }

    /// Whether a transfer that this process sends has ended. Moves all of them on.
    pub fn sent(&mut self, sending: Sending) -> Result<Ended, Sending> {
        self.serve();
        let outgoing = &mut self.sends[sending.0];
        if outgoing.is_open() {
            return Err(sending);
        }
        let ended = match outgoing.has_failed() {
            true => Ended::Failed(outgoing.why_failed()),
            false => Ended::Complete(outgoing.life().path()),
        };
        self.sends.remove(sending.0);
        Ok(ended)
    }

    /// Whether a transfer that this process receives has ended. Moves it on.
    pub fn received(&mut self, receiving: Receiving) -> Result<Ended, Receiving> {
        let fetch = &mut self.receives[receiving.0];
        let ended = match fetch.poll(&self.env, &mut self.gpu) {
            Step::Pending(_) => {
                self.gpu.launch();
                return Err(receiving);
            }
            Step::Done => Ended::Complete(fetch.life().path()),
            Step::Failed(why) => Ended::Failed(why),
        };
        self.receives.remove(receiving.0);
        Ok(ended)
    }

    /// Gives back all that this process holds of the driver and of its peers, and leaves the node. Nothing
    /// may be under way.
    pub fn close(mut self) {
        debug_assert!(self.sends.is_empty() && self.receives.is_empty());
        let deadline = Instant::now() + RELAYS_WAIT;
        let mut backoff = Backoff::sleeping(Duration::from_millis(5));
        loop {
            let is_closed = self.gpu.relays.close(&self.env);
            if is_closed || Instant::now() > deadline {
                self.gpu.relays.free(&self.env, is_closed);
                break;
            }
            backoff.snooze();
        }
        self.gpu.close();
        self.env.node.unregister();
    }
}

fn prepare(env: &Env, gpu: &mut Gpu, buffer: &Buffer) -> Result<cuda::ContextKey, Error> {
    let context = gpu.prepare(buffer)?;
    gpu.relays.note(env, buffer, context);
    Ok(context)
}

#[cfg(test)]
#[path = "transfers_tests.rs"]
mod tests;
