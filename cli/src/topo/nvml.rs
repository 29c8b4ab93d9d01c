//! NVLinks and PCIe links of GPUs, from NVML where it is there.

use std::ffi::{c_char, c_int, c_uint, c_void, CStr, CString};

use anabranch_engine::topology::found::NvLinks;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

type Handle = *mut c_void;

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

/// Links that a GPU may have by NVML (NVML_NVLINK_MAX_LINKS).
const LINKS: c_uint = 18;
/// What is at a link's other end (nvmlIntNvLinkDeviceType_t).
const GPU: c_uint = 0;
const SWITCH: c_uint = 2;

/// NVML, initialized.
pub struct Nvml {
    library: Library,
}

/// What NVML says of one GPU.
#[derive(Debug, Default)]
pub struct Links {
    /// Its NVLinks; those that lead to GPUs name their PCI addresses.
    pub to_switch: u32,
    /// PCI address of a GPU that a link leads to, a link each.
    pub to_gpus: Vec<String>,
    /// Rate of a link and direction, GB/s.
    pub link_gb_s: Option<f64>,
    /// Rate of the PCIe link and direction, GB/s.
    pub pcie_gb_s: Option<f64>,
}

macro_rules! call {
    ($nvml:expr, $name:literal, ($($value:expr => $type:ty),*)) => {{
        // SAFETY: NVML's header gives the function of this name this signature, and 0 for success; what it writes
        // through pointers are the live locals that the callers below give it.
        unsafe {
            $nvml
                .library
                .get::<unsafe extern "C" fn($($type),*) -> c_int>($name)
                .is_ok_and(|function| function($($value),*) == 0)
        }
    }};
}

impl Nvml {
    /// `None` where there is no NVML, or none that works.
    pub fn open() -> Option<Nvml> {
        // SAFETY: loading the system's library runs its initializers, which is what they are for.
        let library =
            unsafe { Library::open(Some("libnvidia-ml.so.1"), RTLD_NOW | RTLD_LOCAL) }.ok()?;
        let nvml = Nvml { library };
        call!(nvml, b"nvmlInit_v2\0", ()).then_some(nvml)
    }

    /// What it says of the GPU of this identity.
    pub fn links(&self, uuid: &str) -> Option<Links> {
        let uuid = CString::new(uuid).ok()?;
        let mut gpu: Handle = std::ptr::null_mut();
        if !call!(self, b"nvmlDeviceGetHandleByUUID\0", (uuid.as_ptr() => *const c_char, &raw mut gpu => *mut Handle))
        {
            return None;
        }
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
            // An older NVML does not tell; it knows no switches either.
            let _ = call!(self, b"nvmlDeviceGetNvLinkRemoteDeviceType\0", (gpu => Handle, link => c_uint, &raw mut kind => *mut c_uint));
            if kind == SWITCH {
                links.to_switch += 1;
                continue;
            }
            links.to_gpus.extend(self.remote(gpu, link));
        }
        Some(links)
    }

    fn remote(&self, gpu: Handle, link: c_uint) -> Option<String> {
        let mut info = PciInfo {
            bus_id_legacy: [0; 16],
            domain: 0,
            bus: 0,
            device: 0,
            pci_device_id: 0,
            pci_subsystem_id: 0,
            bus_id: [0; 32],
        };
        if !call!(self, b"nvmlDeviceGetNvLinkRemotePciInfo_v2\0", (gpu => Handle, link => c_uint, &raw mut info => *mut PciInfo))
        {
            return None;
        }
        // SAFETY: NVML writes a text that ends within its 32 bytes, and it was zeros before.
        let text = unsafe { CStr::from_ptr(info.bus_id.as_ptr()) };
        Some(text.to_string_lossy().into_owned())
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

/// PCI addresses are written with four or eight digits of the domain, in any case.
pub fn same_pci(a: &str, b: &str) -> bool {
    let key = |text: &str| {
        let text = text.to_ascii_lowercase();
        let (domain, rest) = text.split_once(':')?;
        Some((u32::from_str_radix(domain, 16).ok()?, rest.to_owned()))
    };
    key(a).is_some_and(|a| Some(a) == key(b))
}

/// The links of all GPUs, with their ends by number. `None` where NVML does not know one of them.
pub fn all(nvml: &Nvml, uuids: &[String], pci: &[String]) -> Option<(Vec<NvLinks>, Option<f64>)> {
    let said: Option<Vec<Links>> = uuids.iter().map(|uuid| nvml.links(uuid)).collect();
    let said = said?;
    let slowest = said
        .iter()
        .filter_map(|links| links.pcie_gb_s)
        .reduce(f64::min);
    Some((
        said.iter().map(|links| by_number(links, pci)).collect(),
        slowest,
    ))
}

fn by_number(links: &Links, pci: &[String]) -> NvLinks {
    let to = |number: usize| {
        let count = links
            .to_gpus
            .iter()
            .filter(|other| same_pci(other, &pci[number]))
            .count();
        (count > 0).then_some((number as u8, count as u32))
    };
    NvLinks {
        to_switch: links.to_switch,
        to_gpu: (0..pci.len()).filter_map(to).collect(),
        link_gb_s: links.link_gb_s,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_the_same_however_they_are_written() {
        assert!(same_pci("00000000:3B:00.0", "0000:3b:00.0"));
        assert!(!same_pci("00000000:3B:00.0", "0000:3c:00.0"));
        assert!(!same_pci("", ""));
    }

    #[test]
    fn links_are_counted_by_their_other_ends() {
        let pci = ["0000:18:00.0", "0000:28:00.0", "0000:38:00.0"].map(str::to_owned);
        let links = Links {
            to_gpus: ["00000000:38:00.0", "00000000:28:00.0", "00000000:38:00.0"]
                .map(str::to_owned)
                .to_vec(),
            link_gb_s: Some(25.0),
            ..Links::default()
        };
        assert_eq!(by_number(&links, &pci).to_gpu, [(1, 1), (2, 2)]);
    }

    /// PCI-SIG: 15.75 GB/s over 16 lanes of PCIe 3, 63 over those of PCIe 5.
    #[test]
    fn rates_are_those_of_the_standard() {
        assert!((pcie_gb_s(3, 16).expect("known") - 15.75).abs() < 0.02);
        assert!((pcie_gb_s(5, 16).expect("known") - 63.0).abs() < 0.02);
        assert_eq!(pcie_gb_s(0, 16), None);
    }
}
