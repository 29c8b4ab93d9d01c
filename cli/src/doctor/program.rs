//! The program that is to run: whether the library can be preloaded onto it, and which MPI it uses.

use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anabranch_engine::mpi::{known_soname, Family};
use serde::Serialize;

use super::loader::{walk, Object, Surroundings};
use super::python::{self, Python};
use super::{tools, wrapper};
use crate::elf::{definitions, Elf};
use crate::run::program::{in_path, is_program};

/// As many interpreters may stand behind each other as the kernel allows.
const INTERPRETERS_MAX: usize = 5;
/// What the kernel reads of a script's first line.
const SCRIPT_HEAD: u64 = 256;
/// Defined by whatever is an MPI library.
const MPI_FUNCTIONS: &[&str] = &["MPI_Send", "PMPI_Send"];
const OWN_FUNCTIONS: &[&str] = &["MPI_Send", "PMPI_Send", "cudaMalloc", "cuMemAlloc_v2"];

/// What was found out about the program.
#[derive(Serialize, Default)]
pub struct Program {
    /// As it was given.
    pub asked: String,
    /// Where it is.
    pub path: Option<PathBuf>,
    /// The interpreter of a script, which is what is examined below.
    pub interpreter: Option<PathBuf>,
    /// What a shell script starts, which is what is examined below.
    pub starts: Option<PathBuf>,
    /// What a Python would load.
    pub python: Option<Python>,
    /// The words that start it.
    #[serde(skip)]
    pub command: Vec<String>,
    /// Class and machine of the ELF file.
    pub kind: Option<String>,
    /// Whether it is linked dynamically.
    pub is_dynamic: Option<bool>,
    /// The MPI library.
    pub mpi: Option<Mpi>,
    /// Whether MPI is linked into the program itself.
    pub has_static_mpi: bool,
    /// Tools that wrap MPI functions: preloaded, or linked with the program.
    pub tools: Vec<tools::Tool>,
    /// CUDA libraries that it is linked with.
    pub cuda: Vec<String>,
    /// Libraries that the loader would not find.
    pub missing: Vec<String>,
    /// Why nothing of it can be taken; empty if all is well.
    pub problems: Vec<String>,
    /// What else is worth knowing.
    pub notes: Vec<String>,
}

/// The MPI library that a program is linked with.
#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
pub struct Mpi {
    /// Its name as the loader knows it.
    pub soname: String,
    /// Where it is.
    pub path: Option<PathBuf>,
    /// Whose binary interface it has; none if that is not a known one.
    pub abi: Option<&'static str>,
    /// What its launcher is called.
    #[serde(skip)]
    pub family: Option<Family>,
}

pub fn abi_name(family: Family) -> &'static str {
    match family {
        Family::OpenMpi => "Open MPI",
        Family::Mpich => "MPICH",
        Family::Standard => "MPI 5 standard",
    }
}

/// Looks at the program as `anabranch exec` would start it; it is not started. `words`: it, and its arguments. A
/// Python that it needs may take `limit` to say what it would load.
pub fn examine(words: &[OsString], limit: Duration) -> Program {
    let words = wrapper::behind_prefixes(words);
    let Some((name, arguments)) = words.split_first() else {
        return Program::default();
    };
    let mut program = Program {
        asked: name.to_string_lossy().into_owned(),
        ..Program::default()
    };
    program.command.push(program.asked.clone());
    if let Err(problem) = program.look_at(name, arguments, limit) {
        program.problems.push(problem);
    }
    if let Some(how) = wrapper::container(name) {
        let asked = &program.asked;
        program.notes = vec![format!(
            "what {asked} starts lies in a container, and is not seen from here: {how} anabranch doctor ./app"
        )];
    }
    program
}

impl Program {
    fn look_at(
        &mut self,
        name: &OsStr,
        arguments: &[OsString],
        limit: Duration,
    ) -> Result<(), String> {
        let path = locate(name)?;
        self.path = Some(path.clone());
        let file = self.behind_scripts(path, arguments)?;
        let file = self.behind_python(file, arguments, limit)?;
        self.look_at_elf(&file)
    }

    fn look_at_elf(&mut self, file: &Path) -> Result<(), String> {
        let shown = file.display().to_string();
        let elf = Elf::read(file).map_err(|why| format!("{shown}: {why}"))?;
        self.kind = Some(elf.kind());
        if !elf.is_native() {
            return Err(format!(
                "{shown} is {}, the library is not: build both for one kind of machine",
                elf.kind()
            ));
        }
        self.is_dynamic = Some(elf.interpreter.is_some());
        let Some(loader) = elf.interpreter.clone() else {
            let what = if elf.is_dynamic {
                "a shared library or a static program"
            } else {
                "statically linked"
            };
            return Err(format!(
                "{shown} is {what}: no library can be preloaded onto it; link it dynamically"
            ));
        };
        if !Path::new(&loader).exists() {
            return Err(format!(
                "{shown} cannot start here: its loader {loader} is missing"
            ));
        }
        if loader.contains("ld-musl") {
            return Err(format!(
                "{shown} uses the C library musl ({loader}); the library needs glibc"
            ));
        }
        let privileges = privileges(file);
        if let Privileges::Gained(what) = &privileges {
            let what = format!("{shown} {what}: the loader ignores LD_PRELOAD for it; run a copy without that (cp {shown} COPY)");
            self.problems.push(what);
        } else if let Privileges::WithoutEffect(what) = &privileges {
            self.notes.push(format!("{shown} {what}"));
        }
        let secure = matches!(privileges, Privileges::Gained(_));
        let objects = walk(file, elf, &Surroundings::of_process(secure));
        self.look_at_libraries(file, &objects);
        Ok(())
    }

    /// Asks the Python that would run what it would load.
    fn behind_python(
        &mut self,
        file: PathBuf,
        arguments: &[OsString],
        limit: Duration,
    ) -> Result<PathBuf, String> {
        if !wrapper::is_python(&file) {
            return Ok(file);
        }
        let found = python::ask(&file, limit)?;
        if self.interpreter.is_none() {
            // The script, with which the line that switches the library on ends.
            let script = arguments
                .first()
                .filter(|word| !word.as_bytes().starts_with(b"-"));
            self.command
                .extend(script.map(|word| word.to_string_lossy().into_owned()));
        }
        self.notes.extend(found.note(&file));
        let executable = found.executable.clone();
        self.python = Some(found);
        Ok(executable)
    }

    /// What a shell script starts: the first program of it that has to do with MPI.
    fn behind_shell(&mut self, script: &Path, arguments: &[OsString]) -> Option<PathBuf> {
        let said = wrapper::read(script, arguments);
        if let Some(line) = said.drops_preload {
            self.notes.push(format!(
                "line {line} of {} takes the library out of LD_PRELOAD again: add :$LD_PRELOAD to what it sets",
                script.display()
            ));
        }
        let speaks_mpi = |path: &PathBuf| {
            let links_mpi = |elf: Elf| {
                let objects = walk(path, elf, &Surroundings::of_process(false));
                objects[1..].iter().any(|object| mpi_of(object).is_some())
            };
            wrapper::is_python(path) || Elf::read(path).is_ok_and(links_mpi)
        };
        let found = said.programs.into_iter().find(speaks_mpi);
        self.starts.clone_from(&found);
        found
    }

    /// Follows `#!` lines to the program that would really run.
    fn behind_scripts(
        &mut self,
        mut file: PathBuf,
        arguments: &[OsString],
    ) -> Result<PathBuf, String> {
        for _ in 0..INTERPRETERS_MAX {
            let mut head = Vec::new();
            std::fs::File::open(&file)
                .and_then(|open| open.take(SCRIPT_HEAD).read_to_end(&mut head))
                .map_err(|error| format!("{} cannot be read ({error})", file.display()))?;
            let interpreter = match script(&head) {
                Script::None => return Ok(file),
                Script::By(interpreter) => interpreter,
                Script::BySearch(name) => in_path(&name).ok_or_else(|| {
                    format!(
                        "{}: its interpreter {} is not found in PATH",
                        file.display(),
                        name.to_string_lossy()
                    )
                })?,
            };
            if !is_program(&interpreter) {
                let (file, interpreter) = (file.display(), interpreter.display());
                return Err(format!(
                    "{file}: its interpreter {interpreter} is missing or not executable"
                ));
            }
            // What stands before a Python in PATH to choose among several answers as that one does.
            let chooses = wrapper::is_python(&file) && wrapper::is_shell(&interpreter);
            if chooses && file.file_name().and_then(in_path).as_ref() == Some(&file) {
                return Ok(file);
            }
            self.interpreter = Some(interpreter.clone());
            if wrapper::is_shell(&interpreter) {
                if let Some(started) = self.behind_shell(&file, arguments) {
                    return Ok(started);
                }
            }
            file = interpreter;
        }
        Err(format!(
            "{}: too many interpreters behind each other",
            self.asked
        ))
    }

    /// Tools between the program and the MPI library.
    fn look_at_tools(&mut self, objects: &[Object]) {
        let linked = objects[1..].iter().filter_map(|object| object.path.clone());
        self.tools = tools::preloaded();
        tools::add(&mut self.tools, linked, false);
        let bypassing = (self.tools.iter()).filter(|tool| !tool.uses_pmpi && !tool.is_preloaded);
        self.problems.extend(bypassing.map(|tool| {
            format!(
                "{0} wraps MPI functions and calls none of PMPI: its calls would bypass the library; preload it, too, in \
                 front (LD_PRELOAD={0})",
                tool.path.display()
            )
        }));
    }

    fn look_at_libraries(&mut self, file: &Path, objects: &[Object]) {
        for object in objects.iter().filter(|object| object.path.is_none()) {
            self.missing.push(object.name.clone());
        }
        if !self.missing.is_empty() {
            let list = self.missing.join(", ");
            self.problems.push(format!(
                "{} cannot start here: {list} not found; set LD_LIBRARY_PATH",
                file.display()
            ));
        }
        self.look_at_tools(objects);
        let own = definitions(file, OWN_FUNCTIONS).unwrap_or_default();
        let soname = |object: &Object| {
            object
                .elf
                .soname
                .clone()
                .unwrap_or_else(|| object.name.clone())
        };
        self.cuda = objects[1..]
            .iter()
            .map(soname)
            .filter(|name| {
                ["libcuda.so", "libcudart.so"]
                    .iter()
                    .any(|known| name.starts_with(known))
            })
            .collect();
        if own.found.iter().any(|name| name.starts_with("cu")) {
            self.cuda.push("the CUDA runtime, statically".into());
        }
        let linked = objects[1..].iter().find_map(mpi_of);
        self.mpi = linked.or_else(|| self.python.as_ref()?.mpi());
        self.has_static_mpi =
            self.mpi.is_none() && own.found.iter().any(|name| name.ends_with("MPI_Send"));
        match &self.mpi {
            Some(mpi) if mpi.abi.is_none() => self.problems.push(format!(
                "{} is no known MPI library, so every message stays with it; known are libmpi.so.40 (Open MPI 4 and 5), libmpi.so.12 and libmpich.so.12 (MPICH family), libmpi_abi.so.1 (MPI 5)",
                mpi.soname
            )),
            Some(_) => {}
            None if self.has_static_mpi => self.problems.push(format!(
                "{} has MPI linked into it statically: its calls cannot be taken; link the shared MPI library",
                file.display()
            )),
            None if self.python.is_some() => {}
            None if self.interpreter.is_some() => self.notes.push(format!(
                "{} links no MPI; what the script starts or loads (as mpi4py does) is not seen here, so give doctor the MPI program itself if there is one",
                file.display()
            )),
            None => self.notes.push(format!(
                "{} links no MPI{}; if it loads none later either, there is nothing to take",
                file.display(),
                if own.stripped { ", or has it inside and is stripped" } else { "" }
            )),
        }
    }
}

fn locate(name: &OsStr) -> Result<PathBuf, String> {
    let shown = name.to_string_lossy();
    let path = if name.as_bytes().contains(&b'/') {
        PathBuf::from(name)
    } else {
        match in_path(name) {
            Some(found) => found,
            None => {
                return Err(format!(
                    "{shown}: not found in PATH; give its path, as in ./app"
                ))
            }
        }
    };
    let meta = std::fs::metadata(&path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => format!("{shown}: no such file"),
        _ => format!("{shown}: {error}"),
    })?;
    if !meta.is_file() {
        return Err(format!(
            "{shown}: not a program but a folder or a special file"
        ));
    }
    if !is_executable(&path) {
        return Err(format!("{shown}: not executable; chmod +x it"));
    }
    Ok(path)
}

fn is_executable(path: &Path) -> bool {
    rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

/// What the first line of a file says of who runs it.
enum Script {
    /// It is no script.
    None,
    /// The interpreter.
    By(PathBuf),
    /// The name of the interpreter, which `env` looks for.
    BySearch(std::ffi::OsString),
}

fn script(head: &[u8]) -> Script {
    let Some(line) = head.strip_prefix(b"#!") else {
        let is_text =
            !head.is_empty() && !head.contains(&0) && !head.starts_with(&object::elf::ELFMAG);
        // What the kernel refuses to start, execvp gives to the shell.
        return if is_text {
            Script::By("/bin/sh".into())
        } else {
            Script::None
        };
    };
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let mut words = line
        .split(|byte| matches!(byte, b' ' | b'\t'))
        .filter(|word| !word.is_empty());
    let interpreter = PathBuf::from(OsStr::from_bytes(words.next().unwrap_or_default()));
    if interpreter.file_name() != Some(OsStr::new("env")) {
        return Script::By(interpreter);
    }
    // The options of env, and variables that it sets, come before the name.
    let name = words.find(|word| !word.starts_with(b"-") && !word.contains(&b'='));
    match name.map(OsStr::from_bytes) {
        Some(name) if name.as_bytes().contains(&b'/') => Script::By(name.into()),
        Some(name) => Script::BySearch(name.into()),
        None => Script::By(interpreter),
    }
}

enum Privileges {
    None,
    /// What the process would gain, so that the loader distrusts its environment.
    Gained(String),
    /// What is set, but changes nothing for this user.
    WithoutEffect(String),
}

/// Set-user-ID, set-group-ID and capabilities, as the kernel heeds them in execve(2).
fn privileges(file: &Path) -> Privileges {
    const SET_USER: u32 = 0o4000;
    const SET_GROUP: u32 = 0o2010; // Without the group's right to execute, the bit means something else.
    let Ok(meta) = std::fs::metadata(file) else {
        return Privileges::None;
    };
    let user = rustix::process::getuid().as_raw();
    let effective = rustix::process::geteuid().as_raw();
    let group = rustix::process::getgid().as_raw();
    let mut gained = Vec::new();
    let mut ineffective = Vec::new();
    let ignored = ignores_privileges(file);
    let mut add = |what: String, changes: bool| match (changes, ignored) {
        (true, None) => gained.push(what),
        (true, Some(why)) => ineffective.push(format!("{what}, which is without effect {why}")),
        (false, _) => ineffective.push(format!("{what}, which is who runs it anyway")),
    };
    if meta.mode() & SET_USER != 0 {
        add(
            format!("is setuid to user {}", meta.uid()),
            meta.uid() != user,
        );
    }
    if meta.mode() & SET_GROUP == SET_GROUP {
        add(
            format!("is setgid to group {}", meta.gid()),
            meta.gid() != group,
        );
    }
    if has_capabilities(file) {
        add("has file capabilities".into(), user != 0 || effective != 0);
    }
    if !gained.is_empty() {
        return Privileges::Gained(gained.join(" and "));
    }
    if ineffective.is_empty() {
        Privileges::None
    } else {
        Privileges::WithoutEffect(ineffective.join(" and "))
    }
}

fn ignores_privileges(file: &Path) -> Option<&'static str> {
    if rustix::thread::no_new_privs().unwrap_or(false) {
        return Some("here (no_new_privs)");
    }
    let about = rustix::fs::statvfs(file).ok()?;
    let is_nosuid = about.f_flag.contains(rustix::fs::StatVfsMountFlags::NOSUID);
    is_nosuid.then_some("on its file system (nosuid)")
}

fn has_capabilities(file: &Path) -> bool {
    // Without room, the length alone is told.
    rustix::fs::getxattr(file, "security.capability", &mut [0; 0]).is_ok_and(|length| length > 0)
}

/// The MPI library that a library is, if it is one. Bindings for other languages have names like it, but not its functions.
fn mpi_of(object: &Object) -> Option<Mpi> {
    let soname = object
        .elf
        .soname
        .clone()
        .unwrap_or_else(|| object.name.clone());
    let family = known_soname(&soname);
    let has_functions = |path: &PathBuf| {
        soname.contains("mpi")
            && definitions(path, MPI_FUNCTIONS).is_ok_and(|found| !found.found.is_empty())
    };
    let is_mpi = match &object.path {
        Some(path) => has_functions(path),
        None => family.is_some(),
    };
    is_mpi.then(|| Mpi {
        soname,
        path: object.path.clone(),
        abi: family.map(abi_name),
        family,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_lines_name_their_interpreter() {
        let by = |line: &str| match script(line.as_bytes()) {
            Script::None => "none".to_owned(),
            Script::By(path) => path.display().to_string(),
            Script::BySearch(name) => format!("search {}", name.to_string_lossy()),
        };
        assert_eq!(by("#!/bin/sh\necho"), "/bin/sh");
        assert_eq!(by("#! /usr/bin/python3 -u\n"), "/usr/bin/python3");
        assert_eq!(by("#!/usr/bin/env python3\n"), "search python3");
        assert_eq!(by("#!/usr/bin/env -S A=b python3 -u\n"), "search python3");
        assert_eq!(by("#!/usr/bin/env /opt/python\n"), "/opt/python");
        assert_eq!(by("#!/usr/bin/env\n"), "/usr/bin/env");
        assert_eq!(by("echo without a first line\n"), "/bin/sh");
        assert_eq!(by("\u{7f}ELF\u{2}\u{1}\u{1}\0\0"), "none");
        assert_eq!(by(""), "none");
    }

    #[test]
    fn privileges_that_change_nothing_do_not_count() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("app");
        std::fs::write(&file, "x").expect("written");
        let set = |mode| {
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).expect("set")
        };
        set(0o755);
        assert!(matches!(privileges(&file), Privileges::None));
        set(0o4755);
        assert!(
            matches!(privileges(&file), Privileges::WithoutEffect(what) if what.contains("setuid"))
        );
        set(0o2755);
        assert!(
            matches!(privileges(&file), Privileges::WithoutEffect(what) if what.contains("setgid"))
        );
    }
}
