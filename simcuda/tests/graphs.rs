//! Graphs, captures and kernels.
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
        Ok("graphs") => graphs(),
        Ok("capture") => capturing(),
        Ok("kernels") => kernels(),
        Ok(other) => panic!("no scenario {other}"),
        Err(_) => {}
    }
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
