//! Runs the launcher as a child: signals reach it, and it does not outlive this command.

use std::io::{self, IsTerminal};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::Command;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::Failure;

/// Runs the command to its end and returns the exit status that a shell would report.
///
/// # Errors
/// It cannot be started.
pub fn run(command: &mut Command, name: &Path) -> anyhow::Result<u8> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM])?;
    // A launcher gives up on its ranks when it is signalled twice, so it must not be reached both
    // by us and with our process group. At a terminal it has to stay in the group to read from it.
    let own_group = !std::io::stdin().is_terminal();
    if own_group {
        command.process_group(0);
    }
    let parent = std::process::id();
    let die_with_parent = move || {
        // SAFETY: prctl and getppid are async-signal-safe and take no pointers here.
        let orphan = unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            u32::try_from(libc::getppid()) != Ok(parent)
        };
        if orphan {
            Err(io::ErrorKind::Interrupted.into())
        } else {
            Ok(())
        }
    };
    // SAFETY: the closure makes async-signal-safe calls only and allocates nothing.
    unsafe { command.pre_exec(die_with_parent) };
    let mut child = command
        .spawn()
        .map_err(|error| Failure::new(126, format!("cannot start {}: {error}", name.display())))?;
    let pid = i32::try_from(child.id())?;
    let handle = signals.handle();
    let forwarder = std::thread::spawn(move || {
        // Ctrl-C reaches the whole group of the terminal by itself.
        for signal in signals
            .forever()
            .filter(|signal| own_group || *signal != SIGINT)
        {
            // SAFETY: kill takes no pointers; the child is not reaped before this thread is stopped
            // or has been reaped within the instant in which its number cannot be reused.
            unsafe { libc::kill(pid, signal) };
        }
    });
    let status = child.wait();
    handle.close();
    let _ = forwarder.join();
    let status = status?;
    let code = status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    Ok(u8::try_from(code).unwrap_or(1))
}
