//! Results of another engine, here of loops over slices, beside this engine's.

use phalanx_nn::layers::{BatchNorm, Linear, RunningStats};
use phalanx_nn::{
    BatchStatistics, Computed, ComputedBackward, ErrorKind, GradSink, GradView, Grads, ParamId,
    Params, Precision, Reduction, Result, Scope, Seed, Step, StepKey, TakeGradient, Tape, Tensor,
    Threads,
};

const ROWS: usize = 3;
const IN: usize = 2;
const OUT: usize = 4;
const X: [f32; ROWS * IN] = [0.5, -1.0, 2.0, 0.25, -0.75, 1.5];
const TARGETS: [f32; ROWS * OUT] = [0.1; ROWS * OUT];

struct Net {
    linear: Linear,
    norm: BatchNorm,
    unused: Linear,
}

fn net() -> (Net, Params) {
    let mut scope = Scope::new(Seed(3));
    let net = Net {
        linear: Linear::new(scope.enter("linear"), IN, OUT),
        norm: BatchNorm::new(scope.enter("norm"), OUT),
        unused: Linear::new(scope.enter("unused"), OUT, 1),
    };
    (net, scope.build().expect("a model"))
}

/// What the engine does wrong.
#[derive(Clone, Copy, PartialEq)]
enum Mistake {
    None,
    Twice,
    Forgotten,
    Short,
}

struct Backward {
    params: [ParamId; 2],
    mistake: Mistake,
}

impl ComputedBackward for Backward {
    fn backward(
        &mut self,
        dy: &[f32],
        gradient: &mut TakeGradient<'_>,
    ) -> phalanx_base::Result<()> {
        let (mut dw, mut db) = ([0.0; OUT * IN], [0.0; OUT]);
        for (x, dy) in X.chunks(IN).zip(dy.chunks(OUT)) {
            for (o, dy) in dy.iter().enumerate() {
                db[o] += dy;
                (0..IN).for_each(|i| dw[o * IN + i] += dy * x[i]);
            }
        }
        let [weight, bias] = self.params;
        if self.mistake != Mistake::Forgotten {
            let len = if self.mistake == Mistake::Short {
                1
            } else {
                OUT
            };
            gradient(bias, Some(&db[..len]))?;
        }
        if self.mistake == Mistake::Twice {
            gradient(bias, Some(&db))?;
        }
        gradient(weight, Some(&dw))?;
        Ok(())
    }
}

/// The linear layer by loops.
fn linear<'s>(step: &'s Step<'_>, net: &Net, mistake: Mistake) -> Result<Tensor<'s>> {
    let params = [net.linear.weight, net.linear.bias.expect("it has one")];
    let [w, b] = params.map(|id| step.params().export(id));
    let y = X.chunks(IN).flat_map(|x| {
        let dot = |o: usize| (0..IN).map(|i| w[o * IN + i] * x[i]).sum::<f32>() + b[o];
        (0..OUT).map(dot).collect::<Vec<_>>()
    });
    step.computed(Computed {
        values: y.collect(),
        shape: vec![ROWS, OUT],
        params: params.to_vec(),
        statistics: Vec::new(),
        backward: Box::new(Backward { params, mistake }),
    })
}

fn near(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-6)
}

/// Gradients of two backward passes, by either engine.
fn gradients(other: bool, accumulates: bool, params: &Params, net: &Net) -> Grads {
    let (mut tape, mut grads) = (Tape::new(Threads(1)), Grads::like(params));
    grads.set_accumulate(accumulates);
    for i in 0..2 {
        let step = tape.step(params, StepKey::new(0, i));
        let y = match other {
            true => linear(&step, net, Mistake::None),
            false => net
                .linear
                .forward(step.input(&X, &[ROWS, IN]).expect("fits")),
        };
        // The bias is used by this engine too.
        let bias = step.parameter(net.linear.bias.expect("it has one"));
        let y = y.and_then(|y| y.add(bias?)).expect("fits");
        let loss = y.mse_loss(&TARGETS, Reduction::Sum).expect("fits");
        loss.backward(&mut grads).expect("a gradient for each");
    }
    grads
}

#[test]
fn gradients_are_those_of_this_engine() {
    let (net, mut params) = net();
    for accumulates in [false, true] {
        let [own, other] = [false, true].map(|other| gradients(other, accumulates, &params, &net));
        assert!(near(own.flat(), other.flat()), "{own:?} {other:?}");
        assert!(own.flat().iter().any(|value| value.abs() > 0.1));
        assert!(other.untouched(net.unused.weight));
    }
    params.freeze(net.linear.weight);
    let grads = gradients(true, false, &params, &net);
    assert!(grads.untouched(net.linear.weight));
    assert!(!grads.untouched(net.linear.bias.expect("it has one")));
}

#[test]
fn an_engine_that_is_wrong_is_an_error() {
    let (net, params) = net();
    let backward = |mistake, text: &str| {
        let mut tape = Tape::new(Threads(1));
        let step = tape.step(&params, StepKey::new(0, 0));
        let loss = linear(&step, &net, mistake).and_then(|y| y.mse_loss(&TARGETS, Reduction::Sum));
        let error = loss.expect("fits").backward(&mut Grads::like(&params));
        let error = error.expect_err("it is wrong");
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        assert!(error.to_string().contains(text), "{error}");
    };
    backward(Mistake::Twice, "a second gradient of linear.bias");
    backward(Mistake::Forgotten, "no gradient of linear.bias");
    backward(
        Mistake::Short,
        "a gradient of another size than linear.bias",
    );

    let refused = |tape: &mut Tape| {
        let step = tape.step(&params, StepKey::new(0, 0));
        let error = linear(&step, &net, Mistake::None).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    };
    let mut tape = Tape::new(Threads(1));
    tape.set_precision(Precision::Bf16);
    refused(&mut tape);
}

/// A normalisation by loops, of which only the statistics matter here.
fn normed<'s>(step: &'s Step<'_>, running: RunningStats) -> Result<Tensor<'s>> {
    let column = |o: usize| (0..ROWS).map(move |row| f64::from(X[(row * OUT + o) % X.len()]));
    let mean: Vec<f64> = (0..OUT)
        .map(|o| column(o).sum::<f64>() / ROWS as f64)
        .collect();
    let var = (0..OUT).map(|o| {
        let squares: f64 = column(o).map(|x| (x - mean[o]).powi(2)).sum();
        (squares / (ROWS as f64 - 1.0)) as f32
    });
    let params = [step.params().ids().next().expect("one"); 1];
    step.computed(Computed {
        values: vec![0.0],
        shape: vec![1],
        params: params.to_vec(),
        statistics: vec![BatchStatistics {
            running,
            momentum: Some(0.1),
            rows: ROWS,
            mean: mean.iter().map(|m| *m as f32).collect(),
            var: var.collect(),
        }],
        backward: Box::new(Backward {
            params: [params[0]; 2],
            mistake: Mistake::None,
        }),
    })
}

#[test]
fn batch_statistics_run_as_this_engines() {
    let (net, params) = net();
    let running = net.norm.options().running.expect("it has some");
    let x: Vec<f32> = (0..ROWS * OUT).map(|i| X[i % X.len()]).collect();
    let after = |other: bool| {
        let (mut tape, mut params) = (Tape::new(Threads(1)), params.clone());
        for i in 0..2 {
            let step = tape.step(&params, StepKey::new(0, i));
            let made = match other {
                true => normed(&step, running),
                false => net
                    .norm
                    .forward(step.input(&x, &[ROWS, OUT]).expect("fits")),
            };
            drop(made.expect("fits"));
            drop(step);
            tape.update_buffers(&mut params).expect("the same model");
        }
        assert_eq!(tape.take_fewest_normalised(), Some((ROWS as f64, false)));
        params.buffers_flat().to_vec()
    };
    let (own, other) = (after(false), after(true));
    assert!(near(&own, &other), "{own:?} {other:?}");
    assert_ne!(own, params.buffers_flat());
    // As with this engine's, two steps without update_buffers are an error.
    let mut tape = Tape::new(Threads(1));
    drop(normed(&tape.step(&params, StepKey::new(0, 0)), running));
    let error = normed(&tape.step(&params, StepKey::new(0, 1)), running).map(drop);
    assert_eq!(error.expect_err("stale").kind(), ErrorKind::Usage);
}

#[test]
fn a_mask_is_that_of_the_dropout_in_its_place() {
    let (_, params) = net();
    let key = || StepKey::new(1, 2).seed(3).samples(&[8, 6, 4]);
    let mut tape = Tape::new(Threads(1));
    for channels in [false, true] {
        let shape = [3, 2, 2, 5];
        let ones = vec![1.0; 60];
        let own: Vec<f32> = {
            let step = tape.step(&params, key());
            let x = || step.input(&ones, &shape).expect("fits");
            x().dropout(0.5).expect("the first");
            let y = if channels {
                x().dropout2d(0.4)
            } else {
                x().dropout(0.4)
            };
            y.expect("the second").to_vec()
        };
        let step = tape.step(&params, key());
        assert_eq!(
            step.dropout_mask(0.0, &shape, channels).expect("fits"),
            None
        );
        let mask = step.dropout_mask(0.4, &shape, channels).expect("fits");
        assert_eq!(mask.as_ref(), Some(&own));
        assert!(own.contains(&0.0) && own.iter().any(|factor| *factor > 1.6));
        let mask = step.evaluate(|| step.dropout_mask(0.4, &shape, channels));
        assert_eq!(mask.expect("fits"), None);
    }
}

#[test]
fn versions_change_with_the_values() {
    let (net, mut params) = net();
    let first = params.versions();
    let copy = params.clone();
    assert_eq!(copy.versions(), first);
    params.get_mut(net.linear.weight)[0] += 1.0;
    let second = params.versions();
    assert!(second[0] != first[0] && second[1] == first[1]);
    let mut copy = copy;
    copy.flat_mut()[0] += 2.0;
    assert!(copy.versions()[0] != second[0], "the copy has other values");
    params.buffers_flat_mut()[0] += 1.0;
    assert!(params.versions()[0] == second[0] && params.versions()[1] != second[1]);
}

/// A sink as other crates have it: the gradients come in the order in which the engine gives them.
#[test]
fn a_sink_gets_each_gradient_as_soon_as_it_is_there() {
    struct Order(Grads, Vec<ParamId>);
    impl GradSink for Order {
        fn slot(&mut self, param: ParamId) -> &mut [f32] {
            self.0.slot(param)
        }
        fn ready(&mut self, param: ParamId) -> phalanx_base::Result<()> {
            self.1.push(param);
            self.0.ready(param)
        }
        fn unused(&mut self, param: ParamId) -> phalanx_base::Result<()> {
            self.0.unused(param)
        }
    }
    let (net, params) = net();
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    let loss =
        linear(&step, &net, Mistake::None).and_then(|y| y.mse_loss(&TARGETS, Reduction::Sum));
    let mut sink = Order(Grads::like(&params), Vec::new());
    loss.and_then(|loss| loss.backward(&mut sink))
        .expect("fits");
    assert_eq!(
        sink.1,
        [net.linear.bias.expect("it has one"), net.linear.weight]
    );
}
