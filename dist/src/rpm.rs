//! An RPM package.

use crate::contents::{Contents, Place};
use anabranch_dist::release::Release;
use anabranch_dist::tree::Entry;
use anyhow::Result;
use rpm::{BuildConfig, CompressionType, Dependency, FileMode, FileOptions, PackageBuilder};
use std::path::{Path, PathBuf};

/// What the loader must find, as `rpm` itself derives it from programs.
const REQUIRED: [&str; 4] = [
    "libc.so.6(GLIBC_2.28)(64bit)",
    "libdl.so.2()(64bit)",
    "libm.so.6()(64bit)",
    "libpthread.so.0()(64bit)",
];

/// Writes `anabranch-VERSION-1.MACHINE.rpm`.
pub fn write(release: &Release, contents: &Contents, out: &Path) -> Result<PathBuf> {
    let machine = release.machine.name();
    let summary = "GPU messages of MPI programs over every path of a node";
    let mut builder = PackageBuilder::new("anabranch", &release.version, "MIT OR Apache-2.0", machine, summary)
        // The format that RHEL 8 and SLES 15 read.
        .using_config(BuildConfig::v4().compression(CompressionType::Gzip))
        .source_date(release.epoch)
        .release("1")
        .build_host("localhost")
        .vendor("The Anabranch developers")
        .description(
            "libanabranch.so is preloaded onto an unmodified MPI program, and sends its GPU buffers between the ranks of a node by \
             the GPUs' own copies. The command anabranch starts programs with it. A CUDA driver in software is for trying it out.",
        );
    for required in REQUIRED {
        builder = builder.requires(Dependency::any(required));
    }
    let tree = contents.tree(Place::Rpm)?;
    // Folders of its own go with the package; the others are the system's.
    let folders = tree.folders();
    for folder in folders
        .iter()
        .filter(|folder| folder.contains("/anabranch"))
    {
        let options = FileOptions::new(format!("/usr/{folder}")).mode(FileMode::dir(0o755));
        builder = builder.with_file_contents(Vec::new(), options)?;
    }
    for (path, entry) in tree.entries() {
        let options = FileOptions::new(format!("/usr/{path}"));
        builder = match entry {
            Entry::File(bytes, _) => {
                let options = options.mode(FileMode::regular(entry.mode()));
                builder.with_file_contents(bytes.clone(), options)?
            }
            Entry::Link(to) => {
                let options = options
                    .mode(FileMode::symbolic_link(entry.mode()))
                    .symlink(to);
                builder.with_file_contents(Vec::new(), options)?
            }
        };
    }
    let file = out.join(format!("anabranch-{}-1.{machine}.rpm", release.version));
    builder.build()?.write_file(&file)?;
    Ok(file)
}
