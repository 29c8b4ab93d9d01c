//! Tests of the node's file: what others may have laid in its place.

use super::*;
use std::os::unix::fs::{symlink, PermissionsExt};

/// Anybody may lay something in /dev/shm under the name of another user's node.
#[test]
fn what_is_no_private_file_of_this_user_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let victim = folder.path().join("victim");
    std::fs::write(&victim, "precious").expect("written");
    let path = folder.path().join("simcuda-0.lock");
    let refused = |what: &str| {
        let error = open(&path).expect_err(what).to_string();
        assert!(
            error.ends_with("remove it, or have its owner do so"),
            "{what}: {error}"
        );
        assert!(
            error.starts_with(&path.display().to_string()),
            "{what}: {error}"
        );
    };
    symlink(&victim, &path).expect("a link");
    refused("a link");
    std::fs::remove_file(&path).expect("removed");
    std::fs::create_dir(&path).expect("a folder");
    refused("a folder");
    std::fs::remove_dir(&path).expect("removed");
    open(&path).expect("a new one");
    open(&path).expect("the same");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o660)).expect("a mode");
    refused("open to a group");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("a mode");
    if getuid().is_root() {
        std::os::unix::fs::chown(&path, Some(65_534), None).expect("given away");
        refused("another user's");
    }
    assert_eq!(std::fs::read_to_string(&victim).expect("read"), "precious");
}

/// A node's file that is too short would be a SIGBUS.
#[test]
fn a_nodes_file_that_is_in_use_and_too_short_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let uid = getuid().as_raw();
    let path = folder.path().join(format!("simcuda-{uid}-{:016x}", 5));
    let file = open(&path).expect("a new one");
    file.set_len(100).expect("short");
    flock(&file, FlockOperation::LockShared).expect("in use");
    let error = join_in(folder.path(), 5, 1, 1 << 20, Backing::Unlimited)
        .err()
        .expect("refused");
    assert!(error.to_string().contains("another layout"), "{error}");
}
