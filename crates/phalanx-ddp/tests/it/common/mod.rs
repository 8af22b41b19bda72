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

/// Runs `rank` on `world` threads and gives back what each returned, by rank. All have formed the group before one begins:
/// a rank that fails at once would fail the forming of others.
pub fn ranks<R: Send>(world: usize, over: Over, rank: impl Fn(ProcessGroup) -> R + Sync) -> Vec<R> {
    let timeout = Duration::from_secs(60);
    let transport = match over {
        Over::Thread => None,
        Over::Shm => Some(Transport::Shm),
        Over::Tcp => Some(Transport::Tcp),
    };
    let groups = match transport {
        None => ProcessGroup::threads(world, Default::default()),
        Some(transport) => {
            let store: Arc<dyn Store> = Arc::new(MemStore::new());
            let options = InitOptions {
                token: Some(Token::generate().expect("random bytes")),
                timeout,
                op_timeout: timeout,
                first_op_timeout: timeout,
                transport,
                ..InitOptions::default()
            };
            let form = |r| {
                let (store, options) = (store.clone(), options.clone());
                ProcessGroup::from_store(store, r, world, options).expect("group forms")
            };
            on_threads(0..world, form)
        }
    };
    on_threads(groups.into_iter(), rank)
}

/// Runs `each` of `items` on a thread of its own, and gives back what each returned.
fn on_threads<T: Send, R: Send>(
    items: impl Iterator<Item = T>,
    each: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    std::thread::scope(|scope| {
        let each = &each;
        let threads: Vec<_> = items.map(|item| scope.spawn(move || each(item))).collect();
        let results = threads.into_iter().map(|thread| thread.join());
        results.map(|r| r.expect("rank does not panic")).collect()
    })
}
