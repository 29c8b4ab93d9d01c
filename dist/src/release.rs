//! What is released: version, commit, date, and for which machine.

use anyhow::{bail, Context, Error, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// A machine that packages are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// x86-64.
    X86_64,
    /// 64-bit Arm.
    Aarch64,
}

impl Machine {
    /// From the first part of a target triple.
    pub fn parse(text: &str) -> Result<Machine> {
        match text.split('-').next() {
            Some("x86_64") => Ok(Machine::X86_64),
            Some("aarch64") => Ok(Machine::Aarch64),
            _ => bail!("--target {text}: packages are made for x86_64 and aarch64"),
        }
    }

    /// As the kernel and RPM name it.
    pub fn name(self) -> &'static str {
        match self {
            Machine::X86_64 => "x86_64",
            Machine::Aarch64 => "aarch64",
        }
    }

    /// As Debian names it.
    pub fn debian(self) -> &'static str {
        match self {
            Machine::X86_64 => "amd64",
            Machine::Aarch64 => "arm64",
        }
    }

    /// Rust's target.
    pub fn target(self) -> String {
        format!("{}-unknown-linux-gnu", self.name())
    }

    /// The folder below `lib` that Debian has for its libraries.
    pub fn multiarch(self) -> String {
        format!("{}-linux-gnu", self.name())
    }
}

/// One release for one machine.
#[derive(Clone, Debug)]
pub struct Release {
    /// Root of the repository.
    pub root: PathBuf,
    /// For which machine.
    pub machine: Machine,
    /// As in `0.1.0`.
    pub version: String,
    /// The commit, with `-dirty` behind it if files differ from it.
    pub commit: String,
    /// Time of the commit, in seconds since 1970: the time of every file in every package.
    pub epoch: u32,
    /// The day of this version's section in the changelog.
    pub date: String,
}

impl Release {
    /// The release of the sources below `root`.
    pub fn find(root: &Path, machine: Machine) -> Result<Release> {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let changelog = fs::read_to_string(root.join("CHANGELOG.md")).context("CHANGELOG.md")?;
        let date = day(&changelog, &version).with_context(|| {
            format!("CHANGELOG.md has no section \"## {version} - YYYY-MM-DD\": add it")
        })?;
        let (commit, epoch) = xtask::commit::of(root).map_err(Error::msg)?;
        Ok(Release {
            root: root.to_path_buf(),
            machine,
            version,
            commit,
            epoch,
            date,
        })
    }

    /// What the command says of its build, behind version and commit.
    pub fn build(&self, rustc: &str) -> String {
        let (major, minor) = crate::symbols::GLIBC;
        format!(
            "{}, glibc {major}.{minor}, rustc {rustc}",
            self.machine.target()
        )
    }
}

/// The day of a version's section.
fn day(changelog: &str, version: &str) -> Option<String> {
    let title = format!("\n## {version} - ");
    let (_, rest) = changelog.split_once(&title)?;
    let day = rest.lines().next()?;
    let is_day = day.len() == 10 && day.split('-').all(|part| part.parse::<u16>().is_ok());
    is_day.then(|| day.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_section_of_a_version_is_dated() {
        let log = "# Changelog\n\n## Unreleased\n\n- b\n\n## 0.2.0 - 2026-12-24\n\n### Added\n- a\n\n## 0.1.0 - soon\n";
        assert_eq!(day(log, "0.2.0").as_deref(), Some("2026-12-24"));
        assert_eq!(day(log, "0.1.0"), None, "no day");
        assert_eq!(day(log, "0.3.0"), None, "no section");
    }

    #[test]
    fn machines_have_the_names_of_their_packages() {
        let machine = Machine::parse("aarch64-unknown-linux-gnu").expect("known");
        assert_eq!((machine.debian(), machine.name()), ("arm64", "aarch64"));
        let refused = Machine::parse("riscv64").expect_err("unknown").to_string();
        assert!(refused.contains("riscv64") && refused.contains("x86_64 and aarch64"));
    }
}
