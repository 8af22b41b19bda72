//! A copy of a run's folder in an object store, with its checkpoints.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use phalanx_base::files::{Dir, as_typed, create_folder};
use phalanx_base::format::plural;
use phalanx_object::{Objects, Patience, stamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::delivery::{STORE, keep_state, state_of};
use crate::files::{Version, files_of, open_in, version};
use crate::follow::{LARGEST_FILE, RUN_FILE, id_of};
use crate::{Error, ErrorKind, Result, Tracker};

/// Folders of a run that are of no use elsewhere.
const LEFT_OUT: [&str; 2] = ["flight", "wandb"];
/// The folder of checkpoints.
const CHECKPOINTS: &str = "checkpoints/";
/// How often files are sent, at most.
const EVERY: Duration = Duration::from_secs(5);
/// A file that is being copied here.
const PART: &str = ".copy.part";
/// How long the start of a training waits for a server that does not answer.
const FIRST: Patience = Patience {
    silence: Duration::from_secs(10),
    total: Duration::from_secs(20),
    pause: Duration::from_millis(250),
};
/// A request that sends has that long.
const PATIENCE: Patience = Patience {
    silence: Duration::from_secs(300),
    ..FIRST
};
/// How long the end of a training waits.
const LAST_WAIT: Duration = Duration::from_secs(300);

/// Keeps a copy of a run's folder, checkpoints too, below a URL of an object store while it grows. What the folder no longer
/// has is removed there after all that it has now was sent.
pub struct RunCopy {
    to: Objects,
    dir: PathBuf,
    state: State,
    /// When all was sent last.
    last: Option<Instant>,
}

/// What the next process must know.
#[derive(Default, Serialize, Deserialize)]
struct State {
    url: String,
    sent: BTreeMap<String, Version>,
}

fn is_manifest(name: &str) -> bool {
    name.starts_with(CHECKPOINTS) && name.ends_with(".json")
}

/// A manifest comes after the files that all of them name, the newest first: whoever finds one continues from the newest.
fn in_order(names: &mut [String]) {
    names.sort_by_cached_key(|name| (is_manifest(name), Reverse(name.clone())));
}

impl RunCopy {
    /// One below `url`, `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`. The environment has the credentials.
    ///
    /// # Errors
    ///
    /// `Usage` for another URL, or variables that the store does not understand.
    pub fn new(url: &str) -> Result<RunCopy> {
        Ok(RunCopy {
            to: Objects::open(url, PATIENCE)?,
            dir: PathBuf::new(),
            state: State::default(),
            last: None,
        })
    }

    fn sync(&mut self) -> Result<()> {
        self.send().map_err(|e| match self.last {
            // It may work again: a server of credentials that does not answer once ends no delivery.
            Some(_) => Error::new(ErrorKind::System, e.chain()),
            None => e,
        })?;
        self.last = Some(Instant::now());
        Ok(())
    }

    fn send(&mut self) -> Result<()> {
        let (dir, sent) = (Dir::open(&self.dir)?, &mut self.state.sent);
        let mut names = files_of(&dir, &LEFT_OUT)?;
        in_order(&mut names);
        let mut is_whole = true;
        for name in &names {
            let Some(mut file) = open_in(&dir, name) else {
                // Of a checkpoint that has just made room for one that is not in `names`.
                is_whole &= !name.starts_with(CHECKPOINTS);
                continue;
            };
            let version = version(&file)?;
            if sent.get(name) != Some(&version) {
                self.to.put(name, &mut file)?;
                sent.insert(name.clone(), version);
            }
        }
        let mut gone = sent.clone();
        gone.retain(|name, _| is_whole && !names.contains(name));
        for name in gone.keys() {
            self.to.delete(name)?;
            sent.remove(name);
        }
        Ok(())
    }

    fn now_and_then(&mut self) -> Result<()> {
        match self.last {
            Some(last) if last.elapsed() < EVERY => Ok(()),
            _ => self.sync(),
        }
    }
}

impl Tracker for RunCopy {
    fn name(&self) -> &str {
        STORE
    }

    fn begin(&mut self, dir: &Path, state: &Value) -> Result<bool> {
        self.dir = dir.to_owned();
        let url = self.to.url().to_owned();
        let kept: Option<State> = serde_json::from_value(state.clone()).ok();
        let kept = kept.filter(|kept| kept.url == url);
        self.state = kept.unwrap_or(State {
            url,
            ..State::default()
        });
        Ok(true)
    }

    fn state(&self) -> Value {
        serde_json::json!(self.state)
    }

    fn run(&mut self, _run: &Value) -> Result<()> {
        self.now_and_then()
    }

    fn metrics(&mut self, _records: &[Value]) -> Result<()> {
        self.now_and_then()
    }

    fn event(&mut self, _event: &Value) -> Result<()> {
        self.now_and_then()
    }

    fn summary(&mut self, _summary: &Value) -> Result<()> {
        self.now_and_then()
    }

    fn finish(&mut self) -> Result<()> {
        self.sync()
    }

    fn patience(&self) -> Duration {
        LAST_WAIT
    }

    fn later(&self, dir: &Path) -> Option<String> {
        let (dir, url) = (as_typed(dir), self.to.url());
        Some(format!("phalanx report {dir} --upload {url}"))
    }
}

/// Before a training in `dir` that keeps its copy at `url`. If it continues, `resumes`, and a run with a checkpoint is there,
/// that is copied to `dir`. Returns what was copied, in words. `is_fresh`: what is in `dir` goes. *Blocks* until that is done.
///
/// # Errors
///
/// `Usage`, where there is another run, or for what the user can mend about the URL; those of reading and writing.
pub(crate) fn prepare(
    url: &str,
    dir: &Path,
    resumes: bool,
    is_fresh: bool,
) -> Result<Option<String>> {
    let from = Objects::open(url, FIRST)?;
    let here = Dir::open(dir).ok();
    let own = here.as_ref().map(|here| state_of(here, STORE));
    if own.is_some_and(|own| own["url"] == from.url()) && !resumes && !is_fresh {
        return Ok(None);
    }
    let mut top = from.top()?;
    top.retain(|about| about.location.filename() == Some(RUN_FILE));
    if top.is_empty() {
        return Ok(None);
    }
    let there = id_of(&from.read(RUN_FILE)?);
    let mut all: BTreeMap<_, _> = match resumes {
        true => from.all()?.into_iter().collect(),
        false => BTreeMap::new(),
    };
    all.retain(|name, _| name.split('/').all(|part| !part.starts_with('.')));
    let mut names: Vec<String> = all.keys().cloned().collect();
    in_order(&mut names);
    if !names.iter().any(|name| is_manifest(name)) {
        let run = here.and_then(|here| here.read(RUN_FILE, LARGEST_FILE).ok()?);
        if !is_fresh && there.is_some() && there == run.and_then(|run| id_of(&run)) {
            return Ok(None);
        }
        let fix = match resumes {
            true => "another --output-url; that run has no checkpoint to continue from",
            false => {
                "another --output-url; or --resume auto, which continues that run from its last checkpoint"
            }
        };
        let what = format!("{} has another run", from.url());
        return Err(Error::usage(what).note("fix", fix));
    }
    let mut state = State {
        url: from.url().to_owned(),
        ..State::default()
    };
    let here = Dir::create(dir)?;
    for name in &names {
        let (path, about) = (dir.join(name), &all[name]);
        let folder = path.parent().unwrap_or(dir);
        create_folder(folder)?;
        // Checkpoints do not change: one that was copied before is not asked for again.
        let size = fs::metadata(&path).map(|file| file.len());
        if !name.starts_with(CHECKPOINTS) || size.ok() != Some(about.size) {
            let part = folder.join(PART);
            let failed = |e| Error::io("cannot write", &path, e);
            let file = File::create(&part).map_err(failed)?;
            let fetched = from.fetch(name, (about.size, &stamp(about)), &file);
            let written = fetched.and_then(|()| {
                let written = file.sync_data().and_then(|()| fs::rename(&part, &path));
                written.map_err(failed)
            });
            if written.is_err() {
                let _ = fs::remove_file(&part);
            }
            written?;
        }
        if let Some(file) = open_in(&here, name) {
            state.sent.insert(name.clone(), version(&file)?);
        }
    }
    keep_state(&here, STORE, there.as_deref(), serde_json::json!(state))?;
    let files = plural(names.len(), "file");
    Ok(Some(format!("{files} copied from {}", from.url())))
}
