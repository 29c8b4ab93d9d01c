//! Probes: a message that went by RTS is reported with its own length.

use std::ffi::{c_int, c_void};

use crate::engine::comms;
use crate::engine::core::Core;
use crate::engine::receive::{find_slot, received};
use crate::engine::Engine;
use crate::mpi::{native, Handle, Status};
use crate::node::RTS_BYTES;
use crate::stats::{self, Counter};
use crate::transfer::stream::Stream;

/// The arguments of a probe.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct ProbeArgs {
    pub source: c_int,
    pub tag: c_int,
    pub comm: Handle,
}

impl Engine {
    /// `MPI_Iprobe`, and with a message `MPI_Improbe`.
    ///
    /// # Safety
    /// The arguments are those of the program's call.
    pub unsafe fn iprobe(
        &self,
        args: ProbeArgs,
        flag: *mut c_int,
        message: Option<*mut Handle>,
        status: *mut c_void,
    ) -> c_int {
        let live = self.live();
        if !live && message.is_none() {
            // SAFETY: passed on.
            return unsafe { native::iprobe(args.source, args.tag, args.comm, flag, status) };
        }
        // SAFETY: passed on.
        self.once(|engine, core| unsafe { engine.try_probe(core, args, flag, message, status) })
    }

    /// `MPI_Probe`, and with a message `MPI_Mprobe`.
    ///
    /// # Safety
    /// As [`Engine::iprobe`].
    pub unsafe fn probe(
        &self,
        args: ProbeArgs,
        message: Option<*mut Handle>,
        status: *mut c_void,
    ) -> c_int {
        if let (Some(_scope), None) = (self.early(), message) {
            // SAFETY: passed on.
            return unsafe { native::probe(args.source, args.tag, args.comm, status) };
        }
        self.until(|engine, core| {
            let mut flag = 0;
            // SAFETY: passed on.
            let code = unsafe { engine.try_probe(core, args, &raw mut flag, message, status) };
            (flag != 0 || code != engine.env.abi.success).then_some(code)
        })
    }

    unsafe fn try_probe(
        &self,
        core: &mut Core,
        args: ProbeArgs,
        flag: *mut c_int,
        message: Option<*mut Handle>,
        status: *mut c_void,
    ) -> c_int {
        let abi = self.env.abi;
        let mut own = Status::new();
        let status = if abi.ignores_status(status) {
            own.as_mut_ptr()
        } else {
            status
        };
        // SAFETY: passed on; the status is the program's or a local.
        unsafe {
            let code = match message {
                None => native::iprobe(args.source, args.tag, args.comm, flag, status),
                Some(message) => {
                    native::improbe(args.source, args.tag, args.comm, flag, message, status)
                }
            };
            if code != abi.success || *flag == 0 {
                return code;
            }
            let mut seen = Status::new();
            seen.as_mut_ptr()
                .cast::<u8>()
                .copy_from_nonoverlapping(status.cast(), abi.status_bytes);
            if received(abi, &seen) != RTS_BYTES as u64 {
                return code;
            }
            let stream = self.probed_stream(args.comm, status);
            if let Some(stream) = stream {
                // Receives posted before may have taken earlier messages of the stream without counting them.
                core.settle(&self.env);
                let sequence = core.received.peek(stream);
                let length = find_slot(&self.env, stream, sequence, |peer, slot, _| {
                    peer.slot(slot).map(|s| s.length())
                });
                if let Some(length) = length.flatten() {
                    stats::add(Counter::ProbesRts, 1);
                    native::status_set_elements_x(status, abi.byte, length as _);
                }
            }
            if let Some(message) = message {
                core.note_matched(abi.read(message), stream);
            }
            code
        }
    }

    /// The stream of the message that a probe has seen.
    unsafe fn probed_stream(&self, comm: Handle, status: *mut c_void) -> Option<Stream> {
        let abi = self.env.abi;
        // SAFETY: the program's communicator and a filled status.
        unsafe {
            let identity = comms::identity(abi, comm)?;
            let peer = identity.world_rank(abi.status_source(status))?;
            Some(Stream {
                comm: identity.id,
                peer,
                tag: abi.status_tag(status),
            })
        }
    }
}
