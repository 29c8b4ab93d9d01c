//! Fuzzing of what another rank may have written: each test begins with what is sound, writes over some of its
//! words, and does what a rank does with it. `crate::fuzz` says how the tests are run.

use super::directory::Directory;
use super::map::{shared, Mapping, Shared};
use super::relay::RELAY_UNITS;
use super::staged_part::{Filled, Offer, OFFER_BYTES, STAGED_PARTS};
use super::view::HEADER_BYTES;
use super::*;
use crate::fuzz::{is_guided, Bytes};
use std::os::fd::AsFd;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;

shared!(AtomicU64);

const JOB: u64 = 7;
const OWNER: Owner = Owner {
    job: JOB,
    world_rank: 3,
    pid: 42,
    start: 4711,
};
const LAYOUT: Layout = Layout {
    slots: 16,
    chunk_bytes: 8192,
    chunks: 3,
    cell_bytes: 1024,
    cells: 5,
    sheets: 16,
    wide_block_bytes: 2 << 18,
    wide_blocks: 2,
};

/// Memory that another process could write to.
fn memory(bytes: u64) -> (OwnedFd, Mapping) {
    let fd = sys::memfd(c"anabranch-test").expect("a memfd");
    std::fs::File::from(fd.try_clone().expect("a descriptor"))
        .set_len(bytes)
        .expect("a size");
    let map = Mapping::new(fd.as_fd(), bytes).expect("a mapping");
    (fd, map)
}

/// Writes over words of the first `bytes` of a mapping.
fn scribble(map: &Mapping, bytes: usize, input: &mut Bytes) {
    for _ in 0..input.below(12) {
        let at = input.below(bytes as u64 / 8) as usize * 8;
        let word: &AtomicU64 = map.object(at).expect("a word");
        let before = word.load(Ordering::Relaxed);
        let after = match input.byte() % 5 {
            0 => input.word(),
            1 => u64::from(input.byte()),
            2 => before ^ 1 << (input.byte() % 64),
            3 => before.wrapping_add(u64::from(input.byte())),
            _ => before.wrapping_sub(u64::from(input.byte())),
        };
        word.store(after, Ordering::Relaxed);
    }
}

/// One object in memory that another process could write to.
struct Room(Mapping);

impl Room {
    fn new<T: Shared>() -> Room {
        Room(memory((size_of::<T>() as u64).next_multiple_of(4096)).1)
    }

    fn object<T: Shared>(&self) -> &T {
        self.0.object(0).expect("room for it")
    }

    fn scribble<T: Shared>(&self, input: &mut Bytes) {
        scribble(&self.0, size_of::<T>(), input);
    }
}

fn message(input: &mut Bytes) -> Message {
    Message {
        communicator: input.word(),
        source: 3,
        destination: 4,
        tag: input.word() as i32,
        sequence: input.word(),
        length: input.word(),
        flags: input.word() as u32,
        base: input.word(),
        allocation_bytes: input.word(),
        offset: input.word(),
        extra: [input.word(), input.word()],
        ..Message::default()
    }
}

#[test]
fn rts() {
    bolero::check!(name = "rts")
        .with_iterations(20_000)
        .for_each(|bytes: &[u8]| {
            let _ = Rts::decode(bytes, JOB);
            let mut input = Bytes::new(bytes);
            let rts = Rts {
                job: JOB,
                sender: input.word() as u32,
                slot: input.word() as u32,
                nonce: input.word(),
                sequence: input.word(),
                length: input.word(),
                digest: input.word() >> 8,
            };
            let sent = rts.encode();
            match Rts::decode(&sent, JOB) {
                Ok(found) => assert!(found == rts && found.slot < SLOTS_MAX),
                Err(error) => assert_eq!(error, Rejection::Corrupt(Corruption::Range)),
            }
            let changed = input.edited(&sent);
            let (_, again) = (Rts::decode(&changed, JOB ^ 1), Rts::decode(&changed, JOB));
            if let Ok(again) = again {
                assert_eq!(again.encode()[..], changed[..]);
            }
        });
}

/// Looks at all that a peer looks at in a segment. What it is given lies in the segment.
fn look_at_all(view: &View, input: &mut Bytes) {
    let bytes = view.layout().bytes();
    let start = view.staging().map_or(0, |(at, _)| at.as_ptr() as usize);
    let first = start.saturating_sub(HEADER_BYTES as usize);
    let inside = |at: std::ptr::NonNull<u8>, length: usize| {
        let at = (at.as_ptr() as usize).wrapping_sub(first);
        assert!(start == 0 || (at + length) as u64 <= bytes);
    };
    if let Some((at, length)) = view.staging() {
        inside(at, length);
    }
    let _ = (
        view.ready(),
        view.published(),
        view.announced(),
        view.doorbell(),
    );
    let _ = (view.wishes(input.word()), view.computes(), view.details());
    for _ in 0..8 {
        let number = match input.byte() % 4 {
            0 => FIRST_CELL + u32::from(input.byte()),
            1 => input.word() as u32,
            _ => u32::from(input.byte() % 32),
        };
        if let Some(slot) = view.slot(number) {
            let nonce = slot.nonce().unwrap_or(0x100);
            let _ = (
                slot.read(nonce),
                slot.settled(nonce),
                slot.ring(nonce).front(),
            );
            let _ = slot.offered(nonce);
        }
        let _ = view.sheet(number).map(|sheet| sheet.read(0x100));
        let entry = Entry {
            piece: number,
            bytes: input.word() as u32,
        };
        let piece = view.piece_of(entry);
        let wide = view.wide_block(number);
        let few = view.wide(number, input.word()).map(|at| (at, 1));
        let places = piece.into_iter().chain(wide).chain(few);
        places.for_each(|(at, length)| inside(at, length));
        view.will_claim(number);
    }
    look_at_traffic(view.traffic());
    if let Some(page) = view.gpu_page() {
        look_at_gpus(page, input);
    }
}

fn look_at_traffic(page: &traffic::Page) {
    assert!(page.link_rates().count() <= traffic::LINK_RATES);
    for row in page.traffic() {
        assert!(row.gb_s.is_finite() && row.gb_s >= 0.0);
    }
    for line in page.measured() {
        let known = line.push.into_iter().chain(line.pull);
        known.for_each(|(alpha, gb_s)| assert!(alpha >= 0.0 && gb_s > 0.0));
    }
}

fn look_at_gpus(page: &GpuPage, input: &mut Bytes) {
    for row in page.gpus() {
        let _ = (row.uuid(), row.is_used(), row.wiring(), row.take_wish());
        if let Some(exported) = row.exported() {
            let units = row.units(&exported);
            let taker = Taker {
                rank: 3,
                tag: input.word() as u32,
            };
            let count = u32::from(input.byte()) % 64;
            if let Some(unit) = units.take(count, taker) {
                assert!((unit + count) as usize <= RELAY_UNITS);
                units.give(unit, count, taker);
            }
            let _ = (units.reclaim(3), units.takers().count(), units.close());
            units.open();
        }
    }
    let mut seen = input.word();
    while page.retired().since(&mut seen).is_some() {}
    look_at_offer(page.offer(u32::from(input.byte()) % 64), input);
    if let Some(rtr) = page.rtr(u32::from(input.byte()) % 64) {
        let _ = (rtr.is_taken(), rtr.leaves(), rtr.is_promised());
    }
}

#[test]
fn segment() {
    bolero::check!(name = "segment")
        .with_iterations(500)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            let (fd, map) = memory(LAYOUT.bytes());
            let other = Mapping::new(fd.as_fd(), LAYOUT.bytes()).expect("a mapping");
            let own = View::create(map, LAYOUT, OWNER).expect("a segment");
            own.set_slots_ready(16);
            own.set_staging_ready(5, 3);
            own.set_wide_ready(2);
            own.set_gpu_page_ready();
            let all = Mapping::new(fd.as_fd(), LAYOUT.bytes()).expect("a mapping");
            scribble(&all, 256, &mut input);
            let Ok(view) = View::open(other, OWNER) else {
                return;
            };
            assert_eq!(view.layout().bytes(), LAYOUT.bytes());
            look_at_all(&view, &mut input);
            scribble(&all, HEADER_BYTES as usize, &mut input);
            look_at_all(&view, &mut input);
            scribble(&all, LAYOUT.bytes() as usize, &mut input);
            look_at_all(&view, &mut input);
        });
}

/// A message in a slot, from either side, with somebody who writes over it.
#[test]
fn slot() {
    bolero::check!(name = "slot")
        .with_iterations(5000)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            let room = Room::new::<Slot>();
            let slot: &Slot = room.object();
            let nonce = input.word() & !0xff | 0x100;
            slot.post(nonce, &message(&mut input));
            let ring = slot.ring(nonce);
            for _ in 0..input.below(40) {
                let entry = Entry {
                    piece: input.word() as u32,
                    bytes: 1,
                };
                match input.byte() % 16 {
                    0 => _ = slot.claim(nonce),
                    1 => _ = slot.want_host(nonce),
                    2 => _ = slot.want_gpu(nonce),
                    3 => _ = slot.retire(nonce),
                    4 => _ = slot.send_ats(nonce),
                    5 => _ = slot.fail(nonce, 5),
                    6 => slot.turn_down(nonce, 5),
                    7 => _ = slot.refuse(nonce, 5),
                    8 => _ = slot.cancel(nonce),
                    9 => _ = slot.read(nonce).map(|message| message.digest()),
                    10 => _ = ring.push(entry),
                    11 => _ = ring.pop(),
                    12 => _ = (ring.peek(usize::from(input.byte())), entry.on_gpu()),
                    13 => _ = slot.offered(nonce),
                    14 => assert!(
                        ring.in_flight().is_ok_and(|used| used <= RING_ENTRIES)
                            || ring.in_flight().is_err()
                    ),
                    _ => room.scribble::<Slot>(&mut input),
                }
                if let (Ok(before), Ok(after)) = (slot.state(nonce), slot.settled(nonce)) {
                    assert!(before == after || after == SlotState::Done);
                }
            }
        });
}

fn part(input: &mut Bytes) -> Part {
    Part {
        way: match input.byte() % 3 {
            0 => Way::Host,
            1 => Way::Put,
            _ => Way::Relay {
                owner: input.word() as u32,
                row: input.byte(),
            },
        },
        offset: input.word() >> 24,
        bytes: 1 + (input.word() >> 30),
        chunk_bytes: 1 + (input.word() >> 34),
        in_turn: input.byte() % 2 == 0,
    }
}

fn target(input: &mut Bytes) -> Target {
    Target {
        ipc_handle: [input.byte(); 64],
        device: [input.byte(); 16],
        base: input.word(),
        allocation_bytes: input.word(),
        offset: input.word(),
        buffer_id: input.word(),
    }
}

/// What a sender does with an offer whose tag it guesses.
fn look_at_offer(offer: Option<&Offer>, input: &mut Bytes) {
    let Some(offer) = offer else { return };
    let tag = u64::from(input.byte());
    let _ = (offer.behind(tag), offer.is_claimed(tag), offer.target(tag));
    let length = input.word() >> 20;
    for number in 0..offer.len(tag).unwrap_or(0) {
        look_at_part(offer, tag, number, length, input);
    }
}

fn look_at_part(offer: &Offer, tag: u64, number: usize, length: u64, input: &mut Bytes) {
    let shared = offer
        .staged_part(tag, number)
        .expect("an offer has as many");
    let (mut filled, mut emptied) = (u32::from(input.byte()), u32::from(input.byte()));
    if let Ok(part) = shared.part() {
        if part.is_sane(length) {
            for chunk in [0, 1, part.chunks() / 2, part.chunks() - 1] {
                let (offset, bytes) = part.chunk(chunk.min(part.chunks() - 1));
                assert!(bytes > 0 && bytes <= part.chunk_bytes && offset + bytes <= length);
            }
        }
    }
    for _ in 0..input.below(12) {
        match input.byte() % 9 {
            0 => _ = shared.claim(u32::from(input.byte())),
            1 => _ = shared.claimed().and_then(|(next, _)| shared.claim(next)),
            2 => _ = shared.take_back(u32::from(input.byte())),
            3 => {
                let bytes = input.word() as u32;
                _ = shared.push(&mut filled, Filled { unit: 1, bytes });
            }
            4 => _ = shared.pop(&mut emptied),
            5 => _ = (shared.filled(), shared.emptied(), shared.is_being_filled()),
            6 => _ = (shared.is_closed(), shared.is_claimed()),
            7 => _ = shared.entry_of(u32::from(input.byte())),
            _ => shared.give_up(filled),
        }
    }
}

#[test]
fn offer() {
    const { assert!(size_of::<Offer>() == OFFER_BYTES) };
    bolero::check!(name = "offer")
        .with_iterations(5000)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            let room = Room::new::<Offer>();
            let offer: &Offer = room.object();
            let parts: Vec<Part> = (0..input.below(STAGED_PARTS as u64 + 1))
                .map(|_| part(&mut input))
                .collect();
            let target = target(&mut input);
            let behind = Asked {
                index: u32::from(input.byte()),
                tag: 1 + u64::from(input.byte()),
                is_all_put: false,
            };
            let tag = 1 + u64::from(input.byte());
            offer.open(tag, &parts, Some(&target), Some(behind));
            assert_eq!(offer.target(tag), Ok(target));
            for _ in 0..3 {
                room.scribble::<Offer>(&mut input);
                if let Some(found) = offer.target(tag).ok().filter(|_| !is_guided()) {
                    assert_eq!(found, target, "a sender writes nowhere else");
                }
                let length = input.word() >> 20;
                for number in 0..offer.len(tag).unwrap_or(0) {
                    look_at_part(offer, tag, number, length, &mut input);
                }
                let _ = (offer.behind(tag), offer.is_claimed(tag));
                look_at_offer(Some(offer), &mut input);
            }
            offer.close();
            assert!(offer.len(tag).is_err());
        });
}

#[test]
fn gpu_page() {
    bolero::check!(name = "gpu_page")
        .with_iterations(1000)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            let room = Room::new::<GpuPage>();
            for _ in 0..4 {
                room.scribble::<GpuPage>(&mut input);
                // Where the rows begin, so that some are hit.
                scribble(&room.0, 2048, &mut input);
                look_at_gpus(room.object(), &mut input);
            }
        });
}

#[test]
fn rtr() {
    bolero::check!(name = "rtr")
        .with_iterations(500)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            let (fd, map) = memory(LAYOUT.bytes());
            let own = View::create(map, LAYOUT, OWNER).expect("a segment");
            own.set_gpu_page_ready();
            let all = Mapping::new(fd.as_fd(), LAYOUT.bytes()).expect("a mapping");
            let target = target(&mut input);
            let waiting = Waiting {
                communicator: 1,
                source: 3,
                tag: 5,
                after: 0x100,
                bytes: input.word(),
                offset: input.word() >> 20,
                rest: 0,
                buffer_id: target.buffer_id,
            };
            let line = waiting.line();
            let rtr = own.rtr(line).expect("a line");
            let tag = 1 + u64::from(input.byte());
            rtr.open(tag, &waiting, &target);
            let expected = Target {
                offset: waiting.offset,
                ..target
            };
            assert!(rtr.find(&waiting).is_some());
            let at = LAYOUT.gpu_page_offset() as usize;
            for _ in 0..3 {
                scribble_at(&all, at, size_of::<GpuPage>(), &mut input);
                // A digest is no seal: a search that is guided finds what has the same.
                if let Some((_, found)) = rtr.find(&waiting).filter(|_| !is_guided()) {
                    assert_eq!(found, waiting);
                    if let Ok(found) = rtr.target(&found) {
                        assert_eq!(found, expected, "a sender writes nowhere else");
                    }
                }
                let _ = (
                    rtr.state(tag),
                    rtr.leaves(),
                    rtr.is_taken(),
                    rtr.is_promised(),
                );
                match input.byte() % 5 {
                    0 => _ = rtr.take(tag),
                    1 => rtr.land(tag),
                    2 => rtr.refuse(tag),
                    3 => _ = rtr.withdraw(tag),
                    _ => {}
                }
            }
        });
}

/// Like [`scribble`], from an offset on. Most of it near the RTRs, at the end.
fn scribble_at(map: &Mapping, start: usize, bytes: usize, input: &mut Bytes) {
    for _ in 0..input.below(12) {
        let back = input.below(bytes as u64 / 8) as usize * 8;
        let at = start + bytes - 8 - back;
        let word: &AtomicU64 = map.object(at).expect("a word");
        word.fetch_xor(1 << (input.byte() % 64), Ordering::Relaxed);
    }
}

#[test]
fn directory() {
    bolero::check!(name = "directory")
        .with_iterations(60)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            let directory = Directory::alone(JOB).expect("memory");
            let (pid, start) = proc::own_identity();
            let row = |world_rank| Row {
                pid,
                world_rank,
                start_low: proc::low32(start),
                memfd: 9,
                version: PROTOCOL_VERSION,
            };
            let _ = directory.register(row(1));
            scribble(directory.map(), 4096, &mut input);
            scribble(directory.map(), 128, &mut input);
            for found in directory.rows().take(20) {
                let opened = Peer::open(
                    JOB,
                    found.world_rank,
                    found.pid,
                    found.start_low,
                    found.memfd,
                );
                assert!(opened.is_err(), "there is no segment");
            }
            let _ = (directory.register(row(2)), directory.generation());
            let _ = (directory.device_in_use(), directory.pass_turn(0, 3));
            directory.unregister(row(2));
            directory.leave();
        });
}

/// What the system and the launcher say of processes and processors.
#[test]
fn texts_of_the_system() {
    const STAT: &[u8] =
        b"4242 (a (b) c) S 17 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 10 20 3\n";
    bolero::check!(name = "texts_of_the_system")
        .with_iterations(20_000)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            let node = input.word() as u32;
            let which = input.byte() % 3;
            let sample: &[u8] = [STAT, b"0-3,8,10-11", b"4(x3),2"][usize::from(which)];
            let text = input.edited(sample);
            let text = String::from_utf8_lossy(&text);
            let _ = (proc::parse(&text), launch::tasks_on_node(&text, node));
            let cpus = cpus::parse(&text);
            assert!(cpus.is_none_or(|cpus| cpus.len() <= 1 << 16));
        });
}
