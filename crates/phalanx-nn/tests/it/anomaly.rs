//! Values and gradients that are not finite, and the operations that made them.

use crate::common::{hashed, noise};
use phalanx_nn::layers::{Conv2d, Conv2dOptions, Embedding, Linear};
use phalanx_nn::models::{CifarResNet, Gpt, GptConfig};
use phalanx_nn::{
    CustomOp, ErrorKind, Grads, Params, Precision, Reduction, Result, Scope, Seed, Step, StepKey,
    Tape, Tensor, Threads,
};

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;

struct Net {
    fc: Linear,
    conv: Conv2d,
    table: Embedding,
}

fn build() -> (Net, Params) {
    let mut s = Scope::new(Seed(1));
    let net = Net {
        fc: Linear::new(s.enter("fc1"), 2, 3),
        conv: Conv2d::new(s.enter("conv"), 2, 4, Conv2dOptions::new(3)),
        table: Embedding::new(s.enter("table"), 5, 2),
    };
    (net, s.build().unwrap())
}

/// What is wrong with a step, which runs if nothing is checked.
fn wrong(params: &Params, trains: bool, run: impl Fn(&Step<'_>) -> Result<()>) -> String {
    let mut tape = Tape::new(Threads(1));
    let mut result = Ok(());
    for on in [false, true, false] {
        tape.set_anomaly(on);
        let step = match trains {
            true => tape.step(params, StepKey::new(0, 0)),
            false => tape.inference(params),
        };
        match on {
            true => result = run(&step),
            false => run(&step).unwrap(),
        }
    }
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Failed, "{error}");
    error.to_string()
}

struct Broken;

impl CustomOp for Broken {
    fn forward(&self, x: &[&[f32]], y: &mut [f32]) -> phalanx_base::Result<()> {
        y.copy_from_slice(x[0]);
        y[1] = NAN;
        Ok(())
    }

    fn backward(
        &self,
        _: &[&[f32]],
        _: &[f32],
        _: &[f32],
        dx: &mut [&mut [f32]],
    ) -> phalanx_base::Result<()> {
        dx[0].fill(1.0);
        Ok(())
    }

    fn name(&self) -> &'static str {
        "Broken"
    }
}

#[test]
fn the_first_operation_with_a_wrong_result_is_named() {
    let (_, params) = build();
    type Run = fn(Tensor<'_>) -> Result<()>;
    let cases: [(&[f32], Run, &str); 6] = [
        (
            &[1.0, 2.0, 3.0, -1.0],
            |x| x.log()?.relu()?.exp().map(drop),
            "the result of Log, of shape [2, 2], whose inputs are sound, has NaN at [1, 1]",
        ),
        (
            &[1.0, 0.0, 3.0, 4.0],
            |x| x.share().div(x)?.sum(&[0], false).map(drop),
            "the result of Div, of shape [2, 2], whose inputs are sound, has NaN at [0, 1]",
        ),
        (
            &[1.0, 0.0, 100.0, 4.0],
            |x| {
                let y = x.exp()?;
                y.share().sub(y).map(drop)
            },
            "the result of Exp, of shape [2, 2], whose inputs are sound, has inf at [1, 0]",
        ),
        (
            // An infinity that was given may be there, but no NaN.
            &[1.0, INF, 0.0, 4.0],
            |x| {
                let y = x.scale(-2.0)?;
                y.share().sub(y)?.relu().map(drop)
            },
            "the result of Sub, of shape [2, 2], whose inputs are sound, has NaN at [0, 1]",
        ),
        (
            &[1.0, 2.0, 3.0, NAN],
            |x| x.relu().map(drop),
            "an input of shape [2, 2] has NaN at [1, 1]",
        ),
        (
            &[1.0; 4],
            |x| {
                x.masked_fill(&[true, true], f32::NEG_INFINITY)?
                    .softmax(1)
                    .map(drop)
            },
            "the result of Softmax, of shape [2, 2], whose inputs are sound, has NaN at [0, 0]",
        ),
    ];
    for (data, run, want) in cases {
        for (trains, varies) in [(true, true), (true, false), (false, false)] {
            let got = wrong(&params, trains, |step| {
                let x = match varies {
                    true => step.variable(data, &[2, 2])?,
                    false => step.input(data, &[2, 2])?,
                };
                run(x)
            });
            assert_eq!(got, want);
        }
    }
    for trains in [true, false] {
        let got = wrong(&params, trains, |step| {
            let x = step.variable(&[1.0; 2], &[2])?;
            step.custom(Box::new(Broken), vec![x], &[2]).map(drop)
        });
        assert!(
            got.starts_with("the result of Broken, of shape [2]"),
            "{got}"
        );
    }
}

#[test]
fn parameters_are_named() {
    let (net, params) = build();
    let forward = |step: &Step<'_>| {
        let x = net.table.forward(step, &[1, 4, 2], &[3])?;
        net.fc.forward(x)?;
        let x = step.input(&[0.5; 2 * 9], &[1, 3, 3, 2])?;
        net.conv.forward(x).map(drop)
    };
    for (name, place, value, want) in [
        (
            "fc1.weight",
            3,
            NAN,
            "the parameter fc1.weight of shape [3, 2] has NaN at [1, 1]",
        ),
        (
            "conv.weight",
            (3 * 2 + 1) * 9 + 2 * 3 + 1,
            -INF,
            "the parameter conv.weight of shape [4, 2, 3, 3] has -inf at [3, 1, 2, 1]",
        ),
        // A row that no token names.
        (
            "table.weight",
            7,
            NAN,
            "the parameter table.weight of shape [5, 2] has NaN at [3, 1]",
        ),
    ] {
        let mut params = params.clone();
        let id = params.find(name).unwrap();
        let mut values = params.export(id);
        values[place] = value;
        params.import(id, &values).unwrap();
        for trains in [true, false] {
            assert_eq!(wrong(&params, trains, forward), want);
        }
    }
    let mut params = params;
    params.flat_mut().fill(f32::MAX);
    let got = wrong(&params, true, |step| {
        net.fc.forward(step.input(&[2.0; 4], &[2, 2])?).map(drop)
    });
    let want = "the result of Linear with fc1.weight, of shape [2, 3], whose inputs are sound, has inf at [0, 0]";
    assert_eq!(got, want);
}

#[test]
fn gradients_are_named() {
    let (net, params) = build();
    let sink = || Grads::like(&params);
    let zeros = [1.0, 0.0, 4.0, 9.0];
    // 0 times the infinite derivative of the root.
    let got = wrong(&params, true, |step| {
        let x = step.variable(&zeros, &[2, 2])?.scale(1.0)?;
        let y = x.sqrt()?.scale(0.0)?;
        y.sum(&[0, 1], false)?.backward(&mut sink())
    });
    let want = "the gradient of Sqrt for its input 0, of shape [2, 2], has NaN at [0, 1]";
    assert_eq!(got, want);
    // A norm at 0.
    let got = wrong(&params, true, |step| {
        let x = step.variable(&[0.0; 4], &[4])?;
        let squares = x.share().mul(x)?.sum(&[0], false)?;
        squares.sqrt()?.backward(&mut sink())
    });
    let want = "the gradient of Sqrt for its input 0, of shape [], has inf at []";
    assert_eq!(got, want);
    let got = wrong(&params, true, |step| {
        let (a, b) = (step.input(&[1.0], &[1])?, step.variable(&[1e-25], &[1])?);
        a.div(b)?.backward(&mut sink())
    });
    let want = "the gradient of Div for its input 1, of shape [1], has -inf at [0]";
    assert_eq!(got, want);
    let got = wrong(&params, true, |step| {
        let x = step.input(&[1e30, 1.0], &[1, 2])?;
        net.fc
            .forward(x)?
            .backward_with(&[1.0, -1e10, 1.0], &mut sink())
    });
    let want =
        "the gradient of Linear for the parameter fc1.weight of shape [3, 2] has -inf at [1, 0]";
    assert_eq!(got, want);
    let got = wrong(&params, true, |step| {
        let x = step.variable(&[1.0, 2.0], &[2])?;
        x.relu()?.backward_with(&[0.0, NAN], &mut sink())
    });
    let want = "the gradient given to backward, of shape [2], has NaN at [1]";
    assert_eq!(got, want);
}

/// Bits of the loss and gradients, or of the loss of an evaluation.
fn bits(
    params: &Params,
    (on, precision, trains): (bool, Precision, bool),
    loss: &dyn for<'s> Fn(&'s Step<'s>) -> Result<Tensor<'s>>,
) -> Vec<u32> {
    let (mut tape, mut grads) = (Tape::new(Threads(2)), Grads::like(params));
    tape.set_anomaly(on);
    tape.set_precision(precision);
    tape.poison(true);
    let step = match trains {
        true => tape.step(params, StepKey::new(0, 0)),
        false => tape.inference(params),
    };
    let loss = loss(&step).unwrap();
    let mut values = vec![loss.item().unwrap()];
    if trains {
        loss.backward(&mut grads).unwrap();
        values.extend(grads.flat());
    }
    values.iter().map(|v| v.to_bits()).collect()
}

fn same_bits(params: &Params, loss: &dyn for<'s> Fn(&'s Step<'s>) -> Result<Tensor<'s>>) {
    for precision in [Precision::F32, Precision::Bf16] {
        for trains in [true, false] {
            let [off, on] = [false, true].map(|on| bits(params, (on, precision, trains), loss));
            assert_eq!(off, on, "{precision:?}, trains: {trains}");
        }
    }
}

#[test]
fn sound_models_pass_with_the_same_bits() {
    let mut scope = Scope::new(Seed(3));
    let config = GptConfig {
        vocab: 7,
        context: 9,
        layers: 2,
        heads: 2,
        width: 8,
        dropout: 0.2,
    };
    let gpt = Gpt::new(&mut scope, &config).recompute(true);
    let params = scope.build().unwrap();
    let tokens: Vec<u32> = (0..18).map(|i| i * i % 7).collect();
    same_bits(&params, &|step| {
        let logits = gpt.forward(step, &tokens, (2, 9))?.reshape(&[18, 7])?;
        logits.cross_entropy(&tokens, Reduction::Mean)
    });
    let mut scope = Scope::new(Seed(7));
    let net = CifarResNet::new(&mut scope, &[32, 64], 2, 10);
    let params = scope.build().unwrap();
    let shape = [3, 8, 8, 3];
    let images = hashed(shape.iter().product(), 200, 8, 1.0);
    same_bits(&params, &|step| {
        let scores = net.forward(step.input(&images, &shape)?)?;
        scores.cross_entropy(&[0, 1, 2], Reduction::Mean)
    });
    // Both kinds of masks.
    let (net, params) = build();
    let x = noise(8, 1);
    same_bits(&params, &|step| {
        let y = net.fc.forward(step.input(&x, &[4, 2])?)?;
        let mask = step.input(&[0.0, -INF, 0.0], &[3])?;
        let closed = [false, false, true];
        let added = y.share().add(mask)?.softmax(1)?;
        let filled = y.masked_fill(&closed, -INF)?.log_softmax_dim(1)?;
        let chosen = filled.gather(1, &[0; 4], &[4, 1])?;
        added.mul(chosen)?.sum(&[0, 1], false)
    });
}
