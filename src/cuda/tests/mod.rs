//! The CUDA part over the simulated driver.
//!
//! What is under test is state of a process (the driver it has, whether that is initialized, forks), so each scenario
//! runs in a process of its own: this test binary again, with the role in the environment and the simulated driver on
//! its library path.

pub(crate) mod bench;
mod copies;
mod pointers;
mod sharing;
mod state;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub(crate) const ROLE: &str = "ANABRANCH_CUDA_TEST_ROLE";
/// A scenario that takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// Folder with the simulated `libcuda.so.1`, built if it is not current; or why there is none.
fn simulator() -> Result<&'static Path, &'static str> {
    static FOLDER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    FOLDER
        .get_or_init(|| Ok(xtask::build::fresh_layout(false)?.simcuda()))
        .as_ref()
        .map(PathBuf::as_path)
        .map_err(String::as_str)
}

/// This test binary once more, in a role of one of its tests.
fn command(test: &str, role: &str, job: &str, library_path: Option<&Path>) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the test binary"));
    command
        .args(["--exact", test, "--nocapture"])
        .env(ROLE, role)
        .env("SIMCUDA_JOB", job)
        .env("SIMCUDA_TOPOLOGY", "hgx-h200")
        .env_remove("LD_LIBRARY_PATH")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    if let Some(folder) = library_path {
        command.env("LD_LIBRARY_PATH", folder);
    }
    command
}

fn run(roles: &[&str], with_driver: bool, extra: &[(&str, &str)]) {
    run_roles("cuda::tests::role", roles, with_driver, extra);
}

/// Runs roles of a test at the same time, as processes of one simulated node, and expects success of each.
pub(crate) fn run_roles(test: &str, roles: &[&str], with_driver: bool, extra: &[(&str, &str)]) {
    let folder = match simulator() {
        Ok(folder) => folder,
        Err(reason) => {
            println!("skipped: the simulated driver cannot be built: {reason}");
            return;
        }
    };
    let job = format!("unit-{}-{}", std::process::id(), roles.join("-"));
    let folder_text = folder.to_string_lossy();
    let children: Vec<_> = roles
        .iter()
        .map(|role| {
            command(test, role, &job, with_driver.then_some(folder))
                .env("ANABRANCH_CUDA_TEST_FOLDER", &*folder_text)
                .env("ANABRANCH_CUDA_TEST_SOCKET", folder.join(&job))
                .envs(extra.iter().copied())
                .spawn()
                .expect("the test binary starts")
        })
        .collect();
    for (role, child) in roles.iter().zip(children) {
        let output = wait(child);
        assert!(
            output.status.success(),
            "{role}: {}\n{}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            text.contains("scenario complete"),
            "{role} did nothing:\n{text}"
        );
    }
}

/// Collects a child's output; kills it if it hangs.
fn wait(mut child: std::process::Child) -> Output {
    let start = Instant::now();
    while child.try_wait().expect("a child of ours").is_none() {
        if start.elapsed() > PATIENCE {
            let _ = child.kill();
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().expect("a child of ours")
}

/// The scenarios. In an ordinary run there is no role and nothing to do.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    match role.as_str() {
        "inert" => pointers::inert(),
        "host_only" => pointers::host_only(),
        "pointers" => pointers::pointers(),
        "guard" => state::guard(),
        "lanes" => copies::lanes(),
        "timed" => copies::timed(),
        "lost_context" => copies::lost_context(),
        "capture" => copies::capture(),
        "pinned" => state::pinned(),
        "fork" => state::fork(),
        "exporter" => sharing::exporter(),
        "importer" => sharing::importer(),
        other => panic!("unknown role {other}"),
    }
    println!("scenario complete");
}

#[test]
fn without_a_driver_everything_is_host_memory() {
    run(&["inert"], false, &[]);
}

#[test]
fn a_program_that_never_uses_the_gpu_has_host_memory_only() {
    run(&["host_only"], true, &[]);
}

#[test]
fn pointers_of_every_kind_are_told_apart() {
    run(&["pointers"], true, &[]);
}

#[test]
fn entering_a_context_leaves_no_trace() {
    run(&["guard"], true, &[]);
}

#[test]
fn copies_of_every_shape_move_the_bytes() {
    run(&["lanes"], true, &[]);
}

#[test]
fn copies_are_timed_by_the_clock_of_the_device() {
    run(&["timed"], true, &[]);
}

#[test]
fn a_context_destroyed_under_the_lanes_is_an_error() {
    run(&["lost_context"], true, &[]);
}

#[test]
fn a_capture_of_the_program_survives_the_engine() {
    run(&["capture"], true, &[]);
}

#[test]
fn pinned_memory_is_bounded_and_reused() {
    run(&["pinned"], true, &[]);
}

#[test]
fn a_forked_child_has_no_driver() {
    run(&["fork"], true, &[]);
}

#[test]
fn an_allocation_is_read_by_a_process_that_sees_another_gpu() {
    run(&["exporter", "importer"], true, &[]);
}
