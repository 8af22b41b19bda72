//! The pages and what serves them.

mod access;
mod follower;
mod hub;
mod job;
mod run;
mod runs;
mod server;
mod view;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use self::access::Access;
use self::follower::Follower;
use self::hub::Hub;
use self::job::{Job, JobState};
use self::runs::Runs;
use self::server::Site;
use self::view::View;
use crate::{Address, End, Error, ErrorKind, Rank, Result, Tail};

/// How long the end of the job waits for the last look at the run's folder, which may be on a slow
/// file system, and for the readers.
const END_LIMIT: Duration = Duration::from_secs(3);

/// The page of one job. It is served until this is dropped.
pub struct Page {
    told: Arc<JobState>,
    serving: Serving<View>,
    /// Disconnected when its thread has ended.
    follower: Receiver<()>,
}

impl Page {
    /// Serves the page of the job `program` at `address`, from threads of its own.
    ///
    /// # Errors
    ///
    /// `Usage`, if it cannot listen there; `System` without threads or random numbers.
    pub fn open(address: &Address, program: &str) -> Result<Page> {
        let serving = Serving::open(address)?;
        let told = Arc::new(JobState::default());
        let job = Job {
            program: program.to_owned(),
            host: phalanx_base::host_name(),
            started: phalanx_base::unix_time().as_secs_f64(),
            ended: None,
            state: "running",
            message: None,
            trouble: None,
        };
        let following = Follower::new(serving.site.hub.clone(), told.clone(), job);
        let follower = start("live files", move || following.run())?;
        Ok(Page {
            told,
            serving,
            follower,
        })
    }

    /// The address for a browser, with the secret.
    pub fn link(&self) -> &str {
        &self.serving.link
    }

    /// Rank 0 writes the path of the run's folder into the file `pointer`.
    pub fn set_pointer(&self, pointer: PathBuf) {
        self.told.inbox().pointer = Some(pointer);
    }

    /// The ranks of the job, or their states, are now these.
    pub fn set_ranks(&self, ranks: Vec<Rank>) {
        let mut inbox = self.told.inbox();
        inbox.ranks_are_new |= inbox.ranks != ranks;
        inbox.ranks = ranks;
    }

    /// Where the output of rank `rank` is added.
    pub fn tail(&self, rank: usize) -> Arc<Tail> {
        self.told.inbox().tails.entry(rank).or_default().clone()
    }

    /// Shows a message of the launcher.
    pub fn note(&self, text: String) {
        self.told.inbox().notes.push(text);
    }

    /// The job has ended: shows that, then *blocks* until the readers have it, for three seconds
    /// at most, and closes the port.
    pub fn end(self, end: End) {
        self.told.inbox().outcome = Some(end);
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        let unsaid = || End::Failed("the launcher ended with an error".to_owned());
        self.told.inbox().outcome.get_or_insert_with(unsaid);
        self.told.ended.notify_all();
        let _ = self.follower.recv_timeout(END_LIMIT);
        self.serving.end();
    }
}

/// The page of the runs below a folder. It is served until this is dropped.
pub struct RunsPage {
    serving: Serving<Runs>,
    /// Ends the follower.
    stop: Option<Sender<()>>,
    follower: Receiver<()>,
}

impl RunsPage {
    /// Serves the page of the runs below `folder` at `address`, from threads of its own. Nothing is
    /// written there.
    ///
    /// # Errors
    ///
    /// `Usage`, if there is no such folder, or it cannot listen there; `System` without threads or random numbers.
    pub fn open(address: &Address, folder: &Path) -> Result<RunsPage> {
        if !folder.is_dir() {
            return Err(Error::usage(format!("no folder {}", folder.display())));
        }
        let serving = Serving::open(address)?;
        let (hub, folder) = (serving.site.hub.clone(), folder.to_owned());
        let (stop, stopped) = channel();
        let follower = start("live files", move || runs::follow(&folder, &hub, &stopped))?;
        Ok(RunsPage {
            serving,
            stop: Some(stop),
            follower,
        })
    }

    /// The address for a browser, with the secret.
    pub fn link(&self) -> &str {
        &self.serving.link
    }
}

impl Drop for RunsPage {
    fn drop(&mut self) {
        self.stop = None;
        let _ = self.follower.recv_timeout(END_LIMIT);
        self.serving.end();
    }
}

/// The server of a page.
struct Serving<V> {
    link: String,
    site: Arc<Site<V>>,
    /// Disconnected when its thread has ended.
    server: Receiver<()>,
}

impl<V: hub::View + Default> Serving<V> {
    fn open(address: &Address) -> Result<Serving<V>> {
        let listener = address.listen()?;
        let own = listener.local_addr().map_err(|e| {
            Error::new(ErrorKind::System, "cannot find the port of the live page").caused_by(e)
        })?;
        let machine = phalanx_base::host_name();
        let secret = secret()?;
        let host = match own.ip().is_unspecified() {
            true => &machine,
            false => address.host(),
        };
        let host = match host.contains(':') {
            true => format!("[{host}]"),
            false => host.to_owned(),
        };
        let link = format!("http://{host}:{}/?key={secret}", own.port());
        let access = Access::new(secret, own.ip(), own.port(), address.host(), &machine);
        let site = Arc::new(Site::new(access, Arc::new(Hub::default())));
        let serving = site.clone();
        let server = start("live server", move || {
            if server::serve(listener, &serving).is_err() {
                // Nobody can read it, and the job goes on.
                serving.hub.end();
            }
        })?;
        Ok(Serving { link, site, server })
    }
}

impl<V: hub::View> Serving<V> {
    fn end(&self) {
        self.site.hub.end();
        self.site.stop.notify_one();
        let _ = self.server.recv_timeout(END_LIMIT);
    }
}

/// Runs `work` on a thread; what is returned is disconnected when it has ended.
fn start(name: &str, work: impl FnOnce() + Send + 'static) -> Result<Receiver<()>> {
    let (ends, ended) = channel::<()>();
    let work = move || {
        work();
        drop(ends);
    };
    let started = thread::Builder::new().name(name.into()).spawn(work);
    started.map_err(|e| {
        Error::new(ErrorKind::System, "cannot start a thread of the live page").caused_by(e)
    })?;
    Ok(ended)
}

/// 128 random bits.
fn secret() -> Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|e| Error::new(ErrorKind::System, "no random numbers").caused_by(e))?;
    Ok(hex::encode(bytes))
}

#[cfg(test)]
mod tests;
