//! The library that would be preloaded.

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use super::child;
use crate::elf::{self, Elf};
use crate::preload;

/// What was found out about `libanabranch.so`.
#[derive(Serialize, Default)]
pub struct Library {
    /// Where it is.
    pub path: Option<PathBuf>,
    /// The version that it gives itself.
    pub version: Option<String>,
    /// The version of this command.
    pub command_version: String,
    /// The newest version of the C library that it needs.
    pub needs_glibc: Option<String>,
    /// The version of the C library here.
    pub has_glibc: Option<String>,
    /// Why it cannot be used.
    pub problem: Option<String>,
}

/// Looks at the library that `exec` and `run` would preload.
pub fn examine(wanted: Option<&std::path::Path>, limit: Duration) -> Library {
    let mut library = Library {
        command_version: env!("CARGO_PKG_VERSION").into(),
        has_glibc: Some(elf::own_glibc().to_string()),
        ..Library::default()
    };
    let path = match preload::find(wanted) {
        Ok(path) => path,
        Err(error) => {
            library.problem = Some(error.to_string());
            return library;
        }
    };
    library.path = Some(path.clone());
    let needed = match Elf::read(&path) {
        Ok(elf) => elf.glibc(),
        Err(why) => {
            library.problem = Some(format!("{}: {why}", path.display()));
            return library;
        }
    };
    library.needs_glibc = needed.map(|version| version.to_string());
    let mut command = child::probe(&["library"]);
    command.arg(&path);
    let ended = child::run(command, limit);
    if ended.succeeded() {
        library.version = Some(ended.stdout.trim().to_owned());
    } else {
        library.problem = Some(format!(
            "{} cannot be loaded: {}",
            path.display(),
            ended.reason()
        ));
    }
    library
}
