//! The node as its ranks tell of it, where nobody has measured it before.

use super::wiring::Mesh;
use crate::cuda::{uuid_text, Uuid};
use crate::model::{HopModel, Line, Model, PCIE_SPREAD};
use crate::node::traffic::{Card, Ends, Measured, Page};
use crate::node::Wiring;
use crate::topology::pcie::{Level, Tree};
use crate::topology::{
    Costs, Fabric, Gpu, Hop, HostSide, Linked, Parts, Place, Topology, MAX_GPUS,
};

/// A direct copy that is so much faster than one to or from the host goes by other links.
const FASTER_THAN_PCIE: f64 = 1.3;
/// What a copy between two GPUs takes before its bytes move, us, where none over NVLink was measured.
const ALPHA_US: f32 = 5.0;
/// What each of those copies costs that are launched in one batch behind another, us: nobody measures that in passing. H100 and H200
/// have 0.4 to 0.6. With an alpha for each, 16 messages of 8 MiB were to take 465 us, which take 390, and the host was given what
/// it could carry in the difference.
const BATCHED_US: f64 = 0.5;

/// A node as its ranks have told.
pub(super) struct Told {
    pub topology: Topology,
    pub model: Model,
    /// From which GPU to which the direct copy was measured.
    pub direct: Vec<(u8, u8)>,
    /// It is known which pairs have links of their own.
    pub is_wired: bool,
}

impl Told {
    /// The GPUs that ranks use, the way of each to the host and back, and direct copies between them. What nobody has measured
    /// is not there, and no path leads over it.
    ///
    /// Where the system has told which links there are (`wired`) and that they lead from GPU to GPU, what pairs have that
    /// nobody has measured follows from their number and from what one such link was seen to carry, and the GPUs that no rank
    /// uses are there, too: that is ground for relays. Where it has told how far all of them are apart by PCIe, those under one
    /// switch share its link to the host.
    ///
    /// `None` as long as nobody has measured a way to the host.
    pub fn new<'a>(
        pages: impl Iterator<Item = &'a Page> + Clone,
        wired: &[(Uuid, Wiring)],
    ) -> Option<Told> {
        let cards = cards(pages.clone(), wired);
        let uuids: Vec<Uuid> = cards.iter().map(|card| card.uuid).collect();
        let lines = Lines::new(&uuids, pages.flat_map(Page::measured).collect())?;
        // A pair whose copies are faster than PCIe has links: what tells of none is about something else.
        let mesh = Mesh::of(&uuids, wired).filter(|mesh| {
            let mut pairs = lines.pairs();
            pairs.all(|(a, b)| mesh.links(a, b) > 0 || !lines.is_fast(a, b))
        });
        let links = Links::new(&lines, mesh);
        let topology = topology(&cards, &lines, &links, wired)?;
        let model = model(&topology, &lines, &links)?;
        let measured = lines.measured().map(|(a, b)| (a as u8, b as u8));
        Some(Told {
            direct: measured.collect(),
            is_wired: links.mesh.is_some(),
            topology,
            model,
        })
    }
}

/// The GPUs that ranks use, and where the links of these are known and lead to no switch, those that nobody uses.
fn cards<'a>(pages: impl Iterator<Item = &'a Page>, wired: &[(Uuid, Wiring)]) -> Vec<Card> {
    let mut cards: Vec<Card> = Vec::new();
    let add = |cards: &mut Vec<Card>, card: Card| {
        if cards.len() < MAX_GPUS && !cards.iter().any(|known| known.uuid == card.uuid) {
            cards.push(card);
        }
    };
    pages
        .flat_map(Page::cards)
        .for_each(|card| add(&mut cards, card));
    let used: Vec<Uuid> = cards.iter().map(|card| card.uuid).collect();
    if Mesh::of(&used, wired).is_some() {
        for (uuid, wiring) in wired.iter().filter(|(_, wiring)| !wiring.is_switched) {
            let card = Card {
                uuid: *uuid,
                pci: wiring.pci,
                numa: None,
            };
            add(&mut cards, card);
        }
    }
    // All ranks number them alike.
    cards.sort_by_key(|card| (card.pci, card.uuid));
    cards
}

/// What copies took, alpha (us) and rate (GB/s), by the numbers of GPUs; `None` is the host.
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

    /// A pair may have been measured by several ranks: what others had under way can only have slowed it.
    fn of(&self, from: Option<usize>, to: Option<usize>) -> Option<(f32, f32)> {
        let [from, to] = [from, to].map(|gpu| gpu.and_then(|gpu| self.gpus.get(gpu)));
        let ends = Ends::new(from, to);
        let told = self.measured.iter().filter(|line| line.ends == ends);
        let told = told.filter_map(|line| line.push.or(line.pull));
        told.max_by(|x, y| x.1.total_cmp(&y.1))
    }

    /// Both directions of two GPUs, the faster one; GB/s.
    fn fastest(&self, a: usize, b: usize) -> Option<f64> {
        let both = [(a, b), (b, a)].map(|(a, b)| self.of(Some(a), Some(b)));
        let rates = both.into_iter().flatten().map(|line| f64::from(line.1));
        rates.reduce(f64::max)
    }

    /// Whether copies between two GPUs do not go by PCIe. Those that are not faster are taken to.
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
    /// What one of them takes, where any is known: alpha (us) and rate (GB/s).
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

    /// What a copy between two GPUs takes by the number of their links.
    fn line(&self, a: usize, b: usize) -> Option<(f32, f32)> {
        let (alpha_us, gb_s) = self.one?;
        Some((alpha_us, (gb_s * f64::from(self.between(a, b)?)) as f32))
    }
}

/// The PCIe tree, if the system has told how far each two GPUs are apart, and that can be. Where a rank sees one GPU only, NVML
/// shows it the others all the same; each pair is told of by one end at least.
fn tree(cards: &[Card], gpus: &[Gpu], wired: &[(Uuid, Wiring)]) -> Tree {
    let said = |from: usize, to: usize| {
        let mut of = wired.iter().filter(|(uuid, _)| *uuid == cards[from].uuid);
        let level = of.find_map(|(_, wiring)| {
            let mut apart = wiring.apart.iter();
            apart.find(|(pci, _)| *pci == cards[to].pci)
        });
        level.and_then(|(_, level)| Level::of_nvml(*level))
    };
    let n = cards.len();
    let level = |a: usize, b: usize| match a == b {
        true => Some(Level::Pix),
        false => said(a, b).or_else(|| said(b, a)),
    };
    let levels = (0..n * n).map(|at| level(at / n, at % n));
    let levels: Option<Vec<Level>> = levels.collect();
    levels.map_or_else(Tree::default, |levels| Tree::of(gpus, &levels))
}

fn topology(
    cards: &[Card],
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
    let gpu = |card: &Card| Gpu {
        uuid: Some(uuid_text(&card.uuid)),
        numa: card.numa,
        ..Gpu::default()
    };
    let gpus: Vec<Gpu> = cards.iter().map(gpu).collect();
    let pcie = lines.pcie;
    let topology = Topology::assemble(Parts {
        name: "this-node".into(),
        description: format!("{} GPUs, as their ranks have measured them", cards.len()),
        pcie: tree(cards, &gpus, wired),
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
        // Chunks are pushed to relays. That is a little quicker than the pulls that were measured.
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
#[path = "told_tests.rs"]
mod told_tests;
