//! Finds the program that is to run and the MPI library that it is linked with.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::launcher::Family;
use super::{Launcher, Program};
use crate::elf::Elf;
use crate::{preload, Failure};

/// The solver that comes with this project, built once for each MPI.
const BUNDLED: &str = "jacobi";

/// Finds `name` as a shell would, and beyond that the programs that come with this command.
///
/// # Errors
/// There is no such program, or none for the launcher.
pub fn find(name: &OsStr, launcher: Option<&Launcher>) -> Result<Program, Failure> {
    let path = Path::new(name);
    if name == "anabranch" {
        let own = std::env::current_exe().map_err(|error| Failure::new(126, error.to_string()))?;
        return Ok(Program {
            path: own,
            mpi: None,
        });
    }
    if path.components().count() > 1 {
        return if is_program(path) {
            Ok(with_mpi(path))
        } else {
            Err(missing(path))
        };
    }
    if let Some(found) = in_path(name) {
        return Ok(with_mpi(&found));
    }
    if name == BUNDLED {
        return bundled(launcher);
    }
    Err(Failure::new(
        127,
        format!(
            "{}: not found in PATH; give its path, as in ./app",
            path.display()
        ),
    ))
}

fn missing(path: &Path) -> Failure {
    match path.exists() {
        true => Failure::new(126, format!("{} is not an executable file", path.display())),
        false => Failure::new(127, format!("{}: no such file", path.display())),
    }
}

/// The build of the solver that suits the launcher, or any build for which there is a launcher.
fn bundled(launcher: Option<&Launcher>) -> Result<Program, Failure> {
    let folder = preload::command_folder()?;
    let builds = builds_in(&folder);
    let suits = |program: &Program| match launcher {
        Some(launcher) => launcher.runs(program),
        None => Launcher::for_program(program).is_ok(),
    };
    let count = builds.len();
    builds.into_iter().find(suits).ok_or_else(|| {
        let what = if count == 0 {
            "no build of it lies"
        } else {
            "no build of it for this MPI lies"
        };
        Failure::new(
            127,
            format!(
                "{BUNDLED}: {what} in {}; run cargo xtask build --release",
                folder.display()
            ),
        )
    })
}

fn builds_in(folder: &Path) -> Vec<Program> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("jacobi-"))
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_none() && is_program(path))
        .collect();
    // The system's own Open MPI first: the shortest name.
    paths.sort_by_key(|path| {
        (
            path.as_os_str().len() > folder.as_os_str().len() + "/jacobi-openmpi".len(),
            std::cmp::Reverse(path.clone()),
        )
    });
    paths
        .iter()
        .map(|path| with_mpi(path))
        .filter(|program| program.mpi.is_some())
        .collect()
}

fn with_mpi(path: &Path) -> Program {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    let mpi = linked_mpi(&path);
    Program { path, mpi }
}

/// The MPI library that the dynamic loader would pick. The loader itself is asked, with the
/// program as its argument: the program is not started.
fn linked_mpi(path: &Path) -> Option<PathBuf> {
    let loader = Elf::read(path).ok()?.interpreter?;
    let listing = Command::new(loader)
        .arg("--list")
        .arg(path)
        .stderr(Stdio::null())
        .output()
        .ok()?;
    mpi_in_listing(&String::from_utf8_lossy(&listing.stdout))
}

/// Picks the MPI library out of lines like `libmpi.so.40 => /usr/lib/libmpi.so.40 (0x…)`.
fn mpi_in_listing(listing: &str) -> Option<PathBuf> {
    listing.lines().find_map(|line| {
        let (name, rest) = line.trim().split_once(" => ")?;
        Family::of_library(Path::new(name))?;
        let path = rest.split(" (0x").next()?;
        path.starts_with('/').then(|| PathBuf::from(path))
    })
}

/// First program of this name in `PATH`.
pub fn in_path(name: impl AsRef<OsStr>) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join(name.as_ref()))
        .find(|file| is_program(file))
}

/// Whether this is a file that may be executed.
pub fn is_program(path: &Path) -> bool {
    std::fs::metadata(path)
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mpi_library_is_read_from_the_loaders_list() {
        let listing = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibm.so.6 => /lib/libm.so.6 (0x01)\n\
            \tlibmpi.so.40 => /opt/a b/lib/libmpi.so.40 (0x02)\n\t/lib64/ld-linux-x86-64.so.2 (0x03)\n";
        assert_eq!(
            mpi_in_listing(listing),
            Some(PathBuf::from("/opt/a b/lib/libmpi.so.40"))
        );
        assert_eq!(mpi_in_listing("\tlibmpi.so.12 => not found\n"), None);
        assert_eq!(mpi_in_listing("\tstatically linked\n"), None);
    }

    #[test]
    fn programs_are_found_as_a_shell_does() {
        assert!(find(OsStr::new("sh"), None)
            .is_ok_and(|program| program.mpi.is_none() && program.path.is_absolute()));
        assert_eq!(
            find(OsStr::new("/no/such"), None)
                .err()
                .map(|failure| failure.status),
            Some(127)
        );
        assert_eq!(
            find(OsStr::new("/etc/passwd"), None)
                .err()
                .map(|failure| failure.status),
            Some(126)
        );
        assert_eq!(
            find(OsStr::new("no-such-program"), None)
                .err()
                .map(|failure| failure.status),
            Some(127)
        );
    }
}
