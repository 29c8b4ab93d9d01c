//! The parent's side of what is found out about the driver and the GPUs.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::process::Command;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::child::{self, Ended, Running};
use super::probe::{Gpu, NvLinks, Said};

/// How many processes try to map one GPU's memory at the same time.
const AT_ONCE: usize = 4;
/// After so many limits no further pair is tried: where many hang, the answer is clear by then.
const LIMITS_IN_ALL: u32 = 4;

/// What was found out about the driver.
#[derive(Serialize, Default)]
pub struct Driver {
    /// The file of it.
    pub file: Option<String>,
    /// The version of CUDA that it supports, as in `12.8`.
    pub cuda: Option<String>,
    /// The kernel's part, by its own account.
    pub kernel: Option<String>,
    /// Whether it is the simulated one.
    pub simulated: bool,
    /// Why there is no driver that can be used, or why it says no more.
    pub problem: Option<String>,
    /// `CUDA_VISIBLE_DEVICES`.
    pub visible_devices: Option<String>,
    /// Every GPU of the machine that this process may use, without regard to `CUDA_VISIBLE_DEVICES`.
    pub gpus: Vec<Listed>,
    /// Each ordered pair of visible GPUs.
    pub pairs: Vec<Pair>,
}

/// A GPU.
#[derive(Serialize)]
pub struct Listed {
    /// Its number among the visible ones.
    pub ordinal: Option<u32>,
    /// Its name.
    pub name: String,
    /// Its identity.
    pub uuid: String,
    /// Whether `CUDA_VISIBLE_DEVICES` leaves it visible.
    pub visible: bool,
    /// Its NVLinks, if NVML tells.
    pub nvlinks: Option<NvLinks>,
}

/// Two visible GPUs, or twice the same, as for two ranks that share one.
#[derive(Serialize)]
pub struct Pair {
    /// Ordinal of the GPU that holds the data.
    pub from: u32,
    /// Ordinal of the GPU that copies it.
    pub to: u32,
    /// Whether the driver says that it can reach the data itself; none for the same GPU.
    pub peer_access: Option<bool>,
    /// What came of the attempt.
    pub ipc: Ipc,
    /// Why it failed, in one line.
    pub reason: Option<String>,
}

/// What came of mapping an allocation of another process and copying from it.
#[derive(Serialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "snake_case")]
pub enum Ipc {
    /// The data arrived.
    Works,
    /// The driver refuses it.
    Refused,
    /// Other data arrived.
    WrongData,
    /// A process crashed or did not answer.
    CrashOrHang,
    /// Not tried.
    NotTried,
}

impl Driver {
    /// Numbers of the visible GPUs.
    pub fn visible(&self) -> Vec<u32> {
        self.gpus.iter().filter_map(|gpu| gpu.ordinal).collect()
    }
}

/// Asks the driver, and with `try_pairs` tries every pair. Each process may take `limit`.
pub fn examine(try_pairs: bool, limit: Duration) -> Driver {
    let mut driver = Driver {
        visible_devices: std::env::var("CUDA_VISIBLE_DEVICES").ok(),
        kernel: kernel_part(),
        ..Driver::default()
    };
    let ended = child::run(child::probe(&["driver"]), limit);
    let visible = driver.take_in(&ended);
    driver.list_all(visible, limit);
    driver.ask_for_links(limit);
    if try_pairs {
        driver.try_pairs(limit);
    }
    driver
}

fn kernel_part() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let line = text.lines().next()?;
    Some(line.trim_start_matches("NVRM version:").trim().to_owned())
}

/// `12080` reads `12.8`.
fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn lines(ended: &Ended) -> impl Iterator<Item = Said> + '_ {
    ended
        .stdout
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
}

impl Driver {
    /// Keeps what a probe said, and returns the GPUs that it named.
    fn take_in(&mut self, ended: &Ended) -> Vec<Gpu> {
        let mut visible = Vec::new();
        let mut is_complete = false;
        for said in lines(ended) {
            match said {
                Said::File(file) => self.file = Some(file),
                Said::Simulated => self.simulated = true,
                Said::Version(version) => self.cuda = Some(version_text(version)),
                Said::Gpu(gpu) => visible.push(gpu),
                Said::Peer(from, to, can) => self.pairs.push(Pair::untried(from, to, Some(can))),
                Said::Links(..) => {}
                Said::Failed(why) => self.problem = Some(why),
                Said::Complete => is_complete = true,
            }
        }
        if !is_complete && self.problem.is_none() {
            self.problem = Some(format!("no complete answer from it: {}", ended.reason()));
        }
        for gpu in &visible {
            self.pairs
                .push(Pair::untried(gpu.ordinal, gpu.ordinal, None));
        }
        self.pairs.sort_by_key(|pair| (pair.from, pair.to));
        visible
    }

    /// Adds the GPUs that `CUDA_VISIBLE_DEVICES` hides, as far as the driver names them without it.
    fn list_all(&mut self, visible: Vec<Gpu>, limit: Duration) {
        let listed = |gpu: Gpu, visible: bool| Listed {
            ordinal: visible.then_some(gpu.ordinal),
            name: gpu.name,
            uuid: gpu.uuid,
            visible,
            nvlinks: None,
        };
        let mut hidden = Vec::new();
        if self.visible_devices.is_some() {
            let mut command = child::probe(&["driver"]);
            command.env_remove("CUDA_VISIBLE_DEVICES");
            let ended = child::run(command, limit);
            hidden.extend(lines(&ended).filter_map(|said| match said {
                Said::Gpu(gpu) if visible.iter().all(|seen| seen.uuid != gpu.uuid) => Some(gpu),
                _ => None,
            }));
        }
        self.gpus
            .extend(visible.into_iter().map(|gpu| listed(gpu, true)));
        self.gpus
            .extend(hidden.into_iter().map(|gpu| listed(gpu, false)));
    }

    /// A process of its own: NVML may take long, or hang where the driver does.
    fn ask_for_links(&mut self, limit: Duration) {
        if self.gpus.is_empty() {
            return;
        }
        let uuids = self.gpus.iter().map(|gpu| gpu.uuid.as_str());
        let arguments: Vec<&str> = std::iter::once("links").chain(uuids).collect();
        let ended = child::run(child::probe(&arguments), limit);
        for said in lines(&ended) {
            if let Said::Links(uuid, links) = said {
                let of = self.gpus.iter_mut().find(|gpu| gpu.uuid == uuid);
                of.into_iter().for_each(|gpu| gpu.nvlinks = Some(links));
            }
        }
    }

    fn try_pairs(&mut self, limit: Duration) {
        let job = format!("doctor-{}-{:x}", std::process::id(), random());
        // Processes of one simulated node find each other by this name, as ranks do by that of their job.
        let name_job = self.simulated && std::env::var_os("SIMCUDA_JOB").is_none();
        let prepare = |mut command: Command| {
            if name_job {
                command.env("SIMCUDA_JOB", &job);
            }
            command
        };
        let deadline = Instant::now() + limit.saturating_mul(LIMITS_IN_ALL);
        for from in self.visible() {
            let pairs = self
                .pairs
                .iter_mut()
                .filter(|pair| pair.from == from)
                .collect();
            try_from_gpu(from, pairs, &prepare, limit, deadline);
        }
    }
}

impl Pair {
    fn untried(from: u32, to: u32, peer_access: Option<bool>) -> Pair {
        Pair {
            from,
            to,
            peer_access,
            ipc: Ipc::NotTried,
            reason: None,
        }
    }

    fn failed(&mut self, who: &str, ended: &Ended) {
        self.ipc = match ended.end {
            child::End::Status(_) => Ipc::Refused,
            _ => Ipc::CrashOrHang,
        };
        self.reason = Some(format!("{who} {}", ended.reason()));
    }

    fn leave_out(&mut self) {
        self.reason = Some("those before took too long".into());
    }

    fn judge(&mut self, ended: &Ended) {
        match ended.stdout.trim() {
            "equal" if ended.succeeded() => self.ipc = Ipc::Works,
            text if ended.succeeded() && text.ends_with("bytes differ") => {
                self.ipc = Ipc::WrongData;
                self.reason = Some(text.to_owned());
            }
            _ => self.failed(&format!("mapping on GPU {}:", self.to), ended),
        }
    }
}

/// A number that nobody can have left in memory before.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// One process exports memory of a GPU; processes on the other GPUs map it, a few at a time.
fn try_from_gpu(
    from: u32,
    mut pairs: Vec<&mut Pair>,
    prepare: &(dyn Fn(Command) -> Command + Sync),
    limit: Duration,
    deadline: Instant,
) {
    if Instant::now() >= deadline {
        pairs.iter_mut().for_each(|pair| pair.leave_out());
        return;
    }
    let seed = random();
    let seed_text = seed.to_string();
    let command = child::probe(&["export", &from.to_string(), &seed_text]);
    // The exporter outlives all who map its memory, each of whom may take as long as the limit.
    let rounds = u32::try_from(pairs.len().div_ceil(AT_ONCE)).unwrap_or(u32::MAX);
    let exporter = Running::start(
        prepare(command),
        limit.saturating_mul(rounds.saturating_add(1)),
    )
    .and_then(|exporter| exporter.first_line(limit));
    let (exporter, handle) = match exporter {
        Ok(ready) => ready,
        Err(ended) => {
            for pair in pairs {
                pair.failed(&format!("exporting from GPU {from}:"), &ended);
            }
            return;
        }
    };
    for some in pairs.chunks_mut(AT_ONCE) {
        if Instant::now() >= deadline {
            some.iter_mut().for_each(|pair| pair.leave_out());
            continue;
        }
        std::thread::scope(|scope| {
            for pair in some {
                let (handle, seed) = (&handle, &seed_text);
                scope.spawn(move || {
                    let command = child::probe(&["import", &pair.to.to_string(), seed, handle]);
                    pair.judge(&child::run(prepare(command), limit));
                });
            }
        });
    }
    // Whatever comes of its end, all that was asked of it has been answered.
    exporter.finish_within(limit);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::child::End;

    fn ended(end: End, stdout: &str, stderr: &str) -> Ended {
        Ended {
            end,
            stdout: stdout.into(),
            stderr: stderr.into(),
        }
    }

    #[test]
    fn what_was_said_before_a_crash_is_kept() {
        let mut driver = Driver::default();
        let said = "{\"File\":\"/lib/libcuda.so.1\"}\nnoise\n{\"Version\":12080}\n{\"Gpu\":{\"ordinal\":0,\"name\":\"N\",\"uuid\":\"U\"}}\n{\"Gp";
        let visible = driver.take_in(&ended(End::Signal(libc::SIGSEGV), said, ""));
        assert_eq!(
            (driver.file.as_deref(), driver.cuda.as_deref()),
            (Some("/lib/libcuda.so.1"), Some("12.8"))
        );
        assert_eq!(visible.len(), 1);
        assert_eq!(
            driver.problem.as_deref(),
            Some("no complete answer from it: crashed: SIGSEGV")
        );
    }

    #[test]
    fn each_outcome_of_a_pair_is_told_apart() {
        let judged = |end, stdout, stderr| {
            let mut pair = Pair::untried(0, 1, Some(true));
            pair.judge(&ended(end, stdout, stderr));
            (pair.ipc, pair.reason.unwrap_or_default())
        };
        assert_eq!(judged(End::Status(0), "equal\n", "").0, Ipc::Works);
        // Who crashes after the comparison has not passed.
        assert_eq!(judged(End::Signal(11), "equal\n", "").0, Ipc::CrashOrHang);
        assert_eq!(
            judged(End::Status(0), "3 of 9 bytes differ\n", "").0,
            Ipc::WrongData
        );
        assert_eq!(judged(End::Status(0), "", "").0, Ipc::Refused);
        let (ipc, reason) = judged(
            End::Status(1),
            "",
            "anabranch: cuIpcOpenMemHandle: CUDA_ERROR_X\n",
        );
        assert_eq!(
            (ipc, reason.as_str()),
            (
                Ipc::Refused,
                "mapping on GPU 1: cuIpcOpenMemHandle: CUDA_ERROR_X"
            )
        );
        let (ipc, reason) = judged(End::TimedOut(Duration::from_secs(9)), "", "");
        assert_eq!(ipc, Ipc::CrashOrHang);
        assert!(reason.contains("hangs: no answer in 9 s"), "{reason}");
    }
}
