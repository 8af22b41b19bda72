//! The context of a running operation, without its memory.

use std::time::Instant;

use crate::deadline::Deadline;
use crate::operation::{Operation, Signature};
use crate::recorder::Flight;
use crate::stall::{Awaited, Begun, StallReports};

/// One operation in progress, as the layers below the backend see it.
pub(crate) struct RunContext<'a> {
    pub(crate) operation: &'a Operation,
    pub(crate) signature: &'a Signature,
    pub(crate) deadline: &'a Deadline,
    pub(crate) flight: &'a mut Flight,
    /// Where stalled ranks publish the operation they wait in; absent in a group of one.
    pub(crate) board: Option<&'a mut StallReports>,
    /// What this rank has begun so far, this operation included.
    pub(crate) begun: Begun<'a>,
    /// Takes in messages that others send to this rank.
    pub(crate) listen: &'a dyn Fn(),
}

impl RunContext<'_> {
    /// Nothing has moved since the first of the `times`; `awaits` lists the ranks that are waited for.
    pub(crate) fn report_stall(
        &mut self,
        awaits: impl Iterator<Item = Awaited>,
        times: (Instant, Instant),
    ) {
        let Some(board) = &mut self.board else { return };
        if board.stalled(self.signature, &self.begun, awaits, times) {
            // One that sends to us first may be why.
            (self.listen)();
        }
    }
}
