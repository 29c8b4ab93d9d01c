//! The program between MPI_Init and MPI_Finalize.

use crate::args::{self, Args, CellType, Dims};
use crate::check;
use crate::domain::Part;
use crate::failure::{agree, Failure, Outcome};
use crate::field::Cell;
use crate::gpu::{self, Gpu};
use crate::picture;
use crate::report::{self, RankReport, Report, Seconds};
use crate::selftest;
use crate::solver::{self, Ended, Solver};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use mpi::collective::SystemOperation;
use mpi::traits::*;

/// Runs what the command line asks for. Collective; rank 0 prints.
pub fn run(world: &impl Communicator, args: &Args) -> Outcome<()> {
    let (ranks, rank) = (world.size() as u32, world.rank() as u32);
    // The command line is the same everywhere, but a rank may lack a driver or memory: agree after each such step.
    let dims = agree(world, args.grid(ranks))?;
    let part = agree(world, Part::new(args.size, dims, args.boundary, rank))?;
    let cell_bytes = match args.cell {
        CellType::Float => 4,
        CellType::Double => 8,
    };
    agree(world, writable(args, rank))?;
    agree(
        world,
        if args.check && rank == 0 {
            check::fits(args, cell_bytes)
        } else {
            Ok(())
        },
    )?;
    let node = world.split_shared(world.rank());
    let gpu = agree(
        world,
        gpu::init().and_then(|devices| Gpu::open(node.rank() as u32 % devices)),
    )?;
    if args.self_test || args.compare_kernels {
        let cases = agree(world, selftest::run(&gpu))?;
        if rank == 0 {
            println!(
                "self-test   {cases} launches of {} kernels equal their host twins on {}",
                anabranch_kernels::TWINS.len(),
                gpu.name
            );
        }
    }
    if args.self_test {
        return Ok(());
    }
    agree(
        world,
        fits(
            &node,
            &gpu,
            solver::bytes_needed(&part, cell_bytes) + extra_bytes(args),
        ),
    )?;
    match args.cell {
        CellType::Float => solve::<f32, _>(world, args, dims, part, &gpu),
        CellType::Double => solve::<f64, _>(world, args, dims, part, &gpu),
    }
}

/// Rank 0 tries the files that it will write at the end: a bad path should not cost a run.
fn writable(args: &Args, rank: u32) -> Outcome<()> {
    for path in [&args.json, &args.png]
        .into_iter()
        .flatten()
        .filter(|_| rank == 0)
    {
        // Opened as it will be, but not emptied: a run that fails leaves an earlier result alone.
        let mut options = std::fs::OpenOptions::new();
        let opened = options.create(true).append(true).open(path);
        opened.map_err(|e| Failure::input(format!("cannot write {}: {e}", path.display())))?;
    }
    Ok(())
}

/// Device memory beside the solver's: the picture's pixels.
fn extra_bytes(args: &Args) -> u64 {
    let (height, width) = picture::dimensions(args.size);
    args.png.as_ref().map_or(0, |_| height * width * 4)
}

/// Whether what all ranks on this GPU are about to allocate fits. Collective on the node.
fn fits(node: &impl Communicator, gpu: &Gpu, needed: u64) -> Outcome<()> {
    // Each rank may see its own GPU only, so that identities are compared, not ordinals.
    let ranks = node.size() as usize;
    let mut uuids = vec![0u8; 16 * ranks];
    node.all_gather_into(&gpu.uuid[..], &mut uuids[..]);
    let mut needs = vec![0u64; ranks];
    node.all_gather_into(&needed, &mut needs[..]);
    // Nobody allocates before everybody has asked.
    let memory = gpu.memory();
    node.barrier();
    let (free, total) = memory?;
    let sharers = uuids
        .chunks_exact(16)
        .zip(&needs)
        .filter(|(uuid, _)| *uuid == gpu.uuid);
    let (count, sum) = sharers.fold((0, 0u64), |(n, sum), (_, need)| {
        (n + 1, sum.saturating_add(*need))
    });
    if sum <= free {
        return Ok(());
    }
    // In MiB, the need rounded up and what is free down, so that a near miss reads as one.
    let (sum, free, total) = (sum.div_ceil(1 << 20), free >> 20, total >> 20);
    let whose = if count > 1 {
        format!("the {count} ranks on {}", gpu.name)
    } else {
        gpu.name.clone()
    };
    Err(Failure::input(format!("the domain needs {sum} MiB on {whose}, {free} of {total} MiB are free: use more GPUs or a smaller --size")))
}

fn solve<T: Cell, C: Communicator>(
    world: &C,
    args: &Args,
    dims: Dims,
    part: Part,
    gpu: &Gpu,
) -> Outcome<()> {
    let mut solver = agree(world, Solver::<T, C>::new(world, gpu, args, part))?;
    if args.warmup > 0 {
        solver.run(args, args.warmup, 0.0, &ProgressBar::hidden())?;
    }
    let progress = progress_bar(world.rank(), args.iterations);
    let ended = solver.run(args, args.iterations, args.tolerance, &progress)?;
    progress.finish_and_clear();
    let hash = solver.global_hash()?;
    let mut report = report(world, args, dims, &part, gpu, &solver, &ended);
    report.hash = format!("{hash:#018x}");
    if args.check {
        let cells = if check::is_gathered(args, T::BYTES) {
            Some(solver.field.download(gpu)?)
        } else {
            None
        };
        report.check = Some(check::run(world, args, dims, cells, hash, &ended)?);
    }
    if let Some(path) = &args.png {
        let (height, width) = picture::dimensions(args.size);
        let pixels = whole_picture(world, &solver.field.sample(gpu, height, width)?);
        agree(
            world,
            pixels.map_or(Ok(()), |p| picture::write(path, height, width, &p)),
        )?;
    }
    publish(world, args, &report)
}

/// Rank 0 prints and writes the report.
fn publish(world: &impl Communicator, args: &Args, report: &Report) -> Outcome<()> {
    let mut outcome = Ok(());
    if world.rank() == 0 {
        println!("{}", report.text());
        if args.dump_hash {
            println!("hash        {}", report.hash);
        }
        outcome = args
            .json
            .as_ref()
            .map_or(Ok(()), |path| report.write_json(path));
    }
    agree(world, outcome)?;
    match &report.check {
        Some(check) if !check.equal => Err(Failure {
            agreed: true,
            ..Failure::wrong("the field differs from the host reference")
        }),
        _ => Ok(()),
    }
}

/// Ranks' pixels put together on rank 0: each pixel is one rank's, and zero on the others.
fn whole_picture(world: &impl Communicator, mine: &[f32]) -> Option<Vec<f32>> {
    let mine: Vec<u32> = mine.iter().map(|v| v.to_bits()).collect();
    let root = world.process_at_rank(0);
    if world.rank() != 0 {
        root.reduce_into(&mine[..], SystemOperation::bitwise_or());
        return None;
    }
    let mut all = vec![0u32; mine.len()];
    root.reduce_into_root(&mine[..], &mut all[..], SystemOperation::bitwise_or());
    Some(all.into_iter().map(f32::from_bits).collect())
}

/// On rank 0's terminal; hidden where stderr is none.
fn progress_bar(rank: i32, iterations: u64) -> ProgressBar {
    let target = if rank == 0 {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let bar = ProgressBar::with_draw_target(Some(iterations), target);
    match ProgressStyle::with_template("{bar:40} {pos}/{len} {per_sec} {msg}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Collects every rank's figures. Collective; hash and check are filled in later.
#[allow(clippy::too_many_arguments, reason = "what a report tells, each once")]
fn report<T: Cell, C: Communicator>(
    world: &C,
    args: &Args,
    dims: Dims,
    part: &Part,
    gpu: &Gpu,
    solver: &Solver<'_, T, C>,
    ended: &Ended,
) -> Report {
    let per_rank = collect(world, part, gpu, solver, ended);
    let seconds = summary(&per_rank);
    let exchange_mean = seconds.exchange;
    let total_mean = per_rank.iter().map(|r| r.seconds.total).sum::<f64>() / per_rank.len() as f64;
    let cells = (args.size.rows * args.size.cols) as f64 * ended.iterations as f64;
    let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
    Report {
        version: env!("CARGO_PKG_VERSION"),
        mpi_library: mpi::environment::library_version()
            .unwrap_or_default()
            .lines()
            .next()
            .unwrap_or_default()
            .trim_end_matches(['\0', ' '])
            .to_owned(),
        ranks: world.size() as u32,
        dims: [dims.rows, dims.cols],
        size: [args.size.rows, args.size.cols],
        cell: args::name(args.cell),
        boundary: args::name(args.boundary),
        exchange: args::name(args.exchange),
        seed: args.seed,
        warmup: args.warmup,
        iterations: ended.iterations,
        converged: ended.converged,
        norm_kind: args::name(args.norm),
        norm: ended.norm,
        hash: String::new(),
        clock: solver.clock().name(),
        late: ended
            .late_ns
            .map(|ns| ratio(ns as f64 / 1e9, seconds.total)),
        seconds,
        communication_share: ratio(exchange_mean, total_mean),
        mcells_per_second: ratio(cells, seconds.total) / 1e6,
        messages: per_rank.iter().map(|r| r.messages).sum(),
        message_bytes: per_rank.iter().map(|r| r.message_bytes).sum(),
        per_rank,
        check: None,
    }
}

/// Every rank's figures, on every rank.
fn collect<T: Cell, C: Communicator>(
    world: &C,
    part: &Part,
    gpu: &Gpu,
    solver: &Solver<'_, T, C>,
    ended: &Ended,
) -> Vec<RankReport> {
    const FIGURES: usize = 8;
    let (sent, phases) = (solver.sent(), ended.phases);
    let mine = [
        sent.messages,
        sent.bytes,
        phases.total_ns,
        phases.compute_ns,
        phases.exchange_ns,
        phases.norm_ns,
        part.rows,
        part.cols,
    ];
    let ranks = world.size() as usize;
    let mut figures = vec![0u64; FIGURES * ranks];
    world.all_gather_into(&mine[..], &mut figures[..]);
    let mut uuids = vec![0u8; 16 * ranks];
    world.all_gather_into(&gpu.uuid[..], &mut uuids[..]);
    let seconds = |ns: u64| ns as f64 / 1e9;
    let rank_report = |(rank, (f, uuid)): (usize, (&[u64], &[u8]))| RankReport {
        rank: rank as u32,
        gpu: report::uuid(uuid),
        part: [f[6], f[7]],
        messages: f[0],
        message_bytes: f[1],
        seconds: Seconds {
            total: seconds(f[2]),
            compute: seconds(f[3]),
            exchange: seconds(f[4]),
            norm: seconds(f[5]),
        },
    };
    figures
        .chunks_exact(FIGURES)
        .zip(uuids.chunks_exact(16))
        .enumerate()
        .map(rank_report)
        .collect()
}

/// Means of the phases, and the slowest rank's total.
fn summary(per_rank: &[RankReport]) -> Seconds {
    let mean = |f: fn(&Seconds) -> f64| {
        per_rank.iter().map(|r| f(&r.seconds)).sum::<f64>() / per_rank.len() as f64
    };
    let total = per_rank.iter().map(|r| r.seconds.total).fold(0.0, f64::max);
    Seconds {
        total,
        compute: mean(|s| s.compute),
        exchange: mean(|s| s.exchange),
        norm: mean(|s| s.norm),
    }
}
