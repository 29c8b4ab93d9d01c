//! `anabranch config`: the table of options.

use std::process::ExitCode;

use anabranch_engine::config::{Config, Group, Row};
use clap::Args;

use crate::json::Json;
use crate::output;
use crate::style::{paint, HEAD};
use crate::table;

/// In terminals of less columns each option has lines of its own for its meaning.
const TABLE_FROM: u16 = 120;

/// Arguments of `anabranch config`.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    json: Json,
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
        .filter(|row| arguments.all || row.group != Group::Testing)
        .collect();
    arguments.json.write(&rows)?;
    if !arguments.json.is_alone() {
        output::text(&text(&rows, table::terminal_width()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The groups, and what they are for.
const GROUPS: [(Group, &str); 3] = [
    (Group::Everyday, "Everyday: switch it off, see what it does"),
    (
        Group::Tuning,
        "Tuning: how messages move; the defaults are what measurements favour",
    ),
    (Group::Testing, "Testing: for the tests of the library"),
];

/// All options, in lines of this width; without one, each option is one line.
fn text(rows: &[Row], width: Option<u16>) -> String {
    let mut out = String::new();
    for (group, title) in GROUPS {
        let rows: Vec<&Row> = rows.iter().filter(|row| row.group == group).collect();
        if rows.is_empty() {
            continue;
        }
        out += &paint(HEAD, title);
        out.push('\n');
        out += &match width {
            Some(width) if width < TABLE_FROM => in_lines(&rows, width),
            _ => in_table(&rows, width),
        };
        out.push('\n');
    }
    out + "* differs from the default. K, M, G and T are powers of 1024.\n"
}

fn shown(text: &str) -> &str {
    if text.is_empty() {
        "-"
    } else {
        text
    }
}

/// The value in effect, with a mark where it is not the default.
fn effective(row: &Row) -> String {
    let mark = if row.effective == row.default {
        ""
    } else {
        "*"
    };
    shown(&row.effective).to_owned() + mark
}

/// What it does and what it takes. What K stands for is said once, below.
fn meaning(row: &Row) -> String {
    let accepts = row.accepts.replace(" (K, M, G, T are powers of 1024)", "");
    format!("{} [{accepts}]", row.doc)
}

fn in_table(rows: &[&Row], width: Option<u16>) -> String {
    let mut lines = vec![["option", "default", "effective", "meaning"].map(str::to_owned)];
    lines.extend(rows.iter().map(|row| {
        [
            row.name.to_owned(),
            shown(row.default).to_owned(),
            effective(row),
            meaning(row),
        ]
    }));
    table::wrapped(lines, width)
}

/// A line for name and values, and below it the meaning.
fn in_lines(rows: &[&Row], width: u16) -> String {
    let heads = rows.iter().map(|row| {
        let default = match row.effective == row.default {
            true => String::new(),
            false => format!("default {}", shown(row.default)),
        };
        [row.name.to_owned(), effective(row), default]
    });
    let heads = table::text("", heads);
    let indented = |row: &&Row| table::wrapped([[String::from("  "), meaning(row)]], Some(width));
    let lines = heads.lines().zip(rows.iter().map(indented));
    lines
        .map(|(head, meaning)| format!("{head}\n{meaning}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_as_wide_as_the_terminal_at_most() {
        let rows = Config::default().rows();
        let plain = anstream::adapter::strip_str;
        for width in [80, 100, 120, 200] {
            let text = plain(&text(&rows, Some(width))).to_string();
            let longest = text.lines().map(|line| line.chars().count()).max();
            assert!(
                longest <= Some(width.into()),
                "{width}: {longest:?}\n{text}"
            );
            for row in &rows {
                assert_eq!(
                    text.matches(&format!("\n{} ", row.name)).count(),
                    1,
                    "{text}"
                );
            }
        }
        // For grep: an option is one line.
        let text = plain(&text(&rows, None)).to_string();
        let eager = text
            .lines()
            .find(|line| line.starts_with("ANABRANCH_EAGER "));
        assert!(
            eager.is_some_and(|line| line.contains("without waiting")),
            "{text}"
        );
        let places = GROUPS.map(|(_, title)| text.find(title).expect("a group"));
        assert!(places.is_sorted(), "{text}");
    }
}
