//! A training of plain vectors: what there is without the engine.

use crate::common::{ALL, Over, bits, ranks, value};
use phalanx_ddp::{
    BucketCaps, ErrorKind, Exchange, Fingerprint, ParamSpec, Parameters, Reducer, ReducerOptions,
    broadcast_parameters, digest, verify_equal,
};

/// Name, shape, whether it is a buffer, values.
#[derive(Clone)]
struct Tensor(&'static str, Vec<usize>, bool, Vec<f32>);

#[derive(Clone)]
struct Model(Vec<Tensor>);

impl Parameters for Model {
    fn tensors(&self) -> usize {
        self.0.len()
    }
    fn is_buffer(&self, index: usize) -> bool {
        self.0[index].2
    }
    fn name(&self, index: usize) -> &str {
        self.0[index].0
    }
    fn shape(&self, index: usize) -> &[usize] {
        &self.0[index].1
    }
    fn values(&self, index: usize) -> &[f32] {
        &self.0[index].3
    }
    fn values_mut(&mut self, index: usize) -> &mut [f32] {
        &mut self.0[index].3
    }
}

/// Three parameters and a buffer; other values for each `seed`.
fn model(seed: usize) -> Model {
    let tensor = |name, shape: &[usize], buffer| {
        let len = shape.iter().product();
        let values = (0..len).map(|i| value(1000 * seed + i)).collect();
        Tensor(name, shape.to_vec(), buffer, values)
    };
    Model(vec![
        tensor("fc1.weight", &[7, 5], false),
        tensor("fc1.bias", &[7], false),
        tensor("fc2.weight", &[1, 40], false),
        tensor("running_mean", &[7], true),
    ])
}

const PARAMS: usize = 3;
const STEPS: usize = 5;
const RATE: f32 = 0.1;

/// Element `i` of a rank's gradient: depends on the weights, so that any difference grows.
fn gradient(model: &Model, param: usize, rank: usize, step: usize, i: usize) -> f32 {
    model.values(param)[i] * value(31 * rank + 7 * step + i) + value(i + param + rank)
}

/// The training in one process: a left fold over the ranks, times one over their number.
fn serial(world: usize) -> Model {
    let mut model = model(0);
    for step in 0..STEPS {
        let before = model.clone();
        for param in 0..PARAMS {
            for (i, w) in model.values_mut(param).iter_mut().enumerate() {
                let of = |rank| gradient(&before, param, rank, step, i);
                let sum = (1..world).fold(of(0), |sum, rank| sum + of(rank));
                *w -= RATE * (sum * (1.0 / world as f32));
            }
        }
    }
    model
}

/// One backward; each rank has another order of parameters.
fn backward(model: &Model, reducer: &mut Reducer, rank: usize, step: usize) {
    for k in 0..PARAMS {
        let param = (k + rank + step) % PARAMS;
        let slot = reducer.slot(param);
        for (i, g) in slot.iter_mut().enumerate() {
            *g = gradient(model, param, rank, step, i);
        }
        reducer.ready(param).expect("first report");
    }
}

fn specs(model: &Model) -> Vec<ParamSpec> {
    (0..PARAMS).map(|i| ParamSpec::of(model, i)).collect()
}

#[test]
fn bits_are_those_of_a_serial_fold() {
    for (world, over) in [1, 2, 3]
        .into_iter()
        .flat_map(|w| ALL.map(|over| (w, over)))
    {
        let want = serial(world);
        ranks(world, over, |group| {
            let rank = group.rank();
            let mut model = model(rank);
            let mut facts = Fingerprint::new();
            facts.parameters(&model).compare(&group).expect("the same");
            broadcast_parameters(&group, &mut model, 0).expect("broadcast");
            let options = ReducerOptions {
                caps: BucketCaps::uniform(100),
                ..ReducerOptions::default()
            };
            let mut reducer = Reducer::new(group.clone(), specs(&model), options);
            for step in 0..STEPS {
                backward(&model, &mut reducer, rank, step);
                assert!(reducer.finish().expect("finish").is_yes());
                for param in 0..PARAMS {
                    let pairs = model.values_mut(param).iter_mut().zip(reducer.grad(param));
                    pairs.for_each(|(w, g)| *w -= RATE * g);
                }
            }
            verify_equal(&group, &model, digest(&model)).expect("equal");
            for i in 0..model.tensors() {
                let got = bits(model.values(i));
                assert_eq!(got, bits(want.values(i)), "{} over {over:?}", want.name(i));
            }
        });
    }
}

#[test]
fn scattered_gradients_give_the_bits_of_an_all_reduce() {
    for (world, exchange) in [1, 2, 3]
        .into_iter()
        .flat_map(|w| [Exchange::ReduceScatter, Exchange::AtStep].map(|e| (w, e)))
    {
        let want = serial(world);
        ranks(world, Over::Thread, |group| {
            let rank = group.rank();
            let mut model = model(0);
            let options = ReducerOptions {
                exchange,
                ..ReducerOptions::default()
            };
            let mut reducer = Reducer::new(group, specs(&model), options);
            // Parameters one behind the other.
            let starts = [0, 35, 42];
            for step in 0..STEPS {
                backward(&model, &mut reducer, rank, step);
                assert!(reducer.finish().expect("finish").is_yes());
                let mut flat: Vec<f32> =
                    (0..PARAMS).flat_map(|p| model.values(p).to_vec()).collect();
                reducer
                    .visit_pieces(|param, elems, gradient| {
                        let own = &mut flat[starts[param]..][elems];
                        let pairs = own.iter_mut().zip(gradient);
                        pairs.for_each(|(w, g)| *w -= RATE * g);
                    })
                    .expect("pieces");
                reducer.gather_pieces(&mut flat, &starts).expect("gathered");
                for (param, start) in starts.into_iter().enumerate() {
                    let values = model.values_mut(param);
                    values.copy_from_slice(&flat[start..][..values.len()]);
                }
            }
            for i in 0..PARAMS {
                let got = bits(model.values(i));
                assert_eq!(got, bits(want.values(i)), "{exchange:?}, world {world}");
            }
            let none = reducer
                .visit_pieces(|_, _, _| ())
                .expect_err("they are gone");
            assert!(none.to_string().contains("no gradients"), "{none}");
            let mut short = vec![0.0; 81];
            for starts in [&[0, 35, 42][..], &[0, 35], &[0, 35, usize::MAX]] {
                let refused = reducer.gather_pieces(&mut short, starts);
                let refused = refused.expect_err("outside");
                assert_eq!(refused.kind(), ErrorKind::Usage);
                assert!(refused.to_string().contains("fc2.weight"), "{refused}");
            }
        });
    }
}

#[test]
fn whole_gradients_have_no_pieces() {
    ranks(1, Over::Thread, |group| {
        let mut reducer = Reducer::new(group, specs(&model(0)), ReducerOptions::default());
        backward(&model(0), &mut reducer, 0, 0);
        assert!(reducer.finish().expect("finish").is_yes());
        for refused in [
            reducer.visit_pieces(|_, _, _| ()),
            reducer.gather_pieces(&mut [0.0; 82], &[0, 35, 42]),
        ] {
            let refused = refused.expect_err("an all-reduce");
            assert_eq!(refused.kind(), ErrorKind::Usage);
            assert!(refused.to_string().contains("Reducer::grad"), "{refused}");
        }
    });
}

#[test]
fn different_names_shapes_and_kinds_are_named_with_both_sides() {
    type Change = fn(&mut Model);
    let cases: [(Change, &str, &str); 4] = [
        (
            |m| m.0[1].0 = "fc1.shift",
            "parameter fc1.bias f32 [7]",
            "parameter fc1.shift f32 [7]",
        ),
        (
            |m| m.0[0].1 = vec![5, 7],
            "parameter fc1.weight f32 [7, 5]",
            "parameter fc1.weight f32 [5, 7]",
        ),
        (
            |m| m.0[3].2 = false,
            "buffer running_mean f32 [7]",
            "parameter running_mean f32 [7]",
        ),
        (
            |m| m.0.truncate(3),
            "rank 0 has \"buffer running_mean",
            "rank 2 has nothing",
        ),
    ];
    for (change, first, other) in cases {
        let errors = ranks(3, Over::Thread, |group| {
            let mut model = model(0);
            if group.rank() == 2 {
                change(&mut model);
            }
            let mut facts = Fingerprint::new();
            let compared = facts.parameters(&model).compare(&group);
            compared.expect_err("models differ")
        });
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::Mismatch);
            let text = error.to_string();
            assert!(
                text.contains("rank 2 does not train the same model as rank 0"),
                "{text}"
            );
            assert!(text.contains(first) && text.contains(other), "{text}");
        }
    }
}

#[test]
fn unequal_weights_and_buffers_are_named() {
    for (index, words) in [
        (
            2,
            "the weights of rank 1 differ from rank 0's, first in fc2.weight",
        ),
        (
            3,
            "the buffers of rank 1 differ from rank 0's, first in running_mean",
        ),
    ] {
        let errors = ranks(2, Over::Thread, |group| {
            let mut model = model(0);
            verify_equal(&group, &model, digest(&model)).expect("equal");
            model.values_mut(index)[0] += group.rank() as f32;
            verify_equal(&group, &model, digest(&model)).expect_err("unequal")
        });
        for error in errors {
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}

#[test]
fn any_rank_may_be_the_root_and_tensors_may_be_empty() {
    ranks(3, Over::Thread, |group| {
        let mut model = model(group.rank());
        model
            .0
            .insert(1, Tensor("empty", vec![0], false, Vec::new()));
        broadcast_parameters(&group, &mut model, 2).expect("broadcast");
        model.0.remove(1);
        let want = self::model(2);
        for i in 0..want.tensors() {
            assert_eq!(bits(model.values(i)), bits(want.values(i)));
        }
        let refused = broadcast_parameters(&group, &mut model, 3).expect_err("no such rank");
        assert_eq!(refused.kind(), ErrorKind::Comm);
    });
}
