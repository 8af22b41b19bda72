//! The store of runs: a redb file with their state, objects by content, a folder of each attempt.
//!
//! ```text
//! .phalanx/flow/state.redb             runs, nodes (a task of a run), cache entries
//! .phalanx/flow/engine.lock            locked and named by the engine that runs here
//! .phalanx/flow/objects/HA/HASH        files and folders by content
//! .phalanx/flow/runs/RUN/TASK/ATTEMPT  log, work folder
//! ```

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use phalanx_base::error::{Error, ErrorKind, Result};
use phalanx_base::files::{Dir, create_folder};
use redb::{ConcurrencyMode, Database, ReadableDatabase, ReadableTable, TableDefinition};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::objects::{Known, Object, Objects, cannot};
use crate::spec::Workflow;

type Table = TableDefinition<'static, &'static str, &'static [u8]>;
const RUNS: Table = TableDefinition::new("runs");
/// By `RUN/TASK`.
const NODES: Table = TableDefinition::new("nodes");
/// By the key of a task's call.
const CACHE: Table = TableDefinition::new("cache");
/// By path.
const CONTENTS: Table = TableDefinition::new("contents");

/// `runs`: the highest number of a run that was removed, or higher.
const NUMBERS: Table = TableDefinition::new("numbers");

const STATE: &str = "state.redb";

/// A value of an input or output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Item {
    Value(Json),
    Object(Object),
}

pub(crate) type Items = BTreeMap<String, Item>;

/// The files and folders in `items`, with their names.
pub(crate) fn objects_in(items: &Items) -> impl Iterator<Item = (&String, &Object)> {
    items.iter().filter_map(|(name, item)| match item {
        Item::Object(object) => Some((name, object)),
        Item::Value(_) => None,
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    Waiting,
    Running,
    Done,
    Failed,
    /// A task that this one needs has failed.
    Skipped,
    /// Of a run: stopped by a signal, or its engine died. It can be resumed.
    Interrupted,
    Canceled,
}

impl State {
    pub fn name(self) -> &'static str {
        match self {
            State::Waiting => "waiting",
            State::Running => "running",
            State::Done => "done",
            State::Failed => "failed",
            State::Skipped => "skipped",
            State::Interrupted => "interrupted",
            State::Canceled => "canceled",
        }
    }
}

/// One run of a workflow.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Run {
    pub number: u64,
    pub state: State,
    /// Milliseconds since 1970, as all times here.
    pub started: u64,
    pub ended: Option<u64>,
    /// How limits are enforced.
    pub limits: String,
    pub inputs: Items,
    /// Constant files and folders of tasks, by `TASK.INPUT`.
    pub constants: Items,
    /// Where files and folders of `inputs` and `constants` were copied from, by SHA-256.
    #[serde(default)]
    pub sources: BTreeMap<String, PathBuf>,
    pub outputs: Items,
    pub workflow: Workflow,
}

/// A task of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Node {
    pub state: State,
    pub inputs: Items,
    pub outputs: Items,
    /// The run whose result is used.
    pub cached: Option<String>,
    pub attempts: Vec<Attempt>,
}

impl Node {
    pub fn new() -> Node {
        Node {
            state: State::Waiting,
            inputs: Items::new(),
            outputs: Items::new(),
            cached: None,
            attempts: Vec::new(),
        }
    }
}

/// One start of a task's program.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Attempt {
    pub started: u64,
    pub ended: Option<u64>,
    /// How it ended: `done`, `exit code 1`, ...; `None` while it runs.
    pub end: Option<String>,
    /// Whether it counts as one of the retries: not if the engine ended it.
    pub counts: bool,
    pub limits: String,
    pub gpus: Vec<String>,
}

impl Attempt {
    /// One that starts now.
    pub fn new(limits: String, gpus: Vec<String>) -> Attempt {
        Attempt {
            started: now(),
            ended: None,
            end: None,
            counts: true,
            limits,
            gpus,
        }
    }
}

/// A result that later runs may use.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Cached {
    pub task: String,
    pub version: String,
    pub run: String,
    pub time: u64,
    pub outputs: Items,
}

pub(crate) use phalanx_base::unix_ms as now;

#[derive(Clone)]
pub(crate) struct Store {
    pub dir: PathBuf,
    pub objects: Arc<Objects>,
    db: Arc<Database>,
}

impl Store {
    /// Opens the store in `dir`, which must exist.
    pub fn open(dir: &Path) -> Result<Store> {
        if !dir.join(STATE).exists() {
            return Err(Error::usage(format!("no runs in {}", dir.display()))
                .note("try", "`phalanx flow run` first, or --store DIR"));
        }
        Store::create(dir)
    }

    /// Opens the store in `dir`, creating it if needed.
    pub fn create(dir: &Path) -> Result<Store> {
        let dir = std::path::absolute(dir)?;
        make_private(&dir)?;
        let mut builder = Database::builder();
        // `show` and `cancel` work while an engine runs.
        builder.set_concurrency_mode(ConcurrencyMode::MultiWriter);
        builder.set_cache_size(16 << 20);
        let path = dir.join(STATE);
        if !path.exists() {
            // Under another name until it is whole: redb does not repair a half-made file.
            let new = format!(".{STATE}.{}", std::process::id());
            let folder = Dir::open(&dir)?;
            drop(folder.open_private(&new)?);
            let made = builder.create(dir.join(&new)).and_then(Database::close);
            made.map_err(|error| failed("create", &dir, error))?;
            // Another process may have made one meanwhile.
            if renameat_with(CWD, dir.join(&new), CWD, &path, RenameFlags::NOREPLACE).is_err() {
                match path.exists() {
                    true => folder.remove(&new)?,
                    false => folder.rename(&new, STATE)?,
                }
            }
            folder.sync()?;
        }
        tighten(&path, 0o600)?;
        let db = (builder.open(&path)).map_err(|error| failed("open", &dir, error))?;
        Ok(Store {
            objects: Arc::new(Objects::new(&dir)),
            dir,
            db: Arc::new(db),
        })
    }

    /// Puts right what a killed engine left. Only the engine that has the lock may call it.
    pub fn tidy(&self) -> Result<()> {
        self.objects.clear_tmp()?;
        let known = self.all::<Known>(CONTENTS)?.into_iter();
        (self.objects).learn(known.map(|(path, known)| (path.into(), known)));
        Ok(())
    }

    pub fn run_dir(&self, run: &str) -> PathBuf {
        self.dir.join("runs").join(run)
    }

    pub fn attempt_dir(&self, run: &str, task: &str, attempt: usize) -> PathBuf {
        self.run_dir(run).join(task).join(attempt.to_string())
    }

    fn read<T: DeserializeOwned>(&self, table: Table, key: &str) -> Result<Option<T>> {
        let bytes = (|| {
            let tables = self.db.begin_read()?;
            let table = match tables.open_table(table) {
                Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
                table => table?,
            };
            Ok::<_, redb::Error>(table.get(key)?.map(|found| found.value().to_vec()))
        })();
        let bytes = bytes.map_err(|error| failed("read", &self.dir, error))?;
        bytes.map(|bytes| self.decode(&bytes)).transpose()
    }

    fn all<T: DeserializeOwned>(&self, table: Table) -> Result<Vec<(String, T)>> {
        let rows = (|| {
            let tables = self.db.begin_read()?;
            let table = match tables.open_table(table) {
                Err(redb::TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
                table => table?,
            };
            let mut rows = Vec::new();
            for row in table.iter()? {
                let (key, value) = row?;
                rows.push((key.value().to_owned(), value.value().to_vec()));
            }
            Ok::<_, redb::Error>(rows)
        })();
        let rows = rows.map_err(|error| failed("read", &self.dir, error))?;
        rows.into_iter()
            .map(|(key, value)| Ok((key, self.decode(&value)?)))
            .collect()
    }

    fn decode<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T> {
        serde_json::from_slice(bytes).map_err(|error| {
            let message = format!("{} was written by another version", self.dir.display());
            Error::usage(message).caused_by(error)
        })
    }

    /// Runs in the order of their start.
    pub fn runs(&self) -> Result<Vec<(String, Run)>> {
        let mut runs = self.all::<Run>(RUNS)?;
        runs.sort_by_key(|(_, run)| run.number);
        Ok(runs)
    }

    /// The number of the next run: none has had it, not even one that was removed.
    pub fn next_number(&self) -> Result<u64> {
        let last = self.runs()?.last().map_or(0, |(_, run)| run.number);
        let removed: u64 = self.read(NUMBERS, "runs")?.unwrap_or(0);
        Ok(last.max(removed) + 1)
    }

    /// The run `name`, or the one that was started last: `last`.
    pub fn find(&self, name: &str) -> Result<(String, Run)> {
        let mut runs = self.runs()?;
        let at = match name {
            "last" => runs.len().checked_sub(1),
            name => runs.iter().position(|(id, _)| id == name),
        };
        match at {
            Some(at) => Ok(runs.swap_remove(at)),
            None => Err(
                Error::usage(format!("no run {name:?} in {}", self.dir.display()))
                    .note("see", "phalanx flow list"),
            ),
        }
    }

    pub fn node(&self, run: &str, task: &str) -> Result<Node> {
        let node = self.read(NODES, &node_key(run, task))?;
        Ok(node.unwrap_or_else(Node::new))
    }

    pub fn cached(&self, key: &str) -> Result<Option<Cached>> {
        self.read(CACHE, key)
    }

    pub fn cache(&self) -> Result<Vec<(String, Cached)>> {
        self.all(CACHE)
    }

    /// Makes all changes of `change`, or none. They are on the disk when this returns.
    pub fn write(&self, change: impl FnOnce(&mut Changes)) -> Result<()> {
        let mut changes = Changes(Vec::new());
        change(&mut changes);
        for (path, known) in self.objects.changes() {
            let Some(path) = path.to_str() else { continue };
            match known {
                Some(known) => changes.put(CONTENTS, path.to_owned(), &known),
                None => changes.0.push((CONTENTS, path.to_owned(), None)),
            }
        }
        (|| {
            let transaction = self.db.begin_write()?;
            for (table, key, value) in &changes.0 {
                let mut table = transaction.open_table(*table)?;
                match value {
                    Some(bytes) => table.insert(key.as_str(), bytes.as_slice())?,
                    None => table.remove(key.as_str())?,
                };
            }
            transaction.commit()?;
            Ok::<_, redb::Error>(())
        })()
        .map_err(|error| failed("write", &self.dir, error))
    }

    /// Changes the run `id`, as it is in the store, whatever other processes write.
    pub fn update(&self, id: &str, change: impl FnOnce(&mut Run)) -> Result<Run> {
        let changed = (|| {
            let transaction = self.db.begin_write()?;
            let mut table = transaction.open_table(RUNS)?;
            let found = table.get(id)?.map(|found| found.value().to_vec());
            let mut run: Run = match self.decode(&found.unwrap_or_default()) {
                Ok(run) => run,
                Err(error) => return Ok(Err(error)),
            };
            change(&mut run);
            table.insert(id, serde_json::to_vec(&run).unwrap_or_default().as_slice())?;
            drop(table);
            transaction.commit()?;
            Ok::<_, redb::Error>(Ok(run))
        })();
        changed.map_err(|error| failed("write", &self.dir, error))?
    }
}

/// Changes of one transaction.
pub(crate) struct Changes(Vec<(Table, String, Option<Vec<u8>>)>);

impl Changes {
    fn put<T: Serialize>(&mut self, table: Table, key: String, value: &T) {
        // Maps with text as keys, and finite numbers: always JSON.
        let bytes = serde_json::to_vec(value).unwrap_or_default();
        self.0.push((table, key, Some(bytes)));
    }

    pub fn run(&mut self, id: &str, run: &Run) {
        self.put(RUNS, id.to_owned(), run);
    }

    pub fn node(&mut self, run: &str, task: &str, node: &Node) {
        self.put(NODES, node_key(run, task), node);
    }

    pub fn cache(&mut self, key: &str, entry: &Cached) {
        self.put(CACHE, key.to_owned(), entry);
    }

    pub fn remove_run(&mut self, id: &str, run: &Run) {
        self.0.push((RUNS, id.to_owned(), None));
        let nodes = run.workflow.tasks.iter();
        self.0
            .extend(nodes.map(|task| (NODES, node_key(id, &task.name), None)));
    }

    pub fn last_number(&mut self, number: u64) {
        self.put(NUMBERS, "runs".to_owned(), &number);
    }

    pub fn forget(&mut self, key: &str) {
        self.0.push((CACHE, key.to_owned(), None));
    }
}

/// Makes the folder of a store, or one that is there, inaccessible to other users: inputs of tasks
/// are in it as they are, with passwords and keys.
fn make_private(dir: &Path) -> Result<()> {
    create_folder(dir.parent().unwrap_or(dir))?;
    let made = DirBuilder::new().mode(0o700).create(dir);
    let is_ours = made.is_ok() || dir.join(STATE).exists();
    create_folder(dir)?;
    if is_ours {
        tighten(dir, 0o700)?;
    }
    // Of a folder with other files, only what belongs to the store.
    for name in ["runs", "objects"] {
        let folder = dir.join(name);
        if folder.exists() {
            tighten(&folder, 0o700)?;
        } else {
            let _ = DirBuilder::new().mode(0o700).create(&folder);
        }
    }
    Ok(())
}

/// Takes access from others, if `path` is this user's.
fn tighten(path: &Path, mode: u32) -> Result<()> {
    let found = fs::metadata(path).map_err(|error| cannot("read", path, error))?;
    let is_open = found.mode() & 0o077 != 0;
    if is_open && found.uid() == rustix::process::geteuid().as_raw() {
        fs::set_permissions(path, Permissions::from_mode(mode))
            .map_err(|error| cannot("make private", path, error))?;
    }
    Ok(())
}

fn node_key(run: &str, task: &str) -> String {
    format!("{run}/{task}")
}

fn failed(action: &str, dir: &Path, error: impl Into<redb::Error>) -> Error {
    let path = dir.join(STATE);
    match error.into() {
        redb::Error::Io(error) => cannot(action, &path, error),
        error => Error::new(
            ErrorKind::System,
            format!("cannot {action} {}", path.display()),
        )
        .caused_by(error),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A run of a workflow with the tasks `a` and `b`.
    pub fn run(number: u64, state: State, time: u64) -> Run {
        let text =
            "name = \"w\"\n[tasks.a]\ncommand = [\"true\"]\n[tasks.b]\ncommand = [\"true\"]\n";
        let workflow = Workflow::from_toml(text, Path::new("/w"), "flow.toml");
        Run {
            number,
            state,
            started: time,
            ended: (state != State::Running).then_some(time),
            limits: String::new(),
            inputs: Items::new(),
            constants: Items::new(),
            outputs: Items::new(),
            sources: BTreeMap::new(),
            workflow: workflow.unwrap_or_else(|error| panic!("{}", error.chain())),
        }
    }

    #[test]
    fn records_of_older_versions_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(dir.path()).unwrap();
        let run = run(1, State::Running, 5);
        let mut old = serde_json::to_value(&run).unwrap();
        old["engine"] = 1.into();
        old["cancel"] = false.into();
        let write = |changes: &mut Changes| changes.put(RUNS, "w-1".to_owned(), &old);
        store.write(write).unwrap();
        let (id, found) = store.find("last").unwrap();
        assert_eq!((&*id, found.started), ("w-1", run.started));
        assert_eq!(store.next_number().unwrap(), 2);
    }

    #[test]
    fn others_do_not_reach_a_store() {
        let dir = tempfile::tempdir().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        let open = |path: &Path, mode| {
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        };
        let path = dir.path().join("p/flow");
        let store = Store::create(&path).unwrap();
        assert_eq!(mode(&path), 0o700);
        assert_eq!(mode(&path.join(STATE)), 0o600);
        assert_eq!(mode(&path.join("runs")), 0o700);
        assert_ne!(mode(&dir.path().join("p")), 0o700, "not its parent");
        drop(store);
        // Of an older version.
        open(&path, 0o755);
        open(&path.join(STATE), 0o644);
        open(&path.join("runs"), 0o775);
        Store::open(&path).unwrap();
        assert_eq!(mode(&path), 0o700);
        assert_eq!(mode(&path.join(STATE)), 0o600);
        assert_eq!(mode(&path.join("runs")), 0o700);
        // A folder with other files stays as it is.
        let shared = dir.path().join("shared");
        fs::create_dir(&shared).unwrap();
        open(&shared, 0o755);
        Store::create(&shared).unwrap();
        assert_eq!(mode(&shared), 0o755);
        assert_eq!(mode(&shared.join(STATE)), 0o600);
        assert_eq!(mode(&shared.join("objects")), 0o700);
    }
}
