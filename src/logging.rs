//! The log of the library: lines on stderr that start with the rank, through the `log` facade.
//!
//! We live in other people's programs. A program that itself uses `log` has its own copy of the
//! facade, so neither sees the other's lines; stdout is never touched.

use std::io::Write;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::config::{Config, Warning};

/// The rank in MPI_COMM_WORLD, negative while it is not known.
static RANK: AtomicI32 = AtomicI32::new(-1);

/// Sets up the logger from the options, once; later calls do nothing. Call it before the rank is
/// known, and [`set_rank`] after.
pub fn set_up(config: &Config) {
    let mut builder = env_logger::Builder::new();
    builder.filter_level(config.log).format(|out, record| {
        let rank = RANK.load(Ordering::Relaxed);
        writeln!(out, "{}", line(rank, record.level(), record.args()))
    });
    // An error means that a logger is in place already: ours, from an earlier call.
    let _ = builder.try_init();
}

/// Names the rank in all later lines.
pub fn set_rank(rank: i32) {
    RANK.store(rank, Ordering::Relaxed);
}

/// Reports options that were not understood. They are shown at every level but `off`: an option
/// that has no effect is noticed when it is set or never.
pub fn report(config: &Config, warnings: &[Warning]) {
    if config.log == log::LevelFilter::Off {
        return;
    }
    let mut stderr = std::io::stderr().lock();
    for warning in warnings {
        let rank = RANK.load(Ordering::Relaxed);
        let text = line(rank, log::Level::Warn, &format_args!("{warning}")) + "\n";
        // A closed stderr is the user's choice.
        let _ = stderr.write_all(text.as_bytes());
    }
}

/// One line of the log, as in `anabranch[3]: warn: text`.
fn line(rank: i32, level: log::Level, text: &std::fmt::Arguments<'_>) -> String {
    let level = level.as_str().to_ascii_lowercase();
    // One line is one write, and stays one line: ranks share the launcher's stderr.
    let text = text.to_string().replace('\n', " ");
    if rank < 0 {
        format!("anabranch: {level}: {text}")
    } else {
        format!("anabranch[{rank}]: {level}: {text}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_start_with_the_rank_and_stay_one_line() {
        assert_eq!(
            line(-1, log::Level::Warn, &format_args!("a\nb")),
            "anabranch: warn: a b"
        );
        assert_eq!(
            line(3, log::Level::Error, &format_args!("x")),
            "anabranch[3]: error: x"
        );
    }
}
