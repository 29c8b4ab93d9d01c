//! The comparison for people.

use std::fmt::Write as _;

use anabranch_engine::config::format_size;

use super::results::{Cell, Results};
use crate::table;

/// What the columns mean.
const LEGEND: &str = "\
Each figure is the median of the launches, behind it the smallest and the largest in percent of it. A ratio above 1 is
faster than the baseline. ! marks what is slower than noise explains: a ratio below the floor, which comes from launches
of the baseline against itself (the lower quartile of their ratios, or the ratio of the medians).";

/// The same where configurations take turns within launches.
const LEGEND_OF_TURNS: &str = "\
Each figure is the median of the launches, of each of which it is the median of many turns, behind it the smallest and the
largest in percent of it. A ratio above 1 is faster than the baseline: the median of what each turn is to the baseline's beside
it. ! marks what is slower than noise explains: a ratio below the floor, which comes from turns of the baseline against itself
(the median of their ratios, or the error of that median).";

/// What stands behind the figures.
const LEGEND_OF_COUNTERS: &str = "\
Of the library's counters in a row: sends from device memory that went by RTS, of all of them; then by which way messages
arrived and why others went by value.
VOID: these are not what the pattern asks for, or something failed, and the row does not count.";

/// The text that explains the tables.
pub fn legend(in_turns: bool) -> String {
    let first = if in_turns { LEGEND_OF_TURNS } else { LEGEND };
    format!("{first}\n{LEGEND_OF_COUNTERS}")
}

/// All tables.
pub fn text(results: &Results) -> String {
    let mut text = String::new();
    let rows: Vec<usize> = (0..results.rows.len()).collect();
    let title = |row: usize| results.rows[row].title();
    for rows in rows.chunk_by(|one, next| title(*one) == title(*next)) {
        let lines = rows.iter().map(|row| line(results, *row));
        let lines = std::iter::once(header(results)).chain(lines);
        let table = table::text(&alignment(results), lines);
        let _ = write!(text, "\n== {}\n{table}", title(rows[0]));
    }
    if let Some(predictions) = &results.predictions {
        text += &predictions.text(results);
    }
    text
}

/// How the columns are aligned: see [`table::text`].
fn alignment(results: &Results) -> String {
    let columns = results.settings.iter().enumerate();
    let columns = columns.map(|(index, _)| {
        if index == results.baseline {
            ">>"
        } else {
            ">>>"
        }
    });
    let floor = results.again.is_some().then_some(">");
    std::iter::once("<").chain(columns).chain(floor).collect()
}

fn header(results: &Results) -> Vec<String> {
    let mut cells = vec!["size".to_owned()];
    for (index, setting) in results.settings.iter().enumerate() {
        cells.extend([setting.name.clone(), "spread".to_owned()]);
        if index != results.baseline {
            cells.push("ratio ".to_owned());
        }
    }
    cells.extend(results.again.is_some().then(|| "floor".to_owned()));
    cells
}

fn line(results: &Results, row: usize) -> Vec<String> {
    let size = results.rows[row].bytes();
    let mut cells = vec![size.map_or("-".into(), |bytes| format_size(bytes as u64))];
    let mut remarks = Vec::new();
    for (index, setting) in results.settings.iter().enumerate() {
        let compared = results.compared(row, index);
        let (median, range) = compared
            .as_ref()
            .map_or(("-".into(), String::new()), |compared| {
                let spread = &compared.spread;
                let percent = |value: f64| (value / spread.median - 1.0) * 100.0;
                let range = format!("{:+.1}..{:+.1}", percent(spread.min), percent(spread.max));
                (figure(spread.median), range)
            });
        cells.extend([median, range]);
        if index != results.baseline {
            let ratio = compared.as_ref().and_then(|compared| compared.ratio);
            let ratio = ratio.map_or("-".into(), |ratio| format!("{ratio:.3}"));
            let worse = compared.is_some_and(|compared| compared.worse);
            cells.push(ratio + if worse { "!" } else { " " });
        }
        remarks.extend(remarks_of(&setting.name, &results.cells[row][index]));
    }
    if results.again.is_some() {
        let floor = results.floor(row);
        cells.push(floor.map_or("-".into(), |floor| format!("{floor:.3}")));
    }
    cells.push(remarks.join("  "));
    cells
}

/// What is told of a configuration behind its figures.
fn remarks_of(name: &str, cell: &Cell) -> Vec<String> {
    let taken = cell.taken.iter().map(|taken| format!("[{name}] {taken}"));
    let chosen = cell
        .chosen
        .iter()
        .map(|chosen| format!("[{name}] {chosen}"));
    let errors = cell.errors.filter(|errors| *errors > 0);
    let errors = errors.map(|errors| format!("WRONG DATA in {errors} messages [{name}]"));
    let void = (!cell.void.is_empty()).then(|| format!("VOID [{name}]: {}", cell.void.join("; ")));
    taken.chain(chosen).chain(errors).chain(void).collect()
}

/// Four digits or more.
pub fn figure(value: f64) -> String {
    match value {
        _ if value >= 1000.0 => format!("{value:.0}"),
        _ if value >= 10.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}
