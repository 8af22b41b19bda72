//! What needs the engine `phalanx-nn`.

mod data_parallel;
mod ddp;
mod joined;
mod local_sgd;
mod low_rank;
mod meeting;
mod own_grads;
mod params;
mod power_sgd;
mod route;
mod shards;
mod stages;
mod state;
mod step;
mod sync_norm;
mod tree;
mod zero;

pub use data_parallel::{DataParallel, Replica, Traffic};
pub use ddp::{
    Buffers, DdpOptions, DdpState, Deterministic, DistributedDataParallel, Every, Unused,
};
pub use joined::{JoinedShard, JoinedShards};
pub use local_sgd::LocalSgd;
pub use power_sgd::{PowerSgd, PowerSgdOptions};
pub use stages::{Received, Sent, receive_activation, send_activation};
pub use state::agree_on_state;
pub use step::{Average, GlobalBatch, GlobalStep, Uneven};
pub use sync_norm::SyncBatchNorm;
pub use tree::ShardTree;
pub use zero::ShardedOptimizer;
