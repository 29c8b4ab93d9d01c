//! The file of a rank, and the thread that writes it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::clock::{self, now};
use super::record::{End, Message, Record, Sync, Words, RECORD_BYTES};
use super::ring::Ring;
use super::{nvtx, open as under_way, ON};

/// How often the rings are emptied.
const PERIOD: Duration = Duration::from_millis(100);
/// How long a message is under way before its record is copied into the file.
const LONG: Duration = Duration::from_secs(1);
/// Messages under way that are copied at a time: a program that has more is not waiting for one.
const LONG_MAX: usize = 256;
/// What is written with one call.
const BLOCK_BYTES: usize = 1 << 18;

/// The beginning of a file.
pub(super) const MAGIC: &[u8; 8] = b"ANBTRACE";

static RINGS: Mutex<Vec<Arc<Ring>>> = Mutex::new(Vec::new());
static OUT: Mutex<Option<Out>> = Mutex::new(None);
static WRITER: OnceLock<Thread> = OnceLock::new();
static JOIN: Mutex<Option<JoinHandle<()>>> = Mutex::new(None);
static STOPPED: AtomicBool = AtomicBool::new(false);
/// There is a file.
static HAS_FILE: AtomicBool = AtomicBool::new(false);
/// Dropped without a ring.
static LOST: AtomicU64 = AtomicU64::new(0);

struct Out {
    file: File,
    block: Vec<u8>,
    written: u64,
    dropped: u64,
    has_failed: bool,
    /// Messages that were under way when it was last looked, as they were then.
    seen: Vec<Message>,
    /// Those of them that are in the file, as they are there.
    told: Vec<Message>,
    /// Calls that threads were in when it was last looked, and those of them that are in the file.
    calls_seen: Vec<Words>,
    calls_told: Vec<Words>,
}

impl Out {
    /// Copies messages that have not changed since it was last looked, once for each state they are in, and calls that have
    /// not returned meanwhile.
    fn tell_long(&mut self) {
        let mut now = Vec::new();
        under_way::each(|message| now.push(*message));
        self.told.retain(|message| now.contains(message));
        let seen = std::mem::take(&mut self.seen);
        for message in now.iter().filter(|message| seen.contains(message)) {
            if self.told.len() >= LONG_MAX {
                break;
            }
            if !self.told.contains(message) {
                self.told.push(*message);
                self.add(&Record::Message(*message).encode());
            }
        }
        self.seen = now;
        self.seen.truncate(LONG_MAX);
        let calls = current_calls();
        let seen = std::mem::take(&mut self.calls_seen);
        self.calls_told.retain(|call| calls.contains(call));
        for call in calls.iter().filter(|call| seen.contains(call)) {
            if !self.calls_told.contains(call) {
                self.calls_told.push(*call);
                self.add(call);
            }
        }
        self.calls_seen = calls;
    }

    /// All that are under way, as the process ends.
    fn tell_rest(&mut self) {
        let mut rest = Vec::new();
        under_way::each(|message| rest.push(*message));
        for message in rest {
            self.add(&Record::Message(message).encode());
        }
        for call in current_calls() {
            self.add(&call);
        }
    }

    fn add(&mut self, words: &Words) {
        for word in words {
            self.block.extend_from_slice(&word.to_le_bytes());
        }
        if self.block.len() >= BLOCK_BYTES {
            self.write();
        }
    }

    /// Says what the ticks of the records mean.
    fn sync(&mut self) {
        if let Some((ticks, ns)) = clock::pair() {
            self.add(&Record::Sync(Sync { ticks, ns }).encode());
        }
    }

    /// A file that cannot be written any more stays as it is; what follows is counted as dropped.
    fn write(&mut self) {
        let records = (self.block.len() / RECORD_BYTES) as u64;
        let result = match self.has_failed {
            true => Err(None),
            false => self.file.write_all(&self.block).map_err(Some),
        };
        match result {
            Ok(()) => self.written += records,
            Err(error) => {
                self.dropped += records;
                self.has_failed = true;
                if let Some(error) = error {
                    log::warn!("ANABRANCH_TRACE: {error}; what follows is not recorded: make room, or trace less");
                }
            }
        }
        self.block.clear();
    }
}

/// Whether there is a file; without one, messages may still be ranges of a tool's.
#[inline]
pub(super) fn has_file() -> bool {
    HAS_FILE.load(Ordering::Relaxed)
}

/// The calls that threads are in.
fn current_calls() -> Vec<Words> {
    let rings = RINGS.lock();
    rings.iter().filter_map(|ring| ring.current()).collect()
}

pub(super) fn add(ring: Arc<Ring>) {
    RINGS.lock().push(ring);
}

pub(super) fn drop_one() {
    LOST.fetch_add(1, Ordering::Relaxed);
}

/// A ring is half full.
pub(super) fn wake() {
    if let Some(writer) = WRITER.get() {
        writer.unpark();
    }
}

/// Begins to record into a new file. `header` is a JSON object; `clock` gives nanoseconds, by
/// default the machine's.
///
/// # Errors
/// The file cannot be made, or its thread cannot be started; nothing is recorded.
pub fn open(path: &Path, header: &str, clock: Option<fn() -> u64>) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        // Nobody may read a pipe of that name.
        .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut beginning = MAGIC.to_vec();
    let padded = header.len().next_multiple_of(RECORD_BYTES) + RECORD_BYTES - 16;
    beginning.extend_from_slice(&super::read::VERSION.to_le_bytes());
    beginning.extend_from_slice(&(padded as u32).to_le_bytes());
    beginning.extend_from_slice(header.as_bytes());
    beginning.resize(16 + padded, b' ');
    file.write_all(&beginning)?;
    clock::choose(clock);
    let mut out = Out {
        file,
        block: Vec::with_capacity(BLOCK_BYTES + RECORD_BYTES),
        written: 0,
        dropped: 0,
        has_failed: false,
        seen: Vec::new(),
        told: Vec::new(),
        calls_seen: Vec::new(),
        calls_told: Vec::new(),
    };
    out.sync();
    under_way::start();
    *OUT.lock() = Some(out);
    let writer = std::thread::Builder::new()
        .name("anabranch-trace".into())
        .spawn(write_on)?;
    let _ = WRITER.set(writer.thread().clone());
    *JOIN.lock() = Some(writer);
    HAS_FILE.store(true, Ordering::Relaxed);
    ON.store(true, Ordering::Relaxed);
    Ok(())
}

fn write_on() {
    let mut looked = Instant::now();
    while !STOPPED.load(Ordering::Acquire) {
        std::thread::park_timeout(PERIOD);
        if looked.elapsed() >= LONG {
            looked = Instant::now();
            if let Some(out) = OUT.lock().as_mut() {
                out.tell_long();
            }
        }
        flush();
    }
}

/// Writes what has been recorded.
pub fn flush() {
    let mut out = OUT.lock();
    let Some(out) = out.as_mut() else { return };
    // Not locked while the file is written: a thread may be about to add its ring.
    let rings = RINGS.lock().clone();
    for ring in rings {
        // Of a thread that has ended nothing more will come.
        let has_ended = Arc::strong_count(&ring) == 2;
        ring.drain(|words| out.add(words));
        out.dropped += ring.take_dropped();
        if has_ended {
            RINGS.lock().retain(|other| !Arc::ptr_eq(other, &ring));
        }
    }
    out.dropped += LOST.swap(0, Ordering::Relaxed);
    if !out.block.is_empty() {
        out.sync();
        out.write();
    }
}

/// Ends the file. `is_finalized`: by MPI_Finalize. The process may end before its last records are written only if it
/// is killed.
pub fn close(is_finalized: bool) {
    if !ON.swap(false, Ordering::Relaxed) {
        return;
    }
    nvtx::close();
    if !has_file() {
        return;
    }
    super::settle();
    STOPPED.store(true, Ordering::Release);
    wake();
    if let Some(writer) = JOIN.lock().take() {
        let _ = writer.join();
    }
    flush();
    if let Some(mut out) = OUT.lock().take() {
        out.tell_rest();
        out.write();
        let end = End {
            at: now(),
            recorded: out.written,
            dropped: out.dropped,
            is_finalized,
        };
        out.add(&Record::End(end).encode());
        out.write();
    }
}
