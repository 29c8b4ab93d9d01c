//! The report as tables for people.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anabranch_engine::config::format_size;

use super::sums::{Class, Report};
use crate::table;

/// A matrix has no more ranks than this; of more the pairs with most bytes are listed.
const MATRIX_RANKS: usize = 16;
/// So many of them.
const PAIRS: usize = 20;
/// Functions that are listed.
const FUNCTIONS: usize = 24;

impl Report {
    /// All of it.
    pub fn text(&self) -> String {
        let mut text = self.head();
        for note in &self.notes {
            let _ = writeln!(text, "! {note}");
        }
        self.ranks_text(&mut text);
        self.calls_text(&mut text);
        self.paths_text(&mut text);
        self.pairs_text(&mut text);
        self.fallbacks_text(&mut text);
        if !self.remarks.is_empty() {
            text += "\nWorth a look\n";
            for remark in &self.remarks {
                let _ = writeln!(text, "- {remark}");
            }
        }
        text
    }

    fn head(&self) -> String {
        let there = self.ranks.len();
        let ranks = match self.size {
            Some(size) if size as usize != there => format!("{there} of {size} ranks"),
            _ if there == 1 => "1 rank".to_owned(),
            _ => format!("{there} ranks"),
        };
        let hosts = match &self.hosts[..] {
            [] => String::new(),
            [host] => format!(" on {host}"),
            hosts if hosts.len() <= 8 => {
                format!(" on {} hosts ({})", hosts.len(), hosts.join(", "))
            }
            hosts => format!(" on {} hosts", hosts.len()),
        };
        let longest = self.ranks.iter().filter_map(|rank| rank.run_ms);
        let longest = longest.fold(0.0, f64::max);
        let run = match longest > 0.0 {
            true => format!(", {:.3} s from MPI_Init to MPI_Finalize", longest * 1e-3),
            false => String::new(),
        };
        format!(
            "anabranch {}: {ranks}{hosts}{run}\n",
            self.versions.join(", ")
        )
    }

    fn ranks_text(&self, text: &mut String) {
        if self.ranks.len() > MATRIX_RANKS {
            return;
        }
        let head = ["rank", "host", "pid", "ms", "in MPI", "received", "sent"];
        let rows = self.ranks.iter().map(|row| {
            let share = row.run_ms.filter(|ms| *ms > 0.0);
            vec![
                row.rank.to_string(),
                row.host.clone().unwrap_or_default(),
                row.pid.to_string(),
                row.run_ms
                    .map_or_else(|| "-".into(), |ms| format!("{ms:.3}")),
                share.map_or_else(|| "-".into(), |ms| percent(row.in_calls_ms / ms)),
                about(row.received_bytes),
                about(row.sent_bytes),
            ]
        });
        *text += &table::titled(
            "Ranks (device buffers received and sent)",
            "><>>>>>",
            &head,
            rows,
        );
    }

    fn calls_text(&self, text: &mut String) {
        let head = ["call", "calls", "ms", "share", "mean us"];
        let rows = self.calls.iter().take(FUNCTIONS).map(|row| {
            vec![
                row.function.clone(),
                row.calls.to_string(),
                format!("{:.3}", row.total_ms),
                row.share.map_or_else(|| "-".into(), percent),
                format!("{:.2}", row.mean_us),
            ]
        });
        let title = match self.calls.len().saturating_sub(FUNCTIONS) {
            0 => "Time in MPI calls, of the time of all ranks".to_owned(),
            more => format!(
                "Time in MPI calls, of the time of all ranks ({more} more functions in --json)"
            ),
        };
        *text += &table::titled(&title, "<>>>>", &head, rows);
    }

    fn paths_text(&self, text: &mut String) {
        let head = [
            "path", "from", "messages", "bytes", "GB/s", "mean us", "least", "most",
        ];
        let mut rows = Vec::new();
        for path in &self.paths {
            rows.push(class_row(&path.path, "all", &path.all));
            if path.classes.len() > 1 || path.classes.iter().any(|class| class.from_bytes > 0) {
                let of_class = |class: &Class| class_row("", &format_size(class.from_bytes), class);
                rows.extend(path.classes.iter().map(of_class));
            }
        }
        let title = "Messages received, by path and size (from a power of two to the next), from match to arrival";
        *text += &table::titled(title, "<>>>>>>>", &head, rows.into_iter());
    }

    fn pairs_text(&self, text: &mut String) {
        if self.pairs.is_empty() {
            return;
        }
        let mut ranks: Vec<u32> = self.pairs.iter().flat_map(|it| [it.from, it.to]).collect();
        ranks.sort_unstable();
        ranks.dedup();
        if ranks.len() > MATRIX_RANKS {
            let mut most: Vec<_> = self.pairs.iter().collect();
            most.sort_by_key(|pair| std::cmp::Reverse((pair.bytes, pair.messages)));
            let rows = most.into_iter().take(PAIRS).map(|pair| {
                let numbers = [u64::from(pair.from), u64::from(pair.to), pair.messages];
                let mut row = numbers.map(|number| number.to_string()).to_vec();
                row.extend([about(pair.bytes), about(pair.bytes_by_mpi)]);
                row
            });
            let title = format!(
                "The {PAIRS} pairs of ranks with most bytes, of {}",
                self.pairs.len()
            );
            let head = ["from", "to", "messages", "bytes", "by MPI library"];
            *text += &table::titled(&title, ">>>>>", &head, rows);
            return;
        }
        let cells: BTreeMap<(u32, u32), (u64, u64)> = self
            .pairs
            .iter()
            .map(|it| ((it.from, it.to), (it.bytes, it.messages)))
            .collect();
        let matrix = |show: &dyn Fn((u64, u64)) -> String| -> Vec<Vec<String>> {
            let row = |from: &u32| {
                let cell = |to: &u32| {
                    cells
                        .get(&(*from, *to))
                        .map_or_else(|| ".".into(), |it| show(*it))
                };
                std::iter::once(from.to_string())
                    .chain(ranks.iter().map(cell))
                    .collect()
            };
            ranks.iter().map(row).collect()
        };
        let names: Vec<String> = ranks.iter().map(u32::to_string).collect();
        let mut head: Vec<&str> = vec!["from \\ to"];
        head.extend(names.iter().map(String::as_str));
        let alignment = ">".repeat(head.len());
        let bytes = matrix(&|(bytes, _)| about(bytes));
        let messages = matrix(&|(_, messages)| messages.to_string());
        *text += &table::titled(
            "Bytes from rank to rank",
            &alignment,
            &head,
            bytes.into_iter(),
        );
        *text += &table::titled(
            "Messages from rank to rank",
            &alignment,
            &head,
            messages.into_iter(),
        );
    }

    fn fallbacks_text(&self, text: &mut String) {
        let head = ["reason", "messages", "bytes"];
        let rows = self
            .fallbacks
            .iter()
            .map(|it| vec![it.text.clone(), it.messages.to_string(), about(it.bytes)]);
        *text += &table::titled("Not taken because", "<>>", &head, rows);
        for fallback in self.fallbacks.iter().filter(|it| !it.advice.is_empty()) {
            let _ = writeln!(text, "{}: {}", fallback.reason, fallback.advice);
        }
    }
}

fn class_row(name: &str, from: &str, class: &Class) -> Vec<String> {
    let dash = || "-".to_owned();
    let us = |ns: u64| format!("{:.2}", ns as f64 * 1e-3);
    let timed = |ns: u64| if class.timed > 0 { us(ns) } else { dash() };
    vec![
        name.to_owned(),
        from.to_owned(),
        class.messages.to_string(),
        about(class.bytes),
        class.gb_s.map_or_else(dash, |rate| format!("{rate:.2}")),
        class.mean_us.map_or_else(dash, |us| format!("{us:.2}")),
        timed(class.min_ns),
        timed(class.max_ns),
    ]
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// A number of bytes with three digits and more: exact below 10 KiB.
fn about(bytes: u64) -> String {
    let units = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
    let unit = units.into_iter().find(|(shift, _)| bytes >= 10 << shift);
    match unit {
        Some((shift, name)) => format!("{:.1}{name}", bytes as f64 / (1_u64 << shift) as f64),
        None => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::about;

    #[test]
    fn bytes_are_exact_where_they_are_few() {
        for (bytes, text) in [
            (0, "0"),
            (10_239, "10239"),
            (10_240, "10.0K"),
            (6_000_000, "5859.4K"),
            (u64::MAX, "16777216.0T"),
        ] {
            assert_eq!(about(bytes), text);
        }
    }
}
