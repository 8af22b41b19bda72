//! The store server, as its owner has it.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use phalanx_wire::Token;

use super::conn::State;
use super::serving::{Mode, ServerControl, ServerLoop, ServerOptions, Task};
use super::socket::listen;
use crate::refused::RefusedConnections;
use crate::{Error, Result};

/// How long a task of the server's owner may take.
const TASK_TIMEOUT: Duration = Duration::from_secs(10);

/// A store server. It runs in its own thread until it is dropped, which closes all
/// connections.
///
/// Only clients with the token are served. Other connections are closed, counted
/// ([`rejected`](Self::rejected)) and logged at most once a minute.
#[derive(Debug)]
pub struct TcpServer {
    addr: SocketAddr,
    shared: Arc<ServerControl>,
    tasks: Sender<Task>,
    waker: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl TcpServer {
    /// Serves on `addr`; port 0 takes a free one, see
    /// [`local_addr`](Self::local_addr).
    ///
    /// # Errors
    /// [`ErrorKind::AddressInUse`](crate::ErrorKind::AddressInUse);
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) when the address is not this host's, or
    /// means all interfaces.
    pub fn bind(addr: SocketAddr, token: Token) -> Result<TcpServer> {
        Self::bind_with(addr, token, ServerOptions::default())
    }

    /// As [`bind`](Self::bind), with other limits.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_with(addr: SocketAddr, token: Token, options: ServerOptions) -> Result<TcpServer> {
        Self::start(listen(addr)?, token, options, Mode::Open)
    }

    /// A server that serves no client yet: it rejects members with
    /// [`RejectReason::NotOpen`](phalanx_wire::handshake::RejectReason::NotOpen), and clients
    /// try again until their deadline. So a refused connection to its address means that its
    /// process has ended.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_closed(addr: SocketAddr, token: Token) -> Result<TcpServer> {
        let options = ServerOptions::default();
        Self::start(listen(addr)?, token, options, Mode::Closed)
    }

    /// Serves on a listening socket, for example one passed on by a launcher so that
    /// no other process can take the port in between.
    ///
    /// # Errors
    /// [`ErrorKind::Io`](crate::ErrorKind::Io).
    pub fn from_listener(listener: TcpListener, token: Token) -> Result<TcpServer> {
        Self::start(listener, token, ServerOptions::default(), Mode::Open)
    }

    fn start(
        listener: TcpListener,
        token: Token,
        options: ServerOptions,
        mode: Mode,
    ) -> Result<TcpServer> {
        let addr = listener
            .local_addr()
            .map_err(|e| Error::io("reading the address of a listening socket", e))?;
        let fail = |e| Error::io(format_args!("setting up the store server on {addr}"), e);
        if addr.ip().is_unspecified() {
            tracing::warn!(%addr, "the store listens on all interfaces of this host; use a private network or a firewall");
        }
        listener.set_nonblocking(true).map_err(fail)?;
        let (waker, woken) = UnixStream::pair().map_err(fail)?;
        woken.set_nonblocking(true).map_err(fail)?;
        waker.set_nonblocking(true).map_err(fail)?;
        let shared = Arc::new(ServerControl::default());
        let (tasks, asked) = channel();
        let mut serving = ServerLoop::new(
            (listener, addr),
            woken,
            token,
            options,
            shared.clone(),
            asked,
        );
        serving.mode = mode;
        let thread = std::thread::Builder::new()
            .name("phalanx-store".to_owned())
            .spawn(move || serving.run())
            .map_err(fail)?;
        Ok(TcpServer {
            addr,
            shared,
            tasks,
            waker,
            thread: Some(thread),
        })
    }

    /// The address it listens on, with the actual port.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Number of refused connections: other protocols, wrong tokens, handshakes that
    /// timed out, members with a wrong role or job.
    pub fn rejected(&self) -> u64 {
        self.shared.refusals.total()
    }

    /// Refused unauthenticated connections by source and reason, the most frequent
    /// first.
    pub fn refused(&self) -> Vec<RefusedConnections> {
        self.shared.refusals.list()
    }

    /// Number of connected members. A member has one connection for each thread that
    /// waits.
    pub fn clients(&self) -> usize {
        self.shared.clients.load(Ordering::Relaxed)
    }

    /// Number of waits in progress.
    pub fn pending_waits(&self) -> usize {
        self.shared.pending_waits.load(Ordering::Relaxed)
    }

    /// Memory used for members, besides the store's keys and values.
    pub fn buffered_bytes(&self) -> u64 {
        self.shared.buffered_bytes.load(Ordering::Relaxed)
    }

    /// Removes all keys that do not start with `keep`. *Blocks* for one round of the server's thread.
    pub fn clear_all_but(&self, keep: &str) {
        let keep = keep.to_owned();
        self.ask(move |server| {
            let keys = server.table.iter().map(|(key, _)| key);
            let keys = keys.filter(|key| !key.starts_with(&keep));
            for key in keys.map(str::to_owned).collect::<Vec<_>>() {
                server.table.delete(&key);
                server
                    .followers
                    .changed(&mut server.conns, &server.table, &key);
            }
        });
    }

    /// A closed server takes these keys and values, a follower's copy, and serves
    /// followers only, except those that were `dropped`. *Blocks* for one round of the
    /// server's thread, as all methods about followers.
    pub fn admit_followers(&self, entries: Vec<(String, Vec<u8>)>, dropped: Vec<u64>) {
        self.ask(|server| server.admit_followers(entries, dropped));
    }

    /// Sets a key, and serves everybody. Nothing is answered until all followers have that key.
    pub fn open(&self, key: &str, value: &[u8]) {
        let (key, value) = (key.to_owned(), value.to_vec());
        self.ask(move |server| {
            server.set(&key, &value);
            server.followers.demand_newest();
            server.mode = Mode::Open;
        });
    }

    /// A server that serves followers only closes again, and their connections with it.
    pub fn close(&self) {
        self.ask(ServerLoop::close_to_followers);
    }

    /// The followers that are connected and have the whole copy, sorted.
    pub fn followers(&self) -> Vec<u64> {
        self.ask(|server| server.followers.complete())
    }

    /// All followers, in ascending order: those that are connected, and those whose connection has ended that were not dropped.
    pub fn registered_followers(&self) -> Vec<u64> {
        self.ask(|server| server.followers.registered())
    }

    /// The followers whose connection has ended, unless they have [left](crate::Follower::leave), until they follow again. All responses wait for them until they follow again or are
    /// dropped ([`drop_follower`](Self::drop_follower)): a server that is cut off from
    /// its followers does not continue alone.
    pub fn broken_followers(&self) -> Vec<u64> {
        self.ask(|server| server.followers.broken())
    }

    /// The followers that have not acknowledged all changes, in ascending order: responses wait for them.
    pub fn followers_behind(&self) -> Vec<u64> {
        self.ask(|server| server.followers.behind())
    }

    /// Those keys of dropped followers that have this prefix; `None`: a follower lacks one of them.
    pub fn known_keys(&self, prefix: &str) -> Option<Vec<String>> {
        let prefix = prefix.to_owned();
        self.ask(move |server| {
            let are_known = server.followers.have_demanded();
            are_known.then(|| server.table.with_prefix(&prefix))
        })
    }

    /// Drops a follower: responses do not wait for it any more, its connection
    /// is closed, and from now on it is refused with
    /// [`ErrorKind::Dropped`](crate::ErrorKind::Dropped). `key` is set without a value, and nothing is answered until all other followers have
    /// it: none of them continues with the copy of the dropped one.
    pub fn drop_follower(&self, id: u64, key: &str) {
        let key = key.to_owned();
        self.ask(move |server| server.drop_follower(id, &key));
    }

    /// Drops all followers, and accepts none any more.
    pub fn drop_followers(&self) {
        self.ask(|server| {
            server.is_alone = true;
            server.followers.clear();
            let conns = server.conns.iter();
            let follow = conns.filter(|(_, conn)| matches!(conn.state, State::Follower(_)));
            for id in follow.map(|(id, _)| *id).collect::<Vec<_>>() {
                server.close(id);
            }
        });
    }

    /// Keys with this prefix are not copied to followers, and responses about them wait for none. To be called before the
    /// first one follows.
    pub fn leave_out(&self, prefix: &str) {
        let prefix = prefix.to_owned();
        self.ask(|server| server.followers.leave_out(prefix));
    }

    /// Runs this on the server's thread, between two rounds of its loop, and returns the result.
    fn ask<T: Default + Send + 'static>(
        &self,
        what: impl FnOnce(&mut ServerLoop) -> T + Send + 'static,
    ) -> T {
        let (done, is_done) = sync_channel(1);
        let task = move |server: &mut ServerLoop| {
            // The caller may have given up.
            let _ = done.try_send(what(server));
        };
        let _ = self.tasks.send(Box::new(task));
        // A full buffer means that the thread wakes up anyway.
        let _ = (&self.waker).write(&[1]);
        // The thread never blocks on a client; where it has ended, no client is served.
        is_done.recv_timeout(TASK_TIMEOUT).unwrap_or_default()
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // A full buffer means that the thread wakes up anyway.
        let _ = self.waker.write(&[1]);
        if let Some(thread) = self.thread.take() {
            // The thread never blocks on a client, so it ends at once. A panic in it
            // has been printed.
            let _ = thread.join();
        }
    }
}
