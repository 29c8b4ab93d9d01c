//! Messages, both of whose sides are brought together.

use anabranch_engine::trace::read::Header;
use anabranch_engine::trace::record::{self, pack_span, unpack_span, Moment, Outcome, NO_PEER};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::read::{Clock, Read};

/// Names of protocols and states, each once: a half has the number of one, less 1. 0 is none.
static NAMES: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());

fn names() -> MutexGuard<'static, Vec<&'static str>> {
    NAMES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn intern(name: &str) -> u8 {
    let mut names = names();
    let found = names.iter().position(|known| *known == name);
    let place = found.unwrap_or(names.len());
    if found.is_none() {
        // There are a few dozen in all, and each is needed to the end.
        names.push(Box::leak(name.to_owned().into_boxed_str()));
    }
    u8::try_from(place + 1).unwrap_or(0)
}

fn name(number: u8) -> Option<&'static str> {
    names().get(usize::from(number).checked_sub(1)?).copied()
}

/// One side of a message. A trace may have millions: times are spans in 32 bits, exact up to two seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Half {
    begin: u64,
    after: [u32; Moment::COUNT],
    is_receive: bool,
    outcome: u8,
    state: u8,
    protocol: u8,
    /// Number of the call that began it.
    pub call: u64,
}

impl Half {
    fn new(message: &record::Message, header: &Header) -> Half {
        let protocol = usize::from(message.protocol).checked_sub(1);
        let protocol = protocol.and_then(|number| header.protocols.get(number));
        let state = header.states.get(usize::from(message.state));
        Half {
            begin: message.begin,
            after: message.after.map(|span| span.map_or(0, pack_span)),
            is_receive: message.side == record::Side::Receiver,
            outcome: message.outcome as u8,
            state: state.map_or(0, |name| intern(name)),
            protocol: protocol.map_or(0, |name| intern(name)),
            call: message.call,
        }
    }

    pub fn set_clock(&mut self, clock: &Clock) {
        self.begin = clock.ns(self.begin);
        for span in &mut self.after {
            *span = unpack_span(*span).map_or(0, |ticks| pack_span(clock.span_ns(ticks)));
        }
    }

    pub fn set_begin(&mut self, begin: u64) {
        self.begin = self.begin.saturating_sub(begin);
    }

    fn at(&self, moment: Moment) -> Option<u64> {
        unpack_span(self.after[moment as usize]).map(|span| self.begin.saturating_add(span))
    }

    /// When it was offered, or its receive was posted.
    pub fn begin_ns(&self) -> u64 {
        self.begin
    }

    /// When the receive was posted.
    pub fn posted_ns(&self) -> Option<u64> {
        self.is_receive.then_some(self.begin)
    }

    /// When it was offered (sender), or claimed (receiver).
    pub fn at_ns(&self) -> u64 {
        let claimed = self.is_receive.then(|| self.at(Moment::Matched)).flatten();
        claimed.unwrap_or(self.begin)
    }

    /// When it was matched.
    pub fn matched_ns(&self) -> Option<u64> {
        self.at(Moment::Matched)
    }

    /// When its payload began to move.
    pub fn moving_ns(&self) -> Option<u64> {
        self.at(Moment::Moving)
    }

    /// When its payload had arrived.
    pub fn landed_ns(&self) -> Option<u64> {
        self.at(Moment::Landed)
    }

    /// When nothing was left to do.
    pub fn done_ns(&self) -> Option<u64> {
        self.at(Moment::Done)
    }

    /// How it ended: `under way`, `complete`, `failed` or `cancelled`.
    pub fn outcome(&self) -> &'static str {
        const NAMES: [&str; 4] = ["under way", "complete", "failed", "cancelled"];
        const _: () = assert!(Outcome::Cancelled as usize == 3);
        NAMES.get(usize::from(self.outcome)).copied().unwrap_or("?")
    }

    /// It was under way when the process ended.
    pub fn is_under_way(&self) -> bool {
        self.outcome == Outcome::UnderWay as u8
    }
}

impl Half {
    /// By which protocol at last.
    pub fn protocol(&self) -> Option<&'static str> {
        name(self.protocol)
    }

    /// The latest state.
    pub fn state(&self) -> &'static str {
        name(self.state).unwrap_or("?")
    }
}

impl Serialize for Half {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        if let Some(posted) = self.posted_ns() {
            map.serialize_entry("posted_ns", &posted)?;
        }
        map.serialize_entry("at_ns", &self.at_ns())?;
        map.serialize_entry("matched_ns", &self.matched_ns())?;
        map.serialize_entry("moving_ns", &self.moving_ns())?;
        map.serialize_entry("landed_ns", &self.landed_ns())?;
        map.serialize_entry("done_ns", &self.done_ns())?;
        map.serialize_entry("protocol", &self.protocol())?;
        map.serialize_entry("state", self.state())?;
        map.serialize_entry("outcome", self.outcome())?;
        map.serialize_entry("call", &self.call)?;
        map.end()
    }
}

/// A message.
#[derive(Clone, Debug, Serialize)]
pub struct Message {
    /// Its number in this job.
    pub number: usize,
    /// The MPI library carries it, and nothing says which of its two ends belong together.
    pub is_by_mpi: bool,
    /// World ranks; absent where only the MPI library knows the other side.
    pub source: Option<u32>,
    pub destination: Option<u32>,
    pub tag: i32,
    pub bytes: u64,
    /// Identity of the communicator.
    #[serde(serialize_with = "hexadecimal")]
    pub communicator: u64,
    pub sender: Option<Half>,
    pub receiver: Option<Half>,
}

fn hexadecimal<S: Serializer>(number: &u64, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&format_args!("{number:016x}"))
}

impl Message {
    /// The protocol by which it came.
    pub fn protocol(&self) -> &'static str {
        let mut halves = [&self.receiver, &self.sender].into_iter().flatten();
        halves.find_map(Half::protocol).unwrap_or("none")
    }

    /// Its offer, or where only its receive is known its claim.
    pub fn begin_ns(&self) -> u64 {
        let half = self.sender.as_ref().or(self.receiver.as_ref());
        half.map_or(0, Half::at_ns)
    }

    /// From its beginning to its arrival.
    pub fn took_ns(&self) -> Option<u64> {
        let arrived = |half: &Option<Half>| {
            let half = half.as_ref()?;
            half.landed_ns().or(half.done_ns())
        };
        let end = arrived(&self.receiver).or(arrived(&self.sender))?;
        Some(end.saturating_sub(self.begin_ns()))
    }
}

/// One side of a message, as it was recorded.
pub struct Side {
    /// Number in its process.
    pub id: u32,
    pub half: Half,
    peer: i32,
    tag: i32,
    bytes: u64,
    comm: u16,
    nonce: u64,
}

impl Side {
    pub fn new(message: &record::Message, header: &Header) -> Side {
        Side {
            id: message.id,
            half: Half::new(message, header),
            peer: message.peer,
            tag: message.tag,
            bytes: message.bytes,
            comm: message.comm,
            nonce: message.nonce,
        }
    }

    fn is_sender(&self) -> bool {
        !self.half.is_receive
    }

    fn message(&self, own: u32, identity: u64) -> Message {
        let peer = (self.peer != NO_PEER).then_some(self.peer as u32);
        let (source, destination) = match self.is_sender() {
            true => (Some(own), peer),
            false => (peer, Some(own)),
        };
        Message {
            number: 0,
            is_by_mpi: self.nonce == 0,
            source,
            destination,
            tag: self.tag,
            bytes: self.bytes,
            communicator: identity,
            sender: self.is_sender().then_some(self.half),
            receiver: (!self.is_sender()).then_some(self.half),
        }
    }
}

/// Numbers of messages, by rank (its place among those read) and number in its process.
pub struct OfIds(Vec<Vec<u32>>);

impl OfIds {
    /// The message of this number in the process of a rank.
    pub fn get(&self, rank: usize, id: u32) -> Option<usize> {
        let number = *self.0.get(rank)?.get(id as usize)?;
        number.checked_sub(1).map(|number| number as usize)
    }
}

/// Both sides of a message have its sender and the same number.
pub fn join(read: &mut [Read]) -> (Vec<Message>, OfIds) {
    // Rank and place of each side, both sides of a message one after the other, the sender's first.
    let mut order: Vec<(u32, u64, bool, u32, u32)> = Vec::new();
    for (rank, one) in read.iter().enumerate() {
        let own = one.rank.header.rank;
        for (place, side) in one.sides.iter().enumerate() {
            let sender = if side.is_sender() {
                own
            } else {
                side.peer as u32
            };
            let nonce = if side.peer == NO_PEER { 0 } else { side.nonce };
            order.push((sender, nonce, !side.is_sender(), rank as u32, place as u32));
        }
    }
    order.sort_unstable();
    let mut messages: Vec<(Message, [(u32, u32); 2])> = Vec::new();
    const NOBODY: (u32, u32) = (u32::MAX, 0);
    for (at, (sender, nonce, is_receiver, rank, place)) in order.iter().enumerate() {
        let one = &read[*rank as usize];
        let side = &one.sides[*place as usize];
        let same = |before: &(u32, u64, bool, u32, u32)| {
            *nonce != 0 && (before.0, before.1) == (*sender, *nonce) && !before.2 && *is_receiver
        };
        let joins = at > 0 && same(&order[at - 1]);
        match messages.last_mut().filter(|_| joins) {
            Some((message, ids)) => {
                message.receiver = Some(side.half);
                ids[1] = (*rank, side.id);
            }
            None => {
                let identity = one.comms.get(&side.comm).copied().unwrap_or(0);
                let message = side.message(one.rank.header.rank, identity);
                messages.push((message, [(*rank, side.id), NOBODY]));
            }
        }
    }
    for one in read.iter_mut() {
        one.sides = Vec::new();
    }
    messages.sort_by_key(|(message, _)| message.begin_ns());
    let mut of_ids: Vec<Vec<u32>> = vec![Vec::new(); read.len()];
    for (number, (message, ids)) in messages.iter_mut().enumerate() {
        message.number = number;
        for (rank, id) in ids.iter().filter(|ids| **ids != NOBODY) {
            let row = &mut of_ids[*rank as usize];
            // Numbers count up from 1: a damaged file may have any.
            if *id as usize >= row.len() && (*id as usize) < IDS_MAX {
                row.resize(*id as usize + 1, 0);
            }
            if let Some(place) = row.get_mut(*id as usize) {
                *place = number as u32 + 1;
            }
        }
    }
    let messages = messages.into_iter().map(|(message, _)| message).collect();
    (messages, OfIds(of_ids))
}

/// Messages of a process that copies are brought together with.
const IDS_MAX: usize = 1 << 28;
