//! Single kernels for benchmarks, as in `phalanx bench kernels`.

use crate::kernels::Mode;
use crate::kernels::conv::{self, ConvShape};
use crate::kernels::element::{Bf16, Values, ValuesMut, convert, elements_mut};
use crate::kernels::{bf16, fma_peak};
use crate::layers::Conv2dOptions;
use crate::par::{ThreadPool, Threads};
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

/// One convolution with its own memory, filled with pseudo-random numbers.
pub struct Convolution {
    threads: ThreadPool,
    shape: ConvShape,
    /// Of inputs, outputs and their gradients in memory.
    precision: Precision,
    x: AlignedBuf,
    w: AlignedBuf,
    y: AlignedBuf,
    dx: AlignedBuf,
    dw: AlignedBuf,
    work: AlignedBuf,
}

/// Numbers in (-1, 1) without pattern, as they lie in memory.
fn values(threads: &ThreadPool, precision: Precision, len: usize, state: u32) -> AlignedBuf {
    let values = noise(len, state);
    match precision {
        Precision::F32 => values,
        Precision::Bf16 => {
            let mut b = AlignedBuf::zeroed(precision.memory_len(len));
            convert(threads, &values, elements_mut::<Bf16>(&mut b, len));
            b
        }
    }
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
    /// `options` is ignored. Layers with groups multiply f32 at any precision; where
    /// others multiply bf16 their values lie in memory as bf16, as they do in a step.
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
        let threads = ThreadPool::new(threads);
        let precision = if conv::in_bf16(&shape) {
            Precision::Bf16
        } else {
            Precision::F32
        };
        let (inputs, outputs) = (images * shape.in_len(), images * shape.out_len());
        Ok(Convolution {
            shape,
            precision,
            x: values(&threads, precision, inputs, 1),
            w: noise(shape.weight_len(), 2),
            y: values(&threads, precision, outputs, 3),
            dx: AlignedBuf::zeroed(precision.memory_len(inputs)),
            dw: AlignedBuf::zeroed(shape.weight_len()),
            work: AlignedBuf::zeroed(conv::work_len(&shape)),
            threads,
        })
    }

    /// Runs one pass once.
    pub fn run(&mut self, pass: ConvPass) {
        let (threads, s, work) = (&self.threads, &self.shape, &mut *self.work);
        let (inputs, outputs) = (s.images * s.in_len(), s.images * s.out_len());
        let x = Values::of(&self.x, self.precision, inputs);
        match pass {
            ConvPass::Forward => {
                let y = ValuesMut::of(&mut self.y, self.precision, outputs);
                conv::forward(threads, s, x, &self.w, (None, false), work, y);
            }
            ConvPass::InputGradient => {
                let dy = Values::of(&self.y, self.precision, outputs);
                let dx = ValuesMut::of(&mut self.dx, self.precision, inputs);
                conv::input_gradient(threads, s, &self.w, dy, (work, dx), Mode::Write);
            }
            ConvPass::WeightGradient => {
                let dy = Values::of(&self.y, self.precision, outputs);
                let mode = Mode::Write;
                conv::weight_gradient(threads, s, x, dy, work, &mut self.dw, mode);
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

/// Operations per second of one core, in GFLOP/s (a multiply-add is two), measured for about
/// `milliseconds`: what no kernel that multiplies such numbers can exceed. Of bf16 that
/// is what tiles do without loading anything, where the processor has them.
pub fn peak_gflops(precision: Precision, milliseconds: u64) -> f64 {
    let time = std::time::Duration::from_millis(milliseconds);
    match precision {
        Precision::F32 => fma_peak::measure(time),
        Precision::Bf16 => bf16::peak::measure(time),
    }
}
