//! Edges that a user can reach: odd shapes, foreign gradients, a sink that panics.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::common::Recorder;
use phalanx_nn::layers::{
    Act, AvgPool2dOptions, BatchNorm2d, Conv2d, Conv2dOptions, ConvTranspose2d, Embedding,
    GroupNorm, Linear, MaxPool2dOptions,
};
use phalanx_nn::optim::{Adam, Sgd, grad_norm};
use phalanx_nn::{
    ErrorKind, GradSink, Grads, Init, Layout, ParamId, Params, Reduction, Result, Scope, Seed,
    Step, StepKey, Tape, Tensor, ThreadPool, Threads,
};

fn is_usage<T: std::fmt::Debug>(r: Result<T>, part: &str) {
    let e = r.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Usage);
    assert!(e.to_string().contains(part), "{e}");
}

/// The mask of the first dropout must be made again after one with fewer rows.
#[test]
fn dropouts_of_one_step_may_have_different_numbers_of_rows() {
    let params = Scope::new(Seed(0)).build().unwrap();
    let mut tape = Tape::new(Threads(1));
    let mut sink = Grads::like(&params);
    let step = tape.step(&params, StepKey::new(0, 0));
    let x = step.variable(&[1.0; 48], &[8, 6]).unwrap();
    let seen = x.share();
    let first = x.dropout(0.5).unwrap();
    let second = first.share().reshape(&[2, 24]).unwrap();
    let second = second.dropout(0.5).unwrap();
    let product = second.to_vec(); // of both masks, as the input is one
    assert!(first.data() != product);
    second.backward_with(&[1.0; 48], &mut sink).unwrap();
    assert_eq!(seen.grad().unwrap(), product);
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let mut scope = Scope::new(Seed(0));
    let w = scope.param(
        "w",
        &[2, 16, 3, 3],
        Layout::Conv,
        Init::Uniform {
            low: -1.0,
            high: 1.0,
        },
    );
    let params = scope.build().unwrap();
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    let conv = |shape: &[usize], o| {
        let values = vec![0.0; shape.iter().product()];
        step.input(&values, shape)?.conv2d(w, None, o, Act::None)
    };
    let o = Conv2dOptions::new(3);
    is_usage(
        conv(&[1, 4, 0, 16], o.padding(2)),
        "a kernel of 3 x 3 with stride 1 x 1, padding 2 x 2, dilation 1 x 1 does not fit images of 4 x 0",
    );
    is_usage(conv(&[1, 0, 4, 16], o.padding(2)), "does not fit");
    is_usage(conv(&[1, 4, 4, 16], o.dilation_rect(0, 1)), "does not fit");
    is_usage(
        conv(&[0, 4, 4, 16], o.padding(usize::MAX / 4)),
        "is too large",
    );
    is_usage(
        conv(&[1, 4, 4, 16], o.padding(usize::MAX / 2 + 1)),
        "does not fit",
    );
    let pool = |shape: &[usize], o: MaxPool2dOptions| {
        let values = vec![0.0; shape.iter().product()];
        step.input(&values, shape)?.max_pool2d(o)
    };
    let o = MaxPool2dOptions::new(2);
    is_usage(pool(&[1, 4, 4, 1], o.dilation(0)), "does not fit");
    is_usage(
        pool(&[1, 0, 4, 1], o.padding(1)),
        "a window of 2 x 2 with stride 2 x 2, padding 1 x 1, dilation 1 x 1 does not fit images of 0 x 4",
    );
    is_usage(step.input(&[], &[0, usize::MAX, 2]), "too large");
    let up = |padding: usize, extra: usize| {
        let o = Conv2dOptions::new(3).padding(padding);
        step.input(&[0.0; 32], &[1, 4, 4, 2])?
            .conv_transpose2d(w, None, o, [extra, 0])
    };
    is_usage(up(0, usize::MAX), "does not fit");
    is_usage(up(usize::MAX / 2 + 1, 0), "does not fit");
    let image = step.input(&[0.0; 16], &[1, 4, 4, 1]).unwrap();
    is_usage(image.adaptive_avg_pool2d(usize::MAX / 2, 4), "is too large");
}

/// `torch.nn.functional.max_pool2d` and `avg_pool2d` with `ceil_mode=True` give these.
#[test]
fn a_window_larger_than_the_image_counts_where_sizes_are_rounded_up() {
    let params = Scope::new(Seed(0)).build().unwrap();
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    for (kernel, stride, side, largest, mean) in [
        (3, 2, 2, 3.0, 1.5),
        (4, 3, 2, 3.0, 1.5),
        (2, 2, 1, 0.0, 0.0),
    ] {
        let values: Vec<f32> = (0..side * side).map(|i| i as f32).collect();
        let image = || step.input(&values, &[1, side, side, 1]).unwrap();
        let max = MaxPool2dOptions::new(kernel).stride(stride);
        let avg = AvgPool2dOptions::new(kernel).stride(stride);
        is_usage(image().max_pool2d(max), "does not fit");
        let window = format!(
            "avg_pool2d: a window of {kernel} x {kernel} with stride {stride} x {stride}, padding 0 x 0 does not fit"
        );
        is_usage(image().avg_pool2d(avg), &window);
        let max = image().max_pool2d(max.ceil_mode()).unwrap();
        assert_eq!(max.to_vec(), [largest]);
        let avg = image().avg_pool2d(avg.ceil_mode()).unwrap();
        assert_eq!(avg.to_vec(), [mean]);
    }
}

#[test]
fn gradients_of_another_model_are_refused() {
    let mut scope = Scope::new(Seed(0));
    let net = Linear::new(scope.enter("fc"), 2, 1);
    let mut params = scope.build().unwrap();
    let mut foreign = Grads::like(&Scope::new(Seed(0)).build().unwrap());
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    let x = step.input(&[1.0, 2.0], &[1, 2]).unwrap();
    let loss = net
        .forward(x)
        .unwrap()
        .mse_loss(&[0.0], Reduction::Sum)
        .unwrap();
    is_usage(loss.backward(&mut foreign), "gave 0 elements for fc.bias");
    drop(step);
    let before = params.flat().to_vec();
    let (mut sgd, mut adam) = (Sgd::new(&params, 0.1), Adam::new(&params, 0.1));
    is_usage(sgd.step(&mut params, &foreign), "fc.weight has 0 elements");
    is_usage(adam.step(&mut params, &foreign), "fc.weight has 0 elements");
    assert_eq!(params.flat(), before);
}

#[test]
fn a_layer_without_inputs_gives_its_bias_which_is_zero() {
    let mut scope = Scope::new(Seed(0));
    let net = Linear::new(scope.enter("fc"), 0, 3);
    let params = scope.build().unwrap();
    let mut grads = Grads::like(&params);
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    let y = net.forward(step.input(&[], &[2, 0]).unwrap()).unwrap();
    assert_eq!(y.data(), [0.0; 6]);
    y.backward_with(&[1.0; 6], &mut grads).unwrap();
    assert_eq!(grads.export(net.bias.unwrap()), [2.0; 3]);
}

fn two_layers() -> (Linear, Linear, Params) {
    let mut scope = Scope::new(Seed(5));
    let a = Linear::new(scope.enter("a"), 3, 3);
    let b = Linear::new(scope.enter("b"), 3, 3);
    (a, b, scope.build().unwrap())
}

/// Only uses that the loss depends on count: `a` is ready after its one use
/// there, whether or not other branches used it before or after.
#[test]
fn uses_in_branches_that_the_loss_does_not_see_do_not_count() {
    let (a, b, params) = two_layers();
    let gradients = |branches: bool| {
        let mut tape = Tape::new(Threads(1));
        tape.poison(true);
        let mut sink = Recorder::like(&params);
        let step = tape.step(&params, StepKey::new(0, 0));
        let x = step.input(&[1.0, 2.0, 3.0], &[1, 3]).unwrap();
        let aside = |x: &Tensor<'_>| {
            if branches {
                let y = b.forward(x.share()).unwrap();
                a.forward(y.relu().unwrap()).unwrap();
            }
        };
        aside(&x);
        let y = a.forward(x).unwrap();
        aside(&y);
        let twice = y.share();
        y.add(twice)
            .unwrap()
            .mse_loss(&[1.0; 3], Reduction::Sum)
            .unwrap()
            .backward(&mut sink)
            .unwrap();
        assert_eq!(
            sink.names(&params),
            ["b.weight", "b.bias", "a.bias", "a.weight"]
        );
        sink.grads.flat().to_vec()
    };
    assert_eq!(gradients(true), gradients(false));
}

/// Panics at one parameter.
struct Panics(Grads, ParamId);

impl GradSink for Panics {
    fn slot(&mut self, param: ParamId) -> &mut [f32] {
        self.0.slot(param)
    }

    fn ready(&mut self, param: ParamId) -> phalanx_base::Result<()> {
        assert_ne!(param, self.1, "on purpose");
        Ok(())
    }
}

#[test]
fn a_tape_survives_a_sink_that_panics() {
    let (a, b, params) = two_layers();
    let mut tape = Tape::new(Threads(1));
    tape.poison(true);
    let loss = |tape: &mut Tape, sink: &mut dyn GradSink| {
        let step = tape.step(&params, StepKey::new(0, 0));
        let x = step.input(&[1.0, 2.0, 3.0], &[1, 3]).unwrap();
        let y = a.forward_act(x, Act::Relu).unwrap();
        let loss = b.forward(y).unwrap().mse_loss(&[1.0; 3], Reduction::Sum);
        loss.unwrap().backward(sink).unwrap();
    };
    let mut want = Grads::like(&params);
    loss(&mut tape, &mut want);
    let allocations = tape.allocations();
    for bad in params.ids() {
        let mut sink = Panics(Grads::like(&params), bad);
        catch_unwind(AssertUnwindSafe(|| loss(&mut tape, &mut sink))).unwrap_err();
        let mut got = Grads::like(&params);
        loss(&mut tape, &mut got);
        assert_eq!(got.flat(), want.flat());
    }
    assert_eq!(tape.allocations(), allocations);
}

/// One layer of each kind that has parameters.
struct Layers {
    linear: Linear,
    conv: Conv2d,
    up: ConvTranspose2d,
    norm: BatchNorm2d,
    bare_norm: BatchNorm2d,
    groups: GroupNorm,
    table: Embedding,
}

fn layers(value: f32) -> (Layers, Params) {
    let mut s = Scope::new(Seed(0));
    let layers = Layers {
        linear: Linear::new(s.enter("linear"), 4, 4),
        conv: Conv2d::new(s.enter("conv"), 4, 4, Conv2dOptions::new(1)),
        up: ConvTranspose2d::new(s.enter("up"), 4, 4, Conv2dOptions::new(1)),
        norm: BatchNorm2d::new(s.enter("norm"), 4),
        bare_norm: BatchNorm2d::without_affine(s.enter("bare_norm"), 4),
        groups: GroupNorm::new(s.enter("groups"), 2, 4),
        table: Embedding::new(s.enter("table"), 4, 4),
    };
    let mut params = s.build().unwrap();
    params.flat_mut().fill(value);
    (layers, params)
}

#[test]
fn a_layer_of_another_model_is_refused() {
    let ((a, a_params), (b, mut b_params)) = (layers(1.0), layers(2.0));
    type Run = for<'s> fn(&Layers, &'s Step<'_>, Tensor<'s>) -> Result<Tensor<'s>>;
    let runs: [(&str, Run); 7] = [
        ("linear.weight", |l, _, x| l.linear.forward(x)),
        ("conv.weight", |l, _, x| l.conv.forward(x)),
        ("up.weight", |l, _, x| l.up.forward(x)),
        ("norm.weight", |l, _, x| l.norm.forward(x)),
        ("bare_norm.running_mean", |l, _, x| l.bare_norm.forward(x)),
        ("groups.weight", |l, _, x| l.groups.forward(x)),
        ("table.weight", |l, step, _| {
            l.table.forward(step, &[0, 3], &[2])
        }),
    ];
    let clone = a_params.clone();
    let mut tape = Tape::new(Threads(1));
    for (name, run) in runs {
        let mut through = |layers: &Layers, params: &Params| {
            let step = tape.step(params, StepKey::new(0, 0));
            let x = step.input(&[1.0; 16], &[2, 2, 1, 4]).unwrap();
            let done = run(layers, &step, x).map(|y| y.to_vec());
            drop(step);
            // What a normalisation has noted.
            let mut own = params.clone();
            done.and_then(|y| tape.update_buffers(&mut own).map(|()| y))
        };
        let of_a = through(&a, &a_params).unwrap();
        assert_eq!(
            through(&a, &clone).unwrap(),
            of_a,
            "{name}: a clone is the same model"
        );
        let error = through(&a, &b_params).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        let text = error.to_string();
        assert!(
            text.contains("belongs to another model") && text.contains(name),
            "{text}"
        );
        through(&b, &b_params).unwrap();
    }
    // Nor do statistics go into another model's buffers.
    let step = tape.step(&a_params, StepKey::new(0, 0));
    a.norm
        .forward(step.input(&[1.0; 16], &[2, 2, 1, 4]).unwrap())
        .unwrap();
    drop(step);
    is_usage(tape.update_buffers(&mut b_params), "norm.running_mean");
}

#[test]
fn parameters_of_another_model_are_neither_drawn_again_nor_imported() {
    let (a, _) = layers(1.0);
    let mut scope = Scope::new(Seed(0));
    Linear::new(scope.enter("linear"), 4, 4);
    scope.redraw(a.linear.weight, Init::Constant(0.0));
    is_usage(scope.build(), "belongs to another model");
    let mut empty = Scope::new(Seed(0)).build().unwrap();
    is_usage(empty.import(a.linear.weight, &[]), "has no parameter 0");
}

#[test]
fn a_model_may_have_other_shapes() {
    let mut scope = Scope::new(Seed(2));
    let layer = Linear::new(scope.enter("l"), 3, 4);
    let kernel = &[4, 2, 3, 1];
    let kernel = scope.param(
        "kernel",
        kernel,
        Layout::Conv,
        Init::KaimingUniform { fan_in: 6 },
    );
    scope.buffer("mean", &[2], 1.0);
    let params = scope.build().unwrap();
    let same = params.map(|info, v| Ok((info.shape.clone(), v))).unwrap();
    assert_eq!(same.infos(), params.infos());
    assert_eq!(
        [same.flat(), same.buffers_flat()],
        [params.flat(), params.buffers_flat()]
    );

    // The second half of the outputs; nothing of the bias; twice the kernel.
    let half = params.map(|info, mut v| {
        let mut shape = info.shape.clone();
        match &*info.name {
            "l.bias" => (shape, v) = (vec![0], vec![]),
            "kernel" => {
                v.extend_from_within(..);
                shape[0] *= 2;
            }
            _ => {
                v.drain(..v.len() / 2);
                shape[0] /= 2;
            }
        }
        Ok((shape, v))
    });
    let mut half = half.unwrap();
    let (weight, bias) = (layer.weight, layer.bias.unwrap());
    assert_eq!(half.export(weight), params.export(weight)[6..]);
    assert_eq!(half.get(bias), [0.0; 0]);
    assert_eq!(half.export(kernel), params.export(kernel).repeat(2));
    let info = &half.infos()[kernel.index()];
    assert_eq!((info.offset, info.len, info.layout), (16, 48, Layout::Conv));
    assert_eq!(
        (&info.shape, info.engine_shape()),
        (&vec![8, 2, 3, 1], vec![3, 1, 2, 8])
    );
    assert_eq!(half.buffers_flat(), params.buffers_flat());

    // It trains, with ids of the model.
    let mut grads = Grads::like(&half);
    let mut tape = Tape::new(Threads(1));
    let mut adam = Adam::new(&half, 0.5);
    let mut sgd = Sgd::new(&half, 0.5).momentum(0.9);
    let before = half.export(weight);
    for i in 0..2 {
        let step = tape.step(&half, StepKey::new(0, i));
        let x = step.input(&[1.0, 2.0, 3.0], &[1, 3]).unwrap();
        let y = x.linear(weight, None, Act::None).unwrap();
        let none = step.parameter(bias).unwrap();
        let y = step
            .concat(vec![y.reshape(&[2]).unwrap(), none], 0)
            .unwrap();
        y.backward_with(&[1.0, 1.0], &mut grads).unwrap();
        drop(step);
        assert_eq!(grads.export(weight), [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]);
        if i == 0 {
            adam.step(&mut half, &grads).unwrap();
        } else {
            sgd.step(&mut half, &grads).unwrap();
        }
    }
    assert!(half.export(weight).iter().zip(&before).all(|(a, b)| a < b));
    assert!(grad_norm(&half, &grads, &ThreadPool::default()) > 5.0);

    let fails = |shape: Vec<usize>| params.map(|_, v| Ok((shape.clone(), v))).map(drop);
    is_usage(fails(vec![5]), "l.weight");
    is_usage(fails(vec![usize::MAX, 2]), "l.weight");
    let flat = params.map(|_, v| Ok((vec![v.len()], v)));
    is_usage(flat.map(drop), "kernel");
    let own = params.map(|_, _| Err(phalanx_nn::Error::usage("not this one")));
    is_usage(own.map(drop), "not this one");
}
