//! How much of the measured rate of the host's memory messages count on, corrected by what they find.
//!
//! What one process measures is not what several get. It also differs from launch to launch, and over time:
//! it depends on where the memory lies, where the ranks run, and what else the machine does. So each message
//! that went through host memory reports whether its part there came late or early, and the next ones count
//! on less or more.

use parking_lot::Mutex;

use crate::model::HostPart;
use crate::stats::{self, Counter};

/// A part that ends later than the others by more than this share of the message's time was too large. The
/// first number is for a single message, the second for a message of a window, where others follow.
const LATE: [f64; 2] = [0.02, 0.15];
/// The limit is this many times larger if nobody else uses the host. The first message of a window is late by
/// a quarter, whatever its part, because the others' chunks follow its own at once.
const LATE_ALONE: f64 = 2.0;
/// A part that is later than this waited for something else, such as memory that was pinned for it.
const NOT_BY_ITSELF: f64 = 1.0;
/// A part that ends this much earlier could be larger. More than one step makes, so that it does not swing to
/// and fro.
const EARLY: f64 = 0.08;
/// So many single messages, or messages of windows, must be early before the part grows, and none between
/// them late. In a window all but the last messages are early, even if the part is far too large.
const EARLY_ONES: [u32; 2] = [4, 32];
/// So many must be late within as many before the part becomes smaller, because one may be late for another
/// reason.
const LATE_ONES: u32 = 2;
/// For so many messages a part that was too large is not tried again: the first time, and longer each time it
/// proves too large again.
const MEMORY: u32 = 32;
const MEMORY_MAX: u32 = 1024;

/// How the part of a message in host memory did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HostFared {
    /// It was over this long before the others, microseconds.
    Before(f64),
    /// Late: some of it had to be taken over.
    TakenOver,
}

/// For single messages and for those of windows: if they use the host beside others, and if they do not.
#[derive(Debug)]
pub struct HostUse {
    beside: [Mutex<Found>; 2],
    alone: [Mutex<Found>; 2],
}

/// What a message counts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Counted {
    /// Others use the host, too.
    pub is_beside: bool,
    /// The part of what host memory carries for all, or of what it carries for one.
    pub part: HostPart,
}

#[derive(Debug)]
struct Found {
    part: HostPart,
    /// How many were early and how many were late recently.
    early: u32,
    late: u32,
    /// Messages since the last late one.
    calm: u32,
    /// The limits from [`LATE`] and [`EARLY_ONES`].
    too_late: f64,
    early_ones: u32,
    too_much: Option<TooMuch>,
    /// Never counts on more than this.
    most: HostPart,
    /// The counters of steps down and up.
    steps: [Counter; 2],
}

#[derive(Clone, Copy, Debug)]
struct TooMuch {
    part: HostPart,
    /// For how many messages that counts, and how many of them are left.
    memory: u32,
    left: u32,
}

impl Default for HostUse {
    fn default() -> HostUse {
        let of = |found: fn(u32) -> Found| [1, 2].map(|window| Mutex::new(found(window)));
        HostUse {
            beside: of(Found::beside),
            alone: of(Found::alone),
        }
    }
}

impl HostUse {
    /// What messages count on in windows of this depth.
    pub(super) fn counted(&self, window: u32, is_beside: bool) -> Counted {
        let part = self.of(window, is_beside).lock().part;
        Counted { is_beside, part }
    }

    /// A message that counted on this is over; its predicted time was `us`.
    pub(super) fn note(&self, window: u32, counted: Counted, how: HostFared, us: f64) {
        let lead = match how {
            HostFared::TakenOver => -1.0,
            // It waited for something else.
            HostFared::Before(lead_us) if lead_us < -us * NOT_BY_ITSELF => return,
            HostFared::Before(lead_us) => lead_us / us,
        };
        let mut found = self.of(window, counted.is_beside).lock();
        found.note(counted.part, lead);
    }

    fn of(&self, window: u32, is_beside: bool) -> &Mutex<Found> {
        let found = if is_beside { &self.beside } else { &self.alone };
        &found[usize::from(window > 1)]
    }
}

impl Found {
    fn beside(window: u32) -> Found {
        Found {
            part: HostPart::at_first(window),
            early: 0,
            late: 0,
            calm: 0,
            too_late: LATE[usize::from(window > 1)],
            early_ones: EARLY_ONES[usize::from(window > 1)],
            too_much: None,
            most: HostPart::MOST,
            steps: [Counter::HostShareLowered, Counter::HostShareRaised],
        }
    }

    /// The rate of a single path was measured as it is used. It may be less at times, and no more is tried.
    fn alone(window: u32) -> Found {
        Found {
            part: HostPart::ALL,
            most: HostPart::ALL,
            too_late: LATE_ALONE * LATE[usize::from(window > 1)],
            steps: [Counter::HostRateLowered, Counter::HostRateRaised],
            ..Found::beside(window)
        }
    }

    fn note(&mut self, part: HostPart, lead: f64) {
        if part != self.part {
            // A message that was planned before the last step.
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
            self.go_to(part.less(), self.steps[0]);
        } else if self.early >= self.early_ones {
            let too_much = self.too_much.filter(|before| before.left > 0);
            let is_too_much = |more: &HostPart| too_much.is_some_and(|before| *more >= before.part);
            let may_be = |more: &HostPart| *more <= self.most && !is_too_much(more);
            self.go_to(part.more().filter(may_be), self.steps[1]);
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

    fn note(host: &HostUse, window: u32, counted: Counted, lead: f64) {
        host.note(window, counted, HostFared::Before(100.0 * lead), 100.0);
    }

    fn beside(host: &HostUse, window: u32) -> Counted {
        host.counted(window, true)
    }

    /// A node whose host memory carries this part of what was measured: messages' host parts end when that
    /// says.
    fn settle(
        host: &HostUse,
        is_beside: bool,
        window: u32,
        carries: f64,
        messages: u32,
    ) -> Vec<f64> {
        let each = |_| {
            let counted = host.counted(window, is_beside);
            let factor = counted.part.factor();
            note(host, window, counted, 1.0 - factor / carries);
            factor
        };
        (0..messages).map(each).collect()
    }

    #[test]
    fn it_settles_where_the_host_is_used_and_late_no_more() {
        for (carries, least, most) in [(0.62, 0.55, 0.72), (1.0, 0.9, 1.16), (1.44, 1.3, 1.66)] {
            let host = HostUse::default();
            settle(&host, true, 16, carries, 3000);
            let mut then = settle(&host, true, 16, carries, 100);
            then.sort_by(f64::total_cmp);
            let [first, last] = [then[0], then[99]];
            assert!(last - first < 0.051, "{carries}: {first} to {last}");
            assert!((least..most).contains(&first), "{carries}: {first}");
            let tried = then.iter().filter(|factor| **factor != first).count();
            assert!(tried < 10, "{carries}: {tried} of 100 too much");
            assert_eq!(beside(&host, 1).part, HostPart::ALL, "not by windows");
            assert_eq!(host.counted(16, false).part, HostPart::ALL, "not alone");
        }
    }

    #[test]
    fn what_was_too_much_is_tried_again_later() {
        let host = HostUse::default();
        settle(&host, true, 1, 0.8, 100);
        let then = settle(&host, true, 1, 1.2, 300);
        assert!(then[0] < 0.81 && then[299] > 1.05, "{then:?}");
    }

    #[test]
    fn one_that_is_late_or_waited_for_something_else_says_nothing() {
        let host = HostUse::default();
        let all = beside(&host, 1);
        let more = Counted {
            part: HostPart::ALL.more().expect("more"),
            ..all
        };
        for _ in 0..50 {
            note(&host, 1, all, -0.5);
            note(&host, 1, all, -5.0);
            note(&host, 1, more, -0.5);
            (0..5).for_each(|_| note(&host, 1, all, 0.0));
        }
        assert_eq!(beside(&host, 1), all);
    }

    #[test]
    fn what_is_taken_over_is_late() {
        let host = HostUse::default();
        let note = |_| host.note(1, beside(&host, 1), HostFared::TakenOver, 100.0);
        (0..4).for_each(note);
        assert!(beside(&host, 1).part < HostPart::ALL);
    }

    #[test]
    fn windows_whose_last_messages_are_late_count_on_less() {
        let host = HostUse::default();
        for is_beside in [true, false] {
            let first = host.counted(16, is_beside);
            for _ in 0..4 {
                let counted = host.counted(16, is_beside);
                (0..14).for_each(|_| note(&host, 16, counted, 0.5));
                (0..2).for_each(|_| note(&host, 16, counted, -0.35));
            }
            assert!(host.counted(16, is_beside).part < first.part);
        }
    }

    /// The rate of a single path was measured: less is counted on while it is late, and all of it again
    /// later, but never more.
    #[test]
    fn alone_less_is_counted_on_only_while_it_is_late() {
        // In a window the lateness of the messages adds up in the last one.
        for (window, most_late) in [(1, 0.05), (16, 0.31)] {
            let host = HostUse::default();
            let factors = |carries, messages| settle(&host, false, window, carries, messages);
            let most = |factors: &[f64]| factors.iter().copied().fold(0.0, f64::max);
            assert_eq!(most(&factors(1.5, 3000)), 1.0);
            let slow = factors(0.7, 3000);
            let late = slow[2900..]
                .iter()
                .filter(|factor| **factor > 0.7 * (1.0 + most_late));
            assert!(late.count() < 10, "{:?}", &slow[2900..]);
            let fast = factors(1.3, 3000);
            assert_eq!((fast[2999], most(&fast)), (1.0, 1.0));
            assert_eq!(
                beside(&host, window).part,
                HostPart::at_first(window),
                "not beside others"
            );
        }
    }
}
