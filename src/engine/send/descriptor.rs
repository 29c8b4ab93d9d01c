//! Sends by descriptor: whether a message may go that way, and what is done for it until its receiver is through.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Instant;

use super::invited::{Pushed, Pushing};
use super::{Advance, Mode, Send, SendArgs, SendKind};
use crate::cuda::{chunks, Allocation, Buffer, Error, Export};
use crate::engine::comms::{self, Identity};
use crate::engine::core::Core;
use crate::engine::counts::{Stream, Wish};
use crate::engine::fault::{self, Of, Path};
use crate::engine::fetch::{flag, uses_host, AGAIN_THROUGH_HOST};
use crate::engine::gpu::{is_for_now, Gpu};
use crate::engine::native::native_isend;
use crate::engine::relays::share_a_gpu;
use crate::engine::serve::tracks::Tracks;
use crate::engine::serve::{Hosting, OnGpu, Serve, Source, Trouble};
use crate::engine::story::{self, Story};
use crate::engine::types::TypeInfo;
use crate::engine::Env;
use crate::mpi::Handle;
use crate::node::{Asked, Descriptor, Message, Peer, State, Sums, DESCRIPTOR_BYTES};
use crate::policy::decided_by;
use crate::policy::send::{self as policy, Comm, RtsFacts, Whereabouts};
use crate::stats::{self, Counter, Reason};

/// Open sends that are looked through for one to a certain rank.
const LOOKED_AT: usize = 16;

/// A descriptor that is out.
pub(super) struct Out {
    peer: Arc<Peer>,
    slot: u32,
    nonce: u64,
    pub(super) native: Handle,
    /// What the native send reads. It stays where it is, and as it is, until that is complete.
    wire: [u8; DESCRIPTOR_BYTES],
    source: Source,
    bytes: u64,
    serve: Option<Serve>,
    /// Its part in a message that comes over several paths.
    tracks: Option<Box<Tracks>>,
    /// It is written to a receive that was told of.
    pushed: Option<Pushed>,
    /// It completes without its receiver, as a standard send below the eager limit must.
    hosting: Option<Hosting>,
    /// Steps of the sender's part that have failed.
    failures: u32,
    /// This rank has said that the message cannot be had.
    is_given_up: bool,
    /// Why the message is lost, if this rank has found that.
    lost: Option<Box<str>>,
    /// The slot is in use: the receiver may still read it.
    /// Its receiver finds it by files of its chunks.
    is_shared: bool,
    pub(super) is_open: bool,
}

impl Out {
    /// The message cannot be had, or nobody is there to have it: the slot is closed when next looked at. False if that
    /// was so already.
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
        match (&self.hosting, &self.serve) {
            (Some(_), _) => Path::Eager,
            (None, Some(serve)) if serve.is_on_gpu() => Path::GpuRing,
            (None, Some(_)) => Path::HostRing,
            (None, None) => Path::Direct,
        }
    }

    /// The receiver has claimed the message: does what it has left to this rank.
    fn help(&mut self, env: &Env, gpu: &mut Gpu, asked: Option<Asked>) -> Advance {
        // A message from host memory has one path only.
        let (Some(asked), Source::Device { context, address }) = (asked, self.source) else {
            return Advance::default();
        };
        let (peer, bytes) = (&self.peer, self.bytes);
        let tracks = self.tracks.get_or_insert_with(|| {
            let tracks = Tracks::begin(env, gpu, peer, asked, context, address, bytes);
            Box::new(tracks)
        });
        let moved = tracks.poll(env, gpu);
        let serving = !tracks.is_over();
        if moved {
            self.peer.ring_doorbell();
        }
        Advance {
            moved,
            serving,
            ..Advance::default()
        }
    }

    /// A step of the sender's part has failed. It is tried again, some times: but for memory of the GPU no
    /// simpler path is left.
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
        let is_on_gpu = self.serve.as_ref().is_some_and(Serve::is_on_gpu);
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

/// Where the message of a send is.
pub(super) enum Origin<'a> {
    /// In device memory.
    Device(&'a Buffer),
    /// In host memory. It never goes to this rank itself.
    Host(*const u8),
}

/// Why a descriptor was not sent.
pub(super) enum Unsent {
    /// The message goes by value.
    Reason(Reason),
    /// The same, as its buffer's context cannot be had, which is told once the message is on its way.
    Trouble(Error),
    /// The MPI library refused it.
    Code(c_int),
}

impl Core {
    #[allow(
        clippy::too_many_lines,
        reason = "the order of a send's steps; transfers apart from matching are to divide it"
    )]
    pub(super) unsafe fn send_descriptor(
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
        let last = self.last_sent.last(env, stream).copied();
        let completes_alone = args.completes_alone(env, bytes);
        let pushed = match (source, last) {
            // First, as it takes longest. What is written to its receiver needs no copy in host memory.
            (Source::Device { context, address }, Some(last)) => {
                let from = (context, address);
                let after = last.nonce;
                self.push_invited(env, &peer, stream, after, bytes, from, completes_alone)
            }
            _ => None,
        };
        let sequence = self.sent.peek(stream);
        let mut message = self.message(env, args, origin, bytes, &identity, &peer, sequence);
        let is_eager = completes_alone && pushed.is_none();
        let mut hosting = None;
        if is_eager {
            let mut cell = own.take_cell(bytes);
            if cell.is_none() && self.make_room(env) {
                cell = own.take_cell(bytes);
            }
            let cell = cell.ok_or(Unsent::Reason(Reason::NoCell))?;
            let key = Wish::Cell.key(identity.id, env.world_rank, args.tag);
            // Memory that its receiver cannot map comes through the cell anyway.
            let is_mappable = message.flags & flag::EXPORTED != 0;
            let is_expected = is_mappable && !peer.wishes(key);
            let hosting = hosting.insert(Hosting::new(source, bytes, cell, is_expected));
            // The device works while the descriptor is made and sent.
            hosting.begin(&mut self.gpu, own);
        }
        let abandon = |hosting: Option<Hosting>, pushed: Option<Pushed>| {
            if let Some(hosting) = hosting {
                hosting.abandon(own);
            }
            if let Some(pushed) = pushed {
                pushed.abandon();
            }
        };
        // The same slot as for the one before it, where its receiver looks for it.
        let last_slot = last.map(|last| last.slot);
        let mut slot = own.alloc(last_slot);
        if slot.is_none() && self.make_room(env) {
            slot = own.alloc(last_slot);
        }
        let Some(slot) = slot else {
            abandon(hosting, pushed);
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
            message.flags |= flag::INVITED;
            message.extra = [told.tag, u64::from(told.line)];
        }
        let Some(nonce) = own.post_with(slot, &message, sums) else {
            abandon(hosting, pushed);
            own.free(slot);
            return Err(Unsent::Reason(Reason::NoSlot));
        };
        // What is in host memory is in the ring before the receiver hears of it.
        let mut is_hosted = false;
        if let (Origin::Host(_), Some(hosting), Some(posted)) =
            (origin, &mut hosting, own.slot(slot))
        {
            let filled = hosting.poll(&mut self.gpu, own, &posted.ring(nonce));
            is_hosted = matches!(filled, Ok(true)) && posted.retire(nonce).is_ok();
        }
        stats::add(Counter::SendsHosted, u64::from(is_hosted));
        let descriptor = Descriptor {
            job: env.node.launch().hash,
            sender: env.world_rank,
            slot,
            nonce,
            sequence,
            length: bytes,
            digest: message.digest(),
        };
        let mut out = Box::new(Out {
            peer,
            slot,
            nonce,
            native: env.abi.request_null,
            wire: descriptor.encode(),
            source,
            bytes,
            serve: None,
            tracks: None,
            pushed,
            hosting,
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
            count: DESCRIPTOR_BYTES as i64,
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
                // Its receiver had foreseen it, and counts what it takes.
                out.peer.announce();
            }
            abandon(out.hosting, out.pushed);
            own.free(slot);
            return Err(Unsent::Code(code));
        }
        self.sent.take(stream);
        self.last_sent.note(env, stream, nonce, slot);
        out.peer.announce();
        let (messages, of_bytes) = match origin {
            Origin::Device(_) => (Counter::SendsDescriptor, Counter::SendsDescriptorBytes),
            Origin::Host(_) => (
                Counter::SendsHostDescriptor,
                Counter::SendsHostDescriptorBytes,
            ),
        };
        stats::add(messages, 1);
        stats::add(of_bytes, bytes);
        let is_exported = message.flags & (flag::EXPORTED | flag::HOST) != 0;
        if message.flags & flag::EXPORTED != 0 && env.puts(bytes) {
            self.exchanges.note_sent(out.peer.world_rank());
        }
        if matches!(origin, Origin::Device(_)) {
            self.note_company(env, out.peer.world_rank());
        }
        let story = Story {
            is_send: true,
            bytes,
            reason: (!is_exported).then_some(Reason::NotExportable),
            path: if is_hosted {
                story::Path::Eager
            } else {
                story::Path::Unknown
            },
            ..Story::default()
        };
        let is_pushed = out.pushed.is_some();
        let waiting = out.hosting.as_ref();
        let until = waiting.and_then(|one| one.waits_until(self.sends_out(), self.taken_at));
        let id = self.sends.insert(Send {
            handle: 0,
            comm: args.comm,
            complete: is_hosted,
            stands_for_null: false,
            code: env.abi.success,
            why: None,
            story,
            is_raised: false,
            kind: SendKind::Descriptor(out),
        });
        self.open.push(id);
        // A small message is to be looked at before its receiver has done anything, and one that is written at once.
        if is_eager || is_pushed {
            self.serve_from(until);
        }
        Ok(id)
    }

    /// Whether a message may go by descriptor, and to whom.
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
                // Where the driver refuses memory that it could export, it refuses staging, too.
                let is_refused = buffer.allocation == Allocation::Plain;
                if env.config.gpu_ring && is_long && !is_own && !is_refused {
                    if let Ok(context) = buffer.context_key() {
                        self.gpu.relays.stage_own(env, context);
                    }
                }
            }
        }
        message
    }

    /// Looks whether the receiver has done its part, or wants something. No MPI call.
    pub(in crate::engine) fn advance_send(&mut self, env: &Env, id: usize) -> Advance {
        let send = &mut self.sends[id];
        let SendKind::Descriptor(out) = &mut send.kind else {
            return self.advance_posted(env, id);
        };
        let Some(pushed) = &mut out.pushed else {
            return self.advance_posted(env, id);
        };
        let is_whole = pushed.is_whole();
        match pushed.poll(&mut self.gpu) {
            Pushing::Over => self.advance_posted(env, id),
            // What is left of it is asked for as all of others is.
            pushing if !is_whole => {
                let advance = self.advance_posted(env, id);
                Advance {
                    moved: advance.moved || pushing != Pushing::Flying,
                    serving: advance.serving || pushing == Pushing::Flying,
                    ..advance
                }
            }
            // Its receiver has nothing to say before that: to look would only take the slot's line from it.
            Pushing::Flying => Advance {
                serving: true,
                ..Advance::default()
            },
            Pushing::Ended { has_landed } => {
                // The buffer is not read any more. A message that was given up meanwhile has no receiver.
                let is_there = has_landed && !out.is_given_up;
                if is_there {
                    send.complete = true;
                    send.story.path = story::Path::Direct;
                }
                // Its receiver has no more to ask for.
                Advance {
                    moved: true,
                    serving: !is_there,
                    ..Advance::default()
                }
            }
        }
    }

    /// The same of what the receiver brings, or asks for.
    #[allow(clippy::too_many_lines, reason = "one arm for each state of a slot")]
    fn advance_posted(&mut self, env: &Env, id: usize) -> Advance {
        let own = env.node.own();
        let under_way = self.sends_out();
        let closed = || Advance {
            closed: true,
            ..Advance::default()
        };
        let send = &mut self.sends[id];
        let SendKind::Descriptor(out) = &mut send.kind else {
            return closed();
        };
        let Some(slot) = own.slot(out.slot) else {
            return closed();
        };
        let mut state = slot.settled(out.nonce);
        if out.is_given_up && state.is_ok_and(|state| !state.is_final()) {
            state = Ok(State::Failed);
        }
        let ring = slot.ring(out.nonce);
        if out.hosting.is_some() && matches!(state, Ok(State::Claimed | State::Done)) {
            self.taken_at = Some(Instant::now());
        }
        let step = match (state, &mut out.hosting) {
            // The receiver has all that it needs.
            (Ok(State::Hosted), Some(hosting)) if hosting.is_in_ring() => {
                return Advance {
                    hosted: true,
                    ..Advance::default()
                }
            }
            // The receiver reads the buffer itself, and may leave some of it to this rank.
            (Ok(State::Claimed), _) => {
                let asked = slot.offered(out.nonce);
                return out.help(env, &mut self.gpu, asked);
            }
            (Ok(State::Posted), None) => return Advance::default(),
            (Ok(State::Posted), Some(hosting)) => {
                let until = hosting.waits_until(under_way, self.taken_at);
                if until.is_some_and(|until| Instant::now() < until) {
                    return Advance {
                        serving: true,
                        until,
                        ..Advance::default()
                    };
                }
                let step = hosting.poll(&mut self.gpu, own, &ring);
                // Refused where the receiver was quicker: it finds the payload in the ring, or has read the buffer.
                if matches!(step, Ok(true)) && slot.retire(out.nonce).is_ok() {
                    stats::add(Counter::SendsHosted, 1);
                    send.story.path = story::Path::Eager;
                    send.complete = true;
                }
                step
            }
            (Ok(State::WantHost), Some(hosting)) => {
                hosting.is_asked_for = true;
                if hosting.is_in_ring() && ring.is_filled_to(1) {
                    return Advance::default();
                }
                hosting.poll(&mut self.gpu, own, &ring)
            }
            (Ok(state @ (State::WantGpu | State::WantHost)), _) => {
                let wants_gpu = state == State::WantGpu;
                let peer = &out.peer;
                if std::mem::take(&mut out.is_shared) {
                    self.gpu.not_found(peer.world_rank());
                }
                let serve = out.serve.get_or_insert_with(|| {
                    let is_shared = || share_a_gpu(env, peer);
                    let on_gpu = wants_gpu.then(|| OnGpu::between(is_shared()));
                    Serve::new(out.source, out.bytes, on_gpu)
                });
                serve.poll(&mut self.gpu, own, &ring, wants_gpu)
            }
            (Ok(State::Done | State::Cancelled), _) => return self.close_send(env, id, false),
            (Ok(State::Failed), _) => return self.close_send(env, id, true),
            (Ok(State::Free | State::Hosted) | Err(_), _) => {
                // Only the owner sets these states, and it has not.
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

    /// The receiver is through with a message, or will never be: ends what is under way and frees the slot.
    fn close_send(&mut self, env: &Env, id: usize, has_failed: bool) -> Advance {
        let own = env.node.own();
        let send = &mut self.sends[id];
        let SendKind::Descriptor(out) = &mut send.kind else {
            return Advance::default();
        };
        let is_released = out.tracks.as_mut().is_none_or(|tracks| tracks.release(env));
        let is_written = out.pushed.as_mut().is_some_and(|pushed| !pushed.is_over());
        let drained = is_released
            & !is_written
            & match (&mut out.serve, &mut out.hosting) {
                (Some(serve), _) => {
                    serve.release_filled(own);
                    serve.is_drained(own)
                }
                (None, Some(hosting)) => hosting.release(own),
                (None, None) => true,
            };
        if !drained {
            return Advance {
                serving: true,
                ..Advance::default()
            };
        }
        // A send that is complete already is nobody's error any more.
        if has_failed && !send.complete && send.code == env.abi.success {
            let why = out.lost.take();
            let by_receiver = || fault::text(out.of(), out.path(), &"its receiver cannot have it");
            let why = why.unwrap_or_else(by_receiver);
            (send.code, send.why) = (env.abi.err_other, Some(why));
            stats::add(Counter::Errors, 1);
        }
        if send.story.path == story::Path::Unknown && !has_failed {
            // Where the receiver was quicker it may have read the buffer although the ring has the payload too.
            let is_emptied = own
                .slot(out.slot)
                .is_some_and(|slot| slot.ring(out.nonce).in_flight() == Ok(0));
            let hosted = out.hosting.as_ref();
            let hosted = hosted.filter(|hosting| is_emptied && hosting.is_in_ring());
            let is_asked_for = hosted.is_some_and(|hosting| hosting.is_asked_for);
            let tracks = out.tracks.as_ref().filter(|tracks| !tracks.is_direct());
            send.story.parts = tracks.map(|tracks| tracks.parts());
            let is_on_gpu = out.serve.as_ref().is_some_and(Serve::is_on_gpu);
            send.story.path = if is_on_gpu {
                story::Path::GpuRing
            } else if out.serve.is_some() || is_asked_for {
                story::Path::HostRing
            } else if tracks.is_some() {
                story::Path::Several
            } else if hosted.is_some() {
                story::Path::Eager
            } else if out.peer.world_rank() == env.world_rank {
                story::Path::Own
            } else {
                story::Path::Direct
            };
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

    /// Whether a send completes only when its receiver comes. One below the eager limit completes by itself.
    pub(in crate::engine) fn awaits_receiver(&self, id: usize) -> bool {
        matches!(&self.sends[id].kind, SendKind::Descriptor(out) if out.hosting.is_none() && out.pushed.as_ref().is_none_or(|pushed| !pushed.is_whole()))
    }

    /// The program waits for this send alone.
    pub(in crate::engine) fn hurry(&mut self, id: usize) {
        if let SendKind::Descriptor(out) = &mut self.sends[id].kind {
            if let Some(hosting) = &mut out.hosting {
                hosting.hurry();
                self.serve_now();
            }
        }
    }

    /// Whether something is sent to a rank, and whether this rank writes it to a receive of which it was told. Of many sends some
    /// are looked at.
    pub(in crate::engine) fn exchanges_with(&self, rank: u32) -> (bool, bool) {
        let (mut sends_to, mut is_pushing) = (false, false);
        for id in self.open.iter().chain(&self.hosted).take(LOOKED_AT) {
            if let SendKind::Descriptor(out) = &self.sends[*id].kind {
                // One that this rank has written is over, whether or not its receiver has said so.
                let is_over = self.sends[*id].complete && out.pushed.is_some();
                let is_to = out.peer.world_rank() == rank && !is_over;
                sends_to |= is_to;
                let is_written = |pushed: &Pushed| pushed.is_flying() && pushed.is_whole();
                is_pushing |= is_to && out.pushed.as_ref().is_some_and(is_written);
            }
        }
        (sends_to, is_pushing)
    }

    pub(in crate::engine) fn peer_of_send(&self, id: usize) -> Option<Arc<Peer>> {
        match &self.sends.get(id)?.kind {
            SendKind::Descriptor(out) => Some(Arc::clone(&out.peer)),
            _ => None,
        }
    }

    /// Whether a message must still be served in Finalize: its receiver may yet receive it, or is receiving it.
    pub(in crate::engine) fn is_wanted(&self, env: &Env, id: usize) -> bool {
        let SendKind::Descriptor(out) = &self.sends[id].kind else {
            return false;
        };
        let state = env
            .node
            .own()
            .slot(out.slot)
            .and_then(|slot| slot.state(out.nonce).ok());
        !(out.peer.finalizing() && matches!(state, Some(State::Posted | State::Hosted)))
    }

    /// Ends a send whose receiver has died.
    pub(in crate::engine) fn fail_send(&mut self, env: &Env, id: usize) {
        let send = &mut self.sends[id];
        let SendKind::Descriptor(out) = &mut send.kind else {
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

/// A message that may go by descriptor, with all that decides it.
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
        let is_short = self.bytes < DESCRIPTOR_BYTES as u64;
        self.peer.as_ref().is_some_and(|peer| match is_short {
            true => peer.ready_for_all(),
            false => peer.ready(),
        })
    }
}
