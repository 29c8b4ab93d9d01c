use super::super::file::File;
use super::super::found::Facts;
use super::super::tests::{file, shipped};
use super::super::{Gpu, Place, SegmentKind, Topology};
use super::Level::{Node, Phb, Pix, Pxb, Sys};
use super::*;

/// Eight GPUs without NVLink, four at each of two processors. At the first two switches below a third; at the second a switch with
/// two GPUs, and two GPUs at host bridges of their own.
const BOX: &str = r#"
name = "box"
[gpu]
count = 8
[fabric]
kind = "links"
[pcie]
to_host_gb_s = 24.0
to_device_gb_s = 25.0
peer_gb_s = 20.0
[[pcie.switch]]
gpus = [0, 1]
[[pcie.switch]]
gpus = [2, 3]
[[pcie.switch]]
gpus = [0, 1, 2, 3]
gb_s = 18.0
[[pcie.switch]]
gpus = [4, 5]
[[pcie.bridge]]
gpus = [0, 1, 2, 3]
[[pcie.bridge]]
gpus = [4, 5, 6]
[[pcie.bridge]]
gpus = [7]
[host]
write_gb_s = 80.0
read_gb_s = 90.0
numa_nodes = 2
"#;

/// The same by hand, as `nvidia-smi topo -m` prints it. X is the diagonal, at which nothing is asked.
const X: Level = Pix;
const LEVELS: [[Level; 8]; 8] = [
    [X, Pix, Pxb, Pxb, Sys, Sys, Sys, Sys],
    [Pix, X, Pxb, Pxb, Sys, Sys, Sys, Sys],
    [Pxb, Pxb, X, Pix, Sys, Sys, Sys, Sys],
    [Pxb, Pxb, Pix, X, Sys, Sys, Sys, Sys],
    [Sys, Sys, Sys, Sys, X, Pix, Phb, Node],
    [Sys, Sys, Sys, Sys, Pix, X, Phb, Node],
    [Sys, Sys, Sys, Sys, Phb, Phb, X, Node],
    [Sys, Sys, Sys, Sys, Node, Node, Node, X],
];

fn parse(text: &str) -> Result<Topology, String> {
    let file: File = toml::from_str(text).map_err(|error| error.to_string())?;
    file.topology().map_err(|error| error.to_string())
}

fn levels(topology: &Topology) -> Vec<Vec<Option<Level>>> {
    let n = topology.gpus.len() as u8;
    let row = |a| {
        (0..n).map(move |b| {
            if a == b {
                Some(X)
            } else {
                topology.level(a, b)
            }
        })
    };
    (0..n).map(|a| row(a).collect()).collect()
}

#[test]
fn levels_follow_from_switches_and_bridges() {
    let expected: Vec<Vec<_>> = LEVELS.iter().map(|row| row.map(Some).to_vec()).collect();
    assert_eq!(levels(&parse(BOX).expect("a topology")), expected);
    // DGX-1's block diagram.
    let dgx1 = shipped("dgx1-v100");
    let of_2 = [Phb, Phb, X, Pix, Sys, Sys, Sys, Sys].map(Some);
    assert_eq!(levels(&dgx1)[2], of_2);
    // Nobody has told of the tree, but of the processors.
    let beluga = shipped("beluga");
    assert_eq!(levels(&beluga)[0], [Some(X), None, Some(Sys), Some(Sys)]);
}

#[test]
fn switches_follow_from_levels() {
    let tree = Tree::from_levels(8, |a, b| LEVELS[a][b]).expect("a tree");
    let gpus = |switch: &Switch| switch.gpus.clone();
    let switches: Vec<Vec<u8>> = tree.switches.iter().map(gpus).collect();
    assert_eq!(
        switches,
        [vec![0, 1], vec![2, 3], vec![4, 5], vec![0, 1, 2, 3]]
    );
    let bridges: Vec<&[u8]> = tree.bridges.iter().map(|bridge| &bridge.gpus[..]).collect();
    assert_eq!(bridges, [&[0, 1, 2, 3][..], &[4, 5, 6], &[7]]);
    // Two GPUs that only an upper switch joins stay as far apart as they were told to be.
    let far = Tree::from_levels(3, |a, b| if a == b { Pix } else { Pxb }).expect("a tree");
    assert_eq!(far.level(&vec![Gpu::default(); 3], 0, 2), Some(Pxb));
    assert_eq!(far.switches.len(), 4);
    // GPU 1 is told to be next to both others, and they far from each other.
    let torn = |a: usize, b: usize| if a + b == 2 && a != b { Sys } else { Pix };
    assert_eq!(Tree::from_levels(3, torn), None);
    let one_way = |a: usize, b: usize| if a < b { Pix } else { Sys };
    assert_eq!(Tree::from_levels(2, one_way), None);
}

#[test]
fn a_machine_has_the_tree_that_is_found() {
    let mut facts = Facts {
        gpus: vec![Gpu::default(); 8],
        levels: Some(LEVELS.concat()),
        ..Facts::default()
    };
    let expected: Vec<Vec<_>> = LEVELS.iter().map(|row| row.map(Some).to_vec()).collect();
    let found = facts.topology().expect("a topology");
    // Which GPUs are on one NUMA node is told with it, if nobody else does.
    assert_eq!(levels(&found), expected);
    assert_eq!(
        (found.gpus[3].numa, found.gpus[4].numa, found.numa_nodes),
        (Some(0), Some(1), 2)
    );
    for (gpu, numa) in facts.gpus.iter_mut().zip([3, 3, 3, 3, 1, 1, 1, 1]) {
        gpu.numa = Some(numa);
    }
    let found = facts.topology().expect("a topology");
    assert_eq!(levels(&found), expected);
    assert_eq!(found.gpus[0].numa, Some(3));
    // Answers that cannot be are not used, and the machine can be.
    facts.gpus[0].numa = Some(1);
    let found = facts.topology().expect("a topology");
    assert!(found.pcie.switches.is_empty() && found.pcie.bridges.is_empty());
}

fn names(topology: &Topology, from: Place, to: Place) -> Vec<SegmentKind> {
    let hop = topology.hop(from, to).expect("a hop");
    let kind = |segment: &u16| topology.segments[usize::from(*segment)].kind;
    hop.segments().iter().map(kind).collect()
}

#[test]
fn copies_share_the_links_of_the_switches_that_they_pass() {
    use SegmentKind::{
        HostRead, HostWrite, PcieDown, PciePeer, PcieSwitchDown, PcieSwitchUp, PcieUp,
    };
    let (gpu, host) = (Place::Gpu, Place::Host);
    let node = parse(BOX).expect("a topology");
    let (lower, upper) = (PcieSwitchUp(0), PcieSwitchUp(2));
    assert_eq!(
        names(&node, gpu(1), host),
        [PcieUp(1), lower, upper, HostWrite]
    );
    let down = [PcieDown(2), PcieSwitchDown(1), PcieSwitchDown(2), HostRead];
    assert_eq!(names(&node, host, gpu(2)), down);
    assert_eq!(names(&node, gpu(6), host), [PcieUp(6), HostWrite]);
    // Within a switch, up to the one above both, and to another processor.
    assert_eq!(
        names(&node, gpu(0), gpu(1)),
        [PcieUp(0), PcieDown(1), PciePeer(0)]
    );
    let across = [
        PcieUp(0),
        PcieDown(2),
        PciePeer(0),
        lower,
        PcieSwitchDown(1),
    ];
    assert_eq!(names(&node, gpu(0), gpu(2)), across);
    let far = [
        PcieUp(3),
        PcieDown(4),
        PciePeer(3),
        PcieSwitchUp(1),
        upper,
        PcieSwitchDown(3),
    ];
    assert_eq!(names(&node, gpu(3), gpu(4)), far);
    // What a link carries is told, or that of a GPU's; nothing is faster than what it passes.
    let rate = |kind| {
        node.segments
            .iter()
            .find(|segment| segment.kind == kind)
            .map(|segment| segment.gb_s)
    };
    assert_eq!(
        (rate(lower), rate(PcieSwitchDown(0))),
        (Some(24.0), Some(25.0))
    );
    assert_eq!(
        (rate(upper), rate(PcieSwitchDown(2))),
        (Some(18.0), Some(18.0))
    );
    let hop = |from, to| node.hop(from, to).map(|hop| hop.gb_s);
    assert_eq!(
        (hop(gpu(0), host), hop(host, gpu(4)), hop(gpu(0), gpu(4))),
        (Some(18.0), Some(25.0), Some(18.0))
    );
    assert_eq!(hop(gpu(0), gpu(2)), Some(20.0));
}

#[test]
fn a_tree_survives_its_dump() {
    for topology in [parse(BOX).expect("a topology"), shipped("dgx1-v100")] {
        let text = toml::to_string(&File::of(&topology)).expect("TOML");
        let again = parse(&text).expect("a topology");
        assert_eq!(again.pcie, topology.pcie);
        assert_eq!(again.segments, topology.segments);
    }
}

#[test]
fn bad_trees_say_in_one_line_what_is_wrong() {
    for (from, to, said) in [
        ("gpus = [4, 5]", "gpus = [4, 8]", "pcie.switch of GPU 4, 8: there is no GPU 8, gpus must be of 0 to 7"),
        ("gpus = [4, 5]", "gpus = [4, 4]", "pcie.switch of GPU 4, 4: GPU 4 is listed twice: take it out once"),
        ("gpus = [4, 5]", "gpus = []", "pcie.switch: gpus is empty, must list those under it"),
        ("gpus = [4, 5]", "gpus = [1, 0]", "pcie.switch of GPU 1, 0 is listed twice: take one [[pcie.switch]] out"),
        ("gpus = [4, 5]", "gpus = [3, 4]", "pcie.switch of GPU 3, 4: they are on NUMA nodes 0 and 1, but must be on one: correct"),
        ("gpus = [2, 3]", "gpus = [1, 2]", "pcie.switch of GPU 1, 2 and that of GPU 0, 1 overlap: one must"),
        ("gb_s = 18.0", "gb_s = -18.0", "pcie.switch of GPU 0, 1, 2, 3: gb_s is -18, must be a positive rate in GB/s"),
        ("gb_s = 18.0", "gb_s = 18.0\n[[pcie.switch]]\ngpus = [0]", "pcie.switch: GPU 0 is under 3 switches, at most 2 are told apart: leave"),
        ("gpus = [7]", "gpus = [7, 6]", "pcie.bridge of GPU 7, 6: GPU 6 is under another [[pcie.bridge]], too: take it out of one"),
        ("gpus = [4, 5, 6]", "gpus = [5, 6]", "pcie.bridge of GPU 5, 6 has a part of pcie.switch of GPU 4, 5: list all of them or none"),
        ("gpus = [4, 5]", "gpus = [-1]", "invalid value: integer `-1`"),
    ] {
        assert!(BOX.contains(from), "{from}");
        let error = parse(&BOX.replacen(from, to, 1)).expect_err(said);
        assert!(error.contains(said), "{error}");
        assert!(said.starts_with("invalid") || !error.contains('\n'), "{error}");
    }
    let listed = |cpus: &str| {
        let mut file = file("beluga");
        file.device = vec![
            Gpu {
                cpus: Some(cpus.into()),
                ..Gpu::default()
            };
            4
        ];
        file.topology().map_err(|error| error.to_string())
    };
    assert!(listed("0-19,40-59").is_ok() && listed("3").is_ok());
    for bad in ["", "0-", "a", "0-1-2", "0,,1", "0\n1"] {
        let error = listed(bad).expect_err(bad);
        let said = format!("cpus of [[device]] 0 is {bad:?}, must be a list of processors");
        assert!(error.contains(&said) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn nvml_numbers_its_levels() {
    // nvml.h, nvmlGpuTopologyLevel_enum.
    let known = [
        (0, Pix),
        (10, Pix),
        (20, Pxb),
        (30, Phb),
        (40, Node),
        (50, Sys),
    ];
    for (number, level) in known {
        assert_eq!(Level::of_nvml(number), Some(level));
    }
    assert_eq!(Level::of_nvml(51), None);
}

/// Paths of `/sys/devices` as they look with a switch, with one below another, without any, and behind a controller.
#[test]
fn paths_name_the_bridges_above_a_device() {
    const ROOT: &str = "/sys/devices/pci0000:16/0000:16:02.0";
    let level =
        |a: &str, b: &str| Level::of_paths(&format!("{ROOT}{a}"), &format!("{ROOT}{b}"), true);
    let one = (
        "/0000:17:00.0/0000:18:04.0/0000:19:00.0",
        "/0000:17:00.0/0000:18:08.0/0000:1a:00.0",
    );
    assert_eq!(level(one.0, one.1), Some(Pix));
    let below = "/0000:17:00.0/0000:18:0c.0/0000:1b:00.0/0000:1c:04.0/0000:1d:00.0";
    assert_eq!(
        (level(one.0, below), level(below, one.1)),
        (Some(Pxb), Some(Pxb))
    );
    assert_eq!(level(below, below), Some(Pix));
    let other = "/sys/devices/pci0000:16/0000:16:04.0/0000:40:00.0";
    assert_eq!(
        Level::of_paths(&format!("{ROOT}{}", one.0), other, true),
        Some(Phb)
    );
    let apart = "/sys/devices/pci0000:64/0000:64:02.0/0000:65:00.0";
    assert_eq!(Level::of_paths(other, apart, true), Some(Node));
    assert_eq!(Level::of_paths(other, apart, false), Some(Sys));
    // A virtual machine whose GPUs are at ports of the one root.
    let virt = |port| format!("/sys/devices/pci0000:00/0000:00:0{port}.0/0000:0{port}:00.0");
    assert_eq!(Level::of_paths(&virt(3), &virt(4), true), Some(Phb));
    let behind = |port| {
        format!("/sys/devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:0{port}.0/10000:e1:00.0")
    };
    assert_eq!(Level::of_paths(&behind(1), &behind(2), true), Some(Phb));
    for bad in ["", "/sys/devices/virtual/net/lo", "/sys/devices/pci0000:16"] {
        assert_eq!(Level::of_paths(bad, other, true), None, "{bad}");
    }
}
