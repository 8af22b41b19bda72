//! MobileNetV2 (Sandler et al. 2018) as torchvision builds it, under its names
//! (`features.1.conv.0.0.weight`, `classifier.1.bias`).

use super::ConvNorm;
use crate::layers::{Act, Conv2dOptions, Dropout, Linear};
use crate::param::{Init, Scope};
use crate::{Result, Value};

/// Expansion, outputs, repetitions and first stride of each stage.
const STAGES: [[usize; 4]; 7] = [
    [1, 16, 1, 1],
    [6, 24, 2, 2],
    [6, 32, 3, 2],
    [6, 64, 4, 2],
    [6, 96, 3, 1],
    [6, 160, 3, 2],
    [6, 320, 1, 1],
];
/// Channels of the first and of the last convolution.
const STEM: usize = 32;
const LAST: usize = 1280;

/// An inverted residual: 1x1 up, depthwise 3x3, 1x1 down, with a residual connection
/// where sizes allow.
#[derive(Clone, Debug)]
struct Block {
    /// Each is followed by ReLU6.
    path: Vec<ConvNorm>,
    end: ConvNorm,
    residual: bool,
}

impl Block {
    fn new(mut scope: Scope, [inputs, outputs, expansion, stride]: [usize; 4]) -> Self {
        let mut scope = scope.enter("conv");
        let inner = inputs * expansion;
        let (one, mut path) = (Conv2dOptions::new(1), Vec::new());
        if expansion != 1 {
            let mut scope = scope.enter("0");
            path.push(ConvNorm::new(&mut scope, ["0", "1"], [inputs, inner], one));
        }
        let depthwise = Conv2dOptions::new(3)
            .stride(stride)
            .padding(1)
            .groups(inner);
        let at = path.len();
        path.push(ConvNorm::new(
            &mut scope.enter(&at.to_string()),
            ["0", "1"],
            [inner, inner],
            depthwise,
        ));
        let names = [(at + 1).to_string(), (at + 2).to_string()];
        Block {
            path,
            end: ConvNorm::new(&mut scope, [&names[0], &names[1]], [inner, outputs], one),
            residual: stride == 1 && inputs == outputs,
        }
    }

    fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        let around = self.residual.then(|| x.share());
        let mut x = x;
        for layer in &self.path {
            x = layer.forward(x, Act::Relu6)?;
        }
        let x = self.end.conv.forward(x)?;
        match around {
            Some(around) => self.end.norm.forward_residual(x, around, Act::None),
            None => self.end.norm.forward(x),
        }
    }
}

/// torchvision's `mobilenet_v2`: 158 tensors, 2,236,682 parameters for ten
/// classes; images are halved five times, so 32 x 32 ones end as one pixel.
#[derive(Clone, Debug)]
pub struct MobileNetV2 {
    stem: ConvNorm,
    blocks: Vec<Block>,
    last: ConvNorm,
    dropout: Dropout,
    head: Linear,
    recomputes: bool,
}

impl MobileNetV2 {
    /// Width 1, dropout 0.2 before the classifier, torchvision's initial
    /// weights (its draws in its order).
    pub fn new(scope: &mut Scope, classes: usize) -> Self {
        let mut features = scope.enter("features");
        let options = Conv2dOptions::new(3).stride(2).padding(1);
        let stem = ConvNorm::new(&mut features.enter("0"), ["0", "1"], [3, STEM], options);
        let (mut width, mut blocks) = (STEM, Vec::new());
        for [expansion, outputs, times, first] in STAGES {
            for i in 0..times {
                let stride = if i == 0 { first } else { 1 };
                let name = (blocks.len() + 1).to_string();
                let sizes = [width, outputs, expansion, stride];
                blocks.push(Block::new(features.enter(&name), sizes));
                width = outputs;
            }
        }
        let name = (blocks.len() + 1).to_string();
        let (sizes, one) = ([width, LAST], Conv2dOptions::new(1));
        let last = ConvNorm::new(&mut features.enter(&name), ["0", "1"], sizes, one);
        let head = Linear::new(scope.enter("classifier").enter("1"), LAST, classes);
        let net = MobileNetV2 {
            stem,
            blocks,
            last,
            dropout: Dropout::new(0.2),
            head,
            recomputes: false,
        };
        net.draw(scope);
        net
    }

    /// Sets the share of features that are dropped before the classifier.
    #[must_use]
    pub fn dropout(mut self, p: f64) -> Self {
        self.dropout = Dropout::new(p);
        self
    }

    /// torchvision draws all weights again, in the order of its modules:
    /// Kaiming-normal by fan-out, and 0.01 for the classifier.
    fn draw(&self, scope: &mut Scope) {
        scope.enter("features").initialize(|_, shape| {
            let &[outputs, _, height, width] = shape else {
                return None;
            };
            let std = 2f64.sqrt() / ((outputs * height * width) as f64).sqrt();
            Some(Init::Normal { mean: 0.0, std })
        });
        let std = 0.01;
        scope.redraw(self.head.weight, Init::Normal { mean: 0.0, std });
        if let Some(bias) = self.head.bias {
            scope.redraw(bias, Init::Constant(0.0));
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
        let x = self.stem.forward(x, Act::Relu6)?;
        let x = super::through(&self.blocks, self.recomputes, x, Block::forward)?;
        let x = self.last.forward(x, Act::Relu6)?.global_avg_pool()?;
        self.head.forward(self.dropout.forward(x)?)
    }
}
