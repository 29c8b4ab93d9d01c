//! What the vendor's management library (NVML, `libnvidia-ml.so.1`) tells of GPUs and their links, for the simulated node.
//!
//! It sees all GPUs of the node, whatever `CUDA_VISIBLE_DEVICES` says, and needs no cuInit. Names, signatures and results are
//! those of NVML's reference; the rest of that library is not here.
#![allow(non_snake_case, clippy::missing_safety_doc)]

use crate::api;
use crate::driver::{flag, node, uuid_text};
use crate::topology::{Ancestor, FabricKind, Topology};
use core::ffi::{c_char, c_int, c_uint, c_void};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::OnceLock;

/// `nvmlDevice_t`: one more than the number of the GPU.
pub type Device = *mut c_void;

/// `nvmlPciInfo_t`.
#[repr(C)]
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy)]
pub struct PciInfo {
    pub bus_id_legacy: [c_char; 16],
    pub domain: c_uint,
    pub bus: c_uint,
    pub device: c_uint,
    pub pci_device_id: c_uint,
    pub pci_subsystem_id: c_uint,
    pub bus_id: [c_char; 32],
}

const SUCCESS: c_int = 0;
const UNINITIALIZED: c_int = 1;
const INVALID_ARGUMENT: c_int = 2;
const NOT_SUPPORTED: c_int = 3;
const NOT_FOUND: c_int = 6;
const INSUFFICIENT_SIZE: c_int = 7;
const DRIVER_NOT_LOADED: c_int = 9;
const UNKNOWN: c_int = 999;
/// nvmlIntNvLinkDeviceType_t.
const TO_GPU: c_uint = 0;
const TO_SWITCH: c_uint = 2;
/// nvmlGpuTopologyLevel_t.
const INTERNAL: c_uint = 0;
const SINGLE: c_uint = 10;
const MULTIPLE: c_uint = 20;
const HOSTBRIDGE: c_uint = 30;
const NODE_LEVEL: c_uint = 40;
const SYSTEM: c_uint = 50;
/// NVML_NVLINK_MAX_LINKS.
const LINKS_MAX: c_uint = 18;

type Result<T = ()> = core::result::Result<T, c_int>;

/// The node, once nvmlInit has succeeded.
static NODE: OnceLock<Topology> = OnceLock::new();

/// What is at the other end of a link.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Gpu(usize),
    Switch,
}

fn topology() -> Result<&'static Topology> {
    NODE.get().ok_or(UNINITIALIZED)
}

fn gpu(device: Device) -> Result<usize> {
    let count = topology()?.gpu.count;
    let number = (device as usize).checked_sub(1);
    number.filter(|gpu| *gpu < count).ok_or(INVALID_ARGUMENT)
}

fn handle(gpu: usize) -> Device {
    (gpu + 1) as Device
}

/// The other ends of a GPU's links, by the links' numbers.
fn ends(topology: &Topology, gpu: usize) -> Vec<End> {
    if topology.fabric.kind == FabricKind::Switch {
        let links = topology.fabric.links.unwrap_or(1);
        return (0..links).map(|_| End::Switch).collect();
    }
    let mut ends = Vec::new();
    for link in &topology.link {
        let other = match link.gpus {
            [a, b] if a == gpu => b,
            [a, b] if b == gpu => a,
            _ => continue,
        };
        ends.extend((0..link.links.unwrap_or(1)).map(|_| End::Gpu(other)));
    }
    ends
}

fn end_of(device: Device, link: c_uint) -> Result<End> {
    if link >= LINKS_MAX {
        return Err(INVALID_ARGUMENT);
    }
    let ends = ends(topology()?, gpu(device)?);
    ends.into_iter().nth(link as usize).ok_or(NOT_SUPPORTED)
}

/// # Safety
/// `to` is null or writable.
unsafe fn out<T>(to: *mut T, value: T) -> Result {
    // SAFETY: the caller's contract.
    unsafe { api::out(to, value) }.map_err(|_| INVALID_ARGUMENT)
}

/// A text and its NUL, in place of what is there.
fn fill(to: &mut [c_char], from: &str) {
    let last = to.len().saturating_sub(1);
    for (to, from) in to[..last].iter_mut().zip(from.bytes()) {
        *to = from as c_char;
    }
}

fn pci(topology: &Topology, gpu: usize) -> PciInfo {
    let bus = topology.pci_bus(gpu);
    let mut info = PciInfo {
        bus_id_legacy: [0; 16],
        domain: 0,
        bus: bus as c_uint,
        device: 0,
        pci_device_id: 0,
        pci_subsystem_id: 0,
        bus_id: [0; 32],
    };
    fill(&mut info.bus_id_legacy, &format!("0000:{bus:02X}:00.0"));
    fill(&mut info.bus_id, &topology.pci_id(gpu));
    info
}

macro_rules! nvml {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        #[no_mangle]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> c_int {
            // SAFETY: pointers are the C caller's, valid as NVML's contract says.
            #[allow(unused_unsafe)]
            let body = || -> Result { unsafe { $body } };
            match catch_unwind(AssertUnwindSafe(body)) {
                Ok(Ok(())) => SUCCESS,
                Ok(Err(code)) => code,
                Err(_) => UNKNOWN,
            }
        }
    )*};
}

nvml! {
    /// Makes the library ready.
    fn nvmlInit_v2() {
        if !flag("SIMCUDA_NVML", true) {
            return Err(DRIVER_NOT_LOADED);
        }
        if NODE.get().is_none() {
            let (topology, _) = node().map_err(|_| DRIVER_NOT_LOADED)?;
            let _ = NODE.set(topology);
        }
        Ok(())
    }

    /// Its counterpart; the node stays known.
    fn nvmlShutdown() {
        topology().map(|_| ())
    }

    /// How many GPUs there are.
    fn nvmlDeviceGetCount_v2(count: *mut c_uint) {
        out(count, topology()?.gpu.count as c_uint)
    }

    /// A GPU by its number.
    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut Device) {
        let found = handle(index as usize);
        gpu(found)?;
        out(device, found)
    }

    /// A GPU by its identity, `GPU-` and all.
    fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut Device) {
        let (wanted, topology) = (api::text(uuid).map_err(|_| INVALID_ARGUMENT)?, topology()?);
        let is_it = |gpu: &usize| format!("GPU-{}", uuid_text(&topology.uuid(*gpu))) == wanted;
        out(device, handle((0..topology.gpu.count).find(is_it).ok_or(NOT_FOUND)?))
    }

    /// A GPU's identity.
    fn nvmlDeviceGetUUID(device: Device, to: *mut c_char, length: c_uint) {
        let uuid = format!("GPU-{}", uuid_text(&topology()?.uuid(gpu(device)?)));
        if to.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        if (length as usize) <= uuid.len() {
            return Err(INSUFFICIENT_SIZE);
        }
        // The caller gave `length` writable bytes.
        let to = core::slice::from_raw_parts_mut(to, uuid.len() + 1);
        to.fill(0);
        fill(to, &uuid);
        Ok(())
    }

    /// A GPU's PCI address.
    fn nvmlDeviceGetPciInfo_v3(device: Device, info: *mut PciInfo) {
        out(info, pci(topology()?, gpu(device)?))
    }

    /// Whether a link is up. A link that the GPU does not have is not supported.
    fn nvmlDeviceGetNvLinkState(device: Device, link: c_uint, active: *mut c_uint) {
        end_of(device, link)?;
        out(active, 1)
    }

    /// The generation of a link.
    fn nvmlDeviceGetNvLinkVersion(device: Device, link: c_uint, version: *mut c_uint) {
        end_of(device, link)?;
        // Volta 2, Ampere 3, Hopper 4, Blackwell 5.
        let generation = topology()?.gpu.compute_capability[0] - 5;
        out(version, generation.clamp(1, 5) as c_uint)
    }

    /// What a link leads to.
    fn nvmlDeviceGetNvLinkRemoteDeviceType(device: Device, link: c_uint, kind: *mut c_uint) {
        let end = end_of(device, link)?;
        out(kind, if end == End::Switch { TO_SWITCH } else { TO_GPU })
    }

    /// The PCI address of what a link leads to. Of a switch it is that of no GPU.
    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(device: Device, link: c_uint, info: *mut PciInfo) {
        match end_of(device, link)? {
            End::Gpu(other) => out(info, pci(topology()?, other)),
            End::Switch => {
                let mut switch = pci(topology()?, 0);
                (switch.bus, switch.bus_id) = (1, [0; 32]);
                fill(&mut switch.bus_id, "00000000:01:00.0");
                out(info, switch)
            }
        }
    }

    /// What two GPUs have in common nearest on their ways to the host. Not supported where the node's file does not tell, which no
    /// real node does.
    fn nvmlDeviceGetTopologyCommonAncestor(device1: Device, device2: Device, level: *mut c_uint) {
        let (a, b) = (gpu(device1)?, gpu(device2)?);
        out(level, match topology()?.ancestor(a, b) {
            _ if a == b => INTERNAL,
            Some(Ancestor::Switch) => SINGLE,
            Some(Ancestor::Switches) => MULTIPLE,
            Some(Ancestor::Bridge) => HOSTBRIDGE,
            Some(Ancestor::Node) => NODE_LEVEL,
            Some(Ancestor::System) => SYSTEM,
            None => return Err(NOT_SUPPORTED),
        })
    }

    /// The generation of a GPU's PCIe link at its best.
    fn nvmlDeviceGetMaxPcieLinkGeneration(device: Device, generation: *mut c_uint) {
        gpu(device)?;
        // Volta 3, Ampere 4, Hopper 5, Blackwell 6.
        let of = topology()?.gpu.compute_capability[0] - 4;
        out(generation, of.clamp(1, 6) as c_uint)
    }

    /// Its lanes.
    fn nvmlDeviceGetMaxPcieLinkWidth(device: Device, width: *mut c_uint) {
        gpu(device)?;
        out(width, 16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peers(name: &str, gpu: usize) -> Vec<(usize, usize)> {
        let topology = Topology::load(name, None).unwrap().0;
        let ends = ends(&topology, gpu);
        let to = |other| ends.iter().filter(|end| **end == End::Gpu(other)).count();
        let counts = (0..topology.gpu.count).map(|other| (other, to(other)));
        counts.filter(|(_, count)| *count > 0).collect()
    }

    /// As `nvidia-smi topo -m` prints such nodes: six links a V100, twelve an A100.
    #[test]
    fn links_are_those_of_the_node() {
        assert_eq!(peers("beluga", 1), [(0, 2), (2, 2), (3, 2)]);
        assert_eq!(peers("narval", 3), [(0, 4), (1, 4), (2, 4)]);
        assert_eq!(peers("dgx1-v100", 0), [(1, 1), (2, 1), (3, 2), (4, 2)]);
        assert_eq!(peers("hgx-h200", 0), []);
        let switched = Topology::load("hgx-h200", None).unwrap().0;
        assert_eq!(ends(&switched, 7).len(), 18);
    }

    /// As programs go through the GPUs of a node: the eight of the default one, their links, and nothing beyond.
    #[test]
    fn gpus_are_found_by_number_and_by_identity() {
        let (mut count, mut kind, mut state) = (0, 9, 9);
        let (mut first, mut again) = (std::ptr::null_mut(), std::ptr::null_mut());
        let (mut text, mut info) = ([1; 80], pci(&Topology::load("beluga", None).unwrap().0, 1));
        // SAFETY: all pointers are to live locals of the lengths given.
        unsafe {
            assert_eq!(nvmlDeviceGetCount_v2(&raw mut count), UNINITIALIZED);
            assert_eq!(nvmlInit_v2(), SUCCESS);
            assert_eq!(nvmlDeviceGetCount_v2(&raw mut count), SUCCESS);
            assert_eq!(count, 8);
            assert_eq!(
                nvmlDeviceGetHandleByIndex_v2(8, &raw mut first),
                INVALID_ARGUMENT
            );
            assert_eq!(nvmlDeviceGetHandleByIndex_v2(5, &raw mut first), SUCCESS);
            assert_eq!(
                nvmlDeviceGetUUID(first, text.as_mut_ptr(), 40),
                INSUFFICIENT_SIZE
            );
            assert_eq!(nvmlDeviceGetUUID(first, text.as_mut_ptr(), 80), SUCCESS);
            assert_eq!(
                nvmlDeviceGetHandleByUUID(text.as_ptr(), &raw mut again),
                SUCCESS
            );
            assert_eq!(first, again);
            text[4] = b'x' as c_char;
            assert_eq!(
                nvmlDeviceGetHandleByUUID(text.as_ptr(), &raw mut again),
                NOT_FOUND
            );
            assert_eq!(nvmlDeviceGetPciInfo_v3(first, &raw mut info), SUCCESS);
            assert_eq!(info.bus, 0x68);
            assert_eq!(nvmlDeviceGetNvLinkState(first, 17, &raw mut state), SUCCESS);
            assert_eq!(
                nvmlDeviceGetNvLinkState(first, 18, &raw mut state),
                INVALID_ARGUMENT
            );
            assert_eq!(
                nvmlDeviceGetNvLinkRemoteDeviceType(first, 0, &raw mut kind),
                SUCCESS
            );
            assert_eq!((state, kind), (1, TO_SWITCH));
        }
    }
}
