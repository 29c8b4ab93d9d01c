//! The sender's side of a transfer: it is offered in a slot, and then its receiver takes it, or asks for
//! what it cannot take by itself.

use std::sync::Arc;
use std::time::Instant;

use crate::cuda::{chunks, Export};
use crate::node::{Asked, Message, Peer, Rts, SlotState, Sums};
use crate::policy::pipeline::OnGpu;
use crate::stats::{self, Counter};
use crate::trace;
use crate::transfer::fault::{self, Of, Path};
use crate::transfer::fetch::{flag, AGAIN_THROUGH_HOST};
use crate::transfer::gpu::{is_for_now, Gpu};
use crate::transfer::life::{self, Life, Outcome, Protocol, Side};
use crate::transfer::put::{Put, PutStep};
use crate::transfer::relays::share_a_gpu;
use crate::transfer::serve::staged_parts::StagedParts;
use crate::transfer::serve::{EagerSend, PipelineSend, Source, Trouble};
use crate::transfer::story::Parts;
use crate::transfer::Env;

/// The result of a look at a transfer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Advance {
    /// Something has moved.
    pub moved: bool,
    /// Its staging is being filled, or will be.
    pub serving: bool,
    /// It will be filled from this moment on, unless its receiver comes first and rings.
    pub until: Option<Instant>,
    /// The sender is through with it.
    pub closed: bool,
    /// The whole payload is in host memory.
    pub eager: bool,
}

/// How this rank's transfers are being taken.
#[derive(Clone, Copy, Debug)]
pub struct Taking {
    /// How many are under way.
    pub under_way: usize,
    /// When one of them was last seen to be taken.
    pub at: Option<Instant>,
}

/// What a sender offers.
pub struct Offer<'a> {
    /// The receiving rank.
    pub peer: Arc<Peer>,
    /// Where the bytes are.
    pub source: Source,
    /// What the slot says of it.
    pub message: Message,
    /// Checksums of the bytes.
    pub sums: Option<&'a Sums>,
    /// A free slot of this rank's.
    pub slot: u32,
    /// Eager: a free cell of this rank's with room for the bytes, and whether the receiver is expected to read the
    /// buffer before they lie there.
    pub cell: Option<(u32, bool)>,
    /// The put to the receive of an RTR.
    pub put: Option<Put>,
}

/// A transfer that is offered.
pub struct Outgoing {
    peer: Arc<Peer>,
    slot: u32,
    nonce: u64,
    source: Source,
    bytes: u64,
    serve: Option<PipelineSend>,
    /// Its staged parts, if it is multipath.
    staged_parts: Option<Box<StagedParts>>,
    /// The put to the receive of an RTR.
    put: Option<Put>,
    /// The eager part: the send must complete without its receiver, as it is a standard send up to the eager
    /// limit.
    eager_send: Option<EagerSend>,
    /// How many steps of the sender have failed.
    failures: u32,
    /// This rank has said that the message cannot be had.
    is_given_up: bool,
    /// Why the message is lost, if this rank has found that out.
    lost: Option<Box<str>>,
    /// The receiver finds its memory by files of its chunks.
    is_shared: bool,
    /// The slot is in use: the receiver may still read it.
    is_open: bool,
    /// It is closed, and its receiver cannot have it.
    has_failed: bool,
    /// What went over staging, of a transfer over several paths. Known once it is over.
    parts: Option<Parts>,
    life: Life,
}

impl Outgoing {
    /// Offers a transfer. Its receiver is to be told of the RTS. None if the slot cannot be had; what the
    /// offer held is given back then.
    pub fn offer(env: &Env, gpu: &mut Gpu, offer: Offer<'_>) -> Option<(Outgoing, Rts)> {
        let own = env.node.own();
        let _copies = trace::copies_of_next();
        let Offer {
            peer,
            source,
            mut message,
            sums,
            slot,
            cell,
            put,
        } = offer;
        let bytes = message.length;
        let mut eager_send =
            cell.map(|(cell, is_expected)| EagerSend::new(source, bytes, cell, is_expected));
        if let Some(eager_send) = &mut eager_send {
            // The copy overlaps with building and sending the RTS.
            eager_send.begin(gpu, own);
        }
        if sums.is_some() {
            message.flags |= flag::SUMS;
        }
        if let Some(put) = &put {
            let rtr = put.rtr();
            message.flags |= flag::PUT_EARLY;
            message.extra = [rtr.tag, u64::from(rtr.line)];
        }
        let nonce = own.post_with(slot, &message, sums);
        let mut life = Life::offered(Side::Sender);
        life.trace_message(&message, nonce.unwrap_or_default());
        // A payload from host memory is in the ring before the receiver hears of the message.
        if let (Source::Host(_), Some(eager_send), Some(posted), Some(nonce)) =
            (source, &mut eager_send, own.slot(slot), nonce)
        {
            let filled = eager_send.poll(gpu, own, &posted.ring(nonce));
            if matches!(filled, Ok(true)) && posted.retire(nonce).is_ok() {
                life.arrive(Protocol::Eager, bytes);
                stats::add(Counter::SendsEager, 1);
            }
        }
        if put.is_some() {
            life.transition(life::State::Moving(Protocol::Put));
        }
        let outgoing = Outgoing {
            peer,
            slot,
            nonce: nonce.unwrap_or_default(),
            source,
            bytes,
            serve: None,
            staged_parts: None,
            put,
            eager_send,
            failures: 0,
            is_given_up: false,
            lost: None,
            is_shared: chunks::needs(&Export::from(&message)).is_some(),
            is_open: true,
            has_failed: false,
            parts: None,
            life,
        };
        let Some(nonce) = nonce else {
            outgoing.give_back(env);
            return None;
        };
        let rts = Rts {
            job: env.node.launch().hash,
            sender: env.world_rank,
            slot,
            nonce,
            sequence: message.sequence,
            length: bytes,
            digest: message.digest(),
        };
        Some((outgoing, rts))
    }

    /// Takes the offer back, as its receiver was not told of it.
    pub fn withdraw(self, env: &Env) {
        if !self.cancel(env) {
            // The receiver had matched it early, and counts the messages that it takes.
            self.peer.announce();
        }
        self.give_back(env);
    }

    /// Takes the offer back, unless its receiver has taken it. True if it has not; the next look closes it.
    pub fn cancel(&self, env: &Env) -> bool {
        let slot = env.node.own().slot(self.slot);
        slot.is_some_and(|slot| slot.cancel(self.nonce).is_ok())
    }

    fn give_back(self, env: &Env) {
        let own = env.node.own();
        if let Some(eager_send) = self.eager_send {
            eager_send.abandon(own);
        }
        if let Some(put) = self.put {
            put.abandon();
        }
        own.free(self.slot);
    }

    /// The receiving rank.
    pub fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    /// How far it is.
    pub fn life(&self) -> Life {
        self.life
    }

    /// Records the final outcome.
    pub fn end(&mut self, outcome: Outcome) {
        self.life.end(outcome);
    }

    /// What went over staging, once it is over.
    pub fn parts(&self) -> Option<Parts> {
        self.parts
    }

    /// The sender may reuse the buffer.
    pub fn is_complete(&self) -> bool {
        self.life.is_over() || !self.is_open
    }

    /// The slot is in use: the receiver may still read it.
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// It is closed, and its receiver cannot have it: see [`Outgoing::why_failed`].
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Until when it waits for its receiver before its cell is filled, if it does.
    pub fn waits_until(&self, taking: &Taking) -> Option<Instant> {
        let eager_send = self.eager_send.as_ref()?;
        eager_send.waits_until(taking.under_way, taking.at)
    }

    /// The put to the receive of an RTR, if there is one.
    pub fn put(&self) -> Option<&Put> {
        self.put.as_ref()
    }

    /// It completes only when its receiver comes.
    pub fn awaits_receiver(&self) -> bool {
        let is_put = |put: &Put| put.is_whole();
        self.eager_send.is_none() && !self.put.as_ref().is_some_and(is_put)
    }

    /// Its sender waits for it alone. True if that changes when the sender must look at it.
    pub fn hurry(&mut self) -> bool {
        let eager_send = self.eager_send.as_mut();
        eager_send.map(EagerSend::hurry).is_some()
    }

    /// Whether its receiver may still take it, or is taking it.
    pub fn is_wanted(&self, env: &Env) -> bool {
        let slot = env.node.own().slot(self.slot);
        let state = slot.and_then(|slot| slot.state(self.nonce).ok());
        !(self.peer.finalizing() && matches!(state, Some(SlotState::Posted | SlotState::Eager)))
    }

    /// Its receiver has died. True if it is lost by that; `is_over`: its sender does not care any more.
    pub fn died(&mut self, env: &Env, is_over: bool) -> bool {
        if !self.give_up(env) {
            return false;
        }
        if is_over || self.peer.finalizing() {
            log::debug!("rank {} ended without it", self.peer.world_rank());
            return false;
        }
        self.lost = Some(fault::died(self.of(), self.path(), true));
        true
    }

    /// Why its receiver cannot have it.
    pub fn why_failed(&mut self) -> Box<str> {
        let why = self.lost.take();
        why.unwrap_or_else(|| fault::text(self.of(), self.path(), &"its receiver cannot have it"))
    }

    /// The message cannot be had, or there is nobody to receive it: the slot is closed at the next look.
    /// False if it was over already.
    pub fn give_up(&mut self, env: &Env) -> bool {
        let slot = env.node.own().slot(self.slot);
        let given_up = slot.is_some_and(|slot| slot.fail(self.nonce, env.failed).is_ok());
        self.is_given_up |= given_up;
        given_up
    }

    fn of(&self) -> Of {
        Of::To(self.peer.world_rank())
    }

    fn path(&self) -> Path {
        match (&self.eager_send, &self.serve) {
            (Some(_), _) => Path::Eager,
            (None, Some(serve)) if serve.is_on_gpu() => Path::GpuPipeline,
            (None, Some(_)) => Path::HostPipeline,
            (None, None) => Path::Direct,
        }
    }

    /// The receiver has claimed the message: brings what the receiver has left to this rank.
    fn help(&mut self, env: &Env, gpu: &mut Gpu, asked: Option<Asked>) -> Advance {
        // A message from host memory has one path only.
        let (Some(asked), Source::Device { context, address }) = (asked, self.source) else {
            return Advance::default();
        };
        let (peer, bytes) = (&self.peer, self.bytes);
        let staged_parts = self.staged_parts.get_or_insert_with(|| {
            let staged_parts = StagedParts::begin(env, gpu, peer, asked, context, address, bytes);
            Box::new(staged_parts)
        });
        let moved = staged_parts.poll(env, gpu);
        let serving = !staged_parts.is_over();
        if moved {
            self.peer.ring_doorbell();
        }
        Advance {
            moved,
            serving,
            ..Advance::default()
        }
    }

    /// A step of the sender has failed. It is tried again a few times. Only a pipeline in GPU memory still
    /// has a simpler path left.
    fn step_failed(&mut self, env: &Env, trouble: Trouble) {
        let Trouble::Driver(error) = trouble else {
            self.lost = Some(fault::lost(
                self.of(),
                self.path(),
                &"its ring was written over",
            ));
            stats::add(Counter::Corrupt, 1);
            self.give_up(env);
            return;
        };
        let error = &error;
        self.failures += 1;
        let is_on_gpu = self.serve.as_ref().is_some_and(PipelineSend::is_on_gpu);
        // Memory of the GPU is being given back.
        let is_withdrawn = is_on_gpu && is_for_now(error);
        if self.failures < fault::ATTEMPTS && !error.context_is_gone() && !is_withdrawn {
            fault::tried_again(self.of(), self.path(), error);
            return;
        }
        let slot = env.node.own().slot(self.slot);
        if is_on_gpu && slot.is_some_and(|slot| slot.want_host(self.nonce).is_ok()) {
            self.failures = 0;
            stats::add(Counter::Retries, 1);
            fault::survived(self.of(), self.path(), error, AGAIN_THROUGH_HOST);
            return;
        }
        if slot.is_some_and(|slot| slot.refuse(self.nonce, env.failed).is_ok()) {
            self.is_given_up = true;
            self.lost = Some(fault::lost(self.of(), self.path(), error));
        } else {
            fault::survived(self.of(), self.path(), error, "left to its receiver");
        }
    }

    /// Checks the slot, and serves what the receiver asks for.
    pub fn advance(&mut self, env: &Env, gpu: &mut Gpu, taking: &mut Taking) -> Advance {
        let _copies = self.life.copies();
        let Some(put) = &mut self.put else {
            return self.advance_posted(env, gpu, taking);
        };
        let is_whole = put.is_whole();
        match put.poll(gpu) {
            PutStep::Over => self.advance_posted(env, gpu, taking),
            // The receiver asks for the rest of the message in the same way as for any other message.
            pushing if !is_whole => {
                let advance = self.advance_posted(env, gpu, taking);
                Advance {
                    moved: advance.moved || pushing != PutStep::Flying,
                    serving: advance.serving || pushing == PutStep::Flying,
                    ..advance
                }
            }
            // The receiver has nothing to say before that: a look would only take the slot's cache line from
            // it.
            PutStep::Flying => Advance {
                serving: true,
                ..Advance::default()
            },
            PutStep::Ended { has_landed } => {
                // The put does not read the buffer any more. A message that was given up meanwhile has no
                // receiver.
                let is_there = has_landed && !self.is_given_up;
                if is_there {
                    self.life.arrive(Protocol::Put, self.bytes);
                }
                // The receiver has nothing more to ask for.
                Advance {
                    moved: true,
                    serving: !is_there,
                    ..Advance::default()
                }
            }
        }
    }

    /// The same for a message without a put, or whose put is over: acts on the state of its slot.
    #[allow(clippy::too_many_lines, reason = "one arm for each state of a slot")]
    fn advance_posted(&mut self, env: &Env, gpu: &mut Gpu, taking: &mut Taking) -> Advance {
        let own = env.node.own();
        let Some(slot) = own.slot(self.slot) else {
            return Advance {
                closed: true,
                ..Advance::default()
            };
        };
        let mut state = slot.settled(self.nonce);
        if self.is_given_up && state.is_ok_and(|state| !state.is_final()) {
            state = Ok(SlotState::Failed);
        }
        let ring = slot.ring(self.nonce);
        if self.eager_send.is_some() && matches!(state, Ok(SlotState::Claimed | SlotState::Done)) {
            taking.at = Some(Instant::now());
        }
        // The program has its buffer back: nobody is served from it, whatever somebody has written to the slot.
        let is_over = self.life.is_over();
        let step = match (state, &mut self.eager_send) {
            // The receiver has all that it needs.
            (Ok(SlotState::Eager), Some(eager_send)) if eager_send.is_in_ring() => {
                return Advance {
                    eager: true,
                    ..Advance::default()
                }
            }
            (Ok(SlotState::Claimed), _) if is_over => return Advance::default(),
            // The receiver reads the buffer itself, and may leave some of it to this rank.
            (Ok(SlotState::Claimed), _) => {
                if self.life.is_offered() {
                    self.life.transition(life::State::Matched);
                }
                let asked = slot.offered(self.nonce);
                return self.help(env, gpu, asked);
            }
            (Ok(SlotState::Posted), None) => return Advance::default(),
            (Ok(SlotState::Posted), Some(eager_send)) => {
                let until = eager_send.waits_until(taking.under_way, taking.at);
                if until.is_some_and(|until| Instant::now() < until) {
                    return Advance {
                        serving: true,
                        until,
                        ..Advance::default()
                    };
                }
                let step = eager_send.poll(gpu, own, &ring);
                // `retire` fails if the receiver was faster: it finds the payload in the ring, or has read
                // the buffer.
                if matches!(step, Ok(true)) && slot.retire(self.nonce).is_ok() {
                    stats::add(Counter::SendsEager, 1);
                    self.life.arrive(Protocol::Eager, self.bytes);
                }
                step
            }
            (Ok(SlotState::WantHost), Some(eager_send)) => {
                eager_send.is_asked_for = true;
                if !is_over {
                    self.life.reach(life::State::Moving(Protocol::HostPipeline));
                }
                if eager_send.is_in_ring() && ring.is_filled_to(1) {
                    return Advance::default();
                }
                eager_send.poll(gpu, own, &ring)
            }
            (Ok(state @ (SlotState::WantGpu | SlotState::WantHost)), _) if !is_over => {
                let wants_gpu = state == SlotState::WantGpu;
                self.life.reach(life::State::Moving(match wants_gpu {
                    true => Protocol::GpuPipeline,
                    false => Protocol::HostPipeline,
                }));
                let peer = &self.peer;
                if std::mem::take(&mut self.is_shared) {
                    gpu.not_found(peer.world_rank());
                }
                let serve = self.serve.get_or_insert_with(|| {
                    let is_shared = || share_a_gpu(env, peer);
                    let on_gpu = wants_gpu.then(|| OnGpu::between(is_shared()));
                    PipelineSend::new(self.source, self.bytes, on_gpu)
                });
                serve.poll(gpu, own, &ring, wants_gpu)
            }
            (Ok(SlotState::Done | SlotState::Cancelled), _) => return self.close(env, false),
            (Ok(SlotState::Failed), _) => return self.close(env, true),
            _ => {
                // Only this rank sets these states, and it has not; or the receiver wants what it has got.
                if self.failures != u32::MAX {
                    self.failures = u32::MAX;
                    let why = "its slot was written over";
                    self.lost = Some(fault::lost(self.of(), self.path(), &why));
                    stats::add(Counter::Corrupt, 1);
                }
                return self.close(env, true);
            }
        };
        if let Err(trouble) = step {
            self.step_failed(env, trouble);
        }
        let moved = step.unwrap_or(true);
        if moved {
            self.peer.ring_doorbell();
        }
        Advance {
            moved,
            serving: true,
            ..Advance::default()
        }
    }

    /// The receiver is through with the message, or never will be: ends what is under way and frees the slot.
    fn close(&mut self, env: &Env, has_failed: bool) -> Advance {
        let own = env.node.own();
        let is_released = self
            .staged_parts
            .as_mut()
            .is_none_or(|staged_parts| staged_parts.release(env));
        let is_written = self.put.as_mut().is_some_and(|put| !put.is_over());
        let drained = is_released
            & !is_written
            & match (&mut self.serve, &mut self.eager_send) {
                (Some(serve), _) => {
                    serve.release_filled(own);
                    serve.is_drained(own)
                }
                (None, Some(eager_send)) => eager_send.release(own),
                (None, None) => true,
            };
        if !drained {
            return Advance {
                serving: true,
                ..Advance::default()
            };
        }
        if !self.life.is_over() && !has_failed {
            // If the receiver was faster, it may have read the buffer although the payload is in the ring,
            // too.
            let slot = own.slot(self.slot);
            let is_emptied = slot.is_some_and(|slot| slot.ring(self.nonce).in_flight() == Ok(0));
            let eager = self.eager_send.as_ref();
            let eager = eager.filter(|eager_send| is_emptied && eager_send.is_in_ring());
            let is_asked_for = eager.is_some_and(|eager_send| eager_send.is_asked_for);
            // Of an offer that the receiver took back before this rank saw it, this rank has brought nothing.
            let asked = slot.and_then(|slot| slot.offered(self.nonce));
            let is_multipath = asked.is_some_and(|asked| !asked.is_all_put);
            let parts = || {
                (self.staged_parts.as_ref()).map_or_else(Parts::default, |staged| staged.parts())
            };
            self.parts = is_multipath.then(parts);
            let is_on_gpu = self.serve.as_ref().is_some_and(PipelineSend::is_on_gpu);
            let protocol = if is_on_gpu {
                Protocol::GpuPipeline
            } else if self.serve.is_some() || is_asked_for {
                Protocol::HostPipeline
            } else if is_multipath {
                Protocol::Multipath
            } else if eager.is_some() {
                Protocol::Eager
            } else if self.peer.world_rank() == env.world_rank {
                Protocol::Own
            } else {
                Protocol::Get
            };
            self.life.arrive(protocol, self.bytes);
        }
        own.free(self.slot);
        self.is_open = false;
        self.has_failed = has_failed;
        Advance {
            moved: true,
            closed: true,
            ..Advance::default()
        }
    }
}
