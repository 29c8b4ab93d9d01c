//! Link rates that ranks have measured while messages moved, kept from one run to the next: one file for each
//! GPU in the user's cache folder.
//!
//! A file is valid for the GPU in its slot and one version of the driver, and for a week: a link may have
//! been repaired, or have become slower. A rank that cannot use it measures again.

use super::cache::{self, CacheError};
use super::Line;
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Version of the format. A file of another one is replaced.
const FORMAT: u32 = 1;
/// The most ways from other GPUs that are kept.
const PULLS_MAX: usize = 64;
/// The most GPUs for which a file says how far they are and how they are linked.
const NEIGHBOURS_MAX: usize = 64;
/// How long a measurement is taken to be true, seconds.
const VALID_S: u64 = 7 * 24 * 3600;

/// The cost of a copy: a constant and a rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Way {
    /// Time until its bytes move, us.
    pub alpha_us: f64,
    /// Rate, GB/s.
    pub gb_s: f64,
}

impl From<Line> for Way {
    fn from(line: Line) -> Way {
        Way {
            alpha_us: line.alpha_us,
            gb_s: line.gb_s,
        }
    }
}

impl From<Way> for Line {
    fn from(way: Way) -> Line {
        Line {
            alpha_us: way.alpha_us,
            gb_s: way.gb_s,
            spread: 0.0,
            batched_us: None,
        }
    }
}

/// The way from another GPU, by the engine of the GPU that the file is about.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pull {
    /// Identity of the other GPU.
    pub from: String,
    /// The cost of a copy.
    pub way: Way,
}

/// The links of a GPU, as the system reports them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Wired {
    /// They lead to a switch.
    pub is_switched: bool,
    /// Rate of one link of its generation, GB/s; 0 if that is not known.
    pub link_gb_s: f32,
    /// PCI addresses of the GPUs to which they lead, and how many to each.
    pub to: Vec<(u64, u32)>,
    /// PCI addresses of other GPUs, and how far each is apart by PCIe (`nvmlGpuTopologyLevel_t`).
    pub apart: Vec<(u64, u32)>,
}

/// What is known of one GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Links {
    format: u32,
    /// Version of the driver.
    driver: String,
    /// PCI address: another one is another slot, or another machine.
    pci: u64,
    /// When this was measured, seconds since 1970.
    measured_s: u64,
    /// The links of the GPU, if they were asked for.
    pub wired: Option<Wired>,
    /// From the GPU to the host's memory.
    pub to_host: Option<Way>,
    /// From the host's memory to the GPU.
    pub from_host: Option<Way>,
    /// From other GPUs, where their rates are known well.
    pub pulls: Vec<Pull>,
}

impl Links {
    /// Nothing is known yet.
    #[must_use]
    pub fn new(driver: &str, pci: u64, now_s: u64) -> Links {
        Links {
            format: FORMAT,
            driver: driver.into(),
            pci,
            measured_s: now_s,
            wired: None,
            to_host: None,
            from_host: None,
            pulls: Vec::new(),
        }
    }

    /// Notes the way from another GPU, in place of what was known of it.
    pub fn note_pull(&mut self, from: &str, way: Way) {
        let has_room = self.pulls.len() < PULLS_MAX;
        match self.pulls.iter_mut().find(|pull| pull.from == from) {
            Some(pull) => pull.way = way,
            None if has_room => self.pulls.push(Pull {
                from: from.into(),
                way,
            }),
            None => {}
        }
    }

    /// Takes over what another rank has found out meanwhile, where nothing is known here.
    pub fn fill_from(&mut self, other: Links) {
        self.wired = self.wired.take().or(other.wired);
        self.to_host = self.to_host.or(other.to_host);
        self.from_host = self.from_host.or(other.from_host);
        for pull in other.pulls {
            if !self.pulls.iter().any(|known| known.from == pull.from) {
                self.note_pull(&pull.from, pull.way);
            }
        }
    }

    /// Reports the first number that is not possible.
    fn check(&self) -> Result<(), String> {
        let pulls = self.pulls.iter().map(|pull| pull.way);
        for way in pulls.chain(self.to_host).chain(self.from_host) {
            Line::from(way).check()?;
        }
        let wired = self.wired.iter();
        let are_many = |wired: &Wired| wired.to.len().max(wired.apart.len()) > NEIGHBOURS_MAX;
        if self.pulls.len() > PULLS_MAX || wired.clone().any(are_many) {
            return Err("it tells of more GPUs than there can be".into());
        }
        let rates = wired.map(|wired| wired.link_gb_s);
        match rates
            .into_iter()
            .find(|rate| !(rate.is_finite() && *rate >= 0.0))
        {
            Some(rate) => Err(format!("link_gb_s is {rate}, must not be negative")),
            None => Ok(()),
        }
    }
}

/// Why nothing is known; one line.
#[derive(Debug, thiserror::Error)]
pub enum LinksError {
    /// There is no file.
    #[error("{file} does not exist", file = .0.display())]
    Absent(PathBuf),
    /// It is about another slot or driver, or was measured long ago.
    #[error("{file}: {1}; links are measured again", file = .0.display())]
    Past(PathBuf, String),
    /// It cannot be read, or is not a file of this kind.
    #[error("{file}: {1}; links are measured again", file = .0.display())]
    Unusable(PathBuf, String),
    /// It cannot be written.
    #[error("{file}: {1}; links are measured again in each run (ANABRANCH_KEEP=off: nothing is kept)", file = .0.display())]
    Unwritten(PathBuf, String),
}

/// The file of a GPU in a folder.
fn file_of(folder: &Path, gpu: &str) -> PathBuf {
    folder.join(format!("links-{gpu}.json"))
}

/// Reads what is known of the GPU with this identity, which is at a PCI address.
///
/// # Errors
/// Nothing is known, or it is about another machine, or too old.
pub fn load(
    folder: &Path,
    gpu: &str,
    driver: &str,
    pci: u64,
    now_s: u64,
) -> Result<Links, LinksError> {
    let file = file_of(folder, gpu);
    let text = match cache::read(&file) {
        Ok(text) => text,
        Err(CacheError::Absent(file)) => return Err(LinksError::Absent(file)),
        // The folder is not a folder: the rank that stores something there says so.
        Err(CacheError::Io(_, error)) if error.kind() == ErrorKind::NotADirectory => {
            return Err(LinksError::Absent(file));
        }
        Err(CacheError::Io(_, error)) => {
            return Err(LinksError::Unusable(file, error.to_string()));
        }
        Err(error) => return Err(LinksError::Unusable(file, error.to_string())),
    };
    let links: Links = match serde_json::from_str(&text) {
        Ok(links) => links,
        Err(error) => return Err(LinksError::Unusable(file, cache::one_line(&error))),
    };
    let past = |why: String| Err(LinksError::Past(file.clone(), why));
    if links.format != FORMAT {
        return past(format!("format {}, not {FORMAT}", links.format));
    }
    if links.driver != driver {
        return past(format!("driver {}, this is {driver}", links.driver));
    }
    if links.pci != pci {
        return past("the GPU was in another slot, or another machine".into());
    }
    // This also drops a file from the future, written by a clock that was wrong.
    if now_s.abs_diff(links.measured_s) > VALID_S {
        return past("measured more than a week ago".into());
    }
    match links.check() {
        Ok(()) => Ok(links),
        Err(why) => Err(LinksError::Unusable(file, why)),
    }
}

/// Keeps what is known of a GPU, whole or not at all. If there was no file (`is_absent`) and somebody has
/// written one meanwhile, that one stays.
///
/// # Errors
/// The file cannot be written.
pub fn store(folder: &Path, gpu: &str, links: &Links, is_absent: bool) -> Result<(), LinksError> {
    let file = file_of(folder, gpu);
    let failed = |why: String| LinksError::Unwritten(file.clone(), why);
    let text = serde_json::to_string_pretty(links).map_err(|error| failed(error.to_string()))?;
    std::fs::create_dir_all(folder).map_err(|error| failed(error.to_string()))?;
    if is_absent {
        // First under a name of its own: readers see all of it.
        let mut new = file.as_os_str().to_owned();
        new.push(format!(".{}", std::process::id()));
        let made = std::fs::write(&new, text + "\n").and_then(|()| std::fs::hard_link(&new, &file));
        let _ = std::fs::remove_file(&new);
        return match made {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                Err(failed(error.to_string()))
            }
            _ => Ok(()),
        };
    }
    let stored = cache::replace(&file, |new| std::fs::write(new, text + "\n"));
    stored.map_err(|error| match error {
        CacheError::Io(_, error) => failed(error.to_string()),
        error => failed(error.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000;

    fn known() -> Links {
        let way = |alpha_us, gb_s| Way { alpha_us, gb_s };
        let mut links = Links::new("13.0", 0x1800, NOW);
        links.wired = Some(Wired {
            is_switched: false,
            link_gb_s: 25.0,
            to: vec![(0x2800, 2)],
            apart: vec![(0x2800, 50)],
        });
        (links.to_host, links.from_host) = (Some(way(6.0, 55.0)), Some(way(6.5, 54.0)));
        links.note_pull("GPU-1", way(3.0, 300.0));
        links.note_pull("GPU-2", way(3.5, 390.0));
        links.note_pull("GPU-1", way(3.0, 380.0));
        links
    }

    fn folder(name: &str) -> tempfile::TempDir {
        let prefix = format!("anabranch-links-{name}");
        tempfile::Builder::new()
            .prefix(&prefix)
            .tempdir()
            .expect("a folder")
    }

    #[test]
    fn what_is_kept_is_found_again_for_the_same_slot_and_driver() {
        let folder = folder("kept");
        let inner = folder.path().join("new");
        let load = |driver: &str, pci: u64, now_s: u64| load(&inner, "GPU-0", driver, pci, now_s);
        assert!(matches!(
            load("13.0", 0x1800, NOW),
            Err(LinksError::Absent(_))
        ));
        store(&inner, "GPU-0", &known(), false).expect("stored");
        let found = load("13.0", 0x1800, NOW + VALID_S).expect("found");
        assert_eq!(found, known());
        let rates: Vec<f64> = found.pulls.iter().map(|pull| pull.way.gb_s).collect();
        assert_eq!(rates, [380.0, 390.0], "the last of each");
        for (driver, pci, now_s, why) in [
            ("13.1", 0x1800, NOW, "driver 13.0, this is 13.1"),
            ("13.0", 0x1900, NOW, "another slot"),
            ("13.0", 0x1800, NOW + VALID_S + 1, "more than a week"),
            ("13.0", 0x1800, NOW - VALID_S - 1, "more than a week"),
        ] {
            let error = load(driver, pci, now_s).expect_err(why);
            assert!(matches!(error, LinksError::Past(..)), "{error}");
            let text = error.to_string();
            assert!(text.contains(why) && !text.contains('\n'), "{text}");
        }
        let left: Vec<_> = std::fs::read_dir(&inner).expect("listed").collect();
        assert_eq!(left.len(), 1, "nothing else is left behind");
    }

    #[test]
    fn a_damaged_file_is_said_in_one_line() {
        let folder = folder("damaged");
        let file = file_of(folder.path(), "GPU-0");
        store(folder.path(), "GPU-0", &known(), false).expect("stored");
        let good = std::fs::read_to_string(&file).expect("read");
        let of = |text: &str| {
            std::fs::write(&file, text).expect("written");
            load(folder.path(), "GPU-0", "13.0", 0x1800, NOW)
        };
        assert!(of(&good).is_ok());
        for bad in [
            String::new(),
            "[1]".into(),
            good[..good.len() / 2].into(),
            good.replacen("55.0", "-55.0", 1),
            good.replacen("390.0", "0.0", 1),
            good.replacen("25.0", "-25.0", 1),
            good.replacen("6.5", "1e999", 1),
        ] {
            assert_ne!(bad, good);
            let text = of(&bad).expect_err("damaged").to_string();
            assert!(
                text.contains("measured again") && !text.contains('\n'),
                "{text}"
            );
        }
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let folder = folder("none");
        let file = folder.path().join("file");
        std::fs::write(&file, "").expect("written");
        let error = store(&file, "GPU-0", &known(), false).expect_err("no folder");
        assert!(
            error.to_string().contains(&file.display().to_string()),
            "{error}"
        );
        let error = load(&file, "GPU-0", "13.0", 0x1800, NOW).expect_err("no folder");
        assert!(matches!(error, LinksError::Absent(..)), "{error}");
        std::fs::create_dir(file_of(folder.path(), "GPU-0")).expect("made");
        let error = load(folder.path(), "GPU-0", "13.0", 0x1800, NOW).expect_err("a folder");
        assert!(matches!(error, LinksError::Unusable(..)), "{error}");
    }
}
