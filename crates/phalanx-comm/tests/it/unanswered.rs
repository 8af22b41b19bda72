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
use phalanx_wire::store_msg::{Request, Response};

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
    fn location(&self) -> String {
        self.memory.location()
    }

    fn execute(&self, request: &Request<'_>) -> Result<Response> {
        match request {
            Request::Wait { .. } if self.silent.load(SeqCst) => self.stopped.execute(request),
            _ => self.memory.execute(request),
        }
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
