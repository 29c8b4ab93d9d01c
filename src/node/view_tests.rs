//! Tests of what is believed of a segment, and what is not.

use super::*;
use proptest::prelude::*;
use std::os::fd::{AsFd, OwnedFd};

const OWNER: Owner = Owner {
    job: 1,
    world_rank: 2,
    pid: 3,
    start: 4,
};
const LAYOUT: Layout = Layout {
    slots: 40,
    chunk_bytes: 8192,
    chunks: 3,
    cell_bytes: 192,
    cells: 5,
    sheets: 0,
    wide_block_bytes: 2 << 18,
    wide_blocks: 2,
};
/// Size of a GPU page in whole pages, bytes.
const GPU_PAGE: u64 = (GPU_PAGE_BYTES as u64).div_ceil(4096) * 4096;

fn memory(bytes: u64) -> OwnedFd {
    let fd = sys::memfd(c"anabranch-test").expect("a memfd");
    std::fs::File::from(fd.try_clone().expect("a descriptor"))
        .set_len(bytes)
        .expect("a size");
    fd
}

fn map(fd: &OwnedFd, bytes: u64) -> Mapping {
    Mapping::new(fd.as_fd(), bytes).expect("a mapping")
}

fn segment() -> (OwnedFd, View) {
    let fd = memory(LAYOUT.bytes());
    let view = View::create(map(&fd, LAYOUT.bytes()), LAYOUT, OWNER).expect("a segment");
    (fd, view)
}

#[test]
fn regions_follow_each_other_on_pages() {
    // 8192 header; 5 * 192 = 960 -> one page; 3 * 8192; 40 * 256 = 10240 -> three pages.
    assert_eq!(LAYOUT.cells_offset(), 8192);
    assert_eq!(LAYOUT.chunks_offset(), 12_288);
    assert_eq!(LAYOUT.slots_offset(), 12_288 + 24_576);
    let gpu_page = 12_288 + 24_576 + 12_288;
    assert_eq!(LAYOUT.gpu_page_offset(), gpu_page);
    assert_eq!(LAYOUT.wide_offset(), gpu_page + GPU_PAGE);
    // Two blocks of two units of 256 KiB.
    assert_eq!(LAYOUT.details_offset(), gpu_page + GPU_PAGE + (4 << 18));
    // Two MiB for details, which take memory once they are there.
    assert_eq!(LAYOUT.bytes(), LAYOUT.details_offset() + (2 << 20));
    // As many sheets of 256 bytes as slots: three pages more.
    let with_sheets = Layout {
        sheets: 40,
        ..LAYOUT
    };
    assert_eq!(with_sheets.sheets_offset(), 12_288 + 24_576 + 12_288);
    assert_eq!(with_sheets.bytes(), LAYOUT.bytes() + 12_288);
    assert!(with_sheets.is_sane());
    let other = Layout {
        sheets: 39,
        ..LAYOUT
    };
    assert!(!other.is_sane());
}

#[test]
fn what_the_owner_wrote_is_what_a_peer_reads() {
    let (fd, view) = segment();
    let peer = View::open(map(&fd, LAYOUT.bytes()), OWNER).expect("a sound segment");
    assert_eq!((peer.layout(), peer.owner()), (LAYOUT, OWNER));
    assert!(!peer.ready() && !peer.finalizing() && !peer.device_user() && !peer.published());
    view.set_ready(Readiness::Long);
    view.set_device_user();
    assert!(peer.ready() && !peer.ready_for_all() && peer.device_user());
    view.set_ready(Readiness::All);
    assert!(peer.ready() && peer.ready_for_all());
    view.set_met(7, [3, 67, 9].into_iter());
    assert!(peer.has_met(6) && peer.has_met(7) && !peer.has_met(8));
    assert!(peer.refuses(3) && peer.refuses(9) && !peer.refuses(7));
    view.set_met(u32::MAX, [].into_iter());
    assert!(
        !peer.has_met(0) && !peer.refuses(3),
        "generations start over"
    );
    view.set_met(1, [].into_iter());
    assert!(peer.has_met(u32::MAX));
    view.set_ready(Readiness::No);
    view.set_finalizing();
    view.set_published();
    assert!(!peer.ready() && peer.finalizing() && peer.published());
    peer.announce();
    assert_eq!(view.announced(), 1);
    peer.counters()
        .get(127)
        .expect("the last counter")
        .store(9, Ordering::Relaxed);
    assert_eq!(
        view.counters()
            .get(127)
            .map(|counter| counter.load(Ordering::Relaxed)),
        Some(9)
    );
    assert!(view.counters().get(128).is_none());
}

#[test]
fn others_segments_are_refused() {
    let (fd, _view) = segment();
    let others = [
        Owner { job: 9, ..OWNER },
        Owner {
            world_rank: 9,
            ..OWNER
        },
        Owner { pid: 9, ..OWNER },
        Owner { start: 9, ..OWNER },
    ];
    for other in others {
        let refused = View::open(map(&fd, LAYOUT.bytes()), other).expect_err("another's");
        assert_eq!(refused, BadSegment::Owner);
    }
    let short = map(&fd, LAYOUT.bytes() - 4096);
    assert_eq!(
        View::open(short, OWNER).expect_err("too short"),
        BadSegment::Layout
    );
    let empty = memory(8192);
    assert_eq!(
        View::open(map(&empty, 8192), OWNER).expect_err("zeros"),
        BadSegment::Magic
    );
    let tiny = memory(100);
    assert_eq!(
        View::open(map(&tiny, 100), OWNER).expect_err("tiny"),
        BadSegment::Layout
    );
    assert!(Mapping::new(tiny.as_fd(), 101).is_err());
}

#[test]
fn slots_and_pieces_beyond_what_is_there_are_refused() {
    let (_fd, view) = segment();
    assert!(view.slot(0).is_none() && view.piece(0).is_none() && view.piece(FIRST_CELL).is_none());
    assert!(view.staging().is_none());
    view.set_slots_ready(10);
    view.set_staging_ready(5, 2);
    assert!(view.slot(9).is_some() && view.slot(10).is_none());
    assert!(view.piece(1).is_some() && view.piece(2).is_none());
    assert!(view.piece(FIRST_CELL + 4).is_some() && view.piece(FIRST_CELL + 5).is_none());
    let (_, bytes) = view.staging().expect("staging is there");
    assert_eq!(bytes as u64, 4096 + 2 * 8192);

    // An owner that lies is bounded by the layout.
    view.set_slots_ready(u32::MAX);
    view.set_staging_ready(u32::MAX, u32::MAX);
    for index in [40, 41, SLOTS_MAX, u32::MAX] {
        assert!(view.slot(index).is_none(), "slot {index}");
    }
    assert!(view.slot(39).is_some());
    for piece in [3, FIRST_CELL - 1, FIRST_CELL + 5, u32::MAX] {
        assert!(view.piece(piece).is_none(), "piece {piece}");
    }
    assert_eq!(view.piece(2).map(|(_, bytes)| bytes), Some(8192));
    assert!(view
        .piece_of(Entry {
            piece: 2,
            bytes: 8193
        })
        .is_none());
    assert!(view
        .piece_of(Entry {
            piece: 2,
            bytes: 8192
        })
        .is_some());
    assert!(view
        .piece_of(Entry {
            piece: FIRST_CELL,
            bytes: 193
        })
        .is_none());
}

#[test]
fn cells_alone_are_staging_too() {
    let (_fd, view) = segment();
    view.set_staging_ready(5, 0);
    assert_eq!(view.staging().map(|(_, bytes)| bytes), Some(960));
}

#[test]
fn the_doorbell_wakes_a_sleeper_and_is_never_lost() {
    const ROUNDS: u32 = 500;
    let (_fd, view) = segment();
    let (question, answer) = (AtomicU32::new(0), AtomicU32::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=ROUNDS {
                loop {
                    let seen = view.doorbell();
                    if question.load(Ordering::Acquire) == round {
                        break;
                    }
                    // Long enough that a lost wake-up shows as a test that takes hours.
                    view.wait_doorbell(seen, std::time::Duration::from_secs(60));
                }
                answer.store(round, Ordering::Release);
            }
        });
        for round in 1..=ROUNDS {
            question.store(round, Ordering::Release);
            view.ring_doorbell();
            let mut backoff = super::super::wait::Backoff::new();
            while answer.load(Ordering::Acquire) != round {
                backoff.snooze();
            }
        }
    });
}

proptest! {
    #[test]
    fn random_headers_never_lead_out_of_the_mapping(
        words in any::<[u64; 9]>(),
        kept in any::<u16>(),
        index in any::<u32>(),
    ) {
        let (fd, view) = segment();
        let header = view.map.range(0, 72).expect("a header").cast::<AtomicU64>();
        for (at, word) in words.into_iter().enumerate() {
            if kept & (1 << at) == 0 {
                // SAFETY: nine 8-byte words at the start of the mapping.
                unsafe { header.add(at).as_ref() }.store(word, Ordering::Relaxed);
            }
        }
        let Ok(peer) = View::open(map(&fd, LAYOUT.bytes()), OWNER) else { return Ok(()) };
        prop_assert!(peer.layout().bytes() == LAYOUT.bytes());
        view.set_slots_ready(u32::MAX);
        view.set_staging_ready(u32::MAX, u32::MAX);
        view.set_wide_ready(u32::MAX);
        view.set_gpu_page_ready();
        let _ = peer.slot(index).map(|slot| slot.nonce());
        let _ = peer.gpu_page().map(|gpu_page| gpu_page.gpus().len());
        for (address, bytes) in peer.wide_block(index).into_iter().chain(peer.wide(index, 4096).map(|at| (at, 4096))) {
            let start = address.as_ptr() as usize - peer.map.range(0, 0).expect("a base").as_ptr() as usize;
            prop_assert!((start + bytes) as u64 <= LAYOUT.bytes());
        }
        if let Some((address, bytes)) = peer.piece(index) {
            let start = address.as_ptr() as usize - peer.map.range(0, 0).expect("a base").as_ptr() as usize;
            prop_assert!(start as u64 + u64::from(bytes) <= LAYOUT.bytes());
        }
    }

    #[test]
    fn sane_layouts_compute_without_overflow(slots in any::<u32>(), chunk_bytes in any::<u32>(), chunks in any::<u32>(),
                                             cell_bytes in any::<u32>(), cells in any::<u32>(), sheets in any::<bool>(),
                                             wide_block_bytes in any::<u32>(), wide_blocks in any::<u32>()) {
        let sheets = if sheets { slots } else { 0 };
        let layout = Layout { slots, chunk_bytes, chunks, cell_bytes, cells, sheets, wide_block_bytes, wide_blocks };
        let exact = (u128::from(slots) + u128::from(sheets)) * 256 + u128::from(chunks) * u128::from(chunk_bytes)
            + u128::from(cells) * u128::from(cell_bytes) + u128::from(wide_blocks) * u128::from(wide_block_bytes);
        if layout.is_sane() {
            prop_assert!(u128::from(layout.bytes()) >= exact + 4096);
        }
    }
}
