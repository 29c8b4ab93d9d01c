//! Which job this process belongs to, as its launcher tells it, without any MPI call.
//!
//! Seen with Open MPI 4.1.4 and 5.0.11, MPICH 4.0.2 and 5.0.2: Open MPI's launchers export PMIX_NAMESPACE.
//! Hydra exports no job id, but the file descriptor PMI_FD stays open to its proxy after MPI_Init, and there
//! is one proxy for each job and node (it kills a rank whose end of that socket is closed). Ranks that come
//! to different identities merely do not find each other.
//!
//! **Spawned worlds are not told apart:** with MPICH 5.0.2 the children of MPI_Comm_spawn have their parents'
//! proxy, PMI_RANK and so identity. The caller of `Node::register` makes sure that MPI_Comm_get_parent gives
//! MPI_COMM_NULL.

use super::{proc, sys};

/// How far up the process tree a launcher's proxy is looked for (wrapper scripts lie in between).
const ANCESTORS_MAX: usize = 16;
/// Names of the processes that start the ranks of one job on one node, as cut to 15 bytes by the kernel.
const PROXIES: [&str; 5] = [
    "hydra_pmi_proxy",
    "hydra_bstrap_pr",
    "pmi_proxy",
    "mpispawn",
    "mpiexec.gforker",
];
/// Variables that a PMI-1 or PMI-2 launcher sets.
const PMI_VARIABLES: [&str; 4] = ["PMI_FD", "PMI_PORT", "PMI_RANK", "PMI_ID"];
/// Where a PMIx client finds its server: one server for each node (and launch), so it makes namespaces
/// unique.
const PMIX_SERVERS: [&str; 5] = [
    "PMIX_SERVER_URI41",
    "PMIX_SERVER_URI4",
    "PMIX_SERVER_URI3",
    "PMIX_SERVER_URI21",
    "PMIX_SERVER_URI2",
];

/// The job of this process and what its launcher says of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// The job's identity on this node, readable.
    pub job: String,
    /// The same in 64 bits.
    pub hash: u64,
    /// Rank in MPI_COMM_WORLD, if the launcher says.
    pub world_rank: Option<u32>,
    /// Ranks of the job on this node, if the launcher says.
    pub local_size: Option<u32>,
}

/// Who started this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Launcher {
    Pmix,
    Pmi,
    Pals,
    Flux,
    Slurm,
    Nobody,
}

impl Launch {
    /// Finds out the job from the environment and the process tree.
    pub fn detect() -> Self {
        Self::from_environment(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// A job of this name: for tests and tools.
    pub fn named(job: &str) -> Self {
        Self {
            job: job.to_owned(),
            hash: hash(job),
            world_rank: None,
            local_size: None,
        }
    }

    fn from_environment(get: &dyn Fn(&str) -> Option<String>) -> Self {
        let (launcher, identity) = identify(get);
        // Pids of one namespace mean nothing in another, though /dev/shm may be shared between containers.
        let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        let job = format!("{identity} {}", namespace.display());
        Self {
            world_rank: world_rank(launcher, get),
            local_size: local_size(launcher, get).filter(|&size| size > 0),
            ..Self::named(&job)
        }
    }
}

fn identify(get: &dyn Fn(&str) -> Option<String>) -> (Launcher, String) {
    let mut parts = Vec::new();
    let mut launcher = Launcher::Nobody;
    let mut add = |who, part: String| {
        if launcher == Launcher::Nobody {
            launcher = who;
        }
        parts.push(part);
    };
    // A launcher may run inside another's job and hand its variables down. The proxy is then the inner
    // launcher's, or the same for all. Taking both together never joins two jobs.
    if PMI_VARIABLES.iter().any(|name| get(name).is_some()) {
        if let Some((pid, start)) = pmi_proxy(get) {
            add(Launcher::Pmi, format!("pmi:{pid}.{start}"));
        }
    }
    if let Some(namespace) = get("PMIX_NAMESPACE") {
        let server = PMIX_SERVERS
            .iter()
            .find_map(|name| get(name))
            .unwrap_or_default();
        add(Launcher::Pmix, format!("pmix:{namespace}@{server}"));
    }
    if let Some(id) = get("PALS_APID") {
        add(Launcher::Pals, format!("pals:{id}"));
    }
    if let Some(id) = get("FLUX_JOB_ID") {
        add(Launcher::Flux, format!("flux:{id}"));
    }
    if parts.is_empty() {
        if let (Some(job), Some(step)) = (get("SLURM_JOB_ID"), get("SLURM_STEP_ID")) {
            return (Launcher::Slurm, format!("slurm:{job}.{step}"));
        }
        let (pid, start) = proc::own_identity();
        return (Launcher::Nobody, format!("self:{pid}.{start}"));
    }
    (launcher, parts.join(" "))
}

/// Pid and start time of the process that serves PMI to this one.
fn pmi_proxy(get: &dyn Fn(&str) -> Option<String>) -> Option<(u32, u64)> {
    let ancestors: Vec<_> = proc::ancestors(ANCESTORS_MAX).collect();
    let peer = get("PMI_FD")
        .and_then(|fd| fd.parse().ok())
        .and_then(sys::socket_peer);
    if let Some(sys::SocketPeer { pid, .. }) = peer {
        // The number may have been closed and reused: only a known proxy or one of our ancestors is believed.
        let is_ancestor = ancestors.iter().any(|&(ancestor, _)| ancestor == pid);
        if let Some(stat) = proc::stat(pid).filter(|stat| is_ancestor || is_proxy(&stat.name)) {
            return Some((pid, stat.start));
        }
    }
    let mut proxies = ancestors
        .into_iter()
        .filter(|(_, stat)| is_proxy(&stat.name));
    proxies.next().map(|(pid, stat)| (pid, stat.start))
}

fn is_proxy(name: &str) -> bool {
    PROXIES.contains(&name)
}

fn number(get: &dyn Fn(&str) -> Option<String>, names: &[&str]) -> Option<u32> {
    names.iter().find_map(|name| get(name)?.trim().parse().ok())
}

fn world_rank(launcher: Launcher, get: &dyn Fn(&str) -> Option<String>) -> Option<u32> {
    match launcher {
        Launcher::Pmix => number(get, &["PMIX_RANK"]),
        Launcher::Pmi => number(get, &["PMI_RANK", "PMI_ID"]),
        Launcher::Pals => number(get, &["PALS_RANKID", "PMI_RANK"]),
        Launcher::Flux => number(get, &["FLUX_TASK_RANK"]),
        Launcher::Slurm => number(get, &["SLURM_PROCID"]),
        Launcher::Nobody => None,
    }
}

fn local_size(launcher: Launcher, get: &dyn Fn(&str) -> Option<String>) -> Option<u32> {
    match launcher {
        Launcher::Pmix if get("PMIX_NAMESPACE")?.starts_with("slurm.") => slurm_local_size(get),
        Launcher::Pmix => number(get, &["OMPI_COMM_WORLD_LOCAL_SIZE"]),
        Launcher::Pmi => number(get, &["MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"]),
        Launcher::Pals => number(get, &["PALS_LOCAL_SIZE"]),
        Launcher::Slurm => slurm_local_size(get),
        // Hydra's, whose proxy is in another PID namespace.
        Launcher::Nobody => number(get, &["MPI_LOCALNRANKS"]),
        Launcher::Flux => None,
    }
}

/// SLURM_STEP_TASKS_PER_NODE reads like `4(x3),2`: three nodes with 4 tasks, then one with 2.
fn slurm_local_size(get: &dyn Fn(&str) -> Option<String>) -> Option<u32> {
    let node = number(get, &["SLURM_NODEID"])?;
    tasks_on_node(&get("SLURM_STEP_TASKS_PER_NODE")?, node)
}

pub(super) fn tasks_on_node(list: &str, node: u32) -> Option<u32> {
    let mut first = 0_u32;
    for item in list.split(',') {
        let (tasks, repeat) = match item.split_once("(x") {
            Some((tasks, repeat)) => (tasks, repeat.strip_suffix(')')?.parse::<u32>().ok()?),
            None => (item, 1),
        };
        first = first.checked_add(repeat)?;
        if node < first {
            return tasks.trim().parse().ok();
        }
    }
    None
}

/// FNV-1a with a final mix: the same in every build, unlike the standard library's hashers.
fn hash(text: &str) -> u64 {
    let fnv = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    super::mix(fnv)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn with(variables: &[(&str, &str)]) -> Launch {
        let map: HashMap<_, _> = variables
            .iter()
            .map(|&(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        Launch::from_environment(&|name| map.get(name).cloned())
    }

    #[test]
    fn without_a_launcher_each_process_is_its_own_job() {
        let launch = with(&[]);
        let (pid, start) = proc::own_identity();
        assert!(
            launch.job.starts_with(&format!("self:{pid}.{start} pid:[")),
            "{}",
            launch.job
        );
        assert_eq!((launch.world_rank, launch.local_size), (None, None));
    }

    #[test]
    fn open_mpi_and_prrte() {
        let common = [
            ("PMIX_NAMESPACE", "prterun-vm-6958@1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ];
        let rank = |rank, uri| {
            with(
                &[
                    &common[..],
                    &[("PMIX_RANK", rank), ("PMIX_SERVER_URI4", uri)],
                ]
                .concat(),
            )
        };
        let (zero, one) = (rank("0", "a:1"), rank("1", "a:1"));
        assert_eq!((zero.hash, &zero.job), (one.hash, &one.job));
        assert_eq!((one.world_rank, one.local_size), (Some(1), Some(4)));
        // Namespaces of two launches may collide (Open MPI 4 hashes its pid to 16 bits); their servers do
        // not.
        assert_ne!(zero.hash, rank("0", "a:2").hash);
    }

    #[test]
    fn slurm_alone_and_slurm_with_pmix() {
        let slurm = [
            ("SLURM_JOB_ID", "77"),
            ("SLURM_STEP_ID", "3"),
            ("SLURM_PROCID", "9"),
            ("SLURM_NODEID", "3"),
            ("SLURM_STEP_TASKS_PER_NODE", "4(x3),2"),
        ];
        let launch = with(&slurm);
        assert!(launch.job.starts_with("slurm:77.3 "));
        assert_eq!((launch.world_rank, launch.local_size), (Some(9), Some(2)));
        let pmix = [("PMIX_NAMESPACE", "slurm.pmix.77.3"), ("PMIX_RANK", "9")];
        let launch = with(&[&slurm[..], &pmix].concat());
        assert!(launch.job.starts_with("pmix:slurm.pmix.77.3@ "));
        assert_eq!((launch.world_rank, launch.local_size), (Some(9), Some(2)));
    }

    #[test]
    fn tasks_per_node() {
        assert_eq!(tasks_on_node("4(x3),2", 0), Some(4));
        assert_eq!(tasks_on_node("4(x3),2", 2), Some(4));
        assert_eq!(tasks_on_node("4(x3),2", 3), Some(2));
        assert_eq!(tasks_on_node("4(x3),2", 4), None);
        for bad in ["", "x", "4(x", "4(x)", "(x2)", "4(x4294967295),1(x9)"] {
            assert_eq!(tasks_on_node(bad, 4_294_967_295), None, "{bad}");
        }
    }

    #[test]
    fn the_socket_of_an_ancestor_is_believed_and_any_other_is_not() {
        use std::os::fd::AsRawFd;
        // Both ends of a pair of our own have this process as their peer: neither an ancestor nor a proxy.
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().expect("a socket pair");
        let fd = ours.as_raw_fd().to_string();
        let peer = sys::socket_peer(ours.as_raw_fd()).expect("this process");
        assert_eq!((peer.pid, peer.uid), (std::process::id(), sys::user()));
        let launch = with(&[("PMI_FD", &fd), ("PMI_RANK", "0")]);
        assert!(launch.job.starts_with("self:"), "{}", launch.job);
        let launch = with(&[("PMI_FD", "999999"), ("PMI_RANK", "0")]);
        assert!(launch.job.starts_with("self:"), "{}", launch.job);
    }

    #[test]
    fn hash_is_stable() {
        // FNV-1a of "foobar" (Fowler, Noll, Vo: test vectors), then the finalizer of SplitMix64.
        assert_eq!(hash("foobar"), super::super::mix(0x8594_4171_f739_67e8));
    }
}
