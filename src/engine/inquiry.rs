//! What is known of a request of the program's, for a program that asks (`include/anabranch.h`).

use crate::engine::core::Entry;
use crate::engine::{engine, Engine};
use crate::mpi::{guard, Request, Slot};
use crate::transfer::story::Story;

impl Engine {
    /// What is known of an engine request that is not complete towards the program.
    fn story(&self, handle: Request) -> Option<Story> {
        let core = self.core.lock();
        match *core.table.get(&handle)? {
            Entry::Receive(id) => Some(core.receives[id].story()),
            Entry::Send(id) => Some(core.sends[id].story()),
            Entry::Collective(_) => None,
            Entry::Persistent(id) => Some(match core.persistents[id].active {
                Some(send) => core.sends[send].story(),
                None => Story {
                    is_send: true,
                    ..Story::default()
                },
            }),
        }
    }
}

/// What is known of a request. `None` if it is not the engine's.
pub fn of_request(request: Slot<'_, Request>) -> Option<Story> {
    // Not in a forked child, where a thread that does not exist there may hold the lock, nor once MPI is
    // being finalized.
    let engine = engine().filter(|_| guard::armed())?;
    engine.story(request.read(engine.env.abi))
}

/// The clock of a simulated node, ns. `None` where there is none.
pub fn simulated_ns() -> Option<u64> {
    crate::cuda::simulated_ns()
}
