//! `anabranch doctor --sim TOPOLOGY`: an installation checked on a simulated node. Each check is made as users meet
//! it: the last one launches two ranks under the MPI's own launcher and has a message carried between them.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anabranch_engine::config::Config;
use serde::Serialize;
use serde_json::Value;

use super::program::{Mpi, Program};
use super::text::{in_sections, Rows};
use super::{child, installed, library, node, program};
use crate::json::Json;
use crate::output;
use crate::run::gpus;
use crate::run::simulator::Simulation;
use crate::style::{paint, BAD, GOOD};
use crate::table;

/// Length of the messages: one that goes straight, and one of several pieces.
const SIZES: &str = "64K,4M";
/// Counts the messages that the library takes.
const CARRIED: &str = "sends_rts";

/// One check.
#[derive(Serialize)]
struct Check {
    name: &'static str,
    /// None: not tried, as one before it has failed.
    well: Option<bool>,
    text: String,
}

#[derive(Serialize)]
struct Report<'a> {
    sim: &'a str,
    well: bool,
    checks: &'a [Check],
    next: Option<&'a str>,
}

/// Checks and reports: status 0 if all is well, 1 if not.
///
/// # Errors
/// The report cannot be written.
pub fn main(
    name: &OsStr,
    words: &[OsString],
    json: &Json,
    limit: Duration,
) -> anyhow::Result<ExitCode> {
    json.try_out()?;
    let mut checks = Vec::new();
    let mut program = None;
    let outcome = Checks {
        list: &mut checks,
        limit,
    }
    .run(name, words, &mut program);
    let shown = name.to_string_lossy();
    let is_well = outcome.is_ok();
    let app = program
        .as_ref()
        .map_or("./app", |found: &Program| &found.asked);
    let next = is_well.then(|| format!("anabranch run --sim {shown} -np 2 -- {app}"));
    json.write(&Report {
        sim: &shown,
        well: is_well,
        checks: &checks,
        next: next.as_deref(),
    })?;
    if !json.is_alone() {
        output::text(&text(&shown, &outcome, &checks, next.as_deref()))?;
    }
    Ok(ExitCode::from(u8::from(!is_well)))
}

fn text(name: &str, outcome: &Result<(), String>, checks: &[Check], next: Option<&str>) -> String {
    let answer = match outcome {
        Ok(()) => paint(GOOD, format!("All is well on the simulated node {name}.")),
        Err(why) => paint(BAD, format!("Not well on the simulated node {name}: {why}")),
    };
    let mut rows = Rows::default();
    for check in checks {
        match check.well {
            Some(false) => rows.add_bad(check.name, &check.text),
            _ => rows.add(check.name, &check.text),
        }
    }
    rows.add_known("next", next);
    format!(
        "{answer}\n{}",
        in_sections(&[("", rows)], table::terminal_width())
    )
}

struct Checks<'a> {
    list: &'a mut Vec<Check>,
    limit: Duration,
}

/// What is checked, in this order.
const NAMES: [&str; 5] = [
    "the library",
    "the simulator",
    "the node",
    "the MPI library",
    "a message",
];

impl Checks<'_> {
    /// Adds the next check; a failed one is the last that is tried.
    fn take<T>(&mut self, found: Result<(T, String), String>) -> Result<T, String> {
        let name = NAMES[self.list.len()];
        let (result, text, well) = match found {
            Ok((value, text)) => (Ok(value), text, true),
            Err(why) => (Err(format!("{name}: {why}")), why, false),
        };
        let well = Some(well);
        self.list.push(Check { name, well, text });
        if result.is_err() {
            let rest = NAMES[self.list.len()..].iter();
            self.list.extend(rest.map(|name| Check {
                name,
                well: None,
                text: "not tried".into(),
            }));
        }
        result
    }

    fn run(
        &mut self,
        name: &OsStr,
        words: &[OsString],
        program: &mut Option<Program>,
    ) -> Result<(), String> {
        let limit = self.limit;
        self.take(check_library(limit))?;
        let simulation = self.take(check_simulator(name))?;
        self.take(check_node(limit))?;
        let mpi = self.take(check_mpi(words, program, limit))?;
        self.take(carry(name, &simulation, &mpi, program.as_ref(), limit))
    }
}

fn check_library(limit: Duration) -> Result<((), String), String> {
    let (config, _) = Config::from_env();
    if !config.enabled {
        return Err("ANABRANCH=off is set: unset it".into());
    }
    let found = library::examine(config.library.as_deref(), limit);
    if let Some(problem) = found.problem {
        return Err(problem);
    }
    let path = found.path.unwrap_or_default();
    let version = found.version.unwrap_or_default();
    if version != found.command_version {
        return Err(format!(
            "{} is version {version}, this command {}: install both from one build",
            path.display(),
            found.command_version
        ));
    }
    Ok(((), format!("{}, version {version}", path.display())))
}

fn check_simulator(name: &OsStr) -> Result<(Simulation, String), String> {
    let shown = name.to_string_lossy();
    // The option is named by who asks.
    let why = |text: String| {
        let text = text
            .strip_prefix("--sim ")
            .or(text.strip_prefix("--sim: "))
            .unwrap_or(&text);
        text.strip_prefix(&format!("{shown}: "))
            .unwrap_or(text)
            .to_owned()
    };
    let simulation = Simulation::prepare(name, None).map_err(|error| why(error.to_string()))?;
    let gpus = gpus::count(&simulation).map_err(|error| why(error.to_string()))?;
    if gpus < 2 {
        return Err(format!(
            "{} has one GPU: take a topology with two or more",
            name.to_string_lossy()
        ));
    }
    let driver = simulation.folder.join("libcuda.so.1");
    let text = format!(
        "{}: {}, {gpus} GPUs",
        driver.display(),
        name.to_string_lossy()
    );
    Ok((simulation, text))
}

fn check_node(limit: Duration) -> Result<((), String), String> {
    let found = node::examine(limit);
    match found.shm_problem.or(found.peer_memory_problem) {
        Some(problem) => Err(problem),
        None => Ok((
            (),
            "ranks find each other in /dev/shm and can share memory".into(),
        )),
    }
}

/// The MPI of the program, or of the launcher in PATH.
fn check_mpi(
    words: &[OsString],
    program: &mut Option<Program>,
    limit: Duration,
) -> Result<(Mpi, String), String> {
    let (mpi, by) = if words.is_empty() {
        let found = installed::examine(limit);
        let launcher = found.launcher.unwrap_or_default();
        let mpi = found.mpi.ok_or(found.note.unwrap_or_default())?;
        (mpi, format!("by {}", launcher.display()))
    } else {
        let found = program::examine(words, limit);
        if let Some(problem) = found.problems.first() {
            return Err(problem.clone());
        }
        let asked = found.asked.clone();
        let mpi = found.mpi.clone();
        *program = Some(found);
        let none = || {
            format!("{asked} links none that is seen: leave it out, or give the MPI program itself")
        };
        (mpi.ok_or_else(none)?, format!("by {asked}"))
    };
    let path = mpi.path.clone().unwrap_or_default();
    let abi = mpi.abi.unwrap_or("unknown");
    let text = format!("{} ({abi} binary interface), {by}", path.display());
    Ok((mpi, text))
}

/// Two ranks, one message after the other, every byte compared; what the library counts must say that it carried them.
fn carry(
    name: &OsStr,
    simulation: &Simulation,
    mpi: &Mpi,
    program: Option<&Program>,
    limit: Duration,
) -> Result<((), String), String> {
    let folder =
        tempfile::tempdir().map_err(|error| format!("no folder for temporary files: {error}"))?;
    let (rows, stats) = (
        folder.path().join("rows.json"),
        folder.path().join("stats.json"),
    );
    let mut command = Command::new("/proc/self/exe");
    command
        .args(["run", "-n", "2", "--oversubscribe-gpus", "--sim"])
        .arg(name);
    // The launcher that belongs to the program's MPI, beside its library.
    let library = mpi.path.clone().unwrap_or_default();
    if program.is_some() {
        let prefix = crate::run::launcher::beside(&library);
        if let Some(launcher) = prefix {
            command.arg("--mpi").arg(launcher);
        }
    }
    command
        .args([
            "--",
            "anabranch",
            "bench",
            "bw",
            "D",
            "D",
            "--check",
            "--iterations",
            "1",
            "--warmup",
            "0",
        ])
        .args(["--window", "2", "--sizes", SIZES, "--mpi"])
        .arg(&library)
        .arg(json_at(&rows))
        .env("ANABRANCH_STATS", &stats)
        .env_remove("LD_PRELOAD");
    let ended = child::run(command, limit);
    if !ended.succeeded() {
        return Err(format!("two ranks failed: {}", why(&ended)));
    }
    let read = |file: &Path| -> Result<Value, String> {
        let text = std::fs::read_to_string(file)
            .map_err(|error| format!("{}: {error}", file.display()))?;
        serde_json::from_str(&text).map_err(|error| format!("{}: {error}", file.display()))
    };
    let rows = read(&rows).map_err(|why| format!("no results of two ranks: {why}"))?;
    let stats = read(&stats).map_err(|_| {
        "the ranks ran without the library: it was not preloaded into them".to_owned()
    })?;
    let wrong = rows["rows"].as_array().into_iter().flatten();
    let wrong: u64 = wrong.filter_map(|row| row["errors"].as_u64()).sum();
    if wrong > 0 {
        return Err(format!("{wrong} messages brought wrong data"));
    }
    let count = |name: &str| stats["totals"]["counters"][name].as_u64().unwrap_or(0);
    let (carried, sent) = (count(CARRIED), count("sends_device"));
    if carried == 0 {
        return Err(format!(
            "the library carried none of {sent} messages between GPUs: see ANABRANCH_LOG=info"
        ));
    }
    let version = rows["mpi"].as_str().unwrap_or("MPI");
    let version = version.split(',').next().unwrap_or(version);
    let gpus = rows["gpu"].as_str().unwrap_or("GPU");
    let _ = simulation;
    Ok((
        (),
        format!("two ranks under {version}, each with its {gpus}: {carried} of {sent} messages carried by the library, every byte compared"),
    ))
}

fn json_at(file: &Path) -> OsString {
    let mut word = OsString::from("--json=");
    word.push(file);
    word
}

/// Of all that a failed launch says, the line of this project, or the last one.
fn why(ended: &child::Ended) -> String {
    let lines = ended.stderr.lines().map(str::trim);
    let mut ours =
        lines.filter(|line| line.starts_with("anabranch") || line.starts_with("simcuda"));
    match ours.next_back() {
        Some(line) => line.trim_start_matches("anabranch: ").to_owned(),
        None => ended.reason(),
    }
}
