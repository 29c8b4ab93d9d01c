//! The choice of paths by the program (`anabranch_paths`).

use crate::config::{Kind, PathList};
use crate::engine::engine;
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
