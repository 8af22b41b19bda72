//! What a recipe knows about the rank it runs as.

use std::fmt;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use phalanx_comm::{ProcessGroup, ReduceOp, TransportKind};
use phalanx_ddp::Commit;

use super::format::plural;
use crate::error::{Error, ErrorKind, Result};
use crate::say;

/// How often ranks that wait for another's disk hear that it is alive.
const BEAT: Duration = Duration::from_millis(100);

/// One rank of a training run.
pub struct RankContext {
    /// The world's process group.
    pub group: ProcessGroup,
    /// Compute threads of this rank.
    pub threads: usize,
    /// This rank among those of its host; 0 also where ranks are started by hand.
    pub local_rank: usize,
    /// Put before each line of results when several ranks share one standard output and no
    /// launcher in between does it.
    pub prefix: Option<String>,
    /// When the command was started, as well as we know.
    pub started: Instant,
}

impl RankContext {
    /// This rank, 0-based.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.group.world_size()
    }

    /// Whether this rank reports and saves.
    pub fn is_main(&self) -> bool {
        self.rank() == 0
    }

    /// Writes results to standard output, whole lines at a time.
    ///
    /// # Errors
    ///
    /// Fails when standard output cannot be written (a full disk behind a
    /// redirection). A closed pipe is success: nobody wants to read on.
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

    /// A remark for the person at the terminal, on standard error, from rank 0 only.
    pub fn note(&self, text: &str) {
        if self.is_main() {
            say::note(text);
        }
    }

    /// Says that all ranks skip a step, and why; `at` says which.
    pub fn note_skipped(&self, commit: &Commit, at: fmt::Arguments<'_>) {
        self.note(&format!("warning: {at} is skipped on all ranks: {commit}"));
    }

    /// An error unless `loss` is a number; `at` says where it was seen.
    ///
    /// # Errors
    ///
    /// Fails with the advice to lower the learning rate.
    pub fn check_loss(&self, loss: f64, at: fmt::Arguments<'_>, lr: f64) -> Result<()> {
        if loss.is_finite() {
            return Ok(());
        }
        let what = format!("the loss became {loss} on rank {} in {at}", self.rank());
        Err(Error::new(ErrorKind::Failed, what).note("try", format!("a smaller --lr (now {lr})")))
    }

    /// Does what each rank does by itself, such as writing files, and *blocks* until all
    /// ranks have: however long that takes, not longer than `--timeout` without a word from
    /// who is at work. `work` must leave the group alone.
    ///
    /// # Errors
    ///
    /// Those of `work`; peers that are lost.
    pub fn at_leisure<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.world() == 1 {
            return work();
        }
        let (done, heard) = channel();
        let group = &self.group;
        // DDP: a thread of this rank's own tells the others that it is there.
        let beat = move || -> Result<()> {
            let mut busy = 1i64;
            loop {
                let mut anyone = [busy];
                group.all_reduce(&mut anyone, ReduceOp::Max)?;
                if anyone == [0] {
                    return Ok(());
                }
                if busy == 0 {
                    continue;
                }
                match heard.recv_timeout(BEAT) {
                    Ok(()) => busy = 0,
                    Err(RecvTimeoutError::Timeout) => {}
                    // It failed; the others hear that from the rank itself.
                    Err(RecvTimeoutError::Disconnected) => return Ok(()),
                }
            }
        };
        std::thread::scope(|scope| {
            let beat = std::thread::Builder::new().spawn_scoped(scope, beat);
            let beat = beat
                .map_err(|e| Error::new(ErrorKind::System, "cannot start a thread").caused_by(e))?;
            let outcome = work();
            if outcome.is_ok() {
                // Unless it has failed itself.
                let _ = done.send(());
            }
            drop(done);
            let beat = beat
                .join()
                .unwrap_or_else(|_| Err(Error::new(ErrorKind::Failed, "a thread panicked")));
            outcome.and_then(|value| beat.map(|()| value))
        })
    }

    /// What this rank's links are: `thread`, `shm`, `tcp` or `shm+tcp`.
    pub fn transport(&self) -> &'static str {
        let links = self.group.transports();
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
            _ => "nobody to talk to",
        }
    }

    /// "2 ranks on 1 host over shared memory, 1 thread each of 2 cores (AVX-512)".
    pub fn describe(&self) -> String {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
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
            "{text}, {}{each} of {} ({})",
            plural(self.threads, "thread"),
            plural(cores, "core"),
            phalanx_nn::isa_name()
        )
    }
}
