//! Calls of UCX in traces: those of messages that the MPI library carries, each with its MPI call.

use crate::support::{job, on};
use crate::tracing::{files, json, trace};
use anabranch_tests::{built, scratch_folder};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use xtask::mpi::{Family, Mpi};

/// What rank 0 of the case `layers` sends by MPI_Send: host memory, and packed from device memory.
const SENT: [u64; 5] = [8, 4_000, 100_000, 3_000_001, 5_000];

fn size_class(bytes: u64) -> u64 {
    u64::from(u64::BITS - bytes.leading_zeros())
}

/// The case `layers`, over UCX, traced into a folder.
fn layers(mpi: &Mpi, folder: &Path, is_told: bool) -> Value {
    let library = built().library.display().to_string();
    let ucx = built().library.with_file_name("libanabranch_ucx.so");
    assert!(ucx.exists(), "{ucx:?}");
    let both = format!("{library}:{}", ucx.display());
    let name = folder.join("trace").display().to_string();
    let mut job = job(mpi, 2, "patterns")
        .args(&["layers"])
        .env("ANABRANCH_TRACE", &name)
        .env("LD_PRELOAD", if is_told { &both } else { &library });
    if matches!(mpi.family, Family::OpenMpi4 | Family::OpenMpi5) {
        // It takes UCX for InfiniBand alone unless it is told.
        for (name, value) in [
            ("pml", "ucx"),
            ("pml_ucx_tls", "any"),
            ("pml_ucx_devices", "any"),
            ("osc", "ucx"),
        ] {
            job = job.env(&format!("OMPI_MCA_{name}"), value);
        }
    }
    job.passes();
    json(&files(folder, 2))
}

fn rows<'a>(report: &'a Value, rank: u64, call: &str, function: &str) -> Vec<&'a Value> {
    let rows = report["ucp"].as_array().expect("rows");
    rows.iter()
        .filter(|row| row["rank"] == rank && row["call"] == call)
        .filter(|row| {
            row["function"]
                .as_str()
                .expect("a name")
                .starts_with(function)
        })
        .collect()
}

/// Each message that the MPI library carries is there with its bytes; what the library carries is not, nor are its own.
#[test]
fn calls_of_ucx_are_those_of_what_mpi_carries() {
    for name in ["openmpi", "mpich", "openmpi5"] {
        on(name, |mpi| {
            let folder = scratch_folder("trace");
            let report = layers(mpi, &folder, true);
            assert_eq!(report["dropped"], 0, "{report}");
            let sent = rows(&report, 0, "MPI_Send", "ucp_tag_send");
            let of_size: BTreeMap<u64, (u64, u64)> = sent
                .iter()
                .map(|row| {
                    let number = |name: &str| row[name].as_u64().expect("a number");
                    (number("size_class"), (number("calls"), number("bytes")))
                })
                .collect();
            // 4,000 and 5,000 bytes are of two classes.
            let expected: BTreeMap<u64, (u64, u64)> = SENT
                .iter()
                .map(|bytes| (size_class(*bytes), (1, *bytes)))
                .collect();
            assert_eq!(of_size, expected, "{name}: {sent:?}");
            assert!(sent.iter().all(|row| row["failed"] == 0), "{sent:?}");
            // Long messages wait for their receiver.
            let longest = sent
                .iter()
                .find(|row| row["size_class"] == size_class(3_000_001));
            assert_eq!(longest.expect("it")["under_way"], 1, "{sent:?}");
            let received = rows(&report, 1, "MPI_Recv", "ucp_tag_");
            let calls: u64 = received
                .iter()
                .map(|row| row["calls"].as_u64().expect("a number"))
                .sum();
            // Receives are posted before anybody knows which way their messages go: those of the library's, too.
            assert!(
                (SENT.len() as u64..=8).contains(&calls),
                "{name}: {received:?}"
            );
            if name == "openmpi5" {
                let is_named = |row: &&Value| {
                    let transports = row["transports"].as_str().expect("text");
                    transports
                        .split(", ")
                        .all(|lane| lane.split('/').filter(|part| !part.is_empty()).count() == 2)
                };
                assert!(sent.iter().all(is_named), "{sent:?}");
            }
            // A one-sided call lasts until it returns, and what is done in it is its own.
            let put = rows(&report, 0, "MPI_Put", "ucp_put");
            let put: Vec<_> = put
                .iter()
                .map(|row| (&row["calls"], &row["bytes"]))
                .collect();
            assert_eq!(put, [(&1.into(), &700_000.into())], "{name}");
            of_one_message(&report, &files(&folder, 2));
            let text = trace(&files(&folder, 2), &[]).1;
            assert!(text.contains("Calls of UCX"), "{text}");
            let _ = std::fs::remove_dir_all(&folder);
        });
    }
}

/// The message of packed bytes names the call of UCX that carried them.
fn of_one_message(report: &Value, files: &[std::path::PathBuf]) {
    let messages = report["messages"].as_array().expect("messages");
    let packed = messages
        .iter()
        .find(|message| message["tag"] == 20 && !message["sender"].is_null())
        .expect("a message");
    assert_eq!(packed["is_by_mpi"], true, "{packed}");
    let (code, out, err) = trace(files, &["--message", &packed["number"].to_string()]);
    assert_eq!(code, 0, "{err}");
    let whole: Value = serde_json::from_str(&out).expect("JSON");
    let calls = whole["ucp"].as_array().expect("calls");
    assert_eq!(calls.len(), 1, "{whole}");
    assert_eq!(
        (&calls[0]["bytes"], &calls[0]["rank"]),
        (&5_000.into(), &0.into()),
        "{whole}"
    );
}

/// Without the second library, and without UCX, the level is empty.
#[test]
fn without_ucx_the_level_is_empty() {
    on("openmpi", |mpi| {
        let folder = scratch_folder("trace");
        let report = layers(mpi, &folder, false);
        assert_eq!(report["ucp"], Value::Array(Vec::new()), "{report}");
        let _ = std::fs::remove_dir_all(folder);
    });
    on("mpich5", |mpi| {
        let folder = scratch_folder("trace");
        let report = layers(mpi, &folder, true);
        assert_eq!(report["ucp"], Value::Array(Vec::new()), "{report}");
        let _ = std::fs::remove_dir_all(folder);
    });
}
