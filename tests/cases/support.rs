//! What the tests share.

use anabranch_tests::{
    built, mpi_or_skip, on_real_gpus, program, run_bounded, scratch_folder, Finished, Job, Outcome,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};
use xtask::mpi::{Family, Mpi};

/// Runs the command `anabranch`.
pub fn anabranch(arguments: &[&str], environment: &[(&str, &str)]) -> Finished {
    let folder = scratch_folder("command");
    let mut command = Command::new(&built().command);
    command
        .args(arguments)
        .envs(environment.iter().copied())
        .env_remove("LD_PRELOAD");
    let finished = run_bounded(&mut command, &folder, Duration::from_secs(60));
    let _ = fs::remove_dir_all(folder);
    finished
}

/// A job of a compiled test program.
pub fn job(mpi: &Mpi, ranks: usize, name: &str) -> Job {
    let path =
        program(mpi, name).unwrap_or_else(|error| panic!("{name} does not compile:\n{}", error.0));
    Job::new(mpi, ranks, &path)
}

/// Cases of programs that Open MPI over UCX gets through by itself on real GPUs; of others it is asked for none. It packs in
/// host code, which device memory crashes, what is buffered, replaced or has gaps; its copies fail while a stream is captured
/// or where no context is current; and its streams do not survive their context.
const NATIVE_ON_REAL_GPUS: [(&str, &[&str]); 10] = [
    (
        "p2p",
        &[
            "room_to_spare",
            "from_host",
            "from_host_persistent",
            "ring",
            "to_self",
            "nobody",
            "reallocated",
            "pieces",
        ],
    ),
    ("requests", &["sets", "mixed", "persistent", "get_status"]),
    (
        "probe",
        &[
            "interleaved",
            "matched_in_reverse",
            "not_of_others",
            "beside_pending",
        ],
    ),
    ("comms", &["made", "remade", "side_by_side"]),
    ("threads", &["by_tag", "by_comm", "handed"]),
    (
        "order",
        &["one_tag", "from_anyone", "wrong_arguments", "look_alikes"],
    ),
    // Of these two no case can be named, and all of what they do it can do.
    ("stress", &[]),
    ("deadlock", &[]),
    (
        "interface",
        &[
            "names",
            "direct",
            "eager",
            "to_self",
            "host_ring",
            "host",
            "persistent",
        ],
    ),
    ("habits", &["default_streams", "pending_work"]),
];

/// A job whose device buffers the MPI library sees: simulated memory that the host may read stands for one that knows CUDA.
pub fn over_an_mpi_that_knows_cuda(job: Job) -> Job {
    job.env("SIMCUDA_HOST_ACCESS", "1")
        .env("SIMCUDA_CHECK", "0")
}

/// Whether [`natively`] can run anything with this library: on real GPUs MPICH knows no CUDA.
pub fn knows_cuda(mpi: &Mpi) -> bool {
    !on_real_gpus() || mpi.family == Family::OpenMpi5
}

/// A job of a program that the MPI library serves by itself, with these cases (none named: all). On real GPUs only with
/// those that it gets through; None if there are none.
pub fn natively(mpi: &Mpi, ranks: usize, name: &str, cases: &[&str]) -> Option<Job> {
    let mut cases = cases.to_vec();
    if on_real_gpus() {
        let (_, able) = NATIVE_ON_REAL_GPUS
            .iter()
            .find(|(program, _)| *program == name)?;
        let wanted = |case: &&str| cases.is_empty() || cases.contains(case);
        let left: Vec<&str> = able.iter().copied().filter(wanted).collect();
        if left.is_empty() && !(able.is_empty() && cases.is_empty()) {
            return None;
        }
        cases = left;
    }
    let job = job(mpi, ranks, name).args(&cases);
    Some(over_an_mpi_that_knows_cuda(job))
}

/// What `anabranch topo --measure` finds on a simulated node; once for each.
pub fn model(topology: &str) -> PathBuf {
    measured(topology, |command| {
        command
            .env("SIMCUDA_TOPOLOGY", topology)
            .env(
                "SIMCUDA_JOB",
                format!("model-{topology}-{}", std::process::id()),
            )
            .env("LD_LIBRARY_PATH", &built().simcuda)
    })
}

/// The same of the real GPUs of this machine.
pub fn model_of_this_machine() -> PathBuf {
    measured("this machine", |command| command)
}

/// All tests that were built together share one, as what is measured depends on nothing else. Each test is a process.
fn measured(node: &str, on_it: impl FnOnce(&mut Command) -> &mut Command) -> PathBuf {
    let folder = &built().folder;
    let built_at = ["anabranch", "simcuda/libcuda.so.1"].map(|name| {
        let file = fs::metadata(folder.join(name)).and_then(|file| file.modified());
        let age = file.ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        age.map_or(0, |age| age.as_micros())
    });
    let folder = folder.join(format!("test-models-{}-{}", built_at[0], built_at[1]));
    fs::create_dir_all(&folder).expect("the folder of measurements can be made");
    let file = folder.join(format!("{node}.json"));
    if file.exists() {
        return file;
    }
    let draft = folder.join(format!("{node}-{}.json", std::process::id()));
    let mut command = Command::new(&built().command);
    command.args(["topo", "--measure", "--model"]).arg(&draft);
    let output = on_it(&mut command).output().expect("the command runs");
    assert!(output.status.success(), "{output:?}");
    std::fs::rename(&draft, &file).expect("kept");
    file
}

/// What a job in which a call of the driver's fails has met: no message is lost. None where the call was the program's own, which it
/// reports.
pub fn troubles(plan: &str, outcome: &Outcome) -> Option<u64> {
    if outcome.finished.stderr.contains("returned CUDA error") {
        return None;
    }
    outcome.check_passed();
    let total = |name| outcome.stats().total(name);
    assert_eq!(total("errors"), 0, "{plan}: {outcome}");
    Some(total("paths_abandoned") + total("retries") + total("driver_retries"))
}

/// Compiles a library from this source, in C, to be loaded into ranks.
pub fn shared_object(folder: &Path, name: &str, source: &str) -> String {
    let file = folder.join(format!("{name}.c"));
    let library = folder.join(format!("{name}.so"));
    std::fs::write(&file, source).expect("source");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library);
    let output = compiler.arg(&file).output().expect("the compiler runs");
    assert!(output.status.success(), "{output:?}");
    library.display().to_string()
}

/// Whether tests go through everything (`TEST_LONG=1`, which `ci/long tests` sets), not through a part of it.
pub fn is_long() -> bool {
    std::env::var("TEST_LONG").is_ok_and(|long| long == "1")
}

/// What a test goes through: everything, or so much of it, evenly spread, the last one among it.
pub fn some<T: Copy>(all: &[T], few: usize) -> Vec<T> {
    if is_long() || few >= all.len() {
        return all.to_vec();
    }
    (1..=few)
        .map(|part| all[part * all.len() / few - 1])
        .collect()
}

/// Makes a run up to five times, until it shows what ranks can show only while each has a processor: a busy machine has them run
/// one after the other. What every run must show, the run asserts itself.
///
/// # Panics
/// If none shows it. The run's second result is the text to say so with.
pub fn in_one_of_several(mut run: impl FnMut() -> (bool, String)) {
    let mut last = String::new();
    for _ in 0..5 {
        let (is_shown, text) = run();
        if is_shown {
            return;
        }
        last = text;
    }
    panic!("in none of five runs\n{last}");
}

/// Runs a test on one MPI library, if it is there.
pub fn on(name: &str, test: impl FnOnce(&Mpi)) {
    if let Some(mpi) = mpi_or_skip(name) {
        test(mpi);
    }
}

/// Makes of each function a test on every MPI library: `NAME::openmpi`, `NAME::mpich`, ...
macro_rules! on_every_mpi {
    ($($name:ident),* $(,)?) => {$(
        mod $name {
            #[test]
            fn openmpi() { $crate::support::on("openmpi", super::$name); }
            #[test]
            fn mpich() { $crate::support::on("mpich", super::$name); }
            #[test]
            fn openmpi5() { $crate::support::on("openmpi5", super::$name); }
            #[test]
            fn mpich5() { $crate::support::on("mpich5", super::$name); }
            #[test]
            fn mpich5_abi() { $crate::support::on("mpich5-abi", super::$name); }
        }
    )*};
}
pub(crate) use on_every_mpi;
