//! `anabranch run --ab`: the program without and with the library, in turns.
//!
//! Launches without the library are bare, those with it count calls and messages (`ANABRANCH_STATS`). One more launch has the
//! library stand aside, and only time the calls: it tells the time in MPI calls without it.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use super::Setting;
use crate::report::{self, Brief};
use crate::{table, Failure};

/// Launches of each kind.
const PAIRS: usize = 3;
/// A program that ends sooner is mostly the launcher's time, s.
const SHORT_S: f64 = 0.5;

/// The launches of a kind.
#[derive(Default)]
struct Times(Vec<f64>);

impl Times {
    fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
    }

    fn show(&self) -> String {
        let all: Vec<String> = self
            .0
            .iter()
            .map(|seconds| format!("{seconds:.3}"))
            .collect();
        all.join("  ")
    }
}

/// How a kind of launch is called.
fn name(is_vanilla: bool) -> &'static str {
    match is_vanilla {
        true => "without",
        false => "with",
    }
}

/// Launches, compares and says what came out.
pub fn main(setting: &Setting) -> anyhow::Result<ExitCode> {
    if setting.simulation.is_some() {
        crate::complain("--ab: on a simulated node, times are those of this machine: they tell nothing of real GPUs");
    }
    let folder = tempfile::tempdir()?;
    let mut times = [Times::default(), Times::default()];
    let mut with = Vec::new();
    let total = 2 * PAIRS + 1;
    for launch in 0..2 * PAIRS {
        // Without first, then with first: what changes with time concerns both.
        let is_vanilla = launch % 4 == 0 || launch % 4 == 3;
        crate::complain(&format!(
            "launch {} of {total}: {} the library",
            launch + 1,
            name(is_vanilla)
        ));
        let file = folder.path().join(format!("{launch}-%r.json"));
        let set = if is_vanilla {
            Vec::new()
        } else {
            counted(&file)
        };
        let began = Instant::now();
        let status = setting.run(is_vanilla, set)?;
        if status != 0 {
            return stop(setting, is_vanilla, status);
        }
        times[usize::from(!is_vanilla)]
            .0
            .push(began.elapsed().as_secs_f64());
        if is_vanilla {
            continue;
        }
        with.extend(report::brief(&files(&file, setting.arguments.ranks)));
        if with.is_empty() {
            return Err(uncounted(setting, began.elapsed().as_secs_f64()));
        }
    }
    crate::complain(&format!(
        "launch {total} of {total}: the library times calls and takes no message"
    ));
    let file = folder.path().join("aside-%r.json");
    let mut set = counted(&file);
    set.push(("ANABRANCH_ASIDE".into(), "on".into()));
    let status = setting.run(false, set)?;
    if status != 0 {
        return stop(setting, true, status);
    }
    let aside = report::brief(&files(&file, setting.arguments.ranks));
    say(&times, &with, aside.as_ref());
    Ok(ExitCode::SUCCESS)
}

fn counted(file: &std::path::Path) -> Vec<(String, OsString)> {
    vec![
        ("ANABRANCH_STATS".into(), file.into()),
        ("ANABRANCH_STATS_DETAILS".into(), "on".into()),
    ]
}

/// The files of all nodes: one for each rank that is the lowest of its node.
fn files(name: &std::path::Path, ranks: u32) -> Vec<PathBuf> {
    let name = name.to_string_lossy();
    let of_rank = |rank: u32| PathBuf::from(name.replace("%r", &rank.to_string()));
    (0..ranks)
        .map(of_rank)
        .filter(|file| file.exists())
        .collect()
}

/// A launch has failed: there is nothing to compare.
fn stop(setting: &Setting, is_vanilla: bool, status: u8) -> anyhow::Result<ExitCode> {
    let signal = if status > 128 {
        format!(" (signal {})", status - 128)
    } else {
        String::new()
    };
    let command = again(setting);
    if !is_vanilla {
        let text = format!("--ab: no ratio: with the library the program ended with status {status}{signal}, without it it ran to its end: {command} shows that again");
        return Err(Failure::new(status, text).into());
    }
    crate::complain("with the library:");
    let began = Instant::now();
    let with = setting.run(false, Vec::new())?;
    let seconds = began.elapsed().as_secs_f64();
    let text = match (with, &setting.simulation) {
        (0, Some(_)) => format!(
            "--ab: no ratio: without the library the program ended with status {status}{signal}, with it it ran to its end in \
             {seconds:.3} s; an MPI that knows no CUDA ends so when it is given device memory: set SIMCUDA_HOST_ACCESS=1, by \
             which a simulated node allows it"
        ),
        (0, None) => format!(
            "--ab: no ratio: without the library the program ended with status {status}{signal}, with it it ran to its end in \
             {seconds:.3} s; an MPI that knows no CUDA ends so when it is given device memory: give it an MPI library that knows CUDA"
        ),
        _ => format!(
            "--ab: no ratio: the program ended with status {status}{signal} without the library, and it ended with status {with} \
             with it: have it run to its end first, by {command}"
        ),
    };
    Err(Failure::new(if with == 0 { 1 } else { with }, text).into())
}

/// The command line without `--ab`.
fn again(setting: &Setting) -> String {
    let arguments = setting.arguments;
    let sim = (arguments.sim.as_ref()).map_or(String::new(), |sim| {
        format!(" --sim {}", sim.to_string_lossy())
    });
    let program: Vec<_> = arguments
        .command
        .iter()
        .map(|word| word.to_string_lossy())
        .collect();
    let program = program.join(" ");
    format!("anabranch run{sim} -np {} -- {program}", arguments.ranks)
}

/// The library has counted nothing in the first launch with it: more launches would tell nothing.
fn uncounted(setting: &Setting, seconds: f64) -> anyhow::Error {
    let program = setting.program.path.display();
    let text = format!(
        "--ab: no ratio: {program} ended after {seconds:.3} s, and the library saw no MPI call of it: name the MPI program itself; \
         anabranch doctor {program} says what is seen of it"
    );
    Failure::new(1, text).into()
}

/// "1.21x in all, 1.95x in MPI calls", and what that is made of.
fn say([without, with]: &[Times; 2], briefs: &[Brief], aside: Option<&Brief>) {
    let in_all = without.median() / with.median();
    let pairs: Vec<f64> = without.0.iter().zip(&with.0).map(|(a, b)| a / b).collect();
    let (least, most) = (
        pairs.iter().copied().fold(f64::MAX, f64::min),
        pairs.iter().copied().fold(0.0, f64::max),
    );
    let in_calls = Times(briefs.iter().map(|brief| brief.in_calls_s).collect());
    let both = aside
        .filter(|_| !briefs.is_empty())
        .map(|aside| aside.in_calls_s);
    let of_calls = both.map_or_else(String::new, |seconds| {
        format!(", {:.2}x in MPI calls", seconds / in_calls.median())
    });
    let mut rows = vec![
        ["seconds", "without", "with"].map(str::to_owned).to_vec(),
        vec!["in all".into(), without.show(), with.show()],
    ];
    if let Some(seconds) = both {
        rows.push(vec![
            "in MPI calls".into(),
            format!("{seconds:.3}"),
            in_calls.show(),
        ]);
    }
    let mut text = format!("{in_all:.2}x in all ({least:.2} to {most:.2} by pair){of_calls}\n");
    text += &table::text("<>>", rows);
    text += &briefs.last().map(carried).unwrap_or_default();
    if with.median().max(without.median()) < SHORT_S {
        text += "so short a run is mostly the launcher's time: give it more to do, or measure messages alone by anabranch compare\n";
    }
    crate::complain(text.trim_end());
}

/// What the library carried in the last launch.
fn carried(brief: &Brief) -> String {
    let all: u64 = brief.received.iter().map(|(.., bytes)| bytes).sum();
    let mut text = String::from("received in device memory:");
    for (path, messages, bytes) in &brief.received {
        let share = *bytes as f64 * 100.0 / all.max(1) as f64;
        text += &format!(" {path} {messages} messages, {share:.0} % of the bytes;");
    }
    let (messages, bytes) = brief.left;
    let bytes = table::grouped(bytes);
    text + &format!(" left to the MPI library: {messages} messages, {bytes} bytes\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_of_all_launches() {
        assert_eq!(Times(vec![3.0, 1.0, 2.0]).median(), 2.0);
        assert_eq!(Times(vec![1.0, 2.0]).show(), "1.000  2.000");
        assert!(Times::default().median().is_nan());
    }
}
