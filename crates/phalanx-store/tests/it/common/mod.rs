//! What several test binaries share.
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use phalanx_store::{ServerOptions, TcpServer, TcpStore, auth};
use phalanx_wire::Token;
use phalanx_wire::handshake::{Hello, Role};
use phalanx_wire::store_msg::{Request, Response, response_bytes};

/// A wait that is expected to succeed; never used up unless something is wrong.
pub const LONG: Duration = Duration::from_secs(100);
/// A wait that is expected to fail.
pub const SHORT: Duration = Duration::from_millis(40);

pub fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

pub fn serve() -> (TcpServer, Token) {
    serve_with(ServerOptions::default())
}

pub fn serve_with(options: ServerOptions) -> (TcpServer, Token) {
    let token = Token::generate().unwrap();
    let server = TcpServer::bind_with(loopback(), token.clone(), options).unwrap();
    (server, token)
}

pub fn join(server: &TcpServer, token: &Token) -> TcpStore {
    TcpStore::connect(&server.local_addr().to_string(), token.clone(), LONG).unwrap()
}

/// Looks until it holds; a test that hangs on it fails with its name.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < LONG, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A member without the client's good manners: it speaks on a bare socket.
pub struct Raw(pub TcpStream);

impl Raw {
    pub fn connect(server: &TcpServer, token: &Token) -> Raw {
        let mut stream = TcpStream::connect(server.local_addr()).unwrap();
        stream.set_nodelay(true).unwrap();
        let hello = Hello::new(Role::StoreClient, token.job_id());
        auth::initiate(&mut stream, hello, token, LONG).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        Raw(stream)
    }

    pub fn send(&mut self, requests: &[Request<'_>]) {
        use std::io::Write;
        let mut out = Vec::new();
        for request in requests {
            request.encode(&mut out).unwrap();
        }
        self.0.write_all(&out).unwrap();
    }

    /// The next response, as debug text; `None` when the server has closed.
    pub fn receive(&mut self) -> Option<String> {
        use std::io::Read;
        let mut length = [0; 4];
        self.0.read_exact(&mut length).ok()?;
        let mut body = vec![0; response_bytes(length).unwrap()];
        self.0.read_exact(&mut body).ok()?;
        Some(format!("{:?}", Response::decode(&body).unwrap()))
    }
}
