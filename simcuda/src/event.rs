//! Events, local and shared between processes.

use crate::sched::OpState;
use crate::types::{CUgraph, CUgraphNode, Handle};
use parking_lot::Mutex;
use std::sync::Arc;

/// CU_EVENT_DISABLE_TIMING.
pub const DISABLE_TIMING: u32 = 2;
/// CU_EVENT_INTERPROCESS.
pub const INTERPROCESS: u32 = 4;

/// An event.
pub struct Event {
    /// Flags of cuEventCreate.
    pub flags: u32,
    /// Context it was made in.
    pub context: Handle,
    /// What was recorded last.
    pub state: Mutex<EventState>,
    /// Row and identity in the node's table when other processes can open it.
    pub shared: Mutex<Option<(usize, u64)>>,
    /// Another process's: it cannot be handed on.
    pub opened: bool,
}

impl Drop for Event {
    /// A shared event's row goes with the last handle; a pending record holds one.
    fn drop(&mut self) {
        if let (Some((row, id)), Ok(d)) = (*self.shared.get_mut(), crate::driver::driver()) {
            crate::ipc::drop_event(d, row, id);
        }
    }
}

/// What an event stands for.
#[derive(Clone)]
pub enum EventState {
    /// Nothing was recorded yet: complete.
    Empty,
    /// An operation of this process.
    Recorded(Arc<OpState>),
    /// Recorded in a stream that is being captured.
    Captured(CUgraph, Vec<CUgraphNode>),
}
