//! Persistent requests (MPI 4.1 section 3.9).
//!
//! A persistent receive is native, and watched like any other. A persistent send of a device buffer is an
//! engine send at every start. Its handle is a persistent request to MPI_PROC_NULL that is never started,
//! because such handles are unique. A persistent send from host memory is native, and starts natively unless
//! its receiver wishes to fetch the message. Its handle is in the table of requests only while the engine
//! makes it.

use std::ffi::c_int;

use crate::engine::args::{Mode, SendArgs};
use crate::engine::completion::Requests;
use crate::engine::core::{Core, Entry};
use crate::engine::place::Place;
use crate::engine::requests::standing_request;
use crate::engine::types::TypeInfo;
use crate::engine::{native_send_init, types, Engine, Sorted, HOST_BYTES_MIN};
use crate::mpi::owned::{OwnRequest, OwnType};
use crate::mpi::{native, several, Abi, Comm, Request, Slot, StatusOut};
use crate::node::RTS_BYTES;

/// A persistent send of the engine's.
pub struct PersistentSend {
    args: SendArgs,
    /// The duplicate of the program's type that the arguments name.
    _datatype: OwnType,
    own: OwnRequest,
    pub(super) active: Option<usize>,
    /// The handle is that of a native persistent send of the same message.
    pub(super) is_native: bool,
}

impl PersistentSend {
    /// The communicator that every start sends on.
    pub(super) fn comm(&self) -> Comm {
        self.args.comm
    }

    /// Fills the status of its request, which is natively inactive.
    pub(super) fn empty(&mut self, status: StatusOut<'_>) {
        self.own.wait(status);
    }

    /// Frees what the request holds.
    pub(super) fn release(self, abi: &Abi) -> c_int {
        let code = self.own.free();
        debug_assert_eq!(code, abi.success);
        code
    }
}

impl Engine {
    /// Takes a persistent send over, if its buffer is in device memory, it is as long as an RTS, or its
    /// receiver may wish to fetch it; `None` if it stays native.
    pub fn send_init(&self, args: &SendArgs, request: Slot<'_, Request>) -> Option<c_int> {
        let abi = self.env.abi;
        if args.dest == abi.proc_null || args.count < 0 {
            return None;
        }
        let info = types::info(abi, args.datatype)?;
        let is_host = matches!(args.place(abi, &info), Place::Host(_));
        let bytes = info.bytes(args.count);
        let is_native = is_host && bytes != RTS_BYTES as u64;
        if is_native && (bytes < HOST_BYTES_MIN || !self.may_be_wished_for(args, &info)) {
            return None;
        }
        let code = self.take_persistent(args, is_native, request);
        Some(code.err().unwrap_or(abi.success))
    }

    /// Whether the receiver of a message from host memory might ever wish to fetch it.
    fn may_be_wished_for(&self, args: &SendArgs, info: &TypeInfo) -> bool {
        if args.mode == Mode::Buffered || !info.dense(args.count) {
            return false;
        }
        let stream = self.stream(args.comm, args.dest, args.tag);
        stream.is_some_and(|stream| {
            stream.peer != self.env.world_rank && self.env.node.peer(stream.peer).is_some()
        })
    }

    fn take_persistent(
        &self,
        args: &SendArgs,
        is_native: bool,
        request: Slot<'_, Request>,
    ) -> Result<(), c_int> {
        let abi = self.env.abi;
        let datatype = OwnType::duplicate(abi, args.datatype)?;
        let own = match is_native {
            true => OwnRequest::made(abi, |own| native_send_init(args, own))?,
            false => standing_request(abi, args.comm)?,
        };
        let handle = own.handle();
        let mut core = self.core.lock();
        // SAFETY: the same items by a duplicate of their type, which lasts as long as the request.
        let args = unsafe { args.with_payload(args.buffer, args.count, datatype.get()) };
        let id = core.persistents.insert(PersistentSend {
            args,
            _datatype: datatype,
            own,
            active: None,
            is_native,
        });
        if is_native {
            core.native_persistents.insert(handle, id);
        } else {
            core.table.insert(handle, Entry::Persistent(id));
        }
        request.write(abi, handle);
        Ok(())
    }

    /// `MPI_Start`.
    pub fn start(&self, request: Slot<'_, Request>) -> c_int {
        self.live();
        let handle = request.read(self.env.abi);
        let entry = self.core.lock().startable(handle);
        match entry {
            Some(Entry::Receive(id)) => {
                let mut core = self.core.lock();
                core.start_receive(&self.env, id);
                // Under the lock, so that nothing comes between its RTR and its place among the receives.
                core.native_of(id).start()
            }
            Some(Entry::Persistent(id)) => self.start_persistent(id, request),
            Some(Entry::Collective(id)) => self.start_collective(id),
            _ => {
                self.env.unseen.note_send();
                native::start(request)
            }
        }
    }

    fn start_persistent(&self, id: usize, request: Slot<'_, Request>) -> c_int {
        let (args, is_native) = {
            let send = &self.core.lock().persistents[id];
            (send.args, send.is_native)
        };
        let sorted = self.sort_send(&args);
        if is_native && !matches!(sorted, Sorted::Host(..)) {
            return native::start(request);
        }
        match self.start_sorted(&args, &sorted) {
            Ok(send) => {
                let mut core = self.core.lock();
                core.persistents[id].active = Some(send);
                if is_native {
                    let handle = core.persistents[id].own.handle();
                    core.table.insert(handle, Entry::Persistent(id));
                }
                self.env.abi.success
            }
            Err(code) => code,
        }
    }

    /// `MPI_Startall`.
    pub fn start_all(&self, requests: Requests<'_>) -> c_int {
        let abi = self.env.abi;
        if self.core.lock().starts_natively() {
            self.env.unseen.note_send();
            return several::startall(requests);
        }
        for i in 0..requests.len() {
            let code = self.start(requests.slot(abi, i));
            if code != abi.success {
                return code;
            }
        }
        abi.success
    }
}

impl Core {
    /// What a request is that the program starts, if the engine has a part in it.
    fn startable(&self, handle: Request) -> Option<Entry> {
        let native = || {
            self.native_persistents
                .get(&handle)
                .map(|id| Entry::Persistent(*id))
        };
        self.table.get(&handle).copied().or_else(native)
    }

    /// No request is one that the engine has a part in.
    fn starts_natively(&self) -> bool {
        self.table.is_empty() && self.native_persistents.is_empty()
    }

    /// A persistent request is freed: the engine has no part in it any more.
    pub(super) fn take_native_persistent(&mut self, handle: Request) -> Option<PersistentSend> {
        let id = self.native_persistents.remove(&handle)?;
        Some(self.persistents.remove(id))
    }
}
