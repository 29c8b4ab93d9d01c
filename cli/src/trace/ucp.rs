//! Calls of UCX's functions, each with the MPI call that made it and the transports of its endpoint.

use std::collections::{BTreeMap, HashMap, HashSet};

use anabranch_engine::trace::record::{self, UcpOutcome};
use serde::Serialize;

use super::bins::size_class;
use super::job::{Job, Rank};
use super::message::Message;

/// Not every call of UCX is made inside an MPI call that is recorded.
const NO_CALL: &str = "outside of recorded calls";

/// What UCX has told of a rank.
#[derive(Default)]
pub struct Recorded {
    pub calls: Vec<record::Ucp>,
    /// `TRANSPORT/DEVICE` of each lane of an endpoint, by its number.
    lanes: HashMap<u32, Vec<String>>,
}

impl Recorded {
    /// Lane 0 begins a list anew.
    pub fn add_lane(&mut self, lane: &record::Lane) {
        let lanes = self.lanes.entry(lane.endpoint).or_default();
        if lane.lane == 0 {
            lanes.clear();
        }
        lanes.push(lane.name());
    }

    /// Transports and devices of an endpoint, in order; empty if it has none, or UCX does not say.
    pub fn transports(&self, endpoint: u32) -> String {
        let mut names = self.lanes.get(&endpoint).cloned().unwrap_or_default();
        names.sort_unstable();
        names.dedup();
        names.join(", ")
    }
}

/// Calls of one kind.
#[derive(Clone, Debug, Serialize, PartialEq)]
pub struct Row {
    pub rank: u32,
    /// The MPI function that made them.
    pub call: String,
    pub function: String,
    /// Transports and devices over which their endpoint may send.
    pub transports: String,
    /// 0 of no bytes and of calls that have none, n of bytes from 2^(n-1) on.
    pub size_class: u8,
    pub calls: u64,
    pub bytes: u64,
    /// Time in them, ns.
    pub inside_ns: u64,
    /// Those that left a request under way, and those that failed.
    pub under_way: u64,
    pub failed: u64,
}

impl Row {
    pub fn add(&mut self, other: &Row) {
        self.calls += other.calls;
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.inside_ns = self.inside_ns.saturating_add(other.inside_ns);
        self.under_way += other.under_way;
        self.failed += other.failed;
    }
}

/// The name of the function.
pub fn function(rank: &Rank, call: &record::Ucp) -> String {
    let name = rank.header.ucp.get(usize::from(call.function));
    name.cloned().unwrap_or_else(|| "?".into())
}

/// All calls of UCX, by rank, MPI function, function, transports and size.
pub fn rows(job: &Job) -> Vec<Row> {
    let mut sums: BTreeMap<(u32, String, String, String, u8), Row> = BTreeMap::new();
    for rank in &job.ranks {
        let made: HashSet<u64> = rank.ucp.calls.iter().map(|call| call.call).collect();
        let calls = rank.calls.iter().chain(&rank.inside);
        let makers: HashMap<u64, u16> = calls
            .filter(|call| made.contains(&call.number))
            .map(|call| (call.number, call.function))
            .collect();
        for call in &rank.ucp.calls {
            let maker = makers.get(&call.call).copied();
            let maker = maker.and_then(|at| rank.header.functions.get(usize::from(at)));
            let bytes = call.bytes.unwrap_or(0);
            let row = Row {
                rank: rank.header.rank,
                call: maker.map_or(NO_CALL, String::as_str).to_owned(),
                function: function(rank, call),
                transports: rank.ucp.transports(call.endpoint),
                size_class: size_class(bytes),
                calls: 1,
                bytes,
                inside_ns: call.end.saturating_sub(call.begin),
                under_way: u64::from(call.outcome == UcpOutcome::UnderWay),
                failed: u64::from(call.outcome == UcpOutcome::Failed),
            };
            let key = (
                row.rank,
                row.call.clone(),
                row.function.clone(),
                row.transports.clone(),
                row.size_class,
            );
            sums.entry(key)
                .and_modify(|sum| sum.add(&row))
                .or_insert(row);
        }
    }
    sums.into_values().collect()
}

/// Rows with these parts the same are one.
pub fn merged<K: Ord>(rows: &[Row], key: impl Fn(&Row) -> K) -> Vec<Row> {
    let mut sums: BTreeMap<K, Row> = BTreeMap::new();
    for row in rows {
        sums.entry(key(row))
            .and_modify(|sum| sum.add(row))
            .or_insert_with(|| row.clone());
    }
    sums.into_values().collect()
}

/// Rows of a page at most; of more, those of all ranks are one.
const PAGE_ROWS: usize = 2_000;

/// For the page: the rank, numbers of the MPI function and of the other texts, then numbers.
pub fn page_rows(rows: &[Row], functions: &[String]) -> serde_json::Value {
    let kind = |row: &Row| {
        (
            row.call.clone(),
            row.function.clone(),
            row.transports.clone(),
            row.size_class,
        )
    };
    let by_rank = rows.len() <= PAGE_ROWS;
    let rows = match by_rank {
        true => rows.to_vec(),
        false => merged(rows, kind),
    };
    let rows = rows.iter().map(|row| {
        let call = functions.iter().position(|name| *name == row.call);
        serde_json::json!([
            by_rank.then_some(row.rank),
            call,
            row.call,
            row.function,
            row.transports,
            row.size_class,
            row.calls,
            row.bytes,
            row.inside_ns,
            row.under_way,
        ])
    });
    rows.collect()
}

/// A call that was made for a message.
#[derive(Serialize)]
pub struct OfMessage {
    rank: u32,
    function: String,
    transports: String,
    bytes: Option<u64>,
    begin_ns: u64,
    end_ns: u64,
    outcome: &'static str,
}

/// The calls of UCX that were made in the two MPI calls of a message.
pub fn of_message(job: &Job, message: &Message) -> Vec<OfMessage> {
    let sides = [
        (message.source, &message.sender),
        (message.destination, &message.receiver),
    ];
    let mut found = Vec::new();
    for (number, half) in sides {
        let (Some(number), Some(half)) = (number, half) else {
            continue;
        };
        let rank = job.ranks.iter().find(|rank| rank.header.rank == number);
        let Some(rank) = rank.filter(|_| half.call != 0) else {
            continue;
        };
        let calls = rank.ucp.calls.iter();
        found.extend(
            calls
                .filter(|call| call.call == half.call)
                .map(|call| OfMessage {
                    rank: number,
                    function: function(rank, call),
                    transports: rank.ucp.transports(call.endpoint),
                    bytes: call.bytes,
                    begin_ns: call.begin,
                    end_ns: call.end,
                    outcome: match call.outcome {
                        UcpOutcome::Done => "done",
                        UcpOutcome::UnderWay => "under way",
                        UcpOutcome::Failed => "failed",
                    },
                }),
        );
    }
    found
}
