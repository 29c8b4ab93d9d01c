//! A tarball that runs wherever it is unpacked.

use crate::contents::{Contents, Place};
use anabranch_dist::packed::packed;
use anabranch_dist::release::Release;
use anabranch_dist::tree::Tree;
use anyhow::Result;
use std::fs;
use std::path::{Path, PathBuf};

/// Writes `anabranch-VERSION-linux-MACHINE.tar.gz`.
pub fn write(release: &Release, contents: &Contents, out: &Path) -> Result<PathBuf> {
    let name = format!(
        "anabranch-{}-linux-{}",
        release.version,
        release.machine.name()
    );
    let mut tree = Tree::default();
    tree.graft(&format!("{name}/"), contents.tree(Place::Prefix)?);
    let file = out.join(format!("{name}.tar.gz"));
    fs::write(&file, packed(&tree, release.epoch)?)?;
    Ok(file)
}
