//! Which paths the messages that this rank receives may take: those of `ANABRANCH_PATHS`, or fewer that the
//! program has chosen since, so that it can compare them in one run.

use std::sync::atomic::{AtomicU8, Ordering};

use crate::config::{Kind, PathList, Paths};
use crate::engine::{engine, Env};
use crate::mpi::guard;

/// Why the paths were not chosen.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Refused {
    /// The library takes no messages.
    #[error("MPI is not initialized, or the library is off")]
    Off,
    /// The text is no list of paths.
    #[error("{0:?} is not {accepted}", accepted = PathList.accepts())]
    NoList(String),
    /// The rank was set up without one of them.
    #[error("{0:?} has a path that ANABRANCH_PATHS={1} leaves out: set that to what shall be chosen from")]
    LeftOut(String, String),
}

/// The paths of messages that begin now.
#[derive(Debug)]
pub struct Allowed(AtomicU8);

const DIRECT: u8 = 1;
const RELAY: u8 = 2;
const HOST: u8 = 4;

impl Allowed {
    pub(super) fn new(paths: Paths) -> Allowed {
        Allowed(AtomicU8::new(bits(paths)))
    }

    fn set(&self, paths: Paths) {
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
    pub(super) fn paths(&self) -> Paths {
        self.allowed.get()
    }

    /// Whether a message of this length may be split over several paths.
    pub(super) fn may_split(&self, bytes: u64) -> bool {
        bytes >= self.config.multipath.max(1) && !self.paths().is_direct_only()
    }
}

/// From now on messages that this rank receives take only these paths, a list in the form of
/// `ANABRANCH_PATHS`; without a list, those of that option again. Messages under way keep theirs. False if
/// nothing has changed; the log says why.
#[must_use]
pub fn choose(list: Option<&str>) -> bool {
    let chosen = try_to_choose(list);
    if let Err(why) = &chosen {
        log::warn!("anabranch_paths: {why}");
    }
    chosen.is_ok()
}

fn try_to_choose(list: Option<&str>) -> Result<(), Refused> {
    let engine = engine().filter(|_| guard::armed()).ok_or(Refused::Off)?;
    let env = &engine.env;
    let all = env.config.paths;
    let wanted = match list {
        None => all,
        Some(list) => PathList
            .parse(list)
            .ok_or_else(|| Refused::NoList(list.into()))?,
    };
    if !wanted.are_among(&all) {
        let list = list.unwrap_or_default();
        return Err(Refused::LeftOut(list.into(), PathList.show(&all)));
    }
    env.allowed.set(wanted);
    Ok(())
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
