//! Sends by bcopy: the payload is packed in host memory, and the MPI library carries it.

use std::ffi::c_int;
use std::sync::Arc;

use super::{Send, SendKind};
use crate::cuda::{self, Buffer, Error, Lent};
use crate::engine::args::{Mode, SendArgs};
use crate::engine::comms;
use crate::engine::core::Core;
use crate::engine::layout::Layout;
use crate::engine::lift::{Lift, Shape, Way};
use crate::engine::native::{native_isend, native_send, raise_told};
use crate::engine::place::{HostRuns, LentRuns, Parts};
use crate::engine::types::{self, TypeInfo};
use crate::engine::verify::{About, Reading, Summing};
use crate::engine::{Engine, Env};
use crate::mpi::owned::OwnRequest;
use crate::mpi::{Comm, Family};
use crate::node::{Sums, RTS_BYTES};
use crate::stats::{self, meter, Counter, Reason, SentBy};
use crate::trace;
use crate::transfer::fault::{self, Of, Path};
use crate::transfer::life::{Life, Protocol, Side, State};
use crate::transfer::story::{self, Story};

/// Where the payload of a bcopy send lies.
pub(super) enum Source<'a> {
    /// In one allocation of a device.
    Buffer(&'a Buffer),
    /// In several places.
    Parts(&'a Arc<Layout>),
}

/// How many bytes may still be on their way after their sends have completed: a standard send of a small
/// device buffer completes once its payload is in host memory.
const DRAINING_BYTES_MAX: u64 = 64 << 20;
/// How many of these bcopy sends one round tests: more than one call can add.
pub(in crate::engine) const DRAINING_TESTS_MAX: usize = 16;

impl Engine {
    /// Starts a send of a packed copy of a host buffer, which is free again at once.
    pub(in crate::engine) fn start_copied_send(&self, args: &SendArgs) -> Result<usize, c_int> {
        let env = &self.env;
        env.unseen.note_send();
        let data = self.pack_host(args)?;
        let mut core = self.core.lock();
        // SAFETY: the data are kept until the send is complete.
        let request = unsafe { self.send_packed_counted(&mut core, args, &data) }?;
        let story = Story {
            is_send: true,
            bytes: data.len() as u64,
            ..Story::default()
        };
        Ok(core.insert_value(
            env,
            args.comm,
            request,
            data,
            false,
            (Protocol::Native, story),
        ))
    }

    /// Copies the payload to host memory, then sends it natively. Takes the reason for bcopy, with the
    /// driver's error if there was one.
    pub(super) fn send_value(
        &self,
        args: &SendArgs,
        source: &Source<'_>,
        info: &TypeInfo,
        (reason, trouble): (Reason, Option<Error>),
        sums: Option<Sums>,
    ) -> Result<usize, c_int> {
        let env = &self.env;
        let bytes = info.bytes(args.count);
        let copies = trace::copies_of_next();
        let data = self.bring_down(args, source, info).map_err(|why| {
            stats::add(Counter::Errors, 1);
            let why = fault::lost(self.of(args), Path::Bcopy, &why);
            raise_told(env.abi, args.comm, &why)
        })?;
        drop(copies);
        if let Some(error) = trouble {
            let of = self.of(args);
            fault::survived(of, Path::Rts, &error, "goes by value");
        }
        let wrong = sums.and_then(|sums| self.judge_copy(args, &sums, &data));
        self.make_room_for_draining(bytes);
        let mut core = self.core.lock();
        // SAFETY: the data are kept until the send is complete.
        let request = unsafe { self.send_packed_counted(&mut core, args, &data) }?;
        stats::add(Counter::SendsBcopy, 1);
        stats::add(Counter::SendsBcopyBytes, bytes);
        meter::sent(SentBy::Bcopy, bytes, || self.of(args).rank());
        // The program may use its buffer again.
        let complete = args.completes_alone(env, bytes);
        let story = Story {
            is_send: true,
            bytes,
            reason: Some(reason),
            ..Story::default()
        };
        let id = core.insert_value(
            env,
            args.comm,
            request,
            data,
            complete,
            (Protocol::Bcopy, story),
        );
        if trace::on() {
            let to = self.stream(args.comm, args.dest, args.tag);
            core.sends[id].trace(to, args.tag, bytes);
        }
        if let Some(why) = wrong {
            core.sends[id].lose(env.abi, why);
        }
        Ok(id)
    }

    /// The message as the user knows it.
    fn of(&self, args: &SendArgs) -> Of {
        comms::receiver(self.env.abi, args.comm, args.dest)
    }

    /// What is wrong with the copy, if it differs from what the buffer holds.
    fn judge_copy(&self, args: &SendArgs, sums: &Sums, data: &[u8]) -> Option<Box<str>> {
        let about = About {
            of: self.of(args),
            own: self.env.world_rank,
            tag: args.tag,
            length: data.len() as u64,
            path: story::Path::Bcopy,
        };
        about.judge(sums, &Summing::of(data))
    }

    /// The checksums of a device buffer, if they are wanted. A buffer that cannot be read is sent unchecked.
    pub(super) fn sums_of(
        &self,
        args: &SendArgs,
        buffer: &Buffer,
        info: &TypeInfo,
    ) -> Option<Sums> {
        if !self.env.config.verify {
            return None;
        }
        let read = self.shape_of(args, buffer, info).and_then(|shape| {
            let key = self.core.lock().gpu.prepare(buffer)?;
            let of = self.of(args);
            let lift = Lift::summing(key, shape, info.bytes(args.count), of);
            let mut reading = Reading::Device(lift);
            // As in `bring_down_from`: the copy ends by itself.
            Ok(self.until(|_, core| reading.poll(&mut core.gpu).transpose())?)
        });
        if let Err(error) = &read {
            log::warn!("verify: a device buffer cannot be read: {error}");
        }
        read.ok()
    }

    /// Where the bytes of a message are in device memory.
    fn shape_of(&self, args: &SendArgs, buffer: &Buffer, info: &TypeInfo) -> Result<Shape, Why> {
        if info.dense(args.count) {
            return Ok(Shape::Dense(buffer.address));
        }
        let layout = types::layout(self.env.abi, args.datatype).ok_or(Why::Layout)?;
        Ok(Shape::Runs(args.buffer.addr() as u64, layout))
    }

    /// Sends packed bytes, and counts the message if it is as long as an RTS.
    ///
    /// # Safety
    /// The bytes stay as they are until the send is complete.
    unsafe fn send_packed_counted(
        &self,
        core: &mut Core,
        args: &SendArgs,
        data: &[u8],
    ) -> Result<OwnRequest, c_int> {
        // SAFETY: as the caller says.
        let request = unsafe { send_packed(&self.env, args, data) }?;
        if data.len() == RTS_BYTES {
            if let Some(stream) = self.stream(args.comm, args.dest, args.tag) {
                core.sent.take(stream);
            }
        }
        Ok(request)
    }

    fn pack_host(&self, args: &SendArgs) -> Result<Vec<u8>, c_int> {
        let abi = self.env.abi;
        let why = || fault::refused(self.of(args), &Why::Layout);
        let refused = || raise_told(abi, args.comm, &why());
        let info = types::info(abi, args.datatype).ok_or_else(refused)?;
        let layout = types::layout(abi, args.datatype).ok_or_else(refused)?;
        let bytes = info.bytes(args.count);
        // SAFETY: the program's buffer as its datatype has it, which was found to be in host memory.
        let runs = unsafe { HostRuns::new(LentRuns::new(args.buffer, layout, bytes)) };
        Ok(runs.gathered())
    }

    /// Packs a message into host memory.
    fn bring_down(
        &self,
        args: &SendArgs,
        source: &Source<'_>,
        info: &TypeInfo,
    ) -> Result<Vec<u8>, Why> {
        let bytes = info.bytes(args.count);
        match source {
            Source::Buffer(buffer) => {
                let shape = self.shape_of(args, buffer, info)?;
                Ok(self.bring_down_from(args, buffer, shape, bytes)?)
            }
            Source::Parts(layout) => {
                // SAFETY: the program's buffer, as its datatype has it.
                let runs = unsafe { LentRuns::new(args.buffer, Arc::clone(layout), bytes) };
                self.bring_together(args, &Parts::of(&runs, bytes), bytes)
            }
        }
    }

    /// Packs a message that lies in several places.
    fn bring_together(&self, args: &SendArgs, parts: &Parts, bytes: u64) -> Result<Vec<u8>, Why> {
        let mut data = vec![0; usize::try_from(bytes).unwrap_or(usize::MAX)];
        for (at, run) in &parts.host {
            run.read(&mut data[*at as usize..][..run.bytes() as usize]);
        }
        for part in &parts.device {
            let shape = Shape::Runs(part.buffer.address, Arc::clone(&part.layout));
            let found = self.bring_down_from(args, &part.buffer, shape, part.bytes)?;
            let mut rest = found.as_slice();
            for (at, length) in &part.packed {
                let (run, next) = rest.split_at(*length as usize);
                data[*at as usize..][..run.len()].copy_from_slice(run);
                rest = next;
            }
        }
        Ok(data)
    }

    /// Packs bytes of one allocation.
    fn bring_down_from(
        &self,
        args: &SendArgs,
        buffer: &Buffer,
        shape: Shape,
        bytes: u64,
    ) -> cuda::Result<Vec<u8>> {
        let mut data: Vec<u8> = Vec::with_capacity(usize::try_from(bytes).unwrap_or(usize::MAX));
        let key = self.core.lock().gpu.prepare(buffer)?;
        // SAFETY: the vector has room for as many, and is not touched before the copy is done.
        let room = unsafe { Lent::new(data.as_mut_ptr(), bytes) };
        let mut lift = Lift::new(Way::Down, key, shape, room, self.of(args));
        // The copy ends by itself, so the MPI library is not made to progress meanwhile: see
        // `Engine::serve_out`.
        self.until(|_, core| match lift.poll(&mut core.gpu) {
            Ok(true) => Some(Ok(())),
            Ok(false) => None,
            Err(error) => Some(Err(error)),
        })?;
        // SAFETY: the copy has filled as many bytes.
        unsafe { data.set_len(bytes as usize) };
        Ok(data)
    }

    /// Waits until the bcopy sends that are still on their way leave room for another.
    fn make_room_for_draining(&self, bytes: u64) {
        self.until(|engine, core| {
            core.test_draining(&engine.env, DRAINING_TESTS_MAX);
            (core.draining.is_empty() || core.draining_bytes + bytes <= DRAINING_BYTES_MAX)
                .then_some(())
        });
    }

    /// Waits until the MPI library has sent all bcopy payloads whose sends have completed before. This comes
    /// before a call in which Open MPI waits for other processes without making progress. A native send of
    /// that length would have waited for its receiver, too.
    pub fn send_values_out(&self) {
        if self.env.abi.family != Family::OpenMpi || self.core.lock().draining_bytes == 0 {
            return;
        }
        self.until(|engine, core| {
            core.test_draining(&engine.env, DRAINING_TESTS_MAX);
            (core.draining_bytes == 0).then_some(())
        });
    }
}

impl Core {
    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    pub(super) fn insert_value(
        &mut self,
        env: &Env,
        comm: Comm,
        native: OwnRequest,
        data: Vec<u8>,
        complete: bool,
        (protocol, about): (Protocol, Story),
    ) -> usize {
        let mut life = Life::offered(Side::Sender);
        life.transition(State::Moving(protocol));
        let id = self.sends.insert(Send {
            handle: None,
            comm,
            complete,
            stands_for_null: false,
            code: env.abi.success,
            why: None,
            about,
            is_raised: false,
            kind: SendKind::Value { native, data, life },
        });
        self.test_value(env, id);
        id
    }

    /// Tests up to `most` of the bcopy sends that completed before the MPI library had sent them, in turn.
    /// Testing all of them in each round would be thousands of tests for each call: 64 MiB are 65,536
    /// messages of 1 KiB.
    pub(in crate::engine) fn test_draining(&mut self, env: &Env, most: usize) {
        for _ in 0..self.draining.len().min(most) {
            let Some((id, bytes)) = self.draining.pop_front() else {
                return;
            };
            self.test_value(env, id);
            if self.is_gone(env, id) {
                self.draining_bytes -= bytes;
                self.sends.remove(id).end();
            } else {
                self.draining.push_back((id, bytes));
            }
        }
    }
}

/// Why a message cannot be packed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Why {
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] Error),
    /// Nobody knows where the bytes of the message are.
    #[error("the MPI library does not tell how its datatype is laid out")]
    Layout,
}

/// Sends packed bytes natively in the mode of the arguments.
///
/// # Safety
/// The bytes stay as they are until the send is complete.
unsafe fn send_packed(env: &Env, args: &SendArgs, data: &[u8]) -> Result<OwnRequest, c_int> {
    let bytes = data.len() as u64;
    let long = match c_int::try_from(bytes) {
        Ok(_) => None,
        Err(_) => Some(types::bytes_type(env.abi, bytes).ok_or_else(|| {
            let why = format!("the MPI library makes no datatype of {bytes} bytes");
            let of = comms::receiver(env.abi, args.comm, args.dest);
            raise_told(env.abi, args.comm, &fault::refused(of, &why))
        })?),
    };
    let (datatype, count) = match &long {
        Some(whole) => (whole.get(), 1),
        None => (env.abi.byte, data.len() as i64),
    };
    // SAFETY: so many bytes, which stay as they are, as the caller says.
    let packed = unsafe { args.with_payload(data.as_ptr().cast(), count, datatype) };
    if args.mode != Mode::Buffered {
        return OwnRequest::made(env.abi, |request| native_isend(&packed, request));
    }
    match native_send(&packed) {
        code if code == env.abi.success => Ok(OwnRequest::null(env.abi)),
        code => Err(code),
    }
}
