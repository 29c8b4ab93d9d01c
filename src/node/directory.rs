//! The directory of a job's ranks on one node: one page in `/dev/shm`, the only thing that has a name.
//!
//! Every registered rank holds a shared `flock` on it, which the kernel gives back when the rank dies. A
//! directory that can be locked exclusively belongs to a dead job, whatever its contents. The name always
//! leads to a complete page, since it is linked only after the page was written.

use super::map::Mapping;
use super::sys::{self, GuardedFd};
use super::wait::Backoff;
use super::{proc, NodeError, PROTOCOL_VERSION};
use rustix::fs::{linkat, AtFlags, CWD};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Size of the page, bytes.
const DIRECTORY_BYTES: u64 = 4096;
/// Ranks that one directory can hold.
pub const ROWS: usize = 252;
const MAGIC: u64 = u64::from_le_bytes(*b"anabdir\0");
/// Attempts to open or create before giving up. An attempt fails only if another rank made progress.
const ATTEMPTS_MAX: u32 = 16;
/// Rounds of waiting for a lock that others hold for a moment.
const LOCK_ROUNDS_MAX: u32 = 400;
/// Entries of `/dev/shm` that are looked at when dead jobs' directories are removed.
const SCAN_MAX: usize = 4096;

#[repr(C)]
struct Page {
    magic: AtomicU64,
    version: AtomicU32,
    /// Changes with every registration and departure.
    generation: AtomicU32,
    job: AtomicU64,
    device_in_use: AtomicU32,
    /// One more than the rank that measures now; 0 if none does.
    measuring: AtomicU32,
    reserved: [AtomicU32; 8],
    rows: [RowCells; ROWS],
}

super::map::shared!(Page);

/// `who`: pid in the high half, world rank in the low half; 0 is a free row. `what`: start time's low half
/// high, memfd number, protocol version; 0 while the row is being written.
#[repr(C)]
struct RowCells {
    who: AtomicU64,
    what: AtomicU64,
}

const _: () = assert!(size_of::<Page>() as u64 == DIRECTORY_BYTES);

/// A registered rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Pid.
    pub pid: u32,
    /// Rank in MPI_COMM_WORLD.
    pub world_rank: u32,
    /// Start time, low 32 bits.
    pub start_low: u32,
    /// Number of its memfd.
    pub memfd: u16,
    /// Protocol that it speaks.
    pub version: u16,
}

impl Row {
    fn who(&self) -> u64 {
        (u64::from(self.pid) << 32) | u64::from(self.world_rank)
    }

    fn what(&self) -> u64 {
        (u64::from(self.start_low) << 32) | (u64::from(self.memfd) << 16) | u64::from(self.version)
    }

    fn unpack(who: u64, what: u64) -> Option<Self> {
        let row = Self {
            pid: (who >> 32) as u32,
            world_rank: who as u32,
            start_low: (what >> 32) as u32,
            memfd: (what >> 16) as u16,
            version: what as u16,
        };
        (who != 0 && what != 0).then_some(row)
    }

    fn is_alive(&self) -> bool {
        proc::is_alive_low32(self.pid, self.start_low)
    }
}

/// The directory of this rank's job. Its path is empty where it has no name.
#[derive(Debug)]
pub struct Directory {
    map: Mapping,
    file: GuardedFd,
    path: PathBuf,
}

impl Directory {
    /// Opens or creates the directory of a job, and keeps it locked as long as this lives.
    pub fn open(folder: &Path, job: u64) -> Result<Self, NodeError> {
        let path = folder.join(format!("{}{job:016x}", prefix()));
        for _ in 0..ATTEMPTS_MAX {
            match Self::create(folder, &path, job) {
                Ok(directory) => {
                    remove_dead(folder, &path);
                    return Ok(directory);
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(NodeError::directory(&path, error)),
            }
            if let Some(directory) = Self::join(&path, job)? {
                return Ok(directory);
            }
        }
        Err(NodeError::directory(
            &path,
            io::Error::from_raw_os_error(libc::EAGAIN),
        ))
    }

    /// A directory of this process alone. No other rank ever finds it, because it has no name.
    pub fn alone(job: u64) -> Result<Self, NodeError> {
        let failed = |error| NodeError::Segment(error);
        let file = sys::memfd(c"anabranch-alone").map_err(failed)?;
        std::fs::File::from(file.try_clone().map_err(failed)?)
            .set_len(DIRECTORY_BYTES)
            .map_err(failed)?;
        Ok(Self {
            map: fresh_page(&file, job).map_err(failed)?,
            file: GuardedFd::new(file, sys::FD_MINIMUM).map_err(failed)?,
            path: PathBuf::new(),
        })
    }

    fn create(folder: &Path, path: &Path, job: u64) -> io::Result<Self> {
        // Asked first, because it is the common case: only one rank of a node creates the directory.
        if path.symlink_metadata().is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let (file, temporary) = unnamed_file(folder)?;
        let created = (|| {
            let map = fresh_page(&file, job)?;
            if !sys::try_lock(file.as_fd(), false)? {
                return Err(io::Error::from_raw_os_error(libc::EAGAIN));
            }
            link(&file, temporary.as_deref(), path)?;
            Ok(map)
        })();
        if let Some(temporary) = temporary {
            // A failure leaves one empty name behind, which the next job removes.
            let _ = std::fs::remove_file(temporary);
        }
        let map = created?;
        Ok(Self {
            map,
            file: GuardedFd::new(file, sys::FD_MINIMUM)?,
            path: path.to_owned(),
        })
    }

    /// Joins a directory that others have made. `None`: it went away or was a dead job's; try again.
    fn join(path: &Path, job: u64) -> Result<Option<Self>, NodeError> {
        let failed = |error| NodeError::directory(path, error);
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
        let file = match std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(flags)
            .open(path)
        {
            Ok(file) => OwnedFd::from(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) if is_foreign(&error) => return Err(NodeError::Untrusted(path.to_owned())),
            Err(error) => return Err(failed(error)),
        };
        let stat = sys::file_stat(file.as_raw_fd()).map_err(failed)?;
        if !stat.is_private() {
            return Err(NodeError::Untrusted(path.to_owned()));
        }
        if sys::try_lock(file.as_fd(), true).map_err(failed)? {
            remove_if_same(path, stat.identity);
            return Ok(None);
        }
        if !lock_shared(&file).map_err(failed)? {
            return Ok(None);
        }
        let stat = sys::file_stat(file.as_raw_fd()).map_err(failed)?;
        if stat.links == 0 {
            // It was removed while we waited: by the last rank, or (early) because all expected ranks have
            // registered.
            return Ok(None);
        }
        if stat.size != DIRECTORY_BYTES {
            return Err(NodeError::Foreign(path.to_owned()));
        }
        // A file with a hole would be a SIGBUS on a full file system.
        sys::allocate(file.as_fd(), 0, DIRECTORY_BYTES).map_err(failed)?;
        let map = Mapping::new(file.as_fd(), DIRECTORY_BYTES).map_err(failed)?;
        let page = page(&map);
        let is_ours = page.magic.load(Ordering::Acquire) == MAGIC
            && page.version.load(Ordering::Relaxed) == u32::from(PROTOCOL_VERSION)
            && page.job.load(Ordering::Relaxed) == job;
        if !is_ours {
            return Err(NodeError::Foreign(path.to_owned()));
        }
        Ok(Some(Self {
            map,
            file: GuardedFd::new(file, sys::FD_MINIMUM).map_err(failed)?,
            path: path.to_owned(),
        }))
    }

    fn page(&self) -> &Page {
        page(&self.map)
    }

    /// What others may write to.
    #[cfg(test)]
    pub(super) fn map(&self) -> &Mapping {
        &self.map
    }

    /// Claims a row and fills it. Returns the generation from which on others see it. A row of a dead process is
    /// taken over. Refused if a living process has the rank.
    pub fn register(&self, row: Row) -> Result<u32, NodeError> {
        let rows = &self.page().rows;
        let index = rows
            .iter()
            .position(|cells| claim(cells, &row))
            .ok_or(NodeError::Full)?;
        rows[index].what.store(row.what(), Ordering::Release);
        // We look for a rival after publishing: of two processes that claim one rank, at least one sees the
        // other.
        let rival = self.rows().find(|other| {
            other.world_rank == row.world_rank && other.pid != row.pid && other.is_alive()
        });
        let before = self.page().generation.fetch_add(1, Ordering::AcqRel);
        if let Some(rival) = rival {
            self.unregister(row);
            return Err(NodeError::RankTaken {
                world_rank: row.world_rank,
                pid: rival.pid,
            });
        }
        Ok(before.wrapping_add(1))
    }

    /// Gives the row back.
    pub fn unregister(&self, row: Row) {
        for cells in &self.page().rows {
            let is_ours = cells.who.load(Ordering::Acquire) == row.who();
            if is_ours && cells.what.swap(0, Ordering::AcqRel) == row.what() {
                cells.who.store(0, Ordering::Release);
            }
        }
        self.page().generation.fetch_add(1, Ordering::AcqRel);
    }

    /// Removes the name if no other rank holds the directory any more. Gives the lock up.
    pub fn leave(&self) {
        if let Ok(file) = self.file.get() {
            if sys::try_lock(file, true).unwrap_or(false) {
                self.remove_name();
            }
            sys::unlock(file);
        }
    }

    /// Removes the name, because all ranks that look for it have come.
    pub fn remove_name(&self) {
        remove_if_same(&self.path, self.file.identity());
    }

    /// Changes with every registration and departure.
    pub fn generation(&self) -> u32 {
        self.page().generation.load(Ordering::Acquire)
    }

    /// All complete rows, dead or alive.
    pub fn rows(&self) -> impl Iterator<Item = Row> + '_ {
        self.page().rows.iter().filter_map(|cells| {
            let who = cells.who.load(Ordering::Acquire);
            let what = cells.what.load(Ordering::Acquire);
            // Unchanged: the two halves belong together (or come from a take-over, and fail the check of the
            // segment).
            (cells.who.load(Ordering::Acquire) == who)
                .then(|| Row::unpack(who, what))
                .flatten()
        })
    }

    /// A rank of the job has used device memory on this node.
    pub fn device_in_use(&self) -> bool {
        self.page().device_in_use.load(Ordering::Relaxed) != 0
    }

    /// Passes the turn to measure from its holder (one more than a rank, 0 for nobody) to another. Returns
    /// who has it after that.
    pub fn pass_turn(&self, from: u32, to: u32) -> u32 {
        let turn = &self.page().measuring;
        match turn.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => to,
            Err(other) => other,
        }
    }

    /// Says that a rank has used device memory. True if this is the first time.
    pub fn set_device_in_use(&self) -> bool {
        self.page().device_in_use.swap(1, Ordering::AcqRel) == 0
    }
}

/// Takes a free row, or a dead process's.
fn claim(cells: &RowCells, row: &Row) -> bool {
    let who = cells.who.load(Ordering::Acquire);
    if who != 0 {
        let what = cells.what.load(Ordering::Acquire);
        // A half-written row has no start time yet. Its writer is dead only if no process has its pid.
        let is_alive = match Row::unpack(who, what) {
            Some(other) => other.is_alive(),
            None => proc::stat((who >> 32) as u32).is_some_and(|stat| stat.is_running()),
        };
        if is_alive {
            return false;
        }
    }
    let claimed = cells
        .who
        .compare_exchange(who, row.who(), Ordering::AcqRel, Ordering::Relaxed)
        .is_ok();
    if claimed {
        cells.what.store(0, Ordering::Release);
    }
    claimed
}

/// Makes a file an empty directory of a job.
fn fresh_page(file: &OwnedFd, job: u64) -> io::Result<Mapping> {
    sys::allocate(file.as_fd(), 0, DIRECTORY_BYTES)?;
    let map = Mapping::new(file.as_fd(), DIRECTORY_BYTES)?;
    let page = page(&map);
    page.version
        .store(u32::from(PROTOCOL_VERSION), Ordering::Relaxed);
    page.job.store(job, Ordering::Relaxed);
    page.magic.store(MAGIC, Ordering::Release);
    Ok(map)
}

fn page(map: &Mapping) -> &Page {
    map.object(0).expect("a directory is mapped in full")
}

fn prefix() -> String {
    format!("anabranch-{}-", sys::user())
}

/// Whether the system says so of what is no file of this user's: another user's that is closed, a link, a
/// folder, a socket.
fn is_foreign(error: &io::Error) -> bool {
    let codes = [
        libc::EACCES,
        libc::EPERM,
        libc::ELOOP,
        libc::EISDIR,
        libc::ENXIO,
    ];
    error
        .raw_os_error()
        .is_some_and(|code| codes.contains(&code))
}

/// A file without a name, or (on file systems that have none) with a temporary one.
fn unnamed_file(folder: &Path) -> io::Result<(OwnedFd, Option<PathBuf>)> {
    let options = || {
        let mut options = std::fs::OpenOptions::new();
        options.read(true).write(true).mode(0o600);
        options
    };
    let file = options()
        .custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC)
        .open(folder);
    if let Ok(file) = file {
        return Ok((file.into(), None));
    }
    let path = folder.join(format!("{}t{:016x}", prefix(), sys::random_u64()));
    let file = options()
        .create_new(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(&path)?;
    Ok((file.into(), Some(path)))
}

/// Gives the file its name, unless the name is taken.
fn link(file: &OwnedFd, temporary: Option<&Path>, path: &Path) -> io::Result<()> {
    if let Some(temporary) = temporary {
        return std::fs::hard_link(temporary, path);
    }
    // open(2) gives this as the way to name an O_TMPFILE file.
    let from = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(linkat(CWD, from, CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

/// Takes a shared lock. Others hold an exclusive one only for the moment in which they remove the name.
fn lock_shared(file: &OwnedFd) -> io::Result<bool> {
    let mut backoff = Backoff::sleeping(Duration::from_millis(1));
    while backoff.rounds() < LOCK_ROUNDS_MAX {
        if sys::try_lock(file.as_fd(), false)? {
            return Ok(true);
        }
        backoff.snooze();
    }
    Ok(false)
}

/// Removes a name that still leads to this file. Only holders of its exclusive lock, or of a complete job, do
/// so.
fn remove_if_same(path: &Path, identity: sys::FileIdentity) {
    if let Ok(found) = path.symlink_metadata() {
        if identity.is(found.dev(), found.ino()) {
            // Another rank may have been faster.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Removes directories of this user's dead jobs.
fn remove_dead(folder: &Path, own: &Path) {
    let prefix = prefix();
    let Ok(entries) = std::fs::read_dir(folder) else {
        return;
    };
    for entry in entries.take(SCAN_MAX).flatten() {
        let is_candidate = |name: &OsStr| name.as_encoded_bytes().starts_with(prefix.as_bytes());
        if is_candidate(&entry.file_name()) && entry.path() != own {
            remove_if_dead(&entry.path());
        }
    }
}

fn remove_if_dead(path: &Path) {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
    let Ok(file) = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(flags)
        .open(path)
    else {
        return;
    };
    let Ok(stat) = sys::file_stat(file.as_raw_fd()) else {
        return;
    };
    if !stat.is_private() || !sys::try_lock(file.as_fd(), true).unwrap_or(false) {
        return;
    }
    // If a program closes all file descriptors, its lock is gone while it lives. Its row still speaks for it.
    let has_living = living_rows(&file);
    if !has_living {
        log::info!("removing {}, left by a job that is gone", path.display());
        remove_if_same(path, stat.identity);
    }
}

/// Reads a directory that nobody holds. True if the process of some row lives all the same. It is read, not
/// mapped, because it may be cut short.
fn living_rows(file: &std::fs::File) -> bool {
    let mut bytes = [0_u8; size_of::<Page>()];
    if file.read_exact_at(&mut bytes, 0).is_err() || bytes[..8] != MAGIC.to_ne_bytes() {
        return false;
    }
    let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|index| bytes[at + index]));
    let first = std::mem::offset_of!(Page, rows);
    let mut offsets = (0..ROWS).map(|row| first + row * size_of::<RowCells>());
    offsets.any(|at| Row::unpack(word(at), word(at + 8)).is_some_and(|row| row.is_alive()))
}

#[cfg(test)]
#[path = "directory_tests.rs"]
mod tests;
