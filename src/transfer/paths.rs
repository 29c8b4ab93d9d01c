//! Which paths the messages that this rank receives may take: those of `ANABRANCH_PATHS`, or fewer that the
//! program has chosen since, so that it can compare them in one run.

use std::sync::atomic::{AtomicU8, Ordering};

use crate::config::Paths;
use crate::transfer::Env;

/// The paths of messages that begin now.
#[derive(Debug)]
pub struct Allowed(AtomicU8);

const DIRECT: u8 = 1;
const RELAY: u8 = 2;
const HOST: u8 = 4;

impl Allowed {
    /// At first these.
    pub fn new(paths: Paths) -> Allowed {
        Allowed(AtomicU8::new(bits(paths)))
    }

    /// From now on these.
    pub fn set(&self, paths: Paths) {
        self.0.store(bits(paths), Ordering::Relaxed);
    }

    fn get(&self) -> Paths {
        let bits = self.0.load(Ordering::Relaxed);
        Paths {
            direct: bits & DIRECT != 0,
            relay: bits & RELAY != 0,
            host: bits & HOST != 0,
        }
    }
}

fn bits(paths: Paths) -> u8 {
    let bit = |is_in: bool, bit: u8| if is_in { bit } else { 0 };
    bit(paths.direct, DIRECT) | bit(paths.relay, RELAY) | bit(paths.host, HOST)
}

impl Env {
    /// The paths that messages received by this rank may take.
    pub fn paths(&self) -> Paths {
        self.allowed.get()
    }

    /// Whether a message of this length may be split over several paths.
    pub fn may_split(&self, bytes: u64) -> bool {
        bytes >= self.config.multipath.max(1) && !self.paths().is_direct_only()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_path_is_kept_by_itself() {
        for bits in 1..8 {
            let paths = Paths {
                direct: bits & 1 != 0,
                relay: bits & 2 != 0,
                host: bits & 4 != 0,
            };
            let allowed = Allowed::new(Paths::ALL);
            allowed.set(paths);
            assert_eq!(allowed.get(), paths);
            assert!(paths.are_among(&Paths::ALL) && paths.are_among(&paths));
            assert_eq!(Paths::ALL.are_among(&paths), bits == 7);
        }
    }
}
