//! Enters the driver without leaving a trace.
//!
//! **Every driver call that depends on a context, or that a stream capture of the user's could forbid, is
//! made while an [`Entered`] lives.** It pushes the context, unless it is current, relaxes the thread's
//! capture mode, and takes both back. Code that asks about one copy after the other does so while a [`Stay`]
//! lives: then the context is left once, at its end.

use super::driver::{required, Driver};
use super::error::{Error, Result};
use super::types::{Context, CAPTURE_MODE_RELAXED};
use crate::stats::{self, Counter};
use std::cell::Cell;
use std::marker::PhantomData;

/// A context and the identity it had when it was met: a handle may be used again for another context.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ContextKey {
    /// The handle.
    pub handle: Context,
    /// The driver's identity of the context, 0 where the driver has none to give (before CUDA 12).
    pub id: u64,
}

impl ContextKey {
    /// The key of a live context.
    pub fn of(handle: Context) -> Result<ContextKey> {
        if handle.is_null() {
            return Err(Error::NoContext);
        }
        ContextKey::told_by(required()?, handle)
    }

    pub(super) fn told_by(driver: &Driver, handle: Context) -> Result<ContextKey> {
        let id = insist(|| identity(driver, handle))?;
        Ok(ContextKey { handle, id })
    }

    /// Whether the handle still names the same context.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        insist(|| identity(required()?, self.handle)) == Ok(self.id)
    }
}

fn identity(driver: &Driver, handle: Context) -> Result<u64> {
    let mut id = 0;
    // Of a context that is gone the driver says so.
    match driver.ctx_get_id(handle, &mut id) {
        Ok(()) => Ok(id),
        Err(Error::Missing(_)) => Ok(0),
        Err(error) => Err(error),
    }
}

/// Relaxed capture mode and, if asked for, a context that is current, until dropped. Stays on its thread.
#[must_use = "the driver is left again when this is dropped"]
pub struct Entered {
    driver: &'static Driver,
    /// What must be taken back.
    owed: Owed,
    /// The context, if it may be stayed in.
    key: Option<ContextKey>,
    stays_on_its_thread: PhantomData<*const ()>,
}

/// What a thread takes back when it leaves the driver.
#[derive(Clone, Copy)]
struct Owed {
    capture_mode: Option<i32>,
    pushed: bool,
}

/// How a thread stands with the driver.
struct Standing {
    /// Values of [`Entered`] that live.
    alive: Cell<u32>,
    /// A [`Stay`] lives.
    stays: Cell<bool>,
    /// Entered, and held by no [`Entered`]. Set only while none lives.
    kept: Cell<Option<(ContextKey, Owed)>>,
}

thread_local! {
    /// No destructor, so it can be used at any time of a thread's life.
    static STANDING: Standing = const {
        Standing { alive: Cell::new(0), stays: Cell::new(false), kept: Cell::new(None) }
    };
}

/// While it lives, its thread stays in the context in which it has asked about copies ([`Entered::ask`]), so
/// that asking there again takes one call of the driver instead of five. Any other call that enters the
/// driver leaves that context first, because it may be about to destroy it. For stretches of code without a
/// call of MPI.
#[must_use = "the driver is left when this is dropped"]
pub struct Stay(PhantomData<*const ()>);

impl Stay {
    /// `None` where the thread stays already.
    pub fn begin() -> Option<Stay> {
        let stays = STANDING.with(|standing| standing.stays.replace(true));
        (!stays).then(|| Stay(PhantomData))
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        STANDING.with(|standing| standing.stays.set(false));
        leave_kept();
    }
}

/// Leaves the context that this thread has stayed in, if it has.
fn leave_kept() {
    let kept = STANDING.with(|standing| standing.kept.take());
    if let (Some((_, owed)), Ok(driver)) = (kept, required()) {
        owed.take_back(driver);
    }
}

impl Entered {
    /// Enters a context, which must live.
    pub fn enter(context: Context) -> Result<Entered> {
        if context.is_null() {
            return Err(Error::NoContext);
        }
        let mut entered = Entered::relaxed()?;
        entered.make_current(context)?;
        Ok(entered)
    }

    /// Enters a context, provided that it is still the one of the key. This is checked before entering: a
    /// driver may push a context that is gone and crash in popping it (580).
    pub fn enter_same(key: ContextKey) -> Result<Entered> {
        let mut entered = Entered::relaxed()?;
        match identity(entered.driver, key.handle) {
            Ok(id) if id == key.id => {}
            Ok(_) => return Err(Error::ContextLost),
            Err(error) => return Err(lost(error)),
        }
        entered.make_current(key.handle).map_err(lost)?;
        Ok(entered)
    }

    /// Like [`Entered::enter_same`], to ask about copies and to launch more: see [`Stay`].
    pub fn ask(key: ContextKey) -> Result<Entered> {
        let kept = STANDING.with(|standing| {
            let kept = standing.kept.get().filter(|(context, _)| *context == key);
            if kept.is_some() {
                standing.kept.set(None);
            }
            kept
        });
        let mut entered = match kept {
            Some((_, owed)) => Entered::new(required()?, owed),
            None => Entered::enter_same(key)?,
        };
        entered.key = Some(key);
        Ok(entered)
    }

    fn new(driver: &'static Driver, owed: Owed) -> Entered {
        STANDING.with(|standing| standing.alive.set(standing.alive.get() + 1));
        Entered {
            driver,
            owed,
            key: None,
            stays_on_its_thread: PhantomData,
        }
    }

    fn make_current(&mut self, context: Context) -> Result<()> {
        let mut current = Context::NULL;
        let asked = self.driver.ctx_get_current(&mut current);
        // Most programs are in it already, and this one question is cheaper than to push and to pop.
        if asked.is_err() {
            stats::add(Counter::DriverRetries, 1);
        }
        if asked.is_err() || current != context {
            // SAFETY: the context lives; upon an error nothing is popped.
            unsafe { self.driver.ctx_push_current(context)? };
            self.owed.pushed = true;
        }
        Ok(())
    }

    /// Enters the driver for calls that need no context.
    pub fn relaxed() -> Result<Entered> {
        leave_kept();
        let driver = required()?;
        let mut mode = CAPTURE_MODE_RELAXED;
        // A driver without captures has no such function, and nothing to relax.
        let capture_mode = match driver.thread_exchange_stream_capture_mode(&mut mode) {
            Ok(()) => Some(mode),
            Err(Error::Missing(_)) => None,
            Err(error) => return Err(error),
        };
        let owed = Owed {
            capture_mode,
            pushed: false,
        };
        Ok(Entered::new(driver, owed))
    }

    /// The driver entered.
    #[must_use]
    pub fn driver(&self) -> &'static Driver {
        self.driver
    }
}

/// How often a question is asked that the driver answers with an error.
const QUESTIONS: u32 = 3;

/// Asks again after an error that is no answer. Device memory that is taken for host memory means a crash,
/// and a context that is taken for lost means a lost message.
pub(super) fn insist<T>(mut ask: impl FnMut() -> Result<T>) -> Result<T> {
    let mut asked = 1;
    loop {
        match ask() {
            Err(error)
                if asked < QUESTIONS && error.code().is_some() && !error.context_is_gone() =>
            {
                stats::add(Counter::DriverRetries, 1);
                asked += 1;
            }
            answer => return answer,
        }
    }
}

fn lost(error: Error) -> Error {
    if error.context_is_gone() {
        Error::ContextLost
    } else {
        error
    }
}

/// Tries again a call that must not fail: otherwise the program would find another context than its own.
fn twice(what: &str, mut call: impl FnMut() -> Result<()>) {
    if let Err(first) = call() {
        match call() {
            Ok(()) => {
                stats::add(Counter::DriverRetries, 1);
                log::debug!("{what}: {first}; done at the second attempt");
            }
            Err(error) if error.context_is_gone() => log::debug!("{what}: {error}"),
            Err(error) => log::warn!("{what}: {error}"),
        }
    }
}

impl Owed {
    fn take_back(self, driver: &Driver) {
        if self.pushed {
            let mut popped = Context::NULL;
            // SAFETY: pops what `enter` pushed on this thread; nothing in between leaves another on top.
            twice("leaving a cuda context", || unsafe {
                driver.ctx_pop_current(&raw mut popped)
            });
        }
        if let Some(mut mode) = self.capture_mode {
            twice("restoring the capture mode", || {
                driver.thread_exchange_stream_capture_mode(&mut mode)
            });
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let kept = STANDING.with(|standing| {
            let alive = standing.alive.get() - 1;
            standing.alive.set(alive);
            let may_stay = alive == 0 && standing.stays.get();
            let kept = self.key.filter(|_| may_stay).map(|key| (key, self.owed));
            // Nothing is kept while a value lives, so nothing is lost here.
            standing.kept.set(kept);
            kept
        });
        if kept.is_none() {
            self.owed.take_back(self.driver);
        }
    }
}
