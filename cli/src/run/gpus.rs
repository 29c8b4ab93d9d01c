//! How many GPUs a simulated node has: asked of the simulated driver itself, in a process of its
//! own that leaves nothing behind.

use std::process::{Command, ExitCode, Stdio};

use super::simulator::Simulation;
use crate::bench::cuda::Driver;
use crate::Failure;

/// Refuses more ranks than the node has GPUs, unless that is wanted.
///
/// # Errors
/// As said, or the driver does not accept the topology.
pub fn check(simulation: &Simulation, ranks: u32, oversubscribe: bool) -> anyhow::Result<()> {
    let gpus = count(simulation)?;
    if ranks > gpus && !oversubscribe {
        let node = simulation.name.to_string_lossy();
        let noun = if gpus == 1 { "GPU" } else { "GPUs" };
        // Where --gpus has left some out, there may be enough.
        let more = match simulation.gpus {
            Some(_) => format!("--gpus {ranks}, a larger topology"),
            None => "a larger topology".to_owned(),
        };
        let text = format!(
            "{ranks} ranks, but the simulated node {node} has {gpus} {noun}: use -np {gpus}, {more}, or --oversubscribe-gpus to share GPUs"
        );
        return Err(Failure::new(2, text).into());
    }
    Ok(())
}

/// How many GPUs the node has.
///
/// # Errors
/// The driver does not accept the topology; one line.
pub fn count(simulation: &Simulation) -> anyhow::Result<u32> {
    let output = Command::new(std::env::current_exe()?)
        .arg("count-gpus")
        .env("LD_LIBRARY_PATH", &simulation.folder)
        .envs(simulation.variables())
        .env_remove("LD_PRELOAD")
        .env_remove("CUDA_VISIBLE_DEVICES")
        .stdin(Stdio::null())
        .output()?;
    let answer = String::from_utf8_lossy(&output.stdout);
    answer.trim().parse().map_err(|_| {
        let said = String::from_utf8_lossy(&output.stderr);
        // The driver names what is wrong with the topology first; the rest only follows from it.
        let reason = said
            .lines()
            .next()
            .unwrap_or("no answer")
            .trim_start_matches("anabranch: ")
            .trim_start_matches("simcuda: ")
            .to_owned();
        Failure::new(
            2,
            format!("--sim {}: {reason}", simulation.name.to_string_lossy()),
        )
        .into()
    })
}

/// Prints the number of GPUs of the driver that this process finds.
///
/// # Errors
/// There is no driver, or it reports an error.
pub fn print_count() -> anyhow::Result<ExitCode> {
    println!("{}", Driver::load()?.device_count()?);
    Ok(ExitCode::SUCCESS)
}
