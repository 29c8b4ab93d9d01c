//! The matrix that people know from `nvidia-smi topo -m`, and tables of rates and times.

use std::fmt::Write as _;

use anabranch_engine::model::Line;
use anabranch_engine::topology::pcie::Level;
use anabranch_engine::topology::{Fabric, HopKind, Place, SegmentKind, Topology};

use super::source::Source;
use crate::table;

/// All of it.
pub fn render(source: &Source) -> String {
    let topology = &source.topology;
    let mut out = format!("{}: {}\n\n", topology.name, topology.description);
    let places = places(topology);
    out += &connections(topology, &places);
    let fabric = match topology.fabric {
        Fabric::Switch => "all by way of a switch, which a GPU's links share",
        Fabric::FullMesh | Fabric::Links => "the pair's own",
    };
    let _ = writeln!(
        out,
        "\nX    the GPU itself\n\
         SYS  PCIe, and from one NUMA node to another\n\
         NODE PCIe within a NUMA node, from one host bridge to another{unknown}\n\
         PHB  PCIe by way of a host bridge\n\
         PXB  PCIe by way of several bridges, none of them the host's\n\
         PIX  PCIe by way of one bridge at most\n\
         NV#  NVLinks ({fabric}; NV where their number is not known)\n\
         PCIe to the host's memory or from it\n",
        unknown = if is_known(topology) {
            ""
        } else {
            ", or nearer: nobody tells"
        },
    );
    out += &tree(topology);
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
    let by_event = source.model.hand_over_us.map_or_else(String::new, |us| {
        format!(", hand-over by an event {us:.1} us")
    });
    let _ = writeln!(
        out,
        "\nlaunch {:.1} us, end {:.1} us{by_event} ({numbers}); between processes, hand-over at a relay {:.1} us, in host memory {:.1} us (assumed)",
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
        Some(HopKind::PciePeer) => level(topology, from, to),
        None => "-".into(),
    }
}

/// How far two GPUs are apart by PCIe; at most their NUMA node where nobody has told.
fn level(topology: &Topology, from: Place, to: Place) -> String {
    match (from, to) {
        (Place::Gpu(from), Place::Gpu(to)) if from != to => {
            topology.level(from, to).unwrap_or(Level::Node).to_string()
        }
        _ => "X".into(),
    }
}

fn pairs(topology: &Topology) -> impl Iterator<Item = (u8, u8)> {
    let n = topology.gpus.len() as u8;
    (0..n).flat_map(move |a| (a + 1..n).map(move |b| (a, b)))
}

fn is_known(topology: &Topology) -> bool {
    pairs(topology).all(|(a, b)| topology.level(a, b).is_some())
}

/// By what one place is reached from another, and what is next to each GPU.
fn connections(topology: &Topology, places: &[Place]) -> String {
    let has_cpus = topology.gpus.iter().any(|gpu| gpu.cpus.is_some());
    let columns = ["CPU Affinity", "NUMA Affinity"];
    let mut matrix = vec![header(places, &columns[usize::from(!has_cpus)..])];
    for from in places {
        let mut row = vec![from.to_string()];
        row.extend(places.iter().map(|to| kind(topology, *from, *to)));
        if let Place::Gpu(gpu) = from {
            let gpu = &topology.gpus[usize::from(*gpu)];
            let numa = gpu.numa.map(|numa| numa.to_string());
            let cells = [gpu.cpus.clone(), numa].map(|cell| cell.unwrap_or("N/A".into()));
            row.extend(cells.into_iter().skip(usize::from(!has_cpus)));
        }
        matrix.push(row);
    }
    table::text("", matrix)
}

/// What is known of the PCIe tree and not in the matrix: how far apart by it those GPUs are that have NVLinks, and the links that
/// GPUs under one switch share.
fn tree(topology: &Topology) -> String {
    let mut out = String::new();
    let is_linked = |(a, b)| {
        topology
            .hop(Place::Gpu(a), Place::Gpu(b))
            .is_some_and(|hop| hop.is_nvlink())
    };
    if is_known(topology) && pairs(topology).any(is_linked) {
        let gpus: Vec<Place> = places(topology)
            .into_iter()
            .filter(|place| *place != Place::Host)
            .collect();
        let mut matrix = vec![header(&gpus, &[])];
        for from in &gpus {
            let cells = gpus.iter().map(|to| level(topology, *from, *to));
            matrix.push([from.to_string()].into_iter().chain(cells).collect());
        }
        let _ = writeln!(out, "By PCIe, NVLinks left aside");
        out += &table::text("", matrix);
        out.push('\n');
    }
    for (number, switch) in (0..).zip(&topology.pcie.switches) {
        let rate = |wanted: SegmentKind| {
            let segment = topology
                .segments
                .iter()
                .find(|segment| segment.kind == wanted)?;
            Some(format!("{:.1}", segment.gb_s))
        };
        let up = rate(SegmentKind::PcieSwitchUp(number));
        let down = rate(SegmentKind::PcieSwitchDown(number));
        if let (Some(up), Some(down)) = (up, down) {
            let gpus: Vec<String> = switch
                .gpus
                .iter()
                .map(|gpu| Place::Gpu(*gpu).to_string())
                .collect();
            let _ = writeln!(
                out,
                "PCIe switch {number}: {} share {up} GB/s towards the host, {down} from it",
                gpus.join(", ")
            );
        }
    }
    if topology
        .segments
        .iter()
        .any(|segment| matches!(segment.kind, SegmentKind::PcieSwitchUp(_)))
    {
        out.push('\n');
    }
    out
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
    table::text(&format!("<{}", ">".repeat(places.len())), rows)
}
