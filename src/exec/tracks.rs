//! Contexts, streams and events with which plans are driven.
//!
//! All streams of a context are made when a plan first uses it, like those of [`crate::cuda::lanes`]: making
//! one later could get stuck behind a wait of the program's. They wait only for copies that have been
//! launched already.

use crate::cuda::reach::HeldContext;
use crate::cuda::types::{code, Event, Stream, EVENT_DISABLE_TIMING, STREAM_NON_BLOCKING};
use crate::cuda::{ContextKey, Entered, Error, Result};
use crate::plan::Engine;

/// Streams for copies between GPUs in each context, one for each path; if there are more paths, they share
/// them.
const PEER_STREAMS: usize = 5;
/// Streams in which graphs are launched, so that as many can be under way at once.
pub const LAUNCH_STREAMS: usize = 4;
/// Contexts that plans are driven in at one time.
const CONTEXTS_MAX: usize = 64;

/// The streams of one context.
#[derive(Debug)]
struct Track {
    key: ContextKey,
    peer: Vec<Stream>,
    to_host: Vec<Stream>,
    to_device: Vec<Stream>,
    launch: Vec<Stream>,
    /// Events that nobody uses.
    idle: Vec<Event>,
    /// For streams of lanes: the end of the work that graphs do in their place.
    gates: Vec<(Stream, Event)>,
}

/// An event, and the context it was made in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The context.
    pub key: ContextKey,
    /// The event.
    pub event: Event,
}

/// A stream, and its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// The context.
    pub key: ContextKey,
    /// The stream.
    pub stream: Stream,
}

/// Peer access that was opened from one context to another.
#[derive(Debug)]
struct Access {
    from: ContextKey,
    to: ContextKey,
    /// It was not open before.
    is_own: bool,
}

/// Contexts, streams and events of the plans that this process drives.
#[derive(Debug, Default)]
pub struct Tracks {
    rows: Vec<Track>,
    held: Vec<(i32, HeldContext)>,
    accesses: Vec<Access>,
}

impl Tracks {
    /// The primary context of a device, made if there is none, and kept until [`Tracks::close`].
    ///
    /// # Errors
    /// There is no such device, or no memory for a context.
    pub fn hold(&mut self, ordinal: i32) -> Result<ContextKey> {
        self.held.retain(|(_, held)| held.key.is_alive());
        if let Some((_, held)) = self.held.iter().find(|(known, _)| *known == ordinal) {
            return Ok(held.key);
        }
        let held = HeldContext::hold(ordinal)?;
        let key = held.key;
        self.held.push((ordinal, held));
        Ok(key)
    }

    /// Contexts that are kept.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Makes the streams of a context, unless it has them.
    ///
    /// # Errors
    /// The driver's, or the context is gone.
    pub fn open(&mut self, key: ContextKey) -> Result<()> {
        if self.rows.iter().any(|row| row.key == key) {
            return Ok(());
        }
        let lost = |row: &Track| row.key.handle == key.handle || !row.key.is_alive();
        self.rows.retain(|row| !lost(row));
        self.accesses
            .retain(|row| row.from.is_alive() && row.to.is_alive());
        if self.rows.len() >= CONTEXTS_MAX {
            return Err(Error::Exhausted("contexts"));
        }
        let entered = Entered::enter_same(key)?;
        let mut row = Track {
            key,
            peer: Vec::new(),
            to_host: Vec::new(),
            to_device: Vec::new(),
            launch: Vec::new(),
            idle: Vec::new(),
            gates: Vec::new(),
        };
        let made = [
            (&mut row.peer, PEER_STREAMS),
            (&mut row.to_host, 1),
            (&mut row.to_device, 1),
            (&mut row.launch, LAUNCH_STREAMS),
        ]
        .into_iter()
        .try_for_each(|(streams, count)| {
            for _ in 0..count {
                let mut stream = Stream::NULL;
                entered
                    .driver()
                    .stream_create(&mut stream, STREAM_NON_BLOCKING)?;
                streams.push(stream);
            }
            Ok(())
        });
        if let Err(error) = made {
            row.destroy(&entered);
            return Err(error);
        }
        self.rows.push(row);
        Ok(())
    }

    fn row(&mut self, key: ContextKey) -> Result<&mut Track> {
        let mut rows = self.rows.iter_mut();
        rows.find(|row| row.key == key).ok_or(Error::ContextLost)
    }

    /// The stream of a lane: the `number`-th of its GPU and direction.
    ///
    /// # Errors
    /// The context has no streams.
    pub fn lane(&mut self, key: ContextKey, engine: Engine, number: u32) -> Result<Way> {
        let row = self.row(key)?;
        let streams = match engine {
            Engine::Peer(_) => &row.peer,
            Engine::ToHost(_) => &row.to_host,
            Engine::ToDevice(_) => &row.to_device,
        };
        let stream = streams[number as usize % streams.len()];
        Ok(Way { key, stream })
    }

    /// The event at which a lane of a graph ends, and the same lane of the next graph begins.
    ///
    /// # Errors
    /// The driver's, or the context has no streams.
    pub fn gate(&mut self, key: ContextKey, engine: Engine, number: u32) -> Result<Event> {
        let stream = self.lane(key, engine, number)?.stream;
        let row = self.row(key)?;
        if let Some((_, event)) = row.gates.iter().find(|(of, _)| *of == stream) {
            return Ok(*event);
        }
        let entered = Entered::enter_same(key)?;
        let event = self.mark(&entered, key)?.event;
        self.row(key)?.gates.push((stream, event));
        Ok(event)
    }

    /// A stream to launch a graph in.
    ///
    /// # Errors
    /// The context has no streams.
    pub fn launcher(&mut self, key: ContextKey, number: usize) -> Result<Way> {
        let row = self.row(key)?;
        let stream = row.launch[number % row.launch.len()];
        Ok(Way { key, stream })
    }

    /// An event of the context that is entered.
    ///
    /// # Errors
    /// The driver's.
    pub fn mark(&mut self, entered: &Entered, key: ContextKey) -> Result<Mark> {
        let row = self.row(key)?;
        if let Some(event) = row.idle.pop() {
            return Ok(Mark { key, event });
        }
        let mut event = Event::NULL;
        entered
            .driver()
            .event_create(&mut event, EVENT_DISABLE_TIMING)?;
        Ok(Mark { key, event })
    }

    /// Marks the end of what is launched on a stream of the context that is entered.
    ///
    /// # Errors
    /// The driver has no event, or does not record it.
    pub fn record(&mut self, entered: &Entered, way: Way) -> Result<Mark> {
        let mark = self.mark(entered, way.key)?;
        match entered.driver().event_record(mark.event, way.stream) {
            Ok(()) => Ok(mark),
            Err(error) => {
                self.give_back(mark);
                Err(error)
            }
        }
    }

    /// Takes an event back, once nothing waits for it any more.
    pub fn give_back(&mut self, mark: Mark) {
        // Where the context is gone, so is the event.
        if let Ok(row) = self.row(mark.key) {
            row.idle.push(mark.event);
        }
    }

    /// Lets the engines of one context reach the memory of another.
    ///
    /// # Errors
    /// They cannot.
    pub fn allow(&mut self, from: ContextKey, to: ContextKey) -> Result<()> {
        let mut known = self.accesses.iter();
        if from == to || known.any(|row| (row.from, row.to) == (from, to)) {
            return Ok(());
        }
        let entered = Entered::enter_same(from)?;
        // SAFETY: the driver checks the handle.
        let is_own = match unsafe { entered.driver().ctx_enable_peer_access(to.handle, 0) } {
            Ok(()) => true,
            Err(error) if error.is(code::PEER_ACCESS_ALREADY_ENABLED) => false,
            Err(error) => return Err(error),
        };
        self.accesses.push(Access { from, to, is_own });
        Ok(())
    }

    /// Waits for all streams and destroys them with the events.
    pub fn close_streams(&mut self) {
        for mut row in self.rows.drain(..) {
            if let Ok(entered) = Entered::enter_same(row.key) {
                row.destroy(&entered);
            }
        }
    }

    /// Takes back the access that was opened, and gives the contexts back: at finalize, when nothing is left
    /// in them.
    pub fn close(&mut self) {
        self.close_streams();
        for row in self.accesses.drain(..).filter(|row| row.is_own) {
            let Ok(entered) = Entered::enter_same(row.from) else {
                continue;
            };
            if row.to.is_alive() {
                // SAFETY: the driver checks the handle.
                let closed = unsafe { entered.driver().ctx_disable_peer_access(row.to.handle) };
                if let Err(error) = closed {
                    log::debug!("closing peer access: {error}");
                }
            }
        }
        self.held.clear();
    }
}

impl Track {
    fn destroy(&mut self, entered: &Entered) {
        let driver = entered.driver();
        let streams = [
            &mut self.peer,
            &mut self.to_host,
            &mut self.to_device,
            &mut self.launch,
        ];
        for stream in streams.into_iter().flat_map(|row| row.drain(..)) {
            // SAFETY: made in this context, and used by nobody any more.
            let ended = unsafe {
                driver
                    .stream_synchronize(stream)
                    .and(driver.stream_destroy(stream))
            };
            if let Err(error) = ended {
                log::debug!("closing a stream: {error}");
            }
        }
        let gates = self.gates.drain(..).map(|(_, event)| event);
        for event in self.idle.drain(..).chain(gates) {
            // SAFETY: as above.
            let _ = unsafe { driver.event_destroy(event) };
        }
    }
}
