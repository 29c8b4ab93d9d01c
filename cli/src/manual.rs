//! `anabranch completions` and the hidden `anabranch manual`: what is made of the command line's own description.

use std::path::PathBuf;
use std::process::ExitCode;

use anabranch_engine::stats::version;
use clap::{Args, Command, CommandFactory};
use clap_complete::Shell;

use crate::{output, Cli, Failure};

/// Arguments of `anabranch completions`.
#[derive(Args)]
pub struct Completions {
    /// The shell
    shell: Shell,
}

/// Arguments of `anabranch manual`.
#[derive(Args)]
pub struct Manual {
    /// The folder for the pages of section 1
    folder: PathBuf,
}

/// The command line as documents show it: with the version alone, which no build changes, and without hidden commands, which scripts
/// for bash would have otherwise.
fn described() -> Command {
    let whole = Cli::command();
    let shown = whole
        .get_subcommands()
        .filter(|command| !command.is_hide_set());
    let about = whole.get_about().cloned().unwrap_or_default();
    Command::new("anabranch")
        .about(about)
        .version(version::VERSION)
        .args(whole.get_arguments().cloned())
        .subcommands(shown.cloned())
}

/// Prints the shell's completion script.
///
/// # Errors
/// It cannot be written.
pub fn completions(arguments: &Completions) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut described(), "anabranch", &mut script);
    output::to_stdout(&script)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes a page for the command and one for each of its subcommands.
///
/// # Errors
/// The folder cannot be written to.
pub fn manual(arguments: &Manual) -> anyhow::Result<ExitCode> {
    let folder = &arguments.folder;
    clap_mangen::generate_to(described(), folder).map_err(|error| {
        let text = format!("no pages can be written to {}: {error}", folder.display());
        Failure::new(1, text)
    })?;
    Ok(ExitCode::SUCCESS)
}
