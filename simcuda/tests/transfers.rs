//! Many copies at once: batches, measured rates, threads.
#![allow(
    missing_docs,
    clippy::undocumented_unsafe_blocks,
    clippy::ptr_as_ptr,
    clippy::borrow_as_ptr
)]

mod common;
use common::*;
use simcuda::api::*;
use simcuda::types::*;

/// Runs the scenario that the parent asked for; does nothing in a plain test run.
#[test]
fn scenario() {
    match std::env::var("SCENARIO").as_deref() {
        Ok("batch") => batch(),
        Ok("times") => times(),
        Ok("threads") => threads(),
        Ok(other) => panic!("no scenario {other}"),
        Err(_) => {}
    }
}

fn batch() {
    start(0);
    let n = 64;
    let (a, b) = (alloc(n * 1024), alloc(n * 1024));
    let data = pattern(9, n * 1024);
    upload(a, &data);
    let s = new_stream();
    let mut dsts: Vec<u64> = (0..n as u64).map(|i| b + i * 1024).collect();
    let mut srcs: Vec<u64> = (0..n as u64).map(|i| a + i * 1024).collect();
    let mut sizes = vec![1024usize; n];
    let mut attrs: CUmemcpyAttributes = unsafe { std::mem::zeroed() };
    attrs.srcAccessOrder = 1;
    let (mut index, mut fail) = (0usize, 0usize);
    unsafe {
        let go = |attrs: &mut CUmemcpyAttributes,
                  index: &mut usize,
                  fail: &mut usize,
                  dsts: &mut [u64],
                  srcs: &mut [u64],
                  sizes: &mut [usize],
                  s| {
            copy::cuMemcpyBatchAsync(
                dsts.as_mut_ptr(),
                srcs.as_mut_ptr(),
                sizes.as_mut_ptr(),
                dsts.len(),
                attrs,
                index,
                1,
                fail,
                s,
            )
        };
        ok(go(
            &mut attrs, &mut index, &mut fail, &mut dsts, &mut srcs, &mut sizes, s,
        ));
        sync(s);
        assert_eq!(download(b, n * 1024), data);
        assert_eq!(
            go(&mut attrs, &mut index, &mut fail, &mut dsts, &mut srcs, &mut sizes, 0),
            1,
            "no batch in stream 0"
        );
    }
}

#[test]
fn batches_copy_everything() {
    succeeds(&run("batch", &[]));
}

/// Figures of the H200 node, as the topology's sources give them: 1 MiB at 107 GB/s and 256 MiB at 392,
/// launch and synchronize included.
fn times() {
    start(0);
    let a = alloc(256 << 20);
    let mut other = 0;
    let s = new_stream();
    unsafe {
        ok(context::cuDevicePrimaryCtxRetain(&mut other, 1));
        ok(context::cuCtxPushCurrent_v2(other));
        let b = alloc(256 << 20);
        ok(context::cuCtxPopCurrent_v2(&mut other));
        // Both directions at once: 768 GB/s in all, each way at full rate.
        let back = {
            ok(context::cuCtxPushCurrent_v2(other));
            let back = new_stream();
            ok(context::cuCtxPopCurrent_v2(&mut other));
            back
        };
        let half = 128usize << 20;
        let before = misc::simcuda_clock_ns();
        ok(copy::cuMemcpyDtoDAsync_v2(b, a, half, s));
        ok(copy::cuMemcpyDtoDAsync_v2(
            a + half as u64,
            b + half as u64,
            half,
            back,
        ));
        sync(s);
        sync(back);
        let got = 2.0 * half as f64 / (misc::simcuda_clock_ns() - before) as f64;
        assert!(
            (got / 768.0 - 1.0).abs() < 0.05,
            "both directions at {got} GB/s"
        );
        for (bytes, rate) in [(1usize << 20, 107.0), (256 << 20, 392.0)] {
            let before = misc::simcuda_clock_ns();
            ok(copy::cuMemcpyDtoDAsync_v2(b, a, bytes, s));
            sync(s);
            let got = bytes as f64 / (misc::simcuda_clock_ns() - before) as f64;
            assert!(
                (got / rate - 1.0).abs() < 0.05,
                "{bytes} B at {got} GB/s, measured {rate}"
            );
        }
    }
}

#[test]
fn copies_take_the_time_that_was_measured() {
    succeeds(&run("times", &[("SIMCUDA_TOPOLOGY", "hgx-h200"), LONG]));
}

/// Four threads with a stream each, and one that polls them all.
fn threads() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let ctx = start(0);
    let streams: Vec<usize> = (0..4).map(|_| new_stream()).collect();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = streams
            .iter()
            .enumerate()
            .map(|(t, s)| {
                scope.spawn(move || {
                    ok(unsafe { context::cuCtxSetCurrent(ctx) });
                    for round in 0..60usize {
                        let n = 1 + (round * 7919 + t * 104_729) % 300_000;
                        let data = pattern((round + t) as u8, n);
                        let (a, b, host) = (alloc(n), alloc(n), pinned(n));
                        unsafe {
                            ok(copy::cuMemcpyHtoDAsync_v2(a, data.as_ptr().cast(), n, *s));
                            ok(copy::cuMemcpyDtoDAsync_v2(b, a, n, *s));
                            ok(copy::cuMemcpyDtoHAsync_v2(host.cast(), b, n, *s));
                            if round % 2 == 0 {
                                sync(*s);
                            } else {
                                while stream::cuStreamQuery(*s) == 600 {}
                            }
                            assert!(std::slice::from_raw_parts(host, n) == data);
                            ok(memory::cuMemFree_v2(a));
                            ok(memory::cuMemFree_v2(b));
                            ok(memory::cuMemFreeHost(host.cast()));
                        }
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            ok(unsafe { context::cuCtxSetCurrent(ctx) });
            while !over.load(Ordering::Relaxed) {
                streams.iter().for_each(|s| {
                    assert!([0, 600].contains(&unsafe { stream::cuStreamQuery(*s) }))
                });
            }
        });
        workers.into_iter().for_each(|w| w.join().unwrap());
        over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn threads_share_the_driver() {
    succeeds(&run("threads", &[]));
}
