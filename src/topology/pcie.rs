//! The PCIe tree between the GPUs and the host, as far as anybody tells it.
//!
//! A switch and a host bridge are the sets of GPUs under them. What several GPUs are under has one link towards the host for all
//! of them, if it is a switch: that is a segment which their copies share. Host bridges have a link for each root port; which
//! of two GPUs have one of these tells how far they are apart, and no more.

use super::{check_rate, wrong, Gpu, TopologyError};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Switches that may be above a GPU: NVML tells one from several, and no more.
pub const SWITCHES_ABOVE_MAX: usize = 2;

/// What two GPUs have in common nearest on their ways to the host, as `nvidia-smi topo -m` names it; the nearer, the less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Level {
    /// One switch, with nothing between, or one board.
    Pix,
    /// Switches, one behind the other.
    Pxb,
    /// A host bridge.
    Phb,
    /// A NUMA node.
    Node,
    /// The machine.
    Sys,
}

impl Level {
    /// By its number in NVML (`nvmlGpuTopologyLevel_t`). One that is between two is at most as far as the next.
    #[must_use]
    pub fn of_nvml(number: u32) -> Option<Level> {
        match number {
            0..=10 => Some(Level::Pix),
            11..=20 => Some(Level::Pxb),
            21..=30 => Some(Level::Phb),
            31..=40 => Some(Level::Node),
            41..=50 => Some(Level::Sys),
            _ => None,
        }
    }

    /// By the places of two devices in `/sys/devices`, which name every bridge above them, and whether they are on one NUMA node.
    /// None if the paths are not those of PCI devices.
    #[must_use]
    pub fn of_paths(a: &str, b: &str, one_node: bool) -> Option<Level> {
        let ((bridge, above), (other_bridge, above_other)) = (bridges(a)?, bridges(b)?);
        if bridge != other_bridge {
            return Some(if one_node { Level::Node } else { Level::Sys });
        }
        let pairs = above.iter().zip(&above_other);
        match pairs.take_while(|(a, b)| a == b).count() {
            0 => Some(Level::Phb),
            // Below a switch's upper port there is a lower one for each device.
            common if above.len().max(above_other.len()) <= common + 1 => Some(Level::Pix),
            _ => Some(Level::Pxb),
        }
    }
}

/// The host bridge that a path begins with, and the bridges below it down to the device.
fn bridges(path: &str) -> Option<(&str, Vec<&str>)> {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    // Behind some controllers there is a host bridge of their own.
    let at = parts.iter().rposition(|part| part.starts_with("pci"))?;
    let (_device, above) = parts[at + 1..].split_last()?;
    Some((parts[at], above.to_vec()))
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Level::Pix => "PIX",
            Level::Pxb => "PXB",
            Level::Phb => "PHB",
            Level::Node => "NODE",
            Level::Sys => "SYS",
        })
    }
}

/// A PCIe switch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Switch {
    /// The GPUs under it, those under a switch below it, too.
    pub gpus: Vec<u8>,
    /// What its link towards the host carries, GB/s and direction; as much as a GPU's if nobody tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gb_s: Option<f64>,
}

/// A PCI host bridge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bridge {
    /// The GPUs under it, by whatever way.
    pub gpus: Vec<u8>,
}

/// The tree. A GPU in no set is somewhere that nobody has told.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Tree {
    /// Switches, a lower one before what it is under.
    pub switches: Vec<Switch>,
    /// Host bridges.
    pub bridges: Vec<Bridge>,
}

impl Tree {
    /// The tree of these GPUs by how far each is apart from each, row after row. What cannot be is worth less than nothing, be it no
    /// tree or against the NUMA nodes: that copies share a link is then not assumed.
    pub(crate) fn of(gpus: &[Gpu], levels: &[Level]) -> Tree {
        let n = gpus.len();
        let tree = || Tree::from_levels(n, |a, b| levels[a * n + b]);
        let tree = (levels.len() == n * n).then(tree).flatten();
        tree.filter(|tree| tree.check(gpus).is_ok())
            .unwrap_or_default()
    }

    /// The tree in which GPUs are as far apart as somebody says. None where that is no tree: of two GPUs that are near to a
    /// third, one is told to be farther from the other.
    pub(crate) fn from_levels(n: usize, level: impl Fn(usize, usize) -> Level) -> Option<Tree> {
        let level = |a: usize, b: usize| if a == b { Level::Pix } else { level(a, b) };
        let is_tree = |a, b| {
            level(a, b) == level(b, a)
                && (0..n).all(|c| level(a, b) <= level(a, c).max(level(c, b)))
        };
        if !(0..n).all(|a| (0..n).all(|b| is_tree(a, b))) {
            return None;
        }
        let groups = |within: Level| -> Vec<Vec<u8>> {
            let of = |gpu: usize| (0..n).filter(move |other| level(gpu, *other) <= within);
            let first = (0..n).filter(|gpu| of(*gpu).next() == Some(*gpu));
            first
                .map(|gpu| of(gpu).map(|gpu| gpu as u8).collect())
                .collect()
        };
        let mut sets = groups(Level::Pix);
        let several: Vec<Vec<u8>> = groups(Level::Pxb)
            .into_iter()
            .filter(|set| set.len() > 1 && !sets.contains(set))
            .collect();
        // One that is under several switches has one of its own, be it that no other GPU is under that.
        sets.retain(|set| set.len() > 1 || several.iter().any(|above| above.contains(&set[0])));
        let switch = |gpus| Switch { gpus, gb_s: None };
        Some(Tree {
            switches: sets.into_iter().chain(several).map(switch).collect(),
            bridges: groups(Level::Phb)
                .into_iter()
                .map(|gpus| Bridge { gpus })
                .collect(),
        })
    }

    /// How far two GPUs are apart, by switches and host bridges only.
    fn near(&self, a: u8, b: u8) -> Option<Level> {
        let both = |gpus: &[u8]| gpus.contains(&a) && gpus.contains(&b);
        let above = self.switches.iter().filter(|switch| both(&switch.gpus));
        if let Some(nearest) = above.min_by_key(|switch| switch.gpus.len()) {
            let is_below = |switch: &Switch| {
                switch.gpus.len() < nearest.gpus.len()
                    && (switch.gpus.contains(&a) || switch.gpus.contains(&b))
            };
            let one = !self.switches.iter().any(is_below);
            return Some(if one { Level::Pix } else { Level::Pxb });
        }
        self.bridges
            .iter()
            .any(|bridge| both(&bridge.gpus))
            .then_some(Level::Phb)
    }

    /// How far two GPUs are apart. None where nobody has told: they may have more in common than their NUMA node.
    pub(crate) fn level(&self, gpus: &[Gpu], a: u8, b: u8) -> Option<Level> {
        let numa = |gpu: u8| gpus.get(usize::from(gpu))?.numa;
        let has_bridge = |gpu: u8| self.bridges.iter().any(|bridge| bridge.gpus.contains(&gpu));
        self.near(a, b).or_else(|| match (numa(a)?, numa(b)?) {
            (a, b) if a != b => Some(Level::Sys),
            _ => (has_bridge(a) && has_bridge(b)).then_some(Level::Node),
        })
    }

    /// The switches that several GPUs are under, with their numbers.
    pub(crate) fn shared(&self) -> impl Iterator<Item = (u8, &Switch)> {
        (0..)
            .zip(&self.switches)
            .filter(|(_, switch)| switch.gpus.len() > 1)
    }

    /// Checks that it is a tree over these GPUs.
    pub(crate) fn check(&self, gpus: &[Gpu]) -> Result<(), TopologyError> {
        for (at, switch) in self.switches.iter().enumerate() {
            check_set("pcie.switch", &switch.gpus, gpus)?;
            let name = named("pcie.switch", &switch.gpus);
            if let Some(gb_s) = switch.gb_s {
                check_rate(&format!("{name}: gb_s"), gb_s)?;
            }
            for other in &self.switches[..at] {
                check_nested(&name, &switch.gpus, &other.gpus)?;
            }
        }
        for (at, bridge) in self.bridges.iter().enumerate() {
            check_set("pcie.bridge", &bridge.gpus, gpus)?;
            let name = named("pcie.bridge", &bridge.gpus);
            let twice = |gpu: &&u8| {
                self.bridges[..at]
                    .iter()
                    .any(|other| other.gpus.contains(gpu))
            };
            if let Some(gpu) = bridge.gpus.iter().find(twice) {
                return Err(wrong(format!(
                    "{name}: GPU {gpu} is under another [[pcie.bridge]], too: take it out of one"
                )));
            }
            for switch in &self.switches {
                let under = switch
                    .gpus
                    .iter()
                    .filter(|gpu| bridge.gpus.contains(gpu))
                    .count();
                if under != 0 && under != switch.gpus.len() {
                    let switch = named("pcie.switch", &switch.gpus);
                    return Err(wrong(format!(
                        "{name} has a part of {switch}: list all of them or none"
                    )));
                }
            }
        }
        let above = |gpu: u8| {
            self.switches
                .iter()
                .filter(move |switch| switch.gpus.contains(&gpu))
                .count()
        };
        match (0..gpus.len() as u8).find(|gpu| above(*gpu) > SWITCHES_ABOVE_MAX) {
            None => Ok(()),
            Some(gpu) => Err(wrong(format!(
                "pcie.switch: GPU {gpu} is under {} switches, at most {SWITCHES_ABOVE_MAX} are told apart: leave out those between the first and the last",
                above(gpu)
            ))),
        }
    }
}

fn named(field: &str, gpus: &[u8]) -> String {
    let gpus: Vec<String> = gpus.iter().map(ToString::to_string).collect();
    format!("{field} of GPU {}", gpus.join(", "))
}

/// GPUs that are there, each once, on one NUMA node.
fn check_set(field: &str, set: &[u8], gpus: &[Gpu]) -> Result<(), TopologyError> {
    if set.is_empty() {
        return Err(wrong(format!(
            "{field}: gpus is empty, must list those under it"
        )));
    }
    let name = named(field, set);
    for (at, gpu) in set.iter().enumerate() {
        if usize::from(*gpu) >= gpus.len() {
            let last = gpus.len() - 1;
            return Err(wrong(format!(
                "{name}: there is no GPU {gpu}, gpus must be of 0 to {last}"
            )));
        }
        if set[..at].contains(gpu) {
            return Err(wrong(format!(
                "{name}: GPU {gpu} is listed twice: take it out once"
            )));
        }
    }
    let mut nodes = set.iter().filter_map(|gpu| gpus[usize::from(*gpu)].numa);
    let first = nodes.next();
    match nodes.find(|node| Some(*node) != first) {
        None => Ok(()),
        Some(other) => Err(wrong(format!(
            "{name}: they are on NUMA nodes {} and {other}, but must be on one: correct gpus, host.numa_nodes, or numa of their [[device]]",
            first.unwrap_or_default()
        ))),
    }
}

/// Switches are one below the other, or have nothing in common.
fn check_nested(name: &str, set: &[u8], other: &[u8]) -> Result<(), TopologyError> {
    let common = set.iter().filter(|gpu| other.contains(gpu)).count();
    if common == set.len() && common == other.len() {
        return Err(wrong(format!(
            "{name} is listed twice: take one [[pcie.switch]] out"
        )));
    }
    if common == 0 || common == set.len() || common == other.len() {
        return Ok(());
    }
    Err(wrong(format!(
        "{name} and {} overlap: one must have all GPUs of the other, or none",
        named("that", other)
    )))
}

#[cfg(test)]
#[path = "pcie_tests.rs"]
mod tests;
