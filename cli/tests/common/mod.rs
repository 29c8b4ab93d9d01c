//! What the tests of the command share.

use std::fs;
use std::path::PathBuf;

/// The command under test.
pub const ANABRANCH: &str = env!("CARGO_BIN_EXE_anabranch");

/// A folder of its own with the command in `bin`, and room for what stands beside it.
pub struct Installation {
    folder: tempfile::TempDir,
}

impl Installation {
    /// Only the command.
    pub fn bare() -> Installation {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
        fs::create_dir(folder.path().join("bin")).expect("bin");
        // Not a copy: a program that was just written cannot be started while another test, forked
        // meanwhile, still holds it open.
        fs::hard_link(ANABRANCH, folder.path().join("bin/anabranch")).expect("linked");
        Installation { folder }
    }

    /// A path in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder
            .path()
            .canonicalize()
            .expect("exists")
            .join(name)
    }
}
