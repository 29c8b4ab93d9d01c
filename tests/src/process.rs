//! Runs a command within a time limit, and leaves no process behind.

use std::fs::{self, File};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Marks every process of a run through its environment, so that all of them are found again.
const MARK_NAME: &str = "TEST_RUN_FOLDER";

/// How a command ended.
#[derive(Clone, Debug)]
pub struct Finished {
    /// Exit status; a signal counts as 128 + its number, as in a shell. `None`: it was killed at its time limit.
    pub code: Option<i32>,
    /// What it wrote to standard output.
    pub stdout: String,
    /// What it wrote to standard error.
    pub stderr: String,
    /// Processes of the run that outlived the command and had to be killed.
    pub left_behind: usize,
}

/// Runs a command for `limit` at most; its output goes through files in `folder`.
///
/// # Panics
/// If it cannot be started.
pub fn run_bounded(command: &mut Command, folder: &Path, limit: Duration) -> Finished {
    let out = folder.join("stdout");
    let err = folder.join("stderr");
    let mark = folder.display().to_string();
    let mut child = command
        .env(MARK_NAME, &mark)
        .stdin(Stdio::null())
        .stdout(File::create(&out).expect("stdout file"))
        .stderr(File::create(&err).expect("stderr file"))
        .process_group(0)
        .spawn()
        .unwrap_or_else(|e| panic!("cannot start {command:?}: {e}"));
    let deadline = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait().expect("wait for a child") {
            break Some(status);
        }
        if Instant::now() >= deadline {
            break None;
        }
        thread::sleep(Duration::from_millis(5));
    };
    let mut left_behind = 0;
    if status.is_some() {
        // A launcher may return a moment before its helpers are gone.
        let patience = Instant::now() + Duration::from_secs(10);
        while !marked(&mark).is_empty() && Instant::now() < patience {
            thread::sleep(Duration::from_millis(5));
        }
        left_behind = marked(&mark).len();
    }
    kill_marked(&mark);
    if status.is_none() {
        // Its own process, by number: it has not been waited for, so the number is still its own.
        let _ = child.kill();
        let _ = child.wait();
    }
    Finished {
        code: status.map(|status| {
            status
                .code()
                .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
        }),
        stdout: text(&out),
        stderr: text(&err),
        left_behind,
    }
}

fn text(file: &Path) -> String {
    String::from_utf8_lossy(&fs::read(file).unwrap_or_default()).into_owned()
}

/// Processes whose environment carries this run's mark.
fn marked(mark: &str) -> Vec<u32> {
    let wanted = format!("{MARK_NAME}={mark}");
    let own = std::process::id();
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| *pid != own)
        .filter(|pid| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment
                .split(|byte| *byte == 0)
                .any(|entry| entry == wanted.as_bytes())
        })
        .collect()
}

fn kill_marked(mark: &str) {
    for _ in 0..200 {
        let pids = marked(mark);
        if pids.is_empty() {
            return;
        }
        for pid in pids {
            // SAFETY: a plain system call; the process was just seen to be one that this run started.
            unsafe { libc::kill(pid as libc::pid_t, libc::SIGKILL) };
        }
        thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> std::path::PathBuf {
        let folder = std::env::temp_dir().join(format!("run-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn a_command_that_does_not_end_is_killed_with_all_its_children() {
        let folder = folder("endless");
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "sleep 1000 & (setsid sleep 1000 &); echo started; wait",
        ]);
        let finished = run_bounded(&mut command, &folder, Duration::from_millis(300));
        assert_eq!(finished.code, None);
        assert_eq!(finished.stdout, "started\n");
        assert!(marked(&folder.display().to_string()).is_empty());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn status_and_output_are_those_of_the_command() {
        let folder = folder("ends");
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; echo err >&2; exit 7"]);
        let finished = run_bounded(&mut command, &folder, Duration::from_secs(60));
        assert_eq!((finished.code, finished.left_behind), (Some(7), 0));
        assert_eq!(
            (finished.stdout.as_str(), finished.stderr.as_str()),
            ("out\n", "err\n")
        );
        fs::remove_dir_all(folder).unwrap();
    }
}
