//! Staging memory of the plans that this process drives: on GPUs, and pinned host memory.
//!
//! A plan takes all that it needs at once or nothing, so that plans never wait for each other's. The memory
//! is allocated in arenas when it is first needed, handed out in pieces, kept for the next plan, and bounded.
//! Pinning takes 60 us a MiB, so an arena is not given back for one of another size unless there is no other
//! way.

use crate::cuda::{
    free_bytes, is_short, Budget, ContextKey, Entered, Error, PinnedBuffer, PinnedPool, Result,
    RESERVE,
};
use crate::exec::schedule::Ring;
use crate::exec::Failure;
use crate::topology::{Place, MAX_GPUS};

/// An arena, unless a ring needs a larger one or the bound leaves less.
const ARENA: u64 = 16 << 20;
/// Pieces begin at multiples of this.
const ALIGN: u64 = 4096;

/// Where an arena is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Home {
    Gpu(ContextKey),
    Host,
}

struct Arena {
    home: Home,
    start: u64,
    bytes: u64,
    /// The pieces that are handed out, as offset and length, in order.
    taken: Vec<(u64, u64)>,
    /// The memory, if it is the host's.
    _pinned: Option<PinnedBuffer>,
}

/// A ring's memory.
#[derive(Debug)]
pub struct Lease {
    home: Home,
    /// Its address.
    pub address: u64,
}

/// All staging memory of this process.
pub struct Staging {
    arenas: Vec<Arena>,
    host: PinnedPool,
    host_budget: Budget,
    gpu_bytes_max: u64,
}

impl Staging {
    /// A staging with nothing allocated yet.
    #[must_use]
    pub fn new(gpu_bytes_max: u64, host_budget: Budget) -> Staging {
        Staging {
            arenas: Vec::new(),
            host: PinnedPool::new(host_budget.clone()),
            host_budget,
            gpu_bytes_max,
        }
    }

    /// Takes memory for all rings, or for none. [`Error::Exhausted`]: others have it.
    ///
    /// # Errors
    /// As above, or the driver has no memory to give; with the place where that is.
    pub fn take(
        &mut self,
        rings: &[Ring],
        contexts: &[Option<ContextKey>; MAX_GPUS],
        pinned_by: ContextKey,
    ) -> std::result::Result<Vec<Lease>, Failure> {
        let mut leases = Vec::with_capacity(rings.len());
        for ring in rings {
            let home = match ring.at {
                Place::Gpu(gpu) => contexts[usize::from(gpu)]
                    .map(Home::Gpu)
                    .ok_or(Error::NoContext),
                Place::Host => Ok(Home::Host),
            };
            match home.and_then(|home| self.take_one(home, ring.bytes, pinned_by)) {
                Ok(lease) => leases.push(lease),
                Err(error) => {
                    leases.into_iter().for_each(|lease| self.give_back(&lease));
                    return Err(Failure::at(ring.at)(error));
                }
            }
        }
        Ok(leases)
    }

    /// Takes memory back.
    pub fn give_back(&mut self, lease: &Lease) {
        for arena in self
            .arenas
            .iter_mut()
            .filter(|arena| arena.home == lease.home)
        {
            if let Some(offset) = lease.address.checked_sub(arena.start) {
                if offset < arena.bytes {
                    arena.taken.retain(|(at, _)| *at != offset);
                }
            }
        }
    }

    /// Bytes allocated in a context.
    #[must_use]
    pub fn bytes_in(&self, key: ContextKey) -> u64 {
        self.bytes_at(Home::Gpu(key))
    }

    /// Bytes of pinned host memory.
    #[must_use]
    pub fn host_bytes(&self) -> u64 {
        self.bytes_at(Home::Host)
    }

    /// Bytes of pinned host memory that plans may have together: what others have left.
    #[must_use]
    pub fn host_bytes_max(&self) -> u64 {
        (self.host.bytes() + self.host_budget.left()) as u64
    }

    /// Frees the pinned memory that nobody has taken.
    pub fn free_idle_host(&mut self) {
        self.free_idle(|arena| arena.home == Home::Host);
        self.host.clear();
    }

    /// Frees what nobody has taken on GPUs that have little memory left.
    pub fn mind_memory(&mut self) {
        let mut homes: Vec<Home> = self.arenas.iter().map(|arena| arena.home).collect();
        homes.dedup();
        for home in homes {
            if matches!(home, Home::Gpu(key) if is_short(key)) {
                self.free_idle(|arena| arena.home == home);
            }
        }
    }

    /// Frees all that nobody has taken.
    pub fn clear(&mut self) {
        self.free_idle(|_| true);
        self.host.clear();
    }

    fn bytes_at(&self, home: Home) -> u64 {
        let there = self.arenas.iter().filter(|arena| arena.home == home);
        there.map(|arena| arena.bytes).sum()
    }

    fn take_one(&mut self, home: Home, bytes: u64, pinned_by: ContextKey) -> Result<Lease> {
        let bytes = bytes.max(1).next_multiple_of(ALIGN);
        let most = match home {
            Home::Gpu(_) => self.gpu_bytes_max,
            Home::Host => self.host_bytes_max(),
        };
        let mut there = self.arenas.iter_mut().filter(|arena| arena.home == home);
        if let Some(address) = there.find_map(|arena| arena.take(bytes)) {
            return Ok(Lease { home, address });
        }
        self.arenas
            .retain(|arena| arena.is_taken() || arena.is_alive());
        if self.bytes_at(home) + bytes > most {
            let there = self.arenas.iter().filter(|arena| arena.home == home);
            let kept = there
                .filter(|arena| arena.is_taken())
                .map(|arena| arena.bytes);
            if kept.sum::<u64>() + bytes > most {
                return Err(Error::Exhausted("staging memory"));
            }
            self.free_idle(|arena| arena.home == home);
        }
        let arena = ARENA.min(most - self.bytes_at(home)) / ALIGN * ALIGN;
        let arena = self.allocate(home, arena.max(bytes), pinned_by)?;
        self.arenas.push(arena);
        let made = self.arenas.last_mut().and_then(|arena| arena.take(bytes));
        made.map(|address| Lease { home, address })
            .ok_or(Error::Exhausted("staging memory"))
    }

    fn allocate(&mut self, home: Home, bytes: u64, pinned_by: ContextKey) -> Result<Arena> {
        let size = usize::try_from(bytes).map_err(|_| Error::Exhausted("address space"))?;
        let mut arena = Arena {
            home,
            start: 0,
            bytes,
            taken: Vec::new(),
            _pinned: None,
        };
        let Home::Gpu(key) = home else {
            let buffer = self.host.take_exact(pinned_by, size)?;
            // The driver may copy memory that is not pinned before it returns.
            if !buffer.is_pinned() {
                return Err(Error::Exhausted("memory that can be pinned"));
            }
            arena.start = buffer.address();
            arena._pinned = Some(buffer);
            return Ok(arena);
        };
        let entered = Entered::enter_same(key)?;
        if free_bytes(&entered)? < bytes + RESERVE {
            self.free_idle(|arena| arena.home == home);
            return Err(Error::Exhausted("memory of a GPU"));
        }
        entered.driver().mem_alloc(&mut arena.start, size)?;
        Ok(arena)
    }

    fn free_idle(&mut self, which: impl Fn(&Arena) -> bool) {
        self.arenas.retain(|arena| {
            let stays = arena.is_taken() || !which(arena);
            if let (false, Home::Gpu(key)) = (stays, arena.home) {
                free(key, arena.start);
            }
            stays
        });
    }
}

impl Arena {
    fn is_taken(&self) -> bool {
        !self.taken.is_empty()
    }

    fn is_alive(&self) -> bool {
        match self.home {
            Home::Gpu(key) => key.is_alive(),
            Home::Host => true,
        }
    }

    /// The address of a piece, the first that is large enough.
    fn take(&mut self, bytes: u64) -> Option<u64> {
        let mut begin = 0;
        let mut at = 0;
        for (offset, length) in &self.taken {
            if offset - begin >= bytes {
                break;
            }
            begin = offset + length;
            at += 1;
        }
        if self.bytes - begin < bytes {
            return None;
        }
        self.taken.insert(at, (begin, bytes));
        Some(self.start + begin)
    }
}

fn free(key: ContextKey, address: u64) {
    // With its context, the memory has gone as well.
    let Ok(entered) = Entered::enter_same(key) else {
        return;
    };
    // SAFETY: allocated in this context by `allocate`; no copy uses it.
    if let Err(error) = unsafe { entered.driver().mem_free(address) } {
        log::debug!("freeing staging memory: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_an_arena_do_not_overlap_and_gaps_are_filled() {
        let mut arena = Arena {
            home: Home::Host,
            start: 1000,
            bytes: 100,
            taken: Vec::new(),
            _pinned: None,
        };
        assert_eq!(arena.take(40), Some(1000));
        assert_eq!(arena.take(40), Some(1040));
        assert_eq!(arena.take(40), None);
        assert_eq!(arena.take(20), Some(1080));
        arena.taken.retain(|(at, _)| *at != 40);
        assert_eq!(arena.take(41), None);
        assert_eq!(arena.take(30), Some(1040));
        assert_eq!(arena.take(10), Some(1070));
        assert_eq!(arena.take(1), None);
        arena.taken.clear();
        assert_eq!(arena.take(100), Some(1000));
    }
}
