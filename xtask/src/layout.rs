//! Where the build puts things.

use std::path::{Path, PathBuf};

/// The folder of one profile, and what lies in it after `cargo xtask build`.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Root of the repository.
    pub root: PathBuf,
    /// Cargo's target directory.
    pub target: PathBuf,
    /// Whether this is the release profile.
    pub release: bool,
}

impl Layout {
    /// The layout of the given profile. Cargo's target directory is taken from `CARGO_TARGET_DIR`, else `target`.
    pub fn new(release: bool) -> Layout {
        let root = repository_root();
        let target = match std::env::var_os("CARGO_TARGET_DIR") {
            Some(folder) if !folder.is_empty() => root.join(folder),
            _ => root.join("target"),
        };
        Layout {
            root,
            target,
            release,
        }
    }

    /// Name of the profile's folder: `release` or `debug`.
    pub fn profile(&self) -> &'static str {
        if self.release {
            "release"
        } else {
            "debug"
        }
    }

    /// The folder that holds everything of this profile.
    pub fn folder(&self) -> PathBuf {
        self.target.join(self.profile())
    }

    /// The preload library.
    pub fn library(&self) -> PathBuf {
        self.folder().join("libanabranch.so")
    }

    /// The library that tells the preload library of UCX's functions while a trace is made.
    pub fn ucx_library(&self) -> PathBuf {
        self.folder().join("libanabranch_ucx.so")
    }

    /// The `anabranch` command.
    pub fn command(&self) -> PathBuf {
        self.folder().join("anabranch")
    }

    /// The folder that holds the simulated driver under its real name, and nothing else.
    pub fn simcuda(&self) -> PathBuf {
        self.folder().join("simcuda")
    }

    /// The solver as built for the named MPI.
    pub fn jacobi(&self, mpi: &str) -> PathBuf {
        self.folder().join(format!("jacobi-{mpi}"))
    }

    /// Where the fingerprint of the sources that the layout was built from is kept.
    pub fn stamp(&self) -> PathBuf {
        self.folder().join("layout.stamp")
    }

    /// Cargo's target directory for the solver against the named MPI: the build script of the MPI binding is not
    /// rerun when the compiler wrapper changes, so each MPI has a directory of its own.
    pub fn solver_target(&self, mpi: &str) -> PathBuf {
        self.target.join(format!("mpi-{mpi}"))
    }

    /// Where `ci/setup` puts MPI libraries that come as Python wheels.
    pub fn wheels(&self) -> PathBuf {
        self.root.join("target").join("wheels")
    }
}

/// Root of the repository: the parent of this package's folder.
pub fn repository_root() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package).to_path_buf()
}
