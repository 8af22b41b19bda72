//! Runs all ranks' plans on symbols with overlapping rounds: each step runs a random
//! one of the operations, of any rank, that may run. The result must be correct in
//! every order.

use std::collections::VecDeque;

use super::{Cell, PlanError, Result, Simulation};
use crate::plan::order::{Order, Step, WINDOW};
use crate::plan::{Hosts, Method, RankPlan, Spec, build_on};

struct Rank {
    order: Order,
    waits: Vec<u32>,
    in_round: Vec<u32>,
    base: usize,
    done: Vec<bool>,
}

impl Rank {
    fn complete(&mut self, at: usize) {
        self.done[at] = true;
        for follower in self.order.followers(at) {
            self.waits[*follower as usize] -= 1;
        }
        self.in_round[self.order.steps[at].0 as usize] -= 1;
        while self.in_round.get(self.base) == Some(&0) {
            self.base += 1;
        }
    }

    fn free(&self, at: usize) -> bool {
        !self.done[at]
            && self.waits[at] == 0
            && (self.order.steps[at].0 as usize) < self.base + WINDOW
    }
}

/// The next of the transfers in one direction with `peer`, which go in order.
fn head(plan: &RankPlan, rank: &Rank, peer: usize, sends: bool) -> Option<usize> {
    (0..rank.order.steps.len()).find(|&at| {
        let (round, step) = rank.order.steps[at];
        let round = &plan.rounds[round as usize];
        !rank.done[at]
            && match step {
                Step::Send(i) => sends && round.sends[i].peer == peer,
                Step::Recv(i) => !sends && round.recvs[i].peer == peer,
                Step::Local(_) => false,
            }
    })
}

fn run(spec: &Spec, hosts: &Hosts, orders: Vec<Order>, mut random: u64) -> Result {
    let world = spec.world;
    let plans: Vec<RankPlan> = (0..world).map(|rank| build_on(spec, hosts, rank)).collect();
    let mut simulation = Simulation::new(spec, &plans);
    let mut ranks: Vec<Rank> = orders
        .into_iter()
        .map(|order| Rank {
            waits: order.waits.clone(),
            in_round: order.in_round.clone(),
            base: 0,
            done: vec![false; order.steps.len()],
            order,
        })
        .collect();
    let mut wire: Vec<VecDeque<Vec<Cell>>> = vec![VecDeque::new(); world * world];
    loop {
        let mut free = Vec::new();
        for (r, rank) in ranks.iter().enumerate() {
            for peer in 0..world {
                let send = head(&plans[r], rank, peer, true);
                free.extend(send.filter(|at| rank.free(*at)).map(|at| (r, at)));
                let recv = head(&plans[r], rank, peer, false);
                let there = !wire[peer * world + r].is_empty();
                free.extend(recv.filter(|at| there && rank.free(*at)).map(|at| (r, at)));
            }
            free.extend(
                (0..rank.order.steps.len())
                    .filter(|at| matches!(rank.order.steps[*at].1, Step::Local(_)))
                    .filter(|at| rank.free(*at))
                    .map(|at| (r, at)),
            );
        }
        if free.is_empty() {
            break;
        }
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let (r, at) = free[(random % free.len() as u64) as usize];
        let (round, step) = ranks[r].order.steps[at];
        let round = &plans[r].rounds[round as usize];
        match step {
            Step::Send(i) => {
                let values = simulation.read(r, &round.sends[i].part)?;
                wire[r * world + round.sends[i].peer].push_back(values);
            }
            Step::Recv(i) => {
                let recv = &round.recvs[i];
                let values = wire[recv.peer * world + r].pop_front().unwrap_or_default();
                simulation.write(r, &recv.part, &values);
            }
            Step::Local(i) => simulation.step(r, &round.local[i])?,
        }
        ranks[r].complete(at);
    }
    match ranks.iter().position(|rank| rank.done.contains(&false)) {
        Some(r) => Err(PlanError::new(format!("rank {r} is stuck"))),
        None => simulation.check_result(spec, hosts),
    }
}

fn orders(spec: &Spec, hosts: &Hosts) -> Vec<Order> {
    (0..spec.world)
        .map(|rank| Order::of(&build_on(spec, hosts, rank)))
        .collect()
}

/// What a plan may be run on.
fn hosts_of(spec: &Spec) -> Vec<Hosts> {
    let mut all = vec![Hosts::one(spec.world)];
    if matches!(
        spec.method,
        Method::AllReduceRails
            | Method::AllReduceChain
            | Method::BroadcastHosts
            | Method::AllGatherHosts
            | Method::ReduceHosts
            | Method::ReduceScatterHosts
    ) {
        all.push(Hosts::of_sizes(&vec![1; spec.world]));
        all.push(Hosts::of_sizes(&[spec.world / 2, spec.world.div_ceil(2)]));
        all.push(Hosts::of_sizes(&[2, 1, spec.world.saturating_sub(3)]));
        all.retain(|hosts| hosts.world() == spec.world);
    }
    all
}

fn specs() -> Vec<Spec> {
    let mut all = Vec::new();
    for method in Method::all() {
        // A barrier's promise is checked with the rounds.
        if matches!(method, Method::Barrier) {
            continue;
        }
        for world in [2, 3, 4, 5] {
            // Large enough for many segments, where there are any.
            for count in [7, 1000, (9 * world) << 16] {
                let spec = Spec {
                    method,
                    world,
                    count,
                    elem_bytes: 4,
                    root: 0,
                    short_segments: false,
                };
                all.push(spec);
                if method == Method::AllReduceDirect {
                    all.push(Spec {
                        short_segments: true,
                        ..spec
                    });
                }
            }
        }
    }
    all
}

#[test]
fn any_order_that_is_left_keeps_the_promise() {
    for spec in specs() {
        for hosts in hosts_of(&spec) {
            for seed in 1..3 {
                let random = 0x9e37_79b9_7f4a_7c15u64.rotate_left(seed);
                if let Err(e) = run(&spec, &hosts, orders(&spec, &hosts), random) {
                    panic!("{spec:?} on {hosts:?} with seed {seed}: {e}");
                }
            }
        }
    }
}

#[test]
fn without_the_dependencies_it_would_break() {
    for method in [
        Method::AllReduceDirect,
        Method::AllReduceOneRound,
        Method::AllReduceRing,
        Method::BroadcastTree,
        Method::AllReduceRails,
        Method::AllReduceChain,
        Method::BroadcastHosts,
        Method::AllGatherHosts,
        Method::ReduceHosts,
        Method::ReduceScatterHosts,
    ] {
        let hosts = Hosts::of_sizes(&[2, 2]);
        let spec = Spec {
            method,
            world: 4,
            count: 1 << 20,
            elem_bytes: 4,
            root: 0,
            short_segments: false,
        };
        let broken = |seed| {
            let mut orders = orders(&spec, &hosts);
            for order in &mut orders {
                order.forget();
            }
            run(&spec, &hosts, orders, seed).is_err()
        };
        assert!((1..20).any(broken), "{method:?}");
    }
}

#[test]
fn a_signal_waits_for_the_signals_before_it() {
    for world in 2..=16 {
        let spec = Spec {
            method: Method::Barrier,
            world,
            count: 0,
            elem_bytes: 1,
            root: 0,
            short_segments: false,
        };
        for rank in 0..world {
            let order = Order::of(&build_on(&spec, &Hosts::one(world), rank));
            for (at, (round, step)) in order.steps.iter().enumerate() {
                if let Step::Send(_) = step {
                    assert_eq!(order.waits[at], 2 * round, "rank {rank} of {world}");
                }
            }
        }
    }
}
