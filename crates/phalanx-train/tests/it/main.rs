//! The trainer as programs use it, on ranks that are threads.

mod again;
mod gan;
mod normed;
mod trainer;
