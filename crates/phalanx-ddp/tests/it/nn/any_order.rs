//! `Deterministic::Off`: gradients are added in whatever order is fastest. What
//! is left to promise is the same bits on all ranks, and the mean of one process
//! up to rounding.

use crate::common::{Over, bits, ranks, value};
use phalanx_comm::{Algorithm, GroupOptions, ProcessGroup};
use phalanx_ddp::{DdpOptions, Deterministic, DistributedDataParallel, Reducer};
use phalanx_ddp::{ParamSpec, ReducerOptions};
use phalanx_nn::layers::Linear;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{GradSink, GradView, Grads, ParamId, Params, Reduction, Scope, Seed};
use phalanx_nn::{StepKey, Tape, Threads};

const IN: usize = 13;
const OUT: usize = 3;
const BATCH: usize = 5;
const STEPS: usize = 6;

fn model() -> ([Linear; 2], Params) {
    let mut scope = Scope::new(Seed(3));
    let net = [
        Linear::new(scope.enter("first"), IN, 40),
        Linear::new(scope.enter("last"), 40, OUT),
    ];
    (net, scope.build().expect("model builds"))
}

/// Backward of the mean loss of the batch of `rank` in step `index`.
fn backward(
    net: &[Linear; 2],
    params: &Params,
    tape: &mut Tape,
    (index, rank): (usize, usize),
    sink: &mut dyn GradSink,
) {
    let first = (index * 8 + rank) * 1000;
    let x: Vec<f32> = (0..BATCH * IN).map(|i| value(first + i)).collect();
    let y: Vec<f32> = (0..BATCH * OUT).map(|i| value(first + 500 + i)).collect();
    let step = tape.step(params, StepKey::new(0, index as u64));
    let x = step.input(&x, &[BATCH, IN]).expect("input");
    net[0]
        .forward(x)
        .and_then(|x| x.relu())
        .and_then(|x| net[1].forward(x))
        .and_then(|x| x.mse_loss(&y, Reduction::Mean))
        .and_then(|loss| loss.backward(sink))
        .expect("forward and backward");
}

/// One process: means in f64.
fn alone(world: usize) -> Vec<f32> {
    struct Mean(Vec<Vec<f32>>);
    impl GradView for Mean {
        fn grad(&self, param: ParamId) -> &[f32] {
            &self.0[param.index()]
        }
    }
    let (net, mut params) = model();
    let mut tape = Tape::new(Threads(1));
    let mut optimizer = Sgd::new(&params, 0.1).momentum(0.9);
    for index in 0..STEPS {
        let mut sums: Vec<Vec<f64>> = params.infos().iter().map(|i| vec![0.0; i.len]).collect();
        for rank in 0..world {
            let mut grads = Grads::like(&params);
            backward(&net, &params, &mut tape, (index, rank), &mut grads);
            for id in params.ids() {
                let sum = sums[id.index()].iter_mut();
                sum.zip(grads.grad(id))
                    .for_each(|(s, g)| *s += f64::from(*g));
            }
        }
        let mean = |sum: Vec<f64>| sum.iter().map(|s| (s / world as f64) as f32).collect();
        let mean = Mean(sums.into_iter().map(mean).collect());
        optimizer.step(&mut params, &mean).expect("step");
    }
    params.flat().to_vec()
}

fn trained(group: ProcessGroup) -> Vec<f32> {
    let rank = group.rank();
    let (net, mut params) = model();
    let options = DdpOptions {
        deterministic: Deterministic::Off,
        ..DdpOptions::default()
    };
    let mut ddp = DistributedDataParallel::new(group, &mut params, options).expect("ddp");
    let mut tape = Tape::new(Threads(1));
    let mut optimizer = Sgd::new(&params, 0.1).momentum(0.9);
    for index in 0..STEPS {
        backward(&net, &params, &mut tape, (index, rank), &mut ddp);
        assert!(ddp.finish().expect("finish").is_yes());
        optimizer.step(&mut params, &ddp).expect("step");
    }
    params.flat().to_vec()
}

/// Over tcp each rank counts as a host of its own, and which plan is fastest depends on the wire.
#[test]
fn all_ranks_have_the_same_bits_and_the_weights_of_one_process_up_to_rounding() {
    for world in [1, 2, 3, 4, 8] {
        let want = alone(world);
        for over in [Over::Thread, Over::Shm, Over::Tcp] {
            let got = ranks(world, over, trained);
            for (got, want) in got[0].iter().zip(&want) {
                assert!((got - want).abs() < 2e-6, "{got} for {want}, {world}");
            }
            for (rank, other) in got.iter().enumerate() {
                assert_eq!(
                    bits(other),
                    bits(&got[0]),
                    "rank {rank} of {world}, {over:?}"
                );
            }
        }
    }
}

const LENS: [usize; 3] = [300_000, 7, 40_001];

fn gradient(rank: usize, param: usize) -> impl Iterator<Item = f32> {
    (0..LENS[param]).map(move |i| value(rank * 5_000_011 + param * 400_009 + i))
}

/// Mean gradients of four ranks on two hosts, as each rank has them.
fn on_two_hosts(any_order: bool, algorithm: Algorithm) -> Vec<Vec<f32>> {
    let options = GroupOptions {
        ranks_per_host: vec![2, 2],
        algorithm,
        ..GroupOptions::default()
    };
    let run = |group: ProcessGroup| {
        let spec = |(i, &len): (usize, &usize)| ParamSpec {
            name: format!("p{i}"),
            len,
            columns: 1,
        };
        let rank = group.rank();
        let options = ReducerOptions {
            any_order,
            ..ReducerOptions::default()
        };
        let specs = LENS.iter().enumerate().map(spec).collect();
        let mut reducer = Reducer::new(group, specs, options);
        for param in (0..LENS.len()).rev() {
            let slot = reducer.slot(param).iter_mut();
            slot.zip(gradient(rank, param)).for_each(|(s, g)| *s = g);
            reducer.ready(param).expect("ready");
        }
        assert!(reducer.finish().expect("finish").is_yes());
        (0..LENS.len())
            .flat_map(|p| reducer.grad(p).to_vec())
            .collect()
    };
    std::thread::scope(|scope| {
        let run = &run;
        let groups = ProcessGroup::threads(4, options).into_iter();
        let threads: Vec<_> = groups.map(|g| scope.spawn(move || run(g))).collect();
        let ends = threads.into_iter().map(|t| t.join().expect("no panic"));
        ends.collect()
    })
}

#[test]
fn between_hosts_the_order_is_another_unless_the_group_was_given_one() {
    let mean = |param| {
        (0..LENS[param]).map(move |i| {
            let of = |rank: usize| f64::from(value(rank * 5_000_011 + param * 400_009 + i));
            (0..4).map(of).sum::<f64>() / 4.0
        })
    };
    let want: Vec<f64> = (0..LENS.len()).flat_map(mean).collect();
    let canonical = on_two_hosts(false, Algorithm::Auto);
    let fastest = on_two_hosts(true, Algorithm::Auto);
    for (rank, got) in fastest.iter().enumerate() {
        assert_eq!(bits(got), bits(&fastest[0]), "rank {rank}");
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(&want) {
            assert!((f64::from(*got) - want).abs() < 2e-7, "{got} for {want}");
        }
    }
    // By hosts first: another last bit here and there.
    assert_ne!(bits(&fastest[0]), bits(&canonical[0]));
    let told = on_two_hosts(true, Algorithm::Direct);
    assert_eq!(bits(&told[0]), bits(&canonical[0]));
}
