//! All links of one rank in one group, and how to wait for them.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use phalanx_store::Store;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};

use super::arenas::Arenas;
use super::first_cause::FirstCause;
use super::layout::{Channel, Layout, MAX_LOCAL_RANKS, ring_capacity};
use super::poison::Poison;
use super::ring::{Consumer, Corrupt, Producer};
use super::segment::Segment;
use super::shm::Watch;
use super::tcp::{Control, Fate, HostProbe, TcpLink};
use super::{Interest, Link, TransportKind};
use crate::plan::Hosts;
use crate::status::StatusCell;
use crate::sync::lock;
use crate::wait::{Budget, Budgets, Callers, Policy, SLICE, Topology, Wake};
use crate::{Error, Result};

/// Longest wait when sockets and shared memory must both be watched: an event on one
/// does not end a wait for the other.
const MIXED_SLICE: Duration = Duration::from_millis(50);

/// First and longest wait on shared memory between two checks of sockets when both are awaited.
const SLEEP_MIN: Duration = Duration::from_micros(50);
/// See [`SLEEP_MIN`].
const SLEEP_MAX: Duration = Duration::from_millis(1);

/// Checks of sockets without progress before waiting in the kernel, when the core would
/// otherwise be idle.
const SOCKET_ROUNDS: u32 = 8;

/// A peer in memory that we share with it.
pub(super) struct RingLink {
    channel: Channel,
    rank: usize,
    peer: usize,
    seat: usize,
    kind: TransportKind,
    tx: Producer,
    rx: Consumer,
    segment: Arc<Segment>,
}

impl RingLink {
    fn corrupt(&self, what: Corrupt) -> Error {
        Error::protocol(
            self.peer,
            format!("rank {} cannot be trusted: {what}", self.peer),
        )
        .with_rank(self.rank)
    }

    /// Whether an awaited call would make progress (an error counts: the call
    /// will report it).
    fn ready(&mut self, want: Interest) -> bool {
        (want.recv && self.rx.readable().unwrap_or(true))
            || (want.send && self.tx.writable().unwrap_or(true))
    }

    /// The peer left, so the awaited event can never happen.
    fn abandoned(&mut self, want: Interest) -> bool {
        // `has_left` first: what the peer wrote before leaving is then visible.
        self.segment.has_left(self.seat)
            && ((want.recv && !self.rx.readable().unwrap_or(true))
                || (want.send && !self.tx.writable().unwrap_or(true)))
    }
}

impl Link for RingLink {
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize> {
        let bell = self.segment.bell_of(self.channel, self.seat);
        self.tx
            .write(bytes, || bell.ring())
            .map_err(|e| self.corrupt(e))
    }

    fn try_recv(&mut self, into: &mut [u8]) -> Result<usize> {
        let bell = self.segment.bell_of(self.channel, self.seat);
        self.rx
            .read(into, || bell.ring())
            .map_err(|e| self.corrupt(e))
    }

    fn kind(&self) -> TransportKind {
        self.kind
    }
}

/// The placeholder for a rank's link to itself.
struct NoLink;

impl Link for NoLink {
    fn try_send(&mut self, _bytes: &[u8]) -> Result<usize> {
        Err(Error::internal("a rank has no link to itself"))
    }

    fn try_recv(&mut self, _into: &mut [u8]) -> Result<usize> {
        Err(Error::internal("a rank has no link to itself"))
    }

    fn kind(&self) -> TransportKind {
        TransportKind::Thread
    }
}

enum Peer {
    Own(NoLink),
    Ring(RingLink),
    Tcp(TcpLink),
}

/// State that abort handles share with their mesh.
struct MeshState {
    rank: usize,
    segment: Arc<Segment>,
    controls: Vec<Arc<Control>>,
    /// Present if ranks of several hosts must agree.
    first_cause: OnceLock<FirstCause>,
    /// Groups that end with this one.
    dependents: Mutex<Vec<Weak<MeshState>>>,
    /// Groups with which this one ends.
    parents: Mutex<Vec<Weak<MeshState>>>,
}

impl MeshState {
    /// True if `cause` is the first.
    fn poison(&self, cause: &Poison) -> bool {
        // Only the first cause is sent; a later one is a consequence of it.
        if self.poisoned().is_some() {
            return false;
        }
        let agreed = match self.first_cause.get() {
            Some(first) => first.agree(cause),
            None => cause.clone(),
        };
        let first = self.segment.poison(&agreed);
        if first {
            for control in &self.controls {
                control.send_abort(&agreed);
            }
        }
        self.poisoned();
        first && agreed == *cause
    }

    /// The first cause, if the group is poisoned. The groups that end with this one end
    /// then too, whichever rank poisoned it.
    fn poisoned(&self) -> Option<Poison> {
        let poison = self.segment.poisoned()?;
        let dependents = std::mem::take(&mut *lock(&self.dependents));
        for dependent in dependents.iter().filter_map(Weak::upgrade) {
            dependent.poison(&poison);
        }
        Some(poison)
    }

    /// Checks whether a group with which this one ends was aborted, also by ranks that
    /// are not in this one.
    fn check_parents(&self) {
        // Locked: a cycle of groups has led back here.
        let Ok(mut parents) = self.parents.try_lock() else {
            return;
        };
        parents.retain(|parent| parent.strong_count() > 0);
        for parent in parents.iter().filter_map(Weak::upgrade) {
            for control in parent.controls.iter().filter(|c| c.is_open()) {
                control.pump();
            }
            parent.check_parents();
            parent.poisoned();
        }
    }

    /// The error to report for a peer's end: the group's first cause if there is one,
    /// since it probably made the peer end.
    #[cold]
    fn blame(&self, end: Error) -> Error {
        self.check().err().unwrap_or(end.with_rank(self.rank))
    }

    fn check(&self) -> Result<()> {
        if !self.segment.is_poisoned() {
            return Ok(());
        }
        match self.poisoned() {
            Some(poison) => Err(poison.to_error().with_rank(self.rank)),
            None => Ok(()),
        }
    }
}

/// Aborts a group from any thread, also while its mesh sleeps.
#[derive(Clone)]
pub struct AbortHandle {
    shared: Arc<MeshState>,
}

impl AbortHandle {
    /// Poisons the group: first cause wins, over all hosts; ranks that wait for shared
    /// memory wake up at once, ranks that wait for sockets when the message arrives, or
    /// within 50 ms. May wait 40 ms for the store.
    pub fn poison(&self, cause: &Poison) -> bool {
        self.shared.poison(cause)
    }

    /// The first cause, if the group is poisoned.
    pub fn poisoned(&self) -> Option<Poison> {
        self.shared.poisoned()
    }

    /// From now on, poisoning `parent` poisons this group too.
    pub(crate) fn follow(&self, parent: &AbortHandle) {
        lock(&self.shared.parents).push(Arc::downgrade(&parent.shared));
        let mut dependents = lock(&parent.shared.dependents);
        dependents.retain(|other| other.strong_count() > 0);
        dependents.push(Arc::downgrade(&self.shared));
        drop(dependents);
        parent.poisoned();
    }
}

impl std::fmt::Debug for AbortHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AbortHandle")
            .field("rank", &self.shared.rank)
            .finish()
    }
}

/// All links of one rank in one group.
///
/// Dropping a mesh leaves the group: peers that still wait for this rank get a
/// `PeerLost` error, the others are not affected. A drop during a panic poisons the
/// group instead.
pub struct Mesh {
    channel: Channel,
    /// The links of the other channel, until they are taken.
    messages: Option<Box<Mesh>>,
    /// Lets other threads end a wait; for messages only.
    waker: Option<Arc<Waker>>,
    shared: Arc<MeshState>,
    arenas: Option<Arc<Arenas>>,
    hosts: Hosts,
    seat: usize,
    world: usize,
    /// By rank.
    peers: Vec<Peer>,
    budgets: Budgets,
    /// Operations run on the communication thread, while other threads compute.
    beside: bool,
    callers: Callers,
    watches: Vec<Watch>,
    probes: Vec<HostProbe>,
    next_watch: Instant,
    instance: u64,
}

impl std::fmt::Debug for Mesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mesh")
            .field("rank", &self.rank())
            .field("world", &self.world())
            .field("links", &self.describe())
            .finish()
    }
}

/// Ends a wait of a message mesh, from any thread.
pub(crate) struct Waker {
    shared: Arc<MeshState>,
    seat: usize,
    woken: AtomicBool,
    /// Wakes a thread that waits for sockets.
    event: Option<OwnedFd>,
}

impl Waker {
    fn new(shared: Arc<MeshState>, seat: usize, has_sockets: bool) -> Waker {
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let event = has_sockets.then(|| eventfd(0, flags));
        let event = event.transpose().unwrap_or_else(|e| {
            // Waits for sockets are short.
            tracing::debug!("no event descriptor: {e}");
            None
        });
        Waker {
            shared,
            seat,
            woken: AtomicBool::new(false),
            event,
        }
    }

    /// The current wait ends, or the next one if there is none.
    pub(crate) fn wake(&self) {
        // First: who sees `woken` reads it.
        if let Some(event) = &self.event {
            // It can only be full, and then it is readable.
            let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
        }
        self.woken.store(true, Ordering::SeqCst);
        let segment = &self.shared.segment;
        segment.bell_of(Channel::Messages, self.seat).ring();
    }

    fn is_woken(&self) -> bool {
        self.woken.load(Ordering::SeqCst)
    }

    /// The next wait waits again.
    fn reset(&self) {
        if self.woken.swap(false, Ordering::SeqCst)
            && let Some(event) = &self.event
        {
            let _ = rustix::io::read(event, &mut [0_u8; 8]);
        }
    }
}

/// The parts of a mesh.
pub(super) struct Parts {
    pub(super) rank: usize,
    pub(super) world: usize,
    /// The memory shared with other ranks of this host, or one of our own.
    pub(super) segment: Arc<Segment>,
    /// The memory for buckets.
    pub(super) arenas: Option<Arc<Arenas>>,
    /// Our seat there.
    pub(super) seat: usize,
    /// Peers in that memory: rank and seat.
    pub(super) neighbours: Vec<(usize, usize)>,
    pub(super) kind: TransportKind,
    pub(super) sockets: Vec<TcpLink>,
    /// The same for messages.
    pub(super) message_sockets: Vec<TcpLink>,
    /// Which ranks share a host.
    pub(super) hosts: Hosts,
    pub(super) watches: Vec<Watch>,
    /// The hosts that this rank probes on behalf of its own host.
    pub(super) probes: Vec<HostProbe>,
    /// The ranks that share our cores, by whatever transport.
    pub(super) topology: Topology,
    pub(super) policy: Policy,
    /// Random, the same on all ranks: identifies this forming.
    pub(super) instance: u64,
}

/// The memory of a group whose ranks are all on one host. Ranks and seats are
/// the same numbers.
pub(crate) struct SharedMemory {
    pub(crate) segment: Arc<Segment>,
    pub(crate) arenas: Option<Arc<Arenas>>,
}

impl Mesh {
    pub(super) fn assemble(parts: Parts) -> Mesh {
        let links = |channel, sockets: Vec<TcpLink>| {
            let mut peers: Vec<Peer> = (0..parts.world).map(|_| Peer::Own(NoLink)).collect();
            for link in sockets {
                let peer = link.peer();
                peers[peer] = Peer::Tcp(link);
            }
            for &(peer, seat) in &parts.neighbours {
                let (tx, rx) = parts.segment.ends(channel, parts.seat, seat);
                peers[peer] = Peer::Ring(RingLink {
                    channel,
                    rank: parts.rank,
                    peer,
                    seat,
                    kind: parts.kind,
                    tx,
                    rx,
                    segment: Arc::clone(&parts.segment),
                });
            }
            peers
        };
        let sockets = parts.sockets.iter();
        let controls = sockets.map(|link| Arc::clone(link.control())).collect();
        let has_sockets = !parts.sockets.is_empty();
        let messages = links(Channel::Messages, parts.message_sockets);
        let peers = links(Channel::Collectives, parts.sockets);
        let shared = Arc::new(MeshState {
            rank: parts.rank,
            segment: parts.segment,
            controls,
            first_cause: OnceLock::new(),
            dependents: Mutex::default(),
            parents: Mutex::default(),
        });
        let (mut watches, mut probes) = (Some(parts.watches), Some(parts.probes));
        let mut mesh = |channel, peers, waker| Mesh {
            channel,
            messages: None,
            waker,
            shared: Arc::clone(&shared),
            arenas: parts.arenas.clone(),
            instance: parts.instance,
            hosts: parts.hosts.clone(),
            seat: parts.seat,
            world: parts.world,
            peers,
            budgets: Budgets::new(parts.policy, parts.topology),
            beside: false,
            callers: Callers::default(),
            // The first one, that of collectives, checks whether peers live.
            watches: watches.take().unwrap_or_default(),
            probes: probes.take().unwrap_or_default(),
            next_watch: Instant::now() + SLICE,
        };
        let waker = Waker::new(Arc::clone(&shared), parts.seat, has_sockets);
        let mut collectives = mesh(Channel::Collectives, peers, None);
        let messages = mesh(Channel::Messages, messages, Some(Arc::new(waker)));
        collectives.messages = Some(Box::new(messages));
        collectives
    }

    /// The links for sends and receives, which other threads may use at the same time; once.
    pub(crate) fn take_messages(&mut self) -> Option<Mesh> {
        let mut messages = self.messages.take()?;
        messages.budgets = self.budgets;
        Some(*messages)
    }

    /// What ends a wait for messages.
    pub(crate) fn waker(&self) -> Option<Arc<Waker>> {
        self.waker.clone()
    }

    /// This rank.
    pub(crate) fn rank(&self) -> usize {
        self.shared.rank
    }

    /// Number of ranks in the group.
    pub(crate) fn world(&self) -> usize {
        self.world
    }

    /// Which ranks share a host; the same on all ranks.
    pub(crate) fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// Sets which ranks share a host, for plans.
    pub(crate) fn set_hosts(&mut self, hosts: Hosts) {
        self.hosts = hosts;
    }

    /// The link to `peer`; one to oneself only returns errors.
    pub(crate) fn link(&mut self, peer: usize) -> &mut dyn Link {
        match &mut self.peers[peer] {
            Peer::Own(link) => link,
            Peer::Ring(link) => link,
            Peer::Tcp(link) => link,
        }
    }

    /// How each peer is reached.
    pub fn describe(&self) -> Vec<(usize, TransportKind)> {
        let kind = |peer: &Peer| match peer {
            Peer::Own(_) => None,
            Peer::Ring(link) => Some(link.kind()),
            Peer::Tcp(link) => Some(link.kind()),
        };
        self.peers
            .iter()
            .enumerate()
            .filter_map(|(i, p)| Some((i, kind(p)?)))
            .collect()
    }

    /// The status cells of the ranks of this host, by rank, ours included.
    pub(crate) fn cells(&self) -> Vec<Option<StatusCell>> {
        let cell = |seat| Some(self.shared.segment.cell(seat));
        let mut cells: Vec<Option<StatusCell>> = self
            .peers
            .iter()
            .map(|peer| match peer {
                Peer::Ring(link) => cell(link.seat),
                Peer::Own(_) | Peer::Tcp(_) => None,
            })
            .collect();
        if let Some(own) = cells.get_mut(self.shared.rank) {
            *own = cell(self.seat);
        }
        cells
    }

    /// Random, the same on all ranks: identifies this forming.
    pub(crate) fn instance(&self) -> u64 {
        self.instance
    }

    /// From now on ranks of several hosts agree through `store` on the first
    /// cause of an abort.
    pub(crate) fn agree_through(&self, store: &Arc<dyn Store>, generation: u32, group: u32) {
        // On one host, shared memory decides the first cause.
        if !self.shared.controls.is_empty() {
            let first = FirstCause::new(Arc::clone(store), generation, group, self.instance);
            // Set once, by the caller that formed the group.
            let _ = self.shared.first_cause.set(first);
        }
    }

    /// Adds that the cores are also shared as in `topology`: the one with more threads
    /// per core counts.
    pub(crate) fn share_cores(&mut self, topology: Topology) {
        self.budgets = self.budgets.within(topology);
    }

    /// How our cores are shared, and the resulting budgets of waits.
    pub(crate) fn budgets(&self) -> Budgets {
        self.budgets
    }

    /// Sets which thread does the next waits: the communication thread (`beside`
    /// compute threads) or a caller's.
    pub(crate) fn run_beside(&mut self, beside: bool) {
        self.beside = beside;
    }

    /// The counter of threads that wait for the communication thread.
    pub(crate) fn callers(&self) -> Callers {
        self.callers.clone()
    }

    /// How long a wait that begins now may keep its core busy.
    pub(crate) fn budget(&self) -> Budget {
        self.budgets.at(self.beside && !self.callers.some())
    }

    /// A handle that can abort from another thread.
    pub(crate) fn abort_handle(&self) -> AbortHandle {
        AbortHandle {
            shared: Arc::clone(&self.shared),
        }
    }

    /// Sleeps until some link may have progressed, `until` has passed, or at
    /// most 100 ms.
    ///
    /// `want[peer]` is what to wait for. `spins` counts the caller's rounds without
    /// progress so far: at 0 it polls and yields first, as far as the wait policy
    /// allows; later it sleeps at once.
    ///
    /// # Errors
    ///
    /// `Aborted` when the group is poisoned, `PeerLost` when a peer is gone:
    /// any peer whose process died or whose connection broke, and an awaited
    /// one that has left in good order.
    pub(crate) fn idle(&mut self, want: &[Interest], spins: u32, until: Instant) -> Result<()> {
        let now = self.check_state()?;
        let (mut rings, mut sockets) = (false, false);
        for (peer, want) in self
            .peers
            .iter_mut()
            .zip(want)
            .filter(|(_, want)| want.any())
        {
            match peer {
                Peer::Own(_) => {}
                Peer::Ring(link) => {
                    if link.abandoned(*want) {
                        return Err(self.shared.blame(Fate::Left.into_error(link.peer)));
                    }
                    rings = true;
                }
                Peer::Tcp(_) => sockets = true,
            }
        }
        let timeout = until.saturating_duration_since(now).min(self.slice());
        let fresh = spins == 0;
        // It can be woken without any.
        sockets |= self.waker.is_some() && !self.shared.controls.is_empty();
        if !sockets {
            self.wait_memory(want, fresh, timeout);
        } else if !rings {
            if self.budget().polls() && spins < SOCKET_ROUNDS {
                std::hint::spin_loop();
            } else {
                self.wait_sockets(want, timeout)?;
            }
        } else {
            // Waits on memory, and checks sockets after each such wait.
            let end = now + timeout;
            let mut sleep = SLEEP_MIN;
            loop {
                let left = end.saturating_duration_since(Instant::now());
                if self.wait_memory(want, fresh, sleep.min(left)) != Wake::Elapsed
                    || self.wait_sockets(want, Duration::ZERO)?
                    || left.is_zero()
                {
                    break;
                }
                sleep = (sleep * 2).min(SLEEP_MAX);
            }
        }
        if let Some(waker) = &self.waker {
            waker.reset();
        }
        self.shared.check()
    }

    /// Whether the next waits may poll: every thread has a core.
    pub(crate) fn polls(&self) -> bool {
        self.budget().polls()
    }

    /// The shared memory, if all ranks of the group are on this host and share it.
    pub(crate) fn memory(&self) -> Option<SharedMemory> {
        let shares = |(rank, peer): (usize, &Peer)| match peer {
            Peer::Own(_) => rank == self.seat,
            Peer::Ring(link) => rank == link.seat,
            Peer::Tcp(_) => false,
        };
        let all = self.world() > 1
            && self.world() == self.shared.segment.seats()
            && self.peers.iter().enumerate().all(shares);
        all.then(|| SharedMemory {
            segment: Arc::clone(&self.shared.segment),
            arenas: self.arenas.clone(),
        })
    }

    /// Sleeps until `missing` holds for no rank, `until` has passed, or at
    /// most 100 ms; for groups whose [`Mesh::memory`] is shared. A rank that makes
    /// `missing` false rings our bell. `spins` as in [`Mesh::idle`].
    ///
    /// # Errors
    ///
    /// As [`Mesh::idle`]; a missing rank that has left is a lost peer.
    pub(crate) fn idle_for(
        &mut self,
        spins: u32,
        until: Instant,
        missing: impl Fn(usize) -> bool,
    ) -> Result<()> {
        let now = self.check_state()?;
        let (segment, world) = (&self.shared.segment, self.world);
        // `has_left` first: what a rank did before it left is then visible.
        let lost = |rank: usize| segment.has_left(rank) && missing(rank);
        if let Some(rank) = (0..world).find(|&rank| lost(rank)) {
            return Err(self.shared.blame(Fate::Left.into_error(rank)));
        }
        let timeout = until.saturating_duration_since(now).min(SLICE);
        self.budget()
            .wait(segment.bell(self.seat), spins == 0, timeout, || {
                let mut waits = false;
                for rank in (0..world).filter(|&rank| missing(rank)) {
                    if segment.has_left(rank) {
                        return true;
                    }
                    waits = true;
                }
                !waits || segment.is_poisoned()
            });
        self.shared.check()
    }

    /// The checks of every wait: poison, and now and then whether the peers live.
    fn check_state(&mut self) -> Result<Instant> {
        let now = Instant::now();
        let is_due = now >= self.next_watch;
        if is_due {
            self.shared.check_parents();
        }
        self.shared.check()?;
        if is_due {
            self.watch(now)?;
            self.next_watch = now + self.slice();
        }
        Ok(now)
    }

    /// The longest sleep.
    fn slice(&self) -> Duration {
        match self.shared.controls.is_empty() {
            true => SLICE,
            false => MIXED_SLICE,
        }
    }

    /// Waits for rings in shared memory.
    fn wait_memory(&mut self, want: &[Interest], fresh: bool, timeout: Duration) -> Wake {
        let budget = self.budget();
        let segment = &self.shared.segment;
        let (peers, waker) = (&mut self.peers, self.waker.as_deref());
        let bell = segment.bell_of(self.channel, self.seat);
        budget.wait(bell, fresh, timeout, || {
            segment.is_poisoned()
                || waker.is_some_and(Waker::is_woken)
                || peers.iter_mut().zip(want).any(|(peer, want)| match peer {
                    Peer::Ring(link) if want.any() => {
                        link.ready(*want) || link.segment.has_left(link.seat)
                    }
                    _ => false,
                })
        })
    }

    /// Waits for sockets: awaited data, and frames on any control socket. True if there
    /// was an event.
    fn wait_sockets(&self, want: &[Interest], timeout: Duration) -> Result<bool> {
        // Without its own core, every wake-up interrupts a compute thread.
        let batched = self.beside && !self.budgets.at(true).polls();
        let mut fds = Vec::with_capacity(2 * self.shared.controls.len());
        let mut controls = Vec::with_capacity(self.shared.controls.len());
        for control in &self.shared.controls {
            if !control.is_open() {
                // A group that ends with this one may have read the frame.
                self.check_fate(control)?;
                continue;
            }
            fds.push(PollFd::from_borrowed_fd(control.socket(), PollFlags::IN));
            controls.push(control);
        }
        for (peer, want) in self.peers.iter().zip(want).filter(|(_, want)| want.any()) {
            if let Peer::Tcp(link) = peer {
                let mut events = PollFlags::empty();
                if want.recv {
                    link.wake_at(if batched { want.coming_bytes } else { 0 });
                }
                events.set(PollFlags::IN, want.recv);
                events.set(PollFlags::OUT, want.send);
                fds.push(PollFd::from_borrowed_fd(link.socket(), events));
            }
        }
        if let Some(event) = self.waker.as_ref().and_then(|waker| waker.event.as_ref()) {
            fds.push(PollFd::new(event, PollFlags::IN));
        }
        if fds.is_empty() {
            return Ok(false);
        }
        poll(&mut fds, timeout).map_err(|e| Error::io("poll", e).with_rank(self.shared.rank))?;
        for (fd, control) in fds.iter().zip(&controls) {
            if !fd.revents().is_empty() {
                self.check_fate(control)?;
            }
        }
        Ok(fds.iter().any(|fd| !fd.revents().is_empty()))
    }

    /// Errors if the peer aborted the group or is gone.
    fn check_fate(&self, control: &Control) -> Result<()> {
        match control.pump() {
            None | Some(Fate::Left) => Ok(()),
            Some(fate) => Err(self.shared.blame(fate.into_error(control.peer()))),
        }
    }

    /// Checks whether all peers live, awaited or not.
    fn watch(&mut self, now: Instant) -> Result<()> {
        let segment = Arc::clone(&self.shared.segment);
        self.watches.retain(|watch| !segment.has_left(watch.seat));
        let mut fds: Vec<PollFd<'_>> = self
            .watches
            .iter()
            .map(|watch| PollFd::new(&watch.process, PollFlags::IN))
            .collect();
        if !fds.is_empty() {
            poll(&mut fds, Duration::ZERO)
                .map_err(|e| Error::io("poll", e).with_rank(self.shared.rank))?;
        }
        let dead = fds.iter().position(|fd| !fd.revents().is_empty());
        if let Some(watch) = dead.map(|i| &self.watches[i]) {
            // It may have left between our check of its seat and its end.
            if !segment.has_left(watch.seat) {
                let message = format!("rank {} (process {}) died", watch.rank, watch.pid);
                return Err(self.shared.blame(Error::peer_lost(watch.rank, message)));
            }
        }
        self.wait_sockets(&[], Duration::ZERO)?;
        for probe in &mut self.probes {
            probe.check(now).map_err(|end| self.shared.blame(end))?;
        }
        Ok(())
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        let shared = &self.shared;
        if self.channel == Channel::Messages {
            return;
        }
        if std::thread::panicking() {
            shared.poison(&Poison::new(
                shared.rank,
                format!("rank {} panicked", shared.rank),
            ));
        }
        // Relayed: a peer may see our end before the first cause reaches it.
        let cause = shared.segment.poisoned();
        for control in &shared.controls {
            match &cause {
                Some(cause) => control.send_abort(cause),
                None => control.send_goodbye(),
            }
        }
        shared.segment.leave(self.seat);
    }
}

/// `poll` with a timeout; interruptions count as timeouts.
fn poll(fds: &mut [PollFd<'_>], timeout: Duration) -> std::io::Result<()> {
    let timeout = Timespec::try_from(timeout).ok();
    match rustix::event::poll(fds, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// A group of `world` ranks that are threads of this process. `ring_bytes`
/// is the capacity of each ring; 0 chooses it by the number of ranks. Each is assumed
/// to compute with one thread.
///
/// # Panics
///
/// When the system refuses the memory, or `world` is larger than 1024.
pub fn thread_mesh(world: usize, ring_bytes: usize) -> Vec<Mesh> {
    thread_mesh_with(world, ring_bytes, None)
}

/// [`thread_mesh`] with address space for each rank's buckets as in
/// [`FormOptions::arena_bytes`](super::FormOptions::arena_bytes).
pub(crate) fn thread_mesh_with(
    world: usize,
    ring_bytes: usize,
    arena_bytes: Option<usize>,
) -> Vec<Mesh> {
    if world == 0 {
        return Vec::new();
    }
    assert!(
        world <= MAX_LOCAL_RANKS,
        "at most {MAX_LOCAL_RANKS} ranks may be threads, not {world}"
    );
    let capacity = ring_capacity(world, (ring_bytes > 0).then_some(ring_bytes));
    let policy = Policy::from_env().unwrap_or_else(|message| {
        tracing::warn!("{message}; using auto");
        Policy::Auto
    });
    let layout = Layout::new(world, capacity).unwrap_or_else(|| {
        unreachable!("{world} seats and rings of {capacity} bytes are within the limits")
    });
    let segment = match Segment::private(layout) {
        Ok(segment) => Arc::new(segment),
        Err(e) => panic!("cannot map {} bytes for {world} ranks: {e}", layout.total()),
    };
    let arenas = if world > 1 {
        Arenas::private(world, arena_bytes).map(Arc::new)
    } else {
        None
    };
    // All seats first: no rank may see a peer as absent.
    (0..world).for_each(|seat| segment.sit(seat));
    (0..world)
        .map(|rank| {
            Mesh::assemble(Parts {
                rank,
                world,
                segment: Arc::clone(&segment),
                arenas: arenas.clone(),
                seat: rank,
                neighbours: (0..world).filter(|&p| p != rank).map(|p| (p, p)).collect(),
                kind: TransportKind::Thread,
                sockets: Vec::new(),
                message_sockets: Vec::new(),
                hosts: Hosts::one(world),
                watches: Vec::new(),
                probes: Vec::new(),
                topology: Topology::of_threads(world, 1),
                policy,
                instance: 0,
            })
        })
        .collect()
}

#[cfg(test)]
#[path = "mesh_tests.rs"]
mod tests;
