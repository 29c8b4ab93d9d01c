//! What surrounds a native call that may block.

use std::sync::atomic::Ordering;

use crate::engine::{engine, Engine};

/// Held across a native call that may block, from before it is decided that the call is to be native: once entered, a
/// rank that was not live does not become ready for descriptors until the scope ends. While it lives, the helper thread
/// alone drives the engine; it needs no sign of that, since it works whenever no thread of the program is driving. What
/// the scope does is to let the engine take part if a rank of the node has begun to use devices, and to wake the helper
/// if there is work.
#[derive(Debug)]
pub struct NativeScope {
    counted: bool,
}

impl NativeScope {
    /// Enters.
    #[inline]
    pub fn enter() -> NativeScope {
        match engine() {
            Some(engine) => engine.enter_native(),
            None => NativeScope { counted: false },
        }
    }

    /// Enters a native call that does not block: whether it is to be made is decided under this scope.
    #[inline]
    pub(super) fn brief(engine: &Engine) -> NativeScope {
        engine.early().unwrap_or(NativeScope { counted: false })
    }

    /// Enters a call of a rank that is not live. `None` if another thread has just made it so.
    #[inline]
    pub(super) fn before_live(engine: &Engine) -> Option<NativeScope> {
        if !engine.env.multiple {
            return Some(NativeScope { counted: false });
        }
        // Another thread may make this rank live meanwhile: it is not ready before this one is out. One of the two
        // sees the other, as both write before they read.
        engine.native_before_live.fetch_add(1, Ordering::SeqCst);
        let scope = NativeScope { counted: true };
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
        // What peers ask for from now on, they wake the helper for by themselves.
        if self.core.lock().is_owing(&self.env) {
            self.helper.wake(&self.env);
        }
        NativeScope { counted: false }
    }
}

impl Drop for NativeScope {
    #[inline]
    fn drop(&mut self) {
        if self.counted {
            leave_counted();
        }
    }
}

fn leave_counted() {
    let Some(engine) = engine() else { return };
    engine.native_before_live.fetch_sub(1, Ordering::SeqCst);
    if engine.is_live() {
        engine.try_ready(&mut engine.core.lock());
    }
}
