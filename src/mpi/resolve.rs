//! From the list of MPI functions to callable ones: the enumeration, the table of addresses, `native::*`.

use super::guard::UNKNOWN_ERROR;
use super::{library, Function, Handle};
use std::ffi::{c_int, c_void, CStr};
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// What the preload library does with an MPI function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Exported; the engine decides.
    Taken,
    /// Exported; called natively while the helper serves peers.
    Watched,
    /// Exported; called natively after a look at its buffers.
    Checked,
    /// Not exported.
    Native,
}

/// Address of each function; null: not looked up yet, [`ABSENT`]: the library has none.
static ADDRESSES: [AtomicPtr<c_void>; Function::COUNT] =
    [const { AtomicPtr::new(null_mut()) }; Function::COUNT];

/// Stands for a function that the library lacks. No function lies at address 1.
const ABSENT: usize = 1;

/// Look up the exported `MPI_` names first: see [`prefer_exported`].
static PREFER_EXPORTED: AtomicBool = AtomicBool::new(false);

/// Makes `native::*` call what a program would call, `MPI_X` in the global scope, so that a preloaded library or a tool
/// sees the calls. For executables that use MPI like any program; to be called before the first `native` call.
pub fn prefer_exported() {
    PREFER_EXPORTED.store(true, Ordering::Relaxed);
}

/// Address of a function that has been looked up and found.
#[inline(always)]
pub(super) fn known(function: Function) -> Option<*mut c_void> {
    let address = ADDRESSES[function as usize].load(Ordering::Relaxed);
    (address.addr() > ABSENT).then_some(address)
}

/// Address of a function, or `None` while no MPI library is in the process, or where it lacks the function.
#[cold]
#[inline(never)]
pub(super) fn look_up(function: Function) -> Option<*mut c_void> {
    let entry = &ADDRESSES[function as usize];
    if entry.load(Ordering::Relaxed).addr() == ABSENT {
        return None;
    }
    let library = library::find()?;
    let found = symbol(library, function.symbol());
    entry.store(
        found.unwrap_or(without_provenance_mut(ABSENT)),
        Ordering::Relaxed,
    );
    found
}

/// `pmpi` is a `PMPI_` or `PMPIX_` name; Open MPI has its extensions under `MPIX_` only.
fn symbol(library: &library::Library, pmpi: &'static CStr) -> Option<*mut c_void> {
    let exported = &pmpi[1..];
    let extension = exported.to_bytes().starts_with(b"MPIX_");
    let of_library = library.symbol(pmpi).or_else(|| {
        if extension {
            library.symbol(exported)
        } else {
            None
        }
    })?;
    // A preloaded library exports every name, so what the MPI library lacks must have been ruled out before.
    if PREFER_EXPORTED.load(Ordering::Relaxed) {
        return library::global_symbol(exported).or(Some(of_library));
    }
    Some(of_library)
}

/// What a native function returns where the library lacks it.
pub(super) trait Unavailable {
    fn unavailable() -> Self;
}

impl Unavailable for c_int {
    #[cold]
    fn unavailable() -> c_int {
        super::abi().map_or(UNKNOWN_ERROR, |abi| abi.err_other)
    }
}

impl Unavailable for f64 {
    fn unavailable() -> f64 {
        0.0
    }
}

impl Unavailable for isize {
    fn unavailable() -> isize {
        0
    }
}

impl<H: Handle> Unavailable for H {
    fn unavailable() -> H {
        // SAFETY: no handle at all, as what cannot be asked for has none; only functions that are raw return handles.
        unsafe { H::from_word(0) }
    }
}

/// Declares the enumeration, the names and classes, and one native function a line.
macro_rules! functions {
    (
        variadic { $($variadic:ident $variadic_name:literal $variadic_class:ident;)* }
        $($variant:ident $name:literal $class:ident $kind:ident $native:ident($($argument:ident: $type:ty),*) -> $result:ty $(=> $module:ident::$substitute:ident($($given:ident),*))?;)*
    ) => {
        /// An MPI function.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Function {
            $(#[doc = concat!("`", $name, "`")] #[doc(alias = $name)] $variant,)*
            $(#[doc = concat!("`", $variadic_name, "`")] $variadic,)*
        }

        impl Function {
            /// Every function, in the order of the table.
            pub const ALL: &'static [Function] = &[$(Function::$variant,)* $(Function::$variadic,)*];
            /// How many functions there are.
            pub const COUNT: usize = Self::ALL.len();
            const SYMBOLS: [&'static str; Self::COUNT] = [$(concat!("P", $name, "\0"),)* $(concat!("P", $variadic_name, "\0"),)*];
            const CLASSES: [Class; Self::COUNT] = [$(Class::$class,)* $(Class::$variadic_class,)*];

            /// The C name: `MPI_Send`.
            pub const fn name(self) -> &'static str {
                match self { $(Function::$variant => $name,)* $(Function::$variadic => $variadic_name,)* }
            }

            /// What the preload library does with it.
            pub const fn class(self) -> Class {
                Self::CLASSES[self as usize]
            }

            /// Whether the MPI library in this process has it. False while there is none.
            #[inline]
            pub fn available(self) -> bool {
                known(self).or_else(|| look_up(self)).is_some()
            }

            /// The function of this C name.
            pub fn by_name(name: &str) -> Option<Function> {
                Self::ALL.iter().copied().find(|function| function.name() == name)
            }

            pub(super) fn symbol(self) -> &'static CStr {
                CStr::from_bytes_with_nul(Self::SYMBOLS[self as usize].as_bytes()).unwrap_or(c"")
            }
        }

        /// The functions of the MPI library itself, behind their `PMPI_` names.
        ///
        /// Those whose parameters say all that they ask of their caller are safe: see [`handles`](super::handles). Where
        /// the library lacks the function, an error code (or 0, for what returns no error code) comes back, unless others
        /// stand for it: since the preload library exports it, a program may find it and rely on it.
        pub mod native {
            use super::*;
            $(native!($kind $native, $name, ($($argument: $type),*) -> $result);)*
        }

        /// All of them as C has them.
        mod raw {
            use super::*;
            $(
                #[doc = concat!("Calls `P", $name, "`.\n\n# Safety\nAs for the C function of the MPI library in this process.")]
                #[inline(always)]
                #[allow(clippy::too_many_arguments, reason = "the parameters of MPI's own call")]
                pub unsafe fn $native($($argument: $type),*) -> $result {
                    type Signature = unsafe extern "C-unwind" fn($($type),*) -> $result;

                    // Apart, so that the usual way saves no register.
                    #[cold]
                    #[inline(never)]
                    #[allow(unused_unsafe, reason = "some of the others are safe")]
                    unsafe fn first_call($($argument: $type),*) -> $result {
                        let found = look_up(Function::$variant);
                        // The others need a library; without one there is none to be found.
                        $(if found.is_none() && super::super::library_version().is_some() {
                            // SAFETY: does the same by other functions; the caller keeps the contract.
                            return unsafe { $module::$substitute($($given),*) };
                        })?
                        match found {
                            // SAFETY: as below.
                            Some(function) => unsafe { std::mem::transmute::<*mut c_void, Signature>(function)($($argument),*) },
                            None => <$result as Unavailable>::unavailable(),
                        }
                    }

                    match known(Function::$variant) {
                        // SAFETY: the address is that of a function of this name in the MPI library, whose C signature
                        // on every known ABI has these types (handles in the low half of a register); the caller keeps
                        // the contract of that function.
                        Some(function) => unsafe { std::mem::transmute::<*mut c_void, Signature>(function)($($argument),*) },
                        // SAFETY: it calls the same function, once that is found.
                        None => unsafe { first_call($($argument),*) },
                    }
                }
            )*
        }
    };
}

/// One native function for the engine.
macro_rules! native {
    (raw $native:ident, $name:literal, ($($argument:ident: $type:ty),*) -> $result:ty) => {
        pub use raw::$native;
    };
    (safe $native:ident, $name:literal, ($($argument:ident: $type:ty),*) -> $result:ty) => {
        #[doc = concat!("Calls `P", $name, "`.")]
        #[inline(always)]
        #[allow(clippy::too_many_arguments, reason = "the parameters of MPI's own call")]
        pub fn $native($($argument: $type),*) -> $result {
            // SAFETY: handles are valid, and pointers are to what the function reads or writes, by the invariants of
            // their types; it ends no handle.
            unsafe { raw::$native($($argument),*) }
        }
    };
}
pub(super) use {functions, native};

#[cfg(test)]
mod tests {
    use super::super::native;
    use super::*;

    #[test]
    fn without_a_library_a_function_is_an_error_code() {
        // The test executable links no MPI library.
        assert!(!Function::Send.available());
        let comm = super::super::Abi::STANDARD.comm_world;
        assert_eq!(native::barrier(comm), UNKNOWN_ERROR);
        assert_eq!(native::wtime().to_bits(), 0);
    }

    #[test]
    fn names_and_symbols_agree() {
        for function in Function::ALL {
            assert_eq!(
                function.symbol().to_bytes(),
                format!("P{}", function.name()).as_bytes()
            );
        }
        assert_eq!(
            Function::TypeCreateStructC.name(),
            "MPI_Type_create_struct_c"
        );
        assert_eq!(Function::Send.class(), Class::Taken);
        assert_eq!(Function::Barrier.class(), Class::Watched);
        assert_eq!(Function::Pcontrol.class(), Class::Native);
    }
}
