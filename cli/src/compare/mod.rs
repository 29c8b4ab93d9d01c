//! `anabranch compare`: the MPI library alone and with this library in turns, in many launches, and the ratios of their
//! medians beside what the same configuration differs from itself.

mod arguments;
mod first;
mod launch;
mod predicted;
mod progress;
mod results;
pub mod settings;
mod statistics;
mod sweep;
mod table;

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::{json, Value};

use crate::bench::buffer::Place;
use crate::bench::suite::{Ask, Circumstances, Fixed, Measured, Turn};
use crate::bench::Kind;
use crate::output;
use crate::topo::source;
use crate::Failure;
pub use arguments::Arguments;
use arguments::{Bench, RequestKind, Suite};
use launch::Launches;
use predicted::Predictions;
use progress::Progress;
use results::{Results, What};
use settings::{Setting, Variables, PATHS};
use sweep::Sweep;

/// Rows that one launch measures.
struct BenchRows {
    ranks: u32,
    rows: Vec<Ask>,
}

/// Compares, prints, and returns failure if data was wrong, a row does not count, or a launch failed.
///
/// # Errors
/// The options contradict each other, or no launch succeeded.
pub fn main(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let usual: &[&str] = match (&arguments.sim, arguments.suite) {
        (None, Some(Suite::First)) => &["vanilla", "anabranch"],
        (None, None) => &["vanilla", "vanilla2", "anabranch"],
        (Some(_), _) => &["anabranch", "anabranch2"],
    };
    let usual = || usual.iter().map(|&name| name.to_owned()).collect();
    let names: Vec<String> = arguments.configs.clone().unwrap_or_else(usual);
    let settings = settings::choose(&names, &arguments.with, &arguments.without)
        .map_err(|text| Failure::new(2, text))?;
    let wanted = arguments.baseline.as_deref();
    let baseline = match wanted {
        None => Some(0),
        Some(name) => settings.iter().position(|setting| setting.name == name),
    };
    let Some(baseline) = baseline.filter(|index| *index < settings.len()) else {
        let text = "--baseline names none of the configurations that take turns: look at --configs";
        return Err(Failure::new(2, text).into());
    };
    if arguments.turns {
        check_turns(arguments, &settings).map_err(|text| Failure::new(2, text))?;
    }
    if arguments.benches.contains(&Bench::MbwMr) && arguments.np % 2 != 0 {
        return Err(Failure::new(2, "mbw-mr needs an even number of ranks: --np").into());
    }
    // Before the measurement, not after it, to find that these cannot be written.
    arguments.json.try_out()?;
    for file in [&arguments.text, &arguments.csv].into_iter().flatten() {
        write(file, "")?;
    }
    let (rows, groups) = grid(arguments);
    let predictions = match &arguments.predicted {
        None => None,
        Some(node) => {
            let source = source::by_name("--predicted", node)?;
            Some(Predictions::new(&source, &rows, &settings))
        }
    };
    let launches = Launches::new(arguments)?;
    let has_solver = rows.iter().any(|row| matches!(row, What::Jacobi(_)));
    let each = match arguments.turns {
        true => groups.len(),
        false => (groups.len() + usize::from(has_solver)) * settings.len(),
    };
    let mut comparison = Comparison {
        arguments,
        launches,
        progress: Progress::new(arguments.rounds(), each as u64, arguments.budget()),
        groups,
        results: Results::new(settings, baseline, rows, arguments.turns, predictions),
        circumstances: None,
        sweep: None,
        failures: Vec::new(),
        hashes: Vec::new(),
        launches_of_round: 0,
        is_partial: false,
        start: Instant::now(),
    };
    comparison.run()
}

/// Whether these configurations can take turns within one launch.
fn check_turns(arguments: &Arguments, settings: &[Setting]) -> Result<(), String> {
    let (with, without): (Vec<_>, Vec<_>) = settings.iter().partition(|setting| setting.preload);
    let Some(library) = with.first() else {
        return Err("--turns needs a configuration with the library: look at --configs".into());
    };
    let differs = |other: &&&Setting| other.without_paths() != library.without_paths();
    if let Some(other) = with.iter().find(differs) {
        return Err(format!(
            "--turns: the library reads its variables once, {PATHS} left out: {} and {} differ in others",
            library.name, other.name
        ));
    }
    let is_plain = |setting: &&&Setting| setting.is_best() || !setting.variables.is_empty();
    if let Some(other) = without.iter().find(is_plain) {
        return Err(format!(
            "--turns gives those without the library the variables of {}: {} cannot have its own, use vanilla",
            library.name, other.name
        ));
    }
    if arguments.benches.contains(&Bench::Jacobi) {
        return Err("--turns is for messages: not with jacobi".into());
    }
    Ok(())
}

/// What the library does in the turn of each of these configurations.
fn turns(settings: &[Setting]) -> Vec<Turn> {
    let turn = |setting: &Setting| match setting.preload {
        true => Turn::Taking(setting.variables.get(PATHS).cloned()),
        false => Turn::Aside,
    };
    settings.iter().map(turn).collect()
}

/// Iterations of a user's benchmark: those before it that it does not time are OSU's.
fn as_users_do(bytes: usize) -> Fixed {
    const SMALL: usize = 8 << 10;
    Fixed {
        warmup: if bytes > SMALL { 2 } else { 10 },
        iterations: if bytes > 1 << 20 { 20 } else { 200 },
    }
}

/// The rows, in tables, and which of them share a launch.
fn grid(arguments: &Arguments) -> (Vec<What>, Vec<BenchRows>) {
    let mut rows = Vec::new();
    let mut groups: Vec<BenchRows> = Vec::new();
    for bench in &arguments.benches {
        let Some(kind) = bench.kind() else {
            rows.push(What::Jacobi(arguments.jacobi_args.clone()));
            continue;
        };
        let windows = match kind {
            Kind::Latency => &[1][..],
            _ => &arguments.windows,
        };
        let ranks = if kind.is_of_all() { arguments.np } else { 2 };
        let mut add = |kind, buffers: [Place; 2], bytes, window, persistent| {
            let ask = Ask {
                row: rows.len(),
                kind,
                buffers,
                bytes,
                window,
                persistent,
                fixed: arguments.suite.map(|_| as_users_do(bytes)),
            };
            // Said in the help of --windows and --pairs.
            if !ask.fits() || (kind.is_round() && buffers[0] != buffers[1]) {
                return;
            }
            rows.push(What::Bench(ask.clone()));
            let shares_launch = |group: &&mut BenchRows| {
                let alike = |row: &Ask| ask.is_of_one_sweep(row);
                group.ranks == ranks && (arguments.suite.is_none() || group.rows.iter().all(alike))
            };
            match groups.iter_mut().find(shares_launch) {
                Some(group) => group.rows.push(ask),
                None => groups.push(BenchRows {
                    ranks,
                    rows: vec![ask],
                }),
            }
        };
        if arguments.predicted.is_some() && kind == Kind::Bw {
            let (kind, buffers, bytes, window) = predicted::ACKNOWLEDGEMENT;
            add(kind, buffers, bytes, window, false);
        }
        for requests in &arguments.requests {
            let persistent = *requests == RequestKind::Persistent;
            for pair in &arguments.pairs {
                for window in windows {
                    for bytes in &arguments.sizes.0 {
                        add(kind, *pair, *bytes, *window as usize, persistent);
                    }
                }
            }
        }
    }
    (rows, groups)
}

/// Exit status after a signal, as shells have it for SIGINT.
const STOPPED: u8 = 130;

fn nothing_to_compare() -> anyhow::Error {
    let text = "stopped by a signal before anything was measured: there is nothing to compare";
    Failure::new(STOPPED, text).into()
}

struct Comparison<'a> {
    arguments: &'a Arguments,
    launches: Launches<'a>,
    progress: Progress,
    groups: Vec<BenchRows>,
    results: Results,
    circumstances: Option<Circumstances>,
    sweep: Option<Sweep>,
    failures: Vec<String>,
    /// Launches of the latest round that have ended well.
    launches_of_round: usize,
    /// The last round was stopped, after some of its launches.
    is_partial: bool,
    /// The solver's fields, by configuration.
    hashes: Vec<(usize, String)>,
    start: Instant,
}

impl Comparison<'_> {
    fn run(&mut self) -> anyhow::Result<ExitCode> {
        self.check()?;
        let is_best = |setting: &Setting| setting.is_best();
        if self.results.settings.iter().any(is_best) {
            let candidates = match self.arguments.sweep.as_slice() {
                [] => settings::ucx(),
                given => given.to_vec(),
            };
            let progress = &self.progress;
            self.sweep = Some(Sweep::run(
                &mut self.launches,
                candidates,
                &self.groups,
                |text| progress.tell(text),
            ));
        }
        let rounds = self.rounds();
        self.progress.clear();
        rounds?;
        if self.arguments.json.is_alone() {
            self.arguments.json.write(&self.json())?;
        } else {
            output::text(&self.text())?;
        }
        if self.launches.are_stopped() {
            return Ok(ExitCode::from(STOPPED));
        }
        let clean = self.results.is_clean() && self.failures.is_empty();
        Ok(if clean {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }

    /// One short launch before all others: what would fail in each of them is told at once.
    fn check(&mut self) -> anyhow::Result<()> {
        let Some(group) = self.groups.first() else {
            return Ok(());
        };
        let Some(ask) = group.rows.iter().min_by_key(|ask| ask.bytes) else {
            return Ok(());
        };
        let with = self.results.settings.iter().find(|setting| setting.preload);
        let mut setting = with.unwrap_or(&self.results.settings[0]).clone();
        let turns = self.turns(&mut setting);
        self.progress.tell("check: one short launch");
        match (self.launches).suite(&setting, group.ranks, vec![ask.clone()], &turns, true) {
            Ok(_) => Ok(()),
            Err(_) if self.launches.are_stopped() => Err(nothing_to_compare()),
            Err(error) => {
                let text = format!("{error:#}");
                let hint = match self.arguments.verbose {
                    true => format!("\n{text}"),
                    false => "; -v shows all that was said".to_owned(),
                };
                let (name, why) = (&setting.name, launch::gist(&text));
                let text = format!("nothing was measured: a launch of {name} failed: {why}{hint}");
                Err(Failure::new(1, text).into())
            }
        }
    }

    /// The rounds, as many as are wanted and as there is time for.
    fn rounds(&mut self) -> anyhow::Result<()> {
        let mut longest = Duration::ZERO;
        for round in 0..self.arguments.rounds() {
            let begun = self.start.elapsed();
            let budget = self.arguments.budget();
            if round > 0 && budget.is_some_and(|budget| begun + longest > budget) {
                break;
            }
            if !self.round(round) {
                // What was launched of it counts, though not every configuration has had its turn.
                self.is_partial = self.launches_of_round > 0;
                break;
            }
            self.results.rounds += 1;
            // The first also verifies, so those after it are rather shorter.
            longest = self.start.elapsed().saturating_sub(begun);
            self.write_files()?;
            if self.circumstances.is_none() && self.hashes.is_empty() {
                let text = self.failures.join("\n");
                return Err(Failure::new(1, format!("no launch succeeded\n{text}")).into());
            }
        }
        if self.is_partial {
            self.write_files()?;
        }
        match self.results.rounds == 0 && !self.is_partial {
            true => Err(nothing_to_compare()),
            false => Ok(()),
        }
    }

    /// Every configuration once, in turns. Each round begins with the next one: what was launched before leaves its mark on
    /// the machine (one H100, launches of 3 s, the same library as second and as third of three: 10.85 and 10.21 us).
    ///
    /// False if a signal has ended it before each had its turn.
    fn round(&mut self, round: u32) -> bool {
        self.launches_of_round = 0;
        let verify = round == 0 && !self.arguments.no_check;
        let settings = self.results.settings.len();
        let turns = move || (0..settings).map(move |turn| (turn + round as usize) % settings);
        if self.results.in_turns {
            let library = (self.results.settings.iter()).position(|setting| setting.preload);
            return (0..self.groups.len()).all(|group| {
                let index = library.unwrap_or(0);
                self.progress(round, index);
                self.launch(group, index, verify)
            });
        }
        for group in 0..self.groups.len() {
            for index in turns() {
                self.progress(round, index);
                if !self.launch(group, index, verify) {
                    return false;
                }
            }
        }
        let jacobi = self
            .results
            .rows
            .iter()
            .position(|row| matches!(row, What::Jacobi(_)));
        for index in turns() {
            if let Some(row) = jacobi {
                self.progress(round, index);
                if !self.solve(row, index) {
                    return false;
                }
            }
        }
        true
    }

    fn progress(&self, round: u32, index: usize) {
        self.progress
            .begin(round, &self.results.settings[index].name);
    }

    /// What the turns of one launch are, and what all of them have set.
    fn turns(&self, setting: &mut Setting) -> Vec<Turn> {
        if !self.results.in_turns {
            return Vec::new();
        }
        setting.variables = setting.without_paths();
        turns(&self.results.settings)
    }

    /// The rows of a group in one configuration. False if a signal has ended it.
    fn launch(&mut self, group: usize, index: usize, verify: bool) -> bool {
        let mut setting = self.results.settings[index].clone();
        let ranks = self.groups[group].ranks;
        let turns = self.turns(&mut setting);
        for (chosen, variables, rows) in self.parts(&setting, group) {
            let setting = Setting {
                variables,
                ..setting.clone()
            };
            match self.launches.suite(&setting, ranks, rows, &turns, verify) {
                Ok((circumstances, measured)) => {
                    self.circumstances.get_or_insert(circumstances);
                    for row in &measured {
                        let index = if turns.is_empty() { index } else { row.turn };
                        self.add(row, index, chosen.as_deref());
                    }
                    self.launches_of_round += 1;
                }
                Err(error) => {
                    if !self.fail(index, &error) {
                        return false;
                    }
                }
            }
        }
        self.progress.end();
        true
    }

    /// The rows of a group, apart by the variables that they need.
    fn parts(&self, setting: &Setting, group: usize) -> Vec<(Option<String>, Variables, Vec<Ask>)> {
        let rows = &self.groups[group].rows;
        let Some(sweep) = self.sweep.as_ref().filter(|_| setting.is_best()) else {
            return vec![(None, setting.variables.clone(), rows.clone())];
        };
        let mut parts: Vec<(Option<String>, Variables, Vec<Ask>)> = Vec::new();
        for ask in rows {
            let (name, variables) = sweep.choose(ask);
            match parts
                .iter_mut()
                .find(|part| part.0.as_deref() == Some(name))
            {
                Some(part) => part.2.push(ask.clone()),
                None => parts.push((Some(name.into()), variables.clone(), vec![ask.clone()])),
            }
        }
        parts
    }

    /// The solver in one configuration. False if a signal has ended it.
    fn solve(&mut self, row: usize, index: usize) -> bool {
        let setting = self.results.settings[index].clone();
        match self.launches.jacobi(&setting, self.arguments.np, row) {
            Ok((measured, hash)) => {
                self.add(&measured, index, None);
                self.hashes.push((index, hash));
                let wrong = u64::from(self.hashes[0].1 != self.hashes[self.hashes.len() - 1].1);
                let errors = &mut self.results.cells[row][index].errors;
                *errors = Some(errors.unwrap_or(0) + wrong);
                self.launches_of_round += 1;
                self.progress.end();
                true
            }
            Err(error) => self.fail(index, &error),
        }
    }

    fn add(&mut self, measured: &Measured, index: usize, chosen: Option<&str>) {
        let preload = self.results.settings[index].preload;
        if let Some(cell) = self
            .results
            .cells
            .get_mut(measured.row)
            .map(|cells| &mut cells[index])
        {
            cell.add(measured, preload, self.arguments.late_max / 100.0);
            cell.chosen = chosen.map(str::to_owned);
        }
    }

    /// A launch has failed. False if a signal has asked for that.
    fn fail(&mut self, index: usize, error: &anyhow::Error) -> bool {
        if self.launches.are_stopped() {
            return false;
        }
        let text = format!("{}: {error:#}", self.results.settings[index].name);
        self.progress.say(&text);
        self.failures.push(text);
        true
    }

    fn text(&self) -> String {
        let mut text = self.head().join("\n") + "\n";
        if let Some(sweep) = &self.sweep {
            text += &sweep.text();
        }
        text += &table::text(&self.results);
        if self.arguments.suite == Some(Suite::First) {
            text += &first::text(&self.results);
        }
        for failure in &self.failures {
            text += &format!("\nFAILED {failure}\n");
        }
        if !self.launches.said.is_empty() {
            text += &format!(
                "\n== said by the ranks, each line once\n{}\n",
                self.launches.said.join("\n")
            );
        }
        text + if self.results.is_clean() && self.failures.is_empty() {
            ""
        } else {
            "\nnot all of it counts: look for VOID, WRONG DATA and FAILED\n"
        }
    }

    fn head(&self) -> Vec<String> {
        let mut lines = vec![format!("# anabranch compare {}", env!("CARGO_PKG_VERSION"))];
        if let Some(about) = &self.circumstances {
            lines.push(format!(
                "# {}; {}",
                about.mpi,
                about.gpu.as_deref().unwrap_or("no GPU used")
            ));
            if about.simulated {
                lines.push("# Times are those of the simulated node, not of this machine; - where none passes there".into());
            }
        }
        if let Some(text) = self.arguments.memory.note() {
            lines.push(format!("# Device memory: {text}"));
        }
        let seconds = self.start.elapsed().as_secs_f64();
        lines.push(format!(
            "# {} of {} rounds in {seconds:.0} s{}{}, {}; {}; ratios to {}",
            self.results.rounds,
            self.arguments.rounds(),
            if self.is_partial {
                ", and part of one more"
            } else {
                ""
            },
            if self.launches.are_stopped() {
                ", then stopped by a signal"
            } else {
                ""
            },
            if self.results.in_turns {
                "one launch each, in which configurations take turns"
            } else {
                "each configuration once in each"
            },
            if self.arguments.no_check {
                "not verified"
            } else {
                "every row verified in the first"
            },
            self.results.settings[self.results.baseline].name
        ));
        let names = self.results.settings.iter();
        let names = names.map(|setting| [format!("# {}", setting.name), setting.describe()]);
        lines.extend(crate::table::text("", names).lines().map(str::to_owned));
        lines.push(String::new());
        lines.push(table::legend(self.results.in_turns));
        lines
    }

    fn write_files(&self) -> anyhow::Result<()> {
        if let Some(file) = &self.arguments.text {
            write(file, &self.text())?;
        }
        if let Some(file) = &self.arguments.csv {
            write(file, &self.results.csv())?;
        }
        if self.arguments.json.file().is_some() {
            self.arguments.json.write(&self.json())?;
        }
        Ok(())
    }

    fn json(&self) -> Value {
        let rows = (0..self.results.rows.len()).map(|row| self.results.json_row(row));
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "circumstances": self.circumstances,
            "rounds": self.results.rounds,
            "partial_round": self.is_partial,
            "rounds_wanted": self.arguments.rounds(),
            "seconds": self.start.elapsed().as_secs_f64(),
            "turns": self.results.in_turns,
            "verified": !self.arguments.no_check,
            "baseline": self.results.settings[self.results.baseline].name,
            "configurations": self.results.settings,
            "sweep": self.sweep.as_ref().map(Sweep::json),
            "failures": self.failures,
            "said": self.launches.said,
            "clean": self.results.is_clean() && self.failures.is_empty(),
            "rows": rows.collect::<Vec<_>>(),
        })
    }
}

fn write(file: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}
