//! One launch of one configuration: `anabranch run` as a child, with a limit to its time.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, Context};
use serde_json::Value;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use tempfile::TempDir;

use anabranch_engine::stats::FORMER;

use super::settings::{Setting, Variables};
use super::Arguments;
use crate::bench::suite::{Ask, Circumstances, Expected, Measured, Plan, Turn};

/// How ranks are started, and where their files lie.
pub struct Launches<'a> {
    arguments: &'a Arguments,
    folder: TempDir,
    count: u32,
    /// A signal asked for the end.
    stop: Arc<AtomicBool>,
    /// What the ranks of any launch wrote to stderr, each line once.
    pub said: Vec<String>,
}

impl<'a> Launches<'a> {
    /// Launches with the given options.
    ///
    /// # Errors
    /// There is no place for temporary files, or signals cannot be caught.
    pub fn new(arguments: &'a Arguments) -> anyhow::Result<Launches<'a>> {
        let folder = tempfile::Builder::new()
            .prefix("anabranch-compare-")
            .tempdir();
        let folder = folder.context("no folder for temporary files")?;
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first ends the launch under way, a second one this process.
            flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&stop))?;
            flag::register(signal, Arc::clone(&stop))?;
        }
        Ok(Launches {
            arguments,
            folder,
            count: 0,
            stop,
            said: Vec::new(),
        })
    }

    /// Whether a signal has asked for the end: what is launched from then on fails.
    pub fn are_stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Measures some rows, `turns` as in [`Plan`].
    ///
    /// # Errors
    /// The launch failed; the text says how.
    pub fn suite(
        &mut self,
        setting: &Setting,
        ranks: u32,
        rows: Vec<Ask>,
        turns: &[Turn],
        verify: bool,
    ) -> anyhow::Result<(Circumstances, Vec<Measured>)> {
        self.count += 1;
        let out = self.file("rows");
        let plan = Plan {
            rows,
            seed: self
                .arguments
                .seed
                .unwrap_or(0x616e_6162)
                .wrapping_add(u64::from(self.count)),
            memory: self.arguments.memory,
            row_ms: self.arguments.row_ms,
            blocks: usize::from(self.arguments.blocks),
            iterations: self.arguments.iterations,
            late_max: self.arguments.late_max / 100.0,
            turns: turns.to_vec(),
            verify,
            variables: setting.variables.clone(),
            out: out.clone(),
        };
        let file = self.file("plan");
        fs::write(&file, serde_json::to_string(&plan)?)?;
        let program = [
            OsString::from("anabranch"),
            "suite".into(),
            file.clone().into(),
        ];
        self.run(setting, &setting.variables, ranks, &program)?;
        let text = fs::read_to_string(&out).context("the ranks wrote no results")?;
        let mut lines = text.lines();
        let circumstances: Circumstances =
            serde_json::from_str(lines.next().unwrap_or_default()).context("no first line")?;
        let measured = lines
            .map(serde_json::from_str)
            .collect::<Result<Vec<Measured>, _>>()?;
        let wanted = plan.rows.len() * plan.turns.len().max(1);
        if measured.len() != wanted {
            bail!("{} rows of {wanted} came", measured.len());
        }
        match (&circumstances.library, setting.preload) {
            (None, true) => bail!("the library is not in the ranks"),
            (Some(version), false) => bail!("the library {version} is in ranks without it"),
            _ => {}
        }
        let _ = (fs::remove_file(out), fs::remove_file(file));
        Ok((circumstances, measured))
    }

    /// One run of the solver as row number `row`: microseconds an iteration, and the hash of its field.
    ///
    /// # Errors
    /// The launch failed; the text says how.
    pub fn jacobi(
        &mut self,
        setting: &Setting,
        ranks: u32,
        row: usize,
    ) -> anyhow::Result<(Measured, String)> {
        self.count += 1;
        let (out, stats) = (self.file("solver"), self.file("counters"));
        let mut variables = setting.variables.clone();
        if setting.preload {
            variables.insert("ANABRANCH_STATS".into(), stats.display().to_string());
            // Counters are all that is read here, and the rest takes time in each call.
            variables
                .entry("ANABRANCH_STATS_DETAILS".into())
                .or_insert_with(|| "off".into());
        }
        let mut program: Vec<OsString> = vec![self.arguments.jacobi.clone()];
        program.extend(
            self.arguments
                .jacobi_args
                .split_whitespace()
                .map(OsString::from),
        );
        program.extend(["--json".into(), out.clone().into()]);
        self.run(setting, &variables, ranks, &program)?;
        let read = |file: &Path| -> anyhow::Result<Value> {
            let text = fs::read_to_string(file)
                .with_context(|| format!("{} was not written", file.display()))?;
            Ok(serde_json::from_str(&text)?)
        };
        let report = read(&out)?;
        let number = |name: &str| report[name].as_u64().unwrap_or(0);
        let seconds = report["seconds"]["total"].as_f64().unwrap_or(0.0);
        #[allow(clippy::cast_precision_loss)]
        let value = seconds * 1e6 / number("iterations").max(1) as f64;
        let counters = match setting.preload {
            true => Some(totals(&read(&stats)?)),
            false => None,
        };
        let measured = Measured {
            row,
            turn: 0,
            values: (value > 0.0).then_some(value).into_iter().collect(),
            iterations: u32::try_from(number("iterations")).unwrap_or(0),
            late: report["late"].as_f64(),
            slow: None,
            errors: None,
            counters,
            expected: Expected {
                device_sends: number("messages"),
                ..Expected::default()
            },
        };
        let _ = (fs::remove_file(out), fs::remove_file(stats));
        Ok((measured, report["hash"].as_str().unwrap_or("").to_owned()))
    }

    fn file(&self, kind: &str) -> PathBuf {
        self.folder
            .path()
            .join(format!("{kind}-{}.json", self.count))
    }

    fn run(
        &mut self,
        setting: &Setting,
        variables: &Variables,
        ranks: u32,
        program: &[OsString],
    ) -> anyhow::Result<()> {
        if self.are_stopped() {
            bail!("stopped by a signal");
        }
        let arguments = self.arguments;
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["run", "--np", &ranks.to_string()]);
        if !setting.preload {
            command.arg("--vanilla");
        }
        if let Some(name) = &arguments.sim {
            command.arg("--sim").arg(name);
            if arguments.oversubscribe_gpus {
                command.arg("--oversubscribe-gpus");
            }
            if !setting.preload || arguments.turns {
                // An MPI that knows no CUDA takes device memory for host memory, which here it may be.
                command
                    .env("SIMCUDA_HOST_ACCESS", "1")
                    .env("SIMCUDA_CHECK", "0");
            }
        }
        if let Some(mpi) = &arguments.mpi {
            command.arg("--mpi").arg(mpi);
        }
        for extra in &arguments.extra {
            command.arg("--mpirun-arg").arg(extra);
        }
        command.envs(variables).arg("--").args(program);
        let folder = self.folder.path();
        let (out, err) = (folder.join("stdout"), folder.join("stderr"));
        command
            .stdin(Stdio::null())
            .stdout(File::create(&out)?)
            .stderr(File::create(&err)?);
        if arguments.verbose {
            crate::complain(&format!("{}: {command:?}", setting.name));
        }
        // SAFETY: prctl is async-signal-safe and takes no pointers here.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
                Ok(())
            });
        }
        let limit = Duration::from_secs(arguments.launch_limit);
        let ended = wait(
            command.spawn().context("cannot start anabranch run")?,
            limit,
            &self.stop,
        )?;
        let read =
            |file: &Path| String::from_utf8_lossy(&fs::read(file).unwrap_or_default()).into_owned();
        let stderr = read(&err);
        if ended != Some(true) {
            let how = match ended {
                None => format!("it was ended after {} s", limit.as_secs()),
                _ => "it failed".into(),
            };
            let text = stderr + &read(&out);
            let lines: Vec<&str> = text
                .lines()
                .filter(|line| !line.trim().is_empty())
                .collect();
            bail!("{how}\n{}", ends(&lines).join("\n"));
        }
        for line in stderr.lines().filter(|line| !line.trim().is_empty()) {
            if self.said.len() < 20 && !self.said.iter().any(|said| said == line) {
                self.said.push(line.to_owned());
            }
        }
        Ok(())
    }
}

/// Whether the child ended well; `None` if it had to be ended.
fn wait(mut child: Child, limit: Duration, stop: &AtomicBool) -> anyhow::Result<Option<bool>> {
    const GRACE: Duration = Duration::from_secs(5);
    let start = Instant::now();
    let mut ending: Option<Instant> = None;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(ending.is_none().then_some(status.success()));
        }
        let is_over = start.elapsed() > limit || stop.load(Ordering::SeqCst);
        if ending.is_none() && is_over {
            ending = Some(Instant::now());
            // SAFETY: kill takes no pointers; the child has not been waited for, so the number is its own.
            unsafe { libc::kill(i32::try_from(child.id())?, libc::SIGTERM) };
        }
        if ending.is_some_and(|since| since.elapsed() > GRACE) {
            child.kill()?;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Of all that a failed launch says, the line that tells why: one of this project's, or the first.
pub fn gist(text: &str) -> &str {
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    let is_ours = |line: &&str| line.starts_with("anabranch") || line.starts_with("simcuda");
    let line = lines()
        .find(is_ours)
        .or_else(|| lines().nth(1))
        .or_else(|| lines().next());
    line.unwrap_or("it said nothing")
        .trim_start_matches("anabranch: ")
}

/// The first and the last of many lines: launchers say much after the reason.
fn ends<'l>(lines: &[&'l str]) -> Vec<&'l str> {
    const EACH: usize = 12;
    match lines.len() {
        few if few <= 2 * EACH => lines.to_vec(),
        many => [&lines[..EACH], &["..."], &lines[many - EACH..]].concat(),
    }
}

/// The counters of all ranks in a summary that the library wrote, those of fallbacks by their names in the C interface.
fn totals(summary: &Value) -> BTreeMap<String, u64> {
    let totals = &summary["totals"];
    let counters = totals["counters"].as_object().into_iter().flatten();
    let fallbacks = totals["fallbacks"].as_object().into_iter().flatten();
    counters
        .map(|(name, value)| (name.clone(), value.as_u64().unwrap_or(0)))
        .chain(fallbacks.map(|(name, value)| {
            (
                format!("fallback_{name}"),
                value["messages"].as_u64().unwrap_or(0),
            )
        }))
        .filter(|(name, value)| *value != 0 && !FORMER.iter().any(|(former, _)| former == name))
        .collect()
}
