//! Where libanabranch.so lies, and how it gets into `LD_PRELOAD`.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::elf::Elf;
use crate::Failure;

const LIBRARY: &str = "libanabranch.so";

/// Where the library may lie, from the folder of the command: a build tree, an installation, a
/// distribution's private folder.
const PLACES: &[&str] = &[
    ".",
    "../lib",
    "../lib64",
    "../lib/anabranch",
    "../lib64/anabranch",
];

/// The library to preload: `wanted` (the value of ANABRANCH_LIBRARY) or the one found beside this
/// command.
///
/// # Errors
/// If there is none, or if what is there cannot be preloaded.
pub fn find(wanted: Option<&Path>) -> Result<PathBuf, Failure> {
    let library = match wanted {
        Some(path) if path.exists() => path.to_path_buf(),
        Some(path) => {
            return Err(Failure::new(
                127,
                format!(
                    "ANABRANCH_LIBRARY={}: no such file; unset it, or set it to a {LIBRARY}",
                    path.display()
                ),
            ))
        }
        None => beside_command()?,
    };
    let library = library.canonicalize().map_err(|error| {
        Failure::new(
            127,
            format!("cannot resolve {}: {error}", library.display()),
        )
    })?;
    check_loadable(&library)?;
    Ok(library)
}

fn beside_command() -> Result<PathBuf, Failure> {
    let folder = command_folder()?;
    PLACES.iter().map(|place| folder.join(place).join(LIBRARY)).find(|path| path.exists()).ok_or_else(|| {
        Failure::new(
            127,
            format!(
                "{LIBRARY} is not beside this command ({}), nor in ../lib or ../lib/anabranch; set ANABRANCH_LIBRARY to its path",
                folder.display()
            ),
        )
    })
}

/// The folder in which this command lies.
///
/// # Errors
/// If the kernel does not say.
pub fn command_folder() -> Result<PathBuf, Failure> {
    let own = std::env::current_exe().map_err(|error| {
        Failure::new(
            126,
            format!("cannot find the folder of this command: {error}"),
        )
    })?;
    Ok(own.parent().unwrap_or(Path::new("/")).to_path_buf())
}

/// Refuses what the dynamic loader would skip with a warning, leaving the program without us.
fn check_loadable(library: &Path) -> Result<(), Failure> {
    let bad = |why: &str| {
        Failure::new(
            126,
            format!("{} cannot be preloaded: {why}", library.display()),
        )
    };
    if library
        .as_os_str()
        .as_bytes()
        .iter()
        .any(|byte| matches!(byte, b' ' | b':'))
    {
        return Err(bad("LD_PRELOAD cannot hold a path with a space or a colon; copy the library elsewhere and set ANABRANCH_LIBRARY"));
    }
    let elf = Elf::read(library);
    if let Err(why) = File::open(library) {
        return Err(bad(&format!("it cannot be read ({why})")));
    }
    if !elf.is_ok_and(|elf| elf.is_native() && elf.is_dynamic) {
        return Err(bad("it is not a shared library of this kind of machine; rebuild it with cargo xtask build --release"));
    }
    Ok(())
}

/// The libraries that a value of `LD_PRELOAD` names.
pub fn entries(value: &OsStr) -> impl Iterator<Item = &OsStr> {
    let entries = value.as_bytes().split(|byte| matches!(byte, b' ' | b':'));
    entries
        .filter(|entry| !entry.is_empty())
        .map(OsStr::from_bytes)
}

/// `LD_PRELOAD` with the library behind what is there already: tools that wrap MPI functions are to be called first.
pub fn append(library: &Path, present: Option<&OsStr>) -> OsString {
    let mut list = OsString::new();
    for entry in entries(present.unwrap_or_default()).filter(|entry| *entry != library) {
        list.push(entry);
        list.push(":");
    }
    list.push(library);
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_comes_last_and_once() {
        let library = Path::new("/l/libanabranch.so");
        for (present, expected) in [
            (None, "/l/libanabranch.so"),
            (Some(""), "/l/libanabranch.so"),
            (Some("/a.so"), "/a.so:/l/libanabranch.so"),
            (Some("/a.so /b.so"), "/a.so:/b.so:/l/libanabranch.so"),
            (Some("/l/libanabranch.so:/a.so"), "/a.so:/l/libanabranch.so"),
        ] {
            assert_eq!(
                append(library, present.map(OsStr::new)),
                OsStr::new(expected)
            );
        }
    }

    #[test]
    fn what_cannot_be_preloaded_is_refused_with_a_reason() {
        let folder = tempfile::tempdir().expect("a folder");
        let text = folder.path().join("text.so");
        std::fs::write(&text, "this is no library, it is a text").expect("written");
        assert!(find(Some(&text))
            .expect_err("no ELF")
            .to_string()
            .contains("not a shared library"));
        let spaced = folder.path().join("a b.so");
        std::fs::copy(std::env::current_exe().expect("own"), &spaced).expect("copied");
        assert!(find(Some(&spaced))
            .expect_err("a space")
            .to_string()
            .contains("space"));
        let missing = folder.path().join("none.so");
        assert!(find(Some(&missing))
            .expect_err("missing")
            .to_string()
            .contains("no such file"));
    }
}
