use super::*;

fn offer() -> Box<Offer> {
    crate::node::map::fresh()
}

const PART: Part = Part {
    way: Way::Host,
    offset: 1000,
    bytes: 10 * 256 + 3,
    chunk_bytes: 256,
    in_turn: false,
};

#[test]
fn an_offer_says_what_was_written() {
    let offer = offer();
    let relay = Part {
        way: Way::Relay {
            owner: 70_000,
            row: 15,
        },
        offset: 0,
        bytes: 1000,
        chunk_bytes: 1000,
        in_turn: true,
    };
    offer.open(5, &[PART, relay], None, None);
    assert_eq!(offer.len(5), Ok(2));
    assert_eq!(offer.len(6), Err(StagedPartError::Stale));
    let read = |number| {
        offer
            .staged_part(5, number)
            .map(|staged_part| staged_part.part())
    };
    assert_eq!(read(0), Some(Ok(PART)));
    assert_eq!(read(1), Some(Ok(relay)));
    assert_eq!(offer.staged_part(5, STAGED_PARTS).map(drop), None);
    offer.close();
    assert_eq!(read(0), Some(Err(StagedPartError::Stale)));
    assert_eq!(
        offer.len(0),
        Err(StagedPartError::Stale),
        "no use has tag 0"
    );
}

#[test]
fn parts_are_judged_by_the_message() {
    assert_eq!(PART.chunks(), 11);
    assert_eq!(PART.chunk(0), (1000, 256));
    assert_eq!(PART.chunk(10), (1000 + 2560, 3));
    assert_eq!(PART.span(9, 2), (1000 + 2304, 259));
    let lanes = |part: Part, staged_part| [0, 1, 2].map(|chunk| part.lane(staged_part, chunk));
    assert_eq!(lanes(PART, 1), [1, 1, 1]);
    let in_turn = Part {
        in_turn: true,
        ..PART
    };
    let staged_parts = [lanes(in_turn, 0), lanes(in_turn, 1)];
    assert_eq!(staged_parts, [[0, 2, 0], [1, 3, 1]], "four lanes");
    assert!(PART.is_sane(1000 + 2563) && !PART.is_sane(1000 + 2562));
    let wrong = [
        Part { bytes: 0, ..PART },
        Part {
            chunk_bytes: 0,
            ..PART
        },
        Part {
            offset: u64::MAX,
            ..PART
        },
        Part {
            bytes: 4096,
            chunk_bytes: 1,
            ..PART
        },
    ];
    assert!(wrong.iter().all(|part| !part.is_sane(1 << 40)));
}

#[test]
fn each_chunk_is_claimed_by_one_side() {
    let offer = offer();
    for round in 0..50 {
        offer.open(
            round + 1,
            &[Part {
                bytes: 4000,
                chunk_bytes: 1,
                ..PART
            }],
            None,
            None,
        );
        let staged_part = offer.staged_part(round + 1, 0).expect("there");
        let (mut sent, mut back) = (0, 4000);
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                let mut next = 0;
                while staged_part.claim(next).expect("sound") {
                    next += 1;
                }
                next
            });
            let mut end = 4000;
            loop {
                let (first, count) = staged_part.take_back(3).expect("sound");
                assert_eq!(first + count, end);
                if count == 0 {
                    break;
                }
                end = first;
            }
            (sent, back) = (sender.join().expect("joined"), end);
        });
        assert_eq!(sent, back, "each of 4000 by one of them");
    }
}

#[test]
fn chunks_pass_in_order_and_the_ring_is_bounded() {
    let offer = offer();
    offer.open(
        9,
        &[Part {
            bytes: 3000,
            chunk_bytes: 1,
            ..PART
        }],
        None,
        None,
    );
    let staged_part = offer.staged_part(9, 0).expect("there");
    let (mut filled, mut emptied) = (0, 0);
    let entry = |chunk| Filled {
        unit: chunk * 3,
        bytes: 77 + chunk,
    };
    for step in 0..9000_u32 {
        // A fixed irregular pattern that fills and empties the ring again and again.
        if (step * 7 + step / 11) % 5 < 3 && filled < 3000 {
            let fits = (filled - emptied) < STAGED_PART_ENTRIES as u32;
            let next = entry(filled);
            assert_eq!(staged_part.push(&mut filled, next), Ok(fits));
        } else if emptied < filled {
            assert_eq!(staged_part.entry_of(emptied), entry(emptied));
            assert_eq!(staged_part.pop(&mut emptied), Ok(()));
        }
        assert_eq!(staged_part.filled(), Ok((filled, false)));
        assert_eq!(staged_part.emptied(), Ok(emptied));
    }
    assert!(emptied > 2000);
    staged_part.give_up(filled);
    assert_eq!(staged_part.filled(), Ok((filled, true)));
    assert!(
        staged_part.push(&mut filled, entry(0)).is_err(),
        "over is over"
    );
}

#[test]
fn a_late_side_is_refused_and_changes_nothing() {
    let offer = offer();
    offer.open(1, &[PART], None, None);
    let late = offer.staged_part(1, 0).expect("there");
    assert_eq!(late.claim(0), Ok(true));
    offer.close();
    offer.open(2, &[PART], None, None);
    let staged_part = offer.staged_part(2, 0).expect("there");
    let (mut filled, mut emptied) = (0, 0);
    assert_eq!(late.claim(1), Err(StagedPartError::Stale));
    assert_eq!(late.take_back(1), Err(StagedPartError::Stale));
    assert_eq!(
        late.push(&mut filled, Filled { unit: 1, bytes: 1 }),
        Err(StagedPartError::Stale)
    );
    assert_eq!(late.pop(&mut emptied), Err(StagedPartError::Stale));
    assert!(late.is_closed() && !staged_part.is_closed());
    late.give_up(0);
    assert_eq!(staged_part.claimed(), Ok((0, 11)));
    assert_eq!(
        (staged_part.filled(), staged_part.emptied()),
        (Ok((0, false)), Ok(0))
    );
}

#[test]
fn what_is_written_over_is_noticed() {
    let offer = offer();
    offer.open(3, &[PART], None, None);
    let staged_part = offer.staged_part(3, 0).expect("there");
    let mut filled = 0;
    assert_eq!(
        staged_part.push(
            &mut filled,
            Filled {
                unit: 4,
                bytes: 256
            }
        ),
        Ok(true)
    );
    for bit in 0..64 {
        let entry = &offer.staged_parts[0].filled.entries[0];
        entry.fetch_xor(1 << bit, Ordering::Relaxed);
        assert_ne!(staged_part.entry_of(0).bytes, 256, "bit {bit}");
        entry.fetch_xor(1 << bit, Ordering::Relaxed);
    }
    assert_eq!(
        staged_part.entry_of(0),
        Filled {
            unit: 4,
            bytes: 256
        }
    );
    // A claim in the sender's name that the sender has not made.
    offer.staged_parts[0].claim.fetch_add(1, Ordering::Relaxed);
    assert_eq!(staged_part.claim(0), Err(StagedPartError::Corrupt));
    offer.staged_parts[0]
        .claim
        .store(3 << TAG_SHIFT | 5 << COUNT_BITS | 6, Ordering::Relaxed);
    assert_eq!(staged_part.claimed(), Err(StagedPartError::Corrupt));
    offer.staged_parts[0]
        .emptied
        .fetch_add(2, Ordering::Relaxed);
    assert_eq!(
        staged_part.push(
            &mut filled,
            Filled {
                unit: 4,
                bytes: 256
            }
        ),
        Err(StagedPartError::Corrupt)
    );
}

#[test]
fn the_name_of_an_offer_is_read_with_its_nonce_only() {
    for is_all_put in [false, true] {
        let asked = Asked {
            index: 63,
            tag: 12345,
            is_all_put,
        };
        let word = asked.pack(0xabcd_ef00);
        assert_eq!(Asked::unpack(word, 0xabcd_ef00), Some(asked));
        assert_ne!(Asked::unpack(word, 0xabcd_ee00), Some(asked));
    }
    assert_eq!(Asked::unpack(0, 0xabcd_ef00), None);
}

#[test]
fn a_target_is_read_as_it_was_written_or_not_at_all() {
    let pushed = Part {
        way: Way::Put,
        ..PART
    };
    let target = Target {
        ipc_handle: std::array::from_fn(|at| at as u8 + 1),
        device: [7; 16],
        base: 0x7f00_0000_0000,
        allocation_bytes: 1 << 30,
        offset: 4096,
        buffer_id: 11,
    };
    let offer = offer();
    offer.open(5, &[PART, pushed], Some(&target), None);
    let way = |number| {
        offer
            .staged_part(5, number)
            .map(|staged_part| staged_part.part().map(|part| part.way))
    };
    assert_eq!(way(0), Some(Ok(Way::Host)));
    assert_eq!(way(1), Some(Ok(Way::Put)));
    assert_eq!(offer.target(5), Ok(target));
    assert_eq!(offer.target(6), Err(StagedPartError::Stale));
    for word in &offer.target {
        word.fetch_xor(1 << 17, Ordering::Relaxed);
        assert_eq!(offer.target(5), Err(StagedPartError::Corrupt));
        word.fetch_xor(1 << 17, Ordering::Relaxed);
    }
    offer.open(6, &[pushed], None, None);
    assert_eq!(
        offer.target(6),
        Err(StagedPartError::Corrupt),
        "of another use"
    );
}

#[test]
fn what_the_sender_may_still_bring_is_known() {
    let offer = offer();
    offer.open(5, &[PART], None, None);
    let staged_part = offer.staged_part(5, 0).expect("a staged part");
    let (mut filled, entry) = (
        0,
        Filled {
            unit: 0,
            bytes: 256,
        },
    );
    assert!(!staged_part.is_being_filled(), "nothing is claimed");
    assert_eq!(staged_part.claim(0), Ok(true));
    assert!(staged_part.is_being_filled());
    assert_eq!(staged_part.push(&mut filled, entry), Ok(true));
    assert!(!staged_part.is_being_filled(), "it is there");
    assert_eq!(staged_part.claim(1), Ok(true));
    assert!(staged_part.is_being_filled());
    staged_part.give_up(filled);
    assert!(!staged_part.is_being_filled(), "it will not come");
}

#[test]
fn an_offer_names_the_one_before_it() {
    let (first, second) = (offer(), offer());
    first.open(5, &[PART], None, None);
    assert_eq!(first.behind(5), None);
    let before = Asked {
        index: 3,
        tag: 5,
        is_all_put: false,
    };
    second.open(6, &[PART], None, Some(before));
    assert_eq!(second.behind(6), Some(before));
    assert_eq!(second.behind(5), None, "of another use");
    second.open(7, &[PART], None, None);
    assert_eq!(second.behind(7), None);
    // Until one of the two sides has claimed all of its chunks, or it is over.
    let staged_part = first.staged_part(5, 0).expect("there");
    let chunks = PART.chunks();
    assert!(!first.is_claimed(5));
    assert_eq!(staged_part.claim(0), Ok(true));
    assert!(!first.is_claimed(5), "{chunks} chunks");
    assert!(!staged_part.is_closed());
    staged_part.take_back(u32::MAX).expect("sound");
    assert!(first.is_claimed(5) && staged_part.is_closed());
    first.open(8, &[PART], None, None);
    assert!(first.is_claimed(5) && !first.is_claimed(8));
    first.close();
    assert!(first.is_claimed(8));
}
