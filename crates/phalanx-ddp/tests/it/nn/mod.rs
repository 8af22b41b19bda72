//! The wrapper and sharded optimizers.

mod accumulation;
mod accumulation_norm;
mod agreement;
mod any_order;
mod examples;
mod hooks;
mod options;
mod power_sgd;
#[path = "../../../examples/power_sgd/hook.rs"]
mod power_sgd_hook;
mod resnet_shards;
mod shards;
mod shrink;
mod steps;
mod sync_norm;
mod vote;
mod zero;
mod zero_scattered;
