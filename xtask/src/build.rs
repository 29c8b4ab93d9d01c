//! `cargo xtask build`: one command that lays out everything a user or a test loads.

use crate::fingerprint;
use crate::layout::Layout;
use crate::lock::Lock;
use crate::mpi::{self, Mpi};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What to build.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Release profile.
    pub release: bool,
    /// Build the solver against these MPI libraries only; `None`: against each that is found.
    pub solver_for: Option<Vec<String>>,
    /// Say nothing but errors.
    pub quiet: bool,
}

/// The shell script that starts the solver built for the MPI library that launched it.
const LAUNCHER: &str = include_str!("jacobi-launcher.sh");

/// Builds and lays out. Returns the layout.
///
/// # Errors
/// A sentence that says which step failed.
pub fn build(options: &Options) -> Result<Layout, String> {
    let layout = Layout::new(options.release);
    // Taken before the build: a source edited meanwhile makes the result look stale, never fresh.
    let sources = fingerprint::of_sources(&layout.root)
        .map_err(|e| format!("cannot read the sources: {e}"))?;
    let mut command = cargo("build", &layout, options, &layout.target);
    for package in [
        "anabranch-preload",
        "anabranch-ucx",
        "anabranch-cli",
        "simcuda",
    ] {
        command.args(["--package", package]);
    }
    succeed(command, "cargo build")?;
    let simcuda = layout.simcuda();
    let driver = layout.folder().join("libsimcuda.so");
    install(&driver, &simcuda.join("libcuda.so.1"))?;
    // A link, not a copy: the two names must never load two drivers into one process.
    link("libcuda.so.1", &simcuda.join("libcuda.so"))?;
    // What tells of NVLinks, as the vendor's driver brings it along.
    link("libcuda.so.1", &simcuda.join("libnvidia-ml.so.1"))?;
    for mpi in mpi::find(&layout.wheels()) {
        let wanted = options
            .solver_for
            .as_ref()
            .is_none_or(|names| names.contains(&mpi.name));
        if wanted && mpi.has_solver() {
            solver(&layout, options, &mpi)?;
            write_stamp(
                &solver_stamp(&layout, &mpi.name),
                &[layout.jacobi(&mpi.name)],
                &sources,
            )?;
        }
    }
    write_script(&layout.folder().join("jacobi"), LAUNCHER)?;
    write_stamp(&layout.stamp(), &stamped(&layout), &sources)?;
    Ok(layout)
}

/// Builds the solver against one MPI library.
fn solver(layout: &Layout, options: &Options, mpi: &Mpi) -> Result<(), String> {
    let target = layout.solver_target(&mpi.name);
    if !target.join(layout.profile()).exists() {
        start_from_another(layout, &target)?;
    }
    let mut command = cargo("rustc", layout, options, &target);
    command
        .args(["--package", "anabranch-jacobi", "--bin", "jacobi"])
        .env("MPICC", &mpi.mpicc);
    if let Some(folder) = &mpi.library_folder {
        // For the solver alone: what it depends on is the same for every MPI library.
        command
            .arg("--")
            .arg(format!("-Clink-arg=-Wl,-rpath,{}", folder.display()));
    }
    succeed(
        command,
        &format!("cargo build of the solver for {}", mpi.name),
    )?;
    install(
        &target.join(layout.profile()).join("jacobi"),
        &layout.jacobi(&mpi.name),
    )?;
    // The launcher script tells two libraries of one family apart by where their launcher lies.
    let prefix = mpi
        .mpirun
        .parent()
        .and_then(Path::parent)
        .unwrap_or(Path::new("/"));
    let note = layout.folder().join(format!("jacobi-{}.prefix", mpi.name));
    write_if_changed(&note, format!("{}\n", prefix.display()).as_bytes())
}

/// Begins the folder of a solver as a copy of one that is there for another MPI library, without what knows that one: all
/// other packages are compiled once.
fn start_from_another(layout: &Layout, target: &Path) -> Result<(), String> {
    let others = mpi::KNOWN
        .iter()
        .map(|(name, _)| layout.solver_target(name));
    let Some(from) = others
        .map(|other| other.join(layout.profile()))
        .find(|other| other.exists())
    else {
        return Ok(());
    };
    let describe = |e: io::Error| format!("cannot make {}: {e}", target.display());
    fs::create_dir_all(target).map_err(describe)?;
    // Put in place when it is whole, and without the binding.
    let draft = target.join("draft");
    let _ = fs::remove_dir_all(&draft);
    fs::create_dir(&draft).map_err(describe)?;
    let mut copy = Command::new("cp");
    copy.arg("-a").arg(from).arg(&draft);
    succeed(copy, "the copy of a folder of the solver")?;
    let mut clean = Command::new(program());
    clean.current_dir(&layout.root);
    clean
        .args(["clean", "--quiet", "--package", "mpi-sys", "--target-dir"])
        .arg(&draft);
    if layout.release {
        clean.arg("--release");
    }
    succeed(clean, "cargo clean of the MPI binding")?;
    fs::rename(draft.join(layout.profile()), target.join(layout.profile())).map_err(describe)?;
    fs::remove_dir_all(&draft).map_err(describe)
}

/// Cargo, by which this was started.
pub fn program() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// A command of cargo's that builds.
fn cargo(verb: &str, layout: &Layout, options: &Options, target: &Path) -> Command {
    let mut command = Command::new(program());
    command
        .current_dir(&layout.root)
        .arg(verb)
        .arg("--target-dir")
        .arg(target);
    if options.quiet {
        command.arg("--quiet");
    }
    if options.release {
        command.arg("--release");
        // Debug builds go without: each commit would compile everything again.
        if let Ok((commit, _)) = crate::commit::of(&layout.root) {
            command.env("ANABRANCH_COMMIT", commit);
        }
    }
    // A build started from a test must not inherit what cargo set for the test's own package.
    for (name, _) in std::env::vars_os() {
        let name_text = name.to_string_lossy();
        if name_text.starts_with("CARGO_PKG_")
            || name_text.starts_with("CARGO_MANIFEST_")
            || name_text == "LD_PRELOAD"
        {
            command.env_remove(&name);
        }
    }
    command
}

fn succeed(mut command: Command, what: &str) -> Result<(), String> {
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(format!("{what} failed")),
        Err(e) => Err(format!(
            "cannot start {}: {e}",
            command.get_program().to_string_lossy()
        )),
    }
}

/// Copies a file into the layout, if it is not there already.
fn install(from: &Path, to: &Path) -> Result<(), String> {
    let copy = || -> io::Result<()> {
        let source = fs::metadata(from)?;
        if let Ok(there) = fs::metadata(to) {
            if there.len() == source.len() && there.modified()? >= source.modified()? {
                return Ok(());
            }
        }
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder)?;
        }
        // Renamed into place: a program that has the old file mapped keeps it.
        let fresh = to.with_extension("new");
        fs::copy(from, &fresh)?;
        fs::rename(&fresh, to)
    };
    copy().map_err(|e| format!("cannot copy {} to {}: {e}", from.display(), to.display()))
}

fn link(to: &str, at: &Path) -> Result<(), String> {
    if fs::read_link(at).is_ok_and(|there| there == Path::new(to)) {
        return Ok(());
    }
    let make = || -> io::Result<()> {
        if at.symlink_metadata().is_ok() {
            fs::remove_file(at)?;
        }
        std::os::unix::fs::symlink(to, at)
    };
    make().map_err(|e| format!("cannot link {} to {to}: {e}", at.display()))
}

fn write_if_changed(path: &Path, contents: &[u8]) -> Result<(), String> {
    if fs::read(path).is_ok_and(|there| there == contents) {
        return Ok(());
    }
    fs::write(path, contents).map_err(|e| format!("cannot write {}: {e}", path.display()))
}

fn write_script(path: &Path, contents: &str) -> Result<(), String> {
    write_if_changed(path, contents.as_bytes())?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .map_err(|e| format!("cannot write {}: {e}", path.display()))
}

/// The fingerprint of the sources, then the identity of each file that was built from them.
fn stamp_text(files: &[PathBuf], sources: &str) -> io::Result<String> {
    let mut text = format!("sources {sources}\n");
    for file in files {
        let about = fs::metadata(file)?;
        text += &format!(
            "{} {} {}.{:09}\n",
            file.display(),
            about.len(),
            about.mtime(),
            about.mtime_nsec()
        );
    }
    Ok(text)
}

fn write_stamp(stamp: &Path, files: &[PathBuf], sources: &str) -> Result<(), String> {
    let text =
        stamp_text(files, sources).map_err(|e| format!("cannot look at what was built: {e}"))?;
    write_if_changed(stamp, text.as_bytes())
}

fn matches_stamp(layout: &Layout, stamp: &Path, files: &[PathBuf]) -> bool {
    let current =
        fingerprint::of_sources(&layout.root).and_then(|sources| stamp_text(files, &sources));
    match (current, fs::read_to_string(stamp)) {
        (Ok(current), Ok(stamp)) => current == stamp,
        _ => false,
    }
}

fn stamped(layout: &Layout) -> [PathBuf; 4] {
    [
        layout.library(),
        layout.ucx_library(),
        layout.command(),
        layout.simcuda().join("libcuda.so.1"),
    ]
}

fn solver_stamp(layout: &Layout, mpi: &str) -> PathBuf {
    layout.folder().join(format!("jacobi-{mpi}.stamp"))
}

/// The lock under which tests build what they load: several test processes run at once.
///
/// # Errors
/// A sentence that names the lock file.
pub fn lock(layout: &Layout) -> Result<Lock, String> {
    let path = layout.target.join("test-build.lock");
    Lock::take(&path).map_err(|e| format!("cannot lock {}: {e}", path.display()))
}

/// The layout, built from the present sources: what tests load. The first process to ask builds, all others find it
/// fresh. The solver is left to [`build`]: few tests need it.
///
/// # Errors
/// A sentence that says which step failed, or that the sources change meanwhile: a stale library is never tested.
pub fn fresh_layout(release: bool) -> Result<Layout, String> {
    let layout = Layout::new(release);
    let _lock = lock(&layout)?;
    for _ in 0..2 {
        if is_fresh(&layout) {
            return Ok(layout);
        }
        build(&Options {
            release,
            quiet: true,
            solver_for: Some(Vec::new()),
        })?;
    }
    if is_fresh(&layout) {
        return Ok(layout);
    }
    Err("the sources change while the tests run: what was built is stale".into())
}

/// Whether the library, the command and the driver in the layout were built by [`build`] from the present sources.
pub fn is_fresh(layout: &Layout) -> bool {
    matches_stamp(layout, &layout.stamp(), &stamped(layout))
}

/// Whether the solver for the named MPI library was built by [`build`] from the present sources.
pub fn solver_is_fresh(layout: &Layout, mpi: &str) -> bool {
    matches_stamp(layout, &solver_stamp(layout, mpi), &[layout.jacobi(mpi)])
}
