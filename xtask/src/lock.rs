//! A lock between processes that build or compile the same things.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

/// Held until dropped.
#[derive(Debug)]
pub struct Lock(#[allow(dead_code)] File);

impl Lock {
    /// Waits until no other process holds the lock file at `path`, which is made if it is not there.
    ///
    /// # Errors
    /// What the system says of the file or the lock.
    pub fn take(path: &Path) -> io::Result<Lock> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let file = File::create(path)?;
        // SAFETY: the descriptor belongs to `file`, which is open.
        match unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) } {
            0 => Ok(Lock(file)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}
