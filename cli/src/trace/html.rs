//! One file that shows a job in a browser, without a network: sums in bins, and of single messages the slowest ones and one
//! of each kind. What is shown of them is in `page/`.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use anyhow::Result;
use serde::Serialize;
use serde_json::{json, Value};

use super::advice::Advice;
use super::bins::{size_class, Cell, Cube, Grid, Item, Key, Kind, BINS, UNKNOWN};
use super::job::{Job, Message, Place};
use super::names::{Functions, Link, Names, Route, Ways};
use super::report::Report;
use super::ucp;

/// The page is not larger: what a browser opens at once, and a mail carries.
const BYTES_MAX: usize = 4_900_000;
/// Cells of messages, copies and calls.
const CELLS_MAX: [usize; 3] = [16_000, 12_000, 12_000];
/// Messages that are there one by one, as they took longest, besides one of each cell.
const SLOWEST: usize = 2_000;
/// Copies of single messages.
const COPIES_MAX: usize = 10_000;
/// Ranks that are listed with their hosts.
const RANKS_LISTED: usize = 4_096;

const PAGE: &str = include_str!("page/report.html");
const STYLE: &str = include_str!("page/report.css");
/// In this order: each uses those before it.
const SCRIPTS: [&str; 4] = [
    include_str!("page/data.js"),
    include_str!("page/draw.js"),
    include_str!("page/views.js"),
    include_str!("page/report.js"),
];

/// What the page is made from.
#[derive(Serialize)]
struct Data<'a> {
    schema: u32,
    version: &'static str,
    span_ns: u64,
    width_ns: u64,
    bins: u64,
    /// Ranks in a group.
    rank_step: u64,
    ranks: &'a [super::report::Row],
    dropped: u64,
    functions: &'a [String],
    protocols: &'a [String],
    communicators: Vec<String>,
    routes: &'a [Route],
    links: &'a [Link],
    places: &'a [Place],
    messages: Value,
    copies: Value,
    calls: Value,
    /// Single messages and their copies: rows, see [`row`] and [`copy_rows`].
    single: Vec<Value>,
    single_copies: Vec<Value>,
    /// Copies of single messages that are not there.
    copies_left_out: usize,
    fallbacks: Value,
    /// See [`ucp::page_rows`].
    ucp: Value,
    notes: Vec<String>,
    advice: &'a [Advice],
}

/// Sums of a job, and the names of what they are of.
struct Sums<'a> {
    cube: Cube,
    functions: Functions<'a>,
    protocols: Names,
    ways: Ways,
    slowest: Vec<usize>,
    /// Receives that are counted where they were sent.
    received_by_mpi: u64,
    has_places: bool,
}

/// The page of a job.
pub fn page(job: &Job, report: &Report) -> Result<String> {
    let mut sums = Sums::new(job, true);
    if sums.cube.is_full() {
        sums = Sums::new(job, false);
    }
    loop {
        let text = serde_json::to_string(&sums.data(job, report)?)?;
        let page = fill(&text);
        // Names of a job can be of any length: then it is as long as it is.
        if page.len() <= BYTES_MAX || !sums.cube.coarsen() {
            return Ok(page);
        }
    }
}

/// The page with its parts. In JSON, `<` is in texts only: none of them ends the element that it is in.
fn fill(data: &str) -> String {
    let mut page = String::with_capacity(data.len() + 100_000);
    for part in PAGE.split("{{") {
        let (name, rest) = part.split_once("}}").unwrap_or(("", part));
        match name {
            "style" => page.push_str(STYLE),
            "script" => SCRIPTS.iter().for_each(|script| page.push_str(script)),
            "data" => page.push_str(&data.replace('<', "\\u003c")),
            _ => {}
        }
        page.push_str(rest);
    }
    page
}

/// What the MPI library carries has an entry at either end: it counts where it was sent, unless that is not known.
fn is_counted(message: &Message, functions: &Functions) -> bool {
    let is_other_end = message.is_by_mpi && message.sender.is_none();
    !is_other_end || message.source.is_some_and(|rank| !functions.has(rank))
}

/// The function that sent a message, or else the one that received it.
fn function(message: &Message, functions: &Functions) -> u16 {
    let sent = message.source.zip(message.sender.as_ref());
    let received = message.destination.zip(message.receiver.as_ref());
    let mut ends = [sent, received].into_iter().flatten();
    ends.find_map(|(rank, half)| functions.find(rank, half.call))
        .unwrap_or(0)
}

impl<'a> Sums<'a> {
    fn new(job: &'a Job, has_places: bool) -> Sums<'a> {
        let ends = |message: &Message| {
            let begin = message.begin_ns();
            begin.saturating_add(message.took_ns().unwrap_or(0))
        };
        let of_messages = job.messages.iter().map(ends);
        let of_copies = job.copies.iter().map(|copy| copy.end_ns);
        let last = of_messages.chain(of_copies).max().unwrap_or(0);
        let sizes = job.ranks.iter().map(|rank| rank.header.size - 1);
        let ranks = job
            .messages
            .iter()
            .flat_map(|message| message.source.into_iter().chain(message.destination));
        let rank_max = sizes.chain(ranks).max().unwrap_or(0);
        let grid = Grid::new(last.max(job.span_ns), rank_max);
        let mut sums = Sums {
            cube: Cube::new(grid, CELLS_MAX),
            functions: Functions::new(&job.ranks),
            protocols: Names::new(),
            ways: Ways::new(job, has_places),
            slowest: Vec::new(),
            received_by_mpi: 0,
            has_places,
        };
        // A side may have another protocol than its message.
        for rank in &job.ranks {
            for name in &rank.header.protocols {
                sums.protocols.number(name);
            }
        }
        sums.add_messages(job);
        sums.add_copies(job);
        sums.add_calls(job);
        sums
    }

    fn key(&mut self, message: &Message) -> Key {
        let call = function(message, &self.functions);
        Key {
            to: message.destination.unwrap_or(UNKNOWN),
            protocol: self.protocols.number(message.protocol()),
            route: self.ways.route(message.number),
            size: size_class(message.bytes),
            ..Key::of_call(message.source.unwrap_or(UNKNOWN), call)
        }
    }

    fn add_messages(&mut self, job: &Job) {
        let mut slowest: BinaryHeap<Reverse<(u64, Reverse<usize>)>> = BinaryHeap::new();
        for message in &job.messages {
            if !is_counted(message, &self.functions) {
                self.received_by_mpi += 1;
                continue;
            }
            let (begin, took) = (message.begin_ns(), message.took_ns());
            let item = Item {
                key: self.key(message),
                count: 1,
                bytes: message.bytes,
                begin_ns: begin,
                end_ns: took.map(|took| begin.saturating_add(took)),
                took_ns: took,
                number: message.number,
            };
            self.cube.add(Kind::Messages, &item);
            if let Some(took) = took {
                // Of two that took as long the earlier one.
                slowest.push(Reverse((took, Reverse(message.number))));
                if slowest.len() > SLOWEST {
                    slowest.pop();
                }
            }
        }
        let in_order = slowest.into_sorted_vec();
        let numbers = in_order.into_iter().map(|Reverse((_, Reverse(at)))| at);
        self.slowest = numbers.collect();
    }

    fn add_copies(&mut self, job: &Job) {
        for copy in &job.copies {
            let message = copy.message.and_then(|at| job.messages.get(at));
            let key = match message {
                Some(message) => self.key(message),
                None => Key::of_call(copy.rank, 0),
            };
            let link = self.ways.link(copy);
            let item = Item {
                key: Key { link, ..key },
                count: 1,
                bytes: copy.bytes,
                begin_ns: copy.launched_ns,
                end_ns: Some(copy.end_ns),
                took_ns: Some(copy.end_ns.saturating_sub(copy.launched_ns)),
                number: 0,
            };
            self.cube.add(Kind::Copies, &item);
        }
    }

    fn add_calls(&mut self, job: &Job) {
        for rank in &job.ranks {
            for call in &rank.calls {
                let function = self.functions.of(rank.header.rank, call);
                let item = Item {
                    key: Key::of_call(rank.header.rank, function),
                    count: u64::from(call.times),
                    bytes: call.bytes,
                    begin_ns: call.begin,
                    end_ns: Some(call.end),
                    took_ns: Some(call.inside),
                    number: 0,
                };
                self.cube.add(Kind::Calls, &item);
            }
        }
    }

    fn data<'b>(&'b self, job: &'b Job, report: &'b Report) -> Result<Data<'b>> {
        let cube = &self.cube;
        let mut place_of: HashMap<usize, usize> = HashMap::new();
        let cells = cube.messages.sorted();
        let examples = cells.iter().filter(|(_, cell)| cell.count > 0);
        let examples = examples.map(|(_, cell)| cell.example);
        for number in self.slowest.iter().copied().chain(examples) {
            let next = place_of.len();
            place_of.entry(number).or_insert(next);
        }
        let mut single: Vec<usize> = place_of.keys().copied().collect();
        single.sort_unstable_by_key(|number| place_of[number]);
        let mut communicators = Names::new();
        let rows: Result<Vec<Value>> = single
            .iter()
            .map(|number| self.row(job, &job.messages[*number], &mut communicators))
            .collect();
        let (single_copies, copies_left_out) = self.copy_rows(job, &place_of);
        Ok(Data {
            schema: 1,
            version: env!("CARGO_PKG_VERSION"),
            span_ns: cube.grid.span_ns,
            width_ns: cube.grid.width_ns,
            bins: cube.grid.bins(),
            rank_step: 1 << cube.grid.shift,
            ranks: &report.ranks[..report.ranks.len().min(RANKS_LISTED)],
            dropped: report.dropped,
            functions: &self.functions.names.all,
            protocols: &self.protocols.all,
            communicators: communicators.all,
            routes: &self.ways.routes,
            links: &self.ways.links,
            places: &job.places,
            messages: columns(&cells, |cell| place_of.get(&cell.example).copied()),
            copies: columns(&cube.copies.sorted(), |_| None),
            calls: columns(&cube.calls.sorted(), |_| None),
            single: rows?,
            single_copies,
            copies_left_out,
            fallbacks: serde_json::to_value(&report.fallbacks)?,
            ucp: ucp::page_rows(&report.ucp, &self.functions.names.all),
            notes: self.notes(job),
            advice: &report.advice,
        })
    }

    /// A single message: its number, ranks, bytes, tag, communicator, begin, function, protocol, route, time that it took,
    /// whether the MPI library carried it, its two sides, and the time that was predicted for it. Of a side the call, its
    /// function and protocol, and the times of its states, from the message's begin on.
    fn row(&self, job: &Job, message: &Message, communicators: &mut Names) -> Result<Value> {
        let plan = job.plans.get(&message.number);
        let predicted_ns = plan.map(|plan| (plan.predicted_us * 1e3) as u64);
        let begin = message.begin_ns();
        // What the command tells of a message, whatever it is kept in.
        let told = serde_json::to_value(message)?;
        let side = |name: &str, rank: Option<u32>| {
            let half = &told[name];
            if half.is_null() {
                return Value::Null;
            }
            let call = half["call"].as_u64().unwrap_or(0);
            let function = rank.and_then(|rank| self.functions.find(rank, call));
            let protocol = half["protocol"].as_str();
            let protocol = protocol.and_then(|name| self.protocols.find(name));
            let mut row = vec![json!(call), json!(function), json!(protocol)];
            row.extend(STATES.iter().map(|state| {
                let at = half[*state].as_u64();
                json!(at.map(|at| at.wrapping_sub(begin) as i64))
            }));
            while row.last().is_some_and(Value::is_null) {
                row.pop();
            }
            Value::Array(row)
        };
        let communicator = communicators.number(told["communicator"].as_str().unwrap_or("?"));
        Ok(json!([
            message.number,
            message.source,
            message.destination,
            message.bytes,
            message.tag,
            communicator,
            begin,
            function(message, &self.functions),
            self.protocols.find(message.protocol()),
            self.ways.route(message.number),
            message.took_ns(),
            u8::from(message.is_by_mpi),
            side("sender", message.source),
            side("receiver", message.destination),
            predicted_ns,
        ]))
    }

    /// Copies of single messages: the message's place in the list, the link, chunk, bytes, when it was launched, the time
    /// that it took, how much less that may have been, by what, and by which rank. Those of the slowest first, as many as
    /// there may be, and how many are missing.
    fn copy_rows(&self, job: &Job, place_of: &HashMap<usize, usize>) -> (Vec<Value>, usize) {
        let place = |message: Option<usize>| place_of.get(&message?).copied();
        let mut found: Vec<(usize, usize)> = (job.copies.iter().enumerate())
            .filter_map(|(at, copy)| Some((place(copy.message)?, at)))
            .collect();
        found.sort_unstable();
        let left_out = found.len().saturating_sub(COPIES_MAX);
        found.truncate(COPIES_MAX);
        let row = |(place, at): (usize, usize)| {
            let copy = &job.copies[at];
            json!([
                place,
                self.ways.find_link(copy),
                copy.chunk,
                copy.bytes,
                copy.launched_ns,
                copy.end_ns.saturating_sub(copy.launched_ns),
                copy.uncertain_ns,
                copy.by,
                copy.rank,
            ])
        };
        (found.into_iter().map(row).collect(), left_out)
    }

    /// What the reader of the page should know: of the job, and of how it is shown.
    fn notes(&self, job: &Job) -> Vec<String> {
        let mut notes = job.notes.clone();
        let grid = &self.cube.grid;
        if grid.span_ns / grid.width_ns < BINS / 2 && grid.span_ns >= BINS {
            notes.push(format!(
                "There are many kinds of messages or calls: this page divides time into {} bins instead of {BINS}.",
                grid.bins()
            ));
        }
        if grid.shift > 0 {
            notes.push(format!(
                "There are many pairs of ranks: this page takes {} ranks together.",
                1_u64 << grid.shift
            ));
        }
        if !self.has_places {
            notes.push("There are many places: this page does not tell them apart.".into());
        }
        if self.received_by_mpi > 0 {
            notes.push(format!(
                "{} receives of messages that the MPI library carried are not shown: their sends are.",
                self.received_by_mpi
            ));
        }
        notes
    }
}

/// Times of a side of a message, in the order in which they mostly come.
const STATES: [&str; 6] = [
    "posted_ns",
    "at_ns",
    "matched_ns",
    "moving_ns",
    "landed_ns",
    "done_ns",
];

/// Cells as columns. One that has the same number in all its rows is that number.
fn columns(cells: &[(&Key, &Cell)], example: impl Fn(&Cell) -> Option<usize>) -> Value {
    let rank = |rank: u32| match rank {
        UNKNOWN => -1,
        rank => i64::from(rank),
    };
    let column = |of: &dyn Fn(&Key, &Cell) -> Value| {
        let rows: Vec<Value> = cells.iter().map(|(key, cell)| of(key, cell)).collect();
        match rows.first() {
            Some(first) if rows.iter().all(|row| row == first) => first.clone(),
            _ => Value::Array(rows),
        }
    };
    let example = |cell: &Cell| match cell.count {
        0 => None,
        _ => example(cell),
    };
    json!({
        "rows": cells.len(),
        "from": column(&|key, _| json!(rank(key.from))),
        "to": column(&|key, _| json!(rank(key.to))),
        "call": column(&|key, _| json!(key.call)),
        "protocol": column(&|key, _| json!(key.protocol)),
        "route": column(&|key, _| json!(key.route)),
        "link": column(&|key, _| json!(key.link)),
        "size": column(&|key, _| json!(key.size)),
        "bin": column(&|key, _| json!(key.bin)),
        "count": column(&|_, cell| json!(cell.count)),
        "bytes": column(&|_, cell| json!(cell.bytes)),
        "timed": column(&|_, cell| json!(cell.timed)),
        "ns": column(&|_, cell| json!(cell.ns)),
        "longest": column(&|_, cell| json!(cell.longest_ns)),
        "own": column(&|_, cell| json!(cell.own_ns)),
        "net": column(&|_, cell| json!(cell.net)),
        "example": column(&|_, cell| json!(example(cell).map_or(-1, |at| at as i64))),
    })
}

#[cfg(test)]
mod tests;
