//! Which paths long messages take, by what is known of the node: a file of `anabranch topo --measure`, or what the ranks
//! find out while they run.

use crate::support::{job, model, on};
use anabranch_tests::{built, needs_simulator, on_real_gpus, scratch_folder, Job};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use xtask::layout::repository_root;
use xtask::mpi::Mpi;

/// A home of the test's own, with the folder for measurements in it.
struct Home(PathBuf);

impl Home {
    fn new(name: &str) -> Home {
        Home(scratch_folder(name))
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }

    /// Measures a simulated node.
    fn measure(&self, node: &str) {
        needs_simulator("a simulated node");
        let measured = Command::new(&built().command)
            .args(["topo", "--measure"])
            .env("LD_LIBRARY_PATH", &built().simcuda)
            .env("SIMCUDA_TOPOLOGY", node)
            .env("SIMCUDA_JOB", format!("measure-{}", std::process::id()))
            .env("HOME", &self.0)
            .env_remove("XDG_CACHE_HOME")
            .env_remove("LD_PRELOAD")
            .output()
            .expect("started");
        assert!(measured.status.success(), "{measured:?}");
    }

    fn file(&self) -> PathBuf {
        let folder = self.0.join(".cache/anabranch");
        let entries = fs::read_dir(folder).expect("a folder");
        let mut files = entries.map(|entry| entry.expect("readable").path());
        let file = files.find(|file| !file.is_symlink());
        file.expect("a file")
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn rounds(mpi: &Mpi, node: &str, home: &Home) -> Job {
    at_home(mpi, home).env("SIMCUDA_TOPOLOGY", node)
}

/// On the GPUs that are there.
fn at_home(mpi: &Mpi, home: &Home) -> Job {
    job(mpi, 2, "rounds")
        .env("HOME", home.path())
        .env("XDG_CACHE_HOME", "")
}

#[test]
fn a_node_that_was_measured_is_known_from_the_first_message_on() {
    on("openmpi", |mpi| {
        let home = Home::new("measured");
        home.measure("beluga");
        // Each rank sees its own GPU only, and finds the file all the same.
        let outcome = rounds(mpi, "beluga", &home)
            .env("ANABRANCH_LOG", "info")
            .passes();
        assert!(
            outcome.finished.stderr.contains("paths are chosen by"),
            "{outcome}"
        );
        assert!(
            outcome.stats().total("receives_multipath") >= 7,
            "{outcome}"
        );
        let direct = rounds(mpi, "beluga", &home)
            .env("ANABRANCH_PATHS", "direct")
            .passes();
        assert_eq!(direct.stats().total("receives_multipath"), 0, "{direct}");
    });
}

/// What ranks have measured in passing is there for the next run, which measures nothing; what is kept is valid
/// for one driver, and what cannot be read is said in one line and replaced.
#[test]
fn what_ranks_have_measured_is_known_to_the_next_run() {
    needs_simulator("a simulated node");
    on("openmpi", |mpi| {
        let home = Home::new("kept");
        let folder = home.0.join(".cache/anabranch");
        let run = |keep: &str| {
            let outcome = Job::new(mpi, 2, &built().command)
                .args(&["bench", "bw", "--check", "--sizes", "64M", "--window", "1"])
                .args(&["-x", "0", "-i", "12", "--mpi", "openmpi"])
                .env("SIMCUDA_TOPOLOGY", "beluga")
                .env("HOME", home.path())
                .env("XDG_CACHE_HOME", "")
                .env("ANABRANCH_KEEP", keep)
                .env("ANABRANCH_LOG", "info")
                .run();
            let measured = outcome.check_benched(1).total("links_measured");
            let is_known = outcome.finished.stderr.contains("known from a run before");
            (measured, is_known, outcome)
        };
        let files = || {
            let entries = fs::read_dir(&folder).into_iter().flatten();
            let paths = entries.map(|entry| entry.expect("readable").path());
            paths.collect::<BTreeSet<PathBuf>>()
        };
        // Nothing is kept of a simulated node unless that is asked for.
        let (_, is_known, text) = run("auto");
        assert!(!is_known && files().is_empty(), "{text}");
        let (first, is_known, text) = run("on");
        // Each of two ranks has measured its way to the host and back.
        assert!(!is_known && first == 4, "{text}");
        assert_eq!(files().len(), 4, "one for each GPU: {:?}\n{text}", files());
        let (second, is_known, text) = run("on");
        assert!(is_known && second == 0, "{text}");
        // Its ways to the host and from its peer, and the links of all: as the node has them.
        let read = |file: &Path| -> serde_json::Value {
            serde_json::from_str(&fs::read_to_string(file).expect("readable")).expect("JSON")
        };
        let known: Vec<_> = files().iter().map(|file| read(file)).collect();
        let pulls = known
            .iter()
            .flat_map(|links| links["pulls"].as_array().expect("a list"));
        let rates = pulls.map(|pull| pull["way"]["gb_s"].as_f64().expect("a number"));
        let rates: Vec<f64> = rates.collect();
        assert!(!rates.is_empty(), "{known:#?}");
        for gb_s in rates {
            assert!((gb_s / 48.0 - 1.0).abs() < 0.1, "{gb_s}");
        }
        for links in &known {
            let to = links["wired"]["to"].as_array().expect("a list");
            assert_eq!(to.len(), 3, "{links}");
            assert!(to.iter().all(|row| row[1] == 2), "{links}");
        }
        let up = |links: &serde_json::Value| links["to_host"]["gb_s"].as_f64();
        let up: Vec<f64> = known.iter().filter_map(up).collect();
        let is_right = |gb_s: &f64| (gb_s / 12.3 - 1.0).abs() < 0.1;
        assert!(up.len() == 2 && up.iter().all(is_right), "{up:?}");
        // Of another driver.
        for file in files() {
            let text = fs::read_to_string(&file).expect("readable");
            fs::write(&file, text.replace(", simulated", "9, simulated")).expect("written");
        }
        let (_, is_known, text) = run("on");
        assert!(
            !is_known && text.finished.stderr.contains("measured again"),
            "{text}"
        );
        assert!(run("on").1, "replaced");
        // Cut off.
        for file in files() {
            fs::write(&file, "{").expect("written");
        }
        let outcome = rounds(mpi, "beluga", &home)
            .env("ANABRANCH_KEEP", "on")
            .passes();
        let warned = outcome.finished.stderr.matches("measured again").count();
        assert_eq!(warned, 2, "one for each GPU that is used: {outcome}");
        assert!(run("on").1, "replaced");
        // A folder that cannot be there.
        let outcome = rounds(mpi, "beluga", &home)
            .env("ANABRANCH_KEEP", "on")
            .env("XDG_CACHE_HOME", "/dev/null/cache")
            .passes();
        assert!(!outcome.finished.stderr.contains("anabranch["), "{outcome}");
    });
}

#[test]
fn a_node_that_nobody_has_measured_is_by_its_ranks() {
    on("openmpi", |mpi| {
        let home = Home::new("unmeasured");
        let job = || {
            if !on_real_gpus() {
                return rounds(mpi, "beluga", &home);
            }
            // Two GPUs and the host, and messages for which its path is worth while.
            at_home(mpi, &home).env("BYTES", "134217728")
        };
        // The ranks measure in turns, when they come to it: that can take some messages.
        let outcome = job().env("ROUNDS", "40").passes();
        let total = |name| outcome.stats().total(name);
        assert!(total("receives_multipath") > 0, "{outcome}");
        if on_real_gpus() {
            let [direct, host] = [
                total("multipath_direct_bytes"),
                total("multipath_host_bytes"),
            ];
            assert!(direct > host && host > 0, "{outcome}");
            assert_eq!(
                direct + host,
                total("receives_multipath_bytes"),
                "{outcome}"
            );
        }
        assert!(
            !outcome.finished.stderr.contains("anabranch["),
            "a healthy run says nothing:\n{outcome}"
        );
        // Messages that are never long enough leave nothing to measure by.
        let short = job().env("ANABRANCH_MULTIPATH", "1G").passes();
        assert_eq!(short.stats().total("receives_multipath"), 0, "{short}");
        assert!(!Path::new(home.path()).join(".cache").exists());
    });
}

/// Where links lead from GPU to GPU and the system says so, ranks need no file to relay, over GPUs that no rank uses.
#[test]
fn relays_on_a_node_that_nobody_has_measured() {
    needs_simulator("links between GPUs, and none");
    on("mpich5", |mpi| {
        let home = Home::new("unmeasured-links");
        for (node, gpus, nvml, relays) in [
            ("beluga", "0,1,2,3", "1", true),
            ("narval", "2,0,3,1", "1", true),
            // A pair with one link, and one without, which has but PCIe.
            ("dgx1-v100", "0,1,2,3,4,5,6,7", "1", true),
            ("dgx1-v100", "0,5,1,2,3,4,6,7", "1", true),
            // A GPU's copies share its port to the switch.
            ("hgx-h200", "0,1,2,3", "1", false),
            // Nobody tells which links there are.
            ("beluga", "0,1,2,3", "0", false),
        ] {
            let outcome = rounds(mpi, node, &home)
                .env("ROUNDS", "32")
                .env("CUDA_VISIBLE_DEVICES", gpus)
                .env("SIMCUDA_NVML", nvml)
                // A sender that is kept from its core has its chunks claimed back.
                .env("SIMCUDA_QUIET_US", "30000")
                .passes();
            let total = |name| outcome.stats().total(name);
            let [relayed, all] = [total("multipath_relay_bytes"), total("sends_device_bytes")];
            let what = format!("{node} {gpus} {nvml}: {outcome}");
            assert_eq!(all, (32 * 16) << 20, "{what}");
            assert_eq!(relayed > all / 8, relays, "{what}");
            assert!(relays || relayed == 0, "{what}");
        }
        assert!(!Path::new(home.path()).join(".cache").exists());
    });
}

/// The sets of GPUs under one PCIe switch, by the file of a simulated node.
fn switches_of(node: &str) -> BTreeSet<String> {
    let file = repository_root().join(format!("simcuda/topologies/{node}.toml"));
    let text = fs::read_to_string(file).expect("a topology");
    let sections = text.split("[[pcie.switch]]").skip(1);
    let sets = sections.filter_map(|section| section.split_once("gpus = [")?.1.split_once(']'));
    let names = |set: &str| {
        let gpus = set.split(',').map(|gpu| format!("GPU{}", gpu.trim()));
        gpus.collect::<Vec<_>>().join(", ")
    };
    sets.map(|(set, _)| names(set)).collect()
}

/// Ranks tell each other which GPUs share the link of a PCIe switch, where the system tells them: also such of which each sees its
/// own GPU only.
#[test]
fn switches_on_a_node_that_nobody_has_measured() {
    needs_simulator("GPUs under PCIe switches");
    on("openmpi", |mpi| {
        let home = Home::new("unmeasured-switches");
        // What ranks have found, by the GPUs that each sees.
        let found = |of_rank: [&str; 2], nvml: &str| {
            let visible = format!(
                "CUDA_VISIBLE_DEVICES=$([ $OMPI_COMM_WORLD_RANK = 0 ] && echo {} || echo {}) exec \"$@\"",
                of_rank[0], of_rank[1]
            );
            let outcome = rounds(mpi, "dgx1-v100", &home)
                .env("ROUNDS", "32")
                .env("SIMCUDA_NVML", nvml)
                .env("ANABRANCH_LOG", "debug")
                .ranks_under(&["sh", "-c", &visible, "sh"])
                .passes();
            let lines = outcome.finished.stderr.lines();
            let told = lines.filter_map(|line| line.split_once("one PCIe link to the host: "));
            let told: BTreeSet<String> = told.map(|(_, gpus)| gpus.to_owned()).collect();
            (told, outcome)
        };
        let switches = switches_of("dgx1-v100");
        assert_eq!(switches.len(), 4, "{switches:?}");
        let all = "0,1,2,3,4,5,6,7";
        let (told, outcome) = found([all, all], "1");
        assert_eq!(told, switches, "{outcome}");
        let (told, outcome) = found(["0", "1"], "1");
        assert_eq!(told, BTreeSet::from(["GPU0, GPU1".to_owned()]), "{outcome}");
        // Numbered among those that are used: under two switches, and nobody tells.
        for (of_rank, nvml) in [(["0", "2"], "1"), (["0", "1"], "0")] {
            let (told, outcome) = found(of_rank, nvml);
            assert!(told.is_empty(), "{of_rank:?}, {nvml}: {outcome}");
        }
    });
}

#[test]
fn a_file_of_another_driver_is_one_line_and_not_used() {
    on("openmpi", |mpi| {
        let home = Home::new("stale");
        home.measure("beluga");
        let file = home.file();
        let kept = fs::read_to_string(&file).expect("read");
        fs::write(&file, kept.replacen("simulated", "of last year", 1)).expect("written");
        let outcome = rounds(mpi, "beluga", &home).passes();
        let said = outcome.finished.stderr.lines();
        let said: Vec<&str> = said.filter(|line| line.contains("anabranch[")).collect();
        assert_eq!(said.len(), 1, "{outcome}");
        for part in ["of last year, this is", "measure again"] {
            assert!(said[0].contains(part), "{outcome}");
        }
    });
}

/// A message takes processor time of both ranks for each chunk that host memory brings: a rank that computes meanwhile, and tests
/// in between, is spared that.
#[test]
fn host_memory_is_left_out_where_a_rank_computes() {
    on("openmpi", |mpi| {
        let home = Home::new("computes");
        let run = |computes: &str| {
            let outcome = rounds(mpi, "hgx-h200", &home)
                .env("BYTES", "134217728")
                .env("ROUNDS", "12")
                .env("COMPUTES", computes)
                .passes();
            let stats = outcome.stats();
            (
                stats.total("host_spared"),
                stats.total("multipath_host_bytes") >> 20,
                stats.total("tests_rested"),
            )
        };
        let (spared, waits, rested) = run("");
        assert_eq!((spared, rested), (0, 0));
        assert!(waits > 12, "{waits} MiB");
        for computes in ["0", "1"] {
            // On a machine with much else to do messages are over before they are tested for.
            let mut runs = (0..6).map(|_| run(computes));
            let is_told = |(.., rested): &(u64, u64, u64)| (*rested >= 6) == (computes == "1");
            let (spared, by_host, rested) = runs.find(is_told).unwrap_or_default();
            // The first tests tell nothing yet.
            assert!(spared >= 9, "rank {computes} computes: {spared} of 12");
            assert!(
                by_host < waits / 2,
                "rank {computes} computes: {by_host} of {waits} MiB"
            );
            // While a copy of its own cannot be over, a receiver's tests do not ask about it.
            assert_eq!(
                rested >= 6,
                computes == "1",
                "rank {computes}: {rested} tests"
            );
        }
    });
}

/// Of two that exchange long messages one would split what it receives, and the other does not: what it offers goes whole each time,
/// since what goes the other way does, and costs an invitation. So it offers less and less.
#[test]
fn what_is_offered_in_vain_is_offered_less_and_less() {
    needs_simulator("a node whose host's memory is worth it");
    let model = model("hgx-h200");
    on("openmpi", |mpi| {
        let alone =
            "if [ $OMPI_COMM_WORLD_RANK = 0 ]; then export ANABRANCH_PATHS=direct; fi; exec \"$@\"";
        let iterations = 300;
        let run = || {
            let outcome = Job::new(mpi, 2, &built().command)
                .args(&["bench", "bibw", "--sizes", "256M", "--window", "1"])
                .args(&["--iterations", &iterations.to_string(), "--warmup", "0"])
                .args(&["--mpi", "openmpi"])
                .ranks_under(&["sh", "-c", alone, "sh"])
                .env("ANABRANCH_MODEL", &model.display().to_string())
                .env("SIMCUDA_TOPOLOGY", "hgx-h200")
                .env("SIMCUDA_DATA", "0")
                .env("SIMCUDA_CHECK", "0")
                .run();
            let stats = outcome.stats();
            // On a busy machine the first message of a rank can find its peer not ready yet.
            let (taken, early) = (stats.total("sends_rts"), stats.fallback("not_ready"));
            assert!(early <= 2 && taken + early == 2 * iterations, "{outcome}");
            (taken - stats.total("rtrs_sent"), outcome)
        };
        // Half of one rank's, if it offered each time that it may. On a busy machine ranks are late, and
        // offer more often: up to 70 times where it is 30 otherwise.
        let is_right = |(offered, _): &(u64, _)| (4..iterations / 5).contains(offered);
        let mut last = run();
        for _ in 0..2 {
            if !is_right(&last) {
                last = run();
            }
        }
        assert!(is_right(&last), "{} offered\n{}", last.0, last.1);
    });
}

/// Each to every other over a switch: long messages are read in turns, also where nobody has measured the node and none is long enough for
/// that to be done in passing. Nobody waits where links lead from GPU to GPU, nor for short ones, nor for single ones which are not long.
#[test]
fn long_messages_of_several_are_read_in_turns_over_a_switch() {
    needs_simulator("a switch, and none");
    on("openmpi", |mpi| {
        let mut homes: BTreeMap<(&str, bool), Home> = BTreeMap::new();
        for (node, is_measured, window, size, in_turns) in [
            ("hgx-h200", true, "3", "9M", true),
            ("hgx-h200", true, "1", "4M", true),
            ("hgx-h200", true, "3", "1536K", true),
            ("hgx-h200", false, "3", "1536K", true),
            ("hgx-h200", true, "1", "3M", false),
            ("hgx-h200", true, "3", "1M", false),
            ("beluga", true, "3", "9M", false),
            ("beluga", false, "3", "1536K", false),
        ] {
            let home = homes.entry((node, is_measured)).or_insert_with(|| {
                let home = Home::new("turns");
                if is_measured {
                    home.measure(node);
                }
                home
            });
            let outcome = Job::new(mpi, 4, &built().command)
                .args(&["bench", "all-to-all", "--check", "--sizes", size])
                .args(&["--window", window, "--mpi", "openmpi"])
                .env("SIMCUDA_TOPOLOGY", node)
                .env("HOME", home.path())
                .env("XDG_CACHE_HOME", "")
                .run();
            let waited = outcome.check_benched(1).total("gets_queued");
            let case = format!("{node}, measured: {is_measured}, windows of {window} of {size}");
            assert_eq!(waited > 0, in_turns, "{case}: {outcome}");
        }
    });
}
