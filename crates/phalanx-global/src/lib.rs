//! Global tensors: one tensor that lies over the ranks of a mesh.
//!
//! A [`Placement`] is a mesh of ranks. An [`Sbp`] says how a tensor lies over one dimension of it: split along an axis,
//! whole on each rank, or as a sum of what the ranks have. A [`Layout`] is both, with the shape and the exact
//! range of every rank, so uneven and empty parts are ordinary. [`Global`] is a tensor with a layout. It has the
//! operations of [`phalanx_nn::Value`], so the layers and models of phalanx-nn run on it:
//!
//! ```
//! use phalanx_comm::{GroupOptions, ProcessGroup};
//! use phalanx_global::{Parallel, Placement, Sbp};
//! use phalanx_nn::{Reduction, Scope, Seed, StepKey, Tape, Threads, Value};
//! use phalanx_nn::{layers::Linear, optim::Sgd};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! let groups = ProcessGroup::threads(4, GroupOptions::default());
//! std::thread::scope(|scope| {
//!     let ranks = groups.into_iter().map(|group| scope.spawn(move || train(&group)));
//!     ranks.collect::<Vec<_>>().into_iter().try_for_each(|rank| rank.join().unwrap())
//! })?;
//!
//! fn train(group: &ProcessGroup) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//!     let placement = Placement::new(group, &[("data", 2), ("tensor", 2)])?;
//!     let mut scope = Scope::new(Seed(0));
//!     let (up, down) = (Linear::new(scope.enter("up"), 4, 8), Linear::new(scope.enter("down"), 8, 1));
//!     // The outputs of the first layer are split over `tensor`, and the inputs of the second.
//!     let parallel = Parallel::new().column("tensor", &["up"]).row("tensor", &["down"]);
//!     let mut params = parallel.build(&placement, &scope.build()?)?;
//!     let mut grads = params.grads();
//!     let mut sgd = Sgd::new(params.local(), 0.1);
//!     let mut tape = Tape::new(Threads(1));
//!     for i in 0..10 {
//!         {
//!             let step = params.step(&mut tape, StepKey::new(0, i));
//!             // The batch is split over `data`.
//!             let rows = [Sbp::split(0), Sbp::broadcast()];
//!             let x = step.input(&[0.5; 12], &[3, 4], &rows)?;
//!             let y = step.input(&[1.0; 3], &[3, 1], &rows)?;
//!             let made = down.forward(up.forward(x)?.gelu()?)?;
//!             made.mse_loss(&y, Reduction::Mean)?.backward(&mut grads)?;
//!         }
//!         sgd.step(params.local_mut(), &grads)?;
//!     }
//!     Ok(())
//! }
//! # Ok(())
//! # }
//! ```
//!
//! [`Global::to_global`] converts a tensor (*boxing*): the collectives with least predicted time, which [`Global::explain`]
//! shows with their bytes. Operations convert operands that do not fit them; [`GlobalStep::explain`] shows what was
//! converted, and [`GlobalStep::set_automatic`] has them fail instead.
//!
//! A gradient lies as its value does, but sums are whole and whole tensors are sums ([`Layout::of_gradient`]), so it needs no
//! SBP of its own. Random numbers depend on an element's place in the whole tensor, so dropout and
//! initial weights are those of one rank.
#![forbid(unsafe_code)]

mod boxing;
mod checkpoint;
mod error;
mod indices;
mod layout;
mod loss;
mod ops;
mod parallel;
mod params;
mod placement;
mod prefetch;
mod rules;
mod sbp;
mod step;
mod tensor;

pub use boxing::{Boxing, Step, StepKind};
pub use checkpoint::{Checkpoint, CheckpointInfo};
pub use error::{Error, ErrorKind, Result};
pub use indices::Indices;
pub use layout::Layout;
pub use parallel::Parallel;
pub use params::{GlobalGrads, GlobalParams};
pub use placement::Placement;
pub use sbp::{Fold, Sbp};
pub use step::{Conversion, GlobalStep};
pub use tensor::Global;
