//! The small networks of the public CIFAR-10 speed records: a whitening layer
//! and three stages of two convolutions behind a max-pool (D. Page, "How to
//! train your ResNet", 2018; K. Jordan, "94% on CIFAR-10 in 3.29 seconds on a
//! single GPU", 2024, whose widths these are).

use crate::layers::{BatchNorm, Conv2d, Conv2dOptions, Linear, MaxPool2d};
use crate::param::Scope;
use crate::{Params, Result, Value};

/// Side of the patches that the first layer whitens.
pub const PATCH: usize = 2;
/// Numbers of a patch: of each channel, row by row.
pub const PATCH_LEN: usize = 3 * PATCH * PATCH;
/// The first layer's filters: each direction and its opposite.
const WHITE: usize = 2 * PATCH_LEN;

#[derive(Clone, Copy, Debug)]
struct Stage {
    conv1: Conv2d,
    norm1: BatchNorm,
    conv2: Conv2d,
    norm2: BatchNorm,
}

impl Stage {
    fn new(scope: &mut Scope, inputs: usize, outputs: usize) -> Self {
        let three = || Conv2dOptions::new(3).padding(1).no_bias();
        // Statistics of few batches: weights change fast.
        let norm = |scope: Scope<'_>| {
            let norm = BatchNorm::without_weight(scope, outputs);
            norm.momentum(Some(0.4)).eps(1e-12)
        };
        Stage {
            conv1: Conv2d::new(scope.enter("conv1"), inputs, outputs, three()),
            norm1: norm(scope.enter("norm1")),
            conv2: Conv2d::new(scope.enter("conv2"), outputs, outputs, three()),
            norm2: norm(scope.enter("norm2")),
        }
    }

    fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        let x = self.conv1.forward(x)?.max_pool2d(2)?;
        let x = self.norm1.forward(x)?.gelu()?;
        self.norm2.forward(self.conv2.forward(x)?)?.gelu()
    }
}

/// Nine layers: `whiten`, `block1.conv1` to `block3.conv2`, `head`, and the
/// pools between them. 1,971,640 parameters at widths 64, 256, 256. Batch normalisations have no weight, and activations are
/// GELUs.
#[derive(Clone, Copy, Debug)]
pub struct ResNet9 {
    whiten: Conv2d,
    stages: [Stage; 3],
    pool: MaxPool2d,
    head: Linear,
}

impl ResNet9 {
    /// Widths 64, 256, 256.
    pub fn new(scope: &mut Scope, classes: usize) -> Self {
        Self::with_widths(scope, [64, 256, 256], classes)
    }

    /// Other widths.
    pub fn with_widths(scope: &mut Scope, widths: [usize; 3], classes: usize) -> Self {
        let [a, b, c] = widths;
        ResNet9 {
            whiten: Conv2d::new(scope.enter("whiten"), 3, WHITE, PATCH),
            stages: [
                Stage::new(&mut scope.enter("block1"), WHITE, a),
                Stage::new(&mut scope.enter("block2"), a, b),
                Stage::new(&mut scope.enter("block3"), b, c),
            ],
            pool: MaxPool2d::new(3),
            head: Linear::without_bias(scope.enter("head"), c, classes),
        }
    }

    /// Sets the weights that are not random: every 3x3 convolution passes its inputs
    /// through its first filters, the first layer's filters are `directions` (each
    /// [`PATCH_LEN`] numbers: of each channel, row by row) and their opposites, and the last layer's weights have a
    /// standard deviation of 1.
    ///
    /// # Errors
    /// `Usage` unless there are [`PATCH_LEN`] directions, or for parameters of another model.
    pub fn initialise(params: &mut Params, directions: &[[f32; PATCH_LEN]]) -> Result<()> {
        let find = |params: &Params, name: &str| {
            let id = params.find(name);
            id.ok_or_else(|| crate::Error::usage(format!("no parameter {name}; not a ResNet-9")))
        };
        let white = find(params, "whiten.weight")?;
        let head = find(params, "head.weight")?;
        let plus = directions.iter().flatten().copied();
        let minus = directions.iter().flatten().map(|v| -v);
        let filters: Vec<f32> = plus.chain(minus).collect();
        params.import(white, &filters)?;
        for name in (1..=3).flat_map(|s| [1, 2].map(|c| format!("block{s}.conv{c}.weight"))) {
            let id = find(params, &name)?;
            let &[outputs, inputs, ..] = params.infos()[id.index()].shape.as_slice() else {
                return Err(crate::Error::usage(format!("{name} is not a convolution")));
            };
            let mut weight = params.export(id);
            for i in 0..inputs.min(outputs) {
                let filter = &mut weight[i * inputs * 9..(i + 1) * inputs * 9];
                filter.fill(0.0);
                filter[i * 9 + 4] = 1.0;
            }
            params.import(id, &weight)?;
        }
        let values = params.get_mut(head);
        let n = values.len() as f64;
        let sum = |f: &dyn Fn(f64) -> f64, values: &[f32]| -> f64 {
            values.iter().map(|v| f(f64::from(*v))).sum()
        };
        let mean = sum(&|v| v, values) / n;
        let deviation = (sum(&|v| (v - mean).powi(2), values) / (n - 1.0)).sqrt();
        let factor = (1.0 / deviation) as f32;
        values.iter_mut().for_each(|v| *v *= factor);
        Ok(())
    }

    /// Images (N, 32, 32, 3) to logits (N, classes).
    ///
    /// # Errors
    /// `Usage` for other shapes.
    pub fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        let mut x = self.whiten.forward(x)?.gelu()?;
        for stage in &self.stages {
            x = stage.forward(x)?;
        }
        let x = self.pool.forward(x)?.flatten()?;
        // Scores this small keep the first updates small.
        let features = x.shape().last().copied().unwrap_or(1);
        self.head.forward(x)?.scale(1.0 / features as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Seed, StepKey, Tape, Threads};

    #[test]
    fn identity_filters_pass_and_scores_have_the_right_shape() {
        let mut scope = Scope::new(Seed(3));
        let net = ResNet9::with_widths(&mut scope, [24, 24, 32], 10);
        let mut params = scope.build().expect("model");
        let mut directions = [[0.0; PATCH_LEN]; PATCH_LEN];
        for (i, direction) in directions.iter_mut().enumerate() {
            direction[i] = 2.0;
        }
        ResNet9::initialise(&mut params, &directions).expect("its own parameters");
        assert!(ResNet9::initialise(&mut params, &directions[1..]).is_err());
        let white = params.export(params.find("whiten.weight").expect("there"));
        assert_eq!(
            (white[0], white[13], white[12 * 12], white[1]),
            (2.0, 2.0, -2.0, 0.0)
        );
        let conv = params.export(params.find("block3.conv1.weight").expect("there"));
        // Input 5 comes out as output 5; filter 30 stays random.
        assert_eq!(conv[(5 * 24 + 5) * 9 + 4], 1.0);
        assert_eq!(
            conv[5 * 24 * 9..6 * 24 * 9]
                .iter()
                .filter(|v| **v != 0.0)
                .count(),
            1
        );
        assert!(conv[30 * 24 * 9..31 * 24 * 9].iter().all(|v| *v != 0.0));
        let mut tape = Tape::new(Threads(1));
        let step = tape.step(&params, StepKey::new(0, 0));
        let images: Vec<f32> = (0..2 * 3072).map(|i| (i % 17) as f32 / 17.0).collect();
        let scores = net.forward(step.input(&images, &[2, 32, 32, 3]).expect("images"));
        let scores = scores.expect("scores");
        assert_eq!(scores.shape(), [2, 10]);
        assert!(scores.data().iter().all(|v| v.is_finite()));
    }

    #[test]
    fn it_has_as_many_parameters_as_documented() {
        let mut scope = Scope::new(Seed(3));
        ResNet9::new(&mut scope, 10);
        assert_eq!(scope.build().expect("model").numel(), 1_971_640);
    }
}
