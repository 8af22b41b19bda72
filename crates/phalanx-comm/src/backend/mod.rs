//! Carries out the operations of a group.
//!
//! [`Runner`] is what the group calls: it numbers operations, writes the flight
//! recorder, enforces deadlines, completes errors, and ends the group after a failure.
//! Below it is [`Native`], which only moves and folds data: shared memory on one host,
//! plans over links otherwise.

mod native;
mod runner;

pub(crate) use self::native::Native;
pub(crate) use self::runner::Runner;
