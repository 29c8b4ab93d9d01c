//! The files of a package, in memory: sorted by path, with fixed modes, without owners or times of their own.

use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// A file or a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Its bytes, and whether it may be executed.
    File(Vec<u8>, bool),
    /// Where it points to.
    Link(String),
}

impl Entry {
    /// 755 or 644.
    pub fn mode(&self) -> u16 {
        match self {
            Entry::File(_, false) => 0o644,
            Entry::File(_, true) => 0o755,
            Entry::Link(_) => 0o777,
        }
    }
}

/// Files by their path, without a slash in front.
#[derive(Clone, Debug, Default)]
pub struct Tree(BTreeMap<String, Entry>);

impl Tree {
    /// Adds a text or other data.
    pub fn add(&mut self, path: impl Into<String>, bytes: impl Into<Vec<u8>>) {
        self.0.insert(path.into(), Entry::File(bytes.into(), false));
    }

    /// Adds a copy of a file that may be executed, or a library.
    pub fn add_program(
        &mut self,
        path: impl Into<String>,
        from: &Path,
        executable: bool,
    ) -> Result<()> {
        let bytes = fs::read(from).with_context(|| from.display().to_string())?;
        self.0.insert(path.into(), Entry::File(bytes, executable));
        Ok(())
    }

    /// Adds a copy of a file.
    pub fn add_copy(&mut self, path: impl Into<String>, from: &Path) -> Result<()> {
        self.add_program(path, from, false)
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: impl Into<String>, to: impl Into<String>) {
        self.0.insert(path.into(), Entry::Link(to.into()));
    }

    /// Adds all of another tree below a folder.
    pub fn graft(&mut self, folder: &str, other: Tree) {
        for (path, entry) in other.0 {
            self.0.insert(format!("{folder}{path}"), entry);
        }
    }

    /// What there is, sorted.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.0.iter().map(|(path, entry)| (path.as_str(), entry))
    }

    /// All folders that the paths name, sorted, parents before children.
    pub fn folders(&self) -> BTreeSet<String> {
        let mut folders = BTreeSet::new();
        for path in self.0.keys() {
            let ends = path.match_indices('/').map(|(end, _)| end);
            folders.extend(ends.map(|end| path[..end].to_owned()));
        }
        folders
    }

    /// Bytes of all files.
    pub fn size(&self) -> u64 {
        let sizes = self.0.values().map(|entry| match entry {
            Entry::File(bytes, _) => bytes.len() as u64,
            Entry::Link(_) => 0,
        });
        sizes.sum()
    }
}
