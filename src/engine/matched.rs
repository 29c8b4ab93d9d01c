//! Messages taken by a matched probe, between `MPI_Mprobe` and `MPI_Mrecv` (MPI 4.1 section 3.8.2).

use crate::engine::receive::release;
use crate::engine::{Core, Engine, Env};
use crate::mpi::{Comm, Message, StatusRef};
use crate::transfer::stream::Stream;

/// What is known of such a message. It is as long as an RTS, and has been counted.
#[derive(Clone, Copy, Debug)]
pub struct Matched {
    stream: Option<Stream>,
    sequence: u64,
}

impl Core {
    /// Counts a message that a matched probe has taken out of its stream.
    pub(super) fn note_matched(&mut self, message: Message, stream: Option<Stream>) {
        let sequence = stream.map_or(0, |stream| self.received.take(stream));
        self.matched.insert(message, Matched { stream, sequence });
    }

    /// The message is about to be received.
    pub(super) fn take_matched(&mut self, message: Message) -> Option<Matched> {
        self.matched.remove(&message)
    }
}

impl Matched {
    /// The message did not fit its receive: if it was an RTS, its sender is released.
    pub(super) fn release(&self, env: &Env) -> bool {
        self.stream
            .is_some_and(|stream| release(env, stream, self.sequence))
    }
}

impl Engine {
    /// A native receive that nobody watched has completed with a message as long as an RTS, which is counted.
    #[cold]
    pub(super) fn count_unwatched(&self, comm: Comm, status: StatusRef<'_>) {
        let abi = self.env.abi;
        let (source, tag) = (abi.status_source(status), abi.status_tag(status));
        if let Some(stream) = self.stream(comm, source, tag) {
            self.core.lock().received.take(stream);
        }
    }

    /// What a matched probe has noted of a message that is about to be received.
    pub fn take_matched(&self, message: Message) -> Option<Matched> {
        self.core
            .lock()
            .take_matched(self.env.abi.normalize(message))
    }
}
