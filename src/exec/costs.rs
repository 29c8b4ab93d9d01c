//! Chooses the executor that runs a plan, by what its launches have cost.
//!
//! Each executor is tried for plans of one class first, and what its calls take is remembered. A plan cannot
//! end before all of it is launched. Until then its launch is hidden behind the copies, and costs the
//! program's thread a part of its time. Nothing of a graph runs before it is launched, so its launch is
//! hidden only behind the copies of other messages. Chunks that are launched together are handed on together.
//! This delays the plan by the additional time that filling its pipeline takes.

use super::ExecutorName;
use hashbrown::HashMap;

/// Launches of each executor that are measured before one is chosen.
const TRIALS: u32 = 2;
/// Each further launch moves the remembered cost by this part of the difference.
const WEIGHT: f64 = 0.125;

/// How much a microsecond of the calling thread counts beside one of the message's: the thread waits for the
/// message, as a rule.
const THREAD_WEIGHT: f64 = 0.125;

/// Plans whose launches cost about the same: copies, as a power of two, and GPUs.
pub type Class = (u32, u32);

/// What the launches of one executor have cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Launches measured.
    pub launches: u32,
    /// Cost of one launch, ns.
    pub ns: f64,
}

/// What launches have cost, for each class and executor.
#[derive(Debug, Default)]
pub struct Costs {
    rows: HashMap<Class, [Cost; ExecutorName::ALL.len()]>,
}

impl Costs {
    /// The executor for a plan. `possible` says which can run it, `plan_ns` how long the plan takes once it
    /// is launched. A plan that `is_alone` has no others before it.
    #[must_use]
    pub fn choose(
        &self,
        class: Class,
        is_alone: bool,
        possible: impl Fn(ExecutorName) -> bool,
        plan_ns: impl Fn(ExecutorName) -> f64,
    ) -> ExecutorName {
        let row = self.of(class);
        let ways = || ExecutorName::ALL.into_iter().filter(|how| possible(*how));
        let is_tried = |how: &ExecutorName| row[*how as usize].launches >= TRIALS;
        let total = |how: &ExecutorName| {
            let launch = row[*how as usize].ns;
            let taken = if is_alone && *how == ExecutorName::Graph {
                plan_ns(*how) + launch
            } else {
                plan_ns(*how).max(launch)
            };
            taken + launch * THREAD_WEIGHT
        };
        let best = ways()
            .filter(is_tried)
            .min_by(|a, b| total(a).total_cmp(&total(b)));
        // An executor that would be slower even if its launch cost nothing is not tried.
        let may_win = |how: &ExecutorName| best.is_none_or(|best| plan_ns(*how) < total(&best));
        let untried = ways().find(|how| !is_tried(how) && may_win(how));
        untried.or(best).unwrap_or(ExecutorName::Streams)
    }

    /// Notes what a launch took.
    pub fn note(&mut self, class: Class, how: ExecutorName, ns: u64) {
        let cost = &mut self.rows.entry(class).or_default()[how as usize];
        cost.launches = cost.launches.saturating_add(1);
        // The first launch makes events, and is not like those that follow.
        if cost.launches <= TRIALS {
            cost.ns = ns as f64;
        } else {
            cost.ns += (ns as f64 - cost.ns) * WEIGHT;
        }
    }

    /// What is known of a class.
    #[must_use]
    pub fn of(&self, class: Class) -> [Cost; ExecutorName::ALL.len()] {
        self.rows.get(&class).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ExecutorName::{Batch, Graph, Streams};

    const CLASS: Class = (5, 2);

    #[test]
    fn each_way_is_tried_and_the_cheapest_stays() {
        let mut costs = Costs::default();
        let price = |how| match how {
            Streams => 100,
            Batch => 80,
            Graph => 60,
        };
        let mut taken = Vec::new();
        for _ in 0..8 {
            let how = costs.choose(CLASS, false, |_| true, |_| 0.0);
            costs.note(CLASS, how, price(how));
            taken.push(how);
        }
        let count = |how| taken.iter().filter(|taken| **taken == how).count();
        assert_eq!([Streams, Batch, Graph].map(count), [2, 2, 4]);
        // A delay of the plan counts for more than a launch that is hidden.
        let slow = |how| {
            if how == Graph {
                205.0
            } else {
                200.0
            }
        };
        assert_eq!(costs.choose(CLASS, false, |_| true, slow), Batch);
        let slow = |how| {
            if how == Graph {
                202.0
            } else {
                200.0
            }
        };
        assert_eq!(costs.choose(CLASS, false, |_| true, slow), Graph);
        let slow = |how| {
            if how == Streams {
                60.0
            } else {
                90.0
            }
        };
        assert_eq!(
            costs.choose(CLASS, false, |_| true, slow),
            Graph,
            "bound by its launch"
        );
        // For a plan alone, nothing of a graph's launch is hidden.
        let slow = |_| 200.0;
        assert_eq!(costs.choose(CLASS, false, |_| true, slow), Graph);
        assert_eq!(costs.choose(CLASS, true, |_| true, slow), Batch);
        // An executor that would be slower in any case is not tried.
        let mut costs = Costs::default();
        let slow = |how| {
            if how == Batch {
                320.0
            } else {
                200.0
            }
        };
        let taken: Vec<ExecutorName> = (0..6)
            .map(|_| {
                let how = costs.choose(CLASS, false, |_| true, slow);
                costs.note(CLASS, how, price(how));
                how
            })
            .collect();
        assert!(!taken.contains(&Batch), "{taken:?}");
        // An executor that is not possible is not taken, and another class begins anew.
        let only = |how| how == Streams;
        assert_eq!(costs.choose(CLASS, false, only, |_| 0.0), Streams);
        assert_eq!(
            costs.choose((6, 2), false, |how| how != Streams, |_| 0.0),
            Batch
        );
    }

    #[test]
    fn a_way_that_becomes_dear_is_left() {
        let mut costs = Costs::default();
        for how in ExecutorName::ALL {
            for _ in 0..TRIALS {
                costs.note(CLASS, how, if how == Graph { 50 } else { 70 });
            }
        }
        assert_eq!(costs.choose(CLASS, false, |_| true, |_| 0.0), Graph);
        for _ in 0..64 {
            costs.note(CLASS, Graph, 500);
        }
        assert_ne!(costs.choose(CLASS, false, |_| true, |_| 0.0), Graph);
    }
}
