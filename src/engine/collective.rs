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
use crate::mpi::{native, Abi, Handle};

/// Starts a collective under the request that it is given.
pub type Start = Box<dyn Fn(*mut Handle) -> c_int + Send>;

/// Pointers that the program has lent to a persistent collective.
#[derive(Clone, Copy, Debug)]
pub struct Lent<T>(pub T);

// SAFETY: they are passed on to the MPI library only, in the program's calls.
unsafe impl<T> Send for Lent<T> {}

impl<T: Copy> Lent<T> {
    /// The pointers.
    pub fn get(&self) -> T {
        self.0
    }
}

/// What a persistent collective keeps alive: the program may free its types at once.
pub struct Held {
    abi: &'static Abi,
    types: Vec<Handle>,
    /// Arrays of handles, as the library reads them.
    arrays: Vec<Vec<usize>>,
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
    ///
    /// # Safety
    /// `datatype` is the program's; one that counts for nothing may be null.
    pub unsafe fn datatype(&mut self, datatype: Handle) -> Result<Handle, c_int> {
        let abi = self.abi;
        let is_null = abi.normalize(datatype) == abi.normalize(abi.datatype_null) || datatype == 0;
        // A predefined type is never freed, and reductions do not accept a duplicate of it.
        // SAFETY: passed on.
        if is_null || unsafe { types::is_predefined(abi, datatype) } {
            return Ok(datatype);
        }
        let mut copy = abi.datatype_null;
        // SAFETY: passed on; a live local.
        let code = unsafe { native::type_dup(datatype, &raw mut copy) };
        if code != abi.success {
            return Err(code);
        }
        self.types.push(copy);
        Ok(copy)
    }

    /// Like [`Held::datatype`], for an array of `length` of them.
    ///
    /// # Errors
    /// As [`Held::datatype`].
    ///
    /// # Safety
    /// As [`Held::datatype`]; `array` holds as many, or is null.
    pub unsafe fn datatypes(
        &mut self,
        array: *const c_void,
        length: usize,
    ) -> Result<*const c_void, c_int> {
        if array.is_null() || length == 0 {
            return Ok(array);
        }
        let mut copies = vec![0usize; length];
        for i in 0..length {
            // SAFETY: passed on; there is room for as many handles of any length.
            unsafe {
                let copy = self.datatype(self.abi.load(array, i))?;
                self.abi.store(copies.as_mut_ptr().cast(), i, copy);
            }
        }
        let start = copies.as_ptr().cast();
        self.arrays.push(copies);
        Ok(start)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        for datatype in &mut self.types {
            // SAFETY: a copy of ours.
            unsafe { native::type_free(datatype) };
        }
    }
}

/// A persistent collective.
pub struct Collective {
    handle: Handle,
    start: Start,
    active: Option<Handle>,
    _held: Held,
}

impl Engine {
    /// Makes a persistent collective.
    ///
    /// # Safety
    /// The arguments are those of the program's call; `make` uses what the program has lent for as long as
    /// the request lives.
    pub unsafe fn make_collective(
        &self,
        comm: Handle,
        request: *mut Handle,
        kept: Kept,
        make: impl FnOnce(&mut Held) -> Result<Start, c_int>,
    ) -> c_int {
        let abi = self.env.abi;
        let mut held = Held::new(abi, kept);
        let made = make(&mut held).and_then(|start| {
            // SAFETY: the program's communicator.
            Ok((start, unsafe { standing_request(abi, comm) }?))
        });
        let (start, handle) = match made {
            Ok(made) => made,
            Err(code) => return code,
        };
        let mut core = self.core.lock();
        let id = core.collectives.insert(Collective {
            handle,
            start,
            active: None,
            _held: held,
        });
        core.table.insert(handle, Entry::Collective(id));
        // SAFETY: the program's request.
        unsafe { abi.write(request, handle) };
        abi.success
    }

    /// Starts a persistent collective.
    pub(super) fn start_collective(&self, id: usize) -> c_int {
        let abi = self.env.abi;
        let mut active = abi.request_null;
        let mut core = self.core.lock();
        let collective = &mut core.collectives[id];
        let code = (collective.start)(&raw mut active);
        if code == abi.success {
            collective.active = Some(active);
        }
        code
    }
}

impl Core {
    /// Whether a persistent collective is under way.
    pub(super) fn is_collective_active(&self, id: usize) -> bool {
        self.collectives[id].active.is_some()
    }

    /// Completes the collective that is under way.
    ///
    /// # Safety
    /// MPI may be called; `status` is the program's.
    pub(super) unsafe fn finish_collective(&mut self, id: usize, status: *mut c_void) -> c_int {
        let collective = &mut self.collectives[id];
        // If none is active, the status is that of an inactive request.
        let mut request = collective.active.take().unwrap_or(collective.handle);
        // SAFETY: passed on; a request of ours.
        unsafe { native::wait(&raw mut request, status) }
    }

    /// Whether the collective that is under way is complete; lets MPI progress.
    pub(super) fn is_collective_complete(&self, env: &Env, id: usize) -> bool {
        let Some(request) = self.collectives[id].active else {
            return true;
        };
        let mut flag = 0;
        // SAFETY: a request of ours, asked about by the program's thread.
        let code =
            unsafe { native::request_get_status(request, &raw mut flag, env.abi.no_status()) };
        flag != 0 || code != env.abi.success
    }

    /// Forgets a persistent collective that is not under way any more.
    ///
    /// # Safety
    /// MPI may be called; the program has freed the request.
    pub(super) unsafe fn free_collective(&mut self, env: &Env, id: usize) -> c_int {
        // SAFETY: passed on.
        unsafe {
            self.finish_collective(id, env.abi.no_status());
            let mut handle = self.collectives.remove(id).handle;
            native::request_free(&raw mut handle)
        }
    }
}
