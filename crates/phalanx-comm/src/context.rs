//! The context of a running operation, without its memory.

use crate::deadline::Deadline;
use crate::operation::{Operation, Signature};
use crate::recorder::Flight;
use crate::stall::{Begun, Board};

/// One operation in progress, as the layers below the backend see it.
pub(crate) struct RunContext<'a> {
    pub(crate) operation: &'a Operation,
    pub(crate) signature: &'a Signature,
    pub(crate) deadline: &'a Deadline,
    pub(crate) flight: &'a mut Flight,
    /// Where stalled ranks publish the operation they wait in; absent in a group of one.
    pub(crate) board: Option<&'a mut Board>,
    /// What this rank has begun so far, this operation included.
    pub(crate) begun: Begun<'a>,
}
