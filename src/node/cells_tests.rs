use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

fn layout(cell_bytes: u32, cells: u32) -> Layout {
    Layout {
        slots: 1,
        chunk_bytes: 64,
        chunks: 0,
        cell_bytes,
        cells,
        sheets: 0,
        wide_block_bytes: 0,
        wide_blocks: 0,
    }
}

fn filled(layout: &Layout) -> Cells {
    let mut cells = Cells::default();
    cells.fill(layout);
    cells
}

/// Where a piece begins, bytes.
fn start(layout: &Layout, piece: u32) -> u64 {
    let (cell, at) = (piece / layout.granules(), piece % layout.granules());
    u64::from(cell) * u64::from(layout.cell_bytes) + u64::from(at) * u64::from(layout.granule())
}

#[test]
fn short_messages_share_cells() {
    let layout = layout(16 << 10, 256);
    for (bytes, pieces) in [
        (0, 16_384),
        (256, 16_384),
        (257, 8_192),
        (1024, 4_096),
        (8192, 512),
        (8193, 256),
        (16_384, 256),
        (16_385, 0),
    ] {
        let mut cells = filled(&layout);
        let taken: Vec<u32> = std::iter::from_fn(|| cells.take(bytes)).collect();
        assert_eq!(taken.len(), pieces, "{bytes} bytes");
        assert!(taken.iter().all(|&piece| cells.give(piece)));
        assert_eq!(cells.free(), 256, "{bytes} bytes");
    }
}

#[test]
fn where_no_cell_is_whole_short_messages_take_longer_pieces() {
    let mut cells = filled(&layout(1024, 1));
    let half = cells.take(500).expect("a half");
    let other = cells.take(10).expect("the other half");
    assert_eq!((half, other), (0, 2));
    assert_eq!(cells.take(10), None);
    assert!(cells.give(other) && cells.give(half) && !cells.give(half));
    assert_eq!(cells.take(1024), Some(0));
}

#[test]
fn without_cells_there_are_none() {
    let mut cells = Cells::default();
    assert_eq!(cells.take(0), None);
    assert!(!cells.give(0));
}

proptest! {
    /// Whatever is taken and given back, in whatever order: pieces have room, lie in their cells and do not
    /// overlap; pieces that are not out are refused; in the end all cells are whole.
    #[test]
    fn pieces_do_not_overlap(
        cell_bytes in (1_u32..1200).prop_map(|n| n * 64),
        cells in 1_u32..6,
        steps in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>(), 0.0..1.1), 0..400),
    ) {
        let layout = layout(cell_bytes, cells);
        let mut pool = filled(&layout);
        let mut out: BTreeMap<u32, u64> = BTreeMap::new();
        for (takes, which, share) in steps {
            if takes {
                // Short ones most of the time.
                let bytes = (f64::from(cell_bytes) * share * share * share) as u64;
                let Some(piece) = pool.take(bytes) else { continue };
                prop_assert!(bytes <= u64::from(cell_bytes));
                let first = start(&layout, piece);
                let cell = u64::from(piece / layout.granules()) * u64::from(cell_bytes);
                prop_assert!(first + bytes <= cell + u64::from(cell_bytes));
                prop_assert!(piece / layout.granules() < cells);
                for (&other, &length) in &out {
                    let begin = start(&layout, other);
                    prop_assert!(other != piece);
                    prop_assert!(first + bytes <= begin || begin + length <= first);
                }
                out.insert(piece, bytes);
            } else if !out.is_empty() {
                let piece = *which.get(&out.keys().copied().collect::<Vec<_>>());
                out.remove(&piece);
                prop_assert!(pool.give(piece));
                prop_assert!(!pool.give(piece));
            }
        }
        for number in 0..cells * layout.granules() {
            prop_assert_eq!(pool.give(number), out.contains_key(&number), "{}", number);
        }
        prop_assert_eq!(pool.free(), cells as usize);
    }
}
