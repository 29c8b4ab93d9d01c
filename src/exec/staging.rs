//! Staging memory of the plans that this process drives: blocks on GPUs and of pinned host memory.
//!
//! A plan takes all that it needs at once or nothing, so that plans never wait for each other's. Blocks are allocated when
//! they are first needed, in classes of powers of two, kept for the next plan, and bounded.

use crate::cuda::{ContextKey, Entered, Error, PinnedBuffer, PinnedPool, Result};
use crate::exec::script::Ring;
use crate::topology::{Place, MAX_GPUS};

/// The smallest block.
const BLOCK_MIN: u64 = 1 << 20;
/// Memory of a GPU that is left to others: no staging is taken from the last of it.
const RESERVE: u64 = 256 << 20;

#[derive(Debug)]
struct Block {
    key: ContextKey,
    address: u64,
    bytes: u64,
    is_taken: bool,
}

/// A ring's memory.
pub enum Lease {
    /// A block on a GPU, by its address.
    Gpu(ContextKey, u64),
    /// Pinned host memory.
    Host(PinnedBuffer),
}

impl Lease {
    /// Its address.
    #[must_use]
    pub fn address(&self) -> u64 {
        match self {
            Lease::Gpu(_, address) => *address,
            Lease::Host(buffer) => buffer.address(),
        }
    }
}

/// All staging memory of this process.
pub struct Staging {
    blocks: Vec<Block>,
    host: PinnedPool,
    gpu_bytes_max: u64,
    host_bytes_max: u64,
}

impl Staging {
    /// Nothing is allocated yet.
    #[must_use]
    pub fn new(gpu_bytes_max: u64, host_bytes_max: u64) -> Staging {
        let host = usize::try_from(host_bytes_max).unwrap_or(usize::MAX);
        Staging {
            blocks: Vec::new(),
            host: PinnedPool::new(host),
            gpu_bytes_max,
            host_bytes_max,
        }
    }

    /// Memory for all rings, or for none. [`Error::Exhausted`]: others have it.
    ///
    /// # Errors
    /// As above, or the driver has no memory to give.
    pub fn take(
        &mut self,
        rings: &[Ring],
        contexts: &[Option<ContextKey>; MAX_GPUS],
        pinned_by: ContextKey,
    ) -> Result<Vec<Lease>> {
        let mut leases = Vec::with_capacity(rings.len());
        for ring in rings {
            let lease = match ring.at {
                Place::Gpu(gpu) => contexts[usize::from(gpu)]
                    .ok_or(Error::NoContext)
                    .and_then(|key| self.take_block(key, ring.bytes)),
                Place::Host => self.take_host(pinned_by, ring.bytes),
            };
            match lease {
                Ok(lease) => leases.push(lease),
                Err(error) => {
                    leases.into_iter().for_each(|lease| self.give_back(lease));
                    return Err(error);
                }
            }
        }
        Ok(leases)
    }

    /// Takes memory back.
    pub fn give_back(&mut self, lease: Lease) {
        if let Lease::Gpu(key, address) = lease {
            let mut blocks = self.blocks.iter_mut();
            if let Some(block) = blocks.find(|block| (block.key, block.address) == (key, address)) {
                block.is_taken = false;
            }
        }
    }

    /// Bytes allocated in a context.
    #[must_use]
    pub fn bytes_in(&self, key: ContextKey) -> u64 {
        let of_context = self.blocks.iter().filter(|block| block.key == key);
        of_context.map(|block| block.bytes).sum()
    }

    /// Bytes of pinned host memory.
    #[must_use]
    pub fn host_bytes(&self) -> u64 {
        self.host.bytes() as u64
    }

    /// Frees all that nobody has taken.
    pub fn clear(&mut self) {
        self.free_idle(|_| true);
        self.host.clear();
    }

    fn take_host(&mut self, pinned_by: ContextKey, bytes: u64) -> Result<Lease> {
        if bytes > self.host_bytes_max {
            return Err(Error::Exhausted("pinned memory"));
        }
        let bytes = usize::try_from(bytes).map_err(|_| Error::Exhausted("address space"))?;
        let buffer = self.host.take(pinned_by, bytes)?;
        // The driver may copy memory that is not pinned before it returns.
        if !buffer.is_pinned() {
            return Err(Error::Exhausted("memory that can be pinned"));
        }
        Ok(Lease::Host(buffer))
    }

    fn take_block(&mut self, key: ContextKey, bytes: u64) -> Result<Lease> {
        let class = bytes.max(BLOCK_MIN).next_power_of_two();
        let fits = |block: &&mut Block| block.key == key && block.bytes == class && !block.is_taken;
        if let Some(block) = self.blocks.iter_mut().find(fits) {
            block.is_taken = true;
            return Ok(Lease::Gpu(key, block.address));
        }
        self.blocks
            .retain(|block| block.is_taken || block.key.is_alive());
        if self.bytes_in(key) + class > self.gpu_bytes_max {
            // Idle blocks of other classes make room, where that is enough.
            let of_context = self.blocks.iter().filter(|block| block.key == key);
            let taken = of_context.filter(|block| block.is_taken);
            if taken.map(|block| block.bytes).sum::<u64>() + class > self.gpu_bytes_max {
                return Err(Error::Exhausted("staging memory of a GPU"));
            }
            self.free_idle(|block| block.key == key);
        }
        let address = self.allocate(key, class)?;
        self.blocks.push(Block {
            key,
            address,
            bytes: class,
            is_taken: true,
        });
        Ok(Lease::Gpu(key, address))
    }

    fn allocate(&mut self, key: ContextKey, bytes: u64) -> Result<u64> {
        let entered = Entered::enter_same(key)?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are written.
        unsafe {
            entered
                .driver()
                .mem_get_info(&raw mut free, &raw mut total)?;
        }
        if (free as u64) < bytes + RESERVE {
            self.free_idle(|block| block.key == key);
            return Err(Error::Exhausted("memory of a GPU"));
        }
        let size = usize::try_from(bytes).map_err(|_| Error::Exhausted("address space"))?;
        let mut address = 0;
        // SAFETY: `address` is written.
        unsafe { entered.driver().mem_alloc(&raw mut address, size)? };
        Ok(address)
    }

    fn free_idle(&mut self, which: impl Fn(&Block) -> bool) {
        self.blocks.retain(|block| {
            let stays = block.is_taken || !which(block);
            if !stays {
                free(block);
            }
            stays
        });
    }
}

fn free(block: &Block) {
    // With its context, the block has gone as well.
    let Ok(entered) = Entered::enter_same(block.key) else {
        return;
    };
    // SAFETY: allocated in this context by `allocate`; no copy uses it.
    if let Err(error) = unsafe { entered.driver().mem_free(block.address) } {
        log::debug!("freeing staging memory: {error}");
    }
}
