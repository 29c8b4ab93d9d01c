//! Plans by what the ranks of a job have published of their links.

use super::super::tests::{all, ranks, router, uuid, LONG};
use super::super::{HostFared, Known, Node, RouteUse, Router};
use super::*;
use crate::node::Node as Rank;
use crate::plan::PathKind;
use std::path::PathBuf;

/// Ranks with a GPU each.
struct Job {
    ranks: Vec<Rank>,
    folder: PathBuf,
}

impl Job {
    fn new(count: u32) -> Job {
        let (ranks, folder) = ranks(count);
        for (rank, registered) in (0..).zip(&ranks) {
            registered.own().list_link_rates(&HostLinkRates {
                uuid: uuid(rank),
                // Not in the order of the ranks.
                pci: 100 - u64::from(rank),
                numa: None,
            });
        }
        Job { ranks, folder }
    }

    /// Rank `by` publishes what a copy between two GPUs takes; `None` is the host.
    fn tell(&self, by: usize, from: Option<u8>, to: Option<u8>, gb_s: f32) {
        let [a, b] = [from, to].map(|gpu| gpu.map(uuid));
        let line = Some((5.0, gb_s));
        let is_up = to.is_none();
        assert!(self.ranks[by].own().tell_measured(&Measured {
            ends: Ends::new(a.as_ref(), b.as_ref()),
            push: line.filter(|_| is_up),
            pull: line.filter(|_| !is_up),
        }));
    }

    fn told(&self, wired: &[(Uuid, Wiring)]) -> Option<PublishedModel> {
        PublishedModel::new(self.ranks.iter().map(|rank| rank.own().traffic()), wired)
    }

    fn router_with(&self, wired: &[(Uuid, Wiring)]) -> Option<Router> {
        let mut router = router("beluga", |_| ());
        let node = Node::told(self.told(wired)?).expect("identities");
        router.known = Known::PublishedModel(Some(Box::new(node)), 0);
        Some(router)
    }

    fn router(&self) -> Option<Router> {
        self.router_with(&[])
    }

    fn host_share(&self, from: u8, to: u8) -> Option<f64> {
        let mut router = self.router()?;
        let routed = router.route(uuid(from), uuid(to), LONG, 1, all())?;
        assert_eq!(routed.plan.share(PathKind::Relay), 0.0);
        Some(routed.plan.share(PathKind::Host))
    }

    fn relay_share(&self, wired: &[(Uuid, Wiring)], from: u8, to: u8) -> Option<f64> {
        let mut router = self.router_with(wired)?;
        let routed = router.route(uuid(from), uuid(to), LONG, 1, all())?;
        Some(routed.plan.share(PathKind::Relay))
    }
}

/// What the system tells of GPUs with so many links between each two. The first GPUs are those of ranks.
fn wired(gpus: u8, links: impl Fn(u8, u8) -> u32) -> Vec<(Uuid, Wiring)> {
    let pci = |gpu: u8| 100 - u64::from(gpu);
    let wiring = |gpu: u8| Wiring {
        pci: pci(gpu),
        is_switched: false,
        link_gb_s: 25.0,
        to: (0..gpus)
            .filter(|other| *other != gpu)
            .map(|other| (pci(other), links(gpu.min(other), gpu.max(other))))
            .filter(|(_, links)| *links > 0)
            .collect(),
        ..Wiring::default()
    };
    (0..gpus).map(|gpu| (uuid(gpu), wiring(gpu))).collect()
}

impl Drop for Job {
    fn drop(&mut self) {
        self.ranks.clear();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[test]
fn the_host_path_is_there_once_both_its_hops_are_measured() {
    let job = Job::new(2);
    assert!(job.router().is_none());
    job.tell(1, Some(0), Some(1), 48.0);
    assert!(job.router().is_none());
    job.tell(0, Some(0), None, 12.0);
    assert_eq!(job.host_share(0, 1), Some(0.0));
    job.tell(1, None, Some(1), 12.0);
    let share = job.host_share(0, 1).expect("a plan");
    // At most what the rates allow, 12 of 60, less the cost of hand-overs.
    assert!((0.10..0.20).contains(&share), "{share}");
    // Nobody has measured the other direction.
    assert_eq!(job.host_share(1, 0), None);
}

/// Otherwise all messages of a pair would go through the host, and its direct copy would never be measured.
#[test]
fn nothing_is_planned_while_the_direct_copy_is_measured_the_other_way_only() {
    let job = Job::new(2);
    for gpu in [0, 1] {
        job.tell(gpu, Some(gpu as u8), None, 12.0);
        job.tell(gpu, None, Some(gpu as u8), 12.0);
    }
    job.tell(1, Some(0), Some(1), 48.0);
    assert!(job.host_share(0, 1).is_some_and(|share| share > 0.0));
    assert_eq!(job.host_share(1, 0), None);
    job.tell(0, Some(1), Some(0), 48.0);
    assert!(job.host_share(1, 0).is_some_and(|share| share < 0.3));
}

#[test]
fn what_is_as_slow_as_pcie_shares_its_links() {
    let job = Job::new(2);
    for gpu in [0, 1] {
        job.tell(gpu, Some(gpu as u8), None, 12.0);
        job.tell(gpu, None, Some(gpu as u8), 12.0);
    }
    job.tell(1, Some(0), Some(1), 11.0);
    assert_eq!(job.host_share(0, 1), Some(0.0));
}

/// What ranks publish of three GPUs would do for a relay if it were known which links they share.
#[test]
fn measured_copies_are_no_ground_for_relays() {
    let job = Job::new(3);
    for (from, to) in [(0, 1), (0, 2), (2, 1)] {
        job.tell(usize::from(to), Some(from), Some(to), 48.0);
    }
    job.tell(0, Some(0), None, 12.0);
    assert_eq!(job.host_share(0, 1), Some(0.0));
}

/// Four GPUs, two of them in use: a message takes 3 links at 48 and the host's 12, as on a measured node.
#[test]
fn gpus_that_nobody_uses_are_relays_where_the_system_tells_of_links() {
    let job = Job::new(2);
    let mesh = wired(4, |_, _| 2);
    job.tell(0, Some(0), None, 12.0);
    job.tell(1, None, Some(1), 12.0);
    assert_eq!(job.relay_share(&mesh, 0, 1), Some(0.0), "not measured yet");
    job.tell(1, Some(0), Some(1), 48.0);
    let share = job.relay_share(&mesh, 0, 1).expect("a plan");
    assert!((0.55..0.66).contains(&share), "{share}");
    assert_eq!(job.relay_share(&mesh, 1, 0), Some(0.0), "not this way");
    assert_eq!(job.relay_share(&[], 0, 1), Some(0.0), "nobody tells");
    // The links of one of the GPUs in use are not known.
    assert_eq!(job.relay_share(&mesh[1..], 0, 1), Some(0.0));
    // The links of one unused GPU are not known: the other one is left as a relay.
    let share = job.relay_share(&mesh[..3], 0, 1).expect("a plan");
    assert!((0.35..0.5).contains(&share), "{share}");
}

#[test]
fn no_relays_behind_a_switch() {
    let job = Job::new(2);
    job.tell(0, Some(0), None, 12.0);
    job.tell(1, Some(0), Some(1), 48.0);
    for switched in [0, 3] {
        let mut node = wired(4, |_, _| 2);
        node[switched].1.is_switched = true;
        let told = job.told(&node).expect("a node");
        // An unused GPU is left out. One in use says what the node is.
        assert_eq!(told.is_wired, switched == 3);
        assert_eq!(told.topology.gpus.len(), if switched == 3 { 3 } else { 2 });
    }
    let none = wired(4, |_, _| 0);
    assert!(!job.told(&none).expect("a node").is_wired);
}

/// Virtual machines tell of links to something else: the copies show that there are links.
#[test]
fn what_copies_contradict_is_not_believed() {
    let job = Job::new(2);
    let mut node = wired(3, |_, _| 2);
    let elsewhere = node.iter_mut().flat_map(|(_, wiring)| &mut wiring.to);
    elsewhere.for_each(|(pci, _)| *pci += 1000);
    job.tell(0, Some(0), None, 12.0);
    job.tell(1, None, Some(1), 12.0);
    job.tell(1, Some(0), Some(1), 48.0);
    let told = job.told(&node).expect("a node");
    assert!(!told.is_wired);
    assert_eq!(job.relay_share(&node, 0, 1), Some(0.0));
    // As if nobody had told of any links.
    let mut router = job.router_with(&node).expect("a node");
    let routed = router.route(uuid(0), uuid(1), LONG, 1, all());
    assert!(routed.expect("a plan").plan.share(PathKind::Host) > 0.1);
}

/// A cube mesh: 24 GB/s a link.
#[test]
fn rates_that_nobody_measured_follow_from_the_number_of_links() {
    let job = Job::new(2);
    job.tell(0, Some(0), None, 12.0);
    let mesh = wired(4, |a, b| match (a, b) {
        (0, 1) => 0,
        (0, 2) | (1, 3) => 2,
        _ => 1,
    });
    let rate = |from, to| {
        let told = job.told(&mesh).expect("a node");
        // All number the GPUs by their addresses.
        let at = |gpu: u8| Place::Gpu(3 - gpu);
        let hop = *told.model.hop(at(from), at(to))?;
        assert!(hop.push == hop.pull);
        Some(hop.pull?.gb_s)
    };
    // By the generation, as long as no copy over such links was measured: 25 less a sixth.
    let near =
        |rate: Option<f64>, wanted: f64| rate.is_some_and(|rate| (rate - wanted).abs() < 0.1);
    assert!(near(rate(0, 2), 41.5) && near(rate(2, 1), 20.75));
    job.tell(1, Some(0), Some(1), 7.0);
    assert!(near(rate(3, 1), 41.5));
    // A pair without links goes by PCIe.
    let told = job.told(&mesh).expect("a node");
    let hop = told
        .topology
        .hop(Place::Gpu(3), Place::Gpu(2))
        .expect("a hop");
    assert!(!hop.is_nvlink() && told.direct == [(3, 2)]);
    // The fastest link counts: other transfers can only slow copies.
    job.tell(0, Some(2), Some(3), 20.0);
    job.tell(1, Some(0), Some(2), 48.0);
    assert!(near(rate(1, 3), 48.0) && near(rate(3, 0), 24.0) && near(rate(2, 3), 20.0));
    let share = job.relay_share(&mesh, 0, 1).expect("a plan");
    assert!(share > 0.7, "{share}");
}

#[test]
fn the_fastest_of_several_measurements_counts_and_all_number_the_gpus_alike() {
    let job = Job::new(2);
    job.tell(0, Some(0), None, 3.0);
    job.tell(1, Some(0), None, 12.0);
    let router = job.router().expect("a node");
    assert_eq!(
        (router.gpu(uuid(1)), router.gpu(uuid(0))),
        (Some(0), Some(1))
    );
    let told = job.told(&[]).expect("a node");
    let hop = told
        .model
        .hop(Place::Gpu(1), Place::Host)
        .expect("measured");
    assert_eq!(hop.push.map(|line| line.gb_s), Some(12.0));
}

/// What NVML tells of two GPUs under each switch, and two switches at each of two processors. Each GPU lists
/// the others with NVML's level numbers.
fn under_switches(mut wired: Vec<(Uuid, Wiring)>) -> Vec<(Uuid, Wiring)> {
    let gpus = wired.len() as u8;
    for (gpu, (_, wiring)) in (0..gpus).zip(&mut wired) {
        let level = |other: u8| match () {
            () if gpu / 2 == other / 2 => 10,
            () if gpu / 4 == other / 4 => 30,
            () => 50,
        };
        let others = (0..gpus).filter(|other| *other != gpu);
        wiring.apart = others
            .map(|other| (100 - u64::from(other), level(other)))
            .collect();
    }
    wired
}

/// Eight GPUs, of which ranks have four. Each two share one switch.
#[test]
fn gpus_under_one_switch_share_its_link() {
    let job = Job::new(4);
    job.tell(0, Some(0), None, 12.0);
    let switches = |wired: &[(Uuid, Wiring)]| {
        let told = job.told(wired).expect("a node");
        let mut sets: Vec<Vec<Uuid>> = Vec::new();
        for (_, switch) in told.topology.pcie.shared() {
            let gpu = |gpu: &u8| {
                let uuid = told.topology.gpus[usize::from(*gpu)].uuid.as_deref();
                super::super::source::uuid(uuid.expect("told")).expect("an identity")
            };
            let mut set: Vec<Uuid> = switch.gpus.iter().map(gpu).collect();
            set.sort_unstable();
            sets.push(set);
        }
        sets.sort_unstable();
        sets
    };
    let pairs = |first: u8, last: u8| {
        let pairs = (first..last).step_by(2);
        let mut pairs: Vec<Vec<Uuid>> = pairs
            .map(|gpu| {
                let mut pair = vec![uuid(gpu), uuid(gpu + 1)];
                pair.sort_unstable();
                pair
            })
            .collect();
        pairs.sort_unstable();
        pairs
    };
    let mesh = under_switches(wired(8, |_, _| 1));
    assert_eq!(switches(&mesh), pairs(0, 8));
    // Links to a switch say nothing of PCIe.
    let mut ports = under_switches(wired(8, |_, _| 0));
    ports
        .iter_mut()
        .for_each(|(_, wiring)| wiring.is_switched = true);
    assert_eq!(switches(&ports), pairs(0, 4));
    // One end of each pair is enough, ...
    let mut by_one = mesh.clone();
    by_one[0].1.apart.clear();
    by_one[3].1.apart.truncate(2);
    // (60 is the number of no level.)
    by_one[1].1.apart[1].1 = 60;
    assert_eq!(switches(&by_one), pairs(0, 8));
    // ... and two that contradict each other, or other pairs, are not believed.
    for level in [30, 50] {
        let mut wrong = mesh.clone();
        wrong[1].1.apart[0].1 = level;
        assert!(switches(&wrong).is_empty(), "{level}");
    }
    by_one[3].1.apart.clear();
    assert!(switches(&by_one).is_empty(), "nobody tells of GPUs 0 and 3");
    assert!(switches(&wired(8, |_, _| 1)).is_empty());
}

/// Two messages that leave by one switch get half of its link each, whatever the host's memory was found to
/// carry.
#[test]
fn host_paths_under_one_switch_share_its_link() {
    let job = Job::new(4);
    for gpu in 0..4 {
        job.tell(gpu, Some(gpu as u8), None, 12.0);
        job.tell(gpu, None, Some(gpu as u8), 12.0);
    }
    for (from, to) in [(0, 2), (1, 3)] {
        job.tell(usize::from(to), Some(from), Some(to), 48.0);
    }
    let mesh = wired(4, |_, _| 1);
    // What the second of two messages sends through host memory, by how much of that is counted on.
    let share = |wired: &[(Uuid, Wiring)], steps: usize| {
        let mut router = job.router_with(wired).expect("a node");
        for _ in 0..16 * steps {
            let counted = router.host.counted(1, true);
            (router.host).note(1, counted, HostFared::Before(50.0), 100.0);
        }
        let usable = || RouteUse {
            relay: &|_| false,
            ..all()
        };
        let first = router.route(uuid(0), uuid(2), LONG, 1, usable());
        let second = router.route(uuid(1), uuid(3), LONG, 1, usable());
        assert!(first.expect("a plan").is_split());
        second.expect("a plan").plan.share(PathKind::Host)
    };
    // By the rates 12 of 60 at most, and 6 of 54 if another message has as much.
    assert!(share(&mesh, 0) < 0.112 && share(&under_switches(mesh.clone()), 0) < 0.112);
    let (apart, together) = (share(&mesh, 16), share(&under_switches(mesh.clone()), 16));
    assert!(apart > 0.135, "{apart}");
    assert!(together < 0.112, "{together}");
}
