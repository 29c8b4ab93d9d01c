//! Tests of the slot's states and contents.

use super::super::ring::Entry;
use super::*;
use proptest::prelude::*;
use std::sync::atomic::AtomicUsize;

const NONCE: u64 = 0x5a5a_0100;

fn slot() -> Box<Slot> {
    crate::node::map::fresh()
}

fn in_state(state: SlotState) -> Box<Slot> {
    let slot = slot();
    slot.post(NONCE, &Message::default());
    slot.word.store(NONCE | state as u64, Ordering::Relaxed);
    slot
}

const ALL: [SlotState; 8] = [
    SlotState::Posted,
    SlotState::Claimed,
    SlotState::WantGpu,
    SlotState::WantHost,
    SlotState::Eager,
    SlotState::Done,
    SlotState::Failed,
    SlotState::Cancelled,
];

/// The allowed transitions, from the module's diagram.
#[test]
fn only_the_documented_transitions_happen() {
    use SlotState::*;
    type Transition = fn(&Slot, u64) -> Result<(), Refused>;
    let table: [(Transition, &[SlotState], SlotState); 8] = [
        (Slot::claim, &[Posted], Claimed),
        (Slot::want_host, &[Posted, Claimed, WantGpu], WantHost),
        (Slot::want_gpu, &[Posted, Claimed], WantGpu),
        (Slot::retire, &[Posted], Eager),
        (
            Slot::send_ats,
            &[Posted, Claimed, WantGpu, WantHost, Eager],
            Done,
        ),
        (Slot::cancel, &[Posted, Eager], Cancelled),
        (
            |slot, nonce| slot.fail(nonce, 7),
            &[Posted, Claimed, WantGpu, WantHost, Eager],
            Failed,
        ),
        (
            |slot, nonce| slot.refuse(nonce, 7),
            &[Posted, WantGpu, WantHost, Eager],
            Failed,
        ),
    ];
    for (transition, from, to) in table {
        for state in ALL {
            let slot = in_state(state);
            let expected = if from.contains(&state) {
                Ok(())
            } else {
                Err(Refused::State(state))
            };
            assert_eq!(transition(&slot, NONCE), expected, "{state:?} to {to:?}");
            assert_eq!(
                slot.state(NONCE),
                Ok(if expected.is_ok() { to } else { state })
            );
            assert_eq!(
                slot.error_code(),
                match (expected, to) {
                    (Ok(()), Failed) => 7,
                    (Ok(()), Done) => witness(NONCE),
                    _ => 0,
                }
            );
        }
        let slot = in_state(Posted);
        assert_eq!(transition(&slot, NONCE + 0x100), Err(Refused::Stale));
        assert_eq!(transition(&slot, NONCE + 1), Err(Refused::Stale));
        slot.clear();
        assert_eq!(transition(&slot, NONCE), Err(Refused::Stale));
        assert_eq!(transition(&slot, 0), Err(Refused::Stale));
    }
}

/// A message for which the receiver has sent the ATS stays so for the owner, whatever somebody writes over
/// the state.
#[test]
fn a_settled_message_stays_settled() {
    for state in [
        SlotState::Posted,
        SlotState::Claimed,
        SlotState::WantGpu,
        SlotState::WantHost,
        SlotState::Eager,
    ] {
        let slot = in_state(SlotState::Claimed);
        assert_eq!(slot.settled(NONCE), Ok(SlotState::Claimed));
        slot.send_ats(NONCE).unwrap();
        slot.word.store(NONCE | state as u64, Ordering::Relaxed);
        assert_eq!(slot.settled(NONCE), Ok(SlotState::Done), "{state:?}");
        let slot = in_state(SlotState::Claimed);
        slot.turn_down(NONCE, 7);
        assert_eq!(slot.settled(NONCE), Ok(SlotState::Failed));
        slot.word.store(NONCE | state as u64, Ordering::Relaxed);
        assert_eq!(slot.settled(NONCE), Ok(SlotState::Done), "{state:?}");
    }
    assert_eq!(
        in_state(SlotState::Posted).settled(NONCE + 0x100),
        Err(Refused::Stale)
    );
}

/// Every field of a message counts in its digest.
#[test]
fn a_digest_tells_messages_apart() {
    let message = Message::default();
    let mut others = vec![message; 14];
    others[0].communicator = 1;
    others[1].source = 1;
    others[2].destination = 1;
    others[3].tag = 1;
    others[4].sequence = 1;
    others[5].length = 1;
    others[6].flags = 1;
    others[7].device[15] = 1;
    others[8].buffer_id = 1;
    others[9].base = 1;
    others[10].allocation_bytes = 1;
    others[11].offset = 1;
    others[12].ipc_handle[63] = 1;
    others[13].extra[1] = 1;
    let mut digests: Vec<u64> = others.iter().map(Message::digest).collect();
    digests.push(message.digest());
    assert!(digests.iter().all(|digest| digest >> 56 == 0));
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), 15);
}

/// So does every bit, and the place of a word.
#[test]
fn a_digest_tells_bits_and_places_apart() {
    let message = Message {
        base: 7,
        offset: 9,
        ..Message::default()
    };
    let swapped = Message {
        base: 9,
        offset: 7,
        ..Message::default()
    };
    let mut digests = vec![message.digest(), swapped.digest()];
    for bit in 0..64 {
        let word = 1 << bit;
        let mut handle = [0; 64];
        for at in 0..8 {
            handle.fill(0);
            handle[8 * at..8 * at + 8].copy_from_slice(&u64::to_ne_bytes(word));
            digests.push(
                Message {
                    ipc_handle: handle,
                    ..message
                }
                .digest(),
            );
        }
        let others = [
            Message {
                communicator: word,
                ..message
            },
            Message {
                sequence: word,
                ..message
            },
            Message {
                length: word,
                ..message
            },
            Message {
                allocation_bytes: word,
                ..message
            },
            Message {
                extra: [word, 0],
                ..message
            },
            Message {
                extra: [0, word],
                ..message
            },
        ];
        digests.extend(others.iter().map(Message::digest));
    }
    let count = digests.len();
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), count);
}

#[test]
fn final_states_are_those_that_end_a_send() {
    let is_final: Vec<_> = ALL.into_iter().filter(|state| state.is_final()).collect();
    assert_eq!(
        is_final,
        [SlotState::Done, SlotState::Failed, SlotState::Cancelled]
    );
}

#[test]
fn a_receiver_and_an_owner_never_both_win() {
    for _ in 0..200 {
        let slot = in_state(SlotState::Posted);
        let wins = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for transition in [Slot::claim, Slot::retire, Slot::cancel, Slot::claim] {
                let (slot, wins) = (&slot, &wins);
                scope.spawn(move || {
                    if transition(slot, NONCE).is_ok() {
                        wins.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        let state = slot.state(NONCE).expect("the nonce is the same");
        // The owner may still cancel an Eager message; it then wins twice against itself.
        let most = if state == SlotState::Cancelled { 2 } else { 1 };
        assert!((1..=most).contains(&wins.into_inner()), "{state:?}");
    }
}

#[test]
fn unknown_state_bits_are_refused() {
    for bits in 9..=255_u64 {
        let slot = in_state(SlotState::Posted);
        slot.word.store(NONCE | bits, Ordering::Relaxed);
        assert_eq!(slot.state(NONCE), Err(Refused::Stale));
        assert_eq!(slot.claim(NONCE), Err(Refused::Stale));
    }
}

#[test]
fn a_reader_never_gets_a_mix_of_two_messages() {
    let slot = slot();
    let uniform = |value: u64| Message {
        communicator: value,
        sequence: value,
        length: value,
        base: value,
        ipc_handle: [value as u8; 64],
        ..Message::default()
    };
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for use_number in 1..20_000_u64 {
                slot.post(use_number << 8, &uniform(use_number));
            }
            is_over.store(true, Ordering::Release);
        });
        while !is_over.load(Ordering::Acquire) {
            let Some(nonce) = slot.nonce() else { continue };
            if let Ok(message) = slot.read(nonce) {
                assert_eq!(message, uniform(nonce >> 8));
            }
            std::thread::yield_now();
        }
    });
    assert_eq!(slot.read(19_999 << 8), Ok(uniform(19_999)));
}

proptest! {
    #[test]
    fn a_message_comes_out_as_it_went_in(words in any::<[u64; 9]>(), small in any::<[u32; 4]>(),
                                          device in any::<[u8; 16]>(), half in any::<[u8; 32]>()) {
        let mut ipc_handle = [0; 64];
        ipc_handle[..32].copy_from_slice(&half);
        ipc_handle[32..].copy_from_slice(&half.map(|byte| !byte));
        let message = Message {
            communicator: words[0], source: small[0], destination: small[1],
            tag: small[2] as i32, sequence: words[1], length: words[2], flags: small[3], device,
            buffer_id: words[3], base: words[4], allocation_bytes: words[5], offset: words[6],
            ipc_handle, extra: [words[7], words[8]],
        };
        let slot = slot();
        slot.post(NONCE, &message);
        prop_assert_eq!(slot.read(NONCE), Ok(message));
        prop_assert_eq!(slot.length(), words[2]);
        prop_assert_eq!(slot.nonce(), Some(NONCE));
        prop_assert_eq!(slot.read(NONCE ^ 0x100), Err(Refused::Stale));
    }

    #[test]
    fn arbitrary_bytes_in_a_slot_do_no_harm(words in any::<[u64; 32]>(), nonce in any::<u64>()) {
        // SAFETY: a Slot is 256 bytes of atomics: any bits are valid.
        let slot: Box<Slot> = Box::new(unsafe { std::mem::transmute::<[u64; 32], Slot>(words) });
        for nonce in [nonce, words[0] & !0xff] {
            let _ = slot.read(nonce);
            let ring = slot.ring(nonce);
            let _ = (ring.in_flight(), ring.front(), ring.peek(usize::MAX), ring.pop());
            let _ = ring.push(Entry { piece: 1, bytes: 2 });
            let _ = (slot.claim(nonce), slot.want_host(nonce), slot.retire(nonce), slot.fail(nonce, 1));
        }
    }
}
