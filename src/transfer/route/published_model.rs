//! The node as its ranks publish it, if nobody has measured it before.

use super::wiring::Mesh;
use crate::cuda::{uuid_text, Uuid};
use crate::model::{HopModel, Line, Model, PCIE_SPREAD};
use crate::node::traffic::{Ends, HostLinkRates, Measured, Page};
use crate::node::Wiring;
use crate::topology::pcie::{Level, Tree};
use crate::topology::{
    Costs, Fabric, Gpu, Hop, HostSide, Linked, Parts, Place, Topology, MAX_GPUS,
};

/// A direct copy that is this much faster than one to or from the host uses other links.
const FASTER_THAN_PCIE: f64 = 1.3;
/// The time of a copy between two GPUs before its bytes move, us, if none over NVLink was measured.
const ALPHA_US: f32 = 5.0;
/// The cost of each copy that is launched in one batch behind another, us: nobody measures that in passing.
/// H100 and H200 have 0.4 to 0.6. With an alpha for each copy, 16 messages of 8 MiB were predicted to take
/// 465 us instead of the real 390, and the host was given what it could carry in the difference.
const BATCHED_US: f64 = 0.5;

/// A node as its ranks have published it.
pub(super) struct PublishedModel {
    pub topology: Topology,
    pub model: Model,
    /// From which GPU to which GPU the direct copy was measured.
    pub direct: Vec<(u8, u8)>,
    /// It is known which pairs have links of their own.
    pub is_wired: bool,
}

impl PublishedModel {
    /// The GPUs that ranks use, the path of each to the host and back, and direct copies between them. What
    /// nobody has measured is left out, and no path uses it.
    ///
    /// If the system has told which links there are (`wired`) and that they lead from GPU to GPU, the rates
    /// of pairs that nobody has measured follow from the number of their links and from what one such link
    /// was seen to carry. GPUs that no rank uses are then included, too: that makes relays possible. If the
    /// system has told how far all of them are apart by PCIe, those under one switch share its link to the
    /// host.
    ///
    /// `None` as long as nobody has measured a path to the host.
    pub fn new<'a>(
        pages: impl Iterator<Item = &'a Page> + Clone,
        wired: &[(Uuid, Wiring)],
    ) -> Option<PublishedModel> {
        let rates = rates_of(pages.clone(), wired);
        let uuids: Vec<Uuid> = rates.iter().map(|link_rates| link_rates.uuid).collect();
        let lines = Lines::new(&uuids, pages.flat_map(Page::measured).collect())?;
        // A pair whose copies are faster than PCIe has links. A table that has none for it is about something
        // else.
        let mesh = Mesh::of(&uuids, wired).filter(|mesh| {
            let mut pairs = lines.pairs();
            pairs.all(|(a, b)| mesh.links(a, b) > 0 || !lines.is_fast(a, b))
        });
        let links = Links::new(&lines, mesh);
        let topology = topology(&rates, &lines, &links, wired)?;
        let model = model(&topology, &lines, &links)?;
        let measured = lines.measured().map(|(a, b)| (a as u8, b as u8));
        Some(PublishedModel {
            direct: measured.collect(),
            is_wired: links.mesh.is_some(),
            topology,
            model,
        })
    }
}

/// The GPUs that ranks use. If their links are known and lead to no switch, also those that nobody uses.
fn rates_of<'a>(
    pages: impl Iterator<Item = &'a Page>,
    wired: &[(Uuid, Wiring)],
) -> Vec<HostLinkRates> {
    let mut rates: Vec<HostLinkRates> = Vec::new();
    let add = |rates: &mut Vec<HostLinkRates>, link_rates: HostLinkRates| {
        if rates.len() < MAX_GPUS && !rates.iter().any(|known| known.uuid == link_rates.uuid) {
            rates.push(link_rates);
        }
    };
    pages
        .flat_map(Page::link_rates)
        .for_each(|link_rates| add(&mut rates, link_rates));
    let used: Vec<Uuid> = rates.iter().map(|link_rates| link_rates.uuid).collect();
    if Mesh::of(&used, wired).is_some() {
        for (uuid, wiring) in wired.iter().filter(|(_, wiring)| !wiring.is_switched) {
            let link_rates = HostLinkRates {
                uuid: *uuid,
                pci: wiring.pci,
                numa: None,
            };
            add(&mut rates, link_rates);
        }
    }
    // So all ranks number them alike.
    rates.sort_by_key(|link_rates| (link_rates.pci, link_rates.uuid));
    rates
}

/// What copies took, as alpha (us) and rate (GB/s), by the numbers of the GPUs; `None` is the host.
struct Lines<'a> {
    gpus: &'a [Uuid],
    measured: Vec<Measured>,
    /// The fastest copy to or from the host, GB/s.
    pcie: f64,
}

impl<'a> Lines<'a> {
    fn new(gpus: &'a [Uuid], measured: Vec<Measured>) -> Option<Lines<'a>> {
        let mut lines = Lines {
            gpus,
            measured,
            pcie: 0.0,
        };
        let ways = (0..gpus.len()).flat_map(|gpu| [(Some(gpu), None), (None, Some(gpu))]);
        let rates = ways.filter_map(|(from, to)| Some(f64::from(lines.of(from, to)?.1)));
        lines.pcie = rates.fold(0.0, f64::max);
        (lines.pcie > 0.0).then_some(lines)
    }

    /// Several ranks may have measured a pair: other transfers can only have slowed it.
    fn of(&self, from: Option<usize>, to: Option<usize>) -> Option<(f32, f32)> {
        let [from, to] = [from, to].map(|gpu| gpu.and_then(|gpu| self.gpus.get(gpu)));
        let ends = Ends::new(from, to);
        let told = self.measured.iter().filter(|line| line.ends == ends);
        let told = told.filter_map(|line| line.push.or(line.pull));
        told.max_by(|x, y| x.1.total_cmp(&y.1))
    }

    /// The rate of the faster direction between two GPUs, GB/s.
    fn fastest(&self, a: usize, b: usize) -> Option<f64> {
        let both = [(a, b), (b, a)].map(|(a, b)| self.of(Some(a), Some(b)));
        let rates = both.into_iter().flatten().map(|line| f64::from(line.1));
        rates.reduce(f64::max)
    }

    /// Whether copies between two GPUs do not go by PCIe. Those that are not faster are taken to go by PCIe.
    fn is_fast(&self, a: usize, b: usize) -> bool {
        let rate = self.fastest(a, b);
        rate.is_some_and(|rate| rate > FASTER_THAN_PCIE * self.pcie)
    }

    fn pairs(&self) -> impl Iterator<Item = (usize, usize)> {
        let n = self.gpus.len();
        (0..n).flat_map(move |a| (a + 1..n).map(move |b| (a, b)))
    }

    /// From which GPU to which a copy was measured.
    fn measured(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let both = self.pairs().flat_map(|(a, b)| [(a, b), (b, a)]);
        both.filter(|(a, b)| self.of(Some(*a), Some(*b)).is_some())
    }
}

/// The NVLinks, as far as the system tells.
struct Links<'a> {
    mesh: Option<Mesh<'a>>,
    /// Alpha (us) and rate (GB/s) of one link, if any is known.
    one: Option<(f32, f64)>,
}

impl<'a> Links<'a> {
    fn new(lines: &Lines<'_>, mesh: Option<Mesh<'a>>) -> Links<'a> {
        let one = mesh.as_ref().and_then(|mesh| {
            let seen = lines.measured().filter_map(|(a, b)| {
                let (alpha_us, gb_s) = lines.of(Some(a), Some(b))?;
                let links = Some(mesh.links(a, b)).filter(|links| *links > 0)?;
                Some((alpha_us, f64::from(gb_s) / f64::from(links)))
            });
            let fastest = seen.max_by(|x, y| x.1.total_cmp(&y.1));
            fastest.or_else(|| Some((ALPHA_US, mesh.link_gb_s()?)))
        });
        Links { mesh, one }
    }

    /// How many there are between two GPUs, if any.
    fn between(&self, a: usize, b: usize) -> Option<u32> {
        let links = self.mesh.as_ref()?.links(a, b);
        Some(links).filter(|links| *links > 0)
    }

    /// Alpha and rate of a copy between two GPUs, by the number of their links.
    fn line(&self, a: usize, b: usize) -> Option<(f32, f32)> {
        let (alpha_us, gb_s) = self.one?;
        Some((alpha_us, (gb_s * f64::from(self.between(a, b)?)) as f32))
    }
}

/// The PCIe tree, if the system has told how far each two GPUs are apart, and if that is consistent. Even if
/// a rank sees one GPU only, NVML shows it the others. At least one end of each pair publishes it.
fn tree(rates: &[HostLinkRates], gpus: &[Gpu], wired: &[(Uuid, Wiring)]) -> Tree {
    let said = |from: usize, to: usize| {
        let mut of = wired.iter().filter(|(uuid, _)| *uuid == rates[from].uuid);
        let level = of.find_map(|(_, wiring)| {
            let mut apart = wiring.apart.iter();
            apart.find(|(pci, _)| *pci == rates[to].pci)
        });
        level.and_then(|(_, level)| Level::of_nvml(*level))
    };
    let n = rates.len();
    let level = |a: usize, b: usize| match a == b {
        true => Some(Level::Pix),
        false => said(a, b).or_else(|| said(b, a)),
    };
    let levels = (0..n * n).map(|at| level(at / n, at % n));
    let levels: Option<Vec<Level>> = levels.collect();
    levels.map_or_else(Tree::default, |levels| Tree::of(gpus, &levels))
}

fn topology(
    rates: &[HostLinkRates],
    lines: &Lines<'_>,
    links: &Links<'_>,
    wired: &[(Uuid, Wiring)],
) -> Option<Topology> {
    let linked = lines.pairs().filter_map(|(a, b)| {
        let derived = || links.line(a, b).map(|line| f64::from(line.1));
        let is_linked = match links.mesh {
            Some(_) => links.between(a, b).is_some(),
            None => lines.is_fast(a, b),
        };
        let gb_s = lines.fastest(a, b).or_else(derived);
        Some(Linked {
            gpus: [a as u8, b as u8],
            gb_s: gb_s.filter(|_| is_linked)?,
            links: links.between(a, b),
        })
    });
    let gpu = |link_rates: &HostLinkRates| Gpu {
        uuid: Some(uuid_text(&link_rates.uuid)),
        numa: link_rates.numa,
        ..Gpu::default()
    };
    let gpus: Vec<Gpu> = rates.iter().map(gpu).collect();
    let pcie = lines.pcie;
    let topology = Topology::assemble(Parts {
        name: "this-node".into(),
        description: format!("{} GPUs, as their ranks have measured them", rates.len()),
        pcie: tree(rates, &gpus, wired),
        gpus,
        fabric: Fabric::Links,
        port: None,
        links: linked.collect(),
        host: Some(HostSide {
            to_host_gb_s: pcie,
            to_device_gb_s: pcie,
            peer_gb_s: pcie,
            write_gb_s: pcie,
            read_gb_s: pcie,
        }),
        numa_nodes: 1,
        engine_gb_s: f64::MAX,
        costs: Costs::default(),
    });
    topology.ok()
}

fn model(topology: &Topology, lines: &Lines<'_>, links: &Links<'_>) -> Option<Model> {
    let number = |place: Place| match place {
        Place::Gpu(gpu) => Some(usize::from(gpu)),
        Place::Host => None,
    };
    let hop = |(from, to, hop): (Place, Place, &Hop)| {
        let ends = (number(from), number(to));
        let derived = || links.line(ends.0?, ends.1?);
        let (alpha_us, gb_s) = lines.of(ends.0, ends.1).or_else(derived)?;
        let line = Some(Line {
            batched_us: hop.is_nvlink().then(|| BATCHED_US.min(f64::from(alpha_us))),
            alpha_us: f64::from(alpha_us),
            gb_s: f64::from(gb_s),
            spread: if hop.is_nvlink() { 0.0 } else { PCIE_SPREAD },
        });
        let is_up = to == Place::Host;
        // Chunks are put to relays. That is a little quicker than the gets that were measured.
        let may_relay = links.mesh.is_some() && from != Place::Host;
        Some(HopModel {
            from,
            to,
            push: line.filter(|_| is_up || may_relay),
            pull: line.filter(|_| !is_up),
        })
    };
    let model = Model {
        hops: topology.hops().filter_map(hop).collect(),
        // Each carries what the fastest copy through it does, until a measurement says more.
        segments: Vec::new(),
        ..Model::nominal(topology)
    };
    model.check().ok()?;
    Some(model)
}

#[cfg(test)]
#[path = "published_model_tests.rs"]
mod published_model_tests;
