//! Classes of error codes.

use std::ffi::c_int;

use crate::mpi::{abi, codes, native};

/// `MPI_Error_class` (MPI 4.1 section 9.4).
///
/// # Safety
/// The arguments are those of the program's call.
pub unsafe fn error_class(errorcode: c_int, errorclass: *mut c_int) -> c_int {
    // SAFETY: passed on; the MPI library has written the class if it says so.
    unsafe {
        let code = native::error_class(errorcode, errorclass);
        if abi().is_some_and(|abi| code == abi.success) {
            *errorclass = codes::class_seen(*errorclass);
        }
        code
    }
}
