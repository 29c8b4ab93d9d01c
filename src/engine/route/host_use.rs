//! How much of what the host's memory carries messages count on that use it beside others, as they find it.
//!
//! What one process measures is not what several make of it, and it is not the same in every launch: it depends on where the
//! memory lies, and where the ranks run. So each message that went through host memory beside others says whether its part
//! there came late or early, and the next ones count on less or more.

use parking_lot::Mutex;

use crate::model::HostPart;
use crate::stats::{self, Counter};

/// A part that is over later than the others by more than this share of the message's time was too large: that of a single
/// message, and that of one of a window, where others follow.
const LATE: [f64; 2] = [0.02, 0.15];
/// One that is later than this waited for something else, as for memory that was pinned for it.
const NOT_BY_ITSELF: f64 = 1.0;
/// One that is over so much earlier could be larger. More than a step makes, so that it does not go to and fro.
const EARLY: f64 = 0.08;
/// So many of single messages, and of those of windows, must be early before the part grows, with none between them that was
/// late. Of a window all are early but the last ones, even if its part is too large by far.
const EARLY_ONES: [u32; 2] = [4, 32];
/// So many must be late within as many before it becomes smaller: one may be late for another reason.
const LATE_ONES: u32 = 2;
/// Messages for which what was too much is not tried again: the first time, and after it was found to be so again and again.
const MEMORY: u32 = 32;
const MEMORY_MAX: u32 = 1024;

/// How the part of a message in host memory was.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HostFared {
    /// Over so much before the others, microseconds.
    Before(f64),
    /// Late: some of it had to be taken over.
    TakenOver,
}

/// For single messages, and for those of windows.
#[derive(Debug)]
pub struct HostUse([Mutex<Found>; 2]);

#[derive(Debug)]
struct Found {
    part: HostPart,
    /// Those that were early, and those that were late, of late.
    early: u32,
    late: u32,
    /// Messages since the last that was late.
    calm: u32,
    /// Of [`LATE`] and [`EARLY_ONES`].
    too_late: f64,
    early_ones: u32,
    too_much: Option<TooMuch>,
}

#[derive(Clone, Copy, Debug)]
struct TooMuch {
    part: HostPart,
    /// For how many messages that counts, and how many are left of them.
    memory: u32,
    left: u32,
}

impl Default for HostUse {
    fn default() -> HostUse {
        HostUse([1, 2].map(|window| Mutex::new(Found::at_first(window))))
    }
}

impl HostUse {
    /// What messages in windows so deep count on.
    pub(super) fn part(&self, window: u32) -> HostPart {
        self.of(window).lock().part
    }

    /// A message that counted on a part is over, which was to take `us`.
    pub(super) fn note(&self, window: u32, part: HostPart, how: HostFared, us: f64) {
        let lead = match how {
            HostFared::TakenOver => -1.0,
            // It waited for something else.
            HostFared::Before(lead_us) if lead_us < -us * NOT_BY_ITSELF => return,
            HostFared::Before(lead_us) => lead_us / us,
        };
        self.of(window).lock().note(part, lead);
    }

    fn of(&self, window: u32) -> &Mutex<Found> {
        &self.0[usize::from(window > 1)]
    }
}

impl Found {
    fn at_first(window: u32) -> Found {
        Found {
            part: HostPart::at_first(window),
            early: 0,
            late: 0,
            calm: 0,
            too_late: LATE[usize::from(window > 1)],
            early_ones: EARLY_ONES[usize::from(window > 1)],
            too_much: None,
        }
    }

    fn note(&mut self, part: HostPart, lead: f64) {
        if part != self.part {
            // Of a message that was planned before.
            return;
        }
        if let Some(too_much) = &mut self.too_much {
            too_much.left = too_much.left.saturating_sub(1);
        }
        self.calm = self.calm.saturating_add(1);
        match lead {
            lead if lead < -self.too_late => {
                self.late = if self.calm > self.early_ones {
                    1
                } else {
                    self.late + 1
                };
                (self.early, self.calm) = (0, 0);
            }
            lead if lead > EARLY => self.early += 1,
            _ => {}
        }
        if self.late >= LATE_ONES {
            let again = self.too_much.filter(|before| before.part == part);
            let memory = again.map_or(MEMORY, |before| (2 * before.memory).min(MEMORY_MAX));
            self.too_much = Some(TooMuch {
                part,
                memory,
                left: memory,
            });
            self.go_to(part.less(), Counter::HostShareLowered);
        } else if self.early >= self.early_ones {
            let too_much = self.too_much.filter(|before| before.left > 0);
            let is_too_much = |more: &HostPart| too_much.is_some_and(|before| *more >= before.part);
            let more = part.more().filter(|more| !is_too_much(more));
            self.go_to(more, Counter::HostShareRaised);
        }
    }

    fn go_to(&mut self, part: Option<HostPart>, counter: Counter) {
        (self.late, self.early) = (0, 0);
        if let Some(part) = part {
            self.part = part;
            stats::add(counter, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(host: &HostUse, window: u32, part: HostPart, lead: f64) {
        host.note(window, part, HostFared::Before(100.0 * lead), 100.0);
    }

    /// A node whose host carries so much, of what was measured: messages are over in host memory when that says.
    fn settle(host: &HostUse, window: u32, carries: f64, messages: u32) -> Vec<f64> {
        let each = |_| {
            let part = host.part(window);
            note(host, window, part, 1.0 - part.factor() / carries);
            part.factor()
        };
        (0..messages).map(each).collect()
    }

    #[test]
    fn it_settles_where_the_host_is_used_and_late_no_more() {
        for (carries, least, most) in [(0.62, 0.55, 0.72), (1.0, 0.9, 1.16), (1.44, 1.3, 1.66)] {
            let host = HostUse::default();
            settle(&host, 16, carries, 3000);
            let mut then = settle(&host, 16, carries, 100);
            then.sort_by(f64::total_cmp);
            let [first, last] = [then[0], then[99]];
            assert!(last - first < 0.051, "{carries}: {first} to {last}");
            assert!((least..most).contains(&first), "{carries}: {first}");
            let tried = then.iter().filter(|factor| **factor != first).count();
            assert!(tried < 10, "{carries}: {tried} of 100 too much");
            assert_eq!(host.part(1), HostPart::ALL, "not by windows");
        }
    }

    #[test]
    fn what_was_too_much_is_tried_again_later() {
        let host = HostUse::default();
        settle(&host, 1, 0.8, 100);
        let then = settle(&host, 1, 1.2, 300);
        assert!(then[0] < 0.81 && then[299] > 1.05, "{then:?}");
    }

    #[test]
    fn one_that_is_late_or_waited_for_something_else_says_nothing() {
        let host = HostUse::default();
        for _ in 0..50 {
            note(&host, 1, HostPart::ALL, -0.5);
            note(&host, 1, HostPart::ALL, -5.0);
            note(&host, 1, HostPart::ALL.more().expect("more"), -0.5);
            (0..5).for_each(|_| note(&host, 1, HostPart::ALL, 0.0));
        }
        assert_eq!(host.part(1), HostPart::ALL);
    }

    #[test]
    fn what_is_taken_over_is_late() {
        let host = HostUse::default();
        (0..4).for_each(|_| host.note(1, host.part(1), HostFared::TakenOver, 100.0));
        assert!(host.part(1) < HostPart::ALL);
    }

    #[test]
    fn windows_whose_last_messages_are_late_count_on_less() {
        let host = HostUse::default();
        let first = host.part(16);
        for _ in 0..4 {
            let part = host.part(16);
            (0..14).for_each(|_| note(&host, 16, part, 0.5));
            (0..2).for_each(|_| note(&host, 16, part, -0.2));
        }
        assert!(host.part(16) < first);
    }
}
