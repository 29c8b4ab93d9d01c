//! Which messages are put: their sender writes them to the receiver's buffer, instead of the receiver reading
//! them.
//!
//! Two copies that read against each other carry less than two that write (H200, 240 MiB each: 736 and 771
//! GB/s), as the read requests of one go against the data of the other. One copy alone is as fast either way.
//!
//! Two processes on one GPU take turns there, unless they use it through MPS: a copy by one process after a
//! copy by the other waits for 0.14 ms (H200), whichever process it is. So one of the two makes all copies
//! between them, and puts the messages to the other.

use std::time::Duration;

use crate::cuda::reach;
use crate::node::{Message, Target};
use crate::policy::put::{self as policy, PutFacts};
use crate::policy::{decided_by, stepped};
use crate::stats::{self, Counter};
use crate::transfer::fault::{self, Of, Path};
use crate::transfer::fetch::RouteContext;
use crate::transfer::gpu::Gpu;
use crate::transfer::Env;

/// If a sender that is to put has not begun for so long, the receiver reads its part after all.
const PATIENCE: Duration = Duration::from_micros(300);
/// The same for a sender that must wait for its turn on the GPU, and would then wait for the next one.
pub const TURN_PATIENCE: Duration = Duration::from_millis(5);

/// The receiver's buffer, as the target of a put.
pub struct PutTarget {
    /// What the sender needs to know of it.
    pub target: Target,
    /// If the sender has not begun for so long, with nothing before it, the receiver reads its part after
    /// all.
    pub patience: Duration,
}

impl Env {
    /// Whether messages of so many bytes, in both directions, are written by their senders.
    pub fn puts(&self, bytes: u64) -> bool {
        self.config.put > 0 && bytes >= self.config.put
    }
}

impl RouteContext<'_> {
    /// The receiver's buffer, if the message is to be put into it. `depth`: of the message's window.
    pub fn put(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        message: &Message,
        depth: u32,
    ) -> Option<PutTarget> {
        let source = message.source;
        let mut ends = Ends {
            routes: self,
            env,
            gpu,
            message,
            depth,
        };
        decided_by!("put.by_exchange", &mut ends, policy::by_exchange)
            .then(|| self.put_as_before(env, gpu, source))
            .flatten()
    }

    /// The receiver's buffer, if a put to it is as fast as a get.
    pub fn put_as_before(&self, env: &Env, gpu: &mut Gpu, source: u32) -> Option<PutTarget> {
        self.exported(env, gpu, source, PATIENCE)
            .filter(|push| push.target.is_in_large_pages())
    }

    /// Whether the sender makes the copies between the two ranks: both buffers are on a GPU on which
    /// processes take turns, and the sender is the lower rank.
    pub fn is_for_sender(&mut self, env: &Env, gpu: &Gpu, message: &Message) -> bool {
        let mut ends = Ends {
            routes: self,
            env,
            gpu,
            message,
            depth: 1,
        };
        decided_by!("put.is_for_sender", &mut ends, policy::is_for_sender)
    }

    /// The receiver's buffer, for such a message.
    pub fn put_in_turn(&self, env: &Env, gpu: &mut Gpu, source: u32) -> Option<PutTarget> {
        self.exported(env, gpu, source, TURN_PATIENCE)
    }

    fn exported(
        &self,
        env: &Env,
        gpu: &mut Gpu,
        source: u32,
        patience: Duration,
    ) -> Option<PutTarget> {
        let target = match gpu.export(env, self.buffer?) {
            Ok(export) => Target::from(&export),
            Err(error) => {
                // It is no fault if memory cannot be exported.
                if error.code().is_some() && !error.is_refusal() {
                    stats::add(Counter::Retries, 1);
                    let of = Of::From(source);
                    fault::survived(of, Path::Direct, &error, "read instead of written");
                }
                return None;
            }
        };
        Some(PutTarget { target, patience })
    }
}

/// The two ends of a message, for who writes it. `depth`: of its window.
struct Ends<'a, 'b> {
    routes: &'a mut RouteContext<'b>,
    env: &'a Env,
    gpu: &'a Gpu,
    message: &'a Message,
    depth: u32,
}

impl PutFacts for Ends<'_, '_> {
    fn is_long(&mut self) -> bool {
        self.env.puts(self.message.length)
    }

    fn is_exchange(&mut self) -> bool {
        let (source, depth) = (self.message.source, self.depth);
        let exchanges = &mut self.routes.history.exchanges;
        stepped!(
            "peers.received",
            exchanges,
            (source, depth),
            exchanges.received(source, depth)
        )
    }

    fn is_alone(&mut self) -> bool {
        let source = self.message.source;
        (self.routes.others.rows().iter()).all(|row| row.source == source)
    }

    fn is_lower(&mut self) -> bool {
        self.message.source < self.env.world_rank
    }

    fn is_turned(&mut self) -> bool {
        self.routes.to().is_some_and(|device| {
            device == self.message.device
                && reach::by_uuid(&device).is_some_and(|device| !device.is_mps)
        })
    }

    fn are_put(&mut self) -> bool {
        self.env.config.put > 0
    }

    fn may_be_direct(&mut self) -> bool {
        self.env.paths().direct
    }

    fn may_put(&mut self) -> bool {
        self.gpu.may_put(self.message.source)
    }
}
