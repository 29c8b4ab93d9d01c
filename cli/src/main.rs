//! The `anabranch` command: start programs with the library, print its options, measure.

mod bench;
mod compare;
mod config;
mod doctor;
mod elf;
mod exec;
#[cfg(test)]
mod fuzz;
mod json;
mod manual;
mod misuse;
mod output;
mod plan;
mod preload;
mod report;
mod run;
mod style;
mod table;
mod topo;
mod trace;

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Carries the GPU messages of MPI programs over every path of the node.
#[derive(Parser)]
#[command(
    name = "anabranch",
    version = anabranch_engine::stats::version::long(),
    subcommand_required = true,
    arg_required_else_help = true
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Preload the library and become the command: mpirun -np 4 anabranch exec ./app
    Exec(exec::Arguments),
    /// Launch the command under its MPI's own launcher, on a simulated node if wanted
    Run(run::Arguments),
    /// Say what the library would do on this machine and with a program, and why
    Doctor(doctor::Arguments),
    /// Print every ANABRANCH_* option with its default, its value in effect, and what it does
    Config(config::Arguments),
    /// Print how the GPUs are connected, and how fast: of this machine or of a topology file
    Topo(topo::Arguments),
    /// Print how a message would be split over the paths between two GPUs, and what that brings
    Plan(plan::Arguments),
    /// Merge the traces of a job's ranks, and say what their calls and messages did
    Trace(trace::Arguments),
    /// Merge the statistics of a job's nodes, and say what calls, paths and pairs of ranks did
    Report(report::Arguments),
    /// Measure bandwidth or latency between ranks 0 and 1
    Bench(bench::Arguments),
    /// Measure what a plan of `compare` lists, in one launch
    #[command(hide = true)]
    Suite(bench::suite::Arguments),
    /// Measure without and with the library in turns, and print the ratios
    Compare(Box<compare::Arguments>),
    /// Print the completion script of a shell: anabranch completions bash
    Completions(manual::Completions),
    /// Write the pages of the manual
    #[command(hide = true)]
    Manual(manual::Manual),
    /// Print how many GPUs the CUDA driver of this process reports
    #[command(hide = true)]
    CountGpus,
    /// Do for `doctor` what may crash or hang
    #[command(hide = true)]
    Probe {
        #[command(subcommand)]
        probe: doctor::Probe,
    },
}

/// A failure with the exit status that a shell would give it.
#[derive(Debug)]
pub struct Failure {
    status: u8,
    text: String,
}

impl Failure {
    /// A failure that ends the command with `status`; `text` says in one line what to do.
    pub fn new(status: u8, text: impl Into<String>) -> Failure {
        Failure {
            status,
            text: text.into(),
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Failure {}

/// Writes one line to stderr, at once: ranks share the launcher's stderr.
fn complain(text: &str) {
    // Where stderr is closed there is nobody to tell.
    let _ = std::io::stderr()
        .lock()
        .write_all(format!("anabranch: {text}\n").as_bytes());
}

fn main() -> ExitCode {
    let words = json::with_equals(with_long_np(std::env::args_os().collect()));
    let cli = match Cli::try_parse_from(&words) {
        Ok(cli) => cli,
        Err(error) => return misused(&misuse::with_hints(error, &words)),
    };
    let result = match cli.command {
        Command::Exec(arguments) => exec::main(&arguments).map(|never| match never {}),
        Command::Run(arguments) => run::main(&arguments),
        Command::Config(arguments) => config::main(&arguments),
        Command::Bench(arguments) => bench::main(&arguments),
        Command::Topo(arguments) => topo::main(&arguments),
        Command::Plan(arguments) => plan::main(&arguments),
        Command::Trace(arguments) => trace::main(&arguments),
        Command::Report(arguments) => report::main(&arguments),
        Command::Doctor(arguments) => doctor::main(&arguments),
        Command::Suite(arguments) => bench::suite::main(&arguments),
        Command::Compare(arguments) => compare::main(&arguments),
        Command::Completions(arguments) => manual::completions(&arguments),
        Command::Manual(arguments) => manual::manual(&arguments),
        Command::CountGpus => run::gpus::print_count(),
        Command::Probe { probe } => doctor::probe(&probe),
    };
    result.unwrap_or_else(|error| {
        complain(&format!("{error:#}"));
        let status = error
            .downcast_ref::<Failure>()
            .map_or(1, |failure| failure.status);
        ExitCode::from(status)
    })
}

/// Help and version go to stdout; an error goes to stderr at once, as [`complain`] has it. On a terminal, which
/// shows colours, nobody else writes between.
fn misused(error: &clap::Error) -> ExitCode {
    let _ = if error.use_stderr() && !std::io::stderr().is_terminal() {
        std::io::stderr().write_all(error.render().to_string().as_bytes())
    } else {
        error.print()
    };
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

/// `run -np 4` as every launcher takes it: clap knows one-letter and `--` options only.
fn with_long_np(mut arguments: Vec<OsString>) -> Vec<OsString> {
    if arguments.get(1).is_some_and(|command| command == "run") {
        let own = arguments
            .iter()
            .position(|word| word == "--")
            .unwrap_or(arguments.len());
        for word in arguments[..own].iter_mut().filter(|word| *word == "-np") {
            *word = "--np".into();
        }
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn np_is_ours_only_before_the_command() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        assert_eq!(
            with_long_np(words("anabranch run -np 4 -- app -np 5")),
            words("anabranch run --np 4 -- app -np 5")
        );
        assert_eq!(
            with_long_np(words("anabranch exec app -np 5")),
            words("anabranch exec app -np 5")
        );
    }
}
