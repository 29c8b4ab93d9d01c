//! What follows from all that was found.

use anabranch_engine::config::{format_size, Config};
use anabranch_engine::engine::HOST_BYTES_MIN;
use anabranch_engine::mpi::Family;
use serde::Serialize;

use super::gpus::{Driver, Ipc, Pair};
use super::Findings;

/// The answer.
#[derive(Serialize, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Whether messages would be taken.
    pub taken: bool,
    /// Why none would be, a line each.
    pub reasons: Vec<String>,
    /// What happens to which messages.
    pub messages: Vec<Fate>,
    /// What should be known before it is switched on.
    pub warnings: Vec<String>,
    /// The line that switches it on.
    pub switch_on: Option<String>,
}

/// What happens to some messages.
#[derive(Serialize, Debug, PartialEq, Eq)]
pub struct Fate {
    /// Which messages.
    pub of: &'static str,
    /// What happens to them.
    pub fate: String,
}

/// Draws the conclusions.
pub fn judge(findings: &Findings, config: &Config) -> Verdict {
    let mut reasons = Vec::new();
    let mut warnings = findings.warnings.clone();
    if !config.enabled {
        reasons.push("ANABRANCH=off is set: unset it".to_owned());
    }
    if !config.helper {
        reasons.push("ANABRANCH_HELPER=off is set: without helper threads every message is left to the MPI library; unset it".to_owned());
    }
    reasons.extend(findings.library.problem.clone());
    if let Some(version) = &findings.library.version {
        if *version != findings.library.command_version {
            warnings.push(format!(
                "the library is version {version}, this command {}: install both from one build",
                findings.library.command_version
            ));
        }
    }
    reasons.extend(
        findings
            .program
            .iter()
            .flat_map(|program| program.problems.clone()),
    );
    warnings.extend(
        findings
            .program
            .iter()
            .flat_map(|program| program.notes.clone()),
    );
    reasons.extend(findings.node.shm_problem.clone());
    reasons.extend(findings.node.peer_memory_problem.clone());
    let driver = &findings.driver;
    if let Some(problem) = &driver.problem {
        reasons.push(match driver.file {
            // What the loader says names the file that it did not find.
            None if problem.contains("libcuda.so") => {
                format!("no CUDA driver: {problem}{}", in_container(&findings.node))
            }
            _ => format!("the CUDA driver cannot be used: {problem}"),
        });
    } else if driver.visible().is_empty() {
        reasons.push("no GPU is visible: see CUDA_VISIBLE_DEVICES".to_owned());
    }
    let is_bad = |pair: &&Pair| matches!(pair.ipc, Ipc::CrashOrHang | Ipc::WrongData);
    let bad: Vec<&Pair> = driver.pairs.iter().filter(is_bad).collect();
    let is_sound = |pair: &Pair| matches!(pair.ipc, Ipc::Works | Ipc::Refused);
    if !bad.is_empty() && !driver.pairs.iter().any(is_sound) {
        reasons.push(format!(
            "CUDA IPC is broken between all GPUs that were tried, and a program would be too ({})",
            bad[0].reason.as_deref().unwrap_or("see above")
        ));
    } else if !bad.is_empty() {
        warnings.push(format!(
            "CUDA IPC crashes, hangs or gives wrong data from GPU {}: leave these pairs out (CUDA_VISIBLE_DEVICES) before the library is switched on",
            pairs_text(&bad)
        ));
    }
    if matches!(findings.node.container, Some("docker" | "podman")) {
        warnings.push("this is a container: it should hold all ranks of the node; ranks in several find each other with --ipc=host and --pid=host only".to_owned());
    }
    let taken = reasons.is_empty();
    Verdict {
        taken,
        reasons,
        messages: if taken {
            fates(driver, config)
        } else {
            Vec::new()
        },
        warnings,
        switch_on: taken.then(|| switch_on(findings)),
    }
}

/// Where a driver comes from outside.
fn in_container(node: &super::Node) -> &'static str {
    match node.container {
        Some("docker") => "; this is a container: start it with --gpus all",
        Some("podman") => "; this is a container: start it with --device nvidia.com/gpu=all",
        Some("apptainer") => "; this is a container: start it with --nv",
        Some("kubernetes") => {
            "; this is a container: ask for nvidia.com/gpu in the pod's resources"
        }
        _ => "",
    }
}

/// `0 -> 1, 1 -> 0`
fn pairs_text(pairs: &[&Pair]) -> String {
    let one = |pair: &&Pair| format!("{} -> {}", pair.from, pair.to);
    pairs.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn fates(driver: &Driver, config: &Config) -> Vec<Fate> {
    let pairs = &driver.pairs;
    let with = |ipc: Ipc| {
        pairs
            .iter()
            .filter(|pair| pair.ipc == ipc)
            .collect::<Vec<_>>()
    };
    let (direct, refused, untried) = (with(Ipc::Works), with(Ipc::Refused), with(Ipc::NotTried));
    let mut fates = Vec::new();
    let mut add = |of, fate: String| fates.push(Fate { of, fate });
    let all = direct.len() == pairs.len();
    if !direct.is_empty() {
        let which = if all {
            "all pairs of GPUs".to_owned()
        } else {
            format!("GPU {}", pairs_text(&direct))
        };
        add(
            "device to device",
            format!("taken, copied directly between GPUs: {which}"),
        );
    }
    if !refused.is_empty() {
        let why = refused[0].reason.as_deref().unwrap_or("refused");
        let which = pairs_text(&refused);
        add(
            "device to device",
            format!("taken, through pinned host memory: GPU {which} ({why})"),
        );
    }
    if !untried.is_empty() {
        add(
            "device to device",
            "taken, directly where CUDA IPC works (not tried), else through pinned host memory"
                .into(),
        );
    }
    if driver.visible().len() > 1 {
        add("long ones", long_ones(driver, config));
    }
    let from_device = if direct.is_empty() && untried.is_empty() {
        "taken, through pinned host memory"
    } else {
        "taken, copied from the GPU into the receiver's buffer"
    };
    add("device to host", from_device.into());
    add(
        "host to device",
        format!(
            "from {} taken, through pinned host memory, if the one before it (same ranks, communicator and tag) went to a GPU too; otherwise, and shorter ones: sent by the MPI library, then copied to the GPU",
            format_size(HOST_BYTES_MIN.max(config.threshold))
        ),
    );
    if let Some(fate) = small_ones(config) {
        add("small ones", fate);
    }
    add(
        "pool and VMM memory",
        "what CUDA IPC does not export (cudaMallocAsync, cuMemMap, all of a MIG device): taken, from there through the sender's pinned host memory, into it as above".into(),
    );
    add("managed memory", "counts as host memory".into());
    add(
        "all others",
        "left to the MPI library: host to host, to other nodes, collectives, one-sided".into(),
    );
    fates
}

/// What becomes of messages from device buffers that are short, if it is something else.
fn small_ones(config: &Config) -> Option<String> {
    let by_value = (config.threshold > 1).then(|| {
        format!(
            "from device buffers below {} (ANABRANCH_THRESHOLD): by value, through host memory",
            format_size(config.threshold)
        )
    });
    let eager = (config.eager > 0).then(|| {
        format!(
            "up to {} (ANABRANCH_EAGER): if the receiver is not there at once, through a copy in host memory, with which the send is complete",
            format_size(config.eager)
        )
    });
    let parts: Vec<String> = by_value.into_iter().chain(eager).collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// Over which paths long messages between two GPUs may come.
fn long_ones(driver: &Driver, config: &Config) -> String {
    let size = format_size(config.multipath);
    let links = || driver.gpus.iter().filter_map(|gpu| gpu.nvlinks);
    let relays = if !config.paths.relay {
        Err("ANABRANCH_PATHS")
    } else if links().any(|links| links.to_switch > 0) {
        Err("their links lead to a switch")
    } else if links().any(|links| links.to_gpus > 0) {
        // Ranks relay where the links of all GPUs in use are known.
        let are_known = driver.gpus.iter().all(|gpu| gpu.nvlinks.is_some());
        Ok(if are_known {
            "over other GPUs"
        } else {
            "over other GPUs (while all in use are such whose links NVML tells)"
        })
    } else {
        Err("NVML tells of no links between them; anabranch topo --measure may")
    };
    let host = config.paths.host.then_some("through host memory");
    let ways: Vec<&str> = relays.ok().into_iter().chain(host).collect();
    let but = relays
        .err()
        .map_or(String::new(), |why| format!("; not over other GPUs: {why}"));
    if ways.is_empty() {
        return format!("straight from GPU to GPU{but}");
    }
    let ways = ways.join(" and ");
    format!("from {size} (ANABRANCH_MULTIPATH) also {ways} where that is faster{but}")
}

fn switch_on(findings: &Findings) -> String {
    let program = findings.program.as_ref();
    let mpi = match (program, &findings.installed_mpi) {
        (Some(program), _) => program.mpi.as_ref(),
        (None, installed) => installed.as_ref().and_then(|found| found.mpi.as_ref()),
    };
    let family = mpi.and_then(|mpi| mpi.family);
    let in_slurm = findings
        .node
        .launcher_variables
        .iter()
        .any(|(name, _)| name.starts_with("SLURM_"));
    let launcher = match family {
        _ if in_slurm => "srun -n N",
        Some(Family::Mpich | Family::Standard) => "mpiexec -n N",
        _ => "mpirun -np N",
    };
    let words: Vec<String> = match program {
        Some(program) => program.command.iter().map(|word| quoted(word)).collect(),
        None => vec!["./app".to_owned()],
    };
    format!("{launcher} anabranch exec {}", words.join(" "))
}

/// The word as a shell wants it.
fn quoted(word: &str) -> String {
    let plain = |letter: char| letter.is_alphanumeric() || "/._-+=:,@%".contains(letter);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::gpus::Listed;
    use crate::doctor::library::Library;
    use crate::doctor::probe::NvLinks;
    use crate::doctor::{Node, Program};

    fn pair(from: u32, to: u32, ipc: Ipc) -> Pair {
        Pair {
            from,
            to,
            peer_access: Some(true),
            ipc,
            reason: (ipc != Ipc::Works).then(|| "why".to_owned()),
        }
    }

    fn findings(pairs: Vec<Pair>) -> Findings {
        let gpu = |ordinal| Listed {
            ordinal: Some(ordinal),
            name: "N".into(),
            uuid: ordinal.to_string(),
            visible: true,
            nvlinks: None,
        };
        Findings {
            library: Library::default(),
            program: None,
            installed_mpi: None,
            node: Node {
                container: None,
                shm_bytes: Some(1),
                shm_free_bytes: Some(1),
                shm_problem: None,
                memlock_bytes: None,
                opens_peer_memory: true,
                peer_memory_problem: None,
                ptrace_scope: None,
                hidepid: None,
                launcher_variables: Vec::new(),
                world_rank: None,
                local_size: None,
            },
            driver: Driver {
                file: Some("/lib/libcuda.so.1".into()),
                gpus: vec![gpu(0), gpu(1)],
                pairs,
                ..Driver::default()
            },
            warnings: Vec::new(),
        }
    }

    fn verdict(findings: &Findings) -> Verdict {
        judge(findings, &Config::default())
    }

    #[test]
    fn each_way_of_a_pair_is_told() {
        let mixed = verdict(&findings(vec![
            pair(0, 1, Ipc::Works),
            pair(1, 0, Ipc::Refused),
        ]));
        assert!(mixed.taken);
        assert!(
            mixed.messages[0]
                .fate
                .contains("directly between GPUs: GPU 0 -> 1"),
            "{mixed:?}"
        );
        assert!(
            mixed.messages[1]
                .fate
                .contains("host memory: GPU 1 -> 0 (why)"),
            "{mixed:?}"
        );
        let hangs = verdict(&findings(vec![
            pair(0, 1, Ipc::Works),
            pair(1, 0, Ipc::CrashOrHang),
        ]));
        assert!(
            hangs.taken && hangs.warnings[0].contains("1 -> 0"),
            "{hangs:?}"
        );
        let broken = verdict(&findings(vec![
            pair(0, 1, Ipc::WrongData),
            pair(1, 0, Ipc::CrashOrHang),
        ]));
        assert!(!broken.taken && broken.switch_on.is_none(), "{broken:?}");
        assert!(
            broken.reasons[0].contains("broken between all GPUs"),
            "{broken:?}"
        );
    }

    #[test]
    fn what_long_messages_may_take_is_told() {
        let mut found = findings(vec![pair(0, 1, Ipc::Works)]);
        let mut told = |links: Option<(u32, u32)>, paths: &str| {
            let links = links.map(|(to_gpus, to_switch)| NvLinks { to_gpus, to_switch });
            found
                .driver
                .gpus
                .iter_mut()
                .for_each(|gpu| gpu.nvlinks = links);
            let mut config = Config::default();
            config.paths.relay = paths.contains("relay");
            config.paths.host = paths.contains("host");
            let messages = judge(&found, &config).messages;
            let long = messages.into_iter().find(|fate| fate.of == "long ones");
            long.expect("two GPUs").fate
        };
        let both = "relay,host";
        assert!(told(Some((6, 0)), both).contains("over other GPUs and through host memory"));
        assert!(told(Some((0, 18)), both).contains("host memory where that is faster; not over"));
        assert!(told(Some((0, 18)), both).ends_with("a switch"));
        assert!(told(None, both).contains("topo --measure"));
        assert!(told(Some((6, 0)), "host").ends_with("ANABRANCH_PATHS"));
        assert!(told(Some((6, 0)), "").starts_with("straight"));
        found.driver.gpus[0].nvlinks = None;
        let messages = judge(&found, &Config::default()).messages;
        let long = messages.iter().find(|fate| fate.of == "long ones");
        let fate = &long.expect("two GPUs").fate;
        assert!(fate.contains("GPUs (while all in use"), "{fate}");
    }

    #[test]
    fn every_obstacle_is_a_reason_of_its_own() {
        let mut all = findings(vec![pair(0, 1, Ipc::Works)]);
        all.library.problem = Some("library".into());
        all.node.shm_problem = Some("shm".into());
        all.node.peer_memory_problem = Some("peers".into());
        all.driver.problem = Some("driver".into());
        let off = Config {
            enabled: false,
            helper: false,
            ..Config::default()
        };
        let verdict = judge(&all, &off);
        assert!(!verdict.taken && verdict.messages.is_empty());
        for (reason, word) in verdict.reasons.iter().zip([
            "ANABRANCH=off",
            "HELPER=off",
            "library",
            "shm",
            "peers",
            "driver",
        ]) {
            assert!(reason.contains(word), "{reason:?} {word}");
        }
        assert_eq!(verdict.reasons.len(), 6);
    }

    #[test]
    fn the_line_suits_the_launcher() {
        let mut found = findings(vec![pair(0, 1, Ipc::Works)]);
        assert_eq!(
            verdict(&found).switch_on.as_deref(),
            Some("mpirun -np N anabranch exec ./app")
        );
        found.program = Some(Program {
            asked: "./my app".into(),
            command: vec!["./my app".into()],
            mpi: Some(super::super::program::Mpi {
                soname: "libmpi.so.12".into(),
                path: None,
                abi: None,
                family: Some(Family::Mpich),
            }),
            ..Program::default()
        });
        assert_eq!(
            verdict(&found).switch_on.as_deref(),
            Some("mpiexec -n N anabranch exec './my app'")
        );
        found
            .node
            .launcher_variables
            .push(("SLURM_JOB_ID", "SLURM (allocation)"));
        assert_eq!(
            verdict(&found).switch_on.as_deref(),
            Some("srun -n N anabranch exec './my app'")
        );
    }
}
