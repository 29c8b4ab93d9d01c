//! What happened to the messages of this rank: counters, the reasons why messages were not taken,
//! and the summary at MPI_Finalize.
//!
//! To add a counter or a reason, add one row to its table below.

mod advice;
pub mod calls;
pub mod details;
pub mod meter;
mod summary;
mod target;
pub mod version;

pub use details::{About, Details};
pub use meter::{Meter, SentBy};
pub use summary::{RankSnapshot, Summary};
pub use target::{spawned, StatsTarget};

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::trace;

/// What a counter counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Messages, or other events.
    Count,
    /// Bytes.
    Bytes,
}

macro_rules! counters {
    ($( $variant:ident $name:literal $unit:ident $doc:literal; )*) => {
        /// A counter of this rank.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Counter { $( #[doc = $doc] $variant ),* }

        const COUNTER_NAMES: &[&CStr] = &[$( c_name(concat!($name, "\0")) ),*];
        const COUNTER_TEXTS: &[&CStr] = &[$( c_name(concat!($doc, "\0")) ),*];

        impl Counter {
            /// All counters, in the order of the table.
            pub const ALL: &'static [Counter] = &[$( Counter::$variant ),*];
            /// Name in JSON and in the C interface.
            pub fn name(self) -> &'static str {
                match self { $( Counter::$variant => $name ),* }
            }
            /// What it counts.
            pub fn unit(self) -> Unit {
                match self { $( Counter::$variant => Unit::$unit ),* }
            }
            /// One line of explanation.
            pub fn doc(self) -> &'static str {
                match self { $( Counter::$variant => $doc ),* }
            }
        }
    };
}

counters! {
    SendsDevice          "sends_device"            Count "sends from device buffers seen, however they went";
    SendsDeviceBytes     "sends_device_bytes"      Bytes "their payload";
    SendsRts      "sends_rts"        Count "sends that went as an RTS";
    SendsRtsBytes "sends_rts_bytes"  Bytes "their payload";
    SendsHostRts  "sends_host_rts" Count "long sends from host memory whose receiver was expected to bring them to a device, by RTS";
    SendsHostRtsBytes "sends_host_rts_bytes" Bytes "bytes of those";
    SendsEager          "sends_eager"            Count "sends of those that completed from host memory before their receiver came";
    SendsBcopy           "sends_bcopy"             Count "sends from device buffers that went by value, copied to host memory first";
    SendsBcopyBytes      "sends_bcopy_bytes"       Bytes "their payload";
    SendsNative          "sends_native"            Count "sends from device buffers handed to the MPI library as they are";
    SendsNativeBytes     "sends_native_bytes"      Bytes "their payload";
    DirectReceives       "receives_direct"         Count "messages fetched straight from the sender's device memory";
    DirectBytes          "receives_direct_bytes"   Bytes "their payload";
    PutBytes    "receives_put_bytes" Bytes "of their payload what the sender wrote to the receiver's device memory, as messages went both ways or the two share a GPU";
    RtrsSent    "rtrs_sent"      Count "receives of which the sender was told before it sent";
    PutEarlyReceives    "receives_put_early" Count "messages of which their sender wrote all, or what host memory did not bring, to such a receive at once, before they were matched";
    SelfReceives         "receives_self"           Count "messages of a rank to itself copied in place";
    SelfBytes            "receives_self_bytes"     Bytes "their payload";
    CopiesBatched        "copies_batched"          Count "copies of these two, and of short messages between a device and the host, that were started in one batch with others";
    MultipathReceives      "receives_multipath"        Count "messages that came over several paths at once";
    MultipathBytes         "receives_multipath_bytes"  Bytes "their payload";
    MultipathDirectBytes   "multipath_direct_bytes"    Bytes "their payload that came straight from the sender's device memory";
    MultipathRelayBytes    "multipath_relay_bytes"     Bytes "their payload that came over other GPUs";
    MultipathHostBytes     "multipath_host_bytes"      Bytes "their payload that came through host memory";
    MultipathOvertakenBytes "multipath_overtaken_bytes" Bytes "their payload that was not brought again when a path had failed, as that of a later message, received in the same place, was there";
    MultipathPutBytes   "multipath_put_bytes"    Bytes "their payload that the sender wrote straight to the receiver's device memory, as messages went both ways";
    HostSpared           "host_spared"             Count "messages long enough to be split that left out host memory, as one of the two ranks computes meanwhile";
    HostShareRaised      "host_share_raised"       Count "times that messages which use host memory beside others were found to leave some of it unused";
    HostShareLowered     "host_share_lowered"      Count "times that they were found to count on more of it than there is";
    HostRateLowered      "host_rate_lowered"       Count "times that messages which alone use host memory found that slower than they counted on";
    HostRateRaised       "host_rate_raised"        Count "times that they found it faster again";
    ChunksClaimedBack    "chunks_claimed_back"     Count "chunks of theirs that the receiver took over from the sender, which had not begun with them";
    PathsAbandoned        "paths_abandoned"          Count "paths of theirs that were given up, the rest of their part being taken directly";
    SendersLate          "senders_late"            Count "times that their sender did not go on for so long that its part was taken directly, as on a busy machine";
    StagingRefused       "staging_refused"         Count "attempts to take staging memory on a GPU, for messages that lead over it, that failed";
    PinningRefused       "pinning_refused"         Count "attempts to pin host memory that the driver refused: copies with it are slower";
    UnitsReclaimed       "units_reclaimed"         Count "units of 256 KiB of that memory that were taken back from ranks that had died";
    HostPipelineReceives     "receives_host_pipeline"      Count "messages that came through a ring in host memory";
    HostPipelineBytes        "receives_host_pipeline_bytes" Bytes "their payload";
    GpuPipelineReceives      "receives_gpu_pipeline"       Count "messages that came through a ring in memory of their sender's GPU";
    GpuPipelineBytes         "receives_gpu_pipeline_bytes" Bytes "their payload";
    EagerReceives        "receives_eager"          Count "messages taken from the host memory into which the sender had copied them";
    EagerBytes           "receives_eager_bytes"    Bytes "their payload";
    BcopyReceives        "receives_bcopy"          Count "messages that came by value and were copied up to a device buffer";
    BcopyBytes           "receives_bcopy_bytes"    Bytes "their payload";
    NativeReceives       "receives_native"         Count "receives into device buffers handed to the MPI library as they are";
    HostFetched          "receives_host_fetched"   Count "RTSs that met a receive into host memory (counted in their path as well)";
    HostFetchedBytes     "receives_host_fetched_bytes" Bytes "their payload";
    ProbesRts     "probes_rts"       Count "RTSs seen by a probe, reported with the size of their message";
    Truncated            "truncated"               Count "messages longer than their receive";
    Cancelled            "cancelled"               Count "requests of the engine that were cancelled";
    Verified             "verified"                Count "messages whose checksums were compared (ANABRANCH_VERIFY)";
    VerifyMismatches     "verify_mismatches"       Count "messages of those that were not what was sent";
    Errors               "errors"                  Count "messages that ended in an MPI error raised by the engine";
    Retries              "retries"                 Count "transfers begun again over a simpler path";
    DriverRetries        "driver_retries"          Count "driver calls that failed and were made again at once";
    DeadPeers            "dead_peers"              Count "transfers given up because the peer had died";
    Corrupt              "corrupt"                 Count "messages whose slot or ring in shared memory somebody had written over";
    BadRts       "bad_rts"         Count "messages that looked like an RTS and were none";
    Panics               "panics"                  Count "panics caught at an exported function";
    MappingsOpened       "mappings_opened"         Count "allocations of other ranks mapped";
    MappingsClosed       "mappings_closed"         Count "allocations of other ranks unmapped, evicted ones included";
    MappingsEvicted      "mappings_evicted"        Count "allocations of other ranks unmapped to stay within ANABRANCH_MAPPINGS";
    AllocationsRetired   "allocations_retired"     Count "allocations of this rank that peers had been told of and that the program has freed";
    RelaysReturned       "relays_returned"         Count "times that staging on a GPU was given back because its memory ran short";
    LinksMeasured        "links_measured"          Count "ways to and from the host's memory that this rank has measured, as nobody had before";
    ChunksSent           "chunks_sent"             Count "files sent to peers by which they map chunks of memory that the program has mapped itself";
    ChunksMapped         "chunks_mapped"           Count "chunks of peers' memory mapped by such files";
    MappingsRefused      "mappings_refused"        Count "attempts to map an allocation of another rank that the driver refused";
    OneOwnerFailed         "one_owner_failed"           Count "messages over several paths that this rank drove alone (ANABRANCH_OWNER=one) and that had to be begun again";
    PlacesRetired        "places_retired"          Count "GPUs, or host memory, that messages are not led over any more which this rank drives alone, as paths over them failed twice";
    OneOwnerStreams        "one_owner_by_streams"       Count "messages over several paths that this rank drove alone, launched copy by copy";
    OneOwnerBatch          "one_owner_by_batch"         Count "the same, launched in batches of copies";
    OneOwnerGraph          "one_owner_by_graph"         Count "the same, launched as a CUDA graph";
    OneOwnerBehind         "one_owner_behind"           Count "of the three, launched while messages that are received in the same place were not over";
    GraphsBuilt          "graphs_built"            Count "CUDA graphs built";
    GraphsUpdated        "graphs_updated"          Count "launches of a graph that was there, with other addresses";
    GraphsRelaunched     "graphs_relaunched"       Count "launches of a graph that was there, as it was";
    GraphsEvicted        "graphs_evicted"          Count "graphs destroyed to stay within ANABRANCH_GRAPHS";
    GraphsFailed         "graphs_failed"           Count "graphs that could not be built or launched";
    HelperWakeups        "helper_wakeups"          Count "times the helper thread was woken";
    HelperServed         "helper_served"           Count "messages served by the helper thread";
    MatchedEarly         "matched_early"           Count "messages claimed before the MPI library had brought their RTSs";
    ServedBetween        "served_between"          Count "times that a rank which sent or claimed several messages did what its own receivers asked of it in between";
    BegunBetween         "begun_between"           Count "messages that were begun with while the program was still sending others";
    LaunchesHeld         "launches_held"           Count "launches of pulls that waited a moment for more to go with them";
    GetsQueued          "gets_queued"            Count "long messages that waited while others were read";
    TestsRested          "tests_rested"            Count "tests of a program that computed meanwhile that asked nothing of the driver, as nothing could have ended";
    LooksAtSends         "looks_at_sends"          Count "looks at messages sent by RTS with which their receivers were not known to be through";
    FinalizeUnmatched    "finalize_unmatched"      Count "messages sent by RTS that no receive had matched at MPI_Finalize";
}

/// Counters by the names that they had before, and have in JSON and in the C interface in this release as well
/// (`docs/names.md`).
pub const FORMER: &[(&str, &str)] = &[
    ("sends_host_descriptor_bytes", "sends_host_rts_bytes"),
    ("sends_host_descriptor", "sends_host_rts"),
    ("sends_descriptor_bytes", "sends_rts_bytes"),
    ("sends_descriptor", "sends_rts"),
    ("sends_hosted", "sends_eager"),
    ("sends_value_bytes", "sends_bcopy_bytes"),
    ("sends_value", "sends_bcopy"),
    ("receives_direct_pushed_bytes", "receives_put_bytes"),
    ("receives_direct_invited", "receives_put_early"),
    ("invitations", "rtrs_sent"),
    ("receives_several_bytes", "receives_multipath_bytes"),
    ("receives_several", "receives_multipath"),
    ("several_direct_bytes", "multipath_direct_bytes"),
    ("several_relay_bytes", "multipath_relay_bytes"),
    ("several_host_bytes", "multipath_host_bytes"),
    ("several_overtaken_bytes", "multipath_overtaken_bytes"),
    ("several_pushed_bytes", "multipath_put_bytes"),
    ("tracks_retired", "paths_abandoned"),
    ("receives_host_ring_bytes", "receives_host_pipeline_bytes"),
    ("receives_host_ring", "receives_host_pipeline"),
    ("receives_gpu_ring_bytes", "receives_gpu_pipeline_bytes"),
    ("receives_gpu_ring", "receives_gpu_pipeline"),
    ("receives_value_bytes", "receives_bcopy_bytes"),
    ("receives_value", "receives_bcopy"),
    ("probes_descriptor", "probes_rts"),
    ("bad_descriptors", "bad_rts"),
    ("driven_failed", "one_owner_failed"),
    ("driven_by_streams", "one_owner_by_streams"),
    ("driven_by_batch", "one_owner_by_batch"),
    ("driven_by_graph", "one_owner_by_graph"),
    ("driven_behind", "one_owner_behind"),
    ("claimed_ahead", "matched_early"),
    ("turns_waited", "gets_queued"),
];

macro_rules! reasons {
    ($( $variant:ident $name:literal $text:literal; )*) => {
        /// Why a message from a device buffer did not go by RTS, or did not take the
        /// engine's path at its receiver.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Reason { $( #[doc = $text] $variant ),* }

        const REASON_NAMES: &[[&CStr; 2]] =
            &[$( [c_name(concat!("fallback_", $name, "\0")), c_name(concat!("fallback_", $name, "_bytes\0"))] ),*];
        const REASON_TEXTS: &[[&CStr; 2]] = &[$( [c_name(concat!($name, "\0")), c_name(concat!($text, "\0"))] ),*];

        #[cfg(any(test, feature = "golden"))]
        impl serde::Serialize for Reason {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.serialize_str(self.name())
            }
        }

        impl Reason {
            /// All reasons, in the order of the table.
            pub const ALL: &'static [Reason] = &[$( Reason::$variant ),*];
            /// Name in JSON and in the C interface.
            pub fn name(self) -> &'static str {
                match self { $( Reason::$variant => $name ),* }
            }
            /// The reason as a user reads it.
            pub fn text(self) -> &'static str {
                match self { $( Reason::$variant => $text ),* }
            }
        }
    };
}

reasons! {
    TooSmall        "too_small"        "smaller than ANABRANCH_THRESHOLD";
    NotOnNode       "not_on_node"      "the peer is on another node";
    NotRegistered   "not_registered"   "no record of the peer: it runs without the library or with another version, or has another PID or IPC namespace or another /dev/shm";
    NotReady        "not_ready"        "the peer had not used a device yet, so its helper was not running";
    HelperOff       "helper_off"       "the helper is switched off here or at the peer";
    UnknownComm     "unknown_comm"     "a communicator that the library did not see being made";
    Intercomm       "intercomm"        "an intercommunicator";
    UnknownType     "unknown_type"     "a datatype whose layout the MPI library does not tell";
    NoSlot          "no_slot"          "no slot was free (ANABRANCH_SLOTS, or shared memory is full)";
    NoCell          "no_cell"          "no host memory was free for a short message that completes before it is received";
    NotExportable   "not_exportable"   "device memory that cannot be shared between processes";
    MappingFailed   "mapping_failed"   "the peer could not map the memory";
    NonContiguous   "non_contiguous"   "a non-contiguous datatype";
    Mixed           "mixed"            "a message that is not in one allocation of device memory";
    Buffered        "buffered"         "a buffered send";
    Replace         "replace"          "a send and receive in one buffer";
    NoContext       "no_context"       "no CUDA context for the memory";
    DriverError     "driver_error"     "the CUDA driver reported an error";
    OutOfMemory     "out_of_memory"    "no memory for landing or staging";
}

/// Number of 64-bit words in a snapshot: the counters, then messages and bytes of each reason.
pub const WORDS: usize = Counter::ALL.len() + 2 * Reason::ALL.len();

// The header of a shared segment has room for 128 words.
const _: () = assert!(WORDS <= 128);

/// Threads that count on a tally of their own; any others share one.
const TALLIES: usize = 16;

/// What one thread has counted, and those before it that had the same tally.
#[repr(align(128))]
struct Tally {
    words: [AtomicU64; WORDS],
    is_taken: AtomicBool,
}

impl Tally {
    const fn new() -> Tally {
        Tally {
            words: [const { AtomicU64::new(0) }; WORDS],
            is_taken: AtomicBool::new(false),
        }
    }
}

static OWN: [Tally; TALLIES] = [const { Tally::new() }; TALLIES];
static SHARED: Tally = Tally::new();

/// The tally that a thread has for itself, until it ends.
struct Taken(Option<&'static Tally>);

impl Taken {
    fn take() -> Taken {
        let is_mine = |tally: &&Tally| !tally.is_taken.swap(true, Ordering::Acquire);
        Taken(OWN.iter().find(is_mine))
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(tally) = self.0 {
            // The next one that has it goes on from what this one has written.
            tally.is_taken.store(false, Ordering::Release);
        }
    }
}

thread_local! {
    static TAKEN: Taken = Taken::take();
}

/// Adds to a word. A processor does not go on with an addition that no other may get between before all that was written is out, to
/// lines that others hold, too: right after a message was written to its slot that took a fifth of a microsecond. A thread by itself
/// need not care who gets between.
#[inline]
fn add_to(word: usize, n: u64) {
    // A thread that is ending has no tally any more.
    let tally = TAKEN.try_with(|taken| taken.0).ok().flatten();
    match tally {
        Some(tally) => {
            let value = &tally.words[word];
            let sum = value.load(Ordering::Relaxed).wrapping_add(n);
            value.store(sum, Ordering::Relaxed);
        }
        None => {
            SHARED.words[word].fetch_add(n, Ordering::Relaxed);
        }
    }
}

fn sum_of(word: usize) -> u64 {
    let tallies = OWN.iter().chain(std::iter::once(&SHARED));
    tallies.fold(0, |sum: u64, tally| {
        sum.wrapping_add(tally.words[word].load(Ordering::Relaxed))
    })
}

const fn message_word(reason: Reason) -> usize {
    Counter::ALL.len() + 2 * reason as usize
}

/// Adds to a counter of this process.
#[inline]
pub fn add(counter: Counter, n: u64) {
    if n != 0 {
        add_to(counter as usize, n);
    }
}

/// Counts one message of `bytes` as not taken.
#[inline]
pub fn fallback(reason: Reason, bytes: u64) {
    if trace::on() {
        trace::fallback(reason as u8, bytes);
    }
    add_to(message_word(reason), 1);
    add_to(message_word(reason) + 1, bytes);
}

/// Counts a send of `bytes` from a device buffer that is handed to the MPI library as it is.
pub fn left_native(reason: Reason, bytes: u64) {
    for (messages, of_bytes) in [
        (Counter::SendsDevice, Counter::SendsDeviceBytes),
        (Counter::SendsNative, Counter::SendsNativeBytes),
    ] {
        add(messages, 1);
        add(of_bytes, bytes);
    }
    fallback(reason, bytes);
}

/// The present value of a counter of this process.
pub fn get(counter: Counter) -> u64 {
    sum_of(counter as usize)
}

/// The present values of this process. Each is exact; they are not read at one instant.
pub fn snapshot() -> Snapshot {
    Snapshot(std::array::from_fn(sum_of))
}

/// Copies the present values to shared memory, for the rank that writes the summary. Words
/// beyond the end of `target` are left out.
pub fn publish(target: &[AtomicU64]) {
    for (value, word) in snapshot().0.iter().zip(target) {
        word.store(*value, Ordering::Relaxed);
    }
}

/// The value of a counter by its name: a name of the counter table, or `fallback_<reason>` and
/// `fallback_<reason>_bytes`. `None` for any other name. This is `anabranch_counter` of the C
/// interface.
pub fn counter_by_name(name: &str) -> Option<u64> {
    word_by_name(name).map(sum_of)
}

/// The name of counter `index`, counting as [`counter_by_name`] knows them; `None` past the end.
/// This is `anabranch_counter_name` of the C interface.
pub fn name_by_index(index: usize) -> Option<&'static CStr> {
    if let Some(name) = COUNTER_NAMES.get(index) {
        return Some(name);
    }
    let index = index - COUNTER_NAMES.len();
    REASON_NAMES.get(index / 2).map(|names| names[index % 2])
}

/// What a counter counts, by its name; for a fallback its reason. This is `anabranch_counter_text` of the C interface.
pub fn text_by_name(name: &str) -> Option<&'static CStr> {
    let word = word_by_name(name)?;
    match word.checked_sub(COUNTER_TEXTS.len()) {
        None => COUNTER_TEXTS.get(word).copied(),
        Some(reason) => REASON_TEXTS.get(reason / 2).map(|texts| texts[1]),
    }
}

/// The name of reason `index`, as in `too_small`. This is `anabranch_reason_name` of the C interface.
pub fn reason_by_index(index: usize) -> Option<&'static CStr> {
    REASON_TEXTS.get(index).map(|texts| texts[0])
}

/// The version of the library. This is `anabranch_version` of the C interface.
pub fn version() -> &'static CStr {
    c_name(concat!(env!("CARGO_PKG_VERSION"), "\0"))
}

const fn c_name(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("a name holds no NUL but its last byte"),
    }
}

fn word_by_name(name: &str) -> Option<usize> {
    let renamed = FORMER.iter().find(|(former, _)| *former == name);
    let name = renamed.map_or(name, |(_, now)| *now);
    (0..WORDS)
        .find(|word| name_by_index(*word).is_some_and(|known| known.to_bytes() == name.as_bytes()))
}

/// The values of one rank at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot([u64; WORDS]);

impl Default for Snapshot {
    fn default() -> Self {
        Snapshot([0; WORDS])
    }
}

impl Snapshot {
    /// Reads what [`publish`] wrote; words missing from `source` are zero.
    pub fn load(source: &[AtomicU64]) -> Snapshot {
        let words: Vec<u64> = source
            .iter()
            .map(|word| word.load(Ordering::Relaxed))
            .collect();
        Snapshot::from_words(&words)
    }

    /// The values that [`Snapshot::words`] gave; missing ones are zero.
    pub fn from_words(words: &[u64]) -> Snapshot {
        let mut snapshot = Snapshot::default();
        for (value, word) in snapshot.0.iter_mut().zip(words) {
            *value = *word;
        }
        snapshot
    }

    /// The values in the order of the tables, for shared memory.
    pub fn words(&self) -> [u64; WORDS] {
        self.0
    }

    /// The value of a counter.
    pub fn get(&self, counter: Counter) -> u64 {
        self.0[counter as usize]
    }

    /// Messages and bytes that were not taken for a reason.
    pub fn fallback(&self, reason: Reason) -> (u64, u64) {
        (
            self.0[message_word(reason)],
            self.0[message_word(reason) + 1],
        )
    }

    /// Adds another rank's values to these.
    pub fn merge(&mut self, other: &Snapshot) {
        for (sum, value) in self.0.iter_mut().zip(&other.0) {
            *sum = sum.wrapping_add(*value);
        }
    }
}

/// Serialises the tests that use the counters of the process.
#[cfg(test)]
pub(crate) static TEST_LOCK: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_former_name_is_that_of_a_counter() {
        for (former, now) in FORMER {
            assert!(
                Counter::ALL.iter().any(|counter| counter.name() == *now),
                "{now}"
            );
            assert!(
                Counter::ALL.iter().all(|counter| counter.name() != *former),
                "{former}"
            );
            assert_eq!(counter_by_name(former), counter_by_name(now), "{former}");
        }
    }

    #[test]
    fn names_are_unique_and_found() {
        let names: Vec<&str> = (0..)
            .map_while(name_by_index)
            .map(|name| name.to_str().expect("ASCII"))
            .collect();
        assert_eq!(names.len(), WORDS);
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), WORDS);
        for (word, name) in names.iter().enumerate() {
            assert_eq!(word_by_name(name), Some(word));
        }
        assert_eq!(counter_by_name("no_such"), None);
    }

    #[test]
    fn bytes_are_named_bytes() {
        for counter in Counter::ALL {
            assert_eq!(
                counter.unit() == Unit::Bytes,
                counter.name().ends_with("_bytes")
            );
        }
    }

    #[test]
    fn nothing_is_lost_that_threads_count_at_once_or_one_after_the_other() {
        let _guard = TEST_LOCK
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let before = get(Counter::Truncated);
        // More at once than there are tallies.
        let (threads, rounds, each) = (3 * TALLIES as u64, 4, 10_000);
        for _ in 0..rounds {
            let all_are_there = std::sync::Barrier::new(threads as usize);
            std::thread::scope(|scope| {
                for thread in 0..threads {
                    let all_are_there = &all_are_there;
                    scope.spawn(move || {
                        add(Counter::Truncated, 1);
                        all_are_there.wait();
                        (1..each).for_each(|_| add(Counter::Truncated, 1 + thread % 2));
                    });
                }
            });
        }
        let of_pair = 2 + 3 * (each - 1);
        let counted = get(Counter::Truncated) - before;
        assert_eq!(counted, rounds * threads / 2 * of_pair);
    }

    #[test]
    fn what_is_added_is_read_published_and_merged() {
        let _guard = TEST_LOCK
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let before = snapshot();
        add(Counter::DirectReceives, 2);
        add(Counter::DirectBytes, 300);
        fallback(Reason::TooSmall, 17);
        fallback(Reason::TooSmall, 4);
        let shared: Vec<AtomicU64> = (0..128).map(|_| AtomicU64::new(0)).collect();
        publish(&shared);
        let after = Snapshot::load(&shared);
        assert_eq!(
            after.get(Counter::DirectReceives) - before.get(Counter::DirectReceives),
            2
        );
        assert_eq!(
            after.get(Counter::DirectBytes) - before.get(Counter::DirectBytes),
            300
        );
        let (messages, bytes) = after.fallback(Reason::TooSmall);
        let (messages_before, bytes_before) = before.fallback(Reason::TooSmall);
        assert_eq!((messages - messages_before, bytes - bytes_before), (2, 21));
        assert_eq!(counter_by_name("fallback_too_small_bytes"), Some(bytes));
        assert_eq!(Snapshot::from_words(&after.words()), after);
        assert_eq!(Snapshot::from_words(&[]), Snapshot::default());
        let mut twice = after.clone();
        twice.merge(&after);
        assert_eq!(
            twice.get(Counter::DirectBytes),
            2 * after.get(Counter::DirectBytes)
        );
    }
}
