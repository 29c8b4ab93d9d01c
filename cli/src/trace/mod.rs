//! `anabranch trace`: what the ranks of a job have recorded (`ANABRANCH_TRACE`).

mod advice;
mod bins;
mod clocks;
mod copies;
mod html;
mod job;
mod links;
mod message;
mod names;
mod otf2;
mod perfetto;
mod read;
mod report;
mod ucp;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use job::{Copy, Job, Plan};
use message::Message;
use report::Report;

use crate::{json::Json, output, Failure};

/// Merges the files of a job's ranks, which ANABRANCH_TRACE=FILE makes, and says what they did
#[derive(Args)]
pub struct Arguments {
    /// The files of all ranks
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    #[command(flatten)]
    json: Json,

    /// Each message, too, in --json
    #[arg(long, requires = "json")]
    messages: bool,

    /// Write a line for each message as CSV; - is stdout
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,

    /// Write a trace for Perfetto's viewer (ui.perfetto.dev); - is stdout
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,

    /// Write a page for a browser, complete in one file; - is stdout
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write an archive for Vampir and other tools that read OTF2 into a new folder; needs OTF2's library
    #[arg(long, value_name = "FOLDER")]
    otf2: Option<PathBuf>,

    /// Print all that is known of a message, by its number in --csv
    #[arg(long, value_name = "NUMBER", conflicts_with = "around")]
    message: Option<usize>,

    /// Print the messages that were under way at a time, in ms from the first record
    #[arg(long, value_name = "MS")]
    around: Option<f64>,
}

#[derive(Serialize)]
struct Sums<'a> {
    #[serde(flatten)]
    report: &'a Report,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<&'a [Message]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    copies: Option<&'a [Copy]>,
}

/// All that is known of a message.
#[derive(Serialize)]
struct Whole<'a> {
    #[serde(flatten)]
    message: &'a Message,
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<&'a Plan>,
    took_us: Option<f64>,
    copies: Vec<WholeCopy<'a>>,
    /// Calls of UCX's functions in its two MPI calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ucp: Vec<ucp::OfMessage>,
}

/// A copy, with the names of its places.
#[derive(Serialize)]
struct WholeCopy<'a> {
    from_name: &'a str,
    to_name: &'a str,
    #[serde(flatten)]
    copy: &'a Copy,
}

impl Whole<'_> {
    fn of<'a>(job: &'a Job, message: &'a Message) -> Whole<'a> {
        let copies = job
            .copies
            .iter()
            .filter(|copy| copy.message == Some(message.number));
        let name = |place: usize| job.places[place].name.as_str();
        Whole {
            message,
            ucp: ucp::of_message(job, message),
            plan: job.plans.get(&message.number),
            took_us: message.took_ns().map(|ns| ns as f64 * 1e-3),
            copies: copies
                .map(|copy| WholeCopy {
                    from_name: name(copy.from),
                    to_name: name(copy.to),
                    copy,
                })
                .collect(),
        }
    }
}

pub fn main(arguments: &Arguments) -> Result<ExitCode> {
    let files = [&arguments.csv, &arguments.perfetto, &arguments.html];
    let to_stdout = files
        .into_iter()
        .flatten()
        .filter(|path| **path == Path::new("-"));
    let to_stdout = to_stdout.count() + usize::from(arguments.json.is_alone());
    if to_stdout > 1 {
        return Err(Failure::new(
            2,
            "- is stdout for one of --json, --csv, --perfetto and --html only",
        )
        .into());
    }
    if let Some(ms) = arguments.around.filter(|ms| !(0.0..1e12).contains(ms)) {
        return Err(
            Failure::new(2, format!("--around {ms}: it is a time in ms, from 0 on")).into(),
        );
    }
    let mut job = Job::read(&arguments.files)?;
    for line in &job.left_out {
        crate::complain(&format!("{line}; it is left out"));
    }
    if let Some(folder) = &arguments.otf2 {
        let left_out = otf2::write(&job, folder)?;
        if left_out > 0 {
            job.notes.push(format!("{left_out} sides of messages are not in the OTF2 archive: their other sides were not recorded, as they are in host memory, or were cancelled"));
        }
    }
    if let Some(path) = &arguments.perfetto {
        let mut bytes = Vec::new();
        perfetto::write(&job, &mut bytes)?;
        output::write(path, &bytes)?;
    }
    if let Some(path) = &arguments.csv {
        output::write(path, report::csv(&job.messages).as_bytes())?;
    }
    let report = Report::new(&job);
    if let Some(path) = &arguments.html {
        output::write(path, html::page(&job, &report)?.as_bytes())?;
    }
    let messages = arguments.messages.then_some(&job.messages[..]);
    arguments.json.write(&Sums {
        report: &report,
        messages,
        copies: messages.map(|_| &job.copies[..]),
    })?;
    let text = if let Some(number) = arguments.message {
        let message = job.messages.get(number).ok_or_else(|| {
            let count = job.messages.len();
            Failure::new(
                2,
                format!("there is no message {number}: the trace has {count}, from 0 on"),
            )
        })?;
        serde_json::to_string_pretty(&Whole::of(&job, message))? + "\n"
    } else if let Some(ms) = arguments.around {
        serde_json::to_string_pretty(&around(&job, ms))? + "\n"
    } else if to_stdout > 0 {
        String::new()
    } else {
        report.text(&job.messages)
    };
    output::to_stdout(text.as_bytes())?;
    // What there is is shown; a script learns that it is not all that was asked for.
    Ok(ExitCode::from(u8::from(!job.left_out.is_empty())))
}

/// What the files say, for people.
pub fn text(files: &[PathBuf]) -> Result<String> {
    let job = Job::read(files)?;
    Ok(Report::new(&job).text(&job.messages))
}

/// All that can be made of files, but an OTF2 archive.
#[cfg(test)]
pub fn all_outputs(files: &[PathBuf]) {
    let Ok(job) = Job::read(files) else { return };
    let report = Report::new(&job);
    perfetto::write(&job, Vec::new()).expect("written");
    html::page(&job, &report).expect("a page");
    let json = Sums {
        report: &report,
        messages: Some(&job.messages[..]),
        copies: Some(&job.copies[..]),
    };
    serde_json::to_string(&json).expect("JSON");
    for message in job.messages.iter().take(20) {
        serde_json::to_string(&Whole::of(&job, message)).expect("JSON");
    }
    let _ = (report.text(&job.messages), report::csv(&job.messages));
    let _ = around(&job, 1.0);
}

/// Messages that were offered before this time and had not arrived.
fn around(job: &Job, ms: f64) -> Vec<&Message> {
    let at = (ms * 1e6) as u64;
    let is_there = |message: &&Message| {
        let begin = message.begin_ns();
        begin <= at && message.took_ns().is_none_or(|took| at <= begin + took)
    };
    job.messages.iter().filter(is_there).collect()
}
