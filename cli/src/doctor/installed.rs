//! The MPI that is installed here, where no program was given that would say with which one it is linked.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anabranch_engine::mpi::Family;
use serde::Serialize;

use super::child;
use super::program::{abi_name, Mpi};
use super::tools::{self, Tool};
use crate::elf::Elf;
use crate::run::launcher::{self, identify};
use crate::run::program::in_path;

/// Where a launcher's installation has its libraries, Intel MPI's in the last one.
const PLACES: [&str; 4] = ["lib", "lib64", "lib/{arch}-linux-gnu", "lib/release"];

/// What was found.
#[derive(Serialize, Default)]
pub struct Installed {
    /// The first launcher in `PATH`.
    pub launcher: Option<PathBuf>,
    /// The library of its installation.
    pub mpi: Option<Mpi>,
    /// Tools that are preloaded.
    pub tools: Vec<Tool>,
    /// Why no more is known.
    pub note: Option<String>,
}

/// Looks for a launcher, asks it what it is, and looks for the library beside it.
pub fn examine(limit: Duration) -> Installed {
    let mut installed = Installed {
        tools: tools::preloaded(),
        ..Installed::default()
    };
    installed.note = installed.look(limit).err();
    installed
}

impl Installed {
    fn look(&mut self, limit: Duration) -> Result<(), String> {
        let found = launcher::IN_PATH.iter().find_map(in_path);
        let launcher = found.ok_or("no mpirun or mpiexec: load the MPI's module, or give ./app")?;
        self.launcher = Some(launcher.clone());
        let mut command = Command::new(&launcher);
        command.arg("--version").env_remove("LD_PRELOAD");
        let said = child::run(command, limit);
        let family = match identify(&said.stdout) {
            Some((launcher::Family::OpenMpi, _)) => Family::OpenMpi,
            Some((launcher::Family::Mpich, _)) => Family::Mpich,
            _ if !said.succeeded() => return Err(format!("--version: {}", said.reason())),
            _ => return Err("not a launcher of an MPI that is known: give ./app".into()),
        };
        self.mpi = library_of(&launcher, family);
        match self.mpi {
            Some(_) => Ok(()),
            None => Err(format!(
                "a launcher of the {} family, but no library of it in {}: give ./app",
                abi_name(family),
                PLACES[..2].join(" or ")
            )),
        }
    }
}

/// The MPI library in the installation of a launcher, by its own name or by that of the file that it is a link to.
fn library_of(launcher: &Path, family: Family) -> Option<Mpi> {
    let names: &[&str] = match family {
        Family::OpenMpi => &["libmpi.so.40"],
        Family::Mpich => &["libmpi.so.12", "libmpich.so.12"],
        Family::Standard => &["libmpi_abi.so.1"],
    };
    let resolved = launcher.canonicalize().ok();
    let bases = [Some(launcher), resolved.as_deref()];
    let folders = bases
        .into_iter()
        .flatten()
        .filter_map(|path| path.parent()?.parent())
        .flat_map(|base| {
            PLACES.map(|place| base.join(place.replace("{arch}", std::env::consts::ARCH)))
        });
    let suits = |path: &PathBuf| Elf::read(path).is_ok_and(|elf| elf.is_native());
    let (name, path) = folders
        .flat_map(|folder| names.iter().map(move |name| (*name, folder.join(name))))
        .find(|(_, path)| suits(path))?;
    Some(Mpi {
        soname: name.to_owned(),
        path: Some(path),
        abi: Some(abi_name(family)),
        family: Some(family),
    })
}
