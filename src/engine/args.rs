//! The arguments of a send or a receive: what belongs together, and for how long it is lent.

use std::ffi::{c_int, c_void};
use std::ops::Deref;

use crate::mpi::{Comm, Datatype};

/// Mode of a send (MPI 4.1 section 3.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Mode {
    Standard,
    Buffered,
    Synchronous,
    Ready,
}

/// What a send is told.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct SendFields {
    pub mode: Mode,
    pub buffer: *const c_void,
    pub count: i64,
    pub datatype: Datatype,
    pub dest: c_int,
    pub tag: c_int,
    pub comm: Comm,
}

/// What a receive is told.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct RecvFields {
    pub buffer: *mut c_void,
    pub count: i64,
    pub datatype: Datatype,
    pub source: c_int,
    pub tag: c_int,
    pub comm: Comm,
}

/// Declares what nobody changes once it is made.
macro_rules! arguments {
    ($($(#[$doc:meta])* $name:ident $fields:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name($fields);

        impl $name {
            /// Of these fields.
            ///
            /// # Safety
            /// They are as the type's invariant has them.
            #[inline(always)]
            pub unsafe fn new(fields: $fields) -> $name {
                $name(fields)
            }
        }

        impl Deref for $name {
            type Target = $fields;

            #[inline(always)]
            fn deref(&self) -> &$fields {
                &self.0
            }
        }

        // SAFETY: plain arguments; the buffer is only used by the operation that it is lent to, by whoever holds the
        // engine's lock.
        unsafe impl Send for $name {}
    )*};
}

arguments! {
    /// The arguments of a send.
    ///
    /// Invariant: they are those of a call of the program's that is under way, or whose operation is; or the buffer holds
    /// so many items of the library's own that stay as they are until the operation is over.
    SendArgs SendFields;
    /// The arguments of a receive.
    ///
    /// Invariant: they are those of a call of the program's that is under way, or whose operation is; or the buffer has
    /// room for so many items of the library's own, and is touched by nobody else until the operation is over.
    RecvArgs RecvFields;
}

impl SendArgs {
    /// A send of other items to the same receiver.
    ///
    /// # Safety
    /// The buffer holds so many items, and they stay as they are until the operation is over.
    #[inline(always)]
    pub unsafe fn with_payload(
        &self,
        buffer: *const c_void,
        count: i64,
        datatype: Datatype,
    ) -> SendArgs {
        SendArgs(SendFields {
            buffer,
            count,
            datatype,
            ..self.0
        })
    }

    /// The same in another mode.
    #[inline(always)]
    pub fn in_mode(&self, mode: Mode) -> SendArgs {
        SendArgs(SendFields { mode, ..self.0 })
    }
}

impl RecvArgs {
    /// A receive of other items from the same sender.
    ///
    /// # Safety
    /// The buffer has room for so many items, and is touched by nobody else until the operation is over.
    #[inline(always)]
    pub unsafe fn with_payload(
        &self,
        buffer: *mut c_void,
        count: i64,
        datatype: Datatype,
    ) -> RecvArgs {
        RecvArgs(RecvFields {
            buffer,
            count,
            datatype,
            ..self.0
        })
    }
}
