//! The file that keeps a measured model.
//!
//! It is valid for one machine (the identities of its GPUs, in order) and one version of the driver. If
//! anything else is in its place, one line says so, and nominal numbers are used. The topology is kept beside
//! the model: a process of a job may see only one of the GPUs, and could not find out by itself how the
//! others are connected.

use super::Model;
use crate::topology::file::File;
use crate::topology::Topology;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// Version of the format. A file of another one is measured again.
const FORMAT: u32 = 3;
/// No file is longer: sixteen GPUs need a tenth of it.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// What a measurement is valid for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Identities of the GPUs, in the order of their numbers.
    pub gpus: Vec<String>,
    /// Version of the driver.
    pub driver: String,
}

/// What identifies a driver: its version, the kernel module's own line if that can be read, and whether it is
/// the simulated one.
#[must_use]
pub fn driver_text(version: i32, is_simulated: bool) -> String {
    if is_simulated {
        return format!("{version}, simulated");
    }
    let module = std::fs::read_to_string("/proc/driver/nvidia/version").ok();
    match module.as_deref().and_then(|text| text.lines().next()) {
        Some(module) => format!("{version} ({})", module.trim()),
        None => version.to_string(),
    }
}

impl Machine {
    /// A number that differs between machines and versions, for the name of the file (FNV-1a).
    #[must_use]
    pub fn key(&self) -> u64 {
        let words = self.gpus.iter().chain([&self.driver]);
        words
            .flat_map(|word| word.bytes().chain([0]))
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
            })
    }

    /// The file of this machine in a folder.
    #[must_use]
    pub fn file(&self, folder: &Path) -> PathBuf {
        folder.join(format!("model-{:016x}.json", self.key()))
    }
}

/// The folder where models are kept: `$XDG_CACHE_HOME/anabranch`, else `$HOME/.cache/anabranch`.
#[must_use]
pub fn folder() -> Option<PathBuf> {
    let variable = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let caches = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    caches.map(|caches| caches.join("anabranch"))
}

#[derive(Serialize, Deserialize)]
struct Kept {
    format: u32,
    machine: Machine,
    topology: File,
    model: Model,
}

/// A node that was measured.
#[derive(Clone, Debug)]
pub struct Measured {
    /// What it is made of; the GPUs have their identities.
    pub topology: Topology,
    /// What copies take there.
    pub model: Model,
    /// Where it was read.
    pub file: PathBuf,
}

/// Why a file is not used; one line that says what to do.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// There is none.
    #[error("not measured yet: {file} does not exist (anabranch topo --measure)", file = .0.display())]
    Absent(PathBuf),
    /// It cannot be read or written.
    #[error("{file}: {1}", file = .0.display())]
    Io(PathBuf, std::io::Error),
    /// It is no such file, or its numbers cannot be used.
    #[error("{file}: {1}; measure again with anabranch topo --measure", file = .0.display())]
    Unusable(PathBuf, String),
    /// It is another machine's.
    #[error("{file}: measured on another machine ({1}); measure again with anabranch topo --measure", file = .0.display())]
    OtherMachine(PathBuf, String),
    /// It belongs to this machine with another driver.
    #[error("{file}: measured with driver {1}, this is {2}; measure again with anabranch topo --measure", file = .0.display())]
    OtherDriver(PathBuf, String, String),
}

/// Reads a model that was measured on `machine`.
///
/// # Errors
/// There is none, or not one for this machine.
pub fn load(file: &Path, machine: &Machine) -> Result<Model, CacheError> {
    let text = read(file)?;
    let kept = machine_of(file, &text)?;
    if kept.gpus != machine.gpus {
        let other = brief(&kept.gpus);
        return Err(CacheError::OtherMachine(file.to_path_buf(), other));
    }
    Ok(take(file, &text, kept, &machine.driver)?.model)
}

/// Reads a measured node that has all of `gpus`, and perhaps more: a job may use a part of it.
///
/// # Errors
/// There is none, or it lacks one of them.
pub fn load_with(file: &Path, gpus: &[String], driver: &str) -> Result<Measured, CacheError> {
    let text = read(file)?;
    let kept = machine_of(file, &text)?;
    if !gpus.iter().all(|gpu| kept.gpus.contains(gpu)) {
        let other = brief(&kept.gpus);
        return Err(CacheError::OtherMachine(file.to_path_buf(), other));
    }
    take(file, &text, kept, driver)
}

/// Looks in a folder for a measured node that has all of `gpus`. It follows the link of each GPU, so that all
/// machines of a cluster may share the folder.
///
/// # Errors
/// There is none. The reason is that of a file for these GPUs, if there is one.
pub fn find(folder: &Path, gpus: &[String], driver: &str) -> Result<Measured, CacheError> {
    let mut why = None;
    for file in gpus.iter().filter_map(|gpu| linked(folder, gpu)) {
        match load_with(&file, gpus, driver) {
            Ok(measured) => return Ok(measured),
            // Either a part of the machine was measured by itself, or somebody removed a file by hand.
            Err(CacheError::OtherMachine(..) | CacheError::Absent(_)) => {}
            Err(error) => {
                why.get_or_insert(error);
            }
        }
    }
    Err(why.unwrap_or_else(|| CacheError::Absent(folder.join("model-*.json"))))
}

/// The link by which the file of a GPU's machine is found. None if `gpu` is not an identity.
fn link_of(folder: &Path, gpu: &str) -> Option<PathBuf> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let is_identity = !gpu.is_empty() && gpu.bytes().all(is_plain);
    is_identity.then(|| folder.join(format!("{gpu}.json")))
}

/// The file that the link of a GPU names, in the same folder.
fn linked(folder: &Path, gpu: &str) -> Option<PathBuf> {
    let target = std::fs::read_link(link_of(folder, gpu)?).ok()?;
    Some(folder.join(target.file_name()?))
}

pub(super) fn read(file: &Path) -> Result<String, CacheError> {
    let mut text = String::new();
    let read = std::fs::File::open(file)
        .and_then(|file| file.take(FILE_BYTES_MAX).read_to_string(&mut text));
    match read {
        Ok(_) => Ok(text),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(CacheError::Absent(file.to_path_buf()))
        }
        Err(error) => Err(CacheError::Io(file.to_path_buf(), error)),
    }
}

/// What a file is valid for, if it has this version. A file of another version need not contain anything
/// else.
fn machine_of(file: &Path, text: &str) -> Result<Machine, CacheError> {
    #[derive(Deserialize)]
    struct Head {
        format: Option<u64>,
        machine: Option<Machine>,
    }
    let unusable = |why: String| Err(CacheError::Unusable(file.to_path_buf(), why));
    let head: Head = match serde_json::from_str(text) {
        Ok(head) => head,
        Err(error) => return unusable(one_line(&error)),
    };
    match (head.format, head.machine) {
        (Some(format), Some(machine)) if format == u64::from(FORMAT) => Ok(machine),
        (Some(format), _) if format != u64::from(FORMAT) => {
            unusable(format!("format {format}, not {FORMAT}"))
        }
        _ => unusable("no model".into()),
    }
}

fn take(file: &Path, text: &str, of: Machine, driver: &str) -> Result<Measured, CacheError> {
    let path = || file.to_path_buf();
    if of.driver != driver {
        return Err(CacheError::OtherDriver(path(), of.driver, driver.into()));
    }
    let unusable = |why: String| CacheError::Unusable(path(), why);
    let kept: Kept = serde_json::from_str(text).map_err(|error| unusable(one_line(&error)))?;
    let topology = kept.topology.topology();
    let topology = topology.map_err(|error| unusable(error.to_string()))?;
    let named = |(gpu, uuid): (&crate::topology::Gpu, &String)| gpu.uuid.as_ref() == Some(uuid);
    if topology.gpus.len() != of.gpus.len() || !topology.gpus.iter().zip(&of.gpus).all(named) {
        return Err(unusable("its topology has other GPUs".into()));
    }
    kept.model.check_for(&topology).map_err(unusable)?;
    Ok(Measured {
        topology,
        model: kept.model,
        file: path(),
    })
}

/// Writes a model, whole or not at all: ranks may be reading.
///
/// # Errors
/// The file cannot be written.
pub fn store(
    file: &Path,
    machine: &Machine,
    topology: &Topology,
    model: &Model,
) -> Result<(), CacheError> {
    let failed = |error| CacheError::Io(file.to_path_buf(), error);
    let kept = Kept {
        format: FORMAT,
        machine: machine.clone(),
        topology: File::of(topology),
        model: model.clone(),
    };
    let text = serde_json::to_string_pretty(&kept).map_err(|error| failed(error.into()))?;
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    replace(file, |new| std::fs::write(new, text + "\n"))
}

/// Makes the links by which [`find`] finds a file that was stored, in the folder of the file. Files to which
/// no link leads any more, such as that of the same machine with an older driver, are removed.
///
/// # Errors
/// A link cannot be written.
pub fn link(file: &Path, machine: &Machine) -> Result<(), CacheError> {
    let folder = file.parent().unwrap_or(Path::new(""));
    let name = file.file_name().unwrap_or_default();
    let mut before: Vec<PathBuf> = Vec::new();
    for gpu in &machine.gpus {
        let Some(link) = link_of(folder, gpu) else {
            continue;
        };
        before.extend(linked(folder, gpu).filter(|old| old != file));
        replace(&link, |new| std::os::unix::fs::symlink(name, new))?;
    }
    before.sort();
    before.dedup();
    for old in before {
        let machine = read(&old).and_then(|text| machine_of(&old, &text));
        let gpus = machine.map(|machine| machine.gpus).unwrap_or_default();
        let leads_there = |gpu: &String| linked(folder, gpu).is_some_and(|file| file == old);
        if !gpus.iter().any(leads_there) {
            let _ = std::fs::remove_file(&old);
        }
    }
    Ok(())
}

/// Puts what `make` makes at another place into the place of `file`, in one step.
pub(super) fn replace(
    file: &Path,
    make: impl FnOnce(&Path) -> std::io::Result<()>,
) -> Result<(), CacheError> {
    let mut new = file.as_os_str().to_owned();
    new.push(format!(".{}", std::process::id()));
    let new = Path::new(&new);
    // Removes what a process that ended in the middle of this has left.
    let _ = std::fs::remove_file(new);
    make(new)
        .and_then(|()| std::fs::rename(new, file))
        .map_err(|error| {
            // The half that failed is of no use to anyone.
            let _ = std::fs::remove_file(new);
            CacheError::Io(file.to_path_buf(), error)
        })
}

pub(super) fn one_line(error: &serde_json::Error) -> String {
    error
        .to_string()
        .lines()
        .next()
        .unwrap_or("not JSON")
        .to_owned()
}

fn brief(gpus: &[String]) -> String {
    let mut text = format!("{} GPUs", gpus.len());
    if let Some(first) = gpus.first() {
        let _ = write!(text, ", the first {}", first.escape_debug());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::HopModel;
    use crate::topology::tests::shipped;

    fn machine() -> Machine {
        Machine {
            gpus: (0..4).map(|gpu| format!("GPU-{gpu}")).collect(),
            driver: "12.8".into(),
        }
    }

    /// A shipped topology with the GPUs of a machine.
    fn of(name: &str, machine: &Machine) -> Topology {
        let mut topology = shipped(name);
        assert_eq!(topology.gpus.len(), machine.gpus.len());
        for (gpu, uuid) in topology.gpus.iter_mut().zip(&machine.gpus) {
            gpu.uuid = Some(uuid.clone());
        }
        topology
    }

    /// A folder of the test's own, removed at its end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let folder =
                std::env::temp_dir().join(format!("anabranch-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&folder).expect("made");
            Folder(folder)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn what_was_stored_is_loaded_on_the_same_machine_only() {
        let folder = Folder::new("cache");
        let file = machine().file(&folder.0.join("new"));
        let topology = of("beluga", &machine());
        let model = Model::nominal(&topology);
        assert!(matches!(
            load(&file, &machine()),
            Err(CacheError::Absent(_))
        ));
        store(&file, &machine(), &topology, &model).expect("stored");
        assert_eq!(load(&file, &machine()).expect("loaded"), model);
        let other = Machine {
            gpus: vec!["GPU-7".into()],
            ..machine()
        };
        let error = load(&file, &other)
            .expect_err("another machine")
            .to_string();
        assert!(
            error.contains("another machine (4 GPUs, the first GPU-0)"),
            "{error}"
        );
        let newer = Machine {
            driver: "13.0".into(),
            ..machine()
        };
        let error = load(&file, &newer).expect_err("another driver").to_string();
        assert!(error.contains("driver 12.8, this is 13.0"), "{error}");
        assert_ne!(other.file(&folder.0), machine().file(&folder.0));
        assert_ne!(newer.file(&folder.0), machine().file(&folder.0));
    }

    #[test]
    fn a_damaged_file_is_said_in_one_line() {
        let folder = Folder::new("damaged");
        let file = machine().file(&folder.0);
        let topology = of("beluga", &machine());
        let model = Model::nominal(&topology);
        store(&file, &machine(), &topology, &model).expect("stored");
        let good = std::fs::read_to_string(&file).expect("read");
        for bad in [
            String::new(),
            "[1, 2]".into(),
            good[..good.len() / 2].into(),
            good.replacen(&format!("\"format\": {FORMAT}"), "\"format\": 1", 1),
            good.replacen("\"gb_s\": 48.0", "\"gb_s\": -48.0", 1),
            good.replacen("\"GPU0\"", "\"GPU\"", 1),
            good.replacen("\"count\": 4", "\"count\": 3", 1),
            good.replacen("\"uuid\": \"GPU-2\"", "\"uuid\": \"GPU-9\"", 1),
        ] {
            assert_ne!(bad, good);
            std::fs::write(&file, &bad).expect("written");
            let error = load(&file, &machine()).expect_err("damaged").to_string();
            assert!(
                error.contains("measure again") && !error.contains('\n'),
                "{error}"
            );
        }
    }

    #[test]
    fn a_hop_without_numbers_is_named() {
        let folder = Folder::new("hops");
        let file = machine().file(&folder.0);
        let topology = of("beluga", &machine());
        let good = Model::nominal(&topology);
        let error = |change: &dyn Fn(&mut Vec<HopModel>)| {
            let mut model = good.clone();
            change(&mut model.hops);
            store(&file, &machine(), &topology, &model).expect("stored");
            let error = load(&file, &machine()).expect_err("incomplete");
            let error = error.to_string();
            assert!(
                error.contains("measure again") && !error.contains('\n'),
                "{error}"
            );
            error
        };
        let ends = |hop: &HopModel| (hop.from.to_string(), hop.to.to_string());
        let is = |hop: &HopModel, from: &str, to: &str| ends(hop) == (from.into(), to.into());
        let none = error(&|hops| hops.clear());
        assert!(
            none.contains("no numbers of the hop from GPU0 to GPU1"),
            "{none}"
        );
        let one = error(&|hops| hops.retain(|hop| !is(hop, "GPU3", "host")));
        assert!(
            one.contains("no numbers of the hop from GPU3 to host"),
            "{one}"
        );
        let empty = error(&|hops| {
            let hop = hops.iter_mut().find(|hop| is(hop, "GPU2", "GPU1"));
            let hop = hop.expect("a hop");
            (hop.push, hop.pull) = (None, None);
        });
        assert!(
            empty.contains("no numbers of the hop from GPU2 to GPU1"),
            "{empty}"
        );
    }

    #[test]
    fn what_is_measured_again_takes_the_place_of_what_was() {
        let folder = Folder::new("again");
        let files = || {
            let entries = std::fs::read_dir(&folder.0).expect("listed");
            let names = entries.map(|entry| entry.expect("an entry").file_name());
            let mut names: Vec<_> = names.map(|name| folder.0.join(name)).collect();
            names.sort();
            names.retain(|name| !name.is_symlink());
            names
        };
        let keep = |machine: &Machine| {
            let mut topology = of("beluga", &self::machine());
            topology.gpus.truncate(machine.gpus.len());
            for (gpu, uuid) in topology.gpus.iter_mut().zip(&machine.gpus) {
                gpu.uuid = Some(uuid.clone());
            }
            let model = Model::nominal(&shipped("beluga"));
            let file = machine.file(&folder.0);
            store(&file, machine, &topology, &model).expect("stored");
            link(&file, machine).expect("linked");
            file
        };
        let newer = Machine {
            driver: "13.0".into(),
            ..machine()
        };
        let (old, new) = (keep(&machine()), keep(&newer));
        assert_ne!(old, new);
        assert_eq!(files(), std::slice::from_ref(&new));
        assert_eq!(keep(&newer), new, "in the same place");
        // A part of this machine has been measured since: both files stay as long as a link leads to each.
        let renamed = Machine {
            gpus: ["GPU-2", "GPU-5", "GPU-6", "GPU-7"]
                .map(String::from)
                .into(),
            ..newer.clone()
        };
        let other = keep(&renamed);
        let mut both = [new.clone(), other.clone()];
        both.sort();
        assert_eq!(files(), both);
        let found = |gpus: [&str; 2]| {
            let gpus = gpus.map(String::from);
            find(&folder.0, &gpus, "13.0").map(|found| found.file).ok()
        };
        assert_eq!(found(["GPU-0", "GPU-2"]), Some(new.clone()));
        assert_eq!(found(["GPU-2", "GPU-3"]), Some(new));
        assert_eq!(found(["GPU-2", "GPU-7"]), Some(other.clone()));
        assert_eq!(found(["GPU-0", "GPU-7"]), None);
        // Text that is no identity names no file.
        assert_eq!(found(["../GPU-0", ""]), None);
        std::fs::remove_file(&other).expect("removed");
        assert_eq!(found(["GPU-6", "GPU-7"]), None);
    }

    #[test]
    fn a_part_of_the_gpus_finds_the_file_of_the_machine() {
        let folder = Folder::new("part");
        let other = Machine {
            gpus: (4..8).map(|gpu| format!("GPU-{gpu}")).collect(),
            ..machine()
        };
        for (name, machine) in [("beluga", machine()), ("narval", other)] {
            let topology = of(name, &machine);
            let model = Model::nominal(&topology);
            let file = machine.file(&folder.0);
            store(&file, &machine, &topology, &model).expect("stored");
            link(&file, &machine).expect("linked");
        }
        let two = ["GPU-3".to_owned(), "GPU-1".to_owned()];
        let found = find(&folder.0, &two, "12.8").expect("found");
        assert_eq!(found.file, machine().file(&folder.0));
        let uuids = found.topology.gpus.iter().map(|gpu| gpu.uuid.as_deref());
        assert!(uuids.eq(machine().gpus.iter().map(|gpu| Some(gpu.as_str()))));
        assert_eq!(found.model, Model::nominal(&shipped("beluga")));
        // The hops between two GPUs are those that were stored.
        let hops = |topology: &Topology| {
            let hops = topology.hops();
            let ends: Vec<_> = hops.map(|(from, to, hop)| (from, to, hop.kind)).collect();
            ends
        };
        assert_eq!(hops(&found.topology), hops(&shipped("beluga")));
        // No node has the GPUs of two machines.
        let mixed = ["GPU-3".to_owned(), "GPU-5".to_owned()];
        assert!(find(&folder.0, &mixed, "12.8").is_err());
        let error = find(&folder.0, &two, "13.0").expect_err("another driver");
        assert!(matches!(error, CacheError::OtherDriver(..)), "{error}");
        let error = find(&folder.0.join("none"), &two, "12.8").expect_err("no folder");
        assert!(matches!(error, CacheError::Absent(_)), "{error}");
    }
}
