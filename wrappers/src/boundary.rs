//! What every exported MPI function does before and after the engine: pass the call on while the library is not armed
//! or this thread is inside it already, and let no panic out.
//!
//! `MPI_X` and `PMPI_X` share one body and never call each other by name: a tool in the executable may define either. All
//! that `MPI_X` does besides is to let a tool that stands behind the library have the call first.

use anabranch_engine::mpi::guard::Seen;
use anabranch_engine::mpi::{guard, Function};
use std::ffi::c_int;
use std::panic::{catch_unwind, AssertUnwindSafe};

/// Where the calls go.
#[cfg(not(native_entries))]
pub(crate) use anabranch_engine::entry;

/// With `--cfg native_entries` every call goes to the MPI library: to measure and test the boundary alone.
#[cfg(native_entries)]
pub(crate) use crate::native_entries as entry;

/// Runs the engine's part of a taken call. A panic becomes an error code.
#[inline(always)]
pub(crate) fn guarded(
    function: Function,
    seen: impl FnOnce() -> Seen,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        guard::announce(function, seen);
        call()
    }));
    match outcome {
        Ok(code) => code,
        Err(payload) => {
            let code = guard::panicked(function, &*payload);
            // The payload's own destructor might panic.
            std::mem::forget(payload);
            code
        }
    }
}

/// Runs the engine's part around a watched call. A panic is logged, and the call is made all the same: the other ranks
/// of a collective are waiting for it.
#[inline(always)]
pub(crate) fn around<T>(
    function: Function,
    seen: impl FnOnce() -> Seen,
    tell: impl FnOnce() -> T,
) -> Option<T> {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        guard::announce(function, seen);
        tell()
    }));
    match outcome {
        Ok(scope) => Some(scope),
        Err(payload) => {
            guard::panicked_around(function, &*payload);
            std::mem::forget(payload);
            None
        }
    }
}

/// Ends what [`around`] began.
#[inline(always)]
pub(crate) fn after<T>(function: Function, scope: Option<T>) {
    if std::mem::needs_drop::<T>() {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(scope))) {
            guard::panicked_around(function, &*payload);
            std::mem::forget(payload);
        }
    }
}

/// What a recorded call has to say, out of its arguments by their names.
macro_rules! seen {
    ($($argument:ident)*) => {{
        #[allow(unused_imports, reason = "not every function has one of them")]
        use anabranch_engine::mpi::guard::Argument as _;
        #[allow(unused_mut, reason = "not every function has one of them")]
        let mut seen = anabranch_engine::mpi::guard::Seen::NOTHING;
        $(crate::boundary::seen_one!(seen $argument $argument);)*
        seen
    }};
}

macro_rules! seen_one {
    ($seen:ident count $value:ident) => {
        $seen.count = $value.number()
    };
    ($seen:ident sendcount $value:ident) => {
        $seen.count = $value.number()
    };
    ($seen:ident incount $value:ident) => {
        $seen.count = $value.number()
    };
    ($seen:ident datatype $value:ident) => {
        $seen.datatype = $value.datatype()
    };
    ($seen:ident sendtype $value:ident) => {
        $seen.datatype = $value.datatype()
    };
    ($seen:ident dest $value:ident) => {
        $seen.peer = $value.number() as c_int
    };
    ($seen:ident source $value:ident) => {
        $seen.source($value.number() as c_int)
    };
    ($seen:ident root $value:ident) => {
        $seen.peer = $value.number() as c_int
    };
    ($seen:ident tag $value:ident) => {
        $seen.tag = $value.number() as c_int
    };
    ($seen:ident sendtag $value:ident) => {
        $seen.tag = $value.number() as c_int
    };
    ($seen:ident comm $value:ident) => {
        $seen.comm = $value.comm()
    };
    ($seen:ident $other:ident $value:ident) => {};
}

/// Exports functions under both names. An exported function is a jump: nothing but the body looks at the arguments.
macro_rules! export {
    ($bodies:ident; $($variant:ident $mpi:ident $pmpi:ident $name:ident($($argument:ident: $type:ty),*);)*) => {$(
        #[no_mangle]
        #[allow(non_snake_case, clippy::too_many_arguments, reason = "the parameters of MPI's own call")]
        unsafe extern "C-unwind" fn $mpi($($argument: $type),*) -> c_int {
            use crate::boundary::entry;
            use anabranch_engine::mpi::{tools, Function};

            /// By way of a tool, if there is one. Apart, so that all other calls remain jumps.
            #[cold]
            #[inline(never)]
            unsafe fn by_tool($($argument: $type),*) -> c_int {
                let Some(next) = tools::next(Function::$variant) else {
                    // SAFETY: the arguments are the program's, passed on as they are.
                    return unsafe { $bodies::$name($($argument),*) };
                };
                type Signature = unsafe extern "C-unwind" fn($($type),*) -> c_int;
                // SAFETY: a function of this name has this C signature in every tool.
                let next = unsafe { std::mem::transmute::<*mut c_void, Signature>(next) };
                // SAFETY: as above.
                let code = unsafe { next($($argument),*) };
                entry::after_tool(Function::$variant);
                code
            }

            // Called by a pointer, so that the compiler leaves both the C convention, and this a jump.
            let on: unsafe fn($($type),*) -> c_int = if tools::may_be_behind() {
                by_tool
            } else {
                $bodies::$name
            };
            // SAFETY: the arguments are the program's, passed on as they are.
            unsafe { on($($argument),*) }
        }

        #[no_mangle]
        #[allow(non_snake_case, clippy::too_many_arguments, reason = "the parameters of MPI's own call")]
        unsafe extern "C-unwind" fn $pmpi($($argument: $type),*) -> c_int {
            // SAFETY: the arguments are the program's, passed on as they are.
            unsafe { $bodies::$name($($argument),*) }
        }
    )*};
}

/// Functions about which the engine decides.
macro_rules! taken {
    ($($variant:ident $mpi:ident $pmpi:ident $name:ident($($argument:ident: $type:ty),*);)*) => {
        crate::boundary::decided! { enter_armed, taken_bodies; $($variant $name($($argument: $type),*);)* }
        crate::boundary::export! { taken_bodies; $($variant $mpi $pmpi $name($($argument: $type),*);)* }
    };
}

/// As [`taken`], passed on while the library stands aside.
macro_rules! messages {
    ($($variant:ident $mpi:ident $pmpi:ident $name:ident($($argument:ident: $type:ty),*);)*) => {
        crate::boundary::decided! { enter_taking, messages_bodies; $($variant $name($($argument: $type),*);)* }
        crate::boundary::export! { messages_bodies; $($variant $mpi $pmpi $name($($argument: $type),*);)* }
    };
}

/// As [`taken`], reached also while the library is not armed.
macro_rules! arming {
    ($($variant:ident $mpi:ident $pmpi:ident $name:ident($($argument:ident: $type:ty),*);)*) => {
        crate::boundary::decided! { enter_arming, arming_bodies; $($variant $name($($argument: $type),*);)* }
        crate::boundary::export! { arming_bodies; $($variant $mpi $pmpi $name($($argument: $type),*);)* }
    };
}

/// As [`messages`]; what the MPI library lacks reaches the entry point also while messages are passed on.
macro_rules! composed {
    ($($variant:ident $mpi:ident $pmpi:ident $name:ident($($argument:ident: $type:ty),*);)*) => {
        mod composed_bodies {
            use super::*;
            use crate::boundary::{entry, guarded, seen};
            use anabranch_engine::mpi::{guard, native, Function};
            $(
                #[inline(never)]
                #[allow(clippy::too_many_arguments, reason = "the parameters of MPI's own call")]
                #[allow(unused_unsafe, reason = "what has no bare pointer asks nothing of its caller")]
                pub(super) unsafe fn $name($($argument: $type),*) -> c_int {
                    let mut counted = None;
                    let inside = guard::enter_taking().or_else(|| {
                        counted = guard::pass_on(Function::$variant);
                        let lacks = entry::is_lacking(Function::$variant);
                        lacks.then(guard::enter_composing).flatten()
                    });
                    let Some(_inside) = inside else {
                        // SAFETY: the arguments are the program's, passed on as they are.
                        return unsafe { native::$name($($argument),*) };
                    };
                    // SAFETY: as above; the entry point has the contract of the C function.
                    guarded(Function::$variant, move || seen!($($argument)*), || unsafe { entry::$name($($argument),*) })
                }
            )*
        }
        crate::boundary::export! { composed_bodies; $($variant $mpi $pmpi $name($($argument: $type),*);)* }
    };
}

/// Bodies that call the engine's entry point of the same name. `$enter` of the gate says when; otherwise the call
/// goes on at once.
macro_rules! decided {
    ($enter:ident, $bodies:ident; $($variant:ident $name:ident($($argument:ident: $type:ty),*);)*) => {
        mod $bodies {
            use super::*;
            use crate::boundary::{entry, guarded, seen};
            use anabranch_engine::mpi::{guard, native, Function};
            $(
                #[inline(never)]
                #[allow(clippy::too_many_arguments, reason = "the parameters of MPI's own call")]
                #[allow(unused_unsafe, reason = "what has no bare pointer asks nothing of its caller")]
                pub(super) unsafe fn $name($($argument: $type),*) -> c_int {
                    let Some(_inside) = guard::$enter() else {
                        let _counted = guard::pass_on(Function::$variant);
                        // SAFETY: the arguments are the program's, passed on as they are.
                        return unsafe { native::$name($($argument),*) };
                    };
                    // SAFETY: as above; the entry point has the contract of the C function.
                    guarded(Function::$variant, move || seen!($($argument)*), || unsafe { entry::$name($($argument),*) })
                }
            )*
        }
    };
}

/// Functions that are called natively while the helper serves.
macro_rules! watched {
    ($($variant:ident $mpi:ident $pmpi:ident $name:ident($($argument:ident: $type:ty),*) [$($buffer:ident),*];)*) => {
        mod watched_bodies {
            use super::*;
            use crate::boundary::{after, around, entry, seen};
            use anabranch_engine::mpi::{guard, native, Function};
            $(
                #[inline(never)]
                #[allow(clippy::too_many_arguments, reason = "the parameters of MPI's own call")]
                #[allow(unused_unsafe, reason = "what has no bare pointer asks nothing of its caller")]
                pub(super) unsafe fn $name($($argument: $type),*) -> c_int {
                    let Some(_inside) = guard::enter_taking() else {
                        let _counted = guard::count_aside(Function::$variant);
                        // SAFETY: the arguments are the program's, passed on as they are.
                        return unsafe { native::$name($($argument),*) };
                    };
                    let buffers: &[*const c_void] = &[$($buffer.cast()),*];
                    let scope = around(Function::$variant, move || seen!($($argument)*), || entry::blocking(Function::$variant, buffers));
                    // SAFETY: as above.
                    let code = unsafe { native::$name($($argument),*) };
                    after(Function::$variant, scope);
                    code
                }
            )*
        }
        crate::boundary::export! { watched_bodies; $($variant $mpi $pmpi $name($($argument: $type),*);)* }
    };
}

/// Functions that are called natively after a look at their buffers.
macro_rules! checked {
    ($($variant:ident $mpi:ident $pmpi:ident $name:ident($($argument:ident: $type:ty),*) [$($buffer:ident),*];)*) => {
        mod checked_bodies {
            use super::*;
            use crate::boundary::{around, entry, seen};
            use anabranch_engine::mpi::{guard, native, Function};
            $(
                #[inline(never)]
                #[allow(clippy::too_many_arguments, reason = "the parameters of MPI's own call")]
                #[allow(unused_unsafe, reason = "what has no bare pointer asks nothing of its caller")]
                pub(super) unsafe fn $name($($argument: $type),*) -> c_int {
                    let inside = guard::enter_taking();
                    if inside.is_some() {
                        let buffers: &[*const c_void] = &[$($buffer.cast()),*];
                        let _ = around(Function::$variant, move || seen!($($argument)*), || entry::look_at(Function::$variant, buffers));
                    }
                    // Its time is that until it returns; where nobody wants it, the library is left before.
                    let _inside = inside.filter(|_| guard::is_timed());
                    // SAFETY: the arguments are the program's, passed on as they are.
                    unsafe { native::$name($($argument),*) }
                }
            )*
        }
        crate::boundary::export! { checked_bodies; $($variant $mpi $pmpi $name($($argument: $type),*);)* }
    };
}

pub(crate) use {
    arming, checked, composed, decided, export, messages, seen, seen_one, taken, watched,
};
