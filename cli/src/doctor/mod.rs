//! `anabranch doctor`: what would happen on this machine, with this program, and why, before the
//! library is switched on.
//!
//! **Nothing is run that could crash or hang but in child processes**, each bounded in time: the
//! driver, the library, and what processes do to each other. The program itself is only read.

mod child;
mod gpus;
mod installed;
mod library;
mod loader;
mod node;
mod probe;
mod program;
mod python;
mod sim;
mod text;
mod tools;
mod verdict;
mod wrapper;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use anabranch_engine::config::Config;
use clap::Args;
use serde::Serialize;

use crate::json::Json;
use crate::output;
use crate::table;
use gpus::Driver;
use installed::Installed;
use library::Library;
use node::Node;
pub use probe::Probe;
use program::Program;
use verdict::Verdict;

/// Arguments of `anabranch doctor`.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    json: Json,
    /// Check the installation on a simulated node, which needs no GPU: the library, the simulator, the MPI library, and a
    /// message between two ranks
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "no_gpu_test")]
    sim: Option<OsString>,
    /// Do not try to copy between GPUs
    #[arg(long)]
    no_gpu_test: bool,
    /// How long each step on the driver may take
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    timeout: u32,
    /// The program that is to run (it is not started; its arguments are ignored)
    #[arg(trailing_var_arg = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// All that was found out.
#[derive(Serialize)]
pub struct Findings {
    /// The library that would be preloaded.
    pub library: Library,
    /// The program, if one was given.
    pub program: Option<Program>,
    /// The MPI of this machine, where no program was given that would tell which one counts.
    pub installed_mpi: Option<Installed>,
    /// The machine, or the container around this command.
    pub node: Node,
    /// The driver and the GPUs.
    pub driver: Driver,
    /// What in the environment was not understood.
    #[serde(rename = "environment")]
    pub warnings: Vec<String>,
}

/// The JSON: the same facts as the text.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    findings: &'a Findings,
    verdict: &'a Verdict,
}

/// Examines and reports: status 0 if messages would be taken, 1 if not.
///
/// # Errors
/// The report cannot be written.
pub fn main(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let limit = Duration::from_secs(arguments.timeout.into());
    if let Some(node) = &arguments.sim {
        return sim::main(node, &arguments.program, &arguments.json, limit);
    }
    let (config, warnings) = Config::from_env();
    let findings = Findings {
        library: library::examine(config.library.as_deref(), limit),
        program: (!arguments.program.is_empty())
            .then(|| program::examine(&arguments.program, limit)),
        installed_mpi: arguments
            .program
            .is_empty()
            .then(|| installed::examine(limit)),
        node: node::examine(limit),
        driver: gpus::examine(!arguments.no_gpu_test, limit),
        warnings: (warnings.iter().map(ToString::to_string))
            .chain(anabranch_engine::config::notice())
            .collect(),
    };
    let verdict = verdict::judge(&findings, &config);
    arguments.json.write(&Report {
        findings: &findings,
        verdict: &verdict,
    })?;
    if !arguments.json.is_alone() {
        output::text(&text::render(&findings, &verdict, table::terminal_width()))?;
    }
    Ok(ExitCode::from(u8::from(!verdict.taken)))
}

/// Plays the role of a child of `doctor`.
///
/// # Errors
/// What the probe found; it goes to stderr.
pub fn probe(probe: &Probe) -> anyhow::Result<ExitCode> {
    probe::play(probe)?;
    Ok(ExitCode::SUCCESS)
}
