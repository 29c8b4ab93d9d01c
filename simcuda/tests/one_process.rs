//! What one process sees of the simulated driver.
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
use std::os::unix::process::ExitStatusExt;

const LONG: (&str, &str) = ("SIMCUDA_QUIET_US", "20000000");

/// Runs the scenario that the parent asked for; does nothing in a plain test run.
#[test]
fn scenario() {
    match std::env::var("SCENARIO").as_deref() {
        Ok("round_trip") => round_trip(),
        Ok("not_before_its_time") => not_before_its_time(),
        Ok("touch") => touch(),
        Ok("missing_wait") => two_streams(false),
        Ok("event_wait") => two_streams(true),
        Ok("use_after_free") => use_after_free(),
        Ok("out_of_memory") => out_of_memory(),
        Ok("init_fails") => assert_ne!(unsafe { device::cuInit(0) }, 0),
        Ok("planned_error") => planned_error(),
        Ok("attributes") => attributes(),
        Ok("memops") => memops(),
        Ok("graphs") => graphs(),
        Ok("capture") => capturing(),
        Ok("kernels") => kernels(),
        Ok("host_code") => host_code(),
        Ok("batch") => batch(),
        Ok("legacy") => legacy(),
        Ok("times") => times(),
        Ok("threads") => threads(),
        Ok("early_return") => early_return(),
        Ok("streams_destroyed") => streams_destroyed(),
        Ok("symbols") => symbols(),
        Ok("visible") => visible(),
        Ok(other) => panic!("no scenario {other}"),
        Err(_) => {}
    }
}

fn round_trip() {
    start(0);
    let data = pattern(1, 100_003);
    let (a, b) = (alloc(data.len()), alloc(data.len()));
    upload(a, &data);
    let s = new_stream();
    ok(unsafe { copy::cuMemcpyDtoDAsync_v2(b + 3, a, data.len() - 3, s) });
    sync(s);
    assert_eq!(download(b + 3, data.len() - 3), data[..data.len() - 3]);
    // 2-D: the middle of an 8 x 16 field into a dense block.
    let field = pattern(2, 128);
    upload(a, &field);
    let mut c: CUDA_MEMCPY2D = unsafe { std::mem::zeroed() };
    (
        c.srcMemoryType,
        c.srcDevice,
        c.srcPitch,
        c.srcXInBytes,
        c.srcY,
    ) = (2, a, 16, 4, 2);
    let mut block = vec![0u8; 24];
    (c.dstMemoryType, c.dstHost, c.dstPitch) = (1, block.as_mut_ptr().cast(), 6);
    (c.WidthInBytes, c.Height) = (6, 4);
    ok(unsafe { copy::cuMemcpy2D_v2(&c) });
    let expected: Vec<u8> = (2..6)
        .flat_map(|y| field[y * 16 + 4..y * 16 + 10].to_vec())
        .collect();
    assert_eq!(block, expected);
    ok(unsafe { fill::cuMemsetD32_v2(a, 0x0102_0304, 8) });
    assert_eq!(download(a, 32), [4, 3, 2, 1].repeat(8));
    ok(unsafe { memory::cuMemFree_v2(a) });
    assert_eq!(unsafe { memory::cuMemFree_v2(a) }, 1);
}

#[test]
fn bytes_arrive() {
    succeeds(&run("round_trip", &[]));
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

fn touch() {
    start(0);
    let p = alloc(4096);
    let value = unsafe { (p as *const u8).read_volatile() };
    println!("read {value}");
}

#[test]
fn host_code_faults_on_a_device_address() {
    let out = run("touch", &[]);
    assert_eq!(
        out.status.signal(),
        Some(libc_sigsegv()),
        "{}",
        stderr(&out)
    );
    succeeds(&run("touch", &[("SIMCUDA_HOST_ACCESS", "1")]));
}

fn libc_sigsegv() -> i32 {
    11
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

fn use_after_free() {
    start(0);
    let (a, b) = (alloc(4096), alloc(4096));
    ok(unsafe { memory::cuMemFree_v2(a) });
    assert_eq!(unsafe { copy::cuMemcpyDtoD_v2(b, a, 4096) }, 1);
}

#[test]
fn a_use_of_freed_memory_is_reported() {
    let out = run("use_after_free", &[]);
    assert_eq!(out.status.code(), Some(86));
    assert!(stderr(&out).contains("use after free"));
}

/// Beluga's V100 has 16160 MiB.
fn out_of_memory() {
    start(0);
    let (mut free, mut total) = (0usize, 0usize);
    ok(unsafe { memory::cuMemGetInfo_v2(&mut free, &mut total) });
    assert_eq!((free, total), (16160 << 20, 16160 << 20));
    let p = alloc(10 << 30);
    let mut q = 0;
    assert_eq!(unsafe { memory::cuMemAlloc_v2(&mut q, 8 << 30) }, 2);
    ok(unsafe { memory::cuMemGetInfo_v2(&mut free, &mut total) });
    assert_eq!(free, (16160 << 20) - (10 << 30));
    ok(unsafe { memory::cuMemFree_v2(p) });
    alloc(15 << 30);
}

#[test]
fn memory_is_as_large_as_the_topology_says() {
    succeeds(&run("out_of_memory", &[]));
}

#[test]
fn a_bad_topology_fails_init_with_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.toml");
    let good = include_str!("../topologies/beluga.toml");
    std::fs::write(&path, good.replacen("gb_s = 48.0", "gb_s = -1.0", 1)).unwrap();
    let out = run(
        "init_fails",
        &[("SIMCUDA_TOPOLOGY", path.to_str().unwrap())],
    );
    succeeds(&out);
    let lines: Vec<String> = stderr(&out)
        .lines()
        .filter(|l| l.starts_with("simcuda"))
        .map(String::from)
        .collect();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(
        lines[0].contains("link between GPU 0 and 1") && lines[0].contains("must be positive"),
        "{lines:?}"
    );
    succeeds(&run("init_fails", &[("CUDA_VISIBLE_DEVICES", "")]));
    succeeds(&run("init_fails", &[("SIMCUDA_GPUS", "9")]));
}

fn planned_error() {
    start(0);
    let p = alloc(64);
    assert_eq!(unsafe { copy::cuMemcpyDtoD_v2(p, p + 32, 32) }, 0);
    assert_eq!(unsafe { copy::cuMemcpyDtoD_v2(p, p + 32, 32) }, 719);
    assert_eq!(unsafe { copy::cuMemcpyDtoD_v2(p, p + 32, 32) }, 0);
}

#[test]
fn errors_come_on_demand() {
    succeeds(&run(
        "planned_error",
        &[("SIMCUDA_FAULT", "cuMemcpyDtoD:2=CUDA_ERROR_LAUNCH_FAILED")],
    ));
}

fn attributes() {
    let ctx = start(1);
    let p = alloc(1000);
    let (mut c, mut kind, mut id, mut base, mut size, mut ordinal) =
        (0usize, 0u32, 0u64, 0u64, 0usize, 0i32);
    let mut which = [1u32, 2, 7, 11, 12, 9];
    let mut to: [*mut std::ffi::c_void; 6] = [
        (&raw mut c).cast(),
        (&raw mut kind).cast(),
        (&raw mut id).cast(),
        (&raw mut base).cast(),
        (&raw mut size).cast(),
        (&raw mut ordinal).cast(),
    ];
    ok(unsafe { pointer::cuPointerGetAttributes(6, which.as_mut_ptr(), to.as_mut_ptr(), p + 10) });
    assert_eq!((c, kind, base, size, ordinal), (ctx, 2, p, 1000, 1));
    let first = id;
    assert_ne!(first, 0);
    let local = 5u8;
    let host = &raw const local as u64;
    ok(unsafe { pointer::cuPointerGetAttributes(6, which.as_mut_ptr(), to.as_mut_ptr(), host) });
    assert_eq!((c, kind, base, size), (0, 0, 0, 0));
    assert_eq!(
        unsafe { pointer::cuPointerGetAttribute((&raw mut kind).cast(), 2, host) },
        1
    );
    let h = pinned(100);
    ok(unsafe { pointer::cuPointerGetAttribute((&raw mut kind).cast(), 2, h as u64 + 5) });
    assert_eq!(kind, 1);
    // Freed and allocated again: the address may be the same, the identity is not.
    ok(unsafe { memory::cuMemFree_v2(p) });
    let q = alloc(1000);
    assert_eq!(q, p);
    ok(unsafe { pointer::cuPointerGetAttribute((&raw mut id).cast(), 7, q) });
    assert_ne!(id, first);
}

#[test]
fn pointers_are_known_for_what_they_are() {
    succeeds(&run("attributes", &[]));
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

fn node3d(dst: u64, src: u64, bytes: usize) -> CUDA_MEMCPY3D {
    let mut c: CUDA_MEMCPY3D = unsafe { std::mem::zeroed() };
    (c.srcMemoryType, c.srcDevice, c.dstMemoryType, c.dstDevice) = (2, src, 2, dst);
    (c.WidthInBytes, c.Height, c.Depth) = (bytes, 1, 1);
    c
}

fn graphs() {
    let ctx = start(0);
    let n = 4096;
    let (a, b, c, e) = (alloc(n), alloc(n), alloc(n), alloc(n));
    let data = pattern(7, n);
    upload(a, &data);
    let s = new_stream();
    let (mut g, mut x, mut n1, mut n2, mut n3) = (0, 0, 0, 0, 0);
    unsafe {
        ok(graph::cuGraphCreate(&mut g, 0));
        ok(graph::cuGraphAddMemcpyNode(
            &mut n1,
            g,
            std::ptr::null(),
            0,
            &node3d(b, a, n),
            ctx,
        ));
        ok(graph::cuGraphAddMemcpyNode(
            &mut n2,
            g,
            &n1,
            1,
            &node3d(c, b, n),
            ctx,
        ));
        ok(graph::cuGraphAddEmptyNode(&mut n3, g, &n2, 1));
        ok(exec::cuGraphInstantiateWithFlags(&mut x, g, 0));
        ok(exec::cuGraphLaunch(x, s));
        ok(exec::cuGraphLaunch(x, s));
        sync(s);
        assert_eq!(download(c, n), data);
        ok(exec::cuGraphExecMemcpyNodeSetParams(
            x,
            n2,
            &node3d(e, b, n),
            ctx,
        ));
        ok(exec::cuGraphLaunch(x, s));
        sync(s);
        assert_eq!(download(e, n), data);
        // A graph of another shape does not fit.
        let mut g2 = 0;
        ok(graph::cuGraphCreate(&mut g2, 0));
        ok(graph::cuGraphAddMemcpyNode(
            &mut n3,
            g2,
            std::ptr::null(),
            0,
            &node3d(b, a, n),
            ctx,
        ));
        let mut info: CUgraphExecUpdateResultInfo = std::mem::zeroed();
        assert_eq!(exec::cuGraphExecUpdate_v2(x, g2, &mut info), 910);
        assert_eq!(info.result, 2);
        assert_eq!(graph::cuGraphAddDependencies(g, &n2, &n1, 1), 0);
        assert_eq!(
            exec::cuGraphInstantiateWithFlags(&mut x, g, 0),
            1,
            "a cycle"
        );
        ok(graph::cuGraphDestroy(g));
    }
}

#[test]
fn graphs_run_and_update() {
    succeeds(&run("graphs", &[]));
}

fn capturing() {
    start(0);
    let n = 4096;
    let (a, b, c) = (alloc(n), alloc(n), alloc(n));
    upload(a, &pattern(1, n));
    let (s, t) = (new_stream(), new_stream());
    let (mut e, mut f, mut g, mut x) = (0, 0, 0, 0);
    unsafe {
        ok(event::cuEventCreate(&mut e, 2));
        ok(event::cuEventCreate(&mut f, 2));
        ok(simcuda::api::capture::cuStreamBeginCapture_v2(s, 0));
        ok(copy::cuMemcpyDtoDAsync_v2(b, a, n, s));
        ok(event::cuEventRecord(e, s));
        ok(stream::cuStreamWaitEvent(t, e, 0));
        ok(copy::cuMemcpyDtoDAsync_v2(c, b, n, t));
        ok(event::cuEventRecord(f, t));
        ok(stream::cuStreamWaitEvent(s, f, 0));
        ok(simcuda::api::capture::cuStreamEndCapture(s, &mut g));
        let mut count = 0;
        ok(graph::cuGraphGetNodes(g, std::ptr::null_mut(), &mut count));
        assert_eq!(count, 2);
        ok(exec::cuGraphInstantiateWithFlags(&mut x, g, 0));
        assert_ne!(download(c, n), pattern(1, n), "capturing runs nothing");
        ok(exec::cuGraphLaunch(x, s));
        sync(s);
        assert_eq!(download(c, n), pattern(1, n));
        // An allocation breaks a capture in global mode, unless the thread says RELAXED.
        ok(simcuda::api::capture::cuStreamBeginCapture_v2(s, 0));
        let (mut p, mut mode) = (0, 2);
        ok(simcuda::api::capture::cuThreadExchangeStreamCaptureMode(
            &mut mode,
        ));
        ok(memory::cuMemAlloc_v2(&mut p, 64));
        ok(simcuda::api::capture::cuThreadExchangeStreamCaptureMode(
            &mut mode,
        ));
        assert_eq!(mode, 2);
        ok(simcuda::api::capture::cuStreamEndCapture(s, &mut g));
        ok(simcuda::api::capture::cuStreamBeginCapture_v2(s, 0));
        assert_eq!(memory::cuMemAlloc_v2(&mut p, 64), 900);
        assert_eq!(copy::cuMemcpyDtoDAsync_v2(b, a, n, s), 901);
        assert_eq!(simcuda::api::capture::cuStreamEndCapture(s, &mut g), 901);
        // A stream that joined and never comes back.
        ok(simcuda::api::capture::cuStreamBeginCapture_v2(s, 0));
        ok(event::cuEventRecord(e, s));
        ok(stream::cuStreamWaitEvent(t, e, 0));
        ok(copy::cuMemcpyDtoDAsync_v2(c, b, n, t));
        assert_eq!(simcuda::api::capture::cuStreamEndCapture(s, &mut g), 904);
    }
}

#[test]
fn captures_become_graphs_and_illegal_calls_break_them() {
    succeeds(&run("capture", &[]));
}

fn kernels() {
    start(0);
    let n = 5000usize;
    let a = alloc(n);
    let source = format!("{}\0", anabranch_kernels::PTX);
    let (mut m, mut f) = (0, 0);
    unsafe {
        ok(module::cuModuleLoadData(&mut m, source.as_ptr().cast()));
        ok(module::cuModuleGetFunction(
            &mut f,
            m,
            c"fill_bytes".as_ptr(),
        ));
        let mut missing = 0;
        assert_eq!(
            module::cuModuleGetFunction(&mut missing, m, c"no_such".as_ptr()),
            500
        );
        let (mut dst, mut bytes, mut value) = (a, n as u64, 0x5au32);
        let mut params: [*mut std::ffi::c_void; 3] = [
            (&raw mut dst).cast(),
            (&raw mut bytes).cast(),
            (&raw mut value).cast(),
        ];
        ok(launch::cuLaunchKernel(
            f,
            4,
            1,
            1,
            128,
            1,
            1,
            0,
            0,
            params.as_mut_ptr(),
            std::ptr::null_mut(),
        ));
        ok(context::cuCtxSynchronize());
        assert_eq!(download(a, n), vec![0x5a; n]);
        // Beyond its allocation: the launch succeeds, the fault comes later and stays.
        (&raw mut bytes).write_volatile(10 * n as u64);
        ok(launch::cuLaunchKernel(
            f,
            4,
            1,
            1,
            128,
            1,
            1,
            0,
            0,
            params.as_mut_ptr(),
            std::ptr::null_mut(),
        ));
        assert_eq!(context::cuCtxSynchronize(), 700);
        let mut p = 0;
        assert_eq!(memory::cuMemAlloc_v2(&mut p, 64), 700);
    }
}

#[test]
fn kernels_run_their_host_twins() {
    succeeds(&run("kernels", &[]));
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

fn visible() {
    start(0);
    let mut count = 0;
    let mut id = [0i8; 32];
    unsafe {
        ok(device::cuDeviceGetCount(&mut count));
        ok(device::cuDeviceGetPCIBusId(id.as_mut_ptr().cast(), 32, 0));
    }
    let text: String = id
        .iter()
        .take_while(|c| **c != 0)
        .map(|c| *c as u8 as char)
        .collect();
    // The third GPU's bus: they are 0x10 apart from 0x18 on.
    assert_eq!((count, text.as_str()), (2, "00000000:38:00.0"));
}

#[test]
fn visible_devices_are_renumbered() {
    succeeds(&run("visible", &[("CUDA_VISIBLE_DEVICES", "2,0")]));
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

/// Every name a loader may ask for resolves, and what is not there says so.
fn symbols() {
    let ask = |name: &std::ffi::CStr| {
        let mut address = std::ptr::null();
        let code = unsafe {
            misc::cuGetProcAddress_v2(name.as_ptr(), &mut address, 12080, 0, std::ptr::null_mut())
        };
        (code, address)
    };
    assert_eq!(ask(c"cuNoSuchFunction").0, 500);
    let (code, address) = ask(c"cuMemCreate");
    assert_eq!(code, 0);
    let stub: unsafe extern "C" fn() -> i32 = unsafe { std::mem::transmute(address) };
    assert_eq!(unsafe { stub() }, 801);
    for line in include_str!("../symbols.txt")
        .lines()
        .filter(|l| l.starts_with("cu"))
    {
        assert!(misc::exact(line).is_some(), "{line}");
    }
    // Before cuInit.
    let mut count = 0;
    assert_eq!(unsafe { device::cuDeviceGetCount(&mut count) }, 3);
    start(0);
    // A forked child has no driver.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let code = unsafe { device::cuDeviceGetCount(&mut count) };
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    unsafe { libc::waitpid(pid, &mut status, 0) };
    assert_eq!(libc::WEXITSTATUS(status), 3);
}

#[test]
fn every_listed_name_resolves() {
    succeeds(&run("symbols", &[]));
}
