//! What holds for every plan.

use super::*;
use graph::{End, Why};
use proptest::prelude::*;
use std::collections::HashMap;

const CASES: u32 = 600;

/// By how much a set of many paths, which is found by adding one after the other, may miss the best.
const MISSED: f64 = 0.03;

/// A node, one of the shipped or a moved one. The planners are made once: listing paths takes longer than planning.
fn node(number: u64) -> &'static Node {
    static NODES: std::sync::OnceLock<Vec<Node>> = std::sync::OnceLock::new();
    let nodes = NODES.get_or_init(nodes);
    &nodes[number as usize % nodes.len()]
}

fn any_message() -> impl Strategy<Value = (u64, Message)> {
    // Sizes of every magnitude, odd ones too.
    let bytes = (0u32..32, any::<u64>()).prop_map(|(bits, random)| random % (1u64 << bits).max(1));
    (
        any::<u64>(),
        any::<u8>(),
        any::<u8>(),
        bytes,
        1u32..20,
        any::<bool>(),
    )
        .prop_map(|(number, from, to, bytes, window, may_put)| {
            let gpus = node(number).topology.gpus.len() as u8;
            let from = from % gpus;
            let to = (from + 1 + to % (gpus - 1)) % gpus;
            (
                number,
                Message {
                    from,
                    to,
                    bytes,
                    window,
                    may_put,
                },
            )
        })
}

fn any_options() -> impl Strategy<Value = Options> {
    let paths = (any::<bool>(), any::<bool>(), any::<bool>())
        .prop_filter("a path", |(a, b, c)| *a || *b || *c);
    let limits = (0u32..9, 1u32..3, 1u32..200, 0u32..22, 0u32..13, 14u32..26);
    let order = prop_oneof![
        Just(Order::DirectFirst),
        Just(Order::RoundRobin),
        Just(Order::PathByPath)
    ];
    (paths, limits, 0.0..0.2, order).prop_map(
        |(
            (direct, relay, host),
            (relays_max, depth, chunks_max, least, align, staging),
            gain_min,
            order,
        )| Options {
            batches: chunks_max % 3 == 1,
            direct,
            relay,
            host,
            relays_max,
            relays_over: u32::MAX,
            relays_put: relays_max % 2 == 1,
            relays_in_turn: chunks_max % 2 == 1,
            relay_depth_max: depth,
            launcher: of_launches(f64::from(depth - 1) * 2.5),
            chunks_max,
            chunk_bytes_min: 1 << least,
            align: 1 << align,
            staging_bytes: 1 << staging,
            gain_min,
            gain_min_crowded: 2.0 * gain_min,
            gain_min_beside: 1.5 * gain_min,
            copies_max: 2,
            least_gain: LeastGain {
                single_us: 50.0 * gain_min,
                window_us: [70.0 * gain_min, 150.0 * gain_min],
                each_us: 10.0 * gain_min,
            },
            both_ways: gain_min > 0.1,
            host_part: None,
            host_rate: HostPart::ALL,
            order,
        },
    )
}

fn any_occupancy(node: &Node, seed: u64) -> Occupancy {
    let mut random = Random::new(seed);
    let mut occupancy = Occupancy::free();
    for _ in 0..random.below(12) {
        more(node, &mut occupancy, &mut random);
    }
    occupancy
}

fn more(node: &Node, occupancy: &mut Occupancy, random: &mut Random) {
    let hops: Vec<_> = node.topology.hops().collect();
    let (_, _, hop) = hops[random.below(hops.len() as u64) as usize];
    let yields = random.below(2) == 1;
    occupancy.add(hop.segments(), 1, hop.gb_s * random.factor(), yields);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: CASES,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_byte_is_moved_once_within_bounds((number, message) in any_message(), options in any_options(), seed in any::<u64>()) {
        let node = node(number);
        let occupancy = any_occupancy(node, seed);
        let Ok(plan) = node.planner.plan(&occupancy, &message, &options) else {
            // Direct and host are always there; relays may not be.
            prop_assert!(!options.direct && !options.host);
            return Ok(());
        };
        prop_assert_eq!(&plan, &node.planner.plan(&occupancy, &message, &options).expect("the same"));
        let mut pieces: Vec<(u64, u64)> = Vec::new();
        for path in plan.paths() {
            prop_assert_eq!((path.path.places()[0], *path.path.places().last().expect("an end")),
                (Place::Gpu(message.from), Place::Gpu(message.to)));
            let allowed = match path.path.kind() {
                PathKind::Direct => options.direct,
                PathKind::Relay => options.relay && path.path.via().len() <= options.relay_depth_max as usize,
                PathKind::Host => options.host,
            };
            prop_assert!(allowed, "{}", path.path);
            prop_assert!(path.offset % options.align == 0);
            if path.path.kind() == PathKind::Direct {
                prop_assert_eq!((path.chunks, path.slots), (1, 0));
            } else {
                prop_assert!(path.chunk_bytes % options.align == 0);
                prop_assert!(path.staging_bytes() <= options.staging_bytes);
                // More than that only where the staging memory does not hold longer ones; and more than there may be at all only
                // where there is no direct path to take what is left.
                let must = path.bytes.div_ceil(options.chunk_bytes_max());
                prop_assert!(u64::from(path.chunks) <= must.max(options.chunks_max.into()), "{} chunks", path.chunks);
                prop_assert!(!options.direct || path.chunks <= options.chunks_max.max(CHUNKS_MOST), "{} chunks", path.chunks);
                prop_assert!(path.slots >= 1 && u64::from(path.slots) <= u64::from(path.chunks) * u64::from(message.window));
            }
            pieces.extend((0..path.chunks).map(|chunk| path.chunk(chunk)));
            prop_assert!(path.predicted_us <= plan.predicted_us);
        }
        let relays = plan.paths().iter().filter(|path| path.path.kind() == PathKind::Relay).count();
        prop_assert!(relays <= options.relays_max as usize);
        pieces.sort_unstable();
        let mut end = 0;
        for (offset, bytes) in pieces {
            prop_assert_eq!(offset, end);
            prop_assert!(bytes > 0 || message.bytes == 0);
            end += bytes;
        }
        prop_assert_eq!(end, message.bytes);
        if options.direct {
            prop_assert!(plan.predicted_us <= plan.direct_us * (1.0 + 1e-12));
            let alone = Options { relay: false, host: false, ..options };
            let alone = node.planner.plan(&occupancy, &message, &alone).expect("direct");
            prop_assert_eq!(alone.predicted_us, plan.direct_us);
        }
    }

    #[test]
    fn the_graph_is_the_plan((number, message) in any_message(), options in any_options()) {
        let node = node(number);
        let Ok(plan) = node.planner.plan(&Occupancy::free(), &message, &options) else { return Ok(()) };
        // Tiny rings and no direct path make very many chunks, which show no more than many do.
        if plan.paths().iter().map(|path| path.chunks).sum::<u32>() > 1500 {
            return Ok(());
        }
        let graph = plan.graph();
        let expected: usize = plan.paths().iter().map(|path| path.chunks as usize * path.path.hops()).sum();
        prop_assert_eq!(graph.copies.len(), expected);
        // Launch order is an order in which nothing waits for what comes later: there is no circle.
        for edge in &graph.edges {
            prop_assert!(edge.before < edge.after);
        }
        // Run in launch order, with rings in memory: each slot holds what its reader expects, and all of it arrives.
        let mut rings: HashMap<(u8, Place, u32), (u32, bool)> = HashMap::new();
        let mut arrived = 0;
        let mut edges: Vec<Vec<&graph::Edge>> = vec![Vec::new(); graph.copies.len()];
        graph.edges.iter().for_each(|edge| edges[edge.after as usize].push(edge));
        let waits = |after: usize, why: Why, before: &dyn Fn(&Copy) -> bool| {
            edges[after].iter().any(|edge| edge.why == why && before(&graph.copies[edge.before as usize]))
        };
        for (number, copy) in graph.copies.iter().enumerate() {
            if let End::Slot { at, slot } = copy.from {
                let held = rings.get_mut(&(copy.path, at, slot)).expect("filled");
                prop_assert_eq!(*held, (copy.chunk, true));
                held.1 = false;
                prop_assert!(waits(number, Why::Data, &|before| before.chunk == copy.chunk && before.to == copy.from && before.path == copy.path));
            }
            match copy.to {
                End::Slot { at, slot } => {
                    let held = rings.insert((copy.path, at, slot), (copy.chunk, true));
                    if let Some((earlier, full)) = held {
                        prop_assert!(!full, "chunk {} over chunk {earlier}", copy.chunk);
                        prop_assert!(waits(number, Why::Slot, &|before| before.chunk == earlier && before.from == copy.to && before.path == copy.path));
                    }
                }
                End::Buffer { gpu, .. } => {
                    prop_assert_eq!(gpu, message.to);
                    arrived += copy.bytes;
                }
            }
        }
        prop_assert_eq!(arrived, message.bytes);
        let dot = graph.dot(&plan);
        prop_assert_eq!(dot.matches(" -> ").count(), graph.edges.len());
        prop_assert_eq!(dot.matches(" [label=").count(), graph.copies.len());
    }

    /// The more others use, the longer it takes; with a least gain a path may come in just when it becomes worth it, which
    /// is less than that gain.
    #[test]
    fn nothing_gets_faster_when_others_come((number, message) in any_message(), seed in any::<u64>(), gain in prop_oneof![Just(0.0), Just(0.02)]) {
        let node = node(number);
        let options = Options { gain_min: gain, gain_min_crowded: gain, gain_min_beside: gain, ..Options::default() };
        let mut random = Random::new(seed);
        let mut occupancy = any_occupancy(node, seed);
        let before = node.planner.plan(&occupancy, &message, &options).expect("a plan");
        more(node, &mut occupancy, &mut random);
        let after = node.planner.plan(&occupancy, &message, &options).expect("a plan");
        let slack = 1.0 - gain - MISSED;
        prop_assert!(after.predicted_us >= before.predicted_us * slack, "{} us, then {} us: {before:?} {after:?}", before.predicted_us, after.predicted_us);
    }

    /// What of others is on none of the links of a message is one question, with one answer.
    #[test]
    fn what_is_under_way_elsewhere_changes_no_plan((number, message) in any_message(), seed in any::<u64>()) {
        let node = node(number);
        let segments = node.planner.segments_between(message.from, message.to);
        let all = 0..node.topology.segments.len() as u16;
        let elsewhere: Vec<u16> = all.filter(|segment| !segments.contains(*segment)).collect();
        prop_assume!(!elsewhere.is_empty());
        let mut little = any_occupancy(node, seed);
        let mut much = little.clone();
        little.add(&elsewhere[..1], 1, 2.0, true);
        for segment in &elsewhere {
            much.add(&[*segment], 2, 3.0 + f64::from(*segment), segment % 2 == 0);
        }
        let plan = |occupancy: &Occupancy| {
            let options = Options::default().by_each();
            node.planner.plan(occupancy, &message, &options).expect("a plan")
        };
        let (with_little, with_much) = (plan(&little), plan(&much));
        prop_assert_eq!(with_little, with_much);
        let (little, much) = (little.on(segments), much.on(segments));
        prop_assert_eq!(&little, &much);
        prop_assert_eq!(plan(&little), with_much);
    }

    #[test]
    fn longer_takes_longer((number, message) in any_message()) {
        let node = node(number);
        let options = Options { gain_min: 0.0, ..Options::default() };
        let longer = Message { bytes: message.bytes + message.bytes / 8 + 1, ..message };
        let (short, long) = (node.plan(&message, &options), node.plan(&longer, &options));
        prop_assert!(long.predicted_us > short.predicted_us * (1.0 - MISSED), "{short:?} {long:?}");
    }
}

#[test]
fn what_cannot_be_planned_is_said_in_one_line() {
    let node = Node::shipped("beluga");
    let good = (Message::new(0, 1, MIB), Options::default());
    type Change = fn(&mut Message, &mut Options);
    let cases: [(Change, &str); 8] = [
        (|message, _| message.to = 4, "GPU 4 is not there: 4 GPUs"),
        (|message, _| message.to = 0, "from GPU 0 to itself"),
        (|message, _| message.window = 0, "a window of 0"),
        (
            |_, options| (options.direct, options.relay, options.host) = (false, false, false),
            "no path is allowed",
        ),
        (
            |_, options| (options.direct, options.host, options.relays_max) = (false, false, 0),
            "no path that is allowed leads",
        ),
        (|_, options| options.align = 3, "no power of two"),
        (|_, options| options.chunks_max = 0, "0 chunks"),
        (
            |_, options| options.staging_bytes = 100,
            "holds no 3 chunks",
        ),
    ];
    for (change, expected) in cases {
        let (mut message, mut options) = good;
        change(&mut message, &mut options);
        let error = node
            .planner
            .plan(&Occupancy::free(), &message, &options)
            .expect_err(expected)
            .to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn launches_come_in_the_order_that_was_asked_for() {
    let node = Node::shipped("beluga");
    let launches = |order| {
        let options = Options {
            order,
            ..Options::default()
        };
        let plan = node.plan(&Message::new(0, 1, 64 * MIB), &options);
        assert_eq!(plan.paths().len(), 4);
        let all: Vec<_> = plan.launches().collect();
        let copies = plan.paths().iter();
        let copies = copies.map(|path| path.chunks as usize * path.path.hops());
        assert_eq!(all.len(), copies.sum::<usize>());
        all
    };
    // The first hop of each path before the second of any.
    let firsts = [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)];
    for order in [Order::DirectFirst, Order::RoundRobin] {
        let all = launches(order);
        assert_eq!(all[..4], firsts);
        assert_eq!(all[4].1 as usize + all[4].2, 1, "{all:?}");
    }
    assert_eq!(
        launches(Order::PathByPath)[..4],
        [(0, 0, 0), (1, 0, 0), (1, 0, 1), (1, 1, 0)]
    );
    let relays = Options {
        direct: false,
        host: false,
        order: Order::RoundRobin,
        ..Options::default()
    };
    let plan = node.plan(&Message::new(0, 1, 64 * MIB), &relays);
    assert_eq!(
        plan.launches().take(6).collect::<Vec<_>>(),
        [
            (0, 0, 0),
            (1, 0, 0),
            (0, 0, 1),
            (0, 1, 0),
            (1, 0, 1),
            (1, 1, 0)
        ]
    );
    // What the thread is through with after half of its launches is half of each path, however many chunks that is.
    let node = Node::shipped("dgx1-v100");
    let options = Options {
        relay_depth_max: 2,
        ..Options::default()
    };
    let plan = node.plan(&Message::new(0, 5, 64 * MIB), &options);
    let count = plan.launches().count();
    for (number, path) in plan.paths().iter().enumerate().skip(1) {
        let half = plan.launches().take(count / 2);
        let launched = half.filter(|(of, ..)| *of == number).count() as f64;
        let hops = path.path.hops() as f64;
        assert!(
            (launched - hops * f64::from(path.chunks) / 2.0).abs() <= hops,
            "{path:?}"
        );
    }
}

/// Six paths leave GPU 0 of the cube mesh, and it has four engines: the relays make the other copies.
#[test]
fn no_gpu_makes_more_copies_at_once_than_it_has_engines() {
    let node = Node::shipped("dgx1-v100");
    let options = Options {
        relay_depth_max: 2,
        ..Options::default()
    };
    let plan = node.plan(&Message::new(0, 5, 256 * MIB), &options);
    let by = |gpu: u8, hop: fn(&PathPlan) -> usize| {
        let peers = plan
            .paths()
            .iter()
            .filter(|path| path.path.kind() != PathKind::Host);
        peers.filter(|path| path.engines[hop(path)] == gpu).count()
    };
    assert!(plan.paths().len() > 6);
    assert_eq!(by(0, |_| 0), 4);
    assert_eq!(by(5, |path| path.path.hops() - 1), 4);
}

/// Run with `--release -- --ignored --nocapture` to see what planning costs.
#[test]
#[ignore = "prints times, which say nothing on a busy machine"]
fn what_planning_costs() {
    for (name, to) in [("beluga", 1), ("hgx-h200", 1), ("dgx1-v100", 5)] {
        let node = Node::shipped(name);
        for depth in [1, 2] {
            let options = Options {
                relay_depth_max: depth,
                ..Options::default()
            };
            let mut least = f64::INFINITY;
            for _ in 0..2000 {
                let start = std::time::Instant::now();
                std::hint::black_box(node.plan(&Message::new(0, to, 64 * MIB), &options));
                least = least.min(start.elapsed().as_secs_f64() * 1e6);
            }
            println!("{name}, depth {depth}: {least:.1} us at least");
        }
    }
}
