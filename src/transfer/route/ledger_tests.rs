//! Several ranks in one process, each with a segment of its own.

use super::super::tests::{all, ranks, router, uuid, LONG};
use super::super::{Known, RouteUse, Routed, Router};
use super::*;
use crate::node::Node;
use crate::plan::PathKind;
use proptest::prelude::*;
use std::path::PathBuf;
use std::sync::Barrier;

/// The ranks of a node, each with a router.
struct Ranks {
    nodes: Vec<Node>,
    routers: Vec<Router>,
    folder: PathBuf,
}

impl Ranks {
    fn new(count: u32, topology: &str, is_alive: IsAlive) -> Ranks {
        let (nodes, folder) = ranks(count);
        let routers = nodes.iter().map(|node| {
            let mut router = router(topology, |_| ());
            let ledger = Ledger::new(Some(node.own_shared()), is_alive);
            let mut peers = node.peers();
            assert_eq!(peers.len(), count as usize);
            peers.retain(|peer| peer.world_rank() != node.world_rank());
            ledger.set_peers(peers);
            router.ledger = Some(Arc::new(ledger));
            router
        });
        Ranks {
            routers: routers.collect(),
            nodes,
            folder,
        }
    }

    fn route(&mut self, rank: usize, from: u8, to: u8) -> Routed {
        route(&mut self.routers[rank], from, to)
    }

    /// What all of them publish: sums of pairs and GB/s.
    fn published(&self) -> (u32, f64) {
        let rows = self
            .nodes
            .iter()
            .flat_map(|node| node.own().traffic().traffic());
        rows.fold((0, 0.0), |(flows, gb_s), row| {
            (flows + row.flows, gb_s + f64::from(row.gb_s))
        })
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.nodes.clear();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn route(router: &mut Router, from: u8, to: u8) -> Routed {
    router
        .route(uuid(from), uuid(to), LONG, 1, all())
        .expect("a plan")
}

/// What a plan sends through host memory, GB/s.
fn host_gb_s(routed: &Routed) -> f64 {
    routed.plan.share(PathKind::Host) * routed.plan.predicted_gb_s()
}

/// The part of a message that goes over a GPU.
fn over(routed: &Routed, gpu: u8) -> u64 {
    let paths = routed.plan.paths().iter();
    let over = paths.filter(|path| path.path.via() == [Place::Gpu(gpu)]);
    over.map(|path| path.bytes).sum()
}

#[test]
fn what_one_rank_uses_another_leaves_to_it_until_it_is_over() {
    let mut ranks = Ranks::new(2, "beluga", |_| true);
    let alone = ranks.route(1, 2, 3).plan;
    // Messages of another rank over the links of the path over GPU 0, and no others.
    let direct = RouteUse {
        relay: &|_| false,
        host: false,
        ..all()
    };
    let others = [(2, 0), (0, 3)].map(|(from, to)| {
        let routed = ranks.routers[0].route(uuid(from), uuid(to), LONG, 1, direct);
        routed.expect("a plan")
    });
    let met = ranks.route(1, 2, 3);
    assert!(over(&met, 0) < over(&met, 1) * 2 / 3, "{:?}", met.plan);
    assert!(met.plan.predicted_us > 1.05 * alone.predicted_us);
    drop((others, met));
    // What was met is over, and is not met again.
    drop(ranks.route(1, 2, 3));
    assert_eq!(ranks.route(1, 2, 3).plan, alone);
    assert_eq!(ranks.published(), (0, 0.0));
}

/// Bytes of a plan, counted at each hop.
fn hop_bytes(plan: &Plan) -> u64 {
    let paths = plan.paths().iter();
    paths.map(|path| path.bytes * path.path.hops() as u64).sum()
}

/// What a message met is remembered for the next of its pair, and a plan that no message follows does not
/// erase it.
#[test]
fn what_was_met_counts_for_the_next_message() {
    let mut ranks = Ranks::new(2, "beluga", |_| true);
    let alone = ranks.route(1, 2, 3);
    let plan = Arc::clone(&alone.plan);
    // Another rank comes later, and is gone by the end.
    drop((ranks.route(0, 2, 0), ranks.route(0, 0, 3)));
    drop(alone);
    let next = ranks.route(1, 2, 3);
    let expected = Arc::clone(&next.plan);
    assert!(expected.predicted_us > 1.05 * plan.predicted_us);
    let announced = |ranks: &Ranks| {
        let rows = ranks.nodes[1].own().traffic().traffic();
        rows.fold(0, |sum: u64, row| sum.wrapping_add(row.total))
    };
    let with = announced(&ranks);
    next.withdraw();
    assert_eq!(with.wrapping_sub(announced(&ranks)), hop_bytes(&expected));
    let next = ranks.route(1, 2, 3);
    assert_eq!(next.plan, expected);
    drop(next);
    assert_eq!(ranks.route(1, 2, 3).plan, plan);
}

/// A reservation that has looked before its message ends does not look again at the end, but may look again
/// in between.
#[test]
fn what_was_met_is_what_was_there_at_the_last_look() {
    let after = |looks_twice: bool| {
        let mut ranks = Ranks::new(2, "beluga", |_| true);
        let mut first = ranks.route(1, 2, 3);
        drop((ranks.route(0, 2, 0), ranks.route(0, 0, 3)));
        first.reservation.look();
        drop((ranks.route(0, 2, 1), ranks.route(0, 1, 3)));
        if looks_twice {
            first.reservation.look();
        }
        drop(first);
        ranks.route(1, 2, 3)
    };
    let (once, twice) = (after(false), after(true));
    assert!(over(&once, 0) < over(&once, 1), "{:?}", once.plan);
    assert!(over(&twice, 1) < over(&once, 1), "{:?}", twice.plan);
}

#[test]
fn the_rows_of_the_dead_are_ignored() {
    let mut living = Ranks::new(2, "beluga", |_| true);
    let mut dead = Ranks::new(2, "beluga", |_| false);
    let alone = living.route(1, 2, 3).plan;
    let beside = |ranks: &mut Ranks| {
        // Left behind by a rank that had no time to give it back.
        std::mem::forget((ranks.route(0, 2, 0), ranks.route(0, 0, 3)));
        ranks.route(1, 2, 3).plan
    };
    assert!(beside(&mut living).predicted_us > 1.05 * alone.predicted_us);
    assert_eq!(beside(&mut dead), alone);
}

/// What the messages of each rank use of the host's memory if every GPU sends to the next, round after round;
/// and what that memory carries.
fn ring_by_host(gpus: u8) -> (Vec<Vec<f64>>, f64) {
    let mut ranks = Ranks::new(u32::from(gpus), "hgx-h200", |_| true);
    let capacity = match &ranks.routers[0].known {
        Known::Measured(node) => {
            let mut segments = node.topology.segments.iter();
            segments
                .find(|segment| segment.kind == crate::topology::SegmentKind::HostWrite)
                .expect("a host")
                .gb_s
        }
        _ => panic!("no node"),
    };
    let mut rounds = Vec::new();
    for _ in 0..4 {
        let round: Vec<Routed> = (0..gpus)
            .map(|rank| ranks.route(usize::from(rank), rank, (rank + 1) % gpus))
            .collect();
        rounds.push(round.iter().map(host_gb_s).collect::<Vec<f64>>());
    }
    (rounds, capacity)
}

/// In the first round the first rank to plan cannot know of the others. From the second round on it does:
/// together they count on no more than the host's memory carries, and those that use it take equal shares.
#[test]
fn ranks_that_do_the_same_again_and_again_share_fairly() {
    let (rounds, capacity) = ring_by_host(3);
    let sum = |round: &Vec<f64>| round.iter().sum::<f64>();
    let last = &rounds[3];
    assert!(sum(last) <= 1.07 * capacity, "{rounds:?}, {capacity}");
    let using: Vec<f64> = last.iter().copied().filter(|gb_s| *gb_s > 0.0).collect();
    let (least, most) = using
        .iter()
        .fold((f64::MAX, 0.0_f64), |(least, most), gb_s| {
            (least.min(*gb_s), most.max(*gb_s))
        });
    assert!((1..=3).contains(&using.len()), "{rounds:?}");
    assert!(most <= least * 1.3 + 0.1, "{rounds:?}");
}

/// More ranks than that are a crowd, in which host memory gains nothing.
#[test]
fn a_crowd_leaves_the_host_alone() {
    for gpus in [4, 8] {
        let (rounds, _) = ring_by_host(gpus);
        assert!(rounds[0].iter().any(|gb_s| *gb_s > 0.0), "{rounds:?}");
        let later = rounds[1..].iter().flatten();
        assert!(later.into_iter().all(|gb_s| *gb_s == 0.0), "{rounds:?}");
    }
}

/// If two plan at the same moment, at least one knows of the other, however the threads are scheduled.
#[test]
fn of_two_at_the_same_moment_one_sees_the_other() {
    let mut ranks = Ranks::new(2, "beluga", |_| true);
    let free = [(0, 0, 1), (1, 2, 1)]
        .map(|(rank, from, to)| ranks.route(rank, from, to).plan.predicted_us);
    let barrier = Barrier::new(2);
    for _ in 0..200 {
        for router in &mut ranks.routers {
            // Nothing is remembered from the round before.
            let ledger = router.ledger.as_ref().expect("a ledger");
            ledger.book.lock().pairs.clear();
        }
        let (first, second) = ranks.routers.split_at_mut(1);
        let run = |router: &mut Router, from: u8, to: u8| {
            barrier.wait();
            route(router, from, to)
        };
        // GPU 0 to 1 goes over 2 and 3, and 2 to 1 over 0 and 3: both want the link from 3 to 1.
        let routed = std::thread::scope(|scope| {
            let other = scope.spawn(|| run(&mut second[0], 2, 1));
            let own = run(&mut first[0], 0, 1);
            [own, other.join().expect("a plan")]
        });
        let us = routed.each_ref().map(|routed| routed.plan.predicted_us);
        assert!(
            us[0] > 1.05 * free[0] || us[1] > 1.05 * free[1],
            "{us:?}, alone {free:?}"
        );
    }
}

/// One step of a rank: a message begins or the oldest ends.
#[derive(Clone, Copy, Debug)]
enum Act {
    Begin(usize, u8, u8),
    End(usize),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let begin = (0usize..3, 0u8..4, 0u8..4).prop_map(|(rank, from, to)| Act::Begin(rank, from, to));
    let end = (0usize..64).prop_map(Act::End);
    proptest::collection::vec(prop_oneof![begin, end], 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn sums_are_those_of_what_is_under_way(acts in acts()) {
        let mut ranks = Ranks::new(3, "beluga", |_| true);
        let mut live: Vec<(usize, (u8, u8), Routed)> = Vec::new();
        // The plan with which each pair of each rank last began, even if that message has ended before others
        // of its pair.
        let mut latest: HashMap<(usize, (u8, u8)), Arc<Plan>> = HashMap::new();
        for act in acts {
            match act {
                Act::Begin(_, from, to) if from == to => {}
                Act::Begin(rank, from, to) => {
                    let routed = ranks.route(rank, from, to);
                    latest.insert((rank, (from, to)), Arc::clone(&routed.plan));
                    live.push((rank, (from, to), routed));
                }
                Act::End(_) if live.is_empty() => {}
                Act::End(which) => drop(live.remove(which % live.len())),
            }
            latest.retain(|key, _| live.iter().any(|(rank, pair, _)| (*rank, *pair) == *key));
            // Each hop counts once; counted here by hand.
            let (mut flows, mut gb_s) = (0, 0.0);
            for plan in latest.values() {
                for path in plan.paths() {
                    let hops = path.path.hops() as u32;
                    flows += hops;
                    gb_s += f64::from(hops) * path.bytes as f64 / (plan.predicted_us * 1e3);
                }
            }
            let (seen_flows, seen_gb_s) = ranks.published();
            prop_assert_eq!(seen_flows == 0, flows == 0);
            prop_assert!((seen_gb_s - gb_s).abs() <= 1e-4 * gb_s + 1e-3, "{} {}", seen_gb_s, gb_s);
        }
        live.clear();
        prop_assert_eq!(ranks.published(), (0, 0.0));
    }
}

#[test]
fn a_message_without_the_host_leaves_the_host_alone() {
    let mut ranks = Ranks::new(1, "beluga", |_| true);
    let no_host = RouteUse {
        host: false,
        ..all()
    };
    let routed = ranks.routers[0]
        .route(uuid(0), uuid(1), LONG, 1, no_host)
        .expect("a plan");
    assert_eq!(routed.plan.share(PathKind::Host), 0.0);
    let host = ends(&[uuid(0)], Place::Gpu(0), Place::Host);
    assert!(ranks.nodes[0]
        .own()
        .traffic()
        .traffic()
        .all(|row| row.ends != host));
}

/// Four ranks in a ring exchange with both neighbours at once. Every path over another GPU uses a link of
/// somebody's direct copies. From the second round on nobody takes such paths.
#[test]
fn staging_gives_way_to_the_direct_copies_of_others() {
    let mut ranks = Ranks::new(4, "beluga", |_| true);
    let usable = RouteUse {
        host: false,
        ..all()
    };
    let mut relayed = Vec::new();
    for _ in 0..4 {
        let mut round = Vec::new();
        for to in 0..4u8 {
            for from in [(to + 3) % 4, (to + 1) % 4] {
                let router = &mut ranks.routers[usize::from(to)];
                let routed = router.route(uuid(from), uuid(to), LONG, 1, usable);
                round.push(routed.expect("a plan"));
            }
        }
        relayed.push(
            round
                .iter()
                .map(|routed| routed.plan.share(PathKind::Relay))
                .fold(0.0, f64::max),
        );
    }
    assert!(relayed[0] > 0.3, "{relayed:?}");
    assert_eq!(relayed[1..], [0.0; 3], "{relayed:?}");
    // One after the other and in one direction only, each gets the paths over idle links.
    let mut ranks = Ranks::new(4, "beluga", |_| true);
    for _ in 0..4 {
        let round = [0, 1, 2, 3u8].map(|from| {
            let to = (from + 1) % 4;
            let router = &mut ranks.routers[usize::from(to)];
            let routed = router.route(uuid(from), uuid(to), LONG, 1, usable);
            routed.expect("a plan").plan.share(PathKind::Relay)
        });
        assert!(round.iter().all(|share| *share > 0.3), "{round:?}");
    }
}
