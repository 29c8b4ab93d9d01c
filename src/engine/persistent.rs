//! Persistent requests (MPI 4.1 section 3.9).
//!
//! A persistent receive is native, and watched like any other. A persistent send of a device buffer is an
//! engine send at every start. Its handle is a persistent request to MPI_PROC_NULL that is never started,
//! because such handles are unique.

use std::ffi::{c_int, c_void};

use crate::engine::core::Entry;
use crate::engine::place::Place;
use crate::engine::requests::standing_request;
use crate::engine::send::SendArgs;
use crate::engine::{types, Engine};
use crate::mpi::{native, Abi, Handle};
use crate::node::RTS_BYTES;

/// A persistent send of the engine's.
pub struct PersistentSend {
    args: SendArgs,
    handle: Handle,
    pub(super) active: Option<usize>,
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
    /// Takes a persistent send over, if its buffer is in device memory or it is as long as an RTS;
    /// `None` if it stays native.
    ///
    /// # Safety
    /// The arguments are those of the program's call.
    pub unsafe fn send_init(&self, args: &SendArgs, request: *mut Handle) -> Option<c_int> {
        let abi = self.env.abi;
        if args.dest == abi.proc_null || args.count < 0 {
            return None;
        }
        // SAFETY: passed on.
        let (bytes, device) = unsafe { self.payload_of(args) }?;
        if !device && bytes != RTS_BYTES as u64 {
            return None;
        }
        let mut datatype = abi.datatype_null;
        // SAFETY: a live local; the program's handles.
        unsafe {
            let code = native::type_dup(args.datatype, &raw mut datatype);
            if code != abi.success {
                return Some(code);
            }
            let handle = match standing_request(abi, args.comm) {
                Ok(handle) => handle,
                Err(code) => {
                    native::type_free(&raw mut datatype);
                    return Some(code);
                }
            };
            let mut core = self.core.lock();
            let send = PersistentSend {
                args: SendArgs { datatype, ..*args },
                handle,
                active: None,
            };
            let id = core.persistents.insert(send);
            core.table.insert(handle, Entry::Persistent(id));
            abi.write(request, handle);
        }
        Some(abi.success)
    }

    /// Bytes of a message, and whether they lie in device memory; `None` if the datatype's layout is not
    /// known.
    unsafe fn payload_of(&self, args: &SendArgs) -> Option<(u64, bool)> {
        // SAFETY: the program's handle.
        let info = unsafe { types::info(self.env.abi, args.datatype) }?;
        // SAFETY: passed on.
        let place = unsafe { args.place(self.env.abi, &info) };
        Some((info.bytes(args.count), !matches!(place, Place::Host(_))))
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
        let entry = self.core.lock().table.get(&handle).copied();
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
        let started = unsafe {
            let sorted = self.sort_send(&args);
            self.start_sorted(&args, &sorted)
        };
        match started {
            Ok(send) => {
                self.core.lock().persistents[id].active = Some(send);
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
        if self.core.lock().table.is_empty() {
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
