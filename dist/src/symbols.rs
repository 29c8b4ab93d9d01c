//! Where a program or a library loads. The highest version of a symbol does not tell all: a linker that does not find a symbol in the
//! C library it was given may leave it without a version, and the loader then looks for it in vain.

use anyhow::{bail, ensure, Context, Result};
use object::elf;
use object::read::elf::{Dyn, FileHeader, ProgramHeader, Sym};
use object::Endianness;
use std::fs;
use std::path::Path;

/// The C library that packages are made for: that of RHEL 8; SLES 15 SP3 and Ubuntu 20.04 have a newer one.
pub const GLIBC: (u32, u32) = (2, 28);

/// Libraries that may be needed: all of glibc.
const NEEDED: [&str; 7] = [
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
];

/// Fails with all that is wrong with a file that was built below `root`.
pub fn check(file: &Path, root: &Path) -> Result<()> {
    let mut faults = faults(file, GLIBC)?;
    let bytes = fs::read(file)?;
    let home = std::env::var("CARGO_HOME").or_else(|_| std::env::var("HOME"));
    let folders = [
        root.to_string_lossy().into_owned(),
        home.unwrap_or_default(),
    ];
    for folder in folders.iter().filter(|folder| folder.len() > 1) {
        let mut pieces = bytes.windows(folder.len());
        if pieces.any(|piece| piece == folder.as_bytes()) {
            faults.push(format!("{}: holds the path {folder}", file.display()));
        }
    }
    ensure!(faults.is_empty(), "{}", faults.join("\n"));
    Ok(())
}

/// What keeps a file from being loaded on a machine with this C library and nothing else, a line each.
pub fn faults(file: &Path, glibc: (u32, u32)) -> Result<Vec<String>> {
    let data = fs::read(file).with_context(|| file.display().to_string())?;
    let found = read(&data).with_context(|| format!("{}: no ELF file", file.display()))?;
    let own = found.faults(glibc);
    let named = own
        .into_iter()
        .map(|fault| format!("{}: {fault}", file.display()));
    Ok(named.collect())
}

/// What a file asks of the machine.
#[derive(Debug, Default)]
struct Asked {
    machine: u16,
    interpreter: Option<String>,
    needed: Vec<String>,
    search_path: Option<String>,
    /// Undefined symbols that must be found, with the versions that they need.
    symbols: Vec<(String, Option<String>)>,
}

impl Asked {
    fn faults(&self, glibc: (u32, u32)) -> Vec<String> {
        let mut faults = Vec::new();
        let loader = match elf::Machine(self.machine) {
            elf::EM_X86_64 => "/lib64/ld-linux-x86-64.so.2",
            elf::EM_AARCH64 => "/lib/ld-linux-aarch64.so.1",
            other => {
                faults.push(format!("is for machine {}", other.0));
                ""
            }
        };
        if let Some(interpreter) = self.interpreter.as_ref().filter(|path| *path != loader) {
            faults.push(format!("asks for the interpreter {interpreter}"));
        }
        let strange = |name: &&String| !NEEDED.contains(&name.as_str());
        let needed = self.needed.iter().filter(strange);
        faults.extend(needed.map(|name| format!("needs {name}, which not every machine has")));
        if let Some(path) = &self.search_path {
            faults.push(format!(
                "searches {path}, a path of the machine that built it"
            ));
        }
        for (symbol, version) in &self.symbols {
            let Some(version) = version else {
                faults.push(format!(
                    "{symbol} has no version: the C library that was linked lacks it"
                ));
                continue;
            };
            let number = version.strip_prefix("GLIBC_").and_then(number);
            if number.is_none_or(|number| number > glibc) {
                faults.push(format!(
                    "{symbol} needs {version}, newer than {}.{}",
                    glibc.0, glibc.1
                ));
            }
        }
        faults
    }
}

/// `2.2.5` as (2, 2).
fn number(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split('.').map(str::parse);
    Some((parts.next()?.ok()?, parts.next()?.ok()?))
}

type Header = elf::FileHeader64<Endianness>;

fn read(data: &[u8]) -> Result<Asked> {
    let header = Header::parse(data)?;
    let endian = header.endian()?;
    let mut asked = Asked {
        machine: header.e_machine(endian).0,
        ..Asked::default()
    };
    let sections = header.sections(endian, data)?;
    for segment in header.program_headers(endian, data)? {
        if let Some(name) = segment.interpreter(endian, data)? {
            asked.interpreter = Some(text(name));
        }
    }
    let Some((entries, strings)) = sections.dynamic(endian, data)? else {
        bail!("it has nothing for the loader");
    };
    let strings = sections.strings(endian, data, strings)?;
    for entry in entries {
        match entry.d_tag(endian) {
            elf::DT_NEEDED => asked.needed.push(text(entry.string(endian, strings)?)),
            elf::DT_RPATH | elf::DT_RUNPATH => {
                asked.search_path = Some(text(entry.string(endian, strings)?));
            }
            _ => {}
        }
    }
    let symbols = sections.symbols(endian, data, elf::SHT_DYNSYM)?;
    let versions = sections.versions(endian, data)?;
    for (index, symbol) in symbols.enumerate() {
        let name = text(symbol.name(endian, symbols.strings())?);
        // A weak one may be missing.
        if name.is_empty() || !symbol.is_undefined(endian) || symbol.is_weak() {
            continue;
        }
        let version = match &versions {
            Some(table) => table.version(table.version_index(endian, index).into())?,
            None => None,
        };
        let version = version.map(|version| text(version.name()));
        asked.symbols.push((name, version));
    }
    Ok(asked)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// The faults of a library that is made of C.
    fn of(source: &str, options: &[&str], glibc: (u32, u32)) -> Vec<String> {
        let folder = tempfile::tempdir().expect("a folder");
        let (code, library) = (folder.path().join("a.c"), folder.path().join("a.so"));
        fs::write(&code, source).expect("written");
        let mut compiler = Command::new("cc");
        compiler
            .args(["-shared", "-fPIC", "-o"])
            .arg(&library)
            .arg(&code);
        assert!(compiler
            .args(options)
            .status()
            .expect("a compiler")
            .success());
        faults(&library, glibc).expect("an ELF file")
    }

    fn one(faults: &[String], words: &str) {
        assert!(
            faults.len() == 1 && faults[0].contains(words),
            "{words:?} in {faults:?}"
        );
    }

    #[test]
    fn a_symbol_without_a_version_is_a_fault_and_a_weak_one_is_none() {
        let call =
            "int memfd_create(const char *, int); int f(void) { return memfd_create(\"\", 0); }";
        // Without the C library the linker gives it none.
        one(
            &of(call, &["-nostdlib"], GLIBC),
            "memfd_create has no version",
        );
        one(
            &of(call, &[], (2, 17)),
            "memfd_create needs GLIBC_2.27, newer than 2.17",
        );
        assert_eq!(of(call, &[], (2, 27)), [""; 0]);
        let weak = format!("#pragma weak memfd_create\n{call}");
        assert_eq!(of(&weak, &["-nostdlib"], GLIBC), [""; 0]);
    }

    #[test]
    fn other_libraries_and_paths_of_the_builder_are_faults() {
        let call = "int puts(const char *); int f(void) { return puts(\"\"); }";
        one(
            &of(call, &["-Wl,-rpath,/home/a"], GLIBC),
            "searches /home/a",
        );
        let other = ["-Wl,--no-as-needed", "-lgcc_s"];
        one(&of(call, &other, GLIBC), "needs libgcc_s.so.1");
    }

    #[test]
    fn a_program_asks_for_the_usual_interpreter() {
        let source = "int puts(const char *); int main(void) { return puts(\"\"); }";
        let folder = tempfile::tempdir().expect("a folder");
        let (code, program) = (folder.path().join("a.c"), folder.path().join("a"));
        fs::write(&code, source).expect("written");
        for (option, words) in [
            ("-O1", None),
            ("-Wl,-I/lib/other.so", Some("/lib/other.so")),
        ] {
            let mut compiler = Command::new("cc");
            compiler.arg("-o").arg(&program).arg(&code).arg(option);
            assert!(compiler.status().expect("a compiler").success());
            let found = faults(&program, (99, 0)).expect("an ELF file");
            match words {
                Some(words) => one(&found, words),
                None => assert_eq!(found, [""; 0]),
            }
        }
    }

    #[test]
    fn what_is_no_elf_file_is_named() {
        let error = faults(Path::new("/etc/passwd"), GLIBC).expect_err("a text");
        assert!(
            format!("{error:#}").starts_with("/etc/passwd: no ELF file"),
            "{error:#}"
        );
    }
}
