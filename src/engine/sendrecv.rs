//! Operations that the program holds: waited for at once, or under a request; single, or a send with a
//! receive.

use std::ffi::c_int;

use crate::engine::args::{RecvArgs, SendArgs};
use crate::engine::receive::{Plan, Watch};
use crate::engine::send::Sorted;
use crate::engine::wait::Attending;
use crate::engine::Engine;
use crate::mpi::{native, Comm, Request, Slot, StatusOut};
use crate::stats::Reason;

/// A send and a receive that complete together. Without a receive, that is from MPI_PROC_NULL.
#[derive(Debug)]
pub struct Pair<'a> {
    send: usize,
    receive: Option<usize>,
    /// Held until they are waited for.
    attending: Option<Attending<'a>>,
}

/// How a send and a receive complete together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairWay {
    /// The call waits for them.
    Waits,
    /// Under one request.
    Request,
    /// Under one request that the MPI library has no function for.
    OwnRequest,
}

impl Engine {
    /// Waits for an engine send.
    pub fn await_send(&self, id: usize) -> c_int {
        self.core.lock().hurry(id);
        self.until(|engine, core| {
            if !engine.look_at_send(core, id) {
                core.progress_wanted = core.awaits_receiver(id);
                return None;
            }
            Some(core.retire_send(&engine.env, id))
        })
    }

    /// Gives the program a request for a send.
    pub fn hand_out_send(&self, id: usize, request: Slot<'_, Request>) -> c_int {
        self.core.lock().give_request(&self.env, id, request)
    }

    /// Waits for a receive.
    pub fn await_receive(&self, id: usize, status: StatusOut<'_>) -> c_int {
        self.until(|engine, core| {
            engine
                .look_at_receive(core, id)
                .then(|| core.finish_receive(&engine.env, id, status))
        })
    }

    /// Gives the program the request of a receive.
    pub fn hand_out_receive(&self, id: usize, request: Slot<'_, Request>) -> c_int {
        self.core.lock().hand_out_receive(self.env.abi, id, request)
    }

    /// Starts a send and a receive; `None` if both can be left to MPI. With `replace`, the send's buffer is
    /// the receive's too, and is copied first.
    pub fn start_pair(
        &self,
        send: &SendArgs,
        receive: &RecvArgs,
        way: PairWay,
        replace: bool,
    ) -> Result<Option<Pair<'_>>, c_int> {
        let sorted = self.sort_send(send);
        let native_send = matches!(sorted, Sorted::Native);
        let watch = if way != PairWay::Waits || !native_send {
            Watch::Always
        } else {
            Watch::IfLive
        };
        let plan = self.plan_receive(receive, watch)?;
        let is_for_mpi = native_send && matches!(plan, Plan::Native);
        if is_for_mpi && way != PairWay::OwnRequest {
            return Ok(None);
        }
        let copied = if replace {
            Some(self.start_replaced(send, &sorted)?)
        } else {
            None
        };
        // Both ranks of an exchange post their receives and then send, mostly at the same time.
        let attending = (way == PairWay::Waits).then(|| self.attend());
        let received = match plan {
            Plan::Native if receive.source == self.env.abi.proc_null => None,
            Plan::Native => Some(self.post_irecv(self.watch_native(receive))?),
            Plan::Watched(prepared) => Some(self.post_irecv(prepared)?),
        };
        let sent = match copied {
            Some(sent) => Ok(sent),
            None => self.start_sorted(send, &sorted),
        };
        if let (Err(_), Some(receive)) = (&sent, received) {
            self.core.lock().abandon(&self.env, receive);
        }
        sent.map(|sent| {
            Some(Pair {
                send: sent,
                receive: received,
                attending,
            })
        })
    }

    fn start_replaced(&self, send: &SendArgs, sorted: &Sorted) -> Result<usize, c_int> {
        match sorted {
            Sorted::Device(buffer, info) => {
                self.start_value_send(send, buffer, info, Reason::Replace)
            }
            Sorted::Parts(layout, info) => self.start_parts_send(send, layout, info),
            _ if send.dest == self.env.abi.proc_null => self.start_native_send(send, None),
            _ => self.start_copied_send(send),
        }
    }

    /// Waits for both.
    pub fn await_pair(&self, mut pair: Pair<'_>, status: StatusOut<'_>) -> c_int {
        let Some(receive) = pair.receive else {
            pair.attending = None;
            let sent = self.await_send(pair.send);
            let received = self.receive_nothing(status);
            return if sent == self.env.abi.success {
                received
            } else {
                sent
            };
        };
        self.until(|engine, core| {
            pair.attending = None;
            let received = engine.look_at_receive(core, receive);
            let complete = engine.look_at_send(core, pair.send) && received;
            core.progress_wanted |= !complete && core.awaits_receiver(pair.send);
            complete.then(|| {
                let sent = core.retire_send(&engine.env, pair.send);
                let received = core.finish_receive(&engine.env, receive, status);
                if sent == engine.env.abi.success {
                    received
                } else {
                    sent
                }
            })
        })
    }

    /// What a receive from MPI_PROC_NULL returns.
    fn receive_nothing(&self, status: StatusOut<'_>) -> c_int {
        let abi = self.env.abi;
        let (nothing, byte) = (std::ptr::null_mut(), abi.byte);
        let (nobody, comm) = (abi.proc_null, abi.comm_self);
        // SAFETY: no buffer is touched.
        unsafe { native::recv(nothing, 0, byte, nobody, abi.any_tag, comm, status) }
    }

    /// Gives the program one request for both.
    pub fn hand_out_pair(&self, pair: Pair<'_>, request: Slot<'_, Request>) -> c_int {
        match pair.receive {
            Some(receive) => {
                self.core.lock().set_companion(receive, pair.send);
                self.hand_out_receive(receive, request)
            }
            None => {
                self.core.lock().sends[pair.send].stands_for_null = true;
                self.hand_out_send(pair.send, request)
            }
        }
    }

    /// A communicator is about to be freed. False if it must not be: a persistent engine send, which natively
    /// would hold a reference, starts messages on it. It is then kept for the life of the program.
    pub fn part_with(&self, comm: Comm) -> bool {
        let mut core = self.core.lock();
        core.keep_identity(self.env.abi, comm);
        let comm = self.env.abi.normalize(comm);
        !core
            .persistents
            .iter()
            .any(|(_, send)| self.env.abi.normalize(send.comm()) == comm)
    }
}
