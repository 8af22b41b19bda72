//! Ranks as a mesh.

use std::fmt;
use std::sync::Arc;

use phalanx_comm::ProcessGroup;

use crate::error::{Error, Result};

/// Ranks as a mesh of one or two dimensions, with names: OneFlow's placement, PyTorch's
/// `DeviceMesh`. Ranks are numbered row by row: on a mesh of 2 x 3, ranks 0, 1 and 2 are the
/// first row.
///
/// Clones are cheap and the same placement.
#[derive(Clone)]
pub struct Placement(Arc<Inner>);

struct Inner {
    group: ProcessGroup,
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
    /// are no or more than two dimensions; `Comm` when the ranks do not agree.
    pub fn new(group: &ProcessGroup, dims: &[(&str, usize)]) -> Result<Self> {
        let world = group.world_size();
        let text = show(dims.iter().map(|(name, size)| (*name, *size)));
        if dims.is_empty() || dims.len() > 2 {
            return Err(Error::usage(format!(
                "mesh {text:?} has {} dimensions; it may have one or two",
                dims.len()
            )));
        }
        if dims.iter().any(|d| d.0.is_empty()) || (dims.len() == 2 && dims[0].0 == dims[1].0) {
            return Err(Error::usage(format!(
                "mesh {text:?} needs a different name for each dimension"
            )));
        }
        let sizes: Vec<usize> = dims.iter().map(|d| d.1).collect();
        let ranks = sizes.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        if ranks != Some(world) {
            return Err(Error::usage(format!(
                "mesh {text} does not have {world} ranks; its sizes must multiply to the number of ranks"
            )));
        }
        let coordinates = coordinates(&sizes, group.rank());
        let mut lines = Vec::new();
        for dim in 0..dims.len() {
            lines.push(match dims.len() {
                1 => group.clone(),
                _ => line(group, &sizes, dim)?,
            });
        }
        Ok(Placement(Arc::new(Inner {
            group: group.clone(),
            names: dims.iter().map(|d| d.0.to_owned()).collect(),
            sizes,
            coordinates,
            lines,
        })))
    }

    /// The ranks of `group` as a mesh of one dimension, called `data`.
    pub fn of(group: &ProcessGroup) -> Self {
        Placement(Arc::new(Inner {
            group: group.clone(),
            names: vec!["data".to_owned()],
            sizes: vec![group.world_size()],
            coordinates: vec![group.rank()],
            lines: vec![group.clone()],
        }))
    }

    /// The group of all ranks of the mesh.
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

    pub(crate) fn rank(&self) -> usize {
        self.0.group.rank()
    }
}

impl PartialEq for Placement {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes = self.0.sizes.iter().copied();
        f.write_str(&show(self.0.names.iter().map(String::as_str).zip(sizes)))
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
    let other = coordinates(sizes, group.rank())[1 - dim];
    let color = u32::try_from(other).unwrap_or(u32::MAX);
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
