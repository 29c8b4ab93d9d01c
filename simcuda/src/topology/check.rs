//! What a topology file must say, beyond its form: each error names the field and what to do.

use super::{Bridge, FabricKind, Switch, Topology, MAX_GPUS, MAX_SWITCHES_ABOVE};

/// NVLinks that may make up one link or port: a GPU of today has 18.
const MAX_LINKS: i128 = 64;

impl Topology {
    /// What is wrong with it, and what to do.
    #[allow(
        clippy::too_many_lines,
        reason = "one check after the other of one file"
    )]
    pub(super) fn check(&self) -> Result<(), String> {
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
}
