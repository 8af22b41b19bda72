//! The thread that looks at what the launcher has told and at the run's folder.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use phalanx_track::{Follow, Record};

use super::hub::Hub;
use super::job::{Inbox, Job, JobState};
use super::run::RunView;
use super::view::View;
use crate::{End, Result, run_folder};

/// How often it looks.
const EVERY: Duration = Duration::from_millis(500);

/// How often the parts of the report that are read as a whole are read, and readers get something
/// even if nothing changes.
const REPORT_EVERY: Duration = Duration::from_secs(2);
const BEAT: Duration = Duration::from_secs(10);

/// How long it reads at a time, when much is there: readers of a resumed run see it grow.
const READ_LIMIT: Duration = Duration::from_millis(500);

/// How long it reads at the end.
const LAST_LIMIT: Duration = Duration::from_secs(2);

/// Reads the folder, and tells the hub.
pub(crate) struct Follower {
    hub: Arc<Hub<View>>,
    told: Arc<JobState>,
    job: Job,
    pointer: Option<PathBuf>,
    followed: Option<(PathBuf, Follow)>,
    /// When the report was read.
    reported: Instant,
}

impl Follower {
    /// The first state is there at once.
    pub fn new(hub: Arc<Hub<View>>, told: Arc<JobState>, job: Job) -> Follower {
        hub.update(|view| view.set_job(job.clone()));
        Follower {
            hub,
            told,
            job,
            pointer: None,
            followed: None,
            reported: Instant::now(),
        }
    }

    /// Until the job has ended.
    pub fn run(mut self) {
        let mut sent = Instant::now();
        loop {
            let news = self.news();
            let outcome = news.outcome;
            let limit = match outcome {
                Some(_) => LAST_LIMIT,
                None => READ_LIMIT,
            };
            let (begun, records, read) = self.read(Instant::now() + limit);
            let hub = self.hub.clone();
            hub.update(|view| {
                if news.ranks_are_new {
                    view.set_ranks(news.ranks);
                }
                view.set_tails(&news.tails);
                view.note(news.notes);
                if let Some(folder) = begun {
                    view.run = RunView::new(&folder);
                }
                records.iter().for_each(|record| view.run.add(record));
                let is_due = outcome.is_some() || self.reported.elapsed() >= REPORT_EVERY;
                let refreshed = match &self.followed {
                    Some((folder, _)) if view.run.is_outdated() && is_due => {
                        self.reported = Instant::now();
                        view.run.refresh(folder)
                    }
                    _ => Ok(()),
                };
                let before = self.job.clone();
                self.job.trouble = read.and(refreshed).err().map(|error| error.chain());
                if let Some(end) = &outcome {
                    self.job.ended = Some(phalanx_base::unix_time().as_secs_f64());
                    let (state, message) = match end {
                        End::Finished => ("finished", None),
                        End::Stopped(message) => ("stopped", Some(message)),
                        End::Failed(message) => ("failed", Some(message)),
                    };
                    self.job.state = state;
                    self.job.message = message.cloned();
                }
                if self.job != before {
                    view.set_job(self.job.clone());
                }
            });
            if outcome.is_some() {
                return;
            }
            if sent.elapsed() >= BEAT {
                self.hub.beat();
                sent = Instant::now();
            }
        }
    }

    /// Waits for the next look, or the end; takes what is new.
    fn news(&mut self) -> Inbox {
        let is_running = |inbox: &mut Inbox| inbox.outcome.is_none();
        let inbox = self.told.inbox();
        let waited = self.told.ended.wait_timeout_while(inbox, EVERY, is_running);
        let mut inbox = waited.unwrap_or_else(PoisonError::into_inner).0;
        if self.pointer.is_none() {
            self.pointer.clone_from(&inbox.pointer);
        }
        Inbox {
            ranks: inbox.ranks.clone(),
            ranks_are_new: std::mem::take(&mut inbox.ranks_are_new),
            tails: inbox.tails.clone(),
            notes: std::mem::take(&mut inbox.notes),
            pointer: None,
            outcome: inbox.outcome.clone(),
        }
    }

    /// Reads what is new in the run's folder, which comes first if it is another one than before.
    fn read(&mut self, until: Instant) -> (Option<PathBuf>, Vec<Record>, Result<()>) {
        let named = self.pointer.as_deref().and_then(run_folder);
        let followed = self.followed.as_ref().map(|(folder, _)| folder);
        let begun = named.filter(|folder| followed != Some(folder));
        if let Some(folder) = &begun {
            self.followed = Some((folder.clone(), Follow::open(folder)));
        }
        let mut all = Vec::new();
        let Some((_, follow)) = &mut self.followed else {
            return (begun, all, Ok(()));
        };
        while Instant::now() < until {
            match follow.poll() {
                Ok(records) if records.is_empty() => break,
                Ok(records) => all.extend(records),
                Err(error) => return (begun, all, Err(error)),
            }
        }
        (begun, all, Ok(()))
    }
}
