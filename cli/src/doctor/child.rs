//! Child processes that may crash or hang: bounded in time and in what they say.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What of a child's output is kept; the rest is read and dropped.
const KEPT_BYTES: usize = 1 << 20;
/// How often a child that is waited for is looked at.
const LOOK: Duration = Duration::from_millis(2);
/// How long a child that was killed, or that has ended, is waited for: one that hangs in the kernel never goes.
const GRACE: Duration = Duration::from_secs(2);

/// A child that runs.
pub struct Running {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: Stream,
    stderr: Stream,
    deadline: Instant,
    limit: Duration,
}

/// How a child ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// It ended with this status.
    Status(i32),
    /// It died of this signal.
    Signal(i32),
    /// It was killed at its limit.
    TimedOut(Duration),
    /// It was killed at its limit and did not even then end.
    Stuck(Duration),
    /// It could not be started or watched.
    Lost(String),
}

/// What a child did.
#[derive(Clone, Debug)]
pub struct Ended {
    /// How it ended.
    pub end: End,
    /// What it wrote.
    pub stdout: String,
    /// What it complained of.
    pub stderr: String,
}

impl Ended {
    /// Whether it ended as it should.
    pub fn succeeded(&self) -> bool {
        self.end == End::Status(0)
    }

    /// In one line, why it did not succeed.
    pub fn reason(&self) -> String {
        match &self.end {
            End::Status(status) => match self.last_words() {
                Some(words) => words,
                None => format!("ended with status {status}"),
            },
            End::Signal(signal) => format!("crashed: {}", signal_name(*signal)),
            End::TimedOut(limit) => format!("hangs: no answer in {} s", limit.as_secs_f64()),
            End::Stuck(limit) => {
                format!(
                    "hangs: no answer in {} s, and cannot be killed",
                    limit.as_secs_f64()
                )
            }
            End::Lost(why) => why.clone(),
        }
    }

    fn last_words(&self) -> Option<String> {
        let line = self
            .stderr
            .lines()
            .rev()
            .find(|line| !line.trim().is_empty())?;
        Some(line.trim().trim_start_matches("anabranch: ").to_owned())
    }
}

fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGBUS => "SIGBUS",
        libc::SIGABRT => "SIGABRT",
        libc::SIGILL => "SIGILL",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGSYS => "SIGSYS",
        libc::SIGTERM => "SIGTERM",
        other => return format!("signal {other}"),
    };
    name.to_owned()
}

/// Output of a child, read by a thread that ends with the pipe.
#[derive(Clone, Default)]
struct Stream(Arc<Mutex<Kept>>);

#[derive(Default)]
struct Kept {
    bytes: Vec<u8>,
    is_closed: bool,
}

impl Stream {
    fn read(pipe: Option<impl Read + Send + 'static>) -> Stream {
        let stream = Stream::default();
        let Some(mut pipe) = pipe else {
            stream.with(|kept| kept.is_closed = true);
            return stream;
        };
        let filled = stream.clone();
        let reader = move || {
            let mut piece = [0u8; 4096];
            loop {
                match pipe.read(&mut piece) {
                    Ok(0) => break,
                    Ok(count) => filled.with(|kept| {
                        let room = KEPT_BYTES.saturating_sub(kept.bytes.len());
                        kept.bytes.extend_from_slice(&piece[..count.min(room)]);
                    }),
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(_) => break,
                }
            }
            filled.with(|kept| kept.is_closed = true);
        };
        if std::thread::Builder::new().spawn(reader).is_err() {
            stream.with(|kept| kept.is_closed = true);
        }
        stream
    }

    fn with<T>(&self, use_it: impl FnOnce(&mut Kept) -> T) -> T {
        use_it(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn text(&self) -> String {
        self.with(|kept| String::from_utf8_lossy(&kept.bytes).into_owned())
    }
}

/// This command again, in the role of a probe.
pub fn probe(arguments: &[&str]) -> Command {
    // By this name even if the file was replaced since: the probes must be of one build.
    let mut command = Command::new("/proc/self/exe");
    // What the user preloads is for the program; it must not change what is found here.
    command
        .arg("probe")
        .args(arguments)
        .env_remove("LD_PRELOAD");
    command
}

/// Runs a command to its end.
pub fn run(command: Command, limit: Duration) -> Ended {
    match Running::start(command, limit) {
        Ok(running) => running.finish(),
        Err(ended) => ended,
    }
}

impl Running {
    /// Starts a command that has `limit` for all that it does. Its stdin stays open until [`Running::finish`].
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(mut command: Command, limit: Duration) -> Result<Running, Ended> {
        let parent = std::process::id();
        let prepare = move || {
            let no_core = libc::rlimit {
                rlim_cur: 0,
                rlim_max: 0,
            };
            // SAFETY: these calls are async-signal-safe, and the limit is a live local.
            let orphan = unsafe {
                libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core);
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                u32::try_from(libc::getppid()) != Ok(parent)
            };
            if orphan {
                Err(std::io::ErrorKind::Interrupted.into())
            } else {
                Ok(())
            }
        };
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // SAFETY: the closure makes async-signal-safe calls only and allocates nothing.
        unsafe { command.pre_exec(prepare) };
        let mut child = command.spawn().map_err(|error| Ended {
            end: End::Lost(format!("cannot start a child process: {error}")),
            stdout: String::new(),
            stderr: String::new(),
        })?;
        Ok(Running {
            stdin: child.stdin.take(),
            stdout: Stream::read(child.stdout.take()),
            stderr: Stream::read(child.stderr.take()),
            child,
            deadline: Instant::now() + limit,
            limit,
        })
    }

    /// Its process number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the first line that it writes, for no longer than `limit`.
    ///
    /// # Errors
    /// It ended or ran out of time without one.
    pub fn first_line(mut self, limit: Duration) -> Result<(Running, String), Ended> {
        let deadline = self.deadline.min(Instant::now() + limit);
        loop {
            let line = self.stdout.with(|kept| {
                let end = kept.bytes.iter().position(|byte| *byte == b'\n')?;
                Some(String::from_utf8_lossy(&kept.bytes[..end]).into_owned())
            });
            if let Some(line) = line {
                return Ok((self, line));
            }
            let has_ended = !matches!(self.child.try_wait(), Ok(None));
            let is_closed = self.stdout.with(|kept| kept.is_closed);
            let is_late = Instant::now() >= deadline;
            if is_late {
                (self.deadline, self.limit) = (deadline, limit);
            }
            if (has_ended && is_closed) || is_late {
                return Err(self.finish());
            }
            std::thread::sleep(LOOK);
        }
    }

    /// As [`Running::finish`], but for no longer than `limit` from now.
    pub fn finish_within(mut self, limit: Duration) -> Ended {
        let deadline = Instant::now() + limit;
        if deadline < self.deadline {
            (self.deadline, self.limit) = (deadline, limit);
        }
        self.finish()
    }

    /// Closes its stdin, waits for its end and kills it at its limit.
    pub fn finish(mut self) -> Ended {
        drop(self.stdin.take());
        let end = self.end();
        // What it started may hold the pipes for longer than it lives.
        let until = Instant::now() + GRACE;
        while Instant::now() < until
            && !(self.stdout.with(|kept| kept.is_closed) && self.stderr.with(|kept| kept.is_closed))
            && !matches!(end, End::Stuck(_))
        {
            std::thread::sleep(LOOK);
        }
        Ended {
            end,
            stdout: self.stdout.text(),
            stderr: self.stderr.text(),
        }
    }

    fn end(&mut self) -> End {
        match wait_until(&mut self.child, self.deadline) {
            Ok(Some(status)) => return end_of(status),
            Err(error) => return End::Lost(format!("cannot watch a child process: {error}")),
            Ok(None) => {}
        }
        // Not reaped yet, so its number is still its own.
        let _ = self.child.kill();
        match wait_until(&mut self.child, Instant::now() + GRACE) {
            Ok(Some(_)) => End::TimedOut(self.limit),
            _ => End::Stuck(self.limit),
        }
    }
}

fn wait_until(child: &mut Child, deadline: Instant) -> std::io::Result<Option<ExitStatus>> {
    loop {
        let status = child.try_wait()?;
        if status.is_some() || Instant::now() >= deadline {
            return Ok(status);
        }
        std::thread::sleep(LOOK);
    }
}

fn end_of(status: ExitStatus) -> End {
    match (status.code(), status.signal()) {
        (Some(code), _) => End::Status(code),
        (None, Some(signal)) => End::Signal(signal),
        (None, None) => End::Lost("a child process ended in an unknown way".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.arg("-c").arg(script);
        command
    }

    #[test]
    fn each_end_has_its_reason() {
        let patience = Duration::from_secs(60);
        let fine = run(shell("echo a; echo b >&2; cat"), patience);
        assert!(fine.succeeded());
        assert_eq!((fine.stdout.as_str(), fine.stderr.as_str()), ("a\n", "b\n"));
        let failed = run(
            shell("echo 'anabranch: no such thing' >&2; exit 3"),
            patience,
        );
        assert_eq!(
            (failed.end.clone(), failed.reason()),
            (End::Status(3), "no such thing".into())
        );
        assert!(run(shell("kill -SEGV $$"), patience)
            .reason()
            .contains("SIGSEGV"));
        let hung = run(
            shell("trap '' TERM; exec sleep 1000"),
            Duration::from_millis(200),
        );
        assert_eq!(hung.end, End::TimedOut(Duration::from_millis(200)));
        let missing = run(Command::new("/no/such/command"), patience);
        assert!(missing.reason().contains("cannot start"), "{missing:?}");
    }

    #[test]
    fn a_talkative_child_is_cut_short_and_not_stalled() {
        let much = run(shell("head -c 3000000 /dev/zero"), Duration::from_secs(60));
        assert!(much.succeeded());
        assert_eq!(much.stdout.len(), KEPT_BYTES);
    }

    #[test]
    fn the_first_line_comes_while_the_child_goes_on() {
        let running =
            Running::start(shell("echo ready; cat"), Duration::from_secs(60)).expect("started");
        let (running, line) = running.first_line(Duration::from_secs(60)).expect("a line");
        assert_eq!(line, "ready");
        assert!(running.finish().succeeded());
        let silent = Running::start(shell("exit 4"), Duration::from_secs(60)).expect("started");
        assert_eq!(
            silent
                .first_line(Duration::from_secs(60))
                .err()
                .map(|ended| ended.end),
            Some(End::Status(4))
        );
    }
}
