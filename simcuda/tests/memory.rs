//! Memory as one process sees it: copies, limits, addresses, attributes.
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

/// Runs the scenario that the parent asked for; does nothing in a plain test run.
#[test]
fn scenario() {
    match std::env::var("SCENARIO").as_deref() {
        Ok("round_trip") => round_trip(),
        Ok("touch") => touch(),
        Ok("use_after_free") => use_after_free(),
        Ok("out_of_memory") => out_of_memory(),
        Ok("host_is_full") => host_is_full(),
        Ok("all_of_the_host") => all_of_the_host(),
        Ok("attributes") => attributes(),
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

/// 64 MiB for the node: one GPU's as long as it is alone, then half of them for each of two.
fn host_is_full() {
    start(0);
    assert_eq!(free_bytes(), 64 << 20);
    let p = alloc(48 * MIB);
    assert_eq!(free_bytes(), 16 << 20);
    let mut q = 0;
    assert_eq!(unsafe { memory::cuMemAlloc_v2(&mut q, 17 * MIB) }, 2);
    assert_eq!(unsafe { pool::cuMemAllocManaged(&mut q, 17 * MIB, 1) }, 2);
    assert_eq!(unsafe { pool::cuMemAllocAsync(&mut q, 17 * MIB, 0) }, 2);
    ok(unsafe { memory::cuMemFree_v2(p) });
    let small = alloc(8 * MIB);
    assert_eq!(free_bytes(), 56 << 20);
    start(1);
    assert_eq!(free_bytes(), 32 << 20);
    // Parts are told, not enforced: only the node's memory as a whole is.
    let all = alloc(56 * MIB);
    assert_eq!(free_bytes(), 0);
    assert_eq!(unsafe { memory::cuMemAlloc_v2(&mut q, 1) }, 2);
    upload(all + (56 * MIB) as u64 - 4, b"here");
    assert_eq!(download(all + (56 * MIB) as u64 - 4, 4), b"here");
    ok(unsafe { memory::cuMemFree_v2(small) });
}

#[test]
fn what_the_host_cannot_back_is_refused() {
    let out = run("host_is_full", &[("SIMCUDA_HOST_MIB", "64")]);
    succeeds(&out);
    let said =
        "simcuda: the host's memory cannot back 17 MiB more of device memory, 16 MiB are left: ";
    assert!(stderr(&out).contains(said), "{}", stderr(&out));
    assert_eq!(
        stderr(&out).matches("simcuda:").count(),
        1,
        "{}",
        stderr(&out)
    );
    let out = run("host_is_full", &[("SIMCUDA_HOST_MIB", "plenty")]);
    assert!(!out.status.success());
    let said = "simcuda: SIMCUDA_HOST_MIB: \"plenty\" is neither a number of MiB nor \"all\"";
    assert!(stderr(&out).contains(said), "{}", stderr(&out));
}

/// Takes what eight H200 have, and touches none of it.
fn all_of_the_host() {
    const GIB: usize = 1 << 30;
    std::env::remove_var("SIMCUDA_HOST_MIB");
    let (mut taken, mut last) = (0, 0);
    for gpu in 0..8 {
        start(gpu);
        let mut p = 0;
        for _ in 0..140 {
            last = unsafe { memory::cuMemAlloc_v2(&mut p, GIB) };
            if last != 0 {
                break;
            }
            taken += GIB;
        }
    }
    println!("took {taken}, then {last}");
}

#[test]
fn the_host_itself_is_asked() {
    let row = |name: &str| {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap();
        let line = text.lines().find_map(|l| l.strip_prefix(name)).unwrap();
        let kib = line.split_whitespace().next().unwrap();
        kib.parse::<usize>().unwrap() << 10
    };
    let out = run("all_of_the_host", &[("SIMCUDA_TOPOLOGY", "hgx-h200")]);
    succeeds(&out);
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let words: Vec<&str> = text
        .split("took ")
        .nth(1)
        .unwrap()
        .split(", then ")
        .collect();
    let taken: usize = words[0].parse().unwrap();
    assert!(taken <= row("MemTotal:"), "{text}");
    // A control group may leave less than the machine has; a GiB it does leave.
    assert!(taken > 0, "{text}");
    let is_refused = words[1].starts_with('2');
    assert!(is_refused || taken == (8 * 140) << 30, "{text}");
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
