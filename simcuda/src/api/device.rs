//! Version, devices and their properties.

use super::{out, text};
use crate::driver::{driver, init, uuid_text, Driver};
use crate::errors::*;
use crate::types::*;
use core::ffi::{c_char, c_int, c_uint};

/// CUDA 12.8.
pub const VERSION: c_int = 12080;

fn gpu(d: &Driver, device: CUdevice) -> Res<usize> {
    usize::try_from(device)
        .ok()
        .and_then(|i| d.visible.get(i).copied())
        .ok_or(INVALID_DEVICE)
}

/// Attributes that real programs query; what a simulated GPU does not have is 0.
fn attribute(d: &Driver, gpu: usize, attribute: c_int) -> Res<c_int> {
    let t = &d.topology.gpu;
    Ok(match attribute {
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65535,
        8 => 48 << 10,
        9 => 64 << 10,
        10 => 32,
        11 => i32::MAX,
        12 | 82 => 65536,
        13 => t.clock_mhz * 1000,
        14 => 512,
        15 | 19 | 31 | 32 | 41 | 78 | 79 | 80 | 90 | 91 | 92 | 93 | 94 | 95 | 99 => 1,
        // Managed memory, touched from both sides at once; virtual memory management, and its file
        // descriptors; memory pools.
        83 | 89 | 102 | 103 | 115 => 1,
        16 => t.multiprocessors,
        33 => d.topology.pci_bus(gpu),
        36 => 2_619_000,
        37 => 5120,
        38 => t.l2_mib << 20,
        39 => 2048,
        40 => 3,
        51 => 32,
        75 => t.compute_capability[0],
        76 => t.compute_capability[1],
        81 => (t.shared_kib + 1) << 10,
        87 => 2,
        97 => t.shared_kib << 10,
        106 => 32,
        111 => 1024,
        133 => d.mps.into(),
        134 => d.topology.numa_node(gpu),
        known if (1..=160).contains(&known) => 0,
        _ => return Err(INVALID_VALUE),
    })
}

driver! {
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        init()
    }

    fn cuDriverGetVersion(version: *mut c_int) {
        out(version, VERSION)
    }

    fn cuDeviceGetCount(count: *mut c_int) {
        out(count, driver()?.visible.len() as c_int)
    }

    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) {
        gpu(driver()?, ordinal)?;
        out(device, ordinal)
    }

    fn cuDeviceGetName(name: *mut c_char, len: c_int, dev: CUdevice) {
        let d = driver()?;
        gpu(d, dev)?;
        copy_text(name, len, &d.topology.gpu.name)
    }

    fn cuDeviceGetUuid(uuid: *mut CUuuid, dev: CUdevice) {
        let d = driver()?;
        out(uuid, CUuuid { bytes: d.topology.uuid(gpu(d, dev)?) })
    }

    fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, dev: CUdevice) {
        let d = driver()?;
        out(uuid, CUuuid { bytes: d.topology.uuid(gpu(d, dev)?) })
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, dev: CUdevice) {
        let d = driver()?;
        gpu(d, dev)?;
        out(bytes, d.topology.memory_bytes() as usize)
    }

    fn cuDeviceGetAttribute(value: *mut c_int, attrib: c_int, dev: CUdevice) {
        let d = driver()?;
        out(value, attribute(d, gpu(d, dev)?, attrib)?)
    }

    fn cuDeviceComputeCapability(major: *mut c_int, minor: *mut c_int, dev: CUdevice) {
        let d = driver()?;
        gpu(d, dev)?;
        out(major, d.topology.gpu.compute_capability[0])?;
        out(minor, d.topology.gpu.compute_capability[1])
    }

    fn cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, dev: CUdevice) {
        let d = driver()?;
        copy_text(id, len, &d.topology.pci_id(gpu(d, dev)?))
    }

    fn cuDeviceGetByPCIBusId(dev: *mut CUdevice, id: CString) {
        let d = driver()?;
        let wanted = text(id)?.to_uppercase();
        let short = |full: &str| full.trim_start_matches("0000").to_string();
        let found = d.visible.iter().position(|g| {
            let full = d.topology.pci_id(*g);
            full == wanted || short(&full) == short(&wanted) || full.ends_with(&format!(":{wanted}"))
        });
        out(dev, found.ok_or(INVALID_DEVICE)? as CUdevice)
    }

    fn cuDeviceCanAccessPeer(can: *mut c_int, dev: CUdevice, peer: CUdevice) {
        let d = driver()?;
        let (a, b) = (gpu(d, dev)?, gpu(d, peer)?);
        out(can, c_int::from(a != b))
    }

    fn cuDeviceGetP2PAttribute(value: *mut c_int, attrib: c_int, src: CUdevice, dst: CUdevice) {
        let d = driver()?;
        let (a, b) = (gpu(d, src)?, gpu(d, dst)?);
        if a == b {
            return Err(INVALID_DEVICE);
        }
        let linked = d.topology.link_of(a, b).is_some() || d.topology.link.is_empty();
        let value_of = match attrib {
            // Performance rank: 0 is best.
            1 => c_int::from(!linked),
            2 => 1,
            3 => c_int::from(linked),
            4 => 1,
            5 => 0,
            _ => return Err(INVALID_VALUE),
        };
        out(value, value_of)
    }

    fn cuDeviceGetProperties(properties: *mut c_int, dev: CUdevice) {
        let d = driver()?;
        let g = gpu(d, dev)?;
        if properties.is_null() {
            return Err(INVALID_VALUE);
        }
        // CUdevprop: ten integers, of which three and three are arrays.
        for (i, a) in [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14].into_iter().enumerate() {
            out(properties.add(i), attribute(d, g, a)?)?;
        }
        Ok(())
    }

    fn cuDeviceGetExecAffinitySupport(support: *mut c_int, _kind: c_uint, dev: CUdevice) {
        gpu(driver()?, dev)?;
        out(support, 0)
    }
}

/// Copies a string with its NUL into the caller's buffer, cut to fit.
unsafe fn copy_text(to: *mut c_char, len: c_int, text: &str) -> Res {
    let len = usize::try_from(len)
        .ok()
        .filter(|l| *l > 0 && !to.is_null())
        .ok_or(INVALID_VALUE)?;
    let kept = text.len().min(len - 1);
    // SAFETY: the caller gave `len` writable bytes.
    unsafe {
        core::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), kept);
        to.add(kept).write(0);
    }
    Ok(())
}

/// UUID of a device as tools print it.
pub fn uuid_string(d: &Driver, gpu: usize) -> String {
    format!("GPU-{}", uuid_text(&d.topology.uuid(gpu)))
}
