//! The NVLinks of the GPUs that this process sees, and the PCIe distance of other GPUs from these. They are
//! asked for once, if nobody has measured the node: a copy shows how fast a link is, but not which other
//! links share what it goes through.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::cuda::nvml::{pci_number, Links, Nvml};
use crate::cuda::{self, reach, uuid_text, Uuid};
use crate::node::Wiring;
use crate::topology::found::REACHED;
use crate::transfer::{thread, Env};

/// How long the end of the program waits for an answer: a thread that runs on while a process ends may find
/// its library gone.
const END_WAIT: Duration = Duration::from_secs(2);

/// A question that a thread of its own waits for, because NVML may take seconds to start.
pub(super) struct Asked {
    thread: JoinHandle<Vec<(Uuid, Wiring)>>,
}

impl Asked {
    /// `None` if the system has no thread to give: then the links stay unknown.
    pub fn ask(env: &Env) -> Option<Asked> {
        let gpus: Vec<(Uuid, Option<String>)> = reach::devices()
            .iter()
            .map(|device| (device.uuid, cuda::pci_address(device.device)))
            .collect();
        // It computes for 18 ms.
        let thread = thread::spawn_aside(env, "anabranch-nvml", move || ask(&gpus));
        match thread {
            Ok(thread) => Some(Asked { thread }),
            Err(error) => {
                log::debug!("no thread to ask for NVLinks: {error}");
                None
            }
        }
    }

    /// Whether the answer is there.
    pub fn is_there(&self) -> bool {
        self.thread.is_finished()
    }

    /// The answer.
    pub fn answer(self) -> Vec<(Uuid, Wiring)> {
        // A panic is reported where it happens: then the links stay unknown.
        self.thread.join().unwrap_or_default()
    }

    /// At finalize.
    pub fn leave(self) {
        let begun = Instant::now();
        while !self.is_there() && begun.elapsed() < END_WAIT {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The links between some GPUs. Each pair has its own.
pub(super) struct Mesh<'a> {
    of: Vec<&'a Wiring>,
}

impl<'a> Mesh<'a> {
    /// `None` unless the links of all of them are known, there are any, and none leads to a switch: behind a
    /// switch a GPU's copies share a port.
    pub fn of(gpus: &[Uuid], told: &'a [(Uuid, Wiring)]) -> Option<Mesh<'a>> {
        let find = |uuid| told.iter().find(|(known, _)| known == uuid);
        let of = gpus.iter().map(|uuid| find(uuid).map(|(_, wiring)| wiring));
        let of = of.collect::<Option<Vec<_>>>()?;
        let is_switched = of.iter().any(|wiring| wiring.is_switched);
        let has_links = of.iter().any(|wiring| !wiring.to.is_empty());
        (has_links && !is_switched).then_some(Mesh { of })
    }

    /// How many links there are between two of them: the smaller number if the two ends differ.
    pub fn links(&self, a: usize, b: usize) -> u32 {
        let (a, b) = (self.of[a], self.of[b]);
        let to = |from: &Wiring, to: &Wiring| {
            let count = from.to.iter().find(|(pci, _)| *pci == to.pci);
            count.map_or(0, |(_, count)| *count)
        };
        to(a, b).min(to(b, a))
    }

    /// The rate of one link by its generation, GB/s; lower than what any is known to reach.
    pub fn link_gb_s(&self) -> Option<f64> {
        let known = self.of.iter().map(|wiring| f64::from(wiring.link_gb_s));
        let least = known.reduce(f64::min).filter(|least| *least > 0.0)?;
        Some(least * REACHED)
    }
}

fn ask(gpus: &[(Uuid, Option<String>)]) -> Vec<(Uuid, Wiring)> {
    let Some(nvml) = Nvml::open() else {
        log::debug!("no NVML: nobody tells which links there are");
        return Vec::new();
    };
    let wiring = |(uuid, pci): &(Uuid, Option<String>)| {
        let name = uuid_text(uuid);
        let links = nvml.links(&name)?;
        let pci = pci_number(pci.as_deref()?)?;
        Some((*uuid, wiring(pci, &links, nvml.apart(&name))))
    };
    gpus.iter().filter_map(wiring).collect()
}

fn wiring(pci: u64, links: &Links, apart: Vec<(u64, u32)>) -> Wiring {
    Wiring {
        pci,
        is_switched: links.to_switch > 0,
        link_gb_s: links.link_gb_s.unwrap_or(0.0) as f32,
        to: links.by_end(),
        apart,
    }
}
