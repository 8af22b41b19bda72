//! Parameters of several element types in one model: buckets of one type each,
//! means and micro-batches as of a serial fold, mistakes by name.

use crate::common::{ALL, Over, ranks};
use half::{bf16, f16};
use phalanx_comm::ProcessGroup;
use phalanx_ddp::{
    Bf16Gradients, BucketCaps, Commit, ErrorKind, Exchange, GradType, Gradient, ParamSpec, Reducer,
    ReducerOptions,
};

use GradType::{Bf16, F16, F32, F64};

/// The model: the last parameter that becomes ready is not of `f32`.
const MODEL: [(GradType, usize); 9] = [
    (Bf16, 33),
    (F32, 70),
    (F64, 5),
    (F16, 129),
    (F32, 1),
    (F64, 40),
    (Bf16, 7),
    (F32, 0),
    (F16, 2),
];

fn specs() -> Vec<ParamSpec> {
    let spec = |(i, &(dtype, len)): (usize, &(GradType, usize))| ParamSpec {
        name: format!("layer{i}.weight"),
        len,
        dtype,
        columns: 1,
    };
    MODEL.iter().enumerate().map(spec).collect()
}

fn reducer(group: ProcessGroup, caps: BucketCaps) -> Reducer {
    let options = ReducerOptions {
        caps,
        ..ReducerOptions::default()
    };
    Reducer::new(group, specs(), options)
}

/// A gradient that no fold of several ranks leaves without rounding.
fn value(step: usize, rank: usize, micro: usize, param: usize, i: usize) -> f64 {
    let at = ((((step * 8 + rank) * 4 + micro) * 9 + param) * 131 + i) as f64;
    (at * 0.7548776662466927).fract() * 3.0 - 1.5
}

/// What the tests compute with, beside the reducer's own arithmetic.
trait Number: Gradient {
    fn of(value: f64) -> Self;
    /// As what sums over ranks are folded in it.
    fn wide(self) -> f64;
    /// One addition, multiplication or rounding as the fold does it.
    fn fold(value: f64) -> f64;
    fn bits(self) -> u64;
}

macro_rules! number {
    ($t:ty, $of:expr, $wide:expr, $fold:expr) => {
        impl Number for $t {
            fn of(value: f64) -> $t {
                $of(value)
            }
            fn wide(self) -> f64 {
                $wide(self)
            }
            fn fold(value: f64) -> f64 {
                $fold(value)
            }
            fn bits(self) -> u64 {
                self.to_bits().into()
            }
        }
    };
}

// Products and sums of two numbers of 24 bits that were computed in 53 and are rounded to 24
// are those computed in 24; likewise for fewer bits.
number!(f32, |v| v as f32, f64::from, |v| f64::from(v as f32));
number!(f64, |v| v, |v| v, |v| v);
number!(f16, |v| f16::from_f32(v as f32), f64::from, |v| f64::from(
    v as f32
));
number!(
    bf16,
    |v| bf16::from_f32(v as f32),
    f64::from,
    |v| f64::from(v as f32)
);

fn write<T: Number>(reducer: &mut Reducer, step: usize, rank: usize, micro: usize, param: usize) {
    let slot = reducer.slot_of::<T>(param);
    assert_eq!(slot.len(), MODEL[param].1);
    for (i, g) in slot.iter_mut().enumerate() {
        *g = T::of(value(step, rank, micro, param, i));
    }
}

/// One backward on `rank`, in an order of its own.
fn backward(reducer: &mut Reducer, step: usize, rank: usize, micro: usize) {
    for i in (0..MODEL.len()).rev() {
        let param = (i + step * rank) % MODEL.len();
        match MODEL[param].0 {
            F32 => write::<f32>(reducer, step, rank, micro, param),
            F64 => write::<f64>(reducer, step, rank, micro, param),
            F16 => write::<f16>(reducer, step, rank, micro, param),
            Bf16 => write::<bf16>(reducer, step, rank, micro, param),
        }
        reducer.ready(param).expect("first report");
    }
}

/// The mean of weighed sums of micro-batches, one rank and one operation after the other.
fn serial<T: Number>(step: usize, weights: &[&[f32]], scale: f32, param: usize) -> Vec<u64> {
    let round = |v: f64| T::of(v).wide();
    let fold = |i: usize| {
        let of_rank = |(rank, weights): (usize, &&[f32])| {
            let weighed = weights.iter().enumerate().map(|(micro, w)| {
                let g = T::of(value(step, rank, micro, param, i)).wide();
                round(if *w == 1.0 { g } else { g * f64::from(*w) })
            });
            weighed.reduce(|a, b| round(a + b)).unwrap_or(0.0)
        };
        let sums = weights.iter().enumerate().map(of_rank);
        let sum = sums.reduce(|a, b| T::fold(a + b)).expect("a rank");
        let share = T::fold(1.0 / weights.len() as f64);
        let mean = round(T::fold(sum * share));
        T::of(if scale == 1.0 {
            mean
        } else {
            mean * f64::from(scale)
        })
        .bits()
    };
    (0..MODEL[param].1).map(fold).collect()
}

fn check_param<T: Number>(
    reducer: &Reducer,
    step: usize,
    weights: &[&[f32]],
    scale: f32,
    param: usize,
    what: &str,
) {
    let got: Vec<u64> = reducer
        .grad_of::<T>(param)
        .iter()
        .map(|g| g.bits())
        .collect();
    assert_eq!(
        got,
        serial::<T>(step, weights, scale, param),
        "{what}, parameter {param}"
    );
}

fn check(reducer: &Reducer, step: usize, weights: &[&[f32]], scale: f32, what: &str) {
    for (param, (of, _)) in MODEL.iter().enumerate() {
        match of {
            F32 => check_param::<f32>(reducer, step, weights, scale, param, what),
            F64 => check_param::<f64>(reducer, step, weights, scale, param, what),
            F16 => check_param::<f16>(reducer, step, weights, scale, param, what),
            Bf16 => check_param::<bf16>(reducer, step, weights, scale, param, what),
        }
    }
}

#[test]
fn means_are_those_of_a_serial_fold_for_any_world_transport_and_bucket_size() {
    let many = [
        BucketCaps::uniform(1),
        BucketCaps::uniform(300),
        BucketCaps::ONE_HOST,
    ];
    for (world, over) in [
        (1, Over::Thread),
        (2, Over::Shm),
        (3, Over::Tcp),
        (4, Over::Thread),
        (5, Over::Shm),
        (8, Over::Thread),
    ] {
        for caps in many {
            ranks(world, over, |group| {
                let rank = group.rank();
                let mut reducer = reducer(group, caps);
                for step in 0..3 {
                    backward(&mut reducer, step, rank, 0);
                    assert_eq!(reducer.finish().expect("finish"), Commit::Yes);
                    let what = format!("{world} ranks over {over:?}, {caps:?}, step {step}");
                    check(&reducer, step, &vec![&[1.0][..]; world], 1.0, &what);
                }
                let plan = reducer.plan();
                for (bucket, params) in plan.buckets().iter().enumerate() {
                    let one_type = params
                        .iter()
                        .all(|p| MODEL[*p].0 == plan.bucket_type(bucket));
                    assert!(one_type, "{:?}", plan.buckets());
                }
            });
        }
    }
}

#[test]
fn weighed_micro_batches_are_added_and_ranks_without_data_take_part() {
    let weights: [&[f32]; 3] = [&[0.5, 2.0, 1.0], &[], &[0.75]];
    for over in ALL {
        ranks(3, over, |group| {
            let rank = group.rank();
            let mut reducer = reducer(group, BucketCaps::uniform(300));
            for step in 0..2 {
                reducer
                    .plan_step(weights[rank], 3.0)
                    .expect("between steps");
                for micro in 0..weights[rank].len() {
                    if micro > 0 {
                        reducer.next_micro_batch().expect("declared");
                    }
                    backward(&mut reducer, step, rank, micro);
                }
                assert_eq!(reducer.finish().expect("finish"), Commit::Yes);
                check(
                    &reducer,
                    step,
                    &weights,
                    3.0,
                    &format!("{over:?}, step {step}"),
                );
            }
        });
    }
}

#[test]
fn an_infinity_of_any_type_votes_the_step_down_and_unused_ones_stay_untouched() {
    ranks(2, Over::Thread, |group| {
        let rank = group.rank();
        let mut reducer = reducer(group, BucketCaps::uniform(300));
        // One parameter of each type: 0 bf16, 1 f32, 2 f64, 3 f16.
        for bad in 0..4 {
            for param in (0..MODEL.len()).rev() {
                reducer.unused(param).expect("zeros");
            }
            assert_eq!(reducer.finish().expect("finish"), Commit::Yes);
            assert!((0..MODEL.len()).all(|p| reducer.is_untouched(p)));
            for param in (0..MODEL.len()).rev() {
                if rank == 1 && param == bad {
                    match MODEL[param].0 {
                        F32 => reducer.slot_of::<f32>(param).fill(f32::NAN),
                        F64 => reducer.slot_of::<f64>(param).fill(f64::INFINITY),
                        F16 => reducer.slot_of::<f16>(param).fill(f16::INFINITY),
                        Bf16 => reducer.slot_of::<bf16>(param).fill(bf16::NAN),
                    }
                    reducer.ready(param).expect("once");
                } else {
                    reducer.unused(param).expect("once");
                }
            }
            let commit = reducer.finish().expect("finish");
            let want = format!("rank 1: the gradient of layer{bad}.weight is not finite");
            assert_eq!(commit.to_string(), want);
            assert!(reducer.grad_of::<bf16>(0).is_empty() && reducer.grad(1).is_empty());
        }
    });
}

#[test]
fn mistakes_are_named() {
    let alone = || ProcessGroup::threads(1, Default::default()).remove(0);
    // Asked for as what it is not: no memory, and the report says so.
    let mut asked = reducer(alone(), BucketCaps::ONE_HOST);
    assert!(asked.slot(3).is_empty());
    let error = asked.ready(3).expect_err("wrong type");
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert_eq!(
        error.to_string(),
        "the gradient of layer3.weight is made of f16 but was asked for as f32; use slot_of::<f16>"
    );
    let error = asked.finish().expect_err("wrong type");
    assert!(error.to_string().contains("layer3.weight"), "{error}");

    let mut right = reducer(alone(), BucketCaps::ONE_HOST);
    backward(&mut right, 0, 0, 0);
    assert_eq!(right.finish().expect("finish"), Commit::Yes);
    assert!(right.grad(0).is_empty() && right.grad_of::<f64>(0).is_empty());
    assert_eq!(right.grad_of::<bf16>(0).len(), MODEL[0].1);

    let hook = Box::new(Bf16Gradients::default());
    let error = right.set_hook(Some(hook)).expect_err("f32 only");
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert_eq!(
        error.to_string(),
        "the gradient hook bf16 is for f32 gradients, but that of layer0.weight is made of bf16; leave the hook \
         out, or average that parameter in another reducer"
    );
    assert!(right.set_hook(None).is_ok());

    let options = ReducerOptions {
        exchange: Exchange::ReduceScatter,
        ..ReducerOptions::default()
    };
    let mut scattered = Reducer::new(alone(), specs(), options);
    let error = scattered.ready(1).expect_err("f32 only");
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert_eq!(
        error.to_string(),
        "Exchange::ReduceScatter is for f32 gradients, but that of layer0.weight is made of bf16; use \
         Exchange::AllReduce"
    );
}

/// Two finite micro-batches whose sum is not, on one rank.
#[test]
fn a_sum_of_micro_batches_that_overflows_votes_the_step_down() {
    for world in [1, 2, 3, 8] {
        ranks(world, Over::Thread, |group| {
            let rank = group.rank();
            let spec = |(i, dtype)| ParamSpec {
                name: format!("layer{i}.weight"),
                len: 3,
                dtype,
                columns: 1,
            };
            let specs = [F16, Bf16, F32, F64].into_iter().enumerate().map(spec);
            let mut reducer = Reducer::new(group, specs.collect(), ReducerOptions::default());
            for (bad, what) in [(0, "layer0"), (1, "layer1"), (2, "layer2"), (3, "layer3")] {
                reducer.plan_step(&[1.0, 1.0], 0.5).expect("plan");
                let large = |param: usize| param == bad && rank == world - 1;
                for micro in 0..2 {
                    if micro > 0 {
                        reducer.next_micro_batch().expect("declared");
                    }
                    let of = |p, most: f64| if large(p) { 0.75 * most } else { 1.0 };
                    let bf16_max = f64::from(bf16::MAX);
                    reducer
                        .slot_of::<f16>(0)
                        .fill(f16::from_f64(of(0, 65_504.0)));
                    reducer
                        .slot_of::<bf16>(1)
                        .fill(bf16::from_f64(of(1, bf16_max)));
                    reducer
                        .slot_of::<f32>(2)
                        .fill(of(2, f64::from(f32::MAX)) as f32);
                    reducer.slot_of::<f64>(3).fill(of(3, f64::MAX));
                    for param in (0..4).rev() {
                        reducer.ready(param).expect("ready");
                    }
                }
                let text = reducer.finish().expect("finish").to_string();
                let culprit = world - 1;
                assert_eq!(
                    text,
                    format!("rank {culprit}: the gradient of {what}.weight is not finite")
                );
                assert!(reducer.grad_of::<f64>(3).is_empty());
            }
        });
    }
}
