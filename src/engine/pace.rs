//! Whether the program computes between its calls while messages are under way, or waits for them.
//!
//! The processor time that a message takes while it is under way, in the program's calls that test for it, is
//! lost to the program's own work. Host memory gains a tenth of speed, but both ranks must launch each chunk
//! for it. On two H200s a rank that called MPI_Testall between kernels of 44 us lost 16 to 27 % of its work
//! to that. One copy takes 4 to 5 %, and the MPI library's own way 2 to 4 %
//! (`docs/results/h200-x2-computing.txt`).

use std::time::Duration;

/// The time between two calls counts as at most this much: a program that only waits may be interrupted.
const GAP_MAX_NS: u64 = 100_000;
/// The latest gap makes this part of the mean.
const WEIGHT: u64 = 4;
/// A program that computes this long between calls that test, on average, does not wait.
const COMPUTES_FROM_NS: u64 = 10_000;

/// How the program's calls that test follow one another.
#[derive(Debug, Default)]
pub struct Pace {
    /// When the last of these calls ended, if no call has waited since.
    left_ns: Option<u64>,
    mean_ns: u64,
    waits: bool,
}

impl Pace {
    /// A call that tests begins.
    pub fn begin_test(&mut self, now_ns: u64) {
        self.waits = false;
        if let Some(left_ns) = self.left_ns {
            let gap_ns = now_ns.saturating_sub(left_ns).min(GAP_MAX_NS);
            self.mean_ns = (self.mean_ns * (WEIGHT - 1) + gap_ns) / WEIGHT;
        }
    }

    /// The call ends.
    pub fn end_test(&mut self, now_ns: u64) {
        self.left_ns = Some(now_ns);
    }

    /// A call waits for messages. A program that makes two such calls in a row, with no test between them,
    /// waits.
    pub fn begin_wait(&mut self) {
        self.left_ns = None;
        if std::mem::replace(&mut self.waits, true) {
            self.mean_ns /= 2;
        }
    }

    /// A call has waited for something else: the time was not the program's own work.
    pub fn interrupt(&mut self) {
        self.left_ns = None;
    }

    /// Whether the program computes now, while messages are under way.
    pub fn computes(&self) -> bool {
        !self.waits && self.is_apart()
    }

    /// How long its next test may be waited for; zero if it does not compute.
    pub fn patience(&self) -> Duration {
        match self.is_apart() {
            true => Duration::from_nanos(2 * self.mean_ns),
            false => Duration::ZERO,
        }
    }

    /// Whether the program will likely compute, and not wait, while what it sends now is under way.
    pub fn is_apart(&self) -> bool {
        self.mean_ns >= COMPUTES_FROM_NS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes tests, each `gap_ns` after the one before, which took 1000. Returns whether the program counted
    /// as computing in each.
    fn test(pace: &mut Pace, now_ns: &mut u64, gaps_ns: &[u64]) -> Vec<bool> {
        let mut found = Vec::new();
        for gap_ns in gaps_ns {
            *now_ns += gap_ns;
            pace.begin_test(*now_ns);
            found.push(pace.computes());
            *now_ns += 1000;
            pace.end_test(*now_ns);
        }
        found
    }

    #[test]
    fn who_works_between_tests_computes() {
        let (mut pace, mut now) = (Pace::default(), 7);
        assert_eq!(
            test(&mut pace, &mut now, &[44_000; 3]),
            [false, true, true],
            "the first gap is not known"
        );
        assert_eq!(
            test(&mut pace, &mut now, &[44_000, 300, 44_000, 300]),
            [true; 4],
            "two tests after each other"
        );
    }

    #[test]
    fn who_tests_all_the_time_waits() {
        let (mut pace, mut now) = (Pace::default(), 0);
        assert_eq!(test(&mut pace, &mut now, &[300; 50]), [false; 50]);
        let found = test(&mut pace, &mut now, &[5_000_000, 300, 300, 300, 300, 300]);
        assert!(found[0]);
        assert_eq!(found[4..], [false; 2], "it was interrupted once");
    }

    #[test]
    fn a_call_that_waits_does_not_compute_and_is_no_gap() {
        let (mut pace, mut now) = (Pace::default(), 0);
        test(&mut pace, &mut now, &[44_000; 3]);
        pace.begin_wait();
        assert!(!pace.computes() && pace.is_apart());
        assert_eq!(test(&mut pace, &mut now, &[0]), [true], "as before");
        pace.begin_wait();
        pace.begin_wait();
        pace.begin_wait();
        assert!(!pace.is_apart(), "it only waits by now");
        let (mut pace, mut now) = (Pace::default(), 0);
        for _ in 0..4 {
            assert_eq!(test(&mut pace, &mut now, &[90_000]), [false]);
            pace.interrupt();
        }
    }
}
