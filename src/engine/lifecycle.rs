//! From `MPI_Init` to `MPI_Finalize`.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::config::{Config, MpiCuda};
use crate::engine::core::Entry;
use crate::engine::rtr::Unseen;
use crate::engine::tracing;
use crate::engine::{comms, early, engine, helper, requests, statistics, types};
use crate::engine::{Core, Engine, Env, ENGINE};
use crate::mpi::{guard, native, tools, Abi, Family, Function, Out};
use crate::node::{Launch, Node, NodeError, Options, Peer};
use crate::stats::{self, Counter, RankSnapshot, Reason, Snapshot, StatsTarget, Summary};
use crate::transfer::{self, node_options};
use crate::{cuda, logging, mpi};

/// The MPI functions that the engine calls for messages that the program sends and receives by other
/// functions. All libraries with MPI 3.0 have these. Any other function that a library lacks costs only what
/// needs it.
const NEEDED: [Function; 24] = [
    Function::Bsend,
    Function::Ibsend,
    Function::Isend,
    Function::Recv,
    Function::Irecv,
    Function::Sendrecv,
    Function::Iprobe,
    Function::Improbe,
    Function::Imrecv,
    Function::Test,
    Function::Wait,
    Function::RequestGetStatus,
    Function::GrequestStart,
    Function::GrequestComplete,
    Function::GetElementsX,
    Function::StatusSetElementsX,
    Function::StatusSetCancelled,
    Function::TypeDup,
    Function::TypeSizeX,
    Function::TypeGetExtent,
    Function::TypeGetTrueExtent,
    Function::CommRank,
    Function::CommCreateKeyval,
    Function::CommSetAttr,
];

/// Arms the library after a successful `MPI_Init`, unless it has nothing to do in this process. Makes no
/// communicating call: it must not wait for a rank without the library.
pub fn arm() {
    if engine().is_some() {
        return;
    }
    let (config, warnings) = Config::from_env();
    logging::set_up(&config);
    if !config.enabled {
        return;
    }
    log::info!("anabranch {}", stats::version::long());
    let abi = mpi::abi();
    if abi.is_none_or(speaks_for_the_job) {
        logging::report(&config, &warnings);
    }
    let Some(abi) = abi else { return };
    if let Err(why) = start(abi, config) {
        log::info!("not taking part: {why}");
    }
}

/// What concerns the whole job is said once, by rank 0 of the world that the launcher has started.
fn speaks_for_the_job(abi: &'static Abi) -> bool {
    let mut rank = 0;
    if Function::CommRank.available() {
        native::comm_rank(abi.comm_world, Out::of(&mut rank));
    }
    rank == 0 && !mpi::is_spawned(abi)
}

fn start(abi: &'static Abi, mut config: Config) -> Result<(), String> {
    if !cuda::arm() {
        return Err("no cuda driver in this process".into());
    }
    check_tools()?;
    if let Some(absent) = NEEDED.iter().find(|function| !function.available()) {
        let level = match speaks_for_the_job(abi) {
            true => log::Level::Warn,
            false => log::Level::Info,
        };
        log::log!(
            level,
            "the MPI library lacks P{}, without which no message can be taken: every message stays native; use another MPI \
             library, or ANABRANCH=off to silence this",
            absent.name()
        );
        return Err("the MPI library lacks a function".into());
    }
    let (mut rank, mut provided) = (0, 0);
    native::comm_rank(abi.comm_world, Out::of(&mut rank));
    native::query_thread(Out::of(&mut provided));
    logging::set_rank(rank);
    let is_spawned = mpi::is_spawned(abi);
    if speaks_for_the_job(abi) {
        if let Some(notice) = crate::config::notice() {
            log::warn!("{notice}");
        }
    }
    if is_spawned {
        config.stats = config.stats.of_spawned(std::process::id());
    }
    let world_rank = u32::try_from(rank).map_err(|_| "no rank in MPI_COMM_WORLD".to_string())?;
    let launch = Launch::detect();
    let options = node_options(&config);
    let cuda_aware = is_cuda_aware(&config);
    let node = match is_spawned {
        false => enter_node(&launch, world_rank, &options, cuda_aware),
        true if cuda_aware => return Err("a spawned world stays native".into()),
        // The launcher's environment does not tell this world from its parents'. All messages go through host
        // memory.
        true => Node::alone(&launch, world_rank, &options),
    };
    let node = node.map_err(|error| error.to_string())?;
    if !comms::start(abi, world_rank) {
        return Err("no communicator attribute".into());
    }
    tracing::begin(abi, &config, &launch, (world_rank, is_spawned));
    statistics::begin(abi, &config, &launch, is_spawned);
    inject_panic(&config);
    guard::trace_calls_if_logged();
    let is_aside = config.aside;
    set_up(
        abi,
        config,
        node,
        cuda_aware,
        provided == abi.thread_multiple,
    )?;
    if is_aside {
        guard::set_aside(true);
    }
    Ok(())
}

/// Makes the engine. From now on calls are taken.
fn set_up(
    abi: &'static Abi,
    config: Config,
    node: Node,
    cuda_aware: bool,
    multiple: bool,
) -> Result<(), String> {
    types::start(abi);
    let reads_lengths = early::reads_lengths(abi);
    let core = Mutex::new(Core::new(&config));
    let env = Env {
        transfer: transfer::Env::new(config, node, abi.err_other),
        abi,
        multiple,
        cuda_aware,
        reads_lengths,
        unseen: Unseen::default(),
    };
    let armed = ENGINE.set(Engine {
        env,
        core,
        live: AtomicBool::new(false),
        driving: AtomicU32::new(0),
        activity: AtomicU32::new(0),
        native: AtomicU32::new(0),
        native_before_live: AtomicU32::new(0),
        progress: OnceLock::new(),
        helper: helper::Handle::new(),
    });
    if armed.is_err() {
        return Err("armed already".into());
    }
    // SAFETY: the handler only stores to an atomic.
    unsafe { libc::pthread_atfork(None, None, Some(disarm_child)) };
    guard::before_another_calls(|| {
        if let Some(engine) = engine() {
            drop(engine.core.lock());
        }
    });
    guard::set_armed(true);
    Ok(())
}

/// The engine, for a request that the MPI library has no function for. If messages are not taken
/// (`ANABRANCH=off`, no driver, no peers), an engine is made that completes requests and takes no message: it
/// knows no device, no peer and no communicator.
///
/// # Errors
/// The code for the program. The reason was written to stderr.
pub fn engine_for_requests() -> Result<&'static Engine, c_int> {
    if let Some(engine) = engine() {
        return Ok(engine);
    }
    let Some(abi) = mpi::abi() else {
        return Err(guard::UNKNOWN_ERROR);
    };
    let (mut config, _) = Config::from_env();
    config.stats = StatsTarget::Off;
    logging::set_up(&config);
    let mut provided = 0;
    native::query_thread(Out::of(&mut provided));
    cuda::stay_away();
    let node = Node::alone(&Launch::detect(), u32::MAX, &node_options(&config));
    let made = node
        .map_err(|error| error.to_string())
        .and_then(|node| set_up(abi, config, node, false, provided == abi.thread_multiple));
    match (made, engine()) {
        (_, Some(engine)) => Ok(engine),
        (made, None) => {
            let why = made.err().unwrap_or_default();
            log::error!("a request that the MPI library lacks cannot be made of others: {why}");
            Err(abi.err_other)
        }
    }
}

/// Names the tools that wrap MPI functions, and refuses one that would not call this library.
fn check_tools() -> Result<(), String> {
    let tools = tools::found();
    for (place, those) in [("in front", &tools.before), ("behind", &tools.behind)] {
        for tool in those {
            log::info!("a tool wraps MPI functions, {place} of the library: {tool}");
        }
    }
    match tools.behind.iter().find(|tool| !tool.uses_pmpi) {
        Some(tool) => {
            say_bypassed(&tool.to_string());
            Err("a tool bypasses the library".into())
        }
        None => Ok(()),
    }
}

/// A tool behind the library calls the MPI library without it.
fn say_bypassed(tool: &str) {
    log::warn!(
        "{tool} wraps MPI functions and does not go on by PMPI, so that its calls bypass the library: every message of this \
         rank stays native; put the tool in front (before libanabranch.so in LD_PRELOAD), or set ANABRANCH_LOG=error to \
         silence this"
    );
}

/// This library's `MPI_Init` was entered behind a tool.
static ENTERED: AtomicBool = AtomicBool::new(false);

/// `MPI_Init` or `MPI_Init_thread` is about to be called.
pub fn note_init() {
    ENTERED.store(true, Ordering::Relaxed);
}

/// A tool behind the library has returned from its `MPI_Init`.
pub fn after_init_of_tool() {
    if ENTERED.load(Ordering::Relaxed) {
        return;
    }
    let (config, warnings) = Config::from_env();
    logging::set_up(&config);
    if config.enabled && cuda::arm() {
        if mpi::abi().is_none_or(speaks_for_the_job) {
            logging::report(&config, &warnings);
        }
        say_bypassed("a tool");
    }
}

/// Registers with the other ranks of the node. If they cannot be met, and the MPI library does not know
/// device memory, this rank goes on alone, because that library must not see any.
fn enter_node(
    launch: &Launch,
    world_rank: u32,
    options: &Options,
    cuda_aware: bool,
) -> Result<Node, NodeError> {
    let refused = match Node::register(launch, world_rank, options) {
        Ok(node) => return Ok(node),
        Err(error) => error,
    };
    // A world inside another is no fault.
    let level = match refused {
        NodeError::RankDiffers { .. } => log::Level::Info,
        _ => log::Level::Warn,
    };
    if refused.leaves_alone() && !cuda_aware {
        log::log!(
            level,
            "{refused}; all device buffers of this rank go by host memory"
        );
        return Node::alone(launch, world_rank, options);
    }
    log::log!(level, "{refused}; every message of this rank stays native");
    Err(refused)
}

/// A forked child has no helper and must not use its parent's driver state or shared memory.
extern "C" fn disarm_child() {
    guard::set_armed(false);
    tracing::forget();
}

fn inject_panic(config: &Config) {
    let Some(name) = &config.inject_panic else {
        return;
    };
    match Function::by_name(name) {
        Some(function) => guard::inject_panic(function),
        None => log::warn!("ANABRANCH_INJECT_PANIC: there is no MPI function {name}"),
    }
}

fn is_cuda_aware(config: &Config) -> bool {
    match config.mpi_cuda {
        MpiCuda::Yes => true,
        MpiCuda::No => false,
        MpiCuda::Auto => {
            Function::MpixQueryCudaSupport.available() && native::mpix_query_cuda_support() == 1
        }
    }
}

/// `MPI_Finalize`: serves what is owed, then finalizes natively, then writes the summary.
///
/// # Safety
/// It is called by the program's `MPI_Finalize`.
pub unsafe fn finalize() -> c_int {
    // SAFETY: the program's call.
    let natively = || unsafe { native::finalize() };
    let Some(engine) = engine() else {
        return natively();
    };
    engine.serve_out();
    say_out_of_reach(engine);
    engine.close_relays();
    engine.helper.stop(&engine.env);
    engine.end_requests();
    {
        let mut core = engine.core.lock();
        core.gpu.survey.keep(&engine.env);
        core.gpu.close();
    }
    engine.end_progress();
    guard::set_armed(false);
    tracing::end(true);
    let own = engine.env.node.own();
    publish(engine);
    own.set_published();
    let collector = engine.collector();
    let code = natively();
    if let Some(peers) = collector {
        summarize(engine, &peers);
    }
    engine.env.node.unregister();
    code
}

/// By now every rank of this node that will ever register has done so. Reports messages that went by the MPI
/// library because their receiver's record was missing, which need not have been so.
fn say_out_of_reach(engine: &Engine) {
    let (messages, bytes) = stats::snapshot().fallback(Reason::NotRegistered);
    if messages == 0 {
        return;
    }
    if let Some((here, reached)) = engine.env.node.out_of_reach() {
        log::warn!(
            "of {here} ranks on this host only {reached} can be reached from this one: {messages} messages ({bytes} bytes) in \
             device memory went through the MPI library; preload the same version of the library into all ranks, in one PID \
             namespace and with one /dev/shm"
        );
    }
}

fn publish(engine: &Engine) {
    stats::publish(engine.env.node.own().counters());
    statistics::publish(engine.env.node.own());
}

/// Longest wait in `MPI_Finalize` for a peer's counters.
const SUMMARY_WAIT: Duration = Duration::from_secs(2);

/// Longest wait in `MPI_Finalize` for peers that move messages over this rank's GPUs. They need no more than
/// a few milliseconds, and begin no more from then on.
const RELAYS_WAIT: Duration = Duration::from_secs(2);

fn summarize(engine: &Engine, peers: &[Arc<Peer>]) {
    let deadline = Instant::now() + SUMMARY_WAIT;
    let mut summary = Summary::default();
    for peer in peers {
        let mut backoff = crate::node::Backoff::sleeping(Duration::from_millis(5));
        while !peer.published() && Instant::now() < deadline && peer.alive() {
            backoff.snooze();
        }
        summary.add(RankSnapshot {
            rank: peer.world_rank(),
            pid: peer.pid(),
            values: Snapshot::load(peer.counters()),
            details: statistics::of(peer),
        });
    }
    summary.tell(stats::details::about());
    let target = engine.env.config.stats.of_rank(engine.env.world_rank);
    if let Err(error) = summary.write(&target) {
        match target {
            StatsTarget::File(path) => log::warn!(
                "ANABRANCH_STATS: {}: {error}; the counters are lost, name a file that can be written",
                path.display()
            ),
            _ => log::warn!("ANABRANCH_STATS: {error}; the counters are lost"),
        }
    }
}

impl Engine {
    /// Serves until every message of this rank is received, or its receiver can receive no more. MPICH is
    /// made to progress only as far as RTSs that it still has to send need that. Version 5 fails in
    /// `MPI_Finalize` if it has taken in a message that nobody received, and a program that leaves such
    /// messages behind succeeds there as long as it makes no further call that progresses. Open MPI is made
    /// to progress: a receiver may be in a native send to this rank that does not end before, and that
    /// natively ends while this rank finalizes.
    fn serve_out(&self) {
        self.env.node.own().set_finalizing();
        if !self.live.load(Ordering::Acquire) {
            return;
        }
        // To the MPI library, requests that are complete but were not asked about lately would be pending.
        self.core.lock().test_draining(&self.env, usize::MAX);
        self.until(|engine, core| {
            // A receiver that was put to does not ring.
            core.serve_now();
            core.close_received(&engine.env, usize::MAX);
            let mut waiting = false;
            for id in core.all_sends_out() {
                core.test_value(&engine.env, id);
                waiting |= core.is_wanted(&engine.env, id);
            }
            core.progress_wanted = engine.env.abi.family == Family::OpenMpi;
            // Messages that have begun to move are finished. Those that never matched are not waited for.
            (!waiting && core.moving.is_empty()).then_some(())
        });
        let core = self.core.lock();
        stats::add(Counter::FinalizeUnmatched, core.sends_out() as u64);
    }

    /// Frees the staging that peers use on this rank's GPUs, once they have released it.
    fn close_relays(&self) {
        let deadline = Instant::now() + RELAYS_WAIT;
        let mut backoff = crate::node::Backoff::sleeping(Duration::from_millis(5));
        loop {
            let mut core = self.core.lock();
            let is_closed = core.gpu.relays.close(&self.env);
            if is_closed || Instant::now() > deadline {
                core.gpu.relays.free(&self.env, is_closed);
                return;
            }
            drop(core);
            backoff.snooze();
        }
    }

    /// Ends the generalized requests of sends that the program has freed and nobody has received, and the
    /// requests kept for later sends: MPI must not find any in Finalize.
    fn end_requests(&self) {
        let mut core = self.core.lock();
        core.requests.close(self.env.abi);
        for (_, entry) in std::mem::take(&mut core.orphans) {
            let send = match entry {
                Entry::Send(id) => core.sends.get_mut(id),
                _ => None,
            };
            if let Some(own) = send.and_then(|send| send.handle.take()) {
                requests::drop_request(self.env.abi, own);
            }
        }
    }

    /// The ranks whose counters this rank sums up, if it is the lowest of its node and a summary is wanted.
    fn collector(&self) -> Option<Vec<Arc<Peer>>> {
        if self.env.config.stats == StatsTarget::Off {
            return None;
        }
        let mut peers = self.env.node.peers();
        peers.retain(|peer| self.env.node.is_mutual(peer));
        (peers.first()?.world_rank() == self.env.world_rank).then_some(peers)
    }
}
