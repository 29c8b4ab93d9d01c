//! `anabranch plan`: how a message would be split, and what that brings.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anabranch_engine::config::{format_size, parse_size, Owner};
use anabranch_engine::model::{Model, ASSUMED};
use anabranch_engine::plan::{
    Graph, Message, Occupancy, Options, Order, PathKind, Plan, PlanError, Planner,
};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::json::Json;
use crate::output;
use crate::table;
use crate::topo::source::{self, Source};
use crate::Failure;

/// A kind of path.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// One copy from GPU to GPU
    Direct,
    /// Over other GPUs
    Relay,
    /// Through host memory
    Host,
}

/// Who makes the copies.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Assignment {
    /// Each rank those of its own GPU, as by default in a program
    #[value(alias = "own")]
    Two,
    /// The receiver all of them, as with ANABRANCH_OWNER=one
    One,
}

impl From<Owner> for Assignment {
    fn from(owner: Owner) -> Assignment {
        match owner {
            Owner::Two => Assignment::Two,
            Owner::One => Assignment::One,
        }
    }
}

impl Assignment {
    /// What the planner may do where these make the copies.
    pub fn options(self, options: Options, model: &Model) -> Options {
        match self {
            Assignment::One => options.by_one(model),
            Assignment::Two => options.by_each(),
        }
    }
}

/// In what order copies are launched.
#[derive(Clone, Copy, ValueEnum)]
enum OrderName {
    /// The direct copy first, then a chunk of each other path in turn
    DirectFirst,
    /// A chunk of each path in turn
    RoundRobin,
    /// One path after the other
    PathByPath,
}

/// More than any GPU's memory.
const BYTES_MAX: u64 = 1 << 40;

fn size(text: &str) -> Result<u64, String> {
    match parse_size(text) {
        None => Err(format!("{text:?} is no size: write 16K, 4M or 1G")),
        Some(0) => Err("nothing is sent where there is no byte".into()),
        Some(bytes) if bytes > BYTES_MAX => Err(format!(
            "no GPU has so much memory: {} at most",
            format_size(BYTES_MAX)
        )),
        Some(bytes) => Ok(bytes),
    }
}

/// Arguments of `anabranch plan`.
#[derive(Args)]
pub struct Arguments {
    /// Number of the GPU that has the message
    #[arg(long, value_name = "GPU")]
    from: u8,
    /// Number of the GPU that is to have it
    #[arg(long, value_name = "GPU")]
    to: u8,
    /// Its length
    #[arg(long, value_name = "BYTES", value_parser = size)]
    size: u64,
    /// A node that comes with the command (beluga, narval, dgx1-v100, hgx-h200) or a file, instead of this machine
    #[arg(long, value_name = "NAME|FILE")]
    topology: Option<String>,
    /// Where the measurement of this machine is kept [default: in the user's cache folder]
    #[arg(long, value_name = "FILE", conflicts_with = "topology")]
    model: Option<PathBuf>,
    /// Messages that follow each other without a pause
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536))]
    window: u32,
    /// The same goes the other way at the same time
    #[arg(long)]
    both_ways: bool,
    /// Paths that may be taken
    #[arg(
        long,
        value_name = "KINDS",
        value_delimiter = ',',
        default_value = "direct,relay,host"
    )]
    paths: Vec<Kind>,
    /// How many paths over other GPUs at most
    #[arg(long, value_name = "COUNT")]
    relays: Option<u32>,
    /// How many GPUs one such path may lead over [default: 1, with --owner one 2]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=2))]
    depth: Option<u32>,
    /// Plan as a receiver does in a program of which the copies are made by these
    #[arg(long, alias = "assign", value_name = "WHO", default_value = "two")]
    owner: Assignment,
    /// How many chunks a path may have, unless its staging memory is too small for so long ones
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    chunks: Option<u32>,
    /// In what order copies are launched
    #[arg(long, value_name = "ORDER", default_value = "direct-first")]
    order: OrderName,
    /// Write the copies of the plan, and what they wait for, for Graphviz; - for stdout instead of the text
    #[arg(long, value_name = "FILE")]
    dot: Option<PathBuf>,
    #[command(flatten)]
    json: Json,
}

/// The message of which a plan is asked, and what it is in a program.
#[derive(Clone, Copy)]
pub struct Asked {
    /// Number of the GPU that has it.
    pub from: u8,
    /// Number of the one that is to have it.
    pub to: u8,
    /// Its length.
    pub bytes: u64,
    /// So many follow each other without a pause.
    pub window: u32,
    /// As many of the same length go the other way at the same time.
    pub is_both_ways: bool,
    /// Who makes the copies.
    pub owner: Assignment,
}

impl Asked {
    /// The plan that the receiver makes, with options as they are by this assignment.
    ///
    /// # Errors
    /// As [`Planner::plan`].
    pub fn plan(&self, source: &Source, options: &Options) -> Result<Plan, PlanError> {
        let planner = match self.owner {
            Assignment::One => Planner::new(&source.topology, &source.model.of_one()),
            Assignment::Two => Planner::new(&source.topology, &source.model),
        };
        let message = |from, to| Message {
            window: self.window,
            // A receiver pulls what comes straight, where the sender makes copies of its own.
            may_put: self.owner != Assignment::Two,
            ..Message::new(from, to, self.bytes)
        };
        let (there, back) = (message(self.from, self.to), message(self.to, self.from));
        let options = &Options {
            both_ways: self.is_both_ways && self.owner == Assignment::Two,
            ..*options
        };
        let mut plan = planner.plan(&Occupancy::free(), &there, options)?;
        if self.is_both_ways {
            // Each end plans by what it sees of the other's plan, which that one has made by what it saw.
            for message in [&back, &there, &back, &there] {
                let mut others = Occupancy::free();
                others.add_plan(&source.topology, &plan);
                plan = planner.plan(&others, message, options)?;
            }
        }
        Ok(plan)
    }
}

#[derive(Serialize)]
struct Report {
    topology: String,
    measured: bool,
    assumed: [&'static str; 2],
    owner: Assignment,
    both_ways: bool,
    message: Message,
    predicted_us: f64,
    predicted_gb_s: f64,
    direct_us: Option<f64>,
    gain: Option<f64>,
    order: Order,
    paths: Vec<PathReport>,
    graph: Graph,
}

#[derive(Serialize)]
struct PathReport {
    path: String,
    kind: PathKind,
    share: f64,
    offset: u64,
    bytes: u64,
    chunks: u32,
    chunk_bytes: u64,
    slots: u32,
    staging_bytes: u64,
    engines: Vec<u8>,
    predicted_us: f64,
}

/// Plans, and prints the plan.
///
/// # Errors
/// There is no such node, or no such plan.
pub fn main(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let is_dot_alone = arguments.dot.as_deref() == Some(Path::new("-"));
    if is_dot_alone && arguments.json.is_alone() {
        let text = "--dot - and --json both write to stdout: give --dot a file";
        return Err(Failure::new(2, text).into());
    }
    if arguments.owner == Assignment::Two && arguments.depth == Some(2) {
        let text = "--depth 2 needs --owner one: where each rank makes the copies of its own GPU, a path leads over one other";
        return Err(Failure::new(2, text).into());
    }
    let source = source::find(
        arguments.topology.as_deref(),
        arguments.model.as_deref(),
        false,
    )?;
    let asked = Asked {
        from: arguments.from,
        to: arguments.to,
        bytes: arguments.size,
        window: arguments.window,
        is_both_ways: arguments.both_ways,
        owner: arguments.owner,
    };
    let plan = asked
        .plan(&source, &arguments.options(&source.model))
        .map_err(|error| Failure::new(2, error.to_string()))?;
    arguments.json.write(&report(&source, &asked, &plan))?;
    if let Some(file) = &arguments.dot {
        let dot = plan.graph().dot(&plan);
        if is_dot_alone {
            output::text(&dot)?;
        } else {
            std::fs::write(file, dot)
                .map_err(|error| Failure::new(2, format!("--dot {}: {error}", file.display())))?;
        }
    }
    if !is_dot_alone && !arguments.json.is_alone() {
        output::text(&render(&source, &asked, &plan))?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Arguments {
    fn options(&self, model: &Model) -> Options {
        let defaults = self.owner.options(Options::default(), model);
        Options {
            direct: self.paths.contains(&Kind::Direct),
            relay: self.paths.contains(&Kind::Relay),
            host: self.paths.contains(&Kind::Host),
            relays_max: self.relays.unwrap_or(defaults.relays_max),
            relay_depth_max: self.depth.unwrap_or(defaults.relay_depth_max),
            chunks_max: self.chunks.unwrap_or(defaults.chunks_max),
            order: match self.order {
                OrderName::DirectFirst => Order::DirectFirst,
                OrderName::RoundRobin => Order::RoundRobin,
                OrderName::PathByPath => Order::PathByPath,
            },
            ..defaults
        }
    }
}

fn share(plan: &Plan, bytes: u64) -> f64 {
    bytes as f64 / (plan.message.bytes as f64).max(1.0)
}

fn report(source: &Source, asked: &Asked, plan: &Plan) -> Report {
    let path = |path: &anabranch_engine::plan::PathPlan| PathReport {
        path: path.path.to_string(),
        kind: path.path.kind(),
        share: share(plan, path.bytes),
        offset: path.offset,
        bytes: path.bytes,
        chunks: path.chunks,
        chunk_bytes: path.chunk_bytes,
        slots: path.slots,
        staging_bytes: path.staging_bytes(),
        engines: path.engines[..path.path.hops()].to_vec(),
        predicted_us: path.predicted_us,
    };
    let has_direct = plan.direct_us.is_finite();
    Report {
        topology: source.topology.name.clone(),
        measured: source.measured,
        assumed: ASSUMED,
        owner: asked.owner,
        both_ways: asked.is_both_ways,
        message: plan.message,
        predicted_us: plan.predicted_us,
        predicted_gb_s: plan.predicted_gb_s(),
        direct_us: has_direct.then_some(plan.direct_us),
        gain: has_direct.then(|| plan.gain()),
        order: plan.order,
        paths: plan.paths().iter().map(path).collect(),
        graph: plan.graph(),
    }
}

fn render(source: &Source, asked: &Asked, plan: &Plan) -> String {
    let message = &plan.message;
    let mut out = format!(
        "{}: {} from GPU{} to GPU{}{}, window {}, {}\n{}\n\n",
        source.topology.name,
        format_size(message.bytes),
        message.from,
        message.to,
        if asked.is_both_ways {
            " and back at the same time"
        } else {
            ""
        },
        message.window,
        if source.measured {
            "measured numbers, hand-overs assumed"
        } else {
            "nominal numbers"
        },
        match asked.owner {
            Assignment::Two => "each rank makes the copies of its own GPU (ANABRANCH_OWNER=two)",
            Assignment::One => "the receiver makes all copies (ANABRANCH_OWNER=one)",
        }
    );
    let mut rows = vec![[
        "path",
        "share",
        "bytes",
        "chunks",
        "of bytes",
        "slots",
        "engines",
        "ends after",
    ]
    .map(str::to_owned)
    .to_vec()];
    for path in plan.paths() {
        let engines: Vec<String> = path.engines[..path.path.hops()]
            .iter()
            .map(|gpu| format!("GPU{gpu}"))
            .collect();
        rows.push(vec![
            path.path.to_string(),
            format!("{:.1} %", 100.0 * share(plan, path.bytes)),
            table::grouped(path.bytes),
            table::grouped(path.chunks.into()),
            table::grouped(path.chunk_bytes),
            path.slots.to_string(),
            engines.join(" "),
            format!("{:.1} us", path.predicted_us),
        ]);
    }
    out += &table::text("<>>>>><>", rows);
    let _ = writeln!(
        out,
        "\npredicted: {:.1} us, {:.1} GB/s",
        plan.predicted_us,
        plan.predicted_gb_s()
    );
    if plan.direct_us.is_finite() {
        let _ = writeln!(
            out,
            "direct alone: {:.1} us; {:.3} times as fast",
            plan.direct_us,
            plan.gain()
        );
    }
    out
}
