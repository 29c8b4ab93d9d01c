//! `anabranch exec` as users meet it: what the command sees, what the shell gets back.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

mod common;
use common::Installation;

impl Installation {
    /// Puts a stand-in for the library there: it is known by what it exports.
    fn library(&self, name: &str) -> PathBuf {
        self.library_of(name, "")
    }

    /// The same with more code.
    fn library_of(&self, name: &str, more: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        let source = self.path("stand-in.c");
        fs::write(
            &source,
            format!("const char *anabranch_version(void) {{ return \"0\"; }}\n{more}"),
        )
        .expect("written");
        let status = Command::new("gcc")
            .args(["-shared", "-fPIC", "-o"])
            .args([&path, &source])
            .status();
        assert!(status.expect("gcc").success());
        path
    }

    fn command(&self) -> Command {
        let mut command = Command::new(self.path("bin/anabranch"));
        command
            .env_remove("LD_PRELOAD")
            .env_remove("ANABRANCH_LIBRARY");
        command
    }
}

/// Some shared library, which is not the one.
fn loaded_library() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").expect("readable");
    let paths = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5));
    paths
        .map(PathBuf::from)
        .find(|path| path.to_string_lossy().contains("libgcc_s"))
        .expect("libgcc_s is loaded")
}

fn run(command: &mut Command) -> (i32, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().expect("started");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (
        status.code().expect("an exit status"),
        text(stdout),
        text(stderr),
    )
}

/// One line that names the command and ends.
fn assert_one_line(stderr: &str, parts: &[&str]) {
    assert!(
        stderr.starts_with("anabranch: ") && stderr.ends_with('\n') && stderr.lines().count() == 1,
        "{stderr:?}"
    );
    for part in parts {
        assert!(stderr.contains(part), "{part:?} is not in {stderr:?}");
    }
}

#[test]
fn the_library_comes_behind_what_is_preloaded() {
    let installation = Installation::bare();
    let library = installation.library("lib/libanabranch.so");
    let other = installation.library("other.so");
    let print = ["exec", "sh", "-c", "printf %s \"$LD_PRELOAD\""];
    assert_eq!(
        run(installation.command().args(print)),
        (0, library.display().to_string(), String::new())
    );
    let both = format!("{}:{}", other.display(), library.display());
    let (status, stdout, _) = run(installation.command().args(print).env("LD_PRELOAD", &other));
    assert_eq!((status, stdout), (0, both.clone()));
    // Started again inside itself, it adds nothing.
    let nested = [
        "exec",
        "--",
        installation.path("bin/anabranch").to_str().expect("UTF-8"),
        "exec",
        "sh",
        "-c",
        "printf %s \"$LD_PRELOAD\"",
    ]
    .map(String::from);
    let (status, stdout, _) = run(installation
        .command()
        .args(nested)
        .env("LD_PRELOAD", &other));
    assert_eq!((status, stdout), (0, both));
}

#[test]
fn the_library_is_found_in_each_of_its_places() {
    for place in [
        "bin/libanabranch.so",
        "lib/libanabranch.so",
        "lib/anabranch/libanabranch.so",
        #[cfg(target_arch = "x86_64")]
        "lib/x86_64-linux-gnu/libanabranch.so",
    ] {
        let installation = Installation::bare();
        let library = installation.library(place);
        let (status, stdout, stderr) =
            run(installation
                .command()
                .args(["exec", "sh", "-c", "printf %s \"$LD_PRELOAD\""]));
        assert_eq!(
            (status, stdout, stderr),
            (0, library.display().to_string(), String::new())
        );
    }
    let installation = Installation::bare();
    let elsewhere = installation.library("elsewhere/any.so");
    let mut command = installation.command();
    command
        .args(["exec", "sh", "-c", "printf %s \"$LD_PRELOAD\""])
        .env("ANABRANCH_LIBRARY", &elsewhere);
    assert_eq!(
        run(&mut command),
        (0, elsewhere.display().to_string(), String::new())
    );
}

#[test]
fn status_arguments_and_streams_are_those_of_the_command() {
    let installation = Installation::bare();
    installation.library("lib/libanabranch.so");
    let script = "echo out; echo err >&2; printf '%s|' \"$@\"; exit 42";
    let (status, stdout, stderr) = run(installation
        .command()
        .args(["exec", "sh", "-c", script, "x", "-np", "--help", "a b", ""]));
    assert_eq!(
        (status, stdout.as_str(), stderr.as_str()),
        (42, "out\n-np|--help|a b||", "err\n")
    );
    let mut killed = installation.command();
    let status = killed
        .args(["exec", "--", "sh", "-c", "kill -9 $$"])
        .status()
        .expect("started");
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&status),
        Some(9)
    );
}

#[test]
fn a_missing_library_is_one_line_that_says_what_to_do() {
    let installation = Installation::bare();
    let (status, stdout, stderr) = run(installation.command().args(["exec", "echo", "started"]));
    assert_eq!((status, stdout.as_str()), (127, ""));
    assert_one_line(&stderr, &["libanabranch.so", "set ANABRANCH_LIBRARY"]);
    let mut command = installation.command();
    let (status, stdout, stderr) = run(command
        .args(["exec", "echo", "started"])
        .env("ANABRANCH_LIBRARY", "/no/such.so"));
    assert_eq!((status, stdout.as_str()), (127, ""));
    assert_one_line(&stderr, &["/no/such.so", "no such file"]);
    let mut command = installation.command();
    let (status, stdout, stderr) = run(command
        .args(["exec", "echo", "started"])
        .env("ANABRANCH_LIBRARY", "/etc/passwd"));
    assert_eq!((status, stdout.as_str()), (126, ""));
    assert_one_line(&stderr, &["/etc/passwd", "not a shared library"]);
    let foreign = loaded_library();
    let mut command = installation.command();
    let (status, stdout, stderr) = run(command
        .args(["exec", "echo", "started"])
        .env("ANABRANCH_LIBRARY", &foreign));
    assert_eq!((status, stdout.as_str()), (126, ""));
    let expected = [
        foreign.to_str().expect("UTF-8"),
        "does not export anabranch_version",
        "unset it, or set it to a libanabranch.so",
    ];
    assert_one_line(&stderr, &expected);
    let (status, stdout, _) =
        run(installation
            .command()
            .args(["exec", "--vanilla", "echo", "started"]));
    assert_eq!((status, stdout.as_str()), (0, "started\n"));
}

#[test]
fn the_library_beside_the_command_has_its_version() {
    let own = env!("CARGO_PKG_VERSION");
    let constant = |version| format!("const char anabranch_release[24] = \"{version}\";");
    let installation = Installation::bare();
    installation.library_of("lib/libanabranch.so", &constant(own));
    let (status, stdout, stderr) = run(installation.command().args(["exec", "echo", "started"]));
    assert_eq!(
        (status, stdout.as_str(), stderr.as_str()),
        (0, "started\n", "")
    );
    let other = installation.library_of("lib/libanabranch.so", &constant("9.8.7"));
    let (status, stdout, stderr) = run(installation.command().args(["exec", "echo", "started"]));
    assert_eq!((status, stdout.as_str()), (126, ""));
    let named = format!("the library is version 9.8.7, this command {own}: install both");
    assert_one_line(&stderr, &[other.to_str().expect("UTF-8"), &named]);
    // One that is named is the user's choice.
    let mut command = installation.command();
    command
        .args(["exec", "echo", "started"])
        .env("ANABRANCH_LIBRARY", &other);
    assert_eq!(run(&mut command), (0, "started\n".into(), String::new()));
}

#[test]
fn a_missing_simulator_names_the_package_that_brings_it() {
    let installation = Installation::bare();
    installation.library("lib/libanabranch.so");
    let mut command = installation.command();
    let (status, stdout, stderr) =
        run(command.args(["run", "--sim", "hgx-h200", "-np", "2", "--", "true"]));
    assert_eq!((status, stdout.as_str()), (127, ""));
    assert_one_line(
        &stderr,
        &["--sim", "libcuda.so.1", "the package anabranch brings it"],
    );
}

#[test]
fn versions_and_completions_are_printed() {
    let installation = Installation::bare();
    let (status, stdout, _) = run(installation.command().arg("--version"));
    let named = format!("anabranch {} (", env!("CARGO_PKG_VERSION"));
    assert!(
        status == 0 && stdout.starts_with(&named) && stdout.lines().count() == 1,
        "{stdout:?}"
    );
    for shell in ["bash", "zsh", "fish"] {
        let (status, stdout, _) = run(installation.command().args(["completions", shell]));
        assert_eq!(status, 0);
        let (shown, hidden) = (stdout.contains("doctor"), stdout.contains("probe"));
        assert!(shown && !hidden, "{shell}: {shown} {hidden}");
    }
    let pages = installation.path("pages");
    fs::create_dir(&pages).expect("a folder");
    assert_eq!(
        run(installation.command().arg("manual").arg(&pages)),
        (0, String::new(), String::new())
    );
    let page = fs::read_to_string(pages.join("anabranch-exec.1")).expect("a page");
    assert!(page.contains("library"), "{page}");
}

#[test]
fn a_command_that_cannot_run_has_the_status_of_a_shell() {
    let installation = Installation::bare();
    installation.library("lib/libanabranch.so");
    for (name, expected) in [
        ("no-such-command", 127),
        ("/no/such/command", 127),
        ("/etc/passwd", 126),
        ("/etc", 126),
    ] {
        let (status, stdout, stderr) = run(installation.command().args(["exec", name]));
        assert_eq!((status, stdout.as_str()), (expected, ""), "{name}");
        assert_one_line(&stderr, &[name]);
    }
}

#[test]
fn a_library_folder_is_searched_first() {
    let installation = Installation::bare();
    let mut command = installation.command();
    command.args([
        "exec",
        "--vanilla",
        "--library-path",
        "/sim",
        "sh",
        "-c",
        "printf %s \"$LD_LIBRARY_PATH\"",
    ]);
    assert_eq!(run(command.env("LD_LIBRARY_PATH", "/a:/b")).1, "/sim:/a:/b");
    assert_eq!(run(command.env_remove("LD_LIBRARY_PATH")).1, "/sim");
}
