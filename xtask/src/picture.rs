//! `cargo xtask picture`: two measurements of `anabranch bench` as bars, one beside the other, with their ratios.

use serde_json::Value;
use std::fs;

use crate::columns::{bar, table};

/// Marks of the longest bar.
const WIDTH: u32 = 40;

/// Prints the picture of `NAME=FILE NAME=FILE`.
///
/// # Errors
/// A file cannot be read, or the two have not the same sizes.
pub fn run(arguments: &[String]) -> Result<(), String> {
    let [one, other] = arguments else {
        return Err("picture needs NAME=FILE NAME=FILE".to_owned());
    };
    let (one, other) = (read(one)?, read(other)?);
    print!("{}", draw(&one, &other)?);
    Ok(())
}

/// A measurement: its name, and bytes and value of each row.
type Named = (String, Vec<(u64, f64)>);

fn read(argument: &str) -> Result<Named, String> {
    let (name, file) = argument
        .split_once('=')
        .ok_or_else(|| format!("{argument:?}: write NAME=FILE"))?;
    let text = fs::read_to_string(file).map_err(|e| format!("cannot read {file}: {e}"))?;
    let json: Value =
        serde_json::from_str(&text).map_err(|e| format!("{file} is not JSON: {e}"))?;
    if json["unit"] != "MB/s" {
        return Err(format!(
            "{file} is no bandwidth that anabranch bench has measured"
        ));
    }
    let rows = json["rows"].as_array().into_iter().flatten();
    let rows = rows.filter_map(|row| Some((row["bytes"].as_u64()?, row["value"].as_f64()?)));
    Ok((name.to_owned(), rows.collect()))
}

fn draw(one: &Named, other: &Named) -> Result<String, String> {
    let sizes = |named: &Named| named.1.iter().map(|row| row.0).collect::<Vec<_>>();
    if sizes(one) != sizes(other) || one.1.is_empty() {
        return Err("picture: the two have not the same sizes, or none".to_owned());
    }
    let values = one.1.iter().chain(&other.1).map(|row| row.1);
    let largest = values.fold(0.0, f64::max);
    let mut rows = Vec::new();
    for ((bytes, before), (_, after)) in one.1.iter().zip(&other.1) {
        let row = |size: String, name: &str, value: f64, ratio: String| {
            let gb_s = format!("{:.1} GB/s", value / 1e3);
            let bar = bar(value, largest, WIDTH);
            vec![size, name.to_owned(), format!("{bar:<40}"), gb_s, ratio]
        };
        rows.push(row(size(*bytes), &one.0, *before, String::new()));
        let ratio = format!("{:.2}x", after / before);
        rows.push(row(String::new(), &other.0, *after, ratio));
    }
    Ok(table(3, rows))
}

fn size(bytes: u64) -> String {
    match bytes {
        _ if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
        _ if bytes >= 1 << 10 => format!("{} KiB", bytes >> 10),
        _ => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_stand_beside_each_other() {
        let named = |name: &str, values: &[f64]| {
            let sizes = [1 << 20, 64 << 20];
            let rows = sizes.into_iter().zip(values.iter().copied());
            (name.to_owned(), rows.collect::<Vec<_>>())
        };
        let text = draw(&named("one", &[40e3, 50e3]), &named("all", &[40e3, 100e3]));
        let text = text.expect("a picture");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        let marks = |line: &str| line.matches('#').count();
        assert_eq!(
            lines.iter().map(|line| marks(line)).collect::<Vec<_>>(),
            [16, 16, 20, 40]
        );
        assert!(lines[1].ends_with("40.0 GB/s  1.00x"), "{text}");
        assert!(lines[3].ends_with("100.0 GB/s  2.00x"), "{text}");
        assert!(lines[2].starts_with("64 MiB  one"), "{text}");
        assert!(draw(&named("one", &[1.0]), &named("all", &[1.0, 2.0])).is_err());
    }
}
