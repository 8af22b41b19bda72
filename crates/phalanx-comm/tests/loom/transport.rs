//! The real ring over a model of its memory.

#[path = "region.rs"]
pub(crate) mod region;
#[path = "../../src/transport/ring.rs"]
pub(crate) mod ring;
