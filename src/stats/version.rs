//! Which build of the library this is: what `--version`, the statistics, and the first line of the log say.

use std::sync::OnceLock;

/// The version, as in `0.1.0`.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit that it was built from, as `cargo xtask dist` and `cargo xtask build --release` give it.
pub const COMMIT: &str = match option_env!("ANABRANCH_COMMIT") {
    Some(commit) => commit,
    None => "unknown commit",
};

/// For what it was built and with which compiler, or the profile where nobody has said.
pub const BUILD: &str = match option_env!("ANABRANCH_BUILD") {
    Some(build) => build,
    None if cfg!(debug_assertions) => "debug build",
    None => "release build",
};

/// All three in one line, without the name, as in `0.1.0 (1ebcdf6c9f8f, x86_64-unknown-linux-gnu, glibc 2.28, rustc 1.95.0)`.
pub fn long() -> &'static str {
    static LINE: OnceLock<String> = OnceLock::new();
    LINE.get_or_init(|| format!("{VERSION} ({COMMIT}, {BUILD})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_has_version_commit_and_build() {
        let line = long();
        for part in [VERSION, COMMIT, BUILD] {
            assert!(
                !part.is_empty() && line.contains(part),
                "{part:?} in {line:?}"
            );
        }
        assert!(!line.contains('\n'));
    }
}
