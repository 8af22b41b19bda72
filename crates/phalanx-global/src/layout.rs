//! Which part of a tensor each rank has.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::placement::coordinates;
use crate::sbp::{self, Sbp};

/// Shape, SBP of each mesh dimension, and the exact range of every rank's part.
///
/// Mesh dimensions that split the same axis cut it one after another: the first one into
/// ranges, the second one each of these.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    mesh: Vec<usize>,
    shape: Vec<usize>,
    sbp: Vec<Sbp>,
    /// Of each axis that is split: where the ranges begin, in order, and where the last one ends.
    cuts: Vec<Option<Cuts>>,
}

/// Where the ranges of a split axis begin, and its length.
pub(crate) type Cuts = Arc<[usize]>;

/// A part of a tensor: the range of each axis.
pub(crate) type Block = Vec<Range<usize>>;

/// `parts` ranges of `len` elements whose sizes differ by one at most, longer ones first.
pub(crate) fn even(len: usize, parts: usize) -> Vec<usize> {
    let (each, more) = (len / parts.max(1), len % parts.max(1));
    (0..=parts).map(|i| i * each + i.min(more)).collect()
}

impl Layout {
    /// Split axes are cut into ranges whose sizes differ by one at most, longer ones first
    /// (OneFlow's rule).
    ///
    /// # Errors
    /// `Usage` when there is not one SBP for each mesh dimension, or the shape lacks an axis.
    pub fn even(mesh: &[usize], shape: &[usize], sbp: &[Sbp]) -> Result<Self> {
        Self::cut_by(mesh, shape, sbp, |_| None)
    }

    /// As [`even`](Self::even), but with the ranges of some axes given: where each begins, and the
    /// axis's length.
    ///
    /// ```
    /// use phalanx_global::{Layout, Sbp};
    ///
    /// // Five rows over two ranks, of which the second has four.
    /// let layout = Layout::uneven(&[2], &[5, 3], &[Sbp::split(0)], &[(0, &[0, 1, 5])])?;
    /// assert_eq!(layout.block(1), [1..5, 0..3]);
    /// # Ok::<(), phalanx_global::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`even`](Self::even), and when ranges do not follow each other or are not one for each rank.
    pub fn uneven(
        mesh: &[usize],
        shape: &[usize],
        sbp: &[Sbp],
        cuts: &[(usize, &[usize])],
    ) -> Result<Self> {
        let given = |axis| cuts.iter().find(|c| c.0 == axis).map(|c| c.1.into());
        Self::cut_by(mesh, shape, sbp, given)
    }

    /// As [`even`](Self::even), with the ranges of some axes given.
    pub(crate) fn cut_by(
        mesh: &[usize],
        shape: &[usize],
        sbp: &[Sbp],
        mut given: impl FnMut(usize) -> Option<Cuts>,
    ) -> Result<Self> {
        if sbp.len() != mesh.len() {
            return Err(Error::usage(format!(
                "{} has {} entries for a mesh of {} dimensions",
                sbp::list(sbp),
                sbp.len(),
                mesh.len()
            )));
        }
        let mut cuts = vec![None; shape.len()];
        for axis in sbp.iter().filter_map(|s| match s {
            Sbp::Split(axis) => Some(*axis),
            _ => None,
        }) {
            let Some(&len) = shape.get(axis) else {
                return Err(Error::usage(format!(
                    "{} names axis {axis}, which a tensor of shape {shape:?} does not have",
                    sbp::list(sbp)
                )));
            };
            if cuts[axis].is_some() {
                continue;
            }
            let made = given(axis).unwrap_or_else(|| {
                let mut all = vec![0, len];
                for (dim, size) in mesh.iter().enumerate() {
                    if sbp[dim] == Sbp::Split(axis) {
                        all = refine(&all, *size);
                    }
                }
                all.into()
            });
            cuts[axis] = Some(made);
        }
        let layout = Layout {
            mesh: mesh.to_vec(),
            shape: shape.to_vec(),
            sbp: sbp.to_vec(),
            cuts,
        };
        layout.check()?;
        Ok(layout)
    }

    fn check(&self) -> Result<()> {
        for (axis, cuts) in self.cuts.iter().enumerate() {
            let Some(cuts) = cuts else { continue };
            let parts: usize = self.dims_of(axis).map(|d| self.mesh[d]).product();
            let fits = cuts.len() == parts + 1
                && cuts.is_sorted()
                && cuts.first() == Some(&0)
                && cuts.last() == Some(&self.shape[axis]);
            if !fits {
                return Err(Error::usage(format!(
                    "the cuts {cuts:?} do not divide axis {axis} of shape {:?} into {parts} ranges",
                    self.shape
                )));
            }
        }
        Ok(())
    }

    /// The mesh dimensions that split `axis`.
    pub(crate) fn dims_of(&self, axis: usize) -> impl Iterator<Item = usize> {
        (0..self.sbp.len()).filter(move |d| self.sbp[*d] == Sbp::Split(axis))
    }

    /// The whole tensor's shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// SBP of each mesh dimension.
    pub fn sbp(&self) -> &[Sbp] {
        &self.sbp
    }

    /// Size of each mesh dimension.
    pub fn mesh(&self) -> &[usize] {
        &self.mesh
    }

    /// Where the ranges of a split axis begin, and its length; `None` if it is not split.
    pub fn cuts(&self, axis: usize) -> Option<&[usize]> {
        self.cuts.get(axis)?.as_deref()
    }

    pub(crate) fn shared_cuts(&self, axis: usize) -> Option<Cuts> {
        self.cuts.get(axis)?.clone()
    }

    pub(crate) fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// The range of each axis that `rank` has.
    pub fn block(&self, rank: usize) -> Vec<Range<usize>> {
        let at = coordinates(&self.mesh, rank);
        let range = |axis: usize| match &self.cuts[axis] {
            None => 0..self.shape[axis],
            Some(cuts) => {
                let dims = self.dims_of(axis);
                let index = dims.fold(0, |index, d| index * self.mesh[d] + at[d]);
                cuts[index]..cuts[index + 1]
            }
        };
        (0..self.shape.len()).map(range).collect()
    }

    /// Number of elements that `rank` has.
    pub fn numel_of(&self, rank: usize) -> usize {
        self.shape_of(rank).iter().product()
    }

    pub(crate) fn ranks(&self) -> usize {
        self.mesh.iter().product()
    }

    /// Shape of the tensor that `rank` has: `[0]` if there is no such rank.
    pub fn shape_of(&self, rank: usize) -> Vec<usize> {
        if rank >= self.ranks() {
            return vec![0];
        }
        self.block(rank)
            .iter()
            .map(ExactSizeIterator::len)
            .collect()
    }

    /// The layout of the gradient of a value with this layout: whole tensors have partial gradients, sums
    /// whole ones, and split axes keep their ranges.
    pub fn of_gradient(&self) -> Self {
        Layout {
            sbp: self.sbp.iter().map(|s| s.of_gradient()).collect(),
            ..self.clone()
        }
    }

    /// The same with another SBP; ranges of axes that are still split by the same mesh dimensions
    /// stay, others are even.
    ///
    /// # Errors
    /// As [`even`](Self::even).
    pub fn with_sbp(&self, sbp: &[Sbp]) -> Result<Self> {
        Self::cut_by(&self.mesh, &self.shape, sbp, |axis| {
            let same = (0..sbp.len()).all(|d| {
                (sbp[d] == Sbp::Split(axis)) == (self.sbp.get(d) == Some(&Sbp::Split(axis)))
            });
            self.shared_cuts(axis).filter(|_| same)
        })
    }

    /// The cuts that remain of `axis` when only the first `outer` of the mesh dimensions that split it do so.
    pub(crate) fn outer_cuts(&self, axis: usize, outer: usize) -> Option<Cuts> {
        let cuts = self.cuts.get(axis)?.as_ref()?;
        let inner: usize = self
            .dims_of(axis)
            .skip(outer)
            .map(|d| self.mesh[d])
            .product();
        Some(cuts.iter().copied().step_by(inner.max(1)).collect())
    }
}

/// Cuts each range into `parts`.
pub(crate) fn refine(cuts: &[usize], parts: usize) -> Vec<usize> {
    let mut all = vec![0];
    for pair in cuts.windows(2) {
        let inner = even(pair[1] - pair[0], parts);
        all.extend(inner[1..].iter().map(|at| pair[0] + at));
    }
    all
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {}", self.shape, sbp::list(&self.sbp))
    }
}
