//! The iteration, timed by phase.

use crate::args::{Args, ExchangeKind, NormKind};
use crate::clock::Clock;
use crate::domain::{Layout, Part};
use crate::exchange::{Exchange, Sent};
use crate::failure::Outcome;
use crate::field::{self, Cell, Field};
use crate::gpu::Gpu;
use indicatif::ProgressBar;
use mpi::traits::*;

/// Nanoseconds of each phase on this rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct Phases {
    /// From the first iteration's start to the last one's end.
    pub total_ns: u64,
    /// Kernels of the iteration.
    pub compute_ns: u64,
    /// Halo exchange.
    pub exchange_ns: u64,
    /// Norms.
    pub norm_ns: u64,
}

/// How a run ended.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    /// Iterations done.
    pub iterations: u64,
    /// Norm of the last one's change.
    pub norm: Option<f64>,
    /// The norm fell below the tolerance.
    pub converged: bool,
    /// Times.
    pub phases: Phases,
    /// By how much programs on a simulated node have acted later than they could have.
    pub late_ns: Option<u64>,
}

/// One rank's part of the solution.
pub struct Solver<'a, T, C> {
    world: &'a C,
    gpu: &'a Gpu,
    clock: Clock,
    /// The rank's part of the field.
    pub field: Field<T>,
    exchange: Exchange<T>,
    norm: NormKind,
    contributions: Vec<f64>,
}

/// Device memory that a solver allocates, in bytes.
pub fn bytes_needed(part: &Part, cell_bytes: u64) -> u64 {
    let layout = Layout::new(part.rows, part.cols, cell_bytes);
    field::bytes_needed(part, &layout, cell_bytes) + crate::exchange::bytes_needed(part, cell_bytes)
}

impl<'a, T: Cell, C: Communicator> Solver<'a, T, C> {
    /// Allocates what the part needs.
    pub fn new(world: &'a C, gpu: &'a Gpu, args: &Args, part: Part) -> Outcome<Solver<'a, T, C>> {
        let layout = Layout::new(part.rows, part.cols, T::BYTES);
        let field = Field::new(gpu, part, args.size, layout)?;
        let kind: ExchangeKind = args.exchange;
        let exchange = Exchange::new(kind, world, gpu, part, layout)?;
        let contributions = vec![0.0; world.size() as usize];
        Ok(Solver {
            world,
            gpu,
            clock: Clock::detect(),
            field,
            exchange,
            norm: args.norm,
            contributions,
        })
    }

    /// The clock that phases are timed by.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// What this rank has sent so far.
    pub fn sent(&self) -> Sent {
        self.exchange.sent()
    }

    /// Starts from the initial field and iterates up to `iterations` times. Collective.
    pub fn run(
        &mut self,
        args: &Args,
        iterations: u64,
        tolerance: f64,
        progress: &ProgressBar,
    ) -> Outcome<Ended> {
        self.field.reset(self.gpu, args.seed)?;
        self.world.barrier();
        let mut ended = Ended {
            iterations: 0,
            norm: None,
            converged: false,
            phases: Phases::default(),
            late_ns: None,
        };
        let (start, late) = (self.clock.now_ns(), self.clock.late_ns());
        while ended.iterations < iterations && !ended.converged {
            self.iterate(&mut ended.phases)?;
            ended.iterations += 1;
            let due = args.norm_every > 0 && ended.iterations % args.norm_every == 0;
            if due || ended.iterations == iterations {
                let norm = self.global_norm(&mut ended.phases)?;
                ended.norm = Some(norm);
                ended.converged = norm < tolerance;
                progress.set_message(format!("norm {norm:.3e}"));
            }
            progress.inc(1);
        }
        ended.phases.total_ns = self.clock.now_ns() - start;
        let late = self.clock.late_ns().zip(late);
        ended.late_ns = late.map(|(after, before)| after - before);
        Ok(ended)
    }

    fn iterate(&mut self, phases: &mut Phases) -> Outcome<()> {
        let start = self.clock.now_ns();
        self.exchange.run(self.gpu, self.field.current())?;
        let exchanged = self.clock.now_ns();
        self.field.step(self.gpu)?;
        // MPI reads the edges of the new field next, and knows nothing of streams.
        self.gpu.synchronize()?;
        phases.exchange_ns += exchanged - start;
        phases.compute_ns += self.clock.now_ns() - exchanged;
        Ok(())
    }

    /// The norm of the whole field's change, joined in the order of ranks: the same on every rank.
    fn global_norm(&mut self, phases: &mut Phases) -> Outcome<f64> {
        let start = self.clock.now_ns();
        let mine = self.field.partial_norm(self.gpu, self.norm)?;
        self.world
            .all_gather_into(&mine, &mut self.contributions[..]);
        let joined = self
            .contributions
            .iter()
            .copied()
            .fold(0.0, |a, b| field::join(self.norm, a, b));
        phases.norm_ns += self.clock.now_ns() - start;
        Ok(field::finish(self.norm, joined))
    }

    /// Hash of the whole field. Collective.
    pub fn global_hash(&self) -> Outcome<u64> {
        let mine = self.field.partial_hash(self.gpu)?;
        let mut all = vec![0u64; self.world.size() as usize];
        self.world.all_gather_into(&mine, &mut all[..]);
        Ok(all.into_iter().fold(0, u64::wrapping_add))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Boundary, Dims, Size};

    const CELLS: u64 = 8 << 30;
    const BOUNDARIES: [Boundary; 3] = [Boundary::Ring, Boundary::Fixed, Boundary::Torus];

    /// Bytes of a part of `rows` x `cols`, at least and at most, by sums of 128 bits: two fields with a halo, rows padded to
    /// lines of 128 bytes with a line before them; four columns where columns travel; a number for each of 1024 blocks.
    fn bounds(rows: u64, cols: u64, cell: u64) -> (u128, u128) {
        let (rows, cols, cell) = (u128::from(rows), u128::from(cols), u128::from(cell));
        let least = 2 * (rows + 2) * (cols + 2) * cell;
        let padding = 2 * ((rows + 2) * 128 + 2 * 128);
        (least, least + padding + 4 * rows * cell + 8 * 1024)
    }

    #[test]
    fn needs_of_the_largest_domains_do_not_overflow() {
        let (mut fit, mut refused) = (0, 0);
        for shift in 0..=33 {
            let size = Size {
                rows: 1 << shift,
                cols: CELLS >> shift,
            };
            for (p, q) in [
                (1, 1),
                (2, 1),
                (1, 2),
                (4, 1),
                (2, 2),
                (1, 4),
                (8, 1),
                (2, 4),
            ] {
                if p > size.rows || q > size.cols {
                    continue;
                }
                let dims = Dims {
                    rows: p as u32,
                    cols: q as u32,
                };
                let (rows, cols) = (size.rows / p, size.cols / q);
                for boundary in BOUNDARIES {
                    let along = p > 1 || boundary != Boundary::Fixed;
                    let across = q > 1 || boundary == Boundary::Torus;
                    let countable = (!along || cols < 1 << 31) && (!across || rows < 1 << 31);
                    let ranks = p as u32 * q as u32;
                    let parts = (0..ranks).map(|rank| Part::new(size, dims, boundary, rank));
                    let parts: Outcome<Vec<Part>> = parts.collect();
                    assert_eq!(parts.is_ok(), countable, "{size} {dims:?} {boundary:?}");
                    let Ok(parts) = parts else {
                        refused += 1;
                        continue;
                    };
                    fit += 1;
                    for cell in [4, 8] {
                        let (least, most) = bounds(rows, cols, cell);
                        for part in &parts {
                            assert_eq!((part.rows, part.cols), (rows, cols));
                            let needed = u128::from(bytes_needed(part, cell));
                            assert!(
                                (least..=most).contains(&needed),
                                "{size} {dims:?} {boundary:?} {cell}: {needed} of {least} to {most}"
                            );
                            let layout = Layout::new(rows, cols, cell);
                            let last = u128::from(layout.at(rows as i64, cols as i64 - 1));
                            let pitch = u128::from(layout.pitch);
                            let by_hand = u128::from(layout.origin) + u128::from(rows) * pitch;
                            assert_eq!(last, by_hand + u128::from(cols) - 1);
                            assert!(last < u128::from(layout.elements));
                        }
                    }
                }
            }
        }
        assert!(fit > 500 && refused > 30, "{fit} and {refused}");
    }

    /// 8 x 2^30 cells of 8 bytes on four ranks: a part has 2 rows. Rows are 2^30 + 16 cells apart; before the first lie a row and
    /// 16 cells, behind the last one a row and a cell.
    #[test]
    fn the_papers_domain_by_hand() {
        let size = Size {
            rows: 8,
            cols: 1 << 30,
        };
        let part = Part::new(size, Dims { rows: 4, cols: 1 }, Boundary::Ring, 3).unwrap();
        let elements = 4 * ((1u64 << 30) + 16) + 1;
        assert_eq!(bytes_needed(&part, 8), 2 * elements * 8 + 1024 * 8);
    }
}
