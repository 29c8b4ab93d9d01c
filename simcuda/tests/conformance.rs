//! The programs that lay the simulated driver beside the vendor's, run on the simulated one.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Builds a program of `conformance/` and runs it on this driver; what it printed.
fn run(program: &str, arguments: &[&str], env: &[(&str, &str)]) -> String {
    run_reading(program, arguments, env, Stdio::null())
}

fn run_reading(program: &str, arguments: &[&str], env: &[(&str, &str)], stdin: Stdio) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    // Cargo puts the library beside the tests.
    let library = std::env::current_exe()
        .unwrap()
        .with_file_name("libsimcuda.so");
    assert!(library.exists(), "{library:?}");
    std::os::unix::fs::symlink(&library, folder.path().join("libcuda.so.1")).unwrap();
    let binary: PathBuf = folder.path().join(program);
    let built = Command::new("gcc")
        .args(["-O1", "-o"])
        .arg(&binary)
        .arg(root.join("conformance").join(format!("{program}.c")))
        .args(["-ldl", "-pthread", "-lm"])
        .status()
        .expect("gcc");
    assert!(built.success());
    let mut command = Command::new(&binary);
    for var in [
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "SIMCUDA_GPUS",
        "SIMCUDA_REPORT",
        "SIMCUDA_FAULT",
    ] {
        command.env_remove(var);
    }
    let out = command
        .args(arguments)
        .env("LD_LIBRARY_PATH", folder.path())
        .env("SIMCUDA_TOPOLOGY", "hgx-h200")
        .env("SIMCUDA_JOB", format!("{program} {}", std::process::id()))
        .envs(env.iter().copied())
        .stdin(stdin)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(
        out.status.success(),
        "{program}: {}\n{}",
        out.status,
        String::from_utf8_lossy(&out.stderr)
    );
    text
}

/// The project's kernels.
fn ptx() -> String {
    let ptx = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/src/kernels.ptx");
    ptx.to_str().unwrap().to_owned()
}

/// Calls of the list of which no answer of the vendor's is kept: its driver crashed in those before them, which ended their
/// sections (device, graph, capture), or they are asked in another order since (before cuInit). Not to become more: what is
/// asked of the simulator anew is asked of a GPU, too (`ci/gpu-conformance run`).
const WITHOUT_A_VENDOR: usize = 219;

/// How often each call of the list was answered: section, call and case.
fn questions(text: &str) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let key: Vec<&str> = line.splitn(4, " | ").take(3).collect();
        if key.len() == 3 {
            *counts.entry(key.join(" | ")).or_insert(0) += 1;
        }
    }
    counts
}

/// Every call of the list is answered: none is missing, hangs or kills its process. The answers are those of an H200's driver,
/// call by call, but for what is accepted with a reason.
#[test]
fn every_call_is_answered() {
    let text = run("conformance", &[&ptx()], &[("PATIENCE", "6")]);
    let answers: Vec<&str> = text.lines().filter(|l| l.contains(" | ")).collect();
    assert!(answers.len() > 1500, "{} answers", answers.len());
    // The write that one of these waits is for was refused: they wait for ever, as on the vendor's driver.
    let endless = "memop | cuStreamSynchronize | holding waits | SIGNAL 14";
    for line in answers
        .into_iter()
        .filter(|line| !line.starts_with(endless))
    {
        for bad in ["SIGNAL ", "EXIT ", "ABSENT |", "no context |"] {
            assert!(!line.contains(bad), "{line}");
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let vendor = root.join("docs/results/h200-answers.txt");
    let folder = tempfile::tempdir().unwrap();
    let ours = folder.path().join("answers");
    std::fs::write(&ours, &text).unwrap();
    let compared = Command::new("bash")
        .arg(root.join("ci/gpu-conformance"))
        .arg("compare")
        .args([&ours, &vendor])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&compared.stdout);
    assert!(compared.status.success(), "{said}");
    assert!(said.contains("1316 answers of the vendor: "), "{said}");
    let vendor = questions(&std::fs::read_to_string(vendor).unwrap());
    let beside = |(key, asked): (&String, &usize)| {
        asked.saturating_sub(vendor.get(key).copied().unwrap_or(0))
    };
    let beside: usize = questions(&text).iter().map(beside).sum();
    assert!(beside <= WITHOUT_A_VENDOR, "{beside}");
}

/// Functions that have something to do, or nothing to refuse, when all they are given is zeros: what sets, waits for all,
/// frees no pointer or moves no byte. Without the suffixes of their forms.
const DONE_WITH_NOTHING: &[&str] = &[
    "cuCtxGetStreamPriorityRange",
    "cuCtxPopCurrent",
    "cuCtxResetPersistingL2Cache",
    "cuCtxSetCacheConfig",
    "cuCtxSetCurrent",
    "cuCtxSetFlags",
    "cuCtxSetLimit",
    "cuCtxSetSharedMemConfig",
    "cuCtxSynchronize",
    "cuDevicePrimaryCtxRelease",
    "cuDevicePrimaryCtxReset",
    "cuDevicePrimaryCtxSetFlags",
    "cuInit",
    "cuMemFree",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemGetInfo",
    "cuMemcpy",
    "cuMemcpyAsync",
    "cuMemcpyDtoD",
    "cuMemcpyDtoDAsync",
    "cuMemcpyDtoH",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoD",
    "cuMemcpyHtoDAsync",
    "cuMemcpyPeer",
    "cuMemcpyPeerAsync",
    "cuMemsetD16",
    "cuMemsetD16Async",
    "cuMemsetD2D16",
    "cuMemsetD2D16Async",
    "cuMemsetD2D32",
    "cuMemsetD2D32Async",
    "cuMemsetD2D8",
    "cuMemsetD2D8Async",
    "cuMemsetD32",
    "cuMemsetD32Async",
    "cuMemsetD8",
    "cuMemsetD8Async",
    "cuProfilerStart",
    "cuProfilerStop",
    "cuStreamBatchMemOp",
    "cuStreamBeginCapture",
    "cuStreamQuery",
    "cuStreamSynchronize",
];

/// First forms whose arguments differ from the later ones', so that those cannot stand for them.
const FIRST_FORMS: [&str; 3] = [
    "cuStreamBeginCapture",
    "cuStreamGetCaptureInfo",
    "cuGraphAddKernelNode",
];

/// Whether the sources have a body for a function, or for another form of it that takes the same arguments.
fn has_body(sources: &str, name: &str) -> bool {
    let written = |name: &str| sources.contains(&format!("\n    fn {name}("));
    let base = name.trim_end_matches("_ptsz").trim_end_matches("_ptds");
    let later = || {
        ["_v2", "_v3"]
            .iter()
            .any(|v| written(&format!("{base}{v}")))
    };
    written(base) || (!FIRST_FORMS.contains(&base) && later())
}

/// The library exports every listed name. Each of its functions, given nothing but zeros, answers: what the driver lacks, that
/// it is not supported, by name and by cuGetProcAddress; what it has, an error, or it does what can be done with nothing.
#[test]
fn every_function_answers_to_nothing() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = std::env::current_exe()
        .unwrap()
        .with_file_name("libsimcuda.so");
    let listed = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(&library)
        .output()
        .expect("nm");
    let exported: BTreeSet<String> = String::from_utf8_lossy(&listed.stdout)
        .lines()
        .filter_map(|line| Some(line.split(' ').nth(2)?.to_owned()))
        .filter(|name| name.starts_with("cu"))
        .collect();
    for name in include_str!("../symbols.txt").lines() {
        assert!(!name.starts_with("cu") || exported.contains(name), "{name}");
    }
    let mut sources = String::new();
    for file in std::fs::read_dir(root.join("src/api")).unwrap().flatten() {
        sources += &std::fs::read_to_string(file.path()).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let names = folder.path().join("names");
    let all: Vec<&str> = exported.iter().map(String::as_str).collect();
    std::fs::write(&names, all.join("\n")).unwrap();
    let names = std::fs::File::open(&names).unwrap();
    let text = run_reading("zeros", &[], &[], names.into());
    let (mut stubs, mut bodies) = (0, 0);
    for line in text.lines() {
        let fields: Vec<&str> = line.split(" | ").collect();
        let (name, way, answer) = (fields[0], fields[1], fields[2]);
        // A pointer in the place of its count: it reads as much.
        if (name, way) == ("cuPointerGetAttributes", "two pointers") {
            continue;
        }
        let code: i32 = answer.parse().unwrap_or_else(|_| panic!("{line}"));
        // By cuGetProcAddress a name is that of its newest form.
        let by_address = way == "by cuGetProcAddress";
        // One has a body that says what the others' generated ones say.
        let is_body = has_body(&sources, name) && name != "cuMemGetLocationInfo";
        let is_another = by_address && (is_body || FIRST_FORMS.contains(&name));
        assert!(is_body == (code != 801) || is_another, "{line}");
        stubs += i32::from(!is_body);
        bodies += i32::from(is_body);
        let mut base = name.trim_end_matches("_ptsz").trim_end_matches("_ptds");
        for suffix in ["_v2", "_v3", "_v4"] {
            base = base.trim_end_matches(suffix);
        }
        let expected = match way {
            "before cuInit" => name == "cuInit",
            "zeros" | "by cuGetProcAddress" => DONE_WITH_NOTHING.contains(&base),
            // Where a pointer is what is asked for, all may be well.
            _ => true,
        };
        assert!(code != 0 || expected, "{line}");
    }
    assert_eq!(stubs + bodies + 1, 5 * exported.len() as i32);
    assert!(stubs > 5 * 250 && bodies > 5 * 300, "{stubs} and {bodies}");
}

/// Rows marked so in `measured.tsv`; not to become more.
const KNOWN_TO_BE_OFF: usize = 2;

/// The simulated H200 node does what the measured one did, within 10 %, and nobody reacted too late meanwhile.
#[test]
fn the_h200_node_is_as_fast_as_the_measured_one() {
    let measured = include_str!("../conformance/measured.tsv");
    let env = [("SIMCUDA_DATA", "0"), ("SIMCUDA_CHECK", "0")];
    let text = run("fidelity", &[], &env) + &run("turns", &[&ptx()], &env);
    let simulated: HashMap<&str, f64> = text
        .lines()
        .filter_map(|line| {
            let mut fields = line.split('\t');
            Some((fields.next()?, fields.next()?.parse().ok()?))
        })
        .collect();
    let late = simulated["late"];
    let (alone, in_turns) = (simulated["turns.down.alone"], simulated["turns.down"]);
    assert!(
        in_turns < 1.1 * alone,
        "copies down take no turns: {in_turns} us, {alone} us alone"
    );
    assert!(late < 2.0, "late by {late} % of the time: void");
    let (mut rows, mut known) = (0, 0);
    let mut off = Vec::new();
    for line in measured
        .lines()
        .filter(|l| !l.starts_with('#') && !l.is_empty())
    {
        let mut fields = line.split('\t');
        let (row, value) = (fields.next().unwrap(), fields.next().unwrap());
        let value: f64 = value.parse().unwrap();
        let is_known = row.starts_with('~');
        let row = row.trim_start_matches('~');
        let ratio = simulated.get(row).unwrap_or_else(|| panic!("{row}")) / value;
        rows += 1;
        known += usize::from(is_known);
        if ((ratio - 1.0).abs() > 0.1) != is_known {
            off.push(format!("{row}: {ratio:.3}"));
        }
    }
    assert!(rows > 130 && known <= KNOWN_TO_BE_OFF, "{rows}, {known}");
    assert!(off.is_empty(), "{off:?}");
}

/// The figures of two GPUs in which the host's code has a part, while other work wants every core: virtual time does not see it,
/// and waits for code that has lost its core.
#[test]
fn figures_do_not_depend_on_how_busy_the_machine_is() {
    let env = [
        ("SIMCUDA_DATA", "0"),
        ("SIMCUDA_CHECK", "0"),
        ("SIMCUDA_GPUS", "2"),
    ];
    let rows = ["flag", "call", "window", "mixed.flags"];
    let figures = || -> HashMap<String, f64> {
        let text = run("fidelity", &rows, &env);
        let row = |line: &str| {
            let mut fields = line.split('\t');
            Some((fields.next()?.to_owned(), fields.next()?.parse().ok()?))
        };
        text.lines().filter_map(row).collect()
    };
    let alone = figures();
    let beside_busy_loops = || {
        let over = AtomicBool::new(false);
        let busy = || {
            while !over.load(Relaxed) {
                std::hint::spin_loop();
            }
        };
        std::thread::scope(|scope| {
            let cores = std::thread::available_parallelism().map_or(2, usize::from);
            for _ in 0..2 * cores {
                scope.spawn(busy);
            }
            let loaded = std::panic::catch_unwind(figures);
            over.store(true, Relaxed);
            loaded.expect("figures")
        })
    };
    // What else the machine does may make a run void, and the simulator says so: then it is made again.
    let mut loaded = beside_busy_loops();
    for _ in 0..4 {
        if loaded["late"] >= 2.0 {
            loaded = beside_busy_loops();
        }
    }
    assert!(loaded["late"] < 2.0, "late by {} %: void", loaded["late"]);
    let rows = alone.iter().filter(|(row, _)| *row != "late");
    let mut count = 0;
    for (row, alone) in rows {
        // One takes no time at all.
        let loaded = loaded[row];
        let off = (loaded - alone).abs();
        assert!(off <= 0.02 * alone, "{row}: {loaded}, alone {alone}");
        count += 1;
    }
    assert!(count > 60, "{count} rows");
}
