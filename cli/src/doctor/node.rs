//! What of the machine, or of the container around it, decides whether ranks can share memory.

use std::path::Path;
use std::time::Duration;

use anabranch_engine::node::Launch;
use serde::Serialize;

use super::child::{self, Running};

const SHARED_FOLDER: &str = "/dev/shm";
/// What a job keeps there: one page.
const NEEDED_BYTES: u64 = 4096;

/// Variables by which a launcher is known.
const LAUNCHER_VARIABLES: [(&str, &str); 12] = [
    ("PRTE_LAUNCHED", "mpirun (Open MPI)"),
    ("OMPI_COMM_WORLD_SIZE", "mpirun (Open MPI)"),
    ("PMIX_NAMESPACE", "a PMIx launcher"),
    ("HYDI_CONTROL_FD", "mpiexec (Hydra)"),
    ("MPI_LOCALNRANKS", "mpiexec (Hydra)"),
    ("MV2_COMM_WORLD_SIZE", "mpirun_rsh (MVAPICH)"),
    ("PMI_RANK", "a PMI launcher"),
    ("PALS_APID", "PALS"),
    ("FLUX_JOB_ID", "Flux"),
    ("SLURM_STEP_ID", "srun (SLURM)"),
    ("SLURM_JOB_ID", "SLURM (allocation)"),
    ("LSB_JOBID", "LSF (allocation)"),
];

/// What was found out about the node.
#[derive(Serialize)]
pub struct Node {
    /// What kind of container this is, if it looks like one.
    pub container: Option<&'static str>,
    /// Size of /dev/shm in bytes.
    pub shm_bytes: Option<u64>,
    /// What of it is free.
    pub shm_free_bytes: Option<u64>,
    /// Why it cannot be used.
    pub shm_problem: Option<String>,
    /// Memory that a process may lock, in bytes; none without a limit.
    pub memlock_bytes: Option<u64>,
    /// Whether a process can open the memory that another of the same user shares.
    pub opens_peer_memory: bool,
    /// Why it cannot.
    pub peer_memory_problem: Option<String>,
    /// `kernel.yama.ptrace_scope`.
    pub ptrace_scope: Option<String>,
    /// `hidepid` of /proc.
    pub hidepid: Option<String>,
    /// Variables of launchers that are set, with the launcher.
    pub launcher_variables: Vec<(&'static str, &'static str)>,
    /// Rank in MPI_COMM_WORLD, if a launcher says.
    pub world_rank: Option<u32>,
    /// Ranks on this node, if a launcher says.
    pub local_size: Option<u32>,
}

/// Looks at the node and tries what the library will do.
pub fn examine(limit: Duration) -> Node {
    let launch = Launch::detect();
    let shm = space(SHARED_FOLDER);
    let peer_memory = open_peer_memory(limit);
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    Node {
        container: container(),
        shm_bytes: shm.as_ref().ok().map(|space| space.0),
        shm_free_bytes: shm.as_ref().ok().map(|space| space.1),
        shm_problem: shm
            .and_then(|space| usable(Path::new(SHARED_FOLDER), space.1))
            .err(),
        memlock_bytes: memlock(),
        opens_peer_memory: peer_memory.is_ok(),
        peer_memory_problem: peer_memory.err(),
        ptrace_scope: first_line("/proc/sys/kernel/yama/ptrace_scope"),
        hidepid: std::fs::read_to_string("/proc/self/mounts")
            .ok()
            .and_then(|mounts| hidepid(&mounts)),
        launcher_variables: LAUNCHER_VARIABLES
            .into_iter()
            .filter(|(name, _)| is_set(name))
            .collect(),
        world_rank: launch.world_rank,
        local_size: launch.local_size,
    }
}

fn first_line(path: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.lines().next()?.trim().to_owned())
}

fn container() -> Option<&'static str> {
    let is_set = |name: &str| std::env::var_os(name).is_some();
    if Path::new("/.dockerenv").exists() {
        Some("docker")
    } else if Path::new("/run/.containerenv").exists() {
        Some("podman")
    } else if is_set("APPTAINER_CONTAINER") || is_set("SINGULARITY_CONTAINER") {
        Some("apptainer")
    } else if is_set("KUBERNETES_SERVICE_HOST") {
        Some("kubernetes")
    } else {
        None
    }
}

/// Size and free bytes of the file system at a path.
fn space(path: &str) -> Result<(u64, u64), String> {
    let about = rustix::fs::statvfs(path);
    let about = about.map_err(|error| format!("{path}: {}", std::io::Error::from(error)))?;
    let bytes = |blocks: u64| blocks.saturating_mul(about.f_frsize);
    Ok((bytes(about.f_blocks), bytes(about.f_bavail)))
}

/// Whether a job's page fits into the folder: written for real.
fn usable(folder: &Path, free: u64) -> Result<(), String> {
    let path = folder.join(format!("anabranch-doctor-{}", std::process::id()));
    let page = [0u8; NEEDED_BYTES as usize];
    let written = std::fs::File::options()
        .write(true)
        .create_new(true)
        .open(&path)
        .and_then(|mut file| std::io::Write::write_all(&mut file, &page));
    // Where it was not created there is nothing to remove.
    let _ = std::fs::remove_file(&path);
    written.map_err(|error| {
        format!(
            "{} is not writable ({error}; {free} bytes free): ranks cannot find each other",
            folder.display()
        )
    })
}

fn memlock() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current
}

/// The option of the last file system that was mounted on /proc, unless it is the default.
fn hidepid(mounts: &str) -> Option<String> {
    let mut proc = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ');
        (fields.nth(1)? == "/proc").then(|| fields.nth(1))?
    });
    let options = proc.next_back()?;
    let value = options
        .split(',')
        .find_map(|option| option.strip_prefix("hidepid="))?;
    (value != "0" && value != "off").then(|| value.to_owned())
}

/// Two children, neither the other's parent, as ranks are: one shares memory, the other opens it.
fn open_peer_memory(limit: Duration) -> Result<(), String> {
    let unshared = |why: String| format!("memory cannot be shared: {why}");
    let (sharer, line) = Running::start(child::probe(&["share"]), limit.saturating_mul(2))
        .and_then(|sharer| sharer.first_line(limit))
        .map_err(|ended| unshared(ended.reason()))?;
    let pid = sharer.pid().to_string();
    let outcome = match line.split_once(' ') {
        Some((number, text)) => {
            let ended = child::run(child::probe(&["open-shared", &pid, number]), limit);
            if ended.succeeded() && ended.stdout.trim_end() == text {
                Ok(())
            } else {
                Err(format!(
                    "a process cannot open memory of another of the same user ({}): ranks cannot share theirs",
                    ended.reason()
                ))
            }
        }
        None => Err(unshared(format!("unexpected answer {line:?}"))),
    };
    sharer.finish_within(limit);
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_cannot_be_written_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(usable(folder.path(), 1), Ok(()));
        assert_eq!(
            std::fs::read_dir(folder.path()).expect("read").count(),
            0,
            "nothing is left"
        );
        let gone = folder.path().join("gone");
        assert!(usable(&gone, 1).is_err_and(|why| why.contains("gone is not writable")));
        assert!(space("/no/such/folder").is_err());
    }

    #[test]
    fn hidepid_is_read_from_the_mounts() {
        let mounts =
            "proc /proc proc rw,nosuid,hidepid=invisible 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n";
        assert_eq!(hidepid(mounts).as_deref(), Some("invisible"));
        assert_eq!(hidepid("proc /proc proc rw 0 0\n"), None);
        assert_eq!(
            hidepid("proc /proc proc rw,hidepid=2 0 0\nproc /proc proc rw,hidepid=0 0 0\n"),
            None
        );
        assert_eq!(hidepid(""), None);
    }
}
