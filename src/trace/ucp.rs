//! Calls of UCX's `ucp_*` functions, which a second preloaded library tells (`wrappers/ucx`): ours exports none of them.

use std::cell::Cell;
use std::ffi::CStr;

use super::clock::now;
use super::record::{Lane, Record, Ucp, UcpOutcome};
use super::{call, on, put};

/// The functions, by number.
pub const FUNCTIONS: [&CStr; 31] = [
    c"ucp_tag_send_nb",
    c"ucp_tag_send_nbr",
    c"ucp_tag_send_nbx",
    c"ucp_tag_send_sync_nb",
    c"ucp_tag_send_sync_nbx",
    c"ucp_tag_recv_nb",
    c"ucp_tag_recv_nbr",
    c"ucp_tag_recv_nbx",
    c"ucp_tag_msg_recv_nb",
    c"ucp_tag_msg_recv_nbx",
    c"ucp_am_send_nb",
    c"ucp_am_send_nbx",
    c"ucp_am_recv_data_nbx",
    c"ucp_put",
    c"ucp_put_nb",
    c"ucp_put_nbi",
    c"ucp_put_nbx",
    c"ucp_get",
    c"ucp_get_nb",
    c"ucp_get_nbi",
    c"ucp_get_nbx",
    c"ucp_atomic_post",
    c"ucp_atomic_fetch_nb",
    c"ucp_atomic_op_nbx",
    c"ucp_ep_flush",
    c"ucp_ep_flush_nb",
    c"ucp_ep_flush_nbx",
    c"ucp_worker_flush",
    c"ucp_worker_flush_nb",
    c"ucp_worker_flush_nbx",
    c"ucp_worker_fence",
];

/// Number of a function.
///
/// # Panics
/// If it has none; where it is used for a constant the build fails.
#[must_use]
pub const fn number(name: &CStr) -> u32 {
    let mut at = 0;
    while at < FUNCTIONS.len() {
        if is_same(FUNCTIONS[at].to_bytes(), name.to_bytes()) {
            return at as u32;
        }
        at += 1;
    }
    panic!("no such function")
}

const fn is_same(one: &[u8], other: &[u8]) -> bool {
    if one.len() != other.len() {
        return false;
    }
    let mut at = 0;
    while at < one.len() {
        if one[at] != other[at] {
            return false;
        }
        at += 1;
    }
    true
}

/// What the second library tells of a call. Both libraries are of one build; [`Told::SCHEMA`] says so.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Told {
    /// [`Told::SCHEMA`].
    pub schema: u32,
    /// Number in [`FUNCTIONS`].
    pub function: u32,
    /// What [`begin`] gave.
    pub begin: u64,
    /// Bytes; [`u64::MAX`]: not known.
    pub bytes: u64,
    /// Tag, or the address in the other process.
    pub tag: u64,
    /// Number of the endpoint in this process, from 1 on; 0: none is named.
    pub endpoint: u32,
    /// What it returned: 0 done, 1 under way, 2 an error.
    pub outcome: u32,
}

impl Told {
    /// Of this layout, and of these functions.
    pub const SCHEMA: u32 = 1;
}

thread_local! {
    /// Calls are not recorded: this thread is in one, or sends a message of the library's own.
    static SKIP: Cell<bool> = const { Cell::new(false) };
}

/// A call begins; 0: it is not to be recorded. Otherwise [`end`] has to follow.
#[must_use]
pub fn begin() -> u64 {
    if !on() || SKIP.replace(true) {
        return 0;
    }
    now()
}

/// A call is over.
pub fn end(told: &Told) {
    SKIP.set(false);
    if told.schema != Told::SCHEMA || !on() {
        return;
    }
    put(Record::Ucp(Ucp {
        function: told.function as u8,
        outcome: match told.outcome {
            0 => UcpOutcome::Done,
            1 => UcpOutcome::UnderWay,
            _ => UcpOutcome::Failed,
        },
        endpoint: told.endpoint,
        begin: told.begin,
        end: now(),
        bytes: Some(told.bytes).filter(|bytes| *bytes != u64::MAX),
        tag: told.tag,
        call: call(),
    }));
}

/// An endpoint has `lanes` lanes, and this is the transport and the device of one.
pub fn lane(endpoint: u32, (lane, lanes): (u32, u32), name: &CStr) {
    if !on() {
        return;
    }
    let mut text = [0; Lane::TEXT];
    for (to, from) in text.iter_mut().zip(name.to_bytes()) {
        *to = *from;
    }
    put(Record::Lane(Lane {
        endpoint,
        lane: lane as u8,
        lanes: lanes as u8,
        text,
    }));
}

/// Sends a message of the library's own, whose calls of UCX are nobody's.
pub fn of_our_own<T>(send: impl FnOnce() -> T) -> T {
    if !on() {
        return send();
    }
    let before = SKIP.replace(true);
    let sent = send();
    SKIP.set(before);
    sent
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_function_has_its_number() {
        for (at, name) in FUNCTIONS.into_iter().enumerate() {
            assert_eq!(number(name) as usize, at, "{name:?}");
        }
    }
}
