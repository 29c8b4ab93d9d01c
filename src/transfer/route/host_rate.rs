//! The rate of a GPU's path to the host or back, by runs of copies, while the program may copy as well.

use super::survey::{LARGE, SMALL, TELLS_US};
use crate::model::{fit, Line};

/// A rate to the host or back is believed when the long copies of two runs took the least time, give or take
/// this part of it, and the short ones, give or take half of `TELLS_US`. The program's own copies can keep each
/// copy of a run waiting: see `docs/decisions/two-runs-agree.md`.
const AGREES: f64 = 0.1;
/// After so many runs nothing is believed.
pub(super) const RUNS_MAX: usize = 6;

/// The least time that the short and the long copies of a run took, us.
#[derive(Clone, Copy, Debug)]
pub(super) struct Least {
    small_us: f64,
    large_us: f64,
}

impl Least {
    /// The first copy only brings the engine up to speed, and keeps it busy until the others are launched.
    pub(super) fn of(times: &[(u64, f64)]) -> Least {
        let of = |length: u64| {
            let same = times.iter().skip(1).filter(|(bytes, _)| *bytes == length);
            same.map(|(_, us)| *us).fold(f64::INFINITY, f64::min)
        };
        Least {
            small_us: of(SMALL),
            large_us: of(LARGE),
        }
    }
}

/// The line through the least times of all runs, if two runs took them, and if they tell it: what waits for the
/// program's copies takes equally long, whatever its length.
pub(super) fn believed(runs: &[Least]) -> Option<Line> {
    let least = |us: fn(&Least) -> f64| runs.iter().map(us).fold(f64::INFINITY, f64::min);
    let (small_us, large_us) = (least(|run| run.small_us), least(|run| run.large_us));
    let took_least = |run: &&Least| {
        run.large_us <= large_us * (1.0 + AGREES) && run.small_us <= small_us + TELLS_US / 2.0
    };
    let agree = runs.iter().filter(took_least).count() >= 2;
    let tell = large_us >= small_us + TELLS_US && large_us >= 2.0 * small_us;
    let times = [(SMALL, small_us), (LARGE, large_us)];
    (agree && tell).then(|| fit::line(&times)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs of an H200, and of a simulated node, while the program copied to the host as well; and alone: 55.6 and
    /// 12.3 GB/s.
    #[test]
    fn a_rate_is_believed_when_two_runs_agree() {
        let told = |runs: &[[f64; 6]]| {
            let least = |run: &[f64; 6]| {
                let times: Vec<(u64, f64)> = run
                    .iter()
                    .zip([LARGE, SMALL].into_iter().cycle())
                    .map(|(us, bytes)| (bytes, *us))
                    .collect();
                Least::of(&times)
            };
            let runs: Vec<Least> = runs.iter().map(least).collect();
            believed(&runs).map(|line| (line.gb_s * 10.0).round() / 10.0)
        };
        let alone = [105.5, 7.8, 78.5, 7.8, 78.5, 7.8];
        let waits = [4738.8, 4522.9, 4707.0, 4602.7, 4618.1, 4804.6];
        let waits_too = [4714.3, 81.7, 4753.8, 5251.2, 4906.2, 5021.0];
        assert_eq!(told(&[]), None);
        assert_eq!(told(&[alone]), None, "one run");
        assert_eq!(told(&[alone, alone]), Some(55.6));
        assert_eq!(told(&[waits, waits]), None, "any length takes as long");
        assert_eq!(told(&[waits, waits_too, waits]), None);
        assert_eq!(told(&[waits, alone, waits_too]), None);
        assert_eq!(told(&[waits, alone, waits_too, alone]), Some(55.6));
        let alone = [349.9, 27.3, 347.0, 27.3, 347.0, 27.3];
        let waits = [349.9, 27.3, 3708.4, 27.3, 3708.4, 27.3];
        let late = [349.9, 27.3, 353.0, 3388.8, 674.7, 27.3];
        assert_eq!(told(&[waits, alone]), None);
        assert_eq!(told(&[waits, alone, late]), Some(12.3));
    }
}
