//! A barrier that names the missing ranks.
//!
//! It uses the store, not the links between ranks: a late rank leaves no frame on a
//! link that the next operation could mistake for its own, so the group stays usable.
//! Rank 0 keeps the list:
//!
//! | key | written by | says |
//! |---|---|---|
//! | `here/r` | rank r: `here`, or `gone` after its timeout; rank 0: `seen` | whether r has come |
//! | `verdict` | rank 0 | the missing ranks, if any |
//! | `left` | all ranks | how many have read the verdict; the last one removes all keys |
//!
//! If a rank never reaches the barrier, the keys stay until the group ends.
//!
//! `here → gone` and `here → seen` are compare-and-set: a rank that gives up
//! and rank 0 agree on which came first.

use std::time::{Duration, Instant};

use phalanx_store::{ErrorKind as StoreKind, Store};

use super::{ProcessGroup, rank_list};
use crate::backend::Runner;
use crate::wait::deadline_in;
use crate::{Error, ErrorKind, Result};

const NAME: &str = "monitored_barrier";

/// Longest wait for the store without checking for poison and lost peers.
const SLICE: Duration = Duration::from_millis(50);

/// How much longer than rank 0 the others wait for its verdict, which takes rank 0 a
/// few round trips to the store per rank.
const GRACE: Duration = Duration::from_secs(2);

const HERE: &[u8] = b"here";
const SEEN: &[u8] = b"seen";
const GONE: &[u8] = b"gone";

/// One barrier as one rank sees it.
struct Barrier<'a> {
    group: &'a ProcessGroup,
    store: &'a dyn Store,
    prefix: String,
    timeout: Duration,
}

impl ProcessGroup {
    /// A [`barrier`](ProcessGroup::barrier) after which rank 0 names every
    /// rank that did not come within `timeout`. PyTorch: `monitored_barrier`
    /// with `wait_all_ranks=True`. Meant for finding ranks that hang; it costs several
    /// round trips to the store, where `barrier` costs a microsecond.
    ///
    /// The timeout of each rank counts from its call. When a rank does not come, *all*
    /// ranks get an error, also those that come later. Nothing is poisoned and the
    /// group stays usable: continue, try again, or [`abort`](ProcessGroup::abort).
    ///
    /// # Errors
    ///
    /// `Timeout`: on rank 0 with the list of the ranks that did not come; on
    /// the others with rank 0's list, or naming rank 0 if it did not come
    /// itself. `PeerLost` or `Aborted` when a rank died or the group was
    /// poisoned meanwhile.
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        if self.core.world == 1 {
            return self.barrier();
        }
        let number = &self.core.monitored;
        self.core.queue.run(|runner| {
            let barrier = Barrier {
                group: self,
                store: self.core.keys.store(),
                prefix: {
                    let number = number.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    self.core.keys.key("monitored", format_args!("{number}/"))
                },
                timeout,
            };
            let result = if self.core.rank == 0 {
                barrier.keep_list(runner)
            } else {
                barrier.report(runner)
            };
            let result = result.and(barrier.leave());
            if result.is_err() {
                // A rank may never come; then no rank is the last to leave.
                self.core.keys.remove_at_end(barrier.prefix);
            }
            result
        })
    }
}

impl Barrier<'_> {
    fn here(&self, rank: usize) -> String {
        format!("{}here/{rank}", self.prefix)
    }

    fn verdict(&self) -> String {
        format!("{}verdict", self.prefix)
    }

    /// Rank 0's part.
    fn keep_list(&self, runner: &mut Runner) -> Result<()> {
        let start = Instant::now();
        self.set(&self.here(0), HERE)?;
        let others: Vec<usize> = (1..self.group.core.world).collect();
        let missing = self.wait(runner, &others, deadline_in(self.timeout))?;
        let mut gone = Vec::new();
        for &rank in others.iter().filter(|rank| !missing.contains(rank)) {
            let answer = self.swap(&self.here(rank), HERE, SEEN)?;
            match &answer[..] {
                SEEN => {}
                GONE => gone.push(rank),
                _ => {
                    let text = format!("the store has lost the arrival of rank {rank}");
                    return Err(self.named(Error::new(ErrorKind::Protocol, text)));
                }
            }
        }
        let mut verdict = Vec::new();
        if !missing.is_empty() {
            let arrived: Vec<usize> = (0..self.group.core.world)
                .filter(|rank| !missing.contains(rank) && !gone.contains(rank))
                .collect();
            verdict.push(format!(
                "{} did not arrive within {:.2} s; arrived: {}",
                format_ranks(&missing),
                start.elapsed().as_secs_f64(),
                rank_list(&arrived)
            ));
        }
        if !gone.is_empty() {
            verdict.push(format!(
                "{} gave up before rank 0 arrived",
                format_ranks(&gone)
            ));
        }
        let verdict = verdict.join("; ");
        self.set(&self.verdict(), verdict.as_bytes())?;
        let absent = [missing, gone].concat();
        match (&absent[..], verdict) {
            ([], _) => Ok(()),
            ([one], verdict) => Err(self.late(verdict).with_peer(*one)),
            (_, verdict) => Err(self.late(verdict)),
        }
    }

    /// The part of all others.
    fn report(&self, runner: &mut Runner) -> Result<()> {
        let mine = self.here(self.group.core.rank);
        self.set(&mine, HERE)?;
        let absent = self.wait(runner, &[0], deadline_in(self.timeout))?;
        if !absent.is_empty() {
            // Rank 0 may have seen us just now; then it answers.
            if self.swap(&mine, HERE, GONE)? == GONE {
                let text = format!(
                    "rank 0 did not arrive within {:.2} s, so the other missing ranks are not known",
                    self.timeout.as_secs_f64()
                );
                return Err(self.late(text).with_peer(0));
            }
        }
        let until = deadline_in(self.timeout.saturating_add(GRACE));
        let verdict = loop {
            runner.check()?;
            runner.listen();
            let left = until.saturating_duration_since(Instant::now());
            match self.store.get(&self.verdict(), left.min(SLICE)) {
                Ok(verdict) => break verdict,
                Err(e) if is_late(&e) && !left.is_zero() => {}
                Err(e) if e.kind() == StoreKind::Timeout => {
                    let text = "rank 0 came but never said who was missing".to_owned();
                    return Err(self.late(text).with_peer(0));
                }
                Err(e) => return Err(self.named(e.into())),
            }
        };
        if verdict.is_empty() {
            return Ok(());
        }
        // Untrusted, but only displayed.
        let verdict = String::from_utf8_lossy(&verdict).into_owned();
        Err(self.late(format!("rank 0 says: {verdict}")).with_peer(0))
    }

    /// Waits for `ranks`; returns those that did not come.
    fn wait(&self, runner: &mut Runner, ranks: &[usize], until: Instant) -> Result<Vec<usize>> {
        let keys: Vec<String> = ranks.iter().map(|&rank| self.here(rank)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        loop {
            runner.check()?;
            runner.listen();
            let left = until.saturating_duration_since(Instant::now());
            match self.store.wait(&keys, left.min(SLICE)) {
                Ok(()) => return Ok(Vec::new()),
                Err(e) if e.kind() == StoreKind::Timeout => {
                    if left.is_zero() {
                        let missing = e.missing_keys();
                        let is_missing = |rank: &&usize| missing.contains(&self.here(**rank));
                        return Ok(ranks.iter().filter(is_missing).copied().collect());
                    }
                }
                // It is unknown which ranks came; a later request may find out.
                Err(e) if is_late(&e) && !left.is_zero() => {}
                Err(e) => return Err(self.named(e.into())),
            }
        }
    }

    /// The last to leave removes the keys.
    fn leave(&self) -> Result<()> {
        let left = self.store.add(&format!("{}left", self.prefix), 1);
        let removed = left.and_then(|left| {
            if left == self.group.core.world as i64 {
                self.store.delete_prefix(&self.prefix)?;
            }
            Ok(())
        });
        removed.map_err(|e| self.named(e.into()))
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(key, value).map_err(|e| self.named(e.into()))
    }

    fn swap(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.store
            .compare_set(key, Some(expected), desired)
            .map_err(|e| self.named(e.into()))
    }

    fn late(&self, message: String) -> Error {
        self.named(Error::timeout(message))
    }

    fn named(&self, error: Error) -> Error {
        error.with_rank(self.group.core.rank).with_operation(NAME)
    }
}

/// Whether it is worth asking again: nothing there yet, or no answer.
fn is_late(error: &phalanx_store::Error) -> bool {
    matches!(error.kind(), StoreKind::Timeout | StoreKind::NoAnswer)
}

/// Ranks as text: `rank 3`, `ranks 0, 2-4, 7`.
pub fn format_ranks(list: &[usize]) -> String {
    let plural = if list.len() == 1 { "rank" } else { "ranks" };
    format!("{plural} {}", rank_list(list))
}
