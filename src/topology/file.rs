//! Topology files. The format is that of the simulated driver's (`simcuda/topologies/`), of which only what the planner
//! needs is read: a key that is not known here is passed over, and what is left out has the value measured on H200.

use super::pcie::{Bridge, Switch, Tree};
use super::{wrong, Costs, Fabric, Gpu, HostSide, Linked, Parts, Topology, TopologyError};
use serde::{Deserialize, Serialize};

/// A file, as it is written.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct File {
    pub name: String,
    #[serde(default)]
    pub description: String,
    pub gpu: GpuSection,
    #[serde(default)]
    pub copy: CopySection,
    pub fabric: FabricSection,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie: Option<PcieSection>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<HostSection>,
    #[serde(default)]
    pub calls: CallSection,
    /// Links between pairs (not for a switch).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub link: Vec<LinkSection>,
    /// The GPUs of one machine, each by itself; none in a file that is about no machine in particular.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device: Vec<Gpu>,
}

/// `[gpu]`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct GpuSection {
    pub count: usize,
    #[serde(default)]
    pub name: String,
}

/// `[copy]`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct CopySection {
    pub setup_us: f64,
    pub pull_extra_us: f64,
    pub peer_engines: u32,
    /// What one copy reaches at most, by whatever way; none if that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine_gb_s: Option<f64>,
    /// The first bytes of a copy between GPUs, which move at a lower rate: none in a file that a topology is written to, as
    /// their cost is in its `setup_us`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ramp_kib: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ramp_gb_s: Option<f64>,
}

impl CopySection {
    /// What a copy costs before its bytes move at the full rate, us.
    fn setup_us(&self) -> f64 {
        let (Some(kib), Some(ramp)) = (self.ramp_kib, self.ramp_gb_s) else {
            return self.setup_us;
        };
        let full = self.engine_gb_s.unwrap_or(f64::MAX);
        let per_gb_s_us = kib * 1024.0 / 1000.0;
        self.setup_us + (per_gb_s_us / ramp - per_gb_s_us / full).max(0.0)
    }
}

impl Default for CopySection {
    fn default() -> CopySection {
        let costs = Costs::default();
        CopySection {
            setup_us: costs.setup_us,
            pull_extra_us: costs.pull_extra_us,
            peer_engines: costs.peer_engines,
            engine_gb_s: None,
            ramp_kib: None,
            ramp_gb_s: None,
        }
    }
}

/// `[fabric]`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct FabricSection {
    pub kind: Fabric,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port_gb_s: Option<f64>,
    /// NVLinks of each GPU (switch only).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub links: Option<u32>,
}

/// `[[link]]`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct LinkSection {
    pub gpus: [u8; 2],
    pub gb_s: f64,
    /// NVLinks between the two, of which `gb_s` is the rate in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub links: Option<u32>,
}

/// `[pcie]`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct PcieSection {
    pub to_host_gb_s: f64,
    pub to_device_gb_s: f64,
    pub peer_gb_s: f64,
    /// `[[pcie.switch]]`: which GPUs are under one switch, whose link towards the host they share (`gb_s`, that of a GPU's
    /// link if it is left out). Of switches one below the other the upper one lists the GPUs of both.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub switch: Vec<Switch>,
    /// `[[pcie.bridge]]`: which GPUs are under one host bridge.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bridge: Vec<Bridge>,
}

/// `[host]`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct HostSection {
    pub write_gb_s: f64,
    pub read_gb_s: f64,
    #[serde(default = "one")]
    pub numa_nodes: u32,
}

fn one() -> u32 {
    1
}

/// `[calls]`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct CallSection {
    pub async_us: f64,
    pub sync_us: f64,
    pub query_us: f64,
    pub memop_us: f64,
}

impl Default for CallSection {
    fn default() -> CallSection {
        let costs = Costs::default();
        CallSection {
            async_us: costs.launch_us,
            sync_us: costs.finish_us,
            query_us: costs.query_us,
            memop_us: costs.flag_us,
        }
    }
}

impl File {
    /// The topology that the file describes.
    ///
    /// # Errors
    /// What is wrong with it, in one line.
    pub fn topology(&self) -> Result<Topology, TopologyError> {
        let numa_nodes = self.host.as_ref().map_or(1, |host| host.numa_nodes);
        let host = match (&self.pcie, &self.host) {
            (Some(pcie), Some(host)) => Some(HostSide {
                to_host_gb_s: pcie.to_host_gb_s,
                to_device_gb_s: pcie.to_device_gb_s,
                peer_gb_s: pcie.peer_gb_s,
                write_gb_s: host.write_gb_s,
                read_gb_s: host.read_gb_s,
            }),
            (None, None) => None,
            _ => return Err(wrong("[pcie] and [host] come together or not at all")),
        };
        if numa_nodes == 0 {
            return Err(wrong("host.numa_nodes is 0, must be at least 1"));
        }
        Topology::assemble(Parts {
            name: self.name.clone(),
            description: self.description.clone(),
            gpus: self.gpus(numa_nodes)?,
            fabric: self.fabric.kind,
            port: self.fabric.port_gb_s.map(|rate| (rate, self.fabric.links)),
            links: self
                .link
                .iter()
                .map(|link| Linked {
                    gpus: link.gpus,
                    gb_s: link.gb_s,
                    links: link.links,
                })
                .collect(),
            host,
            numa_nodes,
            pcie: self.pcie.as_ref().map_or_else(Tree::default, |pcie| Tree {
                switches: pcie.switch.clone(),
                bridges: pcie.bridge.clone(),
            }),
            engine_gb_s: self.copy.engine_gb_s.unwrap_or(f64::MAX),
            costs: Costs {
                launch_us: self.calls.async_us,
                finish_us: self.calls.sync_us,
                query_us: self.calls.query_us,
                flag_us: self.calls.memop_us,
                setup_us: self.copy.setup_us(),
                pull_extra_us: self.copy.pull_extra_us,
                peer_engines: self.copy.peer_engines,
            },
        })
    }

    fn gpus(&self, numa_nodes: u32) -> Result<Vec<Gpu>, TopologyError> {
        let count = self.gpu.count;
        // The count bounds what is made below.
        if count == 0 || count > super::MAX_GPUS {
            let most = super::MAX_GPUS;
            return Err(wrong(format!("gpu.count is {count}, must be 1 to {most}")));
        }
        if !self.device.is_empty() {
            if self.device.len() != count {
                let listed = self.device.len();
                return Err(wrong(format!(
                    "gpu.count is {count}, but {listed} [[device]] are listed"
                )));
            }
            return Ok(self.device.clone());
        }
        let gpu = |number| Gpu {
            name: self.gpu.name.clone(),
            numa: Some(super::numa_in_blocks(number, count, numa_nodes)),
            ..Gpu::default()
        };
        Ok((0..count).map(gpu).collect())
    }

    /// A topology as a file that gives it again.
    #[must_use]
    pub fn of(topology: &Topology) -> File {
        use super::SegmentKind as Kind;
        let rate = |wanted: fn(Kind) -> bool| {
            let segment = topology
                .segments
                .iter()
                .find(|segment| wanted(segment.kind));
            segment.map(|segment| segment.gb_s)
        };
        let hop_kind = || topology.hops().map(|(_, _, hop)| hop.kind);
        let to_host = rate(|kind| matches!(kind, Kind::PcieUp(_)));
        let costs = &topology.costs;
        let highest = topology.hops().map(|(_, _, hop)| hop.gb_s);
        File {
            name: topology.name.clone(),
            description: topology.description.clone(),
            gpu: GpuSection {
                count: topology.gpus.len(),
                name: topology
                    .gpus
                    .first()
                    .map_or(String::new(), |gpu| gpu.name.clone()),
            },
            copy: CopySection {
                setup_us: costs.setup_us,
                pull_extra_us: costs.pull_extra_us,
                peer_engines: costs.peer_engines,
                engine_gb_s: Some(highest.fold(0.0, f64::max)),
                ramp_kib: None,
                ramp_gb_s: None,
            },
            fabric: FabricSection {
                kind: topology.fabric,
                port_gb_s: rate(|kind| matches!(kind, Kind::PortOut(_))),
                links: hop_kind().find_map(|kind| match kind {
                    super::HopKind::NvSwitch(links) => links,
                    _ => None,
                }),
            },
            pcie: to_host.map(|to_host_gb_s| PcieSection {
                to_host_gb_s,
                to_device_gb_s: rate(|kind| matches!(kind, Kind::PcieDown(_)))
                    .unwrap_or(to_host_gb_s),
                peer_gb_s: rate(|kind| matches!(kind, Kind::PciePeer(_))).unwrap_or(to_host_gb_s),
                switch: topology.pcie.switches.clone(),
                bridge: topology.pcie.bridges.clone(),
            }),
            host: to_host.map(|to_host_gb_s| HostSection {
                write_gb_s: rate(|kind| kind == Kind::HostWrite).unwrap_or(to_host_gb_s),
                read_gb_s: rate(|kind| kind == Kind::HostRead).unwrap_or(to_host_gb_s),
                numa_nodes: topology.numa_nodes,
            }),
            calls: CallSection {
                async_us: costs.launch_us,
                sync_us: costs.finish_us,
                query_us: costs.query_us,
                memop_us: costs.flag_us,
            },
            link: links_of(topology),
            device: topology.gpus.clone(),
        }
    }
}

fn links_of(topology: &Topology) -> Vec<LinkSection> {
    let link =
        |(from, to, hop): (super::Place, super::Place, &super::Hop)| match (from, to, hop.kind) {
            (super::Place::Gpu(a), super::Place::Gpu(b), super::HopKind::NvLink(links))
                if a < b =>
            {
                let segment = topology.segments[usize::from(hop.segments()[0])];
                Some(LinkSection {
                    gpus: [a, b],
                    gb_s: segment.gb_s,
                    links,
                })
            }
            _ => None,
        };
    topology.hops().filter_map(link).collect()
}
