//! Random numbers: two generators for two purposes.
//!
//! * [`philox`]: counter-based. The value belongs to *(key, counter)*, not to
//!   a place in a stream, so a sample's dropout mask or a drawn image is the same on
//!   every rank and thread, and after a resume.
//! * [`torch`]: PyTorch's CPU generator bit for bit, for everything that must equal
//!   PyTorch: the order of the data and the initial weights ([`init`]).

pub mod init;
pub mod torch;

pub use phalanx_kernels::rng::philox;
