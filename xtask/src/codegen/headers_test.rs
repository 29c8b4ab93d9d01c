//! The table against the C headers of every MPI library installed here: no function missing, no signature different.

use super::table::{Function, Type};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Headers by library; those that are not installed are skipped.
const HEADERS: [&[&str]; 5] = [
    &["/usr/lib/x86_64-linux-gnu/openmpi/include/mpi.h"],
    &[
        "/usr/include/x86_64-linux-gnu/mpich/mpi.h",
        "/usr/include/x86_64-linux-gnu/mpich/mpi_proto.h",
    ],
    &[concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../target/wheels/openmpi5/include/mpi.h"
    )],
    &[
        concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../target/wheels/mpich5/include/mpi.h"
        ),
        concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../target/wheels/mpich5/include/mpi_proto.h"
        ),
    ],
    &[concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../target/wheels/mpich5/include/mpi_abi.h"
    )],
];

#[test]
fn every_function_of_the_headers_is_in_the_table() {
    let table = table();
    for paths in HEADERS.iter().filter(|paths| Path::new(paths[0]).exists()) {
        let found = declarations(paths);
        assert!(
            found.len() > 400,
            "{}: only {} functions found",
            paths[0],
            found.len()
        );
        let missing: BTreeSet<_> = found
            .keys()
            .filter(|name| !table.contains_key(*name))
            .collect();
        assert!(missing.is_empty(), "{}: {missing:?}", paths[0]);
    }
}

#[test]
fn signatures_are_those_of_the_headers() {
    let table = table();
    let mut wrong = Vec::new();
    for paths in HEADERS.iter().filter(|paths| Path::new(paths[0]).exists()) {
        for (name, parameters) in declarations(paths) {
            let Some(function) = table.get(&name) else {
                continue;
            };
            let ours: Vec<&str> = function
                .parameters
                .iter()
                .map(|(_, kind)| shape_of_type(kind))
                .collect();
            let theirs: Vec<&str> = parameters
                .iter()
                .filter(|p| *p != "...")
                .map(|p| shape_of_c(p))
                .collect();
            if ours != theirs {
                wrong.push(format!(
                    "{}: {name}: {ours:?} in the table, {theirs:?} there",
                    paths[0]
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn table() -> BTreeMap<String, Function> {
    let Ok(sections) = super::read_table() else {
        panic!("the table is readable")
    };
    sections
        .into_iter()
        .flat_map(|section| section.functions)
        .map(|f| (f.name.clone(), f))
        .collect()
}

/// How a type is passed, which is all that the binary interface knows of it.
fn shape_of_type(kind: &Type) -> &'static str {
    match kind.0.as_str() {
        "int" | "fint" => "int",
        "count" | "offset" | "aint" => "word",
        text if text.starts_with(['*', '[']) => pointer_shape(
            text.trim_matches(['*', '[', ']'])
                .trim_start_matches("const ")
                .trim_start_matches("inout "),
        ),
        "buf" | "cbuf" | "strings" | "fn" | "tool" => "pointer",
        "cstr" | "str" => "pointer to char",
        _ => "handle",
    }
}

fn pointer_shape(of: &str) -> &'static str {
    match of {
        "int" | "fint" => "pointer to int",
        "count" | "offset" | "aint" => "pointer to word",
        "status" | "f08_status" => "pointer to status",
        "tool" => "pointer",
        _ => "pointer to handle",
    }
}

fn shape_of_c(parameter: &str) -> &'static str {
    let mut text = parameter.replace("const ", "").replace("[][3]", "[]");
    let mut depth = text.matches('*').count() + text.matches('[').count();
    text = text.replace(['*', '[', ']'], " ");
    let base = text.split_whitespace().next().unwrap_or_default();
    if base.ends_with("_function") || base.ends_with("_function_c") || base.ends_with("_fn") {
        depth = 9;
    }
    match (base, depth) {
        ("int" | "MPI_Fint" | "MPI_T_cb_safety", 0) => "int",
        ("MPI_Count" | "MPI_Offset" | "MPI_Aint", 0) => "word",
        ("int" | "MPI_Fint" | "MPI_T_source_order", 1) => "pointer to int",
        ("MPI_Count" | "MPI_Offset" | "MPI_Aint", 1) => "pointer to word",
        ("MPI_Status" | "MPI_F08_status", 1) => "pointer to status",
        ("char", 1) => "pointer to char",
        (tool, 0 | 1) if tool.starts_with("MPI_T_") => "pointer",
        (handle, 0) if handle.starts_with("MPI_") => "handle",
        (handle, 1) if handle.starts_with("MPI_") => "pointer to handle",
        _ => "pointer",
    }
}

/// Declared functions named `MPI_Xxx` with their parameters, as text.
fn declarations(paths: &[&str]) -> BTreeMap<String, Vec<String>> {
    let mut found = BTreeMap::new();
    for path in paths {
        let Ok(bytes) = std::fs::read(path) else {
            continue;
        };
        let text = without_comments_and_directives(&String::from_utf8_lossy(&bytes));
        for statement in text.split([';', '{', '}']) {
            let Some((head, rest)) = statement.split_once('(') else {
                continue;
            };
            let Some(name) = head.split_whitespace().last() else {
                continue;
            };
            let is_function = name.strip_prefix("MPI_").is_some_and(|rest| {
                let mut letters = rest.chars();
                letters.next().is_some_and(char::is_uppercase)
                    && letters.next().is_some_and(|c| c.is_lowercase() || c == '_')
            });
            if is_function && !head.contains("typedef") && !head.contains('=') {
                found.insert(name.to_owned(), parameters(rest));
            }
        }
    }
    found
}

fn parameters(rest: &str) -> Vec<String> {
    let mut depth = 0;
    let end = rest.char_indices().find(|&(_, c)| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        depth < 0
    });
    let list = &rest[..end.map_or(rest.len(), |(i, _)| i)];
    let list = list
        .split(',')
        .map(|p| p.split_whitespace().collect::<Vec<_>>().join(" "));
    list.filter(|p| !p.is_empty() && p != "void").collect()
}

fn without_comments_and_directives(text: &str) -> String {
    let mut rest = text;
    let mut plain = String::new();
    while let Some((before, after)) = rest.split_once("/*") {
        plain += before;
        rest = after.split_once("*/").map_or("", |(_, after)| after);
    }
    plain += rest;
    let mut kept = String::new();
    let mut in_directive = false;
    for line in plain.lines() {
        let directive = in_directive || line.trim_start().starts_with('#');
        in_directive = directive && line.ends_with('\\');
        if !directive {
            kept += line.split("//").next().unwrap_or_default();
            kept.push('\n');
        }
    }
    kept
}
