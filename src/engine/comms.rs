//! Communicator identity, computed without communication.
//!
//! Both ends of a message must name its communicator alike, although handles differ from process to process. An
//! identity is a hash of the parent's identity, the kind of constructor, how many constructors of that kind the parent
//! has seen, and the members; all processes of a communicator call its constructors in one order (MPI 4.1 section
//! 7.4.2), so all compute the same. It hangs on the communicator as an attribute: the copy callback names duplicates
//! and the delete callback forgets freed ones, by whatever route (C, Fortran, inside the library) that happens, and a
//! recycled handle can never carry the identity of its predecessor.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};

use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::mpi::{native, Abi, Handle};

/// Who is in a communicator, and its name on every rank.
#[derive(Debug)]
pub struct Identity {
    /// The same number in every process of the communicator.
    pub id: u64,
    /// World rank of each member; `None` where they are the same (MPI_COMM_WORLD and its duplicates).
    members: Option<Vec<u32>>,
    ordinals: Mutex<HashMap<u64, u64>>,
}

impl Identity {
    fn new(id: u64, members: Option<Vec<u32>>) -> Identity {
        Identity {
            id,
            members,
            ordinals: Mutex::new(HashMap::new()),
        }
    }

    /// World rank of `rank`, if there is such a member.
    pub fn world_rank(&self, rank: c_int) -> Option<u32> {
        let rank = usize::try_from(rank).ok()?;
        match &self.members {
            Some(members) => members.get(rank).copied(),
            None => u32::try_from(rank).ok(),
        }
    }

    fn ordinal(&self, kind: u64) -> u64 {
        let mut ordinals = self.ordinals.lock();
        let count = ordinals.entry(kind).or_insert(0);
        *count += 1;
        *count
    }
}

/// Which constructor made a communicator; constructors of one kind are counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
#[repr(u64)]
pub enum Kind {
    World = 1,
    SelfComm,
    Duplicate,
    /// Collective over the parent: create, split, split_type, topologies.
    Derived,
    /// Collective over the new group only: counted per (group, tag).
    CreateGroup,
}

static KEYVAL: AtomicI32 = AtomicI32::new(-1);
static WORLD: OnceLock<Arc<Identity>> = OnceLock::new();

fn mix(hash: u64, value: u64) -> u64 {
    // splitmix64's finalizer: every input bit reaches every output bit.
    let mut z = (hash ^ value).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn name(parent: u64, kind: Kind, ordinal: u64, members: Option<&[u32]>) -> u64 {
    let mut hash = mix(mix(mix(0, parent), kind as u64), ordinal);
    for member in members.unwrap_or(&[]) {
        hash = mix(hash, u64::from(*member) + 1);
    }
    hash
}

/// Names MPI_COMM_WORLD and MPI_COMM_SELF; called once inside `MPI_Init`. Local calls only.
///
/// # Safety
/// MPI is initialized.
pub unsafe fn start(abi: &Abi, world_rank: u32) -> bool {
    let mut keyval: c_int = -1;
    // SAFETY: the callbacks have the C signatures of MPI 4.1 section 7.7.2 and live as long as the library.
    let code = unsafe {
        native::comm_create_keyval(
            on_copy as *mut c_void,
            on_delete as *mut c_void,
            &raw mut keyval,
            std::ptr::null_mut(),
        )
    };
    if code != abi.success {
        return false;
    }
    KEYVAL.store(keyval, Ordering::Release);
    let world = Arc::new(Identity::new(name(0, Kind::World, 0, None), None));
    let _ = WORLD.set(world.clone());
    let alone = Identity::new(
        name(u64::from(world_rank), Kind::SelfComm, 0, None),
        Some(vec![world_rank]),
    );
    // SAFETY: MPI is initialized and both are predefined communicators.
    unsafe { attach(abi, abi.comm_world, world) && attach(abi, abi.comm_self, Arc::new(alone)) }
}

unsafe fn attach(abi: &Abi, comm: Handle, identity: Arc<Identity>) -> bool {
    let raw = Arc::into_raw(identity).cast_mut().cast::<c_void>();
    // SAFETY: a valid communicator; the attribute owns one reference, returned by `on_delete`.
    let code = unsafe { native::comm_set_attr(comm, KEYVAL.load(Ordering::Acquire), raw) };
    if code != abi.success {
        // SAFETY: the library did not take the reference.
        drop(unsafe { Arc::from_raw(raw.cast_const().cast::<Identity>()) });
    }
    code == abi.success
}

/// Identity of `comm`; `None` for intercommunicators and others that cannot be named without communication.
///
/// # Safety
/// `comm` is a handle that the program passed to MPI and that is not freed.
pub unsafe fn identity(abi: &Abi, comm: Handle) -> Option<Arc<Identity>> {
    let comm = abi.normalize(comm);
    if comm == abi.normalize(abi.comm_world) {
        return WORLD.get().cloned();
    }
    if comm == abi.normalize(abi.comm_null) {
        return None;
    }
    let (mut value, mut found) = (std::ptr::null_mut::<c_void>(), 0 as c_int);
    // SAFETY: `value` receives the attribute, a pointer (MPI 4.1 section 7.7.2).
    let code = unsafe {
        native::comm_get_attr(
            comm,
            KEYVAL.load(Ordering::Acquire),
            (&raw mut value).cast(),
            &raw mut found,
        )
    };
    if code != abi.success || found == 0 || value.is_null() {
        return None;
    }
    let raw = value.cast_const().cast::<Identity>();
    // SAFETY: attributes of our keyval are made by `Arc::into_raw` and stay counted until `on_delete`.
    unsafe {
        Arc::increment_strong_count(raw);
        Some(Arc::from_raw(raw))
    }
}

/// Whether `comm` is an intercommunicator. These have no identity: their two groups have no parent in common whose
/// constructors could be counted.
///
/// # Safety
/// As [`identity`].
pub unsafe fn is_inter(abi: &Abi, comm: Handle) -> bool {
    if abi.normalize(comm) == abi.normalize(abi.comm_null) {
        return false;
    }
    let mut inter: c_int = 0;
    // SAFETY: the flag is a live local.
    let code = unsafe { native::comm_test_inter(comm, &raw mut inter) };
    code == abi.success && inter != 0
}

/// A constructor call about to be made on `parent`: counted now, also where this process gets no new communicator.
pub struct Birth {
    parent: Option<Arc<Identity>>,
    ordinal: u64,
}

/// Counts a collective constructor on `parent`.
///
/// # Safety
/// As [`identity`].
pub unsafe fn expect(abi: &Abi, parent: Handle) -> Birth {
    // SAFETY: passed on.
    let parent = unsafe { identity(abi, parent) };
    let ordinal = parent
        .as_ref()
        .map_or(0, |p| p.ordinal(Kind::Derived as u64));
    Birth { parent, ordinal }
}

/// Names the communicator that the constructor returned.
///
/// # Safety
/// `comm` was just returned by the constructor that `birth` announced.
pub unsafe fn name_derived(abi: &Abi, birth: Birth, comm: Handle) {
    let Some(parent) = birth.parent else { return };
    // SAFETY: passed on.
    if let Some(members) = unsafe { members(abi, comm) } {
        let id = name(parent.id, Kind::Derived, birth.ordinal, Some(&members));
        // SAFETY: a communicator just made.
        unsafe { attach(abi, comm, Arc::new(Identity::new(id, Some(members)))) };
    }
}

/// Names a communicator made by `MPI_Comm_create_group`, which only its own members call.
///
/// # Safety
/// As [`name_derived`].
pub unsafe fn name_created_group(abi: &Abi, parent: Handle, tag: c_int, comm: Handle) {
    // SAFETY: passed on.
    let (Some(parent), Some(members)) = (unsafe { identity(abi, parent) }, unsafe {
        members(abi, comm)
    }) else {
        return;
    };
    let group = name(tag as u32 as u64, Kind::CreateGroup, 0, Some(&members));
    let ordinal = parent.ordinal(group);
    let id = name(
        parent.id,
        Kind::CreateGroup,
        mix(group, ordinal),
        Some(&members),
    );
    // SAFETY: a communicator just made.
    unsafe { attach(abi, comm, Arc::new(Identity::new(id, Some(members)))) };
}

/// World ranks of the members of an intracommunicator.
unsafe fn members(abi: &Abi, comm: Handle) -> Option<Vec<u32>> {
    if abi.normalize(comm) == abi.normalize(abi.comm_null) {
        return None;
    }
    let mut size: c_int = 0;
    let (mut ours, mut world): (Handle, Handle) = (0, 0);
    // SAFETY: out-pointers are live locals.
    unsafe {
        if is_inter(abi, comm) {
            return None;
        }
        if native::comm_size(comm, &raw mut size) != abi.success
            || native::comm_group(comm, &raw mut ours) != abi.success
        {
            return None;
        }
        if native::comm_group(abi.comm_world, &raw mut world) != abi.success {
            native::group_free(&raw mut ours);
            return None;
        }
        let here: Vec<c_int> = (0..size).collect();
        let mut there = vec![0 as c_int; here.len()];
        let code = native::group_translate_ranks(
            ours,
            size,
            here.as_ptr().cast_mut().cast(),
            world,
            there.as_mut_ptr().cast(),
        );
        native::group_free(&raw mut ours);
        native::group_free(&raw mut world);
        if code != abi.success {
            return None;
        }
        // A member outside this world (spawned, or of a session) has no world rank here.
        there
            .into_iter()
            .map(|rank| u32::try_from(rank).ok())
            .collect()
    }
}

extern "C" fn on_copy(
    _comm: Handle,
    _keyval: c_int,
    _extra: *mut c_void,
    value: *mut c_void,
    out: *mut c_void,
    flag: *mut c_int,
) -> c_int {
    let copied = std::panic::catch_unwind(|| {
        // SAFETY: the value is one that `attach` or this function made, alive while the parent is.
        let parent = unsafe { &*value.cast_const().cast::<Identity>() };
        let ordinal = parent.ordinal(Kind::Duplicate as u64);
        let id = name(
            parent.id,
            Kind::Duplicate,
            ordinal,
            parent.members.as_deref(),
        );
        Arc::into_raw(Arc::new(Identity::new(id, parent.members.clone())))
    });
    // SAFETY: MPI passes the address of a pointer-sized attribute value and of an int (MPI 4.1 section 7.7.2).
    unsafe {
        match copied {
            Ok(raw) => {
                out.cast::<*const Identity>().write(raw);
                flag.write(1);
            }
            Err(_) => flag.write(0),
        }
    }
    0
}

extern "C" fn on_delete(
    _comm: Handle,
    _keyval: c_int,
    value: *mut c_void,
    _extra: *mut c_void,
) -> c_int {
    if !value.is_null() {
        // SAFETY: gives back the reference that the attribute held; dropping frees memory and cannot panic.
        drop(unsafe { Arc::from_raw(value.cast_const().cast::<Identity>()) });
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ_by_every_ingredient() {
        let base = name(1, Kind::Derived, 1, Some(&[0, 1]));
        for other in [
            name(2, Kind::Derived, 1, Some(&[0, 1])),
            name(1, Kind::Duplicate, 1, Some(&[0, 1])),
            name(1, Kind::Derived, 2, Some(&[0, 1])),
            name(1, Kind::Derived, 1, Some(&[1, 0])),
            name(1, Kind::Derived, 1, None),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn world_ranks_of_members() {
        let some = Identity::new(1, Some(vec![4, 2]));
        assert_eq!(
            (some.world_rank(1), some.world_rank(2), some.world_rank(-1)),
            (Some(2), None, None)
        );
        assert_eq!(Identity::new(1, None).world_rank(7), Some(7));
    }
}
