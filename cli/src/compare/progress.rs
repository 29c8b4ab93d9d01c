//! How far a comparison is, and about how long it will still take: a bar on a terminal, else lines.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Counts launches.
pub struct Progress {
    bar: ProgressBar,
    start: Instant,
    rounds: u32,
    launches: u64,
    done: u64,
    budget: Option<Duration>,
}

impl Progress {
    /// Of so many rounds with so many launches each, which may take no longer than `budget`.
    pub fn new(rounds: u32, launches: u64, budget: Option<Duration>) -> Progress {
        let launches = u64::from(rounds) * launches;
        let template = "{elapsed:>4} {bar:30} launch {pos} of {len}: {msg}";
        let style = ProgressStyle::with_template(template);
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
        Progress {
            bar: ProgressBar::new(launches).with_style(style),
            start: Instant::now(),
            rounds,
            launches,
            done: 0,
            budget,
        }
    }

    /// A launch begins.
    pub fn begin(&self, round: u32, name: &str) {
        let left = left(self.start.elapsed(), self.done, self.launches, self.budget);
        let left = left.map_or_else(String::new, |left| {
            format!(", about {} s left", left.as_secs_f64().ceil())
        });
        self.tell(&format!(
            "round {} of {}: {name}{left}",
            round + 1,
            self.rounds
        ));
    }

    /// Something else is under way.
    pub fn tell(&self, text: &str) {
        if self.bar.is_hidden() {
            let seconds = self.start.elapsed().as_secs_f64();
            crate::complain(&format!("{seconds:5.0} s  {text}"));
        } else {
            self.bar.set_message(text.to_owned());
            self.bar.tick();
        }
    }

    /// The launch is over.
    pub fn end(&mut self) {
        self.done += 1;
        self.bar.inc(1);
    }

    /// Something to be read, above the bar.
    pub fn say(&self, text: &str) {
        self.bar.suspend(|| crate::complain(text));
    }

    /// Takes the bar away.
    pub fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

/// What is left by what there was, and of the budget.
fn left(elapsed: Duration, done: u64, of: u64, budget: Option<Duration>) -> Option<Duration> {
    if done == 0 {
        return None;
    }
    let rest = elapsed.mul_f64(of.saturating_sub(done) as f64 / done as f64);
    Some(budget.map_or(rest, |budget| rest.min(budget.saturating_sub(elapsed))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_by_what_there_was() {
        let s = Duration::from_secs;
        assert_eq!(left(s(1), 0, 15, None), None);
        assert_eq!(left(s(9), 3, 15, None), Some(s(36)));
        assert_eq!(left(s(9), 3, 15, Some(s(20))), Some(s(11)));
        assert_eq!(left(s(30), 3, 15, Some(s(20))), Some(s(0)));
        assert_eq!(left(s(30), 15, 15, None), Some(s(0)));
    }
}
