//! Compares the recorded decisions (see [`super::golden`]) with the code as it is. Each decision is made
//! again and must come out the same.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::{json, Value};

use super::golden::{value, Answers};
use super::history::Depth;
use super::launch::Short;
use super::peers::Exchanges;
use super::pipeline::OnGpu;
use super::rtr::Streak;
use super::turn::{State, World};
use super::{launch, parts, put, rtr, send, start};
use crate::model::Model;
use crate::plan::{Message, Occupancy, Options, Planner};
use crate::topology::file::File;

/// There must be at least this many records.
const RECORDS_MIN: usize = 20_000;
/// The records must come from at least this many programs, each with its topology.
const PROGRAMS_MIN: usize = 40;

/// The nodes that plans were made for, by their identities: as measured, and as a rank sees one that makes
/// all copies.
type Nodes = HashMap<u64, [Planner; 2]>;

fn of<T: DeserializeOwned>(record: &Value) -> T {
    serde_json::from_value(record.clone()).unwrap_or_else(|error| panic!("{error}: {record}"))
}

/// Makes a decision that asks questions.
fn answered<D: serde::Serialize>(input: &Value, decide: impl FnOnce(&mut Answers) -> D) -> Value {
    let mut answers = Answers::of(input);
    let decision = value(&decide(&mut answers));
    assert!(
        answers.are_all_taken(),
        "fewer questions are asked: {input}"
    );
    decision
}

/// Makes a step of a state machine. Returns the answer and the state after it.
fn step<S, E, A>(input: &Value, step: impl FnOnce(&mut S, E) -> A) -> Value
where
    S: DeserializeOwned + serde::Serialize,
    E: DeserializeOwned,
    A: serde::Serialize,
{
    let (mut state, event): (S, E) = of(input);
    let answer = step(&mut state, event);
    value(&(answer, state))
}

/// What the node answered when a record was made.
struct Noted {
    readers: Vec<(u32, u32)>,
    may_hold: Option<bool>,
}

impl World for Noted {
    fn readers(&self, rank: u32) -> u32 {
        let mut readers = self.readers.iter();
        let found = readers.find(|(asked, _)| *asked == rank);
        found
            .unwrap_or_else(|| panic!("who reads from {rank} was not asked"))
            .1
    }

    fn may_hold(&self) -> bool {
        self.may_hold.expect("how long it waits was not asked")
    }
}

/// Like [`step`], with the answers of the node.
fn step_beside<E: DeserializeOwned, A: serde::Serialize>(
    input: &Value,
    step: impl FnOnce(&mut State, E, &Noted) -> A,
) -> Value {
    let ((mut state, event), (readers, may_hold)): ((State, E), _) = of(input);
    let answer = step(&mut state, event, &Noted { readers, may_hold });
    value(&(answer, state))
}

fn planned(nodes: &Nodes, input: &Value) -> Value {
    let (node, is_one_owner, message, options, others): (u64, bool, Message, Options, Occupancy) =
        of(input);
    let planners = nodes.get(&node).expect("the node of a plan is recorded");
    value(&planners[usize::from(is_one_owner)].plan(&others, &message, &options))
}

/// The decision that today's code makes.
fn decide(nodes: &Nodes, name: &str, input: &Value) -> Value {
    type D = Depth;
    match name {
        "plan" => planned(nodes, input),
        "start" => answered(input, start::start),
        "rtr.tell" => answered(input, rtr::tell),
        "rtr.write" => answered(input, rtr::write),
        "send.maker" => answered(input, send::maker),
        "send.rts" => answered(input, send::rts),
        "rtr.came" => step(input, |s: &mut Streak, (told, written, sends)| {
            s.came(told, written, sends)
        }),
        "rtr.posting" => step(input, |s: &mut Streak, alone| s.posting(alone)),
        "peers.received" => step(input, |s: &mut Exchanges, (from, depth)| {
            s.received(from, depth)
        }),
        "history.of" => step(input, |s: &mut D, (bytes, flying)| s.of(bytes, flying)),
        "history.planned" => step(input, |s: &mut D, (ends, bytes, flying, how)| {
            s.planned(ends, bytes, flying, how)
        }),
        "history.note_rest" => step(input, |s: &mut D, (ends, bytes, rest)| {
            s.note_rest(ends, bytes, rest)
        }),
        "history.rest" => step(input, |s: &mut D, (ends, bytes)| s.rest(ends, bytes)),
        "history.waits_for_others" => step(input, |s: &mut D, ()| s.waits_for_others()),
        "history.is_refused_again" => step(input, |s: &mut D, bytes| s.is_refused_again(bytes)),
        "history.goes_along" => step(input, |s: &mut D, bytes| s.goes_along(bytes)),
        "history.is_likely_direct" => step(input, |s: &mut D, (ends, bytes, flying)| {
            s.is_likely_direct(ends, bytes, flying)
        }),
        "history.is_unplanned" => step(input, |s: &mut D, (ends, bytes, flying, from)| {
            s.is_unplanned(ends, bytes, flying, from)
        }),
        "turn.enter" => step_beside(input, |s, (rank, bytes), world| s.enter(rank, bytes, world)),
        "turn.comes" => step_beside(input, |s, (rank, number, bytes), world| {
            s.may_start(rank, number, bytes, world)
        }),
        "launch.hold" => value(&launch::hold(&of::<Short>(input))),
        "launch.goes_ahead" => value(&launch::goes_ahead(of(input))),
        "launch.joins" => {
            let (count, bytes, is_apart) = of(input);
            value(&launch::joins(count, bytes, is_apart))
        }
        "launch.waits_for" => {
            let (count, gathered, bytes) = of(input);
            value(&launch::waits_for(count, gathered, bytes))
        }
        "parts.chunk_bytes" => {
            let (bytes, planned, in_turn, room) = of(input);
            value(&parts::chunk_bytes(bytes, planned, in_turn, room))
        }
        "parts.planned" => {
            let (is_split, lacks_staging, would_split) = of(input);
            value(&parts::planned(is_split, lacks_staging, would_split))
        }
        "put.by_exchange" => answered(input, put::by_exchange),
        "put.is_for_sender" => answered(input, put::is_for_sender),
        "pipeline.piece_on_gpu" => {
            let (on_gpu, total, issued): (OnGpu, _, _) = of(input);
            value(&on_gpu.piece_bytes(total, issued))
        }
        "parts.claim_back" => value(&parts::claim_back(&of::<Vec<_>>(input))),
        "parts.rest" => {
            let (rows, bytes): (Vec<_>, _) = of(input);
            value(&parts::rest(&rows, bytes))
        }
        _ => panic!("{name}: there is no such decision"),
    }
}

/// The records, `[name, input, decision]`, and how many programs they come from.
fn records() -> (Vec<(String, Value, Value)>, usize) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/decisions.jsonl.gz");
    let file = std::fs::File::open(&file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
    let mut lines = BufReader::new(flate2::read::GzDecoder::new(file)).lines();
    let first = lines.next().expect("a first line").expect("text");
    let head: Value = serde_json::from_str(&first).expect("JSON");
    let programs = head["programs"].as_array().map_or(0, Vec::len);
    let record = |line: std::io::Result<String>| {
        serde_json::from_str(&line.expect("text")).expect("a name, an input, a decision")
    };
    (lines.map(record).collect(), programs)
}

#[test]
fn decisions_are_those_of_the_record() {
    let (records, programs) = records();
    assert!(programs >= PROGRAMS_MIN, "{programs} programs");
    let mut nodes = Nodes::new();
    let mut made: BTreeMap<&str, [usize; 2]> = BTreeMap::new();
    let mut others = Vec::new();
    for (name, input, decision) in &records {
        if name == "node" {
            let (file, model): (File, Model) = of(decision);
            let topology = file.topology().expect("a topology");
            let planners = [
                Planner::new(&topology, &model),
                Planner::new(&topology, &model.of_one()),
            ];
            nodes.insert(of(input), planners);
            continue;
        }
        let now = decide(&nodes, name, input);
        let row = made.entry(name).or_default();
        row[0] += 1;
        if now != *decision {
            row[1] += 1;
            if row[1] <= 3 {
                others.push(format!("{name} of {input}\n  was {decision}\n  is  {now}"));
            }
        }
    }
    let all: usize = made.values().map(|[all, _]| all).sum();
    assert!(others.is_empty(), "{made:?}\n{}", others.join("\n"));
    assert!(all >= RECORDS_MIN, "{all} records: {made:?}");
}

/// For each kind of decision, the comparison notices a difference.
#[test]
fn another_decision_is_found() {
    let input = json!([2, 4 << 20, false]);
    assert_eq!(decide(&Nodes::new(), "launch.joins", &input), json!(true));
    let input = json!([32, 4 << 20, false]);
    assert_eq!(decide(&Nodes::new(), "launch.joins", &input), json!(false));
    let fresh = value(&Depth::default());
    let stepped = decide(&Nodes::new(), "history.of", &json!([fresh, [100, 3]]));
    assert_eq!(stepped[0], json!(3));
    assert_ne!(stepped[1], fresh, "the state goes on");
    let facts = json!([["is_to_device", false]]);
    assert_eq!(decide(&Nodes::new(), "start", &facts), json!("Get"));
}

/// Windows at one address once went one message after the other, because each waited for the one before.
#[test]
fn staged_messages_are_asked_for_whatever_is_in_their_place() {
    let facts = json!([["is_to_device", true], ["is_staged", true]]);
    assert_eq!(decide(&Nodes::new(), "start", &facts), json!("Pipeline"));
}

#[test]
#[should_panic(expected = "is asked for, too")]
fn another_question_is_found() {
    let facts = json!([["is_to_device", true]]);
    decide(&Nodes::new(), "start", &facts);
}

#[test]
#[should_panic(expected = "fewer questions are asked")]
fn a_question_that_is_asked_no_more_is_found() {
    let facts = json!([["is_to_device", false], ["may_be_split", true]]);
    decide(&Nodes::new(), "start", &facts);
}
