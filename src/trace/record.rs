//! Records: 64 bytes each, eight words.

/// Words of a record.
pub type Words = [u64; 8];

/// Bytes of a record.
pub const RECORD_BYTES: usize = 64;

/// No peer is known, or the call names none.
pub const NO_PEER: i32 = i32::MIN;

/// A side of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// That of its sender.
    Sender,
    /// That of its receiver.
    Receiver,
}

/// An MPI call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its number among the calls of its thread, from 1 on; the thread is in the upper half.
    pub number: u64,
    /// Number of the function, by the names in the header.
    pub function: u16,
    /// When it was made, ns.
    pub begin: u64,
    /// When it returned, ns; 0: it had not, for a second or when the process ended.
    pub end: u64,
    /// Identity of the communicator, the same in all its processes; 0: not known.
    pub comm: u64,
    /// World rank of the other side, or the rank as it was given if that is negative.
    pub peer: i32,
    /// Tag.
    pub tag: i32,
    /// Count, as it was given.
    pub count: i64,
    /// Bytes of these elements; 0 if that is not known.
    pub bytes: u64,
    /// Calls that this record stands for: a loop of tests, one after the other, is one record.
    pub times: u32,
    /// Time in them, ns.
    pub inside: u64,
}

/// How a side of a message ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It has not: the process ended before, or was killed.
    UnderWay,
    /// Its payload is there.
    Complete,
    /// It is lost.
    Failed,
    /// It was cancelled, or nobody is to have it.
    Cancelled,
}

/// One side of a message that the library carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Number in this process, from 1 on.
    pub id: u32,
    /// Which side this is.
    pub side: Side,
    /// How it ended.
    pub outcome: Outcome,
    /// Number of the latest state, by the names in the header.
    pub state: u8,
    /// Number of the protocol, by the names in the header, from 1 on; 0: none yet.
    pub protocol: u8,
    /// When it was offered (sender), or its receive was posted.
    pub begin: u64,
    /// World rank of the other side.
    pub peer: i32,
    /// Tag.
    pub tag: i32,
    /// Bytes.
    pub bytes: u64,
    /// Number of the communicator ([`Comm`]); 0: not known.
    pub comm: u16,
    /// The same at both ends, together with the sender's rank; 0: the MPI library carries it.
    pub nonce: u64,
    /// The call that began it.
    pub call: u64,
    /// How long after its beginning it was first matched, its payload first moved, and last landed, and it
    /// ended: see [`Moment`].
    pub after: [Option<u64>; Moment::COUNT],
}

/// What happens to a message once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Its other side is known.
    Matched,
    /// Its payload begins to move.
    Moving,
    /// Its payload is there.
    Landed,
    /// Nothing is left to do.
    Done,
}

impl Moment {
    /// How many there are.
    pub const COUNT: usize = 4;
}

/// A communicator, and its number in this file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Comm {
    /// From 1 on.
    pub number: u16,
    /// Its identity, the same in all its processes.
    pub identity: u64,
}

/// A GPU or the host's memory, and its number in this file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// 0 is host memory.
    pub number: u16,
    /// By which the driver knows it in this process; -1: host memory, or not visible here.
    pub ordinal: i32,
    /// Its node of memory; -1: not known.
    pub numa: i32,
    /// PCI domain, bus (8 bits), device (5) and function (3); 0: not known.
    pub pci: u64,
    /// UUID; 0 of host memory.
    pub uuid: [u8; 16],
}

/// Which way a copy belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Straight from one end of the message to the other.
    Direct,
    /// Over the memory of another GPU.
    Relay,
    /// Over pinned host memory.
    Host,
}

/// By what a copy was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// Launched alone.
    Stream,
    /// Launched together with others.
    Batch,
    /// Part of a CUDA graph.
    Graph,
    /// The CPU.
    Cpu,
}

/// Bytes that were copied for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// The message: its number in this process; 0: of none.
    pub message: u32,
    /// Its way.
    pub way: Way,
    /// Which hop of it, from 0 on.
    pub hop: u8,
    /// By what.
    pub by: By,
    /// Where from ([`Place`]).
    pub from: u16,
    /// Where to.
    pub to: u16,
    /// Bytes.
    pub bytes: u64,
    /// When it was launched.
    pub launched: u64,
    /// When it was seen to have ended.
    pub end: u64,
    /// It may have ended so much earlier: nobody looked in between.
    pub uncertain: u64,
    /// The stream that it ran on, by the first copy recorded there.
    pub stream: u32,
}

/// What was decided for a message that is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The message: its number in this process.
    pub message: u32,
    /// How long it was expected to take, ns.
    pub predicted_ns: u64,
    /// Bytes straight, over other GPUs, and over host memory.
    pub bytes: [u64; 3],
}

/// A send of a device buffer that did not go by the library's own ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// When, ns.
    pub at: u64,
    /// Number of the reason, by the names in the header.
    pub reason: u8,
    /// Bytes.
    pub bytes: u64,
    /// The call.
    pub call: u64,
}

/// What a call of UCX's returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UcpOutcome {
    /// There is nothing left to do.
    Done,
    /// A request is under way.
    UnderWay,
    /// An error.
    Failed,
}

/// A call of one of UCX's `ucp_*` functions, made inside an MPI call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ucp {
    /// Number of the function, by the names in the header.
    pub function: u8,
    /// What it returned.
    pub outcome: UcpOutcome,
    /// Number of the endpoint in this process ([`Lane`]), from 1 on; 0: the function names none.
    pub endpoint: u32,
    /// When it was made.
    pub begin: u64,
    /// When it returned.
    pub end: u64,
    /// Bytes, if they are known.
    pub bytes: Option<u64>,
    /// Tag, or the address in the other process.
    pub tag: u64,
    /// The MPI call that made it; 0: none that is recorded.
    pub call: u64,
}

/// A transport over which an endpoint of UCX's may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// The endpoint.
    pub endpoint: u32,
    /// Which of its lanes, from 0 on: lane 0 begins a list that replaces the one before.
    pub lane: u8,
    /// How many it has.
    pub lanes: u8,
    /// `TRANSPORT/DEVICE`, with zeros behind.
    pub text: [u8; Lane::TEXT],
}

impl Lane {
    /// Bytes of its text.
    pub const TEXT: usize = 56;

    /// Its text.
    #[must_use]
    pub fn name(&self) -> String {
        let bytes = self.text.split(|byte| *byte == 0).next();
        String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
    }
}

/// The end of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// When, ns.
    pub at: u64,
    /// Records in the file before this one.
    pub recorded: u64,
    /// Records that were lost, as a ring was full or the file could not be written.
    pub dropped: u64,
    /// MPI_Finalize was called; otherwise the process ended without it.
    pub is_finalized: bool,
}

/// A reading of the processor's ticks, in which the times of a file that has these are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sync {
    /// Ticks.
    pub ticks: u64,
    /// The machine's clock at the same time, ns.
    pub ns: u64,
}

/// A record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// See [`Call`].
    Call(Call),
    /// See [`Message`].
    Message(Message),
    /// See [`Comm`].
    Comm(Comm),
    /// See [`Place`].
    Place(Place),
    /// See [`Copied`].
    Copied(Copied),
    /// See [`Planned`].
    Planned(Planned),
    /// See [`Fallback`].
    Fallback(Fallback),
    /// See [`Ucp`].
    Ucp(Ucp),
    /// See [`Lane`].
    Lane(Lane),
    /// See [`End`].
    End(End),
    /// See [`Sync`].
    Sync(Sync),
}

/// A span of time in 32 bits: exact up to 2^31, then in steps of 1024. 0 is none, so no time is 1.
#[must_use]
pub fn pack_span(span: u64) -> u32 {
    const COARSE: u32 = 1 << 31;
    match u32::try_from(span) {
        Ok(span) if span < COARSE => span.max(1),
        _ => COARSE | (span >> 10).min(u64::from(COARSE - 1)) as u32,
    }
}

/// See [`pack_span`].
#[must_use]
pub fn unpack_span(word: u32) -> Option<u64> {
    match word {
        0 => None,
        _ if word >> 31 == 0 => Some(u64::from(word)),
        _ => Some(u64::from(word & !(1 << 31)) << 10),
    }
}
