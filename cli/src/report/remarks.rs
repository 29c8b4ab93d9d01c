//! What is worth a look: paths that are slow beside others, paths that are idle, and what went wrong.

use anabranch_engine::config::format_size;

use super::job::Job;
use super::sums::{Class, Path};

/// A path is slow if another one is faster by this for messages of the same size.
const SLOWER: f64 = 2.0;
/// Messages below are not compared: their time is that of calls.
const COMPARED_FROM: u64 = 64 << 10;
/// Fewer messages say little.
const COMPARED_MESSAGES: u64 = 4;
/// Messages from here on may be split (ANABRANCH_MULTIPATH).
const SPLIT_FROM: u64 = 2 << 20;

/// Counters that are 0 in a healthy job, and what they mean.
const TROUBLE: [(&str, &str); 10] = [
    ("errors", "messages ended in an error: see the lines on stderr"),
    ("verify_mismatches", "messages were not what was sent (ANABRANCH_VERIFY): see the lines on stderr"),
    ("dead_peers", "transfers were given up because a rank had died"),
    ("retries", "transfers were begun again over a simpler path: run with ANABRANCH_LOG=info"),
    ("paths_abandoned", "paths of split messages were given up: run with ANABRANCH_LOG=info"),
    ("senders_late", "times a sender of a split message did not go on: is the machine busy, or are ranks not bound to cores?"),
    ("staging_refused", "attempts to take staging on a GPU failed: leave memory free there, or lower ANABRANCH_RELAY_STAGING"),
    ("pinning_refused", "attempts to pin host memory were refused: see `ulimit -l`, and lower ANABRANCH_STAGING"),
    ("mappings_refused", "attempts to map a peer's memory were refused: see `anabranch doctor`"),
    ("finalize_unmatched", "messages were sent and never received"),
];

/// All of them, a line each.
pub fn of(job: &Job, paths: &[Path]) -> Vec<String> {
    let mut remarks = slow(paths);
    remarks.extend(idle(job, paths));
    for (counter, meaning) in TROUBLE {
        let count = job.counter(counter);
        if count > 0 {
            remarks.push(format!("{count} {meaning} ({counter})"));
        }
    }
    remarks
}

fn compared(path: &Path) -> impl Iterator<Item = (&Class, f64)> {
    let is_compared =
        |class: &&Class| class.from_bytes >= COMPARED_FROM && class.timed >= COMPARED_MESSAGES;
    let classes = path.classes.iter().filter(is_compared);
    classes.filter_map(|class| Some((class, class.gb_s?)))
}

/// For each path the size class in which it lost most.
fn slow(paths: &[Path]) -> Vec<String> {
    let mut remarks = Vec::new();
    for path in paths {
        let mut worst: Option<(f64, String)> = None;
        for (class, rate) in compared(path) {
            let others = paths.iter().filter(|other| other.path != path.path);
            for other in others {
                let same = compared(other).find(|(it, _)| it.from_bytes == class.from_bytes);
                let Some((_, best)) = same else { continue };
                let ratio = best / rate;
                if ratio >= SLOWER && worst.as_ref().is_none_or(|(most, _)| ratio > *most) {
                    let size = format_size(class.from_bytes);
                    let text = format!(
                        "{}: messages from {size} on had {rate:.1} GB/s, those by {} {best:.1}",
                        path.path, other.path
                    );
                    worst = Some((ratio, text));
                }
            }
        }
        remarks.extend(worst.map(|(_, text)| text));
    }
    remarks
}

fn idle(job: &Job, paths: &[Path]) -> Option<String> {
    let is_split = |path: &&Path| ["multipath", "one_owner"].contains(&&*path.path);
    let alone = paths
        .iter()
        .filter(|path| ["get", "put"].contains(&&*path.path));
    let long: u64 = alone
        .flat_map(|path| &path.classes)
        .filter(|class| class.from_bytes >= SPLIT_FROM)
        .map(|class| class.messages)
        .sum();
    if long > 0 && !paths.iter().any(|path| is_split(&path)) {
        return Some(format!(
            "{long} messages of {} and more came by one path each, none was split: see `anabranch plan`, ANABRANCH_MULTIPATH and ANABRANCH_PATHS",
            format_size(SPLIT_FROM)
        ));
    }
    let all = job.counter("multipath_direct_bytes")
        + job.counter("multipath_relay_bytes")
        + job.counter("multipath_host_bytes");
    let idle: Vec<&str> = [
        ("multipath_relay_bytes", "over other GPUs"),
        ("multipath_host_bytes", "through host memory"),
    ]
    .into_iter()
    // Two ranks may have no other GPU beside theirs.
    .filter(|(counter, _)| *counter != "multipath_relay_bytes" || job.ranks().count() > 2)
    .filter(|(counter, _)| all > 0 && job.counter(counter) == 0)
    .map(|(_, name)| name)
    .collect();
    (!idle.is_empty()).then(|| format!("nothing of split messages went {}", idle.join(" or ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str, from_bytes: u64, gb_s: f64) -> Path {
        let class = Class {
            from_bytes,
            messages: 10,
            timed: 10,
            gb_s: Some(gb_s),
            ..Class::default()
        };
        Path {
            path: name.into(),
            all: class.clone(),
            classes: vec![class],
        }
    }

    #[test]
    fn the_slower_of_two_paths_is_named() {
        let paths = [
            path("get", 1 << 20, 40.0),
            path("host_pipeline", 1 << 20, 10.0),
        ];
        let said = slow(&paths);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0]
            .starts_with("host_pipeline: messages from 1M on had 10.0 GB/s, those by get 40.0"));
        // Neither sizes that differ nor short ones are compared.
        assert!(slow(&[path("get", 1 << 20, 40.0), path("put", 1 << 21, 10.0)]).is_empty());
        assert!(slow(&[path("get", 1 << 10, 40.0), path("put", 1 << 10, 10.0)]).is_empty());
    }

    #[test]
    fn counters_that_are_named_are_there() {
        use anabranch_engine::stats::Counter;
        for (name, _) in TROUBLE {
            assert!(Counter::ALL.iter().any(|it| it.name() == name), "{name}");
        }
    }
}
