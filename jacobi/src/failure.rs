//! Errors that end the program, and how all ranks agree on one.

use mpi::traits::*;
use std::io::Write as _;

/// Exit status where a result is wrong.
pub const WRONG_RESULT: i32 = 1;
/// Exit status for bad input and for an environment that cannot run it.
pub const BAD_INPUT: i32 = 2;

/// One line that says what is wrong and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The line, without the program's name.
    pub message: String,
    /// Exit status.
    pub code: i32,
    /// All ranks have this very failure, so that they can end in step; otherwise the job must be aborted.
    pub agreed: bool,
}

/// Result of what may end the program.
pub type Outcome<T> = Result<T, Failure>;

impl Failure {
    /// Bad input or environment.
    pub fn input(message: impl Into<String>) -> Failure {
        Failure {
            message: message.into(),
            code: BAD_INPUT,
            agreed: false,
        }
    }

    /// A wrong result.
    pub fn wrong(message: impl Into<String>) -> Failure {
        Failure {
            message: message.into(),
            code: WRONG_RESULT,
            agreed: false,
        }
    }
}

/// Writes a line to stderr, in one write: where ranks share the launcher's stderr, what is written in pieces has
/// another's text between them.
pub fn complain(text: &str) {
    // Where stderr is closed there is nobody to tell.
    let _ = std::io::stderr().write_all(format!("jacobi: {text}\n").as_bytes());
}

/// Collective: where any rank failed, every rank returns the failure of the first that did.
pub fn agree<T>(world: &impl Communicator, outcome: Outcome<T>) -> Outcome<T> {
    let mine = outcome.as_ref().err().map_or(0, |f| f.code);
    let mut codes = vec![0i32; world.size() as usize];
    world.all_gather_into(&mine, &mut codes[..]);
    let Some(first) = codes.iter().position(|&code| code != 0) else {
        return outcome;
    };
    let root = world.process_at_rank(first as i32);
    let mut text = outcome.err().map_or(Vec::new(), |f| f.message.into_bytes());
    let mut length = text.len() as u64;
    root.broadcast_into(&mut length);
    text.resize(length as usize, 0);
    root.broadcast_into(&mut text[..]);
    let everyone = codes.iter().all(|&code| code != 0);
    let text = String::from_utf8_lossy(&text);
    let message = if everyone {
        text.into_owned()
    } else {
        format!("rank {first}: {text}")
    };
    Err(Failure {
        message,
        code: codes[first],
        agreed: true,
    })
}
