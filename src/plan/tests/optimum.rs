//! Is what the closed form finds the best there is, and does it take as long as predicted?

use super::*;

/// Finest step of shares that the search looks at.
const STEPS: usize = 100;
/// Most chunks that it looks at.
const CHUNKS: u32 = 80;

/// Time of a path alone, chunk after chunk and hop after hop, as one would with a pencil.
fn path_us(node: &Node, path: &Path, share: f64, chunks: u32, window: u32, pushed: bool) -> f64 {
    let model = node.planner.model();
    let places = path.places();
    let hops = path.hops();
    let staging = model.staging(places[0], path.via(), places[hops]);
    let mut ends = vec![model.launch_us; hops];
    for _ in 0..chunks * window {
        let mut here = model.launch_us;
        for hop in 0..hops {
            let numbers = model.hop(places[hop], places[hop + 1]).expect("numbers");
            let last = hop + 1 == hops;
            let line = match (hops, last) {
                (1, _) => (if pushed { numbers.push } else { numbers.pull }).expect("a line"),
                (_, true) => numbers.pull.expect("a line"),
                (_, false) => numbers.push.expect("a line"),
            };
            let flag = if last { 0.0 } else { staging.chunk_us };
            let start = ends[hop].max(here);
            let bytes = share / f64::from(chunks);
            ends[hop] = start
                + line.alpha_us.max(model.launch_us)
                + flag
                + bytes / (line.sure_gb_s() * 1e3);
            here = ends[hop] + staging.epsilon_us;
        }
    }
    ends[hops - 1] + model.finish_us
}

/// The best that there is over `paths`, by trying: every set of them, shares in steps, every number of chunks.
fn search(node: &Node, paths: &[Path], message: &Message, options: &Options) -> f64 {
    let total = message.bytes as f64;
    let table: Vec<Vec<f64>> = paths
        .iter()
        .map(|path| {
            let best = |step: usize| {
                let share = total * step as f64 / STEPS as f64;
                if path.hops() == 1 {
                    let us = |pushed| path_us(node, path, share, 1, message.window, pushed);
                    return us(true).min(us(false));
                }
                let fewest = (share / options.chunk_bytes_max() as f64).ceil().max(1.0) as u32;
                let most = ((share / options.chunk_bytes_min as f64) as u32)
                    .max(fewest)
                    .min(fewest.max(CHUNKS));
                let us = |chunks| path_us(node, path, share, chunks, message.window, true);
                // Around its minimum the time is flat: beyond eight, steps of an eighth.
                let mut tried = fewest;
                let mut least = f64::INFINITY;
                while tried <= most {
                    least = least.min(us(tried));
                    tried += 1 + tried / 8;
                }
                least
            };
            (0..=STEPS).map(best).collect()
        })
        .collect();
    let launch = node.planner.model().launch_us;
    let mut best = f64::INFINITY;
    for set in 1u32..1 << paths.len() {
        let members: Vec<usize> = (0..paths.len()).filter(|at| set & 1 << at != 0).collect();
        // Each must have something; who is launched later starts later.
        let us = |position: usize, step: usize| {
            table[members[position]][step] + launch * position as f64
        };
        fn go(
            us: &dyn Fn(usize, usize) -> f64,
            members: usize,
            position: usize,
            left: usize,
            so_far: f64,
            best: &mut f64,
        ) {
            if so_far >= *best {
                return;
            }
            if position + 1 == members {
                *best = best.min(so_far.max(us(position, left)));
                return;
            }
            for step in 1..left {
                go(
                    us,
                    members,
                    position + 1,
                    left - step,
                    so_far.max(us(position, step)),
                    best,
                );
            }
        }
        go(&us, members.len(), 0, STEPS, 0.0, &mut best);
    }
    best
}

/// Pairs of a node with up to four paths that have no segment in common, and more than one.
fn pairs(node: &Node) -> Vec<(u8, u8)> {
    match node.topology.gpus.len() {
        4 => vec![(0, 1), (2, 1)],
        _ if node.topology.fabric == crate::topology::Fabric::Switch => vec![(0, 1)],
        _ => vec![(0, 1), (3, 2)],
    }
}

#[test]
fn the_closed_form_finds_what_an_exhaustive_search_finds() {
    let options = Options {
        gain_min: 0.0,
        ..Options::default()
    };
    let mut worst: f64 = 0.0;
    for node in nodes() {
        for (from, to) in pairs(&node) {
            for mib in [1, 8, 128] {
                for window in [1, 4] {
                    let message = Message {
                        window,
                        ..Message::new(from, to, mib * MIB)
                    };
                    let plan = node.plan(&message, &options);
                    let mut paths = node.planner.paths(from, to);
                    // Behind a switch a relay has the direct path's own port: the search takes paths for independent.
                    let is_switch = node.topology.fabric == crate::topology::Fabric::Switch;
                    paths.retain(|path| {
                        path.via().len() < 2 && !(is_switch && path.kind() == PathKind::Relay)
                    });
                    assert!((2..=4).contains(&paths.len()), "{paths:?}");
                    let best = search(&node, &paths, &message, &options);
                    let off = plan.predicted_us / best - 1.0;
                    worst = worst.max(off);
                    assert!(
                        off < 0.02,
                        "{} GPU{from} to GPU{to}, {mib} MiB, window {window}: {} us, by search {best} us",
                        node.name, plan.predicted_us
                    );
                }
            }
        }
    }
    println!("at most {:.2} % behind the search", worst * 100.0);
}

#[test]
fn plans_take_as_long_as_predicted() {
    let mut errors = Vec::new();
    for node in nodes() {
        let last = node.topology.gpus.len() as u8 - 1;
        let depths = if node.topology.gpus.len() > 4 {
            1..=2
        } else {
            1..=1
        };
        for (from, to) in [(0, 1), (1, last)] {
            for mib in [2, 32, 256] {
                for window in [1, 16] {
                    for depth in depths.clone() {
                        let message = Message {
                            window,
                            ..Message::new(from, to, mib * MIB)
                        };
                        let options = Options {
                            relay_depth_max: depth,
                            ..Options::default()
                        };
                        let plan = node.plan(&message, &options);
                        let us = reference::run(&node, &plan);
                        let error = (plan.predicted_us / us - 1.0).abs();
                        let what = format!(
                            "{} GPU{from} to GPU{to}, {mib} MiB, window {window}, depth {depth}",
                            node.name
                        );
                        errors.push((error, what, plan, us));
                    }
                }
            }
        }
    }
    let mean = errors.iter().map(|(error, ..)| error).sum::<f64>() / errors.len() as f64;
    let worst = errors
        .iter()
        .max_by(|x, y| x.0.total_cmp(&y.0))
        .expect("plans");
    println!(
        "{} plans: {:.2} % off on average, worst {:.2} %: {}",
        errors.len(),
        mean * 100.0,
        worst.0 * 100.0,
        worst.1
    );
    assert!(mean < 0.03, "{mean}");
    assert!(
        worst.0 < 0.06,
        "{} us, in simulation {} us: {} {:?}",
        worst.2.predicted_us,
        worst.3,
        worst.1,
        worst.2
    );
}

/// Two copies of a hop at a time share its link, and how evenly they come is not in the model.
#[test]
fn what_a_copy_costs_is_hidden_where_two_are_under_way() {
    for name in ["beluga", "narval"] {
        let node = Node::shipped(name);
        for mib in [32, 64, 256] {
            let message = Message::new(0, 1, mib * MIB);
            let one = Options::default();
            let two = Options {
                relays_in_turn: true,
                ..one
            };
            let plan = node.plan(&message, &two);
            let relays = plan.paths().iter().filter(|path| path.in_turn);
            assert_eq!(relays.count(), 2, "{plan:?}");
            let us = reference::run(&node, &plan);
            let error = plan.predicted_us / us - 1.0;
            println!(
                "{name}, {mib} MiB: {us:.1} us, prediction {:.2} % off",
                error * 100.0
            );
            assert!(error.abs() < 0.08, "{us} us: {plan:?}");
            assert!(us < reference::run(&node, &node.plan(&message, &one)));
            // In a window the next message is under way at the same time.
            let window = Message {
                window: 16,
                ..message
            };
            assert_eq!(node.plan(&window, &two), node.plan(&window, &one));
        }
    }
}

/// A model with the wrong numbers is found out: otherwise the tests above would show nothing.
#[test]
fn a_plan_of_another_model_is_found_out() {
    let unmoved = Node::shipped("beluga");
    let mut worst: f64 = 0.0;
    for seed in [4, 8, 12, 16, 20] {
        let node = moved(seed);
        assert!(node.name.starts_with("beluga"), "{}", node.name);
        let plan = unmoved.plan(&Message::new(0, 1, 256 * MIB), &Options::default());
        let us = reference::run(&node, &plan);
        worst = worst.max((plan.predicted_us / us - 1.0).abs());
        let own = reference::run(&node, &node.plan(&plan.message, &Options::default()));
        assert!(
            own < us,
            "{}: its own plan {own} us, that of the unmoved {us}",
            node.name
        );
    }
    assert!(worst > 0.06, "{worst}");
}

/// One thread that launches every copy: chunks are as many as it keeps up with, and what is predicted is what then happens.
#[test]
fn one_thread_launches_no_more_than_it_can() {
    const LAUNCHER_US: f64 = 3.3;
    let mut most: f64 = 1.0;
    for (name, from, to) in [("beluga", 0, 1), ("dgx1-v100", 0, 5), ("dgx1-v100", 0, 1)] {
        let mut node = Node::shipped(name);
        let mut model = node.planner.model().of_one();
        model.finish_us = 0.0;
        node.planner = Planner::new(&node.topology, &model);
        for mib in [4, 16, 64, 256] {
            let options = |launcher_us| Options {
                launcher: of_launches(launcher_us),
                ..Options::default().by_one(&model)
            };
            let message = Message::new(from, to, mib * MIB);
            let plan = node.plan(&message, &options(LAUNCHER_US));
            let us = |plan: &Plan| reference::run_launched(&node, plan, LAUNCHER_US);
            let taken = us(&plan);
            let heedless = us(&node.plan(&message, &options(0.0)));
            println!(
                "{name} {from} to {to}, {mib} MiB: {taken:.0} us, {heedless:.0} without, predicted {:.0}",
                plan.predicted_us
            );
            assert!(taken < 1.02 * heedless, "{name}, {mib} MiB: {plan:?}");
            assert!(
                (taken / plan.predicted_us - 1.0).abs() < 0.01,
                "{name}, {mib} MiB: {taken} us, predicted {}",
                plan.predicted_us
            );
            most = most.max(heedless / taken);
        }
    }
    assert!(most > 1.5, "it never matters: {most}");
}
