//! `cargo xtask report`: compares runs of the solver and says what the library did in one of them.

use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;

use crate::columns;

/// Files to compare, as given on the command line.
#[derive(Debug, Default)]
struct Files {
    reference: Option<String>,
    without: Option<String>,
    with: Option<String>,
    stats: Option<String>,
    taken_but_for: Option<String>,
}

const TAKEN_BUT_FOR: &str = "--taken-but-for";

/// Prints the comparison.
///
/// # Errors
/// If a file cannot be read, or if the fields differ, or if the library's counters do not account for the messages, or not
/// as is demanded.
pub fn run(arguments: &[String]) -> Result<(), String> {
    let mut files = Files::default();
    let mut rest = arguments.iter();
    while let Some(option) = rest.next() {
        let slot = match option.as_str() {
            "--reference" => &mut files.reference,
            "--without" => &mut files.without,
            "--with" => &mut files.with,
            "--stats" => &mut files.stats,
            TAKEN_BUT_FOR => &mut files.taken_but_for,
            other => return Err(format!("report does not know {other:?}")),
        };
        *slot = Some(
            rest.next()
                .ok_or_else(|| format!("{option} needs a value"))?
                .clone(),
        );
    }
    let given = |file: &Option<String>, option: &str| match file {
        Some(file) => read(file),
        None => Err(format!("report needs {option} FILE")),
    };
    let runs = [
        (
            "one rank, plain MPI",
            given(&files.reference, "--reference")?,
        ),
        ("plain MPI", given(&files.without, "--without")?),
        ("with libanabranch.so", given(&files.with, "--with")?),
    ];
    let stats = given(&files.stats, "--stats")?;
    print!("{}{}", table(&runs), what_happened(&stats));
    check(&runs, &stats)?;
    if let Some(list) = &files.taken_but_for {
        taken_but_for(&stats, list)?;
    }
    println!("\nThe three fields are bit-identical, and every message is accounted for.");
    Ok(())
}

/// `cargo xtask counters FILE`: what a summary of the library says, and whether it is what is demanded.
///
/// # Errors
/// If the file cannot be read, or does not say what is demanded.
pub fn counters(arguments: &[String]) -> Result<(), String> {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (file, demanded) = match arguments[..] {
        [file] => (file, None),
        [file, TAKEN_BUT_FOR, list] => (file, Some(list)),
        _ => {
            return Err(format!(
                "counters needs one file, and may have {TAKEN_BUT_FOR} LIST"
            ))
        }
    };
    let stats = read(file)?;
    print!("{}", what_happened(&stats));
    demanded.map_or(Ok(()), |list| taken_but_for(&stats, list))
}

fn read(file: &str) -> Result<Value, String> {
    let text = fs::read_to_string(file).map_err(|e| format!("cannot read {file}: {e}"))?;
    serde_json::from_str(&text).map_err(|e| format!("{file} is not JSON: {e}"))
}

fn table(runs: &[(&str, Value)]) -> String {
    let heads = [
        "run",
        "ranks",
        "hash of the field",
        "seconds",
        "ratio",
        "exchange",
        "clock",
    ];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    let seconds = |run: &Value| run["seconds"]["total"].as_f64().unwrap_or(f64::NAN);
    let mut is_virtual = false;
    for (name, run) in runs {
        let share = 100.0 * run["communication_share"].as_f64().unwrap_or(f64::NAN);
        let hash = run["hash"].as_str().unwrap_or("none");
        let clock = run["clock"].as_str().unwrap_or("?");
        is_virtual |= clock == "virtual";
        rows.push(vec![
            (*name).to_owned(),
            run["ranks"].to_string(),
            hash.chars().take(18).collect(),
            format!("{:.4}", seconds(run)),
            format!("{:.2}x", seconds(&runs[0].1) / seconds(run)),
            format!("{share:.1} %"),
            clock.to_owned(),
        ]);
    }
    let note = if is_virtual {
        "The clock is that of the simulated GPUs, on which what the MPI library copies itself takes no time: it tells one rank from\n\
         four, and not plain MPI from the library.\n"
    } else {
        ""
    };
    format!("\n{}{note}", columns::table(1, rows))
}

/// The ways in which sends from device buffers go. Each goes in exactly one.
const WAYS: [&str; 3] = ["sends_rts", "sends_bcopy", "sends_native"];

/// The sends that go by RTS.
const TAKEN: [&str; 2] = ["sends_rts", "sends_host_rts"];

/// The paths by which those arrive. Each comes by exactly one.
const ARRIVALS: [&str; 6] = [
    "receives_direct",
    "receives_multipath",
    "receives_self",
    "receives_host_pipeline",
    "receives_gpu_pipeline",
    "receives_eager",
];

/// Rows of the summary: title, then names of counters of messages, most of which have a `_bytes` companion.
const ROWS: [(&str, &[&str]); 7] = [
    ("sent from device buffers", &["sends_device"]),
    ("  they went", &WAYS),
    ("  of these", &["sends_eager"]),
    ("sent from host memory", &["sends_host_rts"]),
    ("  and arrived", &ARRIVALS),
    (
        "  of these",
        &["receives_put_early", "receives_host_fetched"],
    ),
    ("  and otherwise", &["receives_bcopy", "receives_native"]),
];

/// A counter of a summary; 0 if there is none of this name.
fn count(stats: &Value, name: &str) -> u64 {
    let counters = &stats["totals"]["counters"];
    counters[name].as_u64().unwrap_or(0)
}

fn what_happened(stats: &Value) -> String {
    let totals = &stats["totals"];
    let heads = ["what the library did", "path", "messages", "bytes"];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    let mut add = |title: &str, path: &str, messages: String, bytes: String| {
        rows.push(vec![title.to_owned(), path.to_owned(), messages, bytes]);
    };
    for (row, (mut title, names)) in ROWS.into_iter().enumerate() {
        for name in names
            .iter()
            .filter(|name| row == 0 || count(stats, name) > 0)
        {
            let path = name
                .trim_start_matches("sends_")
                .trim_start_matches("receives_");
            let path = if row == 0 { "" } else { path };
            let bytes = totals["counters"][format!("{name}_bytes")].as_u64();
            let bytes = bytes.map(|bytes| bytes.to_string()).unwrap_or_default();
            add(title, path, count(stats, name).to_string(), bytes);
            title = "";
        }
    }
    let mut title = "not taken, because";
    for (reason, entry) in totals["fallbacks"]
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(_, entry)| entry["messages"] != 0)
    {
        let [messages, bytes] = ["messages", "bytes"].map(|unit| entry[unit].to_string());
        add(title, reason, messages, bytes);
        title = "";
    }
    if title == "not taken, because" {
        add(title, "(none)", String::new(), String::new());
    }
    format!("\n{}", columns::table(2, rows))
}

fn check(runs: &[(&str, Value)], stats: &Value) -> Result<(), String> {
    let hash = &runs[0].1["hash"];
    if hash.as_str().is_none_or(str::is_empty) {
        return Err("the reference has no hash".to_owned());
    }
    for (name, run) in runs {
        if run["hash"] != *hash {
            return Err(format!(
                "the field of the run {name} differs from the reference"
            ));
        }
    }
    let solver = &runs[2].1;
    for (name, said) in [
        ("sends_device", &solver["messages"]),
        ("sends_device_bytes", &solver["message_bytes"]),
    ] {
        if said.as_u64() != Some(count(stats, name)) {
            return Err(format!(
                "the solver says {said} where the library counted {} ({name})",
                count(stats, name)
            ));
        }
    }
    accounted(stats)?;
    if count(stats, "sends_rts") == 0 {
        return Err("the library took no message".to_owned());
    }
    Ok(())
}

/// Every send from a device buffer went some way, and every message that went by RTS has arrived, to the byte.
fn accounted(stats: &Value) -> Result<(), String> {
    for (unit, of) in [("", "messages"), ("_bytes", "bytes")] {
        let sum = |names: &[&str]| -> u64 {
            let counts = names.iter().map(|name| format!("{name}{unit}"));
            counts.map(|name| count(stats, &name)).sum()
        };
        let (sent, went) = (sum(&["sends_device"]), sum(&WAYS));
        if sent != went {
            return Err(format!(
                "{sent} {of} were sent from device buffers, of {went} is known how they went"
            ));
        }
        let (taken, arrived) = (sum(&TAKEN), sum(&ARRIVALS));
        if taken != arrived {
            return Err(format!("{taken} {of} were taken, {arrived} arrived"));
        }
    }
    Ok(())
}

/// Counters that are zero where nothing went wrong.
const TROUBLE: [&str; 6] = [
    "errors",
    "dead_peers",
    "corrupt",
    "bad_rts",
    "verify_mismatches",
    "panics",
];

/// Whether every message from a device buffer was taken but for the reasons in the list, `REASON=MOST,...` or `none`, whether
/// all have arrived, and nothing went wrong.
fn taken_but_for(stats: &Value, list: &str) -> Result<(), String> {
    let reasons = stats["totals"]["fallbacks"].as_object();
    let reasons = reasons.ok_or("the summary has no reasons")?;
    let mut expected = BTreeMap::new();
    for entry in list.split(',').filter(|_| list != "none") {
        let (reason, most) = entry.split_once('=').unwrap_or((entry, ""));
        let most: u64 = most
            .parse()
            .map_err(|_| format!("{TAKEN_BUT_FOR} needs REASON=MOST, not {entry:?}"))?;
        if !reasons.contains_key(reason) {
            return Err(format!("{TAKEN_BUT_FOR}: there is no reason {reason:?}"));
        }
        expected.insert(reason, most);
    }
    accounted(stats)?;
    if count(stats, "sends_device") == 0 {
        return Err("no message from a device buffer was seen".to_owned());
    }
    let mut told = 0;
    for (reason, entry) in reasons {
        let messages = entry["messages"].as_u64().unwrap_or(0);
        let most = expected.get(reason.as_str()).copied().unwrap_or(0);
        if messages > most {
            return Err(format!(
                "{messages} messages were not taken for the reason {reason}, at most {most} are expected"
            ));
        }
        told += messages;
    }
    let left = count(stats, "sends_bcopy") + count(stats, "sends_native");
    if left > told {
        return Err(format!(
            "{left} messages did not go by RTS, of {told} it is known why"
        ));
    }
    match TROUBLE.iter().find(|name| count(stats, name) != 0) {
        Some(name) => Err(format!("{name}: {}", count(stats, name))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn solver(hash: &str) -> Value {
        json!({"hash": hash, "ranks": 4, "messages": 10, "message_bytes": 1000, "clock": "virtual",
               "communication_share": 0.25, "seconds": {"total": 1.5}})
    }

    fn counters(direct: u64) -> Value {
        json!({"totals": {"counters": {"sends_device": 10, "sends_device_bytes": 1000, "sends_rts": 9, "sends_rts_bytes": 900,
            "sends_bcopy": 1, "sends_bcopy_bytes": 100, "receives_direct": 9, "receives_direct_bytes": direct}, "fallbacks": {"not_ready": {"messages": 1, "bytes": 100}}}})
    }

    #[test]
    fn differing_fields_and_lost_bytes_are_refused() {
        let runs = |c| {
            [
                ("reference", solver("aa")),
                ("without", solver("aa")),
                ("with", solver(c)),
            ]
        };
        assert_eq!(check(&runs("aa"), &counters(900)), Ok(()));
        assert!(check(&runs("ab"), &counters(900))
            .unwrap_err()
            .contains("differs"));
        assert!(check(&runs("aa"), &counters(899))
            .unwrap_err()
            .contains("899 arrived"));
    }

    /// What four ranks with long halos count: of 12 messages from device buffers 10 went by RTS, and of those 4 came
    /// over several paths; one long message came from host memory.
    fn long_halos() -> Value {
        json!({"totals": {"counters": {
            "sends_device": 12, "sends_device_bytes": 12_000,
            "sends_rts": 10, "sends_rts_bytes": 10_500,
            "sends_bcopy": 2, "sends_bcopy_bytes": 1500,
            "sends_host_rts": 1, "sends_host_rts_bytes": 70_000,
            "receives_direct": 3, "receives_direct_bytes": 2500,
            "receives_multipath": 4, "receives_multipath_bytes": 6000,
            "receives_self": 1, "receives_self_bytes": 1000,
            "receives_eager": 2, "receives_eager_bytes": 1000,
            "receives_host_pipeline": 1, "receives_host_pipeline_bytes": 70_000,
            "receives_gpu_pipeline": 0, "receives_gpu_pipeline_bytes": 0,
            "receives_bcopy": 2, "receives_bcopy_bytes": 1500,
            "receives_host_fetched": 5},
            "fallbacks": {"not_ready": {"messages": 2, "bytes": 1500}}}})
    }

    fn runs(messages: u64, bytes: u64) -> [(&'static str, Value); 3] {
        let mut with = solver("aa");
        (with["messages"], with["message_bytes"]) = (messages.into(), bytes.into());
        [
            ("reference", solver("aa")),
            ("without", solver("aa")),
            ("with", with),
        ]
    }

    #[test]
    fn messages_over_several_paths_and_from_host_memory_have_arrived() {
        assert_eq!(check(&runs(12, 12_000), &long_halos()), Ok(()));
        let text = what_happened(&long_halos());
        let has = |words: [&str; 3]| {
            let mut lines = text.lines().map(|line| line.split_whitespace());
            lines.any(|line| line.rev().take(3).eq(words.into_iter().rev()))
        };
        assert!(has(["multipath", "4", "6000"]), "{text}");
        assert!(has(["host_rts", "1", "70000"]), "{text}");
        for (counter, less) in [
            ("receives_multipath", 3),
            ("receives_multipath_bytes", 5999),
            ("sends_host_rts_bytes", 0),
            ("sends_bcopy", 1),
        ] {
            let mut stats = long_halos();
            stats["totals"]["counters"][counter] = less.into();
            assert!(check(&runs(12, 12_000), &stats).is_err(), "{counter}");
        }
    }

    #[test]
    fn messages_that_should_have_been_taken_are_missed() {
        let stats = long_halos();
        let refused = |stats: &Value, list: &str| taken_but_for(stats, list).unwrap_err();
        assert_eq!(taken_but_for(&stats, "not_ready=2"), Ok(()));
        assert!(refused(&stats, "not_ready=1").contains("at most 1"));
        assert!(refused(&stats, "none").contains("not_ready"));
        assert!(refused(&stats, "not_redy=2").contains("no reason"));
        for list in ["", "not_ready", "not_ready=many"] {
            assert!(refused(&stats, list).contains("REASON=MOST"), "{list}");
        }
        let with = |changes: &[(&str, u64)]| {
            let mut stats = long_halos();
            for (name, value) in changes {
                stats["totals"]["counters"][*name] = (*value).into();
            }
            refused(&stats, "not_ready=2")
        };
        // One more went by value than there are reasons.
        let one_more = [("sends_bcopy", 3), ("sends_device", 13)];
        assert!(with(&one_more).contains("3 messages did not go"));
        // Three of 6000 bytes that came over several paths are missing.
        let lost = [("receives_multipath_bytes", 5997)];
        assert!(with(&lost).contains("80500 bytes were taken, 80497 arrived"));
        assert!(with(&[("corrupt", 1)]).contains("corrupt: 1"));
        // Another reason, which nobody expects, for a message that went by RTS.
        let mut stats = long_halos();
        stats["totals"]["fallbacks"]["mapping_failed"] = json!({"messages": 1, "bytes": 1000});
        assert!(refused(&stats, "not_ready=2").contains("mapping_failed"));
        // Nothing was seen at all.
        let idle = json!({"totals": {"counters": {}, "fallbacks": {"not_ready": {"messages": 0, "bytes": 0}}}});
        assert!(refused(&idle, "not_ready=2").contains("no message"));
    }

    /// A counter of messages that is added to the library's table is known here, too.
    #[test]
    fn every_counter_of_messages_is_in_a_row() {
        let table = include_str!("../../src/stats.rs");
        let rows = table.lines().filter_map(|line| {
            let mut parts = line.split('"');
            let (name, unit) = (parts.nth(1)?, parts.next()?);
            (unit.trim() == "Count").then_some(name)
        });
        let of_messages: Vec<&str> = rows
            .filter(|name| name.starts_with("sends_") || name.starts_with("receives_"))
            .collect();
        assert!(of_messages.len() >= 13, "{of_messages:?}");
        for name in of_messages {
            assert!(
                ROWS.iter().any(|(_, names)| names.contains(&name)),
                "no row has {name}"
            );
            // What does not end an RTS is none of its paths.
            let others = [
                "receives_bcopy",
                "receives_native",
                "receives_host_fetched",
                "receives_put_early",
            ];
            assert!(
                name.starts_with("sends_") || others.contains(&name) || ARRIVALS.contains(&name),
                "{name} is neither a path of what was taken nor known to be something else"
            );
        }
    }

    #[test]
    fn every_reason_is_listed() {
        let text = what_happened(&counters(900));
        assert!(text.contains("not_ready"), "{text}");
        assert!(text.contains("direct"), "{text}");
    }
}
