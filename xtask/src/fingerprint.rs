//! A fingerprint of the sources, so that a library built from other sources is never tested by mistake.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Folders and files whose contents decide what the layout holds.
const SOURCES: [&str; 9] = [
    "Cargo.toml",
    "Cargo.lock",
    "src",
    "wrappers",
    "cli",
    "include",
    "simcuda",
    "kernels",
    "jacobi",
];

/// Fingerprint of the sources under `root`: names and contents, in a fixed order.
///
/// # Errors
/// If a source cannot be read.
pub fn of_sources(root: &Path) -> io::Result<String> {
    let mut files = Vec::new();
    for source in SOURCES {
        collect(&root.join(source), &mut files)?;
    }
    files.sort();
    let mut hash = Fnv::new();
    for file in &files {
        let name = file.strip_prefix(root).unwrap_or(file);
        hash.write(name.to_string_lossy().as_bytes());
        hash.write(&[0]);
        hash.write(&fs::read(file)?);
        hash.write(&[0]);
    }
    Ok(format!("{:016x}", hash.0))
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    let Ok(kind) = fs::metadata(path) else {
        return Ok(());
    };
    if kind.is_file() {
        files.push(path.to_path_buf());
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let name = entry.file_name();
        // Test folders and editors' leftovers change nothing in what is built.
        let ignored =
            name == "target" || name == "tests" || name.to_string_lossy().starts_with('.');
        if !ignored {
            collect(&entry.path(), files)?;
        }
    }
    Ok(())
}

/// FNV-1a, 64 bits: enough to tell two states of a source tree apart, and without a dependency.
struct Fnv(u64);

impl Fnv {
    fn new() -> Fnv {
        Fnv(0xcbf2_9ce4_8422_2325)
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fnv_matches_its_published_test_vectors() {
        for (text, expected) in [
            ("", 0xcbf2_9ce4_8422_2325),
            ("a", 0xaf63_dc4c_8601_ec8c),
            ("foobar", 0x8594_4171_f739_67e8),
        ] {
            let mut hash = Fnv::new();
            hash.write(text.as_bytes());
            assert_eq!(hash.0, expected, "{text:?}");
        }
    }

    #[test]
    fn a_changed_source_changes_the_fingerprint() {
        let root = std::env::temp_dir().join(format!("fingerprint-{}", std::process::id()));
        fs::create_dir_all(root.join("src")).unwrap();
        fs::write(root.join("src/lib.rs"), "fn a() {}").unwrap();
        let before = of_sources(&root).unwrap();
        assert_eq!(before, of_sources(&root).unwrap());
        fs::write(root.join("src/lib.rs"), "fn b() {}").unwrap();
        assert_ne!(before, of_sources(&root).unwrap());
        fs::remove_dir_all(&root).unwrap();
    }
}
