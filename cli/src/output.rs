//! Where a command's output goes: a file, or stdout, whose reader may have seen enough (`anabranch topo | head`).

use std::io::{self, Write};
use std::path::Path;

use anyhow::Context;

/// A reader that has gone is no error.
fn unless_closed(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// Writes text to stdout, without its colours where they are not wanted.
///
/// # Errors
/// It cannot be written.
pub fn text(text: &str) -> io::Result<()> {
    unless_closed(anstream::stdout().write_all(text.as_bytes()))
}

/// Writes bytes as they are to stdout.
///
/// # Errors
/// It cannot be written.
pub fn to_stdout(bytes: &[u8]) -> io::Result<()> {
    unless_closed(io::stdout().write_all(bytes))
}

/// Writes bytes as they are to a file; `-` is stdout.
///
/// # Errors
/// It cannot be written; a file is named.
pub fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    match path == Path::new("-") {
        true => Ok(to_stdout(bytes)?),
        false => std::fs::write(path, bytes).with_context(|| path.display().to_string()),
    }
}
