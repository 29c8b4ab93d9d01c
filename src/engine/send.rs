//! Sends: who makes them, how they start, and how they end.

mod bcopy;
mod put;
mod rts;

use bcopy::Source;
pub(in crate::engine) use bcopy::DRAINING_TESTS_MAX;

use std::ffi::c_int;
use std::sync::Arc;

use self::rts::{Origin, PendingSend, Unsent};
use crate::cuda::{self, Buffer, Error, Lent};
use crate::engine::args::{Mode, SendArgs};
use crate::engine::comms;
use crate::engine::core::{Core, Entry};
use crate::engine::layout::Layout;
use crate::engine::native::{native_isend, raise, raise_told};
use crate::engine::place::Place;
use crate::engine::types::{self, TypeInfo};
use crate::engine::verify::Summing;
use crate::engine::{Engine, Env};
use crate::mpi::owned::OwnRequest;
use crate::mpi::{Abi, Comm, Request, Slot};
use crate::node::{rtr, RTS_BYTES};
use crate::policy::decided_by;
use crate::policy::send::{self as policy, Lies, Maker, MakerFacts};
use crate::stats::{self, meter, Counter, Reason, SentBy};
use crate::trace::{self, record};
use crate::transfer::life::{Life, Outcome, Protocol, State};
use crate::transfer::story::{self, Story};
use crate::transfer::stream::{Stream, Wish};

/// Shorter messages from host memory are left to the MPI library, bytes. One H100, H D, times the speed
/// without the library, left to MPI and by RTS: single messages of 8 KiB 1.06 and 1.17, 16 KiB 1.23 and 1.41,
/// 32 KiB 1.56 and 2.06; windows of 16 of 32 KiB 1.09 and 1.39.
pub const HOST_BYTES_MIN: u64 = 8 << 10;

impl SendArgs {
    /// Where the message is.
    pub(in crate::engine) fn place(&self, abi: &Abi, info: &TypeInfo) -> Place {
        Place::of(abi, self.buffer, self.count, self.datatype, info)
    }

    /// Whether a send of so many bytes completes without its receiver (MPI 4.1 section 3.4): a buffered one
    /// always, a synchronous one never, the others up to the eager limit.
    fn completes_alone(&self, env: &Env, bytes: u64) -> bool {
        match self.mode {
            Mode::Standard | Mode::Ready => bytes <= env.config.eager,
            Mode::Buffered => true,
            Mode::Synchronous => false,
        }
    }
}

/// Who makes a send, and how.
pub enum Sorted {
    /// By the MPI library, untouched.
    Native,
    /// By the MPI library. It is as long as an RTS, and counted.
    Counted(Stream),
    /// By the engine.
    Device(Buffer, TypeInfo),
    /// By the engine, by bcopy: it does not lie in one allocation of a device.
    Parts(Arc<Layout>, TypeInfo),
    /// By the engine, from host memory, because its receiver wishes that.
    Host(Lent, TypeInfo),
}

/// A send that the engine makes.
pub struct Send {
    /// The generalized request in the program's hands; none for a blocking or persistent send.
    pub handle: Option<OwnRequest>,
    /// The communicator, for its error handler.
    pub comm: Comm,
    /// The program's part is over: the program may use its buffer again.
    pub complete: bool,
    /// It is the whole of an `MPI_Isendrecv` with a receive from MPI_PROC_NULL.
    pub stands_for_null: bool,
    /// The error of the operation, which is raised at completion.
    code: c_int,
    /// Which message has failed and why, if the code says no more than MPI_ERR_OTHER.
    why: Option<Box<str>>,
    /// The MPI library has raised the error.
    is_raised: bool,
    /// What the program may ask about it, except its path.
    about: Story,
    kind: SendKind,
}

enum SendKind {
    /// A transfer, which knows how far it is.
    Rts(Box<PendingSend>),
    /// A bcopy send: the native request, and the bytes that it sends.
    Value {
        native: OwnRequest,
        data: Vec<u8>,
        life: Life,
    },
    /// A bcopy send that the MPI library is through with.
    Over(Life),
}

impl Send {
    /// What is known of the send.
    pub fn story(&self) -> Story {
        let (life, parts) = match &self.kind {
            SendKind::Rts(out) => (out.transfer.life(), out.transfer.parts()),
            SendKind::Value { life, .. } | SendKind::Over(life) => (*life, None),
        };
        Story {
            path: life.path(),
            parts,
            ..self.about
        }
    }

    /// The trace follows a bcopy send from now on.
    fn trace(&mut self, to: Option<Stream>, tag: c_int, bytes: u64) {
        if let SendKind::Value { life, .. } | SendKind::Over(life) = &mut self.kind {
            life.trace(to.map_or(0, |to| to.comm), || record::Message {
                peer: to.map_or(record::NO_PEER, |to| to.peer as i32),
                tag,
                ..trace::about(record::Side::Sender, bytes)
            });
        }
    }

    /// Ends the send, with the outcome that its code says.
    fn end(&mut self) {
        let outcome = Outcome::of(self.code);
        match &mut self.kind {
            SendKind::Rts(out) => out.transfer.end(outcome),
            SendKind::Value { life, .. } | SendKind::Over(life) => life.end(outcome),
        }
    }

    /// The message is lost; `why` is the reason.
    fn lose(&mut self, abi: &Abi, why: Box<str>) {
        (self.code, self.why) = (abi.err_other, Some(why));
    }
}

impl Engine {
    /// Decides who makes a send.
    pub fn sort_send(&self, args: &SendArgs) -> Sorted {
        let sorted = self.sort(args);
        if let Sorted::Native | Sorted::Counted(_) = sorted {
            self.env.unseen.note_send();
        }
        sorted
    }

    fn sort(&self, args: &SendArgs) -> Sorted {
        let mut call = Call {
            engine: self,
            args,
            info: None,
            place: None,
            stream: None,
        };
        let maker = decided_by!("send.maker", &mut call, policy::maker);
        let Call {
            info,
            place,
            stream,
            ..
        } = call;
        let (Some(info), Some(place)) = (info, place) else {
            return Sorted::Native;
        };
        match (maker, place, stream) {
            (_, Place::Device(buffer), _) => Sorted::Device(buffer, info),
            (_, Place::Several(layout), _) => Sorted::Parts(layout, info),
            (Maker::Host, Place::Host(address), _) => {
                let start = address.cast_mut().cast();
                // SAFETY: the program has lent the message, which lies there in one run.
                let message = unsafe { Lent::new(start, info.bytes(args.count)) };
                Sorted::Host(message, info)
            }
            (Maker::Counted, _, Some(stream)) => Sorted::Counted(stream),
            _ => Sorted::Native,
        }
    }

    /// Whether the receiver of a message from host memory would rather fetch it: it brings such messages to a
    /// device, and its device then works while this rank brings the next piece.
    fn is_wished_for(&self, args: &SendArgs, info: &TypeInfo) -> bool {
        let is_for_engine = self.is_live() && args.mode != Mode::Buffered && info.dense(args.count);
        if !is_for_engine {
            return false;
        }
        let Some(stream) = self.stream(args.comm, args.dest, args.tag) else {
            return false;
        };
        let key = Wish::Rts.key(stream.comm, self.env.world_rank, stream.tag);
        stream.peer != self.env.world_rank
            && self
                .env
                .node
                .peer(stream.peer)
                .is_some_and(|peer| peer.wishes(key))
    }

    /// The stream of messages with a rank. None if the communicator has no identity.
    pub(super) fn stream(&self, comm: Comm, rank: c_int, tag: c_int) -> Option<Stream> {
        let identity = comms::identity(self.env.abi, comm)?;
        Some(Stream {
            comm: identity.id,
            peer: identity.world_rank(rank)?,
            tag,
        })
    }

    /// Starts a native send that is as long as an RTS and counts it, under one lock: two threads
    /// must not count in one order and send in the other.
    pub fn send_counted(
        &self,
        args: &SendArgs,
        stream: Stream,
        request: Slot<'_, Request>,
    ) -> c_int {
        let mut core = self.core.lock();
        let code = native_isend(args, request);
        if code == self.env.abi.success {
            core.sent.take(stream);
        }
        code
    }

    /// Starts a send as it was sorted. If the MPI library makes it, the engine completes it beside its own.
    pub fn start_sorted(&self, args: &SendArgs, sorted: &Sorted) -> Result<usize, c_int> {
        match sorted {
            Sorted::Native => self.start_native_send(args, None),
            Sorted::Counted(stream) => self.start_native_send(args, Some(*stream)),
            Sorted::Device(buffer, info) => self.start_send(args, buffer, info),
            Sorted::Host(message, info) => self.start_host_send(args, *message, info),
            Sorted::Parts(layout, info) => self.start_parts_send(args, layout, info),
        }
    }

    /// Starts a native send that the engine completes beside its own.
    pub fn start_native_send(
        &self,
        args: &SendArgs,
        stream: Option<Stream>,
    ) -> Result<usize, c_int> {
        let request = OwnRequest::made(self.env.abi, |request| match stream {
            Some(stream) => self.send_counted(args, stream, request),
            None => native_isend(args, request),
        })?;
        let bytes = types::info(self.env.abi, args.datatype)
            .map_or(0, |info| info.bytes(args.count.max(0)));
        let story = Story {
            is_send: true,
            bytes,
            ..Story::default()
        };
        Ok(self.core.lock().insert_value(
            &self.env,
            args.comm,
            request,
            Vec::new(),
            false,
            (Protocol::Native, story),
        ))
    }

    /// Starts a send of a device buffer.
    pub fn start_send(
        &self,
        args: &SendArgs,
        buffer: &Buffer,
        info: &TypeInfo,
    ) -> Result<usize, c_int> {
        self.start_device_send(args, buffer, info, None)
    }

    /// Starts a send from host memory by RTS, or natively if that is not possible.
    pub fn start_host_send(
        &self,
        args: &SendArgs,
        message: Lent,
        info: &TypeInfo,
    ) -> Result<usize, c_int> {
        self.note_activity();
        let sums = self.env.config.verify.then(|| {
            // SAFETY: a message that is sent stays as it is.
            Summing::of(unsafe { message.as_slice() })
        });
        {
            let mut core = self.core.lock();
            let origin = Origin::Host(message.as_ptr());
            match core.send_rts(&self.env, args, &origin, info, sums.as_ref()) {
                Ok(id) => return Ok(id),
                Err(Unsent::Code(code)) => return Err(code),
                Err(Unsent::Reason(_) | Unsent::Trouble(_)) => {}
            }
        }
        self.env.unseen.note_send();
        self.start_native_send(args, None)
    }

    /// Starts a send of a message that lies in several places: it is packed into host memory, and the
    /// program's memory is free again when this returns.
    pub(super) fn start_parts_send(
        &self,
        args: &SendArgs,
        layout: &Arc<Layout>,
        info: &TypeInfo,
    ) -> Result<usize, c_int> {
        let bytes = info.bytes(args.count);
        self.begin_device_send(bytes);
        stats::fallback(Reason::Mixed, bytes);
        self.env.unseen.note_send();
        let why = (Reason::Mixed, None);
        self.send_value(args, &Source::Parts(layout), info, why, None)
    }

    /// Counts a send of memory that is device memory, at least in part.
    fn begin_device_send(&self, bytes: u64) {
        self.use_device();
        self.note_activity();
        stats::add(Counter::SendsDevice, 1);
        stats::add(Counter::SendsDeviceBytes, bytes);
    }

    /// Starts a send of a device buffer by bcopy, whatever its length: the buffer is free again when this
    /// returns.
    pub(super) fn start_value_send(
        &self,
        args: &SendArgs,
        buffer: &Buffer,
        info: &TypeInfo,
        reason: Reason,
    ) -> Result<usize, c_int> {
        self.start_device_send(args, buffer, info, Some(reason))
    }

    /// By RTS if that is possible, or by bcopy for the reason that the caller has.
    fn start_device_send(
        &self,
        args: &SendArgs,
        buffer: &Buffer,
        info: &TypeInfo,
        by_value: Option<Reason>,
    ) -> Result<usize, c_int> {
        rtr::expect();
        let bytes = info.bytes(args.count);
        self.begin_device_send(bytes);
        let sums = self.sums_of(args, buffer, info);
        let (reason, trouble) = match by_value {
            Some(reason) => (reason, None),
            None => {
                let mut core = self.core.lock();
                let sums = sums.as_ref();
                let origin = Origin::Device(buffer);
                match core.send_rts(&self.env, args, &origin, info, sums) {
                    Ok(id) => {
                        core.begin_between(&self.env, bytes);
                        return Ok(id);
                    }
                    Err(Unsent::Code(code)) => return Err(code),
                    Err(Unsent::Reason(reason)) => (reason, None),
                    Err(Unsent::Trouble(error @ Error::NoContext)) => {
                        (Reason::NoContext, Some(error))
                    }
                    Err(Unsent::Trouble(error)) => (Reason::DriverError, Some(error)),
                }
            }
        };
        stats::fallback(reason, bytes);
        self.env.unseen.note_send();
        self.send_value(args, &Source::Buffer(buffer), info, (reason, trouble), sums)
    }

    /// Whether a send that the engine makes is complete. Lets MPI progress as far as the send itself needs
    /// that.
    pub(super) fn look_at_send(&self, core: &mut Core, id: usize) -> bool {
        core.test_value(&self.env, id);
        core.sends[id].complete
    }
}

impl Core {
    /// Tests the native part of a send, if it has one.
    pub(super) fn test_value(&mut self, env: &Env, id: usize) {
        let send = &mut self.sends[id];
        let native = match &mut send.kind {
            SendKind::Value { native, .. } => native,
            SendKind::Rts(out) => &mut out.native,
            SendKind::Over(_) => return,
        };
        let Some(code) = native.test(env.abi) else {
            return;
        };
        if code != env.abi.success && !send.complete {
            (send.code, send.is_raised) = (code, true);
            stats::add(Counter::Errors, 1);
        }
        match &mut send.kind {
            SendKind::Value { life, .. } => {
                life.transition(State::Landed);
                send.complete = true;
                send.kind = SendKind::Over(*life);
            }
            SendKind::Rts(out) if code != env.abi.success => {
                // Nobody will ever read the slot.
                out.transfer.give_up(env);
                self.serve_now();
            }
            SendKind::Rts(_) | SendKind::Over(_) => {}
        }
    }

    fn is_gone(&self, env: &Env, id: usize) -> bool {
        match &self.sends[id].kind {
            SendKind::Over(_) => true,
            SendKind::Rts(out) => !out.transfer.is_open() && out.native.is_null(env.abi),
            SendKind::Value { .. } => false,
        }
    }

    /// Forgets a complete send, or lets what is left of it end by itself. If the send has an error, this
    /// raises and returns it.
    pub(super) fn retire_send(&mut self, env: &Env, id: usize) -> c_int {
        self.test_value(env, id);
        let send = &mut self.sends[id];
        let mut code = send.code;
        story::tell(send.story());
        if code != env.abi.success && !send.is_raised {
            code = match send.why.take() {
                Some(why) => raise_told(env.abi, send.comm, &why),
                None => raise(send.comm, code),
            };
        }
        if self.is_gone(env, id) {
            self.sends.remove(id).end();
        } else {
            let bytes = match &self.sends[id].kind {
                SendKind::Value { data, .. } => data.len() as u64,
                _ => 0,
            };
            self.draining_bytes += bytes;
            self.draining.push_back((id, bytes));
        }
        code
    }

    /// Gives the program a request for a send.
    pub(super) fn give_request(
        &mut self,
        env: &Env,
        id: usize,
        request: Slot<'_, Request>,
    ) -> c_int {
        match self.requests.take(env.abi) {
            Ok(own) => {
                let handle = own.handle();
                self.sends[id].handle = Some(own);
                self.table.insert(handle, Entry::Send(id));
                request.write(env.abi, handle);
                env.abi.success
            }
            Err(code) => code,
        }
    }
}

/// A call of the program that sends, with all that decides who makes the send. The call is still being made.
struct Call<'a> {
    engine: &'a Engine,
    args: &'a SendArgs,
    info: Option<TypeInfo>,
    place: Option<Place>,
    stream: Option<Stream>,
}

impl Call<'_> {
    fn bytes(&self) -> u64 {
        let info = self.info.as_ref();
        info.map_or(0, |info| info.bytes(self.args.count))
    }
}

impl MakerFacts for Call<'_> {
    fn is_nothing(&mut self) -> bool {
        self.args.count <= 0 || self.args.dest == self.engine.env.abi.proc_null
    }

    fn is_type_known(&mut self) -> bool {
        let abi = self.engine.env.abi;
        self.info = types::info(abi, self.args.datatype);
        if self.info.is_none() && cuda::is_device(self.args.buffer) {
            // Nobody knows how long the message is, nor where its first byte lies.
            stats::left_native(Reason::UnknownType, 0);
            let args = self.args;
            meter::sent(SentBy::Native, 0, || {
                comms::receiver(abi, args.comm, args.dest).rank()
            });
        }
        self.info.is_some()
    }

    fn lies(&mut self) -> Lies {
        let Some(info) = &self.info else {
            return Lies::Host;
        };
        let place = self.args.place(self.engine.env.abi, info);
        let lies = match place {
            Place::Host(_) => Lies::Host,
            Place::Device(_) => Lies::Device,
            Place::Several(_) => Lies::Several,
        };
        self.place = Some(place);
        lies
    }

    fn is_wished_for(&mut self) -> bool {
        let Some(info) = &self.info else {
            return false;
        };
        self.bytes() >= HOST_BYTES_MIN && self.engine.is_wished_for(self.args, info)
    }

    fn is_like_rts(&mut self) -> bool {
        let args = self.args;
        if self.bytes() == RTS_BYTES as u64 {
            self.stream = self.engine.stream(args.comm, args.dest, args.tag);
        }
        self.stream.is_some()
    }
}
