//! Scenarios of what addresses point to.

use super::bench::*;
use crate::cuda::types::{code, Context, Stream};
use crate::cuda::*;
use std::ffi::{c_void, CStr};

pub(super) fn inert() {
    assert!(!arm());
    assert!(driver().is_none() && !driver_in_use() && !gpu_seen());
    assert_eq!(classify(map_host(4096)), Kind::Host);
    // SAFETY: there is no driver that could be asked about it.
    let nobodys = unsafe { Context::told(8) };
    assert_eq!(ContextKey::of(nobodys), Err(Error::NoDriver));
    assert!(!look_again());
    // The program loads the driver from a path of its own.
    let path = std::env::var("ANABRANCH_CUDA_TEST_FOLDER").unwrap() + "/libcuda.so.1\0";
    let path = CStr::from_bytes_with_nul(path.as_bytes()).unwrap();
    // SAFETY: a terminated path.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
    assert!(!library.is_null());
    assert!(look_again() && driver().is_some());
    let coverage = driver().unwrap().coverage();
    let absent: Vec<_> = coverage.into_iter().filter(|(_, found)| !found).collect();
    assert!(absent.is_empty(), "{absent:?}");
}

pub(super) fn host_only() {
    assert!(arm());
    let host = map_host(4096);
    assert_eq!(classify(host), Kind::Host);
    assert!(!driver_in_use());
    // UCX initializes the driver in programs that never use a device.
    // SAFETY: no argument refers to memory.
    unsafe { driver().unwrap().init(0).unwrap() };
    assert!(driver_in_use());
    assert_eq!(classify(host), Kind::Host);
    assert_eq!(classify(std::ptr::null()), Kind::Host);
    assert!(!gpu_seen());
    assert!(current().is_null(), "no context was made");
}

pub(super) fn pointers() {
    let context = use_device(1);
    let host = map_host(1 << 16);
    assert_eq!(classify(host), Kind::Host);
    assert!(!gpu_seen());
    let bytes = 3 << 20;
    let address = device_memory(bytes);
    let buffer = buffer_at(address);
    assert!(gpu_seen());
    assert_eq!(
        (buffer.base, buffer.size, buffer.offset),
        (address, bytes as u64, 0)
    );
    assert_eq!(
        (buffer.context, buffer.ordinal, buffer.ipc),
        (context, 1, true)
    );
    assert_eq!(buffer.uuid, reach::device(1).unwrap().uuid);
    assert_eq!(buffer.allocation, Allocation::Plain);
    let inside = buffer_at(address + 12345);
    assert_eq!((inside.base, inside.offset), (address, 12345));
    assert_eq!(inside.remaining(), bytes as u64 - 12345);
    assert_eq!(inside.buffer_id, buffer.buffer_id);
    // A thread without a context sees the same.
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(buffer_at(address), buffer));
    });
    free(address);
    assert!(!is_device(at(address)), "freed memory is no device buffer");
    let again = device_memory(bytes);
    assert_ne!(buffer_at(again).buffer_id, buffer.buffer_id);
    free(again);
    registered(host);
    pinned_by_the_program();
    managed();
    pool_memory();
}

fn registered(host: *mut c_void) {
    let key = ContextKey::of(reach::existing_context(1).unwrap()).unwrap();
    let mut registrations = Registrations::new();
    // SAFETY: the range stays mapped to the end of the process.
    unsafe { registrations.register(key, host, 1 << 16).unwrap() };
    assert_eq!(classify(host), Kind::HostAccessible(HostMemory::Pinned));
    registrations.clear();
    assert_eq!(classify(host), Kind::Host);
}

fn pinned_by_the_program() {
    let mut pinned = std::ptr::null_mut();
    // SAFETY: `pinned` is written.
    unsafe {
        driver()
            .unwrap()
            .mem_host_alloc(&raw mut pinned, 4096, 0)
            .unwrap()
    };
    assert_eq!(classify(pinned), Kind::HostAccessible(HostMemory::Pinned));
}

fn managed() {
    type AllocManaged = unsafe extern "C" fn(*mut u64, usize, u32) -> i32;
    // SAFETY: this is the function's signature.
    let allocate =
        unsafe { std::mem::transmute::<*mut c_void, AllocManaged>(symbol(c"cuMemAllocManaged")) };
    let mut address = 0;
    // SAFETY: `address` is written; 1 is CU_MEM_ATTACH_GLOBAL.
    match unsafe { allocate(&raw mut address, 4096, 1) } {
        code::SUCCESS => assert_eq!(
            classify(at(address)),
            Kind::HostAccessible(HostMemory::Managed)
        ),
        refused => println!("managed memory: the driver answers {refused}"),
    }
}

fn pool_memory() {
    type AllocAsync = unsafe extern "C" fn(*mut u64, usize, Stream) -> i32;
    // SAFETY: this is the function's signature.
    let allocate =
        unsafe { std::mem::transmute::<*mut c_void, AllocAsync>(symbol(c"cuMemAllocAsync")) };
    let mut address = 0;
    // SAFETY: `address` is written.
    match unsafe { allocate(&raw mut address, 1 << 20, Stream::NULL) } {
        code::SUCCESS => {
            let buffer = buffer_at(address);
            assert!(!buffer.ipc, "{buffer:?}");
            assert!(
                !buffer.context.is_null(),
                "an existing context of the device serves"
            );
            let refused = Exports::new(8).export(&buffer);
            assert_eq!(refused, Err(Error::NotExportable(NotExportable::Pool)));
        }
        refused => println!("memory pools: the driver answers {refused}"),
    }
}
