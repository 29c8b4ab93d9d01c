//! What is said of messages is what the documents say of them, and what the end-to-end tests count.

use super::{Installation, Seen};

/// What becomes of some messages, with these variables set.
fn fate(of: &str, variables: &[(&str, &str)]) -> Option<String> {
    let installation = Installation::new();
    let mut command = installation.with_gpus();
    command.arg("--no-gpu-test").envs(variables.iter().copied());
    let seen = Seen::by(&mut command, &installation, &[]);
    let messages = seen.json["verdict"]["messages"].as_array().expect("a list");
    let fate = messages.iter().find(|fate| fate["of"] == of)?;
    Some(fate["fate"].as_str().expect("a text").to_owned())
}

#[test]
fn from_host_memory_to_a_device_long_messages_are_taken() {
    let told = |variables: &[(&str, &str)]| fate("host to device", variables).expect("a row");
    let usual = told(&[]);
    assert!(
        usual.starts_with("from 8K taken, through pinned host memory"),
        "{usual}"
    );
    assert!(usual.contains("shorter ones: sent by the MPI"), "{usual}");
    // A threshold holds for these, too.
    let later = told(&[("ANABRANCH_THRESHOLD", "64K")]);
    assert!(later.starts_with("from 64K taken"), "{later}");
}

#[test]
fn small_messages_are_told_apart_only_where_they_are() {
    let told = |threshold: &str, eager: &str| {
        let variables = [
            ("ANABRANCH_THRESHOLD", threshold),
            ("ANABRANCH_EAGER", eager),
        ];
        fate("small ones", &variables)
    };
    let usual = told("", "").expect("a row");
    assert!(
        usual.starts_with("up to 16K (ANABRANCH_EAGER)") && !usual.contains("THRESHOLD"),
        "{usual}"
    );
    assert_eq!(told("0", "0"), None);
    let both = told("4K", "").expect("a row");
    assert!(
        both.contains("below 4K (ANABRANCH_THRESHOLD): by value") && both.contains("up to 16K"),
        "{both}"
    );
}

#[test]
fn memory_that_ipc_does_not_export_is_named() {
    let exportless = fate("pool and VMM memory", &[]).expect("a row");
    for part in ["cudaMallocAsync", "cuMemMap", "sender's pinned host memory"] {
        assert!(exportless.contains(part), "{exportless}");
    }
    let managed = fate("managed memory", &[]).expect("a row");
    assert!(managed.contains("host memory"), "{managed}");
}
