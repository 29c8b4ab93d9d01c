//! How a datatype was made (MPI 4.1 section 5.1.13): its constructor's arguments as blocks of inner items.
//!
//! Nothing of this is remembered by handle: the inner types that the library names are its own, or end with [`Contents`].

use std::ffi::c_int;

use super::runs::RUNS_MAX;
use crate::mpi::owned::OwnType;
use crate::mpi::{native, Abi, Datatype, Function, Out, Slots};

/// The constructors whose layout the engine can tell. Those that are missing, MPI_COMBINER_VALUE_INDEX and the Fortran ones
/// of MPI-1, are left to [`Layout::of`](crate::engine::layout::Layout::of).
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
    Darray,
    Resized,
    Other,
}

/// A constructor's arguments. Owns the handles of the inner types.
pub struct Contents {
    /// The constructor.
    pub combiner: Combiner,
    /// As MPI 4.1 lists `array_of_integers`, also for a constructor with large counts.
    integers: Vec<i64>,
    /// As `array_of_addresses`, likewise.
    addresses: Vec<i64>,
    /// The inner types; none for a predefined type.
    pub types: Vec<Datatype>,
    _derived: Vec<OwnType>,
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

/// Lengths of the arrays that describe a type.
#[derive(Clone, Copy, Debug, Default)]
struct Envelope {
    integers: usize,
    addresses: usize,
    large_counts: usize,
    types: usize,
}

impl Contents {
    /// Asks the library how `datatype` was made.
    pub fn of(abi: &Abi, datatype: Datatype) -> Option<Contents> {
        let (combiner, envelope) = envelope(abi, datatype)?;
        if combiner == Combiner::Named {
            return Some(Contents {
                combiner,
                integers: Vec::new(),
                addresses: Vec::new(),
                types: Vec::new(),
                _derived: Vec::new(),
            });
        }
        let (integers, addresses, large, inner) = arguments(abi, datatype, &envelope)?;
        let mut contents = Contents {
            combiner,
            integers: integers.into_iter().map(i64::from).collect(),
            addresses: addresses.into_iter().map(|a| a as i64).collect(),
            types: inner,
            _derived: Vec::new(),
        };
        // References to derived types are ours to free.
        let derived = contents.types.iter().filter(|inner| {
            let envelope = self::envelope(abi, **inner);
            envelope.is_some_and(|(combiner, _)| combiner != Combiner::Named)
        });
        // SAFETY: by MPI_Type_get_contents.
        let own = derived.map(|inner| unsafe { OwnType::given(*inner) });
        contents._derived = own.collect();
        if envelope.large_counts > 0 {
            contents.spread(&large)?;
        }
        Some(contents)
    }

    /// Brings the arguments of a constructor with large counts into the form of the one without (MPI 4.1 section 5.1.13).
    fn spread(&mut self, large: &[i64]) -> Option<()> {
        use Combiner as C;
        let count = usize::try_from(*large.first()?).unwrap_or(usize::MAX);
        let (integers, addresses) = match self.combiner {
            C::Contiguous | C::Vector | C::Indexed | C::IndexedBlock => (large.to_vec(), vec![]),
            C::Hvector | C::HindexedBlock => (large.get(..2)?.to_vec(), large[2..].to_vec()),
            C::Hindexed | C::Struct => {
                let split = count.checked_add(1)?;
                (large.get(..split)?.to_vec(), large.get(split..)?.to_vec())
            }
            C::Resized => (vec![], large.to_vec()),
            // Integers: ndims, order. Large: sizes, subsizes, starts.
            C::Subarray => match *self.integers.as_slice() {
                [dims, order] => ([&[dims], large, &[order]].concat(), vec![]),
                _ => return None,
            },
            // Integers: size, rank, ndims, distribs, dargs, psizes, order. Large: gsizes.
            C::Darray => {
                let head = self.integers.get(..3)?;
                ([head, large, &self.integers[3..]].concat(), vec![])
            }
            C::Named | C::Dup | C::Other => return None,
        };
        (self.integers, self.addresses) = (integers, addresses);
        Some(())
    }

    /// The blocks of inner items in typemap order; `None` for constructors that are not understood.
    pub fn blocks(&self, abi: &Abi) -> Option<Vec<Block>> {
        use Displacement::{Bytes, Items};
        let int = |i: usize| self.integers.get(i).copied();
        let address = |i: usize| self.addresses.get(i).copied();
        let one = |displacement, count| Block {
            displacement,
            count,
            datatype: 0,
        };
        let count = int(0).unwrap_or(0);
        let each = 0..usize::try_from(count).ok()?;
        match self.combiner {
            Combiner::Named | Combiner::Other => None,
            Combiner::Dup | Combiner::Resized => Some(vec![one(Bytes(0), 1)]),
            Combiner::Contiguous => Some(vec![one(Bytes(0), count)]),
            Combiner::Vector => {
                let (length, stride) = (int(1)?, int(2)?);
                (0..count)
                    .map(|i| Some(one(Items(i.checked_mul(stride)?), length)))
                    .collect()
            }
            Combiner::Hvector => {
                let (length, stride) = (int(1)?, address(0)?);
                (0..count)
                    .map(|i| Some(one(Bytes(i.checked_mul(stride)?), length)))
                    .collect()
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
            Combiner::Subarray => {
                let dims = usize::try_from(int(0)?).ok()?;
                let part = |k: usize| self.integers.get(1 + k * dims..1 + (k + 1) * dims);
                let (sizes, lengths, starts) = (part(0)?, part(1)?, part(2)?);
                let owned = starts.iter().zip(lengths);
                let owned = owned.map(|(start, length)| vec![(*start, *length)]);
                grid(abi, sizes, owned.collect(), int(1 + 3 * dims)?)
            }
            Combiner::Darray => self.darray(abi),
        }
    }

    /// A process's part of a distributed array (MPI 4.1 section 5.1.4).
    fn darray(&self, abi: &Abi) -> Option<Vec<Block>> {
        let [mut processes, rank, dims] = *self.integers.first_chunk::<3>()?;
        let dims = usize::try_from(dims).ok()?;
        let part = |k: usize| self.integers.get(3 + k * dims..3 + (k + 1) * dims);
        let (sizes, kinds, arguments, grid_sizes) = (part(0)?, part(1)?, part(2)?, part(3)?);
        let order = *self.integers.get(3 + 4 * dims)?;
        // Processes are numbered with the last dimension of their grid fastest, whatever the order of the array.
        let mut rest = rank;
        let mut owned = Vec::with_capacity(dims);
        for d in 0..dims {
            processes /= grid_sizes[d].max(1);
            let place = rest / processes.max(1);
            rest %= processes.max(1);
            let default = arguments[d] == i64::from(abi.distribute_dflt_darg);
            owned.push(match kinds[d] {
                kind if kind == i64::from(abi.distribute_none) => vec![(0, sizes[d])],
                kind if kind == i64::from(abi.distribute_block) => {
                    let each = match default {
                        true => (sizes[d] + grid_sizes[d] - 1).checked_div(grid_sizes[d])?,
                        false => arguments[d],
                    };
                    dealt(sizes[d], each, place, i64::MAX)
                }
                kind if kind == i64::from(abi.distribute_cyclic) => {
                    let each = if default { 1 } else { arguments[d] };
                    dealt(sizes[d], each, place, each.checked_mul(grid_sizes[d])?)
                }
                _ => return None,
            });
        }
        grid(abi, sizes, owned, order)
    }
}

/// The ranges of `0..size` that are dealt to the process at `place`: `each` at a time, every `step`.
fn dealt(size: i64, each: i64, place: i64, step: i64) -> Vec<(i64, i64)> {
    let mut ranges = Vec::new();
    let mut start = each.max(1).saturating_mul(place);
    while start < size {
        ranges.push((start, each.max(1).min(size - start)));
        start = start.saturating_add(step.max(1));
    }
    ranges
}

/// Rows of a part of an array of these sizes: in each dimension the ranges `(start, length)` that belong to it.
fn grid(
    abi: &Abi,
    sizes: &[i64],
    mut owned: Vec<Vec<(i64, i64)>>,
    order: i64,
) -> Option<Vec<Block>> {
    let mut sizes = sizes.to_vec();
    if order == i64::from(abi.order_fortran) {
        // The first dimension varies fastest; from here on the last one does.
        sizes.reverse();
        owned.reverse();
    } else if order != i64::from(abi.order_c) {
        return None;
    }
    let (last, outer) = owned.split_last()?;
    // Where the rows of the outer dimensions start, in items.
    let mut starts = vec![0i64];
    for (ranges, size) in outer.iter().zip(&sizes) {
        let indices: Vec<i64> = ranges
            .iter()
            .flat_map(|(start, length)| *start..start.saturating_add(*length))
            .collect();
        if starts.len().checked_mul(indices.len())? > RUNS_MAX {
            return None;
        }
        starts = starts
            .iter()
            .flat_map(|base| {
                indices
                    .iter()
                    .map(move |index| base.checked_mul(*size)?.checked_add(*index))
            })
            .collect::<Option<_>>()?;
    }
    let row = *sizes.last()?;
    starts
        .iter()
        .flat_map(|base| {
            last.iter().map(move |(start, length)| {
                Some(Block {
                    displacement: Displacement::Items(base.checked_mul(row)?.checked_add(*start)?),
                    count: *length,
                    datatype: 0,
                })
            })
        })
        .collect()
}

/// Whether a type is one of MPI's own.
pub fn is_predefined(abi: &Abi, datatype: Datatype) -> bool {
    let found = envelope(abi, datatype);
    found.is_some_and(|(combiner, _)| combiner == Combiner::Named)
}

/// The constructor of a type, and how long its arguments are.
fn envelope(abi: &Abi, datatype: Datatype) -> Option<(Combiner, Envelope)> {
    let mut combiner: c_int = 0;
    // The plain form is an error for a type that was made with large counts (MPI 4.1 section 5.1.13).
    if Function::TypeGetEnvelopeC.available() {
        let [mut integers, mut addresses, mut large_counts, mut types] = [0i64; 4];
        let code = native::type_get_envelope_c(
            datatype,
            Out::of(&mut integers),
            Out::of(&mut addresses),
            Out::of(&mut large_counts),
            Out::of(&mut types),
            Out::of(&mut combiner),
        );
        let length = |n: i64| usize::try_from(n).ok().filter(|_| code == abi.success);
        let envelope = Envelope {
            integers: length(integers)?,
            addresses: length(addresses)?,
            large_counts: length(large_counts)?,
            types: length(types)?,
        };
        return Some((combiner_of(abi, combiner), envelope));
    }
    let [mut integers, mut addresses, mut types] = [0 as c_int; 3];
    let code = native::type_get_envelope(
        datatype,
        Out::of(&mut integers),
        Out::of(&mut addresses),
        Out::of(&mut types),
        Out::of(&mut combiner),
    );
    let length = |n: c_int| usize::try_from(n).ok().filter(|_| code == abi.success);
    let envelope = Envelope {
        integers: length(integers)?,
        addresses: length(addresses)?,
        large_counts: 0,
        types: length(types)?,
    };
    Some((combiner_of(abi, combiner), envelope))
}

/// Integers, addresses, large counts and types of a constructor.
type Arguments = (Vec<c_int>, Vec<isize>, Vec<i64>, Vec<Datatype>);

/// What a derived type was made of.
fn arguments(abi: &Abi, datatype: Datatype, envelope: &Envelope) -> Option<Arguments> {
    let mut integers = vec![0 as c_int; envelope.integers];
    let mut addresses = vec![0isize; envelope.addresses];
    let mut large = vec![0i64; envelope.large_counts];
    let mut inner = vec![abi.datatype_null; envelope.types];
    let inner = Slots::of_types(&mut inner);
    let lengths = [integers.len(), addresses.len(), envelope.types];
    let code = if envelope.large_counts > 0 {
        let [i, a, t] = lengths.map(|length| length as i64);
        let l = large.len() as i64;
        let (integers, addresses) = (integers.as_mut_ptr(), addresses.as_mut_ptr());
        let (large, inner) = (large.as_mut_ptr(), inner.as_ptr());
        // SAFETY: the arrays are as long as said.
        unsafe {
            native::type_get_contents_c(datatype, i, a, l, t, integers, addresses, large, inner)
        }
    } else {
        let [i, a, t] = lengths.map(|length| c_int::try_from(length).ok());
        let (i, a, t) = (i?, a?, t?);
        let (integers, addresses) = (integers.as_mut_ptr(), addresses.as_mut_ptr());
        let inner = inner.as_ptr();
        // SAFETY: the arrays are as long as said.
        unsafe { native::type_get_contents(datatype, i, a, t, integers, addresses, inner) }
    };
    if code != abi.success {
        return None;
    }
    let types = (0..envelope.types).map(|i| inner.get(abi, i)).collect();
    Some((integers, addresses, large, types))
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
        (abi.combiner_darray, Combiner::Darray),
        (abi.combiner_resized, Combiner::Resized),
        // No program can take these apart, and they are never freed.
        (abi.combiner_f90_real, Combiner::Named),
        (abi.combiner_f90_complex, Combiner::Named),
        (abi.combiner_f90_integer, Combiner::Named),
    ];
    known
        .iter()
        .find(|(known, _)| *known == value)
        .map_or(Combiner::Other, |(_, combiner)| *combiner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(combiner: Combiner, integers: &[i64], addresses: &[i64]) -> Vec<(Displacement, i64)> {
        let contents = Contents {
            combiner,
            integers: integers.to_vec(),
            addresses: addresses.to_vec(),
            types: Vec::new(),
            _derived: Vec::new(),
        };
        let blocks = contents.blocks(&Abi::STANDARD).unwrap_or_default();
        blocks.iter().map(|b| (b.displacement, b.count)).collect()
    }

    fn items(blocks: &[(Displacement, i64)]) -> Vec<i64> {
        let range = |(displacement, count): &(Displacement, i64)| match displacement {
            Displacement::Items(start) => *start..start + count,
            Displacement::Bytes(_) => 0..0,
        };
        blocks.iter().flat_map(range).collect()
    }

    #[test]
    fn a_subarray_in_both_orders() {
        let abi = &Abi::STANDARD;
        let (c, fortran) = (i64::from(abi.order_c), i64::from(abi.order_fortran));
        // 2 of 3 rows of 4, columns 1 and 2.
        let rows = blocks(Combiner::Subarray, &[2, 3, 4, 2, 2, 1, 1, c], &[]);
        assert_eq!(items(&rows), [5, 6, 9, 10]);
        let columns = blocks(Combiner::Subarray, &[2, 4, 3, 2, 2, 1, 1, fortran], &[]);
        assert_eq!(columns, rows);
    }

    /// Every element of an array belongs to exactly one process.
    #[test]
    fn processes_share_an_array_between_them() {
        let abi = &Abi::STANDARD;
        let [block, cyclic, none, default] = [
            abi.distribute_block,
            abi.distribute_cyclic,
            abi.distribute_none,
            abi.distribute_dflt_darg,
        ]
        .map(i64::from);
        for order in [abi.order_c, abi.order_fortran].map(i64::from) {
            for (kinds, arguments, grid) in [
                ([block, cyclic, none], [default, 2, default], [2, 3, 1]),
                ([cyclic, block, cyclic], [default, 4, 3], [2, 2, 2]),
                ([block, block, block], [3, default, default], [3, 1, 4]),
            ] {
                let sizes = [7i64, 8, 10];
                let processes: i64 = grid.iter().product();
                let mut seen = vec![0; 560];
                for rank in 0..processes {
                    let mut integers = vec![processes, rank, 3];
                    for part in [sizes, kinds, arguments, grid] {
                        integers.extend(part);
                    }
                    integers.push(order);
                    for item in items(&blocks(Combiner::Darray, &integers, &[])) {
                        seen[item as usize] += 1;
                    }
                }
                assert_eq!(seen, vec![1; 560], "{kinds:?} {order}");
            }
        }
    }

    #[test]
    fn a_process_has_its_part_of_a_cyclic_distribution() {
        let abi = &Abi::STANDARD;
        let [cyclic, order] = [abi.distribute_cyclic, abi.order_c].map(i64::from);
        let own = blocks(Combiner::Darray, &[3, 1, 1, 11, cyclic, 2, 3, order], &[]);
        assert_eq!(items(&own), [2, 3, 8, 9]);
    }

    #[test]
    fn arguments_with_large_counts_are_those_without() {
        for (combiner, small, large) in [
            (Combiner::Vector, (vec![], vec![]), vec![3, 2, 5]),
            (Combiner::Hvector, (vec![], vec![]), vec![3, 2, 40]),
            (Combiner::Struct, (vec![], vec![]), vec![2, 1, 4, 0, 16]),
            (
                Combiner::Subarray,
                (vec![2, 56], vec![]),
                vec![3, 4, 2, 2, 1, 1],
            ),
            (
                Combiner::Darray,
                (vec![4, 1, 1, 121, 7, 4, 56], vec![]),
                vec![100],
            ),
        ] {
            let mut contents = Contents {
                combiner,
                integers: small.0,
                addresses: small.1,
                types: Vec::new(),
                _derived: Vec::new(),
            };
            assert_eq!(contents.spread(&large), Some(()));
            let expected: (Vec<i64>, Vec<i64>) = match combiner {
                Combiner::Vector => (vec![3, 2, 5], vec![]),
                Combiner::Hvector => (vec![3, 2], vec![40]),
                Combiner::Struct => (vec![2, 1, 4], vec![0, 16]),
                Combiner::Subarray => (vec![2, 3, 4, 2, 2, 1, 1, 56], vec![]),
                _ => (vec![4, 1, 1, 100, 121, 7, 4, 56], vec![]),
            };
            assert_eq!(
                (contents.integers.clone(), contents.addresses.clone()),
                expected
            );
        }
    }
}
