//! Records of decisions: what each decision depended on, and what was decided.
//!
//! A library that is built with the feature `golden` appends a line of JSON for each distinct record to
//! `$GOLDEN_RECORDS/PID.jsonl`: `[name, input, decision]`. `ci/golden` runs programs that way and collects
//! the records in `tests/golden/`. `golden_tests.rs` makes each decision again with today's code.

use serde::Serialize;
use serde_json::Value;

/// A value as the records hold it.
pub fn value(of: &impl Serialize) -> Value {
    serde_json::to_value(of).unwrap_or(Value::Null)
}

#[cfg(feature = "golden")]
pub use recording::{write, Asked, Noted};

#[cfg(feature = "golden")]
mod recording {
    use std::cell::{Cell, RefCell};
    use std::collections::{HashMap, HashSet};
    use std::fs::File;
    use std::io::Write;
    use std::path::PathBuf;
    use std::sync::OnceLock;

    use parking_lot::Mutex;
    use serde::Serialize;
    use serde_json::Value;

    use super::value;
    use crate::policy::turn::World;

    /// Distinct records that one process keeps of one decision.
    const RECORDS_MAX: usize = 2000;

    struct Records {
        file: File,
        known: HashMap<&'static str, HashSet<String>>,
    }

    fn records() -> Option<&'static Mutex<Records>> {
        static RECORDS: OnceLock<Option<Mutex<Records>>> = OnceLock::new();
        let open = || {
            let folder = PathBuf::from(std::env::var_os("GOLDEN_RECORDS")?);
            let file = folder.join(format!("{}.jsonl", std::process::id()));
            let file = File::options()
                .create(true)
                .append(true)
                .open(file)
                .inspect_err(|error| log::error!("GOLDEN_RECORDS: {error}"))
                .ok()?;
            let known = HashMap::new();
            Some(Mutex::new(Records { file, known }))
        };
        RECORDS.get_or_init(open).as_ref()
    }

    /// Writes a decision down, unless the same record was written before.
    pub fn write(name: &'static str, input: Value, decision: &impl Serialize) {
        let Some(records) = records() else { return };
        let line = Value::from(vec![Value::from(name), input, value(decision)]).to_string();
        let mut records = records.lock();
        let known = records.known.entry(name).or_default();
        if known.len() < RECORDS_MAX && known.insert(line.clone()) {
            // A record that is lost is one less of thousands.
            let _ = records.file.write_all(format!("{line}\n").as_bytes());
        }
    }

    /// A world that notes its answers.
    pub struct Noted<'a, W> {
        world: &'a W,
        /// Which rank was asked about, and how many read from it.
        readers: RefCell<Vec<(u32, u32)>>,
        may_hold: Cell<Option<bool>>,
    }

    impl<'a, W> Noted<'a, W> {
        /// Wraps a world; no question was asked yet.
        pub fn new(world: &'a W) -> Noted<'a, W> {
            Noted {
                world,
                readers: RefCell::default(),
                may_hold: Cell::default(),
            }
        }

        /// How many read from which rank, and whether the message may wait, as far as that was asked.
        pub fn answers(&self) -> Value {
            value(&(&*self.readers.borrow(), self.may_hold.get()))
        }
    }

    impl<W: World> World for Noted<'_, W> {
        fn readers(&self, rank: u32) -> u32 {
            let readers = self.world.readers(rank);
            self.readers.borrow_mut().push((rank, readers));
            readers
        }

        fn may_hold(&self) -> bool {
            let may_hold = self.world.may_hold();
            self.may_hold.set(Some(may_hold));
            may_hold
        }
    }

    /// Facts that are noted as they are asked for.
    pub struct Asked<'a, F> {
        /// Who answers.
        pub facts: &'a mut F,
        answers: Vec<Value>,
    }

    impl<'a, F> Asked<'a, F> {
        /// Wraps facts; none was asked for yet.
        pub fn new(facts: &'a mut F) -> Asked<'a, F> {
            let answers = Vec::new();
            Asked { facts, answers }
        }

        /// Notes a question and its answer.
        pub fn note(&mut self, fact: &'static str, answer: &impl Serialize) {
            let answer = vec![Value::from(fact), value(answer)];
            self.answers.push(Value::from(answer));
        }

        /// Writes the answers down with the decision.
        pub fn write(self, name: &'static str, decision: &impl Serialize) {
            write(name, Value::from(self.answers), decision);
        }
    }
}

#[cfg(test)]
pub use replaying::Answers;

#[cfg(test)]
mod replaying {
    use std::collections::VecDeque;

    use serde::de::DeserializeOwned;
    use serde_json::Value;

    /// The answers of a record. Each question must be asked again, in the same order.
    pub struct Answers(VecDeque<(String, Value)>);

    impl Answers {
        /// The answers of this record.
        pub fn of(record: &Value) -> Answers {
            Answers(serde_json::from_value(record.clone()).expect("questions and answers"))
        }

        /// The answer to the next question.
        pub fn answer<T: DeserializeOwned>(&mut self, fact: &str) -> T {
            let (asked, answer) = self
                .0
                .pop_front()
                .unwrap_or_else(|| panic!("{fact} is asked for, too"));
            assert_eq!(asked, fact, "another question is asked");
            serde_json::from_value(answer).expect("an answer of the fact's kind")
        }

        /// Whether every answer of the record was asked for again.
        pub fn are_all_taken(&self) -> bool {
            self.0.is_empty()
        }
    }
}
