//! What a node is made of: its GPUs, and the hops between them as ways through segments that other hops share.
//!
//! A **hop** is what one copy crosses: from a GPU to another, from a GPU to host memory, from host memory to a GPU. It
//! runs through one or more **segments**, each of one direction: a GPU's port to the NVLink switch, a link between two
//! GPUs, a GPU's PCIe link, the memory of the host. Two copies get in each other's way exactly if their hops have a
//! segment in common.
//!
//! A topology comes from a file ([`file`]) or from what a driver says ([`found`]). Its rates are nominal: they stand in
//! until the node has been measured.

pub mod file;
pub mod found;
pub mod pcie;

use pcie::{Level, Switch, Tree};
use serde::{Deserialize, Serialize};
use std::fmt;

/// GPUs that a topology may have.
pub const MAX_GPUS: usize = 16;

/// Segments that one hop may run through: the links and the switches of two GPUs, and what one of them may send to others.
pub const HOP_SEGMENTS: usize = 2 * (1 + pcie::SWITCHES_ABOVE_MAX) + 1;

/// Where bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Place {
    /// Memory of the GPU of this number.
    Gpu(u8),
    /// Pinned memory of the host.
    Host,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Gpu(gpu) => write!(f, "GPU{gpu}"),
            Place::Host => f.write_str("host"),
        }
    }
}

impl From<Place> for String {
    fn from(place: Place) -> String {
        place.to_string()
    }
}

impl TryFrom<String> for Place {
    type Error = String;

    fn try_from(text: String) -> Result<Place, String> {
        let gpu = || text.strip_prefix("GPU")?.parse().ok();
        match text.as_str() {
            "host" => Ok(Place::Host),
            _ => gpu()
                .map(Place::Gpu)
                .ok_or_else(|| format!("{text:?} is no place: host, GPU0, GPU1, ...")),
        }
    }
}

/// What a segment is. All are of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SegmentKind {
    /// All NVLinks of a GPU, towards the switch.
    PortOut(u8),
    /// All NVLinks of a GPU, from the switch.
    PortIn(u8),
    /// The NVLinks from one GPU to another.
    Link(u8, u8),
    /// A GPU's PCIe link, towards the host.
    PcieUp(u8),
    /// A GPU's PCIe link, from the host.
    PcieDown(u8),
    /// What a GPU can send to other GPUs over PCIe, which is less than its link.
    PciePeer(u8),
    /// The link of a PCIe switch, by its number in [`Topology::pcie`], towards the host.
    PcieSwitchUp(u8),
    /// The same, from the host.
    PcieSwitchDown(u8),
    /// Memory of the host, written.
    HostWrite,
    /// Memory of the host, read.
    HostRead,
}

impl SegmentKind {
    /// Whether it is memory of the host.
    #[must_use]
    pub fn is_host(self) -> bool {
        matches!(self, SegmentKind::HostWrite | SegmentKind::HostRead)
    }
}

impl fmt::Display for SegmentKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SegmentKind::PortOut(gpu) => write!(f, "NVLinks out of GPU{gpu}"),
            SegmentKind::PortIn(gpu) => write!(f, "NVLinks into GPU{gpu}"),
            SegmentKind::Link(from, to) => write!(f, "NVLinks GPU{from} to GPU{to}"),
            SegmentKind::PcieUp(gpu) => write!(f, "PCIe out of GPU{gpu}"),
            SegmentKind::PcieDown(gpu) => write!(f, "PCIe into GPU{gpu}"),
            SegmentKind::PciePeer(gpu) => write!(f, "PCIe from GPU{gpu} to other GPUs"),
            SegmentKind::PcieSwitchUp(switch) => write!(f, "PCIe out of switch {switch}"),
            SegmentKind::PcieSwitchDown(switch) => write!(f, "PCIe into switch {switch}"),
            SegmentKind::HostWrite => f.write_str("host memory, written"),
            SegmentKind::HostRead => f.write_str("host memory, read"),
        }
    }
}

/// A part of the node that copies share.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Segment {
    /// What it is.
    pub kind: SegmentKind,
    /// What it carries at most, GB/s (10^9 bytes a second), before anything is measured.
    pub gb_s: f64,
}

/// By what a hop goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum HopKind {
    /// NVLinks of the pair's own; their number, if known.
    NvLink(Option<u32>),
    /// NVLinks by way of a switch; the number of each GPU's links, if known.
    NvSwitch(Option<u32>),
    /// PCIe, to another GPU.
    PciePeer,
    /// PCIe, to or from host memory.
    PcieHost,
}

/// What one copy crosses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hop {
    /// By what.
    pub kind: HopKind,
    /// Rate of one copy with nothing else under way, GB/s, before anything is measured.
    pub gb_s: f64,
    segments: [u16; HOP_SEGMENTS],
    len: u8,
}

impl Hop {
    fn new(kind: HopKind, gb_s: f64, through: &[u16]) -> Hop {
        let mut segments = [0; HOP_SEGMENTS];
        segments[..through.len()].copy_from_slice(through);
        Hop {
            kind,
            gb_s,
            segments,
            len: through.len() as u8,
        }
    }

    /// The segments that it runs through, as indices into [`Topology::segments`].
    #[must_use]
    pub fn segments(&self) -> &[u16] {
        &self.segments[..usize::from(self.len)]
    }

    /// Whether it goes by NVLink.
    #[must_use]
    pub fn is_nvlink(&self) -> bool {
        matches!(self.kind, HopKind::NvLink(_) | HopKind::NvSwitch(_))
    }
}

/// A GPU of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Identity, as nvidia-smi prints it; none in a file that is about no machine in particular.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Name of the model.
    #[serde(default)]
    pub name: String,
    /// PCI address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci: Option<String>,
    /// NUMA node of its PCIe root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<u32>,
    /// Processors next to it, as the system lists them (`0-19,40-59`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<String>,
}

/// What copies cost apart from moving bytes, before anything is measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Costs {
    /// A launch, to the calling thread.
    pub launch_us: f64,
    /// From the end of a copy until its waiter knows.
    pub finish_us: f64,
    /// A question whether something has ended.
    pub query_us: f64,
    /// A flag that a stream writes after a copy.
    pub flag_us: f64,
    /// Each copy, before its bytes move.
    pub setup_us: f64,
    /// More than that, if the engine of the destination pulls.
    pub pull_extra_us: f64,
    /// Copies between GPUs that the engines of one GPU run at once.
    pub peer_engines: u32,
}

impl Default for Costs {
    /// As measured on H200.
    fn default() -> Costs {
        Costs {
            launch_us: 2.3,
            finish_us: 2.1,
            query_us: 0.5,
            flag_us: 1.5,
            setup_us: 2.5,
            pull_extra_us: 2.8,
            peer_engines: 4,
        }
    }
}

/// How the GPUs of the node are connected among themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fabric {
    /// Every pair through each GPU's one port.
    Switch,
    /// A link between every pair.
    FullMesh,
    /// Links between some pairs; the others go over PCIe.
    Links,
}

/// Why a topology cannot be used; one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TopologyError(pub String);

fn wrong(text: impl Into<String>) -> TopologyError {
    TopologyError(text.into())
}

/// A node.
#[derive(Clone, Debug)]
pub struct Topology {
    /// Short name.
    pub name: String,
    /// One line for people.
    pub description: String,
    /// The GPUs; their numbers are their places here.
    pub gpus: Vec<Gpu>,
    /// How the GPUs are connected.
    pub fabric: Fabric,
    /// Number of NUMA nodes.
    pub numa_nodes: u32,
    /// What the GPUs hang on.
    pub pcie: Tree,
    /// All segments.
    pub segments: Vec<Segment>,
    /// What copies cost apart from moving bytes.
    pub costs: Costs,
    hops: Vec<Option<Hop>>,
}

/// A link between two GPUs, both directions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Linked {
    pub gpus: [u8; 2],
    pub gb_s: f64,
    pub links: Option<u32>,
}

/// PCIe and the host, all GPUs alike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct HostSide {
    pub to_host_gb_s: f64,
    pub to_device_gb_s: f64,
    pub peer_gb_s: f64,
    pub write_gb_s: f64,
    pub read_gb_s: f64,
}

/// Rate of each GPU's port to a switch, GB/s, and the number of its links, if known.
pub(crate) type Port = (f64, Option<u32>);

/// The link of a PCIe switch, towards the host and from it.
struct SwitchLink {
    gpus: Vec<u8>,
    segments: [u16; 2],
    gb_s: [f64; 2],
}

impl SwitchLink {
    fn is_above(&self, gpu: u8) -> bool {
        self.gpus.contains(&gpu)
    }
}

/// Parts that a topology is put together from, whoever knows them.
pub(crate) struct Parts {
    pub name: String,
    pub description: String,
    pub gpus: Vec<Gpu>,
    pub fabric: Fabric,
    pub port: Option<Port>,
    pub links: Vec<Linked>,
    pub host: Option<HostSide>,
    pub numa_nodes: u32,
    pub pcie: Tree,
    /// What one copy reaches at most, by whatever way.
    pub engine_gb_s: f64,
    pub costs: Costs,
}

impl Topology {
    /// Checks the parts and lays out segments and hops.
    pub(crate) fn assemble(parts: Parts) -> Result<Topology, TopologyError> {
        parts.check()?;
        let mut topology = Topology {
            name: parts.name,
            description: parts.description,
            hops: vec![None; (parts.gpus.len() + 1).pow(2)],
            gpus: parts.gpus,
            fabric: parts.fabric,
            numa_nodes: parts.numa_nodes,
            pcie: parts.pcie,
            segments: Vec::new(),
            costs: parts.costs,
        };
        let cap = parts.engine_gb_s;
        if let (Fabric::Switch, Some((gb_s, links))) = (parts.fabric, parts.port) {
            topology.add_switch(gb_s, links, cap);
        }
        for link in &parts.links {
            topology.add_link(link, cap);
        }
        if let Some(host) = &parts.host {
            topology.add_host_side(host, cap);
        }
        topology.check_connected()?;
        Ok(topology)
    }

    fn segment(&mut self, kind: SegmentKind, gb_s: f64) -> u16 {
        self.segments.push(Segment { kind, gb_s });
        (self.segments.len() - 1) as u16
    }

    fn add_switch(&mut self, gb_s: f64, links: Option<u32>, cap: f64) {
        let n = self.gpus.len() as u8;
        let ports: Vec<[u16; 2]> = (0..n)
            .map(|gpu| {
                [
                    self.segment(SegmentKind::PortOut(gpu), gb_s),
                    self.segment(SegmentKind::PortIn(gpu), gb_s),
                ]
            })
            .collect();
        for from in 0..n {
            for to in (0..n).filter(|to| *to != from) {
                let through = [ports[usize::from(from)][0], ports[usize::from(to)][1]];
                let hop = Hop::new(HopKind::NvSwitch(links), gb_s.min(cap), &through);
                self.set_hop(Place::Gpu(from), Place::Gpu(to), hop);
            }
        }
    }

    fn add_link(&mut self, link: &Linked, cap: f64) {
        let [a, b] = link.gpus;
        for (from, to) in [(a, b), (b, a)] {
            let segment = self.segment(SegmentKind::Link(from, to), link.gb_s);
            let hop = Hop::new(HopKind::NvLink(link.links), link.gb_s.min(cap), &[segment]);
            self.set_hop(Place::Gpu(from), Place::Gpu(to), hop);
        }
    }

    fn add_host_side(&mut self, host: &HostSide, cap: f64) {
        let n = self.gpus.len() as u8;
        let write = self.segment(SegmentKind::HostWrite, host.write_gb_s);
        let read = self.segment(SegmentKind::HostRead, host.read_gb_s);
        let switches = self.add_switches(host);
        let mut links = Vec::new();
        for gpu in 0..n {
            let up = self.segment(SegmentKind::PcieUp(gpu), host.to_host_gb_s);
            let down = self.segment(SegmentKind::PcieDown(gpu), host.to_device_gb_s);
            links.push([up, down]);
            let above = || switches.iter().filter(move |switch| switch.is_above(gpu));
            let here = Place::Gpu(gpu);
            for (from, to, way, memory, rate) in [
                (
                    here,
                    Place::Host,
                    0,
                    write,
                    host.to_host_gb_s.min(host.write_gb_s),
                ),
                (
                    Place::Host,
                    here,
                    1,
                    read,
                    host.to_device_gb_s.min(host.read_gb_s),
                ),
            ] {
                let rate = above().fold(rate.min(cap), |rate, switch| rate.min(switch.gb_s[way]));
                let mut through = vec![links[usize::from(gpu)][way]];
                through.extend(above().map(|switch| switch.segments[way]));
                through.push(memory);
                self.set_hop(from, to, Hop::new(HopKind::PcieHost, rate, &through));
            }
        }
        let rate = host
            .peer_gb_s
            .min(host.to_host_gb_s)
            .min(host.to_device_gb_s)
            .min(cap);
        for from in 0..n {
            let mut peer = None;
            for to in (0..n).filter(|to| *to != from) {
                if self.hop(Place::Gpu(from), Place::Gpu(to)).is_some() {
                    continue;
                }
                let peer = *peer.get_or_insert_with(|| {
                    self.segment(SegmentKind::PciePeer(from), host.peer_gb_s)
                });
                let mut through =
                    vec![links[usize::from(from)][0], links[usize::from(to)][1], peer];
                let mut rate = rate;
                // Up to the nearest switch that both are under, or to the host, and down again.
                for (gpu, other, way) in [(from, to, 0), (to, from, 1)] {
                    let passed =
                        |switch: &&SwitchLink| switch.is_above(gpu) && !switch.is_above(other);
                    for switch in switches.iter().filter(passed) {
                        through.push(switch.segments[way]);
                        rate = rate.min(switch.gb_s[way]);
                    }
                }
                let hop = Hop::new(HopKind::PciePeer, rate, &through);
                self.set_hop(Place::Gpu(from), Place::Gpu(to), hop);
            }
        }
    }

    /// The links of the switches that several GPUs are under. One with a single GPU has that GPU's rate, and is no place where
    /// copies meet.
    fn add_switches(&mut self, host: &HostSide) -> Vec<SwitchLink> {
        let shared: Vec<(u8, Switch)> = self
            .pcie
            .shared()
            .map(|(number, switch)| (number, switch.clone()))
            .collect();
        let add = |(number, switch): (u8, Switch)| {
            let gb_s =
                [host.to_host_gb_s, host.to_device_gb_s].map(|gpu| switch.gb_s.unwrap_or(gpu));
            SwitchLink {
                segments: [
                    self.segment(SegmentKind::PcieSwitchUp(number), gb_s[0]),
                    self.segment(SegmentKind::PcieSwitchDown(number), gb_s[1]),
                ],
                gpus: switch.gpus,
                gb_s,
            }
        };
        shared.into_iter().map(add).collect()
    }

    /// How far two GPUs are apart by PCIe. None where nobody has told: they may have more in common than their NUMA node.
    #[must_use]
    pub fn level(&self, a: u8, b: u8) -> Option<Level> {
        self.pcie.level(&self.gpus, a, b)
    }

    /// Puts measured rates in the place of nominal ones: of segments by their index, of hops by their ends.
    pub fn set_rates(&mut self, segments: &[f64], hop: impl Fn(Place, Place) -> Option<f64>) {
        for (segment, gb_s) in self.segments.iter_mut().zip(segments) {
            segment.gb_s = *gb_s;
        }
        let ends: Vec<(Place, Place)> = self.hops().map(|(from, to, _)| (from, to)).collect();
        for (from, to) in ends {
            let at = self.index(from) * (self.gpus.len() + 1) + self.index(to);
            if let (Some(known), Some(gb_s)) = (self.hops[at].as_mut(), hop(from, to)) {
                known.gb_s = gb_s;
            }
        }
    }

    fn index(&self, place: Place) -> usize {
        match place {
            Place::Gpu(gpu) => usize::from(gpu),
            Place::Host => self.gpus.len(),
        }
    }

    fn set_hop(&mut self, from: Place, to: Place, hop: Hop) {
        let at = self.index(from) * (self.gpus.len() + 1) + self.index(to);
        self.hops[at] = Some(hop);
    }

    /// The hop from one place to another, if a copy can go that way.
    #[must_use]
    pub fn hop(&self, from: Place, to: Place) -> Option<&Hop> {
        let places = self.gpus.len() + 1;
        let (from, to) = (self.index(from), self.index(to));
        if from >= places || to >= places {
            return None;
        }
        self.hops[from * places + to].as_ref()
    }

    /// All hops, with their ends.
    pub fn hops(&self) -> impl Iterator<Item = (Place, Place, &Hop)> + '_ {
        let places = self.gpus.len() + 1;
        let place = move |index: usize| match index + 1 {
            last if last == places => Place::Host,
            _ => Place::Gpu(index as u8),
        };
        self.hops.iter().enumerate().filter_map(move |(at, hop)| {
            let hop = hop.as_ref()?;
            Some((place(at / places), place(at % places), hop))
        })
    }

    /// Every GPU must be reached by every other, if not by a hop then over others.
    fn check_connected(&self) -> Result<(), TopologyError> {
        let places = self.gpus.len() + 1;
        let mut reached = vec![false; places];
        reached[0] = true;
        let mut open = vec![0];
        while let Some(from) = open.pop() {
            for (to, reached) in reached.iter_mut().enumerate() {
                if !*reached && self.hops[from * places + to].is_some() {
                    *reached = true;
                    open.push(to);
                }
            }
        }
        match (0..self.gpus.len()).find(|gpu| !reached[*gpu]) {
            None => Ok(()),
            Some(gpu) => Err(wrong(format!(
                "not connected: nothing leads from GPU 0 to GPU {gpu}; give a link to it, or [pcie] and [host]"
            ))),
        }
    }
}

/// Links that somebody gave a number of.
fn check_count(name: &str, links: Option<u32>) -> Result<(), TopologyError> {
    if links == Some(0) {
        return Err(wrong(format!(
            "{name} is 0, must be at least 1, or left out"
        )));
    }
    Ok(())
}

/// A rate that can be used.
fn check_rate(what: &str, value: f64) -> Result<(), TopologyError> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(wrong(format!(
        "{what} is {value}, must be a positive rate in GB/s"
    )))
}

impl Parts {
    fn check(&self) -> Result<(), TopologyError> {
        let n = self.gpus.len();
        if n == 0 || n > MAX_GPUS {
            return Err(wrong(format!("{n} GPUs, must be 1 to {MAX_GPUS}")));
        }
        check_rate("copy.engine_gb_s", self.engine_gb_s)?;
        if let Some((gb_s, links)) = self.port {
            check_rate("fabric.port_gb_s", gb_s)?;
            check_count("fabric.links", links)?;
        }
        if let Some(host) = &self.host {
            check_rate("pcie.to_host_gb_s", host.to_host_gb_s)?;
            check_rate("pcie.to_device_gb_s", host.to_device_gb_s)?;
            check_rate("pcie.peer_gb_s", host.peer_gb_s)?;
            check_rate("host.write_gb_s", host.write_gb_s)?;
            check_rate("host.read_gb_s", host.read_gb_s)?;
        }
        let costs = &self.costs;
        let times = [
            ("calls.async_us", costs.launch_us),
            ("calls.sync_us", costs.finish_us),
            ("calls.query_us", costs.query_us),
            ("calls.memop_us", costs.flag_us),
            ("copy.setup_us", costs.setup_us),
            ("copy.pull_extra_us", costs.pull_extra_us),
        ];
        if let Some((name, time)) = times.iter().find(|(_, t)| !(t.is_finite() && *t >= 0.0)) {
            return Err(wrong(format!("{name} is {time}, must be 0 or more")));
        }
        if costs.peer_engines == 0 {
            return Err(wrong("copy.peer_engines is 0, must be at least 1"));
        }
        self.check_cpus()?;
        self.pcie.check(&self.gpus)?;
        self.check_links()
    }

    /// Lists of processors, which are printed as they are.
    fn check_cpus(&self) -> Result<(), TopologyError> {
        let is_number =
            |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let is_list = |cpus: &str| {
            cpus.split(',')
                .all(|part| part.splitn(2, '-').all(is_number))
        };
        for (number, gpu) in self.gpus.iter().enumerate() {
            if let Some(cpus) = gpu.cpus.as_deref().filter(|cpus| !is_list(cpus)) {
                return Err(wrong(format!(
                    "cpus of [[device]] {number} is {cpus:?}, must be a list of processors as \"0-19,40-59\", or left out"
                )));
            }
        }
        Ok(())
    }

    fn check_links(&self) -> Result<(), TopologyError> {
        let n = self.gpus.len();
        let same = |a: &[u8; 2], b: &[u8; 2]| a == b || *a == [b[1], b[0]];
        for (i, link) in self.links.iter().enumerate() {
            let [a, b] = link.gpus;
            if usize::from(a) >= n || usize::from(b) >= n || a == b {
                return Err(wrong(format!(
                    "link between GPU {a} and {b}: gpus must be two different ones of 0 to {}",
                    n - 1
                )));
            }
            check_rate(&format!("link between GPU {a} and {b}: gb_s"), link.gb_s)?;
            check_count(&format!("link between GPU {a} and {b}: links"), link.links)?;
            if self.links[..i]
                .iter()
                .any(|other| same(&other.gpus, &link.gpus))
            {
                return Err(wrong(format!(
                    "link between GPU {a} and {b} is listed twice: take one [[link]] out"
                )));
            }
        }
        match self.fabric {
            Fabric::Switch if self.port.is_none() => Err(wrong(
                "fabric.port_gb_s is missing: a switch needs the rate of a GPU's port in GB/s",
            )),
            Fabric::Switch if !self.links.is_empty() => {
                Err(wrong("fabric.kind is switch, which has no [[link]]: take them out, or set full-mesh or links"))
            }
            Fabric::FullMesh => {
                for a in 0..n as u8 {
                    for b in a + 1..n as u8 {
                        if !self.links.iter().any(|link| same(&link.gpus, &[a, b])) {
                            return Err(wrong(format!(
                                "link between GPU {a} and {b} is missing: add a [[link]], or set fabric.kind to links"
                            )));
                        }
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// NUMA node of a GPU where only their number is known: the GPUs are dealt to the nodes in blocks.
pub(crate) fn numa_in_blocks(gpu: usize, gpus: usize, numa_nodes: u32) -> u32 {
    (gpu * numa_nodes as usize / gpus.max(1)) as u32
}

#[cfg(test)]
pub(crate) mod tests;
