//! Ranks as threads over any transport.
use std::sync::Arc;
use std::time::Duration;

use phalanx_comm::{InitOptions, ProcessGroup, Transport};
use phalanx_store::{MemStore, Store};
use phalanx_wire::Token;

/// How the ranks of a test talk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    Thread,
    Shm,
    Tcp,
}

pub const ALL: [Over; 3] = [Over::Thread, Over::Shm, Over::Tcp];

/// What is compared where every bit counts.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The `i`-th of an endless row of numbers from -1 to 1 that look random.
pub fn value(i: usize) -> f32 {
    let mixed = (i as u32).wrapping_mul(0x9E37_79B9);
    ((mixed ^ (mixed >> 15)) % 2001) as f32 / 1000.0 - 1.0
}

/// Runs `rank` on `world` threads and gives back what each returned, by rank.
pub fn ranks<R: Send>(world: usize, over: Over, rank: impl Fn(ProcessGroup) -> R + Sync) -> Vec<R> {
    let timeout = Duration::from_secs(60);
    std::thread::scope(|scope| {
        let rank = &rank;
        let handles: Vec<_> = if over == Over::Thread {
            ProcessGroup::threads(world, Default::default())
                .into_iter()
                .map(|group| scope.spawn(move || rank(group)))
                .collect()
        } else {
            let store: Arc<dyn Store> = Arc::new(MemStore::new());
            let token = Token::generate().expect("random bytes");
            (0..world)
                .map(|r| {
                    let (store, token) = (store.clone(), token.clone());
                    scope.spawn(move || {
                        let options = InitOptions {
                            token: Some(token),
                            timeout,
                            op_timeout: timeout,
                            first_op_timeout: timeout,
                            transport: if over == Over::Shm {
                                Transport::Shm
                            } else {
                                Transport::Tcp
                            },
                            ..InitOptions::default()
                        };
                        rank(
                            ProcessGroup::from_store(store, r, world, options)
                                .expect("group forms"),
                        )
                    })
                })
                .collect()
        };
        handles
            .into_iter()
            .map(|h| h.join().expect("rank does not panic"))
            .collect()
    })
}
