//! On which processors the library's own threads run.
//!
//! Launchers bind each rank to a core, mostly. What runs there beside the rank takes the core away from it: on two H200s the question
//! which NVLinks there are, 18 ms of work in a thread of its own, cost the row of 2 MiB 20 ms of 11 (`docs/results/h200-x2-first-messages.txt`).
//! So these threads go to a core of the process's cpuset that no rank of the node is bound to.

use std::fs;

use rustix::process::Pid;
use rustix::thread::{sched_getaffinity, sched_setaffinity, CpuSet};

/// The core that the process is bound to; `None` if it is bound to several or to none, where the system finds room by itself.
pub struct Home(Option<CpuSet>);

impl Home {
    /// That of the calling thread, which has made none of the library's moves yet.
    pub fn of_this_thread() -> Home {
        Home(sched_getaffinity(None).ok().filter(is_one_core))
    }

    /// Moves the calling thread to where none of the given processes is bound, or home if there is no such place.
    pub fn leave(&self, processes: &[u32]) {
        let Some(home) = &self.0 else { return };
        // The kernel leaves out what is not in the process's cpuset.
        let all = of(0..CpuSet::MAX_CPU);
        let allowed = sched_setaffinity(None, &all).and_then(|()| sched_getaffinity(None));
        let bound = |pid: &u32| {
            let pid = Pid::from_raw(i32::try_from(*pid).ok()?)?;
            sched_getaffinity(Some(pid)).ok().filter(is_one_core)
        };
        let bound: Vec<CpuSet> = processes.iter().filter_map(bound).chain([*home]).collect();
        let chosen = allowed.map(|allowed| choose(&allowed, home, &bound, siblings, node_of));
        let goes_to = chosen.unwrap_or(None).unwrap_or(*home);
        match sched_setaffinity(None, &goes_to) {
            Ok(()) => log::debug!(
                "this rank is bound to processor {}, the library's thread to {}",
                list(home),
                list(&goes_to)
            ),
            Err(error) => log::debug!("the library's thread stays where it is: {error}"),
        }
    }
}

/// The processors that are best: of a core that nobody is bound to, on the same NUMA node; of any such core; that nobody is bound to.
fn choose(
    allowed: &CpuSet,
    own: &CpuSet,
    bound: &[CpuSet],
    siblings: impl Fn(usize) -> CpuSet,
    node: impl Fn(usize) -> CpuSet,
) -> Option<CpuSet> {
    let taken = bound
        .iter()
        .fold(CpuSet::new(), |sum, set| union(&sum, set));
    let cores = members(&taken).fold(taken, |sum, cpu| union(&sum, &siblings(cpu)));
    let near = members(own).fold(CpuSet::new(), |sum, cpu| union(&sum, &node(cpu)));
    let free_cores = without(allowed, &cores);
    [
        both(&free_cores, &near),
        free_cores,
        without(allowed, &taken),
    ]
    .into_iter()
    .find(|set| set.count() > 0)
}

/// Whether all of them are of one core.
fn is_one_core(set: &CpuSet) -> bool {
    let first = members(set).next();
    first.is_some_and(|cpu| set.count() == 1 || without(set, &siblings(cpu)).count() == 0)
}

fn members(set: &CpuSet) -> impl Iterator<Item = usize> + '_ {
    (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu))
}

fn of(cpus: impl Iterator<Item = usize>) -> CpuSet {
    let mut set = CpuSet::new();
    cpus.for_each(|cpu| set.set(cpu));
    set
}

fn union(a: &CpuSet, b: &CpuSet) -> CpuSet {
    of(members(a).chain(members(b)))
}

fn both(a: &CpuSet, b: &CpuSet) -> CpuSet {
    of(members(a).filter(|cpu| b.is_set(*cpu)))
}

fn without(a: &CpuSet, b: &CpuSet) -> CpuSet {
    of(members(a).filter(|cpu| !b.is_set(*cpu)))
}

/// The processors of the same core; itself alone where the system does not tell.
fn siblings(cpu: usize) -> CpuSet {
    let file = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    let told = fs::read_to_string(file).ok();
    told.and_then(|text| parse(&text))
        .unwrap_or_else(|| of([cpu].into_iter()))
}

/// The processors of the same NUMA node; none where the system does not tell.
fn node_of(cpu: usize) -> CpuSet {
    let nodes = fs::read_dir("/sys/devices/system/node").into_iter();
    let lists = nodes.flatten().flatten().filter_map(|entry| {
        let text = fs::read_to_string(entry.path().join("cpulist")).ok()?;
        parse(&text)
    });
    let mut of_cpu = lists.filter(|set| set.is_set(cpu));
    of_cpu.next().unwrap_or_default()
}

/// `0-3,8`, as the system writes it.
fn parse(text: &str) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse().ok()?, last.parse().ok()?);
        (first..=last)
            .take_while(|cpu| *cpu < CpuSet::MAX_CPU)
            .for_each(|cpu| set.set(cpu));
    }
    Some(set)
}

fn list(set: &CpuSet) -> String {
    let cpus: Vec<String> = members(set).map(|cpu| cpu.to_string()).collect();
    match &cpus[..] {
        [first, .., last] if cpus.len() > 4 => format!("{first} to {last} ({})", cpus.len()),
        _ => cpus.join(","),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> CpuSet {
        parse(text).expect("a list of processors")
    }

    /// Two NUMA nodes of four cores of two processors each: cpu and cpu + 8.
    fn chosen(allowed: &str, own: &str, bound: &[&str]) -> Option<Vec<usize>> {
        let bound: Vec<CpuSet> = bound.iter().chain([&own]).map(|text| set(text)).collect();
        let siblings = |cpu: usize| of([cpu % 8, cpu % 8 + 8].into_iter());
        let node = |cpu: usize| set(["0-3,8-11", "4-7,12-15"][cpu % 8 / 4]);
        let chosen = choose(&set(allowed), &set(own), &bound, siblings, node)?;
        Some(members(&chosen).collect())
    }

    #[test]
    fn a_free_core_nearby_comes_first() {
        assert_eq!(
            chosen("0-15", "0,8", &["1,9", "4,12"]),
            Some(vec![2, 3, 10, 11])
        );
        // Of a rank that is bound to one processor of a core the other one is not free.
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
        assert_eq!(members(&set("0-2,7\n")).collect::<Vec<_>>(), [0, 1, 2, 7]);
        assert_eq!(members(&set("")).count(), 0);
        assert!(parse("a-b").is_none() && parse("1-").is_none());
        assert_eq!(list(&set("3")), "3");
        assert_eq!(list(&set("0-7")), "0 to 7 (8)");
    }

    /// A thread that is bound to one of this machine's processors goes to another, and one that is not stays.
    #[test]
    fn a_bound_thread_moves() {
        let before = sched_getaffinity(None).expect("this thread's processors");
        if before.count() < 2 {
            return;
        }
        let moved = std::thread::spawn(move || {
            let first = members(&before).next().expect("a processor");
            sched_setaffinity(None, &of([first].into_iter())).expect("bound");
            Home::of_this_thread().leave(&[]);
            (first, sched_getaffinity(None).expect("processors"))
        });
        let (first, now) = moved.join().expect("a thread");
        let others = without(&before, &siblings(first));
        // Where all others are of the same core, it takes these.
        assert!(!now.is_set(first) && now.count() > 0 || others.count() == 0);
        Home::of_this_thread().leave(&[]);
        assert_eq!(sched_getaffinity(None).expect("processors"), before);
    }
}
