//! Topology files: what a simulated node is made of and how fast each part is.
//!
//! Rates are GB/s (10^9 bytes), which is bytes a nanosecond; times are microseconds.

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

/// NVLinks that may make up one link or port: a GPU of today has 18.
const MAX_LINKS: i128 = 64;
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

    fn check(&self) -> Result<(), String> {
        let n = self.gpu.count;
        if n == 0 || n > MAX_GPUS {
            return Err(format!("gpu.count is {n}, must be 1 to {MAX_GPUS}"));
        }
        let (gpu, copy) = (&self.gpu, &self.copy);
        // Least and most: what is more than any machine has would not fit the numbers that it becomes.
        let counts = [
            ("gpu.memory_mib", gpu.memory_mib as i128, 1 << 24),
            ("gpu.multiprocessors", gpu.multiprocessors.into(), 1 << 16),
            ("gpu.clock_mhz", gpu.clock_mhz.into(), 1 << 20),
            ("gpu.l2_mib", gpu.l2_mib.into(), 2047),
            ("gpu.shared_kib", gpu.shared_kib.into(), 1 << 20),
            ("copy.host_engines", copy.host_engines as i128, 64),
            ("copy.peer_engines", copy.peer_engines as i128, 64),
            (
                "copy.outward_engines",
                copy.outward_engines.unwrap_or(1) as i128,
                64,
            ),
            ("host.numa_nodes", self.host.numa_nodes as i128, 1 << 10),
            (
                "fabric.links",
                self.fabric.links.unwrap_or(1).into(),
                MAX_LINKS,
            ),
        ];
        for (name, value, most) in counts {
            if !(1..=most).contains(&value) {
                return Err(format!("{name} is {value}, must be 1 to {most}"));
            }
        }
        let rates = [
            ("gpu.memory_gb_s", self.gpu.memory_gb_s),
            ("copy.engine_gb_s", self.copy.engine_gb_s),
            ("copy.ramp_gb_s", self.copy.ramp_gb_s),
            ("pcie.to_host_gb_s", self.pcie.to_host_gb_s),
            ("pcie.to_device_gb_s", self.pcie.to_device_gb_s),
            ("pcie.peer_gb_s", self.pcie.peer_gb_s),
            ("host.write_gb_s", self.host.write_gb_s),
            ("host.read_gb_s", self.host.read_gb_s),
            ("host.pageable_gb_s", self.host.pageable_gb_s),
            ("fabric.port_gb_s", self.fabric.port_gb_s.unwrap_or(1.0)),
        ];
        for (name, value) in rates {
            if !(value.is_finite() && value > 0.0) {
                return Err(format!(
                    "{name} is {value}, must be a positive rate in GB/s"
                ));
            }
        }
        let c = &self.calls;
        let costs = [
            ("gpu.turn_us", gpu.turn_us),
            ("copy.setup_us", copy.setup_us),
            ("copy.host_setup_us", copy.host_setup_us),
            ("copy.ramp_kib", copy.ramp_kib),
            ("copy.batch_setup_us", copy.batch_setup_us),
            ("copy.pull_extra_us", copy.pull_extra_us),
            ("copy.pull_behind_us", copy.pull_behind_us),
            ("copy.beside_us", copy.beside_us),
            ("kernel.setup_us", self.kernel.setup_us),
            ("calls.async_us", c.async_us),
            ("calls.first_us", c.first_us),
            ("calls.sync_us", c.sync_us),
            ("calls.query_us", c.query_us),
            ("calls.event_us", c.event_us),
            ("calls.event_wait_us", c.event_wait_us),
            ("calls.memop_us", c.memop_us),
            ("calls.launch_us", c.launch_us),
            ("calls.graph_launch_us", c.graph_launch_us),
            ("calls.graph_node_us", c.graph_node_us),
            ("calls.graph_node_one_gpu_us", c.graph_node_one_gpu_us),
            (
                "calls.graph_copy_one_gpu_us",
                c.graph_copy_one_gpu_us.unwrap_or(0.0),
            ),
            ("calls.graph_instantiate_us", c.graph_instantiate_us),
            ("calls.alloc_us", c.alloc_us),
            ("calls.ipc_open_us", c.ipc_open_us),
            ("calls.register_us_per_mib", c.register_us_per_mib),
        ];
        for (name, value) in costs {
            if !(value.is_finite() && value >= 0.0) {
                return Err(format!("{name} is {value}, must be 0 or more"));
            }
        }
        self.check_pcie()?;
        self.check_links()
    }

    /// The PCIe tree: sets of GPUs of which each is within another or apart from it.
    fn check_pcie(&self) -> Result<(), String> {
        let name = |field: &str, set: &[usize]| {
            let gpus: Vec<String> = set.iter().map(ToString::to_string).collect();
            format!("pcie.{field} of GPU {}", gpus.join(", "))
        };
        let common = |a: &[usize], b: &[usize]| a.iter().filter(|gpu| b.contains(gpu)).count();
        let switches = self.pcie.switch.iter().map(|s| ("switch", &s.gpus));
        let bridges = self.pcie.bridge.iter().map(|b| ("bridge", &b.gpus));
        for (field, set) in switches.chain(bridges) {
            self.check_set(field, set)
                .map_err(|why| format!("{}: {why}", name(field, set)))?;
        }
        let switches = &self.pcie.switch;
        for (i, Switch { gpus, gb_s }) in switches.iter().enumerate() {
            let gb_s = gb_s.unwrap_or(1.0);
            if !(gb_s.is_finite() && gb_s > 0.0) {
                return Err(format!(
                    "{}: gb_s is {gb_s}, must be a positive rate in GB/s",
                    name("switch", gpus)
                ));
            }
            for other in switches[..i].iter().map(|s| &s.gpus) {
                match common(gpus, other) {
                    c if c == gpus.len() && c == other.len() => {
                        return Err(format!(
                            "{} is listed twice: take one [[pcie.switch]] out",
                            name("switch", gpus)
                        ));
                    }
                    c if c == 0 || c == gpus.len() || c == other.len() => {}
                    _ => {
                        return Err(format!(
                            "{} and {} overlap: one must have all GPUs of the other, or none",
                            name("switch", gpus),
                            name("switch", other)
                        ));
                    }
                }
            }
        }
        for (i, Bridge { gpus }) in self.pcie.bridge.iter().enumerate() {
            if self.pcie.bridge[..i]
                .iter()
                .any(|other| common(gpus, &other.gpus) > 0)
            {
                return Err(format!(
                    "{}: some are under another [[pcie.bridge]], too: take them out of one",
                    name("bridge", gpus)
                ));
            }
            let torn = |s: &&Switch| ![0, s.gpus.len()].contains(&common(gpus, &s.gpus));
            if let Some(switch) = switches.iter().find(torn) {
                return Err(format!(
                    "{} has a part of {}: list all of them or none",
                    name("bridge", gpus),
                    name("switch", &switch.gpus)
                ));
            }
        }
        match (0..self.gpu.count).find(|gpu| self.above(*gpu).count() > MAX_SWITCHES_ABOVE) {
            None => Ok(()),
            Some(gpu) => Err(format!(
                "pcie.switch: GPU {gpu} is under {} switches, at most {MAX_SWITCHES_ABOVE} are told apart: leave out those between \
                 the first and the last",
                self.above(gpu).count()
            )),
        }
    }

    fn check_set(&self, field: &str, set: &[usize]) -> Result<(), String> {
        if set.is_empty() {
            return Err(format!("gpus is empty, must list those under the {field}"));
        }
        for (i, gpu) in set.iter().enumerate() {
            if *gpu >= self.gpu.count {
                let last = self.gpu.count - 1;
                return Err(format!(
                    "there is no GPU {gpu}, gpus must be of 0 to {last}"
                ));
            }
            if set[..i].contains(gpu) {
                return Err(format!("GPU {gpu} is listed twice: take it out once"));
            }
        }
        let node = self.numa_node(set[0]);
        match set.iter().map(|gpu| self.numa_node(*gpu)).find(|other| *other != node) {
            None => Ok(()),
            Some(other) => Err(format!(
                "they are on NUMA nodes {node} and {other}, but must be on one: correct gpus, or host.numa_nodes"
            )),
        }
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

    fn check_links(&self) -> Result<(), String> {
        let n = self.gpu.count;
        for (i, link) in self.link.iter().enumerate() {
            let [a, b] = link.gpus;
            if a >= n || b >= n || a == b {
                return Err(format!(
                    "link between GPU {a} and {b}: gpus must be two different ones of 0 to {}",
                    n - 1
                ));
            }
            if !(link.gb_s.is_finite() && link.gb_s > 0.0) {
                return Err(format!(
                    "link between GPU {a} and {b}: gb_s is {}, must be a positive rate in GB/s",
                    link.gb_s
                ));
            }
            let links = link.links.unwrap_or(1);
            if !(1..=MAX_LINKS).contains(&links.into()) {
                return Err(format!(
                    "link between GPU {a} and {b}: links is {links}, must be 1 to {MAX_LINKS}"
                ));
            }
            if self.link[..i]
                .iter()
                .any(|l| l.gpus == [a, b] || l.gpus == [b, a])
            {
                return Err(format!(
                    "link between GPU {a} and {b} is listed twice: take one [[link]] out"
                ));
            }
        }
        match self.fabric.kind {
            FabricKind::Switch if self.fabric.port_gb_s.is_none() => {
                Err("fabric.port_gb_s is missing: a switch needs the rate of a GPU's port in GB/s".into())
            }
            FabricKind::Switch if !self.link.is_empty() => {
                Err("fabric.kind is switch, which has no [[link]]: take them out, or set full-mesh or links".into())
            }
            FabricKind::FullMesh => {
                for a in 0..n {
                    for b in a + 1..n {
                        if self.link_of(a, b).is_none() {
                            return Err(format!(
                                "link between GPU {a} and {b} is missing: add a [[link]], or set fabric.kind to links"
                            ));
                        }
                    }
                }
                Ok(())
            }
            _ => Ok(()),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedded_topologies_load() {
        for (name, _) in EMBEDDED {
            let (t, _) = Topology::load(name, None).unwrap();
            assert_eq!(&t.name, name);
        }
        assert_eq!(Topology::load("hgx-h200", Some(2)).unwrap().0.gpu.count, 2);
        assert!(Topology::load("hgx-h200", Some(9)).is_err());
    }

    /// Six NVLink2 a GPU: NVIDIA's V100 datasheet.
    #[test]
    fn every_v100_of_the_cube_mesh_has_six_links() {
        let (t, _) = Topology::load("dgx1-v100", None).unwrap();
        for g in 0..8 {
            let rate: f64 = t
                .link
                .iter()
                .filter(|l| l.gpus.contains(&g))
                .map(|l| l.gb_s)
                .sum();
            assert_eq!(rate, 6.0 * 24.0, "GPU {g}");
        }
    }

    /// DGX-1's block diagram: two GPUs at each of four switches, two switches at each processor. Where the tree is not known, it is
    /// known all the same which GPUs are at different processors.
    #[test]
    fn gpus_hang_on_what_is_known_of_the_machine() {
        use Ancestor::{Bridge, Switch, System};
        let (dgx1, _) = Topology::load("dgx1-v100", None).unwrap();
        let of_0 = (1..8).map(|gpu| dgx1.ancestor(0, gpu));
        let expected = [Switch, Bridge, Bridge, System, System, System, System];
        assert_eq!(of_0.collect::<Vec<_>>(), expected.map(Some));
        assert_eq!(dgx1.ancestor(7, 6), Some(Switch));
        // A part of the node is where it is in the whole.
        let (two, _) = Topology::load("dgx1-v100", Some(2)).unwrap();
        assert_eq!(two.ancestor(0, 1), Some(Switch));
        assert_eq!([two.numa_node(0), two.numa_node(1)], [0, 0]);
        let (one, _) = Topology::load("dgx1-v100", Some(1)).unwrap();
        assert_eq!((one.pcie.switch.len(), one.pcie.bridge.len()), (1, 1));
        let (beluga, _) = Topology::load("beluga", None).unwrap();
        assert_eq!(beluga.ancestor(0, 1), None);
        assert_eq!(beluga.ancestor(1, 2), Some(System));
    }

    #[test]
    fn every_value_cites_its_source() {
        for (name, text) in EMBEDDED {
            for line in text.lines().filter(|l| l.contains(" = ")) {
                let key = line.split(" = ").next().unwrap_or("");
                let exempt = line.starts_with('#')
                    || (["name", "description", "gpus"].contains(&key) && !line.contains("NVIDIA"));
                assert!(exempt || line.contains("# source:"), "{name}: {line}");
            }
        }
    }

    #[test]
    fn bad_files_say_what_is_wrong() {
        let good = EMBEDDED[0].1;
        let (before, rest) = good.split_once("[[link]]\ngpus = [0, 2]").unwrap();
        let (_, after) = rest.split_once("[[link]]").unwrap();
        let missing = format!("{before}[[link]]{after}");
        let error = Topology::parse("x", &missing).unwrap_err().to_string();
        assert!(
            error.contains("link between GPU 0 and 2 is missing"),
            "{error}"
        );
        // What is changed in a good file, and what is said of it: the field, and what to do.
        for (from, to, said) in [
            (
                "\ngb_s = 48.0",
                "\ngb_s = -48.0",
                "link between GPU 0 and 1: gb_s is -48, must be a positive rate in GB/s",
            ),
            (
                "\ngb_s = 48.0",
                "\ngb_s = nan",
                "gb_s is NaN, must be a positive rate in GB/s",
            ),
            (
                "\ngb_s = 48.0",
                "\n",
                "[[link]]: missing field `gb_s`; add it",
            ),
            (
                "\nlinks = 2",
                "\nlinks = 0",
                "link between GPU 0 and 1: links is 0, must be 1 to 64",
            ),
            (
                "\nlinks = 2",
                "\nlinks = -1",
                ", links of [[link]]: invalid value: integer `-1`",
            ),
            (
                "\ngpus = [0, 1]",
                "\ngpus = [0, 4]",
                "link between GPU 0 and 4: gpus must be two different ones of 0 to 3",
            ),
            (
                "\ngpus = [0, 1]",
                "\ngpus = [0, 2]",
                "link between GPU 0 and 2 is listed twice: take one [[link]] out",
            ),
            (
                "\nsetup_us = 2.5",
                "\nsetup_us = -2.5",
                "copy.setup_us is -2.5, must be 0 or more",
            ),
            (
                "\nsetup_us = 2.5",
                "\nsetup_us = \"2.5\"",
                ", setup_us of [copy]: invalid type",
            ),
            ("\nasync_us = ", "\nasync_us = -", "calls.async_us is -"),
            (
                "\nmemory_mib = 16160",
                "\nmemory_mib = 0",
                "gpu.memory_mib is 0, must be 1 to ",
            ),
            (
                "\nl2_mib = 6",
                "\nl2_mib = 4096",
                "gpu.l2_mib is 4096, must be 1 to 2047",
            ),
            (
                "\nhost_engines = 1",
                "\nhost_engines = 0",
                "copy.host_engines is 0, must be 1 to 64",
            ),
            (
                "kind = \"full-mesh\"",
                "kind = \"switch\"",
                "fabric.port_gb_s is missing: ",
            ),
            (
                "kind = \"full-mesh\"",
                "kind = \"switch\"\nport_gb_s = 0.0",
                "fabric.port_gb_s is 0, must be ",
            ),
            (
                "kind = \"full-mesh\"",
                "kind = \"switch\"\nport_gb_s = 9.0\nlinks = 0",
                "fabric.links is 0, must be ",
            ),
            (
                "kind = \"full-mesh\"",
                "kind = \"star\"",
                ", kind of [fabric]: unknown variant",
            ),
        ] {
            assert!(good.contains(from), "{from}");
            let error = Topology::parse("a.toml", &good.replacen(from, to, 1));
            let error = error.expect_err(said).to_string();
            assert!(error.contains(said), "{error}");
            assert!(
                error.starts_with("topology \"a.toml\"") && !error.contains('\n'),
                "{error}"
            );
        }
        // What is put before a good file's [host], of four GPUs at two processors.
        for (tree, said) in [
            (
                "[[pcie.switch]]\ngpus = [0, 4]",
                "pcie.switch of GPU 0, 4: there is no GPU 4, gpus must be of 0 to 3",
            ),
            (
                "[[pcie.switch]]\ngpus = [0, 1, 0]",
                "pcie.switch of GPU 0, 1, 0: GPU 0 is listed twice: take it out once",
            ),
            (
                "[[pcie.switch]]\ngpus = []",
                "gpus is empty, must list those under the switch",
            ),
            (
                "[[pcie.switch]]\ngpus = [1, 2]",
                "pcie.switch of GPU 1, 2: they are on NUMA nodes 0 and 1, but must be on one",
            ),
            (
                "[[pcie.switch]]\ngpus = [0, 1]\ngb_s = 0.0",
                "pcie.switch of GPU 0, 1: gb_s is 0, must be a positive rate in GB/s",
            ),
            (
                "[[pcie.switch]]\ngpus = [0, 1]\n[[pcie.switch]]\ngpus = [1, 0]",
                "pcie.switch of GPU 1, 0 is listed twice: take one",
            ),
            (
                "[[pcie.switch]]\ngpus = [0, 1]\n[[pcie.bridge]]\ngpus = [1]",
                "pcie.bridge of GPU 1 has a part of pcie.switch of GPU 0, 1",
            ),
            (
                "[[pcie.bridge]]\ngpus = [1]\n[[pcie.bridge]]\ngpus = [0, 1]",
                "pcie.bridge of GPU 0, 1: some are under another",
            ),
            (
                "[[pcie.bridge]]\ngpus = 1",
                ", gpus of [[pcie.bridge]]: invalid type",
            ),
            ("[[pcie.swich]]\ngpus = [0]", "unknown field `swich`"),
        ] {
            let text = good.replacen("\n[host]", &format!("\n{tree}\n[host]"), 1);
            let error = Topology::parse("a.toml", &text)
                .expect_err(said)
                .to_string();
            assert!(error.contains(said) && !error.contains('\n'), "{error}");
        }
        let one_node = good.replacen("numa_nodes = 2", "numa_nodes = 1", 1);
        for (sets, said) in [
            (
                &[&[0, 1, 2][..], &[2, 3]][..],
                "pcie.switch of GPU 2, 3 and pcie.switch of GPU 0, 1, 2 overlap: one must",
            ),
            (
                &[&[0], &[0, 1], &[0, 1, 2]],
                "pcie.switch: GPU 0 is under 3 switches, at most 2 are told apart",
            ),
        ] {
            let switch = |set: &&[i32]| format!("[[pcie.switch]]\ngpus = {set:?}\n");
            let tree: String = sets.iter().map(switch).collect();
            let text = one_node.replacen("\n[host]", &format!("\n{tree}[host]"), 1);
            let error = Topology::parse("a.toml", &text)
                .expect_err(said)
                .to_string();
            assert!(error.contains(said) && !error.contains('\n'), "{error}");
        }
        let error = Topology::load("beluga", Some(5)).unwrap_err().to_string();
        assert!(
            error.contains("has 4 GPUs, 5 asked for") && error.contains(": ask for 1 to 4"),
            "{error}"
        );
        let error = Topology::parse("x", "name = 3").unwrap_err().to_string();
        assert!(error.contains("line 1") && !error.contains('\n'), "{error}");
        assert!(Topology::load("/no/such/file", None).is_err());
    }
}
