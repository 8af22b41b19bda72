//! The rank that a program runs as.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use phalanx_base::error::{Error, ErrorKind, Result};
use phalanx_base::format::{number, plural};
use phalanx_base::say;
use phalanx_comm::{PhaseGuard, ProcessGroup, TransportKind};

/// One rank of a training run.
pub struct RankContext {
    /// The world's process group.
    pub group: ProcessGroup,
    /// How long the other ranks wait while this rank is busy on its own (`--phase-timeout`).
    pub phase_limit: Duration,
    /// Compute threads of this rank.
    pub threads: usize,
    /// Number of this rank on its host; 0 for ranks that are started by hand.
    pub local_rank: usize,
    /// Prefix for each line of results, where several ranks share one standard output without a
    /// launcher that adds it.
    pub prefix: Option<String>,
    /// When the command was started.
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

    /// Checks that `loss`, seen at `at`, is finite.
    ///
    /// # Errors
    ///
    /// Fails with the advice to lower the learning rate.
    pub fn check_loss(&self, loss: f64, at: fmt::Arguments<'_>, lr: f64) -> Result<()> {
        if loss.is_finite() {
            return Ok(());
        }
        let what = format!("the loss became {loss} on rank {} in {at}", self.rank());
        Err(Error::new(ErrorKind::Failed, what)
            .note("try", format!("a smaller --lr (now {})", number(lr))))
    }

    /// This rank is busy on its own until the guard is dropped, and the others wait for it: up to `--phase-timeout`, as
    /// long as its process is alive.
    pub fn phase(&self, name: &str) -> PhaseGuard {
        self.group.phase(name, self.phase_limit)
    }

    /// Rank 0's folder, on all ranks. *Blocks* until all call it.
    ///
    /// # Errors
    ///
    /// Peers that are lost.
    pub fn folder_of_rank_0(&self, dir: PathBuf) -> Result<PathBuf> {
        let bytes = dir.into_os_string().into_vec();
        let bytes: Vec<u8> = self.group.broadcast_object(Some(&bytes), 0)?;
        Ok(PathBuf::from(OsString::from_vec(bytes)))
    }

    /// The transports of this rank's links: `thread`, `shm`, `tcp` or `shm+tcp`.
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
            _ => "none",
        }
    }

    /// Prints that all ranks skip the step `at`, and why.
    pub fn note_skipped(&self, reason: &dyn fmt::Display, at: fmt::Arguments<'_>) {
        self.note(&format!("warning: {at} is skipped on all ranks: {reason}"));
    }

    /// "2 ranks on 1 host over shared memory, 1 thread each of 2 cores (AVX-512)"; `isa` is the instruction set in use.
    pub fn describe(&self, isa: &str) -> String {
        let cores = crate::cores();
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
