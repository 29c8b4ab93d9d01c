//! What the driver of this machine says of it, and copies to measure it by.

use std::ffi::{c_char, c_int, c_uint, c_void, CStr};

use anabranch_engine::cuda::nvml::{pci_number, Nvml};
use anabranch_engine::cuda::types::{BatchAttributes, SOURCE_ORDER_STREAM};
use anabranch_engine::cuda::uuid_text;
use anabranch_engine::model::cache::{driver_text, Machine};
use anabranch_engine::topology::found::{Facts, PairFacts};
use anabranch_engine::topology::pcie::Level;
use anabranch_engine::topology::Gpu;
use anyhow::{bail, Context};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::{nvml, system};
use crate::bench::cuda::{DeviceContext, DevicePtr, Driver};
use crate::Failure;

type Handle = *mut c_void;

macro_rules! functions {
    ($( $field:ident = $symbol:literal ($( $argument:ty ),*); )*) => {
        /// Driver functions that no other part of the command needs.
        struct Functions { $( $field: unsafe extern "C" fn($( $argument ),*) -> c_int ),* }

        impl Functions {
            fn resolve(library: &Library) -> anyhow::Result<Functions> {
                Ok(Functions { $(
                    // SAFETY: the driver's documentation gives the function of this name this signature.
                    $field: *unsafe { library.get($symbol) }
                        .with_context(|| format!("the CUDA driver lacks {}", String::from_utf8_lossy($symbol)))?,
                )* })
            }
        }
    };
}

functions! {
    device_get = b"cuDeviceGet\0" (*mut c_int, c_int);
    device_attribute = b"cuDeviceGetAttribute\0" (*mut c_int, c_int, c_int);
    pci_bus_id = b"cuDeviceGetPCIBusId\0" (*mut c_char, c_int, c_int);
    p2p_attribute = b"cuDeviceGetP2PAttribute\0" (*mut c_int, c_int, c_int, c_int);
    host_alloc = b"cuMemHostAlloc\0" (*mut *mut c_void, usize, c_uint);
    host_free = b"cuMemFreeHost\0" (*mut c_void);
    copy_async = b"cuMemcpyAsync\0" (u64, u64, usize, Handle);
    stream_create = b"cuStreamCreate\0" (*mut Handle, c_uint);
    stream_query = b"cuStreamQuery\0" (Handle);
    stream_destroy = b"cuStreamDestroy_v2\0" (Handle);
    event_create = b"cuEventCreate\0" (*mut Handle, c_uint);
    event_record = b"cuEventRecord\0" (Handle, Handle);
    event_destroy = b"cuEventDestroy_v2\0" (Handle);
    stream_wait_event = b"cuStreamWaitEvent\0" (Handle, Handle, c_uint);
}

/// `cuMemcpyBatchAsync`, as of CUDA 13: destinations, sources, sizes, their number, attributes, from which copy on each holds,
/// their number, stream. In 12.8 and 12.9 the index of a copy that fails comes before the stream.
type BatchAsync = unsafe extern "C" fn(
    *mut u64,
    *mut u64,
    *mut usize,
    usize,
    *mut BatchAttributes,
    *mut usize,
    usize,
    Handle,
) -> c_int;

const NOT_READY: c_int = 600;
const NOT_SUPPORTED: c_int = 801;
const HOST_NUMA_ID: c_int = 134;
const P2P_ACCESS_SUPPORTED: c_int = 2;
const P2P_NATIVE_ATOMIC_SUPPORTED: c_int = 3;
const HOST_ALLOC_PORTABLE: c_uint = 1;
const STREAM_NON_BLOCKING: c_uint = 1;
const EVENT_DISABLE_TIMING: c_uint = 2;

/// The driver, initialized.
pub struct Node {
    driver: Driver,
    more: Functions,
    batch_async: Option<BatchAsync>,
    /// How many GPUs there are.
    pub gpus: u32,
    _library: Library,
}

/// A stream, in the context of its GPU.
#[derive(Clone, Copy)]
pub struct Stream {
    context: DeviceContext,
    handle: Handle,
}

/// An event, in the context of its GPU.
#[derive(Clone, Copy)]
pub struct Event {
    context: DeviceContext,
    handle: Handle,
}

impl Node {
    /// Finds the driver and initializes it.
    ///
    /// # Errors
    /// There is none, or none that works.
    pub fn open() -> anyhow::Result<Node> {
        // SAFETY: loading the system's driver runs its initializers, which is what they are for.
        let library = unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) }.map_err(|_| {
            Failure::new(1, "no CUDA driver (libcuda.so.1) on this machine: name a topology with --topology NAME or FILE")
        })?;
        let more = Functions::resolve(&library)?;
        // SAFETY: the driver's documentation gives the function of this name this signature.
        let batch_async = unsafe { library.get::<BatchAsync>(b"cuMemcpyBatchAsync_v2\0") };
        let batch_async = batch_async.ok().map(|function| *function);
        let driver = Driver::open()?;
        driver.init()?;
        let gpus = driver.device_count()?;
        if gpus == 0 {
            bail!("the CUDA driver reports no GPU");
        }
        Ok(Node {
            driver,
            more,
            batch_async,
            gpus,
            _library: library,
        })
    }

    /// What a measurement here is valid for.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn machine(&self) -> anyhow::Result<Machine> {
        Ok(Machine {
            gpus: self.uuids()?,
            driver: driver_text(self.driver.version()?, self.is_simulated()),
        })
    }

    /// Whether the driver is the simulated one.
    pub fn is_simulated(&self) -> bool {
        self.driver.simulated_clock().is_some()
    }

    fn uuids(&self) -> anyhow::Result<Vec<String>> {
        (0..self.gpus)
            .map(|gpu| Ok(uuid_text(&self.driver.device_uuid(gpu)?)))
            .collect()
    }

    fn check(&self, code: c_int, call: &str) -> anyhow::Result<()> {
        if code == 0 {
            return Ok(());
        }
        bail!("{call}: CUDA error {code}")
    }

    fn device(&self, ordinal: u32) -> anyhow::Result<c_int> {
        let mut device = 0;
        // SAFETY: the driver writes one int.
        let code = unsafe { (self.more.device_get)(&raw mut device, ordinal as c_int) };
        self.check(code, "cuDeviceGet")?;
        Ok(device)
    }

    fn pci(&self, gpu: u32) -> anyhow::Result<String> {
        let mut text: [c_char; 32] = [0; 32];
        // SAFETY: the driver writes at most 31 characters and a NUL.
        let code = unsafe { (self.more.pci_bus_id)(text.as_mut_ptr(), 31, self.device(gpu)?) };
        self.check(code, "cuDeviceGetPCIBusId")?;
        // SAFETY: it ends within the array, which was zeros before.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }
            .to_string_lossy()
            .into_owned())
    }

    /// The NUMA node next to a GPU, by the driver, or an older one's by the system. Of a simulated GPU the system would
    /// tell that of whatever device has its address here.
    fn numa_node(&self, gpu: u32, pci: &str) -> anyhow::Result<Option<u32>> {
        let mut value = -1;
        // SAFETY: the driver writes one int.
        let code = unsafe {
            (self.more.device_attribute)(&raw mut value, HOST_NUMA_ID, self.device(gpu)?)
        };
        match u32::try_from(value) {
            Ok(node) if code == 0 => Ok(Some(node)),
            _ if self.is_simulated() => Ok(None),
            _ => Ok(system::numa_node(pci)),
        }
    }

    fn p2p(&self, attribute: c_int, from: u32, to: u32) -> anyhow::Result<bool> {
        let (mut value, from, to) = (0, self.device(from)?, self.device(to)?);
        // SAFETY: the driver writes one int.
        let code = unsafe { (self.more.p2p_attribute)(&raw mut value, attribute, from, to) };
        self.check(code, "cuDeviceGetP2PAttribute")?;
        Ok(value != 0)
    }

    /// All that can be found out without a copy.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn facts(&self) -> anyhow::Result<Facts> {
        let uuids = self.uuids()?;
        let pci: Vec<String> = (0..self.gpus)
            .map(|gpu| self.pci(gpu))
            .collect::<anyhow::Result<_>>()?;
        let mut facts = Facts::default();
        for gpu in 0..self.gpus {
            let at = gpu as usize;
            facts.gpus.push(Gpu {
                uuid: Some(uuids[at].clone()),
                name: self.driver.device_name(gpu)?,
                numa: self.numa_node(gpu, &pci[at])?,
                pci: Some(pci[at].clone()),
                cpus: if self.is_simulated() {
                    None
                } else {
                    system::cpus(&pci[at])
                },
            });
        }
        for from in 0..self.gpus {
            for to in 0..self.gpus {
                facts.pairs.push(if from == to {
                    PairFacts::default()
                } else {
                    PairFacts {
                        access: self.p2p(P2P_ACCESS_SUPPORTED, from, to)?,
                        atomics: self.p2p(P2P_NATIVE_ATOMIC_SUPPORTED, from, to)?,
                    }
                });
            }
        }
        let at: Vec<_> = pci.iter().map(|text| pci_number(text)).collect();
        let nvml = Nvml::open();
        let links = nvml.as_ref().and_then(|nvml| nvml::all(nvml, &uuids, &at));
        if let Some((links, pcie)) = links {
            facts.nvlinks = Some(links);
            facts.pcie_gb_s = pcie;
        }
        let levels = nvml.as_ref().and_then(|nvml| nvml::levels(nvml, &uuids));
        facts.levels = levels.or_else(|| self.levels(&pci, &facts.gpus));
        Ok(facts)
    }

    /// How far GPUs are apart by the system, where NVML does not tell. NVML is asked first: it is what `nvidia-smi` prints, so
    /// that one can be laid beside the other, and it is there in containers that hide the system's devices. The system knows
    /// nothing of simulated GPUs.
    fn levels(&self, pci: &[String], gpus: &[Gpu]) -> Option<Vec<Level>> {
        if self.is_simulated() {
            return None;
        }
        let paths: Option<Vec<String>> = pci.iter().map(|pci| system::path(pci)).collect();
        let numa: Vec<Option<u32>> = gpus.iter().map(|gpu| gpu.numa).collect();
        system::levels(&paths?, &numa)
    }

    /// Contexts of all GPUs, each of which reaches the memory of the others where it may.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn enter_all(&self) -> anyhow::Result<Vec<DeviceContext>> {
        let contexts: Vec<DeviceContext> = (0..self.gpus)
            .map(|gpu| self.driver.enter(gpu))
            .collect::<anyhow::Result<_>>()?;
        for (gpu, context) in contexts.iter().enumerate() {
            for (peer, other) in contexts.iter().enumerate() {
                if gpu != peer && self.driver.can_access(gpu as u32, peer as u32)? {
                    self.driver.select(*context)?;
                    self.driver.enable_peer(*other)?;
                }
            }
        }
        Ok(contexts)
    }

    /// Memory of the GPU of a context.
    ///
    /// # Errors
    /// What the driver reports, as for all below.
    pub fn alloc(&self, context: DeviceContext, bytes: usize) -> anyhow::Result<DevicePtr> {
        self.driver.select(context)?;
        self.driver.alloc(bytes)
    }

    /// Gives it back.
    pub fn free(&self, context: DeviceContext, address: DevicePtr) -> anyhow::Result<()> {
        self.driver.select(context)?;
        self.driver.free(address)
    }

    /// Pinned memory of the host.
    pub fn alloc_host(&self, bytes: usize) -> anyhow::Result<DevicePtr> {
        let mut address = std::ptr::null_mut();
        // SAFETY: the driver writes one pointer.
        let code = unsafe { (self.more.host_alloc)(&raw mut address, bytes, HOST_ALLOC_PORTABLE) };
        self.check(code, &format!("cuMemHostAlloc of {bytes} bytes"))?;
        Ok(address.expose_provenance() as u64)
    }

    /// Gives it back.
    pub fn free_host(&self, address: DevicePtr) -> anyhow::Result<()> {
        let pointer = std::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: an unknown address is an error code.
        let code = unsafe { (self.more.host_free)(pointer) };
        self.check(code, "cuMemFreeHost")
    }

    /// A stream in a context: its copies are made by that GPU's engines.
    pub fn stream(&self, context: DeviceContext) -> anyhow::Result<Stream> {
        self.driver.select(context)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the driver writes one handle.
        let code = unsafe { (self.more.stream_create)(&raw mut handle, STREAM_NON_BLOCKING) };
        self.check(code, "cuStreamCreate")?;
        Ok(Stream { context, handle })
    }

    /// An event in the context of a stream.
    pub fn event(&self, stream: Stream) -> anyhow::Result<Event> {
        let context = stream.context;
        self.driver.select(context)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the driver writes one handle.
        let code = unsafe { (self.more.event_create)(&raw mut handle, EVENT_DISABLE_TIMING) };
        self.check(code, "cuEventCreate")?;
        Ok(Event { context, handle })
    }

    /// Gives it back.
    pub fn destroy_event(&self, event: Event) -> anyhow::Result<()> {
        self.driver.select(event.context)?;
        // SAFETY: the event came from the driver, and nobody uses it afterwards.
        let code = unsafe { (self.more.event_destroy)(event.handle) };
        self.check(code, "cuEventDestroy")
    }

    /// Records an event behind what was launched on its stream, and lets a stream wait for it: the two calls that join copies of
    /// different streams.
    pub fn join(&self, event: Event, before: Stream, after: Stream) -> anyhow::Result<()> {
        self.driver.select(before.context)?;
        // SAFETY: event and stream came from the driver, and belong to the context that is selected.
        let code = unsafe { (self.more.event_record)(event.handle, before.handle) };
        self.check(code, "cuEventRecord")?;
        // SAFETY: as above; the event may be of another context than the stream.
        let code = unsafe { (self.more.stream_wait_event)(after.handle, event.handle, 0) };
        self.check(code, "cuStreamWaitEvent")
    }

    /// Launches a copy between any two addresses.
    pub fn copy(
        &self,
        to: DevicePtr,
        from: DevicePtr,
        bytes: usize,
        stream: Stream,
    ) -> anyhow::Result<()> {
        self.driver.select(stream.context)?;
        // SAFETY: bad addresses are an error code; the stream came from the driver.
        let code = unsafe { (self.more.copy_async)(to, from, bytes, stream.handle) };
        self.check(code, "cuMemcpyAsync")
    }

    /// Launches so many copies as one batch, of pieces that lie behind each other. False where the driver has none (before
    /// CUDA 13).
    pub fn copy_batch(
        &self,
        to: DevicePtr,
        from: DevicePtr,
        bytes: usize,
        copies: usize,
        stream: Stream,
    ) -> anyhow::Result<bool> {
        let Some(batch_async) = self.batch_async else {
            return Ok(false);
        };
        self.driver.select(stream.context)?;
        let pieces = |base: DevicePtr| (0..copies).map(move |at| base + (at * bytes) as DevicePtr);
        let mut to: Vec<DevicePtr> = pieces(to).collect();
        let mut from: Vec<DevicePtr> = pieces(from).collect();
        let (mut sizes, mut first) = (vec![bytes; copies], 0);
        let mut attributes = BatchAttributes {
            source_order: SOURCE_ORDER_STREAM,
            ..BatchAttributes::default()
        };
        // SAFETY: three arrays of `copies` entries, one row of attributes that holds from entry 0 on; bad addresses are an
        // error code; the stream came from the driver.
        let code = unsafe {
            batch_async(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                sizes.as_mut_ptr(),
                copies,
                &raw mut attributes,
                &raw mut first,
                1,
                stream.handle,
            )
        };
        if code == NOT_SUPPORTED {
            return Ok(false);
        }
        self.check(code, "cuMemcpyBatchAsync")?;
        Ok(true)
    }

    /// Waits for a stream, as the engine does.
    pub fn wait(&self, stream: Stream) -> anyhow::Result<()> {
        self.driver.select(stream.context)?;
        loop {
            // SAFETY: the stream came from the driver.
            let code = unsafe { (self.more.stream_query)(stream.handle) };
            if code != NOT_READY {
                return self.check(code, "cuStreamQuery");
            }
            std::thread::yield_now();
        }
    }

    /// Destroys a stream.
    pub fn destroy(&self, stream: Stream) -> anyhow::Result<()> {
        self.driver.select(stream.context)?;
        // SAFETY: the stream came from the driver and is not used again.
        let code = unsafe { (self.more.stream_destroy)(stream.handle) };
        self.check(code, "cuStreamDestroy")
    }

    /// Microseconds since some moment, by the clock of the node: a simulated one has its own.
    pub fn now_us(&self) -> f64 {
        static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
        match self.driver.simulated_clock() {
            // SAFETY: it may be called at any time once the driver is initialized.
            Some(clock) => (unsafe { clock() }) as f64 / 1e3,
            None => {
                START
                    .get_or_init(std::time::Instant::now)
                    .elapsed()
                    .as_secs_f64()
                    * 1e6
            }
        }
    }
}
