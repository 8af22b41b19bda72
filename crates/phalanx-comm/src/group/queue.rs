//! One operation at a time, in the order of issue.
//!
//! Every operation takes a *ticket* when it is issued and runs when its
//! ticket is served. A blocking call runs in its caller's thread, so without contention
//! it costs two uncontended locks and no thread switch. Asynchronous operations run on
//! one communication thread per group, started at the first of them.
//!
//! A thread that waits for an operation that has not started runs it itself, and those before it:
//! there is no switch to the communication thread and back.
//!
//! | event            | tickets                  | who runs                     |
//! |------------------|--------------------------|------------------------------|
//! | blocking call    | takes the next, waits    | the caller, when served      |
//! | asynchronous     | takes the next, returns  | the communication thread, or a thread that waits for it |
//! | operation over   | serves the next          | the thread that ran it       |
//! | last handle gone | no new ones              | the thread finishes its jobs |

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

use crate::backend::Runner;
use crate::messages::Collectives;
use crate::stall::{Users, this_thread};
use crate::sync::lock;
use crate::transport::{AbortHandle, Poison};
use crate::wait::{Callers, take_short_slices};
use crate::{Error, Result};

/// An asynchronous operation. It gets an error when it cannot run.
pub(super) type Job = Box<dyn FnOnce(Result<&mut Runner>) + Send>;

/// The queue of one rank in one group. Dropping it finishes the jobs issued.
pub(super) struct Queue {
    shared: Arc<QueueCore>,
    /// Present once the first asynchronous operation was issued.
    worker: Mutex<Option<JoinHandle<()>>>,
}

struct QueueCore {
    rank: usize,
    abort: AbortHandle,
    state: Mutex<State>,
    served: Condvar,
    runner: Mutex<Runner>,
    /// Threads that wait instead of computing.
    callers: Callers,
    users: Arc<Users>,
}

#[derive(Default)]
struct State {
    next_ticket: u64,
    serving: u64,
    jobs: VecDeque<(u64, Job)>,
    /// The thread whose ticket is served, while it runs.
    holder: Option<usize>,
    /// Threads asleep on `served`: without any, no wake-up is sent.
    sleepers: usize,
    closed: bool,
}

impl State {
    /// Checks that this thread may issue an operation. The thread whose ticket is
    /// served would wait for itself.
    fn takes_calls(&self) -> Result<()> {
        if self.closed {
            return Err(closed());
        }
        if self.holder == Some(this_thread()) {
            return Err(Error::usage(
                "the group is called from inside one of its operations; call it when that is over",
            ));
        }
        Ok(())
    }

    /// The job whose ticket is served, if that is at most `last`.
    fn next_job(&mut self, last: u64) -> Option<Job> {
        let serving = self.serving;
        let due = |(ticket, _): &mut (u64, Job)| *ticket == serving && *ticket <= last;
        self.jobs.pop_front_if(due).map(|(_, job)| job)
    }
}

impl QueueCore {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Only our own code runs under this lock.
        lock(&self.state)
    }

    fn sleep<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.sleepers += 1;
        // Needs no deadline: the thread whose ticket is served is another one, has a
        // deadline, and serves the next ticket even on a panic. The communication thread
        // sleeps until the last handle is dropped.
        let mut state = self
            .served
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner);
        state.sleepers -= 1;
        state
    }

    fn wake(&self, state: MutexGuard<'_, State>) {
        let sleepers = state.sleepers;
        drop(state);
        if sleepers > 0 {
            self.served.notify_all();
        }
    }

    /// Runs `work`, whose ticket is served; `beside`: while another thread computes. A panic poisons the group.
    fn serve<R>(
        &self,
        mut state: MutexGuard<'_, State>,
        beside: bool,
        work: impl FnOnce(&mut Runner) -> R,
    ) -> std::thread::Result<R> {
        state.holder = Some(this_thread());
        drop(state);
        let _serving = Serving(self);
        // After a panic inside an operation the group is poisoned, and the
        // runner refuses everything.
        let mut runner = lock(&self.runner);
        runner.run_beside(beside);
        let result = catch_unwind(AssertUnwindSafe(|| work(&mut runner)));
        if result.is_err() {
            let cause = format!("rank {} panicked inside an operation", self.rank);
            self.abort.poison(&Poison::new(self.rank, cause));
        }
        result
    }
}

/// The right to run an operation; dropping it serves the next ticket.
struct Serving<'a>(&'a QueueCore);

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.holder = None;
        state.serving += 1;
        // Otherwise no thread has the next ticket, or waits for the end.
        if state.serving != state.next_ticket || state.closed {
            self.0.wake(state);
        }
    }
}

impl Queue {
    pub(super) fn new(
        rank: usize,
        abort: AbortHandle,
        runner: Runner,
        callers: Callers,
        users: Arc<Users>,
    ) -> Self {
        Queue {
            shared: Arc::new(QueueCore {
                rank,
                abort,
                state: Mutex::new(State::default()),
                served: Condvar::new(),
                runner: Mutex::new(runner),
                callers,
                users,
            }),
            worker: Mutex::new(None),
        }
    }

    /// Runs `operation` in this thread when everything issued before is over.
    pub(super) fn run<R>(&self, operation: impl FnOnce(&mut Runner) -> Result<R>) -> Result<R> {
        let shared = &*self.shared;
        shared.users.note();
        let mut state = shared.lock();
        state.takes_calls()?;
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        if state.serving != ticket {
            let _waiting = shared.callers.wait();
            while state.serving != ticket {
                state = shared.sleep(state);
            }
        }
        let result = shared.serve(state, false, operation);
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// As [`run`](Self::run) if all issued operations are over; otherwise returns `None` at once.
    pub(super) fn run_if_idle<R>(
        &self,
        operation: impl FnOnce(&mut Runner) -> Result<R>,
    ) -> Option<Result<R>> {
        Self::run_if_idle_on(&self.shared, operation)
    }

    /// What messages in flight ask this queue.
    pub(super) fn collectives(&self) -> Collectives {
        let shared = Arc::downgrade(&self.shared);
        let same = Weak::clone(&shared);
        Collectives {
            check: Box::new(move || {
                let Some(shared) = shared.upgrade().filter(|shared| !shared.lock().closed) else {
                    return Ok(());
                };
                let checked = Self::run_if_idle_on(&shared, |runner| runner.check());
                checked.unwrap_or(Ok(()))
            }),
            is_idle: Box::new(move || {
                same.upgrade().is_some_and(|shared| {
                    let state = shared.lock();
                    state.serving == state.next_ticket
                })
            }),
        }
    }

    /// Fails if this thread may not issue an operation.
    pub(super) fn check_caller(&self) -> Result<()> {
        self.shared.lock().takes_calls()
    }

    fn run_if_idle_on<R>(
        shared: &QueueCore,
        operation: impl FnOnce(&mut Runner) -> Result<R>,
    ) -> Option<Result<R>> {
        let mut state = shared.lock();
        if state.closed {
            return Some(Err(closed()));
        }
        if state.serving != state.next_ticket {
            return None;
        }
        state.next_ticket += 1;
        let result = shared.serve(state, false, operation);
        Some(result.unwrap_or_else(|panic| resume_unwind(panic)))
    }

    /// Issues `job`; it runs when everything issued before is over. `None` if it has failed already.
    pub(super) fn submit(&self, job: Job) -> Option<Issued> {
        self.shared.users.note();
        // Held until the job is queued, so that a thread that could not be
        // started is noticed before a ticket is taken.
        let mut worker = lock(&self.worker);
        if worker.is_none() {
            let shared = Arc::clone(&self.shared);
            let started = std::thread::Builder::new()
                .name(format!("phalanx-comm-{}", shared.rank))
                .spawn(move || work(&shared));
            match started {
                Ok(handle) => *worker = Some(handle),
                Err(e) => {
                    // The other ranks count on this operation.
                    let error = Error::io("cannot start the communication thread", e);
                    self.shared
                        .abort
                        .poison(&Poison::new(self.shared.rank, error.message()));
                    job(Err(error));
                    return None;
                }
            }
        }
        let mut state = self.shared.lock();
        if let Err(e) = state.takes_calls() {
            drop(state);
            job(Err(e));
            return None;
        }
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        state.jobs.push_back((ticket, job));
        self.shared.wake(state);
        Some(Issued {
            shared: Arc::downgrade(&self.shared),
            ticket,
        })
    }

    /// Accepts no more operations. Those already issued still run.
    pub(super) fn close(&self) {
        let mut state = self.shared.lock();
        state.closed = true;
        self.shared.wake(state);
    }
}

fn closed() -> Error {
    Error::usage("the group was shut down; form a new one")
}

/// An operation that was issued.
pub(super) struct Issued {
    shared: Weak<QueueCore>,
    ticket: u64,
}

impl Issued {
    /// Runs in this thread what is issued and has not started, up to this operation. Stops where another thread runs one.
    pub(super) fn help(&self) {
        let Some(shared) = self.shared.upgrade() else {
            return;
        };
        loop {
            let mut state = shared.lock();
            let Some(job) = state.next_job(self.ticket) else {
                return;
            };
            run_job(&shared, state, job, false);
        }
    }
}

/// The communication thread.
fn work(shared: &QueueCore) {
    take_short_slices();
    loop {
        let mut state = shared.lock();
        let job = loop {
            match state.next_job(u64::MAX) {
                None if state.closed && state.jobs.is_empty() => return,
                None => state = shared.sleep(state),
                Some(job) => break job,
            }
        };
        run_job(shared, state, job, true);
    }
}

/// Runs a job whose ticket is served.
fn run_job(shared: &QueueCore, state: MutexGuard<'_, State>, job: Job, beside: bool) {
    // After a panic the job's handle completed itself when it was dropped. The panic
    // message is on stderr already.
    let _ = shared.serve(state, beside, |runner| job(Ok(runner)));
}

impl Drop for Queue {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The other ranks must not wait for data that will never come.
            let cause = format!("rank {} panicked", self.shared.rank);
            self.shared
                .abort
                .poison(&Poison::new(self.shared.rank, cause));
        }
        self.close();
        // By a task that an operation has woken: its thread cannot wait for itself.
        if self.shared.lock().holder == Some(this_thread()) {
            return;
        }
        let worker = lock(&self.worker).take();
        if let Some(worker) = worker {
            // It catches panics of jobs, so there is nothing to learn here. Each
            // remaining job has its deadline.
            let _ = worker.join();
        }
        // Another thread may run the last ones.
        let mut state = self.shared.lock();
        while state.serving != state.next_ticket {
            state = self.shared.sleep(state);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::{GroupOptions, ProcessGroup};

    #[test]
    fn a_waiting_thread_runs_what_has_not_started_up_to_its_own() {
        let group = ProcessGroup::threads(1, GroupOptions::default()).remove(0);
        // No communication thread: nothing was submitted.
        let shared = &group.core.queue.shared;
        let (ran, order) = channel();
        let issue = |count: u64| {
            let mut state = shared.lock();
            for _ in 0..count {
                let (ticket, ran) = (state.next_ticket, ran.clone());
                let job = move |runner: Result<&mut Runner>| {
                    runner.unwrap();
                    ran.send((ticket, this_thread())).unwrap();
                };
                state.jobs.push_back((ticket, Box::new(job)));
                state.next_ticket += 1;
            }
        };
        let help = |ticket| {
            let shared = Arc::downgrade(shared);
            Issued { shared, ticket }.help();
            let here = order.try_iter();
            here.map(|(ticket, thread)| (ticket, thread == this_thread()))
                .collect::<Vec<_>>()
        };
        issue(4);
        assert_eq!(help(1), [(0, true), (1, true)]);
        assert_eq!(help(1), []);
        // Another thread runs the next one.
        let other = shared.lock().next_job(u64::MAX).unwrap();
        assert_eq!(help(3), []);
        run_job(shared, shared.lock(), other, true);
        assert_eq!(help(3), [(2, true), (3, true)]);
        // A call of this thread continues from there.
        group.barrier().unwrap();
    }

    #[test]
    fn dropping_the_group_waits_for_what_another_thread_runs() {
        let group = ProcessGroup::threads(1, GroupOptions::default()).remove(0);
        let shared = Arc::downgrade(&group.core.queue.shared);
        let (started, has_started) = channel();
        let (end, ends) = channel::<()>();
        let (ended, has_ended) = channel();
        {
            let mut state = group.core.queue.shared.lock();
            let job = move |_: Result<&mut Runner>| {
                started.send(()).unwrap();
                ends.recv().unwrap();
                ended.send(()).unwrap();
            };
            state.jobs.push_back((0, Box::new(job)));
            state.next_ticket = 1;
        }
        std::thread::scope(|scope| {
            scope.spawn(move || Issued { shared, ticket: 0 }.help());
            has_started.recv().unwrap();
            let dropped = scope.spawn(move || {
                drop(group);
                has_ended.try_recv().is_ok()
            });
            std::thread::sleep(std::time::Duration::from_millis(50));
            end.send(()).unwrap();
            assert!(dropped.join().unwrap(), "it did not wait");
        });
    }
}
