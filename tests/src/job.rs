//! One run of one program under one MPI library's launcher.

use crate::machine::{built, needs_simulator, on_real_gpus, scratch_folder};
use crate::process::{run_bounded, Finished};
use crate::stats::{Report, Stats};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use xtask::layout::repository_root;
use xtask::mpi::{Family, Mpi};

/// What to run, and how.
#[derive(Clone, Debug)]
pub struct Job {
    mpi: Mpi,
    ranks: usize,
    program: PathBuf,
    arguments: Vec<String>,
    environment: BTreeMap<String, String>,
    /// Which ranks run with the library preloaded.
    preloaded: Vec<bool>,
    driver: bool,
    /// Whether the launcher itself gets the variables that the ranks get.
    through_launcher: bool,
    folder: PathBuf,
    limit: Duration,
    launcher_arguments: Vec<String>,
    /// Command that runs the launcher.
    wrapper: Vec<String>,
    /// Command that runs each rank.
    rank_wrapper: Vec<String>,
    /// No process of it need start the driver.
    without_device: bool,
    /// Open MPI looks for the best transport by itself, as for a user.
    chooses_transport: bool,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// How the launcher ended, and all output.
    pub finished: Finished,
    /// The library's summary, if it wrote one.
    pub stats: Option<Stats>,
    /// The simulated driver's report.
    pub report: Report,
    /// How many processes that must cover, at least, and whether its checker was on; `None` where there is no such driver.
    watched: Option<(usize, bool)>,
    description: String,
}

impl Job {
    /// A job of `ranks` ranks with the library preloaded, over the simulated driver with faulting device addresses.
    pub fn new(mpi: &Mpi, ranks: usize, program: &Path) -> Job {
        let name = program
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let folder = scratch_folder(&format!("{name}-{}", mpi.name));
        let mut job = Job {
            mpi: mpi.clone(),
            ranks,
            program: program.to_path_buf(),
            arguments: Vec::new(),
            environment: BTreeMap::new(),
            preloaded: vec![true; ranks],
            driver: true,
            through_launcher: false,
            limit: Duration::ZERO,
            launcher_arguments: Vec::new(),
            wrapper: Vec::new(),
            rank_wrapper: Vec::new(),
            without_device: false,
            chooses_transport: false,
            folder,
        };
        job = job.limit_seconds(150);
        let identity = job
            .folder
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let report = job.folder.join("simcuda.jsonl").display().to_string();
        let summary = job.summary_file().display().to_string();
        let scratch = job.folder.display().to_string();
        job.env("SIMCUDA_JOB", &identity)
            .env("SIMCUDA_REPORT", &report)
            .env("ANABRANCH_STATS", &summary)
            .env("SCRATCH", &scratch)
    }

    /// Arguments of the program.
    pub fn args(mut self, arguments: &[&str]) -> Job {
        self.arguments
            .extend(arguments.iter().map(|argument| (*argument).to_owned()));
        self
    }

    /// Sets a variable in every rank.
    ///
    /// # Panics
    /// On real GPUs, if it asks for what only the simulated driver can do.
    pub fn env(mut self, name: &str, value: &str) -> Job {
        let means_nothing = ["SIMCUDA_JOB", "SIMCUDA_REPORT", "SIMCUDA_HOST_MIB"].contains(&name)
            || (name, value) == ("SIMCUDA_CHECK", "0")
            // It stands for an MPI library that knows CUDA, which on real GPUs Open MPI is.
            || (name == "SIMCUDA_HOST_ACCESS" && self.mpi.family == Family::OpenMpi5);
        if name.starts_with("SIMCUDA_") && !means_nothing {
            needs_simulator(&format!("{name}={value}"));
        }
        self.environment.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Takes a variable away again.
    pub fn without_env(mut self, name: &str) -> Job {
        self.environment.remove(name);
        self
    }

    /// Which kinds of buffer each rank uses: `D` the device, `H` host memory only. Programs other than those of `programs/`
    /// must be told in their own way, too.
    pub fn roles(self, roles: &str) -> Job {
        self.env("ROLES", roles)
    }

    /// Kills the job after this time; the programs say a little earlier where they hang.
    pub fn limit_seconds(mut self, seconds: u64) -> Job {
        self.limit = Duration::from_secs(seconds);
        self.env("WATCHDOG", &seconds.saturating_sub(15).to_string())
    }

    /// How many ranks it has.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Nobody has the library.
    pub fn without_preload(mut self) -> Job {
        self.preloaded = vec![false; self.ranks];
        self
    }

    /// One rank does not have the library.
    pub fn without_preload_on(mut self, rank: usize) -> Job {
        self.preloaded[rank] = false;
        self
    }

    /// No CUDA driver is to be found.
    ///
    /// # Panics
    /// On real GPUs.
    pub fn without_driver(mut self) -> Job {
        needs_simulator("no driver");
        self.driver = false;
        self.env("NO_DRIVER", "1").roles("H")
    }

    /// The program never starts the driver, though its ranks have it.
    pub fn without_device(mut self) -> Job {
        self.without_device = true;
        self
    }

    /// How many processes use the simulated driver, and so report their end: every rank whose role is not that of a rank
    /// without a device. And whether they are checked.
    fn watched(&self) -> Option<(usize, bool)> {
        if on_real_gpus() || !self.driver {
            return None;
        }
        let roles = self.environment.get("ROLES").map_or("D", String::as_str);
        let with_device = roles.bytes().cycle().take(self.ranks);
        let with_device = with_device.filter(|role| *role == b'D').count();
        let is_checked = self
            .environment
            .get("SIMCUDA_CHECK")
            .is_none_or(|v| v != "0");
        let processes = if self.without_device { 0 } else { with_device };
        Some((processes, is_checked))
    }

    /// The launcher is given the variables too, the preload included: what spawned processes inherit.
    pub fn through_launcher(mut self) -> Job {
        self.through_launcher = true;
        self
    }

    /// Arguments of the launcher, before those that say what it is to launch.
    pub fn launcher_args(mut self, arguments: &[&str]) -> Job {
        self.launcher_arguments
            .extend(arguments.iter().map(|argument| (*argument).to_owned()));
        self
    }

    /// Open MPI looks for the best transport by itself, as for a user. In other jobs it gets the one that it finds on a machine
    /// without a network adapter.
    pub fn chooses_transport(mut self) -> Job {
        self.chooses_transport = true;
        self
    }

    /// The launcher is run by this command, which gets it and its arguments as arguments.
    pub fn under(mut self, wrapper: &[&str]) -> Job {
        self.wrapper = wrapper.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    /// Each rank is run by this command, which gets it and its arguments as arguments, but none of its variables.
    pub fn ranks_under(mut self, wrapper: &[&str]) -> Job {
        self.rank_wrapper = wrapper.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    /// Every rank meets others over TCP only, as if each were on a machine of its own: what the MPI libraries do within a
    /// node needs a `/dev/shm` and pids that ranks have in common.
    pub fn native_over_tcp(self) -> Job {
        let job = self
            .env("UCX_TLS", "tcp,self")
            .env("MPIR_CVAR_NOLOCAL", "1");
        job.env("OMPI_MCA_pml", "ob1")
            .env("OMPI_MCA_btl", "tcp,self")
    }

    /// The ranks are on two nodes, the lower half of them on the first (`tests/nodes/two-nodes`).
    pub fn on_two_nodes(mut self) -> Job {
        let script = repository_root().join("tests/nodes/two-nodes");
        let mut wrapper = crate::nodes::own_node();
        wrapper.extend([script, self.folder.clone()].map(|path| path.display().to_string()));
        self.wrapper = wrapper;
        let agent = self.folder.join("agent").display().to_string();
        let half = self.ranks / 2;
        let hosts = format!("node1:{half},node2:{half}");
        let arguments: Vec<&str> = match self.mpi.family {
            Family::OpenMpi4 => vec!["--mca", "plm_rsh_agent", &agent, "--host", &hosts],
            Family::OpenMpi5 => vec!["--prtemca", "plm_ssh_agent", &agent, "--host", &hosts],
            Family::Mpich | Family::StandardAbi => {
                vec![
                    "-launcher",
                    "ssh",
                    "-launcher-exec",
                    &agent,
                    "-hosts",
                    &hosts,
                ]
            }
        };
        // UCX takes two nodes of one kernel for one.
        self.launcher_args(&arguments).env("UCX_TLS", "tcp,self")
    }

    /// The folder of this run's files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// One for each node; the number is that of its lowest rank.
    fn summary_file(&self) -> PathBuf {
        self.folder.join("stats-%r.json")
    }

    /// Runs it.
    ///
    /// # Panics
    /// If the launcher cannot be started.
    pub fn run(self) -> Outcome {
        let mut command = self.launcher();
        let description = format!("{command:?}");
        let finished = run_bounded(&mut command, &self.folder, self.limit);
        let outcome = Outcome {
            finished,
            stats: Stats::of_nodes(&self.folder),
            report: Report::read(&self.folder.join("simcuda.jsonl")),
            watched: self.watched(),
            description,
        };
        if std::env::var_os("TEST_KEEP").is_none() {
            let _ = fs::remove_dir_all(&self.folder);
        }
        outcome
    }

    /// Runs it and checks that the program passed, nothing was left behind and no unordered accesses were seen.
    ///
    /// # Panics
    /// If not.
    pub fn passes(self) -> Outcome {
        let outcome = self.run();
        outcome.check_passed();
        outcome
    }

    fn launcher(&self) -> Command {
        let mut command = match self.wrapper.split_first() {
            Some((first, rest)) => {
                let mut command = Command::new(first);
                command.args(rest).arg(&self.mpi.mpirun);
                command
            }
            None => Command::new(&self.mpi.mpirun),
        };
        match self.mpi.family {
            Family::OpenMpi4 => {
                command.args(["--oversubscribe", "--bind-to", "none"]);
                if !self.chooses_transport && !on_real_gpus() {
                    // What it chooses where there is no network adapter; to find that out takes it 0.2 s in each job.
                    command.env("OMPI_MCA_pml", "ob1");
                }
                command
                    .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
                    .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
            }
            Family::OpenMpi5 => {
                command.args(["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]);
                command
                    .env("PRTE_ALLOW_RUN_AS_ROOT", "1")
                    .env("PRTE_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
                command
                    .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
                    .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
                if !self.chooses_transport {
                    // What finds no network adapter sleeps for a second when it is closed, in each job.
                    command.env("OMPI_MCA_btl", "^ofi");
                }
            }
            Family::Mpich | Family::StandardAbi => {}
        }
        command.args(&self.launcher_arguments);
        command.env_remove("LD_PRELOAD");
        if !on_real_gpus() {
            command.env_remove("LD_LIBRARY_PATH");
        }
        if self.through_launcher {
            command.envs(self.variables(self.preloaded[0]));
        }
        let mut first = 0;
        while first < self.ranks {
            let preload = self.preloaded[first];
            let same = self.preloaded[first..]
                .iter()
                .take_while(|other| **other == preload)
                .count();
            if first > 0 {
                command.arg(":");
            }
            command.arg("-np").arg(same.to_string());
            command.args(self.rank_command(preload));
            first += same;
        }
        command
    }

    /// `env NAME=VALUE ... program arguments`: the launcher itself sees none of it.
    fn rank_command(&self, preload: bool) -> Vec<OsString> {
        let mut words: Vec<OsString> = self.rank_wrapper.iter().map(OsString::from).collect();
        words.push("env".into());
        for (name, value) in self.variables(preload) {
            let mut word = OsString::from(name);
            word.push("=");
            word.push(value);
            words.push(word);
        }
        words.push(self.program.clone().into());
        words.extend(self.arguments.iter().map(OsString::from));
        words
    }

    fn variables(&self, preload: bool) -> Vec<(String, OsString)> {
        let mut folders = Vec::new();
        folders.extend((self.driver && !on_real_gpus()).then(|| built().simcuda.clone()));
        folders.extend(self.mpi.library_folder.clone());
        if let Some(present) = std::env::var_os("LD_LIBRARY_PATH").filter(|_| on_real_gpus()) {
            // The machine's own, in which the real driver and UCX may lie.
            folders.extend(std::env::split_paths(&present));
        }
        let path = std::env::join_paths(folders).expect("folders without a colon");
        let mut variables = vec![("LD_LIBRARY_PATH".to_owned(), path)];
        if preload {
            variables.push(("LD_PRELOAD".to_owned(), built().library.clone().into()));
            variables.push(("WITH_PRELOAD".to_owned(), "1".into()));
        }
        variables.extend(
            self.environment
                .iter()
                .map(|(name, value)| (name.clone(), value.into())),
        );
        variables
    }
}

impl Outcome {
    /// The program ended well and said so.
    ///
    /// # Panics
    /// If not.
    pub fn check_passed(&self) {
        assert!(
            self.finished.code.is_some(),
            "killed at its time limit:\n{self}"
        );
        assert_eq!(self.finished.code, Some(0), "\n{self}");
        assert!(
            self.finished
                .stdout
                .lines()
                .any(|line| line.starts_with("passed ")),
            "it did not pass:\n{self}"
        );
        assert_eq!(
            self.finished.left_behind, 0,
            "processes were left behind:\n{self}"
        );
        self.check_watched();
    }

    /// A bench ended well, with so many rows of which every message was right, and every message is accounted for.
    ///
    /// # Panics
    /// If not.
    pub fn check_benched(&self, rows: usize) -> &Stats {
        assert_eq!(self.finished.code, Some(0), "{self}");
        self.check_watched();
        let passed = self.finished.stdout.matches("Pass").count();
        assert_eq!(passed, rows, "{self}");
        let stats = self.stats();
        stats.check_complete();
        stats
    }

    /// The simulated driver has watched every rank with a device to its end, and found nothing. Not to be asked of ranks
    /// that were killed.
    ///
    /// # Panics
    /// If not.
    pub fn check_watched(&self) {
        let Some((processes, is_checked)) = self.watched else {
            return;
        };
        if let Some(complaint) = self.report.complaint(processes, is_checked) {
            panic!("{complaint}\n{self}");
        }
    }

    /// The library's summary.
    ///
    /// # Panics
    /// If it wrote none.
    pub fn stats(&self) -> &Stats {
        self.stats
            .as_ref()
            .unwrap_or_else(|| panic!("the library wrote no summary:\n{self}"))
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Finished {
            code,
            stdout,
            stderr,
            ..
        } = &self.finished;
        let why: Vec<&str> = stderr
            .lines()
            .filter(|line| line.contains("FAILED"))
            .collect();
        writeln!(
            f,
            "{}\nended with {code:?}; {}",
            self.description,
            why.join("\n")
        )?;
        writeln!(
            f,
            "-- stdout\n{}\n-- stderr\n{}",
            excerpt(stdout),
            excerpt(stderr)
        )?;
        match &self.stats {
            Some(stats) => write!(f, "-- counters\n{stats}"),
            None => writeln!(f, "-- no counters"),
        }
    }
}

/// The beginning and the end of a long text.
fn excerpt(text: &str) -> String {
    const LINES: usize = 40;
    let lines: Vec<&str> = text.lines().collect();
    if lines.len() <= 2 * LINES {
        return lines.join("\n");
    }
    let (head, tail) = (&lines[..LINES], &lines[lines.len() - LINES..]);
    format!(
        "{}\n... ({} lines) ...\n{}",
        head.join("\n"),
        lines.len() - 2 * LINES,
        tail.join("\n")
    )
}
