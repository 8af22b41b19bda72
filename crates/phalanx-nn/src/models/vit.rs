//! The vision transformer (A. Dosovitskiy et al., "An image is worth 16x16 words", 2021) as torchvision builds it, under its
//! names (`encoder.layers.encoder_layer_0.self_attention.in_proj_weight`, `heads.head.bias`).

use crate::layers::{Conv2d, Conv2dOptions, Dropout, LayerNorm, Linear, MultiHeadAttention};
use crate::param::{Init, Layout, ParamId, Scope};
use crate::{Result, Tensor, refuse};

/// Sizes of a [`Vit`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VitConfig {
    /// Side of the images, in pixels.
    pub image: usize,
    /// Side of the square patches that are cut from them; it divides `image`.
    pub patch: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Heads of each attention; they divide `width`.
    pub heads: usize,
    /// Size of the vector of a patch.
    pub width: usize,
    /// Size of the inner layer of each block.
    pub mlp: usize,
    /// Number of classes.
    pub classes: usize,
    /// Probability with which elements are zeroed in training: after the positions are added, and after each layer of the MLP
    /// and of the attention.
    pub dropout: f64,
}

impl VitConfig {
    /// ViT-B/16 (torchvision: `vit_b_16`) for images of 224 x 224: 86,567,656 parameters for a thousand classes.
    pub fn b_16(classes: usize) -> Self {
        VitConfig {
            image: 224,
            patch: 16,
            layers: 12,
            heads: 12,
            width: 768,
            mlp: 3072,
            classes,
            dropout: 0.0,
        }
    }
}

/// torchvision's eps of layer norms.
const EPS: f64 = 1e-6;

#[derive(Clone, Debug)]
struct Block {
    ln_1: LayerNorm,
    attention: MultiHeadAttention,
    ln_2: LayerNorm,
    mlp: [Linear; 2],
    dropout: Dropout,
}

impl Block {
    fn new(mut scope: Scope, config: &VitConfig, dropout: Dropout) -> Self {
        let width = config.width;
        let ln_1 = LayerNorm::new(scope.enter("ln_1"), &[width]).eps(EPS);
        let attention = MultiHeadAttention::new(scope.enter("self_attention"), width, config.heads);
        let ln_2 = LayerNorm::new(scope.enter("ln_2"), &[width]).eps(EPS);
        let mut mlp = scope.enter("mlp");
        Block {
            ln_1,
            attention,
            ln_2,
            mlp: [
                Linear::new(mlp.enter("0"), width, config.mlp),
                Linear::new(mlp.enter("3"), config.mlp, width),
            ],
            dropout,
        }
    }

    fn forward<'s>(&self, x: Tensor<'s>) -> Result<Tensor<'s>> {
        let y = self.ln_1.forward(x.share())?;
        let x = x.add(self.dropout.forward(self.attention.forward(y, false)?)?)?;
        let y = self.mlp[0].forward(self.ln_2.forward(x.share())?)?.gelu()?;
        let y = self.mlp[1].forward(self.dropout.forward(y)?)?;
        x.add(self.dropout.forward(y)?)
    }
}

/// Patches of the image and a token for its class, an encoder of transformer blocks, and a linear layer behind the class token.
///
/// Initial weights are the layers' defaults, the positions' normal with standard deviation 0.02, the class token and the head
/// zero; torchvision draws other ones for the first convolution and the MLPs.
#[derive(Clone, Debug)]
pub struct Vit {
    class_token: ParamId,
    conv_proj: Conv2d,
    positions: ParamId,
    blocks: Vec<Block>,
    ln: LayerNorm,
    head: Linear,
    image: usize,
    width: usize,
    dropout: Dropout,
}

impl Vit {
    /// Of these sizes.
    pub fn new(scope: &mut Scope, config: &VitConfig) -> Self {
        let (width, zero) = (config.width, Init::Constant(0.0));
        let dropout = Dropout::new(config.dropout);
        let class_token = scope.param("class_token", &[1, 1, width], Layout::Same, zero);
        let patches = Conv2dOptions::new(config.patch).stride(config.patch);
        let conv_proj = Conv2d::new(scope.enter("conv_proj"), 3, width, patches);
        let mut encoder = scope.enter("encoder");
        let length = (config.image / config.patch.max(1)).pow(2) + 1;
        let normal = Init::Normal {
            mean: 0.0,
            std: 0.02,
        };
        let positions = encoder.param("pos_embedding", &[1, length, width], Layout::Same, normal);
        let mut layers = encoder.enter("layers");
        let block = |i| Block::new(layers.enter(&format!("encoder_layer_{i}")), config, dropout);
        let blocks = (0..config.layers).map(block).collect();
        let ln = LayerNorm::new(encoder.enter("ln"), &[width]).eps(EPS);
        let head = Linear::new(scope.enter("heads").enter("head"), width, config.classes);
        for param in [Some(head.weight), head.bias].into_iter().flatten() {
            scope.redraw(param, zero);
        }
        Vit {
            class_token,
            conv_proj,
            positions,
            blocks,
            ln,
            head,
            image: config.image,
            width,
            dropout,
        }
    }

    /// Images (N, H, W, 3) to logits (N, classes).
    ///
    /// # Errors
    /// `Usage` for images of another size than the configuration's.
    pub fn forward<'s>(&self, images: Tensor<'s>) -> Result<Tensor<'s>> {
        let (step, side) = (images.step(), self.image);
        if !matches!(*images.shape(), [_, height, width, _] if [height, width] == [side; 2]) {
            refuse!("the model is for images of {side} x {side} pixels");
        }
        let patches = self.conv_proj.forward(images)?;
        let shape = patches.shape();
        let (n, count) = (shape[0], shape[1] * shape[2]);
        let patches = patches.reshape(&[n, count, self.width])?;
        // The token of each image.
        let zeros = step.input(&vec![0.0; n * self.width], &[n, 1, self.width])?;
        let token = zeros.add(step.parameter(self.class_token)?)?;
        let x = step.concat(vec![token, patches], 1)?;
        let x = x.add(step.parameter(self.positions)?)?;
        let x = self.dropout.forward(x)?;
        let x = (self.blocks.iter()).try_fold(x, |x, block| block.forward(x))?;
        let x = self.ln.forward(x)?.slice(1, 0..1)?;
        self.head.forward(x.reshape(&[n, self.width])?)
    }
}
