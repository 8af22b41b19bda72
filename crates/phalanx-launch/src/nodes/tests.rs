use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};

use super::*;

/// Passes connections on to a server until they are [`cut`](Forwarder::cut).
struct Forwarder {
    at: SocketAddr,
    over: Arc<AtomicBool>,
    /// Gives every socket that it has passed on.
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

    /// Lets nobody in any more and closes the first `connections`; gives the sockets of the others. A connection
    /// may carry its whole conversation before the door thread has noted it, so they are closed when that
    /// thread has ended.
    fn cut(self, connections: usize) -> Vec<TcpStream> {
        self.over.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.at); // the last that the door lets in
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

#[test]
fn a_launcher_killed_right_after_its_card_is_known_to_be() {
    is_known_to_be_gone(usize::MAX);
}

/// It ends by itself then, and its will is on a connection that still stands.
#[test]
fn a_launcher_that_cannot_say_why_it_ends_is_known_to_be_gone() {
    is_known_to_be_gone(ASKING_THREADS);
}

/// A launcher whose first `connections` break right after it has joined, and that cannot make new ones.
fn is_known_to_be_gone(connections: usize) {
    const PATIENCE: Duration = Duration::from_secs(20);
    let token = Token::generate().unwrap();
    let server = TcpServer::bind((Ipv4Addr::LOCALHOST, 0).into(), token.clone()).unwrap();
    let direct =
        TcpStore::connect(&server.local_addr().to_string(), token.clone(), PATIENCE).unwrap();
    let way = Forwarder::start(server.local_addr());
    let mut place = Place {
        server: None,
        dial: way.at.to_string(),
        store: way.at.to_string(),
        master_addr: way.at.ip().to_string(),
        bind: None,
        warning: None,
    };
    let info = NodeInfo {
        nodes: 2,
        local_ranks: 1,
        run_id: "none".into(),
        host: "b".into(),
        pid: 1,
        master_port: None,
        by_arrival: false,
        version: "1".into(),
    };
    let joining =
        thread::spawn(move || join(&mut place, Some(1), info, &token, PATIENCE, || None).map(drop));
    direct.wait(&["launch/node/1"], PATIENCE).unwrap();
    let _others = way.cut(connections);
    let verdict: Verdict = decode(&direct.get(ABORT_KEY, PATIENCE).unwrap()).unwrap();
    assert_eq!(verdict.node, 1);
    assert!(joining.join().unwrap().is_err());
}
