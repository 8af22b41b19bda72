//! Single kernels, to be timed: what `phalanx bench kernels` runs.

use crate::kernels::Mode;
use crate::kernels::conv::{self, ConvShape};
use crate::kernels::fma_peak;
use crate::layers::Conv2dOptions;
use crate::par::{Team, Threads};
use crate::pool::AlignedBuf;
use crate::{Error, Precision, Result};

/// One of the three passes of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvPass {
    /// Outputs from inputs.
    Forward,
    /// Input gradients from output gradients.
    InputGradient,
    /// Weight gradients from inputs and output gradients.
    WeightGradient,
}

impl ConvPass {
    /// All three.
    pub const ALL: [ConvPass; 3] = [
        ConvPass::Forward,
        ConvPass::InputGradient,
        ConvPass::WeightGradient,
    ];
}

/// One convolution with memory of its own, filled with made-up numbers.
pub struct Convolution {
    team: Team,
    shape: ConvShape,
    x: AlignedBuf,
    w: AlignedBuf,
    y: AlignedBuf,
    dx: AlignedBuf,
    dw: AlignedBuf,
    work: AlignedBuf,
}

/// Numbers in (-1, 1) without pattern.
fn noise(len: usize, mut state: u32) -> AlignedBuf {
    let mut b = AlignedBuf::zeroed(len);
    for v in b.iter_mut() {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *v = (state >> 8) as f32 / 8_388_608.0 - 1.0;
    }
    b
}

impl Convolution {
    /// `images` of (height, width, inputs), `outputs` channels; the bias of
    /// `options` is ignored. Layers with groups multiply f32 at any precision.
    ///
    /// # Errors
    /// `Usage` when the kernel does not fit the images or the groups do not divide the channels.
    pub fn new(
        images: usize,
        [height, width, inputs]: [usize; 3],
        outputs: usize,
        options: Conv2dOptions,
        threads: Threads,
        precision: Precision,
    ) -> Result<Self> {
        let o = options;
        let size = |d: usize, input| {
            ConvShape::out_size(input, o.kernel[d], o.stride[d], o.padding[d], o.dilation[d])
        };
        let (Some(oh), Some(ow)) = (size(0, height), size(1, width)) else {
            return Err(Error::usage(format!(
                "{o:?} does not fit images of {height} x {width}"
            )));
        };
        if o.groups == 0 || !inputs.is_multiple_of(o.groups) || !outputs.is_multiple_of(o.groups) {
            return Err(Error::usage(format!(
                "{} groups do not divide {inputs} inputs and {outputs} outputs",
                o.groups
            )));
        }
        let shape = ConvShape {
            images,
            input: [height, width],
            output: [oh, ow],
            inp: inputs,
            out: outputs,
            kernel: o.kernel,
            stride: o.stride,
            padding: o.padding,
            dilation: o.dilation,
            groups: o.groups,
            precision,
        };
        Ok(Convolution {
            team: Team::new(threads),
            shape,
            x: noise(images * shape.in_len(), 1),
            w: noise(shape.weight_len(), 2),
            y: noise(images * shape.out_len(), 3),
            dx: AlignedBuf::zeroed(images * shape.in_len()),
            dw: AlignedBuf::zeroed(shape.weight_len()),
            work: AlignedBuf::zeroed(conv::work_len(&shape)),
        })
    }

    /// Runs one pass once.
    pub fn run(&mut self, pass: ConvPass) {
        let (team, s, work) = (&self.team, &self.shape, &mut *self.work);
        match pass {
            ConvPass::Forward => {
                conv::forward(team, s, &self.x, &self.w, (None, false), work, &mut self.y);
            }
            ConvPass::InputGradient => {
                let memory = (work, &mut *self.dx);
                conv::input_gradient(team, s, &self.w, &self.y, memory, Mode::Write);
            }
            ConvPass::WeightGradient => {
                let mode = Mode::Write;
                conv::weight_gradient(team, s, &self.x, &self.y, work, &mut self.dw, mode);
            }
        }
    }

    /// Floating-point operations of one pass by the plain definition (a
    /// multiply-add is two), borders counted like the middle.
    pub fn flops(&self) -> f64 {
        2.0 * (self.shape.images * self.shape.out_len()) as f64 * self.shape.depth() as f64
    }
}

impl std::fmt::Debug for Convolution {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Convolution")
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

/// Fused multiply-adds per second of one core, in GFLOP/s (two each), measured
/// for about `milliseconds`: what no kernel can exceed.
pub fn fma_peak_gflops(milliseconds: u64) -> f64 {
    fma_peak::measure(std::time::Duration::from_millis(milliseconds))
}
