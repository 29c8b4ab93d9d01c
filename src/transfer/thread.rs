//! Threads of the library.

use std::thread::JoinHandle;

use rustix::process::setpriority_process;

use crate::node::cpus::Home;
use crate::transfer::Env;

/// Starts a thread that takes no signals: the program's handlers run on its own threads.
pub fn spawn<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<JoinHandle<T>> {
    let restore = block_signals();
    let started = std::thread::Builder::new()
        .name(name.into())
        .stack_size(512 << 10)
        .spawn(run);
    restore_signals(&restore);
    started
}

/// Priority of threads that nobody waits for. On Linux each thread has its own.
const LEAST_PRIORITY: i32 = 19;

/// Starts a thread that does one thing for which nobody waits. It runs on a processor that no rank is bound
/// to. If there is none, it takes as little as possible of its rank's.
pub fn spawn_aside<T: Send + 'static>(
    env: &Env,
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<JoinHandle<T>> {
    let processes = env.processes();
    spawn(name, move || {
        Home::of_this_thread().leave(&processes);
        if let Err(error) = setpriority_process(None, LEAST_PRIORITY) {
            log::debug!("a thread with the rank's priority: {error}");
        }
        run()
    })
}

fn block_signals() -> libc::sigset_t {
    // SAFETY: both sets are live locals, filled before they are read.
    unsafe {
        let (mut all, mut old) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        old
    }
}

fn restore_signals(old: &libc::sigset_t) {
    // SAFETY: a set that `block_signals` has filled.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old, std::ptr::null_mut()) };
}
