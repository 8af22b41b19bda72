//! Rows of a table, selected by indices; the gradient is dense. Saves the indices.
//!
//! *Order*: gradients of a row are added in the order of the indices.

use super::Weight;
use crate::pool::Buf;
use crate::tape::{BackwardContext, Operand, Operation, Slots, Step};
use crate::tensor::{Shape, Tensor};
use crate::{Precision, Result, refuse};
use phalanx_kernels::Mode;

pub(crate) struct Embedding {
    weight: Operand,
    width: usize,
    padding: Option<u32>,
}

impl Step<'_> {
    /// Row `indices[i]` of `weight` (rows, width), a parameter or a tensor, for every i: a
    /// tensor of `shape` with the width added. The row `padding` gets no gradient.
    ///
    /// # Errors
    /// `Usage` when an index is not a row, their number does not match the shape, or the
    /// weight belongs to another step or model.
    pub fn embedding<'s>(
        &'s self,
        weight: impl Into<Weight<'s>>,
        indices: &[u32],
        shape: &[usize],
        padding: Option<u32>,
    ) -> Result<Tensor<'s>> {
        let weight = weight.into();
        let known = weight.known(self)?;
        let ([rows, width], name) = (known.matrix()?, known.name());
        if Shape::new(shape)?.numel() != indices.len() {
            refuse!(
                "embedding {name}: {} numbers for shape {shape:?}",
                indices.len()
            );
        }
        if let Some(i) = indices.iter().find(|i| **i as usize >= rows) {
            refuse!("embedding {name}: there is no row {i}, it has {rows}");
        }
        let mut sizes = [0; 6];
        let Some(head) = sizes.get_mut(..shape.len()).filter(|s| s.len() < 6) else {
            refuse!("embedding: shape {shape:?} and a width are too many dimensions");
        };
        head.copy_from_slice(shape);
        sizes[shape.len()] = width;
        let to = Shape::new(&sizes[..shape.len() + 1])?;
        let mut st = self.state();
        let mut buf = st.pool.get(to.numel());
        let mut kept = st.pool.get(indices.len());
        let c = self.compute(&mut st);
        let table = c.operand(known.operand);
        let rows = buf.slice_mut().chunks_exact_mut(width.max(1));
        for ((row, &i), kept) in rows.zip(indices).zip(kept.slice_mut()) {
            row.copy_from_slice(&table[i as usize * width..][..width]);
            *kept = f32::from_bits(i);
        }
        let op = Embedding {
            weight: known.operand,
            width,
            padding,
        };
        let made = (buf, Some(kept));
        self.emit(&mut st, [], (to, Precision::F32), made, op)
    }
}

/// Pieces of the weight's gradient.
const PIECES: usize = 16;

impl Operation<0> for Embedding {
    const RECOMPUTES: bool = false;

    fn operands(&self) -> [Option<Operand>; 2] {
        [Some(self.weight), None]
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<0>, dy: Buf) -> Result<()> {
        let indices = ctx.value(s.aux()?);
        let width = self.width;
        let (threads, d) = (ctx.threads, dy.slice());
        ctx.operand_grad(self.weight, |dw, mode| {
            // Few pieces, as each looks through all indices.
            let rows = dw.len().checked_div(width).unwrap_or(0);
            let piece = rows.div_ceil(PIECES) * width;
            threads.split(dw, piece, |at, dw| {
                if mode == Mode::Write {
                    dw.fill(0.0);
                }
                for (i, d) in indices.iter().zip(d.chunks_exact(width.max(1))) {
                    let i = i.to_bits();
                    let from = (i as usize * width).checked_sub(at);
                    let from = from.filter(|_| self.padding != Some(i));
                    if let Some(row) = from.and_then(|from| dw.get_mut(from..from + width)) {
                        row.iter_mut().zip(d).for_each(|(r, d)| *r += d);
                    }
                }
            });
        })?;
        ctx.pool().put(dy);
        Ok(())
    }
}
