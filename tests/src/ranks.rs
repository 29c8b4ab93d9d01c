//! The ranks of a job that is running, from outside: found by their environment, stopped and ended by signals, and
//! looked at through the segments that they share.

use anabranch_engine::node::{Asked, Slot, SlotState, View};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// A rank that runs.
#[derive(Clone, Copy, Debug)]
pub struct Rank {
    pid: libc::pid_t,
}

/// Name of the library's helper thread.
const HELPER: &str = "anabranch";

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

    /// Processor time that the library's helper thread has taken so far.
    pub fn helper_time(&self) -> Option<Duration> {
        let threads = fs::read_dir(format!("/proc/{}/task", self.pid)).ok()?;
        let helper = threads.flatten().map(|thread| thread.path()).find(|path| {
            fs::read_to_string(path.join("comm")).is_ok_and(|name| name.trim_end() == HELPER)
        })?;
        let stat = fs::read_to_string(helper.join("stat")).ok()?;
        // Behind the name: state, and from the twelfth on user and system time, in ticks of 10 ms.
        let mut times = stat.rsplit_once(") ")?.1.split(' ').skip(11);
        let mut ticks = || times.next()?.parse::<u64>().ok();
        Some(Duration::from_millis(10 * (ticks()? + ticks()?)))
    }

    /// Files of the library's in /dev/shm that it has open or mapped.
    pub fn shared_files(&self) -> BTreeSet<PathBuf> {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid)).unwrap_or_default();
        let mapped = maps.lines().filter_map(|line| line.split(' ').next_back());
        let mut files: BTreeSet<PathBuf> = mapped.map(PathBuf::from).collect();
        let open = fs::read_dir(format!("/proc/{}/fd", self.pid));
        let open = open.into_iter().flatten().flatten();
        files.extend(open.filter_map(|entry| fs::read_link(entry.path()).ok()));
        files.retain(|file| file.to_string_lossy().starts_with("/dev/shm/anabranch-"));
        files
    }

    /// Names in /dev/shm of files of the library's that it has open. Not by the links of what is open: who has made a file
    /// has it open under no name.
    pub fn named_files(&self) -> BTreeSet<PathBuf> {
        let identity = |path: &Path| {
            let about = fs::metadata(path).ok()?;
            Some((about.dev(), about.ino()))
        };
        let paths = |folder: &str| {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            entries.map(|entry| entry.path())
        };
        let open: BTreeSet<_> = paths(&format!("/proc/{}/fd", self.pid))
            .filter_map(|path| identity(&path))
            .collect();
        let ours = |path: &PathBuf| path.to_string_lossy().starts_with("/dev/shm/anabranch-");
        let named = paths("/dev/shm").filter(ours);
        named
            .filter(|path| identity(path).is_some_and(|identity| open.contains(&identity)))
            .collect()
    }

    /// The segment that it shares with the other ranks of its node.
    pub fn segment(&self) -> Option<Segment> {
        for entry in fs::read_dir(format!("/proc/{}/fd", self.pid))
            .ok()?
            .flatten()
        {
            let target = fs::read_link(entry.path()).unwrap_or_default();
            if target.as_os_str() != "/memfd:anabranch (deleted)" {
                continue;
            }
            let file = OpenOptions::new().read(true).write(true).open(entry.path());
            let segment = Segment::new(file.ok()?);
            // It may be about to map another rank's.
            let is_own = |segment: &Segment| segment.view.pid() as libc::pid_t == self.pid;
            if let Some(segment) = segment.filter(is_own) {
                return Some(segment);
            }
        }
        None
    }
}

/// A segment, from outside.
#[derive(Debug)]
pub struct Segment {
    file: File,
    view: View,
}

/// A message of a segment's owner: which slot it has, and the nonce of that use.
pub type Posted = (u32, u64);

impl Segment {
    fn new(file: File) -> Option<Segment> {
        let bytes = file.metadata().ok()?.len();
        let view = View::look(file.as_fd(), bytes).ok()?;
        Some(Segment { file, view })
    }

    fn slots(&self) -> impl Iterator<Item = &Slot> {
        (0..).map_while(|index| self.view.slot(index))
    }

    /// How many slots its owner has in use or had.
    pub fn slot_count(&self) -> u64 {
        self.slots().count() as u64
    }

    /// Where one of its slots lies, bytes.
    pub fn slot_at(&self, slot: u64) -> u64 {
        self.view.layout().slots_offset() + slot * size_of::<Slot>() as u64
    }

    /// Messages whose descriptor is out and which are not finished, by state: posted, claimed, wanted through host
    /// memory, hosted.
    pub fn unfinished(&self) -> [usize; 4] {
        let mut counts = [0; 4];
        for state in self
            .slots()
            .filter_map(|slot| slot.state(slot.nonce()?).ok())
        {
            if let Some(count) = (state as usize)
                .checked_sub(1)
                .and_then(|at| counts.get_mut(at))
            {
                *count += 1;
            }
        }
        counts
    }

    /// Messages of its owner's that come over several paths: claimed, and a part in them was offered to it.
    fn over_several(&self) -> impl Iterator<Item = (Posted, Asked)> + '_ {
        (0..).zip(self.slots()).filter_map(|(index, slot)| {
            let nonce = slot.nonce()?;
            let is_claimed = slot.state(nonce) == Ok(SlotState::Claimed);
            let asked = slot.offered(nonce).filter(|_| is_claimed)?;
            Some(((index, nonce), asked))
        })
    }

    /// How many of those there are.
    pub fn count_over_several(&self) -> usize {
        self.over_several().count()
    }

    /// One of those to the owner of `receiver` of which its sender has begun with chunks that it has not brought yet.
    pub fn owed_to(&self, receiver: &Segment) -> Option<Posted> {
        let gpu_page = receiver.view.gpu_page()?;
        let is_owed = |asked: Asked| {
            let offer = gpu_page.offer(asked.index)?;
            let mut tracks = (0..offer.len(asked.tag).ok()?)
                .filter_map(|number| offer.staged_part(asked.tag, number));
            Some(tracks.any(|track| track.is_being_filled()))
        };
        let (posted, _) = self
            .over_several()
            .find(|(_, asked)| is_owed(*asked) == Some(true))?;
        Some(posted)
    }

    /// Receives of its owner's to which a sender writes at once: what it leaves of the beginning of each, bytes.
    pub fn written_at_once(&self) -> Vec<u64> {
        let gpu_page = self.view.gpu_page();
        let invitations = gpu_page
            .into_iter()
            .flat_map(|gpu_page| (0..).map_while(|line| gpu_page.rtr(line)));
        invitations
            .filter(|invitation| invitation.is_taken())
            .map(|invitation| invitation.leaves())
            .collect()
    }

    /// Whether the receiver still brings a message that it has claimed.
    pub fn is_claimed(&self, (slot, nonce): Posted) -> bool {
        let slot = self.view.slot(slot);
        slot.is_some_and(|slot| slot.state(nonce) == Ok(SlotState::Claimed))
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
