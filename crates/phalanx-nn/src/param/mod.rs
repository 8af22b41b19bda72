//! Parameters: dotted names and PyTorch's shapes outside, one flat 64-byte
//! aligned region inside.

mod grads;
mod layout;
mod lora;
mod params;
mod scope;

pub use grads::{GradSink, GradView, Grads};
pub use layout::Layout;
pub use lora::LoraConfig;
pub use params::{BufferId, ParamId, ParamInfo, Params};
pub(crate) use scope::Lora;
pub use scope::{Init, Scope, Seed};
