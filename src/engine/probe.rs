//! Probes: a message that went by RTS is reported with its own length.

use std::ffi::c_int;

use crate::engine::comms;
use crate::engine::core::Core;
use crate::engine::receive::{find_slot, received};
use crate::engine::Engine;
use crate::mpi::{native, Comm, Message, Out, Slot, Status, StatusOut, StatusRef};
use crate::node::RTS_BYTES;
use crate::stats::{self, Counter};
use crate::transfer::stream::Stream;

/// The arguments of a probe.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct ProbeArgs {
    pub source: c_int,
    pub tag: c_int,
    pub comm: Comm,
}

impl Engine {
    /// `MPI_Iprobe`, and with a message `MPI_Improbe`.
    pub fn iprobe(
        &self,
        args: ProbeArgs,
        flag: Out<'_, c_int>,
        message: Option<Slot<'_, Message>>,
        status: StatusOut<'_>,
    ) -> c_int {
        let live = self.live();
        if !live && message.is_none() {
            return native::iprobe(args.source, args.tag, args.comm, flag, status);
        }
        self.once(|engine, core| engine.try_probe(core, args, flag, message, status))
    }

    /// `MPI_Probe`, and with a message `MPI_Mprobe`.
    pub fn probe(
        &self,
        args: ProbeArgs,
        message: Option<Slot<'_, Message>>,
        status: StatusOut<'_>,
    ) -> c_int {
        if let (Some(_scope), None) = (self.early(), message) {
            return native::probe(args.source, args.tag, args.comm, status);
        }
        self.until(|engine, core| {
            let mut flag = 0;
            let code = engine.try_probe(core, args, Out::of(&mut flag), message, status);
            (flag != 0 || code != engine.env.abi.success).then_some(code)
        })
    }

    fn try_probe(
        &self,
        core: &mut Core,
        args: ProbeArgs,
        flag: Out<'_, c_int>,
        message: Option<Slot<'_, Message>>,
        status: StatusOut<'_>,
    ) -> c_int {
        let abi = self.env.abi;
        let mut own = Status::new();
        let status = status.or(abi, &mut own);
        let ProbeArgs { source, tag, comm } = args;
        let code = match message {
            None => native::iprobe(source, tag, comm, flag, status.out()),
            Some(message) => native::improbe(source, tag, comm, flag, message, status.out()),
        };
        if code != abi.success || flag.read() == 0 {
            return code;
        }
        if received(abi, status.seen()) != RTS_BYTES as u64 {
            return code;
        }
        let stream = self.probed_stream(comm, status.seen());
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
            core.note_matched(message.read(abi), stream);
        }
        code
    }

    /// The stream of the message that a probe has seen.
    fn probed_stream(&self, comm: Comm, status: StatusRef<'_>) -> Option<Stream> {
        let abi = self.env.abi;
        let identity = comms::identity(abi, comm)?;
        let peer = identity.world_rank(abi.status_source(status))?;
        Some(Stream {
            comm: identity.id,
            peer,
            tag: abi.status_tag(status),
        })
    }
}
