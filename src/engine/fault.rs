//! What goes wrong with messages, as the user reads it: one line that names the ranks, the path and the reason.
//!
//! At level `warn`, which is shown by default, a message that arrives all the same, another way or by another attempt;
//! at level `error` one that is lost. What repeats itself is said once; the counters go on counting.

use std::collections::HashSet;
use std::fmt::Display;

use parking_lot::Mutex;

use crate::cuda::Error;
use crate::node::TrackError;
use crate::stats::{self, Counter};

/// The way that a message was on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Path {
    /// From the sender's device memory to the receiver's.
    Direct,
    /// By several paths at once.
    Several,
    /// Through the sender's ring in host memory.
    HostRing,
    /// Through a cell of the sender's, before the receiver has come.
    Eager,
    /// As an MPI message, through host memory.
    Value,
    /// As an MPI message that stands for the payload.
    Descriptor,
}

impl Path {
    fn name(self) -> &'static str {
        match self {
            Path::Direct => "direct",
            Path::Several => "several paths",
            Path::HostRing => "host ring",
            Path::Eager => "eager cell",
            Path::Value => "by value",
            Path::Descriptor => "descriptor",
        }
    }
}

/// Which message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Of {
    /// To a rank of MPI_COMM_WORLD.
    To(u32),
    /// From a rank of MPI_COMM_WORLD.
    From(u32),
    /// To a rank of a communicator that has no identity.
    Sent,
    /// From a rank that the MPI library knows.
    Received,
}

/// Why one of several paths is not used any more.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    /// A driver call.
    #[error(transparent)]
    Driver(#[from] Error),
    /// What the two sides share about it.
    #[error(transparent)]
    Track(#[from] TrackError),
    /// Another reason, as the user reads it.
    #[error("{0}")]
    Told(&'static str),
}

/// Attempts of one step of a transfer that has no simpler path, the first included.
pub const ATTEMPTS: u32 = 4;

/// Different lines that are written, at most.
const LINES_MAX: usize = 256;

static SAID: Mutex<Option<HashSet<(Of, Path, String)>>> = Mutex::new(None);

/// A message goes on another way, or by another attempt (`remedy`).
pub fn survived(of: Of, path: Path, why: &dyn Display, remedy: &str) {
    say(log::Level::Warn, of, path, why, remedy);
}

/// A step of a message has failed, and is tried again.
pub fn tried_again(of: Of, path: Path, why: &dyn Display) {
    stats::add(Counter::Retries, 1);
    survived(of, path, why, "tried again");
}

/// A message is lost.
pub fn lost(of: Of, path: Path, why: &dyn Display) {
    say(log::Level::Error, of, path, why, "the message is lost");
}

#[cold]
fn say(level: log::Level, of: Of, path: Path, why: &dyn Display, end: &str) {
    let why = why.to_string();
    let is_new = {
        let mut said = SAID.lock();
        let said = said.get_or_insert_with(HashSet::new);
        said.len() < LINES_MAX && said.insert((of, path, format!("{why}; {end}")))
    };
    if is_new {
        log::log!(level, "{}", line(of, path, &why, end));
    }
}

fn line(of: Of, path: Path, why: &str, end: &str) -> String {
    let of = match of {
        Of::To(rank) => format!("to rank {rank}"),
        Of::From(rank) => format!("from rank {rank}"),
        Of::Sent => "that is sent".to_owned(),
        Of::Received => "that is received".to_owned(),
    };
    format!("message {of}, {} path: {why}; {end}", path.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_peer_path_reason_and_what_follows() {
        assert_eq!(
            line(
                Of::From(3),
                Path::HostRing,
                "its ring is corrupt",
                "the message is lost"
            ),
            "message from rank 3, host ring path: its ring is corrupt; the message is lost"
        );
    }
}
