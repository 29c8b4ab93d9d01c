use super::file::File;
use super::found::{Facts, NvLinks, PairFacts};
use super::*;

/// The simulated driver's own files: the planner reads what ships.
pub(crate) const SHIPPED: [(&str, &str); 4] = [
    (
        "beluga",
        include_str!("../../simcuda/topologies/beluga.toml"),
    ),
    (
        "narval",
        include_str!("../../simcuda/topologies/narval.toml"),
    ),
    (
        "dgx1-v100",
        include_str!("../../simcuda/topologies/dgx1-v100.toml"),
    ),
    (
        "hgx-h200",
        include_str!("../../simcuda/topologies/hgx-h200.toml"),
    ),
];

pub(crate) fn file(name: &str) -> File {
    let (_, text) = SHIPPED
        .iter()
        .find(|(known, _)| *known == name)
        .expect("shipped");
    toml::from_str(text).expect("valid TOML")
}

pub(crate) fn shipped(name: &str) -> Topology {
    file(name).topology().expect("a topology")
}

fn names(topology: &Topology, from: Place, to: Place) -> Vec<SegmentKind> {
    let hop = topology.hop(from, to).expect("a hop");
    let kind = |segment: &u16| topology.segments[usize::from(*segment)].kind;
    hop.segments().iter().map(kind).collect()
}

#[test]
fn what_ships_can_be_read() {
    for (name, _) in SHIPPED {
        let topology = shipped(name);
        assert_eq!(topology.name, name);
        let n = topology.gpus.len();
        // Every pair in both directions, and the host in both.
        assert_eq!(topology.hops().count(), n * (n - 1) + 2 * n, "{name}");
        assert!(topology.hops().all(|(_, _, hop)| hop.gb_s > 0.0));
    }
}

#[test]
fn hops_share_what_the_machine_shares() {
    use SegmentKind::*;
    let (gpu, host) = (Place::Gpu, Place::Host);
    let switch = shipped("hgx-h200");
    assert_eq!(names(&switch, gpu(0), gpu(5)), [PortOut(0), PortIn(5)]);
    assert_eq!(names(&switch, gpu(3), host), [PcieUp(3), HostWrite]);
    assert_eq!(names(&switch, host, gpu(3)), [PcieDown(3), HostRead]);
    let mesh = shipped("beluga");
    assert_eq!(names(&mesh, gpu(2), gpu(1)), [Link(2, 1)]);
    let cube = shipped("dgx1-v100");
    assert_eq!(names(&cube, gpu(0), gpu(3)), [Link(0, 3)]);
    assert_eq!(
        names(&cube, gpu(0), gpu(5)),
        [
            PcieUp(0),
            PcieDown(5),
            PciePeer(0),
            PcieSwitchUp(0),
            PcieSwitchDown(2)
        ]
    );
    // The GrCUDA paper's 7 GB/s for peers without NVLink.
    assert_eq!(cube.hop(gpu(0), gpu(5)).map(|hop| hop.gb_s), Some(7.0));
    assert_eq!(cube.gpus[3].numa, Some(0));
    assert_eq!(cube.gpus[4].numa, Some(1));
}

fn parse(text: &str) -> Result<Topology, String> {
    let file: File = toml::from_str(text).map_err(|error| error.to_string())?;
    file.topology().map_err(|error| error.to_string())
}

#[test]
fn bad_files_say_in_one_line_what_is_wrong() {
    let beluga = SHIPPED[0].1;
    let links = "name = \"x\"\n[gpu]\ncount = 3\n[fabric]\nkind = \"links\"\n[[link]]\ngpus = [0, 1]\ngb_s = 9.0\n";
    for (text, expected) in [
        (
            beluga.replacen("gb_s = 48.0", "gb_s = -48.0", 1),
            "link between GPU 0 and 1: gb_s is -48, must be a positive rate",
        ),
        (
            {
                let (before, rest) = beluga
                    .split_once("[[link]]\ngpus = [0, 2]")
                    .expect("a link");
                let (_, after) = rest.split_once("[[link]]").expect("another");
                format!("{before}[[link]]{after}")
            },
            "link between GPU 0 and 2 is missing",
        ),
        (
            beluga.replacen("gpus = [0, 2]", "gpus = [0, 1]", 1),
            "link between GPU 0 and 1 is listed twice",
        ),
        (
            beluga.replacen("gpus = [0, 2]", "gpus = [0, 9]", 1),
            "link between GPU 0 and 9: gpus must be two different ones of 0 to 3",
        ),
        (
            beluga.replacen("count = 4", "count = 99", 1),
            "gpu.count is 99, must be 1 to 16",
        ),
        (
            beluga.replacen("to_host_gb_s = 12.3", "to_host_gb_s = nan", 1),
            "pcie.to_host_gb_s is NaN",
        ),
        (
            beluga.replacen("setup_us = 2.5", "setup_us = -1.0", 1),
            "copy.setup_us is -1, must be 0 or more",
        ),
        (
            beluga.replacen("\nlinks = 2", "\nlinks = 0", 1),
            "link between GPU 0 and 1: links is 0, must be at least 1",
        ),
        (
            links.into(),
            "not connected: nothing leads from GPU 0 to GPU 2",
        ),
        (
            "name = \"x\"\n[gpu]\ncount = 2\n[fabric]\nkind = \"switch\"\n".into(),
            "fabric.port_gb_s is missing",
        ),
    ] {
        let error = parse(&text).expect_err(expected);
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    }
    // The same links are enough once there is a way around.
    let third = "[[link]]\ngpus = [2, 1]\ngb_s = 9.0\n";
    assert!(parse(&format!("{links}{third}")).is_ok());
}

#[test]
fn a_dumped_topology_is_the_same_when_it_is_read() {
    for (name, _) in SHIPPED {
        let topology = shipped(name);
        let text = toml::to_string(&File::of(&topology)).expect("TOML");
        let again = parse(&text).expect(name);
        assert_eq!(again.gpus, topology.gpus);
        assert_eq!(again.costs, topology.costs);
        let hops = |topology: &Topology| -> Vec<_> {
            topology
                .hops()
                .map(|(from, to, hop)| (from, to, hop.kind, hop.gb_s))
                .collect()
        };
        assert_eq!(hops(&again), hops(&topology), "{name}");
    }
}

fn facts(n: usize, close: impl Fn(usize, usize) -> bool) -> Facts {
    let pair = |at: usize| PairFacts {
        access: true,
        atomics: close(at / n, at % n),
    };
    Facts {
        gpus: vec![Gpu::default(); n],
        pairs: (0..n * n).map(pair).collect(),
        ..Facts::default()
    }
}

#[test]
fn without_nvml_links_between_all_are_taken_for_a_switch() {
    let all = facts(4, |_, _| true).topology().expect("a topology");
    assert_eq!(all.fabric, Fabric::Switch);
    let some = facts(4, |a, b| a + b != 3).topology().expect("a topology");
    assert_eq!(some.fabric, Fabric::Links);
    let kind = |a, b| some.hop(Place::Gpu(a), Place::Gpu(b)).map(|hop| hop.kind);
    assert_eq!(kind(0, 1), Some(HopKind::NvLink(None)));
    assert_eq!(kind(0, 3), Some(HopKind::PciePeer));
    assert!(Facts::default().topology().is_err());
    // What a measurement told has the last word.
    let mut mesh = facts(4, |_, _| true);
    mesh.fabric = Some(Fabric::Links);
    let mesh = mesh.topology().expect("a topology");
    assert_eq!(
        mesh.hop(Place::Gpu(0), Place::Gpu(3)).map(|hop| hop.kind),
        Some(HopKind::NvLink(None))
    );
}

#[test]
fn nvml_tells_switch_and_mesh_apart() {
    let mut found = facts(3, |_, _| true);
    let switched = NvLinks {
        to_switch: 18,
        to_gpu: Vec::new(),
        link_gb_s: Some(26.562),
    };
    found.nvlinks = Some(vec![switched; 3]);
    let topology = found.topology().expect("a topology");
    let hop = topology.hop(Place::Gpu(0), Place::Gpu(2)).expect("a hop");
    assert_eq!(hop.kind, HopKind::NvSwitch(Some(18)));
    // Measured on H200: 396 GB/s by 18 links.
    assert!((hop.gb_s / 396.0 - 1.0).abs() < 0.05, "{}", hop.gb_s);
    let meshed = |others: [u8; 2]| NvLinks {
        to_switch: 0,
        to_gpu: others.iter().map(|gpu| (*gpu, 4)).collect(),
        link_gb_s: Some(25.0),
    };
    found.nvlinks = Some(vec![meshed([1, 2]), meshed([0, 2]), meshed([0, 1])]);
    let topology = found.topology().expect("a topology");
    let hop = topology.hop(Place::Gpu(2), Place::Gpu(0)).expect("a hop");
    assert_eq!(hop.kind, HopKind::NvLink(Some(4)));
}

#[test]
fn places_survive_their_text() {
    for place in [Place::Host, Place::Gpu(0), Place::Gpu(15)] {
        assert_eq!(Place::try_from(String::from(place)), Ok(place));
    }
    for bad in ["", "GPU", "GPU300", "gpu0", "HOST"] {
        assert!(Place::try_from(bad.to_owned()).is_err(), "{bad}");
    }
}
