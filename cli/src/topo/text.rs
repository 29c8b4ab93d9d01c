//! The matrix that people know from `nvidia-smi topo -m`, and tables of rates and times.

use std::fmt::Write as _;

use anabranch_engine::model::Line;
use anabranch_engine::topology::{Fabric, HopKind, Place, Topology};

use super::source::Source;

/// All of it.
pub fn render(source: &Source) -> String {
    let topology = &source.topology;
    let mut out = format!("{}: {}\n\n", topology.name, topology.description);
    let places = places(topology);
    let mut matrix = vec![header(&places, &["NUMA"])];
    for from in &places {
        let mut row = vec![from.to_string()];
        row.extend(places.iter().map(|to| kind(topology, *from, *to)));
        row.push(match from {
            Place::Gpu(gpu) => topology.gpus[usize::from(*gpu)]
                .numa
                .map_or("-".into(), |numa| numa.to_string()),
            Place::Host => String::new(),
        });
        matrix.push(row);
    }
    out += &table(&matrix);
    let fabric = match topology.fabric {
        Fabric::Switch => "all by way of a switch, which a GPU's links share",
        Fabric::FullMesh | Fabric::Links => "the pair's own",
    };
    let _ = writeln!(
        out,
        "\nNV# NVLinks ({fabric}; NV where their number is not known),\nNODE PCIe within a NUMA node, SYS between NUMA nodes\n"
    );
    let numbers = if source.measured {
        "measured"
    } else {
        "nominal, not measured"
    };
    let _ = writeln!(out, "GB/s ({numbers}), row to column");
    out += &by_pair(source, &places, |line| line.gb_s);
    let _ = writeln!(
        out,
        "\nus of a copy before its bytes move ({numbers}), launch and end not counted"
    );
    out += &by_pair(source, &places, |line| line.alpha_us);
    let _ = writeln!(
        out,
        "\nlaunch {:.1} us, end {:.1} us ({numbers}); hand-over at a relay {:.1} us, in host memory {:.1} us (assumed)",
        source.model.launch_us,
        source.model.finish_us,
        source.model.relay.epsilon_us,
        source.model.host.epsilon_us
    );
    for (number, gpu) in topology
        .gpus
        .iter()
        .enumerate()
        .filter(|(_, gpu)| gpu.uuid.is_some())
    {
        let uuid = gpu.uuid.as_deref().unwrap_or_default();
        let pci = gpu.pci.as_deref().unwrap_or("-");
        let _ = writeln!(out, "GPU{number} {} {uuid} {pci}", gpu.name);
    }
    out
}

fn places(topology: &Topology) -> Vec<Place> {
    (0..topology.gpus.len() as u8)
        .map(Place::Gpu)
        .chain([Place::Host])
        .collect()
}

fn header(places: &[Place], more: &[&str]) -> Vec<String> {
    let names = places.iter().map(ToString::to_string);
    [String::new()]
        .into_iter()
        .chain(names)
        .chain(more.iter().map(ToString::to_string))
        .collect()
}

fn kind(topology: &Topology, from: Place, to: Place) -> String {
    if from == to {
        return "X".into();
    }
    let count = |links: Option<u32>| links.map_or(String::new(), |links| links.to_string());
    match topology.hop(from, to).map(|hop| hop.kind) {
        Some(HopKind::NvLink(links)) => format!("NV{}", count(links)),
        Some(HopKind::NvSwitch(links)) => format!("NV{}", count(links)),
        Some(HopKind::PcieHost) => "PCIe".into(),
        Some(HopKind::PciePeer) => {
            let numa = |place: Place| match place {
                Place::Gpu(gpu) => topology.gpus[usize::from(gpu)].numa,
                Place::Host => None,
            };
            if numa(from) == numa(to) {
                "NODE"
            } else {
                "SYS"
            }
            .into()
        }
        None => "-".into(),
    }
}

/// A number a pair; pushed and pulled where they differ.
fn by_pair(source: &Source, places: &[Place], number: fn(&Line) -> f64) -> String {
    let mut rows = vec![header(places, &[])];
    for from in places {
        let cell = |to: &Place| match source.model.hop(*from, *to).map(|hop| (hop.push, hop.pull)) {
            Some((Some(push), Some(pull))) => {
                let texts = [push, pull].map(|line| format!("{:.1}", number(&line)));
                if texts[0] == texts[1] {
                    texts[0].clone()
                } else {
                    texts.join("/")
                }
            }
            Some((Some(line), None) | (None, Some(line))) => format!("{:.1}", number(&line)),
            _ => "-".into(),
        };
        rows.push(
            [from.to_string()]
                .into_iter()
                .chain(places.iter().map(cell))
                .collect(),
        );
    }
    table(&rows)
}

/// Columns as wide as they must be.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter()
            .filter_map(|row| Some(row.get(column)?.len()))
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let cells = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:width$}"));
        out += cells.collect::<Vec<_>>().join("  ").trim_end();
        out.push('\n');
    }
    out
}
