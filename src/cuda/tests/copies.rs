//! Scenarios of copies on lanes.

use super::bench::*;
use crate::cuda::types::{code, Context, Stream};
use crate::cuda::*;
use std::ffi::c_void;
use std::time::{Duration, Instant};

pub(super) fn lanes() {
    let context = use_device(0);
    let mut bench = Bench::new(context);
    let bytes = 3_000_001;
    let (a, b) = (device_memory(bytes), device_memory(bytes));
    let data = pattern(7, bytes);
    bench.upload(a, &data);
    let copy = bench.copy(Purpose::Get, b + 1, a + 1, bytes - 1).unwrap();
    finish(copy).unwrap();
    assert_eq!(bench.download(b + 1, bytes - 1), data[1..]);
    let nothing = bench.copy(Purpose::Get, b, a, 0).unwrap();
    finish(nothing).unwrap();
    strided(&mut bench, a, b, &data);
    upwards(&mut bench, b, &data);
    ordered(&mut bench, a, b);
    queued(&mut bench, a, b, &data);
    ahead(&mut bench);
    joined(&mut bench);
    soon(&mut bench);
    between_devices(&mut bench, a, &data);
    abandoned(&mut bench, a, b);
    assert_eq!(bench.lanes.contexts(), 1);
    assert_eq!(current(), context);
    let last = bench.copy(Purpose::Get, b, a, bytes).unwrap();
    bench.lanes.close();
    assert_eq!(bench.lanes.contexts(), 0);
    finish(last).unwrap();
}

/// The node's figures (hgx-h200): 55 GB/s to the host and back.
pub(super) fn timed() {
    let context = use_device(0);
    let mut bench = Bench::new(context);
    let (small, large) = (256 << 10, 4 << 20);
    let device = device_memory(large);
    let host = bench.pool.take(bench.key, large).unwrap();
    for (purpose, dst, src) in [
        (Purpose::DeviceToHost, host.address(), device),
        (Purpose::HostToDevice, device, host.address()),
    ] {
        let copies = [small, small, large].map(|bytes| Copy::Linear {
            dst,
            src,
            bytes: bytes as u64,
        });
        let (copies, timed) = bench
            .lanes
            .submit_timed(bench.key, purpose, 0, &copies, None)
            .unwrap();
        finish(copies).unwrap();
        let times = timed.times().unwrap().expect("all are done");
        let lengths: Vec<u64> = times.iter().map(|(bytes, _)| *bytes).collect();
        assert_eq!(lengths, [small as u64, small as u64, large as u64]);
        let line = crate::model::fit::line(&times[1..]).expect("a line");
        assert!((line.gb_s / 55.0 - 1.0).abs() < 0.05, "{line:?}");
        assert!((2.0..8.0).contains(&line.alpha_us), "{line:?}");
    }
    bench.lanes.close();
}

/// From pinned memory, in one run, in rows, and in a batch.
fn upwards(bench: &mut Bench, b: u64, data: &[u8]) {
    let host = bench.pool.take(bench.key, 64 << 10).unwrap();
    // SAFETY: 64 KiB that are this test's, written to by nobody else.
    unsafe {
        let to = std::ptr::with_exposed_provenance_mut::<u8>(host.address() as usize);
        to.copy_from_nonoverlapping(data.as_ptr(), 64 << 10);
    }
    for bytes in [1u64, 9999, 10240, 12289, 16384, 16411, 24579, 28672, 40001] {
        bench.upload(b, &vec![0xEE; 64 << 10]);
        let up = Copy::Up {
            dst: b + 1,
            src: host.address() + 3,
            bytes,
        };
        let copy = bench.lanes.submit(bench.key, Purpose::HostToDevice, &[up]);
        finish(copy.unwrap()).unwrap();
        let found = bench.download(b, 64 << 10);
        assert_eq!(found[1..][..bytes as usize], data[3..][..bytes as usize]);
        let others = [&found[..1], &found[1 + bytes as usize..]];
        assert!(others
            .iter()
            .all(|rest| rest.iter().all(|byte| *byte == 0xEE)));
    }
    // Several together, of which the first goes ahead: short ones, of which some have no rows, and a long one among them.
    for lengths in [
        [8192u64, 8192, 8192, 8192],
        [64, 9999, 40001, 1],
        [30_000, 12_289, 64, 20_480],
    ] {
        bench.upload(b, &vec![0xEE; 256 << 10]);
        let copies = lengths.iter().zip(0u64..).map(|(bytes, place)| Copy::Up {
            dst: b + place * (64 << 10),
            src: host.address() + 5 * place,
            bytes: *bytes,
        });
        let queued: Vec<InFlight> = copies
            .map(|up| {
                bench
                    .lanes
                    .add(bench.key, Purpose::HostToDevice, 0, up, None)
            })
            .collect::<Result<_>>()
            .unwrap();
        bench.lanes.launch();
        queued.into_iter().for_each(|copy| finish(copy).unwrap());
        let found = bench.download(b, 256 << 10);
        for (place, bytes) in lengths.iter().map(|bytes| *bytes as usize).enumerate() {
            let got = &found[place * (64 << 10)..][..64 << 10];
            assert_eq!(got[..bytes], data[5 * place..][..bytes], "{lengths:?}");
            assert!(got[bytes..].iter().all(|byte| *byte == 0xEE), "{lengths:?}");
        }
    }
}

fn strided(bench: &mut Bench, a: u64, b: u64, data: &[u8]) {
    let rows = Copy::Rows {
        dst: b,
        dst_pitch: 300,
        src: a + 10,
        src_pitch: 1000,
        width: 200,
        rows: 5,
    };
    let copy = bench.lanes.submit(bench.key, Purpose::Get, &[rows]);
    finish(copy.unwrap()).unwrap();
    let packed = bench.download(b, 1500);
    for row in 0..5 {
        assert_eq!(
            packed[row * 300..][..200],
            data[10 + row * 1000..][..200],
            "row {row}"
        );
    }
}

/// The last of several copies to one place wins.
fn ordered(bench: &mut Bench, a: u64, b: u64) {
    let copies: Vec<_> = (0..8)
        .map(|step| Copy::Linear {
            dst: b,
            src: a + step * 100_000,
            bytes: 90_000,
        })
        .collect();
    let copy = bench.lanes.submit(bench.key, Purpose::Put, &copies);
    finish(copy.unwrap()).unwrap();
    assert_eq!(
        bench.download(b, 90_000),
        bench.download(a + 700_000, 90_000)
    );
}

/// Copies that are queued: launched together, whoever polls first; one that is dropped before is not made; one that the
/// driver refuses fails alone.
fn queued(bench: &mut Bench, a: u64, b: u64, data: &[u8]) {
    bench.upload(b, &vec![0; 1 << 20]);
    // Nothing is allocated there.
    let nowhere = a + (1 << 36);
    let row = |place: u64| Copy::Linear {
        dst: b + place * 10_000,
        src: a + place * 10_000 + 3,
        bytes: 9_001,
    };
    let mut copies: Vec<_> = (0..100)
        .map(|place| {
            let copy = match place {
                57 | 99 => Copy::Linear {
                    dst: nowhere,
                    src: a,
                    bytes: 1,
                },
                _ => row(place),
            };
            let queued = bench.lanes.add(bench.key, Purpose::Get, 1, copy, None);
            Some(queued.unwrap())
        })
        .collect();
    copies[31] = None;
    bench.lanes.launch();
    for (place, copy) in copies.into_iter().enumerate().rev() {
        let Some(mut copy) = copy else { continue };
        let answer = loop {
            match copy.poll() {
                Ok(false) => std::thread::yield_now(),
                answer => break answer,
            }
        };
        let is_refused = place == 57 || place == 99;
        match answer {
            Ok(_) => assert!(!is_refused, "{place}"),
            Err(error) => assert!(is_refused && error.code().is_some(), "{place}: {error}"),
        }
        assert_eq!(copy.is_lost(), is_refused, "copy {place}");
        assert_eq!(copy.poll(), answer, "copy {place}: an answer is final");
    }
    let found = bench.download(b, 1 << 20);
    for place in 0..100 {
        let got = &found[place * 10_000..][..10_000];
        if [31, 57, 99].contains(&place) {
            assert_eq!(got, vec![0; 10_000], "copy {place}");
        } else {
            assert_eq!(
                got[..9_001],
                data[place * 10_000 + 3..][..9_001],
                "copy {place}"
            );
            assert_eq!(got[9_001..], vec![0; 999], "copy {place}");
        }
    }
}

/// What is much is launched before the rest is queued, in batches, also behind launches that are done meanwhile.
fn ahead(bench: &mut Bench) {
    const PIECE: u64 = 1 << 20;
    let (a, b) = (device_memory(16 << 20), device_memory(16 << 20));
    let data = pattern(21, 16 << 20);
    bench.upload(a, &data);
    let add = |bench: &mut Bench, piece: u64| {
        let copy = Copy::Linear {
            dst: b + piece * PIECE,
            src: a + piece * PIECE,
            bytes: PIECE,
        };
        let queued = bench.lanes.add(bench.key, Purpose::Get, 2, copy, None);
        bench.lanes.launch_ahead();
        queued.unwrap()
    };
    let load = |bench: &mut Bench| bench.lanes.load(bench.key, Purpose::Get, 2).unwrap();
    let mut copies: Vec<InFlight> = (0..3).map(|piece| add(bench, piece)).collect();
    assert_eq!(load(bench), 3, "3 MiB wait");
    copies.push(add(bench, 3));
    assert_eq!(load(bench), 1, "4 MiB are one launch");
    copies.extend((4..8).map(|piece| add(bench, piece)));
    assert_eq!(load(bench), 2);
    // Nobody polls a copy of the lane: that a launch is done is found when there is more.
    let deadline = Instant::now() + Duration::from_secs(60);
    copies.extend((8..12).map(|piece| add(bench, piece)));
    while load(bench) > 2 {
        assert!(Instant::now() < deadline, "they are launched at some time");
        std::thread::yield_now();
        bench.lanes.launch_ahead();
    }
    copies.extend((12..16).map(|piece| add(bench, piece)));
    bench.lanes.launch();
    for copy in copies.into_iter().rev() {
        finish(copy).unwrap();
    }
    assert_eq!(bench.download(b, 16 << 20), data);
}

/// Short copies of several peers that are queued together are one launch, and those of one peer stay in order.
fn joined(bench: &mut Bench) {
    const ROOM: u64 = 4 << 20;
    let (a, b) = (
        device_memory(4 * ROOM as usize),
        device_memory(4 * ROOM as usize),
    );
    bench.upload(a, &pattern(22, 4 * ROOM as usize));
    let add = |bench: &mut Bench, peer: u64, from: u64, bytes: u64| {
        let copy = Copy::Linear {
            dst: b + peer * ROOM,
            src: a + from,
            bytes,
        };
        let queued = bench.lanes.add(bench.key, Purpose::Get, peer, copy, None);
        queued.unwrap()
    };
    let load = |bench: &mut Bench, peer: u64| bench.lanes.load(bench.key, Purpose::Get, peer);
    let loads = |bench: &mut Bench| [0, 1, 2, 3].map(|peer| load(bench, peer).unwrap());
    assert_eq!(bench.lanes.gathered(0), None);
    let mut copies: Vec<InFlight> = (0..3).map(|peer| add(bench, peer, peer, 5001)).collect();
    assert_eq!(loads(bench), [3, 3, 3, 0], "on the lane of the first");
    let gathered = |count, longest, bytes| {
        Some(Gathered {
            count,
            longest,
            bytes,
        })
    };
    assert_eq!(bench.lanes.gathered(0), gathered(3, 5001, 3 * 5001));
    bench.lanes.launch();
    assert_eq!(bench.lanes.gathered(0), None);
    assert_eq!(loads(bench), [1, 1, 1, 0], "one launch");
    // Whether that is over nobody knows yet: what comes from the same peer is behind it, from another not.
    copies.push(add(bench, 1, 70_001, 5001));
    copies.push(add(bench, 3, 3, 5001));
    assert_eq!(loads(bench), [2, 2, 2, 1]);
    assert_eq!(bench.lanes.gathered(0), None, "one is behind a launch");
    assert_eq!(bench.lanes.gathered(1), gathered(2, 5001, 2 * 5001));
    bench.lanes.launch();
    copies.into_iter().for_each(|copy| finish(copy).unwrap());
    for (peer, from) in [(0, 0), (1, 70_001), (2, 2), (3, 3)] {
        let found = bench.download(b + peer * ROOM, 5001);
        assert!(found == bench.download(a + from, 5001), "of peer {peer}");
    }
    // All of it is over: each is on its own lane again, and what is long does not join.
    let copies = [1, 2].map(|peer| add(bench, peer, peer, 3 << 20));
    assert_eq!(loads(bench), [0, 1, 1, 0]);
    assert_eq!(bench.lanes.gathered(0), gathered(2, 3 << 20, 6 << 20));
    bench.lanes.launch();
    copies.into_iter().for_each(|copy| finish(copy).unwrap());
    free(a);
    free(b);
}

/// Two launches at once, and those that come meanwhile in one behind them, when one is polled.
fn soon(bench: &mut Bench) {
    const PIECE: u64 = 4096;
    let (a, data) = (device_memory(16 * 4096), pattern(23, 16 * 4096));
    bench.upload(a, &data);
    let host = bench.pool.take(bench.key, 16 * 4096).unwrap();
    let mut start = |piece: u64| {
        let copy = Copy::Linear {
            dst: host.address() + piece * PIECE,
            src: a + piece * PIECE,
            bytes: PIECE,
        };
        let lanes = &mut bench.lanes;
        let copy = lanes.submit_soon(bench.key, Purpose::DeviceToHost, copy);
        let load = lanes.load(bench.key, Purpose::DeviceToHost, 0);
        (copy.unwrap(), load.unwrap())
    };
    let (mut copies, loads): (Vec<_>, Vec<_>) = (0..16).map(&mut start).unzip();
    // Nobody has asked whether the first two are over.
    assert_eq!(loads, (1..=16).collect::<Vec<_>>());
    let mut sixth = copies.remove(5);
    while !sixth.poll().unwrap() {
        std::thread::yield_now();
    }
    let load = bench.lanes.load(bench.key, Purpose::DeviceToHost, 0);
    assert!(
        load.unwrap() <= 1,
        "all are launched, the last fourteen together"
    );
    copies.into_iter().for_each(|copy| finish(copy).unwrap());
    // SAFETY: so many bytes that are this test's.
    let found = unsafe {
        let from = std::ptr::with_exposed_provenance::<u8>(host.address() as usize);
        std::slice::from_raw_parts(from, 16 * 4096)
    };
    assert_eq!(found, data);
    free(a);
}

fn between_devices(bench: &mut Bench, a: u64, data: &[u8]) {
    let second = retain(1);
    let entered = Entered::enter(second).unwrap();
    let there = device_memory(data.len());
    drop(entered);
    let copy = Copy::Peer {
        dst: there,
        dst_context: second,
        src: a,
        src_context: bench.key.handle,
        bytes: data.len() as u64,
    };
    let copy = bench.lanes.submit(bench.key, Purpose::Put, &[copy]);
    finish(copy.unwrap()).unwrap();
    assert_eq!(Bench::new(second).download(there, data.len()), data);
}

/// Copies that nobody polls give their events back all the same.
fn abandoned(bench: &mut Bench, a: u64, b: u64) {
    for _ in 0..5000 {
        match bench.copy(Purpose::Get, b, a, 64) {
            Ok(copy) => drop(copy),
            Err(Error::Exhausted(_)) => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
    loop {
        match bench.copy(Purpose::Get, b, a, 64) {
            Ok(copy) => return finish(copy).unwrap(),
            Err(Error::Exhausted(_)) => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
}

pub(super) fn lost_context() {
    use_device(0);
    let driver = driver().unwrap();
    let (mut context, mut popped) = (Context::NULL, Context::NULL);
    // SAFETY: both are written.
    unsafe {
        driver.ctx_create(&mut context, 0, 0).unwrap();
        driver.ctx_pop_current(&raw mut popped).unwrap();
    }
    let mut bench = Bench::new(context);
    let address = allocate_in(context, 1 << 20);
    bench.upload(address, &pattern(1, 1 << 20));
    let mut copy = bench
        .copy(Purpose::Get, address, address + 4096, 64)
        .unwrap();
    let dropped = bench
        .copy(Purpose::Get, address, address + 4096, 64)
        .unwrap();
    // SAFETY: the context that was made above.
    unsafe { driver.ctx_destroy(context).unwrap() };
    assert!(!bench.key.is_alive());
    assert_eq!(copy.poll(), Err(Error::ContextLost));
    drop(dropped);
    let refused = bench.copy(Purpose::Get, address, address, 64);
    assert_eq!(refused.err(), Some(Error::ContextLost));
    assert!(!is_device(at(address)));
    // Another context gets lanes of its own, and bounce buffers are pinned anew.
    bench.key = ContextKey::of(reach::existing_context(0).unwrap()).unwrap();
    let address = device_memory(1 << 20);
    bench.upload(address, &pattern(2, 1 << 20));
    assert_eq!(bench.download(address, 1 << 20), pattern(2, 1 << 20));
    reset(bench);
}

/// A primary context that is reset under the lanes comes back with another identity, maybe with the same handle.
fn reset(mut bench: Bench) {
    // SAFETY: no argument refers to memory.
    unsafe { driver().unwrap().primary_ctx_reset(0).unwrap() };
    let again = retain(0);
    assert!(!bench.key.is_alive());
    assert_eq!(
        bench.copy(Purpose::Get, 4096, 8192, 64).err(),
        Some(Error::ContextLost)
    );
    bench.key = ContextKey::of(again).unwrap();
    let address = allocate_in(again, 4096);
    bench.upload(address, &pattern(3, 4096));
    assert_eq!(bench.download(address, 4096), pattern(3, 4096));
    assert_eq!(
        bench.lanes.contexts(),
        1,
        "lanes of lost contexts are dropped"
    );
}

fn allocate_in(context: Context, bytes: usize) -> u64 {
    let _entered = Entered::enter(context).unwrap();
    device_memory(bytes)
}

pub(super) fn capture() {
    type Begin = unsafe extern "C" fn(Stream, i32) -> i32;
    type End = unsafe extern "C" fn(Stream, *mut *mut c_void) -> i32;
    let context = use_device(0);
    // SAFETY: these are the functions' signatures.
    let (begin, end) = unsafe {
        (
            std::mem::transmute::<*mut c_void, Begin>(symbol(c"cuStreamBeginCapture_v2")),
            std::mem::transmute::<*mut c_void, End>(symbol(c"cuStreamEndCapture")),
        )
    };
    let address = device_memory(1 << 16);
    let mut bench = Bench::new(context);
    bench.upload(address, &pattern(9, 1 << 16));
    let stream = user_stream();
    // SAFETY: a live stream; 0 is the global mode, the strictest.
    let begun = unsafe { begin(stream, 0) };
    assert_eq!(begun, code::SUCCESS);
    let buffer = buffer_at(address);
    let mut exports = Exports::new(8);
    assert!(exports.prepare(&buffer).unwrap());
    exports.export(&buffer).unwrap();
    assert_eq!(bench.download(address, 1 << 16), pattern(9, 1 << 16));
    let mut fresh = Lanes::new();
    fresh.open(bench.key).unwrap();
    fresh.close();
    let mut graph = std::ptr::null_mut();
    // SAFETY: the capture begun above.
    let ended = unsafe { end(stream, &raw mut graph) };
    assert_eq!(ended, code::SUCCESS, "the capture is whole");
}
