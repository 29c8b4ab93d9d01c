//! What a measurement prints: the lines that users of the OSU micro-benchmarks and their scripts
//! know, and JSON.

use std::io::{self, Write};

use anyhow::Context;
use serde_json::{json, Map, Value};

use super::mpi::Mpi;
use super::{Arguments, Device, Kind};

/// The result for one size.
#[derive(Clone, Debug)]
pub struct Row {
    /// Size of a message.
    pub bytes: usize,
    /// Messages under way at once.
    pub window: usize,
    /// Iterations measured.
    pub iterations: u32,
    /// In the unit of the measurement; none if no time passed, as for host memory on a simulated
    /// node.
    pub value: Option<f64>,
    /// The driver's own copy, in the same unit.
    pub raw: Option<f64>,
    /// The library's own transfers, in the same unit.
    pub transfer: Option<f64>,
    /// The path of the last of these transfers.
    pub path: Option<&'static str>,
    /// Messages with wrong data, where they were checked.
    pub errors: Option<u64>,
    /// Exchanges: of which nine tenths, and all but a hundredth, take no more; us.
    pub percentiles: Option<[f64; 2]>,
    /// Simulated nodes: by which part of the time host code was late, for want of a core. Beyond a few hundredths the value
    /// is that of a busy machine.
    pub late: Option<f64>,
}

impl Row {
    /// By which part of its time the row is late, where that is too much.
    fn lateness(&self) -> Option<f64> {
        self.late
            .filter(|late| late.is_finite() && *late > LATE_FROM)
    }

    /// Messages a second, where the value is a bandwidth.
    #[allow(clippy::cast_precision_loss)]
    fn rate(&self) -> Option<f64> {
        (self.bytes > 0)
            .then_some(self.value)
            .flatten()
            .map(|value| value * 1e6 / self.bytes as f64)
    }
}

/// A row is late from here on: as `compare` has it by default.
const LATE_FROM: f64 = 0.02;

/// What the mark means.
const LATE: &str = "# late: so much of the time the ranks waited for a processor of this machine; the value is too low by \
     about as much. Fewer ranks, or a machine with more cores, help\n";

/// Bandwidth in MB/s (10^6 bytes), or latency in µs, from the time that all iterations took.
/// `None` if it took none.
#[allow(clippy::cast_precision_loss)]
pub fn value(
    kind: Kind,
    bytes: usize,
    window: usize,
    iterations: u32,
    seconds: f64,
) -> Option<f64> {
    let messages = window as f64 * f64::from(iterations);
    let value = match kind {
        Kind::Bw | Kind::MbwMr | Kind::Put | Kind::Ring | Kind::AllToAll | Kind::AllByNumber => {
            bytes as f64 * messages / 1e6 / seconds
        }
        Kind::Bibw => 2.0 * bytes as f64 * messages / 1e6 / seconds,
        Kind::Latency => seconds * 1e6 / (2.0 * f64::from(iterations)),
        Kind::Exchange => seconds * 1e6 / f64::from(iterations),
    };
    (seconds > 0.0).then_some(value)
}

/// Collects and prints the rows of one measurement; used on rank 0.
pub struct Report<'a> {
    arguments: &'a Arguments,
    meta: Map<String, Value>,
    comments: Vec<String>,
    rows: Vec<Row>,
    /// How the driver's own copy was driven, if it was measured.
    pub raw: Option<&'static str>,
}

impl<'a> Report<'a> {
    /// A report with the circumstances of the measurement.
    pub fn new(
        arguments: &'a Arguments,
        mpi: &Mpi,
        device: Option<&Device>,
        simulated: bool,
        seed: u64,
    ) -> Report<'a> {
        let gpu = device.and_then(|device| device.driver.device_name(device.ordinal).ok());
        let clock = if simulated { "simulated" } else { "wall" };
        let mut comments = vec![format!("# {}, {} ranks", mpi.version(), mpi.size)];
        if arguments.kind == Kind::Exchange {
            comments.push("# Two MPI_Sendrecv, the time in MPI of rank 0".into());
        } else if arguments.kind != Kind::Latency {
            let ended = match arguments.kind {
                Kind::Put => ", ended by MPI_Win_fence; the MPI library alone moves them",
                kind if kind.is_one_way() => ", acknowledged by 4 bytes",
                _ => "",
            };
            comments.push(format!("# Window of {} messages{ended}", arguments.window));
        }
        if arguments.persistent {
            comments.push("# Persistent requests, made once for each size".into());
        }
        if let Some(text) = arguments.memory.note() {
            comments.push(format!("# Device memory: {text}"));
        }
        if arguments.kind == Kind::MbwMr {
            comments.push(format!("# [ pairs: {} ]", mpi.size / 2));
        }
        comments.push(match simulated {
            true => "# Times are those of the simulated node, not of this machine; - where none passes there".into(),
            false => "# Times are by this machine's clock, on rank 0".to_owned(),
        });
        if arguments.check {
            comments.push(format!("# Every message checked, at odd addresses (--seed {seed}); the window shrinks to what fits in 1 GiB"));
        }
        let value = json!({
            "benchmark": name(arguments.kind),
            "version": env!("CARGO_PKG_VERSION"),
            "unit": unit(arguments.kind),
            "buffers": [arguments.first, arguments.second],
            "memory": arguments.memory,
            "window": arguments.window,
            "persistent": arguments.persistent,
            "check": arguments.check,
            "seed": seed,
            "clock": clock,
            "mpi": mpi.version(),
            "ranks": mpi.size,
            "gpu": gpu,
        });
        let meta = match value {
            Value::Object(meta) => meta,
            _ => Map::new(),
        };
        Report {
            arguments,
            meta,
            comments,
            rows: vec![],
            raw: None,
        }
    }

    /// Prints the lines above the rows.
    ///
    /// # Errors
    /// The output cannot be written.
    pub fn head(&mut self) -> anyhow::Result<()> {
        self.arguments.json.try_out()?;
        let mut lines = vec![
            format!(
                "# Anabranch MPI-CUDA {} Test v{}",
                title(self.arguments.kind),
                env!("CARGO_PKG_VERSION")
            ),
            format!(
                "# Send Buffer on {} and Receive Buffer on {}",
                self.arguments.first.label(),
                self.arguments.second.label()
            ),
        ];
        lines.append(&mut self.comments);
        if let Some(how) = self.raw {
            lines.push(format!("# Raw: the driver's own copies, {how}"));
            self.meta.insert("raw".into(), how.into());
        }
        if self.arguments.transfer {
            lines.push("# Transfer: by the library, without MPI".into());
        }
        let (arguments, more) = (
            self.arguments,
            [self.raw.is_some(), self.arguments.transfer],
        );
        lines.push(columns(arguments.kind, more, arguments.check));
        self.print(&(lines.join("\n") + "\n"))
    }

    /// Prints, unless stdout is for JSON alone.
    fn print(&self, text: &str) -> anyhow::Result<()> {
        match self.arguments.json.is_alone() {
            true => Ok(()),
            false => print(text),
        }
    }

    /// Prints and keeps one row.
    ///
    /// # Errors
    /// The output cannot be written.
    pub fn row(&mut self, row: Row) -> anyhow::Result<()> {
        let more = [self.raw.is_some(), self.arguments.transfer];
        self.print(&line(self.arguments.kind, &row, more))?;
        self.rows.push(row);
        Ok(())
    }

    /// Writes the JSON file, if one is wanted.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn end(mut self) -> anyhow::Result<()> {
        let unit = unit(self.arguments.kind);
        let rows: Vec<Value> = self.rows.iter().map(|row| json_row(row, unit)).collect();
        if self.rows.iter().any(|row| row.lateness().is_some()) {
            self.print(LATE)?;
        }
        self.meta.insert("rows".into(), rows.into());
        self.arguments.json.write(&self.meta)
    }
}

fn json_row(row: &Row, unit: &str) -> Value {
    let mut value = json!({ "bytes": row.bytes, "value": row.value, "unit": unit, "window": row.window, "iterations": row.iterations });
    if let Some(raw) = row.raw {
        value["raw"] = raw.into();
        value["ratio"] = row.value.map(|value| value / raw).into();
    }
    if let Some(transfer) = row.transfer {
        value["transfer"] = transfer.into();
        value["transfer_path"] = row.path.into();
    }
    if let Some([ninety, ninety_nine]) = row.percentiles {
        value["percentiles"] = json!({ "90": ninety, "99": ninety_nine });
    }
    if let Some(errors) = row.errors {
        value["errors"] = errors.into();
    }
    if let Some(late) = row.late.filter(|late| late.is_finite()) {
        value["late"] = late.into();
    }
    value
}

/// The name of a measurement on the command line.
pub fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Bw => "bw",
        Kind::Bibw => "bibw",
        Kind::Latency => "latency",
        Kind::MbwMr => "mbw-mr",
        Kind::Ring => "ring",
        Kind::AllToAll => "all-to-all",
        Kind::AllByNumber => "all-by-number",
        Kind::Exchange => "exchange",
        Kind::Put => "put",
    }
}

fn title(kind: Kind) -> &'static str {
    match kind {
        Kind::Bw => "Bandwidth",
        Kind::Bibw => "Bi-Directional Bandwidth",
        Kind::Latency => "Latency",
        Kind::MbwMr => "Multiple Bandwidth / Message Rate",
        Kind::Ring => "Ring Bandwidth of All Ranks",
        Kind::AllToAll => "All-to-All Bandwidth of All Ranks",
        Kind::AllByNumber => "All-to-All Bandwidth of All Ranks, by Number",
        Kind::Exchange => "Exchange Latency",
        Kind::Put => "One Sided Put Bandwidth",
    }
}

/// The unit of its values.
pub fn unit(kind: Kind) -> &'static str {
    match kind {
        Kind::Latency | Kind::Exchange => "us",
        _ => "MB/s",
    }
}

/// OSU's widths: 10 to the left for the size, 20 to the right for each number.
fn columns(kind: Kind, [raw, transfer]: [bool; 2], check: bool) -> String {
    let value = match kind {
        Kind::Latency => "Latency (us)",
        Kind::Exchange => "Median (us)",
        _ => "Bandwidth (MB/s)",
    };
    let mut text = format!("{:<10}{value:>20}", "# Size");
    if kind == Kind::MbwMr {
        text += &format!("{:>20}", "Messages/s");
    }
    if kind == Kind::Exchange && !check {
        text += &format!("{:>20}{:>20}", "90 % (us)", "99 % (us)");
    }
    if raw {
        text += &format!("{:>20}{:>10}", format!("Raw ({})", unit(kind)), "Ratio");
    }
    if transfer {
        text += &format!(
            "{:>20}  {:<13}",
            format!("Transfer ({})", unit(kind)),
            "Path"
        );
    }
    if check {
        text += &format!("{:>20}", "Validation");
    }
    text
}

/// `raw` and `transfer`: these are measured, too.
fn line(kind: Kind, row: &Row, [raw, transfer]: [bool; 2]) -> String {
    let number = |value: Option<f64>, width: usize, digits: usize| match value {
        Some(value) => format!("{value:>width$.digits$}"),
        None => format!("{:>width$}", "-"),
    };
    let mut text = format!("{:<10}{}", row.bytes, number(row.value, 20, 2));
    if kind == Kind::MbwMr {
        text += &number(row.rate(), 20, 2);
    }
    for percentile in row.percentiles.into_iter().flatten() {
        text += &number(Some(percentile), 20, 2);
    }
    if raw {
        let ratio = row.value.zip(row.raw).map(|(value, raw)| value / raw);
        text += &(number(row.raw, 20, 2) + &number(ratio, 10, 3));
    }
    if transfer {
        text += &number(row.transfer, 20, 2);
        text += &format!("  {:<13}", row.path.unwrap_or("-"));
    }
    if let Some(errors) = row.errors {
        text += &format!("{:>20}", if errors == 0 { "Pass" } else { "Fail" });
    }
    if let Some(late) = row.lateness() {
        text += &format!("  late {:.0} %", 100.0 * late);
    }
    text + "\n"
}

fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .context("cannot write the results")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_the_columns_of_osu() {
        let row = Row {
            bytes: 1024,
            window: 64,
            iterations: 100,
            value: Some(1234.567),
            raw: None,
            transfer: None,
            path: None,
            errors: None,
            percentiles: None,
            late: None,
        };
        // printf("%-*d%*.*f\n", 10, size, 20, 2, bw), as in osu_bw.c
        assert_eq!(
            line(Kind::Bw, &row, [false; 2]),
            "1024                   1234.57\n"
        );
        let row = Row {
            raw: Some(2469.134),
            errors: Some(0),
            ..row
        };
        assert_eq!(
            line(Kind::Bw, &row, [true, false]),
            "1024                   1234.57             2469.13     0.500                Pass\n"
        );
        assert_eq!(
            columns(Kind::Bw, [false; 2], false),
            "# Size        Bandwidth (MB/s)"
        );
        // fprintf("%-*d%*.*f%*.*f\n", 10, size, 20, 2, bw, 20, 2, rate), as in osu_mbw_mr.c
        assert_eq!(
            line(
                Kind::MbwMr,
                &Row {
                    raw: None,
                    transfer: None,
                    path: None,
                    errors: None,
                    ..row
                },
                [false; 2]
            ),
            "1024                   1234.57          1205631.84\n"
        );
    }

    #[test]
    fn late_rows_are_marked() {
        let row = |late| Row {
            bytes: 8,
            window: 1,
            iterations: 10,
            value: Some(2.5),
            raw: None,
            transfer: None,
            path: None,
            errors: None,
            percentiles: None,
            late,
        };
        let shown = |late| line(Kind::Latency, &row(late), [false; 2]);
        let plain = "8                         2.50\n";
        for late in [None, Some(0.01), Some(f64::NAN)] {
            assert_eq!(shown(late), plain);
        }
        assert_eq!(shown(Some(0.124)), plain.replace('\n', "  late 12 %\n"));
    }

    #[test]
    fn values_are_in_osu_units() {
        let is =
            |found: Option<f64>, wanted: f64| (found.expect("time passed") - wanted).abs() < 1e-9;
        // 100 windows of 64 messages of 1 MB (10^6 bytes) in one second.
        assert!(is(value(Kind::Bw, 1_000_000, 64, 100, 1.0), 6400.0));
        assert!(is(value(Kind::Bibw, 1_000_000, 64, 100, 1.0), 12800.0));
        // 1000 round trips in 20 ms are 20 us each, 10 us one way.
        assert!(is(value(Kind::Latency, 8, 1, 1000, 0.02), 10.0));
        assert_eq!(value(Kind::Bw, 8, 1, 1000, 0.0), None);
    }
}
