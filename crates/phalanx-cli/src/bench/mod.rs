//! `phalanx bench`: collectives and whole training steps, timed.

mod collective;
pub(crate) mod memory;
mod train;

use crate::error::Result;
use phalanx::watch;

/// Arguments of `phalanx bench`.
#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Sum over all ranks, result on all ranks
    AllReduce(collective::CollectiveArgs),
    /// Rank 0's data to all ranks
    Broadcast(collective::CollectiveArgs),
    /// Sum over all ranks, result on rank 0
    Reduce(collective::CollectiveArgs),
    /// Each rank's part to all ranks; sizes are of the whole result
    AllGather(collective::CollectiveArgs),
    /// Sum over all ranks, one part to each rank; sizes are of the whole input
    ReduceScatter(collective::CollectiveArgs),
    /// A part from every rank to every rank; sizes are of the whole input
    AllToAll(collective::CollectiveArgs),
    /// Wait until all ranks have arrived; no data
    Barrier(collective::CollectiveArgs),
    /// Training steps on synthetic data, in steady state
    Train(train::TrainBenchArgs),
}

/// Runs `phalanx bench`.
///
/// # Errors
///
/// Whatever ended a rank, wrong results included.
pub fn run(args: BenchArgs) -> Result<()> {
    use collective::Op;
    let (op, args) = match args.what {
        What::Train(args) => {
            args.validate()?;
            return watch::run_ranks(&args.ranks, |ctx| train::run_rank(ctx, &args));
        }
        What::AllReduce(args) => (Op::AllReduce, args),
        What::Broadcast(args) => (Op::Broadcast, args),
        What::Reduce(args) => (Op::Reduce, args),
        What::AllGather(args) => (Op::AllGather, args),
        What::ReduceScatter(args) => (Op::ReduceScatter, args),
        What::AllToAll(args) => (Op::AllToAll, args),
        What::Barrier(args) => (Op::Barrier, args),
    };
    args.validate(op)?;
    watch::run_ranks(&args.ranks, |ctx| collective::run_rank(ctx, op, &args))
}
