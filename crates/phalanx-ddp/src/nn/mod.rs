//! The part that needs the engine `phalanx-nn`.

mod ddp;
mod params;
mod recut;
mod route;
mod shards;
mod state;
mod step;
mod sync_norm;
mod tree;
mod zero;

pub use ddp::{Buffers, DdpOptions, Deterministic, DistributedDataParallel, Every};
pub use route::Unused;
pub use state::{agree_on_state, take_state};
pub use step::GlobalStep;
pub use sync_norm::SyncBatchNorm;
pub use tree::ShardTree;
pub use zero::ShardedOptimizer;
