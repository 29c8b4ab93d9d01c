//! What surrounds a native call that may block.

use std::sync::atomic::Ordering;

use crate::engine::{engine, Core, Engine};

/// Held across a native call that may block, from before it is decided that the call is to be native. Once
/// entered, a rank that was not live does not become ready for RTSs until the scope ends. While it lives, the
/// helper thread alone drives the engine. It needs no signal for that, because it works whenever no thread of
/// the program is driving. The scope lets the engine take part if a rank of the node has begun to use
/// devices, wakes the helper if there is work, and lets garbage collection enter the program's contexts,
/// which are not destroyed meanwhile.
#[derive(Debug)]
pub struct NativeScope(Kind);

#[derive(Debug)]
enum Kind {
    /// Nobody needs to know about the call.
    Unseen,
    /// The rank was not live, and does not become ready meanwhile.
    BeforeLive,
    /// Its thread counts as being inside MPI.
    Inside,
}

impl NativeScope {
    pub(super) const UNSEEN: NativeScope = NativeScope(Kind::Unseen);

    /// Enters.
    #[inline]
    pub fn enter() -> NativeScope {
        match engine() {
            Some(engine) => engine.enter_native(),
            None => NativeScope::UNSEEN,
        }
    }

    /// Enters a native call that does not block, or may never be made: this scope covers the decision whether
    /// it is made.
    #[inline]
    pub(super) fn brief(engine: &Engine) -> NativeScope {
        engine.early().unwrap_or(NativeScope::UNSEEN)
    }

    /// Enters a call of a rank that is not live. `None` if another thread has just made it so.
    #[inline]
    pub(super) fn before_live(engine: &Engine) -> Option<NativeScope> {
        if !engine.env.multiple {
            return Some(NativeScope::UNSEEN);
        }
        // Another thread may make this rank live meanwhile. The rank is not ready before this call is over.
        // One of the two sees the other, because both write before they read.
        engine.native_before_live.fetch_add(1, Ordering::SeqCst);
        let scope = NativeScope(Kind::BeforeLive);
        (!engine.is_live()).then_some(scope)
    }
}

impl Engine {
    #[inline]
    fn enter_native(&self) -> NativeScope {
        if !self.live() {
            if let Some(scope) = NativeScope::before_live(self) {
                return scope;
            }
        }
        self.enter_live()
    }

    fn enter_live(&self) -> NativeScope {
        self.leave_to_helper(&self.core.lock())
    }

    /// Called before a native call that may block: the helper does what is to be done now. For later
    /// requests, peers wake it themselves.
    #[inline]
    pub(super) fn leave_to_helper(&self, core: &Core) -> NativeScope {
        if !self.is_live() {
            return NativeScope::UNSEEN;
        }
        if core.is_owing(&self.env) {
            self.helper.wake(&self.env);
        }
        self.native.fetch_add(1, Ordering::SeqCst);
        NativeScope(Kind::Inside)
    }

    /// Whether a thread of the program is inside a native call that may block.
    pub(super) fn is_inside(&self) -> bool {
        self.native.load(Ordering::SeqCst) != 0
    }
}

impl Drop for NativeScope {
    #[inline]
    fn drop(&mut self) {
        match self.0 {
            Kind::Unseen => {}
            Kind::BeforeLive => leave_before_live(),
            Kind::Inside => leave_inside(),
        }
    }
}

fn leave_before_live() {
    let Some(engine) = engine() else { return };
    engine.native_before_live.fetch_sub(1, Ordering::SeqCst);
    if engine.is_live() {
        engine.try_ready(&mut engine.core.lock());
    }
}

fn leave_inside() {
    let Some(engine) = engine() else { return };
    engine.native.fetch_sub(1, Ordering::SeqCst);
    // What the helper does in the program's contexts is done before the program goes on.
    engine.core.lock().pace.interrupt();
}
