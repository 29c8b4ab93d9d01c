//! RTR: a receiver tells the sender of a receive before the message is sent. The sender then writes to that
//! buffer at once, instead of waiting until its message is matched and its receiver has begun to read it.
//!
//! MPI decides which message a receive gets, and its rules let both sides know it (MPI 4.1 section 3.5:
//! messages of one stream do not overtake one another, and a message goes to the first receive posted that it
//! matches). A receive that names its source and its tag takes the message behind the last one of that stream
//! that was received, if no other receive that might take it is pending. The receiver tells the sender which
//! message was the last one. The sender knows what it has sent since: if it has sent anything, it does not
//! take the RTR. A message that the MPI library sends alone, to any rank, counts as something (`Unseen`).
//!
//! If several threads call MPI at once, nobody can know the order, and no RTR is sent: with
//! MPI_THREAD_MULTIPLE, from the moment on at which a second thread has called MPI. That thread waits for the
//! core first ([`guard::before_another_calls`]). Under the core's lock a receive is posted and its RTR sent,
//! and a message is begun and its RTS sent: whatever the first thread does of this is done, or not begun,
//! when the second goes on.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::engine::Env;
use crate::mpi::guard;
use crate::transfer::history::Seen;

/// What the program sends and receives without the engine seeing it.
#[derive(Debug, Default)]
pub struct Unseen {
    sends: AtomicU64,
    receives: AtomicBool,
}

impl Unseen {
    /// A message is about to go by the MPI library.
    #[inline]
    pub fn note_send(&self) {
        // One thread at a time: from the second one on, no RTR is sent.
        let sends = self.sends.load(Ordering::Relaxed);
        self.sends.store(sends.wrapping_add(1), Ordering::Relaxed);
    }

    /// The MPI library alone posts a receive that may match anything.
    #[cold]
    pub fn note_receive(&self) {
        self.receives.store(true, Ordering::Relaxed);
    }
}

impl Env {
    /// Whether this rank sends RTRs, and takes those of others. Whoever acts on the answer must ask under the
    /// core's lock.
    pub(super) fn may_send_rtr(&self) -> bool {
        self.are_rtrs_on() && self.sees_all()
    }

    /// Whether this rank knows of all that it sends and receives, in the right order.
    pub(super) fn sees_all(&self) -> bool {
        let is_seen = !self.unseen.receives.load(Ordering::Relaxed) && !guard::has_passed_on();
        is_seen && !(self.multiple && guard::has_several_callers())
    }

    /// The same, and how many messages the engine has not seen.
    pub(super) fn seen(&self) -> Seen {
        Seen {
            is_all: self.sees_all(),
            others: self.unseen.sends.load(Ordering::Relaxed),
        }
    }
}
