//! Where the summary goes.

use std::path::{Path, PathBuf};

/// The file of a process of a spawned world, whose ranks have the numbers of its parents'.
#[must_use]
pub fn spawned(path: &Path, pid: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".spawned-{pid}"));
    name.into()
}

/// Where the summary at MPI_Finalize goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StatsTarget {
    /// Nowhere.
    Off,
    /// As text to stderr.
    Stderr,
    /// As JSON to this file.
    File(PathBuf),
}

impl StatsTarget {
    /// The target of the rank that writes for its node: `%r` in a file name is its number, so that the files of several
    /// nodes in one folder have different names.
    #[must_use]
    pub fn of_rank(&self, rank: u32) -> StatsTarget {
        let StatsTarget::File(path) = self else {
            return self.clone();
        };
        let name = path.file_name().and_then(|name| name.to_str());
        StatsTarget::File(match name {
            Some(name) => path.with_file_name(name.replace("%r", &rank.to_string())),
            None => path.clone(),
        })
    }

    /// The target of a process of a spawned world: see [`spawned`].
    #[must_use]
    pub fn of_spawned(&self, pid: u32) -> StatsTarget {
        match self {
            StatsTarget::File(path) => StatsTarget::File(spawned(path, pid)),
            other => other.clone(),
        }
    }
}
