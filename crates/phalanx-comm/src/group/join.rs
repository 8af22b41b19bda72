//! How processes become a group.

use std::fs::OpenOptions;
use std::io::{ErrorKind as IoKind, Read};
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_store::{FileStore, MemStore, Store, TcpServer, TcpStore};
use phalanx_wire::Token;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::launch::{
    Launch, Meeting, TokenSource, compute_threads, environment, no_token, streams, token_variable,
};
use super::options::{InitOptions, Transport};
use crate::transport::{BindAddr, FormOptions, Mesh, Prefer, form, thread_mesh};
use crate::wait::deadline_in;
use crate::{Error, Result, limits};

/// Id of the group of all ranks; subgroups have other ones.
pub(super) const WORLD_GROUP: u32 = 0;

/// Shortest and longest time that a store may take to answer a rank.
const STORE_MIN: Duration = Duration::from_secs(1);
/// See [`STORE_MIN`].
const STORE_MAX: Duration = Duration::from_secs(10);

/// What later subgroups, and later epochs, need to form their own links.
#[derive(Clone)]
pub(super) struct Processes {
    pub(super) store: Arc<dyn Store>,
    pub(super) token: Token,
    pub(super) epoch: u32,
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
                epoch: self.epoch,
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
        mesh.agree_through(&self.store, self.epoch, group);
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
        None => read_token(&launch.token)?,
    };
    let processes = match &launch.meeting {
        Meeting::Alone => Processes {
            store: Arc::new(MemStore::new()),
            token: known.map_or_else(mint, Ok)?,
            epoch: launch.epoch,
            bind: bind(&options, None),
            options: options.clone(),
            _host: None,
        },
        Meeting::Tcp { host, port } => {
            let token = known.ok_or_else(no_token)?;
            let addresses = resolve(host, *port)?;
            let server = if launch.rank == 0 && !launch.external_store {
                Some(host_store(&addresses, &token, host, *port)?)
            } else {
                None
            };
            let place = if host.contains(':') {
                format!("[{host}]:{port}")
            } else {
                format!("{host}:{port}")
            };
            let store = TcpStore::connect(&place, token.clone(), left()).map_err(|e| {
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
            store.set_answer_limit((options.timeout / 5).clamp(STORE_MIN, STORE_MAX));
            Processes {
                store: Arc::new(store),
                token,
                epoch: launch.epoch,
                bind: bind(&options, addresses.first().copied()),
                options: options.clone(),
                _host: server.map(Arc::new),
            }
        }
        Meeting::File(path) => {
            let store: Arc<dyn Store> = Arc::new(FileStore::open(path)?);
            let token = match known {
                Some(token) => token,
                None => agree_on_token(&*store, launch.epoch)?,
            };
            Processes {
                store,
                token,
                epoch: launch.epoch,
                bind: bind(&options, None),
                options: options.clone(),
                _host: None,
            }
        }
    };
    let mesh = processes.form(WORLD_GROUP, launch.rank, launch.world, left())?;
    if launch.rank == 0 && matches!(launch.meeting, Meeting::File(_)) {
        // Everyone has it, and the file may outlive the job.
        processes.store.delete(&token_key(launch.epoch))?;
    }
    Ok((mesh, processes))
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
fn read_token(source: &TokenSource) -> Result<Option<Token>> {
    let text = match source {
        TokenSource::None => return Ok(None),
        TokenSource::Variable => token_variable().unwrap_or_default(),
        TokenSource::File(path) => read_token_file(path)?,
    };
    let token = Token::from_hex(&text).map_err(|e| {
        let place = match source {
            TokenSource::File(path) => format!("the file {}", path.display()),
            _ => "PHALANX_TOKEN".to_owned(),
        };
        Error::usage(format!("{place} holds no token: {e}")).with_source(e)
    })?;
    Ok(Some(token))
}

/// Hexadecimal digits of a token.
const TOKEN_TEXT_BYTES: usize = 64;
/// How long a pipe may take to give a token.
const TOKEN_WITHIN: Duration = Duration::from_secs(10);

fn read_token_file(path: &Path) -> Result<String> {
    let failed = |e| {
        Error::io(
            format_args!("cannot read the token file {}", path.display()),
            e,
        )
    };
    // Not blocking: opening a named pipe would wait for its writer.
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)
        .map_err(failed)?;
    let about = file.metadata().map_err(failed)?;
    // What has no name in any folder is private: memfds, pipes of a launcher
    // (whose mode is 600).
    let named = about.nlink() > 0 && (about.is_file() || about.file_type().is_fifo());
    if named && about.mode() & 0o077 != 0 {
        return Err(Error::usage(format!(
            "the token file {} can be read by others (mode {:o}): chmod 600 it",
            path.display(),
            about.mode() & 0o777
        )));
    }
    check_owner(path, about.uid(), rustix::process::geteuid().as_raw())?;
    // Exactly what is needed: a pipe whose writer stays must not block us.
    let mut text = vec![0; TOKEN_TEXT_BYTES];
    let mut have = 0;
    let until = deadline_in(TOKEN_WITHIN);
    while have < text.len() {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: left.as_secs().cast_signed(),
            tv_nsec: left.subsec_nanos().into(),
        };
        let mut fds = [PollFd::new(&file, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) => {
                return Err(Error::timeout(format!(
                    "the token file {} is a pipe into which nobody has written a token within {} s",
                    path.display(),
                    TOKEN_WITHIN.as_secs()
                )));
            }
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(e) => return Err(failed(e.into())),
        }
        match file.read(&mut text[have..]) {
            Ok(0) => break,
            Ok(n) => have += n,
            Err(e) if matches!(e.kind(), IoKind::WouldBlock | IoKind::Interrupted) => {}
            Err(e) => return Err(failed(e)),
        }
    }
    text.truncate(have);
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Whoever owns the file may write another token into it, and knows this one.
fn check_owner(path: &Path, owner: u32, me: u32) -> Result<()> {
    // Root may run the job of a user, whose file is then as good.
    if owner == me || owner == 0 || me == 0 {
        return Ok(());
    }
    Err(Error::usage(format!(
        "the token file {} belongs to user {owner}, this process runs as user {me}: use a file of \
         your own (chown {me}, chmod 600)",
        path.display()
    )))
}

fn token_key(epoch: u32) -> String {
    format!("join/{epoch}/token")
}

/// The ranks of one private file agree on a token through it: whoever may
/// read the file may join, which is what its mode is for.
fn agree_on_token(store: &dyn Store, epoch: u32) -> Result<Token> {
    let mine = mint()?.to_hex();
    let agreed = store.compare_set(&token_key(epoch), None, mine.as_bytes())?;
    Token::from_hex(&String::from_utf8_lossy(&agreed)).map_err(|e| {
        Error::usage(format!("the store file holds a broken token: {e}")).with_source(e)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use rustix::fs::FileType;
    use std::fs::File;
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn token_file_must_be_private() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let token = Token::generate().unwrap();
        writeln!(file, "{}", token.to_hex()).unwrap();
        let source = TokenSource::File(file.path().into());
        let read = read_token(&source).unwrap().unwrap();
        assert_eq!(read.to_hex(), token.to_hex());
        let mode = std::fs::Permissions::from_mode(0o644);
        std::fs::set_permissions(file.path(), mode).unwrap();
        let error = read_token(&source).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.to_string().contains("chmod 600"), "{error}");
    }

    #[test]
    fn token_file_must_be_ours_or_roots() {
        let path = Path::new("job.token");
        check_owner(path, 1000, 1000).unwrap();
        check_owner(path, 0, 1000).unwrap();
        check_owner(path, 1000, 0).unwrap();
        let error = check_owner(path, 1001, 1000).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        let text = error.to_string();
        assert!(text.contains("job.token belongs to user 1001"), "{text}");
        assert!(text.contains("as user 1000"), "{text}");
    }

    #[test]
    fn a_pipe_that_others_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, mode, 0).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        let error = read_token_file(&path).unwrap_err();
        assert!(error.to_string().contains("chmod 600"), "{error}");
    }

    #[test]
    fn broken_token_is_refused_and_not_repeated() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"deadbeef").unwrap();
        let error = read_token(&TokenSource::File(file.path().into())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(!error.to_string().contains("deadbeef"), "{error}");
    }

    #[test]
    fn token_comes_through_a_pipe_that_stays_open() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let token = Token::generate().unwrap();
        let mut writer = File::from(write);
        writer.write_all(token.to_hex().as_bytes()).unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&read));
        let text = read_token_file(Path::new(&path)).unwrap();
        assert_eq!(text, token.to_hex());
        drop(writer);
    }

    #[test]
    fn ranks_of_one_file_agree_on_a_token() {
        let store = MemStore::new();
        let first = agree_on_token(&store, 0).unwrap();
        let second = agree_on_token(&store, 0).unwrap();
        assert_eq!(first.to_hex(), second.to_hex());
        assert_ne!(agree_on_token(&store, 1).unwrap().to_hex(), first.to_hex());
    }
}
