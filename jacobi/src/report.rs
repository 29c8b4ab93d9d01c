//! What a run reports: lines for people, JSON for programs.

use crate::failure::{Failure, Outcome};
use serde::Serialize;
use std::path::Path;

/// Results of a run. Durations are in seconds, by the clock named.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Version of the program.
    pub version: &'static str,
    /// The MPI library, as it names itself.
    pub mpi_library: String,
    /// Number of ranks.
    pub ranks: u32,
    /// Grid of ranks: rows, columns.
    pub dims: [u32; 2],
    /// Cells of the domain: rows, columns.
    pub size: [u64; 2],
    /// float or double.
    #[serde(rename = "type")]
    pub cell: String,
    /// What lies beyond the edges.
    pub boundary: String,
    /// How halos were exchanged.
    pub exchange: String,
    /// Seed of the initial field.
    pub seed: u64,
    /// Iterations before the clock started.
    pub warmup: u64,
    /// Iterations done.
    pub iterations: u64,
    /// Whether the norm fell below the tolerance.
    pub converged: bool,
    /// max or l2.
    pub norm_kind: String,
    /// Norm of the last iteration's change; none where there was no iteration.
    pub norm: Option<f64>,
    /// Hash of the final field, in hexadecimal, the same for any number of ranks.
    pub hash: String,
    /// wall or virtual.
    pub clock: &'static str,
    /// On a simulated node, by which part of the time programs have acted later than they could have.
    pub late: Option<f64>,
    /// Time per phase: the mean of the ranks, and the slowest rank's total.
    pub seconds: Seconds,
    /// Share of the exchange in the total, from the means.
    pub communication_share: f64,
    /// Cells updated per second, in millions.
    pub mcells_per_second: f64,
    /// Point-to-point messages on device buffers that all ranks sent, warm-up included.
    pub messages: u64,
    /// Bytes of their payload.
    pub message_bytes: u64,
    /// Each rank.
    pub per_rank: Vec<RankReport>,
    /// Result of the comparison with the host reference, where asked for.
    pub check: Option<Check>,
}

/// Time per phase.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Seconds {
    /// All iterations.
    pub total: f64,
    /// The kernels of the iterations.
    pub compute: f64,
    /// Packing, MPI calls, unpacking.
    pub exchange: f64,
    /// Norms.
    pub norm: f64,
}

/// One rank.
#[derive(Clone, Debug, Serialize)]
pub struct RankReport {
    /// Its rank.
    pub rank: u32,
    /// UUID of its GPU.
    pub gpu: String,
    /// Cells of its part: rows, columns.
    pub part: [u64; 2],
    /// Messages it sent.
    pub messages: u64,
    /// Bytes of their payload.
    pub message_bytes: u64,
    /// Its times.
    pub seconds: Seconds,
}

/// Comparison with the host reference.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// cells: each was compared; hash: the hash of all.
    pub mode: &'static str,
    /// Whether all is equal.
    pub equal: bool,
    /// Cells that differ, where each was compared.
    pub differing_cells: Option<u64>,
}

/// A device's UUID as `nvidia-smi -L` writes it.
pub fn uuid(bytes: &[u8]) -> String {
    let hex = |range: std::ops::Range<usize>| {
        bytes[range]
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect::<String>()
    };
    format!(
        "GPU-{}-{}-{}-{}-{}",
        hex(0..4),
        hex(4..6),
        hex(6..8),
        hex(8..10),
        hex(10..16)
    )
}

/// A size in bytes with a binary unit.
pub fn bytes(n: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.iter().find(|(_, shift)| n >> shift > 0) {
        Some((unit, shift)) => format!("{:.1} {unit}", n as f64 / (1u64 << shift) as f64),
        None => format!("{n} B"),
    }
}

impl Report {
    /// Lines for people.
    pub fn text(&self) -> String {
        let s = &self.seconds;
        let norm = self.norm.map_or("none".to_owned(), |n| format!("{n:.9e}"));
        let ended = if self.converged { "converged" } else { "done" };
        let mut lines = vec![
            format!(
                "domain      {} x {} {}, {} boundary, {} ranks as {} x {}",
                self.size[0],
                self.size[1],
                self.cell,
                self.boundary,
                self.ranks,
                self.dims[0],
                self.dims[1]
            ),
            format!(
                "iterations  {} {ended}, {} norm of the last change {norm}",
                self.iterations, self.norm_kind
            ),
            format!(
                "time        {:.6} s ({} clock), {:.1} Mcells/s",
                s.total, self.clock, self.mcells_per_second
            ),
            format!(
                "phases      compute {:.6} s, exchange {:.6} s ({:.1} %), norm {:.6} s",
                s.compute,
                s.exchange,
                100.0 * self.communication_share,
                s.norm
            ),
            format!(
                "messages    {} {} of {} in all, {}",
                self.messages,
                self.exchange,
                bytes(self.message_bytes),
                self.per_message()
            ),
        ];
        if let Some(check) = &self.check {
            let what = if check.mode == "cells" {
                "each cell"
            } else {
                "the hash"
            };
            let verdict = match (check.equal, check.differing_cells) {
                (true, _) => "equal, bit for bit".to_owned(),
                (false, Some(n)) => format!("{n} cells DIFFER"),
                (false, None) => "DIFFERENT".to_owned(),
            };
            lines.push(format!(
                "check       {what} against the host reference: {verdict}"
            ));
        }
        lines.join("\n")
    }

    fn per_message(&self) -> String {
        match self.message_bytes.checked_div(self.messages) {
            Some(mean) => format!("{} each on average", bytes(mean)),
            None => "none sent".to_owned(),
        }
    }

    /// Writes the JSON form.
    pub fn write_json(&self, path: &Path) -> Outcome<()> {
        let failed = |e: &dyn std::fmt::Display| {
            Failure::input(format!("cannot write {}: {e}", path.display()))
        };
        let mut text = serde_json::to_string_pretty(self).map_err(|e| failed(&e))?;
        text.push('\n');
        std::fs::write(path, text).map_err(|e| failed(&e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_binary() {
        assert_eq!(
            [bytes(1023), bytes(1024), bytes(3 << 29), bytes(0)],
            ["1023 B", "1.0 KiB", "1.5 GiB", "0 B"]
        );
    }

    #[test]
    fn uuids_look_as_nvidia_smi_writes_them() {
        let raw: Vec<u8> = (0..16).collect();
        assert_eq!(uuid(&raw), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
    }
}
