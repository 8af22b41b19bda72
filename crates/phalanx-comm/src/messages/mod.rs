//! Sends and receives: several in flight, matched by sender and tag, at the same time as collectives of the group.
//!
//! Messages have links of their own, so that neither they nor collectives wait for the other. An [`Engine`] moves them.
//! A thread that waits for a message runs it; while none does, the message thread runs it as long as messages are in
//! flight. So a blocking send or receive costs no thread switch.
//!
//! *Matching.* Messages from one rank with one tag are received in the order in which they were sent. A receive takes
//! the first message that has its tag and comes from its rank; of several receives that fit, the first one issued gets it.
//!
//! *Buffering.* A message without a receive is kept in memory of the receiving rank, up to [`engine::EARLY_MAX`] bytes
//! for all of them. So ranks may send to each other first and receive later. A rank takes messages in while it waits in
//! any operation of the group; one that computes takes them in when it waits again, or by its message thread while it
//! has other messages in flight.

mod arrival;
mod engine;
mod pending;

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, TryLockError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use self::engine::Engine;
use self::pending::Pending;
use crate::operation::{Limits, Operation};
use crate::recorder::MessageFlight;
use crate::stall::{Counts, StallReports, Users, end_group};
use crate::sync::lock;
use crate::transport::{AbortHandle, Mesh, Poison, Waker};
use crate::wait::{Callers, take_short_slices};
use crate::{Error, ErrorKind, Result};

/// How long the message thread continues to receive after the last message in flight: the next one often follows soon.
const QUIET: Duration = Duration::from_millis(100);
/// First and longest time after which a waiting thread tries again to run the engine.
const PATIENCE: Duration = Duration::from_micros(20);
/// See [`PATIENCE`].
const PATIENCE_MAX: Duration = Duration::from_millis(20);

/// A send or receive.
pub(crate) struct Request {
    /// As all ranks know it; of a receive from any rank, the root is this rank.
    pub(crate) operation: Operation,
    pub(crate) way: Direction,
    pub(crate) tag: u32,
    pub(crate) bytes: usize,
}

/// Which way a message goes, and its memory.
#[derive(Clone, Copy)]
pub(crate) enum Direction {
    Send { to: usize, from: *const u8 },
    Receive { from: Option<usize>, into: *mut u8 },
}

// SAFETY: who submits a request vouches for its memory until it is over, whichever thread works on it.
unsafe impl Send for Request {}

/// Called with the result: the sender's rank, or for a send the receiver's.
type Then = Box<dyn FnOnce(Result<usize>) + Send>;

/// A request in flight.
pub(crate) struct Ticket {
    then: Mutex<Option<Then>>,
    result: Mutex<Option<Result<usize>>>,
    changed: Condvar,
    /// Threads that wait for it.
    waiters: Callers,
}

impl Ticket {
    fn new(then: Option<Then>, waiters: Callers) -> Arc<Ticket> {
        Arc::new(Ticket {
            then: Mutex::new(then),
            result: Mutex::new(None),
            changed: Condvar::new(),
            waiters,
        })
    }

    fn is_over(&self) -> bool {
        lock(&self.result).is_some()
    }

    /// Only the first result counts.
    fn finish(&self, result: Result<usize>) {
        if let Some(then) = lock(&self.then).take() {
            then(result.clone());
        }
        lock(&self.result).get_or_insert(result);
        self.changed.notify_all();
    }
}

/// The messages of one rank in one group.
pub(crate) struct Messages {
    shared: Arc<Mailbox>,
    /// Present once a message was issued in the background.
    worker: Mutex<Option<JoinHandle<()>>>,
}

/// A request that was started in the background. It does not keep the connections.
pub(crate) struct InFlight {
    shared: Weak<Mailbox>,
    ticket: Arc<Ticket>,
}

impl InFlight {
    /// Moves messages in this thread until the request is over, so that the message thread need not be waited for.
    pub(crate) fn help(&self) {
        let shared = self.shared.upgrade().filter(|_| !self.ticket.is_over());
        let Some(shared) = shared else {
            return;
        };
        let _waiting = self.ticket.waiters.wait();
        shared.enter();
        // The result goes to the request's `then`.
        let _ = shared.wait(&self.ticket);
        // The message thread, which there is, goes on with the others.
        shared.exit();
    }
}

/// What the engine asks the queue of collectives.
pub(crate) struct Collectives {
    /// Checks whether the ranks live, unless a collective does.
    pub(crate) check: Box<dyn Fn() -> Result<()> + Send + Sync>,
    /// Whether none is issued that is not over.
    pub(crate) is_idle: Box<dyn Fn() -> bool + Send + Sync>,
}

struct Mailbox {
    rank: usize,
    engine: Mutex<Engine>,
    /// Requests that the engine has not taken yet.
    inbox: Mutex<Vec<Pending>>,
    load: Mutex<Load>,
    changed: Condvar,
    waker: Option<Arc<Waker>>,
    abort: AbortHandle,
    counts: Arc<Counts>,
    users: Arc<Users>,
    flight: MessageFlight,
    limits: Limits,
    issued: AtomicU64,
    collectives: Collectives,
}

/// What there is to do for the message thread.
#[derive(Default)]
struct Load {
    /// Requests that are not over.
    pending: usize,
    /// Threads that run the engine, or wait to.
    drivers: usize,
    /// A collective waits: take messages in.
    listen: bool,
    /// No more requests come; receives end.
    closed: bool,
    /// The message thread ends when no more requests are in flight.
    ended: bool,
}

/// What the messages of a rank share with its collectives.
pub(crate) struct Common {
    pub(crate) flight: MessageFlight,
    pub(crate) board: Option<StallReports>,
    pub(crate) counts: Arc<Counts>,
    pub(crate) users: Arc<Users>,
    pub(crate) bytes_sent: Arc<[AtomicU64]>,
    pub(crate) limits: Limits,
}

impl Messages {
    /// On `mesh`, the links of [`Mesh::take_messages`].
    pub(crate) fn new(
        mesh: Mesh,
        ids: (u32, u32),
        common: Common,
        collectives: Collectives,
    ) -> Messages {
        let Common {
            flight,
            board,
            counts,
            users,
            bytes_sent,
            limits,
        } = common;
        Messages {
            shared: Arc::new(Mailbox {
                rank: mesh.rank(),
                inbox: Mutex::default(),
                load: Mutex::default(),
                changed: Condvar::new(),
                waker: mesh.waker(),
                abort: mesh.abort_handle(),
                counts,
                users,
                flight,
                limits,
                issued: AtomicU64::new(0),
                collectives,
                engine: Mutex::new(Engine::new(
                    mesh,
                    ids,
                    limits.segment_bytes,
                    board,
                    bytes_sent,
                )),
            }),
            worker: Mutex::new(None),
        }
    }

    /// Runs all requests to their end, in this thread; returns the ranks of their other ends.
    ///
    /// # Safety
    ///
    /// Until this returns, the memory of sends is readable and initialised and not written, that of receives is writable
    /// and not accessed otherwise, both for as many bytes as the request says.
    pub(crate) unsafe fn run(&self, requests: Vec<Request>) -> Result<Vec<usize>> {
        let waiters = Callers::default();
        let _waiting = waiters.wait();
        let shared = &*self.shared;
        let is_first = shared.issued.load(Ordering::Relaxed) == 0;
        let submitted = requests
            .into_iter()
            .map(|request| shared.submit(request, None, waiters.clone(), is_first))
            .collect::<Vec<_>>();
        shared.enter();
        let (mut peers, mut failure) = (Vec::with_capacity(submitted.len()), None);
        // All of them, also after a failure: their memory is in use until they are over.
        for ticket in submitted {
            match ticket.and_then(|ticket| shared.wait(&ticket)) {
                Ok(peer) => peers.push(peer),
                Err(e) => {
                    failure.get_or_insert(e);
                }
            }
        }
        if shared.exit()
            && let Err(error) = self.start_worker()
        {
            shared.fail(error);
        }
        failure.map_or(Ok(peers), Err)
    }

    /// Starts a request; `then` gets its result.
    ///
    /// # Safety
    ///
    /// As [`Messages::run`], until `then` was called.
    pub(crate) unsafe fn spawn(
        &self,
        request: Request,
        then: Then,
        waiters: Callers,
    ) -> Option<InFlight> {
        if let Err(error) = self.start_worker() {
            // The other ranks count on this message.
            let error = error.with_rank(self.shared.rank);
            self.shared.fail(error.clone());
            then(Err(error));
            return None;
        }
        let then = Arc::new(Mutex::new(Some(then)));
        let again = Arc::clone(&then);
        let take = move |then: &Mutex<Option<Then>>| lock(then).take();
        let call: Then = Box::new(move |result| {
            if let Some(then) = take(&then) {
                then(result);
            }
        });
        let is_first = self.shared.issued.load(Ordering::Relaxed) == 0;
        match self.shared.submit(request, Some(call), waiters, is_first) {
            Ok(ticket) => Some(InFlight {
                shared: Arc::downgrade(&self.shared),
                ticket,
            }),
            Err(error) => {
                if let Some(then) = lock(&again).take() {
                    then(Err(error));
                }
                None
            }
        }
    }

    /// Takes messages in for a while: a collective of this rank waits.
    pub(crate) fn listen(&self) {
        if self.start_worker().is_ok() {
            lock(&self.shared.load).listen = true;
            self.shared.changed.notify_all();
        }
    }

    /// Takes no more requests, ends the receives, and waits until all sends are over. Each has its deadline, and an error
    /// of one ends the group. Messages of other ranks are still taken in.
    pub(crate) fn close(&self) -> Result<()> {
        let shared = &*self.shared;
        lock(&shared.load).closed = true;
        shared.changed.notify_all();
        if let Some(waker) = &shared.waker {
            waker.wake();
        }
        let is_done = || lock(&shared.load).pending == 0;
        while !is_done() {
            match shared.engine.try_lock() {
                Ok(mut engine) => shared.drive(&mut engine, false, |_| is_done()),
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
                Err(TryLockError::Poisoned(engine)) => {
                    return Err(shared.broken(&mut engine.into_inner()));
                }
            }
        }
        Ok(())
    }

    /// What keeps the connections open.
    pub(crate) fn links(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::clone(&self.shared) as _
    }

    fn start_worker(&self) -> Result<()> {
        let mut worker = lock(&self.worker);
        if worker.is_none() {
            let shared = Arc::clone(&self.shared);
            let started = std::thread::Builder::new()
                .name(format!("phalanx-msg-{}", shared.rank))
                .spawn(move || shared.work());
            *worker = Some(started.map_err(|e| Error::io("cannot start the message thread", e))?);
        }
        Ok(())
    }
}

impl Drop for Messages {
    fn drop(&mut self) {
        let shared = &*self.shared;
        if std::thread::panicking() {
            // The other ranks must not wait for messages that will never come.
            let cause = format!("rank {} panicked", shared.rank);
            shared.abort.poison(&Poison::new(shared.rank, cause));
        }
        let mut load = lock(&shared.load);
        (load.closed, load.ended) = (true, true);
        drop(load);
        shared.changed.notify_all();
        if let Some(waker) = &shared.waker {
            waker.wake();
        }
        let worker = lock(&self.worker).take();
        if let Some(worker) = worker {
            // Sends have their deadlines; receives ended with the group.
            let _ = worker.join();
        }
    }
}

impl Mailbox {
    /// Whether requests are in flight.
    fn is_busy(&self) -> bool {
        lock(&self.load).pending > 0
    }

    /// Why no more messages are taken, if so.
    fn refusal(&self) -> Option<Error> {
        if lock(&self.load).closed {
            return Some(Error::usage("the group was shut down; form a new one"));
        }
        let poison = self.abort.poisoned()?;
        Some(Error::aborted(poison.origin_rank, poison.cause))
    }

    fn submit(
        &self,
        request: Request,
        then: Option<Then>,
        waiters: Callers,
        is_first: bool,
    ) -> Result<Arc<Ticket>> {
        self.users.note();
        let ticket = Ticket::new(then, waiters);
        let limit = request.operation.timeout.unwrap_or(match is_first {
            true => self.limits.first_op_timeout,
            false => self.limits.op_timeout,
        });
        let mut inbox = lock(&self.inbox);
        let pending = Pending::new(
            request,
            Arc::clone(&ticket),
            limit,
            (self.rank, &self.counts),
        );
        if let Some(error) = self.refusal() {
            return Err(pending.named(error, self.rank));
        }
        self.issued.fetch_add(1, Ordering::Relaxed);
        lock(&self.load).pending += 1;
        let pending = pending.begun(&self.flight, &self.counts);
        inbox.push(pending);
        drop(inbox);
        self.changed.notify_all();
        if let Some(waker) = &self.waker {
            waker.wake();
        }
        Ok(ticket)
    }

    /// Runs the engine until `enough`, which gets the time since something moved.
    fn drive(&self, engine: &mut Engine, beside: bool, enough: impl Fn(Duration) -> bool) {
        if let Err(error) = engine.run(self, beside, enough) {
            if error.kind() == ErrorKind::Aborted && !self.is_busy() {
                // It only listened.
                return;
            }
            let error = self.end_over(engine, error);
            engine.fail(self, &error);
        }
    }

    /// A thread wants to run the engine; the message thread leaves it.
    fn enter(&self) {
        lock(&self.load).drivers += 1;
        if let Some(waker) = &self.waker {
            waker.wake();
        }
    }

    /// Runs the engine until the request is over, in a thread that has [entered](Self::enter).
    fn wait(&self, ticket: &Ticket) -> Result<usize> {
        let mut patience = PATIENCE;
        while !ticket.is_over() {
            match self.engine.try_lock() {
                Ok(mut engine) => {
                    self.drive(&mut engine, false, |_| ticket.is_over());
                }
                Err(TryLockError::WouldBlock) => {
                    let result = lock(&ticket.result);
                    // The message thread leaves the engine to us; another thread may end our request.
                    if result.is_none() {
                        drop(ticket.changed.wait_timeout(result, patience));
                    }
                    patience = (patience * 2).min(PATIENCE_MAX);
                }
                Err(TryLockError::Poisoned(engine)) => {
                    return Err(self.broken(&mut engine.into_inner()));
                }
            }
        }
        lock(&ticket.result)
            .clone()
            .unwrap_or_else(|| Err(Error::internal("a message without a result")))
    }

    /// It does not any more; true if requests of others are in flight.
    fn exit(&self) -> bool {
        let mut load = lock(&self.load);
        load.drivers -= 1;
        let is_needed = load.drivers == 0 && load.pending > 0;
        drop(load);
        self.changed.notify_all();
        is_needed
    }

    /// A thread panicked while it ran the engine: ends all requests.
    fn broken(&self, engine: &mut Engine) -> Error {
        let error = Error::internal("a thread panicked while it moved messages");
        let error = self.end_over(engine, error);
        engine.fail(self, &error);
        error.with_rank(self.rank)
    }

    /// Ends the group over an error; returns the first cause.
    fn end_over(&self, engine: &Engine, error: Error) -> Error {
        let cause = error.message().to_owned();
        let error = end_group(&self.abort, self.rank, engine.found(), error, cause);
        self.flight.failed(&error.clone().with_rank(self.rank));
        error
    }

    /// Ends the group while no thread runs the engine.
    fn fail(&self, error: Error) {
        // First: this ends the waits of a thread that has the engine.
        self.abort.poison(&Poison::new(self.rank, error.message()));
        let mut engine = lock(&self.engine);
        let error = self.end_over(&engine, error);
        engine.fail(self, &error);
    }

    /// The message thread.
    fn work(&self) {
        take_short_slices();
        loop {
            let mut load = lock(&self.load);
            while load.drivers > 0 || (load.pending == 0 && !load.listen) {
                if load.ended && load.pending == 0 {
                    return;
                }
                load = self
                    .changed
                    .wait(load)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            load.listen = false;
            drop(load);
            // Waits for a thread that runs it until its own message is over.
            match self.engine.lock() {
                Ok(mut engine) => self.drive(&mut engine, true, |quiet| {
                    let load = lock(&self.load);
                    let is_done = load.pending == 0 && (quiet >= QUIET || load.ended);
                    is_done || load.drivers > 0
                }),
                Err(engine) => {
                    self.broken(&mut engine.into_inner());
                    return;
                }
            }
        }
    }
}
