//! The repository is as its own documents say.

use anabranch_engine::stats::{Counter, Reason};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use xtask::layout::repository_root;

/// The files that the repository has, as git names them.
fn tracked() -> Vec<String> {
    let root = repository_root();
    let listed = Command::new("git")
        .arg("-C")
        .arg(root)
        .args(["ls-files"])
        .output()
        .expect("git ls-files");
    let names = String::from_utf8_lossy(&listed.stdout).into_owned();
    names.lines().map(str::to_owned).collect()
}

/// Every folder at the top, and every folder below `src/`, is on ARCHITECTURE.md's map, written as `name/`.
#[test]
fn every_folder_is_on_the_map() {
    let root = repository_root();
    let map = fs::read_to_string(root.join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let mut folders = BTreeSet::new();
    for file in tracked() {
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

/// ARCHITECTURE.md stays short enough to be read at once.
#[test]
fn the_architecture_is_short() {
    let bytes = fs::metadata(repository_root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    assert!(bytes.len() <= 25_000, "{} bytes", bytes.len());
}

/// The documents of the repository: those at the top, and those below `docs/`.
fn documents() -> Vec<PathBuf> {
    let root = repository_root();
    let folders = ["", "docs", "docs/decisions", "docs/results"];
    let entries = folders
        .iter()
        .flat_map(|folder| fs::read_dir(root.join(folder)).expect("a folder"));
    let paths = entries.flatten().map(|entry| entry.path());
    paths
        .filter(|path| path.extension().is_some_and(|it| it == "md"))
        .collect()
}

/// The targets of a document's links, and the files that it names between backticks.
fn names(text: &str) -> (Vec<&str>, Vec<&str>) {
    let links = text
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split([')', '#']).next());
    let links = links
        .filter(|link| !link.is_empty() && !link.starts_with("http"))
        .collect();
    let is_file = |word: &&str| {
        let folders = [
            "src/", "docs/", "tests/", "ci/", "cli/", "simcuda/", "xtask/", "jacobi/", "include/",
        ];
        folders.iter().any(|folder| word.starts_with(folder))
            && word
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c))
    };
    (
        links,
        text.split('`').skip(1).step_by(2).filter(is_file).collect(),
    )
}

/// Links of documents lead somewhere, files that they name are there, decisions and results are in their indexes, and lines
/// are as long as a window is wide.
#[test]
fn documents_name_what_is_there() {
    let root = repository_root();
    let mut wrong = Vec::new();
    for path in documents() {
        let text = fs::read_to_string(&path).expect("text");
        let folder = path.parent().expect("a folder");
        let (links, files) = names(&text);
        let links = links.iter().filter(|link| !folder.join(link).exists());
        let files = files.iter().filter(|file| !root.join(file).exists());
        let dead = links
            .chain(files)
            .map(|name| format!("{}: {name}", path.display()));
        wrong.extend(dead);
        let in_docs = folder.starts_with(root.join("docs")) || path.ends_with("ARCHITECTURE.md");
        let is_generated = path.ends_with("mpi-coverage.md");
        let mut is_code = false;
        for line in text.lines().filter(|_| in_docs && !is_generated) {
            is_code ^= line.starts_with("```");
            let is_free = is_code || line.starts_with('|') || line.contains("](");
            if !is_free && line.chars().count() > 110 {
                wrong.push(format!("{}: a long line: {line}", path.display()));
            }
        }
    }
    for folder in ["docs/decisions", "docs/results"] {
        let index = fs::read_to_string(root.join(folder).join("README.md")).expect("an index");
        for entry in fs::read_dir(root.join(folder)).expect("a folder").flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name != "README.md" && !index.contains(&format!("]({name})")) {
                wrong.push(format!("{folder}/README.md has no {name}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The sources of the repository but for generated ones, with their text.
fn sources() -> Vec<(String, String)> {
    let root = repository_root();
    let names = tracked()
        .into_iter()
        .filter(|name| name.ends_with(".rs") && !name.ends_with("generated.rs"));
    let with_text = |name: String| {
        let text = fs::read_to_string(root.join(&name)).unwrap_or_default();
        (name, text)
    };
    names.map(with_text).collect()
}

/// The rooms of the engine, each of which sees only those above it.
const ROOMS: [&str; 16] = [
    "trace", "stats", "topology", "node", "mpi", "model", "policy", "plan", "config", "logging",
    "cuda", "exec", "transfer", "engine", "entry", "lib",
];

/// What some rooms do not know, whatever they might reach it by.
const UNKNOWN_TO: [(&[&str], &[&str]); 2] = [
    // They compute: nothing in them depends on a driver, or on when they are asked.
    (
        &["topology", "model", "plan"],
        &["cuda::", "Instant", "SystemTime", "clock_ns"],
    ),
    // Bytes are moved in the same way for collectives, and for tests without MPI.
    (&["transfer"], &["mpi::", "MPI_", "Abi"]),
];

/// A source without its comments, and without the tests in it.
fn code(text: &str) -> String {
    let text = text
        .split("#[cfg(test)]\nmod tests {")
        .next()
        .unwrap_or_default();
    let lines = text.lines();
    let code = lines.filter(|line| !line.trim_start().starts_with("//"));
    code.collect::<Vec<_>>().join("\n")
}

/// The rooms that a source names after `crate::`, also several in braces.
fn rooms_named(code: &str) -> Vec<&str> {
    let mut named = Vec::new();
    for rest in code.split("crate::").skip(1) {
        let list = match rest.strip_prefix('{') {
            Some(list) => list.split('}').next().unwrap_or_default(),
            None => rest.split(';').next().unwrap_or_default(),
        };
        let names = match rest.starts_with('{') {
            true => list.split(',').collect(),
            false => vec![list],
        };
        let word = |name: &'_ str| {
            let name = name.trim_start();
            name.find(|letter: char| !letter.is_alphanumeric() && letter != '_')
                .unwrap_or(name.len())
        };
        named.extend(
            names
                .into_iter()
                .map(|name| &name.trim_start()[..word(name)]),
        );
    }
    named
}

/// No room depends on one that depends on it, and transfers do not know MPI.
#[test]
fn rooms_depend_in_one_direction() {
    let place = |room: &str| ROOMS.iter().position(|known| *known == room);
    let mut wrong = Vec::new();
    let mut edges = 0;
    for (name, text) in sources() {
        let Some(path) = name
            .strip_prefix("src/")
            // Fuzz targets are tests, and look into every room.
            .filter(|path| !path.contains("test") && !path.contains("fuzz"))
        else {
            continue;
        };
        let room = path.split('/').next().unwrap_or_default();
        let room = room.strip_suffix(".rs").unwrap_or(room);
        let Some(own) = place(room) else {
            wrong.push(format!("{name}: {room} is no known room"));
            continue;
        };
        let code = code(&text);
        for named in rooms_named(&code) {
            let other = place(named).filter(|other| *other != own);
            edges += usize::from(other.is_some());
            if other.is_some_and(|other| other > own) {
                wrong.push(format!(
                    "{name} sees {named}, which is a room behind {room}"
                ));
            }
        }
        for (rooms, words) in UNKNOWN_TO {
            let words = words.iter().filter(|word| code.contains(**word));
            let is_meant = rooms.contains(&room);
            wrong.extend(
                words
                    .filter(|_| is_meant)
                    .map(|word| format!("{name} knows {word}")),
            );
        }
    }
    assert!(edges > 300, "{edges} uses of other rooms were read");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Files of more than 600 lines, and why they are. The list only shrinks, and none of them grows by a tenth.
const LONG_FILES: [(&str, usize, &str); 27] = [
    (
        "src/transfer/fetch.rs",
        732,
        "a claimed message from its RTS to its end",
    ),
    (
        "src/transfer/route/survey.rs",
        883,
        "measuring is one state machine; a third are its tests",
    ),
    ("tests/cases/paths.rs", 876, "cases of one subject"),
    (
        "src/node/view.rs",
        828,
        "the layout of a segment, and what is believed of it",
    ),
    ("src/plan/shares.rs", 810, "one closed form with its terms"),
    (
        "src/transfer/fetch/protocol/multipath.rs",
        800,
        "the receiver's side of a split message; executors are to divide it",
    ),
    (
        "src/engine/early.rs",
        755,
        "receives before the node uses devices, one subject",
    ),
    (
        "src/engine/receive/arrival.rs",
        753,
        "what lands, one subject; matching apart from transfers is to divide it",
    ),
    ("cli/src/bench/mod.rs", 737, "one command"),
    (
        "src/exec/mod.rs",
        712,
        "a plan's launch; one trait of executors is to divide it",
    ),
    (
        "src/cuda/pointer.rs",
        701,
        "what an address is, one subject",
    ),
    (
        "src/topology/mod.rs",
        681,
        "a node's parts, and what follows from them",
    ),
    ("src/transfer/route.rs", 681, "the router"),
    (
        "src/transfer/serve.rs",
        668,
        "the sender's side of a pipeline; to be a protocol of its own",
    ),
    (
        "src/engine/core.rs",
        664,
        "all mutable state and its progress",
    ),
    (
        "src/plan/mod.rs",
        637,
        "options and plans; a third are their documents",
    ),
    ("tests/cases/model_error.rs", 635, "cases of one subject"),
    ("tests/cases/matching.rs", 625, "cases of one subject"),
    ("tests/cases/compare.rs", 621, "cases of one subject"),
    ("tests/cases/faults/calls.rs", 618, "cases of one subject"),
    (
        "simcuda/src/work.rs",
        618,
        "what the simulated driver's streams do, one subject",
    ),
    ("tests/cases/progress.rs", 612, "cases of one subject"),
    ("simcuda/src/clock.rs", 607, "one clock"),
    (
        "src/cuda/mapping.rs",
        606,
        "peers' memory, mapped: one subject",
    ),
    (
        "cli/src/bench/suite.rs",
        601,
        "one benchmark after the other",
    ),
    ("cli/tests/topo.rs", 688, "cases of one subject"),
    ("simcuda/tests/processes.rs", 702, "cases of one subject"),
];
/// So many functions are longer than 80 lines, or have more than six parameters, each of which says why. Fewer are welcome here.
const LONG_FUNCTIONS: usize = 17;
const MANY_PARAMETERS: usize = 33;

/// Unsafe blocks, functions and implementations of each room, its tests and what is generated included. Fewer are welcome
/// here.
const UNSAFE: [(&str, usize); 10] = [
    ("cuda", 142),
    ("engine", 56),
    ("entry", 2),
    ("exec", 16),
    ("mpi", 97),
    ("node", 41),
    ("trace", 17),
    ("transfer", 26),
    ("wrappers", 39),
    ("wrappers/ucx", 22),
];

/// An unsafe block has at most so many lines.
const UNSAFE_LINES: usize = 10;

/// The room of a Rust file of the library.
fn room(name: &str) -> Option<&str> {
    let name = name.strip_suffix(".rs")?;
    match name.strip_prefix("src/") {
        Some(place) => place.split('/').next(),
        None => ["wrappers/ucx", "wrappers"]
            .into_iter()
            .find(|folder| name.starts_with(&format!("{folder}/"))),
    }
}

/// The lines of the block that begins with the brace at the start of `text`.
fn lines_of_block(text: &str) -> usize {
    let mut depth = 0usize;
    let end = text.find(|letter| {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        depth == 0
    });
    text[..end.unwrap_or(text.len())].lines().count()
}

/// What is unsafe is counted by rooms, its blocks are short, and each says itself which fact it relies on.
#[test]
fn unsafe_code_is_counted_and_short() {
    let root = repository_root();
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut wrong = Vec::new();
    for name in tracked() {
        let Some(room) = room(&name) else { continue };
        let text = fs::read_to_string(root.join(&name)).unwrap_or_default();
        let count = [
            "unsafe {",
            "unsafe fn",
            "unsafe extern \"C\" fn",
            "unsafe impl",
        ]
        .iter()
        .map(|kind| text.matches(kind).count())
        .sum::<usize>();
        *counts.entry(room.to_owned()).or_default() += count;
        for (at, _) in text.match_indices("unsafe {") {
            let lines = lines_of_block(&text[at + "unsafe ".len()..]);
            if lines > UNSAFE_LINES {
                let line = text[..at].lines().count();
                wrong.push(format!("{name}:{line}: an unsafe block of {lines} lines"));
            }
        }
        if text.contains("SAFETY: passed on") {
            wrong.push(format!("{name}: \"passed on\" names no fact"));
        }
    }
    counts.retain(|_, count| *count > 0);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let known = UNSAFE.map(|(room, count)| (room.to_owned(), count));
    assert_eq!(counts, BTreeMap::from(known), "unsafe by rooms");
}

/// Files and functions are short, and what is not says why.
#[test]
fn files_and_functions_are_short() {
    let sources = sources();
    let mut wrong = Vec::new();
    let (mut long, mut many) = (0, 0);
    for (name, text) in &sources {
        let lines = text.lines().count();
        let known = LONG_FILES.iter().find(|(known, ..)| known == name);
        let most = known.map_or(600, |(_, lines, _)| lines + lines / 10);
        if lines > most {
            wrong.push(format!("{name} has {lines} lines, {most} at most"));
        }
        if known.is_some() && lines <= 600 {
            wrong.push(format!("{name} is no exception any more"));
        }
        // This file names them, too.
        if name.ends_with("cases/repository.rs") {
            continue;
        }
        for attribute in text.split("#[allow(").skip(1) {
            let attribute = attribute.split(")]").next().unwrap_or_default();
            let is_long = attribute.contains("clippy::too_many_lines");
            let has_many = attribute.contains("clippy::too_many_arguments");
            (long, many) = (long + usize::from(is_long), many + usize::from(has_many));
            // The generator writes its own into what it generates.
            let is_generator = name.starts_with("xtask/src/codegen");
            if (is_long || has_many) && !is_generator && !attribute.contains("reason = ") {
                wrong.push(format!("{name}: {attribute} says no reason"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(
        (long, many),
        (LONG_FUNCTIONS, MANY_PARAMETERS),
        "the numbers of exceptions"
    );
}
