//! Where the simulated driver is as awkward as the hardware: streams that share a hardware queue, copies that land in
//! pieces, time that has moved on.
#![allow(
    missing_docs,
    clippy::undocumented_unsafe_blocks,
    clippy::ptr_as_ptr,
    clippy::borrow_as_ptr
)]

mod common;
use common::*;
use simcuda::api::*;

#[test]
fn scenario() {
    match std::env::var("SCENARIO").as_deref() {
        Ok("queues") => queues(),
        Ok("pieces") => pieces(),
        Ok("late") => late(),
        Ok("in_turn") => in_turn(),
        Ok("timing_only") => timing_only(),
        Ok("legacy_unusable") => legacy_unusable(),
        Ok(other) => panic!("no scenario {other}"),
        Err(_) => {}
    }
}

/// Streams of 40 that stand still behind `waits` others which wait for a flag, each with a copy to the host behind
/// it: (copies to the host, memsets).
fn stalled(waits: usize) -> (usize, usize) {
    let a = alloc(1 << 20);
    let host = pinned(1 << 20);
    let flag = pinned(64).cast::<u32>();
    let waiting: Vec<_> = (0..waits).map(|_| new_stream()).collect();
    for _ in waits..8 {
        new_stream();
    }
    let others: Vec<_> = (0..40).map(|_| new_stream()).collect();
    let count = |issue: &dyn Fn(usize, usize)| unsafe {
        flag.write_volatile(0);
        for s in &waiting {
            ok(memop::cuStreamWaitValue32_v2(*s, flag as u64, 1, 1));
            ok(copy::cuMemcpyDtoHAsync_v2(
                host.add(900_000).cast(),
                a,
                64,
                *s,
            ));
        }
        others.iter().enumerate().for_each(|(i, s)| issue(i, *s));
        // Many looks, so that everything that can has run.
        for _ in 0..50 {
            others.iter().for_each(|s| {
                stream::cuStreamQuery(*s);
            });
        }
        let still = others
            .iter()
            .filter(|s| stream::cuStreamQuery(**s) == 600)
            .count();
        flag.write_volatile(1);
        ok(context::cuCtxSynchronize());
        still
    };
    let copies = count(&|i, s| unsafe {
        let (to, from) = (host.add(i * 4096), a + i as u64 * 4096);
        ok(copy::cuMemcpyDtoHAsync_v2(to.cast(), from, 4096, s));
    });
    let fills = count(&|i, s| unsafe {
        ok(fill::cuMemsetD8Async(a + i as u64 * 4096, 1, 4096, s));
    });
    (copies, fills)
}

/// Measured on an H200: "one wait with a copy to the host behind it stalls such copies on 10 of 40 other streams, four
/// stall them on all; eight pending waits stall every kernel".
fn queues() {
    start(0);
    let waits = std::env::var("WAITS").unwrap().parse().unwrap();
    let (copies, fills) = stalled(waits);
    println!("copies {copies} fills {fills}");
}

#[test]
fn streams_share_hardware_queues() {
    let run_with = |waits: &str, connections: &str| {
        let out = run(
            "queues",
            &[
                ("WAITS", waits),
                ("CUDA_DEVICE_MAX_CONNECTIONS", connections),
                ("SIMCUDA_CHECK", "0"),
            ],
        );
        succeeds(&out);
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        text.lines()
            .find(|l| l.contains("copies "))
            .unwrap()
            .trim()
            .to_string()
    };
    assert!(run_with("1", "").contains("copies 10 fills 5"));
    assert!(run_with("4", "").contains("copies 40 "));
    assert!(run_with("8", "").contains("fills 40"));
    assert!(run_with("1", "1").contains("copies 40 fills 40"));
    assert!(run_with("1", "32").contains("fills 1"), "the 33rd shares");
}

/// Some of a copy shows before it is complete, and the source is read as it was then.
fn pieces() {
    start(0);
    let n = 1 << 20;
    let a = alloc(n);
    let (from, to) = (pinned(n), pinned(n));
    let s = new_stream();
    let all = |p: *mut u8, value: u8| unsafe {
        std::slice::from_raw_parts(p, n)
            .iter()
            .filter(|b| **b == value)
            .count()
    };
    unsafe {
        from.write_bytes(1, n);
        ok(copy::cuMemcpyHtoDAsync_v2(a, from.cast(), n, s));
        // Not allowed: the copy may have read some of it already, and may not.
        from.write_bytes(2, n);
        sync(s);
        ok(copy::cuMemcpyDtoHAsync_v2(to.cast(), a, n, s));
        let early = n - all(to, 0);
        assert!(early > 0 && early < n, "{early} bytes landed early");
        sync(s);
    }
    let (old, new) = (all(to, 1), all(to, 2));
    assert!(old > 0 && new > 0 && old + new == n, "{old} old, {new} new");
}

#[test]
fn copies_read_and_land_in_pieces() {
    succeeds(&run("pieces", &[LONG]));
}

/// Work is under way, the host is taken to be waiting while it sleeps, and comes back too late.
fn late() {
    start(0);
    let n = 64 << 20;
    let (a, host) = (alloc(n), pinned(n));
    let (s, t) = (new_stream(), new_stream());
    unsafe {
        ok(copy::cuMemcpyDtoHAsync_v2(host.cast(), a, n, s));
        sync(s);
        let before = misc::simcuda_late_ns();
        for _ in 0..4 {
            ok(copy::cuMemcpyDtoHAsync_v2(host.cast(), a, n, s));
            ok(copy::cuMemcpyDtoHAsync_v2(host.cast(), a, 64, t));
        }
        sync(s);
        assert_eq!(misc::simcuda_late_ns(), before, "who waits is not late");
        ok(copy::cuMemcpyDtoHAsync_v2(host.cast(), a, n, s));
        std::thread::sleep(std::time::Duration::from_millis(100));
        ok(copy::cuMemcpyDtoHAsync_v2(host.cast(), a, 64, t));
        // 64 MiB over PCIe 3 at 12.3 GB/s are 5.4 ms.
        let late = misc::simcuda_late_ns() - before;
        assert!((5_000_000..6_000_000).contains(&late), "{late} ns");
        sync(t);
    }
}

#[test]
fn reactions_after_the_clock_has_moved_on_are_counted() {
    succeeds(&run("late", &[("SIMCUDA_CHECK", "0")]));
}

/// Copies of which one ends after the other, asked about in turn: what ends while another is asked about is found as it ends,
/// before time moves on.
fn in_turn() {
    start(0);
    let n = 16 << 20;
    let (a, host) = (alloc(n), pinned(n));
    let peers: Vec<_> = (1..4)
        .map(|gpu| {
            start(gpu);
            alloc(n)
        })
        .collect();
    start(0);
    let streams: Vec<_> = (0..5).map(|_| new_stream()).collect();
    let before = misc::simcuda_late_ns();
    for round in 0..20 {
        // The copies end up to 100 us apart, and in another order each time.
        let bytes = |stream: usize| (2 << 20) + ((round * 7 + stream * 11) % 13) * 300_000;
        unsafe {
            for (i, peer) in peers.iter().enumerate() {
                ok(copy::cuMemcpyDtoDAsync_v2(*peer, a, bytes(i), streams[i]));
            }
            ok(copy::cuMemcpyDtoHAsync_v2(
                host.cast(),
                a,
                bytes(3),
                streams[3],
            ));
            ok(copy::cuMemcpyHtoDAsync_v2(
                a,
                host.cast(),
                bytes(4),
                streams[4],
            ));
            let mut left = streams.clone();
            while !left.is_empty() {
                left.retain(|s| stream::cuStreamQuery(*s) != 0);
            }
        }
    }
    assert_eq!(misc::simcuda_late_ns() - before, 0, "late by so many ns");
}

#[test]
fn who_asks_in_turn_finds_each_end_in_time() {
    succeeds(&run("in_turn", &[("SIMCUDA_CHECK", "0"), LONG]));
}

fn timing_only() {
    start(0);
    let n = 1 << 20;
    let (a, host) = (alloc(n), pinned(n));
    let s = new_stream();
    let before = misc::simcuda_clock_ns();
    unsafe {
        ok(fill::cuMemsetD8Async(a, 7, n, s));
        ok(copy::cuMemcpyDtoHAsync_v2(host.cast(), a, n, s));
        ok(memop::cuStreamWriteValue32_v2(s, host as u64, 5, 0));
        sync(s);
        assert_eq!(
            std::slice::from_raw_parts(host, 8),
            [5, 0, 0, 0, 0, 0, 0, 0]
        );
    }
    assert!(misc::simcuda_clock_ns() - before > 85_000);
}

#[test]
fn a_measurement_needs_no_bytes() {
    succeeds(&run("timing_only", &[("SIMCUDA_DATA", "0"), LONG]));
}

/// "If this is called on the legacy stream while a blocking stream in the same context is capturing, it will return
/// CUDA_ERROR_STREAM_CAPTURE_IMPLICIT [...]. The blocking stream capture is not invalidated" (driver API).
fn legacy_unusable() {
    start(0);
    let (mut s, mut status, mut graph) = (0, 7, 0);
    unsafe {
        ok(stream::cuStreamCreate(&mut s, 0));
        ok(capture::cuStreamBeginCapture_v2(s, 0));
        assert_eq!(capture::cuStreamIsCapturing(1, &mut status), 906);
        ok(capture::cuStreamEndCapture(s, &mut graph));
        ok(capture::cuStreamIsCapturing(1, &mut status));
        assert_eq!(status, 0);
    }
}

#[test]
fn the_legacy_stream_says_that_it_cannot_be_used() {
    succeeds(&run("legacy_unusable", &[]));
}
