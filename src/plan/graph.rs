//! A plan as copies, and what each of them waits for.
//!
//! The nodes are the same however a plan is run: by streams, by a graph, by one process or by several. An edge says why:
//! the bytes must be there (*data*), the slot must be empty (*slot*), copies of one hop of a path follow one another
//! (*stream*).

use super::{Order, Plan};
use crate::topology::Place;
use serde::Serialize;
use std::fmt::Write as _;

/// An engine of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// Copies between GPUs.
    Peer(u8),
    /// Copies to the host.
    ToHost(u8),
    /// Copies from the host.
    ToDevice(u8),
}

/// An end of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// The message's buffer on a GPU.
    Buffer {
        /// Number of the GPU.
        gpu: u8,
        /// Where in the message.
        offset: u64,
    },
    /// A slot of the path's staging ring.
    Slot {
        /// Where the ring is.
        at: Place,
        /// Number of the slot in the ring.
        slot: u32,
    },
}

/// A copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Copy {
    /// Number of the path in the plan.
    pub path: u8,
    /// Number of the chunk in the path.
    pub chunk: u32,
    /// Number of the hop.
    pub hop: u8,
    /// What makes it.
    pub engine: Engine,
    /// From.
    pub from: End,
    /// To.
    pub to: End,
    /// Length.
    pub bytes: u64,
}

/// Why a copy waits for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Why {
    /// It moves what the other brings.
    Data,
    /// It fills the slot that the other empties.
    Slot,
    /// They are copies of the same hop of the same path.
    Stream,
}

/// `after` waits for `before`; numbers of copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Edge {
    /// This one first.
    pub before: u32,
    /// Then this one.
    pub after: u32,
    /// Why.
    pub why: Why,
}

/// A plan's copies, in an order in which they can be launched: each behind all that it waits for.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Graph {
    /// The copies.
    pub copies: Vec<Copy>,
    /// What waits for what.
    pub edges: Vec<Edge>,
}

/// The copies of paths with so many chunks and hops each, in the order of their launches: numbers of path, chunk and hop.
pub(super) fn launches(paths: &[(u32, usize)], order: Order) -> Vec<(usize, u32, usize)> {
    let copies_of = |path: usize| {
        let (chunks, hops) = paths[path];
        (0..chunks).flat_map(move |chunk| (0..hops).map(move |hop| (path, chunk, hop)))
    };
    let mut copies: Vec<_> = (0..paths.len()).flat_map(copies_of).collect();
    // In the order in which they can begin, a chunk being a hop further at each step, so that none is launched while
    // others could run: the thread that launches them may be what all wait for. And all paths equally far, those with
    // many chunks as those with few.
    let progress = |&(path, chunk, hop): &(usize, u32, usize)| {
        let (chunks, hops) = paths[path];
        let turn = match order {
            Order::PathByPath => path,
            Order::RoundRobin => 0,
            // Only the direct path has one hop.
            Order::DirectFirst => usize::from(hops > 1),
        };
        let step = f64::from(chunk) + hop as f64;
        (turn, step / (f64::from(chunks) + hops as f64 - 1.0))
    };
    copies.sort_by(|x, y| {
        let (x, y) = (progress(x), progress(y));
        x.0.cmp(&y.0).then(x.1.total_cmp(&y.1))
    });
    copies
}

impl Plan {
    /// The copies in the order of their launches: numbers of path, chunk and hop.
    pub fn launches(&self) -> impl Iterator<Item = (usize, u32, usize)> {
        let paths = self.paths().iter();
        let paths: Vec<_> = paths.map(|path| (path.chunks, path.path.hops())).collect();
        launches(&paths, self.order).into_iter()
    }

    /// The plan as copies.
    #[must_use]
    pub fn graph(&self) -> Graph {
        let mut graph = Graph::default();
        // Number of the copy of a path's chunk on a hop.
        let mut made: Vec<Vec<u32>> = self
            .paths()
            .iter()
            .map(|path| vec![u32::MAX; path.chunks as usize * path.path.hops()])
            .collect();
        for (number, chunk, hop) in self.launches() {
            let path = &self.paths()[number];
            let hops = path.path.hops();
            let at = |chunk: u32, hop: usize| chunk as usize * hops + hop;
            let this = graph.copies.len() as u32;
            graph.copies.push(self.copy(number, chunk, hop));
            made[number][at(chunk, hop)] = this;
            let mut wait = |before: u32, why: Why| {
                let after = this;
                graph.edges.push(Edge { before, after, why });
            };
            if chunk > 0 {
                wait(made[number][at(chunk - 1, hop)], Why::Stream);
            }
            if hop > 0 {
                wait(made[number][at(chunk, hop - 1)], Why::Data);
            }
            if hop + 1 < hops && chunk >= path.slots {
                wait(made[number][at(chunk - path.slots, hop + 1)], Why::Slot);
            }
        }
        graph
    }

    fn copy(&self, number: usize, chunk: u32, hop: usize) -> Copy {
        let path = &self.paths()[number];
        let (offset, bytes) = path.chunk(chunk);
        let places = path.path.places();
        let end = |index: usize| match places[index] {
            Place::Gpu(gpu) if index == 0 || index + 1 == places.len() => {
                End::Buffer { gpu, offset }
            }
            at => End::Slot {
                at,
                slot: chunk % path.slots.max(1),
            },
        };
        let gpu = path.engines[hop];
        Copy {
            path: number as u8,
            chunk,
            hop: hop as u8,
            engine: match (places[hop], places[hop + 1]) {
                (Place::Host, _) => Engine::ToDevice(gpu),
                (_, Place::Host) => Engine::ToHost(gpu),
                _ => Engine::Peer(gpu),
            },
            from: end(hop),
            to: end(hop + 1),
            bytes,
        }
    }
}

impl Graph {
    /// For Graphviz: a box a copy, a column a hop of a path.
    #[must_use]
    pub fn dot(&self, plan: &Plan) -> String {
        let mut out = String::from(
            "digraph plan {\n  rankdir=LR;\n  node [shape=box, fontname=\"sans-serif\"];\n",
        );
        for (number, path) in plan.paths().iter().enumerate() {
            let _ = writeln!(
                out,
                "  subgraph cluster_{number} {{\n    label=\"{}: {} bytes\";",
                path.path, path.bytes
            );
            for (id, copy) in self
                .copies
                .iter()
                .enumerate()
                .filter(|(_, copy)| usize::from(copy.path) == number)
            {
                let places = path.path.places();
                let hop = usize::from(copy.hop);
                let (gpu, engine) = match copy.engine {
                    Engine::Peer(gpu) => (gpu, "peer"),
                    Engine::ToHost(gpu) => (gpu, "to host"),
                    Engine::ToDevice(gpu) => (gpu, "to device"),
                };
                let _ = writeln!(
                    out,
                    "    c{id} [label=\"{}.{} {} to {}\\n{} bytes, GPU{gpu} {engine}\"];",
                    number,
                    copy.chunk,
                    places[hop],
                    places[hop + 1],
                    copy.bytes
                );
            }
            out += "  }\n";
        }
        for edge in &self.edges {
            let style = match edge.why {
                Why::Data => "",
                Why::Slot => " [style=dashed]",
                Why::Stream => " [style=dotted]",
            };
            let _ = writeln!(out, "  c{} -> c{}{style};", edge.before, edge.after);
        }
        out + "}\n"
    }
}
