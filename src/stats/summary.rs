//! The summary of a job's messages: as a table for people, as JSON for programs.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::Path;

use serde_json::{json, Map, Value};

use super::details::unix_ms;
use super::{version, About, Counter, Details, Reason, Snapshot, StatsTarget, FORMER};

/// The paths by which payload arrives, each with its counters of messages and bytes. Their bytes
/// add up to what the engine delivered.
const PATHS: &[(&str, Counter, Counter)] = &[
    ("direct", Counter::DirectReceives, Counter::DirectBytes),
    (
        "multipath",
        Counter::MultipathReceives,
        Counter::MultipathBytes,
    ),
    ("self", Counter::SelfReceives, Counter::SelfBytes),
    (
        "host pipeline",
        Counter::HostPipelineReceives,
        Counter::HostPipelineBytes,
    ),
    (
        "GPU pipeline",
        Counter::GpuPipelineReceives,
        Counter::GpuPipelineBytes,
    ),
    ("eager", Counter::EagerReceives, Counter::EagerBytes),
    ("bcopy", Counter::BcopyReceives, Counter::BcopyBytes),
];

const SENDS: &[(&str, Counter, Counter)] = &[
    ("descriptor", Counter::SendsRts, Counter::SendsRtsBytes),
    ("bcopy", Counter::SendsBcopy, Counter::SendsBcopyBytes),
    ("native", Counter::SendsNative, Counter::SendsNativeBytes),
    (
        "RTS, from host memory",
        Counter::SendsHostRts,
        Counter::SendsHostRtsBytes,
    ),
];

/// Printed as name and value where they are not zero.
const EVENTS: &[Counter] = &[
    Counter::SendsEager,
    Counter::NativeReceives,
    Counter::HostFetched,
    Counter::ProbesRts,
    Counter::Truncated,
    Counter::Cancelled,
    Counter::Verified,
    Counter::VerifyMismatches,
    Counter::Errors,
    Counter::Retries,
    Counter::DriverRetries,
    Counter::DeadPeers,
    Counter::Corrupt,
    Counter::BadRts,
    Counter::Panics,
    Counter::MultipathDirectBytes,
    Counter::MultipathRelayBytes,
    Counter::MultipathHostBytes,
    Counter::MultipathPutBytes,
    Counter::PutBytes,
    Counter::MultipathOvertakenBytes,
    Counter::HostShareRaised,
    Counter::HostShareLowered,
    Counter::HostRateLowered,
    Counter::HostRateRaised,
    Counter::ChunksClaimedBack,
    Counter::PathsAbandoned,
    Counter::SendersLate,
    Counter::CopiesBatched,
    Counter::MappingsOpened,
    Counter::MappingsEvicted,
    Counter::ChunksSent,
    Counter::ChunksMapped,
    Counter::MappingsRefused,
    Counter::HelperWakeups,
    Counter::HelperServed,
    Counter::FinalizeUnmatched,
];

/// Printed in these words where they are not zero: what makes the copies of long messages, and what became of it.
const TOLD: &[(&str, Counter)] = &[
    ("driven by one rank, copy by copy", Counter::OneOwnerStreams),
    ("driven by one rank, in batches", Counter::OneOwnerBatch),
    ("driven by one rank, as a graph", Counter::OneOwnerGraph),
    ("behind others in their place", Counter::OneOwnerBehind),
    ("begun again, one rank failed", Counter::OneOwnerFailed),
    ("places led over no more", Counter::PlacesRetired),
    ("graphs built", Counter::GraphsBuilt),
    ("graphs launched again, changed", Counter::GraphsUpdated),
    ("graphs launched again as is", Counter::GraphsRelaunched),
    ("graphs destroyed for room", Counter::GraphsEvicted),
    ("graphs that failed", Counter::GraphsFailed),
    ("staging on a GPU refused", Counter::StagingRefused),
    ("staging on a GPU given back", Counter::RelaysReturned),
    ("RTRs sent", Counter::RtrsSent),
    ("written before matched", Counter::PutEarlyReceives),
    ("claimed ahead of RTSs", Counter::MatchedEarly),
    ("launches held for more", Counter::LaunchesHeld),
    ("waited while others were read", Counter::GetsQueued),
    ("host memory not pinned", Counter::PinningRefused),
    ("units taken back from the dead", Counter::UnitsReclaimed),
];

/// The values of one rank.
#[derive(Clone, Debug)]
pub struct RankSnapshot {
    /// Rank in MPI_COMM_WORLD.
    pub rank: u32,
    /// Its process.
    pub pid: u32,
    /// Its values.
    pub values: Snapshot,
    /// Its calls and messages one by one, if they are counted and it has got to MPI_Finalize.
    pub details: Option<Details>,
}

/// The values of all ranks of a node that were collected.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    ranks: Vec<RankSnapshot>,
    /// Of the job, if calls and messages are counted.
    about: Option<&'static About>,
}

impl Summary {
    /// Adds a rank.
    pub fn add(&mut self, rank: RankSnapshot) {
        self.ranks.push(rank);
        self.ranks.sort_by_key(|entry| entry.rank);
    }

    /// What the file says of the job.
    pub fn tell(&mut self, about: Option<&'static About>) {
        self.about = about;
    }

    /// The sum over the ranks.
    pub fn totals(&self) -> Snapshot {
        let mut totals = Snapshot::default();
        for entry in &self.ranks {
            totals.merge(&entry.values);
        }
        totals
    }

    /// Writes the summary where the options want it: nowhere, as text to stderr, or as JSON to a
    /// file, which is replaced at once so that nobody reads half of it.
    ///
    /// # Errors
    /// What writing the file reports.
    pub fn write(&self, target: &StatsTarget) -> io::Result<()> {
        match target {
            StatsTarget::Off => Ok(()),
            StatsTarget::Stderr => io::stderr().lock().write_all(self.text().as_bytes()),
            StatsTarget::File(path) => replace_file(path, &format!("{:#}\n", self.json())),
        }
    }

    /// The summary as a table for people; ends in a newline. Only what is not zero is listed.
    pub fn text(&self) -> String {
        let totals = self.totals();
        let mut out = format!(
            "anabranch {}: {} {}, {} sends from device buffers\n",
            env!("CARGO_PKG_VERSION"),
            self.ranks.len(),
            if self.ranks.len() == 1 {
                "rank"
            } else {
                "ranks"
            },
            totals.get(Counter::SendsDevice),
        );
        let pair = |(name, messages, bytes): &(&'static str, Counter, Counter)| {
            (*name, totals.get(*messages), totals.get(*bytes))
        };
        let fallback = |reason: &Reason| {
            let (messages, bytes) = totals.fallback(*reason);
            (reason.text(), messages, bytes)
        };
        let sections: [(&str, Vec<Line>); 3] = [
            ("sent", SENDS.iter().map(pair).filter(happened).collect()),
            (
                "received",
                PATHS.iter().map(pair).filter(happened).collect(),
            ),
            (
                "not taken because",
                Reason::ALL.iter().map(fallback).filter(happened).collect(),
            ),
        ];
        let lines = sections.iter().flat_map(|(_, lines)| lines);
        let width = lines
            .map(|(name, ..)| name.len())
            .max()
            .unwrap_or(0)
            .max(24);
        let wide = width + 2;
        for (title, lines) in sections.iter().filter(|(_, lines)| !lines.is_empty()) {
            let _ = writeln!(out, "  {title:<wide$} {:>12} {:>18}", "messages", "bytes");
            for (name, messages, bytes) in lines {
                let _ = writeln!(out, "    {name:<width$} {messages:>12} {bytes:>18}");
            }
        }
        let events = EVENTS.iter().map(|counter| (counter.name(), *counter));
        for (name, counter) in events.chain(TOLD.iter().copied()) {
            if totals.get(counter) != 0 {
                let _ = writeln!(out, "  {name:<wide$} {:>12}", totals.get(counter));
            }
        }
        out
    }

    /// The summary as JSON: `{"schema", "version", "commit", "build", "job", "host", "began_unix_ms", "ended_unix_ms", "size", "simulated",
    /// "ranks": [{"rank", "pid", "counters", "fallbacks", "run_ns", "time_in_calls", "rates", "pairs"}], "totals":
    /// {"counters", "fallbacks"}}`,
    /// where `counters` maps each name to a number and `fallbacks` each reason to `{"messages", "bytes"}`. Renamed
    /// counters have their former names as well. A rank that has not got to MPI_Finalize lacks what its
    /// [`Details`] have.
    pub fn json(&self) -> Value {
        let ranks: Vec<Value> = self
            .ranks
            .iter()
            .map(|entry| {
                let mut fields = Map::new();
                fields.insert("rank".into(), entry.rank.into());
                fields.insert("pid".into(), entry.pid.into());
                fields.insert("counters".into(), counters(&entry.values));
                fields.insert("fallbacks".into(), fallbacks(&entry.values));
                if let (Some(details), Some(about)) = (&entry.details, self.about) {
                    fields.extend(details.json(about));
                }
                Value::from(fields)
            })
            .collect();
        let totals = self.totals();
        let mut summary = Map::new();
        summary.insert("schema".into(), SCHEMA.into());
        summary.insert("version".into(), version::VERSION.into());
        summary.insert("commit".into(), version::COMMIT.into());
        summary.insert("build".into(), version::BUILD.into());
        if let Some(about) = self.about {
            summary.insert("job".into(), format!("{:016x}", about.job).into());
            summary.insert("host".into(), about.host.as_str().into());
            summary.insert("began_unix_ms".into(), about.began_unix_ms.into());
            summary.insert("ended_unix_ms".into(), unix_ms().into());
            summary.insert("size".into(), about.size.into());
            summary.insert("simulated".into(), about.is_simulated.into());
        }
        summary.insert("ranks".into(), ranks.into());
        let totals = json!({ "counters": counters(&totals), "fallbacks": fallbacks(&totals) });
        summary.insert("totals".into(), totals);
        summary.into()
    }
}

/// The form of the JSON: 1 had no such number, and the former names of counters only; 2 had no calls, rates and pairs.
const SCHEMA: u32 = 3;

/// A name with messages and bytes.
type Line = (&'static str, u64, u64);

fn happened((_, messages, _): &Line) -> bool {
    *messages != 0
}

fn counters(values: &Snapshot) -> Value {
    let value = |counter: &Counter| Value::from(values.get(*counter));
    let mut map: Map<_, _> = Counter::ALL
        .iter()
        .map(|counter| (counter.name().to_owned(), value(counter)))
        .collect();
    for (former, now) in FORMER {
        if let Some(value) = map.get(*now).cloned() {
            map.insert((*former).to_owned(), value);
        }
    }
    map.into()
}

fn fallbacks(values: &Snapshot) -> Value {
    Reason::ALL
        .iter()
        .map(|reason| {
            let (messages, bytes) = values.fallback(*reason);
            (
                reason.name().to_owned(),
                json!({ "messages": messages, "bytes": bytes }),
            )
        })
        .collect::<Map<_, _>>()
        .into()
}

fn replace_file(path: &Path, text: &str) -> io::Result<()> {
    let mut draft = path.as_os_str().to_owned();
    draft.push(format!(".{}", std::process::id()));
    let draft = Path::new(&draft);
    std::fs::write(draft, text)
        // A device such as /dev/stderr, or a folder in which only the file itself is ours.
        .and_then(|()| {
            if is_plain(path) {
                std::fs::rename(draft, path)
            } else {
                Err(io::ErrorKind::InvalidInput.into())
            }
        })
        .or_else(|_| {
            let _ = std::fs::remove_file(draft);
            std::fs::write(path, text)
        })
}

fn is_plain(path: &Path) -> bool {
    std::fs::symlink_metadata(path).map_or(true, |meta| meta.is_file())
}

#[cfg(test)]
mod tests {
    use super::super::{add, fallback, snapshot, Unit, TEST_LOCK, WORDS};
    use super::*;

    fn two_ranks() -> Summary {
        let _guard = TEST_LOCK
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let before = snapshot();
        add(Counter::DirectReceives, 1);
        add(Counter::DirectBytes, 1000);
        fallback(Reason::NoSlot, 50);
        let after = snapshot();
        let words: Vec<u64> = (0..WORDS)
            .map(|word| after.0[word] - before.0[word])
            .collect();
        let values = Snapshot::from_words(&words);
        let mut summary = Summary::default();
        for (rank, pid) in [(1, 11), (0, 10)] {
            summary.add(RankSnapshot {
                rank,
                pid,
                values: values.clone(),
                details: None,
            });
        }
        summary
    }

    #[test]
    fn json_has_ranks_in_order_and_totals() {
        let json = two_ranks().json();
        assert_eq!(json["version"], env!("CARGO_PKG_VERSION"));
        assert!(["commit", "build"]
            .iter()
            .all(|of| json[of].as_str().is_some_and(|text| !text.is_empty())));
        assert_eq!(json["ranks"][0]["rank"], 0);
        assert_eq!(json["ranks"][1]["pid"], 11);
        assert_eq!(json["ranks"][1]["counters"]["receives_direct_bytes"], 1000);
        assert_eq!(json["totals"]["counters"]["receives_direct"], 2);
        assert_eq!(json["totals"]["fallbacks"]["no_slot"]["bytes"], 100);
        assert_eq!(json["totals"]["fallbacks"]["too_small"]["messages"], 0);
    }

    #[test]
    fn text_lists_only_what_happened() {
        let text = two_ranks().text();
        assert!(text.starts_with("anabranch "), "{text}");
        assert!(text.contains("2 ranks"));
        let line = text
            .lines()
            .find(|line| line.trim_start().starts_with("direct"))
            .expect("a line for the path");
        assert_eq!(
            line.split_whitespace().collect::<Vec<_>>(),
            ["direct", "2", "2000"]
        );
        assert!(text.contains("no slot was free"));
        assert!(
            !text.contains("host pipeline") && !text.contains("ANABRANCH_THRESHOLD"),
            "{text}"
        );
    }

    #[test]
    fn every_path_and_every_event_is_in_the_table_once() {
        let mut listed: Vec<usize> = PATHS
            .iter()
            .chain(SENDS)
            .flat_map(|(_, m, b)| [*m as usize, *b as usize])
            .collect();
        listed.extend(EVENTS.iter().map(|counter| *counter as usize));
        listed.extend(TOLD.iter().map(|(_, counter)| *counter as usize));
        let count = listed.len();
        listed.sort_unstable();
        listed.dedup();
        assert_eq!(listed.len(), count);
        // The first line has the sends from device buffers.
        let of_messages = Counter::ALL.iter().filter(|counter| {
            let is_of_messages = ["sends_", "receives_"]
                .iter()
                .any(|prefix| counter.name().starts_with(prefix));
            is_of_messages && counter.unit() == Unit::Count && **counter != Counter::SendsDevice
        });
        let of_plans = Counter::ALL.iter().filter(|counter| {
            let prefixes = ["driven_", "graphs_", "staging_", "units_", "relays_"];
            prefixes
                .iter()
                .any(|prefix| counter.name().starts_with(prefix))
        });
        for counter in of_messages.chain(of_plans) {
            assert!(listed.contains(&(*counter as usize)), "{}", counter.name());
        }
    }

    #[test]
    fn the_file_is_replaced_whole() {
        let folder = std::env::temp_dir().join(format!("anabranch-stats-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let path = folder.join("s.json");
        std::fs::write(&path, "old").expect("a file");
        two_ranks()
            .write(&StatsTarget::File(path.clone()))
            .expect("written");
        let text = std::fs::read_to_string(&path).expect("readable");
        let json: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(json["ranks"].as_array().map(Vec::len), Some(2));
        assert_eq!(
            std::fs::read_dir(&folder).expect("a folder").count(),
            1,
            "no draft left"
        );
        std::fs::remove_dir_all(&folder).expect("removed");
    }
}
