//! Programs of every kind: what the loader makes of them, which MPI they use, and what keeps the library out.

use super::*;

/// Looks at a program on a node on which all else is well.
fn look(installation: &Installation, program: &[&str]) -> Seen {
    Seen::by(
        installation.with_gpus().arg("--no-gpu-test"),
        installation,
        program,
    )
}

#[test]
fn what_is_no_program_is_named() {
    let installation = Installation::new();
    look(&installation, &["./missing", "--arg"]).assert_only_reason(&["./missing", "no such file"]);
    look(&installation, &["no-such-program"])
        .assert_only_reason(&["no-such-program", "not found in PATH"]);
    look(&installation, &["./bin"]).assert_only_reason(&["./bin", "folder"]);
    let file = installation.path("data");
    fs::write(&file, "x").expect("written");
    set_mode(&file, 0o644);
    look(&installation, &["./data"]).assert_only_reason(&["./data", "not executable"]);
    let program = fs::read("/bin/true").expect("read");
    let damaged = installation.path("damaged");
    fs::write(&damaged, &program[..program.len() / 3]).expect("written");
    set_mode(&damaged, 0o755);
    look(&installation, &["./damaged"]).assert_only_reason(&["damaged ELF"]);
    // Bytes 18 and 19 of an ELF file are its machine; 243 is RISC-V.
    let mut foreign = program;
    foreign[18] = 243;
    foreign[19] = 0;
    let path = installation.path("foreign");
    fs::write(&path, foreign).expect("written");
    set_mode(&path, 0o755);
    look(&installation, &["./foreign"])
        .assert_only_reason(&["64-bit riscv", "one kind of machine"]);
}

#[test]
fn a_static_program_cannot_be_preloaded() {
    let installation = Installation::new();
    let source = "int main(void) { return 0; }";
    let flags = [["-static"], ["-static-pie"]];
    for (name, flags) in ["static", "static-pie"].iter().zip(flags) {
        match installation.compile(Path::new("gcc"), name, source, &flags) {
            Ok(_) => {
                let seen = look(&installation, &[&format!("./{name}")]);
                seen.assert_only_reason(&["static", "preloaded", "link it dynamically"]);
            }
            Err(said) => skip_missing(name, &said),
        }
    }
    installation.gcc("dynamic", source, &[]);
    let seen = look(&installation, &["./dynamic"]);
    assert_eq!(
        (seen.status, &seen.json["program"]["is_dynamic"]),
        (0, &Value::Bool(true)),
        "{}",
        seen.text
    );
    assert!(seen.text.contains("links no MPI"), "{}", seen.text);
}

#[test]
fn behind_a_script_stands_its_interpreter() {
    let installation = Installation::new();
    let script = |name: &str, text: &str| {
        let path = installation.path(name);
        fs::write(&path, text).expect("written");
        set_mode(&path, 0o755);
    };
    script("shell", "#!/bin/sh\nexec ./app\n");
    let seen = look(&installation, &["./shell"]);
    assert_eq!(
        (seen.status, &seen.json["program"]["interpreter"]),
        (0, &Value::from("/bin/sh")),
        "{}",
        seen.text
    );
    assert!(
        seen.text.contains("what the script starts or loads"),
        "{}",
        seen.text
    );
    // The Python is asked, the script is not run.
    script(
        "python3",
        "#!/usr/bin/env python3\nopen('ran', 'w').close()\n",
    );
    let seen = look(&installation, &["./python3"]);
    assert!(!installation.path("ran").exists(), "{}", seen.text);
    let version = seen.json["program"]["python"]["version"].as_str();
    assert!(
        version.is_some_and(|version| version.starts_with("3.")),
        "{}",
        seen.text
    );
    script("lost", "#!/no/such/interpreter\n");
    look(&installation, &["./lost"])
        .assert_only_reason(&["interpreter /no/such/interpreter is missing"]);
    script("found", "#!/usr/bin/env no-such-interpreter\n");
    look(&installation, &["./found"])
        .assert_only_reason(&["no-such-interpreter is not found in PATH"]);
    let own = installation.path("round");
    script("round", &format!("#!{}\n", own.display()));
    look(&installation, &["./round"]).assert_only_reason(&["too many interpreters"]);
}

/// Behind a launcher, a shell script or both is the program that counts.
#[test]
fn behind_wrappers_stands_the_program() {
    let installation = Installation::new();
    let mpi = "int MPI_Send(void) { return 0; } int PMPI_Send(void) { return 0; }";
    installation.gcc(
        "libmpi.so.40",
        mpi,
        &["-shared", "-fPIC", "-Wl,-soname,libmpi.so.40"],
    );
    let flags = ["-Wl,--no-as-needed,-rpath,$ORIGIN", "./libmpi.so.40"];
    installation.gcc("app", "int main(void) { return 0; }", &flags);
    let script = |name: &str, text: &str| {
        fs::write(installation.path(name), text).expect("written");
        set_mode(&installation.path(name), 0o755);
    };
    script(
        "wrap",
        "#!/bin/sh\nexport CUDA_VISIBLE_DEVICES=$RANK\nexec \"$@\"\n",
    );
    script(
        "own",
        "#!/bin/bash\ncd /\nexec \"$(dirname \"$0\")/app\" 1 2\n",
    );
    script("drops", "#!/bin/sh\nexport LD_PRELOAD=/a.so\n./app\n");
    for (words, program) in [
        (&["mpirun", "-np", "2", "./app"][..], "./app"),
        (&["./wrap", "./app", "x"], "./wrap"),
        (&["./own"], "./own"),
        (
            &["srun", "-n", "2", "./wrap", "numactl", "-N", "0", "./app"],
            "./wrap",
        ),
        (&["./drops"], "./drops"),
    ] {
        let seen = look(&installation, words);
        let found = &seen.json["program"];
        assert_eq!(
            found["mpi"]["soname"], "libmpi.so.40",
            "{words:?} {}",
            seen.text
        );
        assert_eq!(found["asked"], program, "{}", seen.text);
        assert_eq!(seen.status, 0, "{}", seen.text);
        assert_eq!(
            seen.text.contains("line 2 of") && seen.text.contains("add :$LD_PRELOAD"),
            words == ["./drops"],
            "{}",
            seen.text
        );
    }
    // What a container holds is not seen.
    script("docker", "#!/bin/sh\nexit 0\n");
    let seen = look(&installation, &["./docker", "run", "image", "./app"]);
    assert!(
        seen.text
            .contains("docker run --gpus all --ipc=host IMAGE anabranch doctor ./app"),
        "{}",
        seen.text
    );
}

/// Tools over MPI's profiling interface are named with their place; one that cannot work there is a reason.
#[test]
fn tools_are_named_with_their_place() {
    let installation = Installation::new();
    let wrapper = "int PMPI_Send(void); int MPI_Send(void) { return PMPI_Send(); }";
    installation.gcc("libwrapper.so", wrapper, &["-shared", "-fPIC"]);
    let bypass =
        "#include <dlfcn.h>\nint MPI_Send(void) { return !dlsym(RTLD_NEXT, \"MPI_Send\"); }";
    installation.gcc(
        "libbypass.so",
        &format!("#define _GNU_SOURCE\n{bypass}"),
        &["-shared", "-fPIC"],
    );
    let mpi = "int MPI_Send(void) { return 0; } int PMPI_Send(void) { return 0; }";
    installation.gcc("libother.so", mpi, &["-shared", "-fPIC"]);
    let main = "int main(void) { return 0; }";
    let link = |name: &str, library: &str| {
        let flags = [
            "-Wl,--no-as-needed,--allow-shlib-undefined,-rpath,$ORIGIN",
            "-L.",
            library,
        ];
        installation.gcc(name, main, &flags);
        look(&installation, &[&format!("./{name}")])
    };
    let seen = link("with_wrapper", "-lwrapper");
    assert!(
        seen.text
            .contains("libwrapper.so (linked with the program: the library calls it first)"),
        "{}",
        seen.text
    );
    assert_eq!(
        seen.json["program"]["tools"][0]["uses_pmpi"], true,
        "{}",
        seen.text
    );
    // One that is in use goes by its name.
    installation.gcc("libmpiP.so", wrapper, &["-shared", "-fPIC"]);
    let seen = link("with_known", "-lmpiP");
    assert_eq!(
        seen.json["program"]["tools"][0]["name"], "mpiP",
        "{}",
        seen.text
    );
    assert!(seen.text.contains("mpiP, "), "{}", seen.text);
    link("with_bypass", "-lbypass").assert_only_reason(&[
        "libbypass.so",
        "calls none of PMPI",
        "in front",
    ]);
    // What has PMPI functions itself is an MPI library.
    let seen = link("with_other", "-lother");
    assert_eq!(
        seen.json["program"]["tools"].as_array().map(Vec::len),
        Some(0),
        "{}",
        seen.text
    );
    let preloaded = installation.path("libbypass.so");
    let seen = Seen::by(
        installation
            .with_gpus()
            .arg("--no-gpu-test")
            .env("LD_PRELOAD", &preloaded),
        &installation,
        &["./with_bypass"],
    );
    assert_eq!(seen.status, 0, "{}", seen.text);
    assert!(
        seen.text
            .contains("libbypass.so (preloaded: it is called first)"),
        "{}",
        seen.text
    );
}

#[test]
fn privileges_keep_the_library_out() {
    // SAFETY: takes nothing and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        return skip("a setuid program", "only root can make one of another user");
    }
    let installation = Installation::new();
    let folder = tempfile::tempdir().expect("a folder");
    set_mode(folder.path(), 0o755);
    let program = folder.path().join("app");
    // Written by another process: see above.
    let copied = Command::new("cp").arg("/bin/true").arg(&program).status();
    assert!(copied.is_ok_and(|status| status.success()));
    let name = program.to_str().expect("UTF-8");
    for (owner, mode) in [(0, 0o755), (0, 0o4755), (65534, 0o4755)] {
        std::os::unix::fs::chown(&program, Some(owner), Some(0)).expect("root may");
        set_mode(&program, mode);
        // The loader complains of what it cannot preload, unless it ignores the variable.
        let asked = Command::new(&program)
            .env("LD_PRELOAD", "/no/such/library.so")
            .output()
            .expect("started");
        let heeded = String::from_utf8_lossy(&asked.stderr).contains("cannot be preloaded");
        let seen = look(&installation, &[name]);
        if heeded {
            assert_eq!(seen.status, 0, "{owner} {mode:o}\n{}", seen.text);
        } else {
            seen.assert_only_reason(&["setuid to user 65534", "ignores LD_PRELOAD", "run a copy"]);
        }
        assert_eq!(
            seen.text.contains("is setuid"),
            mode == 0o4755,
            "{}",
            seen.text
        );
    }
}

#[test]
fn each_mpi_is_known_by_the_library_that_is_linked() {
    use xtask::mpi::Family;
    let installation = Installation::new();
    let found = xtask::mpi::find(&Layout::new(false).wheels());
    if found.is_empty() {
        return skip_missing("linked MPI", "no MPI found; see ci/setup");
    }
    let source = "#include <mpi.h>\nint main(int c, char **v) { MPI_Init(&c, &v); MPI_Send(v, 0, MPI_BYTE, MPI_PROC_NULL, 0, MPI_COMM_WORLD); return MPI_Finalize(); }";
    for mpi in found {
        let program = installation
            .compile(&mpi.mpicc, &mpi.name, source, &[])
            .expect("compiled");
        let mut path = installation.path("sim").into_os_string();
        if let Some(folder) = &mpi.library_folder {
            path.push(":");
            path.push(folder);
        }
        let mut command = installation.with_gpus();
        command.env("LD_LIBRARY_PATH", &path).arg("--no-gpu-test");
        let name = format!("./{}", mpi.name);
        let seen = Seen::by(&mut command, &installation, &[&name, "-np", "--json"]);
        assert_eq!(seen.status, 0, "{}", seen.text);
        let (abi, launcher) = match mpi.family {
            Family::OpenMpi4 | Family::OpenMpi5 => ("Open MPI", "mpirun"),
            Family::Mpich => ("MPICH", "mpiexec"),
            Family::StandardAbi => ("MPI 5 standard", "mpiexec"),
        };
        let linked = &seen.json["program"]["mpi"];
        assert_eq!(linked["abi"], abi, "{}", mpi.name);
        let switch_on = seen.json["verdict"]["switch_on"].as_str().expect("a line");
        assert!(
            switch_on.starts_with(launcher) && switch_on.ends_with(&name),
            "{switch_on}"
        );
        // The loader's own list.
        let listed = Command::new("ldd")
            .arg(&program)
            .env("LD_LIBRARY_PATH", &path)
            .output()
            .expect("ldd");
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        let soname = linked["soname"].as_str().expect("a name");
        let line = format!("{soname} => {} (", linked["path"].as_str().expect("a path"));
        assert!(listed.contains(&line), "{line}\n{listed}");
    }
}

#[test]
fn an_mpi_that_cannot_be_taken_is_named() {
    let installation = Installation::new();
    let calls = "int MPI_Send(void); int main(void) { return MPI_Send(); }";
    let defines = "int PMPI_Send(void) { return 0; } int MPI_Send(void) { return 0; }";
    installation.gcc("inside", &format!("{defines} {calls}"), &[]);
    look(&installation, &["./inside"]).assert_only_reason(&["statically", "MPI"]);
    let library = ["-shared", "-fPIC", "-Wl,-soname,libmpi.so.20"];
    installation.gcc("libmpi.so.20", defines, &library);
    let link = ["-Wl,-rpath,$ORIGIN", "libmpi.so.20"];
    installation.gcc("old", calls, &link);
    let seen = look(&installation, &["./old"]);
    seen.assert_only_reason(&["libmpi.so.20 is no known MPI"]);
    let place = installation.path("libmpi.so.20");
    assert_eq!(
        seen.json["program"]["mpi"]["path"].as_str(),
        place.to_str(),
        "{}",
        seen.text
    );
    fs::remove_file(place).expect("removed");
    look(&installation, &["./old"])
        .assert_only_reason(&["libmpi.so.20 not found", "LD_LIBRARY_PATH"]);
}

#[test]
fn libraries_of_libraries_are_found_as_the_loader_finds_them() {
    let installation = Installation::new();
    fs::create_dir(installation.path("deep")).expect("created");
    let shared = ["-shared", "-fPIC"];
    installation.gcc(
        "deep/libmpi_own.so.40",
        "int PMPI_Send(void) { return 0; }",
        &[&shared[..], &["-Wl,-soname,libmpi_own.so.40"]].concat(),
    );
    let outer = [
        &shared[..],
        &["-Wl,-soname,libouter.so", "deep/libmpi_own.so.40"],
    ]
    .concat();
    installation.gcc(
        "deep/libouter.so",
        "int PMPI_Send(void); int outer(void) { return PMPI_Send(); }",
        &outer,
    );
    // RPATH holds for what the libraries need, RUNPATH for what the program itself needs only.
    for (name, tags) in [
        ("old-tags", "-Wl,--disable-new-dtags"),
        ("new-tags", "-Wl,--enable-new-dtags"),
    ] {
        let flags = [
            tags,
            "-Wl,-rpath,${ORIGIN}/deep",
            "-Wl,-rpath-link,deep",
            "deep/libouter.so",
        ];
        let program = installation.gcc(
            name,
            "int outer(void); int main(void) { return outer(); }",
            &flags,
        );
        let listed = Command::new("ldd").arg(&program).output().expect("ldd");
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        let expected = installation.path("deep/libmpi_own.so.40");
        let is_found = listed.contains(&format!("libmpi_own.so.40 => {}", expected.display()));
        let seen = look(&installation, &[&format!("./{name}")]);
        assert_eq!(is_found, name == "old-tags", "{listed}");
        assert_eq!(seen.status, i32::from(!is_found), "{listed}\n{}", seen.text);
        if is_found {
            assert_eq!(
                seen.json["program"]["mpi"]["path"].as_str(),
                expected.to_str(),
                "{}",
                seen.text
            );
        } else {
            seen.assert_only_reason(&["libmpi_own.so.40 not found"]);
        }
    }
}
