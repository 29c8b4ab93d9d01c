//! Communicator identity, computed without communication.
//!
//! Both ends of a message must name its communicator alike, although handles differ from process to process.
//! An identity is a hash of the parent's identity, the kind of constructor, how many constructors of that
//! kind the parent has seen, and the members. All processes of a communicator call its constructors in one
//! order (MPI 4.1 section 7.4.2), so all compute the same. If the processes have no parent in common (an
//! intercommunicator, or a communicator made from a group), MPI_COMM_WORLD counts constructors of these
//! groups with this tag. The identity of an intercommunicator only serves to name communicators made of it:
//! messages on it go by bcopy. An identity hangs on the communicator as an attribute. The copy callback names
//! duplicates and the delete callback forgets freed communicators, whoever duplicates or frees them (C,
//! Fortran, the library itself). So a recycled handle never carries the identity of its predecessor.

use std::ffi::{c_int, CStr};
use std::sync::{Arc, OnceLock};

use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::mpi::attributes::{Attribute, Keyval};
use crate::mpi::owned::{self, OwnGroup};
use crate::mpi::{native, Abi, Comm, Group, Out, Slot};
use crate::transfer::fault::Of;

/// Who is in a communicator, and its name on every rank.
#[derive(Debug)]
pub struct Identity {
    /// The same number in every process of the communicator.
    pub id: u64,
    members: Members,
    ordinals: Mutex<HashMap<u64, u64>>,
}

/// World ranks of the members of a communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Members {
    /// Their ranks are the same (MPI_COMM_WORLD and its duplicates).
    World,
    /// Of an intracommunicator, by rank.
    One(Vec<u32>),
    /// Of the two groups of an intercommunicator, in an order that is the same on both sides.
    Two([Vec<u32>; 2]),
}

impl Members {
    /// The members of both groups; the order does not matter.
    fn of_two(mut groups: [Vec<u32>; 2]) -> Members {
        groups.sort();
        Members::Two(groups)
    }

    fn mixed_into(&self, hash: u64) -> u64 {
        let groups: &[Vec<u32>] = match self {
            Members::World => &[],
            Members::One(members) => std::slice::from_ref(members),
            Members::Two(groups) => groups,
        };
        groups.iter().fold(hash, |hash, group| {
            let all = group.iter().map(|member| u64::from(*member) + 1);
            mix(all.fold(hash, mix), 0)
        })
    }
}

/// The identity of a communicator that the program may have freed since an operation on it began.
#[derive(Clone, Debug, Default)]
pub enum Named {
    /// The communicator is not freed, and has its identity.
    #[default]
    ByItself,
    /// The communicator is freed, and had this identity.
    Before(Option<Arc<Identity>>),
}

impl Named {
    /// The communicator is about to be freed.
    pub fn keep(&mut self, identity: Option<&Arc<Identity>>) {
        if let Named::ByItself = self {
            *self = Named::Before(identity.cloned());
        }
    }

    /// The identity.
    pub fn identity(&self, abi: &Abi, comm: Comm) -> Option<Arc<Identity>> {
        match self {
            Named::ByItself => identity(abi, comm),
            Named::Before(identity) => identity.clone(),
        }
    }

    /// Whether the communicator is freed.
    pub fn is_before(&self) -> bool {
        matches!(self, Named::Before(_))
    }
}

impl Identity {
    fn new(id: u64, members: Members) -> Identity {
        Identity {
            id,
            members,
            ordinals: Mutex::new(HashMap::new()),
        }
    }

    /// World rank of `rank`, if there is such a member.
    pub fn world_rank(&self, rank: c_int) -> Option<u32> {
        match &self.members {
            Members::World => u32::try_from(rank).ok(),
            Members::One(members) => members.get(usize::try_from(rank).ok()?).copied(),
            Members::Two(_) => None,
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
    /// An intercommunicator of two groups: counted per (groups, tag).
    TwoGroups,
}

/// The key of the attribute. Not set if the engine takes no messages.
static KEYVAL: OnceLock<Keyval<Comm, Identity>> = OnceLock::new();
static WORLD: OnceLock<Arc<Identity>> = OnceLock::new();

fn mix(hash: u64, value: u64) -> u64 {
    // splitmix64's finalizer: every input bit reaches every output bit.
    let mut z = (hash ^ value).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn name(parent: u64, kind: Kind, ordinal: u64, members: &Members) -> u64 {
    members.mixed_into(mix(mix(mix(0, parent), kind as u64), ordinal))
}

/// Identity of MPI_COMM_WORLD, in every job.
pub fn world() -> u64 {
    name(0, Kind::World, 0, &Members::World)
}

/// Names MPI_COMM_WORLD and MPI_COMM_SELF; called once inside `MPI_Init`. Local calls only.
pub fn start(abi: &Abi, world_rank: u32) -> bool {
    let Some(keyval) = Keyval::new(abi) else {
        return false;
    };
    let _ = KEYVAL.set(keyval);
    let world = Arc::new(Identity::new(world(), Members::World));
    let _ = WORLD.set(world.clone());
    let members = Members::One(vec![world_rank]);
    let id = name(u64::from(world_rank), Kind::SelfComm, 0, &members);
    let alone = Identity::new(id, members);
    attach(abi, abi.comm_world, world) && attach(abi, abi.comm_self, Arc::new(alone))
}

fn attach(abi: &Abi, comm: Comm, identity: Arc<Identity>) -> bool {
    let keyval = KEYVAL.get();
    keyval.is_some_and(|keyval| keyval.attach(abi, comm, identity))
}

impl Attribute for Identity {
    fn copied(&self) -> Option<Arc<Identity>> {
        let ordinal = self.ordinal(Kind::Duplicate as u64);
        let id = name(self.id, Kind::Duplicate, ordinal, &self.members);
        Some(Arc::new(Identity::new(id, self.members.clone())))
    }
}

/// Identity of `comm` for messages on it; `None` for intercommunicators and others that cannot be named
/// without communication.
#[inline]
pub fn identity(abi: &Abi, comm: Comm) -> Option<Arc<Identity>> {
    attached(abi, comm).filter(|found| !matches!(found.members, Members::Two(_)))
}

/// What [`identity`] knows, for one that only looks.
#[inline]
pub fn look<T>(abi: &Abi, comm: Comm, of: impl FnOnce(&Identity) -> T) -> Option<T> {
    if abi.normalize(comm) == abi.normalize(abi.comm_world) {
        return WORLD.get().map(|world| of(world));
    }
    identity(abi, comm).map(|identity| of(&identity))
}

/// Like [`identity`], but for naming communicators made of `comm`, which may be an intercommunicator.
fn attached(abi: &Abi, comm: Comm) -> Option<Arc<Identity>> {
    let comm = abi.normalize(comm);
    if comm == abi.normalize(abi.comm_world) {
        return WORLD.get().cloned();
    }
    if comm == abi.normalize(abi.comm_null) {
        return None;
    }
    KEYVAL.get()?.of(abi, comm)
}

/// Whether `comm` is an intercommunicator.
pub fn is_inter(abi: &Abi, comm: Comm) -> bool {
    if abi.normalize(comm) == abi.normalize(abi.comm_null) {
        return false;
    }
    let mut inter: c_int = 0;
    let code = native::comm_test_inter(comm, Out::of(&mut inter));
    code == abi.success && inter != 0
}

/// A constructor call about to be made on `parent`. It is counted now, even if this process gets no new
/// communicator.
pub struct Birth {
    parent: Option<Arc<Identity>>,
    ordinal: u64,
}

/// Counts a collective constructor on `parent`.
pub fn expect(abi: &Abi, parent: Comm) -> Birth {
    let parent = attached(abi, parent);
    let ordinal = parent
        .as_ref()
        .map_or(0, |p| p.ordinal(Kind::Derived as u64));
    Birth { parent, ordinal }
}

/// Names the communicator that the constructor returned.
pub fn name_derived(abi: &Abi, birth: Birth, comm: Comm) {
    let Some(parent) = birth.parent else { return };
    if let Some(members) = members(abi, comm) {
        let id = name(parent.id, Kind::Derived, birth.ordinal, &members);
        attach(abi, comm, Arc::new(Identity::new(id, members)));
    }
}

/// Names a communicator made by `MPI_Comm_create_group`, which only its own members call.
pub fn name_created_group(abi: &Abi, parent: Comm, tag: c_int, comm: Comm) {
    if let Some(parent) = identity(abi, parent) {
        name_by_groups(abi, &parent, u64::from(tag as u32), comm);
    }
}

/// Names an intercommunicator of `MPI_Intercomm_create`, whose two sides have no parent in common.
pub fn name_of_two_groups(abi: &Abi, tag: c_int, comm: Comm) {
    if let Some(world) = WORLD.get() {
        name_by_groups(abi, world, u64::from(tag as u32), comm);
    }
}

/// Names a communicator of `MPI_Comm_create_from_group` or `MPI_Intercomm_create_from_groups`. `tag` is the
/// string that the program gave, if it gave one.
pub fn name_from_group(abi: &Abi, tag: Option<&CStr>, comm: Comm) {
    let Some(tag) = tag else { return };
    // Differs from every tag that is a number.
    let tag = tag
        .to_bytes()
        .iter()
        .fold(u64::MAX, |hash, byte| mix(hash, u64::from(*byte)));
    if let Some(world) = WORLD.get() {
        name_by_groups(abi, world, tag, comm);
    }
}

/// Names a communicator that only the members of its own groups make: `parent` counts constructors of these
/// groups with this tag.
fn name_by_groups(abi: &Abi, parent: &Identity, tag: u64, comm: Comm) {
    let Some(members) = members(abi, comm) else {
        return;
    };
    let kind = match members {
        Members::Two(_) => Kind::TwoGroups,
        Members::World | Members::One(_) => Kind::CreateGroup,
    };
    let groups = name(tag, kind, 0, &members);
    let ordinal = parent.ordinal(groups);
    let id = name(parent.id, kind, mix(groups, ordinal), &members);
    attach(abi, comm, Arc::new(Identity::new(id, members)));
}

/// World ranks of the members of a communicator; `None` if one of them is outside MPI_COMM_WORLD.
fn members(abi: &Abi, comm: Comm) -> Option<Members> {
    if abi.normalize(comm) == abi.normalize(abi.comm_null) {
        return None;
    }
    let own = world_ranks(abi, |group| native::comm_group(comm, group))?;
    if is_inter(abi, comm) {
        let remote = world_ranks(abi, |group| native::comm_remote_group(comm, group))?;
        return Some(Members::of_two([own, remote]));
    }
    Some(Members::One(own))
}

/// World ranks of the members of the group that `ask` gives a reference to.
fn world_ranks(abi: &Abi, ask: impl FnOnce(Slot<'_, Group>) -> c_int) -> Option<Vec<u32>> {
    let ours = OwnGroup::made(abi, ask).ok()?;
    let mut size = 0;
    if native::group_size(ours.get(), Out::of(&mut size)) != abi.success {
        return None;
    }
    let here: Vec<c_int> = (0..size).collect();
    let there = owned::world_ranks(abi, ours.get(), &here).ok()?;
    // A member outside this world (spawned, or of a session) has no world rank here.
    let there = there.into_iter();
    there.map(|rank| u32::try_from(rank).ok()).collect()
}

/// The other side of a send to a rank of a communicator.
pub fn receiver(abi: &Abi, comm: Comm, rank: c_int) -> Of {
    let identity = identity(abi, comm);
    let world = identity.and_then(|identity| identity.world_rank(rank));
    world.map_or(Of::ToLocal(rank), Of::To)
}

/// The other side of a receive from a rank of a communicator, or from any.
pub fn sender(abi: &Abi, comm: Comm, rank: c_int) -> Of {
    match receiver(abi, comm, rank) {
        Of::To(world) => Of::From(world),
        _ if rank == abi.any_source => Of::FromAny,
        _ => Of::FromLocal(rank),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ_by_every_ingredient() {
        let one = |members: &[u32]| Members::One(members.to_vec());
        let two = |a: &[u32], b: &[u32]| Members::of_two([a.to_vec(), b.to_vec()]);
        let base = name(1, Kind::Derived, 1, &one(&[0, 1]));
        for other in [
            name(2, Kind::Derived, 1, &one(&[0, 1])),
            name(1, Kind::Duplicate, 1, &one(&[0, 1])),
            name(1, Kind::Derived, 2, &one(&[0, 1])),
            name(1, Kind::Derived, 1, &one(&[1, 0])),
            name(1, Kind::Derived, 1, &Members::World),
            name(1, Kind::Derived, 1, &two(&[0], &[1])),
        ] {
            assert_ne!(base, other);
        }
        let split = |a: &[u32], b: &[u32]| name(1, Kind::TwoGroups, 1, &two(a, b));
        assert_ne!(split(&[0, 1], &[2]), split(&[0], &[1, 2]));
        assert_eq!(split(&[0, 1], &[2]), split(&[2], &[0, 1]));
    }

    #[test]
    fn world_ranks_of_members() {
        let some = Identity::new(1, Members::One(vec![4, 2]));
        assert_eq!(
            (some.world_rank(1), some.world_rank(2), some.world_rank(-1)),
            (Some(2), None, None)
        );
        assert_eq!(Identity::new(1, Members::World).world_rank(7), Some(7));
        let inter = Identity::new(1, Members::of_two([vec![0], vec![1]]));
        assert_eq!(inter.world_rank(0), None);
    }

    #[test]
    fn what_is_kept_first_stays() {
        let first = Arc::new(Identity::new(1, Members::World));
        let second = Arc::new(Identity::new(2, Members::World));
        let mut named = Named::default();
        assert!(!named.is_before());
        named.keep(Some(&first));
        named.keep(Some(&second));
        assert!(matches!(named, Named::Before(Some(kept)) if kept.id == 1));
    }
}
