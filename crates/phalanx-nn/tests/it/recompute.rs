//! Recomputed parts of a step: no bit changes, of whatever operation and
//! however they are nested; the pool holds less, and nothing is allocated later.

use crate::common::{hashed, noise};
use phalanx_nn::layers::{
    Act, BatchNorm, Conv2d, Conv2dOptions, LayerNorm, Linear, MultiHeadAttention,
};
use phalanx_nn::models::{CifarResNet, MobileNetV2};
use phalanx_nn::{Grads, Reduction, Result, Scope, Seed, StepKey, Tape, Tensor, Threads};

/// What a training leaves: loss, gradients and buffers of each step, as bits.
#[derive(PartialEq, Eq)]
struct Trace(Vec<Vec<u32>>);

struct Ran {
    trace: Trace,
    /// Bytes that the pool holds in the end.
    bytes: u64,
}

/// Some steps with a model, which `build` registers and `loss` runs.
fn train<M>(
    shape: &[usize],
    build: impl FnOnce(&mut Scope) -> M,
    loss: impl for<'s> Fn(&M, Tensor<'s>) -> Result<Tensor<'s>>,
) -> Ran {
    let mut scope = Scope::new(Seed(7));
    let model = build(&mut scope);
    let mut params = scope.build().unwrap();
    let mut grads = Grads::like(&params);
    let mut tape = Tape::new(Threads(2));
    tape.poison(true);
    let x = hashed(shape.iter().product(), 300, 8, 1.0);
    let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let (mut all, mut allocations) = (vec![], vec![]);
    for i in 0..4 {
        let step = tape.step(&params, StepKey::new(1, i).seed(5));
        let x = step.variable(&x, shape).unwrap();
        let value = loss(&model, x.share()).unwrap();
        all.push(bits(value.data()));
        value.backward(&mut grads).unwrap();
        all.push(bits(&x.grad().unwrap()));
        all.push(bits(grads.flat()));
        drop(x);
        drop(step);
        tape.update_buffers(&mut params).unwrap();
        allocations.push(tape.allocations());
        for id in params.buffer_ids() {
            all.push(bits(params.buffer(id)));
        }
    }
    assert_eq!(allocations[1], allocations[3], "allocates in steady state");
    Ran {
        trace: Trace(all),
        bytes: tape.pool_bytes(),
    }
}

fn cross_entropy(logits: Tensor<'_>) -> Result<Tensor<'_>> {
    let n = logits.shape()[0];
    let labels: Vec<u32> = (0..n as u32).map(|i| i % 10).collect();
    logits.cross_entropy(&labels, n as f32)
}

/// Runs it with and without; gives the bytes that both held.
fn both<M>(
    shape: &[usize],
    build: impl Fn(&mut Scope, bool) -> M,
    loss: impl for<'s> Fn(&M, Tensor<'s>) -> Result<Tensor<'s>>,
) -> [u64; 2] {
    let [without, with] = [false, true].map(|on| train(shape, |s| build(s, on), &loss));
    assert!(without.trace == with.trace, "bits differ");
    [without.bytes, with.bytes]
}

#[test]
fn models_keep_their_bits_in_less_memory() {
    let resnet = both(
        &[32, 32, 32, 3],
        |s, on| CifarResNet::new(s, &[16, 32], 2, 10).recompute(on),
        |m, x| cross_entropy(m.forward(x)?),
    );
    let mobilenet = both(
        &[16, 32, 32, 3],
        |s, on| MobileNetV2::new(s, 10).recompute(on),
        |m, x| cross_entropy(m.forward(x)?),
    );
    for (name, [without, with], most) in [("ResNet", resnet, 0.75), ("MobileNetV2", mobilenet, 0.6)]
    {
        let share = with as f64 / without as f64;
        println!("{name}: {without} bytes without, {with} with: {share:.3}");
        assert!(share < most, "{name}: {with} of {without} bytes");
    }
}

/// Operations of every kind that is run again, and some that are kept, some of them with operands
/// from outside the part or handed out of it, in place where they can be.
struct Mixed {
    conv: Conv2d,
    norm: BatchNorm,
    deeper: Conv2d,
    attention: MultiHeadAttention,
    layer_norm: LayerNorm,
    wide: Linear,
    head: Linear,
    /// How many parts enclose which operations.
    depth: usize,
}

impl Mixed {
    fn new(scope: &mut Scope, depth: usize) -> Mixed {
        let three = Conv2dOptions::new(3).padding(1);
        Mixed {
            conv: Conv2d::new(scope.enter("conv"), 3, 16, three),
            norm: BatchNorm::new(scope.enter("norm"), 16),
            deeper: Conv2d::new(scope.enter("deeper"), 16, 16, three),
            attention: MultiHeadAttention::new(scope.enter("attention"), 16, 2),
            layer_norm: LayerNorm::new(scope.enter("layer_norm"), &[16]),
            wide: Linear::new(scope.enter("wide"), 16, 32),
            head: Linear::new(scope.enter("head"), 32 * 16, 10),
            depth,
        }
    }

    /// `part` within a part, from a nesting depth on.
    fn part<'s, R>(
        &self,
        level: usize,
        x: Tensor<'s>,
        part: impl FnOnce(Tensor<'s>) -> Result<R>,
    ) -> Result<R> {
        if level < self.depth {
            x.recompute(part)
        } else {
            part(x)
        }
    }

    fn images<'s>(&self, x: Tensor<'s>) -> Result<(Tensor<'s>, Tensor<'s>)> {
        self.part(0, x, |x| {
            let y = self.conv.forward_act(x, Act::Relu6)?;
            let y = self.part(1, y, |y| {
                let y = self.norm.forward_act(y, Act::Relu)?.dropout2d(0.25)?;
                let z = self.part(2, y.share(), |y| {
                    let y = y.relu()?.scale(0.5)?; // both in place, where they may be
                    self.deeper.forward(y)?.gelu()?.dropout(0.1)
                })?;
                y.mul(z)?.max_pool2d(2)
            })?;
            let out = y.share().avg_pool2d(2)?;
            Ok((y.sigmoid()?, out))
        })
    }

    fn tokens<'s>(&self, x: Tensor<'s>, outside: Tensor<'s>) -> Result<Tensor<'s>> {
        let n = x.shape()[0];
        self.part(0, x, |x| {
            let x = x.reshape(&[n, 16, 16])?;
            // The part takes this by value, and may not overwrite it.
            let gate = outside.scale(1.5)?.relu()?.reshape(&[n, 16, 16])?;
            let y = self.layer_norm.forward(x.share())?;
            let y = self.part(1, y, |y| self.attention.forward(y, true)?.add(x))?;
            let y = y.add(gate)?.tanh()?;
            self.wide.forward_act(y, Act::Relu)?.silu()
        })
    }

    fn loss<'s>(&self, x: Tensor<'s>) -> Result<Tensor<'s>> {
        let (a, b) = self.images(x)?;
        let n = a.shape()[0];
        let b = b.adaptive_max_pool2d(4, 4)?; // never run again
        let y = self.tokens(a.avg_pool2d(2)?, b)?;
        let y = y.permute(&[0, 2, 1])?.reshape(&[n, 32 * 16])?;
        cross_entropy(self.head.forward(y.dropout(0.5)?)?)
    }
}

#[test]
fn parts_within_parts_and_dropout_keep_their_bits() {
    let runs: Vec<Ran> = (0..4)
        .map(|depth| {
            let build = |s: &mut Scope| Mixed::new(s, depth);
            train(&[3, 16, 16, 3], build, |m, x| m.loss(x))
        })
        .collect();
    for (depth, run) in runs.iter().enumerate().skip(1) {
        assert!(
            run.trace == runs[0].trace,
            "bits differ with {depth} parts around"
        );
    }
}

#[test]
fn a_failing_part_leaves_the_step_usable_and_evaluations_just_run_it() {
    let mut scope = Scope::new(Seed(1));
    let layer = Linear::new(scope.enter("l"), 4, 4);
    let params = scope.build().unwrap();
    let mut grads = Grads::like(&params);
    let mut tape = Tape::new(Threads(1));
    let x = noise(8, 1);
    let mut run = |fails: bool| {
        let step = tape.step(&params, StepKey::new(0, 0));
        let x = step.input(&x, &[2, 4]).unwrap();
        if fails {
            let failed = x.share().recompute(|x| {
                let y = layer.forward_act(x, Act::Relu)?;
                y.recompute(|y| layer.forward(y)?.reshape(&[3]))
            });
            assert!(failed.is_err());
        }
        let y = x.recompute(|x| layer.forward_act(layer.forward_act(x, Act::Relu)?, Act::Relu));
        let loss = y.unwrap().mse_loss(&[0.5; 8], Reduction::Mean).unwrap();
        loss.backward(&mut grads).unwrap();
        grads.flat().to_vec()
    };
    assert_eq!(run(false), run(true));
    let step = tape.inference(&params);
    let x = step.input(&x, &[2, 4]).unwrap();
    let y = x.share().recompute(|x| layer.forward(x)).unwrap().to_vec();
    assert_eq!(y, layer.forward(x).unwrap().to_vec());
}
