//! What the system tells of PCI devices (`/sys/bus/pci/devices`).

use anabranch_engine::topology::pcie::Level;
use std::path::PathBuf;

/// The folder of a device. The driver writes the domain with four digits, as the system does, or with eight.
fn folder(pci: &str) -> Option<PathBuf> {
    let pci = pci.to_ascii_lowercase();
    let (domain, rest) = pci.split_once(':')?;
    let domain = u32::from_str_radix(domain, 16).ok()?;
    Some(format!("/sys/bus/pci/devices/{domain:04x}:{rest}").into())
}

fn text(pci: &str, file: &str) -> Option<String> {
    let text = std::fs::read_to_string(folder(pci)?.join(file)).ok()?;
    Some(text.trim().to_owned())
}

/// The NUMA node that a device hangs on.
pub fn numa_node(pci: &str) -> Option<u32> {
    // -1 where the machine has but one.
    text(pci, "numa_node")?.parse().ok()
}

/// The processors next to a device.
pub fn cpus(pci: &str) -> Option<String> {
    text(pci, "local_cpulist").filter(|cpus| !cpus.is_empty())
}

/// The place of a device in the tree of all devices, every bridge above it named.
pub fn path(pci: &str) -> Option<String> {
    let path = std::fs::canonicalize(folder(pci)?).ok()?;
    Some(path.to_str()?.to_owned())
}

/// How far each ordered pair is apart, by places in the tree and NUMA nodes. Where those are not told there is one.
pub fn levels(paths: &[String], numa: &[Option<u32>]) -> Option<Vec<Level>> {
    let n = paths.len();
    let level = |at: usize| {
        let (a, b) = (at / n, at % n);
        Level::of_paths(&paths[a], &paths[b], numa[a] == numa[b])
    };
    (0..n * n).map(level).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The machine of issue 671 of NCCL, of which four GPUs are looked at: two switches, two GPUs each, one host bridge.
    #[test]
    fn places_in_the_tree_tell_how_far_gpus_are_apart() {
        let paths = [
            "/sys/devices/pci0000:00/0000:00:02.0/0000:03:00.0/0000:04:08.0/0000:06:00.0",
            "/sys/devices/pci0000:00/0000:00:02.0/0000:03:00.0/0000:04:0c.0/0000:07:00.0",
            "/sys/devices/pci0000:00/0000:00:03.0/0000:08:00.0/0000:09:08.0/0000:0a:00.0",
            "/sys/devices/pci0000:80/0000:80:02.0/0000:82:00.0/0000:83:08.0/0000:85:00.0",
        ]
        .map(String::from);
        use Level::{Phb, Pix, Sys};
        let expected = [
            [Pix, Pix, Phb, Sys],
            [Pix, Pix, Phb, Sys],
            [Phb, Phb, Pix, Sys],
            [Sys, Sys, Sys, Pix],
        ];
        let numa = [0, 0, 0, 1].map(Some);
        assert_eq!(levels(&paths, &numa), Some(expected.concat()));
        assert_eq!(levels(&["/sys/devices/virtual/x".into()], &[None]), None);
    }

    #[test]
    fn addresses_are_those_of_the_system() {
        let known = folder("0000002A:3B:00.0").expect("an address");
        assert_eq!(known.to_str(), Some("/sys/bus/pci/devices/002a:3b:00.0"));
        for bad in ["", "none", "x:3b:00.0"] {
            assert_eq!(folder(bad), None, "{bad}");
        }
    }
}
