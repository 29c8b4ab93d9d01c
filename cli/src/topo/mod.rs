//! `anabranch topo`: how the GPUs of a node are connected, and how fast.

mod driver;
pub mod file;
mod measure;
mod nvml;
pub mod source;
mod system;
mod text;

use std::path::PathBuf;
use std::process::ExitCode;

use anabranch_engine::model::{Model, ASSUMED};
use anabranch_engine::topology::pcie::{Level, Tree};
use anabranch_engine::topology::{Gpu, HopKind, Place, Segment, Topology};
use clap::Args;
use serde::Serialize;

use crate::json::Json;
use crate::output;
use crate::Failure;

/// Arguments of `anabranch topo`.
#[derive(Args)]
pub struct Arguments {
    /// A node that comes with the command (beluga, narval, dgx1-v100, hgx-h200) or a file, instead of this machine
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "measure")]
    topology: Option<String>,
    /// Measure each pair by copies, and keep the result for this machine
    #[arg(long)]
    measure: bool,
    /// Where the measurement of this machine is kept [default: in the user's cache folder]
    #[arg(long, value_name = "FILE", conflicts_with = "topology")]
    model: Option<PathBuf>,
    /// Write the topology, and what was measured of it, to a file that --topology reads
    #[arg(long, value_name = "FILE")]
    dump: Option<PathBuf>,
    #[command(flatten)]
    json: Json,
}

#[derive(Serialize)]
struct Report<'a> {
    name: &'a str,
    description: &'a str,
    measured: bool,
    /// Parts of `model` that were not, all the same.
    assumed: [&'static str; 2],
    gpus: &'a [Gpu],
    numa_nodes: u32,
    /// Which GPUs are under which switch and host bridge; a switch's number is its place here.
    pcie: &'a Tree,
    segments: &'a [Segment],
    hops: Vec<HopReport<'a>>,
    model: &'a Model,
}

#[derive(Serialize)]
struct HopReport<'a> {
    from: Place,
    to: Place,
    kind: HopKind,
    /// How far two GPUs are apart by PCIe, whether the hop goes that way or not; none if nobody has told.
    #[serde(skip_serializing_if = "Option::is_none")]
    level: Option<Level>,
    gb_s: f64,
    segments: &'a [u16],
}

/// Prints the matrix and the tables, or JSON with the same.
///
/// # Errors
/// There is no such node, or a file cannot be written.
pub fn main(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let source = source::find(
        arguments.topology.as_deref(),
        arguments.model.as_deref(),
        arguments.measure,
    )?;
    if let Some(file) = &arguments.dump {
        std::fs::write(file, file::text(&source)?)
            .map_err(|error| Failure::new(2, format!("--dump {}: {error}", file.display())))?;
    }
    let report = report(&source.topology, &source.model, source.measured);
    arguments.json.write(&report)?;
    if !arguments.json.is_alone() {
        output::text(&text::render(&source))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn report<'a>(topology: &'a Topology, model: &'a Model, measured: bool) -> Report<'a> {
    let hop = |(from, to, hop): (Place, Place, &'a anabranch_engine::topology::Hop)| HopReport {
        from,
        to,
        kind: hop.kind,
        level: match (from, to) {
            (Place::Gpu(from), Place::Gpu(to)) => topology.level(from, to),
            _ => None,
        },
        gb_s: hop.gb_s,
        segments: hop.segments(),
    };
    Report {
        name: &topology.name,
        description: &topology.description,
        measured,
        assumed: ASSUMED,
        gpus: &topology.gpus,
        numa_nodes: topology.numa_nodes,
        pcie: &topology.pcie,
        segments: &topology.segments,
        hops: topology.hops().map(hop).collect(),
        model,
    }
}
