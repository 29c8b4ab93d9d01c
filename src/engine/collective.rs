//! Persistent collectives for an MPI library that has none: each start is a non-blocking collective (MPI 4.1
//! section 6.13).
//!
//! As for a persistent engine send, the program holds a persistent request to MPI_PROC_NULL that is never
//! started.

use std::ffi::{c_int, c_void};

use super::requests::standing_request;
use crate::engine::core::{Core, Entry};
use crate::engine::types;
use crate::engine::{Engine, Env};
use crate::mpi::large::Kept;
use crate::mpi::owned::{OwnRequest, OwnType};
use crate::mpi::{Abi, Comm, Datatype, Handle, Out, Request, Slot, Slots, StatusOut};

/// Starts a collective under the request that it is given.
pub type Start = Box<dyn Fn(Slot<'_, Request>) -> c_int + Send>;

/// Pointers that the program has lent to a persistent collective.
#[derive(Clone, Copy, Debug)]
pub struct Pointers<T>(pub T);

// SAFETY: they are given to the MPI library only, in the program's calls.
unsafe impl<T> Send for Pointers<T> {}

impl<T: Copy> Pointers<T> {
    /// The pointers.
    pub fn get(&self) -> T {
        self.0
    }
}

/// What a persistent collective keeps alive: the program may free its types at once.
pub struct Held {
    abi: &'static Abi,
    types: Vec<OwnType>,
    /// Arrays of handles, as the library reads them.
    arrays: Vec<Vec<Datatype>>,
    _kept: Kept,
}

impl Held {
    fn new(abi: &'static Abi, kept: Kept) -> Held {
        Held {
            abi,
            types: Vec::new(),
            arrays: Vec::new(),
            _kept: kept,
        }
    }

    /// A type that lasts as long as the request.
    ///
    /// # Errors
    /// The MPI library's code.
    pub fn datatype(&mut self, datatype: Datatype) -> Result<Datatype, c_int> {
        let abi = self.abi;
        let is_null = abi.are_same(datatype, abi.datatype_null) || datatype.word() == 0;
        // A predefined type is never freed, and reductions do not accept a duplicate of it.
        if is_null || types::is_predefined(abi, datatype) {
            return Ok(datatype);
        }
        let copy = OwnType::duplicate(abi, datatype)?;
        let datatype = copy.get();
        self.types.push(copy);
        Ok(datatype)
    }

    /// Like [`Held::datatype`], for an array of `length` of them.
    ///
    /// # Errors
    /// As [`Held::datatype`].
    ///
    /// # Safety
    /// `array` holds as many, or is null.
    pub unsafe fn datatypes(
        &mut self,
        array: *const c_void,
        length: usize,
    ) -> Result<*const c_void, c_int> {
        let abi = self.abi;
        if array.is_null() || length == 0 {
            return Ok(array);
        }
        // SAFETY: as many, as the caller says; they are only read.
        let given = unsafe { Slots::new(array.cast_mut(), length as c_int) };
        let mut copies = vec![abi.datatype_null; length];
        let places = Slots::of_types(&mut copies);
        for i in 0..length {
            places.set(abi, i, self.datatype(given.get(abi, i))?);
        }
        let start = places.as_ptr().cast_const();
        self.arrays.push(copies);
        Ok(start)
    }
}

/// A persistent collective.
pub struct Collective {
    handle: OwnRequest,
    start: Start,
    active: Option<OwnRequest>,
    _held: Held,
}

impl Engine {
    /// Makes a persistent collective.
    pub fn make_collective(
        &self,
        comm: Comm,
        request: Slot<'_, Request>,
        kept: Kept,
        make: impl FnOnce(&mut Held) -> Result<Start, c_int>,
    ) -> c_int {
        let abi = self.env.abi;
        let mut held = Held::new(abi, kept);
        let made = make(&mut held).and_then(|start| Ok((start, standing_request(abi, comm)?)));
        let (start, own) = match made {
            Ok(made) => made,
            Err(code) => return code,
        };
        let handle = own.handle();
        let mut core = self.core.lock();
        let id = core.collectives.insert(Collective {
            handle: own,
            start,
            active: None,
            _held: held,
        });
        core.table.insert(handle, Entry::Collective(id));
        request.write(abi, handle);
        abi.success
    }

    /// Starts a persistent collective.
    pub(super) fn start_collective(&self, id: usize) -> c_int {
        let abi = self.env.abi;
        let mut core = self.core.lock();
        let collective = &mut core.collectives[id];
        match OwnRequest::made(abi, |request| (collective.start)(request)) {
            Ok(active) => {
                collective.active = Some(active);
                abi.success
            }
            Err(code) => code,
        }
    }
}

impl Core {
    /// Whether a persistent collective is under way.
    pub(super) fn is_collective_active(&self, id: usize) -> bool {
        self.collectives[id].active.is_some()
    }

    /// Completes the collective that is under way.
    pub(super) fn finish_collective(&mut self, id: usize, status: StatusOut<'_>) -> c_int {
        let collective = &mut self.collectives[id];
        // If none is active, the status is that of an inactive request.
        match collective.active.take() {
            Some(mut active) => active.wait(status),
            None => collective.handle.wait(status),
        }
    }

    /// Whether the collective that is under way is complete; lets MPI progress.
    pub(super) fn is_collective_complete(&self, env: &Env, id: usize) -> bool {
        let Some(request) = &self.collectives[id].active else {
            return true;
        };
        let mut flag = 0;
        let code = request.status(Out::of(&mut flag), env.abi.no_status());
        flag != 0 || code != env.abi.success
    }

    /// Forgets a persistent collective that is not under way any more.
    pub(super) fn free_collective(&mut self, env: &Env, id: usize) -> c_int {
        self.finish_collective(id, env.abi.no_status());
        self.collectives.remove(id).handle.free()
    }
}
