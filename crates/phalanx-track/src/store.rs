//! A copy of a run's folder in an object store, with its checkpoints.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use phalanx_base::files::{Dir, as_typed, try_atomic_write};
use phalanx_base::format::plural;
use phalanx_object::{Objects, Patience};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::files::{Version, files_of, open_in, version};
use crate::follow::{LARGEST_FILE, RUN_FILE};
use crate::{Error, Result, Tracker};

/// Folders of a run that are of no use elsewhere.
const LEFT_OUT: [&str; 2] = ["flight", "wandb"];
/// The folder of checkpoints.
const CHECKPOINTS: &str = "checkpoints/";
/// How often files are sent, at most.
const EVERY: Duration = Duration::from_secs(5);
/// How long the start of a training waits for a server that does not answer.
const FIRST_WAIT: Duration = Duration::from_secs(20);
/// How long the end of a training waits.
const LAST_WAIT: Duration = Duration::from_secs(300);

/// Keeps a copy of a run's folder, checkpoints too, below a URL of an object store while it grows. What the folder no longer
/// has is removed there after all that it has now was sent.
pub struct Copy {
    to: Objects,
    dir: PathBuf,
    state: State,
    last: Option<Instant>,
}

/// What the next process must know.
#[derive(Default, Serialize, Deserialize)]
struct State {
    url: String,
    sent: BTreeMap<String, Version>,
}

/// A manifest comes after the files that it names.
fn in_order(names: &mut [String]) {
    names.sort_by_cached_key(|name| {
        (
            name.starts_with(CHECKPOINTS) && name.ends_with(".json"),
            name.clone(),
        )
    });
}

impl Copy {
    /// One below `url`, `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`. The environment has the credentials.
    ///
    /// # Errors
    ///
    /// `Usage` for another URL, or variables that the store does not understand.
    pub fn new(url: &str) -> Result<Copy> {
        Ok(Copy {
            to: Objects::open(url, Patience::default())?,
            dir: PathBuf::new(),
            state: State::default(),
            last: None,
        })
    }

    fn sync(&mut self) -> Result<()> {
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
        let gone: Vec<String> = sent
            .keys()
            .filter(|name| !names.contains(name))
            .cloned()
            .collect();
        for name in gone.into_iter().filter(|_| is_whole) {
            self.to.delete(&name)?;
            sent.remove(&name);
        }
        self.last = Some(Instant::now());
        Ok(())
    }

    fn now_and_then(&mut self) -> Result<()> {
        match self.last {
            Some(last) if last.elapsed() < EVERY => Ok(()),
            _ => self.sync(),
        }
    }
}

impl Tracker for Copy {
    fn name(&self) -> &str {
        "store"
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

/// Before a training in `dir` that keeps its copy at `url`: if it is to be resumed, `resumes`, the run that is there is copied
/// to `dir`. Returns what was copied, in words. *Blocks* until that is done.
///
/// # Errors
///
/// `Usage`, where there is another run that is not to be resumed, or for what the user can mend about the URL; those of
/// reading and writing.
pub(crate) fn prepare(url: &str, dir: &Path, resumes: bool) -> Result<Option<String>> {
    let patience = Patience {
        total: FIRST_WAIT,
        ..Patience::default()
    };
    let from = Objects::open(url, patience)?;
    let mut names = from.names()?;
    let is_safe = |name: &String| name.split('/').all(|part| !part.starts_with('.'));
    names.retain(is_safe);
    if !names.iter().any(|name| name == RUN_FILE) {
        return Ok(None);
    }
    if !resumes {
        let (mut there, here) = (
            Vec::new(),
            Dir::open(dir).and_then(|dir| dir.read(RUN_FILE, LARGEST_FILE)),
        );
        from.get(RUN_FILE, &mut there)?;
        let id = |text: &[u8]| Some(serde_json::from_slice::<Value>(text).ok()?["id"].clone());
        if id(&there) == here.ok().flatten().and_then(|here| id(&here)) {
            return Ok(None);
        }
        let what = format!("{url} has another run");
        let fix = "another --output-url; or --resume auto, which continues that run";
        return Err(Error::usage(what).note("fix", fix));
    }
    in_order(&mut names);
    for name in &names {
        let path = dir.join(name);
        std::fs::create_dir_all(path.parent().unwrap_or(dir))
            .map_err(|e| Error::io("cannot create folder", &path, e))?;
        try_atomic_write(&path, |out| from.get(name, out))?;
    }
    let files = plural(names.len(), "file");
    Ok(Some(format!("{files} copied from {url}")))
}
