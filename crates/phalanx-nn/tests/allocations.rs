//! Whole steps, counted by the allocator itself: in steady state nobody asks it.

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../../phalanx-comm/tests/counting/mod.rs"]
mod counting;

use phalanx_nn::models::{CifarResNet, MnistCnn, MobileNetV2};
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Grads, Precision, Result, Scope, Seed, StepKey, Tape, Tensor, Threads};

use counting::requests;

/// Requests of each of some steps.
fn count(
    precision: Precision,
    image: [usize; 3],
    model: impl FnOnce(&mut Scope) -> Model,
) -> Vec<u64> {
    let mut scope = Scope::new(Seed(1));
    let model = model(&mut scope);
    let mut params = scope.build().unwrap();
    let mut grads = Grads::like(&params);
    let mut sgd = Sgd::new(&params, 0.01).momentum(0.9);
    let mut tape = Tape::new(Threads(1));
    tape.set_precision(precision);
    let [h, w, c] = image;
    let images = vec![0.25; 2 * h * w * c];
    (0..5)
        .map(|i| {
            let before = requests();
            let step = tape.step(&params, StepKey::new(0, i));
            let x = step.input(&images, &[2, h, w, c]).unwrap();
            let loss = model.loss(x, &[1, 2]).unwrap();
            loss.backward(&mut grads).unwrap();
            drop(step);
            tape.update_buffers(&mut params).unwrap();
            sgd.step(&mut params, &grads).unwrap();
            requests() - before
        })
        .collect()
}

enum Model {
    Mnist(MnistCnn),
    Resnet(CifarResNet),
    Mobilenet(MobileNetV2),
}

impl Model {
    fn loss<'s>(&self, x: Tensor<'s>, labels: &[u32]) -> Result<Tensor<'s>> {
        match self {
            Model::Mnist(m) => m.forward(x)?.nll_loss(labels, 2.0),
            Model::Resnet(m) => m.forward(x)?.cross_entropy(labels, 2.0),
            Model::Mobilenet(m) => m.forward(x)?.cross_entropy(labels, 2.0),
        }
    }
}

#[test]
fn steps_allocate_nothing_once_they_have_run() {
    for precision in [Precision::F32, Precision::Bf16] {
        for counts in [
            count(precision, [28, 28, 1], |s| Model::Mnist(MnistCnn::new(s))),
            count(precision, [16, 16, 3], |s| {
                Model::Resnet(CifarResNet::new(s, &[32, 64], 1, 10))
            }),
            count(precision, [32, 32, 3], |s| {
                Model::Mobilenet(MobileNetV2::new(s, 10))
            }),
            count(precision, [32, 32, 3], |s| {
                Model::Mobilenet(MobileNetV2::new(s, 10).recompute(true))
            }),
        ] {
            assert!(counts[0] > counts[4], "nothing was counted: {counts:?}");
            assert_eq!(counts[2..], [0; 3], "{precision:?}");
        }
    }
}
