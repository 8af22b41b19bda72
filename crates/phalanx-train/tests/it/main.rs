//! The trainer as programs use it, on ranks that are threads.

mod branches;
mod gan;
mod one_cycle;
mod scalars;
mod trainer;
