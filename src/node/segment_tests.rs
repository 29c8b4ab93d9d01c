//! Tests of the owner's side: slots, nonces, staging, and what happens when the program closes our file
//! descriptors.

use super::*;
use crate::node::slot::{Refused, SlotState};
use std::collections::HashSet;
use std::os::fd::AsRawFd;

fn segment(options: &Options) -> Segment {
    let owner = Owner {
        job: 7,
        world_rank: 0,
        pid: std::process::id(),
        start: 1,
    };
    Segment::create(owner, options).expect("a segment")
}

fn small() -> Options {
    Options {
        slots: 600,
        staging_bytes: 64 << 10,
        chunk_bytes: 16 << 10,
        cell_bytes: 4096,
        cells: 3,
        ..Options::default()
    }
}

#[test]
fn every_slot_is_handed_out_once() {
    let segment = segment(&small());
    let slots: HashSet<_> = std::iter::from_fn(|| segment.alloc(None)).collect();
    assert_eq!(slots.len(), 600);
    assert_eq!(segment.slots_in_use(), 600);
    assert!(slots.iter().all(|&slot| slot < 600));
    assert!(
        segment.free(599) && !segment.free(599) && !segment.free(600) && !segment.free(u32::MAX)
    );
    assert_eq!(segment.alloc(None), Some(599));
    assert_eq!(segment.alloc(None), None);
}

#[test]
fn the_slot_that_is_wanted_is_had_if_it_is_free() {
    let segment = segment(&small());
    let slots: Vec<u32> = (0..5)
        .map(|_| segment.alloc(None).expect("a slot"))
        .collect();
    for wanted in [slots[1], slots[3], slots[0], slots[4]] {
        assert!(segment.free(wanted));
        assert_eq!(segment.alloc(Some(wanted)), Some(wanted));
    }
    // In use, or none at all.
    for wanted in [slots[2], 600, u32::MAX] {
        let other = segment.alloc(Some(wanted)).expect("a slot");
        assert!(!slots.contains(&other), "{wanted}");
        assert!(segment.free(other));
    }
    // Each comes once, whatever was taken out of their middle.
    let rest: HashSet<_> = std::iter::from_fn(|| segment.alloc(None)).collect();
    assert_eq!(rest.len(), 600 - 5);
    assert_eq!(segment.slots_in_use(), 600);
    assert!(rest.iter().all(|slot| segment.free(*slot)));
    assert_eq!(segment.slots_in_use(), 5);
}

#[test]
fn all_of_a_million_slots_can_be_had() {
    let segment = segment(&Options::default());
    assert_eq!(std::iter::from_fn(|| segment.alloc(None)).count(), 1 << 20);
    assert!(segment.post((1 << 20) - 1, &Message::default()).is_some());
    assert_eq!(segment.post(1 << 20, &Message::default()), None);
}

#[test]
fn a_reused_slot_refuses_its_former_message() {
    let segment = segment(&small());
    let mut nonces = HashSet::new();
    let index = segment.alloc(None).expect("a slot");
    let first = segment.post(index, &Message::default()).expect("a nonce");
    nonces.insert(first);
    for _ in 0..1_000 {
        assert!(segment.free(index));
        assert_eq!(segment.alloc(None), Some(index));
        let slot = segment.slot(index).expect("the slot");
        assert_eq!(slot.claim(first), Err(Refused::Stale));
        let nonce = segment.post(index, &Message::default()).expect("a nonce");
        assert!(
            crate::node::slot::is_nonce(nonce) && nonces.insert(nonce),
            "nonces do not repeat"
        );
        assert_eq!(slot.claim(first), Err(Refused::Stale));
        assert_eq!(slot.state(nonce), Ok(SlotState::Posted));
    }
}

#[test]
fn two_segments_draw_different_nonces() {
    let (one, two) = (segment(&small()), segment(&small()));
    let nonces = |segment: &Segment| {
        (0..100)
            .map(|_| segment.fresh_nonce())
            .collect::<HashSet<_>>()
    };
    assert!(nonces(&one).is_disjoint(&nonces(&two)));
}

#[test]
fn staging_is_there_from_its_first_use_on() {
    let segment = segment(&small());
    assert!(segment.staging().is_none());
    let first = segment.take_chunk().expect("a chunk");
    let chunks: Vec<_> = std::iter::from_fn(|| segment.take_chunk()).collect();
    assert_eq!((first, chunks), (0, vec![1, 2, 3]));
    let cells: Vec<_> = std::iter::from_fn(|| segment.take_cell(4096)).collect();
    let cell = |index: u32| FIRST_CELL + index * segment.layout().granules();
    assert_eq!(cells, [cell(0), cell(1), cell(2)]);
    assert_eq!(segment.free_pieces(), (0, 0));
    assert!(segment.give(2) && !segment.give(2) && !segment.give(4));
    assert!(segment.give(cell(1)) && !segment.give(cell(1)) && !segment.give(u32::MAX));
    assert_eq!(segment.free_pieces(), (1, 1));
    assert_eq!(
        segment.staging().map(|(_, bytes)| bytes),
        Some(3 * 4096 + (64 << 10))
    );
    for (piece, value) in [(0, 1_u8), (3, 2), (cell(0), 3), (cell(2), 4)] {
        let (address, bytes) = segment.piece(piece).expect("a piece");
        // SAFETY: the piece is ours, in bounds and backed by memory.
        unsafe { address.as_ptr().write_bytes(value, bytes as usize) };
    }
    for (piece, value) in [(0, 1_u8), (3, 2), (cell(0), 3), (cell(2), 4)] {
        let (address, bytes) = segment.piece(piece).expect("a piece");
        // SAFETY: as above, and nobody writes it now.
        let bytes = unsafe { std::slice::from_raw_parts(address.as_ptr(), bytes as usize) };
        assert!(
            bytes.iter().all(|&byte| byte == value),
            "pieces do not overlap"
        );
    }
}

#[test]
fn no_staging_is_no_error() {
    let segment = segment(&Options {
        staging_bytes: 0,
        cells: 0,
        ..small()
    });
    assert_eq!((segment.take_chunk(), segment.take_cell(1)), (None, None));
    assert!(segment.staging().is_none());
}

#[test]
fn the_file_cannot_change_its_size_and_is_not_inherited() {
    let segment = segment(&small());
    let fd = segment.file.get().expect("the memfd");
    let size = libc::off_t::try_from(segment.layout().bytes()).expect("a size");
    for size in [size - 4096, size + 4096] {
        // SAFETY: a plain system call on an open file descriptor.
        let result = unsafe { libc::ftruncate(fd.as_raw_fd(), size) };
        assert_eq!(result, -1, "sealed");
    }
    // SAFETY: as above.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
    assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
}

/// Programs may close every file descriptor, and open their own files under the numbers.
#[test]
fn a_stolen_descriptor_number_is_left_alone() {
    let segment = segment(&small());
    let theirs = tempfile_with(b"precious");
    let number = segment.file_number();
    // SAFETY: puts the file in the place of our own memfd, as a program may.
    assert_eq!(unsafe { libc::dup2(theirs.as_raw_fd(), number) }, number);
    assert_eq!(segment.alloc(None), None, "no growth without the file");
    assert_eq!(segment.take_chunk(), None);
    drop(segment);
    assert_eq!(
        sys::file_stat(number).expect("still open").size,
        8,
        "neither closed nor written"
    );
    // SAFETY: the number is the copy made above.
    unsafe { libc::close(number) };
}

fn tempfile_with(bytes: &[u8]) -> std::fs::File {
    use std::io::Write;
    let mut file = std::fs::File::from(sys::memfd(c"theirs").expect("a memfd"));
    file.write_all(bytes).expect("written");
    file
}

#[test]
fn checksums_lie_beside_their_message_and_go_with_it() {
    let segment = segment(&Options {
        sheets: true,
        ..small()
    });
    let sums = |seed: u32| -> crate::node::Sums { std::array::from_fn(|i| seed + i as u32) };
    let slots: Vec<u32> = std::iter::from_fn(|| segment.alloc(None)).collect();
    let post = |slot: &u32| {
        segment
            .post_with(*slot, &Message::default(), Some(&sums(1000 * slot)))
            .expect("a nonce")
    };
    let nonces: Vec<u64> = slots.iter().map(post).collect();
    for (slot, nonce) in slots.iter().zip(&nonces) {
        let sheet = segment.sheet(*slot).expect("a sheet");
        assert_eq!(sheet.read(*nonce), Some(sums(1000 * slot)));
        assert_eq!(sheet.read(nonce ^ 0x100), None);
    }
    let again = segment.post_with(3, &Message::default(), Some(&sums(7)));
    let sheet = segment.sheet(3).expect("a sheet");
    assert_eq!(sheet.read(again.expect("a nonce")), Some(sums(7)));
    assert!(nonces.iter().all(|nonce| sheet.read(*nonce).is_none()));
}

#[test]
fn without_sheets_there_is_no_place_for_checksums() {
    let segment = segment(&small());
    let slot = segment.alloc(None).expect("a slot");
    let sums = [0; crate::node::BLOCKS];
    assert!(segment.sheet(slot).is_none());
    assert_eq!(
        segment.post_with(slot, &Message::default(), Some(&sums)),
        None
    );
}
