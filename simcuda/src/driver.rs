//! The driver of this process: made by cuInit, gone with the process.

use crate::clock::Machine;
use crate::corrupt::Corruptions;
use crate::errors::*;
use crate::fault::Faults;
use crate::host::{Backing, HostMemory};
use crate::job::Job;
use crate::memory::FreeList;
use crate::report::{complain, Report};
use crate::state::{Primary, State};
use crate::topology::Topology;
use crate::types::CUresult;
use crate::vm::Vm;
use crate::work::HostCode;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering::*};

/// Exit status of a process in which a race was found.
pub const EXIT_RACE: i32 = 86;
/// Real time without a call after which a process counts as waiting.
const QUIET_US: u64 = 200;

/// Hardware queues of a context where nothing else is said.
const CONNECTIONS: u64 = 8;

/// Everything the driver knows.
pub struct Driver {
    /// Place in the node.
    pub job: Job,
    /// The node.
    pub topology: Topology,
    /// Its capacities.
    pub machine: Machine,
    /// Addresses.
    pub vm: Vm,
    /// What backs device memory.
    pub host_memory: HostMemory,
    /// Physical GPU of each visible ordinal.
    pub visible: Vec<usize>,
    /// The checker runs.
    pub checking: bool,
    /// CUDA_LAUNCH_BLOCKING=1: kernels and fills are over when their call returns.
    pub launch_blocking: bool,
    /// Large copies and fills take their time without moving bytes.
    pub timing_only: bool,
    /// Processes use a GPU at the same time.
    pub mps: bool,
    /// Pinned memory counts as locked, to which RLIMIT_MEMLOCK is the bound.
    pub memlock: bool,
    /// An allocation of another process is opened once: what is open is refused.
    pub ipc_once: bool,
    /// See [`QUIET_US`].
    pub quiet_ns: u64,
    /// See [`crate::wait::TURN_POLLS`].
    pub turn_polls: u32,
    /// Hardware queues of a context, CUDA_DEVICE_MAX_CONNECTIONS.
    pub connections: u64,
    /// Objects and operations.
    pub state: Mutex<State>,
    /// What the run says of itself.
    pub report: Report,
    /// The background thread sleeps until it is woken.
    pub worker_asleep: AtomicBool,
    /// The process has left its node.
    pub closed: AtomicBool,
    faults: Faults,
    /// Copies that write a wrong byte.
    pub corruptions: Corruptions,
    host_queue: Mutex<VecDeque<(u64, HostCode, CUresult)>>,
    host_ready: Condvar,
    host_thread: AtomicBool,
}

static DRIVER: AtomicPtr<Driver> = AtomicPtr::new(core::ptr::null_mut());
static INIT_ERROR: AtomicI32 = AtomicI32::new(NOT_INITIALIZED);
static PID: AtomicU32 = AtomicU32::new(0);
static INIT: Mutex<()> = Mutex::new(());

/// The driver, once cuInit has succeeded in this process (a forked child has none).
pub fn driver() -> Res<&'static Driver> {
    let p = DRIVER.load(Acquire);
    if p.is_null() {
        return Err(INIT_ERROR.load(Relaxed));
    }
    // SAFETY: set once to a leaked box.
    Ok(unsafe { &*p })
}

/// cuInit.
pub fn init() -> Res {
    let _guard = INIT.lock();
    if !DRIVER.load(Acquire).is_null() {
        return Ok(());
    }
    if PID.load(Relaxed) != 0 {
        // A child forked from an initialised process cannot use the driver, as on hardware.
        return Err(NOT_INITIALIZED);
    }
    match Driver::new() {
        Ok(driver) => {
            let driver: &'static Driver = Box::leak(Box::new(driver));
            DRIVER.store(core::ptr::from_ref(driver).cast_mut(), Release);
            PID.store(std::process::id(), Relaxed);
            spawn("simcuda", move || driver.work());
            // SAFETY: both are functions without arguments that live as long as the library.
            unsafe {
                libc::atexit(at_exit);
                libc::pthread_atfork(None, None, Some(in_child));
            }
            Ok(())
        }
        Err((message, code)) => {
            if !message.is_empty() {
                complain(&message);
            }
            INIT_ERROR.store(code, Relaxed);
            Err(code)
        }
    }
}

extern "C" fn in_child() {
    DRIVER.store(core::ptr::null_mut(), Release);
    INIT_ERROR.store(NOT_INITIALIZED, Relaxed);
}

extern "C" fn at_exit() {
    let _ = std::panic::catch_unwind(|| {
        let Ok(d) = driver() else { return };
        if PID.load(Relaxed) != std::process::id() {
            return;
        }
        let late = d.job.shared().late.load(Relaxed);
        let now = d.host_now();
        d.report
            .summary(&d.topology.name, &d.visible, d.checking, now, late);
        // The row may soon be another process's: nothing of this one may touch it any more.
        INIT_ERROR.store(DEINITIALIZED, Relaxed);
        DRIVER.store(core::ptr::null_mut(), Release);
        {
            let _quiesced = d.state.lock();
            d.closed.store(true, Release);
        }
        d.job.leave();
        if d.report.findings.load(Relaxed) > 0 {
            let findings = d.report.findings.load(Relaxed);
            complain(&format!(
                "{findings} unordered accesses or uses of freed memory: this run is void"
            ));
            // SAFETY: flushing all streams, then leaving without further handlers, which a status needs here.
            unsafe {
                libc::fflush(core::ptr::null_mut());
                libc::_exit(EXIT_RACE);
            }
        }
    });
}

/// Starts a thread that takes no signal: those belong to the program.
fn spawn(name: &str, f: impl FnOnce() + Send + 'static) {
    // SAFETY: sets and restores the calling thread's mask; both sets are initialised by the calls.
    unsafe {
        let mut all = core::mem::zeroed();
        let mut old = core::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        let started = std::thread::Builder::new().name(name.into()).spawn(f);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, core::ptr::null_mut());
        if let Err(e) = started {
            complain(&format!("cannot start a thread: {e}"));
        }
    }
}

fn env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|v| !v.is_empty())
}

pub(crate) fn flag(name: &str, default: bool) -> bool {
    env(name).map_or(default, |v| !matches!(v.as_str(), "0" | "off" | "no"))
}

/// The node that the environment names, and a number that tells it from others.
///
/// # Errors
/// A sentence that says what is wrong with it.
pub fn node() -> Result<(Topology, u64), String> {
    let which = env("SIMCUDA_TOPOLOGY").unwrap_or_else(|| "hgx-h200".into());
    let gpus = env("SIMCUDA_GPUS").map(|text| {
        let bad = |_| format!("SIMCUDA_GPUS: \"{text}\" is not a number of GPUs");
        text.parse().map_err(bad)
    });
    Topology::load(&which, gpus.transpose()?).map_err(|e| e.to_string())
}

impl Driver {
    fn new() -> Result<Driver, (String, CUresult)> {
        let (topology, hash) = node().map_err(|message| (message, INVALID_VALUE))?;
        let faults = Faults::parse(&env("SIMCUDA_FAULT").unwrap_or_default())
            .map_err(|e| (e, INVALID_VALUE))?;
        let planned = env("SIMCUDA_CORRUPT").unwrap_or_default();
        let corruptions =
            Corruptions::parse(&planned, crate::corrupt::rank()).map_err(|e| (e, INVALID_VALUE))?;
        let timing_only = !flag("SIMCUDA_DATA", true);
        let backing = Backing::parse(env("SIMCUDA_HOST_MIB").as_deref(), timing_only)
            .map_err(|e| (e, INVALID_VALUE))?;
        let visible = visible(
            &topology,
            std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref(),
        );
        if visible.is_empty() {
            return Err((String::new(), NO_DEVICE));
        }
        let bytes = topology.memory_bytes();
        let count = topology.gpu.count;
        let stride = crate::vm::stride(bytes);
        let os = |what: &str, e: std::io::Error| (format!("{what}: {e}"), OPERATING_SYSTEM);
        let job = Job::join(
            &crate::job::job_name(),
            hash,
            stride * count as u64,
            backing,
        )
        .map_err(|e| os("cannot join the simulated node", e))?;
        let vm = Vm::new(
            &job.memory,
            count,
            bytes,
            flag("SIMCUDA_HOST_ACCESS", false),
        )
        .map_err(|e| os("cannot reserve device addresses", e))?;
        let mut state = State::default();
        state.primaries = vec![Primary::default(); visible.len()];
        state.memory.free = (0..count)
            .map(|g| FreeList::new(g as u64 * stride, bytes))
            .collect();
        let quiet_us = env("SIMCUDA_QUIET_US")
            .and_then(|v| v.parse().ok())
            .unwrap_or(QUIET_US);
        let turn_polls = env("SIMCUDA_LOOKS")
            .and_then(|v| v.parse().ok())
            .unwrap_or(crate::wait::TURN_POLLS);
        Ok(Driver {
            machine: Machine::new(&topology),
            job,
            topology,
            vm,
            host_memory: HostMemory::new(backing),
            visible,
            checking: flag("SIMCUDA_CHECK", true),
            launch_blocking: flag("CUDA_LAUNCH_BLOCKING", false),
            timing_only,
            mps: flag("SIMCUDA_MPS", false),
            memlock: flag("SIMCUDA_MEMLOCK", false),
            ipc_once: flag("SIMCUDA_IPC_ONCE", false),
            quiet_ns: quiet_us * 1000,
            turn_polls,
            connections: env("CUDA_DEVICE_MAX_CONNECTIONS")
                .and_then(|v| v.parse().ok())
                .unwrap_or(CONNECTIONS)
                .clamp(1, 32),
            state: Mutex::new(state),
            report: Report::from_env(),
            worker_asleep: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            faults,
            corruptions,
            host_queue: Mutex::default(),
            host_ready: Condvar::new(),
            host_thread: AtomicBool::new(false),
        })
    }

    /// The error planned for this call, if any.
    pub fn fault(&self, function: &'static str) -> Option<CUresult> {
        self.faults.hit(function, || {
            let current = crate::state::current();
            let state = self.state.lock();
            state.contexts.get(&current).map(|context| context.ordinal)
        })
    }

    /// The planned errors.
    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Observations of completion on the node so far.
    pub fn observations(&self) -> u64 {
        self.job.shared().observations.load(SeqCst)
    }

    /// Identity for a new stream.
    pub fn new_stream_uid(&self) -> u64 {
        self.job.shared().next_stream.fetch_add(1, Relaxed)
    }

    /// Identity for a new allocation.
    pub fn new_buffer(&self) -> u64 {
        self.job.shared().next_buffer.fetch_add(1, Relaxed)
    }

    /// Ordinal under which this process sees a physical GPU.
    pub fn ordinal(&self, gpu: usize) -> Option<usize> {
        self.visible.iter().position(|g| *g == gpu)
    }

    /// Hands host code to the thread for it: it may block on anything but the driver.
    pub fn host_code(&'static self, id: u64, code: HostCode, error: CUresult) {
        self.host_queue.lock().push_back((id, code, error));
        self.host_ready.notify_one();
        if !self.host_thread.swap(true, AcqRel) {
            spawn("simcuda-host", move || self.run_host_code());
        }
    }

    fn run_host_code(&'static self) {
        loop {
            let (id, code, error) = {
                let mut queue = self.host_queue.lock();
                while queue.is_empty() {
                    self.host_ready.wait(&mut queue);
                }
                match queue.pop_front() {
                    Some(next) => next,
                    None => continue,
                }
            };
            // SAFETY: the program promised that function and data stay valid until it was called.
            unsafe {
                match code {
                    HostCode::Function(Some(f), data) if error == 0 => f(data.0),
                    HostCode::Callback(Some(f), stream, data) => f(stream, error, data.0),
                    _ => {}
                }
            }
            crate::sched::host_code_done(self, id);
        }
    }
}

/// Physical GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; it ends at the first bad entry.
fn visible(topology: &Topology, list: Option<&str>) -> Vec<usize> {
    let count = topology.gpu.count;
    let Some(list) = list else {
        return (0..count).collect();
    };
    let mut gpus = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let gpu = match entry.strip_prefix("GPU-") {
            Some(prefix) => {
                let wanted = prefix.to_lowercase();
                let mut matching =
                    (0..count).filter(|g| uuid_text(&topology.uuid(*g)).starts_with(&wanted));
                matching.next().filter(|_| matching.next().is_none())
            }
            None => entry.parse::<usize>().ok().filter(|g| *g < count),
        };
        match gpu {
            // A device named twice makes the whole list invalid.
            Some(gpu) if gpus.contains(&gpu) => return Vec::new(),
            Some(gpu) => gpus.push(gpu),
            None => break,
        }
    }
    gpus
}

/// A UUID as tools print it, without the "GPU-".
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|b| format!("{b:02x}")).collect();
    format!(
        "{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_follow_the_variable() {
        let t = Topology::load("beluga", None).unwrap().0;
        assert_eq!(visible(&t, None), [0, 1, 2, 3]);
        assert_eq!(visible(&t, Some("2,0")), [2, 0]);
        assert_eq!(
            visible(&t, Some("1,9,0")),
            [1],
            "ends at the first bad entry"
        );
        assert_eq!(visible(&t, Some("1,1")), [] as [usize; 0]);
        assert_eq!(visible(&t, Some("")), [] as [usize; 0]);
        assert_eq!(visible(&t, Some("-1")), [] as [usize; 0]);
        let uuid = format!("GPU-{}", uuid_text(&t.uuid(3)));
        assert_eq!(visible(&t, Some(&uuid)), [3]);
        assert_eq!(
            visible(&t, Some(&uuid[..12])),
            [3],
            "a unique prefix is enough"
        );
    }
}
