//! Making an allocation of this process readable by its peers.

use super::chunks;
use super::driver::required;
use super::error::{Error, NotExportable, Result};
use super::pointer::{self, Allocation, Buffer};
use super::state::Entered;
use super::types::{attribute, IpcHandle, Uuid};
use hashbrown::hash_map::Entry;
use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;
use std::collections::VecDeque;

/// What a peer needs to map an allocation, and to recognize it again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Export {
    /// The driver's handle of the whole allocation.
    pub handle: IpcHandle,
    /// Start of the allocation in the exporter.
    pub base: u64,
    /// Bytes of the allocation.
    pub size: u64,
    /// Where in it the message starts, in bytes.
    pub offset: u64,
    /// The exporter's number of the allocation.
    pub buffer_id: u64,
    /// The device it is on.
    pub uuid: Uuid,
}

impl Export {
    /// Whether so many bytes from the start of the message lie in the allocation; of one that is found by
    /// files, in the part for which these are sent.
    #[must_use]
    pub fn holds(&self, bytes: u64) -> bool {
        let (from, to) = chunks::needs(self).unwrap_or((0, self.size));
        let end = self.offset.checked_add(bytes);
        self.offset >= from && end.is_some_and(|end| end <= to)
    }
}

/// What is remembered of an allocation.
struct Prepared {
    /// Whether copies called as synchronous are synchronous on it.
    synchronous: bool,
    handle: Option<IpcHandle>,
    used: u64,
}

/// The allocations of this process that the engine has copied from or to. Bounded: the least recently used
/// one is forgotten, and the driver is asked once more.
pub struct Exports {
    known: HashMap<(u64, u64), Prepared, FxBuildHasher>,
    /// Exported allocations; the one to be looked at next comes first.
    exported: VecDeque<(u64, u64)>,
    /// Exported allocations that had to make room for others.
    evicted: Vec<(u64, u64)>,
    clock: u64,
    rows_max: usize,
}

impl Exports {
    /// A cache of at most so many allocations.
    #[must_use]
    pub fn new(rows_max: usize) -> Exports {
        Exports {
            known: HashMap::default(),
            exported: VecDeque::new(),
            evicted: Vec::new(),
            clock: 0,
            rows_max: rows_max.max(1),
        }
    }

    /// Makes a buffer fit for asynchronous copies by the engine, once per allocation. From now on, memsets
    /// and device-to-device copies that the program believes finished are finished. Call it before the first
    /// copy from or to the buffer. Returns false if the driver cannot promise that (pool and virtual memory).
    pub fn prepare(&mut self, buffer: &Buffer) -> Result<bool> {
        Ok(self.prepared(buffer)?.synchronous)
    }

    /// Allocations that are exported, as far as is known.
    #[must_use]
    pub fn exported(&self) -> usize {
        self.exported.len()
    }

    /// Exports the allocation of a buffer.
    pub fn export(&mut self, buffer: &Buffer) -> Result<Export> {
        if !buffer.ipc {
            return Err(Error::NotExportable(match buffer.allocation {
                Allocation::Pool => NotExportable::Pool,
                Allocation::Virtual => NotExportable::Virtual,
                Allocation::Plain => NotExportable::Refused,
            }));
        }
        let prepared = self.prepared(buffer)?;
        let handle = match prepared.handle {
            Some(handle) => handle,
            None => {
                let handle = *prepared.handle.insert(get_handle(buffer)?);
                self.exported.push_back((buffer.base, buffer.buffer_id));
                handle
            }
        };
        Ok(Export {
            handle,
            base: buffer.base,
            size: buffer.size,
            offset: buffer.offset,
            buffer_id: buffer.buffer_id,
            uuid: buffer.uuid,
        })
    }

    /// Looks at some of the exported allocations. Returns those that the program has freed since, by address
    /// and number, and forgets them. Allocations that were forgotten to make room are among them, because
    /// nobody will look at them again.
    pub fn freed(&mut self, most: usize) -> Vec<(u64, u64)> {
        let mut gone = std::mem::take(&mut self.evicted);
        for _ in 0..most.min(self.exported.len()) {
            let Some((base, number)) = self.exported.pop_front() else {
                break;
            };
            if pointer::is_allocation(base, number) {
                self.exported.push_back((base, number));
            } else {
                self.known.remove(&(base, number));
                gone.push((base, number));
            }
        }
        gone
    }

    /// Forgets all, as after a device reset.
    pub fn clear(&mut self) {
        self.known.clear();
        self.exported.clear();
        self.evicted.clear();
    }

    fn prepared(&mut self, buffer: &Buffer) -> Result<&mut Prepared> {
        self.clock += 1;
        let key = (buffer.base, buffer.buffer_id);
        if self.known.len() >= self.rows_max && !self.known.contains_key(&key) {
            self.make_room();
        }
        let row = match self.known.entry(key) {
            Entry::Occupied(row) => row.into_mut(),
            Entry::Vacant(place) => place.insert(Prepared {
                synchronous: set_sync_memops(buffer)?,
                handle: None,
                used: 0,
            }),
        };
        row.used = self.clock;
        Ok(row)
    }

    fn make_room(&mut self) {
        if let Some(oldest) = self
            .known
            .iter()
            .min_by_key(|(_, row)| row.used)
            .map(|(key, _)| *key)
        {
            self.known.remove(&oldest);
            let before = self.exported.len();
            self.exported.retain(|key| *key != oldest);
            if self.exported.len() != before {
                self.evicted.push(oldest);
            }
        }
    }
}

/// Makes memsets and copies called as synchronous really synchronous, including pending ones.
fn set_sync_memops(buffer: &Buffer) -> Result<bool> {
    // For pool memory driver 580 takes the attribute and does nothing about it; for mapped memory it refuses.
    if buffer.allocation != Allocation::Plain {
        return Ok(false);
    }
    let entered = Entered::enter(buffer.context)?;
    let on = 1u32;
    // SAFETY: the driver reads one 32-bit word.
    let set = unsafe {
        entered.driver().pointer_set_attribute(
            (&raw const on).cast(),
            attribute::SYNC_MEMOPS,
            buffer.base,
        )
    };
    match set {
        Ok(()) => Ok(true),
        Err(error) if error.context_is_gone() => Err(error),
        Err(error) => {
            log::debug!("synchronous operations on {:#x}: {error}", buffer.base);
            Ok(false)
        }
    }
}

fn get_handle(buffer: &Buffer) -> Result<IpcHandle> {
    let _entered = Entered::enter(buffer.context)?;
    let mut handle = IpcHandle([0; 64]);
    match required()?.ipc_get_mem_handle(&mut handle, buffer.base) {
        Ok(()) => Ok(handle),
        Err(error) if error.context_is_gone() => Err(error),
        Err(error) => {
            log::debug!("exporting {:#x}: {error}", buffer.base);
            Err(Error::NotExportable(NotExportable::Refused))
        }
    }
}
