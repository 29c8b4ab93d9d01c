//! Copies: for which message they are made, and what is recorded of them when they are over.

use std::cell::Cell;
use std::sync::OnceLock;

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::clock::now;
use super::record::{By, Copied, Place, Record, Way};
use super::{on, open::Followed, put, NEXT};

/// A GPU's identity.
type Uuid = [u8; 16];

/// Places that get a number: more GPUs than a node has.
const PLACES_MAX: usize = 1 << 10;

/// GPUs that copies were recorded of, by their numbers less 1. Host memory is 0.
static PLACES: Mutex<Vec<Uuid>> = Mutex::new(Vec::new());
/// Tells ordinal, memory node and PCI address of a GPU.
static DESCRIBE: OnceLock<fn(Uuid) -> Place> = OnceLock::new();

thread_local! {
    /// The message that this thread makes copies for; 0: none.
    static COPIES_OF: Cell<u32> = const { Cell::new(0) };
    /// Numbers of GPUs that this thread asked for last.
    static KNOWN: Cell<[(Uuid, u16); 4]> = const { Cell::new([([0; 16], 0); 4]) };
    /// They are on their way over another GPU.
    static VIA_RELAY: Cell<bool> = const { Cell::new(false) };
    /// The number that copies were made under for a message that is not followed yet; 0: none.
    static RESERVED: Cell<u32> = const { Cell::new(0) };
}

/// From now on places are described by this.
pub fn describe_places(describe: fn(Uuid) -> Place) {
    let _ = DESCRIBE.set(describe);
}

/// Until this is dropped, copies that this thread queues or launches are those of a message.
#[derive(Debug)]
#[must_use = "copies are made meanwhile"]
pub struct CopiesOf(Option<u32>);

impl Drop for CopiesOf {
    #[inline]
    fn drop(&mut self) {
        if let Some(before) = self.0 {
            COPIES_OF.set(before);
        }
    }
}

/// See [`CopiesOf`].
#[inline]
pub fn copies_of(followed: Followed) -> CopiesOf {
    CopiesOf(on().then(|| COPIES_OF.replace(followed.id())))
}

/// The same for the message that this thread follows next.
#[inline]
pub fn copies_of_next() -> CopiesOf {
    CopiesOf(on().then(|| {
        if RESERVED.get() == 0 {
            RESERVED.set(next_id());
        }
        COPIES_OF.replace(RESERVED.get())
    }))
}

/// Copies that this thread queues or launches meanwhile are for no message.
#[inline]
pub fn copies_of_none() -> CopiesOf {
    copies_of(Followed::NONE)
}

/// Never 0, not even after four thousand million messages.
fn next_id() -> u32 {
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
        .max(1)
}

/// The number of a message that is followed from now on.
pub(super) fn take_id() -> u32 {
    match RESERVED.take() {
        0 => next_id(),
        reserved => reserved,
    }
}

/// The call is over: what was reserved for a message that did not come about is another's.
pub(super) fn forget_reserved() {
    RESERVED.set(0);
}

/// Until this is dropped, copies that this thread queues or launches go over another GPU.
#[derive(Debug)]
#[must_use = "copies are made meanwhile"]
pub struct ViaRelay(bool);

impl Drop for ViaRelay {
    fn drop(&mut self) {
        VIA_RELAY.set(self.0);
    }
}

/// See [`ViaRelay`].
pub fn via_relay(is_one: bool) -> ViaRelay {
    ViaRelay(VIA_RELAY.replace(is_one))
}

/// A copy that is about to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copying {
    message: u32,
    stream: u32,
    from: u16,
    to: u16,
    way: Way,
    hop: u8,
    bytes: u64,
}

impl Copying {
    /// A copy between two GPUs, or one and host memory (`None`); `None` where nothing is recorded.
    #[inline]
    #[must_use]
    pub fn new(ends: [Option<Uuid>; 2], hop: u8, bytes: u64, stream: u32) -> Option<Copying> {
        on().then(|| Copying::recorded(ends, hop, bytes, stream))
    }

    #[cold]
    fn recorded(ends: [Option<Uuid>; 2], hop: u8, bytes: u64, stream: u32) -> Copying {
        let [from, to] = ends.map(|end| end.map_or(0, place_number));
        let way = match (VIA_RELAY.get(), from, to) {
            (true, ..) => Way::Relay,
            (_, 0, _) | (.., 0) => Way::Host,
            _ => Way::Direct,
        };
        Copying {
            message: COPIES_OF.get(),
            stream,
            from,
            to,
            way,
            hop,
            bytes,
        }
    }
}

fn place_number(uuid: Uuid) -> u16 {
    let mut known = KNOWN.get();
    if let Some((_, number)) = known.iter().find(|(place, _)| *place == uuid) {
        return *number;
    }
    let number = shared_number(uuid);
    known.rotate_right(1);
    known[0] = (uuid, number);
    KNOWN.set(known);
    number
}

#[cold]
fn shared_number(uuid: Uuid) -> u16 {
    let mut places = PLACES.lock();
    let found = places.iter().position(|place| *place == uuid);
    let place = found.unwrap_or(places.len()).min(PLACES_MAX);
    let number = place as u16 + 1;
    if found.is_none() && places.len() < PLACES_MAX {
        places.push(uuid);
        let unknown = |uuid| Place {
            number: 0,
            ordinal: -1,
            numa: -1,
            pci: 0,
            uuid,
        };
        let known = DESCRIBE
            .get()
            .map_or_else(|| unknown(uuid), |describe| describe(uuid));
        put(Record::Place(Place { number, ..known }));
    }
    number
}

/// Copies that were launched together, until they are over. Empty where nothing is recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Launched {
    copies: SmallVec<[Copying; 1]>,
    at: u64,
    by_graph: bool,
}

impl Launched {
    /// They have just been launched.
    #[must_use]
    pub fn now(copies: impl Iterator<Item = Copying>) -> Launched {
        let copies: SmallVec<[Copying; 1]> = copies.collect();
        Launched {
            at: if copies.is_empty() { 0 } else { now() },
            copies,
            by_graph: false,
        }
    }

    /// The same of a CUDA graph.
    #[must_use]
    pub fn by_graph(self) -> Launched {
        Launched {
            by_graph: true,
            ..self
        }
    }

    /// Whether anything is recorded.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.copies.is_empty()
    }

    /// They are over. `asked`: when they were last seen not to be ([`asked`]).
    #[inline]
    pub fn ended(&self, asked: u64) {
        if !self.copies.is_empty() {
            self.record(asked);
        }
    }

    #[cold]
    fn record(&self, asked: u64) {
        let end = now();
        let by = match (self.by_graph, self.copies.len()) {
            (true, _) => By::Graph,
            (_, 1) => By::Stream,
            _ => By::Batch,
        };
        for copy in self.copies.iter().filter(|_| on()) {
            put(Record::Copied(Copied {
                message: copy.message,
                way: copy.way,
                hop: copy.hop,
                by,
                from: copy.from,
                to: copy.to,
                bytes: copy.bytes,
                launched: self.at,
                end,
                uncertain: end.saturating_sub(asked.max(self.at)),
                stream: copy.stream,
            }));
        }
    }
}

/// Copies are seen not to be over now; 0 where nothing is recorded.
#[inline]
#[must_use]
pub fn asked() -> u64 {
    if on() {
        now()
    } else {
        0
    }
}
