//! How much of the host memory's rate messages plan to use together.

/// A part of that rate, in steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    any(test, feature = "golden"),
    derive(serde::Serialize, serde::Deserialize)
)]
pub struct HostPart(u8);

impl HostPart {
    const STEP: f64 = 0.05;
    const LEAST: f64 = 0.5;
    const COUNT: u8 = 27;

    /// All that was measured.
    pub const ALL: HostPart = HostPart(10);
    /// There is no larger part, whatever was measured.
    pub const MOST: HostPart = HostPart(HostPart::COUNT - 1);
    const MOST_OF_IT: HostPart = HostPart(5);

    /// The part with which messages in windows so deep plan at first. A chunk that comes late in a window
    /// holds up the messages behind it, while the first and last chunks of a single message meet nobody. Two
    /// H200s, whose host carries 79 GB/s each way, both directions, times one path: windows of 16 of 256 MiB
    /// 1.104 with 0.77 of it, 1.106 with 0.85 (a round in three 0.98), 0.97 with 0.98; single ones 1.065 with
    /// 0.85, 1.09 with 0.98, 1.11 with 1.06.
    #[must_use]
    pub fn at_first(window: u32) -> HostPart {
        if window > 1 {
            HostPart::MOST_OF_IT
        } else {
            HostPart::ALL
        }
    }

    /// The part as a factor of the measured rate. It exceeds all of that rate where less was measured than
    /// there is, as with one GPU alone.
    #[must_use]
    pub fn factor(self) -> f64 {
        HostPart::LEAST + HostPart::STEP * f64::from(self.0)
    }

    /// One step more, if there is one.
    #[must_use]
    pub fn more(self) -> Option<HostPart> {
        (self.0 + 1 < HostPart::COUNT).then(|| HostPart(self.0 + 1))
    }

    /// One step less, if there is one.
    #[must_use]
    pub fn less(self) -> Option<HostPart> {
        self.0.checked_sub(1).map(HostPart)
    }

    /// All parts.
    pub(crate) fn every() -> impl Iterator<Item = HostPart> {
        (0..HostPart::COUNT).map(HostPart)
    }

    /// Which of [`HostPart::every`] it is.
    pub(crate) fn number(self) -> usize {
        usize::from(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_steps() {
        assert!((HostPart::ALL.factor() - 1.0).abs() < 1e-9);
        assert!((HostPart::at_first(16).factor() - 0.75).abs() < 1e-9);
        assert!(HostPart::at_first(1) == HostPart::ALL);
        let all: Vec<HostPart> = HostPart::every().collect();
        assert!(all.iter().enumerate().all(|(at, part)| part.number() == at));
        assert!(all
            .windows(2)
            .all(|two| two[0].more() == Some(two[1]) && two[1].less() == Some(two[0])));
        assert!(all[0].less().is_none() && all[all.len() - 1].more().is_none());
        assert!((all[all.len() - 1].factor() - 1.8).abs() < 1e-9);
    }
}
