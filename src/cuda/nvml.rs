//! NVLinks and PCIe links of GPUs, and how far they are apart by PCIe, from NVML if it is there.
//!
//! Starting NVML may take long if nothing keeps the driver's state of idle GPUs. So no thread that messages
//! wait for starts it.

use std::ffi::{c_char, c_int, c_uint, c_void, CStr, CString};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

type Handle = *mut c_void;

/// Domain, bus, device and function, as `domain << 16 | bus << 8 | device << 3 | function`.
pub type PciAddress = u64;

/// `domain:bus:device.function` as a number that sorts as they do. The domain is written with four digits or
/// eight.
#[must_use]
pub fn pci_number(text: &str) -> Option<PciAddress> {
    let mut number = 0;
    let mut parts = text.split([':', '.']);
    for bits in [32, 8, 5, 3] {
        let part = u64::from_str_radix(parts.next()?, 16).ok()?;
        number = number << bits | Some(part).filter(|part| part >> bits == 0)?;
    }
    parts.next().is_none().then_some(number)
}

/// `nvmlPciInfo_t`.
#[repr(C)]
struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    pci_device_id: c_uint,
    pci_subsystem_id: c_uint,
    bus_id: [c_char; 32],
}

impl PciInfo {
    /// To be written to.
    fn new() -> PciInfo {
        PciInfo {
            bus_id_legacy: [0; 16],
            domain: 0,
            bus: 0,
            device: 0,
            pci_device_id: 0,
            pci_subsystem_id: 0,
            bus_id: [0; 32],
        }
    }

    fn address(&self) -> Option<PciAddress> {
        // SAFETY: NVML writes a text that ends within its 32 bytes, and it was zeros before.
        let text = unsafe { CStr::from_ptr(self.bus_id.as_ptr()) };
        pci_number(text.to_str().ok()?)
    }
}

/// GPUs of a machine that are looked at.
const SHOWN_MAX: c_uint = 64;
/// Links that a GPU may have by NVML (NVML_NVLINK_MAX_LINKS).
const LINKS: c_uint = 18;
/// What is at a link's other end (nvmlIntNvLinkDeviceType_t).
const GPU: c_uint = 0;
const PROCESSOR: c_uint = 1;

/// NVML, initialized.
pub struct Nvml {
    library: Library,
}

/// What NVML says of one GPU.
#[derive(Debug, Default)]
pub struct Links {
    /// Links that are up and lead to a switch.
    pub to_switch: u32,
    /// For each link that is up and leads to a GPU, the PCI address of that GPU.
    pub to_gpus: Vec<PciAddress>,
    /// Rate of one link in one direction, GB/s.
    pub link_gb_s: Option<f64>,
    /// Rate of the PCIe link in one direction, GB/s.
    pub pcie_gb_s: Option<f64>,
}

impl Links {
    /// The GPUs that links lead to, and how many lead to each.
    #[must_use]
    pub fn by_end(&self) -> Vec<(PciAddress, u32)> {
        let mut ends: Vec<(PciAddress, u32)> = Vec::new();
        for end in &self.to_gpus {
            match ends.iter_mut().find(|(known, _)| known == end) {
                Some((_, count)) => *count += 1,
                None => ends.push((*end, 1)),
            }
        }
        ends
    }
}

macro_rules! call {
    ($nvml:expr, $name:literal, ($($value:expr => $type:ty),*)) => {{
        // SAFETY: NVML's header gives the function of this name this signature, and 0 for success; what it
        // writes through pointers are the live locals that the callers below give it.
        unsafe {
            $nvml
                .library
                .get::<unsafe extern "C" fn($($type),*) -> c_int>($name)
                .is_ok_and(|function| function($($value),*) == 0)
        }
    }};
}

impl Nvml {
    /// Starts NVML. `None` if there is none, or none that works.
    #[must_use]
    pub fn open() -> Option<Nvml> {
        // SAFETY: loading the system's library runs its initializers, which is what they are for.
        let library =
            unsafe { Library::open(Some("libnvidia-ml.so.1"), RTLD_NOW | RTLD_LOCAL) }.ok()?;
        let nvml = Nvml { library };
        call!(nvml, b"nvmlInit_v2\0", ()).then_some(nvml)
    }

    fn gpu(&self, uuid: &str) -> Option<Handle> {
        let uuid = CString::new(uuid).ok()?;
        let mut gpu: Handle = std::ptr::null_mut();
        call!(self, b"nvmlDeviceGetHandleByUUID\0", (uuid.as_ptr() => *const c_char, &raw mut gpu => *mut Handle))
            .then_some(gpu)
    }

    /// How far two GPUs are apart by PCIe (`nvmlGpuTopologyLevel_t`). `None` if NVML does not say.
    #[must_use]
    pub fn common_ancestor(&self, uuid: &str, other: &str) -> Option<c_uint> {
        let (gpu, other) = (self.gpu(uuid)?, self.gpu(other)?);
        let mut level: c_uint = 0;
        call!(self, b"nvmlDeviceGetTopologyCommonAncestor\0", (gpu => Handle, other => Handle, &raw mut level => *mut c_uint))
            .then_some(level)
    }

    /// The other GPUs of the machine, by their PCI addresses, as far as NVML shows them (including those that
    /// this process may not use), and how far each is apart from the GPU of this identity by PCIe
    /// (`nvmlGpuTopologyLevel_t`).
    #[must_use]
    pub fn apart(&self, uuid: &str) -> Vec<(PciAddress, c_uint)> {
        let mut count: c_uint = 0;
        if !call!(self, b"nvmlDeviceGetCount_v2\0", (&raw mut count => *mut c_uint)) {
            return Vec::new();
        }
        let Some(gpu) = self.gpu(uuid) else {
            return Vec::new();
        };
        let apart = |index: c_uint| {
            let mut other: Handle = std::ptr::null_mut();
            let mut info = PciInfo::new();
            let mut level: c_uint = 0;
            let is_told = call!(self, b"nvmlDeviceGetHandleByIndex_v2\0", (index => c_uint, &raw mut other => *mut Handle))
                && other != gpu
                && call!(self, b"nvmlDeviceGetPciInfo_v3\0", (other => Handle, &raw mut info => *mut PciInfo))
                && call!(self, b"nvmlDeviceGetTopologyCommonAncestor\0", (gpu => Handle, other => Handle, &raw mut level => *mut c_uint));
            is_told.then(|| Some((info.address()?, level))).flatten()
        };
        (0..count.min(SHOWN_MAX)).filter_map(apart).collect()
    }

    /// What NVML says of the GPU of this identity.
    #[must_use]
    pub fn links(&self, uuid: &str) -> Option<Links> {
        let gpu = self.gpu(uuid)?;
        let mut links = Links {
            pcie_gb_s: self.pcie(gpu),
            ..Links::default()
        };
        for link in 0..LINKS {
            let mut active: c_uint = 0;
            let known = call!(self, b"nvmlDeviceGetNvLinkState\0", (gpu => Handle, link => c_uint, &raw mut active => *mut c_uint));
            if !known || active == 0 {
                continue;
            }
            let mut version: c_uint = 0;
            if call!(self, b"nvmlDeviceGetNvLinkVersion\0", (gpu => Handle, link => c_uint, &raw mut version => *mut c_uint))
            {
                links.link_gb_s = nvlink_gb_s(version);
            }
            let mut kind: c_uint = GPU;
            // An older NVML does not say; it does not know switches either. A device that is neither a GPU
            // nor a processor is a switch.
            let _ = call!(self, b"nvmlDeviceGetNvLinkRemoteDeviceType\0", (gpu => Handle, link => c_uint, &raw mut kind => *mut c_uint));
            match kind {
                GPU => links.to_gpus.extend(self.remote(gpu, link)),
                PROCESSOR => {}
                _ => links.to_switch += 1,
            }
        }
        Some(links)
    }

    fn remote(&self, gpu: Handle, link: c_uint) -> Option<PciAddress> {
        let mut info = PciInfo::new();
        call!(self, b"nvmlDeviceGetNvLinkRemotePciInfo_v2\0", (gpu => Handle, link => c_uint, &raw mut info => *mut PciInfo))
            .then(|| info.address())
            .flatten()
    }

    fn pcie(&self, gpu: Handle) -> Option<f64> {
        let (mut generation, mut width): (c_uint, c_uint) = (0, 0);
        // The most it can: an idle link may be slower for now.
        let known = call!(self, b"nvmlDeviceGetMaxPcieLinkGeneration\0", (gpu => Handle, &raw mut generation => *mut c_uint))
            && call!(self, b"nvmlDeviceGetMaxPcieLinkWidth\0", (gpu => Handle, &raw mut width => *mut c_uint));
        known.then(|| pcie_gb_s(generation, width)).flatten()
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        let _ = call!(self, b"nvmlShutdown\0", ());
    }
}

/// NVIDIA's rate of one NVLink and direction.
fn nvlink_gb_s(version: u32) -> Option<f64> {
    match version {
        1 => Some(20.0),
        2 | 3 => Some(25.0),
        4 => Some(26.562),
        5 => Some(50.0),
        _ => None,
    }
}

/// PCI-SIG's rate of a link and direction: 2.5 GT/s a lane and doubled, in codes of 8b/10b, then 128b/130b.
fn pcie_gb_s(generation: u32, width: u32) -> Option<f64> {
    let lane = match generation {
        1 => 0.25,
        2 => 0.5,
        3 => 0.985,
        4 => 1.969,
        5 => 3.938,
        6 => 7.563,
        _ => return None,
    };
    (width > 0).then(|| lane * f64::from(width))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_sort_as_they_are_written() {
        let number = |text| pci_number(text).expect("an address");
        assert_eq!(number("0000:18:00.0"), 0x18 << 8);
        assert_eq!(number("00000000:3B:00.0"), number("0000:3b:00.0"));
        assert_eq!(
            number("00000001:3b:02.1"),
            0x1_0000 | 0x3b << 8 | 2 << 3 | 1
        );
        assert!(number("0000:ff:1f.7") < number("0001:00:00.0"));
        for bad in ["", "none", "0000:18:00", "0000:118:00.0", "0000:18:00.0.0"] {
            assert_eq!(pci_number(bad), None, "{bad}");
        }
    }

    /// PCI-SIG: 15.75 GB/s over 16 lanes of PCIe 3, 63 over those of PCIe 5.
    #[test]
    fn rates_are_those_of_the_standard() {
        assert!((pcie_gb_s(3, 16).expect("known") - 15.75).abs() < 0.02);
        assert!((pcie_gb_s(5, 16).expect("known") - 63.0).abs() < 0.02);
        assert_eq!(pcie_gb_s(0, 16), None);
    }
}
