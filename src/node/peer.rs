//! Another rank of this node, as seen through its segment.

use super::descriptor::{Corruption, Descriptor};
use super::map::Mapping;
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
    /// The descriptor number leads to something that is not a sealed segment.
    #[error("process {0} has something else in the place of its segment")]
    Foreign(u32),
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
    /// Maps the segment that process `pid` has open as descriptor `number`, and verifies it.
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
        if file.uid != sys::user() || !sys::is_shrink_sealed(fd.as_fd()) {
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

    /// True while the process runs (a zombie does not). Reads `/proc`: some 10 µs, for every few milliseconds.
    pub fn alive(&self) -> bool {
        let owner = self.view.owner();
        proc::is_alive(owner.pid, owner.start)
    }

    /// Whether its process runs and has not begun to end: while it ends, what it shares is gone already.
    pub fn goes_on(&self) -> bool {
        let owner = self.view.owner();
        proc::goes_on(owner.pid, owner.start)
    }

    /// Tells the peer that its message with this nonce is dealt with; false if the slot is about it no longer. The peer
    /// needs to know no sooner than at its next MPI call, so its helper is left asleep.
    pub fn acknowledge(&self, slot: u32, nonce: u64) -> bool {
        self.view.will_ring();
        let told = self.acknowledge_unheard(slot, nonce);
        self.view.ring_quietly();
        told
    }

    /// Before an acknowledgement that is soon to come.
    pub fn will_acknowledge(&self, slot: u32) {
        self.view.will_change(slot);
        self.view.will_ring();
    }

    /// The same of a message that the peer knows to be there, as it has written it: it finds the slot free when it looks at
    /// its messages for the sake of another one.
    pub fn acknowledge_unheard(&self, slot: u32, nonce: u64) -> bool {
        let slot = self.view.slot(slot);
        slot.is_some_and(|slot| slot.acknowledge(nonce).is_ok())
    }

    /// The slot and message that a descriptor of this peer's names, if they bear it out in everything.
    pub fn validate(&self, descriptor: &Descriptor) -> Result<(&Slot, Message), Corruption> {
        let owner = self.view.owner();
        if descriptor.job != owner.job {
            return Err(Corruption::Job);
        }
        if descriptor.sender != owner.world_rank {
            return Err(Corruption::Range);
        }
        let slot = self.view.slot(descriptor.slot).ok_or(Corruption::Range)?;
        let message = match slot.read(descriptor.nonce) {
            Ok(message) => message,
            Err(Refused::Stale | Refused::State(_)) => return Err(Corruption::Stale),
        };
        let agrees = message.sequence == descriptor.sequence
            && message.length == descriptor.length
            && message.source == descriptor.sender;
        match (agrees, message.digest() == descriptor.digest) {
            (true, true) => Ok((slot, message)),
            (true, false) => Err(Corruption::Digest),
            (false, _) => Err(Corruption::Stale),
        }
    }
}

/// Opens `/proc/<pid>/fd/<number>`, only if it is a memfd of ours: opening some devices, pipes or files of the program's
/// that took the number would have side effects.
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
