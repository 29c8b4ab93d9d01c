//! For tests: the test binary as a process of another user, which only root can start.

use super::sys;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};

/// `nobody` on Debian; no user need have it.
const UID: u32 = 65_534;

pub(in crate::node) struct OtherUser {
    child: Child,
    lines: BufReader<ChildStdout>,
}

/// `ci/test` repeats this in its closing lines.
fn skipped(module: &str) {
    let line = format!("skipped: {module}: processes of another user: only root can start them\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
    let list = xtask::layout::Layout::new(false)
        .target
        .join("test-skipped.txt");
    let mut options = std::fs::OpenOptions::new();
    let list = options.create(true).append(true).open(list);
    list.and_then(|mut list| list.write_all(line.as_bytes()))
        .expect("the list of tests that were skipped can be written");
}

impl OtherUser {
    /// Runs the test `other_user` of a module of tests, with a variable. `None` where this is not root.
    pub(in crate::node) fn start(
        module: &str,
        variable: &str,
        value: impl ToString,
    ) -> Option<OtherUser> {
        if sys::user() != 0 {
            skipped(module);
            return None;
        }
        let (_, module) = module.split_once("::").expect("a module");
        // The folder of the test binary may be closed to other users: an open file is not.
        let mut child = Command::new("/proc/self/exe");
        let test = format!("{module}::other_user");
        child.args(["--exact", &test, "--nocapture", "--test-threads=1"]);
        let streams = child.stdin(Stdio::piped()).stdout(Stdio::piped());
        let started = streams.env(variable, value.to_string()).uid(UID).spawn();
        let mut child = started.expect("a process of another user");
        let lines = BufReader::new(child.stdout.take().expect("its output"));
        Some(OtherUser { child, lines })
    }

    pub(in crate::node) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(in crate::node) fn uid(&self) -> u32 {
        UID
    }

    /// Waits until it says a word.
    #[track_caller]
    pub(in crate::node) fn expect(&mut self, word: &str) {
        assert_eq!(self.hear(), word);
    }

    /// What it says next.
    #[track_caller]
    pub(in crate::node) fn hear(&mut self) -> String {
        let mut line = String::new();
        while self.lines.read_line(&mut line).expect("a line") > 0 {
            if let Some((_, said)) = line.split_once('@') {
                return said.trim().to_owned();
            }
            line.clear();
        }
        panic!("it ended before it said anything");
    }

    /// Tells it to go on.
    pub(in crate::node) fn tell(&mut self) {
        let input = self.child.stdin.as_mut().expect("its input");
        input.write_all(b"\n").expect("told");
    }
}

impl Drop for OtherUser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
