//! `anabranch report`: what the ranks of a job have counted (`ANABRANCH_STATS=FILE`).

mod file;
mod job;
mod remarks;
mod sums;
mod text;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use job::Job;
use sums::Report;

use crate::{json::Json, output};

/// Merges the files of a job's nodes, which ANABRANCH_STATS=FILE makes, and says what calls and messages did
#[derive(Args)]
pub struct Arguments {
    /// The files of all nodes
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    #[command(flatten)]
    json: Json,
}

pub fn main(arguments: &Arguments) -> Result<ExitCode> {
    let job = Job::read(&arguments.files);
    for line in &job.left_out {
        crate::complain(line);
    }
    if job.files.is_empty() {
        return Ok(ExitCode::from(2));
    }
    let report = Report::new(&job);
    arguments.json.write(&report)?;
    if !arguments.json.is_alone() {
        output::text(&report.text())?;
    }
    // What there is is shown; a script learns that it is not all that was asked for.
    Ok(ExitCode::from(u8::from(!job.left_out.is_empty())))
}

/// What the files say, for people, and what is wrong with some of them.
pub fn text(files: &[PathBuf]) -> (String, Vec<String>) {
    let job = Job::read(files);
    let text = match job.files.is_empty() {
        true => String::new(),
        false => Report::new(&job).text(),
    };
    (text, job.left_out)
}

/// What a comparison asks of a run.
pub struct Brief {
    /// Time of a rank in MPI calls, s; the mean of all ranks.
    pub in_calls_s: f64,
    /// Protocols by which messages were received: messages and bytes.
    pub received: Vec<(String, u64, u64)>,
    /// Messages and bytes that were not taken.
    pub left: (u64, u64),
}

/// What the files say in brief; `None` if none can be read, or if no rank has timed its calls.
pub fn brief(files: &[PathBuf]) -> Option<Brief> {
    let report = Report::new(&Job::read(files));
    let ranks = report.ranks.len();
    if ranks == 0 || report.calls.is_empty() {
        return None;
    }
    let in_calls_ms: f64 = report.ranks.iter().map(|rank| rank.in_calls_ms).sum();
    let received = report.paths.into_iter();
    let left = report.fallbacks.iter();
    Some(Brief {
        in_calls_s: in_calls_ms * 1e-3 / ranks as f64,
        received: received
            .map(|path| (path.path, path.all.messages, path.all.bytes))
            .collect(),
        left: left.fold((0, 0), |all, one| (all.0 + one.messages, all.1 + one.bytes)),
    })
}
