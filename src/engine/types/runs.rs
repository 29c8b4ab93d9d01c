//! What follows from how a datatype was made: the runs of bytes of an item, and which of its bytes to ask about to know in
//! what memory it lies.

use std::ffi::c_int;

use super::contents::{Combiner, Contents, Displacement};
use super::TypeInfo;
use crate::mpi::{native, Abi, Datatype, Out};

/// A gapless run of data bytes of one item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// From the buffer address, bytes.
    pub offset: i64,
    /// Bytes.
    pub length: u64,
}

/// Runs that an item may have: 1 GiB of them.
pub const RUNS_MAX: usize = 1 << 26;

/// How deep a nest of derived types is followed.
const DEPTH_MAX: u32 = 64;

/// Asks the library about a type.
pub fn query(abi: &Abi, datatype: Datatype) -> Option<TypeInfo> {
    let (mut size, mut lb, mut extent, mut true_lb, mut true_extent) =
        (0i64, 0isize, 0isize, 0isize, 0isize);
    let ok = native::type_size_x(datatype, Out::of(&mut size)) == abi.success
        && native::type_get_extent(datatype, Out::of(&mut lb), Out::of(&mut extent)) == abi.success
        && native::type_get_true_extent(datatype, Out::of(&mut true_lb), Out::of(&mut true_extent))
            == abi.success;
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
    // A span as long as the data has no holes, but its bytes may still come in another order, or some of them twice.
    if size > 0 && size == info.true_extent {
        let runs = runs_of(abi, datatype, 1);
        let whole = Run {
            offset: info.true_lb,
            length: info.size,
        };
        info.gapless = runs.is_some_and(|runs| runs == [whole]);
    }
    Some(info)
}

/// The runs of one item in typemap order, which is that of the bytes on the wire. `None` if there are more than `most`, or
/// where a constructor is not understood.
pub fn runs_of(abi: &Abi, datatype: Datatype, most: usize) -> Option<Vec<Run>> {
    let mut runs = Runs {
        list: Vec::new(),
        most,
    };
    walk(abi, datatype, 0, &mut runs)?;
    Some(runs.list)
}

/// Memory of other kinds is at least so far away, unless a program has put it there: bytes.
const NEIGHBOURHOOD: i64 = 64 << 10;

/// Offsets of bytes of an item: whatever of the item is not in the memory that these bytes are in, its neighbours are.
///
/// Of blocks at equal distances the first and the last are asked about, of others each that is far from the one before it
/// or one of a few. That a pattern of equal distances leads from host memory to a device and back is not considered.
pub fn probes_of(abi: &Abi, datatype: Datatype) -> Option<Vec<i64>> {
    let mut probes = probes_within(abi, datatype, 0)?;
    probes.sort_unstable();
    probes.dedup();
    Some(probes)
}

fn probes_within(abi: &Abi, datatype: Datatype, depth: u32) -> Option<Vec<i64>> {
    /// So few blocks are all asked about.
    const FEW: usize = 16;
    if depth > DEPTH_MAX {
        return None;
    }
    let contents = Contents::of(abi, datatype)?;
    if contents.combiner == Combiner::Named {
        return Some(vec![0]);
    }
    let blocks = contents.blocks(abi)?;
    let blocks: Vec<_> = blocks.iter().filter(|block| block.count > 0).collect();
    let is_regular = !matches!(
        contents.combiner,
        Combiner::Indexed
            | Combiner::Hindexed
            | Combiner::IndexedBlock
            | Combiner::HindexedBlock
            | Combiner::Struct
    );
    let mut inner: Vec<Option<(Vec<i64>, i64)>> = contents.types.iter().map(|_| None).collect();
    let mut probes = Vec::new();
    let mut latest = None;
    for (number, block) in blocks.iter().enumerate() {
        let is_end = number == 0 || number + 1 == blocks.len();
        if is_regular && !is_end {
            continue;
        }
        if inner[block.datatype].is_none() {
            let datatype = contents.types[block.datatype];
            let (mut lb, mut extent) = (0isize, 0isize);
            let (code, of_item) = (
                native::type_get_extent(datatype, Out::of(&mut lb), Out::of(&mut extent)),
                probes_within(abi, datatype, depth + 1)?,
            );
            inner[block.datatype] = (code == abi.success).then_some((of_item, extent as i64));
        }
        let (of_item, extent) = inner[block.datatype].as_ref()?;
        let start = match block.displacement {
            Displacement::Bytes(bytes) => bytes,
            Displacement::Items(items) => items.checked_mul(*extent)?,
        };
        let end = start.checked_add(extent.checked_mul(block.count - 1)?)?;
        let is_near =
            latest.is_some_and(|before: i64| start.abs_diff(before) < NEIGHBOURHOOD as u64);
        latest = Some(end);
        if is_near && !is_end && of_item.len() == 1 && blocks.len() > FEW {
            continue;
        }
        for probe in of_item {
            probes.push(start.checked_add(*probe)?);
            probes.push(end.checked_add(*probe)?);
        }
    }
    Some(probes)
}

/// Runs while they are put together.
struct Runs {
    list: Vec<Run>,
    most: usize,
}

impl Runs {
    /// Adds a run; `None` if there is no room for it.
    fn push(&mut self, offset: i64, length: u64) -> Option<()> {
        if length == 0 {
            return Some(());
        }
        let has_room = self.list.len() < self.most;
        match self.list.last_mut() {
            Some(last) if last.offset.checked_add_unsigned(last.length) == Some(offset) => {
                last.length += length;
            }
            _ if has_room => self.list.push(Run { offset, length }),
            _ => return None,
        }
        Some(())
    }
}

/// Adds the runs of one item that begins at offset 0.
fn walk(abi: &Abi, datatype: Datatype, depth: u32, runs: &mut Runs) -> Option<()> {
    if depth > DEPTH_MAX {
        return None;
    }
    let contents = Contents::of(abi, datatype)?;
    if contents.combiner == Combiner::Named {
        return put_named(abi, datatype, runs);
    }
    let blocks = contents.blocks(abi)?;
    let mut items: Vec<Option<Item>> = contents.types.iter().map(|_| None).collect();
    for block in blocks.iter().filter(|block| block.count > 0) {
        if items[block.datatype].is_none() {
            let item = Item::of(abi, contents.types[block.datatype], depth, runs.most);
            items[block.datatype] = Some(item?);
        }
        let item = items[block.datatype].as_ref()?;
        let start = match block.displacement {
            Displacement::Bytes(bytes) => bytes,
            Displacement::Items(items) => items.checked_mul(item.extent)?,
        };
        item.put_repeated(start, block.count, runs)?;
    }
    Some(())
}

/// The runs of a predefined type.
fn put_named(abi: &Abi, datatype: Datatype, runs: &mut Runs) -> Option<()> {
    let (mut size, mut true_lb, mut true_extent) = (0i64, 0isize, 0isize);
    let ok = native::type_size_x(datatype, Out::of(&mut size)) == abi.success
        && native::type_get_true_extent(datatype, Out::of(&mut true_lb), Out::of(&mut true_extent))
            == abi.success;
    let (size, start, span) = (
        u64::try_from(size).ok().filter(|_| ok)?,
        true_lb as i64,
        u64::try_from(true_extent).ok()?,
    );
    if size == span {
        return runs.push(start, size);
    }
    // The pair types of MPI_MINLOC are the only predefined ones with a gap: a value, then an aligned int.
    let int = size_of::<c_int>() as u64;
    let value = size.checked_sub(int)?;
    runs.push(start, value)?;
    runs.push(start + (span - int) as i64, int)
}

/// One item of an inner type.
struct Item {
    runs: Vec<Run>,
    extent: i64,
}

impl Item {
    fn of(abi: &Abi, datatype: Datatype, depth: u32, most: usize) -> Option<Item> {
        let (mut lb, mut extent) = (0isize, 0isize);
        let code = native::type_get_extent(datatype, Out::of(&mut lb), Out::of(&mut extent));
        let mut runs = Runs {
            list: Vec::new(),
            most,
        };
        walk(abi, datatype, depth + 1, &mut runs)?;
        (code == abi.success).then_some(Item {
            runs: runs.list,
            extent: extent as i64,
        })
    }

    /// Adds `count` of these items, the first of which begins at `start`.
    fn put_repeated(&self, start: i64, count: i64, runs: &mut Runs) -> Option<()> {
        match self.runs.as_slice() {
            [] => Some(()),
            [run] if run.length as i128 == self.extent as i128 => runs.push(
                start.checked_add(run.offset)?,
                run.length.checked_mul(count as u64)?,
            ),
            all => {
                for item in 0..count {
                    let base = start.checked_add(item.checked_mul(self.extent)?)?;
                    for run in all {
                        runs.push(base.checked_add(run.offset)?, run.length)?;
                    }
                }
                Some(())
            }
        }
    }
}
