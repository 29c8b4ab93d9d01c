//! A simulated node for one run: its driver's folder, its variables, and what it leaves behind.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use tempfile::TempDir;

use crate::topo::file::{names, unknown};
use crate::{preload, Failure};

/// Where the simulated driver may lie, from the folder of the command.
const PLACES: &[&str] = &[
    "simcuda",
    "../lib/anabranch/simcuda",
    "../lib64/anabranch/simcuda",
];

/// One simulated node. What it left in shared memory is removed when this is dropped.
pub struct Simulation {
    /// The topology as the user named it.
    pub name: OsString,
    /// The folder that holds the simulated `libcuda.so.1`.
    pub folder: PathBuf,
    /// Holds the folder where it was made for this run.
    _links: Option<TempDir>,
    topology: OsString,
    job: String,
    /// How many of its GPUs are there, where not all.
    pub gpus: Option<u32>,
}

impl Simulation {
    /// A node of its own with this topology, of which the first `gpus` GPUs are there.
    ///
    /// # Errors
    /// The simulated driver is not installed.
    pub fn prepare(name: &OsStr, gpus: Option<u32>) -> Result<Simulation, Failure> {
        let own = preload::command_folder()?;
        let driver = |folder: &PathBuf| folder.join("libcuda.so.1").exists();
        let folder = PLACES
            .iter()
            .map(|place| own.join(place))
            .find(driver)
            .ok_or_else(|| missing(&own))?;
        let folder = folder.canonicalize().unwrap_or(folder);
        if preload::is_noexec(&folder) {
            let text = format!(
                "--sim: {} is on a file system that is mounted noexec, from which nothing is loaded; install Anabranch elsewhere",
                folder.display()
            );
            return Err(Failure::new(126, text));
        }
        let (folder, links) = with_links(folder)?;
        let file = Path::new(name);
        let text = name.to_string_lossy();
        if !file.exists() && !names().contains(&&*text) {
            let why = unknown(&text, "no such topology or file");
            return Err(Failure::new(2, format!("--sim {text}: {why}")));
        }
        let topology = if file.is_file() {
            std::path::absolute(file).map_or_else(|_| name.into(), Into::into)
        } else {
            name.into()
        };
        // Nobody else's node: processes of two runs must never share devices.
        let since = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let job = format!("run-{}-{:x}", std::process::id(), since.as_nanos());
        Ok(Simulation {
            name: name.into(),
            folder,
            _links: links,
            topology,
            job,
            gpus,
        })
    }

    /// The variables that every rank needs.
    pub fn variables(&self) -> Vec<(String, OsString)> {
        let mut variables = vec![
            ("SIMCUDA_TOPOLOGY".to_owned(), self.topology.clone()),
            ("SIMCUDA_JOB".to_owned(), self.job.clone().into()),
        ];
        if let Some(gpus) = self.gpus {
            variables.push(("SIMCUDA_GPUS".to_owned(), gpus.to_string().into()));
        }
        variables
    }
}

/// The simulated driver is not where this command lies, in a build tree or an installation.
fn missing(own: &Path) -> Failure {
    // Where an installation has it, and where a build.
    let is_installed = own.file_name().is_some_and(|name| name == "bin");
    let (file, remedy) = match is_installed {
        true => (
            own.with_file_name("lib/anabranch/simcuda/libcuda.so.1"),
            "install it there: the package anabranch brings it; or copy the folder simcuda of a build to that place",
        ),
        false => (own.join("simcuda/libcuda.so.1"), "run cargo xtask build"),
    };
    Failure::new(
        127,
        format!(
            "--sim: the simulated driver {} is missing; {remedy}",
            file.display()
        ),
    )
}

/// The names by which programs ask for a driver.
const NAMES: [&str; 3] = ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"];

/// The driver under all its names: the folder itself, or one of links where it came without them, as in a Python wheel. They
/// are links to one file, so that no process loads two drivers.
fn with_links(folder: PathBuf) -> Result<(PathBuf, Option<TempDir>), Failure> {
    if NAMES.iter().all(|name| folder.join(name).exists()) {
        return Ok((folder, None));
    }
    let driver = folder.join(NAMES[0]);
    let make = || {
        let links = tempfile::Builder::new()
            .prefix("anabranch-sim-")
            .tempdir()?;
        for name in NAMES {
            std::os::unix::fs::symlink(&driver, links.path().join(name))?;
        }
        Ok(links)
    };
    let made: std::io::Result<TempDir> = make();
    let links = made.map_err(|error| {
        let text = format!("--sim: no links to {} can be made in {}: {error}; set TMPDIR to a folder that can be written", driver.display(), std::env::temp_dir().display());
        Failure::new(126, text)
    })?;
    Ok((links.path().to_path_buf(), Some(links)))
}

impl Drop for Simulation {
    /// Removes the node's file if ranks were killed before the last could: nobody else uses its name.
    fn drop(&mut self) {
        let ending = format!("-{:016x}", fnv1a(format!("named {}", self.job).as_bytes()));
        for folder in [PathBuf::from("/dev/shm"), std::env::temp_dir()] {
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                let name = entry.file_name();
                let name = name.to_string_lossy();
                if name.starts_with("simcuda-") && name.ends_with(&ending) {
                    // A rank that is still dying may have removed it first.
                    let _ = std::fs::remove_file(entry.path());
                }
            }
        }
    }
}

/// FNV-1a, 64 bits, by which the simulated driver turns the name of a job that was named into that of a file.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_without_links_gets_them_for_one_run() {
        let installed = tempfile::tempdir().expect("a folder");
        std::fs::write(installed.path().join("libcuda.so.1"), "").expect("written");
        let (folder, links) = with_links(installed.path().to_path_buf()).expect("links");
        assert!(links.is_some() && folder != installed.path());
        for name in NAMES {
            let file = folder
                .join(name)
                .canonicalize()
                .expect("a link that leads somewhere");
            assert_eq!(
                file,
                installed
                    .path()
                    .join("libcuda.so.1")
                    .canonicalize()
                    .expect("a path")
            );
        }
        drop(links);
        assert!(!folder.exists());
        for name in &NAMES[1..] {
            std::fs::write(installed.path().join(name), "").expect("written");
        }
        let (folder, links) = with_links(installed.path().to_path_buf()).expect("links");
        assert!(links.is_none() && folder == installed.path());
    }

    #[test]
    fn the_hash_is_fnv1a() {
        // From the test vectors of the FNV authors (draft-eastlake-fnv).
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }
}
