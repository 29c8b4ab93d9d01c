//! Begins and ends a rank's trace, and tells it world ranks and bytes (`src/trace/`).

use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::config::Config;
use crate::cuda;
use crate::engine::{comms, types};
use crate::mpi::guard::{self, Seen};
use crate::mpi::{self, Abi, Function};
use crate::node::Launch;
use crate::stats::Reason;
use crate::trace::read::Header;
use crate::trace::record::NO_PEER;
use crate::trace::{self, Arguments};
use crate::transfer::life::{Kind, Protocol};

/// Begins to record, if `ANABRANCH_TRACE` says so.
pub(super) fn begin(abi: &Abi, config: &Config, launch: &Launch, rank: u32) {
    let Some(name) = &config.trace else { return };
    let mut size = 0;
    mpi::native::comm_size(abi.comm_world, mpi::Out::of(&mut size));
    let host = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    let path = file_of(name, rank, &host);
    let time_of_day = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let clock = if config.trace_by_machine {
        machine_ns
    } else {
        cuda::clock_ns
    };
    let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let functions: Vec<&str> = Function::ALL
        .iter()
        .map(|function| function.name())
        .collect();
    let reasons: Vec<&str> = Reason::ALL.iter().map(|reason| reason.name()).collect();
    let header = Header {
        library: env!("CARGO_PKG_VERSION").into(),
        job: launch.hash,
        rank,
        size: u32::try_from(size).unwrap_or(0),
        host,
        pid: std::process::id(),
        opened: [clock(), time_of_day.as_nanos() as u64],
        functions: named(&functions),
        states: named(&Kind::ALL.map(Kind::name)),
        protocols: named(&Protocol::ALL.map(Protocol::name)),
        reasons: named(&reasons),
    };
    let begun = serde_json::to_string(&header)
        .map_err(std::io::Error::other)
        .and_then(|header| trace::open(&path, &header, clock));
    match begun {
        Ok(()) => {
            guard::record_calls(describe);
            // SAFETY: a plain function of this library, which stays loaded.
            unsafe { libc::atexit(without_finalize) };
        }
        Err(error) => log::warn!(
            "ANABRANCH_TRACE: {}: {error}; nothing is recorded: name a file in a folder that can be written to",
            path.display()
        ),
    }
}

/// The same clock in all processes of a machine.
fn machine_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The file of a rank: `%r` is its number and `%h` its host; a name without `%r` gets the number at its end, as each
/// rank has a file of its own.
fn file_of(name: &Path, rank: u32, host: &str) -> PathBuf {
    let mut text = name.to_string_lossy().replace("%h", host);
    if !text.contains("%r") {
        text += ".%r";
    }
    PathBuf::from(text.replace("%r", &rank.to_string()))
}

fn describe(seen: &Seen) -> Arguments {
    let mut about = Arguments {
        comm: 0,
        peer: seen.peer,
        tag: seen.tag,
        count: seen.count,
        bytes: 0,
    };
    let Some(abi) = mpi::abi() else { return about };
    if let (Some(datatype), 1..) = (seen.datatype, seen.count) {
        let info = types::info(abi, datatype);
        about.bytes = info.map_or(0, |info| info.bytes(seen.count));
    }
    if let Some(identity) = seen.comm.and_then(|comm| comms::identity(abi, comm)) {
        about.comm = identity.id;
        let world = |rank: c_int| {
            identity
                .world_rank(rank)
                .and_then(|rank| i32::try_from(rank).ok())
        };
        if seen.peer >= 0 {
            about.peer = world(seen.peer).unwrap_or(NO_PEER);
        }
    }
    about
}

/// The process ends without MPI_Finalize.
extern "C" fn without_finalize() {
    end(false);
}

/// In a forked child, whose parent goes on with the file.
pub(super) fn forget() {
    guard::stop_recording_calls();
    trace::forget();
}

/// Ends the file.
pub(super) fn end(is_finalized: bool) {
    guard::stop_recording_calls();
    trace::close(is_finalized);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_a_file_of_its_own() {
        for (name, file) in [
            ("/t/a", "/t/a.3"),
            ("/t/%r/a-%h.trace", "/t/3/a-node7.trace"),
            ("%h-%r", "node7-3"),
        ] {
            assert_eq!(file_of(Path::new(name), 3, "node7"), Path::new(file));
        }
    }
}
