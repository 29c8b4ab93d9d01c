//! What the engine needs to know of an MPI datatype. It asks the library once, and keeps the answer for as
//! long as the type lives.
//!
//! **Architecture invariant:** what is known of a type hangs on the type itself, as an attribute. The MPI
//! library calls the attribute's delete function when the type ends, whoever frees it and from wherever: the
//! program in C or Fortran, a callback inside another call, or the library when the last operation that uses
//! the type completes. Only then may the library give the handle to another type (Open MPI does so with the
//! very next one), and by then nothing is known under that handle any more. So no function that frees a type
//! needs to be intercepted.
//!
//! Inner types, whose handles `MPI_Type_get_contents` returns, are looked at by [`runs`] and never
//! remembered.

mod contents;
pub mod runs;

pub use contents::is_predefined;

use std::sync::atomic::{
    fence, AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::engine::layout::Layout;
use crate::mpi::attributes::{Attribute, Keyval};
use crate::mpi::owned::OwnType;
use crate::mpi::{large, Abi, Datatype, Handle};

/// Layout of one item of a datatype (MPI 4.1 section 5.1), lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TypeInfo {
    /// Bytes of data in one item.
    pub size: u64,
    /// Distance from one item to the next.
    pub extent: i64,
    /// First byte of data, from the buffer address.
    pub true_lb: i64,
    /// Span from the first to the last byte of data.
    pub true_extent: i64,
    /// The data of one item is a gapless run of bytes in address order.
    pub gapless: bool,
}

impl TypeInfo {
    /// Whether `count` items are one gapless run of bytes from `true_lb`.
    pub fn dense(&self, count: i64) -> bool {
        self.size == 0 || (self.gapless && (count <= 1 || self.extent == self.size as i64))
    }

    /// Bytes of data in `count` items.
    pub fn bytes(&self, count: i64) -> u64 {
        self.size.saturating_mul(count.max(0) as u64)
    }

    /// Offset from the buffer address to the first byte in memory of `count` items; 0 if there is none.
    #[inline]
    pub fn first(&self, count: i64) -> i64 {
        if count > 0 && self.size > 0 && self.extent >= 0 {
            self.true_lb
        } else {
            self.span(count).0
        }
    }

    /// Span in memory of `count` items, as (offset of its first byte from the buffer address, length).
    pub fn span(&self, count: i64) -> (i64, u64) {
        if count <= 0 || self.size == 0 {
            return (0, 0);
        }
        let last = self.extent.saturating_mul(count - 1);
        let first = self.true_lb + last.min(0);
        let length = self.true_extent + last.abs();
        (first, length.max(0) as u64)
    }
}

/// What is known of a type. The type's attribute owns one reference.
#[derive(Debug)]
struct Record {
    handle: Datatype,
    info: TypeInfo,
    /// Where the bytes of an item lie, once a message needed that; `None` if the library does not tell.
    layout: OnceLock<Option<Arc<Layout>>>,
    /// See [`runs::probes_of`].
    probes: OnceLock<Option<Arc<[i64]>>>,
    /// The type still exists.
    lives: AtomicBool,
}

/// The key of the attribute.
static KEYVAL: OnceLock<Keyval<Datatype, Record>> = OnceLock::new();

/// Bytes of layouts that types may keep in all. Beyond that a layout is worked out for each message.
const LAYOUTS_BYTES_MAX: usize = 256 << 20;

static LAYOUTS_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Makes the attribute; called once inside `MPI_Init`. Without one, each call asks the library anew.
pub fn start(abi: &Abi) {
    match Keyval::new(abi) {
        Some(keyval) => {
            let _ = KEYVAL.set(keyval);
        }
        None => log::debug!("no attribute for datatypes: each message asks about its type"),
    }
}

/// Layout of one item of `datatype`, or `None` if the library refuses the handle.
#[inline]
pub fn info(abi: &Abi, datatype: Datatype) -> Option<TypeInfo> {
    let datatype = abi.normalize(datatype);
    way_of(datatype)
        .load(datatype)
        .or_else(|| ask(abi, datatype))
}

/// Items that lie one after the other without a gap, however many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Bytes of one item.
    pub item: u64,
    /// First byte of the first item, from the buffer address.
    pub first: i64,
}

/// A type whose items form a run, if a call has asked about it before: all that a call on host memory needs.
#[inline(always)]
pub fn run(abi: &Abi, datatype: Datatype) -> Option<Run> {
    let datatype = abi.normalize(datatype);
    way_of(datatype).load_run(datatype)
}

#[cold]
#[inline(never)]
fn ask(abi: &Abi, datatype: Datatype) -> Option<TypeInfo> {
    let record = record(abi, datatype)?;
    remember(&record);
    Some(record.info)
}

/// Where the bytes of one item of `datatype` lie; `None` if the library does not tell.
pub fn layout(abi: &Abi, datatype: Datatype) -> Option<Arc<Layout>> {
    let datatype = abi.normalize(datatype);
    let record = record(abi, datatype)?;
    if let Some(known) = record.layout.get() {
        return known.clone();
    }
    let layout = Layout::of(abi, datatype, &record.info).map(Arc::new);
    let bytes = layout.as_ref().map_or(0, |layout| layout.bytes_held());
    // If the type has no attribute, or has ended, nobody would ask the record again.
    if record.lives.load(Ordering::Relaxed) {
        let held = LAYOUTS_BYTES.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if held > LAYOUTS_BYTES_MAX || record.layout.set(layout.clone()).is_err() {
            LAYOUTS_BYTES.fetch_sub(bytes, Ordering::Relaxed);
        }
    }
    layout
}

/// Offsets of those bytes of an item that may lie in other memory than their neighbours; `None` if the
/// library does not tell how the type was made.
pub fn probes(abi: &Abi, datatype: Datatype) -> Option<Arc<[i64]>> {
    let datatype = abi.normalize(datatype);
    let record = record(abi, datatype)?;
    record
        .probes
        .get_or_init(|| runs::probes_of(abi, datatype).map(Arc::from))
        .clone()
}

/// The record of a type, which is made if there is none.
fn record(abi: &Abi, datatype: Datatype) -> Option<Arc<Record>> {
    if datatype == abi.normalize(abi.datatype_null) {
        return None;
    }
    if let Some(known) = attached(abi, datatype) {
        return Some(known);
    }
    let info = runs::query(abi, datatype)?;
    let record = Arc::new(Record {
        handle: datatype,
        info,
        layout: OnceLock::new(),
        probes: OnceLock::new(),
        lives: AtomicBool::new(false),
    });
    // An attribute is set once: another thread may be about to take a reference to the record that it got.
    let _attaching = ATTACHING.lock();
    let other = attached(abi, datatype);
    if other.is_none() {
        attach(abi, &record);
    }
    Some(other.unwrap_or(record))
}

fn attached(abi: &Abi, datatype: Datatype) -> Option<Arc<Record>> {
    KEYVAL.get()?.of(abi, datatype)
}

/// Hangs a record on its type. If that fails, the record is good for one question only.
fn attach(abi: &Abi, record: &Arc<Record>) {
    let Some(keyval) = KEYVAL.get() else { return };
    record.lives.store(true, Ordering::Relaxed);
    if !keyval.attach(abi, record.handle, Arc::clone(record)) {
        record.lives.store(false, Ordering::Relaxed);
    }
}

impl Attribute for Record {
    /// A duplicate is another type, which the library is asked about when it is first used.
    fn copied(&self) -> Option<Arc<Record>> {
        None
    }

    fn ended(&self) {
        forget(self);
    }
}

/// The type ends.
fn forget(record: &Record) {
    let _writing = WRITING.lock();
    record.lives.store(false, Ordering::Relaxed);
    let way = way_of(record.handle);
    if way.handle.load(Ordering::Relaxed) == record.handle.word() {
        way.store(0, &NOTHING);
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        if let Some(Some(layout)) = self.layout.get() {
            LAYOUTS_BYTES.fetch_sub(layout.bytes_held(), Ordering::Relaxed);
        }
    }
}

const WAYS: usize = 32;

/// What a record says, where a call on host memory finds it without asking the library. Shared by all
/// threads: in a shared library an access to thread-local storage costs more than these few loads.
struct Way {
    /// Odd while a thread is writing.
    version: AtomicU32,
    gapless: AtomicBool,
    /// Its items are a [`Run`].
    is_run: AtomicBool,
    /// 0: nothing is known here.
    handle: AtomicUsize,
    size: AtomicU64,
    extent: AtomicI64,
    true_lb: AtomicI64,
    true_extent: AtomicI64,
}

const NOTHING: TypeInfo = TypeInfo {
    size: 0,
    extent: 0,
    true_lb: 0,
    true_extent: 0,
    gapless: false,
};

static CACHE: [Way; WAYS] = [const { Way::new() }; WAYS];

/// Held by the one thread that hangs a record on a type. The MPI library is called meanwhile, so no callback
/// takes it.
static ATTACHING: Mutex<()> = Mutex::new(());

/// Held by the one thread that writes to the cache. The MPI library may hold locks of its own at that time.
static WRITING: Mutex<()> = Mutex::new(());

#[inline(always)]
fn way_of(datatype: Datatype) -> &'static Way {
    let word = datatype.word();
    &CACHE[(word ^ (word >> 5) ^ (word >> 9)) % WAYS]
}

fn remember(record: &Record) {
    let _writing = WRITING.lock();
    if record.lives.load(Ordering::Relaxed) {
        way_of(record.handle).store(record.handle.word(), &record.info);
    }
}

impl Way {
    const fn new() -> Way {
        Way {
            version: AtomicU32::new(0),
            gapless: AtomicBool::new(false),
            is_run: AtomicBool::new(false),
            handle: AtomicUsize::new(0),
            size: AtomicU64::new(0),
            extent: AtomicI64::new(0),
            true_lb: AtomicI64::new(0),
            true_extent: AtomicI64::new(0),
        }
    }

    #[inline(always)]
    fn load(&self, datatype: Datatype) -> Option<TypeInfo> {
        let version = self.version.load(Ordering::Acquire);
        if self.handle.load(Ordering::Relaxed) != datatype.word() {
            return None;
        }
        let info = TypeInfo {
            size: self.size.load(Ordering::Relaxed),
            extent: self.extent.load(Ordering::Relaxed),
            true_lb: self.true_lb.load(Ordering::Relaxed),
            true_extent: self.true_extent.load(Ordering::Relaxed),
            gapless: self.gapless.load(Ordering::Relaxed),
        };
        fence(Ordering::Acquire);
        (version % 2 == 0 && self.version.load(Ordering::Relaxed) == version).then_some(info)
    }

    #[inline(always)]
    fn load_run(&self, datatype: Datatype) -> Option<Run> {
        let version = self.version.load(Ordering::Acquire);
        if self.handle.load(Ordering::Relaxed) != datatype.word()
            || !self.is_run.load(Ordering::Relaxed)
        {
            return None;
        }
        let run = Run {
            item: self.size.load(Ordering::Relaxed),
            first: self.true_lb.load(Ordering::Relaxed),
        };
        fence(Ordering::Acquire);
        (version % 2 == 0 && self.version.load(Ordering::Relaxed) == version).then_some(run)
    }

    /// To be called by the thread that holds [`WRITING`].
    fn store(&self, datatype: usize, info: &TypeInfo) {
        let version = self.version.load(Ordering::Relaxed);
        self.version
            .store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.handle.store(datatype, Ordering::Relaxed);
        self.size.store(info.size, Ordering::Relaxed);
        self.extent.store(info.extent, Ordering::Relaxed);
        self.true_lb.store(info.true_lb, Ordering::Relaxed);
        self.true_extent.store(info.true_extent, Ordering::Relaxed);
        self.gapless.store(info.gapless, Ordering::Relaxed);
        let is_run = info.gapless && info.extent == info.size as i64;
        self.is_run.store(is_run, Ordering::Relaxed);
        self.version
            .store(version.wrapping_add(2), Ordering::Release);
    }
}

/// A committed type of `bytes` bytes in one run, for a length that does not fit a C `int`.
pub fn bytes_type(abi: &Abi, bytes: u64) -> Option<OwnType> {
    large::run_of(abi, bytes, abi.byte, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(size: u64, extent: i64, true_lb: i64, true_extent: i64) -> TypeInfo {
        TypeInfo {
            size,
            extent,
            true_lb,
            true_extent,
            gapless: size as i64 == true_extent,
        }
    }

    #[test]
    fn dense_needs_items_that_touch() {
        assert!(info(8, 8, 0, 8).dense(5));
        assert!(info(8, 16, 0, 8).dense(1));
        assert!(!info(8, 16, 0, 8).dense(2));
        assert!(!info(8, 24, 0, 24).dense(1));
    }

    #[test]
    fn span_covers_negative_extents() {
        assert_eq!(info(4, 16, 2, 6).span(3), (2, 38));
        assert_eq!(info(4, -16, 2, 6).span(3), (-30, 38));
        assert_eq!(info(4, 16, 2, 6).span(0), (0, 0));
    }

    /// If the end of a type is reported before its record reaches the cache, nothing stays in the cache.
    #[test]
    fn what_has_ended_is_not_remembered() {
        let handle = crate::mpi::Abi::STANDARD.packed;
        let record = Record {
            handle,
            info: info(8, 8, 0, 8),
            layout: OnceLock::new(),
            probes: OnceLock::new(),
            lives: AtomicBool::new(true),
        };
        remember(&record);
        assert_eq!(way_of(handle).load(handle), Some(record.info));
        let run = Run { item: 8, first: 0 };
        assert_eq!(way_of(handle).load_run(handle), Some(run));
        forget(&record);
        assert_eq!(way_of(handle).load(handle), None);
        assert_eq!(way_of(handle).load_run(handle), None);
        remember(&record);
        assert_eq!(way_of(handle).load(handle), None);
    }
}
