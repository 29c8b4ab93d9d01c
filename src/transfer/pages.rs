//! Memory for the beginning of a rank's wide staging. A thread of its own asks the system for it: 16 MiB take
//! 3 to 14 ms, mostly to be filled with zeros.

use std::thread::JoinHandle;

use crate::transfer::{thread, Env};

/// How far the request has come.
#[derive(Default)]
pub enum Pages {
    /// Nobody has asked.
    #[default]
    Unasked,
    /// The thread is at work.
    Asked(JoinHandle<bool>),
    /// The pages are there, or there are none.
    Over(bool),
}

impl Pages {
    /// Asks for them, once.
    pub fn ask(&mut self, env: &Env) {
        if !matches!(self, Pages::Unasked) {
            return;
        }
        let own = env.node.own_shared();
        let thread = thread::spawn_aside(env, "anabranch-pages", move || {
            let found = own.find_wide_pages();
            if let Err(error) = &found {
                log::debug!("no memory for staging ahead: {error}");
            }
            found.is_ok()
        });
        *self = match thread {
            Ok(thread) => Pages::Asked(thread),
            Err(error) => {
                log::debug!("no thread to ask for memory: {error}");
                Pages::Over(false)
            }
        };
    }

    /// Whether they are on their way.
    pub fn are_awaited(&mut self) -> bool {
        self.look();
        matches!(self, Pages::Asked(_))
    }

    /// Whether they are there.
    pub fn are_there(&mut self) -> bool {
        self.look();
        matches!(self, Pages::Over(true))
    }

    fn look(&mut self) {
        if matches!(self, Pages::Asked(thread) if thread.is_finished()) {
            self.wait();
        }
    }

    /// Whether they are there, once that is known.
    pub fn wait(&mut self) -> bool {
        *self = match std::mem::take(self) {
            // A panic is reported where it happens.
            Pages::Asked(thread) => Pages::Over(thread.join().unwrap_or(false)),
            other => other,
        };
        matches!(self, Pages::Over(true))
    }
}
