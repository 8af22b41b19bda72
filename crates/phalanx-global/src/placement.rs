//! Ranks as a mesh.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use phalanx_comm::{GroupOptions, ProcessGroup};

use crate::error::{Error, Result};

/// Ranks as a mesh of one to three dimensions, with names: OneFlow's placement, PyTorch's
/// `DeviceMesh`. Ranks are numbered row by row: on a mesh of 2 x 3, ranks 0, 1 and 2 are the
/// first row.
///
/// Clones are cheap and the same placement.
#[derive(Clone)]
pub struct Placement(Arc<Inner>);

struct Inner {
    /// The ranks of the mesh; on a rank that is not one of them, a group of itself.
    group: ProcessGroup,
    /// The group of which the mesh has ranks.
    outer: ProcessGroup,
    /// The ranks of the mesh as `outer` numbers them.
    ranks: Vec<usize>,
    /// This rank's number on the mesh; the number of ranks there if it is not on it.
    rank: usize,
    names: Vec<String>,
    sizes: Vec<usize>,
    coordinates: Vec<usize>,
    /// The ranks that differ from this one in one coordinate only, by dimension.
    lines: Vec<ProcessGroup>,
}

impl Placement {
    /// The ranks of `group` as a mesh with a name and a size for each dimension.
    ///
    /// ```
    /// use phalanx_comm::{GroupOptions, ProcessGroup};
    /// use phalanx_global::Placement;
    ///
    /// let group = ProcessGroup::threads(1, GroupOptions::default()).remove(0);
    /// let placement = Placement::new(&group, &[("data", 1), ("tensor", 1)])?;
    /// assert_eq!(placement.to_string(), "data=1,tensor=1");
    /// # Ok::<(), phalanx_global::Error>(())
    /// ```
    ///
    /// *Blocks until* all ranks of the group call it with the same arguments, at most the
    /// group's deadline.
    ///
    /// # Errors
    /// `Usage` when the sizes do not multiply to the group's, a name is empty or given twice, or there
    /// are no or more than three dimensions; `Comm` when the ranks do not agree.
    pub fn new(group: &ProcessGroup, dims: &[(&str, usize)]) -> Result<Self> {
        let all: Vec<usize> = (0..group.world_size()).collect();
        Self::of_ranks(group, dims, &all)
    }

    /// Some `ranks` of `group`, in ascending order, as a mesh: OneFlow's `flow.placement("cpu", ranks=[0, 2])`. The other ranks of
    /// the group hold nothing of a tensor on it; see [`GlobalStep::on`](crate::GlobalStep::on).
    ///
    /// ```
    /// use phalanx_comm::{GroupOptions, ProcessGroup};
    /// use phalanx_global::Placement;
    ///
    /// std::thread::scope(|scope| {
    ///     for group in ProcessGroup::threads(3, GroupOptions::default()) {
    ///         scope.spawn(move || {
    ///             let pair = Placement::of_ranks(&group, &[("data", 2)], &[0, 2]).unwrap();
    ///             assert_eq!(pair.is_member(), group.rank() != 1);
    ///         });
    ///     }
    /// });
    /// ```
    ///
    /// *Blocks until* all ranks of the group, also those that are not on the mesh, call it with the same arguments, at most
    /// the group's deadline.
    ///
    /// # Errors
    /// As [`new`](Self::new); `Usage` when the ranks do not ascend or are not the group's.
    pub fn of_ranks(group: &ProcessGroup, dims: &[(&str, usize)], ranks: &[usize]) -> Result<Self> {
        let text = show(dims.iter().map(|(name, size)| (*name, *size)));
        if dims.is_empty() || dims.len() > 3 {
            return Err(Error::usage(format!(
                "mesh {text:?} has {} dimensions; it may have one to three",
                dims.len()
            )));
        }
        let is_twice = |i: usize| dims[..i].iter().any(|d| d.0 == dims[i].0);
        if (0..dims.len()).any(|i| dims[i].0.is_empty() || is_twice(i)) {
            return Err(Error::usage(format!(
                "mesh {text:?} needs a different name for each dimension"
            )));
        }
        let sizes: Vec<usize> = dims.iter().map(|d| d.1).collect();
        let count = sizes.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        if count != Some(ranks.len()) {
            return Err(Error::usage(format!(
                "mesh {text} does not have {} ranks; its sizes must multiply to the number of ranks",
                ranks.len()
            )));
        }
        let world = group.world_size();
        if !ranks.is_sorted_by(|a, b| a < b) || ranks.last().is_none_or(|last| *last >= world) {
            return Err(Error::usage(format!(
                "ranks {ranks:?} of mesh {text} must ascend and be below {world}, the number of ranks of the group"
            )));
        }
        let failed = |e| Error::comm_while("the groups of the mesh could not be formed", e);
        let own = match ranks.len() == world {
            true => group.clone(),
            false => {
                let own = group.new_group(ranks).map_err(failed)?;
                let alone = || ProcessGroup::threads(1, GroupOptions::default()).remove(0);
                let own = own.unwrap_or_else(alone);
                own.end_with(group);
                own
            }
        };
        let mut lines = Vec::new();
        for dim in 0..dims.len() {
            lines.push(match dims.len() == 1 || !ranks.contains(&group.rank()) {
                true => own.clone(),
                false => line(&own, &sizes, dim)?,
            });
        }
        Ok(Self::made(dims, (own, group), ranks, lines))
    }

    fn made(
        dims: &[(&str, usize)],
        (group, outer): (ProcessGroup, &ProcessGroup),
        ranks: &[usize],
        lines: Vec<ProcessGroup>,
    ) -> Self {
        let sizes: Vec<usize> = dims.iter().map(|d| d.1).collect();
        Placement(Arc::new(Inner {
            names: dims.iter().map(|d| d.0.to_owned()).collect(),
            coordinates: coordinates(&sizes, group.rank()),
            sizes,
            outer: outer.clone(),
            rank: (ranks.iter().position(|r| *r == outer.rank())).unwrap_or(ranks.len()),
            ranks: ranks.to_vec(),
            group,
            lines,
        }))
    }

    /// The ranks of `group` as a mesh of one dimension, called `data`.
    pub fn of(group: &ProcessGroup) -> Self {
        let all: Vec<usize> = (0..group.world_size()).collect();
        let lines = vec![group.clone()];
        Self::made(&[("data", all.len())], (group.clone(), group), &all, lines)
    }

    /// The ranks of the mesh, as the group that it was made of numbers them.
    pub fn ranks(&self) -> &[usize] {
        &self.0.ranks
    }

    /// Whether this rank is on the mesh.
    pub fn is_member(&self) -> bool {
        self.0.rank < self.0.ranks.len()
    }

    /// The group that the mesh was made of.
    pub(crate) fn outer(&self) -> &ProcessGroup {
        &self.0.outer
    }

    /// The group of all ranks of the mesh; on a rank that is [not on it](Self::is_member), a group of that rank alone.
    pub fn group(&self) -> &ProcessGroup {
        &self.0.group
    }

    /// Size of each dimension.
    pub fn sizes(&self) -> &[usize] {
        &self.0.sizes
    }

    /// Name of each dimension.
    pub fn names(&self) -> &[String] {
        &self.0.names
    }

    /// The dimension of that name.
    pub fn dim(&self, name: &str) -> Option<usize> {
        self.0.names.iter().position(|n| n == name)
    }

    /// This rank's coordinate in each dimension.
    pub fn coordinates(&self) -> &[usize] {
        &self.0.coordinates
    }

    /// The group of the ranks that have this rank's coordinates in all dimensions but `dim`;
    /// a rank's number in it is its coordinate in `dim`.
    ///
    /// # Panics
    /// If there is no such dimension.
    pub fn line(&self, dim: usize) -> &ProcessGroup {
        &self.0.lines[dim]
    }

    /// This rank's number on the mesh; the number of ranks there if it is not on it.
    pub(crate) fn rank(&self) -> usize {
        self.0.rank
    }
}

impl PartialEq for Placement {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Placement {}

impl Hash for Placement {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.0).hash(state);
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes = self.0.sizes.iter().copied();
        f.write_str(&show(self.0.names.iter().map(String::as_str).zip(sizes)))?;
        match self.0.ranks.len() == self.0.outer.world_size() {
            true => Ok(()),
            false => write!(f, " on ranks {:?}", self.0.ranks),
        }
    }
}

impl fmt::Debug for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Placement({self}, rank {})", self.rank())
    }
}

fn show<'a>(dims: impl Iterator<Item = (&'a str, usize)>) -> String {
    let all: Vec<String> = dims.map(|(name, size)| format!("{name}={size}")).collect();
    all.join(",")
}

/// Makes the groups of all lines along `dim`, as every rank must; returns this rank's.
fn line(group: &ProcessGroup, sizes: &[usize], dim: usize) -> Result<ProcessGroup> {
    let own = coordinates(sizes, group.rank());
    let others = (0..sizes.len()).filter(|d| *d != dim);
    let color = others.fold(0, |n, d| n * sizes[d] + own[d]);
    let color = u32::try_from(color).unwrap_or(u32::MAX);
    let line = group
        .split(Some(color))
        .map_err(|e| Error::comm_while("the groups of the mesh could not be formed", e))?
        .ok_or_else(|| Error::usage("this rank is in no line of its mesh"))?;
    // A rank that waits here notices a failure elsewhere on the mesh.
    line.end_with(group);
    Ok(line)
}

/// The coordinates of a rank.
pub(crate) fn coordinates(sizes: &[usize], rank: usize) -> Vec<usize> {
    let mut rest = rank;
    let mut all = vec![0; sizes.len()];
    for (to, size) in all.iter_mut().zip(sizes).rev() {
        *to = rest % size.max(&1);
        rest /= size.max(&1);
    }
    all
}
