//! The real ring over a model of its memory.

#[path = "../../src/transport/ring.rs"]
pub(crate) mod ring;
