//! IPC.

use super::out;
use crate::capture::illegal;
use crate::driver::driver;
use crate::errors::*;
use crate::event::{Event, EventState, DISABLE_TIMING, INTERPROCESS};
use crate::ops::finish;
use crate::types::*;
use core::ffi::c_uint;
use parking_lot::Mutex;
use std::sync::Arc;

driver! {
    fn cuIpcGetMemHandle(handle: *mut CUipcHandle, dptr: CUdeviceptr) {
        let d = driver()?;
        let st = d.state.lock();
        let a = st.memory.device_at(dptr).ok_or(INVALID_VALUE)?;
        out(handle, crate::ipc::export(d, a)?)
    }

    fn cuIpcOpenMemHandle_v2(dptr: *mut CUdeviceptr, handle: CUipcHandle, flags: c_uint) {
        let d = driver()?;
        if flags != 1 || dptr.is_null() {
            return Err(INVALID_VALUE);
        }
        let mut st = d.state.lock();
        illegal(&mut st)?;
        let context = st.context()?.0;
        let address = crate::ipc::open(d, &mut st, &handle, context)?;
        d.charge(d.topology.calls.ipc_open_us);
        out(dptr, address)
    }

    fn cuIpcCloseMemHandle(dptr: CUdeviceptr) {
        let d = driver()?;
        let tails = {
            let mut st = d.state.lock();
            let a = st.memory.device.get(&dptr).filter(|a| a.import.is_some()).ok_or(INVALID_VALUE)?;
            let context = a.context;
            illegal(&mut st)?;
            st.context_tails(context)
        };
        let _ = finish(d, &tails);
        let mut st = d.state.lock();
        let stays = st.memory.device.get(&dptr).is_some_and(|a| crate::ipc::close_one_of_several(a));
        if !stays {
            crate::alloc::release(d, &mut st, dptr);
        }
        drop(st);
        d.charge(d.topology.calls.ipc_open_us);
        Ok(())
    }

    fn cuIpcGetEventHandle(handle: *mut CUipcHandle, event: CUevent) {
        let d = driver()?;
        let event = d.state.lock().events.get(&event).cloned().ok_or(INVALID_HANDLE)?;
        out(handle, crate::ipc::export_event(d, &event)?)
    }

    fn cuIpcOpenEventHandle(event: *mut CUevent, handle: CUipcHandle) {
        let d = driver()?;
        let mut st = d.state.lock();
        let context = st.context()?.0;
        let shared = crate::ipc::open_event(d, &handle)?;
        let opened = Event {
            flags: DISABLE_TIMING | INTERPROCESS,
            context,
            state: Mutex::new(EventState::Empty),
            shared: Mutex::new(Some(shared)),
            opened: true,
        };
        let id = st.handle();
        st.events.insert(id, Arc::new(opened));
        out(event, id)
    }
}
