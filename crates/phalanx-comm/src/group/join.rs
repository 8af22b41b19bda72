//! How processes become a group.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use phalanx_base::format::duration;
use phalanx_store::{MemStore, Store, TcpServer, TcpStore, host_port};
use phalanx_wire::Token;

use super::address_file::{Address, AddressFile};
use super::launch::{
    Launch, Meeting, STORE_FILE, TokenSource, compute_threads, environment, no_token, port_range,
    token_variable,
};
use super::options::InitOptions;
use super::token::read_token;
use crate::notice::{HostSpeaker, Waiting, say};
use crate::sync::lock;
use crate::transport::{
    BindAddr, FormOptions, Lost, Mesh, PortRange, form_unless, host_addresses, listen, none_lost,
    thread_mesh, what_loopback_means,
};
use crate::{Error, Result, limits};

/// Id of the group of all ranks; subgroups have other ids.
pub(super) const WORLD_GROUP: u32 = 0;

/// Shortest and longest time that a store may take to answer a rank.
const STORE_MIN: Duration = Duration::from_secs(1);
/// See [`STORE_MIN`].
const STORE_MAX: Duration = Duration::from_secs(10);

/// Threads of a rank that use the store at once: its own, and the one that watches the group.
const ASKING_THREADS: usize = 2;
/// Pause after a name failed to resolve.
const RESOLVE_PAUSE: Duration = Duration::from_millis(500);
/// Pause between two looks at an address file, and the first time limit for the address in it; the limit doubles.
const FILE_PAUSE: Duration = Duration::from_millis(20);
const FIRST_DIAL: Duration = Duration::from_millis(250);
/// Interval at which to check whether a wait is to be reported.
const INTERVAL: Duration = Duration::from_millis(100);

/// What later subgroups, and later generations, need to form their own links.
#[derive(Clone)]
pub(super) struct Processes {
    pub(super) store: Arc<dyn Store>,
    pub(super) token: Token,
    pub(super) generation: u32,
    pub(super) bind: BindAddr,
    pub(super) options: InitOptions,
    /// Rank 0 hosts the store unless the launcher does; the store ends with the last of
    /// the groups.
    pub(super) server: Option<Arc<TcpServer>>,
    /// Rank 0's file of `file://`, until all ranks have joined.
    address_file: Option<Arc<AddressFile>>,
}

impl Processes {
    /// Those that meet in a `store` which was opened before.
    pub(super) fn within(store: Arc<dyn Store>, token: Token, options: InitOptions) -> Processes {
        Processes {
            store,
            token,
            generation: options.generation.unwrap_or(0),
            bind: options.bind.map_or(BindAddr::Loopback, BindAddr::Ip),
            server: None,
            address_file: None,
            options,
        }
    }

    /// Forms the links of one group.
    pub(super) fn form(
        &self,
        group: u32,
        rank: usize,
        world: usize,
        timeout: Duration,
    ) -> Result<Mesh> {
        self.form_unless(group, rank, world, timeout, &none_lost)
    }

    /// The same, which fails as soon as `lost` names a rank.
    pub(super) fn form_unless(
        &self,
        group: u32,
        rank: usize,
        world: usize,
        timeout: Duration,
        lost: Lost<'_>,
    ) -> Result<Mesh> {
        if world == 1 {
            return lone_mesh();
        }
        let mesh = form_unless(
            &*self.store,
            &FormOptions {
                rank,
                world,
                token: self.token.clone(),
                generation: self.generation,
                group,
                timeout,
                bind: self.bind,
                ports: port_range(self.options.port_range, environment)?,
                server: self.server.clone(),
                prefer: self.options.transport,
                ring_bytes: self.options.ring_bytes,
                compute_threads: compute_threads(self.options.compute_threads, environment)?,
                arena_bytes: self.options.arena_bytes,
            },
            lost,
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

/// Resolves the options, opens the store and forms the links.
pub(super) fn meet(options: InitOptions) -> Result<(Launch, Mesh, Processes)> {
    limits::raise_open_files();
    let started = Instant::now();
    let launch = Launch::resolve(&options, environment)?;
    let met = meet_as(&launch, options, started);
    let (mesh, processes) = met.map_err(|e| e.with_rank(launch.rank))?;
    Ok((launch, mesh, processes))
}

fn meet_as(launch: &Launch, options: InitOptions, started: Instant) -> Result<(Mesh, Processes)> {
    let timeout = options.timeout;
    let mut processes = open(launch, options, started)?;
    let left = timeout.saturating_sub(started.elapsed());
    let mesh = processes.form(WORLD_GROUP, launch.rank, launch.world, left)?;
    processes.address_file = None;
    Ok((mesh, processes))
}

/// Opens the store of the job, which rank 0 hosts where nothing else does.
pub(super) fn open(launch: &Launch, options: InitOptions, started: Instant) -> Result<Processes> {
    let left = || options.timeout.saturating_sub(started.elapsed());
    let known = match &options.token {
        Some(token) => Some(token.clone()),
        None => known_token(&launch.token)?,
    };
    let mut server = None;
    let mut address_file = None;
    let (store, token) = match &launch.meeting {
        Meeting::Alone => {
            return Ok(Processes {
                store: Arc::new(MemStore::new()),
                token: known.map_or_else(mint, Ok)?,
                generation: launch.generation,
                bind: bind(&options, None),
                options: options.clone(),
                server,
                address_file,
            });
        }
        Meeting::Tcp { host, port } => {
            let token = known.ok_or_else(no_token)?;
            let name = First { host, port: *port };
            let hosts_it = launch.rank == 0 && !launch.external_store;
            if !launch.external_store {
                name.check_port(port_range(options.port_range, environment)?)?;
            }
            let place = name.place();
            let report = WaitLines::new(token.job_id(), &place, &left);
            if hosts_it {
                server = Some(Arc::new(name.host_store(&token, &report)?));
            }
            let hosted = launch.rank == 0 || launch.external_store;
            let store = name.dial(&token, &options, (hosts_it, hosted), &report)?;
            (store, token)
        }
        Meeting::File(path) if launch.rank == 0 => {
            let token = known.map_or_else(mint, Ok)?;
            let ports = port_range(options.port_range, environment)?;
            let listener = listen(bind(&options, None).resolve()?, ports, 0)?;
            let hosted = TcpServer::from_listener(listener, token.clone())?;
            let place = hosted.local_addr().to_string();
            server = Some(Arc::new(hosted));
            let store = TcpStore::connect(&place, token.clone(), left())?;
            address_file = Some(Arc::new(AddressFile::write(path, &place, &token)?));
            (store, token)
        }
        Meeting::File(path) => {
            let shown = path.display();
            let report = WaitLines::new(0, &shown.to_string(), &left);
            let what = format!("the store of rank 0, whose address rank 0 writes into {shown}");
            let mut last = String::new();
            let found = report.during(&what, |failed| {
                dial_written(path, known, &left, |why| {
                    last.clone_from(&why);
                    failed(why);
                })
            })?;
            found.ok_or_else(|| {
                Error::timeout(format!(
                    "cannot reach the store of rank 0, whose address rank 0 writes into {shown}: {last} (was rank 0 started, \
                     with the same file?)"
                ))
            })?
        }
    };
    // No single request may use up the time in which all ranks must join.
    store.set_response_timeout((options.timeout / 5).clamp(STORE_MIN, STORE_MAX));
    if let Err(e) = store.reserve_connections(ASKING_THREADS) {
        tracing::debug!("cannot reserve connections to the store: {e}");
    }
    Ok(Processes {
        bind: bind(&options, store.local_ip()),
        store: Arc::new(store),
        token,
        generation: launch.generation,
        options: options.clone(),
        server,
        address_file,
    })
}

/// Connects to the address in the file at `path`, up to the deadline. The file may be that of an earlier job, which rank 0
/// replaces, so it is read again after each failure.
fn dial_written(
    path: &Path,
    known: Option<Token>,
    left: &dyn Fn() -> Duration,
    mut failed: impl FnMut(String),
) -> Result<Option<(TcpStore, Token)>> {
    let mut limit = FIRST_DIAL;
    loop {
        let is_last = left().is_zero();
        match Address::read(path)? {
            None => failed("there is no address in it yet".to_owned()),
            Some(address) => {
                address.check_reachable(path)?;
                let token = known.as_ref().unwrap_or(&address.token).clone();
                match TcpStore::connect(&address.place, token.clone(), limit.min(left())) {
                    Ok(store) => return Ok(Some((store, token))),
                    Err(e) => failed(e.to_string()),
                }
                limit *= 2;
            }
        }
        if is_last {
            return Ok(None);
        }
        std::thread::sleep(FILE_PAUSE.min(left()));
    }
}

/// Reports what this rank waits for before it has a store, unless another rank of its host does.
struct WaitLines<'a> {
    speaker: Mutex<HostSpeaker>,
    /// Time until the deadline.
    left: &'a (dyn Fn() -> Duration + Sync),
}

impl WaitLines<'_> {
    fn new<'a>(job: u64, place: &str, left: &'a (dyn Fn() -> Duration + Sync)) -> WaitLines<'a> {
        WaitLines {
            speaker: Mutex::new(HostSpeaker::new(job, place)),
            left,
        }
    }

    fn speaks(&self) -> bool {
        let mut speaker = lock(&self.speaker);
        speaker.speaks()
    }

    /// Runs `work`, which passes the reason of each failed attempt to its argument. While it takes long, reports
    /// that this rank waits for `what`, and the last reason.
    fn during<R>(&self, what: &str, work: impl FnOnce(&dyn Fn(String)) -> R) -> R {
        let last = Mutex::new("no answer yet".to_owned());
        let waits = |waited: Duration| {
            let (waited, left) = (waited.as_secs(), duration((self.left)()));
            let last = lock(&last);
            format!("forming the group: waiting {waited} s for {what} ({last}); deadline in {left}")
        };
        std::thread::scope(|scope| {
            let (running, stopped) = channel::<()>();
            let talking = std::thread::Builder::new()
                .name("phalanx-waiting".to_owned())
                .spawn_scoped(scope, move || {
                    let mut waiting = Waiting::start();
                    while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                        if let Some(waited) = waiting.due()
                            && self.speaks()
                        {
                            say(&waits(waited));
                        }
                    }
                });
            if let Err(e) = talking {
                tracing::debug!("cannot start a thread that says what is waited for: {e}");
            }
            let failed = |reason| {
                *lock(&last) = reason;
            };
            let result = work(&failed);
            drop(running);
            result
        })
    }
}

/// The host and port of rank 0, as they were given.
struct First<'a> {
    host: &'a str,
    port: u16,
}

impl First<'_> {
    fn place(&self) -> String {
        host_port(self.host, self.port)
    }

    /// The port must be one of `ports`, unless all ranks are on one host.
    fn check_port(&self, ports: Option<PortRange>) -> Result<()> {
        let is_local = self.host == "localhost"
            || self.host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
        match ports.filter(|ports| !is_local && !ports.contains(self.port)) {
            None => Ok(()),
            Some(ports) => Err(Error::usage(format!(
                "the store's port {} is outside --port-range {ports}: choose one of these for it too, for instance {}",
                self.port,
                ports.first()
            ))),
        }
    }

    fn resolve(&self) -> std::io::Result<Vec<SocketAddr>> {
        let found: Vec<SocketAddr> = (self.host, self.port).to_socket_addrs()?.collect();
        match found.is_empty() {
            true => Err(std::io::Error::other("the name has no address")),
            false => Ok(found),
        }
    }

    /// Listens on the first of the addresses that is local. The name may stay unknown until the
    /// deadline, like that of a pod that has just started.
    fn host_store(&self, token: &Token, report: &WaitLines<'_>) -> Result<TcpServer> {
        let what = format!("the name {} of this host to resolve", self.host);
        let addresses = report.during(&what, |failed| {
            loop {
                match self.resolve() {
                    Ok(addresses) => return Ok(addresses),
                    Err(e) if (report.left)().is_zero() => return Err(e),
                    Err(e) => failed(e.to_string()),
                }
                std::thread::sleep(RESOLVE_PAUSE.min((report.left)()));
            }
        });
        let addresses = addresses.map_err(|e| {
            Error::timeout(format!(
                "rank 0 cannot host the store: the name {} did not resolve on this host ({e}); \
                 give an address of this host instead{}",
                self.host,
                for_instance(self.port)
            ))
            .with_source(e)
        })?;
        let mut last = None;
        for address in &addresses {
            match TcpServer::bind(*address, token.clone()) {
                Ok(server) => {
                    if let Some(means) = what_loopback_means(self.host, address.ip()) {
                        say(&format!(
                            "warning: {means}: if ranks run on other hosts, start all ranks with an address that they can reach{}",
                            for_instance(self.port)
                        ));
                    }
                    return Ok(server);
                }
                Err(e) => last = Some(Error::from(e)),
            }
        }
        let Some(last) = last else {
            return Err(Error::internal("no address to listen on"));
        };
        Err(Error::new(
            last.kind(),
            format!(
                "rank 0 cannot host the store on {}: {}; the master address must be one of \
                 this host's{}, and the port must be free (under torchrun it is the one after MASTER_PORT, \
                 where PyTorch's own store is; set PHALANX_STORE=host:port if something else hosts our store)",
                self.place(),
                last.message(),
                for_instance(self.port)
            ),
        )
        .with_source(last))
    }

    /// Connects to the store there, which this rank `hosts`; `hosted`: this rank or its launcher does.
    fn dial(
        &self,
        token: &Token,
        options: &InitOptions,
        (hosts, hosted): (bool, bool),
        report: &WaitLines<'_>,
    ) -> Result<TcpStore> {
        let place = self.place();
        let store = report.during(&format!("the store of rank 0 at {place}"), |failed| {
            let mut is_first = true;
            let failed = |error: &phalanx_store::Error| {
                if std::mem::take(&mut is_first) && !hosts {
                    self.warn_of_loopback(report);
                }
                failed(error.to_string());
            };
            let left = (report.left)();
            let file = environment(STORE_FILE).filter(|file| !file.is_empty());
            match file {
                // The launcher ends its ranks if there is no other store.
                Some(file) => {
                    let moves = (file.into(), options.timeout);
                    TcpStore::connect_moving(&place, token.clone(), left, moves, failed)
                }
                None => TcpStore::connect_with(&place, token.clone(), left, failed),
            }
        });
        store.map_err(|e| {
            let hint = match hosted {
                true => "",
                false => " (rank 0 hosts it: was rank 0 started, and can this host reach it?)",
            };
            let error = Error::from(e);
            let message = format!(
                "cannot reach the store at {place}{hint}: {}",
                error.message()
            );
            Error::new(error.kind(), message).with_source(error)
        })
    }

    /// Warns at once if the name resolves to this host, where rank 0 does not answer.
    fn warn_of_loopback(&self, report: &WaitLines<'_>) {
        let Ok(addresses) = self.resolve() else {
            return;
        };
        if let Some(address) = addresses.first()
            && addresses.iter().all(|address| address.ip().is_loopback())
            && let Some(means) = what_loopback_means(self.host, address.ip())
            && report.speaks()
        {
            say(&format!(
                "warning: {means}: if rank 0 runs on another host, start all ranks with its address instead"
            ));
        }
    }
}

/// ` (for instance ADDRESS:PORT)`, with an address of this host.
fn for_instance(port: u16) -> String {
    let address = host_addresses().first().copied();
    let text = address.map(|ip| format!(" (for instance {})", SocketAddr::new(ip, port)));
    text.unwrap_or_default()
}

pub(super) fn mint() -> Result<Token> {
    Token::generate().map_err(|e| {
        Error::new(crate::ErrorKind::Io, format!("cannot make a token: {e}")).with_source(e)
    })
}

/// Where to listen for peers; `local` is our address on the way to the store.
fn bind(options: &InitOptions, local: Option<IpAddr>) -> BindAddr {
    match options.bind.or(local.filter(|ip| !ip.is_loopback())) {
        Some(ip) => BindAddr::Ip(ip),
        None => BindAddr::Loopback,
    }
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
