//! What `/proc` says of processes: start times (a pid alone is recycled), parents, names.

use std::io::Read;

/// The part of `/proc/<pid>/stat` that identifies a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessStat {
    /// Name of the program, at most 15 bytes.
    pub name: String,
    /// State letter: `Z` and `X` are processes that have ended.
    pub state: char,
    /// Pid of the parent.
    pub parent: u32,
    /// The kernel is ending it: what it has open may be gone before it is a zombie.
    pub is_ending: bool,
    /// Start time in clock ticks since boot; with the pid it names one process only.
    pub start: u64,
}

/// Flag of a process that the kernel is ending (`PF_EXITING`).
const EXITING: u64 = 4;

impl ProcessStat {
    /// False for a zombie: it has ended, though its parent has not asked for its status yet.
    pub fn is_running(&self) -> bool {
        !matches!(self.state, 'Z' | 'X' | 'x')
    }
}

/// Reads what `/proc` says of a process; `None` where there is no such process, or it is hidden from us. The entry of
/// its first thread says the same, and is read instead of `/proc/<pid>/stat`: of that an emulator may show a process
/// an invented one (the user mode of qemu 7.2 invents the start time).
pub fn stat(pid: u32) -> Option<ProcessStat> {
    let mut text = [0_u8; 1024];
    let mut file = std::fs::File::open(format!("/proc/{pid}/task/{pid}/stat")).ok()?;
    let bytes = file.read(&mut text).ok()?;
    parse(&String::from_utf8_lossy(&text[..bytes]))
}

/// The program's name may hold spaces and parentheses, so fields are counted from the last `)`.
pub(super) fn parse(text: &str) -> Option<ProcessStat> {
    let (before, after) = (text.find('(')?, text.rfind(')')?);
    let name = text.get(before + 1..after)?.to_owned();
    let mut fields = text.get(after + 1..)?.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let parent = fields.next()?.parse().ok()?;
    // proc(5): state is field 3, ppid 4, flags 9, starttime 22.
    let flags: u64 = fields.nth(4)?.parse().ok()?;
    let start = fields.nth(12)?.parse().ok()?;
    Some(ProcessStat {
        name,
        state,
        parent,
        is_ending: flags & EXITING != 0,
        start,
    })
}

/// This process's pid and start time.
pub fn own_identity() -> (u32, u64) {
    let pid = std::process::id();
    (pid, stat(pid).map_or(0, |stat| stat.start))
}

/// True while the process of this pid and start time runs.
pub fn is_alive(pid: u32, start: u64) -> bool {
    pid != 0 && stat(pid).is_some_and(|stat| stat.start == start && stat.is_running())
}

/// True while the process of this pid and start time runs and has not begun to end.
pub fn goes_on(pid: u32, start: u64) -> bool {
    let is_well = |stat: ProcessStat| stat.start == start && stat.is_running() && !stat.is_ending;
    pid != 0 && stat(pid).is_some_and(is_well)
}

/// Like [`is_alive`], where only the low 32 bits of the start time are known.
pub fn is_alive_low32(pid: u32, start_low: u32) -> bool {
    pid != 0 && stat(pid).is_some_and(|stat| low32(stat.start) == start_low && stat.is_running())
}

/// The low 32 bits of a start time (they wrap after 497 days at 100 ticks a second).
pub const fn low32(start: u64) -> u32 {
    (start & 0xffff_ffff) as u32
}

/// Parents of this process, nearest first, at most `limit`.
pub fn ancestors(limit: usize) -> impl Iterator<Item = (u32, ProcessStat)> {
    let first = stat(std::process::id()).map_or(0, |stat| stat.parent);
    let mut next = first;
    std::iter::from_fn(move || {
        let pid = next;
        let found = (pid != 0).then(|| stat(pid)).flatten()?;
        next = found.parent;
        Some((pid, found))
    })
    .take(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_a_name_with_spaces_and_parentheses() {
        let line = "4242 (a (b) c) S 17 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 10 20 3\n";
        let stat = parse(line).expect("a well-formed line");
        assert_eq!(stat.name, "a (b) c");
        assert_eq!((stat.parent, stat.start), (17, 987_654));
        assert!(stat.is_running() && !stat.is_ending);
        let ending = line.replace("4194560", "4194564");
        assert!(parse(&ending).is_some_and(|stat| stat.is_ending && stat.start == 987_654));
    }

    #[test]
    fn refuses_cut_lines() {
        let line = "4242 (name) S 17 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654";
        assert!(parse(line).is_some());
        for cut in 0..line.len() - "987654".len() {
            assert_eq!(parse(&line[..cut]), None, "cut at {cut}");
        }
    }

    #[test]
    fn knows_the_living_from_the_dead() {
        let (pid, start) = own_identity();
        assert!(start > 0);
        assert_eq!(stat(pid).map(|stat| stat.start), Some(start));
        assert!(is_alive(pid, start) && is_alive_low32(pid, low32(start)));
        assert!(goes_on(pid, start) && !goes_on(pid, start + 1));
        assert!(!is_alive(pid, start + 1));
        assert!(!is_alive(0, 0));

        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("sleep starts");
        let start = stat(child.id()).expect("child is there").start;
        assert!(is_alive(child.id(), start));
        child.kill().expect("child can be killed");
        // Not waited for yet: a zombie counts as dead as soon as the kernel has torn it down.
        let mut backoff =
            super::super::wait::Backoff::sleeping(std::time::Duration::from_millis(5));
        while is_alive(child.id(), start) {
            backoff.snooze();
            assert!(
                backoff.rounds() < 5_000,
                "a killed process never became a zombie"
            );
        }
        child.wait().expect("child is waited for");
        assert!(!is_alive(child.id(), start));
    }

    #[test]
    fn ancestors_start_with_the_parent() {
        let first = ancestors(4).next().map(|(pid, _)| pid);
        assert_eq!(first, Some(std::os::unix::process::parent_id()));
    }
}
