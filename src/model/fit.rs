//! Fits a line to measured times.

use super::{Line, BYTES_PER_US};

/// Fits `alpha + bytes / beta` to `(bytes, microseconds)` by least squares of the relative error, so that
/// small and large sizes count alike. `None` if there are fewer than two sizes, or if time does not grow with
/// them.
#[must_use]
pub fn line(samples: &[(u64, f64)]) -> Option<Line> {
    let usable = |sample: &&(u64, f64)| sample.1.is_finite() && sample.1 > 0.0;
    let (mut w, mut wx, mut wy, mut wxx, mut wxy) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for &(bytes, us) in samples.iter().filter(usable) {
        let weight = 1.0 / (us * us);
        let x = bytes as f64;
        w += weight;
        wx += weight * x;
        wy += weight * us;
        wxx += weight * x * x;
        wxy += weight * x * us;
    }
    let spread = w * wxx - wx * wx;
    // Of one size there is nothing to fit; the bound is what rounding leaves of an exact zero.
    if spread <= w * wxx * 1e-9 {
        return None;
    }
    let us_per_byte = (w * wxy - wx * wy) / spread;
    if us_per_byte <= 0.0 {
        return None;
    }
    Some(Line {
        alpha_us: ((wy - us_per_byte * wx) / w).max(0.0),
        gb_s: 1.0 / (us_per_byte * BYTES_PER_US),
        spread: 0.0,
        batched_us: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_again() {
        let time = |bytes: u64| 6.5 + bytes as f64 / 48e3;
        let samples: Vec<_> = (18..27)
            .map(|shift| (1 << shift, time(1 << shift)))
            .collect();
        let found = line(&samples).expect("a line");
        assert!((found.alpha_us - 6.5).abs() < 1e-6, "{found:?}");
        assert!((found.gb_s - 48.0).abs() < 1e-6, "{found:?}");
    }

    /// Single copies of an H200, as measured: GB/s at sizes in MiB.
    #[test]
    fn measured_copies_of_an_h200_give_its_rate() {
        let measured = [
            (0.25, 33.0),
            (1.0, 107.0),
            (4.0, 235.0),
            (16.0, 329.0),
            (64.0, 378.0),
            (256.0, 392.0),
        ];
        let sample = |(mib, gb_s): (f64, f64)| {
            let bytes = mib * f64::from(1 << 20);
            (bytes as u64, bytes / gb_s / 1e3)
        };
        let found = line(&measured.map(sample)).expect("a line");
        assert!((found.gb_s / 396.0 - 1.0).abs() < 0.02, "{found:?}");
        assert!((6.0..8.5).contains(&found.alpha_us), "{found:?}");
    }

    #[test]
    fn what_is_no_line_is_refused() {
        for samples in [
            &[][..],
            &[(1024, 3.0)],
            &[(1024, 3.0), (1024, 4.0)],
            &[(1024, 9.0), (4096, 2.0)],
        ] {
            assert_eq!(line(samples), None, "{samples:?}");
        }
    }
}
