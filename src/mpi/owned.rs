//! Handles that the MPI library has made for us, or given us a reference with. Except requests they are freed when they
//! are dropped; MPI keeps what operations under way still need.

use super::{native, Abi, Comm, Datatype, Errhandler, Group, Out, Request, Slot, StatusOut};
use std::ffi::c_int;

macro_rules! owned {
    ($($(#[$doc:meta])* $name:ident $handle:ident $null:ident $free:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name($handle);

        impl $name {
            /// What a call makes or gives, which writes it into the slot.
            ///
            /// # Errors
            /// The call's code.
            pub fn made(abi: &Abi, make: impl FnOnce(Slot<'_, $handle>) -> c_int) -> Result<$name, c_int> {
                let mut made = abi.$null;
                match make(Slot::of(&mut made)) {
                    code if code == abi.success => Ok($name(made)),
                    code => Err(code),
                }
            }

            /// One that came otherwise.
            ///
            /// # Safety
            /// The reference is ours to give back.
            pub unsafe fn given(handle: $handle) -> $name {
                $name(handle)
            }

            /// The handle. It is used while this lives, or passed to an operation meanwhile.
            #[inline]
            pub fn get(&self) -> $handle {
                self.0
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                native::$free(Slot::of(&mut self.0));
            }
        }
    )*};
}

owned! {
    /// A datatype.
    OwnType Datatype datatype_null type_free;
    /// A group.
    OwnGroup Group group_null group_free;
    /// A reference to an error handler.
    OwnErrhandler Errhandler errhandler_null errhandler_free;
    /// A communicator.
    OwnComm Comm comm_null comm_free;
}

/// A request that nobody but its owner ends, although the program may hold it, too. Null once it has ended.
#[derive(Debug)]
pub struct OwnRequest(Request);

impl OwnRequest {
    /// None.
    pub fn null(abi: &Abi) -> OwnRequest {
        OwnRequest(abi.request_null)
    }

    /// One that came otherwise.
    ///
    /// # Safety
    /// It has not ended, and nobody else ends it.
    pub unsafe fn given(request: Request) -> OwnRequest {
        OwnRequest(request)
    }

    /// What a call starts or makes, which writes it into the slot.
    ///
    /// # Errors
    /// The call's code.
    #[inline]
    pub fn made(
        abi: &Abi,
        make: impl FnOnce(Slot<'_, Request>) -> c_int,
    ) -> Result<OwnRequest, c_int> {
        let mut made = abi.request_null;
        match make(Slot::of(&mut made)) {
            code if code == abi.success => Ok(OwnRequest(abi.normalize(made))),
            code => Err(code),
        }
    }

    /// Its handle.
    #[inline]
    pub fn handle(&self) -> Request {
        self.0
    }

    /// Whether it has ended.
    #[inline]
    pub fn is_null(&self, abi: &Abi) -> bool {
        abi.are_same(self.0, abi.request_null)
    }

    /// For a call that starts an operation under it.
    #[inline]
    pub fn slot(&mut self) -> Slot<'_, Request> {
        Slot::of(&mut self.0)
    }

    /// `MPI_Wait`.
    pub fn wait(&mut self, status: StatusOut<'_>) -> c_int {
        native::wait(self.slot(), status)
    }

    /// Tests it. Returns the code of the operation once that is over; the request is then null.
    pub fn test(&mut self, abi: &Abi) -> Option<c_int> {
        if self.is_null(abi) {
            return Some(abi.success);
        }
        let mut flag = 0;
        let code = native::test(self.slot(), Out::of(&mut flag), abi.no_status());
        if code != abi.success {
            *self = OwnRequest::null(abi);
            return Some(code);
        }
        (flag != 0).then_some(code)
    }

    /// `MPI_Request_get_status`.
    pub fn status(&self, flag: Out<'_, c_int>, status: StatusOut<'_>) -> c_int {
        // SAFETY: it has not ended, or is null.
        unsafe { native::request_get_status(self.0, flag, status) }
    }

    /// `MPI_Cancel`.
    pub fn cancel(&mut self) -> c_int {
        native::cancel(self.slot())
    }

    /// `MPI_Start`.
    pub fn start(&mut self) -> c_int {
        native::start(self.slot())
    }

    /// `MPI_Request_free`.
    pub fn free(mut self) -> c_int {
        native::request_free(self.slot())
    }

    /// Completes a generalized request. `MPI_Wait` then ends it.
    pub fn complete(&mut self) {
        // SAFETY: it has not ended, or is null.
        unsafe { native::grequest_complete(self.0) };
    }
}

impl OwnType {
    /// A duplicate of a type.
    ///
    /// # Errors
    /// The MPI library's code.
    pub fn duplicate(abi: &Abi, datatype: Datatype) -> Result<OwnType, c_int> {
        OwnType::made(abi, |made| native::type_dup(datatype, made))
    }

    /// Commits the type.
    pub fn commit(mut self, abi: &Abi) -> Option<OwnType> {
        (native::type_commit(Slot::of(&mut self.0)) == abi.success).then_some(self)
    }
}

/// The ranks that members of a group have in MPI_COMM_WORLD, or MPI_UNDEFINED.
///
/// # Errors
/// The MPI library's code.
pub fn world_ranks(abi: &Abi, group: Group, ranks: &[c_int]) -> Result<Vec<c_int>, c_int> {
    let world = OwnGroup::made(abi, |group| native::comm_group(abi.comm_world, group))?;
    let mut found = vec![abi.undefined; ranks.len()];
    let (from, to) = (ranks.as_ptr(), found.as_mut_ptr());
    // SAFETY: both arrays have as many ranks.
    let code = unsafe {
        native::group_translate_ranks(group, ranks.len() as c_int, from, world.get(), to)
    };
    if code == abi.success {
        Ok(found)
    } else {
        Err(code)
    }
}
