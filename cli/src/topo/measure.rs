//! Measures the node by copies of one process: each hop by the engines of both its ends, whether two hops out of one GPU
//! share a port, and what the host's memory carries for all GPUs at once, written and read at the same time.

use anabranch_engine::model::{
    fit, Calls, HopModel, Line, Model, SegmentModel, BYTES_PER_US, PCIE_SPREAD,
};
use anabranch_engine::topology::found::Facts;
use anabranch_engine::topology::{Fabric, Place, SegmentKind, Topology};
use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};

use super::driver::{Node, Stream};
use crate::bench::cuda::{DeviceContext, DevicePtr};

const MIB: usize = 1 << 20;
/// Sizes of single copies.
const SIZES: [usize; 4] = [MIB / 4, MIB, 4 * MIB, 16 * MIB];
/// Room for the largest copy.
const ROOM: usize = SIZES[SIZES.len() - 1];
/// Copies in a row, to tell what each costs apart from what their launch and end cost. Twice as many of [`MIB`] have room.
const ROW: usize = 8;
/// Host memory of each GPU in each direction while all copy at once: more than caches hold, or they would be measured.
const HOST_ROOM: usize = 2 * ROOM;
/// Copied at once there: about a chunk of a long message.
const HOST_PIECE: usize = ROOM / 4;
/// Most are timed so often.
const TIMES: usize = 3;

/// A GPU's memory and streams for the measurement.
struct Bench {
    context: DeviceContext,
    memory: DevicePtr,
    other: DevicePtr,
    streams: [Stream; 2],
    /// [`HOST_ROOM`] that is written, and as much that is read.
    host: DevicePtr,
}

/// One copy.
#[derive(Clone, Copy)]
struct Transfer {
    to: DevicePtr,
    from: DevicePtr,
    stream: Stream,
}

struct Measurement<'a> {
    node: &'a Node,
    gpus: Vec<Bench>,
}

/// Measures. `facts` learns how the GPUs are connected, if that can be told.
///
/// # Errors
/// What the driver reports, or times from which no rate follows.
pub fn run(node: &Node, facts: &mut Facts) -> anyhow::Result<(Topology, Model)> {
    let contexts = node.enter_all()?;
    let bench = |context: &DeviceContext| -> anyhow::Result<Bench> {
        Ok(Bench {
            context: *context,
            memory: node.alloc(*context, ROOM)?,
            other: node.alloc(*context, ROOM)?,
            streams: [node.stream(*context)?, node.stream(*context)?],
            host: node.alloc_host(2 * HOST_ROOM)?,
        })
    };
    let gpus = contexts.iter().map(bench).collect::<anyhow::Result<_>>()?;
    let measurement = Measurement { node, gpus };
    facts.fabric = measurement.fabric(facts)?;
    let topology = facts.topology()?;
    let model = measurement.model(&topology, facts.fabric);
    measurement.close()?;
    Ok((topology, model?))
}

/// The shortest of so many times, since whatever else runs can only add to them. One before them is not counted.
fn shortest<const N: usize>(
    times: usize,
    mut once: impl FnMut() -> anyhow::Result<[f64; N]>,
) -> anyhow::Result<[f64; N]> {
    once()?;
    let mut best = [f64::INFINITY; N];
    for _ in 0..times {
        for (best, us) in best.iter_mut().zip(once()?) {
            *best = best.min(us);
        }
    }
    Ok(best)
}

/// What each of [`ROW`] takes behind the first, by the time that so many take.
fn each_more(of: impl Fn(usize) -> anyhow::Result<[f64; 1]>) -> anyhow::Result<f64> {
    let ([one], [row]) = (of(1)?, of(ROW)?);
    Ok((row - one) / (ROW - 1) as f64)
}

impl Measurement<'_> {
    fn close(self) -> anyhow::Result<()> {
        for gpu in &self.gpus {
            for stream in gpu.streams {
                self.node.destroy(stream)?;
            }
            self.node.free(gpu.context, gpu.memory)?;
            self.node.free(gpu.context, gpu.other)?;
            self.node.free_host(gpu.host)?;
        }
        Ok(())
    }

    /// Time of `row` rounds of copies of `bytes`, from the first launch until all have ended, and of the launches alone.
    fn once(&self, transfers: &[Transfer], bytes: usize, row: usize) -> anyhow::Result<(f64, f64)> {
        let start = self.node.now_us();
        for _ in 0..row {
            for transfer in transfers {
                self.node
                    .copy(transfer.to, transfer.from, bytes, transfer.stream)?;
            }
        }
        let launched = self.node.now_us();
        for transfer in transfers {
            self.node.wait(transfer.stream)?;
        }
        Ok((self.node.now_us() - start, launched - start))
    }

    fn time(&self, transfers: &[Transfer], bytes: usize, row: usize) -> anyhow::Result<(f64, f64)> {
        let [all, launches] = shortest(TIMES, || {
            let (all, launches) = self.once(transfers, bytes, row)?;
            Ok([all, launches])
        })?;
        Ok((all, launches))
    }

    /// What a copy of [`MIB`] takes behind others while long copies go on in another stream of its GPU.
    fn beside(&self, transfer: Transfer, long: Transfer) -> anyhow::Result<f64> {
        let of = |copies| {
            shortest(TIMES, || {
                for _ in 0..2 * ROW {
                    self.node.copy(long.to, long.from, ROOM, long.stream)?;
                }
                let (us, _) = self.once(&[transfer], MIB, copies)?;
                self.node.wait(long.stream)?;
                Ok([us])
            })
        };
        each_more(of)
    }

    /// A copy out of the GPU of `place` that shares no link with those to the host, in a stream beside theirs.
    fn outward(&self, topology: &Topology, place: Place) -> Option<Transfer> {
        let Place::Gpu(gpu) = place else {
            return None;
        };
        let mut peers = (0..self.gpus.len() as u8).map(Place::Gpu);
        let is_apart = |peer: &Place| {
            topology
                .hop(place, *peer)
                .is_some_and(|hop| hop.is_nvlink())
        };
        let peer = peers.find(is_apart)?;
        Some(Transfer {
            stream: self.gpus[usize::from(gpu)].streams[1],
            ..self.between(place, peer, true)
        })
    }

    /// What a copy of [`MIB`] takes that is launched in one batch with those before it. None where the driver has no batches.
    fn batched(&self, transfer: Transfer) -> anyhow::Result<Option<f64>> {
        let (to, from) = (transfer.to, transfer.from);
        let mut has_batches = true;
        let mut of = |copies| {
            shortest(TIMES, || {
                let start = self.node.now_us();
                has_batches &= self
                    .node
                    .copy_batch(to, from, MIB, copies, transfer.stream)?;
                self.node.wait(transfer.stream)?;
                Ok([self.node.now_us() - start])
            })
        };
        let ([row], [two]) = (of(ROW)?, of(2 * ROW)?);
        Ok(has_batches.then_some((two - row) / ROW as f64))
    }

    /// What the thread pays that launches copies which events join to others, as where one rank makes all copies of a message
    /// over relays.
    fn calls(&self, model: &Model) -> anyhow::Result<Option<Calls>> {
        let Some(hop) = model.hops.first() else {
            return Ok(None);
        };
        let pushed = self.between(hop.from, hop.to, hop.push.is_some());
        let stream = pushed.stream;
        let event = self.node.event(stream)?;
        let [launch_us, idle_us, event_us] = shortest(TIMES * ROW, || {
            let start = self.node.now_us();
            self.node.copy(pushed.to, pushed.from, MIB, stream)?;
            let first = self.node.now_us();
            self.node.copy(pushed.to, pushed.from, MIB, stream)?;
            let launched = self.node.now_us();
            self.node.join(event, stream, stream)?;
            let joined = self.node.now_us();
            self.node.wait(stream)?;
            Ok([launched - first, first - start, (joined - launched) / 2.0])
        })?;
        self.node.destroy_event(event)?;
        Ok(Some(Calls {
            launch_us: rounded(launch_us),
            idle_us: rounded((idle_us - launch_us).max(0.0)),
            event_us: rounded(event_us),
        }))
    }

    /// What a copy waits for the event of one by another GPU, beyond what one waits behind another on its own stream: by a chain of
    /// copies from one GPU to the host and from there to another, each behind the event of the one before.
    fn hand_over(&self) -> anyhow::Result<Option<f64>> {
        if self.gpus.len() < 2 {
            return Ok(None);
        }
        let down = self.between(Place::Gpu(0), Place::Host, true);
        let up = self.between(Place::Host, Place::Gpu(1), false);
        let events = [self.node.event(down.stream)?, self.node.event(up.stream)?];
        let chain = |pairs| {
            shortest(TIMES, || {
                let start = self.node.now_us();
                for _ in 0..pairs {
                    for (this, next, event) in [(down, up, events[0]), (up, down, events[1])] {
                        self.node.copy(this.to, this.from, MIB, this.stream)?;
                        self.node.join(event, this.stream, next.stream)?;
                    }
                }
                self.node.wait(up.stream)?;
                let us = self.node.now_us() - start;
                self.node.wait(down.stream)?;
                Ok([us])
            })
        };
        let pair = each_more(chain)?;
        for event in events {
            self.node.destroy_event(event)?;
        }
        let by_itself = |transfer| each_more(|copies| Ok([self.time(&[transfer], MIB, copies)?.0]));
        let us = (pair - by_itself(down)? - by_itself(up)?) / 2.0;
        Ok(Some(rounded(us.max(0.0))))
    }

    fn between(&self, from: Place, to: Place, pushed: bool) -> Transfer {
        let gpu = |place: Place| match place {
            Place::Gpu(gpu) => Some(&self.gpus[usize::from(gpu)]),
            Place::Host => None,
        };
        match (gpu(from), gpu(to)) {
            (Some(source), Some(target)) => Transfer {
                to: target.other,
                from: source.memory,
                stream: if pushed {
                    source.streams[0]
                } else {
                    target.streams[0]
                },
            },
            (Some(source), None) => Transfer {
                to: source.host,
                from: source.memory,
                stream: source.streams[0],
            },
            (None, Some(target)) => Transfer {
                to: target.other,
                from: target.host + HOST_ROOM as DevicePtr,
                // Not the one of the way up: the two may be under way at once.
                stream: target.streams[1],
            },
            (None, None) => unreachable!("no hop has the host at both ends"),
        }
    }

    /// Copies from one GPU to two others: behind a switch they share its port, over links of their own they do not.
    fn fabric(&self, facts: &Facts) -> anyhow::Result<Option<Fabric>> {
        let n = self.gpus.len();
        let linked = |from: usize, to: usize| {
            from != to
                && facts
                    .pairs
                    .get(from * n + to)
                    .is_some_and(|pair| pair.access && pair.atomics)
        };
        for from in 0..n {
            let mut peers = (0..n).filter(|to| linked(from, *to));
            let (Some(first), Some(second)) = (peers.next(), peers.next()) else {
                continue;
            };
            let mut ways = [first, second]
                .map(|to| self.between(Place::Gpu(from as u8), Place::Gpu(to as u8), true));
            ways[1].stream = self.gpus[from].streams[1];
            let longer = self
                .time(&ways[..1], ROOM, 1)?
                .0
                .max(self.time(&ways[1..], ROOM, 1)?.0);
            let both = self.time(&ways, ROOM, 1)?.0;
            let shared = both > 1.4 * longer;
            return Ok(Some(if shared {
                Fabric::Switch
            } else {
                Fabric::Links
            }));
        }
        Ok(None)
    }

    #[allow(
        clippy::too_many_lines,
        reason = "one kind of measurement after the other, into one model"
    )]
    fn model(&self, topology: &Topology, fabric: Option<Fabric>) -> anyhow::Result<Model> {
        let mut model = Model::nominal(topology);
        let style = ProgressStyle::with_template("measuring {bar:30} {pos}/{len} {msg}")?;
        let bar = ProgressBar::new(model.hops.len() as u64).with_style(style);
        let mut around = Vec::new();
        let mut launches = Vec::new();
        let mut hops = Vec::new();
        for hop in &model.hops {
            // What a push takes besides, its launch and its end.
            let mut around_push: Option<f64> = None;
            bar.set_message(format!("{} to {}", hop.from, hop.to));
            let by_nvlink = topology
                .hop(hop.from, hop.to)
                .is_some_and(|hop| hop.is_nvlink());
            let mut line = |pushed: bool| -> anyhow::Result<Line> {
                let transfer = [self.between(hop.from, hop.to, pushed)];
                let mut samples = Vec::new();
                for bytes in SIZES {
                    samples.push((bytes as u64, self.time(&transfer, bytes, 1)?.0));
                }
                let fitted = fit::line(&samples).with_context(|| {
                    format!(
                        "{} to {}: no rate follows from {samples:?}",
                        hop.from, hop.to
                    )
                })?;
                // What follows directly has no launch and no end of its own to wait for.
                let (row, calls) = self.time(&transfer, MIB, ROW)?;
                let each = (row - samples[1].1) / (ROW - 1) as f64;
                let wire = MIB as f64 / (fitted.gb_s * BYTES_PER_US);
                let mut alpha_us = (each - wire).clamp(0.0, fitted.alpha_us);
                // Of a process's own pulls each waits for the GPU that the one before it reads, which those from another
                // process do not: theirs cost what one by itself does.
                let alone = around_push.filter(|_| !pushed);
                if let Some(around) = alone {
                    alpha_us = alpha_us.min((fitted.alpha_us - around).max(0.0));
                }
                around_push = Some(fitted.alpha_us - alpha_us);
                around.push(fitted.alpha_us - alpha_us);
                // The part of a message that goes by the host does so beside the part that does not.
                if hop.to == Place::Host {
                    if let Some(long) = self.outward(topology, hop.from) {
                        alpha_us = alpha_us.max(self.beside(transfer[0], long)? - wire);
                    }
                }
                launches.push(calls / ROW as f64);
                // Only what goes from one GPU to another by one copy is launched in batches.
                let is_between_gpus = hop.from != Place::Host && hop.to != Place::Host;
                let batched = is_between_gpus.then(|| self.batched(transfer[0]));
                let batched_us = batched.transpose()?.flatten().map(|each| {
                    let us = each - MIB as f64 / (fitted.gb_s * BYTES_PER_US);
                    rounded(us.clamp(0.0, alpha_us))
                });
                Ok(Line {
                    alpha_us: rounded(alpha_us),
                    gb_s: rounded(fitted.gb_s),
                    spread: if by_nvlink { 0.0 } else { PCIE_SPREAD },
                    batched_us,
                })
            };
            hops.push(HopModel {
                push: hop.push.map(|_| line(true)).transpose()?,
                pull: hop.pull.map(|_| line(false)).transpose()?,
                ..*hop
            });
            bar.inc(1);
        }
        bar.finish_and_clear();
        model.hops = hops;
        model.fabric = fabric;
        model.launch_us = rounded(median(&mut launches));
        model.calls = self.calls(&model)?;
        model.hand_over_us = self.hand_over()?;
        model.finish_us = rounded((median(&mut around) - model.launch_us).max(0.0));
        // Those through which a single hop is measured carry what it does; the host's memory serves all.
        let gb_s = self.host_capacity()?;
        let carries = |kind: SegmentKind, ends: fn(Place) -> (Place, Place)| {
            let gpus = (0..self.gpus.len() as u8).map(Place::Gpu);
            let fastest = gpus.filter_map(|gpu| {
                let (from, to) = ends(gpu);
                let hop = model.hop(from, to)?;
                Some(hop.push.or(hop.pull)?.gb_s)
            });
            SegmentModel {
                kind,
                gb_s: rounded(fastest.fold(gb_s, f64::max)),
            }
        };
        model.segments = vec![
            carries(SegmentKind::HostWrite, |gpu| (gpu, Place::Host)),
            carries(SegmentKind::HostRead, |gpu| (Place::Host, gpu)),
        ];
        let switches = self.switches(topology, &model)?;
        model.segments.extend(switches);
        Ok(model)
    }

    /// What the links of PCIe switches carry while all GPUs under one copy at once, each direction by itself.
    fn switches(&self, topology: &Topology, model: &Model) -> anyhow::Result<Vec<SegmentModel>> {
        let mut measured = Vec::new();
        for segment in &topology.segments {
            let (number, is_up) = match segment.kind {
                SegmentKind::PcieSwitchUp(number) => (number, true),
                SegmentKind::PcieSwitchDown(number) => (number, false),
                _ => continue,
            };
            let gpus = topology.pcie.switches[usize::from(number)].gpus.iter();
            let ends = gpus.map(|gpu| match is_up {
                true => (Place::Gpu(*gpu), Place::Host),
                false => (Place::Host, Place::Gpu(*gpu)),
            });
            let ways: Vec<Transfer> = ends
                .clone()
                .map(|(from, to)| self.between(from, to, is_up))
                .collect();
            let (us, _) = self.time(&ways, ROOM, 2)?;
            let together = (2 * ways.len() * ROOM) as f64 / (us * BYTES_PER_US);
            let alone = ends.filter_map(|(from, to)| {
                let hop = model.hop(from, to)?;
                Some(hop.push.or(hop.pull)?.gb_s)
            });
            measured.push(SegmentModel {
                kind: segment.kind,
                gb_s: rounded(alone.fold(together, f64::max)),
            });
        }
        Ok(measured)
    }

    /// What the host's memory carries in each direction while all GPUs write to it and read from it, GB/s: messages that
    /// go through it do both.
    fn host_capacity(&self) -> anyhow::Result<f64> {
        let gpus = (0..self.gpus.len() as u8).map(Place::Gpu);
        let both: Vec<[Transfer; 2]> = gpus
            .map(|gpu| {
                [
                    self.between(gpu, Place::Host, true),
                    self.between(Place::Host, gpu, false),
                ]
            })
            .collect();
        // Piece after piece of the host's memory, so that the launches of one round hide behind the copies of another.
        let mut pieces = Vec::new();
        for at in 0..HOST_ROOM / HOST_PIECE {
            let offset = (at * HOST_PIECE) as DevicePtr;
            for [up, down] in &both {
                pieces.push(Transfer {
                    to: up.to + offset,
                    ..*up
                });
                pieces.push(Transfer {
                    from: down.from + offset,
                    ..*down
                });
            }
        }
        let (us, _) = self.time(&pieces, HOST_PIECE, 2)?;
        Ok((both.len() * HOST_ROOM * 2) as f64 / (us * BYTES_PER_US))
    }
}

/// A thousandth of a GB/s or of a microsecond is finer than any measurement.
fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
