//! A rank's segment in shared memory, as its owner and its peers see it.
//!
//! ```text
//! header (two pages) | eager cells | chunks for staging | slots | sheets | GPU page | wide staging | details
//! ```
//!
//! Nothing in it is believed: indices are checked against the layout that was verified when the segment was
//! mapped, and all words are atomics.

use super::details::{DetailWords, DETAILS_BYTES, DETAIL_WORDS};
use super::gpu_page::{GpuPage, GPU_PAGE_BYTES};
use super::map::{will_read_rest, will_write, Mapping};
use super::ring::Entry;
use super::sheet::{Sheet, SHEET_BYTES};
use super::slot::{Slot, SLOT_BYTES};
use super::units::UNIT_BYTES;
use super::{sys, traffic, PROTOCOL_VERSION};
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Size of the header, bytes.
pub const HEADER_BYTES: u64 = 8192;
/// Slots that one rank can have.
pub const SLOTS_MAX: u32 = 1 << 20;
/// Words of wishes in a header.
const WISHES: usize = 16;
/// Counters in a header.
pub const COUNTERS: usize = 128;
/// First bytes of a segment.
const MAGIC: u64 = u64::from_le_bytes(*b"anabsegm");
const PAGE: u64 = 4096;
/// No segment is larger. This bounds what we compute from a corrupt header.
const SEGMENT_BYTES_MAX: u64 = 1 << 40;

/// The header as it lies in shared memory. Groups of words with different writers have cache lines of their
/// own.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Header {
    magic: AtomicU64,
    version: AtomicU32,
    world_rank: AtomicU32,
    job: AtomicU64,
    start: AtomicU64,
    pid: AtomicU32,
    slots: AtomicU32,
    chunk_bytes: AtomicU32,
    chunks: AtomicU32,
    cell_bytes: AtomicU32,
    cells: AtomicU32,
    sheets: AtomicU32,
    /// Number of blocks of wide staging, and above it the units of each.
    wide: AtomicU32,
    flags: Flags,
    doorbell: Doorbell,
    wishes: Wishes,
    counters: Counters,
    traffic: traffic::Page,
    reading: Reading,
}

super::map::shared!(Header);

/// The rank from which the owner reads long messages, plus one; 0 if it reads from none. Written by the
/// owner.
#[derive(Debug)]
#[repr(C, align(64))]
struct Reading(AtomicU32);

/// Words that the owner writes.
#[derive(Debug)]
#[repr(C, align(64))]
struct Flags {
    device_user: AtomicU32,
    ready: AtomicU32,
    finalizing: AtomicU32,
    published: AtomicU32,
    slots_ready: AtomicU32,
    cells_ready: AtomicU32,
    chunks_ready: AtomicU32,
    gpu_page_ready: AtomicU32,
    wide_ready: AtomicU32,
    computing: AtomicU32,
    /// Words of the details that are there.
    details_ready: AtomicU32,
    /// Ranks, modulo 64, whose segments the owner cannot open.
    refused: AtomicU64,
    /// Generation of the directory up to which the owner has tried to open segments.
    met: AtomicU32,
}

/// All words that a peer writes beside a message, and those that it reads for that, in one line: each line
/// that two cores write costs a tenth of a microsecond and more.
#[derive(Debug)]
#[repr(C, align(64))]
struct Doorbell {
    /// Doorbell rings in the high half, RTS that were sent to the owner in the low half: a sender of an RTS
    /// counts both, in one step. Each half starts over after 4 billion; where the low half does, that is one
    /// ring more.
    calls: AtomicU64,
    asleep: AtomicU32,
    /// Threads of the owner that look by themselves, again and again: its sleepers need not be woken.
    attended: AtomicU32,
    /// Not 0 while the owner has no receive posted: nobody need be woken for what is sent to it.
    receives_nothing: AtomicU32,
}

/// One doorbell ring in [`Doorbell::calls`].
const RING: u64 = 1 << 32;

/// One bit for all streams of messages that share a hash. Written by the owner.
#[derive(Debug)]
#[repr(C, align(64))]
struct Wishes([AtomicU64; WISHES]);

#[derive(Debug)]
#[repr(C, align(64))]
struct Counters([AtomicU64; COUNTERS]);

const _: () = assert!(size_of::<Header>() as u64 <= HEADER_BYTES);

/// Whose segment it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// Hash of the job.
    pub job: u64,
    /// Rank in MPI_COMM_WORLD.
    pub world_rank: u32,
    /// Pid.
    pub pid: u32,
    /// Start time of the process, clock ticks since boot.
    pub start: u64,
}

/// Sizes of a segment's regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Slots, at most [`SLOTS_MAX`].
    pub slots: u32,
    /// Size of a staging chunk, bytes.
    pub chunk_bytes: u32,
    /// Staging chunks.
    pub chunks: u32,
    /// Size of a cell for an eager payload, bytes.
    pub cell_bytes: u32,
    /// Cells.
    pub cells: u32,
    /// Sheets of checksums: one for each slot, or none.
    pub sheets: u32,
    /// Size of a block of wide staging, bytes.
    pub wide_block_bytes: u32,
    /// Blocks of wide staging.
    pub wide_blocks: u32,
}

impl Layout {
    /// Where the cells start, bytes.
    pub fn cells_offset(&self) -> u64 {
        HEADER_BYTES
    }

    /// Where the chunks start, bytes.
    pub fn chunks_offset(&self) -> u64 {
        let cells = u64::from(self.cells) * u64::from(self.cell_bytes);
        self.cells_offset() + cells.next_multiple_of(PAGE)
    }

    /// Where the slots start, bytes.
    pub fn slots_offset(&self) -> u64 {
        let chunks = u64::from(self.chunks).saturating_mul(u64::from(self.chunk_bytes));
        self.chunks_offset()
            .saturating_add(chunks.min(SEGMENT_BYTES_MAX).next_multiple_of(PAGE))
    }

    /// Where the sheets start, bytes.
    pub fn sheets_offset(&self) -> u64 {
        let slots = u64::from(self.slots) * SLOT_BYTES as u64;
        self.slots_offset()
            .saturating_add(slots.next_multiple_of(PAGE))
    }

    /// Where the GPU page starts, bytes.
    pub fn gpu_page_offset(&self) -> u64 {
        let sheets = u64::from(self.sheets) * SHEET_BYTES as u64;
        self.sheets_offset()
            .saturating_add(sheets.next_multiple_of(PAGE))
    }

    /// Where the wide staging starts, bytes.
    pub fn wide_offset(&self) -> u64 {
        self.gpu_page_offset()
            .saturating_add((GPU_PAGE_BYTES as u64).next_multiple_of(PAGE))
    }

    /// Where the details of the statistics start, bytes.
    pub fn details_offset(&self) -> u64 {
        let wide = u64::from(self.wide_blocks) * u64::from(self.wide_block_bytes);
        self.wide_offset().saturating_add(wide)
    }

    /// Size of the segment, bytes.
    pub fn bytes(&self) -> u64 {
        self.details_offset().saturating_add(DETAILS_BYTES)
    }

    /// True if the sizes are ones that an owner may choose.
    pub fn is_sane(&self) -> bool {
        let cells = u64::from(self.cells) * u64::from(self.cell_bytes);
        (1..=SLOTS_MAX).contains(&self.slots)
            && self.chunks < FIRST_ON_GPU
            // Each has up to 64 numbers.
            && self.cells < FIRST_CELL / 64
            && (self.sheets == 0 || self.sheets == self.slots)
            && self.chunk_bytes % 64 == 0
            && self.cell_bytes % 64 == 0
            && u64::from(self.wide_block_bytes) % UNIT_BYTES == 0
            && (self.wide_blocks == 0 || self.wide_block_bytes > 0)
            && self.wide_blocks <= 0xffff
            && u64::from(self.wide_block_bytes) <= UNIT_BYTES * 0x3fff
            && cells <= SEGMENT_BYTES_MAX
            && self.bytes() <= SEGMENT_BYTES_MAX
    }
}

/// Word and bit of a key among the wishes.
fn wish(key: u64) -> (usize, u64) {
    let at = key % (64 * WISHES as u64);
    (at as usize / 64, 1 << (at % 64))
}

/// Pieces from this number on are cells; each cell has [`Layout::granules`] numbers.
pub const FIRST_CELL: u32 = 1 << 31;
/// Pieces from this number on, and below the cells, are on GPUs of the owner ([`Entry::on_gpu`]). Pieces
/// below are chunks.
pub const FIRST_ON_GPU: u32 = 1 << 30;

/// Why a segment is not believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadSegment {
    /// It does not start like one.
    #[error("not a segment")]
    Magic,
    /// Of a library that speaks another protocol.
    #[error("protocol version {0} is not {PROTOCOL_VERSION}")]
    Version(u32),
    /// Another job's, rank's or process's.
    #[error("it belongs to another process")]
    Owner,
    /// The layout does not fit the size of the file.
    #[error("its layout does not fit its size")]
    Layout,
}

/// Which messages may be sent to a rank by RTS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Readiness {
    /// None.
    No,
    /// Those that are as long as an RTS: a pending receive has no room for one.
    Long,
    /// All.
    All,
}

const fn bit_of(rank: u32) -> u64 {
    1 << (rank % 64)
}

/// A mapped and verified segment.
#[derive(Debug)]
pub struct View {
    map: Mapping,
    layout: Layout,
    /// Where slots and GPU page start: looked at for each message and in each round.
    slots_at: u64,
    gpu_page_at: u64,
    owner: Owner,
    /// How many slots and pieces were seen to be backed by memory. Grows; local to the process.
    slots_seen: AtomicU32,
    chunks_seen: AtomicU32,
    cells_seen: AtomicU32,
    sheets_seen: AtomicU32,
    gpu_page_seen: AtomicU32,
    wide_seen: AtomicU32,
}

impl View {
    /// Owner: writes the header of a fresh (zero) segment.
    pub(super) fn create(map: Mapping, layout: Layout, owner: Owner) -> Option<Self> {
        debug_assert!(layout.is_sane());
        let header = map.object::<Header>(0)?;
        let relaxed = Ordering::Relaxed;
        header.version.store(u32::from(PROTOCOL_VERSION), relaxed);
        header.world_rank.store(owner.world_rank, relaxed);
        header.job.store(owner.job, relaxed);
        header.start.store(owner.start, relaxed);
        header.pid.store(owner.pid, relaxed);
        header.slots.store(layout.slots, relaxed);
        header.chunk_bytes.store(layout.chunk_bytes, relaxed);
        header.chunks.store(layout.chunks, relaxed);
        header.cell_bytes.store(layout.cell_bytes, relaxed);
        header.cells.store(layout.cells, relaxed);
        header.sheets.store(layout.sheets, relaxed);
        let units = u64::from(layout.wide_block_bytes) / UNIT_BYTES;
        let wide = (units as u32) << 16 | layout.wide_blocks;
        header.wide.store(wide, relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Self::open(map, owner).ok()
    }

    /// From outside the job: maps a segment, whoever owns it.
    pub fn look(fd: BorrowedFd<'_>, bytes: u64) -> io::Result<Self> {
        let map = Mapping::new(fd, bytes)?;
        let owner = Self::owner_in(&map).map_err(io::Error::other)?;
        Self::open(map, owner).map_err(io::Error::other)
    }

    /// Checks a mapped segment: it must be `owner`'s, and its layout must fit the mapping exactly.
    pub(super) fn open(map: Mapping, owner: Owner) -> Result<Self, BadSegment> {
        if Self::owner_in(&map)? != owner {
            return Err(BadSegment::Owner);
        }
        let header = map.object::<Header>(0).ok_or(BadSegment::Layout)?;
        let relaxed = Ordering::Relaxed;
        // Read once: what others write there later changes nothing here.
        let wide = header.wide.load(relaxed);
        let layout = Layout {
            slots: header.slots.load(relaxed),
            chunk_bytes: header.chunk_bytes.load(relaxed),
            chunks: header.chunks.load(relaxed),
            cell_bytes: header.cell_bytes.load(relaxed),
            cells: header.cells.load(relaxed),
            sheets: header.sheets.load(relaxed),
            wide_block_bytes: (wide >> 16).saturating_mul(UNIT_BYTES as u32),
            wide_blocks: wide & 0xffff,
        };
        if !layout.is_sane() || layout.bytes() != map.bytes() as u64 {
            return Err(BadSegment::Layout);
        }
        Ok(Self {
            map,
            slots_at: layout.slots_offset(),
            gpu_page_at: layout.gpu_page_offset(),
            layout,
            owner,
            slots_seen: AtomicU32::new(0),
            chunks_seen: AtomicU32::new(0),
            cells_seen: AtomicU32::new(0),
            sheets_seen: AtomicU32::new(0),
            gpu_page_seen: AtomicU32::new(0),
            wide_seen: AtomicU32::new(0),
        })
    }

    /// Whose segment lies in a mapping.
    fn owner_in(map: &Mapping) -> Result<Owner, BadSegment> {
        let header = map.object::<Header>(0).ok_or(BadSegment::Layout)?;
        if header.magic.load(Ordering::Acquire) != MAGIC {
            return Err(BadSegment::Magic);
        }
        let relaxed = Ordering::Relaxed;
        let version = header.version.load(relaxed);
        if version != u32::from(PROTOCOL_VERSION) {
            return Err(BadSegment::Version(version));
        }
        Ok(Owner {
            job: header.job.load(relaxed),
            world_rank: header.world_rank.load(relaxed),
            pid: header.pid.load(relaxed),
            start: header.start.load(relaxed),
        })
    }

    fn header(&self) -> &Header {
        // SAFETY: Header is made of atomics; `open` saw it lie within the mapping, at its page-aligned start.
        unsafe {
            self.map
                .range(0, size_of::<Header>())
                .unwrap_unchecked()
                .cast()
                .as_ref()
        }
    }

    /// Whose segment this is.
    pub fn owner(&self) -> Owner {
        self.owner
    }

    /// World rank of the owner.
    pub fn world_rank(&self) -> u32 {
        self.owner.world_rank
    }

    /// Pid of the owner.
    pub fn pid(&self) -> u32 {
        self.owner.pid
    }

    /// Sizes of its regions.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The owner has used device memory.
    pub fn device_user(&self) -> bool {
        self.header().flags.device_user.load(Ordering::Acquire) != 0
    }

    /// The owner's helper runs: peers may send it RTS of messages that are as long as an RTS.
    pub fn ready(&self) -> bool {
        self.header().flags.ready.load(Ordering::Acquire) != Readiness::No as u32
    }

    /// The same for messages of any length.
    pub fn ready_for_all(&self) -> bool {
        self.header().flags.ready.load(Ordering::Acquire) == Readiness::All as u32
    }

    /// Whether the owner cannot open the segment of a rank, so that it would not understand an RTS of that rank. Ranks
    /// whose numbers are the same modulo 64 share a bit: a rank that could be served may be left out, never the reverse.
    pub fn refuses(&self, rank: u32) -> bool {
        self.header().flags.refused.load(Ordering::Acquire) & bit_of(rank) != 0
    }

    /// Whether the owner has tried to open the segment of a rank that entered the directory at a generation. Until
    /// then [`refuses`](Self::refuses) says nothing of that rank.
    pub fn has_met(&self, generation: u32) -> bool {
        let met = self.header().flags.met.load(Ordering::Acquire);
        met.wrapping_sub(generation) as i32 >= 0
    }

    /// The owner has tried to open all segments up to a generation, and could not open those of these ranks.
    pub(super) fn set_met(&self, generation: u32, refused: impl Iterator<Item = u32>) {
        let bits = refused.fold(0, |bits, rank| bits | bit_of(rank));
        let flags = &self.header().flags;
        flags.refused.store(bits, Ordering::Release);
        flags.met.store(generation, Ordering::Release);
    }

    /// Whether the owner has the wish with this key. It is a guess of what suits it: either way its messages
    /// are received.
    pub fn wishes(&self, key: u64) -> bool {
        let (word, bit) = wish(key);
        self.header().wishes.0[word].load(Ordering::Relaxed) & bit != 0
    }

    pub(super) fn set_wish(&self, key: u64, wanted: bool) {
        let (word, bit) = wish(key);
        let word = &self.header().wishes.0[word];
        if wanted {
            word.fetch_or(bit, Ordering::Relaxed);
        } else {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    /// The owner is in Finalize (or past it): it receives nothing more.
    pub fn finalizing(&self) -> bool {
        self.header().flags.finalizing.load(Ordering::Acquire) != 0
    }

    /// The owner's counters are final.
    pub fn published(&self) -> bool {
        self.header().flags.published.load(Ordering::Acquire) != 0
    }

    /// Whether the owner reads long messages from a rank.
    pub fn reads_from(&self, rank: u32) -> bool {
        self.header().reading.0.load(Ordering::Relaxed) == rank.wrapping_add(1)
    }

    pub(super) fn set_reading(&self, rank: Option<u32>) {
        let word = rank.map_or(0, |rank| rank.wrapping_add(1));
        self.header().reading.0.store(word, Ordering::Relaxed);
    }

    pub(super) fn set_device_user(&self) {
        self.header().flags.device_user.store(1, Ordering::Release);
    }

    pub(super) fn set_ready(&self, ready: Readiness) {
        self.header()
            .flags
            .ready
            .store(ready as u32, Ordering::Release);
    }

    pub(super) fn set_finalizing(&self) {
        self.header().flags.finalizing.store(1, Ordering::Release);
    }

    pub(super) fn set_published(&self) {
        self.header().flags.published.store(1, Ordering::Release);
    }

    /// RTS that were sent to the owner, ever, modulo 2^32.
    pub fn announced(&self) -> u32 {
        self.header().doorbell.calls.load(Ordering::Acquire) as u32
    }

    /// Sender: counts an RTS that was sent to the owner, and rings the doorbell. Nobody is woken if the owner
    /// has no receive for it: the owner looks when it posts one.
    pub fn announce(&self) {
        self.count_calls(RING | 1);
        // As in `call`: either a thread that posts a receive sees the new value, or we see that one may be
        // posted.
        if self
            .header()
            .doorbell
            .receives_nothing
            .load(Ordering::SeqCst)
            == 0
        {
            self.wake_if_unattended();
        }
    }

    /// Call before ringing the doorbell soon.
    pub fn will_ring(&self) {
        will_write(&self.header().doorbell);
    }

    /// Call before slot `index` is read and claimed. The number need not be believed yet.
    pub fn will_claim(&self, index: u32) {
        if let Some(slot) = self.slot_seen(index) {
            will_write(slot);
            will_read_rest(slot);
        }
    }

    /// Call before changing the state of slot `index` soon. Its other lines are left to the owner.
    pub fn will_change(&self, index: u32) {
        if let Some(slot) = self.slot_seen(index) {
            will_write(slot);
        }
    }

    /// The slot, if its memory was in use before.
    fn slot_seen(&self, index: u32) -> Option<&Slot> {
        let is_seen = index < self.slots_seen.load(Ordering::Relaxed);
        is_seen.then(|| self.slot(index)).flatten()
    }

    /// The owner's counters.
    pub fn counters(&self) -> &[AtomicU64; COUNTERS] {
        &self.header().counters.0
    }

    /// What the owner says of its GPUs and of the links that it uses.
    pub fn traffic(&self) -> &traffic::Page {
        &self.header().traffic
    }

    /// Tells the owner that there is something to look at. Makes a system call only if the owner sleeps and
    /// nobody attends.
    pub fn ring_doorbell(&self) {
        self.call(RING);
    }

    fn call(&self, what: u64) {
        self.count_calls(what);
        self.wake_if_unattended();
    }

    fn count_calls(&self, what: u64) {
        let calls = &self.header().doorbell.calls;
        calls.fetch_add(what, Ordering::SeqCst);
    }

    /// Call after ringing. All of it is sequentially consistent: either a thread that stops attending sees
    /// the new value, or we see that nobody attends.
    fn wake_if_unattended(&self) {
        if self.header().doorbell.attended.load(Ordering::SeqCst) == 0 {
            self.wake_if_asleep();
        }
    }

    /// Like [`View::ring_doorbell`], for what can wait until the owner looks by itself: nobody is woken.
    pub fn ring_quietly(&self) {
        self.header()
            .doorbell
            .calls
            .fetch_add(RING, Ordering::SeqCst);
    }

    /// Like [`View::ring_doorbell`], for what the owner looks at in every round while it is awake, whether or
    /// not the doorbell rang. Nothing is written to the line that the owner reads then. If it falls asleep at
    /// this very moment, it sees it when it next wakes, a millisecond later at most, because it has something
    /// under way.
    pub fn ring_if_asleep(&self) {
        let doorbell = &self.header().doorbell;
        let is_awake = doorbell.attended.load(Ordering::SeqCst) != 0
            || doorbell.asleep.load(Ordering::SeqCst) == 0;
        if !is_awake {
            self.ring_doorbell();
        }
    }

    /// Owner: wakes its own sleepers, whoever attends.
    pub(super) fn wake_sleepers(&self) {
        self.ring_quietly();
        self.wake_if_asleep();
    }

    /// Call after ringing. Sequentially consistent, too: either the sleeper sees the new value, or we see the
    /// sleeper.
    fn wake_if_asleep(&self) {
        let doorbell = &self.header().doorbell;
        if doorbell.asleep.load(Ordering::SeqCst) != 0 {
            sys::futex_wake_high(&doorbell.calls);
        }
    }

    /// Owner: a thread looks at the doorbell by itself from now on.
    pub(super) fn attend(&self) {
        self.header()
            .doorbell
            .attended
            .fetch_add(1, Ordering::SeqCst);
    }

    /// Owner: the thread no longer looks by itself, and looks once more after this.
    pub(super) fn leave_unattended(&self) {
        self.header()
            .doorbell
            .attended
            .fetch_sub(1, Ordering::SeqCst);
    }

    /// Owner: whether it has said that it has no receive posted.
    pub(super) fn receives_nothing(&self) -> bool {
        let said = &self.header().doorbell.receives_nothing;
        said.load(Ordering::SeqCst) != 0
    }

    pub(super) fn set_receives_nothing(&self, nothing: bool) {
        let said = &self.header().doorbell.receives_nothing;
        said.store(u32::from(nothing), Ordering::SeqCst);
    }

    pub(super) fn sleeps(&self) -> bool {
        self.header().doorbell.asleep.load(Ordering::Relaxed) != 0
    }

    /// How often the doorbell rang; read it before looking for work, then pass it to
    /// `Segment::wait_doorbell`.
    pub fn doorbell(&self) -> u32 {
        (self.header().doorbell.calls.load(Ordering::SeqCst) / RING) as u32
    }

    pub(super) fn wait_doorbell(&self, seen: u32, timeout: std::time::Duration) -> u32 {
        let doorbell = &self.header().doorbell;
        if self.doorbell() == seen {
            doorbell.asleep.fetch_add(1, Ordering::SeqCst);
            sys::futex_wait_high(&doorbell.calls, seen, timeout);
            doorbell.asleep.fetch_sub(1, Ordering::SeqCst);
        }
        self.doorbell()
    }

    /// Slot `index`, if the owner has it in use or had it.
    pub fn slot(&self, index: u32) -> Option<&Slot> {
        let flags = &self.header().flags;
        let offset = self.slots_at;
        let region = (offset, SLOT_BYTES as u32, self.layout.slots);
        self.backed(index, region, &flags.slots_ready, &self.slots_seen)?;
        let offset = usize::try_from(offset).ok()? + index as usize * SLOT_BYTES;
        self.map.object(offset)
    }

    /// The checksums of the message in slot `index`, if the owner has sheets.
    pub fn sheet(&self, index: u32) -> Option<&Sheet> {
        let flags = &self.header().flags;
        let offset = self.layout.sheets_offset();
        let region = (offset, SHEET_BYTES as u32, self.layout.sheets);
        self.backed(index, region, &flags.slots_ready, &self.sheets_seen)?;
        let offset = usize::try_from(offset).ok()? + index as usize * SHEET_BYTES;
        self.map.object(offset)
    }

    /// Address of a piece of the owner's staging, and how long it is at most: a chunk, or a cell or a part of
    /// one from [`FIRST_CELL`] on.
    pub fn piece(&self, piece: u32) -> Option<(NonNull<u8>, u32)> {
        let flags = &self.header().flags;
        let layout = &self.layout;
        let (index, within, region, ready, seen) =
            if let Some(number) = piece.checked_sub(FIRST_CELL) {
                let region = (layout.cells_offset(), layout.cell_bytes, layout.cells);
                let (index, at) = (number / layout.granules(), number % layout.granules());
                let within = at * layout.granule();
                (index, within, region, &flags.cells_ready, &self.cells_seen)
            } else {
                let region = (layout.chunks_offset(), layout.chunk_bytes, layout.chunks);
                (piece, 0, region, &flags.chunks_ready, &self.chunks_seen)
            };
        self.backed(index, region, ready, seen)?;
        let offset = region.0 + u64::from(index) * u64::from(region.1) + u64::from(within);
        let bytes = region.1.checked_sub(within)?;
        let address = self
            .map
            .range(usize::try_from(offset).ok()?, bytes as usize)?;
        Some((address, bytes))
    }

    /// The bytes that a ring entry stands for, if it makes sense.
    pub fn piece_of(&self, entry: Entry) -> Option<(NonNull<u8>, usize)> {
        let (address, bytes) = self.piece(entry.piece)?;
        (entry.bytes <= bytes).then_some((address, entry.bytes as usize))
    }

    /// The part of the staging region (cells and chunks, one range) that is backed by memory; `None` before
    /// the owner's first use of it. Processes register this with CUDA.
    pub fn staging(&self) -> Option<(NonNull<u8>, usize)> {
        let chunks = self
            .header()
            .flags
            .chunks_ready
            .load(Ordering::Acquire)
            .min(self.layout.chunks);
        let end = match chunks.checked_sub(1) {
            Some(last) => {
                self.piece(last)?;
                self.layout.chunks_offset() + u64::from(chunks) * u64::from(self.layout.chunk_bytes)
            }
            None => {
                let cells = self
                    .header()
                    .flags
                    .cells_ready
                    .load(Ordering::Acquire)
                    .min(self.layout.cells);
                self.piece(FIRST_CELL + cells.checked_sub(1)? * self.layout.granules())?;
                self.layout.cells_offset() + u64::from(cells) * u64::from(self.layout.cell_bytes)
            }
        };
        let start = usize::try_from(self.layout.cells_offset()).ok()?;
        let bytes = usize::try_from(end).ok()? - start;
        Some((self.map.range(start, bytes)?, bytes))
    }

    /// The owner's GPU page, if it has one.
    pub fn gpu_page(&self) -> Option<&GpuPage> {
        let flags = &self.header().flags;
        let offset = self.gpu_page_at;
        let region = (offset, GPU_PAGE_BYTES as u32, 1);
        self.backed(0, region, &flags.gpu_page_ready, &self.gpu_page_seen)?;
        self.map.object(usize::try_from(offset).ok()?)
    }

    /// Room for the details of the owner's statistics, and how many words of it are backed by memory.
    pub(super) fn detail_words(&self) -> Option<(&DetailWords, usize)> {
        let offset = usize::try_from(self.layout.details_offset()).ok()?;
        let ready = self.header().flags.details_ready.load(Ordering::Acquire) as usize;
        let count = ready.min(DETAIL_WORDS);
        if count == 0 || !self.map.populate(offset, count * size_of::<u64>()) {
            return None;
        }
        Some((self.map.object(offset)?, count))
    }

    /// Owner: memory is there for these details, which are final.
    pub(super) fn write_details(&self, words: &[u64]) {
        let offset = usize::try_from(self.layout.details_offset());
        let room: Option<&DetailWords> = offset.ok().and_then(|at| self.map.object(at));
        let Some(room) = room else { return };
        let count = room.write(words);
        self.header()
            .flags
            .details_ready
            .store(count as u32, Ordering::Release);
    }

    /// The block of wide staging that unit `unit` is in.
    pub fn wide_block(&self, unit: u32) -> Option<(NonNull<u8>, usize)> {
        let flags = &self.header().flags;
        let layout = &self.layout;
        let index = (u64::from(unit) * UNIT_BYTES).checked_div(layout.wide_block_bytes.into())?;
        let index = u32::try_from(index).ok()?;
        let region = (
            layout.wide_offset(),
            layout.wide_block_bytes,
            layout.wide_blocks,
        );
        self.backed(index, region, &flags.wide_ready, &self.wide_seen)?;
        let offset = region.0 + u64::from(index) * u64::from(region.1);
        let bytes = region.1 as usize;
        Some((self.map.range(usize::try_from(offset).ok()?, bytes)?, bytes))
    }

    /// Whether the owner is likely to compute while messages that it sends are under way.
    pub fn computes(&self) -> bool {
        self.header().flags.computing.load(Ordering::Relaxed) != 0
    }

    /// Owner: writes the word only if it changes, because peers read the line.
    pub(super) fn set_computing(&self, computes: bool) {
        let computing = &self.header().flags.computing;
        if (computing.load(Ordering::Relaxed) != 0) != computes {
            computing.store(u32::from(computes), Ordering::Relaxed);
        }
    }

    /// Address of so many bytes of wide staging from a unit on, if they lie in one block.
    pub fn wide(&self, unit: u32, bytes: u64) -> Option<NonNull<u8>> {
        let (start, length) = self.wide_block(unit)?;
        let inside = u64::from(unit) * UNIT_BYTES % length as u64;
        if inside.checked_add(bytes)? > length as u64 {
            return None;
        }
        // SAFETY: the range was just seen to lie within the block.
        Some(unsafe { start.add(inside as usize) })
    }

    /// `Some` if element `index` of a region (offset, element size, elements) is backed by memory. What the
    /// owner says (`ready`) is bounded by the layout, and the pages are made present before they are first
    /// touched.
    #[inline]
    fn backed(
        &self,
        index: u32,
        region: (u64, u32, u32),
        ready: &AtomicU32,
        seen: &AtomicU32,
    ) -> Option<()> {
        let known = seen.load(Ordering::Acquire);
        if index < known {
            return Some(());
        }
        self.back(index, region, ready, seen)
    }

    #[cold]
    fn back(
        &self,
        index: u32,
        region: (u64, u32, u32),
        ready: &AtomicU32,
        seen: &AtomicU32,
    ) -> Option<()> {
        let known = seen.load(Ordering::Acquire);
        let ready = ready.load(Ordering::Acquire).min(region.2);
        if index >= ready {
            return None;
        }
        let start = usize::try_from(region.0 + u64::from(known) * u64::from(region.1)).ok()?;
        let bytes = (ready - known) as usize * region.1 as usize;
        if !self.map.populate(start, bytes) {
            return None;
        }
        seen.fetch_max(ready, Ordering::AcqRel);
        Some(())
    }

    /// Owner: memory is there for so many slots, and for their sheets where there are any.
    pub(super) fn set_slots_ready(&self, slots: u32) {
        self.header()
            .flags
            .slots_ready
            .store(slots, Ordering::Release);
    }

    /// Owner: memory is there for the GPU page.
    pub(super) fn set_gpu_page_ready(&self) {
        self.header()
            .flags
            .gpu_page_ready
            .store(1, Ordering::Release);
    }

    /// Owner: memory is there for so many blocks of wide staging.
    pub(super) fn set_wide_ready(&self, blocks: u32) {
        self.header()
            .flags
            .wide_ready
            .store(blocks, Ordering::Release);
    }

    /// Owner: memory is there for so many cells and chunks.
    pub(super) fn set_staging_ready(&self, cells: u32, chunks: u32) {
        self.header()
            .flags
            .cells_ready
            .store(cells, Ordering::Release);
        self.header()
            .flags
            .chunks_ready
            .store(chunks, Ordering::Release);
    }
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
