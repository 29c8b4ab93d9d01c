//! Happens-before over the bytes of device and pinned memory.
//!
//! When an operation starts, its accesses are compared with those that started before it. Two
//! that overlap, one of them a write, must be ordered in one of two ways:
//! - **by history**: the later one's history (a vector clock over streams, joined along stream
//!   order, events and graph edges when it is issued) holds the earlier one's position;
//! - **by observation**: some host saw the earlier one complete (a synchronize or a successful
//!   query, or a stream wrote a value after it) before the later one was issued, or before a wait
//!   for a value that the later one depends on was satisfied. What one process sees it may tell
//!   another by any means, so a node-wide count of observations is the measure: an operation
//!   knows all that was observed up to its issue.
//!
//! Both are facts about the program as it ran, so an ordered pair is never reported. Records are
//! bounded: forgetting one loses a report and makes none.

use crate::shared::{Body, Record, MAX_RECORDS};
use std::sync::Arc;

/// What an operation is ordered after: for each stream, the highest position. Sorted by stream.
pub type History = Arc<Vec<(u64, u64)>>;

/// Joins `b` into `a`.
pub fn join(a: &mut Vec<(u64, u64)>, b: &[(u64, u64)]) {
    for &(stream, position) in b {
        match a.binary_search_by_key(&stream, |e| e.0) {
            Ok(i) => a[i].1 = a[i].1.max(position),
            Err(i) => a.insert(i, (stream, position)),
        }
    }
}

/// True when `history` holds `position` of `stream`.
pub fn holds(history: &[(u64, u64)], stream: u64, position: u64) -> bool {
    history
        .binary_search_by_key(&stream, |e| e.0)
        .is_ok_and(|i| history[i].1 >= position)
}

/// Bytes that an operation reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Allocation identity or pinned region.
    pub space: u64,
    /// First byte within it.
    pub start: u64,
    /// Bytes a row.
    pub width: u64,
    /// Distance of rows.
    pub pitch: u64,
    /// Rows.
    pub rows: u64,
    /// Writes.
    pub write: bool,
    /// By atomic operations only.
    pub atomic: bool,
    /// Address in the process, for messages.
    pub address: u64,
}

impl Access {
    fn end(&self) -> u64 {
        self.start + self.rows.saturating_sub(1) * self.pitch + self.width
    }

    /// True when a row meets `start..end`.
    fn meets(&self, start: u64, end: u64) -> bool {
        if self.rows <= 1 || self.pitch == 0 {
            return self.start < end && start < self.start + self.width;
        }
        // The first row that ends behind `start`.
        let behind = (start + 1).saturating_sub(self.start + self.width);
        let row = behind.div_ceil(self.pitch);
        row < self.rows && self.start + row * self.pitch < end
    }

    /// True when the two share a byte.
    pub fn overlaps(&self, other: &Access) -> bool {
        if self.space != other.space
            || self.width == 0
            || other.width == 0
            || self.rows == 0
            || other.rows == 0
        {
            return false;
        }
        if self.end() <= other.start || other.end() <= self.start {
            return false;
        }
        let (few, many) = if self.rows <= other.rows {
            (self, other)
        } else {
            (other, self)
        };
        (0..few.rows).any(|r| {
            let start = few.start + r * few.pitch;
            many.meets(start, start + few.width)
        })
    }
}

/// Kinds of operations, for messages.
pub const KINDS: &[&str] = &[
    "copy",
    "memset",
    "kernel",
    "write-value",
    "free",
    "allocation",
];

/// Who accesses.
#[derive(Clone, Copy)]
pub struct Actor<'a> {
    /// Index into [`KINDS`].
    pub kind: u8,
    /// Stream identity.
    pub stream: u64,
    /// Position in the stream.
    pub position: u64,
    /// What it is ordered after.
    pub history: &'a [(u64, u64)],
    /// Observations it knows.
    pub known: u64,
    /// Row of the process.
    pub proc: u16,
    /// Process id.
    pub pid: u32,
}

/// Two accesses that nothing orders.
#[derive(Clone, Copy)]
pub struct Race {
    /// The one that started first.
    pub earlier: Record,
    /// The one that starts now.
    pub later: Record,
}

/// Names one side: kind, process, stream, direction, range.
pub fn describe(r: &Record) -> String {
    let kind = KINDS
        .get(usize::from(r.kind))
        .copied()
        .unwrap_or("operation");
    let verb = if r.write { "writes" } else { "reads" };
    let rows = if r.rows > 1 {
        format!(" x {} rows", r.rows)
    } else {
        String::new()
    };
    let end = r.address + r.width;
    format!(
        "{kind} in process {} stream {} {verb} {:#x}..{end:#x}{rows}",
        r.pid, r.stream, r.address
    )
}

impl Body {
    /// Enters the accesses of an operation that starts, and returns what races with them.
    pub fn start_accesses(
        &mut self,
        actor: Actor<'_>,
        accesses: &[Access],
        oldest_known: u64,
    ) -> Vec<Race> {
        let mut races = Vec::new();
        for access in accesses {
            let later = record(&actor, access);
            for earlier in &self.records[..self.records_len as usize] {
                if !(earlier.write || access.write) || (earlier.atomic && access.atomic) {
                    continue;
                }
                let same = earlier.stream == actor.stream && earlier.position <= actor.position;
                let ordered = same
                    || earlier.observed <= actor.known
                    || holds(actor.history, earlier.stream, earlier.position);
                if !ordered && access.overlaps(&as_access(earlier)) {
                    races.push(Race {
                        earlier: *earlier,
                        later,
                    });
                }
            }
        }
        for access in accesses {
            self.push_record(record(&actor, access), oldest_known);
        }
        races
    }

    fn push_record(&mut self, mut r: Record, oldest_known: u64) {
        if self.records_len as usize == MAX_RECORDS || self.records_len % 64 == 63 {
            self.retain_records(|r| r.observed > oldest_known);
        }
        if self.records_len as usize == MAX_RECORDS {
            // Everything is still open: the older half goes.
            let limit = self.record_order - (MAX_RECORDS / 2) as u64;
            self.retain_records(|r| r.order > limit);
        }
        self.record_order += 1;
        r.order = self.record_order;
        self.records[self.records_len as usize] = r;
        self.records_len += 1;
    }

    fn retain_records(&mut self, keep: impl Fn(&Record) -> bool) {
        let mut kept = 0;
        for i in 0..self.records_len as usize {
            if keep(&self.records[i]) {
                self.records[kept] = self.records[i];
                kept += 1;
            }
        }
        self.records_len = kept as u32;
    }

    /// Marks an operation's accesses as completed.
    pub fn complete_accesses(&mut self, stream: u64, position: u64) {
        for r in &mut self.records[..self.records_len as usize] {
            r.done |= r.stream == stream && r.position == position;
        }
    }

    /// A host has seen everything in `history` complete; `at` is this observation's number.
    pub fn observe(&mut self, history: &[(u64, u64)], at: u64) {
        for r in &mut self.records[..self.records_len as usize] {
            if r.observed == u64::MAX && holds(history, r.stream, r.position) {
                r.observed = at;
            }
        }
    }

    /// Operations of other processes that still run on an allocation.
    pub fn running_on(&self, space: u64, proc: u16) -> Option<Record> {
        let records = &self.records[..self.records_len as usize];
        records
            .iter()
            .find(|r| r.space == space && !r.done && r.proc != proc)
            .copied()
    }

    /// Forgets a process.
    pub fn drop_records_of(&mut self, slot: usize) {
        self.retain_records(|r| usize::from(r.proc) != slot);
    }
}

fn record(actor: &Actor<'_>, a: &Access) -> Record {
    Record {
        space: a.space,
        start: a.start,
        width: a.width,
        pitch: a.pitch,
        rows: a.rows,
        stream: actor.stream,
        position: actor.position,
        observed: u64::MAX,
        order: 0,
        proc: actor.proc,
        kind: actor.kind,
        write: a.write,
        atomic: a.atomic,
        done: false,
        pid: actor.pid,
        address: a.address,
    }
}

fn as_access(r: &Record) -> Access {
    Access {
        space: r.space,
        start: r.start,
        width: r.width,
        pitch: r.pitch,
        rows: r.rows,
        write: r.write,
        atomic: r.atomic,
        address: r.address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(start: u64, width: u64, pitch: u64, rows: u64, write: bool) -> Access {
        Access {
            space: 1,
            start,
            width,
            pitch,
            rows,
            write,
            atomic: false,
            address: start,
        }
    }

    fn body() -> Box<Body> {
        // SAFETY: all-zero bytes are a valid Body: integers, false, and Stage::Free.
        unsafe { Box::<Body>::new_zeroed().assume_init() }
    }

    fn actor(stream: u64, position: u64, history: &[(u64, u64)], known: u64) -> Actor<'_> {
        Actor {
            kind: 0,
            stream,
            position,
            history,
            known,
            proc: 0,
            pid: 1,
        }
    }

    /// Against the definition, byte by byte.
    #[test]
    fn overlap_agrees_with_counting_bytes() {
        let bytes = |a: &Access| -> Vec<u64> {
            (0..a.rows)
                .flat_map(|r| (0..a.width).map(move |b| (r, b)))
                .map(|(r, b)| a.start + r * a.pitch + b)
                .collect()
        };
        let mut seed = 1u64;
        let mut next = |n: u64| {
            seed = seed
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (seed >> 33) % n
        };
        for _ in 0..20_000 {
            let mut make = || {
                let width = 1 + next(6);
                access(next(40), width, width + next(8), 1 + next(5), true)
            };
            let (a, b) = (make(), make());
            let expected = bytes(&a).iter().any(|x| bytes(&b).contains(x));
            assert_eq!(a.overlaps(&b), expected, "{a:?} {b:?}");
            assert_eq!(b.overlaps(&a), expected, "{b:?} {a:?}");
        }
    }

    #[test]
    fn unordered_writes_race_and_ordered_ones_do_not() {
        let w = [access(0, 8, 8, 1, true)];
        let mut b = body();
        assert!(b.start_accesses(actor(1, 1, &[], 5), &w, 0).is_empty());
        assert_eq!(b.start_accesses(actor(2, 1, &[], 5), &w, 0).len(), 1);
        let mut b = body();
        b.start_accesses(actor(1, 1, &[], 5), &w, 0);
        assert!(
            b.start_accesses(actor(2, 1, &[(1, 1)], 5), &w, 0)
                .is_empty(),
            "by history"
        );
        let mut b = body();
        b.start_accesses(actor(1, 1, &[], 5), &w, 0);
        b.observe(&[(1, 1)], 6);
        assert!(
            b.start_accesses(actor(2, 1, &[], 6), &w, 0).is_empty(),
            "issued after the observation"
        );
        assert_eq!(
            b.start_accesses(actor(3, 1, &[], 5), &w, 0).len(),
            2,
            "issued before it"
        );
    }

    #[test]
    fn reads_and_atomics_do_not_race_among_themselves() {
        let mut b = body();
        b.start_accesses(actor(1, 1, &[], 0), &[access(0, 8, 8, 1, false)], 0);
        assert!(b
            .start_accesses(actor(2, 1, &[], 0), &[access(0, 8, 8, 1, false)], 0)
            .is_empty());
        let atomic = Access {
            atomic: true,
            ..access(64, 8, 8, 1, true)
        };
        b.start_accesses(actor(1, 2, &[], 0), &[atomic], 0);
        assert!(b
            .start_accesses(actor(2, 2, &[], 0), &[atomic], 0)
            .is_empty());
    }

    #[test]
    fn records_stay_bounded() {
        let mut b = body();
        for i in 0..3 * MAX_RECORDS as u64 {
            b.start_accesses(actor(1, i, &[], 0), &[access(i * 8, 8, 8, 1, false)], 0);
        }
        assert!(b.records_len as usize <= MAX_RECORDS);
    }
}
