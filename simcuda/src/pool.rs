//! Memory pools: allocations and frees in stream order.
//!
//! A pool keeps what was freed. It is used again by an allocation of about its size (never cut or joined) in the
//! stream that freed it, or elsewhere behind the free; the edge is always there, so a correct program sees no race.
//! At a synchronization all that is kept beyond the release threshold and surely unused goes back to the GPU. Where
//! the vendor's driver keeps chunks and cuts them, sizes and addresses differ, but not what may be relied on.

use crate::alloc::{give_back, take};
use crate::driver::Driver;
use crate::errors::*;
use crate::memory::{Allocation, Kind, Place, ALIGN};
use crate::ops::enter;
use crate::sched::OpState;
use crate::state::State;
use crate::types::{CUstream, Handle};
use crate::work::Work;
use parking_lot::MutexGuard;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::Arc;

/// A piece of a GPU's memory that a pool holds.
struct Block {
    offset: u64,
    size: u64,
    /// The checker's name for these bytes, whoever has them.
    space: u64,
}

struct Idle {
    block: Block,
    /// Stream in which it was freed, 0 for cuMemFree.
    stream: u64,
    /// The free, unless it was immediate.
    freed: Option<Arc<OpState>>,
}

impl Idle {
    fn done(&self) -> bool {
        self.freed.as_ref().is_none_or(|op| op.done.load(Acquire))
    }
}

/// How a pool may use freed memory again: CUmemPool_attribute 1 to 3.
#[derive(Clone, Copy)]
pub struct Reuse {
    /// CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES. Kept, but without effect of its own: memory that it would
    /// allow is found by the two others, or not used again.
    pub follow_events: bool,
    /// CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC: what happens to be complete.
    pub opportunistic: bool,
    /// CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: what becomes free if one waits.
    pub internal: bool,
}

/// A memory pool.
pub struct Pool {
    /// Physical GPU.
    pub gpu: usize,
    /// Its ordinal.
    pub ordinal: usize,
    /// The device's own pool.
    pub default: bool,
    /// Most bytes, 0 for no limit.
    pub max: u64,
    /// Bytes kept at a synchronization.
    pub threshold: u64,
    /// See [`Reuse`].
    pub reuse: Reuse,
    /// Bytes taken from the GPU: now and at most.
    pub reserved: (u64, u64),
    /// Bytes in allocations: now and at most.
    pub used: (u64, u64),
    /// Access of other devices, by ordinal.
    pub access: BTreeMap<usize, u32>,
    destroyed: bool,
    live: HashMap<u64, Block>,
    idle: Vec<Idle>,
}

/// The pools of this process.
#[derive(Default)]
pub struct Pools {
    all: HashMap<Handle, Pool>,
    defaults: HashMap<usize, Handle>,
    current: HashMap<usize, Handle>,
}

impl Pools {
    /// A pool that was not destroyed.
    pub fn get(&mut self, handle: Handle) -> Res<&mut Pool> {
        let pool = self.all.get_mut(&handle).filter(|p| !p.destroyed);
        pool.ok_or(INVALID_VALUE)
    }

    /// Makes a pool current for its device.
    pub fn set_current(&mut self, ordinal: usize, handle: Handle) -> Res {
        if self.get(handle)?.ordinal != ordinal {
            return Err(INVALID_VALUE);
        }
        self.current.insert(ordinal, handle);
        Ok(())
    }
}

/// Makes a pool.
pub fn create(d: &Driver, st: &mut State, ordinal: usize, max: u64, default: bool) -> Handle {
    let handle = st.handle();
    let pool = Pool {
        gpu: d.visible[ordinal],
        ordinal,
        default,
        max,
        threshold: 0,
        reuse: Reuse {
            follow_events: true,
            opportunistic: true,
            internal: true,
        },
        reserved: (0, 0),
        used: (0, 0),
        access: BTreeMap::new(),
        destroyed: false,
        live: HashMap::new(),
        idle: Vec::new(),
    };
    st.memory.pools.all.insert(handle, pool);
    handle
}

/// The device's own pool.
pub fn default_of(d: &Driver, st: &mut State, ordinal: usize) -> Handle {
    if let Some(handle) = st.memory.pools.defaults.get(&ordinal) {
        return *handle;
    }
    let handle = create(d, st, ordinal, 0, true);
    st.memory.pools.defaults.insert(ordinal, handle);
    handle
}

/// The pool that cuMemAllocAsync takes.
pub fn current_of(d: &Driver, st: &mut State, ordinal: usize) -> Handle {
    match st.memory.pools.current.get(&ordinal) {
        Some(handle) => *handle,
        None => default_of(d, st, ordinal),
    }
}

/// Destroys a pool; its memory goes with its last allocation.
pub fn destroy(d: &Driver, st: &mut State, handle: Handle) -> Res {
    let pool = st.memory.pools.get(handle)?;
    if pool.default {
        return Err(INVALID_VALUE);
    }
    pool.destroyed = true;
    st.memory.pools.current.retain(|_, h| *h != handle);
    settle(d, st);
    Ok(())
}

impl Pool {
    /// The idle block that suits best: of the same stream first, then one whose free is over, then any.
    fn reusable(&mut self, size: u64, stream: u64) -> Option<Idle> {
        let rank = |idle: &Idle| {
            let fits = idle.block.size >= size && idle.block.size / 2 <= size;
            let turn = match () {
                () if idle.stream == stream => 0,
                () if idle.done() && self.reuse.opportunistic => 1,
                () if self.reuse.internal => 2,
                () => return None,
            };
            fits.then_some((turn, idle.block.size))
        };
        let ranked = self.idle.iter().enumerate();
        let best = ranked
            .filter_map(|(i, idle)| Some((rank(idle)?, i)))
            .min()?;
        Some(self.idle.swap_remove(best.1))
    }

    fn fill(&mut self, address: u64, block: Block) {
        self.used.0 += block.size;
        self.used.1 = self.used.1.max(self.used.0);
        self.live.insert(address, block);
    }
}

/// cuMemAllocFromPoolAsync.
pub fn allocate(
    d: &'static Driver,
    st: &mut MutexGuard<'_, State>,
    handle: Handle,
    bytes: usize,
    stream: CUstream,
) -> Res<u64> {
    if bytes == 0 {
        return Ok(0);
    }
    let stream = free_stream(d, st, stream)?;
    let uid = st.streams.get(&stream).ok_or(INVALID_HANDLE)?.uid;
    let bytes = bytes as u64;
    let size = bytes.checked_next_multiple_of(ALIGN).ok_or(OUT_OF_MEMORY)?;
    let pool = st.memory.pools.get(handle)?;
    let gpu = pool.gpu;
    let (block, behind) = match pool.reusable(size, uid) {
        Some(idle) => (idle.block, idle.freed),
        None => (fresh(d, st, handle, size)?, None),
    };
    let address = d.vm.base + block.offset;
    st.memory.forget_freed(address, block.size);
    let allocation = Arc::new(Allocation {
        buffer: d.new_buffer(),
        space: block.space,
        kind: Kind::Pool(handle),
        ..Allocation::own(address, bytes, d.vm.shadow(block.offset), gpu, block.offset)
    });
    st.memory.pools.get(handle)?.fill(address, block);
    st.memory.device.insert(address, allocation.clone());
    let mut deps = st.stream_deps(stream);
    deps.extend(behind);
    let claim = Work::Claim {
        place: Place::Device(allocation, 0),
        bytes,
        frees: false,
    };
    enter(d, st, stream, claim, d.topology.calls.async_us, &deps, &[])?;
    Ok(address)
}

/// Allocations and frees in a stream that is not captured are illegal while another one is.
pub fn not_beside_a_capture(st: &mut State, stream: CUstream) -> Res {
    if st.streams.get(&stream).is_some_and(|s| s.capture.is_some()) {
        return Ok(());
    }
    crate::capture::illegal(st)
}

/// The stream meant, which must not be captured: allocations as graph nodes are not simulated.
fn free_stream(d: &Driver, st: &mut State, stream: CUstream) -> Res<CUstream> {
    let stream = st.stream_handle(d, stream)?;
    not_beside_a_capture(st, stream)?;
    if crate::capture::capturing(st, stream)? {
        return Err(NOT_SUPPORTED);
    }
    Ok(stream)
}

/// More memory for a pool.
fn fresh(d: &Driver, st: &mut State, handle: Handle, size: u64) -> Res<Block> {
    let room = |p: &Pool| p.max == 0 || p.reserved.0.saturating_add(size) <= p.max;
    if !room(st.memory.pools.get(handle)?) {
        trim(d, st, handle, 0);
    }
    let pool = st.memory.pools.get(handle)?;
    if !room(pool) {
        return Err(OUT_OF_MEMORY);
    }
    let gpu = pool.gpu;
    let offset = take(d, st, gpu, size, ALIGN)?;
    let pool = st.memory.pools.get(handle)?;
    pool.reserved.0 += size;
    pool.reserved.1 = pool.reserved.1.max(pool.reserved.0);
    Ok(Block {
        offset,
        size,
        space: d.new_buffer(),
    })
}

/// cuMemFreeAsync, or cuMemFree without a stream, which waits for nothing.
pub fn free(
    d: &'static Driver,
    st: &mut MutexGuard<'_, State>,
    address: u64,
    stream: Option<CUstream>,
) -> Res {
    if let Some(stream) = stream {
        let stream = st.stream_handle(d, stream)?;
        not_beside_a_capture(st, stream)?;
    }
    let a = st.memory.device.get(&address).ok_or(INVALID_VALUE)?.clone();
    let Kind::Pool(handle) = a.kind else {
        return Err(INVALID_VALUE);
    };
    let (uid, freed) = match stream {
        Some(stream) => {
            let stream = free_stream(d, st, stream)?;
            let deps = st.stream_deps(stream);
            let claim = Work::Claim {
                place: Place::Device(a.clone(), 0),
                bytes: a.size,
                frees: true,
            };
            let op = enter(d, st, stream, claim, d.topology.calls.async_us, &deps, &[])?;
            (st.streams.get(&stream).map_or(0, |s| s.uid), Some(op))
        }
        None => {
            crate::alloc::check_unused(d, st, &a);
            (0, None)
        }
    };
    st.memory.device.remove(&address);
    a.freed.store(true, Relaxed);
    st.memory.remember_freed(a.address, a.size);
    let pool = st.memory.pools.all.get_mut(&handle);
    if let Some((pool, block)) = pool.and_then(|p| p.live.remove(&address).map(|b| (p, b))) {
        pool.used.0 -= block.size;
        pool.idle.push(Idle {
            block,
            stream: uid,
            freed,
        });
    }
    Ok(())
}

/// Gives idle memory back until no more than `keep` bytes are reserved. True when some went.
pub fn trim(d: &Driver, st: &mut State, handle: Handle, keep: u64) -> bool {
    let Some(pool) = st.memory.pools.all.get_mut(&handle) else {
        return false;
    };
    let (gpu, mut going) = (pool.gpu, Vec::new());
    let mut i = 0;
    while i < pool.idle.len() && pool.reserved.0 > keep {
        if pool.idle[i].done() {
            let block = pool.idle.swap_remove(i).block;
            pool.reserved.0 -= block.size;
            going.push(block);
        } else {
            i += 1;
        }
    }
    for block in &going {
        give_back(d, st, block.offset, block.size, gpu);
    }
    !going.is_empty()
}

/// Gives back all idle memory of the pools on a GPU. True when some went.
pub fn trim_gpu(d: &Driver, st: &mut State, gpu: usize) -> bool {
    let pools = st.memory.pools.all.iter();
    let handles: Vec<Handle> = pools
        .filter(|(_, p)| p.gpu == gpu)
        .map(|(h, _)| *h)
        .collect();
    handles
        .into_iter()
        .fold(false, |any, h| trim(d, st, h, 0) | any)
}

/// A synchronization: pools give back what they hold beyond their thresholds, and destroyed ones go.
pub fn settle(d: &Driver, st: &mut State) {
    let pools = st.memory.pools.all.iter();
    let due: Vec<(Handle, u64)> = pools
        .filter(|(_, p)| p.destroyed || (!p.idle.is_empty() && p.reserved.0 > p.threshold))
        .map(|(h, p)| (*h, if p.destroyed { 0 } else { p.threshold }))
        .collect();
    for (handle, keep) in due {
        trim(d, st, handle, keep);
    }
    st.memory
        .pools
        .all
        .retain(|_, p| !(p.destroyed && p.live.is_empty() && p.idle.is_empty()));
}
