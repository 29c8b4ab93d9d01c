//! What a rank's calls and messages did, written to a file while it runs (`ANABRANCH_TRACE`).
//!
//! A thread puts records of 64 bytes into a ring of its own, and waits for nobody: what does not fit is dropped and
//! counted. A thread of this room's writes the rings to the file ten times a second, when one is half full, and at the
//! end. So a process that is killed loses its last tenth of a second.
//!
//! A loop of tests is one record for up to a millisecond, as long as nothing else happens in it: they would fill the ring.
//!
//! A message that is under way has its record in a table ([`open`]), where its states are noted. When it is over the
//! record goes into the ring; so a side of a message is one record, not one for each state.
//!
//! A file has a header, a JSON object that names what the records number, then records, and an [`record::End`] as
//! the last one if the process ended in order.

pub(crate) mod clock;
mod copies;
mod layout;
pub mod nvtx;
mod open;
pub mod read;
pub mod record;
mod ring;
pub mod ucp;
mod write;

use std::cell::{Cell, OnceCell};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

use parking_lot::Mutex;

pub use clock::machine_ns;
use clock::now;
pub use copies::{
    asked, copies_of, copies_of_next, copies_of_none, describe_places, via_relay, CopiesOf,
    Copying, Launched, ViaRelay,
};
pub use open::Followed;
use record::{Call, Comm, Fallback, Message, Moment, Outcome, Planned, Record, Words, NO_PEER};
use ring::Ring;
pub use write::{close, flush, open};

/// Tests that are one record are no longer under way than this: a millisecond, or less where times are ticks.
const TESTS_SPAN: u64 = 1_000_000;

/// Records are taken.
static ON: AtomicBool = AtomicBool::new(false);
/// Number of the next message.
static NEXT: AtomicU32 = AtomicU32::new(1);
/// Communicators that messages have been recorded on, by their numbers less 1.
static COMMS: Mutex<Vec<u64>> = Mutex::new(Vec::new());
/// Communicators that get a number.
const COMMS_MAX: usize = 1 << 10;
/// Threads that have recorded anything.
static THREADS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static OWN: OnceCell<Own> = const { OnceCell::new() };
    /// The call that this thread is in, if it is recorded.
    static CALL: Cell<Option<Call>> = const { Cell::new(None) };
    /// Calls of this thread.
    static CALLS: Cell<u64> = const { Cell::new(0) };
    /// The communicator that this thread recorded a message on last, and its number.
    static COMM: Cell<(u64, u16)> = const { Cell::new((0, 0)) };
}

/// What a thread has.
struct Own {
    number: u64,
    ring: Arc<Ring>,
    /// The tests that it has made last, one like the other.
    tests: Cell<Option<Call>>,
}

impl Own {
    fn push(&self, record: Record) {
        self.push_words(&record.encode());
    }

    fn push_words(&self, words: &Words) {
        if self.ring.push(words) {
            write::wake();
        }
    }

    fn push_tests(&self) {
        if let Some(tests) = self.tests.take() {
            self.push(Record::Call(tests));
        }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.push_tests();
    }
}

/// Whether anything is recorded.
#[inline(always)]
pub fn on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// Nothing is recorded any more, and the file is left alone.
pub fn forget() {
    ON.store(false, Ordering::Relaxed);
}

/// Puts a record into this thread's ring, behind the tests before it.
fn put(record: Record) {
    put_words(&record.encode());
}

#[inline]
fn put_words(words: &Words) {
    if !write::has_file() {
        return;
    }
    with_own(|own| {
        own.push_tests();
        own.push_words(words);
    });
}

/// A thread that is about to end has nothing any more; what it would record is dropped.
fn with_own<T>(act: impl FnOnce(&Own) -> T) -> Option<T> {
    let done = OWN.try_with(|own| act(own.get_or_init(new_own)));
    done.inspect_err(|_| write::drop_one()).ok()
}

#[cold]
fn new_own() -> Own {
    let ring = Arc::new(Ring::new(ring::CAPACITY));
    write::add(Arc::clone(&ring));
    Own {
        number: THREADS.fetch_add(1, Ordering::Relaxed),
        ring,
        tests: Cell::new(None),
    }
}

fn thread() -> u64 {
    with_own(|own| own.number).unwrap_or(u64::from(u32::MAX))
}

/// What is known of a call when it is made.
#[derive(Clone, Copy, Debug)]
pub struct Arguments {
    /// Identity of the communicator; 0: not known.
    pub comm: u64,
    /// World rank of the other side, or the rank as it was given if that is negative.
    pub peer: i32,
    /// Tag.
    pub tag: i32,
    /// Count.
    pub count: i64,
    /// Bytes of these elements.
    pub bytes: u64,
}

/// The program makes a call. [`end_call`] records it. A test (`is_test`) is recorded together with those before
/// it that were the same.
pub fn begin_call(function: u16, is_test: bool, arguments: &Arguments) {
    let number = CALLS.get() + 1;
    CALLS.set(number);
    let call = Call {
        number: thread() << 32 | number & u64::from(u32::MAX),
        function,
        begin: now(),
        end: 0,
        comm: arguments.comm,
        peer: arguments.peer,
        tag: arguments.tag,
        count: arguments.count,
        bytes: arguments.bytes,
        times: u32::from(!is_test),
        inside: 0,
    };
    CALL.set(Some(call));
    if !is_test {
        with_own(|own| own.ring.set_current(&Record::Call(call).encode()));
    }
}

/// The call returns to the program.
pub fn end_call() {
    copies::forget_reserved();
    let Some(call) = CALL.take().filter(|_| on()) else {
        return;
    };
    let end = now();
    let inside = end.saturating_sub(call.begin);
    if call.times > 0 {
        with_own(|own| own.ring.end_current());
        return put(Record::Call(Call {
            end,
            inside,
            ..call
        }));
    }
    let is_same = |tests: &Call| {
        let key = |call: &Call| (call.function, call.comm, call.peer, call.tag, call.count);
        key(tests) == key(&call)
            && end.saturating_sub(tests.begin) < TESTS_SPAN
            && tests.times < u32::MAX
    };
    with_own(|own| {
        let tests = match own.tests.take() {
            Some(tests) if is_same(&tests) => Call {
                end,
                times: tests.times + 1,
                inside: tests.inside + inside,
                ..tests
            },
            others => {
                own.tests.set(others);
                own.push_tests();
                Call {
                    end,
                    times: 1,
                    inside,
                    ..call
                }
            }
        };
        own.tests.set(Some(tests));
    });
}

/// The thread that ends the trace has nothing that is not in its ring.
fn settle() {
    with_own(|own| {
        own.push_tests();
        own.ring.end_current();
    });
}

/// Number of the call that this thread is in; 0: none, or none that is recorded.
fn call() -> u64 {
    CALL.get().map_or(0, |call| call.number)
}

/// When a receive was posted, and by which call; all 0 where nothing is recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Post {
    at: u64,
    call: u64,
}

/// A receive is posted now.
#[inline]
pub fn post() -> Post {
    match on() {
        true => Post {
            at: now(),
            call: call(),
        },
        false => Post::default(),
    }
}

/// A message has come to a receive.
pub fn posted(followed: Followed, post: Post) {
    open::update(followed, |message| {
        if let Some(earlier) = message.begin.checked_sub(post.at).filter(|_| post.at != 0) {
            (message.begin, message.call) = (post.at, post.call);
            let times = message.after.iter_mut().flatten();
            times.for_each(|time| *time += earlier);
        }
    });
}

/// Follows one side of a message, which gets a number. Its time, its number and its call are filled in here.
/// `comm`: identity of its communicator; 0: not known. A receiver's message is matched already.
#[cold]
pub fn message(about: Message, comm: u64) -> Followed {
    let begin = now();
    let is_receiver = about.side == record::Side::Receiver;
    let mut after = [None; Moment::COUNT];
    after[Moment::Matched as usize] = is_receiver.then_some(0);
    let followed = open::begin(&Message {
        id: copies::take_id(),
        begin,
        comm: comm_number(comm),
        call: call(),
        after,
        ..about
    });
    match followed.is_any() {
        true => nvtx::begin(followed.id(), &about),
        false => write::drop_one(),
    }
    followed
}

fn comm_number(identity: u64) -> u16 {
    let (known, number) = COMM.get();
    if known == identity {
        return number;
    }
    let mut comms = COMMS.lock();
    let found = comms.iter().position(|comm| *comm == identity);
    let place = found.unwrap_or(comms.len());
    if place >= COMMS_MAX {
        return 0;
    }
    let number = place as u16 + 1;
    if found.is_none() {
        comms.push(identity);
        put(Record::Comm(Comm { number, identity }));
    }
    COMM.set((identity, number));
    number
}

/// A message enters a state.
#[cold]
pub fn change(followed: Followed, state: u8, protocol: u8, moment: Option<Moment>) {
    open::enter(followed, now(), (state, protocol), moment);
    nvtx::change(followed.id(), state, protocol);
}

/// A message is over.
#[cold]
pub fn over(followed: Followed, state: u8, protocol: u8, outcome: Outcome) {
    nvtx::change(followed.id(), state, protocol);
    let ended = open::end(followed, now(), (state, protocol), outcome);
    if let (Some(words), true) = (ended, on()) {
        put_words(&words);
    }
}

/// A message is split: what is expected of it.
#[cold]
pub fn planned(followed: Followed, predicted_ns: u64, bytes: [u64; 3]) {
    if followed.is_any() && on() {
        put(Record::Planned(Planned {
            message: followed.id(),
            predicted_ns,
            bytes,
        }));
    }
}

/// A send of a device buffer does not go by the library's own ways.
#[cold]
pub fn fallback(reason: u8, bytes: u64) {
    put(Record::Fallback(Fallback {
        at: now(),
        reason,
        bytes,
        call: call(),
    }));
}

/// What is known of a message at first: the rest is filled in by [`message`].
pub fn about(side: record::Side, bytes: u64) -> Message {
    Message {
        id: 0,
        side,
        outcome: Outcome::UnderWay,
        state: 0,
        protocol: 0,
        begin: 0,
        peer: NO_PEER,
        tag: 0,
        bytes,
        comm: 0,
        nonce: 0,
        call: 0,
        after: [None; Moment::COUNT],
    }
}

/// This host's name.
#[must_use]
pub fn host() -> String {
    let names = rustix::system::uname();
    names.nodename().to_string_lossy().into_owned()
}

/// The file of a rank: `%r` is its number and `%h` its host; a name without `%r` gets the number at its end, as each rank
/// has a file of its own.
#[must_use]
pub fn file_of(name: &Path, rank: u32, host: &str) -> PathBuf {
    let mut text = name.to_string_lossy().replace("%h", host);
    if !text.contains("%r") {
        text += ".%r";
    }
    PathBuf::from(text.replace("%r", &rank.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_a_file_of_its_own() {
        for (name, file) in [
            ("/t/a", "/t/a.3"),
            ("/t/%r/a-%h.trace", "/t/3/a-node7.trace"),
            ("%h-%r", "node7-3"),
        ] {
            assert_eq!(file_of(Path::new(name), 3, "node7"), Path::new(file));
        }
    }

    /// What a message and its call cost: `cargo test --release --lib trace::tests::cost -- --ignored --nocapture`.
    #[test]
    #[ignore = "a measurement"]
    fn cost() {
        let folder = tempfile::tempdir().expect("a folder");
        open(&folder.path().join("t"), "{}", None).expect("a file");
        let arguments = Arguments {
            comm: 5,
            peer: 1,
            tag: 2,
            count: 8,
            bytes: 8,
        };
        const COUNT: u32 = 1_000_000;
        let mut best = [f64::MAX; 3];
        for _ in 0..5 {
            let begun = std::time::Instant::now();
            for _ in 0..COUNT {
                begin_call(1, false, &arguments);
                end_call();
            }
            let call = begun.elapsed().as_nanos() as f64 / f64::from(COUNT);
            let begun = std::time::Instant::now();
            for _ in 0..COUNT {
                let followed = message(about(record::Side::Sender, 8), 5);
                change(followed, 2, 0, Some(Moment::Matched));
                change(followed, 4, 5, Some(Moment::Moving));
                change(followed, 6, 5, Some(Moment::Landed));
                over(followed, 7, 5, Outcome::Complete);
            }
            let of_message = begun.elapsed().as_nanos() as f64 / f64::from(COUNT);
            let begun = std::time::Instant::now();
            for _ in 0..COUNT {
                let copying = Copying::new([Some([1; 16]), Some([2; 16])], 0, 8, 1);
                Launched::now(copying.into_iter()).ended(0);
            }
            let copy = begun.elapsed().as_nanos() as f64 / f64::from(COUNT);
            for (best, now) in best.iter_mut().zip([call, of_message, copy]) {
                *best = best.min(now);
            }
        }
        println!("ns for a call, a message, a copy: {best:.1?}");
        close(true);
    }
}
