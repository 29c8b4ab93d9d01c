//! Protocols: how the payload of a claimed message comes to its receiver. A protocol is a file of this folder
//! and a line of the table at the end of this one.
//!
//! A [`Protocol`] is a message under way. One that brings a message whole is [`Whole`] as well: the
//! table says what it needs and what it costs, and [`Moving::begin_whole`] begins the cheapest that can bring
//! the message. Which messages are split, put or waited for is decided in `src/policy/`, and `fetch/start.rs`
//! begins those protocols by name, each with what it alone needs.

#[cfg(test)]
pub mod bounce;
pub mod eager;
mod gaps;
pub mod get;
pub mod local;
pub mod multipath;
pub mod one_owner;
pub mod pipeline;
pub mod put;
mod ring;
pub mod staged_part;

use std::ops::{Deref, DerefMut};

use super::claim::{Claim, Lost};
use crate::cuda::{Error, InFlight};
use crate::stats::Reason;
use crate::transfer::gpu::Gpu;
use crate::transfer::life;
use crate::transfer::story::Parts;
use crate::transfer::Env;

/// What a message under way has come to.
pub enum Progress {
    /// Under way; whether something moved.
    Pending(bool),
    /// All of it is there, by this protocol.
    Landed(life::Protocol),
    /// Nothing is in flight any more, and it must come by another protocol.
    Instead(Next),
}

/// By what a message comes instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// By the cheapest protocol that brings it whole.
    Whole,
    /// Through its sender's staging in host memory.
    HostPipeline,
}

/// What becomes of a message whose sender has died.
pub enum Orphan {
    /// The sender's memory is there as long as it is mapped, so the message comes to its end.
    GoesOn,
    /// It comes by another protocol.
    Instead(Next),
    /// It cannot be had.
    Lost,
}

/// A message under way.
pub trait Protocol {
    /// What a user reads, and whose counters it enters.
    fn name(&self) -> life::Protocol;

    /// Moves it on, without blocking.
    fn progress(&mut self, claim: &mut Claim, env: &Env, gpu: &mut Gpu) -> Result<Progress, Lost>;

    /// Gives it up: the copies that still write to the receiver's buffer.
    fn abort(self) -> Vec<InFlight>
    where
        Self: Sized;

    /// Whether it reads the buffer that its sender has lent. What was read counts only if the sender has not
    /// put the payload into its ring meanwhile, and given the buffer back.
    fn reads_lent_buffer(&self) -> bool;

    /// Its payload has landed, and counts.
    fn count(&mut self, _claim: &Claim, _env: &Env) {}

    /// Tells the sender that its payload has landed. False if the slot is about another message.
    fn send_ats(&self, claim: &Claim) -> bool {
        claim.send_ats()
    }

    /// The sender has died, and brings nothing any more.
    fn orphan(&mut self, _claim: &Claim, _env: &Env) -> Orphan {
        match self.is_staged() {
            true => Orphan::Lost,
            false => Orphan::GoesOn,
        }
    }

    /// Whether this rank reads another's memory for it.
    fn reads_peer(&self) -> bool {
        false
    }

    /// Whether copies of the whole message bring it, so that there are no pieces to look after.
    fn is_by_copies(&self) -> bool {
        false
    }

    /// Whether it comes through its sender's ring.
    fn is_staged(&self) -> bool {
        false
    }

    /// Whether the next [`Protocol::progress`] is known to find it landed.
    fn is_known_done(&self) -> bool {
        false
    }

    /// The earliest time at which it can have landed, by the clock of copies, if that is known.
    fn due_ns(&self) -> Option<u64> {
        None
    }

    /// How many bytes came by which path, if it came by several. To be asked once it has landed.
    fn parts(&self) -> Option<Parts> {
        None
    }
}

/// Why a protocol does not bring a message: None if it is no fault.
pub type Refusal = Option<(Reason, Error)>;

/// A protocol that brings a message as a whole, without a plan.
pub trait Whole: Protocol + Sized {
    /// Whether it can bring the message.
    fn needs(claim: &Claim) -> bool;

    /// How often it copies each byte. It is begun before those with a higher price.
    fn price(claim: &Claim) -> u32;

    /// Begins.
    fn begin(claim: &Claim, gpu: &mut Gpu) -> Result<Self, Refusal>;
}

macro_rules! protocols {
    (
        whole { $($(#[$with:meta])* $whole:ident($whole_type:ty),)* }
        planned { $($planned:ident($planned_type:ty),)* }
        boxed { $($boxed:ident($boxed_type:ty),)* }
    ) => {
        /// A message under way, by one of the protocols.
        pub enum Moving {
            $(
                #[allow(missing_docs, reason = "its type says what it is")]
                $(#[$with])*
                $whole($whole_type),
            )*
            $(
                #[allow(missing_docs, reason = "its type says what it is")]
                $planned($planned_type),
            )*
            $(
                #[allow(missing_docs, reason = "its type says what it is")]
                $boxed(Box<$boxed_type>),
            )*
        }

        impl Moving {
            /// Begins the cheapest protocol that brings the message whole.
            pub fn begin_whole(claim: &Claim, gpu: &mut Gpu) -> Result<Moving, Refusal> {
                type Begin = fn(&Claim, &mut Gpu) -> Result<Moving, Refusal>;
                let mut cheapest: Option<(u32, Begin)> = None;
                $(
                    $(#[$with])*
                    if <$whole_type>::needs(claim) {
                        let price = <$whole_type>::price(claim);
                        if cheapest.is_none_or(|(least, _)| price < least) {
                            cheapest = Some((price, |claim, gpu| {
                                <$whole_type>::begin(claim, gpu).map(Moving::$whole)
                            }));
                        }
                    }
                )*
                cheapest.map_or(Err(None), |(_, begin)| begin(claim, gpu))
            }

            /// See [`Protocol::abort`].
            pub fn abort(self) -> Vec<InFlight> {
                match self {
                    $($(#[$with])* Moving::$whole(protocol) => protocol.abort(),)*
                    $(Moving::$planned(protocol) => protocol.abort(),)*
                    $(Moving::$boxed(protocol) => protocol.abort(),)*
                }
            }
        }

        impl Deref for Moving {
            type Target = dyn Protocol;

            fn deref(&self) -> &Self::Target {
                match self {
                    $($(#[$with])* Moving::$whole(protocol) => protocol,)*
                    $(Moving::$planned(protocol) => protocol,)*
                    $(Moving::$boxed(protocol) => &**protocol,)*
                }
            }
        }

        impl DerefMut for Moving {
            fn deref_mut(&mut self) -> &mut Self::Target {
                match self {
                    $($(#[$with])* Moving::$whole(protocol) => protocol,)*
                    $(Moving::$planned(protocol) => protocol,)*
                    $(Moving::$boxed(protocol) => &mut **protocol,)*
                }
            }
        }
    };
}

protocols! {
    whole {
        Local(local::Local),
        Get(get::Get),
        #[cfg(test)]
        Bounce(bounce::Bounce),
    }
    planned {
        Put(put::Put),
        Eager(eager::Eager),
        Pipeline(pipeline::Pipeline),
    }
    boxed {
        Multipath(multipath::Multipath),
        OneOwner(one_owner::OneOwnerTransfer),
    }
}
