//! What is given back now and then.

use std::time::{Duration, Instant};

use crate::transfer::gpu::Gpu;
use crate::transfer::Env;

/// How often garbage is collected.
const PERIOD: Duration = Duration::from_millis(100);

/// When garbage was last collected.
pub struct Garbage {
    last: Instant,
    kept: Instant,
}

impl Default for Garbage {
    /// Nothing is collected at once.
    fn default() -> Garbage {
        let now = Instant::now();
        Garbage {
            last: now,
            kept: now,
        }
    }
}

impl Gpu {
    /// Collects garbage now and then: tells peers what the program has freed and, while it sends nothing, what
    /// it has mapped elsewhere; unmaps what they have freed, and gives staging back when memory is short. The
    /// latter two enter contexts, which only happens if this `may_enter`.
    pub fn collect_garbage(&mut self, env: &Env, may_enter: bool, is_sending: bool) {
        // Only a rank that has met a device buffer has any garbage.
        if env.node.own().gpu_page().is_none() {
            return;
        }
        if self.garbage.last.elapsed() >= PERIOD {
            self.garbage.last = Instant::now();
            self.tell_freed(env);
            if !is_sending {
                self.tell_changed(env);
            }
        }
        if !may_enter || self.garbage.kept.elapsed() < PERIOD {
            return;
        }
        self.garbage.kept = Instant::now();
        for peer in env.node.peers() {
            self.let_go(&peer);
        }
        self.relays.mind_memory(env);
        self.exec.mind_memory();
    }
}
