//! Memory: the caching pool from which tensors come.

mod caching;
mod region;

pub(crate) use caching::{Buf, Pool};
