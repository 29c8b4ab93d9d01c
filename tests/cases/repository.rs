//! The repository is as its own documents say.

use anabranch_engine::stats::{Counter, Reason};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use xtask::layout::repository_root;

/// Every folder at the top, and every folder below `src/`, is on ARCHITECTURE.md's map, written as `name/`.
#[test]
fn every_folder_is_on_the_map() {
    let root = repository_root();
    let map = fs::read_to_string(root.join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let listed = Command::new("git")
        .arg("-C")
        .arg(&root)
        .args(["ls-files"])
        .output()
        .expect("git ls-files");
    let files = String::from_utf8_lossy(&listed.stdout).into_owned();
    let mut folders = BTreeSet::new();
    for file in files.lines() {
        let parts: Vec<&str> = file.split('/').collect();
        let hidden = file.starts_with('.');
        if parts.len() > 1 && !hidden {
            folders.insert(format!("{}/", parts[0]));
            if parts[0] == "src" && parts.len() > 2 {
                folders.insert(format!("src/{}/", parts[1]));
            }
        }
    }
    assert!(folders.contains("src/"), "git lists the repository's files");
    let missing: Vec<_> = folders
        .iter()
        .filter(|folder| !map.contains(&format!("`{folder}`")))
        .collect();
    assert!(missing.is_empty(), "not on the map: {missing:?}");
}

/// Every command that the README shows exists.
#[test]
fn the_readme_names_what_is_there() {
    let root = repository_root();
    let readme = fs::read_to_string(root.join("README.md")).expect("README.md");
    for word in readme.split(|c: char| c.is_whitespace() || c == '`' || c == '(' || c == ')') {
        let word = word.trim_end_matches(['.', ',', ':', ';']);
        if word.starts_with("ci/") || word.starts_with("docs/") {
            assert!(
                root.join(word).exists(),
                "README.md names {word}, which is not there"
            );
        }
    }
}

/// Scripts can be run, and their interpreters can read them.
#[test]
fn scripts_are_well_formed() {
    for folder in ["ci", ".ci"] {
        for entry in fs::read_dir(repository_root().join(folder))
            .expect("a folder of scripts")
            .flatten()
        {
            let text = fs::read_to_string(entry.path()).unwrap_or_default();
            let parse = "import ast, sys; ast.parse(open(sys.argv[1]).read())";
            let read: &[&str] = match text.lines().next() {
                Some("#!/usr/bin/env bash") => &["bash", "-n"],
                Some("#!/usr/bin/env python3") => &["python3", "-c", parse],
                _ => continue,
            };
            let status = Command::new(read[0])
                .args(&read[1..])
                .arg(entry.path())
                .status()
                .unwrap_or_else(|error| panic!("{}: {error}", read[0]));
            assert!(status.success(), "{}", entry.path().display());
        }
    }
}

/// Every counter and every reason of the table is used where something is counted, not only where it is told.
#[test]
fn what_the_table_names_is_counted() {
    fn read(folder: &Path, text: &mut String) {
        for entry in fs::read_dir(folder).expect("a folder of sources").flatten() {
            let path = entry.path();
            if path.is_dir() {
                read(&path, text);
            } else if !path.ends_with("stats/summary.rs") {
                *text += &fs::read_to_string(&path).unwrap_or_default();
            }
        }
    }
    let mut text = String::new();
    read(&repository_root().join("src"), &mut text);
    let used: BTreeSet<&str> = text
        .split(|c: char| !c.is_alphanumeric() && c != ':')
        .collect();
    let counters = Counter::ALL.iter().map(|it| format!("Counter::{it:?}"));
    let reasons = Reason::ALL.iter().map(|it| format!("Reason::{it:?}"));
    let idle: Vec<String> = counters
        .chain(reasons)
        .filter(|name| !used.contains(name.as_str()))
        .collect();
    assert!(idle.is_empty(), "never counted: {idle:?}");
}
