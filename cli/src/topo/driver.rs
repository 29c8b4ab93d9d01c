//! What the driver of this machine says of it, and copies to measure it by.

use std::ffi::{c_char, c_int, c_uint, CStr};

use anabranch_engine::cuda::nvml::{pci_number, Nvml};
use anabranch_engine::cuda::types::{BatchAttributes, SOURCE_ORDER_STREAM};
use anabranch_engine::cuda::uuid_text;
use anabranch_engine::model::cache::{driver_text, Machine};
use anabranch_engine::topology::found::{Facts, PairFacts};
use anabranch_engine::topology::pcie::Level;
use anabranch_engine::topology::Gpu;
use anyhow::{bail, Context};

use super::{nvml, system};
use crate::bench::cuda::{self, is_unsupported, of_bytes, DeviceContext, DevicePtr, Driver};
use crate::Failure;

const HOST_NUMA_ID: c_int = 134;
const P2P_ACCESS_SUPPORTED: c_int = 2;
const P2P_NATIVE_ATOMIC_SUPPORTED: c_int = 3;
const HOST_ALLOC_PORTABLE: c_uint = 1;

/// The driver, initialized.
pub struct Node {
    driver: Driver,
    /// How many GPUs there are.
    pub gpus: u32,
}

/// A stream, in the context of its GPU.
#[derive(Clone, Copy)]
pub struct Stream {
    context: DeviceContext,
    stream: cuda::Stream,
}

/// An event, in the context of its GPU.
#[derive(Clone, Copy)]
pub struct Event {
    context: DeviceContext,
    event: cuda::Event,
}

impl Node {
    /// Finds the driver and initializes it.
    ///
    /// # Errors
    /// There is none, or none that works.
    pub fn open() -> anyhow::Result<Node> {
        let driver = Driver::open().map_err(|_| {
            Failure::new(1, "no CUDA driver (libcuda.so.1) on this machine: name a topology with --topology NAME or FILE")
        })?;
        driver.init()?;
        let gpus = driver.device_count()?;
        if gpus == 0 {
            bail!("the CUDA driver reports no GPU");
        }
        Ok(Node { driver, gpus })
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

    fn pci(&self, gpu: u32) -> anyhow::Result<String> {
        let mut text: [c_char; 32] = [0; 32];
        // SAFETY: the driver writes at most 31 characters and a NUL.
        unsafe {
            (self.driver.table()).device_get_pci_bus_id(
                text.as_mut_ptr(),
                31,
                self.driver.device(gpu)?,
            )
        }?;
        // SAFETY: it ends within the array, which was zeros before.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }
            .to_string_lossy()
            .into_owned())
    }

    /// The NUMA node next to a GPU, by the driver, or an older one's by the system. Of a simulated GPU the system would
    /// tell that of whatever device has its address here.
    fn numa_node(&self, gpu: u32, pci: &str) -> anyhow::Result<Option<u32>> {
        let mut value = -1;
        let asked = (self.driver.table()).device_get_attribute(
            &mut value,
            HOST_NUMA_ID,
            self.driver.device(gpu)?,
        );
        match u32::try_from(value) {
            Ok(node) if asked.is_ok() => Ok(Some(node)),
            _ if self.is_simulated() => Ok(None),
            _ => Ok(system::numa_node(pci)),
        }
    }

    fn p2p(&self, attribute: c_int, from: u32, to: u32) -> anyhow::Result<bool> {
        let (mut value, from, to) = (0, self.driver.device(from)?, self.driver.device(to)?);
        (self.driver.table()).device_get_p2p_attribute(&mut value, attribute, from, to)?;
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
        unsafe {
            (self.driver.table()).mem_host_alloc(&raw mut address, bytes, HOST_ALLOC_PORTABLE)
        }
        .with_context(|| of_bytes(bytes))?;
        Ok(address.expose_provenance() as u64)
    }

    /// Gives it back.
    pub fn free_host(&self, address: DevicePtr) -> anyhow::Result<()> {
        let pointer = std::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: an unknown address is an error code.
        Ok(unsafe { self.driver.table().mem_free_host(pointer) }?)
    }

    /// A stream in a context: its copies are made by that GPU's engines.
    pub fn stream(&self, context: DeviceContext) -> anyhow::Result<Stream> {
        self.driver.select(context)?;
        let stream = self.driver.stream()?;
        Ok(Stream { context, stream })
    }

    /// An event in the context of a stream.
    pub fn event(&self, stream: Stream) -> anyhow::Result<Event> {
        let context = stream.context;
        self.driver.select(context)?;
        let event = self.driver.event()?;
        Ok(Event { context, event })
    }

    /// Gives it back.
    pub fn destroy_event(&self, event: Event) -> anyhow::Result<()> {
        self.driver.select(event.context)?;
        self.driver.destroy_event(event.event)
    }

    /// Records an event behind what was launched on its stream, and lets a stream wait for it: the two calls that join copies of
    /// different streams.
    pub fn join(&self, event: Event, before: Stream, after: Stream) -> anyhow::Result<()> {
        self.driver.select(before.context)?;
        self.driver.record(event.event, before.stream)?;
        self.driver.wait_behind(after.stream, event.event)
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
        Ok(unsafe { (self.driver.table()).memcpy_async(to, from, bytes, stream.stream.handle()) }?)
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
        let launched = unsafe {
            self.driver.table().memcpy_batch_async(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                sizes.as_mut_ptr(),
                copies,
                &raw mut attributes,
                &raw mut first,
                1,
                stream.stream.handle(),
            )
        };
        match launched {
            Err(error) if is_unsupported(&error) => Ok(false),
            result => Ok(result.map(|()| true)?),
        }
    }

    /// Waits for a stream, as the engine does.
    pub fn wait(&self, stream: Stream) -> anyhow::Result<()> {
        self.driver.select(stream.context)?;
        while !self.driver.is_over(stream.stream)? {
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Destroys a stream.
    pub fn destroy(&self, stream: Stream) -> anyhow::Result<()> {
        self.driver.select(stream.context)?;
        self.driver.destroy(stream.stream)
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
