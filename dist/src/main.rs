//! `cargo xtask dist`: the packages of a release, the same bytes from the same commit wherever and whenever they are made.

// Nobody launches several of it at once.
#![allow(clippy::print_stderr)]

mod build;
mod contents;
mod deb;
mod recipes;
mod rpm;
mod sbom;
mod tarball;
mod wheel;

use anabranch_dist::release::{Machine, Release};
use anabranch_dist::symbols;
use anyhow::{bail, Context, Result};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use xtask::layout::repository_root;

const USAGE: &str = "\
usage: cargo xtask dist [--target x86_64|aarch64] [--out FOLDER] [--jobs N | --no-build]
       cargo xtask dist --check-symbols FILE...

  Makes a tarball, a .deb, an .rpm, a Python wheel, a Spack recipe and a container file in FOLDER (target/packages). Needs
  cargo-zigbuild and zig, which `ci/dist --tools` installs under target/tools; with
  --no-build it packs what the last one has built. The other form checks that programs and
  libraries load wherever the packages promise to.";

/// What is wanted.
struct Options {
    machine: Machine,
    out: PathBuf,
    build: build::Options,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.split_first() {
        Some((first, files)) if first == "--check-symbols" => check(files),
        Some((first, _)) if first == "--help" || first == "-h" => {
            println!("{USAGE}");
            Ok(())
        }
        _ => options(&arguments).and_then(|options| make(&options)),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dist: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn options(arguments: &[String]) -> Result<Options> {
    let mut options = Options {
        machine: Machine::X86_64,
        out: repository_root().join("target/packages"),
        build: build::Options::default(),
    };
    let mut rest = arguments.iter();
    while let Some(option) = rest.next() {
        let mut value = || {
            let value = rest.next();
            value.with_context(|| format!("{option} needs a value"))
        };
        match option.as_str() {
            "--target" => options.machine = Machine::parse(value()?)?,
            "--out" => options.out = std::path::absolute(value()?)?,
            "--jobs" => options.build.jobs = Some(value()?.clone()),
            "--no-build" => options.build.is_built = true,
            other => bail!("unknown option {other:?}\n{USAGE}"),
        }
    }
    Ok(options)
}

fn check(files: &[String]) -> Result<()> {
    let faults: Vec<String> = files
        .iter()
        .map(|file| symbols::faults(Path::new(file), symbols::GLIBC))
        .collect::<Result<Vec<_>>>()?
        .concat();
    if faults.is_empty() {
        return Ok(());
    }
    bail!("{}", faults.join("\n"))
}

/// Builds, checks, packs.
fn make(options: &Options) -> Result<()> {
    let root = repository_root();
    let release = Release::find(&root, options.machine)?;
    let built = build::build(&release, &options.build)?;
    for file in [&built.command, &built.library, &built.ucx, &built.simcuda] {
        symbols::check(file, &root)?;
    }
    let size = fs::metadata(&built.library)?.len();
    if size > LIBRARY_BYTES_MAX {
        bail!("libanabranch.so has {size} bytes, more than {LIBRARY_BYTES_MAX}");
    }
    let sbom = sbom::make(&release)?;
    let contents = contents::Contents::gather(&release, &built, sbom)?;
    fs::create_dir_all(&options.out)?;
    let mut made = vec![
        tarball::write(&release, &contents, &options.out)?,
        deb::write(&release, &contents, &options.out)?,
        rpm::write(&release, &contents, &options.out)?,
        wheel::write(&release, &contents, &options.out)?,
    ];
    made.extend(recipes::write(&release, &made, &options.out)?);
    let mut sums = String::new();
    for file in &made {
        let name = file.strip_prefix(&options.out).unwrap_or(file);
        let bytes = fs::read(file)?;
        sums += &format!("{}  {}\n", sha256(&bytes), name.display());
        println!("{:>9} bytes  {}", bytes.len(), file.display());
    }
    let list = format!("SHA256SUMS-{}", release.machine.name());
    fs::write(options.out.join(list), sums)?;
    Ok(())
}

/// The most that the library may weigh: every rank of every job loads it.
const LIBRARY_BYTES_MAX: u64 = 3 << 20;

/// The SHA-256 sum, in hexadecimal digits.
fn sha256(bytes: &[u8]) -> String {
    let sum = Sha256::digest(bytes);
    sum.iter().map(|byte| format!("{byte:02x}")).collect()
}
