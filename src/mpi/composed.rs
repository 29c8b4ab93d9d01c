//! Functions that MPI 3.1 lacks, made of those that it has (MPI 4.0), for libraries of that standard.

use std::ffi::{c_char, c_int, CStr};

use super::owned::{world_ranks, OwnComm};
use super::{abi, guard, native, Abi, Comm, Errhandler, Group, Info, Request, Slot};

/// `MPI_Comm_idup_with_info` by `MPI_Comm_idup`: hints may be ignored.
pub fn comm_idup_with_info(
    comm: Comm,
    _info: Info,
    newcomm: Slot<'_, Comm>,
    request: Slot<'_, Request>,
) -> c_int {
    native::comm_idup(comm, newcomm, request)
}

/// `MPI_Comm_create_from_group` by `MPI_Comm_create_group` over MPI_COMM_WORLD: where there are no sessions, groups come from
/// nowhere else.
///
/// # Safety
/// `stringtag` is a string, or null.
pub unsafe fn comm_create_from_group(
    group: Group,
    stringtag: *const c_char,
    _info: Info,
    errhandler: Errhandler,
    newcomm: Slot<'_, Comm>,
) -> c_int {
    let Some(abi) = abi() else {
        return guard::UNKNOWN_ERROR;
    };
    // SAFETY: a string, as the caller says.
    let tag = unsafe { tag_of(stringtag) };
    let code = native::comm_create_group(abi.comm_world, group, tag, newcomm);
    if code == abi.success {
        set_handler(abi, newcomm.read(abi), errhandler);
    }
    code
}

/// `MPI_Intercomm_create_from_groups` by a communicator of the local group and `MPI_Intercomm_create`.
///
/// # Safety
/// As [`comm_create_from_group`].
#[allow(
    clippy::too_many_arguments,
    reason = "the parameters of MPI's own call"
)]
pub unsafe fn intercomm_create_from_groups(
    local_group: Group,
    local_leader: c_int,
    remote_group: Group,
    remote_leader: c_int,
    stringtag: *const c_char,
    _info: Info,
    errhandler: Errhandler,
    newintercomm: Slot<'_, Comm>,
) -> c_int {
    let Some(abi) = abi() else {
        return guard::UNKNOWN_ERROR;
    };
    // SAFETY: a string, as the caller says.
    let tag = unsafe { tag_of(stringtag) };
    let world = abi.comm_world;
    let made = world_ranks(abi, remote_group, &[remote_leader]).and_then(|leader| {
        let own = OwnComm::made(abi, |side| {
            native::comm_create_group(world, local_group, tag, side)
        });
        Ok((own?, leader[0]))
    });
    let (side, leader) = match made {
        Ok(made) => made,
        Err(code) => return code,
    };
    let code = native::intercomm_create(side.get(), local_leader, world, leader, tag, newintercomm);
    drop(side);
    if code == abi.success {
        set_handler(abi, newintercomm.read(abi), errhandler);
    }
    code
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

fn set_handler(abi: &Abi, comm: Comm, errhandler: Errhandler) {
    let is_there = !abi.are_same(comm, abi.comm_null);
    if is_there && !abi.are_same(errhandler, abi.errhandler_null) {
        native::comm_set_errhandler(comm, errhandler);
    }
}
