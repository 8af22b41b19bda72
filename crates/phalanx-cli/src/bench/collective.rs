//! Times one collective at several sizes.
//!
//! Protocol: results are verified before anything is timed; rank 0 chooses the
//! number of iterations and broadcasts it; every iteration is timed on every
//! rank and counts with the time of its slowest rank.

use std::time::{Duration, Instant};

use phalanx_comm::{Bucket, ProcessGroup, ReduceOp};
use serde_json::json;

use super::memory;
use crate::error::{Error, ErrorKind, Result, refuse};
use crate::format;
use crate::launch;
use crate::units::{ByteSize, time};
use phalanx_launch::RankArgs;
use phalanx_train::RankContext;

/// Arguments of a collective benchmark.
#[derive(Debug, Clone, clap::Args)]
pub struct CollectiveArgs {
    /// Sizes, separated by commas
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "4,1KiB,64KiB,1MiB,25MiB",
        value_name = "SIZE,..."
    )]
    pub bytes: Vec<ByteSize>,
    /// Iterations per size [default: as many as fit into one second, 5 to 2000]
    #[arg(long, value_name = "N")]
    pub iters: Option<usize>,
    /// Use registered buffers, which other ranks of this host read and write in place
    #[arg(long)]
    pub registered: bool,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub ranks: RankArgs,
}

impl CollectiveArgs {
    /// Checks what can be checked before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub fn validate(&self, op: Op) -> Result<()> {
        crate::error::check_count("--iters", self.iters.unwrap_or(1), 1 << 30)?;
        // Under a launcher, the number of ranks on this host is unknown.
        if launch::rank_place(&launch::real_env())?.is_some() || op == Op::Barrier {
            return Ok(());
        }
        let world = self.ranks.ranks_to_start()?;
        let largest = self.bytes.iter().map(|size| size.0).max().unwrap_or(0);
        let needed = op.buffer_bytes(largest, world) as u64 * world as u64;
        match memory::left_bytes().filter(|left| needed > *left) {
            None => Ok(()),
            Some(left) => Err(Error::usage(format!(
                "{} of {} on {} is too large for this host: it needs {}, and {} are left",
                op.name(),
                format::bytes(largest),
                format::plural(world, "rank"),
                format::bytes(needed as usize),
                format::bytes(left as usize),
            ))
            .note("try", "a smaller --bytes, or fewer ranks")),
        }
    }
}

/// The collective to time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Barrier,
}

impl Op {
    fn name(self) -> &'static str {
        match self {
            Op::AllReduce => "all-reduce",
            Op::Broadcast => "broadcast",
            Op::Reduce => "reduce",
            Op::AllGather => "all-gather",
            Op::ReduceScatter => "reduce-scatter",
            Op::AllToAll => "all-to-all",
            Op::Barrier => "barrier",
        }
    }

    /// Whether ranks have parts besides the whole.
    fn has_parts(self) -> bool {
        matches!(self, Op::AllGather | Op::ReduceScatter | Op::AllToAll)
    }

    /// Bytes in the buffers of one of `world` ranks.
    fn buffer_bytes(self, bytes: usize, world: usize) -> usize {
        let part = if self.has_parts() {
            bytes / world.max(1)
        } else {
            0
        };
        let other = if self == Op::AllToAll { bytes } else { 0 };
        bytes + other + part
    }

    /// Bus bandwidth per algorithm bandwidth, by NCCL's definition.
    fn bus_factor(self, world: usize) -> f64 {
        let p = world as f64;
        match self {
            Op::AllReduce => 2.0 * (p - 1.0) / p,
            Op::AllGather | Op::ReduceScatter | Op::AllToAll => (p - 1.0) / p,
            Op::Broadcast | Op::Reduce | Op::Barrier => 1.0,
        }
    }
}

const WARMUP_ITERS: usize = 3;
/// Ranks that were just started may share a core while another is free: the
/// kernel needs some ticks to see it, in which a small operation takes ten
/// times its time.
const SETTLING: Duration = Duration::from_millis(100);
const TARGET: Duration = Duration::from_secs(1);

/// Runs the benchmark as one rank; rank 0 prints.
///
/// # Errors
///
/// A failed collective, or a wrong result.
pub fn run_rank(ctx: &RankContext, op: Op, args: &CollectiveArgs) -> Result<()> {
    let transport = ctx.transport();
    let adds = matches!(op, Op::AllReduce | Op::Reduce | Op::ReduceScatter);
    if ctx.is_main() && !args.json {
        ctx.line(&format!(
            "{}{}, {}, {transport}{}\n{:>12} {:>8} {:>12} {:>12} {:>12} {:>11} {:>11}",
            op.name(),
            if adds { " f32 sum" } else { "" },
            format::plural(ctx.world(), "rank"),
            if args.registered { ", registered" } else { "" },
            "bytes",
            "iters",
            "median",
            "p10",
            "p90",
            "algbw",
            "busbw"
        ))?;
    }
    let sizes: &[ByteSize] = if op == Op::Barrier {
        &[ByteSize(0)]
    } else {
        &args.bytes
    };
    for size in sizes {
        let group = ctx.group();
        let mut run = Run::new(&group, op, size.0, args.registered);
        run.check_registered()?;
        run.verify()?;
        let iters = agree_on_iterations(&group, &mut run, args.iters)?;
        let mut times_us = Vec::with_capacity(iters);
        for _ in 0..iters {
            ctx.group().barrier()?;
            let began = Instant::now();
            run.once()?;
            times_us.push(began.elapsed().as_secs_f64() * 1e6);
        }
        ctx.group().all_reduce(&mut times_us, ReduceOp::Max)?;
        if ctx.is_main() {
            times_us.sort_by(f64::total_cmp);
            report(ctx, op, transport, &run, &times_us, args.json)?;
        }
    }
    Ok(())
}

fn report(
    ctx: &RankContext,
    op: Op,
    transport: &str,
    run: &Run<'_>,
    sorted_us: &[f64],
    as_json: bool,
) -> Result<()> {
    let bytes = run.bytes();
    let at = |q: f64| sorted_us[((sorted_us.len() - 1) as f64 * q).round() as usize];
    let median = at(0.5);
    let alg_gb_s = bytes as f64 / median / 1e3;
    let bus_gb_s = alg_gb_s * op.bus_factor(ctx.world());
    if as_json {
        let line = json!({
            "op": op.name(), "transport": transport, "world": ctx.world(), "bytes": bytes,
            "iters": sorted_us.len(), "median_us": median, "p10_us": at(0.1), "p90_us": at(0.9),
            "alg_gb_s": alg_gb_s, "bus_gb_s": bus_gb_s, "registered": run.registered,
        });
        return ctx.line(&line.to_string());
    }
    let speed = |gb_s: f64| match bytes < 1024 || ctx.world() == 1 {
        true => "-".to_owned(),
        false => format!("{gb_s:.2} GB/s"),
    };
    ctx.line(&format!(
        "{:>12} {:>8} {:>12} {:>12} {:>12} {:>11} {:>11}",
        format::bytes(bytes),
        sorted_us.len(),
        time(median),
        time(at(0.1)),
        time(at(0.9)),
        speed(alg_gb_s),
        speed(bus_gb_s)
    ))
}

/// Rank 0 measures a few iterations and broadcasts the number to run.
fn agree_on_iterations(
    group: &ProcessGroup,
    run: &mut Run<'_>,
    wanted: Option<usize>,
) -> Result<usize> {
    let timed = |run: &mut Run<'_>| -> Result<Duration> {
        group.barrier()?;
        let began = Instant::now();
        for _ in 0..WARMUP_ITERS {
            run.once()?;
        }
        Ok(began.elapsed() / WARMUP_ITERS as u32)
    };
    timed(run)?;
    let each = timed(run)?;
    let settling = SETTLING.as_nanos() / each.as_nanos().max(1);
    let mut settling = [settling.min(1 << 20) as i64];
    group.broadcast(&mut settling, 0)?;
    for _ in 0..settling[0] {
        run.once()?;
    }
    let each = timed(run)?;
    let fitting = TARGET.as_nanos() / each.as_nanos().max(1);
    let mut iters = [wanted.unwrap_or((fitting as usize).clamp(5, 2000)) as i64];
    group.broadcast(&mut iters, 0)?;
    Ok(usize::try_from(iters[0]).unwrap_or(1).max(1))
}

/// Buffers of one benchmark.
struct Run<'a> {
    group: &'a ProcessGroup,
    op: Op,
    registered: bool,
    whole: Bucket<f32>,
    other: Bucket<f32>,
    part: Bucket<f32>,
}

impl<'a> Run<'a> {
    fn new(group: &'a ProcessGroup, op: Op, bytes: usize, registered: bool) -> Self {
        let world = group.world_size();
        let parts = op.has_parts();
        let elems = if parts {
            bytes.div_ceil(4).div_ceil(world) * world
        } else {
            bytes.div_ceil(4)
        };
        let bucket = |elems| match registered {
            true => group.bucket(elems),
            false => Bucket::zeroed(elems),
        };
        Run {
            group,
            op,
            registered,
            whole: bucket(elems),
            other: bucket(if op == Op::AllToAll { elems } else { 0 }),
            part: bucket(if parts { elems / world } else { 0 }),
        }
    }

    /// Figures must not be those of something else than was asked for.
    fn check_registered(&self) -> Result<()> {
        let buckets = [&self.whole, &self.other, &self.part];
        let missing = |b: &&Bucket<f32>| !b.is_empty() && !b.is_registered();
        if self.registered && buckets.iter().any(missing) {
            refuse!(
                "there are no registered buckets here: they need two or more ranks, all on one host and linked by \
                 shared memory (or as threads), and address space; leave out --registered"
            );
        }
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.whole.len() * size_of::<f32>()
    }

    fn once(&mut self) -> Result<()> {
        let group = self.group;
        if self.registered {
            return self.once_registered();
        }
        match self.op {
            Op::AllReduce => group.all_reduce(&mut self.whole[..], ReduceOp::Sum)?,
            Op::Broadcast => group.broadcast(&mut self.whole[..], 0)?,
            Op::Reduce => group.reduce(&mut self.whole[..], ReduceOp::Sum, 0)?,
            Op::AllGather => group.all_gather(&self.part[..], &mut self.whole[..])?,
            Op::ReduceScatter => {
                group.reduce_scatter(&self.whole[..], &mut self.part[..], ReduceOp::Sum)?
            }
            Op::AllToAll => group.all_to_all(&self.whole[..], &mut self.other[..])?,
            Op::Barrier => group.barrier()?,
        }
        Ok(())
    }

    fn once_registered(&mut self) -> Result<()> {
        let group = self.group;
        match self.op {
            Op::AllReduce => {
                group.all_reduce(&mut self.whole, ReduceOp::Sum)?;
            }
            Op::Broadcast => group.broadcast(&mut self.whole, 0)?,
            Op::Reduce => group.reduce(&mut self.whole, ReduceOp::Sum, 0)?,
            Op::AllGather => group.all_gather(&mut self.part, &mut self.whole)?,
            Op::ReduceScatter => {
                group.reduce_scatter(&mut self.whole, &mut self.part, ReduceOp::Sum)?;
            }
            Op::AllToAll => group.all_to_all(&mut self.whole, &mut self.other)?,
            Op::Barrier => group.barrier()?,
        }
        Ok(())
    }

    /// Runs once on known numbers (element i of rank r is r + i mod 17; small
    /// integers, so sums are exact) and compares.
    fn verify(&mut self) -> Result<()> {
        let (rank, world) = (self.group.rank(), self.group.world_size());
        let value = |r: usize, i: usize| (r + i % 17) as f32;
        let sum = |i: usize| (0..world).map(|r| value(r, i)).sum::<f32>();
        let part_len = self.part.len();
        for (i, v) in self.whole.iter_mut().enumerate() {
            *v = value(rank, i);
        }
        for (i, v) in self.part.iter_mut().enumerate() {
            *v = value(rank, i);
        }
        self.once()?;
        let right = match self.op {
            Op::AllReduce => all(&self.whole, sum),
            Op::Broadcast => all(&self.whole, |i| value(0, i)),
            Op::Reduce => rank != 0 || all(&self.whole, sum),
            Op::AllGather => all(&self.whole, |i| value(i / part_len, i % part_len)),
            Op::ReduceScatter => all(&self.part, |i| sum(rank * part_len + i)),
            Op::AllToAll => all(&self.other, |i| {
                value(i / part_len, rank * part_len + i % part_len)
            }),
            Op::Barrier => true,
        };
        // Sums would grow without bound over thousands of iterations.
        self.whole.fill(0.0);
        self.part.fill(0.0);
        if right {
            return Ok(());
        }
        let (name, bytes) = (self.op.name(), self.bytes());
        Err(Error::new(
            ErrorKind::Failed,
            format!(
                "{name} of {bytes} bytes gave a wrong result on rank {rank}; this is a bug in phalanx"
            ),
        ))
    }
}

fn all(got: &[f32], want: impl Fn(usize) -> f32) -> bool {
    got.iter().enumerate().all(|(i, &v)| v == want(i))
}
