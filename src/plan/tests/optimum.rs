//! Is what the closed form finds the best there is, and does it take as long as predicted?

use super::*;
use crate::config::Config;
use std::collections::HashMap;

/// Finest step of shares that the search looks at.
const STEPS: usize = 100;
/// Most chunks that it looks at.
const CHUNKS: u32 = 80;

/// What a rank plans with if no option is set: each rank makes the copies of its own GPU.
fn as_shipped() -> Options {
    crate::transfer::route::options(&Config::default()).by_each()
}

/// Time of a path alone, chunk after chunk and hop after hop, as one would with a pencil.
fn path_us(node: &Node, path: &Path, share: f64, chunks: u32, message: &Message) -> f64 {
    let model = node.planner.model();
    let places = path.places();
    let hops = path.hops();
    let staging = model.staging(places[0], path.via(), places[hops]);
    let mut ends = vec![model.launch_us; hops];
    let all = chunks * message.window;
    let mut steps = vec![0.0; hops];
    for number in 0..all {
        let before = ends.clone();
        let mut here = model.launch_us;
        for hop in 0..hops {
            let numbers = model.hop(places[hop], places[hop + 1]).expect("numbers");
            let last = hop + 1 == hops;
            let line = if last { numbers.pull } else { numbers.push }.expect("a line");
            let flag = if last { 0.0 } else { staging.chunk_us };
            let start = ends[hop].max(here);
            let bytes = share / f64::from(chunks);
            ends[hop] = start
                + line.alpha_us.max(model.launch_us)
                + flag
                + bytes / (line.sure_gb_s() * 1e3);
            here = ends[hop] + staging.epsilon_us;
        }
        // All chunks are alike: once each hop has taken as long as for the one before, it does for all that follow.
        let now: Vec<f64> = ends
            .iter()
            .zip(&before)
            .map(|(end, before)| end - before)
            .collect();
        if now
            .iter()
            .zip(&steps)
            .all(|(now, before)| (now - before).abs() < 1e-9)
        {
            let left = f64::from(all - number - 1);
            return ends[hops - 1] + left * now[hops - 1] + model.finish_us;
        }
        steps = now;
    }
    ends[hops - 1] + model.finish_us
}

/// The same of the direct path: message after message, the first two by themselves, those behind in batches of 64 MiB or 32
/// copies, which the first of a batch pays for.
fn direct_us(node: &Node, path: &Path, share: f64, message: &Message) -> f64 {
    let model = node.planner.model();
    let numbers = model.hop(path.places()[0], path.places()[1]);
    let numbers = numbers.expect("numbers");
    let each = |line: crate::model::Line| {
        let mut us = model.launch_us + model.finish_us;
        let mut batch = (0.0, 0);
        for number in 0..message.window {
            let alpha_us = line.alpha_us.max(model.launch_us);
            let is_first = number < 2 || batch.1 == 0;
            us += match line.batched_us {
                Some(batched_us) if !is_first => batched_us,
                _ => alpha_us,
            };
            us += share / (line.sure_gb_s() * 1e3);
            if number >= 2 {
                batch = (batch.0 + share, batch.1 + 1);
                if batch.0 >= 64.0 * MIB as f64 || batch.1 == 32 {
                    batch = (0.0, 0);
                }
            }
        }
        us
    };
    let put = numbers.push.filter(|_| message.may_put);
    let get = numbers.pull.or(numbers.push).expect("a line");
    put.map_or(f64::INFINITY, each).min(each(get))
}

/// The same of a single message, two copies of each hop at a time, as one of so many paths: by the simulation, as the two share
/// the hop.
fn in_turn_us(
    node: &Node,
    path: &Path,
    share: f64,
    chunks: u32,
    paths: usize,
    options: &Options,
) -> f64 {
    let mut plan = node.plan(&Message::new(0, 1, MIB), &Options::default());
    let chunk_bytes = ((share / f64::from(chunks)).ceil() as u64).next_multiple_of(options.align);
    let places = path.places();
    let gpu = |at: usize| match places[at] {
        Place::Gpu(gpu) => gpu,
        Place::Host => unreachable!("a relay"),
    };
    plan.message.bytes = chunk_bytes * u64::from(chunks);
    plan.len = 1;
    plan.paths[0] = PathPlan {
        path: *path,
        offset: 0,
        bytes: plan.message.bytes,
        chunk_bytes,
        chunks,
        slots: chunks.min((options.staging_bytes / chunk_bytes) as u32),
        engines: [gpu(0), gpu(2), 0],
        in_turn: true,
        predicted_us: 0.0,
    };
    reference::run_among(node, &plan, paths, 0.0)
}

/// Numbers of chunks that a share may have, none shorter than `least` bytes: around its minimum the time is flat, so beyond eight
/// in steps of an eighth.
fn numbers_of_chunks(share: f64, least: f64, options: &Options) -> Vec<u32> {
    let fewest = (share / options.chunk_bytes_max() as f64).ceil().max(1.0) as u32;
    let most = ((share / least) as u32)
        .max(fewest)
        .min(fewest.max(CHUNKS))
        .min(options.chunks_max.max(fewest));
    let next = |tried: &u32| Some(tried + 1 + tried / 8);
    std::iter::successors(Some(fewest), next)
        .take_while(|tried| *tried <= most)
        .collect()
}

/// What is searched: a message between two GPUs.
struct Search<'a> {
    node: &'a Node,
    paths: Vec<Path>,
    message: Message,
    options: Options,
    /// The least time of each path for each share.
    plain_us: Vec<Vec<f64>>,
    /// Least times with two copies of each hop at a time, by the rate of the path, the number of paths and that of relays among
    /// them.
    in_turn_us: HashMap<(u64, usize, usize), Vec<f64>>,
}

impl Search<'_> {
    fn new(node: &Node, message: Message, options: Options) -> Search<'_> {
        let mut paths = node.planner.paths(message.from, message.to);
        paths.retain(|path| path.via().len() < 2);
        let mut search = Search {
            node,
            paths: paths.clone(),
            message,
            options,
            plain_us: Vec::new(),
            in_turn_us: HashMap::new(),
        };
        search.plain_us = paths.iter().map(|path| search.plain_us(path)).collect();
        search
    }

    /// What is paid besides for a message over paths of these kinds.
    fn offer_us(&self, kinds: &[PathKind]) -> f64 {
        let is_for_host_alone = kinds.len() == 2
            && kinds.contains(&PathKind::Direct)
            && kinds.contains(&PathKind::Host);
        match self.message.window {
            _ if !is_for_host_alone => 0.0,
            1 => self.options.least_gain.single_us,
            _ => self.options.least_gain.window_us[0],
        }
    }

    /// The rates of a path's slowest and of its fastest hop, GB/s.
    fn rates(&self, path: &Path) -> (f64, f64) {
        let hops = path.places().windows(2);
        let rates = hops.map(|ends| {
            let hop = self.node.topology.hop(ends[0], ends[1]);
            hop.expect("a hop").gb_s
        });
        rates.fold((f64::INFINITY, 0.0_f64), |(least, most), rate| {
            (least.min(rate), most.max(rate))
        })
    }

    fn segments(&self, path: &Path) -> Vec<u16> {
        let hops = path.places().windows(2);
        let segments = hops.flat_map(|ends| {
            let hop = self.node.topology.hop(ends[0], ends[1]);
            hop.expect("a hop").segments().to_vec()
        });
        segments.collect()
    }

    /// The least time for each share.
    fn least(&self, least: f64, us: impl Fn(f64, u32) -> f64) -> Vec<f64> {
        let least = |step: usize| {
            let share = self.message.bytes as f64 * step as f64 / STEPS as f64;
            let all = numbers_of_chunks(share, least, &self.options);
            let times = all.into_iter().map(|chunks| us(share, chunks));
            times.fold(f64::INFINITY, f64::min)
        };
        // Who is in a set has something.
        let none = std::iter::once(f64::INFINITY);
        none.chain((1..=STEPS).map(least)).collect()
    }

    fn plain_us(&self, path: &Path) -> Vec<f64> {
        let (node, message) = (self.node, &self.message);
        let least = self.options.chunk_bytes_min as f64;
        self.least(least, |share, chunks| match path.kind() {
            PathKind::Direct => direct_us(node, path, share, message),
            _ => path_us(node, path, share, chunks, message),
        })
    }

    /// Two copies of each hop at a time; a thread launches three of each relay while a chunk is under way.
    fn in_turn_us(&mut self, path: &Path, paths: usize, relays: usize) -> &[f64] {
        let key = (self.rates(path).0.to_bits(), paths, relays);
        if !self.in_turn_us.contains_key(&key) {
            let launches_us = 3.0 * relays as f64 * self.node.planner.model().launch_us;
            let least =
                (launches_us * self.rates(path).0 * 1e3).max(self.options.chunk_bytes_min as f64);
            let us =
                |share, chunks| in_turn_us(self.node, path, share, chunks, paths, &self.options);
            let us = self.least(least, us);
            self.in_turn_us.insert(key, us);
        }
        &self.in_turn_us[&key]
    }

    /// The best that there is, by trying: every set of paths in which none meets another, shares in steps, every number of
    /// chunks; relays with one copy of a hop at a time or with two. Of paths of these kinds. With what an offer costs, where a
    /// single message is split for host memory alone.
    fn run(&mut self, kinds: &[PathKind]) -> f64 {
        let may_be = |path: &Path| kinds.contains(&path.kind());
        let numbers = (0..self.paths.len()).filter(|at| may_be(&self.paths[*at]));
        let numbers: Vec<usize> = numbers.collect();
        let paths: Vec<Path> = numbers.iter().map(|at| self.paths[*at]).collect();
        let plain: Vec<Vec<f64>> = numbers
            .iter()
            .map(|at| self.plain_us[*at].clone())
            .collect();
        let is_relay = |at: &usize| paths[*at].kind() == PathKind::Relay;
        // Hops of different rates do not stay in turn.
        let relays = paths.iter().filter(|path| path.kind() == PathKind::Relay);
        let are_even = relays.clone().all(|path| {
            let (slowest, fastest) = self.rates(path);
            fastest <= 1.1 * slowest
        });
        let may_turn = are_even && self.options.relays_in_turn && self.message.window == 1;
        let engines = self.node.topology.costs.peer_engines as usize;
        let launch = self.node.planner.model().launch_us;
        let mut best = f64::INFINITY;
        for set in 1u32..1 << paths.len() {
            let members: Vec<usize> = (0..paths.len()).filter(|at| set & 1 << at != 0).collect();
            let mut segments: Vec<u16> = Vec::new();
            members
                .iter()
                .for_each(|at| segments.extend(self.segments(&paths[*at])));
            let count = segments.len();
            segments.sort_unstable();
            segments.dedup();
            if segments.len() < count {
                continue;
            }
            let kinds: Vec<PathKind> = members.iter().map(|at| paths[*at].kind()).collect();
            let offer_us = self.offer_us(&kinds);
            let times = members.iter().map(|at| &plain[*at][..]);
            best = offer_us + least_of_set(&times.collect::<Vec<_>>(), launch, best - offer_us);
            // An engine for each copy that a GPU makes at a time.
            let relays = members.iter().filter(|at| is_relay(at)).count();
            if may_turn && relays > 0 && 2 * relays <= engines {
                let times: Vec<Vec<f64>> = members
                    .iter()
                    .map(|at| match is_relay(at) {
                        true => self.in_turn_us(&paths[*at], members.len(), relays).to_vec(),
                        false => plain[*at].clone(),
                    })
                    .collect();
                best = least_of_set(
                    &times.iter().map(|us| &us[..]).collect::<Vec<_>>(),
                    launch,
                    best,
                );
            }
        }
        best
    }
}

/// When all of a message has come over some paths, by the best shares of each, if that is before `best`. Who is launched later
/// starts later.
fn least_of_set(times: &[&[f64]], launch: f64, best: f64) -> f64 {
    fn go(
        times: &[&[f64]],
        launch: f64,
        position: usize,
        left: usize,
        so_far: f64,
        best: &mut f64,
    ) {
        if so_far >= *best {
            return;
        }
        let us = |step: usize| times[position][step] + launch * position as f64;
        if position + 1 == times.len() {
            *best = best.min(so_far.max(us(left)));
            return;
        }
        for step in 1..left {
            go(
                times,
                launch,
                position + 1,
                left - step,
                so_far.max(us(step)),
                best,
            );
        }
    }
    let mut best = best;
    go(times, launch, 0, STEPS, 0.0, &mut best);
    best
}

/// Pairs of a node that differ: next to each other, and without a link.
fn pairs(node: &Node) -> Vec<(u8, u8)> {
    match node.topology.gpus.len() {
        4 => vec![(0, 1), (2, 1)],
        _ if node.topology.fabric == crate::topology::Fabric::Switch => vec![(0, 1)],
        _ => vec![(0, 1), (3, 2), (0, 5)],
    }
}

/// Copies of a batch cost less than others on a real node, which no topology file of ours says by how much.
fn with_batches(mut node: Node, seed: u64) -> Node {
    let mut random = Random::new(seed);
    let mut model = node.planner.model().clone();
    for hop in &mut model.hops {
        for line in [&mut hop.push, &mut hop.pull].into_iter().flatten() {
            line.batched_us = Some(0.5 * random.factor() * line.alpha_us);
        }
    }
    node.planner = Planner::new(&node.topology, &model);
    node
}

/// By the options that ship, and by each set of paths that a user may allow.
#[test]
fn plans_are_next_to_the_best_that_an_exhaustive_search_finds() {
    use PathKind::{Direct, Host, Relay};
    let mut worst = (0.0_f64, String::new());
    let mut behind = Vec::new();
    for (seed, node) in (0..).zip(nodes()) {
        let node = with_batches(node, seed);
        println!("{}", node.name);
        for (from, to) in pairs(&node) {
            for (mib, window) in [2, 8, 32, 128, 512]
                .map(|mib| [(mib, 1), (mib, 16)])
                .concat()
            {
                let message = Message {
                    window,
                    // The receiver pulls what comes straight (`transfer::fetch`).
                    may_put: false,
                    ..Message::new(from, to, mib * MIB)
                };
                let mut search = Search::new(&node, message, as_shipped());
                for kinds in [
                    &[Direct][..],
                    &[Direct, Relay],
                    &[Direct, Host],
                    &[Direct, Relay, Host],
                ] {
                    let options = Options {
                        relay: kinds.contains(&Relay),
                        host: kinds.contains(&Host),
                        ..as_shipped()
                    };
                    let best = search.run(kinds);
                    let plan = node.plan(&message, &options);
                    // How evenly two copies at a time share a hop is not in the closed form.
                    let us = match plan.paths().iter().any(|path| path.in_turn) {
                        true => reference::run(&node, &plan),
                        false => plan.predicted_us,
                    };
                    let ways = plan.paths().iter().map(|path| path.path.kind());
                    let us = us + search.offer_us(&ways.collect::<Vec<_>>());
                    let off = us / best - 1.0;
                    let what = format!(
                        "{} GPU{from} to GPU{to}, {mib} MiB, window {window}, {kinds:?}: {us:.1} us, by search {best:.1} us \
                         ({:.2} %)",
                        node.name,
                        100.0 * off,
                    );
                    if off > worst.0 {
                        worst = (off, what.clone());
                    }
                    if off > 0.02 {
                        behind.push(what);
                    }
                }
            }
        }
    }
    println!("worst: {}", worst.1);
    assert!(behind.is_empty(), "{}", behind.join("\n"));
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
