//! Physical memory that this process has mapped chunk by chunk, as frameworks' expandable segments are. Peers
//! find it by a file for each chunk.
//!
//! A chunk that is unmapped and mapped again has another number, and so does another chunk in its place. What
//! was sent of a reservation counts until a number in it has changed. From then on everything is sent anew,
//! as if it were another allocation.

use super::error::{Error, NotExportable, Result};
use super::export::Export;
use super::pointer::{self, Buffer};
use super::state::Entered;
use super::types::{IpcHandle, HANDLE_TYPE_FILE};
use hashbrown::{HashMap, HashSet};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::{FromRawFd, OwnedFd};

/// Chunks begin and end at multiples of this.
const GRANULE: u64 = 2 << 20;
/// Reservations that are remembered. If there are more, all are forgotten, and sent anew.
const RESERVATIONS_MAX: usize = 256;
/// Chunks of one reservation that are remembered.
const CHUNKS_MAX: usize = 1 << 16;

/// From this length on, a message has files sent of memory that the program has mapped itself: a file costs
/// both ends 0.2 ms, and the first one some milliseconds (`docs/decisions/chunks-by-files.md`).
const SHARED_FROM: u64 = 64 << 10;
/// After so many shorter messages, these have files sent, too: without, each loses about 10 us
/// (`docs/decisions/chunks-by-files.md`).
const SHORT_MAX: u32 = 16;

/// A chunk of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Where in the reservation it begins, bytes.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// What is known of a reservation of this process.
struct Reservation {
    /// The number by which peers know what was sent of it.
    number: u64,
    /// Chunks by their beginnings: bytes, and the driver's number.
    chunks: BTreeMap<u64, (u64, u64)>,
    /// Which peer has the file of which chunk.
    sent: HashSet<(u32, u64)>,
    /// How many short messages each peer was sent out of parts that it has not got.
    short: HashMap<u32, u32>,
}

/// The reservations of this process from which messages were sent.
#[derive(Default)]
pub struct Chunks {
    known: HashMap<u64, Reservation>,
    next: u64,
    /// Reservations that are no longer as they were sent, by their addresses and numbers.
    gone: Vec<(u64, u64)>,
}

/// A message's place in a reservation, for a peer.
pub struct Shared {
    /// What the peer needs to find it.
    pub export: Export,
    /// The chunks that it has not got yet.
    pub missing: Vec<Chunk>,
}

impl Chunks {
    /// How a peer finds `bytes` from a buffer on.
    ///
    /// # Errors
    /// It cannot be found by files.
    pub fn share(&mut self, buffer: &Buffer, bytes: u64, peer: u32) -> Result<Shared> {
        let refused = || Error::NotExportable(NotExportable::Virtual);
        if bytes == 0 || bytes > buffer.remaining() || buffer.base % GRANULE != 0 {
            return Err(refused());
        }
        if self.known.len() >= RESERVATIONS_MAX && !self.known.contains_key(&buffer.base) {
            self.forget_all();
        }
        let (first, end) = (buffer.offset, buffer.offset + bytes);
        for _ in 0..2 {
            let next = &mut self.next;
            let row = self.known.entry(buffer.base).or_insert_with(|| {
                *next += 1;
                Reservation {
                    number: *next,
                    chunks: BTreeMap::new(),
                    sent: HashSet::new(),
                    short: HashMap::new(),
                }
            });
            let Some(chunks) = row.find(buffer, (first, end)).ok_or_else(refused)? else {
                // It has changed.
                self.forget(buffer.base);
                continue;
            };
            let number = row.number;
            let missing = chunks
                .iter()
                .filter(|chunk| !row.sent.contains(&(peer, chunk.offset)));
            let missing = missing.copied().collect();
            let export = Export {
                handle: handle(first, end),
                base: buffer.base,
                size: buffer.size,
                offset: first,
                buffer_id: number,
                uuid: buffer.uuid,
            };
            return Ok(Shared { export, missing });
        }
        Err(refused())
    }

    /// Whether a peer is to get the files of what a message of so many bytes lies in. Short ones are counted.
    pub fn is_due(&mut self, base: u64, peer: u32, bytes: u64) -> bool {
        let row = self.known.get_mut(&base);
        bytes >= SHARED_FROM
            || row.is_some_and(|row| {
                let count = row.short.entry(peer).or_default();
                *count = count.saturating_add(1);
                *count > SHORT_MAX
            })
    }

    /// A peer has the files of chunks.
    pub fn sent(&mut self, base: u64, peer: u32, chunks: &[Chunk]) {
        if let Some(row) = self.known.get_mut(&base) {
            row.sent
                .extend(chunks.iter().map(|chunk| (peer, chunk.offset)));
        }
    }

    /// A peer has not got what it was sent, or no longer has it.
    pub fn lost(&mut self, peer: u32) {
        for row in self.known.values_mut() {
            row.sent.retain(|(whose, _)| *whose != peer);
        }
    }

    /// Looks at some chunks of each reservation. Returns those reservations that are no longer as they were
    /// sent, by address and number.
    pub fn gone(&mut self, most: usize) -> Vec<(u64, u64)> {
        let changed = self.known.iter().filter(|(base, row)| {
            let mut chunks = row.chunks.iter().rev().take(most);
            chunks.any(|(offset, (_, number))| number_at(**base + offset) != Some(*number))
        });
        let changed: Vec<u64> = changed.map(|(base, _)| *base).collect();
        changed.into_iter().for_each(|base| self.forget(base));
        std::mem::take(&mut self.gone)
    }

    fn forget(&mut self, base: u64) {
        if let Some(row) = self.known.remove(&base) {
            self.gone.push((base, row.number));
        }
    }

    fn forget_all(&mut self) {
        let all = self.known.drain();
        self.gone.extend(all.map(|(base, row)| (base, row.number)));
    }
}

impl Reservation {
    /// The chunks that a range lies in, as the driver says. `Some(None)`: what was known is no longer true.
    /// `None`: they cannot be exported, or there is nothing.
    #[allow(clippy::option_option)] // as documented
    fn find(&mut self, buffer: &Buffer, (first, end): (u64, u64)) -> Option<Option<Vec<Chunk>>> {
        let (mut at, mut found) = (first, Vec::new());
        while at < end {
            let number = number_at(buffer.base + at)?;
            let known = self.chunks.range(..=at).next_back();
            let known = known.map(|(offset, (bytes, number))| (*offset, *bytes, *number));
            let (offset, bytes) = match known {
                Some((offset, bytes, known)) if at < offset + bytes => {
                    if known != number {
                        return Some(None);
                    }
                    (offset, bytes)
                }
                _ => {
                    let (offset, bytes) = extent(buffer, at, number);
                    let overlaps = self.chunks.range(offset..offset + bytes).next().is_some();
                    if overlaps || self.chunks.len() >= CHUNKS_MAX {
                        return Some(None);
                    }
                    self.chunks.insert(offset, (bytes, number));
                    (offset, bytes)
                }
            };
            found.push(Chunk { offset, bytes });
            at = offset + bytes;
        }
        Some(Some(found))
    }
}

/// The driver's number of the chunk at an address, if that can be exported as a file.
fn number_at(address: u64) -> Option<u64> {
    let (number, types) = pointer::number_and_handle_types(address)?;
    (number != 0 && types & u64::from(HANDLE_TYPE_FILE) != 0).then_some(number)
}

/// Where the chunk with this number that holds a place begins in a buffer's reservation, and how long it is.
/// The driver does not say: neighbours are asked for their numbers, ever further away.
fn extent(buffer: &Buffer, at: u64, number: u64) -> (u64, u64) {
    let page = at / GRANULE;
    let pages = buffer.size / GRANULE;
    let is_in = |page: u64| number_at(buffer.base + page * GRANULE) == Some(number);
    let first = page - reach(page, |steps| is_in(page - steps));
    let last = page + reach(pages.saturating_sub(1) - page, |steps| is_in(page + steps));
    (first * GRANULE, (last - first + 1) * GRANULE)
}

/// How many steps, at most `most`, stay inside. `is_in` holds up to some number of steps.
fn reach(most: u64, is_in: impl Fn(u64) -> bool) -> u64 {
    let (mut known, mut step) = (0, 1);
    while known + step <= most && is_in(known + step) {
        known += step;
        step *= 2;
    }
    // No further than `known + step - 1`.
    let mut beyond = (known + step).min(most + 1);
    while beyond - known > 1 {
        let middle = known + (beyond - known) / 2;
        if is_in(middle) {
            known = middle;
        } else {
            beyond = middle;
        }
    }
    known
}

/// A file by which another process finds the chunk at an address.
///
/// # Errors
/// The driver's.
pub fn file_of(buffer: &Buffer, chunk: &Chunk) -> Result<OwnedFd> {
    let entered = Entered::enter(buffer.context)?;
    let driver = entered.driver();
    let address = std::ptr::without_provenance_mut::<c_void>((buffer.base + chunk.offset) as usize);
    let (mut handle, mut file) = (0u64, -1i32);
    // SAFETY: what is asked for is written; the handle is given back once.
    let exported = unsafe {
        driver.mem_retain_allocation_handle(&raw mut handle, address)?;
        let to = (&raw mut file).cast();
        let exported = driver.mem_export_to_shareable_handle(to, handle, HANDLE_TYPE_FILE, 0);
        if let Err(error) = driver.mem_release(handle) {
            log::debug!("giving a handle back: {error}");
        }
        exported
    };
    exported?;
    if file < 0 {
        return Err(Error::NotExportable(NotExportable::Virtual));
    }
    // SAFETY: the file was just opened for this process.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    let _ = rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::CLOEXEC);
    Ok(file)
}

/// Stands in the place of a handle of the driver's.
const MAGIC: u64 = 0x414e_4143_4855_4e4b;

/// The part of a reservation that a message needs: bytes from and to.
fn handle(first: u64, end: u64) -> IpcHandle {
    let mut bytes = [0; 64];
    for (place, word) in bytes.chunks_exact_mut(8).zip([MAGIC, first, end]) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    IpcHandle(bytes)
}

/// The same of an export, if it is one of this kind.
#[must_use]
pub fn needs(export: &Export) -> Option<(u64, u64)> {
    let word = |at: usize| {
        let bytes = export.handle.0[8 * at..8 * at + 8].try_into();
        u64::from_ne_bytes(bytes.unwrap_or_default())
    };
    let (first, end) = (word(1), word(2));
    let is_sane = word(0) == MAGIC && first < end && end <= export.size;
    is_sane.then_some((first, end))
}

/// What a parcel of files says about them: whose they are, and where each chunk belongs.
#[must_use]
pub fn words(export: &Export, chunks: &[Chunk]) -> Vec<u64> {
    let mut words = vec![MAGIC, export.base, export.buffer_id, export.size];
    words.extend(chunks.iter().flat_map(|chunk| [chunk.offset, chunk.bytes]));
    words
}

/// The base, number and chunks that a parcel with so many files names.
#[must_use]
pub fn told(words: &[u64], files: usize) -> Option<([u64; 2], Vec<Chunk>)> {
    let (&[MAGIC, base, number, size], rest) = words.split_first_chunk::<4>()? else {
        return None;
    };
    let chunk = |pair: &[u64]| Chunk {
        offset: pair[0],
        bytes: pair[1],
    };
    let chunks: Vec<Chunk> = rest.chunks_exact(2).map(chunk).collect();
    let fits = |chunk: &Chunk| {
        let end = chunk.offset.checked_add(chunk.bytes);
        let is_aligned = chunk.offset % GRANULE == 0 && chunk.bytes % GRANULE == 0;
        chunk.bytes > 0 && is_aligned && end.is_some_and(|end| end <= size)
    };
    let is_sane = rest.len() == 2 * files && size % GRANULE == 0 && chunks.iter().all(fits);
    // A parcel without files would be remembered, and nothing would ever ask for it.
    (is_sane && files > 0).then_some(([base, number], chunks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_run_is_found_whatever_its_length() {
        for most in 0..40 {
            for run in 0..=most {
                assert_eq!(reach(most, |steps| steps <= run), run, "{run} of {most}");
            }
        }
        // Without asking for each.
        let asked = std::cell::Cell::new(0);
        let is_in = |steps: u64| {
            asked.set(asked.get() + 1);
            steps <= 1_000_000
        };
        assert_eq!(reach(1 << 40, is_in), 1_000_000);
        assert!(asked.get() < 60, "{}", asked.get());
    }

    #[test]
    fn what_is_said_of_files_is_read_as_it_is_written() {
        let export = Export {
            handle: handle(3 << 20, 9 << 20),
            base: 1 << 40,
            size: 64 << 20,
            offset: 3 << 20,
            buffer_id: 7,
            uuid: [3; 16],
        };
        assert_eq!(needs(&export), Some((3 << 20, 9 << 20)));
        assert!(export.holds(6 << 20) && !export.holds((6 << 20) + 1));
        // Where nothing is mapped.
        for offset in [0, (3 << 20) - 1, 9 << 20, u64::MAX] {
            let outside = Export { offset, ..export };
            assert!(!outside.holds(1), "{offset}");
        }
        let short = Export {
            size: 8 << 20,
            ..export
        };
        assert_eq!(needs(&short), None, "beyond its end");
        let other = Export {
            handle: IpcHandle([9; 64]),
            ..export
        };
        assert_eq!(needs(&other), None, "the driver's own");
        let chunk = |offset: u64, bytes: u64| Chunk {
            offset: offset << 20,
            bytes: bytes << 20,
        };
        let chunks = [chunk(2, 4), chunk(6, 58)];
        let good = words(&export, &chunks);
        let expected = ([1 << 40, 7], chunks.to_vec());
        assert_eq!(told(&good, 2), Some(expected));
        assert_eq!(told(&good, 1), None, "a file is missing");
        assert_eq!(told(&good[..5], 2), None, "cut off");
        assert_eq!(told(&words(&export, &[]), 0), None, "no file");
        for bad in [
            chunk(6, 60),
            chunk(6, 0),
            chunk(5, 2),
            chunk(u64::MAX >> 21, 2),
        ] {
            assert_eq!(told(&words(&export, &[bad]), 1), None, "{bad:?}");
        }
        let mut foreign = good;
        foreign[0] += 1;
        assert_eq!(told(&foreign, 2), None);
    }
}
