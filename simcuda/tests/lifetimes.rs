//! Managed memory, and how long memory of each kind may be used. Expected values are those of the driver API reference.
#![allow(
    missing_docs,
    clippy::undocumented_unsafe_blocks,
    clippy::ptr_as_ptr,
    clippy::borrow_as_ptr
)]

mod common;
use common::*;
use simcuda::api::*;
use simcuda::types::MEMORYTYPE_DEVICE;

/// Runs the scenario that the parent asked for; does nothing in a plain test run.
#[test]
fn scenario() {
    match std::env::var("SCENARIO").as_deref() {
        Ok("managed") => managed(),
        Ok("managed_freed") => managed_freed(),
        Ok("pool_touch") => pool_touch(),
        Ok("unordered_use") => unordered_use(false),
        Ok("ordered_use") => unordered_use(true),
        Ok("unordered_free") => unordered_free(),
        Ok("pool_race") => pool_race(),
        Ok("pool_use_after_free") => pool_use_after_free(),
        Ok("pool_free_in_use") => pool_free_in_use(),
        Ok("double_free") => double_free(),
        Ok(other) => panic!("no scenario {other}"),
        Err(_) => {}
    }
}

fn managed() {
    let context = start(0);
    let before = free_bytes();
    let n = 100_001;
    let (m, plain) = (alloc_managed(n), alloc(n));
    assert!(before - free_bytes() >= 2 * n as u64);
    // Host code writes, the device copies, and back.
    let bytes = unsafe { std::slice::from_raw_parts_mut(m as *mut u8, n) };
    bytes.copy_from_slice(&pattern(3, n));
    ok(unsafe { copy::cuMemcpyDtoD_v2(plain, m, n) });
    assert_eq!(download(plain, n), pattern(3, n));
    upload(plain, &pattern(4, n));
    ok(unsafe { copy::cuMemcpyDtoD_v2(m, plain, n) });
    ok(unsafe { context::cuCtxSynchronize() });
    assert_eq!(bytes, pattern(4, n));
    ok(unsafe { fill::cuMemsetD8_v2(m, 7, n) });
    ok(unsafe { context::cuCtxSynchronize() });
    assert_eq!(bytes, vec![7; n]);

    assert_eq!(attribute(1, m + 5), Ok(context as u64));
    assert_eq!(attribute(2, m + 5), Ok(u64::from(MEMORYTYPE_DEVICE)));
    assert_eq!(attribute(4, m + 5), Ok(m + 5), "a host pointer");
    assert_eq!(attribute(8, m + 5), Ok(1), "managed");
    assert_eq!(attribute(8, plain), Ok(0));
    assert_eq!((attribute(10, m), attribute(10, plain)), (Ok(0), Ok(1)));
    assert_eq!(
        (attribute(11, m + 5), attribute(12, m + 5)),
        (Ok(m), Ok(n as u64))
    );
    assert_ne!(attribute(7, m), attribute(7, plain));
    assert_eq!((ipc_handle(m), ipc_handle(plain)), (1, 0));
    let on = 1u32;
    ok(unsafe { pointer::cuPointerSetAttribute((&raw const on).cast(), 6, m) });

    let mut p = 0;
    assert_eq!(unsafe { pool::cuMemAllocManaged(&mut p, 0, 1) }, 1);
    assert_eq!(unsafe { pool::cuMemAllocManaged(&mut p, 64, 0) }, 1);
    ok(unsafe { memory::cuMemFree_v2(m) });
    ok(unsafe { memory::cuMemFree_v2(plain) });
    assert_eq!(free_bytes(), before);
    assert_eq!(unsafe { memory::cuMemFree_v2(m) }, 1);
}

#[test]
fn managed_memory_belongs_to_host_and_device() {
    succeeds(&run("managed", &[]));
    succeeds(&run("managed", &[("SIMCUDA_HOST_ACCESS", "1")]));
}

fn managed_freed() {
    start(0);
    let m = alloc_managed(4096);
    unsafe { (m as *mut u8).write_volatile(1) };
    ok(unsafe { memory::cuMemFree_v2(m) });
    println!("read {}", unsafe { (m as *const u8).read_volatile() });
}

fn pool_touch() {
    start(0);
    let s = new_stream();
    let p = alloc_async(4096, s);
    sync(s);
    println!("read {}", unsafe { (p as *const u8).read_volatile() });
}

#[test]
fn host_code_faults_on_what_it_must_not_touch() {
    use std::os::unix::process::ExitStatusExt;
    for name in ["managed_freed", "pool_touch"] {
        assert_eq!(run(name, &[]).status.signal(), Some(11), "{name}");
    }
}

/// A use in another stream must be ordered behind the allocation.
fn unordered_use(ordered: bool) {
    start(0);
    let (s, t) = (new_stream(), new_stream());
    let p = alloc_async(4096, s);
    if ordered {
        sync(s);
    }
    ok(unsafe { fill::cuMemsetD8Async(p, 1, 4096, t) });
    sync(t);
}

/// The free must be ordered behind the uses.
fn unordered_free() {
    start(0);
    let (s, t) = (new_stream(), new_stream());
    let p = alloc_async(4096, s);
    sync(s);
    ok(unsafe { fill::cuMemsetD8Async(p, 1, 4096, t) });
    free_async(p, s);
    sync(t);
    sync(s);
}

/// Two copies between managed and pool memory that nothing orders.
fn pool_race() {
    start(0);
    let (s, t) = (new_stream(), new_stream());
    let (p, m) = (alloc_async(4096, s), alloc_managed(4096));
    sync(s);
    ok(unsafe { copy::cuMemcpyDtoDAsync_v2(m, p, 4096, s) });
    ok(unsafe { copy::cuMemcpyDtoDAsync_v2(p, m, 4096, t) });
    sync(s);
    sync(t);
}

fn pool_use_after_free() {
    start(0);
    let s = new_stream();
    let (p, q) = (alloc_async(4096, s), alloc(4096));
    free_async(p, s);
    assert_eq!(unsafe { copy::cuMemcpyDtoDAsync_v2(q, p, 4096, s) }, 1);
}

/// cuMemFree does not wait for pool memory.
fn pool_free_in_use() {
    start(0);
    let s = new_stream();
    let p = alloc_async(MIB, s);
    ok(unsafe { fill::cuMemsetD8Async(p, 1, MIB, s) });
    ok(unsafe { memory::cuMemFree_v2(p) });
    sync(s);
}

#[test]
fn pool_memory_is_under_the_eyes_of_the_checker() {
    succeeds(&run("ordered_use", &[LONG]));
    for (name, what) in [
        ("unordered_use", "allocation in process"),
        ("unordered_free", "free in process"),
        ("pool_race", "copy in process"),
        ("pool_use_after_free", "use after free"),
        ("pool_free_in_use", "while in use: memset"),
    ] {
        let out = run(name, &[LONG]);
        assert_eq!(out.status.code(), Some(86), "{name}: {}", stderr(&out));
        assert!(stderr(&out).contains(what), "{name}: {}", stderr(&out));
    }
}

/// Of any kind of memory only the start can be freed, once, by the call that is for it.
fn double_free() {
    start(0);
    let s = new_stream();
    let (a, m, p) = (alloc(4096), alloc_managed(4096), alloc_async(4096, s));
    unsafe {
        for q in [a, m, p] {
            assert_eq!(memory::cuMemFree_v2(q + 512), 1);
            assert_eq!(pool::cuMemFreeAsync(q + 512, s), 1);
        }
        assert_eq!(pool::cuMemFreeAsync(a, s), 1, "not pool memory");
        sync(s);
        for q in [a, m, p] {
            ok(memory::cuMemFree_v2(q));
            assert_eq!(memory::cuMemFree_v2(q), 1);
        }
        let p = alloc_async(4096, s);
        free_async(p, s);
        assert_eq!(pool::cuMemFreeAsync(p, s), 1);
    }
}

#[test]
fn memory_is_freed_once_and_from_its_start() {
    succeeds(&run("double_free", &[]));
}
