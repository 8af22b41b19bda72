//! Residual networks: ten steps against PyTorch (`fixtures/make_resnet.py`),
//! names and sizes, bits, running statistics.

use crate::common::hashed;
use phalanx_nn::models::{CifarResNet, ResNet};
use phalanx_nn::optim::Sgd;
use phalanx_nn::{ErrorKind, GradView, Grads, Params, Scope, Seed, StepKey, Tape, Threads};
use serde_json::Value;

fn numbers(v: &Value) -> Vec<f64> {
    let all = v.as_array().unwrap().iter();
    all.map(|n| n.as_f64().unwrap()).collect()
}

fn l2(values: &[f32]) -> f64 {
    let squares = values.iter().map(|&v| f64::from(v) * f64::from(v));
    squares.sum::<f64>().sqrt()
}

struct Net {
    model: CifarResNet,
    params: Params,
    grads: Grads,
    sgd: Sgd,
    tape: Tape,
    shape: [usize; 4],
}

impl Net {
    fn new(widths: &[usize], batch: usize, size: usize, lr: f64, threads: usize) -> Self {
        let mut scope = Scope::new(Seed(7));
        let model = CifarResNet::new(&mut scope, widths, 2, 10);
        let params = scope.build().unwrap();
        Net {
            model,
            grads: Grads::like(&params),
            sgd: Sgd::new(&params, lr).momentum(0.9).weight_decay(5e-4),
            params,
            tape: Tape::new(Threads(threads)),
            shape: [batch, size, size, 3],
        }
    }

    fn images(&self, stream: u64) -> Vec<f32> {
        hashed(self.shape.iter().product(), stream, 8, 1.0)
    }

    fn step(&mut self, i: u64) -> f32 {
        let labels: Vec<u32> = (0..self.shape[0] as u32).map(|i| i % 10).collect();
        let images = self.images(200 + i % 3);
        let step = self.tape.step(&self.params, StepKey::new(0, i));
        let x = step.input(&images, &self.shape).unwrap();
        let loss = self.model.forward(x).unwrap();
        let loss = loss.cross_entropy(&labels, labels.len() as f32).unwrap();
        let value = loss.item().unwrap();
        loss.backward(&mut self.grads).unwrap();
        drop(step);
        self.tape.update_buffers(&mut self.params).unwrap();
        self.sgd.step(&mut self.params, &self.grads).unwrap();
        value
    }

    fn logits(&mut self) -> Vec<f32> {
        let images = self.images(200);
        let step = self.tape.inference(&self.params);
        let x = step.input(&images, &self.shape).unwrap();
        self.model.forward(x).unwrap().to_vec()
    }
}

/// Ten times the distance at which PyTorch's own float32 ends up, the largest
/// so far: a network amplifies any difference from step to step.
struct Bound(f64);

impl Bound {
    fn check(&mut self, what: &str, got: f32, want: f64, torch_f32: f64) {
        self.0 = self.0.max(10.0 * (want - torch_f32).abs());
        let allowed = self.0.max(1e-6 * want.abs());
        assert!(
            (f64::from(got) - want).abs() <= allowed,
            "{what}: {got}, PyTorch has {want} (float32: {torch_f32})"
        );
    }
}

#[test]
fn ten_steps_follow_pytorchs_losses() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("../fixtures/resnet.json")).unwrap();
    assert_eq!(cases.len(), 2);
    for case in &cases {
        let name = case["name"].as_str().unwrap();
        let whole = |key: &str| case[key].as_u64().unwrap() as usize;
        let widths: Vec<usize> = numbers(&case["widths"])
            .iter()
            .map(|&w| w as usize)
            .collect();
        let lr = case["lr"].as_f64().unwrap();
        let mut net = Net::new(&widths, whole("batch"), whole("size"), lr, 2);
        assert_eq!(net.params.len(), whole("tensors"));
        assert_eq!(net.params.numel(), whole("numel"));
        let (losses, f32s) = (numbers(&case["losses"]), numbers(&case["losses_f32"]));
        let mut bound = Bound(0.0);
        for (i, (&want, &torch)) in losses.iter().zip(&f32s).enumerate() {
            let loss = net.step(i as u64);
            bound.check(&format!("{name}, loss {i}"), loss, want, torch);
            if i == 0 {
                // ReLUs on the verge fall this way or that: PyTorch's own float32
                // is off by 0.13 % in one of the large network's gradients.
                let (g64, g32) = (&case["first_gradient_l2"], &case["first_gradient_l2_f32"]);
                let relative = |n: &String| {
                    let (a, b) = (g64[n].as_f64().unwrap(), g32[n].as_f64().unwrap());
                    (a - b).abs() / a
                };
                let off = g64.as_object().unwrap().keys().map(relative);
                let allowed = (10.0 * off.fold(0.0, f64::max)).max(2e-5);
                for id in net.params.ids() {
                    let info = &net.params.infos()[id.index()];
                    let want = g64[&info.name].as_f64().unwrap();
                    let got = l2(net.grads.grad(id));
                    assert!(
                        (got - want).abs() <= allowed * want,
                        "{name}, gradient of {}: {got}, PyTorch has {want}",
                        info.name
                    );
                }
            }
        }
        let (logits, f32s) = (
            numbers(&case["eval_logits"]),
            numbers(&case["eval_logits_f32"]),
        );
        let largest = logits.iter().zip(&f32s).map(|(a, b)| (a - b).abs());
        let mut bound = Bound(10.0 * largest.fold(0.0, f64::max));
        for ((got, &want), &torch) in net.logits().iter().zip(&logits).zip(&f32s) {
            bound.check(&format!("{name}, logits"), *got, want, torch);
        }
        for (id, info) in net.params.buffer_ids().zip(net.params.buffer_infos()) {
            let want = case["buffer_l2"][&info.name].as_f64().unwrap();
            let got = l2(net.params.buffer(id));
            assert!(
                (got - want).abs() <= 2e-2 * want,
                "{name}, {}: {got}, PyTorch has {want}",
                info.name
            );
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads_or_old_contents_and_allocations_stand_still() {
    let run = |threads, poison| {
        let mut net = Net::new(&[16, 32], 5, 12, 0.01, threads);
        net.tape.poison(poison);
        let mut counts = vec![];
        let losses: Vec<f32> = (0..4)
            .map(|i| {
                let loss = net.step(i);
                counts.push(net.tape.allocations());
                loss
            })
            .collect();
        assert!(counts[1..].iter().all(|&c| c == counts[1]), "{counts:?}");
        (
            losses,
            net.params.flat().to_vec(),
            net.params.buffers_flat().to_vec(),
            net.logits(),
        )
    };
    let one = run(1, false);
    assert!(one.0.iter().all(|l| l.is_finite()));
    assert_eq!(run(1, true), one, "poisoned buffers");
    assert_eq!(run(2, false), one, "2 threads");
    assert_eq!(run(4, false), one, "4 threads");
}

#[test]
fn statistics_that_nobody_took_over_are_reported() {
    let mut net = Net::new(&[4, 4], 3, 8, 0.01, 1);
    let images = net.images(200);
    let step = net.tape.step(&net.params, StepKey::new(0, 0));
    net.model
        .forward(step.input(&images, &net.shape).unwrap())
        .unwrap();
    drop(step);
    let step = net.tape.inference(&net.params);
    let e = net
        .model
        .forward(step.input(&images, &net.shape).unwrap())
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Usage);
    assert!(e.to_string().contains("update_buffers"), "{e}");
    drop(step);
    net.tape.update_buffers(&mut net.params).unwrap();
    net.logits();
}

#[test]
fn torchvisions_networks_have_its_names_and_sizes() {
    let build = |make: &dyn Fn(&mut Scope) -> ResNet| {
        let mut scope = Scope::new(Seed(1));
        let net = make(&mut scope);
        (net, scope.build().unwrap())
    };
    for (numel, tensors, make) in [
        (
            11_689_512,
            62,
            &(|s: &mut Scope| ResNet::resnet18(s, 1000)) as &dyn Fn(&mut Scope) -> ResNet,
        ),
        (21_797_672, 110, &|s: &mut Scope| ResNet::resnet34(s, 1000)),
        (25_557_032, 161, &|s: &mut Scope| ResNet::resnet50(s, 1000)),
    ] {
        let (_, params) = build(make);
        assert_eq!((params.numel(), params.len()), (numel, tensors));
    }
    let (net, params) = build(&|s| ResNet::resnet50(s, 10));
    for name in [
        "conv1.weight",
        "layer1.0.downsample.1.bias",
        "layer4.2.bn3.weight",
        "fc.bias",
    ] {
        assert!(params.find(name).is_some(), "{name}");
    }
    assert!(params.find_buffer("layer3.5.bn2.running_var").is_some());
    let mut tape = Tape::new(Threads(2));
    let step = tape.step(&params, StepKey::new(0, 0));
    let x = step
        .input(&hashed(2 * 40 * 33 * 3, 1, 8, 1.0), &[2, 40, 33, 3])
        .unwrap();
    let mut grads = Grads::like(&params);
    let loss = net.forward(x).unwrap().cross_entropy(&[1, 2], 2.0).unwrap();
    assert!(loss.item().unwrap().is_finite());
    loss.backward(&mut grads).unwrap();
    assert!(
        params
            .ids()
            .all(|id| grads.grad(id).iter().any(|g| *g != 0.0))
    );
}
