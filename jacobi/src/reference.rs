//! The whole domain computed on the host in one piece, by the kernels' host twins.

use crate::args::{Boundary, Size};
use crate::domain::{tile_shift, Layout};
use crate::failure::{Failure, Outcome};
use anabranch_kernels::{generator, shape_norm, twin, Launch, Params, Real};

/// The final field.
pub struct Reference<T> {
    /// Its cells, row by row.
    pub cells: Vec<T>,
    /// Its hash.
    pub hash: u64,
    /// The largest change in the last iteration; 0 where there was none.
    pub norm_max: f64,
}

/// Host memory that [`compute`] needs, in bytes.
pub fn bytes_needed(size: Size, cell_bytes: u64) -> u64 {
    3 * Layout::new(size.rows, size.cols, cell_bytes).elements * cell_bytes
}

/// Memory that the machine has left, in bytes, where it says so.
pub fn bytes_available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.split_whitespace()
        .next()?
        .parse::<u64>()
        .ok()
        .map(|kib| kib * 1024)
}

/// Does `iterations` from the initial field of `seed`.
pub fn compute<T: Real>(
    size: Size,
    boundary: Boundary,
    seed: u64,
    iterations: u64,
) -> Outcome<Reference<T>> {
    let layout = Layout::new(size.rows, size.cols, T::BYTES);
    let mut fields = [
        initial::<T>(size, layout, boundary, seed, true),
        initial::<T>(size, layout, boundary, seed, false),
    ];
    let mut current = 0;
    for _ in 0..iterations {
        wrap(&mut fields[current], size, layout, boundary);
        let [a, b] = &mut fields;
        let (input, out) = if current == 0 { (a, b) } else { (b, a) };
        let origin = layout.origin as usize;
        let values = [
            place(out, origin),
            place(input, origin),
            size.rows,
            size.cols,
            layout.pitch,
        ];
        run::<T>("jacobi_step", &values, shape_norm(1, 1))?;
        current = 1 - current;
    }
    let norm_max = if iterations == 0 {
        0.0
    } else {
        norm(&mut fields, size, layout)?
    };
    let field = &fields[current];
    let rows = (0..size.rows).map(|r| layout.at(r as i64, 0) as usize);
    let cells: Vec<T> = rows
        .flat_map(|first| &field[first..first + size.cols as usize])
        .copied()
        .collect();
    let indexed = cells.iter().zip(0u64..);
    let words = indexed.map(|(v, i)| {
        generator::cell_hash((i / size.cols) as i64, (i % size.cols) as i64, v.bits())
    });
    let hash = words.fold(0, u64::wrapping_add);
    Ok(Reference {
        cells,
        hash,
        norm_max,
    })
}

/// A field with its fixed edges, and its interior where asked for.
fn initial<T: Real>(
    size: Size,
    layout: Layout,
    boundary: Boundary,
    seed: u64,
    interior: bool,
) -> Vec<T> {
    let mut field = vec![T::default(); layout.elements as usize];
    let (rows, cols) = (size.rows as i64, size.cols as i64);
    let mut set = |r: i64, c: i64| {
        field[layout.at(r, c) as usize] = generator::cell_value(seed, r, c, tile_shift(size))
    };
    if interior {
        (0..rows).for_each(|r| (0..cols).for_each(|c| set(r, c)));
    }
    if boundary == Boundary::Fixed {
        (0..cols).for_each(|c| [-1, rows].into_iter().for_each(|r| set(r, c)));
    }
    if boundary != Boundary::Torus {
        (0..rows).for_each(|r| [-1, cols].into_iter().for_each(|c| set(r, c)));
    }
    field
}

/// Copies the halo of periodic dimensions from the other side.
fn wrap<T: Real>(field: &mut [T], size: Size, layout: Layout, boundary: Boundary) {
    let (rows, cols) = (size.rows as i64, size.cols as i64);
    let mut copy = |to: (i64, i64), from: (i64, i64)| {
        field[layout.at(to.0, to.1) as usize] = field[layout.at(from.0, from.1) as usize]
    };
    if boundary != Boundary::Fixed {
        for c in 0..cols {
            copy((-1, c), (rows - 1, c));
            copy((rows, c), (0, c));
        }
    }
    if boundary == Boundary::Torus {
        for r in 0..rows {
            copy((r, -1), (r, cols - 1));
            copy((r, cols), (r, 0));
        }
    }
}

fn norm<T: Real>(fields: &mut [Vec<T>; 2], size: Size, layout: Layout) -> Outcome<f64> {
    let mut partial = vec![0f64; 1];
    let [a, b] = fields;
    let origin = layout.origin as usize;
    let values = [
        place(a, origin),
        place(b, origin),
        size.rows,
        size.cols,
        layout.pitch,
        place(&mut partial, 0),
    ];
    run::<T>("norm_max", &values, shape_norm(1, 1))?;
    Ok(partial[0])
}

/// The host address of an element, as a twin's argument.
fn place<T>(slice: &mut [T], index: usize) -> u64 {
    std::ptr::from_mut(&mut slice[index]) as u64
}

fn run<T: Real>(kernel: &str, values: &[u64], launch: Launch) -> Outcome<()> {
    let name = format!("{kernel}_{}", T::SUFFIX);
    let twin = twin(&name).ok_or_else(|| Failure::input(format!("no twin of {name}")))?;
    // SAFETY: the callers pass addresses into buffers of their own, large enough by their layout.
    let outcome = unsafe {
        twin.run(&Params::from_values(values), launch, &|address, _| {
            address as *mut u8
        })
    };
    outcome.map_err(|fault| Failure::wrong(format!("the host reference failed: {fault}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same on plain nested vectors, with indices taken modulo the periodic dimensions.
    fn plain(size: Size, boundary: Boundary, seed: u64, iterations: u64) -> Vec<f64> {
        let (rows, cols) = (size.rows as i64, size.cols as i64);
        let edge = |r: i64, c: i64| generator::cell_value::<f64>(seed, r, c, tile_shift(size));
        let mut now: Vec<Vec<f64>> = (0..rows)
            .map(|r| (0..cols).map(|c| edge(r, c)).collect())
            .collect();
        for _ in 0..iterations {
            let at = |r: i64, c: i64| {
                let r = if boundary == Boundary::Fixed {
                    r
                } else {
                    r.rem_euclid(rows)
                };
                let c = if boundary == Boundary::Torus {
                    c.rem_euclid(cols)
                } else {
                    c
                };
                if (0..rows).contains(&r) && (0..cols).contains(&c) {
                    now[r as usize][c as usize]
                } else {
                    edge(r, c)
                }
            };
            let mean = |r, c| ((at(r, c - 1) + at(r, c + 1)) + (at(r - 1, c) + at(r + 1, c))) / 4.0;
            now = (0..rows)
                .map(|r| (0..cols).map(|c| mean(r, c)).collect())
                .collect();
        }
        now.concat()
    }

    #[test]
    fn twins_solve_what_plain_loops_solve() {
        for boundary in [Boundary::Ring, Boundary::Fixed, Boundary::Torus] {
            for (rows, cols) in [(1, 1), (1, 9), (7, 1), (13, 5), (6, 150)] {
                let size = Size { rows, cols };
                let reference = compute::<f64>(size, boundary, 3, 7).unwrap();
                assert_eq!(
                    reference.cells,
                    plain(size, boundary, 3, 7),
                    "{boundary:?} {size}"
                );
                let (before, after) = (plain(size, boundary, 3, 6), plain(size, boundary, 3, 7));
                let change = before
                    .iter()
                    .zip(&after)
                    .map(|(a, b)| (a - b).abs())
                    .fold(0.0, f64::max);
                assert_eq!(reference.norm_max, change, "{boundary:?} {size}");
            }
        }
    }

    #[test]
    fn no_iterations_leave_the_initial_field() {
        let size = Size { rows: 3, cols: 4 };
        let reference = compute::<f32>(size, Boundary::Ring, 9, 0).unwrap();
        assert_eq!(
            reference.cells[5],
            generator::cell_value::<f32>(9, 1, 1, tile_shift(size))
        );
        assert_eq!(reference.norm_max, 0.0);
    }
}
