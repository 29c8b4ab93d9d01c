//! Calls on several requests at once.

use super::{native, Abi, Out, Outs, Request, Slots, StatusOut, Statuses};
use std::ffi::c_int;

/// Declares calls whose first arguments are a number of requests and their array.
macro_rules! several {
    ($($name:ident($($argument:ident: $type:ty $(=> $part:ident)?),*);)*) => {$(
        #[doc = concat!("`MPI_", stringify!($name), "`, name in snake case.")]
        #[inline(always)]
        pub fn $name(requests: Slots<'_, Request>, $($argument: $type),*) -> c_int {
            // SAFETY: there are so many requests, and as many places for results, by the invariants of the types.
            unsafe { native::$name(requests.count(), requests.as_ptr(), $($argument$(.$part())?),*) }
        }
    )*};
}

several! {
    startall();
    waitall(statuses: Statuses<'_> => as_ptr);
    testall(flag: Out<'_, c_int>, statuses: Statuses<'_> => as_ptr);
    waitany(index: Out<'_, c_int>, status: StatusOut<'_>);
    testany(index: Out<'_, c_int>, flag: Out<'_, c_int>, status: StatusOut<'_>);
    waitsome(outcount: Out<'_, c_int>, indices: Outs<'_, c_int> => as_ptr, statuses: Statuses<'_> => as_ptr);
    testsome(outcount: Out<'_, c_int>, indices: Outs<'_, c_int> => as_ptr, statuses: Statuses<'_> => as_ptr);
    request_get_status_any(index: Out<'_, c_int>, flag: Out<'_, c_int>, status: StatusOut<'_>);
    request_get_status_some(outcount: Out<'_, c_int>, indices: Outs<'_, c_int> => as_ptr, statuses: Statuses<'_> => as_ptr);
}

impl Slots<'_, Request> {
    /// `MPI_Request_get_status` of request `i`.
    pub fn status(self, abi: &Abi, i: usize, flag: Out<'_, c_int>, status: StatusOut<'_>) -> c_int {
        let request = self.get(abi, i);
        // SAFETY: a request of the program's call, or null.
        unsafe { native::request_get_status(request, flag, status) }
    }
}

/// Some of the requests of a call, one behind the other.
#[derive(Debug)]
pub struct Part<'a> {
    of: Slots<'a, Request>,
    indices: Vec<usize>,
    handles: Vec<Request>,
}

impl<'a> Part<'a> {
    /// None of them.
    pub fn new(of: Slots<'a, Request>) -> Part<'a> {
        Part {
            of,
            indices: Vec::new(),
            handles: Vec::new(),
        }
    }

    /// Adds request `i`.
    pub fn push(&mut self, i: usize) {
        self.indices.push(i);
    }

    /// All are added.
    pub fn close(&mut self, abi: &Abi) {
        self.handles = vec![abi.request_null; self.indices.len()];
        let places = Slots::of(&mut self.handles);
        for (k, i) in self.indices.iter().enumerate() {
            places.set(abi, k, self.of.get(abi, *i));
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.indices.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.indices.is_empty()
    }

    /// Which request of the call each is.
    pub fn indices(&self) -> &[usize] {
        &self.indices
    }

    /// For a call on them.
    pub fn slots(&mut self) -> Slots<'_, Request> {
        Slots::of(&mut self.handles)
    }

    /// Puts what such a call has left of one back to where the program has it.
    pub fn put_back(&mut self, abi: &Abi, k: usize) {
        let left = self.slots().get(abi, k);
        self.of.set(abi, self.indices[k], left);
    }

    /// None is left.
    pub fn clear(&mut self) {
        self.indices.clear();
        self.handles.clear();
    }
}
