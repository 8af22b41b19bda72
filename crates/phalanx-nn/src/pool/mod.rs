//! Memory: aligned regions, and the caching pool from which tensors come.

mod aligned;
mod caching;
mod region;

pub(crate) use aligned::{ALIGN_ELEMS, AlignedBuf, round_up};
pub(crate) use caching::{Buf, Pool};
