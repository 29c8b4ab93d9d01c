//! What came of the messages of each sender before: how deep its windows are, how they were planned, whether they were
//! split in vain. What the next message does depends on it.

use std::sync::Arc;

use hashbrown::HashMap;
#[cfg(any(test, feature = "golden"))]
use serde::{Deserialize, Serialize};

use super::launch::AHEAD_BYTES;
use super::{stepped, GpuId};

/// The GPUs of a message's two buffers.
pub type Ends = [GpuId; 2];

/// A message that may be split is under way from its sender until this is dropped.
pub struct Flight {
    /// As many as there are of these, and one more, hold it.
    _of_sender: Arc<()>,
}

/// How many messages were under way at once from each sender: programs send windows of the same depth again and again, and
/// the first message of one is to be planned like the rest.
#[derive(Default)]
pub struct Depths(HashMap<u32, Depth>);

/// How a message was planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub enum Planned {
    /// To go over several paths.
    Split,
    /// To take one direct copy for what others use of the links.
    DirectBesideOthers,
    /// To take one direct copy for now, as links are being measured, or for want of staging.
    DirectForNow,
    /// To take one direct copy, on an idle node as well.
    Direct,
}

/// Of one sender.
#[derive(Debug, Default)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub(super) struct Depth {
    /// Held by each message that is under way.
    #[cfg_attr(any(test, feature = "golden"), serde(skip))]
    flights: Arc<()>,
    bytes: u64,
    /// Of the window before.
    last: u32,
    /// Of this window, so far.
    now: u32,
    /// Of single messages, and of those of windows.
    planned: [LastPlanned; 2],
    refused: Refused,
}

/// Single messages that were to be split, and went whole, as what went the other way did. Who would split and is not invited to write
/// loses what an invitation saves, so that this is tried less and less often.
#[derive(Debug, Default)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
struct Refused {
    /// Their length.
    bytes: u64,
    /// How many in a row.
    times: u32,
    /// So many go whole without being tried, and so many of these are left.
    pause: u32,
    left: u32,
}

/// So many messages in a row are offered to be split: who sees the first that it is not invited to write can offer the second one, too.
const TRIES: u32 = 2;
/// Between them, the first time and at most.
const PAUSE: [u32; 2] = [8, 1024];

/// What came of plans.
#[derive(Debug, Default)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
struct LastPlanned {
    /// Between these two GPUs messages of up to so many bytes took one direct copy.
    direct: Option<(Ends, u64)>,
    /// The last one may be split soon.
    is_for_now: bool,
    /// It went directly for want of staging or of measurements, which may be there now.
    lacked: bool,
    /// It went directly for what others used, and so many plans have said since that the next one need not.
    beside_others: Option<u32>,
    /// So many plans in a row said that it would go directly on an idle node, too.
    direct_ones: usize,
    /// Messages that were not planned since one was.
    unplanned: u32,
    /// Between these two GPUs the last one, of so many bytes, left so much to host memory, at its beginning.
    rest: Option<(Ends, u64, u64)>,
}

/// Where single messages went directly beside others, so many plans in a row are to say that one be split. In an exchange of all ranks
/// again and again it takes some rounds until these are in step, and who begins before the others finds their links idle. Jacobi,
/// concurrent exchange on a simulated node of four GPUs, of 56 messages: 3.1 were split without this on average, and 3 of 14 launches
/// took 8 to 15 % longer; 1.6 with it, and none did (`docs/results/sim-paths.txt`).
const SPLIT_AFTER: u32 = 2;

/// Of messages of windows or of several ranks that go directly, and are short or launched together, one of so many is planned: there is
/// no time in which a plan costs nothing. It takes 4 to 5 us where others use the links, 15 to 20 where they never did so in that way
/// before (medians and 90th percentiles, each of four simulated H200s to all). The first of these at first, and the next one after each that
/// has brought nothing new: of windows of 16 of 2 MiB both ways one in 61 is a fiftieth of the time. None has a divisor in common with how
/// deep windows are, so that it is not the same message of each.
const PLANNED_OF: [u32; 5] = [61, 127, 251, 509, 1021];
/// Messages of windows, and those of a rank that deals with several others, go without a plan if they are shorter, mostly, where they
/// would go directly on an idle node, too. Windows of 16 of 2 MiB on two H100s, times the speed with `ANABRANCH_PATHS=direct`, each
/// planned and so: 0.99 and 1.00, both ways 0.986 and 0.994 (`docs/results/h100-x2-all-beside-one.txt`); of 4 both ways 0.962 and 0.987
/// (`h100-x2-all-sizes.txt`, 2). Single messages of 2 MiB on four H100s, each to all, once longer ones have told the ranks of
/// their links, times the speed without the library: each planned 0.87, one of 61 1.04 and 1.08 on two machines, with
/// `ANABRANCH_PATHS=direct` 1.09 and 1.105 (`docs/results/h100-x4-many.txt`, 9). Where each was planned only after all were launched 0.97.
pub const PLANNED_FROM: u64 = 4 << 20;
/// The same of a rank that sends to the sender, too, or deals with others: what it has to do comes in the way of both. Two H200s, windows of 16
/// both ways, each planned from 4 MiB on and from 16: 6 MiB 0.979 and 0.994, 8 MiB 0.984 and 0.999 of one path; one way 12 MiB 1.037 and 1.010, as
/// it takes longer until it is found that they gain (`docs/results/h200-x2-one-path.txt`, 1).
pub const PLANNED_FROM_BOTH: u64 = 16 << 20;
/// Single messages that are shorter are written without being planned, mostly, where they would go directly on an idle node, too.
pub const PLANNED_MEANWHILE_FROM: u64 = 64 << 20;
/// No window is taken for deeper.
const DEPTH_MAX: u32 = 16;

impl LastPlanned {
    /// Whether a message is likely to take one direct copy.
    fn is_likely_direct(&self, ends: Ends, bytes: u64) -> bool {
        let direct = self.direct;
        direct.is_some_and(|(known, most)| known == ends && bytes <= most)
    }

    /// Whether one of the messages that go without a plan, mostly, is to be planned.
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
    /// How deep the window is taken to be of a message that is one of `in_flight`.
    pub(super) fn of(&mut self, bytes: u64, in_flight: u32) -> u32 {
        let in_flight = in_flight.min(DEPTH_MAX);
        if in_flight == 1 || self.bytes != bytes {
            self.last = if self.bytes == bytes { self.now } else { 0 };
            (self.bytes, self.now) = (bytes, 0);
        }
        self.now = self.now.max(in_flight);
        self.now.max(self.last)
    }

    /// Takes note of how a message in a window so deep was planned.
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
            // Of a shorter one it says nothing.
            _ if most < bytes => (known, last.direct_ones),
            _ => (None, 0),
        };
    }

    /// Takes note of what goes through host memory of a single message that is split.
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
            *refused = Refused {
                bytes,
                ..Refused::default()
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
        // It would wait for the plan of its first message.
        let is_one_launch = in_flight > 1 && u64::from(in_flight) * bytes <= AHEAD_BYTES;
        bytes < from
            && last.is_likely_direct(ends, bytes)
            && (is_one_launch || !last.is_for_now)
            && !last.is_planned_again()
    }
}

impl Depths {
    /// A message begins to come that may be split.
    pub fn enter(&mut self, source: u32) -> Flight {
        Flight {
            _of_sender: Arc::clone(&self.of_sender(source).flights),
        }
    }

    /// How many of a sender's have begun, and are not over.
    pub fn in_flight(&self, source: u32) -> u32 {
        let depth = self.0.get(&source);
        depth.map_or(0, |depth| Arc::strong_count(&depth.flights) as u32 - 1)
    }

    fn of_sender(&mut self, source: u32) -> &mut Depth {
        self.0.entry(source).or_default()
    }

    /// How deep the window is taken to be of a message that is one of `in_flight`.
    pub fn of(&mut self, source: u32, bytes: u64, in_flight: u32) -> u32 {
        let depth = self.of_sender(source);
        stepped!(
            "history.of",
            depth,
            (bytes, in_flight),
            depth.of(bytes, in_flight)
        )
    }

    /// Takes note of how a message in a window so deep was planned.
    pub fn planned(&mut self, source: u32, ends: Ends, bytes: u64, in_flight: u32, how: Planned) {
        let depth = self.of_sender(source);
        stepped!(
            "history.planned",
            depth,
            (ends, bytes, in_flight, how),
            depth.planned(ends, bytes, in_flight, how)
        );
    }

    /// Takes note of what goes through host memory of a single message that is split.
    pub fn note_rest(&mut self, source: u32, ends: Ends, bytes: u64, rest: Option<u64>) {
        let depth = self.of_sender(source);
        stepped!(
            "history.note_rest",
            depth,
            (ends, bytes, rest),
            depth.note_rest(ends, bytes, rest)
        );
    }

    /// What a single message is likely to leave to host memory, at its beginning, if it is likely to be split like the one before it.
    pub fn rest(&self, source: u32, ends: Ends, bytes: u64) -> Option<u64> {
        let depth = self.0.get(&source)?;
        stepped!(
            "history.rest",
            depth,
            (ends, bytes),
            depth.rest(ends, bytes)
        )
    }

    /// Whether a single message goes directly all the same, though its plan is to split it: those before it did so beside others, who
    /// may come yet.
    pub fn waits_for_others(&mut self, source: u32) -> bool {
        let depth = self.of_sender(source);
        stepped!(
            "history.waits_for_others",
            depth,
            (),
            depth.waits_for_others()
        )
    }

    /// A single message was offered to be split, and goes whole. Whether those after it had better do so from the start.
    pub fn is_refused_again(&mut self, source: u32, bytes: u64) -> bool {
        let depth = self.of_sender(source);
        stepped!(
            "history.is_refused_again",
            depth,
            bytes,
            depth.is_refused_again(bytes)
        )
    }

    /// Whether a single message goes whole, though it would be split, as those before it were offered in vain.
    pub fn goes_along(&mut self, source: u32, bytes: u64) -> bool {
        let depth = self.of_sender(source);
        stepped!("history.goes_along", depth, bytes, depth.goes_along(bytes))
    }

    /// A single message was split.
    pub fn agreed(&mut self, source: u32) {
        self.of_sender(source).refused = Refused::default();
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

    /// Whether the last message in a window so deep went directly only for want of staging or of
    /// measurements.
    pub fn lacked(&self, source: u32, in_flight: u32) -> bool {
        let depth = self.0.get(&source);
        depth.is_some_and(|depth| depth.lacked(in_flight))
    }

    /// Whether a message is to take one direct copy without being planned, where a plan keeps others waiting. Those of `from` bytes are
    /// planned all the same, and so are those that may be split soon, unless all of their window goes in one launch.
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
        // Of so many messages those that are offered, if the other end never does so.
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
        // How many messages come until one is planned, and it is planned so.
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
