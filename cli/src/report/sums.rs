//! The sums of a job, for the text and as JSON.

use std::collections::BTreeMap;

use anabranch_engine::stats::Reason;
use serde::Serialize;

use super::file::{Rank, Rate};
use super::job::{Between, Job};
use super::remarks;

/// What a job did.
#[derive(Serialize)]
pub struct Report {
    /// Of this format.
    pub schema: u32,
    pub job: Option<String>,
    pub versions: Vec<String>,
    pub hosts: Vec<String>,
    /// Ranks of the job, where a file says so.
    pub size: Option<u32>,
    pub ranks: Vec<Row>,
    pub notes: Vec<String>,
    /// Functions, the one with most time first.
    pub calls: Vec<Calls>,
    /// Protocols, the one with most bytes first.
    pub paths: Vec<Path>,
    pub pairs: Vec<Between>,
    pub fallbacks: Vec<Fallback>,
    /// Paths that are slow or idle, and what went wrong.
    pub remarks: Vec<String>,
}

/// A rank.
#[derive(Serialize)]
pub struct Row {
    pub rank: u32,
    pub host: Option<String>,
    pub pid: u32,
    /// From MPI_Init to MPI_Finalize, ms.
    pub run_ms: Option<f64>,
    pub in_calls_ms: f64,
    pub calls: u64,
    /// Payload of device buffers, as counted by the rank.
    pub received_bytes: u64,
    pub sent_bytes: u64,
}

/// Calls of one function.
#[derive(Serialize)]
pub struct Calls {
    pub function: String,
    pub calls: u64,
    pub total_ms: f64,
    /// Part of the time of all ranks.
    pub share: Option<f64>,
    pub mean_us: f64,
}

/// Messages that came by one protocol.
#[derive(Serialize)]
pub struct Path {
    pub path: String,
    #[serde(flatten)]
    pub all: Class,
    pub classes: Vec<Class>,
}

/// Messages of a size class, or of all.
#[derive(Clone, Default, Serialize)]
pub struct Class {
    pub from_bytes: u64,
    pub messages: u64,
    pub bytes: u64,
    /// Of these, so many were timed.
    pub timed: u64,
    pub timed_bytes: u64,
    /// Time of these together, ns.
    pub ns: u64,
    pub min_ns: u64,
    pub max_ns: u64,
    /// A message while it is under way.
    pub gb_s: Option<f64>,
    pub mean_us: Option<f64>,
}

impl Class {
    fn add(&mut self, rate: &Rate) {
        self.messages = self.messages.saturating_add(rate.messages);
        self.bytes = self.bytes.saturating_add(rate.bytes);
        if rate.timed > 0 {
            self.min_ns = match self.timed {
                0 => rate.min_ns,
                _ => self.min_ns.min(rate.min_ns),
            };
            self.max_ns = self.max_ns.max(rate.max_ns);
        }
        self.timed = self.timed.saturating_add(rate.timed);
        self.timed_bytes = self.timed_bytes.saturating_add(rate.timed_bytes);
        self.ns = self.ns.saturating_add(rate.ns);
        let is_timed = self.timed > 0 && self.ns > 0;
        self.gb_s = is_timed.then(|| self.timed_bytes as f64 / self.ns as f64);
        self.mean_us = (self.timed > 0).then(|| self.ns as f64 * 1e-3 / self.timed as f64);
    }
}

/// Messages that were not taken.
#[derive(Serialize)]
pub struct Fallback {
    pub reason: String,
    pub messages: u64,
    pub bytes: u64,
    pub text: String,
    pub advice: String,
}

impl Report {
    /// Sums a job up.
    pub fn new(job: &Job) -> Report {
        let names = |names: Vec<&str>| names.into_iter().map(str::to_owned).collect();
        let first = job.files.first();
        let paths = paths(job);
        Report {
            schema: 1,
            job: first.and_then(|file| file.job.clone()),
            versions: names(job.versions()),
            hosts: names(job.hosts()),
            size: first.and_then(|file| file.size),
            ranks: job.ranks().map(|(rank, host)| row(rank, host)).collect(),
            notes: job.notes(),
            calls: calls(job),
            remarks: remarks::of(job, &paths),
            paths,
            pairs: job.pairs(),
            fallbacks: fallbacks(job),
        }
    }
}

fn row(rank: &Rank, host: Option<&str>) -> Row {
    let counted = |prefix: &str| {
        let of = |(name, value): (&String, &u64)| {
            let is_meant = name
                .strip_prefix(prefix)
                .is_some_and(|name| SIDES.contains(&name));
            is_meant.then_some(*value)
        };
        let all = rank.counters.iter().filter_map(of);
        all.fold(0, u64::saturating_add)
    };
    let calls = rank.time_in_calls.values();
    Row {
        rank: rank.rank,
        host: host.map(str::to_owned),
        pid: rank.pid,
        run_ms: rank.run_ns.map(|ns| ns as f64 * 1e-6),
        in_calls_ms: calls.clone().map(|calls| calls.ns as f64 * 1e-6).sum(),
        calls: calls.map(|calls| calls.calls).fold(0, u64::saturating_add),
        received_bytes: counted("receives_"),
        sent_bytes: counted("sends_"),
    }
}

/// Counters of payload that add up to all that a rank has received, or sent, behind the word that says which.
const SIDES: [&str; 10] = [
    "direct_bytes",
    "multipath_bytes",
    "self_bytes",
    "host_pipeline_bytes",
    "gpu_pipeline_bytes",
    "eager_bytes",
    "bcopy_bytes",
    "rts_bytes",
    "host_rts_bytes",
    "native_bytes",
];

fn calls(job: &Job) -> Vec<Calls> {
    let mut sums: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    let mut run = 0_u64;
    for (rank, _) in job.ranks() {
        run = run.saturating_add(rank.run_ns.unwrap_or(0));
        for (function, calls) in &rank.time_in_calls {
            let sum = sums.entry(function).or_default();
            *sum = (
                sum.0.saturating_add(calls.calls),
                sum.1.saturating_add(calls.ns),
            );
        }
    }
    let one = |(function, (calls, ns)): (&str, (u64, u64))| Calls {
        function: function.to_owned(),
        calls,
        total_ms: ns as f64 * 1e-6,
        share: (run > 0).then(|| ns as f64 / run as f64),
        mean_us: ns as f64 * 1e-3 / calls.max(1) as f64,
    };
    let mut all: Vec<Calls> = sums.into_iter().map(one).collect();
    all.sort_by(|one, other| other.total_ms.total_cmp(&one.total_ms));
    all
}

fn paths(job: &Job) -> Vec<Path> {
    let mut by_name: BTreeMap<&str, BTreeMap<u64, Class>> = BTreeMap::new();
    for (rank, _) in job.ranks() {
        for (name, rates) in &rank.rates {
            let classes = by_name.entry(name).or_default();
            for rate in rates {
                let class = classes.entry(rate.from_bytes).or_default();
                class.from_bytes = rate.from_bytes;
                class.add(rate);
            }
        }
    }
    let one = |(name, classes): (&str, BTreeMap<u64, Class>)| {
        let mut all = Class::default();
        for class in classes.values() {
            all.add(&Rate {
                from_bytes: 0,
                messages: class.messages,
                bytes: class.bytes,
                timed: class.timed,
                timed_bytes: class.timed_bytes,
                ns: class.ns,
                min_ns: class.min_ns,
                max_ns: class.max_ns,
            });
        }
        Path {
            path: name.to_owned(),
            all,
            classes: classes.into_values().collect(),
        }
    };
    let mut paths: Vec<Path> = by_name.into_iter().map(one).collect();
    paths.sort_by_key(|path| std::cmp::Reverse(path.all.bytes));
    paths
}

fn fallbacks(job: &Job) -> Vec<Fallback> {
    let mut sums: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for (rank, _) in job.ranks() {
        for (reason, sum) in &rank.fallbacks {
            let all = sums.entry(reason).or_default();
            *all = (
                all.0.saturating_add(sum.messages),
                all.1.saturating_add(sum.bytes),
            );
        }
    }
    let happened = sums.into_iter().filter(|(_, (messages, _))| *messages > 0);
    let one = |(name, (messages, bytes)): (&str, (u64, u64))| {
        let known = Reason::ALL.iter().find(|reason| reason.name() == name);
        Fallback {
            reason: name.to_owned(),
            messages,
            bytes,
            text: known.map_or(name, |reason| reason.text()).to_owned(),
            advice: known.map_or("", |reason| reason.advice()).to_owned(),
        }
    };
    let mut all: Vec<Fallback> = happened.map(one).collect();
    all.sort_by_key(|fallback| std::cmp::Reverse((fallback.bytes, fallback.messages)));
    all
}
