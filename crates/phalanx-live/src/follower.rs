//! The thread that reads what the launcher writes and the run's folder.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use phalanx_base::job_files::run_folder;
use phalanx_track::{Follow, Record};

use crate::Result;
use crate::hub::Hub;
use crate::run::RunView;
use crate::view::View;

/// How often the parts of the report that are read as a whole are read.
const REPORT_EVERY: Duration = Duration::from_secs(2);

/// How long it reads at a time, when much is there: readers of a resumed run see it grow.
const READ_LIMIT: Duration = Duration::from_millis(500);

/// How long it reads at the end.
const LAST_LIMIT: Duration = Duration::from_secs(2);

/// Reads the folders, and updates the hub.
pub(crate) struct Follower {
    hub: Arc<Hub<View>>,
    /// That of the job.
    folder: PathBuf,
    followed: Option<(PathBuf, Follow)>,
    /// When the report was read.
    reported: Instant,
}

impl Follower {
    /// The first state is there at once.
    pub fn new(hub: Arc<Hub<View>>, folder: &Path) -> Follower {
        hub.update(|view| view.read_job(folder, None, false));
        Follower {
            hub,
            folder: folder.to_owned(),
            followed: None,
            reported: Instant::now(),
        }
    }

    /// Until `stop` is disconnected.
    pub fn run(mut self, stop: &Receiver<()>) {
        while self.hub.wait(stop) {
            self.poll(READ_LIMIT, false);
        }
        self.poll(LAST_LIMIT, true);
    }

    fn poll(&mut self, limit: Duration, is_last: bool) {
        let (begun, records, read) = self.read(Instant::now() + limit);
        self.hub.update(|view| {
            if let Some(folder) = begun {
                view.run = RunView::new(&folder);
            }
            records.iter().for_each(|record| view.run.add(record));
            let is_due = is_last || self.reported.elapsed() >= REPORT_EVERY;
            let refreshed = match &self.followed {
                Some((folder, _)) if view.run.is_outdated() && is_due => {
                    self.reported = Instant::now();
                    view.run.refresh(folder)
                }
                _ => Ok(()),
            };
            view.read_job(&self.folder, read.and(refreshed).err(), is_last);
        });
    }

    /// Reads what is new in the run's folder, which comes first if it is another one than before.
    fn read(&mut self, until: Instant) -> (Option<PathBuf>, Vec<Record>, Result<()>) {
        let followed = self.followed.as_ref().map(|(folder, _)| folder);
        let begun = run_folder(&self.folder).filter(|folder| followed != Some(folder));
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
