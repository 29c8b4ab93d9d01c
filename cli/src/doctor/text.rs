//! The report as a person reads it: the same facts as the JSON, one a row.

use std::fmt::Display;

use super::gpus::{Ipc, Pair};
use super::probe::NvLinks;
use super::program::Mpi;
use super::verdict::Verdict;
use super::{Driver, Findings, Installed, Library, Node, Program};
use crate::table;

/// Rows of a label and a text, with a mark where something is wrong.
#[derive(Default)]
struct Rows {
    rows: Vec<(bool, String, String)>,
}

impl Rows {
    fn add(&mut self, label: impl Into<String>, text: impl Display) {
        self.rows.push((false, label.into(), text.to_string()));
    }

    fn add_known(&mut self, label: &str, text: Option<impl Display>) {
        if let Some(text) = text {
            self.add(label, text);
        }
    }

    fn add_bad(&mut self, label: impl Into<String>, text: impl Display) {
        self.rows.push((true, label.into(), text.to_string()));
    }
}

/// The whole report.
pub fn render(findings: &Findings, verdict: &Verdict) -> String {
    let mut sections = vec![("the library", library(&findings.library))];
    if let Some(found) = &findings.program {
        sections.push(("the program", program(found)));
    }
    if let Some(found) = &findings.installed_mpi {
        sections.push(("the program", installed(found)));
    }
    sections.push(("the node", node(&findings.node)));
    sections.push(("the driver", driver(&findings.driver)));
    sections.push(("the verdict", conclusion(verdict)));
    let rows = sections.iter().flat_map(|(_, section)| &section.rows);
    let text = table::text(
        "",
        rows.map(|(is_bad, label, text)| {
            let mark = if *is_bad { '!' } else { ' ' };
            [format!("{mark} {label}"), text.clone()]
        }),
    );
    let mut lines = text.lines();
    let mut out = String::new();
    for (title, section) in &sections {
        out += &format!("{title}\n");
        for line in lines.by_ref().take(section.rows.len()) {
            out += line;
            out.push('\n');
        }
    }
    out
}

fn library(found: &Library) -> Rows {
    let mut rows = Rows::default();
    rows.add_known("path", found.path.as_ref().map(|path| path.display()));
    rows.add_known("version", found.version.as_ref());
    rows.add("version of anabranch", &found.command_version);
    rows.add_known("glibc needed", found.needs_glibc.as_ref());
    rows.add_known("glibc here", found.has_glibc.as_ref());
    if let Some(problem) = &found.problem {
        rows.add_bad("problem", problem);
    }
    rows
}

fn program(found: &Program) -> Rows {
    let mut rows = Rows::default();
    rows.add("given", &found.asked);
    rows.add_known("path", found.path.as_ref().map(|path| path.display()));
    rows.add_known(
        "interpreter",
        found.interpreter.as_ref().map(|path| path.display()),
    );
    rows.add_known("kind", found.kind.as_ref());
    rows.add_known(
        "linked",
        found
            .is_dynamic
            .map(|is| if is { "dynamically" } else { "statically" }),
    );
    if found.is_dynamic == Some(true) {
        match &found.mpi {
            Some(mpi) => rows.add("MPI", mpi_text(mpi)),
            None if found.has_static_mpi => {
                rows.add_bad("MPI", "inside the program (statically linked)")
            }
            None => rows.add("MPI", "not linked"),
        }
        let cuda = if found.cuda.is_empty() {
            "not linked".to_owned()
        } else {
            found.cuda.join(", ")
        };
        rows.add("CUDA", cuda);
    }
    for tool in &found.tools {
        let place = match tool.is_preloaded {
            true => "preloaded: it is called first",
            false => "linked with the program: the library calls it first",
        };
        rows.add("tool", format!("{} ({place})", tool.path.display()));
    }
    for name in &found.missing {
        rows.add_bad("not found", name);
    }
    found
        .problems
        .iter()
        .for_each(|problem| rows.add_bad("problem", problem));
    found.notes.iter().for_each(|note| rows.add("note", note));
    rows
}

fn mpi_text(mpi: &Mpi) -> String {
    let abi = mpi
        .abi
        .map_or("not a known binary interface".to_owned(), |abi| {
            format!("{abi} binary interface")
        });
    let path = mpi
        .path
        .as_ref()
        .map_or("not found".into(), |path| path.display().to_string());
    format!("{} ({abi}), {path}", mpi.soname)
}

fn installed(found: &Installed) -> Rows {
    let mut rows = Rows::default();
    rows.add("given", "none: ./app may be linked with another MPI than the one in PATH, and anabranch doctor ./app tells");
    rows.add(
        "launcher in PATH",
        found
            .launcher
            .as_ref()
            .map_or("none".into(), |path| path.display().to_string()),
    );
    rows.add_known("MPI", found.mpi.as_ref().map(mpi_text));
    rows.add_known("note", found.note.as_ref());
    rows
}

/// `64.0 MiB`
fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut scale = 1u64;
    while unit + 1 < UNITS.len() && count / scale >= 1024 {
        scale *= 1024;
        unit += 1;
    }
    let tenths = count / scale * 10 + count % scale * 10 / scale;
    match unit {
        0 => format!("{count} B"),
        _ => format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit]),
    }
}

fn node(found: &Node) -> Rows {
    let mut rows = Rows::default();
    rows.add_known("container", found.container);
    if let (Some(size), Some(free)) = (found.shm_bytes, found.shm_free_bytes) {
        rows.add("/dev/shm", format!("{}, {} free", bytes(size), bytes(free)));
    }
    if let Some(problem) = &found.shm_problem {
        rows.add_bad("/dev/shm", problem);
    }
    rows.add(
        "memory to lock",
        found.memlock_bytes.map_or("unlimited".into(), bytes),
    );
    match &found.peer_memory_problem {
        Some(problem) => rows.add_bad("memory of peers", problem),
        None => rows.add("memory of peers", "can be opened"),
    }
    rows.add_known("ptrace_scope", found.ptrace_scope.as_ref());
    rows.add_known("hidepid", found.hidepid.as_ref());
    for (name, launcher) in &found.launcher_variables {
        rows.add("launcher", format!("{launcher}, by {name}"));
    }
    if found.launcher_variables.is_empty() {
        rows.add("launcher", "none around this command");
    }
    rows.add_known("rank", found.world_rank);
    rows.add_known("ranks here", found.local_size);
    rows
}

fn driver(found: &Driver) -> Rows {
    let mut rows = Rows::default();
    rows.add_known("file", found.file.as_ref());
    if found.simulated {
        rows.add("hardware", "simulated (simcuda)");
    }
    rows.add_known("CUDA", found.cuda.as_ref());
    rows.add_known("kernel's part", found.kernel.as_ref());
    if let Some(problem) = &found.problem {
        rows.add_bad("problem", problem);
    }
    rows.add_known("CUDA_VISIBLE_DEVICES", found.visible_devices.as_ref());
    for gpu in &found.gpus {
        let label = gpu
            .ordinal
            .map_or("GPU hidden".to_owned(), |ordinal| format!("GPU {ordinal}"));
        let hidden = if gpu.visible {
            ""
        } else {
            ", hidden by CUDA_VISIBLE_DEVICES"
        };
        let links = gpu.nvlinks.map_or(String::new(), links_text);
        let (name, uuid) = (&gpu.name, &gpu.uuid);
        rows.add(label, format!("{name}, {uuid}{links}{hidden}"));
    }
    for pair in &found.pairs {
        let label = format!("GPU {} -> {}", pair.from, pair.to);
        let bad = !matches!(pair.ipc, Ipc::Works | Ipc::NotTried);
        rows.rows.push((bad, label, pair_text(pair)));
    }
    rows
}

fn links_text(links: NvLinks) -> String {
    let some = [(links.to_gpus, "to GPUs"), (links.to_switch, "to a switch")];
    let some = some.iter().filter(|(count, _)| *count > 0);
    some.map(|(count, to)| format!(", {count} NVLinks {to}"))
        .collect()
}

fn pair_text(pair: &Pair) -> String {
    let peer = match pair.peer_access {
        Some(true) => "peer access yes",
        Some(false) => "peer access no",
        None => "same GPU",
    };
    let ipc = match pair.ipc {
        Ipc::Works => "IPC works",
        Ipc::Refused => "IPC refused",
        Ipc::WrongData => "IPC gives wrong data",
        Ipc::CrashOrHang => "IPC crashes or hangs",
        Ipc::NotTried => "IPC not tried",
    };
    match &pair.reason {
        Some(reason) => format!("{peer:15}  {ipc}: {reason}"),
        None => format!("{peer:15}  {ipc}"),
    }
}

fn conclusion(verdict: &Verdict) -> Rows {
    let mut rows = Rows::default();
    let answer = "messages";
    if verdict.taken {
        rows.add(answer, "would be taken");
    } else {
        rows.add_bad(answer, "nothing would be taken");
    }
    verdict
        .reasons
        .iter()
        .for_each(|reason| rows.add_bad("because", reason));
    verdict
        .messages
        .iter()
        .for_each(|fate| rows.add(fate.of, &fate.fate));
    verdict
        .warnings
        .iter()
        .for_each(|warning| rows.add("note", warning));
    rows.add_known("switch it on", verdict.switch_on.as_ref());
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_down() {
        for (count, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (65536, "64.0 KiB"),
            (67_108_863, "63.9 MiB"),
            (u64::MAX, "16777215.9 TiB"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }
}
