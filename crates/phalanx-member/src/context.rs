//! The rank that a program runs as.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use phalanx_base::error::{Error, ErrorKind, Result};
use phalanx_base::format::{number, plural};
use phalanx_base::{lock, say};
use phalanx_comm::{PhaseGuard, ProcessGroup, TransportKind};
use phalanx_store::Store;

use crate::group::{Newcomer, ShrinkOptions};
use crate::log::{Log, insist};
use crate::state::{Event, State};

/// The phase of ranks that form a new group.
pub const FORMING: &str = "forming the next group";

/// How many times the store is asked when it does not answer.
const TRIES: u32 = 6;

/// One rank of a training run.
pub struct RankContext {
    membership: Mutex<Membership>,
    log: Mutex<Log>,
    /// How the training continues when ranks are lost or join; `None`: it does not.
    pub elastic: Option<Elastic>,
    /// How long the other ranks wait while this rank is busy on its own (`--phase-timeout`).
    pub phase_limit: Duration,
    /// Compute threads of this rank.
    pub threads: usize,
    /// Number of this rank on its host; 0 for ranks that are started by hand.
    pub local_rank: usize,
    /// Prefix for each line of results, where several ranks share one standard output without a
    /// launcher that adds it.
    pub prefix: Option<String>,
    started: Mutex<Instant>,
}

/// How a training continues when ranks are lost or join (`--elastic`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elastic {
    /// Number of ranks that the job was started with. The global batch is divided for it.
    pub first_world: usize,
    /// How long ranks wait for a rank that does not come and is not known to be lost.
    pub patience: Duration,
}

impl Elastic {
    fn options(self) -> ShrinkOptions {
        ShrinkOptions {
            min_world: None,
            straggler_wait: Duration::MAX,
            timeout: self.patience,
        }
    }
}

/// The group that this rank is in, and the newcomer that has yet to join one.
struct Membership {
    group: ProcessGroup,
    newcomer: Option<Newcomer>,
}

impl RankContext {
    /// The rank of `group`, with `threads` compute threads and without a launcher.
    pub fn new(group: ProcessGroup, threads: usize) -> RankContext {
        RankContext {
            local_rank: group.rank(),
            log: Mutex::new(Log::new(group.store())),
            membership: Mutex::new(Membership {
                group,
                newcomer: None,
            }),
            elastic: None,
            phase_limit: Duration::from_secs(600),
            threads,
            prefix: None,
            started: Mutex::new(Instant::now()),
        }
    }

    /// The rank of a newcomer, which is alone until it [joins](Self::join) the others.
    pub fn of_newcomer(newcomer: Newcomer, alone: ProcessGroup, threads: usize) -> Self {
        let log = Mutex::new(newcomer.log().clone());
        let ctx = RankContext {
            log,
            ..RankContext::new(alone, threads)
        };
        ctx.membership().newcomer = Some(newcomer);
        ctx
    }

    fn membership(&self) -> MutexGuard<'_, Membership> {
        lock(&self.membership)
    }

    /// The process group of all ranks. In an elastic training another one takes its place when ranks are lost or join.
    pub fn group(&self) -> ProcessGroup {
        self.membership().group.clone()
    }

    /// The store of the job.
    pub fn store(&self) -> Arc<dyn Store> {
        lock(&self.log).store().clone()
    }

    /// A reader of the job's log. It continues after the events that this rank has read.
    pub fn log(&self) -> Log {
        lock(&self.log).clone()
    }

    /// Reads the log, and returns `question` of the state after it.
    ///
    /// # Errors
    ///
    /// The store is gone, or does not answer.
    pub fn ask<T>(&self, question: impl Fn(&State) -> T) -> Result<T> {
        self.insist(|log| log.read().map(&question))
    }

    /// Writes an event into the log: the one that `event` returns for the state before it, if any.
    ///
    /// # Errors
    ///
    /// The store is gone, or does not answer.
    pub fn append(&self, event: impl Fn(&State) -> Option<Event>) -> Result<()> {
        self.insist(|log| log.append(&event))
    }

    /// The process `number` has ended, has left or is out of reach, and `why`.
    ///
    /// # Errors
    ///
    /// The store is gone, or does not answer.
    pub fn lose(&self, number: usize, why: &str) -> Result<()> {
        self.insist(|log| log.lose(number, why))
    }

    /// Asks the store again, a few times, while it does not answer.
    fn insist<T>(&self, ask: impl Fn(&mut Log) -> phalanx_store::Result<T>) -> Result<T> {
        let mut tries = 1..TRIES;
        let answer = insist(|| tries.next().is_some(), || ask(&mut lock(&self.log)));
        Ok(answer.map_err(phalanx_comm::Error::from)?)
    }

    /// This rank, 0-based. A newcomer that has not joined yet has its [number](Self::number).
    pub fn rank(&self) -> usize {
        let membership = self.membership();
        let newcomer = membership.newcomer.as_ref();
        newcomer.map_or_else(|| membership.group.rank(), Newcomer::number)
    }

    /// Number of ranks; 1 for a newcomer that has not joined yet.
    pub fn world(&self) -> usize {
        self.membership().group.world_size()
    }

    /// When the command was started.
    pub fn started(&self) -> Instant {
        *lock(&self.started)
    }

    /// Sets when the command was started, as the time since then. A rank that joins takes the time of the others.
    pub fn runs_since(&self, elapsed: Duration) {
        if let Some(started) = Instant::now().checked_sub(elapsed) {
            *lock(&self.started) = started;
        }
    }

    /// Whether this rank reports and saves.
    pub fn is_main(&self) -> bool {
        self.rank() == 0
    }

    /// This rank's number among all that the job has started: at first the rank. It never changes.
    pub fn number(&self) -> usize {
        let membership = self.membership();
        let newcomer = membership.newcomer.as_ref();
        newcomer.map_or_else(|| membership.group.global_rank(), Newcomer::number)
    }

    /// Whether this rank has yet to [join](Self::join) the others.
    pub fn is_newcomer(&self) -> bool {
        self.membership().newcomer.is_some()
    }

    /// Number of ranks that batches are made for: those that the job was started with.
    pub fn first_world(&self) -> usize {
        let elastic = self.elastic.map(|elastic| elastic.first_world);
        elastic.unwrap_or_else(|| self.world())
    }

    fn elastic_options(&self) -> Result<ShrinkOptions> {
        let elastic = self.elastic.map(Elastic::options);
        elastic.ok_or_else(|| Error::usage("the ranks were started without --elastic"))
    }

    /// Replaces the group, after a failure, with one of the remaining ranks. *Blocks* until all of them call it.
    ///
    /// # Errors
    ///
    /// Those of [`shrink`](crate::shrink).
    pub fn shrink(&self) -> Result<()> {
        self.form_next(Log::shrink)
    }

    /// Replaces the group with one that has the processes that ask to join, and not those with the numbers `leaving`. *Blocks*
    /// until all ranks that stay call it, between two operations.
    ///
    /// # Errors
    ///
    /// Those of [`grow`](crate::grow).
    pub fn change(&self, leaving: &[usize]) -> Result<()> {
        for number in leaving {
            self.lose(*number, "it has left")?;
        }
        self.form_next(Log::grow)
    }

    fn form_next(
        &self,
        form: impl FnOnce(&mut Log, ProcessGroup, &ShrinkOptions) -> phalanx_comm::Result<ProcessGroup>,
    ) -> Result<()> {
        let options = self.elastic_options()?;
        let _phase = self.phase(FORMING);
        let group = form(&mut lock(&self.log), self.group(), &options)?;
        self.membership().group = group;
        Ok(())
    }

    /// Joins the others, if this is a newcomer; `false` when the job has ended before. *Blocks* until it is a member.
    ///
    /// # Errors
    ///
    /// Those of [`Newcomer::join`].
    pub fn join(&self) -> Result<bool> {
        let Some(newcomer) = self.membership().newcomer.take() else {
            return Ok(true);
        };
        let options = self.elastic_options()?;
        let joined = newcomer.join(&options)?;
        let is_in = joined.is_some();
        if let Some(group) = joined {
            self.membership().group = group;
        }
        Ok(is_in)
    }

    /// Writes results to standard output, whole lines at a time.
    ///
    /// # Errors
    ///
    /// Fails when standard output cannot be written (a full disk behind a
    /// redirection). A closed pipe is success.
    pub fn line(&self, text: &str) -> Result<()> {
        let mut block = String::with_capacity(text.len() + 16);
        for line in text.split('\n') {
            if let Some(prefix) = &self.prefix {
                block.push_str(prefix);
            }
            block.push_str(line);
            block.push('\n');
        }
        say::print(&block)
    }

    /// Prints a line on standard error, from rank 0 only. On a terminal a long one is wrapped between words.
    pub fn note(&self, text: &str) {
        if self.is_main() {
            match say::columns() {
                Some(columns) => say::note(say::wrapped(text, columns)),
                None => say::note(text),
            }
        }
    }

    /// Checks that `loss`, seen at `at`, is finite. `lr` is the learning rate of the updates before it, if there were any.
    ///
    /// # Errors
    ///
    /// Fails with the advice to lower the learning rate, or to look at data and weights.
    pub fn check_loss(&self, loss: f64, at: fmt::Arguments<'_>, lr: Option<f64>) -> Result<()> {
        if loss.is_finite() {
            return Ok(());
        }
        let what = format!("the loss became {loss} on rank {} in {at}", self.rank());
        let error = Error::new(ErrorKind::Failed, what);
        Err(match lr {
            Some(lr) => error.note("try", format!("a smaller --lr (now {})", number(lr))),
            None => error.note(
                "check",
                "the data and the initial weights for NaN, infinity and very large values: no update was made before it",
            ),
        })
    }

    /// Declares that this rank is busy on its own until the guard is dropped. The others wait for it, up to `--phase-timeout`,
    /// as long as its process is alive.
    pub fn phase(&self, name: &str) -> PhaseGuard {
        self.group().phase(name, self.phase_limit)
    }

    /// Rank 0's folder, on all ranks. *Blocks* until all call it.
    ///
    /// # Errors
    ///
    /// Peers that are lost.
    pub fn folder_of_rank_0(&self, dir: PathBuf) -> Result<PathBuf> {
        let bytes = dir.into_os_string().into_vec();
        let bytes: Vec<u8> = self.group().broadcast_object(Some(&bytes), 0)?;
        Ok(PathBuf::from(OsString::from_vec(bytes)))
    }

    /// The transports of this rank's links: `thread`, `shm`, `tcp` or `shm+tcp`.
    pub fn transport(&self) -> &'static str {
        let links = self.group().transports();
        let any = |kind| links.iter().any(|(_, k)| *k == kind);
        match (
            any(TransportKind::Thread),
            any(TransportKind::Shm),
            any(TransportKind::Tcp),
        ) {
            (true, ..) => "thread",
            (_, true, true) => "shm+tcp",
            (_, true, false) => "shm",
            (_, false, true) => "tcp",
            _ => "none",
        }
    }

    /// Prints that all ranks skip the step `at`, and why.
    pub fn note_skipped(&self, reason: &dyn fmt::Display, at: fmt::Arguments<'_>) {
        self.note(&format!("warning: {at} is skipped on all ranks: {reason}"));
    }

    /// "2 ranks on 1 host over shared memory, 1 thread each of 2 cores (AVX-512)"; `isa` is the instruction set in use.
    pub fn describe(&self, isa: &str) -> String {
        let cores = phalanx_base::cores();
        let mut text = plural(self.world(), "rank");
        let over = match self.transport() {
            "thread" => " as threads of one process",
            "shm+tcp" => " over shared memory and TCP",
            "shm" => " on 1 host over shared memory",
            "tcp" => " over TCP",
            _ => "",
        };
        text.push_str(over);
        let each = if self.world() > 1 { " each" } else { "" };
        format!(
            "{text}, {}{each} of {} ({isa})",
            plural(self.threads, "thread"),
            plural(cores, "core"),
        )
    }
}
