//! `cargo xtask COMMAND`: what the project's own build does beyond `cargo build`.

// Nobody launches several of it at once.
#![allow(clippy::print_stderr)]

mod codegen;
mod columns;
mod picture;
mod report;
mod site;

use std::process::ExitCode;
use xtask::build::{build, Options};
use xtask::flow::{Over, Rates};
use xtask::layout::repository_root;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  build [--release] [--solver-for MPI,...] [--quiet]
            lay out target/<profile>: anabranch, libanabranch.so, simcuda/libcuda.so.1, and the solver,
            once for each MPI library found (or for the named ones; `--solver-for none` for none)
  codegen [--check]
            write the files generated from the table of MPI functions (or check that they are current)
  mpi       list the MPI libraries found
  report --reference FILE --without FILE --with FILE --stats FILE [--taken-but-for LIST]
            compare three runs of the solver, and say what the library did in the last
  counters FILE [--taken-but-for LIST]
            say what the library did in a run, from the file that ANABRANCH_STATS named; with a list, as in
            not_ready=32 or none, fail if a message from a device buffer was not taken for any other reason or more often
  picture NAME=FILE NAME=FILE
            draw two bandwidths that `anabranch bench --json=FILE` has measured as bars, with their ratios
  max-flow NAME|FILE FROM TO PATHS [--both-ways]
            print what a topology carries at most from one GPU to the other over these paths (direct,relay,host), GB/s
  dist [--target x86_64|aarch64] [--out FOLDER] [--jobs N]
            make packages: a tarball, .deb, .rpm, a Python wheel (docs/packages.md)
  site      stage the documents in target/site-staged for mdBook, and print that folder (ci/site builds the site)
  fresh [--release]
            succeed if the layout was built from the present sources";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (command, rest) = match arguments.split_first() {
        Some((command, rest)) => (command.as_str(), rest),
        None => ("help", &[][..]),
    };
    let outcome = match command {
        "build" => build_options(rest)
            .and_then(|options| build(&options))
            .map(|_| ()),
        "codegen" => codegen::run(rest),
        "mpi" => list_mpi(),
        "report" => report::run(rest),
        "counters" => report::counters(rest),
        "picture" => picture::run(rest),
        "max-flow" => max_flow(rest),
        "dist" => dist(rest),
        "site" => site::run(rest),
        "fresh" => fresh(rest),
        "help" | "--help" | "-h" => {
            println!("{USAGE}");
            Ok(())
        }
        other => Err(format!("unknown command {other:?}\n{USAGE}")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}

fn build_options(arguments: &[String]) -> Result<Options, String> {
    let mut options = Options::default();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--release" => options.release = true,
            "--quiet" => options.quiet = true,
            "--solver-for" => {
                let names = rest
                    .next()
                    .ok_or("--solver-for needs the name of an MPI library")?;
                options.solver_for = Some(names.split(',').map(str::to_owned).collect());
            }
            other => return Err(format!("build does not know {other:?}\n{USAGE}")),
        }
    }
    Ok(options)
}

fn list_mpi() -> Result<(), String> {
    let layout = xtask::layout::Layout::new(false);
    let found = xtask::mpi::find(&layout.wheels());
    let rows = found.iter().map(|mpi| {
        let family = format!("{:?}", mpi.family);
        let paths = [&mpi.mpicc, &mpi.mpirun].map(|path| path.display().to_string());
        [vec![mpi.name.clone(), family], paths.to_vec()].concat()
    });
    let list = columns::table(4, rows.collect());
    // In one piece: a script that reads only its first line closes the pipe.
    print!("{list}");
    Ok(())
}

fn max_flow(arguments: &[String]) -> Result<(), String> {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (&[topology, from, to, paths], is_both_ways) = (match arguments[..] {
        [ref given @ .., "--both-ways"] => (given, true),
        ref given => (given, false),
    }) else {
        return Err(format!("max-flow needs four arguments\n{USAGE}"));
    };
    let shipped = repository_root().join(format!("simcuda/topologies/{topology}.toml"));
    let file = if shipped.exists() {
        shipped
    } else {
        topology.into()
    };
    let rates = Rates::read(&file)?;
    let gpu = |text: &str| {
        let number = text.parse().ok().filter(|gpu| *gpu < rates.gpus());
        number.ok_or_else(|| format!("{text:?} is none of the {} GPUs", rates.gpus()))
    };
    let (from, to) = (gpu(from)?, gpu(to)?);
    if from == to {
        return Err(format!("from GPU {from} to itself: name two"));
    }
    let pairs = [(from, to), (to, from)];
    let pairs = if is_both_ways { &pairs } else { &pairs[..1] };
    println!("{:.3}", rates.max_flow(pairs, Over::parse(paths)?));
    Ok(())
}

/// A program of its own, so that what it needs is compiled for it alone.
fn dist(arguments: &[String]) -> Result<(), String> {
    let mut command = std::process::Command::new(xtask::build::program());
    command.args([
        "run",
        "--quiet",
        "--package",
        "anabranch-dist",
        "--features",
        "packages",
        "--",
    ]);
    let status = command.args(arguments).status();
    match status.map(|status| status.success()) {
        Ok(true) => Ok(()),
        Ok(false) => Err("no packages were made".to_owned()),
        Err(error) => Err(format!("cargo cannot be started: {error}")),
    }
}

fn fresh(arguments: &[String]) -> Result<(), String> {
    let layout =
        xtask::layout::Layout::new(arguments.iter().any(|argument| argument == "--release"));
    if xtask::build::is_fresh(&layout) {
        Ok(())
    } else {
        Err(format!(
            "{} was not built from the present sources; run cargo xtask build",
            layout.folder().display()
        ))
    }
}
