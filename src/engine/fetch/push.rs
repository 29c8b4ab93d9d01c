//! Which messages are pushed: written to the receiver's buffer by their sender, instead of being read by their receiver.
//!
//! Two copies that read against each other carry less than two that write (H200, 240 MiB each: 736 and 771 GB/s), as what asks
//! for the data of one goes against the data of the other. One alone is as fast either way.
//!
//! Two processes on one GPU take turns there, unless they use it through MPS: a copy by one after a copy by the other waits
//! for 0.14 ms (H200), whichever it is. So one of the two makes all copies between them, and pushes what goes to the other.

use std::time::Duration;

use crate::cuda::{reach, Uuid};
use crate::engine::fault::{self, Of, Path};
use crate::engine::fetch::Ways;
use crate::engine::gpu::Gpu;
use crate::engine::Env;
use crate::node::{Message, Target};
use crate::policy::stepped;
use crate::stats::{self, Counter};

/// How long a sender that is to push may not begin, before its part is pulled after all.
const PATIENCE: Duration = Duration::from_micros(300);
/// The same where it would have to wait for its turn on the GPU, and the sender for the next one then.
pub const TURN_PATIENCE: Duration = Duration::from_millis(5);

/// The receiver's buffer, which the sender is to push to.
pub struct Push {
    /// What the sender needs to know of it.
    pub target: Target,
    /// How long it may not begin, with nothing before it, before its part is pulled after all.
    pub patience: Duration,
}

impl Env {
    /// Whether messages of so many bytes that go both ways are written by their senders.
    pub fn puts(&self, bytes: u64) -> bool {
        self.config.push > 0 && bytes >= self.config.push
    }
}

impl Ways<'_> {
    /// The receiver's buffer, if a message of a window so deep is to be pushed into it.
    pub fn push(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        message: &Message,
        depth: u32,
    ) -> Option<Push> {
        if !env.puts(message.length) {
            return None;
        }
        let source = message.source;
        let is_exchange = {
            let exchanges = &mut *self.exchanges;
            stepped!(
                "peers.received",
                exchanges,
                (source, depth),
                exchanges.received(source, depth)
            )
        };
        let is_alone = self.others.rows().iter().all(|row| row.source == source);
        if is_exchange && is_alone && env.paths().direct && gpu.may_push(source) {
            self.push_as_before(env, gpu, source)
        } else {
            None
        }
    }

    /// The receiver's buffer, where it can be pushed to as fast as it can be pulled to.
    pub fn push_as_before(&self, env: &Env, gpu: &mut Gpu, source: u32) -> Option<Push> {
        self.exported(env, gpu, source, PATIENCE)
            .filter(|push| push.target.is_in_large_pages())
    }

    /// Whether the sender makes the copies between the two: both buffers are on a GPU on which processes take turns, and it is
    /// the lower rank.
    pub fn is_for_sender(&self, env: &Env, gpu: &Gpu, message: &Message) -> bool {
        let is_shared = |device: &Uuid| {
            *device == message.device && reach::by_uuid(device).is_some_and(|device| !device.is_mps)
        };
        message.source < env.world_rank
            && self.to().is_some_and(|device| is_shared(&device))
            && env.config.push > 0
            && env.paths().direct
            && gpu.may_push(message.source)
    }

    /// The receiver's buffer, for such a message.
    pub fn push_in_turn(&self, env: &Env, gpu: &mut Gpu, source: u32) -> Option<Push> {
        self.exported(env, gpu, source, TURN_PATIENCE)
    }

    fn exported(&self, env: &Env, gpu: &mut Gpu, source: u32, patience: Duration) -> Option<Push> {
        let target = match gpu.export(env, self.buffer?) {
            Ok(export) => Target::from(&export),
            Err(error) => {
                // What cannot be exported is no fault.
                if error.code().is_some() && !error.is_refusal() {
                    stats::add(Counter::Retries, 1);
                    let of = Of::From(source);
                    fault::survived(of, Path::Direct, &error, "pulled instead of pushed");
                }
                return None;
            }
        };
        Some(Push { target, patience })
    }
}
