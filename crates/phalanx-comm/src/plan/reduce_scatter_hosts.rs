//! Reduce-scatter over hosts with several ranks each, in canonical order: the prefix
//! of the fold passes every host once, and each part of the result goes to its
//! rank.
//!
//! *Steps:* for every segment: to the holder on each host (1 round); from host to
//! host in ascending order (`H − 1` rounds), each folding its ranks onto what came;
//! from the last host to the owner (1 round). Stages of different segments overlap.
//! *Bytes sent by rank r:* with N = P·n the bytes of all parts, `N`: what it does not
//! hold to the holders on its host, what it holds to the next host, or from the last
//! one to the owners (less what it owns itself there). So a network card
//! sends `N` and receives at most `N + L·n`, instead of `L·(P − L)·n` by one round: less
//! from four ranks on two hosts on.
//! *Order of additions:* canonical. The prefix is stored between hosts, so types that
//! are folded in a wider one (f16, bf16) are rounded once per host: for those it
//! is not chosen.
//! *Scratch:* for every segment between its scattering and its departure, one
//! segment per local rank.
//! *Source:* docs/design/collectives.md §5, "ordered chain".

use super::grid::{self, Run};
use super::prefix_chain::Chain;
use super::{Buf, Hosts, Part, RankPlan, Round, Spec};

/// All parts one after the other, as the input has them.
pub(super) fn whole(spec: &Spec) -> Spec {
    Spec {
        count: spec.count * spec.world,
        ..*spec
    }
}

fn chain<'a>(spec: &Spec, hosts: &'a Hosts) -> Chain<'a, impl Fn(&Run) -> (usize, Part)> {
    let count = spec.count;
    let borders = (1..spec.world).map(|owner| owner * count);
    Chain {
        units: grid::units_within(&whole(spec), hosts, borders),
        from: Buf::Input,
        taker: move |run: &Run| {
            let owner = run.elems.start / count;
            let start = run.elems.start - owner * count;
            (owner, Part::new(Buf::Output, start, run.elems.len()))
        },
        hosts,
    }
}

pub(super) fn build(spec: &Spec, hosts: &Hosts, rank: usize) -> RankPlan {
    let mut plan = RankPlan::new(spec, rank);
    if spec.world == 1 {
        let mut round = Round::default();
        let part = |buf| Part::new(buf, 0, spec.count);
        round.copy(part(Buf::Input), part(Buf::Output));
        plan.rounds = vec![round];
    } else if spec.count > 0 {
        chain(spec, hosts).build(spec, &mut plan);
    }
    plan
}
