//! Plans by what the ranks of a job have told of their links.

use super::super::tests::{all, router, uuid, LONG};
use super::super::{Known, Node, Router};
use super::*;
use crate::node::{Launch, Node as Rank, Options};
use crate::plan::PathKind;
use std::path::PathBuf;

/// Ranks with a GPU each.
struct Job {
    ranks: Vec<Rank>,
    folder: PathBuf,
}

impl Job {
    fn new(name: &str, count: u32) -> Job {
        let name = format!("anabranch-told-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(&name);
        std::fs::create_dir_all(&folder).expect("a folder");
        let options = Options {
            folder: folder.clone(),
            slots: 64,
            staging_bytes: 0,
            ..Options::default()
        };
        let ranks = (0..count).map(|rank| {
            let registered =
                Rank::register(&Launch::named(&name), rank, &options).expect("registered");
            registered.own().list_card(&Card {
                uuid: uuid(rank as u8),
                // Not in the order of the ranks.
                pci: 100 - u64::from(rank),
                numa: None,
            });
            registered
        });
        Job {
            ranks: ranks.collect(),
            folder,
        }
    }

    /// Rank `by` tells what a copy between two GPUs takes; `None` is the host.
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

    fn router(&self) -> Option<Router> {
        let pages = self.ranks.iter().map(|rank| rank.own().traffic());
        let (topology, model) = told(pages)?;
        let mut router = router("beluga", |_| ());
        let node = Node::new(topology, &model, false).expect("identities");
        router.known = Known::Told(Some(Box::new(node)), 0);
        Some(router)
    }

    fn host_share(&self, from: u8, to: u8) -> Option<f64> {
        let mut router = self.router()?;
        let routed = router.route(uuid(from), uuid(to), LONG, 1, all())?;
        assert_eq!(routed.plan.share(PathKind::Relay), 0.0);
        Some(routed.plan.share(PathKind::Host))
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.ranks.clear();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[test]
fn the_host_path_is_there_once_both_its_hops_are_measured() {
    let job = Job::new("hops", 2);
    assert!(job.router().is_none());
    job.tell(1, Some(0), Some(1), 48.0);
    assert!(job.router().is_none());
    job.tell(0, Some(0), None, 12.0);
    assert_eq!(job.host_share(0, 1), Some(0.0));
    job.tell(1, None, Some(1), 12.0);
    let share = job.host_share(0, 1).expect("a plan");
    // At most what the rates allow, 12 of 60, less what hand-overs cost.
    assert!((0.10..0.20).contains(&share), "{share}");
    // Nobody has measured the other direction.
    assert_eq!(job.host_share(1, 0), None);
}

/// Else all of a pair's messages would go through the host, and its direct copy would never be measured.
#[test]
fn nothing_is_planned_while_the_direct_copy_is_measured_the_other_way_only() {
    let job = Job::new("other-way", 2);
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
    let job = Job::new("pcie", 2);
    for gpu in [0, 1] {
        job.tell(gpu, Some(gpu as u8), None, 12.0);
        job.tell(gpu, None, Some(gpu as u8), 12.0);
    }
    job.tell(1, Some(0), Some(1), 11.0);
    assert_eq!(job.host_share(0, 1), Some(0.0));
}

/// What a rank tells of three GPUs would do for a relay, were it known which links they share.
#[test]
fn measured_copies_are_no_ground_for_relays() {
    let job = Job::new("relays", 3);
    for (from, to) in [(0, 1), (0, 2), (2, 1)] {
        job.tell(usize::from(to), Some(from), Some(to), 48.0);
    }
    job.tell(0, Some(0), None, 12.0);
    assert_eq!(job.host_share(0, 1), Some(0.0));
}

#[test]
fn the_fastest_of_several_measurements_counts_and_all_number_the_gpus_alike() {
    let job = Job::new("several", 2);
    job.tell(0, Some(0), None, 3.0);
    job.tell(1, Some(0), None, 12.0);
    let router = job.router().expect("a node");
    assert_eq!(
        (router.gpu(uuid(1)), router.gpu(uuid(0))),
        (Some(0), Some(1))
    );
    let (_, model) = told(job.ranks.iter().map(|rank| rank.own().traffic())).expect("a model");
    let hop = model.hop(Place::Gpu(1), Place::Host).expect("measured");
    assert_eq!(hop.push.map(|line| line.gb_s), Some(12.0));
}
