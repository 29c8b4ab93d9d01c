//! `anabranch run`: the MPI's own launcher with the library in every rank, on a simulated node if
//! wanted.

mod ab;
pub mod gpus;
pub mod launcher;
pub mod program;
pub mod simulator;
mod statistics;
mod supervise;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anabranch_engine::config::Config;
use clap::Args;

use crate::{preload, trace, Failure};
use launcher::{Family, Launcher};
use simulator::Simulation;
use statistics::Statistics;

/// Arguments of `anabranch run`.
#[derive(Args)]
pub struct Arguments {
    /// Number of ranks (also -np)
    #[arg(short = 'n', long = "np", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    ranks: u32,
    /// Run on a simulated node: the name of a topology, or a topology file
    #[arg(long, value_name = "NAME|FILE")]
    sim: Option<OsString>,
    /// The MPI whose launcher to use, or the launcher: by its name in PATH, by its path, or by the folder in which the MPI is
    /// installed [default: the MPI that the command is linked with, else the one in PATH]
    #[arg(long, value_name = "openmpi|mpich|NAME|PATH")]
    mpi: Option<OsString>,
    /// How many GPUs the simulated node has; without --sim, let the ranks see the first G only
    #[arg(long, value_name = "G", value_parser = clap::value_parser!(u32).range(1..))]
    gpus: Option<u32>,
    /// Allow more ranks than simulated GPUs
    #[arg(long)]
    oversubscribe_gpus: bool,
    /// Run without the library
    #[arg(long)]
    vanilla: bool,
    /// Record calls and messages into a file of each rank, as ANABRANCH_TRACE=FILE does, and print on stderr what `anabranch trace` says
    /// of them
    #[arg(long, value_name = "FILE", conflicts_with = "vanilla")]
    trace: Option<PathBuf>,
    /// Write statistics into a file of each node, as ANABRANCH_STATS=FILE does, and print on stderr what `anabranch report` says of them
    #[arg(long, value_name = "FILE", conflicts_with = "vanilla")]
    stats: Option<PathBuf>,
    /// Launch it without and with the library in turns, three times each, and say how much faster it is with it: in all, and in
    /// MPI calls
    #[arg(long, conflicts_with_all = ["vanilla", "trace", "stats"])]
    ab: bool,
    /// A further argument for the launcher (may be given several times)
    #[arg(long = "mpirun-arg", value_name = "ARG", allow_hyphen_values = true)]
    extra: Vec<OsString>,
    /// Print the launcher's command line on stderr before it is run
    #[arg(long, short)]
    verbose: bool,
    /// The command and its arguments
    #[arg(required = true, last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Launches the ranks, waits, and returns the launcher's exit status.
///
/// # Errors
/// Something needed is missing; nothing has been started then.
pub fn main(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Some(name) = arguments.command.first() else {
        return Err(Failure::new(127, "no command given").into());
    };
    // Found here once so that a missing library is one message, not one for each rank.
    let find = || preload::find(Config::from_env().0.library.as_deref());
    let library = (!arguments.vanilla).then(find).transpose()?;
    let wanted = arguments.mpi.as_deref().map(Launcher::named).transpose()?;
    let program = program::find(name, wanted.as_ref())?;
    let launcher = match wanted {
        Some(launcher) => launcher.checked_against(&program)?,
        None => Launcher::for_program(&program)?,
    };
    let prepare = |name| Simulation::prepare(name, arguments.gpus);
    let simulation = arguments.sim.as_deref().map(prepare).transpose()?;
    if let Some(simulation) = &simulation {
        gpus::check(simulation, arguments.ranks, arguments.oversubscribe_gpus)?;
    }
    let setting = Setting {
        arguments,
        library,
        launcher,
        program,
        simulation,
    };
    if arguments.ab {
        return ab::main(&setting);
    }
    let traces = arguments
        .trace
        .as_deref()
        .map(|file| Traces::prepare(file, arguments.ranks))
        .transpose()?;
    let statistics = arguments
        .stats
        .as_deref()
        .map(|file| Statistics::prepare(file, arguments.ranks))
        .transpose()?;
    let mut set: Vec<(String, OsString)> = Vec::new();
    if let Some(traces) = &traces {
        set.push(("ANABRANCH_TRACE".into(), traces.name.clone().into()));
    }
    if let Some(statistics) = &statistics {
        set.push(("ANABRANCH_STATS".into(), statistics.name.clone().into()));
    }
    let status = setting.run(arguments.vanilla, set)?;
    if arguments.vanilla && status != 0 && setting.simulation.is_some() {
        crate::complain(
            "without the library, an MPI that knows no CUDA reads device buffers as if they were its own memory, and crashes; \
             SIMCUDA_HOST_ACCESS=1 lets the simulated node allow it",
        );
    }
    drop(setting);
    if let Some(traces) = traces {
        traces.report();
    }
    if let Some(statistics) = statistics {
        statistics.report();
    }
    Ok(ExitCode::from(status))
}

/// What is launched.
struct Setting<'a> {
    arguments: &'a Arguments,
    library: Option<PathBuf>,
    launcher: Launcher,
    program: Program,
    simulation: Option<Simulation>,
}

impl Setting<'_> {
    /// Launches the program once, with these variables set, and returns its status.
    fn run(&self, is_vanilla: bool, set: Vec<(String, OsString)>) -> anyhow::Result<u8> {
        let simulation = self.simulation.as_ref();
        let options = (self.arguments, is_vanilla);
        let mut command = command_line(options, &self.launcher, simulation, set)?;
        // `anabranch exec` sets each rank up. What ranks spawn gets the launcher's environment.
        let folder = simulation.map(|simulation| &*simulation.folder);
        let library = self.library.as_deref().filter(|_| !is_vanilla);
        let has_trace = self.arguments.trace.is_some() || Config::from_env().0.trace.is_some();
        preload::set_up(&mut command, library, folder, has_trace);
        let rest = &self.arguments.command[1..];
        command.arg("--").arg(&self.program.path).args(rest);
        if self.arguments.verbose {
            crate::complain(&format!("{command:?}"));
        }
        supervise::run(&mut command, &self.launcher.path)
    }
}

/// Whether files can be made where this one is to be: tried before the ranks run, not after it.
///
/// # Errors
/// They cannot; one line that names the folder.
fn check_folder(option: &str, file: &Path) -> Result<(), Failure> {
    let folder = file.parent().unwrap_or(Path::new("/"));
    // The names of ranks and hosts in a path are not known here.
    if folder.to_string_lossy().contains('%') {
        return Ok(());
    }
    tempfile::tempfile_in(folder).map(drop).map_err(|error| {
        let folder = folder.display();
        Failure::new(2, format!("{option}: no file can be written in {folder} ({error}): name one in another folder"))
    })
}

/// Where the ranks' traces go.
struct Traces {
    name: PathBuf,
    files: Vec<PathBuf>,
}

impl Traces {
    /// What is there from another run goes.
    fn prepare(file: &Path, ranks: u32) -> anyhow::Result<Traces> {
        if file.to_string_lossy().ends_with('/') {
            let text = format!("--trace: {} is a folder: name a file", file.display());
            return Err(Failure::new(2, text).into());
        }
        // The ranks may run in another folder.
        let name = std::path::absolute(file)?;
        check_folder("--trace", &name)?;
        let host = anabranch_engine::trace::host();
        let of_rank = |rank: u32| anabranch_engine::trace::file_of(&name, rank, &host);
        let files: Vec<PathBuf> = (0..ranks).map(of_rank).collect();
        // Those of an earlier run with more ranks would be taken for this one's.
        for file in (0..).map(of_rank).take_while(|file| file.exists()) {
            std::fs::remove_file(&file).map_err(|error| {
                Failure::new(2, format!("--trace: {}: {error}", file.display()))
            })?;
        }
        Ok(Traces { name, files })
    }

    /// What makes a page of these files.
    fn html_command(&self) -> String {
        let name = self.name.display().to_string();
        let host = anabranch_engine::trace::host();
        let files = match name.contains("%r") {
            true => name.replace("%r", "*"),
            false => name + ".*",
        };
        let files = files.replace("%h", &host);
        format!("anabranch trace {files} --html report.html")
    }

    /// Says on stderr what was recorded.
    fn report(&self) {
        let there: Vec<PathBuf> = self
            .files
            .iter()
            .filter(|file| file.exists())
            .cloned()
            .collect();
        let text = match there.is_empty() {
            true => Err(anyhow::anyhow!("no rank has recorded anything: does the library take part in it? See `anabranch doctor`")),
            false => trace::text(&there),
        };
        match text {
            Ok(text) => {
                let text = format!("{text}\nFor a browser: {}\n", self.html_command());
                let _ = std::io::Write::write_all(&mut std::io::stderr().lock(), text.as_bytes());
            }
            Err(error) => crate::complain(&format!("--trace: {error:#}")),
        }
    }
}

/// The launcher with its options, up to and including `anabranch exec` and its options. These variables are set, too.
fn command_line(
    (arguments, is_vanilla): (&Arguments, bool),
    launcher: &Launcher,
    simulation: Option<&Simulation>,
    mut variables: Vec<(String, OsString)>,
) -> anyhow::Result<Command> {
    let mut command = launcher.command();
    command.arg("-np").arg(arguments.ranks.to_string());
    if let Some(simulation) = simulation {
        variables.extend(simulation.variables());
    }
    if let (Some(count), None) = (arguments.gpus, simulation) {
        let list: Vec<String> = (0..count).map(|gpu| gpu.to_string()).collect();
        variables.push(("CUDA_VISIBLE_DEVICES".into(), list.join(",").into()));
    }
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    launcher.add_options(&mut command, arguments.ranks, &exported(&variables));
    command.args(&arguments.extra);
    command.arg(std::env::current_exe()?).arg("exec");
    if is_vanilla {
        command.arg("--vanilla");
    }
    if let Some(simulation) = simulation {
        command.arg("--library-path").arg(&simulation.folder);
    }
    Ok(command)
}

/// Names of the variables that every rank needs, on other nodes too.
fn exported(set: &[(String, OsString)]) -> Vec<String> {
    let ours = |name: &str| {
        ["ANABRANCH", "SIMCUDA_", "CUDA_"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
    };
    let present = std::env::vars_os()
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(|name| ours(name));
    let mut names: Vec<String> = present
        .chain(set.iter().map(|(name, _)| name.clone()))
        .collect();
    names.sort();
    names.dedup();
    names
}

/// A program to run, and the MPI library that it is linked with.
pub struct Program {
    /// Where it is.
    path: PathBuf,
    /// The MPI library that the dynamic loader picks for it; none for a script, or for a program
    /// that loads MPI later.
    mpi: Option<PathBuf>,
}

impl Program {
    fn family(&self) -> Option<Family> {
        self.mpi.as_deref().and_then(Family::of_library)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_made_of_all_files() {
        let command = |name: &str| {
            let name = PathBuf::from(name);
            let files = Vec::new();
            Traces { name, files }.html_command()
        };
        let of = |files: &str| format!("anabranch trace {files} --html report.html");
        assert_eq!(command("/tmp/t"), of("/tmp/t.*"));
        let host = anabranch_engine::trace::host();
        assert_eq!(command("/t/%h-%r"), of(&format!("/t/{host}-*")));
    }
}
