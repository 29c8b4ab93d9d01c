//! Topology files: what a simulated node is made of and how fast each part is.
//!
//! Rates are GB/s (10^9 bytes), which is bytes a nanosecond; times are microseconds.

mod check;
#[cfg(test)]
mod tests;

use serde::Deserialize;
use std::fmt;

/// A node as its TOML file describes it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Short name.
    pub name: String,
    /// One line for people.
    #[serde(default)]
    pub description: String,
    /// The GPUs, all alike.
    pub gpu: Gpu,
    /// Copy engines.
    pub copy: CopyEngines,
    /// How GPUs reach each other.
    pub fabric: Fabric,
    /// Direct links between pairs (not for a switch).
    #[serde(default)]
    pub link: Vec<Link>,
    /// Each GPU's PCIe link.
    pub pcie: Pcie,
    /// Host memory, shared by all GPUs.
    pub host: Host,
    /// Kernels.
    pub kernel: Kernel,
    /// What driver calls cost the calling thread.
    pub calls: Calls,
    /// GPUs of the whole node, of which only the first may be there.
    #[serde(skip)]
    whole: usize,
}

/// One GPU's own figures.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Gpu {
    pub count: usize,
    pub name: String,
    pub memory_mib: u64,
    pub multiprocessors: i32,
    pub clock_mhz: i32,
    pub compute_capability: [i32; 2],
    pub memory_gb_s: f64,
    pub l2_mib: i32,
    pub shared_kib: i32,
    /// Until a process begins with kernels, copies to the GPU or copies within it, after another process's.
    pub turn_us: f64,
}

/// Copy engines of one GPU.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct CopyEngines {
    pub setup_us: f64,
    pub host_setup_us: f64,
    pub ramp_kib: f64,
    pub ramp_gb_s: f64,
    pub batch_setup_us: f64,
    pub pull_extra_us: f64,
    /// What a pull from another GPU of this process takes more than that, launched while its stream is not idle.
    #[serde(default)]
    pub pull_behind_us: f64,
    /// What an operation between a GPU and the host takes longer while a copy from that GPU to another is under way.
    #[serde(default)]
    pub beside_us: f64,
    pub host_engines: usize,
    pub peer_engines: usize,
    /// Copies to other GPUs that read a GPU's own memory at once, whatever streams of the process they are in; what nobody says
    /// is as many as the engines of the streams' GPUs make.
    pub outward_engines: Option<usize>,
    pub engine_gb_s: f64,
}

/// Kind of interconnect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FabricKind {
    /// Every pair through each GPU's one port.
    Switch,
    /// A link between every pair; a missing one is an error in the file.
    FullMesh,
    /// Links between some pairs; the others go over PCIe.
    Links,
}

/// The interconnect.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fabric {
    /// Kind.
    pub kind: FabricKind,
    /// Rate of a GPU's port, each direction (switch only).
    pub port_gb_s: Option<f64>,
    /// NVLinks that make up a port (switch only); what nobody says is one.
    pub links: Option<u32>,
}

/// A link between two GPUs.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// The two ends.
    pub gpus: [usize; 2],
    /// Rate, each direction.
    pub gb_s: f64,
    /// NVLinks that make it up; what nobody says is one.
    pub links: Option<u32>,
}

/// A GPU's PCIe link, and what the GPUs hang on, as far as that is known.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Pcie {
    pub to_host_gb_s: f64,
    pub to_device_gb_s: f64,
    pub peer_gb_s: f64,
    #[serde(default)]
    pub switch: Vec<Switch>,
    #[serde(default)]
    pub bridge: Vec<Bridge>,
}

/// A PCIe switch.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Switch {
    /// The GPUs under it, those under a switch below it, too.
    pub gpus: Vec<usize>,
    /// Rate of its link towards the host, each direction; what nobody says is that of a GPU's link.
    pub gb_s: Option<f64>,
}

/// A PCI host bridge.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bridge {
    /// The GPUs under it.
    pub gpus: Vec<usize>,
}

/// What two GPUs have in common nearest on their ways to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ancestor {
    /// One switch.
    Switch,
    /// Switches, one behind the other.
    Switches,
    /// A host bridge.
    Bridge,
    /// A NUMA node.
    Node,
    /// The machine.
    System,
}

/// Host memory.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Host {
    pub write_gb_s: f64,
    pub read_gb_s: f64,
    pub numa_nodes: usize,
    pub pageable_gb_s: f64,
}

/// Kernels.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Kernel {
    pub setup_us: f64,
}

/// Costs of driver calls, charged to the calling thread's virtual time.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Calls {
    pub async_us: f64,
    pub first_us: f64,
    pub sync_us: f64,
    pub query_us: f64,
    pub event_us: f64,
    /// Not of the thread: what a stream's wait for an event of another GPU takes once that has happened.
    #[serde(default)]
    pub event_wait_us: f64,
    pub memop_us: f64,
    pub launch_us: f64,
    pub graph_launch_us: f64,
    pub graph_node_us: f64,
    pub graph_node_one_gpu_us: f64,
    /// A copy node of a graph on one GPU; what nobody says is as any other node there.
    pub graph_copy_one_gpu_us: Option<f64>,
    pub graph_instantiate_us: f64,
    pub alloc_us: f64,
    pub ipc_open_us: f64,
    pub register_us_per_mib: f64,
}

/// Why a topology cannot be used; one line, says what to do.
#[derive(Debug)]
pub struct TopologyError(pub String);

impl fmt::Display for TopologyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

const EMBEDDED: &[(&str, &str)] = &[
    ("beluga", include_str!("../topologies/beluga.toml")),
    ("narval", include_str!("../topologies/narval.toml")),
    ("dgx1-v100", include_str!("../topologies/dgx1-v100.toml")),
    ("hgx-h200", include_str!("../topologies/hgx-h200.toml")),
];

/// PCIe switches that may be above a GPU; bounds what one copy passes.
pub const MAX_SWITCHES_ABOVE: usize = 2;
/// GPUs a topology may have; bounds the tables in shared memory.
pub const MAX_GPUS: usize = 16;

impl Topology {
    /// Loads an embedded topology by name, or a file by path; `gpus` asks for the first that many.
    pub fn load(which: &str, gpus: Option<usize>) -> Result<(Topology, u64), TopologyError> {
        let text = match EMBEDDED.iter().find(|(name, _)| *name == which) {
            Some((_, text)) => (*text).to_string(),
            None => std::fs::read_to_string(which).map_err(|e| {
                let names: Vec<&str> = EMBEDDED.iter().map(|(n, _)| *n).collect();
                TopologyError(format!(
                    "topology \"{which}\": {e}; give a file or one of {}",
                    names.join(", ")
                ))
            })?,
        };
        let mut topology = Topology::parse(which, &text)?;
        if let Some(gpus) = gpus {
            topology.restrict(which, gpus)?;
        }
        Ok((topology.clone(), fnv1a(format!("{topology:?}").as_bytes())))
    }

    /// Parses and checks a file's text.
    pub fn parse(which: &str, text: &str) -> Result<Topology, TopologyError> {
        let mut topology: Topology = toml::from_str(text).map_err(|e| {
            let why = crate::broken::broken(text, &e);
            TopologyError(format!("topology \"{which}\", {why}"))
        })?;
        topology.whole = topology.gpu.count;
        topology
            .check()
            .map_err(|e| TopologyError(format!("topology \"{which}\": {e}")))?;
        Ok(topology)
    }

    fn restrict(&mut self, which: &str, gpus: usize) -> Result<(), TopologyError> {
        if gpus == 0 || gpus > self.gpu.count {
            let count = self.gpu.count;
            return Err(TopologyError(format!(
                "topology \"{which}\" has {count} GPUs, {gpus} asked for (--gpus, SIMCUDA_GPUS): ask for 1 to {count}, \
                 or take a topology with more"
            )));
        }
        self.gpu.count = gpus;
        self.link.retain(|l| l.gpus.iter().all(|g| *g < gpus));
        let pcie = &mut self.pcie;
        let switches = pcie.switch.iter_mut().map(|switch| &mut switch.gpus);
        let bridges = pcie.bridge.iter_mut().map(|bridge| &mut bridge.gpus);
        switches
            .chain(bridges)
            .for_each(|set| set.retain(|g| *g < gpus));
        pcie.switch.retain(|switch| !switch.gpus.is_empty());
        pcie.bridge.retain(|bridge| !bridge.gpus.is_empty());
        Ok(())
    }

    /// The PCIe switches above a GPU, by their numbers.
    pub fn above(&self, gpu: usize) -> impl Iterator<Item = usize> + '_ {
        let switches = self.pcie.switch.iter().enumerate();
        switches
            .filter(move |(_, s)| s.gpus.contains(&gpu))
            .map(|(number, _)| number)
    }

    /// What two GPUs have in common nearest on their ways to the host; `None` where the file does not tell.
    pub fn ancestor(&self, a: usize, b: usize) -> Option<Ancestor> {
        let size = |switch: usize| self.pcie.switch[switch].gpus.len();
        let both = self
            .above(a)
            .filter(|switch| self.pcie.switch[*switch].gpus.contains(&b));
        if let Some(nearest) = both.map(size).min() {
            let is_direct = |gpu| self.above(gpu).all(|switch| size(switch) >= nearest);
            return Some(if is_direct(a) && is_direct(b) {
                Ancestor::Switch
            } else {
                Ancestor::Switches
            });
        }
        let bridge = |gpu: usize| self.pcie.bridge.iter().position(|b| b.gpus.contains(&gpu));
        match (bridge(a), bridge(b)) {
            (Some(a), Some(b)) if a == b => Some(Ancestor::Bridge),
            _ if self.numa_node(a) != self.numa_node(b) => Some(Ancestor::System),
            (Some(_), Some(_)) => Some(Ancestor::Node),
            _ => None,
        }
    }

    /// Index into `link` and whether `a` to `b` is its first direction.
    pub fn link_of(&self, a: usize, b: usize) -> Option<(usize, bool)> {
        self.link
            .iter()
            .enumerate()
            .find_map(|(i, l)| match l.gpus {
                [x, y] if (x, y) == (a, b) => Some((i, true)),
                [x, y] if (x, y) == (b, a) => Some((i, false)),
                _ => None,
            })
    }

    /// Device memory of one GPU in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.gpu.memory_mib << 20
    }

    /// UUID of a physical GPU: stable for a topology, different between GPUs.
    pub fn uuid(&self, gpu: usize) -> [u8; 16] {
        let a = fnv1a(format!("{}/{gpu}/a", self.name).as_bytes());
        let b = fnv1a(format!("{}/{gpu}/b", self.name).as_bytes());
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&a.to_be_bytes());
        uuid[8..].copy_from_slice(&b.to_be_bytes());
        uuid
    }

    /// PCI bus number of a physical GPU.
    pub fn pci_bus(&self, gpu: usize) -> i32 {
        0x18 + 0x10 * gpu as i32
    }

    /// PCI address of a physical GPU, as the driver writes it.
    pub fn pci_id(&self, gpu: usize) -> String {
        format!("00000000:{:02X}:00.0", self.pci_bus(gpu))
    }

    /// NUMA node of a physical GPU: those of the whole node are dealt to the nodes in blocks.
    pub fn numa_node(&self, gpu: usize) -> i32 {
        (gpu * self.host.numa_nodes / self.whole) as i32
    }
}

/// FNV-1a, 64 bits: names and files to numbers that agree between processes.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| {
        (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3)
    })
}
