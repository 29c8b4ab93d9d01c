//! `anabranch run` with stand-ins for the launcher: what it is told, and what comes back.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// A script that was just written cannot be started while another test, forked meanwhile, still
/// holds it open: one test at a time.
static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());

/// Writes a launcher that says which MPI it is, and else prints its arguments and runs what
/// follows the launcher's options, once.
fn launcher(folder: &Path, version: &str) -> std::path::PathBuf {
    let path = folder.join("mpirun");
    let script = format!(
        "#!/bin/sh\nif [ \"$1\" = --version ]; then echo '{version}'; exit 0; fi\n\
         echo \"launcher $* preload=$LD_PRELOAD\" >&2\n\
         while [ \"${{1##*/}}\" != anabranch ]; do shift; done\nexec \"$@\"\n"
    );
    fs::write(&path, script).expect("written");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("made executable");
    path
}

fn run(launcher: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_anabranch"));
    command
        .arg("run")
        .arg("--mpi")
        .arg(launcher)
        .args(arguments)
        .env_remove("LD_PRELOAD");
    let output = command
        .env("ANABRANCH_EAGER", "1K")
        .output()
        .expect("started");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

#[test]
fn the_launcher_gets_the_options_of_its_family() {
    let _guard = ONE_AT_A_TIME
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    let folder = tempfile::tempdir().expect("a folder");
    let command = [
        "-np",
        "999",
        "--vanilla",
        "--mpirun-arg",
        "--quiet",
        "--",
        "echo",
        "-np",
        "hello",
    ];
    for (version, expected) in [
        ("mpirun (Open MPI) 4.1.4", "-np 999 --oversubscribe"),
        (
            "mpirun (Open MPI) 5.0.11",
            "-np 999 --map-by :OVERSUBSCRIBE",
        ),
        ("HYDRA build details:", "-np 999 --quiet"),
    ] {
        let (status, stdout, stderr) = run(&launcher(folder.path(), version), &command);
        assert_eq!(
            (status, stdout.as_str()),
            (Some(0), "-np hello\n"),
            "{stderr}"
        );
        assert!(stderr.contains(&format!("launcher {expected}")), "{stderr}");
        assert_eq!(
            stderr.contains("-x ANABRANCH_EAGER"),
            version.contains("Open MPI"),
            "{stderr}"
        );
        assert!(stderr.contains("--quiet"), "{stderr}");
        assert!(
            stderr.trim_end().ends_with("preload="),
            "the launcher itself is not preloaded: {stderr}"
        );
    }
}

#[test]
fn the_status_is_that_of_the_launcher() {
    let _guard = ONE_AT_A_TIME
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    let folder = tempfile::tempdir().expect("a folder");
    let launcher = launcher(folder.path(), "HYDRA build details:");
    assert_eq!(
        run(
            &launcher,
            &["-n", "1", "--vanilla", "--", "sh", "-c", "exit 7"]
        )
        .0,
        Some(7)
    );
    assert_eq!(
        run(
            &launcher,
            &["-n", "1", "--vanilla", "--", "sh", "-c", "kill -15 $$"]
        )
        .0,
        Some(143)
    );
}

#[test]
fn bad_input_is_one_line_and_starts_nothing() {
    let _guard = ONE_AT_A_TIME
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    let folder = tempfile::tempdir().expect("a folder");
    let good = launcher(folder.path(), "HYDRA build details:");
    let text = folder.path().join("text");
    fs::write(&text, "no program").expect("written");
    let empty = folder.path().join("empty");
    fs::create_dir(&empty).expect("a folder");
    let echo = ["-np", "2", "--vanilla", "--", "echo"];
    // Root may write into any folder but those of the kernel.
    let cases: [(&Path, &[&str], i32, &str); 10] = [
        (
            &good,
            &["-np", "2", "--stats", "/proc/self/stats.json", "--", "echo"],
            2,
            "--stats: no file can be written in /proc/self (",
        ),
        (
            &good,
            &["-np", "2", "--trace", "/no/such/folder/t", "--", "echo"],
            2,
            "--trace: no file can be written in /no/such/folder (No such file",
        ),
        (
            &good,
            &["-np", "2", "--vanilla", "--", "no-such-program"],
            127,
            "no-such-program: not found",
        ),
        (
            Path::new("/no/such/mpirun"),
            &["-np", "2", "--vanilla", "--", "echo"],
            127,
            "--mpi /no/such/mpirun: no launcher found: no such file or folder; give openmpi, mpich, the name of a launcher in PATH",
        ),
        (&text, &echo, 126, "no launcher found: not an executable file"),
        (&empty, &echo, 127, "none in this folder or its bin"),
        (
            Path::new("mpirun.of-nobody"),
            &echo,
            127,
            "--mpi mpirun.of-nobody: no launcher found: no program of this name in PATH; give openmpi",
        ),
        (
            Path::new("sh"),
            &echo,
            126,
            "sh does not say for --version that it is of Open MPI or of the MPICH family",
        ),
        (
            Path::new("/bin/true"),
            &echo,
            126,
            "/bin/true does not say for --version",
        ),
        (&good, &["-np", "0", "--", "echo"], 2, "-n"),
    ];
    for (launcher, arguments, expected, text) in cases {
        let (status, stdout, stderr) = run(launcher, arguments);
        assert_eq!((status, stdout.as_str()), (Some(expected), ""), "{stderr}");
        assert!(stderr.contains(text), "{stderr}");
        assert!(text == "-n" || stderr.lines().count() == 1, "{stderr}");
    }
}

/// A launcher of any name is found in PATH, as a shell does.
#[test]
fn a_launcher_is_named_as_it_is_in_path() {
    let _guard = ONE_AT_A_TIME
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    let folder = tempfile::tempdir().expect("a folder");
    let path = std::env::var("PATH").expect("PATH");
    for (name, version, expected) in [
        ("mpiexec.hydra", "HYDRA build details:", "launcher -n"),
        ("mpirun.mpich", "HYDRA build details:", "launcher -n"),
        (
            "orterun",
            "orterun (OpenRTE) 4.1.4",
            "launcher -np 999 --oversubscribe",
        ),
        (
            "prterun",
            "prterun (PRRTE) 3.0.14",
            "launcher -np 999 --map-by :OVERSUBSCRIBE",
        ),
        ("prterun", "", "launcher -np 999 --map-by :OVERSUBSCRIBE"),
        (
            "mpirun-of-my-own",
            "mpirun (Open MPI) 5.0.11",
            "launcher -np 999 --map-by :OVERSUBSCRIBE",
        ),
    ] {
        fs::rename(launcher(folder.path(), version), folder.path().join(name)).expect("renamed");
        let output = Command::new(env!("CARGO_BIN_EXE_anabranch"))
            .args(["run", "--mpi", name, "-np", "999", "--vanilla"])
            .args(["--", "echo", "hello"])
            .env("PATH", format!("{}:{path}", folder.path().display()))
            .env_remove("LD_PRELOAD")
            .output()
            .expect("started");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.stdout, b"hello\n", "{name}: {stderr}");
        assert!(stderr.contains(expected), "{name}: {stderr}");
    }
}
