//! Sends by bcopy: the payload is packed in host memory, and the MPI library carries it.

use std::ffi::c_int;
use std::sync::Arc;

use super::{Mode, Send, SendArgs, SendKind};
use crate::cuda::{self, Buffer, Error};
use crate::engine::comms;
use crate::engine::core::Core;
use crate::engine::layout::Layout;
use crate::engine::lift::{Lift, Shape, Way};
use crate::engine::native::{native_isend, native_send, raise_told};
use crate::engine::place::Parts;
use crate::engine::types::{self, TypeInfo};
use crate::engine::verify::{About, Reading, Summing};
use crate::engine::{Engine, Env};
use crate::mpi::{native, Family, Handle};
use crate::node::{Sums, RTS_BYTES};
use crate::stats::{self, Counter, Reason};
use crate::trace::{self, record};
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
    ///
    /// # Safety
    /// As [`Engine::sort_send`].
    pub(in crate::engine) unsafe fn start_copied_send(
        &self,
        args: &SendArgs,
    ) -> Result<usize, c_int> {
        let env = &self.env;
        env.unseen.note_send();
        // SAFETY: passed on.
        let data = unsafe { self.pack_host(args) }?;
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
    pub(super) unsafe fn send_value(
        &self,
        args: &SendArgs,
        source: &Source<'_>,
        info: &TypeInfo,
        (reason, trouble): (Reason, Option<Error>),
        sums: Option<Sums>,
    ) -> Result<usize, c_int> {
        let env = &self.env;
        let bytes = info.bytes(args.count);
        // SAFETY: passed on.
        let data = unsafe { self.bring_down(args, source, info) }.map_err(|why| {
            stats::add(Counter::Errors, 1);
            // SAFETY: the program's communicator.
            unsafe {
                let why = fault::lost(self.of(args), Path::Bcopy, &why);
                raise_told(env.abi, args.comm, &why)
            }
        })?;
        if let Some(error) = trouble {
            // SAFETY: the program's communicator.
            let of = unsafe { self.of(args) };
            fault::survived(of, Path::Rts, &error, "goes by value");
        }
        // SAFETY: the program's communicator.
        let wrong = sums.and_then(|sums| unsafe { self.judge_copy(args, &sums, &data) });
        self.make_room_for_draining(bytes);
        let mut core = self.core.lock();
        // SAFETY: the data are kept until the native send is complete.
        let request = unsafe { self.send_packed_counted(&mut core, args, &data) }?;
        stats::add(Counter::SendsBcopy, 1);
        stats::add(Counter::SendsBcopyBytes, bytes);
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
        if let Some(why) = wrong {
            core.sends[id].lose(env.abi, why);
        }
        Ok(id)
    }

    /// The message as the user knows it.
    unsafe fn of(&self, args: &SendArgs) -> Of {
        // SAFETY: the program's communicator.
        unsafe { comms::receiver(self.env.abi, args.comm, args.dest) }
    }

    /// What is wrong with the copy, if it differs from what the buffer holds.
    unsafe fn judge_copy(&self, args: &SendArgs, sums: &Sums, data: &[u8]) -> Option<Box<str>> {
        let about = About {
            // SAFETY: passed on.
            of: unsafe { self.of(args) },
            own: self.env.world_rank,
            tag: args.tag,
            length: data.len() as u64,
            path: story::Path::Bcopy,
        };
        about.judge(sums, &Summing::of(data))
    }

    /// The checksums of a device buffer, if they are wanted. A buffer that cannot be read is sent unchecked.
    pub(super) unsafe fn sums_of(
        &self,
        args: &SendArgs,
        buffer: &Buffer,
        info: &TypeInfo,
    ) -> Option<Sums> {
        if !self.env.config.verify {
            return None;
        }
        // SAFETY: passed on.
        let read = unsafe { self.shape_of(args, buffer, info) }.and_then(|shape| {
            let key = self.core.lock().gpu.prepare(buffer)?;
            // SAFETY: the program's communicator.
            let of = unsafe { self.of(args) };
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
    unsafe fn shape_of(
        &self,
        args: &SendArgs,
        buffer: &Buffer,
        info: &TypeInfo,
    ) -> Result<Shape, Why> {
        if info.dense(args.count) {
            return Ok(Shape::Dense(buffer.address));
        }
        // SAFETY: the program's handle.
        let layout = unsafe { types::layout(self.env.abi, args.datatype) }.ok_or(Why::Layout)?;
        Ok(Shape::Runs(args.buffer.addr() as u64, layout))
    }

    /// Sends packed bytes, and counts the message if it is as long as an RTS.
    unsafe fn send_packed_counted(
        &self,
        core: &mut Core,
        args: &SendArgs,
        data: &[u8],
    ) -> Result<Handle, c_int> {
        // SAFETY: passed on.
        unsafe {
            let request = send_packed(&self.env, args, data)?;
            if data.len() == RTS_BYTES {
                if let Some(stream) = self.stream(args.comm, args.dest, args.tag) {
                    core.sent.take(stream);
                }
            }
            Ok(request)
        }
    }

    unsafe fn pack_host(&self, args: &SendArgs) -> Result<Vec<u8>, c_int> {
        let env = &self.env;
        // SAFETY: the program's buffer, datatype and communicator.
        unsafe {
            let refused = || {
                raise_told(
                    env.abi,
                    args.comm,
                    &fault::refused(self.of(args), &Why::Layout),
                )
            };
            let info = types::info(env.abi, args.datatype).ok_or_else(refused)?;
            let layout = types::layout(env.abi, args.datatype).ok_or_else(refused)?;
            let bytes = info.bytes(args.count);
            let mut data = Vec::with_capacity(usize::try_from(bytes).unwrap_or(usize::MAX));
            for piece in layout.pieces(0, bytes) {
                let from = args
                    .buffer
                    .cast::<u8>()
                    .wrapping_offset(piece.offset as isize);
                data.extend_from_slice(std::slice::from_raw_parts(from, piece.length as usize));
            }
            Ok(data)
        }
    }

    /// Packs a message into host memory.
    unsafe fn bring_down(
        &self,
        args: &SendArgs,
        source: &Source<'_>,
        info: &TypeInfo,
    ) -> Result<Vec<u8>, Why> {
        let bytes = info.bytes(args.count);
        // SAFETY: passed on.
        unsafe {
            match source {
                Source::Buffer(buffer) => {
                    let shape = self.shape_of(args, buffer, info)?;
                    Ok(self.bring_down_from(args, buffer, shape, bytes)?)
                }
                Source::Parts(layout) => {
                    let parts = Parts::of(args.buffer.cast(), layout, bytes);
                    self.bring_together(args, &parts, bytes)
                }
            }
        }
    }

    /// Packs a message that lies in several places.
    unsafe fn bring_together(
        &self,
        args: &SendArgs,
        parts: &Parts,
        bytes: u64,
    ) -> Result<Vec<u8>, Why> {
        let mut data = vec![0; usize::try_from(bytes).unwrap_or(usize::MAX)];
        for piece in &parts.host {
            let from = args.buffer.wrapping_byte_offset(piece.offset as isize);
            let (at, length) = (piece.packed as usize, piece.length as usize);
            // SAFETY: a run of the program's message that was found to be in host memory.
            let run = unsafe { std::slice::from_raw_parts(from.cast(), length) };
            data[at..at + length].copy_from_slice(run);
        }
        for part in &parts.device {
            let shape = Shape::Runs(part.buffer.address, Arc::clone(&part.layout));
            // SAFETY: passed on.
            let found = unsafe { self.bring_down_from(args, &part.buffer, shape, part.bytes) }?;
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
    unsafe fn bring_down_from(
        &self,
        args: &SendArgs,
        buffer: &Buffer,
        shape: Shape,
        bytes: u64,
    ) -> cuda::Result<Vec<u8>> {
        let mut data: Vec<u8> = Vec::with_capacity(usize::try_from(bytes).unwrap_or(usize::MAX));
        let key = self.core.lock().gpu.prepare(buffer)?;
        // SAFETY: the program's communicator; the vector has room for `bytes`, and is not touched before the
        // copy is done.
        let mut lift = unsafe {
            let of = self.of(args);
            Lift::new(Way::Down, key, shape, data.as_mut_ptr(), bytes, of)
        };
        // The copy ends by itself, so the MPI library is not made to progress meanwhile: see
        // `Engine::serve_out`.
        self.until(|_, core| match lift.poll(&mut core.gpu) {
            Ok(true) => Some(Ok(())),
            Ok(false) => None,
            Err(error) => Some(Err(error)),
        })?;
        // SAFETY: the copy has filled `bytes` bytes.
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
        comm: Handle,
        native: Handle,
        data: Vec<u8>,
        complete: bool,
        (protocol, about): (Protocol, Story),
    ) -> usize {
        let mut life = Life::offered(Side::Sender);
        if protocol == Protocol::Bcopy {
            life.trace(|| trace::about(record::Side::Sender, about.bytes));
        }
        life.transition(State::Moving(protocol));
        let id = self.sends.insert(Send {
            handle: 0,
            comm,
            complete,
            stands_for_null: false,
            code: env.abi.success,
            why: None,
            about,
            is_raised: false,
            kind: SendKind::Value { native, data, life },
        });
        // SAFETY: the native request was just made by the program's thread.
        unsafe { self.test_value(env, id) };
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
            // SAFETY: called from the program's thread only.
            unsafe { self.test_value(env, id) };
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
unsafe fn send_packed(env: &Env, args: &SendArgs, data: &[u8]) -> Result<Handle, c_int> {
    let mut request = env.abi.request_null;
    let mut bytes = SendArgs {
        buffer: data.as_ptr().cast(),
        count: data.len() as i64,
        datatype: env.abi.byte,
        ..*args
    };
    let mut long = None;
    if c_int::try_from(bytes.count).is_err() {
        // SAFETY: MPI may be called.
        let whole = unsafe { types::bytes_type(env.abi, bytes.count as u64) };
        let whole = whole.ok_or_else(|| {
            let why = format!("the MPI library makes no datatype of {} bytes", bytes.count);
            // SAFETY: the program's communicator.
            unsafe {
                let of = comms::receiver(env.abi, args.comm, args.dest);
                raise_told(env.abi, args.comm, &fault::refused(of, &why))
            }
        })?;
        (bytes.datatype, bytes.count, long) = (whole, 1, Some(whole));
    }
    // SAFETY: the data, and a type of theirs, which may be freed once the send has been started. A buffered
    // send copies before it returns; for any other send the data are kept until it is complete.
    let code = unsafe {
        let code = if args.mode == Mode::Buffered {
            native_send(&bytes)
        } else {
            native_isend(&bytes, &raw mut request)
        };
        if let Some(whole) = &mut long {
            native::type_free(whole);
        }
        code
    };
    if code == env.abi.success {
        Ok(request)
    } else {
        Err(code)
    }
}
