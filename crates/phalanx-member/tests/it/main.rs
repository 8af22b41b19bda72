//! Jobs whose ranks are threads and processes, over every transport.

#[path = "../../../phalanx-comm/tests/it/common.rs"]
#[allow(dead_code, reason = "that crate's tests use the rest")]
mod common;
mod forming;
