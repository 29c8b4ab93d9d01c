//! What NVML tells of the GPUs of this machine: NVLinks between them, and how far they are apart by PCIe.

use anabranch_engine::cuda::nvml::{Links, Nvml, PciAddress};
use anabranch_engine::topology::found::NvLinks;
use anabranch_engine::topology::pcie::Level;

/// The links of all GPUs, with their ends by number, and the rate of the slowest PCIe link. `None` where NVML does not know
/// one of them.
pub fn all(
    nvml: &Nvml,
    uuids: &[String],
    pci: &[Option<PciAddress>],
) -> Option<(Vec<NvLinks>, Option<f64>)> {
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

/// How far each ordered pair is apart by PCIe. `None` where NVML does not know of one, or is too old to be asked.
pub fn levels(nvml: &Nvml, uuids: &[String]) -> Option<Vec<Level>> {
    let level = |(a, b): (&String, &String)| match a == b {
        true => Some(Level::Pix),
        false => Level::of_nvml(nvml.common_ancestor(a, b)?),
    };
    let pairs = uuids.iter().flat_map(|a| uuids.iter().map(move |b| (a, b)));
    pairs.map(level).collect()
}

fn by_number(links: &Links, pci: &[Option<PciAddress>]) -> NvLinks {
    let ends = links.by_end();
    let to = |number: usize| {
        let (_, count) = ends.iter().find(|(end, _)| Some(*end) == pci[number])?;
        Some((number as u8, *count))
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
    fn links_are_counted_by_their_other_ends() {
        let pci = [0x18, 0x28, 0x38].map(|bus| Some(bus << 8));
        let links = Links {
            to_gpus: [0x38, 0x28, 0x38, 0x48].map(|bus| bus << 8).to_vec(),
            link_gb_s: Some(25.0),
            ..Links::default()
        };
        assert_eq!(by_number(&links, &pci).to_gpu, [(1, 1), (2, 2)]);
    }
}
