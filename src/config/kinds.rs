//! The kinds of value that an option can take: how each is read, described and printed.

use std::path::PathBuf;

use crate::stats::StatsTarget;

/// A kind of value: its parser, what it accepts in words, and its printed form, which the parser
/// reads back.
pub trait Kind {
    /// The type that the option has in [`super::Config`].
    type Value;
    /// Reads a value; `None` if it is not accepted.
    fn parse(&self, text: &str) -> Option<Self::Value>;
    /// What is accepted, as the end of the sentence "it takes …".
    fn accepts(&self) -> String;
    /// The value in the notation that `parse` reads.
    fn show(&self, value: &Self::Value) -> String;
}

/// On or off.
pub struct Switch;

impl Kind for Switch {
    type Value = bool;
    fn parse(&self, text: &str) -> Option<bool> {
        match text.to_ascii_lowercase().as_str() {
            "on" | "1" | "yes" | "y" | "true" => Some(true),
            "off" | "0" | "no" | "n" | "false" => Some(false),
            _ => None,
        }
    }
    fn accepts(&self) -> String {
        "on or off".into()
    }
    fn show(&self, value: &bool) -> String {
        if *value { "on" } else { "off" }.into()
    }
}

/// A number of bytes between two bounds, both included.
pub struct Size {
    /// Smallest value accepted, in bytes.
    pub min: u64,
    /// Largest value accepted, in bytes.
    pub max: u64,
}

impl Kind for Size {
    type Value = u64;
    fn parse(&self, text: &str) -> Option<u64> {
        parse_size(text).filter(|bytes| (self.min..=self.max).contains(bytes))
    }
    fn accepts(&self) -> String {
        format!(
            "a size from {} to {} (K, M, G, T are powers of 1024)",
            format_size(self.min),
            format_size(self.max)
        )
    }
    fn show(&self, value: &u64) -> String {
        format_size(*value)
    }
}

/// A whole number between two bounds, both included.
pub struct Count {
    /// Smallest value accepted.
    pub min: u32,
    /// Largest value accepted.
    pub max: u32,
}

impl Kind for Count {
    type Value = u32;
    fn parse(&self, text: &str) -> Option<u32> {
        let count = parse_size(text).and_then(|count| u32::try_from(count).ok())?;
        (self.min..=self.max).contains(&count).then_some(count)
    }
    fn accepts(&self) -> String {
        format!("a number from {} to {}", self.min, self.max)
    }
    fn show(&self, value: &u32) -> String {
        value.to_string()
    }
}

/// One of a list of words.
pub struct Choice<T: 'static>(pub &'static [(&'static str, T)]);

impl<T: Copy + PartialEq> Kind for Choice<T> {
    type Value = T;
    fn parse(&self, text: &str) -> Option<T> {
        let word = text.to_ascii_lowercase();
        self.0
            .iter()
            .find(|(name, _)| *name == word)
            .map(|(_, value)| *value)
    }
    fn accepts(&self) -> String {
        self.0
            .iter()
            .map(|(name, _)| *name)
            .collect::<Vec<_>>()
            .join(", ")
    }
    fn show(&self, value: &T) -> String {
        self.0
            .iter()
            .find(|(_, known)| known == value)
            .map_or("?", |(name, _)| name)
            .into()
    }
}

/// Whether the MPI library may be handed device pointers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MpiCuda {
    /// Ask the library (`MPIX_Query_cuda_support`).
    Auto,
    /// It understands device pointers, whatever it says.
    Yes,
    /// It never sees a device pointer.
    No,
}

/// The words for [`MpiCuda`].
pub const MPI_CUDA: &[(&str, MpiCuda)] = &[
    ("auto", MpiCuda::Auto),
    ("yes", MpiCuda::Yes),
    ("no", MpiCuda::No),
];

/// Whether measurements are kept for the next run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// On a real node.
    Auto,
    /// On a simulated one, too.
    On,
    /// Nowhere.
    Off,
}

/// The words for [`Keep`].
pub const KEEP: &[(&str, Keep)] = &[("auto", Keep::Auto), ("on", Keep::On), ("off", Keep::Off)];

/// The words for a level of the log, from quiet to loud.
pub const LOG_LEVELS: &[(&str, log::LevelFilter)] = &[
    ("off", log::LevelFilter::Off),
    ("error", log::LevelFilter::Error),
    ("warn", log::LevelFilter::Warn),
    ("info", log::LevelFilter::Info),
    ("debug", log::LevelFilter::Debug),
    ("trace", log::LevelFilter::Trace),
];

/// Off, stderr, or a file name.
pub struct Statistics;

impl Kind for Statistics {
    type Value = StatsTarget;
    fn parse(&self, text: &str) -> Option<StatsTarget> {
        Some(match (text, Switch.parse(text)) {
            ("stderr", _) | (_, Some(true)) => StatsTarget::Stderr,
            (_, Some(false)) => StatsTarget::Off,
            // The program may change its directory before MPI_Finalize.
            _ => {
                StatsTarget::File(std::path::absolute(text).unwrap_or_else(|_| PathBuf::from(text)))
            }
        })
    }
    fn accepts(&self) -> String {
        "off, 1 (stderr), or a file name (%r in it: lowest rank of the node)".into()
    }
    fn show(&self, value: &StatsTarget) -> String {
        match value {
            StatsTarget::Off => "off".into(),
            StatsTarget::Stderr => "1".into(),
            StatsTarget::File(path) => path.display().to_string(),
        }
    }
}

/// A file, or nothing.
pub struct File;

impl Kind for File {
    type Value = Option<PathBuf>;
    fn parse(&self, text: &str) -> Option<Option<PathBuf>> {
        Some((!text.is_empty()).then(|| PathBuf::from(text)))
    }
    fn accepts(&self) -> String {
        "a file name".into()
    }
    fn show(&self, value: &Option<PathBuf>) -> String {
        value
            .as_ref()
            .map_or_else(String::new, |path| path.display().to_string())
    }
}

/// The name of an MPI function, or nothing.
pub struct Name;

impl Kind for Name {
    type Value = Option<String>;
    fn parse(&self, text: &str) -> Option<Option<String>> {
        let valid = text.is_empty() || text.starts_with("MPI_");
        valid.then(|| (!text.is_empty()).then(|| text.to_owned()))
    }
    fn accepts(&self) -> String {
        "the name of an MPI function".into()
    }
    fn show(&self, value: &Option<String>) -> String {
        value.clone().unwrap_or_default()
    }
}

/// Reads a number of bytes such as `0`, `16K`, `16KiB`, `2m`. The suffixes K, M, G and T are
/// powers of 1024, as in every tool of this field. `None` if it is no such number, or too large.
pub fn parse_size(text: &str) -> Option<u64> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    let shift = match suffix.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// The shortest form of a number of bytes that [`parse_size`] reads back exactly.
pub fn format_size(bytes: u64) -> String {
    for (shift, suffix) in [(40, "T"), (30, "G"), (20, "M"), (10, "K")] {
        let unit = 1u64 << shift;
        if bytes >= unit && bytes % unit == 0 {
            return format!("{}{suffix}", bytes >> shift);
        }
    }
    bytes.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_binary() {
        for (text, bytes) in [
            ("0", 0),
            ("7", 7),
            ("16K", 16384),
            ("16k", 16384),
            ("8MiB", 8388608),
            ("64G", 68719476736),
            ("2T", 2199023255552),
            ("5B", 5),
        ] {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
        }
        for text in [
            "",
            "K",
            "-1",
            "1.5M",
            "16 K",
            "16KK",
            "99999999999999999999",
            "99999999999999999T",
            "0x10",
        ] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }

    #[test]
    fn sizes_are_printed_exactly() {
        for (bytes, text) in [
            (0, "0"),
            (1023, "1023"),
            (1024, "1K"),
            (1025, "1025"),
            (1 << 20, "1M"),
            (3 << 29, "1536M"),
            (1 << 40, "1T"),
        ] {
            assert_eq!(format_size(bytes), text);
            assert_eq!(parse_size(text), Some(bytes));
        }
    }

    #[test]
    fn switches_take_the_usual_words() {
        for (text, value) in [
            ("on", true),
            ("ON", true),
            ("1", true),
            ("False", false),
            ("no", false),
        ] {
            assert_eq!(Switch.parse(text), Some(value));
        }
        assert_eq!(Switch.parse("maybe"), None);
    }

    #[test]
    fn statistics_take_a_switch_or_a_file() {
        assert_eq!(Statistics.parse("0"), Some(StatsTarget::Off));
        assert_eq!(
            StatsTarget::File("/x%r/s-%r.json".into()).of_rank(12),
            StatsTarget::File("/x%r/s-12.json".into())
        );
        assert_eq!(StatsTarget::Stderr.of_rank(12), StatsTarget::Stderr);
        assert_eq!(
            StatsTarget::File("/x/s.json".into()).of_spawned(7),
            StatsTarget::File("/x/s.json.spawned-7".into())
        );
        assert_eq!(Statistics.parse("stderr"), Some(StatsTarget::Stderr));
        assert_eq!(
            Statistics.parse("/x/y"),
            Some(StatsTarget::File("/x/y".into()))
        );
        let Some(StatsTarget::File(path)) = Statistics.parse("s.json") else {
            panic!("not a file")
        };
        assert!(path.is_absolute() && path.ends_with("s.json"));
    }
}
