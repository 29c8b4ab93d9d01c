//! What a run says of itself: races as they are found, and one line of JSON at the end.

use crate::checker::{describe, Race};
use crate::work::Work;
use serde_json::json;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Races printed in full; further ones are counted.
const PRINTED_MAX: u64 = 20;

/// Writes a line to stderr, in one write: where ranks share the launcher's stderr, what is written in pieces has
/// another's text between them.
pub fn complain(text: &str) {
    // Where stderr is closed there is nobody to tell.
    let _ = std::io::stderr().write_all(format!("simcuda: {text}\n").as_bytes());
}

/// Counters and the report file.
pub struct Report {
    file: Option<PathBuf>,
    /// Races and uses of freed memory.
    pub findings: AtomicU64,
    /// Copies and bytes: to host, to device, within a GPU, between GPUs, host to host.
    copies: [(AtomicU64, AtomicU64); 5],
    kernels: AtomicU64,
    fills: AtomicU64,
    /// Host memory that was page-locked at one time, at most.
    pinned_bytes: AtomicU64,
}

const COPY_KINDS: [&str; 5] = [
    "device_to_host",
    "host_to_device",
    "within_device",
    "between_devices",
    "host_to_host",
];

impl Report {
    /// Reports to `SIMCUDA_REPORT`, if set.
    pub fn from_env() -> Report {
        Report {
            file: std::env::var_os("SIMCUDA_REPORT")
                .filter(|v| !v.is_empty())
                .map(PathBuf::from),
            findings: AtomicU64::new(0),
            copies: Default::default(),
            kernels: AtomicU64::new(0),
            fills: AtomicU64::new(0),
            pinned_bytes: AtomicU64::new(0),
        }
    }

    fn append(&self, value: &serde_json::Value) {
        let Some(path) = &self.file else { return };
        let Ok(mut file) = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
        else {
            return;
        };
        // One write a line, so that lines of several processes do not mix.
        let _ = file.write_all(format!("{value}\n").as_bytes());
    }

    /// Counts what an operation moved.
    pub fn moved(&self, work: &Work) {
        match work {
            Work::Copy(copies) => {
                for c in copies {
                    let kind = match (c.src.gpu(), c.dst.gpu()) {
                        (Some(_), None) => 0,
                        (None, Some(_)) => 1,
                        (Some(a), Some(b)) if a == b => 2,
                        (Some(_), Some(_)) => 3,
                        (None, None) => 4,
                    };
                    self.copies[kind].0.fetch_add(1, Relaxed);
                    self.copies[kind].1.fetch_add(c.bytes(), Relaxed);
                }
            }
            Work::Kernel(_) => {
                self.kernels.fetch_add(1, Relaxed);
            }
            Work::Fill(_) => {
                self.fills.fetch_add(1, Relaxed);
            }
            _ => {}
        }
    }

    /// So much host memory is page-locked now.
    pub fn pinned(&self, bytes: u64) {
        self.pinned_bytes.fetch_max(bytes, Relaxed);
    }

    /// Two accesses that nothing orders.
    pub fn race(&self, race: &Race) {
        let (a, b) = (describe(&race.earlier), describe(&race.later));
        if self.findings.fetch_add(1, Relaxed) < PRINTED_MAX {
            complain(&format!("race: {b} while nothing orders it after: {a}"));
        }
        self.append(&json!({"event": "race", "pid": std::process::id(), "earlier": a, "later": b}));
    }

    /// A use of freed memory, or a free of memory in use.
    pub fn freed_in_use(&self, what: &str) {
        if self.findings.fetch_add(1, Relaxed) < PRINTED_MAX {
            complain(what);
        }
        self.append(&json!({"event": "freed", "pid": std::process::id(), "what": what}));
    }

    /// The line at the end.
    pub fn summary(
        &self,
        topology: &str,
        gpus: &[usize],
        checked: bool,
        virtual_ns: u64,
        late_ns: u64,
    ) {
        let mut copies = serde_json::Map::new();
        for (name, (count, bytes)) in COPY_KINDS.iter().zip(&self.copies) {
            copies.insert(
                (*name).into(),
                json!({"count": count.load(Relaxed), "bytes": bytes.load(Relaxed)}),
            );
        }
        self.append(&json!({
            "event": "exit",
            "pid": std::process::id(),
            "topology": topology,
            "gpus": gpus,
            "checked": checked,
            "virtual_ns": virtual_ns,
            "late_ns": late_ns,
            "findings": self.findings.load(Relaxed),
            "copies": copies,
            "kernels": self.kernels.load(Relaxed),
            "fills": self.fills.load(Relaxed),
            "pinned_bytes_max": self.pinned_bytes.load(Relaxed),
        }));
    }
}
