//! What a shell script, a launcher or another wrapper starts, as far as its text tells: nothing of it is run.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use crate::run::program::{in_path, is_program};

/// Longer scripts are no wrappers.
const SCRIPT_BYTES_MAX: u64 = 256 << 10;
/// More programs of a script are not looked at.
const PROGRAMS_MAX: usize = 64;

/// Shells, by the names of their files.
const SHELLS: [&str; 6] = ["sh", "bash", "dash", "ash", "ksh", "zsh"];
/// Commands that start the command behind their options, those of MPI among them.
const PREFIXES: [&str; 24] = [
    "anabranch",
    "exec",
    "run",
    "command",
    "env",
    "time",
    "nice",
    "nohup",
    "numactl",
    "taskset",
    "stdbuf",
    "setarch",
    "timeout",
    "mpirun",
    "mpiexec",
    "mpiexec.hydra",
    "orterun",
    "prterun",
    "prun",
    "srun",
    "aprun",
    "jsrun",
    "nsys",
    "gdb",
];
/// What starts a program in a container, and how it gets the GPUs.
const CONTAINERS: [(&str, &str); 6] = [
    ("apptainer", "apptainer exec --nv IMAGE"),
    ("singularity", "singularity exec --nv IMAGE"),
    ("docker", "docker run --gpus all --ipc=host IMAGE"),
    (
        "podman",
        "podman run --device nvidia.com/gpu=all --ipc=host IMAGE",
    ),
    ("enroot", "enroot start IMAGE"),
    ("ch-run", "ch-run IMAGE --"),
];

/// The name of a file without its folder.
fn base(path: impl AsRef<Path>) -> String {
    let name = path.as_ref().file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// Whether a file of this name is a shell.
pub fn is_shell(path: &Path) -> bool {
    SHELLS.contains(&base(path).as_str())
}

/// Whether a file of this name is a Python.
pub fn is_python(path: &Path) -> bool {
    let name = base(path);
    let version = name.strip_prefix("python");
    version.is_some_and(|rest| {
        rest.chars()
            .all(|letter| letter.is_ascii_digit() || letter == '.')
    })
}

/// How a command of this name starts what lies in a container.
pub fn container(word: &OsStr) -> Option<&'static str> {
    let name = base(word);
    let known = CONTAINERS.iter().find(|(known, _)| *known == name);
    known.map(|(_, how)| *how)
}

/// The words from the program on that launchers and the like, which come before it, start.
pub fn behind_prefixes(words: &[OsString]) -> &[OsString] {
    let mut rest = words;
    while let Some((first, behind)) = rest.split_first() {
        let name = base(first);
        // Words of shells and of this command are none by a path.
        let is_word = ["exec", "run", "command"].contains(&name.as_str());
        let is_own = is_word && first.as_encoded_bytes().contains(&b'/');
        if is_own || !PREFIXES.contains(&name.as_str()) {
            return rest;
        }
        // Options, and what looks like none of a program: the values of options.
        let Some(at) = behind.iter().position(|word| {
            PREFIXES.contains(&word.to_string_lossy().as_ref())
                || program(word, Path::new(".")).is_some()
        }) else {
            return words;
        };
        rest = &behind[at..];
    }
    words
}

/// The program of this name: by its path from a folder, or in PATH.
fn program(word: &OsStr, folder: &Path) -> Option<PathBuf> {
    let text = word.to_string_lossy();
    if text.starts_with('-') || text.is_empty() {
        return None;
    }
    if !text.contains('/') {
        return in_path(word);
    }
    let path = folder.join(word);
    is_program(&path).then_some(path)
}

/// What a script says.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Script {
    /// Programs that it may start, in the order of its lines.
    pub programs: Vec<PathBuf>,
    /// The line that takes the library out of `LD_PRELOAD`.
    pub drops_preload: Option<usize>,
}

/// Reads a script which is given these arguments.
pub fn read(script: &Path, arguments: &[OsString]) -> Script {
    let small = std::fs::metadata(script).is_ok_and(|meta| meta.len() <= SCRIPT_BYTES_MAX);
    let text = small.then(|| std::fs::read(script).unwrap_or_default());
    let text = String::from_utf8_lossy(&text.unwrap_or_default()).into_owned();
    let folder = script.parent().unwrap_or(Path::new("."));
    scan(&text, folder, arguments)
}

fn scan(text: &str, folder: &Path, arguments: &[OsString]) -> Script {
    let mut found = Script::default();
    let own = folder.display().to_string();
    let here = [
        "$(dirname \"$0\")",
        "$(dirname $0)",
        "${0%/*}",
        "`dirname $0`",
    ];
    let text = here
        .iter()
        .fold(text.to_owned(), |text, here| text.replace(here, &own));
    for (number, line) in text.lines().enumerate() {
        let line = line.split(" #").next().unwrap_or_default().trim();
        if line.starts_with('#') {
            continue;
        }
        let sets = |word: &str| line.split_whitespace().any(|part| part.starts_with(word));
        let unsets = line.starts_with("unset ") && line.contains("LD_PRELOAD");
        if unsets
            || sets("LD_PRELOAD=")
                && !line.contains("$LD_PRELOAD")
                && !line.contains("${LD_PRELOAD")
        {
            found.drops_preload.get_or_insert(number + 1);
        }
        for command in line.split([';', '|', '&', '(', ')']) {
            let words = words(command, arguments);
            let Some(program) = first_program(&words, folder) else {
                continue;
            };
            if found.programs.len() < PROGRAMS_MAX && !found.programs.contains(&program) {
                found.programs.push(program);
            }
        }
    }
    found
}

/// The words of a command, quotes taken away, and the script's own arguments in their places.
fn words(command: &str, arguments: &[OsString]) -> Vec<OsString> {
    let mut words = Vec::new();
    for word in command.split_whitespace() {
        match word.trim_matches(['"', '\'']) {
            "$@" | "$*" | "${@}" => words.extend(arguments.iter().cloned()),
            "$1" => words.extend(arguments.first().cloned()),
            word => words.push(word.into()),
        }
    }
    words
}

/// The program in the place of the command, behind assignments and prefixes.
fn first_program(words: &[OsString], folder: &Path) -> Option<PathBuf> {
    let is_set = |word: &&OsString| {
        let text = word.to_string_lossy();
        text.split_once('=').is_some_and(|(name, _)| {
            !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_')
        })
    };
    let set = words.iter().take_while(is_set).count();
    let words = behind_prefixes(&words[set..]);
    // A relative path is one from the folder in which the user stands, else from that of the script.
    let first = words.first()?;
    program(first, Path::new("")).or_else(|| program(first, folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str, arguments: &[&str]) -> Vec<String> {
        let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
        let found = scan(text, Path::new("/bin"), &arguments);
        found.programs.iter().map(base).collect()
    }

    #[test]
    fn programs_stand_behind_what_starts_them() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        for (line, program) in [
            ("mpirun -np 2 /bin/true x", "/bin/true x"),
            ("srun -n 4 --mpi pmix sh -c x", "sh -c x"),
            ("mpirun -np 2 anabranch exec /bin/true", "/bin/true"),
            ("/bin/true -np 2", "/bin/true -np 2"),
            ("mpirun", "mpirun"),
        ] {
            assert_eq!(behind_prefixes(&words(line)), words(program), "{line}");
        }
    }

    #[test]
    fn scripts_name_what_they_start() {
        assert_eq!(of("export A=1\nexec /bin/true \"$@\"\n", &[]), ["true"]);
        assert_eq!(
            of(
                "CUDA_VISIBLE_DEVICES=$R exec \"$@\"\n",
                &["/bin/true", "-x"]
            ),
            ["true"]
        );
        assert_eq!(
            of("numactl -N 0 \"$(dirname $0)/true\" || exit 1", &[]),
            ["true"]
        );
        assert_eq!(of("# /bin/true\nno_such_program\n", &[]), [""; 0]);
    }

    #[test]
    fn who_takes_the_library_out_is_told() {
        let drops = |text: &str| scan(text, Path::new("/bin"), &[]).drops_preload;
        assert_eq!(drops("x\nexport LD_PRELOAD=/a.so\n"), Some(2));
        assert_eq!(drops("export LD_PRELOAD=/a.so:$LD_PRELOAD\n"), None);
        assert_eq!(drops("unset LD_PRELOAD\n"), Some(1));
        assert_eq!(drops("# LD_PRELOAD=\n"), None);
    }

    #[test]
    fn interpreters_are_known_by_name() {
        assert!(is_python(Path::new("/usr/bin/python3.11")) && !is_python(Path::new("pythonic")));
        assert!(is_shell(Path::new("/bin/bash")) && !is_shell(Path::new("/bin/fish")));
        assert_eq!(
            container(OsStr::new("/usr/bin/docker")).map(|how| how.contains("--gpus")),
            Some(true)
        );
    }
}
