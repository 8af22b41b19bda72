//! One step through many layers in processes of their own, each told another
//! instruction set: all bits are the same.

use std::process::Command;

use crate::common::noise;
use crate::optim_torch::{gradients, params_of, spread};
use phalanx_nn::layers::{
    Act, BatchNorm, Conv2d, Conv2dOptions, Dropout, GroupNorm, LayerNorm, Linear, MaxPool2d,
    MaxPool2dOptions, MultiHeadAttention,
};
use phalanx_nn::losses::CrossEntropyOptions;
use phalanx_nn::optim::{Adam, Ema, Lamb, Lion, Optimizer, Rmsprop, Sgd};
use phalanx_nn::{
    Family, Grads, Precision, Reduction, Result, Scope, Seed, StepKey, Tape, Tensor, Threads,
};

/// Set for the processes that only print their digest.
const CHILD: &str = "PHALANX_NN_ISA_BITS";

fn digest(hash: &mut u64, values: &[f32]) {
    for v in values {
        *hash = (*hash ^ u64::from(v.to_bits())).wrapping_mul(0x0100_0000_01b3);
    }
}

struct Net {
    stem: Conv2d,
    norm: BatchNorm,
    wide: Conv2d,
    strided: Conv2d,
    depthwise: Conv2d,
    group: GroupNorm,
    layer: LayerNorm,
    attention: MultiHeadAttention,
    drop: Dropout,
    head: Linear,
}

impl Net {
    fn new(s: &mut Scope) -> Net {
        let three = Conv2dOptions::new(3).padding(1);
        Net {
            stem: Conv2d::new(s.enter("stem"), 3, 32, three),
            norm: BatchNorm::new(s.enter("norm"), 32),
            wide: Conv2d::new(s.enter("wide"), 32, 32, three.no_bias()),
            strided: Conv2d::new(s.enter("strided"), 32, 48, three.stride(2)),
            depthwise: Conv2d::new(s.enter("depthwise"), 48, 48, three.groups(48)),
            group: GroupNorm::new(s.enter("group"), 4, 48),
            layer: LayerNorm::new(s.enter("layer"), &[48]),
            attention: MultiHeadAttention::new(s.enter("attention"), 48, 4),
            drop: Dropout::new(0.2),
            head: Linear::new(s.enter("head"), 48, 300),
        }
    }

    fn forward<'s>(&self, x: Tensor<'s>) -> Result<Tensor<'s>> {
        let x = self.norm.forward_act(self.stem.forward(x)?, Act::Relu)?;
        let x = self
            .norm
            .forward_residual(self.wide.forward(x.share())?, x, Act::Relu)?;
        let pool = MaxPool2d::new(MaxPool2dOptions::new(3).stride(1).padding(1));
        let x = self.strided.forward_act(pool.forward(x)?, Act::Relu6)?;
        let x = self.depthwise.forward(x)?.silu()?;
        let x = self.group.forward(x)?.gelu()?;
        let [n, h, w, c] = *x.shape() else {
            unreachable!("images have four dimensions");
        };
        let x = self.layer.forward(x.reshape(&[n, h * w, c])?)?;
        let x = self.attention.forward(x, true)?.gelu_tanh()?;
        let x = self.drop.forward(x)?.hardswish()?;
        self.head.forward(x.mean(&[1], false)?.tanh()?)
    }
}

/// Digest of outputs, losses, gradients and statistics.
fn run(precision: Precision) -> u64 {
    let mut scope = Scope::new(Seed(11));
    let net = Net::new(&mut scope);
    let mut params = scope.build().unwrap();
    let mut grads = Grads::like(&params);
    let mut tape = Tape::new(Threads(1));
    tape.set_precision(precision);
    let (images, targets) = (noise(2 * 8 * 8 * 3, 1), noise(600, 2));
    let mut hash = 0xcbf2_9ce4_8422_2325;
    let step = tape.step(&params, StepKey::new(0, 0).seed(3));
    let x = step.variable(&images, &[2, 8, 8, 3]).unwrap();
    let y = net.forward(x.share()).unwrap();
    digest(&mut hash, y.data());
    let loss = y.share().cross_entropy(&[3, 7], 2.0).unwrap();
    let off = y.share().l1_loss(&targets, Reduction::Mean).unwrap();
    let options = CrossEntropyOptions::default();
    let whole = y.share().cross_entropy_with(&[5, 299], options).unwrap();
    let loss = loss.add(off).unwrap().add(whole).unwrap();
    digest(&mut hash, &[loss.item().unwrap()]);
    loss.backward(&mut grads).unwrap();
    digest(&mut hash, &x.grad().unwrap());
    digest(&mut hash, grads.flat());
    drop((x, y));
    drop(step);
    tape.update_buffers(&mut params).unwrap();
    digest(&mut hash, params.buffers_flat());
    hash
}

/// Digest of parameters and states after steps of each optimizer.
fn optimizers() -> u64 {
    let start = params_of(&[37, 1003]);
    let plain = Rmsprop::new(&start, 0.01).weight_decay(0.1);
    let centered = plain.clone().centered(true);
    let mut all: Vec<Box<dyn Optimizer>> = vec![
        Box::new(Sgd::new(&start, 0.1).momentum(0.9)),
        Box::new(Adam::adamw(&start, 0.01)),
        Box::new(plain.clone()),
        Box::new(plain.momentum(0.9)),
        Box::new(centered.clone()),
        Box::new(centered.momentum(0.9)),
        Box::new(Lion::new(&start, 0.01).weight_decay(0.1)),
        Box::new(Lamb::new(&start, 0.01)),
        Box::new(Ema::new(&start, Adam::new(&start, 0.01), 0.9)),
        Box::new(Ema::new(&start, Adam::new(&start, 0.01), 0.3)),
    ];
    let mut hash = 0xcbf2_9ce4_8422_2325;
    for optimizer in &mut all {
        let mut params = start.clone();
        spread(&mut params, &noise(1040, 4));
        for step in 0..3 {
            let grads = gradients(&params, &noise(1040, 5 + step));
            optimizer.step_scaled(&mut params, &grads, 0.7).unwrap();
        }
        digest(&mut hash, params.flat());
        for (_, values) in optimizer.state() {
            digest(&mut hash, values);
        }
    }
    hash
}

/// Those of bf16 are compared within a family.
#[test]
fn every_instruction_set_gives_the_same_bits() {
    let (f32, bf16) = (run(Precision::F32), run(Precision::Bf16));
    let optimizers = optimizers();
    let mut known = vec![(Family::here().title().to_owned(), format!("{bf16:x}"))];
    let digests = format!("{f32:x} {optimizers:x}");
    if std::env::var_os(CHILD).is_some() {
        println!("bits {digests},{},{}", known[0].0, known[0].1);
        return;
    }
    let mut sets = vec!["scalar"];
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        sets.push("avx2");
    }
    for set in sets {
        let child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "isa_bits::every_instruction_set_gives_the_same_bits",
            ])
            .arg("--nocapture")
            .env("PHALANX_ISA", set)
            .env(CHILD, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&child.stdout);
        let bits = text.split("bits ").nth(1).and_then(|t| t.lines().next());
        let bits: Vec<&str> = bits.unwrap_or_default().split(',').collect();
        assert_eq!(bits[0], digests, "{set}: {text}");
        let own = (bits[1].to_owned(), bits[2].to_owned());
        match known.iter().find(|(family, _)| *family == own.0) {
            Some(found) => assert_eq!(*found, own, "{set}"),
            None => known.push(own),
        }
    }
}
