//! Where launchers meet: the store of node 0, and the way to it.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use phalanx_comm::transport::{
    host_addresses, is_own_address, local_address_towards, what_loopback_means,
};
use phalanx_store::{ErrorKind as StoreKind, TcpServer, host_port};
use phalanx_wire::Token;

use super::{QUIET, SLICE};
use crate::error::{Error, ErrorKind, Result};
use crate::place::Meeting;
use crate::{say, spawn, system};

/// Pause between two lookups of a name.
const LOOKUP_PAUSE: Duration = Duration::from_millis(500);

/// Where the store listens, and how it is reached.
pub struct NodeStore {
    /// On node 0, the store itself.
    pub server: Option<TcpServer>,
    /// The address that this launcher connects to.
    pub dial: String,
    /// The address that it connected to first: that of node 0.
    pub first: String,
    /// The address that the ranks of this node connect to.
    pub store: String,
    /// The host of node 0, as its ranks and those of other nodes know it.
    pub master_addr: String,
    /// The address by which other nodes reach this one; on other nodes than 0 it is known when they have joined.
    pub bind: Option<IpAddr>,
    /// A warning to print.
    pub warning: Option<String>,
}

impl NodeStore {
    /// The store is at `address` now, on another node or this one.
    pub fn moved(&mut self, address: &str) {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        host.trim_matches(['[', ']'])
            .clone_into(&mut self.master_addr);
        address.clone_into(&mut self.dial);
        address.clone_into(&mut self.store);
    }
}

/// Hosts the store of a launch on one node.
///
/// # Errors
/// `System` where this host cannot connect to the store, as where the loopback interface is down.
pub fn host_locally(bind: Option<IpAddr>, token: &Token) -> Result<NodeStore> {
    let ip = bind.unwrap_or(IpAddr::from([127, 0, 0, 1]));
    let server = listen(&[SocketAddr::new(ip, 0)], token).map_err(|(error, _)| error)?;
    let dial = server.local_addr();
    local_address_towards(dial)
        .map_err(system(format!(
            "the ranks of this host cannot reach the store at {dial}"
        )))
        .map_err(|error| error.note("fix", "`ip link set lo up` starts the loopback interface"))?;
    Ok(NodeStore {
        dial: dial.to_string(),
        first: dial.to_string(),
        store: dial.to_string(),
        master_addr: dial.ip().to_string(),
        bind: None,
        warning: None,
        server: Some(server),
    })
}

/// Hosts the store on node 0, or says how to reach it. The name of node 0 is looked up until `deadline`;
/// `interrupted` is asked often and ends that.
///
/// # Errors
/// `Timeout` for a name that did not resolve, `Usage` for an address on which this host cannot listen.
pub fn meeting_store(
    meeting: &Meeting,
    bind: Option<IpAddr>,
    token: &Token,
    deadline: Instant,
    interrupted: &mut impl FnMut() -> Option<Error>,
) -> Result<NodeStore> {
    let named = host_port(&meeting.host, meeting.port);
    let elsewhere = || NodeStore {
        server: None,
        store: named.clone(),
        dial: named.clone(),
        first: named.clone(),
        master_addr: meeting.host.clone(),
        bind,
        warning: None,
    };
    let is_node_0 = match (meeting.node_rank, meeting.is_host) {
        (Some(rank), _) => rank == 0,
        (None, Some(is_host)) => is_host,
        (None, None) => is_here(&meeting.host, &named),
    };
    if !is_node_0 {
        return Ok(elsewhere());
    }
    let addresses: Vec<SocketAddr> = match bind {
        Some(ip) => vec![SocketAddr::new(ip, meeting.port)],
        None => resolve(&meeting.host, &named, deadline, interrupted)?,
    };
    let may_be_taken = meeting.node_rank.is_none() && meeting.is_host.is_none();
    let server = match listen(&addresses, token) {
        // Another launcher of the job on this host is node 0.
        Err((_, true)) if may_be_taken => return Ok(elsewhere()),
        listened => listened.map_err(|(error, _)| error)?,
    };
    let dial = server.local_addr();
    let means = what_loopback_means(&meeting.host, dial.ip()).filter(|_| bind.is_none());
    let warning = means.map(|means| {
        let own = own_address();
        format!("{means}: if a node is on another host, add --bind {own} here, or give all nodes --master-addr {own}")
    });
    Ok(NodeStore {
        store: match bind {
            Some(_) => dial.to_string(),
            None => named,
        },
        dial: dial.to_string(),
        first: dial.to_string(),
        master_addr: match bind {
            Some(_) => dial.ip().to_string(),
            None => meeting.host.clone(),
        },
        bind: Some(dial.ip()),
        warning,
        server: Some(server),
    })
}

/// Listens on the first address that works. Where that fails, also gives whether one of them is in use.
fn listen(
    addresses: &[SocketAddr],
    token: &Token,
) -> std::result::Result<TcpServer, (Error, bool)> {
    let mut last = None;
    for addr in addresses {
        match TcpServer::bind(*addr, token.clone()) {
            Ok(server) => return Ok(server),
            // A name of two addresses has one store only.
            Err(error) if error.kind() == StoreKind::AddressInUse => {
                last = Some(error);
                break;
            }
            Err(error) => last = Some(error),
        }
    }
    let Some(error) = last else {
        return Err((Error::usage("the master address has no address"), false));
    };
    let is_in_use = error.kind() == StoreKind::AddressInUse;
    let kind = match error.kind() {
        StoreKind::Internal | StoreKind::Io => ErrorKind::System,
        _ => ErrorKind::Usage,
    };
    let source = std::error::Error::source(&error).and_then(|e| e.downcast_ref::<std::io::Error>());
    let fix = match source.map(std::io::Error::kind) {
        Some(std::io::ErrorKind::AddrInUse) => {
            Some("end that program, or choose another --master-port".to_owned())
        }
        Some(std::io::ErrorKind::AddrNotAvailable) => Some(format!(
            "start --node-rank 0 on the host with that address; this one has {own}: give it as --master-addr to all nodes, \
             or add --bind {own} here",
            own = own_address()
        )),
        _ => None,
    };
    let message = error.to_string();
    let error = Error::new(kind, format!("cannot host the store of node 0: {message}"));
    let error = match fix {
        Some(fix) => error.note("fix", fix),
        None => error,
    };
    Err((error, is_in_use))
}

/// Whether `host` is this host: its name, or one of its addresses.
fn is_here(host: &str, named: &str) -> bool {
    let is_own = |address: SocketAddr| is_own_address(address.ip());
    let resolved = named.to_socket_addrs();
    host == phalanx_base::host_name() || resolved.is_ok_and(|mut all| all.any(is_own))
}

/// An address of this host that others may reach, or the word for one.
fn own_address() -> String {
    let known = host_addresses().first().map(IpAddr::to_string);
    known.unwrap_or_else(|| "ADDRESS".to_owned())
}

/// The addresses of `host`, this one, in `named`. A name that does not resolve yet may do so later, as that of a pod
/// that has just started: it is looked up again and again.
fn resolve(
    host: &str,
    named: &str,
    deadline: Instant,
    interrupted: &mut impl FnMut() -> Option<Error>,
) -> Result<Vec<SocketAddr>> {
    let started = Instant::now();
    let mut say_at = QUIET;
    loop {
        // A lookup cannot be interrupted, so it runs on a thread.
        let (sender, resolved) = channel();
        let name = named.to_owned();
        spawn("lookup", move || {
            let addresses = name.to_socket_addrs().map(Iterator::collect::<Vec<_>>);
            // After an interrupt there is no receiver.
            let _ = sender.send(addresses);
        })?;
        let mut why = None;
        let pause = Instant::now() + LOOKUP_PAUSE;
        while why.is_none() || Instant::now() < pause {
            match resolved.recv_timeout(SLICE) {
                Ok(Ok(addresses)) if !addresses.is_empty() => return Ok(addresses),
                Ok(Ok(_)) => why = Some("it has no address".to_owned()),
                Ok(Err(error)) => why = Some(error.to_string()),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => thread::sleep(SLICE),
            }
            if let Some(error) = interrupted() {
                return Err(error);
            }
            let reason = || why.clone().unwrap_or_else(|| "no answer".to_owned());
            if Instant::now() >= deadline {
                let waited = started.elapsed().as_secs_f64();
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "--master-addr {host} did not resolve on this host, which is node 0, within {waited:.1} s"
                    ),
                )
                .note("last", reason())
                .note(
                    "fix",
                    format!("give all nodes an address of this host: --master-addr {}", own_address()),
                ));
            }
            if started.elapsed() >= say_at {
                say_at = started.elapsed() * 2;
                say::note(format_args!(
                    "waiting for the name {host} to resolve on this host, which is node 0: {}",
                    reason()
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_looked_up_until_the_deadline_or_an_interrupt() {
        let within = |time| Instant::now() + time;
        let second = Duration::from_secs(1);
        let found = resolve("localhost", "localhost:9", within(second), &mut || None).unwrap();
        assert!(found.iter().all(|address| address.ip().is_loopback()));
        // Names below .invalid never resolve (RFC 6761).
        let (host, named) = ("node-a.invalid", "node-a.invalid:9");
        let error = resolve(host, named, within(second), &mut || None).unwrap_err();
        assert_eq!(error.exit_code(), 4);
        assert!(
            error
                .render()
                .contains("--master-addr node-a.invalid did not resolve")
        );
        let mut looks = 0;
        let mut interrupted = || {
            looks += 1;
            (looks == 3).then(|| Error::usage("interrupted"))
        };
        let error = resolve(host, named, within(60 * second), &mut interrupted).unwrap_err();
        assert!(error.chain().contains("interrupted"), "{}", error.chain());
    }

    #[test]
    fn this_host_is_known_by_its_names_and_addresses() {
        for host in ["127.0.0.1", "::1", "localhost", &phalanx_base::host_name()] {
            assert!(is_here(host, &host_port(host, 9)), "{host}");
        }
        for host in ["192.0.2.1", "no.such.host.invalid"] {
            assert!(!is_here(host, &format!("{host}:9")), "{host}");
        }
    }
}
