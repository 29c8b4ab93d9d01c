//! Where the numbers of the node come from.

use std::path::Path;

use crate::cuda::{self, Uuid};
use crate::engine::Env;
use crate::model::cache::{self, CacheError};
use crate::model::{HopModel, Line, Model, PCIE_SPREAD};
use crate::node::traffic::{Card, Ends, Measured, Page};
use crate::node::Wiring;
use crate::topology::{
    Costs, Fabric, Gpu, Hop, HostSide, Linked, Parts, Place, Topology, MAX_GPUS,
};

use super::wiring::Mesh;

/// A direct copy that is so much faster than one to or from the host goes by other links.
const FASTER_THAN_PCIE: f64 = 1.3;

/// What `anabranch topo --measure` kept of a node that has these GPUs. A process may see but one of them, so the file is
/// known by what it has, not by what is seen here.
pub(super) fn kept(file: Option<&Path>, gpus: &[Uuid]) -> Result<cache::Measured, CacheError> {
    let gpus: Vec<String> = gpus.iter().map(text).collect();
    let driver = cache::driver_text(cuda::version(), cuda::is_simulated());
    match (file, cache::folder()) {
        (Some(file), _) => cache::load_with(file, &gpus, &driver),
        (None, Some(folder)) => cache::find(&folder, &gpus, &driver),
        (None, None) => Err(CacheError::Absent("$HOME/.cache/anabranch".into())),
    }
}

/// Says why there is nothing, once a node. That nobody has measured is no fault.
pub(super) fn tell(env: &Env, is_named: bool, why: &CacheError) {
    let peers = env.node.peers();
    let is_first = peers
        .first()
        .is_none_or(|peer| peer.world_rank() == env.world_rank);
    let level = match why {
        CacheError::Absent(_) if !is_named => log::Level::Info,
        _ if is_first => log::Level::Warn,
        _ => log::Level::Debug,
    };
    log::log!(level, "paths are measured while the program runs: {why}");
}

/// A copy between two GPUs takes so long before its bytes move, us, where none over such links was measured.
const ALPHA_US: f64 = 5.0;

/// A node as its ranks have told.
pub(super) struct Told {
    pub topology: Topology,
    pub model: Model,
    /// From which GPU to which the direct copy was measured.
    pub direct: Vec<(u8, u8)>,
    /// It is known which pairs have links of their own.
    pub is_wired: bool,
}

/// The node as its ranks have told: the GPUs that they use, the way of each to the host and back, and direct copies between
/// them. What nobody has measured is not there, and no path leads over it.
///
/// Where the system has told which links there are (`wired`) and that they lead from GPU to GPU, what pairs have that nobody has
/// measured follows from their number and from what one such link was seen to carry, and the GPUs that no rank uses are
/// there, too: that is ground for relays.
///
/// `None` as long as nobody has measured a way to the host.
pub(super) fn told<'a>(
    pages: impl Iterator<Item = &'a Page> + Clone,
    wired: &[(Uuid, Wiring)],
) -> Option<Told> {
    let mut cards: Vec<Card> = Vec::new();
    for card in pages.clone().flat_map(Page::cards) {
        if !cards.iter().any(|known| known.uuid == card.uuid) {
            cards.push(card);
        }
    }
    let used: Vec<Uuid> = cards.iter().map(|card| card.uuid).collect();
    if Mesh::of(&used, wired).is_some() {
        for (uuid, wiring) in wired {
            if !wiring.is_switched && !cards.iter().any(|known| known.uuid == *uuid) {
                cards.push(Card {
                    uuid: *uuid,
                    pci: wiring.pci,
                    numa: None,
                });
            }
        }
    }
    // All ranks number them alike.
    cards.sort_by_key(|card| (card.pci, card.uuid));
    cards.truncate(MAX_GPUS);
    let lines: Vec<Measured> = pages.flat_map(Page::measured).collect();
    let line = |from: Option<&Card>, to: Option<&Card>| {
        let ends = Ends::new(from.map(|card| &card.uuid), to.map(|card| &card.uuid));
        let told = lines.iter().filter(|line| line.ends == ends);
        // A pair may have been measured by several ranks: what others had under way can only have slowed it.
        let told = told.filter_map(|line| line.push.or(line.pull));
        told.max_by(|x, y| x.1.total_cmp(&y.1))
    };
    let n = cards.len();
    let uuids: Vec<Uuid> = cards.iter().map(|card| card.uuid).collect();
    let ways = |at: usize| [line(Some(&cards[at]), None), line(None, Some(&cards[at]))];
    let pcie = (0..n)
        .flat_map(ways)
        .flatten()
        .map(|line| f64::from(line.1));
    let pcie = pcie.fold(0.0, f64::max);
    if pcie <= 0.0 {
        return None;
    }
    let direct = |a: usize, b: usize| line(Some(&cards[a]), Some(&cards[b]));
    let fastest = |a: usize, b: usize| {
        let both = [direct(a, b), direct(b, a)];
        both.iter()
            .flatten()
            .map(|line| f64::from(line.1))
            .fold(0.0, f64::max)
    };
    // A pair whose copies are faster than PCIe has links: what tells of none is about something else.
    let pairs = (0..n).flat_map(|a| (a + 1..n).map(move |b| (a, b)));
    let is_nvlink = |a: usize, b: usize| fastest(a, b) > FASTER_THAN_PCIE * pcie;
    let mesh = Mesh::of(&uuids, wired).filter(|mesh| {
        pairs
            .clone()
            .all(|(a, b)| mesh.links(a, b) > 0 || !is_nvlink(a, b))
    });
    let ordered = (0..n).flat_map(|a| (0..n).map(move |b| (a, b)));
    let measured = ordered.clone().filter(|(a, b)| direct(*a, *b).is_some());
    let measured: Vec<(usize, usize)> = measured.collect();
    let links = |a: usize, b: usize| mesh.as_ref().map_or(0, |mesh| mesh.links(a, b));
    // What others had under way can only have slowed a copy.
    let one_link = measured.iter().filter(|(a, b)| links(*a, *b) > 0);
    let one_link = one_link.filter_map(|&(a, b)| {
        let (alpha_us, gb_s) = direct(a, b)?;
        Some((alpha_us, f64::from(gb_s) / f64::from(links(a, b))))
    });
    let one_link = one_link.max_by(|x, y| x.1.total_cmp(&y.1)).or_else(|| {
        let gb_s = mesh.as_ref()?.link_gb_s()?;
        Some((ALPHA_US as f32, gb_s))
    });
    let derived = |a: usize, b: usize| {
        let (alpha_us, gb_s) = one_link?;
        let links = Some(links(a, b)).filter(|links| *links > 0)?;
        Some((alpha_us, (gb_s * f64::from(links)) as f32))
    };
    let rate = |a: usize, b: usize| {
        let derived = derived(a, b).map_or(0.0, |line| f64::from(line.1));
        Some(fastest(a, b))
            .filter(|rate| *rate > 0.0)
            .unwrap_or(derived)
    };
    let linked = pairs.filter(|(a, b)| match mesh {
        Some(_) => links(*a, *b) > 0 && rate(*a, *b) > 0.0,
        // What is faster than PCIe does not go by PCIe. What is not, is taken to.
        None => is_nvlink(*a, *b),
    });
    let topology = Topology::assemble(Parts {
        name: "this-node".into(),
        description: format!("{n} GPUs, as their ranks have measured them"),
        gpus: cards
            .iter()
            .map(|card| Gpu {
                uuid: Some(text(&card.uuid)),
                numa: card.numa,
                ..Gpu::default()
            })
            .collect(),
        fabric: Fabric::Links,
        port: None,
        links: linked
            .map(|(a, b)| Linked {
                gpus: [a as u8, b as u8],
                gb_s: rate(a, b),
                links: Some(links(a, b)).filter(|links| *links > 0),
            })
            .collect(),
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
    let topology = topology.ok()?;
    let hop = |(from, to, hop): (Place, Place, &Hop)| {
        let of_pair = match (from, to) {
            (Place::Gpu(from), Place::Gpu(to)) => Some((usize::from(from), usize::from(to))),
            _ => None,
        };
        let at = |place: Place| match place {
            Place::Gpu(gpu) => cards.get(usize::from(gpu)),
            Place::Host => None,
        };
        let derived = || of_pair.and_then(|(a, b)| derived(a, b));
        let (alpha_us, gb_s) = line(at(from), at(to)).or_else(derived)?;
        let line = Some(Line {
            alpha_us: f64::from(alpha_us),
            gb_s: f64::from(gb_s),
            spread: if hop.is_nvlink() { 0.0 } else { PCIE_SPREAD },
        });
        let is_up = to == Place::Host;
        Some(HopModel {
            from,
            to,
            // Chunks are pushed to relays. It is a little quicker than what was measured.
            push: line.filter(|_| is_up || (mesh.is_some() && of_pair.is_some())),
            pull: line.filter(|_| !is_up),
        })
    };
    let model = Model {
        hops: topology.hops().filter_map(hop).collect(),
        // Each carries what the fastest copy through it does, until a measurement says more.
        segments: Vec::new(),
        ..Model::nominal(&topology)
    };
    model.check().ok()?;
    Some(Told {
        direct: measured
            .into_iter()
            .map(|(a, b)| (a as u8, b as u8))
            .collect(),
        is_wired: mesh.is_some(),
        topology,
        model,
    })
}

/// An identity as nvidia-smi prints it.
pub(super) fn text(uuid: &Uuid) -> String {
    let mut text = String::from("GPU");
    for (at, byte) in uuid.iter().enumerate() {
        if [0, 4, 6, 8, 10].contains(&at) {
            text.push('-');
        }
        text += &format!("{byte:02x}");
    }
    text
}

/// The identity of such a text.
pub(super) fn uuid(text: &str) -> Option<Uuid> {
    let digits: String = text.strip_prefix("GPU-")?.split('-').collect();
    let is_hex = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    let number = is_hex.then(|| u128::from_str_radix(&digits, 16));
    Some(number?.ok()?.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_read_as_they_are_written() {
        let known: Uuid = std::array::from_fn(|at| at as u8 * 17);
        assert_eq!(text(&known), "GPU-00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!(uuid(&text(&known)), Some(known));
        for bad in [
            "",
            "GPU-",
            "GPU-00112233",
            "MIG-0",
            "GPU-+0112233-4455-6677-8899-aabbccddeeff",
        ] {
            assert_eq!(uuid(bad), None, "{bad}");
        }
    }
}

#[cfg(test)]
#[path = "told_tests.rs"]
mod told_tests;
