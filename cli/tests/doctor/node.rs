//! The node: its GPUs, each pair of them, and drivers that are not there, crash, hang or lie.

use super::*;

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
    for (from, to) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        assert_eq!(seen.cell(from, to), "works", "{}", seen.text);
    }
    assert!(
        seen.text
            .starts_with("Messages would be taken.\n  switch it on"),
        "{}",
        seen.text
    );
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
        // With the version of its interface, where it has one.
        let told = ["", "_v2"].map(|version| format!("{call}{version}: CUDA_ERROR_NOT_SUPPORTED"));
        assert!(
            told.iter().any(|told| seen.text.contains(told)),
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

/// Puts a driver that misbehaves as it is told before the simulated one.
fn misbehaving() -> Installation {
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
    installation
}

#[test]
fn a_driver_that_crashes_hangs_or_lies_is_a_row() {
    let installation = misbehaving();
    for (wish, outcome, words) in [
        ("nothing", "works", ""),
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
        let cell = match outcome {
            "wrong_data" => "WRONG",
            "crash_or_hang" => "HANGS",
            other => other,
        };
        assert_eq!(
            [seen.cell(0, 1), seen.cell(1, 0)],
            [cell, "works"],
            "{}",
            seen.text
        );
        let row = seen
            .text
            .lines()
            .find(|line| line.starts_with("! GPU 0 -> 1"));
        assert_eq!(row.is_some(), wish != "nothing", "{}", seen.text);
        assert!(row.is_none_or(|row| row.contains(words)), "{row:?}");
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
