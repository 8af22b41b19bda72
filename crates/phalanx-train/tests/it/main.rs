//! The trainer as programs use it, on ranks that are threads.

mod trainer;
