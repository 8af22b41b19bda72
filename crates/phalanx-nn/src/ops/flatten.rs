//! Images to rows in PyTorch's order. Saves nothing.

use crate::kernels::transpose::transpose;
use crate::pool::Buf;
use crate::tape::{Compute, Pass, Recorded, SlotId, Visit};
use crate::tensor::Shape;
use crate::{Error, Result, Tensor};

pub(crate) struct Flatten {
    x: SlotId,
    out: SlotId,
    pixels: usize,
    channels: usize,
}

impl<'s> Tensor<'s> {
    /// One row per sample. An image (N, H, W, C) becomes (N, C·H·W) in
    /// PyTorch's element order (channel, row, column), so that the weights of
    /// a following linear layer are PyTorch's.
    ///
    /// # Errors
    /// `Usage` for a tensor without dimensions.
    pub fn flatten(self) -> Result<Tensor<'s>> {
        let dims = self.dims();
        let &[n, h, w, c] = &*dims else {
            let Some((&n, rest)) = dims.split_first() else {
                return Err(Error::usage("flatten of a tensor without dimensions"));
            };
            return self.reshape(&[n, rest.iter().product()]);
        };
        let (pixels, channels) = (h * w, c);
        if pixels <= 1 || channels <= 1 {
            return self.reshape(&[n, pixels * channels]);
        }
        let (step, x) = (self.step(), self.slot());
        let shape = Shape::new(&[n, pixels * channels])?;
        let out = {
            let mut st = step.state();
            let buf = compute(&mut step.compute(&mut st), x, [pixels, channels]);
            let wants = st.wants_grad(x);
            let out = st.add_output(shape, buf, wants);
            if wants {
                st.record(Flatten {
                    x,
                    out,
                    pixels,
                    channels,
                });
            }
            out
        };
        Ok(Tensor::new(step, out))
    }
}

fn compute(c: &mut Compute<'_>, x: SlotId, [pixels, channels]: [usize; 2]) -> Buf {
    let mut buf = c.state.pool.get(c.state.shape(x).numel());
    let from = c.state.value(x);
    c.team.split(buf.slice_mut(), pixels * channels, |at, to| {
        transpose(&from[at..at + to.len()], to, pixels, channels);
    });
    buf
}

impl Recorded for Flatten {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Input(self.x));
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: Buf) -> Result<()> {
        let mut dx = pass.pool().get(dy.slice().len());
        let from = dy.slice();
        pass.team
            .split(dx.slice_mut(), self.pixels * self.channels, |at, to| {
                transpose(&from[at..at + to.len()], to, self.channels, self.pixels);
            });
        pass.pool().put(dy);
        pass.give(self.x, dx);
        Ok(())
    }

    fn repeats(&self) -> bool {
        true
    }

    fn again(&self, c: &mut Compute<'_>) -> Result<Buf> {
        Ok(compute(c, self.x, [self.pixels, self.channels]))
    }
}
