//! `anabranch plan` as users meet it.

use std::process::{Command, Output};

use serde_json::Value;

mod common;
use common::{Installation, ANABRANCH};

fn plan(arguments: &[&str]) -> Output {
    // Neither a driver nor a measurement of this machine.
    let mut command = Command::new(ANABRANCH);
    command
        .arg("plan")
        .args(arguments)
        .env_remove("LD_LIBRARY_PATH");
    command.output().expect("started")
}

fn planned(arguments: &[&str]) -> String {
    let output = plan(arguments);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert_eq!(stderr, "");
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn json(arguments: &[&str]) -> Value {
    let text = planned(&[arguments, &["--json"]].concat());
    serde_json::from_str(&text).expect("JSON")
}

const BELUGA: [&str; 8] = [
    "--from",
    "0",
    "--to",
    "1",
    "--size",
    "512M",
    "--topology",
    "beluga",
];

#[test]
fn paths_shares_and_chunks_are_printed() {
    let text = planned(&BELUGA);
    let line = |path: &str| {
        text.lines()
            .find(|line| line.starts_with(path))
            .expect(path)
            .to_owned()
    };
    for path in [
        "GPU0-GPU1 ",
        "GPU0-GPU2-GPU1 ",
        "GPU0-GPU3-GPU1 ",
        "GPU0-host-GPU1 ",
    ] {
        assert!(line(path).contains(" % "), "{text}");
    }
    assert!(line("predicted: ").contains(" us, "), "{text}");
    // Four paths of 48, 48, 48 and 12.3 GB/s: at most 3.26 times the direct one.
    let gain = line("direct alone: ");
    let gain: f64 = gain
        .split(' ')
        .find_map(|word| word.parse().ok().filter(|gain| (2.0..3.26).contains(gain)))
        .expect("a gain");
    assert!(gain > 2.8, "{text}");
}

/// Relays give way to what goes the other way, and the host's memory is shared with it.
#[test]
fn both_ways_at_once_takes_longer() {
    let alone = json(&BELUGA);
    let both = json(&[&BELUGA[..], &["--both-ways"]].concat());
    assert_eq!([&alone["both_ways"], &both["both_ways"]], [false, true]);
    let us = |plan: &Value| plan["predicted_us"].as_f64().expect("a time");
    let (alone, both) = (us(&alone), us(&both));
    assert!(both > 1.01 * alone, "{alone} us alone, {both} both ways");
    let text = planned(&[&BELUGA[..], &["--both-ways"]].concat());
    assert!(
        text.contains("from GPU0 to GPU1 and back at the same time"),
        "{text}"
    );
}

#[test]
fn json_has_the_copies_and_every_byte_once() {
    let plan = json(&BELUGA);
    assert_eq!(plan["measured"], false);
    let paths = plan["paths"].as_array().expect("paths");
    let bytes: u64 = paths
        .iter()
        .map(|path| path["bytes"].as_u64().expect("bytes"))
        .sum();
    assert_eq!(bytes, 512 << 20);
    let copies = plan["graph"]["copies"].as_array().expect("copies");
    let arriving = copies
        .iter()
        .filter(|copy| copy["to"]["buffer"]["gpu"] == 1);
    let arriving: u64 = arriving
        .map(|copy| copy["bytes"].as_u64().expect("bytes"))
        .sum();
    assert_eq!(arriving, 512 << 20);
    assert!(plan["graph"]["edges"]
        .as_array()
        .is_some_and(|edges| edges.len() > copies.len()));
}

#[test]
fn paths_and_windows_can_be_chosen() {
    let kinds = |more: &[&str]| -> Vec<String> {
        let plan = json(&[&BELUGA, more].concat());
        let paths = plan["paths"].as_array().expect("paths");
        paths
            .iter()
            .map(|path| path["kind"].as_str().expect("a kind").to_owned())
            .collect()
    };
    assert_eq!(kinds(&["--paths", "direct"]), ["direct"]);
    assert_eq!(
        kinds(&["--paths", "direct,relay"]),
        ["direct", "relay", "relay"]
    );
    assert_eq!(
        kinds(&["--paths", "direct,relay", "--relays", "1"]),
        ["direct", "relay"]
    );
    assert_eq!(kinds(&["--paths", "host"]), ["host"]);
    let rate = |window: &str| {
        let arguments = [
            "--from",
            "0",
            "--to",
            "1",
            "--size",
            "4M",
            "--topology",
            "narval",
            "--window",
            window,
        ];
        json(&arguments)["predicted_gb_s"].as_f64().expect("a rate")
    };
    assert!(rate("16") > 1.3 * rate("1"));
    // Over two GPUs there is more to be had where the pair has no link.
    let cube = |depth: &str| {
        let arguments = [
            "--from",
            "0",
            "--to",
            "5",
            "--size",
            "512M",
            "--topology",
            "dgx1-v100",
            "--owner",
            "one",
            "--depth",
            depth,
        ];
        json(&arguments)["predicted_gb_s"].as_f64().expect("a rate")
    };
    assert!(cube("2") > 2.0 * cube("1"));
}

/// A plan is that of somebody: of each rank by itself, unless it is said otherwise.
#[test]
fn whose_plan_it_is_is_said() {
    let of = |assign: &[&str]| {
        let arguments = [&BELUGA[..], assign].concat();
        (planned(&arguments), json(&arguments))
    };
    let (usual, own, one) = (of(&[]), of(&["--owner", "two"]), of(&["--owner", "one"]));
    assert_eq!(usual, own);
    assert!(usual.0.contains("(ANABRANCH_OWNER=two)"), "{}", usual.0);
    assert!(one.0.contains("(ANABRANCH_OWNER=one)"), "{}", one.0);
    assert_eq!(
        (&own.1["owner"], &one.1["owner"]),
        (&"two".into(), &"one".into())
    );
    // Each rank uses the engines of its own GPU; who makes all copies has the relays push.
    let engines = |plan: &Value| -> Vec<String> {
        let paths = plan["paths"].as_array().expect("paths").iter();
        let relays = paths.filter(|path| path["kind"] == "relay");
        relays.map(|path| path["engines"][1].to_string()).collect()
    };
    assert_eq!(engines(&own.1), ["1", "1"]);
    assert_eq!(engines(&one.1), ["2", "3"]);
    for arguments in [&["--depth", "2"][..], &["--json", "--dot", "-"]] {
        let output = plan(&[&BELUGA[..], arguments].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(
            stderr.contains(arguments[0]) && stderr.lines().count() == 1,
            "{stderr}"
        );
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn what_is_no_message_is_not_planned() {
    let size = |size: &str| {
        let output = plan(&[
            "--from",
            "0",
            "--to",
            "1",
            "--topology",
            "narval",
            "--size",
            size,
        ]);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), stderr)
    };
    for (bytes, why) in [
        ("0", "no byte"),
        ("70368744177664", "no GPU has so much memory: 1T at most"),
        ("18446744073709551615", "no GPU has so much memory"),
        ("many", "is no size"),
    ] {
        let (status, stderr) = size(bytes);
        assert_eq!(status, Some(2), "{bytes}: {stderr}");
        assert!(stderr.contains(why), "{bytes}: {stderr}");
    }
    for bytes in ["1", "1T"] {
        assert_eq!(size(bytes), (Some(0), String::new()), "{bytes}");
    }
}

#[test]
fn the_copies_are_written_for_graphviz() {
    let installation = Installation::bare();
    let file = installation.path("plan.dot");
    let text = planned(&[&BELUGA[..], &["--dot", file.to_str().expect("UTF-8")]].concat());
    assert!(text.contains("predicted: "));
    let dot = std::fs::read_to_string(&file).expect("written");
    assert!(
        dot.starts_with("digraph plan {") && dot.ends_with("}\n"),
        "{dot}"
    );
    assert_eq!(dot.matches('{').count(), dot.matches('}').count());
    let copies = json(&BELUGA)["graph"]["copies"]
        .as_array()
        .expect("copies")
        .len();
    assert_eq!(dot.matches("[label=").count(), copies);
    assert_eq!(planned(&[&BELUGA[..], &["--dot", "-"]].concat()), dot);
}

#[test]
#[allow(
    clippy::too_many_lines,
    reason = "a table of what is wrong and what is said"
)]
fn what_cannot_be_is_said_in_one_line() {
    let installation = Installation::bare();
    let file = |name: &str, text: &str| {
        let path = installation.path(name);
        std::fs::write(&path, text).expect("written");
        path.to_str().expect("UTF-8").to_owned()
    };
    let link = "[[link]]\ngpus = [0, 1]\ngb_s = 9.0\n";
    let parts = "name = \"x\"\nunknown = 1\n[gpu]\ncount = 3\n[fabric]\nkind = \"links\"\n";
    let apart = file("apart.toml", &format!("{parts}{link}"));
    let negative = file(
        "negative.toml",
        &format!("{parts}{}", link.replace("9.0", "-9.0")),
    );
    let broken = file("broken.toml", "name = \"x\"\n[gpu]\ncount = \"many\"\n");
    let on = |topology: &str| {
        [
            "--from",
            "0",
            "--to",
            "1",
            "--size",
            "1M",
            "--topology",
            topology,
        ]
        .map(str::to_owned)
    };
    let cases = [
        (
            on(&apart),
            "not connected: nothing leads from GPU 0 to GPU 2",
        ),
        (
            on(&negative),
            "link between GPU 0 and 1: gb_s is -9, must be a positive rate",
        ),
        (on(&broken), "line 3, count of [gpu]: "),
        (on("no-such-node"), "give a file or one of beluga, narval"),
        (
            [
                "--from",
                "0",
                "--to",
                "0",
                "--size",
                "1M",
                "--topology",
                "beluga",
            ]
            .map(str::to_owned),
            "to itself",
        ),
        (
            [
                "--from",
                "0",
                "--to",
                "9",
                "--size",
                "1M",
                "--topology",
                "beluga",
            ]
            .map(str::to_owned),
            "GPU 9 is not there: 4 GPUs",
        ),
    ];
    for (arguments, expected) in cases {
        let output = plan(&arguments.each_ref().map(String::as_str));
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(
            stderr.contains(expected) && stderr.lines().count() == 1,
            "{stderr}"
        );
    }
    // Connected at last, with the unknown key still in it.
    let closed = file(
        "closed.toml",
        &format!("{parts}{link}{}", link.replace("[0, 1]", "[1, 2]")),
    );
    let text = planned(&on(&closed).each_ref().map(String::as_str));
    assert!(text.contains("GPU0-GPU1"), "{text}");
    let output = plan(&[
        "--from",
        "0",
        "--to",
        "2",
        "--size",
        "1M",
        "--topology",
        &closed,
        "--paths",
        "direct",
    ]);
    assert!(String::from_utf8_lossy(&output.stderr)
        .contains("no path that is allowed leads from GPU 0 to GPU 2"));
}
