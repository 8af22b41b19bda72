//! Hands the records of a run to a tracker, while the training runs.

use std::collections::VecDeque;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use phalanx_base::files::{Dir, lock_holder, try_lock};
use phalanx_base::format::thousands;
use phalanx_base::say;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::follow::{Follow, Position, RUN_FILE, Record, id_of};
use crate::{Error, ErrorKind, Result, Tracker, refuse};

/// The name of the tracker that keeps a copy in an object store.
pub(crate) const STORE: &str = "store";

/// How long the end of a training waits for a tracker, at most; see [`Tracker::patience`].
pub const FINISH_WAIT: Duration = Duration::from_secs(10);

/// How often the run's files are read.
const POLL_EVERY: Duration = Duration::from_secs(1);

/// Pause after the first failure; doubled with each further one, up to [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// The longest pause at the end of the training.
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// Lines of `metrics.jsonl` that are given at once.
const MOST_METRICS: usize = 100;

/// Largest `.tracker-NAME.json`.
const KEPT_BYTES: u64 = 16 << 20;

/// More records than these are not counted.
const MOST_COUNTED: usize = 100_000;

/// What `.tracker-NAME.json` has.
#[derive(Default, Serialize, Deserialize)]
struct Kept {
    position: Position,
    #[serde(default)]
    state: Value,
}

impl Kept {
    fn write(&self, dir: &Dir, name: &str) -> Result<()> {
        let text = serde_json::to_vec(self).map_err(|e| {
            Error::new(ErrorKind::Failed, "a tracker's state is not JSON").caused_by(e)
        })?;
        dir.write(file_of(name), |out| out.write_all(&text))
    }
}

/// Records that are given in one call.
enum Batch {
    Run(Value),
    Metrics(Vec<Value>),
    Event(Value),
    Summary(Value),
}

/// A run's records on their way to a tracker.
struct Courier {
    dir: PathBuf,
    tracker: Box<dyn Tracker + Send>,
    follow: Follow,
    /// Read, and not given yet.
    pending: VecDeque<Batch>,
    kept: Kept,
    /// Whether the next process continues from `kept`.
    goes_on: bool,
    /// How far the records were given.
    given: Arc<Mutex<Position>>,
    lock: File,
}

impl Courier {
    fn open(path: &Path, mut tracker: Box<dyn Tracker + Send>) -> Result<Courier> {
        let dir = Dir::open(path)?;
        let name = tracker.name().to_owned();
        let lock = dir.open_private(&lock_of(&name))?;
        if !try_lock(&lock) {
            return Err(Error::usage(format!(
                "another process{} delivers {} to {name}",
                lock_holder(&lock),
                path.display()
            ))
            .note("fix", "wait for its end"));
        }
        let run = dir.read(RUN_FILE, KEPT_BYTES)?;
        let id = run.as_deref().and_then(id_of);
        let id = id.as_deref();
        // What was kept of another run is of no use.
        let kept = read(&dir, &name)?.filter(|kept| kept.position.id() == id);
        let mut kept = kept.unwrap_or_default();
        let goes_on = tracker.begin(path, &kept.state)?;
        if !goes_on {
            kept.position = Position::beginning(id);
        }
        let mut courier = Courier {
            follow: Follow::open_at(path, kept.position.clone()),
            dir: path.to_owned(),
            tracker,
            pending: VecDeque::new(),
            given: Arc::new(Mutex::new(kept.position.clone())),
            goes_on,
            kept,
            lock,
        };
        // The process that delivers the rest later knows where to.
        courier.save()?;
        Ok(courier)
    }

    /// Gives the next records; whether there were any.
    fn step(&mut self) -> Result<bool> {
        if !Dir::open(&self.dir)?.is_at(&self.lock, &lock_of(self.tracker.name())) {
            refuse!("another process delivers the run now");
        }
        if self.pending.is_empty() {
            self.pending = batches(self.follow.poll()?);
        }
        let any = !self.pending.is_empty();
        while let Some(batch) = self.pending.front() {
            let tracker = &mut self.tracker;
            let given = match batch {
                Batch::Run(run) => tracker.run(run),
                Batch::Metrics(records) => tracker.metrics(records),
                Batch::Event(event) => tracker.event(event),
                Batch::Summary(summary) => tracker.summary(summary),
            };
            // What a failed call has done is kept too.
            self.save()?;
            given?;
            self.pending.pop_front();
        }
        if any {
            self.kept.position = self.follow.position().clone();
            if let Ok(mut given) = self.given.lock() {
                given.clone_from(&self.kept.position);
            }
            if self.goes_on {
                self.write()?;
            }
        }
        Ok(any)
    }

    fn finish(&mut self) -> Result<()> {
        let finished = self.tracker.finish();
        self.save()?;
        finished
    }

    /// Keeps the tracker's state, if it has changed.
    fn save(&mut self) -> Result<()> {
        let state = self.tracker.state();
        if state == self.kept.state {
            return Ok(());
        }
        self.kept.state = state;
        self.write()
    }

    fn write(&self) -> Result<()> {
        self.kept.write(&Dir::open(&self.dir)?, self.tracker.name())
    }

    fn remainder(&self) -> Remainder {
        Remainder {
            name: self.tracker.name().to_owned(),
            dir: self.dir.clone(),
            later: self.tracker.later(&self.dir),
            given: Arc::clone(&self.given),
        }
    }
}

/// What is left.
#[derive(Debug)]
struct Remainder {
    name: String,
    dir: PathBuf,
    later: Option<String>,
    given: Arc<Mutex<Position>>,
}

impl Remainder {
    /// That it was not delivered, and `why`.
    fn error(&self, kind: ErrorKind, why: &str) -> Error {
        let left = match self.count() {
            // Files, or the run's status.
            0 => "the end of the run was not delivered".to_owned(),
            MOST_COUNTED.. => format!(
                "more than {} records were not delivered",
                thousands(MOST_COUNTED)
            ),
            1 => "1 record was not delivered".to_owned(),
            left => format!("{} records were not delivered", thousands(left)),
        };
        let later = self
            .later
            .as_ref()
            .map(|command| format!("; later: {command}"));
        let later = later.unwrap_or_default();
        Error::new(kind, format!("{}: {left} ({why}){later}", self.name))
    }

    /// Records, up to [`MOST_COUNTED`].
    fn count(&self) -> usize {
        let given = self.given.lock().map(|given| given.clone());
        let position = given.unwrap_or_default();
        let mut follow = Follow::open_at(&self.dir, position);
        let mut left = 0;
        while left < MOST_COUNTED {
            match follow.poll() {
                Ok(records) if !records.is_empty() => left += records.len(),
                _ => break,
            }
        }
        left
    }
}

/// What was kept of a run; none, where nothing was, or the file is damaged.
fn read(dir: &Dir, name: &str) -> phalanx_base::Result<Option<Kept>> {
    let text = dir.read(&file_of(name), KEPT_BYTES)?;
    Ok(text.and_then(|text| serde_json::from_slice(&text).ok()))
}

/// The state of the tracker `name` that was kept of the run in `dir`; null, where there is none.
pub(crate) fn state_of(dir: &Dir, name: &str) -> Value {
    let kept = read(dir, name).ok().flatten().unwrap_or_default();
    kept.state
}

/// Keeps `state` for the tracker `name`, which has got no records of the run `id` in `dir`.
#[cfg(feature = "object-store")]
pub(crate) fn keep_state(dir: &Dir, name: &str, id: Option<&str>, state: Value) -> Result<()> {
    let position = Position::beginning(id);
    Kept { position, state }.write(dir, name)
}

/// The file that is locked while a process delivers to the tracker `name`.
pub(crate) fn lock_of(name: &str) -> String {
    format!(".tracker-{name}.lock")
}

/// Lets this process deliver the run in `dir`, which a rank that is lost may still do: that one delivers nothing any more.
///
/// # Errors
///
/// `System`, naming the file.
pub fn take_over(dir: &Dir) -> Result<()> {
    let mut names = dir.names()?;
    names.retain(|name| name.starts_with(".tracker-") && name.ends_with(".lock"));
    names.iter().try_for_each(|name| dir.remove(name))
}

fn file_of(name: &str) -> String {
    format!(".tracker-{name}.json")
}

fn batches(records: Vec<Record>) -> VecDeque<Batch> {
    let mut batches = VecDeque::new();
    for record in records {
        match record {
            Record::Run(run) => batches.push_back(Batch::Run(run)),
            Record::Event(event) => batches.push_back(Batch::Event(event)),
            Record::Summary(summary) => batches.push_back(Batch::Summary(summary)),
            Record::Metrics(metrics) => match batches.back_mut() {
                Some(Batch::Metrics(before)) if before.len() < MOST_METRICS => before.push(metrics),
                _ => batches.push_back(Batch::Metrics(vec![metrics])),
            },
        }
    }
    batches
}

/// Whether the same call could succeed later.
fn is_passing(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::System | ErrorKind::PeerLost | ErrorKind::Timeout
    )
}

/// Hands the run in the folder `dir` to `tracker`: all that was not delivered before. *Blocks* until that is done.
///
/// # Errors
///
/// The first one, with what is left; `Usage`, where another process delivers the same run to a tracker of this name.
pub fn upload(dir: &Path, tracker: Box<dyn Tracker + Send>) -> Result<()> {
    let mut courier = Courier::open(dir, tracker)?;
    let mut all = || {
        while courier.step()? {}
        courier.finish()
    };
    let outcome = all();
    outcome.map_err(|e| courier.remainder().error(e.kind(), &e.chain()))
}

/// Hands the records of a run to a tracker while they are written, from a thread of its own.
///
/// It reads the files in the run's folder, and the training never waits for it. What the next process has to know is
/// noted in `.tracker-NAME.json` in that folder. After a failure it tries again, after pauses from half a second to 10
/// seconds; the first one is said on standard error.
#[derive(Debug)]
pub struct Delivery {
    /// Gets how long the end may take.
    ends: Sender<Duration>,
    outcome: Receiver<Result<()>>,
    /// The last failure, while it lasts.
    failing: Arc<Mutex<Option<String>>>,
    remainder: Remainder,
    patience: Duration,
}

impl Delivery {
    /// Begins to hand the run in the folder `dir` to `tracker`.
    ///
    /// # Errors
    ///
    /// Those of [`Tracker::begin`]; `Usage`, where another process delivers the same run to a tracker of this name;
    /// those of reading and writing in the folder; `System`, where no thread can be started.
    pub fn start(dir: &Path, tracker: Box<dyn Tracker + Send>) -> Result<Delivery> {
        let courier = Courier::open(dir, tracker)?;
        let (remainder, patience) = (courier.remainder(), courier.tracker.patience());
        let failing = Arc::default();
        let (ends, training) = channel();
        let (done, outcome) = channel();
        let state = Arc::clone(&failing);
        let name = remainder.name.clone();
        let thread = std::thread::Builder::new().name(name.clone());
        let started = thread.spawn(move || {
            // No caller waits any more for one that comes too late.
            let _ = done.send(deliver(courier, &training, &state));
        });
        started.map_err(|e| {
            Error::new(ErrorKind::System, format!("{name}: cannot start a thread")).caused_by(e)
        })?;
        Ok(Delivery {
            ends,
            outcome,
            failing,
            remainder,
            patience,
        })
    }

    /// Says that the training has ended.
    pub fn end(&self) {
        // Where the delivery has ended, it has left its outcome.
        let _ = self.ends.send(FINISH_WAIT.max(self.patience));
    }

    /// Says that the training has ended, and waits until everything is delivered, at most `wait`, or as long as the tracker
    /// [asks for](Tracker::patience).
    ///
    /// # Errors
    ///
    /// How much is left and why, with the command that delivers it later.
    pub fn finish(self, wait: Duration) -> Result<()> {
        let wait = wait.max(self.patience);
        // Where the delivery has ended, it has left its outcome.
        let _ = self.ends.send(wait);
        let (kind, why) = match self.outcome.recv_timeout(wait) {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(e)) => (e.kind(), e.chain()),
            Err(_) => {
                let failing = self.failing.lock().ok().and_then(|mut f| f.take());
                let slow = || format!("not done after {:.0} s", wait.as_secs_f64());
                (ErrorKind::Timeout, failing.unwrap_or_else(slow))
            }
        };
        Err(self.remainder.error(kind, &why))
    }
}

/// The work of the thread.
fn deliver(
    mut courier: Courier,
    training: &Receiver<Duration>,
    failing: &Mutex<Option<String>>,
) -> Result<()> {
    let name = courier.tracker.name().to_owned();
    let (mut pause, mut until) = (PAUSE, None);
    loop {
        let given = match courier.step() {
            Ok(false) if until.is_some() => match courier.finish() {
                Ok(()) => return Ok(()),
                Err(e) => Err(e),
            },
            given => given,
        };
        let wait = match given {
            Ok(any) => {
                pause = PAUSE;
                if let Ok(mut failing) = failing.lock()
                    && failing.take().is_some()
                {
                    say::note(format_args!("{name}: records are delivered again"));
                }
                if any { Duration::ZERO } else { POLL_EVERY }
            }
            Err(e) if !is_passing(&e) => {
                if until.is_none() {
                    say::note(format_args!(
                        "warning: {name}: delivery has stopped: {}",
                        e.chain()
                    ));
                }
                return Err(e);
            }
            Err(e) => {
                let before = failing.lock().map(|mut failing| failing.replace(e.chain()));
                if until.is_none() && matches!(before, Ok(None)) {
                    say::note(format_args!(
                        "warning: {name}: {}; trying again while the training continues",
                        e.chain()
                    ));
                }
                if until.is_some_and(|until| Instant::now() >= until) {
                    return Err(e);
                }
                let now = pause;
                pause = LONGEST_PAUSE.min(2 * pause);
                now
            }
        };
        match until {
            Some(_) => std::thread::sleep(wait.min(LAST_PAUSE)),
            None => match training.recv_timeout(wait) {
                Err(RecvTimeoutError::Timeout) => {}
                ends => {
                    // Dropped: the training ends with an error, and does not wait.
                    until = Some(Instant::now() + ends.unwrap_or_default());
                    pause = PAUSE;
                }
            },
        }
    }
}
