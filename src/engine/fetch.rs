//! The receiver's side of a transfer: brings the payload of a descriptor.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::cuda::{ContextKey, Copy, Error, Export, InFlight, IpcHandle, Purpose};
use crate::engine::gpu::{is_for_now, Gpu};
use crate::engine::Env;
use crate::node::{Descriptor, Message, Peer, Refused, Slot, State};
use crate::stats::{self, Counter, Reason};

/// Flags of a slot's message.
pub mod flag {
    /// The IPC handle is valid; otherwise the payload comes through the host ring only.
    pub const EXPORTED: u32 = 1;
}

/// Where the payload goes.
#[derive(Clone, Copy, Debug)]
pub enum Destination {
    /// Host memory.
    Host(*mut u8),
    /// Device memory.
    Device {
        /// Context of the memory.
        context: ContextKey,
        /// Address.
        address: u64,
    },
}

/// By which path it comes.
enum Path {
    /// Nothing to bring.
    Nothing,
    /// Straight from the sender's device memory.
    Direct(InFlight),
    /// Through the sender's host ring; the pieces in flight to a device, oldest first.
    Ring {
        flying: VecDeque<(InFlight, u64)>,
        arrived: u64,
        /// The sender has put the whole payload there by itself.
        hosted: bool,
    },
}

impl Path {
    fn ring(hosted: bool) -> Path {
        Path::Ring {
            flying: VecDeque::new(),
            arrived: 0,
            hosted,
        }
    }
}

/// A transfer under way.
pub struct Fetch {
    peer: Arc<Peer>,
    slot: u32,
    nonce: u64,
    message: Message,
    wanted: u64,
    to: Destination,
    path: Path,
    own: bool,
}

// SAFETY: the destination belongs to a pending receive, which MPI has lent to the library until it completes.
unsafe impl Send for Fetch {}

/// What became of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Under way; whether something moved.
    Pending(bool),
    /// The payload is there and the sender knows.
    Done,
    /// It cannot be had.
    Failed,
}

/// Why a landed message is no descriptor to be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// Ordinary bytes.
    Value,
    /// It claims to be one, and is not believed.
    Bad,
}

impl Fetch {
    /// Reads what has landed; if it is a descriptor for this rank, the message is claimed and its payload set in
    /// motion. `capacity` is what the receive can hold: of a longer message nothing is fetched.
    pub fn begin(
        env: &Env,
        gpu: &mut Gpu,
        bytes: &[u8],
        to: Destination,
        capacity: u64,
    ) -> Result<Fetch, NotTaken> {
        let descriptor = match Descriptor::decode(bytes, env.node.launch().hash) {
            Ok(descriptor) => descriptor,
            Err(crate::node::Rejection::NotADescriptor) => return Err(NotTaken::Value),
            Err(crate::node::Rejection::Corrupt(why)) => {
                log::debug!("a message that begins like a descriptor: {why}");
                return Err(NotTaken::Bad);
            }
        };
        let Some(peer) = env.node.peer(descriptor.sender) else {
            return Err(NotTaken::Bad);
        };
        let (message, hosted) = match peer.validate(&descriptor) {
            Ok((slot, message)) if message.destination == env.world_rank => {
                match slot.claim(descriptor.nonce) {
                    Ok(()) => (message, false),
                    Err(Refused::State(State::Hosted)) => (message, true),
                    Err(_) => return Err(NotTaken::Bad),
                }
            }
            _ => return Err(NotTaken::Bad),
        };
        let own = descriptor.sender == env.world_rank;
        let wanted = if message.length > capacity {
            0
        } else {
            message.length
        };
        let mut fetch = Fetch {
            peer,
            slot: descriptor.slot,
            nonce: descriptor.nonce,
            message,
            wanted,
            to,
            path: Path::Nothing,
            own,
        };
        if wanted > 0 && hosted {
            fetch.path = Path::ring(true);
        } else if wanted > 0 {
            fetch.start(gpu);
        }
        Ok(fetch)
    }

    /// True length of the message, bytes.
    pub fn length(&self) -> u64 {
        self.message.length
    }

    /// The sender.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    fn slot(&self) -> Option<&Slot> {
        self.peer.slot(self.slot)
    }

    fn start(&mut self, gpu: &mut Gpu) {
        match self.start_direct(gpu) {
            Ok(copy) => self.path = Path::Direct(copy),
            Err(reason) => {
                if let Some((reason, error)) = reason {
                    stats::fallback(reason, self.wanted);
                    log::debug!(
                        "rank {}: direct copy not possible, through host memory: {error}",
                        self.message.source
                    );
                }
                self.want_host();
            }
        }
    }

    /// Queues the copy from the sender's memory; `Err(None)` where that is not the way for this pair of buffers.
    fn start_direct(&self, gpu: &mut Gpu) -> Result<InFlight, Option<(Reason, Error)>> {
        let Destination::Device { context, address } = self.to else {
            return Err(None);
        };
        let source = self.message.base + self.message.offset;
        let copy_from = |src| Copy::Linear {
            dst: address,
            src,
            bytes: self.wanted,
        };
        let sender = self.message.source;
        if self.own {
            return gpu
                .pull(context, sender, copy_from(source), None)
                .map_err(|error| Some((Reason::DriverError, error)));
        }
        if self.message.flags & flag::EXPORTED == 0 {
            return Err(None);
        }
        let export = Export {
            handle: IpcHandle(self.message.ipc_handle),
            base: self.message.base,
            size: self.message.allocation_bytes,
            offset: self.message.offset,
            buffer_id: self.message.buffer_id,
            uuid: self.message.device,
        };
        let end = self.message.offset.checked_add(self.wanted);
        if end.is_none_or(|end| end > export.size) {
            return Err(None);
        }
        let mapping = gpu
            .map(context, u64::from(self.peer.pid()), &export)
            .map_err(|error| Some((Reason::MappingFailed, error)))?;
        let copy = copy_from(mapping.address_of(export.offset));
        gpu.pull(context, sender, copy, Some(mapping))
            .map_err(|error| Some((Reason::DriverError, error)))
    }

    /// Asks the sender to bring the payload through its ring in host memory.
    fn want_host(&mut self) {
        if let Some(slot) = self.slot() {
            let _ = slot.want_host(self.nonce);
        }
        self.path = Path::ring(false);
        self.peer.ring_doorbell();
    }

    /// Moves the transfer on, without waiting.
    pub fn poll(&mut self, gpu: &mut Gpu) -> Step {
        match &mut self.path {
            Path::Nothing => self.acknowledge(),
            Path::Direct(copy) => match copy.poll() {
                Ok(false) => Step::Pending(false),
                Ok(true) => {
                    let (messages, bytes) = if self.own {
                        (Counter::SelfReceives, Counter::SelfBytes)
                    } else {
                        (Counter::DirectReceives, Counter::DirectBytes)
                    };
                    stats::add(messages, 1);
                    stats::add(bytes, self.wanted);
                    self.acknowledge()
                }
                Err(error) => {
                    log::warn!(
                        "copy from rank {} failed, again through host memory: {error}",
                        self.message.source
                    );
                    stats::add(Counter::Retries, 1);
                    self.want_host();
                    Step::Pending(true)
                }
            },
            Path::Ring { .. } => self.poll_ring(gpu),
        }
    }

    fn poll_ring(&mut self, gpu: &mut Gpu) -> Step {
        let Some(slot) = self.peer.slot(self.slot) else {
            return Step::Failed;
        };
        match slot.state(self.nonce) {
            Ok(State::Claimed | State::WantHost | State::Hosted) => {}
            other => {
                log::debug!(
                    "message from rank {} cannot be had: {other:?}",
                    self.message.source
                );
                return Step::Failed;
            }
        }
        let Path::Ring {
            flying,
            arrived,
            hosted,
        } = &mut self.path
        else {
            return Step::Failed;
        };
        let mut moved = false;
        loop {
            let Ok(entry) = slot.ring(self.nonce).peek(flying.len()) else {
                return self.fail("its ring is corrupt");
            };
            let Some(entry) = entry else { break };
            let Some((piece, bytes)) = self.peer.piece_of(entry) else {
                return self.fail("its ring is corrupt");
            };
            let started: u64 = *arrived + flying.iter().map(|(_, bytes)| bytes).sum::<u64>();
            let bytes = bytes as u64;
            if started + bytes > self.wanted {
                return self.fail("it brings more than the message");
            }
            match self.to {
                Destination::Host(address) => {
                    // SAFETY: the receive can hold `wanted` bytes from `address`, of which these are the next; the
                    // piece is mapped, `bytes` long, and the sender's until it is popped.
                    unsafe {
                        let to = address.add(started as usize);
                        to.copy_from_nonoverlapping(piece.as_ptr(), bytes as usize);
                    }
                    let _ = slot.ring(self.nonce).pop();
                    *arrived += bytes;
                    moved = true;
                    self.peer.ring_doorbell();
                }
                Destination::Device { context, address } => {
                    if let Some((start, length)) = self.peer.staging() {
                        // SAFETY: the peer's segment stays mapped while the node is registered; pins are dropped
                        // before that, at finalize.
                        unsafe { gpu.pin(context, start.as_ptr(), length) };
                    }
                    let from = piece.as_ptr().expose_provenance() as u64;
                    match gpu.copy(
                        context,
                        Purpose::HostToDevice,
                        address + started,
                        from,
                        bytes,
                    ) {
                        Ok(copy) => flying.push_back((copy, bytes)),
                        Err(error) if is_for_now(&error) => break,
                        Err(error) => return self.fail(&error.to_string()),
                    }
                    moved = true;
                }
            }
        }
        while let Some((copy, bytes)) = flying.front_mut() {
            match copy.poll() {
                Ok(false) => break,
                Ok(true) => {
                    *arrived += *bytes;
                    flying.pop_front();
                    let _ = slot.ring(self.nonce).pop();
                    self.peer.ring_doorbell();
                    moved = true;
                }
                Err(error) => return self.fail(&error.to_string()),
            }
        }
        if *arrived == self.wanted {
            let (messages, bytes) = if *hosted {
                (Counter::EagerReceives, Counter::EagerBytes)
            } else {
                (Counter::HostRingReceives, Counter::HostRingBytes)
            };
            stats::add(messages, 1);
            stats::add(bytes, self.wanted);
            return self.acknowledge();
        }
        Step::Pending(moved)
    }

    fn fail(&self, why: &str) -> Step {
        log::error!(
            "message of {} bytes from rank {} is lost: {why}",
            self.message.length,
            self.message.source
        );
        self.acknowledge();
        Step::Failed
    }

    fn acknowledge(&self) -> Step {
        self.peer.acknowledge(self.slot, self.nonce);
        Step::Done
    }
}
