//! Which messages are pushed: written to the receiver's buffer by their sender, instead of being read by their receiver.
//!
//! Two copies that read against each other carry less than two that write (H200, 240 MiB each: 736 and 771 GB/s), as what asks
//! for the data of one goes against the data of the other. One alone is as fast either way.
//!
//! Two processes on one GPU take turns there, unless they use it through MPS: a copy by one after a copy by the other waits
//! for 0.14 ms (H200), whichever it is. So one of the two makes all copies between them, and pushes what goes to the other.

use std::time::Duration;

use hashbrown::HashMap;

use crate::cuda::{reach, Uuid};
use crate::engine::fault::{self, Of, Path};
use crate::engine::fetch::Ways;
use crate::engine::gpu::Gpu;
use crate::engine::Env;
use crate::node::{Message, Target};
use crate::stats::{self, Counter};

/// Long messages, sent and received, within which a rank is taken to go on sending to another: two windows each way.
const RECENT_WINDOWS: u64 = 4;
/// The same with regard to others, to be sure that there are none.
const RECENT: u64 = 64;

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

/// To whom this rank has sent long messages of late.
#[derive(Default)]
pub struct Exchanges {
    /// Long messages, sent and received.
    messages: u64,
    /// The number of the last one to each rank.
    sent: HashMap<u32, u64>,
}

impl Exchanges {
    /// A message to a rank has begun.
    pub fn sent(&mut self, env: &Env, to: u32, bytes: u64) {
        if is_long(env, bytes) {
            self.note_sent(to);
        }
    }

    fn note_sent(&mut self, to: u32) {
        self.messages += 1;
        self.sent.insert(to, self.messages);
    }

    /// Whether a long message that begins to come from a rank is one of those that go both ways between it and this rank, and
    /// between no others that this one knows of.
    fn received(&mut self, from: u32, depth: u32) -> bool {
        self.messages += 1;
        let age = |at: &u64| self.messages - at;
        let is_recent = |at| age(at) <= RECENT_WINDOWS * u64::from(depth);
        let mut others = self.sent.iter().filter(|(to, _)| **to != from);
        self.sent.get(&from).is_some_and(is_recent) && others.all(|(_, at)| age(at) > RECENT)
    }
}

fn is_long(env: &Env, bytes: u64) -> bool {
    env.config.push > 0 && bytes >= env.config.push
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
        if !is_long(env, message.length) {
            return None;
        }
        let source = message.source;
        let is_exchange = self.exchanges.received(source, depth);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ranks_that_send_to_each_other_exchange() {
        let mut exchanges = Exchanges::default();
        assert!(!exchanges.received(3, 1), "nothing is sent");
        exchanges.note_sent(3);
        let received: Vec<bool> = (0..6).map(|_| exchanges.received(3, 1)).collect();
        assert_eq!(received, [true, true, true, true, false, false]);
        for depth in [1, 16] {
            for _ in 0..5 {
                (0..depth).for_each(|_| exchanges.note_sent(3));
                assert!((0..depth).all(|_| exchanges.received(3, depth)));
                assert!(!exchanges.received(4, depth), "nothing is sent to that one");
            }
        }
        exchanges.note_sent(4);
        exchanges.note_sent(3);
        assert!(!exchanges.received(3, 1), "two are sent to");
        for _ in 0..RECENT {
            exchanges.note_sent(3);
        }
        assert!(exchanges.received(3, 1), "the other was long ago");
    }
}
