//! `anabranch doctor` as users meet it: over the simulated driver, without a driver, over drivers that
//! crash, hang or lie, and with programs of every kind.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::{json, Value};
use xtask::layout::Layout;

mod common;
use common::{Installation, ANABRANCH};

#[path = "doctor/fates.rs"]
mod fates;
#[path = "doctor/installed.rs"]
mod installed;
#[path = "doctor/node.rs"]
mod node;
#[path = "doctor/programs.rs"]
mod programs;

/// Says why a test shows nothing here.
fn skip(what: &str, reason: &str) {
    println!("skipped: {what}: {reason}");
}

/// The same for what can be installed, which is there in CI.
fn skip_missing(what: &str, reason: &str) {
    let in_ci = std::env::var("CI").is_ok_and(|value| value == "true" || value == "1");
    assert!(!in_ci, "{what} is missing: {reason}");
    skip(what, reason);
}

/// The library and the simulated driver, built from the present sources.
fn built() -> &'static [PathBuf; 2] {
    static FILES: OnceLock<[PathBuf; 2]> = OnceLock::new();
    FILES.get_or_init(|| {
        let folder = Path::new(ANABRANCH).parent().expect("target/PROFILE");
        let layout = xtask::build::fresh_layout(folder.ends_with("release"))
            .expect("what the tests load can be built");
        [layout.library(), layout.simcuda().join("libcuda.so.1")]
    })
}

impl Installation {
    /// The command, the library and the simulated driver.
    fn new() -> Installation {
        let files = built();
        let installation = Installation::bare();
        let folder = installation.path("");
        let places = ["lib/libanabranch.so", "sim/libcuda.so.1"];
        for (file, place) in files.iter().zip(places) {
            let place = folder.join(place);
            fs::create_dir(place.parent().expect("a folder")).expect("created");
            fs::copy(file, place).expect("copied");
        }
        let links = folder.join("sim/libnvidia-ml.so.1");
        std::os::unix::fs::symlink("libcuda.so.1", links).expect("linked");
        installation
    }

    /// `anabranch doctor`, without a driver but for what the machine itself has.
    fn doctor(&self) -> Command {
        let mut command = Command::new(self.path("bin/anabranch"));
        command.arg("doctor").current_dir(self.path(""));
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            let ours = [
                "ANABRANCH",
                "SIMCUDA",
                "CUDA",
                "LD_",
                "SLURM",
                "PMI",
                "OMPI",
                "MPI",
                "PRTE",
            ];
            if ours.iter().any(|prefix| text.starts_with(prefix)) {
                command.env_remove(&name);
            }
        }
        command
    }

    /// The same on a simulated node with two GPUs.
    fn with_gpus(&self) -> Command {
        let mut command = self.doctor();
        command
            .env("LD_LIBRARY_PATH", self.path("sim"))
            .env("SIMCUDA_TOPOLOGY", "hgx-h200")
            .env("SIMCUDA_GPUS", "2");
        command
    }

    /// Compiles C, or returns what the compiler said.
    fn compile(
        &self,
        compiler: &Path,
        name: &str,
        source: &str,
        flags: &[&str],
    ) -> Result<PathBuf, String> {
        let file = self.path(&format!("{name}.c"));
        fs::write(&file, source).expect("written");
        let program = self.path(name);
        let output = Command::new(compiler)
            .arg(&file)
            .arg("-o")
            .arg(&program)
            .args(flags)
            .current_dir(self.path(""))
            .output()
            .map_err(|error| error.to_string())?;
        if output.status.success() {
            Ok(program)
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }

    fn gcc(&self, name: &str, source: &str, flags: &[&str]) -> PathBuf {
        self.compile(Path::new("gcc"), name, source, flags)
            .expect("compiled")
    }
}

/// What came out: the status, the text, and the JSON that must say the same.
struct Seen {
    status: i32,
    text: String,
    json: Value,
}

impl Seen {
    fn by(command: &mut Command, installation: &Installation, program: &[&str]) -> Seen {
        let file = installation.path("report.json");
        let Output {
            status,
            stdout,
            stderr,
        } = command
            .arg(format!("--json={}", file.display()))
            .args(program)
            .output()
            .expect("started");
        let text = String::from_utf8(stdout).expect("UTF-8");
        let stderr = String::from_utf8_lossy(&stderr);
        assert_eq!(stderr, "", "{text}");
        let json = fs::read_to_string(&file).expect("the report");
        let seen = Seen {
            status: status.code().expect("a status"),
            text,
            json: serde_json::from_str(&json).expect("JSON"),
        };
        seen.assert_same_facts(&seen.json);
        assert_eq!(
            seen.json["verdict"]["taken"],
            seen.status == 0,
            "{}",
            seen.text
        );
        seen
    }

    /// Every text of the JSON is in the report for people.
    fn assert_same_facts(&self, value: &Value) {
        match value {
            Value::String(fact) => {
                let fact = match fact.as_str() {
                    "wrong_data" => "CUDA IPC gives wrong data",
                    "crash_or_hang" => "CUDA IPC crashes or hangs",
                    "not_tried" => "?: not tried",
                    other => other,
                };
                assert!(
                    self.text.contains(fact),
                    "{fact:?} is not in\n{}",
                    self.text
                );
            }
            Value::Array(list) => list.iter().for_each(|item| self.assert_same_facts(item)),
            Value::Object(map) => map.values().for_each(|item| self.assert_same_facts(item)),
            _ => {}
        }
    }

    fn reasons(&self) -> Vec<&str> {
        let list = self.json["verdict"]["reasons"].as_array().expect("a list");
        list.iter()
            .map(|reason| reason.as_str().expect("a text"))
            .collect()
    }

    /// Nothing would be taken, for this reason alone.
    fn assert_only_reason(&self, parts: &[&str]) {
        assert_eq!(self.status, 1, "{}", self.text);
        let reasons = self.reasons();
        assert_eq!(reasons.len(), 1, "{}", self.text);
        for part in parts {
            assert!(
                reasons[0].contains(part),
                "{part:?} is not in {:?}",
                reasons[0]
            );
        }
        // The first line is the answer.
        let answer = format!("Nothing would be taken: {}", reasons[0]);
        assert_eq!(self.text.lines().next(), Some(&*answer), "{}", self.text);
    }

    /// What the matrix has for two GPUs.
    fn cell(&self, from: usize, to: usize) -> &str {
        let (_, matrix) = (self.text.split_once("from the GPU of the row")).expect("a matrix");
        let mut lines = matrix.lines().skip(1);
        let heads: Vec<&str> = lines.next().expect("heads").split_whitespace().collect();
        let at = heads.iter().position(|head| *head == format!("GPU{to}"));
        let start = format!("  GPU{from} ");
        let row = lines.find(|line| line.starts_with(&start)).expect("a row");
        let mut cells = row.split_whitespace().skip(1);
        cells.nth(at.expect("a column")).expect("a cell")
    }

    /// Outcome of each pair, as `0>1 works`.
    fn pairs(&self) -> Vec<String> {
        let list = self.json["driver"]["pairs"].as_array().expect("a list");
        let mut pairs: Vec<String> = list
            .iter()
            .map(|pair| {
                format!(
                    "{}>{} {}",
                    pair["from"],
                    pair["to"],
                    pair["ipc"].as_str().expect("a text")
                )
            })
            .collect();
        pairs.sort();
        pairs
    }

    fn fate(&self) -> &str {
        self.json["verdict"]["messages"][0]["fate"]
            .as_str()
            .expect("a text")
    }
}

/// Whether this machine has a driver of its own, found without ours.
fn machine_has_driver() -> bool {
    let listed = Command::new("ldconfig").arg("-p").output();
    listed.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("libcuda.so.1"))
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("the mode is set");
}

#[test]
fn a_missing_or_broken_library_is_named() {
    let installation = Installation::new();
    fs::remove_file(installation.path("lib/libanabranch.so")).expect("removed");
    let quick = |command: &mut Command| Seen::by(command.arg("--no-gpu-test"), &installation, &[]);
    quick(&mut installation.with_gpus())
        .assert_only_reason(&["libanabranch.so", "set ANABRANCH_LIBRARY"]);
    installation.gcc("lib/libanabranch.so", "int nothing;", &["-shared", "-fPIC"]);
    quick(&mut installation.with_gpus())
        .assert_only_reason(&["lib/libanabranch.so: another library", "rebuild it"]);
    let crashing = "#include <stdlib.h>\nconst char *anabranch_version(void) { abort(); }";
    installation.gcc("lib/libanabranch.so", crashing, &["-shared", "-fPIC"]);
    quick(&mut installation.with_gpus()).assert_only_reason(&["cannot be loaded", "SIGABRT"]);
    let other = "const char *anabranch_version(void) { return \"99.1\"; }";
    installation.gcc("lib/libanabranch.so", other, &["-shared", "-fPIC"]);
    let seen = quick(&mut installation.with_gpus());
    assert_eq!(seen.status, 0);
    assert!(
        seen.text.contains("version 99.1, this command"),
        "{}",
        seen.text
    );
}

#[test]
fn switched_off_is_a_reason() {
    let installation = Installation::new();
    let mut command = installation.with_gpus();
    command.env("ANABRANCH", "off").arg("--no-gpu-test");
    Seen::by(&mut command, &installation, &[]).assert_only_reason(&["ANABRANCH=off", "unset"]);
    let mut command = installation.with_gpus();
    command.env("ANABRANCH_TRESHOLD", "1K").arg("--no-gpu-test");
    let seen = Seen::by(&mut command, &installation, &[]);
    assert_eq!(seen.status, 0, "{}", seen.text);
    assert!(
        seen.text.contains("did you mean ANABRANCH_THRESHOLD"),
        "{}",
        seen.text
    );
}
#[test]
fn bad_usage_has_a_status_of_its_own() {
    let installation = Installation::new();
    let status = |arguments: &[&str]| {
        let output = installation
            .with_gpus()
            .args(arguments)
            .output()
            .expect("started");
        output.status.code()
    };
    assert_eq!(status(&["--no-such-option"]), Some(2));
    assert_eq!(status(&["--timeout", "0"]), Some(2));
    assert_eq!(
        status(&["--no-gpu-test", "--json=/no/such/folder/file"]),
        Some(2)
    );
    assert_eq!(status(&["--sim", "hgx-h200", "--no-gpu-test"]), Some(2));
    for words in [&["--json=-"][..], &["--json"], &["--json", "-"]] {
        let output = installation
            .with_gpus()
            .arg("--no-gpu-test")
            .args(words)
            .output()
            .expect("started");
        assert_eq!(output.status.code(), Some(0));
        assert!(serde_json::from_slice::<Value>(&output.stdout)
            .is_ok_and(|json| json["verdict"]["taken"] == true));
    }
}
