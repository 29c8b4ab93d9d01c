//! Records: 64 bytes each, eight words. What writes them and what reads them are side by side here.

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
    /// When it was made, and when it returned, ns.
    pub begin: u64,
    /// See `begin`.
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

/// One side of a message that the library carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Number in this process, from 1 on.
    pub id: u64,
    /// Which side this is.
    pub side: Side,
    /// When it was offered, or claimed, ns.
    pub at: u64,
    /// World rank of the other side.
    pub peer: i32,
    /// Tag.
    pub tag: i32,
    /// Bytes.
    pub bytes: u64,
    /// Identity of the communicator.
    pub comm: u64,
    /// The same at both ends, together with the sender's rank; 0: the MPI library carries it.
    pub nonce: u64,
    /// The call that began it.
    pub call: u64,
}

/// A message enters a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The message.
    pub id: u64,
    /// When, ns.
    pub at: u64,
    /// Number of the state, by the names in the header.
    pub state: u8,
    /// Number of the protocol, by the names in the header, from 1 on; 0: none yet.
    pub protocol: u8,
}

/// The receive of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Posted {
    /// The message.
    pub id: u64,
    /// When its receive was posted, ns.
    pub at: u64,
    /// The call that posted it.
    pub call: u64,
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
    /// See [`Change`].
    Change(Change),
    /// See [`Posted`].
    Posted(Posted),
    /// See [`Fallback`].
    Fallback(Fallback),
    /// See [`End`].
    End(End),
    /// See [`Sync`].
    Sync(Sync),
}

fn pair(low: i32, high: i32) -> u64 {
    u64::from(low as u32) | u64::from(high as u32) << 32
}

fn halves(word: u64) -> (i32, i32) {
    (word as u32 as i32, (word >> 32) as u32 as i32)
}

impl Record {
    /// As it lies in a file.
    #[inline]
    #[must_use]
    pub fn encode(&self) -> Words {
        match *self {
            Record::Call(call) => [
                1 | u64::from(call.function) << 16 | u64::from(call.times) << 32,
                call.begin,
                call.end,
                call.comm,
                pair(call.peer, call.tag),
                call.count as u64,
                // Tests have no bytes.
                if call.times > 1 {
                    call.inside
                } else {
                    call.bytes
                },
                call.number,
            ],
            Record::Message(message) => [
                2 | u64::from(message.side == Side::Receiver) << 8,
                message.at,
                message.id,
                message.nonce,
                pair(message.peer, message.tag),
                message.bytes,
                message.comm,
                message.call,
            ],
            Record::Change(change) => [
                3 | u64::from(change.state) << 8 | u64::from(change.protocol) << 16,
                change.at,
                change.id,
                0,
                0,
                0,
                0,
                0,
            ],
            Record::Posted(posted) => [4, posted.at, posted.id, 0, 0, 0, 0, posted.call],
            Record::Fallback(fallback) => [
                5 | u64::from(fallback.reason) << 8,
                fallback.at,
                0,
                0,
                0,
                fallback.bytes,
                0,
                fallback.call,
            ],
            Record::Sync(sync) => [7, sync.ticks, sync.ns, 0, 0, 0, 0, 0],
            Record::End(end) => [
                6 | u64::from(end.is_finalized) << 8,
                end.at,
                end.recorded,
                end.dropped,
                0,
                0,
                0,
                0,
            ],
        }
    }

    /// What lies in a file. `None` if it is none of these.
    #[must_use]
    pub fn decode(words: &Words) -> Option<Record> {
        let [first, at, second, third, both, bytes, comm, call] = *words;
        let byte = (first >> 8) as u8;
        let (peer, tag) = halves(both);
        Some(match first as u8 {
            1 => Record::Call(Call {
                function: (first >> 16) as u16,
                begin: at,
                end: second,
                comm: third,
                peer,
                tag,
                count: bytes as i64,
                bytes: if first >> 32 > 1 { 0 } else { comm },
                times: (first >> 32) as u32,
                inside: if first >> 32 > 1 {
                    comm
                } else {
                    second.saturating_sub(at)
                },
                number: call,
            }),
            2 => Record::Message(Message {
                side: if byte == 0 {
                    Side::Sender
                } else {
                    Side::Receiver
                },
                at,
                id: second,
                nonce: third,
                peer,
                tag,
                bytes,
                comm,
                call,
            }),
            3 => Record::Change(Change {
                id: second,
                at,
                state: byte,
                protocol: (first >> 16) as u8,
            }),
            4 => Record::Posted(Posted {
                id: second,
                at,
                call,
            }),
            5 => Record::Fallback(Fallback {
                at,
                reason: byte,
                bytes,
                call,
            }),
            6 => Record::End(End {
                at,
                recorded: second,
                dropped: third,
                is_finalized: byte != 0,
            }),
            7 => Record::Sync(Sync {
                ticks: at,
                ns: second,
            }),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_decoded() {
        let call = Call {
            number: 7 << 32 | 9,
            function: 300,
            begin: 1,
            end: u64::MAX,
            times: 1,
            inside: u64::MAX - 1,
            comm: 0xfeed_face_cafe_beef,
            peer: -2,
            tag: i32::MAX,
            count: -1,
            bytes: 1 << 41,
        };
        let message = Message {
            id: 12,
            side: Side::Receiver,
            at: 5,
            peer: 3,
            tag: -1,
            bytes: u64::MAX,
            comm: 8,
            nonce: 0x100,
            call: 1,
        };
        let tests = Call {
            times: u32::MAX,
            inside: 77,
            bytes: 0,
            ..call
        };
        let records = [
            Record::Call(call),
            Record::Call(tests),
            Record::Message(message),
            Record::Message(Message {
                side: Side::Sender,
                ..message
            }),
            Record::Change(Change {
                id: 12,
                at: 6,
                state: 7,
                protocol: 10,
            }),
            Record::Posted(Posted {
                id: 12,
                at: 4,
                call: 2,
            }),
            Record::Fallback(Fallback {
                at: 9,
                reason: 31,
                bytes: 77,
                call: 3,
            }),
            Record::End(End {
                at: 10,
                recorded: 6,
                dropped: 1,
                is_finalized: true,
            }),
        ];
        let records = records
            .into_iter()
            .chain([Record::Sync(Sync { ticks: 1, ns: 2 })]);
        for record in records {
            assert_eq!(Record::decode(&record.encode()), Some(record));
        }
        assert_eq!(Record::decode(&[0; 8]), None);
        assert_eq!(Record::decode(&[200; 8]), None);
    }
}
