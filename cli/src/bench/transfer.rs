//! Transfers of the library without MPI, between the two ranks. Offers go through memory that both ranks have
//! mapped.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};

use anabranch_engine::config::Config;
use anabranch_engine::node::{Backoff, Launch, Node, RTS_BYTES};
use anabranch_engine::transfer::node_options;
use anabranch_engine::transfer::story::Path;
use anabranch_engine::transfer::transfers::{
    Descriptor, Ended, Expected, LentMemory, Receiving, Sending, Transfers,
};
use anyhow::{bail, Context};
use memmap2::MmapMut;

use super::mpi::Mpi;
use super::{Arguments, Clock, Kind};

/// Offers that are under way in one direction at once.
pub const ROOM: usize = 256;
/// Words of an offer.
const WORDS: usize = RTS_BYTES.div_ceil(8);

/// One direction: the sender posts offers, and the receiver says how many it has received.
#[repr(C, align(64))]
struct Mailbox {
    received: AtomicU64,
    offers: [Posted; ROOM],
}

/// An offer. The number says which it is, once its words are there.
#[repr(C, align(128))]
struct Posted {
    number: AtomicU64,
    words: [AtomicU64; WORDS],
}

/// Both directions.
type Page = [Mailbox; 2];

/// What a rank holds for transfers.
pub struct Bench {
    transfers: Transfers,
    map: MmapMut,
    role: usize,
    peer: u32,
    /// Offers made and received so far.
    posted: u64,
    taken: u64,
    /// The next transfer, if the peer was told where it goes.
    expected: Option<Expected>,
    /// The path of the latest transfer.
    path: Path,
}

impl Bench {
    /// Both ranks call it; it meets the peer by MPI, once.
    ///
    /// # Errors
    /// The node or the shared memory cannot be had.
    pub fn prepare(mpi: &Mpi, role: usize, peer: i32) -> anyhow::Result<Bench> {
        let own = format!("/dev/shm/anabranch-bench-{}", std::process::id());
        // The name of the first rank's file, in 64 bytes.
        let mut name = [0; 64];
        if role == 0 {
            let file = File::options()
                .read(true)
                .write(true)
                .create_new(true)
                .open(&own);
            let file = file.with_context(|| format!("{own} cannot be made"))?;
            file.set_len(size_of::<Page>() as u64)?;
            name[..own.len()].copy_from_slice(own.as_bytes());
        }
        let theirs = mpi.swap_bytes(peer, name).context("MPI_Sendrecv failed")?;
        let path = if role == 0 { name } else { theirs };
        let path = String::from_utf8_lossy(&path)
            .trim_end_matches('\0')
            .to_owned();
        let file = File::options().read(true).write(true).open(&path);
        let file = file.with_context(|| format!("{path}: the ranks are not on one node"))?;
        // SAFETY: both ranks use it as atomics only, and it keeps its size.
        let map = unsafe { MmapMut::map_mut(&file) }?;
        mpi.meet(peer);
        if role == 0 {
            std::fs::remove_file(&path)?;
        }
        let (config, _) = Config::from_env();
        // A job of its own: a library that is preloaded has entered the ranks in the directory of theirs.
        let launch = Launch::named(&path);
        let node = Node::register(&launch, role as u32, &node_options(&config))?;
        mpi.meet(peer);
        Ok(Bench {
            transfers: Transfers::new(config, node, 1),
            map,
            role,
            peer: 1 - role as u32,
            posted: 0,
            taken: 0,
            expected: None,
            path: Path::Unknown,
        })
    }

    fn mailbox(&self, of: usize) -> &Mailbox {
        // SAFETY: the map is as long and aligned to a page; all of it is atomics.
        let page: &Page = unsafe { &*self.map.as_ptr().cast() };
        &page[of]
    }

    fn post(&mut self, told: &Descriptor) {
        self.posted += 1;
        let posted = &self.mailbox(self.role).offers[self.posted as usize % ROOM];
        let mut padded = [0; 8 * WORDS];
        padded[..RTS_BYTES].copy_from_slice(told);
        for (word, bytes) in posted.words.iter().zip(padded.chunks_exact(8)) {
            let value = bytes.try_into().map_or(0, u64::from_ne_bytes);
            word.store(value, Ordering::Relaxed);
        }
        posted.number.store(self.posted, Ordering::Release);
    }

    fn next(&mut self) -> Option<Descriptor> {
        let next = self.taken + 1;
        let posted = &self.mailbox(1 - self.role).offers[next as usize % ROOM];
        if posted.number.load(Ordering::Acquire) != next {
            return None;
        }
        let mut padded = [0; 8 * WORDS];
        for (word, bytes) in posted.words.iter().zip(padded.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        let mut told = [0; RTS_BYTES];
        told.copy_from_slice(&padded[..RTS_BYTES]);
        self.taken = next;
        Some(told)
    }

    /// Sends and receives so many at once, and waits for all.
    ///
    /// # Safety
    /// The memory is `bytes` long, and nobody else uses it meanwhile.
    unsafe fn exchange(
        &mut self,
        sends: usize,
        receives: usize,
        (from, to): (*const c_void, *mut c_void),
        bytes: usize,
    ) -> anyhow::Result<()> {
        let mut sending: VecDeque<Sending> = VecDeque::with_capacity(sends);
        let mut receiving: VecDeque<Receiving> = VecDeque::with_capacity(receives);
        for _ in 0..sends {
            let number = Some(self.posted + 1);
            let Bench {
                transfers, peer, ..
            } = self;
            // SAFETY: as the caller says.
            let from = unsafe { LentMemory::new(from.cast_mut(), bytes as u64) };
            let (one, told) = transfers.offer(*peer, from, number)?;
            self.post(&told);
            sending.push_back(one);
        }
        let last = self.taken + receives as u64;
        let mut backoff = Backoff::new();
        while self.taken < last || !receiving.is_empty() || !sending.is_empty() {
            while self.taken < last {
                let Some(told) = self.next() else { break };
                let taken = match self.expected.take() {
                    Some(expected) => {
                        let taken = self.transfers.take_expected(&told, expected);
                        taken.map_err(|(why, _)| why)
                    }
                    None => {
                        // SAFETY: as the caller says.
                        let to = unsafe { LentMemory::new(to, bytes as u64) };
                        self.transfers.take(&told, to)
                    }
                };
                match taken {
                    Ok(one) => receiving.push_back(one),
                    Err(why) => bail!("a transfer cannot be taken: {why:?}"),
                }
            }
            if self.transfers.progress() {
                backoff.reset();
            } else {
                backoff.snooze();
            }
            let Bench {
                transfers, path, ..
            } = self;
            left(&mut receiving, path, |one| transfers.test_receive(one))?;
            left(&mut sending, path, |one| transfers.test_send(one))?;
        }
        let received = self.taken;
        self.mailbox(1 - self.role)
            .received
            .store(received, Ordering::Release);
        while sends > 0 && self.mailbox(self.role).received.load(Ordering::Acquire) < self.posted {
            self.transfers.progress();
            backoff.snooze();
        }
        Ok(())
    }

    /// Tells the peer where its next transfer goes, as a receive that is posted ahead does.
    ///
    /// # Safety
    /// As [`Bench::exchange`]; the memory is the peer's to write to until [`Bench::forget`].
    unsafe fn expect_next(&mut self, to: *mut c_void, bytes: usize) {
        if self.expected.is_none() {
            let (peer, number) = (self.peer, self.taken + 1);
            // SAFETY: as the caller says.
            let to = unsafe { LentMemory::new(to, bytes as u64) };
            self.expected = self.transfers.expect(peer, number, to);
        }
    }

    /// Nothing more is expected. The peer has sent nothing since.
    fn forget(&mut self) -> anyhow::Result<()> {
        let Some(expected) = self.expected.take() else {
            return Ok(());
        };
        match self.transfers.forget(expected) {
            Ok(true) => Ok(()),
            _ => bail!("the peer writes a transfer that it has not offered"),
        }
    }

    /// Seconds for `iterations` windows of transfers.
    ///
    /// # Errors
    /// A transfer fails.
    ///
    /// # Safety
    /// As [`Bench::exchange`].
    pub unsafe fn measure(
        &mut self,
        arguments: &Arguments,
        bytes: usize,
        memory: (*const c_void, *mut c_void),
        clock: &Clock,
    ) -> anyhow::Result<f64> {
        let (warmup, iterations) = arguments.iterations(bytes);
        let window = arguments.window(bytes);
        let mut start = clock.seconds();
        for iteration in 0..warmup + iterations {
            if iteration == warmup {
                start = clock.seconds();
            }
            let steps: &[(usize, usize)] = match (arguments.kind, self.role) {
                (Kind::Latency, 0) => &[(1, 0), (0, 1)],
                (Kind::Latency, _) => &[(0, 1), (1, 0)],
                (Kind::Bibw, _) => &[(window, window)],
                (_, 0) => &[(window, 0)],
                (_, _) => &[(0, window)],
            };
            for (sends, receives) in steps.iter().copied() {
                if arguments.kind == Kind::Latency {
                    // SAFETY: as the caller says.
                    unsafe { self.expect_next(memory.1, bytes) };
                }
                // SAFETY: as the caller says.
                unsafe { self.exchange(sends, receives, memory, bytes) }?;
            }
        }
        let seconds = clock.seconds() - start;
        self.forget()?;
        Ok(seconds)
    }

    /// The path of the latest transfer.
    pub fn path(&self) -> Path {
        self.path
    }
}

/// Drops those that have ended, and keeps the path of the last one.
fn left<T>(
    under_way: &mut VecDeque<T>,
    path: &mut Path,
    mut test: impl FnMut(T) -> Result<Ended, T>,
) -> anyhow::Result<()> {
    for _ in 0..under_way.len() {
        let Some(one) = under_way.pop_front() else {
            break;
        };
        match test(one) {
            Ok(Ended::Complete(by)) => *path = by,
            Ok(Ended::Truncated(bytes)) => bail!("a transfer of {bytes} bytes was offered"),
            Ok(Ended::Failed(why)) => bail!("a transfer failed: {why}"),
            Err(pending) => under_way.push_back(pending),
        }
    }
    Ok(())
}
