//! Transfers without MPI. A process offers bytes and tells a peer about the offer by its own means. The peer
//! copies the bytes to its buffer. Today a bench and a test use this.

mod expected;

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slab::Slab;

use crate::config::Config;
use crate::cuda::{self, Buffer, Error, Kind};
use crate::node::{Backoff, Message, Node, Peer, RtrId, RTS_BYTES};
use crate::transfer::export::describe;
use crate::transfer::fetch::{
    flag, Destination, Fetch, Landed, NotTaken, Others, RouteContext, Rows, Step,
};
use crate::transfer::gpu::Gpu;
use crate::transfer::history::PeerHistory;
use crate::transfer::route::Router;
use crate::transfer::send::{Offer, Outgoing, Taking};
use crate::transfer::serve::Source;
use crate::transfer::story::Path;
pub use crate::transfer::transfers::expected::Expected;
use crate::transfer::transfers::expected::{put, waiting, Announced};
use crate::transfer::Env;

/// How long the end of a process waits for peers that use its memory, and for its own copies.
const CLOSE_WAIT: Duration = Duration::from_secs(5);
/// How often peers are checked for being alive.
const LIVENESS_PERIOD: Duration = Duration::from_millis(250);
/// The clock is read once in so many rounds of progress that move nothing.
const ROUNDS: u32 = 64;

/// The transfers of this process. One thread at a time uses it, and calls [`Transfers::progress`] for as long
/// as anything is under way: peers may wait for what this process brings.
pub struct Transfers {
    env: Env,
    gpu: Gpu,
    router: Router,
    history: PeerHistory,
    sends: Slab<Outgoing>,
    receives: Slab<Incoming>,
    /// Transfers that peers were told of by an RTR, and have not offered.
    expected: Slab<Announced>,
    /// Those of `receives` that have not ended, in the order in which they were taken.
    moving: Vec<usize>,
    /// Number given to the latest transfer that was taken.
    taken: u64,
    /// When one of those that this process sends was last seen to be taken.
    taken_at: Option<Instant>,
    rounds: u32,
    checked: Instant,
}

/// A transfer that this process receives.
struct Incoming {
    fetch: Box<Fetch>,
    capacity: u64,
    ended: Option<Ended>,
}

/// Names a transfer that this process sends.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "its memory is in use until it has ended"]
pub struct Sending(usize);

/// Names a transfer that this process receives.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "its memory is in use until it has ended"]
pub struct Receiving(usize);

/// The encoded RTS of an offer. The peer needs it to take the transfer.
pub type Descriptor = [u8; RTS_BYTES];

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
    /// All bytes have arrived, by this path.
    Complete(Path),
    /// There was no room for so many bytes, and none has arrived. Its sender sees it as complete.
    Truncated(u64),
    /// The bytes are lost; the text says why.
    Failed(Box<str>),
}

/// Memory for a transfer, on a device or in the host's memory.
///
/// Invariant: it is valid until the transfer has ended, or is forgotten. It does not change meanwhile if it is offered; if
/// it is written, nobody else uses it.
#[derive(Clone, Copy, Debug)]
pub struct LentMemory {
    start: *mut c_void,
    bytes: u64,
}

impl LentMemory {
    /// So many bytes from an address on.
    ///
    /// # Safety
    /// They are as the type's invariant has them.
    pub unsafe fn new(start: *mut c_void, bytes: u64) -> LentMemory {
        LentMemory { start, bytes }
    }

    /// The first so many of them.
    pub fn first(self, bytes: u64) -> LentMemory {
        assert!(bytes <= self.bytes, "beyond what was lent");
        LentMemory { bytes, ..self }
    }
}

impl Transfers {
    /// For a process that is registered on its node. `failed`: the error code that a peer gets if a transfer
    /// cannot be delivered; not negative.
    ///
    /// # Panics
    /// If `failed` is negative: slots use such values for something else.
    pub fn new(config: Config, node: Node, failed: i32) -> Transfers {
        assert!(failed >= 0, "{failed} is no error code");
        // Without a driver, all memory would be taken for the host's.
        cuda::arm();
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
            expected: Slab::new(),
            moving: Vec::new(),
            taken: 0,
            taken_at: None,
            rounds: 0,
            checked: Instant::now(),
        }
    }

    /// The node that this process is on.
    pub fn node(&self) -> &Node {
        &self.env.node
    }

    /// Offers memory to a process of this node. `number`: of a transfer that the peer may expect. If it does
    /// ([`Transfers::expect`]), this process writes the bytes to the peer's buffer at once.
    pub fn offer(
        &mut self,
        to: u32,
        from: LentMemory,
        number: Option<u64>,
    ) -> Result<(Sending, Descriptor), NotOffered> {
        let LentMemory { start: from, bytes } = from;
        let Transfers { env, gpu, .. } = self;
        let peer = env.node.destination(to).ok_or(NotOffered::NoPeer(to))?;
        let mut message = Message {
            source: env.world_rank,
            destination: to,
            length: bytes,
            ..Message::default()
        };
        let mut early = None;
        let source = match cuda::classify(from) {
            Kind::Device(buffer) => {
                let context = prepare(env, gpu, &buffer)?;
                // The copy overlaps with the rest of the offer.
                early = number.and_then(|number| {
                    let waiting = waiting(env.world_rank, number, bytes);
                    put(env, gpu, &peer, &waiting, (context, &buffer))
                });
                describe(env, gpu, &peer, &buffer, &mut message);
                let address = buffer.address;
                Source::Device { context, address }
            }
            _ => {
                message.flags |= flag::HOST;
                Source::Host(from.cast())
            }
        };
        let Some(slot) = env.node.own().alloc(None) else {
            if let Some(put) = early {
                put.abandon();
            }
            return Err(NotOffered::NoSlot);
        };
        let offer = Offer {
            peer: Arc::clone(&peer),
            source,
            message,
            sums: None,
            slot,
            cell: None,
            put: early,
        };
        let (outgoing, rts) = Outgoing::offer(env, gpu, offer).ok_or(NotOffered::NoSlot)?;
        peer.will_ring();
        let id = self.sends.insert(outgoing);
        Ok((Sending(id), rts.encode()))
    }

    /// Takes what a peer has offered, once, and begins to bring it to `to`. A transfer for which there is no
    /// room moves no bytes.
    pub fn take(&mut self, descriptor: &Descriptor, to: LentMemory) -> Result<Receiving, NotTaken> {
        let LentMemory {
            start: to,
            bytes: capacity,
        } = to;
        let landed = Landed::read(&self.env, descriptor)?;
        let to = match cuda::classify(to) {
            Kind::Device(buffer) => Ok(buffer),
            _ => Err(to.cast()),
        };
        self.begin(landed, to, capacity, None)
    }

    /// Claims what has landed, and begins to bring it to device memory, or to host memory (`Err`).
    fn begin(
        &mut self,
        landed: Landed,
        to: Result<Buffer, *mut u8>,
        capacity: u64,
        told: Option<RtrId>,
    ) -> Result<Receiving, NotTaken> {
        let place = match &to {
            Err(host) => Destination::Host(*host),
            Ok(buffer) => match prepare(&self.env, &mut self.gpu, buffer) {
                Ok(context) => Destination::Device {
                    context,
                    address: buffer.address,
                },
                Err(error) => {
                    log::debug!("device buffer {:#x}: {error}", buffer.address);
                    landed.turn_down(&self.env);
                    return Err(NotTaken::Lost);
                }
            },
        };
        let (moving, receives) = (&self.moving, &self.receives);
        let find = || -> Rows {
            let rows = moving.iter();
            rows.filter_map(|id| receives[*id].fetch.under_way())
                .collect()
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
            buffer: to.as_ref().ok(),
            others: &others,
            checks: Vec::new(),
            history: &mut self.history,
            sends_to,
            is_putting: false,
            computes: false,
            are_several,
        };
        let gpu = &mut self.gpu;
        let mut fetch = Fetch::begin(&self.env, gpu, landed, place, capacity, routes, told)?;
        self.taken += 1;
        fetch.set_began(self.taken);
        let id = self.receives.insert(Incoming {
            fetch,
            capacity,
            ended: None,
        });
        self.put_in_order(id);
        self.moving.push(id);
        self.gpu.launch();
        Ok(Receiving(id))
    }

    /// A transfer that is to come through its sender's staging waits for what is received in its place before.
    fn put_in_order(&mut self, id: usize) {
        let fetch = &self.receives[id].fetch;
        if !fetch.wants_order() {
            return;
        }
        let staged = fetch.staged();
        let (moving, receives) = (&self.moving, &mut self.receives);
        let others = moving.iter().filter(|other| **other != id);
        let before = others.filter_map(|other| {
            let staged = staged.as_ref()?;
            receives[*other].fetch.end_before(staged)
        });
        let tokens = before.collect();
        receives[id].fetch.set_order(&mut self.gpu, tokens);
    }

    /// Makes progress on all transfers of this process: those that it receives, those that peers cannot read
    /// themselves, and split ones. True if anything moved.
    pub fn progress(&mut self) -> bool {
        let moved = self.receive() | self.send();
        self.gpu.launch();
        self.rounds = self.rounds.wrapping_add(1);
        if !moved && self.rounds % ROUNDS == 0 {
            self.look_after();
        }
        moved
    }

    fn receive(&mut self) -> bool {
        let mut moved = false;
        for at in 0..self.moving.len() {
            let id = self.moving[at];
            self.put_in_order(id);
            let incoming = &mut self.receives[id];
            let fetch = &mut incoming.fetch;
            let ended = match fetch.poll(&self.env, &mut self.gpu) {
                Step::Pending(has_moved) => {
                    moved |= has_moved;
                    continue;
                }
                Step::Done if fetch.length() > incoming.capacity => {
                    Ended::Truncated(fetch.length())
                }
                Step::Done => Ended::Complete(fetch.life().path()),
                Step::Failed(why) => Ended::Failed(why),
            };
            incoming.ended = Some(ended);
            moved = true;
        }
        let receives = &self.receives;
        self.moving.retain(|id| receives[*id].ended.is_none());
        moved
    }

    fn send(&mut self) -> bool {
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
        moved | (self.gpu.relays.are_wished(&self.env) && self.gpu.relays.serve(&self.env))
    }

    /// Ends transfers of peers that have died, and collects garbage, now and then.
    fn look_after(&mut self) {
        if self.checked.elapsed() >= LIVENESS_PERIOD {
            self.checked = Instant::now();
            let own = self.env.world_rank;
            let is_dead = |peer: &Peer| peer.world_rank() != own && !peer.alive();
            for (_, outgoing) in &mut self.sends {
                if outgoing.is_open() && is_dead(outgoing.peer()) {
                    outgoing.died(&self.env, false);
                }
            }
            for id in &self.moving {
                let fetch = &mut self.receives[*id].fetch;
                if is_dead(fetch.peer()) {
                    fetch.give_up_on_the_dead(&self.env, &mut self.gpu);
                }
            }
            for peer in self.env.node.peers().iter().filter(|peer| is_dead(peer)) {
                let expected = self.expected.iter().map(|(_, one)| one);
                let theirs = expected.filter(|one| one.from == peer.world_rank());
                theirs.for_each(|one| self.env.node.own().withdraw_rtr(one.told));
                self.gpu.forget_peer(u64::from(peer.pid()));
            }
            self.gpu.relays.reclaim(&self.env);
        }
        let is_sending = !self.sends.is_empty();
        self.gpu.collect_garbage(&self.env, true, is_sending);
    }

    /// How a transfer that this process sends has ended, if it has. Makes no progress.
    pub fn test_send(&mut self, sending: Sending) -> Result<Ended, Sending> {
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

    /// How a transfer that this process receives has ended, if it has. Makes no progress.
    pub fn test_receive(&mut self, receiving: Receiving) -> Result<Ended, Receiving> {
        match self.receives[receiving.0].ended.take() {
            Some(ended) => {
                self.receives.remove(receiving.0);
                Ok(ended)
            }
            None => Err(receiving),
        }
    }

    /// Takes an offer back that its peer has not taken. `Err` if the peer has, or had expected it, so that it
    /// was written already: then the transfer ends as any other.
    pub fn cancel(&mut self, sending: Sending) -> Result<(), Sending> {
        let outgoing = &self.sends[sending.0];
        if outgoing.put().is_some() || !outgoing.cancel(&self.env) {
            return Err(sending);
        }
        self.send();
        self.test_send(sending).map(|_| ())
    }
}

impl Drop for Transfers {
    /// Ends what is under way, gives back all that this process holds of the driver and of its peers, and
    /// leaves the node.
    fn drop(&mut self) {
        for (_, outgoing) in &mut self.sends {
            outgoing.give_up(&self.env);
        }
        // What no peer has begun to write is not written any more.
        let _ = self.is_written_to();
        let deadline = Instant::now() + CLOSE_WAIT;
        let mut backoff = Backoff::sleeping(Duration::from_millis(5));
        let is_late = || Instant::now() > deadline;
        while self.sends.iter().any(|(_, one)| one.is_open())
            || !self.moving.is_empty()
            || self.is_written_to()
        {
            if is_late() {
                log::warn!("transfers were under way when their process ended");
                break;
            }
            if !self.progress() {
                backoff.snooze();
            }
        }
        loop {
            let is_closed = self.gpu.relays.close(&self.env);
            if is_closed || is_late() {
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
