//! Functions that the program calls in C.

/// Declares functions with the parameters of C. What a body passes on to the MPI library, or makes arguments of, is what
/// the program has passed, or what the library has made of that.
macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),* $(,)?) { $($body:tt)* })*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// The arguments are those of the program's call.
        #[allow(clippy::too_many_arguments, reason = "the parameters of MPI's own call")]
        #[allow(clippy::useless_conversion, reason = "counts are of two types")]
        #[allow(unused_unsafe, reason = "some calls have no bare pointer")]
        pub unsafe fn $name($($argument: $type),*) -> ::std::ffi::c_int {
            // SAFETY: the arguments belong together, and what they point to is lent to the call, or to its operation.
            unsafe { $($body)* }
        }
    )*};
}
pub(crate) use calls;
