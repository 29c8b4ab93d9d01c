//! The child's side: each probe does one thing that may crash or hang, and says on stdout what it saw.

use std::ffi::{c_char, CStr, OsString};
use std::io::{Read, Write};
use std::path::Path;

use anabranch_engine::cuda::nvml::Nvml;
use anabranch_engine::cuda::uuid_text;
use anyhow::{bail, Context};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use serde::{Deserialize, Serialize};

use crate::bench::cuda::{Driver, IpcHandle};

/// What is copied between two GPUs.
const COPIED_BYTES: usize = 1 << 20;

/// Roles of the child processes of `anabranch doctor`.
#[derive(clap::Subcommand)]
pub enum Probe {
    /// Load a libanabranch.so and print its version
    Library {
        /// Its path
        path: OsString,
    },
    /// Print what the CUDA driver reports, a JSON value a line
    Driver,
    /// Print what NVML tells of the NVLinks of GPUs, a JSON value a line
    Links {
        /// Their identities
        uuids: Vec<String>,
    },
    /// Allocate on a GPU, print the handle of the allocation, and wait for the end of stdin
    Export {
        /// The GPU
        ordinal: u32,
        /// What the contents are computed from
        seed: u64,
    },
    /// Map an allocation, copy it to a GPU and compare
    Import {
        /// The GPU
        ordinal: u32,
        /// What the contents are computed from
        seed: u64,
        /// The allocation, in hexadecimal
        handle: String,
    },
    /// Share memory without a name, print its number and contents, and wait for the end of stdin
    Share,
    /// Open the memory that a process shares, and print what is in it
    OpenShared {
        /// The process
        pid: u32,
        /// The memory's number there
        number: u32,
    },
}

/// What the driver probe has to say. One a line, so that what was said before a crash is kept.
#[derive(Serialize, Deserialize)]
pub enum Said {
    /// The file of the driver.
    File(String),
    /// It is the simulated one.
    Simulated,
    /// The version of CUDA that it supports.
    Version(i32),
    /// A GPU.
    Gpu(Gpu),
    /// Whether the second GPU reaches the memory of the first.
    Peer(u32, u32, bool),
    /// The NVLinks of the GPU of this identity.
    Links(String, NvLinks),
    /// What a call reported; nothing more follows.
    Failed(String),
    /// All was said.
    Complete,
}

/// A GPU, as the driver names it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Gpu {
    /// Its number in this process.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Its identity, as nvidia-smi prints it.
    pub uuid: String,
}

/// How many NVLinks of a GPU are up, by what they lead to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvLinks {
    /// Straight to other GPUs.
    pub to_gpus: u32,
    /// To a switch.
    pub to_switch: u32,
}

/// Plays a role.
///
/// # Errors
/// What was seen to fail; it is the last line on stderr.
pub fn play(probe: &Probe) -> anyhow::Result<()> {
    match probe {
        Probe::Library { path } => library(path.as_ref()),
        Probe::Driver => {
            if let Err(error) = driver() {
                say(&Said::Failed(format!("{error:#}")))?;
            }
            Ok(())
        }
        Probe::Links { uuids } => links(uuids),
        Probe::Export { ordinal, seed } => export(*ordinal, *seed),
        Probe::Import {
            ordinal,
            seed,
            handle,
        } => import(*ordinal, *seed, handle),
        Probe::Share => share(),
        Probe::OpenShared { pid, number } => open_shared(*pid, *number),
    }
}

fn print(line: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

fn say(said: &Said) -> anyhow::Result<()> {
    print(&serde_json::to_string(said)?)
}

/// The parent closes this process's stdin when it is needed no more.
fn wait_for_parent() -> anyhow::Result<()> {
    std::io::stdin().lock().read_to_end(&mut Vec::new())?;
    Ok(())
}

fn library(path: &Path) -> anyhow::Result<()> {
    // SAFETY: the library runs no code when it is loaded; that it might is why this is a process of its own.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }?;
    // SAFETY: include/anabranch.h gives the function of this name this signature.
    let version =
        unsafe { library.get::<unsafe extern "C" fn() -> *const c_char>(b"anabranch_version\0") }
            .context("it is no libanabranch.so")?;
    // SAFETY: it may be called at any time.
    let text = unsafe { version() };
    if text.is_null() {
        bail!("it names no version");
    }
    // SAFETY: a string that is never freed, says the header.
    print(&unsafe { CStr::from_ptr(text) }.to_string_lossy())
}

fn driver() -> anyhow::Result<()> {
    let driver = Driver::open()?;
    if let Some(file) = driver.file() {
        say(&Said::File(file))?;
    }
    if driver.simulated_clock().is_some() {
        say(&Said::Simulated)?;
    }
    // May be asked before cuInit, and answered where cuInit fails.
    if let Ok(version) = driver.version() {
        say(&Said::Version(version))?;
    }
    driver.init()?;
    let count = driver.device_count()?;
    for ordinal in 0..count {
        say(&Said::Gpu(Gpu {
            ordinal,
            name: driver.device_name(ordinal)?,
            uuid: uuid_text(&driver.device_uuid(ordinal)?),
        }))?;
    }
    for from in 0..count {
        for to in (0..count).filter(|to| *to != from) {
            say(&Said::Peer(from, to, driver.can_access(to, from)?))?;
        }
    }
    say(&Said::Complete)
}

fn links(uuids: &[String]) -> anyhow::Result<()> {
    let nvml = Nvml::open().context("no NVML (libnvidia-ml.so.1) that works")?;
    for uuid in uuids {
        if let Some(links) = nvml.links(uuid) {
            let links = NvLinks {
                to_gpus: links.to_gpus.len() as u32,
                to_switch: links.to_switch,
            };
            say(&Said::Links(uuid.clone(), links))?;
        }
    }
    Ok(())
}

/// Bytes that nothing else in memory looks like (splitmix64, by Steele, Lea and Flood).
fn contents(seed: u64) -> Vec<u8> {
    let word = |index: u64| {
        let mut word = seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)).to_le_bytes()
    };
    (1..=COPIED_BYTES as u64 / 8).flat_map(word).collect()
}

fn export(ordinal: u32, seed: u64) -> anyhow::Result<()> {
    let driver = Driver::open()?;
    driver.init()?;
    driver.enter(ordinal)?;
    let address = driver.alloc(COPIED_BYTES)?;
    driver.write(address, &contents(seed))?;
    let handle = driver.export(address)?;
    print(
        &handle
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>(),
    )?;
    wait_for_parent()?;
    driver.free(address)
}

fn handle_of(text: &str) -> Option<IpcHandle> {
    let byte = |index: usize| u8::from_str_radix(text.get(2 * index..2 * index + 2)?, 16).ok();
    let bytes: Option<Vec<u8>> = (0..text.len() / 2).map(byte).collect();
    bytes?.try_into().ok()
}

fn import(ordinal: u32, seed: u64, handle: &str) -> anyhow::Result<()> {
    let handle = handle_of(handle).context("not a handle")?;
    let driver = Driver::open()?;
    driver.init()?;
    driver.enter(ordinal)?;
    let expected = contents(seed);
    let mut found = contents(!seed);
    let own = driver.alloc(COPIED_BYTES)?;
    // Other bytes first, so that a copy that does nothing is seen.
    driver.write(own, &found)?;
    let mapped = driver.open_handle(handle)?;
    let stream = driver.stream()?;
    driver.copy_async(own, mapped, COPIED_BYTES, stream)?;
    driver.wait(stream)?;
    driver.read(own, &mut found)?;
    driver.synchronize()?;
    driver.destroy(stream)?;
    driver.close(mapped)?;
    driver.free(own)?;
    let wrong = found.iter().zip(&expected).filter(|(a, b)| a != b).count();
    match wrong {
        0 => print("equal"),
        wrong => print(&format!("{wrong} of {COPIED_BYTES} bytes differ")),
    }
}

fn share() -> anyhow::Result<()> {
    // SAFETY: a NUL-terminated name.
    let number = unsafe { libc::memfd_create(c"anabranch-doctor".as_ptr(), libc::MFD_CLOEXEC) };
    if number < 0 {
        return Err(std::io::Error::last_os_error()).context("memfd_create");
    }
    let text = format!("shared by {}", std::process::id());
    std::fs::write(format!("/proc/self/fd/{number}"), &text)?;
    print(&format!("{number} {text}"))?;
    wait_for_parent()
}

fn open_shared(pid: u32, number: u32) -> anyhow::Result<()> {
    let path = format!("/proc/{pid}/fd/{number}");
    // As the library does: readable and writable.
    let mut file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&path)
        .context(path)?;
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    print(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_reads_as_nvidia_smi_prints_it() {
        let bytes: Vec<u8> = (0..16).map(|index| index * 17).collect();
        let text = uuid_text(&bytes.try_into().expect("16 bytes"));
        assert_eq!(text, "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn handles_survive_their_text() {
        let handle: IpcHandle =
            std::array::from_fn(|index| u8::try_from(index * 3).expect("small"));
        let text: String = handle.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(handle_of(&text), Some(handle));
        for bad in [
            "",
            "00",
            &text[1..],
            &text.replace('0', "x"),
            "\u{e9}".repeat(64).as_str(),
        ] {
            assert_eq!(handle_of(bad), None, "{bad}");
        }
    }

    #[test]
    fn contents_differ_everywhere() {
        // The first two numbers of splitmix64 from 0, as its authors' code gives them.
        let words = contents(0);
        assert_eq!(words[..8], 0xe220_a839_7b1d_cdaf_u64.to_le_bytes());
        assert_eq!(words[8..16], 0x6e78_9e6a_a1b9_65f4_u64.to_le_bytes());
        let same = contents(1)
            .iter()
            .zip(contents(!1))
            .filter(|(a, b)| **a == *b)
            .count();
        assert!(same < COPIED_BYTES / 100, "{same}");
    }
}
