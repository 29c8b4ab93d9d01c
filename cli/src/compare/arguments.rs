//! The options of `anabranch compare`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::ArgPredicate;
use clap::{Args, ValueEnum};

use super::settings::{self, Variables};
use crate::bench::buffer::Place;
use crate::bench::memory::Memory;
use crate::bench::sizes::{self, Sizes};
use crate::bench::Kind;
use crate::json::Json;

/// As many sizes as a first look takes less than a minute for.
const USUAL_SIZES: &str = "8,1K,16K,256K,4M,64M";
/// The same on a simulated node, whose copies this machine's processors make.
const SIM_SIZES: &str = "8,1K,16K,256K,4M";
/// What a comparison may take of which neither rounds nor time are given, s.
const USUAL_BUDGET: u64 = 45;

/// What can be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Bench {
    /// Rank 0 sends a window of messages to rank 1
    Bw,
    /// Both ranks send a window of messages at once
    Bibw,
    /// Half the time of a round trip
    Latency,
    /// As bw, by all pairs of ranks at once
    MbwMr,
    /// Every rank sends a window to the next one
    Ring,
    /// Every rank sends a window to every other
    AllToAll,
    /// The same, with rank 0 first
    AllByNumber,
    /// An iteration of the bundled solver
    Jacobi,
}

impl Bench {
    /// The pattern of messages, where it is one.
    pub fn kind(self) -> Option<Kind> {
        match self {
            Bench::Bw => Some(Kind::Bw),
            Bench::Bibw => Some(Kind::Bibw),
            Bench::Latency => Some(Kind::Latency),
            Bench::MbwMr => Some(Kind::MbwMr),
            Bench::Ring => Some(Kind::Ring),
            Bench::AllToAll => Some(Kind::AllToAll),
            Bench::AllByNumber => Some(Kind::AllByNumber),
            Bench::Jacobi => None,
        }
    }
}

/// How messages are sent and received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RequestKind {
    /// A request for each message
    Fresh,
    /// Persistent requests, made once for each row
    Persistent,
}

/// Measurements that go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Suite {
    /// What users measure first, as they do: each benchmark in a launch of its own, sizes upwards, its first
    /// messages included, few iterations, persistent requests too
    First,
}

/// Arguments of `anabranch compare`.
#[derive(Args)]
pub struct Arguments {
    /// What is measured
    #[arg(
        overrides_with = "benches",
        long,
        short = 'b',
        value_enum,
        value_delimiter = ',',
        default_value = "latency,bw,bibw"
    )]
    pub(super) benches: Vec<Bench>,
    /// Measurements that go together; --benches, --pairs, --windows, --requests and --sizes choose among
    /// them. The end says which rows take longer with the library in the first half of the rounds and in the
    /// second
    #[arg(overrides_with = "suite", long, value_enum, conflicts_with_all = ["turns", "blocks", "row_ms", "iterations", "predicted"])]
    pub(super) suite: Option<Suite>,
    /// Requests by which messages are sent: each made anew, or persistent ones
    #[arg(
        overrides_with = "requests",
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "fresh",
        default_value_if("suite", "first", "fresh,persistent")
    )]
    pub(super) requests: Vec<RequestKind>,
    /// Buffers of the first and the second of a pair: device (D) or host (H) memory; ring,
    /// all-to-all and all-by-number have DD and HH only
    #[arg(overrides_with = "pairs", long, value_delimiter = ',', default_value = "DD", default_value_if("suite", "first", "DD,HD,DH"), value_name = "DD,DH,HD,HH", value_parser = pair)]
    pub(super) pairs: Vec<[Place; 2]>,
    /// Message sizes: powers of two from MIN to MAX, or a list; K, M, G are powers of 1024. Up to 32G; from 2G on in whole
    /// multiples of 64 bytes
    #[arg(overrides_with = "sizes", long, short = 'm', default_value = USUAL_SIZES, default_value_ifs([("suite", ArgPredicate::IsPresent, "1:64M"), ("sim", ArgPredicate::IsPresent, SIM_SIZES)]), value_name = "MIN:MAX|A,B,...", value_parser = sizes::parse)]
    pub(super) sizes: Sizes,
    /// Messages under way at once (all but latency); left out where those that arrive in host memory take more than 1G
    #[arg(overrides_with = "windows", long, short = 'W', value_delimiter = ',', default_value = "1,16", default_value_if("suite", "first", "1,16,64"), value_name = "N,N,...",
          value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(super) windows: Vec<u32>,
    /// Configurations that take turns: vanilla (without the library), best (without it, the best of a sweep of UCX's
    /// settings), anabranch; one (ANABRANCH_PATHS=direct), relays (ANABRANCH_PATHS=direct,relay), host
    /// (ANABRANCH_PATHS=direct,host), all (ANABRANCH_PATHS=direct,relay,host), driven (as all, and ANABRANCH_OWNER=one);
    /// those given by --with and --without; NAME2 is NAME once more [default:
    /// vanilla,vanilla2,anabranch; with --sim anabranch,anabranch2, since there nothing but the library takes time]
    #[arg(
        overrides_with = "configs",
        long,
        value_delimiter = ',',
        value_name = "NAME,NAME,..."
    )]
    pub(super) configs: Option<Vec<String>>,
    /// A further configuration with the library (may be given several times)
    #[arg(long, value_name = "NAME=VAR=VALUE,VAR=VALUE", value_parser = settings::parse)]
    pub(super) with: Vec<(String, Variables)>,
    /// A further configuration without the library (may be given several times)
    #[arg(long, value_name = "NAME=VAR=VALUE,VAR=VALUE", value_parser = settings::parse)]
    pub(super) without: Vec<(String, Variables)>,
    /// What `best` chooses from, instead of a list of UCX's settings; the first is the one to be beaten
    #[arg(long, value_name = "NAME=VAR=VALUE,VAR=VALUE", value_parser = settings::parse)]
    pub(super) sweep: Vec<(String, Variables)>,
    /// The configuration that ratios refer to [default: the first of --configs]; NAME2 of it is the measure of noise
    #[arg(overrides_with = "baseline", long, value_name = "NAME")]
    pub(super) baseline: Option<String>,
    /// Have configurations take turns within each launch, after every few messages: the library stands aside for those without
    /// it. Tells differences apart that launches scatter more than. Configurations with the library may differ in ANABRANCH_PATHS
    /// only, and those without it have the same variables
    #[arg(overrides_with = "turns", long)]
    pub(super) turns: bool,
    /// Beside what messages from device to device took, what plans by what is known of this node predict for them (latency, bw and
    /// bibw, from 2M on): a file that `anabranch topo --measure --dump` has written, or the name of a node. Give the ranks the
    /// same numbers, if they are to plan by them, too: ANABRANCH_MODEL
    #[arg(overrides_with = "predicted", long, value_name = "NAME|FILE")]
    pub(super) predicted: Option<String>,
    /// Rounds: in each every configuration is launched once, in turns [default: 5, with --suite first 10]
    #[arg(overrides_with = "rounds", long, short = 'r', value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) rounds: Option<u32>,
    /// Begin no round that would not end within this time; the first is always made [default: 45, without a limit with --rounds or
    /// --suite]
    #[arg(overrides_with = "budget", long, value_name = "SECONDS")]
    pub(super) budget: Option<u64>,
    /// Ranks of mbw-mr, ring, all-to-all and jacobi
    #[arg(overrides_with = "np", long, short = 'n', default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub(super) np: u32,
    /// About how long each row is measured in each launch
    #[arg(
        overrides_with = "row_ms",
        long,
        default_value_t = 10.0,
        value_name = "MS"
    )]
    pub(super) row_ms: f64,
    /// Parts into which this time is divided; the launch's value is their median
    #[arg(overrides_with = "blocks", long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(super) blocks: u8,
    /// What device memory the buffers lie in
    #[arg(overrides_with = "memory", long, value_enum, default_value_t = Memory::Plain)]
    pub(super) memory: Memory,
    /// Iterations of each part, instead of as many as fit (on a simulated node: 1)
    #[arg(overrides_with = "iterations", long, short = 'i', value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) iterations: Option<u32>,
    /// Do not verify the data (else every row is verified in each configuration's first launch)
    #[arg(long)]
    pub(super) no_check: bool,
    /// Program of the bench jacobi
    #[arg(
        overrides_with = "jacobi",
        long,
        default_value = "jacobi",
        value_name = "PROGRAM"
    )]
    pub(super) jacobi: OsString,
    /// Its arguments
    #[arg(
        overrides_with = "jacobi_args",
        long,
        default_value = "--size 8192x8192 --iterations 200",
        value_name = "ARGUMENTS",
        allow_hyphen_values = true
    )]
    pub(super) jacobi_args: String,
    /// Run on a simulated node: the name of a topology, or a topology file
    #[arg(overrides_with = "sim", long, value_name = "NAME|FILE")]
    pub(super) sim: Option<OsString>,
    /// On a simulated node, a row whose programs have acted late by more than this part of its time is void: they had to
    /// wait for a processor of this machine
    #[arg(
        overrides_with = "late_max",
        long,
        value_name = "PERCENT",
        default_value_t = 2.0
    )]
    pub(super) late_max: f64,
    /// Allow more ranks than simulated GPUs
    #[arg(long)]
    pub(super) oversubscribe_gpus: bool,
    /// The MPI whose launcher to use, or the launcher, as `anabranch run` takes it [default: the one in PATH]
    #[arg(overrides_with = "mpi", long, value_name = "openmpi|mpich|NAME|PATH")]
    pub(super) mpi: Option<OsString>,
    /// A further argument for the launcher (may be given several times)
    #[arg(long = "mpirun-arg", value_name = "ARG", allow_hyphen_values = true)]
    pub(super) extra: Vec<OsString>,
    /// End a launch that takes longer
    #[arg(
        overrides_with = "launch_limit",
        long,
        default_value_t = 300,
        value_name = "SECONDS"
    )]
    pub(super) launch_limit: u64,
    /// Write the tables to this file too, again after every round
    #[arg(long, value_name = "FILE")]
    pub(super) text: Option<PathBuf>,
    #[command(flatten)]
    pub(super) json: Json,
    /// Write one line for each row and configuration to this file, again after every round
    #[arg(long, value_name = "FILE")]
    pub(super) csv: Option<PathBuf>,
    /// Seed of the data
    #[arg(long)]
    pub(super) seed: Option<u64>,
    /// Print every command line on stderr
    #[arg(long, short)]
    pub(super) verbose: bool,
}

impl Arguments {
    /// How many rounds at most.
    pub fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(match self.suite {
            Some(Suite::First) => 10,
            None => 5,
        })
    }

    /// What they may take.
    pub fn budget(&self) -> Option<Duration> {
        let usual = (self.rounds.is_none() && self.suite.is_none()).then_some(USUAL_BUDGET);
        self.budget.or(usual).map(Duration::from_secs)
    }
}

fn pair(text: &str) -> Result<[Place; 2], String> {
    let place = |letter| match letter {
        'D' | 'd' => Some(Place::D),
        'H' | 'h' => Some(Place::H),
        _ => None,
    };
    let places: Option<Vec<Place>> = text.chars().map(place).collect();
    places
        .and_then(|places| places.try_into().ok())
        .ok_or_else(|| format!("{text:?}: write DD, DH, HD or HH"))
}
