//! An archive in the Open Trace Format 2, for Vampir and its like: a location for each thread, with its calls and the
//! messages that they began.
//!
//! A thread's calls do not nest, so each event of a message is within one of them or between two. Its place is decided
//! first and its time follows, so that times never go back, whatever clocks and damaged files say.

mod library;

use std::collections::{BTreeMap, HashMap};
use std::io::ErrorKind;
use std::path::Path;

use anabranch_engine::engine::comms;
use anabranch_engine::trace::record;
use anyhow::{Context, Result};

use super::job::{Job, Message};
use super::message::Half;
use crate::Failure;
use library::{Archive, Domain, Event, Library, Role, Traffic, NONE, NO_TIME};

/// Ranks without a file that get an empty one each, at most.
const MISSING_MAX: usize = 4096;

/// A call of a thread.
#[derive(Clone, Copy)]
struct Span {
    begin: u64,
    end: u64,
    region: u32,
    /// See [`blocking`].
    blocking: [bool; 2],
}

/// One side of a message.
struct Side<'a> {
    half: &'a Half,
    is_sender: bool,
    traffic: Traffic,
    request: u64,
}

/// What a thread did.
#[derive(Default)]
struct Thread<'a> {
    calls: Vec<&'a record::Call>,
    sides: Vec<Side<'a>>,
}

/// Where an event is: the number of calls before it, doubled, and one more within a call; there its beginning, the rest, and its
/// end; its time.
type Place = (usize, u8, u64);

/// Writes it, and says how many sides of messages are not in it, as nothing is known of the other side.
pub fn write(job: &Job, folder: &Path) -> Result<u64> {
    let size = job.ranks.iter().map(|rank| rank.header.size).max();
    let size = size.unwrap_or(0);
    let missing = (size as usize).saturating_sub(job.ranks.len());
    if missing > MISSING_MAX {
        let why = format!("--otf2: the files of {missing} ranks of {size} are not named");
        return Err(Failure::new(2, why).into());
    }
    check(folder)?;
    let library = Library::open()?;
    let names = Names::new(job);
    let (threads, left_out) = threads(job, &names, size);
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let archive = Archive::create(library, folder)?;
    let mut counts = Vec::new();
    let mut span = job.span_ns;
    let locations = threads
        .keys()
        .map(|(rank, number)| location(*rank, *number));
    let mut of_threads = threads.iter();
    archive.events(locations, |out| {
        let Some(((rank, _), thread)) = of_threads.next() else {
            return Ok(());
        };
        let events = thread.events(*rank, &names);
        for (at, event) in &events {
            out.put(*at, *event)?;
        }
        span = span.max(events.last().map_or(0, |(at, _)| *at));
        counts.push(events.len() as u64);
        Ok(())
    })?;
    define(
        &archive,
        job,
        (&names, size, span),
        threads.keys().zip(counts),
    )?;
    archive.close()?;
    Ok(left_out)
}

/// The folder may be made, or is empty.
fn check(folder: &Path) -> Result<()> {
    let name = folder.display();
    let is_empty = match std::fs::read_dir(folder) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) if error.kind() == ErrorKind::NotFound => true,
        Err(error) => return Err(error).with_context(|| name.to_string()),
    };
    if is_empty {
        return Ok(());
    }
    let why = format!("{name} is not empty: name a new folder for --otf2");
    Err(Failure::new(2, why).into())
}

/// The first thread of a rank has the rank's number.
fn location(rank: u32, thread: u64) -> u64 {
    thread << 32 | u64::from(rank)
}

/// Numbers of functions and of communicators.
struct Names<'a> {
    regions: BTreeMap<&'a str, u32>,
    /// The same by rank and by the function's number there, and [`blocking`].
    functions: HashMap<(u32, u16), (u32, [bool; 2])>,
    /// All but MPI_COMM_WORLD, which is 0.
    comms: BTreeMap<u64, u32>,
}

impl<'a> Names<'a> {
    fn new(job: &'a Job) -> Names<'a> {
        let mut names = Names {
            regions: BTreeMap::new(),
            functions: HashMap::new(),
            comms: BTreeMap::new(),
        };
        for rank in &job.ranks {
            for call in &rank.calls {
                let name = rank.function(call);
                let next = names.regions.len() as u32;
                let region = *names.regions.entry(name).or_insert(next);
                let function = (rank.header.rank, call.function);
                names.functions.insert(function, (region, blocking(name)));
            }
        }
        let world = comms::world();
        for message in &job.messages {
            let next = names.comms.len() as u32 + 1;
            if message.communicator != world {
                names.comms.entry(message.communicator).or_insert(next);
            }
        }
        names
    }

    fn comm(&self, message: &Message) -> u32 {
        let number = self.comms.get(&message.communicator);
        number.copied().unwrap_or(0)
    }
}

/// Which sides of messages are over when this function returns: received, sent. Others have requests.
fn blocking(function: &str) -> [bool; 2] {
    match function.strip_suffix("_c").unwrap_or(function) {
        "MPI_Send" | "MPI_Ssend" | "MPI_Bsend" | "MPI_Rsend" => [false, true],
        "MPI_Recv" | "MPI_Mrecv" => [true, false],
        "MPI_Sendrecv" | "MPI_Sendrecv_replace" => [true, true],
        _ => [false, false],
    }
}

fn role(function: &str) -> Role {
    let has = |parts: &[&str]| parts.iter().any(|part| function.contains(part));
    let with = |kind| match has(&["_init"]) {
        true => Role::Function,
        false => kind,
    };
    if has(&["arrier"]) {
        with(Role::Barrier)
    } else if has(&["llreduce", "llgather", "lltoall", "educe_scatter"]) {
        with(Role::AllToAll)
    } else if has(&["cast", "catter"]) {
        with(Role::OneToAll)
    } else if has(&["educe", "ather"]) && !has(&["Reduce_local"]) {
        with(Role::AllToOne)
    } else if has(&["scan", "Scan"]) {
        with(Role::Collective)
    } else if has(&[
        "send", "Send", "recv", "Recv", "Wait", "Test", "robe", "_Start",
    ]) {
        with(Role::PointToPoint)
    } else {
        Role::Function
    }
}

/// Whether each message is in the archive. Tools bring sends and receives together by their order, so that a send without a
/// receive would be taken for that of another message. It stays where its receiver may just not have written it.
fn kept(job: &Job) -> Vec<bool> {
    let has_ended = |rank: u32| {
        let ranks = &job.ranks;
        let at = ranks.binary_search_by_key(&rank, |rank| rank.header.rank);
        at.is_ok_and(|at| ranks[at].end.is_some())
    };
    let mut kept = vec![false; job.messages.len()];
    // What the MPI library carries, received and sent, by all that is the same at both ends.
    let mut halves: HashMap<_, [Vec<usize>; 2]> = HashMap::new();
    for message in &job.messages {
        let is_sent = message.sender.is_some();
        let other = match is_sent {
            true => message.destination,
            false => message.source,
        };
        if is_sent && message.receiver.is_some() || !other.is_some_and(has_ended) {
            kept[message.number] = true;
        } else if message.is_by_mpi {
            let ends = (message.source, message.destination);
            let key = (ends, message.communicator, message.tag, message.bytes);
            halves.entry(key).or_default()[usize::from(is_sent)].push(message.number);
        }
    }
    for [received, sent] in halves.into_values() {
        for number in received.iter().zip(&sent).flat_map(|(a, b)| [*a, *b]) {
            kept[number] = true;
        }
    }
    kept
}

type Threads<'a> = BTreeMap<(u32, u64), Thread<'a>>;

/// What each thread did, the first of each rank among them, and how many sides of messages are left out.
fn threads<'a>(job: &'a Job, names: &Names, size: u32) -> (Threads<'a>, u64) {
    let mut threads: Threads = (0..size)
        .map(|rank| ((rank, 0), Thread::default()))
        .collect();
    for rank in &job.ranks {
        for call in &rank.calls {
            let key = (rank.header.rank, call.number >> 32);
            threads.entry(key).or_default().calls.push(call);
        }
    }
    let mut left_out = 0;
    let is_kept = kept(job);
    for message in &job.messages {
        let (source, destination) = (message.source, message.destination);
        for (half, own, peer, is_sender) in [
            (&message.sender, source, destination, true),
            (&message.receiver, destination, source, false),
        ] {
            let Some(half) = half else { continue };
            let is_known = |(own, peer): &(u32, u32)| *own.max(peer) < size;
            let ranks = own.zip(peer).filter(is_known);
            let Some((own, peer)) = ranks.filter(|_| is_kept[message.number]) else {
                left_out += 1;
                continue;
            };
            let traffic = Traffic {
                peer,
                comm: names.comm(message),
                tag: message.tag as u32,
                bytes: message.bytes,
            };
            let key = (own, half.call >> 32);
            threads.entry(key).or_default().sides.push(Side {
                half,
                is_sender,
                traffic,
                request: message.number as u64 * 2 + u64::from(!is_sender),
            });
        }
    }
    (threads, left_out)
}

impl Thread<'_> {
    /// All of it, in order.
    fn events(&self, rank: u32, names: &Names) -> Vec<(u64, Event)> {
        let (spans, by_number) = self.spans(rank, names);
        let mut events: Vec<(Place, Event)> = Vec::new();
        for (number, span) in spans.iter().enumerate() {
            let slot = number * 2 + 1;
            events.push(((slot, 0, span.begin), Event::Enter(span.region)));
            events.push(((slot, 2, span.end), Event::Leave(span.region)));
        }
        for side in &self.sides {
            let call = by_number.get(&side.half.call);
            let call = call.map(|number| (*number, spans[*number]));
            side.add(call, &spans, &mut events);
        }
        events.sort_by_key(|(place, _)| *place);
        let mut last = 0;
        let in_order = events.into_iter().map(|((.., at), event)| {
            last = at.clamp(last, NO_TIME - 1);
            (last, event)
        });
        in_order.collect()
    }

    /// Its calls, one after the other, and their places by their numbers.
    fn spans(&self, rank: u32, names: &Names) -> (Vec<Span>, HashMap<u64, usize>) {
        let mut calls = self.calls.clone();
        calls.sort_by_key(|call| (call.begin, call.number));
        let mut spans = Vec::with_capacity(calls.len());
        let mut by_number = HashMap::new();
        let mut last = 0;
        for call in calls {
            let begin = call.begin.max(last);
            let end = call.end.max(begin);
            last = end;
            by_number.insert(call.number, spans.len());
            let function = names.functions.get(&(rank, call.function));
            let (region, blocking) = function.copied().unwrap_or_default();
            spans.push(Span {
                begin,
                end,
                region,
                blocking,
            });
        }
        (spans, by_number)
    }
}

/// Where something is that happens at a time, in whatever call.
fn place(spans: &[Span], at: u64) -> Place {
    let begun = spans.partition_point(|span| span.begin <= at);
    match begun.checked_sub(1) {
        Some(last) if at <= spans[last].end => (last * 2 + 1, 1, at),
        _ => (begun * 2, 1, at),
    }
}

impl Side<'_> {
    /// Its events: in the call that began it, where that is known, and those of its end at their time.
    fn add(&self, call: Option<(usize, Span)>, spans: &[Span], events: &mut Vec<(Place, Event)>) {
        let Side { half, traffic, .. } = *self;
        let in_call = |at: u64| match call {
            Some((number, span)) => (number * 2 + 1, 1, at.clamp(span.begin, span.end)),
            None => place(spans, at),
        };
        let is_sender = usize::from(self.is_sender);
        let is_blocking = call.is_some_and(|(_, span)| span.blocking[is_sender]);
        let arrived = half.landed_ns().or(half.done_ns());
        if is_blocking {
            let (at, event) = match self.is_sender {
                true => (Some(half.at_ns()), Event::Send(traffic)),
                false => (arrived, Event::Receive(traffic)),
            };
            events.extend(at.map(|at| (in_call(at), event)));
            return;
        }
        let request = self.request;
        let (begin, over, events_of) = match self.is_sender {
            true => (
                half.at_ns(),
                half.done_ns().or(half.landed_ns()),
                (
                    Event::Isend(traffic, request),
                    Event::IsendComplete(request),
                ),
            ),
            false => (
                half.posted_ns().unwrap_or(half.at_ns()),
                arrived,
                (Event::IrecvRequest(request), Event::Irecv(traffic, request)),
            ),
        };
        let begin = in_call(begin);
        events.push((begin, events_of.0));
        // Not before its beginning, also where that was moved into its call.
        let over = over.map(|at| place(spans, at.max(begin.2)).max(begin));
        events.extend(over.map(|at| (at, events_of.1)));
    }
}

/// Numbers and their names. Readers want them to rise.
fn in_order<K: Copy>(numbers: &BTreeMap<K, u32>) -> BTreeMap<u32, K> {
    let turned = numbers.iter().map(|(name, number)| (*number, *name));
    turned.collect()
}

/// Says what the numbers mean.
fn define<'a>(
    archive: &Archive,
    job: &Job,
    (names, size, span): (&Names, u32, u64),
    threads: impl Iterator<Item = (&'a (u32, u64), u64)>,
) -> Result<()> {
    let mut out = archive.definitions()?;
    out.clock(span, job.begun_unix_ns)?;
    for (number, name) in in_order(&names.regions) {
        out.region(number, name, role(name))?;
    }
    out.node(0, "job", Domain::Machine, NONE)?;
    let mut hosts: Vec<&str> = Vec::new();
    let mut nodes = BTreeMap::new();
    for rank in &job.ranks {
        let host = rank.header.host.as_str();
        let known = hosts.iter().position(|known| *known == host);
        let number = known.unwrap_or(hosts.len());
        if known.is_none() {
            hosts.push(host);
            out.node(number as u32 + 1, host, Domain::SharedMemory, 0)?;
        }
        nodes.insert(rank.header.rank, number as u32 + 1);
    }
    // Where ranks without a file are is not known.
    for rank in 0..size {
        out.rank(rank, nodes.get(&rank).copied().unwrap_or(0))?;
    }
    for ((rank, thread), events) in threads {
        out.thread(location(*rank, *thread), *thread, events, *rank)?;
    }
    let first_threads: Vec<u64> = (0..size).map(|rank| location(rank, 0)).collect();
    out.world(&first_threads)?;
    out.communicator(0, "MPI_COMM_WORLD")?;
    for (number, name) in in_order(&names.comms) {
        out.communicator(number, format_args!("communicator {name:016x}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_have_roles() {
        for (role_of, names) in [
            (Role::Barrier, &["MPI_Barrier", "MPI_Ibarrier"][..]),
            (Role::OneToAll, &["MPI_Ibcast", "MPI_Scatterv"]),
            (Role::AllToOne, &["MPI_Reduce", "MPI_Igather_c"]),
            (
                Role::AllToAll,
                &[
                    "MPI_Allreduce",
                    "MPI_Reduce_scatter",
                    "MPI_Neighbor_alltoall",
                ],
            ),
            (Role::Collective, &["MPI_Scan", "MPI_Iexscan"]),
            (
                Role::PointToPoint,
                &["MPI_Isend", "MPI_Mrecv", "MPI_Waitall", "MPI_Startall"],
            ),
            (
                Role::Function,
                &[
                    "MPI_Bcast_init",
                    "MPI_Reduce_local",
                    "MPI_Comm_dup",
                    "MPI_Win_start",
                ],
            ),
        ] {
            for name in names {
                assert_eq!(role(name), role_of, "{name}");
            }
        }
    }

    #[test]
    fn events_are_in_a_call_or_between_two() {
        let span = |begin, end| Span {
            begin,
            end,
            region: 0,
            blocking: [false; 2],
        };
        let spans = [span(10, 20), span(20, 20), span(30, 40)];
        for (at, slot) in [
            (9, 0),
            (10, 1),
            (19, 1),
            (20, 3),
            (21, 4),
            (30, 5),
            (40, 5),
            (41, 6),
        ] {
            assert_eq!(place(&spans, at), (slot, 1, at), "{at}");
        }
    }
}
