//! Begins and ends a rank's trace, and tells it world ranks and bytes (`src/trace/`).

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::config::Config;
use crate::cuda;
use crate::engine::{comms, types};
use crate::mpi::guard::{self, Seen};
use crate::mpi::{self, Abi, Function};
use crate::node::{cpus, Launch};
use crate::stats::{self, Reason};
use crate::trace::nvtx::{self, States};
use crate::trace::read::Header;
use crate::trace::record::NO_PEER;
use crate::trace::{self, file_of, Arguments};
use crate::transfer::life::{Kind, Protocol};
use crate::transfer::route::survey;

/// Begins to record, if `ANABRANCH_TRACE` says so, and to make ranges, if `ANABRANCH_NVTX` does.
pub(super) fn begin(abi: &Abi, config: &Config, launch: &Launch, (rank, is_spawned): (u32, bool)) {
    if config.nvtx {
        begin_ranges();
    }
    let Some(name) = &config.trace else { return };
    let mut size = 0;
    mpi::native::comm_size(abi.comm_world, mpi::Out::of(&mut size));
    let host = trace::host();
    let mut path = file_of(name, rank, &host);
    if is_spawned {
        path = stats::spawned(&path, std::process::id());
    }
    let time_of_day = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let is_simulated = cuda::is_simulated() && !config.trace_by_machine;
    let clock = is_simulated.then_some(cuda::clock_ns as fn() -> u64);
    let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let functions: Vec<&str> = Function::ALL
        .iter()
        .map(|function| function.name())
        .collect();
    let reasons: Vec<&str> = Reason::ALL.iter().map(|reason| reason.name()).collect();
    let header = Header {
        library: env!("CARGO_PKG_VERSION").into(),
        job: launch.hash.wrapping_add(u64::from(is_spawned)),
        rank,
        size: u32::try_from(size).unwrap_or(0),
        host,
        pid: std::process::id(),
        is_simulated,
        opened: [
            clock.map_or_else(trace::machine_ns, |clock| clock()),
            time_of_day.as_nanos() as u64,
        ],
        numa: cpus::numa_nodes(),
        options: options(),
        functions: named(&functions),
        states: named(&Kind::ALL.map(Kind::name)),
        protocols: named(&Protocol::ALL.map(Protocol::name)),
        reasons: named(&reasons),
        ucp: trace::ucp::FUNCTIONS
            .iter()
            .map(|name| name.to_string_lossy().into_owned())
            .collect(),
    };
    let begun = serde_json::to_string(&header)
        .map_err(std::io::Error::other)
        .and_then(|header| trace::open(&path, &header, clock));
    match begun {
        Ok(()) => {
            guard::record_calls(describe);
            trace::describe_places(survey::traced_place);
            // SAFETY: a plain function of this library, which stays loaded.
            unsafe { libc::atexit(without_finalize) };
        }
        Err(error) => log::warn!(
            "ANABRANCH_TRACE: {}: {error}; nothing is recorded: name a file in a folder that can be written to",
            path.display()
        ),
    }
}

/// The library's options that are set.
fn options() -> BTreeMap<String, String> {
    let text = |text: OsString| text.to_string_lossy().into_owned();
    std::env::vars_os()
        .map(|(name, value)| (text(name), text(value)))
        .filter(|(name, _)| name.starts_with("ANABRANCH_"))
        .collect()
}

/// Makes messages ranges of a tool's.
fn begin_ranges() {
    let states = States {
        moving: Kind::Moving as u8,
        landed: Kind::Landed as u8,
        done: Kind::Done as u8,
    };
    if let Err(why) = nvtx::open(&Protocol::ALL.map(Protocol::name), states) {
        log::warn!("ANABRANCH_NVTX has no effect: {why}");
    }
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
    let of_comm = seen.comm.and_then(|comm| {
        comms::look(abi, comm, |identity| {
            let rank = identity.world_rank(seen.peer);
            (identity.id, rank.and_then(|rank| i32::try_from(rank).ok()))
        })
    });
    if let Some((id, peer)) = of_comm {
        about.comm = id;
        if seen.peer >= 0 {
            about.peer = peer.unwrap_or(NO_PEER);
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
pub fn end(is_finalized: bool) {
    guard::stop_recording_calls();
    trace::close(is_finalized);
}
