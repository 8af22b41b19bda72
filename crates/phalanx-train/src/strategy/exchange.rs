//! `--exchange`: gradient synchronization.

use phalanx_comm::ReduceOp;
use phalanx_ddp::{Exchange, all_share_memory};

use crate::args::{ExchangeArg, Settings, needs_whole};
use crate::error::{Result, refuse};
use phalanx_member::RankContext;

/// Compute threads of a rank beyond which one thread's exchange would keep the others waiting for long.
const MAX_THREADS: usize = 2;

impl ExchangeArg {
    /// What is done with f32 gradients that are folded over ranks. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Peers that are lost.
    pub fn choose(self, ctx: &RankContext) -> Result<Exchange> {
        // Asked even if it does not matter: ranks with other flags shall meet where flags are compared.
        let busy = memory_and_no_idle_core(ctx)?;
        Ok(match self {
            ExchangeArg::Auto if busy => Exchange::AtStep,
            ExchangeArg::Auto | ExchangeArg::AllReduce => Exchange::AllReduce,
            ExchangeArg::ReduceScatter => Exchange::ReduceScatter,
            ExchangeArg::AtStep => Exchange::AtStep,
        })
    }

    /// [`choose`](Self::choose) for a training with `settings`: what needs whole gradients, watches them, or has buckets
    /// of its own gets all-reduces. `whole` is the name of an optimizer that updates whole parameters, if there is one.
    ///
    /// # Errors
    ///
    /// Usage, when that optimizer does not support the exchange; peers that are lost.
    pub fn choose_for(
        self,
        ctx: &RankContext,
        settings: &Settings,
        whole: Option<&str>,
    ) -> Result<Exchange> {
        let chosen = self.choose(ctx)?;
        let wants_whole = settings.watch > 0
            || settings.bucket_cap_mb.is_some()
            || ctx.elastic.is_some()
            || whole.is_some();
        if let (ExchangeArg::ReduceScatter | ExchangeArg::AtStep, Some(name)) = (self, whole) {
            refuse!(
                "{name} needs every rank to have whole gradients; leave out --exchange, or say --exchange all-reduce"
            );
        }
        Ok(match self {
            ExchangeArg::Auto if needs_whole(settings).is_some() || wants_whole => {
                Exchange::AllReduce
            }
            _ => chosen,
        })
    }
}

/// Whether several ranks share memory, and compute on all of its host's cores.
fn memory_and_no_idle_core(ctx: &RankContext) -> Result<bool> {
    let world = ctx.world();
    if world == 1 {
        return Ok(false);
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let idle = world * ctx.threads < cores || ctx.threads > MAX_THREADS;
    // Some ranks may see fewer cores than others.
    let mut any_idle = [u8::from(idle)];
    ctx.group().all_reduce(&mut any_idle, ReduceOp::Max)?;
    Ok(all_share_memory(&ctx.group())? && any_idle[0] == 0)
}
