//! Namespaces: other nodes, containers, and file systems that only one job sees.
//!
//! They need root, or user namespaces, and a container around the tests may forbid them.

use crate::machine::{cannot_be_made_here, needs_simulator};
use std::process::Command;

fn unshare(what: &[&str]) -> Vec<String> {
    let mut words = vec!["unshare".to_owned()];
    // SAFETY: no preconditions.
    if unsafe { libc::getuid() } != 0 {
        words.push("--map-root-user".to_owned());
    }
    words.extend(what.iter().map(|word| (*word).to_owned()));
    words
}

const OWN_PIDS: [&str; 4] = ["--pid", "--fork", "--mount-proc", "--kill-child"];

/// Command that runs another one with mounts of its own, after `script` has run there.
pub fn own_mounts(script: &str) -> Vec<String> {
    let mut words = unshare(&["--mount"]);
    words.extend(shell(script));
    words
}

/// Command that runs another one as in a container, with processes and mounts of its own, after `script` has run there.
pub fn own_container(script: &str) -> Vec<String> {
    let mut words = unshare(&["--mount"]);
    words.extend(OWN_PIDS.map(str::to_owned));
    // Launchers name temporary files by process, and processes have the same numbers in each container.
    let own = "TMPDIR=$(mktemp -d) && export TMPDIR && trap 'rm -rf \"$TMPDIR\"' EXIT && \"$@\"";
    words.extend(["sh", "-c", &format!("{script} && {own}"), "sh"].map(str::to_owned));
    words
}

/// Command that runs another one as on a node of its own.
pub fn own_node() -> Vec<String> {
    let mut words = unshare(&["--mount", "--net", "--uts"]);
    words.extend(OWN_PIDS.map(str::to_owned));
    words
}

fn shell(script: &str) -> [String; 4] {
    let script = format!("{script} && exec \"$@\"");
    ["sh", "-c", &script, "sh"].map(str::to_owned)
}

/// Whether what these functions give works on this machine; if not, says so. `kind` is one of them, with a script that
/// does what the test needs.
pub fn permitted(kind: &[String]) -> bool {
    needs_simulator("namespaces");
    let output = Command::new(&kind[0]).args(&kind[1..]).arg("true").output();
    let why = match output {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => format!("unshare: {error}"),
    };
    cannot_be_made_here("no namespaces of its own", &why);
    false
}

/// Whether [`own_node`] works here, and a network between two of them.
pub fn nodes_permitted() -> bool {
    let mut kind = own_node();
    kind.extend(shell(
        "ip link add try1 type veth peer name try2 && mount -t sysfs sysfs /sys",
    ));
    permitted(&kind)
}
