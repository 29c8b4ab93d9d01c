//! Where libanabranch.so lies, and how it gets into `LD_PRELOAD`.

use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::elf::{self, Elf};
use crate::Failure;

const LIBRARY: &str = "libanabranch.so";
/// Beside it: what tells it of UCX's functions. Only a trace needs it, and without it that lacks them.
const UCX_LIBRARY: &str = "libanabranch_ucx.so";

/// Where the library may lie, from the folder of the command: a build tree, an installation, a
/// distribution's private folder.
const PLACES: &[&str] = &[
    ".",
    "../lib",
    "../lib64",
    "../lib/anabranch",
    "../lib64/anabranch",
    DEBIAN,
];

/// Where Debian has libraries of this machine's kind.
const DEBIAN: &str = if cfg!(target_arch = "aarch64") {
    "../lib/aarch64-linux-gnu"
} else {
    "../lib/x86_64-linux-gnu"
};

/// What every build of the library exports, and nothing else does (`include/anabranch.h`).
const MARK: &str = "anabranch_version";

/// The constant in which the library keeps its version, for those who do not load it.
const RELEASE: &str = "anabranch_release";

/// The library to preload: `wanted` (the value of ANABRANCH_LIBRARY) or the one found beside this
/// command.
///
/// # Errors
/// If there is none, or if what is there cannot be preloaded, or is another library.
pub fn find(wanted: Option<&Path>) -> Result<PathBuf, Failure> {
    let (library, named, remedy) = match wanted {
        Some(path) => (
            path.to_path_buf(),
            format!("ANABRANCH_LIBRARY={}", path.display()),
            format!("unset it, or set it to a {LIBRARY}"),
        ),
        None => {
            let path = beside_command()?;
            let path = path.canonicalize().unwrap_or(path);
            let named = path.display().to_string();
            let remedy = "install the package anabranch again, or rebuild it with cargo xtask build --release".to_owned();
            (path, named, remedy)
        }
    };
    let bad = |status, why: &str| Failure::new(status, format!("{named}: {why}; {remedy}"));
    // Its links are followed, as ranks may not see what this process does.
    let library = match library.canonicalize() {
        Ok(path) => path,
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(bad(127, "no such file")),
        Err(error) => return Err(bad(126, &format!("cannot be reached ({error})"))),
    };
    if library
        .as_os_str()
        .as_bytes()
        .iter()
        .any(|byte| matches!(byte, b' ' | b':'))
    {
        return Err(Failure::new(
            126,
            format!("{named}: LD_PRELOAD cannot hold a path with a space or a colon; copy the library elsewhere and set ANABRANCH_LIBRARY"),
        ));
    }
    check(&library).map_err(|why| bad(126, &why))?;
    if wanted.is_none() {
        same_version(&library).map_err(|why| Failure::new(126, format!("{named}: {why}")))?;
    }
    Ok(library)
}

/// The library beside a command is the one that it was built with: what is left of another installation is not. A library that
/// ANABRANCH_LIBRARY names is the user's choice.
fn same_version(library: &Path) -> Result<(), String> {
    let own = env!("CARGO_PKG_VERSION");
    match elf::constant(library, RELEASE) {
        Ok(Some(version)) if version != own => Err(format!(
            "the library is version {version}, this command {own}: install both from one package, or set ANABRANCH_LIBRARY to a \
             library of version {own}"
        )),
        _ => Ok(()),
    }
}

/// Whether nothing may be loaded from the file system where a file lies.
pub fn is_noexec(file: &Path) -> bool {
    let mount = rustix::fs::statvfs(file);
    mount.is_ok_and(|mount| mount.f_flag.contains(rustix::fs::StatVfsMountFlags::NOEXEC))
}

/// Refuses what the dynamic loader would skip with a warning, and what it would load in place of the library: either leaves the
/// program without us. Nothing of the file is executed.
fn check(library: &Path) -> Result<(), String> {
    if library.is_dir() {
        let inside = library.join(LIBRARY);
        return Err(if inside.is_file() {
            format!("a folder, not the library in it, {}", inside.display())
        } else {
            format!("a folder, with no {LIBRARY} in it")
        });
    }
    let elf = Elf::read(library).map_err(|why| format!("not a shared library: {why}"))?;
    if !elf.is_native() {
        let (found, own) = (elf.kind(), Elf::own_kind());
        return Err(format!("built for another machine: {found}, not {own}"));
    }
    if !elf.is_dynamic {
        return Err("not a shared library: it has nothing for the dynamic loader".into());
    }
    if let Some(why) = elf::too_old(elf.glibc(), elf::own_glibc()) {
        return Err(why);
    }
    if is_noexec(library) {
        return Err("it lies on a file system that is mounted noexec, from which nothing is loaded; copy it elsewhere".into());
    }
    match elf::exports(library, MARK) {
        Ok(true) => Ok(()),
        Ok(false) => Err(format!(
            "another library or a program: it does not export {MARK}, as every {LIBRARY} does"
        )),
        Err(why) => Err(format!("not a shared library: {why}")),
    }
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

/// The libraries that a value of `LD_PRELOAD` names.
pub fn entries(value: &OsStr) -> impl Iterator<Item = &OsStr> {
    let entries = value.as_bytes().split(|byte| matches!(byte, b' ' | b':'));
    entries
        .filter(|entry| !entry.is_empty())
        .map(OsStr::from_bytes)
}

/// `LD_PRELOAD` with libraries behind what is there already: tools that wrap MPI functions are to be called first.
fn append(libraries: &[PathBuf], present: Option<&OsStr>) -> OsString {
    let present = entries(present.unwrap_or_default());
    let others = present.filter(|entry| !libraries.iter().any(|library| *entry == library));
    let all: Vec<&OsStr> = others
        .chain(libraries.iter().map(|library| library.as_os_str()))
        .collect();
    all.join(OsStr::new(":"))
}

/// Has a command preload the library, behind what is preloaded already, and search a folder for libraries
/// first. With a trace, UCX's functions are told to the library.
pub fn set_up(
    command: &mut Command,
    library: Option<&Path>,
    folder: Option<&Path>,
    has_trace: bool,
) {
    if let Some(library) = library {
        let ucx = library.with_file_name(UCX_LIBRARY);
        let ucx = (has_trace && ucx.is_file()).then_some(ucx);
        let libraries: Vec<PathBuf> = [library.to_path_buf()].into_iter().chain(ucx).collect();
        let present = std::env::var_os("LD_PRELOAD");
        command.env("LD_PRELOAD", append(&libraries, present.as_deref()));
    }
    if let Some(folder) = folder {
        command.env("LD_LIBRARY_PATH", prepend_folder(folder));
    }
}

/// `LD_LIBRARY_PATH` with a folder in front.
fn prepend_folder(folder: &Path) -> OsString {
    let mut list = OsString::from(folder);
    if let Some(present) = std::env::var_os("LD_LIBRARY_PATH").filter(|present| !present.is_empty())
    {
        list.push(":");
        list.push(present);
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_comes_last_and_once() {
        let one = ["/l/libanabranch.so"].map(PathBuf::from);
        let both = ["/l/libanabranch.so", "/l/b.so"].map(PathBuf::from);
        for (libraries, present, expected) in [
            (&one[..], None, "/l/libanabranch.so"),
            (&one, Some(""), "/l/libanabranch.so"),
            (&one, Some("/a.so"), "/a.so:/l/libanabranch.so"),
            (&one, Some("/a.so /b.so"), "/a.so:/b.so:/l/libanabranch.so"),
            (
                &one,
                Some("/l/libanabranch.so:/a.so"),
                "/a.so:/l/libanabranch.so",
            ),
            (
                &both,
                Some("/l/b.so:/a.so"),
                "/a.so:/l/libanabranch.so:/l/b.so",
            ),
        ] {
            let list = append(libraries, present.map(OsStr::new));
            assert_eq!(list, OsStr::new(expected));
        }
    }

    #[test]
    fn what_cannot_be_preloaded_is_refused_with_a_reason() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        let refused = |path: &Path, reason: &str| {
            let said = find(Some(path)).expect_err(reason).to_string();
            assert!(said.contains(reason), "{reason:?} is not in {said:?}");
            let named = format!("ANABRANCH_LIBRARY={}: ", path.display());
            assert!(said.starts_with(&named), "{said}");
            assert!(said.contains("set it to a libanabranch.so") || said.contains("space"));
        };
        std::fs::write(path("text.so"), "this is no library, it is a text").expect("written");
        refused(&path("text.so"), "not a shared library: not an ELF file");
        std::fs::write(path("empty.so"), "").expect("written");
        refused(&path("empty.so"), "not a shared library");
        let own = std::env::current_exe().expect("own");
        refused(&own, "another library or a program");
        std::fs::copy(&own, path("a b.so")).expect("copied");
        refused(&path("a b.so"), "space");
        refused(&path("none.so"), "no such file");
        refused(folder.path(), "a folder, with no libanabranch.so in it");
        std::fs::write(path("libanabranch.so"), "").expect("written");
        refused(folder.path(), "a folder, not the library in it");
        refused(Path::new("/dev/null"), "not a regular file");
        refused(&path("text.so").join("below"), "cannot be reached");

        // Of another machine: EM_AARCH64 or EM_X86_64, at byte 18 of every ELF file.
        let mut other = std::fs::read(&own).expect("read");
        other[18..20].copy_from_slice(if elf::own_machine() == 62 {
            &[183, 0]
        } else {
            &[62, 0]
        });
        std::fs::write(path("other.so"), other).expect("written");
        refused(&path("other.so"), "built for another machine: 64-bit ");
    }
}
