use super::*;

fn line() -> Box<Rtr> {
    Box::new(Rtr {
        word: AtomicU64::new(0),
        waiting: std::array::from_fn(|_| AtomicU64::new(0)),
        digest: AtomicU64::new(0),
        target: std::array::from_fn(|_| AtomicU64::new(0)),
    })
}

const WAITING: Waiting = Waiting {
    communicator: 0x1234,
    source: 3,
    tag: -7,
    after: 0x5500,
    bytes: 4096,
    offset: 512,
    rest: 0,
    buffer_id: 99,
};

fn target() -> Target {
    Target {
        ipc_handle: std::array::from_fn(|at| at as u8),
        device: [5; 16],
        base: 1 << 40,
        allocation_bytes: 1 << 20,
        offset: 512,
        buffer_id: 99,
    }
}

/// As the sender knows it.
fn expected() -> Waiting {
    Waiting {
        offset: 0,
        buffer_id: 0,
        ..WAITING
    }
}

#[test]
fn the_beginning_of_a_message_may_be_left_out() {
    const MIB: u64 = 1 << 20;
    let of = |bytes, rest| {
        let waiting = Waiting { bytes, ..WAITING };
        waiting.leaving(rest)
    };
    // Bytes, what is to be left out, and what is: a multiple of 64 KiB.
    for (bytes, rest, left) in [
        (64 * MIB, 3 * MIB, Some(3 * MIB)),
        (64 * MIB + 13, 3 * MIB + 13, Some(3 * MIB)),
        (64 * MIB, (64 << 10) - 1, Some(0)),
        (64 * MIB, 64 * MIB, None),
        (64 * MIB, 65 * MIB, None),
        (8192 * MIB, 4095 * MIB, Some(4095 * MIB)),
        (8192 * MIB, 4096 * MIB, None),
    ] {
        let Some(waiting) = of(bytes, rest) else {
            assert_eq!(left, None, "{bytes} {rest}");
            continue;
        };
        assert_eq!(Some(waiting.rest), left, "{bytes} {rest}");
        let line = line();
        line.open(8, &waiting, &target());
        let expected = |bytes| Waiting {
            bytes,
            ..expected()
        };
        assert_eq!(line.find(&expected(bytes)), Some((8, waiting)));
        assert_eq!(line.find(&expected(bytes - 1)), None, "another length");
        assert_eq!(line.target(&waiting), Ok(target()));
    }
    assert_eq!(
        of(MIB, 0),
        Some(Waiting {
            bytes: MIB,
            ..WAITING
        }),
        "whole"
    );
}

#[test]
fn a_sender_finds_what_it_expects_and_nothing_else() {
    let line = line();
    assert!(line.find(&expected()).is_none(), "no RTR is open");
    line.open(8, &WAITING, &target());
    assert_eq!(line.find(&expected()), Some((8, WAITING)));
    assert_eq!(line.target(&WAITING), Ok(target()));
    let others = [
        Waiting {
            communicator: 0x1235,
            ..expected()
        },
        Waiting {
            source: 4,
            ..expected()
        },
        Waiting {
            tag: 7,
            ..expected()
        },
        Waiting {
            after: 0x5600,
            ..expected()
        },
        Waiting {
            bytes: 4095,
            ..expected()
        },
    ];
    for other in others {
        assert!(line.find(&other).is_none(), "{other:?}");
    }
}

#[test]
fn it_is_taken_once_and_not_after_it_was_withdrawn() {
    let line = line();
    line.open(8, &WAITING, &target());
    assert!(line.take(8));
    assert!(!line.take(8));
    assert_eq!(line.state(8), Some(RtrState::Taken));
    assert!(!line.withdraw(8), "somebody writes");
    line.land(8);
    line.refuse(8);
    assert_eq!(line.state(8), Some(RtrState::Landed), "what has landed has");
    line.close();
    assert!(line.is_free());

    line.open(9, &WAITING, &target());
    assert!(!line.take(8), "the tag of another use");
    assert!(line.withdraw(9));
    assert!(!line.take(9));
    assert!(line.is_free());

    line.open(10, &WAITING, &target());
    assert!(line.take(10));
    line.refuse(10);
    assert_eq!(line.state(10), Some(RtrState::Refused));
    assert!(line.withdraw(10), "nobody writes any more");
    assert!(line.is_free());
}

#[test]
fn what_is_written_over_is_not_believed() {
    for at in 0..6 {
        let line = line();
        line.open(8, &WAITING, &target());
        line.waiting[at].fetch_xor(1 << 9, Ordering::Relaxed);
        assert!(line.find(&expected()).is_none(), "word {at}");
    }
    for at in 0..TARGET_WORDS {
        let line = line();
        line.open(8, &WAITING, &target());
        line.target[at].fetch_xor(1, Ordering::Relaxed);
        assert_eq!(
            line.target(&WAITING),
            Err(StagedPartError::Corrupt),
            "word {at}"
        );
    }
    let line = line();
    line.open(8, &WAITING, &target());
    assert!(line.take(8));
    line.word.store(u64::MAX, Ordering::Relaxed);
    assert_eq!(line.state(8), None);
}

#[test]
fn sender_and_receiver_find_the_same_line() {
    assert_eq!(WAITING.line(), expected().line());
    let lines = (0..1000).map(|tag| Waiting { tag, ..WAITING }.line());
    let lines: std::collections::HashSet<u32> = lines.collect();
    assert!(lines.iter().all(|line| (*line as usize) < RTRS));
    assert!(lines.len() > 60, "{} lines for 1000 tags", lines.len());
}

/// One side opens, withdraws and closes RTRs; the other takes them. It never takes one that was withdrawn,
/// and what it takes belongs to the use that it has read.
#[test]
fn two_threads_agree() {
    const ROUNDS: u64 = 20_000;
    let line = line();
    let now = AtomicU64::new(1);
    let offset = |round: u64| round * 3;
    let number = |round: u64| round % 5 + 1;
    let send = || {
        let mut taken = 0;
        loop {
            let round = now.load(Ordering::Acquire);
            if round == 0 {
                return taken;
            }
            let expected = Waiting {
                after: round << 8,
                ..expected()
            };
            let Some((tag, found)) = line.find(&expected) else {
                std::thread::yield_now();
                continue;
            };
            let to = line.target(&found);
            if line.take(tag) {
                let to = to.map(|to| (to.offset, to.buffer_id));
                assert_eq!(to, Ok((offset(round), number(round))));
                line.land(tag);
                taken += 1;
            }
        }
    };
    let receive = || {
        let mut withdrawn = 0;
        for round in 1..=ROUNDS {
            now.store(round, Ordering::Release);
            let place = Target {
                offset: offset(round),
                buffer_id: number(round),
                ..target()
            };
            let waiting = Waiting {
                after: round << 8,
                offset: place.offset,
                buffer_id: place.buffer_id,
                ..WAITING
            };
            line.open(round, &waiting, &place);
            if round % 3 == 0 {
                std::thread::yield_now();
            }
            // Until the other thread runs.
            while round == 1 && line.state(round) == Some(RtrState::Open) {
                std::thread::yield_now();
            }
            if line.withdraw(round) {
                withdrawn += 1;
                continue;
            }
            while line.state(round) == Some(RtrState::Taken) {
                std::thread::yield_now();
            }
            assert_eq!(line.state(round), Some(RtrState::Landed));
            line.close();
        }
        now.store(0, Ordering::Release);
        withdrawn
    };
    let (taken, withdrawn) = std::thread::scope(|scope| {
        let sender = scope.spawn(send);
        let withdrawn = receive();
        (sender.join().expect("a thread"), withdrawn)
    });
    assert_eq!(taken + withdrawn, ROUNDS);
    assert!(taken > 0 && withdrawn > 0, "{taken} and {withdrawn}");
}
