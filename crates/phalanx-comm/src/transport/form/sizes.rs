//! Handles processes that were started with different world sizes.
//!
//! Each size forms by itself, under separate keys, so one process with a wrong size
//! (left over, or mistyped) cannot end the forming of the others, even if it came
//! first. Only the list of sizes is shared. While a rank waits and the list has other
//! sizes, it checks which size is right:
//!
//! * more than half of the ranks of another size have come, and more than of
//!   ours: this process is the wrong one. It is refused, and leaves a note in the store
//!   for the others;
//! * more than half of ours have come, and more than of any other: the wrong ones are
//!   named in a warning, and the missing ones waited for until the deadline;
//! * neither, and processes of another size have the numbers of all our missing ranks:
//!   either size may be right. After [`patience`] that ends the forming of both.
//!
//! A size whose group has formed is right in any case: the last of its ranks removes
//! the keys of all sizes.

use std::time::{Duration, Instant};

use super::Rendezvous;
use super::member::{Member, this_process};
use crate::{Error, ErrorKind, Result};

/// Most different sizes that are handled.
const MOST_SIZES: usize = 8;
/// Missing ranks that are looked up in another size at a time.
const MOST_LOOKS: usize = 64;
/// Longest list of sizes that is read.
const MAX_LIST_BYTES: usize = 256;
/// Most characters of a refused process's note in a message.
const NOTE_CHARS: usize = 300;

/// How long to wait while no size is known to be right.
fn patience(timeout: Duration) -> Duration {
    (timeout / 4).min(Duration::from_secs(10))
}

/// What is known about other sizes.
pub(super) struct Sizes<'a> {
    meeting: &'a Rendezvous<'a>,
    /// Since when processes of another size have the numbers of all missing ranks.
    stuck_since: Option<Instant>,
    /// The note of a refused process.
    note: Option<String>,
    warned: Vec<(usize, usize)>,
}

impl<'a> Sizes<'a> {
    /// Adds our size to the list, before our record is published.
    pub(super) fn enter(meeting: &'a Rendezvous<'a>) -> Result<Sizes<'a>> {
        let key = meeting.sizes_key();
        loop {
            let now = meeting.read(&key)?;
            let sizes = parse(now.as_deref().unwrap_or_default());
            if sizes.contains(&meeting.world) {
                break;
            }
            if sizes.len() >= MOST_SIZES {
                return Err(Error::usage(format!(
                    "rank {} was started for {} ranks, others for {}: all ranks must be started \
                     with the same",
                    meeting.rank,
                    meeting.world,
                    list(&sizes)
                )));
            }
            let longer = list(&[&sizes[..], &[meeting.world]].concat());
            let stored = meeting
                .store
                .compare_set(&key, now.as_deref(), longer.as_bytes());
            if stored.map_err(|e| meeting.store_failed("publishing to the store", e))?
                == longer.as_bytes()
            {
                break;
            }
        }
        Ok(Sizes {
            meeting,
            stuck_since: None,
            note: None,
            warned: Vec::new(),
        })
    }

    /// Our record is published.
    pub(super) fn count_in(&self) -> Result<()> {
        self.meeting.count_in()
    }

    /// Checks other sizes; `missing` ranks have not come yet.
    ///
    /// # Errors
    ///
    /// When this process is the wrong one, or it stays unknown which size is right.
    pub(super) fn look(&mut self, missing: &[usize]) -> Result<()> {
        let meeting = self.meeting;
        if meeting.peek("member", meeting.rank)?.is_none() {
            return Err(self.refused("the group has formed without this process"));
        }
        let sizes = parse(&meeting.read(&meeting.sizes_key())?.unwrap_or_default());
        let others = sizes.iter().filter(|size| **size != meeting.world);
        let others: Vec<Rendezvous<'_>> = others.map(|size| meeting.of_size(*size)).collect();
        if others.is_empty() {
            return Ok(());
        }
        let ours = meeting.world - missing.len().min(meeting.world);
        let mut is_first = 2 * ours > meeting.world;
        let mut standing: Vec<(usize, usize, String)> = Vec::new();
        for other in others {
            // Sizes whose processes gave up or ended do not count.
            if other.check().is_err() {
                continue;
            }
            let theirs = other.came()?;
            if theirs > ours && 2 * theirs > other.world {
                self.turn_away(&other, theirs)?;
            }
            is_first &= ours > theirs;
            for rank in missing.iter().take(MOST_LOOKS) {
                let record = match *rank < other.world {
                    true => other.peek("member", *rank)?,
                    false => None,
                };
                if let Some(record) = record {
                    standing.push((*rank, other.world, process_of(&record)));
                }
            }
        }
        self.warn(&standing)?;
        let stands = |rank: &usize| standing.iter().any(|(at, ..)| at == rank);
        if is_first || !missing.iter().all(stands) {
            self.stuck_since = None;
            return Ok(());
        }
        let since = *self.stuck_since.get_or_insert_with(Instant::now);
        match standing.first() {
            Some((rank, size, process)) if since.elapsed() >= patience(meeting.timeout) => {
                let message = format!(
                    "rank {rank} ({process}) was started for {size} ranks, rank {} for {}: all \
                     ranks must be started with the same",
                    meeting.rank, meeting.world
                );
                let error = Error::usage(message).with_peer(*rank);
                for size in sizes {
                    meeting.of_size(size).fail(&error);
                }
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// Adds the note of a refused process to the error of a missed deadline.
    pub(super) fn explain(&mut self, error: Error) -> Error {
        if error.kind() != ErrorKind::Timeout {
            return error;
        }
        let _ = self.read_note();
        let Some(note) = &self.note else { return error };
        let explained = Error::timeout(format!("{}; {note}", error.message()));
        match error.peer() {
            Some(peer) => explained.with_peer(peer),
            None => explained,
        }
    }

    /// Another size has more ranks.
    fn turn_away(&self, other: &Rendezvous<'_>, theirs: usize) -> Result<()> {
        let meeting = self.meeting;
        let note = format!(
            "{} was started as rank {} of {} and takes no part",
            this_process(),
            meeting.rank,
            meeting.world
        );
        let error = self.refused(&format!(
            "{theirs} ranks have come that were started for {}",
            other.world
        ));
        other.set(&other.note_key(), note.as_bytes())?;
        // So that no other rank counts this one as waiting. If the key is gone, so are
        // all keys of this forming, and none may be left behind.
        let failed = |e| meeting.store_failed("publishing to the store", e);
        let record = meeting.key("member", meeting.rank);
        if !meeting.store.delete(&record).map_err(failed)? {
            meeting.store.delete(&other.note_key()).map_err(failed)?;
        }
        Err(error)
    }

    /// This process is the wrong one; this does not end the forming of others.
    fn refused(&self, because: &str) -> Error {
        self.meeting.is_misfit();
        Error::usage(format!(
            "rank {} was started for {} ranks, but {because}: all ranks must be started with the \
             same; this process, {}, does not take part",
            self.meeting.rank,
            self.meeting.world,
            this_process()
        ))
    }

    fn warn(&mut self, standing: &[(usize, usize, String)]) -> Result<()> {
        let meeting = self.meeting;
        for (rank, size, process) in standing {
            if !self.warned.contains(&(*rank, *size)) {
                self.warned.push((*rank, *size));
                tracing::warn!(
                    "{process} was started as rank {rank} of {size}, not of {}",
                    meeting.world
                );
            }
        }
        self.read_note()
    }

    /// Reads the note of a refused process, if there is one.
    fn read_note(&mut self) -> Result<()> {
        let meeting = self.meeting;
        if self.note.is_some() {
            return Ok(());
        }
        if let Some(note) = meeting.read(&meeting.note_key())? {
            let note = String::from_utf8_lossy(&note);
            let printable = note.chars().filter(|c| !c.is_control());
            let note: String = printable.take(NOTE_CHARS).collect();
            tracing::warn!(
                "{note}; waiting for the ranks that were started for {}",
                meeting.world
            );
            self.note = Some(note);
        }
        Ok(())
    }
}

fn process_of(record: &[u8]) -> String {
    Member::decode(record).map_or_else(
        |_| "another process".to_owned(),
        |member| member.process.chars().take(NOTE_CHARS).collect(),
    )
}

/// Parses an untrusted list.
pub(in crate::transport) fn parse(text: &[u8]) -> Vec<usize> {
    let text = String::from_utf8_lossy(&text[..text.len().min(MAX_LIST_BYTES)]);
    let sizes = text.split(", ").filter_map(|size| size.parse().ok());
    let sizes = sizes.filter(|size| (1..=u32::MAX as usize).contains(size));
    sizes.take(MOST_SIZES).collect()
}

pub(in crate::transport) fn list(sizes: &[usize]) -> String {
    let sizes: Vec<String> = sizes.iter().map(usize::to_string).collect();
    sizes.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_parse_back_and_garbage_is_left_out() {
        assert_eq!(parse(list(&[4, 3, 1000]).as_bytes()), [4, 3, 1000]);
        assert_eq!(parse(b"4, x, -1, 0, 99999999999, 7"), [4, 7]);
        assert_eq!(parse(&[0xff; 4096]), [0; 0]);
        assert_eq!(parse(b""), [0; 0]);
        assert_eq!(parse(list(&[9; 100]).as_bytes()).len(), MOST_SIZES);
    }
}
