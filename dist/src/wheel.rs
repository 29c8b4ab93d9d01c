//! A Python wheel: the files of the tarball below the folder of the Python environment, and a module that asks the library.

use crate::contents::{Contents, Place};
use anabranch_dist::release::Release;
use anabranch_dist::tree::{Entry, Tree};
use anyhow::{Context, Result};
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use base64::Engine;
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{Cursor, Write};
use std::path::{Path, PathBuf};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, DateTime, ZipWriter};

/// Writes `anabranch-VERSION-py3-none-manylinux_2_28_MACHINE.whl`.
pub fn write(release: &Release, contents: &Contents, out: &Path) -> Result<PathBuf> {
    let (major, minor) = anabranch_dist::symbols::GLIBC;
    let tag = format!(
        "py3-none-manylinux_{major}_{minor}_{}",
        release.machine.name()
    );
    let name = format!("anabranch-{}", release.version);
    let tree = tree(contents, &name, &tag)?;
    let file = out.join(format!("{name}-{tag}.whl"));
    fs::write(&file, zipped(&tree, release.epoch)?)?;
    Ok(file)
}

/// All files of the wheel.
fn tree(contents: &Contents, name: &str, tag: &str) -> Result<Tree> {
    let mut tree = Tree::default();
    for (path, entry) in contents.tree(Place::Python)?.entries() {
        let Entry::File(bytes, is_program) = entry else {
            continue;
        };
        let folder = if *is_program { "scripts" } else { "data" };
        let path = path.strip_prefix("bin/").unwrap_or(path);
        tree.add(format!("{name}.data/{folder}/{path}"), bytes.clone());
    }
    tree.add(
        "anabranch/__init__.py",
        contents.filled(include_str!("../files/python/__init__.py")),
    );
    tree.add(
        "anabranch/__main__.py",
        include_str!("../files/python/__main__.py"),
    );
    let info = format!("{name}.dist-info");
    tree.add(
        format!("{info}/METADATA"),
        contents.filled(include_str!("../files/python/METADATA")),
    );
    let wheel = "Wheel-Version: 1.0\nGenerator: anabranch-dist\nRoot-Is-Purelib: false\n";
    tree.add(format!("{info}/WHEEL"), format!("{wheel}Tag: {tag}\n"));
    tree.add(
        format!("{info}/licenses/LICENSE-MIT"),
        include_str!("../../LICENSE-MIT"),
    );
    tree.add(
        format!("{info}/licenses/LICENSE-APACHE"),
        include_str!("../../LICENSE-APACHE"),
    );
    tree.add(format!("{info}/sboms/anabranch.cdx.json"), contents.sbom());
    let record = format!("{info}/RECORD");
    let list = listed(&tree, &record);
    tree.add(record, list);
    Ok(tree)
}

/// The list by which `pip` checks what it unpacks, and removes it later.
fn listed(tree: &Tree, own: &str) -> String {
    let mut list = String::new();
    for (path, entry) in tree.entries() {
        if let Entry::File(bytes, _) = entry {
            let sum = URL_SAFE_NO_PAD.encode(Sha256::digest(bytes));
            list += &format!("{path},sha256={sum},{}\n", bytes.len());
        }
    }
    list + own + ",,\n"
}

fn zipped(tree: &Tree, epoch: u32) -> Result<Vec<u8>> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let time = time(epoch)?;
    for (path, entry) in tree.entries() {
        let Entry::File(bytes, _) = entry else {
            continue;
        };
        let mode = if path.contains(".data/scripts/") {
            0o755
        } else {
            0o644
        };
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Deflated)
            .compression_level(Some(9))
            .last_modified_time(time)
            .unix_permissions(mode);
        zip.start_file(path, options)?;
        zip.write_all(bytes)?;
    }
    Ok(zip.finish()?.into_inner())
}

/// A time as zip files have it: without a zone, from 1980 on, in steps of two seconds.
fn time(epoch: u32) -> Result<DateTime> {
    let (days, seconds) = (epoch / 86_400, epoch % 86_400);
    let (year, month, day) = civil(days);
    let part = |value: u32| u8::try_from(value).context("a part of a time");
    let time = DateTime::from_date_and_time(
        u16::try_from(year)?,
        part(month)?,
        part(day)?,
        part(seconds / 3600)?,
        part(seconds / 60 % 60)?,
        part(seconds % 60)?,
    );
    Ok(time.unwrap_or_default())
}

/// Year, month and day of a day since 1970, by counting.
fn civil(mut days: u32) -> (u32, u32, u32) {
    let is_leap = |year: u32| (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    let mut year = 1970;
    while days >= 365 + u32::from(is_leap(year)) {
        days -= 365 + u32::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u32::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_those_of_the_calendar() {
        // By date -u -d @N.
        for (epoch, date) in [
            (0, (1970, 1, 1)),
            (951_782_400, (2000, 2, 29)),
            (1_798_675_199, (2026, 12, 30)),
            (4_107_542_400, (2100, 3, 1)),
        ] {
            assert_eq!(civil(epoch / 86_400), date, "{epoch}");
        }
    }

    #[test]
    fn the_record_has_every_file_and_itself_without_a_sum() {
        let mut tree = Tree::default();
        tree.add("a", "abc");
        // The sum of "abc" is among the examples of FIPS 180-2.
        let sum = "ungWv48Bz-pBQUDeXa4iI7ADYaOWF3qctBD_YfIAFa0";
        assert_eq!(listed(&tree, "r"), format!("a,sha256={sum},3\nr,,\n"));
    }
}
