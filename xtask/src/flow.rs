//! What a node carries from one GPU to another at most, whoever plans: the max-flow of its topology file.
//!
//! **The graph.** Each segment of the file (the links of a pair in one direction, a port to or from a switch, a PCIe link up or down,
//! what a GPU sends to its peers over PCIe, the host's memory being written, and read) is an edge with its rate as capacity. A hop
//! is a chain of segments: so those that several hops share are one edge that all of them lead over. Between hops bytes lie
//! somewhere: in memory of a GPU, or of the host, which are nodes without a bound, as they hold more than a message.
//!
//! **Why no plan is faster.** Say that of a message `n` bytes arrive in a time `T`. Follow each of them back to where it came from:
//! it went from memory to memory by copies, all of which moved it within `T`. Count each byte once on each segment that it
//! crossed. A segment of capacity `c` moves `c T` bytes in `T`, whichever copies divide it, and from a memory in between goes
//! only what has come there. So these numbers, divided by `T`, are a flow within the capacities, its value is `n / T`, and no
//! flow is larger than the largest. Setup times, the number of engines and what one of them makes are left out, which can
//! only make the bound higher. So does what the graph allows and hardware does not: that bytes of two chains change over
//! where these meet.
//!
//! **Several messages at once.** Where each byte may arrive at any of the receivers, no less arrives than where each has its own. So
//! the flow from all senders together to all receivers together bounds their sum. A GPU that both sends and receives is
//! three nodes for that, so that nothing arrives without a copy: what it sends, what it receives, and what others stage there;
//! its segments are shared by all three. And the sum is no more than what each pair would have with nobody beside it.

use petgraph::algo::ford_fulkerson;
use petgraph::graph::{DiGraph, NodeIndex};
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use toml::{Table, Value};

/// Paths that may be taken beside the direct one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Over {
    /// Over other GPUs.
    pub relays: bool,
    /// Through the host's memory.
    pub host: bool,
}

impl Over {
    /// As `ANABRANCH_PATHS` names them.
    ///
    /// # Errors
    /// One of the names is none.
    pub fn parse(paths: &str) -> Result<Over, String> {
        let mut over = Over {
            relays: false,
            host: false,
        };
        for name in paths.split(',') {
            match name {
                "direct" => {}
                "relay" => over.relays = true,
                "host" => over.host = true,
                other => return Err(format!("{other:?} is no path: direct, relay or host")),
            }
        }
        Ok(over)
    }
}

/// Something that carries bytes, in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Segment {
    Link(usize, usize),
    PortOut(usize),
    PortIn(usize),
    PcieUp(usize),
    PcieDown(usize),
    PciePeer(usize),
    HostWrite,
    HostRead,
}

/// A node of the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Point {
    Senders,
    Receivers,
    /// What a GPU sends, what it receives, and what others stage in its memory.
    Sent(usize),
    Received(usize),
    Staged(usize),
    Host,
    Entry(Segment),
    Exit(Segment),
}

/// A topology file's rates, bytes a second.
#[derive(Clone, Debug, PartialEq)]
pub struct Rates {
    gpus: usize,
    links: HashMap<(usize, usize), u64>,
    /// Of a switch, if the GPUs have one.
    port: Option<u64>,
    pcie: [u64; 3],
    host: [u64; 2],
}

/// More than all segments of a node together.
const UNBOUNDED: u64 = 1 << 60;
/// No link of any machine carries as much: more would not fit.
const GB_S_MAX: f64 = 1e6;

impl Rates {
    /// Reads a topology file of the simulated driver.
    ///
    /// # Errors
    /// It cannot be read, or lacks a figure; one line.
    pub fn read(file: &Path) -> Result<Rates, String> {
        let at = |why: String| format!("{}: {why}", file.display());
        let text = fs::read_to_string(file).map_err(|error| at(error.to_string()))?;
        Rates::parse(&text).map_err(at)
    }

    /// Number of GPUs.
    #[must_use]
    pub fn gpus(&self) -> usize {
        self.gpus
    }

    /// The same of a file's text.
    ///
    /// # Errors
    /// As [`Rates::read`].
    pub fn parse(text: &str) -> Result<Rates, String> {
        let table: Table = text
            .parse()
            .map_err(|error: toml::de::Error| error.message().to_owned())?;
        let section = |name: &str| {
            let section = table.get(name).and_then(Value::as_table);
            section.ok_or_else(|| format!("[{name}] is missing"))
        };
        let rate = |of: &str, key: &str| bytes_a_second(section(of)?, &format!("{of}."), key);
        let gpus = section("gpu")?.get("count").and_then(Value::as_integer);
        let gpus = gpus
            .and_then(|count| usize::try_from(count).ok())
            .filter(|count| (1..=64).contains(count))
            .ok_or("gpu.count must be 1 to 64")?;
        let mut links = HashMap::new();
        let listed = table.get("link").and_then(Value::as_array);
        for link in listed.into_iter().flatten().filter_map(Value::as_table) {
            let ends = link.get("gpus").and_then(Value::as_array);
            let ends: Vec<usize> = ends
                .into_iter()
                .flatten()
                .filter_map(|end| usize::try_from(end.as_integer()?).ok())
                .filter(|end| *end < gpus)
                .collect();
            let [a, b] = ends[..] else {
                return Err(format!("link.gpus must be two of {gpus} GPUs"));
            };
            let rate = bytes_a_second(link, "link.", "gb_s")?;
            links.extend([((a, b), rate), ((b, a), rate)]);
        }
        let kind = section("fabric")?.get("kind").and_then(Value::as_str);
        let has_switch = kind.ok_or("fabric.kind is missing")? == "switch";
        Ok(Rates {
            gpus,
            links,
            port: has_switch
                .then(|| rate("fabric", "port_gb_s"))
                .transpose()?,
            pcie: [
                rate("pcie", "to_host_gb_s")?,
                rate("pcie", "to_device_gb_s")?,
                rate("pcie", "peer_gb_s")?,
            ],
            host: [rate("host", "write_gb_s")?, rate("host", "read_gb_s")?],
        })
    }

    fn capacity(&self, segment: Segment) -> u64 {
        match segment {
            Segment::Link(from, to) => self.links[&(from, to)],
            Segment::PortOut(_) | Segment::PortIn(_) => self.port.unwrap_or(0),
            Segment::PcieUp(_) => self.pcie[0],
            Segment::PcieDown(_) => self.pcie[1],
            Segment::PciePeer(_) => self.pcie[2],
            Segment::HostWrite => self.host[0],
            Segment::HostRead => self.host[1],
        }
    }

    /// What a copy from one GPU to another goes through.
    fn between(&self, from: usize, to: usize) -> Vec<Segment> {
        if self.port.is_some() {
            vec![Segment::PortOut(from), Segment::PortIn(to)]
        } else if self.links.contains_key(&(from, to)) {
            vec![Segment::Link(from, to)]
        } else {
            vec![
                Segment::PcieUp(from),
                Segment::PciePeer(from),
                Segment::PcieDown(to),
            ]
        }
    }

    /// What these pairs of GPUs (from, to) carry together at most, GB/s.
    ///
    /// # Panics
    /// If one of them is not there.
    #[must_use]
    pub fn max_flow(&self, pairs: &[(usize, usize)], over: Over) -> f64 {
        assert!(
            pairs
                .iter()
                .all(|(from, to)| from != to && *from.max(to) < self.gpus),
            "{pairs:?} of {} GPUs",
            self.gpus
        );
        let alone = pairs.iter().map(|pair| self.joint(&[*pair], over)).sum();
        self.joint(pairs, over).min(alone) as f64 / 1e9
    }

    /// From all senders of these pairs to all receivers.
    fn joint(&self, pairs: &[(usize, usize)], over: Over) -> u64 {
        let mut flow = Flow::default();
        for (from, to) in pairs {
            flow.edge(Point::Senders, Point::Sent(*from), UNBOUNDED);
            flow.edge(Point::Received(*to), Point::Receivers, UNBOUNDED);
        }
        let gpus = 0..self.gpus;
        let leaves = |gpu| {
            [
                Some(Point::Sent(gpu)),
                over.relays.then_some(Point::Staged(gpu)),
            ]
        };
        let comes = |gpu| {
            [
                Some(Point::Received(gpu)),
                over.relays.then_some(Point::Staged(gpu)),
            ]
        };
        for from in gpus.clone() {
            for to in gpus.clone().filter(|to| *to != from) {
                flow.hop(self, &leaves(from), &self.between(from, to), &comes(to));
            }
            if over.host {
                let up = [Segment::PcieUp(from), Segment::HostWrite];
                flow.hop(self, &leaves(from), &up, &[Some(Point::Host)]);
                let down = [Segment::HostRead, Segment::PcieDown(from)];
                flow.hop(self, &[Some(Point::Host)], &down, &comes(from));
            }
        }
        let (senders, receivers) = (flow.point(Point::Senders), flow.point(Point::Receivers));
        ford_fulkerson(&flow.graph, senders, receivers).0
    }
}

/// The graph while it is put together.
#[derive(Default)]
struct Flow {
    graph: DiGraph<(), u64>,
    points: HashMap<Point, NodeIndex>,
}

impl Flow {
    fn point(&mut self, point: Point) -> NodeIndex {
        let graph = &mut self.graph;
        *self
            .points
            .entry(point)
            .or_insert_with(|| graph.add_node(()))
    }

    fn edge(&mut self, from: Point, to: Point, capacity: u64) {
        let (from, to) = (self.point(from), self.point(to));
        self.graph.update_edge(from, to, capacity);
    }

    /// A chain of segments, from any of some places to any of others.
    fn hop(
        &mut self,
        rates: &Rates,
        from: &[Option<Point>],
        chain: &[Segment],
        to: &[Option<Point>],
    ) {
        for segment in chain {
            let (entry, exit) = (Point::Entry(*segment), Point::Exit(*segment));
            self.edge(entry, exit, rates.capacity(*segment));
        }
        for two in chain.windows(2) {
            self.edge(Point::Exit(two[0]), Point::Entry(two[1]), UNBOUNDED);
        }
        for place in from.iter().flatten() {
            self.edge(*place, Point::Entry(chain[0]), UNBOUNDED);
        }
        for place in to.iter().flatten() {
            self.edge(Point::Exit(chain[chain.len() - 1]), *place, UNBOUNDED);
        }
    }
}

/// A rate of a section, rounded up.
fn bytes_a_second(section: &Table, of: &str, key: &str) -> Result<u64, String> {
    let value = section.get(key);
    let gb_s = value.and_then(|value| value.as_float().or(value.as_integer().map(|n| n as f64)));
    match gb_s {
        Some(gb_s) if gb_s > 0.0 && gb_s < GB_S_MAX => Ok((gb_s * 1e9).ceil() as u64),
        _ => Err(format!("{of}{key} is no rate in GB/s")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::repository_root;

    fn shipped(name: &str) -> Rates {
        let file = repository_root().join(format!("simcuda/topologies/{name}.toml"));
        Rates::read(&file).expect("a topology")
    }

    fn assert_is(gb_s: f64, expected: f64) {
        assert!((gb_s - expected).abs() < 1e-6, "{gb_s}, not {expected}");
    }

    fn over(paths: &str) -> Over {
        Over::parse(paths).expect("paths")
    }

    /// Added up by hand from the links of the files.
    #[test]
    fn one_pair() {
        for (name, from, to, [direct, relays, host, all]) in [
            // Three links of 48 into each GPU, PCIe of 12.3.
            ("beluga", 0, 1, [48.0, 144.0, 60.3, 156.3]),
            ("narval", 3, 1, [93.0, 279.0, 117.0, 303.0]),
            // One port each way, whatever lies behind it.
            ("hgx-h200", 0, 1, [396.0, 396.0, 451.0, 451.0]),
            // No link between the two: 7 over PCIe, 24 + 24 + 48 + 48 over those that both have, and of PCIe what its one link
            // up carries, whether straight or through the host's memory.
            ("dgx1-v100", 0, 5, [7.0, 151.0, 12.3, 156.3]),
        ] {
            let rates = shipped(name);
            for (paths, expected) in [
                ("direct", direct),
                ("direct,relay", relays),
                ("direct,host", host),
                ("direct,relay,host", all),
            ] {
                assert_is(rates.max_flow(&[(from, to)], over(paths)), expected);
            }
        }
    }

    /// All GPUs at once share what is one: the host's memory, and the links of relays.
    #[test]
    fn several_pairs() {
        let all = over("direct,relay,host");
        let h200 = shipped("hgx-h200");
        let ring: Vec<(usize, usize)> = (0..8).map(|gpu| (gpu, (gpu + 1) % 8)).collect();
        // Eight ports, and the host's memory, which is written at 131 by all of them.
        assert_is(h200.max_flow(&ring, all), 8.0 * 396.0 + 131.0);
        assert_is(h200.max_flow(&[(0, 1), (1, 0)], all), 2.0 * 451.0);
        // Both ways each has what leads its way.
        let beluga = shipped("beluga");
        assert_is(beluga.max_flow(&[(0, 1), (1, 0)], all), 2.0 * 156.3);
        // From two GPUs to the two others lead four links of 48, and through the host 2 x 12.3. Each pair alone has 156.3.
        assert_is(beluga.max_flow(&[(0, 2), (1, 3)], all), 4.0 * 48.0 + 24.6);
        // To one receiver leads no more than into its three links and its PCIe link.
        assert_is(beluga.max_flow(&[(0, 3), (1, 3), (2, 3)], all), 156.3);
    }

    #[test]
    fn what_is_no_topology_is_refused() {
        let good = "[gpu]\ncount = 2\n[fabric]\nkind = \"switch\"\nport_gb_s = 9\n[pcie]\nto_host_gb_s = 1.0\n\
                    to_device_gb_s = 1.0\npeer_gb_s = 1.0\n[host]\nwrite_gb_s = 1.0\nread_gb_s = 1.0\n";
        assert!(Rates::parse(good).is_ok());
        for (from, to, expected) in [
            ("count = 2", "count = 0", "gpu.count must be"),
            ("port_gb_s = 9", "", "fabric.port_gb_s is no rate"),
            ("peer_gb_s = 1.0", "peer_gb_s = -1.0", "pcie.peer_gb_s"),
            ("[host]", "[guest]", "[host] is missing"),
            ("kind = \"switch\"", "", "fabric.kind is missing"),
            (
                "[pcie]",
                "[[link]]\ngpus = [0, 2]\ngb_s = 1.0\n[pcie]",
                "two of 2 GPUs",
            ),
            ("[gpu]", "[gpu", ""),
        ] {
            let why = Rates::parse(&good.replace(from, to)).expect_err(expected);
            assert!(why.contains(expected), "{why}");
        }
        assert!(Over::parse("direct,ether").is_err());
    }
}
