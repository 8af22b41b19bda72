//! Sizes of one convolution.

use crate::Precision;

/// Sizes are (height, width); channels are innermost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvShape {
    /// Images of the batch.
    pub images: usize,
    /// Size of the input.
    pub input: [usize; 2],
    /// Size of the output.
    pub output: [usize; 2],
    /// Input channels, of all groups.
    pub inp: usize,
    /// Output channels, of all groups.
    pub out: usize,
    /// Size of the kernel.
    pub kernel: [usize; 2],
    /// Distance between two places of the kernel.
    pub stride: [usize; 2],
    /// Zeros around the input.
    pub padding: [usize; 2],
    /// Distance between two taps of the kernel.
    pub dilation: [usize; 2],
    /// Groups of channels.
    pub groups: usize,
    /// Data type of the operands; layers with groups always multiply f32.
    pub precision: Precision,
}

impl ConvShape {
    /// The product of matrices of `rows` x `inp` and of `inp` x `out`, as a 1x1 convolution.
    pub fn product(rows: usize, [inp, out]: [usize; 2], precision: Precision) -> Self {
        ConvShape {
            images: 1,
            input: [1, rows],
            output: [1, rows],
            inp,
            out,
            kernel: [1, 1],
            stride: [1, 1],
            padding: [0, 0],
            dilation: [1, 1],
            groups: 1,
            precision,
        }
    }

    /// Size of the output along one dimension; `None` when the kernel does not
    /// fit, the image is empty, or the stride or the dilation is 0.
    pub fn out_size(
        input: usize,
        kernel: usize,
        stride: usize,
        padding: usize,
        dilation: usize,
    ) -> Option<usize> {
        if input == 0 || dilation == 0 {
            return None;
        }
        let reach = dilation
            .checked_mul(kernel.checked_sub(1)?)?
            .checked_add(1)?;
        let span = input
            .checked_add(padding.checked_mul(2)?)?
            .checked_sub(reach)?;
        Some(span.checked_div(stride)? + 1)
    }

    /// Elements of one input image.
    pub fn in_len(&self) -> usize {
        self.input[0] * self.input[1] * self.inp
    }

    /// Elements of one output image.
    pub fn out_len(&self) -> usize {
        self.pixels() * self.out
    }

    /// Pixels of one output image.
    pub fn pixels(&self) -> usize {
        self.output[0] * self.output[1]
    }

    /// Input channels of one group.
    pub fn group_in(&self) -> usize {
        self.inp / self.groups
    }

    /// Output channels of one group.
    pub fn group_out(&self) -> usize {
        self.out / self.groups
    }

    /// Products summed into one output element.
    pub fn depth(&self) -> usize {
        self.kernel[0] * self.kernel[1] * self.group_in()
    }

    /// Elements of the weights.
    pub(crate) fn weight_len(&self) -> usize {
        self.depth() * self.out
    }

    /// Floating-point operations of each of the three passes.
    pub fn flops(&self) -> u64 {
        2 * (self.images * self.pixels() * self.weight_len()) as u64
    }
}
