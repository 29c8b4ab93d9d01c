//! Halo exchange by MPI on device buffers.
//!
//! rsmpi's safe calls borrow slices, and no slice may be formed over device memory, so the buffers go to MPI as
//! the addresses that they are. PROC_NULL stands for the neighbour beyond a fixed edge.

use crate::args::ExchangeKind;
use crate::domain::{Layout, Part};
use crate::failure::{Failure, Outcome};
use crate::field::Cell;
use crate::gpu::{Buffer, Gpu};
use anabranch_kernels::shape_1d;
use mpi::ffi;
use mpi::traits::*;
use std::marker::PhantomData;

/// Tags, one for each direction that data travels in: with two ranks in a ring both neighbours are the same rank.
const UP: i32 = 1;
const DOWN: i32 = 2;
const LEFT: i32 = 3;
const RIGHT: i32 = 4;

/// One message out and one in, travelling in the same direction.
#[derive(Clone, Copy, Debug)]
struct Shift {
    tag: i32,
    send_to: Option<i32>,
    send: u64,
    receive_from: Option<i32>,
    receive: u64,
    count: i32,
}

/// What this rank has sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Messages.
    pub messages: u64,
    /// Bytes of their payload.
    pub bytes: u64,
}

/// Exchanges the halos of one part.
pub struct Exchange<T> {
    kind: ExchangeKind,
    communicator: ffi::MPI_Comm,
    part: Part,
    layout: Layout,
    columns: Option<Columns>,
    sent: Sent,
    cell: PhantomData<T>,
}

/// Contiguous copies of the outer columns (sent) and of the halo columns (received), where columns are split.
struct Columns {
    send_left: Buffer,
    send_right: Buffer,
    from_left: Buffer,
    from_right: Buffer,
}

/// Device memory that [`Exchange::new`] allocates, in bytes.
pub fn bytes_needed(part: &Part, cell_bytes: u64) -> u64 {
    if part.neighbours.left.or(part.neighbours.right).is_some() {
        4 * part.rows * cell_bytes
    } else {
        0
    }
}

impl<T: Cell> Exchange<T> {
    /// Makes the exchange of a part between the ranks of a communicator, which must outlive it.
    pub fn new(
        kind: ExchangeKind,
        world: &impl Communicator,
        gpu: &Gpu,
        part: Part,
        layout: Layout,
    ) -> Outcome<Exchange<T>> {
        let columns = if bytes_needed(&part, T::BYTES) == 0 {
            None
        } else {
            let column = || gpu.allocate(part.rows * T::BYTES);
            Some(Columns {
                send_left: column()?,
                send_right: column()?,
                from_left: column()?,
                from_right: column()?,
            })
        };
        Ok(Exchange {
            kind,
            communicator: world.as_raw(),
            part,
            layout,
            columns,
            sent: Sent::default(),
            cell: PhantomData,
        })
    }

    /// What was sent so far.
    pub fn sent(&self) -> Sent {
        self.sent
    }

    /// Fills the halo of a field from its neighbours. The stream must be idle: MPI reads and writes the field at once.
    pub fn run(&mut self, gpu: &Gpu, field: &Buffer) -> Outcome<()> {
        let at = |row: i64, col: i64| field.address + self.layout.at(row, col) * T::BYTES;
        let (rows, cols) = (self.part.rows as i64, self.part.cols as i64);
        let n = self.part.neighbours;
        let count = mpi_count(self.part.cols);
        let mut shifts = vec![
            Shift {
                tag: UP,
                send_to: n.up,
                send: at(0, 0),
                receive_from: n.down,
                receive: at(rows, 0),
                count,
            },
            Shift {
                tag: DOWN,
                send_to: n.down,
                send: at(rows - 1, 0),
                receive_from: n.up,
                receive: at(-1, 0),
                count,
            },
        ];
        if let Some(columns) = &self.columns {
            self.pack(gpu, columns, at(0, 0), at(0, cols - 1))?;
            let count = mpi_count(self.part.rows);
            let (left, right) = (columns.send_left.address, columns.send_right.address);
            let (from_left, from_right) = (columns.from_left.address, columns.from_right.address);
            shifts.push(Shift {
                tag: LEFT,
                send_to: n.left,
                send: left,
                receive_from: n.right,
                receive: from_right,
                count,
            });
            shifts.push(Shift {
                tag: RIGHT,
                send_to: n.right,
                send: right,
                receive_from: n.left,
                receive: from_left,
                count,
            });
        }
        match self.kind {
            ExchangeKind::TwoPhase => shifts.iter().try_for_each(|s| self.sendrecv(s))?,
            ExchangeKind::Concurrent => self.post_all(&shifts)?,
        }
        for shift in shifts.iter().filter(|s| s.send_to.is_some()) {
            self.sent.messages += 1;
            self.sent.bytes += shift.count as u64 * T::BYTES;
        }
        match &self.columns {
            Some(columns) => self.unpack(gpu, columns, at(0, -1), at(0, cols)),
            None => Ok(()),
        }
    }

    fn pack(&self, gpu: &Gpu, columns: &Columns, first: u64, last: u64) -> Outcome<()> {
        let kernel = if T::BYTES == 4 {
            "pack_column_b32"
        } else {
            "pack_column_b64"
        };
        let (rows, pitch) = (self.part.rows, self.layout.pitch);
        for (packed, column) in [(&columns.send_left, first), (&columns.send_right, last)] {
            // SAFETY: `rows` cells, a pitch apart, of a field that is as large as its layout says; a buffer of `rows` cells.
            unsafe {
                gpu.launch(
                    kernel,
                    &[packed.address, column, rows, pitch],
                    shape_1d(rows),
                )?
            };
        }
        gpu.synchronize()
    }

    /// Unpacks what came from neighbours; beyond a fixed edge the halo keeps its values.
    fn unpack(&self, gpu: &Gpu, columns: &Columns, left: u64, right: u64) -> Outcome<()> {
        let kernel = if T::BYTES == 4 {
            "unpack_column_b32"
        } else {
            "unpack_column_b64"
        };
        let (rows, pitch, n) = (self.part.rows, self.layout.pitch, self.part.neighbours);
        for (from, packed, column) in [
            (n.left, &columns.from_left, left),
            (n.right, &columns.from_right, right),
        ] {
            if from.is_some() {
                // SAFETY: as in `pack`.
                unsafe {
                    gpu.launch(
                        kernel,
                        &[column, packed.address, rows, pitch],
                        shape_1d(rows),
                    )?
                };
            }
        }
        gpu.synchronize()
    }

    fn sendrecv(&self, s: &Shift) -> Outcome<()> {
        let (to, from, datatype) = (
            rank_or_null(s.send_to),
            rank_or_null(s.receive_from),
            T::equivalent_datatype().as_raw(),
        );
        // SAFETY: both buffers are device memory of `count` cells, which MPI (or what is loaded in front of it) takes.
        let code = unsafe {
            let (send, receive) = (s.send as *const _, s.receive as *mut _);
            let status = ffi::RSMPI_STATUS_IGNORE;
            ffi::MPI_Sendrecv(
                send,
                s.count,
                datatype,
                to,
                s.tag,
                receive,
                s.count,
                datatype,
                from,
                s.tag,
                self.communicator,
                status,
            )
        };
        succeeded("MPI_Sendrecv", code)
    }

    fn post_all(&self, shifts: &[Shift]) -> Outcome<()> {
        let datatype = T::equivalent_datatype().as_raw();
        // SAFETY: a constant of the MPI library.
        let mut requests = vec![unsafe { ffi::RSMPI_REQUEST_NULL }; 2 * shifts.len()];
        let (receives, sends) = requests.split_at_mut(shifts.len());
        for (s, request) in shifts.iter().zip(receives) {
            let from = rank_or_null(s.receive_from);
            // SAFETY: device memory of `count` cells, left alone until the wait below.
            let code = unsafe {
                ffi::MPI_Irecv(
                    s.receive as *mut _,
                    s.count,
                    datatype,
                    from,
                    s.tag,
                    self.communicator,
                    request,
                )
            };
            succeeded("MPI_Irecv", code)?;
        }
        for (s, request) in shifts.iter().zip(sends) {
            let to = rank_or_null(s.send_to);
            // SAFETY: as above.
            let code = unsafe {
                ffi::MPI_Isend(
                    s.send as *const _,
                    s.count,
                    datatype,
                    to,
                    s.tag,
                    self.communicator,
                    request,
                )
            };
            succeeded("MPI_Isend", code)?;
        }
        // SAFETY: as many requests as the array has.
        let code = unsafe {
            ffi::MPI_Waitall(
                requests.len() as i32,
                requests.as_mut_ptr(),
                ffi::RSMPI_STATUSES_IGNORE,
            )
        };
        succeeded("MPI_Waitall", code)
    }
}

/// Cells of a message as MPI counts them. [`Part::new`] has refused what is longer, unless nobody is there to send it to.
fn mpi_count(cells: u64) -> i32 {
    i32::try_from(cells).unwrap_or(0)
}

fn rank_or_null(rank: Option<i32>) -> i32 {
    // SAFETY: a constant of the MPI library.
    rank.unwrap_or(unsafe { ffi::RSMPI_PROC_NULL })
}

fn succeeded(call: &str, code: i32) -> Outcome<()> {
    if code == ffi::MPI_SUCCESS as i32 {
        Ok(())
    } else {
        Err(Failure::input(format!("{call} failed with error {code}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row without a neighbour above or below may be longer than a count: 4 x 2^31 cells on one rank, all edges fixed.
    #[test]
    fn what_nobody_gets_has_no_negative_count() {
        assert_eq!(mpi_count(i32::MAX as u64), i32::MAX);
        assert_eq!(mpi_count(1 << 31), 0);
        assert_eq!(mpi_count((1 << 33) + 5), 0);
    }
}
