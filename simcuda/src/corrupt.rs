//! Wrong bytes on demand: `SIMCUDA_CORRUPT="1:DtoD:2:4096,..."` has the second asynchronous copy from device to device
//! that rank 1 issues flip a bit of the byte at offset 4096 of what it writes. Nothing is reported: that is the point.
//!
//! The rank is the launcher's (`*`: any process); the kind is `DtoD`, `DtoH`, `HtoD` or `*`. Copies that a call without
//! `Async` makes are neither counted nor touched, so that a program may fill and read its buffers in peace.

use crate::work::Copy;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Where the ends of a copy are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    DeviceToDevice,
    DeviceToHost,
    HostToDevice,
    Any,
}

impl Kind {
    fn parse(text: &str) -> Option<Kind> {
        Some(match text {
            "DtoD" => Kind::DeviceToDevice,
            "DtoH" => Kind::DeviceToHost,
            "HtoD" => Kind::HostToDevice,
            "*" => Kind::Any,
            _ => return None,
        })
    }

    fn covers(self, from_device: bool, to_device: bool) -> bool {
        match self {
            Kind::DeviceToDevice => from_device && to_device,
            Kind::DeviceToHost => from_device && !to_device,
            Kind::HostToDevice => !from_device && to_device,
            Kind::Any => true,
        }
    }
}

/// One planned corruption.
#[derive(Debug)]
struct Corruption {
    kind: Kind,
    at: u64,
    offset: usize,
    copies: AtomicU64,
}

/// All corruptions planned for this process.
#[derive(Default, Debug)]
pub struct Corruptions(Vec<Corruption>);

impl Corruptions {
    /// Parses the variable for the process of a rank; the error is one line that names the part that is wrong.
    pub fn parse(text: &str, rank: Option<u64>) -> Result<Corruptions, String> {
        let mut own = Vec::new();
        for part in text.split(',').filter(|part| !part.trim().is_empty()) {
            let bad = || format!("SIMCUDA_CORRUPT: \"{part}\" is not RANK:KIND:N:OFFSET");
            let words: Vec<&str> = part.split(':').map(str::trim).collect();
            let [of, kind, at, offset] = words[..] else {
                return Err(bad());
            };
            let is_ours = of == "*" || Some(of.parse().map_err(|_| bad())?) == rank;
            let corruption = Corruption {
                kind: Kind::parse(kind).ok_or_else(bad)?,
                at: at.parse().ok().filter(|n| *n > 0).ok_or_else(bad)?,
                offset: offset.parse().map_err(|_| bad())?,
                copies: AtomicU64::new(0),
            };
            if is_ours {
                own.push(corruption);
            }
        }
        Ok(Corruptions(own))
    }

    /// Counts a copy, and marks it where it is one of those planned.
    pub fn mark(&self, copy: &mut Copy) {
        if !self.0.is_empty() {
            copy.flip = self.next(copy.src.gpu().is_some(), copy.dst.gpu().is_some());
        }
    }

    fn next(&self, from_device: bool, to_device: bool) -> Option<usize> {
        let mut flip = None;
        for corruption in &self.0 {
            if corruption.kind.covers(from_device, to_device)
                && corruption.copies.fetch_add(1, Relaxed) + 1 == corruption.at
            {
                flip = Some(corruption.offset);
            }
        }
        flip
    }
}

/// The rank that the launcher has given this process.
pub fn rank() -> Option<u64> {
    [
        "OMPI_COMM_WORLD_RANK",
        "PMI_RANK",
        "PMIX_RANK",
        "SLURM_PROCID",
    ]
    .iter()
    .find_map(|name| std::env::var(name).ok()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_copy_of_its_kind_is_marked_and_no_other() {
        let plan = Corruptions::parse("1:DtoD:2:77, *:HtoD:1:5, 0:DtoH:1:9", Some(1)).unwrap();
        let on = (true, true);
        let marks: Vec<_> = [on, (true, false), (false, true), on, on, (false, true)]
            .iter()
            .map(|(from, to)| plan.next(*from, *to))
            .collect();
        assert_eq!(marks, [None, None, Some(5), Some(77), None, None]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for text in [
            "1:DtoD:0:1",
            "x:DtoD:1:1",
            "1:Up:1:1",
            "1:DtoD:1",
            "1:DtoD:1:-1",
        ] {
            let error = Corruptions::parse(text, None).unwrap_err();
            assert!(error.contains(text), "{error}");
        }
        assert!(Corruptions::parse("", None).unwrap().0.is_empty());
    }
}
