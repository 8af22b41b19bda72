//! Memory: aligned regions, and the caching pool from which tensors come.

mod aligned;
mod caching;
mod region;

pub use aligned::{ALIGN_ELEMS, AlignedBuf, round_up};
pub use caching::{Buf, Pool};
