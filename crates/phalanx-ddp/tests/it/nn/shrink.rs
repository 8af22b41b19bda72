//! A rank is lost in the middle of training; the others go on, and end with
//! the bits of a fresh run from the same state at their number.

use crate::common::{ALL, Over, bits, ranks};
use phalanx_comm::ProcessGroup;
use phalanx_ddp::{BucketCaps, DdpOptions, DistributedDataParallel, agree_on_state, verify_equal};
use phalanx_member::ShrinkOptions;
use phalanx_nn::layers::Linear;
use phalanx_nn::optim::{Optimizer, Sgd};
use phalanx_nn::{
    GradSink, GradView, Grads, ParamId, Params, Reduction, Scope, Seed, StepKey, Tape, Tensor,
    Threads,
};
use std::time::Duration;

const STEPS: u64 = 8;
const ROWS: usize = 3;

struct Net(Linear, Linear);

impl Net {
    fn new() -> (Net, Params) {
        let mut scope = Scope::new(Seed(5));
        let net = Net(
            Linear::new(scope.enter("first"), 7, 6),
            Linear::new(scope.enter("second"), 6, 4),
        );
        (net, scope.build().expect("model"))
    }

    fn forward<'s>(&self, x: Tensor<'s>) -> Tensor<'s> {
        let hidden = self.0.forward(x).and_then(|h| h.relu()).expect("forward");
        self.1.forward(hidden).expect("forward")
    }
}

/// Rows of one rank's part of a step: any fixed function will do.
fn data(step: u64, rank: usize, world: usize) -> (Vec<f32>, Vec<f32>) {
    let noise = |i: usize| {
        let seed = (step as u32 * 64 + rank as u32) * 8 + world as u32;
        let x = (i as u32)
            .wrapping_add(seed * 1000)
            .wrapping_mul(2_654_435_761)
            ^ 0x9e37_79b9;
        (x.wrapping_mul(x >> 15) >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (
        (0..ROWS * 7).map(noise).collect(),
        (500..500 + ROWS * 4).map(noise).collect(),
    )
}

/// When the lost rank ends.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Ends {
    BeforeBackward,
    /// After its first gradient.
    InBackward,
    /// When its gradients are averaged and its step is taken.
    AfterStep,
}

/// Passes gradients on until one is ready, then fails.
struct OneOnly<'a>(&'a mut DistributedDataParallel);

impl GradSink for OneOnly<'_> {
    fn slot(&mut self, param: ParamId) -> &mut [f32] {
        self.0.slot(param)
    }
    fn ready(&mut self, param: ParamId) -> phalanx_base::Result<()> {
        self.0.ready(param)?;
        Err(phalanx_base::Error::usage("the rank ends here"))
    }
}

#[derive(Debug, Clone, PartialEq)]
struct State {
    params: Vec<u32>,
    momentum: Vec<u32>,
    steps: u64,
    updates: Vec<u64>,
}

fn state(params: &Params, optimizer: &Sgd) -> State {
    State {
        params: bits(params.flat()),
        momentum: optimizer
            .state()
            .iter()
            .flat_map(|(_, v)| bits(v))
            .collect(),
        steps: optimizer.steps(),
        updates: optimizer.updates().to_vec(),
    }
}

fn wrap(group: &ProcessGroup, params: &mut Params) -> DistributedDataParallel {
    let options = DdpOptions {
        caps: Some(BucketCaps::uniform(1)),
        ..DdpOptions::default()
    };
    DistributedDataParallel::new(group.clone(), params, options).expect("wrapped")
}

/// Trains to the end. Gives the state after the group was formed anew, if it was, and the last one;
/// `None` for the rank that was lost.
fn train(
    mut group: ProcessGroup,
    lost: Option<(usize, u64, Ends)>,
    from: Option<&State>,
) -> Option<(Option<State>, State)> {
    let (net, mut params) = Net::new();
    let mut optimizer = Sgd::new(&params, 0.1).momentum(0.9);
    let floats = |bits: &[u32]| -> Vec<f32> { bits.iter().map(|b| f32::from_bits(*b)).collect() };
    if let Some(from) = from {
        params.flat_mut().copy_from_slice(&floats(&from.params));
        let momentum = floats(&from.momentum);
        let buffers = [(optimizer_buffer(), momentum.as_slice())];
        let buffers = if from.momentum.is_empty() {
            &[][..]
        } else {
            &buffers
        };
        optimizer
            .restore(from.steps, &from.updates, buffers)
            .expect("restored");
    }
    let mut tape = Tape::new(Threads(1));
    let mut ddp = wrap(&group, &mut params);
    let mut taken_over = None;
    while optimizer.steps() < STEPS {
        let number = optimizer.steps();
        let (x, y) = data(number, group.rank(), group.world_size());
        let ends = lost
            .filter(|(rank, step, _)| (*rank, *step) == (group.global_rank(), number))
            .filter(|_| group.generation() == 0)
            .map(|(_, _, ends)| ends);
        if ends == Some(Ends::BeforeBackward) {
            return None;
        }
        let step = tape.step(&params, StepKey::new(0, number));
        let loss = net
            .forward(step.input(&x, &[ROWS, 7]).expect("input"))
            .mse_loss(&y, Reduction::Mean)
            .expect("loss");
        if ends == Some(Ends::InBackward) {
            loss.backward(&mut OneOnly(&mut ddp)).expect_err("ends");
            return None;
        }
        let backward = loss.backward(&mut ddp);
        drop(step);
        match backward
            .map_err(|e| e.to_string())
            .and_then(|()| ddp.finish().map_err(|e| e.to_string()))
        {
            Ok(commit) => {
                assert!(commit.is_yes());
                optimizer.step(&mut params, &ddp).expect("step");
            }
            Err(_) => {
                drop(ddp);
                let options = ShrinkOptions {
                    // No rank that comes is left out on a busy machine.
                    straggler_wait: Duration::from_millis(2000),
                    ..ShrinkOptions::default()
                };
                group = phalanx_member::shrink(group, &options).expect("formed again");
                let steps = agree_on_state(&group, &mut params, &mut optimizer).expect("agreed");
                assert_eq!(steps, optimizer.steps());
                taken_over = Some(state(&params, &optimizer));
                ddp = wrap(&group, &mut params);
            }
        }
        if ends == Some(Ends::AfterStep) {
            return None;
        }
    }
    let mut digest = [0; 32];
    digest[0] = optimizer.steps() as u8;
    verify_equal(&group, &params, digest).expect("equal");
    let last = state(&params, &optimizer);
    drop(ddp);
    group.shutdown().expect("end");
    Some((taken_over, last))
}

fn optimizer_buffer() -> &'static str {
    let (_, mut params) = Net::new();
    let mut optimizer = Sgd::new(&params, 0.1).momentum(0.9);
    let grads = Grads::like(&params);
    optimizer.step(&mut params, &grads).expect("step");
    optimizer.state()[0].0
}

#[test]
fn survivors_equal_a_fresh_run_from_the_same_state() {
    let cases = ALL.into_iter().flat_map(|over| {
        [
            (0, 3, Ends::BeforeBackward),
            (1, 0, Ends::InBackward),
            (1, 4, Ends::InBackward),
            (2, 2, Ends::AfterStep),
            (0, 5, Ends::AfterStep),
            (2, 1, Ends::BeforeBackward),
        ]
        .map(|lost| (over, lost))
    });
    // Mostly waiting for the lost one, so all at the same time.
    std::thread::scope(|scope| {
        for (over, lost) in cases {
            scope.spawn(move || survivors_equal_a_fresh_run(over, lost));
        }
    });
}

fn survivors_equal_a_fresh_run(over: Over, (rank, step, ends): (usize, u64, Ends)) {
    let what = format!("{over:?}, rank {rank} lost at step {step} {ends:?}");
    let outcomes = ranks(3, over, |group| {
        train(group, Some((rank, step, ends)), None)
    });
    let survivors: Vec<_> = outcomes.into_iter().flatten().collect();
    assert_eq!(survivors.len(), 2, "{what}");
    let from = survivors[0].0.clone().expect(&what);
    let steps = step + u64::from(ends == Ends::AfterStep);
    assert_eq!(from.steps, steps, "{what}");
    for (taken_over, last) in &survivors {
        assert_eq!(taken_over.as_ref(), Some(&from), "{what}");
        assert_eq!(*last, survivors[0].1, "{what}");
    }
    // The oracle: two ranks that never heard of a third.
    let fresh = ranks(2, Over::Thread, |group| train(group, None, Some(&from)));
    for outcome in fresh {
        let (_, last) = outcome.expect("nobody is lost");
        assert_eq!(last, survivors[0].1, "{what}");
    }
}

/// Gradients of all parameters but one.
struct Without<'a>(&'a Grads, Option<ParamId>);

impl GradView for Without<'_> {
    fn grad(&self, param: ParamId) -> &[f32] {
        self.0.grad(param)
    }

    fn untouched(&self, param: ParamId) -> bool {
        self.1 == Some(param)
    }
}

/// Ranks may have ended in different steps; the furthest is taken over.
#[test]
fn the_state_of_the_furthest_rank_is_taken_over() {
    for over in ALL {
        let states = ranks(3, over, |group| {
            let (_, mut params) = Net::new();
            let mut optimizer = Sgd::new(&params, 0.1).momentum(0.9);
            let mut grads = Grads::like(&params);
            // Rank r has taken 0, 2, 1 steps of its own.
            for i in 0..[0, 2, 1][group.rank()] {
                let ids: Vec<ParamId> = params.ids().collect();
                let first = ids[0];
                for id in ids {
                    grads.slot(id).fill(i as f32 + group.rank() as f32);
                }
                let used = Without(&grads, (i == 0).then_some(first));
                optimizer.step(&mut params, &used).expect("step");
            }
            let before = state(&params, &optimizer);
            let steps = agree_on_state(&group, &mut params, &mut optimizer).expect("agreed");
            assert_eq!(steps, 2);
            (before, state(&params, &optimizer))
        });
        assert_eq!(states[1].0.updates[..2], [1, 2]);
        for (_, after) in &states {
            assert_eq!(*after, states[1].0, "{over:?}");
        }
    }
}
