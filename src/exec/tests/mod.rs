//! Schedules of random plans, and the executors over the simulated driver.

mod scenarios;

use super::*;
use crate::cuda::tests::{run_roles, ROLE};
use crate::exec::schedule::{At, Base};
use crate::model::Model;
use crate::plan::{Message, Occupancy, Options, Order, Planner};
use crate::topology::tests::file;

/// Numbers that are the same for the same seed (xorshift64*, by Vigna).
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % end
    }
}

pub(super) fn planner(node: &str) -> Planner {
    let topology = file(node).topology().expect("a topology");
    Planner::new(&topology, &Model::nominal(&topology))
}

/// A plan of a random size and options, between any two GPUs.
pub(super) fn random_plan(planner: &Planner, random: &mut Random, bytes_max: u64) -> Plan {
    let gpus = planner.gpus() as u64;
    let from = random.below(gpus);
    let to = (from + 1 + random.below(gpus - 1)) % gpus;
    let direct = random.below(3) > 0;
    let options = Options {
        direct,
        relays_max: random.below(4) as u32,
        relay_depth_max: 1 + random.below(2) as u32,
        host: !direct || random.below(2) == 0,
        chunks_max: 1 + random.below(60) as u32,
        chunk_bytes_min: 256 << random.below(8),
        staging_bytes: 3 << (16 + random.below(6)),
        gain_min: 0.0,
        order: [Order::DirectFirst, Order::RoundRobin, Order::PathByPath][random.below(3) as usize],
        ..Options::default()
    };
    let bytes = 1 + random.below(bytes_max);
    let message = Message::new(from as u8, to as u8, bytes);
    let planned = planner.plan(&Occupancy::free(), &message, &options);
    planned.expect("a plan")
}

/// Runs a schedule by its units, one after the other, over real memory.
fn interpret(schedule: &Schedule, units: &[Unit], source: &[u8]) -> Vec<u8> {
    let mut target = vec![0xee; source.len()];
    let mut rings: Vec<Vec<u8>> = schedule
        .rings
        .iter()
        .map(|ring| vec![0xdd; ring.bytes as usize])
        .collect();
    for step in units.iter().flat_map(|unit| &unit.steps) {
        let step = &schedule.steps[*step as usize];
        let range = |at: At| at.offset as usize..(at.offset + step.bytes) as usize;
        let piece = match step.from.base {
            Base::Source => source[range(step.from)].to_vec(),
            Base::Ring(ring) => rings[usize::from(ring)][range(step.from)].to_vec(),
            Base::Target => panic!("read from the target"),
        };
        match step.to.base {
            Base::Source => panic!("written to the source"),
            Base::Ring(ring) => rings[usize::from(ring)][range(step.to)].copy_from_slice(&piece),
            Base::Target => target[range(step.to)].copy_from_slice(&piece),
        }
    }
    target
}

/// For each pair of steps that touch the same bytes, one of which writes: whether lanes and waits order them.
fn is_ordered(schedule: &Schedule, units: &[Unit]) -> bool {
    // What each unit is behind, as a set of units.
    let mut behind: Vec<Vec<bool>> = Vec::new();
    let mut latest: Vec<Option<usize>> = vec![None; schedule.lanes.len()];
    for (number, unit) in units.iter().enumerate() {
        let mut set = vec![false; units.len()];
        let lane = usize::from(unit.lane);
        for before in unit.waits.iter().copied().chain(latest[lane]) {
            assert!(before < number, "a unit waits for one that is not launched");
            set[before] = true;
            for (to, from) in set.iter_mut().zip(&behind[before]) {
                *to |= *from;
            }
        }
        latest[lane] = Some(number);
        behind.push(set);
    }
    let touches = |unit: &Unit| {
        let steps = unit.steps.iter().map(|step| schedule.steps[*step as usize]);
        let both =
            steps.flat_map(|step| [(step.from, step.bytes, false), (step.to, step.bytes, true)]);
        both.filter(|(at, _, _)| at.base != Base::Source)
            .collect::<Vec<_>>()
    };
    let meets = |a: &(At, u64, bool), b: &(At, u64, bool)| {
        let apart = a.0.offset + a.1 <= b.0.offset || b.0.offset + b.1 <= a.0.offset;
        a.0.base == b.0.base && !apart && (a.2 || b.2)
    };
    (0..units.len()).all(|later| {
        (0..later).all(|earlier| {
            let (a, b) = (touches(&units[earlier]), touches(&units[later]));
            behind[later][earlier] || !a.iter().any(|a| b.iter().any(|b| meets(a, b)))
        })
    })
}

#[test]
fn scripts_of_random_plans_bring_every_byte_in_order() {
    for node in ["beluga", "dgx1-v100", "hgx-h200"] {
        let planner = planner(node);
        let mut random = Random::new(11);
        for round in 0..60 {
            let plan = random_plan(&planner, &mut random, 3_000_000);
            let schedule = Schedule::of(&plan).expect("a schedule");
            let bytes = plan.message.bytes as usize;
            let source: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
            for together in [false, true] {
                let units = schedule.units(together);
                let steps: usize = units.iter().map(|unit| unit.steps.len()).sum();
                assert_eq!(
                    steps,
                    schedule.steps.len(),
                    "{node} {round}: each copy once"
                );
                assert!(
                    interpret(&schedule, &units, &source) == source,
                    "{node} {round} {together}: {plan:?}"
                );
                assert!(is_ordered(&schedule, &units), "{node} {round} {together}");
            }
        }
    }
}

#[test]
fn without_its_waits_a_script_is_not_in_order() {
    let planner = planner("beluga");
    let message = Message::new(0, 1, 64 << 20);
    let plan = planner.plan(&Occupancy::free(), &message, &Options::default());
    let schedule = Schedule::of(&plan.expect("a plan")).expect("a schedule");
    for forget in [
        (|step: &mut schedule::Step| step.data = None) as fn(&mut schedule::Step),
        |step| step.slot = None,
    ] {
        let mut wrong = schedule.clone();
        wrong.steps.iter_mut().for_each(forget);
        assert!(!is_ordered(&wrong, &wrong.units(false)));
    }
}

#[test]
fn a_shape_tells_plans_apart() {
    let planner = planner("beluga");
    let shape = |from, to, bytes| {
        let message = Message::new(from, to, bytes);
        let plan = planner.plan(&Occupancy::free(), &message, &Options::default());
        Shape::of(&plan.expect("a plan"))
    };
    let one = shape(0, 1, 64 << 20);
    assert_eq!(one, shape(0, 1, 64 << 20));
    for other in [
        shape(1, 0, 64 << 20),
        shape(0, 2, 64 << 20),
        shape(0, 1, (64 << 20) + 1),
    ] {
        assert_ne!(one, other);
    }
}

#[test]
fn a_plan_of_too_many_copies_is_refused() {
    let planner = planner("beluga");
    let message = Message::new(0, 1, 64 << 20);
    let options = Options {
        direct: false,
        chunk_bytes_min: 1024,
        staging_bytes: 12 << 10,
        chunks_max: 1 << 20,
        ..Options::default()
    };
    let plan = planner.plan(&Occupancy::free(), &message, &options);
    assert_eq!(Schedule::of(&plan.expect("a plan")), None);
}

/// The scenarios. In an ordinary run there is no role and nothing to do.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    match role.as_str() {
        "exec_bytes" => scenarios::bytes(),
        "exec_cache" => scenarios::cache(),
        "exec_window" => scenarios::window(),
        "exec_order" => scenarios::order(),
        "exec_in_place" => scenarios::in_place(),
        "exec_choice" => scenarios::choice(),
        "exec_faults" => scenarios::faults(),
        "exec_memory" => scenarios::memory(),
        other => panic!("unknown role {other}"),
    }
    println!("scenario complete");
}

fn over_simulator(role: &str, node: &str) {
    let extra = [("SIMCUDA_TOPOLOGY", node), ("EXEC_TEST_NODE", node)];
    run_roles("exec::tests::role", &[role], true, &extra);
}

#[test]
fn all_executors_bring_the_same_bytes() {
    over_simulator("exec_bytes", "beluga");
}

#[test]
fn all_executors_bring_the_same_bytes_over_two_relays() {
    over_simulator("exec_bytes", "dgx1-v100");
}

#[test]
fn graphs_are_kept_changed_in_place_and_bounded() {
    over_simulator("exec_cache", "beluga");
}

#[test]
fn a_graph_that_runs_is_not_launched_again() {
    over_simulator("exec_window", "beluga");
}

#[test]
fn plans_that_write_in_one_place_are_in_order() {
    over_simulator("exec_order", "beluga");
    over_simulator("exec_order", "dgx1-v100");
}

#[test]
fn no_graph_is_launched_where_others_have_to_wait_for_all_of_it() {
    over_simulator("exec_in_place", "beluga");
}

#[test]
fn the_executor_is_chosen_by_what_launches_cost() {
    over_simulator("exec_choice", "beluga");
}

#[test]
fn an_error_at_any_call_ends_in_an_error_or_the_right_bytes() {
    over_simulator("exec_faults", "beluga");
}

#[test]
fn staging_is_bounded_and_given_back() {
    over_simulator("exec_memory", "beluga");
}
