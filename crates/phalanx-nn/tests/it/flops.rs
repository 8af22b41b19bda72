//! Floating-point operations that a tape counts: those of `torch.utils.flop_counter.FlopCounterMode`, but that the weight
//! gradient of a convolution with groups counts its own groups only.

use phalanx_nn::layers::{Conv2d, Conv2dOptions, ConvTranspose2d, Linear};
use phalanx_nn::models::CifarResNet;
use phalanx_nn::{
    Grads, Precision, Reduction, Result, Scope, Seed, StepKey, Tape, Tensor, Threads,
};

/// The counts of the forward and the backward pass of a model in f32, which are those in bf16 and on two threads; with
/// `variable` the input has a gradient.
fn counts<M>(
    shape: &[usize],
    variable: bool,
    build: impl Fn(Scope) -> M,
    forward: impl for<'s> Fn(&M, Tensor<'s>) -> Result<Tensor<'s>>,
) -> [u64; 2] {
    let count = |precision, threads| {
        let mut scope = Scope::new(Seed(0));
        let model = build(scope.enter("model"));
        let mut params = scope.build().unwrap();
        let mut grads = Grads::like(&params);
        let mut tape = Tape::new(Threads(threads));
        tape.set_precision(precision);
        let data = vec![0.5; shape.iter().product()];
        let mut all = Vec::new();
        for i in 0..2 {
            let before = tape.flops();
            let step = tape.step(&params, StepKey::new(0, i));
            let x = match variable {
                true => step.variable(&data, shape).unwrap(),
                false => step.input(&data, shape).unwrap(),
            };
            let y = forward(&model, x).unwrap();
            let target = vec![0.0; y.shape().iter().product()];
            let loss = y.mse_loss(&target, Reduction::Sum).unwrap();
            loss.backward(&mut grads).unwrap();
            drop(step);
            tape.update_buffers(&mut params).unwrap();
            let after = tape.flops();
            let step = tape.inference(&params);
            forward(&model, step.input(&data, shape).unwrap()).unwrap();
            drop(step);
            let forward = tape.flops() - after;
            all.push([forward, after - before - forward]);
        }
        assert_eq!(all[0], all[1], "a second step");
        all[0]
    };
    let plain = count(Precision::F32, 1);
    assert_eq!(plain, count(Precision::F32, 2), "two threads");
    assert_eq!(plain, count(Precision::Bf16, 1), "bf16");
    plain
}

#[test]
fn a_linear_layer_has_a_product_a_pass() {
    let product = 2 * 6 * 24 * 40;
    for (variable, gradients) in [(false, 1), (true, 2)] {
        let build = |scope: Scope<'_>| Linear::new(scope, 24, 40);
        let counted = counts(&[2, 3, 24], variable, build, |layer, x| layer.forward(x));
        assert_eq!(counted, [product, gradients * product]);
    }
}

#[test]
fn a_convolution_has_a_product_for_each_output() {
    // Channels, options, and the output's sides of images of 9 x 7: through each of the methods.
    let three = Conv2dOptions::new(3);
    for (inputs, outputs, groups, options, sides) in [
        (3, 8, 1, three, [7, 5]),
        (3, 8, 1, three.stride(2).padding(1), [5, 4]),
        (32, 48, 1, three.padding(1), [9, 7]),
        (32, 32, 1, Conv2dOptions::new(1), [9, 7]),
        (16, 32, 1, three.stride(2), [4, 3]),
        (12, 20, 4, three.groups(4).padding(1), [9, 7]),
        (16, 16, 16, three.groups(16).stride(2).padding(1), [5, 4]),
        (3, 4, 1, three.dilation_rect(2, 3), [5, 1]),
    ] {
        let kernel = if options == Conv2dOptions::new(1) {
            1
        } else {
            9
        };
        let pass = 2 * 5 * sides[0] * sides[1] * outputs * (inputs / groups) * kernel;
        for (variable, gradients) in [(false, 1), (true, 2)] {
            let build =
                |scope: Scope<'_>| Conv2d::new(scope, inputs as usize, outputs as usize, options);
            let shape = [5, 9, 7, inputs as usize];
            let counted = counts(&shape, variable, build, |layer, x| layer.forward(x));
            assert_eq!(counted, [pass, gradients * pass], "{options:?}");
        }
    }
}

#[test]
fn a_transposed_convolution_has_a_product_for_each_input() {
    let options = Conv2dOptions::new(3).stride(2).groups(2);
    let pass = 2 * 5 * (4 * 3) * 8 * (6 / 2) * 9;
    for (variable, gradients) in [(false, 1), (true, 2)] {
        let build = |scope: Scope<'_>| ConvTranspose2d::new(scope, 8, 6, options);
        let counted = counts(&[5, 4, 3, 8], variable, build, |layer, x| layer.forward(x));
        assert_eq!(counted, [pass, gradients * pass]);
    }
}

#[test]
fn attention_has_two_products_forward_and_four_backward() {
    // The queries times the keys, and the weights times the values, of each of 2 samples and 4 heads.
    let product = 2 * (2 * 4) * 10 * 10 * 8;
    for causal in [false, true] {
        let counted = counts(
            &[2, 10, 32],
            true,
            |_| (),
            |(), x| x.share().attention(x.share(), x, 4, causal, Some(0.5)),
        );
        assert_eq!(counted, [2 * product, 4 * product]);
    }
    // Only queries, only keys, or only values depend on the layer, whose input needs no gradient.
    let build = |scope: Scope<'_>| Linear::without_bias(scope, 32, 32);
    let layer = 2 * 20 * 32 * 32;
    for (place, products) in [2, 2, 1].into_iter().enumerate() {
        let counted = counts(&[2, 10, 32], false, build, |linear, x| {
            let y = linear.forward(x.share())?;
            let of = |i| if i == place { y.share() } else { x.share() };
            of(0).attention(of(1), of(2), 4, false, None)
        });
        assert_eq!(counted, [layer + 2 * product, layer + products * product]);
    }
}

#[test]
fn products_of_tensors_have_one_each_way() {
    let product = 2 * 3 * (4 * 5 * 4);
    let counted = counts(
        &[3, 4, 5],
        true,
        |_| (),
        |(), x| x.share().bmm_transposed(x),
    );
    assert_eq!(counted, [product, 2 * product]);
}

#[test]
fn recomputation_does_not_count() {
    let [without, with] = [false, true].map(|on| {
        let build =
            |mut scope: Scope<'_>| CifarResNet::new(&mut scope, &[16, 32], 1, 10).recompute(on);
        counts(&[2, 8, 8, 3], false, build, |model, x| model.forward(x))
    });
    assert_eq!(without, with);
}
