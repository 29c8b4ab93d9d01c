//! Sends by RTS: whether a message may go that way, and what the sender does until its receiver is through.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Instant;

use super::put::{Put, PutStep};
use super::{Advance, Mode, Send, SendArgs, SendKind};
use crate::cuda::{chunks, Allocation, Buffer, Error, Export};
use crate::engine::comms::{self, Identity};
use crate::engine::core::Core;
use crate::engine::counts::{Stream, Wish};
use crate::engine::fault::{self, Of, Path};
use crate::engine::fetch::{flag, uses_host, AGAIN_THROUGH_HOST};
use crate::engine::gpu::{is_for_now, Gpu};
use crate::engine::life::{self, Life, Protocol, Side};
use crate::engine::native::native_isend;
use crate::engine::relays::share_a_gpu;
use crate::engine::serve::staged_parts::StagedParts;
use crate::engine::serve::{EagerSend, PipelineSend, Source, Trouble};
use crate::engine::story::{Parts, Story};
use crate::engine::types::TypeInfo;
use crate::engine::Env;
use crate::mpi::Handle;
use crate::node::{Asked, Message, Peer, Rts, SlotState, Sums, RTS_BYTES};
use crate::policy::decided_by;
use crate::policy::pipeline::OnGpu;
use crate::policy::send::{self as policy, Comm, RtsFacts, Whereabouts};
use crate::stats::{self, Counter, Reason};

/// How many open sends are looked through for one to a certain rank.
const LOOKED_AT: usize = 16;

/// A message whose RTS is out.
pub(super) struct PendingSend {
    peer: Arc<Peer>,
    slot: u32,
    nonce: u64,
    pub(super) native: Handle,
    /// What the native send reads. It must neither move nor change before that send is complete.
    wire: [u8; RTS_BYTES],
    source: Source,
    bytes: u64,
    serve: Option<PipelineSend>,
    /// Its staged parts, if it is multipath.
    staged_parts: Option<Box<StagedParts>>,
    /// The put to the receive of an RTR.
    pushed: Option<Put>,
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
    pub(super) is_open: bool,
}

impl PendingSend {
    /// The message cannot be had, or there is nobody to receive it: the slot is closed at the next look.
    /// False if it was over already.
    pub(super) fn give_up(&mut self, env: &Env) -> bool {
        let slot = env.node.own().slot(self.slot);
        let given_up = slot.is_some_and(|slot| slot.fail(self.nonce, env.abi.err_other).is_ok());
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
        if slot.is_some_and(|slot| slot.refuse(self.nonce, env.abi.err_other).is_ok()) {
            self.is_given_up = true;
            self.lost = Some(fault::lost(self.of(), self.path(), error));
        } else {
            fault::survived(self.of(), self.path(), error, "left to its receiver");
        }
    }
}

/// Where the message of a send lies.
pub(super) enum Origin<'a> {
    /// In device memory.
    Device(&'a Buffer),
    /// In host memory. Such a message never goes to this rank itself.
    Host(*const u8),
}

/// Why an RTS was not sent.
pub(super) enum Unsent {
    /// The message goes by bcopy.
    Reason(Reason),
    /// The same, as its buffer's context cannot be had. This is reported once the message is on its way.
    Trouble(Error),
    /// The MPI library refused it.
    Code(c_int),
}

impl Core {
    #[allow(
        clippy::too_many_lines,
        reason = "the order of a send's steps; transfers apart from matching are to divide it"
    )]
    pub(super) unsafe fn send_rts(
        &mut self,
        env: &Env,
        args: &SendArgs,
        origin: &Origin,
        info: &TypeInfo,
        sums: Option<&Sums>,
    ) -> Result<usize, Unsent> {
        let bytes = info.bytes(args.count);
        // SAFETY: passed on.
        let (identity, peer) =
            unsafe { self.route(env, args, info, bytes) }.map_err(Unsent::Reason)?;
        let source = match origin {
            Origin::Host(address) => Source::Host(*address),
            Origin::Device(buffer) => {
                let context = self.gpu.prepare(buffer).map_err(Unsent::Trouble)?;
                self.gpu.relays.note(env, buffer, context);
                self.survey(env, buffer, context, bytes);
                if uses_host(env, bytes) {
                    self.gpu.prepare_wide(context, env.node.own());
                }
                let address = buffer.address;
                Source::Device { context, address }
            }
        };
        let own = env.node.own();
        let stream = Stream {
            comm: identity.id,
            peer: peer.world_rank(),
            tag: args.tag,
        };
        let last = self.history.sent.last(env, stream).copied();
        let completes_alone = args.completes_alone(env, bytes);
        let pushed = match (source, last) {
            // The put comes first, as it takes longest. A message that is put needs no copy in host memory.
            (Source::Device { context, address }, Some(last)) => {
                let from = (context, address);
                let after = last.nonce;
                self.put_for_rtr(env, &peer, stream, after, bytes, from, completes_alone)
            }
            _ => None,
        };
        let sequence = self.sent.peek(stream);
        let mut message = self.message(env, args, origin, bytes, &identity, &peer, sequence);
        let is_eager = completes_alone && pushed.is_none();
        let mut eager_send = None;
        if is_eager {
            let mut cell = own.take_cell(bytes);
            if cell.is_none() && self.make_room(env) {
                cell = own.take_cell(bytes);
            }
            let cell = cell.ok_or(Unsent::Reason(Reason::NoCell))?;
            let key = Wish::Cell.key(identity.id, env.world_rank, args.tag);
            // Memory that the receiver cannot map comes through the cell anyway.
            let is_mappable = message.flags & flag::EXPORTED != 0;
            let is_expected = is_mappable && !peer.wishes(key);
            let eager_send = eager_send.insert(EagerSend::new(source, bytes, cell, is_expected));
            // The device works while the RTS is made and sent.
            eager_send.begin(&mut self.gpu, own);
        }
        let abandon = |eager_send: Option<EagerSend>, pushed: Option<Put>| {
            if let Some(eager_send) = eager_send {
                eager_send.abandon(own);
            }
            if let Some(pushed) = pushed {
                pushed.abandon();
            }
        };
        // The slot of the message before it, where its receiver looks for the next one.
        let last_slot = last.map(|last| last.slot);
        let mut slot = own.alloc(last_slot);
        if slot.is_none() && self.make_room(env) {
            slot = own.alloc(last_slot);
        }
        let Some(slot) = slot else {
            abandon(eager_send, pushed);
            return Err(Unsent::Reason(Reason::NoSlot));
        };
        if sums.is_some() {
            message.flags |= flag::SUMS;
        }
        if last.is_some() && env.sees_all() {
            message.flags |= flag::FOLLOWS;
        }
        if let Some(pushed) = &pushed {
            let told = pushed.told();
            message.flags |= flag::PUT_EARLY;
            message.extra = [told.tag, u64::from(told.line)];
        }
        let Some(nonce) = own.post_with(slot, &message, sums) else {
            abandon(eager_send, pushed);
            own.free(slot);
            return Err(Unsent::Reason(Reason::NoSlot));
        };
        // A payload from host memory is in the ring before the receiver hears of the message.
        let mut is_in_cell = false;
        if let (Origin::Host(_), Some(eager_send), Some(posted)) =
            (origin, &mut eager_send, own.slot(slot))
        {
            let filled = eager_send.poll(&mut self.gpu, own, &posted.ring(nonce));
            is_in_cell = matches!(filled, Ok(true)) && posted.retire(nonce).is_ok();
        }
        stats::add(Counter::SendsEager, u64::from(is_in_cell));
        let rts = Rts {
            job: env.node.launch().hash,
            sender: env.world_rank,
            slot,
            nonce,
            sequence,
            length: bytes,
            digest: message.digest(),
        };
        let mut out = Box::new(PendingSend {
            peer,
            slot,
            nonce,
            native: env.abi.request_null,
            wire: rts.encode(),
            source,
            bytes,
            serve: None,
            staged_parts: None,
            pushed,
            eager_send,
            failures: 0,
            is_given_up: false,
            lost: None,
            is_shared: chunks::needs(&Export::from(&message)).is_some(),
            is_open: true,
        });
        let carrier = SendArgs {
            mode: if args.mode == Mode::Ready {
                Mode::Ready
            } else {
                Mode::Standard
            },
            buffer: out.wire.as_ptr().cast(),
            count: RTS_BYTES as i64,
            datatype: env.abi.byte,
            ..*args
        };
        out.peer.will_ring();
        // SAFETY: the wire bytes are kept until the native send is complete.
        let code = unsafe { native_isend(&carrier, &raw mut out.native) };
        if code != env.abi.success {
            let is_claimed = own
                .slot(slot)
                .is_some_and(|slot| slot.cancel(nonce).is_err());
            if is_claimed {
                // The receiver had matched it early, and counts the messages that it takes.
                out.peer.announce();
            }
            abandon(out.eager_send, out.pushed);
            own.free(slot);
            return Err(Unsent::Code(code));
        }
        self.sent.take(stream);
        self.history.sent.note(env, stream, nonce, slot);
        out.peer.announce();
        let (messages, of_bytes) = match origin {
            Origin::Device(_) => (Counter::SendsRts, Counter::SendsRtsBytes),
            Origin::Host(_) => (Counter::SendsHostRts, Counter::SendsHostRtsBytes),
        };
        stats::add(messages, 1);
        stats::add(of_bytes, bytes);
        let is_exported = message.flags & (flag::EXPORTED | flag::HOST) != 0;
        if message.flags & flag::EXPORTED != 0 && env.puts(bytes) {
            self.history.exchanges.note_sent(out.peer.world_rank());
        }
        if matches!(origin, Origin::Device(_)) {
            self.note_peer_mix(env, out.peer.world_rank());
        }
        let story = Story {
            is_send: true,
            bytes,
            reason: (!is_exported).then_some(Reason::NotExportable),
            ..Story::default()
        };
        let is_put = out.pushed.is_some();
        let mut life = Life::offered(Side::Sender);
        if is_in_cell {
            life.arrive(Protocol::Eager, bytes);
        } else if is_put {
            life.transition(life::State::Moving(Protocol::Put));
        }
        let waiting = out.eager_send.as_ref();
        let until = waiting.and_then(|one| one.waits_until(self.sends_out(), self.taken_at));
        let id = self.sends.insert(Send {
            handle: 0,
            comm: args.comm,
            complete: is_in_cell,
            stands_for_null: false,
            code: env.abi.success,
            why: None,
            about: story,
            life,
            is_raised: false,
            kind: SendKind::Rts(out),
        });
        self.open.push(id);
        // The engine must look at an eager message before its receiver has done anything, and at a put
        // message as well.
        if is_eager || is_put {
            self.serve_from(until);
        }
        Ok(id)
    }

    /// Whether a message may go by RTS, and to whom.
    unsafe fn route(
        &self,
        env: &Env,
        args: &SendArgs,
        info: &TypeInfo,
        bytes: u64,
    ) -> Result<(Arc<Identity>, Arc<Peer>), Reason> {
        let mut leaving = Leaving {
            core: self,
            env,
            args,
            is_dense: info.dense(args.count),
            bytes,
            identity: None,
            peer: None,
        };
        decided_by!("send.rts", &mut leaving, policy::rts)?;
        let (identity, peer) = (leaving.identity, leaving.peer);
        identity.zip(peer).ok_or(Reason::NotRegistered)
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    fn message(
        &mut self,
        env: &Env,
        args: &SendArgs,
        origin: &Origin,
        bytes: u64,
        identity: &Identity,
        peer: &Peer,
        sequence: u64,
    ) -> Message {
        let mut message = Message {
            communicator: identity.id,
            source: env.world_rank,
            destination: peer.world_rank(),
            tag: args.tag,
            sequence,
            length: bytes,
            ..Message::default()
        };
        let buffer = match origin {
            Origin::Device(buffer) => buffer,
            Origin::Host(_) => {
                message.flags |= flag::HOST;
                return message;
            }
        };
        message.base = buffer.address - buffer.offset;
        message.offset = buffer.offset;
        message.allocation_bytes = buffer.size;
        message.buffer_id = buffer.buffer_id;
        message.device = buffer.uuid;
        let exported = self.gpu.export(env, buffer);
        let shared = |gpu: &mut Gpu, error| gpu.share(env, peer, buffer, bytes).ok_or(error);
        match exported.or_else(|error| shared(&mut self.gpu, error)) {
            Ok(export) => {
                message.flags |= flag::EXPORTED;
                message.base = export.base;
                message.offset = export.offset;
                message.allocation_bytes = export.size;
                message.buffer_id = export.buffer_id;
                message.ipc_handle = export.handle.0;
            }
            Err(error) => {
                stats::fallback(Reason::NotExportable, bytes);
                log::debug!(
                    "device buffer {:#x} goes through staging memory: {error}",
                    buffer.address
                );
                let is_own = peer.world_rank() == env.world_rank;
                let is_long = bytes >= OnGpu::between(false).bytes_min;
                // If the driver refuses to export memory of a kind that can be exported, it refuses staging,
                // too.
                let is_refused = buffer.allocation == Allocation::Plain;
                if env.config.gpu_pipeline && is_long && !is_own && !is_refused {
                    if let Ok(context) = buffer.context_key() {
                        self.gpu.relays.stage_own(env, context);
                    }
                }
            }
        }
        message
    }

    /// Looks whether the receiver has done its part, or wants something. Makes no MPI call.
    pub(in crate::engine) fn advance_send(&mut self, env: &Env, id: usize) -> Advance {
        let send = &mut self.sends[id];
        let SendKind::Rts(out) = &mut send.kind else {
            return self.advance_posted(env, id);
        };
        let Some(pushed) = &mut out.pushed else {
            return self.advance_posted(env, id);
        };
        let is_whole = pushed.is_whole();
        match pushed.poll(&mut self.gpu) {
            PutStep::Over => self.advance_posted(env, id),
            // The receiver asks for the rest of the message in the same way as for any other message.
            pushing if !is_whole => {
                let advance = self.advance_posted(env, id);
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
                let is_there = has_landed && !out.is_given_up;
                if is_there {
                    send.complete = true;
                    send.life.arrive(Protocol::Put, out.bytes);
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
    fn advance_posted(&mut self, env: &Env, id: usize) -> Advance {
        let own = env.node.own();
        let under_way = self.sends_out();
        let closed = || Advance {
            closed: true,
            ..Advance::default()
        };
        let send = &mut self.sends[id];
        let SendKind::Rts(out) = &mut send.kind else {
            return closed();
        };
        let Some(slot) = own.slot(out.slot) else {
            return closed();
        };
        let mut state = slot.settled(out.nonce);
        if out.is_given_up && state.is_ok_and(|state| !state.is_final()) {
            state = Ok(SlotState::Failed);
        }
        let ring = slot.ring(out.nonce);
        if out.eager_send.is_some() && matches!(state, Ok(SlotState::Claimed | SlotState::Done)) {
            self.taken_at = Some(Instant::now());
        }
        // The program has its buffer back: nobody is served from it, whatever somebody has written to the slot.
        let is_over = send.life.is_over();
        let step = match (state, &mut out.eager_send) {
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
                if send.life.is_offered() {
                    send.life.transition(life::State::Matched);
                }
                let asked = slot.offered(out.nonce);
                return out.help(env, &mut self.gpu, asked);
            }
            (Ok(SlotState::Posted), None) => return Advance::default(),
            (Ok(SlotState::Posted), Some(eager_send)) => {
                let until = eager_send.waits_until(under_way, self.taken_at);
                if until.is_some_and(|until| Instant::now() < until) {
                    return Advance {
                        serving: true,
                        until,
                        ..Advance::default()
                    };
                }
                let step = eager_send.poll(&mut self.gpu, own, &ring);
                // `retire` fails if the receiver was faster: it finds the payload in the ring, or has read
                // the buffer.
                if matches!(step, Ok(true)) && slot.retire(out.nonce).is_ok() {
                    stats::add(Counter::SendsEager, 1);
                    send.life.arrive(Protocol::Eager, out.bytes);
                    send.complete = true;
                }
                step
            }
            (Ok(SlotState::WantHost), Some(eager_send)) => {
                eager_send.is_asked_for = true;
                if !is_over {
                    send.life.reach(life::State::Moving(Protocol::HostPipeline));
                }
                if eager_send.is_in_ring() && ring.is_filled_to(1) {
                    return Advance::default();
                }
                eager_send.poll(&mut self.gpu, own, &ring)
            }
            (Ok(state @ (SlotState::WantGpu | SlotState::WantHost)), _) if !is_over => {
                let wants_gpu = state == SlotState::WantGpu;
                send.life.reach(life::State::Moving(match wants_gpu {
                    true => Protocol::GpuPipeline,
                    false => Protocol::HostPipeline,
                }));
                let peer = &out.peer;
                if std::mem::take(&mut out.is_shared) {
                    self.gpu.not_found(peer.world_rank());
                }
                let serve = out.serve.get_or_insert_with(|| {
                    let is_shared = || share_a_gpu(env, peer);
                    let on_gpu = wants_gpu.then(|| OnGpu::between(is_shared()));
                    PipelineSend::new(out.source, out.bytes, on_gpu)
                });
                serve.poll(&mut self.gpu, own, &ring, wants_gpu)
            }
            (Ok(SlotState::Done | SlotState::Cancelled), _) => {
                return self.close_send(env, id, false)
            }
            (Ok(SlotState::Failed), _) => return self.close_send(env, id, true),
            _ => {
                // Only this rank sets these states, and it has not; or the receiver wants what it has got.
                if out.failures != u32::MAX {
                    out.failures = u32::MAX;
                    let why = "its slot was written over";
                    out.lost = Some(fault::lost(out.of(), out.path(), &why));
                    stats::add(Counter::Corrupt, 1);
                }
                return self.close_send(env, id, true);
            }
        };
        if let Err(trouble) = step {
            out.step_failed(env, trouble);
        }
        let moved = step.unwrap_or(true);
        if moved {
            out.peer.ring_doorbell();
        }
        Advance {
            moved,
            serving: true,
            ..Advance::default()
        }
    }

    /// The receiver is through with the message, or never will be: ends what is under way and frees the slot.
    fn close_send(&mut self, env: &Env, id: usize, has_failed: bool) -> Advance {
        let own = env.node.own();
        let send = &mut self.sends[id];
        let SendKind::Rts(out) = &mut send.kind else {
            return Advance::default();
        };
        let is_released = out
            .staged_parts
            .as_mut()
            .is_none_or(|staged_parts| staged_parts.release(env));
        let is_written = out.pushed.as_mut().is_some_and(|pushed| !pushed.is_over());
        let drained = is_released
            & !is_written
            & match (&mut out.serve, &mut out.eager_send) {
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
        // An error does not matter to a send that is complete already.
        if has_failed && !send.complete && send.code == env.abi.success {
            let why = out.lost.take();
            let by_receiver = || fault::text(out.of(), out.path(), &"its receiver cannot have it");
            let why = why.unwrap_or_else(by_receiver);
            (send.code, send.why) = (env.abi.err_other, Some(why));
            stats::add(Counter::Errors, 1);
        }
        if !send.life.is_over() && !has_failed {
            // If the receiver was faster, it may have read the buffer although the payload is in the ring,
            // too.
            let slot = own.slot(out.slot);
            let is_emptied = slot.is_some_and(|slot| slot.ring(out.nonce).in_flight() == Ok(0));
            let eager = out.eager_send.as_ref();
            let eager = eager.filter(|eager_send| is_emptied && eager_send.is_in_ring());
            let is_asked_for = eager.is_some_and(|eager_send| eager_send.is_asked_for);
            // Of an offer that the receiver took back before this rank saw it, this rank has brought nothing.
            let asked = slot.and_then(|slot| slot.offered(out.nonce));
            let is_multipath = asked.is_some_and(|asked| !asked.is_all_put);
            let parts =
                || (out.staged_parts.as_ref()).map_or_else(Parts::default, |staged| staged.parts());
            send.about.parts = is_multipath.then(parts);
            let is_on_gpu = out.serve.as_ref().is_some_and(PipelineSend::is_on_gpu);
            let protocol = if is_on_gpu {
                Protocol::GpuPipeline
            } else if out.serve.is_some() || is_asked_for {
                Protocol::HostPipeline
            } else if is_multipath {
                Protocol::Multipath
            } else if eager.is_some() {
                Protocol::Eager
            } else if out.peer.world_rank() == env.world_rank {
                Protocol::Own
            } else {
                Protocol::Get
            };
            send.life.arrive(protocol, out.bytes);
        }
        own.free(out.slot);
        out.is_open = false;
        send.complete = true;
        Advance {
            moved: true,
            closed: true,
            ..Advance::default()
        }
    }

    /// Whether a send completes only when its receiver comes. A send up to the eager limit completes by
    /// itself.
    pub(in crate::engine) fn awaits_receiver(&self, id: usize) -> bool {
        matches!(&self.sends[id].kind, SendKind::Rts(out) if out.eager_send.is_none() && out.pushed.as_ref().is_none_or(|pushed| !pushed.is_whole()))
    }

    /// The program waits for this send alone.
    pub(in crate::engine) fn hurry(&mut self, id: usize) {
        if let SendKind::Rts(out) = &mut self.sends[id].kind {
            if let Some(eager_send) = &mut out.eager_send {
                eager_send.hurry();
                self.serve_now();
            }
        }
    }

    /// Whether this rank sends something to another rank, and whether it puts that to the receive of an RTR.
    /// If there are many sends, only some are looked at.
    pub(in crate::engine) fn exchanges_with(&self, rank: u32) -> (bool, bool) {
        let (mut sends_to, mut is_putting) = (false, false);
        for id in self.open.iter().chain(&self.eager).take(LOOKED_AT) {
            if let SendKind::Rts(out) = &self.sends[*id].kind {
                // A message that this rank has put is over, whether or not its receiver has said so.
                let is_over = self.sends[*id].complete && out.pushed.is_some();
                let is_to = out.peer.world_rank() == rank && !is_over;
                sends_to |= is_to;
                let is_written = |pushed: &Put| pushed.is_flying() && pushed.is_whole();
                is_putting |= is_to && out.pushed.as_ref().is_some_and(is_written);
            }
        }
        (sends_to, is_putting)
    }

    pub(in crate::engine) fn peer_of_send(&self, id: usize) -> Option<Arc<Peer>> {
        match &self.sends.get(id)?.kind {
            SendKind::Rts(out) => Some(Arc::clone(&out.peer)),
            _ => None,
        }
    }

    /// Whether Finalize must still serve a message: its receiver may still receive it, or is receiving it.
    pub(in crate::engine) fn is_wanted(&self, env: &Env, id: usize) -> bool {
        let SendKind::Rts(out) = &self.sends[id].kind else {
            return false;
        };
        let state = env
            .node
            .own()
            .slot(out.slot)
            .and_then(|slot| slot.state(out.nonce).ok());
        !(out.peer.finalizing() && matches!(state, Some(SlotState::Posted | SlotState::Eager)))
    }

    /// Ends a send whose receiver has died.
    pub(in crate::engine) fn fail_send(&mut self, env: &Env, id: usize) {
        let send = &mut self.sends[id];
        let SendKind::Rts(out) = &mut send.kind else {
            return;
        };
        if !out.give_up(env) {
            return;
        }
        if send.complete || out.peer.finalizing() {
            log::debug!("rank {} ended without it", out.peer.world_rank());
            return;
        }
        out.lost = Some(fault::died(out.of(), out.path(), true));
        stats::add(Counter::DeadPeers, 1);
    }
}

/// A message that may go by RTS, with all that decides whether it does.
struct Leaving<'a> {
    core: &'a Core,
    env: &'a Env,
    args: &'a SendArgs,
    is_dense: bool,
    bytes: u64,
    identity: Option<Arc<Identity>>,
    peer: Option<Arc<Peer>>,
}

impl RtsFacts for Leaving<'_> {
    fn is_buffered(&mut self) -> bool {
        self.args.mode == Mode::Buffered
    }

    fn is_below_threshold(&mut self) -> bool {
        self.bytes < self.env.config.threshold.max(1)
    }

    fn is_dense(&mut self) -> bool {
        self.is_dense
    }

    fn has_staging(&mut self) -> bool {
        let own = self.env.node.own();
        own.prepare_staging() && own.layout().chunks != 0
    }

    fn has_helper(&mut self) -> bool {
        self.core.helper_runs
    }

    fn is_counting(&mut self) -> bool {
        !self.core.counts_lost()
    }

    fn comm(&mut self) -> Comm {
        let (abi, comm) = (self.env.abi, self.args.comm);
        // SAFETY: the handle is the program's, of a call that is being made.
        self.identity = unsafe { comms::identity(abi, comm) };
        match &self.identity {
            Some(_) => Comm::Known,
            // SAFETY: as above.
            None if unsafe { comms::is_inter(abi, comm) } => Comm::Inter,
            None => Comm::Unknown,
        }
    }

    fn peer(&mut self) -> Option<Whereabouts> {
        let identity = self.identity.as_ref()?;
        let world = identity.world_rank(self.args.dest)?;
        self.peer = self.env.node.peer(world);
        Some(match self.peer {
            Some(_) => Whereabouts::Here,
            None if self.env.node.proves_off_node(world) => Whereabouts::Elsewhere,
            None => Whereabouts::Unregistered,
        })
    }

    fn is_ready(&mut self) -> bool {
        let is_short = self.bytes < RTS_BYTES as u64;
        self.peer.as_ref().is_some_and(|peer| match is_short {
            true => peer.ready_for_all(),
            false => peer.ready(),
        })
    }
}
