//! Reduce over hosts with several ranks each, in canonical order: the prefix of the
//! fold passes every host once, and the result goes to the root.
//!
//! *Steps:* for every segment: to the holder on each host (1 round); from host to
//! host in ascending order (`H − 1` rounds), each folding its ranks onto what came;
//! from the last host to the root (1 round). Stages of different segments overlap.
//! *Bytes sent by rank r:* `n`: what it does not hold to the holders on its host, what it
//! holds to the next host, or from the last one to the root (less what the root
//! holds there itself). So every network card sends `n` and receives `n`, the root's
//! `2n` unless its host is the first or the last; `n` crosses each border of hosts in
//! the chain, and one more if the root is not on the last.
//! *Order of additions:* canonical. The prefix is stored between hosts, so types that
//! are folded in a wider one (f16, bf16) are rounded once per host: for those it
//! is not chosen.
//! *Scratch:* for every segment between its scattering and its departure, one
//! segment per local rank.
//! *Source:* docs/design/collectives.md §5, "ordered chain".

use super::grid::{self, Run};
use super::prefix_chain::Chain;
use super::{Buf, Hosts, Part, RankPlan, Spec, local_stage};

fn chain<'a>(spec: &Spec, hosts: &'a Hosts) -> Chain<'a, impl Fn(&Run) -> (usize, Part)> {
    let root = spec.root;
    Chain {
        units: grid::units(spec, hosts),
        from: Buf::Output,
        taker: move |run: &Run| (root, local_stage::output(&run.elems)),
        hosts,
    }
}

pub(super) fn build(spec: &Spec, hosts: &Hosts, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    if spec.count > 0 {
        chain(spec, hosts).build(spec, &mut plan);
    }
    plan
}
