//! What a pointer is.

use super::{array, out};
use crate::driver::{driver, Driver};
use crate::errors::*;
use crate::memory::{Allocation, HostRegion, Kind};
use crate::ops::finish;
use crate::state::State;
use crate::types::*;
use core::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;

enum Known {
    Device(Arc<Allocation>),
    Host(Arc<HostRegion>),
}

fn find(st: &State, address: u64) -> Option<Known> {
    let device = st
        .memory
        .device_at(address)
        .map(|a| Known::Device(a.clone()));
    device.or_else(|| st.memory.host_at(address).map(|r| Known::Host(r.clone())))
}

fn ordinal_of(d: &Driver, st: &State, context: CUcontext, gpu: Option<usize>) -> c_int {
    let seen = gpu.and_then(|g| d.ordinal(g));
    let opened = || st.contexts.get(&context).map_or(0, |c| c.ordinal);
    seen.unwrap_or_else(opened) as c_int
}

/// CUmemAccess_flags of the current context's device, of the memory's own where there is none.
fn access(d: &Driver, st: &State, a: &Allocation) -> u32 {
    let own = d.ordinal(a.gpu).unwrap_or(0);
    let ordinal = st.context().map_or(own, |(_, c)| c.ordinal);
    match &a.kind {
        Kind::Mapped(m) => m.access_of(ordinal as c_int),
        _ => 3,
    }
}

/// Address and size of the reservation that a mapping is in.
fn reservation(known: &Known) -> Option<(u64, u64)> {
    match known {
        Known::Device(a) => match &a.kind {
            Kind::Mapped(m) => Some(m.reservation()),
            _ => None,
        },
        Known::Host(_) => None,
    }
}

/// Writes one attribute. `Err` for attributes that this kind of memory does not have.
#[allow(
    clippy::too_many_lines,
    reason = "one arm for each attribute of the driver's"
)]
unsafe fn write(
    d: &Driver,
    st: &State,
    known: &Known,
    attribute: c_uint,
    address: u64,
    data: *mut c_void,
) -> Res {
    let (context, start, size, buffer) = match known {
        Known::Device(a) => (a.context, a.address, a.size, a.buffer),
        Known::Host(r) => (r.context, r.address, r.size, r.buffer),
    };
    let device = matches!(known, Known::Device(_));
    let managed = matches!(known, Known::Device(a) if matches!(a.kind, Kind::Managed));
    // SAFETY: the caller gave room for this attribute's type.
    unsafe {
        match attribute {
            // Null for pool memory and mappings.
            1 => out(data.cast(), context),
            2 => out(
                data.cast(),
                if device {
                    MEMORYTYPE_DEVICE
                } else {
                    MEMORYTYPE_HOST
                },
            ),
            3 => out(data.cast(), address),
            4 if device && !managed => Err(INVALID_VALUE),
            4 => out(data.cast(), address),
            5 if device => out(data.cast(), [0u64; 2]),
            5 => Err(INVALID_VALUE),
            6 => match known {
                Known::Device(a) => out(data.cast(), c_int::from(a.sync_memops.load(Relaxed))),
                Known::Host(_) => out(data.cast(), 0 as c_int),
            },
            7 => out(data.cast(), buffer),
            8 => out(data.cast::<u8>(), u8::from(managed)),
            9 => {
                let gpu = match known {
                    Known::Device(a) => Some(a.gpu),
                    Known::Host(_) => None,
                };
                out(data.cast(), ordinal_of(d, st, context, gpu))
            }
            10 => match known {
                Known::Device(a) => {
                    let capable = a.import.is_none() && matches!(a.kind, Kind::Plain);
                    out(data.cast::<u8>(), u8::from(capable))
                }
                Known::Host(_) => out(data.cast::<u8>(), 0),
            },
            // Of a mapping, the reservation that it is in.
            11 => out(data.cast(), reservation(known).map_or(start, |r| r.0)),
            12 => out(
                data.cast(),
                reservation(known).map_or(size, |r| r.1) as usize,
            ),
            13 => out(data.cast::<u8>(), 1),
            14 => out(
                data.cast(),
                match known {
                    Known::Device(a) => match &a.kind {
                        Kind::Mapped(m) => u64::from(m.handle_types()),
                        _ => 0,
                    },
                    Known::Host(_) => 0,
                },
            ),
            15 => {
                let plain = |a: &Allocation| a.import.is_none() && matches!(a.kind, Kind::Plain);
                let capable = matches!(known, Known::Device(a) if plain(a));
                out(data.cast::<u8>(), u8::from(capable))
            }
            16 => match known {
                Known::Device(a) => out(data.cast(), access(d, st, a)),
                Known::Host(_) => out(data.cast(), 3u32),
            },
            17 => match known {
                Known::Device(a) => match a.kind {
                    Kind::Pool(handle) => out(data.cast(), handle),
                    _ => out(data.cast(), 0usize),
                },
                Known::Host(_) => out(data.cast(), 0usize),
            },
            // The vendor's driver may name the larger mapping that a pool's memory is cut from.
            18 => {
                let large = match known {
                    Known::Device(a) => !matches!(a.kind, Kind::Pool(_)) && a.import.is_none(),
                    Known::Host(r) => r.owned,
                };
                let page = if large { crate::virt::GRANULARITY } else { 1 };
                out(data.cast(), size.next_multiple_of(page) as usize)
            }
            19 => out(data.cast(), start),
            20 => match known {
                Known::Device(a) => out(data.cast(), a.space),
                Known::Host(r) => out(data.cast(), r.buffer),
            },
            _ => Err(INVALID_VALUE),
        }
    }
}

/// Bytes of an attribute, for the zeros that an unknown pointer gets.
fn width(attribute: c_uint) -> usize {
    match attribute {
        2 | 6 | 9 | 16 => 4,
        8 | 10 | 13 | 15 | 21 => 1,
        5 => 16,
        _ => 8,
    }
}

driver! {
    fn cuPointerGetAttribute(data: *mut c_void, attribute: c_uint, ptr: CUdeviceptr) {
        let d = driver()?;
        if data.is_null() {
            return Err(INVALID_VALUE);
        }
        let st = d.state.lock();
        let known = find(&st, ptr).ok_or(INVALID_VALUE)?;
        write(d, &st, &known, attribute, ptr, data)
    }

    /// Succeeds for any pointer: what the driver does not know reads as zero.
    fn cuPointerGetAttributes(count: c_uint, attributes: *mut c_uint, data: *mut *mut c_void, ptr: CUdeviceptr) {
        let d = driver()?;
        if count == 0 {
            return Err(INVALID_VALUE);
        }
        let attributes = array(attributes, count as usize)?;
        let data = array(data, count as usize)?;
        let st = d.state.lock();
        let known = find(&st, ptr);
        for (attribute, to) in attributes.into_iter().zip(data) {
            if to.is_null() || attribute == 0 || attribute > 21 {
                return Err(INVALID_VALUE);
            }
            let written = known.as_ref().map(|k| write(d, &st, k, attribute, ptr, to));
            if !matches!(written, Some(Ok(()))) {
                core::ptr::write_bytes(to.cast::<u8>(), 0, width(attribute));
                if attribute == 9 {
                    // No device: -2 is what the driver answers for a pointer it does not know.
                    out(to.cast(), -2 as c_int)?;
                }
            }
        }
        Ok(())
    }

    fn cuPointerSetAttribute(value: *const c_void, attribute: c_uint, ptr: CUdeviceptr) {
        let d = driver()?;
        let value = super::load(value.cast::<c_uint>())?;
        let mut st = d.state.lock();
        crate::capture::illegal(&mut st)?;
        if attribute != 6 {
            return Err(INVALID_VALUE);
        }
        if st.memory.host_at(ptr).is_some() {
            // Copies to and from the host wait as it is.
            return Ok(());
        }
        let a = st.memory.device_at(ptr).ok_or(INVALID_VALUE)?;
        // As on hardware (driver 580): refused of mappings; of pool memory taken, and nothing comes of it.
        if matches!(a.kind, Kind::Mapped(_)) {
            return Err(NOT_SUPPORTED);
        }
        a.sync_memops.store(value != 0, Relaxed);
        if matches!(a.kind, Kind::Pool(_)) {
            return Ok(());
        }
        let legacy = st.contexts.get(&a.context).and_then(|c| st.streams.get(&c.legacy));
        let pending: Vec<_> = legacy.and_then(|s| s.tail.clone()).into_iter().collect();
        drop(st);
        if value == 0 || pending.is_empty() {
            return Ok(());
        }
        // "Synchronous" calls that returned early are drained.
        finish(d, &pending)
    }
}
