//! `--json[=FILE|-]`, which means the same in every command.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use crate::{output, Failure};

/// Where JSON goes, if it is wanted.
#[derive(Args, Clone, Debug, Default)]
pub struct Json {
    /// Write JSON: to stdout in place of the text, or to a file beside the text
    #[arg(
        id = "json",
        long = "json",
        value_name = "FILE|-",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "-",
        overrides_with = "json"
    )]
    file: Option<PathBuf>,
}

impl Json {
    /// The file, where it is one.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref().filter(|file| *file != Path::new("-"))
    }

    /// Whether stdout is for JSON alone.
    pub fn is_alone(&self) -> bool {
        self.file.as_deref() == Some(Path::new("-"))
    }

    /// Whether it can be written; tried before a measurement, not after it.
    ///
    /// # Errors
    /// It cannot.
    pub fn try_out(&self) -> Result<(), Failure> {
        match self.file() {
            Some(file) => std::fs::write(file, "").map_err(|error| refused(file, &error)),
            None => Ok(()),
        }
    }

    /// Writes a value, if JSON is wanted.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, value: &impl Serialize) -> anyhow::Result<()> {
        if self.file.is_none() {
            return Ok(());
        }
        let text = serde_json::to_string_pretty(value)? + "\n";
        match self.file() {
            Some(file) => Ok(std::fs::write(file, text).map_err(|error| refused(file, &error))?),
            None => Ok(output::text(&text)?),
        }
    }
}

fn refused(file: &Path, error: &io::Error) -> Failure {
    let file = file.display();
    Failure::new(
        2,
        format!("--json={file}: {error}; name a file that can be written"),
    )
}

/// Commands in which `--json FILE` was written before `--json=FILE`.
const FORMER: [&str; 5] = ["bench", "compare", "doctor", "trace", "report"];

/// `--json out.json` and `--json -` as they were written formerly. Only what can mean nothing else is read so: a file of
/// statistics that is there is one for `report` to read.
pub fn with_equals(words: Vec<OsString>) -> Vec<OsString> {
    let command = words.get(1).and_then(|word| word.to_str());
    let command = command.unwrap_or("").to_owned();
    if !FORMER.contains(&command.as_str()) {
        return words;
    }
    let is_report = command == "report";
    let is_file = |word: &OsString| {
        let path = Path::new(word);
        path.extension().is_some_and(|ending| ending == "json") && !(is_report && path.exists())
    };
    let mut joined: Vec<OsString> = Vec::new();
    let mut rest = words.into_iter().enumerate().peekable();
    let mut is_programs = false;
    while let Some((at, mut word)) = rest.next() {
        let before = joined.last().and_then(|word| word.to_str());
        // What follows the name of a program is its own.
        let takes_value = before.is_some_and(|word| ["--timeout", "--sim"].contains(&word));
        is_programs |= command == "doctor"
            && at > 1
            && !takes_value
            && !word.to_string_lossy().starts_with('-');
        let value = rest.next_if(|(_, next)| {
            word == "--json" && !is_programs && (next == "-" || is_file(next))
        });
        if let Some((_, value)) = value {
            word.push("=");
            word.push(value);
        }
        joined.push(word);
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(text: &str) -> String {
        let words = text.split(' ').map(OsString::from).collect();
        let words: Vec<String> = with_equals(words)
            .into_iter()
            .map(|word| word.into_string().expect("UTF-8"))
            .collect();
        words.join(" ")
    }

    #[test]
    fn the_former_way_to_name_a_file_is_read() {
        for (words, expected) in [
            (
                "a compare --json o.json -r 1",
                "a compare --json=o.json -r 1",
            ),
            ("a doctor --json - ./app", "a doctor --json=- ./app"),
            // Never a program, nor what is the program's.
            ("a doctor --json ./app", "a doctor --json ./app"),
            (
                "a doctor ./app --json o.json",
                "a doctor ./app --json o.json",
            ),
            (
                "a doctor --timeout 3 --json o.json",
                "a doctor --timeout 3 --json=o.json",
            ),
            (
                "a report s.x --json none.json",
                "a report s.x --json=none.json",
            ),
            ("a config --json -", "a config --json -"),
        ] {
            assert_eq!(joined(words), expected);
        }
        let folder = tempfile::tempdir().expect("a folder");
        let there = folder.path().join("there.json");
        std::fs::write(&there, "{}").expect("written");
        let words = format!("a report --json {}", there.display());
        assert_eq!(joined(&words), words);
    }
}
