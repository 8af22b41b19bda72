//! Global tensors: one tensor that lies over the ranks of a mesh, by placement and SBP.
#![forbid(unsafe_code)]

mod boxing;
mod checkpoint;
mod error;
mod indices;
mod layout;
mod loss;
mod ops;
mod params;
mod placement;
mod rules;
mod sbp;
mod step;
mod tensor;

pub use boxing::{Boxing, Step, StepKind};
pub use checkpoint::{Checkpoint, CheckpointInfo};
pub use error::{Error, ErrorKind, Result};
pub use indices::Indices;
pub use layout::Layout;
pub use params::{GlobalGrads, GlobalParams};
pub use placement::Placement;
pub use sbp::{Fold, Sbp};
pub use step::{Conversion, GlobalStep};
pub use tensor::Global;
