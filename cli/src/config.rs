//! `anabranch config`: the table of options.

use std::io::{self, Write};
use std::process::ExitCode;

use anabranch_engine::config::{Config, Row};
use clap::Args;

use crate::table;

/// Arguments of `anabranch config`.
#[derive(Args)]
pub struct Arguments {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// List the options for tests of the library too
    #[arg(long)]
    all: bool,
}

/// Prints the table on stdout, and on stderr what in the environment was not understood.
///
/// # Errors
/// Stdout cannot be written.
pub fn main(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (config, warnings) = Config::from_env();
    for warning in &warnings {
        crate::complain(&warning.to_string());
    }
    if let Some(notice) = anabranch_engine::config::notice() {
        crate::complain(&notice);
    }
    let rows: Vec<Row> = config
        .rows()
        .into_iter()
        .filter(|row| arguments.all || !row.hidden)
        .collect();
    let text = if arguments.json {
        format!("{}\n", serde_json::to_string_pretty(&rows)?)
    } else {
        text(&rows)
    };
    match io::stdout().lock().write_all(text.as_bytes()) {
        // The reader has seen enough, as in `anabranch config | head`.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(ExitCode::SUCCESS),
        result => Ok(result.map(|()| ExitCode::SUCCESS)?),
    }
}

fn text(rows: &[Row]) -> String {
    let shown = |text: &str| {
        if text.is_empty() {
            "-".to_owned()
        } else {
            text.to_owned()
        }
    };
    let mut lines = vec![["option", "default", "effective", "meaning"].map(str::to_owned)];
    for row in rows {
        let mark = if row.effective == row.default {
            ""
        } else {
            "*"
        };
        lines.push([
            row.name.to_owned(),
            shown(row.default),
            shown(&row.effective) + mark,
            format!("{} [{}]", row.doc, row.accepts),
        ]);
    }
    table::text("", lines) + "* differs from the default\n"
}
