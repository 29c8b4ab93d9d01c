//! Large-count functions (`MPI_X_c`, MPI 4.0) for an MPI library that has the plain ones only.
//!
//! Counts that fit an `int` are passed on. A longer message is one item of a type that is made of its items; a longer
//! reduction is made a part after the other. What has no such form (a count of many items in an array, a displacement)
//! ends in `MPI_ERR_COUNT`, with a text that names it.

#[rustfmt::skip]
#[allow(unused_mut)]
mod generated;

pub use generated::*;

use std::ffi::{c_int, c_void};
use std::fmt::Display;

use super::owned::OwnType;
use super::{codes, guard, native, Abi, Comm, Datatype, File, Function, Out, Slots, Win};

/// Whose error handler is called.
#[derive(Clone, Copy, Debug)]
pub enum At {
    /// That of a communicator.
    Comm(Comm),
    /// That of a window.
    Window(Win),
    /// That of a file.
    File(File),
    /// That of MPI_COMM_WORLD.
    World,
}

/// What was made for a call: types, and arrays of plain counts.
#[derive(Debug, Default)]
pub struct Kept {
    types: Vec<OwnType>,
    arrays: Vec<Vec<c_int>>,
}

/// The arguments of a call while they are brought into the form of the plain function.
#[derive(Debug)]
pub struct Narrow {
    function: Function,
    at: At,
    abi: Option<&'static Abi>,
    kept: Kept,
    /// What does not fit.
    refused: Option<String>,
}

/// Items of a part of a long reduction.
const PART: i64 = 1 << 30;

impl Narrow {
    /// For a call of this function.
    pub fn new(function: Function, at: At) -> Narrow {
        Narrow {
            function,
            at,
            abi: super::abi(),
            kept: Kept::default(),
            refused: None,
        }
    }

    fn refuse(&mut self, name: &str, value: &dyn Display) {
        let function = self.function.name();
        self.refused.get_or_insert_with(|| {
            format!(
                "{function}: {name} is {value}, and this MPI library takes no more than {} there",
                c_int::MAX
            )
        });
    }

    /// A plain count or nothing.
    pub fn count(&mut self, name: &str, count: i64) -> c_int {
        c_int::try_from(count).unwrap_or_else(|_| {
            self.refuse(name, &count);
            0
        })
    }

    /// A displacement unit.
    pub fn unit(&mut self, name: &str, unit: isize) -> c_int {
        self.count(name, unit as i64)
    }

    /// So many items of a type, as a plain count of it or of a type that is made of it. What is not significant may be
    /// anything.
    pub fn items(
        &mut self,
        name: &str,
        count: i64,
        datatype: Datatype,
        is_significant: bool,
    ) -> (c_int, Datatype) {
        match c_int::try_from(count) {
            Ok(count) => return (count, datatype),
            Err(_) if !is_significant => return (0, datatype),
            Err(_) => {}
        }
        let made = self.abi.and_then(|abi| {
            let extent = extent_of(abi, datatype)?;
            run_of(abi, u64::try_from(count).ok()?, datatype, extent)
        });
        match made {
            Some(made) => {
                let datatype = made.get();
                self.kept.types.push(made);
                (1, datatype)
            }
            None => {
                self.refuse(name, &count);
                (0, datatype)
            }
        }
    }

    /// An array of plain counts or displacements.
    ///
    /// # Safety
    /// `array` holds `length` entries, or is null.
    pub unsafe fn array<T: Copy + Display + TryInto<c_int>>(
        &mut self,
        name: &str,
        array: *const T,
        length: usize,
    ) -> *const c_int {
        if array.is_null() || length == 0 {
            return std::ptr::null();
        }
        // SAFETY: as the caller says.
        let wide = unsafe { std::slice::from_raw_parts(array, length) };
        let mut narrow = Vec::with_capacity(length);
        for (i, entry) in wide.iter().enumerate() {
            match (*entry).try_into() {
                Ok(entry) => narrow.push(entry),
                Err(_) => {
                    self.refuse(&format!("{name}[{i}]"), entry);
                    narrow.push(0);
                }
            }
        }
        let start = narrow.as_ptr();
        self.kept.arrays.push(narrow);
        start
    }

    /// Whether a buffer is MPI_IN_PLACE.
    pub fn is_in_place(&self, buffer: *const c_void) -> bool {
        self.abi.is_some_and(|abi| buffer.addr() == abi.in_place)
    }

    fn comm(&self) -> Option<(&'static Abi, Comm)> {
        match self.at {
            At::Comm(comm) => Some((self.abi?, comm)),
            _ => None,
        }
    }

    /// Whether this process is the root of a collective call.
    pub fn is_root(&self, root: c_int) -> bool {
        let Some((abi, comm)) = self.comm() else {
            return false;
        };
        let mut rank = abi.undefined;
        let code = native::comm_rank(comm, Out::of(&mut rank));
        root == abi.root || (code == abi.success && root == rank)
    }

    /// Processes of the communicator, or of this side of an intercommunicator.
    pub fn members(&self) -> usize {
        self.asked(native::comm_size)
    }

    /// Processes that a collective call exchanges data with, if it does.
    pub fn others_if(&self, is_so: bool) -> usize {
        let Some((abi, comm)) = self.comm().filter(|_| is_so) else {
            return 0;
        };
        let mut inter = 0;
        let code = native::comm_test_inter(comm, Out::of(&mut inter));
        if code == abi.success && inter != 0 {
            return self.asked(native::comm_remote_size);
        }
        self.members()
    }

    /// Processes from which a neighbourhood collective receives.
    pub fn in_degree(&self) -> usize {
        self.degrees().0
    }

    /// Processes to which it sends.
    pub fn out_degree(&self) -> usize {
        self.degrees().1
    }

    fn degrees(&self) -> (usize, usize) {
        let Some((abi, comm)) = self.comm() else {
            return (0, 0);
        };
        let mut kind = abi.undefined;
        native::topo_test(comm, Out::of(&mut kind));
        let both = if kind == abi.cart {
            2 * self.asked(native::cartdim_get)
        } else if kind == abi.graph {
            self.asked(|comm, count| {
                let mut rank = 0;
                native::comm_rank(comm, Out::of(&mut rank));
                native::graph_neighbors_count(comm, rank, count)
            })
        } else if kind == abi.dist_graph {
            let (mut into, mut out, mut weighted) = (0, 0, 0);
            native::dist_graph_neighbors_count(
                comm,
                Out::of(&mut into),
                Out::of(&mut out),
                Out::of(&mut weighted),
            );
            return (into.max(0) as usize, out.max(0) as usize);
        } else {
            0
        };
        (both, both)
    }

    /// A number that the library is asked for; 0 if it does not say.
    fn asked(&self, ask: impl FnOnce(Comm, Out<'_, c_int>) -> c_int) -> usize {
        let mut number = 0;
        match self.comm() {
            Some((abi, comm)) if ask(comm, Out::of(&mut number)) == abi.success => {
                usize::try_from(number).unwrap_or(0)
            }
            _ => 0,
        }
    }

    /// Makes the call, or refuses it.
    pub fn call(mut self, plain: impl FnOnce() -> c_int) -> c_int {
        match self.refused.take() {
            Some(why) => self.raise(&why),
            None => plain(),
        }
    }

    /// As [`Narrow::call`] of a function that writes a number.
    pub fn writing(
        self,
        place: Out<'_, i64>,
        plain: impl FnOnce(Out<'_, c_int>) -> c_int,
    ) -> c_int {
        let mut number = 0;
        let code = plain(Out::of(&mut number));
        place.write(number.into());
        code
    }

    /// What was made for a call whose arguments are used later.
    ///
    /// # Errors
    /// The code of an error that was raised, as something does not fit.
    pub fn finish(mut self) -> Result<Kept, c_int> {
        match self.refused.take() {
            Some(why) => Err(self.raise(&why)),
            None => Ok(std::mem::take(&mut self.kept)),
        }
    }

    /// Makes a reduction, in parts if it is long.
    pub fn in_parts(
        self,
        send: *const c_void,
        receive: *mut c_void,
        count: i64,
        datatype: Datatype,
        plain: impl Fn(*const c_void, *mut c_void, c_int) -> c_int,
    ) -> c_int {
        if let Ok(count) = c_int::try_from(count) {
            return plain(send, receive, count);
        }
        let Some(abi) = self.abi else {
            return guard::UNKNOWN_ERROR;
        };
        let Some(extent) = extent_of(abi, datatype) else {
            return abi.err_type;
        };
        let mut done = 0;
        while done < count {
            let at = (done * extent) as isize;
            let from = if self.is_in_place(send) {
                send
            } else {
                send.wrapping_byte_offset(at)
            };
            let items = (count - done).min(PART);
            // It may be null or MPI_IN_PLACE where it counts for nothing.
            let code = plain(from, receive.wrapping_byte_offset(at), items as c_int);
            if code != abi.success {
                return code;
            }
            done += items;
        }
        abi.success
    }

    fn raise(&self, why: &str) -> c_int {
        log::error!("{why}; the call ends in an error");
        let Some(abi) = self.abi else {
            return guard::UNKNOWN_ERROR;
        };
        let code = codes::code_of(abi, abi.err_count, why);
        match self.at {
            At::Comm(comm) => guard::raise_on_leaving(comm, code),
            At::World => guard::raise_on_leaving(abi.comm_world, code),
            At::Window(window) => {
                native::win_call_errhandler(window, code);
            }
            At::File(file) => {
                native::file_call_errhandler(file, code);
            }
        }
        code
    }
}

fn extent_of(abi: &Abi, datatype: Datatype) -> Option<i64> {
    let (mut lb, mut extent) = (0isize, 0isize);
    let code = native::type_get_extent(datatype, Out::of(&mut lb), Out::of(&mut extent));
    (code == abi.success).then_some(extent as i64)
}

/// A committed type of `count` items of `datatype`, `extent` bytes apart as that has it, also where the count does not fit a
/// C `int`.
pub fn run_of(abi: &Abi, count: u64, datatype: Datatype, extent: i64) -> Option<OwnType> {
    /// Items in one of the blocks that a long run consists of.
    const BLOCK: u64 = 1 << 30;
    let (blocks, rest) = (count / BLOCK, count % BLOCK);
    let row = |count: c_int, of: Datatype| {
        OwnType::made(abi, |made| native::type_contiguous(count, of, made)).ok()
    };
    let blocks = c_int::try_from(blocks).ok()?;
    let behind = i128::from(blocks) * i128::from(BLOCK) * i128::from(extent);
    let places = [0, isize::try_from(behind).ok()?];
    let run = if blocks == 0 {
        row(rest as c_int, datatype)?
    } else {
        let block = row(BLOCK as c_int, datatype)?;
        let long = row(blocks, block.get())?;
        let lengths = [1, rest as c_int];
        let mut types = [abi.datatype_null; 2];
        let slots = Slots::of(&mut types);
        slots.set(abi, 0, long.get());
        slots.set(abi, 1, datatype);
        let (lengths, places, types) = (lengths.as_ptr(), places.as_ptr(), slots.as_ptr());
        // SAFETY: three arrays of two entries.
        let made = OwnType::made(abi, |made| unsafe {
            native::type_create_struct(2, lengths, places, types, made)
        });
        made.ok()?
    };
    run.commit(abi)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_named() {
        let mut narrow = Narrow::new(Function::AlltoallvC, At::World);
        assert_eq!(narrow.count("count", 7), 7);
        let counts = [1i64, -5, 3];
        // SAFETY: three entries.
        let array = unsafe { narrow.array("recvcounts", counts.as_ptr(), 3) };
        // SAFETY: as many were written, and are kept.
        assert_eq!(unsafe { std::slice::from_raw_parts(array, 3) }, [1, -5, 3]);
        assert!(narrow.refused.is_none());
        let displacements = [0isize, 1 << 40];
        // SAFETY: two entries.
        unsafe { narrow.array("rdispls", displacements.as_ptr(), 2) };
        narrow.count("later", i64::MAX);
        let said = narrow.refused.clone().unwrap_or_default();
        assert!(
            said.starts_with("MPI_Alltoallv_c: rdispls[1] is 1099511627776,"),
            "{said}"
        );
    }

    #[test]
    fn what_counts_for_nothing_may_be_anything() {
        let mut narrow = Narrow::new(Function::GatherC, At::World);
        let byte = Abi::STANDARD.byte;
        let items = narrow.items("recvcount", i64::MAX, byte, false);
        assert_eq!(items, (0, byte));
        // SAFETY: no entries.
        assert!(unsafe { narrow.array::<i64>("recvcounts", std::ptr::null(), 0) }.is_null());
        assert!(narrow.refused.is_none());
    }
}
