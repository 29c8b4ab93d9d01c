//! The report as a person reads it: the same facts as the JSON, one a row.

use std::fmt::Display;

use super::gpus::{Ipc, Pair};
use super::probe::NvLinks;
use super::program::Mpi;
use super::tools::Tool;
use super::verdict::Verdict;
use super::{Driver, Findings, Installed, Library, Node, Program};
use crate::style::{paint, BAD, GOOD, HEAD};
use crate::table;

/// Rows of a label and a text, with a mark where something is wrong.
#[derive(Default)]
pub struct Rows {
    rows: Vec<(bool, String, String)>,
}

impl Rows {
    pub fn add(&mut self, label: impl Into<String>, text: impl Display) {
        self.rows.push((false, label.into(), text.to_string()));
    }

    pub fn add_known(&mut self, label: &str, text: Option<impl Display>) {
        if let Some(text) = text {
            self.add(label, text);
        }
    }

    pub fn add_bad(&mut self, label: impl Into<String>, text: impl Display) {
        self.rows.push((true, label.into(), text.to_string()));
    }
}

/// The whole report, the answer first, in lines of this width; without one, each fact is one line.
pub fn render(findings: &Findings, verdict: &Verdict, width: Option<u16>) -> String {
    let mut out = answer(verdict) + "\n";
    let mut sections = vec![("", conclusion(verdict, findings.driver.problem.is_some()))];
    if verdict.taken {
        sections.push(("what happens to messages", messages(verdict)));
    }
    sections.push(("the library", library(&findings.library)));
    if let Some(found) = &findings.program {
        sections.push(("the program", program(found)));
    }
    if let Some(found) = &findings.installed_mpi {
        sections.push(("the program", installed(found)));
    }
    sections.push(("the node", node(&findings.node)));
    sections.push(("the driver", driver(&findings.driver)));
    out += &in_sections(&sections, width);
    out + &matrix(&findings.driver.pairs)
}

/// One line: would messages be taken?
fn answer(verdict: &Verdict) -> String {
    if verdict.taken {
        return paint(GOOD, "Messages would be taken.");
    }
    let text = match verdict.reasons.as_slice() {
        [reason] => format!("Nothing would be taken: {reason}"),
        reasons => format!("Nothing would be taken, for {} reasons.", reasons.len()),
    };
    paint(BAD, text)
}

/// Sections of rows, whose labels are all as wide as the widest.
pub fn in_sections(sections: &[(&str, Rows)], width: Option<u16>) -> String {
    let labels = sections.iter().flat_map(|(_, section)| &section.rows);
    let widest = labels.map(|(_, label, _)| label.chars().count()).max();
    let widest = widest.unwrap_or(0);
    let mut out = String::new();
    for (title, section) in sections
        .iter()
        .filter(|(_, section)| !section.rows.is_empty())
    {
        if !title.is_empty() {
            out += &format!("{}\n", paint(HEAD, title));
        }
        let rows = section.rows.iter().map(|(is_bad, label, text)| {
            let mark = if *is_bad { '!' } else { ' ' };
            [format!("{mark} {label:<widest$}"), text.clone()]
        });
        let rows = table::wrapped(rows, width);
        for line in rows.lines() {
            match line.strip_prefix('!') {
                Some(rest) => out += &format!("{}{rest}\n", paint(BAD, '!')),
                None => out += &format!("{line}\n"),
            }
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
    rows.add_known("starts", found.starts.as_ref().map(|path| path.display()));
    if let Some(python) = &found.python {
        rows.add(
            "Python",
            format!("{}, {}", python.version, python.executable.display()),
        );
        rows.add_known("mpi4py", python.mpi4py.as_ref());
        if !python.gpu_packages.is_empty() {
            rows.add("GPU packages", python.gpu_packages.join(", "));
        }
    }
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
    add_tools(&mut rows, &found.tools);
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
    add_tools(&mut rows, &found.tools);
    rows.add_known("note", found.note.as_ref());
    rows
}

fn add_tools(rows: &mut Rows, tools: &[Tool]) {
    for tool in tools {
        let place = match tool.is_preloaded {
            true => "preloaded: it is called first",
            false => "linked with the program: the library calls it first",
        };
        let name = tool.name.map_or(String::new(), |name| format!("{name}, "));
        rows.add("tool", format!("{name}{} ({place})", tool.path.display()));
    }
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
        if let Some(reason) = &pair.reason {
            let label = format!("GPU {} -> {}", pair.from, pair.to);
            let bad = pair.ipc != Ipc::NotTried;
            rows.rows
                .push((bad, label, format!("{}: {reason}", ipc_text(pair.ipc))));
        }
    }
    rows
}

fn links_text(links: NvLinks) -> String {
    let some = [(links.to_gpus, "to GPUs"), (links.to_switch, "to a switch")];
    let some = some.iter().filter(|(count, _)| *count > 0);
    some.map(|(count, to)| format!(", {count} NVLinks {to}"))
        .collect()
}

fn ipc_text(ipc: Ipc) -> &'static str {
    match ipc {
        Ipc::Works => "CUDA IPC works",
        Ipc::Refused => "CUDA IPC is refused",
        Ipc::WrongData => "CUDA IPC gives wrong data",
        Ipc::CrashOrHang => "CUDA IPC crashes or hangs",
        Ipc::NotTried => "CUDA IPC was not tried",
    }
}

/// The same in a cell of the matrix.
fn cell(pair: &Pair) -> String {
    let ipc = match pair.ipc {
        Ipc::Works => "works",
        Ipc::Refused => "refused",
        Ipc::WrongData => "WRONG",
        Ipc::CrashOrHang => "HANGS",
        Ipc::NotTried => "?",
    };
    let peer = if pair.peer_access == Some(false) {
        "~"
    } else {
        ""
    };
    format!("{ipc}{peer}")
}

/// Pairs of GPUs as a matrix, with what its words mean.
fn matrix(pairs: &[Pair]) -> String {
    let mut gpus: Vec<u32> = pairs.iter().map(|pair| pair.from).collect();
    gpus.dedup();
    if gpus.is_empty() {
        return String::new();
    }
    let names = gpus.iter().map(|gpu| format!("GPU{gpu}"));
    let mut rows = vec![std::iter::once(String::new())
        .chain(names.clone())
        .collect::<Vec<_>>()];
    for (from, name) in gpus.iter().zip(names) {
        let find = |to: &u32| {
            pairs
                .iter()
                .find(|pair| (pair.from, pair.to) == (*from, *to))
        };
        let cells = gpus.iter().map(|to| find(to).map_or("-".into(), cell));
        rows.push(std::iter::once(format!("  {name}")).chain(cells).collect());
    }
    let title = paint(
        HEAD,
        "copies by CUDA IPC, from the GPU of the row to that of the column",
    );
    let mut out = format!("{title}\n{}", table::text("", rows));
    let mut mean = |is_there: bool, text: &str| {
        if is_there {
            out += &format!("  {text}\n");
        }
    };
    let is = |ipc: Ipc| pairs.iter().any(|pair| pair.ipc == ipc);
    mean(is(Ipc::Refused), "refused: messages go through host memory");
    mean(is(Ipc::WrongData), "WRONG: the copy brought other data");
    mean(
        is(Ipc::CrashOrHang),
        "HANGS: a process crashed, or did not answer",
    );
    mean(is(Ipc::NotTried), "?: not tried");
    mean(
        pairs.iter().any(|pair| pair.peer_access == Some(false)),
        "~: the driver reports no peer access",
    );
    out
}

/// Reasons, and what to do.
fn conclusion(verdict: &Verdict, has_no_driver: bool) -> Rows {
    let mut rows = Rows::default();
    if verdict.reasons.len() > 1 {
        let reasons = verdict.reasons.iter();
        reasons.for_each(|reason| rows.add_bad("because", reason));
    }
    rows.add_known("switch it on", verdict.switch_on.as_ref());
    let warnings = verdict.warnings.iter();
    warnings.for_each(|warning| rows.add("note", warning));
    if has_no_driver {
        let command = "anabranch doctor --sim hgx-h200";
        rows.add(
            "without a GPU",
            format!("{command} checks the rest on a simulated node"),
        );
    }
    rows
}

fn messages(verdict: &Verdict) -> Rows {
    let mut rows = Rows::default();
    let messages = verdict.messages.iter();
    messages.for_each(|fate| rows.add(fate.of, &fate.fate));
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
