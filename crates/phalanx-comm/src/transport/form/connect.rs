//! TCP connections of the pairs that do not share memory: of each pair the
//! higher rank connects to the lower, for data and for control.

use std::collections::BTreeMap;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_wire::Token;
use phalanx_wire::handshake::Hello;

use super::super::admit::{Admitted, admit, lengthen_backlog};
use super::super::segment::Segment;
use super::super::tcp::{
    CONTROL, Control, DATA, HostProbe, MESSAGES, TcpLink, dial, keep_open, options, probe,
};
use super::member::Member;
use super::ports::{PortRange, listen_within};
use super::rendezvous::Rendezvous;
use crate::notice::ranks;
use crate::{Error, Result};

/// The end of messages about unreachable ranks of other hosts.
const FIREWALL: &str = "; if a firewall is between the hosts, let that port through, or choose ports with --port-range";

/// Listens on a free port of `ip`; where other hosts can reach it, on one of `ports` if there are any.
pub(crate) fn listen(ip: IpAddr, ports: Option<PortRange>, rank: usize) -> Result<TcpListener> {
    let refused = |e| {
        Error::io(
            format_args!("cannot listen on {ip} (is it an address of this host?)"),
            e,
        )
    };
    let listener = match ports.filter(|_| !ip.is_loopback()) {
        Some(ports) => listen_within(ip, ports, rank)?,
        None => TcpListener::bind((ip, 0)).map_err(refused)?,
    };
    listener.set_nonblocking(true).map_err(refused)?;
    lengthen_backlog(&listener);
    Ok(listener)
}

/// The connections of a pair.
const STREAMS: [u16; 3] = [DATA, CONTROL, MESSAGES];

/// The links to peers, and the hosts to probe.
pub(super) struct Connected {
    pub(super) links: Vec<TcpLink>,
    pub(super) message_links: Vec<TcpLink>,
    pub(super) probes: Vec<HostProbe>,
}

/// Connects to all `peers`.
pub(super) fn connect(
    meeting: &Rendezvous<'_>,
    me: Hello,
    token: &Token,
    listener: &TcpListener,
    members: &[Member],
    peers: &[usize],
    segment: &Arc<Segment>,
) -> Result<Connected> {
    let rank = meeting.rank;
    let higher: Vec<usize> = peers.iter().copied().filter(|&peer| peer > rank).collect();
    let lower: Vec<usize> = peers.iter().copied().filter(|&peer| peer < rank).collect();
    let expected: Vec<(usize, u16)> = higher
        .iter()
        .flat_map(|&peer| STREAMS.map(|stream| (peer, stream)))
        .collect();
    // On loopback there is no firewall in between.
    let at = listener.local_addr().ok();
    let firewall = at.is_some_and(|at| !at.ip().is_loopback());
    let firewall = if firewall { FIREWALL } else { "" };
    let stop = AtomicBool::new(false);
    let check = || {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::internal("accepting or dialling failed first"));
        }
        meeting.check()
    };
    let (accepted, dialled) = std::thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let mut report = meeting.report("accepting");
            let result = admit(
                listener,
                me,
                token,
                &expected,
                meeting.deadline,
                |missing| {
                    report.due(|| {
                        let mut missing: Vec<usize> =
                            missing.iter().map(|(rank, _)| *rank).collect();
                        missing.dedup();
                        let at = at.map_or_else(|| "this rank".to_owned(), |at| at.to_string());
                        format!("{} to connect to {at}{firewall}", ranks(&missing))
                    });
                    check().map(|()| true)
                },
            );
            if result.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            result
        });
        let mut dialled = Vec::new();
        let mut report = meeting.report("dialling");
        let mut result = Ok(());
        'all: for &peer in &lower {
            for stream in STREAMS {
                match dial(
                    meeting,
                    me,
                    token,
                    (peer, &members[peer]),
                    stream,
                    &check,
                    (&mut report, firewall),
                ) {
                    Ok(socket) => dialled.push(Admitted {
                        rank: peer,
                        stream,
                        socket,
                    }),
                    Err(e) => {
                        stop.store(true, Ordering::Relaxed);
                        result = Err(e);
                        break 'all;
                    }
                }
            }
        }
        // It observes the meeting's deadline.
        let accepted = accepting
            .join()
            .unwrap_or_else(|_| Err(Error::internal("the accepting thread panicked")));
        (accepted, result.map(|()| dialled))
    });
    // The half that failed first has the reason; the other was stopped.
    let (accepted, dialled) = match (accepted, dialled) {
        (Ok(accepted), Ok(dialled)) => (accepted, dialled),
        (Err(e), Ok(_)) | (Ok(_), Err(e)) => return Err(e),
        (Err(a), Err(d)) if a.kind() == crate::ErrorKind::Internal => return Err(d),
        (Err(a), Err(_)) => return Err(a),
    };
    let came = |peer: usize, stream: u16| {
        accepted
            .iter()
            .any(|member| (member.rank, member.stream) == (peer, stream))
    };
    let missing: Vec<usize> = higher
        .iter()
        .copied()
        .filter(|&p| !STREAMS.iter().all(|stream| came(p, *stream)))
        .collect();
    if !missing.is_empty() {
        let at = at.map_or_else(String::new, |at| format!(" to {at}"));
        let what = format!("connect over tcp{at}");
        let error = meeting.late(&higher, &missing, &what);
        return Err(Error::timeout(format!("{}{firewall}", error.message()))
            .with_peer(error.peer().unwrap_or(missing[0])));
    }
    let mut sockets = accepted;
    sockets.extend(dialled);
    let (mut links, mut message_links, mut probes) = (Vec::new(), Vec::new(), Vec::new());
    let probed = probed(rank, members);
    for &peer in peers {
        let member = &members[peer];
        let is_far = host_of(member) != host_of(&members[rank]);
        let failed = |e| Error::io(format_args!("setting up the connection to rank {peer}"), e);
        let mut take = |stream| -> Result<TcpStream> {
            let socket = take(&mut sockets, peer, stream)?;
            options::prepare(&socket).map_err(failed)?;
            if is_far {
                keep_open(&socket).map_err(failed)?;
            }
            Ok(socket)
        };
        let control = take(CONTROL)?;
        let address = member.address.filter(|_| probed.contains(&peer));
        if address.is_some() {
            probe(&control).map_err(failed)?;
        }
        let which = (meeting.generation, meeting.group);
        let control = Arc::new(Control::new(peer, which, control, Arc::clone(segment)));
        probes.extend(address.map(|address| HostProbe::new(Arc::clone(&control), address)));
        let data = take(DATA)?;
        message_links.push(TcpLink::new(rank, take(MESSAGES)?, Arc::clone(&control)));
        links.push(TcpLink::new(rank, data, control));
    }
    Ok(Connected {
        links,
        message_links,
        probes,
    })
}

/// Where a rank runs: its kernel and network name space, and the address at which it listens there.
fn host_of(member: &Member) -> (&str, Option<IpAddr>) {
    (&member.host.machine, member.address.map(|a| a.ip()))
}

/// The ranks whose hosts `rank` probes: of each pair of hosts only the lowest ranks do.
fn probed(rank: usize, members: &[Member]) -> Vec<usize> {
    let mut lowest: BTreeMap<_, usize> = BTreeMap::new();
    for (rank, member) in members.iter().enumerate() {
        lowest.entry(host_of(member)).or_insert(rank);
    }
    if lowest.get(&host_of(&members[rank])) != Some(&rank) {
        return Vec::new();
    }
    lowest
        .into_values()
        .filter(|&lowest| lowest != rank)
        .collect()
}

/// The socket of `peer` for `stream`.
fn take(sockets: &mut Vec<Admitted<TcpStream>>, peer: usize, stream: u16) -> Result<TcpStream> {
    let at = sockets
        .iter()
        .position(|s| (s.rank, s.stream) == (peer, stream));
    let at = at.ok_or_else(|| Error::internal(format!("no stream {stream} to rank {peer}")))?;
    Ok(sockets.swap_remove(at).socket)
}

#[cfg(test)]
mod tests {
    use super::super::Transport;
    use super::super::host::Host;
    use super::*;
    use crate::wait::Share;

    fn member(machine: usize) -> Member {
        Member {
            instance: 0,
            process: String::new(),
            world: 0,
            prefer: Transport::Tcp,
            host: Host {
                machine: format!("boot-{machine}/1"),
                hint: String::new(),
            },
            share: Share::here(1),
            address: Some(format!("10.0.0.{machine}:4000").parse().unwrap()),
        }
    }

    /// Two ends of one connection per pair of hosts, whatever the number of ranks.
    #[test]
    fn connections_are_probed_once_per_pair_of_hosts() {
        for (hosts, each) in [(1, 200), (2, 100), (5, 40), (200, 1)] {
            let members: Vec<Member> = (0..hosts * each).map(|rank| member(rank / each)).collect();
            let all: Vec<(usize, usize)> = (0..members.len())
                .flat_map(|rank| probed(rank, &members).into_iter().map(move |p| (rank, p)))
                .collect();
            assert_eq!(all.len(), hosts * (hosts - 1), "{hosts} hosts");
            // The other end probes too.
            assert!(all.iter().all(|(a, b)| all.contains(&(*b, *a))));
        }
    }
}
