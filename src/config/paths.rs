//! Options of messages that are split over several paths.

use super::Kind;
use crate::plan::Order;

/// The kinds of path that a message may be split over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Paths {
    /// The links between the two GPUs.
    pub direct: bool,
    /// Other GPUs.
    pub relay: bool,
    /// Pinned host memory.
    pub host: bool,
}

impl Paths {
    /// All of them.
    pub const ALL: Paths = Paths {
        direct: true,
        relay: true,
        host: true,
    };

    /// Nothing but the direct path: no message is split.
    #[must_use]
    pub fn is_direct_only(&self) -> bool {
        !self.relay && !self.host
    }

    /// Whether all of them are among others.
    #[must_use]
    pub fn are_among(&self, others: &Paths) -> bool {
        (!self.direct || others.direct)
            && (!self.relay || others.relay)
            && (!self.host || others.host)
    }
}

/// A list of paths, separated by commas or blanks.
pub struct PathList;

const NONE: Paths = Paths {
    direct: false,
    relay: false,
    host: false,
};

impl Kind for PathList {
    type Value = Paths;
    fn parse(&self, text: &str) -> Option<Paths> {
        let words = text.split([',', ' ']).filter(|word| !word.is_empty());
        let paths = words.into_iter().try_fold(NONE, |mut paths, word| {
            match word.to_ascii_lowercase().as_str() {
                "direct" => paths.direct = true,
                "relay" => paths.relay = true,
                "host" => paths.host = true,
                _ => return None,
            }
            Some(paths)
        })?;
        (paths != NONE).then_some(paths)
    }
    fn accepts(&self) -> String {
        "a list out of direct, relay, host".into()
    }
    fn show(&self, value: &Paths) -> String {
        let words = [
            (value.direct, "direct"),
            (value.relay, "relay"),
            (value.host, "host"),
        ];
        let words = words.iter().filter(|(is_in, _)| *is_in);
        words.map(|(_, word)| *word).collect::<Vec<_>>().join(",")
    }
}

/// Who makes the copies of a message that is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// Each rank those of its own GPU.
    Two,
    /// One rank all of them.
    One,
}

/// The words for [`Owner`].
pub const OWNERS: &[(&str, Owner)] = &[("two", Owner::Two), ("one", Owner::One)];

/// How the copies of a message that is split are launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecutorChoice {
    /// By what costs least.
    Auto,
    /// One by one, on streams.
    Streams,
    /// In batches.
    Batch,
    /// As a CUDA graph.
    Graph,
}

/// The words for [`ExecutorChoice`].
pub const EXECUTORS: &[(&str, ExecutorChoice)] = &[
    ("auto", ExecutorChoice::Auto),
    ("streams", ExecutorChoice::Streams),
    ("batch", ExecutorChoice::Batch),
    ("graph", ExecutorChoice::Graph),
];

/// The words for [`Order`].
pub const ORDERS: &[(&str, Order)] = &[
    ("direct-first", Order::DirectFirst),
    ("round-robin", Order::RoundRobin),
    ("path-by-path", Order::PathByPath),
];
