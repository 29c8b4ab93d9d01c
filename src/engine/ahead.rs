//! Host memory for long messages, got ready before it is needed.
//!
//! A block of staging of 16 MiB takes 8 to 15 ms until its pages are there, and the memory that links are measured with a
//! millisecond (one H200, a virtual machine), which the message that needed it waited for: a thread that lives as long as that
//! takes does it instead, from the first message on that is an eighth as long as those that are split. It makes no call of
//! the driver's and none of MPI's. Until the memory is there messages do without.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::cuda::PinnedPool;
use crate::engine::helper::spawn;
use crate::engine::route::SURVEY_BYTES;
use crate::engine::{engine, Env};
use crate::stats::{self, Counter};

/// How long the thread looks for blocks of peers that have just met the same message as this rank.
const FOLLOW: Duration = Duration::from_millis(100);
const FOLLOW_PAUSE: Duration = Duration::from_millis(1);

/// What has been asked for, and the thread that is at it.
#[derive(Default)]
pub struct Ahead {
    /// Blocks of this rank's wide staging that are to be there; none yet where nothing was asked for.
    wanted: Option<u32>,
    thread: Option<JoinHandle<()>>,
    signs: Arc<Signs>,
}

#[derive(Default)]
struct Signs {
    stop: AtomicBool,
    is_warming: AtomicBool,
}

impl Ahead {
    /// A long message is received, or (with one block or more) sent: so many blocks of this rank's staging are to be ready,
    /// and those of its peers to be reached at once. Nothing is done while the thread is at work: it is asked for again.
    #[inline]
    pub fn want(&mut self, env: &Env, pool: &PinnedPool, blocks: u32) {
        if Some(blocks) > self.wanted {
            self.start(env, pool, blocks);
        }
    }

    #[cold]
    fn start(&mut self, env: &Env, pool: &PinnedPool, blocks: u32) {
        let own = env.node.own();
        let blocks = match env.config.paths.host {
            true => blocks.min(own.layout().wide_blocks),
            false => 0,
        };
        if Some(blocks) <= self.wanted || self.thread.as_ref().is_some_and(|at| !at.is_finished()) {
            return;
        }
        self.join();
        let is_first = self.wanted.is_none();
        self.wanted = Some(blocks);
        let has_block = own.begin_wide(blocks);
        if !is_first && !has_block {
            return;
        }
        self.signs.is_warming.store(is_first, Ordering::Release);
        let (pool, signs) = (pool.clone(), Arc::clone(&self.signs));
        let work = move || {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                work(&pool, &signs, is_first, has_block);
            }));
            if done.is_err() {
                stats::add(Counter::Panics, 1);
                log::error!("the thread that gets memory ready met an internal error");
                signs.is_warming.store(false, Ordering::Release);
            }
        };
        match spawn("anabranch-ahead", work) {
            Ok(thread) => self.thread = Some(thread),
            Err(error) => {
                log::debug!("no thread to get memory ready: {error}");
                self.signs.is_warming.store(false, Ordering::Release);
                own.end_wide();
            }
        }
    }

    /// Whether memory to measure links with is being got ready.
    pub fn is_warming(&self) -> bool {
        self.signs.is_warming.load(Ordering::Acquire)
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }

    /// Waits until the thread has ended: at finalize, before anything is unmapped.
    pub fn close(&mut self) {
        self.signs.stop.store(true, Ordering::Release);
        self.join();
    }
}

fn work(pool: &PinnedPool, signs: &Signs, is_first: bool, has_block: bool) {
    if is_first {
        // Measured with soonest.
        pool.warm(SURVEY_BYTES as usize);
        signs.is_warming.store(false, Ordering::Release);
    }
    let Some(engine) = engine() else { return };
    let node = &engine.env.node;
    if has_block {
        node.own().reserve_ahead();
    }
    if !is_first {
        return;
    }
    let began = Instant::now();
    while began.elapsed() < FOLLOW && !signs.stop.load(Ordering::Relaxed) {
        node.peers().iter().for_each(|peer| peer.reach_wide());
        std::thread::sleep(FOLLOW_PAUSE);
    }
}
