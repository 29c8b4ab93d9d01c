//! The `ANABRANCH_*` environment variables: one table from which come the typed [`Config`], its
//! reading from the environment, the printed list of `anabranch config` and the detection of
//! misspelt names.
//!
//! To add an option, add one row to the `options!` call below.

mod former;
mod kinds;
mod nearest;
mod paths;

pub use kinds::{
    format_size, parse_size, Choice, Count, File, Keep, Kind, MpiCuda, Name, Size, Statistics,
    Switch, KEEP, LOG_LEVELS, MPI_CUDA,
};
pub use nearest::nearest;
pub use paths::{ExecutorChoice, Owner, PathList, Paths, EXECUTORS, ORDERS, OWNERS};

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use crate::stats::StatsTarget;

/// Every variable of this library starts with these letters.
pub const PREFIX: &str = "ANABRANCH";

/// What an option is for. `anabranch config` lists options by groups, and those for tests only on request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// Switches the library off and on, and has it say what it does.
    Everyday,
    /// Changes how messages move.
    Tuning,
    /// For the tests of this library.
    Testing,
}

/// One option as it is printed.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Row {
    /// Name of the environment variable.
    pub name: &'static str,
    /// The default, in the notation in which a user would write it.
    pub default: &'static str,
    /// The value in effect, in the same notation.
    pub effective: String,
    /// What the variable accepts.
    pub accepts: String,
    /// What the option does.
    pub doc: &'static str,
    /// What the option is for.
    pub group: Group,
}

/// A variable that was not understood. Its text is one line that names the variable, what is
/// accepted and what was used instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning(String);

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

macro_rules! options {
    ($( $field:ident : $type:ty = $kind:expr, $name:literal, $default:literal, $group:ident, $doc:literal; )*) => {
        /// The effective options of this process.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Config {
            $( #[doc = concat!("`", $name, "`, default `", $default, "`: ", $doc)] pub $field: $type, )*
        }

        /// The names of all options, in the order of the table.
        pub const NAMES: &[&str] = &[$( $name ),*];

        impl Default for Config {
            fn default() -> Self {
                Config::from_lookup(|_| None).0
            }
        }

        impl Config {
            /// Reads every option through `look_up`, which answers with the value of a variable.
            /// A value that is not accepted gives a warning and the default.
            pub fn from_lookup(look_up: impl Fn(&str) -> Option<OsString>) -> (Config, Vec<Warning>) {
                let look_up = |name: &str| former::look_up(name, &look_up);
                let (mut config, mut warnings) = Config::unsettled(&look_up);
                let (defaults, _) = Config::unsettled(&|_| None);
                let is_named = |name| look_up(name).is_some_and(|value| !value.is_empty());
                warnings.extend(config.settle(&defaults, is_named("ANABRANCH_PATHS")));
                if !is_named("ANABRANCH_MULTIPATH_STAGING") {
                    config.multipath_staging = default_multipath_staging(config.owner);
                }
                (config, warnings)
            }

            /// Each option by itself.
            fn unsettled(look_up: &dyn Fn(&str) -> Option<OsString>) -> (Config, Vec<Warning>) {
                let mut warnings = Vec::new();
                let config = Config {
                    $( $field: read(&$kind, $name, $default, look_up($name), &mut warnings), )*
                };
                (config, warnings)
            }

            /// The table with the effective values, those for tests included.
            pub fn rows(&self) -> Vec<Row> {
                vec![$( Row {
                    name: $name,
                    default: $default,
                    effective: Kind::show(&$kind, &self.$field),
                    accepts: Kind::accepts(&$kind),
                    doc: $doc,
                    group: Group::$group,
                } ),*]
            }
        }
    };
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

options! {
    enabled: bool = Switch, "ANABRANCH", "on", Everyday,
        "off: every call goes to the MPI library untouched, and nothing is printed";
    stats: StatsTarget = Statistics, "ANABRANCH_STATS", "off", Everyday,
        "write one summary at MPI_Finalize: 1 as text to stderr, or a file name for JSON, which `anabranch report` reads: %r in it is the lowest rank of the node";
    stats_details: bool = Switch, "ANABRANCH_STATS_DETAILS", "on", Everyday,
        "off: the file of ANABRANCH_STATS has counters only, which cost next to nothing, and no calls, rates and pairs";
    trace: Option<PathBuf> = File, "ANABRANCH_TRACE", "", Everyday,
        "record calls and messages into a file of each rank, which `anabranch trace` reads: %r in its name is the rank, %h the host";
    nvtx: bool = Switch, "ANABRANCH_NVTX", "off", Everyday,
        "on: each message is a range of NVTX in the domain Anabranch, which Nsight Systems shows";
    log: log::LevelFilter = Choice(LOG_LEVELS), "ANABRANCH_LOG", "warn", Everyday,
        "how much the library reports on stderr: error is a message that was lost, warn what went wrong and was made good, or keeps this rank from taking part; a healthy run reports neither";
    mpi_cuda: MpiCuda = Choice(MPI_CUDA), "ANABRANCH_MPI_CUDA", "auto", Tuning,
        "whether the MPI library may be handed device pointers; auto asks it";
    threshold: u64 = Size { min: 0, max: 1 << 40 }, "ANABRANCH_THRESHOLD", "0", Tuning,
        "messages on device buffers of less than this size go by value, copied to host memory first";
    eager: u64 = Size { min: 0, max: 64 * MIB }, "ANABRANCH_EAGER", "16K", Tuning,
        "a standard send of up to this size completes once its payload is in host memory, without waiting for the receiver";
    staging: u64 = Size { min: 0, max: 16 * GIB }, "ANABRANCH_STAGING", "8M", Tuning,
        "pinned staging memory of a rank, shared with the ranks of its node";
    chunk: u64 = Size { min: 4 * KIB, max: GIB }, "ANABRANCH_CHUNK", "1M", Tuning,
        "size of the pieces in which a message moves through staging memory";
    landing: u64 = Size { min: 0, max: 64 * GIB }, "ANABRANCH_LANDING", "64M", Tuning,
        "host memory kept for messages that arrive by value in device buffers";
    gpu_pipeline: bool = Switch, "ANABRANCH_GPU_PIPELINE", "on", Tuning,
        "off: messages of 64K and more from memory that CUDA IPC does not cover (pools, mapped memory) go through pinned host memory, not through staging on their sender's GPU, of which a rank takes ANABRANCH_RELAY_STAGING for them";
    vmm: bool = Switch, "ANABRANCH_VMM", "on", Tuning,
        "on: peers map memory that programs have mapped themselves and allocated for file descriptors (frameworks' expandable segments), and read it where it is; off: it goes as other memory that CUDA IPC does not cover";
    mappings: u64 = Size { min: 0, max: 1 << 50 }, "ANABRANCH_MAPPINGS", "16T", Tuning,
        "how much device memory of other ranks stays mapped when unused";
    mapping_count: u32 = Count { min: 1, max: 1 << 20 }, "ANABRANCH_MAPPING_COUNT", "1024", Tuning,
        "how many allocations of other ranks stay mapped when unused";
    slots: u32 = Count { min: 0, max: 1 << 20 }, "ANABRANCH_SLOTS", "1048576", Tuning,
        "how many messages of a rank may be under way at once; beyond that they go by value";
    helper: bool = Switch, "ANABRANCH_HELPER", "on", Tuning,
        "off: no helper thread, so no peer sends this rank anything but plain messages";
    verify: bool = Switch, "ANABRANCH_VERIFY", "off", Everyday,
        "on: checksums of every message that this rank sends from device memory, compared where it has arrived; slow";
    paths: Paths = PathList, "ANABRANCH_PATHS", "direct,relay,host", Tuning,
        "which ways a long message between GPUs may be split over: the links between the two, other GPUs, pinned host memory; direct: never split";
    multipath: u64 = Size { min: 0, max: 1 << 40 }, "ANABRANCH_MULTIPATH", "2M", Tuning,
        "messages of less than this size take one path";
    put: u64 = Size { min: 0, max: 1 << 40 }, "ANABRANCH_PUT", "32M", Tuning,
        "messages of at least this size are written by their sender instead of being read by their receiver, where one goes the other way meanwhile; 0: none, nor any between ranks that share a GPU";
    rtr: bool = Switch, "ANABRANCH_RTR", "on", Tuning,
        "off: no sender is told of a receive before it sends, so that its message is always read by its receiver, or written after it was matched";
    early_match: bool = Switch, "ANABRANCH_EARLY_MATCH", "on", Tuning,
        "off: no message is fetched before the MPI library has brought its RTS, also where a receive is sure to take it";
    relays: u32 = Count { min: 0, max: 8 }, "ANABRANCH_RELAYS", "8", Tuning,
        "over how many other GPUs a message is split at most";
    multipath_staging: u64 = Size { min: 0, max: 16 * GIB }, "ANABRANCH_MULTIPATH_STAGING", "16M", Tuning,
        "pinned memory of a rank for messages that are split over several paths, at most, beside ANABRANCH_STAGING; unless given, 48M with ANABRANCH_OWNER=one";
    relay_staging: u64 = Size { min: MIB, max: 16 * GIB }, "ANABRANCH_RELAY_STAGING", "64M", Tuning,
        "memory that is taken on a GPU for messages that lead over it, at most: 60M for all ranks together; with ANABRANCH_OWNER=one, by each rank that makes such copies";
    chunks: u32 = Count { min: 1, max: 1024 }, "ANABRANCH_CHUNKS", "1024", Tuning,
        "in how many pieces a path's part of a message moves at most; more where staging memory is too small for so long ones: it holds three, in 16M at most";
    launch_order: crate::plan::Order = Choice(ORDERS), "ANABRANCH_LAUNCH_ORDER", "direct-first", Tuning,
        "in what order the copies of a split message are launched, where one rank launches all (ANABRANCH_OWNER=one)";
    model: Option<PathBuf> = File, "ANABRANCH_MODEL", "", Everyday,
        "what `anabranch topo --measure --model FILE` wrote; empty: the one kept for this machine in the user's cache folder";
    keep: Keep = Choice(KEEP), "ANABRANCH_KEEP", "auto", Everyday,
        "whether what ranks measure of their links in passing is kept in the user's cache folder for a week, so that the next run knows it: on, off; auto: on a real node, but not on a simulated one";
    owner: Owner = Choice(OWNERS), "ANABRANCH_OWNER", "two", Tuning,
        "who makes the copies of a split message: two, each rank those of its own GPU; one, a rank that sees all GPUs involved makes all of them";
    executor: ExecutorChoice = Choice(EXECUTORS), "ANABRANCH_EXECUTOR", "auto", Tuning,
        "how the copies of a split message are launched; auto takes what costs least by measurement. With ANABRANCH_OWNER=two it is streams, as each chunk is launched once the other rank has handed it over";
    graphs: u32 = Count { min: 0, max: 1024 }, "ANABRANCH_GRAPHS", "32", Tuning,
        "how many CUDA graphs of split messages are kept, where one rank launches all (ANABRANCH_OWNER=one); 0: none is made";
    library: Option<PathBuf> = File, "ANABRANCH_LIBRARY", "", Everyday,
        "libanabranch.so for `anabranch exec` and `run`; empty: found beside the command";
    aside: bool = Switch, "ANABRANCH_ASIDE", "off", Testing,
        "on: messages are the MPI library's from the start; calls are timed for ANABRANCH_STATS all the same (`anabranch run --ab`)";
    trace_by_machine: bool = Switch, "ANABRANCH_TRACE_BY_MACHINE", "off", Testing,
        "times of a trace are by the machine's clock, also on a simulated node, whose ranks have clocks of their own";
    patience_us: u32 = Count { min: 0, max: 1 << 31 }, "ANABRANCH_PATIENCE_US", "500000", Testing,
        "how long a sender may do nothing about the parts of a message that it has begun with, once all else is there, before its receiver pulls them itself";
    inject_panic: Option<String> = Name, "ANABRANCH_INJECT_PANIC", "", Testing,
        "name of an MPI function whose wrapper panics when it is called";
}

/// A rank's own part needs no more than 16 MiB: with 48 MiB windows of 64 of 32 MiB both ways had 0.86 of the
/// speed without the library in their first 20 iterations on two H200s, as each block is pinned when it is
/// first needed, with 16 MiB 1.07, and all else the same (`docs/decisions/host-staging-ahead.md`). A rank
/// that drives all copies has the staging of all of them.
fn default_multipath_staging(owner: Owner) -> u64 {
    match owner {
        Owner::Two => 16 * MIB,
        Owner::One => 48 * MIB,
    }
}

impl Config {
    /// Options that contradict each other, or have no effect beside another, get their defaults back. The paths contradict
    /// others only where they are named.
    fn settle(&mut self, defaults: &Config, paths_are_named: bool) -> Vec<Warning> {
        let mut told = Vec::new();
        let mut contradict = |one: &str, other: &str, why: &str| {
            told.push(Warning(format!(
                "{one} and {other} contradict each other: {why}; using the default of both"
            )));
        };
        let over_relays_only = !self.paths.direct && !self.paths.host;
        if over_relays_only && self.relays == 0 {
            contradict(
                "ANABRANCH_PATHS=relay",
                "ANABRANCH_RELAYS=0",
                "no path is left",
            );
            (self.paths, self.relays) = (defaults.paths, defaults.relays);
        }
        if self.paths.host && paths_are_named && self.multipath_staging == 0 {
            contradict(
                &format!("ANABRANCH_PATHS={}", Kind::show(&PathList, &self.paths)),
                "ANABRANCH_MULTIPATH_STAGING=0",
                "the path through host memory has none",
            );
            (self.paths, self.multipath_staging) = (defaults.paths, defaults.multipath_staging);
        }
        if self.executor == ExecutorChoice::Graph && self.graphs == 0 {
            contradict(
                "ANABRANCH_EXECUTOR=graph",
                "ANABRANCH_GRAPHS=0",
                "no graph may be made",
            );
            (self.executor, self.graphs) = (defaults.executor, defaults.graphs);
        }
        told.extend(self.drop_idle(defaults));
        told
    }

    /// Options that have no effect beside another get their defaults back.
    fn drop_idle(&mut self, defaults: &Config) -> Vec<Warning> {
        let is_direct = self.paths.is_direct_only();
        let is_own = self.owner == Owner::Two;
        let mut told = Vec::new();
        let mut tell = |name: &str| {
            told.push(Warning(if is_direct {
                format!("ANABRANCH_{name} has no effect with ANABRANCH_PATHS=direct, by which no message is split: take one of them away; using its default")
            } else if name == "EXECUTOR" {
                "ANABRANCH_EXECUTOR=batch and =graph launch copies that one rank makes; between two ranks each chunk is handed over once it is there, and launched on a stream: set ANABRANCH_OWNER=one, too, or take it away; using its default".into()
            } else {
                format!("ANABRANCH_{name} has no effect unless one rank makes all copies of a message: set ANABRANCH_OWNER=one, too, or take it away; using its default")
            }));
        };
        if is_direct && self.relays != defaults.relays {
            tell("RELAYS");
            self.relays = defaults.relays;
        }
        if is_direct && !is_own {
            tell("OWNER");
            self.owner = defaults.owner;
        }
        if !is_direct && !is_own {
            return told;
        }
        let is_right = !is_direct && self.executor == ExecutorChoice::Streams;
        if self.executor != defaults.executor && !is_right {
            tell("EXECUTOR");
            self.executor = defaults.executor;
        }
        if self.launch_order != defaults.launch_order {
            tell("LAUNCH_ORDER");
            self.launch_order = defaults.launch_order;
        }
        if self.graphs != defaults.graphs {
            tell("GRAPHS");
            self.graphs = defaults.graphs;
        }
        told
    }

    /// Reads the options of this process, and warns of values that are not accepted and of
    /// `ANABRANCH_*` names that do not exist.
    pub fn from_env() -> (Config, Vec<Warning>) {
        let (config, mut warnings) = Config::from_lookup(|name| std::env::var_os(name));
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        warnings.extend(unknown_names(names));
        (config, warnings)
    }
}

/// What to say once a job of options that are set by their former names.
pub fn notice() -> Option<String> {
    former::notice(|name| std::env::var_os(name))
}

/// One warning for each of `names` that looks like an option of this library and is none.
pub fn unknown_names(names: impl Iterator<Item = String>) -> Vec<Warning> {
    let mut unknown: Vec<String> = names
        .filter(|name| is_ours(name) && !NAMES.contains(&name.as_str()) && !former::is_known(name))
        .collect();
    unknown.sort();
    unknown
        .into_iter()
        .map(|name| Warning(describe_unknown(&name)))
        .collect()
}

/// Whether a variable claims to be one of ours: the prefix alone or followed by an underscore,
/// in any case.
fn is_ours(name: &str) -> bool {
    let upper = name.to_ascii_uppercase();
    upper
        .strip_prefix(PREFIX)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
}

fn describe_unknown(name: &str) -> String {
    match nearest_option(name) {
        Some(known) => {
            format!("{name} is not an option: did you mean {known}? (`anabranch config` lists all)")
        }
        None => format!("{name} is not an option and has no effect (`anabranch config` lists all)"),
    }
}

/// The option whose name is closest to `name`, if one is close enough to be meant.
fn nearest_option(name: &str) -> Option<&'static str> {
    fn key(full: &str) -> &str {
        full[PREFIX.len()..].trim_start_matches('_')
    }
    let found = nearest(key(name), NAMES.iter().map(|known| key(known)))?;
    NAMES.iter().copied().find(|known| key(known) == found)
}

fn read<K: Kind>(
    kind: &K,
    name: &str,
    default: &str,
    value: Option<OsString>,
    warnings: &mut Vec<Warning>,
) -> K::Value {
    let fallback = || {
        kind.parse(default)
            .unwrap_or_else(|| unreachable!("the default of {name} is accepted (tested)"))
    };
    // Batch scripts clear a variable by setting it to nothing.
    let Some(value) = value.filter(|value| !value.is_empty()) else {
        return fallback();
    };
    if let Some(parsed) = value.to_str().and_then(|text| kind.parse(text.trim())) {
        return parsed;
    }
    let shown = value.to_string_lossy().escape_debug().to_string();
    warnings.push(Warning(format!(
        "{name}={shown} is not understood: it takes {}; using {}",
        kind.accepts(),
        if default.is_empty() {
            "nothing"
        } else {
            default
        },
    )));
    fallback()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn with(pairs: &[(&str, &str)]) -> (Config, Vec<String>) {
        let (config, warnings) = Config::from_lookup(|name| {
            pairs
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| OsString::from(value))
        });
        (config, warnings.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn defaults_are_accepted_and_shown_as_written() {
        for row in Config::default().rows() {
            assert_eq!(row.effective, row.default, "{}", row.name);
            assert!(!row.doc.is_empty() && !row.doc.contains('\n'));
        }
    }

    #[test]
    fn names_are_unique_and_prefixed() {
        assert_eq!(NAMES.iter().collect::<HashSet<_>>().len(), NAMES.len());
        assert!(NAMES.iter().all(|name| is_ours(name)));
    }

    #[test]
    fn values_are_read() {
        let (config, warnings) = with(&[
            ("ANABRANCH", "off"),
            ("ANABRANCH_EAGER", "1M"),
            ("ANABRANCH_MPI_CUDA", "no"),
            ("ANABRANCH_STATS", "/tmp/s.json"),
            ("ANABRANCH_LOG", "debug"),
            ("ANABRANCH_SLOTS", ""),
        ]);
        assert!(warnings.is_empty(), "{warnings:?}");
        assert!(!config.enabled);
        assert_eq!(config.eager, 1048576);
        assert_eq!(config.mpi_cuda, MpiCuda::No);
        assert_eq!(config.stats, StatsTarget::File("/tmp/s.json".into()));
        assert_eq!(config.log, log::LevelFilter::Debug);
        assert_eq!(config.slots, 1048576);
    }

    #[test]
    fn a_bad_value_names_variable_value_choice_and_default() {
        let (config, warnings) = with(&[("ANABRANCH_EAGER", "lots"), ("ANABRANCH_CHUNK", "0")]);
        assert_eq!(config, Config::default());
        assert_eq!(warnings.len(), 2);
        for part in ["ANABRANCH_EAGER=lots", "64M", "using 16K"] {
            assert!(warnings[0].contains(part), "{}", warnings[0]);
        }
        assert!(warnings[1].contains("from 4K to 1G"), "{}", warnings[1]);
    }

    #[test]
    fn contradictions_are_named_and_give_the_defaults() {
        let (config, warnings) = with(&[("ANABRANCH_PATHS", "relay"), ("ANABRANCH_RELAYS", "0")]);
        assert_eq!(config, Config::default());
        assert_eq!(warnings.len(), 1);
        for part in ["ANABRANCH_PATHS=relay", "ANABRANCH_RELAYS=0", "no path"] {
            assert!(warnings[0].contains(part), "{}", warnings[0]);
        }
        let (config, warnings) = with(&[
            ("ANABRANCH_PATHS", "direct,host"),
            ("ANABRANCH_RELAYS", "0"),
        ]);
        assert!(warnings.is_empty() && !config.paths.relay && config.relays == 0);
        let names_in = |pairs: &[(&str, &str)]| {
            let (config, warnings) = with(pairs);
            assert_eq!(config, Config::default(), "{pairs:?}");
            let lines: Vec<String> = warnings;
            assert_eq!(
                lines.iter().filter(|line| line.contains("using")).count(),
                lines.len()
            );
            lines
        };
        for pair in [
            [
                ("ANABRANCH_PATHS", "host"),
                ("ANABRANCH_MULTIPATH_STAGING", "0"),
            ],
            [
                ("ANABRANCH_PATHS", "direct,host"),
                ("ANABRANCH_MULTIPATH_STAGING", "0"),
            ],
            [("ANABRANCH_EXECUTOR", "graph"), ("ANABRANCH_GRAPHS", "0")],
        ] {
            let lines = names_in(&pair);
            assert_eq!(lines.len(), 1, "{lines:?}");
            let both = pair.map(|(name, value)| format!("{name}={value}"));
            assert!(both.iter().all(|name| lines[0].contains(name)), "{lines:?}");
        }
        for alone in [
            ("ANABRANCH_EXECUTOR", "batch"),
            ("ANABRANCH_EXECUTOR", "graph"),
            ("ANABRANCH_LAUNCH_ORDER", "round-robin"),
            ("ANABRANCH_GRAPHS", "0"),
        ] {
            let lines = names_in(&[alone]);
            assert!(lines.len() == 1 && lines[0].contains(alone.0), "{lines:?}");
            assert!(lines[0].contains("ANABRANCH_OWNER=one"), "{lines:?}");
            let (_, lines) = with(&[alone, ("ANABRANCH_OWNER", "one")]);
            assert!(lines.is_empty(), "{lines:?}");
        }
        let (config, lines) = with(&[
            ("ANABRANCH_PATHS", "direct"),
            ("ANABRANCH_RELAYS", "1"),
            ("ANABRANCH_OWNER", "one"),
            ("ANABRANCH_EXECUTOR", "graph"),
        ]);
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(
            lines
                .iter()
                .all(|line| line.contains("ANABRANCH_PATHS=direct")),
            "{lines:?}"
        );
        assert_eq!(
            (config.relays, config.owner),
            (crate::plan::MAX_PATHS as u32, Owner::Two)
        );
        // Without memory for it the path through the host is left out, if nobody has asked for it.
        let (config, lines) = with(&[("ANABRANCH_MULTIPATH_STAGING", "0")]);
        assert!(
            lines.is_empty() && config.multipath_staging == 0,
            "{lines:?}"
        );
        for bad in ["direct,nvlink", "none", ",", "direct,-relay"] {
            let (config, warnings) = with(&[("ANABRANCH_PATHS", bad)]);
            assert_eq!(config.paths, Paths::ALL, "{bad}");
            assert!(
                warnings.len() == 1 && warnings[0].contains("using direct,relay,host"),
                "{warnings:?}"
            );
        }
    }

    #[test]
    fn two_owners_launch_on_streams() {
        let (config, lines) = with(&[("ANABRANCH_EXECUTOR", "streams")]);
        assert_eq!(config.executor, ExecutorChoice::Streams);
        assert!(lines.is_empty(), "{lines:?}");
    }

    #[test]
    fn a_warning_stays_one_line() {
        let (_, warnings) = with(&[("ANABRANCH_HELPER", "a\nb\u{1b}[2J")]);
        assert!(
            !warnings[0].contains('\n') && !warnings[0].contains('\u{1b}'),
            "{}",
            warnings[0]
        );
    }

    #[test]
    fn misspelt_names_get_a_suggestion() {
        let names = [
            "ANABRANCH_EAGRE",
            "anabranch_stats",
            "ANABRANCH_COLOUR",
            "ANABRANCHES",
            "PATH",
            "ANABRANCH_LOG",
        ];
        let warnings = unknown_names(names.iter().map(ToString::to_string));
        let texts: Vec<String> = warnings.iter().map(ToString::to_string).collect();
        assert_eq!(texts.len(), 3, "{texts:?}");
        assert!(
            texts[0].contains("ANABRANCH_COLOUR is not an option and has no effect"),
            "{texts:?}"
        );
        assert!(
            texts[1].contains("did you mean ANABRANCH_EAGER?"),
            "{texts:?}"
        );
        assert!(
            texts[2].contains("did you mean ANABRANCH_STATS?"),
            "{texts:?}"
        );
    }

    #[test]
    fn every_effective_value_can_be_fed_back() {
        let (config, _) = with(&[
            ("ANABRANCH_STATS", "1"),
            ("ANABRANCH_LOG", "trace"),
            ("ANABRANCH_CHUNK", "65537"),
            ("ANABRANCH_LIBRARY", "/a b/c.so"),
            ("ANABRANCH_PATHS", "Host relay"),
            ("ANABRANCH_LAUNCH_ORDER", "round-robin"),
            ("ANABRANCH_OWNER", "one"),
            ("ANABRANCH_MODEL", "/m/model.json"),
            ("ANABRANCH_INJECT_PANIC", "MPI_Send"),
        ]);
        let rows = config.rows();
        let (again, warnings) = Config::from_lookup(|name| {
            rows.iter()
                .find(|row| row.name == name)
                .map(|row| OsString::from(&row.effective))
        });
        assert!(warnings.is_empty());
        assert_eq!(again, config);
    }
}
