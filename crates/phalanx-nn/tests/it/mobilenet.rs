//! MobileNetV2: one step against PyTorch (`fixtures/make_mobilenet.py`), names
//! and sizes, bits.

use crate::common::hashed;
use phalanx_nn::models::MobileNetV2;
use phalanx_nn::optim::Sgd;
use phalanx_nn::{GradView, Grads, Params, Scope, Seed, StepKey, Tape, Threads};
use serde_json::Value;

fn l2(values: &[f32]) -> f64 {
    let squares = values.iter().map(|&v| f64::from(v) * f64::from(v));
    squares.sum::<f64>().sqrt()
}

struct Net {
    model: MobileNetV2,
    params: Params,
    grads: Grads,
    tape: Tape,
    batch: usize,
}

impl Net {
    fn new(batch: usize, threads: usize) -> Self {
        let mut scope = Scope::new(Seed(7));
        let model = MobileNetV2::new(&mut scope, 10).dropout(0.0);
        let params = scope.build().unwrap();
        Net {
            model,
            grads: Grads::like(&params),
            params,
            tape: Tape::new(Threads(threads)),
            batch,
        }
    }

    fn images(&self) -> Vec<f32> {
        hashed(self.batch * 32 * 32 * 3, 500, 8, 1.0)
    }

    fn step(&mut self) -> f32 {
        let labels: Vec<u32> = (0..self.batch as u32).map(|i| i % 10).collect();
        let images = self.images();
        let step = self.tape.step(&self.params, StepKey::new(0, 0));
        let x = step.input(&images, &[self.batch, 32, 32, 3]).unwrap();
        let loss = self.model.forward(x).unwrap();
        let loss = loss.cross_entropy(&labels, labels.len() as f32).unwrap();
        let value = loss.item().unwrap();
        loss.backward(&mut self.grads).unwrap();
        drop(step);
        self.tape.update_buffers(&mut self.params).unwrap();
        value
    }
}

#[test]
fn a_step_agrees_with_pytorch() {
    let case: Value = serde_json::from_str(include_str!("../fixtures/mobilenet.json")).unwrap();
    let mut net = Net::new(case["batch"].as_u64().unwrap() as usize, 2);
    assert_eq!(net.params.len() as u64, case["tensors"].as_u64().unwrap());
    assert_eq!(net.params.numel() as u64, case["numel"].as_u64().unwrap());
    for id in net.params.ids() {
        let name = &net.params.infos()[id.index()].name;
        let sum: f64 = net.params.get(id).iter().map(|&v| f64::from(v)).sum();
        let [want_sum, want] = [0, 1].map(|i| case["initial"][name][i].as_f64().unwrap());
        assert!((sum - want_sum).abs() <= 1e-4 * want.max(1.0), "{name}");
        let norm = l2(net.params.get(id));
        assert!((norm - want).abs() <= 1e-6 * want, "{name}: {norm} {want}");
    }
    let number = |v: &Value| v.as_f64().unwrap();
    let (want, torch) = (number(&case["losses"][0]), number(&case["losses_f32"][0]));
    let loss = f64::from(net.step());
    let allowed = (10.0 * (want - torch).abs()).max(1e-6 * want);
    assert!(
        (loss - want).abs() <= allowed,
        "loss {loss}, PyTorch {want}"
    );

    // Half the biases stand before another normalisation: their gradients are zero but for
    // rounding. The others may be off as PyTorch's own float32 is, ReLUs on the verge included.
    let (g64, g32) = (&case["first_gradient_l2"], &case["first_gradient_l2_f32"]);
    let off = g64.as_object().unwrap().iter().filter_map(|(n, v)| {
        let (a, b) = (number(v), number(&g32[n]));
        (a > 1e-9).then(|| (a - b).abs() / a)
    });
    let allowed = (10.0 * off.fold(0.0, f64::max)).max(1e-5);
    for id in net.params.ids() {
        let name = &net.params.infos()[id.index()].name;
        let (got, want) = (l2(net.grads.grad(id)), number(&g64[name]));
        assert!(
            (got - want).abs() <= allowed * want + 1e-5,
            "gradient of {name}: {got}, PyTorch has {want}"
        );
    }
    let mut sgd = Sgd::new(&net.params, number(&case["lr"])).momentum(0.9);
    sgd.step(&mut net.params, &net.grads).unwrap();
    let images = net.images();
    let step = net.tape.inference(&net.params);
    let x = step.input(&images, &[net.batch, 32, 32, 3]).unwrap();
    let logits = net.model.forward(x).unwrap().to_vec();
    let all =
        |key: &str| -> Vec<f64> { case[key].as_array().unwrap().iter().map(number).collect() };
    let (want, torch) = (all("eval_logits"), all("eval_logits_f32"));
    let off = want.iter().zip(&torch).map(|(a, b)| (a - b).abs());
    let allowed = 10.0 * off.fold(0.0, f64::max);
    for (got, want) in logits.iter().zip(&want) {
        assert!((f64::from(*got) - want).abs() <= allowed, "{got} {want}");
    }
    drop(step);
    for (id, info) in net.params.buffer_ids().zip(net.params.buffer_infos()) {
        let want = number(&case["buffer_l2"][&info.name]);
        let got = l2(net.params.buffer(id));
        assert!(
            (got - want).abs() <= 1e-4 * want + 1e-6,
            "{}: {got} {want}",
            info.name
        );
    }
}

#[test]
fn threads_do_not_change_a_bit_and_nothing_is_allocated_later() {
    let run = |threads| {
        let mut net = Net::new(5, threads);
        let first = net.step();
        let grads = net.grads.flat().to_vec();
        net.step();
        let allocations = net.tape.allocations();
        net.step();
        assert_eq!(net.tape.allocations(), allocations);
        (first.to_bits(), grads)
    };
    let one = run(1);
    assert!(one == run(2) && one == run(4));
}
