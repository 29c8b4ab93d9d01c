//! The files of a job brought together.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;

use super::file::{self, File, Rank, Side, Sum};

/// A job, of which some files may be missing.
pub struct Job {
    pub files: Vec<File>,
    /// What was left out, a line each.
    pub left_out: Vec<String>,
}

impl Job {
    /// Reads files. What cannot be used is left out.
    pub fn read(paths: &[PathBuf]) -> Job {
        let mut job = Job {
            files: Vec::new(),
            left_out: Vec::new(),
        };
        for path in paths {
            match file::read(path).and_then(|file| job.refused(&file).map_or(Ok(file), Err)) {
                Ok(file) => job.files.push(file),
                Err(why) => job.left_out.push(why),
            }
        }
        job
    }

    /// Why a file does not go with those before it.
    fn refused(&self, file: &File) -> Option<String> {
        let first = self.files.first()?;
        let (path, of_first) = (file.path.display(), first.path.display());
        if !file.may_go_with(first) {
            return Some(format!(
                "{path}: it is of another run than {of_first}, and left out: name the files of one run"
            ));
        }
        for other in &self.files {
            let has = |rank: &u32| other.ranks.iter().any(|it| it.rank == *rank);
            let twice = file.ranks.iter().map(|it| it.rank).find(has);
            if let Some(rank) = twice {
                return Some(format!(
                    "{path}: it has rank {rank}, as {} has, and is left out: name each file once",
                    other.path.display()
                ));
            }
        }
        None
    }

    /// Its ranks, with their hosts.
    pub fn ranks(&self) -> impl Iterator<Item = (&Rank, Option<&str>)> {
        let of = |file: &File| file.ranks.len();
        let mut all: Vec<(&Rank, Option<&str>)> =
            Vec::with_capacity(self.files.iter().map(of).sum());
        for file in &self.files {
            all.extend(file.ranks.iter().map(|rank| (rank, file.host.as_deref())));
        }
        all.sort_by_key(|(rank, _)| rank.rank);
        all.into_iter()
    }

    /// A counter, summed over the ranks.
    pub fn counter(&self, name: &str) -> u64 {
        let of = |(rank, _): (&Rank, _)| rank.counters.get(name).copied().unwrap_or(0);
        self.ranks().map(of).fold(0, u64::saturating_add)
    }

    /// What a reader should know.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if let Some(file) = self.files.iter().find(|file| file.schema < 3) {
            notes.push(format!(
                "{}: version {} has written counters only: no calls, rates and pairs",
                file.path.display(),
                file.version
            ));
        }
        if self
            .files
            .iter()
            .any(|file| file.schema >= 3 && file.job.is_none())
        {
            notes.push("ANABRANCH_STATS_DETAILS=off was set: there are counters only".into());
        }
        if self.files.iter().any(|file| file.simulated) {
            notes.push("times are those of a simulated node: they tell little of host code, and nothing of a real GPU".into());
        }
        let versions: Vec<&str> = self.versions();
        if versions.len() > 1 {
            notes.push(format!(
                "the ranks had different versions of the library: {}",
                versions.join(", ")
            ));
        }
        let there: Vec<u32> = self.ranks().map(|(rank, _)| rank.rank).collect();
        let size = self.files.first().and_then(|file| file.size).unwrap_or(0);
        let missing = (0..size).filter(|rank| there.binary_search(rank).is_err());
        if let Some(list) = listed(missing) {
            notes.push(format!("no file has rank {list}: name the files of all nodes; ranks that run without the library have none"));
        }
        // Without a job's identity nothing of this was wanted (ANABRANCH_STATS_DETAILS=off).
        let are_new = self.files.iter().filter(|file| file.job.is_some());
        let mut silent: Vec<u32> = are_new
            .flat_map(|file| &file.ranks)
            .filter(|rank| rank.run_ns.is_none())
            .map(|rank| rank.rank)
            .collect();
        silent.sort_unstable();
        if let Some(list) = listed(silent.into_iter()) {
            notes.push(format!("rank {list} has not got to MPI_Finalize, or found no memory for it: its calls and messages are missing"));
        }
        let folded = self.ranks().filter(|(rank, _)| rank.pairs_others.is_some());
        if let Some(list) = listed(folded.map(|(rank, _)| rank.rank)) {
            notes.push(format!("rank {list} has dealt with more than 4096 others: those beyond are not among the pairs"));
        }
        let is_unknown = self
            .ranks()
            .filter(|(rank, _)| rank.pairs_unknown.is_some());
        if let Some(list) = listed(is_unknown.map(|(rank, _)| rank.rank)) {
            notes.push(format!("rank {list} has sent or received on communicators that the library does not know: these messages are not among the pairs"));
        }
        notes
    }

    /// Versions of the library, each once.
    pub fn versions(&self) -> Vec<&str> {
        let mut versions: Vec<&str> = self.files.iter().map(|file| &*file.version).collect();
        versions.sort_unstable();
        versions.dedup();
        versions
    }

    /// Hosts, each once.
    pub fn hosts(&self) -> Vec<&str> {
        let hosts = self.files.iter().filter_map(|file| file.host.as_deref());
        let mut hosts: Vec<&str> = hosts.collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    /// Messages from rank to rank. Of those that both ends have counted, each is there once.
    pub fn pairs(&self) -> Vec<Between> {
        let mut ends: BTreeMap<(u32, u32), (Seen, Seen)> = BTreeMap::new();
        for (rank, _) in self.ranks() {
            for pair in &rank.pairs {
                let Side { received, sent } = &pair.side;
                if !received.is_empty() {
                    let ends = ends.entry((pair.rank, rank.rank)).or_default();
                    ends.1 = Seen::of(received);
                }
                if !sent.is_empty() {
                    let ends = ends.entry((rank.rank, pair.rank)).or_default();
                    ends.0 = Seen::of(sent);
                }
            }
        }
        let between = ends.into_iter().map(|((from, to), (sent, received))| {
            let own = larger(sent.own, received.own);
            let by_mpi = larger(sent.by_mpi, received.by_mpi);
            let both = Sum::of([own, by_mpi].iter());
            Between {
                from,
                to,
                messages: both.messages,
                bytes: both.bytes,
                bytes_by_mpi: by_mpi.bytes,
            }
        });
        between.collect()
    }
}

/// Messages from one rank to another.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Between {
    pub from: u32,
    pub to: u32,
    pub messages: u64,
    pub bytes: u64,
    /// Of these, what the MPI library carried.
    pub bytes_by_mpi: u64,
}

/// What one end has counted.
#[derive(Clone, Copy, Default)]
struct Seen {
    /// By the library's own ways. Both ends count the same messages.
    own: Sum,
    /// By the MPI library. An end counts those in its own device memory.
    by_mpi: Sum,
}

impl Seen {
    fn of(sums: &BTreeMap<String, Sum>) -> Seen {
        let is_by_mpi = |name: &str| ["bcopy", "native"].contains(&name);
        let of = |wanted: bool| {
            let sums = sums.iter().filter(|(name, _)| is_by_mpi(name) == wanted);
            Sum::of(sums.map(|(_, sum)| sum))
        };
        Seen {
            own: of(false),
            by_mpi: of(true),
        }
    }
}

/// One end may lack the file, or has its buffer in host memory.
fn larger(one: Sum, other: Sum) -> Sum {
    Sum {
        messages: one.messages.max(other.messages),
        bytes: one.bytes.max(other.bytes),
    }
}

/// The first few of many numbers; `None` if there are none.
fn listed(mut numbers: impl Iterator<Item = u32>) -> Option<String> {
    const FIRST: usize = 8;
    let first: Vec<String> = numbers
        .by_ref()
        .take(FIRST)
        .map(|it| it.to_string())
        .collect();
    let more = match numbers.count() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    (!first.is_empty()).then(|| first.join(", ") + &more)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_cut() {
        assert_eq!(listed(std::iter::empty()), None);
        assert_eq!(listed(3..5).as_deref(), Some("3, 4"));
        assert_eq!(
            listed(0..10).as_deref(),
            Some("0, 1, 2, 3, 4, 5, 6, 7 and 2 more")
        );
    }
}
