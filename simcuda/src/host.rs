//! What the host's memory can back of the GPUs'.
//!
//! Simulated device memory is the host's, page by page as it is written. A program that fills more than there is would be
//! killed by the system without a word, so an allocation that cannot be backed is refused, and each GPU in use has an
//! equal part of what the node had when it began as its own.

use crate::driver::Driver;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// So much may be allocated between two looks at the host, at most.
const CREDIT_MAX: u64 = 64 << 20;

/// What backs device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// As much as the host has available.
    Host,
    /// So many bytes on the node.
    Fixed(u64),
    /// Nobody asks: for programs that touch little of what they allocate.
    Unlimited,
}

impl Backing {
    /// From `SIMCUDA_HOST_MIB`; what moves no data needs no memory.
    pub fn parse(text: Option<&str>, timing_only: bool) -> Result<Backing, String> {
        match text {
            Some("all") => Ok(Backing::Unlimited),
            Some(text) => match text.parse::<u32>() {
                Ok(mib) => Ok(Backing::Fixed(u64::from(mib) << 20)),
                Err(_) => Err(format!(
                    "SIMCUDA_HOST_MIB: \"{text}\" is neither a number of MiB nor \"all\""
                )),
            },
            None if timing_only => Ok(Backing::Unlimited),
            None => Ok(Backing::Host),
        }
    }

    /// Bytes that a node may have that begins now.
    pub fn at_first(self) -> u64 {
        match self {
            Backing::Host => available(),
            Backing::Fixed(bytes) => bytes,
            Backing::Unlimited => u64::MAX,
        }
    }
}

/// What one process knows of it.
#[derive(Debug)]
pub struct HostMemory {
    backing: Backing,
    /// Bytes that may be allocated before the host is looked at again.
    credit: AtomicU64,
    said: AtomicBool,
}

impl HostMemory {
    /// Nothing looked at yet.
    pub fn new(backing: Backing) -> HostMemory {
        HostMemory {
            backing,
            credit: AtomicU64::new(0),
            said: AtomicBool::new(false),
        }
    }

    /// Whether so much more than the node's processes have can be backed. The caller holds the node's lock.
    pub fn backs(&self, d: &Driver, size: u64) -> bool {
        let left = match self.backing {
            Backing::Unlimited => return true,
            Backing::Fixed(bytes) => bytes.saturating_sub(allocated(d)),
            Backing::Host => {
                let took = |credit: u64| credit.checked_sub(size);
                if self.credit.fetch_update(Relaxed, Relaxed, took).is_ok() {
                    return true;
                }
                let left = available().saturating_sub(untouched(d));
                let credit = (left.saturating_sub(size) / 64).min(CREDIT_MAX);
                self.credit.store(credit, Relaxed);
                left
            }
        };
        if size <= left {
            return true;
        }
        if !self.said.swap(true, Relaxed) {
            let (size, left) = (size.div_ceil(1 << 20), left >> 20);
            crate::report::complain(&format!(
                "the host's memory cannot back {size} MiB more of device memory, {left} MiB are left: allocate less, \
                 or set SIMCUDA_HOST_MIB=all if little of it is touched"
            ));
        }
        false
    }
}

/// Free bytes of a GPU that has `all`, of which `used` are taken.
pub fn free(d: &Driver, all: u64, used: u64) -> u64 {
    let node = d.job.shared().host_bytes.load(Relaxed);
    let part = node / u64::from(gpus_in_use(d).max(1));
    all.min(part)
        .saturating_sub(used)
        .min(node.saturating_sub(allocated(d)))
}

fn living(d: &Driver) -> impl Iterator<Item = &crate::shared::Proc> {
    let procs = d.job.shared().procs.iter();
    procs.filter(|p| p.pid.load(Relaxed) != 0)
}

fn gpus_in_use(d: &Driver) -> u32 {
    living(d)
        .fold(0, |gpus, p| gpus | p.contexts.load(Relaxed))
        .count_ones()
}

fn allocated_by(proc: &crate::shared::Proc) -> u64 {
    proc.used.iter().map(|used| used.load(Relaxed)).sum()
}

/// Bytes of device memory that the node's processes have.
fn allocated(d: &Driver) -> u64 {
    living(d).map(allocated_by).sum()
}

/// Those of them for which the host has not yet given a page, and will have to.
fn untouched(d: &Driver) -> u64 {
    let of_process = |proc: &crate::shared::Proc| {
        let file = if proc.pid.load(Relaxed) == std::process::id() {
            format!("/proc/self/fd/{}", d.job.memory.as_raw_fd())
        } else if d.job.sees(proc) {
            let (pid, fd) = (proc.pid.load(Relaxed), proc.memory_fd.load(Relaxed));
            format!("/proc/{pid}/fd/{fd}")
        } else {
            return 0;
        };
        let touched = fs::metadata(file).map_or(u64::MAX, |about| about.blocks() * 512);
        allocated_by(proc).saturating_sub(touched)
    };
    living(d).map(of_process).sum()
}

/// Bytes that the system can give without taking them from anybody, less a sixteenth that is left to it.
fn available() -> u64 {
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let mut bytes = u64::MAX;
    if let Ok(text) = fs::read_to_string("/proc/meminfo") {
        let row = |name| field(&text, name).map(|kib| kib << 10);
        bytes = row("MemAvailable:").unwrap_or(u64::MAX);
        // Where the system promises no more than it has, a page that exceeds the limit is a SIGBUS.
        if number("/proc/sys/vm/overcommit_memory") == Some(2) {
            if let (Some(limit), Some(promised)) = (row("CommitLimit:"), row("Committed_AS:")) {
                bytes = bytes.min(limit.saturating_sub(promised));
            }
        }
    }
    if let Ok(groups) = fs::read_to_string("/proc/self/cgroup") {
        bytes = bytes.min(group_room(Path::new("/sys/fs/cgroup"), &groups));
    }
    if bytes == u64::MAX {
        return bytes;
    }
    bytes - bytes / 16
}

/// The number behind a name in a table of lines.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// What the control groups of this process leave, `groups` being what the system says of them: the tightest on the way up.
fn group_room(root: &Path, groups: &str) -> u64 {
    let mut room = u64::MAX;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let (root, limit, usage, cached) = if controllers.is_empty() {
            let cached = ["inactive_file ", "active_file "];
            (root.to_owned(), "memory.max", "memory.current", cached)
        } else if controllers.split(',').any(|name| name == "memory") {
            let cached = ["total_inactive_file ", "total_active_file "];
            let files = ("memory.limit_in_bytes", "memory.usage_in_bytes");
            (root.join("memory"), files.0, files.1, cached)
        } else {
            continue;
        };
        let group = root.join(path.trim_start_matches('/'));
        // In a container the path may be the host's, which is not there: the root is the container's own group then.
        for folder in group.ancestors().take_while(|at| at.starts_with(&root)) {
            let number = |file: &str| -> Option<u64> {
                fs::read_to_string(folder.join(file))
                    .ok()?
                    .trim()
                    .parse()
                    .ok()
            };
            let (Some(limit), Some(usage)) = (number(limit), number(usage)) else {
                continue;
            };
            let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
            let cached: u64 = cached.iter().filter_map(|name| field(&stat, name)).sum();
            room = room.min(limit.saturating_sub(usage.saturating_sub(cached)));
        }
    }
    room
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_is_a_number_or_all() {
        let parse = |text| Backing::parse(text, false);
        assert_eq!(parse(None), Ok(Backing::Host));
        assert_eq!(parse(Some("all")), Ok(Backing::Unlimited));
        assert_eq!(parse(Some("3")), Ok(Backing::Fixed(3 << 20)));
        assert_eq!(Backing::parse(None, true), Ok(Backing::Unlimited));
        for bad in ["-1", "3G", "none"] {
            assert!(parse(Some(bad)).unwrap_err().contains(bad), "{bad}");
        }
    }

    /// Both kinds of control groups, as the kernel's documentation lays them out.
    #[test]
    fn the_tightest_group_on_the_way_up_counts() {
        let folder = tempfile::tempdir().unwrap();
        let write = |at: &str, files: &[(&str, &str)]| {
            let at = folder.path().join(at);
            fs::create_dir_all(&at).unwrap();
            for (name, text) in files {
                fs::write(at.join(name), text).unwrap();
            }
        };
        let room = |groups| group_room(folder.path(), groups);
        write(
            "job/step",
            &[("memory.max", "max\n"), ("memory.current", "700\n")],
        );
        assert_eq!(room("0::/job/step\n"), u64::MAX);
        let stat = "anon 1\nactive_file 50\ninactive_file 150\n";
        write(
            "job",
            &[
                ("memory.max", "1000\n"),
                ("memory.current", "900\n"),
                ("memory.stat", stat),
            ],
        );
        assert_eq!(room("0::/job/step\n"), 300);
        write(
            "memory/old",
            &[
                ("memory.limit_in_bytes", "500\n"),
                ("memory.usage_in_bytes", "400\n"),
            ],
        );
        assert_eq!(room("3:cpu:/old\n9:memory:/old\n0::/job\n"), 100);
        assert_eq!(room("9:memory:/not/there\n"), u64::MAX);
    }
}
