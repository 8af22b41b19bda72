//! Reads batches ahead of the training loop.
//!
//! Worker threads live as long as the [`Loader`]. They claim steps of the
//! current [`EpochPlan`] in order, at most `ahead` steps before the step that
//! the consumer takes next; batches therefore come in the plan's order and
//! memory is bounded. A batch that the consumer drops goes back to the
//! workers: after the first few steps nothing is allocated.
//!
//! | event | what happens |
//! |---|---|
//! | a sample cannot be read | the batches before it are delivered, then the error; the epoch is over |
//! | the data set panics | the same, with an `Internal` error |
//! | a new plan starts early | what is left of the old one is forgotten |
//! | the loader is dropped | workers finish the batch in hand and are joined |

use std::collections::VecDeque;
use std::fmt;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::Dataset;
use crate::sampler::EpochPlan;
use phalanx_base::{Error, ErrorKind, Result, lock, panic_text, refuse};

/// Samples of one step on this rank.
#[derive(Debug, Default)]
struct Batch<B> {
    data: B,
    indices: Vec<u64>,
    global_len: usize,
}

/// Options of a [`Loader`].
#[derive(Clone, Copy, Debug)]
pub struct LoaderOptions {
    /// Number of worker threads.
    pub workers: usize,
    /// Maximum number of batches read ahead.
    pub ahead: usize,
}

impl Default for LoaderOptions {
    /// One thread and four batches: reading a batch from memory is much faster than
    /// training on it, and workers share the ranks' cores.
    fn default() -> Self {
        Self {
            workers: 1,
            ahead: 4,
        }
    }
}

/// Reads the batches of a data set ahead, on worker threads.
pub struct Loader<D: Dataset + ?Sized> {
    shared: Arc<LoaderState<D>>,
    workers: Vec<JoinHandle<()>>,
    waited: Duration,
}

struct LoaderState<D: Dataset + ?Sized> {
    dataset: Arc<D>,
    ahead: usize,
    state: Mutex<State<D::Batch>>,
    /// Notified when workers may claim a step.
    work: Condvar,
    /// Notified when the consumer's next batch is ready.
    ready: Condvar,
}

impl<D: Dataset + ?Sized> fmt::Debug for Loader<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader")
            .field("dataset", &self.shared.dataset.describe())
            .field("ahead", &self.shared.ahead)
            .finish_non_exhaustive()
    }
}

impl<D: Dataset + ?Sized> fmt::Debug for LoadedBatch<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedBatch")
            .field("indices", &self.batch.indices)
            .finish_non_exhaustive()
    }
}

struct State<B> {
    plan: Option<Arc<EpochPlan>>,
    /// Number of the current plan, to recognize batches of an earlier one.
    round: u64,
    /// Next step that a worker claims.
    claimed: usize,
    /// Next step that the consumer takes.
    delivered: usize,
    /// Results of steps `delivered ..`, in order; `None` while being read.
    results: VecDeque<Option<Result<Batch<B>>>>,
    spare: Vec<Batch<B>>,
    closing: bool,
}

impl<D: Dataset + ?Sized> Loader<D> {
    /// Starts the worker threads; they sleep until [`start`](Self::start).
    ///
    /// # Errors
    ///
    /// `Usage` for zero workers or zero batches ahead; `System` when a thread cannot be
    /// started.
    pub fn new(dataset: Arc<D>, options: LoaderOptions) -> Result<Self> {
        let LoaderOptions { workers, ahead } = options;
        if workers == 0 || ahead == 0 {
            refuse!("a loader needs at least 1 worker and 1 batch ahead");
        }
        let shared = Arc::new(LoaderState {
            dataset,
            ahead,
            state: Mutex::new(State {
                plan: None,
                round: 0,
                claimed: 0,
                delivered: 0,
                results: VecDeque::with_capacity(ahead),
                // Batches read ahead, one for each worker, two at the consumer.
                spare: Vec::with_capacity(ahead + workers + 2),
                closing: false,
            }),
            work: Condvar::new(),
            ready: Condvar::new(),
        });
        // Created first, so that its drop ends the running threads if a later one cannot be
        // started.
        let mut loader = Self {
            shared,
            workers: Vec::with_capacity(workers),
            waited: Duration::ZERO,
        };
        for i in 0..workers {
            let shared = Arc::clone(&loader.shared);
            let worker = std::thread::Builder::new()
                .name(format!("phalanx-load-{i}"))
                .spawn(move || shared.work())
                .map_err(|source| {
                    Error::new(ErrorKind::System, "cannot start a loader thread")
                        .with_source(source)
                })?;
            loader.workers.push(worker);
        }
        Ok(loader)
    }

    /// Starts an epoch, or the rest of one. Drops the rest of the previous plan.
    pub fn start(&mut self, plan: EpochPlan) {
        let mut state = lock(&self.shared.state);
        state.forget();
        state.plan = Some(Arc::new(plan));
        drop(state);
        self.shared.work.notify_all();
    }

    /// The next batch of the current plan. `None` at its end, after an error, and before
    /// the first plan.
    ///
    /// *Blocks until* a worker has read the batch.
    ///
    /// # Errors
    ///
    /// An error of the data set for a sample of this batch; the rest of the epoch is
    /// dropped.
    pub fn next_batch(&mut self) -> Result<Option<LoadedBatch<D>>> {
        let mut state = lock(&self.shared.state);
        let steps = state.plan.as_ref().map_or(0, |plan| plan.len());
        if state.delivered == steps {
            return Ok(None);
        }
        let mut since = None;
        let result = loop {
            if let Some(Some(_)) = state.results.front() {
                break state.results.pop_front().flatten();
            }
            since.get_or_insert_with(Instant::now);
            state = self
                .shared
                .ready
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        };
        state.delivered += 1;
        if matches!(result, Some(Err(_))) {
            state.forget();
        }
        drop(state);
        self.shared.work.notify_one();
        self.waited += since.map_or(Duration::ZERO, |s| s.elapsed());
        match result {
            Some(Ok(batch)) => Ok(Some(LoadedBatch {
                batch,
                home: Arc::clone(&self.shared),
            })),
            Some(Err(error)) => Err(error),
            None => Err(Error::internal("the loader lost a batch")),
        }
    }

    /// Total time that [`next_batch`](Self::next_batch) has waited for workers.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// The data set being read.
    pub fn dataset(&self) -> &Arc<D> {
        &self.shared.dataset
    }
}

impl<D: Dataset + ?Sized> Drop for Loader<D> {
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        state.forget();
        state.closing = true;
        drop(state);
        self.shared.work.notify_all();
        for worker in self.workers.drain(..) {
            // Workers do not panic: panics of the data set are caught.
            let _ = worker.join();
        }
    }
}

/// A batch; dropping it returns its memory to the workers. Dereferences to the data set's
/// batch type.
pub struct LoadedBatch<D: Dataset + ?Sized> {
    batch: Batch<D::Batch>,
    home: Arc<LoaderState<D>>,
}

impl<D: Dataset + ?Sized> LoadedBatch<D> {
    /// Indices of the samples in the data set.
    pub fn indices(&self) -> &[u64] {
        &self.batch.indices
    }

    /// Number of samples of this step over all ranks, the divisor of a mean.
    pub fn global_len(&self) -> usize {
        self.batch.global_len
    }
}

impl<D: Dataset + ?Sized> Deref for LoadedBatch<D> {
    type Target = D::Batch;

    fn deref(&self) -> &D::Batch {
        &self.batch.data
    }
}

impl<D: Dataset + ?Sized> Drop for LoadedBatch<D> {
    fn drop(&mut self) {
        let batch = std::mem::take(&mut self.batch);
        lock(&self.home.state).keep(batch);
    }
}

impl<B> State<B> {
    /// Ends the current plan. Batches being read are dropped when they are finished.
    fn forget(&mut self) {
        self.round += 1;
        self.plan = None;
        self.claimed = 0;
        self.delivered = 0;
        while let Some(result) = self.results.pop_front() {
            if let Some(Ok(batch)) = result {
                self.keep(batch);
            }
        }
    }

    /// Keeps a batch for reuse, up to the maximum number in use.
    fn keep(&mut self, batch: Batch<B>) {
        if self.spare.len() < self.spare.capacity() {
            self.spare.push(batch);
        }
    }

    /// The plan, if a step of it may be read now.
    fn claimable(&self, ahead: usize) -> Option<&Arc<EpochPlan>> {
        let plan = self.plan.as_ref()?;
        (self.claimed < plan.len() && self.claimed < self.delivered + ahead).then_some(plan)
    }
}

impl<D: Dataset + ?Sized> LoaderState<D> {
    /// The loop of a worker.
    fn work(&self) {
        let mut state = lock(&self.state);
        loop {
            if state.closing {
                return;
            }
            let Some(plan) = state.claimable(self.ahead).map(Arc::clone) else {
                state = self
                    .work
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let (round, step) = (state.round, state.claimed);
            state.claimed += 1;
            state.results.push_back(None);
            let batch = state.spare.pop().unwrap_or_default();
            drop(state);

            let result = self.fill(&plan, step, batch);

            state = lock(&self.state);
            if state.round == round {
                // Steps are claimed in order, so the index of this one is known.
                let place = step - state.delivered;
                state.results[place] = Some(result);
                self.ready.notify_one();
            } else if let Ok(batch) = result {
                state.keep(batch);
            }
        }
    }

    fn fill(
        &self,
        plan: &EpochPlan,
        step: usize,
        mut batch: Batch<D::Batch>,
    ) -> Result<Batch<D::Batch>> {
        let Some((indices, global_len)) = plan.slice(step) else {
            return Err(Error::internal("the loader claimed a step beyond the plan"));
        };
        let read = || {
            batch.global_len = global_len;
            batch.indices.clear();
            batch.indices.extend_from_slice(indices);
            self.dataset
                .read_batch(plan.epoch(), indices, &mut batch.data)
        };
        match catch_unwind(AssertUnwindSafe(read)) {
            Ok(Ok(())) => Ok(batch),
            Ok(Err(error)) => Err(error),
            Err(panic) => {
                let (data, said) = (self.dataset.describe(), panic_text(&*panic));
                let what = format!("data set {data} panicked while reading: {said}");
                Err(Error::internal(what))
            }
        }
    }
}
