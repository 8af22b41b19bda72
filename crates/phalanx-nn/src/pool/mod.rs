//! Memory: aligned regions, and the caching pool from which tensors come.

mod aligned;
mod caching;

pub(crate) use aligned::{AlignedBuf, round_up};
pub(crate) use caching::{Buf, Pool};
