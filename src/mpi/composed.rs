//! Functions that MPI 3.1 lacks, made of those that it has (MPI 4.0), for libraries of that standard.

use std::ffi::{c_char, c_int, CStr};

use super::{abi, guard, native, Abi, Handle};

/// `MPI_Comm_idup_with_info` by `MPI_Comm_idup`: hints may be ignored.
///
/// # Safety
/// The arguments are those of the program's call, here and below.
pub unsafe fn comm_idup_with_info(
    comm: Handle,
    _info: Handle,
    newcomm: *mut Handle,
    request: *mut Handle,
) -> c_int {
    // SAFETY: passed on.
    unsafe { native::comm_idup(comm, newcomm, request) }
}

/// `MPI_Comm_create_from_group` by `MPI_Comm_create_group` over MPI_COMM_WORLD: where there are no sessions, groups come from
/// nowhere else.
///
/// # Safety
/// As [`comm_idup_with_info`].
pub unsafe fn comm_create_from_group(
    group: Handle,
    stringtag: *const c_char,
    _info: Handle,
    errhandler: Handle,
    newcomm: *mut Handle,
) -> c_int {
    let Some(abi) = abi() else {
        return guard::UNKNOWN_ERROR;
    };
    // SAFETY: passed on.
    unsafe {
        let code = native::comm_create_group(abi.comm_world, group, tag_of(stringtag), newcomm);
        if code == abi.success {
            set_handler(abi, abi.read(newcomm), errhandler);
        }
        code
    }
}

/// `MPI_Intercomm_create_from_groups` by a communicator of the local group and `MPI_Intercomm_create`.
///
/// # Safety
/// As [`comm_idup_with_info`].
#[allow(
    clippy::too_many_arguments,
    reason = "the parameters of MPI's own call"
)]
pub unsafe fn intercomm_create_from_groups(
    local_group: Handle,
    local_leader: c_int,
    remote_group: Handle,
    remote_leader: c_int,
    stringtag: *const c_char,
    _info: Handle,
    errhandler: Handle,
    newintercomm: *mut Handle,
) -> c_int {
    let Some(abi) = abi() else {
        return guard::UNKNOWN_ERROR;
    };
    let (mut world, mut side) = (abi.group_null, abi.comm_null);
    let mut leader = abi.undefined;
    // SAFETY: passed on; live locals.
    unsafe {
        let tag = tag_of(stringtag);
        let mut code = native::comm_group(abi.comm_world, &raw mut world);
        if code == abi.success {
            let from = &raw const remote_leader;
            code = native::group_translate_ranks(remote_group, 1, from, world, &raw mut leader);
            native::group_free(&raw mut world);
        }
        if code == abi.success {
            code = native::comm_create_group(abi.comm_world, local_group, tag, &raw mut side);
        }
        if code == abi.success {
            let world = abi.comm_world;
            code = native::intercomm_create(side, local_leader, world, leader, tag, newintercomm);
            native::comm_free(&raw mut side);
        }
        if code == abi.success {
            set_handler(abi, abi.read(newintercomm), errhandler);
        }
        code
    }
}

/// A tag that every process makes of the same string: below the least upper bound that MPI allows, 32767.
unsafe fn tag_of(text: *const c_char) -> c_int {
    if text.is_null() {
        return 0;
    }
    // SAFETY: a string, as the caller says.
    let bytes = unsafe { CStr::from_ptr(text) }.to_bytes();
    let hash = bytes.iter().fold(0x811c_9dc5_u32, |hash, byte| {
        // FNV-1a.
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    });
    ((hash ^ (hash >> 15)) & 0x7fff) as c_int
}

unsafe fn set_handler(abi: &Abi, comm: Handle, errhandler: Handle) {
    let [comm, null] = [comm, abi.comm_null].map(|comm| abi.normalize(comm));
    if comm != null && abi.normalize(errhandler) != abi.normalize(abi.errhandler_null) {
        // SAFETY: a communicator just made, and the program's handler.
        unsafe { native::comm_set_errhandler(comm, errhandler) };
    }
}
