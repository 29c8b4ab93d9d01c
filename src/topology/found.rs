//! The topology of the machine, from what a driver and the system say of it.
//!
//! Whoever asks the driver fills in [`Facts`]; what follows from them is decided here, so that it can be tested without a
//! GPU. Rates that nobody can tell are assumed, low rather than high, until they are measured.

use super::pcie::{Level, Tree};
use super::{
    numa_in_blocks, Costs, Fabric, Gpu, HostSide, Linked, Parts, Port, Topology, TopologyError,
};

/// What is known of the NVLinks of one GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NvLinks {
    /// Links that are up and lead to a switch.
    pub to_switch: u32,
    /// Links that are up and lead to the GPU of this number.
    pub to_gpu: Vec<(u8, u32)>,
    /// Rate of one link and direction, GB/s, if known.
    pub link_gb_s: Option<f64>,
}

/// What was found out about two GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PairFacts {
    /// One reaches the memory of the other.
    pub access: bool,
    /// Atomic operations work on it, which is so over NVLink and hardly ever over PCIe.
    pub atomics: bool,
}

/// What was found out about a machine.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// The GPUs.
    pub gpus: Vec<Gpu>,
    /// For each ordered pair, at `from * gpus + to`.
    pub pairs: Vec<PairFacts>,
    /// For each GPU, if anybody could tell.
    pub nvlinks: Option<Vec<NvLinks>>,
    /// Whether links lead to a switch, if a measurement told: copies from one GPU to two share its port there.
    pub fabric: Option<Fabric>,
    /// Rate of a GPU's PCIe link as negotiated, GB/s and direction, if known.
    pub pcie_gb_s: Option<f64>,
    /// How far each ordered pair is apart by PCIe, at `from * gpus + to`, if anybody could tell of all of them.
    pub levels: Option<Vec<Level>>,
}

/// Share of a link's raw rate that copies reach: 396 of 18 x 26.6 GB/s on H200, 55 of 63 over PCIe 5.
pub(crate) const REACHED: f64 = 0.83;
/// Rate of an NVLink of unknown generation: half a GPU's links of the oldest that matters, V100.
const LINK_GB_S: f64 = 25.0;
/// Rate of a PCIe link that nobody tells: PCIe 3 x16.
const PCIE_GB_S: f64 = 12.0;
/// Two GPUs at once pass through the memory of any host.
const HOST_LINKS: f64 = 2.0;

impl Facts {
    /// The topology that they amount to.
    ///
    /// # Errors
    /// There is no GPU, or more than can be handled.
    pub fn topology(&self) -> Result<Topology, TopologyError> {
        let n = self.gpus.len();
        let mut gpus = self.gpus.clone();
        self.number_nodes(&mut gpus);
        let numa_nodes = gpus
            .iter()
            .filter_map(|gpu| gpu.numa)
            .max()
            .map_or(1, |last| last + 1);
        for (number, gpu) in gpus.iter_mut().enumerate() {
            gpu.numa
                .get_or_insert(numa_in_blocks(number, n, numa_nodes));
        }
        let levels = self.levels.as_ref();
        let pcie_tree = levels.map_or_else(Tree::default, |levels| Tree::of(&gpus, levels));
        let pcie = self.pcie_gb_s.map_or(PCIE_GB_S, |raw| raw * REACHED);
        let (fabric, port, links) = self.fabric();
        Topology::assemble(Parts {
            name: "this-machine".into(),
            description: gpus
                .first()
                .map_or(String::new(), |gpu| format!("{n}x {}", gpu.name)),
            gpus,
            fabric,
            port,
            links,
            host: Some(HostSide {
                to_host_gb_s: pcie,
                to_device_gb_s: pcie,
                peer_gb_s: pcie / 2.0,
                write_gb_s: pcie * HOST_LINKS,
                read_gb_s: pcie * HOST_LINKS,
            }),
            numa_nodes,
            pcie: pcie_tree,
            engine_gb_s: f64::MAX,
            costs: Costs::default(),
        })
    }

    /// Where nobody tells the numbers of NUMA nodes, but which GPUs are on one: from 0, in the order of the GPUs.
    fn number_nodes(&self, gpus: &mut [Gpu]) {
        let n = gpus.len();
        let levels = self.levels.as_ref().filter(|levels| levels.len() == n * n);
        let (Some(levels), true) = (levels, gpus.iter().all(|gpu| gpu.numa.is_none())) else {
            return;
        };
        let mut nodes = 0;
        for gpu in 0..n {
            let near = (0..gpu).find(|other| levels[gpu * n + other] < Level::Sys);
            gpus[gpu].numa = near.map_or(Some(nodes), |other| gpus[other].numa);
            nodes += u32::from(near.is_none());
        }
    }

    fn pair(&self, from: usize, to: usize) -> PairFacts {
        self.pairs
            .get(from * self.gpus.len() + to)
            .copied()
            .unwrap_or_default()
    }

    fn fabric(&self) -> (Fabric, Option<Port>, Vec<Linked>) {
        let n = self.gpus.len();
        let pairs = || (0..n).flat_map(move |a| (a + 1..n).map(move |b| (a, b)));
        if let Some(nvlinks) = &self.nvlinks {
            let rate = |links: u32, of: &NvLinks| {
                f64::from(links) * of.link_gb_s.unwrap_or(LINK_GB_S) * REACHED
            };
            if let Some(first) = nvlinks.iter().find(|links| links.to_switch > 0) {
                let port = (rate(first.to_switch, first), Some(first.to_switch));
                return (Fabric::Switch, Some(port), Vec::new());
            }
            let linked = pairs().filter_map(|(a, b)| {
                let to_b = nvlinks
                    .get(a)?
                    .to_gpu
                    .iter()
                    .find(|(gpu, _)| usize::from(*gpu) == b)?;
                Some(Linked {
                    gpus: [a as u8, b as u8],
                    gb_s: rate(to_b.1, &nvlinks[a]),
                    links: Some(to_b.1),
                })
            });
            return (Fabric::Links, None, linked.collect());
        }
        let close = |(a, b): (usize, usize)| {
            let (there, back) = (self.pair(a, b), self.pair(b, a));
            there.access && there.atomics && back.access && back.atomics
        };
        // Without NVML nobody says whether links lead to a switch. If every pair has them, that is assumed: behind a
        // switch a relay gains nothing, so nothing is lost before the node has been measured.
        let all = n > 1 && pairs().all(close);
        if all && self.fabric.is_none_or(|seen| seen == Fabric::Switch) {
            return (Fabric::Switch, Some((LINK_GB_S, None)), Vec::new());
        }
        let linked = pairs().filter(|pair| close(*pair)).map(|(a, b)| Linked {
            gpus: [a as u8, b as u8],
            gb_s: LINK_GB_S,
            links: None,
        });
        (Fabric::Links, None, linked.collect())
    }
}
