//! Global tensors of whole numbers: tokens and labels.

use std::rc::Rc;

use crate::boxing::Boxing;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::placement::Placement;
use crate::sbp::{self, Sbp};

/// A global tensor of whole numbers: tokens, labels. It has no gradient.
#[derive(Clone, Debug)]
pub struct Indices {
    placement: Placement,
    layout: Rc<Layout>,
    local: Rc<[u32]>,
}

impl Indices {
    pub(crate) fn new(
        placement: &Placement,
        all: &[u32],
        shape: &[usize],
        sbp: &[Sbp],
    ) -> Result<Self> {
        if all.len() != shape.iter().product::<usize>() {
            return Err(Error::usage(format!(
                "{} numbers for shape {shape:?}",
                all.len()
            )));
        }
        let mesh = placement.sizes();
        let whole = Layout::even(mesh, shape, &vec![Sbp::Broadcast; mesh.len()])?;
        let whole = Indices {
            placement: placement.clone(),
            layout: Rc::new(whole),
            local: all.into(),
        };
        whole.to(&Layout::even(mesh, shape, sbp)?)
    }

    /// Makes global numbers of each rank's own part, `local` of that shape, as
    /// [`GlobalStep::to_global`](crate::GlobalStep::to_global) does of tensors.
    ///
    /// *Blocks until* all ranks of the mesh call it.
    ///
    /// # Errors
    /// `Mismatch` naming the first difference between the ranks; `Usage` when the SBP does not fit.
    pub fn from_local(
        placement: &Placement,
        local: &[u32],
        shape: &[usize],
        sbp: &[Sbp],
    ) -> Result<Self> {
        if local.len() != shape.iter().product::<usize>() {
            return Err(Error::usage(format!(
                "{} numbers for shape {shape:?}",
                local.len()
            )));
        }
        refuse_partial(sbp)?;
        let layout = crate::step::joined_layout(placement, shape, sbp)?;
        Ok(Indices {
            placement: placement.clone(),
            layout: Rc::new(layout),
            local: local.into(),
        })
    }

    /// Shape, SBP and ranges.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// This rank's part.
    pub fn local(&self) -> &[u32] {
        &self.local
    }

    /// The same numbers in another layout.
    pub(crate) fn to(&self, layout: &Layout) -> Result<Self> {
        if *self.layout == *layout {
            return Ok(self.clone());
        }
        refuse_partial(layout.sbp())?;
        let boxing = Boxing::plan(&self.placement, &self.layout, layout)?;
        // Conversions between ranges and whole tensors copy, and never add.
        let bits: Vec<f32> = self.local.iter().map(|n| f32::from_bits(*n)).collect();
        let part = boxing.run(&self.placement, &bits)?;
        Ok(Indices {
            placement: self.placement.clone(),
            layout: Rc::new(layout.clone()),
            local: part.into_iter().map(f32::to_bits).collect(),
        })
    }
}

fn refuse_partial(sbp: &[Sbp]) -> Result<()> {
    match sbp.iter().any(|s| s.is_partial()) {
        true => Err(Error::usage(format!(
            "numbers that choose rows or classes cannot be partial, as {} says",
            sbp::list(sbp)
        ))),
        false => Ok(()),
    }
}
