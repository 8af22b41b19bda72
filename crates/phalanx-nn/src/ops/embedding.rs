//! Rows of a parameter, chosen by numbers; the gradient is dense. Saves the numbers' bits.
//!
//! *Order*: gradients of a row are added in the order of the numbers.

use crate::kernels::Mode;
use crate::param::ParamId;
use crate::pool::Buf;
use crate::tape::{BackwardContext, Operation, Slots, Step};
use crate::tensor::{Shape, Tensor};
use crate::{Error, Precision, Result};

pub(crate) struct Embedding {
    weight: ParamId,
    width: usize,
    padding: Option<u32>,
}

impl Step<'_> {
    /// Row `indices[i]` of `weight` (rows, width) for every i: a tensor of `shape`
    /// with the width added. The row `padding` gets no gradient.
    ///
    /// # Errors
    /// `Usage` when a number is no row or their count is not the shape's.
    pub fn embedding<'s>(
        &'s self,
        weight: ParamId,
        indices: &[u32],
        shape: &[usize],
        padding: Option<u32>,
    ) -> Result<Tensor<'s>> {
        let info = self.info(weight)?;
        let &[rows, width] = &*info.shape else {
            return Err(Error::usage(format!(
                "embedding {} of shape {:?} is not a matrix",
                info.name, info.shape
            )));
        };
        if Shape::new(shape)?.numel() != indices.len() {
            return Err(Error::usage(format!(
                "embedding {}: {} numbers for shape {shape:?}",
                info.name,
                indices.len()
            )));
        }
        if let Some(i) = indices.iter().find(|i| **i as usize >= rows) {
            return Err(Error::usage(format!(
                "embedding {}: there is no row {i}, it has {rows}",
                info.name
            )));
        }
        let mut sizes = [0; 6];
        let Some(head) = sizes.get_mut(..shape.len()).filter(|s| s.len() < 6) else {
            return Err(Error::usage(format!(
                "embedding: shape {shape:?} and a width are too many dimensions"
            )));
        };
        head.copy_from_slice(shape);
        sizes[shape.len()] = width;
        let to = Shape::new(&sizes[..shape.len() + 1])?;
        let mut st = self.state();
        let mut buf = st.pool.get(to.numel());
        let mut kept = st.pool.get(indices.len());
        let table = self.params().get(weight);
        let rows = buf.slice_mut().chunks_exact_mut(width.max(1));
        for ((row, &i), kept) in rows.zip(indices).zip(kept.slice_mut()) {
            row.copy_from_slice(&table[i as usize * width..][..width]);
            *kept = f32::from_bits(i);
        }
        let op = Embedding {
            weight,
            width,
            padding,
        };
        let made = (buf, Some(kept));
        self.emit(&mut st, [], (to, Precision::F32), made, op)
    }
}

impl Operation<0> for Embedding {
    const RECOMPUTES: bool = false;

    fn params(&self) -> [Option<ParamId>; 2] {
        [Some(self.weight), None]
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<0>, dy: Buf) -> Result<()> {
        let indices = ctx.value(s.aux()?);
        let width = self.width;
        ctx.param(self.weight, |dw, mode| {
            if mode == Mode::Write {
                dw.fill(0.0);
            }
            for (i, d) in indices.iter().zip(dy.slice().chunks_exact(width.max(1))) {
                let i = i.to_bits();
                if self.padding == Some(i) {
                    continue;
                }
                let row = &mut dw[i as usize * width..][..width];
                row.iter_mut().zip(d).for_each(|(r, d)| *r += d);
            }
        })?;
        ctx.pool().put(dy);
        Ok(())
    }
}
