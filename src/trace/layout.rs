//! Where a record's fields lie. What writes them and what reads them are side by side here.

use super::record::{
    pack_span, unpack_span, By, Call, Comm, Copied, End, Fallback, Lane, Message, Outcome, Place,
    Planned, Record, Side, Sync, Ucp, UcpOutcome, Way, Words,
};

fn pair(low: i32, high: i32) -> u64 {
    u64::from(low as u32) | u64::from(high as u32) << 32
}

fn halves(word: u64) -> (i32, i32) {
    (word as u32 as i32, (word >> 32) as u32 as i32)
}

/// Bytes of a message that a record can say: 256 TiB.
const BYTES_MAX: u64 = (1 << 48) - 1;

fn pack_spans([first, second]: [Option<u64>; 2]) -> u64 {
    let word = |span: Option<u64>| u64::from(span.map_or(0, pack_span));
    word(first) | word(second) << 32
}

fn unpack_spans(word: u64) -> [Option<u64>; 2] {
    [unpack_span(word as u32), unpack_span((word >> 32) as u32)]
}

impl Message {
    fn encode(&self) -> Words {
        let is_receiver = self.side == Side::Receiver;
        let [matched, moving, landed, done] = self.after;
        [
            2 | u64::from(is_receiver) << 8
                | (self.outcome as u64) << 12
                | u64::from(self.state) << 16
                | u64::from(self.protocol) << 24
                | u64::from(self.id) << 32,
            self.begin,
            self.nonce,
            pair(self.peer, self.tag),
            self.bytes.min(BYTES_MAX) | u64::from(self.comm) << 48,
            self.call,
            pack_spans([matched, moving]),
            pack_spans([landed, done]),
        ]
    }

    fn decode(words: &Words) -> Message {
        let [first, begin, nonce, both, bytes, call, early, late] = *words;
        let (peer, tag) = halves(both);
        let [matched, moving] = unpack_spans(early);
        let [landed, done] = unpack_spans(late);
        Message {
            id: (first >> 32) as u32,
            side: match first >> 8 & 1 {
                0 => Side::Sender,
                _ => Side::Receiver,
            },
            outcome: match first >> 12 & 3 {
                0 => Outcome::UnderWay,
                1 => Outcome::Complete,
                2 => Outcome::Failed,
                _ => Outcome::Cancelled,
            },
            state: (first >> 16) as u8,
            protocol: (first >> 24) as u8,
            begin,
            peer,
            tag,
            bytes: bytes & BYTES_MAX,
            comm: (bytes >> 48) as u16,
            nonce,
            call,
            after: [matched, moving, landed, done],
        }
    }
}

impl Copied {
    fn encode(&self) -> Words {
        [
            9 | (self.way as u64) << 8
                | u64::from(self.hop) << 16
                | (self.by as u64) << 24
                | u64::from(self.message) << 32,
            self.launched,
            self.end,
            self.uncertain,
            u64::from(self.from) | u64::from(self.to) << 16 | u64::from(self.stream) << 32,
            self.bytes,
            0,
            0,
        ]
    }

    fn decode(words: &Words) -> Copied {
        let [first, launched, end, uncertain, places, bytes, ..] = *words;
        Copied {
            message: (first >> 32) as u32,
            way: match first >> 8 & 3 {
                0 => Way::Direct,
                1 => Way::Relay,
                _ => Way::Host,
            },
            hop: (first >> 16) as u8,
            by: match first >> 24 & 3 {
                0 => By::Stream,
                1 => By::Batch,
                2 => By::Graph,
                _ => By::Cpu,
            },
            from: places as u16,
            to: (places >> 16) as u16,
            bytes,
            launched,
            end,
            uncertain,
            stream: (places >> 32) as u32,
        }
    }
}

impl Place {
    fn encode(&self) -> Words {
        let (low, high) = self.uuid.split_at(8);
        let word = |bytes: &[u8]| {
            bytes
                .iter()
                .rev()
                .fold(0, |word, byte| word << 8 | u64::from(*byte))
        };
        [
            10 | u64::from(self.number) << 32,
            pair(self.ordinal, self.numa),
            self.pci,
            word(low),
            word(high),
            0,
            0,
            0,
        ]
    }

    fn decode(words: &Words) -> Place {
        let [first, both, pci, low, high, ..] = *words;
        let (ordinal, numa) = halves(both);
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&low.to_le_bytes());
        uuid[8..].copy_from_slice(&high.to_le_bytes());
        Place {
            number: (first >> 32) as u16,
            ordinal,
            numa,
            pci,
            uuid,
        }
    }
}

impl Ucp {
    fn encode(&self) -> Words {
        [
            12 | u64::from(self.function) << 8
                | (self.outcome as u64) << 16
                | u64::from(self.endpoint) << 32,
            self.begin,
            self.end,
            self.bytes.unwrap_or(u64::MAX),
            self.tag,
            self.call,
            0,
            0,
        ]
    }

    fn decode(words: &Words) -> Ucp {
        let [first, begin, end, bytes, tag, call, ..] = *words;
        Ucp {
            function: (first >> 8) as u8,
            outcome: match first >> 16 & 3 {
                0 => UcpOutcome::Done,
                1 => UcpOutcome::UnderWay,
                _ => UcpOutcome::Failed,
            },
            endpoint: (first >> 32) as u32,
            begin,
            end,
            bytes: Some(bytes).filter(|bytes| *bytes != u64::MAX),
            tag,
            call,
        }
    }
}

impl Lane {
    fn encode(&self) -> Words {
        let first = 13
            | u64::from(self.lane) << 8
            | u64::from(self.lanes) << 16
            | u64::from(self.endpoint) << 32;
        let mut words = [first; 8];
        for (word, bytes) in words[1..].iter_mut().zip(self.text.chunks_exact(8)) {
            *word = u64::from_le_bytes(std::array::from_fn(|at| bytes[at]));
        }
        words
    }

    fn decode(words: &Words) -> Lane {
        let [first, text @ ..] = words;
        let mut bytes = [0; Lane::TEXT];
        for (to, word) in bytes.chunks_exact_mut(8).zip(text) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        Lane {
            endpoint: (first >> 32) as u32,
            lane: (first >> 8) as u8,
            lanes: (first >> 16) as u8,
            text: bytes,
        }
    }
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
            Record::Message(message) => message.encode(),
            Record::Comm(comm) => {
                let first = 8 | u64::from(comm.number) << 32;
                [first, comm.identity, 0, 0, 0, 0, 0, 0]
            }
            Record::Copied(copied) => copied.encode(),
            Record::Place(place) => place.encode(),
            Record::Planned(planned) => {
                let [direct, relay, host] = planned.bytes;
                let first = 11 | u64::from(planned.message) << 32;
                [first, planned.predicted_ns, direct, relay, host, 0, 0, 0]
            }
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
            Record::Ucp(ucp) => ucp.encode(),
            Record::Lane(lane) => lane.encode(),
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
            2 => Record::Message(Message::decode(words)),
            8 => Record::Comm(Comm {
                number: (first >> 32) as u16,
                identity: at,
            }),
            9 => Record::Copied(Copied::decode(words)),
            10 => Record::Place(Place::decode(words)),
            11 => Record::Planned(Planned {
                message: (first >> 32) as u32,
                predicted_ns: at,
                bytes: [second, third, both],
            }),
            5 => Record::Fallback(Fallback {
                at,
                reason: byte,
                bytes,
                call,
            }),
            12 => Record::Ucp(Ucp::decode(words)),
            13 => Record::Lane(Lane::decode(words)),
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

    /// A record of each kind, and of messages and copies the extremes.
    fn samples() -> Vec<Record> {
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
            id: u32::MAX,
            side: Side::Receiver,
            outcome: Outcome::Cancelled,
            state: 7,
            protocol: 10,
            begin: 5,
            peer: 3,
            tag: -1,
            bytes: BYTES_MAX,
            comm: u16::MAX,
            nonce: 0x100,
            call: 1,
            after: [Some(1), None, Some(7), Some(1 << 40)],
        };
        let copied = Copied {
            message: 12,
            way: Way::Relay,
            hop: 1,
            by: By::Graph,
            from: u16::MAX,
            to: 3,
            bytes: 1 << 40,
            launched: 7,
            end: u64::MAX,
            uncertain: 8,
            stream: u32::MAX,
        };
        let place = Place {
            number: 9,
            ordinal: -1,
            numa: 1,
            pci: u64::MAX - 1,
            uuid: std::array::from_fn(|at| at as u8 + 100),
        };
        let tests = Call {
            times: u32::MAX,
            inside: 77,
            bytes: 0,
            ..call
        };
        let messages = [
            Record::Message(message),
            Record::Message(Message {
                side: Side::Sender,
                ..message
            }),
            Record::Message(Message {
                outcome: Outcome::UnderWay,
                after: [None; 4],
                ..message
            }),
        ];
        let copies = [
            Record::Copied(copied),
            Record::Copied(Copied {
                way: Way::Host,
                by: By::Cpu,
                ..copied
            }),
        ];
        let calls = [
            Record::Call(call),
            Record::Call(tests),
            Record::Place(place),
        ];
        calls.into_iter().chain(messages).chain(copies).collect()
    }

    fn of_ucx() -> [Record; 3] {
        let call = Ucp {
            function: 30,
            outcome: UcpOutcome::UnderWay,
            endpoint: 77,
            begin: 5,
            end: u64::MAX,
            bytes: Some(1 << 40),
            tag: u64::MAX,
            call: 8,
        };
        let failed = Ucp {
            outcome: UcpOutcome::Failed,
            bytes: None,
            ..call
        };
        let lane = Lane {
            endpoint: u32::MAX,
            lane: 3,
            lanes: 255,
            text: std::array::from_fn(|at| at as u8),
        };
        [Record::Ucp(call), Record::Ucp(failed), Record::Lane(lane)]
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let records = [
            Record::Comm(Comm {
                number: 3,
                identity: u64::MAX,
            }),
            Record::Planned(Planned {
                message: 8,
                predicted_ns: 9,
                bytes: [1, u64::MAX, 3],
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
        let records = records.into_iter().chain(samples()).chain(of_ucx());
        let records = records.chain([Record::Sync(Sync { ticks: 1, ns: 2 })]);
        for record in records {
            assert_eq!(Record::decode(&record.encode()), Some(record));
        }
        // Long spans are rounded, by less than a thousandth of a thousandth.
        for span in [(1 << 31) + 1, 7_000_000_000_000 / 5] {
            let told = unpack_span(pack_span(span)).expect("a span");
            assert!(span - told < 1024, "{span} {told}");
        }
        assert_eq!(unpack_span(pack_span(0)), Some(1));
        assert_eq!(Record::decode(&[0; 8]), None);
        assert_eq!(Record::decode(&[200; 8]), None);
    }
}
