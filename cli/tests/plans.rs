//! What `anabranch plan` prints for all nodes that come with it is what it printed when the record was made: a line each,
//! with the time that it predicts, the bytes of each path, and a hash of all of its JSON. `UPDATE_PLANS=1` makes the
//! record anew.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

const ANABRANCH: &str = env!("CARGO_BIN_EXE_anabranch");

const NODES: [(&str, u32); 4] = [
    ("beluga", 4),
    ("narval", 4),
    ("dgx1-v100", 8),
    ("hgx-h200", 8),
];
const SIZES: [&str; 5] = ["1M", "3000001", "16M", "64M", "512M"];
const FURTHER: [&[&str]; 6] = [
    &[],
    &["--both-ways"],
    &["--window", "16"],
    &["--owner", "one"],
    &["--owner", "one", "--order", "path-by-path"],
    &["--paths", "direct,relay", "--chunks", "8"],
];

fn printed(arguments: &[&str]) -> String {
    let output = Command::new(ANABRANCH)
        .arg("plan")
        .args(arguments)
        .arg("--json")
        .env_remove("LD_LIBRARY_PATH")
        .output()
        .expect("started");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {stderr}");
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let paths = json["paths"].as_array().expect("paths").iter();
    let paths: Vec<String> = paths
        .map(|path| format!("{} {} in {}", path["path"], path["bytes"], path["chunks"]))
        .collect();
    let hash = fnv1a(json.to_string().as_bytes());
    format!(
        "{} us\t{}\t{hash:016x}",
        json["predicted_us"],
        paths.join(", ")
    )
}

/// The same on every machine and with every compiler.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn all() -> String {
    let mut text = String::new();
    for (node, gpus) in NODES {
        let last = (gpus - 1).to_string();
        for (from, to) in [("0", "1"), ("2", "0"), ("1", last.as_str())] {
            for size in SIZES {
                for further in FURTHER {
                    let asked = [
                        "--topology",
                        node,
                        "--from",
                        from,
                        "--to",
                        to,
                        "--size",
                        size,
                    ];
                    let arguments = [&asked[..], further].concat();
                    let _ = writeln!(text, "{}\t{}", arguments.join(" "), printed(&arguments));
                }
            }
        }
    }
    text
}

#[test]
fn plans_are_those_of_the_record() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/plans.tsv");
    let found = all();
    if std::env::var_os("UPDATE_PLANS").is_some() {
        std::fs::write(&file, found).expect("the record is written");
        return;
    }
    let kept = std::fs::read_to_string(&file).expect("tests/golden/plans.tsv");
    let differ: Vec<_> = kept
        .lines()
        .zip(found.lines())
        .filter(|(kept, found)| kept != found)
        .collect();
    assert_eq!(kept.lines().count(), found.lines().count());
    if let Some((kept, found)) = differ.first() {
        panic!("{} plans differ, the first:\n{kept}\n{found}", differ.len());
    }
}
