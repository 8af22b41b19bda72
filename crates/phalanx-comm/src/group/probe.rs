//! Measures the network when a group forms, so that all ranks choose methods by the same numbers.

use std::time::{Duration, Instant};

use crate::backend::Runner;
use crate::operation::{Buffers, Operation};
use crate::plan::{Hosts, Method};
use crate::select::Costs;
use crate::{DType, ReduceOp, Result};

/// Environment variable: `0` skips the probe.
const VARIABLE: &str = "PHALANX_PROBE";

/// Small all-reduces that are timed; the shortest counts.
const SMALL_ROUNDS: usize = 5;
/// Large all-reduces that are timed; the shortest counts.
const LARGE_ROUNDS: usize = 2;
/// Elements of a large all-reduce: 128 KiB, 2 ms at 1 Gbit/s.
const LARGE_ELEMS: usize = 32 << 10;

/// Whether the environment allows a probe.
pub(super) fn is_allowed() -> bool {
    std::env::var(VARIABLE).map_or(true, |text| !matches!(text.trim(), "0" | "off" | "no"))
}

/// The constants between hosts, the same on all ranks. Takes a few
/// milliseconds; leaves no trace in the runner's counters.
pub(super) fn measure(runner: &mut Runner, hosts: &Hosts) -> Result<Costs> {
    let mut costs = Costs::default();
    let mut data = vec![0f32; LARGE_ELEMS];
    let small = fastest(
        runner,
        &mut data[..1],
        Method::AllReduceOneRound,
        SMALL_ROUNDS,
    )?;
    let large = fastest(runner, &mut data, Method::AllReduceDirect, LARGE_ROUNDS)?;
    let (p, l) = (hosts.world() as f64, hosts.most_ranks() as f64);
    let latency = small.as_secs_f64() - (p - l - 1.0).max(0.0) * costs.wire_message_s;
    let latency = latency.max(costs.wire_message_s);
    // Bytes through the network card of the largest host, each way.
    let bytes = 2.0 * l * (p - l) / p * size_of_val(&data[..]) as f64;
    let moving = (large.as_secs_f64() - 2.0 * small.as_secs_f64()).max(1e-6);
    // All ranks use the numbers of the slowest.
    let mut agreed = [latency, moving / bytes];
    all_reduce(
        runner,
        &mut agreed,
        DType::F64,
        ReduceOp::Max,
        Method::AllReduceOneRound,
    )?;
    costs.wire_latency_s = agreed[0];
    costs.wire_bytes_per_s = 1.0 / agreed[1];
    runner.reset_counters();
    Ok(costs)
}

fn fastest(
    runner: &mut Runner,
    data: &mut [f32],
    method: Method,
    rounds: usize,
) -> Result<Duration> {
    let mut best = Duration::MAX;
    // The first round opens TCP windows and fills caches.
    for round in 0..=rounds {
        let began = Instant::now();
        all_reduce(runner, data, DType::F32, ReduceOp::Sum, method)?;
        if round > 0 {
            best = best.min(began.elapsed());
        }
    }
    Ok(best)
}

fn all_reduce<T>(
    runner: &mut Runner,
    data: &mut [T],
    dtype: DType,
    op: ReduceOp,
    method: Method,
) -> Result<()> {
    debug_assert_eq!(size_of::<T>(), dtype.size_bytes());
    let operation = Operation {
        op: Some(op),
        label: Some("the probe of the wire".into()),
        ..Operation::new(method.collective(), Some(method), Some(dtype), data.len())
    };
    let buffers = Buffers {
        output: data.as_mut_ptr().cast(),
        ..Buffers::none()
    };
    // SAFETY: an all-reduce works in place on `count` elements of the type,
    // which are borrowed exclusively until this returns; floats support sums
    // and maxima.
    unsafe { runner.run(&operation, buffers, None) }
}
