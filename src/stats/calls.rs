//! Calls of each MPI function, and the time in them.
//!
//! A thread counts in a table of its own, and the next one goes on with it when that thread has ended, as with the
//! counters. Nothing of this is reached unless `ANABRANCH_STATS` names a file.

use std::cell::{Cell, OnceCell};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::trace::clock::now;

/// Calls of one function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// How many have returned.
    pub calls: u64,
    /// Time in them: in the unit of the clock, or ns in [`Details`](super::Details).
    pub time: u64,
}

/// What a thread writes: nobody else adds to it meanwhile.
#[derive(Default)]
struct Row {
    calls: AtomicU64,
    time: AtomicU64,
}

impl Row {
    fn add(&self, time: u64) {
        let one_more = |word: &AtomicU64, n: u64| {
            let sum = word.load(Ordering::Relaxed).wrapping_add(n);
            word.store(sum, Ordering::Relaxed);
        };
        one_more(&self.calls, 1);
        one_more(&self.time, time);
    }
}

struct Table {
    rows: Box<[Row]>,
    is_taken: AtomicBool,
}

/// Functions that there are, by number.
static FUNCTIONS: AtomicUsize = AtomicUsize::new(0);
/// As many tables as threads have called MPI at the same time.
static TABLES: Mutex<Vec<Arc<Table>>> = Mutex::new(Vec::new());
/// Calls of threads that were ending and had no table any more.
static LATE: Mutex<BTreeMap<u16, Calls>> = Mutex::new(BTreeMap::new());

/// The table that a thread has until it ends.
struct Taken(Arc<Table>);

impl Taken {
    #[cold]
    fn take() -> Taken {
        let mut tables = TABLES.lock();
        let is_mine = |table: &&Arc<Table>| !table.is_taken.swap(true, Ordering::Acquire);
        if let Some(table) = tables.iter().find(is_mine) {
            return Taken(Arc::clone(table));
        }
        let functions = FUNCTIONS.load(Ordering::Relaxed);
        let table = Arc::new(Table {
            rows: (0..functions).map(|_| Row::default()).collect(),
            is_taken: AtomicBool::new(true),
        });
        tables.push(Arc::clone(&table));
        Taken(table)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        // The next one that has it goes on from what this one has written.
        self.0.is_taken.store(false, Ordering::Release);
    }
}

thread_local! {
    static TAKEN: OnceCell<Taken> = const { OnceCell::new() };
    /// The call that this thread is in, by its number plus one, and when it began.
    static CALL: Cell<(u32, u64)> = const { Cell::new((0, 0)) };
}

/// There are so many functions. To be called before the first call is counted.
pub fn set_up(functions: usize) {
    FUNCTIONS.store(functions, Ordering::Relaxed);
}

/// The program makes a call. [`end`] counts it.
pub fn begin(function: u16) {
    CALL.set((u32::from(function) + 1, now()));
}

/// The call returns to the program.
pub fn end() {
    let (number, begun) = CALL.replace((0, 0));
    let Some(function) = number.checked_sub(1) else {
        return;
    };
    let function = function as u16;
    let time = now().saturating_sub(begun);
    let counted = TAKEN.try_with(|taken| {
        let table = &taken.get_or_init(Taken::take).0;
        if let Some(row) = table.rows.get(usize::from(function)) {
            row.add(time);
        }
    });
    if counted.is_err() {
        let mut late = LATE.lock();
        let row = late.entry(function).or_default();
        *row = Calls {
            calls: row.calls + 1,
            time: row.time.wrapping_add(time),
        };
    }
}

/// Calls of this process by function, but for those that nobody has made.
pub fn so_far() -> BTreeMap<u16, Calls> {
    let mut all = LATE.lock().clone();
    for table in TABLES.lock().iter() {
        for (function, row) in (0_u16..).zip(&table.rows) {
            let calls = row.calls.load(Ordering::Relaxed);
            if calls != 0 {
                let sum = all.entry(function).or_default();
                sum.calls = sum.calls.wrapping_add(calls);
                sum.time = sum.time.wrapping_add(row.time.load(Ordering::Relaxed));
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_all_threads_are_counted_also_of_those_that_have_ended() {
        set_up(600);
        // A number that no function of the tests beside this one has.
        let (function, threads, each) = (599_u16, 8, 1000);
        for _ in 0..3 {
            std::thread::scope(|scope| {
                for _ in 0..threads {
                    scope.spawn(|| {
                        for _ in 0..each {
                            begin(function);
                            end();
                        }
                        // A call that was never begun.
                        end();
                    });
                }
            });
        }
        let calls = so_far();
        assert_eq!(calls[&function].calls, 3 * threads * each);
        assert!(!calls.contains_key(&598));
        let at_once = TABLES.lock().len() as u64;
        assert!(at_once <= threads + 1, "{at_once} tables");
    }

    #[test]
    fn the_time_is_that_between_both() {
        set_up(600);
        crate::trace::clock::choose(None);
        let nap = std::time::Duration::from_millis(20);
        begin(597);
        std::thread::sleep(nap);
        end();
        // Ticks, where they come evenly, are no slower than a clock of nanoseconds on any processor in use, or are one.
        assert!(so_far()[&597].time >= 15_000_000);
    }
}
