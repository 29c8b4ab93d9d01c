//! Begins what `ANABRANCH_STATS=FILE` counts beyond counters (`src/stats/details.rs`), and brings it to the rank that
//! writes the file.

use crate::config::Config;
use crate::cuda;
use crate::mpi::guard;
use crate::mpi::{self, Abi, Function};
use crate::node::{Launch, Segment, View};
use crate::stats::details::{self, About, Details};
use crate::stats::StatsTarget;
use crate::trace;
use crate::transfer::life::Protocol;

/// Begins to count calls and messages, if a file is wanted.
pub(super) fn begin(abi: &Abi, config: &Config, launch: &Launch, is_spawned: bool) {
    if !config.stats_details || !matches!(config.stats, StatsTarget::File(_)) {
        return;
    }
    let mut size = 0;
    mpi::native::comm_size(abi.comm_world, mpi::Out::of(&mut size));
    // The clock of a trace, which may be written beside the file.
    let is_simulated = cuda::is_simulated() && !config.trace_by_machine;
    let about = About {
        job: launch.hash.wrapping_add(u64::from(is_spawned)),
        began_unix_ms: details::unix_ms(),
        size: u32::try_from(size).unwrap_or(0),
        host: trace::host(),
        is_simulated,
        functions: Function::ALL.iter().map(|of| of.name()).collect(),
        protocols: Protocol::ALL.map(Protocol::name).to_vec(),
    };
    details::begin(about, is_simulated.then_some(cuda::clock_ns as fn() -> u64));
    guard::count_calls();
}

/// Says to the rank that writes the file what this one has counted.
pub(super) fn publish(own: &Segment) {
    let Some(details) = Details::so_far() else {
        return;
    };
    if let Err(error) = own.publish_details(&details.words()) {
        log::warn!("ANABRANCH_STATS: no memory for what this rank says of its calls and messages ({error}): the file has its counters only");
    }
}

/// What a rank has said.
pub(super) fn of(rank: &View) -> Option<Details> {
    Details::from_words(&rank.details()?)
}
