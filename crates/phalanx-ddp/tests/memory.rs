//! The memory that gathering sharded optimizer state needs, counted by the allocator.
#![cfg(feature = "nn")]

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../../phalanx-comm/tests/counting/mod.rs"]
mod counting;

use std::time::Duration;

use phalanx_comm::{GroupOptions, ProcessGroup};
use phalanx_ddp::ShardedOptimizer;
use phalanx_nn::layers::Linear;
use phalanx_nn::optim::Adam;
use phalanx_nn::{Grads, Scope, Seed};

use counting::peak_bytes;

const RANKS: usize = 3;
const WIDTH: usize = 256;
const TENSOR: isize = size_of::<[[f32; WIDTH]; WIDTH]>() as isize;

#[test]
fn only_rank_0_needs_memory_for_the_state_of_all_ranks() {
    let rank = |group: ProcessGroup| {
        let mut scope = Scope::new(Seed(1));
        for layer in ["a", "b", "c", "d"] {
            Linear::new(scope.enter(layer), WIDTH, WIDTH);
        }
        let mut params = scope.build().unwrap();
        let grads = Grads::like(&params);
        let make = |params: &_| Adam::new(params, 0.1);
        let mut optimizer = ShardedOptimizer::new(group.clone(), &params, make).unwrap();
        optimizer.step(&mut params, &grads).unwrap();
        let gather = |memory| peak_bytes(|| optimizer.gather_state(memory).unwrap());
        let (first, new) = gather(Vec::new());
        let memory = first.unwrap_or_default().into_iter().map(|(_, v)| v);
        if group.rank() == 1 {
            // Rank 0 waits for it, and must not keep what rank 2 has to send meanwhile.
            std::thread::sleep(Duration::from_millis(50));
        }
        let (_, again) = gather(memory.collect());
        (group.rank(), new, again)
    };
    let groups = ProcessGroup::threads(RANKS, GroupOptions::default());
    std::thread::scope(|scope| {
        let ranks = groups.into_iter().map(|group| scope.spawn(|| rank(group)));
        for joined in ranks.collect::<Vec<_>>() {
            let (rank, new, again) = joined.join().unwrap();
            // Two buffers of four tensors.
            assert_eq!(new > 8 * TENSOR, rank == 0, "rank {rank}: {new} bytes");
            assert!(again < TENSOR, "rank {rank}: {again} bytes");
        }
    });
}
