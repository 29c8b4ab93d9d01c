//! Standing aside for a while: messages are passed on as if the library were not there, so that a program can
//! measure with and without it in one run.
//!
//! Nothing of the engine may be under way meanwhile: an RTS that a native receive matches would be 61 bytes
//! in the program's buffer. This rank checks what it can see of that. The caller makes sure that all ranks
//! switch.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::engine::{engine, Core, Engine};
use crate::mpi::guard;
use crate::node::Backoff;

/// How long to wait for the ATSs of messages that peers have received.
const PATIENCE: Duration = Duration::from_millis(100);

/// Passes messages on from now on, or takes them again. Returns how many messages and requests of this rank
/// prevent that, in which case nothing has changed. Without an engine messages are passed on anyway.
pub fn set(on: bool) -> usize {
    let Some(engine) = engine() else { return 0 };
    // Inside one of MPI's callbacks, a message of this thread is under way.
    let Some(_inside) = guard::enter() else {
        return 1;
    };
    if !guard::armed() || guard::is_aside() == on {
        return 0;
    }
    if on {
        let left = engine.come_to_rest();
        if left != 0 {
            return left;
        }
    }
    guard::set_aside(on);
    0
}

impl Engine {
    /// Ends everything that ends without the program. Returns how much is left.
    fn come_to_rest(&self) -> usize {
        let deadline = Instant::now() + PATIENCE;
        let mut backoff = Backoff::new();
        loop {
            let left = {
                let mut core = self.core.lock();
                core.is_inside = true;
                // A receiver that was put to does not ring.
                core.serve_now();
                core.progress(&self.env);
                core.close_received(&self.env, usize::MAX);
                core.test_draining(&self.env, usize::MAX);
                core.in_the_way()
            } + self.native.load(Ordering::SeqCst) as usize;
            if left == 0 || Instant::now() > deadline {
                return left;
            }
            backoff.snooze();
        }
    }
}

impl Core {
    /// Counts requests held by the program whose meaning the MPI library does not know, including persistent
    /// ones that are not started, and messages that have not been received.
    fn in_the_way(&self) -> usize {
        let requests = self.table.len() + self.matched.len() + self.orphans.len();
        // Native requests about which something is remembered, until they are freed. Some may also be counted
        // as requests; none is left out.
        requests
            + self.early.len()
            + self.posted
            + self.moving.len()
            + self.sends_out()
            + self.draining.len()
    }
}
