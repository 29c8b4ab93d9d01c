//! Where `topo` and `plan` have a node from: a file, or the driver and what was measured.

use std::path::{Path, PathBuf};

use anabranch_engine::model::cache::{self, CacheError, Machine};
use anabranch_engine::model::{HostPart, Model};
use anabranch_engine::topology::Topology;

use super::driver::Node;
use super::{file, measure};
use crate::Failure;

/// A node with its numbers.
pub struct Source {
    /// What it is made of.
    pub topology: Topology,
    /// What copies take.
    pub model: Model,
    /// The numbers were measured on it.
    pub measured: bool,
}

/// Reads a topology file, or asks the driver. What is not as it should be is said on stderr, and defaults are used.
///
/// # Errors
/// There is no such file, or no driver.
pub fn find(named: Option<&str>, kept: Option<&Path>, measure: bool) -> anyhow::Result<Source> {
    if let Some(which) = named {
        return Ok(by_name("--topology", which)?);
    }
    let node = Node::open()?;
    let machine = node.machine()?;
    let mut facts = node.facts()?;
    let place = place(kept, &machine)?;
    if measure {
        let (topology, model) = measure::run(&node, &mut facts)?;
        cache::store(&place, &machine, &topology, &model)?;
        if kept.is_none() {
            // In the folder in which the library looks.
            cache::link(&place, &machine)?;
        }
        crate::complain(&format!("measured; kept in {}", place.display()));
        return Ok(Source::measured(topology, model));
    }
    match cache::load(&place, &machine) {
        Ok(model) => {
            facts.fabric = model.fabric;
            Ok(Source::measured(facts.topology()?, model))
        }
        Err(error) => {
            if kept.is_some() || !matches!(error, CacheError::Absent(_)) {
                crate::complain(&error.to_string());
            }
            crate::complain(
                "rates are assumed, not measured: anabranch topo --measure measures them",
            );
            Ok(Source::nominal(facts.topology()?))
        }
    }
}

/// Reads the topology file that an option names.
///
/// # Errors
/// There is no such file, or something is wrong with it.
pub fn by_name(option: &str, which: &str) -> Result<Source, Failure> {
    let (topology, model) = file::read(option, which)?;
    Ok(match model {
        Some(model) => Source::measured(topology, model),
        None => Source::nominal(topology),
    })
}

fn place(kept: Option<&Path>, machine: &Machine) -> Result<PathBuf, Failure> {
    match (kept, cache::folder()) {
        (Some(file), _) => Ok(file.to_path_buf()),
        (None, Some(folder)) => Ok(machine.file(&folder)),
        (None, None) => Err(Failure::new(
            2,
            "no folder for measurements: set HOME or XDG_CACHE_HOME, or give --model FILE",
        )),
    }
}

impl Source {
    fn nominal(topology: Topology) -> Source {
        Source {
            model: Model::nominal(&topology),
            topology,
            measured: false,
        }
    }

    fn measured(mut topology: Topology, model: Model) -> Source {
        let capacities = model.capacities(&topology, HostPart::ALL);
        topology.set_rates(&capacities, |from, to| {
            let hop = model.hop(from, to)?;
            let lines = [hop.push, hop.pull];
            lines
                .iter()
                .flatten()
                .map(|line| line.gb_s)
                .reduce(f64::max)
        });
        Source {
            topology,
            model,
            measured: true,
        }
    }
}
