//! What a Python would load: asked of that Python itself, in a child. The user's script is not run.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anabranch_engine::mpi::known_soname;
use serde::{Deserialize, Serialize};

use super::child;
use super::program::{abi_name, Mpi};

/// Loads mpi4py without MPI_Init, and says what it brought along.
const QUESTION: &str = r#"
import importlib.util, json, sys
said = {"version": sys.version.split()[0], "executable": sys.executable, "mpi4py": None, "problem": None}
packages = ("cupy", "torch", "numba", "jax", "tensorflow", "pycuda")
said["gpu_packages"] = [name for name in packages if importlib.util.find_spec(name)]
try:
    import mpi4py
    said["mpi4py"] = mpi4py.__version__
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI
except Exception as error:
    said["problem"] = f"{type(error).__name__}: {error}".splitlines()[0]
said["loaded"] = sorted({line.split()[-1] for line in open("/proc/self/maps") if ".so" in line})
print(json.dumps(said))
"#;

/// What was found out about a Python.
#[derive(Serialize, Deserialize, Default)]
pub struct Python {
    /// Its version.
    pub version: String,
    /// The file that really runs.
    pub executable: PathBuf,
    /// The version of mpi4py, if it is installed.
    pub mpi4py: Option<String>,
    /// Packages with arrays on GPUs.
    pub gpu_packages: Vec<String>,
    /// Why MPI cannot be loaded.
    #[serde(skip_serializing)]
    problem: Option<String>,
    #[serde(skip_serializing)]
    loaded: Vec<PathBuf>,
}

/// Asks a Python.
///
/// # Errors
/// It does not answer; a line that says why.
pub fn ask(python: &Path, limit: Duration) -> Result<Python, String> {
    let mut command = Command::new(python);
    command.args(["-c", QUESTION]).env_remove("LD_PRELOAD");
    let ended = child::run(command, limit);
    let last = ended.stdout.lines().last().unwrap_or_default();
    match serde_json::from_str(last) {
        Ok(found) if ended.succeeded() => Ok(found),
        _ => Err(format!("{}: {}", python.display(), ended.reason())),
    }
}

impl Python {
    /// The MPI library that mpi4py has loaded.
    pub fn mpi(&self) -> Option<Mpi> {
        self.loaded.iter().find_map(|path| {
            // Bindings for other languages have names like it.
            crate::run::launcher::Family::of_library(path)?;
            let name = path.file_name()?.to_string_lossy();
            // The file behind the link has a longer name: libmpi.so.40.30.4.
            let ends = name
                .match_indices('.')
                .map(|(at, _)| at)
                .chain([name.len()]);
            let (soname, family) = ends
                .filter_map(|end| known_soname(&name[..end]).map(|family| (&name[..end], family)))
                .next()?;
            Some(Mpi {
                soname: soname.to_owned(),
                path: Some(path.clone()),
                abi: Some(abi_name(family)),
                family: Some(family),
            })
        })
    }

    /// What is to be known of it.
    pub fn note(&self, python: &Path) -> Option<String> {
        let python = python.display();
        match (&self.mpi4py, &self.problem) {
            (None, _) => Some(format!(
                "{python} has no mpi4py: a script that loads MPI by other means is not seen here, so give doctor the MPI program itself if there is one"
            )),
            (Some(version), Some(why)) => Some(format!(
                "mpi4py {version} of {python} cannot load MPI ({why}): put the MPI library's folder into LD_LIBRARY_PATH"
            )),
            (Some(_), None) if self.gpu_packages.is_empty() => Some(format!(
                "{python} has none of CuPy, PyTorch, Numba and others with arrays on GPUs: messages from host memory stay with the MPI library"
            )),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_known_by_its_file() {
        let loaded = |name: &str| Python {
            loaded: vec!["/lib/libc.so.6".into(), format!("/mpi/{name}").into()],
            ..Python::default()
        };
        for (name, abi) in [
            ("libmpi.so.40.30.4", Some("Open MPI")),
            ("libmpi.so.12", Some("MPICH")),
            ("libmpi_abi.so.1.0", Some("MPI 5 standard")),
            ("libmpi_mpifh.so.40", None),
        ] {
            assert_eq!(loaded(name).mpi().and_then(|mpi| mpi.abi), abi, "{name}");
        }
    }
}
