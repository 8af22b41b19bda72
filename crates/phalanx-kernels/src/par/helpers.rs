//! Threads that help a caller with its chunks. The caller works too, so on a
//! busy machine it never waits for a helper that has not been scheduled; helpers
//! watch for work for some microseconds after each call before they sleep.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// How often a thread polls before it sleeps: about 0.1 ms.
const SPINS: usize = 2000;
/// Bits of a ticket that count chunks still to be taken.
const COUNT_BITS: u32 = 24;
/// Chunks of one call at most.
const MAX_CHUNKS: usize = (1 << COUNT_BITS) - 1;

/// The chunks that a thread takes first: number of the call, and in the low bits how many of them are not taken yet.
///
/// A thread's chunks follow one another, and are the same ones in all calls of as many chunks. So a thread often reads
/// what it wrote in the call before, which is still in its caches.
#[repr(align(128))]
#[derive(Default)]
struct Ticket(AtomicU64);

impl Ticket {
    fn left(ticket: u64) -> usize {
        ticket as usize & MAX_CHUNKS
    }
}

/// State that the threads share.
struct HelperState {
    /// Of the caller, then of each helper that was asked for.
    tickets: Vec<Ticket>,
    /// The call's function: what to call, and the closure to call it with.
    call: AtomicPtr<()>,
    closure: AtomicPtr<()>,
    chunks: AtomicUsize,
    /// Chunks that have not ended.
    pending: AtomicUsize,
    /// A call is running.
    busy: AtomicBool,
    /// The caller sleeps until `pending` is 0.
    waiting: AtomicBool,
    door: Mutex<()>,
    ended: Condvar,
    /// The first panic of a chunk.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    /// Whether each helper sleeps.
    asleep: Vec<AtomicBool>,
    spins: usize,
}

/// The function that [`HelperState::call`] points to.
type Call = unsafe fn(*const (), usize);

/// Calls the closure that `f` points to.
///
/// # Safety
/// `f` points to a living `F`.
unsafe fn call_closure<F: Fn(usize) + Sync>(f: *const (), chunk: usize) {
    // SAFETY: the caller's promise.
    unsafe { (*f.cast::<F>())(chunk) }
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HelperState {
    /// First chunk of thread `i` in a call of `chunks`.
    fn first(&self, i: usize, chunks: usize) -> usize {
        (i * chunks).div_ceil(self.tickets.len())
    }

    /// Takes and runs chunks until none is left: first those of thread `me`, then of the ones after it.
    fn work(&self, me: usize) {
        let threads = self.tickets.len();
        for of in (me..threads).chain(0..me) {
            self.work_of(of);
        }
    }

    /// Takes and runs chunks of thread `of` until none is left.
    fn work_of(&self, of: usize) {
        let next = &self.tickets[of].0;
        loop {
            let ticket = next.load(Ordering::Acquire);
            let left = Ticket::left(ticket);
            if left == 0 {
                return;
            }
            let call = self.call.load(Ordering::Relaxed);
            let closure = self.closure.load(Ordering::Relaxed);
            let chunks = self.chunks.load(Ordering::Relaxed);
            let chunk = self.first(of + 1, chunks).wrapping_sub(left);
            let taken =
                next.compare_exchange_weak(ticket, ticket - 1, Ordering::AcqRel, Ordering::Relaxed);
            if taken.is_err() {
                continue;
            }
            // SAFETY: the ticket did not change between the two loads of it, and the
            // three values change only between a call whose chunks have all ended and
            // the next ticket: they are this call's. Its caller waits for this chunk
            // before the closure is dropped.
            let run = || unsafe { std::mem::transmute::<*mut (), Call>(call)(closure, chunk) };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
                lock(&self.panic).get_or_insert(panic);
            }
            if self.pending.fetch_sub(1, Ordering::SeqCst) == 1
                && self.waiting.load(Ordering::SeqCst)
            {
                let _door = lock(&self.door);
                self.ended.notify_one();
            }
        }
    }

    /// The loop of a helper thread.
    fn help(&self, me: usize) {
        while !self.stop.load(Ordering::Acquire) {
            self.work(me + 1);
            if (0..self.spins).any(|_| self.wanted()) {
                continue;
            }
            self.asleep[me].store(true, Ordering::SeqCst);
            // Either this load sees the new ticket, or the thread that made it sees the flag.
            fence(Ordering::SeqCst);
            while !self.wanted() && self.asleep[me].load(Ordering::SeqCst) {
                std::thread::park();
            }
            self.asleep[me].store(false, Ordering::SeqCst);
        }
    }

    fn wanted(&self) -> bool {
        std::hint::spin_loop();
        let left = |t: &Ticket| Ticket::left(t.0.load(Ordering::Acquire)) != 0;
        self.tickets.iter().any(left) || self.stop.load(Ordering::Acquire)
    }

    /// Returns once every chunk has ended.
    fn wait(&self) {
        let over = || self.pending.load(Ordering::SeqCst) == 0;
        let spun = (0..self.spins).any(|_| {
            std::hint::spin_loop();
            over()
        });
        if spun {
            return;
        }
        let mut door = lock(&self.door);
        self.waiting.store(true, Ordering::SeqCst);
        while !over() {
            door = self
                .ended
                .wait(door)
                .unwrap_or_else(PoisonError::into_inner);
        }
        self.waiting.store(false, Ordering::SeqCst);
    }
}

/// Helpers of one caller at a time.
pub(super) struct Helpers {
    shared: Arc<HelperState>,
    threads: Vec<JoinHandle<()>>,
}

impl Helpers {
    /// Starts `helpers` threads, or as many as the system allows.
    pub(super) fn new(helpers: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(HelperState {
            tickets: (0..=helpers).map(|_| Ticket::default()).collect(),
            call: AtomicPtr::default(),
            closure: AtomicPtr::default(),
            chunks: AtomicUsize::new(0),
            pending: AtomicUsize::new(0),
            busy: AtomicBool::new(false),
            waiting: AtomicBool::new(false),
            door: Mutex::default(),
            ended: Condvar::new(),
            panic: Mutex::default(),
            stop: AtomicBool::new(false),
            asleep: (0..helpers).map(|_| AtomicBool::new(false)).collect(),
            // If threads outnumber cores, polling takes time from working threads.
            spins: if helpers < cores { SPINS } else { 0 },
        });
        let start = |i| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name(format!("phalanx-nn-{}", i + 1))
                .spawn(move || shared.help(i))
                .ok()
        };
        let threads = (0..helpers).map_while(start).collect();
        Helpers { shared, threads }
    }

    pub(super) fn count(&self) -> usize {
        self.threads.len()
    }

    /// Runs `f(0)`, …, `f(chunks - 1)`, each once, in any order; returns when all
    /// have ended. A call from inside a chunk, or during another thread's call, runs on
    /// its own thread alone.
    ///
    /// # Panics
    /// With the first panic of `f`, after all chunks have ended.
    pub(super) fn run<F: Fn(usize) + Sync>(&self, chunks: usize, f: F) {
        if self.shared.busy.swap(true, Ordering::Acquire) {
            return (0..chunks).for_each(f);
        }
        for first in (0..chunks).step_by(MAX_CHUNKS) {
            self.share(MAX_CHUNKS.min(chunks - first), |i| f(first + i));
        }
        let panic = lock(&self.shared.panic).take();
        self.shared.busy.store(false, Ordering::Release);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    fn share<F: Fn(usize) + Sync>(&self, chunks: usize, f: F) {
        let s = &*self.shared;
        s.call
            .store(call_closure::<F> as Call as *mut (), Ordering::Relaxed);
        s.closure
            .store(std::ptr::from_ref(&f).cast_mut().cast(), Ordering::Relaxed);
        s.chunks.store(chunks, Ordering::Relaxed);
        s.pending.store(chunks, Ordering::Relaxed);
        let own = |i: usize| s.first(i + 1, chunks) - s.first(i, chunks);
        for (i, next) in s.tickets.iter().enumerate() {
            // One without chunks stays as it is: none is left of it.
            if own(i) > 0 {
                let call = (next.0.load(Ordering::Relaxed) >> COUNT_BITS).wrapping_add(1);
                next.0
                    .store(call << COUNT_BITS | own(i) as u64, Ordering::Release);
            }
        }
        fence(Ordering::SeqCst);
        for (i, (asleep, helper)) in s.asleep.iter().zip(&self.threads).enumerate() {
            if own(i + 1) > 0 && asleep.load(Ordering::SeqCst) {
                asleep.store(false, Ordering::SeqCst);
                helper.thread().unpark();
            }
        }
        s.work(0);
        s.wait();
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for helper in self.threads.drain(..) {
            helper.thread().unpark();
            // It never panics: chunks' panics are caught.
            let _ = helper.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn many_short_calls_run_every_chunk_once() {
        let helpers = Helpers::new(3);
        for call in 0..3000 {
            let chunks = call % 7;
            let hits: [AtomicU32; 7] = Default::default();
            helpers.run(chunks, |i| {
                hits[i].fetch_add(1, Ordering::Relaxed);
            });
            for (i, h) in hits.iter().enumerate() {
                assert_eq!(h.load(Ordering::Relaxed), u32::from(i < chunks));
            }
        }
    }

    #[test]
    fn chunks_may_call_and_so_may_others() {
        let helpers = Helpers::new(1);
        let sum = AtomicUsize::new(0);
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    for _ in 0..100 {
                        helpers.run(4, |_| {
                            helpers.run(5, |i| {
                                sum.fetch_add(i, Ordering::Relaxed);
                            });
                        });
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 3 * 100 * 4 * 10);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_helpers_go_on() {
        let helpers = Helpers::new(2);
        for _ in 0..20 {
            let ended = AtomicUsize::new(0);
            let caught = catch_unwind(AssertUnwindSafe(|| {
                helpers.run(8, |i| {
                    if i == 5 {
                        resume_unwind(Box::new("chunk 5"));
                    }
                    ended.fetch_add(1, Ordering::Relaxed);
                });
            }));
            let panic = caught.unwrap_err();
            assert_eq!(panic.downcast_ref::<&str>(), Some(&"chunk 5"));
            assert_eq!(ended.into_inner(), 7);
        }
        helpers.run(3, |_| {});
    }
}
