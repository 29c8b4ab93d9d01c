//! The file that keeps a measured model.
//!
//! It is valid for one machine (the identities of its GPUs, in order) and one version of the driver. Anything else in its
//! place is said in one line, and nominal numbers are used.

use super::Model;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Version of the format. A file of another one is measured again.
const FORMAT: u32 = 1;

/// What a measurement is valid for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Identities of the GPUs, in the order of their numbers.
    pub gpus: Vec<String>,
    /// Version of the driver.
    pub driver: String,
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
    model: Model,
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
    /// It is of this machine with another driver.
    #[error("{file}: measured with driver {1}, this is {2}; measure again with anabranch topo --measure", file = .0.display())]
    OtherDriver(PathBuf, String, String),
}

/// Reads a model that was measured on `machine`.
///
/// # Errors
/// There is none, or not one for this machine.
pub fn load(file: &Path, machine: &Machine) -> Result<Model, CacheError> {
    let path = || file.to_path_buf();
    let text = std::fs::read_to_string(file).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => CacheError::Absent(path()),
        _ => CacheError::Io(path(), error),
    })?;
    // The version first: of another one nothing else is expected to be there.
    let value: serde_json::Value = serde_json::from_str(&text)
        .map_err(|error| CacheError::Unusable(path(), one_line(&error)))?;
    match value.get("format").and_then(serde_json::Value::as_u64) {
        Some(format) if format == u64::from(FORMAT) => {}
        Some(format) => {
            return Err(CacheError::Unusable(
                path(),
                format!("format {format}, not {FORMAT}"),
            ))
        }
        None => return Err(CacheError::Unusable(path(), "no model".into())),
    }
    let kept: Kept = serde_json::from_value(value)
        .map_err(|error| CacheError::Unusable(path(), one_line(&error)))?;
    if kept.machine.gpus != machine.gpus {
        return Err(CacheError::OtherMachine(path(), brief(&kept.machine.gpus)));
    }
    if kept.machine.driver != machine.driver {
        return Err(CacheError::OtherDriver(
            path(),
            kept.machine.driver,
            machine.driver.clone(),
        ));
    }
    kept.model
        .check()
        .map_err(|why| CacheError::Unusable(path(), why))?;
    Ok(kept.model)
}

/// Writes a model, whole or not at all: ranks may be reading.
///
/// # Errors
/// The file cannot be written.
pub fn store(file: &Path, machine: &Machine, model: &Model) -> Result<(), CacheError> {
    let failed = |error| CacheError::Io(file.to_path_buf(), error);
    let kept = Kept {
        format: FORMAT,
        machine: machine.clone(),
        model: model.clone(),
    };
    let text = serde_json::to_string_pretty(&kept).map_err(|error| failed(error.into()))?;
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    let mut new = file.as_os_str().to_owned();
    new.push(format!(".{}", std::process::id()));
    std::fs::write(&new, text + "\n").map_err(failed)?;
    std::fs::rename(&new, file).map_err(|error| {
        // The half that failed is of no use to anyone.
        let _ = std::fs::remove_file(&new);
        failed(error)
    })
}

fn one_line(error: &serde_json::Error) -> String {
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
    use crate::topology::tests::shipped;

    fn machine() -> Machine {
        Machine {
            gpus: vec!["GPU-1".into(), "GPU-2".into()],
            driver: "12.8".into(),
        }
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
        let model = Model::nominal(&shipped("beluga"));
        assert!(matches!(
            load(&file, &machine()),
            Err(CacheError::Absent(_))
        ));
        store(&file, &machine(), &model).expect("stored");
        assert_eq!(load(&file, &machine()).expect("loaded"), model);
        let other = Machine {
            gpus: vec!["GPU-3".into()],
            ..machine()
        };
        let error = load(&file, &other)
            .expect_err("another machine")
            .to_string();
        assert!(
            error.contains("another machine (2 GPUs, the first GPU-1)"),
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
        let model = Model::nominal(&shipped("beluga"));
        store(&file, &machine(), &model).expect("stored");
        let good = std::fs::read_to_string(&file).expect("read");
        for bad in [
            String::new(),
            "[1, 2]".into(),
            good[..good.len() / 2].into(),
            good.replacen("\"format\": 1", "\"format\": 2", 1),
            good.replacen("\"gb_s\": 48.0", "\"gb_s\": -48.0", 1),
            good.replacen("\"GPU0\"", "\"GPU\"", 1),
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
}
