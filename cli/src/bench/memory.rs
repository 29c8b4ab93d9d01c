//! Device memory as programs allocate it: by `cudaMalloc`, from a pool, or mapped chunk by chunk as PyTorch's
//! expandable segments are.

use std::ffi::{c_int, c_uint, c_void};
use std::rc::Rc;

use libloading::os::unix::Symbol;

use super::cuda::{DevicePtr, Driver};

/// Where device memory comes from.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    clap::ValueEnum,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Memory {
    /// As cudaMalloc gives it
    #[default]
    Plain,
    /// From the device's default memory pool, as cudaMallocAsync gives it
    Pool,
    /// Chunks of 20 MiB mapped into a reservation, which can be exported as file descriptors: as PyTorch's
    /// expandable segments are
    Mapped,
}

impl Memory {
    /// What to say of it, if it is not what programs usually have.
    pub fn note(self) -> Option<&'static str> {
        match self {
            Memory::Plain => None,
            Memory::Pool => Some("from the default pool, as cudaMallocAsync gives it"),
            Memory::Mapped => {
                Some("chunks of 20 MiB mapped into a reservation, as expandable segments are")
            }
        }
    }
}

/// Bytes of a chunk of [`Memory::Mapped`]: what PyTorch maps at a time for tensors of 1 MiB and more.
const CHUNK: usize = 20 << 20;

#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: c_int,
    id: c_int,
}

const ON_DEVICE: c_int = 1;

/// `CUmemAllocationProp`.
#[repr(C)]
struct Properties {
    kind: c_int,
    handle_types: c_uint,
    location: Location,
    win32: *mut c_void,
    flags: [u8; 8],
}

const PINNED: c_int = 1;
const POSIX_FILE_DESCRIPTOR: c_uint = 1;

/// `CUmemAccessDesc`.
#[repr(C)]
struct Access {
    location: Location,
    flags: c_int,
}

const READ_WRITE: c_int = 3;

type AllocAsync = unsafe extern "C" fn(*mut DevicePtr, usize, *mut c_void) -> c_int;
type FreeAsync = unsafe extern "C" fn(DevicePtr, *mut c_void) -> c_int;
type Granularity = unsafe extern "C" fn(*mut usize, *const Properties, c_uint) -> c_int;
type Reserve = unsafe extern "C" fn(*mut DevicePtr, usize, usize, DevicePtr, u64) -> c_int;
type Unreserve = unsafe extern "C" fn(DevicePtr, usize) -> c_int;
type Create = unsafe extern "C" fn(*mut u64, usize, *const Properties, u64) -> c_int;
type Release = unsafe extern "C" fn(u64) -> c_int;
type Map = unsafe extern "C" fn(DevicePtr, usize, usize, u64, u64) -> c_int;
type Unmap = unsafe extern "C" fn(DevicePtr, usize) -> c_int;
type SetAccess = unsafe extern "C" fn(DevicePtr, usize, *const Access, usize) -> c_int;

/// Device memory that a rank has allocated, and frees.
pub struct Allocation {
    driver: Rc<Driver>,
    memory: Memory,
    start: DevicePtr,
    bytes: usize,
}

impl Allocation {
    /// Allocates `bytes` on the device `ordinal`, whose context is current.
    ///
    /// # Errors
    /// What the driver says: it has no such memory, or not that much.
    pub fn new(
        driver: &Rc<Driver>,
        ordinal: u32,
        memory: Memory,
        bytes: usize,
    ) -> anyhow::Result<Allocation> {
        let (start, bytes) = match memory {
            Memory::Plain => (driver.alloc(bytes)?, bytes),
            Memory::Pool => (from_pool(driver, bytes)?, bytes),
            Memory::Mapped => mapped(driver, c_int::try_from(ordinal)?, bytes)?,
        };
        Ok(Allocation {
            driver: driver.clone(),
            memory,
            start,
            bytes,
        })
    }

    /// The first address.
    pub fn start(&self) -> DevicePtr {
        self.start
    }

    /// The driver that it came from.
    pub fn driver(&self) -> &Driver {
        &self.driver
    }

    fn free(&self) -> anyhow::Result<()> {
        let driver = &self.driver;
        match self.memory {
            Memory::Plain => driver.free(self.start),
            Memory::Pool => {
                let free: Symbol<FreeAsync> = driver.function(b"cuMemFreeAsync\0")?;
                // SAFETY: the default stream; an unknown address is an error code.
                let code = unsafe { free(self.start, std::ptr::null_mut()) };
                driver.check(code, "cuMemFreeAsync")
            }
            Memory::Mapped => {
                let unmap: Symbol<Unmap> = driver.function(b"cuMemUnmap\0")?;
                let unreserve: Symbol<Unreserve> = driver.function(b"cuMemAddressFree\0")?;
                // SAFETY: the whole of what `mapped` has mapped.
                driver.check(unsafe { unmap(self.start, self.bytes) }, "cuMemUnmap")?;
                // SAFETY: the whole of what `mapped` has reserved.
                driver.check(
                    unsafe { unreserve(self.start, self.bytes) },
                    "cuMemAddressFree",
                )
            }
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // The process is about to end; there is nobody to tell.
        let _ = self.free();
    }
}

fn from_pool(driver: &Driver, bytes: usize) -> anyhow::Result<DevicePtr> {
    let alloc: Symbol<AllocAsync> = driver.function(b"cuMemAllocAsync\0")?;
    let mut start = 0;
    // SAFETY: the driver writes one address; the default stream.
    let code = unsafe { alloc(&raw mut start, bytes, std::ptr::null_mut()) };
    driver.check(code, &format!("cuMemAllocAsync of {bytes} bytes"))?;
    driver.synchronize()?;
    Ok(start)
}

/// The first address, and the bytes: a whole number of chunks.
fn mapped(driver: &Driver, device: c_int, bytes: usize) -> anyhow::Result<(DevicePtr, usize)> {
    let granularity: Symbol<Granularity> = driver.function(b"cuMemGetAllocationGranularity\0")?;
    let reserve: Symbol<Reserve> = driver.function(b"cuMemAddressReserve\0")?;
    let create: Symbol<Create> = driver.function(b"cuMemCreate\0")?;
    let release: Symbol<Release> = driver.function(b"cuMemRelease\0")?;
    let map: Symbol<Map> = driver.function(b"cuMemMap\0")?;
    let set_access: Symbol<SetAccess> = driver.function(b"cuMemSetAccess\0")?;
    let location = Location {
        kind: ON_DEVICE,
        id: device,
    };
    let properties = Properties {
        kind: PINNED,
        handle_types: POSIX_FILE_DESCRIPTOR,
        location,
        win32: std::ptr::null_mut(),
        flags: [0; 8],
    };
    let mut page = 0;
    // SAFETY: the driver writes one size.
    let code = unsafe { granularity(&raw mut page, &raw const properties, 0) };
    driver.check(code, "cuMemGetAllocationGranularity")?;
    let chunk = CHUNK.next_multiple_of(page.max(1));
    let bytes = bytes.next_multiple_of(chunk);
    let mut start = 0;
    // SAFETY: the driver writes one address.
    let code = unsafe { reserve(&raw mut start, bytes, 0, 0, 0) };
    driver.check(code, &format!("cuMemAddressReserve of {bytes} bytes"))?;
    for at in (0..bytes).step_by(chunk) {
        let mut handle = 0;
        // SAFETY: the driver writes one handle.
        let code = unsafe { create(&raw mut handle, chunk, &raw const properties, 0) };
        driver.check(code, &format!("cuMemCreate of {chunk} bytes"))?;
        // SAFETY: within what was reserved.
        let code = unsafe { map(start + at as u64, chunk, 0, handle, 0) };
        driver.check(code, "cuMemMap")?;
        // SAFETY: a handle of ours; what is mapped keeps the memory.
        driver.check(unsafe { release(handle) }, "cuMemRelease")?;
    }
    let access = Access {
        location,
        flags: READ_WRITE,
    };
    // SAFETY: all of it was mapped above.
    let code = unsafe { set_access(start, bytes, &raw const access, 1) };
    driver.check(code, "cuMemSetAccess")?;
    Ok((start, bytes))
}
