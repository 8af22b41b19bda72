//! Web pages that show a job while it runs (`--live`), and all runs below a folder (`phalanx live`).
//!
//! ```text
//! job's folder ─▶ follower thread ─▶ Hub ─▶ server thread ─▶ browsers
//! run's folder                      (view)     (HTTP)
//! ```
//!
//! The follower thread reads twice a second what a launcher has written into the job's folder, and the run's folder
//! ([`Page::of_runs`]: all runs' folders), and the hub passes what has changed to the readers. None of them waits
//! for a reader: one that is too slow is dropped.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod access;
mod follower;
mod hub;
mod run;
mod runs;
mod server;
mod view;

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use phalanx_base::address::Address;
use phalanx_base::error::{Error, ErrorKind, Result, refuse};

use self::access::Access;
use self::follower::Follower;
use self::hub::Hub;
use self::server::Site;

/// How long the end of the job waits for the last look at the run's folder, which may be on a slow
/// file system, and for the readers.
const END_LIMIT: Duration = Duration::from_secs(3);

/// A page. It is served until this is dropped, which *blocks* until it has read and sent the rest, for three seconds at most
/// each.
pub struct Page {
    link: String,
    /// Disconnects the follower's other end: it reads for the last time.
    stop: Option<Sender<()>>,
    /// Ends the server, once the readers have the rest.
    end: Box<dyn Fn()>,
    /// Each is disconnected when its thread has ended.
    follower: Receiver<()>,
    server: Receiver<()>,
}

impl Page {
    /// Serves the page of the job whose launcher writes into `folder` at `address`, from threads of its own.
    ///
    /// # Errors
    ///
    /// `Usage`, if it cannot listen there; `System` without threads or random numbers.
    pub fn of_job(address: &Address, folder: &Path) -> Result<Page> {
        let hub = Arc::default();
        let following = Follower::new(Arc::clone(&hub), folder);
        Page::open(address, hub, move |stop| following.run(stop))
    }

    /// Serves the page of the runs below `folder` at `address`, from threads of its own. Nothing is
    /// written there.
    ///
    /// # Errors
    ///
    /// `Usage`, if there is no such folder, or it cannot listen there; `System` without threads or random numbers.
    pub fn of_runs(address: &Address, folder: &Path) -> Result<Page> {
        if !folder.is_dir() {
            refuse!("no folder {}", folder.display());
        }
        let hub = Arc::default();
        let (folder, shown) = (folder.to_owned(), Arc::clone(&hub));
        Page::open(address, hub, move |stop| {
            runs::follow(&folder, &shown, stop);
        })
    }

    fn open<V: hub::View>(
        address: &Address,
        hub: Arc<Hub<V>>,
        follow: impl FnOnce(&Receiver<()>) + Send + 'static,
    ) -> Result<Page> {
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
        let site = Arc::new(Site::new(access, hub));
        let serving = site.clone();
        let server = start("live server", move || {
            if server::serve(listener, &serving).is_err() {
                // Without a server no reader can read it, and the job continues.
                serving.hub.end();
            }
        })?;
        let (stop, stopped) = channel();
        let follower = start("live files", move || follow(&stopped))?;
        Ok(Page {
            link,
            stop: Some(stop),
            end: Box::new(move || {
                site.hub.end();
                site.stop.notify_one();
            }),
            follower,
            server,
        })
    }

    /// The address for a browser, with the secret.
    pub fn link(&self) -> &str {
        &self.link
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.stop = None;
        let _ = self.follower.recv_timeout(END_LIMIT);
        (self.end)();
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
