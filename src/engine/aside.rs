//! Standing aside for a while: messages are passed on as if the library were not there, so that a program can measure with and
//! without it in one run.
//!
//! Nothing of the engine's may be under way meanwhile: a descriptor that a native receive matches would be 61 bytes of the
//! program's buffer. What this rank can see of that, it looks for; that ranks agree, the caller sees to.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::engine::{engine, Core, Engine};
use crate::mpi::guard;
use crate::node::Backoff;

/// How long is waited for what peers have received and not yet told of.
const PATIENCE: Duration = Duration::from_millis(100);

/// Has messages passed on from now on, or taken again. Gives how many messages and requests of this rank are in the way, in
/// which case nothing has changed. Without an engine messages are passed on anyway.
pub fn set(on: bool) -> usize {
    let Some(engine) = engine() else { return 0 };
    // Inside one of MPI's callbacks, a message of this thread's is under way.
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
    /// Ends what ends without the program. Gives how much is left.
    fn come_to_rest(&self) -> usize {
        let deadline = Instant::now() + PATIENCE;
        let mut backoff = Backoff::new();
        loop {
            let left = {
                let mut core = self.core.lock();
                core.is_inside = true;
                // A receiver that was written to does not ring.
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
    /// Requests in the program's hands of which the MPI library does not know what they stand for, persistent ones that are not
    /// started included, and messages that have not been received.
    fn in_the_way(&self) -> usize {
        let requests = self.table.len() + self.matched.len() + self.orphans.len();
        // Native ones of which something is remembered, until they are freed.
        // One of these may also be counted as a request; none is left out.
        requests
            + self.early.len()
            + self.posted
            + self.moving.len()
            + self.sends_out()
            + self.draining.len()
    }
}
