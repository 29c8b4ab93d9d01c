//! What plans predict for the rows, beside what messages took there.

use std::ffi::OsString;

use anabranch_engine::config::{format_size, Config};
use anabranch_engine::plan::Options;
use anabranch_engine::transfer::route;
use serde::Serialize;

use super::results::{Results, What};
use super::settings::Setting;
use super::statistics::median;
use super::table::figure;
use crate::bench::buffer::Place;
use crate::bench::exchange::ACK_BYTES;
use crate::bench::suite::Ask;
use crate::bench::Kind;
use crate::plan::{Asked, Assignment};
use crate::table;
use crate::topo::source::Source;

/// Shorter messages are no matter of bandwidth: what calls take decides.
const BYTES_MIN: usize = 2 << 20;

/// By what a window is acknowledged: half of a round trip of this row is no part of what the window takes. Kind, buffers, bytes and
/// window.
pub const ACKNOWLEDGEMENT: (Kind, [Place; 2], usize, usize) =
    (Kind::Latency, [Place::D; 2], ACK_BYTES, 1);

fn is_between_devices(ask: &Ask) -> bool {
    ask.buffers == [Place::D; 2]
}

/// What a plan predicts for the messages of a row in a configuration, us: of a round trip half, of both directions the slower.
/// `None` where the library does not plan, or no path is allowed.
fn predict(source: &Source, setting: &Setting, ask: &Ask) -> Option<f64> {
    if !setting.preload || !is_between_devices(ask) || ask.bytes < BYTES_MIN {
        return None;
    }
    let own = |name: &str| setting.variables.get(name).map(OsString::from);
    let look_up = |name: &str| own(name).or_else(|| std::env::var_os(name));
    let (config, _) = Config::from_lookup(look_up);
    let options = Options {
        direct: config.paths.direct,
        relay: config.paths.relay,
        ..route::options(&config)
    };
    let owner = Assignment::from(config.owner);
    let options = owner.options(options, &source.model);
    let us = |from, to| {
        let asked = Asked {
            from,
            to,
            bytes: ask.bytes as u64,
            window: u32::try_from(ask.window).ok()?,
            is_both_ways: ask.kind == Kind::Bibw,
            owner,
        };
        Some(asked.plan(source, &options).ok()?.predicted_us)
    };
    match ask.kind {
        Kind::Latency => Some((us(0, 1)? + us(1, 0)?) / 2.0),
        Kind::Bw => us(0, 1),
        Kind::Bibw => Some(us(0, 1)?.max(us(1, 0)?)),
        _ => None,
    }
}

/// Predictions for rows and configurations.
pub struct Predictions {
    /// By what.
    node: String,
    /// By row, then by configuration.
    us: Vec<Vec<Option<f64>>>,
}

/// A prediction, and what became of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Predicted {
    /// By the plan: for a whole window, of both directions the slower.
    pub predicted_us: f64,
    /// The median of the launches, without the acknowledgement.
    pub took_us: f64,
    /// By which part of the measured bandwidth the predicted one is above it.
    pub error: f64,
}

impl Predicted {
    /// Its three columns.
    fn cells(predicted: Option<Predicted>) -> [String; 3] {
        predicted.map_or(["-", "-", "-"].map(str::to_owned), |it| {
            let error = format!("{:+.1}%", 100.0 * it.error);
            [figure(it.predicted_us), figure(it.took_us), error]
        })
    }
}

impl Predictions {
    /// The plans for a node between whose first two GPUs messages go.
    pub fn new(source: &Source, rows: &[What], settings: &[Setting]) -> Predictions {
        let of = |what: &What| {
            let us = |setting| match what {
                What::Bench(ask) => predict(source, setting, ask),
                What::Jacobi(_) => None,
            };
            settings.iter().map(us).collect()
        };
        Predictions {
            node: source.topology.name.clone(),
            us: rows.iter().map(of).collect(),
        }
    }

    /// A prediction of a row beside its figure; `None` without one of them.
    pub fn of(&self, results: &Results, row: usize, setting: usize) -> Option<Predicted> {
        let predicted_us = self.us[row][setting]?;
        let value = median(&results.cells[row][setting].launches)?;
        let What::Bench(ask) = &results.rows[row] else {
            return None;
        };
        #[allow(clippy::cast_precision_loss)]
        let bytes = (ask.bytes * ask.window) as f64;
        let took_us = match ask.kind {
            Kind::Latency => value,
            Kind::Bibw => 2.0 * bytes / value,
            _ => bytes / value - acknowledgement_us(results, setting)?,
        };
        let error = took_us / predicted_us - 1.0;
        (took_us > 0.0).then_some(Predicted {
            predicted_us,
            took_us,
            error,
        })
    }

    /// A table of all, and how far they are off on average.
    pub fn text(&self, results: &Results) -> String {
        let mut text = format!(
            "\n== predicted by what is known of {}: us of each window, without what acknowledges it, and by how much of the bandwidth that is too much\n",
            self.node
        );
        let with = || {
            let settings = results.settings.iter().enumerate();
            settings.filter(|(_, setting)| setting.preload)
        };
        let all = |row: usize| with().map(move |(setting, _)| self.of(results, row, setting));
        let rows: Vec<usize> = (0..results.rows.len())
            .filter(|row| all(*row).any(|predicted| predicted.is_some()))
            .collect();
        let title = |row: usize| results.rows[row].title();
        let header = with().flat_map(|(_, setting)| [&setting.name, "took", "error"]);
        let header = std::iter::once("size").chain(header).map(str::to_owned);
        let header: Vec<String> = header.collect();
        for rows in rows.chunk_by(|one, next| title(*one) == title(*next)) {
            let line = |row: &usize| {
                let size = format_size(results.rows[*row].bytes().unwrap_or(0) as u64);
                let cells = all(*row).flat_map(Predicted::cells);
                std::iter::once(size).chain(cells).collect()
            };
            let lines = std::iter::once(header.clone()).chain(rows.iter().map(line));
            let alignment = format!("<{}", ">".repeat(header.len() - 1));
            text += &format!("{}\n{}", title(rows[0]), table::text(&alignment, lines));
        }
        for (setting, of) in with() {
            let rows = 0..results.rows.len();
            let errors: Vec<f64> = rows
                .filter_map(|row| Some(self.of(results, row, setting)?.error))
                .collect();
            text += &format!("{}: {}\n", of.name, Errors::of(&errors));
        }
        text
    }
}

/// Half of the round trip of an acknowledgement.
fn acknowledgement_us(results: &Results, setting: usize) -> Option<f64> {
    let is_it = |what: &What| matches!(what, What::Bench(ask) if (ask.kind, ask.buffers, ask.bytes, ask.window) == ACKNOWLEDGEMENT);
    let row = results.rows.iter().position(is_it)?;
    median(&results.cells[row][setting].launches)
}

/// How far predictions are off.
struct Errors {
    count: usize,
    mean: f64,
    worst: f64,
    signed: f64,
}

impl Errors {
    fn of(errors: &[f64]) -> Errors {
        #[allow(clippy::cast_precision_loss)]
        let count = errors.len().max(1) as f64;
        let absolute = || errors.iter().map(|error| error.abs());
        Errors {
            count: errors.len(),
            mean: absolute().sum::<f64>() / count,
            worst: absolute().fold(0.0, f64::max),
            signed: errors.iter().sum::<f64>() / count,
        }
    }
}

impl std::fmt::Display for Errors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} predictions, off by {:.1} % on average, {:.1} % at worst, {:+.1} % with sign",
            self.count,
            100.0 * self.mean,
            100.0 * self.worst,
            100.0 * self.signed
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::settings;
    use crate::topo::source;

    const MIB: usize = 1 << 20;

    fn ask(kind: Kind, bytes: usize, window: usize) -> What {
        What::Bench(Ask {
            row: 0,
            kind,
            buffers: [Place::D; 2],
            bytes,
            window,
            persistent: false,
            fixed: None,
        })
    }

    /// Rows of which each configuration had these figures.
    fn results(rows: Vec<What>, values: &[f64]) -> Results {
        let names = ["vanilla", "one", "host"].map(String::from);
        let settings = settings::choose(&names, &[], &[]).expect("known");
        let node = source::by_name("--predicted", "hgx-h200").expect("a node");
        let predictions = Predictions::new(&node, &rows, &settings);
        let mut results = Results::new(settings, 0, rows, false, Some(predictions));
        for (cells, value) in results.cells.iter_mut().zip(values) {
            cells
                .iter_mut()
                .for_each(|cell| cell.launches = vec![*value]);
        }
        results
    }

    #[test]
    fn what_is_taken_is_that_of_a_window_without_its_acknowledgement() {
        let (kind, _, bytes, window) = ACKNOWLEDGEMENT;
        let rows = vec![
            ask(kind, bytes, window),
            ask(Kind::Latency, 64 * MIB, 1),
            ask(Kind::Bw, 64 * MIB, 4),
            ask(Kind::Bibw, 64 * MIB, 4),
            ask(Kind::Bw, MIB, 4),
            ask(Kind::AllToAll, 64 * MIB, 4),
        ];
        let results = results(rows, &[8.0, 180.0, 400e3, 800e3, 300e3, 700e3]);
        let window_us = 4.0 * 64.0 * 1048576.0 / 400e3;
        let took = [180.0, window_us - 8.0, window_us];
        for (row, took) in (1..).zip(took) {
            let it = results.predicted(row, 1).expect("a plan");
            assert!((it.took_us - took).abs() < 1e-6, "{row}: {it:?}");
            assert!(
                (it.error - (took / it.predicted_us - 1.0)).abs() < 1e-9,
                "{row}: {it:?}"
            );
            assert_eq!(results.predicted(row, 0), None, "not by the library");
            let split = results.predicted(row, 2).expect("a plan").predicted_us;
            assert!(split < it.predicted_us, "{row}: {split}, {it:?}");
        }
        // Too short, and not between two ranks.
        assert_eq!([4, 5].map(|row| results.predicted(row, 1)), [None; 2]);
        let text = results.predictions.as_ref().expect("some").text(&results);
        assert!(text.contains("\none: 3 predictions, off by"), "{text}");
    }

    #[test]
    fn who_has_no_round_trip_of_an_acknowledgement_does_not_know_what_a_window_took() {
        let results = results(vec![ask(Kind::Bw, 64 * MIB, 4)], &[400e3]);
        assert_eq!(results.predicted(0, 1), None);
    }

    #[test]
    fn errors_count_by_what_they_are_and_by_their_sign() {
        let text = Errors::of(&[0.02, -0.04]).to_string();
        assert_eq!(
            text,
            "2 predictions, off by 3.0 % on average, 4.0 % at worst, -1.0 % with sign"
        );
    }
}
