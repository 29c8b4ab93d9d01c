//! The comparison for people.

use std::fmt::Write as _;

use anabranch_engine::config::format_size;

use super::results::Results;

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
    let mut title = String::new();
    for row in 0..results.rows.len() {
        let what = &results.rows[row];
        if what.title() != title {
            title = what.title();
            let _ = write!(text, "\n== {title}\n{}", columns(results));
        }
        text += &line(results, row);
    }
    if let Some(predictions) = &results.predictions {
        text += &predictions.text(results);
    }
    text
}

fn columns(results: &Results) -> String {
    let mut line = format!("{:<7}", "size");
    for (index, setting) in results.settings.iter().enumerate() {
        let _ = write!(line, " {:>10} {:>13}", shorten(&setting.name, 10), "spread");
        if index != results.baseline {
            let _ = write!(line, " {:>7} ", "ratio");
        }
    }
    if results.again.is_some() {
        let _ = write!(line, " {:>6}", "floor");
    }
    line.trim_end().to_owned() + "\n"
}

fn line(results: &Results, row: usize) -> String {
    let size = results.rows[row].bytes();
    let size = size.map_or("-".into(), |bytes| format_size(bytes as u64));
    let mut line = format!("{size:<7}");
    let mut remarks = String::new();
    for (index, setting) in results.settings.iter().enumerate() {
        let cell = &results.cells[row][index];
        let compared = results.compared(row, index);
        match &compared {
            Some(compared) => {
                let spread = &compared.spread;
                let percent = |value: f64| (value / spread.median - 1.0) * 100.0;
                let range = format!("{:+.1}..{:+.1}", percent(spread.min), percent(spread.max));
                let _ = write!(line, " {:>10} {range:>13}", figure(spread.median));
            }
            None => {
                let _ = write!(line, " {:>10} {:>13}", "-", "");
            }
        }
        if index != results.baseline {
            let ratio = compared.as_ref().and_then(|compared| compared.ratio);
            let ratio = ratio.map_or("-".into(), |ratio| format!("{ratio:.3}"));
            let worse = compared.is_some_and(|compared| compared.worse);
            let _ = write!(line, " {ratio:>7}{}", if worse { '!' } else { ' ' });
        }
        if let Some(taken) = &cell.taken {
            let _ = write!(remarks, "  [{}] {taken}", setting.name);
        }
        if let Some(chosen) = &cell.chosen {
            let _ = write!(remarks, "  [{}] {chosen}", setting.name);
        }
        if let Some(errors) = cell.errors.filter(|errors| *errors > 0) {
            let _ = write!(
                remarks,
                "  WRONG DATA in {errors} messages [{}]",
                setting.name
            );
        }
        if !cell.void.is_empty() {
            let _ = write!(
                remarks,
                "  VOID [{}]: {}",
                setting.name,
                cell.void.join("; ")
            );
        }
    }
    if results.again.is_some() {
        let floor = results.floor(row);
        let floor = floor.map_or("-".into(), |floor| format!("{floor:.3}"));
        let _ = write!(line, " {floor:>6}");
    }
    line + &remarks + "\n"
}

/// Four digits or more.
pub fn figure(value: f64) -> String {
    match value {
        _ if value >= 1000.0 => format!("{value:.0}"),
        _ if value >= 10.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

fn shorten(name: &str, width: usize) -> &str {
    name.char_indices()
        .nth(width)
        .map_or(name, |(end, _)| &name[..end])
}
