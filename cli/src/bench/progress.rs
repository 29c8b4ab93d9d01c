//! What is said while a row takes long: under a launcher nobody sees that there is progress.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anabranch_engine::config::format_size;

/// A row of which nothing is said before.
const PATIENCE: Duration = Duration::from_secs(4);

/// Says on stderr, from a thread of its own that sleeps else, which row is measured.
pub struct Progress {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    now: Mutex<Now>,
    changed: Condvar,
}

struct Now {
    number: usize,
    bytes: usize,
    since: Instant,
    is_over: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self, total: usize, patience: Duration, say: impl Fn(&str)) {
        let mut now = self.lock();
        while !now.is_over {
            let before = now.number;
            let waited = self.changed.wait_timeout(now, patience);
            now = waited.unwrap_or_else(PoisonError::into_inner).0;
            if !now.is_over && now.number == before && now.since.elapsed() >= patience {
                say(&line(now.number, total, now.bytes, now.since.elapsed()));
            }
        }
    }
}

/// `row 3 of 23: 4M, for 8 s`
fn line(number: usize, total: usize, bytes: usize, since: Duration) -> String {
    let (size, seconds) = (format_size(bytes as u64), since.as_secs());
    format!("row {} of {total}: {size}, for {seconds} s", number + 1)
}

impl Progress {
    /// Begins to watch over so many rows.
    pub fn begin(total: usize) -> Progress {
        let shared = Arc::new(Shared {
            now: Mutex::new(Now {
                number: 0,
                bytes: 0,
                since: Instant::now(),
                is_over: false,
            }),
            changed: Condvar::new(),
        });
        let watched = Arc::clone(&shared);
        let watch = move || watched.watch(total, PATIENCE, crate::complain);
        // Without a thread nothing is said.
        let thread = std::thread::Builder::new().spawn(watch).ok();
        Progress { shared, thread }
    }

    /// This row is measured from now on.
    pub fn row(&self, number: usize, bytes: usize) {
        let mut now = self.shared.lock();
        (now.number, now.bytes, now.since) = (number, bytes, Instant::now());
        drop(now);
        self.shared.changed.notify_one();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // Its panic has been reported.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_row_is_named() {
        let shared = Shared {
            now: Mutex::new(Now {
                number: 2,
                bytes: 4 << 20,
                since: Instant::now(),
                is_over: false,
            }),
            changed: Condvar::new(),
        };
        let said = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            let (shared, said) = (&shared, &said);
            scope.spawn(move || {
                shared.watch(23, Duration::from_millis(10), |line| {
                    said.lock().expect("locked").push(line.to_owned());
                });
            });
            while said.lock().expect("locked").is_empty() {
                std::thread::sleep(Duration::from_millis(1));
            }
            shared.lock().is_over = true;
            shared.changed.notify_one();
        });
        assert_eq!(said.lock().expect("locked")[0], "row 3 of 23: 4M, for 0 s");
    }
}
