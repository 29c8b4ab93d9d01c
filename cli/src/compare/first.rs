//! The end of the suite `first`: in which rows messages take longer with the library, and how many iterations
//! were slow.

use std::fmt::Write as _;

use anabranch_engine::config::format_size;

use super::results::Results;
use super::statistics::median;
use crate::table;

/// A row takes longer if it takes more than so many times as long, by the medians of both halves of its
/// launches.
const LONGER: f64 = 1.02;
/// Slow iterations are counted of messages of so many bytes and more: short ones are over before a delay of
/// 200 us is their own.
const COUNTED_FROM: usize = 1 << 20;

/// The text, for each configuration with the library.
pub fn text(results: &Results) -> String {
    let with = results.settings.iter().enumerate();
    let with = with.filter(|(index, setting)| setting.preload && *index != results.baseline);
    with.map(|(index, setting)| of(results, index, &setting.name))
        .collect()
}

fn of(results: &Results, setting: usize, name: &str) -> String {
    let base = &results.settings[results.baseline].name;
    let mut rows = Vec::new();
    for (row, what) in results.rows.iter().enumerate() {
        if let Some(halves) = halves(results, row, setting) {
            rows.push((what, halves));
        }
    }
    let lesser = |halves: &[f64; 2]| halves[0].min(halves[1]);
    let longer: Vec<_> = rows
        .iter()
        .filter(|(_, halves)| lesser(halves) > LONGER)
        .collect();
    let mut text = format!(
        "\n== {name}: {} of {} rows take more than {LONGER} of the time of {base} in both halves of the rounds\n",
        longer.len(),
        rows.len()
    );
    let longer = longer.into_iter().map(|(what, halves)| {
        let size = what.bytes();
        let size = size.map_or(String::new(), |bytes| format_size(bytes as u64));
        let [first, second] = halves.map(|half| format!("{half:.3}"));
        [first, second, size, what.title()]
    });
    text += &table::text(">>>", longer);
    let slow = |setting: usize| {
        let rows = results.rows.iter().zip(&results.cells);
        let long = rows.filter(|(what, _)| what.bytes().is_some_and(|bytes| bytes >= COUNTED_FROM));
        let cells = long.map(|(_, cells)| &cells[setting]);
        cells.fold((0, 0), |(slow, all), cell| {
            (slow + cell.slow, all + cell.iterations)
        })
    };
    let ((here, all), (there, of)) = (slow(setting), slow(results.baseline));
    let _ = writeln!(
        text,
        "Iterations of 1M and more that took more than 1.5 times their median and 200 us: {here} of {all}; {base}: {there} of {of}"
    );
    text
}

/// How many times as long as the baseline a configuration takes in a row, by the first half of the launches
/// and by the second.
fn halves(results: &Results, row: usize, setting: usize) -> Option<[f64; 2]> {
    let cells = &results.cells[row];
    let (base, other) = (&cells[results.baseline].launches, &cells[setting].launches);
    let ratio = |range: std::ops::Range<usize>| {
        let of = |launches: &[f64]| median(launches.get(range.clone())?);
        let ratio = of(base)? / of(other)?;
        Some(if results.rows[row].is_time() {
            1.0 / ratio
        } else {
            ratio
        })
    };
    let launches = base.len().min(other.len());
    let half = launches.div_ceil(2);
    let first = ratio(0..half)?;
    Some([first, ratio(half..launches).unwrap_or(first)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::buffer::Place;
    use crate::bench::suite::Ask;
    use crate::bench::Kind;
    use crate::compare::results::What;
    use crate::compare::settings::{Setting, Variables};

    fn results(kind: Kind, values: [&[f64]; 2]) -> Results {
        let setting = |name: &str| Setting {
            name: name.into(),
            preload: name == "anabranch",
            variables: Variables::new(),
        };
        let ask = Ask {
            row: 0,
            kind,
            buffers: [Place::D; 2],
            bytes: 4 << 20,
            window: 64,
            persistent: true,
            fixed: None,
        };
        let settings = ["vanilla", "anabranch"].map(setting).into();
        let mut results = Results::new(settings, 0, vec![What::Bench(ask)], false, None);
        for (cell, values) in results.cells[0].iter_mut().zip(values) {
            cell.launches = values.to_vec();
            (cell.iterations, cell.slow) = (40, values.len() as u64);
        }
        results
    }

    #[test]
    fn a_row_takes_longer_if_both_halves_say_so() {
        let bw = results(Kind::Bw, [&[10.0, 10.0, 10.0, 10.0], &[9.0, 9.0, 9.5, 9.0]]);
        let text = text(&bw);
        assert!(
            text.contains("anabranch: 1 of 1 rows take more than 1.02"),
            "{text}"
        );
        assert!(
            text.contains("1.111  1.081  4M  bw D D, window 64, persistent, MB/s"),
            "{text}"
        );
        assert!(
            text.contains("and 200 us: 4 of 40; vanilla: 4 of 40"),
            "{text}"
        );
        let once = results(
            Kind::Bw,
            [&[10.0, 10.0, 10.0, 10.0], &[9.0, 9.0, 10.0, 10.0]],
        );
        assert!(super::text(&once).contains("0 of 1 rows"));
        let latency = results(Kind::Latency, [&[10.0, 10.0], &[10.3, 10.3]]);
        assert!(super::text(&latency).contains("1.030  1.030"));
    }

    #[test]
    fn what_was_measured_once_is_no_less_so() {
        let once = results(Kind::Latency, [&[10.0], &[11.0]]);
        assert!(super::text(&once).contains("1.100  1.100"));
    }
}
