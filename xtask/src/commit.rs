//! The commit that a build is made from, and its time.

use std::path::Path;
use std::process::Command;

/// The commit's first 12 digits, with `-dirty` behind them if files differ from it, and its time in seconds since 1970: from git or,
/// where the sources come without it, from ANABRANCH_COMMIT and SOURCE_DATE_EPOCH, which go before git's.
///
/// # Errors
/// A sentence that says what to set.
pub fn of(root: &Path) -> Result<(String, u32), String> {
    let given = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let number = |text: String| {
        let bad = |_| format!("SOURCE_DATE_EPOCH={text} is no number of seconds since 1970");
        text.parse::<u32>().map_err(bad)
    };
    let epoch = given("SOURCE_DATE_EPOCH").map(number).transpose()?;
    if let (Some(commit), Some(epoch)) = (given("ANABRANCH_COMMIT"), epoch) {
        return Ok((commit, epoch));
    }
    let log = git(root, &["log", "-1", "--format=%H %ct"]).map_err(|why| {
        format!("{why}; without a git repository set ANABRANCH_COMMIT and SOURCE_DATE_EPOCH")
    })?;
    let (hash, time) = log.split_once(' ').ok_or("git log says nothing")?;
    let changed = git(root, &["status", "--porcelain", "--untracked-files=no"])?;
    let dirty = if changed.is_empty() { "" } else { "-dirty" };
    let commit = format!("{}{dirty}", hash.get(..12).unwrap_or(hash));
    let time = time.parse().map_err(|_| format!("git log says {log:?}"))?;
    Ok((commit, epoch.unwrap_or(time)))
}

fn git(root: &Path, arguments: &[&str]) -> Result<String, String> {
    let mut command = Command::new("git");
    let output = command.arg("-C").arg(root).args(arguments).output();
    let output = output.map_err(|error| format!("git cannot be started: {error}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("git {}: {}", arguments[0], said.trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_git_says_what_to_set() {
        let folder = std::env::temp_dir().join(format!("no-git-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let why = of(&folder).expect_err("no repository");
        assert!(
            why.contains("set ANABRANCH_COMMIT and SOURCE_DATE_EPOCH"),
            "{why}"
        );
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
