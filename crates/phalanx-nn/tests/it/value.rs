//! Operations through `Value`, as layers call them, give the bits of `Tensor`'s own.

use crate::common::noise;
use phalanx_nn::layers::{Activation, Embedding};
use phalanx_nn::{Result, Scope, Seed, StepKey, Tape, Tensor, Threads, Value};

/// Methods with another name or body than `Tensor`'s.
fn provided<'s, V: Value<'s>>(x: &V) -> Result<Vec<V>> {
    let c = x.constant(&[1.5, -2.0, 0.25], &[3])?;
    Ok(vec![
        x.share().relu()?,
        x.share().relu6()?,
        x.share().gelu()?,
        x.share().gelu_tanh()?,
        x.share().silu()?,
        x.share().hardswish()?,
        x.share().hardsigmoid()?,
        x.share().sigmoid()?,
        x.share().tanh()?,
        x.share().exp()?,
        x.share().abs()?.log()?,
        x.share().abs()?.sqrt()?,
        x.share().pow(3.0)?,
        x.share().clamp(-0.5, 0.25)?,
        x.share().leaky_relu(0.1)?,
        x.share().log_softmax()?,
        x.share().transpose(0, 1)?,
        x.share().sub(c)?,
        V::concat(vec![x.share(), x.share().scale(2.0)?], 1)?,
        x.share().recompute(V::exp)?,
    ])
}

fn own<'s>(x: &Tensor<'s>, c: Tensor<'s>, both: Tensor<'s>) -> Result<Vec<Tensor<'s>>> {
    Ok(vec![
        x.share().relu()?,
        x.share().relu6()?,
        x.share().gelu()?,
        x.share().gelu_tanh()?,
        x.share().silu()?,
        x.share().hardswish()?,
        x.share().hardsigmoid()?,
        x.share().sigmoid()?,
        x.share().tanh()?,
        x.share().exp()?,
        x.share().abs()?.log()?,
        x.share().abs()?.sqrt()?,
        x.share().pow(3.0)?,
        x.share().clamp(-0.5, 0.25)?,
        x.share().activation(Activation::LeakyRelu(0.1))?,
        x.share().log_softmax()?,
        x.share().transpose(0, 1)?,
        x.share().sub(c)?,
        both,
        x.share().exp()?,
    ])
}

#[test]
fn operations_of_a_value_are_those_of_the_tensor() {
    let mut scope = Scope::new(Seed(1));
    let table = Embedding::new(scope.enter("table"), 4, 2);
    let params = scope.build().unwrap();
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    let x = step.input(&noise(6, 1), &[2, 3]).unwrap();
    assert!(x.is_training());
    let c = step.input(&[1.5, -2.0, 0.25], &[3]).unwrap();
    let twice = x.share().scale(2.0).unwrap();
    let both = step.concat(vec![x.share(), twice], 1).unwrap();
    let want = own(&x, c, both).unwrap();
    let got = provided(&x).unwrap();
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        assert_eq!(got.shape(), want.shape(), "operation {i}");
        assert_eq!(got.data(), want.data(), "operation {i}");
    }
    // The step alone says what a look-up returns.
    let rows = table.forward(&step, &[3, 0], &[2]).unwrap();
    assert_eq!(rows.data()[..2], params.export(table.weight)[6..]);
    assert!(<Tensor<'_> as Value>::concat(vec![], 0).is_err());
    assert!(Value::transpose(x, 0, 2).is_err());
    drop((got, want, rows));
    drop(step);
    let step = tape.inference(&params);
    assert!(!step.input(&[1.0], &[1]).unwrap().is_training());
}
