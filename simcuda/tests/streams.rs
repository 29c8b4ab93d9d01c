//! Streams: order, time, races, values, host code.
#![allow(
    missing_docs,
    clippy::undocumented_unsafe_blocks,
    clippy::ptr_as_ptr,
    clippy::borrow_as_ptr
)]

mod common;
use common::*;
use simcuda::api::*;

/// Runs the scenario that the parent asked for; does nothing in a plain test run.
#[test]
fn scenario() {
    match std::env::var("SCENARIO").as_deref() {
        Ok("not_before_its_time") => not_before_its_time(),
        Ok("missing_wait") => two_streams(false),
        Ok("event_wait") => two_streams(true),
        Ok("memops") => memops(),
        Ok("host_code") => host_code(),
        Ok("legacy") => legacy(),
        Ok("early_return") => early_return(),
        Ok("streams_destroyed") => streams_destroyed(),
        Ok(other) => panic!("no scenario {other}"),
        Err(_) => {}
    }
}

/// Nobody waits yet, so time stands still and the copy has not happened.
fn not_before_its_time() {
    start(0);
    let data = pattern(3, 1 << 20);
    let a = alloc(data.len());
    upload(a, &data);
    let host = pinned(data.len());
    let s = new_stream();
    ok(unsafe { copy::cuMemcpyDtoHAsync_v2(host.cast(), a, data.len(), s) });
    let landed = || unsafe { std::slice::from_raw_parts(host, data.len()) } == data;
    assert!(!landed(), "an asynchronous copy landed at its issue");
    assert_eq!(unsafe { stream::cuStreamQuery(s) }, 600);
    assert!(!landed());
    let before = misc::simcuda_clock_ns();
    sync(s);
    assert!(landed());
    // 1 MiB over PCIe 3 at 12.3 GB/s is 85 us.
    assert!(misc::simcuda_clock_ns() - before > 85_000);
}

#[test]
fn an_asynchronous_copy_is_incomplete_before_time_moves() {
    succeeds(&run("not_before_its_time", &[LONG]));
}

fn two_streams(ordered: bool) {
    start(0);
    let (a, b, c) = (alloc(1 << 20), alloc(1 << 20), alloc(1 << 20));
    let (s, t) = (new_stream(), new_stream());
    let mut e = 0;
    unsafe {
        ok(copy::cuMemcpyDtoDAsync_v2(b, a, 1 << 20, s));
        if ordered {
            ok(event::cuEventCreate(&mut e, 2));
            ok(event::cuEventRecord(e, s));
            ok(stream::cuStreamWaitEvent(t, e, 0));
        }
        ok(copy::cuMemcpyDtoDAsync_v2(c, b, 1 << 20, t));
    }
    sync(s);
    sync(t);
}

#[test]
fn a_missing_wait_is_a_race_and_fails_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let report = folder.path().join("report");
    let report = [("SIMCUDA_REPORT", report.to_str().unwrap())];
    let out = run("missing_wait", &report);
    assert_eq!(out.status.code(), Some(86), "{}", stderr(&out));
    let line = stderr(&out);
    let line = line
        .lines()
        .find(|l| l.starts_with("simcuda: race: "))
        .expect("a line about the race");
    assert!(
        line.contains("reads")
            && line.contains("writes")
            && line.matches("copy in process").count() == 2,
        "{line}"
    );
    let json = std::fs::read_to_string(folder.path().join("report")).unwrap();
    assert!(
        json.lines().any(|l| l.contains("\"event\":\"race\"")),
        "{json}"
    );
    assert!(
        json.lines()
            .any(|l| l.contains("\"event\":\"exit\"") && l.contains("\"findings\":1")),
        "{json}"
    );
    succeeds(&run("missing_wait", &[("SIMCUDA_CHECK", "0")]));
    let out = run("event_wait", &[]);
    succeeds(&out);
    assert!(!stderr(&out).contains("race"));
}

fn memops() {
    start(0);
    let flag = pinned(64).cast::<u32>();
    let a = alloc(4096);
    let s = new_stream();
    unsafe {
        ok(memop::cuStreamWaitValue32_v2(s, flag as u64, 7, 1));
        ok(fill::cuMemsetD8Async(a, 9, 4096, s));
        ok(memop::cuStreamWriteValue32_v2(s, flag as u64 + 4, 5, 0));
        for _ in 0..20 {
            assert_eq!(stream::cuStreamQuery(s), 600);
        }
        flag.write_volatile(7);
        while flag.add(1).read_volatile() != 5 {
            std::thread::yield_now();
        }
        // What was written before the flag is visible, and another stream may use it without a report.
        let t = new_stream();
        ok(fill::cuMemsetD8Async(a, 1, 4096, t));
        sync(t);
        sync(s);
    }
    assert_eq!(download(a, 4096), vec![1; 4096]);
}

#[test]
fn streams_wait_for_values_and_write_them() {
    succeeds(&run("memops", &[]));
}

unsafe extern "C" fn set_to_three(data: *mut std::ffi::c_void) {
    unsafe { data.cast::<u32>().write_volatile(3) };
}

fn host_code() {
    start(0);
    let s = new_stream();
    let mut value = 0u32;
    unsafe {
        ok(stream::cuLaunchHostFunc(
            s,
            Some(set_to_three),
            (&raw mut value).cast(),
        ));
        sync(s);
        assert_eq!((&raw const value).read_volatile(), 3);
    }
}

#[test]
fn host_functions_run_in_stream_order() {
    succeeds(&run("host_code", &[]));
}

/// A blocking stream and stream 0 wait for each other: no report, and the order holds.
fn legacy() {
    start(0);
    let a = alloc(4096);
    let mut s = 0;
    unsafe {
        ok(stream::cuStreamCreate(&mut s, 0));
        ok(fill::cuMemsetD8Async(a, 1, 4096, s));
        ok(fill::cuMemsetD8_v2(a, 2, 4096));
        ok(fill::cuMemsetD8Async(a, 3, 4096, s));
    }
    assert_eq!(download(a, 4096), vec![3; 4096]);
}

#[test]
fn the_legacy_stream_orders_blocking_streams() {
    succeeds(&run("legacy", &[]));
}

/// A copy called as synchronous returns before it has happened, until the buffer asks otherwise.
fn early_return() {
    start(0);
    let n = 1 << 20;
    let (a, b) = (alloc(n), alloc(n));
    upload(a, &pattern(1, n));
    let pending = || unsafe { stream::cuStreamQuery(0) } == 600;
    ok(unsafe { copy::cuMemcpyDtoD_v2(b, a, n) });
    assert!(pending());
    let one = 1u32;
    ok(unsafe { pointer::cuPointerSetAttribute((&raw const one).cast(), 6, b) });
    assert!(!pending(), "setting SYNC_MEMOPS drains");
    ok(unsafe { copy::cuMemcpyDtoD_v2(b, a, n) });
    assert!(!pending());
}

#[test]
fn synchronous_copies_on_the_device_return_early() {
    succeeds(&run("early_return", &[LONG]));
}

/// A destroyed stream's work goes on, and whoever synchronizes the context waits for it.
fn streams_destroyed() {
    start(0);
    let n = 1 << 20;
    let (a, b) = (alloc(n), alloc(n));
    upload(a, &pattern(5, n));
    let s = new_stream();
    ok(unsafe { copy::cuMemcpyDtoDAsync_v2(b, a, n, s) });
    ok(unsafe { stream::cuStreamDestroy_v2(s) });
    assert_eq!(unsafe { stream::cuStreamQuery(s) }, 400);
    ok(unsafe { context::cuCtxSynchronize() });
    assert_eq!(download(b, n), pattern(5, n));
}

#[test]
fn a_destroyed_stream_finishes_its_work() {
    succeeds(&run("streams_destroyed", &[LONG]));
}
