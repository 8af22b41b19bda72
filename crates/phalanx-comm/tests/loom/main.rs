//! The wait protocol and the ring, as they are in `src/`, explored by loom:
//! every order in which two or three threads can take their steps, and every
//! value that a weak memory lets them read. Run it by `tools/ci/loom.sh`; without
//! `--cfg loom` this is empty.
//!
//! The files under test are compiled into this crate unchanged. What they take
//! from `crate::sync` and `crate::region` is replaced by models, where a
//! sleep has no timeout: a lost wake-up is a deadlock, and loom reports it.
#![cfg(loom)]
// The tests use a part of what the library uses.
#![allow(dead_code)]

mod region;
#[path = "machine.rs"]
mod sync;
mod transport;
mod wait;

mod bells;
mod rings;
