//! Classes of error codes.

use std::ffi::c_int;

use crate::mpi::{abi, codes, native, Out};

/// `MPI_Error_class` (MPI 4.1 section 9.4).
pub fn error_class(errorcode: c_int, errorclass: Out<'_, c_int>) -> c_int {
    let code = native::error_class(errorcode, errorclass);
    // The MPI library has written the class if it says so.
    if abi().is_some_and(|abi| code == abi.success) {
        errorclass.write(codes::class_seen(errorclass.read()));
    }
    code
}
