//! Sharded optimizer state: the bits and the memory.

use crate::common::{ALL, Over, bits, ranks};
use phalanx_comm::ProcessGroup;
use phalanx_ddp::{DdpOptions, DistributedDataParallel, ErrorKind, ShardedOptimizer};
use phalanx_nn::layers::Linear;
use phalanx_nn::optim::{Adam, Optimizer, Sgd};
use phalanx_nn::{GradSink, GradView, ParamId, Params, Scope, Seed};

/// Tensors of which none is a multiple of a line, one of them large.
fn params() -> Params {
    let mut scope = Scope::new(Seed(3));
    Linear::new(scope.enter("first"), 5, 7);
    Linear::new(scope.enter("large"), 41, 37);
    Linear::new(scope.enter("last"), 3, 1);
    scope.build().expect("model builds")
}

/// Averaged gradients of one step; `last.bias` has none, the parameter before it in every other.
struct Made {
    grads: Vec<Vec<f32>>,
    step: usize,
}

impl Made {
    fn new(params: &Params, step: usize) -> Made {
        let value = |p: usize, i: usize| {
            (((step * 31 + p * 17 + i) * 2_654_435) % 1009) as f32 / 500.0 - 1.0
        };
        let lens = params.infos().iter().enumerate();
        let grads = lens.map(|(p, info)| (0..info.len).map(|i| value(p, i)).collect());
        Made {
            grads: grads.collect(),
            step,
        }
    }
}

impl GradView for Made {
    fn grad(&self, param: ParamId) -> &[f32] {
        &self.grads[param.index()]
    }

    fn untouched(&self, param: ParamId) -> bool {
        match self.grads.len() - param.index() {
            1 => true,
            2 => self.step.is_multiple_of(2),
            _ => false,
        }
    }
}

/// Buffers, and how often each parameter was updated.
pub type State = (Vec<(&'static str, Vec<f32>)>, Vec<u64>);

/// Weights and state after steps `from..to` without sharding.
fn whole<O: Optimizer>(make: impl Fn(&Params) -> O, steps: usize) -> (Params, State) {
    let mut params = params();
    let mut optimizer = make(&params);
    for step in 0..steps {
        let grads = Made::new(&params, step);
        optimizer.step(&mut params, &grads).expect("step");
    }
    let state = optimizer
        .state()
        .into_iter()
        .map(|(n, v)| (n, v.to_vec()))
        .collect();
    (params, (state, optimizer.updates().to_vec()))
}

/// The whole state of a sharded optimizer, on all ranks.
pub fn gathered<O: Optimizer>(
    group: &ProcessGroup,
    params: &Params,
    optimizer: &ShardedOptimizer<O>,
) -> State {
    let updates = optimizer.gather_updates().expect("gather");
    let used = vec![vec![f32::NAN; 3]];
    let state = optimizer.gather_state(used).expect("gather");
    assert_eq!(state.is_some(), group.rank() == 0);
    let names = optimizer.optimizer().state().into_iter().map(|(n, _)| n);
    let empty = names.map(|name| (name, vec![0.0; params.flat().len()]));
    let mut state = state.unwrap_or_else(|| empty.collect());
    for (_, values) in &mut state {
        group.broadcast(values, 0).expect("broadcast");
    }
    (state, updates)
}

/// Restores a sharded optimizer a parameter at a time.
pub fn restore<O: Optimizer>(
    optimizer: &mut ShardedOptimizer<O>,
    steps: u64,
    params: &Params,
    (state, updates): &State,
) {
    let part = |(name, values): &(&'static str, Vec<f32>)| {
        let mut part = vec![0.0; optimizer.part_len()];
        for (id, info) in params.ids().zip(params.infos()) {
            let values = &values[info.offset..info.offset + info.len];
            optimizer.copy_part(id, values, &mut part);
        }
        (*name, part)
    };
    let parts: Vec<(&str, Vec<f32>)> = state.iter().map(part).collect();
    let parts: Vec<(&str, &[f32])> = parts.iter().map(|(n, v)| (*n, &v[..])).collect();
    optimizer.restore(steps, updates, &parts).expect("restore");
}

/// The same on a rank; stops after five steps and goes on in a new optimizer.
fn sharded<O: Optimizer>(
    group: ProcessGroup,
    make: impl Fn(&Params) -> O,
) -> (Params, State, usize) {
    let mut params = params();
    let new = |params: &Params| ShardedOptimizer::new(group.clone(), params, &make).expect("cut");
    let mut optimizer = new(&params);
    for step in 0..10 {
        if step == 5 {
            let state = gathered(&group, &params, &optimizer);
            optimizer = new(&params);
            restore(&mut optimizer, 5, &params, &state);
        }
        let grads = Made::new(&params, step);
        optimizer.step(&mut params, &grads).expect("step");
    }
    let bytes = optimizer.state_bytes();
    let state = gathered(&group, &params, &optimizer);
    (params, state, bytes)
}

/// Two lines of parameters leave two of four ranks without any: they gather all the same.
#[test]
fn ranks_without_a_part_gather_the_state_of_the_others() {
    let model = || {
        let mut scope = Scope::new(Seed(3));
        Linear::new(scope.enter("small"), 2, 1);
        scope.build().expect("model builds")
    };
    let make = |params: &Params| Sgd::new(params, 0.1).momentum(0.9);
    let states = ranks(4, Over::Thread, |group| {
        let mut params = model();
        let mut optimizer = ShardedOptimizer::new(group.clone(), &params, make).expect("cut");
        for step in 0..3 {
            let grads = Made::new(&params, step);
            optimizer.step(&mut params, &grads).expect("step");
        }
        gathered(&group, &params, &optimizer)
    });
    let mut params = model();
    let mut whole = make(&params);
    for step in 0..3 {
        let grads = Made::new(&params, step);
        whole.step(&mut params, &grads).expect("step");
    }
    for (state, updates) in states {
        assert_eq!(updates, whole.updates());
        let names: Vec<&str> = state.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["momentum_buffer"]);
        assert_eq!(bits(&state[0].1), bits(whole.state()[0].1));
    }
}

fn check<O: Optimizer>(make: impl Fn(&Params) -> O + Sync + Copy) {
    let (want, (state, updates)) = whole(make, 10);
    assert_eq!(updates, [10, 10, 10, 10, 5, 0]);
    let all: usize = state.iter().map(|(_, v)| 4 * v.len()).sum();
    for world in 1..=8 {
        let transports: &[Over] = if world == 3 { &ALL } else { &[Over::Thread] };
        for &over in transports {
            let ranks = ranks(world, over, |group| sharded(group, make));
            let held: usize = ranks.iter().map(|r| r.2).sum();
            assert!(held <= all, "{held} of {all} bytes on {world} ranks");
            for (rank, (params, (own, counts), bytes)) in ranks.iter().enumerate() {
                assert_eq!(*counts, updates, "rank {rank} of {world}");
                assert_eq!(
                    bits(params.flat()),
                    bits(want.flat()),
                    "weights of rank {rank} of {world}"
                );
                assert_eq!(own.len(), state.len());
                for ((name, own), (_, want)) in own.iter().zip(&state) {
                    assert_eq!(bits(own), bits(want), "{name} on rank {rank} of {world}");
                }
                // At most one line more than its share of each of the buffers.
                assert!(
                    *bytes <= all / world + 2 * 64 * state.len(),
                    "{bytes} of {all} on {world}"
                );
            }
        }
    }
}

#[test]
fn sgd_with_momentum_has_the_same_bits() {
    check(|p| Sgd::new(p, 0.05).momentum(0.9).weight_decay(1e-3));
}

#[test]
fn dampened_sgd_has_the_same_bits() {
    check(|p| Sgd::new(p, 0.05).momentum(0.9).dampening(0.5));
}

#[test]
fn adam_has_the_same_bits() {
    check(|p| Adam::new(p, 0.01));
}

#[test]
fn other_layouts_are_refused() {
    let group = ProcessGroup::threads(1, Default::default()).remove(0);
    let params = params();
    let mut optimizer =
        ShardedOptimizer::new(group, &params, |p| Sgd::new(p, 0.1).momentum(0.9)).expect("cut");
    let mut scope = Scope::new(Seed(3));
    Linear::new(scope.enter("other"), 5, 7);
    let mut other = scope.build().expect("model builds");
    let grads = Made::new(&other, 0);
    let error = optimizer
        .step(&mut other, &grads)
        .expect_err("another model");
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(
        error.to_string().contains("parameter elements, not"),
        "{error}"
    );
    let error = optimizer
        .restore(1, &[1; 6], &[("momentum_buffer", &[0.0; 3])])
        .expect_err("too short");
    assert!(
        error.to_string().contains("momentum_buffer has 3 elements"),
        "{error}"
    );
}

/// The gathered parts of all ranks would overwrite it.
#[test]
fn a_parameter_of_each_ranks_own_is_refused_by_name() {
    for world in [1, 2, 3, 8] {
        ranks(world, Over::Thread, |group| {
            let mut params = params();
            let options = DdpOptions {
                ignored: vec!["large.bias".to_owned()],
                ..DdpOptions::default()
            };
            let mut ddp =
                DistributedDataParallel::new(group.clone(), &mut params, options).expect("ddp");
            let make = |p: &Params| Adam::new(p, 0.1);
            let mut optimizer = ShardedOptimizer::new(group, &params, make).expect("cut");
            let ids: Vec<ParamId> = params.ids().collect();
            for id in ids.into_iter().rev() {
                ddp.slot(id).fill(1.0);
                ddp.ready(id).expect("ready");
            }
            assert!(ddp.finish().expect("finish").is_yes());
            let before = bits(params.flat());
            let error = optimizer.step(&mut params, &ddp).expect_err("refused");
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert_eq!(
                error.to_string(),
                "large.bias is ignored by the wrapper, so each rank trains it for itself, but a sharded optimizer gives \
                 every rank the same; leave out one of both"
            );
            optimizer
                .step_clipped(&mut params, &ddp, 1.0)
                .expect_err("refused");
            assert_eq!((bits(params.flat()), optimizer.steps()), (before, 0));
        });
    }
}
