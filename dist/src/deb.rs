//! A Debian package: an `ar` archive of two tar files.

use crate::contents::{Contents, Place};
use anabranch_dist::packed::packed;
use anabranch_dist::release::Release;
use anabranch_dist::tree::{Entry, Tree};
use anyhow::Result;
use std::fs;
use std::path::{Path, PathBuf};

/// Writes `anabranch_VERSION-1_ARCHITECTURE.deb`.
pub fn write(release: &Release, contents: &Contents, out: &Path) -> Result<PathBuf> {
    let mut data = Tree::default();
    data.graft("usr/", contents.tree(Place::Debian)?);
    let folder = "usr/share/doc/anabranch";
    data.add(
        format!("{folder}/copyright"),
        include_str!("../files/copyright"),
    );
    let mut control = Tree::default();
    let kib = data.size().div_ceil(1024);
    let text = contents.filled(include_str!("../files/control"));
    control.add("control", text.replace("@KIB@", &kib.to_string()));
    control.add("triggers", "activate-noawait ldconfig\n");
    control.add("md5sums", md5sums(&data));
    let file = out.join(format!(
        "anabranch_{}-1_{}.deb",
        release.version,
        release.machine.debian()
    ));
    let mut archive = ar::Builder::new(Vec::new());
    let parts = [
        ("debian-binary", b"2.0\n".to_vec()),
        ("control.tar.gz", packed(&control, release.epoch)?),
        ("data.tar.gz", packed(&data, release.epoch)?),
    ];
    for (name, bytes) in parts {
        let mut header = ar::Header::new(name.as_bytes().to_vec(), bytes.len() as u64);
        header.set_mode(0o100_644);
        header.set_mtime(release.epoch.into());
        archive.append(&header, bytes.as_slice())?;
    }
    fs::write(&file, archive.into_inner()?)?;
    Ok(file)
}

/// By which `dpkg --verify` tells whether a file has changed since.
fn md5sums(data: &Tree) -> String {
    let files = data.entries().filter_map(|(path, entry)| match entry {
        Entry::File(bytes, _) => Some(format!("{:x}  {path}\n", md5::compute(bytes))),
        Entry::Link(_) => None,
    });
    files.collect()
}
