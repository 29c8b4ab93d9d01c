//! Tar files whose bytes depend on what is in them alone.

use crate::tree::{Entry, Tree};
use anyhow::Result;
use flate2::{Compression, GzBuilder};
use tar::{Builder, EntryType, Header};

/// A compressed tar file of a tree.
pub fn packed(tree: &Tree, epoch: u32) -> Result<Vec<u8>> {
    // No name and no time of its own in the header of the compressed file.
    let gz = GzBuilder::new().write(Vec::new(), Compression::best());
    let mut tar = Builder::new(gz);
    let header = |kind: EntryType, mode: u32, size: usize| {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_mtime(epoch.into());
        header.set_uid(0);
        header.set_gid(0);
        header.set_size(size as u64);
        header
            .set_username("root")
            .and_then(|()| header.set_groupname("root"))
            .map(|()| header)
    };
    for folder in tree.folders() {
        let mut header = header(EntryType::Directory, 0o755, 0)?;
        tar.append_data(&mut header, format!("{folder}/"), &[][..])?;
    }
    for (path, entry) in tree.entries() {
        match entry {
            Entry::File(bytes, _) => {
                let mut header = header(EntryType::Regular, entry.mode().into(), bytes.len())?;
                tar.append_data(&mut header, path, bytes.as_slice())?;
            }
            Entry::Link(to) => {
                let mut header = header(EntryType::Symlink, entry.mode().into(), 0)?;
                tar.append_link(&mut header, path, to)?;
            }
        }
    }
    Ok(tar.into_inner()?.finish()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_tree_gives_the_same_bytes_and_every_file_root_owns() {
        let mut tree = Tree::default();
        tree.add("b/c", "text");
        tree.link("b/a", "c");
        let bytes = packed(&tree, 7).expect("packed");
        assert_eq!(bytes, packed(&tree, 7).expect("packed"));
        assert_ne!(bytes, packed(&tree, 8).expect("packed"));
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(bytes.as_slice()));
        let mut found = Vec::new();
        for entry in archive.entries().expect("entries") {
            let entry = entry.expect("an entry");
            let header = entry.header();
            assert_eq!(header.mtime().expect("a time"), 7);
            assert_eq!(
                (header.uid().expect("uid"), header.gid().expect("gid")),
                (0, 0)
            );
            found.push(String::from_utf8_lossy(&entry.path_bytes()).into_owned());
        }
        assert_eq!(found, ["b/", "b/a", "b/c"]);
    }
}
