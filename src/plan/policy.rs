//! Which paths a message takes.

use super::paths::PathKind;
use super::shares::{numbers, Problem};
use super::MAX_PATHS;

/// Chooses the paths of a message.
pub trait Policy: Send + Sync {
    /// A set of paths out of [`Problem::allowed`]; what is not in there is left out, and for an empty set the fastest
    /// single path is taken. Which share each has is not the policy's affair: paths that bring nothing get none.
    fn choose(&self, problem: &Problem<'_>) -> u32;
}

/// The paths with which the whole message ends first. A path that gains less than [`Problem::worth`] asks for is left out:
/// its launches cost the processor time that the model does not see.
///
/// Of few paths every set is tried. Of many, one is added after the other, which may miss the best set by a few percent
/// where paths share segments.
pub struct FastestEnd;

/// So many paths have 15 sets.
const FEW: u32 = 4;

impl FastestEnd {
    fn every_set(problem: &Problem<'_>) -> u32 {
        let allowed = problem.allowed();
        let mut best = (f64::INFINITY, 0);
        let mut set = allowed;
        while set != 0 {
            let split = problem.split(set);
            // As if each path but the first took its least gain.
            let others = split.parts().iter().skip(1);
            let worth: f64 = others
                .map(|part| problem.worth(u32::from(part.candidate)))
                .product();
            let score = split.us / worth;
            let relays =
                numbers(set).filter(|number| problem.path(*number).kind() == PathKind::Relay);
            if score < best.0 && relays.count() <= problem.options().relays_max as usize {
                best = (score, set);
            }
            set = (set - 1) & allowed;
        }
        best.1
    }
}

impl Policy for FastestEnd {
    fn choose(&self, problem: &Problem<'_>) -> u32 {
        let options = problem.options();
        if problem.allowed().count_ones() <= FEW {
            return FastestEnd::every_set(problem);
        }
        let direct = problem
            .direct()
            .map(|direct| 1 << direct)
            .filter(|set| set & problem.allowed() != 0);
        let mut set = direct.unwrap_or_else(|| problem.fallback());
        let mut us = problem.split(set).us;
        let is_relay = |number: u32| problem.path(number).kind() == PathKind::Relay;
        let mut relays: u32 = numbers(set).map(|number| u32::from(is_relay(number))).sum();
        // Twice: next to those that came later, one may be worth it that was not before.
        for _ in 0..2 {
            for number in numbers(problem.allowed() & !set) {
                let room = set.count_ones() < MAX_PATHS as u32;
                if !room || (is_relay(number) && relays >= options.relays_max) {
                    continue;
                }
                let with = problem.split(set | 1 << number).us;
                if with < us * problem.worth(number) {
                    (set, us) = (set | 1 << number, with);
                    relays += u32::from(is_relay(number));
                }
            }
        }
        // One that was worth it when it came may not be any more, next to those that came later.
        for number in numbers(set) {
            if set.count_ones() == 1 {
                break;
            }
            let without = problem.split(set & !(1 << number)).us;
            if us >= without * problem.worth(number) {
                (set, us) = (set & !(1 << number), without);
            }
        }
        set
    }
}

/// All paths that are allowed, whatever they gain: for measurements.
pub struct Everything;

impl Policy for Everything {
    fn choose(&self, problem: &Problem<'_>) -> u32 {
        let is_relay = |number: &u32| problem.path(*number).kind() == PathKind::Relay;
        let most = problem.options().relays_max as usize;
        let relays = numbers(problem.allowed()).filter(is_relay).take(most);
        let others = numbers(problem.allowed()).filter(|number| !is_relay(number));
        others
            .chain(relays)
            .take(MAX_PATHS)
            .fold(0, |set, number| set | 1 << number)
    }
}
