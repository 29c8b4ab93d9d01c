//! The library that would be preloaded.

use std::ffi::CStr;
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use super::child;
use crate::elf::{Elf, GlibcVersion};
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
        has_glibc: own_glibc(),
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
    let has = library.has_glibc.as_deref().and_then(GlibcVersion::parse);
    if let Some(why) = too_old(needed, has) {
        library.problem = Some(why);
        return library;
    }
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

fn too_old(needed: Option<GlibcVersion>, has: Option<GlibcVersion>) -> Option<String> {
    let needed = needed?;
    match has {
        Some(has) if has >= needed => None,
        Some(has) => Some(format!(
            "the library needs glibc {needed}, here is {has}: build it on this machine, with cargo xtask build --release"
        )),
        None => Some(format!("the library needs glibc {needed}, here is another C library")),
    }
}

/// The version of glibc that this process runs with.
fn own_glibc() -> Option<String> {
    // SAFETY: takes nothing and returns a static string.
    let version = unsafe { CStr::from_ptr(libc::gnu_get_libc_version()) };
    Some(version.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_c_library_is_refused() {
        let version = GlibcVersion::parse;
        assert_eq!(too_old(version("2.34"), version("2.36")), None);
        assert_eq!(too_old(version("2.34"), version("2.34")), None);
        assert_eq!(too_old(None, version("2.17")), None);
        let why = too_old(version("2.34"), version("2.17")).expect("too old");
        assert!(why.contains("needs glibc 2.34, here is 2.17"), "{why}");
    }
}
