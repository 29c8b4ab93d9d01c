//! The life of a message: the states that each side of it goes through, and what may follow what.
//!
//! Every change of state is a [`Life::transition`]. Debug builds check it against [`NEXT`]. What a user reads
//! of a message (counters, `anabranch_request`, log lines, checks) is derived from its state, and whoever
//! wants to observe messages does so there.

mod traced;

use std::ffi::c_int;

use super::fault;
use super::story::Path;
use crate::stats::{self, Counter, Meter};
use crate::trace;

/// How a payload comes to its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Protocol {
    /// The MPI library brings it, from or to host memory.
    Native,
    /// The MPI library brings it; it is copied from or to the device by the engine.
    Bcopy,
    /// One copy, from a rank to itself.
    Own,
    /// From a cell in host memory, into which its sender has copied it.
    Eager,
    /// Get: its receiver reads it.
    Get,
    /// Put: its sender writes it.
    Put,
    /// Pipeline through the sender's staging in host memory.
    HostPipeline,
    /// Pipeline through the sender's staging on its GPU.
    GpuPipeline,
    /// Multipath, two owners: each end makes the copies of its own GPU.
    Multipath,
    /// Multipath, one owner: one rank makes all copies.
    OneOwner,
}

impl Protocol {
    /// All of them, in order.
    pub const ALL: [Protocol; 10] = [
        Protocol::Native,
        Protocol::Bcopy,
        Protocol::Own,
        Protocol::Eager,
        Protocol::Get,
        Protocol::Put,
        Protocol::HostPipeline,
        Protocol::GpuPipeline,
        Protocol::Multipath,
        Protocol::OneOwner,
    ];

    /// Its name in a trace.
    pub const fn name(self) -> &'static str {
        match self {
            Protocol::Native => "native",
            Protocol::Bcopy => "bcopy",
            Protocol::Own => "self",
            Protocol::Eager => "eager",
            Protocol::Get => "get",
            Protocol::Put => "put",
            Protocol::HostPipeline => "host_pipeline",
            Protocol::GpuPipeline => "gpu_pipeline",
            Protocol::Multipath => "multipath",
            Protocol::OneOwner => "one_owner",
        }
    }

    /// The path that a user reads.
    pub const fn path(self) -> Path {
        match self {
            Protocol::Native => Path::Native,
            Protocol::Bcopy => Path::Bcopy,
            Protocol::Own => Path::Own,
            Protocol::Eager => Path::Eager,
            Protocol::Get | Protocol::Put => Path::Direct,
            Protocol::HostPipeline => Path::HostPipeline,
            Protocol::GpuPipeline => Path::GpuPipeline,
            Protocol::Multipath | Protocol::OneOwner => Path::Multipath,
        }
    }

    /// The counters of received messages and of their bytes.
    const fn counters(self) -> Option<(Counter, Counter)> {
        match self {
            Protocol::Native => None,
            Protocol::Bcopy => Some((Counter::BcopyReceives, Counter::BcopyBytes)),
            Protocol::Own => Some((Counter::SelfReceives, Counter::SelfBytes)),
            Protocol::Eager => Some((Counter::EagerReceives, Counter::EagerBytes)),
            Protocol::Get | Protocol::Put => Some((Counter::DirectReceives, Counter::DirectBytes)),
            Protocol::HostPipeline => {
                Some((Counter::HostPipelineReceives, Counter::HostPipelineBytes))
            }
            Protocol::GpuPipeline => {
                Some((Counter::GpuPipelineReceives, Counter::GpuPipelineBytes))
            }
            Protocol::Multipath | Protocol::OneOwner => {
                Some((Counter::MultipathReceives, Counter::MultipathBytes))
            }
        }
    }
}

impl From<Protocol> for fault::Path {
    fn from(protocol: Protocol) -> fault::Path {
        match protocol {
            Protocol::Native | Protocol::Bcopy => fault::Path::Bcopy,
            Protocol::Own | Protocol::Get | Protocol::Put => fault::Path::Direct,
            Protocol::Eager => fault::Path::Eager,
            Protocol::HostPipeline => fault::Path::HostPipeline,
            Protocol::GpuPipeline => fault::Path::GpuPipeline,
            Protocol::Multipath | Protocol::OneOwner => fault::Path::Multipath,
        }
    }
}

/// What a matched message waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// Others that are received in its place.
    Place,
    /// A check of what was received in the same place.
    Check,
    /// Its turn among those of several senders.
    Turn,
}

/// How a message has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Its payload is there.
    Complete,
    /// It is lost.
    Failed,
    /// It was cancelled, or nobody is to have it.
    Cancelled,
}

impl Outcome {
    /// What the error code of a request says of its message.
    pub fn of(code: c_int) -> Outcome {
        match code {
            0 => Outcome::Complete,
            _ => Outcome::Failed,
        }
    }
}

/// How far a message has come, on one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It is not posted: a persistent request that is not started.
    Prepared,
    /// Its RTS, or its receive, is posted.
    Offered,
    /// The other side of it is known.
    Matched,
    /// It waits for others.
    Queued(After),
    /// Its payload is on its way.
    Moving(Protocol),
    /// It is lost; copies that write to the program's buffer still run.
    Draining,
    /// Its payload has arrived. It may be unpacked, or checked.
    Landed,
    /// Nothing is done for it any more.
    Done(Outcome),
}

/// A state without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// See [`State::Prepared`].
    Prepared,
    /// See [`State::Offered`].
    Offered,
    /// See [`State::Matched`].
    Matched,
    /// See [`State::Queued`].
    Queued,
    /// See [`State::Moving`].
    Moving,
    /// See [`State::Draining`].
    Draining,
    /// See [`State::Landed`].
    Landed,
    /// See [`State::Done`].
    Done,
}

impl Kind {
    /// All of them, in order.
    pub const ALL: [Kind; 8] = [
        Prepared, Offered, Matched, Queued, Moving, Draining, Landed, Done,
    ];

    /// Its name in a trace.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Prepared => "prepared",
            Kind::Offered => "offered",
            Kind::Matched => "matched",
            Kind::Queued => "queued",
            Kind::Moving => "moving",
            Kind::Draining => "draining",
            Kind::Landed => "landed",
            Kind::Done => "done",
        }
    }
}

impl State {
    /// The kind of this state.
    pub const fn kind(self) -> Kind {
        match self {
            State::Prepared => Kind::Prepared,
            State::Offered => Kind::Offered,
            State::Matched => Kind::Matched,
            State::Queued(_) => Kind::Queued,
            State::Moving(_) => Kind::Moving,
            State::Draining => Kind::Draining,
            State::Landed => Kind::Landed,
            State::Done(_) => Kind::Done,
        }
    }
}

/// A side of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// That of its sender.
    Sender,
    /// That of its receiver.
    Receiver,
}

use Kind::{Done, Draining, Landed, Matched, Moving, Offered, Prepared, Queued};

/// What may follow a state: at the sender, at the receiver, and why.
pub const NEXT: &[(Kind, &[Kind], &[Kind], &str)] = &[
    (
        Prepared,
        &[Offered, Done],
        &[Offered, Done],
        "it is posted; a persistent request may be freed instead",
    ),
    (
        Offered,
        &[Matched, Moving, Landed, Done],
        &[Matched, Done],
        "a sender fills a cell, or writes to a receive of which it was told, before it is matched; a receiver may claim, read and \
         answer between two looks of the sender",
    ),
    (
        Matched,
        &[Moving, Landed, Done],
        &[Queued, Moving, Draining, Landed, Done],
        "a get needs nothing of its sender; nothing is brought of an empty message",
    ),
    (Queued, &[], &[Queued, Moving, Draining, Done], "what it waited for is over"),
    (
        Moving,
        &[Moving, Landed, Done],
        &[Moving, Queued, Draining, Landed, Done],
        "a protocol that fails gives way to a simpler one, which may have to wait",
    ),
    (Draining, &[], &[Done], "nothing is written any more"),
    (
        Landed,
        &[Done],
        &[Moving, Done],
        "packed bytes are brought from where they landed to where they belong",
    ),
    (Done, &[Prepared], &[Prepared], "a persistent request may be started again"),
];

/// Whether `to` may follow `from` on this side.
pub fn may_follow(side: Side, from: Kind, to: Kind) -> bool {
    let row = NEXT.iter().find(|(kind, ..)| *kind == from);
    row.is_some_and(|(_, sender, receiver, _)| match side {
        Side::Sender => sender.contains(&to),
        Side::Receiver => receiver.contains(&to),
    })
}

/// One side of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    side: Side,
    state: State,
    /// The latest protocol.
    protocol: Option<Protocol>,
    /// How the trace follows it.
    traced: trace::Followed,
    /// What the statistics know of it.
    pub meter: Meter,
}

impl Life {
    /// A message that is not posted yet.
    pub const fn new(side: Side) -> Life {
        Life {
            side,
            state: State::Prepared,
            protocol: None,
            traced: trace::Followed::NONE,
            meter: Meter::NONE,
        }
    }

    /// A message that is posted at once.
    pub fn offered(side: Side) -> Life {
        let mut life = Life::new(side);
        life.transition(State::Offered);
        life
    }

    /// The receiver's side of a message that has just been claimed.
    pub const fn matched() -> Life {
        Life {
            side: Side::Receiver,
            state: State::Matched,
            protocol: None,
            traced: trace::Followed::NONE,
            meter: Meter::NONE,
        }
    }

    /// How far it has come.
    pub const fn state(&self) -> State {
        self.state
    }

    /// The protocol by which it comes, or came.
    pub const fn protocol(&self) -> Option<Protocol> {
        self.protocol
    }

    /// By which path, as a user reads it.
    pub fn path(&self) -> Path {
        self.protocol.map_or(Path::Unknown, Protocol::path)
    }

    /// The same for log lines: a message without a protocol was meant to go directly.
    pub fn fault_path(&self) -> fault::Path {
        self.protocol.map_or(fault::Path::Direct, Into::into)
    }

    /// Nothing has been matched yet.
    pub fn is_offered(&self) -> bool {
        self.state == State::Offered
    }

    /// It is not posted.
    pub fn is_prepared(&self) -> bool {
        self.state == State::Prepared
    }

    /// The payload is there, or never will be.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Landed | State::Done(_))
    }

    /// It enters another state. All changes of a message's state are made here.
    #[inline]
    #[track_caller]
    pub fn transition(&mut self, next: State) {
        debug_assert!(
            may_follow(self.side, self.state.kind(), next.kind()),
            "{:?}: {:?} may not follow {:?}",
            self.side,
            next,
            self.state
        );
        match next {
            State::Prepared => self.protocol = None,
            State::Moving(protocol) => self.protocol = Some(protocol),
            _ => {}
        }
        self.state = next;
        if self.traced.is_any() {
            self.tell_trace();
        }
    }

    /// Like [`Life::transition`], unless it is in that state already.
    #[inline]
    #[track_caller]
    pub fn reach(&mut self, next: State) {
        if self.state != next {
            self.transition(next);
        }
    }

    /// Its payload has arrived by a protocol. A receiver counts it.
    #[track_caller]
    pub fn arrive(&mut self, protocol: Protocol, bytes: u64) {
        self.reach(State::Moving(protocol));
        self.transition(State::Landed);
        if let (Side::Receiver, Some((messages, of_bytes))) = (self.side, protocol.counters()) {
            stats::add(messages, 1);
            stats::add(of_bytes, bytes);
            self.meter.arrived(protocol as u8, bytes);
        }
    }

    /// It has ended, if it has not before.
    #[track_caller]
    pub fn end(&mut self, outcome: Outcome) {
        if self.state.kind() != Done {
            self.transition(State::Done(outcome));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write as _;

    const KINDS: [Kind; 8] = Kind::ALL;

    fn list(kinds: &[Kind]) -> String {
        let names: Vec<String> = kinds.iter().map(|kind| format!("{kind:?}")).collect();
        names.join(", ")
    }

    /// A trace numbers them by their place, and names them in this order.
    #[test]
    fn names_are_in_order() {
        for (place, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, place);
        }
        for (place, protocol) in Protocol::ALL.into_iter().enumerate() {
            assert_eq!(protocol as usize, place);
        }
    }

    /// The table, as ARCHITECTURE.md has it.
    fn text() -> String {
        let mut text =
            "| state | next at the sender | next at the receiver | |\n| --- | --- | --- | --- |\n"
                .to_owned();
        for (kind, sender, receiver, why) in NEXT {
            let _ = writeln!(
                text,
                "| {kind:?} | {} | {} | {why} |",
                list(sender),
                list(receiver)
            );
        }
        text
    }

    /// `UPDATE_ARCHITECTURE=1` writes it.
    #[test]
    fn architecture_has_the_table() {
        const BEGIN: &str = "<!-- states -->\n";
        const END: &str = "<!-- end of states -->\n";
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/ARCHITECTURE.md");
        let document = std::fs::read_to_string(path).expect("ARCHITECTURE.md");
        let (before, rest) = document.split_once(BEGIN).expect("the table's beginning");
        let (found, after) = rest.split_once(END).expect("the table's end");
        if std::env::var_os("UPDATE_ARCHITECTURE").is_some() {
            let document = format!("{before}{BEGIN}{}{END}{after}", text());
            std::fs::write(path, document).expect("it is written");
        } else {
            assert_eq!(found, text(), "UPDATE_ARCHITECTURE=1 cargo test writes it");
        }
    }

    #[test]
    fn every_state_has_its_row_and_can_be_reached_and_left() {
        for side in [Side::Sender, Side::Receiver] {
            for kind in KINDS {
                assert_eq!(NEXT.iter().filter(|(of, ..)| *of == kind).count(), 1);
                let is_used = side == Side::Receiver || !matches!(kind, Queued | Draining);
                let is_reached = KINDS.iter().any(|from| may_follow(side, *from, kind));
                let is_left = KINDS.iter().any(|to| may_follow(side, kind, *to));
                assert_eq!(
                    (is_reached, is_left),
                    (is_used, is_used),
                    "{side:?} {kind:?}"
                );
            }
        }
    }

    #[test]
    #[should_panic(expected = "Moving(Get) may not follow Prepared")]
    fn what_may_not_follow_is_found() {
        Life::new(Side::Receiver).transition(State::Moving(Protocol::Get));
    }

    #[test]
    fn a_message_is_told_by_its_latest_protocol() {
        let mut life = Life::new(Side::Receiver);
        assert_eq!(
            (life.path(), life.fault_path()),
            (Path::Unknown, fault::Path::Direct)
        );
        life.transition(State::Offered);
        life.transition(State::Matched);
        life.transition(State::Moving(Protocol::Get));
        life.transition(State::Queued(After::Place));
        assert_eq!(life.path(), Path::Direct);
        life.arrive_after_all();
    }

    impl Life {
        fn arrive_after_all(mut self) {
            let before = stats::snapshot();
            self.arrive(Protocol::HostPipeline, 70);
            let after = stats::snapshot();
            let grown = |counter| after.get(counter) - before.get(counter);
            assert!(
                grown(Counter::HostPipelineReceives) >= 1
                    && grown(Counter::HostPipelineBytes) >= 70
            );
            assert_eq!((self.path(), self.is_over()), (Path::HostPipeline, true));
            self.end(Outcome::Complete);
            self.end(Outcome::Failed);
            assert_eq!(self.state(), State::Done(Outcome::Complete));
            self.transition(State::Prepared);
            assert_eq!(self.path(), Path::Unknown);
        }
    }
}
