use std::collections::BTreeMap;
use std::path::PathBuf;

use anabranch_engine::trace::read::{Header, VERSION};
use anabranch_engine::trace::record::{self, Record, Side};
use serde_json::Value;

use super::super::advice::Advice;
use super::super::job::{Copy, Job, Place};
use super::super::report::Report;
use super::{fill, page, BYTES_MAX, SLOWEST};

/// A file of a rank.
fn file(folder: &tempfile::TempDir, (rank, size): (u32, u32), records: &[Record]) -> PathBuf {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let header = Header {
        library: "0".into(),
        job: 1,
        rank,
        size,
        host: "<b>a host</b>".into(),
        pid: 1,
        is_simulated: false,
        opened: [0, 0],
        numa: Vec::new(),
        options: BTreeMap::new(),
        functions: names(&["MPI_Send", "MPI_Isend", "MPI_Recv"]),
        states: names(&["matched", "moving", "landed", "done"]),
        protocols: names(&["get", "eager", "host_pipeline"]),
        reasons: names(&["too short"]),
        ucp: names(&["ucp_put"]),
    };
    let header = serde_json::to_vec(&header).unwrap();
    let mut bytes = b"ANBTRACE".to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((header.len() as u32).to_le_bytes());
    bytes.extend(header);
    for record in records {
        bytes.extend(record.encode().iter().flat_map(|word| word.to_le_bytes()));
    }
    let path = folder.path().join(format!("t.{rank}"));
    std::fs::write(&path, bytes).unwrap();
    path
}

/// A job of so many ranks and messages that looks random and is always the same.
fn job(ranks: u32, messages: u64, span_ns: u64) -> Job {
    let mut seed = 5_u64;
    let mut below = |bound: u64| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % bound
    };
    let mut records: Vec<Vec<Record>> = vec![Vec::new(); ranks as usize];
    for nonce in 1..=messages {
        let at = span_ns / messages * nonce;
        let (from, to) = (below(u64::from(ranks)), below(u64::from(ranks)));
        let (took, bits) = (1_000 + below(50_000), 1 + below(24));
        let bytes = below(1 << bits);
        let sends = below(2) as u16;
        let protocol = 1 + below(3) as u8;
        for (side, rank, peer) in [(Side::Sender, from, to), (Side::Receiver, to, from)] {
            let is_sender = side == Side::Sender;
            let own = &mut records[rank as usize];
            let call = own.len() as u64 + 1;
            own.push(Record::Call(record::Call {
                number: call,
                function: if is_sender { sends } else { 2 },
                begin: at,
                end: at + took,
                comm: 7,
                peer: peer as i32,
                tag: 3,
                count: bytes as i64,
                bytes,
                times: 1,
                inside: took,
            }));
            own.push(Record::Message(record::Message {
                id: call as u32,
                side,
                outcome: record::Outcome::Complete,
                state: 3,
                protocol,
                begin: at,
                peer: peer as i32,
                tag: 3,
                bytes,
                comm: 7,
                nonce,
                call,
                after: [1, took / 4, took, took + 1].map(Some),
            }));
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let files: Vec<PathBuf> = (0..ranks)
        .map(|rank| file(&folder, (rank, ranks), &records[rank as usize]))
        .collect();
    Job::read(&files).unwrap()
}

/// The data of a page.
fn data(page: &str) -> Value {
    let text = page.split("id=\"data\">").nth(1).unwrap();
    serde_json::from_str(text.split("</script>").next().unwrap()).unwrap()
}

/// A column, row by row.
fn column(table: &Value, name: &str) -> Vec<i64> {
    let rows = table["rows"].as_u64().unwrap() as usize;
    match &table[name] {
        Value::Array(all) => all.iter().map(|it| it.as_i64().unwrap()).collect(),
        same => vec![same.as_i64().unwrap(); rows],
    }
}

fn sum(table: &Value, name: &str) -> i64 {
    column(table, name).iter().sum()
}

#[test]
fn cells_have_what_the_messages_have() {
    let job = job(4, 3_000, 50_000_000);
    let text = page(&job, &Report::new(&job)).unwrap();
    let data = data(&text);
    let cells = &data["messages"];
    let bytes: u64 = job.messages.iter().map(|message| message.bytes).sum();
    let took: u64 = job.messages.iter().filter_map(|it| it.took_ns()).sum();
    assert_eq!(sum(cells, "count"), 3_000);
    assert_eq!(sum(cells, "bytes"), bytes as i64);
    assert_eq!(
        (sum(cells, "timed"), sum(cells, "ns")),
        (3_000, took as i64)
    );
    assert_eq!(sum(&data["calls"], "count"), 6_000);
    let names = data["functions"].as_array().unwrap();
    let mut by_call: BTreeMap<&str, i64> = BTreeMap::new();
    let counts = column(cells, "count");
    for (call, count) in column(cells, "call").iter().zip(counts) {
        *by_call
            .entry(names[*call as usize].as_str().unwrap())
            .or_default() += count;
    }
    // Sends are what messages are named by.
    assert_eq!(
        by_call.keys().copied().collect::<Vec<_>>(),
        ["MPI_Isend", "MPI_Send"]
    );
    assert_eq!(by_call.values().sum::<i64>(), 3_000);
    let single = data["single"].as_array().unwrap();
    assert!(single.len() >= SLOWEST, "{}", single.len());
    let slowest = job.messages.iter().filter_map(|it| it.took_ns()).max();
    assert_eq!(single[0][10].as_u64(), slowest);
    // Its sides: call, function, protocol, and times after its begin.
    let sides = [&single[0][12], &single[0][13]].map(|side| side.as_array().unwrap());
    assert!(sides.iter().all(|side| side.len() == 9), "{}", single[0]);
    assert_eq!((&sides[0][4], &sides[1][4]), (&0.into(), &1.into()));
}

#[test]
fn every_cell_has_an_example() {
    let job = job(3, 20_000, 10_000_000);
    let text = page(&job, &Report::new(&job)).unwrap();
    let data = data(&text);
    let cells = &data["messages"];
    let single = data["single"].as_array().unwrap();
    let (from, size) = (column(cells, "from"), column(cells, "size"));
    let counts = column(cells, "count");
    for (row, place) in column(cells, "example").into_iter().enumerate() {
        assert_eq!(place >= 0, counts[row] > 0);
        if place >= 0 {
            let example = &single[place as usize];
            assert_eq!(example[1].as_i64(), Some(from[row]));
            let bytes = example[3].as_u64().unwrap();
            assert_eq!(i64::from(super::size_class(bytes)), size[row]);
        }
    }
}

#[test]
fn a_page_of_many_messages_is_small() {
    let job = job(16, 100_000, 900_000_000);
    let text = page(&job, &Report::new(&job)).unwrap();
    assert!(text.len() <= BYTES_MAX, "{}", text.len());
    let data = data(&text);
    assert_eq!(sum(&data["messages"], "count"), 100_000);
    let notes = data["notes"].to_string();
    assert!(notes.contains("this page divides time into"), "{notes}");
}

fn place(number: usize) -> Place {
    Place {
        host: "a".into(),
        name: format!("GPU {number}"),
        uuid: String::new(),
        pci: String::new(),
        numa: -1,
    }
}

fn copy(
    message: Option<usize>,
    (path, hop): (&'static str, u8),
    (from, to): (usize, usize),
    (launched_ns, end_ns): (u64, u64),
) -> Copy {
    Copy {
        message,
        rank: 1,
        path,
        hop,
        chunk: 0,
        from,
        to,
        bytes: 100,
        launched_ns,
        end_ns,
        uncertain_ns: 1,
        by: "streams",
    }
}

#[test]
fn a_page_of_many_copies_is_small() {
    let mut job = job(8, 30_000, 900_000_000);
    job.places = (0..8).map(place).collect();
    for message in &job.messages {
        let rank = |rank: Option<u32>| rank.unwrap() as usize;
        let (from, to) = (rank(message.source), rank(message.destination));
        let over = (from + 1 + message.number % 7) % 8;
        let at = message.begin_ns();
        for chunk in 0..4 {
            let times = (at + chunk * 1_000, at + chunk * 1_000 + 900);
            let number = Some(message.number);
            job.copies.extend([
                copy(number, ("direct", 0), (from, to), times),
                copy(number, ("relay", 0), (from, over), times),
                copy(number, ("relay", 1), (over, to), times),
            ]);
        }
    }
    let text = page(&job, &Report::new(&job)).unwrap();
    assert!(text.len() <= BYTES_MAX, "{}", text.len());
    let data = data(&text);
    assert_eq!(sum(&data["copies"], "count"), 12 * 30_000);
    assert_eq!(sum(&data["copies"], "bytes"), 12 * 30_000 * 100);
    let shown = data["single_copies"].as_array().unwrap().len() as u64;
    assert!(shown + data["copies_left_out"].as_u64().unwrap() <= 12 * 30_000);
    assert_eq!(data["single_copies"][0][0], 0, "those of the slowest first");
}

#[test]
fn copies_have_the_routes_of_their_messages() {
    let mut job = job(2, 10, 1_000_000);
    job.places = (0..3).map(place).collect();
    let copy = |message, path, hop, places| copy(message, (path, hop), places, (10, 30));
    job.copies = vec![
        copy(Some(3), "relay", 0, (0, 2)),
        copy(Some(3), "relay", 1, (2, 1)),
        copy(Some(3), "direct", 0, (0, 1)),
        copy(Some(4), "direct", 0, (0, 1)),
        copy(None, "direct", 0, (1, 0)),
        copy(Some(1_000), "direct", 0, (1, 0)),
    ];
    let text = page(&job, &Report::new(&job)).unwrap();
    let data = data(&text);
    let copies = &data["copies"];
    assert_eq!((sum(copies, "count"), sum(copies, "bytes")), (6, 600));
    let routes = data["routes"].as_array().unwrap();
    let route = |number: usize| {
        let single = data["single"].as_array().unwrap();
        let row = single.iter().find(|row| row[0] == number).unwrap();
        routes[row[9].as_u64().unwrap() as usize].to_string()
    };
    assert_eq!(route(3), r#"{"paths":["direct","relay"],"places":[0,1,2]}"#);
    assert_eq!(route(4), r#"{"paths":["direct"],"places":[0,1]}"#);
    assert_eq!(route(5), r#"{"paths":[],"places":[]}"#);
    assert_eq!(data["single_copies"].as_array().unwrap().len(), 4);
    assert_eq!(data["links"].as_array().unwrap().len(), 4);
}

#[test]
fn texts_stay_texts() {
    let job = job(2, 10, 1_000_000);
    let mut report = Report::new(&job);
    report.advice = vec![Advice {
        what: "</script><script>alert(1)</script>".into(),
        evidence: "{{data}}".into(),
        try_this: String::new(),
    }];
    let text = page(&job, &report).unwrap();
    assert!(!text.contains("<b>a host") && !text.contains("<script>alert"));
    assert_eq!(
        data(&text)["advice"][0]["what"],
        report.advice[0].what.as_str()
    );
    assert_eq!(data(&text)["ranks"][0]["host"], "<b>a host</b>");
    let whole = fill("{}");
    assert!(!whole.contains("{{") && whole.ends_with("</html>\n"));
    assert!(!whole.contains("http:") && !whole.contains("https:"));
}

/// How long a large job takes: `cargo nextest run --run-ignored all -p anabranch-cli large --no-capture`.
#[test]
#[ignore = "it takes a minute and gigabytes"]
fn large() {
    let messages = 1_000_000;
    let job = job(8, messages, 20_000_000_000);
    let begin = std::time::Instant::now();
    let report = Report::new(&job);
    let summed = begin.elapsed();
    let text = page(&job, &report).unwrap();
    let took = begin.elapsed() - summed;
    println!(
        "{messages} messages: report {summed:?}, page {took:?}, {} bytes",
        text.len()
    );
    assert!(text.len() <= BYTES_MAX);
}
