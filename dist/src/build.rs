//! The build of what is packed: by `cargo zigbuild`, against the C library of old systems, without paths of this machine.

use anabranch_dist::release::{Machine, Release};
use anyhow::{bail, ensure, Context, Result};
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What was built.
pub struct Built {
    /// The command.
    pub command: PathBuf,
    /// The library.
    pub library: PathBuf,
    /// What tells the library of UCX's functions.
    pub ucx: PathBuf,
    /// The simulated driver.
    pub simcuda: PathBuf,
    /// A folder with the pages of the manual.
    pub manual: PathBuf,
    /// Completion scripts of bash, zsh and fish.
    pub completions: [String; 3],
}

/// How to build.
#[derive(Debug, Default)]
pub struct Options {
    /// So many jobs at once; cargo's own number otherwise.
    pub jobs: Option<String>,
    /// It is built already.
    pub is_built: bool,
}

/// Shells that completions are packed for.
const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];

/// A profile of cargo and its folder: of what is packed, and of what only runs here.
type Profile = (&'static str, &'static str);
const PACKED: Profile = ("dist", "dist");
const ONLY_RUN: Profile = ("dev", "debug");

/// Builds what a release packs.
pub fn build(release: &Release, options: &Options) -> Result<Built> {
    let tools = Tools::find(&release.root)?;
    let packages = [
        "anabranch-preload",
        "anabranch-ucx",
        "anabranch-cli",
        "simcuda",
    ];
    let folder = tools.run(release, release.machine, PACKED, &packages, options)?;
    let command = folder.join("anabranch");
    // Pages and completions are the same for all machines, and made by a command that runs here.
    let here = Machine::parse(env::consts::ARCH)?;
    let runs = if here == release.machine {
        command.clone()
    } else {
        tools
            .run(release, here, ONLY_RUN, &["anabranch-cli"], options)?
            .join("anabranch")
    };
    let manual = folder.join("manual");
    let _ = std::fs::remove_dir_all(&manual);
    std::fs::create_dir_all(&manual)?;
    said(Command::new(&runs).arg("manual").arg(&manual))?;
    let completion = |shell| said(Command::new(&runs).args(["completions", shell]));
    let completions = SHELLS.map(completion);
    let [bash, zsh, fish] = completions;
    Ok(Built {
        command,
        library: folder.join("libanabranch.so"),
        ucx: folder.join("libanabranch_ucx.so"),
        simcuda: folder.join("libsimcuda.so"),
        manual,
        completions: [bash?, zsh?, fish?],
    })
}

/// What a command prints.
fn said(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {errors}");
    Ok(String::from_utf8(output.stdout)?)
}

/// Where cargo-zigbuild and zig are.
struct Tools {
    path: OsString,
    zig: Option<PathBuf>,
}

impl Tools {
    fn find(root: &Path) -> Result<Tools> {
        let own = root.join("target/tools");
        let present = env::var_os("PATH").unwrap_or_default();
        let folders = std::iter::once(own.join("bin")).chain(env::split_paths(&present));
        let folders: Vec<PathBuf> = folders.collect();
        let has = |name: &str| folders.iter().any(|folder| folder.join(name).is_file());
        let zig = own.join("python/ziglang/zig");
        let zig = zig.is_file().then_some(zig);
        if !has("cargo-zigbuild") || (zig.is_none() && !has("zig")) {
            bail!("cargo-zigbuild or zig is missing: run ci/dist --tools, or install both (crates.io, and PyPI's ziglang)");
        }
        let path = env::join_paths(folders)?;
        Ok(Tools { path, zig })
    }

    /// Builds packages for a machine, and gives the folder where they are.
    fn run(
        &self,
        release: &Release,
        machine: Machine,
        (profile, folder): Profile,
        packages: &[&str],
        options: &Options,
    ) -> Result<PathBuf> {
        let layout = xtask::layout::Layout::new(true);
        let release = &Release {
            machine,
            ..release.clone()
        };
        let target = machine.target();
        let built = layout.target.join(&target).join(folder);
        if options.is_built {
            return Ok(built);
        }
        let rustc = self.rustc(release, &target)?;
        let (major, minor) = anabranch_dist::symbols::GLIBC;
        let mut command = Command::new("cargo");
        command.current_dir(&release.root).env("PATH", &self.path);
        command.args(["zigbuild", "--locked", "--profile", profile, "--target"]);
        command.arg(format!("{target}.{major}.{minor}"));
        command.arg("--target-dir").arg(&layout.target);
        for package in packages {
            command.args(["--package", package]);
        }
        if let Some(jobs) = &options.jobs {
            command.args(["--jobs", jobs]);
        }
        if let Some(zig) = &self.zig {
            command.env("CARGO_ZIGBUILD_ZIG_PATH", zig);
        }
        // No options of whoever builds, nor what cargo has set for this program.
        let strange = |name: &str| {
            name.starts_with("CARGO_PKG_")
                || name.starts_with("CARGO_MANIFEST_")
                || name.starts_with("CARGO_PROFILE_")
        };
        for (name, _) in env::vars_os() {
            if strange(&name.to_string_lossy()) {
                command.env_remove(&name);
            }
        }
        command.env_remove("RUSTFLAGS");
        command.env(
            "CARGO_ENCODED_RUSTFLAGS",
            compiler_options(&release.root).join("\u{1f}"),
        );
        command.env("CARGO_INCREMENTAL", "0");
        command.env("SOURCE_DATE_EPOCH", release.epoch.to_string());
        command.env("ANABRANCH_COMMIT", &release.commit);
        command.env("ANABRANCH_BUILD", release.build(&rustc));
        let status = command.status().context("cargo cannot be started")?;
        ensure!(status.success(), "cargo zigbuild for {target} failed");
        Ok(built)
    }

    /// The compiler's version, if it has the target's standard library.
    fn rustc(&self, release: &Release, target: &str) -> Result<String> {
        let ask = |arguments: &[&str]| {
            let mut command = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
            said(command.current_dir(&release.root).args(arguments))
        };
        let folder = ask(&["--print", "target-libdir", "--target", target])?;
        if !Path::new(folder.trim()).is_dir() {
            bail!(
                "Rust's standard library for {target} is not installed ({} is not there): rustup target add {target}, or Debian's \
                 libstd-rust-dev of that architecture",
                folder.trim()
            );
        }
        let version = ask(&["--version"])?;
        let number = version.split(' ').nth(1).unwrap_or("unknown");
        Ok(number.trim().to_owned())
    }
}

/// Options of the compiler that keep folders of this machine out of what it makes, and the library below its limit
/// (`LIBRARY_BYTES_MAX`): by LLVM's own number it inlines so much that the library has 3.4 MB.
fn compiler_options(root: &Path) -> Vec<String> {
    let home = env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let cargo = env::var_os("CARGO_HOME").map_or_else(|| home.join(".cargo"), PathBuf::from);
    let rustup = env::var_os("RUSTUP_HOME").map_or_else(|| home.join(".rustup"), PathBuf::from);
    let folders = [
        (root, "/anabranch"),
        (&cargo, "/cargo"),
        (&rustup, "/rustup"),
    ];
    let mut options: Vec<String> = folders
        .iter()
        .map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display()))
        .collect();
    options.push("-Cllvm-args=-inline-threshold=50".to_owned());
    options
}
