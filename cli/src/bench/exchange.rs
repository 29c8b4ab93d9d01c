//! The message patterns of the OSU micro-benchmarks.

use std::ffi::c_int;

use super::buffer::Buffer;
use super::mpi::{Mpi, Requests, Window};
use super::Kind;

const DATA_TAG: c_int = 100;
const ACK_TAG: c_int = 101;
/// Length of an acknowledgement.
pub const ACK_BYTES: usize = 4;

/// Where one message lies in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spot {
    /// From the start of the buffer, in bytes.
    pub offset: usize,
    /// Its length.
    pub bytes: usize,
}

/// This rank, its peer, and its two buffers.
pub struct Pair<'a> {
    /// MPI.
    pub mpi: &'a Mpi,
    /// What is measured.
    pub kind: Kind,
    /// Whether this rank is the first (0) or the second (1) of the pair.
    pub role: c_int,
    /// The rank of the other one.
    pub peer: c_int,
    /// Messages leave from here.
    pub send: Buffer,
    /// Messages arrive here.
    pub receive: Buffer,
    /// The same as a window, for one-sided messages.
    pub window: Option<Window>,
}

/// The messages of an iteration as persistent requests.
pub struct Prepared {
    receives: Requests,
    sends: Requests,
}

impl Pair<'_> {
    /// Makes persistent requests of the messages of an iteration, as [`Pair::exchange`] has them. To be
    /// freed.
    pub fn prepare(&self, out: &[Spot], into: &[Spot]) -> Prepared {
        let [to, from] = self.legs();
        let window = (out.len() / to.len().max(1)).max(1);
        let mut prepared = Prepared {
            receives: Requests::new(into.len()),
            sends: Requests::new(out.len()),
        };
        let receives = into.chunks(window).zip(from);
        for (spots, rank) in receives.filter(|_| self.receives()) {
            for spot in spots {
                let (address, requests) = (self.receive.at(spot.offset), &mut prepared.receives);
                // SAFETY: the spot lies in the buffer, which outlives the requests.
                unsafe { (self.mpi).recv_init(address, spot.bytes, rank, DATA_TAG, requests) };
            }
        }
        let sends = out.chunks(window).zip(to);
        for (spots, rank) in sends.filter(|_| self.sends()) {
            for spot in spots {
                let (address, requests) = (self.send.at(spot.offset), &mut prepared.sends);
                // SAFETY: the spot lies in the buffer, which outlives the requests.
                unsafe { (self.mpi).send_init(address, spot.bytes, rank, DATA_TAG, requests) };
            }
        }
        prepared
    }

    /// Frees them.
    pub fn discard(&self, mut prepared: Prepared) {
        self.mpi.free_all(&mut prepared.receives);
        self.mpi.free_all(&mut prepared.sends);
    }

    /// One iteration of persistent requests.
    pub fn exchange_again(&self, prepared: &mut Prepared) {
        let Prepared { receives, sends } = prepared;
        let mpi = self.mpi;
        let one_by_one = self.kind == Kind::Latency;
        if one_by_one && self.role == 0 {
            mpi.start_all(sends);
            mpi.wait_started(sends);
            mpi.start_all(receives);
            mpi.wait_started(receives);
        } else if one_by_one {
            mpi.start_all(receives);
            mpi.wait_started(receives);
            mpi.start_all(sends);
            mpi.wait_started(sends);
        } else {
            mpi.start_all(receives);
            mpi.start_all(sends);
            mpi.wait_started(sends);
            mpi.wait_started(receives);
            self.acknowledge();
        }
    }

    /// The end of a window that goes one way.
    fn acknowledge(&self) {
        match (self.kind, self.role) {
            (Kind::Bw | Kind::MbwMr, 0) => {
                let to = self.receive.at(0);
                // SAFETY: every buffer has room for an acknowledgement.
                unsafe { self.mpi.recv(to, ACK_BYTES, self.peer, ACK_TAG) };
            }
            (Kind::Bw | Kind::MbwMr, _) => {
                let from = self.send.at(0);
                // SAFETY: as above.
                unsafe { self.mpi.send(from, ACK_BYTES, self.peer, ACK_TAG) };
            }
            _ => {}
        }
    }

    /// Whether this rank sends messages that are measured.
    pub fn sends(&self) -> bool {
        self.role == 0 || !self.is_one_way()
    }

    /// Whether this rank receives messages that are measured.
    pub fn receives(&self) -> bool {
        self.role == 1 || !self.is_one_way()
    }

    /// Whether messages go from the first to the second only.
    fn is_one_way(&self) -> bool {
        self.kind.is_one_way()
    }

    /// To whom this rank sends, and from whom it receives.
    pub fn legs(&self) -> [Vec<c_int>; 2] {
        self.kind.legs(self.mpi.rank, self.mpi.size)
    }

    /// Sends this rank a word of its own: a library that takes part from its first message on does so from here on.
    pub fn try_out(&self, requests: &mut Requests) {
        let rank = self.mpi.rank;
        // SAFETY: both buffers have room for an acknowledgement, and live until the requests are complete.
        unsafe {
            let (to, from) = (self.receive.at(0), self.send.at(0));
            self.mpi.irecv(to, ACK_BYTES, rank, ACK_TAG, requests);
            self.mpi.isend(from, ACK_BYTES, rank, ACK_TAG, requests);
        }
        self.mpi.wait_all(requests);
    }

    /// Returns when all that measure at once have called it.
    pub fn meet(&self) {
        match self.kind {
            kind if kind.is_of_all() => self.mpi.barrier(),
            _ => self.mpi.meet(self.peer),
        }
    }

    /// One iteration: the messages of one window each way, or one round trip. One-sided messages go to `into`, which lies with
    /// the peer.
    pub fn exchange(&self, out: &[Spot], into: &[Spot], requests: &mut Requests) {
        match (self.kind, self.role) {
            (Kind::Ring | Kind::AllToAll | Kind::AllByNumber, _) => {
                let [to, from] = self.legs();
                let window = out.len() / to.len().max(1);
                for (spots, rank) in into.chunks(window.max(1)).zip(from) {
                    self.post_receives(spots, rank, requests);
                }
                for (spots, rank) in out.chunks(window.max(1)).zip(to) {
                    self.post_sends(spots, rank, requests);
                }
                self.mpi.wait_all(requests);
            }
            (Kind::Bw | Kind::MbwMr, 0) => {
                self.post_sends(out, self.peer, requests);
                self.mpi.wait_all(requests);
                self.acknowledge();
            }
            (Kind::Bw | Kind::MbwMr, _) => {
                self.post_receives(into, self.peer, requests);
                self.mpi.wait_all(requests);
                self.acknowledge();
            }
            (Kind::Bibw, _) => {
                self.post_receives(into, self.peer, requests);
                self.post_sends(out, self.peer, requests);
                // The sends by themselves, first: so does osu_bibw.
                self.mpi.wait_from(into.len(), requests);
                self.mpi.wait_all(requests);
            }
            (Kind::Put, role) => {
                let Some(window) = &self.window else { return };
                let messages = out.iter().zip(into).filter(|_| role == 0);
                for (from, to) in messages {
                    let address = self.send.at(from.offset);
                    // SAFETY: both spots lie in their buffers; the next fence follows.
                    unsafe {
                        self.mpi
                            .put(address, from.bytes, self.peer, to.offset, window)
                    };
                }
                self.mpi.fence(window);
            }
            (Kind::Exchange, _) => {
                for (from, to) in out.iter().zip(into) {
                    let (from, to) = (self.send.at(from.offset), self.receive.at(to.offset));
                    // SAFETY: both spots are as long, and lie in their buffers.
                    unsafe { (self.mpi).sendrecv(from, to, out[0].bytes, self.peer, DATA_TAG) };
                }
            }
            (Kind::Latency, 0) => {
                self.send_one(out[0]);
                self.receive_one(into[0]);
            }
            (Kind::Latency, _) => {
                self.receive_one(into[0]);
                self.send_one(out[0]);
            }
        }
    }

    fn post_sends(&self, spots: &[Spot], to: c_int, requests: &mut Requests) {
        for spot in spots {
            let address = self.send.at(spot.offset);
            // SAFETY: the spot lies in the buffer, which outlives the wait that follows.
            unsafe { self.mpi.isend(address, spot.bytes, to, DATA_TAG, requests) };
        }
    }

    fn post_receives(&self, spots: &[Spot], from: c_int, requests: &mut Requests) {
        for spot in spots {
            let address = self.receive.at(spot.offset);
            // SAFETY: the spot lies in the buffer, which outlives the wait that follows.
            unsafe {
                self.mpi
                    .irecv(address, spot.bytes, from, DATA_TAG, requests)
            };
        }
    }

    fn send_one(&self, spot: Spot) {
        // SAFETY: the spot lies in the buffer.
        unsafe {
            self.mpi
                .send(self.send.at(spot.offset), spot.bytes, self.peer, DATA_TAG)
        };
    }

    fn receive_one(&self, spot: Spot) {
        // SAFETY: the spot lies in the buffer.
        unsafe {
            self.mpi.recv(
                self.receive.at(spot.offset),
                spot.bytes,
                self.peer,
                DATA_TAG,
            )
        };
    }
}
