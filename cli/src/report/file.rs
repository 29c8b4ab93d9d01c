//! The files that `ANABRANCH_STATS=FILE` makes, as they are read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// Schemas that are read: 2 has counters only.
const SCHEMAS: std::ops::RangeInclusive<u32> = 2..=3;

/// A file: the ranks of one node.
#[derive(Debug, Deserialize)]
pub struct File {
    pub schema: u32,
    pub version: String,
    #[serde(default)]
    pub job: Option<String>,
    #[serde(default)]
    pub host: Option<String>,
    #[serde(default)]
    pub size: Option<u32>,
    #[serde(default)]
    pub began_unix_ms: u64,
    #[serde(default)]
    pub ended_unix_ms: u64,
    #[serde(default)]
    pub simulated: bool,
    pub ranks: Vec<Rank>,
    /// Where it was.
    #[serde(skip)]
    pub path: PathBuf,
}

/// A rank.
#[derive(Debug, Deserialize)]
pub struct Rank {
    pub rank: u32,
    pub pid: u32,
    pub counters: BTreeMap<String, u64>,
    pub fallbacks: BTreeMap<String, Sum>,
    /// Absent where the rank has not got to MPI_Finalize, or is of an older library.
    #[serde(default)]
    pub run_ns: Option<u64>,
    #[serde(default)]
    pub time_in_calls: BTreeMap<String, Calls>,
    /// By protocol.
    #[serde(default)]
    pub rates: BTreeMap<String, Vec<Rate>>,
    #[serde(default)]
    pub pairs: Vec<Pair>,
    #[serde(default)]
    pub pairs_others: Option<Side>,
    #[serde(default)]
    pub pairs_unknown: Option<Side>,
}

/// Clocks of two hosts may be apart by this, ms.
const APART_MS: u64 = 60_000;

impl File {
    /// Whether it may be of the same run. A job has an identity on each node; nodes have none in common, but were in it at
    /// the same time.
    pub fn may_go_with(&self, other: &File) -> bool {
        let apart = if self.host == other.host { 0 } else { APART_MS };
        let begins_before_end = |one: &File, other: &File| {
            one.began_unix_ms <= other.ended_unix_ms.saturating_add(apart)
        };
        let at_once = begins_before_end(self, other) && begins_before_end(other, self);
        self.size == other.size && (self.job == other.job || at_once)
    }
}

/// Messages and bytes.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct Sum {
    pub messages: u64,
    pub bytes: u64,
}

impl Sum {
    /// The sum of several.
    pub fn of<'a>(sums: impl Iterator<Item = &'a Sum>) -> Sum {
        sums.fold(Sum::default(), |all, one| Sum {
            messages: all.messages.saturating_add(one.messages),
            bytes: all.bytes.saturating_add(one.bytes),
        })
    }
}

/// Calls of one function.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Calls {
    pub calls: u64,
    pub ns: u64,
}

/// Messages of a protocol and size class.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Rate {
    pub from_bytes: u64,
    pub messages: u64,
    pub bytes: u64,
    pub timed: u64,
    pub timed_bytes: u64,
    pub ns: u64,
    pub min_ns: u64,
    pub max_ns: u64,
}

/// What was received from a rank, by protocol, and sent to it, by way.
#[derive(Debug, Deserialize)]
pub struct Pair {
    pub rank: u32,
    #[serde(flatten)]
    pub side: Side,
}

/// See [`Pair`].
#[derive(Debug, Default, Deserialize)]
pub struct Side {
    pub received: BTreeMap<String, Sum>,
    pub sent: BTreeMap<String, Sum>,
}

/// Reads a file.
///
/// # Errors
/// One line that says what is wrong with it, and what to do.
pub fn read(path: &Path) -> Result<File, String> {
    let told = |text: String| format!("{}: {text}", path.display());
    let bytes = std::fs::read(path).map_err(|error| {
        told(format!(
            "{error}; ANABRANCH_STATS=FILE makes one for each node at MPI_Finalize"
        ))
    })?;
    parse(&bytes)
        .map(|file| File {
            path: path.to_owned(),
            ..file
        })
        .map_err(told)
}

fn parse(bytes: &[u8]) -> Result<File, String> {
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err("it is empty: run the job again, with room on the disk for it".into());
    }
    if bytes.starts_with(b"ANBTRACE") {
        return Err("it is a trace: see `anabranch trace`".into());
    }
    let value: serde_json::Value = serde_json::from_slice(bytes).map_err(|error| {
        let what = if error.is_eof() {
            "it ends early, as if cut off"
        } else {
            "it is not JSON"
        };
        format!("{what} ({error}): name a file that ANABRANCH_STATS=FILE has made")
    })?;
    if !(value["ranks"].is_array() && value["totals"]["counters"].is_object()) {
        return Err(
            "it has no counters of ranks: name a file that ANABRANCH_STATS=FILE has made".into(),
        );
    }
    let version = value["version"].as_str().unwrap_or("unknown").to_owned();
    let schema = value.get("schema").map_or(Some(1), |it| it.as_u64());
    let is_known = schema
        .and_then(|schema| u32::try_from(schema).ok())
        .is_some_and(|schema| SCHEMAS.contains(&schema));
    if !is_known {
        let schema = value
            .get("schema")
            .map_or_else(|| "1".into(), ToString::to_string);
        return Err(format!(
            "its schema is {schema}, and this command reads {} and {}: use the `anabranch` of version {version}, which made it",
            SCHEMAS.start(),
            SCHEMAS.end()
        ));
    }
    serde_json::from_value(value).map_err(|error| {
        format!("it is not as version {version} makes it ({error}): it was changed, or is damaged")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_of_a_run_were_in_it_at_the_same_time() {
        let file = |(job, host, size): (&str, &str, u32), (began, ended): (u64, u64)| File {
            schema: 3,
            version: String::new(),
            job: Some(job.into()),
            host: Some(host.into()),
            size: Some(size),
            began_unix_ms: began,
            ended_unix_ms: ended,
            simulated: false,
            ranks: Vec::new(),
            path: PathBuf::new(),
        };
        let first = file(("a", "n1", 4), (100_000, 200_000));
        for (other, is_of_run) in [
            (file(("a", "n1", 4), (100_001, 200_000)), true),
            (file(("b", "n2", 4), (150_000, 250_000)), true),
            (file(("b", "n2", 4), (250_000, 300_000)), true),
            (file(("b", "n2", 4), (260_001, 300_000)), false),
            (file(("b", "n2", 5), (150_000, 250_000)), false),
            (file(("b", "n1", 4), (200_001, 300_000)), false),
            (file(("b", "n1", 4), (150_000, 300_000)), true),
        ] {
            assert_eq!(first.may_go_with(&other), is_of_run, "{other:?}");
            assert_eq!(other.may_go_with(&first), is_of_run, "{other:?}");
        }
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said() {
        let whole = r#"{"schema":2,"version":"0.1","ranks":[],"totals":{"counters":{}}}"#;
        assert!(parse(whole.as_bytes()).is_ok_and(|file| file.ranks.is_empty()));
        for (text, said) in [
            (String::new(), "it is empty"),
            (" \n".into(), "it is empty"),
            ("ANBTRACE....".into(), "anabranch trace"),
            ("hello".into(), "it is not JSON"),
            (whole[..30].into(), "it ends early"),
            ("[1]".into(), "no counters of ranks"),
            ("{}".into(), "no counters of ranks"),
            (whole.replace("\"schema\":2,", ""), "its schema is 1"),
            (whole.replace(":2,", ":9,"), "its schema is 9"),
            (whole.replace(":2,", ":\"x\","), "its schema is \"x\""),
            (whole.replace(":2,", ":-1,"), "its schema is -1"),
            (
                whole.replace(":2,", ":4294967298,"),
                "its schema is 4294967298",
            ),
            (
                whole.replace("[]", "[{\"rank\":-1}]"),
                "not as version 0.1 makes it",
            ),
        ] {
            let error = parse(text.as_bytes()).expect_err(&text);
            assert!(error.contains(said), "{text}: {error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }
}
