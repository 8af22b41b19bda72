//! Training engine of Phalanx: tensors from a caching pool, a tape whose
//! backward pass reports each parameter's gradient the moment it is final,
//! layers, losses and optimizers, and CPU kernels that give the same bits for any
//! number of threads.
//!
//! ```
//! use phalanx_nn::{Grads, Scope, Seed, StepKey, Tape, Threads, models::LinearToy, optim::Sgd};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut scope = Scope::new(Seed(0));
//! let model = LinearToy::new(&mut scope);
//! let mut params = scope.build()?;
//! let mut grads = Grads::like(&params); // or a reducer: anything that is a `GradSink`
//! let mut sgd = Sgd::new(&params, 0.01);
//! let mut tape = Tape::new(Threads(1));
//! for i in 0..500 {
//!     let step = tape.step(&params, StepKey::new(0, i));
//!     let x = step.input(&[1.0, 2.0, 2.0, 3.0], &[2, 2])?;
//!     let loss = model.forward(x)?.mse_loss(&[8.0, 13.0], phalanx_nn::Reduction::Sum)?;
//!     loss.backward(&mut grads)?; // `ready(param)` fires inside
//!     drop(step);
//!     sgd.step(&mut params, &grads)?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Images are channels-last (N, H, W, C); PyTorch's layouts are used only by
//! [`Params::export`], [`Params::import`] and [`Tensor::flatten`].
//!
//! A weight cannot change between forward and backward, because the step
//! borrows the parameters:
//!
//! ```compile_fail,E0502
//! use phalanx_nn::{Grads, Scope, Seed, StepKey, Tape, Threads, models::LinearToy};
//! let mut scope = Scope::new(Seed(0));
//! let model = LinearToy::new(&mut scope);
//! let mut params = scope.build().unwrap();
//! let mut grads = Grads::like(&params);
//! let mut tape = Tape::new(Threads(1));
//! let step = tape.step(&params, StepKey::new(0, 0));
//! let x = step.input(&[1.0, 2.0], &[1, 2]).unwrap();
//! let loss = model.forward(x).unwrap().mse_loss(&[8.0], phalanx_nn::Reduction::Sum).unwrap();
//! params.flat_mut()[0] = 1.0; // error: `params` is borrowed by `step`
//! loss.backward(&mut grads).unwrap();
//! ```

mod error;
pub mod layers;
pub mod losses;
pub mod models;
mod ops;
pub mod optim;
pub mod param;
mod pool;
pub mod profile;
pub mod rng;
mod tape;
mod tensor;
mod value;

use error::refuse;
pub use error::{Error, ErrorKind, Result};
pub use losses::Reduction;
pub use ops::custom::{Computed, ComputedBackward, CustomOp, TakeGradient};
pub use ops::{BatchStatistics, Weight};
pub use param::{
    BufferId, GradSink, GradView, Grads, Init, Layout, LoraConfig, ParamId, ParamInfo, Params,
    Scope, Seed,
};
pub use phalanx_kernels::par::{ThreadPool, Threads};
pub use phalanx_kernels::{Family, Precision};
pub use tape::{GraphNode, Step, StepKey, Tape};
pub use tensor::Tensor;
pub use value::{Value, ValueStep};

use phalanx_kernels::isa::{Isa, isa};

/// The name of the instruction set that the kernels use.
pub fn isa_name() -> &'static str {
    match isa() {
        Isa::Scalar => "no SIMD",
        Isa::Avx2 => "AVX2",
        Isa::Avx512 => "AVX-512",
    }
}
