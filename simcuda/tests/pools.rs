//! Memory pools. Expected values are those of the driver API reference.
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
        Ok("pool_attributes") => pool_attributes(),
        Ok("pool_reuse") => pool_reuse(),
        Ok("pool_other_stream") => pool_other_stream(),
        Ok("pool_bytes") => pool_bytes(),
        Ok("pool_limits") => pool_limits(),
        Ok("pool_handles") => pool_handles(),
        Ok(other) => panic!("no scenario {other}"),
        Err(_) => {}
    }
}

fn default_pool() -> usize {
    let mut pool = 0;
    ok(unsafe { pool::cuDeviceGetDefaultMemPool(&mut pool, 0) });
    pool
}

fn get(pool: usize, attribute: u32) -> u64 {
    let mut value = 0u64;
    ok(unsafe { pool::cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast()) });
    value
}

fn set(pool: usize, attribute: u32, mut value: u64) -> i32 {
    unsafe { pool::cuMemPoolSetAttribute(pool, attribute, (&raw mut value).cast()) }
}

fn pool_attributes() {
    start(1);
    let s = new_stream();
    let (p, q) = (alloc_async(1000, s), alloc_async(1000, s));
    let mut pool = 0;
    ok(unsafe { pool::cuDeviceGetMemPool(&mut pool, 1) });
    assert_eq!(attribute(1, p), Ok(0), "no context");
    assert_eq!(attribute(2, p), Ok(u64::from(MEMORYTYPE_DEVICE)));
    assert_eq!(attribute(9, p), Ok(1), "device");
    assert_eq!((attribute(8, p), attribute(10, p)), (Ok(0), Ok(0)));
    assert_eq!(
        (attribute(11, p + 9), attribute(12, p + 9)),
        (Ok(p), Ok(1000))
    );
    assert_eq!(attribute(17, p + 9), Ok(pool as u64));
    assert_eq!(attribute(17, alloc(64)), Ok(0), "not from a pool");
    assert_ne!(attribute(7, p), attribute(7, q));
    assert_eq!(ipc_handle(p), 1);
    let (mut base, mut size) = (0, 0);
    ok(unsafe { memory::cuMemGetAddressRange_v2(&mut base, &mut size, p + 9) });
    assert_eq!((base, size), (p, 1000));
    // It may ask for synchronous copies, and does not get them.
    let on = 1u32;
    ok(unsafe { pointer::cuPointerSetAttribute((&raw const on).cast(), 6, p) });
    ok(unsafe { context::cuCtxSynchronize() });
    ok(unsafe { copy::cuMemcpyDtoD_v2(p, q, 1000) });
    assert_eq!(unsafe { stream::cuStreamQuery(0) }, 600);
    ok(unsafe { context::cuCtxSynchronize() });
}

#[test]
fn pool_memory_is_known_for_what_it_is() {
    succeeds(&run("pool_attributes", &[LONG]));
}

/// The same stream gets what it has freed at once, with another identity, while the old contents are still copied.
fn pool_reuse() {
    start(0);
    let s = new_stream();
    let n = MIB;
    let host = pinned(n);
    let p = alloc_async(n, s);
    let first = attribute(7, p);
    let data = pattern(5, n);
    ok(unsafe { copy::cuMemcpyHtoDAsync_v2(p, data.as_ptr().cast(), n, s) });
    ok(unsafe { copy::cuMemcpyDtoHAsync_v2(host.cast(), p, n, s) });
    free_async(p, s);
    let q = alloc_async(n, s);
    assert_eq!(q, p);
    assert_ne!(attribute(7, q), first);
    ok(unsafe { fill::cuMemsetD8Async(q, 0, n, s) });
    assert_eq!(unsafe { stream::cuStreamQuery(s) }, 600);
    sync(s);
    assert!(unsafe { std::slice::from_raw_parts(host, n) } == data);
    free_async(q, s);
}

/// Another stream gets it too, behind the free; and not where the pool forbids that.
fn pool_other_stream() {
    start(0);
    let (s, t) = (new_stream(), new_stream());
    let n = MIB;
    let take_turns = || {
        let p = alloc_async(n, s);
        ok(unsafe { fill::cuMemsetD8Async(p, 1, n, s) });
        free_async(p, s);
        let q = alloc_async(n, t);
        ok(unsafe { fill::cuMemsetD8Async(q, 2, n, t) });
        free_async(q, t);
        let same = p == q;
        sync(s);
        sync(t);
        same
    };
    assert!(take_turns());
    let pool = default_pool();
    assert_eq!(get(pool, 3), 1);
    assert_eq!(set(pool, 3, 0), 0);
    assert!(!take_turns(), "no internal dependencies");
}

#[test]
fn freed_pool_memory_is_used_again_in_order() {
    for name in ["pool_reuse", "pool_other_stream"] {
        let out = run(name, &[LONG]);
        succeeds(&out);
        assert!(!stderr(&out).contains("race"), "{}", stderr(&out));
    }
}

fn pool_bytes() {
    start(0);
    let (s, pool) = (new_stream(), default_pool());
    let before = free_bytes();
    let mib = MIB as u64;
    let (p, q) = (alloc_async(MIB, s), alloc_async(2 * MIB, s));
    assert_eq!((get(pool, 5), get(pool, 7)), (3 * mib, 3 * mib));
    assert_eq!(free_bytes(), before - 3 * mib);
    free_async(p, s);
    assert_eq!(
        (get(pool, 5), get(pool, 7)),
        (3 * mib, 2 * mib),
        "kept till a synchronization"
    );
    sync(s);
    assert_eq!((get(pool, 5), get(pool, 7)), (2 * mib, 2 * mib));
    assert_eq!(free_bytes(), before - 2 * mib);
    // With a threshold it stays, until it is trimmed.
    assert_eq!(set(pool, 4, 64 * mib), 0);
    free_async(q, s);
    sync(s);
    assert_eq!((get(pool, 5), get(pool, 7)), (2 * mib, 0));
    ok(unsafe { pool::cuMemPoolTrimTo(pool, 2 * MIB) });
    assert_eq!(get(pool, 5), 2 * mib);
    ok(unsafe { pool::cuMemPoolTrimTo(pool, 0) });
    assert_eq!(get(pool, 5), 0);
    assert_eq!(free_bytes(), before);
    assert_eq!((get(pool, 6), get(pool, 8)), (3 * mib, 3 * mib), "at most");
    assert_eq!(set(pool, 6, 5), 1);
    assert_eq!(set(pool, 6, 0), 0);
    assert_eq!((get(pool, 6), set(pool, 5, 0)), (0, 1));
}

#[test]
fn pools_count_and_release_their_bytes() {
    succeeds(&run("pool_bytes", &[]));
}

/// Beluga's V100 has 16160 MiB.
fn pool_limits() {
    start(0);
    let (s, pool) = (new_stream(), default_pool());
    let p = alloc_async(10 << 30, s);
    let mut q = 0;
    assert_eq!(unsafe { pool::cuMemAllocAsync(&mut q, 8 << 30, s) }, 2);
    assert_eq!(unsafe { pool::cuMemAllocManaged(&mut q, 8 << 30, 1) }, 2);
    assert_eq!(set(pool, 4, u64::MAX), 0);
    free_async(p, s);
    sync(s);
    assert_eq!(get(pool, 5), 10 << 30);
    let all = alloc(15 << 30);
    assert_eq!(
        get(pool, 5),
        0,
        "unused memory of a pool goes where it is wanted"
    );
    assert_eq!(unsafe { pool::cuMemAllocAsync(&mut q, 8 << 30, s) }, 2);
    ok(unsafe { memory::cuMemFree_v2(all) });
    q = 1;
    assert_eq!(unsafe { pool::cuMemAllocAsync(&mut q, 0, s) }, 0);
    assert_eq!(q, 0, "nothing");
}

fn pool_handles() {
    start(0);
    let s = new_stream();
    let mut props: CUmemPoolProps = unsafe { std::mem::zeroed() };
    (props.allocType, props.location.kind, props.maxSize) = (1, 1, 4 * MIB);
    let (mut own, mut now, mut p, mut q) = (0, 0, 0, 0);
    unsafe {
        ok(pool::cuMemPoolCreate(&mut own, &props));
        ok(pool::cuMemAllocFromPoolAsync(&mut p, 3 * MIB, own, s));
        assert_eq!(attribute(17, p), Ok(own as u64));
        assert_eq!(
            pool::cuMemAllocFromPoolAsync(&mut q, 2 * MIB, own, s),
            2,
            "maxSize"
        );
        ok(pool::cuDeviceSetMemPool(0, own));
        assert_eq!(pool::cuDeviceSetMemPool(1, own), 1, "another device's");
        q = alloc_async(MIB, s);
        assert_eq!(attribute(17, q), Ok(own as u64));
        let other = CUmemAccessDesc {
            location: CUmemLocation { kind: 1, id: 1 },
            flags: 3,
        };
        ok(pool::cuMemPoolSetAccess(own, &other, 1));
        let mut flags = 0;
        ok(pool::cuMemPoolGetAccess(&mut flags, own, &other.location));
        assert_eq!(flags, 3);
        let mine = CUmemAccessDesc {
            location: props.location,
            flags: 0,
        };
        assert_eq!(
            pool::cuMemPoolSetAccess(own, &mine, 1),
            101,
            "its own device"
        );
        // Destroyed: the device's own is current again, and what is allocated lives on.
        ok(pool::cuMemPoolDestroy(own));
        ok(pool::cuDeviceGetMemPool(&mut now, 0));
        assert_eq!(now, default_pool());
        assert_eq!(pool::cuMemPoolDestroy(now), 1);
        assert_eq!(pool::cuMemPoolDestroy(own), 1);
        assert_eq!(pool::cuMemAllocFromPoolAsync(&mut q, 64, own, s), 1);
        sync(s);
        upload(p, &pattern(1, 1000));
        assert_eq!(download(p, 1000), pattern(1, 1000));
        free_async(p, s);
        free_async(attribute(11, q).unwrap(), s);
        sync(s);
        assert_eq!(free_bytes(), 16160 << 20);
        props.handleTypes = 1;
        assert_eq!(
            pool::cuMemPoolCreate(&mut own, &props),
            801,
            "nothing to share it by"
        );
        // Allocations in graphs are not simulated.
        ok(simcuda::api::capture::cuStreamBeginCapture_v2(s, 2));
        assert_eq!(pool::cuMemAllocAsync(&mut q, 64, s), 801);
    }
}

#[test]
fn pools_have_limits_and_owners() {
    succeeds(&run("pool_limits", &[]));
    succeeds(&run("pool_handles", &[]));
}
