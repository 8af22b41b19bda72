//! A fold in canonical order that passes every host once, and whose result goes to the
//! ranks that take it: the common part of reduce and reduce-scatter over hosts.
//!
//! The data is cut into runs (`grid.rs`), each with a holder on every host. The
//! ranks of a host send a run to its holder; the holder on host `h` receives the
//! prefix over hosts `0..h`, folds its own ranks onto it and passes it on; the one
//! on the last host has the result and sends it to its *taker*. A rank's data is
//! overwritten only by a result that it takes.

use super::grid::{Run, Unit};
use super::local_stage::{self, ChainScratch};
use super::{Buf, Hosts, Local, Part, RankPlan, Round, Spec};

/// The source and the destination of the fold.
pub(super) struct Chain<'a, T> {
    pub(super) units: Vec<Unit>,
    /// Where every rank has its data.
    pub(super) from: Buf,
    /// The rank that takes the result of a run, and the place for it.
    pub(super) taker: T,
    pub(super) hosts: &'a Hosts,
}

impl<T: Fn(&Run) -> (usize, Part)> Chain<'_, T> {
    /// Adds the rounds of a rank to its plan.
    pub(super) fn build(&self, spec: &Spec, plan: &mut RankPlan) {
        let (hosts, units, rank) = (self.hosts, &self.units, plan.rank);
        let host = hosts.host_of(rank);
        let last = hosts.count() - 1;
        let locals = hosts.ranks(host).len() - 1;
        let scratch = ChainScratch::new(spec, hosts, units, host);
        plan.scratch_elems = scratch.elems();

        let to_holder = |u: usize, unit: &Unit| {
            let (mut round, at) = (Round::default(), (hosts, rank));
            let sources = local_stage::scatter(&mut round, unit, self.from, at, &scratch.inbox(u));
            (round, sources)
        };
        // With a single rank there is nothing to fold on the first host.
        let folds = locals > 0 || host > 0 || last == 0;
        let across = |tick: usize| {
            let mut round = Round::default();
            let unit_in = |begun: usize| {
                let u = tick.checked_sub(begun)?;
                let unit = units.get(u)?;
                Some((u, unit, local_stage::run_of(unit, host, rank)?))
            };
            // The result folded here one tick ago goes to the next host, or to its taker.
            if let Some((u, _, run)) = unit_in(host + 1) {
                let part = match folds {
                    true => scratch.prefix(u, run),
                    false => Part::of(self.from, run.elems.clone()),
                };
                let to = match run.holders.get(host + 1) {
                    Some(next) => *next,
                    None => (self.taker)(run).0,
                };
                if to != rank {
                    round.send(to, part);
                }
            }
            // Then what is folded now.
            if let Some((u, unit, run)) = unit_in(host).filter(|_| folds) {
                let prefix = scratch.prefix(u, run);
                let mut sources = Vec::new();
                if host > 0 {
                    round.recv(run.holders[host - 1], prefix);
                    sources.push(prefix);
                }
                sources.extend(to_holder(u, unit).1);
                let (taker, wanted) = (self.taker)(run);
                let is_mine = host == last && taker == rank;
                round.local.push(Local::Fold {
                    into: if is_mine { wanted } else { prefix },
                    sources,
                    finish: host == last,
                });
            }
            let results = tick.checked_sub(last + 1).and_then(|u| units.get(u));
            for run in results.into_iter().flatten() {
                let ((taker, wanted), holder) = ((self.taker)(run), run.holders[last]);
                if taker == rank && holder != rank {
                    round.recv(holder, wanted);
                }
            }
            round
        };
        for tick in 0..units.len() + last + 1 {
            plan.rounds.push(match units.get(tick) {
                Some(unit) => to_holder(tick, unit).0,
                None => Round::default(),
            });
            plan.rounds.push(across(tick));
        }
        plan.rounds.push(across(units.len() + last + 1));
    }
}
