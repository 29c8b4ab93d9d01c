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
            .arg("--json")
            .arg(&file)
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
                    "wrong_data" => "IPC gives wrong data",
                    "crash_or_hang" => "IPC crashes or hangs",
                    "not_tried" => "IPC not tried",
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
        let line = self.text.lines().find(|line| line.starts_with("! because"));
        assert!(
            line.is_some_and(|line| line.ends_with(reasons[0])),
            "{}",
            self.text
        );
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

#[test]
fn on_two_gpus_every_pair_is_tried() {
    let installation = Installation::new();
    let seen = Seen::by(&mut installation.with_gpus(), &installation, &[]);
    assert_eq!(seen.status, 0, "{}", seen.text);
    assert_eq!(
        seen.pairs(),
        ["0>0 works", "0>1 works", "1>0 works", "1>1 works"]
    );
    let driver = &seen.json["driver"];
    for pair in driver["pairs"].as_array().expect("a list") {
        let expected = if pair["from"] == pair["to"] {
            Value::Null
        } else {
            Value::Bool(true)
        };
        assert_eq!(pair["peer_access"], expected, "{pair}");
    }
    // The name is written in the node's description.
    let topology =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../simcuda/topologies/hgx-h200.toml");
    let topology = fs::read_to_string(topology).expect("the topology");
    let gpus = driver["gpus"].as_array().expect("a list");
    assert_eq!(gpus.len(), 2);
    for gpu in gpus {
        let name = gpu["name"].as_str().expect("a name");
        assert!(topology.contains(&format!("name = \"{name}\"")), "{name}");
        assert!(
            gpu["uuid"]
                .as_str()
                .is_some_and(|uuid| uuid.len() == "GPU-".len() + 36),
            "{gpu}"
        );
    }
    assert_ne!(gpus[0]["uuid"], gpus[1]["uuid"]);
    assert_eq!(
        driver["file"],
        installation
            .path("sim/libcuda.so.1")
            .to_str()
            .expect("UTF-8")
    );
    assert_eq!(
        seen.json["library"]["path"],
        installation
            .path("lib/libanabranch.so")
            .to_str()
            .expect("UTF-8")
    );
    assert_eq!(seen.json["library"]["version"], env!("CARGO_PKG_VERSION"));
    assert!(
        seen.fate().contains("directly between GPUs: all pairs"),
        "{}",
        seen.text
    );
    assert!(seen.text.contains("GPU 1 -> 0"), "{}", seen.text);
}

/// An HGX H200 has 18 links a GPU, all to switches; a Beluga node two between each two of its four.
#[test]
fn links_tell_what_long_messages_may_take() {
    let installation = Installation::new();
    for (node, nvml, links, fate) in [
        (
            "hgx-h200",
            "1",
            json!({"to_gpus": 0, "to_switch": 18}),
            "not over other GPUs: their links lead to a switch",
        ),
        (
            "beluga",
            "1",
            json!({"to_gpus": 6, "to_switch": 0}),
            "also over other GPUs and through host memory",
        ),
        ("beluga", "0", Value::Null, "NVML tells of no links"),
    ] {
        let mut command = installation.with_gpus();
        command
            .arg("--no-gpu-test")
            .env("SIMCUDA_TOPOLOGY", node)
            .env("SIMCUDA_GPUS", "4")
            .env("SIMCUDA_NVML", nvml);
        let seen = Seen::by(&mut command, &installation, &[]);
        for gpu in seen.json["driver"]["gpus"].as_array().expect("a list") {
            assert_eq!(gpu["nvlinks"], links, "{node}: {}", seen.text);
        }
        assert!(seen.text.contains(fate), "{node}: {}", seen.text);
    }
}

#[test]
fn without_the_attempt_nothing_is_claimed() {
    let installation = Installation::new();
    let seen = Seen::by(
        installation.with_gpus().arg("--no-gpu-test"),
        &installation,
        &[],
    );
    assert_eq!(seen.status, 0, "{}", seen.text);
    assert!(
        seen.pairs().iter().all(|pair| pair.ends_with("not_tried")),
        "{}",
        seen.text
    );
    assert!(seen.fate().contains("not tried"), "{}", seen.text);
}

#[test]
fn hidden_gpus_are_listed_and_left_alone() {
    let installation = Installation::new();
    let mut command = installation.with_gpus();
    let seen = Seen::by(command.env("CUDA_VISIBLE_DEVICES", "1"), &installation, &[]);
    assert_eq!(seen.status, 0, "{}", seen.text);
    assert_eq!(seen.pairs(), ["0>0 works"]);
    let visible: Vec<&Value> = seen.json["driver"]["gpus"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|gpu| &gpu["visible"])
        .collect();
    assert_eq!(visible, [true, false]);
    let mut none = installation.with_gpus();
    let seen = Seen::by(none.env("CUDA_VISIBLE_DEVICES", ""), &installation, &[]);
    seen.assert_only_reason(&["cuInit", "CUDA_ERROR_NO_DEVICE"]);
    let hidden = seen.json["driver"]["gpus"].as_array().expect("a list");
    assert_eq!(hidden.len(), 2, "{}", seen.text);
}

#[test]
fn what_the_driver_refuses_goes_through_host_memory() {
    for call in ["cuIpcOpenMemHandle", "cuIpcGetMemHandle"] {
        let installation = Installation::new();
        let mut command = installation.with_gpus();
        command.env(
            "SIMCUDA_FAULT",
            format!("{call}:1=CUDA_ERROR_NOT_SUPPORTED"),
        );
        let seen = Seen::by(&mut command, &installation, &[]);
        assert_eq!(seen.status, 0, "{}", seen.text);
        assert!(
            seen.pairs().iter().all(|pair| pair.ends_with("refused")),
            "{}",
            seen.text
        );
        assert!(seen.fate().contains("host memory"), "{}", seen.text);
        assert!(
            seen.text
                .contains(&format!("{call}: CUDA_ERROR_NOT_SUPPORTED")),
            "{}",
            seen.text
        );
    }
}

#[test]
fn without_a_driver_the_reason_is_named() {
    if machine_has_driver() {
        return skip("no driver", "this machine has one");
    }
    let installation = Installation::new();
    let seen = Seen::by(
        &mut installation.doctor(),
        &installation,
        &["sh", "-c", "exit 9"],
    );
    seen.assert_only_reason(&["no CUDA driver", "libcuda.so.1"]);
    assert_eq!(seen.json["verdict"]["switch_on"], Value::Null);
}

/// A driver in front of the simulated one, which misbehaves on GPU 1 only.
const MISBEHAVING: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef struct { char bytes[64]; } handle;
static int is(const char *wish) {
    int device = -1;
    int (*current)(int *) = (int (*)(int *))dlsym(RTLD_NEXT, "cuCtxGetDevice");
    const char *set = getenv("MISBEHAVE");
    return set && !strcmp(set, wish) && current && current(&device) == 0 && device == 1;
}
int cuIpcOpenMemHandle_v2(unsigned long long *address, handle h, unsigned flags) {
    int (*real)(unsigned long long *, handle, unsigned) =
        (int (*)(unsigned long long *, handle, unsigned))dlsym(RTLD_NEXT, "cuIpcOpenMemHandle_v2");
    if (is("crash")) abort();
    while (is("hang")) pause();
    return real(address, h, flags);
}
int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void *stream) {
    int (*real)(unsigned long long, unsigned long long, size_t, void *) =
        (int (*)(unsigned long long, unsigned long long, size_t, void *))dlsym(RTLD_NEXT, "cuMemcpyDtoDAsync_v2");
    return is("lie") ? 0 : real(to, from, bytes, stream);
}
int cuInit(unsigned flags) {
    int (*real)(unsigned) = (int (*)(unsigned))dlsym(RTLD_NEXT, "cuInit");
    const char *set = getenv("MISBEHAVE");
    if (set && !strcmp(set, "crash at once")) abort();
    return real(flags);
}
"#;

#[test]
fn a_driver_that_crashes_hangs_or_lies_is_a_row() {
    let installation = Installation::new();
    // The simulated driver under another name of the same length, so that ours can stand before it.
    let mut bytes = fs::read(installation.path("sim/libcuda.so.1")).expect("read");
    let (from, to) = (b"libcuda.so.1\0", b"libunder.so1\0");
    let places: Vec<usize> = (0..bytes.len() - from.len())
        .filter(|at| bytes[*at..].starts_with(from))
        .collect();
    assert!(!places.is_empty());
    for at in places {
        bytes[at..at + to.len()].copy_from_slice(to);
    }
    fs::write(installation.path("sim/libunder.so1"), bytes).expect("written");
    fs::remove_file(installation.path("sim/libcuda.so.1")).expect("removed");
    let flags = [
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        "-Wl,--no-as-needed",
        "sim/libunder.so1",
        "-ldl",
    ];
    installation.gcc("sim/libcuda.so.1", MISBEHAVING, &flags);
    for (wish, outcome, words) in [
        ("nothing", "works", "IPC works"),
        ("crash", "crash_or_hang", "SIGABRT"),
        ("hang", "crash_or_hang", "no answer in 5 s"),
        ("lie", "wrong_data", "bytes differ"),
    ] {
        let mut command = installation.with_gpus();
        command.env("MISBEHAVE", wish).args(["--timeout", "5"]);
        let seen = Seen::by(&mut command, &installation, &[]);
        let expected = [
            "0>0 works".to_owned(),
            format!("0>1 {outcome}"),
            "1>0 works".to_owned(),
            format!("1>1 {outcome}"),
        ];
        assert_eq!(seen.pairs(), expected, "{}", seen.text);
        let row = seen
            .text
            .lines()
            .find(|line| line.contains("GPU 0 -> 1"))
            .expect("a row");
        assert!(row.contains(words), "{row}");
        assert_eq!(seen.status, 0, "{}", seen.text);
        assert_eq!(
            seen.text.contains("GPU 0 -> 1, 1 -> 1: leave"),
            wish != "nothing",
            "{}",
            seen.text
        );
    }
    // Where all hang, it ends before all were tried: each GPU's turn takes a second, four are given in all.
    let mut command = installation.with_gpus();
    command
        .env("MISBEHAVE", "hang")
        .env("SIMCUDA_GPUS", "8")
        .args(["--timeout", "1"]);
    let seen = Seen::by(&mut command, &installation, &[]);
    let pairs = seen.pairs();
    assert_eq!(pairs.len(), 64);
    assert!(pairs.contains(&"0>1 crash_or_hang".into()), "{}", seen.text);
    assert!(pairs.contains(&"7>7 not_tried".into()), "{}", seen.text);
    assert!(
        seen.text.contains("those before took too long"),
        "{}",
        seen.text
    );
    let mut command = installation.with_gpus();
    let seen = Seen::by(
        command.env("MISBEHAVE", "crash at once"),
        &installation,
        &[],
    );
    seen.assert_only_reason(&["cannot be used", "SIGABRT"]);
    assert_eq!(seen.json["driver"]["cuda"], "12.8", "{}", seen.text);
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
        .assert_only_reason(&["cannot be loaded", "no libanabranch.so"]);
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

/// Looks at a program on a node on which all else is well.
fn look(installation: &Installation, program: &[&str]) -> Seen {
    Seen::by(
        installation.with_gpus().arg("--no-gpu-test"),
        installation,
        program,
    )
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("the mode is set");
}

#[test]
fn what_is_no_program_is_named() {
    let installation = Installation::new();
    look(&installation, &["./missing", "--arg"]).assert_only_reason(&["./missing", "no such file"]);
    look(&installation, &["no-such-program"])
        .assert_only_reason(&["no-such-program", "not found in PATH"]);
    look(&installation, &["./bin"]).assert_only_reason(&["./bin", "folder"]);
    let file = installation.path("data");
    fs::write(&file, "x").expect("written");
    set_mode(&file, 0o644);
    look(&installation, &["./data"]).assert_only_reason(&["./data", "not executable"]);
    let program = fs::read("/bin/true").expect("read");
    let damaged = installation.path("damaged");
    fs::write(&damaged, &program[..program.len() / 3]).expect("written");
    set_mode(&damaged, 0o755);
    look(&installation, &["./damaged"]).assert_only_reason(&["damaged ELF"]);
    // Bytes 18 and 19 of an ELF file are its machine; 243 is RISC-V.
    let mut foreign = program;
    foreign[18] = 243;
    foreign[19] = 0;
    let path = installation.path("foreign");
    fs::write(&path, foreign).expect("written");
    set_mode(&path, 0o755);
    look(&installation, &["./foreign"])
        .assert_only_reason(&["64-bit riscv", "one kind of machine"]);
}

#[test]
fn a_static_program_cannot_be_preloaded() {
    let installation = Installation::new();
    let source = "int main(void) { return 0; }";
    let flags = [["-static"], ["-static-pie"]];
    for (name, flags) in ["static", "static-pie"].iter().zip(flags) {
        match installation.compile(Path::new("gcc"), name, source, &flags) {
            Ok(_) => {
                let seen = look(&installation, &[&format!("./{name}")]);
                seen.assert_only_reason(&["static", "preloaded", "link it dynamically"]);
            }
            Err(said) => skip_missing(name, &said),
        }
    }
    installation.gcc("dynamic", source, &[]);
    let seen = look(&installation, &["./dynamic"]);
    assert_eq!(
        (seen.status, &seen.json["program"]["is_dynamic"]),
        (0, &Value::Bool(true)),
        "{}",
        seen.text
    );
    assert!(seen.text.contains("links no MPI"), "{}", seen.text);
}

#[test]
fn behind_a_script_stands_its_interpreter() {
    let installation = Installation::new();
    let script = |name: &str, text: &str| {
        let path = installation.path(name);
        fs::write(&path, text).expect("written");
        set_mode(&path, 0o755);
    };
    script("shell", "#!/bin/sh\nexec ./app\n");
    let seen = look(&installation, &["./shell"]);
    assert_eq!(
        (seen.status, &seen.json["program"]["interpreter"]),
        (0, &Value::from("/bin/sh")),
        "{}",
        seen.text
    );
    assert!(
        seen.text.contains("what the script starts or loads"),
        "{}",
        seen.text
    );
    script("lost", "#!/no/such/interpreter\n");
    look(&installation, &["./lost"])
        .assert_only_reason(&["interpreter /no/such/interpreter is missing"]);
    script("found", "#!/usr/bin/env no-such-interpreter\n");
    look(&installation, &["./found"])
        .assert_only_reason(&["no-such-interpreter is not found in PATH"]);
    let own = installation.path("round");
    script("round", &format!("#!{}\n", own.display()));
    look(&installation, &["./round"]).assert_only_reason(&["too many interpreters"]);
}

#[test]
fn privileges_keep_the_library_out() {
    // SAFETY: takes nothing and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        return skip("a setuid program", "only root can make one of another user");
    }
    let installation = Installation::new();
    let folder = tempfile::tempdir().expect("a folder");
    set_mode(folder.path(), 0o755);
    let program = folder.path().join("app");
    // Written by another process: see above.
    let copied = Command::new("cp").arg("/bin/true").arg(&program).status();
    assert!(copied.is_ok_and(|status| status.success()));
    let name = program.to_str().expect("UTF-8");
    for (owner, mode) in [(0, 0o755), (0, 0o4755), (65534, 0o4755)] {
        std::os::unix::fs::chown(&program, Some(owner), Some(0)).expect("root may");
        set_mode(&program, mode);
        // The loader complains of what it cannot preload, unless it ignores the variable.
        let asked = Command::new(&program)
            .env("LD_PRELOAD", "/no/such/library.so")
            .output()
            .expect("started");
        let heeded = String::from_utf8_lossy(&asked.stderr).contains("cannot be preloaded");
        let seen = look(&installation, &[name]);
        if heeded {
            assert_eq!(seen.status, 0, "{owner} {mode:o}\n{}", seen.text);
        } else {
            seen.assert_only_reason(&["setuid to user 65534", "ignores LD_PRELOAD", "run a copy"]);
        }
        assert_eq!(
            seen.text.contains("is setuid"),
            mode == 0o4755,
            "{}",
            seen.text
        );
    }
}

#[test]
fn each_mpi_is_known_by_the_library_that_is_linked() {
    use xtask::mpi::Family;
    let installation = Installation::new();
    let found = xtask::mpi::find(&Layout::new(false).wheels());
    if found.is_empty() {
        return skip_missing("linked MPI", "no MPI found; see ci/setup");
    }
    let source = "#include <mpi.h>\nint main(int c, char **v) { MPI_Init(&c, &v); MPI_Send(v, 0, MPI_BYTE, MPI_PROC_NULL, 0, MPI_COMM_WORLD); return MPI_Finalize(); }";
    for mpi in found {
        let program = installation
            .compile(&mpi.mpicc, &mpi.name, source, &[])
            .expect("compiled");
        let mut path = installation.path("sim").into_os_string();
        if let Some(folder) = &mpi.library_folder {
            path.push(":");
            path.push(folder);
        }
        let mut command = installation.with_gpus();
        command.env("LD_LIBRARY_PATH", &path).arg("--no-gpu-test");
        let name = format!("./{}", mpi.name);
        let seen = Seen::by(&mut command, &installation, &[&name, "-np", "--json"]);
        assert_eq!(seen.status, 0, "{}", seen.text);
        let (abi, launcher) = match mpi.family {
            Family::OpenMpi4 | Family::OpenMpi5 => ("Open MPI", "mpirun"),
            Family::Mpich => ("MPICH", "mpiexec"),
            Family::StandardAbi => ("MPI 5 standard", "mpiexec"),
        };
        let linked = &seen.json["program"]["mpi"];
        assert_eq!(linked["abi"], abi, "{}", mpi.name);
        let switch_on = seen.json["verdict"]["switch_on"].as_str().expect("a line");
        assert!(
            switch_on.starts_with(launcher) && switch_on.ends_with(&name),
            "{switch_on}"
        );
        // The loader's own list.
        let listed = Command::new("ldd")
            .arg(&program)
            .env("LD_LIBRARY_PATH", &path)
            .output()
            .expect("ldd");
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        let soname = linked["soname"].as_str().expect("a name");
        let line = format!("{soname} => {} (", linked["path"].as_str().expect("a path"));
        assert!(listed.contains(&line), "{line}\n{listed}");
    }
}

#[test]
fn an_mpi_that_cannot_be_taken_is_named() {
    let installation = Installation::new();
    let calls = "int MPI_Send(void); int main(void) { return MPI_Send(); }";
    let defines = "int PMPI_Send(void) { return 0; } int MPI_Send(void) { return 0; }";
    installation.gcc("inside", &format!("{defines} {calls}"), &[]);
    look(&installation, &["./inside"]).assert_only_reason(&["statically", "MPI"]);
    let library = ["-shared", "-fPIC", "-Wl,-soname,libmpi.so.20"];
    installation.gcc("libmpi.so.20", defines, &library);
    let link = ["-Wl,-rpath,$ORIGIN", "libmpi.so.20"];
    installation.gcc("old", calls, &link);
    let seen = look(&installation, &["./old"]);
    seen.assert_only_reason(&["libmpi.so.20 is no known MPI"]);
    let place = installation.path("libmpi.so.20");
    assert_eq!(
        seen.json["program"]["mpi"]["path"].as_str(),
        place.to_str(),
        "{}",
        seen.text
    );
    fs::remove_file(place).expect("removed");
    look(&installation, &["./old"])
        .assert_only_reason(&["libmpi.so.20 not found", "LD_LIBRARY_PATH"]);
}

#[test]
fn libraries_of_libraries_are_found_as_the_loader_finds_them() {
    let installation = Installation::new();
    fs::create_dir(installation.path("deep")).expect("created");
    let shared = ["-shared", "-fPIC"];
    installation.gcc(
        "deep/libmpi_own.so.40",
        "int PMPI_Send(void) { return 0; }",
        &[&shared[..], &["-Wl,-soname,libmpi_own.so.40"]].concat(),
    );
    let outer = [
        &shared[..],
        &["-Wl,-soname,libouter.so", "deep/libmpi_own.so.40"],
    ]
    .concat();
    installation.gcc(
        "deep/libouter.so",
        "int PMPI_Send(void); int outer(void) { return PMPI_Send(); }",
        &outer,
    );
    // RPATH holds for what the libraries need, RUNPATH for what the program itself needs only.
    for (name, tags) in [
        ("old-tags", "-Wl,--disable-new-dtags"),
        ("new-tags", "-Wl,--enable-new-dtags"),
    ] {
        let flags = [
            tags,
            "-Wl,-rpath,${ORIGIN}/deep",
            "-Wl,-rpath-link,deep",
            "deep/libouter.so",
        ];
        let program = installation.gcc(
            name,
            "int outer(void); int main(void) { return outer(); }",
            &flags,
        );
        let listed = Command::new("ldd").arg(&program).output().expect("ldd");
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        let expected = installation.path("deep/libmpi_own.so.40");
        let is_found = listed.contains(&format!("libmpi_own.so.40 => {}", expected.display()));
        let seen = look(&installation, &[&format!("./{name}")]);
        assert_eq!(is_found, name == "old-tags", "{listed}");
        assert_eq!(seen.status, i32::from(!is_found), "{listed}\n{}", seen.text);
        if is_found {
            assert_eq!(
                seen.json["program"]["mpi"]["path"].as_str(),
                expected.to_str(),
                "{}",
                seen.text
            );
        } else {
            seen.assert_only_reason(&["libmpi_own.so.40 not found"]);
        }
    }
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
    assert_eq!(status(&["--json"]), Some(2));
    assert_eq!(
        status(&["--no-gpu-test", "--json", "/no/such/folder/file"]),
        Some(2)
    );
    let output = installation
        .with_gpus()
        .args(["--no-gpu-test", "--json", "-"])
        .output()
        .expect("started");
    assert_eq!(output.status.code(), Some(0));
    assert!(serde_json::from_slice::<Value>(&output.stdout)
        .is_ok_and(|json| json["verdict"]["taken"] == true));
}
