//! Constructors and destructors of communicators, whose handles the engine remembers.
//!
//! Duplicates are named by the attribute's copy callback ([`crate::engine::comms`]), whichever way they are made.

use std::ffi::{c_char, c_int, c_void};

use crate::engine::{comms, engine, NativeScope};
use crate::mpi::{native, Abi, Handle};

/// A collective constructor on `parent`, whose result is named.
unsafe fn derived(parent: Handle, made: *mut Handle, natively: impl FnOnce() -> c_int) -> c_int {
    let Some(engine) = engine() else {
        return natively();
    };
    let abi = engine.env.abi;
    // SAFETY: the program's communicator.
    let birth = unsafe { comms::expect(abi, parent) };
    let code = {
        let _scope = NativeScope::enter();
        natively()
    };
    if code == abi.success {
        // SAFETY: the communicator that the constructor has just made.
        unsafe { comms::name_derived(abi, birth, abi.read(made)) };
    }
    code
}

/// A constructor of a communicator that cannot be named without communication, or names itself.
fn plain(natively: impl FnOnce() -> c_int) -> c_int {
    let _scope = NativeScope::enter();
    natively()
}

/// As [`plain`], with processes of other jobs, for which Open MPI waits without making progress.
fn across(natively: impl FnOnce() -> c_int) -> c_int {
    send_values_out();
    plain(natively)
}

fn send_values_out() {
    if let Some(engine) = engine() {
        engine.send_values_out();
    }
}

macro_rules! constructors {
    ($($kind:ident $name:ident($($argument:ident: $type:ty),*) $($parent:ident $made:ident)?;)*) => {$(
        #[doc = concat!("`MPI_", stringify!($name), "` (MPI 4.1 chapters 7, 8 and 11), name in snake case.\n\n# Safety\nThe arguments are those of the program's call.")]
        #[allow(clippy::too_many_arguments, reason = "the parameters of MPI's own call")]
        pub unsafe fn $name($($argument: $type),*) -> c_int {
            // SAFETY: passed on.
            unsafe { $kind($($parent, $made,)? || native::$name($($argument),*)) }
        }
    )*};
}

#[allow(unused_unsafe)]
mod constructors {
    use super::*;
    constructors! {
        plain comm_dup(comm: Handle, newcomm: *mut Handle);
        plain comm_dup_with_info(comm: Handle, info: Handle, newcomm: *mut Handle);
        plain comm_idup(comm: Handle, newcomm: *mut Handle, request: *mut Handle);
        plain comm_idup_with_info(comm: Handle, info: Handle, newcomm: *mut Handle, request: *mut Handle);
        across comm_spawn(command: *const c_char, argv: *mut c_void, maxprocs: c_int, info: Handle, root: c_int, comm: Handle, intercomm: *mut Handle, array_of_errcodes: *mut c_int);
        across comm_spawn_multiple(count: c_int, array_of_commands: *mut c_void, array_of_argv: *mut c_void, array_of_maxprocs: *const c_int, array_of_info: *const c_void, root: c_int, comm: Handle, intercomm: *mut Handle, array_of_errcodes: *mut c_int);
        across comm_accept(port_name: *const c_char, info: Handle, root: c_int, comm: Handle, newcomm: *mut Handle);
        across comm_connect(port_name: *const c_char, info: Handle, root: c_int, comm: Handle, newcomm: *mut Handle);
        across comm_join(fd: c_int, intercomm: *mut Handle);
        derived intercomm_merge(intercomm: Handle, high: c_int, newintracomm: *mut Handle) intercomm newintracomm;
        derived comm_create(comm: Handle, group: Handle, newcomm: *mut Handle) comm newcomm;
        derived comm_split(comm: Handle, color: c_int, key: c_int, newcomm: *mut Handle) comm newcomm;
        derived comm_split_type(comm: Handle, split_type: c_int, key: c_int, info: Handle, newcomm: *mut Handle) comm newcomm;
        derived cart_create(comm_old: Handle, ndims: c_int, dims: *const c_int, periods: *const c_int, reorder: c_int, comm_cart: *mut Handle) comm_old comm_cart;
        derived cart_sub(comm: Handle, remain_dims: *const c_int, newcomm: *mut Handle) comm newcomm;
        derived graph_create(comm_old: Handle, nnodes: c_int, indx: *const c_int, edges: *const c_int, reorder: c_int, comm_graph: *mut Handle) comm_old comm_graph;
        derived dist_graph_create(comm_old: Handle, n: c_int, sources: *const c_int, degrees: *const c_int, destinations: *const c_int, weights: *const c_int, info: Handle, reorder: c_int, comm_dist_graph: *mut Handle) comm_old comm_dist_graph;
        derived dist_graph_create_adjacent(comm_old: Handle, indegree: c_int, sources: *const c_int, sourceweights: *const c_int, outdegree: c_int, destinations: *const c_int, destweights: *const c_int, info: Handle, reorder: c_int, comm_dist_graph: *mut Handle) comm_old comm_dist_graph;
    }
}
pub use constructors::*;

/// A constructor over groups only, whose result `name` names.
unsafe fn over_groups(
    made: *mut Handle,
    natively: impl FnOnce() -> c_int,
    name: impl FnOnce(&Abi, Handle),
) -> c_int {
    let code = plain(natively);
    if let Some(abi) = engine().map(|engine| engine.env.abi) {
        if code == abi.success {
            // SAFETY: the communicator just made.
            name(abi, unsafe { abi.read(made) });
        }
    }
    code
}

/// `MPI_Comm_create_group` (MPI 4.1 section 7.4.2), collective over the group only.
///
/// # Safety
/// The arguments are those of the program's call, here and below.
pub unsafe fn comm_create_group(
    comm: Handle,
    group: Handle,
    tag: c_int,
    newcomm: *mut Handle,
) -> c_int {
    // SAFETY: passed on; the program's parent and the communicator just made.
    unsafe {
        over_groups(
            newcomm,
            || native::comm_create_group(comm, group, tag, newcomm),
            |abi, made| comms::name_created_group(abi, comm, tag, made),
        )
    }
}

/// `MPI_Comm_create_from_group` (MPI 4.1 section 7.4.2).
///
/// # Safety
/// As [`comm_create_group`].
pub unsafe fn comm_create_from_group(
    group: Handle,
    stringtag: *const c_char,
    info: Handle,
    errhandler: Handle,
    newcomm: *mut Handle,
) -> c_int {
    // SAFETY: passed on; the program's string and the communicator just made.
    unsafe {
        over_groups(
            newcomm,
            || native::comm_create_from_group(group, stringtag, info, errhandler, newcomm),
            |abi, made| comms::name_from_group(abi, stringtag, made),
        )
    }
}

/// `MPI_Intercomm_create` (MPI 4.1 section 7.6.2).
///
/// # Safety
/// As [`comm_create_group`].
pub unsafe fn intercomm_create(
    local_comm: Handle,
    local_leader: c_int,
    peer_comm: Handle,
    remote_leader: c_int,
    tag: c_int,
    newintercomm: *mut Handle,
) -> c_int {
    let natively = || {
        // SAFETY: passed on.
        unsafe {
            native::intercomm_create(
                local_comm,
                local_leader,
                peer_comm,
                remote_leader,
                tag,
                newintercomm,
            )
        }
    };
    // SAFETY: passed on; the communicator just made.
    unsafe {
        over_groups(newintercomm, natively, |abi, made| {
            comms::name_of_two_groups(abi, tag, made);
        })
    }
}

/// `MPI_Intercomm_create_from_groups` (MPI 4.1 section 7.6.2).
///
/// # Safety
/// As [`comm_create_group`].
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
    info: Handle,
    errhandler: Handle,
    newintercomm: *mut Handle,
) -> c_int {
    let natively = || {
        // SAFETY: passed on.
        unsafe {
            native::intercomm_create_from_groups(
                local_group,
                local_leader,
                remote_group,
                remote_leader,
                stringtag,
                info,
                errhandler,
                newintercomm,
            )
        }
    };
    // SAFETY: passed on; the program's string and the communicator just made.
    unsafe {
        over_groups(newintercomm, natively, |abi, made| {
            comms::name_from_group(abi, stringtag, made);
        })
    }
}

/// Frees a communicator natively, unless something of the engine's still sends on it.
unsafe fn part(comm: *mut Handle, natively: impl FnOnce() -> c_int) -> c_int {
    let Some(engine) = engine() else {
        return natively();
    };
    let abi = engine.env.abi;
    // SAFETY: the program's communicator, still valid.
    unsafe {
        if !engine.part_with(abi.read(comm)) {
            abi.write(comm, abi.comm_null);
            return abi.success;
        }
    }
    let _scope = NativeScope::enter();
    natively()
}

/// `MPI_Comm_free` (MPI 4.1 section 7.4.3).
///
/// # Safety
/// As [`comm_create_group`].
pub unsafe fn comm_free(comm: *mut Handle) -> c_int {
    // SAFETY: passed on.
    unsafe { part(comm, || native::comm_free(comm)) }
}

/// `MPI_Comm_disconnect` (MPI 4.1 section 11.10.4).
///
/// # Safety
/// As [`comm_create_group`].
pub unsafe fn comm_disconnect(comm: *mut Handle) -> c_int {
    // SAFETY: passed on.
    unsafe {
        part(comm, || {
            send_values_out();
            native::comm_disconnect(comm)
        })
    }
}
