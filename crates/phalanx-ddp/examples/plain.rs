//! Data-parallel training without an engine: linear regression whose parameters are plain `Vec<f32>`s and whose
//! gradients are computed by hand, on two ranks that are threads.
//!
//! `cargo run -p phalanx-ddp --example plain --no-default-features`

use phalanx_comm::{ProcessGroup, ReduceOp};
use phalanx_ddp::{
    Fingerprint, ParamSpec, Parameters, Reducer, broadcast_parameters, digest, verify_equal,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
const WORLD: usize = 2;
const FEATURES: usize = 8;
const BATCH: usize = 32; // of each rank
const LEARNING_RATE: f32 = 0.3;

struct Model(Vec<Tensor>);

struct Tensor {
    name: &'static str,
    shape: Vec<usize>,
    values: Vec<f32>,
}

impl Parameters for Model {
    fn tensors(&self) -> usize {
        self.0.len()
    }
    fn name(&self, index: usize) -> &str {
        self.0[index].name
    }
    fn shape(&self, index: usize) -> &[usize] {
        &self.0[index].shape
    }
    fn values(&self, index: usize) -> &[f32] {
        &self.0[index].values
    }
    fn values_mut(&mut self, index: usize) -> &mut [f32] {
        &mut self.0[index].values
    }
}

/// Writes the gradients into the reducer's buckets; the mean squared error of this rank's batch.
fn backward(model: &Model, batch: &[[f32; FEATURES]], reducer: &mut Reducer) -> Result<f32> {
    let (weight, bias) = (model.values(0), model.values(1)[0]);
    let dot = |x: &[f32; FEATURES]| x.iter().zip(weight).map(|(x, w)| x * w).sum::<f32>();
    let error = |x: &[f32; FEATURES]| dot(x) + bias - target(x);
    let errors: Vec<f32> = batch.iter().map(error).collect();
    let scale = 2.0 / batch.len() as f32;

    reducer.slot(1)[0] = scale * errors.iter().sum::<f32>();
    reducer.ready(1)?;
    let gradient = reducer.slot(0);
    gradient.fill(0.0);
    for (x, error) in batch.iter().zip(&errors) {
        (0..FEATURES).for_each(|j| gradient[j] += scale * error * x[j]);
    }
    // The last gradient of a bucket starts its all-reduce.
    reducer.ready(0)?;
    Ok(errors.iter().map(|e| e * e).sum::<f32>() / batch.len() as f32)
}

/// What the model learns: 1, 2, 3, ... as weights, 0.5 as bias.
fn target(x: &[f32; FEATURES]) -> f32 {
    (1u8..).zip(x).map(|(w, x)| f32::from(w) * x).sum::<f32>() + 0.5
}

fn train(group: ProcessGroup) -> Result<()> {
    let rank = group.rank();
    let tensor = |name, shape: Vec<usize>| Tensor {
        name,
        values: vec![rank as f32; shape.iter().product()], // other ones on each rank
        shape,
    };
    let weight = tensor("weight", vec![1, FEATURES]);
    let mut model = Model(vec![weight, tensor("bias", vec![1])]);

    // As DistributedDataParallel does at construction: compare the models, take rank 0's values.
    let mut facts = Fingerprint::new();
    facts.line(format!("learning rate {LEARNING_RATE}"));
    facts.parameters(&model).compare(&group)?;
    broadcast_parameters(&group, &mut model, 0)?;
    let specs = (0..model.tensors()).map(|i| ParamSpec::of(&model, i));
    let mut reducer = Reducer::new(group.clone(), specs.collect(), Default::default());

    for step in 0..=100 {
        // This rank's part of the global batch.
        let sample = |i| ((step * WORLD + rank) * BATCH + i) * FEATURES;
        let random = |i: usize| ((i as f32).sin() * 43_758.547).fract(); // -1 to 1
        let row = |i| std::array::from_fn(|j| random(sample(i) + j));
        let batch: Vec<[f32; FEATURES]> = (0..BATCH).map(row).collect();

        let loss = backward(&model, &batch, &mut reducer)?;
        // Waits for the all-reduces. All ranks skip a step in which a gradient is not finite.
        if reducer.finish()?.is_yes() {
            for (i, tensor) in model.0.iter_mut().enumerate() {
                let pairs = tensor.values.iter_mut().zip(reducer.grad(i));
                pairs.for_each(|(w, g)| *w -= LEARNING_RATE * g);
            }
        }
        if step % 20 == 0 {
            let mut mean = [loss];
            group.all_reduce(&mut mean, ReduceOp::Mean)?;
            if rank == 0 {
                println!("step {step:3}  loss {:.6}", mean[0]);
            }
        }
    }
    Ok(verify_equal(&group, &model, digest(&model))?)
}

fn main() -> Result<()> {
    std::thread::scope(|scope| {
        let groups = ProcessGroup::threads(WORLD, Default::default()).into_iter();
        let ranks: Vec<_> = groups.map(|g| scope.spawn(|| train(g))).collect();
        let results = ranks.into_iter().map(|r| r.join().expect("no panic"));
        results.collect()
    })
}
