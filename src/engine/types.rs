//! What the engine needs to know of an MPI datatype, asked of the library once and remembered until a type is freed.
//!
//! A datatype handle is recycled by the MPI library as soon as the type is freed (measured: the very next
//! constructor gets it), so every remembered answer is dropped at each `MPI_Type_free`.

use std::ffi::c_int;
use std::sync::atomic::{
    fence, AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};

use crate::mpi::{native, Abi, Handle};

/// Layout of one item of a datatype (MPI 4.1 section 5.1), lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TypeInfo {
    /// Bytes of data in one item.
    pub size: u64,
    /// Distance from one item to the next.
    pub extent: i64,
    /// First byte of data, from the buffer address.
    pub true_lb: i64,
    /// Span from the first to the last byte of data.
    pub true_extent: i64,
    /// The data of one item is a gapless run of bytes in address order.
    pub gapless: bool,
}

impl TypeInfo {
    /// Whether `count` items are one gapless run of bytes from `true_lb`.
    pub fn dense(&self, count: i64) -> bool {
        self.size == 0 || (self.gapless && (count <= 1 || self.extent as i128 == self.size as i128))
    }

    /// Bytes of data in `count` items.
    pub fn bytes(&self, count: i64) -> u64 {
        self.size.saturating_mul(count.max(0) as u64)
    }

    /// Offset from the buffer address to the first byte in memory of `count` items; 0 if there is none.
    #[inline]
    pub fn first(&self, count: i64) -> i64 {
        if count > 0 && self.size > 0 && self.extent >= 0 {
            self.true_lb
        } else {
            self.span(count).0
        }
    }

    /// Span in memory of `count` items, as (offset of its first byte from the buffer address, length).
    pub fn span(&self, count: i64) -> (i64, u64) {
        if count <= 0 || self.size == 0 {
            return (0, 0);
        }
        let last = self.extent.saturating_mul(count - 1);
        let first = self.true_lb + last.min(0);
        let length = self.true_extent + last.abs();
        (first, length.max(0) as u64)
    }
}

const WAYS: usize = 32;

/// Raised whenever a datatype is freed: an older answer may be about another type.
static GENERATION: AtomicU64 = AtomicU64::new(1);

/// A remembered answer. Shared by all threads: an access to thread-local storage costs a shared library more than
/// these few loads.
struct Way {
    /// Odd while a thread is writing.
    version: AtomicU32,
    gapless: AtomicBool,
    handle: AtomicUsize,
    generation: AtomicU64,
    size: AtomicU64,
    extent: AtomicI64,
    true_lb: AtomicI64,
    true_extent: AtomicI64,
}

impl Way {
    const fn new() -> Way {
        Way {
            version: AtomicU32::new(0),
            gapless: AtomicBool::new(false),
            handle: AtomicUsize::new(0),
            generation: AtomicU64::new(0),
            size: AtomicU64::new(0),
            extent: AtomicI64::new(0),
            true_lb: AtomicI64::new(0),
            true_extent: AtomicI64::new(0),
        }
    }

    #[inline(always)]
    fn load(&self, datatype: Handle, generation: u64) -> Option<TypeInfo> {
        let version = self.version.load(Ordering::Acquire);
        if self.handle.load(Ordering::Relaxed) != datatype
            || self.generation.load(Ordering::Relaxed) != generation
        {
            return None;
        }
        let info = TypeInfo {
            size: self.size.load(Ordering::Relaxed),
            extent: self.extent.load(Ordering::Relaxed),
            true_lb: self.true_lb.load(Ordering::Relaxed),
            true_extent: self.true_extent.load(Ordering::Relaxed),
            gapless: self.gapless.load(Ordering::Relaxed),
        };
        fence(Ordering::Acquire);
        (version % 2 == 0 && self.version.load(Ordering::Relaxed) == version).then_some(info)
    }

    fn store(&self, datatype: Handle, generation: u64, info: &TypeInfo) {
        let version = self.version.load(Ordering::Relaxed);
        let writing = version.wrapping_add(1);
        let free = version % 2 == 0
            && self
                .version
                .compare_exchange(version, writing, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        if !free {
            // Another thread is writing; this answer is asked for again.
            return;
        }
        fence(Ordering::Release);
        self.handle.store(datatype, Ordering::Relaxed);
        self.generation.store(generation, Ordering::Relaxed);
        self.size.store(info.size, Ordering::Relaxed);
        self.extent.store(info.extent, Ordering::Relaxed);
        self.true_lb.store(info.true_lb, Ordering::Relaxed);
        self.true_extent.store(info.true_extent, Ordering::Relaxed);
        self.gapless.store(info.gapless, Ordering::Relaxed);
        self.version
            .store(version.wrapping_add(2), Ordering::Release);
    }
}

static CACHE: [Way; WAYS] = [const { Way::new() }; WAYS];

/// Forgets every remembered layout; called around each `MPI_Type_free`.
pub fn forget_all() {
    GENERATION.fetch_add(1, Ordering::Release);
}

/// Layout of `datatype`, or `None` if the library refuses the handle.
///
/// # Safety
/// `datatype` is a handle that the program passed to MPI.
#[inline]
pub unsafe fn info(abi: &Abi, datatype: Handle) -> Option<TypeInfo> {
    let datatype = abi.normalize(datatype);
    let generation = GENERATION.load(Ordering::Acquire);
    let way = &CACHE[(datatype ^ (datatype >> 5) ^ (datatype >> 9)) % WAYS];
    // SAFETY: passed on.
    way.load(datatype, generation)
        .or_else(|| unsafe { ask(abi, datatype, generation, way) })
}

#[cold]
#[inline(never)]
unsafe fn ask(abi: &Abi, datatype: Handle, generation: u64, way: &Way) -> Option<TypeInfo> {
    // SAFETY: the caller vouches for the handle.
    let info = unsafe { query(abi, datatype) }?;
    way.store(datatype, generation, &info);
    Some(info)
}

unsafe fn query(abi: &Abi, datatype: Handle) -> Option<TypeInfo> {
    if datatype == abi.normalize(abi.datatype_null) {
        return None;
    }
    let (mut size, mut lb, mut extent, mut true_lb, mut true_extent) =
        (0i64, 0isize, 0isize, 0isize, 0isize);
    // SAFETY: out-pointers are live locals of the types that the functions write (MPI_Count, MPI_Aint).
    let ok = unsafe {
        native::type_size_x(datatype, &raw mut size) == abi.success
            && native::type_get_extent(datatype, &raw mut lb, &raw mut extent) == abi.success
            && native::type_get_true_extent(datatype, &raw mut true_lb, &raw mut true_extent)
                == abi.success
    };
    if !ok || size < 0 {
        return None;
    }
    let mut info = TypeInfo {
        size: size as u64,
        extent: extent as i64,
        true_lb: true_lb as i64,
        true_extent: true_extent as i64,
        gapless: false,
    };
    // A span as long as the data has no holes, but its bytes may still come in another order.
    // SAFETY: as above.
    info.gapless = size > 0 && size == true_extent as i64 && unsafe { in_order(abi, datatype, 0) };
    Some(info)
}

/// How deep a nest of derived types is looked into; deeper ones take the packing path, which is right for any type.
const DEPTH_MAX: u32 = 8;

/// Whether the typemap of `datatype` visits memory in address order (it is known to have no holes).
unsafe fn in_order(abi: &Abi, datatype: Handle, depth: u32) -> bool {
    // SAFETY: passed on.
    let Some(contents) = (unsafe { Contents::of(abi, datatype) }) else {
        return false;
    };
    if contents.combiner == Combiner::Named {
        return true;
    }
    // SAFETY: passed on.
    if depth > DEPTH_MAX || !unsafe { contents.is_rising(abi) } {
        return false;
    }
    // SAFETY: handles owned by `contents`.
    contents
        .types
        .iter()
        .all(|inner| unsafe { in_order(abi, *inner, depth + 1) })
}

/// How a datatype was made (MPI 4.1 section 5.1.13). Owns the handles of its inner types.
#[derive(Debug)]
pub struct Contents {
    /// The constructor.
    pub combiner: Combiner,
    integers: Vec<c_int>,
    addresses: Vec<isize>,
    /// The inner types; none for a predefined type.
    pub types: Vec<Handle>,
    derived: Vec<Handle>,
}

/// Where a block of inner items starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Displacement {
    /// Bytes from the item.
    Bytes(i64),
    /// Extents of the inner type from the item.
    Items(i64),
}

/// `count` inner items one extent apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Where the first lies.
    pub displacement: Displacement,
    /// How many.
    pub count: i64,
    /// Index of their type in [`Contents::types`].
    pub datatype: usize,
}

impl Contents {
    /// Asks the library how `datatype` was made.
    ///
    /// # Safety
    /// `datatype` is a valid handle.
    pub unsafe fn of(abi: &Abi, datatype: Handle) -> Option<Contents> {
        // SAFETY: passed on.
        let (combiner, [ints, addresses, types]) = unsafe { envelope(abi, datatype) }?;
        let mut contents = Contents {
            combiner,
            integers: vec![0; ints],
            addresses: vec![0; addresses],
            types: Vec::with_capacity(types),
            derived: Vec::new(),
        };
        if combiner == Combiner::Named {
            return Some(contents);
        }
        let mut inner = vec![0usize; types.max(1)];
        // SAFETY: the arrays have the lengths that the envelope asked for.
        let code = unsafe {
            native::type_get_contents(
                datatype,
                ints as c_int,
                addresses as c_int,
                types as c_int,
                contents.integers.as_mut_ptr(),
                contents.addresses.as_mut_ptr(),
                inner.as_mut_ptr().cast(),
            )
        };
        if code != abi.success {
            return None;
        }
        for i in 0..types {
            // SAFETY: `inner` holds `types` handles as the library wrote them.
            let handle = unsafe { abi.load(inner.as_ptr().cast(), i) };
            contents.types.push(handle);
            // SAFETY: a handle that the library just returned.
            if unsafe { envelope(abi, handle) }
                .is_some_and(|(combiner, _)| combiner != Combiner::Named)
            {
                contents.derived.push(handle);
            }
        }
        Some(contents)
    }

    /// Whether the blocks follow one another in address order, each beyond the one before: a send type may overlap.
    unsafe fn is_rising(&self, abi: &Abi) -> bool {
        let Some(blocks) = self.blocks() else {
            return false;
        };
        let mut end = i64::MIN;
        for block in blocks.iter().filter(|block| block.count > 0) {
            // SAFETY: a handle owned by these contents.
            let Some(inner) = (unsafe { info(abi, self.types[block.datatype]) }) else {
                return false;
            };
            let at = match block.displacement {
                Displacement::Bytes(bytes) => bytes,
                Displacement::Items(items) => items * inner.extent,
            };
            let (first, length) = inner.span(block.count);
            if inner.extent < 0 || at + first < end {
                return false;
            }
            end = at + first + length as i64;
        }
        true
    }

    /// The blocks of inner items in typemap order; `None` for constructors that are not understood.
    pub fn blocks(&self) -> Option<Vec<Block>> {
        let int = |i: usize| self.integers.get(i).map(|n| i64::from(*n));
        let address = |i: usize| self.addresses.get(i).map(|n| *n as i64);
        let one = |displacement, count| Block {
            displacement,
            count,
            datatype: 0,
        };
        let count = int(0).unwrap_or(0);
        let each = 0..usize::try_from(count).ok()?;
        use Displacement::{Bytes, Items};
        match self.combiner {
            Combiner::Named | Combiner::Other => None,
            Combiner::Dup | Combiner::Resized => Some(vec![one(Bytes(0), 1)]),
            Combiner::Contiguous => Some(vec![one(Bytes(0), count)]),
            Combiner::Vector => {
                let (length, stride) = (int(1)?, int(2)?);
                Some((0..count).map(|i| one(Items(i * stride), length)).collect())
            }
            Combiner::Hvector => {
                let (length, stride) = (int(1)?, address(0)?);
                Some((0..count).map(|i| one(Bytes(i * stride), length)).collect())
            }
            Combiner::Indexed => {
                let n = each.end;
                each.map(|i| Some(one(Items(int(1 + n + i)?), int(1 + i)?)))
                    .collect()
            }
            Combiner::Hindexed => each
                .map(|i| Some(one(Bytes(address(i)?), int(1 + i)?)))
                .collect(),
            Combiner::IndexedBlock => {
                let length = int(1)?;
                each.map(|i| Some(one(Items(int(2 + i)?), length)))
                    .collect()
            }
            Combiner::HindexedBlock => {
                let length = int(1)?;
                each.map(|i| Some(one(Bytes(address(i)?), length)))
                    .collect()
            }
            Combiner::Struct => each
                .map(|i| {
                    Some(Block {
                        displacement: Bytes(address(i)?),
                        count: int(1 + i)?,
                        datatype: i,
                    })
                })
                .collect(),
            Combiner::Subarray => self.subarray(),
        }
    }

    /// Rows of a subarray: ndims, sizes, subsizes, starts, order (MPI 4.1 section 5.1.3).
    fn subarray(&self) -> Option<Vec<Block>> {
        let dims = usize::try_from(*self.integers.first()?).ok()?;
        let part = |k: usize| self.integers.get(1 + k * dims..1 + (k + 1) * dims);
        let (mut sizes, mut lengths, mut starts) =
            (part(0)?.to_vec(), part(1)?.to_vec(), part(2)?.to_vec());
        let fortran = types_fortran_order(*self.integers.get(1 + 3 * dims)?)?;
        if fortran {
            // The first dimension varies fastest; from here on the last one does.
            sizes.reverse();
            lengths.reverse();
            starts.reverse();
        }
        let row = i64::from(*lengths.last()?);
        let rows: i64 = lengths[..dims - 1].iter().map(|n| i64::from(*n)).product();
        let mut blocks = Vec::with_capacity(usize::try_from(rows).ok()?);
        for index in 0..rows {
            let (mut rest, mut at, mut scale) = (
                index,
                i64::from(starts[dims - 1]),
                i64::from(sizes[dims - 1]),
            );
            for d in (0..dims - 1).rev() {
                let length = i64::from(lengths[d]);
                at += (rest % length + i64::from(starts[d])) * scale;
                rest /= length;
                scale *= i64::from(sizes[d]);
            }
            blocks.push(Block {
                displacement: Displacement::Items(at),
                count: row,
                datatype: 0,
            });
        }
        Some(blocks)
    }
}

/// Whether a subarray's order is Fortran's.
fn types_fortran_order(order: c_int) -> Option<bool> {
    let abi = crate::mpi::abi()?;
    let (c, fortran) = (abi.order_c, abi.order_fortran);
    (order == c || order == fortran).then_some(order == fortran)
}

impl Drop for Contents {
    fn drop(&mut self) {
        for handle in &mut self.derived {
            // SAFETY: contents returns new references to derived types, which the caller has to free.
            unsafe { native::type_free(handle) };
        }
    }
}

/// Lengths of the arrays of `MPI_Type_get_contents`: integers, addresses, types.
unsafe fn envelope(abi: &Abi, datatype: Handle) -> Option<(Combiner, [usize; 3])> {
    let (mut ints, mut addresses, mut types, mut combiner) =
        (0 as c_int, 0 as c_int, 0 as c_int, 0 as c_int);
    // SAFETY: four live integers and a valid handle.
    let code = unsafe {
        native::type_get_envelope(
            datatype,
            &raw mut ints,
            &raw mut addresses,
            &raw mut types,
            &raw mut combiner,
        )
    };
    let length = |n: c_int| usize::try_from(n).ok();
    (code == abi.success)
        .then(|| {
            Some((
                combiner_of(abi, combiner),
                [length(ints)?, length(addresses)?, length(types)?],
            ))
        })
        .flatten()
}

fn combiner_of(abi: &Abi, value: c_int) -> Combiner {
    let known = [
        (abi.combiner_named, Combiner::Named),
        (abi.combiner_dup, Combiner::Dup),
        (abi.combiner_contiguous, Combiner::Contiguous),
        (abi.combiner_vector, Combiner::Vector),
        (abi.combiner_hvector, Combiner::Hvector),
        (abi.combiner_indexed, Combiner::Indexed),
        (abi.combiner_hindexed, Combiner::Hindexed),
        (abi.combiner_indexed_block, Combiner::IndexedBlock),
        (abi.combiner_hindexed_block, Combiner::HindexedBlock),
        (abi.combiner_struct, Combiner::Struct),
        (abi.combiner_subarray, Combiner::Subarray),
        (abi.combiner_resized, Combiner::Resized),
    ];
    known
        .iter()
        .find(|(known, _)| *known == value)
        .map_or(Combiner::Other, |(_, combiner)| *combiner)
}

/// The constructors whose layout the engine can judge (MPI 4.1 section 5.1.13).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Combiner {
    Named,
    Dup,
    Contiguous,
    Vector,
    Hvector,
    Indexed,
    Hindexed,
    IndexedBlock,
    HindexedBlock,
    Struct,
    Subarray,
    Resized,
    Other,
}

/// A committed type of bytes, and how many of it make up `bytes`: for lengths that do not fit a C `int`. The caller
/// frees the type.
///
/// # Safety
/// MPI may be called.
pub unsafe fn blocks(abi: &Abi, bytes: u64) -> Option<(Handle, i64)> {
    let fits = |n: u64| c_int::try_from(n).ok();
    // The largest block that divides the length: 2^20 for the usual lengths, 1 for short ones.
    let block = (0..=20)
        .rev()
        .map(|k| 1u64 << k)
        .find(|block| bytes % block == 0 && fits(bytes / block).is_some());
    let block = block
        .or_else(|| (2..65536).find(|block| bytes % block == 0 && fits(bytes / block).is_some()))?;
    // SAFETY: passed on.
    let datatype = unsafe { bytes_type(abi, block) }?;
    Some((datatype, (bytes / block) as i64))
}

/// A committed type of `size` contiguous bytes. The caller frees it.
///
/// # Safety
/// MPI may be called.
pub unsafe fn bytes_type(abi: &Abi, size: u64) -> Option<Handle> {
    let (mut datatype, size) = (abi.datatype_null, c_int::try_from(size).ok()?);
    // SAFETY: the handle is a live local.
    unsafe {
        (native::type_contiguous(size, abi.byte, &raw mut datatype) == abi.success
            && native::type_commit(&raw mut datatype) == abi.success)
            .then_some(datatype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(size: u64, extent: i64, true_lb: i64, true_extent: i64) -> TypeInfo {
        TypeInfo {
            size,
            extent,
            true_lb,
            true_extent,
            gapless: size as i64 == true_extent,
        }
    }

    #[test]
    fn dense_needs_items_that_touch() {
        assert!(info(8, 8, 0, 8).dense(5));
        assert!(info(8, 16, 0, 8).dense(1));
        assert!(!info(8, 16, 0, 8).dense(2));
        assert!(!info(8, 24, 0, 24).dense(1));
    }

    #[test]
    fn span_covers_negative_extents() {
        assert_eq!(info(4, 16, 2, 6).span(3), (2, 38));
        assert_eq!(info(4, -16, 2, 6).span(3), (-30, 38));
        assert_eq!(info(4, 16, 2, 6).span(0), (0, 0));
    }
}
