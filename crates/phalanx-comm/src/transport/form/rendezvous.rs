//! The store as a forming group uses it: waits with one deadline, errors that name
//! ranks, and a mark by which the first failure ends the wait of all ranks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use phalanx_base::format::duration;
use phalanx_store::{ErrorKind as StoreKind, Store, TcpServer, Will};

use super::host::Host;
use super::member::{Member, this_process};
use crate::notice::{HostSpeaker, Waiting, list, ranks, say};
use crate::{Error, ErrorKind, Result, limits};

/// The beginning of a failure mark that a rank did not write itself.
const LOST: &str = "lost ";

/// Interval between two reads of the failure mark while waiting.
const SLICE: Duration = Duration::from_millis(250);

/// Most characters of another process's text in a message.
const NOTE_CHARS: usize = 300;
/// Most kinds of refused connections in a message.
const REFUSED_SHOWN: usize = 3;
/// Ranks come to the store: the first wait of a forming.
pub(super) const ARRIVE: &str = "arrive";

/// Reports what a rank waits for while it connects to others, unless another rank of its host does.
pub(crate) struct WaitReport<'a> {
    meeting: &'a Rendezvous<'a>,
    waiting: Waiting,
    speaker: HostSpeaker,
}

impl WaitReport<'_> {
    /// Prints `what` if a report is due.
    pub(crate) fn due(&mut self, what: impl FnOnce() -> String) {
        if let Some(waited) = self.waiting.due()
            && self.speaker.speaks()
        {
            say(&format!(
                "forming the group: waiting {} s for {}; deadline in {}",
                waited.as_secs(),
                what(),
                duration(self.meeting.left()),
            ));
        }
    }
}

/// Looks whether a rank of the group that forms is known to be lost, and why.
pub(crate) type Lost<'a> = &'a (dyn Fn() -> Result<Option<(usize, String)>> + Sync);

/// Without a log of lost ranks.
pub(crate) fn none_lost() -> Result<Option<(usize, String)>> {
    Ok(None)
}

/// One rank's view of its forming group.
pub(crate) struct Rendezvous<'a> {
    pub(crate) store: &'a dyn Store,
    pub(crate) rank: usize,
    pub(crate) world: usize,
    pub(crate) generation: u32,
    pub(crate) group: u32,
    pub(crate) timeout: Duration,
    pub(crate) deadline: Instant,
    /// The store's server, on the rank that hosts it.
    pub(crate) server: Option<&'a TcpServer>,
    /// [`Token::job_id`](phalanx_wire::Token::job_id).
    pub(crate) job: u64,
    /// Whether another process has our rank.
    pub(crate) taken: AtomicBool,
    /// Gives a rank that is known to be lost, and why.
    pub(crate) lost: Lost<'a>,
    /// Whether our world size is the wrong one. Then, as when our rank is taken, our
    /// failure does not end the forming of others.
    pub(crate) misfit: AtomicBool,
    /// Whether this rank waits for others, as the store says.
    pub(crate) waits: AtomicBool,
}

impl Rendezvous<'_> {
    /// The key prefix of all processes that form this group, whatever its size.
    fn root(&self) -> String {
        format!("comm/{}/{}/", self.generation, self.group)
    }

    /// The key prefix of those with our size.
    fn prefix(&self) -> String {
        format!("{}{}/", self.root(), self.world)
    }

    /// The key of rank 0's world size and process.
    fn world_key(&self) -> String {
        format!("{}world", self.root())
    }

    /// The key where a process that was refused by rank 0 of `world` leaves its note.
    fn note_key(&self, world: &str) -> String {
        format!("{}{world}/turned_away", self.root())
    }

    /// The world size of the first rank 0 is the right one. A process with another one is refused; the others form without
    /// it, under keys of their own.
    pub(super) fn check_world(&self) -> Result<()> {
        let failed = |e| self.store_failed("publishing to the store", e);
        let own = format!("{} {}", self.world, this_process());
        let first = match self.rank {
            0 => Some(
                self.store
                    .compare_set(&self.world_key(), None, own.as_bytes()),
            )
            .transpose()
            .map_err(failed)?,
            _ => self.read(&self.world_key())?,
        };
        let first = printable(&first.unwrap_or(own.into_bytes()));
        let (world, process) = first.split_once(' ').unwrap_or((&first, ""));
        if world.parse() == Ok(self.world) {
            return Ok(());
        }
        let error = self.refuse(&format!("rank 0 ({process}) for {world}"));
        let note = format!(
            "{} was started as rank {} of {} and takes no part",
            this_process(),
            self.rank,
            self.world
        );
        self.set(&self.note_key(world), note.as_bytes())?;
        // If our record is gone, so are all keys of this forming, and none may be left behind.
        let record = self.key("member", self.rank);
        if self.rank > 0 && !self.store.delete(&record).map_err(failed)? {
            self.store.delete(&self.note_key(world)).map_err(failed)?;
        }
        Err(error)
    }

    /// Checks the world size while ranks are missing.
    pub(super) fn check_missing(&self) -> Result<()> {
        match self.peek("member", self.rank)? {
            Some(_) => self.check_world(),
            None => Err(self.refuse("the group has formed without this process")),
        }
    }

    /// This process is the wrong one; this does not end the forming of others.
    fn refuse(&self, because: &str) -> Error {
        self.misfit.store(true, Ordering::Relaxed);
        // The others may have removed their keys by now.
        let _ = self.store.delete(&self.key("waits", self.rank));
        Error::usage(format!(
            "rank {} was started for {} ranks, but {because}: all ranks must be started with the same; this process, {}, \
             does not take part",
            self.rank,
            self.world,
            this_process()
        ))
    }

    /// The note of a refused process, for the end of a message.
    fn note(&self) -> String {
        let note = self.read(&self.note_key(&self.world.to_string()));
        let note = note.ok().flatten();
        note.map_or(String::new(), |note| format!("; {}", printable(&note)))
    }

    pub(super) fn read(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let value = self.store.try_get(key);
        value.map_err(|e| self.store_failed("reading from the store", e))
    }

    pub(super) fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let stored = self.store.set(key, value);
        stored.map_err(|e| self.store_failed("publishing to the store", e))
    }

    /// The key of this group for `topic` and `rank`.
    pub(crate) fn key(&self, topic: &str, rank: usize) -> String {
        format!("{}{topic}/{rank}", self.prefix())
    }

    /// Time left.
    pub(crate) fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Publishes `value` for this rank.
    pub(crate) fn publish(&self, topic: &str, value: &[u8]) -> Result<()> {
        self.set(&self.key(topic, self.rank), value)
    }

    /// Publishes `value` unless another process has done so for this rank:
    /// the first one keeps the rank, and its value is returned.
    pub(crate) fn claim(&self, topic: &str, value: &[u8]) -> Result<Option<Vec<u8>>> {
        let stored = self
            .store
            .compare_set(&self.key(topic, self.rank), None, value)
            .map_err(|e| self.store_failed("publishing to the store", e))?;
        if stored == value {
            return Ok(None);
        }
        self.taken.store(true, Ordering::Relaxed);
        Ok(Some(stored))
    }

    /// Leaves a will, by which the others are notified at once if this process ends
    /// while the group forms. Drop it when the group has formed.
    pub(crate) fn leave_will(&self, process: &str) -> Result<Option<Will>> {
        let text = format!(
            "{LOST}{}\nrank {} ({process}) is gone: it ended before the group had formed, or its \
             host is out of reach",
            self.rank, self.rank
        );
        let key = format!("{}failed", self.prefix());
        self.store
            .leave_will(&key, text.as_bytes())
            .map_err(|e| self.store_failed("publishing to the store", e))
    }

    /// The values of `topic` of all `ranks`; `what` completes "ranks 2, 5 did
    /// not …".
    pub(crate) fn collect(&self, topic: &str, ranks: &[usize], what: &str) -> Result<Vec<Vec<u8>>> {
        self.collect_while(topic, ranks, what, || Ok(()))
    }

    /// [`collect`](Self::collect) that calls `look` now and then, and ends with its error.
    pub(super) fn collect_while(
        &self,
        topic: &str,
        ranks: &[usize],
        what: &str,
        check: impl Fn() -> Result<()>,
    ) -> Result<Vec<Vec<u8>>> {
        let keys: Vec<String> = ranks.iter().map(|&rank| self.key(topic, rank)).collect();
        let names: Vec<&str> = keys.iter().map(String::as_str).collect();
        let mut waiting = Waiting::start();
        loop {
            match self.store.wait(&names, self.left().min(SLICE)) {
                Ok(()) => break,
                Err(e) if e.kind() == StoreKind::Timeout => {
                    // Ranks with the same deadline find the missing ranks themselves;
                    // those with a later one learn of them from us.
                    let is_missing = |rank: &&usize| {
                        let key = self.key(topic, **rank);
                        e.missing_keys().contains(&key)
                    };
                    let missing: Vec<usize> = ranks.iter().filter(is_missing).copied().collect();
                    if self.left().is_zero() {
                        return Err(self.late(ranks, &missing, what));
                    }
                    self.check()?;
                    check()?;
                    if let Some(waited) = waiting.due()
                        && self.speaks(&missing)?
                    {
                        say(&self.waits(&missing, what, waited));
                    }
                }
                // This says nothing about the other ranks, and the store may still answer in time.
                Err(e) if e.kind() == StoreKind::NoAnswer && !self.left().is_zero() => {}
                Err(e) => return Err(self.store_failed("waiting for the other ranks", e)),
            }
        }
        names
            .iter()
            .map(|key| {
                self.store
                    .try_get(key)
                    .map_err(|e| self.store_failed("reading from the store", e))?
                    .ok_or_else(|| {
                        Error::new(
                            ErrorKind::Protocol,
                            format!("the store lost the key {key:?} while the group formed"),
                        )
                    })
            })
            .collect()
    }

    /// Whether this rank reports the `missing` ranks for its host: the lowest rank that is not
    /// missing itself.
    fn speaks(&self, missing: &[usize]) -> Result<bool> {
        let mine = Host::here().machine;
        for rank in (0..self.rank).rev().filter(|rank| !missing.contains(rank)) {
            let member = self.peek("member", rank)?;
            let member = member.and_then(|bytes| Member::decode(&bytes).ok());
            if member.is_some_and(|member| member.host.machine == mine) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// `forming the group: waiting 2 s for rank 1 of 4 to arrive (the store at 10.0.0.1:29500); deadline in 298 s`.
    fn waits(&self, missing: &[usize], what: &str, waited: Duration) -> String {
        let at = match (self.store.location(), self.server) {
            (place, Some(server)) if server.local_addr().ip().is_loopback() => {
                format!(" ({place}, which no other host can reach)")
            }
            (place, _) => format!(" ({place})"),
        };
        let why = match self.refused() {
            _ if what != ARRIVE || self.server.is_none() => String::new(),
            refused if refused.is_empty() => "; they have not connected to it".to_owned(),
            refused => format!("; {refused}"),
        };
        format!(
            "forming the group: waiting {} s for {} of {} to {what}{at}{why}{}; deadline in {}",
            waited.as_secs(),
            ranks(missing),
            self.world,
            self.note(),
            duration(self.left()),
        )
    }

    /// The connections that the store refused, if this rank hosts it.
    fn refused(&self) -> String {
        let refused = self.server.map(TcpServer::refused).unwrap_or_default();
        let shown = refused.iter().take(REFUSED_SHOWN);
        let shown: Vec<String> = shown.map(ToString::to_string).collect();
        shown.join("; ")
    }

    /// A report for a wait that ranks of this host have in common; `what` identifies the wait.
    pub(crate) fn report(&self, what: &str) -> WaitReport<'_> {
        WaitReport {
            meeting: self,
            waiting: Waiting::start(),
            speaker: HostSpeaker::new(
                self.job,
                &format!("{what} {}{}", self.store.location(), self.prefix()),
            ),
        }
    }

    /// The value of `topic` of one rank if it is there.
    pub(crate) fn peek(&self, topic: &str, rank: usize) -> Result<Option<Vec<u8>>> {
        self.read(&self.key(topic, rank))
    }

    fn is_refused(&self) -> bool {
        self.taken.load(Ordering::Relaxed) || self.misfit.load(Ordering::Relaxed)
    }

    /// Those of `ranks` that do not wait for others; all if that is not known.
    fn silent(&self, ranks: &[usize]) -> Vec<usize> {
        let waits = |rank: &usize| self.peek("waits", *rank).is_ok_and(|mark| mark.is_some());
        let silent: Vec<usize> = ranks.iter().filter(|rank| !waits(rank)).copied().collect();
        match silent.is_empty() {
            true => ranks.to_vec(),
            false => silent,
        }
    }

    /// The error for ranks that did not come in time. If some of them only wait for the
    /// others, the others are named.
    pub(crate) fn late(&self, ranks: &[usize], missing: &[usize], what: &str) -> Error {
        let arrived: Vec<usize> = ranks
            .iter()
            .filter(|rank| !missing.contains(rank))
            .copied()
            .collect();
        let guilty = match missing {
            [_] => missing.to_vec(),
            many => self.silent(many),
        };
        let mut message = format!(
            "{} did not {what} within {}",
            crate::notice::ranks(&guilty),
            duration(self.timeout)
        );
        if !arrived.is_empty() {
            message.push_str(&format!("; arrived: {}", list(&arrived)));
        }
        let waiting: Vec<usize> = missing
            .iter()
            .filter(|rank| !guilty.contains(rank))
            .copied()
            .collect();
        if !waiting.is_empty() {
            message.push_str(&format!("; waiting themselves: {}", list(&waiting)));
        }
        let refused = self.refused();
        if what == ARRIVE && !refused.is_empty() {
            message.push_str(&format!("; {refused}"));
        }
        message.push_str(&self.note());
        let error = Error::timeout(message);
        match guilty.as_slice() {
            [one] => error.with_peer(*one),
            _ => error,
        }
    }

    /// Ends the forming of all ranks, unless another rank did first. Also after a
    /// missed deadline: a rank that comes later would wait for us in vain. Not when we
    /// were refused: the others form without us.
    pub(crate) fn fail(&self, error: &Error) {
        if error.kind() == ErrorKind::Aborted || self.is_refused() {
            return;
        }
        let text = format!("{}\n{}", self.rank, error.message());
        let key = format!("{}failed", self.prefix());
        if let Err(e) = self.store.compare_set(&key, None, text.as_bytes()) {
            tracing::debug!("could not report to the other ranks that forming failed: {e}");
        }
    }

    /// Errors if another rank has failed. Called by ranks that wait: marks this one as such, for a rank that is missing at
    /// the deadline may itself be waiting.
    pub(crate) fn check(&self) -> Result<()> {
        if !self.waits.swap(true, Ordering::Relaxed) {
            // Without a store forming fails with its own error.
            let _ = self.publish("waits", b"");
        }
        let key = format!("{}failed", self.prefix());
        let Some(mark) = self.read(&key)? else {
            return match (self.lost)()? {
                Some((rank, why)) => Err(Error::peer_lost(rank, why)),
                None => Ok(()),
            };
        };
        let mark = String::from_utf8_lossy(&mark);
        let (mark, is_lost) = match mark.strip_prefix(LOST) {
            Some(rest) => (rest, true),
            None => (&*mark, false),
        };
        let parts = mark
            .split_once('\n')
            .and_then(|(rank, cause)| Some((rank.parse().ok()?, cause)));
        Err(match parts {
            Some((rank, cause)) if is_lost => Error::peer_lost(rank, cause),
            Some((rank, cause)) => {
                Error::aborted(rank, format!("it could not form the group: {cause}"))
            }
            None => Error::new(ErrorKind::Protocol, format!("the key {key:?} is garbled")),
        })
    }

    /// Waits until all ranks are finished, then removes every key of this forming; the
    /// last rank does it, when no rank reads them any more.
    pub(crate) fn finish(&self) -> Result<()> {
        self.publish("ready", b"1")?;
        let all: Vec<usize> = (0..self.world).collect();
        self.collect("ready", &all, "finish connecting")?;
        let done = format!("{}done", self.prefix());
        let count = self
            .store
            .add(&done, 1)
            .map_err(|e| self.store_failed("counting in the store", e))?;
        if usize::try_from(count).is_ok_and(|count| count >= self.world) {
            self.store
                .delete_prefix(&self.root())
                .map_err(|e| self.store_failed("cleaning the store", e))?;
        }
        Ok(())
    }

    pub(super) fn store_failed(&self, what: &str, e: phalanx_store::Error) -> Error {
        let message = format!("{what}: {e}{}", limits::hint(&e));
        Error::new(ErrorKind::of_store(&e), message).with_source(e)
    }
}

fn printable(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let printable = text.chars().filter(|c| !c.is_control());
    printable.take(NOTE_CHARS).collect()
}
