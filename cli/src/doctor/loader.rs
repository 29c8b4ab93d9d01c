//! Which libraries the dynamic loader would load for a program, found out by its rules (ld.so(8))
//! without starting anything: not the program, and not the loader either, since that runs the
//! libraries' own resolvers of functions.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::elf::Elf;

/// More libraries than any program has: what refers to itself ends here.
const OBJECTS_MAX: usize = 4096;
/// Larger than any cache of the loader that was ever seen.
const CACHE_BYTES_MAX: u64 = 64 << 20;
/// The C library and the loader's own default places, in its order; distributions differ.
const DEFAULT_PLACES: [&str; 6] = [
    "/lib/{arch}-linux-gnu",
    "/usr/lib/{arch}-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
];

/// A program, or a library that it would load.
pub struct Object {
    /// The name by which it was asked for.
    pub name: String,
    /// Where it is; none if the loader would not find it.
    pub path: Option<PathBuf>,
    /// What it says of itself.
    pub elf: Elf,
    /// Index of the object that asked for it first.
    asked_by: usize,
}

/// What besides the files decides where libraries are found.
pub struct Surroundings {
    /// Folders of `LD_LIBRARY_PATH`.
    library_path: Vec<PathBuf>,
    /// Name and path of each entry of the loader's cache.
    cache: Vec<(Vec<u8>, PathBuf)>,
}

impl Surroundings {
    /// Those of this process. `secure`: as for a program with privileges, for which LD_LIBRARY_PATH is ignored.
    pub fn of_process(secure: bool) -> Surroundings {
        let variable =
            std::env::var_os("LD_LIBRARY_PATH").filter(|text| !secure && !text.is_empty());
        let folders = variable.iter().flat_map(|text| {
            text.as_bytes()
                .split(|byte| matches!(byte, b':' | b';'))
                .map(|folder| {
                    let folder = if folder.is_empty() { b"." } else { folder };
                    PathBuf::from(OsStr::from_bytes(folder))
                })
        });
        let path = Path::new("/etc/ld.so.cache");
        let small = std::fs::metadata(path).is_ok_and(|meta| meta.len() <= CACHE_BYTES_MAX);
        let cache = if small {
            std::fs::read(path).unwrap_or_default()
        } else {
            Vec::new()
        };
        Surroundings {
            library_path: folders.collect(),
            cache: entries_of_cache(&cache).unwrap_or_default(),
        }
    }
}

/// The program at `path` and all that it would load, the program first, breadth first as the loader does.
pub fn walk(path: &Path, program: Elf, surroundings: &Surroundings) -> Vec<Object> {
    let mut objects = vec![Object {
        name: path.display().to_string(),
        path: Some(path.to_path_buf()),
        elf: program,
        asked_by: 0,
    }];
    let mut waiting = VecDeque::from([0]);
    while let Some(asker) = waiting.pop_front() {
        for name in objects[asker].elf.needed.clone() {
            let is_here = |object: &Object| {
                object.name == name || object.elf.soname.as_deref() == Some(&name)
            };
            if objects[1..].iter().any(is_here) || objects.len() >= OBJECTS_MAX {
                continue;
            }
            let found = find(&name, asker, &objects, surroundings);
            let (path, elf) = found.map_or((None, Elf::default()), |(path, elf)| (Some(path), elf));
            // A link of another name to a library that is loaded already is that library.
            if path.is_some() && objects.iter().any(|object| same(object, path.as_deref())) {
                continue;
            }
            waiting.push_back(objects.len());
            objects.push(Object {
                name,
                path,
                elf,
                asked_by: asker,
            });
        }
    }
    objects
}

fn same(object: &Object, path: Option<&Path>) -> bool {
    let real = |path: &Path| path.canonicalize().ok();
    match (object.path.as_deref().and_then(real), path.and_then(real)) {
        (Some(a), Some(b)) => a == b,
        _ => false,
    }
}

fn find(
    name: &str,
    asker: usize,
    objects: &[Object],
    surroundings: &Surroundings,
) -> Option<(PathBuf, Elf)> {
    let bits = objects[0].elf.bits;
    let machine = objects[0].elf.machine;
    // What is of another kind of machine is passed over, as the loader does.
    let suits = |path: PathBuf| {
        let elf = Elf::read(&path).ok()?;
        (elf.bits == bits && elf.machine == machine).then_some((path, elf))
    };
    let from = &objects[asker];
    if name.contains('/') {
        return expanded(name, from).into_iter().find_map(suits);
    }
    let in_list = |list: &Option<String>, of: &Object| {
        let folders = list.iter().flat_map(|list| list.split(':'));
        folders
            .flat_map(|folder| expanded(if folder.is_empty() { "." } else { folder }, of))
            .find_map(|folder| suits(folder.join(name)))
    };
    if from.elf.runpath.is_none() {
        // The RPATH of whoever asked, of whoever asked for that one, and so on up to the program.
        let mut at = asker;
        for _ in 0..OBJECTS_MAX {
            let object = &objects[at];
            if object.elf.runpath.is_none() {
                if let Some(found) = in_list(&object.elf.rpath, object) {
                    return Some(found);
                }
            }
            if at == 0 {
                break;
            }
            at = object.asked_by;
        }
    }
    let in_environment = surroundings.library_path.iter();
    if let Some(found) = in_environment
        .map(|folder| folder.join(name))
        .find_map(suits)
    {
        return Some(found);
    }
    if let Some(found) = in_list(&from.elf.runpath, from) {
        return Some(found);
    }
    if from.elf.no_default_places {
        return None;
    }
    let cached = surroundings.cache.iter();
    if let Some(found) = cached
        .filter(|(cached, _)| cached == name.as_bytes())
        .find_map(|(_, path)| suits(path.clone()))
    {
        return Some(found);
    }
    DEFAULT_PLACES.iter().find_map(|place| {
        let folder = place.replace("{arch}", std::env::consts::ARCH);
        suits(Path::new(&folder).join(name))
    })
}

/// The paths that a text with `$ORIGIN`, `$LIB` or `$PLATFORM` may stand for.
fn expanded(text: &str, object: &Object) -> Vec<PathBuf> {
    let origin = object
        .path
        .as_deref()
        .and_then(|path| path.canonicalize().ok())
        .and_then(|path| path.parent().map(|folder| folder.display().to_string()))
        .unwrap_or_default();
    let put = |text: &str, name: &str, value: &str| {
        text.replace(&format!("${{{name}}}"), value)
            .replace(&format!("${name}"), value)
    };
    let text = put(text, "ORIGIN", &origin);
    let text = put(&text, "PLATFORM", std::env::consts::ARCH);
    let multiarch = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
    // Which one the loader was built with is not written anywhere; only one of them exists, as a rule.
    let mut all: Vec<PathBuf> = ["lib64", "lib", &multiarch]
        .iter()
        .map(|lib| PathBuf::from(put(&text, "LIB", lib)))
        .collect();
    all.dedup();
    all
}

/// The entries of the loader's cache, in the format that glibc has written since 2.2 (`dl-cache.h`); before 2.32 an older
/// table came first. Entries of `glibc-hwcaps` folders are in it under the same names: any of them has the same soname.
fn entries_of_cache(bytes: &[u8]) -> Option<Vec<(Vec<u8>, PathBuf)>> {
    const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
    const HEADER: usize = 48;
    const ENTRY: usize = 24;
    let start = bytes
        .windows(MAGIC.len())
        .position(|window| window == MAGIC)?;
    let table = bytes.get(start..)?;
    let number = |at: usize| {
        let word = table.get(at..at.checked_add(4)?)?;
        usize::try_from(u32::from_ne_bytes(word.try_into().ok()?)).ok()
    };
    let string = |at: usize| {
        let rest = table.get(at..)?;
        Some(&rest[..rest.iter().position(|byte| *byte == 0)?])
    };
    let count = number(MAGIC.len())?.min(table.len() / ENTRY);
    let entry = |index: usize| {
        let at = HEADER + index * ENTRY;
        let (name, path) = (string(number(at + 4)?)?, string(number(at + 8)?)?);
        Some((name.to_vec(), PathBuf::from(OsStr::from_bytes(path))))
    };
    (0..count).map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// What the loader itself would load, by its own account.
    fn list_of_loader(loader: &str, program: &Path) -> Vec<PathBuf> {
        let output = Command::new(loader)
            .arg("--list")
            .arg(program)
            .output()
            .expect("the loader runs");
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        let mut paths: Vec<PathBuf> = text
            .lines()
            .filter_map(|line| line.split_once(" => "))
            .filter_map(|(_, rest)| rest.split(" (0x").next())
            .map(|path| PathBuf::from(path).canonicalize().expect("exists"))
            .collect();
        paths.sort();
        paths
    }

    #[test]
    fn the_loader_agrees() {
        let own = std::env::current_exe().expect("own path");
        let mut compared = 0;
        for program in [
            own.as_path(),
            Path::new("/bin/sh"),
            Path::new("/usr/bin/git"),
            Path::new("/usr/bin/gcc"),
        ] {
            let Ok(elf) = Elf::read(program) else {
                continue;
            };
            let loader = elf.interpreter.clone().expect("a dynamic program");
            let objects = walk(program, elf, &Surroundings::of_process(false));
            let mut found: Vec<PathBuf> = objects[1..]
                .iter()
                .map(|object| {
                    object
                        .path
                        .clone()
                        .expect(&object.name)
                        .canonicalize()
                        .expect("exists")
                })
                .filter(|path| *path != Path::new(&loader).canonicalize().expect("exists"))
                .collect();
            found.sort();
            assert_eq!(
                found,
                list_of_loader(&loader, program),
                "{}",
                program.display()
            );
            compared += found.len();
        }
        assert!(compared > 1);
    }

    #[test]
    fn a_damaged_cache_is_no_cache() {
        let bytes = std::fs::read("/etc/ld.so.cache").unwrap_or_default();
        for length in (0..bytes.len().min(4000)).step_by(7) {
            // Whatever comes out, it ends.
            let _ = entries_of_cache(&bytes[..length]);
        }
        let mut wild = b"glibc-ld.so.cache1.1".to_vec();
        wild.extend([0xff; 200]);
        assert_eq!(entries_of_cache(&wild), None);
        assert_eq!(entries_of_cache(b"something else"), None);
    }
}
