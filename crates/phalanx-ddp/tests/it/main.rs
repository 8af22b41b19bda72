//! The wrapper, the reducer and sharded optimizers, with ranks as threads.

mod accumulation;
mod accumulation_norm;
mod agreement;
mod any_order;
mod common;
mod hooks;
mod joined_shards;
mod mixed_types;
mod options;
mod other_kinds;
mod power_sgd;
mod reducer;
mod resnet_shards;
mod shards;
mod shrink;
mod steps;
mod sync_norm;
mod vote;
mod zero;
mod zero_scattered;
