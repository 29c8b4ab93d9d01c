//! The last step of a receive where `ANABRANCH_VERIFY` asks for it: is the payload what was sent?

use std::ffi::c_int;
use std::sync::Arc;

use super::{Receive, Stage, Target};
use crate::cuda::Result;
use crate::engine::core::Core;
use crate::engine::fault::Of;
use crate::engine::fetch::Fetch;
use crate::engine::gpu::Gpu;
use crate::engine::layout::Layout;
use crate::engine::lift::{Lift, Shape};
use crate::engine::verify::{About, Checking, HostReading, Reading};
use crate::engine::Env;

/// What a payload should be, once it is where it belongs.
pub(super) struct ToCheck {
    expected: Reading,
    about: About,
}

impl ToCheck {
    /// Of a message that came by descriptor with checksums.
    pub(super) fn of_fetch(env: &Env, fetch: &Fetch) -> Option<Box<ToCheck>> {
        let message = fetch.message();
        Some(Box::new(ToCheck {
            expected: Reading::Known(fetch.sums()?),
            about: About {
                of: Of::From(message.source),
                own: env.world_rank,
                tag: message.tag,
                length: message.length,
                path: fetch.way(),
            },
        }))
    }
}

impl Core {
    /// Has a value compared with what has landed, if it is brought elsewhere from there.
    pub(super) fn check_value(
        &mut self,
        env: &Env,
        id: usize,
        bytes: u64,
        source: c_int,
        tag: c_int,
    ) {
        let receive = &self.receives[id];
        let has_landed = matches!(
            receive.target,
            Target::Device { .. } | Target::HostRuns { .. }
        );
        let is_whole = receive.code == 0 && bytes > 0 && bytes <= receive.capacity;
        if !env.config.verify || !has_landed || !is_whole {
            return;
        }
        let of = self.sender(env, id, source);
        let receive = &mut self.receives[id];
        let layout = Arc::new(Layout::dense(bytes));
        // SAFETY: the landing range is the receive's own until it is complete, and MPI writes it no more.
        let landed = unsafe { HostReading::new(receive.landed, layout, bytes) };
        receive.to_check = Some(Box::new(ToCheck {
            expected: Reading::Host(landed),
            about: About {
                of,
                own: env.world_rank,
                tag,
                length: bytes,
                path: receive.path,
            },
        }));
        if matches!(receive.stage, Stage::Done) && self.begin_check(id) {
            self.set_moving(id);
        }
    }

    /// The payload is where it belongs. True if it is to be checked now.
    pub(super) fn begin_check(&mut self, id: usize) -> bool {
        let receive = &mut self.receives[id];
        let Some(to_check) = receive.to_check.take().filter(|_| receive.code == 0) else {
            return false;
        };
        let ToCheck {
            expected,
            mut about,
        } = *to_check;
        about.path = receive.path;
        match receive.reading(&mut self.gpu, about.length) {
            Ok(found) => {
                receive.stage = Stage::Checking(Box::new(Checking {
                    expected,
                    found,
                    about,
                }));
                true
            }
            Err(error) => {
                log::warn!("verify: a device buffer cannot be read: {error}");
                false
            }
        }
    }

    /// Moves a check on, as [`Core::advance_receive`].
    pub(super) fn advance_check(&mut self, env: &Env, id: usize) -> (bool, bool) {
        let receive = &mut self.receives[id];
        let Stage::Checking(checking) = &mut receive.stage else {
            return (false, true);
        };
        match checking.poll(&mut self.gpu) {
            Ok(None) => return (false, false),
            Ok(Some(None)) => {}
            Ok(Some(Some(why))) => receive.lose(env.abi, why),
            Err(error) => log::warn!("verify: a device buffer cannot be read: {error}"),
        }
        receive.stage = Stage::Done;
        (true, true)
    }
}

impl Receive {
    /// Reads the payload where the program finds it.
    fn reading(&self, gpu: &mut Gpu, length: u64) -> Result<Reading> {
        // SAFETY: the buffer is lent to the library until the receive is complete, and holds that many bytes.
        let host = |base: *mut u8, layout| unsafe {
            Reading::Host(HostReading::new(base.cast_const(), layout, length))
        };
        Ok(match &self.target {
            Target::InPlace | Target::Unseen | Target::LeftToMpi => {
                host(self.landed, Arc::new(Layout::dense(length)))
            }
            Target::HostRuns { base, layout } => host(*base, Arc::clone(layout)),
            // In several places at once it is not read again: what has landed is checked.
            Target::Several { .. } => host(self.landed, Arc::new(Layout::dense(length))),
            Target::Device { buffer, shape } => {
                let context = gpu.prepare(buffer)?;
                let shape: Shape = shape.clone();
                Reading::Device(Lift::summing(context, shape, length, self.of()))
            }
        })
    }
}
