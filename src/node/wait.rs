//! Waiting without starving others: ranks may outnumber cores, so no loop of the library spins for long.

use std::time::Duration;

/// Rounds that only spin, one pause each. What the caller looks at between them takes a fifth of a
/// microsecond and more, and a pause that grew would make it miss by microseconds what comes meanwhile.
const SPIN_ROUNDS: u32 = 64;
/// Of the rounds after those, one in so many gives the core away: that takes as long as two or three looks,
/// and the caller sees what it waits for that much later.
const ROUNDS_PER_YIELD: u32 = 8;
/// Rounds that give the core away before the first sleep.
const YIELD_ROUNDS: u32 = 64;
/// The first sleep; it doubles up to the maximum.
const FIRST_SLEEP: Duration = Duration::from_micros(20);

/// What a waiting loop calls once a round: a few spins, then `yield_now`, then (if asked for) short growing
/// sleeps.
#[derive(Debug, Clone)]
pub struct Backoff {
    round: u32,
    sleep_max: Option<Duration>,
}

impl Default for Backoff {
    fn default() -> Self {
        Self::new()
    }
}

impl Backoff {
    /// Spins, then yields now and then; never sleeps. For waits inside MPI calls, where latency counts.
    pub const fn new() -> Self {
        Self {
            round: 0,
            sleep_max: None,
        }
    }

    /// Spins, yields, then sleeps for a time that doubles up to `sleep_max`. For waits on slow things (peers,
    /// devices).
    pub const fn sleeping(sleep_max: Duration) -> Self {
        Self {
            round: 0,
            sleep_max: Some(sleep_max),
        }
    }

    /// Waits a little, a bit longer than the time before.
    pub fn snooze(&mut self) {
        let round = self.round;
        self.round = round.saturating_add(1);
        let gives_way =
            self.sleep_max.is_some() || round % ROUNDS_PER_YIELD == ROUNDS_PER_YIELD - 1;
        if round < SPIN_ROUNDS || !gives_way {
            std::hint::spin_loop();
            return;
        }
        match (
            self.sleep_max,
            round.checked_sub(SPIN_ROUNDS + YIELD_ROUNDS),
        ) {
            (Some(max), Some(step)) => {
                std::thread::sleep((FIRST_SLEEP * (1 << step.min(10))).min(max))
            }
            _ => std::thread::yield_now(),
        }
    }

    /// How often [`Backoff::snooze`] was called since the last reset.
    pub const fn rounds(&self) -> u32 {
        self.round
    }

    /// True once spinning is over: a good moment to look at rarer conditions (is the peer alive?).
    pub const fn is_yielding(&self) -> bool {
        self.round > SPIN_ROUNDS
    }

    /// Starts over: something moved.
    pub fn reset(&mut self) {
        self.round = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goes_through_its_stages_and_starts_over() {
        let mut backoff = Backoff::sleeping(Duration::from_micros(30));
        assert!(!backoff.is_yielding());
        for _ in 0..SPIN_ROUNDS + YIELD_ROUNDS + 20 {
            backoff.snooze();
        }
        assert!(backoff.is_yielding());
        assert_eq!(backoff.rounds(), SPIN_ROUNDS + YIELD_ROUNDS + 20);
        backoff.reset();
        assert_eq!(backoff.rounds(), 0);
    }

    #[test]
    fn never_overflows() {
        let mut backoff = Backoff::sleeping(Duration::ZERO);
        backoff.round = u32::MAX - 1;
        backoff.snooze();
        backoff.snooze();
        assert_eq!(backoff.rounds(), u32::MAX);
        assert_eq!(backoff.rounds() % ROUNDS_PER_YIELD, ROUNDS_PER_YIELD - 1);
    }
}
