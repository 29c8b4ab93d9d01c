//! Tools over MPI's profiling interface: profilers, tracers, checkers.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::elf::profiling;
use crate::preload::entries;

/// A tool over MPI's profiling interface.
#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
pub struct Tool {
    /// What it is called, where that is known.
    pub name: Option<&'static str>,
    /// Where it is.
    pub path: PathBuf,
    /// It is preloaded; if not, the program is linked with it.
    pub is_preloaded: bool,
    /// It goes on by `PMPI_X`.
    pub uses_pmpi: bool,
}

/// How the libraries of tools that are in use begin, and what the tools are called.
const KNOWN: [(&str, &str); 17] = [
    ("libscorep", "Score-P"),
    ("libmpiP", "mpiP"),
    ("libTAU", "TAU"),
    ("libtau", "TAU"),
    ("libipm", "IPM"),
    ("libdarshan", "Darshan"),
    ("libpnmpi", "PnMPI"),
    ("libmust", "MUST"),
    ("libmpitrace", "Extrae"),
    ("libcudampitrace", "Extrae"),
    ("libVT", "Intel Trace Collector"),
    ("libmap-sampler-pmpi", "Linaro MAP"),
    ("liballinea", "Linaro MAP"),
    ("libhpcrun", "HPCToolkit"),
    ("libcaliper", "Caliper"),
    ("libeztrace", "EZTrace"),
    ("libperfstubs", "PerfStubs"),
];

/// What the tool in this file is called.
pub fn name(path: &Path) -> Option<&'static str> {
    let file = path.file_name()?.to_str()?;
    let known = KNOWN.iter().find(|(begin, _)| file.starts_with(begin));
    known.map(|(_, name)| *name)
}

/// Those that are preloaded.
pub fn preloaded() -> Vec<Tool> {
    let list = std::env::var_os("LD_PRELOAD").unwrap_or_default();
    let mut tools = Vec::new();
    add(&mut tools, entries(&list).map(PathBuf::from), true);
    tools
}

/// Adds those of these files that wrap MPI functions.
pub fn add(tools: &mut Vec<Tool>, files: impl Iterator<Item = PathBuf>, is_preloaded: bool) {
    for path in files {
        if tools.iter().any(|tool| tool.path == path) {
            continue;
        }
        if let Some(found) = profiling(&path).ok().filter(|found| found.wraps) {
            tools.push(Tool {
                name: name(&path),
                path,
                is_preloaded,
                uses_pmpi: found.uses_pmpi,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_in_use_have_names() {
        let named = |file: &str| name(Path::new(file));
        assert_eq!(
            named("/opt/scorep/lib/libscorep_adapter_mpi_event.so.9"),
            Some("Score-P")
        );
        assert_eq!(named("/usr/lib/libmpiP.so"), Some("mpiP"));
        assert_eq!(named("/usr/lib/libmpi.so.40"), None);
        assert_eq!(named("libmine.so"), None);
    }
}
