//! What groups leave in the store: nothing, once they have ended.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use phalanx_comm::ProcessGroup;
use phalanx_store::{MemStore, Result, Store};
use phalanx_wire::Token;
use phalanx_wire::store_msg::{Request, Response};

use crate::common::{Over, SOON, init_options, on_each};

/// A store that knows its keys.
#[derive(Default)]
struct Listed {
    store: MemStore,
    keys: Mutex<BTreeSet<String>>,
}

impl Listed {
    /// Waits until the number of keys below `prefix` is `want`.
    fn until(&self, prefix: &str, want: usize) {
        let start = Instant::now();
        loop {
            let keys = self.keys.lock().unwrap();
            let found: Vec<&String> = keys.iter().filter(|k| k.starts_with(prefix)).collect();
            if found.len() == want {
                return;
            }
            assert!(start.elapsed() < SOON, "{found:?}, not {want}");
            drop(keys);
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Store for Listed {
    fn location(&self) -> String {
        self.store.location()
    }

    fn execute(&self, request: &Request<'_>) -> Result<Response> {
        if request.timeout() > Duration::ZERO {
            return self.store.execute(request);
        }
        let mut keys = self.keys.lock().unwrap();
        let response = self.store.execute(request)?;
        match request {
            Request::DeletePrefix { prefix } => keys.retain(|key| !key.starts_with(prefix)),
            _ if self.store.try_get(request.key())?.is_some() => {
                keys.insert(request.key().to_owned());
            }
            _ => {
                keys.remove(request.key());
            }
        }
        Ok(response)
    }
}

/// Two ranks over TCP that meet in a store which knows its keys.
fn pair() -> (Arc<Listed>, Vec<ProcessGroup>) {
    let store = Arc::new(Listed::default());
    let token = Token::generate().unwrap();
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            let (store, options) = (store.clone(), init_options(Over::Tcp, &token));
            std::thread::spawn(move || ProcessGroup::from_store(store, rank, 2, options).unwrap())
        })
        .collect();
    let groups = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    store.until("flight/", 2);
    (store, groups)
}

#[test]
fn groups_that_have_ended_leave_no_keys() {
    let (store, groups) = pair();
    on_each(groups, |group| {
        for _ in 0..3 {
            let part = group.new_group(&[0, 1]).unwrap().unwrap();
            // Each rank has said who it is.
            store.until("flight/", 4);
            if part.rank() == 0 {
                // Rank 1 does not come, so nobody is the last to leave.
                let soon = Duration::from_millis(1);
                part.monitored_barrier(soon).unwrap_err();
            }
            group.barrier().unwrap();
            drop(part);
            store.until("flight/", 2);
            store.until("monitored/", 0);
            group.barrier().unwrap();
        }
    });
    store.until("", 0);
}

/// A rank that died cannot remove its keys: those that are left do.
#[test]
fn the_keys_of_a_rank_that_died_go_with_its_group() {
    let (store, groups) = pair();
    on_each(groups, |group| {
        let part = group.new_group(&[0, 1]).unwrap().unwrap();
        store.until("flight/", 4);
        if part.rank() == 0 {
            group.barrier().unwrap();
            let soon = Duration::from_millis(1);
            part.monitored_barrier(soon).unwrap_err();
            part.abort("rank 1 has died");
            drop(part);
        } else {
            // Its handle is never dropped.
            std::mem::forget(part);
            group.barrier().unwrap();
        }
        store.until("flight/", 2);
        store.until("monitored/", 0);
        group.barrier().unwrap();
    });
}
