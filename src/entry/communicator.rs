//! Constructors and destructors of communicators, whose handles the engine remembers.
//!
//! Duplicates are named by the attribute's copy callback ([`crate::engine::comms`]), whichever way they are made.

use std::ffi::{c_char, c_int, c_void, CStr};

use crate::engine::{comms, engine, NativeScope};
use crate::mpi::{calls, native, Abi, Comm, Errhandler, Group, Info, Request, Slot};

/// A collective constructor on `parent`, whose result is named.
fn derived(parent: Comm, made: Slot<'_, Comm>, natively: impl FnOnce() -> c_int) -> c_int {
    let Some(engine) = engine() else {
        return natively();
    };
    let abi = engine.env.abi;
    let birth = comms::expect(abi, parent);
    let code = {
        let _scope = NativeScope::enter();
        natively()
    };
    if code == abi.success {
        comms::name_derived(abi, birth, made.read(abi));
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
    ($($kind:ident $name:ident($($argument:ident: $type:ty),*) $($parent:ident $made:ident)?;)*) => { calls! {$(
        #[doc = concat!("`MPI_", stringify!($name), "` (MPI 4.1 chapters 7, 8 and 11), name in snake case.")]
        $name($($argument: $type),*) { $kind($($parent, $made,)? || native::$name($($argument),*)) }
    )*} };
}

constructors! {
    plain comm_dup(comm: Comm, newcomm: Slot<'_, Comm>);
    plain comm_dup_with_info(comm: Comm, info: Info, newcomm: Slot<'_, Comm>);
    plain comm_idup(comm: Comm, newcomm: Slot<'_, Comm>, request: Slot<'_, Request>);
    plain comm_idup_with_info(comm: Comm, info: Info, newcomm: Slot<'_, Comm>, request: Slot<'_, Request>);
    across comm_spawn(command: *const c_char, argv: *mut c_void, maxprocs: c_int, info: Info, root: c_int, comm: Comm, intercomm: Slot<'_, Comm>, array_of_errcodes: *mut c_int);
    across comm_spawn_multiple(count: c_int, array_of_commands: *mut c_void, array_of_argv: *mut c_void, array_of_maxprocs: *const c_int, array_of_info: *const c_void, root: c_int, comm: Comm, intercomm: Slot<'_, Comm>, array_of_errcodes: *mut c_int);
    across comm_accept(port_name: *const c_char, info: Info, root: c_int, comm: Comm, newcomm: Slot<'_, Comm>);
    across comm_connect(port_name: *const c_char, info: Info, root: c_int, comm: Comm, newcomm: Slot<'_, Comm>);
    across comm_join(fd: c_int, intercomm: Slot<'_, Comm>);
    derived intercomm_merge(intercomm: Comm, high: c_int, newintracomm: Slot<'_, Comm>) intercomm newintracomm;
    derived comm_create(comm: Comm, group: Group, newcomm: Slot<'_, Comm>) comm newcomm;
    derived comm_split(comm: Comm, color: c_int, key: c_int, newcomm: Slot<'_, Comm>) comm newcomm;
    derived comm_split_type(comm: Comm, split_type: c_int, key: c_int, info: Info, newcomm: Slot<'_, Comm>) comm newcomm;
    derived cart_create(comm_old: Comm, ndims: c_int, dims: *const c_int, periods: *const c_int, reorder: c_int, comm_cart: Slot<'_, Comm>) comm_old comm_cart;
    derived cart_sub(comm: Comm, remain_dims: *const c_int, newcomm: Slot<'_, Comm>) comm newcomm;
    derived graph_create(comm_old: Comm, nnodes: c_int, indx: *const c_int, edges: *const c_int, reorder: c_int, comm_graph: Slot<'_, Comm>) comm_old comm_graph;
    derived dist_graph_create(comm_old: Comm, n: c_int, sources: *const c_int, degrees: *const c_int, destinations: *const c_int, weights: *const c_int, info: Info, reorder: c_int, comm_dist_graph: Slot<'_, Comm>) comm_old comm_dist_graph;
    derived dist_graph_create_adjacent(comm_old: Comm, indegree: c_int, sources: *const c_int, sourceweights: *const c_int, outdegree: c_int, destinations: *const c_int, destweights: *const c_int, info: Info, reorder: c_int, comm_dist_graph: Slot<'_, Comm>) comm_old comm_dist_graph;
}

/// A constructor over groups only, whose result `name` names.
fn over_groups(
    made: Slot<'_, Comm>,
    natively: impl FnOnce() -> c_int,
    name: impl FnOnce(&Abi, Comm),
) -> c_int {
    let code = plain(natively);
    if let Some(abi) = engine().map(|engine| engine.env.abi) {
        if code == abi.success {
            name(abi, made.read(abi));
        }
    }
    code
}

/// `MPI_Comm_create_group` (MPI 4.1 section 7.4.2), collective over the group only.
pub fn comm_create_group(comm: Comm, group: Group, tag: c_int, newcomm: Slot<'_, Comm>) -> c_int {
    over_groups(
        newcomm,
        || native::comm_create_group(comm, group, tag, newcomm),
        |abi, made| comms::name_created_group(abi, comm, tag, made),
    )
}

/// `MPI_Intercomm_create` (MPI 4.1 section 7.6.2).
pub fn intercomm_create(
    local_comm: Comm,
    local_leader: c_int,
    peer_comm: Comm,
    remote_leader: c_int,
    tag: c_int,
    made: Slot<'_, Comm>,
) -> c_int {
    let (local, remote) = ((local_comm, local_leader), (peer_comm, remote_leader));
    over_groups(
        made,
        || native::intercomm_create(local.0, local.1, remote.0, remote.1, tag, made),
        |abi, made| comms::name_of_two_groups(abi, tag, made),
    )
}

/// A string that the program has passed, or none.
///
/// # Safety
/// `text` is a string that lasts as long as the call, or null.
unsafe fn string<'a>(text: *const c_char) -> Option<&'a CStr> {
    // SAFETY: as the caller says.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
}

calls! {
    /// `MPI_Comm_create_from_group` (MPI 4.1 section 7.4.2).
    comm_create_from_group(group: Group, stringtag: *const c_char, info: Info, errhandler: Errhandler, newcomm: Slot<'_, Comm>) {
        let natively = || native::comm_create_from_group(group, stringtag, info, errhandler, newcomm);
        let tag = string(stringtag);
        over_groups(newcomm, natively, |abi, made| comms::name_from_group(abi, tag, made))
    }

    /// `MPI_Intercomm_create_from_groups` (MPI 4.1 section 7.6.2).
    intercomm_create_from_groups(
        local_group: Group, local_leader: c_int, remote_group: Group, remote_leader: c_int,
        stringtag: *const c_char, info: Info, errhandler: Errhandler, made: Slot<'_, Comm>,
    ) {
        let natively = || native::intercomm_create_from_groups(local_group, local_leader, remote_group, remote_leader, stringtag, info, errhandler, made);
        let tag = string(stringtag);
        over_groups(made, natively, |abi, made| comms::name_from_group(abi, tag, made))
    }
}

/// Frees a communicator natively, unless something of the engine's still sends on it.
fn part(comm: Slot<'_, Comm>, natively: impl FnOnce() -> c_int) -> c_int {
    let Some(engine) = engine() else {
        return natively();
    };
    let abi = engine.env.abi;
    if !engine.part_with(comm.read(abi)) {
        comm.write(abi, abi.comm_null);
        return abi.success;
    }
    let _scope = NativeScope::enter();
    natively()
}

/// `MPI_Comm_free` (MPI 4.1 section 7.4.3).
pub fn comm_free(comm: Slot<'_, Comm>) -> c_int {
    part(comm, || native::comm_free(comm))
}

/// `MPI_Comm_disconnect` (MPI 4.1 section 11.10.4).
pub fn comm_disconnect(comm: Slot<'_, Comm>) -> c_int {
    part(comm, || {
        send_values_out();
        native::comm_disconnect(comm)
    })
}
