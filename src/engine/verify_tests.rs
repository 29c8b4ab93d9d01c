//! Tests of the checksums: blocks, and where a difference is found.

use super::*;
use crate::cuda::Lent;
use proptest::prelude::*;

/// CRC-32 bit by bit (ISO 3309, reflected 0xEDB88320), not the crate that the code uses.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg())
        })
    })
}

fn data(length: usize) -> Vec<u8> {
    (0..length)
        .map(|i| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3])
        .collect()
}

#[test]
fn a_block_is_a_page_until_there_are_more_pages_than_checksums() {
    // 62 checksums: 256 bytes less a nonce of 8, 4 bytes each.
    assert_eq!(BLOCKS, 62);
    for (length, bytes) in [
        (0, 4096),
        (62, 4096),
        (62 * 4096, 4096),
        (62 * 4096 + 1, 8192),
        (62 * 8192, 8192),
        // 277,094,464.5 bytes are more than 67,650 pages.
        (1 << 34, 67_651 * 4096),
    ] {
        assert_eq!(block_bytes(length), bytes, "{length}");
        assert!(length.div_ceil(bytes) <= 62);
    }
}

#[test]
fn each_block_has_its_crc() {
    let bytes = data(300_000);
    let sums = Summing::of(&bytes);
    let blocks: Vec<u32> = bytes.chunks(8192).map(crc32).collect();
    assert_eq!(sums[..blocks.len()], blocks);
    assert!(sums[blocks.len()..].iter().all(|sum| *sum == 0));
}

proptest! {
    #[test]
    fn it_does_not_matter_in_which_pieces_the_bytes_come(
        length in 1..40_000_usize,
        pieces in proptest::collection::vec(1..9_000_usize, 1..20),
    ) {
        let bytes = data(length);
        let mut summing = Summing::new(length as u64);
        let (mut at, mut piece) = (0, pieces.iter().cycle());
        while at < length {
            let to = (at + piece.next().unwrap()).min(length);
            summing.feed(&bytes[at..to]);
            at = to;
        }
        prop_assert_eq!(summing.sums(), Summing::of(&bytes));
    }

    #[test]
    fn a_flipped_bit_is_found_in_its_block(length in 1..600_000_usize, at in any::<proptest::sample::Index>(), bit in 0..8_u32) {
        let mut bytes = data(length);
        let before = Summing::of(&bytes);
        let at = at.index(length);
        bytes[at] ^= 1_u8 << bit;
        let offset = first_difference(&before, &Summing::of(&bytes), length as u64).unwrap() as usize;
        prop_assert!(offset <= at && at < offset + block_bytes(length as u64) as usize);
        prop_assert_eq!(first_difference(&before, &before, length as u64), None);
    }
}

#[test]
fn a_report_names_ranks_tag_path_and_place() {
    let about = About {
        of: Of::From(3),
        own: 5,
        tag: 77,
        length: 10_000,
        path: Path::HostPipeline,
    };
    let text = about.report(8192);
    for part in [
        "10000 bytes",
        "from rank 3",
        "to rank 5",
        "tag 77",
        "host_pipeline",
        "offset 8192",
        "the 1808 bytes",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let text = About {
        of: Of::FromLocal(1),
        ..about
    }
    .report(0);
    assert!(text.contains("from rank 1 of its communicator"), "{text}");
}

#[test]
fn host_memory_is_read_in_steps_and_by_its_layout() {
    let bytes = data(9 << 20);
    let mut gpu = Gpu::new(&crate::config::Config::default());
    // SAFETY: the bytes outlive the reading.
    let range = unsafe { Lent::new(bytes.as_ptr().cast_mut(), bytes.len() as u64) };
    let reading = HostReading::new(HostRuns::of(range), bytes.len() as u64);
    let mut reading = Reading::Host(reading);
    let polls = (1..10).find(|_| reading.poll(&mut gpu).unwrap().is_some());
    assert_eq!(polls, Some(3), "9 MiB in steps of 4");
    assert_eq!(reading.poll(&mut gpu).unwrap(), Some(Summing::of(&bytes)));
}
