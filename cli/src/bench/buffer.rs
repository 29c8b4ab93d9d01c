//! A rank's buffer, in host or device memory.

use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::ffi::c_void;

use anyhow::anyhow;

use super::memory::{Allocation, Memory};
use super::Device;

/// Where a rank's buffers lie, as on OSU's command line.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum, serde::Serialize, serde::Deserialize,
)]
pub enum Place {
    /// Device memory
    #[value(name = "D", alias = "d")]
    D,
    /// Host memory
    #[value(name = "H", alias = "h")]
    H,
}

impl Place {
    /// The letter of the command line with its meaning, as in OSU's header.
    pub fn label(self) -> &'static str {
        match self {
            Place::D => "DEVICE (D)",
            Place::H => "HOST (H)",
        }
    }
}

/// Memory for messages.
pub enum Buffer {
    /// Page-aligned host memory, not pinned.
    Host(Pages),
    /// Device memory, and how many bytes of it.
    Device(Allocation, usize),
}

/// What to do where there is no memory for buffers of this length.
pub fn too_large(bytes: usize) -> String {
    format!("the two buffers of {bytes} bytes do not fit: use smaller --sizes")
}

/// Page-aligned host memory.
pub struct Pages {
    start: *mut u8,
    layout: Layout,
}

impl Buffer {
    /// Allocates `bytes` (at least one) in host memory, or on a device.
    ///
    /// # Errors
    /// There is not that much memory.
    pub fn new(device: Option<&Device>, memory: Memory, bytes: usize) -> anyhow::Result<Buffer> {
        let bytes = bytes.max(1);
        if let Some(device) = device {
            let allocation = Allocation::new(device, memory, bytes)?;
            return Ok(Buffer::Device(allocation, bytes));
        }
        // The system would give it, and kill somebody when it is touched. Each rank has two buffers.
        if let Some(left) = available().filter(|left| bytes > *left / 2) {
            return Err(anyhow!(
                "no two times {bytes} bytes of host memory, of which {left} are left"
            ));
        }
        let layout = Layout::from_size_align(bytes, 4096)?;
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            return Err(anyhow!("no {bytes} bytes of host memory"));
        }
        Ok(Buffer::Host(Pages { start, layout }))
    }

    /// Bytes allocated.
    pub fn len(&self) -> usize {
        match self {
            Buffer::Host(pages) => pages.layout.size(),
            Buffer::Device(_, bytes) => *bytes,
        }
    }

    /// The address `offset` bytes in, for MPI.
    pub fn at(&self, offset: usize) -> *mut c_void {
        assert!(offset <= self.len(), "address beyond the buffer");
        match self {
            // SAFETY: the offset lies within the allocation, or one past its end.
            Buffer::Host(pages) => unsafe { pages.start.add(offset) }.cast(),
            Buffer::Device(memory, _) => {
                let address = memory.start() + offset as u64;
                std::ptr::without_provenance_mut(usize::try_from(address).unwrap_or(usize::MAX))
            }
        }
    }

    /// Fills a part from host memory.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> anyhow::Result<()> {
        assert!(
            offset + bytes.len() <= self.len(),
            "write beyond the buffer"
        );
        match self {
            Buffer::Host(pages) => {
                // SAFETY: the range lies within the allocation, which no slice of ours borrows.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        bytes.as_ptr(),
                        pages.start.add(offset),
                        bytes.len(),
                    )
                };
                Ok(())
            }
            Buffer::Device(memory, _) if !bytes.is_empty() => {
                memory.driver().write(memory.start() + offset as u64, bytes)
            }
            Buffer::Device(..) => Ok(()),
        }
    }

    /// Reads a part to host memory.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> anyhow::Result<()> {
        assert!(offset + bytes.len() <= self.len(), "read beyond the buffer");
        match self {
            Buffer::Host(pages) => {
                // SAFETY: the range lies within the allocation, which no slice of ours borrows.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        pages.start.add(offset),
                        bytes.as_mut_ptr(),
                        bytes.len(),
                    )
                };
                Ok(())
            }
            Buffer::Device(memory, _) if !bytes.is_empty() => {
                memory.driver().read(memory.start() + offset as u64, bytes)
            }
            Buffer::Device(..) => Ok(()),
        }
    }
}

/// Bytes of the machine's memory that are free, or could be.
fn available() -> Option<usize> {
    let about = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = (about.lines()).find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: usize = line.trim().strip_suffix(" kB")?.parse().ok()?;
    kib.checked_mul(1024)
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, freed once.
        unsafe { dealloc(self.start, self.layout) };
    }
}
