//! What goes wrong with messages, as the user reads it: one line that names the ranks, the path and the
//! reason.
//!
//! Level `warn`, which is shown by default, is for a message that still arrives, by another path or another
//! attempt. Level `error` is for a message that is lost, and level `info` for effects of a busy machine. A
//! line that repeats is written once, while the counters go on counting.

use std::collections::HashSet;
use std::ffi::c_int;
use std::fmt::{self, Display};

use parking_lot::Mutex;

use crate::cuda::Error;
use crate::node::StagedPartError;
use crate::stats::{self, Counter};

/// The path that a message was on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Path {
    /// From the sender's device memory to the receiver's.
    Direct,
    /// By several paths at once (multipath).
    Multipath,
    /// Through the sender's pipeline in host memory.
    HostPipeline,
    /// Through the sender's pipeline in memory of its GPU.
    GpuPipeline,
    /// Through a cell of the sender, before the receiver has come.
    Eager,
    /// As an MPI message, through host memory.
    Bcopy,
    /// The MPI message that carries the RTS.
    Rts,
    /// Any path, while its checksums are taken.
    Checksums,
}

impl Path {
    fn name(self) -> &'static str {
        match self {
            Path::Direct => "direct",
            Path::Multipath => "multipath",
            Path::HostPipeline => "host pipeline",
            Path::GpuPipeline => "GPU pipeline",
            Path::Eager => "eager cell",
            Path::Bcopy => "bcopy",
            Path::Rts => "RTS",
            Path::Checksums => "checksums",
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
    ToLocal(c_int),
    /// From such a rank.
    FromLocal(c_int),
    /// From a rank that only the MPI library knows.
    FromAny,
}

impl Of {
    /// The rank in MPI_COMM_WORLD, if it is known.
    pub fn rank(self) -> Option<u32> {
        match self {
            Of::To(rank) | Of::From(rank) => Some(rank),
            Of::ToLocal(_) | Of::FromLocal(_) | Of::FromAny => None,
        }
    }
}

impl Display for Of {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Of::To(rank) => write!(out, "to rank {rank}"),
            Of::From(rank) => write!(out, "from rank {rank}"),
            Of::ToLocal(rank) => write!(out, "to rank {rank} of its communicator"),
            Of::FromLocal(rank) => write!(out, "from rank {rank} of its communicator"),
            Of::FromAny => out.write_str("from any rank"),
        }
    }
}

/// Why one of the paths of a multipath message is not used any more.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    /// A driver call.
    #[error(transparent)]
    Driver(#[from] Error),
    /// The shared state of a staged part.
    #[error(transparent)]
    StagedPart(#[from] StagedPartError),
    /// Another reason, as the user reads it.
    #[error("{0}")]
    Told(&'static str),
}

/// Attempts of one step of a transfer that has no simpler path, the first included.
pub const ATTEMPTS: u32 = 4;

/// Different lines that are written, at most.
const LINES_MAX: usize = 256;

#[derive(Default)]
struct Said {
    lines: HashSet<(Of, Path, String)>,
    /// Ranks that have died. Nothing is said of other faults with them.
    dead: HashSet<u32>,
}

static SAID: Mutex<Option<Said>> = Mutex::new(None);

/// A message goes on by another path, or by another attempt (`remedy`).
pub fn survived(of: Of, path: Path, why: &dyn Display, remedy: &str) {
    say(log::Level::Warn, of, path, why, remedy);
}

/// A rank whose turn it was in a message has not had a processor for too long. That is no fault: the message
/// goes on by another path (`remedy`).
pub fn late(of: Of, path: Path, why: &dyn Display, remedy: &str) {
    stats::add(Counter::SendersLate, 1);
    say(log::Level::Info, of, path, why, remedy);
}

/// A step of a message has failed, and is tried again.
pub fn tried_again(of: Of, path: Path, why: &dyn Display) {
    stats::add(Counter::Retries, 1);
    survived(of, path, why, "tried again");
}

/// A message is lost. Returns what its error handler is told.
pub fn lost(of: Of, path: Path, why: &dyn Display) -> Box<str> {
    say(log::Level::Error, of, path, why, "the message is lost");
    text(of, path, why)
}

/// What an error handler is told of a lost message.
pub fn text(of: Of, path: Path, why: &dyn Display) -> Box<str> {
    line(of, path, &why.to_string(), "the message is lost").into()
}

/// The rank at a message's other end has died. That is said once for each rank; other messages with it are
/// only counted. Returns what the message's error handler is told, if it is lost.
pub fn died(of: Of, path: Path, is_lost: bool) -> Box<str> {
    let why = match of {
        Of::To(_) | Of::ToLocal(_) => "the receiver has died",
        _ => "the sender has died",
    };
    let (level, end) = if is_lost {
        (log::Level::Error, "the message is lost")
    } else {
        (log::Level::Warn, "the rest is read from its memory")
    };
    let end = format!("{end}, and what else was under way with that rank is only counted");
    say(level, of, path, &why, &end);
    let mut said = SAID.lock();
    let said = said.get_or_insert_with(Said::default);
    said.dead.extend(of.rank());
    text(of, path, &why)
}

/// A call is refused: the message cannot be sent or received. Returns what its error handler is told.
pub fn refused(of: Of, why: &dyn Display) -> Box<str> {
    let end = "the call ends in an error";
    say(log::Level::Error, of, Path::Bcopy, why, end);
    line(of, Path::Bcopy, &why.to_string(), end).into()
}

#[cold]
fn say(level: log::Level, of: Of, path: Path, why: &dyn Display, end: &str) {
    let why = why.to_string();
    let is_new = {
        let mut said = SAID.lock();
        let said = said.get_or_insert_with(Said::default);
        let is_dead = of.rank().is_some_and(|rank| said.dead.contains(&rank));
        !is_dead
            && said.lines.len() < LINES_MAX
            && said.lines.insert((of, path, format!("{why}; {end}")))
    };
    if is_new {
        log::log!(level, "{}", line(of, path, &why, end));
    }
}

fn line(of: Of, path: Path, why: &str, end: &str) -> String {
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
                Path::HostPipeline,
                "its ring is corrupt",
                "the message is lost"
            ),
            "message from rank 3, host pipeline path: its ring is corrupt; the message is lost"
        );
    }
}
