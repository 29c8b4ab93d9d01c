//! What is launched when, and together with what.

use super::{note_traced, Launch, Mapped, Member, Queue, State, Waiting};
use crate::cuda::copy::{self, Copy, OfEach};
use crate::cuda::driver::clock_ns;
use crate::cuda::error::{Error, Result};
use crate::cuda::forecast::FORECAST_FROM;
use crate::cuda::state::Entered;
use crate::cuda::types::{Event, EVENT_DISABLE_TIMING};
use crate::policy::{decided, launch};
use crate::stats::{self, Counter};
use crate::trace::{Copying, Launched};
use std::sync::atomic::Ordering;

/// Whether a copy is not for a batch that has these, of each of which it is said whether it reads a peer's memory. In a batch
/// copies have no order among them. Bandwidth tests receive a window in one place, where any message may be the last; but one
/// that lies in host memory is not to be written while another one is.
fn is_apart(batch: &[Copy], kinds: &[bool], next: &Copy, kind: bool) -> bool {
    let mut others = batch.iter().zip(kinds);
    others.any(|(copy, other)| *other != kind && copy.overlaps(next))
}

impl Queue {
    /// Launches what waits, unless the stream has enough to do.
    pub(in crate::cuda) fn launch(&self) {
        let mut done = Mapped::default();
        let mut state = self.state.lock();
        state.is_fresh = false;
        if state.may_launch() {
            self.feed(&mut state, &mut done);
        }
    }

    /// While more is being queued: launches what waits if that is much.
    pub(in crate::cuda) fn launch_ahead(&self) {
        let mut done = Mapped::default();
        let mut state = self.state.lock();
        let batch = state.waiting.iter().take(launch::BATCH_COUNT_MAX);
        let bytes = batch.map(|row| row.copy.bytes()).sum::<u64>();
        if decided!("launch.goes_ahead", bytes, launch::goes_ahead(bytes)) {
            self.feed(&mut state, &mut done);
        }
    }

    /// Launches what waits. If the stream had enough to do when last asked, it is asked again first.
    fn feed(&self, state: &mut State, done: &mut Mapped) {
        let fed = Entered::ask(self.key).and_then(|entered| {
            if !launch::has_room(state.flying.len()) {
                self.reap(state, &entered, done)?;
            }
            self.launch_waiting(state, &entered);
            Ok(())
        });
        // Whoever polls one of the copies tries again, or finds out.
        if let Err(error) = fed {
            stats::add(Counter::DriverRetries, 1);
            log::debug!("launching copies: {error}");
        }
    }

    pub(super) fn launch_waiting(&self, state: &mut State, entered: &Entered) {
        while state.may_launch() {
            self.launch_some(state, entered);
        }
    }

    /// Launches the oldest of what waits, as many as make a batch. Those that the driver refuses have failed.
    pub(super) fn launch_some(&self, state: &mut State, entered: &Entered) {
        if state.waiting.len() == 1 {
            // The rule, where a message is waited for: nothing is allocated for it.
            let only = state.waiting.pop_front();
            only.into_iter()
                .for_each(|only| self.launch_only(state, entered, only));
            return;
        }
        let (mut copies, mut members, mut mappings): (OfEach<Copy>, OfEach<Member>, _) =
            (OfEach::new(), OfEach::new(), Mapped::default());
        let (mut bytes, mut kinds): (u64, OfEach<bool>) = (0, OfEach::new());
        let mut traced: OfEach<Option<Copying>> = OfEach::new();
        loop {
            let may_join = |next: &&Waiting| {
                let count = copies.len();
                let is_apart = is_apart(&copies, &kinds, &next.copy, next.mapping.is_some());
                decided!(
                    "launch.joins",
                    (count, bytes, is_apart),
                    launch::joins(count, bytes, is_apart)
                )
            };
            let Some(next) = state.waiting.front().filter(may_join) else {
                break;
            };
            let kind = next.mapping.is_some();
            let Some(next) = state.waiting.pop_front() else {
                break;
            };
            if next.member.is_wanted() {
                kinds.push(kind);
                bytes += next.copy.bytes();
                copies.push(next.copy);
                members.push(next.member);
                traced.push(next.traced);
                next.mapping
                    .into_iter()
                    .for_each(|mapping| mappings.push(mapping));
            }
        }
        if copies.is_empty() {
            return;
        }
        let last = members.last().map_or(0, |member| member.number);
        let started = self.start(state, entered, (last, bytes), &mut mappings, || {
            copy::start_all(entered, self.stream, &copies)
        });
        if started.is_ok() {
            note_traced(state, traced.into_iter().flatten());
            if copies.len() > 1 {
                stats::add(Counter::CopiesBatched, copies.len() as u64);
            }
            return;
        }
        stats::add(Counter::DriverRetries, 1);
        // One by one, so that only those fail that must. Copying twice what was started before does no harm: the sources
        // stay as they are until their copies are done.
        for ((copy, member), traced) in copies.iter().zip(members).zip(traced) {
            let mut held = mappings.clone();
            let this = (member.number, copy.bytes());
            let started = self.start(state, entered, this, &mut held, || {
                copy::start(entered, self.stream, copy)
            });
            match started {
                Ok(()) => note_traced(state, traced),
                Err(error) => self.fail(state, [member], error),
            }
        }
    }

    /// The same of one copy.
    fn launch_only(&self, state: &mut State, entered: &Entered, only: Waiting) {
        let Waiting {
            member,
            copy,
            mapping,
            traced,
        } = only;
        if !member.is_wanted() {
            return;
        }
        let mut held = Mapped::from(mapping);
        let this = (member.number, copy.bytes());
        let mut start = || {
            self.start(state, entered, this, &mut held, || {
                copy::start(entered, self.stream, &copy)
            })
        };
        let started = start().or_else(|_| {
            stats::add(Counter::DriverRetries, 1);
            start()
        });
        match started {
            Ok(()) => note_traced(state, traced),
            Err(error) => self.fail(state, [member], error),
        }
    }

    /// Keeps an error for the owners of copies.
    pub(super) fn fail(
        &self,
        state: &mut State,
        members: impl IntoIterator<Item = Member>,
        error: Error,
    ) {
        let rows = members.into_iter().map(|member| (member, error));
        state.failed.extend(rows);
        state.failed.retain(|(member, _)| member.is_wanted());
        self.failures.store(state.failed.len(), Ordering::Release);
    }

    /// Starts copies by `start`, the last of which has this number, of so many bytes in all, and notes them down: the mappings
    /// are kept until their end. On an error none runs any more, and the mappings are left to the caller.
    pub(super) fn start(
        &self,
        state: &mut State,
        entered: &Entered,
        (last, bytes): (u64, u64),
        mappings: &mut Mapped,
        start: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if let Some(end) = state.end {
            return Err(end.error());
        }
        self.seal(state, entered)?;
        if let Err(error) = start() {
            // What this call has started must not run on once its caller believes it failed.
            let _ = entered.driver().stream_synchronize(self.stream);
            return Err(error);
        }
        state.flying.push_back(Launch {
            last,
            extent: (bytes >= FORECAST_FROM).then(|| (bytes, clock_ns())),
            event: None,
            mappings: std::mem::take(mappings),
            traced: Launched::default(),
        });
        if state.flying.len() == 1 {
            self.forecast(state);
        }
        Ok(())
    }

    /// Marks the end of what was launched last, before anything comes behind it.
    pub(super) fn seal(&self, state: &mut State, entered: &Entered) -> Result<()> {
        if state.flying.back().is_none_or(|last| last.event.is_some()) {
            return Ok(());
        }
        let event = self.take_event(state, entered)?;
        if let Err(error) = entered.driver().event_record(event, self.stream) {
            state.idle.push(event);
            return Err(error);
        }
        if let Some(last) = state.flying.back_mut() {
            last.event = Some(event);
        }
        Ok(())
    }

    fn take_event(&self, state: &mut State, entered: &Entered) -> Result<Event> {
        if let Some(event) = state.idle.pop() {
            return Ok(event);
        }
        let mut event = Event::NULL;
        entered
            .driver()
            .event_create(&mut event, EVENT_DISABLE_TIMING)?;
        Ok(event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_kinds_of_copies_to_one_place_are_not_in_one_batch() {
        let to = |dst, bytes| Copy::Linear {
            dst,
            src: 0x9000,
            bytes,
        };
        let rows = Copy::Rows {
            dst: 100,
            dst_pitch: 10,
            src: 0,
            src_pitch: 4,
            width: 4,
            rows: 5,
        };
        let batch = [to(0, 8), to(64, 8), rows];
        let kinds = [true, true, false];
        for (next, kind, expected) in [
            (to(0, 8), true, false),
            (to(0, 8), false, true),
            (to(7, 2), false, true),
            (to(8, 56), false, false),
            (to(60, 8), false, true),
            (to(149, 1), true, true),
            (to(150, 1), true, false),
            (to(149, 1), false, false),
        ] {
            let found = is_apart(&batch, &kinds, &next, kind);
            assert_eq!(found, expected, "{next:?} {kind}");
        }
    }
}
