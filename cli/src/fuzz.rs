//! Fuzzing of what the command reads: files that users name, and what they write on its line. How the tests are run
//! stands in the engine's `src/fuzz.rs`.

#[path = "../../src/fuzz/bytes.rs"]
mod bytes;
#[path = "../../src/fuzz/folder.rs"]
mod folder;

use std::path::PathBuf;

use anabranch_engine::trace::read::VERSION;
use bytes::Bytes;

/// A file in memory.
fn file(name: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = folder::folder();
    let path = folder.path().join(name);
    (folder, path)
}

const HEADER: &str = r#"{"library":"0.1","job":1,"rank":0,"size":2,"host":"n","pid":9,"is_simulated":false,"opened":[5,6],
    "functions":["MPI_Init","MPI_Send"],"states":["posted","done"],"protocols":["get","put"],"reasons":["too_small"]}"#;

/// A trace of records that make some sense, of which some are written over.
fn trace(input: &mut Bytes, rank: u32) -> Vec<u8> {
    let header = HEADER.replace("\"rank\":0", &format!("\"rank\":{rank}"));
    let header = match input.byte() % 8 {
        0 => input.edited(header.as_bytes()),
        _ => header.into_bytes(),
    };
    let mut file = b"ANBTRACE".to_vec();
    file.extend(VERSION.to_le_bytes());
    file.extend((header.len() as u32).to_le_bytes());
    file.extend(header);
    let mut at = 100;
    for _ in 0..input.below(24) {
        at += u64::from(input.byte());
        let kind = [1, 2, 2, 5, 6, 7, 8, 9, 9, 10, 11, 12][usize::from(input.byte() % 12)];
        let small = u64::from(input.byte());
        let mut words = [
            kind | small << 8 | (small % 2) << 16 | (small % 4) << 32,
            at,
            at + u64::from(input.byte()),
            small % 3,
            u64::from(input.byte()),
            u64::from(input.byte()) << 8,
            small % 4,
            small,
        ];
        if input.byte() % 2 == 0 {
            words[usize::from(input.byte() % 8)] = input.word();
        }
        words
            .iter()
            .for_each(|word| file.extend(word.to_le_bytes()));
    }
    match input.byte() % 8 {
        0 => input.edited(&file),
        _ => file,
    }
}

/// All that is made of traces: text, CSV, a page, and Perfetto's file.
#[test]
fn traces() {
    let (folder, first) = file("trace.0");
    let second = folder.path().join("trace.1");
    bolero::check!(name = "traces")
        .with_iterations(1000)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            std::fs::write(&first, trace(&mut input, 0)).expect("written");
            std::fs::write(&second, trace(&mut input, 1)).expect("written");
            crate::trace::all_outputs(&[first.clone(), second.clone()]);
        });
}

const STATISTICS: &str = r#"{"schema":3,"version":"0.1","job":"a","host":"n","size":2,"began_unix_ms":1,"ended_unix_ms":9,
    "simulated":false,"ranks":[{"rank":0,"pid":5,"counters":{"sends_device":3},"fallbacks":{"too_small":{"messages":1,"bytes":5}},
    "run_ns":100,"time_in_calls":{"MPI_Send":{"calls":3,"ns":70}},"rates":{"get":[{"from_bytes":1024,"messages":2,"bytes":4000,
    "timed":2,"timed_bytes":4000,"ns":50,"min_ns":20,"max_ns":30}]},"pairs":[{"rank":1,"received":{},"sent":{"taken":{"messages":2,
    "bytes":4000}}}]}],"totals":{"counters":{"sends_device":3},"fallbacks":{}}}"#;

/// Statistics of jobs, and what is made of them.
#[test]
fn statistics() {
    let (_folder, path) = file("stats.json");
    bolero::check!(name = "statistics")
        .with_iterations(3000)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            std::fs::write(&path, input.edited(STATISTICS.as_bytes())).expect("written");
            let files = [path.clone()];
            let (text, wrong) = crate::report::text(&files);
            assert_eq!(text.is_empty(), !wrong.is_empty());
            assert!(
                wrong.iter().all(|line| line.lines().count() == 1),
                "{wrong:?}"
            );
            let _ = crate::report::brief(&files);
        });
}

#[test]
fn topologies() {
    let (_folder, path) = file("node.toml");
    let shipped = include_str!("../../simcuda/topologies/narval.toml");
    bolero::check!(name = "topologies")
        .with_iterations(300)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            std::fs::write(&path, input.edited(shipped.as_bytes())).expect("written");
            let name = path.to_str().expect("UTF-8");
            let _ = crate::topo::file::read("--topology", name);
        });
}

/// The smallest files that a linker has made are some kilobytes; what is read of them is at their beginning.
#[test]
fn elf_files() {
    let (_folder, path) = file("program");
    let program = std::fs::read(std::env::current_exe().expect("a program")).expect("read");
    // The header and the program headers, and no section headers: they would be at the end.
    let sample = &program[..4096.min(program.len())];
    bolero::check!(name = "elf_files")
        .with_iterations(2000)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            std::fs::write(&path, input.edited(sample)).expect("written");
            let _ = (
                crate::elf::Elf::read(&path),
                crate::elf::exports(&path, "MPI_Init"),
            );
            let _ = (
                crate::elf::profiling(&path),
                crate::elf::definitions(&path, &["MPI_Init"]),
            );
            let _ = crate::elf::GlibcVersion::parse(&input.text("GLIBC_2.34"));
        });
}

/// What users write on the command's line.
#[test]
fn arguments() {
    bolero::check!(name = "arguments")
        .with_iterations(20_000)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            if let Ok(sizes) = crate::bench::sizes::parse(&input.text("0:64M")) {
                assert!(sizes.0.len() <= 64);
            }
            let _ = crate::bench::sizes::parse(&input.text("1,4K,7"));
            let _ = crate::bench::away::parse(&input.text("compute:50"));
            let _ = crate::compare::settings::parse(&input.text("a=B=1,C=2,3"));
        });
}
