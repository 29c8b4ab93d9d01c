//! Which launcher starts the ranks of an MPI program, and how it wants to be told things.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::program::{in_path, is_program};
use super::Program;
use crate::{preload, Failure};

/// Families of launchers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Open MPI's mpirun.
    OpenMpi,
    /// Hydra, as in MPICH, Intel MPI and MVAPICH.
    Mpich,
    /// The binary interface of the MPI standard, which several libraries offer.
    Standard,
}

impl Family {
    /// The family by the name of the MPI library; `None` if it is no MPI library that we know.
    pub fn of_library(path: &Path) -> Option<Family> {
        let name = path.file_name()?.to_str()?;
        let is = |known: &str| {
            name.strip_prefix(known)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        if is("libmpi.so.40") {
            Some(Family::OpenMpi)
        } else if is("libmpi.so.12") || is("libmpich.so.12") {
            Some(Family::Mpich)
        } else if is("libmpi_abi.so.1") {
            Some(Family::Standard)
        } else {
            None
        }
    }

    fn name(self) -> &'static str {
        match self {
            Family::OpenMpi => "Open MPI",
            Family::Mpich => "MPICH",
            Family::Standard => "the MPI standard's binary interface",
        }
    }

    /// Names under which launchers of this family are installed, the most specific first.
    fn launchers(self) -> &'static [&'static str] {
        match self {
            Family::OpenMpi => &["mpirun.openmpi", "mpirun", "mpiexec"],
            Family::Mpich => &["mpirun.mpich", "mpiexec.hydra", "mpiexec", "mpirun"],
            Family::Standard => &[
                "mpiexec",
                "mpirun",
                "mpiexec.hydra",
                "mpirun.mpich",
                "mpirun.openmpi",
            ],
        }
    }
}

/// Names of launchers of any family, in the order in which they are looked for in `PATH`.
pub const IN_PATH: [&str; 6] = [
    "mpirun",
    "mpiexec",
    "mpirun.openmpi",
    "mpirun.mpich",
    "mpiexec.hydra",
    "prterun",
];

/// What `--mpi` takes.
const CHOICES: &str = "openmpi, mpich, the name of a launcher in PATH (as mpiexec.hydra), the path of one, or the folder in which \
    the MPI is installed";

/// Why there is no launcher, with the exit status that a shell would give it.
type Absent = (u8, String);

/// A launcher on this machine.
#[derive(Clone, Debug)]
pub struct Launcher {
    /// The launcher itself.
    pub path: PathBuf,
    family: Family,
    major: u32,
}

impl Launcher {
    /// The launcher that `--mpi` names: by its MPI, by its own name in `PATH`, or by a path.
    ///
    /// # Errors
    /// There is none, or it is none of an MPI that this command knows how to start.
    pub fn named(wanted: &OsStr) -> Result<Launcher, Failure> {
        let text = wanted.to_string_lossy();
        let found = match text.as_ref() {
            _ if text.contains('/') => at_path(Path::new(wanted)),
            "openmpi" => in_path_of(Family::OpenMpi),
            "mpich" => in_path_of(Family::Mpich),
            _ => match in_path(wanted) {
                Some(path) => Launcher::at(path.clone()).ok_or_else(|| unknown(&path)),
                // The build notes for each MPI library that it used where that library lies.
                None => match noted_prefix(&text) {
                    Some(prefix) => at_path(&prefix),
                    None => Err((127, "no program of this name in PATH".into())),
                },
            },
        };
        found.map_err(|(status, why)| {
            Failure::new(
                status,
                format!("--mpi {text}: no launcher found: {why}; give {CHOICES}"),
            )
        })
    }

    /// The launcher of the MPI that a program is linked with, else the one in `PATH`.
    ///
    /// # Errors
    /// There is none.
    pub fn for_program(program: &Program) -> Result<Launcher, Failure> {
        let Some((library, family)) = program.mpi.as_deref().zip(program.family()) else {
            return IN_PATH
                .iter()
                .find_map(|name| in_path(name).and_then(Launcher::at))
                .ok_or_else(|| {
                    Failure::new(
                        127,
                        "no mpirun or mpiexec in PATH; install one, or use --mpi PATH",
                    )
                });
        };
        beside_library(library, family).or_else(|| of_family(family)).ok_or_else(|| {
            Failure::new(
                127,
                format!(
                    "{} uses {}, but no launcher of {} was found beside that library or in PATH; use --mpi PATH",
                    program.path.display(),
                    library.display(),
                    family.name()
                ),
            )
        })
    }

    /// Refuses a launcher under which every rank of the program would believe to be alone.
    ///
    /// # Errors
    /// The program is linked with an MPI of another family.
    pub fn checked_against(self, program: &Program) -> Result<Launcher, Failure> {
        match (&program.mpi, program.family()) {
            (Some(library), Some(family)) if family != Family::Standard && family != self.family => Err(Failure::new(
                2,
                format!(
                    "{} is linked with {} ({}), but {} is a launcher of {}; leave --mpi out or build the program for it",
                    program.path.display(),
                    library.display(),
                    family.name(),
                    self.path.display(),
                    self.family.name()
                ),
            )),
            _ => Ok(self),
        }
    }

    /// Whether this launcher lies beside the MPI library that the program is linked with, or is
    /// the system's launcher of its family.
    pub fn runs(&self, program: &Program) -> bool {
        Launcher::for_program(program).is_ok_and(|suited| same_installation(&suited, self))
    }

    /// The launcher as a command without arguments.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        // Open MPI takes an absolute name for the wish to use the installation that it implies on
        // every node (--prefix), so one that is found by its bare name goes by that.
        if let Some(name) = self.path.file_name() {
            if in_path(name).is_some_and(|found| same_path(&found, &self.path)) {
                command.arg0(name);
            }
        }
        command
    }

    /// Adds what the launcher needs to start `ranks` ranks on this machine with the named
    /// variables of its own environment.
    pub fn add_options(&self, command: &mut Command, ranks: u32, variables: &[String]) {
        if self.family != Family::OpenMpi {
            return; // Hydra hands its whole environment on and starts as many ranks as asked.
        }
        // Open MPI counts cores, which are half of what the kernel counts where each has two threads.
        let cores = std::thread::available_parallelism().map_or(1, usize::from) / 2;
        if ranks as usize > cores {
            if self.major >= 5 {
                command.args(["--map-by", ":OVERSUBSCRIBE"]);
            } else {
                command.arg("--oversubscribe");
            }
        }
        if rustix::process::geteuid().is_root() {
            // Version 5 asks for both: mpirun reads the one, the prterun that it becomes the other.
            for prefix in ["OMPI", "PRTE"] {
                command.env(format!("{prefix}_ALLOW_RUN_AS_ROOT"), "1");
                command.env(format!("{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM"), "1");
            }
        }
        for name in variables {
            command.args(["-x", name]);
        }
    }

    /// The launcher at a path, if that is what it says it is.
    fn at(path: PathBuf) -> Option<Launcher> {
        let output = Command::new(&path)
            .arg("--version")
            .stdin(Stdio::null())
            .output()
            .ok()?;
        let said = identify(&String::from_utf8_lossy(&output.stdout));
        let (family, major) = said.or_else(|| identify_by_name(&path))?;
        Some(Launcher {
            path,
            family,
            major,
        })
    }
}

/// Family and major version from what a launcher prints for `--version`.
pub fn identify(text: &str) -> Option<(Family, u32)> {
    // Debian's Open MPI 4 calls itself by the name of its run-time layer.
    let open_mpi = ["(Open MPI) ", "(OpenRTE) "]
        .iter()
        .find_map(|mark| text.split(mark).nth(1));
    if let Some(version) = open_mpi {
        return Some((
            Family::OpenMpi,
            version.split('.').next()?.trim().parse().ok()?,
        ));
    }
    // What Open MPI 5 launches with has versions of its own.
    if text.contains("(PRRTE) ") {
        return Some((Family::OpenMpi, PRRTE_MAJOR));
    }
    let hydra = ["HYDRA", "Intel(R) MPI", "mvapich", "MVAPICH"]
        .iter()
        .any(|mark| text.contains(mark));
    hydra.then_some((Family::Mpich, 0))
}

/// The version of Open MPI from which on it launches with PRRTE.
const PRRTE_MAJOR: u32 = 5;

/// PRRTE reads what it says for `--version` from a file, which it does not find where its installation was moved.
fn identify_by_name(path: &Path) -> Option<(Family, u32)> {
    let is_prrte = path.file_name()? == "prterun";
    is_prrte.then_some((Family::OpenMpi, PRRTE_MAJOR))
}

/// A program that is no launcher of an MPI that is known.
fn unknown(path: &Path) -> Absent {
    let name = path.file_name().unwrap_or(path.as_os_str());
    (
        126,
        format!(
            "{} does not say for --version that it is of Open MPI or of the MPICH family (any launcher can start the ranks itself: \
             {} ... anabranch exec ./app)",
            path.display(),
            name.to_string_lossy()
        ),
    )
}

fn in_path_of(family: Family) -> Result<Launcher, Absent> {
    of_family(family).ok_or_else(|| {
        let names = family.launchers().join(", ");
        let name = family.name();
        (
            127,
            format!("{names}: none in PATH is of {name} (install it, or load its module)"),
        )
    })
}

fn of_family(family: Family) -> Option<Launcher> {
    let mut found = family
        .launchers()
        .iter()
        .filter_map(|name| in_path(name).and_then(Launcher::at));
    found.find(|launcher| family == Family::Standard || launcher.family == family)
}

/// The path of the launcher that lies in the installation of this library.
pub fn beside(library: &Path) -> Option<PathBuf> {
    let family = Family::of_library(library)?;
    Some(beside_library(library, family)?.path)
}

/// The launcher in the installation that the library belongs to: in a `bin` beside one of the
/// folders above it.
fn beside_library(library: &Path, family: Family) -> Option<Launcher> {
    let resolved = library.canonicalize().ok();
    let folders = [Some(library), resolved.as_deref()]
        .into_iter()
        .flatten()
        .flat_map(|path| path.ancestors().skip(2));
    let found = folders
        .flat_map(|folder| {
            family
                .launchers()
                .iter()
                .map(move |name| folder.join("bin").join(name))
        })
        .filter(|path| is_program(path))
        .filter_map(Launcher::at)
        .find(|launcher| family == Family::Standard || launcher.family == family);
    found
}

/// The launcher at this path, or in the installation in this folder.
fn at_path(path: &Path) -> Result<Launcher, Absent> {
    if is_program(path) {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        return Launcher::at(path.clone()).ok_or_else(|| unknown(&path));
    }
    if !path.is_dir() {
        return Err(if path.exists() {
            (126, "not an executable file".into())
        } else {
            (127, "no such file or folder".into())
        });
    }
    let programs: Vec<PathBuf> = ["bin", ""]
        .iter()
        .flat_map(|folder| IN_PATH.map(|name| path.join(folder).join(name)))
        .filter(|file| is_program(file))
        .collect();
    let Some(first) = programs.first() else {
        let names = IN_PATH.join(", ");
        return Err((127, format!("{names}: none in this folder or its bin")));
    };
    programs
        .iter()
        .find_map(|file| Launcher::at(file.clone()))
        .ok_or_else(|| unknown(first))
}

/// Where the build found the MPI library of this name.
fn noted_prefix(name: &str) -> Option<PathBuf> {
    let note = preload::command_folder()
        .ok()?
        .join(format!("jacobi-{name}.prefix"));
    std::fs::read_to_string(note)
        .ok()
        .map(|text| PathBuf::from(text.trim()))
}

fn same_path(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Launchers of one family in one folder are one installation's, by whatever names.
fn same_installation(a: &Launcher, b: &Launcher) -> bool {
    let folder = |launcher: &Launcher| {
        launcher
            .path
            .parent()
            .and_then(|path| path.canonicalize().ok())
    };
    a.family == b.family && folder(a).is_some() && folder(a) == folder(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_are_known_by_what_they_print() {
        for (text, expected) in [
            (
                "mpirun (Open MPI) 4.1.4\n\nReport bugs",
                Some((Family::OpenMpi, 4)),
            ),
            (
                "mpirun.openmpi (OpenRTE) 4.1.4\n",
                Some((Family::OpenMpi, 4)),
            ),
            ("mpirun (Open MPI) 5.0.11\n", Some((Family::OpenMpi, 5))),
            ("prterun (PRRTE) 3.0.14\n", Some((Family::OpenMpi, 5))),
            (
                "HYDRA build details:\n    Version: 4.0.2\n",
                Some((Family::Mpich, 0)),
            ),
            (
                "Intel(R) MPI Library for Linux* OS\n",
                Some((Family::Mpich, 0)),
            ),
            ("GNU bash\n", None),
        ] {
            assert_eq!(identify(text), expected, "{text}");
        }
    }

    #[test]
    fn libraries_are_known_by_their_soname() {
        for (name, expected) in [
            ("/usr/lib/libmpi.so.40", Some(Family::OpenMpi)),
            ("libmpi.so.40.30.4", Some(Family::OpenMpi)),
            ("libmpi.so.12", Some(Family::Mpich)),
            ("libmpich.so.12.2.2", Some(Family::Mpich)),
            ("libmpi_abi.so.1", Some(Family::Standard)),
            ("libmpi.so.400", None),
            ("libmpi_mpifh.so.40", None),
            ("libc.so.6", None),
        ] {
            assert_eq!(Family::of_library(Path::new(name)), expected, "{name}");
        }
    }
}
