//! The history of each sender's earlier messages: how deep its windows are, how its messages were planned,
//! and whether offers to split them were in vain. What the next message does depends on it.

use std::sync::Arc;

use hashbrown::HashMap;
#[cfg(any(test, feature = "golden"))]
use serde::{Deserialize, Serialize};

use super::launch::AHEAD_BYTES;
use super::{stepped, GpuId};

/// The GPUs of a message's two buffers.
pub type Ends = [GpuId; 2];

/// Marks a message that may be split as under way from its sender, until this is dropped.
pub struct InFlightGuard {
    /// Shared by all guards of one sender; the sender's entry holds one more reference.
    _of_sender: Arc<()>,
}

/// How many messages of each sender were under way at once. Programs send windows of the same depth again and
/// again, and the first message of a window should be planned like the rest.
#[derive(Default)]
pub struct Depths(HashMap<u32, Depth>);

/// How a message was planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub enum Planned {
    /// Over several paths.
    Split,
    /// As one direct copy, because others use the links.
    DirectBesideOthers,
    /// As one direct copy for now, because links are being measured or staging is missing.
    DirectForNow,
    /// As one direct copy, on an idle node as well.
    Direct,
}

/// The history of one sender.
#[derive(Debug, Default)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub(super) struct Depth {
    /// Each message that is under way holds a reference.
    #[cfg_attr(any(test, feature = "golden"), serde(skip))]
    flights: Arc<()>,
    bytes: u64,
    /// Depth of the window before.
    last: u32,
    /// Depth of this window so far.
    now: u32,
    /// The last plans of single messages, and of messages of windows.
    planned: [LastPlanned; 2],
    refused: SplitBackoff,
}

/// Single messages that this rank offered to split, and that went whole, because the message the other way
/// went whole. A rank that would split its message and gets no RTR loses what an RTR saves. So it offers less
/// and less often.
#[derive(Debug, Default)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
struct SplitBackoff {
    /// Length of these messages.
    bytes: u64,
    /// How many were refused in a row.
    times: u32,
    /// Length of the present pause: so many messages go whole without an offer. Then how many of these are
    /// left.
    pause: u32,
    left: u32,
}

/// So many messages in a row are offered to be split. The peer sees by the first one that no RTR came, and
/// can offer its own message with the second.
const TRIES: u32 = 2;
/// Messages in a pause between offers: the first time, and at most.
const PAUSE: [u32; 2] = [8, 1024];

/// What came of the last plans.
#[derive(Debug, Default)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
struct LastPlanned {
    /// Between these two GPUs, messages of up to so many bytes took one direct copy.
    direct: Option<(Ends, u64)>,
    /// The last one went directly for now only, and may be split soon.
    is_for_now: bool,
    /// The last one went directly because staging or measurements were missing. They may be there now.
    lacked: bool,
    /// The last one went directly because others used the links. The number counts the plans since then that
    /// would split.
    beside_others: Option<u32>,
    /// So many plans in a row said that the message would go directly on an idle node, too.
    direct_ones: usize,
    /// Messages since the last planned one.
    unplanned: u32,
    /// Between these two GPUs, the last message, of so many bytes, left so many bytes at its beginning to
    /// host memory.
    rest: Option<(Ends, u64, u64)>,
}

/// After single messages went directly because others used the links, so many plans in a row must say that a
/// message be split. In an exchange of all ranks, repeated, it takes some rounds until the ranks are in step,
/// and a rank that begins before the others finds their links idle. Jacobi, concurrent exchange on a
/// simulated node of four GPUs: without this, 3.1 of 56 messages were split on average, and 3 of 14 launches
/// took 8 to 15 % longer. With it, 1.6 were split, and no launch took longer (`docs/results/sim-paths.txt`).
const SPLIT_AFTER: u32 = 2;

/// Some messages go directly and are short or launched together. They belong to windows or come from several
/// ranks. One of so many of these is planned, because a plan always costs time there: 4 to 5 us where others
/// use the links, 15 to 20 where they never used them in that way before (medians and 90th percentiles, each
/// of four simulated H200s to all). The first number holds at first, the next one after each plan that has
/// brought nothing new. Of windows of 16 of 2 MiB both ways, planning one in 61 is a fiftieth of the time. No
/// number has a divisor in common with the depth of a window, so that it is not the same message of each
/// window.
const PLANNED_OF: [u32; 5] = [61, 127, 251, 509, 1021];
/// Messages of windows, and those of a rank that deals with several others, mostly go without a plan if they
/// are shorter and would go directly on an idle node, too. Figures are for each message planned, then for
/// this rule.
/// - Two H100s, windows of 16 of 2 MiB, times the speed with `ANABRANCH_PATHS=direct`: 0.99 and 1.00, both
///   ways 0.986 and 0.994 (`docs/results/h100-x2-all-beside-one.txt`); windows of 4 both ways 0.962 and 0.987
///   (`h100-x2-all-sizes.txt`, 2).
/// - Four H100s, each to all, single messages of 2 MiB, once longer ones have told the ranks of their links,
///   times the speed without the library: each planned 0.87; one of 61 planned 1.04 and 1.08 on two machines;
///   with `ANABRANCH_PATHS=direct` 1.09 and 1.105 (`docs/results/h100-x4-many.txt`, 9). Each planned only
///   after all were launched: 0.97.
pub const PLANNED_FROM: u64 = 4 << 20;
/// The same limit for a rank that also sends to the sender, or deals with others: its other work delays both.
/// Two H200s, windows of 16 both ways, each message planned from 4 MiB on and from 16 MiB on: 6 MiB 0.979 and
/// 0.994, 8 MiB 0.984 and 0.999 of one path. One way 12 MiB had 1.037 and 1.010, because it takes longer to
/// find out that splitting gains (`docs/results/h200-x2-one-path.txt`, 1).
pub const PLANNED_FROM_BOTH: u64 = 16 << 20;
/// Shorter single messages that their sender writes are mostly not planned, where they would go directly on
/// an idle node, too.
pub const PLANNED_MEANWHILE_FROM: u64 = 64 << 20;
/// No window is taken to be deeper.
const DEPTH_MAX: u32 = 16;

impl LastPlanned {
    /// Whether a message is likely to take one direct copy.
    fn is_likely_direct(&self, ends: Ends, bytes: u64) -> bool {
        let direct = self.direct;
        direct.is_some_and(|(known, most)| known == ends && bytes <= most)
    }

    /// Whether to plan this one of the messages that mostly go without a plan.
    fn is_planned_again(&mut self) -> bool {
        let of = PLANNED_OF[self.direct_ones.clamp(1, PLANNED_OF.len()) - 1];
        self.unplanned += 1;
        let is_planned = self.unplanned >= of;
        if is_planned {
            self.unplanned = 0;
        }
        is_planned
    }
}

/// Whether a message is a single one (0), or one of a window.
fn kind(in_flight: u32) -> usize {
    usize::from(in_flight > 1)
}

impl Depth {
    /// How deep the window is taken to be. The message is one of `in_flight`.
    pub(super) fn of(&mut self, bytes: u64, in_flight: u32) -> u32 {
        let in_flight = in_flight.min(DEPTH_MAX);
        if in_flight == 1 || self.bytes != bytes {
            self.last = if self.bytes == bytes { self.now } else { 0 };
            (self.bytes, self.now) = (bytes, 0);
        }
        self.now = self.now.max(in_flight);
        self.now.max(self.last)
    }

    /// Notes how a message in a window so deep was planned.
    pub(super) fn planned(&mut self, ends: Ends, bytes: u64, in_flight: u32, how: Planned) {
        let is_direct = how != Planned::Split;
        let last = &mut self.planned[kind(in_flight)];
        last.is_for_now = matches!(how, Planned::DirectForNow | Planned::DirectBesideOthers);
        last.lacked = how == Planned::DirectForNow;
        last.beside_others = (how == Planned::DirectBesideOthers).then_some(0);
        let known = last.direct.filter(|(known, _)| *known == ends);
        let most = known.map_or(0, |(_, most)| most);
        (last.direct, last.direct_ones) = match how {
            Planned::Direct => (
                Some((ends, most.max(bytes))),
                last.direct_ones.saturating_add(1),
            ),
            _ if is_direct => (Some((ends, most.max(bytes))), 0),
            // A shorter message says nothing about `most`.
            _ if most < bytes => (known, last.direct_ones),
            _ => (None, 0),
        };
    }

    /// Notes how much of a single message goes through host memory, if that is split.
    pub(super) fn note_rest(&mut self, ends: Ends, bytes: u64, rest: Option<u64>) {
        self.planned[kind(1)].rest = rest.map(|rest| (ends, bytes, rest));
    }

    /// See [`Depths::rest`].
    pub(super) fn rest(&self, ends: Ends, bytes: u64) -> Option<u64> {
        let (known, length, rest) = self.planned[kind(1)].rest?;
        (known == ends && length == bytes).then_some(rest)
    }

    /// See [`Depths::waits_for_others`].
    pub(super) fn waits_for_others(&mut self) -> bool {
        let Some(times) = &mut self.planned[kind(1)].beside_others else {
            return false;
        };
        *times += 1;
        *times < SPLIT_AFTER
    }

    /// See [`Depths::is_refused_again`].
    pub(super) fn is_refused_again(&mut self, bytes: u64) -> bool {
        let refused = &mut self.refused;
        if refused.bytes != bytes {
            *refused = SplitBackoff {
                bytes,
                ..SplitBackoff::default()
            };
        }
        refused.times += 1;
        if refused.times < TRIES {
            return false;
        }
        let [least, most] = PAUSE;
        refused.times = 0;
        refused.pause = (2 * refused.pause).clamp(least, most);
        refused.left = refused.pause;
        true
    }

    /// See [`Depths::goes_along`].
    pub(super) fn goes_along(&mut self, bytes: u64) -> bool {
        let refused = &mut self.refused;
        let is_paused = refused.bytes == bytes && refused.left > 0;
        refused.left -= u32::from(is_paused);
        is_paused
    }

    /// See [`Depths::is_likely_direct`].
    pub(super) fn is_likely_direct(&self, ends: Ends, bytes: u64, in_flight: u32) -> bool {
        self.planned[kind(in_flight)].is_likely_direct(ends, bytes)
    }

    /// See [`Depths::lacked`].
    pub(super) fn lacked(&self, in_flight: u32) -> bool {
        self.planned[kind(in_flight)].lacked
    }

    /// See [`Depths::is_unplanned`].
    pub(super) fn is_unplanned(
        &mut self,
        ends: Ends,
        bytes: u64,
        in_flight: u32,
        from: u64,
    ) -> bool {
        let last = &mut self.planned[kind(in_flight)];
        // The launch would wait for the plan of its first message.
        let is_one_launch = in_flight > 1 && u64::from(in_flight) * bytes <= AHEAD_BYTES;
        bytes < from
            && last.is_likely_direct(ends, bytes)
            && (is_one_launch || !last.is_for_now)
            && !last.is_planned_again()
    }
}

impl Depths {
    /// A message that may be split begins to arrive.
    pub fn enter(&mut self, source: u32) -> InFlightGuard {
        InFlightGuard {
            _of_sender: Arc::clone(&self.of_sender(source).flights),
        }
    }

    /// How many messages of a sender are under way.
    pub fn in_flight(&self, source: u32) -> u32 {
        let depth = self.0.get(&source);
        depth.map_or(0, |depth| Arc::strong_count(&depth.flights) as u32 - 1)
    }

    fn of_sender(&mut self, source: u32) -> &mut Depth {
        self.0.entry(source).or_default()
    }

    /// How deep the window is taken to be. The message is one of `in_flight`.
    pub fn of(&mut self, source: u32, bytes: u64, in_flight: u32) -> u32 {
        let depth = self.of_sender(source);
        stepped!(
            "history.of",
            depth,
            (bytes, in_flight),
            depth.of(bytes, in_flight)
        )
    }

    /// Notes how a message in a window so deep was planned.
    pub fn planned(&mut self, source: u32, ends: Ends, bytes: u64, in_flight: u32, how: Planned) {
        let depth = self.of_sender(source);
        stepped!(
            "history.planned",
            depth,
            (ends, bytes, in_flight, how),
            depth.planned(ends, bytes, in_flight, how)
        );
    }

    /// Notes how much of a single message goes through host memory, if that is split.
    pub fn note_rest(&mut self, source: u32, ends: Ends, bytes: u64, rest: Option<u64>) {
        let depth = self.of_sender(source);
        stepped!(
            "history.note_rest",
            depth,
            (ends, bytes, rest),
            depth.note_rest(ends, bytes, rest)
        );
    }

    /// How many bytes at its beginning a single message is likely to leave to host memory, if it is split
    /// like the one before it.
    pub fn rest(&self, source: u32, ends: Ends, bytes: u64) -> Option<u64> {
        let depth = self.0.get(&source)?;
        stepped!(
            "history.rest",
            depth,
            (ends, bytes),
            depth.rest(ends, bytes)
        )
    }

    /// Whether a single message goes directly although its plan is to split it: the messages before it went
    /// directly beside others, and these may come yet.
    pub fn waits_for_others(&mut self, source: u32) -> bool {
        let depth = self.of_sender(source);
        stepped!(
            "history.waits_for_others",
            depth,
            (),
            depth.waits_for_others()
        )
    }

    /// A single message was offered to be split, and goes whole. Returns whether the next ones should go
    /// whole from the start.
    pub fn is_refused_again(&mut self, source: u32, bytes: u64) -> bool {
        let depth = self.of_sender(source);
        stepped!(
            "history.is_refused_again",
            depth,
            bytes,
            depth.is_refused_again(bytes)
        )
    }

    /// Whether a single message goes whole although it would be split, because the messages before it were
    /// offered in vain.
    pub fn goes_along(&mut self, source: u32, bytes: u64) -> bool {
        let depth = self.of_sender(source);
        stepped!("history.goes_along", depth, bytes, depth.goes_along(bytes))
    }

    /// A single message was split.
    pub fn agreed(&mut self, source: u32) {
        self.of_sender(source).refused = SplitBackoff::default();
    }

    /// Whether a message in a window so deep is likely to take one direct copy.
    pub fn is_likely_direct(&self, source: u32, ends: Ends, bytes: u64, in_flight: u32) -> bool {
        let Some(depth) = self.0.get(&source) else {
            return false;
        };
        stepped!(
            "history.is_likely_direct",
            depth,
            (ends, bytes, in_flight),
            depth.is_likely_direct(ends, bytes, in_flight)
        )
    }

    /// Whether the last message in a window so deep went directly only because staging or measurements were
    /// missing.
    pub fn lacked(&self, source: u32, in_flight: u32) -> bool {
        let depth = self.0.get(&source);
        depth.is_some_and(|depth| depth.lacked(in_flight))
    }

    /// Whether a message takes one direct copy without being planned, where a plan keeps others waiting.
    /// Messages of `from` bytes and more are planned. So are those that may be split soon, unless their whole
    /// window goes in one launch.
    pub fn is_unplanned(
        &mut self,
        source: u32,
        ends: Ends,
        bytes: u64,
        in_flight: u32,
        from: u64,
    ) -> bool {
        let Some(depth) = self.0.get_mut(&source) else {
            return false;
        };
        stepped!(
            "history.is_unplanned",
            depth,
            (ends, bytes, in_flight, from),
            depth.is_unplanned(ends, bytes, in_flight, from)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_as_deep_as_the_one_before() {
        let mut depths = Depths::default();
        let mut window = |bytes, count: u32| -> Vec<u32> {
            (1..=count).map(|at| depths.of(3, bytes, at)).collect()
        };
        assert_eq!(window(100, 4), [1, 2, 3, 4]);
        assert_eq!(window(100, 4), [4, 4, 4, 4]);
        assert_eq!(window(100, 1), [4]);
        assert_eq!(window(100, 1), [1], "the depth has changed");
        assert_eq!(window(7, 2), [1, 2], "so has the length");
        assert_eq!(depths.of(4, 7, 1), 1, "another sender");
    }

    #[test]
    fn what_is_refused_is_offered_less_and_less_often() {
        let mut depths = Depths::default();
        // Those of `count` messages that are offered, if the other end never offers.
        let mut offered = |count: u32| -> Vec<u32> {
            let mut is_offered = false;
            let mut offered = Vec::new();
            for at in 0..count {
                if is_offered {
                    offered.push(at);
                    is_offered = !depths.is_refused_again(3, 64);
                } else {
                    is_offered = !depths.goes_along(3, 64);
                }
            }
            offered
        };
        let first = offered(60);
        assert_eq!(first, [1, 2, 12, 13, 31, 32]);
        let all = offered(20000);
        let share = all.len() as f64 / 20000.0;
        assert!((0.001..0.01).contains(&share), "{share}");
        assert!(!depths.goes_along(3, 32), "another length");
        assert!(!depths.goes_along(4, 64), "another sender");
        depths.agreed(3);
        assert!(!depths.goes_along(3, 64), "it was split since");
    }

    #[test]
    fn of_windows_now_this_message_is_planned_and_now_that() {
        for (of, direct_ones) in PLANNED_OF.into_iter().zip(1..) {
            let mut last = LastPlanned {
                direct_ones,
                ..LastPlanned::default()
            };
            let planned = (0..16 * of).map(|_| last.is_planned_again());
            let planned = planned.collect::<Vec<_>>().into_iter().enumerate();
            let at = planned.filter_map(|(at, is)| is.then_some(at % 16));
            let mut at: Vec<usize> = at.collect();
            at.sort_unstable();
            assert_eq!(at, (0..16).collect::<Vec<_>>(), "one of {of}");
        }
    }

    #[test]
    fn what_brings_nothing_new_is_planned_less_and_less_often() {
        let mut depths = Depths::default();
        let (ends, bytes) = ([[1; 16], [2; 16]], PLANNED_FROM - 1);
        depths.planned(3, ends, bytes, 16, Planned::Direct);
        // How many messages come until one is planned; that one is planned as `how` says.
        let mut next = |how: Planned, planned: u64| {
            let is_unplanned =
                |depths: &mut Depths| depths.is_unplanned(3, ends, bytes, 16, PLANNED_FROM);
            let messages = (1..5000).find(|_| !is_unplanned(&mut depths));
            depths.planned(3, ends, planned, 16, how);
            messages.expect("one is planned")
        };
        let often = [(); 7].map(|()| next(Planned::Direct, bytes));
        assert_eq!(often, [61, 127, 251, 509, 1021, 1021, 1021]);
        let longer = next(Planned::Split, 2 * PLANNED_FROM);
        assert_eq!(longer, 1021);
        assert_eq!(next(Planned::DirectForNow, bytes), 1021, "says nothing");
        assert_eq!(next(Planned::Direct, bytes), 1, "for now");
        assert_eq!(next(Planned::Direct, bytes), 61, "from the start");
    }

    #[test]
    fn most_of_what_goes_directly_is_not_planned_where_that_keeps_others_waiting() {
        let mut depths = Depths::default();
        let (ends, short, long) = ([[1; 16], [2; 16]], PLANNED_FROM - 1, PLANNED_FROM);
        let unplanned = |depths: &mut Depths, bytes, in_flight| {
            let of_many = (0..10 * PLANNED_OF[0])
                .filter(|_| depths.is_unplanned(3, ends, bytes, in_flight, PLANNED_FROM));
            of_many.count() as u32
        };
        for in_flight in [1, 16] {
            assert_eq!(unplanned(&mut depths, short, in_flight), 0, "not known");
            depths.planned(3, ends, long, in_flight, Planned::Direct);
            assert_eq!(
                unplanned(&mut depths, short, in_flight),
                10 * (PLANNED_OF[0] - 1)
            );
            assert_eq!(unplanned(&mut depths, long, in_flight), 0);
            depths.planned(3, ends, long, in_flight, Planned::DirectForNow);
            assert_eq!(unplanned(&mut depths, short, in_flight), 0, "for now");
            let one_launch = AHEAD_BYTES / u64::from(in_flight);
            let few = 10 * (PLANNED_OF[0] - 1);
            let expected = if in_flight > 1 { few } else { 0 };
            assert_eq!(
                unplanned(&mut depths, one_launch.min(short), in_flight),
                expected
            );
            depths.planned(3, ends, short, in_flight, Planned::Split);
            assert_eq!(unplanned(&mut depths, short, in_flight), 0, "split");
        }
    }

    #[test]
    fn who_went_directly_beside_others_waits_for_them_once_more() {
        let mut depths = Depths::default();
        let ends = [[1; 16], [2; 16]];
        let mut after = |how: Planned| {
            depths.planned(3, ends, 100, 1, how);
            [0; 3].map(|_| depths.waits_for_others(3))
        };
        let others = [true, false, false];
        assert_eq!(after(Planned::DirectBesideOthers), others);
        assert_eq!(after(Planned::DirectBesideOthers), others, "again");
        for how in [Planned::Split, Planned::DirectForNow, Planned::Direct] {
            assert_eq!(after(how), [false; 3]);
        }
        depths.planned(3, ends, 100, 4, Planned::DirectBesideOthers);
        assert!(!depths.waits_for_others(3), "that was a window");
        assert!(!depths.waits_for_others(4), "another sender");
    }

    #[test]
    fn what_was_planned_to_go_directly_is_likely_to_do_so_again() {
        let mut depths = Depths::default();
        let (ends, others) = ([[1; 16], [2; 16]], [[1; 16], [3; 16]]);
        assert!(!depths.is_likely_direct(3, ends, 1, 1), "nothing is known");
        depths.planned(3, ends, 100, 1, Planned::Direct);
        depths.planned(3, ends, 50, 1, Planned::Direct);
        let likely = [
            (3, ends, 100),
            (3, ends, 101),
            (3, others, 100),
            (4, ends, 100),
        ];
        let likely =
            likely.map(|(source, ends, bytes)| depths.is_likely_direct(source, ends, bytes, 1));
        assert_eq!(likely, [true, false, false, false]);
        depths.planned(3, ends, 200, 1, Planned::Split);
        assert!(
            depths.is_likely_direct(3, ends, 100, 1),
            "longer ones may be split"
        );
        depths.planned(3, ends, 80, 1, Planned::Split);
        assert!(
            !depths.is_likely_direct(3, ends, 50, 1),
            "splitting pays again"
        );
        depths.planned(3, ends, 10, 1, Planned::Direct);
        depths.planned(3, others, 90, 1, Planned::Split);
        assert!(
            !depths.is_likely_direct(3, ends, 10, 1),
            "the last pair counts"
        );
        depths.planned(3, others, 70, 4, Planned::Direct);
        let windows = [2, 16, 1].map(|depth| depths.is_likely_direct(3, others, 70, depth));
        assert_eq!(
            windows,
            [true, true, false],
            "windows are planned by themselves"
        );
        let long = AHEAD_BYTES;
        let is_unplanned = |depths: &mut Depths, in_flight| {
            depths.is_unplanned(3, others, long, in_flight, 2 * long)
        };
        depths.planned(3, others, long, 4, Planned::Direct);
        depths.planned(3, others, long, 1, Planned::DirectForNow);
        assert!(is_unplanned(&mut depths, 4), "that was a single one");
        assert!(!is_unplanned(&mut depths, 1));
        depths.planned(3, others, long, 4, Planned::DirectForNow);
        assert!(depths.is_likely_direct(3, others, 70, 4));
        depths.planned(3, others, long, 1, Planned::Direct);
        assert!(is_unplanned(&mut depths, 1) && !is_unplanned(&mut depths, 4));
    }
}
