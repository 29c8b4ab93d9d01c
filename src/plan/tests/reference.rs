//! A simulation of plans, copy by copy: engines take a copy after the other of a hop (two where they go in turn), segments are divided by filling
//! them evenly until one is full, time goes from event to event. It shares no formula with the planner.

use super::*;

struct Task {
    /// Tasks that must have ended, and how long before.
    after: Vec<(usize, f64)>,
    not_before: f64,
    alpha_us: f64,
    /// Bytes a microsecond.
    cap: f64,
    segments: Vec<usize>,
    left: f64,
    moves_at: Option<f64>,
    end: Option<f64>,
}

/// When the last copy of the window ends and is seen.
pub fn run(node: &Node, plan: &Plan) -> f64 {
    run_launched(node, plan, 0.0)
}

/// The same, where one thread launches all copies, in the order of the plan's graph, each in so many microseconds. Of a single
/// message.
pub fn run_launched(node: &Node, plan: &Plan, launcher_us: f64) -> f64 {
    run_among(node, plan, plan.paths().len(), launcher_us)
}

/// The same of a part of a plan over so many paths, whose chunks are launched in turn.
#[allow(
    clippy::too_many_lines,
    reason = "a simulation, copy by copy, that shares nothing with the planner"
)]
pub fn run_among(node: &Node, plan: &Plan, paths: usize, launcher_us: f64) -> f64 {
    assert!(launcher_us == 0.0 || plan.message.window == 1);
    let graph = plan.graph();
    let launched_us = |path: usize, chunk: usize, hop: usize| {
        let of = |copy: &Copy| {
            (
                usize::from(copy.path),
                copy.chunk as usize,
                usize::from(copy.hop),
            )
        };
        let turn = graph
            .copies
            .iter()
            .position(|copy| of(copy) == (path, chunk, hop));
        turn.map_or(0.0, |turn| (turn + 1) as f64 * launcher_us)
    };
    let model = node.planner.model();
    let mut tasks: Vec<Task> = Vec::new();
    for (position, path) in plan.paths().iter().enumerate() {
        let places = path.path.places();
        let hops = path.path.hops();
        let staging = model.staging(places[0], path.path.via(), places[hops]);
        let first = tasks.len();
        let chunks = (path.chunks * plan.message.window) as usize;
        let number = |chunk: usize, hop: usize| first + chunk * hops + hop;
        for chunk in 0..chunks {
            for hop in 0..hops {
                let numbers = model.hop(places[hop], places[hop + 1]).expect("numbers");
                let put = Place::Gpu(path.engines[hop]) == places[hop];
                let line = if put { numbers.push } else { numbers.pull };
                let line = line.or(numbers.push).or(numbers.pull).expect("a line");
                let mut after = Vec::new();
                let lanes = if path.in_turn { 2 } else { 1 };
                // Lanes in turn do not begin together: a chunk of each path is launched before the next of the same.
                let launched = (lanes - 1) * chunk.min(1) * paths;
                if chunk >= lanes {
                    after.push((number(chunk - lanes, hop), 0.0));
                }
                if hop > 0 {
                    after.push((number(chunk, hop - 1), staging.epsilon_us));
                }
                let slots = path.slots as usize;
                if hop + 1 < hops && chunk >= slots {
                    after.push((number(chunk - slots, hop + 1), staging.epsilon_us));
                }
                let flag = if hop + 1 < hops {
                    staging.chunk_us
                } else {
                    0.0
                };
                let way = node
                    .topology
                    .hop(places[hop], places[hop + 1])
                    .expect("a hop");
                tasks.push(Task {
                    after,
                    not_before: if launcher_us > 0.0 {
                        launched_us(position, chunk, hop)
                    } else {
                        model.launch_us * (position + 1 + launched) as f64
                    },
                    alpha_us: if launcher_us > 0.0 {
                        line.alpha_us + flag
                    } else {
                        line.alpha_us.max(model.launch_us) + flag
                    },
                    cap: line.sure_gb_s() * 1e3,
                    segments: way
                        .segments()
                        .iter()
                        .map(|segment| usize::from(*segment))
                        .collect(),
                    left: path.chunk((chunk as u32) % path.chunks).1 as f64,
                    moves_at: None,
                    end: None,
                });
            }
        }
    }
    let capacities: Vec<f64> = node
        .topology
        .segments
        .iter()
        .map(|segment| segment.gb_s * 1e3)
        .collect();
    let mut now = 0.0;
    let mut open: Vec<usize> = (0..tasks.len()).collect();
    while !open.is_empty() {
        // Those whose predecessors have ended know when they will move.
        for &at in &open {
            if tasks[at].moves_at.is_none() {
                let ready = tasks[at]
                    .after
                    .iter()
                    .map(|(before, gap)| tasks[*before].end.map(|end| end + gap));
                if let Some(ready) = ready.collect::<Option<Vec<f64>>>() {
                    let start = ready.into_iter().fold(tasks[at].not_before, f64::max);
                    tasks[at].moves_at = Some(start + tasks[at].alpha_us);
                }
            }
        }
        let moving: Vec<usize> = open
            .iter()
            .copied()
            .filter(|at| tasks[*at].moves_at.is_some_and(|t| t <= now + 1e-9))
            .collect();
        let rates = fill(&tasks, &moving, &capacities);
        let mut next = f64::INFINITY;
        for (&at, rate) in moving.iter().zip(&rates) {
            next = next.min(now + tasks[at].left / rate);
        }
        for &at in &open {
            if let Some(moves_at) = tasks[at].moves_at.filter(|t| *t > now + 1e-9) {
                next = next.min(moves_at);
            }
        }
        assert!(next.is_finite(), "nothing can go on at {now} us");
        for (&at, rate) in moving.iter().zip(&rates) {
            tasks[at].left -= rate * (next - now);
            if tasks[at].left <= 1e-3 {
                tasks[at].end = Some(next);
            }
        }
        now = next;
        open.retain(|at| tasks[*at].end.is_none());
    }
    now + model.finish_us
}

/// Raises all rates alike; who meets a limit stays there.
fn fill(tasks: &[Task], moving: &[usize], capacities: &[f64]) -> Vec<f64> {
    let mut rates = vec![0.0; moving.len()];
    let mut rising = vec![true; moving.len()];
    while rising.contains(&true) {
        let mut step = f64::INFINITY;
        for (i, at) in moving.iter().enumerate().filter(|(i, _)| rising[*i]) {
            step = step.min(tasks[*at].cap - rates[i]);
        }
        let mut used: Vec<usize> = moving
            .iter()
            .flat_map(|at| tasks[*at].segments.iter().copied())
            .collect();
        used.sort_unstable();
        used.dedup();
        for segment in used {
            let capacity = capacities[segment];
            let users = || {
                moving
                    .iter()
                    .enumerate()
                    .filter(|(_, at)| tasks[**at].segments.contains(&segment))
            };
            let used: f64 = users().map(|(i, _)| rates[i]).sum();
            let count = users().filter(|(i, _)| rising[*i]).count();
            if count > 0 {
                step = step.min((capacity - used) / count as f64);
            }
        }
        for (i, rate) in rates.iter_mut().enumerate() {
            if rising[i] {
                *rate += step;
            }
        }
        for (i, at) in moving.iter().enumerate() {
            let full = |segment: &usize| {
                let users = moving
                    .iter()
                    .enumerate()
                    .filter(|(_, at)| tasks[**at].segments.contains(segment));
                users.map(|(i, _)| rates[i]).sum::<f64>() >= capacities[*segment] * (1.0 - 1e-9)
            };
            if rates[i] >= tasks[*at].cap * (1.0 - 1e-9) || tasks[*at].segments.iter().any(full) {
                rising[i] = false;
            }
        }
    }
    rates
}

/// By hand: a relay of two chunks of 1 MB over links of 100 GB/s, alphas of 4 and 5.3 us, 4.8 us of hand-over.
#[test]
fn the_simulation_does_what_a_hand_can_follow() {
    let mut file = file("narval");
    file.link.iter_mut().for_each(|link| link.gb_s = 100.0);
    let node = Node::of("by hand".into(), file.topology().expect("a topology"));
    let options = Options {
        direct: false,
        host: false,
        relays_max: 1,
        staging_bytes: 3_072_000,
        chunks_max: 2,
        chunk_bytes_min: 1_000_000,
        ..Options::default()
    };
    let plan = node.plan(&Message::new(0, 1, 2_000_000), &options);
    assert_eq!(
        (plan.paths().len(), plan.paths()[0].chunks),
        (1, 2),
        "{plan:?}"
    );
    // In: launched at 2.3, the chunks end at 16.304 and 30.304, the second 704 bytes shorter. Out: the first from 21.1
    // to 36.4, the second right behind it.
    let long = 1_000_192.0 / 100e3;
    let short = 999_808.0 / 100e3;
    let first_out = 2.3 + 4.0 + long + 4.8 + 5.3 + long;
    let expected = first_out + 5.3 + short + 2.1;
    assert!(
        (run(&node, &plan) - expected).abs() < 0.01,
        "{} not {expected}",
        run(&node, &plan)
    );
}
