//! Virtual memory management. Expected values are those of the driver API reference.
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

const PAGE: usize = 2 << 20;

/// Runs the scenario that the parent asked for; does nothing in a plain test run.
#[test]
fn scenario() {
    match std::env::var("SCENARIO").as_deref() {
        Ok("grows") => grows(),
        Ok("attributes") => attributes(),
        Ok("rules") => rules(),
        Ok("handles") => handles(),
        Ok("limits") => limits(),
        Ok("touch") => touch(),
        Ok("two_views") => two_views(),
        Ok("race_behind_the_seam") => race_behind_the_seam(true),
        Ok("neighbours") => race_behind_the_seam(false),
        Ok("unmapped") => unmapped(),
        Ok("unmap_in_use") => unmap_in_use(),
        Ok(other) => panic!("no scenario {other}"),
        Err(_) => {}
    }
}

fn prop(device: i32) -> CUmemAllocationProp {
    let mut p: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    (p.kind, p.location.kind, p.location.id) = (1, 1, device);
    p
}

fn reserve(pages: usize) -> u64 {
    let mut p = 0;
    ok(unsafe { virt::cuMemAddressReserve(&mut p, pages * PAGE, 0, 0, 0) });
    p
}

fn create(pages: usize) -> u64 {
    let mut handle = 0;
    ok(unsafe { virt::cuMemCreate(&mut handle, pages * PAGE, &prop(0), 0) });
    handle
}

fn access(p: u64, pages: usize, flags: u32) -> i32 {
    let desc = CUmemAccessDesc {
        location: prop(0).location,
        flags,
    };
    unsafe { virt::cuMemSetAccess(p, pages * PAGE, &desc, 1) }
}

/// Memory at an address, accessible, with nothing but the mapping left to hold it.
fn back(p: u64, pages: usize) {
    let handle = create(pages);
    unsafe {
        ok(virt::cuMemMap(p, pages * PAGE, 0, handle, 0));
        ok(virt::cuMemRelease(handle));
    }
    ok(access(p, pages, 3));
}

fn unmap(p: u64, pages: usize) {
    ok(unsafe { virt::cuMemUnmap(p, pages * PAGE) });
}

/// A segment that grows, shrinks and grows again, with copies across the seams each time.
fn grows() {
    start(0);
    let p = reserve(8);
    let page = PAGE as u64;
    let before = free_bytes();
    back(p, 1);
    back(p + page, 2);
    assert_eq!(free_bytes(), before - 3 * page);
    let data = pattern(1, 3 * PAGE - 7);
    upload(p + 3, &data);
    assert_eq!(download(p + 3, data.len()), data);
    back(p + 3 * page, 1);
    assert_eq!(download(p + 3, data.len()), data, "what was there stays");
    // Within the device, over all seams, also overlapping rows.
    let q = alloc(4 * PAGE);
    unsafe {
        ok(copy::cuMemcpyDtoD_v2(q, p, 4 * PAGE));
        ok(fill::cuMemsetD8_v2(p, 9, 4 * PAGE));
        let mut c: CUDA_MEMCPY2D = std::mem::zeroed();
        (c.srcMemoryType, c.srcDevice, c.srcPitch) = (2, q, 1000);
        (c.dstMemoryType, c.dstDevice, c.dstPitch) = (2, p + page - 1500, 1000);
        (c.WidthInBytes, c.Height) = (600, 3);
        ok(copy::cuMemcpy2D_v2(&c));
    }
    let around = download(p + page - 1500, 3000);
    let source = download(q, 3000);
    for (i, byte) in around.iter().enumerate() {
        let expected = if i % 1000 < 600 { source[i] } else { 9 };
        assert_eq!(*byte, expected, "byte {i}");
    }
    // The middle goes, and what copies into the hole is refused; then other memory is there.
    unmap(p + page, 2);
    assert_eq!(free_bytes(), before - 6 * page, "two pages and q");
    let code = unsafe { copy::cuMemcpyDtoD_v2(p, q, 2 * PAGE) };
    assert_eq!(code, 1);
    back(p + page, 1);
    back(p + 2 * page, 1);
    upload(p + 3, &data);
    assert_eq!(download(p + 3, data.len()), data);
    assert_eq!(download(p + 3 * page, 10), [9; 10], "the last page stayed");
    unmap(p, 4);
    ok(unsafe { virt::cuMemAddressFree(p, 8 * PAGE) });
    ok(unsafe { memory::cuMemFree_v2(q) });
    assert_eq!(free_bytes(), before);
}

#[test]
fn segments_grow_and_shrink() {
    succeeds(&run("grows", &[]));
    succeeds(&run("grows", &[("SIMCUDA_HOST_ACCESS", "1")]));
}

fn attributes() {
    start(0);
    let p = reserve(4);
    let page = PAGE as u64;
    back(p, 1);
    back(p + page, 2);
    let q = p + page + 77;
    assert_eq!(attribute(1, q), Ok(0), "no context");
    assert_eq!(attribute(2, q), Ok(u64::from(MEMORYTYPE_DEVICE)));
    assert_eq!((attribute(8, q), attribute(9, q)), (Ok(0), Ok(0)));
    assert_eq!((attribute(10, q), attribute(17, q)), (Ok(0), Ok(0)));
    // Range and size are those of the reservation (docs/results/h200-answers.txt).
    for inside in [p, q] {
        let range = (attribute(11, inside), attribute(12, inside));
        assert_eq!(range, (Ok(p), Ok(4 * page)));
    }
    assert_eq!(attribute(16, q), Ok(3));
    assert_ne!(attribute(7, p), attribute(7, q));
    let (mut base, mut size) = (0, 0);
    ok(unsafe { memory::cuMemGetAddressRange_v2(&mut base, &mut size, q) });
    assert_eq!((base, size), (p + page, 2 * PAGE));
    assert_eq!(ipc_handle(q), 1);
    // Seen on hardware: SYNC_MEMOPS is not supported on mappings.
    let on = 1u32;
    assert_eq!(
        unsafe { pointer::cuPointerSetAttribute((&raw const on).cast(), 6, q) },
        801
    );
    assert_eq!(attribute(2, p + 3 * page), Err(1), "reserved only");
    let old = attribute(7, p);
    unmap(p, 1);
    assert_eq!(attribute(2, p), Err(1));
    back(p, 1);
    assert_ne!(attribute(7, p), old, "another mapping");
}

#[test]
fn mappings_are_known_for_what_they_are() {
    succeeds(&run("attributes", &[]));
}

fn rules() {
    start(0);
    let (p, page) = (reserve(4), PAGE as u64);
    let h = create(2);
    let mut q = 0;
    unsafe {
        let mut granularity = 0;
        ok(virt::cuMemGetAllocationGranularity(
            &mut granularity,
            &prop(0),
            0,
        ));
        assert_eq!(granularity, PAGE);
        assert_eq!(virt::cuMemAddressReserve(&mut q, PAGE + 1, 0, 0, 0), 1);
        assert_eq!(virt::cuMemAddressReserve(&mut q, PAGE, 3 * PAGE, 0, 0), 1);
        // Another thread may take the place that was just given back, for memory of its own.
        let is_there_again = (0..5).any(|_| {
            ok(virt::cuMemAddressReserve(&mut q, PAGE, 1 << 30, 0, 0));
            assert_eq!(q % (1 << 30), 0, "aligned");
            ok(virt::cuMemAddressFree(q, PAGE));
            let asked = q;
            ok(virt::cuMemAddressReserve(&mut q, PAGE, 0, asked, 0));
            q == asked
        });
        assert!(is_there_again, "the address asked for is free");
        assert_eq!(virt::cuMemAddressFree(p, PAGE), 1, "not all of it");
        // Mapping: aligned, inside a reservation, no larger than the memory, not over another.
        assert_eq!(virt::cuMemMap(p + 4096, 2 * PAGE, 0, h, 0), 1);
        assert_eq!(virt::cuMemMap(p, 3 * PAGE, 0, h, 0), 1);
        assert_eq!(virt::cuMemMap(p + 3 * page, 2 * PAGE, 0, h, 0), 1);
        assert_eq!(virt::cuMemMap(p, PAGE, PAGE, h, 0), 801, "an offset");
        assert_eq!(virt::cuMemMap(p, PAGE, 0, h, 0), 801, "a part");
        assert_eq!(virt::cuMemMap(alloc(8 * PAGE), 2 * PAGE, 0, h, 0), 1);
        ok(virt::cuMemMap(p + page, 2 * PAGE, 0, h, 0));
        assert_eq!(virt::cuMemMap(p + page, 2 * PAGE, 0, h, 0), 1);
        assert_eq!(virt::cuMemMap(p + 2 * page, 2 * PAGE, 0, h, 0), 1);
        assert_eq!(virt::cuMemMap(p, 2 * PAGE, 0, h, 0), 1);
        // No access before it is set.
        assert_eq!(fill::cuMemsetD8_v2(p + page, 0, 10), 1);
        let (mut flags, location) = (9, prop(0).location);
        ok(virt::cuMemGetAccess(&mut flags, &location, p + page));
        assert_eq!(flags, 0);
        assert_eq!(access(p + page, 1, 3), 1, "a part of a mapping");
        assert_eq!(access(p, 3, 3), 1, "a hole");
        ok(access(p + page, 2, 3));
        ok(virt::cuMemGetAccess(&mut flags, &location, p + page + 5));
        assert_eq!(flags, 3);
        ok(fill::cuMemsetD8_v2(p + page, 0, 10));
        ok(context::cuCtxSynchronize());
        assert_eq!(virt::cuMemUnmap(p + page, PAGE), 1, "a part");
        assert_eq!(virt::cuMemUnmap(p, 3 * PAGE), 1, "a hole");
        assert_eq!(virt::cuMemAddressFree(p, 4 * PAGE), 1, "mapped");
        assert_eq!(memory::cuMemFree_v2(p + page), 1);
        assert_eq!(pool::cuMemFreeAsync(p + page, 0), 1);
        assert_eq!(memory::cuMemHostRegister_v2(p as *mut _, PAGE, 0), 1);
        unmap(p + page, 2);
        ok(virt::cuMemUnmap(p + page, 2 * PAGE)); // nothing is there
        ok(virt::cuMemAddressFree(p, 4 * PAGE));
        assert_eq!(virt::cuMemAddressFree(p, 4 * PAGE), 1);
    }
}

#[test]
fn mappings_keep_to_their_rules() {
    succeeds(&run("rules", &[]));
}

fn handles() {
    start(0);
    let (p, page, before) = (reserve(2), PAGE as u64, free_bytes());
    let (h, mut same) = (create(1), 0);
    let mut what = prop(3);
    unsafe {
        ok(virt::cuMemMap(p, PAGE, 0, h, 0));
        ok(virt::cuMemRelease(h));
        assert_eq!(virt::cuMemRelease(h), 1, "released");
        assert_eq!(virt::cuMemMap(p + page, PAGE, 0, h, 0), 1);
        assert_eq!(free_bytes(), before - page, "the mapping holds it");
        ok(virt::cuMemRetainAllocationHandle(
            &mut same,
            (p + 100) as *mut _,
        ));
        assert_eq!(same, h);
        assert_eq!(
            virt::cuMemRetainAllocationHandle(&mut same, (p + page) as *mut _),
            1
        );
        ok(virt::cuMemGetAllocationPropertiesFromHandle(&mut what, h));
        assert_eq!((what.kind, what.location.kind, what.location.id), (1, 1, 0));
        // Held by the handle, and seen again with what was written.
        ok(access(p, 1, 3));
        upload(p, &pattern(2, PAGE));
        unmap(p, 1);
        assert_eq!(free_bytes(), before - page);
        ok(virt::cuMemMap(p + page, PAGE, 0, h, 0));
        ok(access(p + page, 1, 3));
        assert_eq!(download(p + page, PAGE), pattern(2, PAGE));
        unmap(p + page, 1);
        ok(virt::cuMemRelease(h));
        assert_eq!(free_bytes(), before);
        // Nothing to share it by but file descriptors, and no memory but a device's.
        let mut shared = prop(0);
        shared.requestedHandleTypes = 8;
        assert_eq!(virt::cuMemCreate(&mut same, PAGE, &shared, 0), 801);
        let mut supported = 9;
        ok(device::cuDeviceGetAttribute(&mut supported, 103, 0));
        assert_eq!(supported, 1);
        ok(device::cuDeviceGetAttribute(&mut supported, 102, 0));
        assert_eq!(supported, 1);
        assert_eq!(virt::cuMemCreate(&mut same, PAGE, &prop(77), 0), 101);
    }
}

#[test]
fn physical_memory_lives_as_long_as_something_holds_it() {
    succeeds(&run("handles", &[]));
}

/// Beluga's V100 has 16160 MiB, which is 8080 pages.
fn limits() {
    start(0);
    let h = create(8000);
    let (mut other, mut p) = (0, 0);
    unsafe {
        assert_eq!(virt::cuMemCreate(&mut other, 81 * PAGE, &prop(0), 0), 2);
        assert_eq!(virt::cuMemCreate(&mut other, PAGE + 4096, &prop(0), 0), 1);
        assert_eq!(memory::cuMemAlloc_v2(&mut p, 81 * PAGE), 2);
        ok(virt::cuMemRelease(h));
    }
    alloc(8000 * PAGE);
}

#[test]
fn physical_memory_is_as_large_as_the_device() {
    succeeds(&run("limits", &[]));
}

fn touch() {
    start(0);
    let p = reserve(1);
    back(p, 1);
    println!("read {}", unsafe { (p as *const u8).read_volatile() });
}

#[test]
fn host_code_faults_on_a_mapping() {
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(run("touch", &[]).status.signal(), Some(11));
    succeeds(&run("touch", &[("SIMCUDA_HOST_ACCESS", "1")]));
}

/// The same memory at two addresses: the checker knows that they are the same bytes.
fn two_views() {
    start(0);
    let (p, h, page) = (reserve(2), create(1), PAGE as u64);
    for q in [p, p + page] {
        ok(unsafe { virt::cuMemMap(q, PAGE, 0, h, 0) });
        ok(access(q, 1, 3));
    }
    upload(p, &pattern(6, 100));
    assert_eq!(download(p + page, 100), pattern(6, 100));
    let (s, t) = (new_stream(), new_stream());
    ok(unsafe { fill::cuMemsetD8Async(p, 1, 100, s) });
    ok(unsafe { fill::cuMemsetD8Async(p + page, 2, 100, t) });
    sync(s);
    sync(t);
}

/// Behind the seam two copies meet, or miss each other by a byte.
fn race_behind_the_seam(meet: bool) {
    start(0);
    let p = reserve(2);
    back(p, 1);
    back(p + PAGE as u64, 1);
    let q = p + PAGE as u64;
    let (s, t) = (new_stream(), new_stream());
    ok(unsafe { fill::cuMemsetD8Async(q - 100, 1, 200, s) });
    ok(unsafe { fill::cuMemsetD8Async(q + 100 - u64::from(meet), 2, 50, t) });
    sync(s);
    sync(t);
}

fn unmapped() {
    start(0);
    let p = reserve(1);
    back(p, 1);
    unmap(p, 1);
    assert_eq!(unsafe { fill::cuMemsetD8_v2(p, 1, 10) }, 1);
}

/// Unmapping waits for nothing.
fn unmap_in_use() {
    start(0);
    let p = reserve(1);
    back(p, 1);
    let s = new_stream();
    ok(unsafe { fill::cuMemsetD8Async(p, 1, PAGE, s) });
    unmap(p, 1);
    sync(s);
}

#[test]
fn mappings_are_under_the_eyes_of_the_checker() {
    let long = [("SIMCUDA_QUIET_US", "20000000")];
    succeeds(&run("neighbours", &long));
    for (name, what) in [
        ("two_views", "memset in process"),
        ("race_behind_the_seam", "memset in process"),
        ("unmapped", "use after free"),
        ("unmap_in_use", "while in use: memset"),
    ] {
        let out = run(name, &long);
        assert_eq!(out.status.code(), Some(86), "{name}: {}", stderr(&out));
        assert!(stderr(&out).contains(what), "{name}: {}", stderr(&out));
    }
}
