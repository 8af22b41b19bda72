//! Waiting costs no processor time. Alone in its process, because it measures
//! the process.

#[allow(dead_code, reason = "most of it serves the other test binary")]
#[path = "it/common/mod.rs"]
mod common;

use std::thread;
use std::time::Duration;

use common::{LONG, eventually, join, serve};
use phalanx_store::{MemStore, Store};

/// Processor time of this process so far, in ticks of 10 ms.
fn cpu_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let (_, rest) = stat.rsplit_once(')').unwrap();
    let fields: Vec<&str> = rest.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn waits_do_not_spin() {
    let (server, token) = serve();
    let memory = MemStore::new();
    let stores: Vec<_> = (0..8).map(|_| join(&server, &token)).collect();
    thread::scope(|scope| {
        for store in &stores {
            scope.spawn(|| store.get("the end", LONG).unwrap());
            scope.spawn(|| memory.get("the end", LONG).unwrap());
        }
        eventually("all wait", || server.pending_waits() == 8);
        let before = cpu_ticks();
        thread::sleep(Duration::from_millis(800));
        let ticks = cpu_ticks() - before;
        memory.set("the end", b"").unwrap();
        stores[0].set("the end", b"").unwrap();
        // A single thread that spins would use 80.
        assert!(ticks <= 8, "{ticks} ticks of processor time in 0.8 s");
    });
}
