//! Generates what the exported table needs from the sources themselves: a stub for every driver
//! name that `src/api` leaves out, the per-thread-default-stream variants, unversioned aliases,
//! and the table behind `cuGetProcAddress`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

/// A C entry found in the sources: parameter names and types as written there.
struct Entry {
    module: String,
    params: Vec<(String, String)>,
}

/// Unversioned names whose first form differs from the versioned one, so no alias is made.
const NO_ALIAS: &[&str] = &[
    "cuStreamBeginCapture",
    "cuStreamGetCaptureInfo",
    "cuGraphAddKernelNode",
];

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,defs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rerun-if-changed=src/api");
    println!("cargo:rerun-if-changed=symbols.txt");
    println!("cargo:rerun-if-changed=build.rs");
    let entries = implemented(Path::new("src/api"));
    let listed = fs::read_to_string("symbols.txt").expect("symbols.txt beside build.rs");
    let listed: BTreeSet<String> = listed
        .lines()
        .filter(|l| l.starts_with("cu"))
        .map(|l| l.trim().to_string())
        .collect();
    let out = Path::new(&env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("symbols.rs");
    fs::write(out, generate(&entries, &listed)).expect("OUT_DIR is writable");
}

fn generate(entries: &BTreeMap<String, Entry>, listed: &BTreeSet<String>) -> String {
    let mut text = String::new();
    let mut table: BTreeMap<String, String> = BTreeMap::new();
    for (name, entry) in entries {
        table.insert(
            name.clone(),
            format!("crate::api::{}::{name}", entry.module),
        );
    }
    for (name, entry) in entries {
        if entry.params.iter().any(|(_, ty)| ty == "CUstream")
            || name.starts_with("cuMemcpy")
            || name.starts_with("cuMemset")
        {
            // `_ptds` is the header's suffix for calls without a stream argument, `_ptsz` for those with one.
            let suffix = if entry.params.iter().any(|(_, ty)| ty == "CUstream") {
                "_ptsz"
            } else {
                "_ptds"
            };
            let variant = format!("{name}{suffix}");
            forward(&mut text, &variant, name, entry, true);
            table.insert(variant.clone(), variant);
        }
    }
    for (name, entry) in entries {
        let Some((base, "2" | "3")) = name.rsplit_once("_v") else {
            continue;
        };
        if entries.contains_key(base) || NO_ALIAS.contains(&base) || table.contains_key(base) {
            continue;
        }
        forward(&mut text, base, name, entry, false);
        table.insert(base.to_string(), base.to_string());
    }
    for name in listed {
        if table.contains_key(name) {
            continue;
        }
        let _ = writeln!(
            text,
            "#[no_mangle]\npub extern \"C\" fn {name}() -> CUresult {{ crate::api::unsupported(\"{name}\") }}"
        );
        table.insert(name.clone(), name.clone());
    }
    let _ = writeln!(text, "pub(crate) static TABLE: &[Symbol] = &[");
    for (name, path) in &table {
        let _ = writeln!(
            text,
            "    Symbol {{ name: \"{name}\", address: {path} as *const c_void }},"
        );
    }
    let _ = writeln!(text, "];");
    text
}

fn forward(text: &mut String, name: &str, target: &str, entry: &Entry, per_thread: bool) {
    let params: Vec<String> = entry
        .params
        .iter()
        .map(|(n, t)| format!("{n}: {t}"))
        .collect();
    let args: Vec<&str> = entry.params.iter().map(|(n, _)| n.as_str()).collect();
    let guard = if per_thread {
        "let _scope = crate::api::PerThreadDefault::enter();"
    } else {
        ""
    };
    let _ = writeln!(
        text,
        "#[no_mangle]\npub unsafe extern \"C\" fn {name}({}) -> CUresult {{\n    {guard}\n    \
         // SAFETY: the same contract, passed on unchanged.\n    unsafe {{ crate::api::{}::{target}({}) }}\n}}",
        params.join(", "),
        entry.module,
        args.join(", ")
    );
}

/// Entries are written as `fn cuName(a: T, b: U) {` inside the `driver!` macro.
fn implemented(folder: &Path) -> BTreeMap<String, Entry> {
    let mut entries = BTreeMap::new();
    for file in fs::read_dir(folder).expect("src/api exists").flatten() {
        let path = file.path();
        let Some(module) = path.file_stem().and_then(|s| s.to_str()) else {
            continue;
        };
        let source = fs::read_to_string(&path).unwrap_or_default();
        for piece in source.split("\n    fn cu").skip(1) {
            let Some((name, rest)) = piece.split_once('(') else {
                continue;
            };
            let Some((params, _)) = rest.split_once(')') else {
                continue;
            };
            let params = params
                .split(',')
                .filter_map(|p| p.split_once(':'))
                .map(|(n, t)| (n.trim().to_string(), t.trim().to_string()))
                .collect();
            entries.insert(
                format!("cu{name}"),
                Entry {
                    module: module.to_string(),
                    params,
                },
            );
        }
    }
    entries
}
