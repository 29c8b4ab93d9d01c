//! Scenarios of two processes that see one device each.

use super::bench::{device_memory, finish, free, pattern, use_device, Bench};
use crate::cuda::types::Context;
use crate::cuda::*;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

const BYTES: usize = 1 << 20;
const PEER: u64 = 17;

fn path() -> String {
    std::env::var("ANABRANCH_CUDA_TEST_SOCKET").unwrap()
}

fn connect() -> UnixStream {
    let start = Instant::now();
    loop {
        match UnixStream::connect(path()) {
            Ok(stream) => return stream,
            Err(error) => assert!(start.elapsed() < Duration::from_secs(60), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn send(stream: &mut UnixStream, export: &Export) {
    let mut bytes = export.handle.0.to_vec();
    for word in [export.base, export.size, export.offset, export.buffer_id] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(export.uuid);
    stream.write_all(&bytes).unwrap();
}

fn receive(stream: &mut UnixStream) -> Export {
    let mut bytes = [0; 112];
    stream.read_exact(&mut bytes).unwrap();
    let word = |place: usize| u64::from_le_bytes(bytes[64 + 8 * place..][..8].try_into().unwrap());
    Export {
        handle: IpcHandle(bytes[..64].try_into().unwrap()),
        base: word(0),
        size: word(1),
        offset: word(2),
        buffer_id: word(3),
        uuid: bytes[96..].try_into().unwrap(),
    }
}

fn signal(stream: &mut UnixStream) {
    stream.write_all(&[1]).unwrap();
}

fn await_signal(stream: &mut UnixStream) {
    stream.read_exact(&mut [0]).unwrap();
}

fn export(exports: &mut Exports, address: u64) -> Export {
    let Kind::Device(buffer) = classify(std::ptr::with_exposed_provenance(address as usize)) else {
        panic!("{address:#x} is not device memory");
    };
    exports.export(&buffer).unwrap()
}

pub(super) fn exporter() {
    std::env::set_var("CUDA_VISIBLE_DEVICES", "0");
    let listener = UnixListener::bind(path()).unwrap();
    let mut bench = Bench::new(use_device(0));
    let mut exports = Exports::new(4);
    let (first, second) = (device_memory(BYTES), device_memory(BYTES));
    bench.upload(first, &pattern(1, BYTES));
    bench.upload(second, &pattern(2, BYTES));
    let (mut peer, _) = listener.accept().unwrap();
    let inside = export(&mut exports, first + 4097);
    assert_eq!(
        (inside.base, inside.offset, inside.size),
        (first, 4097, BYTES as u64)
    );
    send(&mut peer, &inside);
    send(&mut peer, &export(&mut exports, second));
    send(&mut peer, &export(&mut exports, device_memory(BYTES)));
    await_signal(&mut peer);
    // What the peer has pushed.
    assert_eq!(bench.download(second, BYTES), pattern(3, BYTES));
    let before = export(&mut exports, first).buffer_id;
    free(first);
    let again = device_memory(BYTES);
    bench.upload(again, &pattern(4, BYTES));
    let new = export(&mut exports, again);
    assert_ne!(new.buffer_id, before);
    send(&mut peer, &new);
    await_signal(&mut peer);
    let _ = std::fs::remove_file(path());
}

/// A peer that is broken says that its allocation is longer than it is, at once or later.
fn longer_than_it_is(bench: &Bench, export: &Export) {
    let longer = Export {
        size: export.size + 1,
        ..*export
    };
    let mut mappings = Mappings::new(Limits {
        count_max: 2,
        bytes_max: 3 * BYTES as u64,
    });
    let mut open = |export| mappings.open(bench.key, PEER, export).map(drop);
    assert_eq!(open(&longer), Err(Error::Shorter), "nothing is mapped");
    assert_eq!(open(export), Ok(()));
    assert_eq!(open(&longer), Err(Error::Shorter), "it is mapped");
    assert_eq!(open(export), Ok(()));
    assert_eq!(mappings.len(), 1);
}

pub(super) fn importer() {
    std::env::set_var("CUDA_VISIBLE_DEVICES", "1");
    let mut bench = Bench::new(use_device(0));
    let mut peer = connect();
    let mut mappings = Mappings::new(Limits {
        count_max: 2,
        bytes_max: 3 * BYTES as u64,
    });
    let local = device_memory(BYTES);
    let (first, second) = (receive(&mut peer), receive(&mut peer));
    assert!(
        reach::by_uuid(&first.uuid).is_none(),
        "the exporter's device is hidden here"
    );
    let own = reach::device(0).unwrap().uuid;
    longer_than_it_is(&bench, &first);
    let mapping = mappings.open(bench.key, PEER, &first).unwrap();
    assert_eq!(reach::reach(&own, &first.uuid), reach::Reach::HiddenPeer);
    let from = mapping.address_of(first.offset);
    let rest = first.size - first.offset;
    let copy = Copy::Linear {
        dst: local,
        src: from,
        bytes: rest,
    };
    let copy = bench
        .lanes
        .add(bench.key, Purpose::Get, PEER, copy, Some(mapping))
        .unwrap();
    bench.lanes.launch();
    finish(copy).unwrap();
    assert_eq!(
        bench.download(local, rest as usize),
        pattern(1, BYTES)[4097..]
    );
    push(&mut bench, &mut mappings, local, &second);
    freed_meanwhile(&bench, &first);
    bounds(
        &bench,
        &mut mappings,
        [&first, &second, &receive(&mut peer)],
    );
    foreign_mapping(&mut bench, &mut mappings, &second);
    other_context(&bench, &mut mappings, &second);
    let held = mappings.open(bench.key, PEER, &first).unwrap();
    signal(&mut peer);
    reallocated(&mut bench, &mut mappings, held, &receive(&mut peer), local);
    signal(&mut peer);
}

fn push(bench: &mut Bench, mappings: &mut Mappings, local: u64, second: &Export) {
    bench.upload(local, &pattern(3, BYTES));
    let mapping = mappings.open(bench.key, PEER, second).unwrap();
    let copy = Copy::Linear {
        dst: mapping.address_of(0),
        src: local,
        bytes: second.size,
    };
    let copy = bench
        .lanes
        .add(bench.key, Purpose::Put, PEER, copy, Some(mapping))
        .unwrap();
    bench.lanes.launch();
    finish(copy).unwrap();
    assert_eq!((mappings.len(), mappings.stats().opened), (2, 2));
}

/// What its owner has freed by the time of a failure shows nothing of the pair; what it keeps does.
fn freed_meanwhile(bench: &Bench, export: &Export) {
    let mut mappings = Mappings::new(Limits::default());
    let stale = Export {
        handle: IpcHandle([0xA5; 64]),
        buffer_id: export.buffer_id + 1000,
        ..*export
    };
    let mut open = |is_kept: bool| {
        let opened = mappings.open_while(bench.key, PEER, &stale, || is_kept);
        opened.expect_err("nobody's handle")
    };
    for is_kept in [false, false, false, true, false, true] {
        let error = open(is_kept);
        assert!(error.code().is_some() && !error.is_refusal(), "{error}");
    }
    assert_eq!(open(true), Error::PairRefused, "two failures counted");
}

/// Two mappings are allowed: a third takes the place of the one unused for longest, unless both are in use.
fn bounds(bench: &Bench, mappings: &mut Mappings, [first, second, third]: [&Export; 3]) {
    let used_last = mappings.open(bench.key, PEER, first).unwrap();
    let in_use = mappings.open(bench.key, PEER, second).unwrap();
    let refused = mappings.open(bench.key, PEER, third);
    assert_eq!(refused.err(), Some(Error::Exhausted("open mappings")));
    drop(used_last);
    let opened = mappings.stats().opened;
    drop(mappings.open(bench.key, PEER, third).unwrap());
    assert_eq!((mappings.len(), mappings.stats().evicted), (2, 1));
    assert_eq!(mappings.stats().opened, opened + 1);
    drop(in_use);
    mappings.forget_allocation(PEER, third.base, third.buffer_id);
    assert_eq!((mappings.len(), mappings.open_bytes()), (1, second.size));
}

/// Another library in this process has the allocation open: whoever of the two closes it first leaves it to the other.
fn foreign_mapping(bench: &mut Bench, mappings: &mut Mappings, export: &Export) {
    let bytes = export.size as usize;
    for ours_goes_first in [true, false] {
        mappings.forget_allocation(PEER, export.base, export.buffer_id);
        let entered = Entered::enter(bench.key.handle).unwrap();
        let mut address = 0;
        entered
            .driver()
            .ipc_open_mem_handle(&mut address, export.handle, 1)
            .unwrap();
        let mapping = mappings.open(bench.key, PEER, export).unwrap();
        assert_eq!(mapping.address_of(0), address);
        // SAFETY: opened above.
        let close = || unsafe { entered.driver().ipc_close_mem_handle(address) };
        if ours_goes_first {
            drop(mapping);
            mappings.forget_allocation(PEER, export.base, export.buffer_id);
        } else {
            close().unwrap();
        }
        assert_eq!(bench.download(address, bytes), pattern(3, BYTES));
        if ours_goes_first {
            close().unwrap();
            assert!(close().is_err(), "nobody has it open any more");
        }
    }
    assert!(mappings.open(bench.key, PEER, export).is_ok());
}

/// The allocation is open in another context of the same device: it is opened here only when it is closed there.
fn other_context(bench: &Bench, mappings: &mut Mappings, export: &Export) {
    mappings.forget_allocation(PEER, export.base, export.buffer_id);
    let driver = driver().unwrap();
    let (mut second, mut popped) = (Context::NULL, Context::NULL);
    // SAFETY: both are written.
    unsafe {
        driver.ctx_create(&mut second, 0, 0).unwrap();
        driver.ctx_pop_current(&raw mut popped).unwrap();
    }
    let key = ContextKey::of(second).unwrap();
    let held = mappings.open(key, PEER, export).unwrap();
    let before = mappings.stats();
    for _ in 0..3 {
        let refused = mappings.open(bench.key, PEER, export);
        assert_eq!(refused.err(), Some(Error::AlreadyMapped));
    }
    assert_eq!(
        mappings.stats().already_mapped,
        before.already_mapped + 3,
        "asked each time"
    );
    drop(held);
    mappings.forget_allocation(PEER, export.base, export.buffer_id);
    assert!(mappings.open(bench.key, PEER, export).is_ok());
    // SAFETY: made above, and nothing is left in it.
    unsafe { driver.ctx_destroy(second).unwrap() };
}

fn reallocated(
    bench: &mut Bench,
    mappings: &mut Mappings,
    held: std::sync::Arc<Mapping>,
    new: &Export,
    local: u64,
) {
    let hits = mappings.stats().hits;
    let mapping = mappings.open(bench.key, PEER, new).unwrap();
    assert_eq!(
        mappings.stats().hits,
        hits,
        "an allocation with another number is another one"
    );
    let copy = bench
        .copy(
            Purpose::Get,
            local,
            mapping.address_of(0),
            new.size as usize,
        )
        .unwrap();
    finish(copy).unwrap();
    assert_eq!(bench.download(local, BYTES), pattern(4, BYTES));
    drop(held);
    // Two are open: the new one, which is held, and the second. A third needs room that only one of them can give.
    drop(mapping);
    mappings.forget_peer(PEER + 1);
    assert!(!mappings.is_empty());
    mappings.forget_peer(PEER);
    assert_eq!((mappings.len(), mappings.open_bytes()), (0, 0));
}
