//! Predicts when a stream's oldest launch can be over at the earliest, from what the launches before it took.
//! Until then a program that computes need not ask the driver.

/// Launches of fewer bytes are over before the next question anyway (10 us at 400 GB/s), and cost no look at
/// the clock.
pub(super) const FORECAST_FROM: u64 = 4 << 20;
/// The part of the predicted time after which the driver is asked: others may have used the links before.
const SURE: f64 = 0.9;
/// The end of a launch may be seen late by this part of the launch's time, and is still learned from.
const LATE_MAX: u64 = 8;
/// The share of a slower launch in the learned pace. A faster one is believed at once.
const WEIGHT: f64 = 8.0;

/// What is known of a stream's pace, and of its present launch.
#[derive(Debug, Default)]
pub(super) struct Forecast {
    ns_per_byte: Option<f64>,
    now: Option<Under>,
    /// When the oldest launch was last seen not to be over.
    seen_ns: u64,
}

#[derive(Debug)]
struct Under {
    bytes: u64,
    /// The launch has not begun before this time.
    since_ns: u64,
}

impl Forecast {
    /// The stream is at a launch of so many bytes, made at that time. `None`: it has nothing to do, or a
    /// small launch.
    pub(super) fn begin(&mut self, launch: Option<(u64, u64)>) {
        self.now = launch.map(|(bytes, launched_ns)| Under {
            bytes,
            since_ns: launched_ns.max(self.seen_ns),
        });
    }

    /// Whether the present launch is long enough for a forecast.
    pub(super) fn is_kept(&self) -> bool {
        self.now.is_some()
    }

    /// It was not over at that time.
    pub(super) fn note_pending(&mut self, now_ns: u64) {
        self.seen_ns = now_ns;
    }

    /// It was over at that time, and not long before.
    #[allow(clippy::cast_precision_loss)]
    pub(super) fn note_over(&mut self, now_ns: u64) {
        let Some(under) = self.now.take() else { return };
        let took = now_ns.saturating_sub(under.since_ns);
        let late = now_ns.saturating_sub(self.seen_ns.max(under.since_ns));
        if late > took / LATE_MAX {
            return;
        }
        let found = took as f64 / under.bytes as f64;
        self.ns_per_byte = Some(match self.ns_per_byte {
            Some(known) if known < found => known + (found - known) / WEIGHT,
            _ => found,
        });
    }

    /// When it can be over at the earliest; `None` where that is not known.
    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss
    )]
    pub(super) fn due_ns(&self) -> Option<u64> {
        let under = self.now.as_ref()?;
        let takes = self.ns_per_byte? * under.bytes as f64 * SURE;
        Some(under.since_ns + takes as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    /// A launch of 10 MB on an idle stream, asked about at these times after it, the last time over.
    fn launch(forecast: &mut Forecast, at_ns: u64, asked_ns: &[u64]) {
        forecast.begin(Some((10 * MB, at_ns)));
        let (last, pending) = asked_ns.split_last().expect("an end");
        pending
            .iter()
            .for_each(|ns| forecast.note_pending(at_ns + ns));
        forecast.note_over(at_ns + last);
    }

    #[test]
    fn the_pace_is_that_of_launches_whose_end_was_seen() {
        let mut forecast = Forecast::default();
        forecast.begin(Some((10 * MB, 0)));
        assert_eq!(forecast.due_ns(), None, "nothing is known");
        // Seen far too late: it may have been over for long.
        launch(&mut forecast, 1000, &[10_000, 50_000]);
        forecast.begin(Some((10 * MB, 100_000)));
        assert_eq!(forecast.due_ns(), None);
        launch(&mut forecast, 100_000, &[24_000, 25_000]);
        forecast.begin(Some((20 * MB, 200_000)));
        assert_eq!(forecast.due_ns(), Some(200_000 + 45_000));
        // A slower one counts little, a faster one at once.
        launch(&mut forecast, 300_000, &[40_000, 41_000]);
        forecast.begin(Some((10 * MB, 400_000)));
        assert_eq!(forecast.due_ns(), Some(400_000 + 24_300));
        launch(&mut forecast, 400_000, &[19_000, 20_000]);
        forecast.begin(Some((10 * MB, 500_000)));
        assert_eq!(forecast.due_ns(), Some(500_000 + 18_000));
    }

    #[test]
    fn one_behind_another_has_begun_when_that_was_last_seen() {
        let mut forecast = Forecast::default();
        launch(&mut forecast, 0, &[9_500, 10_000]);
        forecast.begin(Some((10 * MB, 20_000)));
        forecast.note_pending(28_000);
        forecast.note_over(40_000);
        // Launched while the other was under way.
        forecast.begin(Some((10 * MB, 21_000)));
        assert_eq!(forecast.due_ns(), Some(28_000 + 9_000));
        forecast.begin(None);
        assert!(forecast.due_ns().is_none() && !forecast.is_kept());
    }

    #[test]
    fn who_comes_late_learns_that_it_was_too_late() {
        // It took 25 us before, and takes 15 from now on. Asked about when it may be over, it is believed to
        // be over, each time sooner.
        let mut forecast = Forecast::default();
        launch(&mut forecast, 0, &[24_000, 25_000]);
        let mut at = 0;
        for _ in 0..7 {
            at += 100_000;
            forecast.begin(Some((10 * MB, at)));
            let due = forecast.due_ns().expect("known");
            forecast.note_pending(due - 1);
            forecast.note_over(due);
        }
        at += 100_000;
        forecast.begin(Some((10 * MB, at)));
        assert!(forecast.due_ns().expect("known") - at < 15_000);
    }
}
