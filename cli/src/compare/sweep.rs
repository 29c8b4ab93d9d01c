//! The best of UCX's own settings: each is tried once on a few sizes, and every row takes what was fastest at the nearest.

use serde_json::{json, Value};

use super::launch::Launches;
use super::settings::{Setting, Variables};
use super::statistics::median;
use super::BenchRows;
use crate::bench::suite::Ask;
use crate::bench::Kind;
use crate::table;

/// Sizes that are tried, of those that are measured: the nearest.
const SIZES: [usize; 8] = [
    8,
    1 << 10,
    8 << 10,
    64 << 10,
    512 << 10,
    4 << 20,
    32 << 20,
    256 << 20,
];
/// What a setting must gain over UCX's own choice, lest noise make the choice.
const GAIN: f64 = 1.02;

/// What a sweep found.
pub struct Sweep {
    candidates: Vec<(String, Variables)>,
    tried: Vec<Ask>,
    /// By row tried, then by candidate.
    values: Vec<Vec<Option<f64>>>,
    /// Candidates that could not be run, and why.
    failed: Vec<String>,
}

impl Sweep {
    /// Tries every candidate; the first is the one to be beaten.
    pub fn run(
        launches: &mut Launches<'_>,
        candidates: Vec<(String, Variables)>,
        groups: &[BenchRows],
        mut progress: impl FnMut(&str),
    ) -> Sweep {
        let mut sweep = Sweep {
            candidates,
            tried: Vec::new(),
            values: Vec::new(),
            failed: Vec::new(),
        };
        for group in groups {
            let tried: Vec<Ask> = group
                .rows
                .iter()
                .filter(|ask| is_tried(ask, &group.rows))
                .cloned()
                .collect();
            let from = sweep.tried.len();
            sweep.tried.extend(tried.iter().cloned());
            sweep
                .values
                .resize(sweep.tried.len(), vec![None; sweep.candidates.len()]);
            for (index, (name, variables)) in sweep.candidates.clone().into_iter().enumerate() {
                progress(&format!("sweep: {name}"));
                let setting = Setting {
                    name,
                    preload: false,
                    variables,
                };
                match launches.suite(&setting, group.ranks, tried.clone(), &[], false) {
                    Ok((_, measured)) => {
                        for (offset, row) in measured.iter().enumerate() {
                            sweep.values[from + offset][index] = median(&row.values);
                        }
                    }
                    Err(error) => sweep.failed.push(format!("{}: {error:#}", setting.name)),
                }
            }
        }
        sweep
    }

    /// The candidate for a row.
    pub fn choose(&self, ask: &Ask) -> (&str, &Variables) {
        let alike = self
            .tried
            .iter()
            .enumerate()
            .filter(|(_, tried)| is_alike(tried, ask));
        let nearest = alike.min_by_key(|(_, tried)| distance(tried.bytes, ask.bytes));
        let best = nearest.map_or(0, |(row, _)| {
            best(&self.values[row], ask.kind == Kind::Latency)
        });
        let (name, variables) = &self.candidates[best];
        (name, variables)
    }

    /// What was tried and chosen, for people.
    pub fn text(&self) -> String {
        let mut text = String::from("\n== sweep of UCX's own settings; a setting is chosen where it is at least 2 % faster than UCX's own choice\n");
        let rows = self.candidates.iter().map(|(name, variables)| {
            let variables = variables.iter();
            let variables: Vec<String> = variables
                .map(|(name, value)| format!("{name}={value}"))
                .collect();
            [name.clone(), variables.join(" ")]
        });
        text += &table::text("", rows);
        for failed in &self.failed {
            text += &format!("not run: {failed}\n");
        }
        for (ask, values) in self.tried.iter().zip(&self.values) {
            let (chosen, _) = self.choose(ask);
            let figures: Vec<String> = self
                .candidates
                .iter()
                .zip(values)
                .filter_map(|((name, _), value)| value.map(|value| format!("{name} {value:.1}")))
                .collect();
            let [first, second] = ask.buffers;
            text += &format!(
                "{} {first:?}{second:?} W{} {}: {chosen} of {}\n",
                crate::bench::report::name(ask.kind),
                ask.window,
                ask.bytes,
                figures.join(", ")
            );
        }
        text
    }

    /// The same for programs.
    pub fn json(&self) -> Value {
        let rows = self.tried.iter().zip(&self.values).map(|(ask, values)| {
            let named = self.candidates.iter().zip(values);
            let named = named.map(|((name, _), value)| (name.clone(), json!(value)));
            json!({
                "bench": ask.kind, "buffers": ask.buffers, "bytes": ask.bytes, "window": ask.window,
                "chosen": self.choose(ask).0, "values": named.collect::<serde_json::Map<_, _>>(),
            })
        });
        let candidates = self.candidates.iter().cloned();
        json!({
            "candidates": candidates.collect::<std::collections::BTreeMap<_, _>>(),
            "rows": rows.collect::<Vec<_>>(),
            "failed": self.failed,
        })
    }
}

fn is_alike(a: &Ask, b: &Ask) -> bool {
    a.is_of_one_sweep(b)
}

/// Whether this row is the nearest to one of the sizes that are tried.
fn is_tried(ask: &Ask, rows: &[Ask]) -> bool {
    SIZES.iter().any(|size| {
        let alike = rows.iter().filter(|other| is_alike(other, ask));
        alike
            .min_by_key(|other| distance(other.bytes, *size))
            .is_some_and(|nearest| nearest == ask)
    })
}

/// How far two sizes are apart, in thousandths of a doubling.
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss
)]
fn distance(a: usize, b: usize) -> u64 {
    let log = |size: usize| (size.max(1) as f64).log2();
    ((log(a) - log(b)).abs() * 1000.0) as u64
}

/// The fastest candidate, or the first unless another gains enough.
fn best(values: &[Option<f64>], less_is_better: bool) -> usize {
    let speed = |value: f64| if less_is_better { 1.0 / value } else { value };
    let speeds = values
        .iter()
        .enumerate()
        .filter_map(|(index, value)| Some((index, speed((*value)?))));
    let fastest = speeds.max_by(|a, b| a.1.total_cmp(&b.1));
    match (fastest, values.first().copied().flatten()) {
        (Some((index, fast)), Some(own)) if fast >= GAIN * speed(own) => index,
        (Some((index, _)), None) => index,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::buffer::Place::D;

    #[test]
    fn noise_does_not_choose() {
        assert_eq!(best(&[Some(100.0), Some(101.0)], false), 0);
        assert_eq!(best(&[Some(100.0), Some(103.0), Some(110.0)], false), 2);
        assert_eq!(best(&[Some(100.0), Some(110.0)], true), 0);
        assert_eq!(best(&[Some(100.0), Some(90.0)], true), 1);
        assert_eq!(best(&[None, Some(90.0)], true), 1);
        assert_eq!(best(&[None, None], true), 0);
    }

    #[test]
    fn each_row_takes_the_choice_of_the_nearest_size_tried() {
        let ask = |bytes, window| Ask {
            row: 0,
            kind: Kind::Bw,
            buffers: [D, D],
            bytes,
            window,
            persistent: false,
            fixed: None,
        };
        let rows: Vec<Ask> = (0..11).map(|shift| ask(1 << shift, 1)).collect();
        let tried: Vec<Ask> = rows
            .iter()
            .filter(|ask| is_tried(ask, &rows))
            .cloned()
            .collect();
        assert_eq!(
            tried.iter().map(|ask| ask.bytes).collect::<Vec<_>>(),
            [8, 1024]
        );
        let none = Variables::new();
        let sweep = Sweep {
            candidates: vec![("own".into(), none.clone()), ("get".into(), none)],
            values: vec![vec![Some(1.0), Some(1.0)], vec![Some(1.0), Some(2.0)]],
            tried,
            failed: vec![],
        };
        assert_eq!(sweep.choose(&ask(16, 1)).0, "own");
        assert_eq!(sweep.choose(&ask(512, 1)).0, "get");
        assert_eq!(sweep.choose(&ask(512, 16)).0, "own");
    }
}
