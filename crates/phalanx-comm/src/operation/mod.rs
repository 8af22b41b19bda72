//! One operation of a group: what the caller requested, and what all ranks compare.

mod signature;

use std::sync::Arc;
use std::time::Duration;

pub(crate) use self::signature::{PeerOperation, Signature, desync};

use crate::plan::{Collective, Method, RankPlan};
use crate::{DType, ReduceOp};

/// Limits of time and size, the same for all operations of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// For the first operation: ranks may have started and compiled unevenly.
    pub(crate) first_op_timeout: Duration,
    pub(crate) op_timeout: Duration,
    pub(crate) segment_bytes: usize,
    pub(crate) single_copy_min_bytes: Option<usize>,
}

/// One operation as the caller requested it, without its memory.
#[derive(Clone, Debug)]
pub(crate) struct Operation {
    pub(crate) collective: Collective,
    /// Absent for messages.
    pub(crate) method: Option<Method>,
    /// As [`Spec::short_segments`](crate::plan::Spec::short_segments).
    pub(crate) short_segments: bool,
    /// Whether the method may be replaced by shared memory: the caller did not request
    /// this one.
    pub(crate) automatic: bool,
    pub(crate) dtype: Option<DType>,
    pub(crate) op: Option<ReduceOp>,
    pub(crate) root: usize,
    pub(crate) target: usize,
    pub(crate) count: usize,
    /// Elements that the last parts lack, where the parts that are gathered do not all have `count`
    /// (in shared memory only).
    pub(crate) tail_padding: usize,
    /// How the elements are divided, where that does not follow from the world size
    /// alone; see [`Signature::lengths`].
    pub(crate) lengths: u16,
    /// The plan, where the method does not determine it.
    pub(crate) plan: Option<Arc<RankPlan>>,
    pub(crate) label: Option<Arc<str>>,
    pub(crate) timeout: Option<Duration>,
}

/// Called for each piece of a result with its first element and its length.
pub(crate) type Visit<'a> = dyn FnMut(usize, usize) + 'a;

/// Base addresses of an operation's buffers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffers {
    pub(crate) input: *const u8,
    pub(crate) output: *mut u8,
    /// Whether no reference into them exists, so that other ranks may read and write
    /// them in place in our arena.
    pub(crate) exposed: bool,
}

impl Operation {
    /// With the defaults of everything else.
    pub(crate) fn new(
        collective: Collective,
        method: Option<Method>,
        dtype: Option<DType>,
        count: usize,
    ) -> Operation {
        Operation {
            collective,
            method,
            short_segments: false,
            automatic: false,
            dtype,
            op: None,
            root: 0,
            target: 0,
            count,
            tail_padding: 0,
            lengths: 0,
            plan: None,
            label: None,
            timeout: None,
        }
    }

    /// A send or receive of `count` elements from `root` to `target`.
    pub(crate) fn message(dtype: DType, count: usize, (root, target): (usize, usize)) -> Operation {
        Operation {
            root,
            target,
            ..Operation::new(Collective::SendRecv, None, Some(dtype), count)
        }
    }
}

impl Buffers {
    pub(crate) fn none() -> Buffers {
        Buffers {
            input: std::ptr::null(),
            output: std::ptr::null_mut(),
            exposed: false,
        }
    }
}
