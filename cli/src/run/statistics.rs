//! `anabranch run --stats FILE`: where the library's statistics go, and what they say.

use std::io::Write;
use std::path::{Path, PathBuf};

use anabranch_engine::stats::StatsTarget;

use crate::{report, Failure};

/// Where the nodes' statistics go.
pub struct Statistics {
    /// As ANABRANCH_STATS has it.
    pub name: PathBuf,
    /// A file for each rank that may be the lowest of its node.
    files: Vec<PathBuf>,
}

impl Statistics {
    /// What is there from another run goes.
    pub fn prepare(file: &Path, ranks: u32) -> anyhow::Result<Statistics> {
        let refused = |file: &Path, why: &dyn std::fmt::Display| {
            Failure::new(2, format!("--stats: {}: {why}", file.display()))
        };
        if file.to_string_lossy().ends_with('/') {
            return Err(refused(file, &"it is a folder: name a file").into());
        }
        // The ranks may run in another folder.
        let name = std::path::absolute(file)?;
        super::check_folder("--stats", &name)?;
        let target = StatsTarget::File(name.clone());
        let of_rank = |rank| match target.of_rank(rank) {
            StatsTarget::File(path) => path,
            StatsTarget::Off | StatsTarget::Stderr => name.clone(),
        };
        let mut files: Vec<PathBuf> = (0..ranks).map(of_rank).collect();
        files.dedup();
        for file in files.iter().filter(|file| file.is_file()) {
            std::fs::remove_file(file).map_err(|error| refused(file, &error))?;
        }
        Ok(Statistics { name, files })
    }

    /// Says on stderr what was counted.
    pub fn report(&self) {
        let there = self.files.iter().filter(|file| file.exists());
        let there: Vec<PathBuf> = there.cloned().collect();
        if there.is_empty() {
            crate::complain("--stats: no rank has counted anything: does the library take part, and do the ranks call MPI_Finalize? See `anabranch doctor`");
            return;
        }
        let (text, left_out) = report::text(&there);
        for line in left_out {
            crate::complain(&format!("--stats: {line}"));
        }
        let _ = std::io::stderr().lock().write_all(text.as_bytes());
    }
}
