//! Sends by RTS: whether a message may go that way, and what the sender does until its receiver is through.

use std::ffi::c_int;
use std::sync::Arc;

use super::{Send, SendKind};
use crate::cuda::{Buffer, Error};
use crate::engine::args::{Mode, SendArgs};
use crate::engine::comms::{self, Identity};
use crate::engine::core::Core;
use crate::engine::native::native_isend;
use crate::engine::types::TypeInfo;
use crate::engine::Env;
use crate::mpi::owned::OwnRequest;
use crate::node::{Message, Peer, Sums, RTS_BYTES};
use crate::policy::decided_by;
use crate::policy::send::{self as policy, Comm, RtsFacts, Whereabouts};
use crate::stats::{self, meter, Counter, Reason, SentBy};
use crate::trace;
use crate::transfer::export::describe;
use crate::transfer::fetch::{flag, uses_host};
use crate::transfer::history::LastSent;
use crate::transfer::put::Put;
use crate::transfer::send::{Advance, Offer, Outgoing, Taking};
use crate::transfer::serve::Source;
use crate::transfer::story::Story;
use crate::transfer::stream::{Stream, Wish};

/// How many open sends are looked through for one to a certain rank.
const LOOKED_AT: usize = 16;

/// A message whose RTS is out.
pub(super) struct PendingSend {
    pub(super) transfer: Outgoing,
    pub(super) native: OwnRequest,
    /// What the native send reads. It must neither move nor change before that send is complete.
    wire: [u8; RTS_BYTES],
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
    #[allow(clippy::too_many_lines, reason = "the order of a send's steps")]
    pub(super) fn send_rts(
        &mut self,
        env: &Env,
        args: &SendArgs,
        origin: &Origin,
        info: &TypeInfo,
        sums: Option<&Sums>,
    ) -> Result<usize, Unsent> {
        let bytes = info.bytes(args.count);
        let (identity, peer) = self.route(env, args, info, bytes).map_err(Unsent::Reason)?;
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
        let stream = Stream {
            comm: identity.id,
            peer: peer.world_rank(),
            tag: args.tag,
        };
        let last = self.history.sent.last(env.seen(), stream).copied();
        let completes_alone = args.completes_alone(env, bytes);
        let put = match (source, last) {
            // The put comes first, as it takes longest. A message that is put needs no copy in host memory.
            (Source::Device { context, address }, Some(last)) => {
                let from = (context, address);
                let after = last.nonce;
                self.put_for_rtr(env, &peer, stream, after, bytes, from, completes_alone)
            }
            _ => None,
        };
        let sequence = self.sent.peek(stream);
        let mut message = Message {
            communicator: identity.id,
            source: env.world_rank,
            destination: peer.world_rank(),
            tag: args.tag,
            sequence,
            length: bytes,
            ..Message::default()
        };
        match origin {
            Origin::Device(buffer) => describe(env, &mut self.gpu, &peer, buffer, &mut message),
            Origin::Host(_) => message.flags |= flag::HOST,
        }
        if last.is_some() && env.sees_all() {
            message.flags |= flag::FOLLOWS;
        }
        // The slot of the message before it is where its receiver looks for the next one.
        let room = self.room(env, bytes, completes_alone && put.is_none(), last);
        let (slot, cell) = match room {
            Ok(room) => room,
            Err(reason) => {
                if let Some(put) = put {
                    put.abandon();
                }
                return Err(Unsent::Reason(reason));
            }
        };
        let key = Wish::Cell.key(identity.id, env.world_rank, args.tag);
        // Memory that the receiver cannot map comes through the cell anyway.
        let is_mappable = message.flags & flag::EXPORTED != 0;
        let offer = Offer {
            cell: cell.map(|cell| (cell, is_mappable && !peer.wishes(key))),
            peer,
            source,
            message,
            sums,
            slot,
            put,
        };
        let offered = Outgoing::offer(env, &mut self.gpu, offer);
        let (transfer, rts) = offered.ok_or(Unsent::Reason(Reason::NoSlot))?;
        let mut out = Box::new(PendingSend {
            transfer,
            native: OwnRequest::null(env.abi),
            wire: rts.encode(),
        });
        let (wire, length) = (out.wire.as_ptr().cast(), RTS_BYTES as i64);
        // SAFETY: the wire bytes are kept, and do not move, until the native send is complete.
        let carrier = unsafe { args.with_payload(wire, length, env.abi.byte) };
        let carrier = carrier.in_mode(match args.mode {
            Mode::Ready => Mode::Ready,
            _ => Mode::Standard,
        });
        let peer = Arc::clone(out.transfer.peer());
        peer.will_ring();
        let code = trace::ucp::of_our_own(|| native_isend(&carrier, out.native.slot()));
        if code != env.abi.success {
            out.transfer.withdraw(env);
            return Err(Unsent::Code(code));
        }
        self.sent.take(stream);
        self.history.sent.note(env.seen(), stream, rts.nonce, slot);
        peer.announce();
        let (messages, of_bytes) = match origin {
            Origin::Device(_) => (Counter::SendsRts, Counter::SendsRtsBytes),
            Origin::Host(_) => (Counter::SendsHostRts, Counter::SendsHostRtsBytes),
        };
        stats::add(messages, 1);
        stats::add(of_bytes, bytes);
        let way = match origin {
            Origin::Device(_) => SentBy::Rts,
            Origin::Host(_) => SentBy::HostRts,
        };
        meter::sent(way, bytes, || Some(peer.world_rank()));
        let is_exported = message.flags & (flag::EXPORTED | flag::HOST) != 0;
        if message.flags & flag::EXPORTED != 0 && env.puts(bytes) {
            self.history.exchanges.note_sent(peer.world_rank());
        }
        if matches!(origin, Origin::Device(_)) {
            self.note_peer_mix(env, peer.world_rank());
        }
        let story = Story {
            is_send: true,
            bytes,
            reason: (!is_exported).then_some(Reason::NotExportable),
            ..Story::default()
        };
        let transfer = &out.transfer;
        let is_put = transfer.put().is_some();
        let until = transfer.waits_until(&Taking {
            under_way: self.sends_out(),
            at: self.taken_at,
        });
        let id = self.sends.insert(Send {
            handle: None,
            comm: args.comm,
            complete: transfer.is_complete(),
            stands_for_null: false,
            code: env.abi.success,
            why: None,
            about: story,
            is_raised: false,
            kind: SendKind::Rts(out),
        });
        self.open.push(id);
        // The engine must look at an eager message before its receiver has done anything, and at a put
        // message as well.
        if cell.is_some() || is_put {
            self.serve_from(until);
        }
        Ok(id)
    }

    /// A slot for a message, behind the last one of its stream, and for an eager one a cell. Makes room if
    /// there is none.
    fn room(
        &mut self,
        env: &Env,
        bytes: u64,
        is_eager: bool,
        last: Option<LastSent>,
    ) -> Result<(u32, Option<u32>), Reason> {
        let own = env.node.own();
        let mut cell = None;
        if is_eager {
            cell = own.take_cell(bytes);
            if cell.is_none() && self.make_room(env) {
                cell = own.take_cell(bytes);
            }
            cell.ok_or(Reason::NoCell)?;
        }
        let last = last.map(|last| last.slot);
        let mut slot = own.alloc(last);
        if slot.is_none() && self.make_room(env) {
            slot = own.alloc(last);
        }
        if let (None, Some(cell)) = (slot, cell) {
            own.give(cell);
        }
        Ok((slot.ok_or(Reason::NoSlot)?, cell))
    }

    /// Whether a message may go by RTS, and to whom.
    fn route(
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

    /// Looks whether the receiver has done its part, or wants something. Makes no MPI call.
    pub(in crate::engine) fn advance_send(&mut self, env: &Env, id: usize) -> Advance {
        let mut taking = Taking {
            under_way: self.sends_out(),
            at: self.taken_at,
        };
        let send = &mut self.sends[id];
        let SendKind::Rts(out) = &mut send.kind else {
            return Advance {
                closed: true,
                ..Advance::default()
            };
        };
        let advance = out.transfer.advance(env, &mut self.gpu, &mut taking);
        // An error does not matter to a send that is complete already.
        if out.transfer.has_failed() && !send.complete && send.code == env.abi.success {
            let why = out.transfer.why_failed();
            (send.code, send.why) = (env.abi.err_other, Some(why));
            stats::add(Counter::Errors, 1);
        }
        send.complete |= out.transfer.is_complete();
        self.taken_at = taking.at;
        advance
    }

    /// Whether a send completes only when its receiver comes. A send up to the eager limit completes by
    /// itself.
    pub(in crate::engine) fn awaits_receiver(&self, id: usize) -> bool {
        matches!(&self.sends[id].kind, SendKind::Rts(out) if out.transfer.awaits_receiver())
    }

    /// The program waits for this send alone.
    pub(in crate::engine) fn hurry(&mut self, id: usize) {
        if let SendKind::Rts(out) = &mut self.sends[id].kind {
            if out.transfer.hurry() {
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
                let put = out.transfer.put();
                // A message that this rank has put is over, whether or not its receiver has said so.
                let is_over = self.sends[*id].complete && put.is_some();
                let is_to = out.transfer.peer().world_rank() == rank && !is_over;
                sends_to |= is_to;
                let is_written = |put: &Put| put.is_flying() && put.is_whole();
                is_putting |= is_to && put.is_some_and(is_written);
            }
        }
        (sends_to, is_putting)
    }

    pub(in crate::engine) fn peer_of_send(&self, id: usize) -> Option<Arc<Peer>> {
        match &self.sends.get(id)?.kind {
            SendKind::Rts(out) => Some(Arc::clone(out.transfer.peer())),
            _ => None,
        }
    }

    /// Whether Finalize must still serve a message: its receiver may still receive it, or is receiving it.
    pub(in crate::engine) fn is_wanted(&self, env: &Env, id: usize) -> bool {
        matches!(&self.sends[id].kind, SendKind::Rts(out) if out.transfer.is_wanted(env))
    }

    /// Ends a send whose receiver has died.
    pub(in crate::engine) fn fail_send(&mut self, env: &Env, id: usize) {
        let send = &mut self.sends[id];
        if let SendKind::Rts(out) = &mut send.kind {
            if out.transfer.died(env, send.complete) {
                stats::add(Counter::DeadPeers, 1);
            }
        }
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
        self.identity = comms::identity(abi, comm);
        match &self.identity {
            Some(_) => Comm::Known,
            None if comms::is_inter(abi, comm) => Comm::Inter,
            None => Comm::Unknown,
        }
    }

    fn peer(&mut self) -> Option<Whereabouts> {
        let identity = self.identity.as_ref()?;
        let world = identity.world_rank(self.args.dest)?;
        self.peer = self.env.node.destination(world);
        Some(match self.peer {
            Some(_) => Whereabouts::Here,
            None if self.env.node.proves_off_node(world) => Whereabouts::Elsewhere,
            None => Whereabouts::Unregistered,
        })
    }

    fn is_ready(&mut self) -> bool {
        let is_short = self.bytes < RTS_BYTES as u64;
        self.peer.as_ref().is_some_and(|peer| {
            let is_ready = match is_short {
                true => peer.ready_for_all(),
                false => peer.ready(),
            };
            is_ready && self.env.node.is_met_by(peer)
        })
    }
}
