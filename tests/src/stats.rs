//! What a run says of itself: the counters of the preloaded library and the report of the simulated driver.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// The summary that the library writes at MPI_Finalize.
#[derive(Clone, Debug)]
pub struct Stats(Value);

/// Counters of the paths by which a message that was sent by descriptor arrives.
const PATHS: [&str; 6] = [
    "receives_direct",
    "receives_multipath",
    "receives_self",
    "receives_host_pipeline",
    "receives_gpu_pipeline",
    "receives_eager",
];

/// Adds up all numbers of two values that are built alike.
fn add(to: &mut Value, more: &Value) {
    match (to, more) {
        (Value::Object(fields), Value::Object(others)) => {
            for (name, field) in fields {
                add(field, &others[name]);
            }
        }
        (number, more) => {
            if let (Some(a), Some(b)) = (number.as_u64(), more.as_u64()) {
                *number = (a + b).into();
            }
        }
    }
}

impl Stats {
    /// The summaries of all nodes of a run, taken together; `None` if there is none.
    ///
    /// # Panics
    /// If a file is not what the library documents.
    pub fn of_nodes(folder: &Path) -> Option<Stats> {
        let is_summary = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("stats-") && name.ends_with(".json")
        };
        let entries = fs::read_dir(folder).ok()?.flatten();
        let files = entries.map(|entry| entry.path()).filter(is_summary);
        let nodes = files.filter_map(|file| Stats::read(&file));
        nodes.reduce(Stats::with)
    }

    /// The sum of two nodes' summaries.
    fn with(mut self, other: Stats) -> Stats {
        let ranks = other.0["ranks"].as_array().cloned().unwrap_or_default();
        self.0["ranks"].as_array_mut().expect("ranks").extend(ranks);
        add(&mut self.0["totals"], &other.0["totals"]);
        self
    }

    /// Reads a summary; `None` if there is no file.
    ///
    /// # Panics
    /// If the file is not what the library documents.
    pub fn read(file: &Path) -> Option<Stats> {
        let text = fs::read_to_string(file).ok()?;
        let value: Value = serde_json::from_str(&text)
            .unwrap_or_else(|e| panic!("the summary is not JSON: {e}\n{text}"));
        assert!(
            value["totals"]["counters"].is_object(),
            "the summary has no totals:\n{text}"
        );
        Some(Stats(value))
    }

    /// A counter, summed over the ranks.
    ///
    /// # Panics
    /// If there is no such counter.
    pub fn total(&self, counter: &str) -> u64 {
        self.0["totals"]["counters"][counter]
            .as_u64()
            .unwrap_or_else(|| panic!("no counter {counter}"))
    }

    /// A counter of one rank.
    ///
    /// # Panics
    /// If the rank is not in the summary or has no such counter.
    pub fn of_rank(&self, rank: u64, counter: &str) -> u64 {
        let ranks = self.0["ranks"].as_array().expect("ranks");
        let entry = ranks
            .iter()
            .find(|entry| entry["rank"] == rank)
            .unwrap_or_else(|| panic!("no rank {rank}"));
        entry["counters"][counter]
            .as_u64()
            .unwrap_or_else(|| panic!("no counter {counter}"))
    }

    /// The process of a rank.
    ///
    /// # Panics
    /// If the rank is not in the summary.
    pub fn pid(&self, rank: u64) -> u64 {
        let ranks = self.0["ranks"].as_array().expect("ranks");
        let entry = ranks.iter().find(|entry| entry["rank"] == rank);
        entry
            .and_then(|entry| entry["pid"].as_u64())
            .unwrap_or_else(|| panic!("no rank {rank}"))
    }

    /// How many ranks the summary covers.
    pub fn ranks(&self) -> usize {
        self.0["ranks"].as_array().map_or(0, Vec::len)
    }

    /// Messages not taken for a reason.
    ///
    /// # Panics
    /// If there is no such reason.
    pub fn fallback(&self, reason: &str) -> u64 {
        self.not_taken(reason, "messages")
    }

    /// Bytes of those.
    ///
    /// # Panics
    /// If there is no such reason.
    pub fn fallback_bytes(&self, reason: &str) -> u64 {
        self.not_taken(reason, "bytes")
    }

    fn not_taken(&self, reason: &str, of: &str) -> u64 {
        self.0["totals"]["fallbacks"][reason][of]
            .as_u64()
            .unwrap_or_else(|| panic!("no reason {reason}"))
    }

    /// What must hold in any run in which every message was received whole: nothing went wrong inside, every send from
    /// a device buffer is accounted for, and every descriptor was served by exactly one path, byte for byte.
    ///
    /// # Panics
    /// If it does not hold.
    pub fn check_complete(&self) {
        self.check_sane();
        for unit in ["", "_bytes"] {
            let arrived: u64 = PATHS
                .iter()
                .map(|path| self.total(&format!("{path}{unit}")))
                .sum();
            let sent = self.total(&format!("sends_rts{unit}"))
                + self.total(&format!("sends_host_rts{unit}"));
            assert_eq!(
                arrived, sent,
                "descriptors served and sent (unit {unit:?}):\n{self}"
            );
        }
    }

    /// What must hold in any run.
    ///
    /// # Panics
    /// If it does not hold.
    pub fn check_sane(&self) {
        for counter in ["panics", "errors", "dead_peers", "bad_rts"] {
            assert_eq!(self.total(counter), 0, "{counter}:\n{self}");
        }
        for unit in ["", "_bytes"] {
            let ways = ["sends_rts", "sends_bcopy", "sends_native"];
            let went: u64 = ways
                .iter()
                .map(|way| self.total(&format!("{way}{unit}")))
                .sum();
            assert_eq!(
                went,
                self.total(&format!("sends_device{unit}")),
                "sends from device buffers (unit {unit:?}):\n{self}"
            );
        }
    }

    /// Whether any message was taken or touched at all.
    pub fn is_idle(&self) -> bool {
        let counters = self.0["totals"]["counters"].as_object().expect("totals");
        counters
            .iter()
            .all(|(name, value)| value == 0 || name == "helper_wakeups")
    }
}

impl std::fmt::Display for Stats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let totals = &self.0["totals"];
        for (name, value) in totals["counters"]
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(_, value)| **value != 0)
        {
            writeln!(f, "  {name} {value}")?;
        }
        for (name, value) in totals["fallbacks"].as_object().into_iter().flatten() {
            if value["messages"] != 0 {
                writeln!(f, "  not taken, {name}: {value}")?;
            }
        }
        Ok(())
    }
}

/// The report of the simulated driver: one JSON object a line, for each finding and for the end of each process.
#[derive(Clone, Debug, Default)]
pub struct Report {
    lines: Vec<Value>,
    /// Lines that are not understood.
    odd: Vec<String>,
}

impl Report {
    /// Reads a report; empty if there is none, which says nothing of the run (see [`Report::complaint`]).
    pub fn read(file: &Path) -> Report {
        Report::of(&fs::read_to_string(file).unwrap_or_default())
    }

    fn of(text: &str) -> Report {
        let mut report = Report::default();
        for line in text.lines() {
            match serde_json::from_str::<Value>(line) {
                Ok(value) if value["event"].is_string() => report.lines.push(value),
                _ => report.odd.push(line.to_owned()),
            }
        }
        report
    }

    /// What each process said at its end.
    pub fn exits(&self) -> impl Iterator<Item = &Value> {
        let lines = self.lines.iter();
        lines.filter(|line| line["event"] == "exit")
    }

    /// Host memory that a process had page-locked at one time, at most; shared memory counts with each that locks it.
    ///
    /// # Panics
    /// If the process has not reported its end.
    pub fn pinned_bytes_max(&self, pid: u64) -> u64 {
        let exit = self.exits().find(|line| line["pid"] == pid);
        exit.and_then(|line| line["pinned_bytes_max"].as_u64())
            .unwrap_or_else(|| panic!("no report of process {pid}"))
    }

    /// Copies that a process had the driver make, of one kind (`device_to_host`). Rows at one pitch are one copy.
    ///
    /// # Panics
    /// If the process has not reported its end.
    pub fn copies(&self, pid: u64, kind: &str) -> u64 {
        let exit = self.exits().find(|line| line["pid"] == pid);
        exit.and_then(|line| line["copies"][kind]["count"].as_u64())
            .unwrap_or_else(|| panic!("no report of process {pid}"))
    }

    /// What the simulated driver found wrong: unordered accesses to the same bytes, uses of freed memory.
    fn findings(&self) -> Vec<&Value> {
        let lines = self.lines.iter();
        lines.filter(|line| line["event"] != "exit").collect()
    }

    /// Why the report does not say that all went well: something was found, or not everything was looked at. The driver must
    /// have seen the end of so many processes, and have checked each unless that was switched off.
    pub fn complaint(&self, processes: usize, is_checked: bool) -> Option<String> {
        let findings = self.findings();
        let ended = self.exits().count();
        let sound = |line: &&Value| line["findings"] == 0 && line["checked"] == is_checked;
        if !findings.is_empty() {
            Some(format!("the simulated driver found {findings:?}"))
        } else if !self.odd.is_empty() {
            Some(format!("lines of the simulated driver: {:?}", self.odd))
        } else if ended < processes {
            Some(format!(
                "the simulated driver saw the end of {ended} processes, not of {processes}"
            ))
        } else {
            let exit = self.exits().find(|line| !sound(line))?;
            Some(format!("the simulated driver ended with {exit}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_that_is_not_whole_is_no_good_one() {
        const EXIT: &str = r#"{"event":"exit","pid":1,"findings":0,"checked":true}"#;
        const UNCHECKED: &str = r#"{"event":"exit","pid":2,"findings":0,"checked":false}"#;
        const FOUND: &str = r#"{"event":"exit","pid":2,"findings":1,"checked":true}"#;
        const RACE: &str = r#"{"event":"race","pid":2}"#;
        let complaint = |lines: &[&str]| Report::of(&lines.join("\n")).complaint(2, true);
        assert_eq!(complaint(&[EXIT, EXIT]), None);
        for (lines, why) in [
            (&[][..], "the end of 0 processes, not of 2"),
            (&[EXIT], "the end of 1 processes"),
            (&[EXIT, EXIT, RACE], "race"),
            (&[EXIT, FOUND], "ended with"),
            (&[EXIT, UNCHECKED], "ended with"),
            (&[EXIT, EXIT, &EXIT[..20]], "lines of"),
            (&[EXIT, EXIT, "{}"], "lines of"),
        ] {
            let said = complaint(lines).unwrap_or_default();
            assert!(said.contains(why), "{lines:?}: {said}");
        }
        let unchecked = Report::of(UNCHECKED);
        assert_eq!(unchecked.complaint(1, false), None);
    }
}
