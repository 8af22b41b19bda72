//! The trainer as programs use it, on ranks that are threads.

mod again;
mod branches;
mod damage;
mod elastic;
mod elastic_mesh;
mod engine;
mod gan;
mod gathered;
mod load_best;
mod mesh;
mod normed;
mod one_cycle;
#[allow(dead_code, reason = "the tests of phalanx-checkpoint use the rest")]
#[path = "../../../phalanx-checkpoint/tests/it/pth_common/mod.rs"]
mod pth_common;
mod records;
mod results;
mod rounds;
mod run;
mod scalars;
mod sync_norm;
mod trainer;
