//! Models of phalanx-nn on a device, against the CPU engine.

use burn::tensor::Device;
use phalanx_burn::{DeviceTensor, ErrorKind, OnDevice};
use phalanx_nn::layers::{
    Act, Activation, AvgPool2dOptions, BatchNorm, BatchNormOptions, Conv2dOptions, Gru, Linear,
    MaxPool2dOptions, MultiHeadAttention,
};
use phalanx_nn::models::{CifarResNet, Gpt, GptConfig, MnistCnn, MobileNetV2};
use phalanx_nn::optim::Sgd;
use phalanx_nn::{
    GradView, Grads, Init, Layout, ParamId, Params, Precision, Reduction, Result, Scope, Seed,
    Step, StepKey, Tape, Tensor, Threads, Value, ValueStep,
};

use super::numbers;

fn on_device() -> OnDevice {
    OnDevice::new(Device::flex())
}

fn close(what: &str, device: &[f32], cpu: &[f32], tolerance: f32) {
    assert_eq!(device.len(), cpu.len(), "{what}: number of values");
    for (i, (a, b)) in device.iter().zip(cpu).enumerate() {
        let fits = (a - b).abs() <= tolerance * (1.0 + b.abs()) || a == b;
        assert!(
            fits,
            "{what}: value {i} is {a} on the device, {b} on the CPU"
        );
    }
}

/// Parameters of these shapes: those that become the inputs of an operation, and its weights.
struct Case {
    params: Params,
    inputs: Vec<(ParamId, Vec<usize>)>,
    weights: Vec<ParamId>,
}

type Shapes<'a> = &'a [&'a [usize]];
type Weights<'a> = &'a [(&'a [usize], Layout)];

impl Case {
    fn new(inputs: Shapes, weights: Weights) -> Case {
        let mut scope = Scope::new(Seed(0));
        let zero = Init::Constant(0.0);
        let mut make = |name: &str, i: usize, shape: &[usize], layout| {
            scope.param(&format!("{name}{i}"), shape, layout, zero)
        };
        let input = |(i, shape): (usize, &&[usize])| {
            let (width, rows) = shape.split_last().expect("a dimension");
            let matrix = [rows.iter().product(), *width];
            (make("x", i, &matrix, Layout::Same), shape.to_vec())
        };
        let inputs: Vec<_> = inputs.iter().enumerate().map(input).collect();
        let weight =
            |(i, (shape, layout)): (usize, &(&[usize], Layout))| make("w", i, shape, *layout);
        let weights = weights.iter().enumerate().map(weight).collect();
        let mut params = scope.build().expect("parameters");
        for id in params.ids() {
            let values = numbers(params.get(id).len(), 3 * id.index() + 1);
            params.import(id, &values).expect("values");
        }
        Case {
            params,
            inputs,
            weights,
        }
    }

    /// The inputs, which get gradients.
    fn values<'s, S: ValueStep<'s, Tokens = [u32]>>(&self, step: S) -> Result<Vec<S::Value>> {
        let value = |(id, shape): &(ParamId, Vec<usize>)| {
            let rows = &shape[..shape.len() - 1];
            let all: Vec<u32> = (0..rows.iter().product::<usize>() as u32).collect();
            step.embedding(*id, &all, rows, None)
        };
        self.inputs.iter().map(value).collect()
    }
}

type OnCpu = for<'s> fn(&[Tensor<'s>], &[ParamId]) -> Result<Tensor<'s>>;
type ByBurn = for<'s> fn(&[DeviceTensor<'s>], &[ParamId]) -> Result<DeviceTensor<'s>>;

/// Results and gradients on the CPU and on a device, of an operation in training and in evaluation.
fn check(name: &str, inputs: Shapes, weights: Weights, cpu: OnCpu, burn: ByBurn) {
    let (case, device) = (Case::new(inputs, weights), on_device());
    let mut tape = Tape::new(Threads(1));
    let cpu = |step: &Step<'_>| -> Result<(Vec<usize>, Vec<f32>, Option<Grads>)> {
        let y = cpu(&case.values(step)?, &case.weights)?;
        finish(&case.params, step, y)
    };
    let burn = |step: &Step<'_>| -> Result<(Vec<usize>, Vec<f32>, Option<Grads>)> {
        let y = device.run(step, |step| burn(&case.values(step)?, &case.weights))?;
        finish(&case.params, step, y)
    };
    for training in [true, false] {
        let mut results = Vec::new();
        for engine in [&cpu as &dyn Fn(&Step<'_>) -> _, &burn] {
            let step = match training {
                true => tape.step(&case.params, StepKey::new(1, 2).seed(3)),
                false => tape.inference(&case.params),
            };
            results.push(engine(&step).unwrap_or_else(|e| panic!("{name}: {e}")));
        }
        let [on_cpu, on_device] = &results[..] else {
            unreachable!("two engines")
        };
        let what = format!("{name}, training: {training}");
        assert_eq!(on_device.0, on_cpu.0, "{what}: shape");
        close(&what, &on_device.1, &on_cpu.1, 1e-5);
        let (Some(a), Some(b)) = (&on_device.2, &on_cpu.2) else {
            continue;
        };
        for (id, info) in case.params.ids().zip(case.params.infos()) {
            let what = format!("{what}, gradient of {} {:?}", info.name, info.shape);
            close(&what, &a.export(id), &b.export(id), 2e-5);
        }
    }
}

fn finish(
    params: &Params,
    step: &Step<'_>,
    y: Tensor<'_>,
) -> Result<(Vec<usize>, Vec<f32>, Option<Grads>)> {
    let (shape, values) = (y.shape(), y.to_vec());
    let mut grads = Grads::like(params);
    if step.training() {
        y.backward_with(&numbers(values.len(), 50), &mut grads)?;
    }
    Ok((shape, values, step.training().then_some(grads)))
}

/// Both engines refuse it in the same way.
fn check_refused(name: &str, inputs: Shapes, weights: Weights, cpu: OnCpu, burn: ByBurn) {
    let (case, device) = (Case::new(inputs, weights), on_device());
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&case.params, StepKey::new(1, 2));
    let on_cpu = case.values(&step).and_then(|x| cpu(&x, &case.weights));
    let on_device = device.run(&step, |step| burn(&case.values(step)?, &case.weights));
    for (engine, result) in [("CPU", on_cpu), ("device", on_device)] {
        let error = result.expect_err(&format!("{name} on the {engine}"));
        assert_eq!(
            error.kind(),
            ErrorKind::Usage,
            "{name} on the {engine}: {error}"
        );
    }
}

macro_rules! cases {
    ($check:ident: $($name:ident $inputs:expr, $weights:expr, |$x:ident, $p:ident| $body:expr;)*) => {$({
        #[allow(unused_variables)]
        fn $name<'s, V: Value<'s>>($x: &[V], $p: &[ParamId]) -> Result<V> {
            $body
        }
        $check(stringify!($name), &$inputs, &$weights, |x, p| $name(x, p), |x, p| $name(x, p));
    })*};
}

const IMAGE: &[usize] = &[2, 5, 6, 4];
const SAME: Layout = Layout::Same;

/// Two largest values in a window of 2 x 2, the first one on the right.
fn with_equals<'s, V: Value<'s>>(x: V) -> Result<V> {
    let equals = x.constant(&[0.0, 1.0, 1.0, 0.0], &[1, 2, 2, 1])?;
    x.share().sub(x.detach()?)?.add(equals)
}

fn norm(p: &[ParamId]) -> BatchNormOptions {
    BatchNormOptions {
        weight: p.first().copied(),
        bias: p.get(1).copied(),
        running: None,
        momentum: None,
        eps: 1e-5,
    }
}

/// The first input.
fn x<'s, V: Value<'s>>(x: &[V]) -> V {
    x[0].share()
}

/// The second input.
fn y<'s, V: Value<'s>>(x: &[V]) -> V {
    x[1].share()
}

#[test]
fn arithmetic_and_shapes() {
    cases! { check:
        add [&[2, 3], &[2, 3]], [], |v, p| x(v).add(y(v));
        add_stretched [&[2, 1, 3], &[4, 1]], [], |v, p| x(v).add(y(v));
        sub [&[3], &[2, 3]], [], |v, p| x(v).sub(y(v));
        mul [&[2, 2, 1, 2, 2, 3], &[2, 1, 2, 2, 1, 1]], [], |v, p| x(v).mul(y(v));
        mul_itself [&[4]], [], |v, p| x(v).mul(x(v));
        div [&[2, 3], &[2, 1]], [], |v, p| x(v).div(y(v).add_scalar(3.0)?);
        scale [&[5]], [], |v, p| x(v).scale(-1.5);
        image_plus_channels [IMAGE, &[4]], [], |v, p| x(v).max_pool2d(2)?.add(y(v));
        image_times_pixels [&[2, 4, 4, 3], &[2, 2, 1]], [], |v, p| y(v).mul(x(v).max_pool2d(2)?);
        image_and_more [&[2, 4, 4, 3], &[2, 2, 2, 2, 3]], [], |v, p| x(v).max_pool2d(2)?.sub(y(v));
        image_and_image [IMAGE, IMAGE], [], |v, p| x(v).max_pool2d(2)?.add(y(v).max_pool2d(2)?);
        softmax [&[2, 3, 4]], [], |v, p| x(v).softmax(1);
        softmax_of_image [IMAGE], [], |v, p| x(v).max_pool2d(2)?.softmax(3);
        log_softmax [&[2, 3, 4]], [], |v, p| x(v).log_softmax_dim(0);
        log_softmax_last [&[7]], [], |v, p| x(v).log_softmax();
        matmul [&[2, 3, 4]], [(&[4, 5], SAME)], |v, p| x(v).matmul(p[0]);
        matmul_kept [&[2, 4]], [(&[5, 4], Layout::Transposed)], |v, p| x(v).matmul(p[0]);
        linear [&[3, 4]], [(&[5, 4], SAME), (&[5], SAME)], |v, p| x(v).linear(p[0], Some(p[1]), Act::Relu);
        linear_of_vector [&[4]], [(&[5, 4], SAME)], |v, p| x(v).linear(p[0], None, Act::Relu6);
        linear_kept [&[2, 4]], [(&[4, 5], Layout::Transposed), (&[5], SAME)], |v, p| x(v).linear(p[0], Some(p[1]), Act::None);
        linear_of_image [&[2, 4, 4, 3]], [(&[5, 3], SAME)], |v, p| x(v).max_pool2d(2)?.linear(p[0], None, Act::None);
        bmm [&[2, 3, 4], &[2, 4, 5]], [], |v, p| x(v).bmm(y(v));
        bmm_of_matrices [&[3, 4], &[4, 5]], [], |v, p| x(v).bmm(y(v));
        bmm_transposed [&[2, 2, 3, 4], &[2, 2, 5, 4]], [], |v, p| x(v).bmm_transposed(y(v));
        bmm_of_images [&[2, 4, 6, 3], &[2, 2, 3, 5]], [], |v, p| x(v).max_pool2d(2)?.permute(&[0, 1, 3, 2])?.bmm(y(v));
        reshape [&[2, 6]], [], |v, p| x(v).reshape(&[3, 1, 4]);
        reshape_of_image [IMAGE], [], |v, p| x(v).max_pool2d(2)?.reshape(&[4, 12]);
        flatten [&[2, 3, 5]], [], |v, p| x(v).flatten();
        flatten_of_image [IMAGE], [], |v, p| x(v).flatten();
        flatten_of_pooled [IMAGE], [], |v, p| x(v).max_pool2d(2)?.flatten();
        permute [&[2, 3, 4]], [], |v, p| x(v).permute(&[2, 0, 1]);
        permute_of_image [IMAGE], [], |v, p| x(v).max_pool2d(2)?.permute(&[3, 1, 0, 2])?.reshape(&[8, 6]);
        transpose [&[2, 3, 4]], [], |v, p| x(v).transpose(0, 2);
        sum [&[2, 3, 4]], [], |v, p| x(v).sum(&[1], false);
        sum_of_all [&[2, 3]], [], |v, p| x(v).sum(&[], false);
        sum_kept [&[2, 3, 4]], [], |v, p| x(v).sum(&[0, 2], true);
        mean [&[2, 3, 4]], [], |v, p| x(v).mean(&[2, 0], false);
        mean_of_image [IMAGE], [], |v, p| x(v).max_pool2d(2)?.mean(&[1, 3], false);
        mean_of_image_kept [IMAGE], [], |v, p| x(v).max_pool2d(2)?.mean(&[0], true);
        max [&[2, 3, 4]], [], |v, p| x(v).max(&[1], false);
        max_of_equals [&[1, 2, 2, 1]], [], |v, p| with_equals(x(v))?.max(&[1, 2], true);
        max_of_negative [&[2, 3]], [], |v, p| x(v).add_scalar(-5.0)?.max(&[], false);
        slice [&[2, 5, 3]], [], |v, p| x(v).slice(1, 1..4);
        slice_of_image [IMAGE], [], |v, p| x(v).max_pool2d(2)?.slice(3, 1..3);
        concat [&[2, 3], &[2, 4]], [], |v, p| V::concat(vec![x(v), y(v), x(v)], 1);
        concat_of_images [IMAGE, &[2, 2, 3, 4]], [], |v, p| V::concat(vec![x(v).max_pool2d(2)?, y(v)], 3);
        concat_of_values [&[2, 2, 3, 4], IMAGE], [], |v, p| V::concat(vec![x(v), y(v).max_pool2d(2)?], 0);
        stack [&[2, 3], &[2, 3]], [], |v, p| V::stack(vec![x(v), y(v)], 2);
        split [&[2, 5]], [], |v, p| V::concat(x(v).split(&[2, 3], 1)?.into_iter().rev().collect(), 1);
        cumsum [&[2, 5, 3]], [], |v, p| x(v).cumsum(1);
        rotary [&[2, 3, 8]], [], |v, p| x(v).rotary(2, 10_000.0, 3);
        rotary_of_heads [&[2, 2, 3, 4]], [], |v, p| x(v).rotary(1, 100.0, 0);
        detach [&[2, 3]], [], |v, p| x(v).detach()?.mul(x(v));
        constant [&[2, 3]], [], |v, p| x(v).add(x(v).constant(&[1.0, 2.0, 3.0], &[3])?);
        recompute [&[2, 3]], [], |v, p| x(v).recompute(|x| x.gelu()?.tanh());
        norm [&[2, 3]], [], |v, p| x(v).norm(1, false);
        cosine [&[2, 3], &[1, 3]], [], |v, p| x(v).cosine_similarity(y(v), 1);
        attention [&[2, 3, 4], &[2, 5, 4]], [], |v, p| x(v).attention(y(v), y(v), 2, false, None);
        causal [&[2, 3, 4]], [], |v, p| x(v).attention(x(v), x(v), 2, true, Some(0.4));
    }
}

#[test]
fn activations() {
    /// With both ends of the pieces of hard functions, and large numbers.
    const EDGES: [f32; 8] = [0.0, 3.0, -3.0, 6.0, 12.0, -12.0, 0.5, -0.5];
    macro_rules! all {
        ($($name:ident $shift:literal $function:expr;)*) => { cases! { check: $(
            $name [&[3, 8]], [], |v, p| {
                let spread = x(v).scale(4.0)?.add_scalar($shift)?;
                // Those of the first row are exactly at the edges.
                let edges = spread.constant(&EDGES, &[1, 8])?;
                let first = spread.share().slice(0, 0..1)?;
                let first = first.share().sub(first.detach()?)?.add(edges.abs()?)?;
                let all = V::concat(vec![first, spread], 0)?;
                match $shift > 0.0 {
                    true => all.abs()?.add_scalar(0.25)?.activation($function),
                    false => all.activation($function),
                }
            };
        )*}};
    }
    all! {
        relu 0.0 Activation::Relu;
        relu6 0.0 Activation::Relu6;
        leaky_relu 0.0 Activation::LeakyRelu(0.1);
        gelu 0.0 Activation::Gelu;
        gelu_tanh 0.0 Activation::GeluTanh;
        silu 0.0 Activation::Silu;
        hardswish 0.0 Activation::Hardswish;
        hardsigmoid 0.0 Activation::Hardsigmoid;
        sigmoid 0.0 Activation::Sigmoid;
        tanh 0.0 Activation::Tanh;
        exp 0.0 Activation::Exp;
        log 5.0 Activation::Log;
        sqrt 5.0 Activation::Sqrt;
        abs 0.0 Activation::Abs;
        square 0.0 Activation::Pow(2.0);
        cube 0.0 Activation::Pow(3.0);
        power_0 0.0 Activation::Pow(0.0);
        power 5.0 Activation::Pow(1.7);
        inverse 5.0 Activation::Pow(-1.0);
        clamp 0.0 Activation::Clamp(-3.0, 3.0);
    }
}

#[test]
fn layers() {
    cases! { check:
        dropout [&[4, 5]], [], |v, p| x(v).dropout(0.3);
        dropout_twice [&[4, 5]], [], |v, p| x(v).dropout(0.5)?.dropout(0.5);
        dropout2d [IMAGE], [], |v, p| x(v).max_pool2d(2)?.dropout2d(0.5);
        dropout_evaluated [&[4, 5]], [], |v, p| x(v).evaluate(|x| x.dropout(0.5))?.dropout(0.5);
        layer_norm [&[2, 3, 4]], [(&[4], SAME), (&[4], SAME)], |v, p| x(v).layer_norm(&[4], (Some(p[0]), Some(p[1])), 1e-5);
        layer_norm_of_two [&[2, 3, 4]], [(&[3, 4], SAME)], |v, p| x(v).layer_norm(&[3, 4], (Some(p[0]), None), 1e-3);
        rms_norm [&[2, 3, 4]], [(&[4], SAME)], |v, p| x(v).rms_norm(Some(p[0]), 1e-5);
        rms_norm_plain [&[3]], [], |v, p| x(v).rms_norm(None, 1e-2);
        group_norm [IMAGE], [(&[4], SAME), (&[4], SAME)], |v, p| x(v).group_norm(2, (Some(p[0]), Some(p[1])), 1e-5);
        group_norm_of_rows [&[2, 5, 6]], [(&[6], SAME)], |v, p| x(v).group_norm(3, (Some(p[0]), None), 1e-5);
        group_norm_of_matrix [&[2, 6]], [], |v, p| x(v).group_norm(2, (None, None), 1e-5);
        batch_norm [IMAGE], [(&[4], SAME), (&[4], SAME)], |v, p| x(v).batch_norm(&norm(p), None, Act::None);
        batch_norm_of_rows [&[7, 3]], [(&[3], SAME), (&[3], SAME)], |v, p| x(v).batch_norm(&norm(p), None, Act::Relu);
        batch_norm_of_sequences [&[2, 5, 3]], [], |v, p| x(v).batch_norm(&norm(p), None, Act::None);
        batch_norm_plus [IMAGE, IMAGE], [(&[4], SAME), (&[4], SAME)], |v, p| x(v).batch_norm(&norm(p), Some(y(v)), Act::Relu);
        conv1d [&[2, 7, 4]], [(&[6, 4, 3], Layout::Conv1d), (&[6], SAME)], |v, p| x(v).conv1d(p[0], Some(p[1]), Conv2dOptions::rect(1, 3).stride(2).padding(1), Act::None);
        conv2d [IMAGE], [(&[3, 4, 3, 3], Layout::Conv), (&[3], SAME)], |v, p| x(v).conv2d(p[0], Some(p[1]), Conv2dOptions::new(3), Act::Relu);
        conv2d_padded [IMAGE], [(&[3, 4, 3, 2], Layout::Conv)], |v, p| x(v).conv2d(p[0], None, Conv2dOptions::rect(3, 2).padding_rect(1, 0).stride_rect(2, 1), Act::None);
        conv2d_grouped [IMAGE], [(&[6, 2, 3, 3], Layout::Conv), (&[6], SAME)], |v, p| x(v).conv2d(p[0], Some(p[1]), Conv2dOptions::new(3).padding(1).groups(2), Act::Relu6);
        conv2d_depthwise [IMAGE], [(&[4, 1, 3, 3], Layout::Conv)], |v, p| x(v).conv2d(p[0], None, Conv2dOptions::new(3).padding(1).stride(2).groups(4), Act::None);
        conv2d_dilated [IMAGE], [(&[3, 4, 2, 2], Layout::Conv)], |v, p| x(v).conv2d(p[0], None, Conv2dOptions::new(2).dilation_rect(2, 3), Act::None);
        conv2d_of_points [IMAGE], [(&[5, 4, 1, 1], Layout::Conv)], |v, p| x(v).conv2d(p[0], None, Conv2dOptions::new(1).stride(2), Act::None);
        conv2d_twice [IMAGE], [(&[4, 4, 3, 3], Layout::Conv)], |v, p| {
            let o = Conv2dOptions::new(3).padding(1);
            x(v).conv2d(p[0], None, o, Act::Relu)?.conv2d(p[0], None, o, Act::None)
        };
        conv_transpose2d [IMAGE], [(&[4, 3, 3, 3], Layout::Conv), (&[3], SAME)], |v, p| x(v).conv_transpose2d(p[0], Some(p[1]), Conv2dOptions::new(3).stride(2).padding(1), [1, 0]);
        conv_transpose2d_grouped [IMAGE], [(&[4, 3, 2, 3], Layout::Conv), (&[6], SAME)], |v, p| x(v).conv_transpose2d(p[0], Some(p[1]), Conv2dOptions::rect(2, 3).groups(2).dilation_rect(2, 1), [0, 0]);
        max_pool2d [IMAGE], [], |v, p| x(v).max_pool2d(MaxPool2dOptions::new(3).stride(2).padding(1));
        max_pool2d_ceil [IMAGE], [], |v, p| x(v).max_pool2d(MaxPool2dOptions::new(2).ceil_mode());
        max_pool2d_dilated [IMAGE], [], |v, p| x(v).max_pool2d(MaxPool2dOptions::new(2).stride(1).dilation(2));
        avg_pool2d [IMAGE], [], |v, p| x(v).avg_pool2d(2);
        avg_pool2d_padded [IMAGE], [], |v, p| x(v).avg_pool2d(AvgPool2dOptions::new(3).stride(2).padding(1));
        avg_pool2d_inside [IMAGE], [], |v, p| x(v).avg_pool2d(AvgPool2dOptions::new(3).stride(2).padding(1).exclude_padding());
        avg_pool2d_ceil [IMAGE], [], |v, p| x(v).avg_pool2d(AvgPool2dOptions::new(3).stride(2).padding(1).ceil_mode());
        adaptive_avg_pool2d [IMAGE], [], |v, p| x(v).adaptive_avg_pool2d(3, 4);
        adaptive_avg_pool2d_up [&[1, 2, 3, 2]], [], |v, p| x(v).adaptive_avg_pool2d(3, 2);
        adaptive_max_pool2d [IMAGE], [], |v, p| x(v).adaptive_max_pool2d(3, 4);
        max_pool2d_of_equals [&[1, 2, 2, 1]], [], |v, p| with_equals(x(v))?.max_pool2d(2);
        adaptive_max_pool2d_of_equals [&[1, 2, 2, 1]], [], |v, p| with_equals(x(v))?.adaptive_max_pool2d(1, 1);
        global_avg_pool [IMAGE], [], |v, p| x(v).global_avg_pool();
    }
}

#[test]
fn wrong_sizes_are_usage_errors() {
    cases! { check_refused:
        add [&[2, 3], &[2, 4]], [], |v, p| x(v).add(y(v));
        softmax [&[2, 3]], [], |v, p| x(v).softmax(2);
        log_softmax [&[2, 3]], [], |v, p| x(v).log_softmax_dim(2);
        cumsum [&[2, 3]], [], |v, p| x(v).cumsum(2);
        linear [&[2, 3]], [(&[5, 4], SAME)], |v, p| x(v).linear(p[0], None, Act::None);
        linear_bias [&[2, 4]], [(&[5, 4], SAME), (&[4], SAME)], |v, p| x(v).linear(p[0], Some(p[1]), Act::None);
        linear_no_matrix [&[2, 4]], [(&[4], SAME)], |v, p| x(v).linear(p[0], None, Act::None);
        bmm [&[2, 3, 4], &[2, 3, 4]], [], |v, p| x(v).bmm(y(v));
        bmm_ranks [&[2, 3, 4], &[4, 4]], [], |v, p| x(v).bmm(y(v));
        bmm_vector [&[4], &[4]], [], |v, p| x(v).bmm(y(v));
        reshape [&[2, 3]], [], |v, p| x(v).reshape(&[4]);
        reshape_many [&[2, 3]], [], |v, p| x(v).reshape(&[1, 1, 1, 1, 1, 2, 3]);
        reshape_huge [&[2, 3]], [], |v, p| x(v).reshape(&[usize::MAX, 3]);
        permute [&[2, 3]], [], |v, p| x(v).permute(&[0, 0]);
        sum [&[2, 3]], [], |v, p| x(v).sum(&[2], false);
        sum_twice [&[2, 3]], [], |v, p| x(v).sum(&[1, 1], false);
        slice [&[2, 3]], [], |v, p| x(v).slice(1, 2..4);
        slice_back [&[2, 3]], [], |v, p| x(v).slice(2, 0..1);
        concat [&[2, 3], &[3, 3]], [], |v, p| V::concat(vec![x(v), y(v)], 1);
        concat_of_none [&[2, 3]], [], |v, p| V::concat(Vec::new(), 1);
        constant [&[2, 3]], [], |v, p| x(v).constant(&[1.0], &[2]);
        rotary [&[2, 6]], [], |v, p| x(v).rotary(2, 10.0, 0);
        rotary_base [&[2, 4]], [], |v, p| x(v).rotary(2, 0.0, 0);
        dropout [&[2, 3]], [], |v, p| x(v).dropout(1.5);
        dropout2d [&[2, 3]], [], |v, p| x(v).dropout2d(0.5);
        layer_norm [&[2, 3]], [], |v, p| x(v).layer_norm(&[2], (None, None), 1e-5);
        layer_norm_weight [&[2, 3]], [(&[2], SAME)], |v, p| x(v).layer_norm(&[3], (Some(p[0]), None), 1e-5);
        rms_norm [&[2, 3]], [(&[2], SAME)], |v, p| x(v).rms_norm(Some(p[0]), 1e-5);
        group_norm [IMAGE], [], |v, p| x(v).group_norm(3, (None, None), 1e-5);
        group_norm_vector [&[4]], [], |v, p| x(v).group_norm(1, (None, None), 1e-5);
        batch_norm_single [&[1, 3]], [], |v, p| x(v).batch_norm(&norm(p), None, Act::None);
        batch_norm_weight [IMAGE], [(&[3], SAME)], |v, p| x(v).batch_norm(&norm(p), None, Act::None);
        batch_norm_residual [IMAGE, &[4]], [], |v, p| x(v).batch_norm(&norm(p), Some(y(v)), Act::None);
        conv1d [&[2, 4]], [(&[3, 4, 3], Layout::Conv1d)], |v, p| x(v).conv1d(p[0], None, Conv2dOptions::rect(1, 3), Act::None);
        conv2d_inputs [IMAGE], [(&[3, 3, 3, 3], Layout::Conv)], |v, p| x(v).conv2d(p[0], None, Conv2dOptions::new(3), Act::None);
        conv2d_kernel [IMAGE], [(&[3, 4, 3, 3], Layout::Conv)], |v, p| x(v).conv2d(p[0], None, Conv2dOptions::new(2), Act::None);
        conv2d_large [IMAGE], [(&[3, 4, 7, 7], Layout::Conv)], |v, p| x(v).conv2d(p[0], None, Conv2dOptions::new(7), Act::None);
        conv2d_groups [IMAGE], [(&[3, 2, 3, 3], Layout::Conv)], |v, p| x(v).conv2d(p[0], None, Conv2dOptions::new(3).groups(2), Act::None);
        conv2d_no_groups [IMAGE], [(&[3, 4, 3, 3], Layout::Conv)], |v, p| x(v).conv2d(p[0], None, Conv2dOptions::new(3).groups(0), Act::None);
        conv2d_stride [IMAGE], [(&[3, 4, 3, 3], Layout::Conv)], |v, p| x(v).conv2d(p[0], None, Conv2dOptions::new(3).stride(0), Act::None);
        conv2d_dilation [IMAGE], [(&[3, 4, 3, 3], Layout::Conv)], |v, p| x(v).conv2d(p[0], None, Conv2dOptions::new(3).dilation_rect(0, 1), Act::None);
        conv2d_layout [IMAGE], [(&[3, 4, 3, 3], SAME)], |v, p| x(v).conv2d(p[0], None, Conv2dOptions::new(3), Act::None);
        conv2d_bias [IMAGE], [(&[3, 4, 3, 3], Layout::Conv), (&[4], SAME)], |v, p| x(v).conv2d(p[0], Some(p[1]), Conv2dOptions::new(3), Act::None);
        conv2d_matrix [&[2, 4]], [(&[3, 4, 3, 3], Layout::Conv)], |v, p| x(v).conv2d(p[0], None, Conv2dOptions::new(3), Act::None);
        conv_transpose2d [IMAGE], [(&[3, 4, 3, 3], Layout::Conv)], |v, p| x(v).conv_transpose2d(p[0], None, Conv2dOptions::new(3), [0, 0]);
        conv_transpose2d_extra [IMAGE], [(&[4, 4, 3, 3], Layout::Conv)], |v, p| x(v).conv_transpose2d(p[0], None, Conv2dOptions::new(3), [1, 0]);
        conv_transpose2d_stride [IMAGE], [(&[4, 4, 3, 3], Layout::Conv)], |v, p| x(v).conv_transpose2d(p[0], None, Conv2dOptions::new(3).stride(0), [0, 0]);
        max_pool2d [IMAGE], [], |v, p| x(v).max_pool2d(6);
        max_pool2d_stride [IMAGE], [], |v, p| x(v).max_pool2d(MaxPool2dOptions::new(2).stride(0));
        max_pool2d_padding [IMAGE], [], |v, p| x(v).max_pool2d(MaxPool2dOptions::new(2).padding(2));
        avg_pool2d [IMAGE], [], |v, p| x(v).avg_pool2d(0);
        avg_pool2d_matrix [&[2, 4]], [], |v, p| x(v).avg_pool2d(1);
        adaptive_avg_pool2d [IMAGE], [], |v, p| x(v).adaptive_avg_pool2d(0, 1);
        adaptive_max_pool2d [IMAGE], [], |v, p| x(v).adaptive_max_pool2d(1, 0);
        global_avg_pool [&[2, 4]], [], |v, p| x(v).global_avg_pool();
    }
    // A parameter of another model.
    let other = Case::new(&[], &[(&[4, 4], SAME)]).weights[0];
    let (case, device) = (Case::new(&[&[2, 4]], &[]), on_device());
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&case.params, StepKey::new(0, 0));
    let made = device.run(&step, |step| case.values(step)?.remove(0).matmul(other));
    let error = made.expect_err("another model");
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    assert!(error.to_string().contains("another model"), "{error}");
}

/// Three steps and the scores of an evaluation after them.
struct Trained {
    /// Of the first step.
    gradients: Grads,
    losses: Vec<f32>,
    params: Params,
    scores: Vec<f32>,
}

fn train(
    params: &Params,
    (labels, lr): (&[u32], f64),
    forward: impl for<'s> Fn(&'s Step<'_>, usize) -> Result<Tensor<'s>>,
) -> Trained {
    let mut params = params.clone();
    let mut tape = Tape::new(Threads(2));
    let (mut grads, mut sgd) = (Grads::like(&params), Sgd::new(&params, lr));
    let (mut losses, mut first) = (Vec::new(), None);
    for i in 0..3 {
        let step = tape.step(&params, StepKey::new(0, i).seed(5));
        let scores = forward(&step, i as usize).expect("scores");
        let loss = scores.cross_entropy(labels, Reduction::Mean).expect("loss");
        losses.push(loss.item().expect("one value"));
        loss.backward(&mut grads).expect("gradients");
        first.get_or_insert_with(|| grads.clone());
        drop(step);
        tape.update_buffers(&mut params).expect("statistics");
        sgd.step(&mut params, &grads).expect("a step");
    }
    let step = tape.inference(&params);
    let scores = forward(&step, 9).expect("scores").to_vec();
    drop(step);
    Trained {
        gradients: first.unwrap_or(grads),
        losses,
        params,
        scores,
    }
}

/// `gradients` is the tolerance of each gradient's norm.
fn compare(name: &str, device: &Trained, cpu: &Trained, gradients: f32) {
    let norm = |of: &[f32]| of.iter().map(|v| v * v).sum::<f32>().sqrt();
    let total = norm(cpu.gradients.flat());
    for (id, info) in cpu.params.ids().zip(cpu.params.infos()) {
        let (a, b) = (device.gradients.export(id), cpu.gradients.export(id));
        let difference: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a - b).collect();
        let (difference, own) = (norm(&difference), norm(&b));
        let fits = difference <= gradients * (own + 1e-3 * total);
        let what = format!("{name}: the gradient of {}", info.name);
        assert!(fits, "{what} differs by {difference} of {own}");
    }
    let running = (device.params.buffers_flat(), cpu.params.buffers_flat());
    let all = [
        ("losses", &*device.losses, &*cpu.losses, 1e-4),
        ("running statistics", running.0, running.1, 1e-4),
        ("scores", &device.scores, &cpu.scores, 1e-3),
    ];
    for (what, device, cpu, tolerance) in all {
        close(&format!("{name}: {what}"), device, cpu, tolerance);
    }
    assert_ne!(cpu.losses[0], cpu.losses[2], "{name} learns");
}

macro_rules! models {
    ($($name:literal, $model:expr, $shape:expr, $labels:expr, $lr:expr, $gradients:expr;)*) => {$({
        let mut scope = Scope::new(Seed(7));
        let model = $model(&mut scope);
        let (params, device, shape) = (scope.build().expect("parameters"), on_device(), $shape);
        let batch = |i: usize| numbers(shape.iter().product(), 20 + i);
        let cpu = train(&params, (&$labels, $lr), |step, i| {
            model.forward(step.input(&batch(i), &shape)?)
        });
        let burn = train(&params, (&$labels, $lr), |step, i| {
            device.run(step, |step| model.forward(step.input(&batch(i), &shape)?))
        });
        compare($name, &burn, &cpu, $gradients);
    })*};
}

#[test]
fn models_train_as_on_the_cpu() {
    // The gradients of MobileNetV2's first layers differ by 3 % on the CPU too if its input differs by a rounding error.
    models! {
        "CifarResNet", |s: &mut Scope| CifarResNet::new(s, &[8, 16], 1, 4), [4, 8, 8, 3], [0, 1, 2, 3], 0.05, 1e-5;
        "MnistCnn", |s: &mut Scope| MnistCnn::with_dropout(s, 0.25, 0.5), [2, 28, 28, 1], [1, 7], 0.05, 1e-5;
        "MobileNetV2", |s: &mut Scope| MobileNetV2::new(s, 5), [4, 64, 64, 3], [4, 2, 0, 1], 1e-7, 0.1;
    }
}

#[test]
fn models_of_tokens_train_as_on_the_cpu() {
    let config = GptConfig {
        vocab: 11,
        context: 6,
        layers: 2,
        heads: 2,
        width: 8,
        dropout: 0.2,
    };
    let tokens = |i: usize| -> Vec<u32> { (0..10).map(|t| (t * 7 + i as u32) % 11).collect() };
    let labels: Vec<u32> = (0..10).map(|t| (t * 3 + 1) % 11).collect();
    for make in [Gpt::new, Gpt::gpt2] {
        let mut scope = Scope::new(Seed(7));
        let model = make(&mut scope, &config);
        let (params, device) = (scope.build().expect("parameters"), on_device());
        let cpu = train(&params, (&labels, 0.05), |step, i| {
            model.forward(step, &tokens(i), (2, 5))
        });
        let burn = train(&params, (&labels, 0.05), |step, i| {
            device.run(step, |step| model.forward(step, &tokens(i), (2, 5)))
        });
        compare("Gpt", &burn, &cpu, 1e-5);
    }
}

#[test]
fn recurrent_and_attention_layers_train_as_on_the_cpu() {
    struct Model(Gru, MultiHeadAttention, Linear);
    impl Model {
        fn new(scope: &mut Scope) -> Model {
            let gru = Gru::new(scope.enter("gru"), 3, 8);
            let attention = MultiHeadAttention::new(scope.enter("attention"), 8, 2);
            Model(
                gru,
                attention.rotary(100.0).dropout(0.3),
                Linear::new(scope.enter("fc"), 8, 4),
            )
        }

        fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
            let (x, _) = self.0.forward(x, None)?;
            self.2.forward(self.1.forward(x, true)?)
        }
    }
    models! {
        "Gru", Model::new, [2, 4, 3], [0, 1, 2, 3, 3, 2, 1, 0], 0.05, 1e-5;
    }
}

#[test]
fn padding_tokens_get_no_gradient() {
    let case = Case::new(&[], &[(&[3, 2], SAME)]);
    let (device, mut tape, mut grads) = (
        on_device(),
        Tape::new(Threads(1)),
        Grads::like(&case.params),
    );
    let step = tape.step(&case.params, StepKey::new(0, 0));
    let (table, tokens) = (case.weights[0], [1, 2, 1, 0]);
    let y = device.run(&step, |step| step.embedding(table, &tokens, &[4], Some(1)));
    let y = y.expect("rows");
    assert_eq!(&y.to_vec()[4..6], &case.params.export(table)[2..4]);
    let dy = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
    y.backward_with(&dy, &mut grads).expect("gradients");
    assert_eq!(grads.export(table), [7.0, 8.0, 0.0, 0.0, 3.0, 4.0]);
    for wrong in [vec![3], vec![0, 1]] {
        let error = device.run(&step, |step| step.embedding(table, &wrong, &[1], None));
        assert_eq!(error.expect_err("no such row").kind(), ErrorKind::Usage);
    }
}

#[test]
fn micro_batches_add_up_and_frozen_parameters_stay() {
    let mut scope = Scope::new(Seed(3));
    let layers = [
        Linear::new(scope.enter("a"), 3, 4),
        Linear::new(scope.enter("b"), 4, 2),
        Linear::new(scope.enter("spare"), 1, 1),
    ];
    let norm = BatchNorm::new(scope.enter("norm"), 4);
    let mut params = scope.build().expect("parameters");
    params.freeze(params.find("b.weight").expect("the weight"));
    fn forward<'s, V: Value<'s>>(layers: &[Linear], norm: &BatchNorm, x: V) -> Result<V> {
        layers[1].forward(norm.forward(layers[0].forward(x)?)?)
    }
    let device = on_device();
    let gradients = |burn: bool| {
        let (mut tape, mut grads) = (Tape::new(Threads(1)), Grads::like(&params));
        grads.zero();
        grads.set_accumulate(true);
        for i in 0..2 {
            let step = tape.step(&params, StepKey::new(0, i));
            let x = numbers(15, i as usize);
            let y = match burn {
                true => device.run(&step, |step| {
                    forward(&layers, &norm, step.input(&x, &[5, 3])?)
                }),
                false => forward(&layers, &norm, step.input(&x, &[5, 3]).expect("an input")),
            };
            let y = y.expect("scores");
            y.backward_with(&numbers(10, 4), &mut grads)
                .expect("gradients");
            drop(step);
            tape.update_buffers(&mut params.clone())
                .expect("statistics");
        }
        grads
    };
    let (burn, cpu) = (gradients(true), gradients(false));
    for (id, info) in params.ids().zip(params.infos()) {
        close(&info.name, &burn.export(id), &cpu.export(id), 1e-5);
        assert_eq!(burn.untouched(id), cpu.untouched(id), "{}", info.name);
    }
    assert!(burn.untouched(params.find("b.weight").expect("the weight")));
    assert!(burn.untouched(params.find("spare.bias").expect("the bias")));
    assert!(!burn.untouched(params.find("a.weight").expect("the weight")));
}

#[test]
fn unchanged_parameters_are_uploaded_once() {
    let mut scope = Scope::new(Seed(3));
    let model = CifarResNet::new(&mut scope, &[4], 1, 2);
    let mut params = scope.build().expect("parameters");
    let (device, mut tape) = (on_device(), Tape::new(Threads(1)));
    let mut evaluate = |params: &Params| {
        let step = tape.inference(params);
        let x = numbers(2 * 48, 1);
        let y = device.run(&step, |step| model.forward(step.input(&x, &[2, 4, 4, 3])?));
        let y = y.expect("scores").to_vec();
        (y, device.uploads())
    };
    let first = evaluate(&params);
    assert!(first.1 > 0);
    assert_eq!(evaluate(&params), first);
    assert_eq!(evaluate(&params.clone()), first, "a copy has equal values");
    let bias = params.find("dense_layer.bias").expect("the bias");
    params.get_mut(bias)[0] += 1.0;
    let second = evaluate(&params);
    assert_eq!(second.0[0], first.0[0] + 1.0);
    assert_eq!(second.1 - first.1, params.len() as u64);
    params.buffers_flat_mut();
    let third = evaluate(&params);
    let norms = params.buffer_infos().len() as u64 / 3;
    assert_eq!(third.1 - second.1, 2 * norms);
}

#[test]
fn bf16_is_refused() {
    let case = Case::new(&[&[2, 4]], &[]);
    let (device, mut tape) = (on_device(), Tape::new(Threads(1)));
    tape.set_precision(Precision::Bf16);
    let step = tape.step(&case.params, StepKey::new(0, 0));
    let made = device.run(&step, |step| case.values(step)?.remove(0).relu());
    assert_eq!(made.expect_err("bf16").kind(), ErrorKind::Usage);
}

#[test]
fn code_that_uses_burn_itself_gets_gradients() {
    let case = Case::new(&[], &[(&[3, 2], SAME)]);
    let (device, mut tape, mut grads) = (
        on_device(),
        Tape::new(Threads(1)),
        Grads::like(&case.params),
    );
    let step = tape.step(&case.params, StepKey::new(0, 0));
    let y = device.run(&step, |step| {
        let x = step.input(&[1.0, 2.0, 3.0], &[1, 3])?.into_burn::<2>()?;
        let zero = step.tensor(x.clone().inner().sum().mul_scalar(0.0))?;
        let y = step.tensor(x.matmul(step.parameter::<2>(case.weights[0])?))?;
        zero.add(y)
    });
    let y = y.expect("a product");
    assert_eq!(y.shape(), [1, 2]);
    y.backward_with(&[1.0, 10.0], &mut grads)
        .expect("gradients");
    assert_eq!(
        grads.export(case.weights[0]),
        [1.0, 10.0, 2.0, 20.0, 3.0, 30.0]
    );
}
