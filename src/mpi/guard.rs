//! The gate of every exported function: is the library armed, and is this thread already inside it?
//!
//! **Architecture invariant:** a call that the MPI library makes to itself while it serves one of ours is passed on
//! untouched; only the outermost call of a thread is looked at.

use super::owned::OwnErrhandler;
use super::{native, Comm, Datatype, Function, Out, Slot};
use crate::stats::calls;
use crate::trace::record::NO_PEER;
use crate::trace::{self, Arguments};
use std::any::Any;
use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU8, Ordering};
use std::sync::{Once, OnceLock};
use std::time::Duration;

/// The library takes messages.
const ARMED: u8 = 1;
/// Every exported call is logged at level trace.
const TRACE: u8 = 2;
/// The call named by `PANIC_IN` panics.
const INJECT: u8 = 4;
/// Armed, but messages are passed on.
const ASIDE: u8 = 8;

/// A tool may stand behind the library: see [`tools`](super::tools).
const TOOLS: u8 = 16;
/// Every call is recorded: see [`trace`](crate::trace).
const RECORD: u8 = 32;
/// The time in every call is counted: see [`stats::calls`].
const COUNT: u8 = 64;

/// All that an exported function looks at before it does anything, in one byte.
static GATE: AtomicU8 = AtomicU8::new(TOOLS);

/// The function that panics when `INJECT` is set.
static PANIC_IN: AtomicU16 = AtomicU16::new(0);

/// This thread is in none of our functions.
const OUTSIDE: u8 = 0;
/// This thread is inside an exported function.
const WITHIN: u8 = 1;
/// It is, and records and counts the call and calls error handlers at the end of it.
const OWING: u8 = 2;
/// This thread has been in none of our functions yet.
const NEW: u8 = 3;

/// A thread has called MPI.
static CALLED: AtomicBool = AtomicBool::new(false);
/// So has another one.
static CALLED_BY_SEVERAL: AtomicBool = AtomicBool::new(false);
/// What every thread but the first does before its first call is looked at.
static BEFORE_ANOTHER_CALLS: OnceLock<fn()> = OnceLock::new();

thread_local! {
    /// Whether this thread is inside an exported function. No destructor, so it can be used at any time of a thread's life.
    static INSIDE: Cell<u8> = const { Cell::new(NEW) };
    /// Errors to be raised when this thread leaves: communicators and codes.
    static RAISED: Cell<Vec<(Comm, c_int)>> = const { Cell::new(Vec::new()) };
    /// Where the panic happened that is on its way to the boundary.
    static PANICKED_AT: Cell<Option<String>> = const { Cell::new(None) };
}

fn set(bit: u8, on: bool) {
    if on {
        GATE.fetch_or(bit, Ordering::Relaxed);
    } else {
        GATE.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// Whether exported functions do more than pass the call on.
#[inline(always)]
pub fn armed() -> bool {
    GATE.load(Ordering::Relaxed) & ARMED != 0
}

/// Whether a tool behind the library may wrap functions.
#[inline(always)]
pub(super) fn may_have_tools() -> bool {
    GATE.load(Ordering::Relaxed) & TOOLS != 0
}

/// A tool does, or none.
pub(super) fn set_tools(on: bool) {
    set(TOOLS, on);
}

/// Arms or disarms the library. Called inside MPI_Init, and in MPI_Finalize once everything owed is served.
pub fn set_armed(on: bool) {
    set(ARMED, on);
}

/// Whether messages are taken.
#[inline(always)]
fn is_taking() -> bool {
    GATE.load(Ordering::Relaxed) & (ARMED | ASIDE) == ARMED
}

/// Has messages and requests passed on as if the library were not there, while it follows communicators, or taken again.
pub fn set_aside(on: bool) {
    set(ASIDE, on);
}

/// Whether messages are passed on although the library is armed.
pub fn is_aside() -> bool {
    GATE.load(Ordering::Relaxed) & (ARMED | ASIDE) == ARMED | ASIDE
}

/// Logs every armed call if the level of the log is trace; to be called once the log is set up. Off, it costs nothing.
pub fn trace_calls_if_logged() {
    set(TRACE, log::log_enabled!(log::Level::Trace));
}

/// From now on the named function panics when it is called armed: a test that no panic leaves the library.
pub fn inject_panic(function: Function) {
    PANIC_IN.store(function as u16, Ordering::Relaxed);
    set(INJECT, true);
}

/// Marks this thread as inside the library until dropped.
#[derive(Debug)]
pub struct Guard(());

impl Drop for Guard {
    #[inline(always)]
    fn drop(&mut self) {
        if INSIDE.replace(OUTSIDE) == OWING {
            call_handlers();
        }
    }
}

/// Has the communicator's error handler called as soon as this thread leaves the library: a handler may call MPI, wait
/// for other threads and ranks, or never return, so none is called while the engine is locked or driven.
pub fn raise_on_leaving(comm: Comm, code: c_int) {
    if !inside() {
        native::comm_call_errhandler(comm, code);
        return;
    }
    let noted = RAISED.try_with(|raised| {
        let mut list = raised.take();
        list.push((comm, code));
        raised.set(list);
    });
    if noted.is_ok() {
        INSIDE.set(OWING);
    }
}

/// How long a launcher gets to hand on what was written to stderr before it hears of MPI_Abort: 1 of 20 idle runs of
/// MPICH's lost the last line without, none of 200 with it.
pub const LAST_WORDS: Duration = Duration::from_millis(100);

/// Waits, once in a process, until what was said of an error has reached the user, if raising it may end the job.
fn let_last_words_through(comm: Comm) {
    static SAID: Once = Once::new();
    let Some(abi) = super::abi() else { return };
    let handler = OwnErrhandler::made(abi, |handler| native::comm_get_errhandler(comm, handler));
    if handler.is_ok_and(|handler| !abi.are_same(handler.get(), abi.errors_return)) {
        SAID.call_once(|| std::thread::sleep(LAST_WORDS));
    }
}

#[cold]
#[inline(never)]
fn call_handlers() {
    calls::end();
    trace::end_call();
    // What handlers raise in calls of their own is theirs: the list is taken before the first is called.
    for (comm, code) in RAISED.try_with(Cell::take).unwrap_or_default() {
        let_last_words_through(comm);
        native::comm_call_errhandler(comm, code);
    }
}

/// Enters the library; `None` when this thread is inside it already.
#[inline(always)]
pub fn enter() -> Option<Guard> {
    let state = INSIDE.get();
    if state != OUTSIDE {
        if state != NEW {
            return None;
        }
        note_caller();
    }
    INSIDE.set(WITHIN);
    Some(Guard(()))
}

/// A thread calls MPI for the first time.
#[cold]
#[inline(never)]
fn note_caller() {
    if CALLED.swap(true, Ordering::SeqCst) {
        CALLED_BY_SEVERAL.store(true, Ordering::SeqCst);
        if let Some(act) = BEFORE_ANOTHER_CALLS.get() {
            act();
        }
    }
}

/// Whether more than one thread has ever called MPI.
#[inline]
pub fn has_several_callers() -> bool {
    CALLED_BY_SEVERAL.load(Ordering::Relaxed)
}

/// From now on every thread but the first calls this before its first call of MPI is looked at, when
/// [`has_several_callers`] is true already.
pub fn before_another_calls(act: fn()) {
    BEFORE_ANOTHER_CALLS.get_or_init(|| act);
}

/// As [`enter`], but `None` also while the library is not armed.
#[inline(always)]
pub fn enter_armed() -> Option<Guard> {
    if armed() {
        enter()
    } else {
        None
    }
}

/// As [`enter_armed`], but `None` also while the library stands aside.
#[inline(always)]
pub fn enter_taking() -> Option<Guard> {
    if is_taking() {
        enter()
    } else {
        None
    }
}

/// As [`enter`], for a function that the MPI library lacks and the engine makes of others. `None` also while the library
/// stands aside: then requests are completed without it.
#[cold]
#[inline(never)]
pub fn enter_composing() -> Option<Guard> {
    if is_aside() {
        return None;
    }
    keep_panics();
    enter()
}

/// As [`enter`], for the functions that arm the library.
#[inline(always)]
pub fn enter_arming() -> Option<Guard> {
    keep_panics();
    enter()
}

/// A message has been sent or received from inside another call, by a callback of the program's, say.
static PASSED_ON: AtomicBool = AtomicBool::new(false);

/// A call is passed on without a look at it, as this thread is inside another one, or the library is not armed or stands aside.
/// What is returned is kept until the call returns: its time may be counted.
#[inline(always)]
#[must_use = "the time of the call ends where it is dropped"]
pub fn pass_on(function: Function) -> Option<Guard> {
    if is_taking() {
        note_passed_on(function);
    }
    count_aside(function)
}

/// The same of a call that is no message.
#[inline(always)]
#[must_use = "the time of the call ends where it is dropped"]
pub fn count_aside(function: Function) -> Option<Guard> {
    let gate = GATE.load(Ordering::Relaxed);
    if gate & (ASIDE | COUNT) == ASIDE | COUNT {
        return begin_aside(function);
    }
    None
}

#[cold]
#[inline(never)]
fn begin_aside(function: Function) -> Option<Guard> {
    let entered = enter_armed()?;
    calls::begin(function as u16);
    INSIDE.set(OWING);
    Some(entered)
}

#[cold]
#[inline(never)]
fn note_passed_on(function: Function) {
    let name = function.name();
    if ["send", "recv", "Send", "Recv", "MPI_Start"]
        .iter()
        .any(|part| name.contains(part))
    {
        PASSED_ON.store(true, Ordering::Relaxed);
    }
}

/// Whether a message may have been sent or received of which the engine does not know.
pub fn has_passed_on() -> bool {
    PASSED_ON.load(Ordering::Relaxed)
}

/// Whether this thread is inside an exported function.
#[inline]
pub fn inside() -> bool {
    matches!(INSIDE.get(), WITHIN | OWING)
}

/// What an exported function does first inside its panic boundary: nothing, unless tracing or a test asks for it.
#[inline(always)]
pub fn announce(function: Function, seen: impl FnOnce() -> Seen) {
    let gate = GATE.load(Ordering::Relaxed);
    if gate & (TRACE | INJECT | RECORD | COUNT) != 0 {
        announce_slowly(function, gate, seen);
    }
}

/// Whether anybody wants to know how long calls take.
#[inline(always)]
pub fn is_timed() -> bool {
    GATE.load(Ordering::Relaxed) & (RECORD | COUNT) != 0
}

/// Arguments of a call that most functions have; what a function has not is as in [`Seen::NOTHING`].
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Elements sent, or received by a function that only receives.
    pub count: i64,
    /// Their type.
    pub datatype: Option<Datatype>,
    /// The other rank, or a root.
    pub peer: c_int,
    /// Tag.
    pub tag: c_int,
    /// Communicator.
    pub comm: Option<Comm>,
}

impl Seen {
    /// A call without any of them.
    pub const NOTHING: Seen = Seen {
        count: 0,
        datatype: None,
        peer: NO_PEER,
        tag: 0,
        comm: None,
    };

    /// Where it receives from; a function that sends, too, has said where to.
    pub fn source(&mut self, rank: c_int) {
        if self.peer == NO_PEER {
            self.peer = rank;
        }
    }
}

/// What an argument says: an address says nothing.
pub trait Argument: Sized {
    /// A number.
    fn number(self) -> i64 {
        0
    }

    /// A datatype.
    fn datatype(self) -> Option<Datatype> {
        None
    }

    /// A communicator.
    fn comm(self) -> Option<Comm> {
        None
    }
}

impl Argument for c_int {
    fn number(self) -> i64 {
        i64::from(self)
    }
}

impl Argument for i64 {
    fn number(self) -> i64 {
        self
    }
}

impl Argument for Datatype {
    fn datatype(self) -> Option<Datatype> {
        Some(self)
    }
}

impl Argument for Comm {
    fn comm(self) -> Option<Comm> {
        Some(self)
    }
}

impl<T> Argument for *const T {}
impl<T> Argument for *mut T {}
impl<H> Argument for Slot<'_, H> {}
impl<T> Argument for Out<'_, T> {}

/// Tells world ranks and bytes of a call's arguments.
static DESCRIBE: OnceLock<fn(&Seen) -> Arguments> = OnceLock::new();

/// From now on every call is recorded.
pub fn record_calls(describe: fn(&Seen) -> Arguments) {
    let _ = DESCRIBE.set(describe);
    set(RECORD, true);
}

/// No more.
pub fn stop_recording_calls() {
    set(RECORD, false);
}

/// From now on the time in every call is counted.
pub fn count_calls() {
    set(COUNT, true);
}

/// It asks whether something has happened, and does not wait.
fn is_test(function: Function) -> bool {
    matches!(
        function,
        Function::Test
            | Function::Testany
            | Function::Testall
            | Function::Testsome
            | Function::Iprobe
            | Function::Improbe
            | Function::RequestGetStatus
            | Function::RequestGetStatusAny
            | Function::RequestGetStatusAll
            | Function::RequestGetStatusSome
    )
}

/// The call is recorded when this thread leaves.
fn record(function: Function, seen: &Seen) {
    if let Some(describe) = DESCRIBE.get() {
        trace::begin_call(function as u16, is_test(function), &describe(seen));
        if inside() {
            INSIDE.set(OWING);
        }
    }
}

#[cold]
#[inline(never)]
fn announce_slowly(function: Function, gate: u8, seen: impl FnOnce() -> Seen) {
    if gate & RECORD != 0 {
        record(function, &seen());
    }
    if gate & COUNT != 0 {
        calls::begin(function as u16);
        if inside() {
            INSIDE.set(OWING);
        }
    }
    if gate & TRACE != 0 {
        log::trace!("call of {}", function.name());
    }
    if gate & INJECT != 0 && PANIC_IN.load(Ordering::Relaxed) == function as u16 {
        panic!("injected by ANABRANCH_INJECT_PANIC");
    }
}

/// Logs a panic caught at the boundary of an exported function and gives the error code to return.
#[cold]
#[inline(never)]
pub fn panicked(function: Function, payload: &(dyn Any + Send)) -> c_int {
    log::error!(
        "internal error in {}: {}; the call returns an error",
        function.name(),
        reason(payload)
    );
    super::abi().map_or(UNKNOWN_ERROR, |abi| abi.err_intern)
}

/// Logs a panic caught before or after a call that is made all the same.
#[cold]
#[inline(never)]
pub fn panicked_around(function: Function, payload: &(dyn Any + Send)) {
    log::error!(
        "internal error around {}: {}; the call itself is made",
        function.name(),
        reason(payload)
    );
}

fn reason(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("unknown reason");
    match PANICKED_AT.try_with(Cell::take).ok().flatten() {
        Some(place) => format!("{text} ({place})"),
        None => text.to_owned(),
    }
}

/// From now on a panic of this library prints nothing by itself: the boundary that catches it logs it with its place,
/// and one in a thread of its own is logged at once. Does not touch the hook of a Rust program that loads the library,
/// which has a standard library of its own.
pub fn keep_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        std::panic::set_hook(Box::new(|panic| {
            if inside() {
                let place = panic.location().map(ToString::to_string);
                // Fails only at the end of a thread, when the place is not worth more than the message.
                let _ = PANICKED_AT.try_with(|at| at.set(place));
            } else {
                log::error!("internal error: {panic}");
            }
        }));
    });
}

/// An error code where no ABI is known: MPI_ERR_OTHER of Open MPI and the standard ABI, MPI_ERR_INTERN of MPICH.
pub const UNKNOWN_ERROR: c_int = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_outermost_call_enters() {
        let first = enter();
        assert!(first.is_some());
        assert!(enter().is_none());
        drop(first);
        assert!(!inside());
        assert!(enter().is_some());
    }

    #[test]
    fn another_thread_enters_on_its_own() {
        let _guard = enter();
        let other = std::thread::spawn(|| enter().is_some()).join();
        assert!(matches!(other, Ok(true)));
        assert!(has_several_callers());
    }
}
