//! `phalanx plan`: the algorithm and predicted time of each collective, and the best
//! bucket size, from measured or given constants.

mod report;

use phalanx_comm::plan::Hosts;
use phalanx_comm::{Costs, Rules, Selector};

use crate::error::{Error, Result, refuse};
use crate::launch;
use crate::say;
use crate::units::{ByteSize, Delay, Rate};
use phalanx::watch;
use phalanx_launch::RankArgs;

/// Arguments of `phalanx plan`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    phalanx plan --nnodes 4 --nproc-per-node 8 --rate 25gbit\n  \
    phalanx plan --nnodes 2 --world 6 --rate 1gbit --delay 0.2ms --json\n  \
    PHALANX_ALGORITHM=all_reduce=ring:1MiB- phalanx plan --nnodes 3\n  \
    phalanx launch --nnodes 2 ... -- phalanx plan        measures the wire it will run on\n\n\
    Under a launcher the ranks meet and measure; otherwise nothing is started and the\n\
    constants are those given.")]
pub struct PlanArgs {
    /// World size [default: --nnodes times --nproc-per-node]
    #[arg(long, value_name = "N")]
    pub world: Option<usize>,
    /// Number of hosts
    #[arg(long, value_name = "H", default_value_t = 1)]
    pub nnodes: usize,
    /// Ranks on each host [default: 1, or --world divided by --nnodes]
    #[arg(long, value_name = "L")]
    pub nproc_per_node: Option<usize>,
    /// Sizes, separated by commas
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "4,1KiB,64KiB,1MiB,25MiB",
        value_name = "SIZE,..."
    )]
    pub bytes: Vec<ByteSize>,
    /// Bandwidth of a host's network card in each direction
    #[arg(long, default_value = "10gbit", value_name = "RATE")]
    pub rate: Rate,
    /// Latency of a small message between hosts
    #[arg(long, default_value = "30us", value_name = "TIME")]
    pub delay: Delay,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// Most ranks and hosts that plans are predicted for.
const MAX_RANKS: usize = 1 << 16;

/// Runs `phalanx plan`.
///
/// # Errors
///
/// Usage errors naming the flag; under a launcher whatever ended a rank.
pub fn run(args: &PlanArgs) -> Result<()> {
    if launch::rank_place(&launch::real_env())?.is_none() {
        let costs = Costs {
            wire_latency_s: args.delay.0,
            wire_bytes_per_s: args.rate.0,
            ..Costs::default()
        };
        let rules = match std::env::var("PHALANX_ALGORITHM") {
            Ok(text) => text
                .parse::<Rules>()
                .map_err(|e| Error::usage(format!("PHALANX_ALGORITHM: {e}")))?,
            Err(_) => Rules::default(),
        };
        let selector = Selector::new(hosts(args)?, costs, rules);
        return say::print(&format!("{}\n", report(&selector, args, None)));
    }
    let ranks: RankArgs = RankArgs::untyped()?;
    watch::run_ranks(&ranks, |ctx| {
        if ctx.is_main() {
            let text = report(ctx.group().selector(), args, Some(&ctx.group().describe()));
            ctx.line(&text)?;
        }
        Ok(())
    })
}

/// Ranks per host; if they do not divide evenly, the first hosts have one more.
fn hosts(args: &PlanArgs) -> Result<Hosts> {
    crate::error::check_count("--nnodes", args.nnodes, MAX_RANKS)?;
    let each = args.nproc_per_node.unwrap_or(1);
    crate::error::check_count("--nproc-per-node", each, MAX_RANKS)?;
    let world = args.world.unwrap_or(args.nnodes * each);
    crate::error::check_count("--world", world, MAX_RANKS)?;
    if args.nproc_per_node.is_some() && world != args.nnodes * each {
        refuse!(
            "--world {world} is not --nnodes {} times --nproc-per-node {each}; leave one of them out",
            args.nnodes
        );
    }
    if world < args.nnodes {
        refuse!(
            "--world {world} leaves some of {} hosts without a rank",
            args.nnodes
        );
    }
    let sizes: Vec<usize> = (0..args.nnodes)
        .map(|host| world / args.nnodes + usize::from(host < world % args.nnodes))
        .collect();
    Ok(Hosts::of_sizes(&sizes))
}

fn report(selector: &Selector, args: &PlanArgs, measured: Option<&str>) -> String {
    if args.json {
        report::as_json(selector, &args.bytes, measured.is_some()).to_string()
    } else {
        report::as_text(selector, &args.bytes, measured)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn args(world: Option<usize>, nnodes: usize, each: Option<usize>) -> PlanArgs {
        PlanArgs {
            world,
            nnodes,
            nproc_per_node: each,
            bytes: vec![ByteSize(4), ByteSize(25 << 20)],
            rate: Rate(1.25e9),
            delay: Delay(30e-6),
            json: false,
        }
    }

    #[test]
    fn ranks_are_dealt_to_hosts() {
        let sizes = |args: &PlanArgs| {
            let hosts = hosts(args).unwrap();
            (0..hosts.count())
                .map(|h| hosts.ranks(h).len())
                .collect::<Vec<_>>()
        };
        assert_eq!(sizes(&args(None, 1, None)), [1]);
        assert_eq!(sizes(&args(None, 2, Some(4))), [4, 4]);
        assert_eq!(sizes(&args(Some(7), 3, None)), [3, 2, 2]);
        for (wrong, names) in [
            (args(Some(7), 2, Some(4)), "--world 7"),
            (args(Some(1), 2, None), "without a rank"),
            (args(Some(0), 1, None), "--world"),
            (args(None, 0, None), "--nnodes"),
        ] {
            let error = hosts(&wrong).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(error.render().contains(names), "{}", error.render());
        }
    }
}
