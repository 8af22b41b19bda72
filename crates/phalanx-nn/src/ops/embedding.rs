//! Rows of a parameter, chosen by numbers; the gradient is dense. Saves the numbers.
//!
//! *Order*: gradients of a row are added in the order of the numbers.

use crate::kernels::Mode;
use crate::param::ParamId;
use crate::pool::Buf;
use crate::tape::{Pass, Recorded, SlotId, Step, Visit};
use crate::tensor::{Shape, Tensor};
use crate::{Error, Result};

pub(crate) struct Embedding {
    out: SlotId,
    /// Bits of the numbers.
    indices: SlotId,
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
        let out = {
            let mut st = self.state();
            let mut buf = st.pool.get(to.numel());
            let table = self.params().get(weight);
            let rows = buf.slice_mut().chunks_exact_mut(width.max(1));
            for (row, &i) in rows.zip(indices) {
                row.copy_from_slice(&table[i as usize * width..][..width]);
            }
            let training = st.training;
            let out = st.add_output(to, buf, training);
            if training {
                let mut kept = st.pool.get(indices.len());
                for (k, &i) in kept.slice_mut().iter_mut().zip(indices) {
                    *k = f32::from_bits(i);
                }
                let indices = st.add_aux(kept)?;
                st.record(Embedding {
                    out,
                    indices,
                    weight,
                    width,
                    padding,
                });
            }
            out
        };
        Ok(Tensor::new(self, out))
    }
}

impl Recorded for Embedding {
    fn visit(&self, f: &mut dyn FnMut(Visit)) {
        f(Visit::Output(self.out));
        f(Visit::Param(self.weight));
        f(Visit::Saved(self.indices));
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: Buf) -> Result<()> {
        let indices = pass.value(self.indices);
        let width = self.width;
        pass.param(self.weight, |dw, mode| {
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
        pass.pool().put(dy);
        Ok(())
    }
}
