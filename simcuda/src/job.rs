//! The simulated node: one shared file a job, found by name, gone with its last process.
//!
//! Every process holds a shared `flock` on the file. Whoever gets the exclusive one knows that
//! no process of the job lives (the kernel drops a killed process's lock), and may start afresh
//! or remove it, so nothing leaks for longer than until the next start.
//!
//! Whether a process lives is asked of `/proc`, where a row's pid is one of this process's own pid namespace. The
//! processes of another one (a container) are asked by a record lock, which each holds on the byte of its row.

use crate::host::Backing;
use crate::shared::{Body, Proc, Shared, Stage, MAGIC, MAX_PROCS};
use core::ffi::c_int;
use rustix::fs::{flock, memfd_create, FlockOperation, MemfdFlags};
use rustix::process::getuid;
use rustix::thread::futex::{self, Timespec};
use std::ffi::CStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

/// This process's place in its node.
pub struct Job {
    shared: *const Shared,
    file: File,
    path: PathBuf,
    lock_path: PathBuf,
    /// Row of this process.
    pub slot: usize,
    /// Identity of this process, never reused.
    pub uid: u64,
    /// Pid namespace of this process.
    namespace: u64,
    /// This process's device memory, sparse; others open it through `/proc`.
    pub memory: OwnedFd,
}

// SAFETY: the mapping stays for the life of the process; `Shared` is atomics, and its body is
// only reached through `lock`.
unsafe impl Send for Job {}
// SAFETY: as above.
unsafe impl Sync for Job {}

/// Exclusive access to the node's tables.
pub struct Locked<'a> {
    job: &'a Job,
}

impl core::ops::Deref for Locked<'_> {
    type Target = Body;
    fn deref(&self) -> &Body {
        // SAFETY: the node's mutex is held for the life of `self`.
        unsafe { &*self.job.shared().body.get() }
    }
}

impl core::ops::DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Body {
        // SAFETY: the node's mutex is held for the life of `self`.
        unsafe { &mut *self.job.shared().body.get() }
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // SAFETY: this thread locked the mutex in `Job::lock`.
        unsafe { libc::pthread_mutex_unlock(self.job.shared().lock.get()) };
    }
}

impl Job {
    /// Joins the node called `name`, creating it when no process of it lives.
    pub fn join(name: &str, topology: u64, memory_bytes: u64, backing: Backing) -> io::Result<Job> {
        let hash = crate::topology::fnv1a(name.as_bytes());
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for folder in folders() {
            match join_in(&folder, hash, topology, memory_bytes, backing) {
                Ok(job) => return Ok(job),
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    /// The shared state.
    pub fn shared(&self) -> &Shared {
        // SAFETY: mapped for the life of the process with the size of `Shared`.
        unsafe { &*self.shared }
    }

    /// This process's row.
    pub fn me(&self) -> &Proc {
        &self.shared().procs[self.slot]
    }

    /// Virtual time in nanoseconds.
    pub fn now(&self) -> u64 {
        self.shared().clock.load(Acquire)
    }

    /// Takes the node's lock; what a dead holder left is tidied first.
    pub fn lock(&self) -> Locked<'_> {
        // SAFETY: initialised before MAGIC was stored, which `join_in` checked.
        let rc = unsafe { libc::pthread_mutex_lock(self.shared().lock.get()) };
        let mut locked = Locked { job: self };
        if rc == libc::EOWNERDEAD {
            self.reap(&mut locked);
            // SAFETY: this thread holds the inconsistent mutex.
            unsafe { libc::pthread_mutex_consistent(self.shared().lock.get()) };
        }
        locked
    }

    /// Frees what dead processes left behind.
    pub fn reap(&self, body: &mut Body) {
        for slot in 0..MAX_PROCS {
            let pid = self.shared().procs[slot].pid.load(Acquire);
            if pid != 0 && slot != self.slot && !self.lives(slot) {
                release(self.shared(), body, slot);
            }
        }
    }

    /// Whether the process of a row, other than this one, is still there.
    fn lives(&self, slot: usize) -> bool {
        let proc = &self.shared().procs[slot];
        if self.sees(proc) {
            return start_time(proc.pid.load(Acquire)) == Some(proc.started.load(Relaxed));
        }
        row_is_locked(self.file.as_raw_fd(), slot)
    }

    /// Whether the pid of a row names that process here, too: it is in the same pid namespace.
    pub fn sees(&self, proc: &Proc) -> bool {
        proc.namespace.load(Relaxed) == self.namespace
    }

    /// Leaves the node; the last process removes the file.
    pub fn leave(&self) {
        let guard = global_lock(&self.lock_path);
        {
            let mut body = self.lock();
            release(self.shared(), &mut body, self.slot);
            // Fails only where there was no lock.
            let _ = set_row_lock(self.file.as_raw_fd(), self.slot, libc::F_UNLCK);
        }
        if flock(&self.file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = std::fs::remove_file(&self.path);
            if guard.is_ok() && self.path.parent().is_some_and(|folder| !others(folder)) {
                let _ = std::fs::remove_file(&self.lock_path);
            }
        }
    }
}

/// True when this user has another node in the folder.
fn others(folder: &Path) -> bool {
    let prefix = format!("simcuda-{}-", getuid().as_raw());
    let mut entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.any(|e| e.file_name().to_string_lossy().starts_with(&prefix))
}

/// Takes a process out of all tables.
fn release(shared: &Shared, body: &mut Body, slot: usize) {
    let proc = &shared.procs[slot];
    let uid = proc.uid.load(Relaxed);
    crate::clock::remove(body, |f| usize::from(f.proc) == slot);
    let high = body.exports_high as usize;
    for export in &mut body.exports[..high] {
        export.mappers[slot] = 0;
        export.freed |= export.owner == uid;
        let alive = |uid| {
            shared
                .procs
                .iter()
                .any(|p| p.uid.load(Relaxed) == uid && p.pid.load(Relaxed) != 0)
        };
        if export.freed && !export.mapped() && (export.owner == uid || !alive(export.owner)) {
            export.buffer = 0;
        }
    }
    body.drop_records_of(slot);
    for used in &proc.used {
        used.store(0, Relaxed);
    }
    proc.contexts.store(0, Relaxed);
    proc.unapplied.store(0, Relaxed);
    proc.awake.store(0, Relaxed);
    proc.inside.store(0, Relaxed);
    proc.parked.store(0, Relaxed);
    proc.oldest_known.store(u64::MAX, Relaxed);
    proc.pid.store(0, Release);
}

/// `/dev/shm`, and where it is too small or absent, the folder for temporary files.
fn folders() -> Vec<PathBuf> {
    vec![PathBuf::from("/dev/shm"), std::env::temp_dir()]
}

/// The byte of a row, for record locks. Those are independent of `flock`, a child that is forked has none of them, and
/// the kernel drops them with their process.
fn byte_of(slot: usize, operation: c_int) -> libc::flock {
    // SAFETY: plain old data; all zero is a valid value.
    let mut lock: libc::flock = unsafe { core::mem::zeroed() };
    lock.l_type = operation as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = slot as libc::off_t;
    lock.l_len = 1;
    lock
}

fn set_row_lock(fd: c_int, slot: usize, operation: c_int) -> io::Result<()> {
    let lock = byte_of(slot, operation);
    // SAFETY: plain system call on a descriptor that the caller holds; reads the struct.
    if unsafe { libc::fcntl(fd, libc::F_SETLK, &raw const lock) } == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}

/// Whether another process holds the byte. Yes where that cannot be told: nobody's row is taken away by mistake.
fn row_is_locked(fd: c_int, slot: usize) -> bool {
    let mut lock = byte_of(slot, libc::F_WRLCK);
    // SAFETY: plain system call on a descriptor that the caller holds; writes the struct.
    let asked = unsafe { libc::fcntl(fd, libc::F_GETLK, &raw mut lock) };
    asked != 0 || lock.l_type != libc::F_UNLCK as libc::c_short
}

/// Inode number of this process's pid namespace; 0 where there is no such thing.
fn pid_namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |about| about.ino())
}

/// A file of this user's that no other user may open. Anybody may have laid another one there.
fn open(path: &Path) -> io::Result<File> {
    let shown = path.display();
    let foreign =
        format!("{shown} is not a private file of this user; remove it, or have its owner do so");
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let opened = options.mode(0o600).custom_flags(flags).open(path);
    let file = match opened {
        Ok(file) => file,
        Err(_) if path.symlink_metadata().is_ok() => return Err(io::Error::other(foreign)),
        Err(error) => return Err(error),
    };
    let about = file.metadata()?;
    let is_closed = about.is_file() && about.mode() & 0o077 == 0;
    match is_closed && about.uid() == getuid().as_raw() {
        true => Ok(file),
        false => Err(io::Error::other(foreign)),
    }
}

/// Serialises joining, leaving and reclaiming for this user.
fn global_lock(path: &Path) -> io::Result<File> {
    loop {
        let file = open(path)?;
        flock(&file, FlockOperation::LockExclusive)?;
        // The last process of a user removes the file: a lock on a removed one locks nobody out.
        if file.metadata()?.nlink() > 0 {
            return Ok(file);
        }
    }
}

fn join_in(
    folder: &Path,
    hash: u64,
    topology: u64,
    memory_bytes: u64,
    backing: Backing,
) -> io::Result<Job> {
    let uid = getuid().as_raw();
    let lock_path = folder.join(format!("simcuda-{uid}.lock"));
    let guard = global_lock(&lock_path)?;
    reclaim(folder, &format!("simcuda-{uid}-"));
    let path = folder.join(format!("simcuda-{uid}-{hash:016x}"));
    let file = open(&path)?;
    let size = core::mem::size_of::<Shared>();
    let fresh = flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
    if fresh {
        file.set_len(0)?;
        // SAFETY: plain system call; allocates in full, so a full file system shows here and not as a SIGBUS.
        let rc = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, size as libc::off_t) };
        if rc != 0 {
            let _ = std::fs::remove_file(&path);
            return Err(io::Error::from_raw_os_error(rc));
        }
    }
    flock(&file, FlockOperation::LockShared)?;
    const OTHER: &str = "the node's file has another layout: another simcuda version is running";
    if file.metadata()?.len() != size as u64 {
        return Err(io::Error::other(OTHER));
    }
    // SAFETY: a fresh shared mapping of a file of this size.
    let shared = unsafe { map_shared(file.as_raw_fd(), 0, size) }?.cast::<Shared>();
    // SAFETY: mapped above; only this process uses a fresh file while the global lock is held.
    let state = unsafe { &*shared };
    if fresh {
        init(state, topology, backing);
    }
    if state.magic.load(Acquire) != MAGIC {
        return Err(io::Error::other(OTHER));
    }
    if state.topology.load(Relaxed) != topology {
        return Err(io::Error::other(
            "another process of this job uses another topology (SIMCUDA_TOPOLOGY, SIMCUDA_GPUS)",
        ));
    }
    let memory = memory_file(memory_bytes)?;
    let mut job = Job {
        shared,
        file,
        path,
        lock_path,
        slot: usize::MAX,
        uid: 0,
        namespace: pid_namespace(),
        memory,
    };
    job.claim()?;
    drop(guard);
    Ok(job)
}

impl Job {
    fn claim(&mut self) -> io::Result<()> {
        let mut body = self.lock();
        self.reap(&mut body);
        let is_ours = |slot: &usize| {
            let is_free = self.shared().procs[*slot].pid.load(Relaxed) == 0;
            is_free && set_row_lock(self.file.as_raw_fd(), *slot, libc::F_WRLCK).is_ok()
        };
        let slot = (0..MAX_PROCS).find(is_ours);
        let slot = slot.ok_or_else(|| {
            io::Error::other(format!("the node already has {MAX_PROCS} processes"))
        })?;
        body.next_uid += 1;
        let uid = body.next_uid;
        let proc = &self.shared().procs[slot];
        proc.namespace.store(self.namespace, Relaxed);
        proc.uid.store(uid, Relaxed);
        proc.started
            .store(start_time(std::process::id()).unwrap_or(0), Relaxed);
        proc.host_time.store(self.now(), Relaxed);
        self.shared().known.fetch_max(self.now(), Relaxed);
        proc.memory_fd
            .store(self.memory.as_raw_fd() as u32, Relaxed);
        proc.oldest_known.store(u64::MAX, Relaxed);
        proc.idle_polls.store(0, Relaxed);
        proc.worker_cpu.store(0, Relaxed);
        proc.active_cpu.store(0, Relaxed);
        proc.awake.store(0, Relaxed);
        proc.active_at.store(real_ns(), Relaxed);
        proc.pid.store(std::process::id(), Release);
        drop(body);
        self.slot = slot;
        self.uid = uid;
        Ok(())
    }
}

fn init(state: &Shared, topology: u64, backing: Backing) {
    // SAFETY: attributes and mutex are initialised before use; the memory is shared between processes.
    unsafe {
        let mut attributes = core::mem::zeroed();
        libc::pthread_mutexattr_init(&raw mut attributes);
        libc::pthread_mutexattr_setpshared(&raw mut attributes, libc::PTHREAD_PROCESS_SHARED);
        libc::pthread_mutexattr_setrobust(&raw mut attributes, libc::PTHREAD_MUTEX_ROBUST);
        libc::pthread_mutex_init(state.lock.get(), &raw const attributes);
        libc::pthread_mutexattr_destroy(&raw mut attributes);
    }
    state.topology.store(topology, Relaxed);
    state.host_bytes.store(backing.at_first(), Relaxed);
    state.next_buffer.store(1, Relaxed);
    state.next_stream.store(1, Relaxed);
    state.observations.store(1, Relaxed);
    state.magic.store(MAGIC, Release);
}

/// Removes the files of jobs of which no process lives.
fn reclaim(folder: &Path, prefix: &str) {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        if !entry.file_name().to_string_lossy().starts_with(prefix) {
            continue;
        }
        let Ok(file) = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NOFOLLOW)
            .open(entry.path())
        else {
            continue;
        };
        let own = file.metadata().is_ok_and(|m| m.uid() == getuid().as_raw());
        if own && flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

fn memory_file(bytes: u64) -> io::Result<OwnedFd> {
    let file = nameless_file(c"simcuda-memory")?;
    file.set_len(bytes)?;
    Ok(file.into())
}

/// An empty file in memory, closed when another program is run.
pub fn nameless_file(name: &CStr) -> io::Result<File> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC)?;
    Ok(File::from(file))
}

/// Maps `size` bytes of `fd` for reading and writing.
///
/// # Safety
/// `fd` must be open for both and stay as long as `size` says.
pub unsafe fn map_shared(fd: c_int, offset: u64, size: usize) -> io::Result<*mut u8> {
    // SAFETY: a new mapping at an address of the kernel's choice.
    let p = unsafe {
        libc::mmap(
            core::ptr::null_mut(),
            size,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_NORESERVE,
            fd,
            offset as libc::off_t,
        )
    };
    if p == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(p.cast())
}

/// Start time of a process in clock ticks, `None` when it is gone (a zombie is gone too). It is read of its first
/// thread: an emulator may show a process an invented `/proc/<pid>/stat` (the user mode of qemu 7.2 does).
pub fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/stat")).ok()?;
    let rest = &stat[stat.rfind(')')? + 2..];
    let fields: Vec<&str> = rest.split(' ').collect();
    if fields.first() == Some(&"Z") {
        return None;
    }
    fields.get(19)?.parse().ok()
}

/// CLOCK_MONOTONIC, nanoseconds; the same for all processes.
pub fn real_ns() -> u64 {
    let mut t = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes the struct it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// CPU time that a process has used, nanoseconds; `None` when it is gone. Exact also while it runs.
pub fn cpu_ns(pid: u32) -> Option<u64> {
    // The kernel's encoding of a process's CPU clock (clock_getcpuclockid(3)); 2 is the scheduler's count.
    let clock = (!(pid as libc::clockid_t) << 3) | 2;
    let mut t = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes the struct it is given.
    let rc = unsafe { libc::clock_gettime(clock, &raw mut t) };
    (rc == 0).then(|| t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
}

/// CPU time that the calling thread has used, nanoseconds.
pub fn thread_cpu_ns() -> u64 {
    let mut t = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes the struct it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// State of a thread: `R` where it wants a core (running or waiting for one), `T` where it was stopped.
pub fn thread_state(pid: u32, thread: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.chars().next()
}

/// True when a process was stopped, by a signal or by a debugger.
pub fn stopped(pid: u32) -> bool {
    matches!(thread_state(pid, pid), Some('T' | 't'))
}

/// Sleeps while `word` is `seen`, at most `timeout_ns`.
pub fn futex_wait(word: &std::sync::atomic::AtomicU32, seen: u32, timeout_ns: u64) {
    let timeout = Timespec::try_from(Duration::from_nanos(timeout_ns)).ok();
    // A wake-up, a timeout and a changed value all just return.
    let _ = futex::wait(word, futex::Flags::empty(), seen, timeout.as_ref());
}

/// Changes `word` and wakes all that sleep on it.
pub fn futex_wake(word: &std::sync::atomic::AtomicU32) {
    word.fetch_add(1, Release);
    let _ = futex::wake(word, futex::Flags::empty(), c_int::MAX as u32);
}

/// Name of the simulated node this process belongs to.
pub fn job_name() -> String {
    let var = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
    if let Some(job) = var("SIMCUDA_JOB") {
        return format!("named {job}");
    }
    if let Some(space) = var("PMIX_NAMESPACE") {
        return format!("pmix {space}");
    }
    if let (Some(job), Some(step)) = (var("SLURM_JOB_ID"), var("SLURM_STEP_ID")) {
        return format!("slurm {job}.{step}");
    }
    if let Some(peer) = var("PMI_FD").and_then(|fd| hydra_proxy(fd.parse().ok()?)) {
        return peer;
    }
    format!("alone {}", std::process::id())
}

/// Hydra exports no job id: the proxy at the other end of PMI_FD identifies the node's part of the job.
fn hydra_proxy(fd: c_int) -> Option<String> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut size = core::mem::size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: writes at most `size` bytes into the struct.
    let rc = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut size,
        )
    };
    if rc != 0 || peer.pid <= 0 {
        return None;
    }
    Some(format!(
        "hydra {} {}",
        peer.pid,
        start_time(peer.pid as u32)?
    ))
}

impl Body {
    /// How many operations of each process have ended and are still in the table.
    pub fn ended(&self) -> [u32; crate::shared::MAX_PROCS] {
        let mut ended = [0; crate::shared::MAX_PROCS];
        for row in &self.active[..self.active_len as usize] {
            let flow = &self.flows[usize::from(*row)];
            if flow.stage == crate::shared::Stage::Done {
                ended[usize::from(flow.proc)] += 1;
            }
        }
        ended
    }

    /// Stages of flows, for tests and reports.
    pub fn in_flight(&self) -> usize {
        self.active[..self.active_len as usize]
            .iter()
            .filter(|r| {
                !matches!(
                    self.flows[usize::from(**r)].stage,
                    Stage::Free | Stage::Done
                )
            })
            .count()
    }
}

#[cfg(test)]
#[path = "job_tests.rs"]
mod tests;
