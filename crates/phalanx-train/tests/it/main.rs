//! The trainer as programs use it, on ranks that are threads.

mod again;
mod branches;
mod gan;
mod normed;
mod one_cycle;
mod records;
mod scalars;
mod trainer;
