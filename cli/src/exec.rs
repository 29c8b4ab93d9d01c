//! `anabranch exec`: preload the library and become the command.

use std::convert::Infallible;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anabranch_engine::config::Config;
use clap::Args;

use crate::{preload, Failure};

/// Arguments of `anabranch exec`.
#[derive(Args)]
pub struct Arguments {
    /// Start the command without the library
    #[arg(long)]
    pub vanilla: bool,
    /// A folder to search for shared libraries first, such as that of the simulated driver
    #[arg(long, value_name = "DIR")]
    pub library_path: Option<PathBuf>,
    /// The command and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "COMMAND"
    )]
    pub command: Vec<OsString>,
}

/// Becomes the command; returns only if that fails.
///
/// # Errors
/// The library or the command cannot be used; the failure has the status that a shell would give.
pub fn main(arguments: &Arguments) -> anyhow::Result<Infallible> {
    let Some((program, rest)) = arguments.command.split_first() else {
        return Err(Failure::new(127, "no command given").into());
    };
    let mut command = Command::new(program);
    command.args(rest);
    // Warnings of options are the library's to print, in each rank that arms it.
    let config = Config::from_env().0;
    let find = || preload::find(config.library.as_deref());
    let library = (!arguments.vanilla).then(find).transpose()?;
    preload::set_up(
        &mut command,
        library.as_deref(),
        arguments.library_path.as_deref(),
        config.trace.is_some(),
    );
    let error = command.exec();
    let status = if error.kind() == io::ErrorKind::NotFound {
        127
    } else {
        126
    };
    let name = program.to_string_lossy();
    let hint = match error.kind() {
        io::ErrorKind::NotFound if name.contains('/') => {
            "no such file (or its interpreter is missing)".to_owned()
        }
        io::ErrorKind::NotFound => "not found in PATH; give its path, as in ./app".to_owned(),
        _ => error.to_string(),
    };
    Err(Failure::new(status, format!("cannot run {name}: {hint}")).into())
}
