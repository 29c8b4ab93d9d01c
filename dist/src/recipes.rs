//! A Spack recipe and a container file beside the packages that they install.

use crate::sha256;
use anabranch_dist::release::{Machine, Release};
use anyhow::{Context, Result};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Writes both, for the packages that were made.
pub fn write(release: &Release, made: &[PathBuf], out: &Path) -> Result<Vec<PathBuf>> {
    let named = |ending: &str| {
        let found = made
            .iter()
            .find(|file| file.to_string_lossy().ends_with(ending));
        found.with_context(|| format!("no package {ending}"))
    };
    let tarball = named(".tar.gz")?;
    let recipe = include_str!("../files/spack/package.py")
        .replace("@VERSION@", &release.version)
        .replace("@MACHINE@", release.machine.name())
        .replace("@SHA256@", &sha256(&fs::read(tarball)?));
    // The recipe names one file and its sum; that of the other machine is made beside it.
    let folder = match release.machine {
        Machine::X86_64 => "spack".to_owned(),
        Machine::Aarch64 => "spack-aarch64".to_owned(),
    };
    let texts = [
        (format!("{folder}/packages/anabranch/package.py"), recipe),
        (
            format!("{folder}/repo.yaml"),
            "repo:\n  namespace: anabranch\n".to_owned(),
        ),
        (
            "container/Containerfile".to_owned(),
            include_str!("../files/container/Containerfile").to_owned(),
        ),
        (
            "container/install".to_owned(),
            include_str!("../files/container/install").to_owned(),
        ),
    ];
    let mut written = Vec::new();
    for (name, text) in texts {
        let file = out.join(&name);
        fs::create_dir_all(file.parent().unwrap_or(out))?;
        fs::write(&file, text)?;
        if name.ends_with("install") {
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755))?;
        }
        written.push(file);
    }
    Ok(written)
}
