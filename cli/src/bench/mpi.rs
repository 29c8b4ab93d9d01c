//! The few MPI calls that a measurement needs, in one binary for every MPI: the library is loaded
//! at run time, and its functions are those that a program linked with MPI would call, so that
//! whatever is preloaded comes first.

use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};

use anabranch_engine::mpi::guard::LAST_WORDS;
use anabranch_engine::mpi::owned::OwnType;
use anabranch_engine::mpi::{
    abi, library_version, native, prefer_exported, several, Abi, Datatype, Out, Request, Slot,
    Slots, Win,
};
use anabranch_engine::node::proc;
use anyhow::{anyhow, bail};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::sizes::BLOCK;
use crate::Failure;

const OPEN_MPI: &[&str] = &["libmpi.so.40"];
const MPICH: &[&str] = &["libmpi.so.12", "libmpich.so.12"];
const STANDARD: &[&str] = &["libmpi_abi.so.1"];

type Pointer = *mut c_void;
/// The MPI library of this process, initialized.
pub struct Mpi {
    abi: &'static Abi,
    /// [`BLOCK`] bytes in one run: what a message is a count of that is too long for a count of bytes.
    block: OwnType,
    /// Rank in MPI_COMM_WORLD.
    pub rank: c_int,
    /// Size of MPI_COMM_WORLD.
    pub size: c_int,
}

/// Memory that the other rank writes to.
pub struct Window(Win);

/// Requests under way.
pub struct Requests {
    storage: Vec<u64>,
    capacity: usize,
    count: usize,
}

impl Requests {
    /// Room for `capacity` requests.
    pub fn new(capacity: usize) -> Requests {
        // A word for each is enough for the handles of any ABI.
        Requests {
            storage: vec![0; capacity.max(1)],
            capacity,
            count: 0,
        }
    }
}

impl Mpi {
    /// Loads the library that the launcher or `wanted` calls for, and initializes it.
    ///
    /// # Errors
    /// There is none, or it is none that is known.
    pub fn start(wanted: Option<&str>) -> anyhow::Result<Mpi> {
        let loaded = load(wanted)?;
        let abi = abi().ok_or_else(|| {
            anyhow!("{loaded} is none of the known MPI libraries: Open MPI 4 or 5, the MPICH family, the MPI 5 standard ABI")
        })?;
        prefer_exported();
        // SAFETY: MPI_Init takes null arguments, and this is the only call of it.
        unsafe { native::init(std::ptr::null_mut(), std::ptr::null_mut()) };
        let (mut rank, mut size) = (0, 0);
        native::comm_rank(abi.comm_world, Out::of(&mut rank));
        native::comm_size(abi.comm_world, Out::of(&mut size));
        let block = OwnType::made(abi, |block| {
            native::type_contiguous(BLOCK as c_int, abi.byte, block)
        });
        let Some(block) = block.ok().and_then(|block| block.commit(abi)) else {
            bail!("MPI_Type_contiguous or MPI_Type_commit failed");
        };
        Ok(Mpi {
            abi,
            block,
            rank,
            size,
        })
    }

    /// Whether the library says that it takes device memory. One without the function does not.
    pub fn is_cuda_aware(&self) -> bool {
        native::mpix_query_cuda_support() == 1
    }

    /// Makes memory a window of all ranks, and opens its first epoch. Every rank calls it.
    ///
    /// # Errors
    /// The library reports one.
    ///
    /// # Safety
    /// The memory is `bytes` long, is of a kind that the library takes, and outlives the window.
    pub unsafe fn window(&self, address: Pointer, bytes: usize) -> anyhow::Result<Window> {
        let (abi, world) = (self.abi, self.abi.comm_world);
        let info = abi.info_null;
        let mut window = abi.win_null;
        // SAFETY: as the caller says; one handle is written, which is a word at most.
        let code = unsafe {
            let into = Slot::new(&raw mut window);
            native::win_create(address, isize::try_from(bytes)?, 1, info, world, into)
        };
        if code != abi.success {
            bail!("MPI_Win_create failed with error {code}");
        }
        let window = Window(window);
        self.fence(&window);
        Ok(window)
    }

    /// Ends an epoch of the window and opens the next. Every rank calls it.
    pub fn fence(&self, window: &Window) {
        // SAFETY: the window was made by `window` and not freed.
        unsafe { native::win_fence(0, window.0) };
    }

    /// Frees the window. Every rank calls it.
    pub fn free_window(&self, mut window: Window) {
        // SAFETY: the window was made by `window`; nobody has it any more.
        unsafe { native::win_free(Slot::new(&raw mut window.0)) };
    }

    /// Writes `bytes` to a place in the peer's part of the window.
    ///
    /// # Safety
    /// The memory is valid for reading by MPI until the next fence, and the place lies in the window.
    pub unsafe fn put(
        &self,
        address: Pointer,
        bytes: usize,
        peer: c_int,
        place: usize,
        window: &Window,
    ) {
        let (count, datatype) = self.items(bytes);
        let place = isize::try_from(place).unwrap_or(isize::MAX);
        // SAFETY: as the caller says.
        unsafe {
            native::put(
                address, count, datatype, peer, place, count, datatype, window.0,
            )
        };
    }

    /// The first line of the library's own description.
    pub fn version(&self) -> String {
        library_version()
            .unwrap_or("unknown MPI")
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    }

    /// Ends MPI; every rank calls it.
    pub fn finish(self) {
        drop(self.block);
        // SAFETY: no communication is pending: every request has been waited for.
        unsafe { native::finalize() };
    }

    /// Ends every rank, once the launcher has had the time to hand on what was written before.
    pub fn abort(&self, status: c_int) {
        std::thread::sleep(LAST_WORDS);
        native::abort(self.abi.comm_world, status);
    }

    /// MPI_Barrier over all ranks.
    pub fn barrier(&self) {
        native::barrier(self.abi.comm_world);
    }

    /// Returns when the peer has called it too; no other rank takes part.
    pub fn meet(&self, peer: c_int) {
        self.swap(peer, 0);
    }

    /// Exchanges a number with the peer, through host memory.
    pub fn swap(&self, peer: c_int, mine: u64) -> u64 {
        self.swap_bytes(peer, mine.to_le_bytes())
            .map_or(0, u64::from_le_bytes)
    }

    /// The numbers of all ranks, in order, on rank 0; on the others only theirs. Every rank calls it.
    pub fn gather(&self, mine: u64) -> Vec<u64> {
        if self.rank != 0 {
            self.swap(0, mine);
            return vec![mine];
        }
        let others = (1..self.size).map(|rank| self.swap(rank, mine));
        std::iter::once(mine).chain(others).collect()
    }

    /// The number of rank 0, on every rank. Every rank calls it.
    pub fn tell(&self, mine: u64) -> u64 {
        if self.rank != 0 {
            return self.swap(0, mine);
        }
        for rank in 1..self.size {
            self.swap(rank, mine);
        }
        mine
    }

    /// The sums over all ranks of what each gives at the same place, on rank 0; on the others only
    /// theirs. Every rank calls it, with at most 256 numbers.
    pub fn sum(&self, mine: &[u64]) -> Vec<u64> {
        const MOST: usize = 256;
        let mut packed = [0u8; 8 * MOST];
        for (word, value) in packed.chunks_exact_mut(8).zip(mine) {
            word.copy_from_slice(&value.to_le_bytes());
        }
        if self.rank != 0 {
            self.swap_bytes(0, packed);
            return mine.to_vec();
        }
        let mut sums = mine.to_vec();
        for rank in 1..self.size {
            let theirs = self.swap_bytes(rank, packed).unwrap_or([0; 8 * MOST]);
            for (sum, word) in sums.iter_mut().zip(theirs.chunks_exact(8)) {
                *sum += word.try_into().map_or(0, u64::from_le_bytes);
            }
        }
        sums
    }

    /// Exchanges a few bytes with the peer, through host memory. `None` if MPI reports an error.
    pub fn swap_bytes<const N: usize>(&self, peer: c_int, mine: [u8; N]) -> Option<[u8; N]> {
        const TAG: c_int = 7;
        let mut theirs = [0u8; N];
        let count = c_int::try_from(N).ok()?;
        let (byte, world) = (self.abi.byte, self.abi.comm_world);
        // SAFETY: both buffers hold N bytes and outlive the call.
        let code = unsafe {
            native::sendrecv(
                mine.as_ptr().cast_mut().cast(),
                count,
                byte,
                peer,
                TAG,
                theirs.as_mut_ptr().cast(),
                count,
                byte,
                peer,
                TAG,
                world,
                self.abi.no_status(),
            )
        };
        (code == self.abi.success).then_some(theirs)
    }

    /// Sends to the peer and receives as much from it, in one call.
    ///
    /// # Safety
    /// `from` is valid for reading by MPI, `to` for writing.
    pub unsafe fn sendrecv(
        &self,
        from: Pointer,
        to: Pointer,
        bytes: usize,
        peer: c_int,
        tag: c_int,
    ) {
        let (count, datatype) = self.items(bytes);
        let (world, status) = (self.abi.comm_world, self.abi.no_status());
        // SAFETY: as the caller says.
        unsafe {
            native::sendrecv(
                from, count, datatype, peer, tag, to, count, datatype, peer, tag, world, status,
            )
        };
    }

    /// Blocking send of `bytes` at an address of any memory.
    ///
    /// # Safety
    /// The memory is valid for reading by MPI.
    pub unsafe fn send(&self, address: Pointer, bytes: usize, peer: c_int, tag: c_int) {
        let (count, datatype) = self.items(bytes);
        // SAFETY: as the caller says.
        unsafe { native::send(address, count, datatype, peer, tag, self.abi.comm_world) };
    }

    /// Blocking receive of `bytes` to an address of any memory.
    ///
    /// # Safety
    /// The memory is valid for writing by MPI.
    pub unsafe fn recv(&self, address: Pointer, bytes: usize, peer: c_int, tag: c_int) {
        let (count, datatype) = self.items(bytes);
        // SAFETY: as the caller says.
        unsafe {
            native::recv(
                address,
                count,
                datatype,
                peer,
                tag,
                self.abi.comm_world,
                self.abi.no_status(),
            )
        };
    }

    /// Non-blocking send.
    ///
    /// # Safety
    /// The memory stays valid for reading by MPI until `requests` has been waited for.
    pub unsafe fn isend(
        &self,
        address: Pointer,
        bytes: usize,
        peer: c_int,
        tag: c_int,
        requests: &mut Requests,
    ) {
        let ((count, datatype), slot) = (self.items(bytes), self.next(requests));
        let world = self.abi.comm_world;
        // SAFETY: as the caller says; the slot has room for one request.
        unsafe { native::isend(address, count, datatype, peer, tag, world, slot) };
    }

    /// Non-blocking receive.
    ///
    /// # Safety
    /// The memory stays valid for writing by MPI until `requests` has been waited for.
    pub unsafe fn irecv(
        &self,
        address: Pointer,
        bytes: usize,
        peer: c_int,
        tag: c_int,
        requests: &mut Requests,
    ) {
        let ((count, datatype), slot) = (self.items(bytes), self.next(requests));
        let world = self.abi.comm_world;
        // SAFETY: as the caller says; the slot has room for one request.
        unsafe { native::irecv(address, count, datatype, peer, tag, world, slot) };
    }

    /// Persistent send, not started.
    ///
    /// # Safety
    /// The memory stays valid for reading by MPI until `requests` is freed.
    pub unsafe fn send_init(
        &self,
        address: Pointer,
        bytes: usize,
        peer: c_int,
        tag: c_int,
        requests: &mut Requests,
    ) {
        let ((count, datatype), slot) = (self.items(bytes), self.next(requests));
        let world = self.abi.comm_world;
        // SAFETY: as the caller says; the slot has room for one request.
        unsafe { native::send_init(address, count, datatype, peer, tag, world, slot) };
    }

    /// Persistent receive, not started.
    ///
    /// # Safety
    /// The memory stays valid for writing by MPI until `requests` is freed.
    pub unsafe fn recv_init(
        &self,
        address: Pointer,
        bytes: usize,
        peer: c_int,
        tag: c_int,
        requests: &mut Requests,
    ) {
        let ((count, datatype), slot) = (self.items(bytes), self.next(requests));
        let world = self.abi.comm_world;
        // SAFETY: as the caller says; the slot has room for one request.
        unsafe { native::recv_init(address, count, datatype, peer, tag, world, slot) };
    }

    /// Starts persistent requests.
    pub fn start_all(&self, requests: &mut Requests) {
        let count = c_int::try_from(requests.count).unwrap_or(c_int::MAX);
        // SAFETY: the array holds that many persistent requests, none of them started.
        several::startall(unsafe { Slots::new(requests.storage.as_mut_ptr().cast(), count) });
    }

    /// Waits for persistent requests, which can be started again.
    pub fn wait_started(&self, requests: &mut Requests) {
        let count = requests.count;
        self.wait_all(requests);
        requests.count = count;
    }

    /// Frees persistent requests, none of which is started.
    pub fn free_all(&self, requests: &mut Requests) {
        for index in 0..std::mem::take(&mut requests.count) {
            let offset = index * self.abi.handle_bytes;
            // SAFETY: the request was made by `send_init` or `recv_init`, lies within the storage, and is inactive.
            unsafe {
                let request = requests.storage.as_mut_ptr().byte_add(offset);
                native::request_free(Slot::new(request.cast()))
            };
        }
    }

    /// Waits for all requests and forgets them.
    pub fn wait_all(&self, requests: &mut Requests) {
        self.wait_from(0, requests);
    }

    /// Waits for all but the first so many requests, and forgets those.
    pub fn wait_from(&self, first: usize, requests: &mut Requests) {
        let count = requests.count.saturating_sub(first);
        let offset = first.min(requests.count) * self.abi.handle_bytes;
        // SAFETY: the array holds that many requests from there on, each started and not yet waited for.
        unsafe {
            let array = requests.storage.as_mut_ptr().byte_add(offset).cast();
            native::waitall(
                c_int::try_from(count).unwrap_or(c_int::MAX),
                array,
                std::ptr::without_provenance_mut(self.abi.statuses_ignore),
            )
        };
        requests.count -= count;
    }

    /// Count and datatype of a message.
    fn items(&self, bytes: usize) -> (c_int, Datatype) {
        match count(bytes) {
            Count::Bytes(count) => (count, self.abi.byte),
            Count::Blocks(count) => (count, self.block.get()),
        }
    }

    /// The next place in the array of requests, which is dense in the handles of this ABI.
    fn next<'a>(&self, requests: &'a mut Requests) -> Slot<'a, Request> {
        assert!(
            requests.count < requests.capacity,
            "more requests than there is room for"
        );
        let offset = requests.count * self.abi.handle_bytes;
        requests.count += 1;
        // SAFETY: a handle has at most 8 bytes, so the offset lies within the words of the storage.
        unsafe { Slot::new(requests.storage.as_mut_ptr().byte_add(offset).cast()) }
    }
}

/// A message as MPI is told of it, whose counts are C ints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Count {
    /// So many bytes.
    Bytes(c_int),
    /// So many times [`BLOCK`] bytes.
    Blocks(c_int),
}

/// Sizes are checked to fit when the command line is read.
fn count(bytes: usize) -> Count {
    match c_int::try_from(bytes) {
        Ok(count) => Count::Bytes(count),
        Err(_) => Count::Blocks(c_int::try_from(bytes / BLOCK).unwrap_or(c_int::MAX)),
    }
}

/// Loads an MPI library for everyone in the process to see, and says which.
fn load(wanted: Option<&str>) -> anyhow::Result<String> {
    let names = match wanted {
        Some(name) => by_name(name),
        None => by_launcher(|name| std::env::var_os(name).is_some())?
            .iter()
            .map(PathBuf::from)
            .collect(),
    };
    let folders = launcher_folders();
    let mut reason = String::new();
    for name in &names {
        // A launcher's own library first: another version of the same MPI may be installed in the system.
        let beside = folders
            .iter()
            .map(|folder| folder.join(name))
            .filter(|path| path.exists());
        for candidate in beside.chain([name.clone()]) {
            match open(&candidate) {
                Ok(()) => return Ok(candidate.display().to_string()),
                Err(why) => reason = why,
            }
        }
    }
    Err(Failure::new(
        127,
        format!("cannot load the MPI library ({reason}); name it with --mpi PATH"),
    )
    .into())
}

/// Libraries for the value of `--mpi`.
fn by_name(name: &str) -> Vec<PathBuf> {
    match name {
        "openmpi" => OPEN_MPI.iter().map(PathBuf::from).collect(),
        "mpich" => MPICH.iter().map(PathBuf::from).collect(),
        "abi" => STANDARD.iter().map(PathBuf::from).collect(),
        _ => vec![PathBuf::from(name)],
    }
}

/// Libraries by the variables that launchers set for their ranks.
fn by_launcher(is_set: impl Fn(&str) -> bool) -> anyhow::Result<Vec<&'static str>> {
    if is_set("OMPI_COMM_WORLD_RANK") {
        return Ok(OPEN_MPI.to_vec());
    }
    if is_set("PMIX_RANK") {
        return Ok([OPEN_MPI, MPICH].concat());
    }
    if ["PMI_RANK", "PMI_ID", "PMI_FD"]
        .iter()
        .any(|name| is_set(name))
    {
        return Ok([MPICH, OPEN_MPI].concat());
    }
    let text = "not started by an MPI launcher: mpirun -np 2 anabranch bench ..., or anabranch run -np 2 -- anabranch bench ...";
    Err(Failure::new(2, text).into())
}

/// Folders of libraries in the installations from which this process was launched.
fn launcher_folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    let mut pid = std::os::unix::process::parent_id();
    for _ in 0..4 {
        let Ok(launcher) = std::fs::read_link(format!("/proc/{pid}/exe")) else {
            break;
        };
        if let Some(prefix) = launcher.ancestors().nth(2) {
            folders.extend(["lib", "lib64"].map(|folder| prefix.join(folder)));
        }
        match proc::stat(pid) {
            Some(stat) if stat.parent > 1 => pid = stat.parent,
            _ => break,
        }
    }
    folders
}

fn open(path: &Path) -> Result<(), String> {
    // SAFETY: loading an MPI library runs its initializers, which is what they are for.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
    // It stays: an MPI library does not survive being unloaded.
    std::mem::forget(library.map_err(|error| error.to_string())?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_long_for_a_count_of_bytes_is_a_count_of_blocks() {
        for bytes in [0, 1, 4096, 2_147_483_647] {
            assert_eq!(count(bytes), Count::Bytes(bytes as c_int));
        }
        assert_eq!(count(2 << 30), Count::Blocks(33_554_432));
        assert_eq!(count((2 << 30) + 64), Count::Blocks(33_554_433));
        // As many bytes as there are numbers in a C int, eightfold.
        assert_eq!(count(16 << 30), Count::Blocks(268_435_456));
        assert_eq!(count(32 << 30), Count::Blocks(536_870_912));
    }

    #[test]
    fn the_launchers_variables_choose_the_library() {
        let first = |set: &[&str]| {
            by_launcher(|name| set.contains(&name))
                .map(|names| names[0])
                .ok()
        };
        assert_eq!(
            first(&["OMPI_COMM_WORLD_RANK", "PMIX_RANK"]),
            Some("libmpi.so.40")
        );
        assert_eq!(first(&["PMIX_RANK"]), Some("libmpi.so.40"));
        assert_eq!(first(&["PMI_RANK", "PMI_FD"]), Some("libmpi.so.12"));
        assert_eq!(first(&[]), None);
    }
}
