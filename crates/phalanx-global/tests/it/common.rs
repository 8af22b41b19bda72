//! Groups to test with, and a source of numbers.

use std::sync::Arc;
use std::time::Duration;

use phalanx_comm::{GroupOptions, InitOptions, ProcessGroup, Transport};
use phalanx_global::Placement;
use phalanx_store::MemStore;
use phalanx_wire::Token;

/// How the ranks of a test are linked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    Thread,
    Shm,
    Tcp,
}

/// A limit that no healthy test reaches, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Names of the dimensions of a mesh.
pub const NAMES: [&str; 3] = ["data", "tensor", "row"];

/// One handle per rank, in rank order.
pub fn groups(over: Over, world: usize) -> Vec<ProcessGroup> {
    if over == Over::Thread {
        let options = GroupOptions {
            op_timeout: PATIENCE,
            first_op_timeout: PATIENCE,
            ..GroupOptions::default()
        };
        return ProcessGroup::threads(world, options);
    }
    let (store, token) = (Arc::new(MemStore::new()), Token::generate().unwrap());
    let members: Vec<_> = (0..world)
        .map(|rank| {
            let store = store.clone();
            let options = InitOptions {
                token: Some(token.clone()),
                timeout: PATIENCE,
                op_timeout: PATIENCE,
                first_op_timeout: PATIENCE,
                transport: match over {
                    Over::Tcp => Transport::Tcp,
                    _ => Transport::Shm,
                },
                probe: false,
                ..InitOptions::default()
            };
            std::thread::spawn(move || ProcessGroup::from_store(store, rank, world, options))
        })
        .collect();
    members
        .into_iter()
        .map(|member| member.join().unwrap().unwrap())
        .collect()
}

/// Runs `body` on every rank of a mesh at once and returns what each returned, in rank order. A
/// panic on one rank is a panic here.
pub fn on_mesh<R: Send>(
    over: Over,
    mesh: &[usize],
    body: impl Fn(&Placement) -> R + Sync,
) -> Vec<R> {
    let groups = groups(over, mesh.iter().product());
    std::thread::scope(|scope| {
        let ranks: Vec<_> = groups
            .into_iter()
            .map(|group| {
                let body = &body;
                scope.spawn(move || {
                    let dims: Vec<_> = NAMES.into_iter().zip(mesh.iter().copied()).collect();
                    body(&Placement::new(&group, &dims).unwrap())
                })
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| {
                rank.join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect()
    })
}

/// A number between -1 and 1 that depends on all of `key` (SplitMix64).
pub fn number(key: &[usize]) -> f32 {
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    for k in key {
        x ^= *k as u64;
        x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^= x >> 31;
    }
    ((x >> 40) as f32 / (1u64 << 23) as f32) - 1.0
}

/// All indices of a block, row-major.
pub fn indices(block: &[std::ops::Range<usize>]) -> Vec<Vec<usize>> {
    block.iter().fold(vec![Vec::new()], |all, range| {
        let each = |index: Vec<usize>| {
            range.clone().map(move |i| {
                let mut longer = index.clone();
                longer.push(i);
                longer
            })
        };
        all.into_iter().flat_map(each).collect()
    })
}

/// Coordinates of a rank, row by row.
pub fn coordinates(mesh: &[usize], rank: usize) -> Vec<usize> {
    match *mesh {
        [_] => vec![rank],
        [_, columns] => vec![rank / columns, rank % columns],
        [_, columns, depth] => vec![
            rank / (columns * depth),
            rank / depth % columns,
            rank % depth,
        ],
        _ => unreachable!("meshes have one to three dimensions"),
    }
}
