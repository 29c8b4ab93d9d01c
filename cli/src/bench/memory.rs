//! Device memory as programs allocate it: by `cudaMalloc`, from a pool, or mapped chunk by chunk as PyTorch's
//! expandable segments are.

use std::rc::Rc;

use anabranch_engine::cuda::types::{Device, MemAccess, MemProperties, Stream};
use anyhow::Context;

use super::cuda::{of_bytes, DevicePtr, Driver};

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

/// Device memory that a rank has allocated, and frees.
pub struct Allocation {
    driver: Rc<Driver>,
    memory: Memory,
    start: DevicePtr,
    bytes: usize,
}

impl Allocation {
    /// Allocates `bytes` on a device, whose context is current.
    ///
    /// # Errors
    /// What the driver says: it has no such memory, or not that much.
    pub fn new(device: &super::Device, memory: Memory, bytes: usize) -> anyhow::Result<Allocation> {
        let driver = &device.driver;
        let (start, bytes) = match memory {
            Memory::Plain => (driver.alloc(bytes)?, bytes),
            Memory::Pool => (from_pool(driver, bytes)?, bytes),
            Memory::Mapped => mapped(driver, driver.device(device.ordinal)?, bytes)?,
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
            // SAFETY: the default stream; an unknown address is an error code.
            Memory::Pool => Ok(unsafe { driver.table().mem_free_async(self.start, Stream::NULL) }?),
            Memory::Mapped => {
                let table = driver.table();
                // SAFETY: the whole of what `mapped` has mapped, and then reserved.
                unsafe {
                    table.mem_unmap(self.start, self.bytes)?;
                    table.mem_address_free(self.start, self.bytes)?;
                }
                Ok(())
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
    let mut start = 0;
    // SAFETY: the driver writes one address; the default stream.
    unsafe { (driver.table()).mem_alloc_async(&raw mut start, bytes, Stream::NULL) }
        .with_context(|| of_bytes(bytes))?;
    driver.synchronize()?;
    Ok(start)
}

/// The first address, and the bytes: a whole number of chunks.
fn mapped(driver: &Driver, device: Device, bytes: usize) -> anyhow::Result<(DevicePtr, usize)> {
    let table = driver.table();
    let properties = MemProperties::exportable(device);
    let mut page = 0;
    table.mem_get_allocation_granularity(&mut page, &properties, 0)?;
    let chunk = CHUNK.next_multiple_of(page.max(1));
    let bytes = bytes.next_multiple_of(chunk);
    let mut start = 0;
    table
        .mem_address_reserve(&mut start, bytes, 0, 0, 0)
        .with_context(|| of_bytes(bytes))?;
    for at in (0..bytes).step_by(chunk) {
        let mut handle = 0;
        // SAFETY: the driver writes one handle, of ours; the chunk lies within what was reserved. What is mapped keeps
        // the memory.
        unsafe {
            (table.mem_create(&mut handle, chunk, &properties, 0))
                .with_context(|| of_bytes(chunk))?;
            table.mem_map(start + at as u64, chunk, 0, handle, 0)?;
            table.mem_release(handle)?;
        }
    }
    let access = MemAccess::read_write(device);
    // SAFETY: all of it was mapped above.
    unsafe { table.mem_set_access(start, bytes, &raw const access, 1) }?;
    Ok((start, bytes))
}
