//! PyTorch's files (`.pth`, `.pt`): read without executing anything, and written so that
//! `torch.load(weights_only=True)` reads them.
//!
//! The format is a zip archive that stores, uncompressed, one pickle and the bytes of each
//! storage (`torch/serialization.py` and `caffe2/serialize/inline_container.h` of PyTorch
//! 2). [`PthFile`] reads it through the central directory. Its pickle machine knows only
//! the functions that rebuild tensors, so a file can describe data but run nothing. Memory
//! is limited by the size of the file: a storage is read once, and tensors are views of it.
//! `docs/design/security.md` has the rules.
//!
//! ```no_run
//! use phalanx_checkpoint::pth::PthFile;
//!
//! # fn main() -> phalanx_base::Result<()> {
//! let file = PthFile::read("resnet18.pth".as_ref())?;
//! for (name, tensor) in file.state_dict()? {
//!     println!("{name} {:?} {:?}", tensor.dtype(), tensor.shape());
//! }
//! # Ok(())
//! # }
//! ```

mod archive;
mod build;
mod file;
mod tensor;
mod value;
mod write;

pub use file::PthFile;
pub(crate) use file::{WRAPPED, strip_all, strip_one};
pub use tensor::{DType, Tensor};
pub use value::Value;
pub(crate) use write::{Head, root_of, write_state_dict_with};
pub use write::{Saved, save_state_dict, write_state_dict};
#[cfg(any(test, fuzzing))]
pub(crate) use write::{pickle, write_archive};

/// First bytes of files written before PyTorch 1.6 (2020): a pickled magic number.
pub(crate) const LEGACY_START: [u8; 9] = [0x80, 2, 0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46, 0xf9];

/// First bytes of a zip archive with at least one entry.
pub(crate) const ZIP_START: [u8; 4] = *b"PK\x03\x04";

/// Maximum number of tensors in a file of any format.
pub(crate) const MAX_TENSORS: usize = 1 << 16;
