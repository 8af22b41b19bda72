//! The real files of `wait/` that the protocol consists of.

#[path = "../../src/wait/doorbell.rs"]
mod doorbell;
#[path = "../../src/wait/jitter.rs"]
mod jitter;
#[path = "../../src/wait/sleep.rs"]
mod sleep;

pub(crate) use doorbell::Bell;
pub(crate) use sleep::{Wake, sleep_unless};
