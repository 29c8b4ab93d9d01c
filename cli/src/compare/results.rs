//! What was measured: for each row and configuration a value of each launch, and what the library counted.

use std::collections::BTreeMap;

use serde_json::{json, Value};

use super::predicted::{Predicted, Predictions};
use super::settings::Setting;
use super::statistics::{floor, floor_of_turns, median, ratios, spread, Spread};
use crate::bench::suite::{Ask, Measured};
use crate::bench::{report, Kind};

/// A row of the comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// A pattern of messages.
    Bench(Ask),
    /// The bundled solver, with its arguments.
    Jacobi(String),
}

impl What {
    /// The measurement, buffers and window: what the rows of one table share.
    pub fn title(&self) -> String {
        match self {
            What::Jacobi(arguments) => format!("jacobi {arguments}, us an iteration"),
            What::Bench(ask) => {
                let window = match ask.kind {
                    Kind::Latency => String::new(),
                    _ => format!(", window {}", ask.window),
                };
                let [first, second] = ask.buffers;
                let persistent = if ask.persistent { ", persistent" } else { "" };
                format!(
                    "{} {first:?} {second:?}{window}{persistent}, {}",
                    report::name(ask.kind),
                    self.unit()
                )
            }
        }
    }

    /// Unit of the values.
    pub fn unit(&self) -> &'static str {
        match self {
            What::Bench(ask) => report::unit(ask.kind),
            What::Jacobi(_) => "us",
        }
    }

    /// Whether less is better.
    pub fn is_time(&self) -> bool {
        self.unit() == "us"
    }

    /// Size of a message, where there is one size.
    pub fn bytes(&self) -> Option<usize> {
        match self {
            What::Bench(ask) => Some(ask.bytes),
            What::Jacobi(_) => None,
        }
    }
}

/// What one configuration did in one row.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    /// The value of each launch: the median of its blocks.
    pub launches: Vec<f64>,
    /// The value of each block of all launches: of each turn, where configurations take turns within launches.
    pub turns: Vec<f64>,
    /// Counters of the last launch.
    pub counters: Option<BTreeMap<String, u64>>,
    /// What was expected of them, in words, and whether it came so, in any launch.
    pub taken: Option<String>,
    /// Why the row does not count.
    pub void: Vec<String>,
    /// Iterations of all launches, and those of them that were slow ([`Measured::slow`]).
    pub iterations: u64,
    /// See above.
    pub slow: u64,
    /// Messages with wrong data; none as long as it was not verified.
    pub errors: Option<u64>,
    /// The settings of this row, where a sweep chose them.
    pub chosen: Option<String>,
}

impl Cell {
    /// Adds a launch. `preload` says whether the library should have counted, `late_max` by which part of its time programs
    /// on a simulated node may have acted late.
    pub fn add(&mut self, measured: &Measured, preload: bool, late_max: f64) {
        self.launches.extend(median(&measured.values));
        self.turns.extend(&measured.values);
        self.iterations += u64::from(measured.iterations);
        self.slow += measured.slow.unwrap_or(0);
        if let Some(errors) = measured.errors {
            self.errors = Some(self.errors.unwrap_or(0) + errors);
        }
        if let Some(late) = measured.late.filter(|late| *late > late_max) {
            let reason = "the simulated node's programs were kept from their processors";
            self.void
                .push(format!("late by {:.1} %: {reason}", late * 100.0));
        }
        if let (true, Some(counters)) = (preload, &measured.counters) {
            for reason in doubts(measured, counters) {
                if !self.void.contains(&reason) {
                    self.void.push(reason);
                }
            }
            self.taken = Some(paths(measured, counters));
            self.counters = Some(counters.clone());
        }
    }

    /// Whether the figures of this row count.
    pub fn is_void(&self) -> bool {
        !self.void.is_empty() || self.errors.is_some_and(|errors| errors > 0)
    }
}

/// Counters that are zero in a healthy run. What was overtaken is right in the end, but was not moved: a rate that counts it is
/// above what the links carry.
const TROUBLE: &[&str] = &[
    "multipath_overtaken_bytes",
    "errors",
    "retries",
    "dead_peers",
    "bad_rts",
    "panics",
];
/// The reason for which a message goes by value that is no fault.
const USUAL: &str = "fallback_too_small";

/// The reason for which short messages go by value.
const SHORT: &str = "fallback_not_ready";

/// The reason of memory without an IPC handle.
const UNSHARED: &str = "fallback_not_exportable";

/// Why the counters of a row say that it did not measure what it should have.
fn doubts(measured: &Measured, counters: &BTreeMap<String, u64>) -> Vec<String> {
    let count = |name: &str| counters.get(name).copied().unwrap_or(0);
    let expected = &measured.expected;
    let mut pairs = vec![("sends_device", expected.device_sends)];
    pairs.extend(TROUBLE.iter().map(|name| (*name, 0)));
    let wrong = pairs
        .into_iter()
        .filter(|(name, wanted)| count(name) != *wanted);
    let mut doubts: Vec<String> = wrong
        .map(|(name, wanted)| format!("{name} {}, expected {wanted}", count(name)))
        .collect();
    // The solver does not say how many of its messages are short.
    if let Some(taken) = expected.taken {
        let found = count("sends_rts");
        if found < taken || found > taken + expected.short {
            let short = match expected.short {
                0 => String::new(),
                short => format!(" and up to {short} short ones"),
            };
            doubts.push(format!("sends_rts {found}, expected {taken}{short}"));
        }
    }
    // Long ones that are expected there go by RTS.
    let raised = count("receives_bcopy") + count("receives_native") + count("sends_host_rts");
    if raised < expected.raised {
        let wanted = expected.raised;
        doubts.push(format!(
            "from host memory into device memory {raised}, expected at least {wanted}"
        ));
    }
    let unusual = counters.iter().filter(|(name, value)| {
        name.starts_with("fallback_")
            && !name.ends_with("_bytes")
            && *name != USUAL
            && (*name != SHORT || **value > expected.short)
            && (*name != UNSHARED || !expected.may_stage)
    });
    doubts.extend(unusual.map(|(name, value)| format!("{name} {value}")));
    doubts
}

/// The messages taken of those expected, and the ways in which messages arrived.
fn paths(measured: &Measured, counters: &BTreeMap<String, u64>) -> String {
    let taken = counters.get("sends_rts").copied().unwrap_or(0);
    let of = measured.expected.device_sends;
    let mut text = format!("{taken}/{of}");
    for (name, value) in counters {
        if let Some(path) = name.strip_prefix("receives_") {
            if !path.ends_with("_bytes") && path != "host_fetched" {
                text += &format!(" {path} {value}");
            }
        }
        if let Some(reason) = name.strip_prefix("fallback_") {
            if !reason.ends_with("_bytes") {
                text += &format!(" not:{reason} {value}");
            }
        }
    }
    text
}

/// A configuration beside the baseline, in one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Compared {
    /// Its own spread.
    pub spread: Spread,
    /// How many times as fast as the baseline it is, by the medians.
    pub ratio: Option<f64>,
    /// Whether it is slower than noise explains.
    pub worse: bool,
}

/// The whole comparison.
pub struct Results {
    /// The configurations.
    pub settings: Vec<Setting>,
    /// Which of them the others are compared with.
    pub baseline: usize,
    /// The baseline once more, by which noise is known.
    pub again: Option<usize>,
    /// The rows.
    pub rows: Vec<What>,
    /// By row, then by configuration.
    pub cells: Vec<Vec<Cell>>,
    /// Complete rounds.
    pub rounds: u32,
    /// Configurations take turns within each launch.
    pub in_turns: bool,
    /// What plans predict, if that was asked for.
    pub predictions: Option<Predictions>,
}

impl Results {
    /// Nothing measured yet.
    pub fn new(
        settings: Vec<Setting>,
        baseline: usize,
        rows: Vec<What>,
        in_turns: bool,
        predictions: Option<Predictions>,
    ) -> Results {
        let twin = settings[baseline].name.clone() + "2";
        let again = settings.iter().position(|setting| setting.name == twin);
        let cells = vec![vec![Cell::default(); settings.len()]; rows.len()];
        Results {
            settings,
            baseline,
            again,
            rows,
            cells,
            rounds: 0,
            in_turns,
            predictions,
        }
    }

    /// The ratio below which a row's difference is no noise.
    pub fn floor(&self, row: usize) -> Option<f64> {
        let cells = &self.cells[row];
        let (once, again) = (&cells[self.baseline], &cells[self.again?]);
        match self.in_turns {
            true => floor_of_turns(&once.turns, &again.turns),
            false => floor(&once.launches, &again.launches),
        }
    }

    /// How many times as fast as the baseline a configuration is: by the medians of launches, or by the median of what each of
    /// its turns is to the baseline's beside it.
    fn ratio(&self, row: usize, setting: usize) -> Option<f64> {
        let (base, other) = (&self.cells[row][self.baseline], &self.cells[row][setting]);
        let ratio = match self.in_turns {
            true => median(&ratios(&other.turns, &base.turns))?,
            false => median(&other.launches)? / median(&base.launches)?,
        };
        Some(if self.rows[row].is_time() {
            1.0 / ratio
        } else {
            ratio
        })
    }

    /// One configuration in one row; `None` if it has no value there.
    pub fn compared(&self, row: usize, setting: usize) -> Option<Compared> {
        let spread = spread(&self.cells[row][setting].launches)?;
        let ratio = self.ratio(row, setting);
        let worse = match (ratio, self.floor(row)) {
            (Some(ratio), Some(floor)) if setting != self.baseline => ratio < floor,
            _ => false,
        };
        Some(Compared {
            spread,
            ratio: ratio.filter(|_| setting != self.baseline),
            worse: worse && Some(setting) != self.again,
        })
    }

    /// What was predicted for one configuration in one row, and what became of it.
    pub fn predicted(&self, row: usize, setting: usize) -> Option<Predicted> {
        self.predictions.as_ref()?.of(self, row, setting)
    }

    /// Whether any data was wrong, or any row does not count.
    pub fn is_clean(&self) -> bool {
        self.cells.iter().flatten().all(|cell| !cell.is_void())
    }

    /// One row as JSON.
    pub fn json_row(&self, row: usize) -> Value {
        let what = &self.rows[row];
        let mut value = match what {
            What::Bench(ask) => json!({
                "bench": report::name(ask.kind), "buffers": ask.buffers, "bytes": ask.bytes, "window": ask.window,
                "persistent": ask.persistent,
            }),
            What::Jacobi(arguments) => json!({ "bench": "jacobi", "arguments": arguments }),
        };
        value["unit"] = what.unit().into();
        value["floor"] = self.floor(row).into();
        for (index, setting) in self.settings.iter().enumerate() {
            let cell = &self.cells[row][index];
            let compared = self.compared(row, index);
            value["configurations"][&setting.name] = json!({
                "spread": compared.map(|compared| compared.spread),
                "launches": cell.launches,
                "iterations": cell.iterations,
                "slow_iterations": cell.slow,
                "turns": self.in_turns.then_some(&cell.turns),
                "ratio": compared.and_then(|compared| compared.ratio),
                "worse_than_noise": compared.is_some_and(|compared| compared.worse),
                "predicted": self.predicted(row, index),
                "counters": cell.counters,
                "wrong_messages": cell.errors,
                "void": cell.void,
                "chosen": cell.chosen,
            });
        }
        value
    }

    /// One line for each row and configuration, for spreadsheets.
    pub fn csv(&self) -> String {
        let mut text = String::from(
            "bench,buffers,bytes,window,unit,configuration,launches,median,min,q1,q3,max,ratio,floor,worse_than_noise,verified,void,predicted_us,took_us,taken\n",
        );
        let number =
            |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.6}"));
        for (row, what) in self.rows.iter().enumerate() {
            let head = match what {
                What::Bench(ask) => format!(
                    "{}{},{:?}{:?},{},{}",
                    report::name(ask.kind),
                    if ask.persistent { "-persistent" } else { "" },
                    ask.buffers[0],
                    ask.buffers[1],
                    ask.bytes,
                    ask.window
                ),
                What::Jacobi(_) => "jacobi,DD,,".into(),
            };
            for (index, setting) in self.settings.iter().enumerate() {
                let cell = &self.cells[row][index];
                let compared = self.compared(row, index);
                let predicted = self.predicted(row, index);
                let spread = |pick: fn(&Spread) -> f64| number(compared.map(|c| pick(&c.spread)));
                let fields = [
                    head.clone(),
                    what.unit().into(),
                    setting.name.clone(),
                    cell.launches.len().to_string(),
                    spread(|s| s.median),
                    spread(|s| s.min),
                    spread(|s| s.q1),
                    spread(|s| s.q3),
                    spread(|s| s.max),
                    number(compared.and_then(|c| c.ratio)),
                    number(self.floor(row)),
                    u8::from(compared.is_some_and(|c| c.worse)).to_string(),
                    match cell.errors {
                        None => String::new(),
                        Some(0) => "pass".into(),
                        Some(_) => "FAIL".into(),
                    },
                    u8::from(cell.is_void()).to_string(),
                    number(predicted.map(|it| it.predicted_us)),
                    number(predicted.map(|it| it.took_us)),
                    cell.taken.clone().unwrap_or_default(),
                ];
                text += &(fields.join(",") + "\n");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::buffer::Place;
    use crate::bench::suite::Expected;

    fn measured(counters: &[(&str, u64)]) -> Measured {
        Measured {
            row: 0,
            turn: 0,
            values: vec![3.0, 1.0, 2.0],
            iterations: 1,
            late: None,
            slow: None,
            errors: Some(0),
            counters: Some(
                counters
                    .iter()
                    .map(|(n, v)| ((*n).to_owned(), *v))
                    .collect(),
            ),
            expected: Expected {
                device_sends: 51,
                taken: Some(48),
                short: 3,
                raised: 0,
                may_stage: false,
            },
        }
    }

    #[test]
    fn a_row_of_ranks_that_acted_late_does_not_count() {
        let void = |late: f64| {
            let mut cell = Cell::default();
            let measured = Measured {
                late: Some(late),
                ..measured(&[])
            };
            cell.add(&measured, false, 0.02);
            cell.void
        };
        assert!(void(0.019).is_empty());
        let said = void(0.031);
        assert!(
            said.len() == 1 && said[0].starts_with("late by 3.1 %"),
            "{said:?}"
        );
    }

    fn void(counters: &[(&str, u64)]) -> Vec<String> {
        let mut cell = Cell::default();
        cell.add(&measured(counters), true, 0.02);
        cell.void
    }

    #[test]
    fn a_row_counts_if_the_messages_taken_are_those_expected() {
        let good = [
            ("sends_device", 51),
            ("sends_rts", 48),
            ("receives_direct", 48),
            ("fallback_too_small", 3),
            ("fallback_too_small_bytes", 12),
        ];
        assert!(void(&good).is_empty(), "{:?}", void(&good));
        assert_eq!(
            void(&[
                ("sends_device", 51),
                ("sends_rts", 40),
                ("fallback_no_slot", 8)
            ]),
            [
                "sends_rts 40, expected 48 and up to 3 short ones",
                "fallback_no_slot 8"
            ]
        );
        assert_eq!(
            void(&[("sends_device", 51), ("sends_rts", 48), ("retries", 1)]),
            ["retries 1, expected 0"]
        );
        assert_eq!(
            void(&[
                ("sends_device", 51),
                ("sends_rts", 48),
                ("multipath_overtaken_bytes", 7)
            ]),
            ["multipath_overtaken_bytes 7, expected 0"]
        );
        let short = [("sends_device", 51), ("sends_rts", 51)];
        assert!(void(&short).is_empty(), "{:?}", void(&short));
        let many = [
            ("sends_device", 51),
            ("sends_rts", 48),
            ("fallback_not_ready", 4),
        ];
        assert_eq!(void(&many), ["fallback_not_ready 4"]);
        assert_eq!(void(&[]).len(), 2);
        let mut without = Cell::default();
        without.add(&measured(&good), false, 0.02);
        assert!(without.taken.is_none() && without.void.is_empty());
        assert_eq!(without.launches, [2.0]);
    }

    fn results(kind: Kind, values: [&[f64]; 3]) -> Results {
        let setting = |name: &str| Setting {
            name: name.into(),
            preload: name == "anabranch",
            variables: BTreeMap::new(),
        };
        let settings = ["vanilla", "vanilla2", "anabranch"].map(setting);
        let ask = Ask {
            row: 0,
            kind,
            buffers: [Place::D, Place::H],
            bytes: 64,
            window: 1,
            persistent: false,
            fixed: None,
        };
        let mut results = Results::new(settings.into(), 0, vec![What::Bench(ask)], false, None);
        for (cell, values) in results.cells[0].iter_mut().zip(values) {
            cell.launches = values.to_vec();
        }
        results
    }

    #[test]
    fn a_ratio_above_one_is_always_better() {
        let bw = results(
            Kind::Bw,
            [&[10.0, 10.0, 12.0], &[10.0, 11.0, 10.0], &[8.0; 3]],
        );
        let compared = bw.compared(0, 2).expect("values");
        assert!(compared.worse && (compared.ratio.expect("a ratio") - 0.8).abs() < 1e-9);
        assert_eq!(bw.compared(0, 0).expect("values").ratio, None);
        assert!(!bw.compared(0, 1).expect("values").worse);
        let latency = results(Kind::Latency, [&[10.0; 3], &[10.0; 3], &[8.0; 3]]);
        let compared = latency.compared(0, 2).expect("values");
        assert!(!compared.worse && (compared.ratio.expect("a ratio") - 1.25).abs() < 1e-9);
        let line = latency
            .csv()
            .lines()
            .nth(3)
            .expect("three lines")
            .to_owned();
        assert!(
            line.starts_with("latency,DH,64,1,us,anabranch,3,8.000000,"),
            "{line}"
        );
        let json = latency.json_row(0);
        assert_eq!(json["configurations"]["anabranch"]["ratio"], 1.25);
    }

    #[test]
    fn turns_are_compared_with_those_beside_them() {
        // The machine is half as fast in the second half, in which there are more turns; the library gains a tenth in both.
        let once = [10.0, 10.0, 20.0, 20.0, 20.0];
        let mut of_turns = results(Kind::Latency, [&[20.0], &[20.0], &[18.0]]);
        of_turns.in_turns = true;
        for (cell, share) in of_turns.cells[0].iter_mut().zip([1.0, 1.001, 0.9]) {
            cell.turns = once.map(|value| value * share).into();
        }
        let compared = of_turns.compared(0, 2).expect("values");
        assert!((compared.ratio.expect("a ratio") - 1.0 / 0.9).abs() < 1e-9);
        assert!(!compared.worse);
        let floor = of_turns.floor(0).expect("a twin");
        assert!((floor - 1.0 / 1.001).abs() < 1e-6, "{floor}");
        of_turns.cells[0][2].turns = once.map(|value| value * 1.002).into();
        assert!(of_turns.compared(0, 2).expect("values").worse);
    }

    #[test]
    fn what_took_no_time_has_no_value() {
        let none = results(Kind::Bw, [&[], &[], &[8.0]]);
        let compared = none.compared(0, 2).expect("values");
        assert_eq!((compared.ratio, compared.worse), (None, false));
        assert_eq!(none.compared(0, 0), None);
    }
}
