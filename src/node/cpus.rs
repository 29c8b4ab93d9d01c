//! On which processors the library's own threads run.
//!
//! Most launchers bind each rank to a core. A thread of the library's on that core takes it from the rank. On
//! two H200s the thread that asks NVML for links computed for 18 ms there, and the row of 2 MiB took 30 ms,
//! 11 without the library (`docs/results/h200-x2-first-messages.txt`). So these threads move to a core that
//! no rank of the node is bound to, as far as the process's cpuset has one.

use std::collections::BTreeSet;
use std::fs;

use rustix::process::Pid;
use rustix::thread::{sched_getaffinity, sched_setaffinity, CpuSet};

/// Processors, by number.
pub(super) type Cpus = BTreeSet<usize>;

/// The core that the process is bound to. `None` if it is bound to several or to none: then the scheduler
/// finds room.
pub struct Home(Option<Cpus>);

impl Home {
    /// The core of the calling thread, which the library must not have moved yet.
    pub fn of_this_thread() -> Home {
        Home(affinity(None).filter(is_one_core))
    }

    /// Moves the calling thread to a core to which none of the given processes is bound, or home if there is
    /// no such core.
    pub fn leave(&self, processes: &[u32]) {
        let Some(home) = &self.0 else { return };
        // The kernel leaves out what is not in the process's cpuset.
        let all = (0..CpuSet::MAX_CPU).collect();
        let allowed = bind(&all).ok().and_then(|()| affinity(None));
        let pids = processes
            .iter()
            .filter_map(|pid| Pid::from_raw(i32::try_from(*pid).ok()?));
        let bound = pids.filter_map(|pid| affinity(Some(pid)).filter(is_one_core));
        let taken = bound.flatten().chain(home.iter().copied()).collect();
        let free = allowed.and_then(|allowed| choose(&allowed, home, &taken, siblings, node_of));
        let chosen = free.as_ref().unwrap_or(home);
        match bind(chosen) {
            Ok(()) => log::debug!(
                "this rank is bound to processors {home:?}, the library's thread to {chosen:?}"
            ),
            Err(error) => log::debug!("the library's thread stays where it is: {error}"),
        }
    }
}

/// The best of the allowed processors: those of free cores on the NUMA node of `home`, else those of any free
/// core, else those that are not taken themselves.
fn choose(
    allowed: &Cpus,
    home: &Cpus,
    taken: &Cpus,
    siblings: impl Fn(usize) -> Cpus,
    node: impl Fn(usize) -> Cpus,
) -> Option<Cpus> {
    let taken_cores: Cpus = taken.iter().flat_map(|cpu| siblings(*cpu)).collect();
    let near: Cpus = home.iter().flat_map(|cpu| node(*cpu)).collect();
    let free_cores = &(allowed - taken) - &taken_cores;
    [&free_cores & &near, free_cores, allowed - taken]
        .into_iter()
        .find(|cpus| !cpus.is_empty())
}

/// Whether all of them belong to one core.
fn is_one_core(cpus: &Cpus) -> bool {
    let first = cpus.first();
    first.is_some_and(|cpu| cpus.len() == 1 || cpus.is_subset(&siblings(*cpu)))
}

/// Where a process may run, or the calling thread.
fn affinity(pid: Option<Pid>) -> Option<Cpus> {
    let set = sched_getaffinity(pid).ok()?;
    Some(
        (0..CpuSet::MAX_CPU)
            .filter(|cpu| set.is_set(*cpu))
            .collect(),
    )
}

/// Binds the calling thread.
fn bind(cpus: &Cpus) -> rustix::io::Result<()> {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    sched_setaffinity(None, &set)
}

/// The processors of the same core; none where the system does not tell.
fn siblings(cpu: usize) -> Cpus {
    let file = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    let told = fs::read_to_string(file).ok();
    told.and_then(|text| parse(&text)).unwrap_or_default()
}

/// The processors of the same NUMA node; none where the system does not tell.
fn node_of(cpu: usize) -> Cpus {
    let nodes = fs::read_dir("/sys/devices/system/node").into_iter();
    let mut lists = nodes.flatten().flatten().filter_map(|entry| {
        let text = fs::read_to_string(entry.path().join("cpulist")).ok()?;
        parse(&text)
    });
    lists.find(|cpus| cpus.contains(&cpu)).unwrap_or_default()
}

/// NUMA nodes of the processors that the calling thread may run on; none where the system does not tell.
pub fn numa_nodes() -> Vec<i32> {
    let own = affinity(None).unwrap_or_default();
    let nodes = fs::read_dir("/sys/devices/system/node").into_iter();
    let nodes = nodes.flatten().flatten().filter_map(|entry| {
        let number = entry.file_name().to_str()?.strip_prefix("node")?.parse();
        let text = fs::read_to_string(entry.path().join("cpulist")).ok()?;
        let has_own = parse(&text)?.intersection(&own).next().is_some();
        number.ok().filter(|_| has_own)
    });
    let mut nodes: Vec<i32> = nodes.collect();
    nodes.sort_unstable();
    nodes
}

/// `0-3,8`, as the system writes it.
pub(super) fn parse(text: &str) -> Option<Cpus> {
    let mut cpus = Cpus::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        cpus.extend((first..=last).take_while(|cpu| *cpu < CpuSet::MAX_CPU));
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> Cpus {
        parse(text).expect("a list of processors")
    }

    /// Two NUMA nodes of four cores of two processors each: cpu and cpu + 8.
    fn chosen(allowed: &str, own: &str, bound: &[&str]) -> Option<Vec<usize>> {
        let taken = bound
            .iter()
            .chain([&own])
            .flat_map(|text| set(text))
            .collect();
        let siblings = |cpu: usize| Cpus::from([cpu % 8, cpu % 8 + 8]);
        let node = |cpu: usize| set(["0-3,8-11", "4-7,12-15"][cpu % 8 / 4]);
        let chosen = choose(&set(allowed), &set(own), &taken, siblings, node)?;
        Some(chosen.into_iter().collect())
    }

    #[test]
    fn a_free_core_nearby_comes_first() {
        assert_eq!(
            chosen("0-15", "0,8", &["1,9", "4,12"]),
            Some(vec![2, 3, 10, 11])
        );
        // If a rank is bound to one processor of a core, the other one is not free.
        assert_eq!(chosen("0-15", "0", &["1"]), Some(vec![2, 3, 10, 11]));
    }

    #[test]
    fn another_numa_node_comes_before_a_shared_core() {
        let near = ["1,9", "2,10", "3,11"];
        assert_eq!(
            chosen("0-15", "0,8", &near),
            Some(vec![4, 5, 6, 7, 12, 13, 14, 15])
        );
        assert_eq!(
            chosen("0-3,8-11", "0", &["1", "2", "3"]),
            Some(vec![8, 9, 10, 11])
        );
    }

    #[test]
    fn where_there_is_none_it_stays() {
        assert_eq!(chosen("0", "0", &[]), None);
        assert_eq!(chosen("0,1", "0", &["1"]), None);
    }

    #[test]
    fn lists_are_read_as_the_system_writes_them() {
        assert_eq!(set("0-2,7\n"), Cpus::from([0, 1, 2, 7]));
        assert!(set("").is_empty());
        assert!(parse("a-b").is_none() && parse("1-").is_none());
    }

    /// A thread that is bound to one of this machine's processors goes to another, and one that is not stays.
    #[test]
    fn a_bound_thread_moves() {
        let before = affinity(None).expect("this thread's processors");
        if before.len() < 2 {
            return;
        }
        let moved = std::thread::spawn({
            let before = before.clone();
            move || {
                let first = *before.first().expect("a processor");
                bind(&Cpus::from([first])).expect("bound");
                Home::of_this_thread().leave(&[]);
                (first, affinity(None).expect("processors"))
            }
        });
        let (first, now) = moved.join().expect("a thread");
        assert!(!now.is_empty() && !now.contains(&first));
        Home::of_this_thread().leave(&[]);
        assert_eq!(affinity(None).expect("processors"), before);
    }
}
