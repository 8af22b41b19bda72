//! How processes become a group.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use phalanx_store::{FileStore, MemStore, Store, TcpServer, TcpStore};
use phalanx_wire::Token;

use super::launch::{
    Launch, Meeting, TokenSource, compute_threads, environment, no_token, streams, token_variable,
};
use super::options::{InitOptions, Transport};
use super::token::read_token;
use crate::notice::{Waiting, say, seconds};
use crate::transport::{BindAddr, FormOptions, Mesh, Prefer, form, thread_mesh};
use crate::{Error, Result, limits};

/// Id of the group of all ranks; subgroups have other ones.
pub(super) const WORLD_GROUP: u32 = 0;

/// Shortest and longest time that a store may take to answer a rank.
const STORE_MIN: Duration = Duration::from_secs(1);
/// See [`STORE_MIN`].
const STORE_MAX: Duration = Duration::from_secs(10);

/// Threads of a rank that ask the store at once: its own, and one that beats or
/// watches.
const ASKING_THREADS: usize = 2;
/// Distance between two looks at whether a wait is to be reported.
const TURN: Duration = Duration::from_millis(100);

/// What later subgroups, and later generations, need to form their own links.
#[derive(Clone)]
pub(super) struct Processes {
    pub(super) store: Arc<dyn Store>,
    pub(super) token: Token,
    pub(super) generation: u32,
    pub(super) bind: BindAddr,
    pub(super) options: InitOptions,
    /// Rank 0 hosts the store unless the launcher does; it ends with the last
    /// of its groups. Held, not used.
    pub(super) _host: Option<Arc<TcpServer>>,
}

impl Processes {
    /// Forms the links of one group.
    pub(super) fn form(
        &self,
        group: u32,
        rank: usize,
        world: usize,
        timeout: Duration,
    ) -> Result<Mesh> {
        if world == 1 {
            return lone_mesh();
        }
        let mesh = form(
            &*self.store,
            &FormOptions {
                rank,
                world,
                token: self.token.clone(),
                generation: self.generation,
                group,
                timeout,
                bind: self.bind,
                prefer: match self.options.transport {
                    Transport::Auto => Prefer::Auto,
                    Transport::Shm => Prefer::Shm,
                    Transport::Tcp => Prefer::Tcp,
                },
                ring_bytes: self.options.ring_bytes,
                compute_threads: compute_threads(self.options.compute_threads, environment)?,
                arena_bytes: self.options.arena_bytes,
                streams: streams(self.options.streams, environment)?,
            },
        )?;
        mesh.agree_through(&self.store, self.generation, group);
        Ok(mesh)
    }
}

/// The mesh of a group of one: no links.
pub(super) fn lone_mesh() -> Result<Mesh> {
    thread_mesh(1, 0)
        .pop()
        .ok_or_else(|| Error::internal("no mesh for a group of one"))
}

/// What [`meet`] found out.
pub(super) struct Met {
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) mesh: Mesh,
    pub(super) processes: Processes,
}

/// Resolves the options, opens the store and forms the links.
pub(super) fn meet(options: InitOptions) -> Result<Met> {
    limits::raise_open_files();
    let started = Instant::now();
    let launch = Launch::resolve(&options, environment)?;
    let (rank, world) = (launch.rank, launch.world);
    meet_as(&launch, options, started)
        .map_err(|e| e.with_rank(rank))
        .map(|(mesh, processes)| Met {
            rank,
            world,
            mesh,
            processes,
        })
}

fn meet_as(launch: &Launch, options: InitOptions, started: Instant) -> Result<(Mesh, Processes)> {
    let left = || options.timeout.saturating_sub(started.elapsed());
    let known = match &options.token {
        Some(token) => Some(token.clone()),
        None => known_token(&launch.token)?,
    };
    let processes = match &launch.meeting {
        Meeting::Alone => Processes {
            store: Arc::new(MemStore::new()),
            token: known.map_or_else(mint, Ok)?,
            generation: launch.generation,
            bind: bind(&options, None),
            options: options.clone(),
            _host: None,
        },
        Meeting::Tcp { host, port } => {
            let token = known.ok_or_else(no_token)?;
            let server = if launch.rank == 0 && !launch.external_store {
                Some(host_store(&resolve(host, *port)?, &token, host, *port)?)
            } else {
                None
            };
            let place = if host.contains(':') {
                format!("[{host}]:{port}")
            } else {
                format!("{host}:{port}")
            };
            // One rank of each host, as far as that is known.
            let speaks = launch.rank == 1 || environment("LOCAL_RANK").as_deref() == Some("0");
            let last = Mutex::new(String::new());
            let waits = |waited: Duration| {
                let (waited, left) = (waited.as_secs(), seconds(left()));
                let last = last.lock().unwrap_or_else(PoisonError::into_inner);
                format!(
                    "forming the group: waiting {waited} s for the store of rank 0 at {place}{last}; deadline in {left}"
                )
            };
            let connect = || {
                TcpStore::connect_with(&place, token.clone(), left(), |error| {
                    let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
                    *last = format!(" ({error})");
                })
            };
            let connected = match speaks {
                true => while_saying(connect, waits),
                false => connect(),
            };
            let store = connected.map_err(|e| {
                let hint = if launch.rank == 0 || launch.external_store {
                    String::new()
                } else {
                    " (rank 0 hosts it: was rank 0 started, and can this host reach it?)".into()
                };
                let error = Error::from(e);
                let message = format!(
                    "cannot reach the store at {place}{hint}: {}",
                    error.message()
                );
                Error::new(error.kind(), message).with_source(error)
            })?;
            // No single question may use up the time in which all must come.
            store.set_response_timeout((options.timeout / 5).clamp(STORE_MIN, STORE_MAX));
            if let Err(e) = store.reserve_connections(ASKING_THREADS) {
                tracing::debug!("cannot reserve connections to the store: {e}");
            }
            Processes {
                store: Arc::new(store),
                token,
                generation: launch.generation,
                // Not before: the name may be known only when rank 0 is up.
                bind: bind(&options, resolve(host, *port)?.first().copied()),
                options: options.clone(),
                _host: server.map(Arc::new),
            }
        }
        Meeting::File(path) => {
            let store: Arc<dyn Store> = Arc::new(FileStore::open(path)?);
            let token = match known {
                Some(token) => token,
                None => agree_on_token(&*store, launch.generation)?,
            };
            Processes {
                store,
                token,
                generation: launch.generation,
                bind: bind(&options, None),
                options: options.clone(),
                _host: None,
            }
        }
    };
    let mesh = processes.form(WORLD_GROUP, launch.rank, launch.world, left())?;
    if launch.rank == 0 && matches!(launch.meeting, Meeting::File(_)) {
        // Everyone has it, and the file may outlive the job.
        processes.store.delete(&token_key(launch.generation))?;
    }
    Ok((mesh, processes))
}

/// Runs `work`; while it takes long, writes what `text` says of it.
fn while_saying<R>(work: impl FnOnce() -> R, text: impl Fn(Duration) -> String + Send) -> R {
    std::thread::scope(|scope| {
        let (running, stopped) = channel::<()>();
        let talking = std::thread::Builder::new()
            .name("phalanx-waiting".to_owned())
            .spawn_scoped(scope, move || {
                let mut waiting = Waiting::start();
                while stopped.recv_timeout(TURN) == Err(RecvTimeoutError::Timeout) {
                    if let Some(waited) = waiting.due() {
                        say(&text(waited));
                    }
                }
            });
        if let Err(e) = talking {
            tracing::debug!("cannot start a thread that says what is waited for: {e}");
        }
        let result = work();
        drop(running);
        result
    })
}

pub(super) fn mint() -> Result<Token> {
    Token::generate().map_err(|e| {
        Error::new(crate::ErrorKind::Io, format!("cannot make a token: {e}")).with_source(e)
    })
}

/// Where to listen for peers; `towards` is the store.
fn bind(options: &InitOptions, towards: Option<SocketAddr>) -> BindAddr {
    match (options.bind, towards) {
        (Some(ip), _) => BindAddr::Ip(ip),
        (None, Some(store)) if !store.ip().is_loopback() => BindAddr::Auto(store),
        (None, _) => BindAddr::Loopback,
    }
}

fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>> {
    let found: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(|e| Error::io(format_args!("cannot find the host {host:?}"), e))?
        .collect();
    if found.is_empty() {
        return Err(Error::usage(format!("the host {host:?} has no address")));
    }
    Ok(found)
}

/// Listens on the first of the master's addresses that is one of ours.
fn host_store(addresses: &[SocketAddr], token: &Token, host: &str, port: u16) -> Result<TcpServer> {
    let mut last = None;
    for address in addresses {
        match TcpServer::bind(*address, token.clone()) {
            Ok(server) => return Ok(server),
            Err(e) => last = Some(Error::from(e)),
        }
    }
    let Some(last) = last else {
        return Err(Error::internal("no address to listen on"));
    };
    Err(Error::new(
        last.kind(),
        format!(
            "rank 0 cannot host the store on {host}:{port}: {}; the master address must be one of \
             this host's, and the port must be free (under torchrun it is the one after MASTER_PORT, \
             where PyTorch's own store is; set PHALANX_STORE=host:port if something else hosts our store)",
            last.message()
        ),
    )
    .with_source(last))
}

/// Reads the token that the environment names.
fn known_token(source: &TokenSource) -> Result<Option<Token>> {
    match source {
        TokenSource::None => Ok(None),
        TokenSource::File(path) => read_token(path).map(Some),
        TokenSource::Variable => Token::from_hex(&token_variable().unwrap_or_default())
            .map(Some)
            .map_err(|e| Error::usage(format!("PHALANX_TOKEN holds no token: {e}")).with_source(e)),
    }
}

fn token_key(generation: u32) -> String {
    format!("join/{generation}/token")
}

/// The ranks of one private file agree on a token through it: whoever may
/// read the file may join, which is what its mode is for.
fn agree_on_token(store: &dyn Store, generation: u32) -> Result<Token> {
    let mine = mint()?.to_hex();
    let agreed = store.compare_set(&token_key(generation), None, mine.as_bytes())?;
    Token::from_hex(&String::from_utf8_lossy(&agreed)).map_err(|e| {
        Error::usage(format!("the store file holds a broken token: {e}")).with_source(e)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_one_file_agree_on_a_token() {
        let store = MemStore::new();
        let first = agree_on_token(&store, 0).unwrap();
        let second = agree_on_token(&store, 0).unwrap();
        assert_eq!(first.to_hex(), second.to_hex());
        assert_ne!(agree_on_token(&store, 1).unwrap().to_hex(), first.to_hex());
    }
}
