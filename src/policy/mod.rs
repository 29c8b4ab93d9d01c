//! The decisions about a message: which protocol it uses, over which paths it goes, in what order, and when
//! it is launched.
//!
//! Every decision here is a function without side effects of its own. There are three forms:
//!
//! - **of a value**: a plain function, written down by [`decided`];
//! - **a step of a state machine** ([`history`], [`turn`]): state and event give an answer and the next
//!   state, by [`stepped`];
//! - **a chain of questions** ([`start`], [`rtr`]): the function asks its facts one by one, by a trait of
//!   [`facts`], because most of them cost something and few messages need them. A fact may be an attempt,
//!   such as mapping a buffer. The decision depends on the answers alone.
//!
//! With the feature `golden`, each decision is written down with everything that it depends on.
//! `golden_tests.rs` takes such records of many programs and makes each decision again; see [`golden`].
//!
//! This module uses no driver, no clock, no MPI type and no shared memory.

#[cfg(any(test, feature = "golden"))]
pub mod golden;
pub mod history;
pub mod launch;
pub mod parts;
pub mod peers;
pub mod pipeline;
pub mod put;
pub mod rtr;
pub mod send;
pub mod start;
pub mod turn;

/// The identity of a GPU.
pub type GpuId = [u8; 16];

/// The facts of a decision: a trait with one question for each fact. For records, it also defines what writes
/// the answers down and what gives them again.
macro_rules! facts {
    ($(#[$meta:meta])* trait $name:ident { $( $(#[$doc:meta])* fn $fact:ident() -> $answer:ty; )+ }) => {
        $(#[$meta])*
        pub trait $name {
            $( $(#[$doc])* fn $fact(&mut self) -> $answer; )+
        }

        #[cfg(feature = "golden")]
        impl<F: $name> $name for crate::policy::golden::Asked<'_, F> {
            $(
                fn $fact(&mut self) -> $answer {
                    let answer = self.facts.$fact();
                    self.note(stringify!($fact), &answer);
                    answer
                }
            )+
        }

        #[cfg(test)]
        impl $name for crate::policy::golden::Answers {
            $(
                fn $fact(&mut self) -> $answer {
                    self.answer(stringify!($fact))
                }
            )+
        }
    };
}
pub(crate) use facts;

/// Decides by a function of facts: `decided_by!("name", &mut facts, function)`.
macro_rules! decided_by {
    ($name:literal, $facts:expr, $decide:path) => {{
        #[cfg(feature = "golden")]
        let decision = {
            let mut asked = $crate::policy::golden::Asked::new($facts);
            let decision = $decide(&mut asked);
            asked.write($name, &decision);
            decision
        };
        #[cfg(not(feature = "golden"))]
        let decision = $decide($facts);
        decision
    }};
}
pub(crate) use decided_by;

/// Decides by a function of a value: `decided!("name", (inputs), decision)`.
macro_rules! decided {
    ($name:literal, $input:expr, $decide:expr) => {{
        #[cfg(feature = "golden")]
        let input = $crate::policy::golden::value(&$input);
        let decision = $decide;
        #[cfg(feature = "golden")]
        $crate::policy::golden::write($name, input, &decision);
        decision
    }};
}
pub(crate) use decided;

/// Makes a step of a state machine: `stepped!("name", state, (event), step)`. A step that asks the world
/// something gets a world that notes its answers: `stepped!("name", state, (event), &world, |world| step)`.
macro_rules! stepped {
    ($name:literal, $state:expr, $event:expr, $world:expr, |$noted:ident| $step:expr) => {{
        #[cfg(feature = "golden")]
        let before = $crate::policy::golden::value(&(&*$state, &$event));
        #[cfg(feature = "golden")]
        let $noted = &$crate::policy::golden::Noted::new($world);
        #[cfg(not(feature = "golden"))]
        let $noted = $world;
        let answer = $step;
        #[cfg(feature = "golden")]
        {
            let input = $crate::policy::golden::value(&(before, $noted.answers()));
            $crate::policy::golden::write($name, input, &(&answer, &*$state));
        }
        answer
    }};
    ($name:literal, $state:expr, $event:expr, $step:expr) => {{
        #[cfg(feature = "golden")]
        let input = $crate::policy::golden::value(&(&*$state, &$event));
        let answer = $step;
        #[cfg(feature = "golden")]
        $crate::policy::golden::write($name, input, &(&answer, &*$state));
        answer
    }};
}
pub(crate) use stepped;

#[cfg(test)]
mod golden_tests;
