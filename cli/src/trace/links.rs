//! What went over each link: copies from one place to another.

use std::collections::BTreeMap;

use serde::Serialize;

use super::job::{Copy, Job};

/// Copies from one place to another, on one kind of path.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Link {
    /// Places, by their numbers in `places`.
    pub from: usize,
    pub to: usize,
    /// `direct`, `relay` or `host`.
    pub path: &'static str,
    pub copies: u64,
    pub bytes: u64,
    /// Time in which at least one of them was under way, from its launch until it was seen to be over, ms.
    pub busy_ms: f64,
    /// Bytes by that time, GB/s.
    pub gb_s: f64,
}

/// The links of a job, the busiest first.
pub fn links(job: &Job) -> Vec<Link> {
    let mut of_links: BTreeMap<(usize, usize, &str), Vec<&Copy>> = BTreeMap::new();
    // Copies are in the order of their launches.
    for copy in &job.copies {
        of_links
            .entry((copy.from, copy.to, copy.path))
            .or_default()
            .push(copy);
    }
    let link = |((from, to, path), copies): ((usize, usize, &'static str), Vec<&Copy>)| {
        let bytes = copies
            .iter()
            .fold(0, |all: u64, copy| all.saturating_add(copy.bytes));
        let busy_ns = covered(copies.iter().map(|copy| (copy.launched_ns, copy.end_ns)));
        Link {
            from,
            to,
            path,
            copies: copies.len() as u64,
            bytes,
            busy_ms: busy_ns as f64 * 1e-6,
            gb_s: bytes as f64 / busy_ns.max(1) as f64,
        }
    };
    let mut links: Vec<Link> = of_links.into_iter().map(link).collect();
    links.sort_by_key(|link| std::cmp::Reverse(link.bytes));
    links
}

/// How much of time spans cover that are in the order of their beginnings.
pub fn covered(spans: impl Iterator<Item = (u64, u64)>) -> u64 {
    let (mut covered, mut until) = (0, 0);
    for (begin, end) in spans {
        covered += end.saturating_sub(begin.max(until));
        until = until.max(end);
    }
    covered
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_counted_once() {
        let spans = [(10, 20), (12, 15), (18, 30), (40, 41), (40, 41)];
        assert_eq!(covered(spans.into_iter()), 21);
        assert_eq!(covered(std::iter::empty()), 0);
    }
}
