//! Forms a group through a store.
//!
//! 1. Every rank claims its number with a record of where it runs.
//! 2. Ranks with the same hint try shared memory ([`attach`]).
//! 3. All other pairs connect over TCP ([`connect`]).
//! 4. When all are finished, the last one removes the keys.
//!
//! One deadline covers everything; its error names the missing ranks. The first failure
//! is marked in the store and ends the wait of all. A process whose rank is taken is
//! not such a failure: it is refused, and the others form with the one that came first.
//! Nor is a process with a world size other than rank 0's: each size forms under keys of its own.

mod attach;
mod connect;
mod host;
mod member;
mod ports;
mod rendezvous;

pub(crate) use connect::listen;
pub use host::{
    BindAddr, host_addresses, is_own_address, local_address_towards, machine, what_loopback_means,
};
pub(super) use member::Member;
#[cfg(any(test, fuzzing))]
pub(super) use member::TITLE as MEMBER_TITLE;
use member::this_process;
pub use ports::PortRange;
use rendezvous::ARRIVE;
pub(crate) use rendezvous::{Lost, none_lost};
pub(super) use rendezvous::{Rendezvous, WaitReport};

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use phalanx_store::{Store, TcpServer, Will};
use phalanx_wire::Token;
use phalanx_wire::handshake::{Hello, Role};
use serde::{Deserialize, Serialize};

use super::TransportKind;
use super::layout::Layout;
use super::mesh::{Mesh, Parts};
use super::segment::Segment;
use crate::notice::ranks as ranks_text;
use crate::plan::Hosts;
use crate::wait::{Policy, Share, Topology, deadline_in};
use crate::{Error, ErrorKind, Result, limits};
use attach::Attempt;
use connect::Connected;
use host::Host;
use phalanx_fold::Isa;

/// Which transport to use between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Transport {
    /// Shared memory where it works, TCP elsewhere.
    #[default]
    Auto,
    /// Shared memory, or an error saying why not.
    Shm,
    /// TCP, also on one host.
    Tcp,
}

phalanx_fold::named! { Transport: Auto "auto", Shm "shm", Tcp "tcp" }

impl std::str::FromStr for Transport {
    type Err = crate::Error;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let named = Self::ALL.into_iter().find(|kind| kind.name() == text);
        named.ok_or_else(|| {
            crate::Error::usage(format!(
                "unknown transport {text:?}: choose auto, shm or tcp"
            ))
        })
    }
}

/// How to form a group.
#[derive(Clone, Debug)]
pub struct FormOptions {
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// The job's secret.
    pub token: Token,
    /// How many times the job has re-formed its groups. A failed forming leaves its
    /// mark in the store: form again with the next generation.
    pub generation: u32,
    /// The group within the generation.
    pub group: u32,
    /// Limit for the whole forming.
    pub timeout: Duration,
    /// Where to listen for peers that are reached over TCP.
    pub bind: BindAddr,
    /// The ports to listen on, unless that is on loopback; by default any.
    pub ports: Option<PortRange>,
    /// The server of the store, if this rank hosts it: it knows which connections were refused.
    pub server: Option<Arc<TcpServer>>,
    /// Which transport to use.
    pub prefer: Transport,
    /// Capacity of each ring in shared memory; by default a share of 64 MiB
    /// between 64 KiB and 1 MiB.
    pub ring_bytes: Option<usize>,
    /// Threads with which this rank computes; at least one is assumed.
    pub compute_threads: usize,
    /// Address space for the buckets of each rank that shares memory, 0 for
    /// none; by default 16 GiB, or what the system grants. Memory is used
    /// when it is touched. The lowest rank of a host decides.
    pub arena_bytes: Option<usize>,
}

/// Forms the links of one rank, together with all other ranks of the group.
///
/// *Blocks until* all ranks have formed theirs, at most `o.timeout`.
///
/// # Errors
///
/// `Timeout` naming the ranks that did not come; `Usage` when ranks disagree
/// (world size, transport, a rank taken twice) or an address cannot be used;
/// `Aborted` with the first cause when another rank failed. A process whose rank is
/// taken fails alone; its error names the process that has the rank. So does a process
/// with a world size other than rank 0's.
pub fn form(store: &dyn Store, o: &FormOptions) -> Result<Mesh> {
    form_unless(store, o, &none_lost)
}

/// [`form`] that fails as soon as `lost` names a rank.
pub(crate) fn form_unless(store: &dyn Store, o: &FormOptions, lost: Lost<'_>) -> Result<Mesh> {
    form_at(store, o, Host::here(), lost)
}

/// [`form`] for a rank on `host`; tests may give any.
pub(crate) fn form_at(
    store: &dyn Store,
    o: &FormOptions,
    host: Host,
    lost: Lost<'_>,
) -> Result<Mesh> {
    if o.rank >= o.world || u32::try_from(o.world).is_err() {
        return Err(Error::usage(format!(
            "rank {} of a world of {}",
            o.rank, o.world
        )));
    }
    limits::raise_open_files();
    let policy = Policy::from_env().map_err(Error::usage)?;
    // Nothing folds here, but an error should come now.
    Isa::chosen().map_err(Error::usage)?;
    let meeting = Rendezvous {
        store,
        rank: o.rank,
        world: o.world,
        generation: o.generation,
        group: o.group,
        timeout: o.timeout,
        deadline: deadline_in(o.timeout),
        server: o.server.as_deref(),
        job: o.token.job_id(),
        lost,
        taken: AtomicBool::new(false),
        misfit: AtomicBool::new(false),
        waits: AtomicBool::new(false),
    };
    let result = join(&meeting, o, host, policy);
    if let Err(e) = &result {
        meeting.fail(e);
    }
    result.map_err(|e| e.with_rank(o.rank).with_operation("forming the group"))
}

fn join(meeting: &Rendezvous<'_>, o: &FormOptions, host: Host, policy: Policy) -> Result<Mesh> {
    let hello = |role| {
        Hello::new(role, o.token.job_id())
            .rank(o.rank as u32)
            .world(o.world as u32)
            .generation(o.generation)
            .group(o.group)
    };
    let listener = match o.prefer {
        Transport::Shm => None,
        _ if o.world == 1 => None,
        _ => Some(connect::listen(o.bind.resolve()?, o.ports, o.rank)?),
    };
    let address = listener
        .as_ref()
        .map(std::net::TcpListener::local_addr)
        .transpose()
        .map_err(|e| Error::io("asking for the address we listen on", e))?;
    let instance = getrandom::u64()
        .map_err(|e| Error::new(ErrorKind::Io, format!("no random numbers: {e}")))?;
    let record = Member {
        instance,
        process: this_process(),
        world: o.world,
        prefer: o.prefer,
        host,
        share: Share::here(o.compute_threads),
        address,
    };
    let (members, will) = meet(meeting, &record)?;

    let hint = &members[o.rank].host.hint;
    let local: Vec<usize> = (0..o.world)
        .filter(|&r| !hint.is_empty() && members[r].host.hint == *hint)
        .collect();
    if o.prefer == Transport::Shm
        && let Some(far) = (0..o.world).find(|r| *r != o.rank && !local.contains(r))
    {
        return Err(Error::usage(format!(
            "rank {far} is on another host, network name space or user than rank {}: \
             shared memory cannot reach it; use the transport auto or tcp",
            o.rank
        )));
    }
    let topology = topology(o.rank, &members);
    let mut attached = None;
    if o.prefer != Transport::Tcp && local.len() > 1 {
        let attempt = Attempt {
            meeting,
            me: hello(Role::SharedMemory),
            token: &o.token,
            ranks: &local,
            ring_bytes: o.ring_bytes,
            arena_bytes: o.arena_bytes,
        };
        let (memory, reasons) = attempt.run()?;
        if let Some((rank, reason)) = reasons.first() {
            if o.prefer == Transport::Shm {
                return Err(Error::new(
                    ErrorKind::Io,
                    format!(
                        "rank {rank} has no shared memory: {reason}; use the transport auto or tcp"
                    ),
                ));
            }
            // Every rank of the host has the same reasons.
            if local[0] == o.rank {
                for (reason, ranks) in by_reason(&reasons) {
                    let ranks = ranks_text(&ranks);
                    tracing::warn!("no shared memory with {ranks} ({reason}): using tcp");
                }
            }
        }
        attached = memory;
    }
    let (segment, arenas, seat, neighbours, watches) = match attached {
        Some(a) => (
            Arc::new(a.segment),
            a.arenas.map(Arc::new),
            a.seat,
            a.neighbours,
            a.watches,
        ),
        None => (Arc::new(alone()?), None, 0, Vec::new(), Vec::new()),
    };
    let peers: Vec<usize> = (0..o.world)
        .filter(|&p| p != o.rank && !neighbours.iter().any(|&(rank, _)| rank == p))
        .collect();
    let connected = match (&listener, peers.is_empty()) {
        (_, true) => Connected {
            links: Vec::new(),
            message_links: Vec::new(),
            probes: Vec::new(),
        },
        (Some(listener), false) => {
            check_reachable(o.rank, &members, &peers)?;
            let me = hello(Role::Peer);
            connect::connect(meeting, me, &o.token, listener, &members, &peers, &segment)?
        }
        (None, false) => return Err(Error::internal("some peers are left and no socket listens")),
    };
    drop(listener);
    meeting.finish()?;
    drop(will);
    tracing::debug!(
        rank = o.rank,
        world = o.world,
        shm = neighbours.len(),
        tcp = connected.links.len(),
        "formed"
    );
    Ok(Mesh::assemble(Parts {
        rank: o.rank,
        world: o.world,
        segment,
        arenas,
        seat,
        neighbours,
        kind: TransportKind::Shm,
        sockets: connected.links,
        message_sockets: connected.message_links,
        hosts: hosts(o.prefer, &members),
        watches,
        probes: connected.probes,
        topology,
        policy,
        instance: members[0].instance,
    }))
}

/// The ranks of each reason.
fn by_reason(reasons: &[attach::Reason]) -> BTreeMap<&str, Vec<usize>> {
    let mut ranks: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (rank, reason) in reasons {
        ranks.entry(reason).or_default().push(*rank);
    }
    ranks
}

/// Which ranks share a host and its memory. If all use TCP, or ranks are not numbered
/// host by host, each rank counts as a separate host.
fn hosts(prefer: Transport, members: &[Member]) -> Hosts {
    let alone = || Hosts::of_sizes(&vec![1; members.len()]);
    if prefer == Transport::Tcp {
        return alone();
    }
    let hints: Vec<&str> = members.iter().map(|m| m.host.hint.as_str()).collect();
    if hints.contains(&"") {
        return alone();
    }
    Hosts::of_names(&hints).unwrap_or_else(alone)
}

/// How our cores are shared: with all ranks under the same kernel, also those that
/// share no memory with us.
fn topology(rank: usize, members: &[Member]) -> Topology {
    let kernel = members[rank].host.kernel();
    let near =
        |r: &usize| *r == rank || (!kernel.is_empty() && members[*r].host.kernel() == kernel);
    let near: Vec<usize> = (0..members.len()).filter(near).collect();
    let shares: Vec<Share> = near.iter().map(|&r| members[r].share.clone()).collect();
    // Ascending, and we are in it.
    Topology::of_host(near.partition_point(|&r| r < rank), &shares)
}

/// Most characters of a holder's name in a message.
const HOLDER_CHARS: usize = 100;

/// The error of a process whose rank another one has, whose record is `theirs`.
fn is_taken(generation: u32, rank: usize, theirs: &[u8]) -> Error {
    let holder = Member::decode(theirs).map_or_else(
        |_| "another process".to_owned(),
        |theirs| theirs.process.chars().take(HOLDER_CHARS).collect(),
    );
    Error::usage(format!(
        "rank {rank} is already taken by {holder}, which joined generation {generation} of this job first; \
         this process, {}, does not take part: give it a rank of its own, or end the other one and \
         form with the next generation",
        this_process()
    ))
}

/// Publishes our record and reads those of all ranks. Until the will is dropped the
/// others are notified when we end.
fn meet(meeting: &Rendezvous<'_>, record: &Member) -> Result<(Vec<Member>, Option<Will>)> {
    if meeting.rank == 0 {
        meeting.check_world()?;
    }
    // Before the others know of us, so that they are notified of our end from then on.
    let will = meeting.leave_will(&record.process)?;
    if let Some(theirs) = meeting.claim("member", &record.encode())? {
        return Err(is_taken(meeting.generation, meeting.rank, &theirs));
    }
    let all: Vec<usize> = (0..meeting.world).collect();
    let records = meeting.collect_while("member", &all, ARRIVE, || meeting.check_missing())?;
    let mut members = Vec::with_capacity(records.len());
    for (rank, bytes) in records.iter().enumerate() {
        let member = Member::decode(bytes)
            .map_err(|e| Error::protocol(rank, format!("rank {rank} cannot take part: {e}")))?;
        if member.world != meeting.world {
            return Err(Error::usage(format!(
                "rank {rank} was started for {} ranks, rank {} for {}",
                member.world, meeting.rank, meeting.world
            ))
            .with_peer(rank));
        }
        if member.prefer != record.prefer {
            return Err(Error::usage(format!(
                "rank {rank} was started with transport {}, rank {} with {}",
                member.prefer.name(),
                meeting.rank,
                record.prefer.name()
            ))
            .with_peer(rank));
        }
        members.push(member);
    }
    Ok((members, will))
}

/// A loopback address can only be reached from its own host: reported now, not after
/// minutes of refused connections.
fn check_reachable(rank: usize, members: &[Member], peers: &[usize]) -> Result<()> {
    let mine = &members[rank].host.machine;
    for &peer in peers {
        let member = &members[peer];
        let is_loopback = |m: &Member| m.address.is_some_and(|a| a.ip().is_loopback());
        let lower = &members[peer.min(rank)];
        if member.host.machine != *mine && is_loopback(lower) {
            return Err(Error::usage(format!(
                "rank {} is on another host than rank {}, which listens on loopback only: \
                 give all hosts an address of the first one that they can reach, or each --bind with its own",
                peer.max(rank),
                peer.min(rank)
            )));
        }
    }
    Ok(())
}

/// The segment of a rank that shares no memory: its bell and poison only.
fn alone() -> Result<Segment> {
    let layout = Layout::new(1, super::ring::MIN_CAPACITY_BYTES)
        .ok_or_else(|| Error::internal("the smallest layout is impossible"))?;
    let segment = Segment::private(layout).map_err(|e| Error::io("mapping memory", e))?;
    segment.sit(0);
    Ok(segment)
}

#[cfg(test)]
mod tests;
