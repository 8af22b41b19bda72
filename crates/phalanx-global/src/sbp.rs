//! How a tensor lies over the ranks of one mesh dimension.

use std::fmt;

use phalanx_comm::ReduceOp;

/// How the parts of a partial tensor are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Fold {
    /// They are added, in ascending rank order.
    Sum,
    /// The least; a NaN of any rank wins.
    Min,
    /// The greatest; a NaN of any rank wins.
    Max,
}

impl Fold {
    pub(crate) fn op(self) -> ReduceOp {
        match self {
            Fold::Sum => ReduceOp::Sum,
            Fold::Min => ReduceOp::Min,
            Fold::Max => ReduceOp::Max,
        }
    }

    /// The identity element.
    pub(crate) fn identity(self) -> f32 {
        match self {
            // Not 0.0, which would turn a sum of -0.0 into 0.0.
            Fold::Sum => -0.0,
            Fold::Min => f32::INFINITY,
            Fold::Max => f32::NEG_INFINITY,
        }
    }
}

/// How a tensor lies over the ranks of one mesh dimension: OneFlow's SBP, PyTorch's
/// `Shard`, `Replicate` and `Partial`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Sbp {
    /// Each rank has a range of this axis. Ranges follow each other in rank order; they may
    /// differ in length and be empty.
    Split(usize),
    /// Each rank has the whole tensor.
    Broadcast,
    /// Each rank has a tensor of the full shape; the value is their fold.
    Partial(Fold),
}

impl Sbp {
    /// Split along `axis` (`flow.sbp.split(axis)`).
    pub const fn split(axis: usize) -> Self {
        Sbp::Split(axis)
    }

    /// The whole tensor on each rank (`flow.sbp.broadcast`).
    pub const fn broadcast() -> Self {
        Sbp::Broadcast
    }

    /// A sum of what the ranks have (`flow.sbp.partial_sum`).
    pub const fn partial_sum() -> Self {
        Sbp::Partial(Fold::Sum)
    }

    pub(crate) fn fold(self) -> Option<Fold> {
        match self {
            Sbp::Partial(fold) => Some(fold),
            _ => None,
        }
    }

    pub(crate) fn is_partial(self) -> bool {
        matches!(self, Sbp::Partial(_))
    }

    /// The SBP of the gradient of a value with this SBP.
    pub(crate) fn of_gradient(self) -> Self {
        match self {
            Sbp::Partial(Fold::Sum) => Sbp::Broadcast,
            // Of a minimum, each rank has its own share of the gradient.
            Sbp::Broadcast | Sbp::Partial(_) => Sbp::partial_sum(),
            split => split,
        }
    }
}

impl fmt::Display for Sbp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sbp::Split(axis) => write!(f, "S({axis})"),
            Sbp::Broadcast => f.write_str("B"),
            Sbp::Partial(Fold::Sum) => f.write_str("P"),
            Sbp::Partial(Fold::Min) => f.write_str("P(min)"),
            Sbp::Partial(Fold::Max) => f.write_str("P(max)"),
        }
    }
}

/// `(S(0), B)`
pub(crate) fn list(sbp: &[Sbp]) -> String {
    let all: Vec<String> = sbp.iter().map(Sbp::to_string).collect();
    format!("({})", all.join(", "))
}
