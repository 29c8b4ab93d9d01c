//! `cargo xtask report`: compares runs of the solver and says what the library did in one of them.

use serde_json::Value;
use std::fmt::Write as _;
use std::fs;

/// Files to compare, as given on the command line.
#[derive(Debug, Default)]
struct Files {
    reference: Option<String>,
    without: Option<String>,
    with: Option<String>,
    stats: Option<String>,
}

/// Prints the comparison.
///
/// # Errors
/// If a file cannot be read, or if the fields differ, or if the library's counters do not account for the messages.
pub fn run(arguments: &[String]) -> Result<(), String> {
    let mut files = Files::default();
    let mut rest = arguments.iter();
    while let Some(option) = rest.next() {
        let slot = match option.as_str() {
            "--reference" => &mut files.reference,
            "--without" => &mut files.without,
            "--with" => &mut files.with,
            "--stats" => &mut files.stats,
            other => return Err(format!("report does not know {other:?}")),
        };
        *slot = Some(
            rest.next()
                .ok_or_else(|| format!("{option} needs a file"))?
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
    println!("\nThe three fields are bit-identical, and every message is accounted for.");
    Ok(())
}

/// `cargo xtask counters FILE`: what a summary of the library says.
///
/// # Errors
/// If the file cannot be read.
pub fn counters(arguments: &[String]) -> Result<(), String> {
    let [file] = arguments else {
        return Err("counters needs one file".to_owned());
    };
    print!("{}", what_happened(&read(file)?));
    Ok(())
}

fn read(file: &str) -> Result<Value, String> {
    let text = fs::read_to_string(file).map_err(|e| format!("cannot read {file}: {e}"))?;
    serde_json::from_str(&text).map_err(|e| format!("{file} is not JSON: {e}"))
}

fn table(runs: &[(&str, Value)]) -> String {
    let mut text = format!(
        "\n{:<22} {:>5} {:>18} {:>10} {:>9} {:>10}\n",
        "run", "ranks", "hash of the field", "seconds", "exchange", "clock"
    );
    for (name, run) in runs {
        let seconds = run["seconds"]["total"].as_f64().unwrap_or(f64::NAN);
        let share = 100.0 * run["communication_share"].as_f64().unwrap_or(f64::NAN);
        let hash = run["hash"].as_str().unwrap_or("none");
        let short: String = hash.chars().take(18).collect();
        let clock = run["clock"].as_str().unwrap_or("?");
        let _ = writeln!(
            text,
            "{name:<22} {:>5} {short:>18} {seconds:>10.4} {share:>7.1} % {clock:>10}",
            run["ranks"].to_string()
        );
    }
    text
}

/// Rows of the summary: title, then names of counters that have a `_bytes` companion.
const ROWS: [(&str, &[&str]); 3] = [
    ("sent from device buffers", &["sends_device"]),
    (
        "  they went",
        &["sends_descriptor", "sends_value", "sends_native"],
    ),
    (
        "  and arrived",
        &[
            "receives_direct",
            "receives_self",
            "receives_host_ring",
            "receives_eager",
            "receives_value",
        ],
    ),
];

fn what_happened(stats: &Value) -> String {
    let totals = &stats["totals"];
    let count = |name: &str| totals["counters"][name].as_u64().unwrap_or(0);
    let mut text = format!(
        "\n{:<26} {:<22} {:>10} {:>16}\n",
        "what the library did", "path", "messages", "bytes"
    );
    for (title, names) in ROWS {
        let mut title = title;
        for name in names
            .iter()
            .filter(|name| names.len() == 1 || count(name) > 0)
        {
            let path = name
                .trim_start_matches("sends_")
                .trim_start_matches("receives_");
            let path = if names.len() == 1 { "" } else { path };
            let _ = writeln!(
                text,
                "{title:<26} {path:<22} {:>10} {:>16}",
                count(name),
                count(&format!("{name}_bytes"))
            );
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
        let _ = writeln!(
            text,
            "{title:<26} {reason:<22} {:>10} {:>16}",
            entry["messages"].to_string(),
            entry["bytes"].to_string()
        );
        title = "";
    }
    if title == "not taken, because" {
        let _ = writeln!(text, "{title:<26} (none)");
    }
    text
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
    let counters = &stats["totals"]["counters"];
    let count = |name: &str| counters[name].as_u64().unwrap_or(0);
    let solver = &runs[2].1;
    for (name, said) in [
        ("sends_device", &solver["messages"]),
        ("sends_device_bytes", &solver["message_bytes"]),
    ] {
        if said.as_u64() != Some(count(name)) {
            return Err(format!(
                "the solver says {said} where the library counted {} ({name})",
                count(name)
            ));
        }
    }
    let taken = count("sends_descriptor_bytes");
    let paths = [
        "receives_direct_bytes",
        "receives_self_bytes",
        "receives_host_ring_bytes",
        "receives_eager_bytes",
    ];
    let arrived: u64 = paths.iter().map(|path| count(path)).sum();
    if arrived != taken {
        return Err(format!("{taken} bytes were taken, {arrived} arrived"));
    }
    if taken == 0 {
        return Err("the library took no message".to_owned());
    }
    Ok(())
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
        json!({"totals": {"counters": {"sends_device": 10, "sends_device_bytes": 1000, "sends_descriptor": 9, "sends_descriptor_bytes": 900,
            "receives_direct": 9, "receives_direct_bytes": direct}, "fallbacks": {"not_ready": {"messages": 1, "bytes": 100}}}})
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

    #[test]
    fn every_reason_is_listed() {
        let text = what_happened(&counters(900));
        assert!(text.contains("not_ready"), "{text}");
        assert!(text.contains("direct"), "{text}");
    }
}
