//! Pinned host memory: ranges of shared segments, and bounce buffers of the engine's own.
//!
//! Pinning costs 60 to 560 µs a MiB, depending on the machine, and no thread of the process can launch
//! anything meanwhile, so it is done once and kept. If it fails (a limit on locked memory, no context), the
//! memory works all the same, and copies with it are slower.

use super::driver::is_forked_child;
use super::error::{Error, Result};
use super::state::{ContextKey, Entered};
use super::types::{code, HOST_REGISTER_DEVICEMAP, HOST_REGISTER_PORTABLE};
use crate::stats::{self, Counter};
use parking_lot::Mutex;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Arc;

/// A range that the engine has pinned, or found pinned.
#[derive(Clone, Copy, Debug)]
struct Range {
    start: usize,
    bytes: usize,
    context: ContextKey,
    /// Pinned by the engine, which unpins it.
    own: bool,
}

/// Ranges pinned by this process.
#[derive(Default)]
pub struct Registrations {
    ranges: Vec<Range>,
}

/// Ranges pinned at one time: the segment of each peer on a large node, and the pool's buffers.
const RANGES_MAX: usize = 4096;

impl Registrations {
    /// None yet.
    #[must_use]
    pub fn new() -> Registrations {
        Registrations::default()
    }

    /// Pins a range for all contexts, unless it is. Page-aligned ranges only.
    ///
    /// # Safety
    /// The range stays mapped until it is unregistered.
    pub unsafe fn register(
        &mut self,
        context: ContextKey,
        start: *mut c_void,
        bytes: usize,
    ) -> Result<()> {
        if self.is_registered(start, bytes) {
            return Ok(());
        }
        self.drop_lost();
        if self.ranges.len() >= RANGES_MAX {
            return Err(Error::Exhausted("pinned ranges"));
        }
        let entered = Entered::enter_same(context)?;
        // SAFETY: the caller keeps the range mapped.
        let own = match unsafe { pin(&entered, start, bytes) } {
            Ok(()) => true,
            Err(error) if error.is(code::HOST_MEMORY_ALREADY_REGISTERED) => false,
            Err(error) => return Err(error),
        };
        self.ranges.push(Range {
            start: start.addr(),
            bytes,
            context,
            own,
        });
        Ok(())
    }

    /// Whether a range lies in one that is pinned, by a context that still exists.
    #[must_use]
    pub fn is_registered(&self, start: *const c_void, bytes: usize) -> bool {
        let start = start.addr();
        self.ranges.iter().any(|range| {
            range.start <= start
                && start + bytes <= range.start + range.bytes
                && range.context.is_alive()
        })
    }

    /// Unpins a range, if the engine has pinned it: before it is unmapped.
    pub fn unregister(&mut self, start: *const c_void) {
        let start = start.addr();
        self.ranges.retain(|range| {
            let keep = range.start != start;
            if !keep {
                unpin(range);
            }
            keep
        });
    }

    /// Unpins all: at finalize.
    pub fn clear(&mut self) {
        self.ranges.drain(..).for_each(|range| unpin(&range));
    }

    /// Forgets ranges whose context is gone, and what it had pinned with it.
    fn drop_lost(&mut self) {
        self.ranges.retain(|range| {
            let alive = range.context.is_alive();
            if !alive {
                unpin(range);
            }
            alive
        });
    }
}

impl Drop for Registrations {
    fn drop(&mut self) {
        self.clear();
    }
}

/// # Safety
/// The range stays mapped until it is unpinned.
unsafe fn pin(entered: &Entered, start: *mut c_void, bytes: usize) -> Result<()> {
    let driver = entered.driver();
    // SAFETY: the caller keeps the range mapped.
    let register = |flags| unsafe { driver.mem_host_register(start, bytes, flags) };
    let result = match register(HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICEMAP) {
        Err(error) if error.is(code::INVALID_VALUE) || error.is(code::NOT_SUPPORTED) => {
            register(HOST_REGISTER_PORTABLE)
        }
        result => result,
    };
    match result {
        Err(error) if !error.is(code::HOST_MEMORY_ALREADY_REGISTERED) => {
            tell(&error, bytes);
            Err(error)
        }
        result => result,
    }
}

/// Counts memory that is not pinned, and says so once: everything works without.
fn tell(error: &Error, bytes: usize) {
    static SAID: AtomicBool = AtomicBool::new(false);
    stats::add(Counter::PinningRefused, 1);
    let level = if SAID.swap(true, Ordering::Relaxed) {
        log::Level::Debug
    } else {
        log::Level::Warn
    };
    log::log!(
        level,
        "{bytes} bytes of host memory cannot be pinned: {error}; copies with it are slower. A limit on locked memory (ulimit -l) \
         may be the cause"
    );
}

fn unpin(range: &Range) {
    if !range.own {
        return;
    }
    let start = std::ptr::with_exposed_provenance_mut::<c_void>(range.start);
    // Any context will do. If the own one is gone, the driver may have none to ask.
    let entered = Entered::enter_same(range.context).or_else(|_| Entered::relaxed());
    // SAFETY: pinned by `pin`, and unpinned once.
    let result = entered.and_then(|entered| unsafe { entered.driver().mem_host_unregister(start) });
    if let Err(error) = result {
        log::debug!("unpinning host memory: {error}");
    }
}

/// A bound on pinned memory that several share.
#[derive(Clone, Debug)]
pub struct Budget(Arc<AtomicUsize>);

impl Budget {
    /// So many bytes.
    #[must_use]
    pub fn new(bytes: usize) -> Budget {
        Budget(Arc::new(AtomicUsize::new(bytes)))
    }

    /// Takes so many bytes of it; false if they are not left.
    #[must_use]
    pub fn take(&self, bytes: usize) -> bool {
        let less = |left: usize| left.checked_sub(bytes);
        let taken = self
            .0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        taken.is_ok()
    }

    fn give(&self, bytes: usize) {
        self.0.fetch_add(bytes, Ordering::AcqRel);
    }

    /// Bytes that nobody has taken.
    #[must_use]
    pub fn left(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }
}

/// Bounce buffers of the engine's own, in classes of powers of two, kept for the next use.
#[derive(Clone)]
pub struct PinnedPool {
    shared: Arc<Mutex<Shared>>,
}

struct Shared {
    idle: Vec<Block>,
    /// Bytes mapped, idle and in use.
    bytes: usize,
    budget: Budget,
}

/// A mapping of host memory, pinned where that worked.
struct Block {
    start: NonNull<c_void>,
    bytes: usize,
    pinned_by: Option<ContextKey>,
}

// SAFETY: a block owns its mapping, which any thread may use and unmap.
unsafe impl Send for Block {}

/// A bounce buffer. Goes back to its pool when dropped, so hold it until no copy uses it.
pub struct PinnedBuffer {
    block: Option<Block>,
    capacity: usize,
    pool: Arc<Mutex<Shared>>,
}

/// Blocks of at least this size use huge pages, if the system has them: with small pages 4 MiB took 1.4 ms to
/// pin.
const HUGE_PAGE: usize = 2 << 20;
const PAGE: usize = 4096;
/// The smallest class: less than this is not worth a mapping of its own.
const BLOCK_MIN: usize = 64 << 10;

impl PinnedPool {
    /// A pool that maps what the budget allows.
    #[must_use]
    pub fn new(budget: Budget) -> PinnedPool {
        PinnedPool {
            shared: Arc::new(Mutex::new(Shared {
                idle: Vec::new(),
                bytes: 0,
                budget,
            })),
        }
    }

    /// A buffer of at least so many bytes, pinned by the context if that works. [`Error::Exhausted`]: the
    /// pool is at its bound; later, or in smaller pieces, it may work.
    pub fn take(&self, context: ContextKey, bytes: usize) -> Result<PinnedBuffer> {
        self.take_class(context, class_of(bytes))
    }

    /// A buffer of so many bytes, in whole pages, and no more: for buffers that are kept.
    pub fn take_exact(&self, context: ContextKey, bytes: usize) -> Result<PinnedBuffer> {
        self.take_class(context, bytes.checked_next_multiple_of(PAGE))
    }

    fn take_class(&self, context: ContextKey, class: Option<usize>) -> Result<PinnedBuffer> {
        let class = class.ok_or(Error::Exhausted("address space"))?;
        let mut block = match self.take_idle(class)? {
            Some(block) => block,
            None => self.map(class)?,
        };
        block.pin(context);
        Ok(PinnedBuffer {
            capacity: block.bytes,
            block: Some(block),
            pool: Arc::clone(&self.shared),
        })
    }

    /// Bytes mapped, idle and in use.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shared.lock().bytes
    }

    /// Unmaps what is idle: at finalize.
    pub fn clear(&self) {
        let mut shared = self.shared.lock();
        let idle = std::mem::take(&mut shared.idle);
        let bytes = idle.iter().map(|block| block.bytes).sum::<usize>();
        shared.forget(bytes);
    }

    /// An idle block of the class; else room for a new one is made, and counted.
    fn take_idle(&self, class: usize) -> Result<Option<Block>> {
        let mut shared = self.shared.lock();
        if let Some(place) = shared.idle.iter().position(|block| block.bytes == class) {
            return Ok(Some(shared.idle.swap_remove(place)));
        }
        while !shared.budget.take(class) {
            let Some(dropped) = shared.idle.pop() else {
                return Err(Error::Exhausted("pinned memory"));
            };
            shared.forget(dropped.bytes);
        }
        shared.bytes += class;
        Ok(None)
    }

    fn map(&self, class: usize) -> Result<Block> {
        Block::map(class).ok_or_else(|| {
            self.shared.lock().forget(class);
            Error::Exhausted("host memory")
        })
    }
}

impl Shared {
    /// So many bytes are mapped no longer.
    fn forget(&mut self, bytes: usize) {
        self.bytes -= bytes;
        self.budget.give(bytes);
    }
}

fn class_of(bytes: usize) -> Option<usize> {
    bytes.max(BLOCK_MIN).checked_next_power_of_two()
}

// All by libc: MPI libraries patch its munmap and madvise, to forget what they have registered with a network.
impl Block {
    fn map(bytes: usize) -> Option<Block> {
        let spare = if bytes < HUGE_PAGE { 0 } else { HUGE_PAGE };
        let mapped = bytes.checked_add(spare)?;
        // SAFETY: a fresh private mapping at an address of the kernel's choice.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return None;
        }
        let head = start.addr().wrapping_neg() % spare.max(1);
        let end = start.wrapping_byte_add(mapped);
        let start = start.wrapping_byte_add(head);
        let before = (start.wrapping_byte_sub(head), head);
        let behind = (end.wrapping_byte_sub(spare - head), spare - head);
        for (start, bytes) in [before, behind].into_iter().filter(|(_, bytes)| *bytes > 0) {
            // SAFETY: a part of the mapping made above, before or behind the block.
            unsafe { libc::munmap(start, bytes) };
        }
        // A child that writes to its copy of a page must not move the pages that the device reads and writes.
        // SAFETY: the block.
        unsafe {
            libc::madvise(start, bytes, libc::MADV_DONTFORK);
            if spare > 0 {
                libc::madvise(start, bytes, libc::MADV_HUGEPAGE);
            }
        }
        NonNull::new(start).map(|start| Block {
            start,
            bytes,
            pinned_by: None,
        })
    }

    /// Pins the block, unless it is by a context that still exists.
    fn pin(&mut self, context: ContextKey) {
        if self.pinned_by.is_some_and(|by| by.is_alive()) {
            return;
        }
        self.unpin();
        // SAFETY: the block unpins before it unmaps.
        let result = Entered::enter_same(context)
            .and_then(|entered| unsafe { pin(&entered, self.start.as_ptr(), self.bytes) });
        match result {
            Ok(()) => self.pinned_by = Some(context),
            Err(error) => log::debug!("pinning {} bytes: {error}", self.bytes),
        }
    }

    fn unpin(&mut self) {
        if let Some(context) = self.pinned_by.take() {
            unpin(&Range {
                start: self.start.as_ptr().addr(),
                bytes: self.bytes,
                context,
                own: true,
            });
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.unpin();
        // In a forked child it is not there (MADV_DONTFORK), and something else may be in its place.
        if !is_forked_child() {
            // SAFETY: the block's own mapping, which nobody uses any more.
            unsafe { libc::munmap(self.start.as_ptr(), self.bytes) };
        }
    }
}

impl PinnedBuffer {
    /// Start of the buffer.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.block
            .as_ref()
            .map_or(std::ptr::null_mut(), |block| block.start.as_ptr().cast())
    }

    /// Copies host memory to its start.
    pub fn fill(&self, from: super::Lent) {
        assert!(from.bytes() <= self.capacity as u64 && self.block.is_some());
        // SAFETY: the buffer is that long, and no one else's. What is lent is readable.
        unsafe {
            self.as_ptr()
                .copy_from_nonoverlapping(from.as_ptr(), from.bytes() as usize)
        };
    }

    /// A part of what it holds.
    ///
    /// # Safety
    /// No copy to it is under way while the slice lives.
    #[must_use]
    pub unsafe fn part(&self, from: usize, bytes: usize) -> &[u8] {
        let end = from.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.capacity) && self.block.is_some());
        // SAFETY: the buffer is that long; nobody writes to it, as the caller says.
        unsafe { std::slice::from_raw_parts(self.as_ptr().add(from), bytes) }
    }

    /// Its address for a copy.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.as_ptr().expose_provenance() as u64
    }

    /// Bytes it holds, at least those asked for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The memory is never given back: a copy may still use it.
    pub fn leak(&mut self) {
        std::mem::forget(self.block.take());
    }

    /// Whether copies with it are asynchronous and fast.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.block
            .as_ref()
            .is_some_and(|block| block.pinned_by.is_some())
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.pool.lock().idle.push(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_powers_of_two_from_the_smallest_on() {
        assert_eq!(class_of(0), Some(65536));
        assert_eq!(class_of(65536), Some(65536));
        assert_eq!(class_of(65537), Some(131072));
        assert_eq!(class_of(usize::MAX), None);
    }

    #[test]
    fn long_blocks_begin_where_huge_pages_do_and_end_where_they_should() {
        for bytes in [BLOCK_MIN, HUGE_PAGE / 2, HUGE_PAGE, 4 * HUGE_PAGE] {
            let block = Block::map(bytes).expect("memory");
            assert!(bytes < HUGE_PAGE || block.start.addr().get() % HUGE_PAGE == 0);
            // SAFETY: the block's own memory, all of it.
            unsafe { block.start.as_ptr().cast::<u8>().write_bytes(1, bytes) };
            let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
            let end = block.start.addr().get() + bytes;
            let reaches = |line: &str| -> Option<bool> {
                let (from, to) = line.split_once(' ')?.0.split_once('-')?;
                let [from, to] = [from, to].map(|at| usize::from_str_radix(at, 16));
                Some(from.ok()? < end && end <= to.ok()?)
            };
            assert!(maps.lines().any(|line| reaches(line) == Some(true)));
        }
    }
}
