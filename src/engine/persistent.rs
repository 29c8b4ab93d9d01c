//! Persistent requests (MPI 4.1 section 3.9).
//!
//! A persistent receive is native, and watched like any other. A persistent send of a device buffer is an
//! engine send at every start. Its handle is a persistent request to MPI_PROC_NULL that is never started,
//! because such handles are unique. A persistent send from host memory is native, and starts natively unless
//! its receiver wishes to fetch the message. Its handle is in the table of requests only while the engine
//! makes it.

use std::ffi::{c_int, c_void};

use crate::engine::core::{Core, Entry};
use crate::engine::place::Place;
use crate::engine::requests::standing_request;
use crate::engine::send::SendArgs;
use crate::engine::types::TypeInfo;
use crate::engine::{native_send_init, types, Engine, Mode, Sorted, HOST_BYTES_MIN};
use crate::mpi::{native, Abi, Handle};
use crate::node::RTS_BYTES;

/// A persistent send of the engine's.
pub struct PersistentSend {
    args: SendArgs,
    handle: Handle,
    pub(super) active: Option<usize>,
    /// The handle is that of a native persistent send of the same message.
    pub(super) is_native: bool,
}

impl PersistentSend {
    /// The communicator that every start sends on.
    pub(super) fn comm(&self) -> Handle {
        self.args.comm
    }

    /// Frees what the request holds.
    ///
    /// # Safety
    /// MPI may be called.
    pub(super) unsafe fn release(mut self, abi: &Abi) -> c_int {
        // SAFETY: both are ours.
        unsafe {
            native::type_free(&raw mut self.args.datatype);
            let code = native::request_free(&raw mut self.handle);
            debug_assert_eq!(code, abi.success);
            code
        }
    }
}

impl Engine {
    /// Takes a persistent send over, if its buffer is in device memory, it is as long as an RTS, or its
    /// receiver may wish to fetch it; `None` if it stays native.
    ///
    /// # Safety
    /// The arguments are those of the program's call.
    pub unsafe fn send_init(&self, args: &SendArgs, request: *mut Handle) -> Option<c_int> {
        let abi = self.env.abi;
        if args.dest == abi.proc_null || args.count < 0 {
            return None;
        }
        // SAFETY: the program's handle.
        let info = unsafe { types::info(abi, args.datatype) }?;
        // SAFETY: the arguments are the program's, and the type is theirs.
        let is_host = matches!(unsafe { args.place(abi, &info) }, Place::Host(_));
        let bytes = info.bytes(args.count);
        let is_native = is_host && bytes != RTS_BYTES as u64;
        if is_native && (bytes < HOST_BYTES_MIN || !self.may_be_wished_for(args, &info)) {
            return None;
        }
        // SAFETY: the arguments and the request are the program's.
        let code = unsafe { self.take_persistent(args, is_native, request) };
        Some(code.err().unwrap_or(abi.success))
    }

    /// Whether the receiver of a message from host memory might ever wish to fetch it.
    fn may_be_wished_for(&self, args: &SendArgs, info: &TypeInfo) -> bool {
        if args.mode == Mode::Buffered || !info.dense(args.count) {
            return false;
        }
        // SAFETY: the program's communicator.
        let stream = unsafe { self.stream(args.comm, args.dest, args.tag) };
        stream.is_some_and(|stream| {
            stream.peer != self.env.world_rank && self.env.node.peer(stream.peer).is_some()
        })
    }

    unsafe fn take_persistent(
        &self,
        args: &SendArgs,
        is_native: bool,
        request: *mut Handle,
    ) -> Result<(), c_int> {
        let abi = self.env.abi;
        let mut datatype = abi.datatype_null;
        // SAFETY: a live local; the program's handle.
        let code = unsafe { native::type_dup(args.datatype, &raw mut datatype) };
        if code != abi.success {
            return Err(code);
        }
        let mut own = abi.request_null;
        // SAFETY: a live local; the program's arguments.
        let made = unsafe {
            if is_native {
                let code = native_send_init(args, &raw mut own);
                if code == abi.success {
                    Ok(abi.normalize(own))
                } else {
                    Err(code)
                }
            } else {
                standing_request(abi, args.comm)
            }
        };
        let handle = made.inspect_err(|_| {
            // SAFETY: the copy made above.
            unsafe { native::type_free(&raw mut datatype) };
        })?;
        let mut core = self.core.lock();
        let id = core.persistents.insert(PersistentSend {
            args: SendArgs { datatype, ..*args },
            handle,
            active: None,
            is_native,
        });
        if is_native {
            core.native_persistents.insert(handle, id);
        } else {
            core.table.insert(handle, Entry::Persistent(id));
        }
        // SAFETY: the program's request.
        unsafe { abi.write(request, handle) };
        Ok(())
    }

    /// `MPI_Start`.
    ///
    /// # Safety
    /// The request is the program's.
    pub unsafe fn start(&self, request: *mut Handle) -> c_int {
        self.live();
        let abi = self.env.abi;
        // SAFETY: the program's request.
        let handle = unsafe { abi.read(request) };
        let entry = self.core.lock().startable(handle);
        match entry {
            Some(Entry::Receive(id)) => {
                let mut core = self.core.lock();
                // SAFETY: an inactive persistent request.
                unsafe { core.start_receive(&self.env, id) };
                let mut native = core.native_of(id);
                // Under the lock, so that nothing comes between its RTR and its place among the receives.
                // SAFETY: an inactive persistent request.
                unsafe { native::start(&raw mut native) }
            }
            // SAFETY: passed on.
            Some(Entry::Persistent(id)) => unsafe { self.start_persistent(id) },
            Some(Entry::Collective(id)) => self.start_collective(id),
            _ => {
                self.env.unseen.note_send();
                // SAFETY: passed on.
                unsafe { native::start(request) }
            }
        }
    }

    unsafe fn start_persistent(&self, id: usize) -> c_int {
        let args = self.core.lock().persistents[id].args;
        // SAFETY: the arguments of MPI_Send_init, whose buffer is the engine's from now until completion.
        let sorted = unsafe { self.sort_send(&args) };
        let (mut handle, is_native) = {
            let send = &self.core.lock().persistents[id];
            (send.handle, send.is_native)
        };
        if is_native && !matches!(sorted, Sorted::Host(..)) {
            // SAFETY: an inactive persistent request.
            return unsafe { native::start(&raw mut handle) };
        }
        // SAFETY: as above.
        match unsafe { self.start_sorted(&args, &sorted) } {
            Ok(send) => {
                let mut core = self.core.lock();
                core.persistents[id].active = Some(send);
                if is_native {
                    core.table.insert(handle, Entry::Persistent(id));
                }
                self.env.abi.success
            }
            Err(code) => code,
        }
    }

    /// `MPI_Startall`.
    ///
    /// # Safety
    /// The requests are the program's.
    pub unsafe fn start_all(&self, count: c_int, requests: *mut c_void) -> c_int {
        if self.core.lock().starts_natively() {
            self.env.unseen.note_send();
            // SAFETY: passed on.
            return unsafe { native::startall(count, requests) };
        }
        let abi = self.env.abi;
        for i in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the program's array.
            let code = unsafe {
                let mut request = abi.load(requests, i);
                let code = self.start(&raw mut request);
                abi.store(requests, i, request);
                code
            };
            if code != abi.success {
                return code;
            }
        }
        abi.success
    }
}

impl Core {
    /// What a request is that the program starts, if the engine has a part in it.
    fn startable(&self, handle: Handle) -> Option<Entry> {
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
    pub(super) fn take_native_persistent(&mut self, handle: Handle) -> Option<PersistentSend> {
        let id = self.native_persistents.remove(&handle)?;
        Some(self.persistents.remove(id))
    }
}
