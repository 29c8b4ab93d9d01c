//! Tools of the scenarios.

use crate::cuda::types::{Context, Stream};
use crate::cuda::*;
use std::ffi::{c_void, CStr};
use std::time::{Duration, Instant};

/// Initializes the driver as a program would, and makes the primary context of a device current.
pub(crate) fn use_device(ordinal: i32) -> Context {
    assert!(arm(), "the simulated driver is on the library path");
    let driver = driver().expect("armed");
    // SAFETY: no argument refers to memory.
    unsafe { driver.init(0).unwrap() };
    let context = retain(ordinal);
    // SAFETY: retained, and so live.
    unsafe { driver.ctx_push_current(context).unwrap() };
    context
}

/// The primary context of a device.
pub(crate) fn retain(ordinal: i32) -> Context {
    let mut context = Context::NULL;
    let driver = driver().unwrap();
    driver.primary_ctx_retain(&mut context, ordinal).unwrap();
    context
}

/// The thread's current context.
pub(crate) fn current() -> Context {
    let mut context = Context::NULL;
    driver().unwrap().ctx_get_current(&mut context).unwrap();
    context
}

/// Device memory of the current context.
pub(crate) fn device_memory(bytes: usize) -> u64 {
    let mut address = 0;
    driver().unwrap().mem_alloc(&mut address, bytes).unwrap();
    address
}

/// Frees device memory of a test.
pub(crate) fn free(address: u64) {
    // SAFETY: allocated by the test.
    unsafe { driver().unwrap().mem_free(address).unwrap() };
}

/// A fresh mapping of host memory.
pub(crate) fn map_host(bytes: usize) -> *mut c_void {
    let (access, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    );
    // SAFETY: at an address of the kernel's choice.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
    assert_ne!(address, libc::MAP_FAILED);
    address
}

/// An address as a pointer.
pub(crate) fn at(address: u64) -> *const c_void {
    std::ptr::with_exposed_provenance(usize::try_from(address).unwrap())
}

/// The device buffer at an address.
pub(crate) fn buffer_at(address: u64) -> Buffer {
    match classify(at(address)) {
        Kind::Device(buffer) => buffer,
        other => panic!("{address:#x} is {other:?}"),
    }
}

/// A driver function that the engine does not use.
pub(crate) fn symbol(name: &CStr) -> *mut c_void {
    // SAFETY: the library is loaded, and stays so.
    let address = unsafe {
        let library = libc::dlopen(
            c"libcuda.so.1".as_ptr(),
            libc::RTLD_NOLOAD | libc::RTLD_LAZY,
        );
        libc::dlsym(library, name.as_ptr())
    };
    assert!(!address.is_null(), "{name:?} is absent");
    address
}

/// Polls until the copies are done.
pub(crate) fn finish(mut copies: InFlight) -> Result<()> {
    let start = Instant::now();
    while !copies.poll()? {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "the copy never ends"
        );
        std::thread::yield_now();
    }
    Ok(())
}

/// Bytes that differ from place to place and from seed to seed.
pub(crate) fn pattern(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|place| seed.wrapping_add((place % 251) as u8))
        .collect()
}

/// Lanes and bounce buffers of a test.
pub(crate) struct Bench {
    pub(crate) key: ContextKey,
    pub(crate) lanes: Lanes,
    pub(crate) pool: PinnedPool,
}

impl Bench {
    pub(crate) fn new(context: Context) -> Bench {
        Bench {
            key: ContextKey::of(context).unwrap(),
            lanes: Lanes::new(),
            pool: PinnedPool::new(Budget::new(64 << 20)),
        }
    }

    /// Starts a copy of contiguous bytes.
    pub(crate) fn copy(
        &mut self,
        purpose: Purpose,
        dst: u64,
        src: u64,
        bytes: usize,
    ) -> Result<InFlight> {
        let bytes = bytes as u64;
        self.lanes
            .submit(self.key, purpose, &[Copy::Linear { dst, src, bytes }])
    }

    /// Host bytes to device memory.
    pub(crate) fn upload(&mut self, address: u64, bytes: &[u8]) {
        let buffer = self.pool.take(self.key, bytes.len()).unwrap();
        // SAFETY: the buffer holds at least so many bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.as_ptr(), bytes.len()) };
        let copy = self.copy(
            Purpose::HostToDevice,
            address,
            buffer.address(),
            bytes.len(),
        );
        finish(copy.unwrap()).unwrap();
    }

    /// Device memory to host bytes.
    pub(crate) fn download(&mut self, address: u64, bytes: usize) -> Vec<u8> {
        let buffer = self.pool.take(self.key, bytes).unwrap();
        let copy = self.copy(Purpose::DeviceToHost, buffer.address(), address, bytes);
        finish(copy.unwrap()).unwrap();
        // SAFETY: the copy has filled so many bytes.
        unsafe { std::slice::from_raw_parts(buffer.as_ptr(), bytes) }.to_vec()
    }
}

/// A stream of the program's own.
pub(crate) fn user_stream() -> Stream {
    let mut stream = Stream::NULL;
    driver().unwrap().stream_create(&mut stream, 1).unwrap();
    stream
}
