//! Dropout. Saves nothing: backward computes the mask again.

use std::ops::Range;

use crate::pool::Buf;
use crate::tape::{BackwardContext, Compute, Operation, SlotId, Slots};
use crate::tensor::Shape;
use crate::{Result, Step, Tensor, refuse};
use phalanx_kernels::dropout::{Block, MaskKey, Rate, Share, apply};

pub(crate) struct Dropout {
    /// This tensor's samples among those of the step.
    rows: Range<usize>,
    key: MaskKey,
    rate: Rate,
    share: Share,
    block: Block,
}

impl<'s> Tensor<'s> {
    /// In training, zeroes each element with probability `p` and multiplies
    /// the others by 1 / (1 - p); in inference, does nothing.
    ///
    /// The mask is a function of the step's key, the sample's id, the number of
    /// this random operation within the step and the element's place.
    ///
    /// # Errors
    /// `Usage` when `p` is not within 0 and 1, or the key's number of samples differs
    /// from the outermost dimension.
    pub fn dropout(self, p: f64) -> Result<Tensor<'s>> {
        let dims = self.dims();
        self.drop_out(p, (&dims, &[0; 6][..dims.len()]), false)
    }

    /// As [`dropout`](Tensor::dropout), but whole channels of images (N, H, W, C).
    ///
    /// # Errors
    /// As [`dropout`](Tensor::dropout), and when this is not a batch of images.
    pub fn dropout2d(self, p: f64) -> Result<Tensor<'s>> {
        let dims = self.image_dims("dropout2d")?;
        self.drop_out(p, (&dims, &[0; 4]), true)
    }

    /// This tensor is the block that begins at `start` of a tensor of shape `full`: the same
    /// elements are dropped as by [`dropout`](Tensor::dropout) of that tensor. The step's
    /// key, if it has samples, has all `full[0]` of them. The block may be empty.
    ///
    /// # Errors
    /// `Usage` when `p` is not within 0 and 1, the block is not inside `full`, or the key has
    /// another number of samples.
    pub fn dropout_block(self, p: f64, full: &[usize], start: &[usize]) -> Result<Tensor<'s>> {
        self.drop_out(p, (full, start), false)
    }

    /// As [`dropout_block`](Tensor::dropout_block), of [`dropout2d`](Tensor::dropout2d): whole
    /// channels of images (N, H, W, C).
    ///
    /// # Errors
    /// As [`dropout_block`](Tensor::dropout_block), and when this is not a batch of images.
    pub fn dropout2d_block(self, p: f64, full: &[usize], start: &[usize]) -> Result<Tensor<'s>> {
        self.image_dims("dropout2d")?;
        self.drop_out(p, (full, start), true)
    }

    fn drop_out(
        self,
        p: f64,
        (full, start): (&[usize], &[usize]),
        channels: bool,
    ) -> Result<Tensor<'s>> {
        check_rate(p)?;
        let (step, own) = (self.step(), self.dims());
        let (Some(&rows), Some(&wide)) = (own.first(), own.last()) else {
            refuse!("dropout of a tensor without dimensions");
        };
        Shape::new(full)?; // its places can be counted
        let end = |i: usize| start[i].checked_add(own[i]);
        let same = [full.len(), start.len()] == [own.len(); 2];
        if !same || !(0..own.len()).all(|i| end(i).is_some_and(|end| end <= full[i])) {
            refuse!("dropout: a block of shape {own:?} at {start:?} does not lie in {full:?}");
        }
        let Some((key, rate)) = next_mask(step, p, full[0])? else {
            return Ok(self);
        };
        let inner = if channels { own.len() - 1 } else { 1 };
        let share = if channels {
            Share::Channel(wide)
        } else {
            Share::Element
        };
        let op = Dropout {
            rows: start[0]..start[0] + rows,
            key,
            rate,
            share,
            block: Block::new(&full[inner..], &start[inner..], &own[inner..]),
        };
        step.apply([self.slot()], own, op)
    }
}

impl Step<'_> {
    /// The factors, each 0 or 1 / (1 - p), with which the next [dropout](Tensor::dropout) of this step multiplies a tensor of
    /// `shape`, or with `channels` [that](Tensor::dropout2d) of whole channels; `None` if it changes nothing. For engines that
    /// compute [elsewhere](Step::computed).
    ///
    /// # Errors
    /// As [`Tensor::dropout`].
    pub fn dropout_mask(
        &self,
        p: f64,
        shape: &[usize],
        channels: bool,
    ) -> Result<Option<Vec<f32>>> {
        check_rate(p)?;
        if !self.learns() {
            return Ok(None);
        }
        let ones = vec![1.0; shape.iter().product()];
        let ones = self.input(&ones, shape)?;
        let mask = match channels {
            true => ones.dropout2d(p)?,
            false => ones.dropout(p)?,
        };
        Ok((p > 0.0).then(|| mask.to_vec()))
    }
}

pub(super) fn check_rate(p: f64) -> Result<()> {
    if (0.0..=1.0).contains(&p) {
        return Ok(());
    }
    refuse!("dropout probability {p} is not within 0 and 1")
}

/// The mask of an operation of this many samples that drops elements with this probability, if it drops any.
pub(super) fn next_mask(
    step: &Step<'_>,
    p: f64,
    samples: usize,
) -> Result<Option<(MaskKey, Rate)>> {
    if !step.state().learns() {
        return Ok(None);
    }
    // The operation is numbered even where p is 0, so that switching
    // one layer off does not change the others' masks.
    let key = step.state().next_mask(samples)?;
    Ok((p > 0.0).then(|| (key, Rate::new(p))))
}

impl Operation for Dropout {
    fn forward(&self, c: &mut Compute<'_>, [x]: [SlotId; 1]) -> Result<(Buf, Option<Buf>)> {
        let mut buf = c.state.take_for_writing(x);
        let (samples, y) = (c.state.samples(self.rows.clone()), buf.slice_mut());
        let mask = (self.key, self.rate);
        apply(c.threads, y, samples, mask, (self.share, &self.block));
        Ok((buf, None))
    }

    fn backward(&self, ctx: &mut BackwardContext<'_>, s: &Slots<1>, mut dy: Buf) -> Result<()> {
        let samples = ctx.samples(self.rows.clone());
        let (d, mask) = (dy.slice_mut(), (self.key, self.rate));
        apply(ctx.threads, d, samples, mask, (self.share, &self.block));
        ctx.give(s.x[0], dy);
        Ok(())
    }
}
