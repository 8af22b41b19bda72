//! A store that does not answer says nothing about who has come: not to a
//! monitored barrier, not to ranks that form.

use std::net::TcpListener;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use phalanx_comm::{ErrorKind, InitOptions, ProcessGroup};
use phalanx_store::{MemStore, Result, Store, TcpStore, auth};
use phalanx_wire::Token;
use phalanx_wire::handshake::{Hello, Role};

use crate::common::{Over, PATIENCE, init_options, on_each};

/// A store of which every wait is left without an answer while it is `silent`.
struct Unanswered {
    memory: MemStore,
    /// To a server that greets, and then says no more.
    stopped: TcpStore,
    silent: AtomicBool,
}

impl Unanswered {
    fn new() -> Arc<Unanswered> {
        let token = Token::generate().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let theirs = token.clone();
        // Ends with the process: nobody else can end a listener's wait.
        std::thread::spawn(move || {
            let mut held = Vec::new();
            for stream in listener.incoming().flatten() {
                let mut stream = stream;
                let greeting = Hello::new(Role::StoreServer, theirs.job_id());
                let _ = auth::accept(&mut stream, &theirs, PATIENCE, |_| Ok(greeting));
                held.push(stream);
            }
        });
        let stopped = TcpStore::connect(&address, token, PATIENCE).unwrap();
        stopped.set_response_timeout(Duration::from_millis(20));
        Arc::new(Unanswered {
            memory: MemStore::new(),
            stopped,
            silent: AtomicBool::new(false),
        })
    }
}

impl Store for Unanswered {
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        if self.silent.load(SeqCst) {
            return self.stopped.wait(keys, timeout);
        }
        self.memory.wait(keys, timeout)
    }
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.memory.set(key, value)
    }
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.memory.get(key, timeout)
    }
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.memory.try_get(key)
    }
    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.memory.add(key, delta)
    }
    fn compare_set(&self, key: &str, expected: Option<&[u8]>, desired: &[u8]) -> Result<Vec<u8>> {
        self.memory.compare_set(key, expected, desired)
    }
    fn delete(&self, key: &str) -> Result<bool> {
        self.memory.delete(key)
    }
    fn delete_prefix(&self, prefix: &str) -> Result<u64> {
        self.memory.delete_prefix(prefix)
    }
}

fn formed(store: &Arc<Unanswered>, world: usize) -> Vec<ProcessGroup> {
    let token = Token::generate().unwrap();
    let members: Vec<_> = (0..world)
        .map(|rank| {
            let (store, options) = (Arc::clone(store), init_options(Over::Tcp, &token));
            std::thread::spawn(move || ProcessGroup::from_store(store, rank, world, options))
        })
        .collect();
    members
        .into_iter()
        .map(|member| member.join().unwrap().unwrap())
        .collect()
}

#[test]
fn a_monitored_barrier_takes_nobody_for_arrived() {
    let store = Unanswered::new();
    let gate = Barrier::new(2);
    on_each(formed(&store, 2), |group| {
        group.barrier().unwrap();
        if group.rank() == 1 {
            gate.wait(); // never comes to the barrier
            return;
        }
        store.silent.store(true, SeqCst);
        let outcome = group.monitored_barrier(Duration::from_millis(100));
        gate.wait();
        let error = outcome.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        let text = error.to_string();
        assert!(text.contains("did not answer"), "{text}");
        assert_eq!(error.peer(), None, "nobody is to blame: {text}");
    });
}

#[test]
fn forming_blames_the_store_not_the_ranks() {
    let store = Unanswered::new();
    store.silent.store(true, SeqCst);
    let token = Token::generate().unwrap();
    let options = InitOptions {
        timeout: Duration::from_millis(1500),
        ..init_options(Over::Tcp, &token)
    };
    let error = ProcessGroup::from_store(store, 0, 2, options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let text = error.to_string();
    assert!(text.contains("did not answer"), "{text}");
    assert!(!text.contains("did not arrive"), "{text}");
}
