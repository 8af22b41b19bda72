//! Residual networks: the CIFAR variant of the distributed-training guide, and
//! the ImageNet ones of torchvision.

use super::ConvNorm;
use crate::layers::{Act, Conv2dOptions, Linear, MaxPool2d, MaxPool2dOptions};
use crate::param::Scope;
use crate::{Result, Value};

/// Two or three convolutions and a residual connection.
#[derive(Clone, Debug)]
struct Block {
    /// All but the last are followed by a ReLU.
    path: Vec<ConvNorm>,
    shortcut: Option<ConvNorm>,
}

impl Block {
    fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        let around = match &self.shortcut {
            Some(s) => s.forward(x.share(), Act::None)?,
            None => x.share(),
        };
        let mut x = x;
        let last = self.path.len() - 1;
        for layer in &self.path[..last] {
            x = layer.forward(x, Act::Relu)?;
        }
        let end = &self.path[last];
        end.norm
            .forward_residual(end.conv.forward(x)?, around, Act::Relu)
    }
}

fn three(stride: usize) -> Conv2dOptions {
    Conv2dOptions::new(3).stride(stride).padding(1)
}

fn one(stride: usize) -> Conv2dOptions {
    Conv2dOptions::new(1).stride(stride)
}

/// The CIFAR ResNet-18 of the distributed-training guide: 62 tensors,
/// 11,173,962 parameters for ten classes, under the names of its checkpoints
/// (`conv2.0.residual_function.0.weight`, `dense_layer.bias`).
#[derive(Clone, Debug)]
pub struct CifarResNet {
    stem: ConvNorm,
    blocks: Vec<Block>,
    head: Linear,
    recomputes: bool,
}

impl CifarResNet {
    /// Widths 64, 128, 256, 512, two blocks each.
    pub fn resnet18(scope: &mut Scope, classes: usize) -> Self {
        Self::new(scope, &[64, 128, 256, 512], 2, classes)
    }

    /// One stage of `blocks` basic blocks per width; all stages but the first
    /// start by halving the image.
    pub fn new(scope: &mut Scope, widths: &[usize], blocks: usize, classes: usize) -> Self {
        let mut width = widths.first().copied().unwrap_or(1);
        let stem = ConvNorm::new(&mut scope.enter("conv1"), ["0", "1"], [3, width], three(1));
        let mut all = Vec::new();
        for (stage, &out) in widths.iter().enumerate() {
            let mut scope = scope.enter(&format!("conv{}", stage + 2));
            for i in 0..blocks {
                let stride = if stage > 0 && i == 0 { 2 } else { 1 };
                let mut scope = scope.enter(&i.to_string());
                let mut path = scope.enter("residual_function");
                let first = ConvNorm::new(&mut path, ["0", "1"], [width, out], three(stride));
                let second = ConvNorm::new(&mut path, ["3", "4"], [out, out], three(1));
                let shortcut = (stride != 1 || width != out).then(|| {
                    let mut scope = scope.enter("shortcut");
                    ConvNorm::new(&mut scope, ["0", "1"], [width, out], one(stride))
                });
                all.push(Block {
                    path: vec![first, second],
                    shortcut,
                });
                width = out;
            }
        }
        CifarResNet {
            stem,
            blocks: all,
            head: Linear::new(scope.enter("dense_layer"), width, classes),
            recomputes: false,
        }
    }

    /// Sets whether backward recomputes each block's activations (less memory, more time;
    /// [`Value::recompute`]); no bit changes.
    #[must_use]
    pub fn recompute(mut self, on: bool) -> Self {
        self.recomputes = on;
        self
    }

    /// Images (N, H, W, 3) to logits (N, classes).
    ///
    /// # Errors
    /// `Usage` for other shapes.
    pub fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        let x = self.stem.forward(x, Act::Relu)?;
        let x = super::through(&self.blocks, self.recomputes, x, Block::forward)?;
        self.head.forward(x.global_avg_pool()?)
    }
}

/// torchvision's residual networks for large images, under its names
/// (`layer1.0.conv1.weight`, `fc.bias`).
///
/// Initial weights are PyTorch's layer defaults; torchvision draws others (normal,
/// fan-out) afterwards.
#[derive(Clone, Debug)]
pub struct ResNet {
    stem: ConvNorm,
    pool: MaxPool2d,
    blocks: Vec<Block>,
    head: Linear,
    recomputes: bool,
}

impl ResNet {
    /// 18 layers.
    pub fn resnet18(scope: &mut Scope, classes: usize) -> Self {
        Self::new(scope, [2, 2, 2, 2], false, classes)
    }

    /// 34 layers.
    pub fn resnet34(scope: &mut Scope, classes: usize) -> Self {
        Self::new(scope, [3, 4, 6, 3], false, classes)
    }

    /// 50 layers, of bottleneck blocks.
    pub fn resnet50(scope: &mut Scope, classes: usize) -> Self {
        Self::new(scope, [3, 4, 6, 3], true, classes)
    }

    fn new(scope: &mut Scope, depths: [usize; 4], bottleneck: bool, classes: usize) -> Self {
        let seven = Conv2dOptions::new(7).stride(2).padding(3);
        let stem = ConvNorm::new(scope, ["conv1", "bn1"], [3, 64], seven);
        let (mut width, mut blocks) = (64, Vec::new());
        for (stage, depth) in depths.into_iter().enumerate() {
            let mut scope = scope.enter(&format!("layer{}", stage + 1));
            let inner = 64 << stage;
            let out = if bottleneck { 4 * inner } else { inner };
            for i in 0..depth {
                let stride = if stage > 0 && i == 0 { 2 } else { 1 };
                let mut scope = scope.enter(&i.to_string());
                let names = [["conv1", "bn1"], ["conv2", "bn2"], ["conv3", "bn3"]];
                let path = if bottleneck {
                    vec![
                        ConvNorm::new(&mut scope, names[0], [width, inner], one(1)),
                        ConvNorm::new(&mut scope, names[1], [inner, inner], three(stride)),
                        ConvNorm::new(&mut scope, names[2], [inner, out], one(1)),
                    ]
                } else {
                    vec![
                        ConvNorm::new(&mut scope, names[0], [width, inner], three(stride)),
                        ConvNorm::new(&mut scope, names[1], [inner, out], three(1)),
                    ]
                };
                let shortcut = (stride != 1 || width != out).then(|| {
                    let mut scope = scope.enter("downsample");
                    ConvNorm::new(&mut scope, ["0", "1"], [width, out], one(stride))
                });
                blocks.push(Block { path, shortcut });
                width = out;
            }
        }
        ResNet {
            stem,
            pool: MaxPool2d::new(MaxPool2dOptions::new(3).stride(2).padding(1)),
            blocks,
            head: Linear::new(scope.enter("fc"), width, classes),
            recomputes: false,
        }
    }

    /// Sets whether backward recomputes each block's activations (less memory, more time;
    /// [`Value::recompute`]); no bit changes.
    #[must_use]
    pub fn recompute(mut self, on: bool) -> Self {
        self.recomputes = on;
        self
    }

    /// Images (N, H, W, 3) to logits (N, classes).
    ///
    /// # Errors
    /// `Usage` for other shapes.
    pub fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        let x = self.pool.forward(self.stem.forward(x, Act::Relu)?)?;
        let x = super::through(&self.blocks, self.recomputes, x, Block::forward)?;
        self.head.forward(x.global_avg_pool()?)
    }
}
