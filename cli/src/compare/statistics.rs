//! Medians, spread, and when a difference is more than noise.

/// The distribution of a configuration's launches.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Spread {
    /// How many there are.
    pub launches: usize,
    /// The median.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// The lower quartile.
    pub q1: f64,
    /// The upper quartile.
    pub q3: f64,
}

/// The spread of some values; `None` if there are none.
pub fn spread(values: &[f64]) -> Option<Spread> {
    let at = |share: f64| quantile(values, share);
    Some(Spread {
        launches: values.len(),
        median: at(0.5)?,
        min: at(0.0)?,
        max: at(1.0)?,
        q1: at(0.25)?,
        q3: at(0.75)?,
    })
}

/// The value below which a share of all lies, interpolated between the two nearest.
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss
)]
pub fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = share * sorted.len().checked_sub(1)? as f64;
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    Some(sorted[below] + (sorted[above] - sorted[below]) * (place - place.floor()))
}

/// The median.
pub fn median(values: &[f64]) -> Option<f64> {
    quantile(values, 0.5)
}

/// The ratio below which something is slower than noise explains: `once` and `again` are launches of the same
/// configuration. It is the lower quartile of their ratios, each of them taken both ways round, or the ratio of their
/// medians where that is further from one.
pub fn floor(once: &[f64], again: &[f64]) -> Option<f64> {
    let ratios: Vec<f64> = once
        .iter()
        .zip(again)
        .flat_map(|(a, b)| [a / b, b / a])
        .collect();
    let medians = median(once)? / median(again)?;
    Some(
        quantile(&ratios, 0.25)?
            .min(medians)
            .min(1.0 / medians)
            .min(1.0),
    )
}

/// What each value is to its neighbour.
pub fn ratios(these: &[f64], those: &[f64]) -> Vec<f64> {
    these.iter().zip(those).map(|(a, b)| a / b).collect()
}

/// As [`floor`], of turns: `once` and `again` are neighbours. Many of them tell a smaller difference apart than each of them
/// shows, so it is the median of their ratios, or as far below one as that median may err (the notch of McGill, Tukey and
/// Larsen, "Variations of Box Plots", 1978: 1.57 quartile distances over the root of their number).
pub fn floor_of_turns(once: &[f64], again: &[f64]) -> Option<f64> {
    let ratios = ratios(once, again);
    let found = spread(&ratios)?;
    #[allow(clippy::cast_precision_loss)]
    let notch = 1.57 * (found.q3 - found.q1) / (ratios.len() as f64).sqrt();
    Some(found.median.min(1.0 / found.median).min(1.0 - notch))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_sorted_values() {
        let found = spread(&[5.0, 1.0, 2.0, 4.0, 3.0]).expect("values");
        let wanted = Spread {
            launches: 5,
            median: 3.0,
            min: 1.0,
            max: 5.0,
            q1: 2.0,
            q3: 4.0,
        };
        assert_eq!(found, wanted);
        assert_eq!(median(&[1.0, 2.0]), Some(1.5));
        assert_eq!(spread(&[]), None);
    }

    #[test]
    fn the_floor_is_what_the_same_differs_from_itself() {
        assert_eq!(floor(&[10.0, 10.0], &[10.0, 10.0]), Some(1.0));
        // Ratios 0.8, 1.25, 1, 1: the lower quartile lies a quarter of the way from 1 to 0.8.
        let found = floor(&[8.0, 10.0], &[10.0, 10.0]).expect("values");
        assert!((found - 0.9).abs() < 1e-9, "{found}");
        let found = floor(&[9.0, 9.0, 9.0], &[10.0, 10.0, 10.0]).expect("values");
        assert!((found - 0.9).abs() < 1e-9, "{found}");
        assert_eq!(floor(&[], &[]), None);
    }
}
