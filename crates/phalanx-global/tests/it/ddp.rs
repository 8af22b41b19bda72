//! Data parallel by SBP has the weights of `DistributedDataParallel`, bit for bit.

use phalanx_ddp::{DdpOptions, DistributedDataParallel};
use phalanx_global::{GlobalParams, Placement, Sbp};
use phalanx_nn::models::{Gpt, GptConfig, MnistCnn, MobileNetV2};
use phalanx_nn::optim::Sgd;
use phalanx_nn::{Params, Reduction, Result, Scope, Seed, StepKey, Tape, Tensor, Threads};

use crate::common::{Over, number, on_mesh};

const STEPS: u64 = 20;
/// Samples of a step, of all ranks.
const BATCH: usize = 8;

/// Sample `i` of step `step`.
fn image(step: u64, i: usize, len: usize) -> Vec<f32> {
    (0..len).map(|at| number(&[step as usize, i, at])).collect()
}

fn label(step: u64, i: usize) -> u32 {
    ((step as usize * 7 + i * 3) % 10) as u32
}

fn samples(step: u64) -> Vec<u64> {
    (0..BATCH as u64).map(|i| step * 100 + i).collect()
}

/// The weights after training with DDP, and those after training on global tensors.
fn both<M>(
    ranks: usize,
    new: impl Fn(&mut Scope) -> M + Sync,
    local: impl for<'s> Fn(
        &M,
        &'s phalanx_nn::Step<'s>,
        std::ops::Range<usize>,
        u64,
    ) -> Result<Tensor<'s>>
    + Sync,
    global: impl for<'s> Fn(
        &M,
        &'s phalanx_global::GlobalStep<'s>,
        u64,
    ) -> Result<phalanx_global::Global<'s>>
    + Sync,
) {
    let made = on_mesh(Over::Thread, &[ranks], |placement| {
        (
            by_ddp(placement, &new, &local),
            by_sbp(placement, &new, &global),
        )
    });
    for (rank, (ddp, sbp)) in made.iter().enumerate() {
        let differ = ddp
            .iter()
            .zip(sbp)
            .filter(|(a, b)| a.to_bits() != b.to_bits());
        assert_eq!(differ.count(), 0, "rank {rank} of {ranks}");
        assert_eq!(ddp.len(), sbp.len());
    }
}

fn by_ddp<M>(
    placement: &Placement,
    new: &impl Fn(&mut Scope) -> M,
    loss: &impl for<'s> Fn(
        &M,
        &'s phalanx_nn::Step<'s>,
        std::ops::Range<usize>,
        u64,
    ) -> Result<Tensor<'s>>,
) -> Vec<f32> {
    let mut scope = Scope::new(Seed(3));
    let model = new(&mut scope);
    let mut params = scope.build().unwrap();
    let group = placement.group().clone();
    let (rank, each) = (group.rank(), BATCH / group.world_size());
    let mut ddp = DistributedDataParallel::new(group, &mut params, DdpOptions::default()).unwrap();
    let mut tape = Tape::new(Threads(1));
    ddp.sync_batch_norm(&mut tape).unwrap();
    let mut sgd = Sgd::new(&params, 0.05).momentum(0.9);
    for i in 0..STEPS {
        let own = rank * each..(rank + 1) * each;
        let ids = samples(i)[own.clone()].to_vec();
        let step = tape.step(&params, StepKey::new(0, i).samples(&ids));
        let made = loss(&model, &step, own, i).unwrap();
        made.backward(&mut ddp).unwrap();
        drop(step);
        assert!(ddp.finish().unwrap().is_yes());
        sgd.step(&mut params, &ddp).unwrap();
        ddp.update_buffers(&mut tape, &mut params).unwrap();
        ddp.sync_buffers(&mut params).unwrap();
    }
    all(&params)
}

fn by_sbp<M>(
    placement: &Placement,
    new: &impl Fn(&mut Scope) -> M,
    loss: &impl for<'s> Fn(
        &M,
        &'s phalanx_global::GlobalStep<'s>,
        u64,
    ) -> Result<phalanx_global::Global<'s>>,
) -> Vec<f32> {
    let mut scope = Scope::new(Seed(3));
    let model = new(&mut scope);
    let params = scope.build().unwrap();
    let mut params = GlobalParams::new(placement, &params, |_| vec![Sbp::Broadcast]).unwrap();
    let mut grads = params.grads();
    let mut tape = Tape::new(Threads(1));
    let mut sgd = Sgd::new(params.local(), 0.05).momentum(0.9);
    for i in 0..STEPS {
        let ids = samples(i);
        let step = params.step(&mut tape, StepKey::new(0, i).samples(&ids));
        loss(&model, &step, i)
            .unwrap()
            .backward(&mut grads)
            .unwrap();
        drop(step);
        sgd.step(params.local_mut(), &grads).unwrap();
        tape.update_buffers(params.local_mut()).unwrap();
    }
    all(params.local())
}

/// Parameters and running statistics.
fn all(params: &Params) -> Vec<f32> {
    [params.flat(), params.buffers_flat()].concat()
}

#[test]
fn mnist_has_the_weights_of_ddp() {
    for ranks in [1, 2, 4] {
        both(
            ranks,
            MnistCnn::new,
            |model, step, own, i| {
                let images: Vec<f32> = own.clone().flat_map(|k| image(i, k, 784)).collect();
                let labels: Vec<u32> = own.clone().map(|k| label(i, k)).collect();
                let x = step.input(&images, &[own.len(), 28, 28, 1])?;
                model.forward(x)?.nll_loss(&labels, Reduction::Mean)
            },
            |model, step, i| {
                let images: Vec<f32> = (0..BATCH).flat_map(|k| image(i, k, 784)).collect();
                let labels: Vec<u32> = (0..BATCH).map(|k| label(i, k)).collect();
                let split = [Sbp::split(0)];
                let x = step.input(&images, &[BATCH, 28, 28, 1], &split)?;
                let y = step.indices(&labels, &[BATCH], &split)?;
                model.forward(x)?.nll_loss(&y, Reduction::Mean)
            },
        );
    }
}

#[test]
fn mobilenetv2_has_the_weights_of_ddp_with_joined_batch_norms() {
    both(
        2,
        |scope| MobileNetV2::new(scope, 10),
        |model, step, own, i| {
            let images: Vec<f32> = own.clone().flat_map(|k| image(i, k, 3072)).collect();
            let labels: Vec<u32> = own.clone().map(|k| label(i, k)).collect();
            let x = step.input(&images, &[own.len(), 32, 32, 3])?;
            model.forward(x)?.cross_entropy(&labels, Reduction::Mean)
        },
        |model, step, i| {
            let images: Vec<f32> = (0..BATCH).flat_map(|k| image(i, k, 3072)).collect();
            let labels: Vec<u32> = (0..BATCH).map(|k| label(i, k)).collect();
            let split = [Sbp::split(0)];
            let x = step.input(&images, &[BATCH, 32, 32, 3], &split)?;
            let y = step.indices(&labels, &[BATCH], &split)?;
            model.forward(x)?.cross_entropy(&y, Reduction::Mean)
        },
    );
}

#[test]
fn gpt_has_the_weights_of_ddp() {
    const LENGTH: usize = 8;
    let config = GptConfig {
        vocab: 10,
        context: LENGTH,
        layers: 2,
        heads: 2,
        width: 16,
        dropout: 0.1,
    };
    let text = |i: u64, k: usize, shift: usize| -> Vec<u32> {
        (0..LENGTH).map(|at| label(i, k + at + shift)).collect()
    };
    both(
        2,
        |scope| Gpt::new(scope, &config),
        |model, step, own, i| {
            let x: Vec<u32> = own.clone().flat_map(|k| text(i, k, 0)).collect();
            let y: Vec<u32> = own.clone().flat_map(|k| text(i, k, 1)).collect();
            let logits = model.forward(step, &x, (own.len(), LENGTH))?;
            logits.cross_entropy(&y, Reduction::Mean)
        },
        |model, step, i| {
            let x: Vec<u32> = (0..BATCH).flat_map(|k| text(i, k, 0)).collect();
            let y: Vec<u32> = (0..BATCH).flat_map(|k| text(i, k, 1)).collect();
            let split = [Sbp::split(0)];
            let x = step.indices(&x, &[BATCH, LENGTH], &split)?;
            let y = step.indices(&y, &[BATCH, LENGTH], &split)?;
            let logits = model.forward(step, &x, (BATCH, LENGTH))?;
            logits.cross_entropy(&y, Reduction::Mean)
        },
    );
}
