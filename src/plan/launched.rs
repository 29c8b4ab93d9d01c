//! When the copies end that one thread launches, call by call.
//!
//! The closed form of [`super::shares`] knows pipelines whose copies are launched in time. Where one thread launches all of a plan,
//! and of a window of them, it may be what a copy waits for, and which of both it is changes from copy to copy. So this goes
//! through the launches in their order ([`graph::launches`]) once, with the same times of copies.

use super::graph;
use super::shares::{Part, Pipeline};
use super::{Launcher, Order, DRIVES_MAX, MAX_HOPS, MAX_PATHS};
use crate::model::Calls;

/// When the last copy of the last message of a window has ended and the thread knows.
pub(super) fn us(
    parts: &[Part],
    pipelines: &[Pipeline],
    order: Order,
    window: u32,
    launcher: &Launcher,
) -> f64 {
    let Calls {
        launch_us,
        idle_us,
        event_us,
    } = launcher.calls;
    let paths = parts.iter().zip(pipelines);
    let paths: Vec<_> = paths
        .map(|(part, pipeline)| (part.chunks, pipeline.hops))
        .collect();
    let launches = graph::launches(&paths, order);
    // Where the ends of a part's copies begin.
    let mut firsts = [0; MAX_PATHS];
    for at in 1..parts.len() {
        firsts[at] = firsts[at - 1] + parts[at - 1].chunks as usize * pipelines[at - 1].hops;
    }
    let mut ends = vec![0.0_f64; launches.len()];
    // Of the last copy of each hop, whichever message it was of.
    let mut lanes = [[0.0_f64; MAX_HOPS]; MAX_PATHS];
    let mut over: Vec<f64> = Vec::new();
    let mut now = 0.0_f64;
    for message in 0..window {
        // No more are under way at once. That the thread asks whether they have ended does not show in what windows take on the
        // simulated node, so it is not counted.
        if message >= DRIVES_MAX {
            now = now.max(over[(message - DRIVES_MAX) as usize]);
        }
        let mut last = 0.0_f64;
        for &(at, chunk, hop) in &launches {
            let (part, pipeline) = (&parts[at], &pipelines[at]);
            let end_of = |chunk: u32, hop: usize| firsts[at] + chunk as usize * pipeline.hops + hop;
            let (is_first, is_last) = (hop == 0, hop + 1 == pipeline.hops);
            let hand_over_us = pipeline.epsilon_us / (pipeline.hops as f64 - 1.0).max(1.0);
            let mut ready = lanes[at][hop];
            if !is_first {
                now += event_us;
                ready = ready.max(ends[end_of(chunk, hop - 1)] + hand_over_us);
            }
            if !is_last && chunk >= part.slots {
                now += event_us;
                ready = ready.max(ends[end_of(chunk - part.slots, hop + 1)] + hand_over_us);
            }
            // A stream that has to wait for another is not idle.
            let is_idle = is_first && ready <= now;
            now += launch_us + if is_idle { idle_us } else { 0.0 };
            let begin = u64::from(chunk) * part.chunk_bytes;
            let bytes = part.chunk_bytes.min(part.bytes - begin) as f64;
            let end = ready.max(now) + pipeline.chunk_us(hop, bytes);
            lanes[at][hop] = end;
            ends[end_of(chunk, hop)] = end;
            last = last.max(end);
            let is_awaited = !is_last || (!is_first && chunk + part.slots < part.chunks);
            now += if is_awaited { event_us } else { 0.0 };
        }
        now += parts.len() as f64 * event_us;
        over.push(last);
    }
    over.last().map_or(now, |last| last.max(now)) + launcher.finish_us
}
