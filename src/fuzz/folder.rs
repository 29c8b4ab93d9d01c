//! Where fuzz targets keep files. The command has this file, too.

use std::path::Path;

/// Whether the inputs are chosen by the code that they reach.
pub(crate) fn is_guided() -> bool {
    std::env::var_os("BOLERO_LIBFUZZER_ARGS").is_some()
}

/// A folder in memory. libFuzzer ends the process without removing it: then it is in the folder that `ci/fuzz`
/// names in `TMPDIR`, and removes.
pub(crate) fn folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let made = match is_guided() {
        true => tempfile::tempdir(),
        false => tempfile::Builder::new()
            .prefix("anabranch-test-")
            .tempdir_in(memory)
            .or_else(|_| tempfile::tempdir()),
    };
    made.expect("a folder")
}
