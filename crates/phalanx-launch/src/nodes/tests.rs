use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::thread;

use super::join::ASKING_THREADS;
use super::*;
use crate::place::LOST_AFTER;

/// Forwards connections to a server until they are [`cut`](Forwarder::cut).
struct Forwarder {
    at: SocketAddr,
    over: Arc<AtomicBool>,
    /// Sends every socket that it has forwarded.
    door: thread::JoinHandle<Vec<TcpStream>>,
}

impl Forwarder {
    fn start(to: SocketAddr) -> Forwarder {
        let door = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = door.local_addr().unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let ends = over.clone();
        let door = thread::spawn(move || {
            let mut open = Vec::new();
            for near in door.incoming() {
                if ends.load(Ordering::SeqCst) {
                    break;
                }
                let (near, far) = (near.unwrap(), TcpStream::connect(to).unwrap());
                for (mut from, mut into) in [(&near, &far), (&far, &near)].map(twins) {
                    thread::spawn(move || {
                        let mut bytes = [0; 4096];
                        while let Ok(n @ 1..) = from.read(&mut bytes) {
                            if into.write_all(&bytes[..n]).is_err() {
                                break;
                            }
                        }
                        let _ = into.shutdown(Shutdown::Both);
                    });
                }
                open.extend([near, far]);
            }
            open
        });
        Forwarder { at, over, door }
    }

    /// Accepts no more connections and closes the first `connections`; gives the sockets of the others. A connection
    /// may carry all of its messages before the accepting thread has noted it, so they are closed when that
    /// thread has ended.
    fn cut(self, connections: usize) -> Vec<TcpStream> {
        self.over.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.at); // the last connection that is accepted
        let mut open = self.door.join().unwrap();
        let others = open.split_off(open.len().min(connections.saturating_mul(2)));
        for socket in open {
            let _ = socket.shutdown(Shutdown::Both);
        }
        others
    }
}

fn twins((from, into): (&TcpStream, &TcpStream)) -> (TcpStream, TcpStream) {
    (from.try_clone().unwrap(), into.try_clone().unwrap())
}

const PATIENCE: Duration = Duration::from_secs(20);

fn place_at(at: SocketAddr, server: Option<TcpServer>) -> NodeStore {
    NodeStore {
        bind: server.is_some().then_some(at.ip()),
        server,
        dial: at.to_string(),
        first: at.to_string(),
        store: at.to_string(),
        master_addr: at.ip().to_string(),
        warning: None,
    }
}

fn info(host: &str, local_ranks: usize) -> NodeInfo {
    NodeInfo {
        nodes: 2,
        least: None,
        local_ranks,
        run_id: "none".into(),
        program: "x".into(),
        host: host.into(),
        address: None,
        pid: 1,
        master_port: None,
        max_restarts: 0,
        by_arrival: false,
        elastic: false,
        joins_as: None,
        standby: None,
        version: "1".into(),
    }
}

/// Nodes 0 (host a, one rank) and 1 (host b, two ranks), which reaches the store by the forwarder.
fn two_nodes() -> (Nodes, Nodes, Forwarder) {
    let token = Token::generate().unwrap();
    let server = TcpServer::bind((Ipv4Addr::LOCALHOST, 0).into(), token.clone()).unwrap();
    let at = server.local_addr();
    let way = Forwarder::start(at);
    let mut places = [place_at(at, Some(server)), place_at(way.at, None)];
    let [place_0, place_1] = &mut places;
    let (a, b) = thread::scope(|scope| {
        let other = scope.spawn(|| {
            join(
                place_1,
                Some(1),
                info("b", 2),
                &token,
                PATIENCE,
                None,
                || None,
            )
            .unwrap()
        });
        let mine = join(
            place_0,
            Some(0),
            info("a", 1),
            &token,
            PATIENCE,
            None,
            || None,
        )
        .unwrap();
        (mine, other.join().unwrap())
    });
    (a, b, way)
}

/// Asks until there is an answer.
fn eventually<T>(mut ask: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < until, "no answer");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Its process and its guard were killed at once, or its host has lost its power.
#[test]
fn a_node_whose_connections_have_ended_is_lost() {
    let (a, b, way) = two_nodes();
    let (events, _told) = channel();
    a.watch(LOST_AFTER, events.clone()).unwrap();
    b.is_guarded();
    b.watch(LOST_AFTER, events).unwrap();
    // The will that reports it.
    b.store.wait(&["launch/beat/1"], PATIENCE).unwrap();
    assert_eq!(a.lost(), None);
    assert_eq!(b.lost(), None);
    let _others = way.cut(usize::MAX);
    let lost = eventually(|| a.lost());
    let want = "lost node 1 (host b, 127.0.0.1, ranks 1 and 2): the connection of its launcher was closed, and it gave no reason";
    assert_eq!(lost, want);
}

#[test]
fn a_node_that_has_left_is_not_lost() {
    let (a, b, _way) = two_nodes();
    let store = a.store.clone();
    store.set(&gone_key(1), b"closed").unwrap();
    assert!(a.lost().is_some());
    b.leave(Instant::now());
    assert_eq!(a.lost(), None);
}

/// The link between the nodes is down: each names the other.
#[test]
fn a_silent_node_is_lost() {
    let (a, b, _way) = two_nodes();
    a.store.set(&gone_key(1), b"8").unwrap();
    let want = "lost the connection to node 1 (host b, 127.0.0.1, ranks 1 and 2): nothing has come from it for 8.0 s";
    assert_eq!(a.lost().unwrap(), want);
    assert_eq!(b.lost(), None, "the key is about itself");
    (1..=180).for_each(|n| lock(&b.host.silence).advance(n * silence::LOOK));
    let want = "lost the connection to node 0 (host a, 127.0.0.1, rank 0): nothing has come from it for 9.0 s";
    assert_eq!(b.lost().unwrap(), want);
}

#[test]
fn a_launcher_killed_right_after_its_description_is_lost() {
    is_known_to_be_gone(usize::MAX);
}

/// It ends by itself then, and its will is on a connection that still stands.
#[test]
fn a_launcher_that_cannot_publish_why_it_ends_is_lost() {
    is_known_to_be_gone(ASKING_THREADS);
}

/// A launcher whose first `connections` break right after it has joined, and that cannot make new ones.
fn is_known_to_be_gone(connections: usize) {
    // It waits for the third.
    let of_three = |host: &str| NodeInfo {
        nodes: 3,
        ..info(host, 1)
    };
    let token = Token::generate().unwrap();
    let server = TcpServer::bind((Ipv4Addr::LOCALHOST, 0).into(), token.clone()).unwrap();
    let direct =
        TcpStore::connect(&server.local_addr().to_string(), token.clone(), PATIENCE).unwrap();
    let mut log = LauncherLog::new(Arc::new(direct));
    let first = LauncherEvent::Arrived {
        id: 0,
        info: of_three("a"),
    };
    log.append(|_| Some(first.clone())).unwrap();
    let way = Forwarder::start(server.local_addr());
    let mut place = place_at(way.at, None);
    let joining = thread::spawn(move || {
        join(
            &mut place,
            Some(1),
            of_three("b"),
            &token,
            PATIENCE,
            None,
            || None,
        )
        .map(drop)
    });
    eventually(|| log.read().unwrap().info(1).cloned());
    let _others = way.cut(connections);
    eventually(|| log.read().unwrap().info(1).is_none().then_some(()));
    assert!(log.state().left.clone().unwrap().contains("node 1 "));
    assert!(joining.join().unwrap().is_err());
}

/// A launcher that hosts its own store has the number 0. It took this number to the store of the running job, which had a
/// node 0 already.
#[test]
fn a_launcher_that_learns_at_once_of_a_job_elsewhere_goes_there() {
    let token = Token::generate().unwrap();
    let server = TcpServer::bind((Ipv4Addr::LOCALHOST, 0).into(), token.clone()).unwrap();
    let at = server.local_addr();
    let store = TcpStore::connect(&at.to_string(), token.clone(), PATIENCE).unwrap();
    store.set(standby::MOVED_KEY, b"127.0.0.1:1").unwrap();
    let own = NodeInfo {
        least: Some(1),
        by_arrival: true,
        ..info("a", 1)
    };
    let mut place = place_at(at, Some(server));
    let mut nodes = join(&mut place, None, own, &token, PATIENCE, None, || None).unwrap();
    let elsewhere = eventually(|| nodes.next().unwrap());
    assert!(matches!(elsewhere, Next::Elsewhere(at) if at == "127.0.0.1:1"));
}
