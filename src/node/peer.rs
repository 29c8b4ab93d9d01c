//! Another rank of this node, as seen through its segment.

use super::map::Mapping;
use super::rts::{Corruption, Rts};
use super::slot::{Message, Refused, Slot};
use super::view::{BadSegment, Owner, View};
use super::{proc, sys};
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use thiserror::Error;

/// Why a registered rank cannot be reached.
#[derive(Debug, Error)]
pub enum PeerError {
    /// It does not run any more, or another process has its pid.
    #[error("process {0} is gone")]
    Gone(u32),
    /// Its segment cannot be opened or mapped.
    #[error("the segment of process {pid} cannot be opened: {error}")]
    Open {
        /// Pid.
        pid: u32,
        /// What the system said.
        error: io::Error,
    },
    /// The file descriptor's number leads to something that is not a sealed segment.
    #[error("process {0} has something else in the place of its segment")]
    Foreign(u32),
    /// Another user owns the segment, or may open it.
    #[error("the segment of process {pid} belongs to user {uid} with mode {mode:04o}, and is not private to this user: ranks of a job run as one user")]
    Untrusted {
        /// Pid.
        pid: u32,
        /// Owner of the file.
        uid: u32,
        /// Permission bits.
        mode: u32,
    },
    /// The contents are not those of its segment.
    #[error("the segment of process {pid}: {error}")]
    Bad {
        /// Pid.
        pid: u32,
        /// What is wrong.
        error: BadSegment,
    },
}

/// Another rank of the same job and node.
#[derive(Debug)]
pub struct Peer {
    view: View,
}

impl Deref for Peer {
    type Target = View;
    fn deref(&self) -> &View {
        &self.view
    }
}

impl Peer {
    /// Maps the segment that process `pid` has open as file descriptor `number`, and verifies it.
    pub(super) fn open(
        job: u64,
        world_rank: u32,
        pid: u32,
        start_low: u32,
        number: u16,
    ) -> Result<Self, PeerError> {
        let stat = proc::stat(pid)
            .filter(proc::ProcessStat::is_running)
            .ok_or(PeerError::Gone(pid))?;
        if proc::low32(stat.start) != start_low {
            return Err(PeerError::Gone(pid));
        }
        let fd = open_memfd(pid, number)?;
        let failed = |error| PeerError::Open { pid, error };
        let file = sys::file_stat(fd.as_raw_fd()).map_err(failed)?;
        if !file.is_private() {
            let (uid, mode) = (file.uid, file.mode & 0o7777);
            return Err(PeerError::Untrusted { pid, uid, mode });
        }
        if !sys::is_shrink_sealed(fd.as_fd()) {
            return Err(PeerError::Foreign(pid));
        }
        let map = Mapping::new(fd.as_fd(), file.size).map_err(failed)?;
        let owner = Owner {
            job,
            world_rank,
            pid,
            start: stat.start,
        };
        let view = View::open(map, owner).map_err(|error| PeerError::Bad { pid, error })?;
        Ok(Self { view })
    }

    /// True while the process runs (a zombie does not). Reads `/proc`: some 10 µs, for every few
    /// milliseconds.
    pub fn alive(&self) -> bool {
        let owner = self.view.owner();
        proc::is_alive(owner.pid, owner.start)
    }

    /// Whether its process runs and has not begun to end. While it ends, what it shares is gone already.
    pub fn goes_on(&self) -> bool {
        let owner = self.view.owner();
        proc::goes_on(owner.pid, owner.start)
    }

    /// Sends the ATS for the peer's message with this nonce. False if the slot is no longer about that
    /// message. The peer needs to know no sooner than at its next MPI call, so its helper is left asleep.
    pub fn send_ats(&self, slot: u32, nonce: u64) -> bool {
        self.view.will_ring();
        let told = self.send_ats_unheard(slot, nonce);
        self.view.ring_quietly();
        told
    }

    /// Call before an ATS that is sent soon.
    pub fn will_send_ats(&self, slot: u32) {
        self.view.will_change(slot);
        self.view.will_ring();
    }

    /// Sends the ATS for a message that the peer knows to have arrived, because it has written it. The peer
    /// finds the slot free when it looks at its messages because of another one.
    pub fn send_ats_unheard(&self, slot: u32, nonce: u64) -> bool {
        let slot = self.view.slot(slot);
        slot.is_some_and(|slot| slot.send_ats(nonce).is_ok())
    }

    /// The slot and the message that an RTS of this peer names, if they agree with it in everything.
    pub fn validate(&self, rts: &Rts) -> Result<(&Slot, Message), Corruption> {
        let owner = self.view.owner();
        if rts.job != owner.job {
            return Err(Corruption::Job);
        }
        if rts.sender != owner.world_rank {
            return Err(Corruption::Range);
        }
        let slot = self.view.slot(rts.slot).ok_or(Corruption::Range)?;
        let message = match slot.read(rts.nonce) {
            Ok(message) => message,
            Err(Refused::Stale | Refused::State(_)) => return Err(Corruption::Stale),
        };
        let agrees = message.sequence == rts.sequence
            && message.length == rts.length
            && message.source == rts.sender;
        match (agrees, message.digest() == rts.digest) {
            (true, true) => Ok((slot, message)),
            (true, false) => Err(Corruption::Digest),
            (false, _) => Err(Corruption::Stale),
        }
    }
}

/// Opens `/proc/<pid>/fd/<number>`, only if it is a memfd of ours. The program may have opened a device, pipe
/// or file under that number, and opening some of these would have side effects.
fn open_memfd(pid: u32, number: u16) -> Result<OwnedFd, PeerError> {
    let path = format!("/proc/{pid}/fd/{number}");
    let failed = |error| PeerError::Open { pid, error };
    let target = std::fs::read_link(&path).map_err(failed)?;
    if target.as_os_str() != "/memfd:anabranch (deleted)" {
        return Err(PeerError::Foreign(pid));
    }
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(flags)
        .open(path);
    file.map(OwnedFd::from).map_err(failed)
}
