//! What copies take by the clock of the device: events with time stamps on a lane, before and after each
//! copy. The processor's clock would also count the launch, and the time until somebody looks.

use super::copy::Copy;
use super::error::Result;
use super::state::{ContextKey, Entered};
use super::types::{code, Event, EVENT_DEFAULT};

/// Copies that are timed.
#[derive(Debug)]
pub struct Timed {
    key: ContextKey,
    marks: Vec<Event>,
    bytes: Vec<u64>,
}

impl Timed {
    /// Events for some copies, in the context that is entered, which is that of the key.
    pub(super) fn new(entered: &Entered, key: ContextKey, copies: &[Copy]) -> Result<Timed> {
        let mut timed = Timed {
            key,
            marks: Vec::with_capacity(copies.len() + 1),
            bytes: copies.iter().map(Copy::bytes).collect(),
        };
        for _ in 0..=copies.len() {
            let mut event = Event::NULL;
            entered.driver().event_create(&mut event, EVENT_DEFAULT)?;
            timed.marks.push(event);
        }
        Ok(timed)
    }

    pub(super) fn marks(&self) -> &[Event] {
        &self.marks
    }

    /// The length of each copy and its time, us, once all are done. Does not wait.
    pub fn times(&self) -> Result<Option<Vec<(u64, f64)>>> {
        let entered = Entered::enter_same(self.key)?;
        let driver = entered.driver();
        let last = self.marks[self.marks.len() - 1];
        match driver.event_query(last) {
            Err(error) if error.is(code::NOT_READY) => return Ok(None),
            result => result?,
        }
        let time = |(ends, bytes): (&[Event], &u64)| {
            let mut ms = 0.0;
            driver.event_elapsed_time(&mut ms, ends[0], ends[1])?;
            Ok((*bytes, f64::from(ms) * 1e3))
        };
        let times = self.marks.windows(2).zip(&self.bytes).map(time);
        times.collect::<Result<Vec<_>>>().map(Some)
    }
}

impl Drop for Timed {
    fn drop(&mut self) {
        // Events of a context that is gone are gone with it.
        if let Ok(entered) = Entered::enter_same(self.key) {
            for event in &self.marks {
                // SAFETY: made by `new`, destroyed once; the driver keeps one that is still to be recorded.
                let _ = unsafe { entered.driver().event_destroy(*event) };
            }
        }
    }
}
