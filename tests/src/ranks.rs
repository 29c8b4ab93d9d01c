//! The ranks of a job that is running, from outside: found by their environment, stopped and ended by signals, and
//! looked at through the segments that they share.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// A rank that runs.
#[derive(Clone, Copy, Debug)]
pub struct Rank {
    pid: libc::pid_t,
}

/// The names under which launchers tell a process its rank.
const RANK_NAMES: [&str; 2] = ["OMPI_COMM_WORLD_RANK", "PMI_RANK"];

/// Waits until the rank of the job in `folder` runs `program`; `None` after `patience`.
pub fn find(folder: &Path, program: &str, rank: u32, patience: Duration) -> Option<Rank> {
    let mark = format!("SCRATCH={}", folder.display());
    let deadline = Instant::now() + patience;
    loop {
        for entry in fs::read_dir("/proc").ok()?.flatten() {
            let Some(pid) = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
            else {
                continue;
            };
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            if name.trim_end() != program {
                continue;
            }
            let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
            let has = |wanted: &str| {
                environment
                    .split(|byte| *byte == 0)
                    .any(|entry| entry == wanted.as_bytes())
            };
            if has(&mark) && RANK_NAMES.iter().any(|name| has(&format!("{name}={rank}"))) {
                return Some(Rank { pid });
            }
        }
        if Instant::now() > deadline {
            return None;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

impl Rank {
    /// Sends it a signal.
    pub fn signal(&self, number: i32) {
        // SAFETY: a plain system call; the process was seen to be one of this run's.
        unsafe { libc::kill(self.pid, number) };
    }

    /// Waits until it is stopped. False if it has ended.
    pub fn waits_stopped(&self) -> bool {
        for _ in 0..2000 {
            let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
            match stat.rsplit_once(") ").map(|(_, rest)| &rest[..1]) {
                Some("T") => return true,
                None | Some("Z" | "X") => return false,
                _ => thread::sleep(Duration::from_millis(1)),
            }
        }
        false
    }

    /// The segment that it shares with the other ranks of its node.
    pub fn segment(&self) -> Option<Segment> {
        for entry in fs::read_dir(format!("/proc/{}/fd", self.pid))
            .ok()?
            .flatten()
        {
            let target = fs::read_link(entry.path()).unwrap_or_default();
            if target.as_os_str() == "/memfd:anabranch (deleted)" {
                let file = OpenOptions::new().read(true).write(true).open(entry.path());
                return Segment::new(file.ok()?);
            }
        }
        None
    }
}

/// A segment as it lies in memory: header, cells, chunks, slots (`src/node/view.rs`).
#[derive(Debug)]
pub struct Segment {
    file: File,
    /// Where its slots start, bytes.
    pub slots_at: u64,
}

/// Size of a slot, bytes.
pub const SLOT_BYTES: u64 = 256;
/// Where a slot names what its receiver has offered.
const ASKED_AT: u64 = 232;

impl Segment {
    fn new(file: File) -> Option<Segment> {
        let mut header = [0; 64];
        file.read_exact_at(&mut header, 0).ok()?;
        if &header[..8] != b"anabsegm" {
            return None;
        }
        let word = |at: usize| {
            u64::from(u32::from_le_bytes([
                header[at],
                header[at + 1],
                header[at + 2],
                header[at + 3],
            ]))
        };
        let cells = (word(48) * word(52)).next_multiple_of(4096);
        let chunks = (word(40) * word(44)).next_multiple_of(4096);
        Some(Segment {
            file,
            slots_at: 4096 + cells + chunks,
        })
    }

    /// How many slots its owner has in use or had.
    pub fn slots(&self) -> u64 {
        let mut ready = [0; 4];
        match self.file.read_exact_at(&mut ready, 80) {
            Ok(()) => u64::from(u32::from_le_bytes(ready)),
            Err(_) => 0,
        }
    }

    /// Messages whose descriptor is out and which are not finished, by state: posted, claimed, wanted through host
    /// memory, hosted.
    pub fn unfinished(&self) -> [usize; 4] {
        let mut counts = [0; 4];
        for slot in 0..self.slots().min(1024) {
            let mut word = [0; 8];
            if self
                .file
                .read_exact_at(&mut word, self.slots_at + slot * SLOT_BYTES)
                .is_ok()
                && (1..=4).contains(&word[0])
            {
                counts[usize::from(word[0]) - 1] += 1;
            }
        }
        counts
    }

    /// Messages of its owner's that come over several paths: claimed, and a part in them was offered to it.
    pub fn over_several(&self) -> usize {
        let slots = 0..self.slots().min(1024);
        let is_offered = |slot: &u64| {
            let at = self.slots_at + slot * SLOT_BYTES;
            self.read::<1>(at) == [2] && self.read::<8>(at + ASKED_AT) != [0; 8]
        };
        slots.filter(is_offered).count()
    }

    /// Writes over a part of it.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        let _ = self.file.write_all_at(bytes, at);
    }

    /// Reads a part of it.
    pub fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        let _ = self.file.read_exact_at(&mut bytes, at);
        bytes
    }
}

/// Small random numbers from a seed that a failure names (xorshift).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// From a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound.max(1)
    }
}
